"""Writes records as text for a terminal: whether drafting pays, then what was measured.

The texts are the templates in `templates/`; here is what they compute.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from specdec_jax.analysis.machine import describe_hardware
from specdec_jax.analysis.predictions import TREE_PREDICTIONS
from specdec_jax.analysis.top_k_hit_rate import KINDS, depth_curves
from specdec_jax.analysis.tuning import read_choice
from specdec_jax.analysis.verdicts import advise, describe_best, describe_tokens

_HOW = {
    "scored": "target's own outputs, scored with both models",
    "counted": (
        "by decoding and counting, since no model's distribution or the target's own outputs can "
        "be scored"
    ),
}


def measure_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec measure` as text."""
    alone, best = record["cost_ratio_alone"], record["best_gamma"]
    gammas = {"v = 1": best["theorem_3_8"], "v measured": best["with_verify_cost"]}
    gammas |= {f"by position, {name}": gamma for name, gamma in best["by_position"].items()}
    gammas |= {f"whole decodes, {name}": gamma for name, gamma in best["with_lengths"].items()}
    known = [(name, gamma) for name, gamma in gammas.items() if gamma is not None]
    return _render(
        "measure.txt",
        record=record,
        promise=describe_promise(record),
        how=_HOW[record["acceptance"]["how"]],
        alone=f"{alone:.3f} alone" if alone is not None else "what drafting adds to an iteration",
        rows=_table_rows(record),
        best="; ".join(f"{gamma or 'plain decoding'} ({name})" for name, gamma in known),
    )


def benchmark_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec benchmark` as text."""
    if "searches" in record:
        return _summarize_beam_benchmark(record)
    products = [(name, one) for name, one in record["steps"].items() if name.startswith("products")]
    return _render(
        "benchmark.txt",
        record=record,
        verdict=_benchmark_verdict(record),
        products=", ".join(f"bare {name} {_format_seconds(spread)}" for name, spread in products),
    )


def tune_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec tune` as text."""
    beams = "acceptance" not in record
    verdict = (_beam_verdict if beams else _tuning_verdict)(record)
    chosen = read_choice(record["chosen"])
    name = "tune_beams.txt" if beams else "tune.txt"
    return _render(name, record=record, verdict=verdict, chosen=chosen)


def describe_promise(record: Mapping[str, Any]) -> str:
    """Returns the improvement to expect of whole decodes, and what it leaves out."""
    gains = {
        (row["gamma"], name): expected["with_lengths"]
        for row in record["table"]
        for name, expected in row["by_position"].items()
    }
    (gamma, verifier), gain = max(gains.items(), key=lambda item: item[1])
    pays = f"{gain:.3g} times the speed of plain decoding"
    if gain <= 1:
        pays = f"drafting should not pay here: at best {pays}"
    else:
        # Less than 1.05 may be lost in what is left out.
        hardly = " hardly" if gain < 1.05 else ""
        pays = f"drafting should{hardly} pay here: {pays}, with gamma {gamma}, {verifier}"
    return (
        f"{pays} (encoders and output lengths are counted; the loop, the host and the tokenizer "
        "are not; `specdec benchmark` times whole decodes)"
    )


def describe_same_positions(same: Mapping[str, Any]) -> str:
    """Returns in words how α by counting compares with α by scoring, at the same positions."""
    difference, error = same["difference"], same["standard_error"]
    spread = f" ± {error:.4f}, {abs(difference) / error:.1f} standard errors" if error else ""
    return (
        f"token verification accepted {same['counted']:.4f} of {same['positions']} tokens, "
        f"whose mean of Σ min(p, q) is {same['overlap']:.4f}: difference {difference:+.4f}{spread}"
    )


def _table_rows(record: Mapping[str, Any]) -> list[str]:
    """Returns the expected improvement by γ: from α, with v, and by position."""
    verifiers = list(record["acceptance"]["by_position"])
    by_verifier = [f"{name}{part}" for name in verifiers for part in ("", " gain", " whole")]
    rows = [["gamma", "tokens", "v = 1", "v", "with v", *by_verifier]]
    for row in record["table"]:
        values = [row["tokens"], row["theorem_3_8"], row["verify_cost"], row["with_verify_cost"]]
        for name in verifiers:
            expected = row["by_position"][name]
            values += [expected[key] for key in ("tokens", "with_verify_cost", "with_lengths")]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        cells[2] += " " if row["timed"] else "~"
        rows.append([row["gamma"], *cells])
    widths = [max(12, len(head) + 2) for head in rows[0]]
    return [
        "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
    ]


# Whether drafting pays.


def _benchmark_verdict(record: Mapping[str, Any]) -> list[str]:
    """Returns whether drafting pays, what to try instead, and how outputs differ."""
    options, chains = record["options"], record["speculative"]
    variants = {_name_variant(variant): variant for variant in chains}
    if not record["verdicts"]:
        alone = (
            "plain decoding alone was timed"
            if record["drafter"] is None
            else "--synthetic_alpha times whole decodes"
        )
        steps = "of random weights only steps are timed; " if options["preset"] else ""
        return [f"no verdict: {steps}{alone}"]
    lines = []
    costs = {int(gamma) + 1: v for gamma, v in record["verify_cost"].items()}
    for verdict in record["verdicts"]:
        variant = variants.get(verdict["best"], chains[0])
        if not variant["stats"]["drafted"] and verdict["best"] in variants:
            drafter = record["drafter"]["name"]
            lines.append(f"no verdict: {drafter} drafted nothing; try a model as the drafter")
            continue
        c = variant["predicted"]["cost_ratio"] if variant["predicted"] else record["cost_ratio"]
        timed = {other["gamma"] for other in variants.values()}
        alpha, batch = variant["stats"]["acceptance_rate_per_position"], options["batch_size"]
        advice = advise(alpha, c, costs, timed, batch)
        lines += describe_best(verdict, options["repeats"], advice)
    every = [*chains, *record.get("trees", ())]
    counts = [len(variant["differences"]) if variant["compared"] else None for variant in every]
    tokens = describe_tokens(counts, record["sentences"], options, _are_near_ties(every))
    return [*lines, tokens]


def _tuning_verdict(record: Mapping[str, Any]) -> list[str]:
    """Returns whether the choice pays, what to try instead, and how outputs differ."""
    options, steps = record["options"], record["steps"]
    c = record["draft_seconds"] / steps["iteration, plain"]["median"]
    timed = [item for item in record["choices"] if item["improvement"] and item["gamma"]]
    advice = advise(record["acceptance"]["alpha"], c or None, {}, (), options["batch_size"])
    differing = [item["differing"] for item in timed]
    best = describe_best(record["verdict"], options["repeats"], advice)
    return [*best, describe_tokens(differing, record["sentences"], options)]


def _beam_verdict(record: Mapping[str, Any]) -> list[str]:
    """Returns the verdict on beam search; empty if none was drafted."""
    options, searches, near_ties = record["options"], record.get("searches"), None
    if record["verdict"] is None:
        return []
    differing = [item["differing"] for item in record.get("choices", ())]
    if searches is not None:
        differing = [len(variant["differences"]) for variant in searches]
        near_ties = _are_near_ties(searches)
    advice = "a drafter that costs less, or fewer levels (--gamma)"
    plain, sentences = "plain beam search", record["sentences"]
    best = describe_best(record["verdict"], options["repeats"], advice, plain)
    return [*best, describe_tokens(differing, sentences, options, near_ties, plain)]


def _are_near_ties(variants: Sequence[Mapping[str, Any]]) -> bool:
    return all(item["near_tie"] for variant in variants for item in variant["differences"])


def _name_variant(variant: Mapping[str, Any]) -> str:
    alpha = variant["synthetic_alpha"]
    return f"gamma {variant['gamma']}" + ("" if alpha is None else f", alpha {alpha:g}")


# Parts of `specdec benchmark`.


def _summarize_beam_benchmark(record: Mapping[str, Any]) -> str:
    inputs = record["sentences"]
    rows = [("", "ms an input", "over plain beams", "steps a call", "calls", f"{'equal':>12}")]
    variants = {"plain": record["plain"], "greedy": record["greedy"]}
    variants |= {str(read_choice(variant)): variant for variant in record["searches"]}
    if against := record.get("against"):
        gain = against["improvement"]["plain"]
        inverse = {"median": gain["median"], "least": gain["most"], "most": gain["least"]}
        inverse = {name: 1 / value for name, value in inverse.items()}
        variants[against["name"]] = against | {"improvement": inverse}
    for name, variant in variants.items():
        steps = calls = equal = ""
        if "width" in variant:
            steps = f"{variant['stats']['steps_per_target_call']:.2f}"
            calls = f"{variant['calls_over_plain']:.2f}"
        if "differences" in variant:
            equal = f"{inputs - len(variant['differences']):>6} of {inputs}"
        milliseconds = f"{1e3 * variant['seconds']['median'] / max(inputs, 1):.2f}"
        gain = _spread(variant["improvement"]) if "improvement" in variant else ""
        rows.append((name, milliseconds, gain, steps, calls, equal))
    return _render(
        "benchmark_beams.txt",
        record=record,
        verdict=_beam_verdict(record),
        rows=rows,
        variants=variants,
    )


def _describe_alpha(stats: Mapping[str, Any]) -> str:
    """Returns `alpha 0.812`, both rates where a drafter drafts now and then."""
    alpha, everywhere = stats["acceptance_rate"], stats["acceptance_rate_per_position"]
    if not stats["undrafted"]:
        return f"alpha {alpha:.3f}"
    return (
        f"alpha {everywhere:.3f} per position of the output, "
        f"{alpha:.3f} where something was drafted"
    )


def _share_by_depth(stats: Mapping[str, Any], examined: Sequence[int] | None = None) -> str:
    """Returns the share of the calls that accept each position, or of `examined` tokens."""
    counts = stats["accepted_by_position"]
    wholes = examined or [stats["target_calls"]] * len(counts)
    pairs = zip(counts, wholes, strict=True)
    return ", ".join(f"{count / whole:.2f}" if whole else "-" for count, whole in pairs)


def _describe_difference(item: Mapping[str, Any]) -> str:
    kind = "near-tie" if item["near_tie"] else "not a near-tie"
    place = f"sentence {item['input'] + 1}, token {item['position']}"
    return f"{place}, {kind} (margin {item['margin']:.2e}"


# Filters of the templates.


def _format_range(spread: Mapping[str, float], spec: str = ".3f") -> str:
    return f"({spread['least']:{spec}} to {spread['most']:{spec}})"


def _spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3f} {_format_range(spread)}"


def _format_seconds(spread: Mapping[str, float]) -> str:
    scale, unit = (1, "s") if spread["median"] >= 1 else (1e3, "ms")
    scaled = {name: scale * value for name, value in spread.items()}
    return f"{scaled['median']:.3f} {unit} {_format_range(scaled)}"


def _render(name: str, **values: Any) -> str:
    return _TEMPLATES.get_template(name).render(values).rstrip("\n")


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "bound": lambda value: "no bound" if value is None else f"{value:.3f}",
    "named": lambda values, text: ", ".join(text.format(*item) for item in values.items()),
    "number": format,
    "numbers": lambda values, spec, separator: separator.join(f"{one:{spec}}" for one in values),
    "range": _format_range,
    "seconds": _format_seconds,
    "spread": _spread,
    "wide": lambda spread: f"{spread['median']:>12.3f}   {_format_range(spread)}",
}
_TEMPLATES.globals |= {
    "accepted_by_depth": _share_by_depth,
    "depth_curves": depth_curves,
    "describe_alpha": _describe_alpha,
    "describe_difference": _describe_difference,
    "hardware": describe_hardware,
    "kinds": KINDS,
    "read_choice": read_choice,
    "same_positions": describe_same_positions,
    "tree_predictions": TREE_PREDICTIONS,
}
