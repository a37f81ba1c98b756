"""Estimates, from what a TPU's compiler wrote, the seconds of calls and iterations and the floor
under them. Nothing here is a measurement."""

import functools
import sys

import jax

from specdec_jax.analysis import formulas
from specdec_jax.analysis.matmul_roofline import Products
from specdec_jax.analysis.report import paper
from specdec_jax.decoding.progress import waiting
from specdec_jax.models.network import Network
from specdec_jax.speculative.trees import Tree
from tools.compiled_text import bodies, computations, estimated_cycles, kernel_bytes
from tools.lowering import Case, size
from tools.tpu_chips import Chip

GB = 1e9


def text_of(program) -> str | None:
    """Returns a compiled program's text; None where JAX cannot read what the chip's compiler wrote."""
    try:
        return program.as_text()
    except jax.errors.JaxRuntimeError as error:
        print(f"no text of a program: {str(error)[:120]}", file=sys.stderr)
        return None


def estimated_seconds(lines: list[str], chip: Chip) -> float:
    """Returns the compiler's estimate of one run of a computation without its loops, in which a
    kernel in Pallas takes what its bytes take at the chip's bandwidth."""
    return estimated_cycles(lines) / (chip.clock * 1e9) + kernel_bytes(lines) / (
        chip.bandwidth * GB
    )


def iteration_seconds(text: str, chip: Chip, gamma: int, by_pairs: bool) -> float:
    """Returns the estimate of one pass of the decode loop with the γ steps of a draft.

    The drafter has two loops: one to catch up, over two positions a step, and one for the draft.
    Where each step of the draft is over two positions, there is nothing to catch up with; else the
    first loop is taken to make the first step, since after a full acceptance in any row it does.

    Args:
      text: text of the compiled program.
      chip: the chip that it was compiled for.
      gamma: γ.
      by_pairs: whether every draft step is over two positions.
    """
    parts = computations(text)
    (loop,) = bodies(parts["ENTRY"])
    seconds = estimated_seconds(parts[loop], chip)
    inner = [estimated_seconds(parts[name], chip) for name in bodies(parts[loop])]
    if not gamma:
        return seconds
    if by_pairs:
        return (
            seconds + gamma * inner[-1] if len(inner) > 1 else seconds
        )  # a draft of one step is no loop
    return seconds + inner[0] + (gamma - 1) * inner[-1]


def walk_seconds(text: str, chip: Chip, gamma: int) -> float:
    """Returns the estimate of one pass of the loop of a tree or a beam search, whose drafts are
    written out; its inner loops walk through what was scored, over γ + 1 levels at most."""
    parts = computations(text)
    (loop,) = bodies(parts["ENTRY"])
    inner = sum(estimated_seconds(parts[name], chip) for name in bodies(parts[loop]))
    return estimated_seconds(parts[loop], chip) + (gamma + 1) * inner


def _of_a_call(lowered, chip: Chip) -> float:
    """Compiles a call and returns the estimate of one run, in seconds."""
    return estimated_seconds(computations(lowered.compile().as_text())["ENTRY"], chip)


@functools.cache
def call_seconds(case: Case, chip: Chip, preset: str, width: int, drafts: bool = False) -> float:
    """Returns the compiler's estimate of a call over `width` positions, in seconds."""
    with waiting(f"compiling a call of {preset} over {width} position{'s' * (width != 1)}"):
        return _of_a_call(case.lowered_call(preset, width, drafts), chip)


def tree_call_seconds(case: Case, chip: Chip, tree: Tree) -> float:
    """Returns the compiler's estimate of a target call over the nodes of a tree, in seconds."""
    with waiting(f"compiling a call of {case.target} over {tree.size} nodes"):
        return _of_a_call(case.lowered_tree_call(tree), chip)


def iteration_ms(case: Case, chip: Chip, text: str | None) -> float | None:
    """Returns the estimate of an iteration from the loop's text; without it, from single calls over
    γ + 1 and over two positions; None where JAX cannot read theirs either, or of a tree or beams.
    """
    gamma, walks = case.gamma, case.tree is not None or case.beams is not None
    if walks and not text:
        return None
    try:
        if text and walks:
            seconds = walk_seconds(text, chip, gamma)
        elif text:
            seconds = iteration_seconds(text, chip, gamma, bool(gamma) and case.drafts_by_pairs())
        else:
            draft = gamma and gamma * call_seconds(case, chip, case.drafter, 2, drafts=True)
            seconds = call_seconds(case, chip, case.target, max(gamma + 1, 2)) + draft
    except jax.errors.JaxRuntimeError as error:
        print(f"no estimate: {str(error)[:120]}", file=sys.stderr)
        return None
    return round(1e3 * seconds, 3)


def floor_ms(networks: list[tuple[int, Network]], caches: int, chip: Chip) -> float:
    """Returns what the bytes that an iteration reads take at the chip's bandwidth.

    Args:
      networks: networks, and how often an iteration reads the weights of each one's step.
      caches: bytes of the caches, which it reads once.
      chip: the chip.
    """
    weights = sum(
        count * size(Products.from_network(network).kernels) for count, network in networks
    )
    return round(1e3 * (weights + caches) / (chip.bandwidth * GB), 3)


def times(case: Case, chip: Chip) -> dict:
    """Returns c, v and the improvement by the compiler's estimates for the rows of table 2, with
    the paper's α; of `case`, neither the pair nor γ counts.

    There are two results: with single steps as they are compiled, and as if they took what two
    positions take. They differ for several rows, where an estimate of one position may be more than
    that of two; one row's calls over up to eight positions are all computed over eight.
    """
    seconds = functools.partial(call_seconds, case, chip)
    target, found = "t5_1_1/xxl", []
    for row in paper.TABLE_4:
        drafter = f"t5_1_1/{row.drafter.removeprefix('T5-')}"
        line = {
            "task": row.task,
            "drafter": drafter,
            "temperature": row.temperature,
            "gamma": row.gamma,
            "alpha_paper": row.alpha,
            "c_paper": row.cost_ratio,
            "expected_paper": row.expected,
            "measured_paper": row.measured,
        }
        for name, width in (("as compiled", 1), ("as for two positions", 2)):
            step = seconds(target, width)
            c, v = (
                seconds(drafter, width, drafts=True) / step,
                seconds(target, row.gamma + 1) / step,
            )
            gain = formulas.improvement(row.alpha, row.gamma, c, v)
            line[name] = {"c": round(c, 4), "v": round(v, 3), "improvement": round(gain, 2)}
        found.append(line)
    steps = {
        f"target_call_{width}_ms": round(1e3 * seconds(target, width), 3)
        for width in (1, 2, 4, 6, 8)
    }
    return {"what": "the compiler's own estimate; not a measurement", **steps, "rows": found}
