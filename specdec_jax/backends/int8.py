"""Weights in int8, and XLA's products with them.

An accelerator multiplies inputs as they are, in the dtype of the model, by the integers, which it
widens while it reads them; the scales come after the sums. On a CPU `packed_weights.py` multiplies
such weights, with inputs rounded to 16 or to 8 bits. Where a CPU lacks that product, XLA's rounds
inputs to 8 bits, for drafters alone: what comes before it has other bits in wide calls than in
narrow ones, which rounding to 8 bits would magnify.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8

from specdec_jax.backends import matmul

_MOST = 127


@flax.struct.dataclass
class Int8Weight:
    """A weight matrix in int8: its column f is about `values[:, f] · scales[f]`.

    Attributes:
      input_bits: bits to which `packed_weights.py` rounds the inputs of its products, 16 or 8, in
        the place of which `product` always takes 8. None: inputs are not rounded.
      derived: whether it is made of another parameter, and is no parameter itself.
      transposed: whether `values` is `[F, D]`, which XLA's product on a GPU reads faster. Only the
        decode loop takes it so.
    """

    values: Int8[Array, "D F"] | Int8[Array, "F D"]
    scales: Float32[Array, " F"]
    input_bits: int | None = flax.struct.field(pytree_node=False, default=16)
    derived: bool = flax.struct.field(pytree_node=False, default=False)
    transposed: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def quantize(cls, weight: Float[Array, "D F"], input_bits: int | None = 16) -> "Int8Weight":
        return cls(*_round_to_int8(weight, 0), input_bits)

    def transpose_values(self) -> "Int8Weight":
        """Returns the same weight with `values` in the other order."""
        values = jnp.asarray(self.values).T
        return self.replace(values=values, transposed=not self.transposed)

    def unpack(self) -> "Int8Weight":
        """Returns the weight with `values` `[D, F]`."""
        return self.transpose_values() if self.transposed else self

    def matrix(self) -> Float32[Array | np.ndarray, "D F"]:
        """Returns the weight as float32."""
        values = self.unpack().values
        if isinstance(values, np.ndarray):  # widened on the way, not as an array of its own
            return np.multiply(values, self.scales, dtype=np.float32)
        return values.astype(jnp.float32) * self.scales

    def product(self, x: Float[Array, "*N D"], output_dtype: DTypeLike) -> Float[Array, "*N F"]:
        """Returns `x` times the weight.

        Sums are in float32; where inputs are rounded, every row of `x` with a scale of its own,
        they are exact in int32.
        """
        if self.input_bits is None:
            # Widening is exact: bfloat16 has all integers up to 256.
            axes = (x.ndim - 1,), (int(self.transposed),)
            sums = matmul.product(x, self.values.astype(x.dtype), axes)
            return (sums * self.scales).astype(output_dtype)
        rows = x.reshape(-1, x.shape[-1])
        values, scales = _round_to_int8(rows, 1)
        # On a CPU, XLA's product of a single row reads a copy of the whole matrix in int32; its
        # product of two rows reads the weight itself.
        values = jnp.broadcast_to(values, (max(2, len(rows)), rows.shape[1]))
        sums = matmul.multiply(values, self.values, ((1,), (0,)), dtype=jnp.int32)
        y = sums[: len(rows)].astype(jnp.float32) * scales[:, None] * self.scales
        return y.astype(output_dtype).reshape(*x.shape[:-1], -1)


def _round_to_int8(
    x: Float[Array, "N F"], axis: int
) -> tuple[Int8[Array, "N F"], Float32[Array, " scales"]]:
    """Returns a matrix as integers and scales, with 127 for the greatest magnitude on `axis`."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=axis) / _MOST
    units = jnp.expand_dims(jnp.where(scales > 0, scales, 1), axis)
    return jnp.round(x / units).astype(jnp.int8), scales
