"""Attention of every family: projections, norms and rotation of heads, and the output.

What depends on the device, scores included, is asked of a `Backend`. The letters of axes are in
`backends/axes.py`.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from specdec_jax.backends import xla
from specdec_jax.backends.axes import AnyStates, Bias, Encoded, Mask, Rotation, States, Valid
from specdec_jax.backends.backend import Backend
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.backends.xla import AttentionShape, DecoderCall
from specdec_jax.models.block_options import BlockOptions, LayerKind
from specdec_jax.models.layers import fan_in_normal
from specdec_jax.models.rotary import rotate


class Attention(nn.Module):
    """Multi-head attention of T queries per row over given keys and values.

    With `joint` the weights of queries, keys and values are one matrix `qkv [D, 3·H·K]`, and with
    `joint_cross` those of keys and values, `kv [D, 2·G·K]`. Every `attend_to_…` returns
    `x + dropout(attention of norm(x))`. `kind` is that of a self-attention.
    """

    options: BlockOptions
    backend: Backend
    joint: bool
    kind: LayerKind = LayerKind()
    joint_cross: bool = False

    def setup(self):
        options, dense = self.options, self.options.make_dense
        size = options.num_heads * options.head_dim
        kv_size = self.shape.kv_heads * options.head_dim

        # T5 folds the 1/√K of the scores into the initial query weight.
        def init_query(*shape: Any) -> jax.Array:
            return fan_in_normal(*shape) / np.sqrt(options.head_dim)

        self.query = dense(size, kernel_init=init_query)
        self.key = dense(kv_size, kernel_init=fan_in_normal)
        self.value = dense(kv_size, kernel_init=fan_in_normal)
        self.qkv, self.kv = dense(3 * size), dense(2 * kv_size)
        self.out = dense(options.emb_dim, kernel_init=fan_in_normal)
        packed = self.backend.packs_weights
        self.output_norm = options.make_output_norm(packed)
        if options.qk_norm:
            self.query_norm, self.key_norm = options.make_norm(packed), options.make_norm(packed)

    @property
    def shape(self) -> AttentionShape:
        """The shape of the attention."""
        kind = self.kind
        return self.options.attention_shape._replace(window=kind.window, ahead=kind.ahead)

    def _project(self, x: AnyStates, rotation: Rotation | None) -> xla.Projected:
        if self.joint:
            return (self.qkv(x),)
        query, key, value = self.query(x), self.key(x), self.value(x)
        normed = self.options.qk_norm
        query = self._place(query, self.query_norm if normed else None, rotation)
        return query, self._place(key, self.key_norm if normed else None, rotation), value

    def _place(self, x: AnyStates, norm: Callable | None, rotation: Rotation | None) -> AnyStates:
        """Returns queries or keys with each head normalised, and rotated."""
        if norm is None and rotation is None:
            return x
        by_heads = x.reshape(*x.shape[:-1], -1, self.options.head_dim)
        by_heads = by_heads if norm is None else norm(by_heads)
        return (by_heads if rotation is None else rotate(by_heads, rotation)).reshape(x.shape)

    def _project_after(
        self, norm: Callable, x: AnyStates, valid: Valid, rotation: Rotation | None
    ) -> xla.Projected:
        """Returns queries, keys and values of `norm(x)`, with packed weights in one array."""
        if not self.backend.packs_weights:
            return self._project(norm(x), rotation)
        if self.joint:
            return (self.qkv.apply_after(norm, x, valid),)
        dense, normed = (self.query, self.key, self.value), self.options.qk_norm
        query, key, value = (part.apply_after(norm, x, valid) for part in dense)
        norms = [part.before() for part in (self.query_norm, self.key_norm)] if normed else None
        how = self.options.head_dim, norms, rotation, valid
        return (packed_weights.join_heads(query, key, value, *how),)

    def _add(
        self, x: AnyStates, attended: Float[Array, "..."], valid: Valid, dropout: Callable
    ) -> AnyStates:
        return self.out.add_to(x, attended, valid, dropout, self.output_norm)

    def attend_to_cache(
        self,
        x: AnyStates,
        norm: Callable,
        cache: KVCache,
        call: DecoderCall,
        bias: Bias,
        dropout: Callable,
    ) -> tuple[AnyStates, KVCache]:
        """Attends to earlier tokens and the call's own; also returns the cache with these.

        Args:
          x: states of T tokens for each of B rows, `[B, T, D]`, or for XLA `[B·T, D]`.
          norm: the norm before the block.
          cache: keys and values of earlier tokens.
          call: where the T tokens lie.
          bias: added to the scores; with the CPU's kernels that of the last of P positions, from
            which each query's is taken by distance.
          dropout: dropout.
        """
        qkv = self._project_after(norm, x, call.valid, call.rotation)
        attended, cache = self.backend.attend_to_cache(qkv, cache, call, bias, self.shape)
        return self._add(x, attended, call.valid, dropout), cache

    def attend_to_sequence(
        self,
        x: States,
        norm: Callable,
        mask: Bool[Array, "1 1 T T"],
        bias: Bias,
        dropout: Callable,
        rotation: Rotation | None = None,
        more: tuple[KVCache, Mask] | None = None,
    ) -> States:
        """Attends within whole sequences, without a cache, and to `more` as in `DecoderCall`."""
        qkv = self._project(norm(x), rotation)
        attended = xla.attend_to_sequence(qkv, mask, bias, self.shape, more)
        return self._add(x, attended, None, dropout)

    def project_key_value(self, x: Encoded, valid: Mask | None, backend: Backend) -> KVCache:
        """Returns the keys and values of an encoder's output, in the layout of a backend."""
        if self.joint_cross:
            keys, values = self.kv.keys_and_values(x, self.options.head_dim, valid)
            return KVCache(self.key_norm(keys) if self.options.qk_norm else keys, values)
        key = self._place(self.key(x, valid), self.key_norm if self.options.qk_norm else None, None)
        return backend.cross_cache(key, self.value(x, valid), self.shape)

    def attend_to_encoded(
        self,
        x: AnyStates,
        norm: Callable,
        cross: KVCache,
        mask: Mask,
        valid: Valid,
        dropout: Callable,
        backend: Backend,
    ) -> AnyStates:
        """Attends to the encoder's output; `mask` is True at tokens, which come first in a row.

        `backend` made `cross`.
        """
        packed = self.backend.packs_weights
        query = self.query.apply_after(norm, x, valid) if packed else self.query(norm(x))
        attended = backend.attend_to_encoded(query, cross, mask, valid, self.shape)
        return self._add(x, attended, valid, dropout)

    def attend_to_inputs(
        self,
        x: Encoded,
        norm: Callable,
        mask: Mask,
        bias: Float[Array, "H Z"] | None,
        dropout: Callable,
        rotation: Rotation | None = None,
    ) -> Encoded:
        """Attends to all tokens of an encoder's inputs; `mask` as above."""
        qkv = self._project_after(norm, x, mask, rotation)
        attended = self.backend.attend_to_inputs(qkv, mask, bias, self.shape)
        return self._add(x, attended, mask, dropout)
