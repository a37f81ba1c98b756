"""The compiled verifiers take the decisions that were enumerated."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from enumerations import (
    DELTA,
    DRAFTS,
    ENUMERATED,
    EPSILON,
    GRID,
    LENIENCE,
    TARGETS,
    as_distribution,
    dists,
    float64,
)
from toy import Rule

from specdec_jax.speculative.distributions import PointMass
from specdec_jax.speculative.verifier import Randomness
from specdec_jax.speculative.verifiers import VERIFIERS, verify_greedy_leniently

pytestmark = pytest.mark.usefixtures("quick")


# --- The JAX code ---


def settings(batch, dtype, lenience=LENIENCE):
    values = dict(lenience=lenience, typical_epsilon=EPSILON, typical_delta=DELTA)
    return {name: np.full(batch, value, dtype) for name, value in values.items()}


def run(name, p, draft, drafted, wanted, accept, final, dtype="float32", noise=None):
    """Returns (τ, next id) `[B, 2]` of `VERIFIERS[name]`.

    `draft` is probabilities `[B, G, V]`, or None for a point mass.
    """
    with float64(dtype == "float64"):
        drafted = jnp.asarray(drafted, jnp.int32)
        draft = PointMass(drafted, p.shape[-1]) if draft is None else as_distribution(draft, dtype)
        accept, noise = (None if x is None else jnp.asarray(x, dtype) for x in (accept, noise))
        draws = Randomness(accept, toy.random_bits(final), noise)
        # The size of the vocabulary stays out of what is traced.
        verify = jax.jit(lambda target, *rest: VERIFIERS[name].verify(target, draft, *rest))
        result = verify(
            as_distribution(p, dtype),
            drafted,
            jnp.asarray(wanted, jnp.int32),
            draws,
            settings(len(p), dtype),
        )
        return np.stack(jax.device_get(result), axis=1)


def intervals(breaks):
    """Lower and upper ends of the intervals that `breaks` cut [0, 1) into."""
    ends = np.unique(np.clip([0.0, *breaks, 1.0], 0, 1))
    ends = ends[np.append(True, np.diff(ends) > 1e-9)]
    return list(zip(ends[:-1], ends[1:]))


def edges(breaks):
    """Points just below the upper ends of the intervals, and their widths."""
    return [(high - 1e-10, high - low) for low, high in intervals(breaks)]


def middles(breaks):
    """Returns the middles of the intervals and their widths.

    A draw takes random bits of 32 bits, which have no edges.
    """
    return [((low + high) / 2, high - low) for low, high in intervals(breaks)]


@pytest.mark.slow
@pytest.mark.parametrize("point", [False, True], ids=["sampled", "point mass"])
@pytest.mark.parametrize("name", ENUMERATED)
def test_jax_decisions_integrate_to_the_transition(name, point):
    """Uniforms just below each threshold of acceptance give exactly the distribution."""
    verifier, gamma = ENUMERATED[name], 3
    for zeros in (0.0, 0.5):
        target, draft = dists(3, zeros)
        draft, rows = toy.one_hot(draft) if point else draft, []
        for drafted, prob in toy.drafts((), draft, gamma, set(), Rule()):
            p, q = toy.compute_distributions((), drafted, target, draft)
            # One uniform for all places of the next id: cut where any of their distributions cuts
            # it.
            cuts = np.concatenate([np.cumsum(dist) for _, dist in verifier.outcomes(p, q, drafted)])
            axes = [edges([height]) for height in verifier.accept_probs(p, q, drafted)] + [
                middles(cuts)
            ]
            for cell in itertools.product(*axes):
                uniforms, widths = zip(*cell)
                rows.append(
                    (
                        p,
                        q,
                        drafted,
                        uniforms[:-1],
                        uniforms[-1:] * (gamma + 1),
                        prob * np.prod(widths),
                    )
                )
        p, q, drafted, accept, final, weights = map(np.array, zip(*rows))
        result = run(
            name, p, None if point else q, drafted, np.full(len(p), gamma), accept, final, "float64"
        )
        dist: dict = {}
        for x, (tau, y), weight in zip(drafted, result, weights):
            key = (*map(int, x[:tau]), int(y)), None
            dist[key] = dist.get(key, 0) + weight
        assert (
            toy.total_variation(
                dist,
                toy.enumerate_iteration(
                    (), None, target, draft, gamma, set(), Rule(verifier=verifier)
                ),
            )
            < 1e-7
        )


def grid(name, point, gamma=3, size=400):
    """Returns points of the grid of uniforms, with drafts of every length and probability."""
    rng = np.random.default_rng([gamma, point, sorted(VERIFIERS).index(name)])
    p = np.broadcast_to(TARGETS[: gamma + 1], (3 * size, gamma + 1, 4))
    q = np.repeat(np.stack([DRAFTS[dists_][:gamma] for dists_ in DRAFTS]), size, axis=0)
    drafted = rng.integers(4, size=(3 * size, gamma))
    q = np.eye(4)[drafted] if point else q
    accept = np.where(rng.random(drafted.shape) < 0.2, 0, rng.choice(GRID, drafted.shape))
    final = (
        rng.choice(GRID, (3 * size, gamma + 1)) + 0.3 / 13
    )  # residuals of a point mass are cut at thirteenths
    return p, q, drafted, rng.integers(gamma + 1, size=3 * size), accept, final


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("point", [False, True], ids=["sampled", "point mass"])
@pytest.mark.parametrize("name", ENUMERATED)
def test_jax_takes_the_enumerated_decisions(name, point, dtype):
    """On a grid with 0: ≤ would accept a token with p(x) = 0 at u = 0."""
    p, q, drafted, wanted, accept, final = grid(name, point)
    result = run(name, p, None if point else q, drafted, wanted, accept, final, dtype)

    def decide(accept):
        return [
            ENUMERATED[name].decide(a, b[:n], x[:n], u, f)
            for a, b, x, n, u, f in zip(p, q, drafted, wanted, accept, final)
        ]

    np.testing.assert_array_equal(result, decide(accept))
    if name != "typical":  # which uses no uniform for this
        assert np.any(result != decide(np.where(accept == 0, -1e-9, accept)))


def test_block_verification_by_hand():
    """What the grid above does not see, since all of its π are 0 or 1.

    Row 0 has π_1 = ½ and h_1 = .3 / (.3 + ½); ½ · p − q is (.25, .05, 0), p − q (.5, .2, 0). Row 1
    has π_1 = min(1, 3) and π_2 = 2/9; without the bound it would be 2/3.
    """
    then = [[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]
    p = np.array([[[0.5, 0.25, 0.25], *then], [[0.9, 0.05, 0.05], *then]])
    q = np.array([[[1, 0, 0], [0, 0.1, 0.9]], [[0.3, 0.7, 0], [0, 0.1, 0.9]]])
    uniforms = np.array([[0.2, 0.9], [0.2, 0.4]]), np.full((2, 3), 0.75)  # between 5/7 and 5/6
    result = run("block", p, q, np.array([[0, 2]] * 2), np.array([2, 2]), *uniforms)
    np.testing.assert_array_equal(result, [[1, 0], [1, 1]])


@pytest.mark.parametrize("name", VERIFIERS)
def test_without_a_draft_the_next_token_is_the_targets(name):
    size = len(GRID)
    p, nothing = np.broadcast_to(TARGETS[:1], (size, 1, 4)), np.zeros((size, 0))
    noise = np.random.default_rng(0).gumbel(size=(size, 1, 4))
    actual = run(
        name,
        p,
        np.zeros((size, 0, 4)),
        nothing,
        np.zeros(size),
        nothing,
        GRID[:, None],
        noise=noise,
    )
    expected = [
        toy.coupled(p[0], (), g) if name == "gumbel" else (0, toy.invert(p[0, 0], u))
        for g, u in zip(noise, GRID)
    ]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["token", "block", "rejection"])
def test_nan_after_a_token_does_not_make_the_token_rarer(name):
    """Half of the rows begin with token 0, after which the target has NaN, and so they fail."""
    rows, rng = 4000, np.random.default_rng(0)
    drafted = rng.integers(2, size=(rows, 2))
    p = np.full((rows, 3, 2), 0.5)
    p[drafted[:, 0] == 0, 1] = np.nan
    accept, final = rng.random((rows, 2)), rng.random((rows, 3))
    n, following = run(name, p, p[:, :1].repeat(2, 1), drafted, np.full(rows, 2), accept, final).T
    first = np.where(n > 0, drafted[:, 0], following)
    assert abs(np.mean(first == 0) - 0.5) < 4.5 * 0.5 / rows**0.5
    kept = (first == 0) & (n > 0)
    assert np.any(kept) and np.all(n[kept] == 1) and np.all(following[kept] == -1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_jax_couples_as_enumerated(dtype):
    p, q, _, wanted, accept, final = grid("gumbel", False)
    noise = np.random.default_rng(1).gumbel(size=p.shape).astype(np.float32)
    with np.errstate(divide="ignore"):
        drafted = np.argmax(np.log(q) + noise[:, :-1], axis=-1)
    actual = run("gumbel", p, q, drafted, wanted, accept, final, dtype, noise)
    expected = [toy.coupled(a, x[:n], g) for a, x, n, g in zip(p, drafted, wanted, noise)]
    np.testing.assert_array_equal(actual, expected)
    assert len(np.unique(actual[:, 0])) == 4, "every number of accepted tokens occurs"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lenience", [1.0, 0.55, 0.2])
def test_jax_verifies_argmax_leniently(lenience, dtype):
    """At T = 0 accepted ids have at least l times the greatest probability; l = 1 is greedy."""
    p, _, drafted, wanted, *_ = grid("lenient", False)
    p = np.concatenate([p, np.broadcast_to(np.array([6, 6, 1, 3]) / 16, p.shape)])
    drafted, wanted = np.tile(drafted, (2, 1)), np.tile(wanted, 2)
    with float64(dtype == "float64"), np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(p), dtype)
        verify = jax.jit(verify_greedy_leniently)
        accept, values = jnp.zeros(drafted.shape, dtype), jnp.full(len(p), lenience, dtype)
        drafts = jnp.asarray(drafted), jnp.asarray(wanted)
        actual = verify(logits, *drafts, accept, {"lenience": values})
    actual = np.stack(actual, axis=1)
    expected = [toy.lenient_argmax(a, x[:n], lenience) for a, x, n in zip(p, drafted, wanted)]
    np.testing.assert_array_equal(actual, expected)
    for here, x, (tau, _) in zip(p, drafted, actual):
        assert all(here[i, x[i]] >= lenience * here[i].max() for i in range(tau))


@jax.jit
def everything(target, draft, drafted, wanted, draws):
    """All verifiers, with the draft as drawn and as a point mass."""
    asked = jax.tree.map(jnp.asarray, settings(len(wanted), np.float32))
    return [
        [
            verifier.verify(target, dist, drafted, wanted, draws, asked)
            for verifier in VERIFIERS.values()
        ]
        for dist in (draft, PointMass(drafted, target.logits.shape[-1]))
    ]


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]), st.integers(1, 7))
def test_properties_of_every_verifier(seed, gamma, valid):
    """Tokens are in range, and of positive probability if lossless, whatever the distributions.

    `valid` of the 7 ids may have a probability; a position past the draft holds NaN.
    """
    rng, vocab, batch = np.random.default_rng(seed), 7, 24
    weights = rng.choice([0.0, 0.0, 1.0, 1.0, 2.5, 1e-6], size=(2, batch, gamma + 1, vocab)) * (
        np.arange(vocab) < valid
    )
    weights[..., rng.integers(valid)] += 1e-3
    p, q = weights / weights.sum(axis=-1, keepdims=True)
    q = np.where(rng.random((batch, 1, 1)) < 0.3, p, q)[:, :gamma]
    disjoint = (p[:, :-1] == 0) & (np.arange(vocab) < valid)
    wholly = np.any(disjoint, axis=-1, keepdims=True) & (rng.random((batch, 1, 1)) < 0.3)
    q = np.where(wholly, disjoint / np.maximum(disjoint.sum(axis=-1, keepdims=True), 1), q)
    drafted = rng.integers(vocab, size=(batch, gamma)).astype(np.int32)
    wanted = rng.integers(gamma + 1, size=batch).astype(np.int32)
    q[np.arange(gamma) >= wanted[:, None]] = np.nan
    uniform = rng.choice([0.0, 0.25, 0.5, 1 - 2**-24], size=(batch, gamma + 1)).astype(np.float32)
    noise = rng.gumbel(size=p.shape).astype(np.float32)
    draws = Randomness(uniform[:, :gamma], toy.random_bits(uniform[:, ::-1]), noise)
    result = jax.device_get(
        everything(
            as_distribution(p, "float32"), as_distribution(q, "float32"), drafted, wanted, draws
        )
    )
    row = np.arange(batch)
    for of_distribution in result:
        for name, (accepted, token) in zip(VERIFIERS, of_distribution):
            assert np.all((accepted >= 0) & (accepted <= wanted)) and np.all(
                (token >= 0) & (token < vocab)
            )
            assert np.all(p[row, accepted, token] > 0), name
            for b, i in ((b, i) for b in row for i in range(accepted[b])):
                assert p[b, i, drafted[b, i]] > 0, name
                if name == "typical":
                    assert (
                        p[b, i, drafted[b, i]]
                        > toy.typical_threshold(p[b, i], EPSILON, DELTA) - 1e-6
                    )


def test_lenience_of_one_is_token_verification():
    p, q, drafted, wanted, accept, final = grid("lenient", False)
    with jax.enable_x64(False):
        asked = settings(len(p), np.float32, 1.0)
        draws = Randomness(np.float32(accept), toy.random_bits(final))
        args = (
            as_distribution(p, "float32"),
            as_distribution(q, "float32"),
            np.int32(drafted),
            np.int32(wanted),
            draws,
            asked,
        )
        lenient, token = (jax.jit(VERIFIERS[name].verify)(*args) for name in ("lenient", "token"))
    np.testing.assert_array_equal(np.stack(lenient), np.stack(token))


def test_identical_distributions_accept_everything():
    """Drafter = target: whatever can be drawn is accepted, at every uniform."""
    for name in ("token", "block", "rejection", "lenient"):
        p, _, drafted, wanted, accept, final = grid(name, False)
        result = run(name, p, p[:, :-1], drafted, wanted, accept, final)
        possible = np.take_along_axis(p[:, :-1], drafted[..., None], axis=-1)[..., 0] > 0
        whole = np.all(possible | (np.arange(3) >= wanted[:, None]), axis=1)
        assert np.sum(whole & (wanted == 3)) > 10
        np.testing.assert_array_equal(result[whole, 0], wanted[whole])
