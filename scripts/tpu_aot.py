"""Compiles decoding ahead of time for a TPU, without a TPU: whether it fits, estimated times.

    pip install '.[tpu-aot]'
    export JAX_PLATFORMS=cpu
    python scripts/tpu_aot.py --target=t5_1_1/xxl --drafter=t5_1_1/small --gamma=7
    python scripts/tpu_aot.py --chip=all                      # a line for each TPU
    python scripts/tpu_aot.py --times --output=tpu.json       # times for table 2 of the paper
    python scripts/tpu_aot.py --tree=widths:4,3,2,1           # a tree of 65 nodes instead of γ
    python scripts/tpu_aot.py --mesh=1x4                      # on the four chips of a v4-8
    python scripts/tpu_aot.py --num_beams=4 --gamma=3 --iteration     # speculative beam search
    python scripts/tpu_aot.py --drafter=eagle:t5_1_1/large --drafter_layers=1 --iteration
    python scripts/tpu_aot.py --drafter=suffix --gamma=16 --iteration    # or recycling
    python scripts/tpu_aot.py --drafter=lookahead --iteration
    python scripts/tpu_aot.py --target=t5gemma/9b-2b --drafter=t5gemma/b-b --gamma=4 --calls

The programs are the package's: `prefill` (both encoders) and `advance` (draft γ, verify, commit, in
its loop); for a beam search `begin` and `search`, which the package runs as one program. The script
prints the compiler's memory analysis, the arrays of more than a megabyte that loop bodies copy, and
with `--times` or `--calls` the compiler's estimate of single calls. Nothing here is a measurement.
On a mesh all sizes are for one device, the collectives of the loop are counted, and every device
holds the whole drafter. Exit code 1 if the programs do not fit.

With `--chip=all` one process for each chip compiles, and prints a line: the memory that is needed,
the estimate of an iteration, and the floor under it, which is the bytes of the decoders' weights
and caches over the bandwidth. The estimate is one pass of the loop, with γ passes of the drafter's
loop in it, or single calls if JAX cannot read the loop's text. A Pallas kernel, which the compiler
does not estimate, counts as its bytes over the bandwidth.
"""

import functools
import json
import subprocess
import sys
from typing import Any

import jax
from absl import app, flags
from jax.experimental import topologies

from specdec_jax.analysis.report.records import write_record
from specdec_jax.files.progress import show_waiting
from specdec_jax.files.writing import check_output, write_file
from specdec_jax.models.families import PRESETS
from specdec_jax.speculative.trees import DynamicTree
from tools.case_flags import CaseFlags
from tools.compiled_text import collectives, loop_copies
from tools.lowering import Case, size
from tools.tpu_chips import CHIPS, Chip, chip_line
from tools.tpu_estimates import (
    GB,
    call_seconds,
    estimate_calls,
    floor_ms,
    iteration_ms,
    read_text,
    times,
    tree_call_seconds,
)

_CASE = CaseFlags("t5_1_1/xxl")
_CHIP = flags.DEFINE_enum(
    "chip", "v4", [*CHIPS, "all"], "TPU to compile for; all: a table, a line for each."
)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Another topology of the chip, such as v4:2x2x2; the first devices are used."
)
_MESH = flags.DEFINE_string(
    "mesh", None, "DATAxMODEL devices, as for `specdec generate`; by default one device."
)
_MEMORY = flags.DEFINE_float(
    "memory_gb", None, "Memory of a device, in GB (10^9 bytes), if not the chip's."
)
_TIMES = flags.DEFINE_bool(
    "times", False, "Estimate the time of single calls too, for the rows of table 2."
)
_CALLS = flags.DEFINE_bool(
    "calls", False, "Estimate c and v too, from single calls of target and drafting model."
)
_ITERATION = flags.DEFINE_bool(
    "iteration", False, "Estimate the time of an iteration too, as --chip=all does."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "File for the JSON record; without it the record is printed."
)
_CLOCK = flags.DEFINE_float(
    "clock_ghz", None, "Clock in cycles per nanosecond, if not the chip's.", lower_bound=0.01
)


def _chip() -> Chip:
    """Returns the chip, changed by the flags."""
    chip = CHIPS[_CHIP.value]
    given: dict[str, Any] = {
        "topology": _TOPOLOGY.value,
        "memory": _MEMORY.value,
        "clock": _CLOCK.value,
    }
    return chip._replace(**{name: value for name, value in given.items() if value})


@functools.cache
def _devices() -> list:
    # A v4's two cores are one device.
    how = {"chip_config_name": "megacore"} if _CHIP.value == "v4" else {}
    name = _chip().topology
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **how).devices


def report(case: Case, chip: Chip) -> dict:
    """Compiles both programs and returns the compiler's analysis, sizes in GB."""
    target, drafter = case.network(case.target), case.make_drafter()
    with show_waiting(f"compiling encoders and prefill of {case.target} for {chip.topology}"):
        lowered = case.lowered_start()
        compiled = lowered.compile()
    state, encoders = (
        case.place(lowered.out_info, compiled.output_shardings),
        compiled.memory_analysis(),
    )
    with show_waiting(f"compiling the loop of {case.target}"):
        loop = case.lowered_loop(state).compile()
        text = read_text(loop)
    if _CASE.text.value and text:
        write_file(_CASE.text.value, text)
    memory = loop.memory_analysis()
    weights, caches = (size(target) + size(drafter)) / GB, size(state) / GB
    # Both models' encoders stay in memory beside the loop, whose program takes only the decoders'
    # weights.
    needed = weights + caches + max(memory.temp_size_in_bytes, encoders.temp_size_in_bytes) / GB
    read = [(1, target), *((case.gamma, one) for one in (drafter.encoders if drafter else ()))]
    return {
        "what": "compiler's memory analysis, ahead of time; not a measurement",
        "chip": _CHIP.value,
        "topology": chip.topology,
        **_CASE.record(case),
        "weights_gb": round(weights, 3),
        "state_gb": round(caches, 3),
        "loop_temporaries_gb": round(memory.temp_size_in_bytes / GB, 3),
        "prefill_temporaries_gb": round(encoders.temp_size_in_bytes / GB, 3),
        "needed_gb": round(needed, 3),
        "mesh": case.mesh,
        "collectives": collectives(text) if text else None,
        "memory_gb": chip.memory,
        "fits": needed <= chip.memory,
        "floor_ms": floor_ms(read, size(state), chip),
        "copied_in_loops": loop_copies(text) if text else None,
        "jax": jax.__version__,
    } | ({"iteration_ms": iteration_ms(case, chip, text)} if _ITERATION.value else {})


def _tree_calls(case: Case, chip: Chip) -> dict:
    """Returns the estimates of calls over a chain as deep as the tree, and over its nodes."""
    assert case.tree is not None
    tree = case.tree.fixed() if isinstance(case.tree, DynamicTree) else case.tree
    width, node = case.gamma + 1, tree_call_seconds(case, chip, tree)
    calls = {
        f"{width} of a chain": round(1e3 * call_seconds(case, chip, case.target, width), 3),
        f"{case.tree.size} nodes": round(1e3 * node, 3),
    }
    return {"nodes": case.tree.size, "target_calls_ms": calls}


def every_chip(arguments: list[str]) -> int:
    """Prints the table line by line; returns 1 if a chip's programs do not fit."""
    print("estimates by the TPU compiler, ahead of time; nothing here is a measurement")
    print("chip     needed, GB     fits   iteration     floor    iteration / floor", flush=True)
    codes = []
    for chip in CHIPS:
        print(f"{chip}, in a separate process", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, *arguments, f"--chip={chip}", "--iteration"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(chip_line(chip, done.returncode, done.stdout), flush=True)
        codes.append(done.returncode)
    return int(any(codes))


def _check(argv: list[str]) -> None:
    """Raises UsageError for flags that do not go together."""
    _CASE.check(argv)
    quantize, chip = _CASE.quantize.value, f"--chip={_CHIP.value}"
    if quantize and _MESH.value:
        raise app.UsageError(
            f"quantize: got {quantize} with --mesh={_MESH.value}, expected one device"
        )
    if _TOPOLOGY.value and _TOPOLOGY.value.split(":")[0] != _CHIP.value:
        raise app.UsageError(
            f"topology: got {_TOPOLOGY.value} with {chip}, expected one of that chip"
        )
    if _CALLS.value and not _CASE.drafts_chains_by_model():
        raise app.UsageError("calls: got True, expected a drafting model and a chain, γ above 0")
    single = (_TIMES, _CALLS, _MEMORY, _CLOCK, _OUTPUT, _CASE.text, _CASE.tree, _CASE.beams)
    for flag in single if _CHIP.value == "all" else ():
        if flag.value:
            raise app.UsageError(f"{flag.name}: got {flag.value} with --chip=all, expected none")


def main(argv: list[str]) -> None:
    _check(argv)
    if _CHIP.value == "all":
        sys.exit(every_chip(sys.argv[1:]))
    case, chip = _CASE.make_case(_devices(), mesh=_MESH.value), _chip()
    try:
        check_output(_OUTPUT.value)
        if (rules := case.rules()) is not None:
            rules.check(PRESETS[case.target])
            rules.check_rows("batch_size", case.batch)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    try:
        result = report(case, chip)
    except jax.errors.JaxRuntimeError as error:  # most often too little memory
        why = " ".join(str(error).split())[:1000]
        record = {"what": "rejected by the compiler", "chip": _CHIP.value, "failed": why}
        print(json.dumps(record, indent=2))
        sys.exit(1)
    if case.tree:
        result |= _tree_calls(case, chip)
    if _CALLS.value:
        result["calls"] = estimate_calls(case, chip)
    if _TIMES.value:
        result["times"] = times(case, chip)
    if _OUTPUT.value:
        write_record(_OUTPUT.value, result)
    else:
        print(json.dumps(result, indent=2))
    sys.exit(0 if result["fits"] else 1)


if __name__ == "__main__":
    app.run(main)
