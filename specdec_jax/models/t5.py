"""T5-family encoder–decoder: T5 1.0, 1.1, LM-adapted, Flan-T5, mT5, umT5, UL2 and ByT5 by
configuration."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specdec_jax.backends.axes import Encoded, Inputs, Logits, Mask, States, Tokens
from specdec_jax.backends.backend import Backend
from specdec_jax.models.blocks import BlockOptions, Decoder, DecoderCache, Encoder
from specdec_jax.models.config_validation import FieldError, check_fields
from specdec_jax.models.family import FamilyModule, ModelConfig
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

    def module(self, backend: Backend = Backend()) -> "T5":
        return T5(self, backend)

    def block_options(self) -> BlockOptions:
        """Returns what encoder and decoder are made of."""
        return BlockOptions(
            **self.shared_options(),
            num_encoder_layers=self.num_encoder_layers,
            activations=self.mlp_activations,
            norm="rms",
            use_bias=False,
            self_attention="self_attention",
            joint_attention=False,
            cross_attention=True,
            relative_buckets=(self.num_buckets, self.max_distance),
            relative_bias_per_layer=self.relative_bias_per_layer,
            num_positions=None,
            query_divisor=1.0,  # T5 folds it into the initial query weight
            embedding_deviation=1.0,
            scales_outputs=self.scales_outputs,
            inner_dropout=True,
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return t5_shapes(self)

    @classmethod
    def presets(cls) -> dict[str, "T5Config"]:
        return PRESETS


def t5_only(name: str, config: ModelConfig) -> T5Config:
    """Returns `config` if it is a T5's, for functions that need an encoder, such as training.

    Else raises ValueError.

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


class T5(FamilyModule):
    """The whole network."""

    config: T5Config
    backend: Backend = Backend()

    def setup(self):
        config, packed = self.config, self.backend.packs_weights
        options = config.block_options()
        self.token_embedder = options.make_embedder(config.vocab_size, packed)
        if config.separate_embeddings:
            self.encoder_embedder = options.make_embedder(config.vocab_size, packed)
        if config.encoder_dim is None:
            self.encoder = Encoder(options, self.backend)
        self.decoder = Decoder(options, self.backend)

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
    ) -> DecoderCache:
        """Makes the decoder's cache, for which the encoder runs once unless there is `encoded`."""
        encoded = self.encode(inputs, mask) if encoded is None else encoded
        return self.decoder.init_cache(len(inputs), slots, copies, encoded, mask)

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
