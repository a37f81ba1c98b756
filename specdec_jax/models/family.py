"""The base classes of a model family: its configuration, `ModelConfig`, and its linen module,
`FamilyModule`.

A new family is a file beside this one that subclasses both, and a row in the table of
`families.py`.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp

from specdec_jax.backends.axes import (
    Encoded,
    Inputs,
    Logits,
    Mask,
    PerRow,
    States,
    TokenAndLogprob,
    Tokens,
    Valid,
)
from specdec_jax.backends.backend import Backend
from specdec_jax.backends.tree_positions import AnyNodes


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a network: the base class of every family's configuration, a frozen dataclass.

    Every family has the fields `vocab_size`, `emb_dim` and `dtype`, beside its own. One that
    `uses_backend` also has `num_heads`, `head_dim`, `num_decoder_layers` and `mlp_dim`, as in
    `T5Config`.

    Attributes:
      family: the family's name in the table and in stored models.
      decoder_only: whether there is no encoder; inputs are then prompts, which outputs continue.
      uses_backend: whether the network asks its `Backend` for all that depends on the device, so
        that its weights may be joined, packed, rounded to int8 and divided over a mesh. If not, its
        parameters stay as `init` made them, and the backend is XLA's on one device.
      logits_via_embedding, dropout_rate, matmul_dtype: as in `T5Config`; fields of it may be
        declared only with defaults.
      encoder_dim: as in `T5Config`; None for every other family.
      max_positions: the longest sequence of the decoder, prompt and new tokens together; None: no
        limit.
    """

    family: ClassVar[str]
    decoder_only: ClassVar[bool]
    uses_backend: ClassVar[bool] = True

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the fields

    @property
    def encoder_dim(self) -> int | None:
        return None

    @property
    def logits_via_embedding(self) -> bool:
        return False

    @property
    def dropout_rate(self) -> float:
        return 0.0

    @property
    def matmul_dtype(self) -> str | None:
        return None

    @property
    def max_positions(self) -> int | None:
        return None

    def replace(self, **fields) -> Self:
        """Returns the same shape with other values of these fields."""
        return dataclasses.replace(self, **fields)

    def module(self, backend: Backend = Backend()) -> "FamilyModule":
        """Makes the linen module, for a backend; by default in plain XLA, with T5X's weights."""
        raise NotImplementedError

    def shared_options(self) -> dict[str, Any]:
        """Returns the `BlockOptions` that have the name of a field or property."""
        return {
            name: getattr(self, name)
            for name in (
                *("vocab_size", "emb_dim", "num_heads", "head_dim", "num_decoder_layers"),
                *("mlp_dim", "dropout_rate", "dtype", "matmul_dtype"),
            )
        } | {"tied_head": self.logits_via_embedding}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by its name.

        Called through `parameters.parameter_shapes`, which caches it.
        """
        module = self.module()
        made = jax.eval_shape(module.init, jax.random.key(0), *module.dummy_inputs())["params"]
        flat = flax.traverse_util.flatten_dict(made, sep="/")
        return {name: leaf.shape for name, leaf in flat.items()}

    def with_own_head(self) -> Self:
        """Returns the configuration of the same network with a head that is a weight of its own,
        not the embedding."""
        raise NotImplementedError

    def explicit(self) -> Self:
        """Returns the same shape with the values that None stands for in its place, so that equal
        shapes compare equal."""
        return self

    @classmethod
    def presets(cls) -> dict[str, Self]:
        """Returns the published shapes of the family by name."""
        return {}


def check_uses_backend(config: ModelConfig, got: str) -> None:
    """Checks that a network uses its backend, as `got` needs; raises ValueError otherwise."""
    if not config.uses_backend:
        name = type(config).__name__
        raise ValueError(f"{name}: got {got}, expected a family that uses a Backend")


class FamilyModule(nn.Module):
    """The base class of every family's network, as `Network` runs it.

    A subclass has the fields `config` and `backend`. It defines `prefill`, and either makes
    `token_embedder` and `decoder` in `setup` or defines `decode_states` and `head`. A family with
    an encoder also has `encode`, the teacher-forced `states`, `__call__` and `dummy_inputs`, as
    `T5` has them.
    """

    def dummy_inputs(self) -> tuple:
        """Makes the smallest arguments of `__call__`, for `init`."""
        return (jnp.ones((1, 2), jnp.int32),)

    def __call__(self, tokens: Tokens, places: Tokens | None = None) -> Logits:
        """Returns the teacher-forced logits of whole sequences, or only those at `places`, of a
        family without an encoder."""
        batch, length = tokens.shape
        cache = self.prefill(tokens[:, :0], jnp.zeros((batch, 0), bool), length)
        states, _ = self.decode_states(tokens, jnp.zeros(batch, jnp.int32), cache)
        if places is not None:
            states = jnp.take_along_axis(states, places[..., None], axis=1)
        return self.head(states)

    def prefill(
        self,
        inputs: Inputs,
        mask: Mask,
        slots: int,
        copies: int = 1,
        encoded: Encoded | None = None,
    ) -> Any:
        """Makes the decoder's cache before any of the decoder's tokens is fed.

        Args:
          inputs: ids of the inputs; L = 0 for a decoder-only network, whose prompt is fed to the
            decoder.
          mask: True at tokens, False at padding.
          slots: S, slots of the self-attention caches.
          copies: rows of the cache for each input, side by side.
          encoded: the encoder's output, where there is an encoder.
        """
        raise NotImplementedError

    def decode_states(
        self,
        tokens: Tokens,
        positions: PerRow | None,
        cache: Any,
        layers: int | None = None,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
    ) -> tuple[States, Any]:
        """Feeds `tokens` and returns the decoder's hidden states after the final norm, and the new
        cache.

        Args:
          positions: the first position of each row; None with `nodes`.
          layers: number of decoder layers to run, from the first; None: all.
          valid: as for `Network.decode`.
          nodes: where the tokens lie if they are nodes of trees.
        """
        more = (
            {} if nodes is None else {"nodes": nodes}
        )  # a family without calls over nodes has no such argument
        return self.decoder.step(
            self.token_embedder(tokens, valid), positions, cache, layers, valid, **more
        )

    def node_cache(self, cache: Any, slots: int, positions: int) -> Any:
        """Does what `Network.node_cache` does."""
        return self.decoder.node_cache(cache, slots, positions)

    def head(self, states: States, valid: Valid = None) -> Logits:
        """Returns the logits of the states that `decode_states` returns."""
        return self.decoder.logits(states, self.token_embedder.embedding, valid)

    def greedy_token_and_logprob(
        self, states: States, valid: Valid, normalize: bool
    ) -> TokenAndLogprob:
        """Does what `Network.greedy_token_and_logprob` does."""
        return self.decoder.greedy_token_and_logprob(states, valid, normalize)
