"""Runs the decode loop: `advance`, one jitted `while_loop`, in one call or in several."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.decoding.beams import run_search
from specdec_jax.decoding.request import Plan, Request
from specdec_jax.decoding.results import Committed, GenerationResult, collect
from specdec_jax.decoding.stop import cut
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.iteration import iterate
from specdec_jax.speculative.prefill import PrefillInputs, prefill
from specdec_jax.speculative.state import DecodeState, StaticConfig
from specdec_jax.speculative.tree_iteration import iterate_tree

FOREVER = np.int32(2**31 - 1)
# Number of iterations after which the host looks for stop strings.
STOP_EVERY = 8


@isolated
@functools.partial(jax.jit, donate_argnames="state")
def advance(target, drafter, state: DecodeState, max_iterations, max_done=None) -> DecodeState:
    """Runs iterations until every row is done, at most `max_iterations`: the one decode loop of the
    package.

    Args:
      target: the target's `Network`, which is `Request.network`.
      drafter: a `Drafter`, or None for plain decoding (γ = 0); it is `Request.drafter`.
      state: from `prepare` or an earlier `advance`; its buffers are reused (donated).
      max_iterations: traced; a few for streaming and progress bars. An `np.int32`, since a Python
        int compiles anew.
      max_done: traced; the loop ends as soon as this many rows are done, so that they can be
        refilled. None: all.
    """
    return _loop(
        target, drafter, state, max_iterations, len(state.done) if max_done is None else max_done
    )


def _loop(target, drafter, state: DecodeState, max_iterations, max_done) -> DecodeState:
    def more(carry):
        iteration, state = carry
        return (iteration < max_iterations) & (jnp.sum(state.done.astype(jnp.int32)) < max_done)

    def body(carry):
        iteration, state = carry
        return iteration + 1, (iterate if state.config.tree is None else iterate_tree)(
            target, drafter, state
        )

    return constrain_sharding(
        jax.lax.while_loop(more, body, (jnp.int32(0), state))[1], target.rules
    )


@functools.partial(jax.jit, static_argnames=("config", "slots"))
def _decode(
    target: Network,
    drafter: Drafter | None,
    config: StaticConfig,
    slots: int,
    inputs: PrefillInputs,
    max_iterations: ArrayLike,
) -> dict[str, jax.Array]:
    """Runs prefill and loop in one program; returns what the host reads of the result."""
    state = prefill(target, drafter, config, slots, inputs)
    return Committed.fields(_loop(target, drafter, state, max_iterations, len(state.done)))


def complete(target, plan: Plan, places, begun: float) -> GenerationResult:
    """Decodes the inputs at `places` to their end; returns the errors of rows with the result.

    Args:
      target: the target.
      plan: the checked arguments.
      places: numbers of inputs, as for `Plan.start`.
      begun: when the deadline began to count (`time.monotonic()`).
    """
    if plan.search is not None:
        return run_search(target, plan, places)
    if not plan.stop and not plan.deadline:
        return collect(target, decode_plan(plan, places), plan.request(places))
    state, request = plan.start(places)
    for state in advance_by(
        target, state, request, np.int32(1 if plan.deadline else STOP_EVERY), begun
    ):
        pass
    return collect(target, state, request)


def decode_plan(plan: Plan, places=None, max_iterations=FOREVER) -> "Committed":
    """Returns what the inputs at `places` have committed after at most `max_iterations`, in one
    call of the device."""
    found = _decode(*plan.arguments(places), max_iterations)
    return Committed(**jax.device_get(found), config=plan.config)


def advance_by(
    target, state: DecodeState, request: Request, every, begun: float
) -> Iterator[DecodeState]:
    """Yields the state after every `every` iterations, until all rows are done, have met a stop
    string, or time is up."""
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
    """Returns `state` with those rows marked as done that have met a stop string.

    `starts [B]` is the number of tokens in each row's start token and prefix.
    """
    lengths, done, tokens = jax.device_get((state.lengths, state.done, state.tokens))
    met = [
        cut(target.vocabulary, tokens[row, start : lengths[row]].tolist(), stop) is not None
        for row, start in enumerate(starts)
    ]
    done, rules = done | met, target.network.rules
    # Unlike jnp.asarray, device_put compiles nothing.
    done = jax.device_put(done, may_alias=False) if rules is None else rules.put(done)
    return dataclasses.replace(state, done=done)
