"""The base classes of a model family: of its configuration, and of its linen module.

A new family is a file beside this one that subclasses both, and a row in the table of
`families.py`.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from specdec_jax.backends.axes import (
    Encoded,
    Inputs,
    Layers,
    Logits,
    Mask,
    PerRow,
    States,
    Tokens,
    Valid,
)
from specdec_jax.backends.backend import Backend
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models.config_validation import FieldError
from specdec_jax.models.layers import undrawn_parameters

# The places of a sequence whose logits are wanted, None for all, and these logits.
Places = Int[Array, "B N"] | None
LogitsAt = Logits | Float32[Array, "B N V"]


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
      image_id: as in `GemmaConfig`; None for every other family.
      encoded_dim: width of what the network's own encoder returns.
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
    def encoded_dim(self) -> int:
        return self.emb_dim

    @property
    def input_vocab_size(self) -> int:
        """Number of ids that an input may have, the logits' where there is one vocabulary."""
        return self.vocab_size

    @property
    def shares_vocabulary(self) -> bool:
        """Whether an id is the same token in an input as in an output."""
        return True

    @property
    def image_id(self) -> int | None:
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

    def replace(self, **fields: Any) -> Self:
        """Returns the same shape with other values of these fields."""
        return dataclasses.replace(self, **fields)

    def module(self, backend: Backend = Backend()) -> "FamilyModule":
        """Makes the linen module, for a backend; by default in plain XLA, with T5X's weights."""
        raise NotImplementedError

    def block_options(self) -> Any:
        """Returns the `BlockOptions` that say what the decoder is made of."""
        raise NotImplementedError

    def encoder_options(self) -> Any:
        """Returns the `BlockOptions` that say what the encoder is made of."""
        return self.block_options()

    def shared_options(self) -> dict[str, Any]:
        """Returns the `BlockOptions` that have the name of a field or property."""
        names = ["vocab_size", "emb_dim", "num_heads", "head_dim", "num_decoder_layers", "mlp_dim"]
        names += ["dropout_rate", "dtype", "matmul_dtype"]
        return {name: getattr(self, name) for name in names} | {
            "tied_head": self.logits_via_embedding
        }

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by its name.

        Called through `parameters.parameter_shapes`, which caches it.
        """
        module = self.module()
        # All in one function, so that nothing compiles.
        with undrawn_parameters():
            made = jax.eval_shape(lambda: module.init(jax.random.key(0), *module.dummy_inputs()))
        flat = flax.traverse_util.flatten_dict(made["params"], sep="/")
        return {name: leaf.shape for name, leaf in flat.items()}

    def with_own_head(self) -> Self:
        """Returns the same network's configuration with a head of its own, not the embedding."""
        return self.explicit().replace(logits_via_embedding=False)

    def resize(
        self, *, emb_dim: int, num_heads: int, head_dim: int, num_decoder_layers: int, mlp_dim: int
    ) -> Self:
        """Returns another size of the same network, which has no encoder.

        Raises FieldError for a size that the family cannot have.
        """
        sizes = dict(emb_dim=emb_dim, num_heads=num_heads, num_decoder_layers=num_decoder_layers)
        return self.replace(**sizes, head_dim=head_dim, mlp_dim=mlp_dim)

    def explicit(self) -> Self:
        """Returns the same shape without None for other values, so that equal shapes are equal."""
        return self

    @classmethod
    def presets(cls) -> dict[str, Self]:
        """Returns the published shapes of the family by name."""
        return {}


class PositionTableConfig(ModelConfig):
    """The base class of configurations with tables of positions, whose heads divide the width."""

    def check_heads(self) -> None:
        """Raises FieldError unless `emb_dim` can be divided among the heads."""
        if self.emb_dim % self.num_heads:
            expected = f"a multiple of num_heads = {self.num_heads}"
            raise FieldError(self, "emb_dim", f"got {self.emb_dim}, expected {expected}")

    def resize(self, *, head_dim: int, **sizes: int) -> Self:
        resized = self.replace(**sizes)
        if resized.head_dim != head_dim:
            expected = f"emb_dim / num_heads = {resized.head_dim}"
            raise FieldError(self, "head_dim", f"got {head_dim}, expected {expected}")
        return resized

    @property
    def head_dim(self) -> int:
        """K, features of each head."""
        return self.emb_dim // self.num_heads

    @property
    def max_positions(self) -> int:
        return self.num_positions


def list_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter by its name, as `ModelConfig.parameter_shapes` does.

    One layer of each stack is traced, whose shapes all others have: 24 + 24 would take seconds.
    """
    counts = {stack: getattr(config, f"num_{stack}_layers", 0) for stack in ("encoder", "decoder")}
    fewer = {f"num_{stack}_layers": 1 for stack, layers in counts.items() if layers}
    single = ModelConfig.parameter_shapes(config.replace(**fewer))
    shapes = {}
    for name, shape in reversed(single.items()):  # embeddings first, as the first to be missed
        stack, layer, rest = name.partition("/layers_0/")
        layers = range(counts[stack] if layer else 0)
        names = [f"{stack}/layers_{i}/{rest}" for i in layers] or [name]
        shapes |= dict.fromkeys(names, shape)
    return shapes


def check_uses_backend(config: ModelConfig, got: str) -> None:
    """Raises ValueError unless a network uses its backend, which `got` needs."""
    if not config.uses_backend:
        raise mismatch_error(type(config).__name__, got, "a family that uses a Backend")


class FamilyModule(nn.Module):
    """The base class of every family's network, as `Network` runs it.

    A subclass has the fields `config` and `backend`, and defines `prefill`, `decode_states` and
    `head`. One with an encoder also has `encode`, the teacher-forced `states`, `__call__` and
    `dummy_inputs`, as `blocks.EncoderDecoder` has them. Training on its states needs `states` of
    one without an encoder too.
    """

    def dummy_inputs(self) -> tuple:
        """Makes the smallest arguments of `__call__`, for `init`."""
        return (jnp.ones((1, 2), jnp.int32),)

    def __call__(self, tokens: Tokens, places: Places = None) -> LogitsAt:
        """Returns teacher-forced logits without an encoder: of all positions, or at `places`."""
        batch, length = tokens.shape
        cache = self.prefill(tokens[:, :0], jnp.zeros((batch, 0), bool), length)
        states, _ = self.decode_states(tokens, jnp.zeros(batch, jnp.int32), cache)
        return self.head_at(states, places)

    def head_at(self, states: States, places: Places) -> LogitsAt:
        """Returns the logits of states, or only those at `places`."""
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
            decoder (`prefill.fill_cache`).
          mask: True at tokens, False at padding.
          slots: S, slots of the self-attention caches.
          copies: rows of the cache for each input, side by side.
          encoded: the encoder's output, of another model where there is an `encoder_dim`; None: run
            the encoder.
        """
        raise NotImplementedError

    def decode_states(
        self,
        tokens: Tokens,
        positions: PerRow | None,
        cache: Any,
        layers: Layers = None,
        valid: Valid = None,
        nodes: AnyNodes | None = None,
    ) -> tuple[States, Any]:
        """Feeds `tokens`; returns the decoder's states after the final norm, and the new cache.

        Args:
          tokens: T tokens of each row.
          positions: the first position of each row; None with `nodes`.
          cache: from `prefill`, or an earlier call.
          layers: which decoder layers run: the first so many, those with the numbers of a tuple,
            or all (None).
          valid: as for `Network.decode`.
          nodes: where the tokens lie if they are nodes of trees; not given otherwise.
        """
        raise NotImplementedError

    def node_cache(self, cache: Any, slots: int, positions: int) -> Any:
        """Does what `Network.node_cache` does; raises ValueError in a family without it."""
        check_uses_backend(self.config, "a tree or beams")
        raise mismatch_error(
            type(self.config).__name__, "a tree or beams", "a module with `node_cache`"
        )

    def head(self, states: States, valid: Valid = None) -> Logits:
        """Returns the logits of the states that `decode_states` returns."""
        raise NotImplementedError
