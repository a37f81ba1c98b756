"""A drafting model whose inputs are token embeddings plus projected states.

The states are the target's last ones, and the model's own for tokens that it has drafted itself
(EAGLE, Li et al. 2024, arXiv 2401.15077).
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specdec_jax.backends.axes import PerRow, Tokens, Valid
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.models.config_validation import check_fields
from specdec_jax.models.layers import Dense
from specdec_jax.models.network import Network


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The shape of the two projections of states that a drafting model reads.

    Attributes:
      target_dim: D, width of the target's states.
      emb_dim: d, width of the drafting model.
      dtype: name of the computation's dtype, "float32" or "bfloat16".
      matmul_dtype: dtype to which operands of products are rounded (training); None: `dtype`.
    """

    target_dim: int
    emb_dim: int
    dtype: str = "float32"
    matmul_dtype: str | None = None

    def __post_init__(self):
        check_fields(self)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its name."""
        return {
            "target_state/kernel": (self.target_dim, self.emb_dim),
            "own_state/kernel": (self.emb_dim, self.emb_dim),
        }


class StateProjections(nn.Module):
    """The projections W `[D, d]` of the target's states and U `[d, d]` of the model's own.

    They begin at zero, so that the model drafts at first what it drafts without them.
    """

    config: EagleConfig

    def setup(self):
        config = self.config
        matmul = dict(dtype=jnp.dtype(config.dtype), matmul_dtype=config.matmul_dtype)
        zeros = nn.initializers.zeros
        self.target_state = Dense(config.emb_dim, kernel_init=zeros, **matmul)
        self.own_state = Dense(config.emb_dim, kernel_init=zeros, **matmul)

    def __call__(self, target_states: Array, own_states: Array) -> tuple[Array, Array]:
        return self.project_target(target_states), self.project_own(own_states)

    def project_target(self, states: Float[Array, "B T D"]) -> Float[Array, "B T d"]:
        """Returns W s for the target's states s."""
        return self.target_state(states)

    def project_own(self, states: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
        """Returns U h for the model's own states h."""
        return self.own_state(states)


def init_projections(config: EagleConfig) -> dict:
    """Makes the parameters of untrained projections in float32, which are 0."""
    given = (jnp.zeros((1, 1, width)) for width in (config.target_dim, config.emb_dim))
    return StateProjections(config).init(jax.random.key(0), *given)["params"]


@flax.struct.dataclass
class EagleNetwork:
    """A drafting model with its projections as a jitted function takes them.

    Attributes:
      params: parameters of the projections, in the decode loop's layout or plain.
      model: the drafting model's network.
      module: the linen module of the projections, hashable.
    """

    params: dict
    model: Network
    module: StateProjections = flax.struct.field(pytree_node=False)

    def project(self, states: Float[Array, "B T D"], own: bool) -> Float[Array, "B T d"]:
        """Returns W s for the target's states s, or U h if they are the model's `own` states h."""
        method = "project_own" if own else "project_target"
        states = states.astype(self.module.config.dtype)
        return self.module.apply({"params": self.params}, states, method=method)

    def decode(
        self,
        tokens: Tokens,
        states: Float[Array, "B T D"],
        positions: PerRow,
        cache: Any,
        valid: Valid = None,
        own: bool = False,
    ) -> tuple[Float[Array, "B T d"], Any]:
        """Feeds pairs of a token and the state before it, as `Network.decode_states` does."""
        added = self.project(states, own)
        return self.model.decode_states(tokens, positions, cache, valid=valid, added=added)

    def decode_nodes(
        self,
        tokens: Tokens,
        states: Float[Array, "B T D"],
        nodes: AnyNodes,
        cache: Any,
        valid: Valid = None,
        own: bool = False,
    ) -> tuple[Float[Array, "B T d"], Any]:
        """Feeds pairs as nodes of trees, as `Network.decode_nodes` does."""
        added = self.project(states, own)
        return self.model.decode_nodes(tokens, nodes, cache, valid, added=added)
