"""A drafter that reads the target's states learns on its own drafts; a run resumes."""

import functools
import json
import pathlib

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_models import V, eagle, model, random_eagle, target
from toy_training import TINY, random_params

import specdec_jax as sd
from specdec_jax.models import heads
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.eagle import StateProjections
from specdec_jax.models.gemma import T5GemmaConfig
from specdec_jax.tokenizers import vocabularies
from specdec_jax.training import eagle as training_eagle

pytestmark = pytest.mark.usefixtures("quick")
DEPTH, T = 3, 6


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(2, V, (2, 3, T)).astype(np.int32)
    inputs[0, 4:], targets[1, 3:], targets[2, 1:] = -1, -1, -1
    return inputs, targets


@functools.cache
def bart(width):
    shape = dict(num_heads=2, num_encoder_layers=1, num_decoder_layers=2, mlp_dim=32)
    config = BartConfig(V, width, **shape, num_positions=16, scale_embedding=True)
    return sd.LanguageModel.random(config, width)


@functools.cache
def t5gemma(width):
    """Windows, and rotary positions, of which each row of a batch needs its own."""
    shape = dict(num_heads=2, num_kv_heads=1, head_dim=8, num_decoder_layers=2, mlp_dim=32)
    encoder = dict(num_encoder_layers=1, encoder_emb_dim=width, encoder_mlp_dim=32)
    encoder |= dict(encoder_num_heads=2, encoder_num_kv_heads=1)
    config = T5GemmaConfig(V, width, **shape, **encoder, windows=(3, 0))
    return sd.LanguageModel.random(config, width)


MODELS = {"bart": bart, "t5gemma": t5gemma}


@functools.cache
def eagle_of(family):
    return random_eagle(*map(MODELS[family], (24, 16)))


def make_objective(teacher=None, drafter=None, **settings):
    drafter = drafter or eagle(0.3)
    return training_eagle.EagleObjective(
        drafter.model.config.module(),
        teacher=(teacher or target()).config.module(),
        projections=StateProjections(drafter.network.module.config),
        depth=DEPTH,
        **settings,
    )


def make_params(drafter=None):
    drafter = drafter or eagle(0.3)
    own = heads.unpack(drafter.network.params)
    return {"model": drafter.model.params, "projections": own}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "t5gemma", "bart"])
def test_unrolled_states_are_those_of_drafting(family):
    """Depth i at position t: pairs up to t − i were committed, the last i tokens were drafted."""
    own_target, drafter = target(), eagle(0.3)
    if family != "t5":
        own_target, drafter = MODELS[family](24), eagle_of(family)
    (inputs, targets), network = batch(), drafter.network
    fed, mask = np.maximum(inputs, 0), inputs >= 0
    tokens = np.maximum(np.pad(targets[:, :-1], ((0, 0), (1, 0))), 0)
    module = own_target.config.module()
    teacher = functools.partial(module.apply, {"params": own_target.params})
    encoded = teacher(fed, mask, method="encode")
    states = teacher(fed, mask, tokens, True, encoded, method="states")
    given, objective = make_params(drafter), make_objective(own_target, drafter)
    given = given, fed, mask, tokens, encoded, states
    found = jax.jit(lambda *arrays: training_eagle._unroll(*arrays, objective))(*given)

    shifted = np.pad(np.asarray(states)[:, :-1], ((0, 0), (1, 0), (0, 0)))
    cache = jax.jit(lambda n: n.model.prefill(fed, mask.sum(axis=1, dtype=np.int32), T))(network)
    read = jax.jit(lambda n, cache, *given: n.decode(*given, cache))
    step = jax.jit(lambda n, cache, *given: n.decode(*given, cache, own=True))
    for begin in range(T):
        starts = np.zeros(3, np.int32)
        own, here = read(network, cache, tokens[:, : begin + 1], shifted[:, : begin + 1], starts)
        own = own[:, -1:]
        for depth in range(min(DEPTH, T - begin)):
            place = begin + depth
            if depth:
                at = np.full(3, place, np.int32)
                own, here = step(network, here, tokens[:, place : place + 1], own, at)
            np.testing.assert_allclose(found[depth][:, place], own[:, 0], atol=1e-4)


@pytest.mark.slow
def test_loss_is_the_weighted_mean_over_depths():
    (inputs, targets), objective = batch(), make_objective(distill_weight=0.5, depth_weight=0.8)
    given = make_params(), (inputs, targets), objective, target().params
    loss, metrics = jax.jit(training_eagle.eagle_loss, static_argnums=2)(*given)
    _, agreement = jax.jit(training_eagle.assess_eagle, static_argnums=2)(*given)
    fed, mask = np.maximum(inputs, 0), inputs >= 0
    tokens = np.maximum(np.pad(targets[:, :-1], ((0, 0), (1, 0))), 0)

    @jax.jit
    def compute(params, teacher_params):
        run = functools.partial(target().config.module().apply, {"params": teacher_params})
        encoded = run(fed, mask, method="encode")
        states = run(fed, mask, tokens, True, encoded, method="states")
        own = training_eagle._unroll(params, fed, mask, tokens, encoded, states, objective)
        head = functools.partial(model().config.module().apply, {"params": params["model"]})
        logits = jnp.stack([head(one, method="head") for one in own])
        return jax.nn.log_softmax(run(states, method="head")), jax.nn.log_softmax(logits)

    log_p, log_q = jax.device_get(compute(make_params(), target().params))
    weighted, weights, nll, agreeing, count = 0.0, 0.0, 0.0, 0, 0
    for depth in range(DEPTH):
        for row, size in enumerate((6, 3, 1)):
            for place in range(depth, size):
                p, q = log_p[row, place], log_q[depth, row, place]
                own = -q[targets[row, place]]
                weight = 0.8**depth
                weighted += weight * (0.5 * own + 0.5 * np.sum(np.exp(p) * (p - q)))
                weights += weight
                nll += own
                agreeing += p.argmax() == q.argmax()
                count += 1
    assert metrics.tokens == count == 10 + 7 + 5 and float(agreement.agreement) == agreeing
    np.testing.assert_allclose([loss, metrics.nll], [weighted / weights, nll], rtol=1e-4)


@pytest.fixture(scope="module")
def settings(language, tmp_path_factory):
    """Makes the settings of a run on a saved random target, and a drafter that reads it."""
    folder = tmp_path_factory.mktemp("eagle")
    vocabulary = vocabularies.SentencePieceVocabulary.train(
        (language / "train.tsv").read_text().replace("\t", "\n").splitlines(), 40
    )
    own = sd.LanguageModel(TINY, random_params(), vocabulary)
    sd.save(own, folder / "target")
    shape = TINY.replace(num_encoder_layers=0, encoder_dim=16)
    params = sd.LanguageModel.random(shape, 3).params
    drafter = sd.LanguageModel(
        shape, params, vocabulary, encoder_fingerprint=sd.load(folder / "target").fingerprint
    )
    sd.save(drafter, folder / "drafter")

    def make_config(output, **changes):
        defaults = dict(
            target=str(folder / "target"),
            drafter=str(folder / "drafter"),
            train_files="train.tsv",
            validation_files=["validation.tsv"],
            output_dir=str(output),
            data_dir=str(language),
            depth=2,
            steps=12,
            warmup_steps=0,
            decay_steps=0,
            learning_rate=1e-2,
            model_learning_rate=1e-2,
            batch_tokens=256,
            buckets=(16,),
            log_every=4,
            save_every=4,
            evaluate_every=6,
            dtype="float32",
        )
        return training_eagle.EagleTrainConfig(**{**defaults, **changes})

    make_config.folder = folder
    return make_config


@pytest.mark.slow
def test_training_raises_agreement_and_resumes(settings, tmp_path, capsys):
    params = training_eagle.fit(settings(tmp_path / "whole"))
    log = [json.loads(line) for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()]
    losses = [record["validation_loss"] for record in log if "validation_loss" in record]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.1, "validation begins at step 0"
    training_eagle.fit(settings(tmp_path / "halves", steps=5))
    resumed = training_eagle.fit(settings(tmp_path / "halves"))
    assert "resumed at step 5 of 12" in capsys.readouterr().err
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed, params))
    own = sd.load(settings.folder / "target", "float32")
    drafter = sd.EagleDrafter.load(tmp_path / "whole/eagle", own)
    inputs = ["bara ceni", "dimu"]
    plain = sd.generate(own, inputs, max_new_tokens=8)
    found = sd.generate(own, inputs, drafter=drafter, gamma=2, max_new_tokens=8)
    np.testing.assert_array_equal(plain.tokens, found.tokens)
    assert found.stats.drafted > 0


@pytest.mark.slow
def test_a_model_that_stays_is_not_changed(settings, tmp_path):
    params = training_eagle.fit(settings(tmp_path, model_learning_rate=0.0, steps=3))
    before = sd.load(settings.folder / "drafter", "float32").params
    assert jax.tree.all(jax.tree.map(np.array_equal, params["model"], before))
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(params["projections"]))
    with pytest.raises(ValueError, match="model_learning_rate: got 0.1, expected that of the run"):
        training_eagle.fit(settings(tmp_path, model_learning_rate=0.1), on_start=pytest.fail)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(depth=0), "depth: got 0, expected a number from 1 to 16"),
        (dict(depth=1.5), "depth: got 1.5, expected an integer"),
        (dict(matmul_dtype="int8"), "matmul_dtype: got 'int8', expected None, float32 or bfloat16"),
        (dict(depth_weight=0.0), r"depth_weight: got 0.0, expected a number in \(0, 1\]"),
        (dict(soft_weight=1.5), r"soft_weight: got 1.5, expected a number in \[0, 1\]"),
        (dict(label_smoothing=0.1), "label_smoothing: got 0.1, expected 0 with soft_weight = 1"),
        (dict(model_learning_rate=-1.0), "model_learning_rate: got -1.0, expected at least 0"),
    ],
)
def test_bad_settings(change, message, tmp_path):
    files = dict(train_files="a.tsv", validation_files="b.tsv", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=message):
        training_eagle.EagleTrainConfig(target="t", drafter="d", **files, **change)


def test_the_configuration_of_the_bundled_pair(tmp_path):
    path = pathlib.Path(__file__).parents[2] / "configs/train/ende_eagle.gin"
    gin.clear_config()
    bindings = [f"DATA_DIR = '{tmp_path}'", f"OUTPUT_DIR = '{tmp_path}'"]
    gin.parse_config_files_and_bindings([str(path)], bindings)
    config = gin.get_configurable(training_eagle.EagleTrainConfig)()
    gin.clear_config()
    assert {config.target, config.drafter} <= set(sd.bundled())
    assert (config.depth, config.soft_weight, config.steps) == (4, 1.0, 4600)
