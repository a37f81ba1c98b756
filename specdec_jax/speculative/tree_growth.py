"""Chooses children, and which nodes of a tree are expanded and kept by a drafter's distribution.

The latter is EAGLE-2 (Li et al. 2024, arXiv 2406.16858). Drafted nodes are numbered level by level:
0 the last committed token, then its W children, then at each further level the children of the
first node that was expanded, of the second, and so on. A node's score is the logarithm of the
product of the drafter's probabilities of the tokens on the way to it; −inf marks a node that is not
there, whose descendants are not there either.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specdec_jax.speculative import distributions
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.randomness import draw
from specdec_jax.speculative.tree_draft import Branches
from specdec_jax.speculative.trees import DynamicTree


def choose_children(
    kind: str,
    dist: Categorical,
    counts: Sequence[int],
    random_bits: UInt32[Array, "B J K 2"] | None = None,
    noise: Float[Array, "B J V"] | None = None,
) -> Int[Array, "B J K"]:
    """Returns the tokens of the children of J nodes, K = max(counts) for each.

    They are −1 past a node's own count, where no id of positive probability is left, and where the
    distribution contains NaN.

    Args:
      kind: how children are chosen, a key of `trees.CHILDREN`.
      dist: the distribution over `[B, J, V]` of the token after each node.
      counts: the number of children of each node, static.
      random_bits: random bits of each child; not needed where none is drawn ("top", "gumbel").
      noise: standard Gumbel noise of the absolute position after each node, for "gumbel" alone.
    """
    batch, nodes, size = dist.logits.shape
    most, last = max(counts), np.asarray(counts)[:, None] - 1
    rank = np.arange(most)
    inside = rank <= last
    if kind in ("gumbel", "top"):
        scores = dist.logits + noise if kind == "gumbel" else dist.logits
        return jnp.where(inside, _find_greatest(scores, most), -1)
    assert random_bits is not None
    weights, ids = dist.probs().reshape(-1, size), jnp.arange(size)

    def without(weights: jax.Array, token: jax.Array):
        return jnp.where(ids == token[:, None], 0, weights)

    if kind == "mixed":
        fixed, missing = _find_greatest(dist.logits, most - 1), ((0, 0), (0, 0), (0, 1))
        fixed = jnp.where(rank < last, jnp.pad(fixed, missing, constant_values=-1), -1)
        for place in range(most - 1):
            weights = without(weights, fixed[..., place].reshape(-1))
        bits = jnp.take_along_axis(random_bits, last[None, ..., None], axis=2)
        drawn = draw(weights, bits.reshape(-1, 2)).reshape(batch, nodes, 1)
        return jnp.where(rank == last, drawn, fixed)

    def draw_one(weights: jax.Array, random: jax.Array):
        token = draw(weights, random)
        return without(weights, token) if kind == "drawn" else weights, token

    bits = jnp.moveaxis(random_bits, 2, 0).reshape(most, -1, 2)
    tokens = jax.lax.scan(draw_one, weights, bits)[1]
    return jnp.where(inside, jnp.moveaxis(tokens, 0, -1).reshape(batch, nodes, most), -1)


def _find_greatest(scores: Float[Array, "B J V"], count: int) -> Int[Array, "B J {count}"]:
    """Returns the ids of the greatest scores, descending and of equals the first.

    They are −1 for scores of −inf, where there are fewer ids, and where a score is NaN.
    """
    if count == 1:  # not by selection, which takes more time
        return distributions.argmax(scores)[..., None]
    values, ids = jax.lax.top_k(scores, min(count, scores.shape[-1]))
    # NaN counts as the greatest. A slice of `values` would make XLA sort all scores.
    sound = (values > -jnp.inf) & ~jnp.any(jnp.isnan(values), axis=-1, keepdims=True)
    missing = ((0, 0), (0, 0), (0, count - ids.shape[-1]))
    return jnp.pad(jnp.where(sound, ids, -1), missing, constant_values=-1)


def choose_to_expand(tree: DynamicTree, scores: Float[Array, "B J"]) -> Int[Array, "B W"]:
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
      places: `choose_to_expand` of them.
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
    # Up from each node: itself first, then its parent, and so on.
    for depth in range(tree.depth, -1, -1):
        at_depth = jnp.take_along_axis(depths, place, axis=1) == depth
        lines.append(jnp.where(at_depth, place, 0))
        place = jnp.where(at_depth & (place > 0), jnp.take_along_axis(new, place, axis=1), place)
    return kept, Branches(new, ranks, depths, jnp.stack(lines[::-1], axis=-1))
