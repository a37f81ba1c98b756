"""What drafters share: the loop over a draft, drawing a token, drafts without a model."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.speculative import distributions, randomness
from specdec_jax.speculative.distributions import Categorical, PointMass
from specdec_jax.speculative.policy_inputs import DraftSignals
from specdec_jax.speculative.state import AnyRows, DecodeState, Draft, context

# Folded into a request's key: a number that no committed length reaches and that nothing else folds
# in.
_APART = 2**31 - 2


def keys_apart(state: DecodeState) -> jax.Array:
    """Returns keys `[B]` for a part of the draft that begins past the committed tokens.

    Uniforms are keyed by the length at which a draft begins. With the request's own keys, a part
    that begins later would use the draws of a later iteration. Gumbel coupling keys by absolute
    position on purpose, so there the keys stay.
    """
    if state.config.verifier.coupled:
        return state.keys

    def fold(key: jax.Array, length: jax.Array):
        return jax.random.fold_in(jax.random.fold_in(key, _APART), length)

    return jax.vmap(fold)(state.keys, state.lengths)


def draft_tokens(
    state: AnyRows,
    num_wanted: jax.Array,
    choose: Callable,
    carry: Any,
    lag: jax.Array | int = 0,
    catch_up: Callable | None = None,
    seen: Callable[[Any], DraftSignals | None] = lambda carry: None,
) -> tuple[jax.Array, jax.Array, Any]:
    """Drafts one token after another; a model that lags first catches up, two positions a call.

    A row stops drafting after an EOS that it chose, or after a token at which the policy of γ ends
    the draft. That token stays in the draft, because dropping it would bias the distribution.

    Args:
      state: the committed tokens and what goes with them.
      num_wanted: `[B]`, the most tokens to draft.
      choose: (step, tokens `[B, S]` with what was drafted so far, carry) -> (token `[B]`, carry),
        for step = 0, 1 …
      carry: what `choose` keeps from step to step.
      lag: scalar, how many tokens before the last committed one must be fed first.
      catch_up: like `choose`, but also feeds the token before this step's; called for step = 1 −
        lag, 3 − lag … up to 0 or −1. What it chooses for a step below 0 is thrown away. Not needed
        if nothing lags.
      seen: takes a carry and returns what the policy of γ has read from the distributions so far.

    Returns:
      The drafted tokens `[B, G]`, how many of them count `[B]`, and the last carry.
    """

    def more(loop: tuple):
        step, _, num_drafted, _ = loop
        return jnp.any(step < num_drafted)

    take = functools.partial(_take, state, seen)
    loop = -jnp.asarray(lag, jnp.int32), state.tokens, num_wanted, carry
    if catch_up is not None:
        # It mostly runs once or never, but is a loop: the branches of a `lax.cond` would copy the
        # caches.
        def pair(loop: tuple):
            return take(catch_up, (loop[0] + 1, *loop[1:]))

        loop = jax.lax.while_loop(lambda loop: loop[0] < 0, pair, loop)
    return _drafted(state, jax.lax.while_loop(more, functools.partial(take, choose), loop))


def draft_in_pairs(
    state: AnyRows,
    num_wanted: jax.Array,
    choose: Callable,
    carry: Any,
    lag: jax.Array,
    feed: Callable,
) -> tuple[jax.Array, jax.Array, Any]:
    """Does what `draft_tokens` does, where a call over two positions costs as much as over one.

    That is so on an accelerator. Every step feeds the token before it once more.

    So a lag of one token costs no step of its own. There are G steps whether or not a row drafts so
    many, since a GPU's host waits before every step of a loop whose number of steps is not known.

    Args:
      state, num_wanted, carry: as for `draft_tokens`.
      choose: as for `draft_tokens`; it also feeds the token before this step's.
      lag: scalar, how many tokens before the last committed one must be fed first.
      feed: (step, carry) -> carry; feeds this step's token and the one before it. Called for step =
        1 − lag, 3 − lag … below 0.
    """
    first = jnp.minimum(1 - jnp.asarray(lag, jnp.int32), 0)

    def pair(loop: tuple):
        return (loop[0] + 2, feed(*loop))

    _, carry = jax.lax.while_loop(lambda loop: loop[0] < 0, pair, (first, carry))

    def step(_: Any, loop: tuple):
        return _take(state, lambda carry: None, choose, loop)

    loop = jnp.int32(0), state.tokens, num_wanted, carry
    return _drafted(state, jax.lax.fori_loop(0, state.config.gamma, step, loop))


def _take(state: AnyRows, seen: Callable, choose: Callable, loop: tuple) -> tuple:
    """Runs one step of the loop over a draft: step, tokens, number of tokens drafted, and carry."""
    step, tokens, num_drafted, carry = loop
    token, carry = choose(step, tokens, carry)
    drawing = (step >= 0) & (step < num_drafted)
    written = drawing[:, None] & (jnp.arange(tokens.shape[1]) == (state.lengths + step)[:, None])
    tokens = jnp.where(written, token[:, None], tokens)
    is_eos = jnp.any(token[:, None] == state.eos_ids, axis=1)
    most = jnp.where(is_eos, step + 1, num_drafted)
    if seen(carry) is not None:
        assert state.policy is not None, "only a policy reads the distributions of a draft"
        limit = state.policy.limit(state.policy_state, jnp.maximum(step, 0), seen(carry))
        most = jnp.minimum(most, jnp.maximum(limit, step + 1))
    return step + 1, tokens, jnp.where(drawing, most, num_drafted), carry


def _drafted(state: AnyRows, loop: tuple) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the drafted tokens `[B, G]`, how many count `[B]`, and the carry of a loop."""
    _, tokens, num_drafted, carry = loop
    places = jnp.minimum(
        state.lengths[:, None] + jnp.arange(state.config.gamma), tokens.shape[1] - 1
    )
    return jnp.take_along_axis(tokens, places, axis=1), num_drafted, carry


def empty_distribution(state: AnyRows) -> Categorical | None:
    """Returns an empty buffer for a draft's distribution, None if no verifier will look at it."""
    config = state.config
    if not config.needs_draft_probs:
        return None
    shape = (len(state.lengths), config.gamma)
    return Categorical(
        jnp.zeros((*shape, config.vocab_size), jnp.float32), jnp.zeros(shape, jnp.float32)
    )


def draw_adjusted(
    state: AnyRows,
    logits: jax.Array,
    tokens: jax.Array,
    step: jax.Array | int,
    dist: Categorical | None,
) -> tuple[jax.Array, Categorical | None]:
    """Returns a token `[B]`, drawn from `logits [B, 1, V]` after processors, and `dist`.

    At temperature 0 it is their argmax.

    `dist` then holds, at position `step`, the distribution that the token was drawn from. `tokens
    [B, S]` holds what was drafted before.
    """
    config, prefixes = state.config, context(state, tokens, jnp.maximum(step, 0))
    if config.mode.greedy:
        return distributions.argmax(
            distributions.process(logits, prefixes, state.sampling, config.mode)
        )[:, 0], dist
    here = distributions.standardize(logits, prefixes, state.sampling, config.mode)
    return draw(state, here, step, dist)  # type: ignore[arg-type]


def draw(
    state: DecodeState, here: Categorical, step: jax.Array | int, dist: Categorical | None
) -> tuple[jax.Array, Categorical | None]:
    """Returns one token `[B]` drawn from `here` over `[B, 1, V]`, and `dist` with `here` at `step`.

    While catching up (step < 0) what is drawn is thrown away.
    """
    if state.config.verifier.coupled:
        positions = (state.lengths + jnp.maximum(step, 0))[:, None]
        noise = randomness.gumbel_noise(state.keys, positions, state.config.vocab_size)
        return distributions.argmax(here.logits + noise)[:, 0], dist
    offsets = jnp.broadcast_to(step, state.lengths[:, None].shape)
    random = randomness.random_bits(state.keys, state.lengths, offsets, randomness.DRAFT)[:, 0]
    drawn = randomness.draw(here.probs()[:, 0], random)
    if dist is not None:
        # While catching up position 0 is written, which step 0 then overwrites.
        def write(buffer: jax.Array, new: jax.Array):
            return jax.lax.dynamic_update_slice_in_dim(buffer, new, jnp.maximum(step, 0), axis=1)

        dist = Categorical(*map(write, dist, here))
    return drawn, dist


def record_signals(
    state: AnyRows,
    logits: jax.Array,
    tokens: jax.Array,
    step: jax.Array | int,
    token: jax.Array,
    seen: DraftSignals | None,
) -> DraftSignals | None:
    """Returns `seen` with what the policy reads of the distribution of `token [B]`.

    The other arguments are those of `draw_adjusted`.
    """
    if seen is None:
        return None
    prefixes = context(state, tokens, jnp.maximum(step, 0))
    dist = distributions.standardize(
        logits, prefixes, state.sampling, state.config.mode, soften=True
    )
    entropy = dist.entropy()
    here = DraftSignals(
        dist.prob(token[:, None]), entropy, entropy / max(math.log(logits.shape[-1]), 1e-9)
    )

    # While catching up position 0 is written, which step 0 then overwrites.
    def write(buffer: jax.Array, new: jax.Array):
        return jax.lax.dynamic_update_slice_in_dim(buffer, new, jnp.maximum(step, 0), axis=1)

    return DraftSignals(*map(write, seen, here))


def match_width(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Returns `logits [..., W]` as `[..., vocab_size]`.

    Ids that the drafter lacks get probability 0; ids that the target lacks are cut off.

    The cut comes before any adjustment, so that the distribution is the one that is drawn from.
    """
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return jnp.pad(
            logits, ((0, 0),) * (logits.ndim - 1) + ((0, missing),), constant_values=-jnp.inf
        )
    return logits[..., :vocab_size]


def point_mass(state: AnyRows, tokens: jax.Array) -> PointMass | None:
    """Returns the point mass at each of `tokens`, None if no verifier will look at it."""
    return PointMass(tokens, state.config.vocab_size) if state.config.needs_draft_probs else None


def draft_without_calls(
    state: AnyRows,
    tokens: jax.Array,
    num_drafted: jax.Array,
    dist: Categorical | PointMass | None,
) -> Draft:
    """Returns a draft for which no model was called."""
    return Draft(tokens, num_drafted, dist, jnp.zeros_like(state.lengths))
