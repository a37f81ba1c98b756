"""The paper's formulas (Leviathan, Kalman and Matias 2023, section 3): what α, c, v and γ promise.

α is the acceptance rate, γ the number of drafted tokens, c the time of a draft step over that of a target step
(`cost_ratio`), v the time of a target call over γ + 1 positions over that of one position (`verify_cost`; the paper takes 1).
All assume that acceptances are independent with the same probability.
"""

import math


def _check(alpha: float, gamma: int):
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: got {alpha}, expected a number in [0, 1]")
    if gamma < 0:
        raise ValueError(f"gamma: got {gamma}, expected at least 0")


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per target call, equation (1): `(1 − α^(γ+1)) / (1 − α)`; γ + 1 at α = 1.

    >>> round(expected_tokens(0.8, 5), 2)
    3.69
    """
    _check(alpha, gamma)
    return float(sum(alpha**i for i in range(gamma + 1)))


def improvement(alpha: float, gamma: int, cost_ratio: float, verify_cost: float = 1.0) -> float:
    """Expected factor in wall time, theorem 3.8: `E[tokens] / (γc + v)`, the paper's with v = 1.

    >>> round(improvement(0.75, 7, cost_ratio=0.02), 2)  # T5-small for T5-XXL, argmax, table 4
    3.16
    """
    if cost_ratio < 0 or verify_cost <= 0:
        raise ValueError(f"got cost_ratio {cost_ratio} and verify_cost {verify_cost}, expected c >= 0 and v > 0")
    return expected_tokens(alpha, gamma) / (gamma * cost_ratio + verify_cost)


def oracle_tokens(alpha: float) -> float:
    """Tokens per target call if γ were always right, section 3: `1 / (1 − α)`, what no policy of γ exceeds.

    >>> oracle_tokens(0.8) / expected_tokens(0.8, 5) > 1.35
    True
    """
    _check(alpha, 0)
    return 1 / (1 - alpha) if alpha < 1 else math.inf


def oracle_improvement(alpha: float, cost_ratio: float) -> float:
    """Factor in wall time of an oracle that drafts exactly the tokens that will stand, v = 1: `1 / (1 − α + cα)`.

    It drafts α / (1 − α) tokens for each target call, which take the time 1 + cα / (1 − α).

    >>> round(oracle_improvement(0.75, cost_ratio=0.02), 2)  # a fixed γ = 7 gives 3.16
    3.77
    """
    _check(alpha, 0)
    if cost_ratio < 0:
        raise ValueError(f"got cost_ratio {cost_ratio}, expected c >= 0")
    time = 1 - alpha + cost_ratio * alpha
    return 1 / time if time > 0 else math.inf


def expected_calls(alpha: float, gamma: int, length: int) -> float:
    """Target calls for an output of `length` tokens, which theorem 3.8 takes to be long.

    One call yields k ≤ γ tokens with probability `α^(k−1)·(1 − α)` and γ + 1 with `α^γ` (section 3.1); what would lie past the
    end of the output is lost. With f(n) = 0 for n ≤ 0: `f(n) = 1 + Σ_k P(k)·f(n − k)`.

    >>> expected_calls(1.0, 3, 9), expected_calls(0.0, 3, 9)
    (3.0, 9.0)
    """
    _check(alpha, gamma)
    law = [alpha ** (k - 1) * (1 - alpha) for k in range(1, gamma + 1)] + [alpha**gamma]
    calls = [0.0]
    for n in range(1, length + 1):
        calls.append(1 + sum(p * calls[n - k] for k, p in enumerate(law, 1) if k < n))
    return float(calls[length])
