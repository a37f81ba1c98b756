"""The key/value cache of one attention layer: of fixed shape, its slots overwritten at each row's
own position.

Slot `s` of a row holds the key and value of the token at position `s`. A row is rewound by lowering
its length; the slots past it are then stale. Readers mask the scores of stale slots, and every
write sets their values to 0, because a weight of 0 times NaN would be NaN.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specdec_jax.models import panels
from specdec_jax.models.axes import PerRow
from specdec_jax.models.sharding import ShardingRules

# On a TPU one dynamic_update_slice per row is the fastest write, since a batched one becomes a
# scatter; above this many rows it takes longer to compile than it saves. On a CPU every such write
# but the first copies the whole cache.
MAX_UNROLLED_ROWS = 32

_AXES = ("batch", "heads", "length", "kv")


@flax.struct.dataclass
class KVCache:
    """Keys and values of one layer.

    The loop must update both in place. XLA on a CPU repeats a write inside whatever reshapes its
    result, and then has to copy the whole cache. Therefore there is no batch axis where B = 1,
    which a product would have to merge with another, and stale values are cleared when writing
    rather than when reading.

    Attributes:
      key, value: S slots of K features for each of H heads; without the axis B where B = 1.
      rules: how both lie on a mesh; None: on one device.
    """

    key: Float[Array, "*B H S K"]
    value: Float[Array, "*B H S K"]
    rules: ShardingRules | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def empty(cls, batch: int, heads: int, slots: int, features: int, dtype) -> "KVCache":
        """Makes a cache of zeros; the contents do not matter, since unwritten slots are masked."""
        shape = (batch, heads, slots, features) if batch > 1 else (heads, slots, features)
        return cls(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

    @property
    def slots(self) -> int:
        return self.key.shape[-2]

    def repeated(self, copies: int) -> "KVCache":
        """Returns the cache with `copies` rows side by side for each row."""
        repeat = lambda x: jnp.repeat(x if x.ndim == 4 else x[None], copies, axis=0)
        return self.replace(key=repeat(self.key), value=repeat(self.value))

    def append(self, key: Float[Array, "B H T K"], value: Float[Array, "B H T K"], positions: PerRow) -> "KVCache":
        """Overwrites slots `positions[b] … positions[b] + T − 1` of every row and sets the values
        past them to 0.

        Args:
          positions: the first slot written in each row. `positions[b] + T` must not exceed S, since
            XLA clamps the start of a slice and would overwrite live slots instead. The decode loop
            chooses S accordingly.
        """
        live = jnp.arange(self.slots) < positions[:, None] + key.shape[2]
        live = live[:, None, :, None] if self.value.ndim == 4 else live[:, :, None]
        write = self._write
        value = jnp.where(live, write(self.value, value, positions), 0)
        return self.replace(key=write(self.key, key, positions), value=value)

    def append_nodes(self, key: jax.Array, value: jax.Array, starts: jax.Array) -> "KVCache":
        """Does what `append` does, for nodes of trees, from slots `starts[b]` on.

        Values that are not finite are set to 0: a query that does not see a node multiplies its
        value by 0, and must not get NaN from a node that may never become a token. The node's own
        logits are NaN all the same, by way of its hidden state.
        """
        return self.append(key, jnp.where(jnp.isfinite(value), value, 0), starts)

    def move(self, sources: jax.Array, starts: jax.Array, native: bool = False) -> "KVCache":
        """Copies the slots `sources [B, M]` of every row to the slots from `starts [B]` on; with
        `native` by the CPU's own kernel, since XLA on a CPU copies the whole cache to do so."""
        if native:
            key, value = panels.move(self.key, self.value, sources, starts)
            return self.replace(key=key, value=value)
        take = lambda x: jnp.take_along_axis(x if x.ndim == 4 else x[None], sources[:, None, :, None], axis=2)
        write = self._write
        key, value = take(self.key), take(self.value)
        return self.replace(key=write(self.key, key, starts), value=write(self.value, value, starts))

    def widen(self, slots: int) -> "KVCache":
        """Makes room for S = `slots` slots in all."""
        room = [(0, 0)] * (self.key.ndim - 2) + [(0, slots - self.slots), (0, 0)]
        return self.replace(key=jnp.pad(self.key, room), value=jnp.pad(self.value, room))

    @property
    def _write(self) -> Callable:
        if self.rules is None:
            return _write_rows
        # Every device writes its own rows and heads; left to the compiler, all rows of a sharded
        # axis would first be gathered.
        whole, rows = _AXES[-self.key.ndim :], ("batch",) if self.key.ndim == 4 else (None,)
        return self.rules.locally(_write_rows, (whole, (*rows, *_AXES[1:]), rows), whole)

    def pinned(self) -> "KVCache":
        """Returns the cache with its layout on the mesh fixed; under jit."""
        if self.rules is None:
            return self
        pin = lambda x: self.rules.constrain(x, *_AXES[-x.ndim :])
        return self.replace(key=pin(self.key), value=pin(self.value))


def _write_rows(
    buffer: Float[Array, "*B H S K"], update: Float[Array, "B H T K"], positions: PerRow
) -> Float[Array, "*B H S K"]:
    update = update.astype(buffer.dtype)
    if buffer.ndim == 3:
        return jax.lax.dynamic_update_slice(buffer, update[0], (0, positions[0], 0))
    if buffer.shape[0] > MAX_UNROLLED_ROWS:
        return _write_together(buffer, update, positions)
    return jax.lax.platform_dependent(buffer, update, positions, cpu=_write_together, default=_write_one_by_one)


def _write_together(
    buffer: Float[Array, "B H S K"], update: Float[Array, "B H T K"], positions: PerRow
) -> Float[Array, "B H S K"]:
    write = lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (0, start, 0))
    return jax.vmap(write)(buffer, update, positions)


def _write_one_by_one(
    buffer: Float[Array, "B H S K"], update: Float[Array, "B H T K"], positions: PerRow
) -> Float[Array, "B H S K"]:
    for row in range(buffer.shape[0]):
        buffer = jax.lax.dynamic_update_slice(buffer, update[row : row + 1], (row, 0, positions[row], 0))
    return buffer
