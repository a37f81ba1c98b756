"""Heads are trained, stored, resumed and used by commands."""

import functools
import json
import math

import gin
import jax
import numpy as np
import pytest
import tiers
from heads_models import t5
from toy_training import CONFIGS, TINY, random_params

import specdec_jax as sd
from specdec_jax import checkpoints
from specdec_jax.commands import main
from specdec_jax.models import heads as heads_module
from specdec_jax.models.heads import Heads, HeadsConfig
from specdec_jax.tokenizers import vocabularies
from specdec_jax.training import heads as training_heads
from specdec_jax.training import run_folder, train

pytestmark = pytest.mark.usefixtures("quick")


# --- Training ---


@tiers.parametrize(
    "smoothing, soft, backbone", [(0.0, 0.0, 0.0), (0.1, 0.4, 0.0), (0.0, 1.0, 0.7)], first=1
)
def test_loss_is_the_sum_over_tokens_and_heads(smoothing, soft, backbone):
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(2, 64, (2, 3, 5)).astype(np.int32)
    inputs[0, 4:], targets[1, 3:], targets[2, 1:] = -1, -1, -1
    target, config = random_params(), HeadsConfig(6, 16, 64)  # more heads than there are tokens
    params = jax.tree.map(
        lambda x: x + rng.normal(size=x.shape, scale=0.3),
        heads_module.init_params(config, jax.random.key(0)),
    )
    objective = training_heads.HeadsObjective(
        TINY.module(),
        smoothing,
        distill_weight=soft,
        start_token=2,
        heads=Heads(config),
        backbone_weight=backbone,
    )
    given = ({"heads": params, "target": target}, None) if backbone else ({"heads": params}, target)
    loss, metrics = jax.jit(training_heads.heads_loss, static_argnums=2)(
        given[0], (inputs, targets), objective, given[1]
    )

    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=2)

    @jax.jit
    def dists(target, params):
        fed, before = np.maximum(inputs, 0), np.maximum(shifted, 0)
        apply = functools.partial(TINY.module().apply, {"params": target}, fed, inputs >= 0, before)
        ahead = Heads(config).apply({"params": params}, apply(method="states").reshape(-1, 16))
        return jax.nn.log_softmax(apply()), jax.nn.log_softmax(ahead).reshape(3, 5, 6, 64)

    log_p, log_q = jax.device_get(dists(target, params))
    expected, nll, tokens = 0.0, 0.0, 0

    def smoothed(dist, token):
        return -(1 - smoothing) * dist[token] - smoothing * dist.mean()

    for row, size in enumerate((5, 3, 1)):
        for place in range(size):
            for ahead in range(1, size - place):
                dist, own = log_q[row, place, ahead - 1], log_p[row, place + ahead]
                token = targets[row, place + ahead]
                expected += (1 - soft) * smoothed(dist, token) + soft * np.sum(
                    np.exp(own) * (own - dist)
                )
                nll -= dist[token]
                tokens += 1
    own = [
        smoothed(log_p[row, t], targets[row, t])
        for row, size in enumerate((5, 3, 1))
        for t in range(size)
    ]
    expected = expected / tokens + backbone * np.mean(own)
    assert metrics.tokens == tokens == 10 + 3
    np.testing.assert_allclose(
        [loss, metrics.loss, metrics.nll], [expected, expected * tokens, nll], rtol=1e-5
    )


def test_the_figure_of_validation_does_not_depend_on_the_batches():
    """The target's loss is a mean over its own tokens, of which short outputs have more a head."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.integers(2, 64, (2, 4, 6)).astype(np.int32)
    targets[0, 2:], targets[1, 1:] = -1, -1
    target, config = random_params(), HeadsConfig(3, 16, 64)
    params = {"heads": heads_module.init_params(config, jax.random.key(0)), "target": target}
    objective = training_heads.HeadsObjective(
        TINY.module(), 0.0, start_token=2, heads=Heads(config), backbone_weight=0.7
    )
    run = training_heads.HeadsRun.__new__(training_heads.HeadsRun)
    run.objective = objective
    figures, wrong = [], []
    for parts in ([slice(0, 4)], [slice(0, 2), slice(2, 4)]):
        batches = [(inputs[part], targets[part]) for part in parts]
        found = [training_heads.assess_heads(params, batch, objective) for batch in batches]
        figures.append(run.mean_loss(jax.tree.map(lambda *values: sum(values), *found)))
        sums = [training_heads.heads_loss(params, batch, objective)[1] for batch in batches]
        wrong.append(float(sum(one.loss for one in sums) / sum(one.tokens for one in sums)))
    np.testing.assert_allclose(figures[0], figures[1], rtol=1e-5)
    assert abs(wrong[0] - wrong[1]) > 1e-3 * wrong[0], "the two batches are weighted alike"


@pytest.fixture(scope="module")
def settings(language, tmp_path_factory):
    """Makes the settings of a run on a saved random target; `settings.folder` has the target."""
    folder = tmp_path_factory.mktemp("heads")
    vocabulary = vocabularies.SentencePieceVocabulary.train(
        (language / "train.tsv").read_text().replace("\t", "\n").splitlines(), 40
    )

    def save(seed):
        return sd.save(
            sd.LanguageModel(TINY, random_params(seed=seed), vocabulary), folder / f"target{seed}"
        )

    save(0), save(1)

    def make_config(output, **changes):
        defaults = dict(
            target=str(folder / "target0"),
            train_files="train.tsv",
            validation_files=["validation.tsv"],
            output_dir=str(output),
            data_dir=str(language),
            num_heads=2,
            share_head=False,
            steps=12,
            warmup_steps=0,
            decay_steps=0,
            learning_rate=1e-2,
            batch_tokens=256,
            buckets=(16,),
            log_every=4,
            save_every=4,
            evaluate_every=6,
            dtype="float32",
        )
        return training_heads.HeadsTrainConfig(**{**defaults, **changes})

    make_config.folder = folder
    return make_config


@pytest.fixture(scope="module")
def finished(settings):
    output = settings.folder / "run"
    return output, training_heads.fit(settings(output))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_training_lowers_the_loss_and_leaves_the_target_alone(settings, finished):
    output, params = finished
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    training = [record["loss"] for record in log if "tokens_per_second" in record]
    assert (
        training[-1] < training[0] - 0.1
        and set(params) == {"heads"}
        and not (output / "target").exists()
    )
    target = sd.load(settings.folder / "target0", "float32")
    loaded = sd.HeadsDrafter.load(output / "heads", target)
    for ours, theirs in zip(
        jax.tree.leaves(loaded.params), jax.tree.leaves(params["heads"]), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0.01)  # stored in bfloat16
    before = files(settings.folder / "target0")
    run = training_heads.HeadsRun(settings(output), target, None)
    kept = jax.tree.map(np.array, run.teacher_params)
    state = run.init(jax.random.key(0))
    first = jax.tree.map(np.array, state.params)
    state, _ = run.step(state, 0)
    assert not any(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(state.params)))
    assert jax.tree.all(jax.tree.map(np.array_equal, run.teacher_params, kept))
    assert files(settings.folder / "target0") == before


@pytest.mark.slow
def test_a_run_resumes_as_if_it_had_not_stopped(settings, finished, tmp_path, capsys):
    output, params = finished
    training_heads.fit(settings(tmp_path, steps=5))
    assert "begins at step 0 of 5" in capsys.readouterr().err
    resumed = training_heads.fit(settings(tmp_path))
    assert "resumed at step 5 of 12" in capsys.readouterr().err
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed, params))
    for change, message in (
        (dict(num_heads=3), "num_heads: got 3, expected that of the run in .*: 2"),
        (
            dict(target=str(settings.folder / "target1")),
            "target: got .*target1, expected the model with which the run",
        ),
        (
            dict(backbone_learning_rate=0.1, backbone_weight=1.0),
            "backbone_learning_rate: got 0.1, expected that of the run",
        ),
        (dict(steps=5), "steps: got 5, expected at least the 12 steps"),
    ):
        with pytest.raises(ValueError, match=message):
            training_heads.fit(settings(tmp_path, **change), on_start=pytest.fail)
    begun = []
    training_heads.fit(settings(tmp_path), on_start=lambda: begun.append(1))
    assert begun == [1]


@pytest.mark.slow
def test_a_target_that_is_trained_too_is_written_beside_its_heads(settings, tmp_path):
    config = settings(
        tmp_path,
        backbone_learning_rate=1e-2,
        backbone_weight=1.0,
        share_head=True,
        soft_weight=0.5,
        steps=6,
    )
    params = training_heads.fit(config)
    tuned, original = (
        sd.load(path, "float32") for path in (tmp_path / "target", settings.folder / "target0")
    )
    for name in ("encoder", "decoder", "token_embedder"):
        assert not jax.tree.all(
            jax.tree.map(np.array_equal, params["target"][name], original.params[name])
        )
    drafter = sd.HeadsDrafter.load(tmp_path / "heads", tuned)
    with pytest.raises(ValueError, match="other weights"):
        sd.HeadsDrafter.load(tmp_path / "heads", original)
    inputs = ["bara ceni", "dimu"]
    options = dict(max_new_tokens=6)
    plain, fast = (
        sd.generate(tuned, inputs, **options),
        sd.generate(tuned, inputs, drafter=drafter, gamma=2, **options),
    )
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    assert fast.stats.drafted > 0


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(soft_weight=1.5), r"soft_weight: got 1.5, expected a number in \[0, 1\]"),
        (
            dict(soft_weight=1.0, label_smoothing=0.1),
            "label_smoothing: got 0.1, expected 0 with soft_weight = 1",
        ),
        (
            dict(backbone_weight=1.0),
            "backbone_weight: got 1.0, expected a number above 0 with a backbone_learning_rate",
        ),
        (dict(backbone_learning_rate=0.1), "backbone_weight: got 0.0"),
        (dict(backbone_learning_rate=math.inf), "backbone_learning_rate: got inf"),
        (dict(num_heads=0), "num_heads: got 0"),
        (dict(learning_rate=0.0), "learning_rate: got 0.0"),
        (dict(steps=0), "steps: got 0"),
        (dict(buckets=(16, 8)), r"buckets: got \(16, 8\), expected ascending lengths from 1"),
    ],
)
def test_bad_settings(settings, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **change)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(target="nowhere"), "nowhere: got no such path"),
        (dict(train_files="gone.tsv"), "train_files: got '.*gone.tsv', expected a TSV file"),
    ],
)
def test_bad_files(settings, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        training_heads.fit(settings(tmp_path, **change))


def test_targets_of_one_token_are_rejected(settings, tmp_path):
    """Heads predict none of them, and a mean over no token is not a number."""
    (tmp_path / "short.tsv").write_text("a word\tx\t1\n" * 3)
    (tmp_path / "long.tsv").write_text("a word\tx\t5 1\n" * 3)
    given = dict(data_dir=str(tmp_path), train_files="long.tsv")
    for files, message in (
        (dict(validation_files=["long.tsv", "short.tsv"]), "short.tsv: got targets of one token"),
        (dict(validation_files="long.tsv", train_files="short.tsv"), "train_files: got targets of"),
    ):
        with pytest.raises(ValueError, match=message):
            training_heads.fit(settings(tmp_path / "run", **given | files))


def test_no_model_is_exported_of_a_run_of_heads(settings, tmp_path):
    run_folder.record_settings(settings(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="got a run of heads .*, expected one that trains a model"):
        train.export(tmp_path, tmp_path / "model")


def test_a_target_without_a_vocabulary_is_rejected(settings, tmp_path):
    sd.save(t5(), tmp_path / "model")
    with pytest.raises(ValueError, match="model without a vocabulary, expected one"):
        training_heads.fit(settings(tmp_path / "run", target=str(tmp_path / "model")))


def test_the_configuration_of_the_bundled_target(tmp_path):
    gin.clear_config()
    bindings = [f"DATA_DIR = '{tmp_path}'", f"OUTPUT_DIR = '{tmp_path}'"]
    gin.parse_config_files_and_bindings([str(CONFIGS / "ende_heads.gin")], bindings)
    config = gin.get_configurable(training_heads.HeadsTrainConfig)()
    gin.clear_config()
    shapes = config.heads_config(checkpoints.load_shape(config.target)).parameter_shapes
    assert config.target in sd.bundled() and sum(map(math.prod, shapes.values())) == 4 * 640**2


@pytest.mark.slow
def test_the_command_line(settings, finished, tmp_path, capsys):
    target, drafter = settings.folder / "target0", finished[0] / "heads"
    options = [
        "--compilation_cache_dir=",
        "--dtype=float32",
        "--max_new_tokens=6",
        "--json",
        "bara ceni",
    ]
    records = []
    for arguments in ([], [f"--drafter={drafter}", "--gamma=2"]):
        assert main.main(["generate", f"--target={target}", *arguments, *options]) == 0
        records.append(json.loads(capsys.readouterr().out))
    assert records[0]["tokens"] == records[1]["tokens"] and records[1]["stats"]["drafted"] > 0
    other = settings.folder / "target1"
    assert main.main(["generate", f"--target={other}", f"--drafter={drafter}", *options]) == 2
    assert "heads: heads: got heads of a target with other weights" in capsys.readouterr().err
    (tmp_path / "heads.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom specdec_jax.training import heads\n"
        f"heads.HeadsTrainConfig:\n  target = '{target}'\n  train_files = ['none.tsv']\n"
        f"  validation_files = ['none.tsv']\n  output_dir = '{tmp_path}'\n"
    )
    assert (
        main.main(["train_heads", f"--gin_file={tmp_path / 'heads.gin'}", "--gin_search_paths=/"])
        == 2
    )
    assert "train_files: got 'none.tsv', expected a TSV file" in capsys.readouterr().err
