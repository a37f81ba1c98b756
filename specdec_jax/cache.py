"""Key/value cache of one attention layer: fixed shape, one length per row, slots overwritten.

Slot `s` of a row holds the key and value of the token at position `s`. Nothing here is cleared: a row is rewound by
lowering its length, after which the slots past it are stale and must be masked by whoever reads them.
"""

import flax.struct
import jax
import jax.numpy as jnp

# Above this many rows the unrolled writes cost more to compile than they save (an unrolled dynamic_update_slice per
# row is the fastest form on TPU and CPU alike; a batched one becomes a scatter).
MAX_UNROLLED_ROWS = 32


@flax.struct.dataclass
class KVCache:
    """Keys and values of one layer.

    Attributes:
      key: `[B, H, S, K]`, S slots of K features for each of H heads.
      value: `[B, H, S, K]`.
    """

    key: jax.Array
    value: jax.Array

    @classmethod
    def empty(cls, batch: int, heads: int, slots: int, features: int, dtype) -> "KVCache":
        """A cache of zeros; the contents do not matter, since unwritten slots are masked."""
        shape = (batch, heads, slots, features)
        return cls(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

    @property
    def slots(self) -> int:
        return self.key.shape[2]

    def append(self, key: jax.Array, value: jax.Array, positions: jax.Array) -> "KVCache":
        """Overwrites slots `positions[b] … positions[b] + T − 1` of every row.

        Args:
          key: `[B, H, T, K]`.
          value: `[B, H, T, K]`.
          positions: `[B]` int32, the first slot written in each row. `positions[b] + T` must not exceed S: XLA
            clamps the start of a slice, and would overwrite live slots instead. The decode loop sizes S so.
        """
        written = _write_rows(self.key, key, positions), _write_rows(self.value, value, positions)
        # Without the barrier XLA repeats the writes inside their readers, and must copy the cache to keep the old one.
        return KVCache(*jax.lax.optimization_barrier(written))


def _write_rows(buffer: jax.Array, update: jax.Array, positions: jax.Array) -> jax.Array:
    update = update.astype(buffer.dtype)
    if buffer.shape[0] > MAX_UNROLLED_ROWS:
        write = lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (0, start, 0))
        return jax.vmap(write)(buffer, update, positions)
    for row in range(buffer.shape[0]):
        buffer = jax.lax.dynamic_update_slice(buffer, update[row : row + 1], (row, 0, positions[row], 0))
    return buffer
