"""The engine's caches, and vocabularies of different width."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from engine_inputs import GAMMA, INPUTS, LIMIT, V
from engine_models import KEY, SAMPLED, drafter, plain, run, target
from toy_models import noisy_copy, tiny_t5

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.decoding.generate import advance, generate, prepare
from specdec_jax.decoding.results import finish
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")


# --- Caches ---


def poisoned(state):
    """NaN in every self-attention slot past the valid length, junk ids past every row's length."""
    last = state.lengths - 1

    def poison(cache, valid):
        dead = (jnp.arange(cache.layers[0].slots) >= valid[:, None])[:, None, :, None]
        return cache.replace(
            layers=jax.tree.map(lambda x: jnp.where(dead, jnp.nan, x), cache.layers)
        )

    drafted = state.draft_state
    cached = jnp.minimum(drafted.cached, last)
    return state.replace(
        target_cache=poison(state.target_cache, last),
        draft_state=dataclasses.replace(drafted, cache=poison(drafted.cache, cached)),
        tokens=jnp.where(
            jnp.arange(state.tokens.shape[1]) < state.lengths[:, None], state.tokens, 19
        ),
    )


@tiers.parametrize("config", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"], first=1)
@tiers.parametrize("name", ["self", "noisy copy"], first=1)
def test_poisoned_caches_and_streaming(name, config):
    """One `advance` after another gives one call's result, with all stale slots poisoned."""
    expected = run(drafter=name, sampling=config, key=KEY)
    options = dict(
        drafter=drafter(name),
        gamma=GAMMA,
        sampling=config,
        key=KEY,
        max_new_tokens=LIMIT,
        eos_ids=(),
    )
    for change in (lambda state: state, poisoned):
        state, request = prepare(target(), INPUTS, **options)
        calls = 0
        while not np.all(state.done):
            state = advance(target().network, request.drafter, change(state), np.int32(1))
            calls += 1
        result = finish(target(), state, request)
        np.testing.assert_array_equal(result.tokens, expected.tokens)
        np.testing.assert_array_equal(result.log_probs, expected.log_probs)
        assert jax.tree.all(jax.tree.map(np.array_equal, result.stats, expected.stats))
        assert calls == max(row.target_calls for row in expected.stats.per_row)


def test_stale_slots_by_xla_alone(monkeypatch):
    """Rows of different lengths, whose caches XLA writes and masks, beside the CPU's kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "can_pack", lambda dtype: False)
        model = tiny_t5(0, V)
        draft = ModelDrafter(noisy_copy(model, 0.2))
    assert not model.network.backend.packs_weights
    options = dict(drafter=draft, gamma=GAMMA, max_new_tokens=LIMIT, eos_ids=())
    state, request = prepare(model, INPUTS, **options)
    spread = 0
    while not np.all(state.done):
        state = advance(model.network, request.drafter, poisoned(state), np.int32(1))
        spread = max(spread, int(np.ptp(state.lengths)))
    assert spread > 0
    np.testing.assert_array_equal(finish(model, state, request).tokens, plain()[0])
    alone = generate(model, INPUTS[2:3], **options)  # caches of one row have no axis of rows
    np.testing.assert_array_equal(alone.tokens, plain()[0][2:3])
    assert alone.stats.acceptance_rate < 1


@jax.jit
def fed_at_once(network, tokens, cache):
    return network.decode(tokens, jnp.zeros(len(tokens), jnp.int32), cache)[1]


def assert_caches_are_complete(state, draft_model, target_too=True) -> int:
    """The valid slots of both caches hold what feeding the committed tokens at once gives.

    Returns in how many rows the drafter has tokens to catch up with.
    """
    last = np.asarray(state.lengths) - 1
    cached = np.minimum(state.draft_state.cached, last)
    parts = [(target(), state.target_cache, last)] if target_too else []
    parts.append((draft_model, state.draft_state.cache, cached))
    for model, cache, valid in parts:
        fresh = fed_at_once(model.network, state.tokens, cache)
        mask = (np.arange(state.tokens.shape[1]) < valid[:, None])[:, None, :, None]
        for got, wanted in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(fresh.layers)):
            np.testing.assert_allclose(np.where(mask, got, 0), np.where(mask, wanted, 0), atol=1e-5)
    return np.sum(cached < last)


def test_caches_equal_a_recomputation():
    draft = drafter("noisy copy")
    options = dict(
        drafter=draft, gamma=GAMMA, sampling=SAMPLED, key=KEY, max_new_tokens=LIMIT, eos_ids=()
    )
    state, request = prepare(target(), INPUTS, **options)
    lagging = 0
    while not np.all(state.done):
        state = advance(target().network, request.drafter, state, np.int32(1))
        lagging += assert_caches_are_complete(state, draft.model)
    assert lagging > 0, "or no row was ever fully accepted"


def test_gamma_per_row():
    """Rows that draft 0, 1, 2 or 3 tokens side by side: zero-draft rows write at no wrong place."""
    gamma = [0, 1, 2, 3, 0, 1, 2, 3]
    result = run(drafter="self", gamma=gamma)
    np.testing.assert_array_equal(result.tokens, plain()[0])
    for wanted, stats in zip(gamma, result.stats.per_row):
        assert stats.acceptance_rate == (1.0 if wanted else None)
        assert stats.target_calls == -(-LIMIT // (wanted + 1))
        assert stats.accepted_by_position[wanted:].sum() == 0


def test_drafter_catches_up_by_several_tokens():
    """A row that did not draft for a while, with a ragged prefix before, leaves no hole."""
    prefixes = [[5], [], [9, 9], [1], [0, 0, 0], [2], [3], [8, 7, 6, 5]]
    state, request = prepare(
        target(),
        INPUTS,
        drafter=drafter("self"),
        gamma=GAMMA,
        max_new_tokens=8,
        decoder_prefix=prefixes,
        eos_ids=(),
    )
    expected = run(decoder_prefix=prefixes, max_new_tokens=8)
    for wanted in ([0] * 8, [0, 3] * 4, [0] * 8, *[[3] * 8] * 5):
        state = state.replace(gamma=jnp.array(wanted, jnp.int32))
        state = advance(target().network, request.drafter, state, np.int32(1))
        assert_caches_are_complete(state, target())
    result = finish(target(), state, request)
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    assert result.stats.acceptance_rate == 1.0
    assert all(row.accepted > 0 for row in result.stats.per_row)


def test_catching_up_takes_two_tokens_a_call(monkeypatch):
    """Whatever the lags, beside rows without one, the draft is the same.

    One row has its start token only.
    """
    made = []

    def counted(name):
        method = getattr(Network, name)

        def call(self, tokens, *rest, **options):
            jax.debug.callback(made.append, tokens.shape[1], ordered=True)
            return method(self, tokens, *rest, **options)

        return name, call

    draft_model, wanted = drafter("noisy copy"), np.full(8, GAMMA, np.int32)
    how = dict(
        drafter=draft_model,
        gamma=GAMMA,
        sampling=SAMPLED,
        key=KEY,
        max_new_tokens=LIMIT,
        eos_ids=(),
    )
    state, request = prepare(target(), INPUTS, **how)
    state = advance(target().network, request.drafter, state, np.int32(20))
    lengths = np.arange(
        1, 9, dtype=np.int32
    )  # shorter than what was decoded: the caches hold that and more
    state = state.replace(lengths=lengths)
    once = jax.jit(
        lambda d, s, cached: d.draft(dataclasses.replace(s.draft_state, cached=cached), s, wanted)
    )
    with monkeypatch.context() as patch:
        for name in ("decode_states",):  # which `decode` calls
            patch.setattr(Network, *counted(name))
        expected, most = once(request.drafter, state, lengths - 1)[1], lengths - 1
    jax.effects_barrier()
    assert made == [1, 1, 1] and expected.calls.tolist() == [GAMMA] * 8
    for lags in (
        [0, 1, 0, 1, 0, 1, 0, 1],
        [0, 0, 2, 1, 0, 2, 0, 0],
        [0, 0, 0, 3, 1, 2, 0, 3],
        [4] * 8,
        [7] * 8,
    ):
        lags = np.minimum(lags, most)
        behind = poisoned(
            state.replace(
                draft_state=dataclasses.replace(state.draft_state, cached=lengths - 1 - lags)
            )
        )
        made.clear()
        after, draft = once(request.drafter, behind, behind.draft_state.cached)
        jax.effects_barrier()
        pairs = (lags.max() + 1) // 2
        assert made == [2] * pairs + [1] * (GAMMA - lags.max() % 2)
        np.testing.assert_array_equal(draft.tokens, expected.tokens)
        np.testing.assert_array_equal(draft.calls, GAMMA + lags // 2)
        np.testing.assert_allclose(draft.dist.probs(), expected.dist.probs(), atol=1e-5)
        np.testing.assert_array_equal(after.cached, lengths - 1 + GAMMA)
        drafted = jax.vmap(jax.lax.dynamic_update_slice)(
            behind.tokens, draft.tokens, lengths[:, None]
        )
        grown = behind.replace(tokens=drafted, lengths=lengths + GAMMA, draft_state=after)
        assert_caches_are_complete(grown, draft_model.model, target_too=False)


# --- Vocabularies of different width ---


def resized(model: LanguageModel, vocab: int) -> LanguageModel:
    """`model` with logits and embeddings for `vocab` ids, cut or filled with an improbable id's."""
    params = jax.tree.map(np.asarray, model.params)
    grow = max(0, vocab - V)
    embedding, weight = (
        params["token_embedder"]["embedding"],
        params["decoder"]["logits_dense"]["kernel"],
    )
    params["token_embedder"]["embedding"] = np.pad(embedding, ((0, grow), (0, 0)))[:vocab]
    params["decoder"]["logits_dense"]["kernel"] = np.pad(
        weight, ((0, 0), (0, grow)), constant_values=9
    )[:, :vocab]
    return LanguageModel(
        dataclasses.replace(model.config, vocab_size=vocab), jax.tree.map(jnp.asarray, params)
    )


@pytest.mark.parametrize("vocab", [9, 40], ids=["narrower", "wider"])
def test_a_drafter_of_another_width(vocab):
    """The output is the target's; an id that the drafter lacks does not spoil later drafts."""
    options = dict(
        drafter=ModelDrafter(resized(target(), vocab)),
        gamma=GAMMA,
        max_new_tokens=LIMIT,
        eos_ids=(),
    )
    state, request = prepare(target(), INPUTS, **options)
    state = advance(target().network, request.drafter, state, np.int32(99))
    for leaf in jax.tree.leaves(state.draft_state.cache.layers):
        assert np.all(np.isfinite(leaf))
    result = finish(target(), state, request)
    np.testing.assert_array_equal(result.tokens, plain()[0])
    drafted_only = np.asarray(state.last_draft)
    assert np.all((drafted_only >= 0) & (drafted_only < min(vocab, V)))
    if vocab > V:
        assert (
            result.stats.acceptance_rate == 1.0
        )  # ids that the target lacks are cut before the argmax
    else:
        assert np.any(result.tokens >= vocab) and result.stats.accepted > 0


def test_empty_rows_give_empty_outputs():
    inputs = [INPUTS[0], [], *INPUTS[2:7], []]
    result = run(inputs, drafter="noisy copy")
    empty = np.array([not ids for ids in inputs])
    assert not result.tokens[empty].any() and not result.lengths[empty].any()
    np.testing.assert_array_equal(result.tokens[~empty], plain()[0][~empty])
    for row in np.flatnonzero(empty):
        stats = result.stats.per_row[row]
        assert stats.target_calls == stats.drafted == 0 and stats.tokens_per_target_call is None
    nothing = run([[]] * 8, drafter="noisy copy")
    assert nothing.stats.target_calls == 0 and nothing.stats.acceptance_rate is None
