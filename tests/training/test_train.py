"""Tests training: losses, distillation, schedule, steps, and `configs/train`."""

import dataclasses
import functools
import json
import pathlib

import gin
import jax
import jax.numpy as jnp
import make_checkpoints
import numpy as np
import pytest
from toy_training import CONFIGS, TINY, config_of, random_params

from specdec_jax.checkpoints import loader
from specdec_jax.models.t5 import PRESETS, T5Config
from specdec_jax.training import config as training_config
from specdec_jax.training import losses, train
from specdec_jax.training import optimizer as training_optimizer

pytestmark = pytest.mark.usefixtures("quick")


def random_batch(rows=3, length=6, seed=0):
    rng = np.random.default_rng(seed)
    inputs, targets = rng.integers(2, 64, (2, rows, length)).astype(np.int32)
    inputs[0, 4:], targets[1, 3:], targets[2, 5:] = -1, -1, -1
    return inputs, targets


@jax.jit
def forward(params, inputs, tokens):
    fed = jnp.maximum(inputs, 0), inputs >= 0, jnp.maximum(tokens, 0)
    return jax.nn.log_softmax(TINY.module().apply({"params": params}, *fed))


def dists(params, batch):
    inputs, targets = batch
    return np.asarray(
        forward(params, inputs, np.pad(targets[:, :-1], ((0, 0), (1, 0)))), np.float64
    )


# Losses.


@pytest.mark.slow
@pytest.mark.parametrize(
    "smoothing, weight", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.6), (0.1, 1.0)]
)
def test_loss_is_the_sum_over_target_tokens(smoothing, weight):
    params, teacher, batch = random_params(), random_params(seed=1), random_batch()
    objective = losses.Objective(
        TINY.module(), smoothing, TINY.module() if weight else None, weight
    )
    loss, metrics = jax.jit(losses.loss_fn, static_argnums=2)(
        params, batch, objective, teacher if weight else None
    )
    log_q, log_p = dists(params, batch), dists(teacher, batch)
    expected, nll, tokens = 0.0, 0.0, 0
    for b, t in zip(*np.nonzero(batch[1] >= 0)):
        reference = np.full(64, smoothing / 64)
        reference[batch[1][b, t]] += 1 - smoothing
        entropy = -np.sum(reference * log_q[b, t])
        divergence = np.sum(np.exp(log_p[b, t]) * (log_p[b, t] - log_q[b, t]))
        expected += (1 - weight) * entropy + weight * divergence
        nll -= log_q[b, t, batch[1][b, t]]
        tokens += 1
    assert metrics.tokens == tokens == 14
    np.testing.assert_allclose(
        [metrics.loss, metrics.nll, loss], [expected, nll, expected / tokens], rtol=1e-5
    )


def test_divergence_from_itself_is_zero_with_a_zero_gradient():
    params, batch = random_params(), random_batch()
    objective = losses.Objective(TINY.module(), teacher=TINY.module(), distill_weight=1.0)
    loss, grads = jax.jit(
        jax.value_and_grad(lambda p: losses.loss_fn(p, batch, objective, params)[0])
    )(params)
    assert abs(loss) < 1e-6
    assert max(np.max(np.abs(g)) for g in jax.tree.leaves(grads)) < 1e-5


def test_gradients_flow_to_the_student_only():
    params, teacher, batch = random_params(), random_params(seed=1), random_batch()
    objective = losses.Objective(TINY.module(), teacher=TINY.module(), distill_weight=0.5)

    def loss(student, teacher):
        return losses.loss_fn(student, batch, objective, teacher)[0]

    student_grads, teacher_grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, teacher)
    assert all(np.any(g) for g in jax.tree.leaves(student_grads["decoder"]))
    assert not any(np.any(g) for g in jax.tree.leaves(teacher_grads))


# Steps.


def test_learning_rate_rises_stays_and_falls():
    config = config_of(".", ".", steps=10, warmup_steps=2, decay_steps=4)
    got = [
        float(training_optimizer.learning_rate(config, step)) / config.learning_rate
        for step in range(11)
    ]
    np.testing.assert_allclose(got, [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0], rtol=1e-6)
    constant = dataclasses.replace(config, warmup_steps=0, decay_steps=0)
    assert [
        float(training_optimizer.learning_rate(constant, step)) for step in (0, 9)
    ] == pytest.approx([0.01, 0.01])


optimizer_of = functools.cache(
    training_optimizer.make_optimizer
)  # one object per configuration, so that nothing compiles twice


def steps(config, model, count, seed=0):
    """Parameters and metrics after `count` steps on one batch."""
    params, optimizer = random_params(model), optimizer_of(config)
    state = losses.TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    arguments = dict(objective=losses.Objective(model.module(), 0.1), optimizer=optimizer)
    history = []
    for _ in range(count):
        state, metrics = losses.train_step(state, random_batch(), None, seed, **arguments)
        history.append(float(metrics.nll / metrics.tokens))
    return state, history


def test_steps_lower_the_loss_and_a_zero_rate_of_dropout_uses_no_randomness():
    config = config_of(".", ".", warmup_steps=0, decay_steps=0, steps=30)
    state, history = steps(config, TINY, 30)
    assert history[-1] < history[0] - 1 and int(state.step) == 30
    assert steps(config, TINY, 3, seed=1)[1] == history[:3]


@pytest.mark.slow
def test_dropout_depends_on_seed_and_step():
    config = config_of(".", ".", warmup_steps=0, decay_steps=0, steps=30, learning_rate=1e-30)
    model = dataclasses.replace(TINY, dropout_rate=0.3)
    dropped = steps(config, model, 3)[1]
    assert len(set(dropped)) == 3  # another mask in every step, the parameters are the same
    assert steps(config, model, 3)[1] == dropped
    assert steps(config, model, 3, seed=1)[1] != dropped


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [dict(dtype="bfloat16"), dict(model=dataclasses.replace(TINY, matmul_dtype="bfloat16"))],
)
def test_rounded_training_keeps_float32_parameters(given):
    config = config_of(".", ".", warmup_steps=0, decay_steps=0, steps=20, **given)
    computing = train.set_dtype(config, config.model)
    assert (computing.dtype, computing.matmul_dtype) == (
        config.dtype or "float32",
        config.model.matmul_dtype,
    )
    state, history = steps(config, computing, 20)
    assert history[-1] < history[0] - 0.5
    kinds = {
        leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert kinds == {jnp.dtype("float32")}


def test_dtype_follows_the_backend(monkeypatch):
    config = config_of(".", ".", model=dataclasses.replace(TINY, matmul_dtype="bfloat16"))

    def shape():
        return (
            train.set_dtype(config, config.model).dtype,
            train.set_dtype(config, config.model).matmul_dtype,
        )

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert shape() == ("float32", "bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert shape() == ("bfloat16", None)


def test_a_checkpoint_has_the_known_names():
    """Runs are resumed by later versions: the tree of a state must not change."""
    state = jax.eval_shape(lambda: steps_state())
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(state)
    }
    weight, embedding = "encoder/layers_0/mlp/wi_0/kernel", "token_embedder/embedding"
    muon = "opt_state/1/inner_states/muon/inner_state"
    adam = "opt_state/1/inner_states/adam/inner_state"
    assert {
        f"params/{weight}",
        f"{muon}/0/mu/{weight}",
        f"{adam}/0/mu/{embedding}",
        "step",
    } <= names
    assert {f"{adam}/0/nu/{embedding}", f"{muon}/0/count", f"{adam}/0/count"} <= names
    assert len(names) == 74


def steps_state():
    params = random_params()
    return losses.TrainState(
        params,
        training_optimizer.make_optimizer(config_of(".", ".")).init(params),
        jnp.zeros((), jnp.int32),
    )


# Settings.


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(steps=5), r"steps: got 5, expected at least warmup_steps \+ decay_steps = 6"),
        (dict(train_files=()), "train_files: got .*, expected at least one file"),
        (dict(steps=20.5), "steps: got 20.5, expected an integer"),
        (dict(masks=True), "masks: got True, expected an integer"),
        (dict(learning_rate="0.01"), "learning_rate: got '0.01', expected a number"),
        (dict(prompts=1), "prompts: got 1, expected True or False"),
        (dict(output_dir=3), "output_dir: got 3, expected a string"),
        (dict(train_files=[3]), "train_files: got 3, expected a list of strings"),
        (dict(buckets=64), "buckets: got 64, expected a list"),
        (dict(buckets=(16, 32.5)), "buckets: got 32.5, expected a list of integers"),
        (dict(buckets=(16, 8)), r"buckets: got \(16, 8\), expected ascending lengths from 1"),
        (dict(buckets=()), r"buckets: got \(\), expected ascending lengths from 1"),
        (dict(learning_rate=0.0), "learning_rate: got 0.0"),
        (dict(learning_rate=float("nan")), "learning_rate: got nan"),
        (dict(label_smoothing=1.0), "label_smoothing: got 1.0"),
        (dict(save_every=0), "save_every: got 0"),
        (dict(warmup_steps=-1), "warmup_steps: got -1"),
        (dict(seed=-1), "seed: got -1, expected at least 0"),
        (dict(seed=2**31), "seed: got 2147483648, expected at most 2147483647"),
        (
            dict(vocabulary_size=65),
            "vocabulary_size: got 65, expected at most model.vocab_size = 64",
        ),
        (
            dict(distill_weight=0.5),
            "distill_weight: got 0.5, expected a number in .* with a teacher, 0 without",
        ),
        (dict(teacher="x"), "distill_weight: got 0.0"),
        (dict(dtype="float16"), "dtype: got 'float16'"),
        (dict(model=dataclasses.replace(TINY, dtype="bfloat16")), "model.dtype: got 'bfloat16'"),
        (dict(model=None), "model: got None, expected a T5Config"),
    ],
)
def test_bad_settings(language, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config_of(language, tmp_path, **settings)


def test_settings_of_numpy_and_paths_are_kept_as_a_record_can_hold_them(language, tmp_path):
    own = dict(steps=12, learning_rate=0.5, buckets=(16, 32), train_files=("train.tsv",))
    theirs = dict(
        steps=np.int64(12),
        learning_rate=np.float32(0.5),
        buckets=np.array([16, 32]),
        train_files=pathlib.Path("train.tsv"),
    )
    ours = config_of(language, tmp_path, **own)
    assert config_of(language, tmp_path, **theirs) == ours
    assert json.dumps([getattr(config_of(language, tmp_path, **theirs), name) for name in own])
    once = dict(train_files=map(str, ["train.tsv"]), buckets=iter((16, 32)))
    others = dict(dtype=np.dtype("float32"), prompts=jnp.bool_(False))
    named = dataclasses.replace(ours, dtype="float32")
    assert config_of(language, tmp_path, **own | once | others) == named
    with pytest.raises(ValueError, match="config: got {}, expected a TrainConfig"):
        train.fit({})


def test_files_without_text_make_no_vocabulary(language, tmp_path):
    (tmp_path / "blank.tsv").write_text("\t\n")
    config = config_of(language, tmp_path / "run", train_files=str(tmp_path / "blank.tsv"))
    with pytest.raises(ValueError, match="train_files: got no text, expected at least one line"):
        train.fit(config)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(train_files="missing.tsv"), "train_files: got '.*missing.tsv', expected a TSV file"),
        (dict(validation_files=["train.tsv", "gone"]), "validation_files: got '.*gone'"),
        (dict(batch_tokens=8), "train.tsv: batch_tokens: got 8"),
        (dict(vocabulary_size=5), "vocabulary_size: got 5, expected a number that fits"),
        (dict(teacher="nowhere", distill_weight=1.0), "nowhere"),
    ],
)
def test_bad_files_are_rejected_before_anything_compiles(
    language, tmp_path, settings, message, monkeypatch
):
    monkeypatch.setattr(jax, "jit", None)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train.fit(config_of(language, tmp_path, **settings))


def test_a_token_with_id_0_is_learnt(language, tmp_path):
    """It is none that pads a batch."""
    texts = (language / "train.tsv").read_text().split("\n")
    (tmp_path / "vocabulary.model").write_bytes(
        make_checkpoints.sentencepiece_model(texts, 40)
    )  # unknown is 0
    (tmp_path / "more.tsv").write_text("bara\tQ\n")
    settings = dict(
        vocabulary=str(tmp_path / "vocabulary.model"), validation_files=str(tmp_path / "more.tsv")
    )
    config = config_of(language, tmp_path / "run", **settings)
    run = train.Run(config, train.Checkpoints(tmp_path / "run"))
    (batches,) = run.validation.values()
    assert run.ids.vocabulary.encode("Q")[-1] == 0 and 0 in batches[0].targets


# The configurations.


@pytest.mark.parametrize("size", ["small", "base", "large", "xl", "xxl"])
def test_shapes_of_t5_1_1(size):
    gin.clear_config()
    gin.parse_config_file(str(CONFIGS.parent / f"t5_1_1/{size}.gin"))
    shape = gin.get_configurable(T5Config)()
    gin.clear_config()
    assert shape == PRESETS[f"t5_1_1/{size}"]


@pytest.mark.parametrize("name, parameters", [("ende_target", 36_056_960), ("smoke", None)])
def test_configurations(name, parameters, tmp_path):
    gin.clear_config()
    bindings = [f"DATA_DIR = '{tmp_path}'", f"OUTPUT_DIR = '{tmp_path}'"]
    gin.parse_config_files_and_bindings([str(CONFIGS / f"{name}.gin")], bindings)
    config = gin.get_configurable(training_config.TrainConfig)()
    gin.clear_config()
    assert isinstance(
        config, training_config.TrainConfig
    ) and config.data_dir == config.output_dir == str(tmp_path)
    assert config.paths("train_files")[0].parent in (tmp_path / "ende", tmp_path)
    shapes = jax.eval_shape(lambda: random_params(config.model))
    if parameters is not None:
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
        bundled = loader.load_shape("ende/target")
        assert dataclasses.replace(config.model, dropout_rate=0.0, dtype=bundled.dtype) == bundled
