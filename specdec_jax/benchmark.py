"""Plain against speculative decoding on one machine: wall time, α, c, v, predicted and measured improvement.

The arms are interleaved batch by batch, since the speed of a shared machine drifts; compile time is kept apart; encoders
and tokenisation are inside the wall time; one counter counts the tokens of all arms.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec_jax import against, checkpoints, measure, passes, records, traces
from specdec_jax.compatibility import UnsupportedCombination
from specdec_jax.generate import generate
from specdec_jax.measure import Spread
from specdec_jax.models.base import PRESETS, LanguageModel, check_positions, decoder_only
from specdec_jax.options import (
    DecodingOptions,
    NamedDrafter,
    at_least,
    check_gamma,
    check_output,
    option,
    without_model,
)
from specdec_jax.passes import Arm, Batch
from specdec_jax.verification import FORCED, LOSSY
from specdec_jax.writing import write_file


class CheckFailed(RuntimeError):
    """What was measured contradicts what must hold; the record is written all the same."""


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions(DecodingOptions):
    """Options of `specdec benchmark`."""

    gamma: tuple[int, ...] = option((4,), "tokens drafted per target call; several, comma-separated, are timed in turn")
    input_file: str | None = option(
        None, "UTF-8 text, one sentence a line, gzip or not (default: ende/sentences.txt, which comes with the package)"
    )
    limit: int = option(0, "take only the first lines of the input; 0: all")
    batch_size: int = option(1, "sentences decoded together")
    repeats: int = option(3, "passes over the sentences; medians and spread are over them")
    preset: str | None = option(
        None, "time a target of this shape with random weights instead of --target: " + ", ".join(PRESETS)
    )
    drafter_preset: str | None = option(None, "the same for the drafter, instead of --drafter")
    input_length: int | None = option(None, "with --preset: length of the input, in tokens (default: 64)")
    forced_alpha: tuple[float, ...] = option(
        (),
        "accept drafted tokens by coin with this probability, whatever the models say, so that whole decodes can be timed "
        "with random weights; several, comma-separated, are timed in turn",
    )
    against: str | None = option(
        None,
        "time another implementation in turn with ours, argmax, same weights and inputs: t5x, which must be installed",
    )
    suite: str | None = option(
        None,
        "paper: measure every row that the paper reports, one record a line in --output, and go on after a kill; --drafter "
        "and --drafter_preset then take several, comma-separated",
    )
    report: str | None = option(
        None,
        "with --suite: HTML file for the records beside the paper's tables and figures",
    )
    output: str | None = option(None, "file that the JSON record is written to")
    json: bool = option(False, "print the JSON record instead of the summary")

    def check(self) -> None:
        for name, preset in (("preset", self.preset), ("drafter_preset", self.drafter_preset)):
            if preset and preset not in PRESETS:
                raise ValueError(f"{name}: got {preset!r}, expected one of {', '.join(PRESETS)}")
        for name in ("target", "drafter", "input_file", "vocabulary", "limit"):
            if self.preset and getattr(self, name) and not (name == "drafter" and without_model(self.drafter)):
                raise ValueError(f"got --preset={self.preset} with --{name}, expected one or the other")
        if self.drafter_preset and not self.preset:
            raise ValueError(f"got --drafter_preset={self.drafter_preset} alone, expected --preset too")
        if self.drafter_preset and type(PRESETS[self.drafter_preset]) is not type(PRESETS[self.preset]):
            got, expected = (
                f"drafter_preset: got {self.drafter_preset!r}",
                f"a shape of the same family as {self.preset!r}",
            )
            raise ValueError(f"{got}, expected {expected}")
        if self.input_length is not None and not self.preset:
            raise ValueError(f"got --input_length={self.input_length} alone, expected --preset too")
        if self.report:
            raise ValueError(f"report: got {self.report!r} without a suite, expected --suite (or `specdec figures`)")
        if self.drafter and self.drafter_preset:
            raise ValueError(f"got --drafter={self.drafter} with --drafter_preset, expected one or the other")
        super().check() if not self.preset else self.check_decoding()
        self._check_forced()
        against.check(self.against, self.sampling())
        if not self.gamma:
            raise ValueError("gamma: got no value, expected at least one")
        for gamma in self.gamma:
            check_gamma(gamma)
            at_least(1, gamma=gamma)  # γ = 0 is the plain arm
            self.gamma_of(gamma)
        at_least(1, batch_size=self.batch_size, repeats=self.repeats, input_length=self.preset_length)
        at_least(0, limit=self.limit)
        if self.preset and self.preset_length > self.max_input_length:
            raise ValueError(
                f"input_length: got {self.preset_length}, expected at most max_input_length = {self.max_input_length}"
            )
        for name, preset in (("preset", self.preset), ("drafter_preset", self.drafter_preset)):
            if preset:
                check_positions(PRESETS[preset], self.preset_length + self.max_new_tokens, name)
        check_output(self.output)

    def _check_forced(self) -> None:
        for alpha in self.forced_alpha:
            if not 0 < alpha <= 1:
                raise ValueError(f"forced_alpha: got {alpha}, expected a number in (0, 1]")
        if self.forced_alpha and not (self.drafter or self.drafter_preset):
            raise UnsupportedCombination("forced_alpha: got it for plain decoding, expected a drafter")
        if self.preset and self.drafter and not self.forced_alpha:
            raise UnsupportedCombination(
                f"drafter: got {self.drafter!r} with --preset and no --forced_alpha, expected both: "
                "with random weights nothing else is timed of it"
            )
        if self.forced_alpha and (self.verifier != "block" or self.gamma_policy != "fixed"):
            got = f"verifier={self.verifier!r}, gamma_policy={self.gamma_policy!r}"
            raise UnsupportedCombination(f"forced_alpha: got it with {got}, expected neither: nothing is verified")

    @property
    def preset_length(self) -> int:
        return 64 if self.input_length is None else self.input_length

    @property
    def samples_preset(self) -> bool:
        """Whether the cost of sampling is measured."""
        return bool(self.preset) and self.temperature > 0


def run(options: BenchmarkOptions) -> None:
    """`specdec benchmark`."""
    options.check()
    target, drafter, batches = load(options)
    record, problems = benchmark(target, drafter, batches, options)
    text = json.dumps(record, indent=1)
    try:
        print(text if options.json else records.summary(record))
    finally:  # if one of the two fails, the record is in the other
        if options.output:
            write_file(options.output, text + "\n")
    if problems:
        raise CheckFailed("; ".join(problems))


def load(
    options: BenchmarkOptions, target: LanguageModel | None = None
) -> tuple[LanguageModel, NamedDrafter | None, list[Batch]]:
    """The target, unless it is given, the drafter and the inputs that the options name."""
    if options.preset:
        return _preset(options, target)
    sentences = passes.sentences_of(options.input_file, options.limit)
    target, drafter = options.load(target)
    return target, drafter, passes.batches_of(target, sentences, options)


def _preset(
    options: BenchmarkOptions, target: LanguageModel | None
) -> tuple[LanguageModel, NamedDrafter | None, list[Batch]]:
    def model(preset: str, drafts: bool = False) -> LanguageModel:
        quantize = None if drafts else options.quantize
        kernels = "rounded" if quantize == "int8" else None
        dtype = checkpoints.choose_dtype(options.dtype, preset, kernels=kernels)
        config = dataclasses.replace(PRESETS[preset], dtype=dtype)
        random = LanguageModel.random(config, name=preset, rules=options.placement(drafts), quantize=quantize)
        random.eos_ids = ()  # every output has full length
        return random

    assert options.preset
    target = target or model(options.preset)
    if options.drafter_preset:
        drafter: NamedDrafter | None = options.reduced(model(options.drafter_preset, drafts=True))
    else:
        drafter = options.load(target)[1]
    shape = (options.batch_size, options.preset_length)
    ids = np.random.default_rng(options.seed).integers(2, target.config.vocab_size, shape).tolist()
    return target, drafter, passes.cut(ids, ids, options.batch_size, options.seed)


def benchmark(
    target: LanguageModel, drafter: NamedDrafter | None, batches: Sequence[Batch], options: BenchmarkOptions
) -> tuple[dict, list[str]]:
    """Times the arms and the single steps; returns the record and what contradicts exactness (nothing, one hopes).

    A drafter without a model has no steps to time: c is then not measured, and predictions count it as 0. For one that
    is made of several nothing is timed and nothing predicted.
    With a preset the weights are random, so that α would mean nothing: only plain decoding and steps are timed, with the
    cost of sampling where the temperature is not 0, unless α is forced.
    """

    def arm(gamma: int, forced_alpha: float | None = None) -> Arm:
        wanted, forced = options.gamma_of(gamma) if gamma else 0, {}
        if forced_alpha is not None:
            forced = dict(verifier=FORCED, forced_alpha=forced_alpha)
        return Arm(gamma, lambda batch: generate(
            target, batch.inputs, drafter=drafter if gamma else None, gamma=wanted, key=batch.keys,
            **options.decoding(plain=not gamma) | forced,
        ), forced_alpha=forced_alpha)  # fmt: skip

    speculative = options.gamma if drafter is not None and (options.forced_alpha or not options.preset) else ()
    passes.check_prompts(target, drafter, batches, options)
    arms = {"plain": arm(0)}
    for gamma in speculative:
        for alpha in options.forced_alpha or (None,):
            arms[f"gamma {gamma}" + ("" if alpha is None else f", alpha {alpha:g}")] = arm(gamma, alpha)
    if options.against:
        arms[options.against] = against.arm(target, options.max_new_tokens)
    steps = _step_arms(target, drafter, batches, options)
    passes.warm_up(arms, steps, batches)
    timed = []
    for repeat in range(options.repeats):
        turn = f"pass {repeat + 1} of {options.repeats}"
        timed.append(passes.timed_steps(steps, repeat, f"steps, {turn}"))
        passes.one_pass(arms, batches, repeat, turn)
    record = _record(target, drafter, arms, passes.per_step(timed), batches, options)
    if not options.preset and options.batch_size == 1 and options.gamma_policy == "fixed" and drafter is not None:
        gammas = () if options.forced_alpha else options.gamma
        record["example"] = traces.example(target, drafter, gammas, batches, passes.per_step(timed), options)
    if options.samples_preset:
        seconds = {name: [one[name] for one in timed] for name in steps}
        record["sampling_cost"] = {str(gamma): records.sampling_cost(gamma, seconds) for gamma in options.gamma}
    problems = _problems(record, arms, options, target)
    if options.against:
        record["against"] = against.record(options.against, arms, target, batches)
        problems += against.problems(record["against"], target.config.dtype)
    return record, problems


def _step_arms(target, drafter, batches, options: BenchmarkOptions) -> dict[str, Callable[[], object]]:
    """Single steps and encoders by name, for the shapes that the batches have."""
    rows, lengths = len(batches[0].ids), sorted({batch.padded for batch in batches})
    longest, room = lengths[-1], measure.total_slots(target, lengths[-1], options.max_new_tokens, max(options.gamma))
    arms = measure.products_arms(target.network, rows) | measure.bare_arms(target, drafter, rows, options.gamma)
    arms |= measure.step_arms(target, drafter, rows, lengths, room, options.gamma, options.gamma)
    for gamma in options.gamma if options.samples_preset else ():
        calls = measure.sampling_arms(target.network, rows, longest, room, gamma, options.sampling())
        arms |= {f"call {gamma}, {name}": call for name, call in calls.items()}
    return arms


def _record(target, drafter, arms: dict[str, Arm], times: dict[str, Spread], batches, options) -> dict[str, Any]:
    plain, step = arms["plain"], times["target step"].median
    padded = [batch.padded for batch in batches]
    calls = sum(int(result.lengths.max()) for result in plain.results)
    encoders = sum(times[f"target encoder {length}"].median for length in padded)
    seconds = Spread.of(plain.seconds)
    products = min(spread.median for name, spread in times.items() if name.startswith("products"))
    own = times["products"].median  # in the loop's own layout, as those of calls and drafts
    gammas = [name.removeprefix("verify ") for name in times if name.startswith("verify")]
    return {
        **records.head(target, drafter, batches, options),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "step_over_products": step / products,
        "plain_over_products": (seconds.median - encoders) / max(calls, 1) / products,
        "cost_ratio": times["draft step"].median / step if "draft step" in times else None,
        "verify_cost": {gamma: times[f"verify {gamma}"].median / step for gamma in gammas},
        "bare": {
            "cost_ratio": times["bare draft step"].median / own if "bare draft step" in times else None,
            "verify_cost": {gamma: times[f"bare verify {gamma}"].median / own for gamma in gammas},
        },
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


def _arm_record(arm: Arm, plain: Arm, target, times, batches, padded: list[int], options) -> dict[str, Any]:
    improvement, stats = Spread.of(plain.seconds_per_token / arm.seconds_per_token), _total_stats(arm)
    most = lambda result, name: max(getattr(row, name) for row in result.stats.per_row)
    counted = [
        records.Work(size, most(result, "target_calls"), most(result, "draft_calls"))
        for size, result in zip(padded, arm.results, strict=True)
    ]
    lengths, alpha = [result.lengths for result in arm.results], stats["acceptance_rate"]
    adaptive = options.gamma_policy != "fixed"  # then the formulas do not apply, nor does the time of one width of call
    untimed = stats["draft_calls"] > 0 and "draft step" not in times
    predicted = None
    if alpha is not None and not adaptive and not untimed:
        predicted = records.predictions(arm.gamma, alpha, times, padded, lengths, counted)
    # A drafter without a model often has nothing to propose, so that α and γ do not say how many tokens a call gives.
    prediction = "with_lengths" if "draft step" in times else "with_counts"
    seconds = Spread.of(arm.seconds)
    # Gumbel coupling repeats plain decoding's draws at every temperature.
    same_tokens = options.verifier == "gumbel" or options.temperature == 0 and options.verifier not in LOSSY
    same_tokens &= arm.forced_alpha is None
    shares = None if adaptive or untimed else records.shares(records.cost(counted, arm.gamma, times), seconds.median)
    return {
        "gamma": arm.gamma,
        "forced_alpha": arm.forced_alpha,
        "mean_gamma": stats["drafted"] / max(stats["target_calls"], 1),
        "seconds": seconds._asdict(),
        "tokens": arm.tokens,
        "compile_seconds": arm.compile_seconds,
        "stats": stats,
        "improvement": improvement._asdict(),
        "predicted": predicted,
        "oracle": None if alpha is None or untimed else records.oracle(arm.gamma, alpha, times),
        "prediction": prediction,
        "measured_over_predicted": improvement.median / predicted[prediction] if predicted else None,
        "shares": shares,
        "limiting_term": max(shares, key=lambda name: shares[name]) if shares else None,
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
        "accepted_per_target_call": totals["accepted"] / max(totals["target_calls"], 1),
    }


def _differences(arm: Arm, plain: Arm, target: LanguageModel, batches) -> list[dict[str, Any]]:
    """Every input whose greedy tokens differ from plain decoding's, with how near a tie the first of them is."""
    found = []
    for batch, ours, theirs in zip(batches, arm.results, plain.results, strict=True):
        for row in np.flatnonzero(np.any(ours.tokens != theirs.tokens, axis=1)):
            position = int(np.argmax(ours.tokens[row] != theirs.tokens[row]))
            prefix = [target.start_token, *theirs.tokens[row, :position].tolist()]
            if decoder_only(target):
                prefix = [*(batch.ids[row] or prefix[:1]), *prefix[1:]]
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
