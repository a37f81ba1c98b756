"""Predicts improvements from measured steps, and says where the time goes."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specdec_jax.analysis import formulas
from specdec_jax.analysis.timing import Spread


@dataclasses.dataclass(frozen=True)
class Work:
    """What one batch asked of the models.

    Attributes:
      padded: length that its inputs are padded to.
      calls: target calls.
      draft_calls: draft steps, a call over two positions being one; None without a drafter, whose
        encoder then does not run.
    """

    padded: int
    calls: float
    draft_calls: float | None = None


def cost(work: Sequence[Work], gamma: int, times: Mapping[str, Spread]) -> dict[str, float]:
    """Seconds that the measured single steps give for `work`, by part; nothing for the loop around them.

    Drafting counts for nothing where no draft step was measured: the drafter has no model.
    """
    target_call = times[f"verify {gamma}" if gamma else "target step"].median
    parts = {"target encoder": 0.0, "drafter encoder": 0.0, "draft steps": 0.0, "target calls": 0.0}
    for item in work:
        parts["target encoder"] += times[f"target encoder {item.padded}"].median
        parts["target calls"] += item.calls * target_call
        if item.draft_calls is not None and "draft step" in times:
            encoder = times.get(f"drafter encoder {item.padded}")  # early exit has none of its own
            parts["drafter encoder"] += encoder.median if encoder else 0.0
            parts["draft steps"] += item.draft_calls * draft_seconds(gamma, times)
    return parts


def draft_seconds(gamma: int, times: Mapping[str, Spread]) -> float:
    """Seconds of a draft step between target calls: what γ of them add to a call over γ + 1
    positions, no less than alone."""
    added = times[f"draft {gamma} and verify"].median - times[f"verify {gamma}"].median
    return max(added / gamma, times["draft step"].median)


def cost_ratio(gamma: int, times: Mapping[str, Spread]) -> float:
    """c of draft steps between target calls; 0 where no model drafts."""
    return draft_seconds(gamma, times) / times["target step"].median if "draft step" in times else 0.0


def oracle(gamma: int, alpha: float, times: Mapping[str, Spread]) -> dict[str, float | None]:
    """What no policy of γ exceeds with this α (of the tokens that were examined) and c, target calls costing the same.

    None where there is no bound.
    """
    bounds = {
        "tokens_per_target_call": formulas.oracle_tokens(alpha),
        "improvement": formulas.oracle_improvement(alpha, cost_ratio(gamma, times)),
    }
    return {name: value if np.isfinite(value) else None for name, value in bounds.items()}


def expected_work(padded: Sequence[int], lengths: Sequence[np.ndarray], gamma: int, alpha: float) -> list[Work]:
    """Work by α and the output lengths alone: a batch runs until its last row is done.

    Args:
      padded: of each batch.
      lengths: of each batch, new tokens of its rows.
    """
    work = []
    for size, rows in zip(padded, lengths, strict=True):
        calls = max(formulas.expected_calls(alpha, gamma, int(length)) for length in rows)
        work.append(Work(size, calls, gamma * calls if gamma else None))
    return work


def predictions(
    gamma: int, alpha: float, times: Mapping[str, Spread], padded, lengths, counted: Sequence[Work]
) -> dict[str, float]:
    """Expected improvement, from the paper's formula to one that counts everything but the loop itself and the second
    position of a drafter's first call after a full acceptance.

    Returns:
      cost_ratio, verify_cost: the measured c, of draft steps between target calls, and v(γ + 1).
      theorem_3_8: E[tokens] / (γc + 1). with_verify_cost: E[tokens] / (γc + v).
      with_lengths: as that, with the encoders and the real output lengths.
      with_counts: as that, with the calls that were really made instead of those that α lets expect.
    """
    step = times["target step"].median
    c = cost_ratio(gamma, times)
    v = times[f"verify {gamma}"].median / step
    plain = sum(cost(expected_work(padded, lengths, 0, 0.0), 0, times).values())
    total = lambda work: sum(cost(work, gamma, times).values())
    return {
        "cost_ratio": c,
        "verify_cost": v,
        "theorem_3_8": formulas.improvement(alpha, gamma, c),
        "with_verify_cost": formulas.improvement(alpha, gamma, c, v),
        "with_lengths": plain / total(expected_work(padded, lengths, gamma, alpha)),
        "with_counts": plain / total(counted),
    }


def sampling_cost(gamma: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """What choosing tokens adds to a target call over γ + 1 positions, as a share of the call, by verifier.

    Args:
      gamma: γ.
      seconds: of each pass, by arm: "call γ, alone", "call γ, token" and so on; compared pass by pass.
    """
    start = f"call {gamma}, "
    alone = np.array(seconds[start + "alone"])
    added = {
        name.removeprefix(start): np.array(times) / alone - 1
        for name, times in seconds.items()
        if name.startswith(start)
    }
    return {name: Spread.of(share)._asdict() for name, share in added.items() if name != "alone"}


def shares(parts: Mapping[str, float], measured: float) -> dict[str, float]:
    """Each part's share of the measured seconds; "rest" is the loop, the host and what the single steps do not show."""
    return {**{name: part / measured for name, part in parts.items()}, "rest": 1 - sum(parts.values()) / measured}
