"""The policy of γ that weighs each node of a token tree against its time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.speculative.policies import CostAware, CostAwareState
from specdec_jax.speculative.policy import NodeOutcomes, Outcome, Policy
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.tree_verifiers import TreeVerification
from specdec_jax.speculative.trees import RANK_SHARES, DynamicTree, Tree


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class TreeCostAware(CostAware):
    """`CostAware` for a tree: drafts the n nodes for which E(n) − R · t(n) is greatest.

    E(n) is the expected number of tokens that the first n nodes add. By `Tree.expected` it is the
    sum over these nodes of the product, along a node's path, of the shares of ranks at which a
    child is accepted. They follow from ĉ_r, a moving average of how often the child of rank r
    is accepted where no earlier sibling is: the share of rank r is ĉ_r · Π_{s<r} (1 − ĉ_s). In each
    ĉ_r the rate assumed at first counts as `weight` observations: for first children `acceptance`,
    for others that of `RANK_SHARES`.

    t(n) = c · (depth of the first n nodes) + n · (v − 1) / G is the time that they add, and R, the
    tokens per time, is as for `CostAware`; it begins at the greatest value that these rates
    promise.

    Attributes:
      tree: the shape, of which the nodes 1 … G count; static.
    """

    tree: Tree = Tree((0,))

    def _first_rates(self) -> Float[Array, "B K"]:
        """Returns the rates that are assumed at first."""
        shares = RANK_SHARES[0]
        later = shares[1:] / (1 - np.cumsum(shares[:-1]))
        others = later[np.minimum(np.arange(self.tree.width - 1), len(later) - 1)]
        others = jnp.asarray(others, jnp.float32)
        others = jnp.broadcast_to(others, (len(self.weight), len(others)))
        return jnp.concatenate([self.acceptance[:, None], others], axis=1)

    def _tokens(self, rates: Float[Array, "B K"]) -> Float[Array, "B n"]:
        """Returns E(n) for n = 1 … G."""
        before = jnp.cumprod(1 - rates, axis=1)
        shares = rates * jnp.pad(before[:, :-1], ((0, 0), (1, 0)), constant_values=1)
        nodes, depths = self.tree.lines[1 : self.maximum + 1], np.arange(self.tree.depth + 1)
        inside = (depths > 0) & (depths <= self.tree.depths[1 : self.maximum + 1, None])
        along = jnp.where(inside, shares[:, self.tree.ranks[nodes]], 1)
        return jnp.cumsum(jnp.prod(along, axis=2), axis=1)

    def _time(self) -> Float[Array, "B n"]:
        """Returns t(n) for n = 1 … G."""
        depths = np.maximum.accumulate(self.tree.depths[1 : self.maximum + 1]).astype(np.float32)
        return self._added(depths, np.arange(1, len(depths) + 1, dtype=np.float32))

    def _added(self, depth: Any, nodes: Any) -> Float[Array, "B n"]:
        of_node = (self.verify_cost - 1) / self.maximum
        return self.cost_ratio[:, None] * depth + of_node[:, None] * nodes

    def init(self) -> CostAwareState:
        zeros = jnp.zeros((len(self.weight), self.tree.width), jnp.float32)
        rate = jnp.max((1 + self._tokens(self._first_rates())) / (1 + self._time()), axis=1)
        return CostAwareState(zeros, zeros, rate * self.weight, jnp.asarray(self.weight))

    def wanted(self, state: CostAwareState) -> Int[Array, " B"]:
        weight = self.weight[:, None]
        rates = (state.accepted + weight * self._first_rates()) / (state.examined + weight)
        worth = self._tokens(rates) - (state.tokens / state.time)[:, None] * self._time()
        best = 1 + jnp.argmax(worth, axis=1).astype(jnp.int32)
        return jnp.clip(jnp.where(jnp.max(worth, axis=1) < 0, 0, best), self.minimum, self.maximum)

    def update(self, state: CostAwareState, outcome: Outcome) -> CostAwareState:
        nodes, memory, width = outcome.node_outcomes, self.memory[:, None], self.tree.width
        assert nodes is not None, "the outcome of a tree"
        ranks = jax.nn.one_hot(jnp.minimum(nodes.ranks, width - 1), width)
        examined, accepted = (
            jnp.sum(jnp.where(which[..., None], ranks, 0), axis=1)
            for which in (nodes.examined, nodes.accepted)
        )
        size = jnp.max(nodes.depths, axis=1), jnp.sum(nodes.depths > 0, axis=1)
        added = self._added(*(x[:, None].astype(jnp.float32) for x in size))[:, 0]
        return CostAwareState(
            examined=memory * state.examined + examined,
            accepted=memory * state.accepted + accepted,
            tokens=self.memory * state.tokens + outcome.accepted.astype(jnp.float32) + 1,
            time=self.memory * state.time + 1 + added,
        )


def make_budget(policy: Policy, tree: Tree | DynamicTree) -> Policy:
    """Returns the policy by which the number of nodes of `tree` adapts.

    A `DynamicTree` is taken for that of its size and depth which `RANK_SHARES` make best.
    """
    if type(policy) is not CostAware:  # a user's subclass has its own rule
        return policy
    if isinstance(tree, DynamicTree):
        shape = Tree.best(RANK_SHARES[0, : tree.width].tolist(), tree.nodes, tree.depth)
        assert shape is not None, "without costs a tree is always faster than plain decoding"
        tree = shape
    numbers: dict[str, Any] = {name: getattr(policy, name) for name in policy.numbers()}
    return TreeCostAware(policy.maximum, **numbers, tree=tree)


def find_node_outcomes(draft: TreeDraft, verified: TreeVerification) -> NodeOutcomes:
    """Returns what became of the nodes of `draft`, of which a path is accepted."""
    parents, ranks, depths, _ = draft.branches
    path, accepted = verified.path, verified.num_accepted[:, None]
    numbers, levels = jnp.arange(depths.shape[1]), jnp.arange(path.shape[1])
    on_path = (path[:, None] == numbers[:, None]) & (levels <= accepted)[:, None]
    on_path = jnp.any(on_path, axis=2)
    depths = jnp.where(draft.valid, depths, 0)
    # The rank of the node of the path at a node's depth.
    other = jnp.take_along_axis(ranks, jnp.take_along_axis(path, depths, axis=1), axis=1)
    below = jnp.take_along_axis(on_path, jnp.maximum(parents, 0), axis=1) & (depths > 0)
    examined = below & ((depths > accepted) | (ranks <= other))
    return NodeOutcomes(depths, ranks, examined, on_path & (depths > 0))
