"""Kernels in 8 bits. On a CPU `panels.py` multiplies them, with inputs rounded to 16 bits;
elsewhere they are for drafters alone, since inputs are rounded to 8 bits too."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

_MOST = 127


@flax.struct.dataclass
class Int8Kernel:
    """A kernel of which column f is about `values[:, f] · scales[f]`: symmetric, one scale for each output."""

    values: Int8[Array, "D F"]
    scales: Float32[Array, " F"]

    @classmethod
    def of(cls, kernel: Float[Array, "D F"]) -> "Int8Kernel":
        return cls(*_rounded(kernel, 0))

    def matrix(self) -> Float32[Array, "D F"]:
        """Returns the kernel."""
        return self.values.astype(jnp.float32) * self.scales

    def product(self, x: Float[Array, "*N D"], output_dtype) -> Float[Array, "*N F"]:
        """`x` times the kernel; every row of x is rounded alike, the sums are exact in int32."""
        rows = x.reshape(-1, x.shape[-1])
        values, scales = _rounded(rows, 1)
        # XLA's product of a single row on a CPU reads a copy of the whole kernel in int32, that of
        # two the kernel itself.
        values = jnp.broadcast_to(values, (max(2, len(rows)), rows.shape[1]))
        sums = jax.lax.dot_general(values, self.values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        y = sums[: len(rows)].astype(jnp.float32) * scales[:, None] * self.scales
        return y.astype(output_dtype).reshape(*x.shape[:-1], -1)


def _rounded(x: Float[Array, "N F"], axis: int) -> tuple[Int8[Array, "N F"], Float32[Array, " scales"]]:
    """Nearest integers of a matrix in units that let its greatest magnitude along `axis` be 127, and the units."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=axis) / _MOST
    units = jnp.expand_dims(jnp.where(scales > 0, scales, 1), axis)
    return jnp.round(x / units).astype(jnp.int8), scales
