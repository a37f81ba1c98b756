"""Drafters made of drafters (cascade speculative drafting, Chen et al. 2023, arXiv 2312.11462)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.drafters.drafting import empty_distribution, keys_apart
from specdec_jax.drafters.model import ModelDrafter, ModelDraftState
from specdec_jax.drafters.pair import DrafterPair, PairState
from specdec_jax.models import arguments
from specdec_jax.speculative.distributions import Categorical, PointMass
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.iteration import verify
from specdec_jax.speculative.state import DecodeState, Draft
from specdec_jax.speculative.tree_drafter import drafts_chains
from specdec_jax.speculative.verifiers import VERIFIERS


@jax.tree_util.register_pytree_node_class
class HorizontalCascade(DrafterPair):
    """One drafter for the first positions of a draft and another, cheaper one for later ones.

    Later positions count for less.

    The second also takes over where the first has nothing more to propose: with a copying drafter
    before a model, the copy goes as far as it can and the model drafts the rest. Each position has
    the distribution of the drafter that it comes from; a point mass beside a distribution becomes a
    one-hot distribution.
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
            tokens=_written(state.tokens, head.tokens, state.lengths, count),
            lengths=state.lengths + count,
            keys=keys_apart(state),
        )
        other, tail = then.draft(
            draft_state.second, behind, jnp.where(ended, 0, num_wanted - count)
        )

        def joined(buffer: jax.Array, of_head: jax.Array, of_tail: jax.Array):
            return _written(
                _written(buffer, of_head, count * 0, count), of_tail, count, tail.num_drafted
            )

        tokens = joined(jnp.zeros_like(tail.tokens), head.tokens, tail.tokens)
        dist: Categorical | PointMass | None = None
        if (
            config.needs_draft_probs
            and isinstance(head.dist, PointMass)
            and isinstance(tail.dist, PointMass)
        ):
            dist = PointMass(tokens, config.vocab_size)
        elif (empty := empty_distribution(state)) is not None:
            dist = Categorical(
                *map(joined, empty, _as_distribution(head.dist), _as_distribution(tail.dist))
            )
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
            raise ValueError(
                f"model_drafter: got {type(model_drafter).__name__}, expected a ModelDrafter"
            )
        _check_drafters(inner=inner)
        _check_behind("inner", inner)
        self.parts, self.number = (
            (model_drafter, inner),
            arguments.check_integer("inner_gamma", inner_gamma, 1),
        )

    @property
    def name(self) -> str:
        model_drafter, inner = self.parts
        return f"{model_drafter.name} over {inner.name} ({self.number})"

    def draft(
        self, draft_state: PairState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[PairState, Draft]:
        """Drafts with a loop of model calls over a fixed number of positions.

        A call begins at the first token that the model's cache lacks. After the target has accepted
        a whole draft that is one more than the last token; the call then has room for one proposal
        less, and no step is needed to catch up.
        """
        (model_drafter, inner), config = self.parts, state.config
        width = min(self.number, max(config.gamma - 1, 1))
        verifier = config.verifier if config.verifier.coupled else VERIFIERS["token"]
        inside = dataclasses.replace(
            state,
            policy=None,
            keys=keys_apart(state),
            config=config._replace(gamma=width, verifier=verifier),
        )
        offsets, network = jnp.arange(width + 1), model_drafter.network

        def body(loop: _Loop) -> _Loop:
            left, (cache, cached) = (
                loop.wanted - loop.drafted,
                (loop.model.cache, loop.model.cached),
            )
            view = dataclasses.replace(
                inside, tokens=loop.tokens, lengths=state.lengths + loop.drafted
            )
            lag = view.lengths - 1 - cached
            num_proposed = jnp.maximum(jnp.minimum(width - lag, left - 1), 0)
            inner_state, guess = inner.draft(loop.inner, view, num_proposed)

            proposed = _written(loop.tokens, guess.tokens, view.lengths, guess.num_drafted)
            places = jnp.minimum(cached[:, None] + offsets, proposed.shape[1] - 1)
            logits, cache = network.decode(
                jnp.take_along_axis(proposed, places, axis=1), cached, cache
            )
            scored = jnp.minimum(lag[:, None] + offsets, width)[..., None]
            logits = jnp.take_along_axis(
                model_drafter.widened(logits, config.vocab_size), scored, axis=1
            )
            verified, dist = verify(view, guess, logits)

            at_end = offsets == verified.num_accepted[:, None]
            new = jnp.where(
                at_end, verified.next_token[:, None], jnp.pad(guess.tokens, ((0, 0), (0, 1)))
            )
            is_eos = jnp.any(new[:, :, None] == state.eos_ids[:, None, :], axis=-1)
            first_eos = jnp.min(jnp.where(is_eos, offsets, width + 1), axis=1)
            num_new = jnp.minimum(verified.num_accepted, first_eos) + 1
            num_new = jnp.where(
                (left > 0) & (lag <= width), num_new, 0
            )  # a row that lags by more only catches up

            drafted = loop.drafted + num_new

            def place(buffer: jax.Array, values: jax.Array):
                return _written(buffer, values, loop.drafted, num_new)

            return _Loop(
                tokens=_written(loop.tokens, new, view.lengths, num_new),
                drafted=drafted,
                wanted=jnp.where(first_eos < num_new, drafted, loop.wanted),
                model=ModelDraftState(
                    cache,
                    jnp.where(left > 0, cached + jnp.minimum(lag + num_new, width + 1), cached),
                ),
                inner=inner_state,
                dist=loop.dist and dist and Categorical(*map(place, loop.dist, dist)),
                calls=loop.calls + jnp.where(left > 0, guess.calls + 1, 0),
            )

        none, draft_state = jnp.zeros_like(state.lengths), self.rewind(draft_state, state.lengths)
        loop = _Loop(state.tokens, none, num_wanted, *draft_state, empty_distribution(state), none)
        loop = jax.lax.while_loop(lambda loop: jnp.any(loop.drafted < loop.wanted), body, loop)
        places = jnp.minimum(
            state.lengths[:, None] + jnp.arange(config.gamma), state.tokens.shape[1] - 1
        )
        tokens = jnp.take_along_axis(loop.tokens, places, axis=1)
        return PairState(loop.model, loop.inner), Draft(tokens, loop.drafted, loop.dist, loop.calls)


def _written(
    buffer: jax.Array, values: jax.Array, starts: jax.Array, counts: jax.Array
) -> jax.Array:
    """Returns `buffer [B, N, …]` with `counts [B]` of `values [B, T, …]` from `starts [B]` on."""
    offsets = jnp.arange(buffer.shape[1]) - starts[:, None]

    def wide(x: jax.Array):
        return x.reshape(*x.shape, *[1] * (buffer.ndim - 2))

    spread = jnp.take_along_axis(values, wide(jnp.clip(offsets, 0, values.shape[1] - 1)), axis=1)
    return jnp.where(wide((offsets >= 0) & (offsets < counts[:, None])), spread, buffer)


def _as_distribution(dist: Categorical | PointMass) -> Categorical:
    return dist.dist() if isinstance(dist, PointMass) else dist


def _check_drafters(**drafters) -> None:
    for name, drafter in drafters.items():
        if not isinstance(drafter, Drafter) or not drafts_chains(drafter):
            raise ValueError(f"{name}: got {drafter!r}, expected a drafter of chains")


def _check_behind(name: str, drafter: Drafter) -> None:
    """Rejects a drafter that would draft from the target's cache or last state.

    They do not hold the tokens drafted before it.
    """
    if drafter.needs_target_state:
        got = type(drafter).__name__
        raise ValueError(
            f"{name}: got {got}, expected a drafter that needs nothing of the target's cache or "
            "states"
        )
