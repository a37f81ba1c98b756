"""What policies of γ look back at: a draft's distributions, and an iteration's outcome."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class DraftSignals(NamedTuple):
    """The numbers that policies read of a draft's distributions.

    They are arbitrary at positions that were not drafted.

    The distributions q are those drawn from, after processors, temperature and filters. A row at
    temperature 0, where they would be one-hot, gives the numbers at temperature 1. Of a tree they
    are by number of the node, from node 1 on.

    Attributes:
      prob: q(x) of the drafted tokens; in a tree the product of it along a node's path.
      entropy: H(q) in nats.
      evenness: H(q) / log V; 1 for a uniform distribution.
    """

    prob: Float[Array, "B G"]
    entropy: Float[Array, "B G"]
    evenness: Float[Array, "B G"]


class NodeOutcomes(NamedTuple):
    """What an iteration showed of the N nodes of a tree.

    Attributes:
      depths: of the nodes that were drafted; 0 for the others, and for node 0.
      ranks: places of the nodes among their siblings.
      examined: whether the parent is accepted and no earlier sibling is.
      accepted: whether the node is accepted.
    """

    depths: Int[Array, "B N"]
    ranks: Int[Array, "B N"]
    examined: Bool[Array, "B N"]
    accepted: Bool[Array, "B N"]


class Outcome(NamedTuple):
    """The outcome of an iteration.

    Attributes:
      drafted, accepted: how many tokens were drafted, and how many of them were accepted. Of a
        tree: at how many depths of its path children were verified, and at how many one was
        accepted; they are equal if the path ends at a leaf.
      seen: what was read of the distributions.
      node_outcomes: of a tree, its nodes.
    """

    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    seen: DraftSignals | None
    node_outcomes: NodeOutcomes | None = None
