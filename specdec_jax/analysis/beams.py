"""Compares plain with speculative beam search: wall time, steps per target call, equal outputs.

The variants are timed as those of `benchmark`, with greedy decoding among them for comparison.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.analysis import comparison, machine, near_ties, verdicts
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.timing import summarize
from specdec_jax.analysis.variants import SentenceBatch, Variant, Workload
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.decoding.search_options import BeamOptions
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter

# Sums of some tens of float32 log-probabilities, added up in another order, differ by less.
MARGIN = 1e-4


class BeamChoice(NamedTuple):
    """A way of searching: γ levels of u nodes are drafted; plain beam search has none."""

    gamma: int
    width: int

    def __str__(self) -> str:
        return f"gamma {self.gamma}, width {self.width}" if self.gamma else "plain"

    def arguments(self, drafter: Drafter | None, options: Any) -> dict[str, Any]:
        """Returns the arguments of `generate`."""
        how = options.decoding(plain=True) | options.search(beam_width=self.width or None)
        return how | {"gamma": self.gamma, "drafter": drafter if self.gamma else None}


def beam_choices(
    workload: Workload, gammas: Sequence[int], widths: Sequence[int | None]
) -> list[BeamChoice]:
    """Returns plain search, and every number of levels in every width that the drafter can draft.

    `gammas` are the numbers of levels, `widths` those of each; None: the drafter's default.

    Raises:
      ValueError: models or inputs that one of the searches cannot have, before anything compiles.
    """
    plain = BeamChoice(0, 0)
    target, drafter, batches, options = workload
    workload.check_prompts()
    arguments = plain.arguments(None, options) | {"drafter": drafter}
    plan_decoding(target, batches[0].inputs, **arguments)
    if drafter is None:
        return [plain]
    beams = BeamOptions(**options.search()).num_beams
    found = dict.fromkeys(drafter.beam_width(beams, width) for width in widths)
    return [plain, *(BeamChoice(gamma, width) for width in found for gamma in gammas)]


@isolated
def describe_search(workload: Workload) -> dict[str, Any]:
    """Returns the beginning of a record, with the length penalty that is used."""
    penalty = BeamOptions(**workload.options.search()).penalty
    return machine.begin_record(workload) | {"length_penalty": penalty}


@isolated
def benchmark_beams(
    workload: Workload, others: Mapping[str, Variant] | None = None
) -> tuple[dict, list[str]]:
    """Times the variants; returns the record, and messages about outputs that differ.

    Without a drafter, plain beam search and greedy decoding are timed. `others` are as for
    `benchmark`.
    """
    target, drafter, batches, options = workload
    choices = beam_choices(workload, options.gammas, options.beam_width or (None,))
    searches = {
        str(choice): Variant(
            choice.gamma, analysis_variants.make_decoder(target, choice.arguments(drafter, options))
        )
        for choice in choices
    }
    greedy = Variant(0, analysis_variants.make_decoder(target, options.decoding(plain=True)))
    variants = searches | {"greedy": greedy} | dict(others or {})
    analysis_variants.warm_up(variants, {}, batches)
    analysis_variants.time_passes(variants, batches, options.repeats, "timing")

    plain, problems = variants["plain"], analysis_variants.missing_outputs(variants)
    differences = functools.partial(_find_differences, how=choices[0].arguments(None, options))
    record = {
        **describe_search(workload),
        "plain": _timed_record(plain),
        "greedy": _timed_record(greedy, plain),
        "searches": [],
    }
    compared = []
    plain_calls = max(plain.total("target_calls"), 1)
    for choice in choices[1:]:
        search = searches[str(choice)]
        found = choice._asdict() | _timed_record(search, plain)
        found["calls_over_plain"] = search.total("target_calls") / plain_calls
        found["differences"] = differences(search, plain, target, batches)
        record["searches"].append(found)
        compared.append({"name": str(choice), **found})
    seconds = {name: np.array(variant.seconds) for name, variant in searches.items()}
    record["verdict"] = verdicts.find_best(seconds)
    for name in comparison.list_other_implementations(others):
        beside = searches | dict(others or {})
        record["against"] = comparison.compare(name, beside, target, batches, differences)
        compared.append(record["against"])
    for found in compared:
        problems += comparison.find_problems(found, target.config.dtype, MARGIN)
    return record, problems


def _timed_record(variant: Variant, plain: Variant | None = None) -> dict[str, Any]:
    """Returns the record of one variant; with `plain`, also the improvement over it."""
    stats = variant.totals()
    # A search takes more steps than its output has tokens.
    steps = sum(
        result.stats.target_calls * (result.stats.tokens_per_target_call or 0)
        for result in variant.results
    )
    stats["steps"] = round(steps)
    stats["steps_per_target_call"] = steps / max(stats["target_calls"], 1)
    record = variant.record() | {"stats": stats}
    if plain is not None:
        record["improvement"] = summarize(np.array(plain.seconds) / np.array(variant.seconds))
    return record


def _find_differences(
    theirs: Variant,
    plain: Variant,
    target: LanguageModel,
    batches: Sequence[SentenceBatch],
    how: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Returns the inputs whose best output differs from plain beam search's, with its margin."""

    def measure(
        batch: SentenceBatch, other: GenerationResult, ours: GenerationResult, row: int, _: int
    ) -> dict[str, Any]:
        assert ours.scores is not None and other.scores is not None, "both are of beam searches"
        margin = near_ties.search_margin(target, batch.inputs[row], how)
        scores = [float(ours.scores[row]), float(other.scores[row])]
        return {"margin": margin, "near_tie": margin <= MARGIN, "scores": scores}

    return analysis_variants.list_differences(theirs, plain, batches, measure)
