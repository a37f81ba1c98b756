"""Matrix products at the precision of their operands' dtype, whatever a device does by default."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped

Axes = tuple[Sequence[int], Sequence[int]]  # of the two operands


def multiply(
    a: Shaped[Array, "..."],
    b: Shaped[Array, "..."],
    contracted: Axes,
    batch: Axes = ((), ()),
    dtype: DTypeLike = jnp.float32,
) -> Shaped[Array, "..."]:
    """Returns `lax.dot_general` of operands of one dtype; precision as by `choose_precision`."""
    axes, precision = (contracted, batch), choose_precision(a.dtype)
    return jax.lax.dot_general(a, b, axes, precision, preferred_element_type=dtype)


def product(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    contracted: Axes,
    batch: Axes = ((), ()),
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "..."]:
    """Does what `multiply` does; on an accelerator a single row is multiplied twice.

    Its compiler would not use the units for matrices for one, and would add up in the dtype of the
    operands.
    """
    by_rows = functools.partial(multiply, contracted=contracted, batch=batch, dtype=dtype)
    if math.prod(a.shape[:-1]) > 1 or (contracted[0], batch) != ((a.ndim - 1,), ((), ())):
        return by_rows(a, b)

    def multiply_twice(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
        return by_rows(jnp.concatenate([a, a], axis=a.ndim - 2), b)[..., :1, :]

    return jax.lax.platform_dependent(a, b, cpu=by_rows, default=multiply_twice)


def choose_precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Returns the precision of products of this dtype: the highest for float32, else None.

    By default a TPU rounds float32 operands to bfloat16 and an NVIDIA GPU rounds them to TF32, but
    perhaps not in a product over a single row: calls over one position and over several would then
    differ by more than float32's rounding. On a CPU the precision makes no difference.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rounded_product(
    x: Float[Array, "N D"], weight: Float[Array, "D F"], dtype: DTypeLike
) -> Float32[Array, "N F"]:
    """Returns `x · weight` in float32 from operands rounded to `dtype`.

    The backward pass rounds its operands too. JAX's own transpose rule would multiply float32
    cotangents, which takes twice as long where bfloat16 is native.
    """
    return product(x.astype(dtype), weight.astype(dtype), ((1,), (0,)))


def _rounded_forward(
    x: Float[Array, "N D"], weight: Float[Array, "D F"], dtype: DTypeLike
) -> tuple[Float32[Array, "N F"], tuple]:
    x, weight = x.astype(dtype), weight.astype(dtype)
    return product(x, weight, ((1,), (0,))), (x, weight)


def _rounded_backward(
    dtype: DTypeLike, operands: tuple, cotangent: Float[Array, "N F"]
) -> tuple[Float[Array, "N D"], Float[Array, "D F"]]:
    (x, weight), cotangent = operands, cotangent.astype(dtype)
    return product(cotangent, weight, ((1,), (1,))), product(x, cotangent, ((0,), (0,)))


rounded_product.defvjp(_rounded_forward, _rounded_backward)
