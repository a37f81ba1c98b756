"""Decoding: `advance`, the one jitted loop, and `generate`, from strings to strings around it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import speculative
from specdec_jax.models.base import LanguageModel, padded_lengths
from specdec_jax.sampling import SamplingConfig
from specdec_jax.speculative import DecodeState, Drafter, Program

VERIFIERS = ("token",)
MAX_GAMMA = 64
_FOREVER = np.int32(2**31 - 1)
# Padded lengths: powers of two with one step between, so that few shapes compile and at most a third is padding.
_BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def bucket(length: int) -> int:
    """The padded length for `length`: one of a few up to 512, multiples of 256 after."""
    return next((size for size in _BUCKETS if length <= size), -(-length // 256) * 256)


@functools.partial(jax.jit, donate_argnames="state")
def advance(target, drafter, state: DecodeState, max_iterations) -> DecodeState:
    """Runs iterations until every row is done, at most `max_iterations`: the one decode loop of the package.

    Args:
      target: the target's `Network`.
      drafter: a `Drafter`, or None for plain decoding (γ = 0).
      state: from `prefill` or an earlier `advance`; its buffers are reused (donated).
      max_iterations: traced int; a few for streaming and progress bars.
    """

    def more(carry):
        iteration, state = carry
        return (iteration < max_iterations) & ~jnp.all(state.done)

    def body(carry):
        iteration, state = carry
        return iteration + 1, speculative.iterate(target, drafter, state)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


prefill = jax.jit(speculative.prefill, static_argnames=("program", "slots"))


class Stats(NamedTuple):
    """Statistics in total and `per_row`; see the fields of `speculative.Counts`.

    Attributes:
      target_calls, draft_calls, drafted, accepted: counts.
      accepted_by_position, examined_by_position: `[G]` arrays.
      acceptance_rate: accepted / examined, the paper's α (definition 3.1); None where nothing was examined.
      tokens_per_target_call: new tokens over target calls (equation 1 is its expectation); None without a call.
      per_row: the same for every row, or None.
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


class GenerationResult(NamedTuple):
    """What `generate` returns.

    Attributes:
      texts: one string per input, or None without a vocabulary.
      tokens: `[B, max_new_tokens]` int32 new tokens, EOS included, then 0.
      lengths: `[B]` int32, how many of them count.
      log_probs: `[B, max_new_tokens]` float32, log-probability of each token under the target's own law
        (temperature 1, no filter), then 0.
      stats: see `Stats`.
    """

    texts: list[str] | None
    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    stats: Stats


def generate(
    target: LanguageModel,
    inputs,
    *,
    drafter: Drafter | None = None,
    gamma: int | Sequence[int] = 4,
    sampling: SamplingConfig = SamplingConfig(),
    verifier: str = "token",
    max_new_tokens: int | Sequence[int] = 64,
    key=None,
    input_lengths=None,
    max_input_length: int = 512,
    decoder_prefix=None,
    eos_ids: Sequence[int] | None = None,
) -> GenerationResult:
    """Decodes a batch: speculatively with a `drafter`, plainly without one; the output law is the target's either way.

    Args:
      target: the model whose law is sampled.
      inputs: B strings, B lists of ids (with their EOS), or an integer array `[B, L]` with `input_lengths` (without
        them 0 is padding). An empty string gives an empty output.
      drafter: e.g. `ModelDrafter(model)`; must share the target's vocabulary.
      gamma: γ ≥ 0, tokens drafted per target call, one or one per input.
      sampling: argmax (the default), temperature, top-k, top-p.
      verifier: "token" (Leviathan et al. 2023, algorithm 1).
      max_new_tokens: limit for new tokens, EOS included; one, or one per input.
      key: one key (request i gets `fold_in(key, i)`) or B keys; `jax.random.key(0)` if None.
      input_lengths: `[B]`, with an array of inputs only.
      max_input_length: longer inputs are refused.
      decoder_prefix: like `inputs` (B of them), without start token or EOS: forced first decoder tokens. Not repeated
        in the result; an EOS in it does not stop.
      eos_ids: ids that stop a row; the model's own if None.

    Raises:
      ValueError: bad argument; says what was got and what was expected, before anything compiles.
    """
    state, request = prepare(
        target, inputs, drafter=drafter, gamma=gamma, sampling=sampling, verifier=verifier,
        max_new_tokens=max_new_tokens, key=key, input_lengths=input_lengths, max_input_length=max_input_length,
        decoder_prefix=decoder_prefix, eos_ids=eos_ids,
    )  # fmt: skip
    state = advance(target.network, request.drafter, state, _FOREVER)
    return finish(target, state, request)


@dataclasses.dataclass(frozen=True)
class Request:
    """What the host keeps of a batch while it decodes.

    Attributes:
      drafter: the drafter really used: None where γ = 0.
      prefix_lengths: `[B]` start token and decoder prefix.
      max_new_tokens: width of the result.
    """

    drafter: Drafter | None
    prefix_lengths: np.ndarray
    max_new_tokens: int


def prepare(
    target, inputs, *, drafter=None, gamma=4, sampling=SamplingConfig(), verifier="token", max_new_tokens=64, key=None,
    input_lengths=None, max_input_length=512, decoder_prefix=None, eos_ids=None,
) -> tuple[DecodeState, Request]:  # fmt: skip
    """Checks the arguments of `generate` and runs the prefill; for callers that drive `advance` themselves."""
    if not isinstance(inputs, str) and not hasattr(inputs, "shape"):
        inputs = list(inputs)  # read twice below
    tokens, lengths = _as_ids(target, inputs, input_lengths, eos=True)
    batch = len(lengths)
    if batch == 0:
        raise ValueError("inputs: got 0 inputs, expected at least 1")
    if max(lengths) > max_input_length:
        row = int(np.argmax(lengths))
        raise ValueError(
            f"input {row}: got {lengths[row]} tokens, expected at most max_input_length = {max_input_length}"
        )
    gammas = _per_row("gamma", gamma, batch, 0, MAX_GAMMA)
    gammas = gammas if drafter is not None else np.zeros_like(gammas)
    limits = _per_row("max_new_tokens", max_new_tokens, batch, 1, 2**20)
    if drafter is not None:
        check_pair(target, drafter)
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier: got {verifier!r}, expected one of {VERIFIERS}")
    stops = tuple(target.eos_ids if eos_ids is None else eos_ids)
    if any(not 0 <= token < target.config.vocab_size for token in stops):
        raise ValueError(f"eos_ids: got {stops}, expected ids from 0 to {target.config.vocab_size - 1}")
    rows, width = sampling.rows(batch), int(max(gammas))
    prefix, prefix_lengths = _decoder_tokens(target, decoder_prefix, batch)

    program = Program(width, sampling.mode, target.config.vocab_size, verifier)
    drafter = drafter if width else None
    state = prefill(
        target.network, drafter, program,
        # Room for a whole draft and its bonus token past any limit: a clamped slice would overwrite live slots.
        bucket(int(max(prefix_lengths + limits))) + width + 1,
        _pad(tokens, bucket(max(lengths))), lengths, prefix, prefix_lengths, _row_keys(key, batch), rows,
        prefix_lengths + limits, _stop_ids(stops, batch), gammas, _empty(inputs, lengths),
    )  # fmt: skip
    return state, Request(drafter, prefix_lengths, int(max(limits)))


def finish(target: LanguageModel, state: DecodeState, request: Request) -> GenerationResult:
    """Trims and detokenises what has been committed so far."""
    tokens, lengths, log_probs, counts = jax.device_get((state.tokens, state.lengths, state.log_probs, state.counts))
    width = request.max_new_tokens
    lengths = lengths - request.prefix_lengths
    columns = np.arange(width)
    # A row with a long prefix and a small limit of its own has fewer slots than the widest row.
    slots = np.minimum(request.prefix_lengths[:, None] + columns, tokens.shape[1] - 1)
    live = columns < lengths[:, None]
    new_tokens = np.where(live, np.take_along_axis(tokens, slots, axis=1), 0)
    log_probs = np.where(live, np.take_along_axis(log_probs, slots, axis=1), np.float32(0))
    texts = None
    if target.vocabulary is not None:
        texts = [target.vocabulary.decode(row[:length]) for row, length in zip(new_tokens, lengths)]
    return GenerationResult(texts, new_tokens, lengths, log_probs, _stats(counts, lengths))


def check_pair(target: LanguageModel, drafter) -> None:
    """Refuses a drafter whose vocabulary is not the target's (PITFALLS row 28)."""
    model = getattr(drafter, "model", None)
    if model is None:
        return
    ours, theirs = target.vocabulary, model.vocabulary
    if ours is not None and theirs is not None and ours is not theirs and ours.fingerprint() != theirs.fingerprint():
        raise ValueError(
            f"drafter: got a vocabulary of {theirs.size} pieces that differs from the target's "
            f"({ours.size} pieces), expected the same pieces with the same ids"
        )
    if model.start_token != target.start_token:
        raise ValueError(f"drafter: got start token {model.start_token}, expected the target's {target.start_token}")


class TraceStep(NamedTuple):
    """One iteration of one row: ids accepted, the id rejected (None after a full acceptance), the id the target added."""

    accepted: list[int]
    rejected: int | None
    corrected: int | None


def trace(target: LanguageModel, text: str, **options) -> list[TraceStep]:
    """The iterations of one input, as in the paper's Figure 1; options as for `generate`."""
    state, request = prepare(target, [text], **options)
    steps, length = [], int(request.prefix_lengths[0])
    while not bool(state.done[0]):
        state = advance(target.network, request.drafter, state, np.int32(1))
        new = [int(token) for token in np.asarray(state.tokens)[0, length : int(state.lengths[0])]]
        length += len(new)
        draft, drafted, stood = (np.asarray(x)[0] for x in (state.last_draft, state.last_drafted, state.last_accepted))
        accepted = new[:stood]
        steps.append(
            TraceStep(
                accepted, int(draft[stood]) if stood < drafted else None, new[stood] if len(new) > stood else None
            )
        )
    return steps


def warm_up(
    target: LanguageModel, *, drafter: Drafter | None = None, batch_sizes: Sequence[int] = (1,),
    max_input_length: int = 64, **options,
) -> int:  # fmt: skip
    """Compiles what `generate` needs for these batch sizes and every input length up to `max_input_length`.

    Afterwards calls with the same `gamma`, `max_new_tokens`, kind of sampling and number of EOS ids (up to 4) compile
    nothing. Options as for `generate`. Returns the number of shapes.
    """
    lengths = sorted({bucket(length) for length in range(1, max_input_length + 1)})
    for batch in batch_sizes:
        for length in lengths:
            inputs = np.full(
                (batch, min(length, max_input_length)), target.eos_ids[0] if target.eos_ids else 1, np.int32
            )
            state, request = prepare(
                target, inputs, input_lengths=np.full(batch, inputs.shape[1]), drafter=drafter,
                max_input_length=max_input_length, **options,
            )  # fmt: skip
            finish(target, advance(target.network, request.drafter, state, np.int32(1)), request)
    return len(lengths) * len(batch_sizes)


def _as_ids(target: LanguageModel, inputs, input_lengths, eos: bool) -> tuple[np.ndarray, np.ndarray]:
    """Padded ids `[B, L]` and lengths `[B]` of strings, lists of ids or an array."""
    if isinstance(inputs, str):
        raise ValueError(f"inputs: got the string {inputs!r}, expected a list of strings or of ids")
    if not hasattr(inputs, "shape"):
        inputs = list(inputs)
        if inputs and all(isinstance(text, str) for text in inputs):
            if target.vocabulary is None:
                raise ValueError("inputs: got strings for a model without a vocabulary, expected ids")
            end = list(target.vocabulary.eos_ids[:1]) if eos else []
            inputs = [target.vocabulary.encode(text) + end for text in inputs]
        if input_lengths is not None:
            raise ValueError("input_lengths: got them with a list of inputs, expected None (lists have lengths)")
        input_lengths = np.array([len(row) for row in inputs], np.int32)
        array = np.zeros((len(inputs), max(input_lengths, default=0)), np.int32)
        for row, ids in enumerate(inputs):
            array[row, : len(ids)] = ids
    else:
        array = np.asarray(inputs)
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"inputs: got an array of shape {array.shape} and type {array.dtype}, expected integers [B, L]"
            )
        input_lengths = padded_lengths(array) if input_lengths is None else np.asarray(input_lengths, np.int32)
        if input_lengths.shape != array.shape[:1] or np.any((input_lengths < 0) | (input_lengths > array.shape[1])):
            raise ValueError(
                f"input_lengths: got {input_lengths}, expected {len(array)} numbers from 0 to {array.shape[1]}"
            )
    inside = np.arange(array.shape[1]) < input_lengths[:, None]
    if np.any(inside & ((array < 0) | (array >= target.config.vocab_size))):
        raise ValueError(f"inputs: got ids outside the vocabulary, expected 0 to {target.config.vocab_size - 1}")
    return array.astype(np.int32), input_lengths


def _empty(inputs, lengths: np.ndarray) -> np.ndarray:
    """Rows with nothing to decode: empty strings, or no ids at all."""
    if hasattr(inputs, "shape"):
        return lengths == 0
    return np.array([not (row.strip() if isinstance(row, str) else len(row)) for row in inputs])


def _decoder_tokens(target: LanguageModel, decoder_prefix, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Start token and forced first tokens `[B, P]`, padded to a few lengths, and their numbers `[B]`."""
    if decoder_prefix is None:
        return np.full((batch, 1), target.start_token, np.int32), np.ones(batch, np.int32)
    tokens, lengths = _as_ids(target, decoder_prefix, None, eos=False)
    if len(lengths) != batch:
        raise ValueError(f"decoder_prefix: got {len(lengths)} prefixes, expected {batch} (one per input)")
    width = bucket(int(max(lengths, default=0))) if max(lengths) else 0
    tokens = np.concatenate([np.full((batch, 1), target.start_token, np.int32), _pad(tokens, width)], axis=1)
    return tokens, lengths + 1


def _pad(tokens: np.ndarray, width: int) -> np.ndarray:
    return np.pad(tokens[:, :width], ((0, 0), (0, max(0, width - tokens.shape[1]))))


def _per_row(name: str, value, batch: int, least: int, most: int) -> np.ndarray:
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.integer) or np.any((array < least) | (array > most)):
        raise ValueError(f"{name}: got {value}, expected an integer from {least} to {most}")
    if array.ndim and array.shape != (batch,):
        raise ValueError(f"{name}: got {array.size} values, expected one or {batch} (one per input)")
    return np.broadcast_to(array.astype(np.int32), (batch,))


def _stop_ids(eos_ids: Sequence[int], batch: int) -> np.ndarray:
    """`[B, E]` with E a multiple of 4, padded with −1, so that another number of EOS ids rarely compiles anew."""
    width = max(4, -(-len(eos_ids) // 4) * 4)
    return np.broadcast_to(np.array([*eos_ids, *[-1] * (width - len(eos_ids))], np.int32), (batch, width))


@jax.jit
def _fold(key, rows):
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def _row_keys(key, batch: int) -> jax.Array:
    key = jax.random.key(0) if key is None else key
    if not isinstance(key, jax.Array):
        raise ValueError(f"key: got {key!r}, expected jax.random.key(seed), or one such key per input")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return _fold(key, np.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"key: got {key.shape[0]} keys, expected one or {batch} (one per input)")
    return key


def _stats(counts: speculative.Counts, new_tokens: np.ndarray) -> Stats:
    def one(counts, new_tokens, per_row=None):
        examined, calls = int(counts.examined_by_position.sum()), int(counts.target_calls)
        return Stats(
            calls, int(counts.draft_calls), int(counts.drafted), int(counts.accepted),
            counts.accepted_by_position, counts.examined_by_position,
            int(counts.accepted) / examined if examined else None, int(new_tokens) / calls if calls else None, per_row,
        )  # fmt: skip

    rows = range(len(new_tokens))
    per_row = tuple(one(jax.tree.map(lambda leaf: leaf[row], counts), new_tokens[row]) for row in rows)
    return one(jax.tree.map(lambda leaf: leaf.sum(axis=0), counts), new_tokens.sum(), per_row)
