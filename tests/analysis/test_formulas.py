"""The paper's formulas against the paper's own numbers, and against simulation."""

import doctest

import numpy as np
import pytest

from specdec_jax.analysis import formulas


def test_doctests():
    assert doctest.testmod(formulas).attempted >= 3
    assert doctest.testmod(formulas).failed == 0


def test_best_gamma_improves_at_least_as_corollary_3_9_says():
    for alpha in (0.05, 0.3, 0.62, 0.8, 0.95):
        for c in (0.0, 0.02, 0.11, 0.4):
            best = formulas.optimal_gamma(alpha, c, most=60)
            gains = [formulas.improvement(alpha, gamma, c) for gamma in range(61)]
            assert gains[best] == max(gains) >= formulas.least_improvement(alpha, c)
            assert (best > 0) == (alpha > c) == (formulas.least_improvement(alpha, c) > 1)


def test_best_gamma_where_wide_calls_cost_more():
    cost = {1: 1.0, 2: 1.1, 3: 1.2, 4: 3.0, 5: 3.1}
    assert formulas.optimal_gamma(0.8, 0.05, cost.__getitem__, most=4) == 2
    assert formulas.optimal_gamma(0.8, 0.05, most=4) == 4
    assert formulas.optimal_gamma(0.5, 0.2, lambda width: 1.0 if width == 1 else 2.0) == 0


def test_operations_by_simulation():
    """Operations of γ draft tokens and γ + 1 target tokens, over the tokens that come out."""
    rng, (alpha, gamma, c) = np.random.default_rng(0), (0.7, 4, 0.1)
    accepted = np.cumprod(rng.random((200_000, gamma)) < alpha, axis=1).sum(axis=1)
    assert formulas.operations(alpha, gamma, c) == pytest.approx(
        (gamma * c + gamma + 1) / np.mean(accepted + 1), rel=5e-3
    )
    with pytest.raises(ValueError, match="cost_ratio: got -1"):
        formulas.operations(0.5, 1, -1)


def test_acceptance_rate_is_that_of_coin_flips():
    """Theorem 3.5, corollary 3.6 and section A.5, on random distributions."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet([0.5] * 5, 3), rng.dirichlet([0.5] * 5, 3)
    assert formulas.acceptance_rate(p, q) == pytest.approx(1 - formulas.divergence(p, q))
    assert formulas.divergence(p, q) == pytest.approx(formulas.divergence(q, p))
    assert formulas.divergence(p, p) == pytest.approx([0, 0, 0])
    for lenience in (1.0, 0.5, 0.1):
        coin = np.where(lenience * q <= p, 1.0, p / (lenience * q))
        assert formulas.acceptance_rate(p, q, lenience) == pytest.approx((q * coin).sum(axis=-1))
    for lenience in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="lenience: got"):
            formulas.acceptance_rate(p, q, lenience)


def test_verify_cost_divides():
    plain = formulas.improvement(0.7, 4, cost_ratio=0.1)
    assert formulas.improvement(0.7, 4, cost_ratio=0.1, verify_cost=1.4) == pytest.approx(
        plain * 1.4 / 1.8
    )


def test_plain_decoding_is_gamma_0():
    assert formulas.expected_tokens(0.3, 0) == 1
    assert formulas.improvement(0.3, 0, 0.5) == 1
    assert formulas.expected_calls(0.3, 0, 7) == 7


def test_the_oracle_by_its_series():
    """It drafts k tokens with probability α^k (1 − α), all of which are accepted."""
    for alpha, c in ((0.3, 0.1), (0.8, 0.0), (0.9, 0.5)):
        dist = [alpha**k * (1 - alpha) for k in range(2000)]
        tokens = sum(p * (k + 1) for k, p in enumerate(dist))
        time = sum(p * (1 + c * k) for k, p in enumerate(dist))
        assert formulas.oracle_tokens(alpha) == pytest.approx(tokens)
        assert formulas.oracle_improvement(alpha, c) == pytest.approx(tokens / time)
        assert formulas.oracle_improvement(alpha, c) > max(
            formulas.improvement(alpha, g, c) for g in range(20)
        )
    assert formulas.oracle_tokens(1.0) == formulas.oracle_improvement(1.0, 0.0) == float("inf")
    with pytest.raises(ValueError, match="cost_ratio: got -1"):
        formulas.oracle_improvement(0.5, -1)


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
    assert formulas.expected_calls(alpha, gamma, length) == pytest.approx(total / trials, abs=0.05)


def test_expected_calls_of_long_outputs_reach_equation_1():
    assert 5000 / formulas.expected_calls(0.8, 4, 5000) == pytest.approx(
        formulas.expected_tokens(0.8, 4), rel=1e-3
    )


@pytest.mark.parametrize("arguments", [(-0.1, 3), (1.1, 3), (float("nan"), 3), (0.5, -1)])
def test_rejects(arguments):
    with pytest.raises(ValueError, match="got .*expected"):
        formulas.expected_tokens(*arguments)
    with pytest.raises(ValueError, match="got .*expected"):
        formulas.expected_calls(*arguments, 5)


def test_rejects_costs():
    with pytest.raises(ValueError, match="verify_cost: got 0, expected a finite number above 0"):
        formulas.improvement(0.5, 3, 0.1, 0)
    with pytest.raises(ValueError, match="verify_cost: got 1.4, expected a function of the number"):
        formulas.optimal_gamma(0.5, 0.1, 1.4)
    with pytest.raises(ValueError, match="cost_ratio: got 3 numbers, expected one or 2"):
        formulas.best_gamma([0.5, 0.25], [0.1] * 3, [1, 1, 1])
    for cost in (-1, float("nan"), float("inf")):  # of NaN the "best" γ would be 0
        for compute in (
            lambda: formulas.improvement(0.5, 3, cost),
            lambda: formulas.operations(0.5, 3, cost),
            lambda: formulas.optimal_gamma(0.5, cost),
            lambda: formulas.oracle_improvement(0.5, cost),
        ):
            with pytest.raises(ValueError, match=f"cost_ratio: got {cost}, expected a finite"):
                compute()
    with pytest.raises(ValueError, match="cost_ratio: got nan .*, expected finite numbers"):
        formulas.best_gamma([0.5], float("nan"), [1, 1])


def test_rejects_counts():
    for count in (2.5, -1, "3"):
        for name, compute in (
            ("gamma", lambda: formulas.improvement(0.5, count, 0.1)),
            ("most", lambda: formulas.optimal_gamma(0.5, 0.1, most=count)),
            ("length", lambda: formulas.expected_calls(0.5, 3, count)),
        ):
            with pytest.raises(ValueError, match=f"{name}: got {count}, expected an integer"):
                compute()
    assert formulas.expected_tokens(np.float32(0.5), np.int64(1)) == 1.5


def test_the_standard_error_is_that_of_whole_sentences():
    """600 samples of 50 sentences each, whose items depend on each other strongly."""
    rng = np.random.default_rng(0)

    def sample():
        counts = rng.integers(1, 12, 50)
        level = rng.beta(2, 2, 50)  # of each sentence
        return rng.binomial(counts, level), counts

    means, errors = np.transpose([formulas.clustered_mean(*sample()) for _ in range(600)])
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)
    sums, counts = sample()
    mean, error = formulas.clustered_mean(sums, counts)
    naive = np.sqrt(mean * (1 - mean) / counts.sum())
    assert error > 1.3 * naive
    assert formulas.clustered_mean([*sums, 0], [*counts, 0]) == (mean, error), (
        "what has no item does not count"
    )
    assert formulas.clustered_mean([3], [4]) == (0.75, None)
    with pytest.raises(ValueError, match="got no items, expected"):
        formulas.clustered_mean([0], [0])


@pytest.mark.parametrize("gamma", [0, 1, 3, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_calls_along_an_output_are_those_of_independent_acceptances(alpha, gamma):
    length = 11
    survival = np.tile(alpha ** np.arange(1, 6), (length, 1))
    for ended in (True, False):
        calls, steps = formulas.output_calls(survival, gamma, ended)
        assert calls == pytest.approx(formulas.expected_calls(alpha, gamma, length))
        assert (steps == 0) == (gamma == 0)


def test_draft_steps_count_the_end():
    certain, never = np.ones((7, 3)), np.zeros((7, 3))
    # All are accepted: 3 and one more token, then 3 that end with the EOS; the last of the first
    # draft is fed with that one more.
    assert formulas.output_calls(certain, 3) == (2, 3 + 3)
    # At a limit the last token is never drafted.
    assert formulas.output_calls(certain, 3, ended=False) == (2, 3 + 2)
    assert formulas.output_calls(never, 3) == (7, 7 * 3)
    assert formulas.output_calls(never, 3, ended=False) == (7, 4 * 3 + 2 + 1 + 0)


@pytest.mark.parametrize(
    ("rates", "c", "v", "expected"),
    [
        ([0.8] * 8, 0.0, [1] * 9, 8),  # free drafts
        ([0.8] * 8, 0.9, [1] * 9, 0),  # alpha < c: plain decoding
        ([0.8] * 8, 0.1, [1] * 9, 6),
        (
            [0.8] * 8,
            0.1,
            [1, 1.6, 1.4, 1.5, 1.6, 2.5, 2.6, 2.7, 2.8],
            4,
        ),  # a jump between 5 and 6 positions
        ([0.9, 0.9, 0.1, 0.9], 0.05, [1] * 5, 2),  # what the paper's model cannot say
        ([0.5], 0.5, [1, 1], 0),  # no gain: the smallest of equals
    ],
)
def test_best_gamma(rates, c, v, expected):
    survival = np.cumprod(rates)
    assert formulas.best_gamma(survival, c, v) == expected
    gains = [(1 + survival[:gamma].sum()) / (gamma * c + v[gamma]) for gamma in range(len(v))]
    assert gains[expected] == max(gains)


def test_best_gamma_needs_a_cost_for_every_width():
    with pytest.raises(ValueError, match="got 2 numbers, expected 3"):
        formulas.best_gamma([0.5, 0.25], 0.1, [1, 1])
