"""Continuous batching: the place of a finished row in the state is taken by the next input.

The loop is `advance`, which returns as soon as enough rows are done. Their outputs are taken out,
and rows that were prefilled ahead overwrite them in place. Always the same number of inputs is
prefilled together, so that one shape compiles. A device runs calls in the order in which they are
made, so the next inputs are prefilled right behind `advance`: while that runs, the host reads which
rows are done and places others, and the device is never idle.

Rows of one state share the padded length of the encoder's input (for a decoder-only target, of the
prompt), so the inputs are divided into a few queues by length. Queues, padding and the number of
inputs prefilled together depend on the job alone, not on what is skipped or how long outputs are: a
job that resumes after a kill gives every input what it would have got.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.cpu.packed_weights import can_pack, put_rows
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.backends.sharding import ShardingRules, constrain_sharding, row_multiple
from specdec_jax.decoding import autotune
from specdec_jax.decoding.checks import UnsupportedCombination, unsupported
from specdec_jax.decoding.generate import FOREVER, STOP_EVERY, advance, complete, mark_stopped
from specdec_jax.decoding.generation_config import ConfigOrPath, document_options, split_options
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
    read_arrays,
    read_state,
)
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.randomness import make_key
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.strategy import Committed, prefill

# A quarter of a state's inputs is prefilled together and ahead: one alone would cost twice as much.
_AHEAD = 4
# The host looks when a quarter of the rows is done: each look costs, and so does each row that
# waits.
_PARTS = 4
# A queue has at least 4 times the inputs of a state, since its last rows decode alone.
_LEAST = 4
# Outputs that must come in order are decoded in parts of 64 times the batch size, so that they
# appear while later parts still run.
_WINDOW = 64


class _Prefilled(NamedTuple):
    """Rows that were prefilled together, of which some wait for a place.

    Attributes:
      state: the state of all of them.
      waiting: for each that waits its row of `state` and its row of the request.
    """

    state: DecodeState
    waiting: collections.deque[tuple[int, int]]


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
    refill: bool = True,
    skip: Collection[int] = (),
    learner: Learner | None = None,
    **options: Any,
) -> Iterator[tuple[int, tuple[Output, ...]]]:
    """Decodes many inputs and yields (number of the input, its outputs) as they are finished.

    Each input gets what `generate` gives for it with the same options and its own key, which is
    `fold_in(key, i)` for input i. With `gamma="auto"` this holds for argmax; above temperature 0 it
    holds for the same number of rows, because measured costs belong to a number of rows.

    Args:
      target, inputs: as for `generate`.
      batch_size: number of inputs that are decoded together.
      refill: whether finished rows are refilled with the next inputs. False decodes batches of like
        length, each of which runs until its last row is done.
      skip: numbers of inputs, from 0, that are left out; keys and shapes of the others stay as
        they are.
      learner: learns from the outputs, and `learner.drafter` drafts (`OnlineDistillation`,
        `SuffixHistory`). It sees an output when the caller asks for the next one, so store each
        output before that.
      config, options: as for `generate`; options may have one value per input. With `non_finite` =
        "report" one input whose logits are not finite numbers does not end the job.

    Raises:
      ValueError: as for `generate`, before anything compiles.
      UnsupportedCombination: a deadline with `refill`; only batches can have one. Or a learner
        and another drafter; or a learner above temperature 0 without `verifier="gumbel"`.
    """
    batch_size = arguments.check_integer("batch_size", batch_size, 1)
    refill = arguments.check_flag("refill", refill)
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
    if unknown := [number for number in left_out if not 0 <= number < len(plan.lengths)]:
        expected = f"numbers of inputs, from 0 to {len(plan.lengths) - 1}"
        raise mismatch_error("skip", arguments.quote(unknown[0]), expected)
    plan, skipped = autotune.autotune(plan), frozenset(map(int, left_out))
    if learner is not None:  # what it has accepted tells nothing of the drafter that it began with
        plan = dataclasses.replace(plan, costs_key=None)
    refill &= plan.config.strategy.commits_tokens
    decode = _decode_queues if refill else _decode_batches
    outputs = decode(target, plan, batch_size, skipped, learner)
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
    refill: bool = True,
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
    codes = {
        name: list_codes(name, getattr(config, name), len(inputs))
        for name in ("source_language", "target_language")
        if isinstance(getattr(config, name), tuple)
    }
    for start in range(0, len(inputs), _WINDOW * max(rows, 1)):
        window = inputs[start : start + _WINDOW * rows]
        stop = start + len(window)
        languages: dict[str, Any] = {name: each[start:stop] for name, each in codes.items()}
        keys = fold_keys(make_key(seed), np.arange(start, start + len(window)) + first)
        outputs = decode_stream(
            target,
            window,
            config=dataclasses.replace(config, **languages),
            batch_size=rows,
            refill=refill and should_refill(rows, len(window), config.deadline),
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


def choose_batch_size(target: LanguageModel, batch_size: int, inputs: int) -> int:
    """Returns the batch size for so many inputs: the least that a mesh can divide."""
    parts = row_multiple(target.network.rules)
    return min(batch_size, -(-inputs // parts) * parts)


def should_refill(batch_size: int, inputs: int, deadline: float | None) -> bool:
    """Returns whether to refill rows: one alone waits for none, a deadline belongs to a batch."""
    return 1 < batch_size < inputs and deadline is None


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
    for first in range(0, len(order), size):
        numbers, start_time = order[first : first + size], time.monotonic()
        if skip.issuperset(numbers):
            continue
        plan = update_drafter(target, plan, learner)
        result = complete(target, plan, numbers + [-1] * (size - len(numbers)), start_time)
        outputs = iter(_collect_outputs(result))
        for number in numbers:
            rows = tuple(itertools.islice(outputs, plan.outputs))
            if number not in skip:
                yield number, rows


def make_queues(lengths: Sequence[int], size: int) -> list[tuple[int, list[int]]]:
    """Returns the padded length and the inputs of every queue, the longest inputs first.

    If fewer than `_LEAST` times `size` inputs have a padded length, the next shorter ones join
    them. The last rows, which decode alone, are short.
    """
    queues: list[tuple[int, list[int]]] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        width = bucket_length(int(lengths[number]))
        if not queues or width < queues[-1][0] and len(queues[-1][1]) >= _LEAST * size:
            queues.append((width, []))
        queues[-1][1].append(number)
    if len(queues) > 1 and len(queues[-1][1]) < size:
        queues[-2][1].extend(queues.pop()[1])
    return queues


@isolated
def _decode_queues(
    target: LanguageModel, plan: Plan, size: int, skip: frozenset[int], learner: Learner | None
) -> Iterator[tuple[int, tuple[Output, ...]]]:
    for width, numbers in make_queues(plan.input_lengths.tolist(), size):
        numbers = [number for number in numbers if number not in skip]
        if numbers:
            yield from _decode_queue(target, plan, size, width, numbers, learner)


def _decode_queue(
    target: LanguageModel,
    plan: Plan,
    size: int,
    width: int,
    numbers: list[int],
    learner: Learner | None,
) -> Iterator[tuple[int, tuple[Output, ...]]]:
    """Yields the outputs of inputs, padded to `width`, from one state of `size` inputs."""
    rules, samples, request = plan.network.rules, plan.samples, plan.request()
    total, multiple = size * samples, row_multiple(rules)
    part = max(1, total // _PARTS)
    ahead = min(size, -(-max(2, size // _AHEAD) // multiple) * multiple)
    shared, unfed = _inspect_leaves(plan, size, width) if total > 1 else ((), False)
    every = np.int32(STOP_EVERY if plan.stop else FOREVER)
    queue, state = collections.deque(numbers), None
    ready: collections.deque[_Prefilled] = collections.deque()
    # The request's row in each row of the state, or −1.
    owners, starts = np.full(total, -1), np.ones(total, np.int32)
    finished: tuple[np.ndarray, Committed] | None = None
    gathered: dict[int, dict[int, Output]] = collections.defaultdict(dict)

    def deliver(rows: np.ndarray, committed: Committed) -> Iterator:
        result = collect(target, committed, request.take(rows))
        autotune.record(request, result)
        for row, output in zip(rows.tolist(), _collect_outputs(result), strict=True):
            number, sample = divmod(row, samples)
            gathered[number][sample] = output
            if len(gathered[number]) == samples:
                yield number, tuple(output for _, output in sorted(gathered.pop(number).items()))

    def prefill_next() -> None:
        chosen = [queue.popleft() if queue else -1 for _ in range(ahead)]
        rows = (np.array(chosen)[:, None] * samples + np.arange(samples)).reshape(-1)
        waiting = collections.deque(pair for pair in enumerate(rows.tolist()) if pair[1] >= 0)
        ready.append(_Prefilled(_start_rows(plan, chosen, width, unfed), waiting))

    while queue or ready or np.any(owners >= 0):
        plan = update_drafter(target, plan, learner)
        while (queue or ready) and np.any(owners < 0):
            if not ready:
                prefill_next()
            fresh, waiting = ready[0]
            if state is None and total > 1:
                layers = _empty_layers(plan, size, width) if unfed else ()
                state = _make_done_rows(fresh, layers, total, shared, rules)
            free = np.flatnonzero(owners < 0)[: len(waiting)]
            sources, rows = np.array([waiting.popleft() for _ in free]).T
            owners[free], starts[free] = rows, request.prefix_lengths[rows]
            if not waiting:
                ready.popleft()
            if total == 1:
                state = fresh
                continue
            moves = np.zeros((2, ahead * samples), np.int32)  # always of one shape, which compiles
            moves[:, : len(free)] = sources, free
            state = _place_rows(state, fresh, *moves, np.int32(len(free)), shared, rules)
        # `generate` looks for stop strings every `STOP_EVERY` iterations of a row. For the same
        # statistics, rows must begin at such a moment.
        most = part if (queue or ready) and not plan.stop else total
        state = advance(plan.network, plan.drafter, state, every, np.int32(most))
        # Not with a learner: the next rows are to begin with what it learns from these.
        if queue and learner is None and sum(len(one.waiting) for one in ready) < part:
            prefill_next()
        if finished is not None:
            yield from deliver(*finished)  # while the device is busy
        if plan.stop:
            state = mark_stopped(target, state, starts, plan.stop)
        over = np.flatnonzero(read_arrays(state.done) & (owners >= 0))
        finished = (owners[over], read_state(state, over)) if len(over) else None
        owners[over] = -1
    if finished is not None:
        yield from deliver(*finished)


def _inspect_leaves(plan: Plan, size: int, width: int) -> tuple[tuple[bool, ...], bool]:
    """Returns which leaves of `_start_rows` all rows share, and whether it leaves out caches.

    Shared are tables over positions or ids. The target's caches of self-attention are left out
    where it has been fed nothing by then, and its cache can be `with_layers` of another: to make
    empty ones and to copy them for every input would take a sixth of a job's time.
    """
    whole = plan.arguments([-1] * size, width)
    unfed = whole[-1].tokens.shape[1] == 1
    unfed &= hasattr(prefill.eval_shape(*whole).target_cache, "with_layers")
    start = _prefill_unfed if unfed else prefill
    counts = [count * row_multiple(plan.network.rules) for count in (2, 3)]
    two, three = (
        jax.tree.leaves(start.eval_shape(*plan.arguments([-1] * count, width))) for count in counts
    )
    return tuple(a.shape == b.shape for a, b in zip(two, three, strict=True)), unfed


def _start_rows(plan: Plan, numbers: list[int], width: int, unfed: bool) -> DecodeState:
    """Prefills inputs; `unfed`: without the target's caches of self-attention."""
    return (_prefill_unfed if unfed else prefill)(*plan.arguments(numbers, width))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _prefill_unfed(*arguments: Any) -> DecodeState:
    return _replace_layers(arguments[2].strategy.prefill(*arguments), ())


def _replace_layers(state: DecodeState, layers: tuple[Any, ...]) -> DecodeState:
    return dataclasses.replace(state, target_cache=state.target_cache.with_layers(layers))


def _empty_layers(plan: Plan, size: int, width: int) -> tuple[Any, ...]:
    """Makes the target's caches of self-attention for `size` inputs."""
    shapes = prefill.eval_shape(*plan.arguments([-1] * size, width)).target_cache.layers
    return jax.tree.map(lambda layer: jnp.zeros(layer.shape, layer.dtype), shapes)


@functools.partial(jax.jit, static_argnames=("total", "shared", "rules"), donate_argnames="layers")
def _make_done_rows(
    fresh: DecodeState,
    layers: tuple[Any, ...],
    total: int,
    shared: tuple[bool, ...],
    rules: ShardingRules | None,
) -> DecodeState:
    """Returns a state of `total` rows that are done, in all else like the rows of `fresh`.

    `layers`: what `fresh` lacks.
    """
    leaves, structure = jax.tree.flatten(fresh)
    copied = np.arange(total) % len(fresh.done)
    state = structure.unflatten(
        leaf if same else leaf[copied] for leaf, same in zip(leaves, shared)
    )
    state = dataclasses.replace(state, done=jnp.ones(total, bool))
    return constrain_sharding(_replace_layers(state, layers) if layers else state, rules)


@functools.partial(jax.jit, static_argnames=("shared", "rules"), donate_argnames="state")
def _place_rows(
    state: DecodeState,
    fresh: DecodeState,
    sources: np.ndarray,
    targets: np.ndarray,
    count: np.int32,
    shared: tuple[bool, ...],
    rules: ShardingRules | None,
) -> DecodeState:
    """Returns `state` with the first `count` of the rows `sources` of `fresh` put at `targets`.

    They are written in place, one row after the other: XLA's scatter on a CPU copies number by
    number. Caches that `fresh` lacks keep what they have of earlier rows, which no reader sees: it
    lies past the new row's length.
    """
    new, structure = jax.tree.flatten(fresh)
    unfed = structure != jax.tree.structure(state)
    layers = state.target_cache.layers if unfed else ()
    old = jax.tree.leaves(_replace_layers(state, ()) if unfed else state)
    own = [index for index, same in enumerate(shared) if not same]
    wide = [index for index in own if rules is None and _is_cache(old[index])]
    for index in wide:
        old[index] = put_rows(old[index], new[index], sources, targets, count)
    own = [index for index in own if index not in wide]

    def put(number: jax.Array, rows: list[jax.Array]) -> list[jax.Array]:
        take = functools.partial(
            jax.lax.dynamic_index_in_dim, index=sources[number], keepdims=False
        )
        return [
            jax.lax.dynamic_update_index_in_dim(row, take(new[index]), targets[number], 0)
            for row, index in zip(rows, own)
        ]

    placed = jax.lax.fori_loop(0, count, put, [old[index] for index in own])
    for index, rows in zip(own, placed):
        old[index] = rows
    whole = structure.unflatten(old)
    return constrain_sharding(_replace_layers(whole, layers) if unfed else whole, rules)


def _is_cache(rows: jax.Array) -> bool:
    """Returns whether the CPU's own kernels copy rows of an array: those of caches are large."""
    return rows.ndim > 2 and rows.dtype == np.float32 and can_pack(rows.dtype)


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
