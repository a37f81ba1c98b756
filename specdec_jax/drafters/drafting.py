"""What drafters share: a base class, the loop over a draft, drawing a token."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative import distributions, randomness
from specdec_jax.speculative.distributions import Categorical, PointMass
from specdec_jax.speculative.drafter import TreeDrafter
from specdec_jax.speculative.policy import DraftSignals
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.sampling import SamplingMode, SamplingRows
from specdec_jax.speculative.state import (
    AnyRows,
    DecodeState,
    Draft,
    make_empty_signals,
    make_prefixes,
)

Step: TypeAlias = jax.Array | int
# Folded into a request's key: a number that no committed length reaches and that nothing else folds
# in.
_APART = 2**31 - 2


class NetworkDrafter(TreeDrafter):
    """The base class of drafters with a model, of which only the network is there under jit.

    Attributes:
      model: the model.
      network: its network, or one made of it.
      leaves, static: names of the attributes that are there under jit, and of the static ones.
    """

    model: LanguageModel
    network: Any
    leaves: ClassVar[tuple[str, ...]] = ("network",)
    static: ClassVar[tuple[str, ...]] = ()

    def tree_flatten(self):
        leaves, static = (
            tuple(getattr(self, name) for name in names) for names in (self.leaves, self.static)
        )
        return leaves, static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Any):
        drafter = object.__new__(cls)
        for name, value in zip((*cls.leaves, *cls.static), (*leaves, *static), strict=True):
            setattr(drafter, name, value)
        return drafter

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return (self.model,)


class Recorded(NamedTuple):
    """What is kept of a draft's distributions.

    Attributes:
      dist: the distributions that its tokens were drawn from; None if no verifier reads them.
      signals: what the policy of γ reads of them; None if it reads nothing.
    """

    dist: Categorical | None
    signals: DraftSignals | None

    @classmethod
    def empty(cls, state: AnyRows) -> "Recorded":
        """Returns empty buffers."""
        return cls(empty_distribution(state), make_empty_signals(state.policy, len(state.lengths)))


def fold_part_keys(state: DecodeState) -> jax.Array:
    """Returns keys `[B]` for a part of the draft that begins past the committed tokens.

    Uniforms are keyed by the length at which a draft begins. With the row's own keys, a part
    that begins later would use the draws of a later iteration. Gumbel coupling keys by absolute
    position on purpose, so there the keys stay.
    """
    if state.config.verifier.coupled:
        return state.keys
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(state.keys, jnp.full_like(state.lengths, _APART)), state.lengths)


def draft_from_logits(
    state: AnyRows, num_wanted: jax.Array, logits_of: Callable, carry: Any = ()
) -> tuple[Draft, Any]:
    """Drafts tokens that are drawn from a drafter's logits, one after another.

    The logits pass through the same processors, temperature and filters as the target's.

    Args:
      state: the committed tokens and what goes with them.
      num_wanted: `[B]`, the most tokens to draft.
      logits_of: (step, tokens `[B, S]` with what was drafted so far, carry) -> (logits `[B, 1, W]`
        of the next token, carry), for step = 0, 1 …; see `match_width` for W.
      carry: what `logits_of` keeps from step to step.

    Returns:
      The draft, one of whose `calls` gave each token, and the last carry.
    """

    def choose(step: Step, tokens: jax.Array, carry: tuple):
        logits, own = logits_of(step, tokens, carry[1])
        token, recorded = draw_adjusted(state, logits, tokens, step, carry[0])
        return token, (recorded, own)

    tokens, num_drafted, (recorded, carry) = draft_tokens(
        state, num_wanted, choose, (Recorded.empty(state), carry), signals_of=lambda c: c[0].signals
    )
    return Draft(tokens, num_drafted, recorded.dist, num_drafted, recorded.signals), carry


def draft_at_once(state: AnyRows, num_wanted: jax.Array, logits: jax.Array) -> Draft:
    """Drafts tokens from the logits `[B, T, W]` of all of them; its `calls` are to be replaced."""

    def logits_of(step: Step, tokens: jax.Array, carry: Any):
        return jax.lax.dynamic_slice_in_dim(logits, step, 1, axis=1), carry

    return draft_from_logits(state, num_wanted, logits_of)[0]


def draft_tokens(
    state: AnyRows,
    num_wanted: jax.Array,
    choose: Callable,
    carry: Any,
    lag: Step = 0,
    catch_up: Callable | None = None,
    signals_of: Callable[[Any], DraftSignals | None] = lambda carry: None,
    choose_first: Callable | None = None,
) -> tuple[jax.Array, jax.Array, Any]:
    """Drafts one token after another; a model that lags first catches up, two positions a call.

    A row stops drafting after an EOS that it chose, or after a token at which the policy of γ ends
    the draft. That token stays in the draft, because dropping it would bias the distribution.

    Args:
      state, num_wanted: as for `draft_from_logits`.
      choose: (step, tokens `[B, S]` with what was drafted so far, carry) -> (token `[B]`, carry),
        for step = 0, 1 …
      carry: what `choose` keeps from step to step.
      lag: scalar, how many tokens before the last committed one must be fed first. Traced: with a
        constant 1, XLA (of jaxlib 0.10.2) leaves out the loop that catches up.
      catch_up: like `choose`, but also feeds the token before this step's; called for step = 1 −
        lag, 3 − lag … up to 0 or −1. What it chooses for a step below 0 is thrown away. Not needed
        if nothing lags.
      signals_of: takes a carry and returns what the policy of γ reads of the distributions so far.
      choose_first: takes the place of `choose` for step 0; nothing lags then.

    Returns:
      The drafted tokens `[B, G]`, how many of them count `[B]`, and the last carry.
    """
    take = functools.partial(_take, state, signals_of)
    loop = -jnp.asarray(lag, jnp.int32), state.tokens, num_wanted, carry
    if choose_first is not None:
        loop = take(choose_first, loop)
    if catch_up is not None:
        # It mostly runs once or never, but is a loop: the branches of a `lax.cond` would copy the
        # caches.
        loop = jax.lax.while_loop(
            lambda loop: loop[0] < 0, lambda loop: take(catch_up, (loop[0] + 1, *loop[1:])), loop
        )
    return _read_carry(
        state,
        jax.lax.while_loop(
            lambda loop: jnp.any(loop[0] < loop[2]), functools.partial(take, choose), loop
        ),
    )


def draft_in_pairs(
    state: AnyRows,
    num_wanted: jax.Array,
    choose: Callable,
    carry: Any,
    lag: jax.Array,
    feed: Callable,
) -> tuple[jax.Array, jax.Array, Any]:
    """Does what `draft_tokens` does, where a call over two positions costs as much as over one.

    That is so on an accelerator. Every step feeds the token before it once more, so that a lag of
    one token costs no step of its own. There are G steps whether or not a row drafts so many, since
    a GPU's host waits before every step of a loop whose number of steps is not known.

    Args:
      state, num_wanted, carry, lag: as for `draft_tokens`.
      choose: as for `draft_tokens`; it also feeds the token before this step's.
      feed: (step, carry) -> carry; feeds this step's token and the one before it. Called for step =
        1 − lag, 3 − lag … below 0.
    """
    first = jnp.minimum(1 - jnp.asarray(lag, jnp.int32), 0)
    _, carry = jax.lax.while_loop(
        lambda loop: loop[0] < 0, lambda loop: (loop[0] + 2, feed(*loop)), (first, carry)
    )
    take = functools.partial(_take, state, lambda carry: None, choose)
    loop = jnp.int32(0), state.tokens, num_wanted, carry
    return _read_carry(
        state, jax.lax.fori_loop(0, state.config.gamma, lambda _, loop: take(loop), loop)
    )


def _take(state: AnyRows, signals_of: Callable, choose: Callable, loop: tuple) -> tuple:
    """Runs one step of the loop over a draft: step, tokens, number of tokens drafted, and carry."""
    step, tokens, num_drafted, carry = loop
    token, carry = choose(step, tokens, carry)
    drawing = (step >= 0) & (step < num_drafted)
    written = drawing[:, None] & (jnp.arange(tokens.shape[1]) == (state.lengths + step)[:, None])
    tokens = jnp.where(written, token[:, None], tokens)
    is_eos = jnp.any(token[:, None] == state.eos_ids, axis=1)
    most = jnp.where(is_eos, step + 1, num_drafted)
    if signals_of(carry) is not None:
        assert state.policy is not None, "only a policy reads the distributions of a draft"
        limit = state.policy.limit(state.policy_state, jnp.maximum(step, 0), signals_of(carry))
        most = jnp.minimum(most, jnp.maximum(limit, step + 1))
    return step + 1, tokens, jnp.where(drawing, most, num_drafted), carry


def _read_carry(state: AnyRows, loop: tuple) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the drafted tokens `[B, G]`, how many count `[B]`, and the carry of a loop."""
    _, tokens, num_drafted, carry = loop
    places = state.lengths[:, None] + jnp.arange(state.config.gamma)
    places = jnp.minimum(places, tokens.shape[1] - 1)
    return jnp.take_along_axis(tokens, places, axis=1), num_drafted, carry


def empty_distribution(state: AnyRows) -> Categorical | None:
    """Returns an empty buffer for a draft's distribution, None if no verifier will look at it."""
    if not state.config.needs_draft_probs:
        return None
    shape = len(state.lengths), state.config.gamma
    logits = jnp.zeros((*shape, state.config.vocab_size), jnp.float32)
    return Categorical(logits, jnp.zeros(shape, jnp.float32))


def draw_adjusted(
    state: AnyRows, logits: jax.Array, tokens: jax.Array, step: Step, recorded: Recorded
) -> tuple[jax.Array, Recorded]:
    """Returns a token `[B]` drawn from `logits [B, 1, V]`, and the record with its distribution.

    The logits are adjusted first; at temperature 0 the token is their argmax. `tokens [B, S]` holds
    what was drafted before.
    """
    config, prefixes = state.config, make_prefixes(state, tokens, jnp.maximum(step, 0))
    adjusted = prefixes, state.sampling, config.mode
    if config.mode.greedy:
        token = distributions.argmax(distributions.process(logits, *adjusted))[:, 0]
        dist = recorded.dist
    else:
        here = distributions.standardize(logits, *adjusted)
        token, dist = draw(state, here, step, recorded.dist)  # type: ignore[arg-type]
    if recorded.signals is None:
        return token, Recorded(dist, None)
    signals = read_signals(logits, adjusted, token[:, None])
    return token, Recorded(dist, _record(recorded.signals, signals, step))


def read_signals(
    logits: jax.Array, adjusted: tuple[Context, SamplingRows, SamplingMode], tokens: jax.Array
) -> DraftSignals:
    """Returns what a policy of γ reads of the distributions that `tokens [B, T]` come from.

    Args:
      logits: `[B, T, V]`, before they are adjusted.
      adjusted: what else `standardize` takes.
    """
    soft = distributions.standardize(logits, *adjusted, soften=True)
    entropy = soft.entropy()
    evenness = entropy / max(math.log(logits.shape[-1]), 1e-9)
    return DraftSignals(soft.prob(tokens), entropy, evenness)


def draw(
    state: DecodeState, here: Categorical, step: Step, dist: Categorical | None
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
    return drawn, None if dist is None else _record(dist, here, step)


def _record(buffers: Any, new: Any, step: Step) -> Any:
    """Returns a tuple of buffers `[B, G, …]` with `new`, of `[B, 1, …]`, at position `step`.

    While catching up position 0 is written, which step 0 then overwrites.
    """
    place = jnp.maximum(step, 0)
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=1)
    return type(buffers)(*map(write, buffers, new))


def match_width(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Returns `logits [..., W]` as `[..., vocab_size]`.

    Ids that the drafter lacks get probability 0; ids that the target lacks are cut off. The cut
    comes before any adjustment, so that the distribution is the one that is drawn from.
    """
    missing = max(vocab_size - logits.shape[-1], 0)
    widths = ((0, 0),) * (logits.ndim - 1) + ((0, missing),)
    return jnp.pad(logits[..., :vocab_size], widths, constant_values=-jnp.inf)


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
