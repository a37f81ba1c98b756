"""Trees that two drafters draft together (Miao et al. 2023, "SpecInfer", arXiv 2305.09781)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.drafters.cascade import DrafterPair, PairState, any_part_property
from specdec_jax.drafters.drafting import fold_part_keys
from specdec_jax.files.reading import mismatch_error
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.drafter import TreeDrafter
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.trees import CHILDREN, Tree

# Those under which siblings may come from different distributions.
_KINDS = {kind: CHILDREN[kind] for kind in ("drawn", "iid", "top", "gumbel")}
_KINDS["iid"] = tuple(rule for rule in CHILDREN["iid"] if rule != "kseq")


@jax.tree_util.register_pytree_node_class
class MergedDrafter(DrafterPair, TreeDrafter):
    """Two drafters, each of which drafts a tree of its own; the target scores both in one call.

    The drafters take turns at the children of node 0: the first child and all nodes below it belong
    to the first drafter, the second to the second, the third to the first again. Each child is
    verified against the distribution of the drafter that it comes from. A `Tree` with at least two
    children of node 0 is needed, since the second drafter would draft nothing of a chain.

    Merging is for drafters that complement each other: both draft at the same time, whereas in a
    cascade one continues where the other stopped.
    """

    kinds: ClassVar[Any] = property(
        lambda self: {
            kind: rules
            for kind, rules in _KINDS.items()
            if all(kind in part.kinds for part in self.parts)
        }
    )

    reads_nodes: ClassVar[Any] = any_part_property("reads_nodes")

    def __init__(self, first: TreeDrafter, second: TreeDrafter):
        """Merges two drafters of trees.

        Args:
          first, second: drafters that draft trees; they may be merged ones themselves.

        Raises:
          ValueError: something else.
        """
        for name, part in (("first", first), ("second", second)):
            if not isinstance(part, TreeDrafter):
                raise ValueError(f"{name}: got {part!r}, expected a drafter that drafts trees")
            if part.tree is not None:
                raise ValueError(f"{name}: got {part!r}, expected one that drafts any tree")
        self.parts = first, second

    @property
    def name(self) -> str:
        first, second = self.parts
        return f"{first.name} beside {second.name}"

    def check_tree(self, tree: Any) -> None:
        children, least = np.sum(np.asarray(tree.parents) == 0), _count_children(self)
        if children < least:
            expected = f"one with at least {least} children of node 0"
            raise mismatch_error(f"tree: for {_count_drafters(self)} drafters", tree, expected)

    def init_tree(self, *given: Any, **encoded: jax.Array) -> PairState:
        return self.begin("init_tree", *given, **encoded)

    def draft_tree(
        self,
        draft_state: PairState,
        state: DecodeState,
        num_wanted: jax.Array,
        max_depth: jax.Array,
    ):
        config, tree = state.config, state.config.tree
        assert isinstance(tree, Tree)
        # Of a path by one drafter the other has been fed nothing.
        lag = max(config.lag, config.gamma + 1)
        states, drafts, cache = [], [], state.target_cache
        for part, own, numbers, keys in zip(
            self.parts,
            draft_state,
            _deal_nodes(tree),
            (state.keys, _fold_keys(state, self.parts[0])),
            strict=True,
        ):
            parents = np.searchsorted(numbers, np.asarray(tree.parents)[numbers[1:] - 1])
            subtree = Tree(parents, tree.kind, tree.verify)
            inside = config._replace(tree=subtree, gamma=subtree.depth, lag=lag)
            view = dataclasses.replace(state, config=inside, keys=keys, target_cache=cache)
            wanted = jnp.sum(numbers[1:] <= num_wanted[:, None], axis=1, dtype=jnp.int32)
            own, draft = part.draft_tree(own, view, wanted, max_depth)
            cache = cache if draft.target_cache is None else draft.target_cache
            states.append(own)
            drafts.append(draft)
        return PairState(*states), _merge_trees(tree, drafts, cache)


def _fold_keys(state: DecodeState, first: Any) -> jax.Array:
    """Returns the second drafter's keys, with which nothing in `first` draws.

    They are folded once for each drafter in `first`, which may be a merged one.
    """
    for _ in range(_count_drafters(first)):
        state = dataclasses.replace(state, keys=fold_part_keys(state))
    return state.keys


def _count_drafters(part: Any) -> int:
    return sum(map(_count_drafters, part.parts)) if isinstance(part, MergedDrafter) else 1


def _count_children(part: Any) -> int:
    """Returns how many children of node 0 a part needs, so that each drafter in it has one."""
    if not isinstance(part, MergedDrafter):
        return 1
    first, second = map(_count_children, part.parts)
    return max(2 * first - 1, 2 * second)


def _deal_nodes(tree: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the nodes of each drafter's tree, node 0 among both."""
    owners = tree.ranks[tree.lines[:, 1]] % 2
    first, second = (
        np.concatenate([[0], 1 + np.flatnonzero(owners[1:] == owner)]) for owner in range(2)
    )
    return first, second


def _merge_trees(tree: Tree, drafts: list[TreeDraft], target_cache: Any) -> TreeDraft:
    """Returns the tree whose nodes were dealt out, drafted by two drafters."""
    first, second = drafts
    # The place of each node among the first drafter's nodes, followed by the second's.
    places = np.argsort(np.concatenate(_deal_nodes(tree)), kind="stable")
    places = np.delete(places, 1)  # node 0 is among both

    def put(*both: jax.Array):
        return jnp.concatenate(both, axis=1)[:, places]

    dist, origins, log_q = None, second.origins, None
    if first.dist is not None and second.dist is not None:
        pairs = zip(first.dist, second.dist)
        dist = Categorical(*(jnp.concatenate(pair, axis=1) for pair in pairs))
        origins = origins + first.dist.logits.shape[1]
    if first.log_q is not None and second.log_q is not None:
        log_q = put(first.log_q, second.log_q)
    return TreeDraft(
        tokens=put(first.tokens, second.tokens),
        branches=tree.branches(len(first.tokens)),
        valid=put(first.valid, second.valid),
        dist=dist,
        origins=put(first.origins, origins),
        calls=first.calls + second.calls,
        log_q=log_q,
        target_cache=target_cache,
    )
