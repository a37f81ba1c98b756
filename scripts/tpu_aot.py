"""Compiles one speculative iteration ahead of time for a TPU, without a TPU, and says whether it fits.

    pip install '.[tpu-aot]'
    JAX_PLATFORMS=cpu python scripts/tpu_aot.py --target=t5_1_1/xxl --drafter=t5_1_1/small --gamma=7
    JAX_PLATFORMS=cpu python scripts/tpu_aot.py --chip=all     # a line for each TPU: does it fit, how fast at best
    JAX_PLATFORMS=cpu python scripts/tpu_aot.py --times        # also estimates times, for table 2 of the paper
    JAX_PLATFORMS=cpu python scripts/tpu_aot.py --tree=widths:4,3,2,1  # a tree of 65 nodes in the place of γ
    JAX_PLATFORMS=cpu python scripts/tpu_aot.py --mesh=1x4     # on the four chips of a v4-8
    JAX_PLATFORMS=cpu python scripts/tpu_aot.py --num_beams=4 --gamma=3    # speculative beam search

The programs are the package's own: `prefill` (both encoders) and `advance` (draft γ, verify,
commit, in its loop); for a beam search `begin` and `search`, which the package runs as one program.
It prints the compiler's memory analysis, the arrays of more than a megabyte that loop bodies copy,
and with `--times` the compiler's own estimate of single calls; nothing here is a measurement. On a
mesh all sizes are for one device, the collectives of the loop are counted, and every device holds
the whole drafter. Exit code 1 if the programs do not fit.

With `--chip=all` a process for each chip compiles, and the chip's line follows as soon as it is
there: the memory that is needed, the estimate of an iteration (one pass of the loop, with γ passes
of the drafter's loop in it, or single calls where JAX cannot read the loop's text; a kernel in
Pallas, which the compiler does not estimate, counts as its bytes over the bandwidth), and the floor
under it: the bytes of the decoders' weights and caches over the bandwidth. Standard error says what
is being compiled.
"""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import Mesh

from specdec_jax.analysis import formulas
from specdec_jax.analysis.compiled_text import (
    bodies,
    collectives,
    computations,
    estimated_cycles,
    kernel_bytes,
    loop_copies,
)
from specdec_jax.analysis.products import Products
from specdec_jax.analysis.report import paper
from specdec_jax.analysis.tpu_chips import CHIPS, chip_line
from specdec_jax.decoding.beams import BeamOptions, begin
from specdec_jax.decoding.inputs import bucket, slots
from specdec_jax.decoding.loop import advance
from specdec_jax.decoding.progress import waiting
from specdec_jax.decoding.request import prefill
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.files.writing import write_file
from specdec_jax.models import layouts
from specdec_jax.models.network import Network, fuses, heads_together, random_params
from specdec_jax.models.nodes import WindowNodes
from specdec_jax.models.sharding import AXES, ShardingRules, parse_mesh
from specdec_jax.models.t5 import PRESETS
from specdec_jax.speculative import laws
from specdec_jax.speculative import state as speculative_state
from specdec_jax.speculative.beam_iteration import search
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.tree_text import read_tree

_CHIP = flags.DEFINE_enum("chip", "v4", [*CHIPS, "all"], "TPU to compile for; all: a table, a line for each.")
_TARGET = flags.DEFINE_enum("target", "t5_1_1/xxl", sorted(PRESETS), "Shape of the target.")
_DRAFTER = flags.DEFINE_enum("drafter", "t5_1_1/small", sorted(PRESETS), "Shape of the drafter.")
_GAMMA = flags.DEFINE_integer("gamma", 7, "Tokens drafted per iteration; 0 is plain decoding.", lower_bound=0)
_TREE = flags.DEFINE_string("tree", None, "A tree in the place of γ, as for `specdec generate`, such as widths:3,2,1.")
_BEAMS = flags.DEFINE_integer("num_beams", None, "Beams of a beam search; none without.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("beam_width", None, "Nodes of each drafted level, by default twice the beams.")
_BATCH = flags.DEFINE_integer("batch_size", 1, "Number of rows.", lower_bound=1)
_QUANTIZE = flags.DEFINE_enum("quantize", None, ["int8"], "Kernels of the target in 8 bits, inputs in bfloat16.")
_INPUT = flags.DEFINE_integer("input_length", 128, "Number of encoder positions.", lower_bound=1)
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "The most new tokens.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is argmax.", lower_bound=0)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Another topology of the chip, such as v4:2x2x2; the first devices are used."
)
_MESH = flags.DEFINE_string("mesh", None, "DATAxMODEL devices, as for `specdec generate`; by default one device.")
_MEMORY = flags.DEFINE_float("memory_gb", None, "Memory of a device, in GB (10^9 bytes), if not the chip's.")
_TIMES = flags.DEFINE_bool("times", False, "Estimate the time of single calls too, for the rows of table 2.")
_ITERATION = flags.DEFINE_bool("iteration", False, "Estimate the time of an iteration too, as --chip=all does.")
_CLOCK = flags.DEFINE_float("clock_ghz", None, "Clock in cycles per nanosecond, if not the chip's.", lower_bound=0.01)
_TEXT = flags.DEFINE_string("hlo", None, "File for the compiled loop's HLO text.")

GB = 1e9


def abstract_network(preset: str, drafts: bool = False) -> Network:
    """Returns the shapes of a bfloat16 network in the loop's layout for a TPU (no panels); a target's kernels may be
    in 8 bits."""
    rules = placement(drafts)
    fused, in_8_bits = fuses(rules), _QUANTIZE.value and not drafts
    config = dataclasses.replace(PRESETS[preset], dtype="bfloat16")

    def build():
        params = random_params(jax.random.key(0), module=config.module(), dtype=config.dtype)
        if in_8_bits:
            params = layouts.round_params(params, None, config.logits_via_embedding)
        return layouts.pack(params, panels=False, fused=fused)

    def laid_out(path, leaf):
        if rules is None:
            return leaf
        sharding = rules.of_parameter("/".join(key.key for key in path), leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree.map_with_path(laid_out, jax.eval_shape(build))
    module = (config.with_own_head() if in_8_bits else config).module(fused)
    return Network(params, module, rules, heads_together("tpu", module, rules))


def abstract_drafter(preset: str) -> ModelDrafter:
    """Returns a `ModelDrafter` of shapes only."""
    return ModelDrafter.tree_unflatten(None, (abstract_network(preset, drafts=True), None))


def size(tree) -> int:
    """Returns the bytes of all leaves of a tree of placed shapes, on one device."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def estimated_seconds(lines: list[str]) -> float:
    """Returns the compiler's estimate of one run of a computation without its loops, in which a
    kernel in Pallas takes what its bytes take at the chip's bandwidth."""
    chip = CHIPS[_CHIP.value]
    return estimated_cycles(lines) / ((_CLOCK.value or chip.clock) * 1e9) + kernel_bytes(lines) / (chip.bandwidth * 1e9)


def iteration_seconds(text: str) -> float:
    """Returns the estimate of one pass of the decode loop with the γ steps of a draft.

    The drafter has two loops: one to catch up, over two positions a step, and one for the draft.
    Where each step of the draft is over two positions, there is nothing to catch up with; else the
    first loop is taken to make the first step, since after a full acceptance in any row it does.
    """
    parts, gamma = computations(text), _GAMMA.value
    (loop,) = bodies(parts["ENTRY"])
    seconds, inner = estimated_seconds(parts[loop]), [estimated_seconds(parts[name]) for name in bodies(parts[loop])]
    if not gamma:
        return seconds
    if drafts_by_pairs():
        return seconds + gamma * inner[-1] if len(inner) > 1 else seconds  # a draft of one step is no loop
    return seconds + inner[0] + (gamma - 1) * inner[-1]


def drafts_by_pairs() -> bool:
    """Returns whether every draft step is over two positions."""
    found = []
    ask = lambda network, cache: found.append(network.pairs_are_free(cache))
    jax.eval_shape(ask, abstract_network(_DRAFTER.value, drafts=True), abstract_cache(_DRAFTER.value, True))
    return found[0]


def text_of(program) -> str | None:
    """Returns a compiled program's text; None where JAX cannot read what the chip's compiler wrote."""
    try:
        return program.as_text()
    except jax.errors.JaxRuntimeError as error:
        print(f"no text of a program: {str(error)[:120]}", file=sys.stderr)
        return None


def _tree():
    return None if _TREE.value is None else read_tree(_TREE.value)


def _gamma() -> int:
    return _GAMMA.value if _TREE.value is None else _tree().depth


@functools.cache
def _devices() -> list:
    how = {"chip_config_name": "megacore"} if _CHIP.value == "v4" else {}  # v4's two cores are one device
    return topologies.get_topology_desc(platform="tpu", topology_name=_topology(), **how).devices


def _topology() -> str:
    return _TOPOLOGY.value or CHIPS[_CHIP.value].topology


@functools.cache
def placement(drafts: bool = False) -> ShardingRules | None:
    """Returns how the target, or a drafter, lies on the mesh; None without one."""
    if not _MESH.value:
        return None
    data, model = parse_mesh(_MESH.value)
    if data * model > len(_devices()):
        raise app.UsageError(
            f"mesh: got {_MESH.value}, expected at most the {len(_devices())} devices of {_topology()}"
        )
    return ShardingRules(Mesh(np.array(_devices()[: data * model]).reshape(data, model), AXES), replicate=drafts)


def iteration_ms(text: str | None) -> float | None:
    """Returns the estimate of an iteration from the loop's text; without it, from single calls over
    γ + 1 and over two positions; None where JAX cannot read theirs either."""
    gamma = _GAMMA.value
    try:
        draft = lambda: gamma and gamma * call_seconds(_DRAFTER.value, 2, drafts=True)
        seconds = iteration_seconds(text) if text else call_seconds(_TARGET.value, max(gamma + 1, 2)) + draft()
    except jax.errors.JaxRuntimeError as error:
        print(f"no estimate: {str(error)[:120]}", file=sys.stderr)
        return None
    return round(1e3 * seconds, 3)


def place(tree, shardings=None):
    """Returns the shapes of `tree` on the TPU: by `shardings`, else where they are already, else
    whole on every device."""
    whole = jax.sharding.SingleDeviceSharding(_devices()[0]) if placement() is None else placement().sharding()
    put = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if shardings is not None:
        return jax.tree.map(put, tree, shardings)
    return jax.tree.map(lambda leaf: put(leaf, getattr(leaf, "sharding", None) or whole), tree)


@functools.partial(jax.jit, donate_argnums=3)
def call(network: Network, tokens, positions, cache):
    """Runs one call and takes the argmax of its logits."""
    logits, cache = network.decode(tokens, positions, cache)
    return laws.argmax(logits), cache


@functools.cache
def abstract_cache(preset: str, drafts: bool):
    """Returns the shapes of the cache with which the decoder begins."""
    network, batch, room = abstract_network(preset, drafts), _BATCH.value, slots(_NEW.value + 1, 7)
    inputs = jax.ShapeDtypeStruct((batch, bucket(_INPUT.value)), jnp.int32)
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    start = jax.jit(functools.partial(Network.prefill, slots=room)).lower(*place((network, inputs, row)))
    return place(start.out_info, None if placement() is None else start.compile().output_shardings)


def _of_a_call(lowered) -> float:
    """Compiles a call and returns the estimate of one run, in seconds."""
    return estimated_seconds(computations(lowered.compile().as_text())["ENTRY"])


@functools.cache
def call_seconds(preset: str, width: int, drafts: bool = False) -> float:
    """Returns the compiler's estimate of a call over `width` positions, in seconds."""
    with waiting(f"compiling a call of {preset} over {width} position{'s' * (width != 1)}"):
        network, cache = abstract_network(preset, drafts), abstract_cache(preset, drafts)
        row = jax.ShapeDtypeStruct((_BATCH.value,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((_BATCH.value, width), jnp.int32)
        return _of_a_call(call.lower(*place((network, tokens, row, cache))))


@functools.partial(jax.jit, donate_argnums=3)
def call_nodes(network: Network, tokens, positions, cache):
    """Runs one call over the nodes of a tree and takes the argmax of its logits."""
    branches = _tree().branches(len(tokens))
    nodes = WindowNodes(positions, positions, branches.depths, branches.lines, cache.layers[0].slots)
    states, cache = network.decode_nodes(tokens, nodes, cache)
    return laws.argmax(network.head(states)), cache


def tree_call_seconds(preset: str) -> float:
    """Returns the compiler's estimate of a call over the nodes of the tree, in seconds."""
    network, tree, batch = abstract_network(preset), _tree(), _BATCH.value
    room = slots(_NEW.value + 1, tree.size - 1)
    inputs = jax.ShapeDtypeStruct((batch, bucket(_INPUT.value)), jnp.int32)
    row, tokens = (jax.ShapeDtypeStruct((batch, *shape), jnp.int32) for shape in ((), (tree.size,)))
    begun = lambda network, inputs, row: network.node_cache(network.prefill(inputs, row, room), room, room)
    with waiting(f"compiling a call of {preset} over {tree.size} nodes"):
        start = jax.jit(begun).lower(*place((network, inputs, row)))
        cache = place(start.out_info, None if placement() is None else start.compile().output_shardings)
        return _of_a_call(call_nodes.lower(*place((network, tokens, row, cache))))


def times() -> dict:
    """Returns c, v and the improvement by the compiler's estimates for the rows of table 2, with
    the paper's α.

    Estimates of calls over few positions vary: one over a single position may be more than one over
    two. Hence there are two results: with single steps as they are compiled, and as if they took
    what two positions take.
    """
    target, found = "t5_1_1/xxl", []
    for row in paper.TABLE_4:
        drafter = f"t5_1_1/{row.drafter.removeprefix('T5-')}"
        line = {
            "task": row.task, "drafter": drafter, "temperature": row.temperature, "gamma": row.gamma,
            "alpha_paper": row.alpha, "c_paper": row.cost_ratio, "expected_paper": row.expected,
            "measured_paper": row.measured,
        }  # fmt: skip
        for name, width in (("as compiled", 1), ("as for two positions", 2)):
            step = call_seconds(target, width)
            c, v = call_seconds(drafter, width, drafts=True) / step, call_seconds(target, row.gamma + 1) / step
            gain = formulas.improvement(row.alpha, row.gamma, c, v)
            line[name] = {"c": round(c, 4), "v": round(v, 3), "improvement": round(gain, 2)}
        found.append(line)
    steps = {f"target_call_{width}_ms": round(1e3 * call_seconds(target, width), 3) for width in (1, 2, 4, 6, 8)}
    return {"what": "the compiler's own estimate; not a measurement", **steps, "rows": found}


def lowered_start(target: Network, drafter: ModelDrafter | None):
    """Lowers the program that makes the state which the loop starts from."""
    batch, gamma, vocab, tree = _BATCH.value, _gamma(), target.vocab_size, _tree()
    config = SamplingConfig(temperature=_TEMPERATURE.value)

    def arguments():
        row, ends = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, 4), jnp.int32)
        inputs = jnp.zeros((batch, bucket(_INPUT.value)), jnp.int32), row, row[:, None], row
        rows = config.rows(batch, vocab)
        if _BEAMS.value:
            return *inputs, row, ends[:, :1], jnp.float32(0), rows, row > 0
        return *inputs, jax.random.split(jax.random.key(0), batch), rows, None, row, ends, row, row > 0

    placed = place(jax.eval_shape(arguments))
    if not _BEAMS.value:
        program = speculative_state.StaticConfig(gamma, config.mode, vocab, tree=tree)
        return prefill.lower(target, drafter, program, slots(_NEW.value + 1, program.reach), *placed)
    options, most = BeamOptions(_BEAMS.value, beam_width=_WIDTH.value), bucket(_NEW.value)
    program = options.program(1, config.mode, vocab, gamma, drafter)
    return begin.lower(target, drafter, program, most, 1 + most, *placed)


def lowered_loop(target: Network, drafter: ModelDrafter | None, state):
    """Lowers the loop."""
    if _BEAMS.value:
        return jax.jit(search, donate_argnums=2).lower(target, drafter, state)
    return advance.lower(target, drafter, state, place(jax.ShapeDtypeStruct((), jnp.int32)))


def report() -> dict:
    """Compiles both programs and returns what the compiler says about them, in GB."""
    batch, gamma = _BATCH.value, _gamma()
    target = place(abstract_network(_TARGET.value))
    drafter = place(abstract_drafter(_DRAFTER.value)) if gamma else None
    with waiting(f"compiling encoders and prefill of {_TARGET.value} for {_topology()}"):
        lowered = lowered_start(target, drafter)
        compiled = lowered.compile()
    state, encoders = place(lowered.out_info, compiled.output_shardings), compiled.memory_analysis()
    with waiting(f"compiling the loop of {_TARGET.value}"):
        loop = lowered_loop(target, drafter, state).compile()
        text = text_of(loop)
    if _TEXT.value and text:
        write_file(_TEXT.value, text)
    memory = loop.memory_analysis()
    weights, caches = (size(target) + size(drafter)) / GB, size(state) / GB
    # Both models' encoders stay in memory beside the loop, whose program takes only the decoders' weights.
    needed = weights + caches + max(memory.temp_size_in_bytes, encoders.temp_size_in_bytes) / GB
    most, read = _MEMORY.value or CHIPS[_CHIP.value].memory, caches + _step_gb(target)
    read += gamma * _step_gb(drafter.network) if drafter else 0
    return {
        "what": "compiler's memory analysis, ahead of time; not a measurement",
        "chip": _CHIP.value, "topology": _topology(),
        "target": _TARGET.value, "drafter": _DRAFTER.value if gamma else None,
        "gamma": gamma, "tree": _TREE.value, "num_beams": _BEAMS.value, "batch_size": batch, "dtype": "bfloat16",
        "quantize": _QUANTIZE.value,
        "weights_gb": round(weights, 3),
        "state_gb": round(caches, 3), "loop_temporaries_gb": round(memory.temp_size_in_bytes / GB, 3),
        "prefill_temporaries_gb": round(encoders.temp_size_in_bytes / GB, 3), "needed_gb": round(needed, 3),
        "mesh": _MESH.value, "collectives": collectives(text) if text else None,
        "memory_gb": most, "fits": needed <= most, "floor_ms": round(1e3 * read / CHIPS[_CHIP.value].bandwidth, 3),
        "copied_in_loops": loop_copies(text) if text else None,
        "jax": jax.__version__,
    } | ({"iteration_ms": iteration_ms(text)} if _ITERATION.value else {})  # fmt: skip


def _step_gb(network: Network) -> float:
    """Returns the GB of the weights with which a device multiplies in one step."""
    return size(Products.of(network).kernels) / GB


def every_chip(arguments: list[str]) -> int:
    """Prints the table, each line as soon as it is there; returns 1 if a chip's programs do not fit."""
    print("estimates by the TPU compiler, ahead of time; nothing here is a measurement")
    print("chip     needed, GB     fits   iteration     floor    iteration / floor", flush=True)
    codes = []
    for chip in CHIPS:
        print(f"{chip}, in a process of its own", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, *arguments, f"--chip={chip}", "--iteration"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(chip_line(chip, done.returncode, done.stdout), flush=True)
        codes.append(done.returncode)
    return int(any(codes))


def _check(argv: list[str]) -> None:
    """Refuses what the command line cannot mean."""
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    if _QUANTIZE.value and _MESH.value:
        raise app.UsageError(f"quantize: got {_QUANTIZE.value} with --mesh={_MESH.value}, expected one device")
    if _TOPOLOGY.value and _TOPOLOGY.value.split(":")[0] != _CHIP.value:
        raise app.UsageError(f"topology: got {_TOPOLOGY.value} with --chip={_CHIP.value}, expected one of that chip")
    one = {"times": _TIMES, "hlo": _TEXT, "memory_gb": _MEMORY, "clock_ghz": _CLOCK} if _CHIP.value == "all" else {}
    chain = {"tree": _TREE, "num_beams": _BEAMS} if _CHIP.value == "all" or _ITERATION.value else {}
    for name, flag in {**one, **chain}.items():
        if flag.value:
            raise app.UsageError(f"{name}: got {flag.value} with the estimate of an iteration, expected none")


def main(argv):
    _check(argv)
    if _CHIP.value == "all":
        sys.exit(every_chip(sys.argv[1:]))
    if _MESH.value:
        try:
            placement().check(PRESETS[_TARGET.value])
            placement().check_rows("batch_size", _BATCH.value)
        except ValueError as error:
            raise app.UsageError(str(error)) from None
    try:
        result = report()
    except jax.errors.JaxRuntimeError as error:  # most often the compiler's, that the memory does not suffice
        why = " ".join(str(error).split())
        print(json.dumps({"what": "refused by the compiler", "chip": _CHIP.value, "failed": why[:1000]}, indent=2))
        sys.exit(1)
    if _TREE.value:
        width, node = _gamma() + 1, tree_call_seconds(_TARGET.value)
        result["nodes"] = _tree().size
        result["target_calls_ms"] = {
            f"{width} of a chain": round(1e3 * call_seconds(_TARGET.value, width), 3),
            f"{_tree().size} nodes": round(1e3 * node, 3),
        }
    if _TIMES.value:
        result["times"] = times()
    print(json.dumps(result, indent=2))
    sys.exit(0 if result["fits"] else 1)


if __name__ == "__main__":
    app.run(main)
