"""The T5 family by configuration: T5 1.0 and 1.1, Flan-T5, mT5, umT5, UL2 and ByT5."""

import dataclasses
from typing import Any, ClassVar

from specdec_jax.backends.backend import Backend
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models.block_options import BlockOptions
from specdec_jax.models.blocks import EncoderDecoder
from specdec_jax.models.config_validation import FieldError, check_fields
from specdec_jax.models.family import ModelConfig, list_shapes


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
        own, layers = self.encoder_dim is None, self.num_encoder_layers
        if own != (layers > 0):
            other = "0 with encoder_dim, which means that the encoder is another model's"
            expected = "at least 1" if own else other
            raise FieldError(self, "num_encoder_layers", f"got {layers}, expected {expected}")
        if self.separate_embeddings and not own:
            problem = "got True without an encoder, expected False"
            raise FieldError(self, "separate_embeddings", problem)
        if self.max_distance <= self.num_buckets // 2:
            expected = f"more than half of num_buckets = {self.num_buckets}"
            raise FieldError(self, "max_distance", f"got {self.max_distance}, expected {expected}")

    def explicit(self) -> "T5Config":
        return dataclasses.replace(self, scale_decoder_outputs=self.scales_outputs)

    @property
    def scales_outputs(self) -> bool:
        """Whether the decoder's output is multiplied by 1/√D before the head."""
        scale = self.scale_decoder_outputs
        return self.logits_via_embedding if scale is None else scale

    def module(self, backend: Backend = Backend()) -> EncoderDecoder:
        return EncoderDecoder(self, backend)

    def block_options(self) -> BlockOptions:
        """Returns what encoder and decoder are made of."""
        return BlockOptions(
            **self.shared_options(),
            num_encoder_layers=self.num_encoder_layers,
            separate_embeddings=self.separate_embeddings,
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
        return list_shapes(self)

    @classmethod
    def presets(cls) -> dict[str, "T5Config"]:
        return PRESETS


def check_t5(name: str, config: ModelConfig) -> T5Config:
    """Returns `config` if it is a T5's, for functions that need an encoder, such as training.

    Else raises ValueError, which names the argument `name`.
    """
    if isinstance(config, T5Config):
        return config
    got = "a decoder-only model" if config.decoder_only else f"a {type(config).__name__}"
    raise mismatch_error(name, got, "a T5")


def reshape_as_t5(config: ModelConfig, **shape: Any) -> T5Config:
    """Returns a T5 of this shape, for the rest like `config` as far as that has the same fields."""
    if isinstance(config, T5Config):
        return config.replace(**shape)
    shape["logits_via_embedding"] = config.logits_via_embedding
    return T5Config(config.vocab_size, **shape)


def _t5_1_0(emb_dim: int, num_heads: int, head_dim: int, layers: int, mlp_dim: int) -> T5Config:
    return T5Config(32128, emb_dim, num_heads, head_dim, layers, layers, mlp_dim, ("relu",), True)


def _t5_1_1(emb_dim: int, num_heads: int, layers: int, mlp_dim: int) -> T5Config:
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
    "madlad/3b": T5Config(256_000, 1024, 16, 128, 32, 32, 8192),
}
