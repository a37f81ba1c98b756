"""GPT-like decoder-only networks: GPT-2, and the pair of section 4.2 of Leviathan et al. 2023."""

import dataclasses
import math
from typing import ClassVar

from specdec_jax.backends.backend import Backend
from specdec_jax.models.block_options import BlockOptions
from specdec_jax.models.blocks import DecoderOnly
from specdec_jax.models.config_validation import check_fields
from specdec_jax.models.family import PositionTableConfig, list_shapes


@dataclasses.dataclass(frozen=True)
class GPTConfig(PositionTableConfig):
    """The shape of a GPT-like network: learned positions, pre-norm, biases and gelu, as in GPT-2.

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
      dtype, matmul_dtype: as in `T5Config`.
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
        self.check_heads()

    def module(self, backend: Backend = Backend()) -> DecoderOnly:
        return DecoderOnly(self, backend)

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
        return list_shapes(self)

    @classmethod
    def presets(cls) -> dict[str, "GPTConfig"]:
        return GPT_PRESETS


def _gpt2(emb_dim: int, num_heads: int, layers: int) -> GPTConfig:
    return GPTConfig(50257, emb_dim, num_heads, layers, 4 * emb_dim)


def _paper(emb_dim: int, num_heads: int, layers: int, mlp_dim: int) -> GPTConfig:
    # Section 4.2 gives these widths, 8k tokens, and the total numbers of parameters, which are
    # reached only with a head beside the embedding.
    return GPTConfig(8000, emb_dim, num_heads, layers, mlp_dim, 512, logits_via_embedding=False)


GPT_PRESETS = {
    "gpt/97m": _paper(768, 12, 12, 3072),
    "gpt/6m": _paper(256, 4, 2, 1024),
    "gpt2/small": _gpt2(768, 12, 12),
    "gpt2/medium": _gpt2(1024, 16, 24),
    "gpt2/large": _gpt2(1280, 20, 36),
    "gpt2/xl": _gpt2(1600, 25, 48),
}
