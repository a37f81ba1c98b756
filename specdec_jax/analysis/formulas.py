"""Computes the expected improvement from α, c, v and γ by the paper's formulas.

The paper is Leviathan, Kalman and Matias 2023; the formulas are in its section 3. α is the
acceptance rate; γ the number of drafted tokens; c the time of a draft step divided by that of a
target step (`cost_ratio`); v the time of a target call over γ + 1 positions divided by that of a
call over one (`verify_cost`; the paper takes 1). Formulas of α assume that tokens are accepted
independently of each other, with the same probability. Formulas of `survival`, the probabilities
that at least 1, 2 … drafted tokens are accepted, do not assume this.
"""

import math
import operator
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: got {alpha}, expected a number in [0, 1]")
    _check_count("gamma", gamma)


def _check_count(name: str, value: int) -> None:
    try:
        sound = operator.index(value) >= 0
    except TypeError:
        sound = False
    if not sound:
        raise ValueError(f"{name}: got {value}, expected an integer of at least 0")


def _check_cost_ratio(cost_ratio: float) -> None:
    if not 0 <= cost_ratio < math.inf:  # NaN is none either
        raise ValueError(f"cost_ratio: got {cost_ratio}, expected a finite number of at least 0")


def expected_tokens(alpha: float, gamma: int) -> float:
    """Returns the tokens per target call, equation (1): `(1 − α^(γ+1)) / (1 − α)`; γ + 1 at α = 1.

    >>> round(expected_tokens(0.8, 5), 2)
    3.69
    """
    _check(alpha, gamma)
    return float(sum(alpha**i for i in range(gamma + 1)))


def improvement(alpha: float, gamma: int, cost_ratio: float, verify_cost: float = 1.0) -> float:
    """Returns the expected factor in wall time, theorem 3.8: `E[tokens] / (γc + v)`.

    The paper has v = 1.

    >>> round(improvement(0.75, 7, cost_ratio=0.02), 2)  # T5-small for T5-XXL, argmax, table 4
    3.16
    """
    _check_cost_ratio(cost_ratio)
    if not 0 < verify_cost < math.inf:
        raise ValueError(f"verify_cost: got {verify_cost}, expected a finite number above 0")
    return expected_tokens(alpha, gamma) / (gamma * cost_ratio + verify_cost)


def operations(alpha: float, gamma: int, cost_ratio: float = 0.0) -> float:
    """Returns the factor in arithmetic operations, theorem 3.11.

    It is `(1 − α)(γĉ + γ + 1) / (1 − α^(γ+1))`. `cost_ratio` is ĉ, the drafter's operations per
    token divided by the target's.

    >>> round(operations(0.8, 5), 2)  # table 1
    1.63
    """
    _check_cost_ratio(cost_ratio)
    return (gamma * cost_ratio + gamma + 1) / expected_tokens(alpha, gamma)


def least_improvement(alpha: float, cost_ratio: float) -> float:
    """Returns the least improvement of the best γ, corollary 3.9.

    It is `(1 + α) / (1 + c)` if α > c, else 1 (none).

    >>> least_improvement(0.5, cost_ratio=0.25)
    1.2
    """
    return improvement(alpha, 1 if alpha > cost_ratio else 0, cost_ratio)


def optimal_gamma(
    alpha: float,
    cost_ratio: float,
    verify_cost: Callable[[int], float] = lambda width: 1.0,
    most: int = 100,
) -> int:
    """Returns the γ from 0 (plain) to `most` with the greatest improvement, section 3.5.

    Of equals it is the smallest. `verify_cost` takes the number of positions of a target call, γ +
    1, and returns v; the paper takes 1.

    >>> optimal_gamma(0.75, cost_ratio=0.02)
    9
    """
    _check_count("most", most)
    if not callable(verify_cost):
        expected = "a function of the number of positions"
        raise ValueError(f"verify_cost: got {verify_cost}, expected {expected}")
    return max(
        range(most + 1),
        key=lambda gamma: improvement(alpha, gamma, cost_ratio, verify_cost(gamma + 1)),
    )


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns D_LK, the total variation of distributions `[…, V]`, definition 3.2.

    It is `Σ_x |p(x) − (p(x) + q(x)) / 2|`.

    >>> float(divergence([0.5, 0.5], [0.75, 0.25]))
    0.25
    """
    p, q = np.asarray(p, float), np.asarray(q, float)
    return np.abs(p - (p + q) / 2).sum(axis=-1)


def acceptance_rate(p: np.ndarray, q: np.ndarray, lenience: float = 1.0) -> np.ndarray:
    """Returns β, the probability that a drafted token is accepted: `Σ_x min(p(x) / l, q(x))`.

    See theorem 3.5 and section A.5; the mean of β over prefixes is α.

    Args:
      p, q: the target's and the drafter's distribution, `[…, V]`.
      lenience: l in (0, 1]; 1 is exact.

    >>> p, q = [0.5, 0.5], [0.75, 0.25]
    >>> float(acceptance_rate(p, q)) == 1 - float(divergence(p, q))  # lemma 3.3
    True
    >>> float(acceptance_rate(p, q, lenience=0.5))
    1.0
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience: got {lenience}, expected a number in (0, 1]")
    return np.minimum(np.asarray(p, float) / lenience, np.asarray(q, float)).sum(axis=-1)


def oracle_tokens(alpha: float) -> float:
    """Returns the tokens per target call if γ were always right, section 3: `1 / (1 − α)`.

    No policy of γ exceeds it.

    >>> oracle_tokens(0.8) / expected_tokens(0.8, 5) > 1.35
    True
    """
    _check(alpha, 0)
    return 1 / (1 - alpha) if alpha < 1 else math.inf


def oracle_improvement(alpha: float, cost_ratio: float) -> float:
    """Returns the factor in wall time of an oracle, which drafts exactly the accepted tokens.

    With v = 1 it is `1 / (1 − α + cα)`: the oracle drafts α / (1 − α) tokens for each target call,
    and an iteration takes the time 1 + cα / (1 − α).

    >>> round(oracle_improvement(0.75, cost_ratio=0.02), 2)  # a fixed γ = 7 gives 3.16
    3.77
    """
    _check(alpha, 0)
    _check_cost_ratio(cost_ratio)
    time = 1 - alpha + cost_ratio * alpha
    return 1 / time if time > 0 else math.inf


def expected_calls(alpha: float, gamma: int, length: int) -> float:
    """Returns the expected target calls for an output of `length` tokens.

    Theorem 3.8 assumes a long output. One call yields k ≤ γ tokens with probability `α^(k−1)·(1 −
    α)` and γ + 1 with `α^γ` (section 3.1); what would lie past the end of the output is lost. With
    f(n) = 0 for n ≤ 0: `f(n) = 1 + Σ_k P(k)·f(n − k)`.

    >>> expected_calls(1.0, 3, 9), expected_calls(0.0, 3, 9)
    (3.0, 9.0)
    """
    _check(alpha, gamma)
    _check_count("length", length)
    dist = [alpha ** (k - 1) * (1 - alpha) for k in range(1, gamma + 1)] + [alpha**gamma]
    calls = [0.0]
    for n in range(1, length + 1):
        calls.append(1 + sum(p * calls[n - k] for k, p in enumerate(dist, 1) if k < n))
    return float(calls[length])


def clustered_mean(sums: ArrayLike, counts: ArrayLike) -> tuple[float, float | None]:
    """Returns the mean of all items and its standard error, clustered by sentence.

    Items may depend on each other within a sentence. For K sentences with n_k items (`counts`) that
    sum to s_k (`sums`) the mean is m = Σ s_k / Σ n_k and its error `√(K/(K−1) · Σ (s_k − m·n_k)²) /
    Σ n_k` (the ratio estimator of a sample of clusters); None with fewer than two sentences.

    >>> clustered_mean([1.0, 3.0], [2, 2])
    (1.0, 0.5)
    """
    s, n = (np.asarray(values, np.float64) for values in (sums, counts))
    s, n = s[n > 0], n[n > 0]
    if not len(s):
        raise ValueError("got no items, expected at least one")
    mean, clusters = float(s.sum() / n.sum()), len(s)
    if clusters < 2:
        return mean, None
    squares = np.sum((s - mean * n) ** 2)
    return mean, float(np.sqrt(squares * clusters / (clusters - 1)) / n.sum())


def tokens_by_survival(survival: Sequence[float]) -> list[float]:
    """Returns the tokens per target call for γ = 0 … G: `1 + Σ_{i ≤ γ} survival[i − 1]`.

    `survival` has P(at least i drafted tokens are accepted) for i = 1 … G.

    >>> tokens_by_survival([0.5, 0.25])
    [1.0, 1.5, 1.75]
    """
    return np.cumsum([1.0, *survival]).tolist()


def best_gamma(
    survival: Sequence[float], cost_ratio: float | Sequence[float], verify_cost: Sequence[float]
) -> int:
    """Returns the γ from 0 (plain) to G with the greatest `tokens / (γc + v)`.

    Of equals it is the smallest.

    Args:
      survival: `[G]`, P(at least 1, 2 … G drafted tokens are accepted); α, α², α³ … in the paper's
        model.
      cost_ratio: c, or `[G]`, one for each γ from 1 on.
      verify_cost: `[G + 1]`, v of 1, 2 … G + 1 positions.

    >>> best_gamma([0.8, 0.64, 0.512], cost_ratio=0.1, verify_cost=[1, 1, 1, 1])
    3
    >>> best_gamma([0.1], cost_ratio=0.2, verify_cost=[1, 1])
    0
    """
    if len(verify_cost) != len(survival) + 1:
        raise ValueError(
            f"verify_cost: got {len(verify_cost)} numbers, expected {len(survival) + 1}"
        )
    if np.ndim(cost_ratio) and np.shape(cost_ratio) != (len(survival),):
        raise ValueError(
            f"cost_ratio: got {np.size(cost_ratio)} numbers, expected one or {len(survival)}"
        )
    if not np.all(np.isfinite([*np.ravel(cost_ratio), *verify_cost])):
        got = f"{cost_ratio} and verify_cost {verify_cost}"
        raise ValueError(f"cost_ratio: got {got}, expected finite numbers")
    tokens, gammas = np.array(tokens_by_survival(survival)), np.arange(len(survival) + 1)
    costs = np.append(0, np.broadcast_to(cost_ratio, len(survival)))
    return int(np.argmax(tokens / (gammas * costs + np.asarray(verify_cost))))


def token_survival(log_ratios: np.ndarray) -> np.ndarray:
    """Returns P(at least i drafted tokens are accepted) by token verification, for i = 1 … G.

    The probability is given the target's next tokens y. A drafted token equals y and is accepted
    with probability min(p(y), q(y)). So, given that y came, it was drafted and accepted with
    probability `min(1, q(y)/p(y))`, independently of later tokens. Over y ~ p the product has the
    mean `E[Π min(1, p/q)]` over drafts from q, without the noise of drawing them.

    `log_ratios [..., G]` are log q(y) − log p(y) of the target's next tokens.
    """
    return np.exp(np.cumsum(np.minimum(log_ratios, 0), axis=-1))


def block_survival(log_ratios: np.ndarray) -> np.ndarray:
    """Returns the same as `token_survival` for block verification (Sun et al. 2024).

    There at least i tokens are accepted with probability π_i. With Q_i/P_i the product of the first
    i ratios q(y)/p(y), `π_i · Q_i/P_i = min(1, Q_1/P_1 … Q_i/P_i)`.
    """
    return np.exp(np.minimum(np.minimum.accumulate(np.cumsum(log_ratios, axis=-1), axis=-1), 0))


def output_calls(survival: np.ndarray, gamma: int, ended: bool = True) -> tuple[float, float]:
    """Returns the expected target calls and draft steps for one output of n tokens, EOS included.

    From token t on, the number τ of accepted tokens has the distribution that `survival[t]` gives,
    and the next iteration starts at t + τ + 1: `f(t) = 1 + Σ_k P(τ = k) · f(t + k + 1)`, f(n) = 0.
    After a full acceptance a drafter's first call is over two positions; here it counts as one
    step.

    Args:
      survival: `[n, G]`, with G at least γ; values past the end are not used.
      gamma: γ.
      ended: whether the output ends with an EOS, which a draft may contain and then ends with.
        Else it ends at a limit, and the last token is never drafted.

    >>> output_calls(np.ones((9, 3)), 3)[0], output_calls(np.zeros((9, 3)), 3)
    (3.0, (9.0, 27.0))
    """
    length = len(survival)
    calls, steps = np.zeros(length + 1), np.zeros(length + 1)
    for t in range(length - 1, -1, -1):
        left = length - t
        most = min(gamma, left if ended else left - 1)
        reached = np.append(survival[t, :most], 0.0)
        dist = np.append(1.0, reached[:-1]) - reached  # of τ = 0 … most
        after = np.minimum(t + 1 + np.arange(most + 1), length)
        drafted = (
            most + (gamma - left) * (1 - reached[left - 1]) if ended and left < gamma else most
        )
        calls[t] = 1 + dist @ calls[after]
        steps[t] = drafted + dist @ steps[after]
    return float(calls[0]), float(steps[0])
