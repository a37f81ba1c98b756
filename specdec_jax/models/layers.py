"""Embeddings, linear maps and norms, with T5X's parameter names and numerics.

`valid` is False for rows whose result does not matter: the CPU's own kernels skip them. The letters
of axes are in `backends/axes.py`.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from specdec_jax.backends.axes import AnyStates, Valid
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.cpu.packed_weights import Before, PackedWeight
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.backends.matmul import product, rounded_product

_draws = contextvars.ContextVar("draws", default=True)


@contextlib.contextmanager
def undrawn_parameters() -> Iterator[None]:
    """Makes initializers that are `drawn` return zeros: for shapes alone, draws take long to trace.

    Only for what is not compiled, or a program would keep the zeros.
    """
    token = _draws.set(False)
    try:
        yield
    finally:
        _draws.reset(token)


def drawn(initializer: Callable) -> Callable:
    """Returns an initializer that draws as this one does, but under `undrawn_parameters`."""

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return initializer(key, shape, dtype) if _draws.get() else jnp.zeros(shape, dtype)

    return draw


fan_in_normal = drawn(nn.initializers.variance_scaling(1.0, "fan_in", "normal"))
_fan_in_truncated = drawn(nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"))


class Embedder(nn.Module):
    """An embedding table `[rows, features]`; an index past its end gives the last row.

    Attributes:
      rows, features: the table's shape.
      deviation: standard deviation at first.
      dtype: dtype of what it returns.
      packed: whether a CPU's own kernel takes the rows, also of a table that is stored as the head.
      scale: number by which rows are multiplied.
      apart: index whose row in calls is another parameter, which is not scaled; None: none.
    """

    rows: int
    features: int
    deviation: float
    dtype: Any = jnp.float32
    packed: bool = False
    scale: float = 1.0
    apart: int | None = None

    def setup(self):
        shape = (self.rows, self.features)
        init = drawn(nn.initializers.normal(self.deviation))
        stored = self.get_variable("params", "embedding")
        # `self.param` would reject the shape of a packed one.
        is_packed = isinstance(stored, PackedWeight)
        self.embedding = stored if is_packed else self.param("embedding", init, shape)
        if self.apart is not None:
            self.row_apart = self.param("row_apart", init, (self.features,))

    def __call__(
        self, indices: Int[Array, "*N"], valid: Bool[Array, "*N"] | None = None
    ) -> Float[Array, "*N F"]:
        """Returns the rows with these indices, times the scale."""
        if isinstance(self.embedding, PackedWeight):
            rows = self.embedding.take_columns(indices, valid)
        elif self.packed:
            rows = packed_weights.take_rows(self.embedding, indices, valid)
        else:
            # A drafter may meet ids that it lacks, and a draft may reach past the last position:
            # for these the default mode would give NaN, which would stay in the cache.
            rows = jnp.take(self.embedding, indices, axis=0, mode="clip").astype(self.dtype)
        rows = rows if self.scale == 1 else rows * jnp.asarray(self.scale, rows.dtype)
        if self.apart is None:
            return rows
        return jnp.where(indices[..., None] == self.apart, self.row_apart.astype(rows.dtype), rows)


class Dense(nn.Module):
    """A linear map with a weight `[D, F]`, however it is stored; without bias unless `use_bias`.

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
        self, x: AnyStates, valid: Bool[Array, "*N"] | None = None
    ) -> Float[Array, "*N F"]:
        """Applies the map to `x`."""
        weight, dtype = self._weight(), self.output_dtype or self.dtype
        if weight is None:  # `self.param` would reject the shape of a packed one
            weight = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        if self.matmul_dtype is None:
            y = apply_weight(x.astype(self.dtype), weight, dtype, valid)
        else:
            y = rounded_product(x.reshape(-1, x.shape[-1]), weight, self.matmul_dtype)
            y = y.reshape(*x.shape[:-1], self.features).astype(dtype)
        if not self.use_bias:
            return y
        return y + self.param("bias", nn.initializers.zeros, (self.features,)).astype(y.dtype)

    def _weight(self) -> Any:
        """Returns the weight, None before it is initialised."""
        return self.get_variable("params", "kernel")

    def apply_packed(
        self,
        x: AnyStates,
        valid: Bool[Array, "*N"] | None = None,
        before: Before = Before("nothing"),
        residual: Float[Array, "*N F"] | None = None,
        clear: bool = True,
        bias: Float[Array, " F"] | None = None,
        cap: float | None = None,
    ) -> Float[Array, "*N F"]:
        """Applies the map with a packed weight to `before(x)`, and adds `residual`.

        `bias` is added where the map has none of its own. See `PackedWeight.product`.
        """
        bias = self.get_variable("params", "bias") if self.use_bias else bias
        dtype = self.output_dtype or self.dtype
        return self._weight().product(x, dtype, valid, before, bias, residual, clear, cap)

    def keys_and_values(
        self, x: Float[Array, "B L D"], features: int, valid: Valid
    ) -> tuple[Float32[Array, "B G L K"], Float32[Array, "B G L K"]]:
        """Does what `PackedWeight.keys_and_values` does."""
        bias = self.get_variable("params", "bias") if self.use_bias else None
        return self._weight().keys_and_values(x, features, valid, bias)

    def apply_after(self, norm: Callable, x: AnyStates, valid: Valid) -> Float[Array, "*N F"]:
        """Applies a norm and the map with a packed weight; rows that are not valid may be anything.

        They need not be cleared, since the next product does not read them.
        """
        return self.apply_packed(x, valid, norm.before(), clear=False)

    def add_to(
        self,
        residual: Float[Array, "*N F"],
        x: Float[Array, "..."],
        valid: Valid,
        dropout: Callable,
        norm: Callable | None = None,
        before: Before = Before("nothing"),
    ) -> Float[Array, "*N F"]:
        """Returns `residual` + the map of `x`, through dropout unless weights are packed.

        With a `norm` the map's result is normalised first. `before` is what a packed weight
        computes of `x`.
        """
        if isinstance(self._weight(), PackedWeight):
            if norm is None:
                return self.apply_packed(x, valid, before, residual)
            return residual + norm(self.apply_packed(x, valid, before, clear=False), valid)
        width = -1 if residual.size else math.prod(x.shape[residual.ndim - 1 :])  # no −1 of 0
        y = self(x.reshape(*residual.shape[:-1], width), valid)
        return residual + dropout(y if norm is None else norm(y))

    def greedy_token_and_logprob(
        self,
        x: AnyStates,
        valid: Bool[Array, "*N"] | None,
        normalize: bool,
        bias: Float[Array, " F"] | None = None,
        cap: float | None = None,
    ) -> tuple[Int32[Array, "*N"], Float32[Array, "*N"]]:
        """Does what `PackedWeight.greedy_token_and_logprob` does."""
        return self._weight().greedy_token_and_logprob(x, valid, normalize, bias, cap)


def apply_weight(
    x: AnyStates,
    weight: Float[Array, "D F"] | PackedWeight | Int8Weight,
    output_dtype: Any,
    valid: Bool[Array, "*N"] | None = None,
) -> Float[Array, "*N F"]:
    """Returns `x` times a weight, however the weight is stored."""
    if isinstance(weight, PackedWeight):
        return weight.product(x, output_dtype, valid)
    if isinstance(weight, Int8Weight):
        return weight.product(x, output_dtype)
    return product(x, weight.astype(x.dtype), ((x.ndim - 1,), (0,)), dtype=output_dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32, without mean or bias; ε = 1e-6, as in T5.

    With `packed` the CPU's own kernels compute it: XLA adds up a row in one order in small calls
    and in another from some thousand numbers on, and what comes after the last norm would see the
    width of the call.
    """

    dtype: Any = jnp.float32
    packed: bool = False

    @nn.compact
    def __call__(self, x: AnyStates, valid: Bool[Array, "*N"] | None = None) -> AnyStates:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if self.packed:
            return packed_weights.normalize(x, self.before(), valid)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x.astype(self.dtype) * scale.astype(self.dtype)

    def before(self) -> Before:
        """Returns this norm as what a packed weight computes before its product."""
        return Before("rms", self.get_variable("params", "scale"))


class OffsetRMSNorm(nn.Module):
    """Root-mean-square normalisation times 1 + a parameter, all in float32; ε = 1e-6, as in Gemma.

    `packed` as in `RMSNorm`.
    """

    dtype: Any = jnp.float32
    packed: bool = False

    @nn.compact
    def __call__(self, x: AnyStates, valid: Bool[Array, "*N"] | None = None) -> AnyStates:
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        if self.packed:
            return packed_weights.normalize(x, self.before(), valid)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return (x * (1 + scale.astype(jnp.float32))).astype(self.dtype)

    def before(self) -> Before:
        """Returns this norm as what a packed weight computes before its product."""
        return Before("rms", 1 + self.get_variable("params", "scale"))


class LayerNorm(nn.Module):
    """Normalisation by mean and variance in float32, with scale and bias; ε = 1e-5, as in GPT-2.

    `packed` as in `RMSNorm`.
    """

    dtype: Any = jnp.float32
    packed: bool = False

    @nn.compact
    def __call__(self, x: AnyStates, valid: Bool[Array, "*N"] | None = None) -> AnyStates:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        if self.packed:
            return packed_weights.normalize(x, self.before(), valid)
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)
        return x.astype(self.dtype) * scale.astype(self.dtype) + bias.astype(self.dtype)

    def before(self) -> Before:
        """Returns this norm as what a packed weight computes before its product."""
        return Before("layer", *(self.get_variable("params", name) for name in ("scale", "bias")))


class NoNorm:
    """What stands for the norm before a block whose norm comes after it: returns its input."""

    def __call__(self, x: AnyStates, valid: Bool[Array, "*N"] | None = None) -> AnyStates:
        return x

    def before(self) -> Before:
        """Returns this as what a packed weight computes before its product."""
        return Before("nothing")


NORMS = {"rms": RMSNorm, "offset_rms": OffsetRMSNorm, "layer": LayerNorm}
