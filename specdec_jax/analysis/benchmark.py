"""Compares plain with speculative decoding: wall time, α, c, v, predicted and measured improvement.

Variants take turns (`variants.py`), since the speed of a shared machine drifts. Encoders and
tokenisation are inside the wall time, compilation is not. The tokens of all variants are counted in
the same way.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from specdec_jax.analysis import (
    acceptance,
    comparison,
    machine,
    matmul_roofline,
    near_ties,
    predictions,
    timing,
    traces,
    tree_drawing,
    verdicts,
)
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.timing import Call, CallShape, Spread, Times
from specdec_jax.analysis.top_k_hit_rate import HitRates
from specdec_jax.analysis.tuning import Choice
from specdec_jax.analysis.variants import SentenceBatch, Variant, Workload
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.decoding.trees import resolve_tree
from specdec_jax.files.progress import show_waiting
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.tree_text import read_tree
from specdec_jax.speculative.tree_verifiers import TREE_VERIFIERS
from specdec_jax.speculative.trees import LOSSY_TREES, DynamicTree, Tree
from specdec_jax.speculative.verifiers import SYNTHETIC, find_verifier


@isolated
def benchmark(
    workload: Workload, others: Mapping[str, Variant] | None = None
) -> tuple[dict, list[str]]:
    """Times the variants and the single steps; returns the record, and messages about failures.

    Failures are missing outputs, and differing tokens that are no near-ties.

    A drafter without a model has no steps to time: c is not measured, and predictions count it as
    0. For a drafter made of several, no steps are timed and nothing is predicted. With a preset the
    weights are random and α would mean nothing: without synthetic acceptance, only plain decoding
    and steps are timed, and above temperature 0 the cost of sampling.

    Args:
      workload: the pair, sentences and options.
      others: variants of another implementation by its name, timed in turn with ours; None or
        empty: none.
    """
    target, drafter, batches, options = workload
    trees = _read_trees(drafter, options)
    workload.check_prompts()
    variants = _make_variants(workload, trees) | dict(others or {})
    steps = _step_variants(workload, trees)
    analysis_variants.warm_up(variants, steps, batches)
    timed = []
    for repeat in range(options.repeats):
        turn = f"pass {repeat + 1} of {options.repeats}"
        timed.append(analysis_variants.timed_steps(steps, repeat, f"timing steps, {turn}"))
        analysis_variants.time_pass(variants, batches, repeat, f"timing, {turn}")
    times = analysis_variants.seconds_per_step(timed)
    record = _record(workload, variants, times)
    if drafter is not None and trees:
        scored = drafter.scorable and any(isinstance(tree, Tree) for tree in trees.values())
        plain = variants["plain"].results
        hit_rate = acceptance.measure_hit_rate(workload, plain) if scored else {}
        record |= _tree_records(workload, variants, trees, times, hit_rate)
    traced = options.batch_size == 1 and options.gamma_policy == "fixed" and not options.preset
    if drafter is not None and traced:
        with show_waiting("tracing the calls of the first input"):
            record["example"] = _compile_example_calls(workload, times)
    if options.samples_preset:
        seconds = {name: [one[name] for one in timed] for name in steps}
        record["sampling_cost"] = {
            str(gamma): predictions.sampling_cost(gamma, seconds) for gamma in options.gammas
        }
    problems = _find_problems(record, variants, target)
    for name in comparison.list_other_implementations(others):
        record["against"] = comparison.compare(name, variants, target, batches)
        problems += comparison.find_problems(record["against"], target.config.dtype)
    return record, problems


def _read_trees(drafter: Drafter | None, options: Any) -> dict[str, Tree | DynamicTree]:
    """Returns the trees that are timed, by their text.

    They have the children and verifiers that suit the drafter.

    Raises:
      UnsupportedCombination: a tree that the drafter does not draft.
    """
    given = {text: read_tree(text) for text in options.tree}
    return {
        text: resolve_tree(tree, drafter, "auto", "block").tree or tree
        for text, tree in given.items()
    }


def _make_variants(workload: Workload, trees: Iterable[str]) -> dict[str, Variant]:
    """Returns plain decoding, a chain for every γ and synthetic acceptance rate, and the trees."""
    target, drafter, _, options = workload
    variants = {
        "plain": Variant(0, analysis_variants.make_decoder(target, options.decoding(plain=True)))
    }
    chains = drafter is not None and (options.synthetic_alpha or not options.preset)
    for gamma in options.gammas if chains else ():
        how = options.decoding() | {"drafter": drafter, "gamma": options.gamma_of(gamma)}
        if not options.synthetic_alpha:
            variants[f"gamma {gamma}"] = Variant(gamma, analysis_variants.make_decoder(target, how))
        for alpha in options.synthetic_alpha:
            synthetic = how | dict(verifier=SYNTHETIC.name, synthetic_alpha=alpha)
            variants[f"gamma {gamma}, alpha {alpha:g}"] = Variant(
                gamma, analysis_variants.make_decoder(target, synthetic), synthetic_alpha=alpha
            )
    for text in trees:
        tree = read_tree(text)
        how = Choice(tree.depth, "block", text).arguments(drafter, options)
        how["gamma"] = options.gamma_of("auto", tree)
        variants[f"tree {text}"] = Variant(
            tree.size - 1, analysis_variants.make_decoder(target, how), tree=text
        )
    return variants


def _compile_example_calls(workload: Workload, times: Times) -> dict[str, Any] | None:
    """Returns the calls of one input with every γ, and one of every tree; None without text."""
    options, first = workload.options, traces.find_text(workload.batches)
    gammas = () if options.synthetic_alpha else options.gammas
    if first is None:
        return None
    record = traces.make_example(workload, gammas, first, times)
    if options.tree:
        record["trees"] = tree_drawing.make_examples(workload, first)
    return record


def _step_variants(workload: Workload, trees: Mapping[str, Tree | DynamicTree]) -> dict[str, Call]:
    """Returns single steps and encoders by name, for the shapes that the batches have.

    For a tree of N nodes there is a call over them, and for comparison one over N positions.
    """
    target, drafter, _, options = workload
    rows, lengths = workload.rows, workload.lengths
    gammas = list(dict.fromkeys([*options.gammas, *(tree.size - 1 for tree in trees.values())]))
    slots = timing.total_slots(target, lengths[-1], options.max_new_tokens, max(gammas))
    shape, network = CallShape(rows, lengths[-1], slots), target.network
    variants = matmul_roofline.products_variants(network, rows)
    variants |= matmul_roofline.bare_variants(target, drafter, rows, gammas)
    variants |= timing.step_variants(target, drafter, lengths, shape, gammas, options.gammas)
    for text, tree in trees.items():
        variants[f"nodes of {text}"] = timing.tree_variant(network, shape, tree)
    for gamma in options.gammas if options.samples_preset else ():
        calls = timing.sampling_variants(network, shape, gamma, options.sampling())
        variants |= {f"call {gamma}, {name}": call for name, call in calls.items()}
    return variants


def _record(workload: Workload, variants: Mapping[str, Variant], times: Times) -> dict[str, Any]:
    plain, step = variants["plain"], times["target step"].median
    calls = sum(int(result.lengths.max()) for result in plain.results)
    encoders = predictions.encoder_seconds(workload.padded, times, drafts=False)
    seconds = float(np.median(plain.seconds))
    products = min(spread.median for name, spread in times.items() if name.startswith("products"))
    own = times["products"].median  # in the loop's layout, like those of calls and drafts
    bare_draft = times.get("bare draft step")
    gammas = [name.removeprefix("verify ") for name in times if name.startswith("verify")]
    return {
        **machine.begin_record(workload),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "step_over_products": step / products,
        "plain_over_products": (seconds - encoders) / max(calls, 1) / products,
        "cost_ratio": times["draft step"].median / step if "draft step" in times else None,
        "verify_cost": {gamma: times[f"verify {gamma}"].median / step for gamma in gammas},
        "bare": {
            "cost_ratio": None if bare_draft is None else bare_draft.median / own,
            "verify_cost": {gamma: times[f"bare verify {gamma}"].median / own for gamma in gammas},
        },
        "plain": plain.record() | {"seconds_per_token": seconds / max(plain.tokens, 1)},
        "speculative": [
            _variant_record(workload, variant, plain, times)
            for variant in variants.values()
            if variant.gamma and variant.tree is None
        ],
        "verdicts": [
            verdict
            for alpha in workload.options.synthetic_alpha or (None,)
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
    workload: Workload, variant: Variant, plain: Variant, times: Times
) -> dict[str, Any]:
    options, padded = workload.options, workload.padded
    improvement, stats = _improvement(plain, variant), _total_stats(variant)
    counted = [
        predictions.counted_work(size, result.stats)
        for size, result in zip(padded, variant.results, strict=True)
    ]
    lengths = [result.lengths for result in variant.results]
    alpha = stats["acceptance_rate_per_position"]
    # With an adaptive policy neither the formulas apply, nor does the time of one width of call.
    adaptive = options.gamma_policy != "fixed"
    untimed = stats["draft_calls"] > 0 and "draft step" not in times
    predicted = None
    if alpha is not None and not adaptive and not untimed:
        predicted = predictions.predict_improvements(
            variant.gamma, alpha, times, padded, lengths, counted
        )
    # A drafter without a model often has nothing to propose, so that tokens per call do not follow
    # from α and γ.
    prediction = "with_lengths" if "draft step" in times else "with_counts"
    oracle = None
    if alpha is not None and not untimed:
        oracle = predictions.bound_by_oracle(variant.gamma, alpha, times)
    ratio = improvement.median / predicted[prediction] if predicted else None
    # Gumbel coupling repeats plain decoding's draws at every temperature.
    verifier = find_verifier(options.verifier)
    same_tokens = verifier.coupled or options.temperature == 0 and verifier.exact
    same_tokens &= variant.synthetic_alpha is None
    parts = None if adaptive or untimed else predictions.predict_cost(counted, variant.gamma, times)
    shares = parts and predictions.cost_shares(parts, float(np.median(variant.seconds)))
    return {
        "gamma": variant.gamma,
        "synthetic_alpha": variant.synthetic_alpha,
        "mean_gamma": stats["drafted"] / max(stats["target_calls"], 1),
        **_measured_record(workload, variant, plain, same_tokens),
        "predicted": predicted,
        "oracle": oracle,
        "prediction": prediction,
        "measured_over_predicted": ratio,
        "parts": parts,
        "shares": shares,
        "limiting_term": max(shares, key=lambda name: shares[name]) if shares else None,
    }


def _measured_record(
    workload: Workload, variant: Variant, plain: Variant, same_tokens: bool
) -> dict[str, Any]:
    """Returns what is measured of chains and trees alike."""
    return {
        **variant.record(),
        "stats": _total_stats(variant),
        "improvement": _improvement(plain, variant)._asdict(),
        "compared": same_tokens,
        "differences": _find_differences(variant, plain, workload) if same_tokens else [],
    }


def _improvement(slower: Variant, faster: Variant) -> Spread:
    """Returns the time per token of one variant divided by that of another, pass by pass."""
    return Spread.from_samples(slower.seconds_per_token / faster.seconds_per_token)


def _tree_records(
    workload: Workload,
    variants: Mapping[str, Variant],
    trees: Mapping[str, Tree | DynamicTree],
    times: Times,
    hit_rate: HitRates,
) -> dict[str, Any]:
    """Returns the records of all trees, and that of the fastest tree beside the fastest chain."""
    options = workload.options
    plain, step, found = variants["plain"], times["target step"].median, []
    for text, tree in trees.items():
        variant = variants[f"tree {text}"]
        # Coupled trees repeat plain decoding's draws if those are of Gumbel noise too.
        coupled = TREE_VERIFIERS[tree.verify].coupled and find_verifier(options.verifier).coupled
        same_tokens = coupled or options.temperature == 0 and tree.verify not in LOSSY_TREES
        found.append(
            {
                "tree": text,
                "nodes": tree.size,
                "depth": tree.depth,
                "children": tree.kind,
                "verifier": tree.verify,
                **_measured_record(workload, variant, plain, same_tokens),
                **predictions.tree_tokens(tree, hit_rate),
                "verify_cost": times[f"nodes of {text}"].median / step,
            }
        )

    drafting = [variant for variant in variants.values() if variant.gamma]
    drafting.sort(key=lambda variant: float(np.median(variant.seconds_per_token)))
    chain = next(variant for variant in drafting if variant.tree is None)
    tree_variant = next(variant for variant in drafting if variant.tree is not None)
    beside = {
        "tree": tree_variant.tree,
        "gamma": chain.gamma,
        "improvement": _improvement(chain, tree_variant)._asdict(),
    }
    return {"trees": found, "tree_over_chain": beside}


def _total_stats(variant: Variant) -> dict[str, Any]:
    """Returns the statistics of all batches together; both α are ratios of sums."""
    totals = variant.totals()
    accepted, calls = totals["accepted"], max(totals["target_calls"], 1)
    examined, known = sum(totals["examined_by_position"]), variant.has_rate
    positions = examined + totals["undrafted"]
    return totals | {
        "acceptance_rate": accepted / examined if known else None,
        "acceptance_rate_per_position": accepted / positions if known else None,
        "tokens_per_target_call": variant.tokens / calls,
        "accepted_per_target_call": accepted / calls,
    }


def _find_differences(variant: Variant, plain: Variant, workload: Workload) -> list[dict[str, Any]]:
    """Returns the inputs with other argmax tokens than plain decoding's, with their margins."""
    target = workload.target

    def measure(
        batch: SentenceBatch, _: object, expected: GenerationResult, row: int, position: int
    ) -> dict[str, Any]:
        start = [workload.language.start_token]
        if is_decoder_only(target):
            start = batch.ids[row] or start
        how = near_ties.measure_difference(
            target,
            batch.ids[row],
            [*start, *expected.tokens[row, :position].tolist()],
            width=variant.gamma + 1,
            batch=len(batch.ids),
            sampling=workload.options.sampling(),
            key=batch.keys[row],
            start=len(start),
        )
        return how._asdict() | {"near_tie": how.near_tie}

    return analysis_variants.list_differences(variant, plain, workload.batches, measure)


def _find_problems(
    record: Mapping[str, Any], variants: Mapping[str, Variant], target: LanguageModel
) -> list[str]:
    """Returns messages about missing outputs, and about differences that are no near-ties."""
    problems = analysis_variants.missing_outputs(variants)
    if target.config.dtype != "float32":
        return problems
    for one in [*record["speculative"], *record.get("trees", ())]:
        name = f"tree {one['tree']}" if "tree" in one else f"gamma {one['gamma']}"
        wrong = [item["input"] for item in one["differences"] if not item["near_tie"]]
        problems += analysis_variants.describe_differing(name, wrong)
    return problems
