"""Measures once what iterations cost on this machine, and keeps the numbers behind `gamma="auto"`.

A measurement is for one target, drafter, number of rows and kind of sampling. It takes seconds,
most of them for compilation. The numbers are kept in the process, and in small files in the user's
cache folder. A file that does not hold what was written there is measured anew; if no file can be
written, the numbers hold for this process.

How long iterations take depends on the shapes of the weights. How many drafted tokens are accepted
depends on the weights themselves, so that is remembered for the arrays of one target and drafter.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import pathlib
import platform
import re
import time
import weakref
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.cpu import native
from specdec_jax.decoding.request import Plan, Request
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.files import user_cache, writing
from specdec_jax.files.reading import quote_value, read_json
from specdec_jax.models.network import Network
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.adaptive_gamma import MAXIMUM, PROBE, Auto
from specdec_jax.speculative.drafter import Drafter, FullDrafter
from specdec_jax.speculative.iteration import ChainDecoding
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.sampling import SamplingMode
from specdec_jax.speculative.state import Counts, DecodeState, StaticConfig
from specdec_jax.speculative.strategy import prefill

# Draft lengths that are timed: the longest for every width of the target's call, and the shortest
# for the widest.
TIMED = (0, 2, 4, 5, 8)
# The acceptance rate that a drafter may have; what is added to the expected rate for rows that
# differ; the number of tokens in an output.
_HOPED, _SPREAD, _TOKENS = 0.9, (-0.2, 0.0, 0.2), 16
# The least gain that makes drafting worth while, and the part of it that an iteration without a
# draft may cost; and that part where earlier requests have shown whether drafting pays.
_GAIN, _LOSS, _LOSS_KNOWN = 0.03, 0.1, 0.5
# The least gain by what earlier requests have shown. What iterations cost was measured at another
# moment, and is off by some percent on a machine that others share.
_GAIN_KNOWN = 0.04
_NEVER = 1e6  # a cost at which a draft is never chosen
# How many tokens of earlier requests are remembered; for how many they count at most; and one in
# how many requests that would begin without drafts looks whether drafts would pay by now.
_REMEMBERED, _WEIGHT, _LOOK = 60, 12.0, 16
# How many batches are timed before their times count, the first left out; and how many do at most.
_FEW, _TIMES = 2, 5
# The share of time that looks at the slower way may take, but for one in `_LOOK`; after how many
# choices without enough times rates decide.
_SHARE, _HOPELESS = 0.01, 12
# Seconds for all passes; least and most passes; seconds and most iterations of one timed call,
# which must be long enough for its start not to count, and else short: then on a busy machine some
# of many calls are not interrupted.
_BUDGET, _PASSES, _PASS, _STEPS = 2.0, (3, 18), 0.02, 128
_LARGEST = 65_536  # bytes of a file; larger ones are not read
_LOG = logging.getLogger(__name__)


class Costs(NamedTuple):
    """Measured costs, in units of an iteration of plain decoding.

    Attributes:
      iterations: cost of an iteration that drafts 0, 1, … `MAXIMUM` tokens.
      prefill: cost of what the drafter does once for a request, above all its encoder.
      seconds: seconds that an iteration of plain decoding takes.
      acceptance: acceptance rate that a row begins with: the default of `Auto`, unless `specdec
        tune` has measured it.
    """

    iterations: tuple[float, ...]
    prefill: float
    seconds: float
    acceptance: float = Auto.acceptance

    def _expected(self, rows: int, acceptance: float) -> np.ndarray:
        """Returns the expected cost of a token with drafts of 0, 1, … tokens, as for `iterations`.

        A single row chooses its own γ. Several rows share the target's call, which the longest
        draft widens for all of them; there the rate is averaged over rows that differ.
        """
        rates = [acceptance]
        if rows > 1:
            rates = [min(max(acceptance + more, 0), 0.97) for more in _SPREAD]
        tokens = np.mean([np.cumsum(rate ** np.arange(MAXIMUM + 1)) for rate in rates], axis=0)
        return np.array(self.iterations) / tokens

    @functools.cache
    def pays(self, rows: int, learns: bool = False, limit: int = _TOKENS) -> bool:
        """Returns whether drafting could be faster than plain decoding at all.

        A single row may have a drafter that is nearly always right, and so may requests that learn
        from earlier ones (`learns`), unless `specdec tune` knows better. In a program that may
        draft, an iteration without a draft costs more than one of plain decoding. That is lost
        wherever nothing is accepted, so it may only be a small part of what can be gained. With
        `learns` a request begins with what earlier ones have shown (`policy`) and loses it only now
        and then, so the part may be larger; and an output may have all of `limit` tokens.
        """
        tuned = self.acceptance != Auto.acceptance
        hoped = _HOPED if rows == 1 or learns and not tuned else self.acceptance
        least = self._expected(rows, hoped).min()
        length = limit if learns else min(limit, _TOKENS)
        gain, loss = 1 / (least + self.prefill / length) - 1, self.iterations[0] - 1
        return bool(gain > _GAIN and loss < (_LOSS_KNOWN if learns else _LOSS) * gain)

    def policy(
        self,
        rows: int,
        learned: "Learned | None" = None,
        limit: int = _TOKENS,
        times: "Times | None" = None,
    ) -> Auto | None:
        """Returns the policy for `rows` rows decoded together, which begin with what was `learned`.

        None if plain decoding is faster by what was learned, for outputs of up to `limit` tokens,
        or by the `times` of batches; now and then the other way is looked at all the same.
        """
        costs, rate = np.array(self.iterations), self.acceptance
        begin = {"acceptance": rate}
        if learned is not None:
            weight, look = Auto.weight + learned.examined, learned.requests % _LOOK == 0
            acceptance = (Auto.weight * self.acceptance + learned.accepted) / weight
            begin = dict(acceptance=acceptance, weight=min(weight, _WEIGHT))
            begin |= dict(ending=learned.ending, look=float(look))
            rate = acceptance * (1 - learned.ending)
            # An iteration without a draft costs a little more in a program that may draft than in
            # one that never does.
            best = self._expected(rows, rate).min() + self.prefill / learned.expected_length(limit)
            faster = best < 1 / (1 + _GAIN_KNOWN)
            if times is not None and times.decide:
                # Rows wait for the slowest, and rows that are done cost little: no rate tells.
                if not times.drafts:
                    return None
            elif learned.examined and not look and not faster:
                return None
            rate = max(rate, self.acceptance) if look else rate
        if rows > 1:
            most = max(PROBE, int(np.argmin(self._expected(rows, rate))))
            costs[1 + most :] = _NEVER
        return _make_policy(tuple(costs.tolist())).with_numbers(**begin)


@functools.cache
def _make_policy(costs: tuple[float, ...]) -> Auto:
    return Auto(MAXIMUM, costs=costs)


class Learned(NamedTuple):
    """What was learned in this process about drafts.

    Attributes:
      examined: number of drafted tokens that were examined; only the latest count.
      accepted: how many of those were accepted.
      requests: for how many requests γ was chosen by it so far.
      tokens: how many tokens the requests with these drafts committed.
      ended: how many of them ended a row by themselves: an EOS or a stop string.
    """

    examined: float = 0.0
    accepted: float = 0.0
    requests: int = 0
    tokens: float = 0.0
    ended: float = 0.0

    @property
    def ending(self) -> float:
        """The part of tokens that end a row by themselves; stop strings may leave none of a row."""
        return min(1.0, self.ended / max(self.tokens, 1))

    def expected_length(self, limit: int) -> float:
        """Returns the number of tokens to expect in an output of up to `limit`."""
        return (1 - (1 - self.ending) ** limit) / self.ending if self.ended else limit


class Times(NamedTuple):
    """How long the latest batches of several rows took, in order.

    Attributes:
      drafting, plain: seconds with drafts, and without, over the number of iterations that plain
        decoding would take. The first of each is left out of all judgement: a program was compiled.
      choices: how often γ was chosen by them so far.
    """

    drafting: tuple[float, ...] = ()
    plain: tuple[float, ...] = ()
    choices: int = 0

    @property
    def few(self) -> bool:
        """Whether more are needed of one kind."""
        return min(len(self.drafting), len(self.plain)) <= _FEW

    @property
    def decide(self) -> bool:
        """Whether a choice is made by them: not if many brought none, as of too short batches."""
        return not self.few or self.choices < _HOPELESS

    def _compare(self) -> tuple[float, bool]:
        """Returns the speed with drafts over that without, and whether the slower way is due."""
        gain = float(np.median(self.plain[1:]) / np.median(self.drafting[1:]))
        lost = max(gain, 1 / gain) - 1
        return gain, self.choices % max(_LOOK, math.ceil(lost / _SHARE)) == 0

    @property
    def drafts(self) -> bool:
        """Whether the next batches draft: if that was faster, or to find out."""
        if self.few:
            return len(self.drafting) <= _FEW
        gain, other = self._compare()
        return (gain > 1 + _GAIN_KNOWN) != other

    @property
    def looks(self) -> bool:
        """Whether the next batches are to find out."""
        return self.few or self._compare()[1]

    def add(self, seconds: float, drafts: bool) -> "Times":
        """Returns the times with those of another batch."""
        known = self.drafting if drafts else self.plain
        latest = (*known[:1], *known[1:][1 - _TIMES :], seconds)
        return self._replace(drafting=latest) if drafts else self._replace(plain=latest)


def autotune(
    plan: Plan,
    first: bool = False,
    once: bool = False,
    timed: str | None = None,
    width: int | None = None,
) -> Plan:
    """Chooses γ = "auto" by what iterations cost here; returns the plan with the choice.

    The first call of a kind measures the costs, and keeps them for this process and, in a small
    file, for others. Where drafting would not pay, the plan has no drafter. A plan of which γ was
    given is returned as it is.

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
    learned, own = None, f"{key} {_identify(plan.network)} {_identify(plan.drafter)}"
    times, place, looks = None, None, False
    if plan.may_learn and not first:
        learned = _learned.get(own, Learned())
        _learned[own] = learned._replace(requests=learned.requests + 1)
        looks = learned.requests % _LOOK == 0 or not learned.examined and learned.requests < 2
    if learned is not None and timed is not None and rows > 1:
        width = bucket_length(int(plan.input_lengths.max())) if width is None else width
        place = own, timed, width, plan.slots
        times = _times.get(place, Times())
        _times[place] = times._replace(choices=times.choices + 1)
        looks = times.looks if times.decide else looks
    policy = costs.policy(rows, learned, limit, times)
    known: dict[str, Any] = dict(learned_key=own, times_key=place, looks=looks)
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
        init = functools.partial(_init_drafter, *arguments)
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
        learn(request.learned_key, Learned(examined, accepted, 0, *ends))
        place = request.times_key
        if place is not None and seconds is not None and result.lengths.any():
            drafts, each = request.drafter is not None, seconds / int(result.lengths.max())
            _times[place] = _times.get(place, Times()).add(each, drafts)


@functools.partial(jax.jit, static_argnames=("config", "slots"))
def _init_drafter(
    target: Network, drafter: Drafter, config: StaticConfig, slots: int, given: PrefillInputs
) -> Any:
    """Does the drafter's part of `prefill`, but for an encoder that it shares with the target."""
    del config
    ids, shared = given.inputs, {}
    if drafter.reads_encoder:
        model = target.module.config
        # Not zeros: the compiler would simplify products with them.
        made_up = 1e-3 * ids[..., None].astype(model.dtype)
        shared = {"encoded": jnp.broadcast_to(made_up, (*ids.shape, model.encoded_dim))}
    return drafter.init(ids, given.input_lengths, given.tokens, slots, **shared)


# What this process knows, by the keys of `costs_key`, and of `Plan.learned_key`, times by
# `Plan.times_key`; descriptions by
# `id` of what they describe; numbers of what has certain arrays, by their `id`s, and by its own.
_known: dict[str, Costs] = {}
_learned: dict[str, Learned] = {}
_times: dict[tuple, Times] = {}
_described: dict[int, tuple[weakref.ref, str]] = {}
_numbered: dict[tuple[int, ...], tuple[list[weakref.ref], int]] = {}
_folder: pathlib.Path | None = None
_nodes: dict[int, tuple[weakref.ref, int]] = {}
_NUMBERS = itertools.count()


def keep_costs(folder: pathlib.Path) -> None:
    """Keeps costs in this folder from now on, not in the user's cache; forgets what is known.

    A benchmark then measures them when it measures the rest: on a busy machine they change.
    """
    global _folder
    _folder = folder
    _known.clear()


def load_costs(key: str) -> Costs | None:
    """Returns the costs that this process or another has measured for a key of `costs_key`.

    None if none has.
    """
    if key not in _known and (path := _costs_path(key)) is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = read_json(path, _LARGEST)
            if found["key"] == json.loads(key):
                _known[key] = read_costs(found["costs"])
    return _known.get(key)


def read_costs(values: dict[str, Any]) -> Costs:
    """Returns the costs in JSON values; raises an error for anything but what `_asdict` gives."""
    costs = Costs(**{**values, "iterations": tuple(values["iterations"])})
    positive, others = (*costs.iterations, costs.seconds), (costs.prefill, costs.acceptance)
    sound = (
        len(costs.iterations) == MAXIMUM + 1
        and all(type(number) in (int, float) for number in (*positive, *others))
        and all(0 < number < 1e6 for number in positive)
        and 0 <= costs.prefill < 1e6
        and 0 <= costs.acceptance <= 1
    )
    if not sound:
        expected = f"costs of {MAXIMUM + 1} kinds of iterations"
        raise ValueError(f"costs: got {quote_value(values)}, expected {expected}")
    return costs


def save_costs(key: str, costs: Costs) -> None:
    """Keeps costs for this process and, if possible, for others."""
    _known[key] = costs
    if (path := _costs_path(key)) is None or writing.is_pass_through(path):
        return
    record = {"key": json.loads(key), "costs": costs._asdict()}
    try:
        writing.write_file(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        _LOG.info("%s: %s: what was measured holds for this process", path, error)


def learn(key: str, seen: Learned) -> None:
    """Adds what a request has shown of its drafts and of how its rows ended.

    Only for argmax, where the output does not depend on how much is drafted.

    Args:
      key: a `Plan.learned_key`.
      seen: of this request alone.
    """
    before = _learned.get(key, Learned())
    total = before.examined + seen.examined
    kept = min(1.0, _REMEMBERED / max(total, 1))
    _learned[key] = Learned(
        examined=kept * total,
        accepted=kept * (before.accepted + seen.accepted),
        requests=before.requests,
        tokens=kept * (before.tokens + seen.tokens),
        ended=kept * (before.ended + seen.ended),
    )


def _costs_path(key: str) -> pathlib.Path | None:
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        return (_folder or user_cache.private_folder("costs")) / name
    except (ValueError, OSError) as error:
        _LOG.info("%s: what was measured holds for this process", error)
        return None


def costs_key(plan: Plan) -> str:
    """Returns what the costs of a plan with γ = "auto" depend on, as JSON.

    The lengths of inputs and outputs are rounded up to a power of two.
    """
    config, sizes = plan.config, (bucket_length(int(plan.input_lengths.max())), plan.slots)
    assert plan.drafter is not None and plan.auto_rows is not None, "without a drafter γ is 0"
    assert isinstance(config, StaticConfig), "a beam search has no automatic γ"
    length, slots = (max(64, 2 ** (int(size) - 1).bit_length()) for size in sizes)
    described, processor = (_describe(plan.network), _describe(plan.drafter)), config.mode.processor
    mode = config.mode._replace(processor=None)
    of_request = plan.auto_rows, length, slots, processor is not None
    return _write_key(*described, config.verifier.name, mode, *of_request)


@functools.lru_cache
def _write_key(
    target: str,
    drafter: str,
    verifier: str,
    sampling: SamplingMode,
    rows: int,
    length: int,
    slots: int,
    own_processor: bool,
) -> str:
    mode = sampling._asdict()
    del mode["processor"]
    of_request = dict(rows=rows, length=length, slots=slots, own_processor=own_processor)
    key = dict(verifier=verifier, sampling=mode, target=target, drafter=drafter, **of_request)
    return json.dumps(machine_key() | key, sort_keys=True)


@functools.cache
def machine_key() -> dict[str, Any]:
    """Returns what tells machines apart, and the versions of what decides how fast they are."""
    device = jax.devices()[0]
    return {
        **{name: metadata.version(name) for name in ("specdec_jax", "jax", "jaxlib")},
        "processor": read_processor_name(),
        "cores": count_cores(),
        "device": f"{device.platform}: {device.device_kind}, {jax.device_count()}",
        "flags": os.environ.get("XLA_FLAGS", ""),
        "kernel": native.library_digest()
        if device.platform == "cpu"
        else os.environ.get(native.SETTING),
    }


def count_cores() -> int | None:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def read_processor_name() -> str:
    """Returns the processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = next(line for line in file if line.startswith("model name"))
        return named.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _describe(node: Any) -> str:
    """Returns a hash of what decides how long a network's or drafter's calls take.

    It is made of the kind, the settings, and the shapes and dtypes of all arrays.
    """
    number = id(node)
    if number in _described and _described[number][0]() is node:
        return _described[number][1]
    leaves, structure = jax.tree.flatten(node)
    shapes = [(str(jnp.result_type(leaf)), np.shape(leaf)) for leaf in leaves]
    text = re.sub(r"0x[0-9a-f]+", "", f"{type(node).__name__} {structure} {shapes}")
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    if hasattr(node, "__weakref__"):
        _described[number] = weakref.ref(node, lambda _: _described.pop(number, None)), found
    return found


def _identify(node: Any) -> int:
    """Returns a number for the arrays of a network or drafter, the same as long as these live."""
    own = id(node)
    if own in _nodes and _nodes[own][0]() is node:  # looking at all arrays takes longer
        return _nodes[own][1]
    arrays = [leaf for leaf in jax.tree.leaves(node) if isinstance(leaf, (np.ndarray, jax.Array))]
    place = tuple(map(id, arrays))
    refs, number = _numbered.get(place, ([], -1))
    if number < 0 or any(ref() is not array for ref, array in zip(refs, arrays, strict=True)):
        number = next(_NUMBERS)
        refs = [weakref.ref(array, lambda _: _numbered.pop(place, None)) for array in arrays]
        _numbered[place] = refs, number
    if hasattr(node, "__weakref__"):
        _nodes[own] = weakref.ref(node, lambda _: _nodes.pop(own, None)), number
    return number


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
    return Costs(iterations, first / plain, plain)


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
