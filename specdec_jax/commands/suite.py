"""Runs `specdec benchmark`; `--suite=paper` measures the paper's rows, and resumes after a kill."""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import machine
from specdec_jax.analysis.report import page as report_page
from specdec_jax.analysis.report import paper, summaries
from specdec_jax.analysis.report.records import read_records
from specdec_jax.analysis.report.rows import Row
from specdec_jax.analysis.report.rows import list_rows as read_rows
from specdec_jax.checkpoints import t5x
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import figures
from specdec_jax.commands.benchmark import BenchmarkOptions, make_others
from specdec_jax.commands.errors import CheckFailed
from specdec_jax.commands.resumable_output import Journal
from specdec_jax.files.progress import print_line
from specdec_jax.files.reading import digest, mismatch_error
from specdec_jax.files.writing import check_output, is_pass_through, write_file
from specdec_jax.models.language_model import LanguageModel

SUITES = ("paper",)


def run(options: BenchmarkOptions, on_start: Callable[[], object] = lambda: None) -> None:
    """Runs `specdec benchmark`, one comparison or a suite.

    `on_start` is called when a suite begins a file that a kill leaves behind.
    """
    if options.suite is None:
        benchmark_command.run(options)
    else:
        _run(options, on_start)


def list_rows(options: BenchmarkOptions) -> list[BenchmarkOptions]:
    """Returns the options of one benchmark for every row of the suite.

    With checkpoints there are rows for every drafter, with all of `options.gammas` in each:
    temperature 0 (with T5X beside it, if that is installed) and temperature 1, both by the paper's
    Algorithm 1; and lenience 0.5, 0.3 and 0.1 at temperature 1 (tables 2 to 5, figures 1 and 5).
    With a preset, whose weights are random, there is a row for every drafter and γ, at the given
    temperature, with each synthetic acceptance rate.

    Raises:
      ValueError: no row can be made, or `BenchmarkOptions.check` rejects one.
    """
    _check(options)
    drafters: list[dict[str, Any]] = [
        {"drafter_preset": name, "drafter": None} for name in _model_names(options.drafter_preset)
    ]
    drafters += [
        {"drafter": name, "drafter_preset": None} for name in _model_names(options.drafter)
    ]
    if options.preset:
        how: list[dict[str, Any]] = [{"temperature": options.temperature}]
        # Each γ by itself: for all of them together the programs of a large model take more memory
        # mappings than a process may have.
        drafters = [
            drafter | {"gamma": (gamma,)} for drafter in drafters for gamma in options.gammas
        ]
    else:
        how = [dict(temperature=value, verifier="token") for value in (0.0, 1.0)]
        how += [
            dict(temperature=1.0, verifier="lenient", lenience=value)
            for value in paper.LENIENCES
            if value < 1
        ]
    single = dataclasses.replace(options, suite=None, output=None, report=None, plot=None)
    made = [dataclasses.replace(single, **drafter, **one) for drafter in drafters for one in how]
    for row in made:
        row.check()
    return made


def _check(options: BenchmarkOptions) -> None:
    if options.suite not in SUITES:
        raise ValueError(f"suite: got {options.suite!r}, expected {' or '.join(SUITES)}")
    suite = f"suite={options.suite!r}"
    if not options.output:
        raise ValueError(f"output: got nothing with {suite}, expected the file of its records")
    check_output(options.output, source=options.input_file)
    if is_pass_through(options.output):
        raise ValueError(
            f"output: got {options.output!r}, expected a regular file: its records are read again"
        )
    if options.plot:
        raise mismatch_error("plot", f"{options.plot!r} with {suite}", "--report for its figures")
    if options.report:
        figures.check_page("report", options.report, options.input_file)
    if not (_model_names(options.drafter) or _model_names(options.drafter_preset)):
        raise ValueError(f"drafter: got nothing with {suite}, expected one or several")
    if options.preset and not options.synthetic_alpha:
        raise ValueError(
            "synthetic_alpha: got nothing with suite and preset, expected numbers, since the "
            "weights are random"
        )
    own = ["verifier", "lenience", "against", "json", "num_beams", "tree"]
    own += [] if options.preset else ["temperature", "synthetic_alpha"]
    default = BenchmarkOptions()
    for name in own:
        if (got := getattr(options, name)) != getattr(default, name):
            raise ValueError(f"{name}: got {got!r} with {suite}, which sets it itself")


def _model_names(text: str | None) -> list[str]:
    return [name for name in (text or "").split(",") if name]


def _run(options: BenchmarkOptions, on_start: Callable[[], object]) -> None:
    made = list_rows(options)
    assert options.output, "the options were checked"
    target, contents = _open(made)
    settings = {
        "suite": options.suite,
        "rows": [dataclasses.asdict(row) for row in made],
        "machine": machine.describe_machine(),
        "contents": contents,
    }
    failed: list[str] = []
    with Journal(options.output, settings, len(made)) as journal:
        on_start()
        if journal.done:
            print_line(f"{journal.name}: {len(journal.done)} of {len(made)} rows are there")
        for number, row in enumerate(made):
            if number in journal.done:
                continue
            print(_row_title(row), flush=True)
            target, record, problems = _measure(row, target)
            if problems:  # the row is not kept: the next run measures it again
                failed += [f"{_row_title(row)}: {problem}" for problem in problems]
            else:
                journal.add(number, [json.dumps(record)])
            print(summaries.benchmark_summary(record) + "\n", flush=True)
            # A program of a large model takes thousands of memory mappings on a CPU, of which Linux
            # gives a process 65,530.
            jax.clear_caches()
        if failed:
            raise CheckFailed("; ".join(failed))
        journal.finish()
    records = read_records(options.output)
    print(_tabulate([line for record in records for line in read_rows(record)]))
    if options.report:
        page = report_page.report([(options.output, record) for record in records])
        write_file(options.report, page)
        print(f"wrote {options.output} and {options.report}")
    else:
        print(f"wrote {options.output}; `specdec figures --records={options.output}` draws it")


def _open(made: Sequence[BenchmarkOptions]) -> tuple[LanguageModel | None, list[str]]:
    """Loads every drafter once, before anything is timed.

    Returns the target, and texts that identify models and inputs.

    Raises:
      ValueError: a drafter is missing or does not fit, or inputs are too long.
    """
    target, contents = None, [f"T5X: {importlib.util.find_spec('t5x') is not None}"]
    for row in {(row.drafter, row.drafter_preset): row for row in made}.values():
        if row.drafter_preset:  # random weights, which the shape decides
            continue
        workload = benchmark_command.load(row, target)
        target, drafter, batches, _ = workload
        assert drafter is not None, "every row has one"
        workload.check_prompts()
        contents.append(drafter.contents)
        if len(contents) == 2:
            ids = digest(str(batch.ids).encode() for batch in batches)
            contents += [digest([target.contents.encode()]), ids]
    return target, contents


def _measure(
    row: BenchmarkOptions, target: LanguageModel | None
) -> tuple[LanguageModel, dict, list[str]]:
    workload = benchmark_command.load(row, target)
    if _can_run_t5x(row, workload.target):
        row = dataclasses.replace(row, against="t5x")
    others = make_others(row, workload.target)
    record, problems = analysis_benchmark.benchmark(workload._replace(options=row), others)
    return workload.target, record, problems


def _can_run_t5x(row: BenchmarkOptions, target: LanguageModel) -> bool:
    """Returns whether T5X is installed and can decode the row: argmax, with a shape it supports."""
    if row.temperature > 0 or row.sampling().mode.processes:
        return False
    if t5x.explain_unsupported(target.config):
        return False
    known = target.start_token == 0 and len(target.eos_ids) <= 1
    return known and importlib.util.find_spec("t5x") is not None


def _row_title(row: BenchmarkOptions) -> str:
    target, drafter = row.preset or row.target, row.drafter_preset or row.drafter
    lenience = "" if row.lenience is None else f", lenience {row.lenience:g}"
    gammas = ", ".join(map(str, row.gammas))
    return f"== {target} with {drafter}, gamma {gammas}, temperature {row.temperature:g}{lenience}"


def _tabulate(measured: Sequence[Row]) -> str:
    """Returns rows as in tables 2 and 4.

    "expected" is theorem 3.8 with the measured v, encoders and lengths.
    """
    lines = [f"{'drafter':<28} T  verification          γ  α      c      v     expected  measured"]
    for row in measured:
        kind = f"{row.drafter:<28} {row.temperature:g}  {row.verifier:<20} {row.gamma:>2}"
        numbers = (row.alpha, 3), (row.cost_ratio, 3), (row.verify_cost, 2), (row.predicted, 2)
        alpha, c, v, expected = (
            "-" if value is None else f"{value:.{digits}f}" for value, digits in numbers
        )
        gain = "-"
        if row.improvement is not None:
            gain = "{:.2f} ({:.2f} to {:.2f})".format(*row.improvement)
        lines.append(f"{kind}  {alpha:<5}  {c:<5}  {v:<4}  {expected:<8}  {gain}")
    return "\n".join(lines)
