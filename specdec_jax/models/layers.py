"""Building blocks of T5-family and GPT-like networks, with T5X's parameter names and numerics.

The letters of axes are in `axes.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from specdec_jax.backends.axes import Valid
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.cpu.packed_weights import Before, PackedWeight
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.backends.matmul import product, rounded_product

_fan_in_normal = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_fan_in_truncated = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class Embedder(nn.Module):
    """An embedding table `[rows, features]`; an index past its end gives the last row.

    With `packed` a CPU's own kernel takes the rows.
    """

    rows: int
    features: int
    deviation: float
    dtype: Any = jnp.float32
    packed: bool = False

    def setup(self):
        shape = (self.rows, self.features)
        self.embedding = self.param("embedding", nn.initializers.normal(self.deviation), shape)

    def __call__(
        self, indices: Int[Array, "*N"], valid: Bool[Array, "*N"] | None = None
    ) -> Float[Array, "*N F"]:
        """Returns the rows with these indices; `valid` as for `apply_weight`."""
        if self.packed:
            return packed_weights.take_rows(self.embedding, indices, valid)
        # A drafter may meet ids that it lacks, and a draft may reach past the last position: for
        # these the default mode would give NaN, which would stay in the cache.
        return jnp.take(self.embedding, indices, axis=0, mode="clip").astype(self.dtype)


class Dense(nn.Module):
    """A linear map with a weight matrix `[D, F]`, without bias, as in T5X's checkpoints, unless
    `use_bias`.

    `matmul_dtype` is the dtype to which the operands of the product, and nothing else, are rounded:
    for training on a CPU with bfloat16 instructions.
    """

    features: int
    dtype: Any = jnp.float32
    kernel_init: Any = _fan_in_truncated
    output_dtype: Any = None
    matmul_dtype: Any = None
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "*N D"], valid: Bool[Array, "*N"] | None = None
    ) -> Float[Array, "*N F"]:
        """Applies the map to `x`; `valid` as for `apply_weight`."""
        y = self._without_bias(x, valid)
        if not self.use_bias:
            return y
        return y + self.param("bias", nn.initializers.zeros, (self.features,)).astype(y.dtype)

    def with_packed_weights(
        self,
        x: Float[Array, "*N D"],
        valid: Bool[Array, "*N"] | None = None,
        before: Before = Before("nothing"),
        residual: Float[Array, "*N F"] | None = None,
        clear: bool = True,
    ) -> Float[Array, "*N F"]:
        """Applies the map to `before(x)` and adds `residual`, for a packed weight.

        See `PackedWeight.product`.
        """
        weight, dtype = self.get_variable("params", "kernel"), self.output_dtype or self.dtype
        bias = self.get_variable("params", "bias") if self.use_bias else None
        return weight.product(x, dtype, valid, before, bias, residual, clear)

    def after(self, norm: Callable, x: Float[Array, "*N D"], valid: Valid) -> Float[Array, "*N F"]:
        """Applies a norm and the map, with packed weights; what is not valid may be anything.

        It need not be cleared, since the next product does not read it.
        """
        return self.with_packed_weights(x, valid, norm.before(), clear=False)

    def added(
        self,
        x: Float[Array, "..."],
        residual: Float[Array, "*N F"],
        valid: Valid,
        dropped: Callable,
    ) -> Float[Array, "*N F"]:
        """Returns `residual` + the map of `x`, through dropout unless weights are packed."""
        if isinstance(self.get_variable("params", "kernel"), PackedWeight):
            return self.with_packed_weights(x, valid, residual=residual)
        width = -1 if residual.size else math.prod(x.shape[residual.ndim - 1 :])  # no −1 of 0
        return residual + dropped(self(x.reshape(*residual.shape[:-1], width), valid))

    def greedy_token_and_logprob(
        self, x: Float[Array, "*N D"], valid: Bool[Array, "*N"] | None, normalize: bool
    ) -> tuple[Int32[Array, "*N"], Float32[Array, "*N"]]:
        """Does what `PackedWeight.greedy_token_and_logprob` does, for a packed weight without
        bias."""
        return self.get_variable("params", "kernel").greedy_token_and_logprob(x, valid, normalize)

    def _without_bias(
        self, x: Float[Array, "*N D"], valid: Bool[Array, "*N"] | None
    ) -> Float[Array, "*N F"]:
        if self.has_variable("params", "kernel"):
            weight = self.get_variable(
                "params", "kernel"
            )  # if packed, `self.param` would reject its shape
        else:
            weight = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        output_dtype = self.output_dtype or self.dtype
        if self.matmul_dtype is not None:
            y = rounded_product(x.reshape(-1, x.shape[-1]), weight, self.matmul_dtype)
            return y.reshape(*x.shape[:-1], self.features).astype(output_dtype)
        if not isinstance(weight, PackedWeight | Int8Weight):
            weight = weight.astype(self.dtype)
        return apply_weight(x.astype(self.dtype), weight, output_dtype, valid)


def apply_weight(
    x: Float[Array, "*N D"],
    weight: Float[Array, "D F"] | PackedWeight | Int8Weight,
    output_dtype,
    valid: Bool[Array, "*N"] | None = None,
) -> Float[Array, "*N F"]:
    """Returns `x` times a weight, however the weight is stored.

    Args:
      valid: False for rows of `x` whose result does not matter; with `PackedWeight` they are not
        computed.
    """
    if isinstance(weight, PackedWeight):
        return weight.product(x, output_dtype, valid)
    if isinstance(weight, Int8Weight):
        return weight.product(x, output_dtype)
    return product(x, weight, ((x.ndim - 1,), (0,)), dtype=output_dtype)
