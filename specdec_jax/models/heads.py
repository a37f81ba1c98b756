"""Drafting heads on a target's last hidden state, one per future token.

Stern et al. 2018; Medusa-1, Cai et al. 2024.
"""

import dataclasses

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Key

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.models import weight_layouts
from specdec_jax.models.config_validation import FieldError, check_fields
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.layers import Dense
from specdec_jax.models.network import Network
from specdec_jax.models.parameters import flatten


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """The shape of a set of heads.

    Attributes:
      num_heads: N; head i, from 1 on, predicts the i-th token after the one that the target's own
        head predicts.
      emb_dim: D, width of the target's states.
      vocab_size: V, width of the target's logits.
      num_blocks: number of residual blocks x + silu(W x) in each head.
      share_head: whether logits come from the target's own head, so that a head has only the D²
        parameters of each block. False gives every head a weight matrix `[D, V]` of its own.
      dtype, matmul_dtype: as in `T5Config`.
    """

    num_heads: int
    emb_dim: int
    vocab_size: int
    num_blocks: int = 1
    share_head: bool = False
    dtype: str = "float32"
    matmul_dtype: str | None = None

    def __post_init__(self):
        check_fields(self)
        if self.num_blocks < self.share_head:
            problem = f"got {self.num_blocks}, expected at least {int(self.share_head)}"
            raise FieldError(self, "num_blocks", problem)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its name."""
        made = jax.eval_shape(lambda: init_params(self, jax.random.key(0)))
        return {name: leaf.shape for name, leaf in flatten(made).items()}


class Head(nn.Module):
    """One head: maps states to float32 logits, with `share_head` to states for the target's."""

    config: HeadsConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"] | Float32[Array, "*N V"]:
        config = self.config
        matmul = dict(dtype=jnp.dtype(config.dtype), matmul_dtype=config.matmul_dtype)
        for block in range(config.num_blocks):
            zeros = nn.initializers.zeros  # so that a block is the identity at first
            x = x + jax.nn.silu(
                Dense(config.emb_dim, kernel_init=zeros, name=f"block_{block}", **matmul)(x)
            )
        if config.share_head:
            return x
        return Dense(config.vocab_size, output_dtype=jnp.float32, name="logits_dense", **matmul)(x)


class Heads(nn.Module):
    """All N heads on the same states."""

    config: HeadsConfig

    @nn.compact
    def __call__(
        self, states: Float[Array, "B D"]
    ) -> Float[Array, "B N D"] | Float32[Array, "B N V"]:
        states = states.astype(self.config.dtype)
        heads = range(self.config.num_heads)
        return jnp.stack([Head(self.config, name=f"head_{head}")(states) for head in heads], axis=1)


@flax.struct.dataclass
class HeadsNetwork:
    """The heads as a jitted function takes them: the parameters are traced, the module is static.

    Attributes:
      params: nested dict of arrays, in the decode loop's layout or plain.
      target: the target, or as much of it as its head takes; None for heads with weights of their
        own.
      module: the linen module, hashable.
    """

    params: dict
    target: Network | None
    module: Heads = flax.struct.field(pytree_node=False)

    @property
    def config(self) -> HeadsConfig:
        return self.module.config

    def logits(self, states: Float[Array, "B D"]) -> Float32[Array, "B N V"]:
        """Returns the logits of all heads for the target's states."""
        outputs = self.module.apply({"params": self.params}, states)
        if not self.config.share_head:
            return outputs
        assert self.target is not None
        return self.target.head(outputs)


def init_params(
    config: HeadsConfig, key: Key[Array, ""], head_weight: Float[Array, "D V"] | None = None
) -> dict:
    """Makes the parameters of untrained heads in float32: blocks of 0, and weights of their own.

    The latter begin as copies of `head_weight`, or at random without one.
    """
    params = Heads(config).init(key, jnp.zeros((1, config.emb_dim)))["params"]
    if head_weight is not None and not config.share_head:
        for head in params.values():
            # A copy each, since training donates its buffers.
            head["logits_dense"]["kernel"] = jnp.array(head_weight, jnp.float32)
    return params


def head_weight(config: ModelConfig, params: dict) -> Float[Array, "D V"]:
    """Returns the weight by which a model of these parameters multiplies its last states.

    A bias of the logits is not part of it.
    """
    if config.logits_via_embedding:
        weight = params["token_embedder"]["embedding"].T
    else:
        weight = params["decoder"]["logits_dense"]["kernel"]
    if not config.block_options().scales_outputs:
        return weight
    return weight / jnp.sqrt(config.emb_dim).astype(weight.dtype)


def pack(params: dict, dtype: str) -> dict:
    """Returns `params` in the decode loop's layout; the dicts that were given stay as they are."""
    copied = jax.tree.map(lambda leaf: leaf, params)
    return weight_layouts.pack(copied, packed_weights.can_pack(dtype))


def unpack(packed: dict) -> dict:
    """Returns what `pack` was given."""
    return weight_layouts.unpack(packed)
