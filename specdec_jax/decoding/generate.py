"""Decodes a batch of texts or ids: `generate`, and beneath it the one decode loop, `advance`."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.decoding import autotune
from specdec_jax.decoding.generation_config import (
    CallData,
    ConfigOrPath,
    GenerationConfig,
    check_unset,
    document_options,
    split_options,
)
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.decoding.request import Plan, Request
from specdec_jax.decoding.request import plan as plan_request
from specdec_jax.decoding.results import GenerationResult, collect, finish, read_arrays
from specdec_jax.decoding.stop import drop_open_bytes, find_stop
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.randomness import make_key
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.strategy import AnyConfig, Committed

FOREVER = np.int32(2**31 - 1)
# Number of iterations after which the host looks for stop strings: a look costs about a tenth of an
# iteration, and a row that has met one waits for the next look.
STOP_EVERY = 4

State = TypeVar("State", DecodeState, BeamState)


@document_options
@isolated
def generate(
    target: LanguageModel,
    inputs: Any,
    *,
    config: ConfigOrPath = None,
    drafter: Drafter | None = None,
    key: Any = None,
    input_lengths: Any = None,
    attention_mask: Any = None,
    decoder_prefix: Any = None,
    **options: Any,
) -> GenerationResult:
    """Decodes a batch: speculatively with a `drafter`, autoregressively without one.

    The output distribution is exactly the target's either way, except with a lossy verifier
    ("lenient" or "typical").

    Args:
      target: the model whose distribution is sampled.
      inputs: B strings, B lists of ids (with their EOS), or an integer array `[B, L]`. Strings get
        the special tokens that their tokenizer puts around a text. In ids, padding (0, or the
        vocabulary's) before and after the text is ignored. An empty string, or None, is not
        decoded. The inputs of a decoder-only target are prompts: there 0 is an ordinary id, and an
        empty prompt stands for the start token.
      config: the options below in one object, or the path of its file (`.json` or `.gin`); options
        that are given here override it. None: the defaults.
      drafter: e.g. `ModelDrafter(model)`; must share the target's vocabulary.
      key: one key, of any kind (input i gets `fold_in(key, i)`), or B keys; None: the key of seed
        0.
      input_lengths: `[B]`, only with an array of inputs.
      attention_mask: with ids, 1 for those that count and 0 for padding, on either side, as
        transformers' tokenisers give it: for a decoder-only target with prompts of several lengths,
        this or `input_lengths` is needed.
      decoder_prefix: B forced beginnings of the output, without start token or EOS, which the
        result does not repeat.
      {options}

    Raises:
      UnsupportedCombination: options that make no sense together. NonFiniteLogitsError: see
        `non_finite`. Both are ValueErrors.
      TypeError: an unknown option.
      ValueError: a bad argument; the message says what was got and what was expected. Raised before
        anything compiles.
    """
    start_time = time.monotonic()
    config, _ = split_options(config, options)
    data = CallData(drafter, key, input_lengths, attention_mask, decoder_prefix)
    plan = plan_decoding(target, inputs, config=config, **data._asdict())
    plan = autotune.autotune(plan, timed=what_is_timed(plan))
    result = complete(target, plan, None, start_time)
    return result.checked(config.non_finite == "report")


@document_options
@isolated
def prepare(
    target: LanguageModel, inputs: Any, *, config: ConfigOrPath = None, **options: Any
) -> tuple[DecodeState, Request]:
    """Checks the arguments of `generate` and prefills, for callers that drive `advance` themselves.

    With `num_samples` = N everything has N·B rows; the rows of one input lie side by side. No beam
    search can be prepared. `finish` raises `NonFiniteLogitsError`.
    `autotune.record` takes the request and its result, if later requests with γ = "auto" are to
    know how many drafted tokens were accepted.
    """
    config, data = split_options(config, options)
    check_unset(config, "for prepare()", "non_finite")
    plan = plan_request(target, inputs, config=config, **data._asdict())
    return autotune.autotune(plan).start()


@isolated
@functools.partial(jax.jit, donate_argnames="state")
def advance(
    target: Network,
    drafter: Drafter | None,
    state: State,
    max_iterations: ArrayLike,
    max_done: ArrayLike | None = None,
) -> State:
    """Runs iterations until every row is done: the one decode loop of the package.

    Args:
      target: the target's `Network`, which is `Request.network`.
      drafter: a `Drafter`, or None for plain decoding (γ = 0); it is `Request.drafter`.
      state: from `prepare` or an earlier `advance`; its buffers are reused (donated).
      max_iterations: traced, the most iterations; a few for streaming and progress bars. An
        `np.int32`, since a Python int compiles anew.
      max_done: traced; the loop ends as soon as this many rows are done, so that they can be
        refilled. None: all.
    """
    max_done = len(state.done) if max_done is None else max_done
    return _run_loop(target, drafter, state, max_iterations, max_done)


def _run_loop(
    target: Network,
    drafter: Drafter | None,
    state: State,
    max_iterations: ArrayLike,
    max_done: ArrayLike,
) -> State:
    def more(carry: tuple[jax.Array, State]) -> jax.Array:
        iteration, state = carry
        return (iteration < max_iterations) & (jnp.sum(state.done.astype(jnp.int32)) < max_done)

    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        iteration, state = carry
        return iteration + 1, state.config.strategy.iterate(target, drafter, state)

    _, state = jax.lax.while_loop(more, body, (jnp.int32(0), state))
    return constrain_sharding(state, target.rules)


@functools.partial(jax.jit, static_argnames=("config", "slots"))
def _decode(
    target: Network,
    drafter: Drafter | None,
    config: AnyConfig,
    slots: int,
    inputs: PrefillInputs,
    max_iterations: ArrayLike,
) -> Committed:
    """Runs prefill and loop in one program; returns what the host reads of the result."""
    state = config.strategy.prefill(target, drafter, config, slots, inputs)
    return config.strategy.read(_run_loop(target, drafter, state, max_iterations, len(state.done)))


def complete(
    target: LanguageModel, plan: Plan, numbers: Sequence[int] | None, start_time: float
) -> GenerationResult:
    """Decodes inputs of a plan to their end; returns the errors of rows with the result.

    How many drafted tokens were accepted counts for later requests with γ = "auto".

    Args:
      target: the target.
      plan: the checked arguments.
      numbers: those of the inputs, as for `Plan.start`.
      start_time: when the deadline began to count (`time.monotonic()`).
    """
    seconds: float | None = None
    if plan.stop or plan.deadline:
        state, request = plan.start(numbers)
        every = np.int32(1 if plan.deadline else STOP_EVERY)
        for state in advance_by(target, state, request, every, start_time):
            pass
        result = collect(target, state, request)
    else:
        request, begin = plan.request(numbers), time.perf_counter()
        committed = decode_plan(plan, numbers)
        seconds = time.perf_counter() - begin
        result = collect(target, committed, request)
    autotune.record(request, result, seconds)
    return result


def what_is_timed(plan: Plan) -> str | None:
    """Returns the name of the program that `complete` times, None if it does not."""
    return None if plan.stop or plan.deadline else "whole"


def decode_plan(
    plan: Plan, numbers: Sequence[int] | None = None, max_iterations: np.int32 = FOREVER
) -> Committed:
    """Returns what inputs have committed after at most `max_iterations`, in one device call."""
    return read_arrays(_decode(*plan.arguments(numbers), max_iterations))


def advance_by(
    target: LanguageModel, state: DecodeState, request: Request, every: np.int32, start_time: float
) -> Iterator[DecodeState]:
    """Yields the state after every `every` iterations, until the rows are done or time is up.

    A row that has met a stop string is done.
    """
    while True:
        state = advance(request.network, request.drafter, state, every)
        if request.stop:
            state = mark_stopped(target, state, request.prefix_lengths, request.stop)
        yield state
        if every == FOREVER or np.all(read_arrays(state.done)):
            return
        if request.deadline and time.monotonic() - start_time > request.deadline:
            return


def mark_stopped(
    target: LanguageModel, state: DecodeState, starts: np.ndarray, stop: Sequence[str]
) -> DecodeState:
    """Returns `state` with those rows marked as done that have met a stop string.

    `starts [B]` is the number of tokens in each row's start token and prefix.
    """
    lengths, done, tokens = read_arrays((state.lengths, state.done, state.tokens))
    vocabulary = target.vocabulary
    assert vocabulary is not None, "a stop string is text"
    met = [
        find_stop(vocabulary, drop_open_bytes(vocabulary, row[start:length].tolist()), stop)
        is not None
        for row, start, length in zip(tokens, starts, lengths, strict=True)
    ]
    done, rules = done | met, target.network.rules
    # Unlike jnp.asarray, device_put compiles nothing.
    done = jax.device_put(done, may_alias=False) if rules is None else rules.put(done)
    return dataclasses.replace(state, done=done)


@document_options
@isolated
def warm_up(
    target: LanguageModel,
    *,
    config: ConfigOrPath = None,
    drafter: Drafter | None = None,
    batch_sizes: Sequence[int] = (1,),
    max_input_length: int | None = None,
    **options: Any,
) -> int:
    """Compiles what `generate` needs for these batch sizes and inputs up to `max_input_length`.

    `max_input_length` defaults to the configuration's, and where that is the default too, to 64.
    Afterwards calls with the same `gamma`, `max_new_tokens`, kind of sampling and number of EOS ids
    (up to 4) compile nothing. The options are those of `generate`. Stop strings, deadlines and
    `stream` need other programs: give a stop string or a deadline if the calls have any, and either
    of them for `stream`.

    Returns:
      The number of shapes that were compiled for.
    """
    arguments.check_model("target", target)
    if max_input_length is None:
        own = split_options(config, {})[0].max_input_length
        max_input_length = 64 if own == GenerationConfig.max_input_length else own
    arguments.check_integer("max_input_length", max_input_length, 1, 2**20)
    batches = arguments.check_list("batch_sizes", batch_sizes, "a list of integers")
    lengths = sorted({bucket_length(length) for length in range(1, max_input_length + 1)})
    options = dict(key=make_key(0), drafter=drafter, max_input_length=max_input_length) | options
    token = target.eos_ids[0] if target.eos_ids else 1
    sizes = [arguments.check_integer("batch_sizes", size, 1) for size in batches]
    for batch, length in itertools.product(sizes, lengths):
        inputs = np.full((batch, min(length, max_input_length)), token, np.int32)
        whole = np.full(batch, inputs.shape[1])
        plan = plan_decoding(target, inputs, config=config, input_lengths=whole, **options)
        plan = autotune.autotune(plan, first=True)
        _run_once(target, plan)
        # Later calls may decode plainly.
        if plan.may_learn and plan.learned_key and plan.config.gamma:
            _run_once(target, plan.plainly())
    return len(lengths) * len(sizes)


def _run_once(target: LanguageModel, plan: Plan) -> None:
    """Runs one iteration of a plan, so that its programs are compiled."""
    request = plan.request()
    if plan.stop or plan.deadline:
        state, _ = plan.start()
        finish(target, advance(request.network, request.drafter, state, np.int32(1)), request)
    else:
        finish(target, decode_plan(plan, max_iterations=np.int32(1)), request)
