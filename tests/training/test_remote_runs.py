"""Runs of training whose folder lies in a store: they resume from what was copied last."""

import dataclasses
import json

import fsspec
import jax
import numpy as np
import pytest
import stores
from toy_training import config_of, write_language

import specdec_jax as sd
from specdec_jax.commands import distill, main
from specdec_jax.files import mirrors
from specdec_jax.training import heads, train
from specdec_jax.training.sequence_distillation import DistillConfig

store = stores.store
SETTINGS = dict(buckets=(16,), warmup_steps=0, decay_steps=0)
pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def cache(store, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


FLAGS = (
    "target source_files validation_files data_dir output_dir drafter_shape max_new_tokens"
    " max_sources shard_size buckets batch_tokens warmup_steps decay_steps dtype"
).split()


def write_flag(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def assert_same(one, other):
    assert jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_a_run_resumes_from_a_store(tmp_path, capsys):
    write_language(tmp_path)
    url = "memory://runs/one"
    whole = train.fit(config_of(tmp_path, tmp_path / "run", **SETTINGS))
    train.fit(config_of(tmp_path, url, steps=4, **SETTINGS))
    assert f"wrote {url}/model: " in capsys.readouterr().err
    resumed = train.fit(config_of(tmp_path, url, **SETTINGS))
    assert "resumed at step 4 of 12" in capsys.readouterr().err
    assert_same(whole, resumed)
    local, remote = (sd.load(path) for path in (tmp_path / "run/model", f"{url}/model"))
    assert local.fingerprint == remote.fingerprint
    log = [json.loads(line) for line in fsspec.open(f"{url}/log.jsonl").open()]
    assert log[-1]["step"] == 12
    steps = {name.split("/")[1] for name in stores.list_urls(url) if "checkpoints/" in name}
    assert steps == {"8", "12"}, "the two newest"
    train.export(url, "memory://runs/newest", which="newest", dtype=None)
    assert sd.load("memory://runs/newest", "float32").config == local.config


def test_a_kill_loses_what_was_not_copied(tmp_path, monkeypatch, capsys):
    write_language(tmp_path)
    url, copied = "memory://runs/two", []
    whole = train.fit(config_of(tmp_path, tmp_path / "run", **SETTINGS))
    copy = mirrors.copy_folder

    def end_at_the_second(path):
        copied.append(path)
        if len(copied) == 2:
            raise SystemError("killed")
        copy(path)

    monkeypatch.setattr(mirrors, "copy_folder", end_at_the_second)
    with pytest.raises(SystemError):
        train.fit(config_of(tmp_path, url, **SETTINGS))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    capsys.readouterr()
    resumed = train.fit(config_of(tmp_path, url, **SETTINGS))
    assert "resumed at step 4 of 12" in capsys.readouterr().err
    assert_same(whole, resumed)


def test_distillation_and_heads_in_a_store(tmp_path, capsys):
    write_language(tmp_path)
    train.fit(config_of(tmp_path, "memory://runs/target", steps=4, **SETTINGS))
    given = dict(data_dir=str(tmp_path), buckets=(16,), batch_tokens=128, warmup_steps=0)
    given |= dict(decay_steps=0, dtype="float32", validation_files=("validation.tsv",))
    settings = DistillConfig(
        target="memory://runs/target/model",
        source_files=("train.tsv",),
        output_dir="memory://runs/drafter",
        drafter_shape=(8, 2, 4, 0, 1, 16),
        max_new_tokens=8,
        max_sources=24,
        shard_size=8,
        steps=2,
        **given,
    )
    fields = (field for field in dataclasses.fields(settings) if field.name in ("steps", *FLAGS))
    flags = [f"--{one.name}={write_flag(getattr(settings, one.name))}" for one in fields]
    assert main.main(["distill", *flags, "--compilation_cache_dir="]) == 0
    printed = capsys.readouterr().err
    assert "--drafter=memory://runs/drafter/model" in printed
    names = stores.list_urls("memory://runs/drafter")
    expected = "outputs-train-greedy.tsv validation.txt distill.json log.jsonl operative.gin"
    assert set(expected.split()) <= {*names}
    assert not [name for name in names if ".0000" in name], "outputs were joined"
    distill.run(dataclasses.replace(settings, steps=4))
    assert "resumed at step 2 of 4" in capsys.readouterr().err
    target = sd.load("memory://runs/target/model", "float32")
    model = sd.load("memory://runs/drafter/model", "float32")
    options = dict(max_new_tokens=8)
    plain = sd.generate(target, ["bara ceni"], **options)
    drafted = sd.generate(target, ["bara ceni"], drafter=sd.ModelDrafter(model), **options)
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    heads.fit(
        heads.HeadsTrainConfig(
            target="memory://runs/target/model",
            train_files=("train.tsv",),
            output_dir="memory://runs/heads",
            num_heads=2,
            steps=2,
            **given,
        )
    )
    assert sd.HeadsDrafter.load("memory://runs/heads/heads", target).config.num_heads == 2


def test_the_vocabulary_of_a_run_may_be_a_url(tmp_path, monkeypatch):
    """It is read there; one that is missing is written there."""
    write_language(tmp_path)
    monkeypatch.chdir(tmp_path)
    train.fit(config_of(tmp_path, tmp_path / "first", steps=1, **SETTINGS))
    (model,) = (tmp_path / "first").glob("vocabulary.model")
    url = "memory://runs/spiece.model"
    given = dataclasses.replace(
        config_of(tmp_path, tmp_path / "second", steps=1, **SETTINGS), vocabulary=url
    )
    train.fit(given)
    assert fsspec.open(url).open().read() == model.read_bytes()
    stamp = fsspec.filesystem("memory").modified("/runs/spiece.model")
    train.fit(dataclasses.replace(given, output_dir=str(tmp_path / "third")))
    assert fsspec.filesystem("memory").modified("/runs/spiece.model") == stamp
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("memory")]
