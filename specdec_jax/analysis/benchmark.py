"""Compares plain with speculative decoding on one machine: wall time, α, c, v, predicted and
measured improvement.

Variants are interleaved batch by batch, since the speed of a shared machine drifts. Encoders and
tokenisation are inside the wall time, compilation is kept apart, and the tokens of all variants are
counted in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.analysis import (
    acceptance,
    comparison,
    machine,
    near_ties,
    predictions,
    timing,
    traces,
    tree_drawing,
    verdicts,
)
from specdec_jax.analysis import matmul_roofline as analysis_products
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.setup import BenchmarkSetup
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.top_k_hit_rate import HitRates
from specdec_jax.analysis.tuning import Choice
from specdec_jax.analysis.variants import Batch, Variant
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.trees import tree_options
from specdec_jax.files.progress import waiting
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import decoder_only
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.tree_text import read_tree
from specdec_jax.speculative.tree_verifiers import TREE_VERIFIERS
from specdec_jax.speculative.trees import LOSSY_TREES, DynamicTree, Tree
from specdec_jax.speculative.verifiers import SYNTHETIC, verifier_of


@isolated
def benchmark(
    target: LanguageModel,
    drafter: Drafter | None,
    batches: Sequence[Batch],
    options: BenchmarkSetup,
    others: Mapping[str, Variant] | None = None,
) -> tuple[dict, list[str]]:
    """Times the variants and the single steps; returns the record, and messages about what
    contradicts exactness.

    A drafter without a model has no steps to time: c is not measured, and predictions count it as
    0. For a drafter made of several no steps are timed and nothing is predicted. With a preset the
    weights are random and α would mean nothing: unless α is forced, only plain decoding and steps
    are timed, and above temperature 0 the cost of sampling.

    Args:
      target, drafter: the pair.
      batches: sentences.
      options: what is measured and how.
      others: variants of another implementation by its name, timed in turn with ours; None or
        empty: none.
    """

    def variant(gamma: int, synthetic_alpha: float | None = None) -> Variant:
        wanted, forced = options.gamma_of(gamma) if gamma else 0, {}
        if synthetic_alpha is not None:
            forced = dict(verifier=SYNTHETIC.name, synthetic_alpha=synthetic_alpha)
        return Variant(
            gamma,
            lambda batch: generate(
                target,
                batch.inputs,
                drafter=drafter if gamma else None,
                gamma=wanted,
                key=batch.keys,
                **options.decoding(plain=not gamma) | forced,
            ),
            synthetic_alpha=synthetic_alpha,
        )

    trees = _trees(drafter, options)
    speculative = (
        options.gammas
        if drafter is not None and (options.synthetic_alpha or not options.preset)
        else ()
    )
    analysis_variants.check_prompts(target, drafter, batches, options)
    variants = {"plain": variant(0)}
    for gamma in speculative:
        for alpha in options.synthetic_alpha or (None,):
            variants[f"gamma {gamma}" + ("" if alpha is None else f", alpha {alpha:g}")] = variant(
                gamma, alpha
            )
    variants |= {
        f"tree {text}": _tree_variant(text, target, drafter, options) for text in trees
    } | dict(others or {})
    steps = _step_variants(target, drafter, batches, options, trees)
    analysis_variants.warm_up(variants, steps, batches)
    timed = []
    for repeat in range(options.repeats):
        turn = f"pass {repeat + 1} of {options.repeats}"
        timed.append(analysis_variants.timed_steps(steps, repeat, f"timing steps, {turn}"))
        analysis_variants.one_pass(variants, batches, repeat, f"timing, {turn}")
    record = _record(target, drafter, variants, analysis_variants.per_step(timed), batches, options)
    if trees:
        hit_rate = _hit_rate(target, drafter, trees, batches, variants["plain"], options)
        record |= _tree_records(
            variants, trees, target, analysis_variants.per_step(timed), batches, options, hit_rate
        )
    if (
        not options.preset
        and options.batch_size == 1
        and options.gamma_policy == "fixed"
        and drafter is not None
    ):
        with waiting("tracing the calls of the first input"):
            record["example"] = _example(
                target, drafter, batches, analysis_variants.per_step(timed), options
            )
    if options.samples_preset:
        seconds = {name: [one[name] for one in timed] for name in steps}
        record["sampling_cost"] = {
            str(gamma): predictions.sampling_cost(gamma, seconds) for gamma in options.gammas
        }
    problems = _problems(record, variants, options, target)
    for name in comparison.others_of(others):
        record["against"] = comparison.compare(name, variants, target, batches)
        problems += comparison.problems(record["against"], target.config.dtype)
    return record, problems


def _trees(drafter: Drafter | None, options: BenchmarkSetup) -> dict[str, Tree | DynamicTree]:
    """Returns the trees that are timed, by their text, with the children and verifiers that suit
    the drafter.

    Raises:
      UnsupportedCombination: a tree that the drafter does not draft.
    """
    given = {text: read_tree(text) for text in options.tree}
    return {
        text: tree_options(tree, drafter, "auto", "block").tree or tree
        for text, tree in given.items()
    }


def _example(
    target, drafter: Drafter, batches, times: Mapping[str, Spread], options
) -> dict[str, Any] | None:
    """Returns the calls of one input with every γ, and one call of every tree; None if there is no
    text."""
    gammas, first = () if options.synthetic_alpha else options.gammas, traces.first_text(batches)
    if first is None:
        return None
    trees = (
        {"trees": tree_drawing.examples(target, drafter, first, options)} if options.tree else {}
    )
    return traces.example(target, drafter, gammas, first, times, options) | trees


def _hit_rate(target, drafter, trees, batches, plain: Variant, options: BenchmarkSetup) -> HitRates:
    """Returns the top-k hit rate along plain decoding's outputs, empty where nothing is predicted
    from it."""
    if not drafter.scorable or not any(isinstance(tree, Tree) for tree in trees.values()):
        return {}
    return acceptance.hit_rate_of(target, drafter, batches, plain.results, options.sampling())


def _tree_variant(
    text: str, target: LanguageModel, drafter: Drafter | None, options: BenchmarkSetup
) -> Variant:
    tree = read_tree(text)
    how = Choice(tree.depth, "block", text).arguments(drafter, options) | {
        "gamma": options.gamma_of("auto", tree)
    }
    return Variant(
        tree.size - 1,
        lambda batch: generate(target, batch.inputs, key=batch.keys, **how),
        tree=text,
    )


def _step_variants(
    target, drafter, batches, options: BenchmarkSetup, trees
) -> dict[str, Callable[[], object]]:
    """Returns single steps and encoders by name, for the shapes that the batches have; for a tree
    of N nodes a call over them, and beside it one over N positions."""
    rows, lengths = len(batches[0].ids), sorted({batch.padded for batch in batches})
    gammas = list(dict.fromkeys([*options.gammas, *(tree.size - 1 for tree in trees.values())]))
    longest, room = (
        lengths[-1],
        timing.total_slots(target, lengths[-1], options.max_new_tokens, max(gammas)),
    )
    variants = analysis_products.products_variants(
        target.network, rows
    ) | analysis_products.bare_variants(target, drafter, rows, gammas)
    variants |= timing.step_variants(target, drafter, rows, lengths, room, gammas, options.gammas)
    for text, tree in trees.items():
        variants[f"nodes of {text}"] = timing.tree_variant(
            target.network, rows, longest, room, tree
        )
    for gamma in options.gammas if options.samples_preset else ():
        calls = timing.sampling_variants(
            target.network, rows, longest, room, gamma, options.sampling()
        )
        variants |= {f"call {gamma}, {name}": call for name, call in calls.items()}
    return variants


def _record(
    target, drafter, variants: dict[str, Variant], times: dict[str, Spread], batches, options
) -> dict[str, Any]:
    plain, step = variants["plain"], times["target step"].median
    padded = [batch.padded for batch in batches]
    calls = sum(int(result.lengths.max()) for result in plain.results)
    encoders = sum(times[f"target encoder {length}"].median for length in padded)
    seconds = Spread.from_samples(plain.seconds)
    products = min(spread.median for name, spread in times.items() if name.startswith("products"))
    own = times[
        "products"
    ].median  # in the loop's own layout, like the products of calls and drafts
    gammas = [name.removeprefix("verify ") for name in times if name.startswith("verify")]
    return {
        **machine.head(target, drafter, batches, options),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "step_over_products": step / products,
        "plain_over_products": (seconds.median - encoders) / max(calls, 1) / products,
        "cost_ratio": times["draft step"].median / step if "draft step" in times else None,
        "verify_cost": {gamma: times[f"verify {gamma}"].median / step for gamma in gammas},
        "bare": {
            "cost_ratio": times["bare draft step"].median / own
            if "bare draft step" in times
            else None,
            "verify_cost": {gamma: times[f"bare verify {gamma}"].median / own for gamma in gammas},
        },
        "plain": {
            "seconds": seconds._asdict(),
            "tokens": plain.tokens,
            "seconds_per_token": seconds.median / max(plain.tokens, 1),
            "compile_seconds": plain.compile_seconds,
        },
        "speculative": [
            _variant_record(variant, plain, target, times, batches, padded, options)
            for variant in variants.values()
            if variant.gamma and variant.tree is None
        ],
        "verdicts": [
            verdict
            for alpha in options.synthetic_alpha or (None,)
            if (verdict := _find_best(variants, alpha)) is not None
        ],
    }


def _find_best(
    variants: Mapping[str, Variant], synthetic_alpha: float | None
) -> dict[str, Any] | None:
    """Returns the fastest way of drafting with a synthetic acceptance rate, or without one."""
    drafting = {
        name: variant
        for name, variant in variants.items()
        if variant.gamma and variant.synthetic_alpha == synthetic_alpha
    }
    timed = {"plain": variants["plain"]} | drafting
    return verdicts.find_best({name: variant.seconds_per_token for name, variant in timed.items()})


def _variant_record(
    variant: Variant, plain: Variant, target, times, batches, padded: list[int], options
) -> dict[str, Any]:
    improvement, stats = _improvement(plain, variant), _total_stats(variant)
    counted = [
        predictions.counted_work(size, result.stats)
        for size, result in zip(padded, variant.results, strict=True)
    ]
    lengths, alpha = (
        [result.lengths for result in variant.results],
        stats["acceptance_rate_per_position"],
    )
    adaptive = (
        options.gamma_policy != "fixed"
    )  # then the formulas do not apply, nor does the time of one width of call
    untimed = stats["draft_calls"] > 0 and "draft step" not in times
    predicted = None
    if alpha is not None and not adaptive and not untimed:
        predicted = predictions.predictions(variant.gamma, alpha, times, padded, lengths, counted)
    # A drafter without a model often has nothing to propose, so that α and γ do not say how many
    # tokens a call gives.
    prediction = "with_lengths" if "draft step" in times else "with_counts"
    seconds = Spread.from_samples(variant.seconds)
    # Gumbel coupling repeats plain decoding's draws at every temperature.
    verifier = verifier_of(options.verifier)
    same_tokens = verifier.coupled or options.temperature == 0 and verifier.exact
    same_tokens &= variant.synthetic_alpha is None
    parts = None if adaptive or untimed else predictions.cost(counted, variant.gamma, times)
    shares = parts and predictions.shares(parts, seconds.median)
    return {
        "gamma": variant.gamma,
        "synthetic_alpha": variant.synthetic_alpha,
        "mean_gamma": stats["drafted"] / max(stats["target_calls"], 1),
        "seconds": seconds._asdict(),
        "tokens": variant.tokens,
        "compile_seconds": variant.compile_seconds,
        "stats": stats,
        "improvement": improvement._asdict(),
        "predicted": predicted,
        "oracle": None
        if alpha is None or untimed
        else predictions.oracle(variant.gamma, alpha, times),
        "prediction": prediction,
        "measured_over_predicted": improvement.median / predicted[prediction]
        if predicted
        else None,
        "parts": parts,
        "shares": shares,
        "limiting_term": max(shares, key=lambda name: shares[name]) if shares else None,
        "compared": same_tokens,
        "differences": _differences(variant, plain, target, batches) if same_tokens else [],
    }


def _improvement(slower: Variant, faster: Variant) -> Spread:
    """Returns the time of one variant divided by that of another, pass by pass, for as many tokens."""
    return Spread.from_samples(slower.seconds_per_token / faster.seconds_per_token)


def _tree_records(
    variants: Mapping[str, Variant],
    trees: Mapping[str, Tree | DynamicTree],
    target,
    times: Mapping[str, Spread],
    batches,
    options,
    hit_rate: HitRates,
) -> dict[str, Any]:
    """Returns what is known of every tree, and the time of the fastest chain over the fastest
    tree's."""
    plain, step, found = variants["plain"], times["target step"].median, []
    for text, tree in trees.items():
        variant = variants[f"tree {text}"]
        # Coupled trees repeat plain decoding's draws if those are of Gumbel noise too.
        coupled = TREE_VERIFIERS[tree.verify].coupled and verifier_of(options.verifier).coupled
        same_tokens = coupled or options.temperature == 0 and tree.verify not in LOSSY_TREES
        found.append(
            {
                "tree": text,
                "nodes": tree.size,
                "depth": tree.depth,
                "children": tree.kind,
                "verifier": tree.verify,
                "seconds": Spread.from_samples(variant.seconds)._asdict(),
                "tokens": variant.tokens,
                "compile_seconds": variant.compile_seconds,
                "stats": _total_stats(variant),
                **predictions.tree_tokens(tree, hit_rate),
                "improvement": _improvement(plain, variant)._asdict(),
                "verify_cost": times[f"nodes of {text}"].median / step,
                "compared": same_tokens,
                "differences": _differences(variant, plain, target, batches) if same_tokens else [],
            }
        )

    def best(those):
        return min(those, key=lambda variant: float(np.median(variant.seconds_per_token)))

    chain = best(
        [variant for variant in variants.values() if variant.gamma and variant.tree is None]
    )
    tree_variant = best([variant for variant in variants.values() if variant.tree is not None])
    beside = {
        "tree": tree_variant.tree,
        "gamma": chain.gamma,
        "improvement": _improvement(chain, tree_variant)._asdict(),
    }
    return {"trees": found, "tree_over_chain": beside}


def _total_stats(variant: Variant) -> dict[str, Any]:
    """Returns the statistics of all batches together; both α are ratios of sums, not means of
    ratios."""
    totals = variant.totals()
    examined = sum(totals["examined_by_position"])
    has_rate = any(
        result.stats.acceptance_rate is not None for result in variant.results
    )  # block verification has none

    def rate(positions):
        return totals["accepted"] / positions if examined and has_rate else None

    return totals | {
        "acceptance_rate": rate(examined),
        "acceptance_rate_per_position": rate(examined + totals["undrafted"]),
        "tokens_per_target_call": variant.tokens / max(totals["target_calls"], 1),
        "accepted_per_target_call": totals["accepted"] / max(totals["target_calls"], 1),
    }


def _differences(
    variant: Variant, plain: Variant, target: LanguageModel, batches
) -> list[dict[str, Any]]:
    """Returns every input whose argmax tokens differ from plain decoding's, with how near to a tie
    the first difference is."""
    found = []
    for batch, ours, theirs in zip(batches, variant.results, plain.results, strict=True):
        for row in np.flatnonzero(np.any(ours.tokens != theirs.tokens, axis=1)):
            position = int(np.argmax(ours.tokens[row] != theirs.tokens[row]))
            prefix = [target.start_token, *theirs.tokens[row, :position].tolist()]
            if decoder_only(target):
                prefix = [*(batch.ids[row] or prefix[:1]), *prefix[1:]]
            how = near_ties.measure_difference(
                target, batch.ids[row], prefix, variant.gamma + 1, len(batch.ids)
            )
            found.append(
                {
                    "input": batch.numbers[row],
                    "position": position,
                    "plain": int(theirs.tokens[row, position]),
                    "speculative": int(ours.tokens[row, position]),
                    "margin": how.margin,
                    "noise": how.noise,
                    "near_tie": how.near_tie,
                }
            )
    return sorted(found, key=lambda item: item["input"])


def _problems(
    record: dict, variants: dict[str, Variant], options, target: LanguageModel
) -> list[str]:
    """Returns messages about what must not be: missing outputs, or float32 argmax tokens that
    differ without being near-ties."""
    problems = analysis_variants.missing_outputs(variants)
    if target.config.dtype == "float32":
        for variant_record in [*record["speculative"], *record.get("trees", ())]:
            name = (
                f"tree {variant_record['tree']}"
                if "tree" in variant_record
                else f"gamma {variant_record['gamma']}"
            )
            wrong = [
                str(item["input"] + 1)
                for item in variant_record["differences"]
                if not item["near_tie"]
            ]
            if wrong:
                problems.append(
                    f"{name}: got other tokens than plain decoding for sentences {', '.join(wrong)}, "
                    "expected the same but for near-ties"
                )
    return problems
