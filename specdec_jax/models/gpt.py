"""GPT-like decoder-only networks: GPT-2, and the pair of section 4.2 of Leviathan et al. 2023."""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from specdec_jax.backends.axes import (
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
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.backends.matmul import product
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.models.config_validation import FieldError, check_fields
from specdec_jax.models.family import FamilyModule, ModelConfig
from specdec_jax.models.layers import Attention, Dense, Embedder, GatedMLP
from specdec_jax.models.norms import LayerNorm


@dataclasses.dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """The shape of a GPT-like network: learned positions, normalisation before each block, biases
    and gelu, as in GPT-2.

    Attributes:
      vocab_size: rows of the embedding and width V of the logits.
      emb_dim: width D.
      num_heads: H heads of D / H features.
      num_decoder_layers: number of layers.
      mlp_dim: hidden width of the feed-forward block.
      num_positions: number of positions with an embedding: the longest sequence, prompt and new
        tokens together.
      mlp_activation: activation of the feed-forward block; "gelu" is the tanh approximation
        ("gelu_new").
      logits_via_embedding: whether the head is the transposed embedding.
      dropout_rate: rate in training, for the embeddings and for what every block adds, as in GPT-2.
      dtype: name of the computation's dtype, "float32" or "bfloat16".
      matmul_dtype: dtype to which operands of products are rounded (training); None: `dtype`.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    num_decoder_layers: int
    mlp_dim: int
    num_positions: int = 1024
    mlp_activation: str = "gelu"
    logits_via_embedding: bool = True
    dropout_rate: float = 0.0
    dtype: str = "float32"
    matmul_dtype: str | None = None
    family: ClassVar[str] = "gpt"
    decoder_only: ClassVar[bool] = True

    def __post_init__(self):
        check_fields(self)
        if self.emb_dim % self.num_heads:
            expected = f"a multiple of num_heads = {self.num_heads}"
            raise FieldError(self, "emb_dim", f"got {self.emb_dim}, expected {expected}")

    @property
    def head_dim(self) -> int:
        """K, features of each head."""
        return self.emb_dim // self.num_heads

    @property
    def max_positions(self) -> int:
        return self.num_positions

    def with_own_head(self) -> "GPTConfig":
        return dataclasses.replace(self, logits_via_embedding=False)

    def module(self, fused: bool = False, native: bool = False) -> "GPT":
        return GPT(self, native)  # there are no kernels to join: see `GPTLayer`

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return _parameter_shapes(self)

    @classmethod
    def presets(cls) -> dict[str, "GPTConfig"]:
        return GPT_PRESETS


def _gpt2(emb_dim, num_heads, layers):
    return GPTConfig(50257, emb_dim, num_heads, layers, 4 * emb_dim)


def _paper(emb_dim, num_heads, layers, mlp_dim):
    # Section 4.2 gives these widths, 8k tokens, and the total numbers of parameters, which are
    # reached only with a head beside the embedding.
    return GPTConfig(
        8000, emb_dim, num_heads, layers, mlp_dim, num_positions=512, logits_via_embedding=False
    )


GPT_PRESETS = {
    "gpt/97m": _paper(768, 12, 12, 3072),
    "gpt/6m": _paper(256, 4, 2, 1024),
    "gpt2/small": _gpt2(768, 12, 12),
    "gpt2/medium": _gpt2(1024, 16, 24),
    "gpt2/large": _gpt2(1280, 20, 36),
    "gpt2/xl": _gpt2(1600, 25, 48),
}


def _parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    width = config.emb_dim

    def norm(name):
        return {f"{name}/{part}": (width,) for part in ("scale", "bias")}

    def dense(name, shape):
        return {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}

    layer: dict[str, tuple[int, ...]] = {
        **norm("pre_self_attention_layer_norm"),
        **norm("pre_mlp_layer_norm"),
        **dense("causal_attention/qkv", (width, 3 * width)),
        **dense("causal_attention/out", (width, width)),
        **dense("mlp/wi", (width, config.mlp_dim)),
        **dense("mlp/wo", (config.mlp_dim, width)),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedder/embedding": (config.vocab_size, width),
        "decoder/position_embedder/embedding": (config.num_positions, width),
        **norm("decoder/decoder_norm"),
    }
    if not config.logits_via_embedding:
        shapes["decoder/logits_dense/kernel"] = (width, config.vocab_size)
    layers = range(config.num_decoder_layers)
    return shapes | {
        f"decoder/layers_{i}/{name}": shape for i in layers for name, shape in layer.items()
    }


@flax.struct.dataclass
class GPTCache:
    """The decoder's cache, which it keeps between calls.

    Attributes:
      layers: the cache of each layer's self-attention.
    """

    layers: tuple[KVCache, ...]

    def move_nodes(self, sources, starts, native: bool) -> "GPTCache":
        """Does what `KVCache.move` does, in every layer."""
        return GPTCache(tuple(layer.move(sources, starts, native) for layer in self.layers))

    def repeated(self, copies: int) -> "GPTCache":
        """Returns the cache with `copies` rows side by side for each row."""
        return GPTCache(tuple(layer.repeated(copies) for layer in self.layers))


class GPTLayer(nn.Module):
    config: GPTConfig
    native: bool = False

    def setup(self):
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        common = dict(dtype=dtype, fused=True, matmul_dtype=config.matmul_dtype, use_bias=True)
        attention = dict(native=self.native, **common)
        self.pre_self_attention_layer_norm = LayerNorm(dtype)
        # In checkpoints too, queries, keys and values have one kernel. `weight_layouts.py` joins
        # and splits kernels under other names than this one.
        self.causal_attention = Attention(
            config.num_heads, config.head_dim, config.emb_dim, **attention
        )
        self.pre_mlp_layer_norm = LayerNorm(dtype)
        self.mlp = GatedMLP(config.mlp_dim, (config.mlp_activation,), **attention)
        self.dropout = nn.Dropout(config.dropout_rate)

    def __call__(
        self,
        x: Float[Array, "*N D"],
        cache: KVCache | None,
        positions: PerRow | None,
        mask: Seen,
        deterministic: bool = True,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
    ) -> tuple[Float[Array, "*N D"], KVCache]:
        """Runs the layer over T queries per row; with `cache` None, over whole sequences."""
        drop = functools.partial(self.dropout, deterministic=deterministic)
        norm, divisor = self.pre_self_attention_layer_norm, np.sqrt(self.config.head_dim)
        x, cache = self.causal_attention.to_cache(
            x, norm, cache, positions, mask, None, divisor, valid, drop, nodes
        )
        return self.mlp(x, self.pre_mlp_layer_norm, drop, valid=valid), cache


class GPTDecoder(nn.Module):
    config: GPTConfig
    native: bool = False

    def setup(self):
        config = self.config
        self.position_embedder = Embedder(
            config.num_positions, config.emb_dim, 0.02, config.dtype, self.native
        )
        self.layers = [GPTLayer(config, self.native) for _ in range(config.num_decoder_layers)]
        self.decoder_norm = LayerNorm(jnp.dtype(config.dtype), self.native)
        self.dropout = nn.Dropout(config.dropout_rate)
        if not config.logits_via_embedding:
            self.logits_dense = Dense(
                config.vocab_size,
                config.dtype,
                output_dtype=jnp.float32,
                matmul_dtype=config.matmul_dtype,
            )

    def node_cache(self, cache: GPTCache, slots: int, positions: int) -> GPTCache:
        """Does what `Network.node_cache` does; `positions` is not needed here."""
        return GPTCache(tuple(layer.widen(slots) for layer in cache.layers))

    def step(
        self,
        x: States,
        positions: PerRow | None,
        cache: GPTCache,
        layers: int | None = None,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
    ) -> tuple[States, GPTCache]:
        """Runs the first `layers` layers (None: all) over the T tokens with the embeddings `x`.

        The arguments are those of `FamilyModule.decode_states`. Returns the normalised states and
        the new cache, in which the layers that were not run stay as they are.
        """
        if nodes is not None:
            query_positions, mask = (
                nodes.positions,
                nodes.distances(cache.layers[0].slots)[:, None] >= 0,
            )
        else:
            assert positions is not None, "a call has nodes or positions"
            query_positions = positions[:, None] + jnp.arange(x.shape[1])
            mask = jnp.arange(cache.layers[0].slots) <= query_positions[:, None, :, None]
        x, written = x + self.position_embedder(query_positions, valid), list(cache.layers)
        shape = x.shape
        if (
            not self.native
        ):  # a TPU's compiler multiplies a matrix [B·T, D] faster than rows [B, T, D]
            x, valid = x.reshape(-1, shape[-1]), None if valid is None else valid.reshape(-1)
        for i, layer in enumerate(self.layers[:layers]):
            x, written[i] = layer(x, cache.layers[i], positions, mask, valid=valid, nodes=nodes)
        return self.decoder_norm(x, valid).reshape(shape), GPTCache(tuple(written))

    def __call__(self, x: States, deterministic: bool = True) -> States:
        """Returns the normalised states of whole sequences with the embeddings `x`, teacher-forced."""
        length = x.shape[1]
        mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
        x = self.dropout(x + self.position_embedder(jnp.arange(length)), deterministic)
        for layer in self.layers:
            x, _ = layer(x, None, None, mask, deterministic)
        return self.decoder_norm(x)

    def logits(self, x: States, embedding: Float[Array, "rows D"], valid: Valid = None) -> Logits:
        """Applies the head: returns the logits of normalised states `x`."""
        if not self.config.logits_via_embedding:
            return self.logits_dense(x, valid)
        return product(x, embedding.astype(x.dtype), ((2,), (1,)))

    def greedy_token_and_logprob(self, x: States, valid: Valid, normalize: bool) -> TokenAndLogprob:
        """Does what `Network.greedy_token_and_logprob` does, for normalised states `x`."""
        return self.logits_dense.greedy_token_and_logprob(x, valid, normalize)


class GPT(FamilyModule):
    """The whole network."""

    config: GPTConfig
    native: bool = False
    joins_heads: ClassVar[bool] = True

    def setup(self):
        config = self.config
        self.token_embedder = Embedder(
            config.vocab_size, config.emb_dim, 0.02, config.dtype, self.native
        )
        self.decoder = GPTDecoder(self.config, self.native)

    def dummy_inputs(self) -> tuple:
        return (jnp.ones((1, 2), jnp.int32),)

    def prefill(
        self,
        inputs: Inputs,
        mask: Mask,
        slots: int,
        copies: int = 1,
        encoded: None = None,
        heads_per_tile: int | None = None,
    ) -> GPTCache:
        """Makes the cache of sequences of which no token has been fed."""
        config, shape = (
            self.config,
            (len(inputs) * copies, self.config.num_heads, slots, self.config.head_dim),
        )

        def empty():
            return KVCache.empty(*shape, jnp.dtype(config.dtype), heads_per_tile)

        return GPTCache(tuple(empty() for _ in range(config.num_decoder_layers)))

    def __call__(
        self, tokens: Tokens, places: Int[Array, "B N"] | None = None, deterministic: bool = True
    ) -> Logits | Float32[Array, "B N V"]:
        """Returns the teacher-forced logits of whole sequences, or only those at `places`."""
        states = self.decoder(self.token_embedder(tokens), deterministic)
        return self.head(
            states if places is None else jnp.take_along_axis(states, places[..., None], axis=1)
        )
