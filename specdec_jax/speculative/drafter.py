"""The base classes of drafters: how an iteration and the rest of the package use them."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.files.reading import digest
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, is_decoder_only
from specdec_jax.speculative.distributions import Categorical, PointMass
from specdec_jax.speculative.state import DecodeState, Draft, Scored
from specdec_jax.speculative.tree_draft import Branches, TreeDraft
from specdec_jax.speculative.trees import CHILDREN


class Drafter:
    """The base class of drafters: a pytree whose parameters are leaves, all else static.

    A subclass defines `draft` and overrides other methods and attributes where the defaults here do
    not hold. Rejected tokens need no call that takes them back: each call gets the committed
    lengths. A drafter of trees is a `TreeDrafter`, a drafter for beam searches a `BeamDrafter`
    (beam_drafter.py).

    Attributes:
      reads_encoder: whether `init` gets the target's encoder output `[I, L, D]` as `encoded`.
      provides_probs: whether drafts come from distributions that a policy of γ can read
        (`Draft.seen`).
      draws: whether tokens are drawn from distributions that a drafter's own temperature and
        filters change (`drafter_sampling`).
      varies: whether fewer tokens than wanted may be drafted, or none.
      needs_target_state: whether it drafts from the target's cache or last state, so that it can
        only begin where the target stopped.
      reads_states: whether `observe` reads the target's last states. Only then are they kept.
      reads_logits: whether `observe` reads the target's logits. At temperature 0 they are otherwise
        not computed where the network finds their argmax without them.
      scorable: whether the distribution that it draws from is its model's, so that the acceptance
        rate can be computed by scoring texts with both models.
      drafts_at_once: whether a draft takes one call of its model, whatever γ is.
      remembers: whether it knows outputs of other rows or calls, which may be set for one instance.
        Above temperature 0 it takes `verifier="gumbel"` only: a draft that knows what was drawn
        with the key it is verified with would bias the sample, and samples would depend on their
        batch. Gumbel coupling draws the same whatever is drafted.
    """

    reads_encoder: ClassVar[bool] = False
    provides_probs: ClassVar[bool] = False
    draws: ClassVar[bool] = True
    varies: ClassVar[bool] = False
    needs_target_state: ClassVar[bool] = False
    reads_states: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    scorable: ClassVar[bool] = False
    drafts_at_once: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    # Traced.

    def init(
        self,
        inputs: Int[Array, "I L"],
        input_lengths: Int[Array, " I"],
        tokens: Int[Array, "B P"],
        slots: int,
    ) -> Any:
        """Returns the state before the first iteration, for B/I rows of each input; default: none.

        Args:
          inputs: ids of the encoder's inputs; L = 0 for a decoder-only target.
          tokens: what the decoder begins with: start token and decoder prefix, or the prompt.
          slots: S, slots of tokens and of caches.
        """
        return ()

    def read_prefix(
        self, draft_state: Any, state: DecodeState, states: Float[Array, "B T D"] | None
    ) -> Any:
        """Returns the drafter's state once the target has read what the decoder begins with.

        Args:
          state: the decode loop's, before the first iteration.
          states: the target's last states at all T = P − 1 tokens but the last one, with anything
            past a row's own; None if there is one token alone.
        """
        return draft_state

    def draft(
        self, draft_state: Any, state: DecodeState, num_wanted: Int[Array, " B"]
    ) -> tuple[Any, Draft]:
        """Drafts up to `num_wanted` tokens, ids below V, after each row's committed ones."""
        raise NotImplementedError

    def observe(self, draft_state: Any, state: DecodeState, scored: Scored) -> Any:
        """Returns the drafter's state after a call of the target, from which it may learn.

        Args:
          state: the decode loop's, after the commit.
          scored: what the target was fed, and what it returned as far as the class reads it.
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

    def pair_with(self, target: LanguageModel) -> "Drafter":
        """Returns the drafter as it drafts for `target`, for which it has been checked.

        That is the drafter itself, unless it can share an encoder with the target.
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

    @property
    def encoders(self) -> tuple[Network, ...]:
        """The networks that read a new input themselves, beside the target."""
        return ()

    def steps(self) -> Mapping[str, Network]:
        """Returns the networks of which one step is timed to measure what drafting costs, by name.

        "draft step" is the drafter's, of which γ tokens take γ; others are variants to compare
        with. A drafter of several tokens a call has none.
        """
        return {}

    def identity(self) -> tuple[list[Any], Any]:
        """Returns the settings, and a pytree of arrays, that together decide what it drafts."""
        return [jax.tree.structure(self)], self

    @property
    def contents(self) -> str:
        """A digest of the class, settings and arrays, which decide what is drafted."""
        settings, arrays = self.identity()
        parts = [str(part).encode() for part in (type(self).__name__, *settings)]
        return digest(parts + [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays)])

    def check(self, target: LanguageModel) -> None:
        """Checks that it can draft for `target`.

        Raises:
          ValueError: it cannot; the message says why.
        """
        for model in self.models:
            check_model(target, model)


class TreeDrafter(Drafter):
    """A drafter that can draft trees; a subclass defines `draft_tree`, which is traced.

    One that does not define `draft` drafts nothing but trees.

    Attributes:
      kinds: how the children of its trees can be chosen, and how such trees can be verified, the
        best first, as in `CHILDREN`. All of `CHILDREN` include a `DynamicTree`.
      reads_nodes: whether `observe` reads what the target returned at all nodes (`Scored.nodes`),
        rejected ones too.
      tree: the one tree that it drafts, which then need not be given; None: any of its `kinds`.
    """

    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = CHILDREN
    reads_nodes: ClassVar[bool] = False
    tree: ClassVar[Any] = None

    def check_tree(self, tree: Any) -> None:
        """Raises ValueError for a tree that it cannot draft although it is of its kinds."""

    def init_tree(
        self,
        inputs: Int[Array, "I L"],
        input_lengths: Int[Array, " I"],
        tokens: Int[Array, "B P"],
        slots: int,
        **encoded: Float[Array, "I L D"],
    ) -> Any:
        """Returns the state before the first iteration with trees; arguments as for `init`."""
        return self.init(inputs, input_lengths, tokens, slots, **encoded)

    def draft_tree(
        self,
        draft_state: Any,
        state: DecodeState,
        num_wanted: Int[Array, " B"],
        max_depth: Int[Array, " B"],
    ) -> tuple[Any, TreeDraft]:
        """Drafts the tree `state.config.tree` after each row's committed tokens.

        Args:
          num_wanted: how many of the drafted nodes are wanted: those with the smallest numbers.
          max_depth: the greatest depth of a node.
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


def can_draft_chains(drafter: Drafter) -> bool:
    """Returns whether a drafter can draft without a tree."""
    return not isinstance(drafter, TreeDrafter) or type(drafter).draft is not Drafter.draft


def _check_returned(drafter: Drafter, method: str, sound: bool, got: str, expected: str) -> None:
    if not sound:
        name = type(drafter).__name__
        raise ValueError(f"drafter {name}: {method} {got}, expected {expected}")


def check_draft(drafter: Drafter, returned: Any, state: DecodeState) -> tuple[Any, Draft]:
    """Checks, while the program is traced, what `draft` returned: its state and a `Draft`.

    Args:
      returned: what `draft` returned.
      state: the decode loop's, which `draft` got.

    Raises:
      ValueError: anything else was returned.
    """
    check = functools.partial(_check_returned, drafter, "draft")
    pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Draft)
    check(pair, f"returned {type(returned).__name__}", "(draft_state, Draft)")
    (draft_state, draft), config, policy = returned, state.config, state.policy
    rows = f"int32[{len(state.lengths)}]"
    drafted = f"int32[{len(state.lengths)}, {config.gamma}]"
    for field, expected in (("tokens", drafted), ("num_drafted", rows), ("calls", rows)):
        got = arguments.describe(getattr(draft, field))
        check(got == expected, f"gave {field} {got}", expected)
    check(
        not config.needs_draft_probs or isinstance(draft.dist, Categorical | PointMass),
        f"gave {type(draft.dist).__name__} as the distribution of its tokens",
        "the one they were drawn from, or point_mass(state, tokens)",
    )
    dist = draft.dist
    if config.needs_draft_probs and dist is not None:
        width = dist.logits.shape[-1] if isinstance(dist, Categorical) else dist.vocab_size
        expected = f"{config.vocab_size}, the target's"
        check(width == config.vocab_size, f"gave a distribution over {width} ids", expected)
    unread = policy is None or not policy.needs_probs or draft.seen is not None
    check(unread, "gave no Draft.seen", "it of a drafter that provides_probs")
    got, expected = map(arguments.describe, (draft_state, state.draft_state))
    check(got == expected, f"returned the state {got}", f"what init makes, {expected}")
    return draft_state, draft


def check_tree_draft(drafter: Drafter, returned: Any, state: DecodeState) -> tuple[Any, TreeDraft]:
    """Checks what `draft_tree` returned, as `check_draft` does what `draft` did.

    Raises:
      ValueError: anything else than its state and a `TreeDraft` was returned.
    """
    check = functools.partial(_check_returned, drafter, "draft_tree")
    pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], TreeDraft)
    check(pair, f"returned {type(returned).__name__}", "(draft_state, TreeDraft)")
    (draft_state, draft), tree, batch = returned, state.config.tree, len(state.lengths)
    assert tree is not None, "a program of trees"
    found, nodes = draft._asdict(), f"int32[{batch}, {tree.size}]"
    is_branches = isinstance(draft.branches, Branches)
    check(is_branches, f"gave branches {type(draft.branches).__name__}", "Branches")
    found |= {f"branches.{name}": part for name, part in draft.branches._asdict().items()}
    kinds = dict(tokens=nodes, valid=nodes.replace("int32", "bool"), origins=nodes)
    kinds |= {f"branches.{name}": nodes for name in ("parents", "ranks", "depths")}
    kinds |= {"branches.lines": f"{nodes[:-1]}, {tree.depth + 1}]", "calls": f"int32[{batch}]"}
    for field, expected in kinds.items():
        got = arguments.describe(found[field])
        check(got == expected, f"gave {field} {got}", expected)
    got, expected = map(arguments.describe, (draft_state, state.draft_state))
    check(got == expected, f"returned the state {got}", f"what init_tree makes, {expected}")
    return draft_state, draft


@flax.struct.dataclass
class FullDrafter(Drafter):
    """A drafter whose drafts are always as long as was asked for, whatever their tokens.

    Only for timing, where a drafter that finds nothing to propose would not be timed at all.

    Attributes:
      drafter: the drafter that does the work.
    """

    drafter: Drafter

    reads_encoder: ClassVar[Any] = property(lambda self: self.drafter.reads_encoder)
    remembers: ClassVar[Any] = property(lambda self: self.drafter.remembers)
    reads_states: ClassVar[Any] = property(lambda self: self.drafter.reads_states)
    reads_logits: ClassVar[Any] = property(lambda self: self.drafter.reads_logits)

    @property
    def name(self) -> str:
        return self.drafter.name

    def check(self, target: LanguageModel) -> None:
        self.drafter.check(target)

    def pair_with(self, target: LanguageModel) -> "FullDrafter":
        return self.replace(drafter=self.drafter.pair_with(target))

    def init(self, *given: Any, **encoded: Any) -> Any:
        return self.drafter.init(*given, **encoded)

    def read_prefix(self, draft_state: Any, state: DecodeState, states: Any) -> Any:
        return self.drafter.read_prefix(draft_state, state, states)

    def draft(
        self, draft_state: Any, state: DecodeState, num_wanted: Int[Array, " B"]
    ) -> tuple[Any, Draft]:
        returned = self.drafter.draft(draft_state, state, num_wanted)
        draft_state, draft = check_draft(
            self.drafter, returned, state.replace(draft_state=draft_state)
        )
        tokens = jnp.maximum(draft.tokens, 0)
        return draft_state, draft._replace(num_drafted=num_wanted, tokens=tokens)

    def observe(self, draft_state: Any, state: DecodeState, scored: Scored) -> Any:
        return self.drafter.observe(draft_state, state, scored)


def check_model(target: LanguageModel, model: LanguageModel) -> None:
    """Checks that a drafting model has the target's vocabulary (PITFALLS row 28), kind and mesh.

    Raises:
      ValueError: one of them differs; the message says which.
    """

    def check(sound: bool, got: str, expected: str):
        if not sound:
            raise ValueError(f"drafter: got {got}, expected {expected}")

    kinds = "a model with an encoder", "a decoder-only model"
    got, expected = (kinds[is_decoder_only(one)] for one in (model, target))
    check(got == expected, got, f"{expected}, like the target")
    reads = model.config.encoder_dim
    if reads is None and not is_decoder_only(model):
        kinds = "separate vocabularies for inputs and outputs", "one vocabulary"
        got, expected = (kinds[one.config.shares_vocabulary] for one in (model, target))
        check(got == expected, f"a model with {got}", f"one with {expected}, like the target")
    if reads is not None:
        got = f"a model that reads encoder outputs of width {reads}"
        width = target.config.encoded_dim
        check(reads == width, got, f"the target's width, {width}")
        trained_on = model.encoder_fingerprint
        sound = trained_on is None or trained_on == target.fingerprint  # slow: digests all weights
        got = "a model that was trained on another target's encoder output"
        check(sound, got, f"one trained on {target.name or 'the target'}'s")
    ours, theirs = target.vocabulary, model.vocabulary
    if ours is not None and theirs is not None and ours is not theirs:
        got = f"a vocabulary of {theirs.size} pieces that differs from the target's"
        expected = "the same pieces with the same ids"
        same = ours.fingerprint() == theirs.fingerprint()
        check(same, f"{got} ({ours.size} pieces)", expected)
    got, expected = f"start token {model.start_token}", f"the target's {target.start_token}"
    check(model.start_token == target.start_token, got, expected)
    here, there = (getattr(one.network.rules, "mesh", None) for one in (target, model))
    got, expected = (
        "none" if mesh is None else "x".join(map(str, mesh.devices.shape)) for mesh in (there, here)
    )
    check(here == there, f"a model on the mesh {got}", f"the target's, {expected}")
