"""T5's relative position bias: a learned number for each head and bucket of distances."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from specdec_jax.backends.axes import PerRow
from specdec_jax.backends.kv_cache import MAX_UNROLLED_ROWS, TILE, pad
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.models.layers import drawn

SHIFTS = 8  # query positions whose bias one slice of shifted rows gives


class RelativePositionBias(nn.Module):
    """T5's bucketed relative position bias, added to scores; one table of a stack or a layer."""

    heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool

    def setup(self):
        init = drawn(nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"))
        self.rel_embedding = self.param("rel_embedding", init, (self.heads, self.num_buckets))

    def __call__(self, queries: int, keys: int) -> Float32[Array, "{queries} H {keys}"]:
        """Returns the bias for query positions 0 … queries − 1 and key positions 0 … keys − 1."""
        return self._at(np.arange(keys)[None, :] - np.arange(queries)[:, None]).transpose(1, 0, 2)

    def by_distance(self, positions: int) -> Float32[Array, "H Z"]:
        """Returns the bias of each distance, from 1 − `positions` to `positions` − 1."""
        return self._at(np.arange(1 - positions, positions))

    def last_query_bias(self, positions: int) -> Float32[Array, "H {positions}"]:
        """Returns the bias of the last of so many query positions, and so of every distance.

        `gather_biases` takes it, and so do the CPU's kernels.
        """
        return self._at(np.arange(positions) - (positions - 1))

    def shifted(self, slots: int) -> Float32[Array, "shifts H W"]:
        """Returns the bias of S = `slots` keys for any query position, which `slice_biases` takes.

        A bias depends on distance only, so that W ≥ 2·S − 1 columns have all of them: column c of
        row t is for the key S − 1 + t − c positions before its query.
        """
        width = -(-(2 * slots - 1) // TILE[1]) * TILE[1]
        columns = np.arange(width)[None, :] - (slots - 1) - np.arange(SHIFTS)[:, None]
        return self._at(columns).transpose(1, 0, 2)

    def _at(self, distances: Int[np.ndarray, "*N"]) -> Float32[Array, "H ..."]:
        """Returns the bias of each distance, which is key position − query position."""
        buckets = relative_position_bucket(
            distances, self.bidirectional, self.num_buckets, self.max_distance
        )
        return jnp.take(self.rel_embedding.astype(jnp.float32), buckets, axis=1)


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


def gather_biases(
    bias: Float32[Array, "H P"], distances: Int[Array, "B T S"]
) -> Float32[Array, "B H T S"]:
    """Returns the bias of keys that lie `distances` positions before their queries.

    Args:
      bias: the bias of the last of P query positions: the key at distance d has column P − 1 − d.
      distances: as from `Nodes.distances`; those below 0 count as 0, since their keys are masked.
    """
    return jnp.take(bias, bias.shape[1] - 1 - jnp.maximum(distances, 0), axis=1).transpose(
        1, 0, 2, 3
    )


def make_causal_mask(
    positions: PerRow, queries: int, slots: int
) -> Bool[Array, "B 1 {queries} {slots}"]:
    """Returns the causal mask of `queries` positions from `positions[b]` on, over `slots` slots."""
    query_positions = positions[:, None] + jnp.arange(queries)
    return jnp.arange(slots) <= query_positions[:, None, :, None]


def make_window_mask(
    places: Int[Array, "#B T"], nodes: AnyNodes | None, slots: int, window: int
) -> Bool[Array, "#B 1 T {slots}"]:
    """Returns whether a slot's token lies fewer than `window` positions before a query.

    Slots that a causal mask hides, or a mask of nodes, may be True.

    Args:
      places: positions of the queries.
      nodes: where the tokens lie if they are nodes of trees, whose slots are not their positions.
      slots: S, slots of the cache.
      window: number of positions.
    """
    if nodes is not None:
        return nodes.distances(slots)[:, None] < window
    return jnp.arange(slots) > places[:, None, :, None] - window


def slice_biases(
    positions: PerRow, queries: int, shifted: Float[Array, "shifts H W"], slots: int
) -> Float[Array, "B H {queries} {slots}"]:
    """Returns the bias of `queries` positions from `positions[b]` on, over `slots` slots.

    `shifted` as from `RelativePositionBias.shifted(slots)`.

    On an accelerator slices take less time than rows of `[S, H, S]`, whose layout a TPU's compiler
    changes in every iteration, and less memory: with 64 heads and 2,064 slots that is 1.1 GB.
    """

    def take(first: jax.Array) -> jax.Array:
        starts = range(0, queries, len(shifted))
        parts = [shifted[: queries - start] for start in starts]
        parts = [
            jax.lax.dynamic_slice_in_dim(part, slots - 1 - (first + start), slots, axis=2)
            for part, start in zip(parts, starts)
        ]
        return jnp.concatenate(parts)

    if len(positions) > MAX_UNROLLED_ROWS:
        bias = jax.vmap(take)(positions)
    else:
        bias = jnp.stack([take(positions[row]) for row in range(len(positions))])
    return bias.transpose(0, 2, 1, 3)


def make_mask_and_biases(
    biases: Sequence[Array],
    positions: PerRow | None,
    queries: int,
    slots: int,
    nodes: AnyNodes | None,
    padding: int = 0,
) -> tuple[Bool[Array, "B 1 T {slots}"], list[Float[Array, "B H T {slots}"]]]:
    """Returns the mask and the biases of a call over `queries` tokens a row, and of T in all.

    Args:
      biases: for nodes as for `gather_biases`, else as for `slice_biases`.
      positions: `[B]`, the first position of each row; None for nodes.
      queries: number of tokens a row.
      slots: S, slots of the cache.
      nodes: where the tokens lie if they are nodes of trees.
      padding: number of tokens after them that see nothing.
    """
    if nodes is not None:
        distances = nodes.distances(slots)
        mask, found = distances[:, None] >= 0, [gather_biases(bias, distances) for bias in biases]
    else:
        assert positions is not None, "a call over the next tokens of sequences"
        mask = make_causal_mask(positions, queries, slots)
        found = [slice_biases(positions, queries, bias, slots) for bias in biases]
    return pad(mask, 2, padding), [pad(bias, 2, padding) for bias in found]
