"""The base class of drafters: the interface by which an iteration and the rest of the package use
them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array, Int

from specdec_jax.files.reading import digest
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, decoder_only
from specdec_jax.speculative.state import DecodeState, Draft, Scored
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.trees import CHILDREN

if TYPE_CHECKING:
    from specdec_jax.speculative.beam_iteration import BeamTree
    from specdec_jax.speculative.beams import BeamState


class Drafter:
    """The base class of whatever proposes tokens: a pytree whose parameters are leaves, all else
    static.

    A subclass defines `init` and `draft`, both traced, and overrides other methods and attributes
    where the defaults here do not hold for it. Rejected tokens need no call that takes them back:
    each call is told the committed lengths.

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
      drafts_beams: whether it can draft for a beam search, by the methods with "beams" in their
        names.
      drafts_trees: whether it can draft trees, by the methods `init_tree`, `draft_tree` and
        `keep_path`.
      tree_kinds: how the children of its trees can be chosen, and how such trees can be verified,
        the best first, as in `CHILDREN`.
      grows_trees: whether it can draft a `DynamicTree`.
      drafts_chains: whether it can draft without a tree.
    """

    reads_encoder: ClassVar[bool] = False
    provides_probs: ClassVar[bool] = False
    varies: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    needs_target_state: ClassVar[bool] = False
    scorable: ClassVar[bool] = False
    drafts_beams: ClassVar[bool] = False
    drafts_trees: ClassVar[bool] = False
    tree_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = CHILDREN
    grows_trees: ClassVar[bool] = True
    drafts_chains: ClassVar[bool] = True

    # Traced.

    def init(
        self,
        inputs: Int[Array, "I L"],
        input_lengths: Int[Array, " I"],
        tokens: Int[Array, "B P"],
        slots: int,
    ) -> Any:
        """Returns the drafter's state before the first iteration, for B/I rows of each of the I
        inputs.

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

    def begin_beams(
        self, inputs, input_lengths, tokens, beams: int, slots: int, positions: int
    ) -> Any:
        """Returns the drafter's state before the first iteration of a beam search.

        Args:
          inputs, input_lengths: as for `init`.
          tokens: `[B, P]`, what the decoder begins with, one row for each input.
          beams: K, beams of each row.
          slots, positions: as for `Network.node_cache`.
        """
        raise NotImplementedError

    def draft_beams(
        self, draft_state: Any, state: "BeamState", tree: "BeamTree"
    ) -> tuple[Any, "BeamTree"]:
        """Adds γ levels of u nodes to the tree of the live beams; `state.config` has γ and u."""
        raise NotImplementedError

    def move_beams(self, draft_state: Any, sources: jax.Array, starts: jax.Array) -> Any:
        """Returns the state after the nodes in slots `sources [B, M]` were copied to the slots from
        `starts [B]` on."""
        raise NotImplementedError

    def init_tree(self, inputs, input_lengths, tokens, slots: int, **encoded) -> Any:
        """Returns the state before the first iteration of decoding with trees; arguments as for
        `init`."""
        return self.init(inputs, input_lengths, tokens, slots, **encoded)

    def draft_tree(
        self,
        draft_state: Any,
        state: DecodeState,
        num_wanted: Int[Array, " B"],
        room: Int[Array, " B"],
    ) -> tuple[Any, TreeDraft]:
        """Drafts the tree `state.config.tree` after each row's committed tokens.

        Args:
          num_wanted: how many of the drafted nodes are wanted: those with the smallest numbers.
          room: the greatest depth of a node.
        """
        raise NotImplementedError

    def keep_path(
        self, draft_state: Any, state: DecodeState, draft: TreeDraft, path: Int[Array, "B D"]
    ) -> Any:
        """Returns the state after the nodes with the numbers `path`, by depth, were committed.

        Args:
          state: the decode loop's, before the commit.
        """
        return draft_state

    # On the host.

    def on(self, network: Network) -> "Drafter":
        """Returns the drafter for a target of which only the traced `network` is there: itself,
        unless it stands for a part of the target."""
        return self

    def beam_width(self, beams: int, wanted: int | None) -> int:
        """Returns u, how many nodes it drafts in each level of a beam search's tree: `wanted`, by
        default 2 · `beams`."""
        return 2 * beams if wanted is None else wanted

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'name', 'under jit')})"  # where a drafter has no model

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
        """The one model that drafts beside the target, with a cache of its own; None if there is
        none."""
        return None

    def steps(self) -> Mapping[str, Network]:
        """Returns the networks of which one step is timed to tell what drafting costs, by name:
        "draft step", and variants of it to compare with."""
        return {}

    def identity(self) -> tuple[list[Any], Any]:
        """Returns the settings, and a pytree of arrays, that together decide what it drafts."""
        return [jax.tree.structure(self)], self

    @property
    def contents(self) -> str:
        """A digest of the drafter's class, settings and arrays: drafters that may draft different
        tokens differ in it."""
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
    """Checks that a drafting model has the target's vocabulary (PITFALLS row 28), kind, start token
    and mesh.

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
    if trained_on is not None and not target.has(trained_on):
        raise ValueError(
            f"drafter: got a model that was trained on another target's encoder output, expected one trained on "
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
            f"drafter: got start token {model.start_token}, expected the target's {target.start_token}"
        )
    here, there = (one.network.rules and one.network.rules.mesh for one in (target, model))
    if here != there:

        def describe(mesh):
            return "none" if mesh is None else "x".join(str(size) for size in mesh.devices.shape)

        raise ValueError(
            f"drafter: got a model on the mesh {describe(there)}, expected the target's, {describe(here)}"
        )
