"""Measures α, c and v of a target and a drafter, and computes the expected improvement."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.analysis import acceptance, formulas, machine, predictions, timing
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.acceptance import Acceptance
from specdec_jax.analysis.predictions import Work
from specdec_jax.analysis.timing import CallShape, Spread, Times
from specdec_jax.analysis.variants import Workload
from specdec_jax.decoding.checks import unsupported
from specdec_jax.speculative.drafter import Drafter


def verifiers_to_compare(options: Any) -> tuple[str, ...]:
    """Returns the names of the verifiers to compare.

    Above temperature 0, "token" and "block" are compared if one of them is asked for.
    """
    both = ("token", "block")
    return both if options.temperature > 0 and options.verifier in both else (options.verifier,)


def measure(workload: Workload) -> dict[str, Any]:
    """Returns the record of `specdec measure`."""
    workload.check_prompts()
    options = workload.options
    if options.compare_alpha and not workload.drafter.scorable:
        names = ("drafter", "shortlist", "shortlist_size", "drafter_int8")
        got = ", ".join(f"{name}={getattr(options, name)!r}" for name in names)
        raise unsupported(
            "compare_alpha", f"True with {got}", "a model that draws from its own distribution"
        )
    verifiers, gamma_max = verifiers_to_compare(options), options.gamma_max
    accepted = acceptance.measure_acceptance(workload, verifiers, gamma_max)
    same = acceptance.compare(workload, gamma_max) if options.compare_alpha else None
    times = step_times(workload)
    step = times["target step"].median
    v = {1: 1.0} | {g + 1: times[f"verify {g}"].median / step for g in options.timed_gammas}
    c = predictions.cost_ratio(gamma_max, times)
    costs = list_costs(workload.drafter, c, gamma_max)
    whole = expect_with_lengths(accepted, workload.padded, costs, interpolate(v, gamma_max), times)
    return {
        **machine.begin_record(workload),
        "acceptance": accepted.record(),
        "same_positions": same and same._asdict(),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "cost_ratio_alone": times["draft step"].median / step if "draft step" in times else None,
        "cost_ratio": c,
        "verify_cost": {str(width): value for width, value in v.items()},
        **expect_improvements(accepted, costs, v, gamma_max, whole),
    }


def step_times(workload: Workload) -> dict[str, Spread]:
    """Returns the seconds of single steps, for the shapes that the batches have."""
    target, drafter, batches, options = workload
    rows, lengths, gamma = workload.rows, workload.lengths, options.gamma_max
    longest = lengths[-1]
    slots = timing.total_slots(target, longest, options.max_new_tokens, gamma)
    shape = CallShape(rows, longest, slots)
    variants = timing.step_variants(target, drafter, lengths, shape, options.timed_gammas, [gamma])
    if drafter.second_model is None:
        state = timing.iteration_state(target, drafter, rows, longest, gamma, **options.decoding())
        variants[f"call {gamma}"] = timing.call_variant(*state)
        variants[f"iteration {gamma}"] = timing.iteration_variant(*state)
    analysis_variants.warm_up({}, variants, batches)
    return analysis_variants.time_steps(variants, options.repeats)


def interpolate(v: Mapping[int, float], gamma_max: int) -> list[float]:
    """Returns v of 1 … γ_max + 1 positions, given that of some, in ascending order."""
    return np.interp(np.arange(1, gamma_max + 2), list(v), list(v.values())).tolist()


def list_costs(drafter: Drafter, c: float, gamma_max: int) -> list[float]:
    """Returns c for γ = 1 … γ_max, given that for γ_max."""
    if drafter.drafts_at_once:
        return [c * gamma_max / gamma for gamma in range(1, gamma_max + 1)]
    return [c] * gamma_max


def expect_with_lengths(
    accepted: Acceptance,
    padded: Sequence[int],
    costs: Sequence[float],
    verify_cost: Sequence[float],
    times: Times,
) -> dict[str, list[float]]:
    """Returns the expected improvement of whole decodes for γ = 1 … γ_max, by verifier.

    It counts encoders and output lengths, but not the loop, the host and the tokenizer. `padded`
    has the padded input length of each batch, `costs` c for γ = 1 … γ_max, and `verify_cost` v of
    1 … γ_max + 1 positions.
    """
    step = times["target step"].median
    plain_encoder, encoders = (
        predictions.encoder_seconds(padded, times, drafts) for drafts in (False, True)
    )
    plain = plain_encoder + step * sum(int(lengths.max()) for lengths in accepted.lengths)

    def whole(work: Sequence[Work], c: float, v: float) -> float:
        calls = sum(item.calls * (1 + item.drafting * (v - 1)) for item in work)
        calls += c * sum(item.draft_calls or 0.0 for item in work)
        return encoders + step * calls

    return {
        name: [
            plain / whole(accepted.work[name, gamma], c, v)
            for gamma, (c, v) in enumerate(zip(costs, verify_cost[1:], strict=True), 1)
        ]
        for name in accepted.survival
    }


def expect_improvements(
    accepted: Acceptance,
    costs: Sequence[float],
    v: Mapping[int, float],
    gamma_max: int,
    whole: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Returns the expected improvement for γ = 1 … γ_max, and the best γ.

    Args:
      accepted, gamma_max: as in `measure`.
      costs: c for γ = 1 … γ_max.
      v: cost of a target call by number of positions, ascending; interpolated in between. A call in
        which nothing is drafted costs 1.
      whole: the result of `expect_with_lengths`; None: expect nothing of whole decodes.
    """
    verify_cost, alpha, table = interpolate(v, gamma_max), accepted.alpha, []
    mean_cost = [1 + accepted.drafting * (value - 1) for value in verify_cost]
    tokens = accepted.tokens_per_call()
    for gamma, c in enumerate(costs, 1):
        width = mean_cost[gamma]
        of_alpha: dict[str, float | None] = dict.fromkeys(
            ("tokens", "theorem_3_8", "with_verify_cost")
        )
        if alpha is not None:
            of_alpha["tokens"] = formulas.expected_tokens(alpha, gamma)
            of_alpha["theorem_3_8"] = formulas.improvement(alpha, gamma, c)
            of_alpha["with_verify_cost"] = formulas.improvement(alpha, gamma, c, width)
        table.append(
            {
                "gamma": gamma,
                "verify_cost": verify_cost[gamma],
                "timed": gamma + 1 in v,
                **of_alpha,
                "by_position": {
                    name: {
                        "tokens": per_call[gamma],
                        "with_verify_cost": per_call[gamma] / (gamma * c + width),
                        "with_lengths": whole and whole[name][gamma - 1],
                    }
                    for name, per_call in tokens.items()
                },
            }
        )
    powers = [alpha**gamma for gamma in range(1, gamma_max + 1)] if alpha is not None else None
    best: dict[str, Any] = {
        "theorem_3_8": formulas.best_gamma(powers, costs, [1.0] * (gamma_max + 1))
        if powers
        else None,
        "with_verify_cost": formulas.best_gamma(powers, costs, mean_cost) if powers else None,
        "by_position": {
            name: formulas.best_gamma([kept for kept, _ in rates], costs, mean_cost)
            for name, rates in accepted.survival.items()
        },
        "with_lengths": whole
        and {name: int(np.argmax([1.0, *values])) for name, values in whole.items()},
    }
    return {"table": table, "best_gamma": best}
