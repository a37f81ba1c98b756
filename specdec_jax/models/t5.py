"""T5-family encoder–decoder: T5 1.0, 1.1, LM-adapted, Flan-T5, mT5, umT5, UL2 and ByT5 by
configuration."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from specdec_jax.backends.axes import (
    Bias,
    Encoded,
    Inputs,
    Logits,
    Mask,
    PerRow,
    Seen,
    States,
    TokenAndLogprob,
    Tokens,
    Valid,
)
from specdec_jax.backends.kv_cache import KVCache, padded
from specdec_jax.backends.matmul import product
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.models.config_validation import FieldError, check_fields
from specdec_jax.models.family import FamilyModule, ModelConfig
from specdec_jax.models.layers import Attention, Dense, Embedder, GatedMLP
from specdec_jax.models.norms import RMSNorm
from specdec_jax.models.relative_bias import RelativePositionBias, seen_and_biases
from specdec_jax.models.t5_shapes import t5_shapes


@dataclasses.dataclass(frozen=True)
class T5Config(ModelConfig):
    """The shape of a T5-family network; the fields have T5X's names.

    Attributes:
      vocab_size: rows of the embedding and width V of the logits (T5: 32,128 for 32,100 pieces).
      num_heads, head_dim: H heads of K features; H·K need not equal D.
      emb_dim, mlp_dim: width D, and hidden width of the feed-forward block.
      mlp_activations: names of one activation, ("relu",) for 1.0, or of two for a gated block,
        ("gelu", "linear") for 1.1, ("silu", "linear") for UL2.
      logits_via_embedding: whether the head is the transposed embedding (1.0).
      scale_decoder_outputs: whether decoder outputs are multiplied by 1/√D before the head; None:
        as the field above.
      num_buckets, max_distance: parameters of the relative position bias.
      relative_bias_per_layer: whether every layer has a table of that bias (umT5, T5X's
        `scalable_t5`), or a stack one.
      separate_embeddings: whether the encoder has an embedding of its own; else both stacks share
        one.
      encoder_dim: width of another model's encoder output, to which the decoder attends. The
        network then has no encoder of its own, `num_encoder_layers` is 0, and calls that begin with
        inputs are given that output too.
      dropout_rate: dropout rate in training.
      dtype: name of the computation's dtype, "float32" or "bfloat16".
      matmul_dtype: dtype to which operands of products are rounded (training); None: `dtype`.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    mlp_dim: int
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    logits_via_embedding: bool = False
    scale_decoder_outputs: bool | None = None
    num_buckets: int = 32
    max_distance: int = 128
    encoder_dim: int | None = None
    dropout_rate: float = 0.0
    dtype: str = "float32"
    matmul_dtype: str | None = None
    relative_bias_per_layer: bool = False
    separate_embeddings: bool = False
    family: ClassVar[str] = "t5"
    decoder_only: ClassVar[bool] = False

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        own = self.encoder_dim is None
        if own != (self.num_encoder_layers > 0):
            expected = (
                "at least 1"
                if own
                else "0 with encoder_dim, which says that the encoder is another model's"
            )
            raise FieldError(
                self, "num_encoder_layers", f"got {self.num_encoder_layers}, expected {expected}"
            )
        if self.separate_embeddings and not own:
            raise FieldError(
                self, "separate_embeddings", "got True without an encoder, expected False"
            )
        if self.max_distance <= self.num_buckets // 2:
            expected = f"more than half of num_buckets = {self.num_buckets}"
            raise FieldError(self, "max_distance", f"got {self.max_distance}, expected {expected}")

    def with_own_head(self) -> "T5Config":
        return dataclasses.replace(self.explicit(), logits_via_embedding=False)

    def explicit(self) -> "T5Config":
        return dataclasses.replace(self, scale_decoder_outputs=self.scales_outputs)

    @property
    def scales_outputs(self) -> bool:
        """Whether the decoder's output is multiplied by 1/√D before the head."""
        scale = self.scale_decoder_outputs
        return self.logits_via_embedding if scale is None else scale

    def module(self, fused: bool = False, native: bool = False) -> "T5":
        return T5(self, fused, native)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return t5_shapes(self)

    @classmethod
    def presets(cls) -> dict[str, "T5Config"]:
        return PRESETS


def t5_only(name: str, config: ModelConfig) -> T5Config:
    """Returns `config` if it is a T5's, for functions that need an encoder, such as training; else
    raises ValueError.

    `name` is the argument to blame.
    """
    if isinstance(config, T5Config):
        return config
    kind = "a decoder-only model" if config.decoder_only else f"a {type(config).__name__}"
    raise ValueError(f"{name}: got {kind}, expected a T5")


def _t5_1_0(emb_dim, num_heads, head_dim, layers, mlp_dim):
    return T5Config(32128, emb_dim, num_heads, head_dim, layers, layers, mlp_dim, ("relu",), True)


def _t5_1_1(emb_dim, num_heads, layers, mlp_dim):
    return T5Config(32128, emb_dim, num_heads, 64, layers, layers, mlp_dim)


PRESETS = {
    "t5_1_0/small": _t5_1_0(512, 8, 64, 6, 2048),
    "t5_1_0/base": _t5_1_0(768, 12, 64, 12, 3072),
    "t5_1_0/large": _t5_1_0(1024, 16, 64, 24, 4096),
    "t5_1_0/3b": _t5_1_0(1024, 32, 128, 24, 16384),
    "t5_1_0/11b": _t5_1_0(1024, 128, 128, 24, 65536),
    "t5_1_1/small": _t5_1_1(512, 6, 8, 1024),
    "t5_1_1/base": _t5_1_1(768, 12, 12, 2048),
    "t5_1_1/large": _t5_1_1(1024, 16, 24, 2816),
    "t5_1_1/xl": _t5_1_1(2048, 32, 24, 5120),
    "t5_1_1/xxl": _t5_1_1(4096, 64, 24, 10240),
}


@flax.struct.dataclass
class DecoderCache:
    """The decoder's cache, which it keeps between calls.

    Attributes:
      layers: the cache of each layer's self-attention.
      cross: keys and values of each layer's cross-attention, computed once from the encoder's
        output, with L for S.
      cross_mask: True at the tokens of the encoder's input.
      position_bias: the bias of every layer, or one that all share: with the CPU's own kernels, of
        all query positions; else shifted rows, from which calls slice theirs; for nodes of trees,
        of the last of P query positions.
    """

    layers: tuple[KVCache, ...]
    cross: tuple[KVCache, ...]
    cross_mask: Mask
    position_bias: tuple[
        Float32[Array, "S H S"] | Float32[Array, "shifts H W"] | Float32[Array, "H P"], ...
    ]

    def move_nodes(self, sources: jax.Array, starts: jax.Array, native: bool) -> "DecoderCache":
        """Does what `KVCache.move` does, in every layer."""
        return self.replace(
            layers=tuple(layer.move(sources, starts, native) for layer in self.layers)
        )

    def constrain_sharding(self) -> "DecoderCache":
        """Returns the cache with its layout on the mesh fixed; under jit."""
        rules = self.layers[0].rules
        if rules is None:
            return self
        layers, cross = (
            tuple(layer.constrain_sharding() for layer in layers)
            for layers in (self.layers, self.cross)
        )
        mask = rules.constrain(self.cross_mask, "batch", "length")

        def axes(bias):
            return ("length", "heads", "length")[-bias.ndim :]

        biases = tuple(rules.constrain(bias, *axes(bias)) for bias in self.position_bias)
        return DecoderCache(layers, cross, mask, biases)


def _attention_shape(config: T5Config, fused: bool, native: bool) -> dict:
    return dict(
        heads=config.num_heads,
        features=config.head_dim,
        model_dim=config.emb_dim,
        dtype=jnp.dtype(config.dtype),
        fused=fused,
        native=native,
        matmul_dtype=config.matmul_dtype,
    )


def _mlp_shape(config: T5Config, fused: bool, native: bool) -> dict:
    return dict(
        mlp_dim=config.mlp_dim,
        activations=config.mlp_activations,
        dtype=jnp.dtype(config.dtype),
        dropout_rate=config.dropout_rate,
        fused=fused,
        native=native,
        matmul_dtype=config.matmul_dtype,
    )


def _relative_bias(
    config: T5Config, bidirectional: bool, name: str | None = None
) -> RelativePositionBias:
    return RelativePositionBias(
        config.num_heads, config.num_buckets, config.max_distance, bidirectional, name=name
    )


class EncoderLayer(nn.Module):
    config: T5Config
    fused: bool = False
    native: bool = False

    @nn.compact
    def __call__(self, x: Encoded, mask: Mask, bias: Bias, deterministic: bool = True) -> Encoded:
        """Runs the layer; `bias` is None where the layer has its own."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        if bias is None:
            bias = _relative_bias(config, bidirectional=True, name="relpos_bias")(
                x.shape[1], x.shape[1]
            )
        drop = functools.partial(nn.Dropout(config.dropout_rate), deterministic=deterministic)
        attention = Attention(**_attention_shape(config, self.fused, self.native), name="attention")
        x = attention.to_inputs(
            x, RMSNorm(dtype, name="pre_attention_layer_norm"), mask, bias, drop
        )
        mlp = GatedMLP(**_mlp_shape(config, self.fused, self.native), name="mlp")
        return mlp(x, RMSNorm(dtype, name="pre_mlp_layer_norm"), drop, deterministic, mask)


class Encoder(nn.Module):
    config: T5Config
    fused: bool = False
    native: bool = False

    @nn.compact
    def __call__(self, x: Encoded, mask: Mask, deterministic: bool = True) -> Encoded:
        """Runs all layers and the final norm."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        bias = None
        if not config.relative_bias_per_layer:
            bias = _relative_bias(config, bidirectional=True, name="relpos_bias")(
                x.shape[1], x.shape[1]
            )
        drop = nn.Dropout(config.dropout_rate)
        x = drop(x, deterministic)
        for i in range(config.num_encoder_layers):
            x = EncoderLayer(config, self.fused, self.native, name=f"layers_{i}")(
                x, mask, bias, deterministic
            )
        return drop(RMSNorm(dtype, self.native, name="encoder_norm")(x, mask), deterministic)


class DecoderLayer(nn.Module):
    config: T5Config
    fused: bool = False
    native: bool = False

    def setup(self):
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        if config.relative_bias_per_layer:
            self.relpos_bias = _relative_bias(config, bidirectional=False)
        self.pre_self_attention_layer_norm = RMSNorm(dtype)
        self.self_attention = Attention(**_attention_shape(config, self.fused, self.native))
        self.pre_cross_attention_layer_norm = RMSNorm(dtype)
        self.encoder_decoder_attention = Attention(
            **_attention_shape(config, self.fused, self.native)
        )
        self.pre_mlp_layer_norm = RMSNorm(dtype)
        self.mlp = GatedMLP(**_mlp_shape(config, self.fused, self.native))
        self.dropout = nn.Dropout(config.dropout_rate)

    def cross_cache(
        self, encoded: Encoded, mask: Mask | None = None, heads_per_tile: int | None = None
    ) -> KVCache:
        return self.encoder_decoder_attention.project_key_value(encoded, mask, heads_per_tile)

    def __call__(
        self,
        x: Float[Array, "*N D"],
        cache: KVCache | None,
        positions: PerRow | None,
        mask: Seen,
        bias: Bias,
        cross: KVCache,
        cross_mask: Mask,
        deterministic: bool = True,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
        count: int | None = None,
    ) -> tuple[Float[Array, "*N D"], KVCache]:
        """Runs the layer over T queries per row; with `cache` None, over whole sequences
        (training)."""
        drop = functools.partial(self.dropout, deterministic=deterministic)
        norm, more = (
            self.pre_self_attention_layer_norm,
            dict(valid=valid, dropped=drop, nodes=nodes, count=count),
        )
        x, cache = self.self_attention.to_cache(x, norm, cache, positions, mask, bias, **more)
        norm = self.pre_cross_attention_layer_norm
        x = self.encoder_decoder_attention.to_encoded(x, norm, cross, cross_mask, valid, drop)
        return self.mlp(x, self.pre_mlp_layer_norm, drop, deterministic, valid), cache


class Decoder(nn.Module):
    config: T5Config
    fused: bool = False
    native: bool = False

    def setup(self):
        config = self.config
        if not config.relative_bias_per_layer:
            self.relpos_bias = _relative_bias(config, bidirectional=False)
        self.layers = [
            DecoderLayer(config, self.fused, self.native) for _ in range(config.num_decoder_layers)
        ]
        self.decoder_norm = RMSNorm(jnp.dtype(config.dtype), self.native)
        if not config.logits_via_embedding:
            self.logits_dense = Dense(
                config.vocab_size,
                config.dtype,
                output_dtype=jnp.float32,
                matmul_dtype=config.matmul_dtype,
            )
        self.dropout = nn.Dropout(config.dropout_rate)

    def position_biases(self, of: Callable[[RelativePositionBias], Float32[Array, "..."]]) -> tuple:
        """Returns what `of` gives for the table of every layer, or for one that all layers share."""
        if not self.config.relative_bias_per_layer:
            return (of(self.relpos_bias),)
        return tuple(of(layer.relpos_bias) for layer in self.layers)

    def _of_layers(self, shared: Sequence) -> Sequence:
        """Repeats what has one element per bias of `position_biases` to one element per layer."""
        return shared if self.config.relative_bias_per_layer else [*shared] * len(self.layers)

    def init_cache(
        self,
        encoded: Encoded,
        cross_mask: Mask,
        slots: int,
        copies: int,
        heads_per_tile: int | None,
    ) -> DecoderCache:
        """Makes the cache: empty self-attention caches of `slots` slots, and the cross-attention
        keys and values of `encoded`, with `copies` rows side by side for each input."""
        config, shape = (
            self.config,
            (encoded.shape[0] * copies, self.config.num_heads, slots, self.config.head_dim),
        )
        empty = [
            KVCache.empty(*shape, jnp.dtype(config.dtype), heads_per_tile) for _ in self.layers
        ]

        def repeat(x):
            return jnp.repeat(x, copies, axis=0) if copies > 1 else x

        cross = tuple(
            jax.tree.map(repeat, layer.cross_cache(encoded, cross_mask, heads_per_tile))
            for layer in self.layers
        )
        slots, native = empty[0].slots, self.native
        biases = self.position_biases(
            lambda table: table(slots, slots) if native else table.shifted(slots)
        )
        return DecoderCache(tuple(empty), cross, repeat(cross_mask), biases)

    def node_cache(self, cache: DecoderCache, slots: int, positions: int) -> DecoderCache:
        """Does what `Network.node_cache` does: keeps the bias of the last of P = `positions` query
        positions only."""
        layers = tuple(layer.widen(slots) for layer in cache.layers)
        return cache.replace(
            layers=layers,
            position_bias=self.position_biases(lambda table: table.of_last(positions)),
        )

    def step(
        self,
        x: States,
        positions: PerRow | None,
        cache: DecoderCache,
        layers: int | None = None,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
    ) -> tuple[States, DecoderCache]:
        """Runs the first `layers` layers (None: all) over the T tokens with the embeddings `x`.

        The arguments are those of `FamilyModule.decode_states`. Returns the normalised states and
        the new cache, in which the layers that were not run stay as they are.
        """
        mask, biases, written, room = None, list(cache.position_bias), list(cache.layers), 0
        batch, count, width = x.shape
        if (
            not self.native
        ):  # a TPU's compiler multiplies a matrix [B·T, D] faster than rows [B, T, D]
            room = written[0].filling(count)
            mask, biases = seen_and_biases(biases, positions, count, written[0].slots, nodes, room)
            x, valid = (
                padded(x, 1, room).reshape(-1, width),
                None if valid is None or room else valid.reshape(-1),
            )
        for i, (layer, bias) in enumerate(zip(self.layers[:layers], self._of_layers(biases))):
            more = dict(
                cross=cache.cross[i],
                cross_mask=cache.cross_mask,
                valid=valid,
                nodes=nodes,
                count=count,
            )
            x, written[i] = layer(x, cache.layers[i], positions, mask, bias, **more)
        states = self.decoder_norm(x, valid).reshape(batch, count + room, width)
        return states[:, :count] if room else states, cache.replace(layers=tuple(written))

    def __call__(
        self, x: States, encoded: Encoded, encoder_mask: Mask, deterministic: bool = True
    ) -> States:
        """Returns the normalised states of whole sequences with the embeddings `x`, teacher-forced."""
        length = x.shape[1]
        biases = self._of_layers(
            self.position_biases(lambda table: table(length, length).transpose(1, 0, 2)[None])
        )
        mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
        x = self.dropout(x, deterministic)
        for layer, bias in zip(self.layers, biases):
            cross = layer.cross_cache(encoded)
            x, _ = layer(x, None, None, mask, bias, cross, encoder_mask, deterministic)
        return self.dropout(self.decoder_norm(x), deterministic)

    def logits(self, x: States, embedding: Float[Array, "rows D"], valid: Valid = None) -> Logits:
        """Applies the head: returns the logits of normalised states `x`."""
        x = self._scaled(x)
        if not self.config.logits_via_embedding:
            return self.logits_dense(x, valid)
        return product(x, embedding.astype(x.dtype), ((2,), (1,)))

    def greedy_token_and_logprob(self, x: States, valid: Valid, normalize: bool) -> TokenAndLogprob:
        """Does what `Network.greedy_token_and_logprob` does, for normalised states `x`."""
        return self.logits_dense.greedy_token_and_logprob(self._scaled(x), valid, normalize)

    def _scaled(self, x: States) -> States:
        return (
            x / jnp.sqrt(self.config.emb_dim).astype(x.dtype) if self.config.scales_outputs else x
        )


class T5(FamilyModule):
    """The whole network; `fused` and `native` say how its parameters are stored (see
    `ModelConfig.module`)."""

    config: T5Config
    fused: bool = False
    native: bool = False
    joins_heads: ClassVar[bool] = True

    def setup(self):
        config = self.config
        self.token_embedder = Embedder(
            config.vocab_size, config.emb_dim, 1.0, config.dtype, self.native
        )
        if config.separate_embeddings:
            self.encoder_embedder = Embedder(
                config.vocab_size, config.emb_dim, 1.0, config.dtype, self.native
            )
        if self.config.encoder_dim is None:
            self.encoder = Encoder(self.config, self.fused, self.native)
        self.decoder = Decoder(self.config, self.fused, self.native)

    def encode(self, inputs: Inputs, mask: Mask, deterministic: bool = True) -> Encoded:
        """Runs the encoder on `inputs`, with `mask` True at tokens."""
        embedder = self.encoder_embedder if self.config.separate_embeddings else self.token_embedder
        return self.encoder(embedder(inputs, mask), mask, deterministic)

    def prefill(
        self,
        inputs: Inputs,
        mask: Mask,
        slots: int,
        copies: int = 1,
        encoded: Encoded | None = None,
        heads_per_tile: int | None = None,
    ) -> DecoderCache:
        """Makes the decoder's cache, and runs the encoder once for it unless its output is given as
        `encoded`."""
        encoded = self.encode(inputs, mask) if encoded is None else encoded
        return self.decoder.init_cache(encoded, mask, slots, copies, heads_per_tile)

    def dummy_inputs(self) -> tuple:
        tokens, width = jnp.ones((1, 2), jnp.int32), self.config.encoder_dim
        encoded = None if width is None else jnp.zeros((1, 2, width), self.config.dtype)
        return tokens, tokens > 0, tokens, True, encoded

    def __call__(
        self,
        inputs: Inputs,
        mask: Mask,
        decoder_tokens: Tokens,
        deterministic: bool = True,
        encoded: Encoded | None = None,
    ) -> Logits:
        """Returns teacher-forced logits."""
        return self.head(self.states(inputs, mask, decoder_tokens, deterministic, encoded))

    def states(
        self,
        inputs: Inputs,
        mask: Mask,
        decoder_tokens: Tokens,
        deterministic: bool = True,
        encoded: Encoded | None = None,
    ) -> States:
        """Returns teacher-forced states, which `head` takes."""
        encoded = self.encode(inputs, mask, deterministic) if encoded is None else encoded
        return self.decoder(self.token_embedder(decoder_tokens), encoded, mask, deterministic)
