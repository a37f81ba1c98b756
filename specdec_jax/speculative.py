"""One iteration of speculative decoding: draft → score → verify → commit.

Leviathan, Kalman, Matias 2023, algorithm 1. Before an iteration the target's cache lacks exactly the last committed
token; so the target is fed that token and the γ drafted ones, and gives the laws of γ + 1 positions in one call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax import draws, sampling, verification
from specdec_jax.gamma import Outcome, Policy, Seen
from specdec_jax.models.base import Network
from specdec_jax.processors import Context
from specdec_jax.sampling import Law, PointMass, SamplingMode, SamplingRows
from specdec_jax.sharding import pinned
from specdec_jax.verification import Draws, Settings, Verification


class Program(NamedTuple):
    """The static part of a decode: what is compiled.

    Attributes:
      gamma: G, the most tokens drafted in one iteration; 0 is plain decoding.
      mode: which sampling adjustments are on.
      vocab_size: V, width of the target's logits; a drafter's laws are brought to it.
      verifier: name of the verifier.
      widths: positions of the target calls that are compiled, ascending, the last one G + 1; () is G + 1 alone.
    """

    gamma: int
    mode: SamplingMode
    vocab_size: int
    verifier: str = "block"
    widths: tuple[int, ...] = ()

    @property
    def strict_argmax(self) -> bool:
        """Whether every token is the target's argmax: then no law over the vocabulary is ever built."""
        return self.mode.greedy and self.verifier != "lenient"

    @property
    def commits_argmax(self) -> bool:
        """Whether every token is the argmax of the target's own logits, so that of these only the greatest matters."""
        return self.strict_argmax and not self.mode.processes and self.verifier != verification.FORCED

    @property
    def asks_draft_law(self) -> bool:
        """Whether the verifier looks at the law that the draft was drawn from."""
        return not self.mode.greedy and self.verifier not in ("gumbel", "typical")


@flax.struct.dataclass
class Counts:
    """What happened, per row; `[B]` or `[B, G]` int32.

    Attributes:
      target_calls: target calls in which the row took part.
      draft_calls: drafter calls in which the row took part, catching up included.
      drafted: tokens drafted.
      accepted: drafted tokens that stood and were committed.
      examined_by_position: how often the i-th drafted token was examined: up to and with the first rejection, nothing
        after an EOS.
      accepted_by_position: how often it stood.
    """

    target_calls: jax.Array
    draft_calls: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    examined_by_position: jax.Array
    accepted_by_position: jax.Array

    @classmethod
    def zero(cls, batch: int, gamma: int) -> "Counts":
        one, many = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, gamma), jnp.int32)
        return cls(one, one, one, one, many, many)


@flax.struct.dataclass
class DecodeState:
    """What lives through the loop. B rows; S slots of tokens, G + 1 more than any row's limit.

    Attributes:
      tokens: `[B, S]` int32: start token and decoder prefix, or the prompt, then committed tokens; anything after a row's
        length.
      lengths: `[B]` int32 committed tokens, start token and prefix included.
      done: `[B]` bool.
      starts: `[B]` int32 start token and prefix, or prompt: how many of the tokens are not new.
      log_probs: `[B, S]` float32 under the target's own law (temperature 1, no filter), at the committed slots.
      adjusted_log_probs: the same under the law after processors and filters; None where it is 0 throughout (argmax).
      keys: `[B]` typed keys, one per request.
      sampling: sampling parameters.
      settings: of a lossy verifier, else None.
      limits: `[B]` int32, the length at which a row stops.
      eos_ids: `[B, E]` int32, ids that stop a row, padded with −1.
      gamma: `[B]` int32, tokens to draft per iteration, at most G.
      policy: drafts fewer now and then, by numbers of its own for each row; None drafts γ.
      policy_state: what it keeps.
      target_cache: the target's cache; its live part ends one slot before a row's last token.
      draft_state: the drafter's own state, None without a drafter.
      counts: statistics.
      last_draft: `[B, G]` int32 tokens drafted in the last iteration.
      last_drafted, last_accepted: `[B]` int32, how many were drafted and how many stood in the last iteration.
      last_seen: the laws of the last draft as the policy reads them; None if it reads none.
      draft_failed: `[B]` int32, the first slot for which the drafter's law was not one of numbers; 0: none yet.
      program: the static part.
    """

    tokens: jax.Array
    lengths: jax.Array
    done: jax.Array
    starts: jax.Array
    log_probs: jax.Array
    adjusted_log_probs: jax.Array | None
    keys: jax.Array
    sampling: SamplingRows
    settings: Settings | None
    limits: jax.Array
    eos_ids: jax.Array
    gamma: jax.Array
    policy: Policy | None
    policy_state: Any
    target_cache: Any
    draft_state: Any
    counts: Counts
    last_draft: jax.Array
    last_drafted: jax.Array
    last_accepted: jax.Array
    last_seen: Seen | None
    draft_failed: jax.Array
    program: Program = flax.struct.field(pytree_node=False)


class Draft(NamedTuple):
    """What a drafter proposes.

    Attributes:
      tokens: `[B, G]` int32; −1 where the law to draw from is not one of numbers (NaN): there the draft ends.
      num_drafted: `[B]` int32, how many of them count; at most the number asked for.
      law: the law over `[B, G, V]` that they were really drawn from, a `PointMass` if they were not drawn; None where
        `Program.asks_draft_law` is False.
      calls: `[B]` int32 calls of the drafter's model that the row took part in.
      seen: of the laws, where the policy of γ reads them.
      target_cache: the target's cache, if the drafter has written to it: to slots that the target's call overwrites.
    """

    tokens: jax.Array
    num_drafted: jax.Array
    law: Law | PointMass | None
    calls: jax.Array
    seen: Seen | None = None
    target_cache: Any = None

    def first(self, gamma: int) -> "Draft":
        """Returns the draft cut to its first `gamma` positions; no row may have drafted more."""
        tokens, law = self.tokens[:, :gamma], self.law
        if isinstance(law, PointMass):
            law = law._replace(tokens=law.tokens[:, :gamma])
        elif law is not None:
            law = Law(law.logits[:, :gamma], law.log_normalizer[:, :gamma])
        return self._replace(tokens=tokens, law=law)


class Scored(NamedTuple):
    """What the target made of the last committed token and the draft: what a drafter may learn from.

    Attributes:
      tokens: `[B, G + 1]` int32 tokens fed.
      states: `[B, G + 1, D]` the target's last states, which its head takes.
      logits: `[B, G + 1, V]` float32, before any processor.
      num_new: `[B]` int32 tokens committed; the tokens fed at the first `num_new` positions are in the output, what
        follows was refused. 0 for a row that is done.
    """

    tokens: jax.Array
    states: jax.Array
    logits: jax.Array
    num_new: jax.Array


class Drafter(Protocol):
    """Proposes tokens. A drafter is a pytree: parameters are leaves, everything else static.

    `init` and `draft` are traced. Rewinding is implicit: each call is told the committed lengths. A drafter that learns
    from the target's calls also has `observe(draft_state, state, scored: Scored) -> draft_state`, called with the state
    after the commit. One whose state holds a cache has `rewind(draft_state, lengths) -> draft_state` too: a cascade, whose
    parts may begin past the committed tokens, says with it which are committed. One whose drafts come from laws that a
    policy of γ can read (`Draft.seen`) says so by a static `tells_law = True`, one that may find less to draft than is
    wanted, or nothing, by `varies = True`. One with `reads_encoder = True` gets the target's encoder output `[I, L, D]` as
    `encoded` in `init`.
    """

    def init(self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int) -> Any:
        """State for `inputs [I, L]` and what the decoder begins with, `tokens [B, P]`, B/I rows for each input.

        That is the start token and the decoder prefix. For a decoder-only target it is the prompt, and L = 0.
        """

    def draft(self, draft_state: Any, state: DecodeState, num_wanted: jax.Array) -> tuple[Any, Draft]:
        """Drafts up to `num_wanted [B]` tokens after each row's committed ones."""


def prefill(
    target: Network, drafter: Drafter | None, program: Program, slots: int, inputs, input_lengths, tokens, prefix_lengths,
    keys, rows: SamplingRows, settings: Settings | None, limits, eos_ids, gamma, done, policy: Policy | None = None,
) -> DecodeState:  # fmt: skip
    """Runs both encoders once, feeds the decoder prefix and makes the state that the loop starts from.

    Args:
      slots: S.
      inputs: `[I, L]` with I a divisor of B: every input is encoded once for its B/I rows, which lie side by side; L = 0
        for a decoder-only target.
      input_lengths: `[I]`.
      tokens: `[B, P]` start token and decoder prefix, or the prompt, padded. prefix_lengths: `[B]`, at least 1.
      keys, rows, settings, limits, eos_ids, gamma, done, policy: as in `DecodeState`.
    """
    batch, prefix = tokens.shape
    shared = {}
    if getattr(drafter, "reads_encoder", False):
        shared = {"encoded": target.encode(inputs, input_lengths)}
    cache = filled(target, inputs, input_lengths, tokens, slots, **shared)
    draft_state = drafter and drafter.init(inputs, input_lengths, tokens, slots, **shared)
    zeros, no_log_probs = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, slots), jnp.float32)
    state = DecodeState(
        tokens=jnp.zeros((batch, slots), jnp.int32).at[:, :prefix].set(tokens),
        lengths=prefix_lengths, done=done, starts=prefix_lengths, log_probs=no_log_probs,
        adjusted_log_probs=None if program.strict_argmax else no_log_probs, keys=keys, sampling=rows, settings=settings,
        limits=limits, eos_ids=eos_ids, gamma=gamma, policy=policy, policy_state=policy and policy.init(),
        target_cache=cache, draft_state=draft_state,
        counts=Counts.zero(batch, program.gamma), last_draft=jnp.zeros((batch, program.gamma), jnp.int32),
        last_drafted=zeros, last_accepted=zeros, last_seen=empty_seen(policy, batch),
        draft_failed=zeros, program=program,
    )  # fmt: skip
    return pinned(state, target.rules)


def filled(network: Network, inputs, input_lengths, tokens: jax.Array, slots: int, **encoded):
    """The cache of `network` for B rows that have been fed all but the last of `tokens [B, P]`; args as for `prefill`.

    `encoded` is that of `Network.prefill`, if it is given at all.
    """
    copies = len(tokens) // len(inputs)
    if copies > 1 and not inputs.shape[1]:  # a prompt is read once, like an encoder's input, for all of its rows
        return filled(network, inputs, input_lengths, tokens[::copies], slots).repeated(copies)
    cache = network.prefill(inputs, input_lengths, slots, copies, **encoded)
    if tokens.shape[1] > 1:
        _, cache = network.decode(tokens[:, :-1], jnp.zeros(len(tokens), jnp.int32), cache)
    return cache


def empty_seen(policy: Policy | None, batch: int) -> Seen | None:
    """Room for what `policy` reads of a draft's laws; None if it reads none."""
    if policy is None or not policy.reads_law:
        return None
    return Seen(*[jnp.zeros((batch, policy.maximum), jnp.float32)] * 3)


def iterate(target: Network, drafter: Drafter | None, state: DecodeState) -> DecodeState:
    """One iteration for all rows; a row that is done changes in nothing that counts."""
    program, batch = state.program, state.tokens.shape[0]
    # Draft. At most limit − length − 1: the target adds one more, and so no row ever passes its limit.
    wanted = state.gamma if state.policy is None else jnp.minimum(state.gamma, state.policy.wanted(state.policy_state))
    num_wanted = jnp.where(state.done, 0, jnp.minimum(wanted, state.limits - state.lengths - 1))
    if program.gamma:
        draft_state, draft = drafter.draft(state.draft_state, state, num_wanted)
        draft, state = _up_to_failure(draft, state)
    else:
        draft_state, draft = None, _no_draft(batch, program)

    # Score the last committed token and the drafted ones in one call, verify, and commit.
    cache = state.target_cache if draft.target_cache is None else draft.target_cache
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    scored = jnp.concatenate([last, draft.tokens], axis=1)
    observe = getattr(drafter, "observe", None)
    after, found = _judged(target, state.replace(target_cache=cache, draft_state=None), draft, scored, bool(observe))
    after = after.replace(draft_state=draft_state)
    if observe is None:
        return pinned(after, target.rules)
    states, logits = found
    seen = Scored(scored, states, logits, after.lengths - state.lengths)
    return pinned(after.replace(draft_state=observe(draft_state, after, seen)), target.rules)


def _up_to_failure(draft: Draft, state: DecodeState) -> tuple[Draft, DecodeState]:
    """Ends drafts before the first token that came from no law of numbers, and notes where that was.

    Where it ends does not depend on what was drawn, so that the output law stays the target's.
    """
    first = jnp.min(jnp.where(draft.tokens < 0, jnp.arange(state.program.gamma), state.program.gamma), axis=1)
    failed = (first < draft.num_drafted) & (state.draft_failed == 0)
    state = state.replace(draft_failed=jnp.where(failed, state.lengths + first, state.draft_failed))
    num_drafted = jnp.minimum(draft.num_drafted, first)
    return draft._replace(tokens=jnp.maximum(draft.tokens, 0), num_drafted=num_drafted), state


def _judged(target: Network, state: DecodeState, draft: Draft, scored: jax.Array, watched: bool):
    """Returns the state after the target's call over `scored [B, G + 1]`, verification and commit, and what was seen.

    Where several widths are compiled, the narrowest that covers every row's draft is used for all of it: the call costs
    time by the position, and so do verification and log-probabilities. What was seen is `()`, or with `watched` the states
    `[B, G + 1, D]` and logits `[B, G + 1, V]`, 0 past that width.
    """

    # What a row has not drafted, and all of one that is done, need not be computed.
    live = ~state.done[:, None] & (jnp.arange(scored.shape[1]) <= draft.num_drafted[:, None])

    def judge(state: DecodeState, width: int):
        states, cache = target.decode_states(
            scored[:, :width], state.lengths - 1, state.target_cache, live=live[:, :width]
        )
        program, part = state.program, draft.first(width - 1)
        narrow = state.replace(target_cache=cache, program=program._replace(gamma=width - 1))
        if program.commits_argmax and not watched:
            tokens, log_probs = most_probable(target, states, live[:, :width])
            verified = verification.verify_greedy(tokens, part.tokens, part.num_drafted)
            logits, after = None, _commit(narrow, part, verified, lambda new: log_probs, None)
        else:
            logits = target.head(states, live[:, :width])
            verified, adjusted = verify(narrow, part, logits)
            after = _commit(narrow, part, verified, Law.of(logits).log_prob, adjusted)
        return after.replace(program=program, last_draft=draft.tokens), (states, logits) if watched else ()

    widths, needed = state.program.widths, jnp.max(draft.num_drafted) + 1
    if not widths:
        return judge(state, scored.shape[1])

    def once(width: int, carry):
        # A loop that runs once for the width that is needed, and never for the others: `lax.switch` copies the caches.
        def body(carry):
            _, state, seen = carry
            state, found = judge(state, width)
            put = lambda values, new: jax.lax.dynamic_update_slice_in_dim(values, new, 0, axis=1)
            return jnp.zeros((), bool), state, jax.tree.map(put, seen, found)

        return jax.lax.while_loop(lambda carry: carry[0] & (needed <= width), body, carry)

    shapes = jax.eval_shape(lambda state: judge(state, scored.shape[1])[1], state)
    carry = jnp.ones((), bool), state, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    for width in widths:
        carry = once(width, carry)
    return carry[1:]


def most_probable(network: Network, states: jax.Array, live=None) -> tuple[jax.Array, jax.Array]:
    """The argmax token after each of `states [B, T, D]` and its log-probability, both `[B, T]`; −1 and NaN where the logits are
    not numbers. `live [B, T]` as in `Network.decode`."""
    if network.skips:
        return network.peak(states, live)
    logits = network.head(states, live)
    tokens = sampling.argmax(logits)
    return tokens, Law.of(logits).log_prob(tokens)


def _no_draft(batch: int, program: Program) -> Draft:
    zeros = jnp.zeros(batch, jnp.int32)
    law = Law.of(jnp.zeros((batch, 0, program.vocab_size))) if program.asks_draft_law else None
    return Draft(jnp.zeros((batch, 0), jnp.int32), zeros, law, zeros)


def context(state: DecodeState, tokens: jax.Array | None = None, ahead: jax.Array | int = 0) -> Context:
    """The prefixes after `ahead` of the tokens that follow the committed ones in `tokens [B, S]`."""
    return Context(state.tokens if tokens is None else tokens, state.lengths + ahead, state.starts, state.eos_ids)


def verify(state: DecodeState, draft: Draft, logits: jax.Array) -> tuple[Verification, Law | None]:
    """The outcome, and the target's adjusted law over the scored positions (None where every token is its argmax)."""
    program, keys, lengths = state.program, state.keys, state.lengths
    tokens, width = state.tokens, program.gamma + 1
    if program.mode.reads_prefix:
        tokens = _write(tokens, draft.tokens, lengths, draft.num_drafted) if program.gamma else tokens
    prefixes = context(state, tokens)
    processed = sampling.process(logits, prefixes, state.sampling, program.mode)
    forced = program.verifier == verification.FORCED
    offsets = jnp.broadcast_to(jnp.arange(width), (len(lengths), width))
    if program.strict_argmax:
        tokens = sampling.argmax(processed)
        if not forced:
            return verification.verify_greedy(tokens, draft.tokens, draft.num_drafted), None
        accept = draws.uniforms(keys, lengths, offsets[:, :-1], draws.ACCEPT)
        return verification.verify_greedy_forced(tokens, draft.num_drafted, accept, state.settings.forced_alpha), None
    law = sampling.standardize(logits, prefixes, state.sampling, program.mode)
    greedy = None
    if program.verifier == "lenient":  # judged before temperature 0 makes the law one-hot
        greedy = verification.verify_greedy_leniently(
            processed, draft.tokens, draft.num_drafted, state.settings.lenience
        )
        if program.mode.greedy:
            return greedy, law
    accept = draws.uniforms(keys, lengths, offsets[:, :-1], draws.ACCEPT)
    # Residual and bonus draws have tags of their own; which of them is used depends on the outcome alone.
    residual = draws.words(keys, lengths, offsets, draws.RESIDUAL)
    bonus = draws.words(keys, lengths, offsets, draws.BONUS)
    final = jnp.where((offsets < draft.num_drafted[:, None])[..., None], residual, bonus)
    noise = None
    if program.verifier == "gumbel":
        noise = draws.gumbel_noise(keys, lengths[:, None] + offsets, program.vocab_size)
    judge = verification.verify_forced if forced else verification.VERIFIERS[program.verifier]
    verified = judge(law, draft.law, draft.tokens, draft.num_drafted, Draws(accept, final, noise), state.settings)
    if greedy is not None:
        argmax = state.sampling.temperature == 0
        verified = Verification(*(jnp.where(argmax, a, b) for a, b in zip(greedy, verified)))
    return verified, law


def _commit(
    state: DecodeState,
    draft: Draft,
    verified: Verification,
    log_prob: Callable[[jax.Array], jax.Array],
    adjusted: Law | None,
) -> DecodeState:
    """Writes the accepted tokens and the next one, stops rows that are complete, and counts.

    `log_prob` gives the log-probabilities of tokens `[B, G + 1]` under the target's own laws.

    A row is complete at an EOS, at its limit, or where its law is not one of numbers. Such a law leaves −1 as token,
    and NaN as its log-probability.
    """
    width = state.program.gamma + 1
    active, num_accepted = ~state.done, verified.num_accepted
    offsets = jnp.arange(width)
    # The new tokens of a row: the accepted ones, then the next one.
    new = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    new = jnp.where(offsets == num_accepted[:, None], verified.next_token[:, None], new)
    is_eos = jnp.any(new[:, :, None] == state.eos_ids[:, None, :], axis=-1)
    first_eos = jnp.min(jnp.where(is_eos & (offsets <= num_accepted[:, None]), offsets, width), axis=1)
    num_new = jnp.where(active, jnp.minimum(num_accepted, first_eos) + 1, 0)

    log_probs = jnp.where(new < 0, jnp.nan, log_prob(new))
    adjusted_log_probs = state.adjusted_log_probs
    if adjusted is not None:
        adjusted_log_probs = _write(adjusted_log_probs, adjusted.log_prob(new), state.lengths, num_new)
    lengths = state.lengths + num_new
    ended = (first_eos < width) | (verified.next_token < 0)
    done = state.done | ended & active | (lengths >= state.limits)

    examined = active[:, None] & (offsets[:-1] < jnp.minimum(num_accepted + 1, draft.num_drafted)[:, None])
    examined &= offsets[:-1] <= first_eos[:, None]
    stood = examined & (offsets[:-1] < num_accepted[:, None])
    counts, integer = state.counts, lambda mask: mask.astype(jnp.int32)
    by_position = lambda counted, mask: counted + jnp.pad(integer(mask), ((0, 0), (0, counted.shape[1] - width + 1)))
    counts = Counts(
        target_calls=counts.target_calls + integer(active),
        draft_calls=counts.draft_calls + jnp.where(active, draft.calls, 0),
        drafted=counts.drafted + jnp.where(active, draft.num_drafted, 0),
        accepted=counts.accepted + jnp.sum(integer(stood), axis=1),
        examined_by_position=by_position(counts.examined_by_position, examined),
        accepted_by_position=by_position(counts.accepted_by_position, stood),
    )
    policy_state, outcome = state.policy_state, Outcome(draft.num_drafted, num_accepted, draft.seen)
    if state.policy is not None:
        policy_state = state.policy.update(policy_state, outcome)
    return state.replace(
        tokens=_write(state.tokens, new, state.lengths, num_new),
        log_probs=_write(state.log_probs, log_probs, state.lengths, num_new),
        adjusted_log_probs=adjusted_log_probs, lengths=lengths, done=done, counts=counts,
        last_drafted=jnp.where(active, draft.num_drafted, 0), last_accepted=jnp.where(active, num_accepted, 0),
        last_seen=draft.seen, policy_state=policy_state,
    )  # fmt: skip


def _write(buffer: jax.Array, values: jax.Array, starts: jax.Array, counts: jax.Array) -> jax.Array:
    """`buffer [B, S]` with the first `counts [B]` of `values [B, T]` written from slot `starts [B]` on.

    A select over the whole buffer: XLA expands a scatter into a loop on a CPU, which costs more than S elements do.
    """
    offsets = jnp.arange(buffer.shape[1]) - starts[:, None]
    spread = jnp.take_along_axis(values, jnp.clip(offsets, 0, values.shape[1] - 1), axis=1)
    return jnp.where((offsets >= 0) & (offsets < counts[:, None]), spread.astype(buffer.dtype), buffer)
