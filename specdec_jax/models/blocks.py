"""Encoder and decoder of every family, whose `BlockOptions` state what they are made of.

From small to large: feed-forward block, layers, stacks, and the two networks, `DecoderOnly` and
`EncoderDecoder`. A family's own file has its configuration and fills the options.
Names of submodules are those of T5X's parameters. What depends on the device is asked of a
`Backend`. The letters of axes are in `backends/axes.py`.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from specdec_jax.backends import xla
from specdec_jax.backends.axes import (
    AnyStates,
    Bias,
    Encoded,
    Inputs,
    Layers,
    Logits,
    Mask,
    PerRow,
    Rotation,
    States,
    TokenAndLogprob,
    Tokens,
    Valid,
)
from specdec_jax.backends.backend import Backend
from specdec_jax.backends.cpu.packed_weights import Before, PackedWeight
from specdec_jax.backends.kv_cache import KVCache, pad
from specdec_jax.backends.matmul import product
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.backends.xla import ACTIVATION_FUNCTIONS, DecoderCall
from specdec_jax.models.attention import Attention
from specdec_jax.models.block_options import BlockOptions, LayerKind
from specdec_jax.models.family import FamilyModule, LogitsAt, ModelConfig, Places
from specdec_jax.models.layers import Dense
from specdec_jax.models.relative_bias import (
    RelativePositionBias,
    make_mask_and_biases,
    make_window_mask,
)


class MLP(nn.Module):
    """A feed-forward block of one activation, or of the product of two (gated)."""

    options: BlockOptions
    backend: Backend

    @nn.compact
    def __call__(
        self,
        x: AnyStates,
        norm: Callable,
        dropout: Callable,
        deterministic: bool,
        valid: Valid = None,
    ) -> AnyStates:
        """Returns `x + dropout(block(norm(x)))`."""
        options, names = self.options, self.options.activations
        count, dense = len(names), options.make_dense
        joint, packed = "wi" if count == 1 else "wi_fused", self.backend.packs_weights
        output_norm = options.make_output_norm(packed, "output_norm")
        if packed:
            hidden = dense(count * options.mlp_dim, name=joint).apply_after(norm, x, valid)
            gate = Before("activation" if count == 1 else "gate", activations=names)
            output = dense(x.shape[-1], name="wo")
            return output.add_to(x, hidden, valid, dropout, output_norm, gate)
        residual, x = x, norm(x)
        if self.backend.joins_weights or count == 1:
            parts = jnp.split(dense(count * options.mlp_dim, name=joint)(x), count, axis=-1)
        else:
            parts = [dense(options.mlp_dim, name=f"wi_{i}")(x) for i in range(count)]
        activated = (ACTIVATION_FUNCTIONS[name](part) for name, part in zip(names, parts))
        hidden = functools.reduce(operator.mul, activated)
        rate = options.dropout_rate if options.inner_dropout else 0.0
        hidden = nn.Dropout(rate)(hidden, deterministic=deterministic)
        return dense(x.shape[-1], name="wo").add_to(residual, hidden, valid, dropout, output_norm)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward block, each with a norm before it, after it, or both."""

    options: BlockOptions
    backend: Backend
    kind: LayerKind = LayerKind()

    @nn.compact
    def __call__(
        self, x: Encoded, mask: Mask, bias: Bias, rotation: Rotation | None, deterministic: bool
    ) -> Encoded:
        """Runs the layer; `bias` is None where the layer has its own."""
        options, length = self.options, x.shape[1]
        if options.relative_bias_per_layer:
            bias = options.make_relative_bias(True, name="relpos_bias").by_distance(length)
        dropout = functools.partial(nn.Dropout(options.dropout_rate), deterministic=deterministic)
        joint = options.joins_attention and self.backend.joins_weights
        packed = options.packs_norms(self.backend)
        name = options.encoder_attention
        attention = Attention(options, self.backend, joint, self.kind, name=name)
        norm = options.make_norm(packed, name=options.name_norm("attention"))
        before, after = options.split_norm(norm)
        x = after(attention.attend_to_inputs(x, before, mask, bias, dropout, rotation), mask)
        norm = options.make_norm(packed, name=options.name_norm("mlp"))
        before, after = options.split_norm(norm)
        mlp = MLP(options, self.backend, name="mlp")
        return after(mlp(x, before, dropout, deterministic, mask), mask)


class Encoder(nn.Module):
    """All layers of an encoder, and the norm after them."""

    options: BlockOptions
    backend: Backend

    @nn.compact
    def __call__(self, x: Encoded, mask: Mask, deterministic: bool = True) -> Encoded:
        """Runs all layers over the embeddings `x` and normalises; `mask` is True at tokens."""
        options, length, bias = self.options, x.shape[1], None
        packed = self.backend.packs_weights
        if options.relative_buckets and not options.relative_bias_per_layer:
            bias = options.make_relative_bias(True, name="relpos_bias").by_distance(length)
        if options.num_positions is not None:
            table = options.make_position_table(packed, "position_embedder")
            x = x + table(jnp.arange(length))
        if options.embedding_norm:
            x = options.make_norm(packed, name="embedding_norm")(x, mask)
        dropout = nn.Dropout(options.dropout_rate)
        x = dropout(x, deterministic)
        places, kinds = jnp.arange(length), options.layer_kinds
        rotations = {kind: options.make_rotation(kind, places, packed) for kind in kinds}
        for i in range(options.num_encoder_layers):
            kind = options.find_kind(i)
            layer = EncoderLayer(options, self.backend, kind, name=f"layers_{i}")
            x = layer(x, mask, bias, rotations[kind], deterministic)
        if options.final_norm:
            x = options.make_norm(packed, name="encoder_norm")(x, mask)
        return dropout(x, deterministic) if options.inner_dropout else x


@flax.struct.dataclass
class DecoderCache:
    """The decoder's cache, which it keeps between calls.

    Attributes:
      layers: the cache of each layer's self-attention.
      cross: keys and values of each layer's cross-attention, computed once from the encoder's
        output, with L for S; none without cross-attention.
      cross_mask: True at the tokens of the encoder's input; None without cross-attention.
      position_bias: the relative bias of every layer, or one that all share, by distance: with the
        CPU's own kernels, and for nodes of trees, that of the last of P query positions; else
        shifted rows, from which calls slice theirs.
      rules: how the cache lies on a mesh; None: on one device.
    """

    layers: tuple[KVCache, ...]
    cross: tuple[KVCache, ...] = ()
    cross_mask: Mask | None = None
    position_bias: tuple[Float32[Array, "H P"] | Float32[Array, "shifts H W"], ...] = ()
    rules: ShardingRules | None = flax.struct.field(pytree_node=False, default=None)

    def move_nodes(
        self, sources: Int[Array, "B M"], starts: PerRow, backend: Backend
    ) -> "DecoderCache":
        """Does what `Backend.move_slots` does, in every layer."""
        layers = tuple(backend.move_slots(layer, sources, starts) for layer in self.layers)
        return self.replace(layers=layers)

    def with_layers(self, layers: tuple[KVCache, ...]) -> "DecoderCache":
        """Returns the cache with these `layers`, which are zeros until a token is fed.

        Continuous batching leaves them out of the rows that it starts.
        """
        return self.replace(layers=layers)

    def repeated(self, copies: int) -> "DecoderCache":
        """Returns the cache of a decoder-only network with `copies` rows for each row."""
        return self.replace(layers=tuple(layer.repeated(copies) for layer in self.layers))

    def constrain_sharding(self) -> "DecoderCache":
        """Returns the cache with its layout on the mesh fixed; under jit."""
        rules = self.rules
        if rules is None:
            return self
        layers, cross = (
            tuple(layer.constrain(rules) for layer in layers)
            for layers in (self.layers, self.cross)
        )
        mask = self.cross_mask
        mask = None if mask is None else rules.constrain(mask, "batch", "length")
        axes = "length", "heads", "length"
        biases = tuple(rules.constrain(bias, *axes[-bias.ndim :]) for bias in self.position_bias)
        return DecoderCache(layers, cross, mask, biases, rules)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention if there is an encoder, and feed-forward block."""

    options: BlockOptions
    backend: Backend
    kind: LayerKind = LayerKind()

    def setup(self):
        options, backend = self.options, self.backend
        if options.relative_bias_per_layer:
            self.relpos_bias = options.make_relative_bias(False)
        packed = options.packs_norms(backend)
        for block in ("self_attention", "mlp", "cross_attention")[: 2 + options.cross_attention]:
            setattr(self, options.name_norm(block), options.make_norm(packed))
        joint = options.joint_attention or (options.joins_attention and backend.joins_weights)
        setattr(self, options.self_attention, Attention(options, backend, joint, self.kind))
        if options.cross_attention:
            cross = Attention(options, backend, joint, joint_cross=backend.packs_weights)
            self.encoder_decoder_attention = cross
        self.mlp = MLP(options, backend)
        self.dropout = nn.Dropout(options.dropout_rate)

    def cross_cache(self, encoded: Encoded, mask: Mask | None, backend: Backend) -> KVCache:
        """Returns keys and values of the encoder's output, in the layout of a backend."""
        merged = self.options.merged_attention
        attention = self._self_attention()[0] if merged else self.encoder_decoder_attention
        return attention.project_key_value(encoded, mask, backend)

    def step(
        self,
        x: AnyStates,
        cache: KVCache,
        call: DecoderCall,
        bias: Bias,
        cross: KVCache | None,
        cross_mask: Mask | None,
    ) -> tuple[AnyStates, KVCache]:
        """Runs the layer over T queries per row."""
        attention, before, after = self._self_attention()
        dropout = functools.partial(self.dropout, deterministic=True)
        if self.options.merged_attention:
            assert cross is not None and cross_mask is not None
            call, cross = call._replace(more=(cross, cross_mask)), None
        x, cache = attention.attend_to_cache(x, before, cache, call, bias, dropout)
        x = after(x, call.valid)
        return self._finish(x, cross, cross_mask, True, call.valid, self.backend), cache

    def __call__(
        self,
        x: States,
        mask: Bool[Array, "1 1 T T"],
        bias: Bias,
        encoded: Encoded | None,
        cross_mask: Mask | None,
        deterministic: bool,
        rotation: Rotation | None,
    ) -> States:
        """Runs the layer over whole sequences, teacher-forced."""
        attention, before, after = self._self_attention()
        # Whole sequences need no accelerator's layout of caches.
        backend = self.backend if self.backend.packs_weights else Backend()
        cross = None if encoded is None else self.cross_cache(encoded, None, backend)
        dropout, more = functools.partial(self.dropout, deterministic=deterministic), None
        if self.options.merged_attention:
            assert cross is not None and cross_mask is not None
            more, cross = (cross, cross_mask), None
        x = attention.attend_to_sequence(x, before, mask, bias, dropout, rotation, more)
        x = after(x)
        return self._finish(x, cross, cross_mask, deterministic, None, backend)

    def _self_attention(self) -> tuple[Attention, Any, Any]:
        return getattr(self, self.options.self_attention), *self._norms("self_attention")

    def _norms(self, block: str) -> tuple[Any, Any]:
        """Returns what stands before a block and after it."""
        return self.options.split_norm(getattr(self, self.options.name_norm(block)))

    def _finish(
        self,
        x: AnyStates,
        cross: KVCache | None,
        cross_mask: Mask | None,
        deterministic: bool,
        valid: Valid,
        backend: Backend,
    ) -> AnyStates:
        """Runs what follows self-attention."""
        dropout = functools.partial(self.dropout, deterministic=deterministic)
        if cross is not None:
            before, after = self._norms("cross_attention")
            attention = self.encoder_decoder_attention
            x = attention.attend_to_encoded(x, before, cross, cross_mask, valid, dropout, backend)
            x = after(x, valid)
        before, after = self._norms("mlp")
        return after(self.mlp(x, before, dropout, deterministic, valid), valid)


class Decoder(nn.Module):
    """All layers of a decoder, the norm after them, and the head."""

    options: BlockOptions
    backend: Backend

    def setup(self):
        options, packed = self.options, self.backend.packs_weights
        if options.num_positions is not None:
            self.position_embedder = options.make_position_table(packed)
        if options.relative_buckets and not options.relative_bias_per_layer:
            self.relpos_bias = options.make_relative_bias(False)
        layers = range(options.num_decoder_layers)
        self.layers = [DecoderLayer(options, self.backend, options.find_kind(i)) for i in layers]
        if options.embedding_norm:
            self.embedding_norm = options.make_norm(packed)
        if options.final_norm:
            self.decoder_norm = options.make_norm(packed)
        if options.logits_bias and not self.has_variable("params", "logits_bias"):
            self.param("logits_bias", nn.initializers.zeros, (options.vocab_size,))
        if not options.tied_head:
            dtypes = dict(output_dtype=jnp.float32, matmul_dtype=options.matmul_dtype)
            self.logits_dense = Dense(options.vocab_size, options.dtype, **dtypes)
        self.dropout = nn.Dropout(options.dropout_rate)

    def _map_tables(
        self, make: Callable[[RelativePositionBias], Float32[Array, "..."]]
    ) -> tuple[Float32[Array, "..."], ...]:
        """Returns what `make` gives for the bias table of each layer, or for one that all share."""
        if not self.options.relative_buckets:
            return ()
        if not self.options.relative_bias_per_layer:
            return (make(self.relpos_bias),)
        return tuple(make(layer.relpos_bias) for layer in self.layers)

    def _spread_biases(self, biases: Sequence) -> Sequence:
        """Returns each layer's bias, where `biases` has one for each, one for all, or none."""
        if self.options.relative_bias_per_layer:
            return biases
        return [*(biases or [None])] * len(self.layers)

    def init_cache(
        self, rows: int, slots: int, copies: int, encoded: Encoded | None, cross_mask: Mask
    ) -> DecoderCache:
        """Makes the cache for `rows` inputs; other arguments are as for `FamilyModule.prefill`."""
        shape, backend = self.options.attention_shape, self.backend
        empty = tuple(backend.empty_cache(rows * copies, slots, shape) for _ in self.layers)
        if not (self.options.cross_attention or self.options.merged_attention):
            return DecoderCache(empty, rules=backend.rules)

        cross = tuple(layer.cross_cache(encoded, cross_mask, backend) for layer in self.layers)
        if copies > 1:
            repeat = functools.partial(jnp.repeat, repeats=copies, axis=0)
            cross, cross_mask = jax.tree.map(repeat, (cross, cross_mask))
        slots, packed = empty[0].slots, backend.packs_weights
        biases = self._map_tables(
            lambda table: table.last_query_bias(slots) if packed else table.shifted(slots)
        )
        return DecoderCache(empty, cross, cross_mask, biases, backend.rules)

    def node_cache(self, cache: DecoderCache, slots: int, positions: int) -> DecoderCache:
        """Does what `Network.node_cache` does; keeps the bias of the last query position only."""
        layers = tuple(self.backend.widen(layer, slots) for layer in cache.layers)
        biases = self._map_tables(lambda table: table.last_query_bias(positions))
        return cache.replace(layers=layers, position_bias=biases)

    def step(
        self,
        x: States,
        positions: PerRow | None,
        cache: DecoderCache,
        layers: Layers = None,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
    ) -> tuple[States, DecoderCache]:
        """Runs `layers` (see `FamilyModule`) over the T tokens with the embeddings `x`.

        The arguments are those of `FamilyModule.decode_states`. Returns the normalised states and
        the new cache, in which the layers that were not run stay as they are.
        """
        (batch, count, width), written = x.shape, list(cache.layers)
        mask, biases, padding = None, list(cache.position_bias), 0
        if nodes is None:
            assert positions is not None, "a call has nodes or positions"
            places = positions[:, None] + jnp.arange(count)
        else:
            places = nodes.positions
        if self.options.num_positions is not None:
            x = x + self.position_embedder(places, valid)
        if self.options.embedding_norm:
            x = self.embedding_norm(x, valid)
        if not self.backend.packs_weights:
            # A TPU's compiler multiplies a matrix [B·T, D] faster than rows [B, T, D].
            slots = written[0].slots
            if self.options.relative_buckets:
                padding = self.backend.count_padding(batch, count)
            mask, biases = make_mask_and_biases(biases, positions, count, slots, nodes, padding)
            x = pad(x, 1, padding).reshape(-1, width)
            valid = None if valid is None or padding else valid.reshape(-1)
        call = DecoderCall(positions, mask, valid, nodes, count)
        # Nodes may lie alike in all rows.
        places = jnp.broadcast_to(places, (batch, count))
        calls = self._spread_call(call, places, written[0].slots)
        cross = cache.cross or [None] * len(self.layers)
        spread = self._spread_biases(biases)
        for i in layers if isinstance(layers, tuple) else range(len(self.layers))[:layers]:
            given = calls[self.layers[i].kind], spread[i], cross[i], cache.cross_mask
            x, written[i] = self.layers[i].step(x, written[i], *given)
        states = self._normalize(x, valid).reshape(batch, count + padding, width)
        return states[:, :count] if padding else states, cache.replace(layers=tuple(written))

    def _spread_call(
        self, call: DecoderCall, places: Int[Array, "B T"], slots: int
    ) -> dict[LayerKind, DecoderCall]:
        """Returns the call of each kind of layers, for tokens at the positions `places`."""
        calls = {}
        for kind in self.options.layer_kinds:
            mask, flat, packed = call.mask, places.reshape(-1), self.backend.packs_weights
            if kind.window is not None and mask is not None:
                mask &= make_window_mask(places, call.nodes, slots, kind.window)
            rotation = self.options.make_rotation(kind, flat, packed)
            calls[kind] = call._replace(mask=mask, rotation=rotation)
        return calls

    def __call__(
        self,
        x: States,
        encoded: Encoded | None = None,
        encoder_mask: Mask | None = None,
        deterministic: bool = True,
    ) -> States:
        """Returns the normalised states of whole sequences with the embeddings `x`."""
        options, length = self.options, x.shape[1]
        if options.num_positions is not None:
            x = x + self.position_embedder(jnp.arange(length))
        if options.embedding_norm:
            x = self.embedding_norm(x)
        biases = self._map_tables(lambda table: table(length, length).transpose(1, 0, 2)[None])
        places, mask = jnp.arange(length)[None], jnp.tril(jnp.ones((length, length), bool))
        calls = self._spread_call(DecoderCall(None, mask[None, None]), places, length)
        x = self.dropout(x, deterministic)
        for layer, bias in zip(self.layers, self._spread_biases(biases)):
            call = calls[layer.kind]
            x = layer(x, call.mask, bias, encoded, encoder_mask, deterministic, call.rotation)
        x = self._normalize(x)
        return self.dropout(x, deterministic) if options.inner_dropout else x

    def _normalize(self, x: AnyStates, valid: Valid = None) -> AnyStates:
        return self.decoder_norm(x, valid) if self.options.final_norm else x

    def logits(
        self, x: States, embedding: Float[Array, "rows D"] | PackedWeight, valid: Valid = None
    ) -> Logits:
        """Applies the head: returns the logits of normalised states `x`."""
        x, bias, cap = self._scale(x), self._logits_bias(), self.options.logits_cap
        if self.options.tied_head:
            assert not isinstance(embedding, PackedWeight), "then the head is this weight, too"
            logits = product(x, embedding.astype(x.dtype), ((2,), (1,)))
        elif self.backend.packs_weights:
            return self.logits_dense.apply_packed(x, valid, bias=bias, cap=cap)
        else:
            logits = self.logits_dense(x, valid)
        logits = logits if bias is None else logits + bias.astype(logits.dtype)
        return xla.apply_cap(logits, cap)

    def greedy_token_and_logprob(self, x: States, valid: Valid, normalize: bool) -> TokenAndLogprob:
        """Does what `Network.greedy_token_and_logprob` does, for normalised states `x`."""
        head, how = self.logits_dense, (self._logits_bias(), self.options.logits_cap)
        return head.greedy_token_and_logprob(self._scale(x), valid, normalize, *how)

    def _logits_bias(self) -> Float[Array, " V"] | None:
        """Returns the bias of the logits, or of those of a shortlist; None without one."""
        return self.get_variable("params", "logits_bias")

    def _scale(self, x: States) -> States:
        divide = self.options.scales_outputs
        return x / jnp.sqrt(self.options.emb_dim).astype(x.dtype) if divide else x


class DecoderOnly(FamilyModule):
    """A decoder without an encoder, such as GPT-2."""

    config: ModelConfig
    backend: Backend = Backend()

    def setup(self):
        options = self.config.block_options()
        packed = self.backend.packs_weights
        self.token_embedder = options.make_embedder(packed)
        self.decoder = Decoder(options, self.backend)

    def prefill(
        self,
        inputs: Inputs,
        mask: Mask,
        slots: int,
        copies: int = 1,
        encoded: Encoded | None = None,
    ) -> DecoderCache:
        return self.decoder.init_cache(len(inputs), slots, copies, encoded, mask)

    def decode_states(
        self,
        tokens: Tokens,
        positions: PerRow | None,
        cache: DecoderCache,
        layers: Layers = None,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
    ) -> tuple[States, DecoderCache]:
        x = self.embed(tokens, valid)
        return self.decode_embedded(x, positions, cache, layers, valid, nodes)

    def decode_embedded(
        self,
        x: States,
        positions: PerRow | None,
        cache: DecoderCache,
        layers: Layers = None,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
    ) -> tuple[States, DecoderCache]:
        """Does what `decode_states` does, for tokens with the embeddings `x`."""
        return self.decoder.step(x, positions, cache, layers, valid, nodes)

    def embed(self, tokens: Tokens, valid: Valid = None) -> States:
        """Returns the embeddings of the decoder's tokens."""
        return self.token_embedder(tokens, valid)

    def node_cache(self, cache: DecoderCache, slots: int, positions: int) -> DecoderCache:
        return self.decoder.node_cache(cache, slots, positions)

    def head(self, states: States, valid: Valid = None) -> Logits:
        return self.decoder.logits(states, self.token_embedder.embedding, valid)

    def greedy_token_and_logprob(
        self, states: States, valid: Valid, normalize: bool
    ) -> TokenAndLogprob:
        """Does what `Network.greedy_token_and_logprob` does."""
        return self.decoder.greedy_token_and_logprob(states, valid, normalize)

    def __call__(
        self, tokens: Tokens, places: Places = None, deterministic: bool = True
    ) -> LogitsAt:
        return self.head_at(self.states(tokens, deterministic), places)

    def states(self, tokens: Tokens, deterministic: bool = True) -> States:
        """Returns teacher-forced states, which `head` takes."""
        return self.decoder(self.embed(tokens), deterministic=deterministic)


class EncoderDecoder(DecoderOnly):
    """An encoder and a decoder that attends to its output, such as T5."""

    def setup(self):
        super().setup()
        options = self.config.encoder_options()
        if options.separate_embeddings:
            self.encoder_embedder = options.make_embedder(self.backend.packs_weights)
        if options.num_encoder_layers:
            self.encoder = Encoder(options, self.backend)

    def encode(self, inputs: Inputs, mask: Mask, deterministic: bool = True) -> Encoded:
        """Runs the encoder on `inputs`, with `mask` True at tokens."""
        separate = self.config.encoder_options().separate_embeddings
        embedder = self.encoder_embedder if separate else self.token_embedder
        return self.encoder(embedder(inputs, mask), mask, deterministic)

    def prefill(
        self,
        inputs: Inputs,
        mask: Mask,
        slots: int,
        copies: int = 1,
        encoded: Encoded | None = None,
    ) -> DecoderCache:
        encoded = self.encode(inputs, mask) if encoded is None else encoded
        return super().prefill(inputs, mask, slots, copies, encoded)

    def dummy_inputs(self) -> tuple:
        tokens, width = jnp.ones((1, 2), jnp.int32), self.config.encoder_dim
        encoded = None if width is None else jnp.zeros((1, 2, width), self.config.dtype)
        return tokens, tokens > 0, tokens, True, encoded

    def __call__(  # type: ignore[override]
        self,
        inputs: Inputs,
        mask: Mask,
        decoder_tokens: Tokens,
        deterministic: bool = True,
        encoded: Encoded | None = None,
    ) -> Logits:
        """Returns teacher-forced logits."""
        return self.head(self.states(inputs, mask, decoder_tokens, deterministic, encoded))

    def states(  # type: ignore[override]
        self,
        inputs: Inputs,
        mask: Mask,
        decoder_tokens: Tokens,
        deterministic: bool = True,
        encoded: Encoded | None = None,
    ) -> States:
        """Returns teacher-forced states, which `head` takes."""
        encoded = self.encode(inputs, mask, deterministic) if encoded is None else encoded
        return self.decoder(self.embed(decoder_tokens), encoded, mask, deterministic)
