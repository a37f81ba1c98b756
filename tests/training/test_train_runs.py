"""Runs of training: the log, the best model, resuming, distillation, signals and kills."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import time
import types

import jax
import jax.numpy as jnp
import make_checkpoints
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiers
from devices import SPECDEC, fill, small_disk
from terminal import as_stderr
from toy_training import CONFIGS, TINY, config_of

import specdec_jax as sd
from specdec_jax.checkpoints import converter, loader
from specdec_jax.commands import main
from specdec_jax.files import progress
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from specdec_jax.tokenizers import vocabularies
from specdec_jax.training import corpus, losses, run_folder, run_vocabulary, train

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def finished(language, tmp_path_factory):
    """A run of 12 steps, how often the step was compiled, and its parameters."""
    config = config_of(language, tmp_path_factory.mktemp("run"), buckets=(8, 16))
    before = losses.train_step._cache_size()
    params = train.fit(config)
    return config, losses.train_step._cache_size() - before, params


def records(output):
    return [
        json.loads(line) for line in (pathlib.Path(output) / "log.jsonl").read_text().splitlines()
    ]


def test_a_run_logs_and_writes_a_model(finished, language):
    config, compiled, params = finished
    output, log = pathlib.Path(config.output_dir), records(config.output_dir)
    assert compiled == 2  # once for each bucket
    training, validation = (
        [r for r in log if name in r] for name in ("tokens_per_second", "validation_loss")
    )
    assert [r["step"] for r in training] == [4, 8, 12] and [r["step"] for r in validation] == [
        6,
        12,
    ]
    assert training[-1]["loss"] < training[0]["loss"] and all(
        r["tokens_per_second"] > 0 for r in training
    )
    assert set(validation[0]["validation_losses"]) == {"validation.tsv", "more.tsv"}
    assert sorted(os.listdir(output / "checkpoints")) == ["12", "8"]
    model = loader.load(output / "model")
    assert model.vocabulary.size == 40 and (
        model.config.matmul_dtype,
        model.config.dropout_rate,
    ) == (None, 0)
    text = model.vocabulary.encode("bara ceni") + [1]
    got, tokens = model.logits([text], [[0] + text]), np.array([text], np.int32)
    apply = jax.jit(
        lambda params: TINY.module().apply(
            {"params": params}, tokens, tokens > 0, np.array([[0] + text])
        )
    )
    assert model.logits([text], [[0] + text]).dtype == np.float32
    np.testing.assert_allclose(
        got, apply(params), atol=0.05
    )  # the parameters are stored in bfloat16


def test_export_takes_the_best_or_the_newest(finished, tmp_path):
    config, _, params = finished
    output = pathlib.Path(config.output_dir)
    saved = run_folder.Checkpoints(output)
    assert saved.best.all_steps() == [12]
    worse = jax.tree.map(jnp.zeros_like, params)
    assert not saved.keep_best(13, worse, 99.0) and saved.best.all_steps() == [12]
    better = jax.tree.map(jnp.ones_like, params)
    lowest = records(output)[-1]["validation_loss"] - 1
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", output, copy], check=True)
    saved = run_folder.Checkpoints(copy)
    assert saved.keep_best(3, better, lowest) and saved.best.all_steps() == [
        3
    ]  # before the former best
    assert saved.keep_best(3, worse, lowest - 1) and saved.best.all_steps() == [3]
    assert not saved.keep_best(14, params, math.nan) and saved.best.all_steps() == [3]
    assert not run_folder.Checkpoints(tmp_path / "empty").keep_best(1, params, math.nan)
    gone = dataclasses.replace(
        config, output_dir=str(tmp_path / "gone")
    )  # the copy of a run that is no more
    run_folder.record_settings(gone, copy)
    defaults = sd.ModelDefaults(forced_eos_token_id=1)
    run_vocabulary.RunVocabulary.read(copy)._replace(generation_config=defaults).write(copy)
    train.export(copy, tmp_path / "best", dtype=None)
    assert loader.load(tmp_path / "best").generation_config == defaults
    train.export(copy, tmp_path / "newest", "newest", dtype=None)

    def same(a, b):
        return all(
            np.array_equal(x, y)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )

    assert same(loader.load(tmp_path / "best").params, worse)
    assert same(loader.load(tmp_path / "newest").params, params)
    with pytest.raises(ValueError, match="which: got 'last'"):
        train.export(copy, tmp_path / "x", "last")
    with pytest.raises(ValueError, match="got a folder without config.json"):
        train.export(tmp_path, tmp_path / "x")


def test_what_is_measured_depends_on_the_languages():
    run = train.Run.__new__(train.Run)
    run.objective, run.saved = types.SimpleNamespace(masks=0), types.SimpleNamespace(select="loss")
    described = []
    for source, target in ((None, None), ("de_DE", None), ("de_DE", "en_XX"), ("de_DE", "en_XX")):
        run.config = types.SimpleNamespace(source_language=source, target_language=target)
        described.append(run._describe_figure())
    assert len(set(described)) == 3 and described[-1] == described[-2]


@pytest.mark.slow
def test_the_best_on_other_validation_files_is_not_compared(finished, language, tmp_path):
    output = tmp_path / "run"
    subprocess.run(["cp", "-r", finished[0].output_dir, output], check=True)
    saved = run_folder.Checkpoints(output)
    saved.measured = {"validation_files": "of others"}
    assert saved.keep_best(3, finished[2], -99.0) and saved.best.all_steps() == [3]
    train.fit(config_of(language, output))
    assert run_folder.Checkpoints(output).best.best_step() == 3, "nothing was validated since"
    train.fit(config_of(language, output, steps=16))
    again = run_folder.Checkpoints(output)
    assert again.best.all_steps() == [16]
    metrics = again.best.metrics(16)
    again.measured = {name: metrics[name] for name in ("validation_files", "figure")}
    assert all(again.measured.values()) and not again.keep_best(17, finished[2], 99.0)


@pytest.mark.slow
def test_a_run_resumes_with_another_schedule_but_no_other_model(
    finished, language, tmp_path, capsys
):
    output = tmp_path / "run"
    subprocess.run(["cp", "-r", finished[0].output_dir, output], check=True)
    config = config_of(language, output, steps=20, decay_steps=8)
    train.fit(config)
    printed = capsys.readouterr().err
    assert (
        "resumed at step 12 of 20" in printed and "changed since step 12: steps 12 -> 20" in printed
    )
    assert [r["step"] for r in records(output)] == [4, 6, 8, 12, 12, 16, 18, 20, 20]
    train.fit(config)
    assert "resumed at step 20 of 20" in capsys.readouterr().err and len(records(output)) == 9
    digests = json.loads((output / "contents.json").read_text())
    assert set(digests) == {"vocabulary", "files"}
    assert set(digests["files"]) == {"train.tsv", "validation.tsv", "more.tsv"}
    others = {**digests, "files": {**digests["files"], "train.tsv": "of others"}}
    (output / "contents.json").write_text(json.dumps(others))
    train.fit(config)
    assert "changed since step 20: contents of train.tsv\n" in capsys.readouterr().err
    assert json.loads((output / "contents.json").read_text()) == digests
    (output / "contents.json").write_text(json.dumps({**digests, "vocabulary": "of others"}))
    with pytest.raises(
        ValueError,
        match="vocabulary: got another one, expected the vocabulary with which the run in .* began",
    ):
        train.fit(config)
    with pytest.raises(ValueError, match="steps: got 12, expected at least the 20 steps"):
        train.fit(dataclasses.replace(config, steps=12))
    with pytest.raises(ValueError, match="model: got .*, expected that of the run"):
        train.fit(dataclasses.replace(config, model=dataclasses.replace(TINY, mlp_dim=48)))
    with pytest.raises(
        ValueError, match="vocabulary: got 40 tokens of .*, expected vocabulary_size = 39"
    ):
        train.fit(dataclasses.replace(config, vocabulary_size=39))


@pytest.mark.slow
def test_distillation_brings_the_student_nearer_to_its_teacher(finished, language, tmp_path):
    teacher = str(pathlib.Path(finished[0].output_dir) / "model")
    student = T5Config(64, 16, 2, 8, 1, 1, 16)
    config = config_of(
        language, tmp_path / "run", model=student, teacher=teacher, distill_weight=1.0, steps=24
    )
    train.fit(config)
    log = [r["validation_loss"] for r in records(tmp_path / "run") if "validation_loss" in r]
    assert 0 < log[-1] < 0.5 * log[0]
    assert (
        loader.load(tmp_path / "run/model").vocabulary.fingerprint()
        == loader.load(teacher).vocabulary.fingerprint()
    )
    other = str(tmp_path / "other.model")
    texts = (language / "train.tsv").read_text().split("\n")
    pathlib.Path(other).write_bytes(vocabularies.SentencePieceVocabulary.train(texts, 38).model)
    with pytest.raises(ValueError, match="expected the teacher's tokens"):
        train.fit(
            dataclasses.replace(
                config, output_dir=str(tmp_path / "c"), vocabulary=other, vocabulary_size=38
            )
        )
    with pytest.raises(
        ValueError, match="teacher: got '64 logits', expected model.vocab_size = 72"
    ):
        wide = dataclasses.replace(student, vocab_size=72)
        train.fit(dataclasses.replace(config, output_dir=str(tmp_path / "d"), model=wide))


@pytest.mark.slow
def test_a_teachers_sentinels_and_special_ids_stay(finished, language, tmp_path, monkeypatch):
    texts = (language / "train.tsv").read_text().split("\n")
    vocabulary = vocabularies.SentencePieceVocabulary(
        make_checkpoints.sentencepiece_model(texts, 40), 5
    )
    converter.save(LanguageModel(TINY, finished[2], vocabulary, eos_ids=(2,)), tmp_path / "teacher")
    seen, make = [], corpus.BucketedBatches
    monkeypatch.setattr(
        corpus,
        "BucketedBatches",
        lambda pairs, *arguments: (seen.extend(pairs), make(pairs, *arguments))[1],
    )
    config = config_of(
        language,
        tmp_path / "run",
        teacher=str(tmp_path / "teacher"),
        distill_weight=1.0,
        vocabulary_size=45,
        steps=1,
        warmup_steps=0,
        decay_steps=0,
        buckets=(32,),
    )
    train.fit(config)
    assert seen and all(ids[-1] == 2 and 2 not in ids[:-1] for pair in seen for ids in pair)
    student = loader.load(tmp_path / "run/model")
    assert (
        student.vocabulary.fingerprint() == vocabulary.fingerprint()
        and student.vocabulary.extra_ids == 5
    )
    assert student.eos_ids == student.vocabulary.eos_ids == (2,)
    with pytest.raises(
        ValueError, match="got 40 tokens of the teacher and 5 sentinels, expected vocabulary_size"
    ):
        train.fit(
            dataclasses.replace(config, output_dir=str(tmp_path / "other"), vocabulary_size=40)
        )
    converter.save(
        LanguageModel(TINY, finished[2], vocabulary, start_token=3), tmp_path / "teacher"
    )
    train.fit(dataclasses.replace(config, output_dir=str(tmp_path / "another")))
    assert loader.load(tmp_path / "another/model").start_token == 3


@pytest.mark.parametrize("loss, scale, step", [(np.nan, 1.0, 4), (1.0, np.inf, 3)])
def test_a_run_that_is_not_finite_stops(language, tmp_path, monkeypatch, loss, scale, step):
    def diverge(state, *arguments, **more):
        params = jax.tree.map(lambda leaf: leaf * scale, state.params)
        return state.replace(params=params), losses.Metrics(
            np.float32(loss), np.float32(1), np.float32(1)
        )

    monkeypatch.setattr(train, "train_step", diverge)
    with pytest.raises(
        ValueError, match=f"step {step}: got .* not finite|step {step}: got a loss of nan.* lower"
    ):
        train.fit(config_of(language, tmp_path, save_every=3))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == (["3"] if step == 4 else [])


def test_the_log_loses_what_a_kill_left_behind(tmp_path):
    log = tmp_path / "log.jsonl"
    others = "5\n" + '{"x": 1}\n' + '{"step": "a"}\n' + "[" * 20_000 + "\n"
    log.write_text(
        '{"step": 2, "loss": 1}\n{"step": 6, "loss": 1}\n'
        + others
        + '{"step": 3, "validation_loss": 1}\n{"step": 4, "lo'
    )
    run_folder.trim_log(log, 4)
    assert log.read_text() == '{"step": 2, "loss": 1}\n{"step": 3, "validation_loss": 1}\n'


@pytest.mark.parametrize(
    "text", ["[1]", '"x"', "null", "{", "[" * 20_000, "{} {}"], ids=str.__len__
)
def test_damaged_files_of_a_run_are_named(language, tmp_path, text):
    config = config_of(language, tmp_path)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "contents.json").write_text(text)
    for read in (
        lambda: run_folder.list_changed_settings(config, tmp_path, 1, lambda settings: settings),
        lambda: run_folder.record_contents(tmp_path, 1, "vocabulary", {}),
        lambda: train.export(tmp_path, tmp_path / "model"),
    ):
        with pytest.raises(ValueError, match=r"(config|contents).json: got .*, expected an object"):
            read()


def test_a_training_file_may_be_called_vocabulary(tmp_path):
    (tmp_path / "vocabulary").write_text("a\tb\n")
    files = {"vocabulary": tmp_path / "vocabulary"}
    assert run_folder.record_contents(tmp_path, None, "first", files) == []
    with pytest.raises(
        ValueError,
        match="vocabulary: got another one, expected the vocabulary with which the run in",
    ):
        run_folder.record_contents(tmp_path, 1, "second", files)
    (tmp_path / "vocabulary").write_text("c\td\n")
    assert run_folder.record_contents(tmp_path, 1, "first", files) == [
        "changed since step 1: contents of vocabulary"
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_step_loss_speed_and_time_left(tmp_path, monkeypatch, capsys, terminal):
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    shown = as_stderr(monkeypatch) if terminal else contextlib.nullcontext([])
    with shown as got, run_folder.Reporter(tmp_path / "log.jsonl", 10, 20) as reporter:
        reporter.training(15, 3.25, 1234.5)
        reporter.validation(15, 3.5, {"a": 3.0, "b": 4.0}, best=True)
        reporter.advance(20)
    err = "".join(got) if terminal else capsys.readouterr().err
    assert "validation loss 3.5000 (a 3.0000, b 4.0000) (best)" in err
    assert "20 of 20 steps, loss 3.250, 1,234 tokens/s" in err
    assert ("━" in err) == terminal
    assert [r["step"] for r in records(tmp_path)] == [15, 15]


# Being killed.


@tiers.parametrize(
    "busy, step", [("report", 4), ("validate", 6), ("save", 8), ("save at the end", 12)], first=1
)
def test_a_signal_while_the_run_is_busy_with_something_else_saves_the_step(
    language, tmp_path, monkeypatch, capsys, busy, step
):
    config = config_of(language, tmp_path, save_every=8 if busy == "save" else 100)
    metrics = losses.Metrics(np.float32(1), np.float32(1), np.float32(1))
    monkeypatch.setattr(
        train, "train_step", lambda state, *_, **__: (state.replace(step=state.step + 1), metrics)
    )

    def interrupt(number, *_):
        if number == step:
            signal.raise_signal(signal.SIGTERM)

    save = train.Run.save
    monkeypatch.setattr(
        train.Run, "validate", lambda run, state, *at: busy == "validate" and interrupt(*at)
    )
    if busy == "report":
        monkeypatch.setattr(
            run_folder.Reporter, "training", lambda reporter, *at, **more: interrupt(*at)
        )
    if busy.startswith("save"):
        monkeypatch.setattr(
            train.Run, "save", lambda run, state, at: (save(run, state, at), interrupt(at))
        )
    with pytest.raises(KeyboardInterrupt) as raised:
        train.fit(config)
    assert raised.value.args == (signal.SIGTERM,), "by which the command says 143"
    assert os.listdir(tmp_path / "checkpoints") == [str(step)]
    assert f"interrupted: step {step} is saved" in capsys.readouterr().err
    assert (
        int(run_folder.Checkpoints(tmp_path).restore(train._make_abstract_state(config)).step)
        == step
    )


@pytest.mark.slow
def test_a_full_disk_ends_a_run_in_one_line_and_it_resumes_when_there_is_space(
    language, tmp_path, monkeypatch
):
    metrics = losses.Metrics(np.float32(1), np.float32(1), np.float32(1))
    monkeypatch.setattr(
        train, "train_step", lambda state, *_, **__: (state.replace(step=state.step + 1), metrics)
    )
    monkeypatch.setattr(train.Run, "validate", lambda *_: None)
    with small_disk(tmp_path / "disk", "4m") as disk:
        config = config_of(language, disk / "run", save_every=2)
        with pytest.raises(
            OSError,
            match=r"No space left on device \(0.0 MB free, 1.1 MB needed\): '.*/run/checkpoints'",
        ):
            saves = []
            keep = run_folder.Checkpoints.keep_newest

            def full_at_the_second(saved, step, state):
                saves.append(step)
                if len(saves) == 2:
                    fill(disk, leave=20_000)
                keep(saved, step, state)

            monkeypatch.setattr(run_folder.Checkpoints, "keep_newest", full_at_the_second)
            train.fit(config)
        assert os.listdir(disk / "run/checkpoints") == ["2"]
        (disk / "filler").unlink()
        monkeypatch.setattr(run_folder.Checkpoints, "keep_newest", keep)
        train.fit(config)
        assert (
            int(
                run_folder.Checkpoints(disk / "run")
                .restore(train._make_abstract_state(config))
                .step
            )
            == config.steps
        )


@pytest.fixture
def command(language, quick_environment):
    """Starts the command line in a process of its own."""
    processes = []

    def start(output):
        arguments = [
            f"--gin_file={CONFIGS / 'smoke.gin'}",
            f'--gin.DATA_DIR="{language}"',
            f'--gin.OUTPUT_DIR="{output}"',
        ]
        settings = {**quick_environment, "XDG_CACHE_HOME": str(language / "cache")}
        processes.append(
            subprocess.Popen(
                [*SPECDEC, "train", *arguments],
                stderr=subprocess.PIPE,
                text=True,
                cwd=CONFIGS.parent.parent,
                env={**os.environ, **settings},
            )
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
    for path in (output / "checkpoints").glob("*"):
        if path.name != "2" and not (path / "_CHECKPOINT_METADATA").exists():
            return True
    return False


@pytest.mark.slow
def test_settings_are_written_when_a_run_starts(finished, language, tmp_path, monkeypatch, capsys):
    """A run that stops in its first step has settings, too; a rejected one changes none."""

    def command(output, *settings):
        names = [
            f"--gin.DATA_DIR={str(language)!r}",
            f"--gin.OUTPUT_DIR={str(output)!r}",
            *settings,
        ]
        return main.main(
            ["train", "--compilation_cache_dir=", f"--gin_file={CONFIGS / 'smoke.gin'}", *names]
        )

    def stops(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_take_steps", stops)
    assert command(tmp_path / "run") == 130
    written, config = (tmp_path / "run" / name for name in ("operative.gin", "config.json"))
    before = config.read_text()
    config.unlink()
    assert (
        main.main(
            ["train", "--compilation_cache_dir=", f"--gin_file={written}", "--gin_search_paths=/"]
        )
        == 130
    )
    assert config.read_text() == before, "what was written gives the same settings"
    assert command(tmp_path / "rejected", "--gin.TrainConfig.train_files=['none.tsv']") == 2
    assert not (tmp_path / "rejected" / "operative.gin").exists()
    shutil.copytree(finished[0].output_dir, tmp_path / "another")
    kept = [tmp_path / "another" / path.name for path in (config, written)]
    kept[1].write_text("# its own")
    before = [path.read_text() for path in kept]
    capsys.readouterr()
    assert command(tmp_path / "another") == 2
    assert "expected vocabulary_size = 48" in capsys.readouterr().err
    assert [path.read_text() for path in kept] == before


@pytest.mark.slow
def test_a_killed_and_an_interrupted_run_end_as_an_uninterrupted_one(command, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    reference = command(straight)
    process = command(broken)
    wait_for(process, lambda: unfinished(broken))
    process.kill()  # while a checkpoint is being written
    assert process.communicate() and process.returncode == -signal.SIGKILL
    assert (broken / "operative.gin").is_file()
    process = command(broken)

    def finished():
        return {int(p.name) for p in (broken / "checkpoints").glob("*[0-9]")}

    first = max(finished(), default=0)
    wait_for(process, lambda: max(finished(), default=0) > first + 4)
    process.terminate()
    printed = process.communicate()[1]
    assert (
        process.returncode == 143 and "is saved; the same command resumes from there" in printed
    ), printed
    process = command(broken)
    printed = process.communicate()[1]
    assert process.returncode == 0 and "resumed at step" in printed, printed
    printed = reference.communicate()[1]
    assert reference.returncode == 0, printed
    assert jax.tree.all(jax.tree.map(np.array_equal, final_params(straight), final_params(broken)))

    def validation(output):
        return [r["validation_losses"] for r in records(output) if "validation_losses" in r]

    assert validation(straight) == validation(broken) and len(validation(straight)) == 2
