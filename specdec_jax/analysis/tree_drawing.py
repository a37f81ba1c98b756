"""Draws the token tree of an iteration as text: nodes, accepted path, attention mask."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.analysis.traces import own_token_kind, token_text
from specdec_jax.analysis.variants import SentenceBatch, Workload
from specdec_jax.decoding.trace import TraceStep, TreeNode, TreeStep, trace
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.tree_text import read_tree

# Width of a terminal.
COLUMNS = 80
_SEEN, _UNSEEN = "■", "·"


class Drawn(NamedTuple):
    """The tree of a step with the texts of its tokens, as records keep it.

    Attributes:
      tree: the tree.
      texts: the text of each node.
      own: the text of the token which the target added; None if it added none.
    """

    tree: TreeStep
    texts: list[str]
    own: str | None

    @classmethod
    def from_step(cls, step: TraceStep, target: LanguageModel) -> "Drawn":
        """Returns the tree of a step that drafted one."""
        assert step.tree is not None
        tokens = [escape_controls(node.token, target) for node in step.tree.nodes[1:]]
        own = None if step.corrected is None else escape_controls(step.corrected, target)
        return cls(step.tree, [root_text(step.tree, target), *tokens], own)

    def record(self) -> dict[str, Any]:
        """Returns the tree as a record has it."""
        pairs = zip(self.texts, self.tree.nodes, strict=True)
        nodes = [{"text": text, **node._asdict()} for text, node in pairs]
        return {"nodes": nodes, "path": self.tree.path, "own": self.own}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Drawn":
        """Returns the tree of a record, without ids and probabilities, which no drawing shows.

        Raises:
          ValueError: parents that do not come before their children, or a path that leaves the
            tree.
        """
        parents, path = [node["parent"] for node in record["nodes"]], list(record["path"])
        ordered = all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
        if parents[:1] != [-1] or not ordered:
            raise ValueError(
                "nodes: got parents in another order, expected -1, then each before its children"
            )
        pairs = zip(path, path[1:])
        connected = all(0 < node < len(parents) and parents[node] == above for above, node in pairs)
        if path[:1] != [0] or not connected:
            raise mismatch_error("path", "other nodes", "node 0, then a child of the node before")
        nodes = [TreeNode(0, parent, 0.0, None) for parent in parents]
        return cls(TreeStep(nodes, path), [node["text"] for node in record["nodes"]], record["own"])


def make_examples(workload: Workload, batch: SentenceBatch) -> list[dict[str, Any]]:
    """Returns one call of the first input of `batch` for every tree of the options, as records.

    It is the call that `choose_step` chooses. A tree that drafts nothing is left out.
    """
    target, drafter, _, options = workload
    how = options.decoding() | {"drafter": drafter, "verifier": "block", "key": batch.keys}
    found = []
    for text in options.tree:
        steps = trace(target, batch.inputs[0], tree=read_tree(text), **how)
        number = choose_step(steps)
        if number is not None:
            drawn = Drawn.from_step(steps[number], target).record()
            found.append({"tree": text, "call": number + 1, **drawn})
    return found


def choose_step(steps: Sequence[TraceStep]) -> int | None:
    """Returns the number of the first step whose path leaves the first children.

    Without one it is the first step with the longest path, and None if no tree was drafted.
    """
    trees = {number: step.tree for number, step in enumerate(steps) if step.tree and step.gamma}
    branching = (number for number, tree in trees.items() if has_better_sibling(tree))
    return next(branching, max(trees, key=lambda number: len(trees[number].path), default=None))


def has_better_sibling(tree: TreeStep) -> bool:
    """Returns whether a node of the path has a sibling of better rank."""
    return any(tree.children(parent)[0] != child for parent, child in zip(tree.path, tree.path[1:]))


def walk_depth_first(tree: TreeStep, node: int = 0) -> Iterator[int]:
    """Yields `node` and its descendants, each before its children."""
    yield node
    for child in tree.children(node):
        yield from walk_depth_first(tree, child)


def mask(tree: TreeStep, order: Sequence[int]) -> list[str]:
    """Returns a line for each node in `order`, which shows the nodes that it attends to."""
    return [
        "".join(_SEEN if other in tree.line(node) else _UNSEEN for other in order) for node in order
    ]


def tree_lines(
    step: TraceStep, target: LanguageModel, numbers: bool = False
) -> list[list[tuple[str, str]]]:
    """Returns the tree of a step as lines of (kind, text), in the kinds of `traces.LEGEND`.

    Each node has a line with its number, the nodes that it attends to, and its text. The target's
    own token follows the last accepted node. The mask is below the tree if both together are wider
    than `COLUMNS` columns. With `numbers` the lines show p, q and p/q of every node too.
    """
    tree = step.tree
    assert tree is not None
    order = list(walk_depth_first(tree))
    rows = mask(tree, order)
    width = max(len(order), len("sees"))
    drawn = list(_branches(step, target))
    digits = len(str(len(order) - 1))
    widest = max(len(before) + len(text) for _, before, _, text in drawn) + len("{==}")
    beside = digits + 1 + width + 1 + 28 * numbers + widest <= COLUMNS

    def columns(number: int | str, row: str, values: str) -> str:
        return f"{number:>{digits}} " + f"{row:<{width}} " * beside + f"{values} " * numbers

    titles = columns("#", "sees", f"{'p':>9}{'q':>9}{'p/q':>9}")
    lines = [[("committed", titles.rstrip())]]
    places = {node: place for place, node in enumerate(order)}
    for node, before, kind, text in drawn:
        left = columns("", "", " " * 27)
        if node is not None:
            left = columns(places[node], rows[places[node]], _node_values(tree, node))
        lines.append([("committed", left + before), (kind, text)])
    if not beside:
        lines += _mask_lines(rows, digits)
    return lines


def _node_values(tree: TreeStep, node: int) -> str:
    """Returns p, q and p/q of a node; node 0 has none."""
    one = tree.nodes[node]
    values = ("-" if value is None else f"{value:.3g}" for value in (one.p, one.q, one.ratio))
    return "".join(f"{value:>9}" for value in values) if node else " " * 27


def _mask_lines(rows: Sequence[str], digits: int) -> list[list[tuple[str, str]]]:
    """Returns the mask as separate lines, or one line if it is too wide."""
    if digits + 1 + len(rows) > COLUMNS:
        return [[("committed", f"(the mask of {len(rows)} nodes is wider than {COLUMNS} columns)")]]
    lines = [f"{'#':>{digits}} sees", *(f"{n:>{digits}} {row}" for n, row in enumerate(rows))]
    return [[("committed", line)] for line in lines]


def _branches(step: TraceStep, target: LanguageModel) -> Iterator[tuple[int | None, str, str, str]]:
    """Yields (node, branches before it, kind, text) of every node in depth-first order.

    The target's own token is among them, with None as its node.
    """
    tree = step.tree
    assert tree is not None

    def visit(node: int, before: str, below: str) -> Iterator[tuple[int | None, str, str, str]]:
        accepted = node > 0 and node in tree.path
        text = escape_controls(tree.nodes[node].token, target) if node else root_text(tree, target)
        yield node, before, "accepted" if accepted else "committed", text
        following: list[int | None] = [*tree.children(node)]
        if node == tree.path[-1] and step.corrected is not None:
            following.append(None)
        for child in following:
            last = child is following[-1]
            branch, more = below + ("└─" if last else "├─"), below + ("  " if last else "│ ")
            if child is None:
                yield None, branch, own_token_kind(step), escape_controls(step.corrected, target)
            else:
                yield from visit(child, branch, more)

    yield from visit(0, "", "")


def root_text(tree: TreeStep, target: LanguageModel) -> str:
    """Returns the last committed token as text, which may be the one that outputs start with."""
    token = tree.nodes[0].token
    return "[START]" if token == target.start_token else escape_controls(token, target)


def escape_controls(token: int | None, target: LanguageModel) -> str:
    """Returns a token as text without line breaks and other characters that move the cursor."""
    text = "" if token is None else token_text(token, target)
    return "".join(character if character.isprintable() else "␣" for character in text)
