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
from specdec_jax.analysis.beams import BeamChoice, beam_choices, describe_search
from specdec_jax.analysis.predictions import encoder_seconds
from specdec_jax.analysis.timing import CallShape, Spread, Times, summarize
from specdec_jax.analysis.top_k_hit_rate import acceptance_by_rank
from specdec_jax.analysis.variants import SentenceBatch, Variant, Workload, make_decoder
from specdec_jax.analysis.verdicts import find_best
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding import autotune, iteration_costs
from specdec_jax.decoding.checks import unsupported
from specdec_jax.decoding.request import plan
from specdec_jax.files.progress import track
from specdec_jax.speculative import trees
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.tree_text import read_tree, write_tree
from specdec_jax.speculative.verifiers import find_verifier

# How many choices are timed beside plain decoding.
_COMPARED = 5
# The name of the timing of a target call, before the number of its positions.
_CALL = "call over "


class Choice(NamedTuple):
    """A way of decoding: γ (0 is plain) and the verifier, or a tree as text.

    A tree has its depth as γ and the chain's default verifier.
    """

    gamma: int
    verifier: str
    tree: str | None = None

    def __str__(self) -> str:
        if self.tree is not None:
            tree = read_tree(self.tree)
            return f"{'dynamic ' * isinstance(tree, trees.DynamicTree)}tree of {tree.size}"
        return f"gamma {self.gamma}, {self.verifier}" if self.gamma else "plain"

    def arguments(self, drafter: Drafter | None, options: Any) -> dict[str, Any]:
        """Returns the arguments of `generate`."""
        if self.tree is not None:
            tree = {"verifier": "block", "tree": read_tree(self.tree)}
            return options.decoding() | {"drafter": drafter} | tree
        how = options.decoding(plain=not self.gamma) | {"gamma": self.gamma}
        return how | ({"drafter": drafter, "verifier": self.verifier} if self.gamma else {})


AnyChoice = TypeVar("AnyChoice", Choice, BeamChoice)


def expected_seconds(
    accepted: Acceptance, padded: Sequence[int], choice: Choice, times: Times, step: float
) -> float:
    """Returns the expected seconds of encoders and iterations for all batches.

    The last iterations of a batch have fewer draft steps. The first call of a drafter after a full
    acceptance is counted as if it were over one position, not two. `padded` has the padded input
    length of each batch, `times` is from `step_times`, and `step` the seconds of one draft step.
    """
    seconds = encoder_seconds(padded, times, choice.gamma > 0)
    iteration = iteration_seconds(choice, times)
    if not choice.gamma:
        return seconds + iteration * sum(int(lengths.max()) for lengths in accepted.lengths)
    for work in accepted.work[choice.verifier, choice.gamma]:
        assert work.draft_calls is not None
        seconds += work.calls * iteration + (work.draft_calls - choice.gamma * work.calls) * step
    return seconds


def best_trees(
    accepted: Acceptance, depth: int, times: Times, plain: float, step: float
) -> dict[Choice, float]:
    """Returns the best tree of each size, with the expected seconds of its iterations.

    Sizes are those whose call was timed. There is none of a size for which only a chain is worth
    its draft. After each tree comes the dynamic tree of this size and depth, with the same
    expectation.

    Args:
      accepted, times: as in `expected_seconds`; acceptance must be scored.
      depth: the greatest depth.
      plain, step: seconds of one iteration of plain decoding, and of one draft step.
    """
    found: dict[Choice, float] = {}
    for name in times:
        nodes = int(name.removeprefix(_CALL)) if name.startswith(_CALL) else 1
        if nodes == 1:
            continue
        shares = acceptance_by_rank(
            accepted.hit_rate["mixed" if "mixed" in accepted.hit_rate else "top"]
        )
        v = times[name].median / times[f"{_CALL}1"].median
        tree = trees.Tree.best(shares, nodes, depth, {2: v, nodes: v}, step / plain)
        if tree is not None and not tree.is_chain:
            calls = sum(int(lengths.max()) for lengths in accepted.lengths) / tree.expected(shares)
            width = max(2, tree.width)
            while width + (tree.depth - 1) * width**2 < tree.size - 1:
                width += 1
            for shape in (tree, trees.DynamicTree(tree.depth, width, tree.size)):
                choice = Choice(tree.depth, "block", write_tree(shape))
                found[choice] = calls * (v * plain + tree.depth * step)
    return found


def iteration_seconds(choice: Choice, times: Times) -> float:
    """Returns the seconds of one iteration.

    A second verifier was timed with the longest draft only. The time that it adds there to the
    first verifier's is taken as proportional to the number of drafted tokens.
    """
    if f"iteration, {choice}" in times:
        return times[f"iteration, {choice}"].median
    prefix = "iteration, gamma "
    names = [name.removeprefix(prefix).split(", ") for name in times if name.startswith(prefix)]
    longest = max(int(gamma) for gamma, _ in names)
    other = next(verifier for gamma, verifier in names if int(gamma) == choice.gamma)
    ours, theirs, shorter = (
        times[f"{prefix}{gamma}, {verifier}"].median
        for gamma, verifier in ((longest, choice.verifier), (longest, other), (choice.gamma, other))
    )
    return shorter + (ours - theirs) * choice.gamma / longest


def list_candidates(expected: Mapping[Choice, float]) -> list[Choice]:
    """Returns the choices worth timing: plain decoding, the best few chains, and all trees.

    The times of the best few chains differ by less than single steps scatter. Expectations of trees
    are less certain.
    """
    plain = [choice for choice in expected if not choice.gamma]
    trees = [choice for choice in expected if choice.tree is not None]
    chains = [choice for choice in expected if choice.gamma and choice.tree is None]
    return plain + sorted(chains, key=lambda choice: expected[choice])[:_COMPARED] + trees


def keep_acceptance(workload: Workload, alpha: float) -> None:
    """Keeps the measured acceptance rate, with which `gamma="auto"` begins for such inputs."""
    target, drafter, (batch, *_), options = workload
    planned = plan(target, batch.inputs, drafter=drafter, **options.decoding())
    if planned.auto_rows is not None:
        known = autotune.find_costs(planned)
        known = known._replace(acceptance=min(max(float(alpha), 0.0), 1.0))
        iteration_costs.save_costs(iteration_costs.costs_key(planned), known)


@isolated
def tune(workload: Workload, others: Sequence[SentenceBatch]) -> dict[str, Any]:
    """Returns the record of `specdec tune`.

    `others` are the batches of the sweep; if it is empty, there is none.
    """
    workload._replace(batches=[*workload.batches, *others]).check_prompts()
    drafter, options = workload.drafter, workload.options
    gammas, verifiers = sorted(set(options.gammas)), options.verifiers
    if options.tree_nodes and not acceptance.is_scored(workload, verifiers):
        how = f"{options.tree_nodes} with drafter={options.drafter!r}, verifier={verifiers[0]!r}"
        needed = "none: trees need a drafter and a verifier whose acceptance can be scored"
        raise unsupported("tree_nodes", how, needed)
    accepted = acceptance.measure_acceptance(workload, verifiers, gammas[-1])
    choices = [Choice(0, verifiers[0])] + [Choice(g, name) for name in verifiers for g in gammas]
    widths = sorted({1, *options.tree_nodes}) if accepted.hit_rate and options.tree_nodes else []
    times = step_times(workload, choices, widths)
    last = choices[-1]
    added = times[f"iteration, {last}"].median - times[f"call, {last}"].median
    step = max(0.0, added / last.gamma) if drafter.steps() else 0.0
    padded = workload.padded
    expected = {
        choice: expected_seconds(accepted, padded, choice, times, step) for choice in choices
    }
    found = best_trees(accepted, gammas[-1], times, iteration_seconds(choices[0], times), step)
    encoders = encoder_seconds(padded, times, True)
    expected |= {choice: encoders + seconds for choice, seconds in found.items()}
    choices += found
    first = min(choices, key=lambda choice: expected[choice])
    timed = time_choices(workload, list_candidates(expected), "comparing")
    plain, tokens = choices[0], sum(int(lengths.sum()) for lengths in accepted.lengths)
    not_timed = dict.fromkeys(("seconds_per_token", "improvement", "differing"))
    compared = []
    for choice in choices:
        chain = choice.gamma and choice.tree is None
        work = accepted.work[choice.verifier, choice.gamma] if chain else ()
        compared.append(
            {
                **choice._asdict(),
                "calls": sum(one.calls for one in work) if chain else None,
                "expected_seconds_per_token": expected[choice] / tokens,
                "expected_improvement": expected[plain] / expected[choice],
                **(_timed_record(choice, timed, options) if choice in timed else not_timed),
            }
        )
    return {
        **machine.begin_record(workload),
        "acceptance": accepted.record(),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "draft_seconds": step,
        "choices": compared,
        "expected_best": first._asdict(),
        **_choose(workload, choices, timed, others),
    }


@isolated
def tune_beams(workload: Workload, others: Sequence[SentenceBatch]) -> dict[str, Any]:
    """Times every tree and plain beam search, and returns the record of the choice."""
    options, everything = workload.options, workload._replace(batches=[*workload.batches, *others])
    widths, gammas = options.beam_width or (options.num_beams, None), sorted(set(options.gammas))
    choices = beam_choices(everything, gammas, widths)
    timed = time_choices(workload, choices, "comparing")
    return {
        **describe_search(workload),
        "choices": [choice._asdict() | _timed_record(choice, timed, options) for choice in choices],
        **_choose(workload, choices, timed, others),
    }


def _choose(
    workload: Workload,
    choices: Sequence[AnyChoice],
    timed: Mapping[AnyChoice, Variant],
    others: Sequence[SentenceBatch],
) -> dict[str, Any]:
    """Returns the part of a record about the choice; `choices` begin with plain decoding."""
    seconds = {choice: variant.seconds_per_token for choice, variant in timed.items()}
    chosen, swept = find_fastest(seconds), workload._replace(batches=others)
    return {
        "chosen": chosen._asdict(),
        "improvement": summarize(seconds[choices[0]] / seconds[chosen]),
        "verdict": find_best({str(choice): values for choice, values in seconds.items()}),
        "sweep": sweep_sentences(swept, choices, chosen) if others else None,
    }


def _timed_record(
    choice: AnyChoice, timed: Mapping[AnyChoice, Variant], options: Any
) -> dict[str, Any]:
    """Returns the part of a record about one timed choice.

    `differing` is the number of inputs with other tokens than plain decoding's. It is None for
    plain decoding, and for samples, which differ.
    """
    ours, plain = timed[choice], next(timed[other] for other in timed if not other.gamma)
    verifier = find_verifier(getattr(choice, "verifier", "block"))
    comparable = verifier.coupled or options.temperature == 0 and verifier.exact
    differing = analysis_variants.count_differing(ours, plain)
    return {
        "seconds_per_token": summarize(ours.seconds_per_token),
        "improvement": summarize(plain.seconds_per_token / ours.seconds_per_token),
        "differing": differing if choice.gamma and comparable else None,
    }


def step_times(
    workload: Workload, choices: Sequence[Choice], widths: Sequence[int] = ()
) -> dict[str, Spread]:
    """Returns the seconds of single steps.

    They are: an iteration of the choices, a call of the last one without its draft, the encoders,
    and a target call over each number of positions in `widths`. Every iteration is a program to
    compile, so a further verifier is timed with the longest draft only.
    """
    target, drafter, batches, options = workload
    rows, lengths, variants, last = workload.rows, workload.lengths, {}, choices[-1]
    timed = {
        str(choice): choice
        for choice in choices
        if choice.gamma in (0, last.gamma) or choice.verifier == choices[0].verifier
    }
    for choice in track(timed.values(), len(timed), "compiling iterations", names=list(timed)):
        how = options.decoding(plain=not choice.gamma)
        how |= {"verifier": choice.verifier} if choice.gamma else {}
        drafting = drafter if choice.gamma else None
        state = timing.iteration_state(target, drafting, rows, lengths[-1], choice.gamma, **how)
        variants[f"iteration, {choice}"] = timing.iteration_variant(*state)
    variants[f"call, {last}"] = timing.call_variant(*state)
    shape = CallShape(rows, lengths[-1], state[0].tokens.shape[1])
    variants |= timing.encoder_variants(target, drafter, lengths, shape)
    for width in widths:
        slots = timing.total_slots(target, lengths[-1], options.max_new_tokens, max(widths))
        wide = shape._replace(slots=slots)
        variants[f"{_CALL}{width}"] = timing.step_variant(target.network, wide, width)
    analysis_variants.warm_up({}, variants, batches)
    return analysis_variants.time_steps(variants, options.repeats)


def time_choices(
    workload: Workload, choices: Sequence[AnyChoice], what: str
) -> dict[AnyChoice, Variant]:
    """Returns every choice with its times and results, timed in turn on the same sentences."""
    target, drafter, batches, options = workload
    timed = {
        choice: Variant(choice.gamma, make_decoder(target, choice.arguments(drafter, options)))
        for choice in choices
    }
    variants = {str(choice): variant for choice, variant in timed.items()}
    analysis_variants.warm_up(variants, {}, batches)
    analysis_variants.time_passes(variants, batches, options.repeats, what)
    return timed


def find_fastest(seconds: Mapping[AnyChoice, np.ndarray]) -> AnyChoice:
    """Returns the choice with the greatest median improvement over plain decoding.

    Of equals it is the first. If the machine's speed drifts from pass to pass, the seconds of all
    choices change, but the ratios within a pass do not. `seconds` are per token, of each pass.
    """
    plain = next(values for choice, values in seconds.items() if not choice.gamma)
    return max(seconds, key=lambda choice: float(np.median(plain / seconds[choice])))


def sweep_sentences(
    workload: Workload, choices: Sequence[AnyChoice], chosen: AnyChoice
) -> dict[str, Any]:
    """Times every choice on the sentences of the sweep, and returns the part of a record about it.

    `chosen_over_best` is the time of the chosen one over that of the fastest here.
    """
    timed = time_choices(workload, choices, "sweep")
    seconds = {choice: variant.seconds_per_token for choice, variant in timed.items()}
    best, plain = find_fastest(seconds), seconds[choices[0]]
    return {
        "sentences": machine.count_inputs(workload.target, workload.batches),
        "seconds_per_token": {str(choice): summarize(found) for choice, found in seconds.items()},
        "improvement": {str(choice): summarize(plain / seconds[choice]) for choice in choices},
        "best": best._asdict(),
        "chosen_over_best": summarize(seconds[chosen] / seconds[best]),
    }


def read_choice(record: Mapping[str, Any]) -> Choice | BeamChoice:
    """Returns the choice that a record holds."""
    kind = BeamChoice if "width" in record else Choice
    return kind(*(record[name] for name in kind._fields))
