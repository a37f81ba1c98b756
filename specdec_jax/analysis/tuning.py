"""Chooses γ and the verifier by measurement.

The expected time for every γ follows from acceptance on a sample, the output lengths, and the time
of whole iterations. The best few by that, and plain decoding, are then timed in turn on the same
sentences, and the fastest is chosen.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from specdec_jax.analysis import acceptance, machine, timing
from specdec_jax.analysis import arms as analysis_arms
from specdec_jax.analysis.acceptance import Acceptance
from specdec_jax.analysis.arms import Arm, Batch
from specdec_jax.analysis.beams import Tree, search_head, trees_of
from specdec_jax.analysis.setup import TuneSetup
from specdec_jax.analysis.timing import Spread
from specdec_jax.decoding import costs
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.progress import track
from specdec_jax.decoding.request import plan

# How many choices are timed beside plain decoding.
_COMPARED = 5


class Choice(NamedTuple):
    """A way of decoding: γ (0 is plain) and the verifier."""

    gamma: int
    verifier: str

    def __str__(self) -> str:
        return f"gamma {self.gamma}, {self.verifier}" if self.gamma else "plain"

    def arguments(self, drafter, options) -> dict[str, Any]:
        """Returns the arguments of `generate`."""
        how = options.decoding(plain=not self.gamma) | {"gamma": self.gamma}
        return how | ({"drafter": drafter, "verifier": self.verifier} if self.gamma else {})


AnyChoice = TypeVar("AnyChoice", Choice, Tree)


def expected_seconds(
    accepted: Acceptance, padded: Sequence[int], choice: Choice, times: Mapping[str, Spread], step: float
) -> float:
    """Returns the expected seconds for all batches: encoders and iterations, less the draft steps
    by which the last ones are shorter.

    The first call of a drafter after a full acceptance is counted as if it were over one position,
    not two.

    Args:
      accepted: the measured acceptance.
      padded: padded input length of each batch.
      choice: γ and the verifier.
      times: seconds of iterations and encoders, from `step_times`.
      step: seconds of one draft step.
    """
    seconds = sum(times[f"target encoder {size}"].median for size in padded)
    iteration = iteration_seconds(choice, times)
    if not choice.gamma:
        return seconds + iteration * sum(int(lengths.max()) for lengths in accepted.lengths)
    seconds += sum(times[f"drafter encoder {size}"].median for size in padded if f"drafter encoder {size}" in times)
    for work in accepted.work[choice.verifier, choice.gamma]:
        assert work.draft_calls is not None
        seconds += work.calls * iteration + (work.draft_calls - choice.gamma * work.calls) * step
    return seconds


def iteration_seconds(choice: Choice, times: Mapping[str, Spread]) -> float:
    """Returns the seconds of one iteration.

    A second verifier was timed with the longest draft only; what it adds there to the first
    verifier's time is shared out evenly among the tokens of the draft.
    """
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
    """Returns what is worth timing: plain decoding, and the best few of the others, which differ by
    less than single steps scatter."""
    drafting = sorted((choice for choice in expected if choice.gamma), key=lambda choice: expected[choice])
    return [*(choice for choice in expected if not choice.gamma), *drafting[:_COMPARED]]


def keep_acceptance(target, drafter, inputs, alpha: float, decoding: Mapping[str, Any]) -> None:
    """Lets `gamma="auto"` begin with the measured acceptance rate, wherever it chooses γ for such
    inputs."""
    key = plan(target, inputs, drafter=drafter, **decoding).costs_key
    if key is not None and (known := costs.known(key)) is not None:
        costs.keep(key, known._replace(acceptance=min(max(float(alpha), 0.0), 1.0)))


def tune(target, drafter, batches: Sequence[Batch], others: Sequence[Batch], options: TuneSetup) -> dict[str, Any]:
    """Returns the record of `specdec tune`; `others` are the batches of the sweep, empty for no
    sweep."""
    analysis_arms.check_prompts(target, drafter, [*batches, *others], options)
    gammas = sorted(set(options.gammas))
    accepted = acceptance.measure_acceptance(target, drafter, batches, options.verifiers, gammas[-1], options)
    choices = [Choice(0, options.verifiers[0])] + [Choice(g, name) for name in options.verifiers for g in gammas]
    times = step_times(target, drafter, batches, choices, options)
    last = choices[-1]
    added = times[f"iteration, {last}"].median - times[f"call, {last}"].median
    step = max(0.0, added / last.gamma) if drafter.second_model is not None else 0.0
    padded = [batch.padded for batch in batches]
    expected = {choice: expected_seconds(accepted, padded, choice, times, step) for choice in choices}
    first = min(choices, key=lambda choice: expected[choice])
    measured = time_choices(target, drafter, candidates(expected), batches, options, "comparing")
    chosen = fastest(measured)
    plain, tokens = choices[0], sum(int(lengths.sum()) for lengths in accepted.lengths)
    return {
        **machine.head(target, drafter, batches, options),
        "acceptance": accepted.record(),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "draft_seconds": step,
        "choices": [
            {
                **choice._asdict(),
                "calls": sum(work.calls for work in accepted.work[choice.verifier,
                choice.gamma]) if choice.gamma else None,
                "expected_seconds_per_token": expected[choice] / tokens,
                "expected_improvement": expected[plain] / expected[choice],
                "seconds_per_token": Spread.of(measured[choice])._asdict() if choice in measured else None,
                "improvement": ratio(measured, plain, choice) if choice in measured else None,
            }
            for choice in choices
        ],
        "expected_best": first._asdict(),
        "chosen": chosen._asdict(),
        "improvement": ratio(measured, plain, chosen),
        "sweep": sweep(target, drafter, choices, chosen, others, options) if others else None,
    }  # fmt: skip


def step_times(target, drafter, batches: Sequence[Batch], choices: Sequence[Choice], options) -> dict[str, Spread]:
    """Returns the seconds of an iteration of the choices, of a call of the last one without its
    draft, and of the encoders.

    Every iteration is a program to compile, so of further verifiers only the one with the longest
    draft is timed.
    """
    rows, lengths = len(batches[0].ids), sorted({batch.padded for batch in batches})
    arms, last = {}, choices[-1]
    timed = [choice for choice in choices if choice.gamma in (0, last.gamma) or choice.verifier == choices[0].verifier]
    for choice in track(timed, len(timed), "compiling iterations"):
        how = options.decoding(plain=not choice.gamma)
        how |= {"verifier": choice.verifier} if choice.gamma else {}
        state = timing.iteration_state(
            target, drafter if choice.gamma else None, rows, lengths[-1], choice.gamma, **how
        )  # fmt: skip
        arms[f"iteration, {choice}"] = timing.iteration_arm(*state)
    arms[f"call, {last}"] = timing.call_arm(*state)
    room = state[0].tokens.shape[1]
    for length in lengths:
        arms[f"target encoder {length}"] = timing.prefill_arm(target.network, rows, length, room)
        if drafter.second_model is not None:
            arms[f"drafter encoder {length}"] = timing.prefill_arm(drafter.second_model.network, rows, length, room)
    analysis_arms.warm_up({}, arms, batches)
    return analysis_arms.time_steps(arms, options.repeats)


def time_choices(
    target, drafter, choices: Sequence[AnyChoice], batches: Sequence[Batch], options, what: str
) -> dict[AnyChoice, np.ndarray]:
    """Returns the seconds per token in each pass of every choice, timed in turn on the same
    sentences."""

    def arm(choice: AnyChoice) -> Arm:
        how = choice.arguments(drafter, options)
        return Arm(choice.gamma, lambda batch: generate(target, batch.inputs, key=batch.keys, **how))

    arms = {str(choice): arm(choice) for choice in choices}
    analysis_arms.warm_up(arms, {}, batches)
    for turn in range(options.repeats):
        analysis_arms.one_pass(arms, batches, turn, f"{what}, pass {turn + 1} of {options.repeats}")
    return {choice: arms[str(choice)].seconds_per_token for choice in choices}


def fastest(seconds: Mapping[AnyChoice, np.ndarray]) -> AnyChoice:
    """Returns the choice with the greatest median improvement over plain decoding; of equals the
    first.

    If the machine's speed drifts from pass to pass, the seconds of all choices change, but the
    ratios within a pass do not.
    """
    plain = next(choice for choice in seconds if not choice.gamma)
    return max(seconds, key=lambda choice: ratio(seconds, plain, choice)["median"])


def ratio(seconds: Mapping[AnyChoice, np.ndarray], above: AnyChoice, below: AnyChoice) -> dict[str, float]:
    """Returns the times of one choice divided by those of another, pass by pass."""
    return Spread.of(seconds[above] / seconds[below])._asdict()


def sweep(target, drafter, choices, chosen: AnyChoice, batches, options) -> dict[str, Any]:
    """Returns the wall time of every choice on other sentences, and that of the chosen one over the
    best: 1 if it is the best."""
    seconds = time_choices(target, drafter, choices, batches, options, "sweep")
    best = fastest(seconds)
    return {
        "sentences": machine.count_inputs(target, batches),
        "seconds_per_token": {str(choice): Spread.of(times)._asdict() for choice, times in seconds.items()},
        "improvement": {str(choice): ratio(seconds, choices[0], choice) for choice in choices},
        "best": best._asdict(),
        "chosen_over_best": ratio(seconds, chosen, best),
    }


def tune_beams(
    target, drafter, batches: Sequence[Batch], others: Sequence[Batch], options: TuneSetup
) -> dict[str, Any]:
    """Times every tree and plain beam search, and returns the record of the choice of levels and width."""
    widths = options.beam_width or (options.num_beams, None)
    choices = trees_of(target, drafter, sorted(set(options.gammas)), widths, [*batches, *others], options)
    measured = time_choices(target, drafter, choices, batches, options, "comparing")
    plain, chosen = choices[0], fastest(measured)
    return {
        **search_head(target, drafter, batches, options),
        "choices": [
            {
                **choice._asdict(),
                "seconds_per_token": Spread.of(measured[choice])._asdict(),
                "improvement": ratio(measured, plain, choice),
            }
            for choice in choices
        ],
        "chosen": chosen._asdict(),
        "improvement": ratio(measured, plain, chosen),
        "sweep": sweep(target, drafter, choices, chosen, others, options) if others else None,
    }


def choice_of(record: Mapping[str, Any]) -> Choice | Tree:
    """Returns a choice out of what a record says of it."""
    kind = Tree if "width" in record else Choice
    return kind(*(record[name] for name in kind._fields))
