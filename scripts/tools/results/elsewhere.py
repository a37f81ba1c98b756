"""Stages that run other programs: T5X beside ours, and the TPU's compiler."""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tools.accelerator_figures import ReportSetup
from tools.accelerator_peers import PEERS
from tools.accelerator_stages import stages
from tools.results.stage import Row, Rows, Settings, Skipped

SCRIPTS = pathlib.Path(__file__).resolve().parents[2]
PLOT = SCRIPTS.parent / ".github" / "wall_time.svg"
_MOST_COMPILERS = 4  # side by side: each takes three gigabytes or more


def measure_t5x(settings: Settings) -> Rows:
    """Measures T5X's own decoding in turn with ours, on the same weights; draws README's plot."""
    if importlib.util.find_spec("t5x") is None:
        raise Skipped("T5X is not installed")
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "record.json"
        command = [sys.executable, "-m", "specdec_jax", "benchmark", "--against=t5x"]
        command += ["--target=ende/target", "--drafter=ende/drafter", "--quantize=none"]
        command += [f"--repeats={settings.choose(5, 2)}", "--gamma=4,6", f"--output={output}"]
        command += ["--input_file=ende/sentences.txt", f"--plot={PLOT}"]
        subprocess.run(command, check=True)
        record = json.loads(output.read_text(encoding="utf-8"))
    found = record["against"]
    rows = {"T5X": {"improvement": {"median": 1.0, "least": 1.0, "most": 1.0}}}
    for name, gain in found["improvement"].items():
        rows[name] = {"improvement": gain}
    return {"sentences": rows}


def compile_for_tpu(*more: str) -> dict[str, Any]:
    """Returns the record of `tpu_aot.py`, by default for T5-XXL; its floor is of an iteration."""
    command = [sys.executable, str(SCRIPTS / "tpu_aot.py"), *more]
    several = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # no process has a TPU
    ended = subprocess.run(command, capture_output=True, text=True, env=several)
    if "{" not in ended.stdout:
        raise RuntimeError(ended.stderr[-500:])
    return json.loads(ended.stdout[ended.stdout.index("{") :])


def estimate(*more: str) -> Row:
    """Returns memory and the compiler's estimate of an iteration."""
    record = compile_for_tpu("--iteration", *more)
    if "failed" in record:
        return {"failed": "does not fit" * ("RESOURCE_EXHAUSTED" in record["failed"])}
    names = ("needed_gb", "memory_gb", "fits", "iteration_ms", "floor_ms", "collectives")
    return {one: record.get(one) for one in names} | record.get("calls", {})


def estimate_all(cases: Mapping[str, Sequence[str]]) -> dict[str, Row]:
    """Returns the row of every case; as many are compiled side by side as there are cores."""
    with concurrent.futures.ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1)) as pool:
        return dict(zip(cases, pool.map(lambda more: estimate(*more), cases.values())))


# The kinds of figures of `accelerator_report.py` that are another stage's, and what they are
# compared with.
BESIDE = (*PEERS, "self:int8")
_COMPARED = ("call over 1", "plain, 1 row", "α = 0.75, 1 row", "α = 0.9, 1 row")


def measure_accelerator(settings: Settings) -> Rows:
    """Measures T5-XXL with T5-small on a GPU or TPU, by `accelerator_report.py`."""
    return _measure_xxl(beside=False)


def measure_accelerator_peers(settings: Settings) -> Rows:
    """Measures other libraries there, and the target for which its own weights draft."""
    return _measure_xxl(beside=True)


def _measure_xxl(beside: bool) -> Rows:
    if jax.default_backend() == "cpu":
        raise Skipped("no accelerator")
    return measure_report(ReportSetup(targets=("t5_1_1/xxl",)), beside)


def measure_report(setup: ReportSetup, beside: bool) -> Rows:
    """Returns figures of `accelerator_report.py`, measured in this process.

    Another process would find the accelerator taken, since this one has described it.

    Args:
      setup: the options of the report.
      beside: whether the figures are those `BESIDE`, and what they are compared with; else all but
        those.
    """
    import accelerator_report  # it defines flags, which are not those of `results.py`

    lines: dict[str, Any] = {}
    for stage in stages(setup, PEERS):
        figures = [one for one in stage.figures if chooses_figure(stage.kind, one.name, beside)]
        for line in accelerator_report.measure(stage, figures, 8, lines) if figures else ():
            lines[line["figure"]] = line
        stage.free()
    rows = dict(map(read_figure, lines.values()))
    return {setup.targets[0]: rows, "brief": {name: rows[name] for name in BRIEF if name in rows}}


def chooses_figure(kind: str, figure: str, beside: bool) -> bool:
    """Returns whether a stage measures a figure; arguments as for `measure_report`."""
    compared = read_figure({"figure": figure})[0] in _COMPARED
    return kind in BESIDE or compared if beside else kind not in BESIDE


def read_figure(figure: Mapping[str, Any]) -> tuple[str, Row]:
    """Returns a figure of `accelerator_report.py` as a row: its name, and what the table shows."""
    name = figure["figure"].removeprefix("t5_1_1/xxl, ").replace("alpha ", "α = ")
    name = re.sub(r"batch (\d+)$", r"\1 rows", name).replace(" 1 rows", " 1 row")
    row = {one: figure[one] for one in (*SHOWN, "failed", "unsupported") if one in figure}
    if "milliseconds" in figure:
        row["milliseconds"] = figure["milliseconds"]["median"]
    return name, row


BRIEF = (
    *("transformers, plain", "T5X, plain", "plain, 1 row"),
    *("α = 0.75, 1 row", "α = 0.9, 1 row"),
)
# What a row shows of a figure, and the words around it.
SHOWN = {
    "milliseconds": "{:.3g} ms",
    "floor_ms": "its bytes {:.2g}",
    "gb_per_second": "{:,.0f} GB a second",
    "v": "v {:.2f}",
    "c": "c {:.3f}",
    "over_full": "{:.2f} of the full target's",
    "iteration_ms": "{:.3g} an iteration",
    "improvement": "{:.2f} times plain",
}


def format_figure(row: Row) -> str:
    """Returns milliseconds of a call, a step or a token of a row, and what else was found."""
    why = row.get("failed") or row.get("unsupported")
    return why or ", ".join(text.format(row[one]) for one, text in SHOWN.items() if one in row)


SMALL = ("--drafter=t5_1_1/small", "--gamma=7")
LONG = "--max_new_tokens=2048"
INT8 = "--quantize=int8"
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
FEW: dict[str, dict[str, Sequence[str]]] = {
    "estimates": {"v4, one row": SMALL, "v4, one row, int8": (*SMALL, INT8)}
}
ALL: dict[str, dict[str, Sequence[str]]] = {
    "estimates": FEW["estimates"],
    "pairs": {
        "each chip of a v4-8, one row": (*SMALL, "--mesh=1x4"),
        "v4, one row, T5-base drafts": ("--drafter=t5_1_1/base", "--gamma=7"),
        "v4, one row, T5-large drafts": ("--drafter=t5_1_1/large", "--gamma=7"),
    },
    "rows": {
        f"{rows} rows, {new:,} new tokens{', int8' * eight}": (
            *SMALL,
            f"--batch_size={rows}",
            f"--max_new_tokens={new}",
            *([INT8] * eight),
        )
        for eight in (False, True)
        for rows, new in ((1, 128), (8, 128), (32, 128), (1, 2048), (8, 2048))
        if not (eight and new == 2048)
    },
    "chips": {
        f"{chip}{', int8' * eight}": (*SMALL, f"--chip={chip}", *([INT8] * eight))
        for chip in CHIPS
        for eight in (False, True)
    },
    "trees": {
        "chain, γ = 3": (SMALL[0], "--gamma=3"),
        "chain, γ = 8": (SMALL[0], "--gamma=8"),
        "tree of widths 4, 3, 2, 1, 65 nodes": (SMALL[0], "--tree=widths:4,3,2,1"),
        "four beams, plain": ("--num_beams=4", "--gamma=0"),
        "four beams, γ = 3": (SMALL[0], "--num_beams=4", "--gamma=3"),
    },
}


# Beside plain decoding; the first three in a quick run too.
DRAFTERS: dict[str, Sequence[str]] = {
    "plain": ("--gamma=0",),
    "EAGLE, one layer of width 1,024, γ = 7": (
        "--drafter=eagle:t5_1_1/large",
        "--drafter_layers=1",
        "--gamma=7",
    ),
    "`suffix`, γ = 16": ("--drafter=suffix", "--gamma=16"),
    "`recycling`, tree of widths 4, 2, 1": ("--drafter=recycling", "--tree=widths:4,2,1"),
    "`lookahead`, 57 nodes": ("--drafter=lookahead",),
}


# The target of each, and the options of each row; the first is plain decoding.
FAMILIES: dict[str, dict[str, Sequence[str]]] = {
    "t5gemma/9b-2b": {
        "T5Gemma 9B-2B, plain": ("--gamma=0",),
        "T5Gemma 9B-2B with B-B, γ = 4": ("--drafter=t5gemma/b-b", "--gamma=4", "--calls"),
        "T5Gemma 9B-2B with S-S, γ = 4": ("--drafter=t5gemma/s-s", "--gamma=4", "--calls"),
    },
    "t5gemma2/4b-4b": {
        "T5Gemma 2 4B, plain": ("--gamma=0",),
        "T5Gemma 2 4B with 270M, γ = 4": (
            "--drafter=t5gemma2/270m-270m",
            "--gamma=4",
            "--calls",
        ),
    },
}


def measure_tpu(settings: Settings) -> Rows:
    """Compiles T5-XXL with drafters for TPUs; seconds are the compiler's estimates."""
    if importlib.util.find_spec("libtpu") is None:
        raise Skipped("libtpu is not installed")
    cases = FEW if settings.quick else ALL
    rows = {name: estimate_all(part) for name, part in cases.items()}
    if not settings.quick:
        rows["paper"] = estimate_paper()
    return rows


def measure_tpu_drafters(settings: Settings) -> Rows:
    """Compiles T5-XXL with other drafters for a TPU v4, and compares iterations with plain ones."""
    if importlib.util.find_spec("libtpu") is None:
        raise Skipped("libtpu is not installed")
    names = list(DRAFTERS)[: settings.choose(len(DRAFTERS), 3)]
    return {"v4": compare_with_plain(estimate_all({name: DRAFTERS[name] for name in names}))}


def measure_tpu_families(settings: Settings) -> Rows:
    """Compiles T5Gemma 1 and 2 with drafters for a TPU v4."""
    if settings.quick:
        raise Skipped("measured by a run in full only")
    if importlib.util.find_spec("libtpu") is None:
        raise Skipped("libtpu is not installed")
    rows: dict[str, Row] = {}
    for target, cases in FAMILIES.items():
        given = {name: (f"--target={target}", *more) for name, more in cases.items()}
        rows |= compare_with_plain(estimate_all(given))
    return {"v4": rows}


def compare_with_plain(rows: dict[str, Row]) -> dict[str, Row]:
    """Adds to rows the tokens a call from which they pay; the first one is plain decoding."""
    plain, *others = rows.values()
    for row in others:
        if plain.get("iteration_ms") and row.get("iteration_ms"):
            row["break_even"] = round(row["iteration_ms"] / plain["iteration_ms"], 3)
    return rows


def estimate_paper() -> dict[str, Row]:
    """Returns c, v and the improvement by the compiler's estimates, for rows of table 2."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "times.json"
        command = [sys.executable, str(SCRIPTS / "tpu_aot.py"), "--times", f"--output={output}"]
        subprocess.run(command, check=True, capture_output=True)
        times = json.loads(output.read_text(encoding="utf-8"))["times"]
    found: dict[str, Row] = {}
    for row in times["rows"]:
        name = f"{row['task']}, T = {row['temperature']:g}, γ = {row['gamma']}, {row['drafter']}"
        found[name] = row["as compiled"] | {"measured_paper": row["measured_paper"]}
    return found


def format_tpu(row: Row) -> str:
    """Returns memory and the estimate of an iteration, or c, v and the improvement."""
    if "failed" in row:
        return row["failed"] or "not compiled"
    if "measured_paper" in row:
        text = f"c {row['c']:.3f}, v {row['v']:.2f}, {row['improvement']:.2f} times plain decoding"
        return f"{text}; the paper measured {row['measured_paper']:.1f}"
    fits = "fits" if row["fits"] else "does not fit"
    text = f"{row['needed_gb']:.1f} of {row['memory_gb']:g} GB, {fits}"
    if row["iteration_ms"] is not None:
        text += f"; {row['iteration_ms']:.1f} ms an iteration"
    text += f", its bytes {row['floor_ms']:.1f}"
    if "c" in row:
        text += f"; c {row['c']:.2f}, v {row['v']:.2f}"
    if "break_even" in row:
        text += f"; pays from {row['break_even']:.2f} tokens a call"
    if row.get("collectives"):
        text += f"; {sum(row['collectives'].values())} collectives"
    return text
