"""Measures α, c and v of a target and a drafter, and computes the improvement to expect from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.analysis import acceptance, formulas, machine, predictions, timing
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.acceptance import Acceptance
from specdec_jax.analysis.predictions import Work
from specdec_jax.analysis.setup import MeasureSetup
from specdec_jax.analysis.timing import Spread
from specdec_jax.decoding.checks import UnsupportedCombination


def verifiers_of(options) -> tuple[str, ...]:
    """Returns the verifiers to compare: above temperature 0 token and block if one of them is asked
    for, else the one asked for."""
    both = ("token", "block")
    return both if options.temperature > 0 and options.verifier in both else (options.verifier,)


def measure(
    target, drafter, batches: Sequence[analysis_variants.Batch], options: MeasureSetup
) -> dict[str, Any]:
    """Returns the record of `specdec measure`."""
    analysis_variants.check_prompts(target, drafter, batches, options)
    if options.compare_alpha and not drafter.scorable:
        raise UnsupportedCombination(
            f"compare_alpha: got True with drafter={options.drafter!r}, shortlist={options.shortlist!r}, "
            f"shortlist_size={options.shortlist_size}, drafter_int8={options.drafter_int8}, expected a model that "
            "draws from its own distribution"
        )
    accepted = acceptance.measure_acceptance(
        target, drafter, batches, verifiers_of(options), options.gamma_max, options
    )
    same = (
        acceptance.compare(target, drafter, batches, options.gamma_max, options)
        if options.compare_alpha
        else None
    )
    times = step_times(target, drafter, batches, options)
    v = {1: 1.0} | {
        gamma + 1: times[f"verify {gamma}"].median / times["target step"].median
        for gamma in options.timed_gammas
    }
    c = draft_cost(options.gamma_max, times)
    padded = [batch.padded for batch in batches]
    whole = with_lengths(accepted, padded, c, interpolate(v, options.gamma_max), times)
    return {
        **machine.head(target, drafter, batches, options),
        "acceptance": accepted.record(),
        "same_positions": same and same._asdict(),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "cost_ratio_alone": (
            times["draft step"].median / times["target step"].median
            if "draft step" in times
            else None
        ),
        "cost_ratio": c,
        "verify_cost": {str(width): value for width, value in v.items()},
        **expectations(accepted, c, v, options.gamma_max, whole),
    }


def step_times(
    target, drafter, batches: Sequence[analysis_variants.Batch], options: MeasureSetup
) -> dict[str, Spread]:
    """Returns the seconds of single steps, for the shapes that the batches have."""
    rows, lengths = len(batches[0].ids), sorted({batch.padded for batch in batches})
    gamma = options.gamma_max
    room = timing.total_slots(target, lengths[-1], options.max_new_tokens, gamma)
    variants = timing.step_variants(
        target, drafter, rows, lengths, room, options.timed_gammas, [gamma]
    )
    if drafter.second_model is None:
        state = timing.iteration_state(
            target, drafter, rows, lengths[-1], gamma, **options.decoding()
        )
        variants |= {
            f"call {gamma}": timing.call_variant(*state),
            f"iteration {gamma}": timing.iteration_variant(*state),
        }
    analysis_variants.warm_up({}, variants, batches)
    return analysis_variants.time_steps(variants, options.repeats)


def draft_cost(gamma: int, times: Mapping[str, Spread]) -> float:
    """Returns c: a draft step between target calls, in target steps; without a model, what drafting
    adds to an iteration."""
    step = times["target step"].median
    if "draft step" in times:
        return predictions.draft_seconds(gamma, times) / step
    return (
        max(0.0, times[f"iteration {gamma}"].median - times[f"call {gamma}"].median) / gamma / step
    )


def interpolate(v: Mapping[int, float], gamma_max: int) -> list[float]:
    """Returns v of 1 … γ_max + 1 positions, given that of some, in ascending order."""
    return np.interp(np.arange(1, gamma_max + 2), list(v), list(v.values())).tolist()


def with_lengths(
    accepted: Acceptance,
    padded: Sequence[int],
    c: float,
    verify_cost: Sequence[float],
    times: Mapping[str, Spread],
) -> dict[str, list[float]]:
    """Returns the expected improvement for γ = 1 … γ_max by verifier, with encoders and output
    lengths.

    What the loop, the host and the tokenizer add to both is left out.

    Args:
      accepted: the measured acceptance.
      padded: padded input length of each batch.
      c: cost of a draft step.
      verify_cost: v of 1 … γ_max + 1 positions.
      times: seconds of single steps and encoders.
    """
    step = times["target step"].median

    def seconds(name):
        return sum(times[f"{name} {size}"].median for size in padded if f"{name} {size}" in times)

    encoder, both = (
        seconds("target encoder"),
        seconds("target encoder") + seconds("drafter encoder"),
    )
    plain = encoder + step * sum(int(lengths.max()) for lengths in accepted.lengths)

    def whole(work: Sequence[Work], v: float) -> float:
        calls = sum(item.calls * (1 + item.drafting * (v - 1)) for item in work)
        return both + step * (calls + c * sum(item.draft_calls or 0.0 for item in work))

    return {
        name: [
            plain / whole(accepted.work[name, gamma], v)
            for gamma, v in enumerate(verify_cost[1:], 1)
        ]
        for name in accepted.survival
    }


def expectations(
    accepted: Acceptance,
    c: float,
    v: Mapping[int, float],
    gamma_max: int,
    whole: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Returns the expected improvement for γ = 1 … γ_max, and the best γ.

    Args:
      accepted: the measured acceptance.
      c: cost of a draft step.
      v: cost of a target call by number of positions, ascending; interpolated in between. A call in
        which nothing is drafted costs 1.
      gamma_max: the greatest γ.
      whole: what `with_lengths` returns; None: nothing is said of whole decodes.
    """
    verify_cost, alpha, table = interpolate(v, gamma_max), accepted.alpha, []
    mean_cost = [1 + accepted.drafting * (value - 1) for value in verify_cost]
    tokens = {
        name: formulas.tokens_by_survival([kept for kept, _ in rates])
        for name, rates in accepted.survival.items()
    }
    for gamma in range(1, gamma_max + 1):
        width = mean_cost[gamma]
        table.append(
            {
                "gamma": gamma,
                "verify_cost": verify_cost[gamma],
                "timed": gamma + 1 in v,
                "tokens": None if alpha is None else formulas.expected_tokens(alpha, gamma),
                "theorem_3_8": None if alpha is None else formulas.improvement(alpha, gamma, c),
                "with_verify_cost": None
                if alpha is None
                else formulas.improvement(alpha, gamma, c, width),
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
        "theorem_3_8": formulas.best_gamma(powers, c, [1.0] * (gamma_max + 1)) if powers else None,
        "with_verify_cost": formulas.best_gamma(powers, c, mean_cost) if powers else None,
        "by_position": {
            name: formulas.best_gamma([kept for kept, _ in rates], c, mean_cost)
            for name, rates in accepted.survival.items()
        },
        "with_lengths": whole
        and {name: int(np.argmax([1.0, *values])) for name, values in whole.items()},
    }
    return {"table": table, "best_gamma": best}
