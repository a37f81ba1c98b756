"""Costs of iterations are measured, kept in a file and read, for `gamma="auto"`."""

import json
import os
import stat
import time
import types

import cost_folders
import jax
import numpy as np
import pytest
from cost_folders import CHEAP, DEAR
from toy_models import compilations, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import tuning
from specdec_jax.analysis.variants import Workload
from specdec_jax.decoding import (
    autotune,
    continuous_batching,
    iteration_costs,
    past_requests,
    request,
)
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.generate import FOREVER, prepare
from specdec_jax.decoding.iteration_costs import Costs
from specdec_jax.decoding.past_requests import Learned, Times
from specdec_jax.decoding.request import plan
from specdec_jax.speculative.adaptive_gamma import MAXIMUM, Auto

pytestmark = pytest.mark.usefixtures("quick")

home, measured = cost_folders.home, cost_folders.measured
INPUTS = [[5, 6, 7, 1], [9, 4, 1]]


@pytest.fixture(scope="module")
def models():
    target = tiny_t5(0)
    return target, sd.ModelDrafter(noisy_copy(target, 0.1))


def decode(models, inputs=INPUTS, **options):
    target, drafter = models
    return sd.generate(
        target, inputs, **{"drafter": drafter, "max_new_tokens": 12, "eos_ids": ()} | options
    )


def policy_of(models, **options):
    target, drafter = models
    options = {"max_new_tokens": 12} | options
    return autotune.autotune(plan(target, INPUTS[:1], drafter=drafter, **options)).policy


# --- Measuring ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "lookup", "learns"])
def test_measured_for_real(models, home, kind, monkeypatch):
    """Once: the second call, and another process, find the numbers."""
    target, drafter = models
    drafter = {
        "model": drafter,
        "lookup": sd.PromptLookupDrafter(),
        "learns": sd.AssistedNGramDrafter(),
    }[kind]
    before = sd.generate(target, INPUTS, max_new_tokens=12, eos_ids=())
    result = decode((target, drafter))
    np.testing.assert_array_equal(result.tokens, before.tokens)
    (found,) = iteration_costs._known.values()
    assert len(found.iterations) == MAXIMUM + 1 and all(0 < time < 1e6 for time in found.iterations)
    assert 0 <= found.prefill < 1000
    (file,) = home.iterdir()
    record = json.loads(file.read_text())
    assert iteration_costs.read_costs(record["costs"]) == found and record["key"]["rows"] == 2
    assert stat.S_IMODE(home.stat().st_mode) & 0o022 == 0
    iteration_costs._known.clear()
    monkeypatch.setattr(autotune, "measure", None)
    decode((target, drafter))
    assert list(iteration_costs._known.values()) == [found]


def test_calls_that_are_interrupted_do_not_count(models, home, monkeypatch):
    """Two of three calls take up to nine times as long, as on a busy machine."""
    rng = np.random.default_rng(0)

    def time_call(call):
        if call.func is not autotune.iterate_steps:
            return 1e-3
        _, drafter, state, steps = call.args
        gamma = 0 if drafter is None else 0.1 + 0.2 * int(state.gamma[0])
        return int(steps) * 1e-3 * (1 + gamma) * (1 + 8 * rng.random() * (rng.random() < 2 / 3))

    monkeypatch.setattr(autotune, "_time_call", time_call)
    policy_of(models)
    (found,) = iteration_costs._known.values()
    np.testing.assert_allclose(found.iterations, 1.1 + 0.2 * np.arange(MAXIMUM + 1), rtol=0.1)
    np.testing.assert_allclose(found.prefill, 1.0, rtol=0.1)


def test_times_between_those_that_were_timed():
    """Of 0, 2, 4, 5 and 8 tokens; the widest call shows that a draft step takes 0.1."""
    found = autotune.interpolate_costs({0: 1.0, 2: 1.4, 4: 1.8, 5: 2.2, 8: 2.5}, in_steps=True)
    np.testing.assert_allclose(found, [1.0, 1.3, 1.4, 1.7, 1.8, 2.2, 2.3, 2.4, 2.5])
    assert autotune.interpolate_costs({0: 1.0, 2: 1.4, 4: 1.8, 5: 2.2, 8: 2.1}, True)[3] == 1.8, (
        "a step takes no less than nothing"
    )
    found = autotune.interpolate_costs({0: 1.0, 2: 1.4, 4: 1.8, 5: 2.2, 8: 2.5}, in_steps=False)
    np.testing.assert_allclose(found, [1.0, 1.2, 1.4, 1.6, 1.8, 2.2, 2.3, 2.4, 2.5], rtol=1e-6)


@pytest.mark.slow
def test_costs_are_measured_once_for_each_kind_of_request(models, measured):
    target, drafter = models
    kinds = [
        {},
        {"verifier": "token"},
        {"num_samples": 2, "sampling": sd.SamplingConfig(temperature=1.0)},
        {"sampling": sd.SamplingConfig(temperature=1.0)},
        {"sampling": sd.SamplingConfig(repetition_penalty=2.0)},
        {"max_new_tokens": 200},
        {"batch_size": 4},
    ]
    for number, options in enumerate(kinds, 1):
        policy_of(models, **options)
        policy_of(models, **options)
        assert measured.calls == number
    same = [
        {"max_new_tokens": 13},
        {"sampling": sd.SamplingConfig(temperature=0.5)},
        {"key": jax.random.key(3)},
    ]
    for options in same:
        policy_of(models, **options)
    assert measured.calls == len(kinds)
    others = [
        sd.ModelDrafter(drafter.model, 9),
        sd.ModelDrafter(drafter.model, int8=True),
        sd.PromptLookupDrafter(2),
    ]
    for number, other in enumerate(others, 1):
        policy_of((target, other))
        assert measured.calls == len(kinds) + number
    policy_of(
        (target, sd.ModelDrafter(tiny_t5(7)))
    )  # other weights of the same shape take the same time
    assert measured.calls == len(kinds) + len(others)


DAMAGED = {
    "empty": lambda text: "",
    "cut short": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "\0" * 100,
    "nested": lambda text: "[" * 60_000,
    "another key": lambda text: text.replace('"rows": 1', '"rows": 2'),
    "a list": lambda text: "[1, 2]",
    "no costs": lambda text: json.dumps({"key": json.loads(text)["key"]}),
    "too few": lambda text: changed(text, iterations=[1.0] * MAXIMUM),
    "negative": lambda text: changed(text, iterations=[1.0] * MAXIMUM + [-1.0]),
    "not a number": lambda text: changed(text, iterations=[float("nan")] * (MAXIMUM + 1)),
    "text": lambda text: changed(text, iterations="123456789"),
    "acceptance": lambda text: changed(text, acceptance=2),
    "true": lambda text: changed(text, prefill=[1]),
    "more": lambda text: changed(text, other=1),
}


def changed(text, **values):
    record = json.loads(text)
    return json.dumps(record | {"costs": record["costs"] | values})


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_not_what_was_written(models, home, measured, name):
    policy_of(models)
    (file,) = home.iterdir()
    text = file.read_text()
    file.write_text(DAMAGED[name](text))
    iteration_costs._known.clear()
    measured.gives = CHEAP._replace(prefill=0.2)
    policy_of(models)
    assert measured.calls == 2 and json.loads(file.read_text())["costs"]["prefill"] == 0.2


def test_what_is_no_file(models, home, measured):
    policy_of(models)
    (file,) = home.iterdir()
    file.unlink()
    file.mkdir()
    iteration_costs._known.clear()
    policy_of(models)
    policy_of(models)
    assert measured.calls == 2 and file.is_dir()
    file.rmdir()
    os.mkfifo(file)
    iteration_costs._known.clear()
    policy_of(models)
    assert measured.calls == 3


def test_no_folder_of_ones_own(models, home, measured):
    """Costs are measured and not kept in a folder that others may write to.

    A file in its place, or no such place, is no better.
    """
    home.mkdir(parents=True)
    home.chmod(0o777)
    policy_of(models)
    assert list(home.iterdir()) == []
    home.chmod(0o700)
    home.rmdir()
    home.write_text("not a folder")
    iteration_costs._known.clear()
    policy_of(models)
    policy_of(models)
    assert measured.calls == 2 and home.read_text() == "not a folder"


def test_a_benchmark_measures_anew(models, home, measured, tmp_path, monkeypatch):
    policy_of(models)
    monkeypatch.setattr(iteration_costs, "_folder", None)
    iteration_costs.keep_costs(tmp_path)
    policy_of(models)
    policy_of(models)
    assert measured.calls == 2 and len(list(tmp_path.glob("*.json"))) == len(list(home.iterdir()))


# --- What is made of it ---


def test_rows_begin_with_the_numbers(models, measured):
    policy = policy_of(models)
    assert isinstance(policy, Auto) and policy.costs.shape == (1, MAXIMUM + 1)
    np.testing.assert_allclose(policy.costs[0], CHEAP.iterations, rtol=1e-6)
    result = decode(models)
    assert result.stats.drafted > 0
    np.testing.assert_array_equal(result.tokens, decode(models, drafter=None).tokens)


@pytest.mark.parametrize(
    "options", [{}, {"verifier": "lenient", "lenience": 0.5}], ids=["exact", "lossy"]
)
def test_where_drafting_never_pays_nothing_drafts(models, measured, options):
    measured.gives = DEAR
    target, drafter = models
    state, request = prepare(target, INPUTS, drafter=drafter, max_new_tokens=12, **options)
    assert (
        request.drafter is None
        and state.config.gamma == 0
        and state.draft_state is None
        and state.policy is None
    )
    plain_state, _ = prepare(target, INPUTS, max_new_tokens=12)
    assert jax.tree.structure(state) == jax.tree.structure(plain_state)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [
        leaf.shape for leaf in jax.tree.leaves(plain_state)
    ]
    result = decode(models, **options)
    assert result.stats.draft_calls == 0
    np.testing.assert_array_equal(result.tokens, decode(models, drafter=None).tokens)


def test_coupled_noise_draws_the_same_tokens_where_nothing_drafts(models, measured):
    measured.gives = DEAR
    sampled = dict(
        sampling=sd.SamplingConfig(temperature=1.0), verifier="gumbel", key=jax.random.key(3)
    )
    found = decode(models, **sampled)
    assert found.stats.drafted == 0
    expected = decode(models, gamma=2, **sampled)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    others = decode(models, **sampled | {"verifier": "block"})
    assert (others.tokens != expected.tokens).any()


def test_whether_it_pays():
    assert CHEAP.pays(1) and CHEAP.pays(8) and not DEAR.pays(1) and not DEAR.pays(8)
    assert not CHEAP._replace(prefill=100.0).pays(1), "a drafter's encoder counts"
    loss = CHEAP._replace(iterations=tuple(1.6 * time for time in CHEAP.iterations))
    assert not loss.pays(1), "so does what iterations without a draft lose"
    between = Costs(tuple(1 + 0.65 * gamma for gamma in range(MAXIMUM + 1)), 0.0)
    assert between.pays(1) and not between.pays(8), "rows together differ"


def test_rows_together_draft_no_more_than_pays_for_their_mean():
    steep = Costs(tuple(1 + 0.25 * gamma for gamma in range(MAXIMUM + 1)), 0.0)
    alone, together = np.array(steep.policy(1).costs), np.array(steep.policy(8).costs)
    np.testing.assert_array_equal(alone, steep.iterations)
    cheap = int(np.sum(together < 100))
    assert 2 <= cheap <= MAXIMUM and np.all(together[cheap:] > 1000)


@pytest.mark.parametrize("gamma", ["fast", "4", ""])
def test_no_such_gamma(models, gamma):
    with pytest.raises(
        ValueError,
        match=f"^gamma: got '{gamma}', expected 'auto', an integer from 0 to 64, or a policy",
    ):
        decode(models, gamma=gamma)


def test_where_nothing_can_be_measured_gamma_is_4(models, measured, monkeypatch):
    monkeypatch.setattr(request, "is_measurable", lambda network: False)
    state, _ = prepare(models[0], INPUTS, drafter=models[1])
    assert state.config.gamma == 4 and state.policy is None and not measured.calls


@pytest.mark.slow
def test_many_inputs(models, measured):
    """Through states that are refilled, and in batches."""
    target, drafter = models
    inputs = [[3 + number, 7, 1] for number in range(9)]
    single = [decode(models, [one], drafter=None).tokens[0].tolist() for one in inputs]
    for refill in (True, False):
        found = dict(
            sd.decode_stream(
                target,
                inputs,
                drafter=drafter,
                batch_size=3,
                refill=refill,
                max_new_tokens=12,
                eos_ids=(),
            )
        )
        assert [found[number][0].tokens for number in range(9)] == single
        assert sum(output.stats.drafted for (output,) in found.values()) > 0
    assert measured.calls == 1


@pytest.mark.slow
def test_rows_begin_where_others_have_ended(measured):
    """A row on which nothing is accepted soon decodes autoregressively; argmax stays the same."""
    target, inputs = tiny_t5(0), [[number, 7, 1] for number in range(3, 23)]
    options = dict(max_new_tokens=12, eos_ids=())
    drafted, plain = [], []
    for ids in inputs:
        drafted.append(sd.generate(target, [ids], drafter=sd.RandomDrafter(24), **options))
        plain.append(sd.generate(target, [ids], **options))
    for one, other in zip(drafted, plain):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    counts = [result.stats.drafted for result in drafted]
    assert counts[0] >= 4 and sum(counts[8:]) <= 12 and any(counts[8:]), (
        "but looked at now and then"
    )
    (key,) = past_requests._learned
    assert past_requests._learned[key].accepted <= 0.3 * past_requests._learned[key].examined <= 18
    sampled = dict(options, sampling=sd.SamplingConfig(temperature=1.0), key=jax.random.key(0))
    for _ in range(2):
        result = sd.generate(target, inputs[:1], drafter=sd.RandomDrafter(24), **sampled)
        assert len(past_requests._learned) == 1 and result.stats.drafted >= 4, (
            "draws must not depend on earlier requests"
        )


def test_the_latest_requests_count():
    for accepted, least, most in ((0, 0, 0.01), (8, 0.5, 0.99), (8, 0.75, 1), (0, 0, 0.5)):
        for _ in range(8):
            past_requests.learn("a", Learned(8, accepted))
        seen = past_requests._learned["a"]
        assert seen.examined <= 60 and least <= seen.accepted / seen.examined <= most
    policy = CHEAP.policy(1, seen)
    assert (
        policy.weight == 12
        and abs(policy.acceptance - seen.accepted / 60) < 0.05
        and policy.look == 1.0
    )
    assert CHEAP.policy(1, seen._replace(accepted=50.0, requests=33)).look == 0


def test_how_rows_ended_counts():
    """What is drafted after a row's last token is in vain: short outputs get short drafts."""
    for tokens, ended in ((20, 2), (0, 0), (10, 1)):
        past_requests.learn("b", Learned(10, 9, 0, tokens, ended))
    short = CHEAP.policy(1, past_requests._learned["b"])
    assert short.ending == pytest.approx(0.1)
    endless = CHEAP.policy(1, past_requests._learned["b"]._replace(ended=0.0))
    assert endless.ending == 0

    def wanted(policy):
        policy = policy.rows(1)
        return int(policy.wanted(jax.jit(Auto.init)(policy))[0])

    assert wanted(CHEAP.policy(1, Learned(30, 27, 3, 30, 15))) < wanted(endless)


def test_requests_tell_how_their_rows_ended(models, measured):
    target, drafter = models
    ids = sd.generate(target, INPUTS[:1], max_new_tokens=12, eos_ids=()).tokens[0].tolist()
    ended = 1 + ids.index(ids[3])
    for options, reason, length in (
        ({}, "length", 12),
        ({"eos_ids": (ids[3],)}, "eos", ended),
    ):
        past_requests._learned.clear()
        result = decode(models, INPUTS[:1], **options)
        (found,) = past_requests._learned.values()
        assert result.finish_reasons == [reason] and (found.tokens, found.ended) == (
            length,
            float(reason == "eos"),
        )


def test_where_earlier_requests_failed_one_now_and_then_drafts():
    failed, fine = Learned(60, 0, 1), Learned(60, 50, 1)
    drafting = [
        CHEAP.policy(1, failed._replace(requests=number)) is not None for number in range(48)
    ]
    assert [number for number, drafts in enumerate(drafting) if drafts] == [0, 16, 32]
    assert all(CHEAP.policy(1, fine._replace(requests=number)) is not None for number in range(48))
    assert CHEAP.policy(1) is not None and CHEAP.policy(1, Learned()) is not None


def test_the_length_of_outputs_decides_whether_a_drafter_pays_for_its_encoder():
    dear = CHEAP._replace(prefill=4.0)
    learned = Learned(60, 20, 1)
    drafts = [dear.policy(1, learned, limit) is not None for limit in (4, 16, 64, 256)]
    assert drafts == sorted(drafts) and not drafts[0] and drafts[-1]
    dearer = CHEAP._replace(prefill=40.0)
    assert dearer.pays(1, True, 256) and not dearer.pays(1, True, 16)
    assert not dearer.pays(1, False, 256), "nothing is learned of the outputs' lengths"
    assert learned.expected_length(64) == 64
    short = learned._replace(tokens=60, ended=6)  # a tenth of tokens end a row
    assert short.expected_length(10**6) == pytest.approx(10)
    assert short.expected_length(1) == pytest.approx(1) and 6 < short.expected_length(10) < 7
    assert dear.policy(1, short, 256) is None
    stopped = learned._replace(ended=2)  # by stop strings, before the first token
    assert stopped.ending == 1 and stopped.expected_length(64) == 1


def test_single_rows_may_lose_more_where_requests_learn():
    loss = CHEAP._replace(iterations=(1.5, *CHEAP.iterations[1:]))
    assert not loss.pays(1) and loss.pays(1, learns=True)
    assert not CHEAP._replace(iterations=(3.0, *CHEAP.iterations[1:])).pays(1, learns=True)


def test_a_request_that_decodes_plainly_counts_and_its_output_is_the_same(
    models, measured, monkeypatch
):
    expected = decode(models, INPUTS[:1])
    ((key, _),) = past_requests._learned.items()
    monkeypatch.setitem(past_requests._learned, key, Learned(60, 0, 1))
    found = decode(models, INPUTS[:1])
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.stats.drafted == 0 and past_requests._learned[key] == Learned(60, 0, 2)
    monkeypatch.setitem(past_requests._learned, key, Learned(60, 0, 16))
    assert decode(models, INPUTS[:1]).stats.drafted > 0


def test_warm_up_compiles_for_plain_requests_too(models, measured, monkeypatch):
    target, drafter = models
    options = dict(drafter=drafter, max_new_tokens=11, eos_ids=())
    assert sd.warm_up(target, max_input_length=4, **options) == 1
    sd.generate(target, INPUTS[:1], **options)
    ((key, _),) = past_requests._learned.items()
    for learned in (Learned(60, 0, 1), Learned(60, 50, 1)):
        monkeypatch.setitem(past_requests._learned, key, learned)
        assert compilations(lambda: sd.generate(target, INPUTS[:1], **options)) == 0


def test_tune_prints_what_rows_start_with(models, measured):
    target, drafter = models
    batch = types.SimpleNamespace(inputs=INPUTS[:1])
    options = types.SimpleNamespace(decoding=lambda: {"max_new_tokens": 12})
    tuning.keep_acceptance(Workload(target, drafter, [batch], options), 0.875)
    iteration_costs._known.clear()
    assert policy_of(models).acceptance[0] == 0.875 and measured.calls == 1
    assert policy_of(models, verifier="token").acceptance[0] == np.float32(Auto.acceptance)


def test_tune_changes_what_several_rows_start_with_where_drafting_did_not_pay(models, measured):
    target, drafter = models
    batch = types.SimpleNamespace(inputs=INPUTS)
    options = types.SimpleNamespace(decoding=lambda: {"max_new_tokens": 12})
    for alpha, drafts in ((0.0, False), (0.9, True)):
        tuning.keep_acceptance(Workload(target, drafter, [batch], options), alpha)
        assert (decode(models).stats.drafted > 0) == drafts
    assert measured.calls == 1


def test_drafters_with_other_weights_learn_apart(models, measured):
    """Costs are those of the shapes; and what a drafter has shown is lost with its weights."""
    target, _ = models
    network = noisy_copy(target, 1.0)
    for number in range(3):  # drafters are made anew, as `generate` does of a model
        decode((target, sd.ModelDrafter(network)), INPUTS[:1])
        (one,) = past_requests._learned.values()
        assert one.requests == number + 1
    decode(models, INPUTS[:1])
    assert measured.calls == 1 and len(past_requests._learned) == 2
    assert min(found.requests for found in past_requests._learned.values()) == 1
    before = past_requests.identify(network.network)
    assert past_requests.identify(network.network) == before
    del network
    assert past_requests.identify(noisy_copy(target, 1.0).network) != before


@pytest.mark.slow
def test_inputs_of_a_job_learn_from_those_before(models, measured):
    """The first 4 batches find out that drafting does not pay."""
    target, inputs = models[0], [[3 + number % 20, 7, 1] for number in range(66)]
    how = dict(max_new_tokens=6, eos_ids=())
    plain = list(decode_all(target, inputs, batch_size=1, seed=0, **how))
    drafter = sd.RandomDrafter(24)
    found = list(decode_all(target, inputs, batch_size=1, seed=0, drafter=drafter, **how))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    drafted = [one.stats.drafted > 0 for one in found]
    assert all(drafted[:4]) and not any(drafted[4:])
    (learned,) = past_requests._learned.values()
    assert learned.requests == 3


@pytest.mark.slow
def test_parts_of_a_queue_learn_from_those_before(models, measured, monkeypatch):
    """Of two batches each; those that decode plainly, and the next look, give the same tokens."""
    monkeypatch.setattr(continuous_batching, "_WINDOW", 2)
    monkeypatch.setattr(past_requests, "EXPLORE_EVERY", 3)
    target, inputs = models[0], [[3 + number % 20, 7, 1] for number in range(48)]
    how = dict(max_new_tokens=12, eos_ids=(), batch_size=2)
    plain = dict(sd.decode_stream(target, inputs, **how))
    found = dict(sd.decode_stream(target, inputs, drafter=sd.RandomDrafter(24), **how))
    assert all(found[number][0].tokens == plain[number][0].tokens for number in range(48))
    drafted = [found[number][0].stats.drafted > 0 for number in range(48)]
    parts = [drafted[first : first + 4] for first in range(0, 48, 4)]
    assert all(any(part) == all(part) for part in parts), "a part has one choice"
    assert [all(part) for part in parts[3:]] == [place % 3 == 0 for place in range(3, 12)]


def test_times_of_batches_decide_for_several_rows():
    """Both ways are timed first; now and then a choice looks at the slower; else rates decide."""
    fast, slow = (9.0, 0.8, 0.9, 0.8), (9.0, 1.0, 1.1, 1.0)  # the first has a compilation in it
    good, bad = Learned(60, 50, 1), Learned(60, 0, 1)
    cases = {
        "none timed": (bad, Times(), True),
        "few with drafts": (bad, Times(slow[:2], (), 3), True),
        "none without": (good, Times(fast, (), 3), False),
        "faster with": (bad, Times(fast, slow, 7), True),
        "the same, a look": (bad, Times(fast, slow, 25), False),
        "slower with": (good, Times(slow, fast, 7), False),
        "the same, a look at drafts": (good, Times(slow, fast, 50), True),
        "times that never come, good": (good, Times(slow[:1], (), 12), True),
        "times that never come, bad": (bad, Times(slow[:1], (), 12), False),
        "not timed": (bad, None, False),
    }
    found = {
        name: CHEAP.policy(8, learned, times=times) is not None
        for name, (learned, times, _) in cases.items()
    }
    assert found == {name: expected for name, (*_, expected) in cases.items()}
    looks = [name for name, (_, times, _) in cases.items() if times and times.explores]
    assert [name for name in looks if "look" in name] == [n for n in cases if "look" in n]
    assert not any(cases[name][1].explores for name in ("faster with", "slower with"))
    # A look costs the more, the more one way gains: it comes the more seldom.
    for gain, every in ((1.1, 16), (1.5, 50), (3.0, 200)):
        times = Times((9.0, 1.0, 1.0, 1.0), (9.0, gain, gain, gain))
        drafts = [times._replace(choices=number).drafts for number in range(1, 401)]
        assert drafts.count(False) == 400 // every
    times = Times()
    for number in range(9):
        times = times.add(number, drafts=number % 3 > 0)
    assert times == ((1, 2, 4, 5, 7, 8), (0, 3, 6), 0, None)
    for number in range(9, 12):
        times = times.add(number, drafts=True)
    assert times.drafting == (1, 7, 8, 9, 10, 11), "the first stays where it is"


def test_batches_of_several_rows_are_timed(models, measured):
    for number in range(8):
        drafts = decode(models, INPUTS).stats.drafted > 0
        assert drafts == (number < 3) or number > 5
    (found,) = past_requests._times.values()
    assert len(found.drafting) >= 3 <= len(found.plain) and min(found.drafting + found.plain) > 0
    past_requests._times.clear()
    decode(models, INPUTS[:1])
    for untimed in (dict(deadline=100.0), dict(sampling=sd.SamplingConfig(temperature=1.0))):
        decode(models, INPUTS, **untimed)
    assert not past_requests._times


def test_the_time_of_who_reads_outputs_is_no_time_of_a_batch(models, measured, monkeypatch):
    """A batch that is done before its reader comes back is not timed."""
    monkeypatch.setattr(continuous_batching, "may_wait", lambda plan: True)
    target, drafter = models
    inputs = [[3 + number % 20, 7, 1] for number in range(8)]
    how = dict(drafter=drafter, batch_size=2, max_new_tokens=6, eos_ids=())
    for _ in sd.decode_stream(target, inputs, **how):
        time.sleep(0.3)
    (found,) = past_requests._times.values()
    assert len(found.drafting) == 1 and not found.plain, "the first batch waits for nobody"


def test_several_rows_that_learn_may_find_a_good_drafter():
    """At the default acceptance rate the loss of a program that may draft is too great."""
    dear = CHEAP._replace(iterations=(1.07, 1.53, 1.99, 2.49, 2.99, 3.46, 3.9, 4.34, 4.78))
    assert dear.pays(8, learns=True) and not dear.pays(8)


def test_looks_of_several_rows_may_go_on_drafting():
    failed = Learned(60, 0, 16)
    looks, later = CHEAP.policy(8, failed), CHEAP.policy(8, failed._replace(requests=17))
    assert later is None and looks.look == 1 and sum(cost < 1e6 for cost in looks.costs) > 3
    assert CHEAP.policy(8, Learned(requests=1)) is not None, "nothing was examined yet"


def test_only_autotune_measures_and_only_record_remembers(models, home, measured):
    """`plan` compiles nothing and writes no file; `finish` changes nothing for later calls."""
    target, drafter = models
    options = dict(drafter=drafter, max_new_tokens=12)
    assert compilations(lambda: plan(target, INPUTS, **options)) == 0
    pending = plan(target, INPUTS, **options)
    assert pending.auto_rows == 2 and pending.learned_key is None
    assert measured.calls == 0 and not home.exists()
    chosen = autotune.autotune(pending)
    assert measured.calls == 1 and chosen.learned_key and autotune.autotune(chosen) is chosen
    state, batch = prepare(target, INPUTS, **options)
    result = sd.finish(target, sd.advance(batch.network, batch.drafter, state, FOREVER), batch)
    assert past_requests._learned[batch.learned_key] == Learned(requests=2)
    autotune.record(batch, result)
    assert past_requests._learned[batch.learned_key].examined > 0
    given = plan(target, INPUTS, gamma=3, **options)
    assert given.auto_rows is None and autotune.autotune(given) is given


def test_the_rows_of_a_timed_batch_draft_alike():
    """As many tokens as suit the slowest; rows that are refilled choose by themselves."""
    learned, cost = Learned(60, 50, 1), 0.3
    costs = Costs(tuple(1 + cost * gamma for gamma in range(MAXIMUM + 1)), 0.0)

    def wanted(policy) -> list[int]:
        return [gamma for gamma, one in enumerate(policy.costs) if one < 1e6]

    def best(rate) -> int:
        tokens = np.cumsum(rate ** np.arange(MAXIMUM + 1))
        return int(np.argmax(tokens / np.array(costs.iterations)))

    acceptance, _ = costs.predict(8, learned, 64, True)
    alike = wanted(costs.policy(8, learned, 64, Times()))
    assert alike == [best(acceptance - 0.2)] and alike[0] < best(acceptance)
    chosen = wanted(costs.policy(8, learned, 64))
    assert chosen == list(range(len(chosen))) and len(chosen) > alike[0] + 1
    hopeless = Times(choices=12)  # nothing was timed, so rates decide
    assert len(wanted(costs.policy(8, learned, 64, hopeless))) > 1


def test_what_rates_predict_counts_as_two_batches():
    """Batches differ, and a job has few: two that were slower do not outweigh a sure gain."""
    slower = (9.0, 1.1, 1.1), (9.0, 1.0, 1.0)
    for batches, expected, drafts in ((2, 1.5, True), (2, 1.1, False), (5, 1.2, False)):
        drafting, plain = ((times[0], *times[1:2] * batches) for times in slower)
        times = Times(drafting, plain, 7, expected)
        assert times.drafts is drafts, (batches, expected)
        assert not times._replace(expected=None).drafts
