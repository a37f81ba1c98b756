"""Continuous batching: the place of a finished row in the state is taken by the next input.

The loop is `advance`, which returns as soon as enough rows are done. Their outputs are taken out,
and rows that were prefilled ahead take their places (`batch_rows.py`). A device runs calls in the
order in which they are made, so the next inputs are prefilled right behind `advance`: while that
runs, the host reads which rows are done and places others, and the device is never idle.

Rows of one state share the padded length of the encoder's input (for a decoder-only target, of the
prompt), so the inputs are divided into a few queues by length. Queues, padding and the number of
inputs prefilled together depend on the job alone, not on what is skipped or how long outputs are: a
job that resumes after a kill gives every input what it would have got.

With a CPU's own kernels a row that is done costs next to nothing, and no output depends on its
batch. So rows may as well wait for the last of their batch, unless they wait long. Then outputs
decide what is prefilled together.
"""

import collections
import dataclasses
import itertools
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.backends.sharding import row_multiple
from specdec_jax.decoding import autotune
from specdec_jax.decoding.batch_rows import LEAST, Rows
from specdec_jax.decoding.checks import UnsupportedCombination, unsupported
from specdec_jax.decoding.generate import (
    FOREVER,
    STOP_EVERY,
    advance,
    complete,
    mark_stopped,
    what_is_timed,
)
from specdec_jax.decoding.generation_config import (
    ConfigOrPath,
    GenerationConfig,
    document_options,
    split_options,
)
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.languages import list_codes
from specdec_jax.decoding.learning import Learner, teach, update_drafter
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.decoding.request import Plan
from specdec_jax.decoding.results import (
    GenerationResult,
    NonFiniteLogitsError,
    Stats,
    collect,
    describe_output,
)
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.randomness import make_key
from specdec_jax.speculative.strategy import Committed

# Outputs that must come in order are decoded in parts of 64 times the batch size, so that they
# appear while later parts still run.
_WINDOW = 64
# For how many batches a choice of γ = "auto" holds if it is to find out whether drafting pays;
# others hold for `_WINDOW`.
_EXPLORED = 4


class Output(NamedTuple):
    """The output of one row.

    Attributes:
      text: the text, None without a vocabulary or where the row has no output.
      tokens: new token ids, EOS included.
      log_probs, adjusted_log_probs: their log-probabilities under the target's own distribution and
        under the sampled distribution.
      finish_reason: why the row ended, as in `GenerationResult`.
      stats: statistics of the row; for a beam search, of its input.
      score: score of the hypothesis in a beam search, else None.
      error: as in `GenerationResult`.
    """

    text: str | None
    tokens: list[int]
    log_probs: list[float]
    adjusted_log_probs: list[float]
    finish_reason: str
    stats: Stats
    score: float | None = None
    error: NonFiniteLogitsError | None = None

    def __repr__(self) -> str:
        what = self.tokens if self.text is None and not self.error else self.text
        return f"Output({describe_output(what, len(self.tokens), self.finish_reason, self.score)})"


@document_options
@isolated
def decode_stream(
    target: LanguageModel,
    inputs: Any,
    *,
    config: ConfigOrPath = None,
    batch_size: int = 8,
    refill: bool | None = None,
    skip: Collection[int] = (),
    learner: Learner | None = None,
    **options: Any,
) -> Iterator[tuple[int, tuple[Output, ...]]]:
    """Decodes many inputs and yields (number of the input, its outputs) as they are finished.

    Each input gets what `generate` gives for it with the same options and its own key, which is
    `fold_in(key, i)` for input i. With `gamma="auto"` this holds for argmax; above temperature 0 it
    holds for the same number of rows, because measured costs belong to a number of rows. For argmax
    γ is chosen anew for each queue and after 64 batches (4 that find out whether drafting pays), by
    what came before.

    Args:
      target, inputs: as for `generate`.
      batch_size: number of inputs that are decoded together. Fewer are filled up to it, so that
        their number compiles nothing new.
      refill: whether finished rows are refilled with the next inputs. False decodes batches of like
        length, each of which runs until its last row is done, as beams always are. None does what
        is faster: with the CPU kernels, according to how long the rows of a batch have waited for
        the last one.
      skip: numbers of inputs, from 0, that are left out; keys and shapes of the others stay as
        they are.
      learner: learns from the outputs, and `learner.drafter` drafts (`OnlineDistillation`,
        `SuffixHistory`). It sees an output when the caller asks for the next one, so store each
        output before that.
      config, options: as for `generate`; options may have one value per input. With `non_finite` =
        "report" one input whose logits are not finite numbers does not end the job.

    Raises:
      ValueError: as for `generate`, before anything compiles.
      UnsupportedCombination: a deadline or beams with `refill`; only batches can have them. Or a
        learner and another drafter; or a learner above temperature 0 without `verifier="gumbel"`.
    """
    batch_size = arguments.check_integer("batch_size", batch_size, 1)
    refill = refill if refill is None else arguments.check_flag("refill", refill)
    left_out = arguments.check_list("skip", skip, "numbers of inputs")
    if not all(map(arguments.is_integer, left_out)):
        raise ValueError(f"skip: got {arguments.quote(left_out)}, expected numbers of inputs")
    config, data = split_options(config, options)
    if refill and config.deadline is not None:
        raise UnsupportedCombination(
            f"deadline: got {config.deadline} with refill=True, expected refill=False: "
            "only a batch has an end"
        )
    if learner is not None and data.drafter is not None:
        raise UnsupportedCombination(
            f"drafter: got {data.drafter!r} with a learner, expected none: it has its own"
        )
    if learner is not None:
        has_all = all(hasattr(learner, name) for name in ("drafter", "saw", "learn"))
        if isinstance(learner, type) or not has_all:
            expected = "an object with drafter, saw and learn, such as SuffixHistory"
            raise mismatch_error("learner", arguments.quote(learner), expected)
        data = data._replace(drafter=learner.drafter)
    plan = plan_decoding(target, inputs, config=config, batch_size=batch_size, **data._asdict())
    commits = plan.config.strategy.commits_tokens
    if refill and not commits:
        expected = "refill=None or False: the beams of a batch are decoded together"
        raise UnsupportedCombination(f"num_beams: got beams with refill=True, expected {expected}")
    if unknown := [number for number in left_out if not 0 <= number < len(plan.lengths)]:
        expected = f"numbers of inputs, from 0 to {len(plan.lengths) - 1}"
        raise mismatch_error("skip", arguments.quote(unknown[0]), expected)
    if learner is not None:  # what it has accepted tells nothing of the drafter it began with
        plan = autotune.autotune(plan, first=True, once=True)
        plan = dataclasses.replace(plan, learned_key=None)
    elif not _chooses_anew(plan):
        plan = autotune.autotune(plan, once=True)
    skipped, whole = frozenset(map(int, left_out)), refill is False or config.deadline is not None
    if whole or not commits:
        outputs = _decode_batches(target, plan, batch_size, skipped, learner)
    else:
        waits = refill is None and learner is None and may_wait(plan)
        outputs = _decode_queues(target, plan, batch_size, skipped, learner, waits)
    if learner is not None:
        outputs = teach(outputs, plan, learner)
    return outputs if config.non_finite == "report" else _check_outputs(outputs)


@isolated
def decode_all(
    target: LanguageModel,
    inputs: Sequence[Sequence[int]],
    *,
    config: ConfigOrPath = None,
    batch_size: int,
    seed: int,
    first: int = 0,
    refill: bool | None = None,
    learner: Learner | None = None,
    **options: Any,
) -> Iterator[Output]:
    """Decodes inputs and yields their outputs in order, `num_samples` for each.

    Args:
      target: the target.
      inputs: ids of every input.
      batch_size: number of inputs that are decoded together.
      seed: input i draws from `fold_in(key(seed), first + i)`, so that its sample does not depend
        on its batch.
      first: number of the first input, if `inputs` are a part of more.
      refill: as for `decode_stream`; ignored where refilling gains nothing, and with a deadline.
      learner: as for `decode_stream`; it may see an output before that is yielded.
      config, options: as for `generate`, but no `key`, and no data of single inputs.

    Raises:
      ValueError: as for `decode_stream`.
      UnsupportedCombination: an option that is data of single inputs, or a key beside `seed`.
    """
    config, data = split_options(config, options)
    for name, given in data._replace(drafter=None)._asdict().items():
        if given is not None:
            expected = "seed" if name == "key" else "inputs that are lists of ids"
            raise unsupported(name, arguments.quote(given), f"none, but {expected}")
    rows = choose_batch_size(target, batch_size, len(inputs))
    codes = _list_codes(config, len(inputs))
    if len(inputs) > _WINDOW * rows:
        drafter = data.drafter if learner is None else getattr(learner, "drafter", None)
        check_longest(target, inputs, config, drafter, rows)
    for start in range(0, len(inputs), _WINDOW * max(rows, 1)):
        window = inputs[start : start + _WINDOW * rows]
        stop = start + len(window)
        keys = fold_keys(make_key(seed), np.arange(start, start + len(window)) + first)
        outputs = decode_stream(
            target,
            window,
            config=dataclasses.replace(config, **_choose_codes(codes, start, stop)),
            batch_size=rows,
            refill=refill if may_refill(rows, len(window), config.deadline) else False,
            learner=learner,
            **data._replace(key=keys)._asdict(),
        )
        try:
            for output in _yield_in_order(outputs):
                error = output.error
                yield (
                    output._replace(error=error.at(error.input + start + first))
                    if error
                    else output
                )
        except NonFiniteLogitsError as error:
            raise error.at(error.input + start + first) from None


def check_longest(
    target: LanguageModel,
    inputs: Sequence[Sequence[int]],
    config: GenerationConfig,
    drafter: Drafter | None,
    batch_size: int,
) -> None:
    """Raises the errors of `generate` for the longest input, before shorter ones are decoded."""
    if len(inputs) < 2:
        return
    longest = max(range(len(inputs)), key=lambda number: len(inputs[number]))
    codes = _choose_codes(_list_codes(config, len(inputs)), longest, longest + 1)
    how: dict[str, Any] = dict(config=dataclasses.replace(config, **codes), batch_size=batch_size)
    try:
        plan_decoding(target, [inputs[longest]], drafter=drafter, **how)
    except ValueError as error:
        raise type(error)(re.sub(r"^input 0\b", f"input {longest}", str(error))) from None


def _list_codes(config: GenerationConfig, inputs: int) -> dict[str, list[str | None]]:
    """Returns the options with a language for each input."""
    return {
        name: list_codes(name, getattr(config, name), inputs)
        for name in ("source_language", "target_language")
        if isinstance(getattr(config, name), tuple)
    }


def _choose_codes(codes: Mapping[str, list[str | None]], start: int, stop: int) -> dict[str, Any]:
    """Returns the languages of a part of the inputs."""
    return {name: each[start:stop] for name, each in codes.items()}


def choose_batch_size(target: LanguageModel, batch_size: int, inputs: int) -> int:
    """Returns the batch size for so many inputs: the least that a mesh can divide."""
    parts = row_multiple(target.network.rules)
    return min(batch_size, -(-inputs // parts) * parts)


def may_refill(batch_size: int, inputs: int, deadline: float | None) -> bool:
    """Returns whether rows can be refilled: one alone waits for none, a deadline is a batch's."""
    return 1 < batch_size < inputs and deadline is None


def may_wait(plan: Plan) -> bool:
    """Returns whether rows that are done cost little, so that they may wait for others."""
    return plan.network.skips_padding and plan.network.rules is None and not _remembers(plan)


def _remembers(plan: Plan) -> bool:
    return plan.drafter is not None and plan.drafter.remembers


def _chooses_anew(plan: Plan) -> bool:
    """Returns whether parts of a job choose γ = "auto" by what those before have shown.

    Another choice needs another program, for whose compilation a deadline leaves no time.
    """
    if plan.auto_rows is None or not plan.may_learn or plan.deadline is not None:
        return False
    return not _remembers(plan) and autotune.may_pay(plan)


def _count_batches(chosen: Plan) -> int:
    """Returns for how many batches a choice of γ = "auto" holds: few, if it is to find out."""
    return min(_EXPLORED, _WINDOW) if chosen.explores else _WINDOW


def _yield_in_order(outputs: Iterable[tuple[int, tuple[Output, ...]]]) -> Iterator[Output]:
    """Yields single outputs in the order of their inputs."""
    waiting: dict[int, tuple[Output, ...]] = {}
    due = 0
    for number, rows in outputs:
        waiting[number] = rows
        while due in waiting:
            yield from waiting.pop(due)
            due += 1


def _check_outputs(
    outputs: Iterable[tuple[int, tuple[Output, ...]]],
) -> Iterator[tuple[int, tuple[Output, ...]]]:
    """Yields `outputs` as they are; raises the first error of one."""
    for number, rows in outputs:
        for error in (output.error for output in rows if output.error):
            raise error
        yield number, rows


@isolated
def _decode_batches(
    target: LanguageModel, plan: Plan, size: int, skip: frozenset[int], learner: Learner | None
) -> Iterator[tuple[int, tuple[Output, ...]]]:
    """Yields the outputs of batches of like length, but of those that are skipped whole."""
    order = np.argsort(plan.lengths + plan.prefix_lengths, kind="stable").tolist()
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    batches = [numbers for numbers in batches if not skip.issuperset(numbers)]
    until, width = 0, 0
    for place, numbers in enumerate(batches):
        plan, start_time = update_drafter(target, plan, learner), time.monotonic()
        longest = bucket_length(int(plan.input_lengths[np.array(numbers)].max()))
        if place == until or longest != width or learner is not None:
            width = longest
            chosen = autotune.autotune(plan, timed=what_is_timed(plan), width=width)
            until = place + _count_batches(chosen)
        result = complete(target, chosen, numbers + [-1] * (size - len(numbers)), start_time)
        outputs = iter(_collect_outputs(result))
        for number in numbers:
            rows = tuple(itertools.islice(outputs, plan.outputs))
            if number not in skip:
                yield number, rows


def make_queues(lengths: Sequence[int], size: int) -> list[tuple[int, list[int]]]:
    """Returns the padded length and the inputs of every queue, the longest inputs first.

    If fewer than `LEAST` times `size` inputs have a padded length, the next shorter ones join
    them. The last rows, which decode alone, are short.
    """
    queues: list[tuple[int, list[int]]] = []
    for number in _sort_by_length(lengths):
        width = bucket_length(int(lengths[number]))
        if not queues or width < queues[-1][0] and len(queues[-1][1]) >= LEAST * size:
            queues.append((width, []))
        queues[-1][1].append(number)
    if len(queues) > 1 and len(queues[-1][1]) < size:
        queues[-2][1].extend(queues.pop()[1])
    return queues


def make_batches(lengths: Sequence[int], size: int) -> list[tuple[int, list[int]]]:
    """Returns the padded length and the inputs of every queue whose rows wait, longest first.

    They are decoded in batches, of which all but the last one are full.
    """
    queues: list[tuple[int, list[int]]] = []
    order = _sort_by_length(lengths)
    for first in range(0, len(order), size):
        width = bucket_length(int(lengths[order[first]]))
        if not queues or width < queues[-1][0]:
            queues.append((width, []))
        queues[-1][1].extend(order[first : first + size])
    return queues


def _sort_by_length(lengths: Sequence[int]) -> list[int]:
    """Returns the numbers of inputs, the longest first."""
    return sorted(range(len(lengths)), key=lambda number: -lengths[number])


@isolated
def _decode_queues(
    target: LanguageModel,
    plan: Plan,
    size: int,
    skip: frozenset[int],
    learner: Learner | None,
    waits: bool,
) -> Iterator[tuple[int, tuple[Output, ...]]]:
    """Yields the outputs of inputs; `waits`: rows of a queue wait, until they have waited long.

    Where γ = "auto" is chosen anew, it is for each queue, and in long ones for each part.
    """
    divide, caches = make_batches if waits else make_queues, ()
    for width, numbers in divide(plan.input_lengths.tolist(), size):
        left, still = [number for number in numbers if number not in skip], waits
        while left:
            timed = "rows" if still and learner is None and not plan.stop else None
            chosen = autotune.autotune(plan, timed=timed, width=width)
            most = len(left) if plan.auto_rows is None else _count_batches(chosen) * size
            part, left = left[:most], left[most:]
            rows = Rows(chosen, size, width, part, still, caches)
            caches = ()  # of another plan they would only take memory
            yield from _decode_rows(target, rows, learner)
            caches, still = rows.take_caches(), rows.waits


def _decode_rows(
    target: LanguageModel, rows: Rows, learner: Learner | None
) -> Iterator[tuple[int, tuple[Output, ...]]]:
    """Yields the outputs of the inputs of one queue."""
    plan = rows.plan
    samples, request = plan.samples, plan.request()
    every = np.int32(STOP_EVERY if plan.stop else FOREVER)
    finished: tuple[np.ndarray, Committed, float | None] | None = None
    gathered: dict[int, dict[int, Output]] = collections.defaultdict(dict)

    def deliver(owners: np.ndarray, committed: Committed, seconds: float | None) -> Iterator:
        result = collect(target, committed, request.take(owners))
        autotune.record(request, result, seconds)
        for owner, output in zip(owners.tolist(), _collect_outputs(result), strict=True):
            number, sample = divmod(owner, samples)
            gathered[number][sample] = output
            if len(gathered[number]) == samples:
                yield number, tuple(output for _, output in sorted(gathered.pop(number).items()))

    while rows.left or rows.busy:
        plan = rows.plan = update_drafter(target, plan, learner)
        start, whole = time.perf_counter(), rows.waits and not plan.stop
        state = advance(plan.network, plan.drafter, rows.fill(), every, rows.most)
        # Not with a learner: the next rows are to begin with what it learns from these.
        if learner is None:
            rows.prefill_ahead()
        if finished is not None:
            yield from deliver(*finished)  # while the device is busy
            whole &= not state.done.is_ready()  # else it may have waited for the caller
        if plan.stop:
            state = mark_stopped(target, state, rows.starts, plan.stop)
        done = rows.take_done(state)
        seconds = time.perf_counter() - start if whole else None
        finished = None if done is None else (*done, seconds)
    if finished is not None:
        yield from deliver(*finished)


def _collect_outputs(result: GenerationResult) -> list[Output]:
    """Returns the output of each row."""
    texts: Sequence[str | None] = result.texts or [None] * len(result.lengths)
    rows = []
    assert result.stats.per_row is not None
    for row, length in enumerate(result.lengths):
        tokens, log_probs, adjusted = (
            values[row, :length].tolist()
            for values in (result.tokens, result.log_probs, result.adjusted_log_probs)
        )
        # A search counts by input, of which it returns as many hypotheses as it was asked for.
        stats = result.stats.per_row[row * len(result.stats.per_row) // len(result.lengths)]
        score = None if result.scores is None else float(result.scores[row])
        reason, error = result.finish_reasons[row], result.errors[row]
        rows.append(Output(texts[row], tokens, log_probs, adjusted, reason, stats, score, error))
    return rows
