"""What a model family is: a configuration, `ModelConfig`, and the linen module that it makes, `FamilyModule`.

`families.py` has the table of them; a new one is a file here, with both, and a row there.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import flax.linen as nn

from specdec_jax.models.axes import Encoded, Inputs, Live, Logits, Mask, Peak, PerRow, States, Tokens
from specdec_jax.models.nodes import Nodes


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a network: the base class of every family's frozen dataclass.

    Fields that every family has, beside its own: `vocab_size`, `emb_dim`, `num_heads`, `head_dim`,
    `num_decoder_layers`, `mlp_dim`, `logits_via_embedding`, `dropout_rate`, `dtype` and `matmul_dtype`,
    as in `T5Config`.

    Attributes:
      family: its name, under which it is in the table and in stored models.
      decoder_only: there is no encoder: inputs are prompts, which outputs continue.
      encoder_dim: as in `T5Config`; None for every other family.
      max_positions: the longest sequence of the decoder, prompt and new tokens together; None: as long as one likes.
    """

    family: ClassVar[str]
    decoder_only: ClassVar[bool]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the fields

    @property
    def encoder_dim(self) -> int | None:
        return None

    @property
    def max_positions(self) -> int | None:
        return None

    def replace(self, **fields) -> Self:
        """Returns the same shape but for these fields."""
        return dataclasses.replace(self, **fields)

    def module(self, fused: bool = False, native: bool = False) -> "FamilyModule":
        """Builds the network; `fused`, `native`: for parameters in the loop's layout, as `layouts.pack` makes it."""
        raise NotImplementedError

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Lists the shape of every parameter by its name; see `parameters.parameter_shapes`,
        which keeps what this gives."""
        raise NotImplementedError

    def with_own_head(self) -> Self:
        """Returns the same function of the parameters, but for a head that is a kernel of its own."""
        raise NotImplementedError

    def explicit(self) -> Self:
        """Returns the same shape with what None stands for in place of it, so that equal shapes are equal."""
        return self

    @classmethod
    def presets(cls) -> dict[str, Self]:
        """Lists the shapes that have names."""
        return {}


class FamilyModule(nn.Module):
    """A network as `Network` runs it; `setup` of a subclass makes `token_embedder` and `decoder`.

    A subclass has the fields `config` and `native` (whether its kernels are in panels). A family
    with an encoder has `encode` and the teacher-forced `states` of `T5` besides; of one without,
    `__call__` takes `(tokens, places)`, as `GPT`'s.
    """

    def dummy_inputs(self) -> tuple:
        """Makes the smallest arguments of `__call__`, for `init`."""
        raise NotImplementedError

    def prefill(self, inputs: Inputs, mask: Mask, slots: int, copies: int = 1, encoded: Encoded | None = None) -> Any:
        """Makes the decoder's cache, `copies` rows side by side for each of the inputs; none of the
        decoder's tokens have been fed.

        Args:
          inputs: with `mask` True at tokens. Of a decoder-only network L = 0: its prompt is fed to
            the decoder.
          slots: S, positions that the self-attention caches hold.
          encoded: of the encoder, where there is one.
        """
        raise NotImplementedError

    def decode_states(
        self, tokens: Tokens, positions: PerRow | None, cache: Any, layers: int | None = None, live: Live = None,
        nodes: Nodes | None = None,
    ) -> tuple[States, Any]:  # fmt: skip
        """Feeds `tokens` at `positions` onwards, or where `nodes` are; returns states after the last of the first
        `layers` layers and the last norm, and the new cache. `live` as in `Network.decode`."""
        more = {} if nodes is None else {"nodes": nodes}  # a family without calls over nodes has no such argument
        return self.decoder.step(self.token_embedder(tokens, live), positions, cache, layers, live, **more)

    def node_cache(self, cache: Any, slots: int, positions: int) -> Any:
        """As `Network.node_cache`."""
        return self.decoder.node_cache(cache, slots, positions)

    def head(self, states: States, live: Live = None) -> Logits:
        """Logits of what `decode_states` gives."""
        return self.decoder.logits(states, self.token_embedder.embedding, live)

    def peak(self, states: States, live: Live, normalize: bool) -> Peak:
        """As `Network.peak`."""
        return self.decoder.peak(states, live, normalize)
