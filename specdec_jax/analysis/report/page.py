"""Builds one HTML page of the paper's tables and figures, computed, and of measured records."""

import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from specdec_jax.analysis import formulas, traces
from specdec_jax.analysis.report import paper, plots, summaries
from specdec_jax.analysis.report.records import (
    AcceleratorRecord,
    AgainstRecord,
    BeamRecord,
    BenchmarkRecord,
    DemoRecord,
    DrawnTree,
    EstimateRecord,
    ExampleVariant,
    FigureRecord,
    MeasureRecord,
    Record,
    TreeRecord,
)
from specdec_jax.analysis.report.rows import Row, list_rows
from specdec_jax.analysis.timing import Spread
from specdec_jax.speculative.verifiers import LOSSY, SYNTHETIC

_TITLE = "Speculative decoding: theory and measurements"

# Rows whose printed factor needs more digits of α and c than were printed.
BLURRED = tuple(
    row
    for row in paper.TABLE_4
    if round(formulas.improvement(row.alpha, row.gamma, row.cost_ratio), 1) != row.expected
)


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
        return [any(re.match(r"\s*[^\W\d]", str(cell)) for cell in cells) for cells in columns]


def report(read: Sequence[tuple[pathlib.Path, Record]]) -> str:
    """Returns the page as text.

    Args:
      read: (file, record) pairs, of `read_records`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    records = [record for _, record in read]
    estimates = [record for record in records if isinstance(record, EstimateRecord)]
    return environment.get_template("page.html").render(
        title=_TITLE,
        given=bool(read),
        legend=traces.LEGEND,
        draw_tree=_draw_tree,
        draw_timeline=_draw_timeline,
        sections=[
            _section(record) | {"name": path.name}
            for path, record in read
            if not isinstance(record, EstimateRecord)
        ],
        rates=_tabulate_rates([row for record in records for row in list_rows(record)]),
        leniences=_tabulate_leniences(records),
        estimates=[(describe_memory(record), tabulate_times(record)) for record in estimates],
        missing=_tabulate_missing(records),
        theory=_theory_section(),
    )


def _finalize(value: object) -> object:
    """Returns a value as text that a page can hold; Jinja escapes what is not `Markup`."""
    return value if isinstance(value, Markup) else plots.replace_unprintable(str(value))


def _draw_tree(tree: DrawnTree) -> Markup:
    return Markup(plots.render_svg(plots.draw_tree(tree.drawn())))


def _draw_timeline(variants: Sequence[ExampleVariant]) -> Markup:
    names = [f"γ = {variant.gamma}" if variant.gamma else "plain" for variant in variants]
    bars = [(name, variant.spans) for name, variant in zip(names, variants, strict=True)]
    return Markup(plots.render_svg(plots.draw_timeline(bars)))


def _theory_section() -> dict[str, Any]:
    gains = {
        row: formulas.improvement(row.alpha, row.gamma, row.cost_ratio) for row in paper.TABLE_4
    }
    return {
        "expected_tokens": Markup(plots.render_svg(plots.draw_expected_tokens())),
        "optimal_gammas": Markup(plots.render_svg(plots.draw_optimal_gammas())),
        "operations": Markup(plots.render_svg(plots.draw_operations())),
        "table_1": Table.build(
            "Table 1. Factors in arithmetic operations and speed, c = ĉ = 0",
            paper.TABLE_1,
            ("α", "{0.alpha:.1f}"),
            ("γ", "{0.gamma}"),
            ("operations, printed", "{0.operations:.2f}"),
            ("computed", lambda row: f"{formulas.operations(row.alpha, row.gamma):.2f}"),
            ("speed, printed", "{0.speed:.2f}"),
            ("computed", lambda row: f"{formulas.improvement(row.alpha, row.gamma, 0.0):.2f}"),
        ),
        "table_4": Table.build(
            "Tables 2 and 4. Improvement of T5-XXL on one TPU v4, batch 1",
            paper.TABLE_4,
            ("drafter", "{0.task}, {0.drafter}"),
            ("T", "{0.temperature}"),
            ("γ", "{0.gamma}"),
            ("α", "{0.alpha:.2f}"),
            ("c", "{0.cost_ratio:.2f}"),
            ("expected, printed", "{0.expected:.1f}"),
            ("computed", lambda row: f"{gains[row]:.2f}"),
            ("measured (paper)", "{0.measured:.1f}"),
            ("best γ", lambda row: formulas.optimal_gamma(row.alpha, row.cost_ratio)),
            (
                "oracle of γ",
                lambda row: f"{formulas.oracle_improvement(row.alpha, row.cost_ratio):.2f}",
            ),
        ),
        "table_5": Table(
            "Table 5. α of standard sampling over lenience, T5-XXL, EnDe (printed)",
            ("drafter", *(f"l = {value:g}" for value in paper.LENIENCES)),
            [
                (name, *(f"{alpha:.2f}" for alpha in alphas))
                for name, alphas in paper.TABLE_5.items()
            ],
        ),
        "blurred": "; ".join(
            f"{row.task}, {row.drafter}, temperature {row.temperature}: {gains[row]:.2f} where "
            f"{row.expected:.1f} is printed"
            for row in BLURRED
        ),
    }


def _section(record: Any) -> dict[str, Any]:
    """Returns what the page shows of a record, by the names that its template has."""
    section: dict[str, Any] = dict.fromkeys(
        ("table", "accelerator", "same_positions", "against", "trees", "example", "demo")
    )
    section |= {"machine": record.machine.describe(), "pictures": []}
    if isinstance(record, AcceleratorRecord):
        return section | _accelerator_section(record)
    if isinstance(record, DemoRecord):
        pair = f"{record.target.name} with {record.drafter.name}"
        about = f"{pair}, temperature {record.options.temperature:g}"
        return section | {"about": about, "demo": record}
    measured, figures = list_rows(record), []
    section["about"] = measured[0].about if measured else ""
    beams = isinstance(record, BeamRecord)
    section["table"] = _tabulate_rows(measured, "beam search" if beams else "decoding")
    if isinstance(record, MeasureRecord):
        figures.append(plots.draw_measurement(record))
        if record.same_positions:
            same = record.same_positions.model_dump()
            section["same_positions"] = summaries.describe_same_positions(same)
    bars = [
        (_name_bar(row, beams), row.improvement, row.predicted)
        for row in measured
        if row.improvement is not None
    ]
    if bars:
        figures.append(plots.draw_improvements(bars))
    if isinstance(record, BenchmarkRecord | BeamRecord) and record.against:
        section["against"] = _tabulate_against(record.against)
        section["differing"] = len(record.against.differences)
    if isinstance(record, BenchmarkRecord):
        section["trees"] = _tabulate_trees(record.trees) if record.trees else None
        section["example"] = record.example
    return section | {"pictures": [Markup(plots.render_svg(figure)) for figure in figures]}


def _name_bar(row: Row, beams: bool) -> str:
    # The variants of a record may differ by what the row calls its verification.
    named = beams or row.verifier.startswith((SYNTHETIC.name, "tree "))
    gamma = [] if row.gamma is None else [f"γ = {row.gamma}"]
    return ", ".join([row.drafter, *gamma, *([row.verifier] if named else [])])


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


def _tabulate_against(against: AgainstRecord) -> Table:
    return Table.build(
        f"Time of {against.name}'s own decoding over ours, on the same weights and inputs",
        against.improvement.items(),
        ("ours", lambda item: item[0]),
        ("factor", lambda item: _spread(item[1].spread())),
    )


def _tabulate_trees(trees: Sequence[TreeRecord]) -> Table:
    return Table.build(
        "Tokens per target call of trees",
        trees,
        ("tree", "tree {0.tree}"),
        ("positions", "{0.nodes}"),
        ("depth", "{0.depth}"),
        ("predicted", lambda tree: _format_decimal(tree.predicted, 2)),
        ("measured", "{0.stats.tokens_per_target_call:.2f}"),
    )


def _tabulate_rates(measured: Sequence[Row]) -> Table:
    """Returns table 3: the paper's α, then the records'."""
    ours: dict[tuple[str, str, str], dict[bool, str]] = {}
    for row in measured:
        exact = row.verifier.partition(",")[0] not in (SYNTHETIC.name, *LOSSY)
        if row.alpha is not None and row.temperature in (0, 1) and exact:
            by_argmax = ours.setdefault((row.target, row.drafter, row.sentences), {})
            by_argmax.setdefault(row.temperature == 0, _format_rate(row))
    lines = [
        (row.target, row.drafter, "paper", f"{row.argmax:.2f}", f"{row.sampled:.2f}")
        for row in paper.TABLE_3
    ]
    lines += [(*pair, by.get(True, "-"), by.get(False, "-")) for pair, by in ours.items()]
    caption = "Table 3. α per position of the output, at temperature 0 and 1"
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
    return Table("Table 5. α and improvement over lenience", head, lines)


def _accelerator_section(record: AcceleratorRecord) -> dict[str, Any]:
    options, drawn = record.options, plots.draw_accelerator(record)
    about = (
        f"Dummy weights, {options.dtype}{', all shapes shrunk' if options.tiny else ''}, drafter "
        f"{options.drafter}, γ = {options.gamma}, inputs of {options.input_length} ids, "
        f"{options.max_new_tokens} new tokens."
    )
    return {
        "about": about,
        "accelerator": True,
        "table": tabulate_figures(record),
        "pictures": [Markup(plots.render_svg(drawn))] if drawn is not None else [],
    }


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


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.3f} ({spread.least:.3f} to {spread.most:.3f})"
