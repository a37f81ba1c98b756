"""Chooses γ and the verifier, or a token tree, by measurement.

The expected time for every γ follows from acceptance on a sample, the output lengths, and the time
of whole iterations. The best few by that, every tree, and plain decoding are then timed in turn on
the same sentences, and the fastest is chosen. A tree is the best of its size by the top-k hit rate
on the sample and by the times of a target call and of a draft step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from specdec_jax.analysis import acceptance, machine, timing
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.acceptance import Acceptance
from specdec_jax.analysis.beams import Tree, search_head, trees_of
from specdec_jax.analysis.setup import TuneSetup
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.top_k_hit_rate import by_rank
from specdec_jax.analysis.variants import Batch, Variant
from specdec_jax.analysis.verdicts import find_best
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding import autotune
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.request import plan
from specdec_jax.files.progress import track
from specdec_jax.speculative import trees
from specdec_jax.speculative.tree_text import read_tree, text_of
from specdec_jax.speculative.verifiers import verifier_of

# How many choices are timed beside plain decoding.
_COMPARED = 5
# What the timing of a target call is called, before the number of its positions.
_CALL = "call over "


class Choice(NamedTuple):
    """A way of decoding: γ (0 is plain) and the verifier; or a tree as text, with its depth as γ
    and the chain's default verifier."""

    gamma: int
    verifier: str
    tree: str | None = None

    def __str__(self) -> str:
        if self.tree is not None:
            tree = read_tree(self.tree)
            return f"{'dynamic ' * isinstance(tree, trees.DynamicTree)}tree of {tree.size}"
        return f"gamma {self.gamma}, {self.verifier}" if self.gamma else "plain"

    def arguments(self, drafter, options) -> dict[str, Any]:
        """Returns the arguments of `generate`."""
        if self.tree is not None:
            return options.decoding() | {
                "drafter": drafter,
                "verifier": "block",
                "tree": read_tree(self.tree),
            }
        how = options.decoding(plain=not self.gamma) | {"gamma": self.gamma}
        return how | ({"drafter": drafter, "verifier": self.verifier} if self.gamma else {})


AnyChoice = TypeVar("AnyChoice", Choice, Tree)


def expected_seconds(
    accepted: Acceptance,
    padded: Sequence[int],
    choice: Choice,
    times: Mapping[str, Spread],
    step: float,
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
    seconds, iteration = (
        encoder_seconds(padded, times, choice.gamma > 0),
        iteration_seconds(choice, times),
    )
    if not choice.gamma:
        return seconds + iteration * sum(int(lengths.max()) for lengths in accepted.lengths)
    for work in accepted.work[choice.verifier, choice.gamma]:
        assert work.draft_calls is not None
        seconds += work.calls * iteration + (work.draft_calls - choice.gamma * work.calls) * step
    return seconds


def encoder_seconds(padded: Sequence[int], times: Mapping[str, Spread], drafts: bool) -> float:
    """Returns the seconds of the encoders for all batches, with `drafts` of the drafter's too."""
    names = [
        f"{who} encoder {size}" for who in ("target", "drafter")[: 1 + drafts] for size in padded
    ]
    return sum(times[name].median for name in names if name in times)


def best_trees(
    accepted: Acceptance, depth: int, times: Mapping[str, Spread], plain: float, step: float
) -> dict[Choice, float]:
    """Returns the best tree of each size whose call was timed, with the expected seconds of its
    iterations; none of a size for which nothing but a chain is worth its draft.

    After it comes the tree of this size and depth that the drafter's distribution shapes, of which
    no more is expected.

    Args:
      accepted: the measured acceptance, scored.
      depth: the greatest depth.
      times: seconds of target calls, from `step_times`.
      plain: seconds of one iteration of plain decoding.
      step: seconds of one draft step.
    """
    found: dict[Choice, float] = {}
    for name in times:
        nodes = int(name.removeprefix(_CALL)) if name.startswith(_CALL) else 1
        if nodes == 1:
            continue
        shares = by_rank(accepted.hit_rate["mixed" if "mixed" in accepted.hit_rate else "top"])
        v = times[name].median / times[f"{_CALL}1"].median
        tree = trees.Tree.best(shares, nodes, depth, {2: v, nodes: v}, step / plain)
        if tree is not None and not tree.is_chain:
            calls = sum(int(lengths.max()) for lengths in accepted.lengths) / tree.expected(shares)
            width = next(
                w
                for w in range(max(2, tree.width), nodes)
                if w + (tree.depth - 1) * w**2 >= tree.size - 1
            )
            for shape in (tree, trees.DynamicTree(tree.depth, width, tree.size)):
                found[Choice(tree.depth, "block", text_of(shape))] = calls * (
                    v * plain + tree.depth * step
                )
    return found


def iteration_seconds(choice: Choice, times: Mapping[str, Spread]) -> float:
    """Returns the seconds of one iteration.

    A second verifier was timed with the longest draft only; what it adds there to the first
    verifier's time is shared out evenly among the tokens of the draft.
    """
    if f"iteration, {choice}" in times:
        return times[f"iteration, {choice}"].median
    names = [
        name.removeprefix("iteration, gamma ").split(", ")
        for name in times
        if name.startswith("iteration, gamma ")
    ]
    longest = max(int(gamma) for gamma, _ in names)
    other = next(verifier for gamma, verifier in names if int(gamma) == choice.gamma)

    def seconds(*of):
        return times[f"iteration, {Choice(*of)}"].median

    added = seconds(longest, choice.verifier) - seconds(longest, other)
    return seconds(choice.gamma, other) + added * choice.gamma / longest


def candidates(expected: Mapping[Choice, float]) -> list[Choice]:
    """Returns what is worth timing: plain decoding, the best few of the chains, which differ by
    less than single steps scatter, and all trees, of which less is known."""
    chains = sorted(
        (c for c in expected if c.gamma and c.tree is None), key=lambda choice: expected[choice]
    )
    return [
        *(c for c in expected if not c.gamma),
        *chains[:_COMPARED],
        *(c for c in expected if c.tree is not None),
    ]


def keep_acceptance(target, drafter, inputs, alpha: float, decoding: Mapping[str, Any]) -> None:
    """Lets `gamma="auto"` begin with the measured acceptance rate, wherever it chooses γ for such
    inputs."""
    key = plan(target, inputs, drafter=drafter, **decoding).costs_key
    if key is not None and (known := autotune.known(key)) is not None:
        autotune.keep(key, known._replace(acceptance=min(max(float(alpha), 0.0), 1.0)))


@isolated
def tune(
    target, drafter, batches: Sequence[Batch], others: Sequence[Batch], options: TuneSetup
) -> dict[str, Any]:
    """Returns the record of `specdec tune`; `others` are the batches of the sweep, empty for no
    sweep."""
    analysis_variants.check_prompts(target, drafter, [*batches, *others], options)
    gammas = sorted(set(options.gammas))
    accepted = acceptance.measure_acceptance(
        target, drafter, batches, options.verifiers, gammas[-1], options
    )
    choices = [Choice(0, options.verifiers[0])] + [
        Choice(g, name) for name in options.verifiers for g in gammas
    ]
    widths = sorted({1, *options.tree_nodes}) if accepted.hit_rate and options.tree_nodes else []
    times = step_times(target, drafter, batches, choices, options, widths)
    last = choices[-1]
    added = times[f"iteration, {last}"].median - times[f"call, {last}"].median
    step = max(0.0, added / last.gamma) if drafter.steps() else 0.0
    padded = [batch.padded for batch in batches]
    expected = {
        choice: expected_seconds(accepted, padded, choice, times, step) for choice in choices
    }
    found = best_trees(accepted, gammas[-1], times, iteration_seconds(choices[0], times), step)
    expected |= {
        choice: encoder_seconds(padded, times, True) + seconds for choice, seconds in found.items()
    }
    choices += found
    first = min(choices, key=lambda choice: expected[choice])
    timed = time_choices(target, drafter, candidates(expected), batches, options, "comparing")
    measured = seconds_of(timed)
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
                "calls": sum(work.calls for work in accepted.work[choice.verifier, choice.gamma])
                if choice.gamma and choice.tree is None
                else None,
                "expected_seconds_per_token": expected[choice] / tokens,
                "expected_improvement": expected[plain] / expected[choice],
                "seconds_per_token": Spread.from_samples(measured[choice])._asdict()
                if choice in measured
                else None,
                "improvement": ratio(measured, plain, choice) if choice in measured else None,
                "differing": count_differing(choice, timed, options),
            }
            for choice in choices
        ],
        "expected_best": first._asdict(),
        "chosen": chosen._asdict(),
        "improvement": ratio(measured, plain, chosen),
        "verdict": find_best({str(choice): seconds for choice, seconds in measured.items()}),
        "sweep": sweep(target, drafter, choices, chosen, others, options) if others else None,
    }


def step_times(
    target,
    drafter,
    batches: Sequence[Batch],
    choices: Sequence[Choice],
    options,
    widths: Sequence[int] = (),
) -> dict[str, Spread]:
    """Returns the seconds of an iteration of the choices, of a call of the last one without its
    draft, of the encoders, and of a target call over each number of positions in `widths`.

    Every iteration is a program to compile, so of further verifiers only the one with the longest
    draft is timed.
    """
    rows, lengths = len(batches[0].ids), sorted({batch.padded for batch in batches})
    variants, last = {}, choices[-1]
    timed = [
        choice
        for choice in choices
        if choice.gamma in (0, last.gamma) or choice.verifier == choices[0].verifier
    ]
    for choice in track(
        timed, len(timed), "compiling iterations", names=[str(choice) for choice in timed]
    ):
        how = options.decoding(plain=not choice.gamma)
        how |= {"verifier": choice.verifier} if choice.gamma else {}
        state = timing.iteration_state(
            target, drafter if choice.gamma else None, rows, lengths[-1], choice.gamma, **how
        )
        variants[f"iteration, {choice}"] = timing.iteration_variant(*state)
    variants[f"call, {last}"] = timing.call_variant(*state)
    room = state[0].tokens.shape[1]
    for length in lengths:
        variants[f"target encoder {length}"] = timing.prefill_variant(
            target.network, rows, length, room
        )
        if drafter.second_model is not None:
            variants[f"drafter encoder {length}"] = timing.prefill_variant(
                drafter.second_model.network, rows, length, room
            )
    for width in widths:
        room = timing.total_slots(target, lengths[-1], options.max_new_tokens, max(widths))
        variants[f"{_CALL}{width}"] = timing.step_variant(
            target.network, rows, lengths[-1], room, width
        )
    analysis_variants.warm_up({}, variants, batches)
    return analysis_variants.time_steps(variants, options.repeats)


def time_choices(
    target, drafter, choices: Sequence[AnyChoice], batches: Sequence[Batch], options, what: str
) -> dict[AnyChoice, Variant]:
    """Returns every choice with its times and results, timed in turn on the same sentences."""

    def variant(choice: AnyChoice) -> Variant:
        how = choice.arguments(drafter, options)
        return Variant(
            choice.gamma, lambda batch: generate(target, batch.inputs, key=batch.keys, **how)
        )

    variants = {str(choice): variant(choice) for choice in choices}
    analysis_variants.warm_up(variants, {}, batches)
    for turn in range(options.repeats):
        analysis_variants.one_pass(
            variants, batches, turn, f"{what}, pass {turn + 1} of {options.repeats}"
        )
    return {choice: variants[str(choice)] for choice in choices}


def seconds_of(timed: Mapping[AnyChoice, Variant]) -> dict[AnyChoice, np.ndarray]:
    """Returns the seconds per token in each pass of every choice."""
    return {choice: variant.seconds_per_token for choice, variant in timed.items()}


def count_differing(
    choice: AnyChoice, timed: Mapping[AnyChoice, Variant], options: TuneSetup
) -> int | None:
    """Returns how many inputs of a choice have other tokens than plain decoding's; None where
    nothing was drafted or timed, and for samples, which are others."""
    plain = next(variant for other, variant in timed.items() if not other.gamma)
    verifier = verifier_of(getattr(choice, "verifier", "block"))
    comparable = verifier.coupled or options.temperature == 0 and verifier.exact
    if not choice.gamma or choice not in timed or not comparable:
        return None
    pairs = zip(timed[choice].results, plain.results, strict=True)
    return sum(int(np.any(ours.tokens != theirs.tokens, axis=1).sum()) for ours, theirs in pairs)


def fastest(seconds: Mapping[AnyChoice, np.ndarray]) -> AnyChoice:
    """Returns the choice with the greatest median improvement over plain decoding; of equals the
    first.

    If the machine's speed drifts from pass to pass, the seconds of all choices change, but the
    ratios within a pass do not.
    """
    plain = next(choice for choice in seconds if not choice.gamma)
    return max(seconds, key=lambda choice: ratio(seconds, plain, choice)["median"])


def ratio(
    seconds: Mapping[AnyChoice, np.ndarray], above: AnyChoice, below: AnyChoice
) -> dict[str, float]:
    """Returns the times of one choice divided by those of another, pass by pass."""
    return Spread.from_samples(seconds[above] / seconds[below])._asdict()


def sweep(target, drafter, choices, chosen: AnyChoice, batches, options) -> dict[str, Any]:
    """Returns the wall time of every choice on other sentences, and that of the chosen one over the
    best: 1 if it is the best."""
    seconds = seconds_of(time_choices(target, drafter, choices, batches, options, "sweep"))
    best = fastest(seconds)
    return {
        "sentences": machine.count_inputs(target, batches),
        "seconds_per_token": {
            str(choice): Spread.from_samples(times)._asdict() for choice, times in seconds.items()
        },
        "improvement": {str(choice): ratio(seconds, choices[0], choice) for choice in choices},
        "best": best._asdict(),
        "chosen_over_best": ratio(seconds, chosen, best),
    }


@isolated
def tune_beams(
    target, drafter, batches: Sequence[Batch], others: Sequence[Batch], options: TuneSetup
) -> dict[str, Any]:
    """Times every tree and plain beam search, and returns the record of the choice of levels and
    width."""
    widths = options.beam_width or (options.num_beams, None)
    choices = trees_of(
        target, drafter, sorted(set(options.gammas)), widths, [*batches, *others], options
    )
    timed = time_choices(target, drafter, choices, batches, options, "comparing")
    measured = seconds_of(timed)
    plain, chosen = choices[0], fastest(measured)
    return {
        **search_head(target, drafter, batches, options),
        "choices": [
            {
                **choice._asdict(),
                "seconds_per_token": Spread.from_samples(measured[choice])._asdict(),
                "improvement": ratio(measured, plain, choice),
                "differing": count_differing(choice, timed, options),
            }
            for choice in choices
        ],
        "chosen": chosen._asdict(),
        "improvement": ratio(measured, plain, chosen),
        "verdict": find_best({str(choice): seconds for choice, seconds in measured.items()}),
        "sweep": sweep(target, drafter, choices, chosen, others, options) if others else None,
    }


def choice_of(record: Mapping[str, Any]) -> Choice | Tree:
    """Returns a choice out of what a record says of it."""
    kind = Tree if "width" in record else Choice
    return kind(*(record[name] for name in kind._fields))
