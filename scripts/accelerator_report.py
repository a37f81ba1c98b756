"""Measures the costs of speculative decoding on a GPU or a TPU in about ten minutes.

    python scripts/accelerator_report.py --output=accelerator.json
    python scripts/accelerator_report.py --output=accelerator.json     # resumes where it stopped
    specdec figures --records=accelerator.json

It uses whatever device JAX has. The models have the shapes of T5s and dummy weights; acceptance is
synthetic. It measures:

- copies (the bandwidth) and the bare products of a step, and from both the floor;
- calls of the target over 1 to 64 positions (v) and steps of the drafter (c);
- whole decodes, plain and speculative, for several batch sizes and acceptance rates;
- a token tree and beam search;
- the target in int8, if the device supports it;
- plain decoding by T5X and by Hugging Face's transformers, where they are installed;
- the target with its own int8 weights as the drafter.

Every figure is written to `--output` as soon as it is measured, and is a line on the terminal. The
record also has the machine, the versions and the options. A second run with the same ones skips the
figures in the file; with others it is rejected. Figures without time left in `--minutes` are listed
at the end. With `--only` some kinds of stages are measured, and a later run without it measures the
others. A figure that runs out of memory is in the record too: remove it to try again.
The programs of a stage are compiled in parallel, in `--threads`, and kept on disk. A stage that has
begun is not cut short: if processes are killed after ten minutes, give `--minutes=6`.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import app, flags

from specdec_jax.analysis import machine, timing
from specdec_jax.analysis.report.records import write_record
from specdec_jax.analysis.timing import Spread
from specdec_jax.decoding.program_cache import keep_programs
from specdec_jax.files import reading
from specdec_jax.files.locks import lock_file
from specdec_jax.files.writing import check_output
from specdec_jax.models.t5 import PRESETS
from specdec_jax.speculative.tree_text import read_tree
from tools.accelerator_figures import ModelPair, ReportSetup, TimedFigure, UnsupportedHere
from tools.accelerator_peers import PEERS
from tools.accelerator_stages import Stage, stages

_DEFAULT = ReportSetup()
_OUTPUT = flags.DEFINE_string("output", "accelerator.json", "File of the record.")
_MINUTES = flags.DEFINE_float(
    "minutes", 10.0, "Minutes after which no stage begins.", lower_bound=0.0
)
_TARGETS = flags.DEFINE_list(
    "targets", list(_DEFAULT.targets), "Shapes of the targets, from the smallest up."
)
_DRAFTER = flags.DEFINE_enum("drafter", _DEFAULT.drafter, sorted(PRESETS), "Shape of the drafter.")
_DTYPE = flags.DEFINE_enum(
    "dtype", _DEFAULT.dtype, ["bfloat16", "float32"], "Dtype of weights and caches."
)
_GAMMA = flags.DEFINE_integer(
    "gamma", _DEFAULT.gamma, "Tokens drafted per target call.", lower_bound=1
)
_BATCHES = flags.DEFINE_list("batches", list(map(str, _DEFAULT.batches)), "Numbers of rows.")
_ALPHAS = flags.DEFINE_list(
    "alphas", list(map(str, _DEFAULT.alphas)), "Synthetic acceptance rates."
)
_TREE = flags.DEFINE_string("tree", _DEFAULT.tree, "A token tree, as for `specdec generate`.")
_INPUT = flags.DEFINE_integer(
    "input_length", _DEFAULT.input_length, "Ids of every input.", lower_bound=1
)
_NEW = flags.DEFINE_integer(
    "max_new_tokens", _DEFAULT.max_new_tokens, "New tokens of every output.", lower_bound=1
)
_TINY = flags.DEFINE_bool(
    "tiny", False, "Shrink every shape to two narrow layers, to try the script out."
)
_CACHE = flags.DEFINE_string(
    "compilation_cache_dir",
    None,
    "Folder of compiled programs, as for `specdec`; empty: none are kept.",
)
_ONLY = flags.DEFINE_list(
    "only",
    [],
    "Kinds of stages that are measured, such as 'calls,T5X'; all without one. Another run with the "
    "same output may measure the others.",
)
_THREADS = flags.DEFINE_integer(
    "threads", 0, "Programs compiled side by side; 0: one for each core, at most 8."
)


@contextlib.contextmanager
def open_report(path: str, head: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the record in the file, or a new one; other processes are kept out of the block.

    Raises:
      ValueError: the file holds something else, or has another machine, version or option; or
        another process is writing it.
    """
    with open(f"{path}.lock", "ab") as file:
        lock_file(file.fileno(), file.name)
        try:
            before = reading.read_optional_json(path)
            for name in {**head, **before}.keys() - {"figures"} if before else ():
                if before.get(name) != head.get(name):
                    raise ValueError(
                        f"{path}: got figures with {name} {before.get(name)!r}, expected "
                        f"{head.get(name)!r}; name another file, or give the same options on the "
                        "same machine"
                    )
            yield {**head, "figures": [], **before}
        finally:
            os.unlink(file.name)


def say(text: str) -> None:
    """Prints a line at once, with the seconds since the start."""
    print(f"{time.monotonic() - _BEGUN:6.1f} s  {text}", flush=True)


_BEGUN = time.monotonic()


def compile_figures(
    figures: Sequence[TimedFigure], pair: ModelPair, threads: int
) -> dict[str, Any]:
    """Returns for every figure its call and the seconds of the first run, or an exception.

    Figures with the same program follow each other; all others are compiled in parallel.
    """

    def make(group: Sequence[TimedFigure]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for figure in group:
            begin = time.perf_counter()
            try:
                variant = figure.variant(pair)
                jax.block_until_ready(variant())
                made[figure.name] = variant, time.perf_counter() - begin
                say(f"  compiled in {made[figure.name][1]:.1f} s: {figure.name}")
            except Exception as error:  # one figure's lack of memory is not the end
                made[figure.name] = error
                say(f"  did not compile or run: {figure.name}: {_reason(error)}")
        return made

    groups: dict[str, list[TimedFigure]] = {}
    for figure in figures:
        groups.setdefault(figure.program, []).append(figure)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return {
            name: found for made in pool.map(make, groups.values()) for name, found in made.items()
        }


def time_figure(
    figure: TimedFigure, variant: Callable[[], Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the measured fields of a figure."""
    kept: list[Any] = []

    def call() -> Any:
        kept[:] = [variant()]
        return kept[0]

    seconds = Spread.from_samples(timing.time_passes(call))
    return figure.read(seconds, kept[0], before)


def measure(
    stage: Stage, figures: Sequence[TimedFigure], threads: int, before: Mapping[str, Any]
) -> Iterator[dict]:
    """Loads a stage's models, compiles its programs, and yields the line of each figure."""
    programs, names = {figure.program for figure in figures}, [figure.name for figure in figures]
    what = f"making dummy weights, then compiling {len(programs)} programs for {'; '.join(names)}"
    say(f"{stage.name}: {what}")
    lines = {figure.name: {"figure": figure.name, **figure.about} for figure in figures}
    try:
        pair = stage.load()
        jax.block_until_ready([model.network.params for model in pair if model is not None])
    except UnsupportedHere as reason:
        yield from (line | {"unsupported": str(reason)} for line in lines.values())
        return
    except Exception as error:
        yield from (line | {"failed": _reason(error)} for line in lines.values())
        return
    variants = compile_figures(figures, pair, threads)
    for figure in figures:
        found, line = variants.pop(figure.name), lines[figure.name]
        if isinstance(found, Exception):
            yield line | {"failed": _reason(found)}
            continue
        variant, seconds = found
        say(f"  timing {figure.name}")
        try:
            yield line | time_figure(figure, variant, before) | {"compile_seconds": seconds}
        except Exception as error:
            yield line | {"failed": _reason(error)}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def describe(line: Mapping[str, Any]) -> str:
    """Returns a figure's line for the terminal."""
    for name, text in (("failed", "failed"), ("unsupported", "not supported here")):
        if name in line:
            return f"= {line['figure']}: {text}: {line[name]}"
    units = {
        "floor_ms": "ms at the bandwidth",
        "v": "v",
        "c": "c",
        "improvement": "times plain",
        "over_full_plain": "times the full target's plain",
        "iteration_ms": "ms per iteration",
        "tokens_per_second": "tokens per second",
        "gb_per_second": "GB per second",
        "over_full": "of the full target's",
    }
    rest = "".join(f", {line[name]:.4g} {unit}" for name, unit in units.items() if name in line)
    return f"= {line['figure']}: {line['milliseconds']['median']:.4g} ms{rest}"


def read_setup() -> ReportSetup:
    """Returns the options that the flags give."""
    try:
        batches, alphas = tuple(map(int, _BATCHES.value)), tuple(map(float, _ALPHAS.value))
        read_tree(_TREE.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    if not batches or min(batches) < 1:
        raise app.UsageError(f"batches: got {_BATCHES.value}, expected numbers of rows")
    if any(not 0 < alpha <= 1 for alpha in alphas):
        raise app.UsageError(f"alphas: got {_ALPHAS.value}, expected numbers in (0, 1]")
    if not _TARGETS.value or set(_TARGETS.value) - set(PRESETS):
        raise app.UsageError(
            f"targets: got {_TARGETS.value}, expected some of {', '.join(sorted(PRESETS))}"
        )
    same = (_DRAFTER, _DTYPE, _TINY, _INPUT, _NEW, _GAMMA, _TREE)
    given: dict[str, Any] = {flag.name: flag.value for flag in same}
    given |= {"targets": tuple(_TARGETS.value), "batches": batches, "alphas": alphas}
    return dataclasses.replace(_DEFAULT, **given)


def choose_stages(planned: Sequence[Stage], kinds: Sequence[str]) -> list[Stage]:
    """Returns the stages of the named kinds; all without a name."""
    known = list(dict.fromkeys(stage.kind for stage in planned))
    if unknown := [kind for kind in kinds if kind not in known]:
        raise app.UsageError(f"only: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    return [stage for stage in planned if not kinds or stage.kind in kinds]


def run(
    path: str, record: dict[str, Any], planned: Sequence[Stage], threads: int, seconds: float
) -> list[str]:
    """Measures the figures that the record lacks; returns the names of those without time left.

    The record is written after each figure. A stage does not begin if less time is left than its
    figures took for the target before.
    """
    missing, took = [], {}
    done = {line["figure"]: line for line in record["figures"]}
    for stage in planned:
        todo = [figure for figure in stage.figures if figure.name not in done]
        begin = time.monotonic()
        if todo and begin - _BEGUN + took.get(stage.kind, 0.0) >= seconds:
            missing += [figure.name for figure in todo]
            continue
        if not todo:
            continue
        for line in measure(stage, todo, threads, done):
            done[line["figure"]] = line
            record["figures"].append(line)
            try:
                write_record(path, record)
            except ValueError as error:  # it is written even so
                say(f"  {error}")
            say(describe(line))
        took[stage.kind] = time.monotonic() - begin
        stage.free()
        if jax.default_backend() == "cpu":  # programs need some of a process's 65,530 mappings
            jax.clear_caches()
    return missing


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got {argv[1]!r}, expected flags only")
    setup = read_setup()
    keep_programs(_CACHE.value)
    planned = stages(setup, PEERS)
    chosen = choose_stages(planned, _ONLY.value)
    names = [figure.name for stage in planned for figure in stage.figures]
    head: dict[str, Any] = {
        "accelerator_report": 1,
        "machine": machine.describe_machine(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "options": dataclasses.asdict(setup),
        "plan": names,
    }
    output, device, seconds = _OUTPUT.value, head["machine"]["device"], 60 * _MINUTES.value
    threads = _THREADS.value or min(8, os.cpu_count() or 1)
    try:
        check_output(output)
        with open_report(output, json.loads(json.dumps(head))) as record:
            figures = record["figures"]
            say(f"{device}, {len(names)} figures, {_MINUTES.value:g} minutes, to {output}")
            if figures:
                say(f"skips {len(figures)} of {len(names)} figures, which are in {output}")
            missing = run(output, record, chosen, threads, seconds)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    if missing:
        say(f"no time was left for: {'; '.join(missing)}; the same command resumes with them")
    draws = f"`specdec figures --records={output}` draws them"
    say(f"{len(figures)} of {len(names)} figures; {draws}")


if __name__ == "__main__":
    app.run(main)
