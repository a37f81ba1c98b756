"""Trees of drafted tokens: their shapes, fixed ones and ones that the drafter's law decides, and
drafts that have them.

A tree has N nodes. Node 0 is the last committed token, every other node a drafted token, which
follows its parent. One call of the target scores all nodes, and each node sees its ancestors alone.
A chain, the draft of γ tokens of Leviathan et al. 2023, is the tree in which every node has at most
one child.

Nodes are numbered so that parents come before their children. The number is also the node's
priority: where fewer nodes are drafted, they are the first ones.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specdec_jax.speculative.laws import Law

# The ways to choose a node's children from q, the drafter's law of the token after it, and the
# verifiers under which the output law is the target's, the best of these first. Where children are
# drawn, the tree must not depend on what was drawn: only the first two kinds may be pruned,
# reordered or merged by data.
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
# Verifiers whose output law is not the target's, which take any children.
LOSSY_TREES = ("typical",)
# The shares of nodes whose most probable id under the target was the drafter's first, second …
# choice, measured with the bundled pair. They only order the nodes of a tree by priority.
_RANK_SHARES = (0.863, 0.067, 0.022, 0.010, 0.006, 0.004, 0.003, 0.002)
MAX_NODES = 257


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree of fixed shape; static and hashable.

    Attributes:
      parents: the parents of nodes 1 … N − 1, each a smaller number than the node's own. Children
        of one node are ranked by their numbers.
      children: how children are chosen, a key of `CHILDREN`; "auto": "mixed".
      verifier: how the tree is verified, one of those that `CHILDREN` lists; "auto": the first.

    Raises:
      ValueError: a parent that does not come before its child, more than 256 drafted nodes, or a
        pair of `children` and `verifier` under which the output law would not be the target's.
    """

    parents: tuple[int, ...]
    children: str = "auto"
    verifier: str = "auto"

    def __post_init__(self):
        object.__setattr__(self, "parents", tuple(int(parent) for parent in self.parents))
        if not 1 <= len(self.parents) < MAX_NODES:
            raise ValueError(f"parents: got {len(self.parents)} nodes, expected 1 to {MAX_NODES - 1}")
        for node, parent in enumerate(self.parents, 1):
            if not 0 <= parent < node:
                raise ValueError(f"parents: got {parent} for node {node}, expected a number from 0 to {node - 1}")
        check_kinds(self.children, self.verifier)

    @classmethod
    def chain(cls, length: int, **kinds: str) -> "Tree":
        """Returns the tree with one branch of `length` nodes; `kinds` are `children` and
        `verifier`."""
        return cls.uniform((1,) * length, **kinds)

    @classmethod
    def uniform(cls, widths: Sequence[int], **kinds: str) -> "Tree":
        """Returns the tree in which every node at depth d has `widths[d]` children, d from 0;
        `kinds` are `children` and `verifier`."""
        if not len(widths) or any(isinstance(w, bool) or int(w) != w or w < 1 for w in widths):
            raise ValueError(f"widths: got {widths!r}, expected integers of at least 1")
        if sum(np.cumprod([float(width) for width in widths])) >= MAX_NODES:
            raise ValueError(f"widths: got {tuple(widths)}, expected at most {MAX_NODES - 1} nodes in all")
        ranks: list[tuple[int, ...]] = [()]
        level = ranks
        for width in widths:
            level = [(*node, rank) for node in level for rank in range(int(width))]
            ranks = ranks + level
        return cls(_parents(ranks), **kinds)

    @property
    def size(self) -> int:
        """N, the positions of the target's call: the last committed token and the drafted ones."""
        return len(self.parents) + 1

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """`[N]` int32, how many drafted tokens lead to each node, its own included."""
        depths = np.zeros(self.size, np.int32)
        for node, parent in enumerate(self.parents, 1):
            depths[node] = depths[parent] + 1
        return depths

    @property
    def depth(self) -> int:
        """D, the most tokens of a draft that can stand."""
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
        """`[N]` int32, the place of each node that has children among all such nodes, by depth and
        then by number: the order in which a drafter's model is fed them. −1 for the others."""
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

    @property
    def kind(self) -> str:
        """How children are chosen, the default in place of "auto"."""
        return "mixed" if self.children == "auto" else self.children

    @property
    def judge(self) -> str:
        """How the tree is verified, the default in place of "auto"."""
        return CHILDREN[self.kind][0] if self.verifier == "auto" else self.verifier

    def branches(self, batch: int) -> "Branches":
        """Returns the shape of the trees of `batch` rows."""
        parents = np.array((-1, *self.parents), np.int32)
        return Branches(
            *(jnp.broadcast_to(x, (batch, *x.shape)) for x in (parents, self.ranks, self.depths, self.lines))
        )


def check_kinds(children: str, verifier: str, allowed: Sequence[str] = tuple(CHILDREN)) -> None:
    """Checks a way to choose children, one of `allowed` or "auto", and a verifier of trees with
    such children.

    Raises:
      ValueError: another name, or a pair under which the output law would not be the target's.
    """
    if children not in (*allowed, "auto"):
        raise ValueError(f"children: got {children!r}, expected 'auto', {', '.join(map(repr, allowed))}")
    exact = [*CHILDREN["mixed" if children == "auto" else children], *LOSSY_TREES]
    if verifier in ("auto", *exact):
        return
    known = {name for names in CHILDREN.values() for name in names}
    why = f", under which the output law is the target's for children {children!r}" if verifier in known else ""
    raise ValueError(f"verifier: got {verifier!r}, expected 'auto', {', '.join(map(repr, exact))}{why}")


def _parents(ranks: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns the parents of nodes that are given by the ranks on the way to them, in order of
    priority."""
    share = lambda node: -np.prod([_RANK_SHARES[min(rank, len(_RANK_SHARES) - 1)] for rank in node])
    ordered = sorted(ranks, key=lambda node: (share(node), len(node), node))
    numbers = {node: number for number, node in enumerate(ordered)}
    return [numbers[node[:-1]] for node in ordered[1:]]


class Branches(NamedTuple):
    """The shape of the tree of each of B rows.

    Attributes:
      parents: number of each node's parent; −1 for node 0.
      ranks: place of each node among its siblings, in the order in which they were chosen.
      depths: number of drafted tokens up to each node.
      lines: the ancestors of each node by depth, then itself, then anything; D + 1 depths.
    """

    parents: Int[Array, "B N"]
    ranks: Int[Array, "B N"]
    depths: Int[Array, "B N"]
    lines: Int[Array, "B N D"]


class TreeDraft(NamedTuple):
    """The tree that a drafter proposes, and how it came to its tokens.

    Attributes:
      tokens: the token of each node; node 0 has the last committed one.
      branches: the shape.
      live: False for nodes that are not there, whose descendants are not there either: those past
        a budget or a row's limit, after an EOS, or where no id was left to choose. The shape and
        `live` must not depend on draws of later nodes. Node 0 is live unless the row is done.
      law: the laws that the tokens were chosen from, J of them; None where the verifier reads none.
      origins: number of the law that each node's token was chosen from; siblings by one drafter
        have the same. Anything for node 0.
      calls: calls of the drafter's model in which the row took part.
      slots: the place in the drafter's own cache of each node, counted from node 0's; anything for
        nodes that were not fed. None if the drafter has no cache.
      failed: True for nodes whose law contained NaN, so that they are not live.
      target_cache: the target's cache, if the drafter has written to it. It may write only to slots
        that the target's call overwrites.
    """

    tokens: Int[Array, "B N"]
    branches: Branches
    live: Bool[Array, "B N"]
    law: Law | None
    origins: Int[Array, "B N"]
    calls: Int[Array, " B"]
    failed: Bool[Array, "B N"]
    slots: Int[Array, "B N"] | None = None
    target_cache: Any = None

    @property
    def num_drafted(self) -> Int[Array, " B"]:
        """How many drafted tokens each row's tree has."""
        return jnp.sum(self.live[:, 1:].astype(jnp.int32), axis=1)
