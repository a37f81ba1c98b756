"""T5's relative position bias: a learned number for each head and bucket of distances, added to
attention scores."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from specdec_jax.models.axes import PerRow
from specdec_jax.models.cache import MAX_UNROLLED_ROWS


class RelativePositionBias(nn.Module):
    """T5's bucketed relative position bias, from one table `[H, buckets]`, which a stack or a layer
    has."""

    heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool

    @nn.compact
    def __call__(self, queries: int, keys: int) -> Float32[Array, "{queries} H {keys}"]:
        """Returns the bias for query positions 0 … queries − 1 and key positions 0 … keys − 1."""
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        table = self.param("rel_embedding", init, (self.heads, self.num_buckets))
        distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
        buckets = relative_position_bucket(distance, self.bidirectional, self.num_buckets, self.max_distance)
        return jnp.take(table.astype(jnp.float32), buckets, axis=1).transpose(1, 0, 2)


def relative_position_bucket(
    distance: Int[np.ndarray, "*N"], bidirectional: bool, num_buckets: int, max_distance: int
) -> Int[np.ndarray, "*N"]:
    """Returns T5's bucket of each distance, which is key position − query position.

    Small distances have a bucket each; greater ones, up to `max_distance`, have buckets of
    logarithmic width.
    """
    offset = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    # float32 as in T5X: in float64 some distances fall on the other side of a bucket's edge.
    ratio = np.maximum(distance, 1).astype(np.float32) / exact
    log = np.log(ratio + np.finfo(np.float32).eps) / np.log(np.float32(max_distance / exact))
    large = exact + (log * (num_buckets - exact)).astype(np.int32)
    return offset + np.where(distance < exact, distance, np.minimum(large, num_buckets - 1))


def node_biases(bias: Float32[Array, "H P"], distances: Int[Array, "B T S"]) -> Float32[Array, "B H T S"]:
    """Returns the bias of keys that stand `distances` positions before their queries.

    Args:
      bias: the bias of the last of P query positions: the key at distance d has column P − 1 − d.
      distances: as from `Nodes.distances`; those below 0 count as 0, since their keys are masked.
    """
    return jnp.take(bias, bias.shape[1] - 1 - jnp.maximum(distances, 0), axis=1).transpose(1, 0, 2, 3)


def seen_from(positions: PerRow, queries: int, slots: int) -> Bool[Array, "B 1 {queries} {slots}"]:
    """Returns the causal mask of `queries` positions from `positions[b]` on, over `slots` slots."""
    query_positions = positions[:, None] + jnp.arange(queries)
    return jnp.arange(slots) <= query_positions[:, None, :, None]


def biases_from(
    positions: PerRow, queries: int, position_bias: Float[Array, "S H S"]
) -> Float[Array, "B H {queries} S"]:
    """Returns the rows of `position_bias` for `queries` positions from `positions[b]` on."""
    take = lambda start: jax.lax.dynamic_slice_in_dim(position_bias, start, queries, axis=0)
    if len(positions) > MAX_UNROLLED_ROWS:
        bias = jax.vmap(take)(positions)
    else:
        bias = jnp.stack([take(positions[row]) for row in range(len(positions))])
    return bias.transpose(0, 2, 1, 3)
