"""Builds one HTML page of the paper's tables and figures beside measured records."""

import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from specdec_jax.analysis import formulas, traces
from specdec_jax.analysis.report import paper, plots, summaries
from specdec_jax.analysis.report.records import (
    AcceleratorRecord,
    BeamRecord,
    BenchmarkRecord,
    DemoRecord,
    DrawnTree,
    EstimateRecord,
    ExampleRecord,
    FigureRecord,
    MeasureRecord,
    Record,
    read_records,
)
from specdec_jax.analysis.report.rows import Row, list_rows
from specdec_jax.analysis.timing import Spread
from specdec_jax.files.reading import PathLike
from specdec_jax.speculative.verifiers import LOSSY, SYNTHETIC

_FOLDER = pathlib.Path(__file__).parent
# Made by `specdec benchmark --target=ende/target --drafter=ende/drafter --quantize=none
# --gamma=3,6 --tree=widths:2,2,1 --repeats=9`: figures 1 and 5 where no given record has them.
_BUNDLED = _FOLDER / "bundled_record.json"

# Rows whose printed factor needs more digits of α and c than were printed.
BLURRED = tuple(
    row
    for row in paper.TABLE_4
    if round(formulas.improvement(row.alpha, row.gamma, row.cost_ratio), 1) != row.expected
)

# A kind of part, which has a macro of this name in the template, and what it shows.
Parts = list[tuple[str, Any]]


class Table(NamedTuple):
    """A table of the page."""

    caption: str
    head: Sequence[str]
    lines: Sequence[Sequence[Any]]

    @classmethod
    def build(
        cls, caption: str, rows: Iterable[Any], *columns: tuple[str, str | Callable[[Any], Any]]
    ) -> "Table":
        """Returns a table with a line for each of `rows`.

        A column is its head, and how its cells are made: by a format string that takes the row, or
        a function of it.
        """
        cells = [text.format if isinstance(text, str) else text for _, text in columns]
        lines = [tuple(cell(row) for cell in cells) for row in rows]
        return cls(caption, [head for head, _ in columns], lines)

    @property
    def is_text(self) -> list[bool]:
        """Whether each column has a cell that begins with a word: it is aligned to the left."""
        columns = zip(*self.lines, strict=True) if self.lines else [()] * len(self.head)
        return [
            any(re.match(r"\s*(<a |[^\W\d])", str(cell)) for cell in cells) for cells in columns
        ]


class Run(NamedTuple):
    """A record that was given, and how the page calls it."""

    name: str  # of its file
    record: Any
    rows: list[Row]

    @property
    def title(self) -> str:
        """What it was: target, drafter, inputs and temperature."""
        if isinstance(self.record, AcceleratorRecord):
            return f"Dummy weights on {self.record.machine.device}"
        if isinstance(self.record, DemoRecord):
            names = self.record.target.name, self.record.drafter.name
            return f"Demo: {' with '.join(names)}, T = {self.record.options.temperature:g}"
        if not self.rows:
            return "Nothing was drafted"
        row, drafters = self.rows[0], {row.drafter for row in self.rows}
        drafter = row.drafter if len(drafters) == 1 else f"{len(drafters)} drafters"
        return f"{row.target} with {drafter}, {row.sentences}, T = {row.temperature:g}"

    @property
    def best(self) -> Row | None:
        """The fastest way that drafts and was timed with real acceptance; None if there is none."""
        timed = [row for row in self.rows if row.improvement and not _is_synthetic(row)]
        return max(timed, key=lambda row: row.improvement or (0.0,), default=None)


def report(read: Sequence[tuple[PathLike, Record]]) -> str:
    """Returns the page as text.

    Args:
      read: (file, record) pairs, of `read_records`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    given = bool(read)
    read = read or _read_bundled()
    records = [record for _, record in read]
    estimates = [record for record in records if isinstance(record, EstimateRecord)]
    measured = [pair for pair in read if not isinstance(pair[1], EstimateRecord)]
    runs = [_make_run(path, record) for path, record in measured]
    rows = [row for run in runs for row in run.rows]
    return environment.get_template("page.html").render(
        given=given,
        legend=traces.LEGEND,
        verdict=_describe_verdict(runs),
        summary=_tabulate_summary(runs),
        examples=_list_examples(runs),
        measured=[
            ("Table 2. Improvement, measured beside printed", _tabulate_improvements(rows)),
            ("Table 3. α, measured beside printed", _tabulate_rates(rows)),
            ("Table 5. α and improvement over lenience", _tabulate_leniences(records)),
        ],
        runs=[(run, _list_parts(run)) for run in runs],
        estimates=[(describe_memory(record), tabulate_times(record)) for record in estimates],
        missing=_tabulate_missing(records),
        theory=_list_theory(),
    )


def _make_run(path: PathLike, record: Record) -> Run:
    return Run(pathlib.PurePath(path).name, record, list_rows(record))


def _finalize(value: object) -> object:
    """Returns a value as text that a page can hold; Jinja escapes what is not `Markup`."""
    return value if isinstance(value, Markup) else plots.replace_unprintable(str(value))


def _read_bundled() -> list[tuple[PathLike, Record]]:
    return [(_BUNDLED, record) for record in read_records(str(_BUNDLED))]


# The verdict and the summary.


def _is_synthetic(row: Row) -> bool:
    return row.verifier.startswith(SYNTHETIC.name)


def _rate_gain(gain: Spread) -> str:
    """Returns whether drafting pays, beyond the spread of the passes."""
    if gain.least > 1:
        return "pays"
    return "does not pay" if gain.most < 1 else "may or may not pay"


def _describe_verdict(runs: Sequence[Run]) -> str:
    """Returns in words whether drafting pays in the best run, and in how many others."""
    found = [(run.best.improvement, run.best, run) for run in runs if run.best]
    timed = [(gain, best, run) for gain, best, run in found if gain is not None]
    if not timed:
        return "No verdict: no record times whole decodes with a drafter's own acceptance."
    gain, best, run = max(timed, key=lambda one: one[0])
    paying = sum(_rate_gain(one[0]) == "pays" for one in timed)
    others = f" It pays in {paying} of {len(timed)} timed runs." if len(timed) > 1 else ""
    return (
        f"Drafting {_rate_gain(gain)}: {_spread(gain, 2)} times the speed of plain decoding, with "
        f"{_name_way(best)} ({best.about}; {run.record.machine.processor}).{others}"
    )


def _tabulate_summary(runs: Sequence[Run]) -> Table:
    """Returns a line for each run: its fastest way of decoding, or what it was for."""
    lines = []
    for number, run in enumerate(runs, 1):
        title = plots.replace_unprintable(run.title)
        link = Markup('<a href="#run-{}">{}</a>').format(number, title)
        expected = max((row.predicted for row in run.rows if row.predicted), default=None)
        if (best := run.best) and best.improvement:
            way, gain = _name_way(best), _spread(best.improvement, 2)
            counts = _format_decimal(best.tokens_per_call, 2), _format_decimal(best.differ, 0)
            lines.append((link, way, gain, *counts, _rate_gain(best.improvement)))
        elif expected is not None:
            lines.append((link, "-", f"{expected:.2f} expected", "-", "-", "not timed"))
        else:
            lines.append((link, *("-" * 4), "no verdict"))
    head = ("run", "fastest", "times plain", "tokens per call", "outputs that differ", "drafting")
    return Table("The runs, each by its fastest way of decoding", head, lines)


# Figures.


def _draw_panels(panels: Mapping[str, plots.Panel]) -> tuple[str, Any]:
    drawn = {name: plots.draw_panels({name: panel}) for name, panel in panels.items()}
    return "panels", [plots.render_svg(figure, name) for name, figure in drawn.items()]


def _draw_tree(tree: DrawnTree, of: str) -> Parts:
    drawn = tree.drawn()
    words = plots.describe_tree(drawn)
    shown = {"nodes": f"Token tree: {words}", "mask": "Which nodes each node attends to"}
    pictures = [
        plots.render_svg(plots.draw_tree(drawn, [part]), label) for part, label in shown.items()
    ]
    title = f"Tree {tree.tree}: call {tree.call} of {of}"
    return [("heading", title), ("note", f"{words}."), ("panels", pictures)]


def _list_examples(runs: Sequence[Run]) -> Parts:
    """Returns figures 1 and 5 of every record that has them, or of the bundled one."""
    found = [
        (run.title, run.record.machine, run.record.example)
        for run in [*runs, *(_make_run(path, record) for path, record in _read_bundled())]
        if isinstance(run.record, BenchmarkRecord) and run.record.example
    ]
    parts: Parts = []
    for title, machine, example in found[:-1] or found:
        parts += [("heading", title), ("note", machine.processor), *_draw_example(example)]
    return parts


def _draw_example(example: ExampleRecord) -> Parts:
    parts: Parts = [("text", f"Input: {example.input}")]
    for variant in example.variants:
        if variant.lines:
            parts += [("text", f"γ = {variant.gamma}"), ("calls", variant.lines)]
    names = [f"γ = {variant.gamma}" if variant.gamma else "plain" for variant in example.variants]
    spans = [variant.spans for variant in example.variants]
    figure = plots.draw_timeline(list(zip(names, spans, strict=True)))
    label = "Figure 5: the calls of one input one after another, a bar for each γ"
    return [*parts, ("panels", [plots.render_svg(figure, label)])]


def _list_theory() -> Parts:
    gains = {
        row: formulas.improvement(row.alpha, row.gamma, row.cost_ratio) for row in paper.TABLE_4
    }
    table_1 = Table.build(
        "Table 1. Factors in arithmetic operations and speed, c = ĉ = 0",
        paper.TABLE_1,
        ("α", "{0.alpha:.1f}"),
        ("γ", "{0.gamma}"),
        ("operations, printed", "{0.operations:.2f}"),
        ("computed", lambda row: f"{formulas.operations(row.alpha, row.gamma):.2f}"),
        ("speed, printed", "{0.speed:.2f}"),
        ("computed", lambda row: f"{formulas.improvement(row.alpha, row.gamma, 0.0):.2f}"),
    )
    table_4 = Table.build(
        "Table 4. Expected improvement of T5-XXL on one TPU v4, batch 1",
        paper.TABLE_4,
        ("drafter", "{0.task}, {0.drafter}"),
        ("T", "{0.temperature}"),
        ("γ", "{0.gamma}"),
        ("α", "{0.alpha:.2f}"),
        ("c", "{0.cost_ratio:.2f}"),
        ("expected, printed", "{0.expected:.1f}"),
        ("computed", lambda row: f"{gains[row]:.2f}"),
        ("best γ", lambda row: formulas.optimal_gamma(row.alpha, row.cost_ratio)),
        (
            "oracle of γ",
            lambda row: f"{formulas.oracle_improvement(row.alpha, row.cost_ratio):.2f}",
        ),
    )
    table_5 = Table(
        "Table 5. α of standard sampling over lenience, T5-XXL, EnDe (printed)",
        ("drafter", *(f"l = {value:g}" for value in paper.LENIENCES)),
        [(name, *(f"{alpha:.2f}" for alpha in alphas)) for name, alphas in paper.TABLE_5.items()],
    )
    blurred = "; ".join(
        f"{row.task}, {row.drafter}, temperature {row.temperature}: {gains[row]:.2f} where "
        f"{row.expected:.1f} is printed"
        for row in BLURRED
    )
    return [
        _draw_panels(plots.THEORY),
        ("note", "The left of figure 4, the factor in speed with c = 0, is figure 2 again."),
        ("table", table_1),
        ("table", table_4),
        (
            "note",
            "Computed from the digits of α and c that were printed. They are not enough for "
            f"{blurred}.",
        ),
        ("table", table_5),
    ]


# Runs.


def _list_parts(run: Run) -> Parts:
    record, rows = run.record, run.rows
    parts: Parts = [("note", f"{run.name}: {record.machine.describe()}")]
    if isinstance(record, AcceleratorRecord):
        return [*parts, *_list_accelerator_parts(record)]
    if isinstance(record, DemoRecord):
        for call in record.calls:
            parts += [("text", call.input), ("calls", call.lines)]
        return parts + (_draw_tree(record.tree, f"“{record.tree.input}”") if record.tree else [])
    beams = isinstance(record, BeamRecord)
    parts.append(("table", _tabulate_rows(rows, "beam search" if beams else "decoding")))
    if isinstance(record, MeasureRecord):
        parts.append(_draw_panels(plots.list_measurement_panels(record)))
        if record.same_positions:
            same = summaries.describe_same_positions(record.same_positions.model_dump())
            parts.append(("text", f"{same}."))
    bars = [(_name_way(row), row.improvement, row.predicted) for row in rows if row.improvement]
    if bars:
        drawn = plots.draw_improvements(bars)
        label = "Measured and predicted improvement over plain decoding, as in the table"
        parts.append(("panels", [plots.render_svg(drawn, label)]))
    if isinstance(record, BenchmarkRecord | BeamRecord) and (against := record.against):
        table = Table.build(
            f"Time of {against.name}'s own decoding over ours, on the same weights and inputs",
            against.improvement.items(),
            ("ours", lambda item: item[0]),
            ("factor", lambda item: _spread(item[1].spread())),
        )
        count = len(against.differences)
        differ = f"Inputs with other tokens than plain decoding: {count}."
        parts += [("table", table), ("note", differ)]
    if isinstance(record, BenchmarkRecord) and record.trees:
        table = Table.build(
            "Tokens per target call of trees",
            record.trees,
            ("tree", "tree {0.tree}"),
            ("positions", "{0.nodes}"),
            ("depth", "{0.depth}"),
            ("predicted", lambda tree: _format_decimal(tree.predicted, 2)),
            ("measured", "{0.stats.tokens_per_target_call:.2f}"),
        )
        note = (
            "Predicted: by the top-k hit rate in the same run, as if every node was accepted "
            "independently of the others and no output ended; nothing for trees that the "
            "drafter's distribution shapes."
        )
        parts += [("table", table), ("note", note)]
    if isinstance(record, BenchmarkRecord) and record.example:
        for tree in record.example.trees:
            parts += _draw_tree(tree, "the first input")
    return parts


def _name_way(row: Row) -> str:
    gamma = [] if row.gamma is None else [f"γ = {row.gamma}"]
    return ", ".join([row.drafter, *gamma, row.verifier])


def _tabulate_rows(measured: Sequence[Row], what: str) -> Table:
    return Table.build(
        f"Improvement over plain {what}",
        measured,
        ("drafter", "{0.drafter}"),
        ("verification", "{0.verifier}"),
        ("γ", lambda row: _format_decimal(row.gamma, 0)),
        ("α", _format_rate),
        ("c (products)", lambda row: _format_cost(row.cost_ratio, row.bare_cost_ratio, 3)),
        ("v (products)", lambda row: _format_cost(row.verify_cost, row.bare_verify_cost, 2)),
        ("tokens per call", lambda row: _format_decimal(row.tokens_per_call, 2)),
        ("predicted", lambda row: _format_decimal(row.predicted, 3)),
        ("measured", lambda row: _spread(row.improvement)),
        ("measured / predicted", lambda row: _spread(row.reached)),
        ("outputs that differ", lambda row: _format_decimal(row.differ, 0)),
    )


# The paper's tables, measured beside printed.


def _tabulate_improvements(measured: Sequence[Row]) -> Table:
    """Returns table 2: what the records timed, then what the paper printed."""
    head = ("target", "drafter", "where", "T", "γ", "α", "c", "expected", "measured")
    lines: list[tuple] = [
        (
            row.target,
            row.drafter,
            f"{row.sentences}, {row.verifier}",
            f"{row.temperature:g}",
            _format_decimal(row.gamma, 0),
            _format_rate(row),
            _format_decimal(row.cost_ratio, 2),
            _format_decimal(row.predicted, 2),
            _spread(row.improvement, 2),
        )
        for row in measured
        if row.improvement is not None and not _is_synthetic(row)
    ]
    for row in paper.TABLE_4:
        costs = f"{row.alpha:.2f}", f"{row.cost_ratio:.2f}"
        gains = f"{row.expected:.1f}", f"{row.measured:.1f}"
        named = f"T5-XXL ({row.task})", row.drafter, "paper, TPU v4"
        lines.append((*named, row.temperature, row.gamma, *costs, *gains))
    return Table("Improvement over plain decoding", head, lines)


def _tabulate_rates(measured: Sequence[Row]) -> Table:
    """Returns table 3: the records' α, then the paper's."""
    ours: dict[tuple[str, str, str], dict[bool, str]] = {}
    for row in measured:
        exact = row.verifier.partition(",")[0] not in (SYNTHETIC.name, *LOSSY)
        if row.alpha is not None and row.temperature in (0, 1) and exact:
            by_argmax = ours.setdefault((row.target, row.drafter, row.sentences), {})
            by_argmax.setdefault(row.temperature == 0, _format_rate(row))
    lines = [(*pair, by.get(True, "-"), by.get(False, "-")) for pair, by in ours.items()]
    lines += [
        (row.target, row.drafter, "paper", f"{row.argmax:.2f}", f"{row.sampled:.2f}")
        for row in paper.TABLE_3
    ]
    caption = "α per position of the output, at temperature 0 and 1"
    return Table(caption, ("target", "drafter", "where", "T = 0", "T = 1"), lines)


def _tabulate_leniences(records: Sequence[Record]) -> Table | None:
    """Returns table 5 of the records with a lenient verifier: α and improvement by lenience."""
    by_pair: dict[tuple, dict[float, str]] = {}
    for record in records:
        if not isinstance(record, BenchmarkRecord | MeasureRecord):
            continue
        if (lenience := record.options.lenience) is None:
            continue
        for row in list_rows(record):
            pair = row.target, row.drafter, row.sentences, f"{row.temperature:g}", row.gamma
            by_pair.setdefault(pair, {})[lenience] = (
                f"{_format_rate(row)}, {_spread(row.improvement)}"
            )
    if not by_pair:
        return None
    values = sorted({value for by in by_pair.values() for value in by}, reverse=True)
    lines = [(*pair, *(by.get(value, "-") for value in values)) for pair, by in by_pair.items()]
    head = ("target", "drafter", "where", "T", "γ", *(f"l = {value:g}" for value in values))
    return Table("α and improvement by lenience", head, lines)


# Accelerators and estimates.


def _list_accelerator_parts(record: AcceleratorRecord) -> Parts:
    options = record.options
    about = (
        f"Dummy weights, {options.dtype}{', all shapes shrunk' if options.tiny else ''}, drafter "
        f"{options.drafter}, γ = {options.gamma}, inputs of {options.input_length} ids, "
        f"{options.max_new_tokens} new tokens."
    )
    note = (
        "Milliseconds: of a call or step; of whole decodes for one token of a row, encoder of one "
        "layer included. Floor: milliseconds in which the weights of a step are read at the "
        "bandwidth of the copy. Ratio: v of a target call and c of a draft step, both over the "
        "target's call over one position; of a speculative decode and of another library's how "
        "many times as fast as the plain one of the same target it is, and, in int8, as the full "
        "target's plain one; of a call in int8 the time over that of the full target."
    )
    panels = _draw_panels(plots.list_accelerator_panels(record))
    return [("text", about), ("table", tabulate_figures(record)), ("note", note), panels]


def tabulate_figures(record: AcceleratorRecord) -> Table:
    """Returns a line for every planned figure; one that is not in the file was not run."""
    times = ("figure", "batch", "milliseconds", "(least to most)", "floor")
    rates = ("ratio", "ms an iteration", "tokens a second", "")
    found = {figure.figure: figure for figure in record.figures}
    lines = [
        _figure_line(found[name]) if name in found else (name, *("-" * 7), "not run")
        for name in record.plan
    ]
    return Table("An accelerator's figures", (*times, *rates), lines)


def _figure_line(figure: FigureRecord) -> tuple:
    batch, times = _format_decimal(figure.batch, 0), figure.milliseconds
    if times is None:
        failed = f"failed: {figure.failed}"
        why = failed if figure.failed else f"not supported here: {figure.unsupported}"
        return figure.figure, batch, *("-" * 6), why
    speed = figure.gb_per_second
    what = "" if speed is None else f"{speed:.0f} GB a second"
    return (
        figure.figure,
        batch,
        f"{times.median:.3g}",
        f"{times.least:.3g} to {times.most:.3g}",
        "-" if figure.floor_ms is None else f"{figure.floor_ms:.3g}",
        _format_ratio(figure),
        _format_decimal(figure.iteration_ms, 3),
        _format_decimal(figure.tokens_per_second, 0),
        f"acceptance {figure.acceptance}" if figure.acceptance else what,
    )


# The first of these that a figure has is its ratio.
_RATIOS = {"v": "v = {:.3g}", "c": "c = {:.3g}", "improvement": "{:.2f}", "over_full": "{:.2f}"}


def _format_ratio(figure: FigureRecord) -> str:
    values = [(getattr(figure, key), text) for key, text in _RATIOS.items()]
    parts = [text.format(value) for value, text in values if value is not None][:1]
    if figure.over_full_plain is not None:
        parts.append(f"{figure.over_full_plain:.2f} times the full target's plain")
    return "; ".join(parts) or "-"


def describe_memory(record: EstimateRecord) -> str:
    """Returns sentences with the compiler's estimate of a pair's memory."""
    pair = record.target + (f" with {record.drafter}" if record.drafter else "")
    pair += f", {record.num_beams} beams" if record.num_beams else ""
    copied = "unknown" if record.copied_in_loops is None else len(record.copied_in_loops)
    text = (
        f"{pair}, γ = {record.gamma}, batch {record.batch_size}, {record.dtype}"
        f"{', target in int8' if record.quantize else ''}, compiled ahead of time for "
        f"{record.devices} by jax {record.jax}: weights {record.weights_gb:.1f} GB, needed "
        f"{record.needed_gb:.1f} of {record.memory_gb:.0f} GB on a device: "
        f"{'fits' if record.fits else 'does not fit'}. "
        f"Arrays over a megabyte that loop bodies copy: {copied}."
    )
    if record.iteration_ms:
        text += f" An iteration: {record.iteration_ms:.2f} ms, floor {record.floor_ms:.2f}."
    return text


def tabulate_times(record: EstimateRecord) -> Table | None:
    """Returns table 2 by the compiler's estimates; None if the record has no times."""
    if record.times is None or not record.times.rows:
        return None
    return Table.build(
        "Table 2 by the compiler's estimates: "
        f"T5-XXL on {record.devices}, batch {record.batch_size}",
        record.times.rows,
        ("drafter", "{0.task}, {0.drafter}"),
        ("T", "{0.temperature:g}"),
        ("γ", "{0.gamma}"),
        ("α (paper)", "{0.alpha_paper:.2f}"),
        ("c (paper)", "{0.c_paper:.2f}"),
        ("c", "{0.as_compiled.c:.3f}"),
        ("v", "{0.as_compiled.v:.2f}"),
        ("improvement", "{0.as_compiled.improvement:.2f}"),
        ("c, plain step of two positions", "{0.as_for_two_positions.c:.3f}"),
        ("v", "{0.as_for_two_positions.v:.2f}"),
        ("improvement", "{0.as_for_two_positions.improvement:.2f}"),
        ("expected (paper)", "{0.expected_paper:.1f}"),
        ("measured (paper)", "{0.measured_paper:.1f}"),
    )


def _scale_to_xxl(record: Record) -> bool:
    if isinstance(record, AcceleratorRecord):
        timed = [one.target for one in record.figures if one.improvement is not None]
    elif isinstance(record, BenchmarkRecord):
        timed = [record.target.name]
    else:
        return False
    return "t5_1_1/xxl" in timed and not record.machine.device.startswith("cpu")


def _tabulate_missing(records: Sequence[Record]) -> Table | None:
    """Returns what a complete page has and this one lacks, with the command that measures it."""
    missing = []
    if not any(map(_scale_to_xxl, records)):
        command = "python scripts/accelerator_report.py --output=accelerator.json"
        missing.append(("T5-XXL with T5-small on an accelerator", command))
    if not any(isinstance(record, BenchmarkRecord) and record.against for record in records):
        command = "specdec benchmark --target=ende/target --drafter=ende/drafter --against=t5x"
        missing.append(("T5X's own decoding beside ours", f"{command} --output=t5x.json"))
    if not any(isinstance(record, EstimateRecord) and record.times for record in records):
        command = "JAX_PLATFORMS=cpu python scripts/tpu_aot.py --times --output=tpu.json"
        missing.append(("The TPU compiler's estimates", command))
    lines = [(what, "not measured", command) for what, command in missing]
    caption = "Not measured: no such record was given"
    return Table(caption, ("what", "", "command"), lines) if lines else None


def _format_decimal(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _format_cost(value: float | None, bare: float | None, digits: int) -> str:
    """Returns a cost as text, with the cost of its bare matrix products in parentheses."""
    return _format_decimal(value, digits) + ("" if bare is None else f" ({bare:.{digits}f})")


def _format_rate(row: Row) -> str:
    """Returns α per position of the output, and where something was drafted in parentheses."""
    drafted = row.drafted_alpha
    return _format_decimal(row.alpha, 3) + (
        "" if drafted in (None, row.alpha) else f" ({drafted:.3f})"
    )


def _spread(spread: Spread | None, digits: int = 3) -> str:
    if spread is None:
        return "-"
    median, least, most = (f"{value:.{digits}f}" for value in spread)
    return f"{median} ({least} to {most})"
