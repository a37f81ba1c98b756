"""Draws the token tree of one iteration, and its attention mask; matplotlib is imported only where
something is drawn."""

import numpy as np

from specdec_jax.analysis.tree_drawing import depth_first, one_line, root
from specdec_jax.decoding.trace import TraceStep, TreeStep
from specdec_jax.models.language_model import LanguageModel

_STANDS, _FALLS, _OWN = "tab:green", "tab:gray", "tab:blue"
_ROW, _LEVEL = 0.24, 1.15  # inches


def token_tree(step: TraceStep, target: LanguageModel):
    """Draws a step's tree, a row for each node with depth from left to right, and beside it what
    each node sees.

    The path that stands is green, the target's own token blue.
    """
    from matplotlib.figure import Figure

    tree = step.tree
    assert tree is not None
    order = list(depth_first(tree))
    height, depth = _ROW * len(order) + 1, max(len(tree.line(node)) for node in order)
    widths = _LEVEL * (depth + 1), _ROW * len(order) + 0.6
    figure = Figure(figsize=(sum(widths), height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=widths)
    _draw_nodes(left, step, target, order)
    _draw_mask(right, tree, order)
    figure.suptitle(
        f"{step.gamma} drafted tokens, {len(step.accepted)} stand (green), the target's own token in blue", fontsize=10
    )
    return figure


def _draw_nodes(axes, step: TraceStep, target: LanguageModel, order: list[int]) -> None:
    tree = step.tree
    assert tree is not None
    row = {node: place for place, node in enumerate(order)}
    box = lambda colour: {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour}

    def put(text: str, x: float, y: float, colour: str, above: tuple[float, float] | None) -> None:
        if above is not None:
            # Down from the parent, then right to the node: no line crosses another node's text.
            axes.plot([above[0] + 0.05, above[0] + 0.05, x], [above[1], y, y], color=colour, zorder=1, linewidth=1.2)
        axes.text(x, y, text.strip() or "␣", va="center", bbox=box(colour), fontsize=9, parse_math=False, zorder=3)

    # What stands is drawn last, on top.
    for node in sorted(order, key=lambda node: node in tree.path):
        parent, x = tree.nodes[node].parent, len(tree.line(node)) - 1
        text = one_line(tree.nodes[node].token, target) if node else root(tree, target)
        above = (len(tree.line(parent)) - 1, row[parent]) if node else None
        put(text, x, row[node], _STANDS if node in tree.path else _FALLS, above)
    if step.corrected is not None:
        end = tree.path[-1]
        put(one_line(step.corrected, target), len(tree.line(end)), row[end], _OWN, (len(tree.line(end)) - 1, row[end]))
    axes.set(xlim=(-0.1, max(len(tree.line(node)) for node in order) + 0.9), ylim=(len(order) - 0.5, -0.7))
    axes.axis("off")


def _draw_mask(axes, tree: TreeStep, order: list[int]) -> None:
    seen = np.array([[other in tree.line(node) for other in order] for node in order])
    stands = np.array([node in tree.path for node in order])
    shade = np.where(seen, np.where(stands[:, None], 2, 1), 0)
    from matplotlib.colors import ListedColormap

    axes.imshow(shade, cmap=ListedColormap(["white", "lightgray", "tab:green"]), vmin=0, vmax=2, aspect="equal")
    axes.set_xticks(np.arange(len(order) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(order) + 1) - 0.5, minor=True)
    axes.grid(which="minor", linewidth=0.4, alpha=0.5)
    axes.tick_params(which="both", length=0, labelsize=7)
    axes.set(title="sees, of the tree", ylabel="node", xlabel="node")
    axes.title.set_fontsize(9)
