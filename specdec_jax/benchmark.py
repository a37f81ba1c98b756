"""Plain against speculative decoding on one machine: wall time, α, c, v, predicted and measured improvement.

The arms are interleaved batch by batch, since the speed of a shared machine drifts; compile time is kept apart; encoders
and tokenisation are inside the wall time; one counter counts the tokens of all arms.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import checkpoints, measure, records
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.generate import GenerationResult, generate
from specdec_jax.inference import (
    SENTENCES,
    DecodingOptions,
    NamedDrafter,
    at_least,
    check_gamma,
    check_output,
    encode,
    option,
    read_sentences,
    track,
)
from specdec_jax.measure import Spread
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.t5 import PRESETS
from specdec_jax.request import bucket, fold_keys, slots
from specdec_jax.verification import LOSSY


class CheckFailed(RuntimeError):
    """What was measured contradicts what must hold; the record is written all the same."""


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions(DecodingOptions):
    """Options of `specdec benchmark`."""

    gamma: tuple[int, ...] = option((4,), "tokens drafted per target call; several, comma-separated, make one arm each")
    input_file: str | None = option(
        None, "UTF-8 text, one sentence a line, gzip or not; none: a few built-in sentences"
    )
    limit: int = option(0, "take only the first lines of the input; 0: all")
    batch_size: int = option(1, "sentences decoded together")
    repeats: int = option(3, "passes over the sentences; medians and spread are over them")
    preset: str | None = option(None, "time a target of this shape with random weights instead: " + ", ".join(PRESETS))
    drafter_preset: str | None = option(None, "the same for the drafter")
    input_length: int | None = option(None, "tokens of the input, with --preset (none: 64)")
    output: str | None = option(None, "file that the JSON record is written to")
    json: bool = option(False, "print the JSON record instead of the summary")

    def check(self) -> None:
        for name, preset in (("preset", self.preset), ("drafter_preset", self.drafter_preset)):
            if preset and preset not in PRESETS:
                raise ValueError(f"{name}: got {preset!r}, expected one of {', '.join(PRESETS)}")
        for name in ("target", "drafter", "input_file", "vocabulary", "limit"):
            if self.preset and getattr(self, name):
                raise ValueError(f"got --preset={self.preset} with --{name}, expected one or the other")
        if self.drafter_preset and not self.preset:
            raise ValueError(f"got --drafter_preset={self.drafter_preset} alone, expected --preset too")
        if self.input_length is not None and not self.preset:
            raise ValueError(f"got --input_length={self.input_length} alone, expected --preset too")
        super().check() if not self.preset else self.check_decoding()
        if not self.gamma:
            raise ValueError("gamma: got no value, expected at least one")
        for gamma in self.gamma:
            check_gamma(gamma)
            at_least(1, gamma=gamma)  # γ = 0 is the plain arm
        at_least(1, batch_size=self.batch_size, repeats=self.repeats, input_length=self.preset_length)
        at_least(0, limit=self.limit)
        if self.preset and self.preset_length > self.max_input_length:
            raise ValueError(
                f"input_length: got {self.preset_length}, expected at most max_input_length = {self.max_input_length}"
            )
        check_output(self.output)

    @property
    def preset_length(self) -> int:
        return 64 if self.input_length is None else self.input_length

    @property
    def samples_preset(self) -> bool:
        """Whether the cost of sampling is measured."""
        return bool(self.preset) and self.temperature > 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sentences that are decoded together.

    Attributes:
      inputs: what `generate` is given: strings, or ids with a preset.
      ids: their ids, EOS included.
      numbers: places of the inputs before they were sorted, from 0; fillers repeat the last.
      keys: one random key per input, by its number.
    """

    inputs: list
    ids: list[list[int]]
    numbers: list[int]
    keys: jax.Array

    @property
    def padded(self) -> int:
        return bucket(max(map(len, self.ids)))


@dataclasses.dataclass
class Arm:
    """One way of decoding and what it gave.

    Attributes:
      gamma: 0 is plain.
      decode: from a batch to a result.
      compile_seconds: of the first call for every shape.
      seconds: total wall time of each pass.
      results: one per batch, of the last pass.
    """

    gamma: int
    decode: Callable[[Batch], GenerationResult]
    compile_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    results: list[GenerationResult] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> int:
        """New tokens, EOS included: the one counter for all arms."""
        return int(sum(result.lengths.sum() for result in self.results))

    def total(self, name: str) -> int:
        return sum(getattr(result.stats, name) for result in self.results)


def run(options: BenchmarkOptions) -> None:
    """`specdec benchmark`."""
    options.check()
    target, drafter, batches = _preset(options) if options.preset else _checkpoints(options)
    record, problems = benchmark(target, drafter, batches, options)
    text = json.dumps(record, indent=1)
    try:
        print(text if options.json else records.summary(record))
    finally:  # if one of the two fails, the record is in the other
        if options.output:
            pathlib.Path(options.output).write_text(text + "\n", encoding="utf-8")
    if problems:
        raise CheckFailed("; ".join(problems))


def _checkpoints(options: BenchmarkOptions) -> tuple[LanguageModel, NamedDrafter | None, list[Batch]]:
    sentences = read_sentences([], options.input_file) if options.input_file else list(SENTENCES)
    sentences = sentences[: options.limit or None]
    target, drafter = options.load()
    ids = encode(target, sentences, options.max_input_length)
    return target, drafter, _batches(sentences, ids, options, "")


def _preset(options: BenchmarkOptions) -> tuple[LanguageModel, ModelDrafter | None, list[Batch]]:
    def model(preset: str) -> LanguageModel:
        config = dataclasses.replace(PRESETS[preset], dtype=checkpoints.choose_dtype(options.dtype, preset))
        random = LanguageModel.random(config, name=preset)
        random.eos_ids = ()  # every output has full length
        return random

    assert options.preset
    target = model(options.preset)
    drafter = options.reduced(model(options.drafter_preset)) if options.drafter_preset else None
    if drafter is None:
        options.refuse_reduction()
    shape = (options.batch_size, options.preset_length)
    ids = np.random.default_rng(options.seed).integers(2, target.config.vocab_size, shape).tolist()
    return target, drafter, _batches(ids, ids, options, [])


def _batches(inputs: list, ids: list, options: BenchmarkOptions, filler) -> list[Batch]:
    """Sorts by length and cuts into batches; the last is filled up with empty inputs, so that one number of rows compiles."""
    size = min(options.batch_size, len(inputs))
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]) if size > 1 else 0)
    keys, batches = fold_keys(jax.random.key(options.seed), np.arange(len(inputs))), []
    for first in range(0, len(order), size):
        chosen = order[first : first + size]
        missing = size - len(chosen)
        numbers = chosen + [chosen[-1]] * missing
        rows = [inputs[i] for i in chosen] + [filler] * missing
        batches.append(Batch(rows, [ids[i] for i in chosen] + [[]] * missing, numbers, keys[np.array(numbers)]))
    return batches


def benchmark(
    target: LanguageModel, drafter: NamedDrafter | None, batches: Sequence[Batch], options: BenchmarkOptions
) -> tuple[dict, list[str]]:
    """Times the arms and the single steps; returns the record and what contradicts exactness (nothing, one hopes).

    A drafter without a model has no steps to time: c is then not measured, and predictions count it as 0.
    With a preset the weights are random, so that α would mean nothing: only plain decoding and steps are timed, with the
    cost of sampling where the temperature is not 0.
    """

    def arm(gamma: int) -> Arm:
        return Arm(gamma, lambda batch: generate(
            target, batch.inputs, drafter=drafter if gamma else None, gamma=gamma, key=batch.keys,
            **options.decoding(plain=not gamma),
        ))  # fmt: skip

    speculative = options.gamma if drafter is not None and not options.preset else ()
    arms = {"plain": arm(0)} | {f"gamma {gamma}": arm(gamma) for gamma in speculative}
    steps = _step_arms(target, drafter, batches, options)
    _warm_up(arms, steps, batches)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.repeats):
        turn = f"pass {repeat + 1} of {options.repeats}"
        for name in track(measure.rotated(steps, repeat), len(steps), f"steps, {turn}"):
            seconds[name].append(measure.timed(steps[name]))
        _one_pass(arms, batches, repeat, turn)
    per_step = {name: Spread.of(np.array(times) / _steps_in(name)) for name, times in seconds.items()}
    record = _record(target, drafter, arms, per_step, batches, options)
    if options.samples_preset:
        record["sampling_cost"] = {str(gamma): records.sampling_cost(gamma, seconds) for gamma in options.gamma}
    return record, _problems(record, arms, options, target)


def _step_arms(target, drafter, batches, options: BenchmarkOptions) -> dict[str, Callable[[], object]]:
    """Single steps and encoders by name, for the shapes that the batches have."""
    rows, lengths = len(batches[0].ids), sorted({batch.padded for batch in batches})
    longest, room = lengths[-1], slots(1 + options.max_new_tokens, max(options.gamma))
    single = target.network_for(rows)
    arms = {
        **measure.products_arms(target.network, rows),
        "target step": measure.step_arm(single, rows, longest, room, 1),
    }
    for gamma in options.gamma:
        wide = target.network_for(rows * (gamma + 1))
        arms[f"verify {gamma}"] = measure.step_arm(wide, rows, longest, room, gamma + 1)
        if options.samples_preset:
            calls = measure.sampling_arms(wide, rows, longest, room, gamma, options.sampling())
            arms |= {f"call {gamma}, {name}": call for name, call in calls.items()}
    for length in lengths:
        arms[f"target encoder {length}"] = measure.prefill_arm(target.network, rows, length, room)
    if isinstance(drafter, ModelDrafter):
        arms["draft step"] = measure.step_arm(drafter.network, rows, longest, room, 1)
        for gamma in options.gamma:
            pair = target.network_for(rows * (gamma + 1)), drafter.network
            arms[f"draft {gamma} and verify"] = measure.paired_arm(*pair, rows, longest, room, gamma)
        for name, network in drafter.parts().items():
            arms[f"draft step, {name}"] = measure.step_arm(network, rows, longest, room, 1)
        for length in lengths:
            arms[f"drafter encoder {length}"] = measure.prefill_arm(drafter.network, rows, length, room)
    return arms


def _steps_in(name: str) -> int:
    return 1 if "encoder" in name else measure.STEPS


def _warm_up(arms: dict[str, Arm], steps, batches: Sequence[Batch]) -> None:
    """Compiles everything that is timed later; each arm's share is kept."""
    shapes = {batch.padded: batch for batch in batches}
    for arm, batch in track([(arm, batch) for arm in arms.values() for batch in shapes.values()],
                            len(arms) * len(shapes), "compiling"):  # fmt: skip
        start = time.perf_counter()
        arm.decode(batch)
        arm.compile_seconds += time.perf_counter() - start
    for step in track(steps.values(), len(steps), "compiling steps"):
        jax.block_until_ready(step())


def _one_pass(arms: dict[str, Arm], batches: Sequence[Batch], turn: int, what: str) -> None:
    """Every batch through every arm, one arm after the other."""
    for arm in arms.values():
        arm.seconds.append(0.0)
        arm.results = []
    for index, batch in enumerate(track(batches, len(batches), what)):
        for name in measure.rotated(arms, turn + index):
            start = time.perf_counter()
            result = arms[name].decode(batch)
            arms[name].seconds[-1] += time.perf_counter() - start
            arms[name].results.append(result)


def _record(target, drafter, arms: dict[str, Arm], times: dict[str, Spread], batches, options) -> dict[str, Any]:
    plain, step = arms["plain"], times["target step"].median
    padded = [batch.padded for batch in batches]
    calls = sum(int(result.lengths.max()) for result in plain.results)
    encoders = sum(times[f"target encoder {length}"].median for length in padded)
    seconds = Spread.of(plain.seconds)
    products = min(spread.median for name, spread in times.items() if name.startswith("products"))
    gammas = [name.removeprefix("verify ") for name in times if name.startswith("verify")]
    return {
        "machine": records.machine(),
        "options": dataclasses.asdict(options),
        "target": records.model(target),
        "drafter": _drafter_record(drafter) if drafter is not None else None,
        "sentences": sum(len(ids) > 0 for batch in batches for ids in batch.ids),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "step_over_products": step / products,
        "plain_over_products": (seconds.median - encoders) / max(calls, 1) / products,
        "cost_ratio": times["draft step"].median / step if "draft step" in times else None,
        "verify_cost": {gamma: times[f"verify {gamma}"].median / step for gamma in gammas},
        "plain": {
            "seconds": seconds._asdict(),
            "tokens": plain.tokens,
            "seconds_per_token": seconds.median / max(plain.tokens, 1),
            "compile_seconds": plain.compile_seconds,
        },
        "speculative": [
            _arm_record(arm, plain, target, times, batches, padded, options) for arm in arms.values() if arm.gamma
        ],
    }


def _drafter_record(drafter: NamedDrafter) -> dict[str, Any]:
    return records.model(drafter.model) if isinstance(drafter, ModelDrafter) else {"name": drafter.name}


def _arm_record(arm: Arm, plain: Arm, target, times, batches, padded: list[int], options) -> dict[str, Any]:
    per_token = lambda one: np.array(one.seconds) / max(one.tokens, 1)
    improvement, stats = Spread.of(per_token(plain) / per_token(arm)), _total_stats(arm)
    most = lambda result, name: max(getattr(row, name) for row in result.stats.per_row)
    counted = [
        records.Work(size, most(result, "target_calls"), most(result, "draft_calls"))
        for size, result in zip(padded, arm.results, strict=True)
    ]
    lengths, alpha = [result.lengths for result in arm.results], stats["acceptance_rate"]
    predicted = None if alpha is None else records.predictions(arm.gamma, alpha, times, padded, lengths, counted)
    seconds = Spread.of(arm.seconds)
    # Gumbel coupling repeats plain decoding's draws at every temperature.
    same_tokens = options.verifier == "gumbel" or options.temperature == 0 and options.verifier not in LOSSY
    shares = records.shares(records.cost(counted, arm.gamma, times), seconds.median)
    return {
        "gamma": arm.gamma,
        "seconds": seconds._asdict(),
        "tokens": arm.tokens,
        "compile_seconds": arm.compile_seconds,
        "stats": stats,
        "improvement": improvement._asdict(),
        "predicted": predicted,
        "measured_over_predicted": improvement.median / predicted["with_lengths"] if predicted else None,
        "shares": shares,
        "limiting_term": max(shares, key=lambda name: shares[name]),
        "differences": _differences(arm, plain, target, batches) if same_tokens else [],
    }


def _total_stats(arm: Arm) -> dict[str, Any]:
    """The statistics of all batches together; α is a ratio of sums, not a mean of ratios."""
    names = ("target_calls", "draft_calls", "drafted", "accepted", "examined_by_position", "accepted_by_position")
    totals = {name: np.asarray(arm.total(name)).tolist() for name in names}
    examined = sum(totals["examined_by_position"])
    has_rate = any(result.stats.acceptance_rate is not None for result in arm.results)  # block verification has none
    return totals | {
        "acceptance_rate": totals["accepted"] / examined if examined and has_rate else None,
        "tokens_per_target_call": arm.tokens / max(totals["target_calls"], 1),
    }


def _differences(arm: Arm, plain: Arm, target: LanguageModel, batches) -> list[dict[str, Any]]:
    """Every input whose greedy tokens differ from plain decoding's, with how near a tie the first of them is."""
    found = []
    for batch, ours, theirs in zip(batches, arm.results, plain.results, strict=True):
        for row in np.flatnonzero(np.any(ours.tokens != theirs.tokens, axis=1)):
            position = int(np.argmax(ours.tokens[row] != theirs.tokens[row]))
            prefix = [target.start_token, *theirs.tokens[row, :position].tolist()]
            how = measure.difference(target, batch.ids[row], prefix, arm.gamma + 1, len(batch.ids))
            found.append({
                "input": batch.numbers[row], "position": position,
                "plain": int(theirs.tokens[row, position]), "speculative": int(ours.tokens[row, position]),
                "margin": how.margin, "noise": how.noise, "near_tie": how.near_tie,
            })  # fmt: skip
    return sorted(found, key=lambda item: item["input"])


def _problems(record: dict, arms: dict[str, Arm], options, target: LanguageModel) -> list[str]:
    """What must not be: outputs that are missing, or greedy float32 tokens that differ without being near-ties."""
    problems = []
    expected = [result.lengths > 0 for result in arms["plain"].results]
    for name, arm in arms.items():
        if len(arm.results) != len(expected):
            problems.append(f"{name}: got outputs for {len(arm.results)} batches, expected {len(expected)}")
        missing = sum(int(np.sum(want & (got.lengths == 0))) for want, got in zip(expected, arm.results))
        if missing:
            problems.append(f"{name}: got no output for {missing} inputs that plain decoding has one for")
    if target.config.dtype == "float32":
        for arm_record in record["speculative"]:
            wrong = [item["input"] for item in arm_record["differences"] if not item["near_tie"]]
            if wrong:
                problems.append(
                    f"gamma {arm_record['gamma']}: got other tokens than plain decoding for inputs {wrong}, "
                    "expected the same but for near-ties"
                )
    return problems
