"""Beam search through real networks: caches, stale slots, other backends and dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.models.attention import Attention
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.beam_iteration import BeamSearch
from specdec_jax.speculative.beam_tree import make_root_tree

pytestmark = pytest.mark.usefixtures("quick")
V, LIMIT = 24, 9
INPUTS = np.random.default_rng(0).integers(2, V, (3, 6))
PREFIXES = [[], [4, 5, 6], [7]]


def gpt():
    return LanguageModel.random(GPTConfig(V, 16, 2, 2, 32, num_positions=64), eos_ids=(1,))


def t5(**shape):
    return tiny_t5(0, V, **shape)


def without_kernel(make, monkeypatch):
    """The model as XLA alone runs it."""
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "can_pack", lambda dtype: False)
        return make()


MODELS = {"t5": t5, "t5, a bias a layer": lambda: t5(relative_bias_per_layer=True), "gpt": gpt}


@pytest.fixture(params=[pytest.param("kernel", marks=pytest.mark.slow), "XLA"])
def pair(request, monkeypatch):
    """Makes a target and a drafter, in the CPU's kernels or without."""

    def make(name):
        whole = (
            MODELS[name]
            if request.param == "kernel"
            else lambda: without_kernel(MODELS[name], monkeypatch)
        )
        target = whole()
        drafter = (
            noisy_copy(target, 0.3)
            if request.param == "kernel"
            else without_kernel(lambda: noisy_copy(target, 0.3), monkeypatch)
        )
        return target, sd.ModelDrafter(drafter)

    return make


def started(target, drafter, **options):
    """The state of a search over `INPUTS`, with prefixes of different lengths, and its drafter."""
    prefix = None if target.config.decoder_only else PREFIXES
    plan = plan_decoding(
        target,
        INPUTS,
        drafter=drafter,
        num_beams=3,
        max_new_tokens=LIMIT,
        decoder_prefix=prefix,
        **options,
    )
    return plan.start()[0], plan


def histories(state):
    """(row, beam, its tokens) of every active beam that is one."""
    for row in range(len(state.steps)):
        for beam in range(state.config.beams):
            if state.active.scores[row, beam] > -1e6 and not state.done[row]:
                length = int(state.positions[row]) + 1
                yield row, beam, np.asarray(state.active.tokens)[row, beam, :length]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_caches_hold_what_the_valid_beams_have_been_through(pair, name):
    """The target's cache says of every valid beam what its tokens fed at once say.

    All slots that no valid beam's path goes through are poisoned; acceptance is ragged.
    """
    target, drafter = pair(name)
    (state, plan), levels = started(target, drafter, gamma=2), set()
    step = jax.jit(BeamSearch().iterate)
    for _ in range(5):
        before = np.asarray(state.steps)
        state = poisoned(step(plan.network, plan.drafter, state))
        levels |= set((np.asarray(state.steps) - before).tolist())
        tree = make_root_tree(state)
        states, _ = plan.network.decode_nodes(tree.tokens, tree.nodes, state.target_cache)
        logits = np.asarray(plan.network.head(states))
        for row, beam, tokens in histories(state):
            expected = whole(target, row, tokens)
            np.testing.assert_allclose(logits[row, beam], expected, atol=2e-4)
    assert len(levels - {0}) > 1  # not all drafts were accepted, not all rejected


def whole(target, row, tokens):
    """Logits after `tokens`, fed at once."""
    inputs = None if target.config.decoder_only else INPUTS[row : row + 1]
    return target.logits(inputs, tokens[None])[0, -1]


def poisoned(state):
    """Poisons every slot of both caches that is on no valid beam's path.

    Keys are NaN, values huge, since a value that is not finite is never written.
    """
    slots = state.target_cache.layers[0].slots
    before = jnp.arange(state.paths.shape[2]) < state.positions[:, None, None]
    on_path = jnp.any(
        (state.paths[..., None] == jnp.arange(slots)) & before[..., None], axis=(1, 2)
    )

    def poison(cache):
        def put(x, junk):
            return jnp.where(on_path[:, None, :, None], x, junk)

        layers = tuple(
            one.replace(key=put(one.key, jnp.nan), value=put(one.value, 1e30))
            for one in cache.layers
        )
        return cache.replace(layers=layers)

    return state.replace(
        target_cache=poison(state.target_cache), draft_state=poison(state.draft_state)
    )


class Reckless(sd.ModelDrafter):
    """Proposes `BAD` in place of its best continuation, whatever it is told to leave out."""

    def draft_beams(self, draft_state, state, tree):
        draft_state, tree = super().draft_beams(draft_state, state, tree)
        return draft_state, tree._replace(tokens=tree.tokens.at[:, state.config.beams].set(BAD))


jax.tree_util.register_pytree_node_class(Reckless)
BAD = 9


def test_a_draft_that_is_no_number_reaches_nothing(pair):
    """A node whose embedding is NaN in the target falls, and no other node sees it."""
    target, drafter = pair("t5")
    params = jax.tree.map(np.array, target.params)
    params["token_embedder"]["embedding"][BAD] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_weights, "can_pack", lambda dtype: target.network.skips_padding)
        damaged = LanguageModel(target.config, params, eos_ids=(1,))
    options = dict(num_beams=3, num_return_sequences=3, max_new_tokens=LIMIT)
    options["sampling"] = sd.SamplingConfig(forbidden_tokens=(BAD,))
    inputs = np.where(INPUTS == BAD, 2, INPUTS)
    plain = sd.generate(damaged, inputs, **options)
    found = sd.generate(damaged, inputs, drafter=Reckless(drafter.model), gamma=2, **options)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_allclose(found.scores, plain.scores, rtol=1e-5)
    assert found.stats.accepted > 0


def test_logits_that_are_no_numbers_are_rejected():
    params = jax.tree.map(np.array, t5().params)
    params["decoder"]["decoder_norm"]["scale"][:] = np.nan
    damaged = LanguageModel(t5().config, params, eos_ids=(1,), name="damaged")
    with pytest.raises(
        ValueError, match="input 0: got logits from the target damaged that are not finite numbers"
    ):
        sd.generate(damaged, INPUTS, num_beams=3, max_new_tokens=LIMIT)


@tiers.parametrize("name", MODELS, first=1)
def test_speculative_search_is_plain_search(pair, name):
    """In batches of one, where caches have no batch axis, and of more, with own limits."""
    target, drafter = pair(name)
    more = {} if target.config.decoder_only else dict(decoder_prefix=PREFIXES)
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=[LIMIT, 4, 1], **more)
    plain = sd.generate(target, INPUTS, **options)
    found = sd.generate(target, INPUTS, drafter=drafter, gamma=2, beam_width=5, **options)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_allclose(found.scores, plain.scores, rtol=1e-5)
    alone = dict(
        options, max_new_tokens=LIMIT, **({} if not more else dict(decoder_prefix=PREFIXES[:1]))
    )
    single = sd.generate(target, INPUTS[:1], drafter=drafter, gamma=2, beam_width=5, **alone)
    np.testing.assert_array_equal(single.tokens, plain.tokens[:2])


@pytest.fixture
def cross_keys_of_the_row_before(monkeypatch):
    """Returns a function that lets every row attend to the encoder output of another.

    What was compiled before, and with it, is forgotten.
    """
    right, roll = Attention.attend_to_encoded, functools.partial(jnp.roll, shift=1, axis=0)

    def wrong(self, x, norm, cross, mask, *others):
        return right(self, x, norm, jax.tree.map(roll, cross), roll(mask), *others)

    def replace():
        monkeypatch.setattr(Attention, "attend_to_encoded", wrong)
        jax.clear_caches()

    yield replace
    jax.clear_caches()


@pytest.mark.slow
def test_a_row_alone_finds_cross_keys_of_another(pair, cross_keys_of_the_row_before):
    """Searches agree with each other even so, and neither with the search of a row alone."""
    target, drafter = pair("t5")
    options = dict(num_beams=3, num_return_sequences=3, max_new_tokens=LIMIT)
    ways = [{}, dict(drafter=drafter, gamma=2, beam_width=5)]
    rows = range(len(INPUTS))
    alone = np.concatenate(
        [sd.generate(target, INPUTS[row : row + 1], **options).tokens for row in rows]
    )
    for how in ways:
        np.testing.assert_array_equal(sd.generate(target, INPUTS, **how, **options).tokens, alone)
    cross_keys_of_the_row_before()
    plain, found = (sd.generate(target, INPUTS, **how, **options).tokens for how in ways)
    np.testing.assert_array_equal(found, plain)
    assert np.all(np.any((found != alone).reshape(len(INPUTS), -1), axis=1))


@pytest.mark.slow
def test_search_in_bfloat16():
    """Runs, ends, and comes to scores near those of float32."""
    target = tiny_t5(0, V)
    half = LanguageModel(
        dataclasses.replace(target.config, dtype="bfloat16"), target.params, eos_ids=(1,)
    )
    options = dict(num_beams=3, max_new_tokens=LIMIT)
    exact = sd.generate(target, INPUTS, **options)
    for drafting in ({}, dict(drafter=sd.ModelDrafter(half), gamma=2)):
        found = sd.generate(half, INPUTS, **options, **drafting)
        np.testing.assert_allclose(found.scores, exact.scores, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt lookup", "n-grams"])
def test_chains_of_each_beam(name):
    """Drafters that copy or count draft one chain for each beam; the output stays the same."""
    target, options = t5(), dict(num_beams=2, num_return_sequences=2, max_new_tokens=24, eos_ids=())
    plain = sd.generate(target, INPUTS, **options)
    drafter = sd.PromptLookupDrafter()
    if name == "n-grams":
        texts = [row.tolist() for row in plain.tokens]
        drafter = sd.NGramDrafter.count(texts, V, 3)
    found = sd.generate(target, INPUTS, drafter=drafter, gamma=3, **options)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.stats.accepted > 0
    with pytest.raises(
        ValueError,
        match="beam_width: got 4 with .*Drafter, expected 2: it drafts one chain for each",
    ):
        sd.generate(target, INPUTS, drafter=drafter, gamma=3, beam_width=4, **options)
