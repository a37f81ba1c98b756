"""A model that drafts all tokens in one call, by masks: what it drafts; outputs stay the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiers
from distribution_samples import FALSE_ALARM, g_test
from golden_languages import make_model
from toy_models import HashModel, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.drafters import named
from specdec_jax.training import losses, train
from specdec_jax.training.config import TrainConfig
from specdec_jax.training.run_folder import Checkpoints

pytestmark = pytest.mark.usefixtures("quick")
V, LIMIT, GAMMA = 24, 12, 3
INPUTS = [[3, 4, 5, 4, 1], [7, 1], [9, 2, 9, 2, 1], [6, 8, 11, 1]]
PREFIXES = [[4, 2], [], [11, 9, 2, 9], [5]]


@functools.cache
def target():
    return noisy_copy(tiny_t5(0, V), 2.0)  # else it repeats itself


@functools.cache
def model():
    return noisy_copy(target(), 0.1, 1)


def run(drafter, **options):
    options = dict(decoder_prefix=PREFIXES, max_new_tokens=LIMIT, gamma=GAMMA) | options
    return sd.generate(target(), INPUTS, drafter=drafter, **options)


@tiers.parametrize("gamma", [3, [0, 3, 1, 2], 1, 5, "auto"], first=2)
def test_greedy_output_is_that_of_plain_decoding(gamma):
    """Rows of different γ, and one that never drafts, share a batch."""
    found = run(sd.ParallelDrafter(model()), gamma=gamma)
    np.testing.assert_array_equal(found.tokens, run(None, gamma=0).tokens)


def guess(tokens: list[int], row: int, gamma: int) -> list[int]:
    """Returns the argmax after `tokens`, and after each of γ − 1 masks behind them."""
    fed = np.zeros((1, LIMIT + GAMMA), np.int32)  # one shape for all rows: one compilation
    fed[0, : len(tokens)] = tokens
    inputs = np.zeros((1, max(map(len, INPUTS))), np.int32)
    inputs[0, : len(INPUTS[row])] = INPUTS[row]
    logits = np.asarray(model().logits(inputs, fed, [len(INPUTS[row])]))[0]
    return logits[len(tokens) - 1 :][:gamma].argmax(-1).tolist()


def test_it_drafts_what_the_model_says_of_masks():
    """In every iteration, whatever became of the drafts before; a mask leaves nothing behind."""
    state, request = prepare(
        target(),
        INPUTS,
        drafter=sd.ParallelDrafter(model()),
        gamma=GAMMA,
        decoder_prefix=PREFIXES,
        max_new_tokens=LIMIT,
        eos_ids=(),
    )
    accepted = set()
    for _ in range(5):
        before = [
            np.asarray(tokens)[:length].tolist()
            for tokens, length in zip(state.tokens, np.asarray(state.lengths))
        ]
        state = advance(target().network, request.drafter, state, np.int32(1))
        accepted |= set(np.asarray(state.last_accepted).tolist())
        for row, tokens in enumerate(before):
            if len(tokens) + GAMMA < LIMIT:
                drafted = np.asarray(state.last_draft)[row].tolist()
                assert drafted == guess(tokens, row, GAMMA), (row, tokens)
    assert len(accepted) > 1


def test_a_row_that_drafts_again_catches_up():
    """Ten tokens are committed without a draft; the cache then lacks them all."""
    drafter, tokens = sd.ParallelDrafter(model()), np.array([[0, 4, 9, 3, 11, 5, 2, 7, 8, 6, 4]])
    plan = dict(drafter=drafter, gamma=2, max_new_tokens=4, eos_ids=())
    state, request = prepare(target(), INPUTS[:1], decoder_prefix=tokens[:, 1:], **plan)
    late = state.draft_state.replace(cached=jnp.zeros(1, jnp.int32))
    forgotten = jax.tree.map(jnp.zeros_like, late.cache.layers)
    late = late.replace(cache=late.cache.replace(layers=forgotten))
    state = state.replace(draft_state=late)
    after = advance(target().network, request.drafter, state, np.int32(1))
    assert np.asarray(after.last_draft)[0].tolist() == guess(tokens[0].tolist(), 0, 2)
    assert int(after.counts.draft_calls[0]) > 1


@tiers.parametrize("tree", [sd.Tree.uniform((2, 2)), sd.DynamicTree(3, 3, 6)], first=1)
def test_trees_give_the_output_of_plain_decoding(tree):
    options = dict(tree=tree, gamma="auto")
    found = run(sd.ParallelDrafter(model()), **options)
    np.testing.assert_array_equal(found.tokens, run(None, gamma=0).tokens)
    assert found.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["block", "token"])
def test_distribution_through_the_engine(verifier):
    """The joint distribution of three tokens is the target's."""
    width, rows = 5, 60_000
    toy = HashModel(width, 1, spread=2.0)
    state, request = prepare(
        toy,
        np.tile([3, 4, 1], (rows, 1)),
        drafter=sd.ParallelDrafter(HashModel(width, 1, spread=2.0, likeness=0.8)),
        gamma=2,
        verifier=verifier,
        sampling=sd.SamplingConfig(temperature=1.0),
        max_new_tokens=3,
        eos_ids=(),
        key=jax.random.key(3),
    )
    state = advance(toy.network, request.drafter, state, np.int32(99))
    counts = np.bincount(
        np.asarray(state.tokens)[:, 1:4] @ width ** np.arange(2, -1, -1), minlength=width**3
    )
    prefixes = np.stack(np.unravel_index(np.arange(width**3), [width] * 3), 1)
    decoder = np.pad(prefixes[:, :2], ((0, 0), (1, 0)))
    logits = toy.logits(np.tile([3, 4, 1], (len(decoder), 1)), decoder)
    probs = np.asarray(jax.nn.softmax(logits))
    joint = np.prod([probs[np.arange(width**3), i, prefixes[:, i]] for i in range(3)], axis=0)
    assert g_test(counts, joint) > FALSE_ALARM
    assert 0 < int(state.counts.accepted.sum()) < int(state.counts.drafted.sum())


def test_targets_are_hidden_behind_a_random_place():
    targets = np.full((200, 9), -1, np.int32)
    lengths = np.random.default_rng(0).integers(1, 10, 200)
    targets[np.arange(9) < lengths[:, None]] = 7
    hidden, counted = map(np.asarray, losses.hide_tokens(targets, 2, jax.random.key(1)))
    cuts = (~hidden).sum(1) - 1  # the first target after the cut sees a token
    assert np.all(cuts < lengths) and len(set(cuts)) == 9
    places = np.arange(9)
    expected = (places <= cuts[:, None] + 2) & (places < lengths[:, None])
    np.testing.assert_array_equal(counted >= 0, expected)
    validation, fixed = (
        losses.hide_tokens(targets, 2, one)[0] for one in (None, jax.random.key(0))
    )
    np.testing.assert_array_equal(validation, fixed)
    assert not np.array_equal(validation, hidden)


@pytest.mark.slow
def test_training_teaches_masks_and_validation_counts_them():
    """The loss on what follows a mask falls; without masks the objective is what it was."""
    config = tiny_t5(0, V).config.replace(dropout_rate=0.0)
    rng = np.random.default_rng(0)
    rows = np.tile(rng.integers(3, V, (16, 1)), (1, 8)).astype(np.int32)  # one id, repeated
    batch = losses.Batch(rows, rows)
    objective = losses.Objective(config.module(), masks=3)
    optimizer = optax.adam(0.02)
    state = losses.TrainState.begin(tiny_t5(0, V).params, optimizer)
    assess = jax.jit(losses.assess, static_argnums=2)
    first = assess(state.params, batch, objective)[0]
    for _ in range(60):
        state, _ = losses.train_step(
            state, batch, None, 0, objective=objective, optimizer=optimizer
        )
    last = assess(state.params, batch, objective)[0]
    assert last.tokens == first.tokens and last.nll / last.tokens < 0.5 * first.nll / first.tokens


def test_a_mask_is_another_token_than_the_start():
    config, params = tiny_t5(0, V).config, tiny_t5(0, V).params
    rows = np.random.default_rng(0).integers(3, V, (4, 8)).astype(np.int32)
    objective = losses.Objective(config.module(), start_token=2, masks=3, mask_token=5)
    hidden, counted = losses.hide_tokens(rows, 3, None)
    fed = np.where(hidden, 5, losses.shift_right(rows, 2))
    logits = config.module().apply({"params": params}, rows, rows >= 0, fed)
    expected = losses.sum_metrics(logits, None, counted, objective)
    found, _ = losses.assess(params, losses.Batch(rows, rows), objective)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_masks_of_a_language_are_those_of_the_drafter(tmp_path):
    """An mBART begins with the language's token; what it is fed as a mask does not change."""
    model = make_model("mbart", tmp_path / "files")
    sd.save(model, tmp_path / "model", say=lambda line: None)
    (tmp_path / "a.tsv").write_text("ein Haus\tune maison\n" * 4)
    config = TrainConfig(
        model=model.config.replace(dtype="float32"),
        initialise_from=str(tmp_path / "model"),
        train_files="a.tsv",
        validation_files="a.tsv",
        data_dir=str(tmp_path),
        output_dir=str(tmp_path / "run"),
        vocabulary_size=model.vocabulary.size,
        masks=2,
        buckets=(64,),
        source_language="fr_XX",
        target_language="de_DE",
    )
    objective = train.Run(config, Checkpoints(tmp_path / "run")).objective
    assert objective.start_token == model.vocabulary.languages.codes["de_DE"]
    assert objective.mask_token == sd.ParallelDrafter(model).mask_token != objective.start_token


def test_settings_are_checked():
    options = dict(train_files="a.tsv", validation_files="b.tsv", output_dir="runs")
    shape = tiny_t5(0, V).config
    with pytest.raises(ValueError, match="masks: got -1, expected a number from 0 to 63"):
        TrainConfig(model=shape, masks=-1, **options)
    with pytest.raises(ValueError, match="masks: got 2, expected a number from 0 to 0"):
        gpt = sd.GPTConfig(V, 16, 2, 2, 32, num_positions=64)
        TrainConfig(model=gpt, masks=2, sequence_length=8, vocabulary_size=V, **options)
    with pytest.raises(ValueError, match="mask_token: got 24, expected an integer from 0 to 23"):
        sd.ParallelDrafter(model(), V)


def test_it_has_a_name(tmp_path):
    sd.save(model(), tmp_path / "model")
    found = named.make_named_drafter(
        f"parallel:{tmp_path / 'model'}",
        target(),
        lambda path: sd.load(path, say=lambda line: None),
        sd.ModelDrafter,
    )
    assert isinstance(found, sd.ParallelDrafter) and found.mask_token == 0
    named.check_drafter_name(f"parallel:{tmp_path / 'model'}")
    with pytest.raises(ValueError, match="drafter: nothing: got no such path"):
        named.check_drafter_name("parallel:nothing")
