"""Heads, and drafters that read states, of decoder-only targets."""

import json

import jax
import numpy as np
import pytest
from toy_training import TINY_GPT, text_config, write_text

import specdec_jax as sd
from specdec_jax.commands import main
from specdec_jax.models.eagle import EagleConfig, StateProjections, init_projections
from specdec_jax.models.gemma import GemmaConfig
from specdec_jax.models.heads import Heads, HeadsConfig, init_params
from specdec_jax.training import eagle, heads, losses, train
from specdec_jax.training.batches import PADDING, Batch

pytestmark = pytest.mark.usefixtures("quick")
SHAPE = sd.GPTConfig(24, 16, 2, 1, 24, num_positions=16)


def make_batch():
    """A row of six tokens, and one of two."""
    tokens = np.random.default_rng(0).integers(24, size=(2, 7)).astype(np.int32)
    tokens[1, 3:] = PADDING
    return Batch(tokens[:, :-1], tokens[:, 1:])


def test_the_loss_of_heads_without_training_is_the_targets_of_later_tokens():
    """A head's blocks are 0 at first, so that its logits are the target's own."""
    target, batch = sd.LanguageModel.random(SHAPE, 0, eos_ids=()), make_batch()
    config = HeadsConfig(2, SHAPE.emb_dim, SHAPE.vocab_size, share_head=True)
    objective = heads.HeadsObjective(SHAPE.module(), heads=Heads(config))
    params = {"heads": init_params(config, jax.random.key(0))}
    given = params, batch, objective, target.params
    loss, metrics = jax.jit(heads.heads_loss, static_argnums=2)(*given)
    log_p = jax.nn.log_softmax(target.logits(None, np.maximum(batch.inputs, 0)))
    found = [
        -log_p[row, place, batch.targets[row, place + ahead]]
        for ahead in (1, 2)
        for row, length in enumerate((6, 2))
        for place in range(length - ahead)
    ]
    assert metrics.tokens == len(found) == 5 + 1 + 4
    np.testing.assert_allclose(loss, np.mean(found), rtol=1e-5)


def test_without_projections_the_loss_is_the_models_own():
    """Each token of a draft is predicted as if those before it had been committed."""
    shape, batch = SHAPE.replace(emb_dim=8), make_batch()
    target, model = (sd.LanguageModel.random(one, 0, eos_ids=()) for one in (SHAPE, shape))
    config = EagleConfig(SHAPE.emb_dim, shape.emb_dim)
    given = dict(projections=StateProjections(config), teacher=SHAPE.module(), depth=2)
    objective = eagle.EagleObjective(shape.module(), **given)
    params = {"model": model.params, "projections": init_projections(config)}
    sums = jax.jit(eagle._sum_by_depth, static_argnums=2)(params, batch, objective, target.params)
    _, expected = losses.loss_fn(model.params, batch, losses.Objective(shape.module()))
    first = -jax.nn.log_softmax(model.logits(None, np.maximum(batch.inputs, 0))[:, 0])
    later = expected.nll - sum(first[row, batch.targets[row, 0]] for row in range(2))
    np.testing.assert_allclose([one.nll for one, _ in sums], [expected.nll, later], rtol=1e-5)
    assert [float(one.tokens) for one, _ in sums] == [8, 6]


GEMMA = dict(emb_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, windows=(6, 0))
MODELS = {
    "gpt": (TINY_GPT.replace(num_decoder_layers=2), TINY_GPT),
    "gemma": (
        GemmaConfig(40, num_decoder_layers=2, **GEMMA, attention_cap=20.0, logits_cap=20.0),
        GemmaConfig(40, num_decoder_layers=1, **GEMMA, qk_norm=True),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def trained(request, tmp_path_factory):
    """Returns a folder with a trained target, a smaller model, and their texts."""
    folder = write_text(tmp_path_factory.mktemp(request.param))
    target, small = MODELS[request.param]
    train.fit(text_config(folder, folder / "target", model=target))
    teacher = dict(teacher=str(folder / "target" / "model"), distill_weight=0.5)
    train.fit(text_config(folder, folder / "small", model=small, steps=70, **teacher))
    return folder


def make_settings(folder, output):
    return dict(
        target=str(folder / "target" / "model"),
        train_files="train.txt",
        validation_files="validation.txt",
        data_dir=str(folder),
        output_dir=str(folder / output),
        sequence_length=32,
        batch_tokens=256,
        steps=60,
        warmup_steps=0,
        decay_steps=0,
        learning_rate=1e-2,
        log_every=20,
        save_every=60,
        evaluate_every=30,
        dtype="float32",
    )


def check_drafts(folder, output, drafter_of):
    """Compares tokens with plain decoding's, in chains and trees; the loss must have fallen."""
    target = sd.load(folder / "target" / "model", "float32")
    drafter, prompts = drafter_of(target), ["ba ce", "fo", ""]
    plain = sd.generate(target, prompts, max_new_tokens=12)
    for how in (dict(gamma=3), dict(tree=sd.Tree.uniform((2, 2)))):
        found = sd.generate(target, prompts, drafter=drafter, max_new_tokens=12, **how)
        np.testing.assert_array_equal(found.tokens, plain.tokens)
        assert found.stats.accepted > 0
    log = (folder / output / "log.jsonl").read_text().splitlines()
    found = [record["loss"] for line in log if "loss" in (record := json.loads(line))]
    assert found[-1] < found[0]


@pytest.mark.slow
def test_heads_learn_from_text(trained):
    heads.fit(heads.HeadsTrainConfig(num_heads=2, **make_settings(trained, "heads")))
    path = trained / "heads" / "heads"
    check_drafts(trained, "heads", lambda target: sd.HeadsDrafter.load(path, target))


@pytest.mark.slow
def test_a_drafter_of_states_learns_from_text(trained):
    own = dict(drafter=str(trained / "small" / "model"), depth=3)
    eagle.fit(eagle.EagleTrainConfig(**make_settings(trained, "eagle"), **own))
    path = trained / "eagle" / "eagle"
    check_drafts(trained, "eagle", lambda target: sd.EagleDrafter.load(path, target))


@pytest.mark.slow
def test_the_command_line_wants_the_length_of_blocks(trained, capsys):
    settings = make_settings(trained, "wrong") | {"sequence_length": None}
    given = [f"--gin.HeadsTrainConfig.{name}={value!r}" for name, value in settings.items()]
    assert main.main(["train_heads", *given]) == 2
    expected = "sequence_length: got None, expected a number from 1 to the smaller of"
    assert expected in capsys.readouterr().err.splitlines()[-1]
