"""Keeps what iterations cost on this machine, in the process and in the user's cache folder.

Costs depend on the machine, the shapes of the weights, the number of rows, the lengths and the kind
of sampling. A file that does not hold what was written there counts as none; if no file can be
written, costs hold for this process.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import platform
import re
import weakref
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.cpu import native
from specdec_jax.decoding.past_requests import GAIN, Learned, Times
from specdec_jax.decoding.request import Plan
from specdec_jax.files import user_cache, writing
from specdec_jax.files.reading import quote_value, read_json
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.adaptive_gamma import MAXIMUM, PROBE, Auto
from specdec_jax.speculative.sampling import SamplingMode
from specdec_jax.speculative.state import StaticConfig

# The acceptance rate that a drafter may have; what is added to the expected rate for rows that
# differ; the number of tokens in an output.
_HOPED, _SPREAD, _TOKENS = 0.9, (-0.2, 0.0, 0.2), 16
# The least gain that makes drafting worth while, and the part of it that an iteration without a
# draft may cost; and that part where earlier requests have shown whether drafting pays.
_GAIN, _LOSS, _LOSS_KNOWN = 0.03, 0.1, 0.5
_WEIGHT = 12.0  # for how many tokens those of earlier requests count at most
_NEVER = 1e6  # a cost at which a draft is never chosen
_LARGEST = 65_536  # bytes of a file; larger ones are not read
_LOG = logging.getLogger(__name__)


class Costs(NamedTuple):
    """Measured costs, in units of an iteration of plain decoding.

    Attributes:
      iterations: cost of an iteration that drafts 0, 1, … `MAXIMUM` tokens.
      prefill: cost of what the drafter does once for a request, above all its encoder.
      acceptance: acceptance rate that a row begins with: the default of `Auto`, unless `specdec
        tune` has measured it.
    """

    iterations: tuple[float, ...]
    prefill: float
    acceptance: float = Auto.acceptance

    def _expected(self, rows: int, acceptance: float, waits: bool = False) -> np.ndarray:
        """Returns the expected cost of a token with drafts of 0, 1, … tokens, as for `iterations`.

        A single row chooses its own γ. Several rows share the target's call, which the longest
        draft widens for all of them; there the rate is averaged over rows that differ, or if each
        `waits` for the last of its batch, it is that of the row that is accepted the least often.
        """
        rates = [acceptance]
        if rows > 1:
            rates = [min(max(acceptance + more, 0), 0.97) for more in _SPREAD[: 1 if waits else 3]]
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

    def predict(self, rows: int, learned: Learned, limit: int, waits: bool) -> tuple[float, float]:
        """Returns the acceptance rate, and the speed of drafting over plain decoding by it.

        An iteration without a draft costs a little more in a program that may draft than in one
        that never does.
        """
        weight = Auto.weight + learned.examined
        acceptance = (Auto.weight * self.acceptance + learned.accepted) / weight
        best = self._expected(rows, acceptance * (1 - learned.ending), waits).min()
        return acceptance, float(1 / (best + self.prefill / learned.expected_length(limit)))

    def policy(
        self,
        rows: int,
        learned: Learned | None = None,
        limit: int = _TOKENS,
        times: Times | None = None,
    ) -> Auto | None:
        """Returns the policy for `rows` rows decoded together, which begin with what was `learned`.

        None if plain decoding is faster by what was learned, for outputs of up to `limit` tokens,
        or by the `times` of batches; now and then the other way is looked at all the same.
        """
        costs, rate = np.array(self.iterations), self.acceptance
        waits = times is not None and times.decides
        begin = {"acceptance": rate}
        if learned is not None:
            acceptance, gain = self.predict(rows, learned, limit, waits)
            look = learned.tries_drafts
            weight = min(Auto.weight + learned.examined, _WEIGHT)
            begin = dict(acceptance=acceptance, weight=weight)
            begin |= dict(ending=learned.ending, look=float(look))
            rate = acceptance * (1 - learned.ending)
            if waits:
                # Rows wait for the slowest, and rows that are done cost little: no rate tells.
                if times is not None and not times.drafts:
                    return None
            elif learned.examined and not look and gain <= 1 + GAIN:
                return None
            rate = max(rate, self.acceptance) if look else rate
        if rows > 1:
            most = max(PROBE, int(np.argmin(self._expected(rows, rate, waits))))
            costs[1 + most :] = _NEVER
            if waits:
                # A batch ends with the row whose drafts are accepted the least often. Others make
                # the target's call wide anyway, so such a row drafts as much as they do.
                costs[:most] = _NEVER
        return _make_policy(tuple(costs.tolist())).with_numbers(**begin)


@functools.cache
def _make_policy(costs: tuple[float, ...]) -> Auto:
    return Auto(MAXIMUM, costs=costs)


# What this process knows, by the keys of `costs_key`; descriptions by `id` of what they describe.
_known: dict[str, Costs] = {}
_described: dict[int, tuple[weakref.ref, str]] = {}
_folder: pathlib.Path | None = None


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
    sound = (
        len(costs.iterations) == MAXIMUM + 1
        and all(type(one) in (int, float) for one in (*costs.iterations, *costs[1:]))
        and all(0 < number < 1e6 for number in costs.iterations)
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
    return _write_key(
        config.mode._replace(processor=None),
        own_processor=config.mode.processor is not None,
        target=_describe(plan.network),
        drafter=_describe(plan.drafter),
        verifier=config.verifier.name,
        rows=plan.auto_rows,
        length=length,
        slots=slots,
    )


@functools.lru_cache
def _write_key(mode: SamplingMode, **others: Any) -> str:
    sampling = mode._asdict()
    del sampling["processor"]
    return json.dumps(machine_key() | others | {"sampling": sampling}, sort_keys=True)


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
