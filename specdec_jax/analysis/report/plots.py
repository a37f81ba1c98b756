"""Draws figures of theory and of records; matplotlib is imported only where something is drawn."""

import functools
import io
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from markupsafe import Markup, escape

from specdec_jax.analysis import formulas
from specdec_jax.analysis.report.records import AcceleratorRecord, MeasureRecord
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.top_k_hit_rate import KINDS, depth_curves
from specdec_jax.analysis.tree_drawing import Drawn, walk_depth_first
from specdec_jax.decoding.trace import TreeStep
from specdec_jax.files.writing import check_output, write_file

Axes: TypeAlias = Any  # of matplotlib
Figure: TypeAlias = Any
Panel: TypeAlias = Callable[[Axes], None]
Points: TypeAlias = dict[str, list[tuple[float, float]]]

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


def render_svg(figure: Figure, label: str) -> Markup:
    """Returns the figure as an element of an HTML page; the same figure gives the same text.

    Colours become variables of the page's style sheet, which has a light and a dark value for each.

    Args:
      figure: the figure.
      label: what it shows, for those who cannot see it.
    """
    import matplotlib

    file = io.StringIO()
    # Ids of markers and clips follow the salt: on one page no two figures may share them.
    style: Any = {"svg.hashsalt": label, "svg.fonttype": "none"}
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # The browser draws the text, which matplotlib only measures.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    text = file.getvalue().partition("<svg")[2]
    text = re.sub('<g id="[^"]*"', "<g", text)  # these names are the same in every figure
    # A colour in a tag, not in a text: there `<` and `>` are escaped.
    text = re.sub(
        r"#[0-9a-f]{6}(?=[^<>]*>)",
        lambda found: f"var(--{_PAGE_COLOURS.get(found[0], 'ink')})",
        text,
    )
    label = str(escape(replace_unprintable(label)))
    # A narrow screen shrinks it by a quarter at the most, so that its texts can be read.
    width = f"min-width: {54 * figure.get_figwidth():.0f}pt"
    return Markup(f'<svg role="img" aria-label="{label}" style="{width}"{text}')


# The page's variables for matplotlib's colours.
_PAGE_COLOURS = {
    "#000000": "ink",
    "#ffffff": "paper",
    "#808080": "faint",
    "#7f7f7f": "faint",
    "#b0b0b0": "line",
    "#cccccc": "line",
    "#d3d3d3": "line",
    "#1f77b4": "blue",
    "#ff7f0e": "orange",
    "#2ca02c": "green",
    "#d62728": "red",
    "#9467bd": "purple",
    "#e377c2": "pink",
    "#8c564b": "brown",
}


def replace_unprintable(text: str) -> str:
    """Returns the text with a replacement character for each character that no page can hold."""
    return _NO_TEXT.sub("\ufffd", text)


def shorten(name: str, most: int = 60) -> str:
    """Returns a text on one line, short enough for a figure."""
    text = " ".join(replace_unprintable(name).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def draw_panels(panels: Mapping[str, Panel], title: str = "") -> Figure:
    """Draws panels side by side, each under its name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.7 * len(panels), 3), layout="constrained")
    places = np.atleast_1d(figure.subplots(1, len(panels)))
    for (name, draw), axes in zip(panels.items(), places, strict=True):
        axes.set(title=name)
        draw(axes)
    # Legends stand below, where they hide no curve.
    labels = [axes.get_legend_handles_labels()[1] for axes in places]
    figure.set_figheight(3.1 + 0.18 * max(map(len, labels)))
    for axes, names in zip(places, labels, strict=True):
        axes.grid(alpha=0.5)
        if names:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize="small")
    figure.suptitle(title, parse_math=False)
    figure.draw_without_rendering()  # a second layout knows the width of the numbers
    return figure


def _new_figure(height: float, label: str) -> tuple[Figure, Axes]:
    """Returns a figure of bars, narrow enough for a telephone; `height` is in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=label)
    axes.grid(axis="x", alpha=0.5)
    axes.set_axisbelow(True)
    return figure, axes


# The paper does not name the γ and c of its curves.
_GAMMAS, _COSTS = (1, 3, 5, 7, 10), (0.01, 0.02, 0.05, 0.1)


def _draw_over_alpha(value: Callable[[float, int], float], axes: Axes) -> None:
    alphas = np.linspace(0.0, 1.0, 101)
    for gamma in _GAMMAS:
        axes.plot(alphas, [value(alpha, gamma) for alpha in alphas], label=f"γ = {gamma}")
    axes.set(xlabel="α")


def _draw_optimal_gammas(axes: Axes) -> None:
    alphas = np.linspace(0.0, 0.95, 96)
    for cost in _COSTS:
        gammas = [formulas.optimal_gamma(alpha, cost) for alpha in alphas]
        axes.step(alphas, gammas, where="mid", label=f"c = {cost:g}")
    axes.set(xlabel="α")


# By equation (1), section 3.5 and theorem 3.11.
THEORY: Mapping[str, Panel] = {
    "Figure 2. Expected tokens per target call": functools.partial(
        _draw_over_alpha, formulas.expected_tokens
    ),
    "Figure 3. The best γ": _draw_optimal_gammas,
    "Figure 4, right. Arithmetic operations": functools.partial(
        _draw_over_alpha, formulas.operations
    ),
}


_AS_IT_IS: Mapping[str, Any] = {
    "parse_math": False,
    "in_layout": False,
}  # a long text moves no axes
_UNDERLAY = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides lines behind a text


def draw_improvements(rows: Sequence[tuple[str, Spread, float | None]]) -> Figure:
    """Draws bars of measured improvement with their spread, and the predictions.

    Args:
      rows: (name, measured improvement, predicted improvement or None).
    """
    figure, axes = _new_figure(1.4 + 0.5 * len(rows), "improvement over plain decoding")
    places = np.arange(len(rows))
    median, least, most = np.array([spread for _, spread, _ in rows]).T
    errors, label = [median - least, most - median], "measured (median and spread)"
    axes.barh(places, median, 0.4, xerr=errors, capsize=2, label=label)
    predicted = np.array([np.nan if value is None else value for _, _, value in rows])
    if not np.isnan(predicted).all():
        shown = ~np.isnan(predicted)
        axes.plot(predicted[shown], places[shown], "kd", markeredgecolor="white", label="predicted")
    axes.axvline(1, color="grey", linewidth=1)
    for place, (name, _, _) in zip(places, rows, strict=True):
        axes.text(0, place - 0.27, shorten(name), fontsize=9, bbox=_UNDERLAY, **_AS_IT_IS)
    axes.set(ylim=(len(rows) - 0.6, -0.75), yticks=[])
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
    label = f"milliseconds per {unit}, with the spread of the passes"
    figure, axes = _new_figure(1.2 + 0.45 * len(bars), label)
    figure.set_figwidth(8)
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
    figure, axes = _new_figure(1.3 + 0.5 * len(variants), "milliseconds")
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
            labelled |= {kind} if bars else set()
            style = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.2, "label": label}
            axes.broken_barh(bars, (place - 0.35, 0.7), **style)
    axes.set_yticks(range(len(variants)), [name for name, _ in variants])
    axes.invert_yaxis()
    if labelled:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_measurement(record: MeasureRecord) -> Figure:
    """Draws the panels of a record of `specdec measure` under a title that says what it is of."""
    title = (
        f"{shorten(record.target.name)} with {shorten(record.drafter.name)}, "
        f"temperature {record.options.temperature:g}, batch {record.options.batch_size}: "
        f"c = {record.cost_ratio:.3f}"
    )
    return draw_panels(list_measurement_panels(record), title)


def list_measurement_panels(record: MeasureRecord) -> dict[str, Panel]:
    """Returns what draws expected improvement by γ, acceptance by position, and v, by name.

    Acceptance by depth and top-k hit rate have panels of their own if the record has them.
    """
    accepted = record.acceptance
    panels: dict[str, Panel] = {
        "expected improvement": functools.partial(_draw_gain, record),
        "P(first i drafted tokens accepted)": functools.partial(_draw_survival, record),
        "v: a target call, in single steps": functools.partial(_draw_verify_cost, record),
    }
    if accepted.hit_rate:
        rates = {
            KINDS[kind]: [(value.covered, value.standard_error) for value in values]
            for kind, values in accepted.hit_rate.items()
        }
        name = "P(the target's token is among k)"
        panels[name] = functools.partial(_draw_rate_curves, rates, "k, children of a node")
    if by_depth := depth_curves(accepted.model_dump()):
        name = "P(accepted | those above are)"
        panels[name] = functools.partial(_draw_rate_curves, by_depth, "depth")
    return panels


def _draw_gain(record: MeasureRecord, axes: Axes) -> None:
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
    axes.set(xlabel="γ, drafted tokens", xticks=gammas)


def _draw_survival(record: MeasureRecord, axes: Axes) -> None:
    accepted, gammas = record.acceptance, [row.gamma for row in record.table]
    if accepted.alpha is not None:
        powers = [accepted.alpha**gamma for gamma in gammas]
        axes.plot(gammas, powers, "k:", label="α to the power of i")
    for name, shares in accepted.by_position.items():
        rates = [(share.accepted, share.standard_error) for share in shares]
        _draw_rates(axes, gammas, rates, "s-", name)
    axes.set(xlabel="i", xticks=gammas, ylim=(0, 1.05))


def _draw_verify_cost(record: MeasureRecord, axes: Axes) -> None:
    widths = [int(width) for width in record.verify_cost]
    axes.plot(widths, list(record.verify_cost.values()), "o-")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xlabel="positions", ylim=(0, None))


def _draw_rate_curves(
    curves: Mapping[str, Sequence[tuple[float, float | None]]], label: str, axes: Axes
) -> None:
    for name, rates in curves.items():
        _draw_rates(axes, range(1, len(rates) + 1), rates, "o-", name)
    axes.set(xlabel=label, ylim=(0, 1.05))


def _draw_rates(
    axes: Axes,
    x: Sequence[int],
    rates: Iterable[tuple[float, float | None]],
    style: str,
    label: str,
) -> None:
    rates = list(rates)
    errors = [error or 0.0 for _, error in rates]
    axes.errorbar(x, [mean for mean, _ in rates], errors, fmt=style, capsize=3, label=label)


# Token trees.

_ACCEPTED, _REJECTED, _OWN, _SEEN = "tab:green", "tab:gray", "tab:blue", "lightgray"
_ROW, _LEVEL = 0.24, 1.15  # inches


def draw_tree(drawn: Drawn, parts: Sequence[str] = ("nodes", "mask")) -> Figure:
    """Draws the token tree of one iteration with depth from left to right, and its attention mask.

    The accepted path is green, the target's own token blue.

    Args:
      drawn: the tree.
      parts: which to draw.
    """
    from matplotlib.figure import Figure

    tree = drawn.tree
    order = list(walk_depth_first(tree))
    depths = {node: len(tree.line(node)) - 1 for node in order}
    high = _ROW * len(order)
    widths = {"nodes": _LEVEL * (max(depths.values()) + 2), "mask": high + 0.6}
    chosen = [widths[part] for part in parts]
    figure = Figure(figsize=(sum(chosen), high + 1), layout="constrained")
    places = np.atleast_1d(figure.subplots(1, len(parts), width_ratios=chosen))
    for part, axes in zip(parts, places, strict=True):
        if part == "nodes":
            _draw_nodes(axes, drawn, order, depths)
        else:
            _draw_mask(axes, tree, order)
    return figure


def describe_tree(drawn: Drawn) -> str:
    """Returns what `draw_tree` shows, in words."""
    count, accepted = len(drawn.tree.nodes) - 1, len(drawn.tree.path) - 1
    return f"{count} drafted tokens, {accepted} accepted (green), the target's own token in blue"


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
        axes.text(x, y, shorten(text) or "␣", **style, **_AS_IT_IS)

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


def list_accelerator_panels(record: AcceleratorRecord) -> dict[str, Panel]:
    """Returns what draws v over the positions of a call, and times over the forced α, by name.

    What was not measured has no panel.
    """
    timed = [(one, one.milliseconds) for one in record.figures if one.milliseconds is not None]
    calls: Points = {}
    speculative: Points = {}
    plain: dict[str, float] = {}
    for one, times in timed:
        target = shorten(one.target or "-", 24)
        line = f"{target}, batch {'-' if one.batch is None else one.batch}"
        if one.kind == "call" and one.v is not None and one.width is not None:
            calls.setdefault(target, []).append((one.width, one.v))
        if one.kind == "speculative" and one.alpha is not None:
            speculative.setdefault(line, []).append((one.alpha, times.median))
        if one.kind == "plain":
            plain[line] = times.median
    panels = {
        "v over the positions of a target call": (calls, "positions of a target call", {}),
        "ms for a token of a row (dotted: plain)": (speculative, "forced α", plain),
    }
    return {
        name: functools.partial(_draw_points, *drawn) for name, drawn in panels.items() if drawn[0]
    }


def _draw_points(points: Points, label: str, plain: Mapping[str, float], axes: Axes) -> None:
    for name, pairs in points.items():
        (line,) = axes.plot(*zip(*sorted(pairs)), "o-", label=name.replace("$", r"\$"))
        if name in plain:
            axes.axhline(plain[name], color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xlabel=label, ylim=(0, None))
