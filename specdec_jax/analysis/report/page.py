"""Builds one HTML page of the paper's tables and figures, computed, and of measured records."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.analysis import formulas
from specdec_jax.analysis.report import accelerators, calls, paper, plots, summaries, tables
from specdec_jax.analysis.report.markup import Markup, element
from specdec_jax.analysis.report.record_types import (
    Accelerator,
    Benchmark,
    Measured,
    Searched,
    Shown,
    kind_of,
)
from specdec_jax.analysis.report.rows import (
    Row,
    estimated,
    measured_at,
    memory_estimate,
    placed,
    rows,
    spread_of,
    time_estimates,
)
from specdec_jax.analysis.timing import Spread
from specdec_jax.speculative.verifiers import LOSSY, SYNTHETIC

# The page.

# Rows whose printed factor needs more digits of α and c than were printed.
BLURRED = tuple(
    row
    for row in paper.TABLE_4
    if round(formulas.improvement(row.alpha, row.gamma, row.cost_ratio), 1) != row.expected
)
_STYLE = """:root { color-scheme: light dark; --ink: #222; --faint: #666; --line: #ccc; --head: #f3f3f3; --paper: #fff;
  --accepted: #188038; --own: #1a56c4; --rejected: #c5221f }
@media (prefers-color-scheme: dark) { :root {
  --ink: #ddd; --faint: #999; --line: #444; --head: #2a2a2a; --paper: #181818;
  --accepted: #7fd18f; --own: #8ab4f8; --rejected: #f28b82 } }
body { font-family: sans-serif; margin: 2em auto; max-width: 68em; padding: 0 1em; color: var(--ink);
  background: var(--paper) }
table { border-collapse: collapse; margin: 1em 0; max-width: 100% }
caption { text-align: left; font-weight: bold; padding: 0.3em 0 }
th, td { border-bottom: 1px solid var(--line); padding: 0.25em 0.6em; text-align: right; font-size: 0.85em }
th { background: var(--head) } td { font-variant-numeric: tabular-nums }
td.text, th.text { text-align: left }
@media (max-width: 60em) { table { display: block; overflow-x: auto } }
svg { max-width: 100%; height: auto; background: #fff } p.note { color: var(--faint) }
pre { white-space: pre-wrap } .committed { color: var(--faint) } .accepted { color: var(--accepted) }
.corrected, .bonus { color: var(--own); font-weight: bold } .bonus { text-decoration: underline }
.rejected { color: var(--rejected); text-decoration: line-through }"""
_TITLE = "Speculative decoding: theory and measurements"
_HEAD = (
    "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
    f"<title>{_TITLE}</title><style>{_STYLE}</style></head>\n"
)


def report(read: Sequence[tuple[pathlib.Path, Mapping[str, Any]]]) -> str:
    """Returns the page as text.

    Args:
      read: (file, record) pairs; `read_records` has checked the records.
    """
    parts = [
        element("h1", _TITLE),
        tables.note(
            "Leviathan, Kalman and Matias, ",
            element("i", "Fast Inference from Transformers via Speculative Decoding"),
            ", 2023: “printed” is what the paper says, “computed” what this package's formulas give.",
        ),
        tables.note(
            "α: the probability that the target accepts a drafted token, per position of the output: one at which "
            "nothing was drafted counts as not accepted. In parentheses, for drafters that draft now and then: only "
            "where something was drafted. γ: the tokens drafted for each target call. "
            "c: the time of a draft step over that of a target step. v: the time of a target call over γ + 1 "
            "positions over that of a single position; the paper takes 1."
        ),
        element("h2", "Measured"),
    ]
    if not read:
        parts.append(
            element("p", "Nothing: no records were given (", element("code", "--records"), ").")
        )
    found = [record for _, record in read]
    for path, record in read:
        if not estimated(record):
            sections = {Accelerator: accelerators.section, Shown: calls.shown}.get(
                kind_of(record), _measured
            )
            parts += sections(path, record)
    parts += [*_rates([row for record in found for row in rows(record)]), *_leniences(found)]
    for record in filter(estimated, found):
        parts += _estimate(record)
    body = "\n".join([*parts, *_missing(found), *_theory()])
    return f"{_HEAD}{element('body', Markup(body))}</html>\n"


def _theory() -> list[Markup]:
    table_1 = [
        (
            f"{row.alpha:.1f}",
            row.gamma,
            f"{row.operations:.2f}",
            f"{formulas.operations(row.alpha, row.gamma):.2f}",
            f"{row.speed:.2f}",
            f"{formulas.improvement(row.alpha, row.gamma, 0.0):.2f}",
        )
        for row in paper.TABLE_1
    ]
    table_4 = [
        (
            f"{row.task}, {row.drafter}",
            row.temperature,
            row.gamma,
            f"{row.alpha:.2f}",
            f"{row.cost_ratio:.2f}",
            f"{row.expected:.1f}",
            f"{formulas.improvement(row.alpha, row.gamma, row.cost_ratio):.2f}",
            f"{row.measured:.1f}",
            formulas.optimal_gamma(row.alpha, row.cost_ratio),
            f"{formulas.oracle_improvement(row.alpha, row.cost_ratio):.2f}",
        )
        for row in paper.TABLE_4
    ]
    return [
        element("h2", "Theory"),
        tables.drawing("Figure 2. Expected tokens per target call", plots.expected_tokens()),
        tables.drawing("Figure 3. The best γ", plots.optimal_gammas()),
        tables.table(
            "Table 1. Factors in arithmetic operations and speed, c = ĉ = 0",
            ("α", "γ", "operations, printed", "computed", "speed, printed", "computed"),
            table_1,
        ),
        tables.drawing(
            "Figure 4, right. Arithmetic operations, ĉ = 0", plots.arithmetic_operations()
        ),
        tables.note("Its left, the factor in speed with c = 0, is figure 2 again."),
        tables.table(
            "Tables 2 and 4. Improvement of T5-XXL on one TPU v4, batch 1",
            (
                "drafter",
                "T",
                "γ",
                "α",
                "c",
                "expected, printed",
                "computed",
                "measured (paper)",
                "best γ",
                "oracle of γ",
            ),
            table_4,
        ),
        tables.note(
            f"Computed from the digits of α and c that were printed. They are not enough for {_blurred()}."
        ),
        tables.table(
            "Table 5. α of standard sampling over lenience, T5-XXL, EnDe (printed)",
            ("drafter", *(f"l = {value:g}" for value in paper.LENIENCES)),
            [
                (name, *(f"{alpha:.2f}" for alpha in alphas))
                for name, alphas in paper.TABLE_5.items()
            ],
        ),
    ]


def _blurred() -> str:
    return "; ".join(
        f"{row.task}, {row.drafter}, temperature {row.temperature}: "
        f"{formulas.improvement(row.alpha, row.gamma, row.cost_ratio):.2f} where {row.expected:.1f} is printed"
        for row in BLURRED
    )


def _measured(path: pathlib.Path, record: Mapping[str, Any]) -> list[Markup]:
    found, kind = rows(record), kind_of(record)
    first = found[0] if found else None
    about = f"{first.target}, {first.sentences}, temperature {first.temperature:g}" if first else ""
    lines = [
        (
            row.drafter,
            row.verifier,
            tables.decimal(row.gamma, 0),
            tables.rate(row.alpha, row.drafted_alpha),
            tables.with_bare(row.cost_ratio, row.bare_cost_ratio, 3),
            tables.with_bare(row.verify_cost, row.bare_verify_cost, 2),
            tables.decimal(row.tokens_per_call, 2),
            tables.decimal(row.predicted, 3),
            tables.spread_text(row.improvement),
            tables.spread_text(_reached(row)),
            tables.decimal(row.differ, 0),
        )
        for row in found
    ]
    head = (
        "drafter",
        "verification",
        "γ",
        "α",
        "c (products)",
        "v (products)",
        "tokens per call",
        "predicted",
        "measured",
        "measured / predicted",
        "outputs that differ",
    )
    parts = [element("h3", path.name), element("p", about), tables.note(measured_at(record))]
    searched = (
        kind is Searched
    )  # a call gives steps, of which the output has as many tokens or fewer
    parts.append(
        tables.table(
            f"Improvement over plain {'beam search' if searched else 'decoding'}", head, lines
        )
    )
    if kind is Measured:
        parts.append(plots.svg(plots.improvement(record)))
        if record.get("same_positions"):
            parts.append(element("p", f"{summaries.same_positions(record['same_positions'])}."))

    def name(row):
        return f"{_name(row)}, {row.verifier}" if searched else _name(row)

    bars = [(name(row), row.improvement, row.predicted) for row in found if row.improvement]
    if bars:
        parts.append(plots.svg(plots.measured(bars)))
    if kind in (Benchmark, Searched):
        parts += _against(record.get("against"))
    if kind is Benchmark:
        parts += _tree_tokens(record.get("trees", ()))
        parts += calls.example_parts(record.get("example"))
    return parts


def _reached(row: Row) -> Spread | None:
    """Returns the measured improvement divided by the predicted one."""
    if row.improvement is None or not row.predicted:
        return None
    return Spread(*(value / row.predicted for value in row.improvement))


def _against(against: Mapping[str, Any] | None) -> list[Markup]:
    """Returns how many times as fast as another implementation ours is."""
    if not against:
        return []
    lines = [
        (ours, tables.spread_text(spread_of(times)))
        for ours, times in against["improvement"].items()
    ]
    return [
        tables.table(
            f"Time of {against['name']}'s own decoding over ours, on the same weights and inputs",
            ("ours", "factor"),
            lines,
        ),
        tables.note(
            f"Inputs with other tokens than plain decoding: {len(against['differences'])}."
        ),
    ]


def _tree_tokens(trees: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Returns a table of what each tree commits."""
    if not trees:
        return []
    lines = [
        (
            f"tree {variant['tree']}",
            variant["nodes"],
            variant["depth"],
            tables.decimal(variant.get("predicted"), 2),
            tables.decimal(variant["stats"]["tokens_per_target_call"], 2),
        )
        for variant in trees
    ]
    return [
        tables.table(
            "Tokens per target call of trees",
            ("tree", "positions", "depth", "predicted", "measured"),
            lines,
        ),
        tables.note(
            "Predicted: by the top-k hit rate in the same run, as if every node was accepted independently of "
            "the others and no output "
            "ended; nothing for trees that the drafter's distribution shapes."
        ),
    ]


def _name(row: Row) -> str:
    parts = (
        [row.drafter]
        + [f"γ = {row.gamma}"] * (row.gamma is not None)
        + [row.verifier] * _tells_variant(row)
    )
    return ", ".join(parts)


def _tells_variant(row: Row) -> bool:
    """Returns whether the variants of a record differ by what the row calls its verification."""
    return row.verifier.startswith((SYNTHETIC.name, "tree "))


def _rates(found: Sequence[Row]) -> list[Markup]:
    """Returns table 3: the paper's α, then the records'."""
    lines = [
        (row.target, row.drafter, "paper", f"{row.argmax:.2f}", f"{row.sampled:.2f}")
        for row in paper.TABLE_3
    ]
    ours: dict[tuple[str, str, str], dict[bool, str]] = {}
    for row in found:
        if (
            row.alpha is not None
            and row.temperature in (0, 1)
            and row.verifier.partition(",")[0] not in (SYNTHETIC.name, *LOSSY)
        ):
            rate = tables.rate(row.alpha, row.drafted_alpha)
            ours.setdefault((row.target, row.drafter, row.sentences), {}).setdefault(
                row.temperature == 0, rate
            )
    lines += [
        (target, drafter, sentences, by.get(True, "-"), by.get(False, "-"))
        for (target, drafter, sentences), by in ours.items()
    ]
    caption = "Table 3. α per position of the output, at temperature 0 and 1"
    return [tables.table(caption, ("target", "drafter", "where", "T = 0", "T = 1"), lines)]


def _leniences(found: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Returns table 5 of the records with a lenient verifier: α and improvement by lenience."""
    by_pair: dict[tuple, dict[float, Row]] = {}
    for record in found:
        options = record["options"] if kind_of(record) in (Benchmark, Measured) else {}
        if options.get("lenience") is not None:
            for row in rows(record):
                pair = row.target, row.drafter, row.sentences, row.temperature, row.gamma
                by_pair.setdefault(pair, {})[options["lenience"]] = row
    if not by_pair:
        return []
    values = sorted({value for by in by_pair.values() for value in by}, reverse=True)

    def rate(row):
        return tables.rate(row.alpha, row.drafted_alpha)

    def cell(row):
        return "-" if row is None else f"{rate(row)}, {tables.spread_text(row.improvement)}"

    lines = [
        (
            target,
            drafter,
            where,
            f"{temperature:g}",
            gamma,
            *(cell(by.get(value)) for value in values),
        )
        for (target, drafter, where, temperature, gamma), by in by_pair.items()
    ]
    head = ("target", "drafter", "where", "T", "γ", *(f"l = {value:g}" for value in values))
    return [tables.table("Table 5. α and improvement over lenience", head, lines)]


def _estimate(record: Mapping[str, Any]) -> list[Markup]:
    head = (
        "drafter",
        "T",
        "γ",
        "α (paper)",
        "c (paper)",
        "c",
        "v",
        "improvement",
        "c, plain step of two positions",
        "v",
        "improvement",
        "expected (paper)",
        "measured (paper)",
    )
    parts = [element("h2", "Estimated, not measured"), element("p", memory_estimate(record))]
    if lines := time_estimates(record):
        caption = f"Table 2 by the compiler's estimates: T5-XXL on {placed(record)}, batch {record['batch_size']}"
        parts.append(tables.table(caption, head, lines))
        parts.append(
            tables.note(
                "The compiler's own estimates of single calls; the improvement is what they and the paper's α let expect: "
                "with the plain step as it is compiled, and as if it took what a call over two positions takes."
            )
        )
    return parts


# What a complete page has, how to tell that a record holds it, and the command that measures it.
_EXPECTED = (
    (
        "T5-XXL with T5-small on an accelerator",
        lambda record: not estimated(record) and not _on_cpu(record) and _of_xxl(record),
        "python scripts/accelerator_report.py --output=accelerator.jsonl",
    ),
    (
        "T5X's own decoding beside ours",
        lambda record: kind_of(record) is Benchmark and bool(record.get("against")),
        "specdec benchmark --target=ende/target --drafter=ende/drafter --against=t5x --output=t5x.json",
    ),
    (
        "The TPU compiler's estimates",
        lambda record: estimated(record) and "times" in record,
        "JAX_PLATFORMS=cpu python scripts/tpu_aot.py --times > tpu.json",
    ),
)


def _of_xxl(record: Mapping[str, Any]) -> bool:
    if kind_of(record) is Accelerator:
        return any(
            figure.get("target") == "t5_1_1/xxl" and "improvement" in figure
            for figure in record["figures"]
        )
    return kind_of(record) is Benchmark and record["target"]["name"] == "t5_1_1/xxl"


def _on_cpu(record: Mapping[str, Any]) -> bool:
    return record["machine"]["device"].startswith("cpu")


def _missing(found: Sequence[Mapping[str, Any]]) -> list[Markup]:
    lines = [
        (what, "not measured", command)
        for what, there, command in _EXPECTED
        if not any(map(there, found))
    ]
    return (
        [tables.table("Not measured: no such record was given", ("what", "", "command"), lines)]
        if lines
        else []
    )
