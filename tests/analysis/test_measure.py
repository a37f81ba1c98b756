"""Tests `specdec measure`: agreement, expected calls, costs, the record and its figure."""

import dataclasses
import itertools

import command_line
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_processors
from measured_pair import ACCEPTED
from toy_models import HashModel, HashNetwork

from specdec_jax.analysis import acceptance, expectations, formulas, predictions, timing, variants
from specdec_jax.analysis.predictions import Work
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands import measure
from specdec_jax.decoding import autotune
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.results import NonFiniteLogitsError
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.parallel import ParallelDrafter
from specdec_jax.drafters.random_tokens import RandomDrafter
from specdec_jax.speculative import iteration
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import Tree

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")
V = 12
TARGET, DRAFT = HashModel(V, 0, spread=6.0), HashModel(V - 2, 1, likeness=0.7, spread=6.0)


def outputs(rows: int, longest: int):
    rng = np.random.default_rng(0)
    inputs = [rng.integers(2, V, rng.integers(1, 6)).tolist() for _ in range(rows)]
    return inputs, rng.integers(0, V, (rows, longest)), rng.integers(0, longest + 1, rows)


def slow_distributions(model, ids, fed, **adjustments):
    """Returns distributions `[T, V]` after each of `fed`, one position at a time.

    Ids that the model lacks have probability 0.
    """
    last = model.config.vocab_size - 1
    logits = model.logits([np.minimum(ids, last)], [np.minimum(fed, last)], [len(ids)])[0]
    logits = np.pad(logits, ((0, 0), (0, V - logits.shape[1])), constant_values=-np.inf)
    with np.errstate(invalid="ignore"):
        return np.array(
            [
                toy_processors.dist(
                    logits[t], fed[: t + 1], new=t, eos_ids=TARGET.eos_ids, **adjustments
                )
                for t in range(len(fed))
            ]
        )


ADJUSTED = {
    "argmax": dict(temperature=0.0),
    "temperature": dict(temperature=0.7),
    "filters": dict(temperature=1.3, top_k=7, top_p=0.9),
    "processors": dict(
        temperature=1.0, repetition_penalty=2.0, min_new_tokens=3, forbidden_tokens=(5,)
    ),
}


@pytest.mark.parametrize("name", sorted(ADJUSTED))
def test_agreement_is_that_of_the_distributions_computed_one_by_one(name):
    inputs, tokens, lengths = outputs(rows=4, longest=6)
    found = acceptance.agreement(
        TARGET, DRAFT, inputs, tokens, lengths, SamplingConfig(**ADJUSTED[name])
    )
    filters = dict(top_k=0, top_p=1.0, min_p=0.0) | ADJUSTED[name]
    for row, length in enumerate(lengths):
        fed = [TARGET.start_token, *tokens[row, : max(0, length - 1)].tolist()]
        p, q = (slow_distributions(model, inputs[row], fed, **filters) for model in (TARGET, DRAFT))
        overlap = np.minimum(p, q).sum(axis=1)[:length]
        np.testing.assert_allclose(found.overlap[row, :length], overlap, atol=1e-5)
        if name == "argmax":
            assert set(overlap.tolist()) <= {0.0, 1.0}
        here, there = (
            dists[np.arange(length), tokens[row, :length]] for dists in (p[:length], q[:length])
        )
        # An output that the target cannot give counts as agreed upon where the drafter gives it.
        expected = np.where(
            there > 0, there / np.where(here > 0, here, np.where(there > 0, there, 1)), 0
        )
        np.testing.assert_allclose(
            np.exp(found.log_ratio[row, :length]), expected, rtol=1e-4, atol=1e-6
        )


def covered_by_drawing(p, q, ranked, k: int) -> float:
    """Returns P(the committed token is a child) where the last child is drawn.

    The first k − 1 of `ranked`, S, are children. Another, x, is drawn from q without S: y = x with
    probability min(1, p / q′), else y comes from what p has more than q′.
    """
    fixed = ranked[: k - 1]
    left = np.where(np.isin(np.arange(V), fixed), 0, q)
    if not left.sum():
        return p[fixed].sum()
    left = left / left.sum()
    rest = np.maximum(p - left, 0)
    found = 0.0
    for x in np.flatnonzero(left):
        accepted = min(1.0, p[x] / left[x])
        else_child = rest[fixed].sum() + rest[x] if rest.sum() else 0.0
        found += left[x] * (accepted + (1 - accepted) * else_child / (rest.sum() or 1))
    return found


@pytest.mark.parametrize("name", sorted(ADJUSTED))
def test_hit_rate_is_that_of_the_distributions_computed_one_by_one(name):
    inputs, tokens, lengths = outputs(rows=4, longest=6)
    found = acceptance.agreement(
        TARGET, DRAFT, inputs, tokens, lengths, SamplingConfig(**ADJUSTED[name])
    ).hit_rates.mean
    filters = dict(top_k=0, top_p=1.0, min_p=0.0) | ADJUSTED[name]
    assert set(found) == ({"top"} if name == "argmax" else {"top", "mixed"})
    for row, length in enumerate(lengths):
        fed = [TARGET.start_token, *tokens[row, : max(0, length - 1)].tolist()]
        p = slow_distributions(TARGET, inputs[row], fed, **filters)
        q = slow_distributions(
            DRAFT, inputs[row], fed, **filters | ({"temperature": 1.0} if name == "argmax" else {})
        )
        for t, k in itertools.product(range(length), (1, 2, 5, 8)):
            ranked = [token for token in np.argsort(-q[t], kind="stable") if q[t, token] > 0]
            assert found["top"][row, t, k - 1] == pytest.approx(p[t, ranked[:k]].sum(), abs=1e-5)
            if "mixed" in found:
                expected = covered_by_drawing(p[t], q[t], ranked, k)
                assert found["mixed"][row, t, k - 1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_hit_rate_of_a_sample():
    """The hit rate of one child is α; every further child adds what the record has."""
    drafter, batches = ModelDrafter(DRAFT), make_batches(8, 4)
    for kind, how in (("top", options()), ("mixed", options(temperature=1.0))):
        found = acceptance.score(Workload(TARGET, drafter, batches, how), ("block",), 2)
        mean, error = np.transpose(found.hit_rate[kind])
        assert list(found.hit_rate) == (["top"] if kind == "top" else ["top", "mixed"])
        assert mean[0] == pytest.approx(found.alpha, abs=1e-6) and error[0] == pytest.approx(
            found.error, abs=1e-6
        )
        assert np.all(np.diff(mean) >= -1e-6) and mean[0] < mean[1] and mean[-1] <= 1 + 1e-6
        record = found.record()
        np.testing.assert_allclose(np.cumsum(record["by_rank"][kind]), mean, atol=1e-6)
        assert [value["covered"] for value in record["hit_rate"][kind]] == mean.tolist()
        assert (
            Tree.best(record["by_rank"][kind], 8, 4).expected(record["by_rank"][kind]) > 1 + mean[0]
        )


@pytest.mark.parametrize(("name", "verifier"), [("token", toy.TOKEN), ("block", toy.BLOCK)])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_survival_along_the_targets_outputs_is_that_over_drafts(name, verifier, zeros):
    """The mean over all outputs of the target is E[τ] over all drafts, exactly.

    Per output it is Σ_i P(at least i are accepted).
    """
    target = toy.table_distribution(4, 1, zeros)
    draft = toy.table_distribution(4, 2, zeros)
    gamma = 3
    total = 0.0
    for output, prob in toy.complete({(): 1.0}, target, gamma, set()).items():
        p, q = (
            np.array([dist(output[:i])[y] for i, y in enumerate(output)])
            for dist in (target, draft)
        )
        with np.errstate(divide="ignore"):
            total += prob * acceptance.SURVIVAL[name](np.log(q) - np.log(p)).sum()
    assert total == pytest.approx(toy.expected_accepted(target, draft, gamma, verifier), abs=1e-12)


def options(**values):
    return measure.MeasureOptions(
        target="target", drafter="drafter", **{"max_new_tokens": 12, **values}
    )


def make_batches(rows: int, size: int):
    inputs, _, _ = outputs(rows, 1)
    return variants.cut_batches(inputs, inputs, size, 0)


@pytest.fixture(scope="module")
def greedy():
    """Eight rows, scored and counted with γ = 3, and decoded with every γ up to it."""
    drafter, batches = ModelDrafter(HashModel(V, 1, likeness=0.7, spread=6.0)), make_batches(8, 4)
    workload = Workload(TARGET, drafter, batches, options())
    ways = {how: getattr(acceptance, how)(workload, ("block",), 3) for how in ("score", "count")}
    results = {
        gamma: [
            generate(TARGET, batch.ids, drafter=drafter, gamma=gamma, max_new_tokens=12)
            for batch in batches
        ]
        for gamma in (1, 3)
    }
    return ways, results


def test_calls_expected_with_argmax_are_those_made(greedy):
    """With argmax nothing is random: the engine makes the expected calls for every γ.

    The end and the limit are included.
    """
    ways, results = greedy
    for gamma, found in results.items():
        calls = [max(row.target_calls for row in result.stats.per_row) for result in found]
        assert [work.calls for work in ways["score"].work["block", gamma]] == pytest.approx(calls)
    assert {reason for result in results[1] for reason in result.finish_reasons} == {
        "eos",
        "length",
    }


def test_counting_and_scoring_agree(greedy):
    ways, results = greedy
    scored, counted = ways["score"], ways["count"]
    assert 0 < scored.alpha < 1 and scored.error > 0
    lengths = [result.lengths.tolist() for result in results[3]]
    assert (
        [rows.tolist() for rows in scored.lengths]
        == [rows.tolist() for rows in counted.lengths]
        == lengths
    )
    stats = [result.stats for result in results[3]]
    examined = sum(int(one.examined_by_position.sum()) for one in stats)
    assert (
        counted.alpha == sum(one.accepted for one in stats) / examined
        and counted.positions == examined
    )
    first = [work.calls for work in counted.work["block", 3]]
    assert first == pytest.approx([max(row.target_calls for row in one.per_row) for one in stats])
    by_one = sum(counted.survival["block"][0][:1])
    per_call = 1 + sum(accepted for accepted, _ in counted.survival["block"])
    assert [work.calls for work in counted.work["block", 1]] == pytest.approx(
        [calls * per_call / (1 + by_one) for calls in first]
    )
    by_position = sum(one.accepted_by_position for one in stats) / sum(
        one.target_calls for one in stats
    )
    assert [accepted for accepted, _ in counted.survival["block"]] == pytest.approx(
        by_position.tolist()
    )
    reached = sum(one.examined_by_position for one in stats)
    rates = sum(one.accepted_by_position for one in stats) / reached
    assert [accepted for accepted, _ in counted.by_depth["block"]] == pytest.approx(rates.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_calls_expected_when_sampling_are_those_made_on_average(verifier):
    """Means over 512 rows each, of other samples: five standard errors apart at most."""
    how = options(temperature=1.0, verifier=verifier, seed=3)
    inputs = [[2 + i % 8, 3] for i in range(512)]
    batch = variants.cut_batches(inputs, inputs, 512, 0)[0]
    drafter = ModelDrafter(HashModel(V, 1, likeness=0.7, spread=6.0))
    plain = generate(TARGET, batch.ids, key=batch.keys, **how.decoding(plain=True))
    agreed = acceptance.agreement(
        TARGET, drafter.model, batch.ids, plain.tokens, plain.lengths, how.sampling()
    )
    expected = []
    for row, length in enumerate(plain.lengths):
        accepted = acceptance.windowed_survival(
            agreed.log_ratio[row, :length], 3, acceptance.SURVIVAL[verifier]
        )
        expected.append(formulas.output_calls(accepted, 3, plain.finish_reasons[row] == "eos"))
    result = generate(
        TARGET, batch.ids, drafter=drafter, gamma=3, key=jax.random.key(9), **how.decoding()
    )
    made = [row.target_calls for row in result.stats.per_row]
    expected = [calls for calls, _ in expected]
    error = np.hypot(np.std(made), np.std(expected)) / np.sqrt(512)
    assert abs(np.mean(made) - np.mean(expected)) < 5 * error
    assert error < 0.06 * np.mean(made), "or it would show nothing"


SAMPLED = {
    "temperature": dict(temperature=1.0),
    "filters": dict(temperature=0.9, top_k=7, top_p=0.9),
    "processors": dict(
        temperature=1.0, repetition_penalty=2.0, min_new_tokens=3, forbidden_tokens=(5,)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAMPLED, reverse=True))
def test_counting_and_overlap_agree_on_the_same_positions(name):
    """Corollary 3.6, on the real random path: within three standard errors of 256 rows."""
    how = options(seed=1, **SAMPLED[name])
    drafter = ModelDrafter(HashModel(V, 1, likeness=0.7, spread=6.0))
    inputs = [[2 + i % 8, 3 + i % 5] for i in range(256)]
    batches = variants.cut_batches(inputs, inputs, 128, 0)
    found = acceptance.compare(Workload(TARGET, drafter, batches, how), 3)
    result = [
        generate(
            TARGET,
            batch.inputs,
            drafter=drafter,
            gamma=3,
            key=batch.keys,
            **how.decoding() | {"verifier": "token"},
        )
        for batch in batches
    ]
    examined = sum(int(one.stats.examined_by_position.sum()) for one in result)
    assert found.positions == examined > 1000
    assert found.counted == pytest.approx(sum(one.stats.accepted for one in result) / examined)
    assert found.difference == pytest.approx(found.counted - found.overlap)
    assert 0 < abs(found.difference) < 3 * found.standard_error < 0.05


@pytest.mark.slow
def test_counting_and_overlap_agree_whatever_verifies_the_rest():
    """A lossy verifier's settings do not count; rows that fill up a batch have no positions."""
    drafter, batches = ModelDrafter(HashModel(V, 1, likeness=0.7, spread=6.0)), make_batches(5, 4)
    assert any(not ids for ids in batches[-1].ids)
    ways = [options(temperature=1.0), options(temperature=1.0, verifier="lenient", lenience=0.1)]
    first, second = (acceptance.compare(Workload(TARGET, drafter, batches, how), 3) for how in ways)
    assert first == second and first.positions > 0


def test_nothing_drafted_is_nothing_to_compare():
    drafter = ModelDrafter(HashModel(V, 1, likeness=0.7, spread=6.0))
    assert (
        acceptance.compare(
            Workload(TARGET, drafter, make_batches(2, 2), options(max_new_tokens=1)), 3
        )
        is None
    )


def test_counting_and_overlap_are_one_with_argmax():
    drafter, batches = ModelDrafter(HashModel(V, 1, likeness=0.7, spread=6.0)), make_batches(9, 4)
    found = acceptance.compare(Workload(TARGET, drafter, batches, options()), 3)
    assert found.counted == found.overlap and found.difference == 0 and 0 < found.counted < 1


@pytest.mark.slow
def test_another_drafters_distribution_does_not_agree(monkeypatch):
    """The comparison separates a drafter from a worse one, and positions from their neighbours."""
    drafter, inputs = (
        ModelDrafter(HashModel(V, 1, likeness=0.7, spread=6.0)),
        [[2 + i % 8, 3] for i in range(256)],
    )
    batches, agreement = variants.cut_batches(inputs, inputs, 256, 0), acceptance.agreement
    other = HashModel(V, 1, likeness=0.5, spread=6.0)
    monkeypatch.setattr(
        acceptance, "agreement", lambda target, _, *rest: agreement(target, other, *rest)
    )
    found = acceptance.compare(
        Workload(TARGET, drafter, batches, options(temperature=0.5, seed=1)), 3
    )
    assert abs(found.difference) > 3 * found.standard_error

    def shifted(*args):
        agreed = agreement(*args)
        return agreed._replace(overlap=np.roll(agreed.overlap, 1, axis=1))

    monkeypatch.setattr(acceptance, "agreement", shifted)
    found = acceptance.compare(Workload(TARGET, drafter, make_batches(9, 4), options()), 3)
    assert found.difference != 0


@pytest.mark.slow
def test_damaged_models_are_named_with_the_number_of_the_input():
    """Batches are sorted by length: the number is the one that the input had before."""
    inputs = [[3, 4, 5, 6, 1], [7, 1], [3, 2, 2, 1]]
    batches = variants.cut_batches(inputs, inputs, 2, 0)
    sound = HashModel(V, 1, spread=6.0)

    @flax.struct.dataclass
    class Broken(HashNetwork):
        def decode(self, tokens, positions, cache, valid=None):
            logits, cache = HashNetwork.decode(self, tokens, positions, cache)
            return jnp.where(cache.inputs[:, None, None] % 2 == 1, jnp.nan, logits), cache

    broken = HashModel(V, 0, spread=6.0)
    broken.network = Broken(broken.dist)
    odd = [
        place
        for place, ids in enumerate(inputs)
        if int(TARGET.network.prefill(np.array([ids]), np.array([len(ids)]), 9).inputs[0]) % 2
    ]
    assert 0 < len(odd) < 3
    variant = variants.Variant(0, lambda batch: generate(broken, batch.ids, max_new_tokens=3))
    with pytest.raises(
        NonFiniteLogitsError, match=f"input ({'|'.join(map(str, odd))}): got logits from the target"
    ):
        variants.time_pass({"plain": variant}, batches, 0, "pass")
    nothing = HashModel(V, 1)
    nothing.logits = lambda *arguments, **options: np.full(
        (*np.shape(arguments[1]), V), np.nan, np.float32
    )
    with pytest.raises(
        NonFiniteLogitsError,
        match="input [012]: got logits from the drafter hash .* at new token 0",
    ):
        acceptance.score(
            Workload(sound, ModelDrafter(nothing), batches, options(temperature=1.0)), ("token",), 2
        )


@pytest.mark.slow
def test_what_cannot_be_scored_is_counted():
    """No model; and a verifier whose outputs are not the target's."""
    batches, model = make_batches(2, 2), ModelDrafter(DRAFT)
    random = acceptance.measure_acceptance(
        Workload(TARGET, RandomDrafter(V), batches, options()), ("block",), 2
    )
    assert random.how == "counted" and 0 <= random.alpha < 1 and set(random.survival) == {"block"}
    lossy = options(verifier="lenient", lenience=1e-9)
    assert (
        acceptance.measure_acceptance(Workload(TARGET, model, batches, lossy), ("lenient",), 2).how
        == "counted"
    )
    assert (
        acceptance.measure_acceptance(
            Workload(TARGET, model, batches, options(verifier="gumbel")), ("gumbel",), 2
        ).how
        == "scored"
    )


def test_iterations_are_the_engines():
    """Each from the same lengths, with what the one before left."""
    drafter = ModelDrafter(DRAFT)
    state, request = timing.iteration_state(
        TARGET, drafter, 2, 5, 2, max_new_tokens=8, key=jax.random.key(1)
    )
    assert state.lengths.tolist() == [3, 3] and not state.done.any()
    expected, step = state, jax.jit(iteration.ChainDecoding().iterate)
    for _ in range(3):
        expected = step(request.network, request.drafter, expected).replace(
            lengths=state.lengths, done=state.done
        )
    found = autotune.iterate_steps(request.network, request.drafter, state, np.int32(3))
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if not jax.numpy.issubdtype(ours.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(ours, theirs)
    # Three iterations of two tokens, and the one that the state comes from with all that the
    # drafter had not fed.
    assert (found.counts.draft_calls - state.counts.draft_calls).tolist() == [6, 6]


def test_the_table_is_the_formulas():
    found = expectations.expect_improvements(ACCEPTED, [0.1] * 3, {1: 1.0, 2: 1.2, 4: 1.6}, 3)
    for row, v, accept_probs in zip(found["table"], (1.2, 1.4, 1.6), (1.8, 2.5, 2.8), strict=True):
        gamma = row["gamma"]
        assert row["verify_cost"] == pytest.approx(v) and row["timed"] == (gamma != 2)
        assert row["tokens"] == formulas.expected_tokens(0.8, gamma)
        assert row["theorem_3_8"] == formulas.improvement(0.8, gamma, 0.1)
        assert row["with_verify_cost"] == pytest.approx(formulas.improvement(0.8, gamma, 0.1, v))
        assert row["by_position"]["block"]["tokens"] == pytest.approx(accept_probs)
        assert row["by_position"]["block"]["with_verify_cost"] == pytest.approx(
            accept_probs / (0.1 * gamma + v)
        )
    best = {
        "theorem_3_8": 3,
        "with_verify_cost": 3,
        "by_position": {"block": 2},
        "with_lengths": None,
    }
    assert found["best_gamma"] == best


def test_a_drafter_of_all_tokens_in_one_call_costs_as_much_for_a_smaller_gamma():
    """Its c, per token, is measured with the greatest γ: 0.1 of 4 tokens, so 0.4 a call."""
    costs = expectations.list_costs(ParallelDrafter(DRAFT), 0.1, 4)
    assert costs == pytest.approx([0.4 / gamma for gamma in range(1, 5)])
    assert expectations.list_costs(ModelDrafter(DRAFT), 0.1, 4) == [0.1] * 4
    found = expectations.expect_improvements(ACCEPTED, costs[:3], {1: 1.0, 4: 1.6}, 3)
    for row in found["table"]:
        gain = row["by_position"]["block"]
        expected = gain["tokens"] / (0.4 + row["verify_cost"])
        assert gain["with_verify_cost"] == pytest.approx(expected)
    assert formulas.best_gamma([0.9, 0.2], [0.4, 0.2], [1, 1, 1]) == 2
    assert formulas.best_gamma([0.9, 0.2], 0.4, [1, 1, 1]) == 1


def test_calls_without_a_draft_are_over_one_position():
    """A drafter that drafts in every tenth call: v counts there only."""
    rare = dataclasses.replace(ACCEPTED, drafting=0.1)
    found = expectations.expect_improvements(
        rare, [0.0] * 3, {1: 1.0, 4: 1.6}, 3, {"block": [1.1, 0.9, 1.2]}
    )
    row = found["table"][2]
    assert row["verify_cost"] == pytest.approx(1.6) and row["theorem_3_8"] == formulas.improvement(
        0.8, 3, 0.0
    )
    assert row["with_verify_cost"] == pytest.approx(formulas.improvement(0.8, 3, 0.0, 1.06))
    assert row["by_position"]["block"]["with_verify_cost"] == pytest.approx(2.8 / 1.06)
    assert row["by_position"]["block"]["with_lengths"] == 1.2 and found["best_gamma"][
        "with_lengths"
    ] == {"block": 3}
    none = expectations.expect_improvements(
        rare, [0.0] * 3, {1: 1.0, 4: 1.6}, 3, {"block": [0.9, 1.0, 0.8]}
    )
    assert none["best_gamma"]["with_lengths"] == {"block": 0}, "no more than plain decoding"


def test_whole_decodes_count_encoders_and_lengths():
    """By hand: two batches of 8 and 16 ids, draft steps of 0.1, v = 1.5 at γ = 1 and 2 at 2."""
    seconds = {
        "target step": 2.0,
        "target encoder 8": 3.0,
        "target encoder 16": 5.0,
        "drafter encoder 8": 1.0,
        "drafter encoder 16": 1.5,
    }
    times = {name: Spread(value, value, value) for name, value in seconds.items()}
    work = {
        ("block", 1): [Work(8, 4.0, 4.0), Work(16, 6.0, 5.0)],
        ("block", 2): [Work(8, 3.0, 6.0)] * 2,
    }
    accepted = dataclasses.replace(ACCEPTED, lengths=[np.array([7, 4]), np.array([11])], work=work)
    found = expectations.expect_with_lengths(accepted, [8, 16], [0.1] * 2, [1.0, 1.5, 2.0], times)
    plain = 3 + 5 + 2 * (7 + 11)
    assert found == {
        "block": [
            pytest.approx(plain / (8 + 2.5 + 2 * (10 * 1.5 + 9 * 0.1))),
            pytest.approx(plain / (8 + 2.5 + 2 * (6 * 2 + 12 * 0.1))),
        ]
    }
    no_model = {name: spread for name, spread in times.items() if "drafter" not in name}
    rare = {
        ("block", g): [dataclasses.replace(one, drafting=0.5) for one in work["block", g]]
        for g in (1, 2)
    }
    found = expectations.expect_with_lengths(
        dataclasses.replace(accepted, work=rare), [8, 16], [0.0] * 2, [1.0, 1.5, 2.0], no_model
    )
    assert found["block"] == [
        pytest.approx(plain / (8 + 2 * 10 * 1.25)),
        pytest.approx(plain / (8 + 2 * 6 * 1.5)),
    ]


def test_cost_of_a_draft_step():
    def spread(seconds):
        return Spread(seconds, seconds, seconds)

    times = {"target step": spread(2.0), "call 4": spread(3.0), "iteration 4": spread(3.4)}
    assert predictions.cost_ratio(4, times) == pytest.approx(0.4 / 4 / 2)
    assert predictions.cost_ratio(4, times | {"iteration 4": spread(2.9)}) == 0, "noise is no gain"
    times |= {"draft step": spread(0.1), "verify 4": spread(3.0), "draft 4 and verify": spread(3.8)}
    assert predictions.cost_ratio(4, times) == pytest.approx(0.8 / 4 / 2)
