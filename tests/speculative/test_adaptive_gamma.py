"""Adaptive γ against a slow version, by enumeration, in simulations and in the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
import toy
from distribution_samples import (
    FALSE_ALARM,
    ROWS,
    SPREAD,
    g_test,
    hash_pair,
    joint_distribution,
    sample,
)
from policies import DRAFT, INPUTS, LIMITS, OPTIONS, TARGET, B, enumerated, plain

import specdec_jax as sd
from specdec_jax.speculative.adaptive_gamma import MAXIMUM, PROBE, Auto
from specdec_jax.speculative.policy import Outcome

pytestmark = pytest.mark.usefixtures("quick")

CHEAP = (1.0, *(1 + 0.103 * gamma for gamma in range(1, 9)))
# At the acceptance that it begins with drafting does not pay: a row begins with a look, and seldom
# looks again.
STEEP = (1.0, *(1.6 + 0.4 * gamma for gamma in range(1, 9)))


# --- Against a slow version of one row ---


class Slow:
    """What `Auto` decides for one row, in pure Python; hashable, and `after` gives the next."""

    def __init__(
        self,
        costs,
        acceptance=0.68,
        weight=1.7,
        memory=0.99,
        ending=0.0,
        state=None,
    ):
        self.costs, self.numbers = tuple(costs), (acceptance, weight, memory, ending)
        self.first = max(100 * (costs[min(PROBE, len(costs) - 1)] / costs[0] - 1), 2 * PROBE)
        self.state = state or (0.0, 0.0, self.first, self.first)

    def __eq__(self, other):
        return self.state == other.state

    def __hash__(self):
        return hash(self.state)

    def best(self):
        acceptance, weight, _, ending = self.numbers
        examined, kept, _, _ = self.state
        alpha = (kept + weight * acceptance) / (examined + weight) * (1 - ending)
        rates = [
            sum(alpha**i for i in range(gamma + 1)) / cost for gamma, cost in enumerate(self.costs)
        ]
        return rates.index(max(rates))

    def wanted(self):
        _, _, idle, wait = self.state
        return self.best() or (min(PROBE, len(self.costs) - 1) if idle >= wait else 0)

    def after(self, drafted, accepted):
        examined, kept, idle, wait = self.state
        if not drafted:
            return Slow(self.costs, *self.numbers, (examined, kept, idle + 1, wait))
        if not self.best():
            wait = self.first if accepted else 2 * wait
        memory = self.numbers[2]
        examined, kept = memory * examined + min(accepted + 1, drafted), memory * kept + accepted
        return Slow(self.costs, *self.numbers, (examined, kept, 0.0, wait))


def test_policy_equals_slow_version():
    """300 iterations of rows that accept much, little and nothing, with some empty drafts."""
    rows, rng, alphas = 6, np.random.default_rng(0), np.array([0.95, 0.6, 0.2, 0.0, 0.8, 0.0])
    numbers = dict(
        acceptance=[0.7, 0.6, 0.7, 0.7, 0.3, 0.05],
        weight=[2, 3, 1, 2, 4, 2],
        memory=[0.98, 1, 0.9, 1, 0.5, 1],
        ending=[0, 0.15, 0, 0.5, 0.02, 0],
    )
    policy = Auto(costs=CHEAP, **numbers).rows(rows)
    slow = [
        Slow(CHEAP, *(float(np.float32(values[row])) for values in numbers.values()))
        for row in range(rows)
    ]
    wanted, update = jax.jit(Auto.wanted), jax.jit(Auto.update)
    state, seen = jax.jit(Auto.init)(policy), []
    for _ in range(300):
        found = np.asarray(wanted(policy, state))
        assert found.tolist() == [row.wanted() for row in slow]
        seen.append(found)
        drafted = np.where(rng.random(rows) < 0.1, 0, found).astype(np.int32)
        runs = np.cumprod(rng.random((rows, MAXIMUM)) < alphas[:, None], axis=1).sum(axis=1)
        accepted = np.minimum(runs, drafted).astype(np.int32)
        state = update(policy, state, Outcome(drafted, accepted, None))
        slow = [row.after(int(d), int(a)) for row, d, a in zip(slow, drafted, accepted)]
    seen = np.array(seen)
    assert (
        {0, 2, 8} <= {*seen.flatten()} and (seen[:, 5] == 0).mean() > 0.9 and (seen[:, 5] > 0).any()
    ), "or little is seen"


@pytest.mark.parametrize(
    "costs", [(1.0,) * 8, (1.0,) * 10, (0.0,) + (1.0,) * 8, (float("nan"),) * 9, "costly"], ids=str
)
def test_costs_that_are_none(costs):
    with pytest.raises(ValueError, match="^costs: got .*, expected 9 numbers above 0"):
        Auto(costs=costs)


# --- The distribution ---


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize(
    "costs", [(1, 1.4, 1.7, 1.9), (1, 1.9, 2.4, 3), (1, 1.1, 1.2, 1.3)], ids=str
)
def test_distribution_by_enumeration(costs, verifier):
    """Drafts of several lengths, of none, and looks whether they would pay."""
    verify, lengths = {"token": toy.TOKEN, "block": toy.BLOCK}[verifier], set()

    def wanted(state, _):
        lengths.add((state.wanted(), state.best()))
        return state.wanted()

    for vocab, limit in ((2, 6), (3, 5)):
        for seed in range(2):
            target, draft = (
                toy.table_distribution(vocab, seed, 0.3),
                toy.table_distribution(vocab, 50 + seed),
            )

            def update(state, drafted, accepted):
                return state.after(drafted, accepted)

            found = enumerated(target, draft, limit, verify, Slow(costs), wanted, update)
            assert toy.total_variation(found, toy.complete({(): 1.0}, target, limit, set())) < 1e-12
    assert len({wanted for wanted, _ in lengths}) >= 2 and (
        costs[1] < 1.9 or {(PROBE, 0), (0, 0)} <= lengths
    )


@tiers.parametrize(
    "costs", [(1.0, 1.5, 1.7), (1.0, 1.9, 2.4)], ids=["pays at first", "looks at first"], first=0
)
def test_distribution_through_the_engine(costs):
    """Joint distribution of three tokens, drawn with the engine's own keys."""
    target, draft = hash_pair()
    counts, (examined, accepted) = sample(
        target,
        sd.ModelDrafter(draft),
        SPREAD,
        2 * ROWS,
        verifier="block",
        gamma=Auto(2, costs=costs, weight=0.5),
    )
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.1 < accepted.sum() / examined.sum() < 0.9 and examined[1] > 1000
    assert g_test(counts, joint_distribution(draft, SPREAD)) < FALSE_ALARM, "the test can fail"


# --- Through the engine ---


def adapted(costs, order=range(B), **options):
    def reorder(values):
        return [values[row] for row in order]

    options = (
        OPTIONS
        | dict(max_new_tokens=reorder(LIMITS), decoder_prefix=reorder(OPTIONS["decoder_prefix"]))
        | options
    )
    return sd.generate(
        TARGET, reorder(INPUTS), drafter=sd.ModelDrafter(DRAFT), gamma=Auto(costs=costs), **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("costs", [CHEAP, STEEP], ids=["cheap", "steep"])
def test_greedy_output_is_that_of_plain_decoding(costs):
    result = adapted(costs)
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    np.testing.assert_allclose(result.log_probs, plain().log_probs, atol=1e-5)
    stats = result.stats
    assert (
        stats.accepted_by_position.shape == (MAXIMUM,)
        and stats.accepted == stats.accepted_by_position.sum()
    )
    assert stats.drafted > 0 and (costs is CHEAP or stats.drafted < stats.target_calls)


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_mates():
    """Above temperature 0 draws depend on where drafts begin: a row must draft by itself."""
    config, keys = sd.SamplingConfig(temperature=1.0), jax.random.split(jax.random.key(3), B)
    whole = adapted(CHEAP, key=keys, sampling=config)
    order = [0, 9, 2, 4, 4, 10, 6, 6, 1, 1, 3, 0]
    other = adapted(CHEAP, order, key=keys[jnp.array(order)], sampling=config)
    for place, row in enumerate(order):
        np.testing.assert_array_equal(other.tokens[place], whole.tokens[row])
        assert other.stats.per_row[place].drafted == whole.stats.per_row[row].drafted
    assert len({row.drafted / max(row.target_calls, 1) for row in whole.stats.per_row}) > 4


# --- What it costs ---

# v at 3, 5 and 9 positions and c: from a call that costs the same at any width to that of a loop
# that is not made for it.
SETS = {
    "flat": ((1.01, 1.02, 1.04), (0.02, 0.05, 0.1, 0.2)),
    "a kernel": ((1.06, 1.15, 1.3), (0.02, 0.05, 0.1, 0.2)),
    "attention too": ((1.2, 1.4, 1.7), (0.02, 0.05, 0.1)),
}
ALPHAS, ROWS_OF_ONE = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9), 3000


def costs_of(v, c):
    widths = np.repeat([1.0, *v], [1, 2, 2, 4])
    return tuple(float(x) for x in widths + c * np.arange(MAXIMUM + 1))


@functools.partial(jax.jit, static_argnames="tokens")
def seconds(policy, alphas, key, tokens: int):
    """Returns the time `[R]` in which rows that accept with `alphas [R]` get so many tokens."""

    def body(carry):
        left, time, state, key = carry
        key, now = jax.random.split(key)
        drafted = jnp.minimum(policy.wanted(state), jnp.maximum(left - 1, 0))
        kept = jax.random.uniform(now, (len(left), MAXIMUM)) < alphas[:, None]
        accepted = jnp.minimum(jnp.cumprod(kept, axis=1).sum(axis=1), drafted)
        cost = jnp.take_along_axis(policy.costs, drafted[:, None], axis=1)[:, 0]
        state = policy.update(state, Outcome(drafted, accepted, None))
        return (
            left - jnp.where(left > 0, accepted + 1, 0),
            time + jnp.where(left > 0, cost, 0),
            state,
            key,
        )

    start = jnp.full(len(alphas), tokens), jnp.zeros(len(alphas)), policy.init(), key
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] > 0), body, start)[1]


def fixed(costs, alpha: float, tokens: int) -> float:
    """Expected time of the best fixed γ, exactly."""
    times = []
    for gamma in range(MAXIMUM + 1):
        left = [0.0]
        for n in range(1, tokens + 1):
            drafted = min(gamma, n - 1)
            ends = [alpha**k * (1 - alpha) for k in range(drafted)] + [alpha**drafted]
            left.append(costs[drafted] + sum(p * left[n - 1 - k] for k, p in enumerate(ends)))
        times.append(left[tokens])
    return min(times)


def over(v, c, tokens: int):
    """Time over plain decoding's, and over that of the best fixed γ, for each of `ALPHAS`."""
    costs, alphas = costs_of(v, c), np.repeat(ALPHAS, ROWS_OF_ONE).astype(np.float32)
    policy = Auto(costs=costs).rows(len(alphas))
    found = (
        np.asarray(seconds(policy, alphas, jax.random.key(0), tokens))
        .reshape(len(ALPHAS), -1)
        .mean(axis=1)
    )
    return found / tokens, found / [fixed(costs, alpha, tokens) for alpha in ALPHAS]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_never_slower_than_plain_and_as_fast_as_the_best_gamma(name):
    v, draft_costs = SETS[name]
    for c in draft_costs:
        over_plain, over_best = over(v, c, 64)
        short = over(v, c, 12)
        print(
            f"{name}, c {c}: 64 tokens {over_plain.round(3)} {over_best.round(3)}; 12 "
            f"{short[0].round(3)} "
            f"{short[1].round(3)}"
        )
        assert over_plain.max() <= 1.03 + 0.003, (c, over_plain)
        assert over_best.max() <= 1.05 + 0.003, (c, over_best)


def test_looks_cost_less_than_one_percent():
    """Where drafting never pays a row tries again at once, and then after ever longer waits."""
    policy = Auto(costs=STEEP).rows(1)
    wanted, update, state = jax.jit(Auto.wanted), jax.jit(Auto.update), jax.jit(Auto.init)(policy)
    looks, most = [], 4000
    for iteration in range(most):
        drafted = wanted(policy, state)
        if drafted[0]:
            looks.append(iteration)
        state = update(policy, state, Outcome(drafted, jnp.zeros(1, jnp.int32), None))
    assert (
        looks[0] == 0
        and 2 <= len(looks) <= 6
        and np.all(np.diff(looks)[1:] >= 1.9 * np.diff(looks)[:-1])
    )
    assert (len(looks) - 1) * (STEEP[PROBE] - 1) < 0.01 * most


def test_a_row_that_begins_to_pay_is_detected():
    policy = Auto(costs=CHEAP).rows(1)
    wanted, update, state = jax.jit(Auto.wanted), jax.jit(Auto.update), jax.jit(Auto.init)(policy)
    lengths = []
    for iteration in range(400):
        drafted = wanted(policy, state)
        lengths.append(int(drafted[0]))
        state = update(
            policy, state, Outcome(drafted, drafted if iteration >= 100 else 0 * drafted, None)
        )
    assert (
        0 in lengths[50:100] and max(lengths[50:100]) <= PROBE and set(lengths[-50:]) == {MAXIMUM}
    )
