"""Runs the decode loop: `advance`, one jitted `while_loop`, in one call or in several."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.decoding.request import Plan, Request
from specdec_jax.decoding.results import GenerationResult, collect
from specdec_jax.decoding.stop import find_stop
from specdec_jax.decoding.strategies import AnyConfig, Committed, strategy_of
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.state import DecodeState

FOREVER = np.int32(2**31 - 1)
# Number of iterations after which the host looks for stop strings.
STOP_EVERY = 8

State = TypeVar("State", DecodeState, BeamState)


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
    strategy = strategy_of(state.config)

    def more(carry: tuple[jax.Array, State]) -> jax.Array:
        iteration, state = carry
        return (iteration < max_iterations) & (jnp.sum(state.done.astype(jnp.int32)) < max_done)

    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        iteration, state = carry
        return iteration + 1, strategy.iterate(target, drafter, state)

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
    strategy = strategy_of(config)
    state = strategy.prefill(target, drafter, config, slots, inputs)
    return strategy.read(_run_loop(target, drafter, state, max_iterations, len(state.done)))


def complete(
    target: LanguageModel, plan: Plan, numbers: Sequence[int] | None, start_time: float
) -> GenerationResult:
    """Decodes inputs of a plan to their end; returns the errors of rows with the result.

    Args:
      target: the target.
      plan: the checked arguments.
      numbers: those of the inputs, as for `Plan.start`.
      start_time: when the deadline began to count (`time.monotonic()`).
    """
    if not plan.stop and not plan.deadline:
        return collect(target, decode_plan(plan, numbers), plan.request(numbers))
    state, request = plan.start(numbers)
    every = np.int32(1 if plan.deadline else STOP_EVERY)
    for state in advance_by(target, state, request, every, start_time):
        pass
    return collect(target, state, request)


def decode_plan(
    plan: Plan, numbers: Sequence[int] | None = None, max_iterations: np.int32 = FOREVER
) -> Committed:
    """Returns what inputs have committed after at most `max_iterations`, in one device call."""
    return jax.device_get(_decode(*plan.arguments(numbers), max_iterations))


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
        if every == FOREVER or np.all(jax.device_get(state.done)):
            return
        if request.deadline and time.monotonic() - start_time > request.deadline:
            return


def mark_stopped(
    target: LanguageModel, state: DecodeState, starts: np.ndarray, stop: Sequence[str]
) -> DecodeState:
    """Returns `state` with those rows marked as done that have met a stop string.

    `starts [B]` is the number of tokens in each row's start token and prefix.
    """
    lengths, done, tokens = jax.device_get((state.lengths, state.done, state.tokens))
    met = [
        find_stop(target.vocabulary, tokens[row, start : lengths[row]].tolist(), stop) is not None
        for row, start in enumerate(starts)
    ]
    done, rules = done | met, target.network.rules
    # Unlike jnp.asarray, device_put compiles nothing.
    done = jax.device_put(done, may_alias=False) if rules is None else rules.put(done)
    return dataclasses.replace(state, done=done)
