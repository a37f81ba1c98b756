"""GPT-like decoder-only networks: GPT-2, and the pair of section 4.2 of Leviathan et al. 2023."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from specdec_jax.backends.axes import Inputs, Logits, Mask, Tokens
from specdec_jax.backends.backend import Backend
from specdec_jax.models.blocks import BlockOptions, Decoder, DecoderCache
from specdec_jax.models.config_validation import FieldError, check_fields
from specdec_jax.models.family import FamilyModule, ModelConfig


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

    def module(self, backend: Backend = Backend()) -> "GPT":
        return GPT(self, backend)

    def block_options(self) -> BlockOptions:
        """Returns what the decoder is made of."""
        return BlockOptions(
            **self.shared_options(),
            num_encoder_layers=0,
            activations=(self.mlp_activation,),
            norm="layer",
            use_bias=True,
            # A name by which `weight_layouts.py` neither joins nor splits weights: in checkpoints
            # too, queries, keys and values have one.
            self_attention="causal_attention",
            joint_attention=True,
            cross_attention=False,
            relative_buckets=None,
            relative_bias_per_layer=False,
            num_positions=self.num_positions,
            query_divisor=math.sqrt(self.head_dim),
            embedding_deviation=0.02,
            scales_outputs=False,
            inner_dropout=False,
        )

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


class GPT(FamilyModule):
    """The whole network."""

    config: GPTConfig
    backend: Backend = Backend()

    def setup(self):
        config, options = self.config, self.config.block_options()
        packed = self.backend.packs_weights
        self.token_embedder = options.make_embedder(config.vocab_size, packed)
        self.decoder = Decoder(options, self.backend)

    def dummy_inputs(self) -> tuple:
        return (jnp.ones((1, 2), jnp.int32),)

    def prefill(
        self, inputs: Inputs, mask: Mask, slots: int, copies: int = 1, encoded: None = None
    ) -> DecoderCache:
        """Makes the cache of sequences of which no token has been fed."""
        return self.decoder.init_cache(len(inputs), slots, copies, None, mask)

    def __call__(
        self, tokens: Tokens, places: Int[Array, "B N"] | None = None, deterministic: bool = True
    ) -> Logits | Float32[Array, "B N V"]:
        """Returns the teacher-forced logits of whole sequences, or only those at `places`."""
        states = self.decoder(self.token_embedder(tokens), deterministic=deterministic)
        return self.head(
            states if places is None else jnp.take_along_axis(states, places[..., None], axis=1)
        )
