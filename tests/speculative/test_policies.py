"""Policies of γ against slow versions, by enumeration and through the engine."""

import itertools
import math
import re

import command_line
import flax.struct
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
    V,
    g_test,
    hash_pair,
    joint_distribution,
    sample,
)
from engine_inputs import loop_bodies
from policies import (
    DRAFT,
    INPUTS,
    LIMIT,
    LIMITS,
    OPTIONS,
    PREFIXES,
    TARGET,
    B,
    G,
    enumerated,
    plain,
)
from toy_models import HashModel, HashNetwork, Headless, Words, compilations, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis.formulas import improvement
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.speculative.policies import POLICIES, call_widths
from specdec_jax.speculative.policy import DraftSignals, Outcome
from specdec_jax.speculative.sampling import SamplingConfig

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")


CHOICES = {
    "heuristic": sd.Heuristic(G, start=2, minimum=[1, 2] * (B // 2)),
    "entropy": sd.Entropy(G, minimum=[1, 3] * (B // 2), smoothing=0.5),
    "entropy_bound": sd.EntropyBound(G, scale=0.2, threshold=[0.45, 0.53, 0.6] * (B // 3)),
    "confidence": sd.Confidence(G, threshold=0.6),
    "cost_aware": sd.CostAware(G, cost_ratio=[0.1, 0.4] * (B // 2), verify_cost=1.4),
    "calibrated": sd.Calibrated(G, cost_ratio=[0.1, 0.4] * (B // 2), verify_cost=1.4),
}


def test_every_policy_is_here():
    assert set(CHOICES) == set(POLICIES) and all(
        type(CHOICES[name]) is cls for name, cls in POLICIES.items()
    )


# --- Against slow versions of one row ---


class Slow:
    """What a policy decides for one row, in pure Python; `p` holds its numbers."""

    def __init__(self, p, maximum, calibrated=False):
        self.p, self.maximum, self.gamma, self.average, self.past = p, maximum, None, None, []
        self.calibrated = calibrated
        if "start" in p:
            self.gamma = min(max(p["start"], p["minimum"]), maximum)

    def wanted(self):
        if self.gamma is not None:
            return self.gamma
        if "cost_ratio" not in self.p or self.calibrated:
            return self.maximum
        p, (total, time, step) = self.p, self.rate()
        seen, kept = [0.0] * self.maximum, [0.0] * self.maximum
        for drafted, accepted, _ in self.past:
            for i in range(self.maximum):
                seen[i] = seen[i] * p["memory"] + (i < drafted and i <= accepted)
                kept[i] = kept[i] * p["memory"] + (i < accepted)
        overall = (sum(kept) + p["weight"] * p["acceptance"]) / (sum(seen) + p["weight"])
        count, reach = 0, 1.0
        for one, other in zip(kept, seen):
            reach *= (one + p["weight"] * overall) / (other + p["weight"])
            if reach < total / time * step:
                break
            count += 1
        return max(count, p["minimum"])

    def rate(self):
        """Tokens, the time they took, and that of one more drafted token."""
        p, step = self.p, self.p["cost_ratio"] + (self.p["verify_cost"] - 1) / self.maximum
        tokens = [sum(p["acceptance"] ** i for i in range(g + 1)) for g in range(self.maximum + 1)]
        total = p["weight"] * max(t / (1 + g * step) for g, t in enumerate(tokens))
        time = p["weight"]
        for drafted, accepted, _ in self.past:
            total = total * p["memory"] + accepted + 1
            time = time * p["memory"] + 1 + drafted * step
        return total, time, step

    def acceptance(self, bucket):
        """How often tokens of one bucket of q(x) were accepted; older ones count less."""
        ends, p = [0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 1], self.p
        kept, seen = p["weight"] * (ends[bucket] + ends[bucket + 1]) / 2, p["weight"]
        for age, (drafted, accepted, probs) in enumerate(reversed(self.past)):
            for i in range(min(drafted, accepted + 1)):
                if ends[bucket] <= probs[i] < ends[bucket + 1]:
                    kept += p["memory"] ** age * (i < accepted)
                    seen += p["memory"] ** age
        return kept / seen

    def calibrated_length(self, wanted, probs):
        (total, time, step), reach = self.rate(), 1.0
        for i in range(wanted):
            reach *= self.acceptance(
                sum(probs[i] >= x for x in (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97))
            )
            if reach < total / time * step and i + 1 >= self.p["minimum"]:
                return i + 1
        return wanted

    def length(self, wanted, probs, entropies, vocab):
        """How many of the `wanted` tokens, whose q(x) and H(q) these are, are drafted."""
        p, n = self.p, wanted
        if self.calibrated:
            return self.calibrated_length(wanted, probs)
        if "smoothing" in p:
            n = min(
                n,
                max(
                    1,
                    round(
                        self.maximum
                        - (self.maximum - p["minimum"]) * self.smoothed(entropies, vocab)
                    ),
                ),
            )
        for i in range(n):
            if "scale" in p and 1 - math.sqrt(p["scale"] * entropies[i]) < p["threshold"]:
                return i + 1
            if "scale" not in p and "threshold" in p and probs[i] < p["threshold"]:
                return i + 1
        return n

    def smoothed(self, entropies, vocab):
        """Σ β^age · h over Σ β^age."""
        values = [
            entropies[0] / math.log(vocab),
            *reversed(self.past if "smoothing" in self.p else []),
        ]
        weights = [self.p["smoothing"] ** age for age in range(len(values))]
        return np.dot(weights, values) / sum(weights)

    def update(self, drafted, accepted, probs, entropies, vocab):
        if "start" in self.p and drafted:
            up = self.p["up"] if accepted == drafted else -self.p["down"]
            self.gamma = min(max(self.gamma + up, self.p["minimum"]), self.maximum)
        if "cost_ratio" in self.p:
            self.past.append((drafted, accepted, probs))
        if "smoothing" in self.p and drafted:
            self.past.append(entropies[0] / math.log(vocab))


VARIED = {
    "heuristic": dict(
        minimum=[1, 2, 3, 1], start=[4, 1, 5, 64], up=[2, 1, 3, 2], down=[1, 1, 2, 0]
    ),
    "entropy": dict(minimum=[1, 2, 1, 3], smoothing=[0.0, 0.5, 0.9, 0.3]),
    "entropy_bound": dict(scale=[0.2, 0.5, 0.1, 0.2], threshold=[0.4, 0.4, 0.7, 0.0]),
    "confidence": dict(threshold=[0.1, 0.5, 0.9, 0.0]),
    "cost_aware": dict(
        minimum=[1, 1, 2, 1],
        cost_ratio=[0.05, 0.3, 0.9, 0.0],
        verify_cost=[1.0, 1.5, 1.2, 0.9],
        acceptance=[0.7, 0.5, 0.9, 0.2],
        weight=[4.0, 1.0, 0.5, 9.0],
        memory=[0.9, 1.0, 0.5, 0.8],
    ),
}
VARIED["calibrated"] = VARIED["cost_aware"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_equal_slow_versions(name):
    """40 iterations of four rows; now and then fewer tokens are drafted than wanted, or none."""
    maximum, rows, vocab, rng = 6, 4, 50, np.random.default_rng(1)
    policy = POLICIES[name](maximum, **VARIED[name]).rows(rows)
    slow = [
        Slow(
            {key: values[row] for key, values in VARIED[name].items()},
            maximum,
            name == "calibrated",
        )
        for row in range(rows)
    ]

    @jax.jit
    def lengths(policy, state, seen):
        wanted = drafted = jnp.broadcast_to(policy.wanted(state), (rows,))
        for step in range(maximum):
            most = jnp.minimum(
                drafted, jnp.maximum(policy.limit(state, jnp.int32(step), seen), step + 1)
            )
            drafted = jnp.where(step < drafted, most, drafted)
        return wanted, drafted

    update = jax.jit(lambda policy, state, outcome: policy.update(state, outcome))
    state, all_lengths = jax.jit(lambda policy: policy.init())(policy), []
    for _ in range(40):
        probs = rng.random((rows, maximum), np.float32)
        entropies = rng.random((rows, maximum), np.float32) * np.float32(math.log(vocab))
        seen = DraftSignals(probs, entropies, entropies / np.float32(math.log(vocab)))
        wanted, drafted = jax.device_get(lengths(policy, state, seen))
        for row, one in enumerate(slow):
            assert wanted[row] == one.wanted()
            expected = one.length(wanted[row], probs[row], entropies[row], vocab)
            assert drafted[row] == (expected if policy.needs_probs else wanted[row])
        all_lengths.append(drafted)
        drafted = np.where(rng.random(rows) < 0.1, 0, drafted).astype(np.int32)
        drafted = np.where(rng.random(rows) < 0.1, (drafted + 1) // 2, drafted).astype(np.int32)
        accepted = rng.binomial(drafted, [0.9, 0.5, 0.8, 0.3]).astype(np.int32)
        state = update(policy, state, Outcome(drafted, accepted, seen))
        for row, one in enumerate(slow):
            one.update(int(drafted[row]), int(accepted[row]), probs[row], entropies[row], vocab)
    assert len(np.unique(all_lengths)) >= 3, "or nothing adapts"


def test_cost_aware_finds_the_best_fixed_gamma():
    """With the expected acceptance it begins with the γ that the paper's formula makes best."""
    alphas, costs = [0.3, 0.6, 0.8, 0.9, 0.95], [0.02, 0.05, 0.1, 0.2, 0.3]
    policy = sd.CostAware(16, acceptance=np.repeat(alphas, 5), cost_ratio=np.tile(costs, 5)).rows(
        25
    )
    wanted = jax.jit(lambda policy: policy.wanted(policy.init()))(policy)
    for gamma, (alpha, c) in zip(wanted, itertools.product(alphas, costs)):
        best = max(improvement(alpha, g, c) for g in range(1, 17))
        assert improvement(alpha, int(gamma), c) == pytest.approx(best, rel=1e-4)


def test_calibrated_is_for_chains_alone():
    with pytest.raises(ValueError, match=r"gamma: got Calibrated\(.*with a tree, expected 'auto'"):
        drafter, tree = sd.ModelDrafter(DRAFT), sd.Tree.uniform((2, 1))
        sd.generate(TARGET, INPUTS, drafter=drafter, tree=tree, gamma=sd.Calibrated(2))


def entropy_of(q):
    return -sum(x * math.log(x) for x in q if x > 0)


HEURISTIC = (
    2,
    lambda state, q: state,
    lambda state, n, accepted: min(3, state + 2) if accepted == n else max(1, state - 1),
)
STATELESS = (None, lambda state, q: 3, lambda *_: None)
ENUMERATED = {
    "heuristic": (*HEURISTIC, lambda q, x: False),
    "entropy": (
        None,
        lambda state, q: round(3 - 2 * entropy_of(q) / math.log(len(q))),
        lambda *_: None,
        lambda q, x: False,
    ),
    "entropy_bound": (*STATELESS, lambda q, x: 1 - math.sqrt(0.5 * entropy_of(q)) < 0.4),
    "confidence": (*STATELESS, lambda q, x: q[x] < 0.4),
}


def test_calibrated_learns_how_far_confidence_can_be_trusted():
    """A drafter that is right whatever its q(x) drafts on; one that never is stops at once."""
    policy = sd.Calibrated(8, cost_ratio=0.1).rows(2)
    probs = np.tile(np.array([[0.4], [0.99]], np.float32), (1, 8))
    seen, state = DraftSignals(probs, probs * 0, probs * 0), policy.init()
    before = np.asarray(policy.goes_on(state, seen)).sum(axis=1)
    for _ in range(30):
        outcome = Outcome(np.full(2, 8, np.int32), np.array([8, 0], np.int32), seen)
        state = policy.update(state, outcome)
    after = np.asarray(policy.goes_on(state, seen)).sum(axis=1)
    assert before[0] == 1 and before[1] == 8 and after[0] == 8 and after[1] <= 2
    # What follows the first rejection was not examined and teaches nothing.
    np.testing.assert_allclose(state.examined[1].sum() * 8, state.examined[0].sum(), rtol=1e-5)


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("name", sorted(ENUMERATED))
def test_distribution_by_enumeration(name, verifier):
    verify = {"token": toy.TOKEN, "block": toy.BLOCK}[verifier]
    for vocab, limit in ((2, 6), (3, 5)):
        for seed in range(3):
            target, draft = (
                toy.table_distribution(vocab, seed, 0.3),
                toy.table_distribution(vocab, 50 + seed),
            )
            found = enumerated(target, draft, limit, verify, *ENUMERATED[name])
            assert toy.total_variation(found, toy.complete({(): 1.0}, target, limit, set())) < 1e-12


def test_enumeration_catches_a_token_dropped_after_a_look():
    """The same stop as by confidence, but the token that ends the draft does not stay in it."""
    target, draft = toy.table_distribution(3, 0), toy.table_distribution(3, 50)
    rule = toy.Rule(verifier=toy.BLOCK, keep=lambda q, x: q[x] >= 0.4)
    found = toy.speculative_distribution(target, draft, 3, 5, set(), rule)
    assert toy.total_variation(found, toy.complete({(): 1.0}, target, 5, set())) > 0.01


def adapted(name: str, order=range(B), **options):
    def reorder(values):
        return [values[row] for row in order]

    options = (
        dict(OPTIONS, max_new_tokens=reorder(LIMITS), decoder_prefix=reorder(PREFIXES)) | options
    )
    policy = CHOICES[name]
    numbers = {key: getattr(policy, key) for key in policy.numbers()}
    numbers = {
        key: reorder(value) if isinstance(value, list) else value for key, value in numbers.items()
    }
    return sd.generate(
        TARGET,
        reorder(INPUTS),
        drafter=sd.ModelDrafter(DRAFT),
        gamma=type(policy)(G, **numbers),
        **options,
    )


@tiers.parametrize("name", sorted(CHOICES), first=2)
def test_greedy_output_is_that_of_plain_decoding(name):
    """Rows draft by their own history alone, and nothing compiles for another γ."""
    result = adapted(name)
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    np.testing.assert_array_equal(result.lengths, plain().lengths)
    rows = result.stats.per_row
    means = [row.drafted / row.target_calls for row, limit in zip(rows, LIMITS) if limit > 1]
    assert max(means) - min(means) > 0.5 and max(means) <= G
    assert 0.1 < result.stats.acceptance_rate < 0.95
    for row, limit in zip(rows, LIMITS):
        assert row.drafted <= row.draft_calls <= row.drafted + row.target_calls
        assert limit > 1 or row.drafted == 0
    order = np.random.default_rng(1).permutation(B)

    def again():
        other = adapted(name, order)
        for place, row in enumerate(order):
            assert other.tokens[place].tolist() == result.tokens[row].tolist()
            assert other.stats.per_row[place].drafted == rows[row].drafted
            assert other.stats.per_row[place].accepted == rows[row].accepted

    assert compilations(again) == 0


@tiers.parametrize(
    "policy, verifier",
    [
        (sd.Confidence(2, threshold=0.12), "block"),
        (sd.EntropyBound(2, scale=0.1), "token"),
        (sd.Calibrated(2, cost_ratio=0.05), "block"),
    ],
    ids=["confidence, block", "entropy bound, token", "calibrated, block"],
    first=0,
)
def test_distribution_through_the_engine(policy, verifier):
    """The joint distribution of three tokens, with drafts of one and of two tokens."""
    target, draft = hash_pair()
    counts, (examined, accepted) = sample(
        target, sd.ModelDrafter(draft), SPREAD, 2 * ROWS, verifier=verifier, gamma=policy
    )
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.1 < accepted.sum() / examined.sum() < 0.9 and examined[1] > 1000
    assert g_test(counts, joint_distribution(draft, SPREAD)) < FALSE_ALARM, "the test can fail"


@pytest.mark.parametrize("temperature", [(0.0,) * 3, (0.0, 0.7, 1.6)], ids=["argmax", "mixed"])
def test_what_policies_see(temperature):
    """q(x) and H(q) of the distribution drawn from, after top-k; if one-hot, at temperature 1."""
    config = SamplingConfig(temperature=temperature, top_k=5)
    policy = sd.Confidence(
        G, threshold=[0.0, 0.0, 1.0]
    )  # q(x) < 1: the last row always ends at once
    state, request = prepare(
        TARGET,
        INPUTS[:3],
        drafter=sd.ModelDrafter(DRAFT),
        gamma=policy,
        sampling=config,
        max_new_tokens=9,
        eos_ids=(),
    )
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, np.full(3, G, np.int32)))(
        request.drafter, state
    )
    np.testing.assert_array_equal(draft.num_drafted, [G, G, 1])
    for row, (t, n) in enumerate(zip(temperature, draft.num_drafted)):
        tokens = np.asarray(draft.tokens)[row]
        logits = DRAFT.logits([INPUTS[row]], [[0, *tokens[:-1]]], [len(INPUTS[row])])[0]
        probs = toy.adjusted_probs(logits, t or 1.0, 5)
        entropy = -np.sum(
            np.where(probs > 0, probs * np.log(np.where(probs > 0, probs, 1)), 0), axis=1
        )
        np.testing.assert_allclose(
            draft.seen.prob[row, :n], probs[np.arange(G), tokens][:n], rtol=1e-4
        )
        np.testing.assert_allclose(draft.seen.entropy[row, :n], entropy[:n], atol=1e-5)
        np.testing.assert_allclose(
            draft.seen.evenness[row, :n], entropy[:n] / math.log(V), atol=1e-5
        )


@pytest.mark.slow
def test_a_trace_shows_gamma_and_entropies():
    target, drafter = HashModel(V, 0, vocabulary=Words()), sd.ModelDrafter(DRAFT)
    steps = sd.trace(
        target,
        "w3 w4",
        drafter=drafter,
        gamma=sd.Confidence(G, threshold=0.6),
        max_new_tokens=LIMIT,
    )
    assert all(len(step.accepted) <= step.gamma == len(step.entropies) for step in steps)
    assert len({step.gamma for step in steps}) > 1 and all(
        0 <= h <= math.log(V) for s in steps for h in s.entropies
    )
    fixed = sd.trace(target, "w3 w4", drafter=drafter, gamma=2, max_new_tokens=LIMIT)
    assert {step.gamma for step in fixed[:-1]} == {2} and all(
        step.entropies is None for step in fixed
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heuristic", "cost_aware", "confidence"])
def test_drafters_without_a_model(name):
    """Drafters that draw from counts provide probabilities; others can only change γ."""
    sequences = [row[:length].tolist() for row, length in zip(plain().tokens, plain().lengths)]
    drafter = sd.NGramDrafter.count(sequences, V, 2, sampled=name == "confidence")
    gamma = sd.Confidence(G, threshold=0.2) if name == "confidence" else POLICIES[name](G)
    result = sd.generate(TARGET, INPUTS, drafter=drafter, gamma=gamma, **OPTIONS)
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    lengths = [
        row.drafted / row.target_calls
        for row, limit in zip(result.stats.per_row, LIMITS)
        if limit > 1
    ]
    assert max(lengths) - min(lengths) > 0.5


# --- Widths ---


@pytest.mark.parametrize(
    "gamma, none, widths",
    [
        (1, False, (2,)),
        (1, True, (1, 2)),
        (4, False, (2, 3, 5)),
        (5, True, (1, 2, 3, 5, 6)),
        (8, False, (2, 3, 5, 9)),
    ],
)
def test_call_widths(gamma, none, widths):
    assert call_widths(gamma, none) == widths


@flax.struct.dataclass
class Probe(Headless):
    """Is a `HashNetwork` whose cache also counts its calls by width `[20]`.

    What lies past a call is NaN.
    """

    inner: HashNetwork

    @property
    def vocab_size(self):
        return self.inner.vocab_size

    def prefill(self, *args):
        return self.inner.prefill(*args), jnp.zeros(20, jnp.int32)

    def decode(self, tokens, positions, cache, valid=None):
        logits, inner = self.inner.decode(tokens, positions, cache[0])
        return logits, (inner, cache[1].at[tokens.shape[1]].add(1))


@tiers.parametrize("name", ["heuristic", "lookup"], first=1)
def test_the_narrowest_call_that_covers_the_drafts_is_made(name):
    target = HashModel(V, 0)
    target.network = Probe(target.network)
    drafter = sd.PromptLookupDrafter() if name == "lookup" else sd.ModelDrafter(DRAFT)
    gamma = 8 if name == "lookup" else sd.Heuristic(8, start=1)
    inputs, limits = [INPUTS[0], INPUTS[1]], [40, 30]
    if name == "lookup":
        inputs = [plain_of(row, limit)[: limit // 2] for row, limit in zip(inputs, limits)]
    state, request = prepare(
        target, inputs, drafter=drafter, gamma=gamma, max_new_tokens=limits, eos_ids=()
    )
    widths, wanted = state.config.widths, np.zeros(20, int)
    assert widths == ((1, 2, 3, 5, 9) if name == "lookup" else (2, 3, 5, 9))
    while not np.all(state.done):
        state = advance(request.network, request.drafter, state, np.int32(1))
        wanted[min(width for width in widths if width > max(state.last_drafted))] += 1
    np.testing.assert_array_equal(state.target_cache[1], wanted)
    assert np.sum(wanted > 0) >= 3
    fixed, _ = prepare(
        target, inputs, drafter=sd.ModelDrafter(DRAFT), gamma=8, max_new_tokens=limits, eos_ids=()
    )
    assert fixed.config.widths == () and fixed.policy is None and fixed.last_seen is None


def plain_of(row, limit):
    return sd.generate(TARGET, [row], max_new_tokens=limit, eos_ids=()).tokens[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
def test_no_copy_of_a_cache_where_the_width_varies(optimised, native, monkeypatch):
    """The CPU's own kernels leave out what was not drafted: there one width is enough."""
    if native and not packed_weights.can_pack("float32"):
        pytest.skip("no kernels here")
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: native)
    target, draft = (
        tiny_t5(seed, 53, 1, num_heads=5, head_dim=6, emb_dim=22, mlp_dim=34) for seed in (0, 1)
    )
    state, request = prepare(
        target,
        [[5, 9, 1]],
        drafter=sd.ModelDrafter(draft),
        gamma=sd.Heuristic(2),
        max_new_tokens=40,
    )
    assert state.config.widths == (() if native else (2, 3))
    bodies = loop_bodies(
        advance.lower(target.network, request.drafter, state, np.int32(9))
        .compile(optimised)
        .as_text()
    )
    arrays = jax.tree.leaves((state.target_cache, state.draft_state.cache, target.network.params))
    shapes = {
        ",".join(map(str, leaf.shape)) for leaf in arrays if leaf.ndim > 1 and leaf.size > 200
    }
    assert any(f"[{shape}]" in bodies for shape in shapes)
    copies = set(re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", bodies))
    assert not shapes & copies, sorted(shapes & copies)
