"""The BART family by configuration: BART, mBART, Marian, Pegasus, M2M-100 and NLLB."""

import dataclasses
import math
from typing import Any, ClassVar

from specdec_jax.backends.backend import Backend
from specdec_jax.models.block_options import BlockOptions
from specdec_jax.models.blocks import EncoderDecoder
from specdec_jax.models.config_validation import FieldError, check_fields
from specdec_jax.models.family import PositionTableConfig, list_shapes


@dataclasses.dataclass(frozen=True)
class BartConfig(PositionTableConfig):
    """The shape of a BART-like network: layer norms, biases, and tables of absolute positions.

    Attributes:
      vocab_size: rows of the embedding and width V of the logits.
      emb_dim: width D.
      num_heads: H heads of D / H features.
      num_encoder_layers, num_decoder_layers: number of layers of each stack.
      mlp_dim: hidden width of the feed-forward block.
      num_positions: rows of the table of positions of each stack: the longest input, and the most
        tokens of an output with its start token. Sinusoidal positions are stored as a table too.
      mlp_activation: activation of the feed-forward block; "gelu_exact" is that with erf, "gelu"
        the tanh approximation.
      norm_place: "post", after each block has been added (BART, Marian), or "pre", before each
        block and at the end of a stack (mBART, Pegasus, M2M-100).
      embedding_norm: whether there is a norm after embeddings and positions (BART, mBART).
      scale_embedding: whether embeddings of tokens are multiplied by √D.
      logits_bias: whether a bias is added to the logits.
      encoder_vocab_size: rows of an embedding of the encoder alone, whose ids are then those of
        another vocabulary than the outputs'; None: those of the same.
      separate_embeddings: whether the encoder has an embedding of its own for the same ids; else
        both stacks share one.
      pad_id: id that pads inputs of models without a vocabulary.
      logits_via_embedding: whether the head is the transposed embedding.
      dropout_rate: rate in training.
      dtype: name of the computation's dtype, "float32" or "bfloat16".
      matmul_dtype: dtype to which operands of products are rounded (training); None: `dtype`.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    num_encoder_layers: int
    num_decoder_layers: int
    mlp_dim: int
    num_positions: int = 1024
    mlp_activation: str = "gelu_exact"
    norm_place: str = "post"
    embedding_norm: bool = True
    scale_embedding: bool = False
    logits_bias: bool = True
    encoder_vocab_size: int | None = None
    separate_embeddings: bool = dataclasses.field(kw_only=True, default=False)
    pad_id: int = 1
    logits_via_embedding: bool = True
    dropout_rate: float = 0.0
    dtype: str = "float32"
    matmul_dtype: str | None = None
    family: ClassVar[str] = "bart"
    decoder_only: ClassVar[bool] = False

    def __post_init__(self):
        check_fields(self)
        if self.num_encoder_layers < 1:
            raise FieldError(self, "num_encoder_layers", "got 0, expected at least 1")
        if self.pad_id >= self.input_vocab_size:
            expected = f"an id below {self.input_vocab_size}, the number of ids of inputs"
            raise FieldError(self, "pad_id", f"got {self.pad_id}, expected {expected}")
        if self.separate_embeddings and not self.shares_vocabulary:
            problem = "got True with encoder_vocab_size, expected False"
            raise FieldError(self, "separate_embeddings", problem)
        self.check_heads()

    @property
    def input_vocab_size(self) -> int:
        own = self.encoder_vocab_size
        return self.vocab_size if own is None else own

    @property
    def shares_vocabulary(self) -> bool:
        return self.encoder_vocab_size is None

    def module(self, backend: Backend = Backend()) -> EncoderDecoder:
        return EncoderDecoder(self, backend)

    def block_options(self) -> BlockOptions:
        """Returns what encoder and decoder are made of."""
        return BlockOptions(
            **self.shared_options(),
            num_encoder_layers=self.num_encoder_layers,
            separate_embeddings=self.separate_embeddings or not self.shares_vocabulary,
            activations=(self.mlp_activation,),
            norm="layer",
            norm_place=self.norm_place,
            final_norm=self.norm_place == "pre",
            embedding_norm=self.embedding_norm,
            use_bias=True,
            self_attention="self_attention",
            joint_attention=False,
            cross_attention=True,
            relative_buckets=None,
            relative_bias_per_layer=False,
            num_positions=self.num_positions,
            query_divisor=math.sqrt(self.head_dim),
            embedding_deviation=0.02,
            embedding_scale=math.sqrt(self.emb_dim) if self.scale_embedding else 1.0,
            logits_bias=self.logits_bias,
            scales_outputs=False,
            inner_dropout=False,
        )

    def encoder_options(self) -> BlockOptions:
        """Returns what the encoder is made of."""
        return dataclasses.replace(self.block_options(), vocab_size=self.input_vocab_size)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return list_shapes(self)

    @classmethod
    def presets(cls) -> dict[str, "BartConfig"]:
        return BART_PRESETS


_MARIAN: dict[str, Any] = dict(
    pad_id=58100, embedding_norm=False, scale_embedding=True, mlp_activation="silu"
)
_PRE: dict[str, Any] = dict(norm_place="pre", scale_embedding=True, mlp_activation="relu")
_PEGASUS = _PRE | dict(embedding_norm=False, pad_id=0)
_M2M = _PRE | dict(embedding_norm=False, logits_bias=False)


BART_PRESETS = {
    "bart/base": BartConfig(50265, 768, 12, 6, 6, 3072),
    "bart/large": BartConfig(50264, 1024, 16, 12, 12, 4096),
    "mbart/large": BartConfig(250054, 1024, 16, 12, 12, 4096, **_PRE),
    "marian/opus": BartConfig(58101, 512, 8, 6, 6, 2048, 512, **_MARIAN),
    "pegasus/large": BartConfig(96103, 1024, 16, 16, 16, 4096, **_PEGASUS),
    "m2m100/418m": BartConfig(128112, 1024, 16, 12, 12, 4096, **_M2M),
    "nllb/600m": BartConfig(256206, 1024, 16, 12, 12, 4096, **_M2M),
    "nllb/3.3b": BartConfig(256206, 2048, 16, 24, 24, 8192, **_M2M),
}
