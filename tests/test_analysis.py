"""The paper's formulas against the paper's own numbers, and against simulation."""

import doctest

import numpy as np
import pytest

from specdec_jax import analysis


def test_doctests():
    assert doctest.testmod(analysis).attempted >= 3
    assert doctest.testmod(analysis).failed == 0


@pytest.mark.parametrize(
    ("alpha", "gamma", "speed"),
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_table_1(alpha, gamma, speed):
    """Speed with c = 0 is the expected number of tokens."""
    assert analysis.improvement(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)
    assert analysis.expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


@pytest.mark.parametrize(
    ("gamma", "alpha", "c", "expected"),
    [(7, 0.75, 0.02, 3.2), (7, 0.8, 0.04, 3.3), (7, 0.82, 0.11, 2.5), (7, 0.62, 0.02, 2.3), (5, 0.65, 0.02, 2.4)],
)
def test_table_4(gamma, alpha, c, expected):
    """The rows where two printed digits of α suffice for the printed factor."""
    assert analysis.improvement(alpha, gamma, c) == pytest.approx(expected, abs=0.051)


def test_verify_cost_divides():
    plain = analysis.improvement(0.7, 4, cost_ratio=0.1)
    assert analysis.improvement(0.7, 4, cost_ratio=0.1, verify_cost=1.4) == pytest.approx(plain * 1.4 / 1.8)


def test_plain_decoding_is_gamma_0():
    assert analysis.expected_tokens(0.3, 0) == 1
    assert analysis.improvement(0.3, 0, 0.5) == 1
    assert analysis.expected_calls(0.3, 0, 7) == 7


def test_the_oracle_by_its_series():
    """It drafts k tokens with probability α^k (1 − α), all of which stand."""
    for alpha, c in ((0.3, 0.1), (0.8, 0.0), (0.9, 0.5)):
        law = [alpha**k * (1 - alpha) for k in range(2000)]
        tokens = sum(p * (k + 1) for k, p in enumerate(law))
        time = sum(p * (1 + c * k) for k, p in enumerate(law))
        assert analysis.oracle_tokens(alpha) == pytest.approx(tokens)
        assert analysis.oracle_improvement(alpha, c) == pytest.approx(tokens / time)
        assert analysis.oracle_improvement(alpha, c) > max(analysis.improvement(alpha, g, c) for g in range(20))
    assert analysis.oracle_tokens(1.0) == analysis.oracle_improvement(1.0, 0.0) == float("inf")
    with pytest.raises(ValueError, match="got cost_ratio -1"):
        analysis.oracle_improvement(0.5, -1)


def test_expected_calls_by_simulation():
    alpha, gamma, length, trials = 0.7, 3, 11, 20_000
    rng, total = np.random.default_rng(0), 0
    for _ in range(trials):
        position = 0
        while position < length:
            accepted = np.append(rng.random(gamma) < alpha, False)
            position += int(np.argmin(accepted)) + 1
            total += 1
    # The standard error is about 0.008 calls.
    assert analysis.expected_calls(alpha, gamma, length) == pytest.approx(total / trials, abs=0.05)


def test_expected_calls_of_long_outputs_reach_equation_1():
    assert 5000 / analysis.expected_calls(0.8, 4, 5000) == pytest.approx(analysis.expected_tokens(0.8, 4), rel=1e-3)


@pytest.mark.parametrize("arguments", [(-0.1, 3), (1.1, 3), (float("nan"), 3), (0.5, -1)])
def test_refuses(arguments):
    with pytest.raises(ValueError, match="got .*expected"):
        analysis.expected_tokens(*arguments)
    with pytest.raises(ValueError, match="got .*expected"):
        analysis.expected_calls(*arguments, 5)


def test_refuses_costs():
    with pytest.raises(ValueError, match="got cost_ratio -1"):
        analysis.improvement(0.5, 3, -1)
    with pytest.raises(ValueError, match="verify_cost 0"):
        analysis.improvement(0.5, 3, 0.1, 0)
