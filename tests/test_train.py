"""Training: losses, distillation, schedule, resuming, signals, export, the configurations in `configs/train`."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import gin
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rich.console

from specdec_jax import checkpoints, data, losses, runs, train
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.t5 import T5, T5Config

CONFIGS = pathlib.Path(__file__).parent.parent / "configs" / "train"
TINY = T5Config(64, 16, 2, 8, 1, 1, 32)


def write_tsv(path, count, seed):
    """Sentences of one to three of 40 words, and their words in reverse."""
    words = [a + b for a in "ba ce di fo gu hal jem kin".split() for b in "ra te ni so mu".split()]
    rng = np.random.default_rng(seed)
    rows = [[words[i] for i in rng.integers(len(words), size=rng.integers(1, 4))] for _ in range(count)]
    path.write_text("".join(f"{' '.join(row)}\t{' '.join(reversed(row))}\n" for row in rows))


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_tsv(folder / "train.tsv", 400, 0)
    write_tsv(folder / "validation.tsv", 50, 1)
    write_tsv(folder / "more.tsv", 20, 2)
    return folder


def config_of(folder, output, **settings):
    defaults = dict(
        model=TINY, train_files=("train.tsv",), validation_files=("validation.tsv", "more.tsv"), output_dir=str(output),
        data_dir=str(folder), vocabulary_size=40, steps=12, warmup_steps=2, decay_steps=4, learning_rate=1e-2,
        batch_tokens=256, buckets=(16, 32), log_every=4, save_every=4, evaluate_every=6,
    )  # fmt: skip
    return train.TrainConfig(**{**defaults, **settings})


def random_params(config=TINY, seed=0):
    return LanguageModel.random(dataclasses.replace(config, dtype="float32"), seed).params


def random_batch(rows=3, length=6, seed=0):
    rng = np.random.default_rng(seed)
    inputs, targets = rng.integers(2, 64, (2, rows, length)).astype(np.int32)
    inputs[0, 4:], targets[1, 3:], targets[2, 5:] = 0, 0, 0
    return inputs, targets


def laws(params, batch):
    inputs, targets = batch
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return np.asarray(jax.nn.log_softmax(T5(TINY).apply({"params": params}, inputs, inputs > 0, shifted)), np.float64)


# Losses.


@pytest.mark.parametrize("smoothing, weight", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.6), (0.1, 1.0)])
def test_loss_is_the_sum_over_target_pieces(smoothing, weight):
    params, teacher, batch = random_params(), random_params(seed=1), random_batch()
    objective = losses.Objective(T5(TINY), smoothing, T5(TINY) if weight else None, weight)
    loss, metrics = losses.loss_fn(params, batch, objective, teacher if weight else None)
    log_q, log_p = laws(params, batch), laws(teacher, batch)
    expected, nll, pieces = 0.0, 0.0, 0
    for b, t in zip(*np.nonzero(batch[1])):
        reference = np.full(64, smoothing / 64)
        reference[batch[1][b, t]] += 1 - smoothing
        entropy = -np.sum(reference * log_q[b, t])
        divergence = np.sum(np.exp(log_p[b, t]) * (log_p[b, t] - log_q[b, t]))
        expected += (1 - weight) * entropy + weight * divergence
        nll -= log_q[b, t, batch[1][b, t]]
        pieces += 1
    assert metrics.pieces == pieces == 14
    np.testing.assert_allclose([metrics.loss, metrics.nll, loss], [expected, nll, expected / pieces], rtol=1e-5)


def test_divergence_from_itself_is_zero_with_a_zero_gradient():
    params, batch = random_params(), random_batch()
    objective = losses.Objective(T5(TINY), teacher=T5(TINY), distill_weight=1.0)
    loss, grads = jax.value_and_grad(lambda p: losses.loss_fn(p, batch, objective, params)[0])(params)
    assert abs(loss) < 1e-6
    assert max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads)) < 1e-5


def test_gradients_flow_to_the_student_only():
    params, teacher, batch = random_params(), random_params(seed=1), random_batch()
    objective = losses.Objective(T5(TINY), teacher=T5(TINY), distill_weight=0.5)
    loss = lambda student, teacher: losses.loss_fn(student, batch, objective, teacher)[0]
    student_grads, teacher_grads = jax.grad(loss, argnums=(0, 1))(params, teacher)
    assert all(np.any(g) for g in jax.tree.leaves(student_grads["decoder"]))
    assert not any(np.any(g) for g in jax.tree.leaves(teacher_grads))


# Steps.


def test_learning_rate_rises_stays_and_falls():
    config = train.TrainConfig(TINY, ("a",), ("b",), "c", vocabulary_size=64, steps=10, warmup_steps=2, decay_steps=4)
    got = [float(train.learning_rate(config, step)) / config.learning_rate for step in range(11)]
    np.testing.assert_allclose(got, [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0], rtol=1e-6)
    constant = dataclasses.replace(config, warmup_steps=0, decay_steps=0)
    assert [float(train.learning_rate(constant, step)) for step in (0, 9)] == pytest.approx([4e-3, 4e-3])


optimizer_of = functools.cache(train.make_optimizer)  # one object per configuration, so that nothing compiles twice


def steps(config, model, count, seed=0):
    """Parameters and metrics after `count` steps on one batch."""
    params, optimizer = random_params(model), optimizer_of(config)
    state = losses.TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    arguments = dict(objective=losses.Objective(T5(model), 0.1), optimizer=optimizer)
    history = []
    for _ in range(count):
        state, metrics = losses.train_step(state, random_batch(), None, seed, **arguments)
        history.append(float(metrics.nll / metrics.pieces))
    return state, history


def test_steps_lower_the_loss_and_a_zero_rate_of_dropout_uses_no_randomness():
    config = config_of(".", ".", warmup_steps=0, decay_steps=0, steps=30)
    state, history = steps(config, TINY, 30)
    assert history[-1] < history[0] - 1 and int(state.step) == 30
    assert steps(config, TINY, 3, seed=1)[1] == history[:3]


def test_dropout_depends_on_seed_and_step():
    config = config_of(".", ".", warmup_steps=0, decay_steps=0, steps=30, learning_rate=1e-30)
    model = dataclasses.replace(TINY, dropout_rate=0.3)
    dropped = steps(config, model, 3)[1]
    assert len(set(dropped)) == 3  # another mask in every step, the parameters are the same
    assert steps(config, model, 3)[1] == dropped
    assert steps(config, model, 3, seed=1)[1] != dropped


@pytest.mark.parametrize(
    "given", [dict(dtype="bfloat16"), dict(model=dataclasses.replace(TINY, matmul_dtype="bfloat16"))]
)
def test_rounded_training_keeps_float32_parameters(given):
    config = config_of(".", ".", warmup_steps=0, decay_steps=0, steps=20, **given)
    computing = train.computing(config, config.model)
    assert (computing.dtype, computing.matmul_dtype) == (config.dtype or "float32", config.model.matmul_dtype)
    state, history = steps(config, computing, 20)
    assert history[-1] < history[0] - 0.5
    kinds = {leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert kinds == {jnp.dtype("float32")}


def test_dtype_follows_the_backend(monkeypatch):
    config = config_of(".", ".", model=dataclasses.replace(TINY, matmul_dtype="bfloat16"))
    shape = lambda: (train.computing(config, config.model).dtype, train.computing(config, config.model).matmul_dtype)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert shape() == ("float32", "bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert shape() == ("bfloat16", None)


def test_a_checkpoint_has_the_known_names():
    """Runs are resumed by later versions: the tree of a state must not change."""
    state = jax.eval_shape(lambda: steps_state())
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(state)}
    kernel, embedding = "encoder/layers_0/mlp/wi_0/kernel", "token_embedder/embedding"
    muon, adam = "opt_state/1/inner_states/muon/inner_state", "opt_state/1/inner_states/adam/inner_state"
    assert {f"params/{kernel}", f"{muon}/0/mu/{kernel}", f"{adam}/0/mu/{embedding}", "step"} <= names
    assert {f"{adam}/0/nu/{embedding}", f"{muon}/0/count", f"{adam}/0/count"} <= names
    assert len(names) == 75


def steps_state():
    params = random_params()
    return losses.TrainState(params, train.make_optimizer(config_of(".", ".")).init(params), jnp.zeros((), jnp.int32))


# Settings.


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(steps=5), r"steps: got 5, expected at least warmup_steps \+ decay_steps = 6"),
        (dict(train_files=()), "train_files: got .*, expected at least one file"),
        (dict(learning_rate=0.0), "learning_rate: got 0.0"),
        (dict(learning_rate=float("nan")), "learning_rate: got nan"),
        (dict(label_smoothing=1.0), "label_smoothing: got 1.0"),
        (dict(save_every=0), "save_every: got 0"),
        (dict(warmup_steps=-1), "warmup_steps: got -1"),
        (dict(vocabulary_size=65), "vocabulary_size: got 65, expected at most model.vocab_size = 64"),
        (dict(distill_weight=0.5), "distill_weight: got 0.5, expected a number in .* with a teacher, 0 without"),
        (dict(teacher="x"), "distill_weight: got 0.0"),
        (dict(dtype="float16"), "dtype: got 'float16'"),
        (dict(model=dataclasses.replace(TINY, dtype="bfloat16")), "model.dtype: got 'bfloat16'"),
        (dict(model=None), "model: got None, expected a T5Config"),
    ],
)
def test_bad_settings(folder, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config_of(folder, tmp_path, **settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(train_files="missing.tsv"), "train_files: got '.*missing.tsv', expected a TSV file"),
        (dict(validation_files=["train.tsv", "gone"]), "validation_files: got '.*gone'"),
        (dict(buckets=(16, 8)), "train.tsv: buckets: got"),
        (dict(batch_tokens=8), "train.tsv: batch_tokens: got 8"),
        (dict(vocabulary_size=5), "vocabulary_size: got 5, expected a number that fits"),
        (dict(teacher="nowhere", distill_weight=1.0), "nowhere"),
    ],
)
def test_bad_files_are_told_before_anything_compiles(folder, tmp_path, settings, message, monkeypatch):
    monkeypatch.setattr(jax, "jit", None)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train.fit(config_of(folder, tmp_path, **settings))


# Runs.


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run of 12 steps, how often the step was compiled, and its parameters."""
    config = config_of(folder, tmp_path_factory.mktemp("run"), buckets=(8, 16))
    before = losses.train_step._cache_size()
    params = train.fit(config)
    return config, losses.train_step._cache_size() - before, params


def records(output):
    return [json.loads(line) for line in (pathlib.Path(output) / "log.jsonl").read_text().splitlines()]


def test_a_run_logs_and_writes_a_model(finished, folder):
    config, compiled, params = finished
    output, log = pathlib.Path(config.output_dir), records(config.output_dir)
    assert compiled == 2  # once for each bucket
    training, validation = ([r for r in log if name in r] for name in ("pieces_per_second", "validation_loss"))
    assert [r["step"] for r in training] == [4, 8, 12] and [r["step"] for r in validation] == [6, 12]
    assert training[-1]["loss"] < training[0]["loss"] and all(r["pieces_per_second"] > 0 for r in training)
    assert set(validation[0]["validation_losses"]) == {"validation.tsv", "more.tsv"}
    assert sorted(os.listdir(output / "checkpoints")) == ["12", "8"]
    model = checkpoints.load(output / "model")
    assert model.vocabulary.size == 40 and (model.config.matmul_dtype, model.config.dropout_rate) == (None, 0)
    text = model.vocabulary.encode("bara ceni") + [1]
    got, tokens = model.logits([text], [[0] + text]), np.array([text], np.int32)
    expected = T5(TINY).apply({"params": params}, tokens, tokens > 0, np.array([[0] + text]))
    assert model.logits([text], [[0] + text]).dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=0.05)  # the parameters are stored in bfloat16


def test_export_takes_the_best_or_the_newest(finished, tmp_path):
    config, _, params = finished
    output = pathlib.Path(config.output_dir)
    saved = runs.Checkpoints(output)
    assert saved.best.all_steps() == [12]
    worse = jax.tree.map(jnp.zeros_like, params)
    assert not saved.keep_best(13, worse, 99.0) and saved.best.all_steps() == [12]
    better = jax.tree.map(jnp.ones_like, params)
    lowest = records(output)[-1]["validation_loss"] - 1
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", output, copy], check=True)
    saved = runs.Checkpoints(copy)
    assert saved.keep_best(3, better, lowest) and saved.best.all_steps() == [3]  # before the former best
    assert saved.keep_best(3, worse, lowest - 1) and saved.best.all_steps() == [3]
    config = dataclasses.replace(config, output_dir=str(copy))
    (copy / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    train.export(copy, tmp_path / "best", dtype=None)
    train.export(copy, tmp_path / "newest", "newest", dtype=None)
    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert same(checkpoints.load(tmp_path / "best").params, worse)
    assert same(checkpoints.load(tmp_path / "newest").params, params)
    with pytest.raises(ValueError, match="which: got 'last'"):
        train.export(copy, tmp_path / "x", "last")
    with pytest.raises(ValueError, match="got a folder without config.json"):
        train.export(tmp_path, tmp_path / "x")


def test_a_run_goes_on_with_another_schedule_but_no_other_model(finished, folder, tmp_path, capsys):
    output = tmp_path / "run"
    subprocess.run(["cp", "-r", finished[0].output_dir, output], check=True)
    config = config_of(folder, output, steps=20, decay_steps=8)
    train.fit(config)
    said = capsys.readouterr().err
    assert "resumed at step 12 of 20" in said and "changed since step 12: steps 12 -> 20" in said
    assert [r["step"] for r in records(output)] == [4, 6, 8, 12, 12, 16, 18, 20, 20]
    train.fit(config)
    assert "resumed at step 20 of 20" in capsys.readouterr().err and len(records(output)) == 9
    with pytest.raises(ValueError, match="steps: got 12, expected at least the 20 steps"):
        train.fit(dataclasses.replace(config, steps=12))
    with pytest.raises(ValueError, match="model: got .*, expected that of the run"):
        train.fit(dataclasses.replace(config, model=dataclasses.replace(TINY, mlp_dim=48)))
    with pytest.raises(ValueError, match="vocabulary: got '40 pieces in .*', expected vocabulary_size = 39"):
        train.fit(dataclasses.replace(config, vocabulary_size=39))


def test_distillation_brings_the_student_nearer_to_its_teacher(finished, folder, tmp_path):
    teacher = str(pathlib.Path(finished[0].output_dir) / "model")
    student = T5Config(64, 16, 2, 8, 1, 1, 16)
    config = config_of(folder, tmp_path / "run", model=student, teacher=teacher, distill_weight=1.0, steps=24)
    train.fit(config)
    log = [r["validation_loss"] for r in records(tmp_path / "run") if "validation_loss" in r]
    assert 0 < log[-1] < 0.5 * log[0]
    assert (
        checkpoints.load(tmp_path / "run/model").vocabulary.fingerprint()
        == checkpoints.load(teacher).vocabulary.fingerprint()
    )
    other = str(tmp_path / "other.model")
    texts = (folder / "train.tsv").read_text().split("\n")
    pathlib.Path(other).write_bytes(data.SentencePieceVocabulary.train(texts, 38).model)
    with pytest.raises(ValueError, match="expected the teacher's pieces"):
        train.fit(dataclasses.replace(config, output_dir=str(tmp_path / "c"), vocabulary=other, vocabulary_size=38))
    with pytest.raises(ValueError, match="teacher: got '64 logits', expected model.vocab_size = 72"):
        wide = dataclasses.replace(student, vocab_size=72)
        train.fit(dataclasses.replace(config, output_dir=str(tmp_path / "d"), model=wide))


def test_a_loss_that_is_not_finite_stops_the_run(folder, tmp_path):
    config = config_of(folder, tmp_path, learning_rate=1e30, warmup_steps=0, save_every=1, log_every=1)
    with pytest.raises(ValueError, match="lower learning_rate"):
        train.fit(config)


def test_the_log_loses_what_a_kill_left_behind(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 2, "loss": 1}\n{"step": 6, "loss": 1}\n{"step": 3, "validation_loss": 1}\n{"step": 4, "lo')
    runs.trim_log(log, 4)
    assert log.read_text() == '{"step": 2, "loss": 1}\n{"step": 3, "validation_loss": 1}\n'


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_step_loss_speed_and_time_left(tmp_path, terminal):
    console = rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with runs.Reporter(console, tmp_path / "log.jsonl", 10, 20) as reporter:
        reporter.advance(15)
        reporter.training(15, 3.25, 1234.5)
        reporter.validation(15, 3.5, {"a": 3.0, "b": 4.0}, best=True)
    said = console.file.getvalue()
    assert "loss 3.250, 1,234 pieces/s" in said and "validation loss 3.5000 (a 3.0000, b 4.0000) (best)" in said
    assert ("15/20" in said) and (("━" in said) == terminal) and re.search(r"[\d-]:[\d-]{2}:[\d-]{2}", said)
    assert [r["step"] for r in records(tmp_path)] == [15, 15]


# Being killed.


@pytest.fixture
def command(folder):
    """Starts the command line in a process of its own."""
    processes = []

    def start(output):
        arguments = [
            f"--gin_file={CONFIGS / 'smoke.gin'}",
            f'--gin.DATA_DIR="{folder}"',
            f'--gin.OUTPUT_DIR="{output}"',
        ]
        settings = {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "specdec_jax.cli", "train", *arguments],
                stderr=subprocess.PIPE,
                text=True,
                cwd=CONFIGS.parent.parent,
                env={**os.environ, **settings},
            )  # fmt: skip
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def final_params(output, step=40):
    manager = ocp.CheckpointManager(output / "checkpoints")
    assert manager.latest_step() == step
    return manager.restore(step)["params"]


def wait_for(process, condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(process.communicate()[1])
        time.sleep(0.0005)


def unfinished(output):
    """Whether a checkpoint is being written."""
    for folder in (output / "checkpoints").glob("*"):
        if folder.name != "2" and not (folder / "_CHECKPOINT_METADATA").exists():
            return True
    return False


def test_a_killed_and_an_interrupted_run_end_as_an_uninterrupted_one(command, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    reference = command(straight)
    process = command(broken)
    wait_for(process, lambda: unfinished(broken))
    process.kill()  # while a checkpoint is being written
    assert process.communicate() and process.returncode == -signal.SIGKILL
    process = command(broken)
    finished = lambda: {int(p.name) for p in (broken / "checkpoints").glob("*[0-9]")}
    first = max(finished(), default=0)
    wait_for(process, lambda: max(finished(), default=0) > first + 4)
    process.terminate()
    said = process.communicate()[1]
    assert process.returncode == 130 and "is saved; the same command goes on from there" in said, said
    process = command(broken)
    said = process.communicate()[1]
    assert process.returncode == 0 and "resumed at step" in said, said
    said = reference.communicate()[1]
    assert reference.returncode == 0, said
    assert jax.tree.all(jax.tree.map(np.array_equal, final_params(straight), final_params(broken)))
    validation = lambda output: [r["validation_losses"] for r in records(output) if "validation_losses" in r]
    assert validation(straight) == validation(broken) and len(validation(straight)) == 2


# The configurations.


@pytest.mark.parametrize(
    "name, parameters", [("ende_target", 17_111_808), ("ende_drafter", 2_016_384), ("smoke", None)]
)
def test_configurations(name, parameters, tmp_path):
    gin.clear_config()
    bindings = [f"DATA_DIR = '{tmp_path}'", f"OUTPUT_DIR = '{tmp_path}'", "TEACHER = 'teacher'"]
    gin.parse_config_files_and_bindings([str(CONFIGS / f"{name}.gin")], bindings)
    config = gin.get_configurable(train.TrainConfig)()
    gin.clear_config()
    assert isinstance(config, train.TrainConfig) and config.data_dir == config.output_dir == str(tmp_path)
    assert config.paths("train_files")[0].parent in (tmp_path / "ende", tmp_path)
    shapes = jax.eval_shape(lambda: random_params(config.model))
    if parameters is not None:
        assert train.parameter_count(shapes) == parameters
        assert parameters == 17_111_808 or 8 * parameters <= 17_111_808
