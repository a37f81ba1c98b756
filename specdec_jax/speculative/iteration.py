"""One iteration of speculative decoding: draft → score → verify → commit.

Algorithm 1 of Leviathan, Kalman, Matias 2023 for one row, between the two calls of models:

>>> import numpy as np
>>> def algorithm_1(p, q, drafted, u):
...     '''From distributions p [γ + 1, V] and q [γ, V], tokens drawn from q, and uniforms u [γ].'''
...     n = 0  # how many drafted tokens are accepted
...     while n < len(drafted) and u[n] < p[n, drafted[n]] / q[n, drafted[n]]:
...         n += 1  # with probability min(1, p / q)
...     if n == len(drafted):
...         return n, p[n]  # all are accepted: a bonus token from the target's own distribution
...     residual = np.maximum(p[n] - q[n], 0)  # else a correction, from what p has more than q
...     return n, residual / residual.sum()

The compiled code does the same for all rows at once, from logits, in `verify`:

>>> rng = np.random.default_rng(0)
>>> p, q = (rng.dirichlet(np.ones(5), size).astype(np.float32) for size in (3, 2))
>>> drafted, u = np.array([1, 4]), rng.uniform(size=2).astype(np.float32)
>>> n, following = algorithm_1(p, q, drafted, u)
>>> bits = rng.integers(0, 2**32, (1, 3, 2), np.uint32)  # of the last draw
>>> row = lambda values: jnp.asarray(values)[None]
>>> dist = lambda values: Categorical.from_logits(jnp.log(row(values)))
>>> draws = Randomness(row(u), jnp.asarray(bits))
>>> found = verifiers.verify_tokens(dist(p), dist(q), row(drafted), jnp.array([2]), draws)
>>> int(found.num_accepted[0]) == n
True
>>> int(found.next_token[0]) == int(randomness.draw(row(following), jnp.asarray(bits[:, n]))[0])
True

Before an iteration the target's cache lacks exactly the last committed token; so the target is fed
that token and the γ drafted ones, and gives the distributions of γ + 1 positions in one call.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from specdec_jax.backends.axes import PerRow, States, TokenAndLogprob, Tokens, Valid
from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.models import arguments
from specdec_jax.models.network import Network
from specdec_jax.speculative import distributions, randomness, verifiers
from specdec_jax.speculative.distributions import Categorical, PointMass
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policy_calls import next_gamma, next_state
from specdec_jax.speculative.policy_inputs import Outcome
from specdec_jax.speculative.state import Counts, DecodeState, Draft, Scored, StaticConfig, context
from specdec_jax.speculative.verifier import Randomness, Verification, Verifier, check_verification


def iterate(target: Network, drafter: Drafter | None, state: DecodeState) -> DecodeState:
    """Runs one iteration for all rows; rows that are done are unchanged where it is read later."""
    config, batch = state.config, state.tokens.shape[0]
    num_wanted = _count_wanted(state)
    if drafter is not None and config.gamma:
        draft_state, draft = checked(
            drafter, drafter.draft(state.draft_state, state, num_wanted), state
        )
        draft = draft._replace(num_drafted=jnp.minimum(draft.num_drafted, num_wanted))
        draft, state = _up_to_failure(draft, state)
    else:
        draft_state, draft = None, _no_draft(batch, config)

    # Score the last committed token and the drafted ones in one call, verify, and commit.
    cache = state.target_cache if draft.target_cache is None else draft.target_cache
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    scored = jnp.concatenate([last, draft.tokens], axis=1)
    observed = drafter is not None and drafter.observes
    after, found = _verified(
        target, state.replace(target_cache=cache, draft_state=None), draft, scored, observed
    )
    after = after.replace(draft_state=draft_state)
    if drafter is None or not observed:
        return constrain_sharding(after, target.rules)
    states, logits = found
    seen = Scored(scored, states, logits, after.lengths - state.lengths)
    return constrain_sharding(
        after.replace(draft_state=drafter.observe(draft_state, after, seen)), target.rules
    )


def _count_wanted(state: DecodeState) -> PerRow:
    """Returns how many tokens each row wants drafted.

    That is at most limit − length − 1: the target adds one more, and so no row ever passes its
    limit.
    """
    wanted = next_gamma(state.policy, state.policy_state, state.gamma)
    return jnp.where(state.done, 0, jnp.minimum(wanted, state.limits - state.lengths - 1))


def checked(drafter: Drafter, found: Any, state: DecodeState) -> tuple[Any, Draft]:
    """Checks that a drafter's `draft` returned its state and a `Draft`, and returns both.

    The check runs while the program is traced.

    Args:
      found: what `draft` returned.
      state: the decode loop's, which `draft` got.

    Raises:
      ValueError: anything else was returned.
    """
    name, batch = type(drafter).__name__, len(state.lengths)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Draft)):
        raise ValueError(
            f"drafter {name}: draft returned {type(found).__name__}, expected (draft_state, Draft)"
        )
    draft_state, draft = found
    rows, drafted = f"int32[{batch}]", f"int32[{batch}, {state.config.gamma}]"
    for field, expected in (("tokens", drafted), ("num_drafted", rows), ("calls", rows)):
        got = arguments.described(getattr(draft, field))
        if got != expected:
            raise ValueError(f"drafter {name}: draft gave {field} {got}, expected {expected}")
    if state.config.needs_draft_probs and not isinstance(draft.dist, Categorical | PointMass):
        raise ValueError(
            f"drafter {name}: draft gave {type(draft.dist).__name__} as the distribution of its "
            "tokens, "
            "expected the one they were drawn from, or point_mass(state, tokens)"
        )
    if state.policy is not None and state.policy.needs_probs and draft.seen is None:
        raise ValueError(
            f"drafter {name}: draft gave no Draft.seen, "
            "expected it of a drafter that provides_probs"
        )
    got, expected = map(arguments.described, (draft_state, state.draft_state))
    if got != expected:
        raise ValueError(
            f"drafter {name}: draft returned the state {got}, expected what init makes, {expected}"
        )
    return found


def _up_to_failure(draft: Draft, state: DecodeState) -> tuple[Draft, DecodeState]:
    """Cuts drafts before the first token whose distribution contained NaN, and notes its slot.

    Where a draft is cut does not depend on what was drawn, so that the output distribution stays
    the target's.
    """
    first = jnp.min(
        jnp.where(draft.tokens < 0, jnp.arange(state.config.gamma), state.config.gamma), axis=1
    )
    failed = (first < draft.num_drafted) & (state.draft_failed == 0)
    state = state.replace(draft_failed=jnp.where(failed, state.lengths + first, state.draft_failed))
    num_drafted = jnp.minimum(draft.num_drafted, first)
    return draft._replace(tokens=jnp.maximum(draft.tokens, 0), num_drafted=num_drafted), state


def _no_draft(batch: int, config: StaticConfig) -> Draft:
    zeros = jnp.zeros(batch, jnp.int32)
    dist = (
        Categorical.from_logits(jnp.zeros((batch, 0, config.vocab_size)))
        if config.needs_draft_probs
        else None
    )
    return Draft(jnp.zeros((batch, 0), jnp.int32), zeros, dist, zeros)


def _verified(
    target: Network, state: DecodeState, draft: Draft, scored: Tokens, watched: bool
) -> tuple[DecodeState, tuple[Float[Array, "B T ..."], ...]]:
    """Scores the T = G + 1 tokens `scored` in one call of the target, verifies and commits.

    Where several widths are compiled, all three steps use the narrowest that covers every row's
    draft, since the time of each grows with the number of positions.

    Returns:
      The state after the commit; and `()`, or with `watched` the target's states and logits, which
      are 0 past the width that was used.
    """

    # Positions that a row has not drafted, and all those of a row that is done, need not be
    # computed.
    valid = ~state.done[:, None] & (jnp.arange(scored.shape[1]) <= draft.num_drafted[:, None])

    def verify_width(state: DecodeState, width: int):
        states, cache = target.decode_states(
            scored[:, :width], state.lengths - 1, state.target_cache, valid=valid[:, :width]
        )
        config, part = state.config, draft.first(width - 1)
        narrow = state.replace(target_cache=cache, config=config._replace(gamma=width - 1))
        if config.commits_argmax and not watched:
            tokens, log_probs = most_probable(target, states, valid[:, :width])
            verified = verifiers.verify_greedy(tokens, part.tokens, part.num_drafted)
            logits, after = None, commit(narrow, part, verified, lambda new: log_probs, None)
        else:
            logits = target.head(states, valid[:, :width])
            verified, adjusted = verify(narrow, part, logits)
            after = commit(
                narrow,
                part,
                verified,
                distributions.log_prob_under(logits, target.skips_padding),
                adjusted,
            )
        return after.replace(config=config, last_draft=draft.tokens), (
            states,
            logits,
        ) if watched else ()

    widths, needed = state.config.widths, jnp.max(draft.num_drafted) + 1
    if not widths:
        return verify_width(state, scored.shape[1])

    def once(width: int, carry: tuple):
        # A loop that runs once for the width that is needed and never for the others, because
        # `lax.switch` would copy the caches.
        def body(carry: tuple):
            _, state, seen = carry
            state, found = verify_width(state, width)

            def put(values: jax.Array, new: jax.Array):
                return jax.lax.dynamic_update_slice_in_dim(values, new, 0, axis=1)

            return jnp.zeros((), bool), state, jax.tree.map(put, seen, found)

        return jax.lax.while_loop(lambda carry: carry[0] & (needed <= width), body, carry)

    shapes = jax.eval_shape(lambda state: verify_width(state, scored.shape[1])[1], state)
    carry = (
        jnp.ones((), bool),
        state,
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
    )
    for width in widths:
        carry = once(width, carry)
    return carry[1:]


def most_probable(network: Network, states: States, valid: Valid = None) -> TokenAndLogprob:
    """Returns the argmax token after each of `states`, and its log-probability.

    Where a logit is NaN they are −1 and NaN.
    """
    if network.skips_padding:
        return network.greedy_token_and_logprob(states, valid)
    logits = network.head(states, valid)
    tokens = distributions.argmax(logits)
    return tokens, Categorical.from_logits(logits).log_prob(tokens)


def verify(
    state: DecodeState, draft: Draft, logits: Float[Array, "B T V"]
) -> tuple[Verification, Categorical | None]:
    """Decides which drafted tokens are accepted and which token follows them.

    Args:
      logits: the target's, at the last committed token and the drafted ones, T = G + 1.

    Returns:
      The outcome, and the target's distribution after processors, temperature and filters at the T
      positions; None for the distribution where every token is its argmax.
    """
    config, keys, lengths = state.config, state.keys, state.lengths
    tokens, width = state.tokens, config.gamma + 1
    if config.mode.reads_prefix:
        tokens = (
            _write(tokens, draft.tokens, lengths, draft.num_drafted) if config.gamma else tokens
        )
    prefixes = context(state, tokens)
    processed = distributions.process(logits, prefixes, state.sampling, config.mode)
    verifier, offsets = config.verifier, jnp.broadcast_to(jnp.arange(width), (len(lengths), width))
    assert isinstance(verifier, Verifier), "a program of chains"
    accept = randomness.uniforms(keys, lengths, offsets[:, :-1], randomness.ACCEPT)
    greedy: Verification | None = None
    if (
        config.mode.greedy or verifier.softens
    ):  # verified before temperature 0 makes the distribution one-hot
        if verifier.verify_greedily is None:
            greedy = verifiers.verify_greedy(
                distributions.argmax(processed), draft.tokens, draft.num_drafted
            )
        else:
            found = verifier.verify_greedily(
                processed, draft.tokens, draft.num_drafted, accept, state.settings
            )
            greedy = check_verification(verifier, found, len(lengths))
        if config.strict_argmax:
            return greedy, None
    dist = distributions.standardize(logits, prefixes, state.sampling, config.mode)
    if config.mode.greedy:
        assert greedy is not None
        return greedy, dist
    # Words for a residual and for a bonus draw have tags of their own; which of them are used
    # depends only on how many tokens are accepted.
    residual = randomness.random_bits(keys, lengths, offsets, randomness.RESIDUAL)
    bonus = randomness.random_bits(keys, lengths, offsets, randomness.BONUS)
    final = jnp.where((offsets < draft.num_drafted[:, None])[..., None], residual, bonus)
    noise = (
        randomness.gumbel_noise(keys, lengths[:, None] + offsets, config.vocab_size)
        if verifier.coupled
        else None
    )
    found = verifier.verify(
        dist,
        draft.dist,
        draft.tokens,
        draft.num_drafted,
        Randomness(accept, final, noise),
        state.settings,
    )
    verified = check_verification(verifier, found, len(lengths))
    if greedy is not None:
        argmax = state.sampling.temperature == 0
        verified = Verification(*(jnp.where(argmax, a, b) for a, b in zip(greedy, verified)))
    return verified, dist


def commit(
    state: DecodeState,
    draft: Draft,
    verified: Verification,
    log_prob: Callable[[Tokens], Float[Array, "B T"]],
    adjusted: Categorical | None,
    drafted: PerRow | None = None,
) -> DecodeState:
    """Writes the accepted tokens and the next one, marks complete rows, updates the statistics.

    A row is complete at an EOS, at its limit, or where its distribution contains NaN. Such a
    distribution leaves the token −1 with the log-probability NaN.

    Args:
      log_prob: returns the log-probabilities of T = G + 1 tokens under the target's own
        distributions.
      adjusted: the target's distributions after processors, temperature and filters; None where
        every token is the argmax.
      drafted: how many tokens were drafted in all, of which those of `draft` may be a part; None:
        no more than its `num_drafted`.
    """
    drafted = draft.num_drafted if drafted is None else drafted
    width, active, num_accepted = state.config.gamma + 1, ~state.done, verified.num_accepted
    offsets = jnp.arange(width)
    # The new tokens of a row: the accepted ones, then the next one.
    new = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    new = jnp.where(offsets == num_accepted[:, None], verified.next_token[:, None], new)
    is_eos = jnp.any(new[:, :, None] == state.eos_ids[:, None, :], axis=-1)
    first_eos = jnp.min(
        jnp.where(is_eos & (offsets <= num_accepted[:, None]), offsets, width), axis=1
    )
    num_new = jnp.where(active, jnp.minimum(num_accepted, first_eos) + 1, 0)

    log_probs = jnp.where(new < 0, jnp.nan, log_prob(new))
    adjusted_log_probs = state.adjusted_log_probs
    if adjusted is not None:
        adjusted_log_probs = _write(
            adjusted_log_probs, adjusted.log_prob(new), state.lengths, num_new
        )
    lengths = state.lengths + num_new
    ended = (first_eos < width) | (verified.next_token < 0)
    done = state.done | ended & active | (lengths >= state.limits)

    examined = active[:, None] & (
        offsets[:-1] < jnp.minimum(num_accepted + 1, draft.num_drafted)[:, None]
    )
    examined &= offsets[:-1] <= first_eos[:, None]
    accepted = examined & (offsets[:-1] < num_accepted[:, None])
    counts, integer = state.counts, lambda mask: mask.astype(jnp.int32)

    def by_position(counted: jax.Array, mask: jax.Array):
        return counted + jnp.pad(integer(mask), ((0, 0), (0, counted.shape[1] - width + 1)))

    counts = Counts(
        target_calls=counts.target_calls + integer(active),
        draft_calls=counts.draft_calls + jnp.where(active, draft.calls, 0),
        drafted=counts.drafted + jnp.where(active, drafted, 0),
        accepted=counts.accepted + jnp.sum(integer(accepted), axis=1),
        examined_by_position=by_position(counts.examined_by_position, examined),
        accepted_by_position=by_position(counts.accepted_by_position, accepted),
        undrafted=counts.undrafted
        + integer(_find_undrafted(state, draft, num_accepted, first_eos)),
    )
    policy_state, outcome = (
        state.policy_state,
        Outcome(draft.num_drafted, num_accepted, draft.seen, draft.node_outcomes),
    )
    if state.policy is not None:
        policy_state = next_state(state.policy, policy_state, outcome)
    return state.replace(
        tokens=_write(state.tokens, new, state.lengths, num_new),
        log_probs=_write(state.log_probs, log_probs, state.lengths, num_new),
        adjusted_log_probs=adjusted_log_probs,
        lengths=lengths,
        done=done,
        counts=counts,
        last_drafted=jnp.where(active, drafted, 0),
        last_accepted=jnp.where(active, num_accepted, 0),
        last_seen=draft.seen,
        policy_state=policy_state,
    )


def _find_undrafted(
    state: DecodeState, draft: Draft, num_accepted: PerRow, first_eos: PerRow
) -> Bool[Array, " B"]:
    """Returns the rows whose draft was accepted whole, or was empty, and shorter than wanted.

    After an accepted EOS nothing is wanted; a policy that reads a draft's distributions wants no
    more than it let the drafter draft; and of trees nothing is counted.

    Args:
      first_eos: the place of the first EOS among the new tokens, past the end if there is none.
    """
    if draft.seen is not None or state.config.tree is not None:
        return jnp.zeros_like(state.done)
    whole = (num_accepted == draft.num_drafted) & (first_eos >= num_accepted)
    return whole & (num_accepted < _count_wanted(state))  # where a row is done, nothing is wanted


def _write(
    buffer: Shaped[Array, "B S"], values: Shaped[Array, "B T"], starts: PerRow, counts: PerRow
) -> Shaped[Array, "B S"]:
    """Returns `buffer` with the first `counts[b]` of `values` written from slot `starts[b]` on.

    This is a select over the whole buffer, because on a CPU XLA expands a scatter into a loop,
    which takes longer than S elements do.
    """
    offsets = jnp.arange(buffer.shape[1]) - starts[:, None]
    spread = jnp.take_along_axis(values, jnp.clip(offsets, 0, values.shape[1] - 1), axis=1)
    return jnp.where(
        (offsets >= 0) & (offsets < counts[:, None]), spread.astype(buffer.dtype), buffer
    )
