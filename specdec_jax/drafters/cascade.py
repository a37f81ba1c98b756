"""Drafters made of drafters (cascade speculative drafting, Chen et al. 2023, arXiv 2312.11462)."""

import copy
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.drafters.drafting import (
    Recorded,
    empty_distribution,
    fold_part_keys,
    read_signals,
)
from specdec_jax.drafters.model import ModelDrafter, ModelDraftState
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.distributions import Categorical, PointMass
from specdec_jax.speculative.drafter import Drafter, can_draft_chains
from specdec_jax.speculative.iteration import verify, write
from specdec_jax.speculative.policy import DraftSignals, Policy, limit_rows
from specdec_jax.speculative.state import (
    DecodeState,
    Draft,
    Scored,
    make_empty_signals,
    make_prefixes,
)
from specdec_jax.speculative.verifiers import VERIFIERS


class PairState(NamedTuple):
    """The states of the two drafters of a `DrafterPair`."""

    first: Any
    second: Any


def any_part_property(name: str) -> Any:
    """Returns a property: whether the attribute `name` is true of either part."""
    return property(lambda self: any(getattr(part, name) for part in self.parts))


class DrafterPair(Drafter):
    """Two drafters as one.

    One with a model is not asked to draft while no row wants a token of it.
    """

    parts: tuple[Any, Any]
    settings: tuple[Any, ...] = ()  # static
    reads_encoder: ClassVar[Any] = any_part_property("reads_encoder")
    reads_states: ClassVar[Any] = any_part_property("reads_states")
    reads_logits: ClassVar[Any] = any_part_property("reads_logits")
    needs_target_state: ClassVar[Any] = any_part_property("needs_target_state")
    remembers: ClassVar[Any] = any_part_property("remembers")
    draws: ClassVar[Any] = any_part_property("draws")

    def tree_flatten(self):
        return self.parts, self.settings

    @classmethod
    def tree_unflatten(cls, settings: tuple[Any, ...], parts: Any):
        pair = object.__new__(cls)
        pair.parts, pair.settings = tuple(parts), settings
        return pair

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return tuple(model for part in self.parts for model in part.models)

    @property
    def encoders(self) -> tuple[Network, ...]:
        return tuple(network for part in self.parts for network in part.encoders)

    def identity(self) -> tuple[list[Any], Any]:
        return [self.settings, *(part.contents for part in self.parts)], None

    def check(self, target: LanguageModel) -> None:
        for part in self.parts:
            part.check(target)

    def on(self, network: Network) -> "DrafterPair":
        return self._with(self.parts[0].on(network), self.parts[1].on(network))

    def pair_with(self, target: LanguageModel) -> "DrafterPair":
        return self._with(self.parts[0].pair_with(target), self.parts[1].pair_with(target))

    def _with(self, first: Drafter, second: Drafter) -> "DrafterPair":
        """Returns the pair of these two."""
        if first is self.parts[0] and second is self.parts[1]:
            return self
        pair = copy.copy(self)
        pair.parts = first, second
        return pair

    def init(self, *given: Any, **encoded: jax.Array) -> Any:
        return self.begin("init", *given, **encoded)

    def begin(self, method: str, *given: Any, **encoded: jax.Array) -> Any:
        """Returns the states of both drafters, made by their method `init` or `init_tree`."""
        return PairState(
            *(
                getattr(part, method)(*given, **encoded if part.reads_encoder else {})
                for part in self.parts
            )
        )

    def update(self, draft_state: Any, method: str, *given: Any) -> Any:
        """Returns the state after a method of either drafter, which takes and returns its own."""
        first, second = (
            getattr(part, method)(own, *given)
            for part, own in zip(self.parts, (draft_state.first, draft_state.second))
        )
        return draft_state._replace(first=first, second=second)

    def read_prefix(self, draft_state: Any, state: DecodeState, states: Any) -> Any:
        return self.update(draft_state, "read_prefix", state, states)

    def rewind(self, draft_state: Any, lengths: jax.Array) -> Any:
        """Forgets what either drafter has cached past `lengths`.

        A drafter whose part begins past the committed tokens cannot see that they were rejected: it
        gets what was drafted before its part as if it were committed, and would take what its last
        draft put there for cached.
        """
        return self.update(draft_state, "rewind", lengths)

    def observe(self, draft_state: Any, state: DecodeState, scored: Scored) -> Any:
        """Passes what the target made of the draft on to those drafters that learn from it."""
        return self.update(draft_state, "observe", state, scored)


def draft_part(
    part: Drafter, draft_state: Any, state: DecodeState, num_wanted: jax.Array
) -> tuple[Any, Draft]:
    """Drafts with a part of a pair, without a call of its model where no row wants a token.

    A model's draft may take steps whether or not tokens are wanted (`draft_in_pairs`).
    """
    has_model = isinstance(part, ModelDrafter) or part.encoders or part.reads_states
    if isinstance(part, DrafterPair) or not has_model:
        draft_state, drafted = part.draft(draft_state, state, num_wanted)
        return draft_state, drafted.limited(num_wanted)
    draft_state = part.rewind(draft_state, state.lengths)
    _, shapes = jax.eval_shape(part.draft, draft_state, state, num_wanted)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def draft(loop: tuple) -> tuple:
        _, own, _ = loop
        own, drafted = part.draft(own, state, num_wanted)
        return jnp.bool_(False), own, drafted.limited(num_wanted)

    # A loop of at most one pass: the branches of a `lax.cond` would copy the caches.
    loop = jnp.any(num_wanted > 0), draft_state, nothing
    return jax.lax.while_loop(lambda loop: loop[0], draft, loop)[1:]


def _join(*parts: tuple[Any, jax.Array], into: Any) -> Any:
    """Returns the buffers `into` `[B, G, …]` with the first tokens of two parts of a draft.

    Args:
      parts: the values of the first drafter and of the second, and how many tokens `[B]` of each
        count; the second's follow the first's.
    """
    (head, count), (tail, more) = parts
    into = jax.tree.map(lambda old, new: write(old, new, count * 0, count), into, head)
    return jax.tree.map(lambda old, new: write(old, new, count, more), into, tail)


def _read_signals(draft: Draft, state: DecodeState) -> DraftSignals | None:
    """Returns what the policy of γ reads of a part of a draft, if there is one that does.

    A drafter without distributions counts as certain, which it is of a token that it did not draw.
    """
    nothing = make_empty_signals(state.policy, len(state.lengths))
    if nothing is None or draft.seen is not None:
        return draft.seen
    return nothing._replace(prob=nothing.prob + 1)


def _find_end(
    state: DecodeState,
    seen: DraftSignals | None,
    wanted: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    width: int,
) -> jax.Array:
    """Returns how many tokens of a draft are wanted after its policy of γ has read some of them.

    Args:
      seen: what it reads, up to and including these tokens.
      wanted: `[B]`, how many were wanted before.
      starts, counts: `[B]`, offset of the first of these tokens and how many there are.
      width: the most that there are.
    """
    if seen is None:
        return wanted
    assert state.policy is not None, "only a policy reads the distributions of a draft"
    for offset in range(width):
        steps = starts + offset
        limits = limit_rows(state.policy, state.policy_state, steps, seen)
        ends = jnp.minimum(wanted, jnp.maximum(limits, steps + 1))
        wanted = jnp.where((offset < counts) & (steps < wanted), ends, wanted)
    return wanted


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Behind(Policy):
    """A policy of γ for a part of a draft, which reads the part before it too.

    Attributes:
      policy: the policy of the whole draft.
      before, counts: what it reads of the part before, and how many tokens `[B]` that has.
    """

    policy: Any = dataclasses.field(default=None, metadata={"traced": True})
    before: Any = dataclasses.field(default=None, metadata={"traced": True})
    counts: Any = dataclasses.field(default=None, metadata={"traced": True})
    needs_probs: ClassVar[bool] = True

    def limit(self, state: Any, step: jax.Array, seen: DraftSignals) -> jax.Array:
        most = jnp.full_like(self.counts, self.maximum)
        whole = _join((self.before, self.counts), (seen, most), into=self.before)
        return limit_rows(self.policy, state, self.counts + step, whole) - self.counts


@jax.tree_util.register_pytree_node_class
class HorizontalCascade(DrafterPair):
    """One drafter for the first positions of a draft and another, cheaper one for later ones.

    A cheaper drafter suffices there, because later positions are accepted less often. The second
    drafter also takes over where the first has nothing more to propose: with a copying drafter
    before a model, the copy goes as far as it can and the model drafts the rest. Each position has
    the distribution of the drafter that it comes from; a point mass beside a distribution becomes a
    one-hot distribution. A policy of γ that reads distributions reads those of both; a drafter
    without them counts as certain.
    """

    provides_probs: ClassVar[Any] = any_part_property("provides_probs")
    varies: ClassVar[Any] = property(
        lambda self: self.settings[1] is not None or any(part.varies for part in self.parts)
    )

    def __init__(self, first: Drafter, then: Drafter, switch: int, then_gamma: int | None = 4):
        """Joins two drafters.

        Args:
          first: drafts positions 0 … switch − 1.
          then: drafts what follows; not one that needs the target's states or cache, such as an
            `EarlyExitDrafter`, since the target has not yet seen what was drafted.
          switch: at least 1.
          then_gamma: the most tokens that `then` drafts, at least 1; None: all that are left. With
            a limit γ can suit `first`, 12 or 16 for a drafter that copies, and not cost as many
            steps of `then` where nothing is copied.

        Raises:
          ValueError: an argument of another kind.
        """
        check_drafters(first=first, then=then)
        check_behind("then", then)
        switch = arguments.check_integer("switch", switch, 1)
        if then_gamma is not None:
            then_gamma = arguments.check_integer("then_gamma", then_gamma, 1)
        self.parts, self.settings = (first, then), (switch, then_gamma)

    @property
    def name(self) -> str:
        first, then = self.parts
        return f"{first.name}, then {then.name} (from {self.settings[0]})"

    def draft(
        self, draft_state: PairState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[PairState, Draft]:
        (first, then), (switch, then_gamma), config = self.parts, self.settings, state.config
        draft_state = self.rewind(draft_state, state.lengths)
        early = min(switch, config.gamma)
        front = dataclasses.replace(state, config=config._replace(gamma=early))
        wanted = jnp.minimum(num_wanted, early)
        own, head = draft_part(first, draft_state.first, front, wanted)
        count, seen = head.num_drafted, _read_signals(head, state)

        # Nothing comes after an EOS.
        end = jnp.take_along_axis(head.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)
        ended = (count > 0) & jnp.any(end == state.eos_ids, axis=1)
        num_wanted = _find_end(state, seen, num_wanted, count * 0, count, early)
        late = min(then_gamma or config.gamma, config.gamma)
        behind = dataclasses.replace(
            state,
            tokens=write(state.tokens, head.tokens, state.lengths, count),
            lengths=state.lengths + count,
            keys=fold_part_keys(state),
            config=config._replace(gamma=late),
            policy=state.policy
            if seen is None
            else _Behind(config.gamma, state.policy, seen, count),
        )
        left = jnp.where(ended, 0, jnp.clip(num_wanted - count, 0, late))
        other, tail = draft_part(then, draft_state.second, behind, left)
        return PairState(own, other), join_drafts(state, head, tail)


def join_drafts(state: DecodeState, head: Draft, tail: Draft) -> Draft:
    """Returns a draft of a row's tokens in `head`, and after them those in `tail`."""
    counts, config = (head.num_drafted, tail.num_drafted), state.config
    num_drafted = head.num_drafted + tail.num_drafted
    tokens = jnp.zeros((len(state.lengths), config.gamma), jnp.int32)
    tokens = _join(*zip((head.tokens, tail.tokens), counts), into=tokens)
    dist: Categorical | PointMass | None = empty_distribution(state)
    dists = head.dist, tail.dist
    if dist is not None and all(isinstance(one, PointMass) for one in dists):
        dist = PointMass(tokens, config.vocab_size)
    elif dist is not None:
        dense = (one.dist() if isinstance(one, PointMass) else one for one in dists)
        dist = _join(*zip(dense, counts), into=dist)
    seen = make_empty_signals(state.policy, len(state.lengths))
    if seen is not None:
        signals = (_read_signals(part, state) for part in (head, tail))
        seen = _join(*zip(signals, counts), into=seen)
    calls = head.calls + tail.calls
    return Draft(tokens, num_drafted, dist, calls, seen, head.target_cache)


class _Loop(NamedTuple):
    """What `VerticalCascade` carries from call to call of its model.

    Attributes:
      tokens: `[B, S]`, with what has been drafted so far.
      drafted: `[B]`, how many tokens have been drafted.
      wanted: `[B]`, how many tokens are to be drafted.
      model, inner: the states of the two drafters.
      recorded: what is kept of the distributions of the draft.
      calls: `[B]`, calls of the model.
    """

    tokens: jax.Array
    drafted: jax.Array
    wanted: jax.Array
    model: ModelDraftState
    inner: Any
    recorded: Recorded
    calls: jax.Array


@jax.tree_util.register_pytree_node_class
class VerticalCascade(DrafterPair):
    """A model drafter that has a drafter of its own: speculative decoding inside the draft.

    A cheaper drafter proposes some tokens after those drafted so far; the model verifies them in
    one call (argmax, or Algorithm 1 of Leviathan et al. 2023) and adds one of its own; and so on
    until the draft is complete. So the draft has the model's distribution at every position, with
    fewer calls of the model. With argmax or Gumbel coupling the draft is, token for token, what the
    model alone would draft.
    """

    provides_probs: ClassVar[bool] = True

    def __init__(self, model_drafter: ModelDrafter, inner: Drafter, inner_gamma: int):
        """Puts a drafter into the draft of another.

        Args:
          model_drafter: whose distribution the draft has.
          inner: drafts for it; any drafter that reads no cache of the target.
          inner_gamma: the most tokens that it proposes for one call of the model, at least 1. More
            than γ − 1 are never proposed, since each call adds one of the model's own.

        Raises:
          ValueError: another kind of argument.
        """
        if not isinstance(model_drafter, Drafter) or model_drafter.second_model is None:
            got = type(model_drafter).__name__
            raise ValueError(f"model_drafter: got {got}, expected a ModelDrafter")
        check_drafters(inner=inner)
        check_behind("inner", inner)
        self.parts = model_drafter, inner
        self.settings = (arguments.check_integer("inner_gamma", inner_gamma, 1),)

    @property
    def name(self) -> str:
        model_drafter, inner = self.parts
        return f"{model_drafter.name} over {inner.name} ({self.settings[0]})"

    def draft(
        self, draft_state: PairState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[PairState, Draft]:
        """Drafts with a loop of model calls over a fixed number of positions.

        A call begins at the first token that the model's cache lacks. After the target has accepted
        a whole draft that is one more than the last token; the call then takes one proposal
        less, and no step is needed to catch up.
        """
        (model_drafter, inner), config = self.parts, state.config
        width = min(self.settings[0], max(config.gamma - 1, 1))
        verifier = config.verifier if config.verifier.coupled else VERIFIERS["token"]
        inside = dataclasses.replace(
            state,
            policy=None,
            keys=fold_part_keys(state),
            config=config._replace(gamma=width, verifier=verifier),
        )
        offsets, network = jnp.arange(width + 1), model_drafter.network

        def body(loop: _Loop) -> _Loop:
            left, cache, cached = loop.wanted - loop.drafted, loop.model.cache, loop.model.cached
            lengths = state.lengths + loop.drafted
            view = dataclasses.replace(inside, tokens=loop.tokens, lengths=lengths)
            lag = lengths - 1 - cached
            num_proposed = jnp.maximum(jnp.minimum(width - lag, left - 1), 0)
            inner_state, guess = draft_part(inner, loop.inner, view, num_proposed)

            proposed = write(loop.tokens, guess.tokens, lengths, guess.num_drafted)
            places = jnp.minimum(cached[:, None] + offsets, proposed.shape[1] - 1)
            fed = jnp.take_along_axis(proposed, places, axis=1)
            logits, cache = network.decode(fed, cached, cache)
            logits = model_drafter.widened(logits, config.vocab_size)
            scored = jnp.minimum(lag[:, None] + offsets, width)[..., None]
            logits = jnp.take_along_axis(logits, scored, axis=1)
            verified, dist = verify(view, guess, logits)

            at_end = offsets == verified.num_accepted[:, None]
            new = jnp.pad(guess.tokens, ((0, 0), (0, 1)))
            new = jnp.where(at_end, verified.next_token[:, None], new)
            is_eos = jnp.any(new[:, :, None] == state.eos_ids[:, None, :], axis=-1)
            first_eos = jnp.min(jnp.where(is_eos, offsets, width + 1), axis=1)
            num_new = jnp.minimum(verified.num_accepted, first_eos) + 1
            # A row that lags by more only catches up.
            num_new = jnp.where((left > 0) & (lag <= width), num_new, 0)
            place = functools.partial(write, starts=loop.drafted, counts=num_new)
            seen = loop.recorded.signals
            if seen is not None:
                adjusted = make_prefixes(view, proposed), state.sampling, config.mode
                signals = read_signals(logits, adjusted, new)
                seen = DraftSignals(*map(place, seen, signals))
            wanted = _find_end(state, seen, loop.wanted, loop.drafted, num_new, width + 1)
            ended = first_eos < num_new
            num_new = jnp.minimum(num_new, wanted - loop.drafted)
            drafted, now = loop.drafted + num_new, jnp.minimum(lag + num_new, width + 1)
            record = loop.recorded.dist
            if record is not None and dist is not None:
                record = Categorical(*map(place, record, dist))
            return _Loop(
                tokens=write(loop.tokens, new, lengths, num_new),
                drafted=drafted,
                wanted=jnp.where(ended, drafted, wanted),
                model=ModelDraftState(cache, jnp.where(left > 0, cached + now, cached)),
                inner=inner_state,
                recorded=Recorded(record, seen),
                calls=loop.calls + jnp.where(left > 0, guess.calls + 1, 0),
            )

        none, draft_state = jnp.zeros_like(state.lengths), self.rewind(draft_state, state.lengths)
        loop = _Loop(state.tokens, none, num_wanted, *draft_state, Recorded.empty(state), none)
        loop = jax.lax.while_loop(lambda loop: jnp.any(loop.drafted < loop.wanted), body, loop)
        places = state.lengths[:, None] + jnp.arange(config.gamma)
        places = jnp.minimum(places, state.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(loop.tokens, places, axis=1)
        draft = Draft(tokens, loop.drafted, loop.recorded.dist, loop.calls, loop.recorded.signals)
        return PairState(loop.model, loop.inner), draft


def check_drafters(**drafters) -> None:
    for name, drafter in drafters.items():
        if not isinstance(drafter, Drafter) or not can_draft_chains(drafter):
            raise ValueError(f"{name}: got {drafter!r}, expected a drafter of chains")


def check_behind(name: str, drafter: Drafter) -> None:
    """Rejects a drafter that would draft from the target's cache or last state.

    They do not hold the tokens drafted before it.
    """
    if drafter.needs_target_state:
        expected = "a drafter that needs nothing of the target's cache or states"
        raise ValueError(f"{name}: got {type(drafter).__name__}, expected {expected}")
