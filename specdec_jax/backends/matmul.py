"""Matrix products at the precision that their operands' dtype promises, whatever the device does by
default."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def product(
    a: Float[Array, "..."], b: Float[Array, "..."], contracted, batch=((), ()), dtype=jnp.float32
) -> Float[Array, "..."]:
    """Returns `lax.dot_general` of `a` and `b`, which have one dtype, at the precision of
    `precision_of`.

    The result is in `dtype`.
    """

    def multiply(a, b):
        return jax.lax.dot_general(
            a, b, (contracted, batch), precision_of(a.dtype), preferred_element_type=dtype
        )

    if math.prod(a.shape[:-1]) > 1 or (contracted[0], batch) != ((a.ndim - 1,), ((), ())):
        return multiply(a, b)

    # For a single row an accelerator's compiler would not use the units for matrices, and would add
    # up in the dtype of the operands.
    def twice(a, b):
        return multiply(jnp.concatenate([a, a], axis=a.ndim - 2), b)[..., :1, :]

    return jax.lax.platform_dependent(a, b, cpu=multiply, default=twice)


def precision_of(dtype) -> jax.lax.Precision | None:
    """Returns the precision that products of operands of this dtype ask for: the highest for
    float32, else None.

    By default a TPU rounds float32 operands to bfloat16 and an NVIDIA GPU rounds them to TF32, but
    perhaps not in a product over a single row: calls over one position and over several would then
    differ by more than float32's rounding. On a CPU the precision makes no difference.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rounded_product(
    x: Float[Array, "N D"], weight: Float[Array, "D F"], dtype
) -> Float32[Array, "N F"]:
    """Returns `x · weight` in float32 from operands rounded to `dtype`.

    The backward pass rounds its operands too.

    JAX's own transpose rule would multiply float32 cotangents, which takes twice as long where
    bfloat16 is native.
    """
    return product(x.astype(dtype), weight.astype(dtype), ((1,), (0,)))


def _rounded_forward(x, weight, dtype):
    x, weight = x.astype(dtype), weight.astype(dtype)
    return product(x, weight, ((1,), (0,))), (x, weight)


def _rounded_backward(dtype, operands, cotangent):
    (x, weight), cotangent = operands, cotangent.astype(dtype)
    return product(cotangent, weight, ((1,), (1,))), product(x, cotangent, ((0,), (0,)))


rounded_product.defvjp(_rounded_forward, _rounded_backward)
