"""The key/value cache of one attention layer: of fixed shape, its slots overwritten at each row's
own position.

Slot `s` of a row holds the key and value of the token at position `s`. A row is rewound by lowering
its length; the slots past it are then stale. Readers mask the scores of stale slots, but a weight
of 0 times NaN would be NaN. So every write sets stale values to 0 on a CPU. On an accelerator,
which would read and write the whole cache for that, no value is NaN in the first place: see
`append`.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Shaped

from specdec_jax.backends.axes import PerRow
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.sharding import ShardingRules

# On a TPU one dynamic_update_slice per row is the fastest write, since a batched one becomes a
# scatter; above this many rows it takes longer to compile than it saves. On a CPU every such write
# but the first copies the whole cache.
MAX_UNROLLED_ROWS = 32
# Up to so many slots are moved one by one on a TPU.
MAX_MOVED = 64
# A TPU stores the last two axes of an array in tiles of 16 × 128 bfloat16 numbers, the last ones
# padded.
TILE = (16, 128)
ROWS = 8  # the tokens of a call fill such tiles of so many rows, in pairs where they are bfloat16

_AXES = ("batch", "heads", "length", "kv")


@flax.struct.dataclass
class KVCache:
    """Keys and values of one layer.

    The loop must update both in place. XLA on a CPU repeats a write inside whatever reshapes its
    result, and then has to copy the whole cache. Therefore there is no batch axis where B = 1,
    which a product would have to merge with another, and stale values are cleared when writing
    rather than when reading.

    Attributes:
      key, value: S slots of K features for each of H heads; without the axis B where B = 1. On a
        TPU as many heads lie side by side as fill a tile, say P: H is then the number of heads / P,
        and K is P times a head's features.
      rules: how both lie on a mesh; None: on one device.
      heads_per_tile: P, 1 on other accelerators; None on a CPU.
      tile_queries: whether calls over more tokens than a tile has rows fill whole tiles, as a TPU's
        do.
    """

    key: Float[Array, "*B H S K"]
    value: Float[Array, "*B H S K"]
    rules: ShardingRules | None = flax.struct.field(pytree_node=False, default=None)
    heads_per_tile: int | None = flax.struct.field(pytree_node=False, default=None)
    tile_queries: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        slots: int,
        features: int,
        dtype,
        heads_per_tile: int | None = None,
    ) -> "KVCache":
        """Makes a cache of zeros, on an accelerator of at least `slots` slots: its tiles are full.

        For a single row there are more, by which a call of `Network.decode` may be wider than was
        asked for.
        """
        more = ROWS - 1 if batch == 1 and heads_per_tile is not None else 0
        side_by_side, slots = heads_per_tile or 1, _whole_tiles(slots + more, heads_per_tile)
        rows = (batch,) if batch > 1 else ()
        shape = (*rows, heads // side_by_side, slots, side_by_side * features)
        return cls(
            key=jnp.zeros(shape, dtype),
            value=jnp.zeros(shape, dtype),
            heads_per_tile=heads_per_tile,
        )

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.key.shape[0] if self.key.ndim == 4 else 1

    @property
    def slots(self) -> int:
        return self.key.shape[-2]

    def filling(self, count: int) -> int:
        """Returns how many tokens a call over `count` tokens a row computes besides, for nothing.

        Otherwise a TPU's compiler changes layouts in every layer. Several rows fill tiles only if
        that is at most a seventh more.
        """
        padding = -count % ROWS if count > ROWS and self.tile_queries else 0
        return padding if self.batch == 1 or 7 * padding <= count else 0

    def repeated(self, copies: int) -> "KVCache":
        """Returns the cache with `copies` rows side by side for each row."""

        def repeat(x):
            return jnp.repeat(x if x.ndim == 4 else x[None], copies, axis=0)

        return self.replace(key=repeat(self.key), value=repeat(self.value))

    def append(
        self, key: Float[Array, "B H T K"], value: Float[Array, "B H T K"], positions: PerRow
    ) -> "KVCache":
        """Overwrites slots `positions[b] … positions[b] + T − 1` of every row.

        On a CPU the values past them are set to 0. On an accelerator a value that is not finite is
        stored as 0, and the same feature of its key as NaN: who sees the token gets NaN, and nobody
        else does.

        Args:
          positions: the first slot written in each row. `positions[b] + T` must not exceed S, since
            XLA clamps the start of a slice and would overwrite live slots instead. The decode loop
            chooses S accordingly.
        """
        write = self._write
        if self.heads_per_tile is not None:
            finite = jnp.isfinite(value)
            key, value = jnp.where(finite, key, jnp.nan), jnp.where(finite, value, 0)
            if key.shape[0] > 1 and self.rules is None:
                key, value = (
                    jax.lax.platform_dependent(x, tpu=_row_by_row, default=lambda x: x)
                    for x in (key, value)
                )
            return self.replace(
                key=write(self.key, key, positions), value=write(self.value, value, positions)
            )
        valid = jnp.arange(self.slots) < positions[:, None] + key.shape[2]
        valid = valid[:, None, :, None] if self.value.ndim == 4 else valid[:, :, None]
        value = jnp.where(valid, write(self.value, value, positions), 0)
        return self.replace(key=write(self.key, key, positions), value=value)

    def append_nodes(self, key: jax.Array, value: jax.Array, starts: jax.Array) -> "KVCache":
        """Does what `append` does, for nodes of trees, from slots `starts[b]` on.

        On a CPU too values that are not finite are set to 0: a query that does not see a node
        multiplies its value by 0, and must not get NaN from a node that may never become a token.
        The node's own logits are NaN all the same, by way of its hidden state.
        """
        if self.heads_per_tile is not None:
            return self.append(key, value, starts)
        return self.append(key, jnp.where(jnp.isfinite(value), value, 0), starts)

    def move(self, sources: jax.Array, starts: jax.Array, native: bool = False) -> "KVCache":
        """Copies the slots `sources [B, M]` of every row to the slots from `starts [B]` on.

        With `native` by the CPU's own kernel, since XLA on a CPU copies the whole cache to do so.
        """
        if native:
            key, value = packed_weights.move(self.key, self.value, sources, starts)
            return self.replace(key=key, value=value)
        write, take = self._write, lambda x: _taken(x, sources)
        if self.heads_per_tile is not None and self.rules is None and sources.size <= MAX_MOVED:

            def take(x):
                return jax.lax.platform_dependent(x, sources, tpu=_taken_one_by_one, default=_taken)

        key, value = take(self.key), take(self.value)
        return self.replace(
            key=write(self.key, key, starts), value=write(self.value, value, starts)
        )

    def widen(self, slots: int) -> "KVCache":
        """Makes room for S = `slots` slots in all, on an accelerator for at least so many."""
        more = max(
            _whole_tiles(slots, self.heads_per_tile) - self.slots, 0
        )  # `empty` may have made more than that
        widths = [(0, 0)] * (self.key.ndim - 2) + [(0, more), (0, 0)]
        return self.replace(key=jnp.pad(self.key, widths), value=jnp.pad(self.value, widths))

    @property
    def _write(self) -> Callable:
        if self.rules is None:
            return _write_rows
        # Every device writes its own rows and heads; left to the compiler, all rows of a sharded
        # axis would first be gathered.
        whole, rows = _AXES[-self.key.ndim :], ("batch",) if self.key.ndim == 4 else (None,)
        return self.rules.locally(_write_rows, (whole, (*rows, *_AXES[1:]), rows), whole)

    def constrain_sharding(self) -> "KVCache":
        """Returns the cache with its layout on the mesh fixed; under jit."""
        if self.rules is None:
            return self

        def pin(x):
            return self.rules.constrain(x, *_AXES[-x.ndim :])

        return self.replace(key=pin(self.key), value=pin(self.value))


def padded(x: Shaped[Array, "..."], axis: int, padding: int) -> Shaped[Array, "..."]:
    """Returns `x` with `padding` zeros after it along an axis."""
    return (
        x
        if padding == 0
        else jnp.pad(x, [(0, padding * (axis == other)) for other in range(x.ndim)])
    )


def _whole_tiles(slots: int, heads_per_tile: int | None) -> int:
    return slots if heads_per_tile is None else -(-slots // TILE[0]) * TILE[0]


def _row_by_row(new: Float[Array, "B H T K"]) -> Float[Array, "B H T K"]:
    """Returns new keys or values with the layout of the cache, in which each row is written by
    itself: else a TPU's compiler copies every single row of them to that layout."""
    return with_layout_constraint(new, Layout((0, 1, 2, 3)))


def spread(query: Float[Array, "B G T K"], heads_per_tile: int) -> Float[Array, "B G R K"]:
    """Returns each query once for every head of its P = `heads_per_tile`, with 0 at the features of
    the others."""
    if heads_per_tile == 1:
        return query
    apart = jnp.where(_own(heads_per_tile, query.shape[-1]), query[:, :, None], 0)
    return apart.reshape(*query.shape[:2], -1, query.shape[-1])


def gather(output: Float[Array, "*B G R K"], heads_per_tile: int) -> Float[Array, "*B G T K"]:
    """Returns, for each query of `spread`, every head's own features of the head's output."""
    if heads_per_tile == 1:
        return output
    *outer, rows, features = output.shape
    output = output.reshape(*outer, heads_per_tile, rows // heads_per_tile, features)
    return jnp.sum(jnp.where(_own(heads_per_tile, features), output, 0), axis=-3)


def _own(heads_per_tile: int, features: int) -> Bool[Array, "P 1 K"]:
    """Returns for each of P heads side by side which of all their features are its own."""
    return (
        jnp.arange(features) // (features // heads_per_tile) == jnp.arange(heads_per_tile)[:, None]
    )[:, None]


def _taken(buffer: Float[Array, "*B H S K"], sources: Int[Array, "B M"]) -> Float[Array, "B H M K"]:
    buffer = buffer if buffer.ndim == 4 else buffer[None]
    return jnp.take_along_axis(buffer, sources[:, None, :, None], axis=2)


def _taken_one_by_one(
    buffer: Float[Array, "*B H S K"], sources: Int[Array, "B M"]
) -> Float[Array, "B H M K"]:
    """Does what `_taken` does, slot by slot: for one gather a TPU's compiler lays out the caches by
    slots, for which it copies all of them before a loop and after it."""
    buffer = buffer if buffer.ndim == 4 else buffer[None]
    (batch, heads, _, features), moved = buffer.shape, sources.shape[1]

    def slot(row, m):
        return jax.lax.dynamic_slice(buffer, (row, 0, sources[row, m], 0), (1, heads, 1, features))

    rows = [jnp.concatenate([slot(row, m) for m in range(moved)], axis=2) for row in range(batch)]
    return jnp.concatenate(rows)


def _write_rows(
    buffer: Float[Array, "*B H S K"], update: Float[Array, "B H T K"], positions: PerRow
) -> Float[Array, "*B H S K"]:
    update = update.astype(buffer.dtype)
    if buffer.ndim == 3:
        return jax.lax.dynamic_update_slice(buffer, update[0], (0, positions[0], 0))
    if buffer.shape[0] > MAX_UNROLLED_ROWS:
        return _write_together(buffer, update, positions)
    return jax.lax.platform_dependent(
        buffer, update, positions, cpu=_write_together, default=_write_one_by_one
    )


def _write_together(
    buffer: Float[Array, "B H S K"], update: Float[Array, "B H T K"], positions: PerRow
) -> Float[Array, "B H S K"]:
    def write(row, new, start):
        return jax.lax.dynamic_update_slice(row, new, (0, start, 0))

    return jax.vmap(write)(buffer, update, positions)


def _write_one_by_one(
    buffer: Float[Array, "B H S K"], update: Float[Array, "B H T K"], positions: PerRow
) -> Float[Array, "B H S K"]:
    for row in range(buffer.shape[0]):
        buffer = jax.lax.dynamic_update_slice(
            buffer, update[row : row + 1], (row, 0, positions[row], 0)
        )
    return buffer
