"""What drafters and verifiers of trees exchange: the shape of each row's tree, and a draft."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.policy import DraftSignals


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
      tokens: the token of each node; node 0 has the last committed one. −1 where no id was left to
        choose; for a first child that means that the distribution contained NaN.
      branches: the shape.
      valid: False for nodes that are not there, whose descendants are not there either: those past
        a budget or a row's limit, after an EOS, or where no id was left to choose. The shape and
        `valid` must not depend on draws of later nodes. Node 0 is valid unless the row is done.
      dist: the distributions that the tokens were chosen from, J of them; None where the verifier
        reads none.
      origins: number of the distribution that each node's token was chosen from; siblings by one
        drafter have the same. Anything for node 0.
      calls: calls of the drafter's model in which the row took part.
      slots: the place in the drafter's own cache of each node, counted from node 0's; anything for
        nodes that were not fed. None if the drafter has no cache.
      log_q: log-probability of each node's token under the drafter's distribution after its parent,
        at temperature 0 taken as at 1; None where the drafter provides no probabilities. Only a
        trace reads it: in the decode loop it is not computed.
      target_cache: the target's cache, if the drafter has written to it. It may write only to slots
        that the target's call overwrites.
      seen: what a policy of γ reads of the distributions, if there is one that does.
    """

    tokens: Int[Array, "B N"]
    branches: Branches
    valid: Bool[Array, "B N"]
    dist: Categorical | None
    origins: Int[Array, "B N"]
    calls: Int[Array, " B"]
    slots: Int[Array, "B N"] | None = None
    log_q: Float[Array, "B N"] | None = None
    target_cache: Any = None
    seen: DraftSignals | None = None

    @property
    def failed(self) -> Bool[Array, "B N"]:
        """True for nodes whose distribution contained NaN."""
        return (self.branches.ranks == 0) & (self.tokens < 0)

    @property
    def num_drafted(self) -> Int[Array, " B"]:
        """How many drafted tokens each row's tree has."""
        return jnp.sum(self.valid[:, 1:].astype(jnp.int32), axis=1)
