"""Chooses γ = "auto" by what iterations cost on this machine, which is measured once.

A measurement is for one target, drafter, number of rows and kind of sampling
(`iteration_costs.py`). It takes seconds, most of them for compilation. What earlier requests have
shown (`past_requests.py`) counts as well.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding import past_requests
from specdec_jax.decoding.iteration_costs import Costs, costs_key, load_costs, save_costs
from specdec_jax.decoding.past_requests import Learned, identify
from specdec_jax.decoding.request import Plan, Request
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.models.network import Network
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.adaptive_gamma import MAXIMUM, Auto
from specdec_jax.speculative.drafter import Drafter, FullDrafter
from specdec_jax.speculative.iteration import ChainDecoding
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.state import Counts, DecodeState, StaticConfig
from specdec_jax.speculative.strategy import prefill

# Draft lengths that are timed: the longest for every width of the target's call, and the shortest
# for the widest.
TIMED = (0, 2, 4, 5, 8)
# Seconds for all passes; least and most passes; seconds and most iterations of one timed call,
# which must be long enough for its start not to count, and else short: then on a busy machine some
# of many calls are not interrupted.
_BUDGET, _PASSES, _PASS, _STEPS = 2.0, (3, 18), 0.02, 128


def autotune(
    plan: Plan,
    first: bool = False,
    once: bool = False,
    timed: str | None = None,
    width: int | None = None,
) -> Plan:
    """Chooses γ = "auto" by what iterations cost here; returns the plan with the choice.

    The first call of a kind measures the costs, and keeps them for this process and, in a small
    file, for others. Where drafting would not pay, the plan has no drafter. A plan with a given γ
    is returned unchanged.

    Args:
      plan: the checked arguments.
      first: whether to draft as at the first call of a kind, whatever earlier requests have shown.
      once: whether the choice is for all inputs of a job, so that later ones cannot learn from it.
      timed: the program that decodes whole batches and tells `record` how long they took; None:
        nothing does. Where several rows are timed, their times decide.
      width: padded length of the inputs that it is for; None: that of all.
    """
    if plan.auto_rows is None:
        return plan
    key = costs_key(plan)
    costs, rows, limit = find_costs(plan, key), plan.auto_rows, int(plan.limits.max())
    if not costs.pays(rows, plan.may_learn and not once, limit):
        return plan.plainly()
    own = f"{key} {identify(plan.network)} {identify(plan.drafter)}"
    learned = past_requests.count_request(own) if plan.may_learn and not first else None
    times, place, explores = None, None, learned is not None and learned.explores
    if learned is not None and timed is not None and rows > 1:
        width = bucket_length(int(plan.input_lengths.max())) if width is None else width
        place = own, timed, width, plan.slots
        times = past_requests.count_choice(place)
        times = times._replace(expected=costs.predict(rows, learned, limit, True)[1])
        explores = times.explores if times.decides else explores
    policy = costs.policy(rows, learned, limit, times)
    known: dict[str, Any] = dict(learned_key=own, times_key=place, explores=explores)
    if policy is None:
        return dataclasses.replace(plan.plainly(), **known)
    return dataclasses.replace(plan, policy=policy.rows(len(plan.limits)), auto_rows=None, **known)


def may_pay(plan: Plan) -> bool:
    """Returns whether drafting may pay for some requests of a plan with γ = "auto"."""
    assert plan.auto_rows is not None, "its γ is chosen"
    return find_costs(plan).pays(plan.auto_rows, plan.may_learn, int(plan.limits.max()))


def find_costs(plan: Plan, key: str | None = None) -> Costs:
    """Returns the costs of a plan with γ = "auto"; measures and keeps them if nobody has.

    `key` is its `costs_key`, if that is known.
    """
    key = costs_key(plan) if key is None else key
    costs = load_costs(key)
    if costs is None:
        assert plan.drafter is not None and plan.auto_rows is not None, "without a drafter γ is 0"
        timed = dataclasses.replace(plan, policy=Auto().rows(len(plan.limits)))
        numbers = np.arange(plan.auto_rows // plan.samples) % len(plan.limits)
        arguments = timed.arguments(numbers, bucket_length(int(plan.input_lengths.max())))
        network, drafter, _, slots, inputs = arguments
        init = functools.partial(_init_drafter, network, drafter, slots, inputs)
        costs = measure(plan.network, plan.drafter, prefill(*arguments), init)
        save_costs(key, costs)
    return costs


def record(request: Request, result: GenerationResult, seconds: float | None = None) -> None:
    """Records how many drafted tokens were accepted, for later requests with γ = "auto".

    Results with errors are left out, as are requests whose outputs would depend on it. `seconds` is
    the time of a whole batch, which ended with its last row.
    """
    if request.learned_key is not None and not any(result.errors):
        examined = int(result.stats.examined_by_position.sum())
        accepted = int(result.stats.accepted_by_position.sum())
        ended = sum(reason in ("eos", "stop") for reason in result.finish_reasons)
        # Those of requests without drafts, which forget nothing, would count for ever.
        ends = (int(result.lengths.sum()), ended) if examined else (0, 0)
        past_requests.learn(request.learned_key, Learned(examined, accepted, 0, *ends))
        place = request.times_key
        if place is not None and seconds is not None and result.lengths.any():
            drafts, each = request.drafter is not None, seconds / int(result.lengths.max())
            past_requests.add_time(place, each, drafts)


@functools.partial(jax.jit, static_argnames="slots")
def _init_drafter(target: Network, drafter: Drafter, slots: int, inputs: PrefillInputs) -> Any:
    """Does the drafter's part of `prefill`, but for an encoder that it shares with the target."""
    ids, shared = inputs.inputs, {}
    if drafter.reads_encoder:
        model = target.module.config
        # Not zeros: the compiler would simplify products with them.
        made_up = 1e-3 * ids[..., None].astype(model.dtype)
        shared = {"encoded": jnp.broadcast_to(made_up, (*ids.shape, model.encoded_dim))}
    return drafter.init(ids, inputs.input_lengths, inputs.tokens, slots, **shared)


# Measuring.


@jax.jit
def iterate_steps(
    network: Network, drafter: Drafter | None, state: DecodeState, steps: jax.Array
) -> DecodeState:
    """Runs `steps` iterations of the decode loop, each from the same committed lengths.

    Each of them drafts, scores, verifies and commits. What an iteration writes the next one reads,
    so that the compiler cannot remove anything from the loop.

    Args:
      network: the target.
      drafter: the drafter; None is plain decoding.
      state: after the prefill.
      steps: number of iterations, traced.
    """

    def body(_: jax.Array, state: DecodeState) -> DecodeState:
        return ChainDecoding().iterate(network, drafter, state).replace(lengths=lengths, done=done)

    lengths, done = state.lengths, state.done
    return jax.lax.fori_loop(0, steps, body, state)


def measure(
    network: Network, drafter: Drafter, state: DecodeState, prefill: Callable[[], object]
) -> Costs:
    """Returns the costs of speculative iterations, timed in turn with those of plain decoding.

    Args:
      network: the target.
      drafter: the drafter.
      state: after the prefill, with an `Auto` as its policy.
      prefill: makes the drafter's own state.
    """
    plain_state, drafting = _make_endless_states(state)
    run, full = functools.partial(iterate_steps, network), FullDrafter(drafter)
    variants: dict[int | str, Callable[..., DecodeState]] = {
        gamma: functools.partial(
            run, full, drafting.replace(gamma=jnp.full_like(state.gamma, gamma))
        )
        for gamma in TIMED
    }
    variants["plain"] = functools.partial(run, None, plain_state)

    def time_steps(name: int | str, steps: int) -> float:
        return _time_call(functools.partial(variants[name], np.int32(steps))) / steps

    for name in variants:
        time_steps(name, 1)  # compiles
    steps = int(np.clip(_PASS / max(time_steps("plain", 1), 1e-6), 1, _STEPS))
    passes, start, (least, most) = [], time.perf_counter(), _PASSES
    while len(passes) < least or len(passes) < most and time.perf_counter() - start < _BUDGET:
        passes.append({name: time_steps(name, steps) for name in variants})
    # On a busy machine medians are as often of interrupted calls, and the fastest call is an
    # exception where the processor changes its speed.
    seconds = {name: sorted(one[name] for one in passes)[1] for name in variants}
    # A program that may draft is no faster: else plain decoding was interrupted.
    plain = min(seconds["plain"], seconds[0])
    _time_call(prefill)
    first = min(_time_call(prefill) for _ in range(3))
    timed = {gamma: seconds[gamma] / plain for gamma in TIMED}
    iterations = interpolate_costs(timed, in_steps=bool(state.config.widths))
    return Costs(iterations, first / plain)


def _make_endless_states(state: DecodeState) -> tuple[DecodeState, DecodeState]:
    """Returns states whose rows never end: one for plain decoding, and one that drafts."""
    batch, config = len(state.done), state.config
    endless = state.replace(
        done=jnp.zeros(batch, bool),
        limits=state.lengths + MAXIMUM + 2,
        eos_ids=jnp.full_like(state.eos_ids, -1),
    )
    plain = endless.replace(
        config=StaticConfig(0, config.mode, config.vocab_size),
        policy=None,
        policy_state=None,
        draft_state=None,
        counts=Counts.zero(batch, 0),
        last_draft=jnp.zeros((batch, 0), jnp.int32),
        last_seen=None,
        settings=None,
        gamma=jnp.zeros_like(state.gamma),
    )
    # With these costs the longest draft is always the best.
    longest = Auto(MAXIMUM, costs=tuple(2.0**-gamma for gamma in range(MAXIMUM + 1))).rows(batch)
    return plain, endless.replace(policy=longest, policy_state=jax.jit(Auto.init)(longest))


def _time_call(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def interpolate_costs(timed: Mapping[int, float], in_steps: bool) -> tuple[float, ...]:
    """Returns the costs of iterations that draft 0, 1, … `MAXIMUM` tokens, given those of `TIMED`.

    If several widths of the target's call are compiled (`in_steps`), drafts whose calls are equally
    wide differ by draft steps only; the two timed drafts of the widest call show what a draft step
    costs.
    """
    gammas = range(MAXIMUM + 1)
    if not in_steps:
        return tuple(np.interp(gammas, TIMED, [timed[gamma] for gamma in TIMED]).tolist())
    shortest, longest = TIMED[-2:]
    step = max(0.0, (timed[longest] - timed[shortest]) / (longest - shortest))
    ends = [width - 1 for width in Auto(MAXIMUM).widths]
    last = [next(end for end in ends if end >= gamma) for gamma in gammas]
    return tuple(max(timed[end] - (end - gamma) * step, 1e-6) for gamma, end in enumerate(last))
