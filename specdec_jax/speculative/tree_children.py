"""Chooses the children of a tree's nodes from the drafter's distributions."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specdec_jax.speculative import distributions
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.randomness import draw


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
    if kind == "gumbel":
        return jnp.where(inside, _greatest(dist.logits + noise, most), -1)
    if kind == "top":
        return jnp.where(inside, _greatest(dist.logits, most), -1)
    assert random_bits is not None
    weights, ids = dist.probs().reshape(-1, size), jnp.arange(size)

    def without(weights: jax.Array, token: jax.Array):
        return jnp.where(ids == token[:, None], 0, weights)

    if kind == "mixed":
        fixed = jnp.pad(
            _greatest(dist.logits, most - 1), ((0, 0), (0, 0), (0, 1)), constant_values=-1
        )
        fixed = jnp.where(rank < last, fixed, -1)
        for place in range(most - 1):
            weights = without(weights, fixed[..., place].reshape(-1))
        drawn = draw(
            weights, jnp.take_along_axis(random_bits, last[None, ..., None], axis=2).reshape(-1, 2)
        )
        return jnp.where(rank == last, drawn.reshape(batch, nodes, 1), fixed)

    def one(weights: jax.Array, random: jax.Array):
        token = draw(weights, random)
        return without(weights, token) if kind == "drawn" else weights, token

    tokens = jax.lax.scan(one, weights, jnp.moveaxis(random_bits, 2, 0).reshape(most, -1, 2))[1]
    return jnp.where(inside, jnp.moveaxis(tokens, 0, -1).reshape(batch, nodes, most), -1)


def _greatest(scores: Float[Array, "B J V"], count: int) -> Int[Array, "B J {count}"]:
    """Returns the ids of the greatest scores, descending and of equals the first.

    They are −1 for scores of −inf, where there are fewer ids, and where a score is NaN.
    """
    if count == 1:  # not by selection, which takes more time
        return distributions.argmax(scores)[..., None]
    found, ids = jax.lax.top_k(scores, min(count, scores.shape[-1]))
    # NaN counts as the greatest. A slice of `found` would make XLA sort all scores.
    sound = (found > -jnp.inf) & ~jnp.any(jnp.isnan(found), axis=-1, keepdims=True)
    missing = ((0, 0), (0, 0), (0, count - ids.shape[-1]))
    return jnp.pad(jnp.where(sound, ids, -1), missing, constant_values=-1)
