"""Every verifier: its law by enumeration, its mistakes, and that the JAX code takes the enumerated decisions."""

import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy as shared_toy
from enumerations import DELTA, DRAFTS, ENUMERATED, EPSILON, GRID, LENIENCE, SIZES, TARGETS, as_law, laws
from toy import BLOCK, REJECTION, TOKEN, Rule

from specdec_jax.speculative.laws import PointMass
from specdec_jax.speculative.verifier import Randomness
from specdec_jax.speculative.verifiers import LOSSY, VERIFIERS, verify_greedy_leniently

pytestmark = pytest.mark.usefixtures("quick")


def test_every_verifier_is_here():
    assert {*ENUMERATED, "gumbel"} == set(VERIFIERS)


# --- Laws, by enumeration ---


@pytest.mark.parametrize("eos", [set(), {0}, {0, 1}], ids=["no EOS", "one EOS", "two EOS"])
@pytest.mark.parametrize("vocab, gamma, limit", SIZES)
@pytest.mark.parametrize("name", ["block", "rejection"])
def test_law_of_two_iterations_is_the_targets(name, vocab, gamma, limit, eos):
    """Drafts are of any length up to γ: EOS and limit cut them."""
    rule = Rule(verifier=ENUMERATED[name])
    for zeros in (0.0, 0.5):
        target, draft = laws(vocab, zeros)
        expected = shared_toy.complete({(): 1.0}, target, limit, eos)
        for drafter in (draft, target, shared_toy.one_hot(draft)):
            found = shared_toy.speculative_law(target, drafter, gamma, limit, eos, rule)
            assert shared_toy.total_variation(found, expected) < 1e-12


def test_the_token_verifier_is_the_default_rule():
    target, draft = laws(3)
    by_rule, by_verifier = (
        shared_toy.kernel((), None, target, draft, 3, {0}, rule) for rule in (Rule(), Rule(verifier=TOKEN))
    )
    assert shared_toy.total_variation(by_rule, by_verifier) < 1e-12


@pytest.mark.parametrize("name", ["block", "rejection"])
def test_a_draft_may_stop_after_a_drawn_token(name):
    target, draft = laws(3)
    rule = Rule(verifier=ENUMERATED[name], last=lambda q, x: q[x] < 0.3)
    found = shared_toy.speculative_law(target, draft, 3, 5, {0}, rule)
    assert shared_toy.total_variation(found, shared_toy.complete({(): 1.0}, target, 5, {0})) < 1e-12


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.2])
def test_lenience_keeps_every_token_below_its_bound(lenience):
    """No token has more than p(x) / l after any prefix, however long the drafts; l = 1 is the target's law."""
    rule, excess = Rule(verifier=shared_toy.lenient(lenience)), 0.0
    for vocab, gamma, limit in ((2, 3, 6), (3, 2, 5), (4, 3, 4)):
        for zeros, eos in itertools.product((0.0, 0.5), (set(), {0})):
            target, draft = laws(vocab, zeros)
            for drafter in (draft, shared_toy.one_hot(draft)):
                found = shared_toy.speculative_law(target, drafter, gamma, limit, eos, rule)
                for prefix, following in shared_toy.conditionals(found):
                    p = target(prefix)
                    assert all(prob <= p[x] / lenience + 1e-12 for x, prob in following.items())
                    excess = max(excess, *(prob / p[x] for x, prob in following.items()))
                if lenience == 1:
                    assert shared_toy.total_variation(found, shared_toy.complete({(): 1.0}, target, limit, eos)) < 1e-12
    assert excess == pytest.approx(1 / lenience), "the bound is reached"


def test_typical_acceptance_favours_no_improbable_token():
    """A token at or below the threshold has at most p(x) after any prefix; what stands lies above it."""
    rule = Rule(verifier=shared_toy.typical(EPSILON, DELTA))
    for vocab, gamma, limit in ((2, 3, 6), (3, 2, 5), (4, 3, 4)):
        for zeros, eos in itertools.product((0.0, 0.5), (set(), {0})):
            target, draft = laws(vocab, zeros)
            for drafter in (draft, shared_toy.one_hot(draft)):
                found = shared_toy.speculative_law(target, drafter, gamma, limit, eos, rule)
                for prefix, following in shared_toy.conditionals(found):
                    p = target(prefix)
                    threshold = shared_toy.typical_threshold(p, EPSILON, DELTA)
                    assert all(prob <= p[x] + 1e-12 or p[x] > threshold for x, prob in following.items())


# Total variation to the target's law over four tokens, V = 4, γ = 2, two iterations: how far off the lossy ones are.
MEASURED = {"lenient": (0.2623, 0.2473), "typical": (0.5240, 0.8650)}


@pytest.mark.parametrize("name", LOSSY)
def test_measured_loss(name):
    target, draft = laws(4)
    expected = shared_toy.complete({(): 1.0}, target, 4, set())
    for drafter, measured in zip((draft, shared_toy.one_hot(draft)), MEASURED[name]):
        found = shared_toy.speculative_law(target, drafter, 2, 4, set(), Rule(verifier=ENUMERATED[name]))
        assert shared_toy.total_variation(found, expected) == pytest.approx(measured, abs=5e-4)


# --- Tokens accepted ---


def test_accepted_tokens_of_the_two_token_toy():
    """p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: 10/9 by token, 11/9 by block."""
    target, draft = (lambda _: np.array([1, 2]) / 3), (lambda _: np.array([2, 1]) / 3)
    accepted = lambda verifier: shared_toy.expected_accepted(target, draft, 2, verifier)
    assert accepted(TOKEN) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted(BLOCK) == pytest.approx(11 / 9, abs=1e-12)
    # M = 2: x stands with probability p / (2 q) = 1/4 or 1, that is 1/2 on average.
    assert accepted(REJECTION) == pytest.approx(1 / 2 + 1 / 4, abs=1e-12)
    # l = 1/2: min(1, p / (l q)) is 1 for both.
    assert accepted(shared_toy.lenient(0.5)) == pytest.approx(2, abs=1e-12)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_block_accepts_no_fewer_than_token_and_token_than_rejection(vocab, gamma):
    gains = []
    for seed, zeros in itertools.product(range(8), (0.0, 0.5)):
        target, draft = shared_toy.table_law(vocab, 100 + seed, zeros), shared_toy.table_law(vocab, 200 + seed, zeros)
        for drafter in (draft, shared_toy.one_hot(draft)):
            block, token, rejection, lenient = (
                shared_toy.expected_accepted(target, drafter, gamma, verifier)
                for verifier in (BLOCK, TOKEN, REJECTION, ENUMERATED["lenient"])
            )
            assert block >= token - 1e-12 and token >= rejection - 1e-12 and lenient >= token - 1e-12
            gains.append(block - token)
    assert max(gains) > 0.05 if gamma > 1 else max(gains) < 1e-12


def test_efficiency_formulas():
    """E[τ] over drafts: Σ E[π_i] by block, Σ E[Π min(1, p/q)] by token (section 10 of the algorithms)."""
    target, draft = laws(3)
    block = token = 0.0
    for drafted, prob in shared_toy.drafts((), draft, 3, set(), Rule()):
        p, q = shared_toy.along((), drafted, target, draft)
        block += prob * sum(shared_toy.block_weights(p, q, drafted)[1:])
        token += prob * np.cumprod(TOKEN.stand(p, q, drafted)).sum()
    assert shared_toy.expected_accepted(target, draft, 3, BLOCK) == pytest.approx(block, abs=1e-12)
    assert shared_toy.expected_accepted(target, draft, 3, TOKEN) == pytest.approx(token, abs=1e-12)


def test_coupled_acceptance_has_its_bound():
    """The closed form of the share of equal draws, against noise, and at least (1 − D) / (1 + D)."""
    rng = np.random.default_rng(0)
    for p, q in [(target(()), draft(())) for target, draft in (laws(2), laws(3), laws(4), laws(4, 0.5))]:
        distance = np.abs(p - q).sum() / 2
        share = shared_toy.coupled_share(p, q)
        assert (1 - distance) / (1 + distance) - 1e-12 <= share <= 1 - distance + 1e-12
        noise = rng.gumbel(size=(20_000, len(p)))
        with np.errstate(divide="ignore"):
            drawn = [np.argmax(np.log(law) + noise, axis=1) for law in (p, q)]
        assert abs(np.mean(drawn[0] == drawn[1]) - share) < 6 * np.sqrt(share * (1 - share) / 20_000) + 1e-12


# --- Mutants ---


def points(x, vocab) -> list[np.ndarray]:
    return [np.eye(vocab)[token] for token in x]


def judged_as_point_mass(verifier):
    """q := 1 at the drafted id and 0 elsewhere in the acceptance, whatever law the id was drawn from."""
    return dataclasses.replace(verifier, stand=lambda p, q, x: verifier.stand(p, points(x, len(p[0])), x))


def ones(q):
    return [np.ones_like(law) for law in q]


def unclipped(p, q, x) -> list[float]:
    return [min(1.0, float(weight)) for weight in np.cumprod([p[i][token] / q[i][token] for i, token in enumerate(x)])]


TARGET, DRAFT = laws(3)
MUTANTS = {
    "block with the token's residual": (DRAFT, Rule(verifier=dataclasses.replace(BLOCK, following=TOKEN.following))),
    "block that stops at the first failure": (DRAFT, Rule(verifier=dataclasses.replace(BLOCK, largest=False))),
    "block with p as residual": (
        DRAFT, Rule(verifier=dataclasses.replace(BLOCK, following=lambda p, q, x, tau: p[tau])),
    ),
    "block with the token's acceptance": (DRAFT, Rule(verifier=dataclasses.replace(BLOCK, stand=TOKEN.stand))),
    "block with π not clipped": (DRAFT, Rule(verifier=dataclasses.replace(BLOCK, stand=unclipped))),
    "block, q := 1 in the acceptance of a sampled draft": (DRAFT, Rule(verifier=judged_as_point_mass(BLOCK))),
    "token, q := 1 in the acceptance of a sampled draft": (DRAFT, Rule(verifier=judged_as_point_mass(TOKEN))),
    "block, q := 1 at every id for a point mass": (
        shared_toy.one_hot(DRAFT),
        Rule(verifier=dataclasses.replace(BLOCK, stand=lambda p, q, x: BLOCK.stand(p, ones(q), x))),
    ),
    "block with a residual of q := 1 for a point mass": (
        shared_toy.one_hot(DRAFT),
        Rule(verifier=dataclasses.replace(BLOCK, following=lambda p, q, x, tau: BLOCK.following(p, ones(q), x, tau))),
    ),
    "block, improbable token dropped": (DRAFT, Rule(verifier=BLOCK, keep=lambda q, x: q[x] >= 0.3)),
    "block, EOS dropped from the draft": (DRAFT, Rule(verifier=BLOCK, keep=lambda q, x: x != 0)),
    "rejection sampling with the residual": (
        DRAFT, Rule(verifier=dataclasses.replace(REJECTION, following=TOKEN.following)),
    ),
    "rejection sampling without M": (DRAFT, Rule(verifier=dataclasses.replace(REJECTION, stand=TOKEN.stand))),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_enumeration_catches(name):
    draft, rule = MUTANTS[name]
    found = shared_toy.speculative_law(TARGET, draft, 2, 4, {0}, rule)
    assert abs(sum(found.values()) - 1) < 1e-9, "a mutant is still a law; otherwise the enumeration is what fails"
    assert shared_toy.total_variation(found, shared_toy.complete({(): 1.0}, TARGET, 4, {0})) > 0.002


@pytest.mark.parametrize("name", ["token", "block", "rejection"])
def test_a_sampled_draft_may_be_judged_as_a_point_mass(name):
    """If acceptance and residual agree on it, q := 1 is no mistake, only a waste: each draft's outcome has law p."""
    verifier = ENUMERATED[name]
    wasteful = dataclasses.replace(
        judged_as_point_mass(verifier),
        following=lambda p, q, x, tau: verifier.following(p, points(x, len(p[0])), x, tau),
    )
    found = shared_toy.speculative_law(TARGET, DRAFT, 2, 4, {0}, Rule(verifier=wasteful))
    assert shared_toy.total_variation(found, shared_toy.complete({(): 1.0}, TARGET, 4, {0})) < 1e-12
    accepted = lambda verifier: shared_toy.expected_accepted(TARGET, DRAFT, 2, verifier)
    assert accepted(wasteful) < accepted(verifier) - 0.05


# --- The JAX code ---


def settings(batch, dtype, lenience=LENIENCE):
    values = dict(lenience=lenience, typical_epsilon=EPSILON, typical_delta=DELTA)
    return {name: np.full(batch, value, dtype) for name, value in values.items()}


def run(name, p, draft, drafted, wanted, accept, final, dtype="float32", noise=None):
    """`VERIFIERS[name]` as `[B, 2]` (τ, next id); `draft` is `[B, G, V]` probabilities, or None for a point mass."""
    with jax.enable_x64(dtype == "float64"):
        drafted = jnp.asarray(drafted, jnp.int32)
        draft = PointMass(drafted, p.shape[-1]) if draft is None else as_law(draft, dtype)
        accept, noise = (None if x is None else jnp.asarray(x, dtype) for x in (accept, noise))
        draws = Randomness(accept, shared_toy.words(final), noise)
        # The size of the vocabulary stays out of what is traced.
        verify = jax.jit(lambda target, *rest: VERIFIERS[name].judge(target, draft, *rest))
        found = verify(as_law(p, dtype), drafted, jnp.asarray(wanted, jnp.int32), draws, settings(len(p), dtype))
        return np.stack(jax.device_get(found), axis=1)


def intervals(breaks):
    """Lower and upper ends of the intervals that `breaks` cut [0, 1) into."""
    ends = np.unique(np.clip([0.0, *breaks, 1.0], 0, 1))
    ends = ends[np.append(True, np.diff(ends) > 1e-9)]
    return list(zip(ends[:-1], ends[1:]))


def edges(breaks):
    """Points just below the upper ends of the intervals, and their widths."""
    return [(high - 1e-10, high - low) for low, high in intervals(breaks)]


def middles(breaks):
    """Points in the middle of the intervals, and their widths: a draw takes words of 32 bits, which have no edges."""
    return [((low + high) / 2, high - low) for low, high in intervals(breaks)]


@pytest.mark.parametrize("point", [False, True], ids=["sampled", "point mass"])
@pytest.mark.parametrize("name", ENUMERATED)
def test_jax_decisions_integrate_to_the_kernel(name, point):
    """Every draft and outcome, with uniforms just below each place where the decision to accept changes: exactly the law."""
    verifier, gamma = ENUMERATED[name], 3
    for zeros in (0.0, 0.5):
        target, draft = laws(3, zeros)
        draft, rows = shared_toy.one_hot(draft) if point else draft, []
        for drafted, prob in shared_toy.drafts((), draft, gamma, set(), Rule()):
            p, q = shared_toy.along((), drafted, target, draft)
            # One uniform for all places of the next id: cut where any of their laws cuts it.
            cuts = np.concatenate([np.cumsum(law) for _, law in verifier.outcomes(p, q, drafted)])
            axes = [edges([height]) for height in verifier.stand(p, q, drafted)] + [middles(cuts)]
            for cell in itertools.product(*axes):
                uniforms, widths = zip(*cell)
                rows.append((p, q, drafted, uniforms[:-1], uniforms[-1:] * (gamma + 1), prob * np.prod(widths)))
        p, q, drafted, accept, final, weights = map(np.array, zip(*rows))
        found = run(name, p, None if point else q, drafted, np.full(len(p), gamma), accept, final, "float64")
        law: dict = {}
        for x, (tau, y), weight in zip(drafted, found, weights):
            key = (*map(int, x[:tau]), int(y)), None
            law[key] = law.get(key, 0) + weight
        assert (
            shared_toy.total_variation(
                law, shared_toy.kernel((), None, target, draft, gamma, set(), Rule(verifier=verifier))
            )
            < 1e-7
        )


def grid(name, point, gamma=3, size=400):
    """Points of the grid of uniforms, 0 often among them, with drafts of every length and of probability 0."""
    rng = np.random.default_rng([gamma, point, sorted(VERIFIERS).index(name)])
    p = np.broadcast_to(TARGETS[: gamma + 1], (3 * size, gamma + 1, 4))
    q = np.repeat(np.stack([DRAFTS[laws_][:gamma] for laws_ in DRAFTS]), size, axis=0)
    drafted = rng.integers(4, size=(3 * size, gamma))
    q = np.eye(4)[drafted] if point else q
    accept = np.where(rng.random(drafted.shape) < 0.2, 0, rng.choice(GRID, drafted.shape))
    final = rng.choice(GRID, (3 * size, gamma + 1)) + 0.3 / 13  # residuals of a point mass are cut at thirteenths
    return p, q, drafted, rng.integers(gamma + 1, size=3 * size), accept, final


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("point", [False, True], ids=["sampled", "point mass"])
@pytest.mark.parametrize("name", ENUMERATED)
def test_jax_takes_the_enumerated_decisions(name, point, dtype):
    """On a grid of uniforms, 0 included; and a comparison with ≤ would not: a token with p(x) = 0 would stand at u = 0."""
    p, q, drafted, wanted, accept, final = grid(name, point)
    found = run(name, p, None if point else q, drafted, wanted, accept, final, dtype)
    decide = lambda accept: [
        ENUMERATED[name].decide(a, b[:n], x[:n], u, f) for a, b, x, n, u, f in zip(p, q, drafted, wanted, accept, final)
    ]
    np.testing.assert_array_equal(found, decide(accept))
    if name != "typical":  # which uses no uniform for this
        assert np.any(found != decide(np.where(accept == 0, -1e-9, accept)))


@pytest.mark.parametrize("name", VERIFIERS)
def test_without_a_draft_the_next_token_is_the_targets(name):
    size = len(GRID)
    p, nothing = np.broadcast_to(TARGETS[:1], (size, 1, 4)), np.zeros((size, 0))
    noise = np.random.default_rng(0).gumbel(size=(size, 1, 4))
    found = run(
        name, p, np.zeros((size, 0, 4)), nothing, np.zeros(size), nothing, GRID[:, None], noise=noise,
    )  # fmt: skip
    expected = [
        shared_toy.coupled(p[0], (), g) if name == "gumbel" else (0, shared_toy.invert(p[0, 0], u))
        for g, u in zip(noise, GRID)
    ]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_jax_couples_as_enumerated(dtype):
    p, q, _, wanted, accept, final = grid("gumbel", False)
    noise = np.random.default_rng(1).gumbel(size=p.shape).astype(np.float32)
    with np.errstate(divide="ignore"):
        drafted = np.argmax(np.log(q) + noise[:, :-1], axis=-1)
    found = run("gumbel", p, q, drafted, wanted, accept, final, dtype, noise)
    expected = [shared_toy.coupled(a, x[:n], g) for a, x, n, g in zip(p, drafted, wanted, noise)]
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found[:, 0])) == 4, "every number of accepted tokens occurs"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lenience", [1.0, 0.55, 0.2])
def test_jax_judges_argmax_leniently(lenience, dtype):
    """T = 0: what stands has at least l times the greatest probability; l = 1 is greedy, ties included."""
    p, _, drafted, wanted, *_ = grid("lenient", False)
    p = np.concatenate([p, np.broadcast_to(np.array([6, 6, 1, 3]) / 16, p.shape)])
    drafted, wanted = np.tile(drafted, (2, 1)), np.tile(wanted, 2)
    with jax.enable_x64(dtype == "float64"), np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(p), dtype)
        verify = jax.jit(verify_greedy_leniently)
        found = verify(logits, jnp.asarray(drafted), jnp.asarray(wanted), jnp.full(len(p), lenience, dtype))
    found = np.stack(found, axis=1)
    expected = [shared_toy.lenient_argmax(a, x[:n], lenience) for a, x, n in zip(p, drafted, wanted)]
    np.testing.assert_array_equal(found, expected)
    for here, x, (tau, _) in zip(p, drafted, found):
        assert all(here[i, x[i]] >= lenience * here[i].max() for i in range(tau))


@jax.jit
def everything(target, draft, drafted, wanted, draws):
    """All verifiers, with the draft as drawn and as a point mass."""
    asked = settings(len(wanted), np.float32)
    return [
        [verifier.judge(target, law, drafted, wanted, draws, asked) for verifier in VERIFIERS.values()]
        for law in (draft, PointMass(drafted, target.logits.shape[-1]))
    ]


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]), st.integers(1, 7))
def test_properties_of_every_verifier(seed, gamma, live):
    """Whatever the laws (ties, zeros, p = q, disjoint) and uniforms: in range, and of positive probability if lossless.

    `live` of the 7 ids may have a probability; a position past the draft holds NaN.
    """
    rng, vocab, batch = np.random.default_rng(seed), 7, 24
    weights = rng.choice([0.0, 0.0, 1.0, 1.0, 2.5, 1e-6], size=(2, batch, gamma + 1, vocab)) * (np.arange(vocab) < live)
    weights[..., rng.integers(live)] += 1e-3
    p, q = weights / weights.sum(axis=-1, keepdims=True)
    q = np.where(rng.random((batch, 1, 1)) < 0.3, p, q)[:, :gamma]
    disjoint = (p[:, :-1] == 0) & (np.arange(vocab) < live)
    wholly = np.any(disjoint, axis=-1, keepdims=True) & (rng.random((batch, 1, 1)) < 0.3)
    q = np.where(wholly, disjoint / np.maximum(disjoint.sum(axis=-1, keepdims=True), 1), q)
    drafted = rng.integers(vocab, size=(batch, gamma)).astype(np.int32)
    wanted = rng.integers(gamma + 1, size=batch).astype(np.int32)
    q[np.arange(gamma) >= wanted[:, None]] = np.nan
    uniform = rng.choice([0.0, 0.25, 0.5, 1 - 2**-24], size=(batch, gamma + 1)).astype(np.float32)
    noise = rng.gumbel(size=p.shape).astype(np.float32)
    draws = Randomness(uniform[:, :gamma], shared_toy.words(uniform[:, ::-1]), noise)
    found = jax.device_get(everything(as_law(p, "float32"), as_law(q, "float32"), drafted, wanted, draws))
    row = np.arange(batch)
    for of_law in found:
        for name, (accepted, token) in zip(VERIFIERS, of_law):
            assert np.all((accepted >= 0) & (accepted <= wanted)) and np.all((token >= 0) & (token < vocab))
            assert np.all(p[row, accepted, token] > 0), name
            for b, i in ((b, i) for b in row for i in range(accepted[b])):
                assert p[b, i, drafted[b, i]] > 0, name
                if name == "typical":
                    assert p[b, i, drafted[b, i]] > shared_toy.typical_threshold(p[b, i], EPSILON, DELTA) - 1e-6


def test_lenience_of_one_is_token_verification():
    p, q, drafted, wanted, accept, final = grid("lenient", False)
    with jax.enable_x64(False):
        asked, draws = settings(len(p), np.float32, 1.0), Randomness(np.float32(accept), shared_toy.words(final))
        args = as_law(p, "float32"), as_law(q, "float32"), np.int32(drafted), np.int32(wanted), draws, asked
        lenient, token = (jax.jit(VERIFIERS[name].judge)(*args) for name in ("lenient", "token"))
    np.testing.assert_array_equal(np.stack(lenient), np.stack(token))


def test_identical_laws_accept_everything():
    """Drafter = target: whatever can be drawn stands, at every uniform."""
    for name in ("token", "block", "rejection", "lenient"):
        p, _, drafted, wanted, accept, final = grid(name, False)
        found = run(name, p, p[:, :-1], drafted, wanted, accept, final)
        possible = np.take_along_axis(p[:, :-1], drafted[..., None], axis=-1)[..., 0] > 0
        whole = np.all(possible | (np.arange(3) >= wanted[:, None]), axis=1)
        assert np.sum(whole & (wanted == 3)) > 10
        np.testing.assert_array_equal(found[whole, 0], wanted[whole])
