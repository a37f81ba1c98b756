"""The key/value cache of one attention layer, and how its slots are written and read.

A cache has a fixed shape; each row overwrites slots at its own position. Slot `s` of a row holds
the key and value of the token at position `s`. A row is rewound by lowering its length; the slots
past it are then stale. Readers mask the scores of stale slots, but a weight of 0 times NaN would be
NaN. So `Backend.append`, XLA's on a CPU, sets stale values to 0; the CPU's own kernels never read
them. On an accelerator, which would read and write the whole cache for that, no value is NaN in the
first place: see `AcceleratorBackend.append`.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from specdec_jax.backends.axes import PerRow
from specdec_jax.backends.sharding import ShardingRules

# On a TPU one dynamic_update_slice per row is the fastest write, since a batched one becomes a
# scatter; above this many rows it takes longer to compile than it saves. On a CPU every such write
# but the first copies the whole cache.
MAX_UNROLLED_ROWS = 32
# A TPU stores the last two axes of an array in tiles of 16 × 128 bfloat16 numbers, the last ones
# padded.
TILE = (16, 128)
ROWS = 8  # the tokens of a call fill such tiles of so many rows, in pairs where they are bfloat16

_AXES = ("batch", "heads", "length", "kv")


@flax.struct.dataclass
class KVCache:
    """Keys and values of one layer, in the layout of the `Backend` that made them.

    The loop must update both in place. XLA on a CPU repeats a write inside whatever reshapes its
    result, and then has to copy the whole cache. Therefore there is no batch axis where B = 1,
    which a product would have to merge with another, and stale values are cleared when writing
    rather than when reading.

    Attributes:
      key, value: S slots of K features for each of H heads; without the axis B where B = 1. On a
        TPU as many heads lie side by side as fill a tile, say P: H is then the number of heads / P,
        and K is P times a head's features.
    """

    key: Float[Array, "*B H S K"]
    value: Float[Array, "*B H S K"]

    @classmethod
    def empty(
        cls, batch: int, heads: int, slots: int, features: int, dtype: DTypeLike
    ) -> "KVCache":
        """Makes a cache of zeros."""
        shape = (*([batch] if batch > 1 else []), heads, slots, features)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def batch(self) -> int:
        """B, the number of rows."""
        return self.key.shape[0] if self.key.ndim == 4 else 1

    @property
    def slots(self) -> int:
        """S, the number of slots of a row."""
        return self.key.shape[-2]

    def repeated(self, copies: int) -> "KVCache":
        """Returns the cache with `copies` rows side by side for each row."""
        return jax.tree.map(
            lambda x: jnp.repeat(x if x.ndim == 4 else x[None], copies, axis=0), self
        )

    def widen(self, slots: int) -> "KVCache":
        """Returns the cache with S = `slots` slots, if it has fewer."""
        more = max(slots - self.slots, 0)
        widths = [(0, 0)] * (self.key.ndim - 2) + [(0, more), (0, 0)]
        return jax.tree.map(lambda x: jnp.pad(x, widths), self)

    def constrain(self, rules: ShardingRules) -> "KVCache":
        """Returns the cache with its layout on the mesh fixed; under jit."""
        return jax.tree.map(lambda x: rules.constrain(x, *_AXES[-x.ndim :]), self)


def pad(x: Shaped[Array, "..."], axis: int, padding: int) -> Shaped[Array, "..."]:
    """Returns `x` with `padding` zeros after it along an axis."""
    widths = [(0, padding * (axis == other)) for other in range(x.ndim)]
    return jnp.pad(x, widths) if padding else x


def lay_out_by_rows(new: Float[Array, "B H T K"]) -> Float[Array, "B H T K"]:
    """Returns new keys or values in the layout of the cache, in which each row is written alone.

    Otherwise a TPU's compiler copies every single row of them to that layout.
    """
    return with_layout_constraint(new, Layout((0, 1, 2, 3)))


def spread_heads(query: Float[Array, "B G T K"], heads_per_tile: int) -> Float[Array, "B G R K"]:
    """Returns each query once for every head of its P = `heads_per_tile`.

    The features of the other heads are 0.
    """
    if heads_per_tile == 1:
        return query
    apart = jnp.where(_own_features(heads_per_tile, query.shape[-1]), query[:, :, None], 0)
    return apart.reshape(*query.shape[:2], -1, query.shape[-1])


def gather_heads(output: Float[Array, "*B G R K"], heads_per_tile: int) -> Float[Array, "*B G T K"]:
    """Returns, for each query of `spread_heads`, every head's own features of the head's output."""
    if heads_per_tile == 1:
        return output
    *outer, rows, features = output.shape
    output = output.reshape(*outer, heads_per_tile, rows // heads_per_tile, features)
    return jnp.sum(jnp.where(_own_features(heads_per_tile, features), output, 0), axis=-3)


def _own_features(heads_per_tile: int, features: int) -> Bool[Array, "P 1 K"]:
    """Returns for each of P heads side by side which of all their features are its own."""
    owners = jnp.arange(features) // (features // heads_per_tile)
    return (owners == jnp.arange(heads_per_tile)[:, None])[:, None]


def take_slots(
    buffer: Float[Array, "*B H S K"], sources: Int[Array, "B M"]
) -> Float[Array, "B H M K"]:
    """Returns the slots `sources` of every row."""
    buffer = buffer if buffer.ndim == 4 else buffer[None]
    return jnp.take_along_axis(buffer, sources[:, None, :, None], axis=2)


def take_slots_one_by_one(
    buffer: Float[Array, "*B H S K"], sources: Int[Array, "B M"]
) -> Float[Array, "B H M K"]:
    """Does what `take_slots` does, slot by slot.

    For one gather a TPU's compiler lays out the caches by slots, for which it copies all of them
    before a loop and after it.
    """
    buffer = buffer if buffer.ndim == 4 else buffer[None]
    (batch, heads, _, features), moved = buffer.shape, sources.shape[1]

    def take_slot(row: int, m: int) -> Float[Array, "1 H 1 K"]:
        return jax.lax.dynamic_slice(buffer, (row, 0, sources[row, m], 0), (1, heads, 1, features))

    rows = [
        jnp.concatenate([take_slot(row, m) for m in range(moved)], axis=2) for row in range(batch)
    ]
    return jnp.concatenate(rows)


def write_slots(
    buffer: Float[Array, "*B H S K"],
    update: Float[Array, "B H T K"],
    positions: PerRow,
    rules: ShardingRules | None,
) -> Float[Array, "*B H S K"]:
    """Overwrites the slots from `positions` on; `rules` say how the buffer lies on a mesh."""
    if rules is None:
        return _write_rows(buffer, update, positions)
    # Every device writes its own rows and heads; left to the compiler, all rows of a sharded axis
    # would first be gathered.
    whole, rows = _AXES[-buffer.ndim :], ("batch",) if buffer.ndim == 4 else (None,)
    axes = whole, (*rows, *_AXES[1:]), rows, whole
    *given, out = (rules.sharding(*names).spec for names in axes)
    write = jax.shard_map(_write_rows, mesh=rules.mesh, in_specs=tuple(given), out_specs=out)
    return write(buffer, update, positions)


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


@jax.vmap
def _write_together(
    row: Float[Array, "H S K"], update: Float[Array, "H T K"], start: Int[Array, ""]
) -> Float[Array, "H S K"]:
    return jax.lax.dynamic_update_slice(row, update, (0, start, 0))


def _write_one_by_one(
    buffer: Float[Array, "B H S K"], update: Float[Array, "B H T K"], positions: PerRow
) -> Float[Array, "B H S K"]:
    for row in range(buffer.shape[0]):
        new = update[row : row + 1]
        buffer = jax.lax.dynamic_update_slice(buffer, new, (row, 0, positions[row], 0))
    return buffer
