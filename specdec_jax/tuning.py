"""`specdec tune`: picks γ, and the verifier where it matters, on this machine, and writes it down for the other commands.

What is expected of every γ follows from acceptance on a sample, the output lengths, and the time of whole iterations; the
best few by that and plain decoding are then timed in turn on the same sentences, and the fastest is taken.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import acceptance, costs, measure, passes, records
from specdec_jax.acceptance import Acceptance
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.generate import generate
from specdec_jax.measure import Spread
from specdec_jax.measuring import check_measured, verifiers_of, with_error
from specdec_jax.models.base import decoder_only
from specdec_jax.options import DecodingOptions, at_least, check_gamma, check_output, option
from specdec_jax.passes import Arm, Batch
from specdec_jax.progress import track
from specdec_jax.request import plan
from specdec_jax.verification import LOSSY
from specdec_jax.writing import write_file

# Choices that are timed beside plain decoding.
_COMPARED = 5


@dataclasses.dataclass(frozen=True)
class TuneOptions(DecodingOptions):
    """Options of `specdec tune`."""

    gamma: tuple[int, ...] = option((1, 2, 3, 4, 5, 6, 7, 8), "the numbers of drafted tokens to choose from")
    choose_verifier: bool = option(
        True, "above temperature 0, choose between block and token verification where --verifier is one of them"
    )
    input_file: str | None = option(
        None, "UTF-8 text, one sentence a line, gzip or not (default: ende/sentences.txt, which comes with the package)"
    )
    limit: int = option(64, "tune on the first lines of the input; 0: on all")
    sweep: int = option(
        0, "check the choice: time all choices in turn on this many of the lines that follow; 0: do not"
    )
    batch_size: int = option(1, "sentences decoded together")
    repeats: int = option(3, "passes over steps and sentences; medians and spread are over them")
    config: str | None = option(None, "gin file that the choice is written to, for `generate` and `benchmark`")
    output: str | None = option(None, "file that the JSON record is written to")
    json: bool = option(False, "print the JSON record instead of the summary")

    def check(self) -> None:
        check_measured(self)
        if not self.gamma:
            raise ValueError("gamma: got no value, expected at least one")
        for gamma in self.gamma:
            check_gamma(gamma)
            at_least(1, gamma=gamma)  # γ = 0, plain decoding, is always among the choices
        at_least(0, sweep=self.sweep)
        if self.sweep and not (self.limit and self.input_file):
            raise ValueError(f"got --sweep={self.sweep}, expected it with --input_file and a --limit above 0")
        if not self.config:
            raise ValueError("config: got nothing, expected the name of a gin file to write")
        check_output(self.config, "config")
        check_output(self.output)

    @property
    def verifiers(self) -> tuple[str, ...]:
        return verifiers_of(self) if self.choose_verifier else (self.verifier,)


class Choice(NamedTuple):
    """A way of decoding: γ, 0 for plain, and the verifier."""

    gamma: int
    verifier: str

    def __str__(self) -> str:
        return f"gamma {self.gamma}, {self.verifier}" if self.gamma else "plain"


def expected_seconds(
    accepted: Acceptance, padded: Sequence[int], choice: Choice, times: Mapping[str, Spread], step: float
) -> float:
    """Seconds for all batches: encoders, iterations, less the draft steps by which the last ones are shorter.

    A drafter that catches up after a full acceptance is counted as if its first call were over one position, not two.

    Args:
      padded: input length of each batch.
      times: of iterations and encoders, as from `step_times`.
      step: seconds of one draft step.
    """
    seconds = sum(times[f"target encoder {size}"].median for size in padded)
    iteration = iteration_seconds(choice, times)
    if not choice.gamma:
        return seconds + iteration * sum(int(lengths.max()) for lengths in accepted.lengths)
    seconds += sum(times[f"drafter encoder {size}"].median for size in padded if f"drafter encoder {size}" in times)
    for work in accepted.work[choice.verifier, choice.gamma]:
        seconds += work.calls * iteration + (work.draft_calls - choice.gamma * work.calls) * step
    return seconds


def iteration_seconds(choice: Choice, times: Mapping[str, Spread]) -> float:
    """Seconds of one iteration; where a verifier was timed with the longest draft only, as those of the verifier that was
    timed throughout and what it adds to that draft, shared out among its tokens."""
    if f"iteration, {choice}" in times:
        return times[f"iteration, {choice}"].median
    names = [
        name.removeprefix("iteration, gamma ").split(", ") for name in times if name.startswith("iteration, gamma ")
    ]
    longest = max(int(gamma) for gamma, _ in names)
    other = next(verifier for gamma, verifier in names if int(gamma) == choice.gamma)
    seconds = lambda *of: times[f"iteration, {Choice(*of)}"].median
    added = seconds(longest, choice.verifier) - seconds(longest, other)
    return seconds(choice.gamma, other) + added * choice.gamma / longest


def candidates(expected: Mapping[Choice, float]) -> list[Choice]:
    """What is worth timing: plain decoding and the best few of the others, which differ by less than single steps scatter."""
    drafting = sorted((choice for choice in expected if choice.gamma), key=lambda choice: expected[choice])
    return [*(choice for choice in expected if not choice.gamma), *drafting[:_COMPARED]]


def run(options: TuneOptions) -> None:
    """`specdec tune`."""
    options.check()
    sentences = passes.sentences_of(options.input_file, 0)
    sample = sentences[: options.limit or None]
    rest = sentences[len(sample) : len(sample) + options.sweep]
    if len(rest) < options.sweep:
        raise ValueError(
            f"sweep: got {options.sweep}, expected at most the {len(rest)} lines after the first {len(sample)}"
        )
    target, drafter = options.load()
    if not decoder_only(target) and not any(text.strip() for text in sample):
        raise ValueError("input_file: got no sentence with any text to tune on, expected at least one")
    batches, others = (passes.batches_of(target, lines, options) if lines else [] for lines in (sample, rest))
    record = tuned(target, drafter, batches, others, options)
    text = json.dumps(record, indent=1)
    try:
        write_file(options.config, gin_file(record, options))
        alpha = record["acceptance"]["alpha"]
        if alpha is not None and drafter is not None:
            keep_acceptance(target, drafter, batches[0].inputs, alpha, options.decoding())
        print(text if options.json else summary(record))
    finally:  # if one fails, the record is in another
        if options.output:
            write_file(options.output, text + "\n")


def keep_acceptance(target, drafter, inputs, alpha: float, decoding: Mapping[str, Any]) -> None:
    """Lets `gamma="auto"` begin with the acceptance that was measured, wherever it chooses γ for such inputs."""
    key = plan(target, inputs, drafter=drafter, **decoding).costs_key
    if key is not None:
        costs.keep(key, costs.known(key)._replace(acceptance=min(max(float(alpha), 0.0), 1.0)))


def tuned(target, drafter, batches: Sequence[Batch], others: Sequence[Batch], options: TuneOptions) -> dict[str, Any]:
    """The record; `others` are the batches of the sweep, none for no sweep."""
    passes.check_prompts(target, drafter, [*batches, *others], options)
    gammas = sorted(set(options.gamma))
    accepted = acceptance.of(target, drafter, batches, options.verifiers, gammas[-1], options)
    choices = [Choice(0, options.verifiers[0])] + [Choice(g, name) for name in options.verifiers for g in gammas]
    times = step_times(target, drafter, batches, choices, options)
    last = choices[-1]
    added = times[f"iteration, {last}"].median - times[f"call, {last}"].median
    step = max(0.0, added / last.gamma) if isinstance(drafter, ModelDrafter) else 0.0
    padded = [batch.padded for batch in batches]
    expected = {choice: expected_seconds(accepted, padded, choice, times, step) for choice in choices}
    first = min(choices, key=lambda choice: expected[choice])
    measured = time_choices(target, drafter, candidates(expected), batches, options, "comparing")
    chosen = fastest(measured)
    plain, tokens = choices[0], sum(int(lengths.sum()) for lengths in accepted.lengths)
    return {
        **records.head(target, drafter, batches, options),
        "acceptance": accepted.record(),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "draft_seconds": step,
        "choices": [
            {
                **choice._asdict(),
                "calls": sum(work.calls for work in accepted.work[choice.verifier, choice.gamma]) if choice.gamma else None,
                "expected_seconds_per_token": expected[choice] / tokens,
                "expected_improvement": expected[plain] / expected[choice],
                "seconds_per_token": Spread.of(measured[choice])._asdict() if choice in measured else None,
                "improvement": _ratio(measured, plain, choice) if choice in measured else None,
            }
            for choice in choices
        ],
        "expected_best": first._asdict(),
        "chosen": chosen._asdict(),
        "improvement": _ratio(measured, plain, chosen),
        "sweep": sweep(target, drafter, choices, chosen, others, options) if others else None,
    }  # fmt: skip


def step_times(target, drafter, batches: Sequence[Batch], choices: Sequence[Choice], options) -> dict[str, Spread]:
    """Seconds of an iteration of the choices, of a call of the last without its draft, and of the encoders.

    Every iteration is a program to compile: of further verifiers only the one with the longest draft is timed.
    """
    rows, lengths = len(batches[0].ids), sorted({batch.padded for batch in batches})
    arms, last = {}, choices[-1]
    timed = [choice for choice in choices if choice.gamma in (0, last.gamma) or choice.verifier == choices[0].verifier]
    for choice in track(timed, len(timed), "compiling iterations"):
        how = options.decoding(plain=not choice.gamma)
        how |= {"verifier": choice.verifier} if choice.gamma else {}
        state = measure.iteration_state(
            target, drafter if choice.gamma else None, rows, lengths[-1], choice.gamma, **how
        )  # fmt: skip
        arms[f"iteration, {choice}"] = measure.iteration_arm(*state)
    arms[f"call, {last}"] = measure.call_arm(*state)
    room = state[0].tokens.shape[1]
    for length in lengths:
        arms[f"target encoder {length}"] = measure.prefill_arm(target.network, rows, length, room)
        if isinstance(drafter, ModelDrafter):
            arms[f"drafter encoder {length}"] = measure.prefill_arm(drafter.network, rows, length, room)
    passes.warm_up({}, arms, batches)
    return passes.time_steps(arms, options.repeats)


def time_choices(
    target, drafter, choices: Sequence[Choice], batches: Sequence[Batch], options, what: str
) -> dict[Choice, np.ndarray]:
    """Seconds per token of each pass, of every choice, in turn on the same sentences."""

    def arm(choice: Choice) -> Arm:
        how = options.decoding(plain=not choice.gamma)
        how |= {"drafter": drafter, "verifier": choice.verifier} if choice.gamma else {}
        return Arm(choice.gamma, lambda batch: generate(
            target, batch.inputs, gamma=choice.gamma, key=batch.keys, **how
        ))  # fmt: skip

    arms = {str(choice): arm(choice) for choice in choices}
    passes.warm_up(arms, {}, batches)
    for turn in range(options.repeats):
        passes.one_pass(arms, batches, turn, f"{what}, pass {turn + 1} of {options.repeats}")
    return {choice: arms[str(choice)].seconds_per_token for choice in choices}


def fastest(seconds: Mapping[Choice, np.ndarray]) -> Choice:
    """Returns the choice with the greatest median improvement over plain decoding; of equals the first.

    A machine whose speed drifts from pass to pass moves the seconds of all choices, and no pass's ratio.
    """
    plain = next(choice for choice in seconds if not choice.gamma)
    return max(seconds, key=lambda choice: _ratio(seconds, plain, choice)["median"])


def _ratio(seconds: Mapping[Choice, np.ndarray], above: Choice, below: Choice) -> dict[str, float]:
    """Times over times, pass by pass."""
    return Spread.of(seconds[above] / seconds[below])._asdict()


def sweep(target, drafter, choices, chosen: Choice, batches, options) -> dict[str, Any]:
    """Wall time of every choice on other sentences, and of the chosen one over the best: 1 if it is the best."""
    seconds = time_choices(target, drafter, choices, batches, options, "sweep")
    best = fastest(seconds)
    return {
        "sentences": records.decoded(target, batches),
        "seconds_per_token": {str(choice): Spread.of(times)._asdict() for choice, times in seconds.items()},
        "improvement": {str(choice): _ratio(seconds, choices[0], choice) for choice in choices},
        "best": best._asdict(),
        "chosen_over_best": _ratio(seconds, chosen, best),
    }


def gin_file(record: Mapping[str, Any], options: TuneOptions) -> str:
    """Settings of `generate` and `benchmark`: all that tuning was asked for, with the choice."""
    chosen, gain, host = Choice(**record["chosen"]), record["improvement"], record["machine"]
    of_drafts = {"lenience", "typical_epsilon", "typical_delta", "shortlist", "shortlist_size", "drafter_int8"}
    skipped = {"drafter", "verifier"} | (of_drafts if not chosen.gamma else set())
    settings = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(DecodingOptions)
        if field.name not in skipped and getattr(options, field.name) != field.default
    }
    if chosen.gamma:
        why = f"{chosen}: {gain['median']:.2f} times the speed of plain decoding ({gain['least']:.2f} to {gain['most']:.2f})"
        settings |= {"drafter": options.drafter, "verifier": chosen.verifier}
    else:
        why = f"plain decoding was faster than drafting with {options.drafter}, so there is no drafter"
        settings |= {"drafter": None}
        if options.verifier not in LOSSY:
            settings["verifier"] = options.verifier
    settings["batch_size"] = options.batch_size
    lines = [
        f"# Written by `specdec tune` on {host['processor']}, {host['device']}, with {record['sentences']} sentences;",
        f"# {why}.",
        "",
        "from __gin__ import dynamic_registration",
        "",
        "from specdec_jax import benchmark",
        "from specdec_jax import inference",
        "",
    ]
    if chosen.gamma:
        lines += [f"GAMMA = {chosen.gamma}", ""]
    for name, gamma in (("inference.GenerateOptions", "%GAMMA"), ("benchmark.BenchmarkOptions", "(%GAMMA,)")):
        lines.append(f"{name}:")
        lines += [f"  {field} = {value!r}" for field, value in settings.items()]
        lines += [f"  gamma = {gamma}"] * bool(chosen.gamma) + [""]
    return "\n".join(lines)


def summary(record: Mapping[str, Any]) -> str:
    """A record as text for reading."""
    accepted, host, options = record["acceptance"], record["machine"], record["options"]
    head = f"{'':<16}{'expected':>12}{'measured':>12}   (improvement over plain decoding)"
    lines = [
        f"{record['target']['name']} with {record['drafter']['name']}, {record['sentences']} inputs, "
        f"batch {options['batch_size']}, temperature {options['temperature']:g}; "
        f"{records.hardware(host)}",
        f"alpha {with_error(accepted['alpha'], accepted['standard_error'])} ({accepted['how']})",
        "",
        head,
    ]
    for item in record["choices"]:
        name, gain = Choice(item["gamma"], item["verifier"]), item["improvement"]
        lines.append(
            f"{name!s:<16}{item['expected_improvement']:>12.3f}"
            + (f"{gain['median']:>12.3f}   ({gain['least']:.3f} to {gain['most']:.3f})" if gain else "")
        )
    chosen, gain = Choice(**record["chosen"]), record["improvement"]
    lines.append("")
    if chosen.gamma:
        lines.append(
            f"chosen: {chosen}: {gain['median']:.3f} times plain decoding ({gain['least']:.3f} to {gain['most']:.3f})"
        )
    else:
        lines.append(f"chosen: plain decoding, which is faster than drafting with {options['drafter']}")
    if record["sweep"]:
        swept = record["sweep"]
        lines += ["", f"sweep over {swept['sentences']} other inputs, improvement over plain decoding:"]
        lines += [
            f"{name:<16}{spread['median']:>12.3f}   ({spread['least']:.3f} to {spread['most']:.3f})"
            for name, spread in swept["improvement"].items()
        ]
        over = swept["chosen_over_best"]
        lines.append(
            f"best: {Choice(**swept['best'])}; time of the chosen over the best {over['median']:.3f} "
            f"({over['least']:.3f} to {over['most']:.3f})"
        )
    return "\n".join([*lines, "", f"written to {options['config']}"])
