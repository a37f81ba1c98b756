"""Trims and detokenises what the loop committed, and counts what happened."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.request import Request
from specdec_jax.decoding.stop import find_stop, strip_end
from specdec_jax.files.reading import quote_value
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.beam_search import BeamConfig
from specdec_jax.speculative.state import Counts, DecodeState
from specdec_jax.speculative.strategy import Committed

Arrays = TypeVar("Arrays")
_SHOWN = 10  # the most rows of a result that are printed


class Stats(NamedTuple):
    """Statistics in total, and of every row in `per_row`.

    Attributes:
      target_calls, draft_calls: calls of the target and of the drafter, summed over rows not yet
        done.
      drafted, accepted: numbers of drafted and of accepted tokens.
      accepted_by_position, examined_by_position: `[G]`, accepted and examined tokens at each
        position of a draft. Divide the first by `target_calls` for how often each position is
        accepted.
      acceptance_rate: accepted / examined, the paper's α (definition 3.1) where something was
        drafted. None if nothing was examined, and for block verification at T > 0, which verifies a
        draft as a whole and has no such rate; the two numbers per target call are known there too.
      tokens_per_target_call: new tokens / target calls (equation 1 is its expectation); None
        without a call.
      per_row: the same for every row (for a beam search, every input), or None.
      accepted_per_target_call: accepted tokens / target calls; None without a call.
      undrafted: how often the next token was wanted and not drafted, by a drafter that drafts now
        and then; 0 for trees and beams.
      acceptance_rate_per_position: accepted / (examined + undrafted), the paper's α over the
        positions of the output: one that was not drafted counts as not accepted. None where
        `acceptance_rate` is.
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
    undrafted: int = 0
    acceptance_rate_per_position: float | None = None

    def __repr__(self) -> str:
        plain = {
            name: getattr(value, "tolist", lambda value=value: value)()
            for name, value in self._asdict().items()
        }
        plain["per_row"] = self.per_row if self.per_row is None else f"<{len(self.per_row)} rows>"
        return f"Stats({', '.join(f'{name}={value}' for name, value in plain.items())})"


class NonFiniteLogitsError(ValueError):
    """NaN or infinite logits, from which no output can be drawn.

    Attributes:
      source: whose logits they are.
      input: number of the input, from 0.
      token: number of the new token, from 0.
      by_drafter: whether they are a drafter's. The row then has an output, which is the target's.
      reason: the message without the input's number.
    """

    def __init__(self, source: str, input: int, token: int, by_drafter: bool = False):
        self.source, self.input, self.token, self.by_drafter = source, input, token, by_drafter
        what = "not finite numbers" + ", or an id that the target lacks" * by_drafter
        self.reason = (
            f"got logits from {source} that are {what}, at new token {token}, expected numbers: are"
            " its weights damaged?"
        )
        super().__init__(f"input {input}: {self.reason}")

    def __reduce__(self) -> tuple:
        return type(self), (self.source, self.input, self.token, self.by_drafter)

    def at(self, input: int) -> "NonFiniteLogitsError":
        """Returns the same error with another number of the input, for a part of more inputs."""
        return NonFiniteLogitsError(self.source, input, self.token, self.by_drafter)


class GenerationResult(NamedTuple):
    """What `generate` returns.

    Attributes:
      texts: one string per row, None for a row without output; or None without a vocabulary.
      tokens: `[B, max_new_tokens]` int32 new tokens, EOS included, then 0.
      lengths: `[B]` int32, how many of them count.
      log_probs: `[B, max_new_tokens]` float32, log-probability of each token under the target's own
        distribution (temperature 1, no filter), then 0.
      stats: statistics of all that was committed, including what a stop string has cut off.
      adjusted_log_probs: `[B, max_new_tokens]` float32, the same under the distribution that was
        sampled (processors, temperature and filters applied), then 0; −inf for a token that this
        distribution excludes and a lossy verifier accepted.
      finish_reasons: for each row "eos", "length" (`max_new_tokens`), "stop" (a stop string),
        "deadline", "unfinished" (of `finish` before the end), or "empty" (nothing to decode); of a
        beam search also "none" (fewer hypotheses have finished); "error" (no output: see `errors`).
      scores: of a beam search `[B]` float32, by which its hypotheses are ordered; else None.
      errors: for each row what was wrong with its logits, or None. Not None only if
        `non_finite="report"`.
    """

    texts: list[str | None] | None
    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    stats: Stats
    adjusted_log_probs: np.ndarray
    finish_reasons: list[str]
    scores: np.ndarray | None = None
    errors: Sequence[NonFiniteLogitsError | None] = ()

    def checked(self, reports: bool = False) -> "GenerationResult":
        """Returns the result itself.

        Unless it `reports`, raises the first of its `errors`, the target's before a drafter's.
        """
        found = [error for error in self.errors if error is not None]
        if found and not reports:
            raise min(found, key=lambda error: error.by_drafter)
        return self

    def __repr__(self) -> str:
        rows = []
        for row, length in enumerate(self.lengths[:_SHOWN].tolist()):
            what = self.tokens[row, :length].tolist() if self.texts is None else self.texts[row]
            score = None if self.scores is None else float(self.scores[row])
            reason = self.finish_reasons[row] if self.finish_reasons else ""  # T5X's loop has none
            rows.append(f"\n  {row}: {describe_output(what, length, reason, score)}")
        more = f"\n  … {len(self.lengths) - _SHOWN:,} more" if len(self.lengths) > _SHOWN else ""
        per_call = getattr(self.stats, "tokens_per_target_call", None)
        speed = "" if per_call is None else f", {per_call:.2f} per target call"
        head = f"GenerationResult({len(self.lengths):,} rows, {self.lengths.sum():,} tokens{speed})"
        return f"{head}{''.join(rows)}{more}"


def describe_output(
    what: str | list[int] | None, length: int, reason: str = "", score: float | None = None
) -> str:
    """Returns a row's text or tokens, their number, finish reason and score on one short line."""
    number = f"{length} token{'s' * (length != 1)}"
    scored = "" if score is None else f", score {score:.4g}"
    return f"{quote_value(what)} ({reason}{', ' * bool(reason)}{number}{scored})"


def read_arrays(arrays: Arrays) -> Arrays:
    """Returns a pytree of JAX arrays on the host; on a CPU they are views of the same memory."""
    (device, *_) = jax.tree.leaves(arrays)[0].devices()
    # `device_get` starts copies that overlap, which on a CPU takes longer than all of the reading.
    return jax.tree.map(np.asarray, arrays) if device.platform == "cpu" else jax.device_get(arrays)


def read_state(state: DecodeState, rows: np.ndarray | None = None) -> Committed:
    """Returns on the host what all rows of a state have committed, or a copy for `rows` only."""
    committed = read_arrays(state.config.strategy.read(state))
    return committed if rows is None else jax.tree.map(lambda leaf: leaf[rows], committed)


@isolated
def finish(
    target: LanguageModel, state: DecodeState | Committed, request: Request
) -> GenerationResult:
    """Returns what has been committed so far, trimmed and detokenised.

    Raises:
      NonFiniteLogitsError: the target or the drafter gave logits that are not finite numbers.
    """
    return collect(target, state, request).checked()


def collect(
    target: LanguageModel, state: DecodeState | Committed, request: Request
) -> GenerationResult:
    """Returns what `finish` returns, with the errors of rows in the place of an exception.

    A row whose target gave logits that are not finite numbers has no output. Arguments are those of
    `finish`.
    """
    state = state if isinstance(state, Committed) else read_state(state)
    errors = _find_errors(target, state, request)
    tokens, ends, done, log_probs, adjusted, _, counts, search = state
    columns, starts = np.arange(max(request.limits)), request.prefix_lengths
    committed = ends - starts
    # A row with a long prefix and a small limit of its own has fewer slots than the widest row.
    slots = np.minimum(starts[:, None] + columns, tokens.shape[1] - 1)
    places = np.arange(len(slots))[:, None], slots
    tokens = tokens[places]
    reasons = _finish_reasons(tokens, committed, done, request)
    lengths, texts = committed.copy(), None
    for row, error in enumerate(errors) if request.stop and search is None else ():
        # A row may go on for some tokens past its stop string, which nobody will see.
        sound = tokens[row, : error.token].tolist() if error else []
        if sound and find_stop(target.vocabulary, sound, request.stop) is not None:
            lengths[row], reasons[row], errors[row] = len(sound), "stop", None
    lost = [row for row, error in enumerate(errors) if error is not None and not error.by_drafter]
    for row in lost:
        lengths[row], reasons[row] = 0, "error"
    for row in range(len(lengths)) if request.stop else ():
        ids = strip_end(target.vocabulary, tokens[row, : lengths[row]].tolist(), reasons[row])
        kept = find_stop(target.vocabulary, ids, request.stop)
        if kept is not None:
            lengths[row], reasons[row] = kept, "stop"
    valid = columns < lengths[:, None]

    # Under argmax the sampled distribution is one-hot: every chosen token has log-probability 0.
    adjusted = np.zeros_like(log_probs) if adjusted is None else adjusted
    log_probs, adjusted = (
        np.where(valid, values[places], np.float32(0)) for values in (log_probs, adjusted)
    )
    tokens = np.where(valid, tokens, np.int32(0))
    if target.vocabulary is not None:
        texts = [
            target.vocabulary.decode(strip_end(target.vocabulary, row[:length], reason))
            for row, length, reason in zip(tokens, lengths, reasons)
        ]
        for row in lost:
            texts[row] = None
    scores, config = None, request.config
    if search is not None:
        scores = np.where(request.empty, 0, search.scores).astype(np.float32)
        for empty in np.flatnonzero(~search.exists):
            reasons[empty] = reasons[empty] if errors[empty] else "none"
    has_rate = isinstance(config, BeamConfig) or config.mode.greedy or config.verifier.has_rate
    stats = make_stats(counts, committed if search is None else search.steps, has_rate)
    return GenerationResult(
        texts, tokens, lengths, log_probs, stats, adjusted, reasons, scores, errors
    )


def _find_errors(
    target: LanguageModel, state: Committed, request: Request
) -> list[NonFiniteLogitsError | None]:
    """Returns the first error of each row, the target's before the drafter's, or None."""
    processor = " or the processor" * bool(request.config.mode.processor)
    source = f"the target {target.name}".rstrip() + processor
    if state.search is not None:
        return [
            NonFiniteLogitsError(source, int(number), int(token) - 1) if token else None
            for number, token in zip(request.inputs, state.search.failed)
        ]
    found: list[NonFiniteLogitsError | None] = [None] * len(state.lengths)
    for row in np.flatnonzero(state.draft_failed):
        token = int(state.draft_failed[row] - request.prefix_lengths[row])
        assert request.drafter is not None
        drafter = f"the drafter {request.drafter.name}".rstrip() + processor
        found[row] = NonFiniteLogitsError(drafter, int(request.inputs[row]), token, True)
    if np.isfinite(state.log_probs).all():  # the usual case, even of slots past the committed ones
        return found
    slots = np.arange(state.tokens.shape[1])
    committed = (slots >= request.prefix_lengths[:, None]) & (slots < state.lengths[:, None])
    rows, wrong = np.nonzero(committed & ~np.isfinite(state.log_probs))
    for row, slot in zip(rows[::-1], wrong[::-1]):  # the first of a row last
        token = int(slot - request.prefix_lengths[row])
        found[row] = NonFiniteLogitsError(source, int(request.inputs[row]), token)
    return found


def _finish_reasons(
    tokens: np.ndarray, lengths: np.ndarray, done: np.ndarray, request: Request
) -> list[str]:
    def reason(row: int) -> str:
        if request.empty[row]:
            return "empty"
        if lengths[row] and tokens[row, lengths[row] - 1] in request.eos_ids:
            return "eos"
        if lengths[row] >= request.limits[row]:
            return "length"
        return "unfinished" if request.deadline is None else "deadline"

    return [reason(row) for row in range(len(done))]


def make_stats(counts: Counts, new_tokens: np.ndarray, token_by_token: bool) -> Stats:
    """Returns the statistics of all rows in total, and of each row.

    Args:
      counts: what was counted, with a row for each of `new_tokens`.
      new_tokens: `[B]`, number of new tokens.
      token_by_token: whether tokens were verified one by one, so that they have an acceptance rate.
    """
    # In the order of the fields; `tree.map` for each row would take the time of decoding a token.
    leaves = [getattr(counts, field.name) for field in dataclasses.fields(counts)]
    per_row = tuple(
        _make_row_stats(Counts(*row), number, token_by_token)
        for *row, number in zip(*leaves, new_tokens, strict=True)
    )
    total = Counts(*(leaf.sum(axis=0) for leaf in leaves))
    return _make_row_stats(total, new_tokens.sum(), token_by_token)._replace(per_row=per_row)


def _make_row_stats(counts: Counts, new_tokens: np.integer, token_by_token: bool) -> Stats:
    calls, accepted = int(counts.target_calls), int(counts.accepted)
    examined, undrafted = int(counts.examined_by_position.sum()), int(counts.undrafted)
    rated = examined and token_by_token
    return Stats(
        target_calls=calls,
        draft_calls=int(counts.draft_calls),
        drafted=int(counts.drafted),
        accepted=accepted,
        accepted_by_position=counts.accepted_by_position,
        examined_by_position=counts.examined_by_position,
        acceptance_rate=accepted / examined if rated else None,
        tokens_per_target_call=int(new_tokens) / calls if calls else None,
        accepted_per_target_call=accepted / calls if calls else None,
        undrafted=undrafted,
        acceptance_rate_per_position=accepted / (examined + undrafted) if rated else None,
    )
