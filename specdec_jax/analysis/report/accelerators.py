"""Lays out the figures of scripts/accelerator_report.py: a table, and a plot of v and of speed by
acceptance."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.analysis.report import plots, tables
from specdec_jax.analysis.report.markup import Markup, element
from specdec_jax.analysis.report.plots import panels, shortened
from specdec_jax.analysis.report.rows import measured_at

HEAD = (
    "figure",
    "batch",
    "milliseconds",
    "(least to most)",
    "floor",
    "ratio",
    "ms an iteration",
    "tokens a second",
    "",
)
NOTE = (
    "Milliseconds: of a call or step; of whole decodes for one token of a row, encoder of one layer "
    "included. Floor: milliseconds in which the weights of a step are read at the bandwidth of the copy. "
    "Ratio: v of a target call and c of a draft step, both over the target's call over one position; of a "
    "speculative decode how many times as fast as the plain one of the same target it is, and, in int8, "
    "as the full target's plain one; of a call in int8 the time over that of the full target."
)


def lines(record: Mapping[str, Any]) -> list[tuple]:
    """Returns a line for every figure that was planned, in that order; one that is not in the file
    was not run."""
    found = {figure["figure"]: figure for figure in record["figures"]}
    return [_line(name, found.get(name)) for name in record["plan"]]


def _line(name: str, figure: Mapping[str, Any] | None) -> tuple:
    if figure is None:
        return name, *("-" * 7), "not run"
    batch = figure.get("batch", "-")
    if "milliseconds" not in figure:
        why = (
            f"failed: {figure['failed']}"
            if "failed" in figure
            else f"not supported here: {figure['unsupported']}"
        )
        return name, batch, *("-" * 6), why
    times = figure["milliseconds"]

    def number(key, digits):
        return f"{figure[key]:.{digits}f}" if key in figure else "-"

    floor = f"{figure['floor_ms']:.3g}" if "floor_ms" in figure else "-"
    what = f"{figure['gb_per_second']:.0f} GB a second" if "gb_per_second" in figure else ""
    return (
        name,
        batch,
        f"{times['median']:.3g}",
        f"{times['least']:.3g} to {times['most']:.3g}",
        floor,
        _ratio(figure),
        number("iteration_ms", 3),
        number("tokens_per_second", 0),
        f"acceptance {figure['acceptance']}" if "acceptance" in figure else what,
    )


def _ratio(figure: Mapping[str, Any]) -> str:
    found = [f"{key} = {figure[key]:.3g}" for key in ("v", "c") if key in figure]
    found += [f"{figure[key]:.2f}" for key in ("improvement", "over_full") if key in figure]
    full = (
        f"{figure['over_full_plain']:.2f} times the full target's plain"
        if "over_full_plain" in figure
        else ""
    )
    return "; ".join([*found[:1], *([full] if full else [])]) or "-"


def plot(record: Mapping[str, Any]):
    """Draws v over the positions of a target call, and milliseconds per token over the forced
    acceptance with plain decoding's beside it, a line for each target and number of rows; None if
    neither was measured."""
    there = [figure for figure in record["figures"] if "milliseconds" in figure]
    calls = [
        figure
        for figure in there
        if figure["kind"] == "call" and "v" in figure and "width" in figure
    ]
    coins = [figure for figure in there if figure["kind"] == "speculative" and "alpha" in figure]
    if not calls and not coins:
        return None
    figure, (cost, speed) = panels(
        ("positions of a target call", "v"), ("forced α", "milliseconds for a token of a row")
    )
    figure.set_size_inches(11, 4.5)
    for target, those in _groups(calls, "target").items():
        points = sorted((one["width"], one["v"]) for one in those)
        cost.plot(*zip(*points), "o-", label=shortened(target))
    cost.axhline(1, color="grey", linewidth=1)
    if calls:
        cost.set(ylim=(0, None))
    plain = {
        (one.get("target"), one.get("batch")): one["milliseconds"]["median"]
        for one in there
        if one["kind"] == "plain"
    }
    for (target, batch), those in _groups(coins, "target", "batch").items():
        points = sorted((one["alpha"], one["milliseconds"]["median"]) for one in those)
        (line,) = speed.plot(*zip(*points), "o-", label=f"{shortened(str(target))}, batch {batch}")
        if (target, batch) in plain:
            speed.axhline(plain[target, batch], color=line.get_color(), linestyle=":", linewidth=1)
    if coins:
        speed.set(ylim=(0, None))
        speed.set_title("dotted: plain decoding", fontsize="medium")
    for axes, those in ((cost, calls), (speed, coins)):
        if those:
            axes.legend(fontsize="small")
    return figure


def _groups(
    figures: Sequence[Mapping[str, Any]], *names: str
) -> dict[Any, list[Mapping[str, Any]]]:
    """Returns the figures by the values of `names`: of one name the value itself, of several a
    tuple."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for figure in figures:
        key = tuple(figure.get(name, "-") for name in names)
        found.setdefault(key if len(names) > 1 else key[0], []).append(figure)
    return found


def section(path: pathlib.Path, record: Mapping[str, Any]) -> list[Markup]:
    """Returns the part of the page about one file of figures."""
    options, figure = record["options"], plot(record)
    about = (
        f"Dummy weights, {options['dtype']}{', all shapes shrunk' if options['tiny'] else ''}, drafter "
        f"{options['drafter']}, γ = {options['gamma']}, inputs of {options['input_length']} ids, "
        f"{options['max_new_tokens']} new tokens."
    )
    return [
        element("h3", path.name),
        element("p", about),
        tables.note(measured_at(record)),
        tables.table("An accelerator's figures", HEAD, lines(record)),
        tables.note(NOTE),
        *([] if figure is None else [plots.svg(figure)]),
    ]
