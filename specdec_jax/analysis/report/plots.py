"""Draws figures of theory and of records; matplotlib is imported only where something is drawn."""

import io
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.analysis import formulas
from specdec_jax.analysis.report.markup import Markup, printable
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.top_k_hit_rate import KINDS, depth_curves
from specdec_jax.files.writing import check_output, write_file

FORMATS = (".png", ".pdf", ".svg")


def check(path: str) -> None:
    """Raises ValueError, before anything is measured, for a file whose format or folder would not
    do."""
    if not path.endswith(FORMATS):
        raise ValueError(f"plot: got {path!r}, expected a file ({', '.join(FORMATS)})")
    check_output(path, "plot")


def save(figure, path: str) -> None:
    """Writes the figure in the format that the file's name ends in."""
    file = io.BytesIO()
    figure.savefig(file, format=pathlib.PurePath(path).suffix[1:], dpi=150)
    write_file(path, file.getvalue())


def svg(figure) -> Markup:
    """Returns the figure as an element of an HTML page; the same figure gives the same text."""
    import matplotlib

    with (
        matplotlib.rc_context({"svg.hashsalt": "specdec_jax", "svg.fonttype": "none"}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings(
            "ignore", "Glyph .* missing from font"
        )  # it measures text that the browser draws
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return Markup(text[text.index("<svg") :])


def shortened(name: str) -> str:
    """Returns a text on one line, short enough for a figure."""
    text = " ".join(printable(name).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


# The paper does not say at which γ and c its curves were drawn.
_GAMMAS, _COSTS = (1, 3, 5, 7, 10), (0.01, 0.02, 0.05, 0.1)


def expected_tokens():
    """Draws figure 2: tokens per target call over α, equation (1)."""
    figure, axes = panels(("α", "expected tokens per target call"))
    _over_alpha(axes[0], lambda alpha, gamma: formulas.expected_tokens(alpha, gamma))
    return figure


def optimal_gammas():
    """Draws figure 3: the best γ over α for several c, section 3.5."""
    figure, (axes,) = panels(("α", "best γ"))
    alphas = np.linspace(0.0, 0.95, 96)
    for cost in _COSTS:
        axes.step(
            alphas,
            [formulas.optimal_gamma(alpha, cost) for alpha in alphas],
            where="mid",
            label=f"c = {cost:g}",
        )
    axes.legend()
    return figure


def arithmetic_operations():
    """Draws figure 4, right: the factor in arithmetic operations over α, ĉ = 0."""
    figure, axes = panels(("α", "arithmetic operations"))
    _over_alpha(axes[0], lambda alpha, gamma: formulas.operations(alpha, gamma))
    return figure


def panels(*labels: tuple[str, str]):
    """Returns a figure with a panel for each pair of labels, of its x and its y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(labels), 3.5), layout="constrained")
    axes = figure.subplots(1, len(labels), squeeze=False)[0]
    for one, (x, y) in zip(axes, labels, strict=True):
        one.set(xlabel=x, ylabel=y)
        one.grid(alpha=0.3)
    return figure, axes


def _over_alpha(axes, value) -> None:
    alphas = np.linspace(0.0, 1.0, 101)
    for gamma in _GAMMAS:
        axes.plot(alphas, [value(alpha, gamma) for alpha in alphas], label=f"γ = {gamma}")
    axes.legend()


def measured(rows: Sequence[tuple[str, Spread, float | None]]):
    """Draws bars of measured improvement with their spread, and the predictions.

    `rows` are (name, improvement, predicted or None).
    """
    figure, (axes,) = panels(("improvement over plain decoding", ""))
    figure.set_size_inches(9, 1.5 + 0.35 * len(rows))
    places = np.arange(len(rows))[::-1]
    median, least, most = np.array([spread for _, spread, _ in rows]).T
    axes.barh(
        places,
        median,
        xerr=[median - least, most - median],
        capsize=2,
        color="tab:blue",
        alpha=0.7,
        label="measured (median and spread)",
    )
    predicted = [
        (value, place)
        for (_, _, value), place in zip(rows, places, strict=True)
        if value is not None
    ]
    if predicted:
        axes.plot(
            *zip(*predicted, strict=True),
            "kd",
            label="predicted: α or counted calls, c, v, encoders",
        )
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(places, [shortened(name) for name, _, _ in rows], parse_math=False)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def wall_time(record: Mapping[str, Any]):
    """Draws what `specdec benchmark` timed: milliseconds per token, of beam search per input, a bar
    for every way of decoding.

    `record` is one of the benchmark, with or without another implementation's variant.
    """
    plain, against, searches = record["plain"], record.get("against"), record.get("searches")

    def units(variant):
        return variant["tokens"] if searches is None else record["sentences"]

    def milliseconds(variant):
        return (
            1e3
            * np.array([variant["seconds"][name] for name in Spread._fields])
            / max(units(variant), 1)
        )

    named = {"t5x": "T5X"}
    bars = (
        [(named.get(against["name"], against["name"]), milliseconds(against), "tab:gray")]
        if against
        else []
    )
    bars.append(
        ("plain" if searches is None else "plain beam search", milliseconds(plain), "tab:blue")
    )
    if searches is not None:
        bars.append(("greedy", milliseconds(record["greedy"]), "tab:cyan"))
        bars += [
            (f"γ = {variant['gamma']}, u = {variant['width']}", milliseconds(variant), "tab:orange")
            for variant in searches
        ]
    for variant in record.get("speculative", ()):
        forced = (
            ""
            if variant["synthetic_alpha"] is None
            else f", α forced to {variant['synthetic_alpha']:g}"
        )
        bars.append(
            (f"speculative, γ = {variant['gamma']}{forced}", milliseconds(variant), "tab:orange")
        )
    bars += [
        (f"tree {variant['tree']}", milliseconds(variant), "tab:green")
        for variant in record.get("trees", ())
    ]
    unit = "token" if searches is None else "input"
    figure, (axes,) = panels((f"milliseconds per {unit}, with the spread of the passes", ""))
    figure.set_size_inches(8, 1.2 + 0.45 * len(bars))
    axes.grid(False, axis="y")
    slowest = max(most for _, (_, _, most), _ in bars)
    for place, (_, (median, least, most), colour) in enumerate(bars):
        axes.barh(
            place,
            median,
            xerr=[[median - least], [most - median]],
            capsize=2,
            color=colour,
            height=0.65,
        )
        axes.text(
            most + 0.02 * slowest,
            place,
            f"{median:.2f} ms, {bars[0][1][0] / median:.2f}×",
            va="center",
        )
    axes.set(xlim=(0, 1.35 * slowest))
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    host = record["machine"]
    axes.set_title(
        f"{shortened(record['target']['name'])}, {record['target']['parameter_dtype'].partition(',')[0]}, "
        f"{record['sentences']} inputs, batch {record['options']['batch_size']}, {host['cores']} cores",
        fontsize="medium",
        parse_math=False,
    )
    return figure


_COLOURS = {
    "target encoder": "tab:purple",
    "drafter encoder": "tab:pink",
    "draft step": "tab:orange",
    "target call": "tab:blue",
}


def timeline(variants: Sequence[tuple[str, Sequence[tuple[str, float]]]]):
    """Draws figure 5: the calls of one input after another, a bar for each variant.

    `variants` are (name, (kind of call, seconds) of every call).
    """
    figure, (axes,) = panels(("milliseconds", ""))
    figure.set_size_inches(9, 1.2 + 0.5 * len(variants))
    axes.grid(False)
    for place, (_, spans) in enumerate(variants):
        ends = np.cumsum([seconds for _, seconds in spans])
        for kind, colour in _COLOURS.items():
            bars = [
                (1e3 * (end - seconds), 1e3 * seconds)
                for (what, seconds), end in zip(spans, ends, strict=True)
                if what == kind
            ]
            label = kind if bars and kind not in axes.get_legend_handles_labels()[1] else None
            axes.broken_barh(
                bars,
                (place - 0.35, 0.7),
                facecolor=colour,
                edgecolor="white",
                linewidth=0.4,
                label=label,
            )
    axes.set_yticks(range(len(variants)), [name for name, _ in variants])
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def improvement(record: Mapping[str, Any]):
    """Draws what `specdec measure` found: expected improvement by γ, acceptance by position and by
    depth, v by number of positions, and top-k hit rate by number of children where it was scored.
    """
    from matplotlib.figure import Figure

    table, accepted = record["table"], record["acceptance"]
    gammas = [row["gamma"] for row in table]
    hit_rate, by_depth = accepted.get("hit_rate"), depth_curves(accepted)
    panels = 3 + bool(hit_rate) + bool(by_depth)
    figure = Figure(figsize=(4 * panels, 4), layout="constrained")
    gain, surviving, cost, *others = figure.subplots(1, panels)
    if accepted["alpha"] is not None:
        gain.plot(gammas, [row["theorem_3_8"] for row in table], "o--", label="from α, v = 1")
        gain.plot(
            gammas, [row["with_verify_cost"] for row in table], "o-", label="from α, v measured"
        )
        surviving.plot(
            gammas,
            [accepted["alpha"] ** gamma for gamma in gammas],
            "k:",
            label="α to the power of i",
        )
    for name, values in accepted["by_position"].items():
        gain.plot(
            gammas,
            [row["by_position"][name]["with_verify_cost"] for row in table],
            "s-",
            label=f"by position, {name}",
        )
        whole = [row["by_position"][name].get("with_lengths") for row in table]
        if None not in whole:
            gain.plot(gammas, whole, "^-", label=f"whole decodes, {name}")
        errors = [value["standard_error"] or 0.0 for value in values]
        surviving.errorbar(
            gammas, [value["accepted"] for value in values], errors, fmt="s-", capsize=3, label=name
        )
    gain.axhline(1, color="grey", linewidth=1)
    gain.set(
        xlabel="γ, drafted tokens", ylabel="expected improvement over plain decoding", xticks=gammas
    )
    surviving.set(
        xlabel="i", ylabel="P(first i drafted tokens are accepted)", xticks=gammas, ylim=(0, 1)
    )
    cost.plot(
        [int(width) for width in record["verify_cost"]], list(record["verify_cost"].values()), "o-"
    )
    cost.set(xlabel="positions", ylabel="v: cost of a target call, in single steps", ylim=(0, None))
    cost.axhline(1, color="grey", linewidth=1)
    if hit_rate:
        for kind, values in hit_rate.items():
            ks, errors = (
                range(1, len(values) + 1),
                [value["standard_error"] or 0.0 for value in values],
            )
            others[0].errorbar(
                ks,
                [value["covered"] for value in values],
                errors,
                fmt="o-",
                capsize=3,
                label=KINDS[kind],
            )
        others[0].set(
            xlabel="k, children of a node",
            ylabel="P(the target's token is among them)",
            ylim=(None, 1),
        )
    if by_depth:
        for name, rates in by_depth.items():
            means, errors = [mean for mean, _ in rates], [error or 0.0 for _, error in rates]
            others[-1].errorbar(
                range(1, len(rates) + 1), means, errors, fmt="o-", capsize=3, label=name
            )
        others[-1].set(
            xlabel="depth", ylabel="P(a token is accepted where those above it are)", ylim=(0, 1.05)
        )
    for axes in (gain, surviving, *others):
        axes.legend()
    options = record["options"]
    figure.suptitle(
        f"{shortened(record['target']['name'])} with {shortened(record['drafter']['name'])}, "
        f"temperature {options['temperature']:g}, batch {options['batch_size']}: c = {record['cost_ratio']:.3f}",
        parse_math=False,
    )
    return figure
