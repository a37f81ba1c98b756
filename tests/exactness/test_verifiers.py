"""Every verifier's distribution by enumeration, its mistakes, and JAX's decisions."""

import dataclasses
import itertools

import numpy as np
import pytest
import toy
from enumerations import DELTA, ENUMERATED, EPSILON, SIZES, dists
from toy import BLOCK, REJECTION, TOKEN, Rule

from specdec_jax.speculative.verifiers import LOSSY, VERIFIERS

pytestmark = pytest.mark.usefixtures("quick")


def test_every_verifier_is_here():
    assert {*ENUMERATED, "gumbel"} == set(VERIFIERS)


# --- Distributions, by enumeration ---


@pytest.mark.parametrize("eos", [set(), {0}, {0, 1}], ids=["no EOS", "one EOS", "two EOS"])
@pytest.mark.parametrize("vocab, gamma, limit", SIZES)
@pytest.mark.parametrize("name", ["block", "rejection"])
def test_distribution_of_two_iterations_is_the_targets(name, vocab, gamma, limit, eos):
    """Drafts are of any length up to γ: EOS and limit cut them."""
    rule = Rule(verifier=ENUMERATED[name])
    for zeros in (0.0, 0.5):
        target, draft = dists(vocab, zeros)
        expected = toy.complete({(): 1.0}, target, limit, eos)
        for drafter in (draft, target, toy.one_hot(draft)):
            actual = toy.speculative_distribution(target, drafter, gamma, limit, eos, rule)
            assert toy.total_variation(actual, expected) < 1e-12


def test_the_token_verifier_is_the_default_rule():
    target, draft = dists(3)
    by_rule, by_verifier = (
        toy.enumerate_iteration((), None, target, draft, 3, {0}, rule)
        for rule in (Rule(), Rule(verifier=TOKEN))
    )
    assert toy.total_variation(by_rule, by_verifier) < 1e-12


@pytest.mark.parametrize("name", ["block", "rejection"])
def test_a_draft_may_stop_after_a_drawn_token(name):
    target, draft = dists(3)
    rule = Rule(verifier=ENUMERATED[name], last=lambda q, x: q[x] < 0.3)
    result = toy.speculative_distribution(target, draft, 3, 5, {0}, rule)
    assert toy.total_variation(result, toy.complete({(): 1.0}, target, 5, {0})) < 1e-12


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.2])
def test_lenience_keeps_every_token_below_its_bound(lenience):
    """No token has more than p(x) / l after any prefix; l = 1 is the target's distribution."""
    rule, excess = Rule(verifier=toy.lenient(lenience)), 0.0
    for vocab, gamma, limit in ((2, 3, 6), (3, 2, 5), (4, 3, 4)):
        for zeros, eos in itertools.product((0.0, 0.5), (set(), {0})):
            target, draft = dists(vocab, zeros)
            for drafter in (draft, toy.one_hot(draft)):
                result = toy.speculative_distribution(target, drafter, gamma, limit, eos, rule)
                for prefix, following in toy.conditionals(result):
                    p = target(prefix)
                    assert all(prob <= p[x] / lenience + 1e-12 for x, prob in following.items())
                    excess = max(excess, *(prob / p[x] for x, prob in following.items()))
                if lenience == 1:
                    assert (
                        toy.total_variation(result, toy.complete({(): 1.0}, target, limit, eos))
                        < 1e-12
                    )
    assert excess == pytest.approx(1 / lenience), "the bound is reached"


def test_typical_acceptance_favours_no_improbable_token():
    """A token at or below the threshold has at most p(x); accepted tokens lie above it."""
    rule = Rule(verifier=toy.typical(EPSILON, DELTA))
    for vocab, gamma, limit in ((2, 3, 6), (3, 2, 5), (4, 3, 4)):
        for zeros, eos in itertools.product((0.0, 0.5), (set(), {0})):
            target, draft = dists(vocab, zeros)
            for drafter in (draft, toy.one_hot(draft)):
                result = toy.speculative_distribution(target, drafter, gamma, limit, eos, rule)
                for prefix, following in toy.conditionals(result):
                    p = target(prefix)
                    threshold = toy.typical_threshold(p, EPSILON, DELTA)
                    assert all(
                        prob <= p[x] + 1e-12 or p[x] > threshold for x, prob in following.items()
                    )


# Total variation to the target's distribution over four tokens, V = 4, γ = 2, two iterations: how
# far off the lossy ones are.
MEASURED = {"lenient": (0.2623, 0.2473), "typical": (0.5240, 0.8650)}


@pytest.mark.parametrize("name", LOSSY)
def test_measured_loss(name):
    target, draft = dists(4)
    expected = toy.complete({(): 1.0}, target, 4, set())
    for drafter, measured in zip((draft, toy.one_hot(draft)), MEASURED[name]):
        actual = toy.speculative_distribution(
            target, drafter, 2, 4, set(), Rule(verifier=ENUMERATED[name])
        )
        assert toy.total_variation(actual, expected) == pytest.approx(measured, abs=5e-4)


# --- Tokens accepted ---


def test_accepted_tokens_of_the_two_token_toy():
    """p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: 10/9 by token, 11/9 by block."""

    def accepted(verifier):
        p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3
        return toy.expected_accepted(lambda prefix: p, lambda prefix: q, 2, verifier)

    assert accepted(TOKEN) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted(BLOCK) == pytest.approx(11 / 9, abs=1e-12)
    # M = 2: x is accepted with probability p / (2 q) = 1/4 or 1, that is 1/2 on average.
    assert accepted(REJECTION) == pytest.approx(1 / 2 + 1 / 4, abs=1e-12)
    # l = 1/2: min(1, p / (l q)) is 1 for both.
    assert accepted(toy.lenient(0.5)) == pytest.approx(2, abs=1e-12)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_block_accepts_no_fewer_than_token_and_token_than_rejection(vocab, gamma):
    gains = []
    for seed, zeros in itertools.product(range(8), (0.0, 0.5)):
        target = toy.table_distribution(vocab, 100 + seed, zeros)
        draft = toy.table_distribution(vocab, 200 + seed, zeros)
        for drafter in (draft, toy.one_hot(draft)):
            block, token, rejection, lenient = (
                toy.expected_accepted(target, drafter, gamma, verifier)
                for verifier in (BLOCK, TOKEN, REJECTION, ENUMERATED["lenient"])
            )
            assert (
                block >= token - 1e-12 and token >= rejection - 1e-12 and lenient >= token - 1e-12
            )
            gains.append(block - token)
    assert max(gains) > 0.05 if gamma > 1 else max(gains) < 1e-12


def test_efficiency_formulas():
    """E[τ] over drafts: Σ E[π_i] by block, Σ E[Π min(1, p/q)] by token (section 10)."""
    target, draft = dists(3)
    block = token = 0.0
    for drafted, prob in toy.drafts((), draft, 3, set(), Rule()):
        p, q = toy.compute_distributions((), drafted, target, draft)
        block += prob * sum(toy.block_weights(p, q, drafted)[1:])
        token += prob * np.cumprod(TOKEN.accept_probs(p, q, drafted)).sum()
    assert toy.expected_accepted(target, draft, 3, BLOCK) == pytest.approx(block, abs=1e-12)
    assert toy.expected_accepted(target, draft, 3, TOKEN) == pytest.approx(token, abs=1e-12)


def test_coupled_acceptance_has_its_bound():
    """The share of equal draws has its closed form, and is at least (1 − D) / (1 + D)."""
    rng = np.random.default_rng(0)
    for p, q in [
        (target(()), draft(())) for target, draft in (dists(2), dists(3), dists(4), dists(4, 0.5))
    ]:
        distance = np.abs(p - q).sum() / 2
        share = toy.coupled_share(p, q)
        assert (1 - distance) / (1 + distance) - 1e-12 <= share <= 1 - distance + 1e-12
        noise = rng.gumbel(size=(20_000, len(p)))
        with np.errstate(divide="ignore"):
            drawn = [np.argmax(np.log(dist) + noise, axis=1) for dist in (p, q)]
        assert (
            abs(np.mean(drawn[0] == drawn[1]) - share)
            < 6 * np.sqrt(share * (1 - share) / 20_000) + 1e-12
        )


# --- Mutants ---


def points(x, vocab) -> list[np.ndarray]:
    return [np.eye(vocab)[token] for token in x]


def verified_as_point_mass(verifier):
    """Returns the mistake q := 1 at the drafted id, whatever distribution it was drawn from."""
    return dataclasses.replace(
        verifier, accept_probs=lambda p, q, x: verifier.accept_probs(p, points(x, len(p[0])), x)
    )


def ones(q):
    return [np.ones_like(dist) for dist in q]


def unclipped(p, q, x) -> list[float]:
    return [
        min(1.0, float(weight))
        for weight in np.cumprod([p[i][token] / q[i][token] for i, token in enumerate(x)])
    ]


TARGET, DRAFT = dists(3)
MUTANTS = {
    "block with the token's residual": (
        DRAFT,
        Rule(verifier=dataclasses.replace(BLOCK, following=TOKEN.following)),
    ),
    "block that stops at the first failure": (
        DRAFT,
        Rule(verifier=dataclasses.replace(BLOCK, largest=False)),
    ),
    "block with p as residual": (
        DRAFT,
        Rule(verifier=dataclasses.replace(BLOCK, following=lambda p, q, x, tau: p[tau])),
    ),
    "block with the token's acceptance": (
        DRAFT,
        Rule(verifier=dataclasses.replace(BLOCK, accept_probs=TOKEN.accept_probs)),
    ),
    "block with π not clipped": (
        DRAFT,
        Rule(verifier=dataclasses.replace(BLOCK, accept_probs=unclipped)),
    ),
    "block, q := 1 in the acceptance of a sampled draft": (
        DRAFT,
        Rule(verifier=verified_as_point_mass(BLOCK)),
    ),
    "token, q := 1 in the acceptance of a sampled draft": (
        DRAFT,
        Rule(verifier=verified_as_point_mass(TOKEN)),
    ),
    "block, q := 1 at every id for a point mass": (
        toy.one_hot(DRAFT),
        Rule(
            verifier=dataclasses.replace(
                BLOCK, accept_probs=lambda p, q, x: BLOCK.accept_probs(p, ones(q), x)
            )
        ),
    ),
    "block with a residual of q := 1 for a point mass": (
        toy.one_hot(DRAFT),
        Rule(
            verifier=dataclasses.replace(
                BLOCK, following=lambda p, q, x, tau: BLOCK.following(p, ones(q), x, tau)
            )
        ),
    ),
    "block, improbable token dropped": (DRAFT, Rule(verifier=BLOCK, keep=lambda q, x: q[x] >= 0.3)),
    "block, EOS dropped from the draft": (DRAFT, Rule(verifier=BLOCK, keep=lambda q, x: x != 0)),
    "rejection sampling with the residual": (
        DRAFT,
        Rule(verifier=dataclasses.replace(REJECTION, following=TOKEN.following)),
    ),
    "rejection sampling without M": (
        DRAFT,
        Rule(verifier=dataclasses.replace(REJECTION, accept_probs=TOKEN.accept_probs)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_enumeration_catches(name):
    draft, rule = MUTANTS[name]
    result = toy.speculative_distribution(TARGET, draft, 2, 4, {0}, rule)
    assert abs(sum(result.values()) - 1) < 1e-9, (
        "a mutant is still a distribution; otherwise the enumeration is what fails"
    )
    assert toy.total_variation(result, toy.complete({(): 1.0}, TARGET, 4, {0})) > 0.002


@pytest.mark.parametrize("name", ["token", "block", "rejection"])
def test_a_sampled_draft_may_be_verified_as_a_point_mass(name):
    """If acceptance and residual agree on it, q := 1 wastes drafts but is exact.

    Each draft's outcome has distribution p.
    """
    verifier = ENUMERATED[name]
    wasteful = dataclasses.replace(
        verified_as_point_mass(verifier),
        following=lambda p, q, x, tau: verifier.following(p, points(x, len(p[0])), x, tau),
    )
    result = toy.speculative_distribution(TARGET, DRAFT, 2, 4, {0}, Rule(verifier=wasteful))
    assert toy.total_variation(result, toy.complete({(): 1.0}, TARGET, 4, {0})) < 1e-12

    def accepted(verifier):
        return toy.expected_accepted(TARGET, DRAFT, 2, verifier)

    assert accepted(wasteful) < accepted(verifier) - 0.05
