"""Estimates seconds of calls and iterations, and the floor under them, from compiled programs.

The programs are compiled for a TPU. Nothing here is a measurement.
"""

import functools
import sys

import jax

from specdec_jax.analysis import formulas
from specdec_jax.analysis.matmul_roofline import Products
from specdec_jax.analysis.report import paper
from specdec_jax.files.progress import show_waiting
from specdec_jax.models.network import Network
from specdec_jax.speculative.trees import Tree
from tools.compiled_text import (
    bodies,
    computations,
    counted_bodies,
    estimated_cycles,
    kernel_bytes,
)
from tools.lowering import EAGLE, WITHOUT_MODEL, Case, size
from tools.tpu_chips import Chip

GB = 1e9


def read_text(program: jax.stages.Compiled) -> str | None:
    """Returns a compiled program's text; None if JAX cannot read it."""
    try:
        return program.as_text()
    except jax.errors.JaxRuntimeError as error:
        print(f"no text of a program: {str(error)[:120]}", file=sys.stderr)
        return None


def estimated_seconds(lines: list[str], chip: Chip) -> float:
    """Returns the compiler's estimate of one run of a computation without its loops.

    A Pallas kernel is estimated by its bytes at the chip's bandwidth.
    """
    kernels = kernel_bytes(lines) / (chip.bandwidth * GB)
    return estimated_cycles(lines) / (chip.clock * 1e9) + kernels


def iteration_seconds(text: str, chip: Chip, gamma: int, by_pairs: bool) -> float:
    """Returns the estimate of one pass of the decode loop with the γ steps of a draft.

    The drafter has two loops: one to catch up, over two positions a step, and one for the draft. If
    each step of the draft is over two positions, there is nothing to catch up with. Otherwise the
    first step is counted in the first loop, where it is after a full acceptance in any row.

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
    if by_pairs:  # a draft of one step is no loop
        return seconds + gamma * inner[-1] if len(inner) > 1 else seconds
    return seconds + inner[0] + (gamma - 1) * inner[-1]


def pass_seconds(text: str, chip: Chip, steps: int) -> float:
    """Returns the estimate of one pass of the decode loop, with the passes of the loops in it.

    A loop that does not count up to a constant is a draft of `steps` steps.
    """
    parts = computations(text)

    def seconds(name: str) -> float:
        inner = counted_bodies(parts, name)
        passes = sum((steps if n is None else n) * seconds(body) for body, n in inner)
        return estimated_seconds(parts[name], chip) + passes

    (loop,) = bodies(parts["ENTRY"])
    return seconds(loop)


def walk_seconds(text: str, chip: Chip, gamma: int) -> float:
    """Returns the estimate of one pass of the loop of a tree or a beam search.

    Their drafts are unrolled. The inner loops verify the scored nodes, over at most γ + 1 levels.
    """
    parts = computations(text)
    (loop,) = bodies(parts["ENTRY"])
    inner = sum(estimated_seconds(parts[name], chip) for name in bodies(parts[loop]))
    return estimated_seconds(parts[loop], chip) + (gamma + 1) * inner


def _estimate_call(lowered: jax.stages.Lowered, chip: Chip) -> float:
    """Compiles a call and returns the estimate of one run, in seconds."""
    return estimated_seconds(computations(lowered.compile().as_text())["ENTRY"], chip)


@functools.cache
def call_seconds(case: Case, chip: Chip, preset: str, width: int, drafts: bool = False) -> float:
    """Returns the compiler's estimate of a call over `width` positions, in seconds."""
    with show_waiting(f"compiling a call of {preset} over {width} position{'s' * (width != 1)}"):
        return _estimate_call(case.lowered_call(preset, width, drafts), chip)


def tree_call_seconds(case: Case, chip: Chip, tree: Tree) -> float:
    """Returns the compiler's estimate of a target call over the nodes of a tree, in seconds."""
    with show_waiting(f"compiling a call of {case.target} over {tree.size} nodes"):
        return _estimate_call(case.lowered_tree_call(tree), chip)


def iteration_ms(case: Case, chip: Chip, text: str | None) -> float | None:
    """Returns the estimate of an iteration, from the loop's text or from single calls.

    Without the loop's text, a chain of a drafting model is estimated from calls over γ + 1 and over
    two positions. The result is None if JAX cannot read their text either, and for all else.
    """
    gamma, walks = case.gamma, case.tree is not None or case.beams is not None
    reads_states = case.drafter.startswith(EAGLE)
    steps = bool(gamma) and (reads_states or case.drafter in WITHOUT_MODEL)
    if (walks or steps) and not text:
        return None
    try:
        if text and walks:
            seconds = walk_seconds(text, chip, gamma)
        elif text and steps:  # the first token of one that reads states takes no step
            seconds = pass_seconds(text, chip, gamma - reads_states)
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
    """Returns the time of reading the bytes of an iteration at the chip's bandwidth.

    Args:
      networks: networks, and how often an iteration reads the weights of each one's step.
      caches: bytes of the caches, which it reads once.
      chip: the chip.
    """
    weights = sum(
        count * size(Products.from_network(network).weights) for count, network in networks
    )
    return round(1e3 * (weights + caches) / (chip.bandwidth * GB), 3)


def estimate_calls(case: Case, chip: Chip) -> dict[str, float]:
    """Returns c and v of a case, from the estimates of single calls as they are compiled."""
    seconds = functools.partial(call_seconds, case, chip)
    step, wide = seconds(case.target, 1), seconds(case.target, case.gamma + 1)
    draft = seconds(case.drafter, 1, drafts=True)
    return {
        "target_call_1_ms": round(1e3 * step, 3),
        "c": round(draft / step, 4),
        "v": round(wide / step, 3),
    }


def times(case: Case, chip: Chip) -> dict:
    """Returns c, v and the improvement by the compiler's estimates for the rows of table 2.

    α is the paper's. The pair and the γ of `case` are not used. There are two results: with single
    steps as compiled, and with the time of two positions for them. They differ for batches of
    several rows, where the estimate of one position may exceed that of two; calls of one row over
    up to eight positions are all computed over eight.
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
            c = seconds(drafter, width, drafts=True) / step
            v = seconds(target, row.gamma + 1) / step
            gain = formulas.improvement(row.alpha, row.gamma, c, v)
            line[name] = {"c": round(c, 4), "v": round(v, 3), "improvement": round(gain, 2)}
        found.append(line)
    steps = {
        f"target_call_{width}_ms": round(1e3 * seconds(target, width), 3)
        for width in (1, 2, 4, 6, 8)
    }
    return {"what": "the compiler's own estimate; not a measurement", **steps, "rows": found}
