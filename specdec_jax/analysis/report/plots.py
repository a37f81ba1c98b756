"""Draws figures of theory and of records; matplotlib is imported only where something is drawn."""

import io
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from specdec_jax.analysis import formulas
from specdec_jax.analysis.report.records import AcceleratorRecord, MeasureRecord
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.top_k_hit_rate import KINDS, depth_curves
from specdec_jax.analysis.tree_drawing import Drawn, walk_depth_first
from specdec_jax.decoding.trace import TreeStep
from specdec_jax.files.writing import check_output, write_file

Axes: TypeAlias = Any  # of matplotlib
Figure: TypeAlias = Any

FORMATS = (".png", ".pdf", ".svg")

# Code points that HTML cannot hold: controls, halves of surrogate pairs, and two noncharacters.
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def check(path: str) -> None:
    """Raises ValueError for a file whose format or folder cannot be written."""
    if not path.endswith(FORMATS):
        raise ValueError(f"plot: got {path!r}, expected a file ({', '.join(FORMATS)})")
    check_output(path, "plot")


def save(figure: Figure, path: str) -> None:
    """Writes the figure in the format that the file's name ends in."""
    file = io.BytesIO()
    figure.savefig(file, format=pathlib.PurePath(path).suffix[1:], dpi=150)
    write_file(path, file.getvalue())


def render_svg(figure: Figure) -> str:
    """Returns the figure as an element of an HTML page; the same figure gives the same text."""
    import matplotlib

    file = io.StringIO()
    style: Any = {"svg.hashsalt": "specdec_jax", "svg.fonttype": "none"}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # The browser draws the text, which matplotlib only measures.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def replace_unprintable(text: str) -> str:
    """Returns the text with a replacement character for each character that no page can hold."""
    return _NO_TEXT.sub("\ufffd", text)


def shorten(name: str) -> str:
    """Returns a text on one line, short enough for a figure."""
    text = " ".join(replace_unprintable(name).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def _new_panels(*labels: tuple[str, str]) -> tuple[Figure, Sequence[Axes]]:
    """Returns a figure with a panel for each (x label, y label)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(labels), 3.5), layout="constrained")
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    for axes, (x, y) in zip(panels, labels, strict=True):
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
    return figure, panels


# The paper does not name the γ and c of its curves.
_GAMMAS, _COSTS = (1, 3, 5, 7, 10), (0.01, 0.02, 0.05, 0.1)


def draw_expected_tokens() -> Figure:
    """Draws figure 2: tokens per target call over α, equation (1)."""
    return _draw_over_alpha("expected tokens per target call", formulas.expected_tokens)


def draw_operations() -> Figure:
    """Draws figure 4, right: the factor in arithmetic operations over α, ĉ = 0."""
    return _draw_over_alpha("arithmetic operations", formulas.operations)


def _draw_over_alpha(label: str, value: Callable[[float, int], float]) -> Figure:
    figure, (axes,) = _new_panels(("α", label))
    alphas = np.linspace(0.0, 1.0, 101)
    for gamma in _GAMMAS:
        axes.plot(alphas, [value(alpha, gamma) for alpha in alphas], label=f"γ = {gamma}")
    axes.legend()
    return figure


def draw_optimal_gammas() -> Figure:
    """Draws figure 3: the best γ over α for several c, section 3.5."""
    figure, (axes,) = _new_panels(("α", "best γ"))
    alphas = np.linspace(0.0, 0.95, 96)
    for cost in _COSTS:
        gammas = [formulas.optimal_gamma(alpha, cost) for alpha in alphas]
        axes.step(alphas, gammas, where="mid", label=f"c = {cost:g}")
    axes.legend()
    return figure


def draw_improvements(rows: Sequence[tuple[str, Spread, float | None]]) -> Figure:
    """Draws bars of measured improvement with their spread, and the predictions.

    Args:
      rows: (name, measured improvement, predicted improvement or None).
    """
    figure, (axes,) = _new_panels(("improvement over plain decoding", ""))
    figure.set_size_inches(9, 1.5 + 0.35 * len(rows))
    places = np.arange(len(rows))[::-1]
    median, least, most = np.array([spread for _, spread, _ in rows]).T
    errors, label = [median - least, most - median], "measured (median and spread)"
    axes.barh(places, median, xerr=errors, capsize=2, color="tab:blue", alpha=0.7, label=label)
    predicted = np.array([np.nan if value is None else value for _, _, value in rows])
    if not np.isnan(predicted).all():
        label = "predicted: α or counted calls, c, v, encoders"
        shown = ~np.isnan(predicted)
        axes.plot(predicted[shown], places[shown], "kd", label=label)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(places, [shorten(name) for name, _, _ in rows], parse_math=False)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_wall_time(record: Mapping[str, Any]) -> Figure:
    """Draws a bar with the time of each way of decoding: per token, or per input for beam search.

    Args:
      record: what `specdec benchmark` writes.
    """
    plain, against, searches = record["plain"], record.get("against"), record.get("searches")
    bars: list[tuple[str, Mapping[str, Any], str]] = []
    if against:
        bars.append(({"t5x": "T5X"}.get(against["name"], against["name"]), against, "tab:gray"))
    bars.append(("plain" if searches is None else "plain beam search", plain, "tab:blue"))
    if searches is not None:
        bars.append(("greedy", record["greedy"], "tab:cyan"))
    for variant in searches or ():
        bars.append((f"γ = {variant['gamma']}, u = {variant['width']}", variant, "tab:orange"))
    for variant in record.get("speculative", ()):
        alpha = variant["synthetic_alpha"]
        forced = "" if alpha is None else f", α forced to {alpha:g}"
        bars.append((f"speculative, γ = {variant['gamma']}{forced}", variant, "tab:orange"))
    for variant in record.get("trees", ()):
        bars.append((f"tree {variant['tree']}", variant, "tab:green"))

    unit = "token" if searches is None else "input"
    figure, (axes,) = _new_panels((f"milliseconds per {unit}, with the spread of the passes", ""))
    figure.set_size_inches(8, 1.2 + 0.45 * len(bars))
    axes.grid(False, axis="y")
    counts = [record["sentences"] if searches is not None else bar["tokens"] for _, bar, _ in bars]
    seconds = np.array([[bar["seconds"][name] for name in Spread._fields] for _, bar, _ in bars])
    times = 1e3 * seconds / np.maximum(counts, 1)[:, None]
    slowest = times[:, 2].max()
    for place, (median, least, most) in enumerate(times):
        errors, colour = [[median - least], [most - median]], bars[place][2]
        axes.barh(place, median, xerr=errors, capsize=2, color=colour, height=0.65)
        text = f"{median:.2f} ms, {times[0, 0] / median:.2f}×"
        axes.text(most + 0.02 * slowest, place, text, va="center")
    axes.set(xlim=(0, 1.35 * slowest))
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    title = (
        f"{shorten(record['target']['name'])}, "
        f"{record['target']['parameter_dtype'].partition(',')[0]}, {record['sentences']} inputs, "
        f"batch {record['options']['batch_size']}, {record['machine']['cores']} cores"
    )
    axes.set_title(title, fontsize="medium", parse_math=False)
    return figure


_COLOURS = {
    "target encoder": "tab:purple",
    "drafter encoder": "tab:pink",
    "draft step": "tab:orange",
    "target call": "tab:blue",
}


def draw_timeline(variants: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> Figure:
    """Draws figure 5: the calls of one input after another, a bar for each variant.

    Args:
      variants: (name, (kind of call, seconds) of every call).
    """
    figure, (axes,) = _new_panels(("milliseconds", ""))
    figure.set_size_inches(9, 1.2 + 0.5 * len(variants))
    axes.grid(False)
    labelled = set()
    for place, (_, spans) in enumerate(variants):
        ends = np.cumsum([seconds for _, seconds in spans])
        for kind, colour in _COLOURS.items():
            bars = [
                (1e3 * (end - seconds), 1e3 * seconds)
                for (name, seconds), end in zip(spans, ends, strict=True)
                if name == kind
            ]
            label = kind if bars and kind not in labelled else None
            labelled |= {label}
            style = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4, "label": label}
            axes.broken_barh(bars, (place - 0.35, 0.7), **style)
    axes.set_yticks(range(len(variants)), [name for name, _ in variants])
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def draw_measurement(record: MeasureRecord) -> Figure:
    """Draws expected improvement by γ, acceptance by position, and v by number of positions.

    Acceptance by depth and top-k hit rate have panels of their own if the record has them.
    """
    from matplotlib.figure import Figure

    accepted, gammas = record.acceptance, [row.gamma for row in record.table]
    by_depth = depth_curves(accepted.model_dump())
    count = 3 + bool(accepted.hit_rate) + bool(by_depth)
    figure = Figure(figsize=(4 * count, 4), layout="constrained")
    gain, surviving, cost, *others = figure.subplots(1, count)
    _draw_gain(gain, record)
    if accepted.alpha is not None:
        powers = [accepted.alpha**gamma for gamma in gammas]
        surviving.plot(gammas, powers, "k:", label="α to the power of i")
    for name, shares in accepted.by_position.items():
        rates = [(share.accepted, share.standard_error) for share in shares]
        _draw_rates(surviving, gammas, rates, "s-", name)
    label = "P(first i drafted tokens are accepted)"
    surviving.set(xlabel="i", ylabel=label, xticks=gammas, ylim=(0, 1))
    cost.plot([int(width) for width in record.verify_cost], list(record.verify_cost.values()), "o-")
    cost.set(xlabel="positions", ylabel="v: cost of a target call, in single steps", ylim=(0, None))
    cost.axhline(1, color="grey", linewidth=1)
    for kind, values in accepted.hit_rate.items():
        rates = [(value.covered, value.standard_error) for value in values]
        _draw_rates(others[0], range(1, len(rates) + 1), rates, "o-", KINDS[kind])
        label = "P(the target's token is among them)"
        others[0].set(xlabel="k, children of a node", ylabel=label, ylim=(None, 1))
    for curve, rates in by_depth.items():
        _draw_rates(others[-1], range(1, len(rates) + 1), rates, "o-", curve)
        label = "P(a token is accepted where those above it are)"
        others[-1].set(xlabel="depth", ylabel=label, ylim=(0, 1.05))
    for axes in (gain, surviving, *others):
        axes.legend()
    title = (
        f"{shorten(record.target.name)} with {shorten(record.drafter.name)}, "
        f"temperature {record.options.temperature:g}, batch {record.options.batch_size}: "
        f"c = {record.cost_ratio:.3f}"
    )
    figure.suptitle(title, parse_math=False)
    return figure


def _draw_gain(axes: Axes, record: MeasureRecord) -> None:
    table, gammas = record.table, [row.gamma for row in record.table]
    if record.acceptance.alpha is not None:
        axes.plot(gammas, [row.theorem_3_8 for row in table], "o--", label="from α, v = 1")
        measured = [row.with_verify_cost for row in table]
        axes.plot(gammas, measured, "o-", label="from α, v measured")
    for name in record.acceptance.by_position:
        rows = [row.by_position[name] for row in table]
        axes.plot(
            gammas, [row.with_verify_cost for row in rows], "s-", label=f"by position, {name}"
        )
        whole = [row.with_lengths for row in rows]
        if None not in whole:
            axes.plot(gammas, whole, "^-", label=f"whole decodes, {name}")
    axes.axhline(1, color="grey", linewidth=1)
    label = "expected improvement over plain decoding"
    axes.set(xlabel="γ, drafted tokens", ylabel=label, xticks=gammas)


def _draw_rates(
    axes: Axes,
    x: Sequence[int],
    rates: Iterable[tuple[float, float | None]],
    style: str,
    label: str,
) -> None:
    """Draws rates with their standard errors."""
    rates = list(rates)
    errors = [error or 0.0 for _, error in rates]
    axes.errorbar(x, [mean for mean, _ in rates], errors, fmt=style, capsize=3, label=label)


# Token trees.

_ACCEPTED, _REJECTED, _OWN, _SEEN = "tab:green", "tab:gray", "tab:blue", "lightgray"
_ROW, _LEVEL = 0.24, 1.15  # inches


def draw_tree(drawn: Drawn) -> Figure:
    """Draws the token tree of one iteration with depth from left to right, and its attention mask.

    The accepted path is green, the target's own token blue.
    """
    from matplotlib.figure import Figure

    tree = drawn.tree
    order = list(walk_depth_first(tree))
    paths = {node: tree.line(node) for node in order}
    widths = _LEVEL * (max(map(len, paths.values())) + 1), _ROW * len(order) + 0.6
    figure = Figure(figsize=(sum(widths), _ROW * len(order) + 1), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=widths)
    _draw_nodes(left, drawn, order, {node: len(path) - 1 for node, path in paths.items()})
    _draw_mask(right, tree, order)
    title = (
        f"{len(order) - 1} drafted tokens, {len(tree.path) - 1} accepted (green), "
        "the target's own token in blue"
    )
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_nodes(axes: Axes, drawn: Drawn, order: list[int], depths: dict[int, int]) -> None:
    """Draws a row for each node in `order`, and the target's own token after the path."""
    tree, row = drawn.tree, {node: place for place, node in enumerate(order)}

    def put(text: str, x: float, y: float, colour: str, parent: int | None) -> None:
        if parent is not None:
            # Down from the parent, then right to the node: no line crosses another node's text.
            left, top = depths[parent] + 0.05, row[parent]
            axes.plot([left, left, x], [top, y, y], color=colour, zorder=1, linewidth=1.2)
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour}
        style = {"va": "center", "bbox": box, "fontsize": 9, "zorder": 3}
        axes.text(x, y, shorten(text) or "␣", parse_math=False, **style)

    # What is accepted is drawn last, on top.
    for node in sorted(order, key=lambda node: node in tree.path):
        colour = _ACCEPTED if node in tree.path else _REJECTED
        parent = tree.nodes[node].parent if node else None
        put(drawn.texts[node], depths[node], row[node], colour, parent)
    if drawn.own is not None:
        end = tree.path[-1]
        put(drawn.own, depths[end] + 1, row[end], _OWN, end)
    axes.set(xlim=(-0.1, max(depths.values()) + 1.9), ylim=(len(order) - 0.5, -0.7))
    axes.axis("off")


def _draw_mask(axes: Axes, tree: TreeStep, order: list[int]) -> None:
    """Draws a row for each node in `order`, with the nodes that it attends to."""
    for row, node in enumerate(order):
        colour = _ACCEPTED if node in tree.path else _SEEN
        bars = [(order.index(other) - 0.5, 1) for other in tree.line(node)]
        axes.broken_barh(bars, (row - 0.5, 1), facecolor=colour, linewidth=0)
    edges = np.arange(len(order) + 1) - 0.5
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", linewidth=0.4, alpha=0.5)
    axes.tick_params(which="both", length=0, labelsize=7)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(edges[-1], edges[0]), aspect="equal")
    axes.set(title="sees, of the tree", ylabel="node", xlabel="node")
    axes.title.set_fontsize(9)


# Figures of scripts/accelerator_report.py.


def draw_accelerator(record: AcceleratorRecord) -> Figure | None:
    """Draws v over the positions of a target call, and the time of a token over the forced α.

    Each target and number of rows has a line; plain decoding's time is dotted. Returns None if
    neither was measured.
    """
    timed = [(one, one.milliseconds) for one in record.figures if one.milliseconds is not None]
    calls: dict[str, list[tuple[float, float]]] = {}
    speculative: dict[tuple[str, Any], list[tuple[float, float]]] = {}
    plain: dict[tuple[str, Any], float] = {}
    for one, times in timed:
        target, batch = one.target or "-", "-" if one.batch is None else one.batch
        if one.kind == "call" and one.v is not None and one.width is not None:
            calls.setdefault(target, []).append((one.width, one.v))
        if one.kind == "speculative" and one.alpha is not None:
            speculative.setdefault((target, batch), []).append((one.alpha, times.median))
        if one.kind == "plain":
            plain[target, batch] = times.median
    if not calls and not speculative:
        return None
    labels = ("positions of a target call", "v"), ("forced α", "milliseconds for a token of a row")
    figure, (cost, speed) = _new_panels(*labels)
    figure.set_size_inches(11, 4.5)
    for target, points in calls.items():
        cost.plot(*zip(*sorted(points)), "o-", label=shorten(target))
    cost.axhline(1, color="grey", linewidth=1)
    for (target, batch), points in speculative.items():
        label = f"{shorten(target)}, batch {batch}"
        (line,) = speed.plot(*zip(*sorted(points)), "o-", label=label)
        if (target, batch) in plain:
            speed.axhline(plain[target, batch], color=line.get_color(), linestyle=":", linewidth=1)
    if speculative:
        speed.set_title("dotted: plain decoding", fontsize="medium")
    for axes, lines in ((cost, calls), (speed, speculative)):
        if lines:
            axes.set(ylim=(0, None))
            axes.legend(fontsize="small")
    return figure
