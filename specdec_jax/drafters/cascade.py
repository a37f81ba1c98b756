"""Drafters made of drafters (cascade speculative drafting, Chen et al. 2023, arXiv 2312.11462)."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.drafters.drafting import empty_distribution, fold_part_keys
from specdec_jax.drafters.model import ModelDrafter, ModelDraftState
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.distributions import Categorical, PointMass
from specdec_jax.speculative.drafter import Drafter, can_draft_chains
from specdec_jax.speculative.iteration import verify, write
from specdec_jax.speculative.state import DecodeState, Draft, Scored
from specdec_jax.speculative.verifiers import VERIFIERS


class PairState(NamedTuple):
    """The states of the two drafters of a `DrafterPair`."""

    first: Any
    second: Any


def _any_part_property(name: str) -> Any:
    """Returns a property: whether the attribute `name` is true of either part."""
    return property(lambda self: any(getattr(part, name) for part in self.parts))


class DrafterPair(Drafter):
    """Two drafters as one."""

    parts: tuple[Any, Any]
    number: int = 0  # a static setting
    reads_encoder: ClassVar[Any] = _any_part_property("reads_encoder")
    reads_states: ClassVar[Any] = _any_part_property("reads_states")
    reads_logits: ClassVar[Any] = _any_part_property("reads_logits")
    needs_target_state: ClassVar[Any] = _any_part_property("needs_target_state")

    def tree_flatten(self):
        return self.parts, self.number

    @classmethod
    def tree_unflatten(cls, number: int, parts: Any):
        pair = object.__new__(cls)
        pair.parts, pair.number = tuple(parts), number
        return pair

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return tuple(model for part in self.parts for model in part.models)

    def identity(self) -> tuple[list[Any], Any]:
        return [self.number, *(part.contents for part in self.parts)], None

    def check(self, target: LanguageModel) -> None:
        for part in self.parts:
            part.check(target)

    def init(self, *given: Any, **encoded: jax.Array) -> PairState:
        return self.begin("init", *given, **encoded)

    def begin(self, method: str, *given: Any, **encoded: jax.Array) -> PairState:
        """Returns the states of both drafters, made by their method `init` or `init_tree`."""
        return PairState(
            *(
                getattr(part, method)(*given, **encoded if part.reads_encoder else {})
                for part in self.parts
            )
        )

    def read_prefix(self, draft_state: PairState, state: DecodeState, states: Any) -> PairState:
        own = zip(self.parts, draft_state)
        return PairState(*(part.read_prefix(one, state, states) for part, one in own))

    def rewind(self, draft_state: PairState, lengths: jax.Array) -> PairState:
        """Forgets what either drafter has cached past `lengths`.

        A drafter whose part begins past the committed tokens cannot see that they were rejected: it
        gets what was drafted before its part as if it were committed, and would take what its last
        draft put there for cached.
        """
        states = zip(self.parts, draft_state)
        return PairState(*(part.rewind(state, lengths) for part, state in states))

    def observe(self, draft_state: PairState, state: DecodeState, scored: Scored) -> PairState:
        """Passes what the target made of the draft on to those drafters that learn from it."""
        states = zip(self.parts, draft_state)
        return PairState(*(part.observe(own, state, scored) for part, own in states))


@jax.tree_util.register_pytree_node_class
class HorizontalCascade(DrafterPair):
    """One drafter for the first positions of a draft and another, cheaper one for later ones.

    Later positions count for less. The second also takes over where the first has nothing more to
    propose: with a copying drafter before a model, the copy goes as far as it can and the model
    drafts the rest. Each position has the distribution of the drafter that it comes from; a point
    mass beside a distribution becomes a one-hot distribution.
    """

    def __init__(self, first: Drafter, then: Drafter, switch: int):
        """Joins two drafters.

        Args:
          first: drafts positions 0 … switch − 1.
          then: drafts what follows; not an `EarlyExitDrafter` or a `HeadsDrafter`, since the target
            has not yet seen what was drafted.
          switch: at least 1.

        Raises:
          ValueError: an argument of another kind.
        """
        _check_drafters(first=first, then=then)
        _check_behind("then", then)
        self.parts, self.number = (first, then), arguments.check_integer("switch", switch, 1)

    @property
    def name(self) -> str:
        first, then = self.parts
        return f"{first.name}, then {then.name} (from {self.number})"

    def draft(
        self, draft_state: PairState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[PairState, Draft]:
        (first, then), config = self.parts, state.config
        draft_state = self.rewind(draft_state, state.lengths)
        early = min(self.number, config.gamma)
        front = dataclasses.replace(state, config=config._replace(gamma=early))
        own, head = first.draft(draft_state.first, front, jnp.minimum(num_wanted, early))
        count = head.num_drafted

        # Nothing comes after an EOS.
        end = jnp.take_along_axis(head.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)
        ended = (count > 0) & jnp.any(end == state.eos_ids, axis=1)
        behind = dataclasses.replace(
            state,
            tokens=write(state.tokens, head.tokens, state.lengths, count),
            lengths=state.lengths + count,
            keys=fold_part_keys(state),
        )
        left = jnp.where(ended, 0, num_wanted - count)
        other, tail = then.draft(draft_state.second, behind, left)

        def join(buffer: jax.Array, of_head: jax.Array, of_tail: jax.Array):
            buffer = write(buffer, of_head, count * 0, count)
            return write(buffer, of_tail, count, tail.num_drafted)

        tokens = join(jnp.zeros_like(tail.tokens), head.tokens, tail.tokens)
        dist: Categorical | PointMass | None = empty_distribution(state)
        dists = head.dist, tail.dist
        if dist is not None and all(isinstance(one, PointMass) for one in dists):
            dist = PointMass(tokens, config.vocab_size)
        elif dist is not None:
            dense = (one.dist() if isinstance(one, PointMass) else one for one in dists)
            dist = Categorical(*map(join, dist, *dense))
        calls = head.calls + tail.calls
        draft = Draft(tokens, count + tail.num_drafted, dist, calls, target_cache=head.target_cache)
        return PairState(own, other), draft


class _Loop(NamedTuple):
    """What `VerticalCascade` carries from call to call of its model.

    Attributes:
      tokens: `[B, S]`, with what has been drafted so far.
      drafted: `[B]`, how many tokens have been drafted.
      wanted: `[B]`, how many tokens are to be drafted.
      model, inner: the states of the two drafters.
      dist: distribution of the draft, or None.
      calls: `[B]`, calls of the model.
    """

    tokens: jax.Array
    drafted: jax.Array
    wanted: jax.Array
    model: ModelDraftState
    inner: Any
    dist: Categorical | None
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
        _check_drafters(inner=inner)
        _check_behind("inner", inner)
        self.parts = model_drafter, inner
        self.number = arguments.check_integer("inner_gamma", inner_gamma, 1)

    @property
    def name(self) -> str:
        model_drafter, inner = self.parts
        return f"{model_drafter.name} over {inner.name} ({self.number})"

    def draft(
        self, draft_state: PairState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[PairState, Draft]:
        """Drafts with a loop of model calls over a fixed number of positions.

        A call begins at the first token that the model's cache lacks. After the target has accepted
        a whole draft that is one more than the last token; the call then takes one proposal
        less, and no step is needed to catch up.
        """
        (model_drafter, inner), config = self.parts, state.config
        width = min(self.number, max(config.gamma - 1, 1))
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
            inner_state, guess = inner.draft(loop.inner, view, num_proposed)

            proposed = write(loop.tokens, guess.tokens, lengths, guess.num_drafted)
            places = jnp.minimum(cached[:, None] + offsets, proposed.shape[1] - 1)
            fed = jnp.take_along_axis(proposed, places, axis=1)
            logits, cache = network.decode(fed, cached, cache)
            logits = model_drafter.widened(logits, config.vocab_size)
            scored = jnp.minimum(lag[:, None] + offsets, width)[..., None]
            verified, dist = verify(view, guess, jnp.take_along_axis(logits, scored, axis=1))

            at_end = offsets == verified.num_accepted[:, None]
            new = jnp.pad(guess.tokens, ((0, 0), (0, 1)))
            new = jnp.where(at_end, verified.next_token[:, None], new)
            is_eos = jnp.any(new[:, :, None] == state.eos_ids[:, None, :], axis=-1)
            first_eos = jnp.min(jnp.where(is_eos, offsets, width + 1), axis=1)
            num_new = jnp.minimum(verified.num_accepted, first_eos) + 1
            # A row that lags by more only catches up.
            num_new = jnp.where((left > 0) & (lag <= width), num_new, 0)
            drafted, now = loop.drafted + num_new, jnp.minimum(lag + num_new, width + 1)
            place = functools.partial(write, starts=loop.drafted, counts=num_new)
            return _Loop(
                tokens=write(loop.tokens, new, lengths, num_new),
                drafted=drafted,
                wanted=jnp.where(first_eos < num_new, drafted, loop.wanted),
                model=ModelDraftState(cache, jnp.where(left > 0, cached + now, cached)),
                inner=inner_state,
                dist=loop.dist and dist and Categorical(*map(place, loop.dist, dist)),
                calls=loop.calls + jnp.where(left > 0, guess.calls + 1, 0),
            )

        none, draft_state = jnp.zeros_like(state.lengths), self.rewind(draft_state, state.lengths)
        loop = _Loop(state.tokens, none, num_wanted, *draft_state, empty_distribution(state), none)
        loop = jax.lax.while_loop(lambda loop: jnp.any(loop.drafted < loop.wanted), body, loop)
        places = state.lengths[:, None] + jnp.arange(config.gamma)
        places = jnp.minimum(places, state.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(loop.tokens, places, axis=1)
        return PairState(loop.model, loop.inner), Draft(tokens, loop.drafted, loop.dist, loop.calls)


def _check_drafters(**drafters) -> None:
    for name, drafter in drafters.items():
        if not isinstance(drafter, Drafter) or not can_draft_chains(drafter):
            raise ValueError(f"{name}: got {drafter!r}, expected a drafter of chains")


def _check_behind(name: str, drafter: Drafter) -> None:
    """Rejects a drafter that would draft from the target's cache or last state.

    They do not hold the tokens drafted before it.
    """
    if drafter.needs_target_state:
        expected = "a drafter that needs nothing of the target's cache or states"
        raise ValueError(f"{name}: got {type(drafter).__name__}, expected {expected}")
