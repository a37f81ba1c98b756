"""Plain against speculative beam search on one machine: wall time, steps for each target call,
equal outputs.

The variants are timed as those of `benchmark`, with greedy decoding among them as a yardstick.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.analysis import comparison, machine, near_ties, verdicts
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.setup import BeamSetup, BenchmarkSetup
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.variants import Batch, Variant
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.beams import BeamOptions, plan_decoding
from specdec_jax.decoding.generate import generate
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter

# Sums of some tens of float32 log-probabilities, added up in another order, differ by less.
MARGIN = 1e-4


class Tree(NamedTuple):
    """A way of searching: γ levels of u nodes are drafted; plain beam search has none."""

    gamma: int
    width: int

    def __str__(self) -> str:
        return f"gamma {self.gamma}, width {self.width}" if self.gamma else "plain"

    def arguments(self, drafter: Drafter | None, options: BeamSetup) -> dict[str, Any]:
        """Returns the arguments of `generate`."""
        how = options.decoding(plain=True) | options.search(beam_width=self.width or None)
        return how | {"gamma": self.gamma, "drafter": drafter if self.gamma else None}


def trees_of(
    target: LanguageModel,
    drafter: Drafter | None,
    gammas: Sequence[int],
    widths: Sequence[int | None],
    batches: Sequence[Batch],
    options: BeamSetup,
) -> list[Tree]:
    """Returns plain search and what the drafter can draft for it: every number of levels in every
    width.

    Args:
      gammas: the numbers of levels.
      widths: of each level; None: what the drafter drafts by default.

    Raises:
      ValueError: models or inputs that one of the searches cannot have; nothing has compiled by
        then.
    """
    trees = [Tree(0, 0)]
    analysis_variants.check_prompts(target, drafter, batches, options)
    plan_decoding(
        target, batches[0].inputs, **trees[0].arguments(None, options) | {"drafter": drafter}
    )
    if drafter is not None:
        beams = BeamOptions(**options.search()).num_beams
        found = dict.fromkeys(drafter.beam_width(beams, width) for width in widths)
        trees += [Tree(gamma, width) for width in found for gamma in gammas]
    return trees


@isolated
def search_head(target, drafter, batches: Sequence[Batch], options: BeamSetup) -> dict[str, Any]:
    """What a record begins with; the length penalty is that which is meant where none was given."""
    penalty = BeamOptions(**options.search()).penalty
    return machine.head(target, drafter, batches, options) | {"length_penalty": penalty}


@isolated
def benchmark_beams(
    target: LanguageModel,
    drafter: Drafter | None,
    batches: Sequence[Batch],
    options: BenchmarkSetup,
    others: Mapping[str, Variant] | None = None,
) -> tuple[dict, list[str]]:
    """Times the variants; returns the record and what contradicts exactness (nothing, one hopes).

    Args:
      drafter: None times plain beam search and greedy decoding alone.
      others: another implementation's beam search by its name, timed in turn with ours; None or
        empty: none.
    """
    trees = trees_of(
        target, drafter, options.gammas, options.beam_width or (None,), batches, options
    )

    def variant(gamma: int, how: dict[str, Any]) -> Variant:
        return Variant(gamma, lambda batch: generate(target, batch.inputs, key=batch.keys, **how))

    variants = {str(tree): variant(tree.gamma, tree.arguments(drafter, options)) for tree in trees}
    searches, greedy = dict(variants), variant(0, options.decoding(plain=True))
    variants |= {"greedy": greedy} | dict(others or {})
    analysis_variants.warm_up(variants, {}, batches)
    for repeat in range(options.repeats):
        analysis_variants.one_pass(
            variants, batches, repeat, f"timing, pass {repeat + 1} of {options.repeats}"
        )

    plain, problems = variants["plain"], analysis_variants.missing_outputs(variants)
    how = trees[0].arguments(None, options)

    def differences(theirs, plain, target, batches):
        return _differences(theirs, plain, target, batches, how)

    record = {
        **search_head(target, drafter, batches, options),
        "plain": _timed(plain),
        "greedy": _timed(greedy, plain),
    }
    record["searches"] = [
        {
            **tree._asdict(),
            **_timed(searches[str(tree)], plain),
            "calls_over_plain": searches[str(tree)].total("target_calls")
            / max(plain.total("target_calls"), 1),
            "differences": differences(searches[str(tree)], plain, target, batches),
        }
        for tree in trees[1:]
    ]
    seconds = {name: np.array(variant.seconds) for name, variant in searches.items()}
    record["verdict"] = verdicts.find_best(seconds)
    compared = [
        {"name": str(tree), **found}
        for tree, found in zip(trees[1:], record["searches"], strict=True)
    ]
    for name in comparison.others_of(others):
        record["against"] = comparison.compare(
            name, searches | dict(others or {}), target, batches, differences
        )
        compared.append(record["against"])
    for found in compared:
        problems += comparison.problems(found, target.config.dtype, MARGIN)
    return record, problems


def _timed(variant: Variant, plain: Variant | None = None) -> dict[str, Any]:
    """What every variant has: seconds of a pass, tokens of the outputs, and counts; of others than
    the plain one also how many times as fast they are for the same inputs."""
    stats = variant.totals()
    # A search takes more steps than its output has tokens.
    steps = sum(
        result.stats.target_calls * (result.stats.tokens_per_target_call or 0)
        for result in variant.results
    )
    record = {
        "seconds": Spread.from_samples(variant.seconds)._asdict(),
        "tokens": variant.tokens,
        "compile_seconds": variant.compile_seconds,
        "stats": stats
        | {"steps": round(steps), "steps_per_target_call": steps / max(stats["target_calls"], 1)},
    }
    if plain is not None:
        record["improvement"] = Spread.from_samples(
            np.array(plain.seconds) / np.array(variant.seconds)
        )._asdict()
    return record


def _differences(
    theirs: Variant,
    plain: Variant,
    target: LanguageModel,
    batches: Sequence[Batch],
    how: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Every input whose best output differs from plain beam search's, with how near to a tie that
    search comes."""
    found = []
    for batch, other, ours in zip(batches, theirs.results, plain.results, strict=True):
        for row in np.flatnonzero(np.any(other.tokens != ours.tokens, axis=1)):
            position = int(np.argmax(other.tokens[row] != ours.tokens[row]))
            assert ours.scores is not None and other.scores is not None, "both are of beam searches"
            margin = near_ties.search_margin(target, batch.inputs[row], how)
            found.append(
                {
                    "input": batch.numbers[row],
                    "position": position,
                    "plain": int(ours.tokens[row, position]),
                    "theirs": int(other.tokens[row, position]),
                    "margin": margin,
                    "near_tie": margin <= MARGIN,
                    "scores": [float(ours.scores[row]), float(other.scores[row])],
                }
            )
    return sorted(found, key=lambda item: item["input"])
