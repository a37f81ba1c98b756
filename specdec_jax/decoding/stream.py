"""Yields the texts of rows while they are decoded."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding import autotune
from specdec_jax.decoding.generate import FOREVER, advance_by
from specdec_jax.decoding.generation_config import ConfigOrPath, document_options, split_options
from specdec_jax.decoding.request import Request
from specdec_jax.decoding.request import plan as plan_request
from specdec_jax.decoding.results import NonFiniteLogitsError, collect, read_arrays
from specdec_jax.decoding.stop import count_visible
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.state import DecodeState
from specdec_jax.tokenizers.vocabularies import Vocabulary


class Piece(NamedTuple):
    """New text of one row.

    Attributes:
      row: number of the row.
      text: new text, in whole characters; the pieces of a row joined are its text.
      tokens: new ids; those of all pieces of a row joined are its ids.
      finish_reason: as in `GenerationResult`, with a row's last piece; None before.
      error: as in `GenerationResult`, with a row's last piece. With the finish reason "error" the
        row has no output, whatever its pieces before had.
    """

    row: int
    text: str
    tokens: list[int]
    finish_reason: str | None
    error: NonFiniteLogitsError | None = None


@document_options
@isolated
def stream(
    target: LanguageModel,
    inputs: Any,
    *,
    config: ConfigOrPath = None,
    every: int = 1,
    **options: Any,
) -> Iterator[Piece]:
    """Decodes a batch and yields the text of its rows as it is committed.

    What may turn out to be a part of a character, or of a stop string, is held back. The pieces of
    a row together are what `generate` returns for it.

    Args:
      target, inputs: as for `generate`.
      every: number of iterations after which text is yielded; more make fewer, longer pieces and
        less work for the host.
      config, options: as for `generate`.
    """
    start_time = time.monotonic()
    arguments.check_model("target", target)
    if target.vocabulary is None:
        expected = "one that has one (text is yielded)"
        raise ValueError(f"stream: got a model without a vocabulary, expected {expected}")
    if not arguments.is_integer(every) or not 1 <= int(every) <= FOREVER:
        raise ValueError(f"every: got {arguments.quote(every)}, expected an integer of at least 1")
    config, data = split_options(config, options)
    plan = autotune.autotune(plan_request(target, inputs, config=config, **data._asdict()))
    state, request = plan.start()
    return _yield_pieces(
        target, state, request, np.int32(every), start_time, config.non_finite == "report"
    )


@isolated
def _yield_pieces(
    target: LanguageModel,
    state: DecodeState,
    request: Request,
    every: np.int32,
    start_time: float,
    reports: bool,
) -> Iterator[Piece]:
    vocabulary, sent, closed = target.vocabulary, [0] * len(request.prefix_lengths), set()
    for state in advance_by(target, state, request, every, start_time):
        tokens, lengths, done = read_arrays((state.tokens, state.lengths, state.done))
        for row, start in enumerate(request.prefix_lengths):
            if done[row]:
                continue
            ids = tokens[row, start : lengths[row]].tolist()
            count = count_visible(vocabulary, ids, request.stop)
            text = _added_text(vocabulary, ids[:count], sent[row])
            if text:
                yield Piece(row, text, ids[sent[row] : count], None)
                sent[row] = count
        newly = [row for row in np.flatnonzero(done) if row not in closed]
        closed.update(newly)
        if newly:
            yield from _make_last_pieces(target, state, request, newly, sent, reports)
    rest = [row for row in range(len(sent)) if row not in closed]
    yield from _make_last_pieces(target, state, request, rest, sent, reports)
    if request.learned_key is not None:
        autotune.record(request, collect(target, state, request))


def _make_last_pieces(
    target: LanguageModel,
    state: DecodeState,
    request: Request,
    rows: Sequence[int | np.integer],
    sent: list[int],
    reports: bool,
) -> Iterator[Piece]:
    if not rows:
        return
    result = collect(target, state, request).checked(reports)
    texts = result.texts or [None] * len(result.tokens)
    for row in map(int, rows):
        ids = result.tokens[row, : result.lengths[row]].tolist()
        text = (texts[row] or "")[len(target.vocabulary.decode(ids[: sent[row]])) :]
        reason, error = result.finish_reasons[row], result.errors[row]
        yield Piece(row, text, ids[sent[row] :], reason, error)


def _added_text(vocabulary: Vocabulary, ids: list[int], count: int) -> str:
    """Returns the text that `ids` add to the text of their first `count`."""
    return vocabulary.decode(ids)[len(vocabulary.decode(ids[:count])) :]
