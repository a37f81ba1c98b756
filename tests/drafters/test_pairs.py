"""Accelerators draft in a fixed number of steps over two positions each, tried on a CPU."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from engine_inputs import GAMMA, INPUTS, LIMIT
from engine_models import KEY, SAMPLED, drafter, plain, run, target

import specdec_jax as sd
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.drafters import best_of
from specdec_jax.models.network import Network
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")
OPTIONS = dict(gamma=GAMMA, sampling=SAMPLED, key=KEY, max_new_tokens=LIMIT, eos_ids=())


@pytest.fixture
def pairs():
    """Calls a function with networks for which two positions cost no more than one."""

    def apart(function):
        jax.clear_caches()  # what is compiled does not tell one way from the other
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Network, "pairs_are_free", lambda self, cache: True)
            found = function()
        jax.clear_caches()
        return found

    return apart


def same(found, expected) -> None:
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.stats, expected.stats))


@pytest.mark.slow
@pytest.mark.parametrize("config", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_tokens_and_counts_are_those_of_single_steps(pairs, config):
    """Rows that draft nothing or less than others, prefixes of several lengths, ends by EOS."""
    options = dict(
        drafter="noisy copy", sampling=config, key=KEY, gamma=[0, 1, 2, 3] * 2, eos_ids=(5, 9)
    )
    options["decoder_prefix"] = [[5], [], [9, 9], [1], [0, 0, 0], [2], [3], [8, 7, 6, 5]]
    one_by_one = functools.partial(run, **options)
    expected = one_by_one()
    assert 0 < expected.stats.accepted < expected.stats.drafted
    same(pairs(one_by_one), expected)


def test_iterations_may_stop_and_resume(pairs):
    """One `advance` after another, with what a full acceptance leaves to catch up with."""
    draft = drafter("self")

    def found():
        state, request = prepare(
            target(), INPUTS, drafter=draft, **OPTIONS | {"sampling": SamplingConfig()}
        )
        while not np.all(state.done):
            state = advance(target().network, request.drafter, state, np.int32(1))
        return np.asarray(state.tokens)[:, 1 : LIMIT + 1], int(np.sum(state.counts.target_calls))

    tokens, calls = pairs(found)
    np.testing.assert_array_equal(tokens, plain()[0])
    assert calls == len(INPUTS) * -(-LIMIT // (GAMMA + 1)), "every draft was accepted"


def cascades() -> dict[str, sd.Drafter]:
    copy = drafter("noisy copy")
    return {
        "horizontal": sd.HorizontalCascade(sd.PromptLookupDrafter(), copy, 2),
        "of two models": sd.HorizontalCascade(copy, drafter("unrelated"), 1),
        "vertical": sd.VerticalCascade(copy, drafter("unrelated"), 2),
        "the better": sd.BestOf(drafter("unrelated"), copy),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", cascades())
def test_cascades_draft_to_the_last_slot(pairs, name):
    """A later part's steps may reach past the last slot and write nothing there.

    A part of a draft begins past the committed tokens.
    """

    def decode():
        return sd.generate(target(), INPUTS, drafter=cascades()[name], **OPTIONS)

    expected = decode()
    same(pairs(decode), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind, cost", [("unrelated", 0.1), ("int8", 4.0)])
def test_a_model_that_rests_is_not_called(pairs, kind, cost):
    """The row takes turns: random tokens, and a model whose drafts are of two positions."""
    made, feed = [], Network.decode_states
    model = sd.SelfDrafter(target()) if kind == "int8" else drafter(kind)
    best = sd.BestOf(sd.RandomDrafter(24), model, costs=(0.1, cost), margin=0)

    def counted(self, tokens, *rest, **options):
        jax.debug.callback(made.append, tokens.shape[1], ordered=True)
        return feed(self, tokens, *rest, **options)

    def decode():
        options = OPTIONS | {"max_new_tokens": 40}
        state, request = prepare(target(), INPUTS[:1], drafter=best, **options)
        steps = []
        while not np.all(state.done):
            made.clear()
            state = advance(target().network, request.drafter, state, np.int32(1))
            jax.effects_barrier()
            steps.append((int(state.draft_state.chosen[0]), made.count(2)))
        return steps

    def counting():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Network, "decode_states", counted)
            return decode()

    steps = pairs(counting)
    assert {chosen for chosen, _ in steps} == {0, 1}
    for chosen, calls in steps[:-1]:  # the last draft may be of no token
        assert calls >= GAMMA if chosen else calls == 0


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["block", "gumbel"])
def test_a_model_that_rested_drafts_as_if_it_had_been_called(pairs, verifier):
    """What it had cached of a rejected draft is forgotten."""

    def decode():
        parts = drafter("noisy copy"), sd.RandomDrafter(24)
        best = sd.BestOf(*parts, margin=0, memory=0.5)
        options = OPTIONS | {"max_new_tokens": 40, "verifier": verifier}
        return sd.generate(target(), INPUTS[:2], drafter=best, **options)

    def decode_without_rest():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(best_of, "draft_part", lambda part, *given: part.draft(*given))
            return decode()

    expected = pairs(decode_without_rest)
    assert 0 < expected.stats.accepted < expected.stats.drafted
    same(pairs(decode), expected)


@pytest.mark.slow
def test_a_lag_of_one_costs_no_step_and_one_of_two_costs_one(pairs):
    """Whatever the lags, beside rows without one, the draft is that of single steps.

    One row has its start token only.
    """
    draft_model, wanted = drafter("noisy copy"), np.full(8, GAMMA, np.int32)
    state, request = prepare(target(), INPUTS, drafter=draft_model, **OPTIONS)
    state = advance(target().network, request.drafter, state, np.int32(20))
    lengths = np.arange(
        1, 9, dtype=np.int32
    )  # shorter than what was decoded: the caches hold that and more
    state, most = state.replace(lengths=lengths), lengths - 1

    def draft(d, s, cached):
        return d.draft(dataclasses.replace(s.draft_state, cached=cached), s, wanted)

    expected = jax.jit(draft)(request.drafter, state, most)[1]
    made, feed = [], Network.decode_states

    def counted(self, tokens, *rest, **options):
        jax.debug.callback(made.append, tokens.shape[1], ordered=True)
        return feed(self, tokens, *rest, **options)

    def compared():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Network, "decode_states", counted)
            once = jax.jit(lambda *arguments: draft(*arguments))
            for lags in (
                [0] * 8,
                [0, 1] * 4,
                [0, 0, 2, 1, 0, 2, 0, 0],
                [0, 0, 0, 3, 1, 2, 0, 3],
                [4] * 8,
                [7] * 8,
            ):
                lags = np.minimum(lags, most)
                made.clear()
                after, found = once(request.drafter, state, most - lags)
                jax.effects_barrier()
                assert made == [2] * (GAMMA + lags.max() // 2)
                np.testing.assert_array_equal(found.tokens, expected.tokens)
                np.testing.assert_array_equal(found.calls, GAMMA + lags // 2)
                np.testing.assert_allclose(found.dist.probs(), expected.dist.probs(), atol=1e-5)
                np.testing.assert_array_equal(after.cached, most + GAMMA)

    pairs(compared)


def test_a_policy_of_gamma_still_ends_drafts(pairs):
    """A draft that may end early is one of single steps."""
    made, policy = [], sd.Heuristic(start=2, maximum=GAMMA)
    feed = Network.decode_states

    def counted(self, tokens, *rest, **options):
        made.append(tokens.shape[1])
        return feed(self, tokens, *rest, **options)

    def compared():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Network, "decode_states", counted)
            return run(drafter="noisy copy", gamma=policy)

    found = pairs(compared)
    np.testing.assert_array_equal(found.tokens, plain()[0])
    assert 1 in made, "a step over one position was compiled"
