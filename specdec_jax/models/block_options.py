"""`BlockOptions`, which state what a family's encoder and decoder are made of."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Int

from specdec_jax.backends.axes import Rotation
from specdec_jax.backends.backend import Backend
from specdec_jax.backends.xla import AttentionShape
from specdec_jax.models.layers import NORMS, Dense, Embedder, NoNorm
from specdec_jax.models.relative_bias import RelativePositionBias
from specdec_jax.models.rotary import Rotary


class LayerKind(NamedTuple):
    """How the self-attention of a layer differs from those of others in its stack; static.

    Attributes:
      window, ahead: as in `AttentionShape`.
      rotary: the angles by which queries and keys are rotated; None: they are not.
    """

    window: int | None = None
    rotary: Rotary | None = None
    ahead: int = 0


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """What encoder and decoder are made of; static.

    Attributes:
      emb_dim, num_heads, head_dim, mlp_dim, vocab_size: D, H, K, the MLP's width, V.
      num_kv_heads: as in `AttentionShape`.
      num_encoder_layers, num_decoder_layers: numbers of layers; without an encoder 0.
      activations: one activation, or two for a gated feed-forward block.
      norm: a name in `NORMS`.
      norm_place: where it is: "pre", before each block; "post", after it has been added; or "both",
        before each block and after it, before it is added.
      final_norm: whether there is one at the end of a stack.
      embedding_norm: whether there is one after the embeddings and positions.
      use_bias: whether products have a bias, but for the head.
      self_attention: name of the decoder's self-attention.
      joint_attention: whether its queries, keys and values have one weight in checkpoints too.
      encoder_attention: name of the encoder's.
      joins_attention: whether a backend may join the weights of queries, keys and values.
      layer_kinds: what differs between layers, in turn: after the last, the first again.
      qk_norm: whether queries and keys of each head have a norm of their own.
      merged_attention: whether the decoder's self-attention attends to the encoder's output too, by
        one softmax and with the same weights, in place of cross-attention.
      apart_id: as `apart` in `layers.Embedder`.
      attention_cap, logits_cap: c of scores and of logits c·tanh(x / c); None: as they are.
      cross_attention: whether the decoder attends to an encoder's output.
      relative_buckets: number of buckets and greatest distance of T5's relative bias; None: none.
      relative_bias_per_layer: whether every layer has a table of that bias, or a stack one.
      num_positions: number of rows of tables of positions, which each stack adds to its embeddings;
        None: none.
      query_divisor: number by which queries are divided.
      embedding_deviation: standard deviation of embeddings at first.
      embedding_scale: number by which embeddings of tokens are multiplied.
      tied_head: whether the head is the transposed embedding.
      logits_bias: whether a bias is added to the logits.
      scales_outputs: whether the decoder's output is multiplied by 1/√D before the head.
      dropout_rate: rate in training, of embeddings and of what each block adds.
      inner_dropout: whether it is also that of hidden features and of a stack's output.
      dtype, matmul_dtype, separate_embeddings: as in `T5Config`.
    """

    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    num_encoder_layers: int
    num_decoder_layers: int
    activations: tuple[str, ...]
    norm: str
    use_bias: bool
    self_attention: str
    joint_attention: bool
    cross_attention: bool
    relative_buckets: tuple[int, int] | None
    relative_bias_per_layer: bool
    num_positions: int | None
    query_divisor: float
    embedding_deviation: float
    tied_head: bool
    scales_outputs: bool
    dropout_rate: float
    inner_dropout: bool
    dtype: str
    matmul_dtype: str | None
    separate_embeddings: bool = False
    norm_place: str = "pre"
    final_norm: bool = True
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    logits_bias: bool = False
    num_kv_heads: int | None = None
    encoder_attention: str = "attention"
    joins_attention: bool = True
    layer_kinds: tuple[LayerKind, ...] = (LayerKind(),)
    attention_cap: float | None = None
    logits_cap: float | None = None
    qk_norm: bool = False
    merged_attention: bool = False
    apart_id: int | None = None

    @property
    def attention_shape(self) -> AttentionShape:
        """The shape of every attention, without a window."""
        shape = self.num_heads, self.head_dim, jnp.dtype(self.dtype), self.query_divisor
        return AttentionShape(*shape, self.num_kv_heads, self.attention_cap)

    def find_kind(self, layer: int) -> LayerKind:
        """Returns what is a layer's own."""
        return self.layer_kinds[layer % len(self.layer_kinds)]

    def make_rotation(
        self, kind: LayerKind, places: Int[Array, "*N"], packed: bool
    ) -> Rotation | None:
        """Returns the rotation of a kind of layers at positions; None: there is none.

        `packed` as for `Rotary.rotation`.
        """
        if kind.rotary is None:
            return None
        return kind.rotary.rotation(places, self.head_dim, self.dtype, packed)

    def make_norm(self, packed: bool = False, name: str | None = None) -> nn.Module:
        """Makes a norm; `packed` as for `layers.RMSNorm`."""
        return NORMS[self.norm](jnp.dtype(self.dtype), packed, name=name)

    def split_norm(self, norm: nn.Module) -> tuple[Any, Any]:
        """Returns what stands before a block and after it: the block's norm, and nothing."""
        return (NoNorm(), norm) if self.norm_place == "post" else (norm, NoNorm())

    def make_output_norm(self, packed: bool, name: str | None = None) -> nn.Module | None:
        """Makes the norm of what a block adds; None where there is none."""
        return self.make_norm(packed, name) if self.norm_place == "both" else None

    def packs_norms(self, backend: Backend) -> bool:
        """Returns whether a block's norm runs by itself as a CPU's kernel, not before a product."""
        return backend.packs_weights and self.norm_place == "post"

    def name_norm(self, block: str) -> str:
        """Returns the name of a block's norm."""
        return f"{'post' if self.norm_place == 'post' else 'pre'}_{block}_layer_norm"

    def make_dense(self, features: int, **options: Any) -> Dense:
        """Makes a linear map of a block."""
        shared = dict(matmul_dtype=self.matmul_dtype, use_bias=self.use_bias)
        return Dense(features, jnp.dtype(self.dtype), **shared, **options)

    def make_embedder(self, packed: bool) -> Embedder:
        """Makes a table of embeddings of tokens."""
        shape = self.vocab_size, self.emb_dim, self.embedding_deviation
        return Embedder(*shape, self.dtype, packed, self.embedding_scale, self.apart_id)

    def make_position_table(self, packed: bool, name: str | None = None) -> Embedder:
        """Makes a table of positions."""
        assert self.num_positions is not None
        shape = self.num_positions, self.emb_dim, self.embedding_deviation
        return Embedder(*shape, self.dtype, packed, name=name)

    def make_relative_bias(self, bidirectional: bool, **name: str) -> RelativePositionBias:
        """Makes a table of T5's relative position bias."""
        assert self.relative_buckets is not None
        return RelativePositionBias(self.num_heads, *self.relative_buckets, bidirectional, **name)
