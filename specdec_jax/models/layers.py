"""Building blocks of T5-family and GPT-like networks, with T5X's parameter names and numerics.

The letters of axes are in `axes.py`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from specdec_jax.backends.axes import Bias, Encoded, Mask, PerRow, Seen, States, Valid
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.cpu.packed_weights import Before, PackedWeights
from specdec_jax.backends.gpu import attention as gpu_attention
from specdec_jax.backends.int8 import Int8Kernel
from specdec_jax.backends.kv_cache import ROWS, KVCache, gather, spread
from specdec_jax.backends.matmul import precision_of, product, rounded_product
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.backends.xla import ACTIVATION_FUNCTIONS, MASKED

_fan_in_normal = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_fan_in_truncated = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class Embedder(nn.Module):
    """An embedding table `[rows, features]`; an index past its end gives the last row."""

    rows: int
    features: int
    deviation: float
    dtype: Any = jnp.float32
    native: bool = False

    def setup(self):
        shape = (self.rows, self.features)
        self.embedding = self.param("embedding", nn.initializers.normal(self.deviation), shape)

    def __call__(
        self, indices: Int[Array, "*N"], valid: Bool[Array, "*N"] | None = None
    ) -> Float[Array, "*N F"]:
        """Returns the rows with these indices; `valid` as for `apply_kernel`."""
        if self.native:
            return packed_weights.rows(self.embedding, indices, valid)
        # A drafter may meet ids that it lacks, and a draft may reach past the last position: for
        # these the default mode would give NaN, which would stay in the cache.
        return jnp.take(self.embedding, indices, axis=0, mode="clip").astype(self.dtype)


class Dense(nn.Module):
    """A linear map with a kernel `[D, F]`, without bias, as in T5X's checkpoints, unless
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
        """Applies the map to `x`; `valid` as for `apply_kernel`."""
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
        """Applies the map to `before(x)` and adds `residual`, for a kernel packed; see
        `PackedWeights.product`."""
        kernel, dtype = self.get_variable("params", "kernel"), self.output_dtype or self.dtype
        bias = self.get_variable("params", "bias") if self.use_bias else None
        return kernel.product(x, dtype, valid, before, bias, residual, clear)

    def greedy_token_and_logprob(
        self, x: Float[Array, "*N D"], valid: Bool[Array, "*N"] | None, normalize: bool
    ) -> tuple[Int32[Array, "*N"], Float32[Array, "*N"]]:
        """Does what `PackedWeights.greedy_token_and_logprob` does, for a kernel packed without
        bias."""
        return self.get_variable("params", "kernel").greedy_token_and_logprob(x, valid, normalize)

    def _without_bias(
        self, x: Float[Array, "*N D"], valid: Bool[Array, "*N"] | None
    ) -> Float[Array, "*N F"]:
        if self.has_variable("params", "kernel"):
            kernel = self.get_variable(
                "params", "kernel"
            )  # if packed, `self.param` would reject its shape
        else:
            kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        output_dtype = self.output_dtype or self.dtype
        if self.matmul_dtype is not None:
            y = rounded_product(x.reshape(-1, x.shape[-1]), kernel, self.matmul_dtype)
            return y.reshape(*x.shape[:-1], self.features).astype(output_dtype)
        if not isinstance(kernel, PackedWeights | Int8Kernel):
            kernel = kernel.astype(self.dtype)
        return apply_kernel(x.astype(self.dtype), kernel, output_dtype, valid)


def apply_kernel(
    x: Float[Array, "*N D"],
    kernel: Float[Array, "D F"] | PackedWeights | Int8Kernel,
    output_dtype,
    valid: Bool[Array, "*N"] | None = None,
) -> Float[Array, "*N F"]:
    """Returns `x` times a kernel, however the kernel is stored.

    Args:
      valid: False for rows of `x` whose result does not matter; with `PackedWeights` they are not
        computed.
    """
    if isinstance(kernel, PackedWeights):
        return kernel.product(x, output_dtype, valid)
    if isinstance(kernel, Int8Kernel):
        return kernel.product(x, output_dtype)
    return product(x, kernel, ((x.ndim - 1,), (0,)), dtype=output_dtype)


class GatedMLP(nn.Module):
    """A feed-forward block: one activation (T5 1.0: relu; GPT-2: gelu) or the product of two (T5
    1.1: gelu × linear).

    With `fused`, the two input kernels of a gated block are one; with `native`, which needs
    `fused`, kernels are packed.
    """

    mlp_dim: int
    activations: tuple[str, ...]
    dtype: Any = jnp.float32
    dropout_rate: float = 0.0
    fused: bool = False
    native: bool = False
    matmul_dtype: Any = None
    use_bias: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*N D"],
        norm: Callable,
        dropped: Callable = lambda y: y,
        deterministic: bool = True,
        valid: Valid = None,
    ) -> Float[Array, "*N D"]:
        """Returns `x + dropped(block(norm(x)))`; `valid` as for `apply_kernel`."""
        dense = functools.partial(
            Dense, dtype=self.dtype, matmul_dtype=self.matmul_dtype, use_bias=self.use_bias
        )
        count = len(self.activations)
        if self.native:
            wide = dense(count * self.mlp_dim, name="wi" if count == 1 else "wi_fused")
            # Rows that are not live need not be cleared: the next product does not read them.
            hidden = wide.with_packed_weights(x, valid, norm.before(), clear=False)
            gate = Before("activation" if count == 1 else "gate", activations=self.activations)
            return dense(x.shape[-1], name="wo").with_packed_weights(hidden, valid, gate, x)
        before, x = x, norm(x)
        if self.fused and count > 1:
            hidden = dense(count * self.mlp_dim, name="wi_fused")(x, valid)
            parts = jnp.split(hidden, count, axis=-1)
        else:
            names = ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]
            parts = [dense(self.mlp_dim, name=name)(x, valid) for name in names]
        hidden = ACTIVATION_FUNCTIONS[self.activations[0]](parts[0])
        for part, activation in zip(parts[1:], self.activations[1:]):
            hidden = hidden * ACTIVATION_FUNCTIONS[activation](part)
        hidden = nn.Dropout(self.dropout_rate)(hidden, deterministic=deterministic)
        return before + dropped(dense(x.shape[-1], name="wo")(hidden, valid))


class Attention(nn.Module):
    """Multi-head attention of T queries per row over given keys and values, without scaling by
    1/√K, as in T5.

    (GPT divides its queries by `divisor`.) With `fused`, the query, key and value kernels are one
    matrix `qkv [D, 3·H·K]`, for fewer and larger products in the decode loop (see
    `weight_layouts.py`). With `native`, which needs `fused`, attention runs in `packed_weights.py`
    instead of XLA.
    """

    heads: int
    features: int
    model_dim: int
    dtype: Any = jnp.float32
    fused: bool = False
    native: bool = False
    matmul_dtype: Any = None
    use_bias: bool = False

    def setup(self):
        size = self.heads * self.features
        dense = functools.partial(
            Dense, dtype=self.dtype, matmul_dtype=self.matmul_dtype, use_bias=self.use_bias
        )

        # T5 folds the 1/√K of the scores into the initial query kernel.
        def query_init(*args):
            return _fan_in_normal(*args) / np.sqrt(self.features)

        self.query = dense(size, kernel_init=query_init)
        self.key = dense(size, kernel_init=_fan_in_normal)
        self.value = dense(size, kernel_init=_fan_in_normal)
        self.qkv = dense(3 * size)
        self.out = dense(self.model_dim, kernel_init=_fan_in_normal)

    def _split(
        self, x: Float[Array, "*N D"], batch: int, heads_per_tile: int | None = None
    ) -> Float[Array, "B H T K"]:
        """Splits the last axis into heads, or into `heads_per_tile` heads side by side, and puts
        the axis of heads before that of positions; `batch` is B."""
        features = self.features * (heads_per_tile or 1)
        count = math.prod(x.shape[:-1]) // batch
        if heads_per_tile is not None and count > ROWS and count % ROWS == 0:
            # A TPU's compiler moves whole tiles of rows, but changes the layout of every tile for
            # the axis of all positions.
            x = x.reshape(batch, count // ROWS, ROWS, -1, features)
            return x.transpose(0, 3, 1, 2, 4).reshape(batch, -1, count, features)
        return x.reshape(batch, count, x.shape[-1] // features, features).transpose(0, 2, 1, 3)

    def project(
        self, x: Float[Array, "*N D"], batch: int, heads_per_tile: int | None = None
    ) -> tuple[Float[Array, "B H T K"], Float[Array, "B H T K"], Float[Array, "B H T K"]]:
        """Returns queries, keys and values of `x`, of `batch` rows; `heads_per_tile` as for
        `KVCache`."""
        parts = (
            jnp.split(self.qkv(x), 3, axis=-1)
            if self.fused
            else (self.query(x), self.key(x), self.value(x))
        )
        query, key, value = (self._split(part, batch, heads_per_tile) for part in parts)
        return query, key, value

    def project_key_value(
        self, x: Encoded, valid: Mask | None = None, heads_per_tile: int | None = None
    ) -> KVCache:
        """Returns the keys and values of cross-attention; `valid` as for `apply_kernel`."""
        key, value = (
            self._split(part, len(x), heads_per_tile)
            for part in (self.key(x, valid), self.value(x, valid))
        )
        return KVCache(key, value, heads_per_tile=heads_per_tile)

    def to_cache(
        self,
        x: Float[Array, "*N D"],
        norm: Callable,
        cache: KVCache | None,
        positions: PerRow | None,
        mask: Seen,
        bias: Bias = None,
        divisor: float = 1.0,
        valid: Valid = None,
        dropped: Callable = lambda y: y,
        nodes: AnyNodes | None = None,
        count: int | None = None,
    ) -> tuple[Float[Array, "*N D"], KVCache]:
        """Returns `x + dropped(self-attention of norm(x))`, and the cache with the new keys and
        values.

        Args:
          x: states of T tokens for each of B rows, `[B, T, D]`, or, but for `native`, `[B·T, D]`.
          cache: keys and values of earlier tokens; None: `x` is whole sequences, `[B, T, D]`.
          positions: the first slot of the cache that each row writes.
          mask, bias: as for `attend`. With `native` and a cache, the mask is not read, and the bias
            is that of all query positions, `[S, H, S]`.
          divisor: number by which queries are divided.
          valid: as for `apply_kernel`; the live positions of a row come first.
          dropped: dropout.
          nodes: where the T tokens lie if they are nodes of trees, in place of `positions`. With
            `native` the bias is then that of the last of P query positions, `[H, P]`.
          count: how many of the T tokens are written to the cache; the others fill tiles. None:
            all.
        """
        if self.native and cache is not None:
            # Positions that are not live need not be cleared: the next product does not read them.
            qkv, key, value = (
                self.qkv.with_packed_weights(x, valid, norm.before(), clear=False),
                cache.key,
                cache.value,
            )
            if nodes is None:
                found = packed_weights.attend_to_cache(
                    qkv, key, value, bias, positions, divisor, valid, clear=False
                )
            else:
                found = packed_weights.attend_to_nodes(
                    qkv, key, value, bias, nodes, divisor, valid, clear=False
                )
            attended, key, value = found
            return self.out.with_packed_weights(attended, valid, residual=x), cache.replace(
                key=key, value=value
            )
        if (
            cache is not None
            and nodes is None
            and self.fused
            and gpu_attention.fits(cache, _per_row(x, cache))
        ):
            return self._to_cache_of_gpu(x, norm, cache, positions, mask, bias, divisor, dropped)
        batch, heads_per_tile = (
            (len(x), None) if cache is None else (cache.batch, cache.heads_per_tile)
        )
        query, key, value = self.project(norm(x), batch, heads_per_tile)
        parts = query, key[:, :, :count], value[:, :, :count]
        attended, cache = self._attended_to_cache(
            *parts, cache, positions, mask, bias, divisor, nodes
        )
        return x + dropped(self.out(attended.reshape(*x.shape[:-1], -1))), cache

    def _attended_to_cache(
        self,
        query,
        key,
        value,
        cache: KVCache | None,
        positions: PerRow | None,
        mask: Seen,
        bias: Bias,
        divisor: float,
        nodes: AnyNodes | None,
    ) -> tuple[States, KVCache]:
        """Returns the output of XLA's attention, before the last product, and the cache; arguments
        as for `to_cache`."""
        query = query if divisor == 1 else query / jnp.asarray(divisor, query.dtype)
        if cache is None:
            cache = KVCache(key, value)
        elif nodes is not None:
            cache = cache.append_nodes(key, value, nodes.starts)
        else:
            cache = cache.append(key, value, positions)
        return self.attend(query, cache, mask, bias), cache

    def _to_cache_of_gpu(
        self,
        x: Float[Array, "*N D"],
        norm: Callable,
        cache: KVCache,
        positions: PerRow | None,
        mask: Seen,
        bias: Bias,
        divisor: float,
        dropped: Callable,
    ) -> tuple[Float[Array, "*N D"], KVCache]:
        """Does what `to_cache` does, on an NVIDIA GPU by a kernel."""

        def by_xla(qkv, key, value, bias, positions, mask):
            parts = (
                self._split(part, cache.batch, cache.heads_per_tile)
                for part in jnp.split(qkv, 3, axis=-1)
            )
            before = cache.replace(key=key, value=value)
            attended, after = self._attended_to_cache(
                *parts, before, positions, mask, bias, divisor, None
            )
            return attended, after.key, after.value

        def by_kernel(qkv, key, value, bias, positions, mask):
            return gpu_attention.attend_to_cache(qkv, key, value, bias, positions, divisor)

        qkv = self.qkv(norm(x))
        given = (
            qkv.reshape(cache.batch, -1, qkv.shape[-1]),
            cache.key,
            cache.value,
            bias,
            positions,
            mask,
        )
        attended, key, value = jax.lax.platform_dependent(*given, cuda=by_kernel, default=by_xla)
        return x + dropped(self.out(attended.reshape(*x.shape[:-1], -1))), cache.replace(
            key=key, value=value
        )

    def to_encoded(
        self,
        x: Float[Array, "*N D"],
        norm: Callable,
        cross: KVCache,
        mask: Mask,
        valid: Valid = None,
        dropped: Callable = lambda y: y,
    ) -> Float[Array, "*N D"]:
        """Returns `x + dropped(cross-attention of norm(x))`; `mask` is True at tokens, which come
        first in each row."""
        if self.native:
            query = self.query.with_packed_weights(x, valid, norm.before(), clear=False)
            attended = packed_weights.attend_to_encoded(
                query, cross.key, cross.value, _lengths(mask), valid, clear=False
            )
            return self.out.with_packed_weights(attended, valid, residual=x)
        query = self.query(norm(x))

        def by_xla(query, key, value, mask):
            if cross.heads_per_tile is not None:
                # Else a TPU's compiler would transpose the product, and for that copy its kernel at
                # the beginning of every program.
                query = jax.lax.platform_dependent(
                    query, tpu=jax.lax.optimization_barrier, default=lambda query: query
                )
            keys = cross.replace(key=key, value=value)
            return self.attend(
                self._split(query, cross.batch, cross.heads_per_tile), keys, mask[:, None, None, :]
            )

        def by_kernel(query, key, value, mask):
            query = query.reshape(cross.batch, -1, query.shape[-1])
            return gpu_attention.attend_to_encoded(query, key, value, _lengths(mask))

        given = query, cross.key, cross.value, mask
        if gpu_attention.fits(cross, _per_row(x, cross)):
            attended = jax.lax.platform_dependent(*given, cuda=by_kernel, default=by_xla)
        else:
            attended = by_xla(*given)
        return x + dropped(self.out(attended.reshape(*x.shape[:-1], -1)))

    def to_inputs(
        self,
        x: Encoded,
        norm: Callable,
        mask: Mask,
        bias: Float[Array, "L H L"],
        dropped: Callable = lambda y: y,
    ) -> Encoded:
        """Returns `x + dropped(self-attention of norm(x))` in an encoder; `mask` as for
        `to_encoded`."""
        if self.native:
            attended = packed_weights.attend_to_inputs(
                self.qkv.with_packed_weights(x, mask, norm.before(), clear=False),
                bias,
                _lengths(mask),
            )
            return self.out.with_packed_weights(attended, mask, residual=x)
        query, key, value = self.project(norm(x), len(x))
        attended = self.attend(
            query, KVCache(key, value), mask[:, None, None, :], bias.transpose(1, 0, 2)[None]
        )
        return x + dropped(self.out(attended))

    def attend(
        self,
        query: Float[Array, "B H T K"],
        cache: KVCache,
        mask: Bool[Array, "#B 1 #T S"],
        bias: Float[Array, "#B heads T S"] | None = None,
    ) -> States:
        """Returns the output of attention before the last product, by XLA.

        Args:
          cache: keys, which may be anything where `mask` is False, and values, which must be finite
            everywhere.
          mask: True where a query attends to a key.
          bias: position bias, added to the scores.
        """
        heads_per_tile, batch, query = (
            cache.heads_per_tile or 1,
            query.shape[0],
            spread(query, cache.heads_per_tile or 1),
        )
        query = query if cache.key.ndim == 4 else query[0]
        einsum = functools.partial(jnp.einsum, precision=precision_of(query.dtype))
        scores = einsum(
            "...htk,...hsk->...hts", query, cache.key, preferred_element_type=jnp.float32
        )
        shape = scores.shape
        if heads_per_tile > 1:
            mask = jnp.tile(mask, (1, 1, heads_per_tile if mask.shape[2] > 1 else 1, 1))
            bias = None if bias is None else bias.reshape(len(bias), *shape[-3:])
        if bias is not None and len(bias) == len(mask):
            # One array for both, the same in all layers: with two, a TPU's compiler makes three
            # kernels of the scores and their weights, in the place of one. A mask is still needed:
            # the score of a stale key may be NaN.
            bias = jnp.where(mask, bias.astype(jnp.float32), MASKED)
            mask = bias != MASKED
        scores = scores if bias is None else scores + bias.astype(jnp.float32)
        weights = (
            jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1)
            .astype(self.dtype)
            .reshape(shape)
        )
        if cache.heads_per_tile is None:
            output = einsum("...hts,...hsk->...thk", weights, cache.value)
        else:
            output = einsum(
                "...hts,...hsk->...htk", weights, cache.value, preferred_element_type=jnp.float32
            )
            output = jnp.swapaxes(gather(output, heads_per_tile).astype(self.dtype), -3, -2)
        return output.reshape(batch, -1, self.heads * self.features)


def _per_row(x: Float[Array, "*N D"], cache: KVCache) -> int:
    """Returns T, the tokens of each row."""
    return math.prod(x.shape[:-1]) // cache.batch


def _lengths(mask: Mask) -> PerRow:
    return jnp.sum(mask.astype(jnp.int32), axis=-1)
