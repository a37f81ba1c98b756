"""Decoding: `advance`, the one jitted loop, and `generate`, from strings to strings around it."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import costs, speculative
from specdec_jax.compatibility import UnsupportedCombination
from specdec_jax.draws import seeded
from specdec_jax.gamma import Policy
from specdec_jax.models.base import LanguageModel
from specdec_jax.request import Plan, Request, bucket, plan, prepare
from specdec_jax.sampling import SamplingConfig
from specdec_jax.sharding import pinned
from specdec_jax.speculative import DecodeState, Drafter
from specdec_jax.stopping import cut, shown

FOREVER = np.int32(2**31 - 1)
# Iterations between two looks for stop strings.
STOP_EVERY = 8


@functools.partial(jax.jit, donate_argnames="state")
def advance(target, drafter, state: DecodeState, max_iterations, max_done=None) -> DecodeState:
    """Runs iterations until every row is done, at most `max_iterations`: the one decode loop of the package.

    Args:
      target: the target's `Network`: `Request.network`.
      drafter: a `Drafter`, or None for plain decoding (γ = 0): `Request.drafter`.
      state: from `prepare` or an earlier `advance`; its buffers are reused (donated).
      max_iterations: traced, a few for streaming and progress bars; `np.int32`, since a Python int compiles anew.
      max_done: traced, ends it as soon as so many rows are done, so that they can be filled again; None: all.
    """
    return _loop(target, drafter, state, max_iterations, len(state.done) if max_done is None else max_done)


def _loop(target, drafter, state: DecodeState, max_iterations, max_done) -> DecodeState:
    def more(carry):
        iteration, state = carry
        return (iteration < max_iterations) & (jnp.sum(state.done.astype(jnp.int32)) < max_done)

    def body(carry):
        iteration, state = carry
        return iteration + 1, speculative.iterate(target, drafter, state)

    return pinned(jax.lax.while_loop(more, body, (jnp.int32(0), state))[1], target.rules)


@functools.partial(jax.jit, static_argnames=("program", "slots"))
def _decode(target, drafter, program, slots, max_iterations, *arguments) -> dict[str, jax.Array]:
    """Prefill and loop in one program: what the host reads of their result; args as for `speculative.prefill`."""
    state = speculative.prefill(target, drafter, program, slots, *arguments)
    return Committed.fields(_loop(target, drafter, state, max_iterations, len(state.done)))


class Stats(NamedTuple):
    """Statistics in total and `per_row`; see the fields of `speculative.Counts`.

    Attributes:
      target_calls, draft_calls, drafted, accepted: counts.
      accepted_by_position, examined_by_position: `[G]` arrays.
      acceptance_rate: accepted / examined, the paper's α (definition 3.1); None where nothing was examined, and for block
        verification at T > 0, which judges a draft as a whole and has no such rate: the next two numbers are always
        known.
      tokens_per_target_call: new tokens over target calls (equation 1 is its expectation); None without a call.
      per_row: the same for every row, or None.
      accepted_per_target_call: drafted tokens that stood over target calls; None without a call. Divide
        `accepted_by_position` by `target_calls` for how often each position of a draft stood.
    """

    target_calls: int
    draft_calls: int
    drafted: int
    accepted: int
    accepted_by_position: np.ndarray
    examined_by_position: np.ndarray
    acceptance_rate: float | None
    tokens_per_target_call: float | None
    per_row: tuple["Stats", ...] | None = None
    accepted_per_target_call: float | None = None


class NotNumbers(ValueError):
    """Logits that are not numbers, which no output can be drawn from.

    Attributes:
      source: whose they are. input: number of the input. token: number of the new token, from 0.
    """

    def __init__(self, source: str, input: int, token: int):
        self.source, self.input, self.token = source, input, token
        super().__init__(
            f"input {input}: got logits from {source} that are not finite numbers, at new token {token}, expected "
            "numbers: are its weights damaged?"
        )

    def at(self, input: int) -> "NotNumbers":
        """Returns the same error with the number that the input has elsewhere."""
        return NotNumbers(self.source, input, self.token)


class GenerationResult(NamedTuple):
    """What `generate` returns.

    Attributes:
      texts: one string per input, or None without a vocabulary.
      tokens: `[B, max_new_tokens]` int32 new tokens, EOS included, then 0.
      lengths: `[B]` int32, how many of them count.
      log_probs: `[B, max_new_tokens]` float32, log-probability of each token under the target's own law
        (temperature 1, no filter), then 0.
      stats: see `Stats`; of all that was committed, also of what a stop string has cut off.
      adjusted_log_probs: `[B, max_new_tokens]` float32, the same under the law that was sampled (processors, temperature
        and filters applied), then 0; −inf where a lossy verifier let pass what that law excludes.
      finish_reasons: for each row "eos", "length" (`max_new_tokens`), "stop" (a stop string), "deadline", or "empty"
        (nothing to decode).
    """

    texts: list[str] | None
    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    stats: Stats
    adjusted_log_probs: np.ndarray
    finish_reasons: list[str]


def generate(
    target: LanguageModel,
    inputs,
    *,
    drafter: Drafter | None = None,
    gamma: str | int | Sequence[int] | Policy = "auto",
    sampling: SamplingConfig = SamplingConfig(),
    verifier: str = "block",
    lenience: float | Sequence[float] | None = None,
    typical_epsilon: float | Sequence[float] | None = None,
    typical_delta: float | Sequence[float] | None = None,
    forced_alpha: float | Sequence[float] | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    key=None,
    num_samples: int = 1,
    input_lengths=None,
    max_input_length: int = 512,
    decoder_prefix=None,
    eos_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    deadline: float | None = None,
) -> GenerationResult:
    """Decodes a batch: speculatively with a `drafter`, plainly without one.

    The output law is the target's either way, but for the verifiers "lenient" and "typical", which say how far it is off.

    Args:
      target: the model whose law is sampled.
      inputs: B strings, B lists of ids (with their EOS), or an integer array `[B, L]` with `input_lengths` (without
        them 0 is padding). An empty string gives an empty output. For a decoder-only target they are prompts, which get no
        EOS and in which 0 is an id like others; an empty one stands for the start token. None is an input with nothing to
        decode.
      drafter: e.g. `ModelDrafter(model)`; must share the target's vocabulary.
      gamma: "auto": what iterations cost on this machine is measured at the first call of a kind (`costs.py`), and each row
        drafts as many tokens, up to 8, as its own acceptance makes worth it; none, and no drafter runs, where that never
        pays; on a mesh 4. With argmax a row begins with what the drafts of earlier calls came to; above temperature 0 the
        tokens that are drawn (not their law) depend on what was measured, so fix γ for draws that another machine is to
        repeat. Or γ ≥ 0, tokens drafted per target call, one or one per input; or a policy that adapts it
        (`gamma.py`), e.g. `Heuristic(maximum=8)`.
      sampling: argmax (the default), temperature, filters, and processors such as a repetition penalty.
      verifier: "token" (Leviathan et al. 2023, algorithm 1), "block" (accepts more on average), "gumbel" (the output is
        that of plain decoding with "gumbel" and the same key), "rejection" (section A.2, for comparison); lossy:
        "lenient" and "typical". Each is explained in `verification.py`. "forced" verifies nothing, its outputs mean nothing.
      lenience: l in (0, 1], for "lenient", which needs it; one, or one per input.
      typical_epsilon, typical_delta: ε = 0.09 and δ = 0.3, for "typical".
      forced_alpha: α in (0, 1], for "forced", which accepts by coin: for timing with weights that mean nothing.
      max_new_tokens: limit for new tokens, EOS included; one, or one per input.
      key: one key (request i gets `fold_in(key, i)`) or B keys; that of seed 0 if None. Keys of other kinds than
        threefry (rbg, as T5X uses them) are made into threefry keys first.
      num_samples: N ≥ 1 outputs for every input, side by side in N·B rows; the encoder runs once for each input, a prompt
        is read once.
      input_lengths: `[B]`, with an array of inputs only.
      max_input_length: longer inputs are refused.
      decoder_prefix: like `inputs` (B of them), without start token or EOS: forced first decoder tokens. Not repeated
        in the result; an EOS in it does not stop. None for a decoder-only target.
      eos_ids: ids that stop a row; the model's own if None.
      stop: strings that stop a row; neither they nor a token that reaches into one are part of the result.
      deadline: seconds, from the call on, after which the rows are returned as they are; looked at between iterations
        (what has yet to compile takes its time from it, see `warm_up`).

    Raises:
      UnsupportedCombination: options that make no sense together (a ValueError).
      NotNumbers: NaN or infinite logits, of damaged weights or a processor (a ValueError, found after decoding).
      ValueError: bad argument; says what was got and what was expected, before anything compiles.
    """
    begun = time.monotonic()
    job = plan(
        target, inputs, drafter=drafter, gamma=gamma, sampling=sampling, verifier=verifier, lenience=lenience,
        typical_epsilon=typical_epsilon, typical_delta=typical_delta, forced_alpha=forced_alpha,
        max_new_tokens=max_new_tokens, key=key, num_samples=num_samples, input_lengths=input_lengths,
        max_input_length=max_input_length, decoder_prefix=decoder_prefix, eos_ids=eos_ids, stop=stop, deadline=deadline,
    )  # fmt: skip
    return complete(target, job, None, begun)


def complete(target, job: Plan, places, begun: float) -> GenerationResult:
    """Decodes the inputs at `places`, as for `Plan.start`, to their end.

    Args:
      begun: when the deadline began to count (`time.monotonic()`).
    """
    if not job.stop and not job.deadline:
        return finish(target, _decoded(job, places), job.request(places))
    state, request = job.start(places)
    for state in _advance_by(target, state, request, np.int32(1 if job.deadline else STOP_EVERY), begun):
        pass
    return finish(target, state, request)


def _decoded(job: Plan, places=None, max_iterations=FOREVER) -> "Committed":
    """What the inputs at `places` have committed after so many iterations, in one call of the device."""
    network, drafter, program, slots, *arguments = job.arguments(places)
    found = _decode(network, drafter, program, slots, max_iterations, *arguments)
    return Committed(**jax.device_get(found), program=program)


def _advance_by(target, state: DecodeState, request: Request, every, begun: float) -> Iterator[DecodeState]:
    """The state after every `every` iterations, until all rows are done, have met a stop string, or time is up."""
    while True:
        state = advance(request.network, request.drafter, state, every)
        if request.stop:
            state = mark_stopped(target, state, request.prefix_lengths, request.stop)
        yield state
        if every == FOREVER or np.all(jax.device_get(state.done)):
            return
        if request.deadline and time.monotonic() - begun > request.deadline:
            return


def mark_stopped(target, state: DecodeState, starts, stop: Sequence[str]) -> DecodeState:
    """`state` whose rows are done that have met a stop string; `starts [B]`: start token and prefix of each."""
    lengths, done, tokens = jax.device_get((state.lengths, state.done, state.tokens))
    met = [
        cut(target.vocabulary, tokens[row, start : lengths[row]].tolist(), stop) is not None
        for row, start in enumerate(starts)
    ]
    done, rules = done | met, target.network.rules
    # Unlike jnp.asarray, device_put compiles nothing.
    done = jax.device_put(done, may_alias=False) if rules is None else rules.put(done)
    return dataclasses.replace(state, done=done)


class Piece(NamedTuple):
    """What `stream` yields.

    Attributes:
      row: which row it belongs to.
      text: new text, whole characters; the pieces of a row joined are its text.
      tokens: the new ids; those of a row joined are its ids.
      finish_reason: as in `GenerationResult`, with a row's last piece; None before.
    """

    row: int
    text: str
    tokens: list[int]
    finish_reason: str | None


def stream(target: LanguageModel, inputs, *, every: int = 1, **options) -> Iterator[Piece]:
    """Decodes a batch and yields the text of its rows as it is committed.

    What may yet turn out to be a part of a character, or of a stop string, is held back. The pieces of a row make up what
    `generate` returns for it.

    Args:
      every: iterations between two looks; more make fewer, longer pieces and less work for the host.
      options: as for `generate`.
    """
    begun = time.monotonic()
    if target.vocabulary is None:
        raise ValueError("stream: got a model without a vocabulary, expected one, since text is what it yields")
    if not isinstance(every, int | np.integer) or not 1 <= every <= FOREVER:
        raise ValueError(f"every: got {every!r}, expected an integer of at least 1")
    state, request = prepare(target, inputs, **options)
    return _pieces(target, state, request, every, begun)


def _pieces(target, state: DecodeState, request: Request, every: int, begun: float) -> Iterator[Piece]:
    vocabulary, sent, closed = target.vocabulary, [0] * len(request.prefix_lengths), set()
    for state in _advance_by(target, state, request, np.int32(every), begun):
        tokens, lengths, done = jax.device_get((state.tokens, state.lengths, state.done))
        for row, start in enumerate(request.prefix_lengths):
            if done[row]:
                continue
            ids = tokens[row, start : lengths[row]].tolist()
            count = shown(vocabulary, ids, request.stop)
            text = _after(vocabulary, ids[:count], sent[row])
            if text:
                yield Piece(row, text, ids[sent[row] : count], None)
                sent[row] = count
        newly = [row for row in np.flatnonzero(done) if row not in closed]
        closed.update(newly)
        if newly:
            yield from _last_pieces(target, state, request, newly, sent)
    rest = [row for row in range(len(sent)) if row not in closed]
    yield from _last_pieces(target, state, request, rest, sent)


def _last_pieces(target, state: DecodeState, request: Request, rows, sent) -> Iterator[Piece]:
    result = finish(target, state, request) if len(rows) else None
    for row in map(int, rows):
        ids = result.tokens[row, : result.lengths[row]].tolist()
        yield Piece(row, _after(target.vocabulary, ids, sent[row]), ids[sent[row] :], result.finish_reasons[row])


def _after(vocabulary, ids: list[int], count: int) -> str:
    """The text of `ids` past that of the first `count`."""
    return vocabulary.decode(ids)[len(vocabulary.decode(ids[:count])) :]


class Committed(NamedTuple):
    """What rows have committed, on the host: the fields of `DecodeState` of the same names."""

    tokens: np.ndarray
    lengths: np.ndarray
    done: np.ndarray
    log_probs: np.ndarray
    adjusted_log_probs: np.ndarray | None
    draft_failed: np.ndarray
    counts: speculative.Counts
    program: speculative.Program

    @classmethod
    def fields(cls, state: DecodeState) -> dict:
        """The parts of a state that are read, by name, on the device; traced or not."""
        return {name: getattr(state, name) for name in cls._fields if name != "program"}

    @classmethod
    def of(cls, state: DecodeState, rows=None) -> "Committed":
        """That of all rows, or a copy of that of the given ones."""
        values = jax.device_get(cls.fields(state))
        if rows is not None:
            values = jax.tree.map(lambda leaf: leaf[rows], values)
        return cls(**values, program=state.program)


def finish(target: LanguageModel, state: DecodeState | Committed, request: Request) -> GenerationResult:
    """Trims and detokenises what has been committed so far.

    Raises:
      NotNumbers: logits were met that are not.
    """
    if isinstance(state, DecodeState):
        state = Committed.of(state)
    _check_numbers(target, state, request)
    tokens, ends, done, log_probs, adjusted, _, counts, program = state
    columns, starts = np.arange(max(request.limits)), request.prefix_lengths
    committed = ends - starts
    # A row with a long prefix and a small limit of its own has fewer slots than the widest row.
    slots = np.minimum(starts[:, None] + columns, tokens.shape[1] - 1)
    tokens = np.take_along_axis(tokens, slots, axis=1)
    reasons = _finish_reasons(tokens, committed, done, request)
    lengths, texts = committed.copy(), None
    for row in range(len(lengths)) if request.stop else ():
        kept = cut(target.vocabulary, tokens[row, : committed[row]].tolist(), request.stop)
        if kept is not None:
            lengths[row], reasons[row] = kept, "stop"
    live = columns < lengths[:, None]
    only_live = lambda values: np.where(live, values, values.dtype.type(0))
    tokens, log_probs = only_live(tokens), only_live(np.take_along_axis(log_probs, slots, axis=1))
    # Under a one-hot law every token that was chosen has log-probability 0.
    adjusted = np.zeros_like(log_probs) if adjusted is None else only_live(np.take_along_axis(adjusted, slots, axis=1))
    if target.vocabulary is not None:
        texts = [target.vocabulary.decode(row[:length]) for row, length in zip(tokens, lengths)]
    if request.learns:
        costs.learn(request.learns, int(counts.examined_by_position.sum()), int(counts.accepted_by_position.sum()))
    stats = _stats(counts, committed, token_by_token=program.verifier != "block" or program.mode.greedy)
    return GenerationResult(texts, tokens, lengths, log_probs, stats, adjusted, reasons)


def _check_numbers(target: LanguageModel, state: Committed, request: Request) -> None:
    slots = np.arange(state.tokens.shape[1])
    committed = (slots >= request.prefix_lengths[:, None]) & (slots < state.lengths[:, None])
    for row, slot in np.argwhere(committed & ~np.isfinite(state.log_probs))[:1]:
        source = f"the target {target.name}" + (" or the processor" if state.program.mode.processor else "")
        raise NotNumbers(source, int(request.inputs[row]), int(slot - request.prefix_lengths[row]))
    for (row,) in np.argwhere(state.draft_failed)[:1]:
        token = int(state.draft_failed[row] - request.prefix_lengths[row])
        name = getattr(request.drafter, "name", type(request.drafter).__name__)
        raise NotNumbers(f"the drafter {name}", int(request.inputs[row]), token)


def _finish_reasons(tokens: np.ndarray, lengths: np.ndarray, done: np.ndarray, request: Request) -> list[str]:
    def reason(row: int) -> str:
        if request.empty[row]:
            return "empty"
        if lengths[row] and tokens[row, lengths[row] - 1] in request.eos_ids:
            return "eos"
        return "length" if lengths[row] >= request.limits[row] else "deadline"

    return [reason(row) for row in range(len(done))]


class TraceStep(NamedTuple):
    """One iteration of one row: ids accepted, the id rejected (None after a full acceptance), the id the target added.

    Also `gamma`, how many were drafted, and `entropies`, of the law that each was drawn from, in nats; None unless the
    policy of γ reads them (see `gamma.Seen`).
    """

    accepted: list[int]
    rejected: int | None
    corrected: int | None
    gamma: int
    entropies: list[float] | None


def trace(target: LanguageModel, text: str, **options) -> list[TraceStep]:
    """The iterations of one input, as in the paper's Figure 1; options as for `generate`, but for what ends it early."""
    for name, unset in (("num_samples", 1), ("stop", ()), ("deadline", None)):
        if options.get(name, unset) != unset:
            raise UnsupportedCombination(f"{name}: got {options[name]!r} for a trace, expected {unset!r}")
    state, request = prepare(target, [text], **options)
    steps, length = [], int(request.prefix_lengths[0])
    while not bool(state.done[0]):
        state = advance(request.network, request.drafter, state, np.int32(1))
        new = [int(token) for token in np.asarray(state.tokens)[0, length : int(state.lengths[0])]]
        length += len(new)
        draft, drafted, stood = (np.asarray(x)[0] for x in (state.last_draft, state.last_drafted, state.last_accepted))
        rejected, corrected = int(draft[stood]) if stood < drafted else None, new[stood] if len(new) > stood else None
        entropies = state.last_seen and np.asarray(state.last_seen.entropy)[0, :drafted].tolist()
        steps.append(TraceStep(new[:stood], rejected, corrected, int(drafted), entropies))
    finish(target, state, request)  # which refuses what is not made of numbers
    return steps


def warm_up(
    target: LanguageModel, *, drafter: Drafter | None = None, batch_sizes: Sequence[int] = (1,),
    max_input_length: int = 64, **options,
) -> int:  # fmt: skip
    """Compiles what `generate` needs for these batch sizes and every input length up to `max_input_length`.

    Afterwards calls with the same `gamma`, `max_new_tokens`, kind of sampling and number of EOS ids (up to 4) compile
    nothing. Options as for `generate`; give stop strings or a deadline if the calls have any, and for `stream`, since these
    are other programs. Returns the number of shapes.
    """
    lengths = sorted({bucket(length) for length in range(1, max_input_length + 1)})
    options = {"key": seeded(0), **options}
    for batch in batch_sizes:
        for length in lengths:
            inputs = np.full(
                (batch, min(length, max_input_length)), target.eos_ids[0] if target.eos_ids else 1, np.int32
            )
            job = plan(
                target, inputs, input_lengths=np.full(batch, inputs.shape[1]), drafter=drafter,
                max_input_length=max_input_length, first=True, **options,
            )  # fmt: skip
            _run_once(target, job)
            if job.costs_key and job.program.gamma:  # later calls may decode plainly
                _run_once(target, job.plainly())
    return len(lengths) * len(batch_sizes)


def _run_once(target: LanguageModel, job: Plan) -> None:
    """Compiles and runs one iteration of what a plan runs."""
    # Nothing is to be learned from such inputs.
    request = dataclasses.replace(job.request(), learns=None)
    if job.stop or job.deadline:
        state, _ = job.start()
        finish(target, advance(request.network, request.drafter, state, np.int32(1)), request)
    else:
        finish(target, _decoded(job, max_iterations=np.int32(1)), request)


def _stats(counts: speculative.Counts, new_tokens: np.ndarray, token_by_token: bool) -> Stats:
    def one(counts, new_tokens, per_row=None):
        examined, calls = int(counts.examined_by_position.sum()), int(counts.target_calls)
        per_call = lambda number: int(number) / calls if calls else None
        return Stats(
            calls, int(counts.draft_calls), int(counts.drafted), int(counts.accepted),
            counts.accepted_by_position, counts.examined_by_position,
            int(counts.accepted) / examined if examined and token_by_token else None, per_call(new_tokens), per_row,
            per_call(counts.accepted),
        )  # fmt: skip

    rows = range(len(new_tokens))
    per_row = tuple(one(jax.tree.map(lambda leaf: leaf[row], counts), new_tokens[row]) for row in rows)
    return one(jax.tree.map(lambda leaf: leaf.sum(axis=0), counts), new_tokens.sum(), per_row)
