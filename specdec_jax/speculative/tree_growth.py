"""Grows trees whose shape the drafter's distribution decides.

This is EAGLE-2 (Li et al. 2024, arXiv 2406.16858): which nodes are expanded, and which of the
drafted ones are kept.

Drafted nodes are numbered level by level: 0 the last committed token, then its W children, then at
each further level the children of the first node that was expanded, of the second, and so on. A
node's score is the logarithm of the product of the drafter's probabilities of the tokens on the way
to it; −inf marks a node that is not there, whose descendants are not there either.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.speculative.tree_draft import Branches
from specdec_jax.speculative.trees import DynamicTree


def to_expand(tree: DynamicTree, scores: Float[Array, "B J"]) -> Int[Array, "B W"]:
    """Returns the places in a level of the nodes that get children, those of the greatest scores.

    The greatest comes first; of equal ones the earlier.
    """
    return jax.lax.top_k(scores, min(tree.width, scores.shape[1]))[1]


def expand(
    scores: Float[Array, "B J"], places: Int[Array, "B W"], log_probs: Float[Array, "B W K"]
) -> Float[Array, "B W*K"]:
    """Returns the scores of the K children of each node that is expanded.

    Args:
      scores: those of the level above.
      places: `to_expand` of them.
      log_probs: log q of the children's tokens; −inf for children that are not there, and NaN
        counts as −inf.
    """
    above = jnp.take_along_axis(scores, places, axis=1)[..., None]
    # Rounding may leave log q above 0, and no child may score more than its parent.
    log_probs = jnp.where(jnp.isnan(log_probs), -jnp.inf, jnp.minimum(log_probs, 0))
    return (above + log_probs).reshape(len(scores), -1)


def rerank(
    tree: DynamicTree, scores: Float[Array, "B M"], parents: Int[Array, "B M"]
) -> tuple[Int[Array, "B N"], Branches]:
    """Returns the numbers of the N nodes of the greatest scores, descending, and their tree.

    Of equal scores the smaller number is kept, and comes first. So every parent is kept and comes
    before its children, and the order is one of priority. Where fewer than N nodes are there, some
    of the others follow.

    Args:
      tree: the description.
      scores: of all drafted nodes; 0 for node 0.
      parents: the number of each node's parent; anything for node 0.
    """
    _, kept = jax.lax.top_k(scores, tree.size)
    ranks = jnp.asarray([0, *np.arange(tree.drafted) % tree.width], jnp.int32)[kept]
    depths = jnp.asarray(np.repeat(np.arange(tree.depth + 1), tree.levels), jnp.int32)[kept]
    old = jnp.take_along_axis(parents, kept, axis=1)
    new = jnp.argmax(kept[:, None] == old[..., None], axis=-1).at[:, 0].set(-1)
    place, lines = jnp.broadcast_to(jnp.arange(tree.size), kept.shape), []
    for depth in range(
        tree.depth, -1, -1
    ):  # up from each node: itself first, then its parent, and so on
        at_depth = jnp.take_along_axis(depths, place, axis=1) == depth
        lines.append(jnp.where(at_depth, place, 0))
        place = jnp.where(at_depth & (place > 0), jnp.take_along_axis(new, place, axis=1), place)
    return kept, Branches(new, ranks, depths, jnp.stack(lines[::-1], axis=-1))
