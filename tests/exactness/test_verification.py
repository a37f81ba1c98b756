"""Token verification has the target's distribution; JAX takes the enumerated decisions."""

import doctest
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import tiers
import toy
from enumerations import (
    ADJUSTMENTS,
    DRAFTS,
    GRID,
    SIZES,
    TARGETS,
    as_distribution,
    distribution_of,
    dists,
    float64,
)
from toy import Rule

from specdec_jax.speculative import iteration
from specdec_jax.speculative.verifier import Randomness
from specdec_jax.speculative.verifiers import verify_greedy, verify_tokens

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("eos", [set(), {0}, {0, 1}], ids=["no EOS", "one EOS", "two EOS"])
@pytest.mark.parametrize("vocab, gamma, limit", SIZES)
def test_distribution_of_two_iterations_is_the_targets(vocab, gamma, limit, eos):
    for zeros in (0.0, 0.5):  # with zeros: p(x) = 0, q(x) = 0 and disjoint supports occur
        target, draft = dists(vocab, zeros)
        expected = toy.complete({(): 1.0}, target, limit, eos)
        assert abs(sum(expected.values()) - 1) < 1e-12
        for drafter in (draft, target, toy.one_hot(draft)):
            actual = toy.speculative_distribution(target, drafter, gamma, limit, eos)
            assert toy.total_variation(actual, expected) < 1e-12


@pytest.mark.parametrize("adjustments", ADJUSTMENTS, ids=str)
def test_distribution_under_every_processor(adjustments):
    target, draft = (toy.processed(dist, **adjustments) for dist in dists(4))
    result = toy.speculative_distribution(target, draft, 2, 4, {3})
    assert toy.total_variation(result, toy.complete({(): 1.0}, target, 4, {3})) < 1e-12


def test_a_draft_may_stop_after_a_drawn_token():
    """Rule 6: stopping after an improbable id is exact as long as the id stays in the draft."""
    target, draft = dists(3)
    result = toy.speculative_distribution(
        target, draft, 3, 5, {0}, Rule(last=lambda q, x: q[x] < 0.3)
    )
    assert toy.total_variation(result, toy.complete({(): 1.0}, target, 5, {0})) < 1e-12


def top2(dist):
    return toy.adjusted_probs(np.log(dist), top_k=2)


def argmax_of(q):
    return np.eye(len(q))[np.argmax(q)]


RAW_TARGET, RAW_DRAFT = dists(3)

# name: (target, drafter, rule). Each is an implementation that was really shipped somewhere, or a
# slip away from one.
MUTANTS = {
    "draft by argmax, softmax in the ratio": (RAW_TARGET, RAW_DRAFT, Rule(drawn=argmax_of)),
    "T = 0 accepted by probability": (
        toy.one_hot(RAW_TARGET),
        toy.one_hot(RAW_DRAFT),
        Rule(
            node_outcomes=lambda q: RAW_DRAFT(()),
            accept=lambda p, q, x: toy.ratio(RAW_TARGET(()), q, x),
        ),
    ),
    "ratio with q before top-k": (toy.processed(RAW_TARGET, top_k=2), RAW_DRAFT, Rule(drawn=top2)),
    "ratio with p before top-k": (
        toy.processed(RAW_TARGET, top_k=2),
        toy.processed(RAW_DRAFT, top_k=2),
        Rule(accept=lambda p, q, x: toy.ratio(RAW_TARGET(()), q, x)),
    ),
    "residual from p": (RAW_TARGET, RAW_DRAFT, Rule(residual=lambda p, q: p)),
    "residual from |p - q|": (
        RAW_TARGET,
        RAW_DRAFT,
        Rule(residual=lambda p, q: np.abs(p - q) / np.abs(p - q).sum()),
    ),
    "n-gram: sample, compare, sample again": (
        RAW_TARGET,
        toy.one_hot(RAW_DRAFT),
        Rule(accept=lambda p, q, x: p[x], residual=lambda p, q: p),
    ),
    "always accept": (RAW_TARGET, RAW_DRAFT, Rule(accept=lambda p, q, x: 1.0)),
    "acceptance uniform always 0.5": (
        RAW_TARGET,
        RAW_DRAFT,
        Rule(accept=lambda p, q, x: float(0.5 * q[x] < p[x])),
    ),
    "same uniform at every position": (RAW_TARGET, RAW_DRAFT, Rule(same_uniform=True)),
    "rejection one position late": (RAW_TARGET, RAW_DRAFT, Rule(late=1)),
    "rejection one iteration late": (RAW_TARGET, RAW_DRAFT, Rule(next_iteration=True)),
    "improbable token dropped": (RAW_TARGET, RAW_DRAFT, Rule(keep=lambda q, x: q[x] >= 0.3)),
    "EOS dropped from the draft": (RAW_TARGET, RAW_DRAFT, Rule(keep=lambda q, x: x != 0)),
    "bonus from the position before": (RAW_TARGET, RAW_DRAFT, Rule(bonus_shift=1)),
    "ratio upside down": (
        RAW_TARGET,
        RAW_DRAFT,
        Rule(accept=lambda p, q, x: min(1.0, q[x] / p[x])),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_enumeration_catches(name):
    target, draft, rule = MUTANTS[name]
    result = toy.speculative_distribution(target, draft, 2, 4, {0}, rule)
    assert abs(sum(result.values()) - 1) < 1e-9, (
        "a mutant is still a distribution; otherwise the enumeration is what fails"
    )
    assert toy.total_variation(result, toy.complete({(): 1.0}, target, 4, {0})) > 0.01
    exact = toy.speculative_distribution(
        target, draft if rule.drawn is not top2 else toy.processed(draft, top_k=2), 2, 4, {0}
    )
    assert toy.total_variation(exact, toy.complete({(): 1.0}, target, 4, {0})) < 1e-12


def test_two_iterations_see_what_one_does_not():
    """A correction drawn one iteration late shows in the second iteration alone."""
    target, draft = dists(3)
    expected = toy.complete({(): 1.0}, target, 4, set())
    rule = Rule(accept=lambda p, q, x: toy.ratio(p, q, x) if p is target(()) else 1.0)
    assert (
        toy.total_variation(
            toy.speculative_distribution(target, draft, 1, 4, set(), rule, iterations=1), expected
        )
        < 1e-12
    )
    assert (
        toy.total_variation(
            toy.speculative_distribution(target, draft, 1, 4, set(), rule, iterations=2), expected
        )
        > 0.01
    )


def test_accepted_share_is_the_sum_of_minima():
    """β = Σ min(p, q) = 1 − D_LK (definition 3.2), also for p = q and disjoint supports."""
    cases = [(target(()), draft(())) for target, draft in (dists(2), dists(3), dists(4))]
    cases += [(cases[0][0], cases[0][0]), (np.array([1.0, 0]), np.array([0, 1.0]))]
    for p, q in cases:
        share = sum(q[x] * toy.ratio(p, q, x) for x in range(len(p)))
        assert share == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


@jax.jit
def verified(target, draft, drafted, wanted, accept, final):
    return verify_tokens(target, draft, drafted, wanted, Randomness(accept, final))


@tiers.parametrize("dtype", ["float32", "float64"], first=1)
@pytest.mark.parametrize("gamma", [0, 1, 2])
@pytest.mark.parametrize("name", DRAFTS)
def test_jax_takes_the_enumerated_decisions(name, gamma, dtype):
    """Every draft, every num_drafted ≤ γ, every point of the grid, 0 included.

    Drafts of probability 0 are among them.
    """
    p, q = TARGETS[: gamma + 1], DRAFTS[name][:gamma]
    points = itertools.product(
        itertools.product(range(4), repeat=gamma),
        range(gamma + 1),
        itertools.product(GRID, repeat=gamma),
        range(13),
    )
    drafted, wanted, accept, final = zip(*points)
    # Another uniform at each position where the final token may be accepted.
    final = GRID[(np.array(final)[:, None] + 5 * np.arange(gamma + 1)) % 13]
    size = len(drafted)
    with float64(dtype == "float64"):
        actual = verified(
            as_distribution(np.broadcast_to(p, (size, gamma + 1, 4)), dtype),
            as_distribution(np.broadcast_to(q, (size, gamma, 4)), dtype),
            np.array(drafted, np.int32).reshape(size, gamma),
            np.array(wanted, np.int32),
            np.array(accept, dtype).reshape(size, gamma),
            toy.random_bits(final),
        )
        actual = jax.device_get(actual)
    expected = [
        toy.TOKEN.decide(p, q, d[:n], u, f) for d, n, u, f in zip(drafted, wanted, accept, final)
    ]
    np.testing.assert_array_equal(np.stack(actual, axis=1), expected)


def test_the_grid_catches_a_comparison_that_is_not_strict():
    """u ≤ p/q instead of u < p/q: at u = 0 a token with p(x) = 0 would be accepted."""
    p, q = np.array([[0, 1.0], [0.5, 0.5]]), np.array([[1.0, 0]])
    assert toy.TOKEN.decide(p, q, (0,), (0.0,), (0.5, 0.5)) == (0, 1)
    result = verified(
        as_distribution(p[None], "float32"),
        as_distribution(q[None], "float32"),
        np.zeros((1, 1), np.int32),
        np.ones(1, np.int32),
        np.zeros((1, 1), np.float32),
        toy.random_bits(np.full((1, 2), 0.5)),
    )
    assert [int(x[0]) for x in result] == [0, 1]


def test_decisions_integrate_to_the_transition():
    """`decide`, averaged over the uniforms, is the enumerated transition."""
    target, draft = dists(3)
    p, q = target(()), draft(())
    expected = toy.enumerate_iteration((), None, target, draft, 1, set(), Rule())
    steps, actual = 60, {}
    middle = (np.arange(steps) + 0.5) / steps
    for x, u, f in itertools.product(range(3), middle, middle):
        accepted, y = toy.TOKEN.decide([p, target((x,))], [q], (x,), (u,), (f, f))
        key = ((x, y) if accepted else (y,)), None
        actual[key] = actual.get(key, 0) + q[x] / steps**2
    assert toy.total_variation(actual, expected) < 3 / steps


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_verify_tokens_properties(seed, gamma):
    """Tokens are in range and of positive probability, and none lies past num_drafted.

    The distributions have ties, zeros and p = q.
    """
    rng, vocab, batch = np.random.default_rng(seed), 7, 16
    # Weights from few values give ties; half the rows of q equal p, so that residuals vanish.
    weights = rng.choice([0.0, 0.0, 1.0, 1.0, 2.5, 1e-6], size=(2, batch, gamma + 1, vocab))
    weights[..., 3] += 1e-3
    p, q = weights / weights.sum(axis=-1, keepdims=True)
    q = np.where(rng.random((batch, 1, 1)) < 0.5, p, q)[:, :gamma]
    drafted = rng.integers(vocab, size=(batch, gamma)).astype(np.int32)
    wanted = rng.integers(gamma + 1, size=batch).astype(np.int32)
    uniform = rng.choice([0.0, 0.25, 0.5, 1 - 2**-24], size=(batch, gamma + 1)).astype(np.float32)
    result = verified(
        as_distribution(p, "float32"),
        as_distribution(q, "float32"),
        drafted,
        wanted,
        uniform[:, :gamma],
        toy.random_bits(uniform[:, ::-1]),
    )
    accepted, token = map(np.asarray, result)
    assert np.all((accepted >= 0) & (accepted <= wanted))
    assert np.all((token >= 0) & (token < vocab))
    for row in range(batch):
        assert p[row, accepted[row], token[row]] > 0
        assert all(p[row, i, drafted[row, i]] > 0 for i in range(accepted[row]))


def test_rows_of_minus_infinity_elsewhere_do_no_harm():
    """A position past num_drafted may hold anything, NaN included."""
    p = np.log(np.full((2, 3, 4), 0.25))
    p[:, 2] = np.nan
    q = np.log(np.full((2, 2, 4), 0.25))
    q[:, 1] = -np.inf
    result = verified(
        distribution_of(np.float32(p)),
        distribution_of(np.float32(q)),
        np.zeros((2, 2), np.int32),
        np.array([1, 0], np.int32),
        np.zeros((2, 2), np.float32),
        toy.random_bits([[0.9, 0.3, 0.9], [0.6, 0.9, 0.9]]),
    )
    np.testing.assert_array_equal(result.num_accepted, [1, 0])
    np.testing.assert_array_equal(result.next_token, [1, 2])


def test_verify_greedy():
    target = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [9, 2, 3]], np.int32)
    draft = np.array([[1, 2], [1, 0], [1, 2], [1, 2]], np.int32)
    verify = jax.jit(verify_greedy)
    result = verify(target, draft, np.array([2, 2, 1, 2], np.int32))
    np.testing.assert_array_equal(result.num_accepted, [2, 1, 1, 0])
    np.testing.assert_array_equal(result.next_token, [3, 2, 2, 9])
    nothing = verify(target[:, :1], draft[:, :0], np.zeros(4, np.int32))
    np.testing.assert_array_equal(nothing.num_accepted, 0)
    np.testing.assert_array_equal(nothing.next_token, target[:, 0])


@pytest.mark.slow
def test_algorithm_1_as_printed():
    """The lines at the head of `iteration.py`, beside the compiled code."""
    result = doctest.testmod(iteration)
    assert result.attempted >= 10 and result.failed == 0
