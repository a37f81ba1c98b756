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
>>> dists = (Categorical.from_logits(jnp.log(probs)[None]) for probs in (p, q))
>>> draws = Randomness(jnp.asarray(u)[None], jnp.asarray(bits))
>>> verified = verifiers.verify_tokens(*dists, jnp.asarray(drafted)[None], jnp.array([2]), draws)
>>> int(verified.num_accepted[0]) == n
True
>>> next_token = randomness.draw(jnp.asarray(following)[None], jnp.asarray(bits[:, n]))
>>> int(verified.next_token[0]) == int(next_token[0])
True

Before an iteration the target's cache lacks exactly the last committed token; so the target is fed
that token and the γ drafted ones, and gives the distributions of γ + 1 positions in one call.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from specdec_jax.backends.axes import PerRow, States, TokenAndLogprob, Tokens, Valid
from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.models.network import Network
from specdec_jax.speculative import distributions, randomness, verifiers
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.drafter import Drafter, check_draft
from specdec_jax.speculative.policy import Outcome, choose_gamma, update_policy
from specdec_jax.speculative.prefill import prefill
from specdec_jax.speculative.state import (
    Counts,
    DecodeState,
    Draft,
    Scored,
    StaticConfig,
    make_prefixes,
)
from specdec_jax.speculative.strategy import Committed
from specdec_jax.speculative.verifier import Randomness, Verification, Verifier, check_verification


class ChainDecoding:
    """Decodes with chains of drafted tokens, or without a drafter; a `DecodingStrategy`."""

    commits_tokens = True
    prefill = staticmethod(prefill)

    def iterate(self, target: Network, drafter: Drafter | None, state: DecodeState) -> DecodeState:
        """Runs one iteration for all rows. Finished rows are unchanged where it is read later."""
        config, batch = state.config, state.tokens.shape[0]
        num_wanted = _count_wanted(state)
        if drafter is not None and config.gamma:
            drafted = drafter.draft(state.draft_state, state.for_drafter(), num_wanted)
            draft_state, draft = check_draft(drafter, drafted, state)
            draft = draft.limited(num_wanted)
            draft, failed = _cut_failures(draft, state)
        else:
            draft_state, draft, failed = None, _make_empty_draft(batch, config), None

        # Score the last committed token and the drafted ones in one call, verify, and commit.
        cache = state.target_cache if draft.target_cache is None else draft.target_cache
        last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        fed = jnp.concatenate([last, draft.tokens], axis=1)
        before = state.replace(target_cache=cache, draft_state=None)
        after, (states, logits) = _score_and_commit(target, before, draft, fed, drafter)
        after = after.replace(draft_state=draft_state)
        if failed is not None:
            after = note_failures(after, failed)
        if drafter is not None:
            scored = Scored(fed, states, logits, after.lengths - state.lengths)
            after = after.replace(draft_state=drafter.observe(draft_state, after, scored))
        return constrain_sharding(after, target.rules)

    def read(self, state: DecodeState) -> Committed:
        names = [name for name in Committed._fields if name != "search"]
        return Committed(*(getattr(state, name) for name in names))


def _count_wanted(state: DecodeState) -> PerRow:
    """Returns how many tokens each row wants drafted, at most limit − length − 1.

    The target adds one more, and so no row ever passes its limit.
    """
    wanted = choose_gamma(state.policy, state.policy_state, state.gamma)
    return jnp.where(state.done, 0, jnp.minimum(wanted, state.limits - state.lengths - 1))


def _cut_failures(draft: Draft, state: DecodeState) -> tuple[Draft, PerRow]:
    """Cuts drafts before the first token whose distribution contained NaN, or that is no id.

    Where a draft is cut does not depend on what was drawn, so that the output distribution stays
    the target's.

    Returns:
      The drafts, and the slots of these tokens for `note_failures`.
    """
    offsets, gamma = jnp.arange(state.config.gamma), state.config.gamma
    wrong = (draft.tokens < 0) | (draft.tokens >= state.config.vocab_size)
    first = jnp.min(jnp.where(wrong, offsets, gamma), axis=1)
    slots = jnp.where(first < draft.num_drafted, state.lengths + first, state.tokens.shape[1])
    num_drafted = jnp.minimum(draft.num_drafted, first)
    return draft._replace(tokens=jnp.where(wrong, 0, draft.tokens), num_drafted=num_drafted), slots


def note_failures(after: DecodeState, slots: PerRow) -> DecodeState:
    """Notes the first slot of each row at which the drafter's distribution contained NaN.

    Only where tokens up to this slot were committed: after others, which the target rejected, a
    processor of the user's may give NaN that plain decoding never meets.

    Args:
      after: the state after the commit.
      slots: the slots of this iteration's drafts; past the buffer where there is none.
    """
    failed = (slots < after.lengths) & (after.draft_failed == 0)
    return after.replace(draft_failed=jnp.where(failed, slots, after.draft_failed))


def _make_empty_draft(batch: int, config: StaticConfig) -> Draft:
    zeros, dist = jnp.zeros(batch, jnp.int32), None
    if config.needs_draft_probs:
        dist = Categorical.from_logits(jnp.zeros((batch, 0, config.vocab_size)))
    return Draft(jnp.zeros((batch, 0), jnp.int32), zeros, dist, zeros)


def _score_and_commit(
    target: Network, state: DecodeState, draft: Draft, fed: Tokens, drafter: Drafter | None
) -> tuple[DecodeState, tuple[Float[Array, "B T ..."] | None, ...]]:
    """Scores the T = G + 1 tokens `fed` in one call of the target, verifies and commits.

    Where several widths are compiled, all three steps use the narrowest that covers every row's
    draft, since the time of each grows with the number of positions.

    Returns:
      The state after the commit; and the target's states and logits, each None unless `drafter`
      reads it, and 0 past the width that was used.
    """
    reads_states = drafter is not None and drafter.reads_states
    reads_logits = drafter is not None and drafter.reads_logits
    # Positions that a row has not drafted, and all those of a row that is done, need not be
    # computed.
    valid = ~state.done[:, None] & (jnp.arange(fed.shape[1]) <= draft.num_drafted[:, None])

    def verify_width(state: DecodeState, width: int):
        config, part, inside = state.config, draft.first(width - 1), valid[:, :width]
        states, cache = target.decode_states(
            fed[:, :width], state.lengths - 1, state.target_cache, valid=inside
        )
        narrow = state.replace(target_cache=cache, config=config._replace(gamma=width - 1))
        logits = adjusted = None
        if config.commits_argmax and not reads_logits:
            tokens, log_probs = find_most_probable(target, states, inside)
            verified = verifiers.verify_greedy(tokens, part.tokens, part.num_drafted)
            after = commit(narrow, part, verified, lambda new: log_probs, None)
        else:
            logits = target.head(states, inside)
            verified, adjusted = verify(narrow, part, logits)
            log_prob = distributions.log_prob_under(logits, target.skips_padding)
            after = commit(narrow, part, verified, log_prob, adjusted)
        after = after.replace(config=config, last_draft=draft.tokens)
        return after, (states if reads_states else None, logits if reads_logits else None)

    widths, needed = state.config.widths, jnp.max(draft.num_drafted) + 1
    if not widths:
        return verify_width(state, fed.shape[1])
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=0, axis=1)

    def run_width(carry: tuple, width: int):
        # A loop that runs once for the width that is needed and never for the others, because
        # `lax.switch` would copy the caches.
        def body(carry: tuple):
            state, outputs = verify_width(carry[1], width)
            return jnp.zeros((), bool), state, jax.tree.map(put, carry[2], outputs)

        return jax.lax.while_loop(lambda carry: carry[0] & (needed <= width), body, carry)

    shapes = jax.eval_shape(lambda state: verify_width(state, fed.shape[1])[1], state)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    carry = jnp.ones((), bool), state, empty
    for width in widths:
        carry = run_width(carry, width)
    return carry[1:]


def find_most_probable(network: Network, states: States, valid: Valid = None) -> TokenAndLogprob:
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
    if config.mode.reads_prefix and config.gamma:
        tokens = write(tokens, draft.tokens, lengths, draft.num_drafted)
    prefixes = make_prefixes(state, tokens)
    processed = distributions.process(logits, prefixes, state.sampling, config.mode)
    verifier, offsets = config.verifier, jnp.broadcast_to(jnp.arange(width), (len(lengths), width))
    assert isinstance(verifier, Verifier), "a program of chains"
    accept = randomness.uniforms(keys, lengths, offsets[:, :-1], randomness.ACCEPT)
    greedy: Verification | None = None
    drafted = draft.tokens, draft.num_drafted
    # Verified before temperature 0 makes the distribution one-hot.
    if config.mode.greedy or not verifier.takes_argmax:
        if verifier.verify_greedily is None:
            greedy = verifiers.verify_greedy(distributions.argmax(processed), *drafted)
        else:
            verified = verifier.verify_greedily(processed, *drafted, accept, state.settings)
            greedy = check_verification(verifier, verified, len(lengths))
        if config.strict_argmax:
            return greedy, None
    dist = distributions.standardize(logits, prefixes, state.sampling, config.mode)
    if config.mode.greedy:
        assert greedy is not None
        return greedy, dist
    # Bits for a residual and for a bonus draw have tags of their own; which of them are used
    # depends only on how many tokens are accepted.
    residual = randomness.random_bits(keys, lengths, offsets, randomness.RESIDUAL)
    bonus = randomness.random_bits(keys, lengths, offsets, randomness.BONUS)
    inside, noise = (offsets < draft.num_drafted[:, None])[..., None], None
    final = jnp.where(inside, residual, bonus)
    if verifier.coupled:
        noise = randomness.gumbel_noise(keys, lengths[:, None] + offsets, config.vocab_size)
    random = Randomness(accept, final, noise)
    verified = verifier.verify(dist, draft.dist, *drafted, random, state.settings)
    verified = check_verification(verifier, verified, len(lengths))
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
    is_eos &= offsets <= num_accepted[:, None]
    first_eos = jnp.min(jnp.where(is_eos, offsets, width), axis=1)
    num_new = jnp.where(active, jnp.minimum(num_accepted, first_eos) + 1, 0)

    log_probs = jnp.where(new < 0, jnp.nan, log_prob(new))
    adjusted_log_probs = state.adjusted_log_probs
    if adjusted is not None:
        values = adjusted.log_prob(new)
        adjusted_log_probs = write(adjusted_log_probs, values, state.lengths, num_new)
    lengths = state.lengths + num_new
    ended = (first_eos < width) | (verified.next_token < 0)
    done = state.done | ended & active | (lengths >= state.limits)

    places, policy_state = offsets[:-1], state.policy_state
    examined = places < jnp.minimum(num_accepted + 1, draft.num_drafted)[:, None]
    examined &= active[:, None] & (places <= first_eos[:, None])
    accepted = examined & (places < num_accepted[:, None])
    missing = ((0, 0), (0, state.counts.accepted_by_position.shape[1] - width + 1))
    added = dict(
        target_calls=active,
        draft_calls=jnp.where(active, draft.calls, 0),
        drafted=jnp.where(active, drafted, 0),
        accepted=jnp.sum(accepted.astype(jnp.int32), axis=1),
        examined_by_position=jnp.pad(examined, missing),
        accepted_by_position=jnp.pad(accepted, missing),
        undrafted=_find_undrafted(state, draft, num_accepted, first_eos),
    )
    counts = Counts(
        **{name: getattr(state.counts, name) + x.astype(jnp.int32) for name, x in added.items()}
    )
    if state.policy is not None:
        outcome = Outcome(draft.num_drafted, num_accepted, draft.seen, draft.node_outcomes)
        policy_state = update_policy(state.policy, policy_state, outcome)
    return state.replace(
        tokens=write(state.tokens, new, state.lengths, num_new),
        log_probs=write(state.log_probs, log_probs, state.lengths, num_new),
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


def write(
    buffer: Shaped[Array, "B S ..."],
    values: Shaped[Array, "B T ..."],
    starts: PerRow,
    counts: PerRow,
) -> Shaped[Array, "B S ..."]:
    """Returns `buffer` with the first `counts[b]` of `values` written from slot `starts[b]` on.

    This is a select over the whole buffer, because on a CPU XLA expands a scatter into a loop,
    which takes longer than S elements do.
    """
    offsets = jnp.arange(buffer.shape[1]) - starts[:, None]
    inside = (offsets >= 0) & (offsets < counts[:, None])
    shape = *offsets.shape, *[1] * (buffer.ndim - 2)
    places = jnp.clip(offsets, 0, values.shape[1] - 1).reshape(shape)
    spread = jnp.take_along_axis(values, places, axis=1).astype(buffer.dtype)
    return jnp.where(inside.reshape(shape), spread, buffer)
