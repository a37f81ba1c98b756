"""Trees of drafted tokens: fixed shapes, and shapes that the drafter's distribution decides.

A tree has N nodes. Node 0 is the last committed token, every other node a drafted token, which
follows its parent. One call of the target scores all nodes, and each node sees its ancestors alone.
A chain, the draft of γ tokens of Leviathan et al. 2023, is the tree in which every node has at most
one child.

Nodes are numbered so that parents come before their children. The number is also the node's
priority: where fewer nodes are drafted, they are the first ones.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from specdec_jax.models import arguments
from specdec_jax.speculative import tree_choice
from specdec_jax.speculative.tree_choice import Node, Shares
from specdec_jax.speculative.tree_draft import Branches

# The ways to choose a node's children from q, the drafter's distribution of the token after it, and
# the verifiers under which the output distribution is exactly the target's, the best of these
# first. Where children are drawn, the tree must not depend on what was drawn: only the first two
# kinds may be pruned, reordered or merged by data.
#
#   top: the most probable ids.
#   gumbel: the ids with the greatest log q + g, g being noise of the absolute position that the
#     target's own choice shares.
#   mixed: the most probable ids, and last one that is drawn from what they leave of q.
#   drawn: drawn one after another, each from what those before it leave of q.
#   iid: drawn one after another from q itself.
CHILDREN = {
    "top": ("point", "gumbel"),
    "gumbel": ("gumbel", "point"),
    "mixed": ("mixed", "gumbel", "point"),
    "drawn": ("traversal", "recursive", "gumbel", "point"),
    "iid": ("kseq", "recursive", "traversal", "gumbel", "point"),
}
# The kinds of a drafter that chooses children by itself and provides no probabilities.
POINTS = {"top": CHILDREN["top"]}
# Verifiers whose output distribution is not the target's, which take any children.
LOSSY_TREES = ("typical",)
# The shares of nodes whose most probable id under the target was the drafter's first, second …
# choice, measured with the bundled pair. They order the nodes of a tree by priority, and policies
# of γ begin with them.
RANK_SHARES = np.array([[0.863, 0.067, 0.022, 0.010, 0.006, 0.004, 0.003, 0.002]])
MAX_NODES = 257
AUTO = "auto"


class Kinds:
    """How the children of a tree's nodes are chosen, and how the tree is verified.

    Attributes:
      children: a key of `CHILDREN` that `allowed` has; "auto": the first of `allowed`.
      verifier: one of those that `CHILDREN` lists, or of `LOSSY_TREES`; "auto": the first in the
        list.
    """

    children: str
    verifier: str
    allowed: ClassVar[tuple[str, ...]]
    # Why other ways to choose children are not allowed, for the message.
    reason: ClassVar[str] = ""

    def check_kinds(self) -> None:
        """Checks `children` and `verifier`; raises ValueError for a pair that is not listed."""

        def check(name: str, expected: Iterable[str], why: str):
            given, expected = getattr(self, name), (AUTO, *expected)
            if given not in expected:
                listed = ", ".join(map(repr, expected))
                raise ValueError(f"{name}: got {given!r}, expected {listed}{why}")

        for name in ("children", "verifier"):  # an array is equal to nothing and to everything
            arguments.check_kind(name, getattr(self, name), str, "a name, such as 'auto'")
        check("children", self.allowed, self.reason)
        why = ", under which the output distribution is exactly the target's for children "
        known = any(self.verifier in exact for exact in CHILDREN.values())
        verifiers = (*CHILDREN[self.kind], *LOSSY_TREES)
        check("verifier", verifiers, f"{why}{self.kind!r}" if known else "")

    @property
    def kind(self) -> str:
        """How children are chosen, the default in place of "auto"."""
        return self.allowed[0] if self.children == AUTO else self.children

    @property
    def verify(self) -> str:
        """How the tree is verified, the default in place of "auto"."""
        return CHILDREN[self.kind][0] if self.verifier == AUTO else self.verifier


@dataclasses.dataclass(frozen=True)
class Tree(Kinds):
    """A tree of fixed shape; static and hashable.

    Attributes:
      parents: the parents of nodes 1 … N − 1, each a smaller number than the node's own. Children
        of one node are ranked by their numbers.
      children: how children are chosen, a key of `CHILDREN`; "auto": "drawn".
      verifier: how the tree is verified, one of those that `CHILDREN` lists; "auto": the first.

    Raises:
      ValueError: a parent that does not come before its child, more than 256 drafted nodes, or
        `children` with a `verifier` that `CHILDREN` does not list for them.
    """

    parents: tuple[int, ...]
    children: str = AUTO
    verifier: str = AUTO
    # Drawn children were accepted the most often in the bundled pair's trees of 8 to 64 nodes.
    allowed: ClassVar[tuple[str, ...]] = ("drawn", *(kind for kind in CHILDREN if kind != "drawn"))

    def __post_init__(self):
        parents = arguments.check_list("parents", self.parents, "a list of nodes' numbers")
        if not 1 <= len(parents) < MAX_NODES:
            raise ValueError(f"parents: got {len(parents)} nodes, expected 1 to {MAX_NODES - 1}")
        for node, parent in enumerate(parents, 1):
            if not arguments.is_integer(parent) or not 0 <= parent < node:
                got, expected = f"{arguments.quote(parent)} for node {node}", f"0 to {node - 1}"
                raise ValueError(f"parents: got {got}, expected a number from {expected}")
        object.__setattr__(self, "parents", tuple(map(int, parents)))
        self.check_kinds()

    @classmethod
    def chain(cls, length: int, **kinds: str) -> "Tree":
        """Returns the tree with one branch of `length` nodes; `kinds`: `children`, `verifier`."""
        length = arguments.check_integer("length", length, 1, MAX_NODES - 1)
        return cls.uniform((1,) * length, **kinds)

    @classmethod
    def uniform(cls, widths: Sequence[int], **kinds: str) -> "Tree":
        """Returns the tree in which every node at depth d, from 0, has `widths[d]` children.

        `kinds` are `children` and `verifier`.
        """
        expected = "integers of at least 1"
        widths = arguments.check_list("widths", widths, expected)
        if not widths or not all(arguments.is_integer(width) and width >= 1 for width in widths):
            raise ValueError(f"widths: got {arguments.quote(widths)}, expected {expected}")
        if sum(np.cumprod([float(width) for width in widths])) >= MAX_NODES:
            expected = f"at most {MAX_NODES - 1} nodes in all"
            raise ValueError(f"widths: got {tuple(widths)}, expected {expected}")
        nodes: list[Node] = [()]
        level = nodes
        for width in widths:
            level = [(*node, rank) for node in level for rank in range(int(width))]
            nodes = nodes + level
        nodes.sort(key=lambda node: (-tree_choice.node_value(node, RANK_SHARES), len(node), node))
        return cls(_parents(nodes), **kinds)

    @classmethod
    def best(
        cls,
        acceptance_by_rank: Shares,
        nodes: int,
        depth: int,
        verify_costs: Mapping[Any, float] | None = None,
        cost_ratio: float = 0.0,
        **kinds: str,
    ) -> "Tree | None":
        """Returns the tree with the most tokens per time; None if none beats plain decoding.

        The expected tokens (see `expected`) are divided by v(N) + c · D. The tree may be a chain.
        `specdec measure --output` writes the four figures that this takes.

        Args:
          acceptance_by_rank: the share of nodes at which the target's token is the drafter's first,
            second … choice; or a list of such lists, one for each depth, the last of which serves
            all greater depths. Shares that grow from one rank to the next change places.
          nodes: the greatest N, at most 257.
          depth: the greatest D.
          verify_costs: v(n), the time of a target call over n positions in that of a call over one,
            by n, up to `nodes` or more; linear in between. None: 1 for every n.
          cost_ratio: c, the time in which the drafter drafts one level, in that of a target call
            over one position.
          kinds: `children` and `verifier`.

        Raises:
          ValueError: shares, costs or bounds out of their ranges.
        """
        arguments.check_integer("nodes", nodes, 2, MAX_NODES)
        arguments.check_integer("depth", depth, 1, MAX_NODES - 1)
        best = tree_choice.choose_fastest(
            acceptance_by_rank, nodes, depth, verify_costs, cost_ratio
        )
        return None if best is None else cls(_parents(best), **kinds)

    def expected(self, acceptance_by_rank: Shares) -> float:
        """Returns the expected number of tokens that one call of the target commits.

        A child is accepted with the share of its rank; `acceptance_by_rank` is as in `best`.
        """
        shares = tree_choice.check_acceptance(acceptance_by_rank)
        lines = [line[1 : depth + 1] for line, depth in zip(self.lines, self.depths, strict=True)]
        return sum(tree_choice.node_value(tuple(self.ranks[line]), shares) for line in lines)

    @property
    def size(self) -> int:
        """N, the positions of the target's call: the last committed token and the drafted ones."""
        return len(self.parents) + 1

    window = size  # the slots that calls over its nodes write

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """`[N]` int32, how many drafted tokens lead to each node, its own included."""
        depths = np.zeros(self.size, np.int32)
        for node, parent in enumerate(self.parents, 1):
            depths[node] = depths[parent] + 1
        return depths

    @property
    def depth(self) -> int:
        """D, the most tokens of a draft that can be accepted."""
        return int(self.depths.max())

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """`[N]` int32, each node's place among its siblings, from 0."""
        seen, ranks = np.zeros(self.size, np.int32), np.zeros(self.size, np.int32)
        for node, parent in enumerate(self.parents, 1):
            ranks[node] = seen[parent]
            seen[parent] += 1
        return ranks

    @property
    def width(self) -> int:
        """The most children of a node."""
        return int(self.ranks.max()) + 1

    @property
    def is_chain(self) -> bool:
        """Whether no node has more than one child."""
        return self.width == 1

    @functools.cached_property
    def lines(self) -> np.ndarray:
        """`[N, D + 1]` int32: the ancestors of each node by depth, then itself, then 0."""
        lines = np.zeros((self.size, self.depth + 1), np.int32)
        for node, parent in enumerate(self.parents, 1):
            lines[node] = lines[parent]
            lines[node, self.depths[node]] = node
        return lines

    @functools.cached_property
    def fed(self) -> np.ndarray:
        """`[N]` int32, the place of each node that has children among all such nodes.

        They are ordered by depth, then number, as a drafter's model is fed them; −1 for the others.
        """
        fed = np.full(self.size, -1, np.int32)
        inner = np.concatenate([self.inner(depth) for depth in range(self.depth)])
        fed[inner] = np.arange(len(inner))
        return fed

    def level(self, depth: int) -> np.ndarray:
        """Returns the numbers of the nodes at `depth`, ascending."""
        return np.flatnonzero(self.depths == depth)

    def inner(self, depth: int) -> np.ndarray:
        """Returns the numbers of the nodes at `depth` that have children, ascending."""
        return np.intersect1d(self.level(depth), self.parents)

    def children_of(self, nodes: np.ndarray) -> np.ndarray:
        """Returns `[J, K]`: the numbers of the children of `nodes [J]` by rank; 0 past the last."""
        parents = np.asarray(self.parents)
        children = [1 + np.flatnonzero(parents == node) for node in nodes]
        most = max(map(len, children), default=1) or 1
        return np.array([np.pad(one, (0, most - len(one))) for one in children], np.int32)

    def branches(self, batch: int) -> "Branches":
        """Returns the shape of the trees of `batch` rows."""
        shapes = np.array((-1, *self.parents), np.int32), self.ranks, self.depths, self.lines
        return Branches(*(jnp.broadcast_to(x, (batch, *x.shape)) for x in shapes))


class Chains(Tree):
    """Several drafts of one length that are drawn independently of each other.

    Two of them may begin with the same tokens. The nodes are numbered chain after chain, so that a
    budget leaves out whole chains first.

    Raises:
      ValueError: more than 256 tokens in all, or children that are not drawn independently.
    """

    allowed = ("iid",)
    reason = ", since chains are drawn independently of each other (for others give a Tree)"

    def __init__(self, count: int, length: int, children: str = AUTO, verifier: str = AUTO):
        """Describes `count` drafts of `length` tokens each; `verifier` is as for `Tree`."""
        arguments.check_integer("count", count, 1, MAX_NODES - 1)
        arguments.check_integer("length", length, 1, (MAX_NODES - 1) // count)
        nodes = range(count * length)
        parents = tuple(node if node % length else 0 for node in nodes)
        super().__init__(parents, children, verifier)


@dataclasses.dataclass(frozen=True)
class DynamicTree(Kinds):
    """A tree whose shape the drafter's distribution decides; static and hashable.

    The method is that of EAGLE-2 (Li et al. 2024, arXiv 2406.16858). A node's score is the product
    of the drafter's probabilities of the tokens on the way to it. At each level the `width` nodes
    of the greatest score get their `width` best children; of all the nodes that were drafted, the N
    − 1 of the greatest score are kept. Parents score no less than their children, and of equal
    scores the smaller number is kept, so that these are a tree.

    Attributes:
      depth: D, the number of levels.
      width: children of a node that is expanded, and the most nodes expanded at one level.
      nodes: N, the positions of the target's call: the last committed token and the nodes kept.
      children: how children are chosen, "gumbel" (the default) or "top".
      verifier: as for `Tree`.

    Raises:
      ValueError: fewer than D + 1 nodes, or more than are drafted or than 257; or children that are
        drawn, or a verifier that does not suit them.
    """

    depth: int
    width: int
    nodes: int
    children: str = AUTO
    verifier: str = AUTO
    is_chain: ClassVar[bool] = False
    allowed: ClassVar[tuple[str, ...]] = ("gumbel", "top")
    reason: ClassVar[str] = (
        ": where children are drawn otherwise, the output distribution is exactly the target's only"
        " if the shape does not depend on them"
    )

    def __post_init__(self):
        def check(name: str, least: int, most: int):
            value = arguments.check_integer(name, getattr(self, name), least, most)
            object.__setattr__(self, name, value)

        check("depth", 1, MAX_NODES - 1)
        check("width", 2, MAX_NODES - 1)
        check("nodes", self.depth + 1, min(self.drafted + 1, MAX_NODES))
        self.check_kinds()

    def fixed(self) -> Tree:
        """Returns a tree of fixed shape with as many nodes, as deep, whose call takes as long."""
        return Tree((*range(self.depth), *(0,) * (self.size - 1 - self.depth)))

    @property
    def size(self) -> int:
        """N, the positions of the target's call: the last committed token and the nodes kept."""
        return self.nodes

    @property
    def levels(self) -> tuple[int, ...]:
        """How many nodes are drafted at each depth, node 0 among them."""
        return (1, self.width, *(self.width**2,) * (self.depth - 1))

    @property
    def window(self) -> int:
        """The slots that calls write: those of the N nodes, or of all that a drafter expands."""
        return max(self.nodes, 1 + (self.depth - 1) * self.width)

    @property
    def drafted(self) -> int:
        """The nodes that the drafter proposes, of which N − 1 are kept."""
        return sum(self.levels) - 1


def _parents(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Returns the parents of all `nodes` but node 0, the first; they are numbered as they come."""
    numbers = {node: number for number, node in enumerate(nodes)}
    return tuple(numbers[node[:-1]] for node in nodes[1:])
