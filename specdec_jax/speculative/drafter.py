"""The base class of drafters: what an iteration and the rest of the package ask of whatever proposes tokens."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array, Int

from specdec_jax.files.reading import digest
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, decoder_only
from specdec_jax.speculative.state import DecodeState, Draft, Scored

if TYPE_CHECKING:
    from specdec_jax.speculative.beam_iteration import BeamTree
    from specdec_jax.speculative.beams import BeamState


class Drafter:
    """Proposes tokens. A drafter is a pytree: parameters are leaves, everything else is static.

    A subclass defines `init` and `draft`, both traced, and overrides what else is not as here.
    Rewinding is implicit: each call is told the committed lengths.

    Attributes:
      reads_encoder: `init` gets the target's encoder output `[I, L, D]` as `encoded`.
      tells_law: drafts come from laws that a policy of γ can read (`Draft.seen`).
      varies: less than is wanted may be drafted, or nothing.
      observes: it learns from the target's calls by `observe`, which is otherwise absent from the compiled program.
      needs_target_state: it drafts from the target's cache or last state, so that it can only begin where the target
        stopped.
      scorable: the law that it draws from is its model's, so that acceptance can be had by scoring texts with both.
      drafts_beams: it can draft for a beam search, by the methods with that word in their names.
    """

    reads_encoder: ClassVar[bool] = False
    tells_law: ClassVar[bool] = False
    varies: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    needs_target_state: ClassVar[bool] = False
    scorable: ClassVar[bool] = False
    drafts_beams: ClassVar[bool] = False

    # Traced.

    def init(
        self, inputs: Int[Array, "I L"], input_lengths: Int[Array, " I"], tokens: Int[Array, "B P"], slots: int
    ) -> Any:
        """Returns the state for `inputs` and what the decoder begins with, `tokens`, B/I rows for each input.

        That is the start token and the decoder prefix. For a decoder-only target it is the prompt, and L = 0.
        """
        raise NotImplementedError

    def draft(self, draft_state: Any, state: DecodeState, num_wanted: Int[Array, " B"]) -> tuple[Any, Draft]:
        """Drafts up to `num_wanted` tokens after each row's committed ones."""
        raise NotImplementedError

    def observe(self, draft_state: Any, state: DecodeState, scored: Scored) -> Any:
        """Returns the state after a call of the target, where it `observes`; `state` is the one after the commit."""
        return draft_state

    def rewind(self, draft_state: Any, lengths: Int[Array, " B"]) -> Any:
        """Returns the state in which nothing past the first `lengths` tokens is committed.

        For what keeps a cache. A part of a cascade that begins past the committed tokens cannot tell by itself.
        """
        return draft_state

    def begin_beams(self, inputs, input_lengths, tokens, beams: int, slots: int, positions: int) -> Any:
        """As `init`, for a search with `beams` beams of each of the rows `tokens [B, P]`; `slots` and `positions` as for
        `Network.node_cache`."""
        raise NotImplementedError

    def draft_beams(self, draft_state: Any, state: "BeamState", tree: "BeamTree") -> tuple[Any, "BeamTree"]:
        """Grows the tree of the live beams by γ levels of u nodes, as `state.program` says."""
        raise NotImplementedError

    def move_beams(self, draft_state: Any, sources: jax.Array, starts: jax.Array) -> Any:
        """Returns the state in which the nodes in slots `sources [B, M]` lie in the slots from `starts [B]` on."""
        raise NotImplementedError

    # On the host.

    def beam_width(self, beams: int, wanted: int | None) -> int:
        """Returns how many nodes it drafts in each level of a beam search's tree: as many as are `wanted`, or twice as
        many as there are beams."""
        return 2 * beams if wanted is None else wanted

    @property
    def name(self) -> str:
        """What messages and records call it."""
        return type(self).__name__

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        """The models that it is made of."""
        return ()

    @property
    def second_model(self) -> LanguageModel | None:
        """The one model that drafts beside the target, with an encoder and a cache of its own; None: there is none."""
        return None

    def steps(self) -> Mapping[str, Network]:
        """Networks whose single steps tell what drafting costs, by name: "draft step", and
        variants of it to compare with."""
        return {}

    def identity(self) -> tuple[list[Any], Any]:
        """Settings, and arrays in any pytree, that together decide what it drafts."""
        return [jax.tree.structure(self)], self

    @property
    def contents(self) -> str:
        """Digest that tells drafters apart that may draft otherwise: kind, settings, and every number."""
        settings, arrays = self.identity()
        parts = [type(self).__name__, *map(str, settings)]
        return digest([*map(str.encode, parts), *(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays))])

    def check(self, target: LanguageModel) -> None:
        """Refuses a target that it cannot draft for.

        Raises:
          ValueError: with what was got and what was expected.
        """
        for model in self.models:
            check_model(target, model)


def check_model(target: LanguageModel, model: LanguageModel) -> None:
    """Refuses a drafting model whose vocabulary is not the target's (PITFALLS row 28), or of another kind or mesh.

    Raises:
      ValueError: with what was got and what was expected.
    """
    if decoder_only(model) != decoder_only(target):
        kinds = "a decoder-only model", "a model with an encoder"
        got, expected = kinds if decoder_only(model) else kinds[::-1]
        raise ValueError(f"drafter: got {got}, expected {expected}, like the target")
    reads = model.config.encoder_dim
    if reads is not None and reads != target.config.emb_dim:
        expected = f"the target's width, {target.config.emb_dim}"
        raise ValueError(f"drafter: got a model that reads encoder outputs of width {reads}, expected {expected}")
    trained_on = model.encoder_fingerprint if reads is not None else None
    if trained_on is not None and not target.has(trained_on):
        raise ValueError(
            f"drafter: got a model that was trained on another target's encoder output, expected one trained on "
            f"{target.name or 'the target'}'s"
        )
    ours, theirs = target.vocabulary, model.vocabulary
    if ours is not None and theirs is not None and ours is not theirs and ours.fingerprint() != theirs.fingerprint():
        raise ValueError(
            f"drafter: got a vocabulary of {theirs.size} pieces that differs from the target's "
            f"({ours.size} pieces), expected the same pieces with the same ids"
        )
    if model.start_token != target.start_token:
        raise ValueError(f"drafter: got start token {model.start_token}, expected the target's {target.start_token}")
    here, there = (one.network.rules and one.network.rules.mesh for one in (target, model))
    if here != there:
        describe = lambda mesh: "none" if mesh is None else "x".join(str(size) for size in mesh.devices.shape)
        raise ValueError(f"drafter: got a model on the mesh {describe(there)}, expected the target's, {describe(here)}")
