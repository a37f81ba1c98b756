"""The base class of drafters: how an iteration and the rest of the package use them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from specdec_jax.files.reading import digest
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, decoder_only
from specdec_jax.speculative.state import DecodeState, Draft, Scored


class Drafter:
    """The base class of drafters: a pytree whose parameters are leaves, all else static.

    A subclass defines `init` and `draft`, both traced, and overrides other methods and attributes
    where the defaults here do not hold for it. Rejected tokens need no call that takes them back:
    each call gets the committed lengths. A drafter of trees is a `TreeDrafter` (tree_drafter.py), a
    drafter for beam searches a `BeamDrafter` (beam_drafter.py).

    Attributes:
      reads_encoder: whether `init` gets the target's encoder output `[I, L, D]` as `encoded`.
      provides_probs: whether drafts come from distributions that a policy of γ can read
        (`Draft.seen`).
      varies: whether fewer tokens than wanted may be drafted, or none.
      observes: whether it learns from the target's calls by `observe`, which is otherwise absent
        from the compiled program.
      needs_target_state: whether it drafts from the target's cache or last state, so that it can
        only begin where the target stopped.
      scorable: whether the distribution that it draws from is its model's, so that the acceptance
        rate can be computed by scoring texts with both models.
    """

    reads_encoder: ClassVar[bool] = False
    provides_probs: ClassVar[bool] = False
    varies: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    needs_target_state: ClassVar[bool] = False
    scorable: ClassVar[bool] = False

    # Traced.

    def init(
        self,
        inputs: Int[Array, "I L"],
        input_lengths: Int[Array, " I"],
        tokens: Int[Array, "B P"],
        slots: int,
    ) -> Any:
        """Returns the state before the first iteration, for B/I rows of each of the I inputs.

        Args:
          inputs: ids of the encoder's inputs; L = 0 for a decoder-only target.
          tokens: what the decoder begins with: start token and decoder prefix, or the prompt.
          slots: S, slots of tokens and of caches.
        """
        raise NotImplementedError

    def draft(
        self, draft_state: Any, state: DecodeState, num_wanted: Int[Array, " B"]
    ) -> tuple[Any, Draft]:
        """Drafts up to `num_wanted` tokens after each row's committed ones."""
        raise NotImplementedError

    def observe(self, draft_state: Any, state: DecodeState, scored: Scored) -> Any:
        """Returns the drafter's state after a call of the target; called only if it `observes`.

        Args:
          state: the decode loop's, after the commit.
          scored: what the target was fed and what it returned.
        """
        return draft_state

    def rewind(self, draft_state: Any, lengths: Int[Array, " B"]) -> Any:
        """Returns the state in which only the first `lengths` tokens of each row are committed.

        Only a drafter with a cache of its own needs it, and only inside a cascade: a part that
        begins past the committed tokens cannot tell which of them were accepted.
        """
        return draft_state

    # On the host.

    def on(self, network: Network) -> "Drafter":
        """Returns the drafter for a target of which only the traced `network` exists.

        That is the drafter itself, unless it stands for a part of the target.
        """
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'name', 'under jit')})"  # without its model

    @property
    def name(self) -> str:
        """The drafter's name in messages and records."""
        return type(self).__name__

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        """The models that it is made of."""
        return ()

    @property
    def second_model(self) -> LanguageModel | None:
        """The one model that drafts beside the target, with its own cache; None without one."""
        return None

    def steps(self) -> Mapping[str, Network]:
        """Returns the networks of which one step is timed to measure what drafting costs, by name.

        "draft step" is the drafter's; others are variants to compare with.
        """
        return {}

    def identity(self) -> tuple[list[Any], Any]:
        """Returns the settings, and a pytree of arrays, that together decide what it drafts."""
        return [jax.tree.structure(self)], self

    @property
    def contents(self) -> str:
        """A digest of the class, settings and arrays, which decide what is drafted."""
        settings, arrays = self.identity()
        parts = [type(self).__name__, *map(str, settings)]
        return digest(
            [
                *map(str.encode, parts),
                *(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays)),
            ]
        )

    def check(self, target: LanguageModel) -> None:
        """Checks that it can draft for `target`.

        Raises:
          ValueError: it cannot; the message says why.
        """
        for model in self.models:
            check_model(target, model)


def check_model(target: LanguageModel, model: LanguageModel) -> None:
    """Checks that a drafting model has the target's vocabulary (PITFALLS row 28), kind and mesh.

    Raises:
      ValueError: one of them differs; the message says which.
    """
    if decoder_only(model) != decoder_only(target):
        kinds = "a decoder-only model", "a model with an encoder"
        got, expected = kinds if decoder_only(model) else kinds[::-1]
        raise ValueError(f"drafter: got {got}, expected {expected}, like the target")
    reads = model.config.encoder_dim
    if reads is not None and reads != target.config.emb_dim:
        expected = f"the target's width, {target.config.emb_dim}"
        raise ValueError(
            f"drafter: got a model that reads encoder outputs of width {reads}, expected {expected}"
        )
    trained_on = model.encoder_fingerprint if reads is not None else None
    if trained_on is not None and trained_on != target.fingerprint:
        raise ValueError(
            "drafter: got a model that was trained on another target's encoder output, "
            "expected one trained on "
            f"{target.name or 'the target'}'s"
        )
    ours, theirs = target.vocabulary, model.vocabulary
    if (
        ours is not None
        and theirs is not None
        and ours is not theirs
        and ours.fingerprint() != theirs.fingerprint()
    ):
        raise ValueError(
            f"drafter: got a vocabulary of {theirs.size} pieces that differs from the target's "
            f"({ours.size} pieces), expected the same pieces with the same ids"
        )
    if model.start_token != target.start_token:
        raise ValueError(
            f"drafter: got start token {model.start_token}, "
            f"expected the target's {target.start_token}"
        )
    here, there = (one.network.rules and one.network.rules.mesh for one in (target, model))
    if here != there:

        def describe(mesh: Mesh | None):
            return "none" if mesh is None else "x".join(str(size) for size in mesh.devices.shape)

        raise ValueError(
            f"drafter: got a model on the mesh {describe(there)}, expected the target's, "
            f"{describe(here)}"
        )
