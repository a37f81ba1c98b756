"""Draws the token tree of one iteration, and its attention mask; matplotlib is imported only where
something is drawn."""

from collections.abc import Sequence

import numpy as np

from specdec_jax.analysis.report.plots import shortened
from specdec_jax.analysis.tree_drawing import Drawn, depth_first
from specdec_jax.decoding.trace import TreeStep

_ACCEPTED, _REJECTED, _OWN, _SEEN = "tab:green", "tab:gray", "tab:blue", "lightgray"
_ROW, _LEVEL = 0.24, 1.15  # inches


def token_tree(drawn: Drawn):
    """Draws a tree, a row for each node with depth from left to right, and beside it what each node
    sees.

    The accepted path is green, the target's own token blue.
    """
    from matplotlib.figure import Figure

    tree = drawn.tree
    order = list(depth_first(tree))
    lines = {node: tree.line(node) for node in order}
    height, depth = _ROW * len(order) + 1, max(map(len, lines.values()))
    widths = _LEVEL * (depth + 1), _ROW * len(order) + 0.6
    figure = Figure(figsize=(sum(widths), height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=widths)
    _draw_nodes(left, drawn, order, {node: len(line) - 1 for node, line in lines.items()})
    _draw_mask(
        right, tree, [[order.index(other) for other in lines[node]] for node in order], order
    )
    figure.suptitle(
        f"{len(order) - 1} drafted tokens, {len(tree.path) - 1} accepted (green), the target's own token in blue",
        fontsize=10,
    )
    return figure


def _draw_nodes(axes, drawn: Drawn, order: list[int], depths: dict[int, int]) -> None:
    tree = drawn.tree
    row = {node: place for place, node in enumerate(order)}

    def box(colour):
        return {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour}

    def put(text: str, x: float, y: float, colour: str, above: tuple[float, float] | None) -> None:
        if above is not None:
            # Down from the parent, then right to the node: no line crosses another node's text.
            axes.plot(
                [above[0] + 0.05, above[0] + 0.05, x],
                [above[1], y, y],
                color=colour,
                zorder=1,
                linewidth=1.2,
            )
        axes.text(
            x,
            y,
            shortened(text) or "␣",
            va="center",
            bbox=box(colour),
            fontsize=9,
            parse_math=False,
            zorder=3,
        )

    # What is accepted is drawn last, on top.
    for node in sorted(order, key=lambda node: node in tree.path):
        parent = tree.nodes[node].parent
        above = (depths[parent], row[parent]) if node else None
        put(
            drawn.texts[node],
            depths[node],
            row[node],
            _ACCEPTED if node in tree.path else _REJECTED,
            above,
        )
    if drawn.own is not None:
        end = tree.path[-1]
        put(drawn.own, depths[end] + 1, row[end], _OWN, (depths[end], row[end]))
    axes.set(xlim=(-0.1, max(depths.values()) + 1.9), ylim=(len(order) - 0.5, -0.7))
    axes.axis("off")


def _draw_mask(axes, tree: TreeStep, seen: Sequence[Sequence[int]], order: list[int]) -> None:
    """Draws a row for each node, with the places that it sees; `seen` and `order` are by row."""
    for row, (places, node) in enumerate(zip(seen, order, strict=True)):
        colour = _ACCEPTED if node in tree.path else _SEEN
        axes.broken_barh(
            [(place - 0.5, 1) for place in places], (row - 0.5, 1), facecolor=colour, linewidth=0
        )
    edges = np.arange(len(order) + 1) - 0.5
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", linewidth=0.4, alpha=0.5)
    axes.tick_params(which="both", length=0, labelsize=7)
    axes.set(
        xlim=(edges[0], edges[-1]),
        ylim=(edges[-1], edges[0]),
        aspect="equal",
        title="sees, of the tree",
        ylabel="node",
        xlabel="node",
    )
    axes.title.set_fontsize(9)
