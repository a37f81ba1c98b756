"""Tests distillation: outputs, a start from a model, and runs killed in either stage."""

import dataclasses
import json
import pathlib
import re
import shutil
import signal

import distill_models
import gin
import pytest
from distill_models import SMALL, _optimizer, same
from toy_training import CONFIGS, TINY, config_of

from specdec_jax.checkpoints import loader
from specdec_jax.commands import distill, main
from specdec_jax.decoding import continuous_batching
from specdec_jax.models.families import build_config
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.parameters import parameter_count
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.training import config as training_config
from specdec_jax.training import corpus, losses, run_folder, run_vocabulary, train
from specdec_jax.training import sequence_distillation as training_sequence_distillation

pytestmark = pytest.mark.usefixtures("quick")

FILES = ["outputs-train-greedy.tsv", "outputs-validation-1-greedy.tsv"]
models, one_optimizer = distill_models.models, distill_models.one_optimizer


# Files with ids.


@pytest.mark.slow
def test_ids_of_a_third_column_are_taken_as_they_are(models, tmp_path, monkeypatch):
    vocabulary = loader.load_vocabulary(models / "target")[0]
    (tmp_path / "a.tsv").write_text("bara\tceni\nbara\tceni\t63 5 7\n")
    seen, make = [], corpus.BucketedBatches
    monkeypatch.setattr(
        corpus, "BucketedBatches", lambda pairs, *rest: (seen.extend(pairs), make(pairs, *rest))[1]
    )
    config = config_of(tmp_path, tmp_path / "run", train_files="a.tsv")
    ids = run_vocabulary.RunVocabulary.from_checkpoint(models / "target", "target")
    train._make_batches(config, ids, config.paths("train_files"))
    source = vocabulary.encode("bara") + [1]
    assert seen == [(source, vocabulary.encode("ceni") + [1]), (source, [63, 5, 7])]
    for line, message in (
        ("a\tb\t64", "a.tsv: got the id 64, expected at most 63"),
        ("a\tb\tc", "a.tsv, line 1: got 'c' in column 3, expected the target's ids"),
        ("a\tb\t", "a.tsv, line 1: got '' in column 3"),
        ("a\tb\t1\t2", "a.tsv, line 1: got 4 columns, expected 2"),
        ("a", "a.tsv, line 1: got 1 columns, expected 2"),
    ):
        (tmp_path / "a.tsv").write_text(line + "\n")
        with pytest.raises(ValueError, match=message):
            train._make_batches(config, ids, config.paths("train_files"))


# `specdec distill`.


def distill_config(models, language, output, **settings):
    defaults = dict(
        target=str(models / "target"),
        drafter=str(models / "drafter"),
        source_files=("train.tsv",),
        validation_files=("validation.tsv", "more.tsv"),
        data_dir=str(language),
        output_dir=str(output),
        max_sources=12,
        samples=2,
        max_new_tokens=8,
        batch_size=4,
        shard_size=8,
        distill_weight=1.0,
        divergence="total_variation",
        distill_temperature=0.5,
        select="agreement",
        steps=12,
        warmup_steps=2,
        decay_steps=4,
        learning_rate=1e-2,
        batch_tokens=256,
        buckets=(32,),
        log_every=4,
        save_every=4,
        evaluate_every=6,
    )
    return distill.DistillConfig(**{**defaults, **settings})


def outputs(output):
    return {path.name: path.read_bytes() for path in pathlib.Path(output).glob("outputs-*")}


def arguments(config):
    """The command line with these settings."""
    flags, default = [], distill.DistillConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == getattr(default, field.name):
            continue
        several = field.type == tuple[str, ...]
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        flags += [f"--{field.name}={item}" for item in (value if several else [text])]
    return ["distill", "--compilation_cache_dir=", *flags]


@pytest.fixture(scope="module")
def undisturbed(models, language, tmp_path_factory):
    """A run through the command line that nothing disturbed."""
    output = tmp_path_factory.mktemp("distill") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_optimizer", _optimizer)
        assert main.main(arguments(distill_config(models, language, output))) == 0
    return output


@pytest.mark.slow
def test_settings_are_there_before_the_outputs(models, language, tmp_path, monkeypatch):
    """Writing outputs may take hours. A rejected run leaves the settings as they are."""

    def stops(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(distill, "write_outputs", stops)
    assert main.main(arguments(distill_config(models, language, tmp_path))) == 130
    before = (tmp_path / "operative.gin").read_text()
    assert main.main(arguments(distill_config(models, language, tmp_path, max_new_tokens=9))) == 2
    assert (tmp_path / "operative.gin").read_text() == before


@pytest.mark.slow
def test_the_outputs_are_the_targets_own(undisturbed, models, language):
    files = outputs(undisturbed)
    parts = ("train", "validation-1", "validation-2")
    assert set(files) == {
        f"outputs-{part}-{kind}.tsv" for part in parts for kind in ("greedy", "sampled")
    }

    def rows(name):
        return [line.split("\t") for line in files[f"outputs-{name}.tsv"].decode().splitlines()]

    def sources(name):
        return [line.split("\t")[0] for line in (language / name).read_text().splitlines()]

    target = loader.load(models / "target", "float32")
    chosen = [sources("more.tsv")[i * 20 // 12] for i in range(12)]
    ids = [target.vocabulary.encode(text) + [1] for text in chosen]
    decoded = continuous_batching.decode_all(target, ids, batch_size=4, seed=0, max_new_tokens=8)
    kept = [(text, output.tokens) for text, output in zip(chosen, decoded)]
    assert [
        (text, list(map(int, ids.split()))) for text, _, ids in rows("validation-2-greedy")
    ] == kept
    sampled = rows("train-sampled")
    assert len({ids for _, _, ids in sampled}) == len(sampled) == 24
    assert {text for text, _, _ in sampled} <= {
        sources("train.tsv")[i * 400 // 12] for i in range(12)
    }
    everything = [
        ids.split() for name in ("train", "validation-1") for _, _, ids in rows(f"{name}-sampled")
    ]
    assert {len(ids) for ids in everything if ids[-1] != "1"} == {
        8
    }  # cut, and without an EOS that nobody wrote


@pytest.mark.slow
def test_a_sample_depends_on_the_number_of_its_input_alone(models):
    target = loader.load(models / "target", "float32")
    ids = [
        target.vocabulary.encode(text) + [1]
        for text in ("bara", "ceni mu", "gute", "hal bara ni", "kinso")
    ]

    def draw(inputs, first):
        return [
            output.tokens
            for output in continuous_batching.decode_all(
                target,
                inputs,
                batch_size=4,
                seed=3,
                first=first,
                num_samples=2,
                max_new_tokens=8,
                sampling=SamplingConfig(temperature=1.0),
            )
        ]

    whole = draw(ids * 2, 0)
    assert draw((ids * 2)[4:8], 4) == whole[8:16] and whole[8:16] != draw((ids * 2)[4:8], 0)


@pytest.mark.slow
def test_the_log_has_the_pairs_acceptance_on_the_targets_outputs(undisturbed):
    log = [json.loads(line) for line in (undisturbed / "log.jsonl").read_text().splitlines()]
    validations = [record for record in log if "validation_loss" in record]
    assert [record["step"] for record in validations] == [0, 6, 12]
    names = {f"outputs-validation-{n}-{kind}.tsv" for n in (1, 2) for kind in ("greedy", "sampled")}
    for record in validations:
        for name in ("acceptance", "agreement"):
            assert set(record[f"{name}_by_file"]) == names
            each = record[f"{name}_by_file"].values()
            assert 0 <= min(each) <= record[name] <= max(each) <= 1
    assert validations[-1]["acceptance"] > validations[0]["acceptance"]
    best = max(validations, key=lambda record: record["agreement"])
    assert run_folder.Checkpoints(undisturbed, select="agreement").best.best_step() == best["step"]
    assert loader.load(undisturbed / "model").config.emb_dim == SMALL.emb_dim


class Killed(Exception):
    pass


def final_params(output):
    saved = run_folder.Checkpoints(pathlib.Path(output))
    stored = json.loads((pathlib.Path(output) / "config.json").read_text())
    config = training_config.TrainConfig(**{**stored, "model": build_config(stored["model"])})
    assert saved.newest.latest_step() == 12
    return saved.restore(train._make_abstract_state(config))


@pytest.mark.slow
def test_a_run_that_is_killed_in_both_stages_ends_as_an_undisturbed_one(
    undisturbed, models, language, tmp_path, monkeypatch, capsys
):
    config = distill_config(models, language, tmp_path / "run")
    calls, decode_all, train_step = [], continuous_batching.decode_all, losses.train_step

    def interfere(at, action):
        def decoding(*arguments, **options):
            for output in decode_all(*arguments, **options):
                calls.append("output")
                if len(calls) == at:
                    action()
                yield output

        calls.clear()
        monkeypatch.setattr(training_sequence_distillation, "decode_all", decoding)

    def kill():
        raise Killed

    interfere(
        12 + 16 + 3, kill
    )  # one output of every source, then two of each, 8 sources in the first shard
    with pytest.raises(Killed):
        distill.run(config)
    assert set(outputs(config.output_dir)) == {
        "outputs-train-greedy.tsv",
        "outputs-train-sampled.000000000.tsv",
    }
    interfere(8 + 2, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        distill.run(config)
    assert "interrupted: files of outputs are kept" in capsys.readouterr().err
    assert set(outputs(config.output_dir)) == {
        "outputs-train-greedy.tsv",
        "outputs-train-sampled.tsv",
    }
    interfere(0, kill)

    def interrupted(state, *arguments, **more):
        if int(state.step) == 5:
            signal.raise_signal(signal.SIGTERM)
        return train_step(state, *arguments, **more)

    monkeypatch.setattr(train, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distill.run(config)
    assert len(calls) == 2 * (12 + 24)  # what was there is not decoded again
    assert outputs(config.output_dir) == outputs(undisturbed)
    monkeypatch.setattr(train, "train_step", train_step)
    calls.clear()
    distill.run(config)
    printed = capsys.readouterr().err
    assert not calls and re.search(r"resumed at step \d of 12", printed)
    for line in (
        "needs 0 outputs of the target",
        "takes about ",
        "kept: step ",
        "next: specdec benchmark --target=",
    ):
        assert line in printed
    held_out = (pathlib.Path(config.output_dir) / "validation.txt").read_text().splitlines()
    assert len(held_out) == 24 and "\t" not in "".join(held_out)
    assert outputs(config.output_dir) == outputs(undisturbed)
    assert same(final_params(config.output_dir), final_params(undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(samples=1), "samples: got 1, expected 2, as for the outputs in"),
        (dict(seed=1), "seed: got 1, expected 0"),
        (dict(buckets=(16,)), "longest bucket: got 16, expected 32"),
        (
            dict(source_files=("validation.tsv",)),
            "train sources: got 12 lines, .*, expected 12 lines",
        ),
        (
            dict(validation_files=("more.tsv",)),
            "validation-1 sources: got|validation-2 sources: got None",
        ),
        (
            dict(steps=4, warmup_steps=0, decay_steps=0),
            "steps: got 4, expected at least the 12 steps",
        ),
        (
            dict(drafter=None, drafter_shape=(8, 2, 4, 1, 1, 16)),
            "initialise_from: got None, expected that of the run in .*drafter",
        ),
    ],
)
def test_settings_that_contradict_what_is_there(undisturbed, models, language, settings, message):
    before = outputs(undisturbed)
    with pytest.raises(ValueError, match=message):
        distill.run(distill_config(models, language, undisturbed, **settings))
    assert outputs(undisturbed) == before


@pytest.mark.slow
def test_other_files_under_the_same_paths_are_rejected(
    undisturbed, models, language, tmp_path, monkeypatch
):
    """A target of which one array of the encoder differs, or a vocabulary, is rejected.

    It is checked before outputs are written and before training.
    """
    shutil.copytree(undisturbed, tmp_path / "run")
    config, load = distill_config(models, language, tmp_path / "run"), loader.load

    def changed(path, *arguments, **options):
        model = load(path, *arguments, **options)
        params = model.params
        params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"] *= 2
        return LanguageModel(model.config, params, model.vocabulary)

    with monkeypatch.context() as patched:
        patched.setattr(loader, "load", changed)
        # Of a run that has finished, of one that was killed before it saved a state, and of one
        # without all outputs.
        for gone in ("", "checkpoints", "outputs-train-greedy.tsv"):
            if gone:
                path = tmp_path / "run" / gone
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            with pytest.raises(
                ValueError, match="target's contents: got .*, as for the outputs in .*run"
            ):
                distill.run(config)
    path = tmp_path / "run/distill.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "vocabulary's contents": "x"}))
    with pytest.raises(
        ValueError, match="vocabulary's contents: got .*, expected x, as for the outputs"
    ):
        distill.run(config)
    path.write_text(
        json.dumps({name: value for name, value in stored.items() if "contents" not in name})
    )
    distill.run(config)
    assert json.loads(path.read_text()) == stored and outputs(config.output_dir) == outputs(
        undisturbed
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(target=None),
            "target: got nothing, expected a checkpoint's folder or ende/drafter or ende/target",
        ),
        (dict(output_dir=None), "output_dir: got nothing"),
        (dict(source_files=()), "source_files: got nothing"),
        (dict(validation_files=("gone",)), "validation_files: got '.*gone', which is no file"),
        (dict(drafter=None), "drafter, drafter_shape: got nothing, expected one of them"),
        (dict(drafter_shape=(8, 2, 4, 1, 1, 16)), "drafter, drafter_shape: got both"),
        (
            dict(drafter=None, drafter_shape=(8, 2)),
            r"drafter_shape: got \(8, 2\), expected emb_dim, num_heads",
        ),
        (dict(drafter=None, drafter_shape=(8, 2, 4, 1, 0, 16)), "num_decoder_layers: got 0"),
        (dict(greedy=False, samples=0), "samples: got 0 without greedy outputs"),
        (dict(temperature=0.0), "temperature: got 0.0"),
        (dict(samples=0, temperature=0.7), "temperature: got 0.7, expected 1.0 without samples"),
        (dict(shard_size=0), "shard_size: got 0"),
        (dict(buckets=(16, 8)), "buckets: got"),
        (dict(batch_tokens=8), "batch_tokens: got 8, expected at least the longest bucket, 32"),
        (
            dict(max_new_tokens=33),
            "max_new_tokens: got 33, expected at most the longest bucket, 32",
        ),
        (dict(select="best"), "select: got 'best', expected one of loss, acceptance, agreement"),
        (dict(divergence="tv"), "divergence: got 'tv'"),
        (dict(drafter="STRANGER"), "drafter: got another vocabulary, expected the target's tokens"),
        (
            dict(buckets=(2,), max_new_tokens=2),
            "got no source of at most 2 tokens, expected at least one",
        ),
        (dict(steps=3), "steps: got 3, expected at least warmup_steps"),
        (dict(seed=2**31), "seed: got 2147483648, expected at most 2147483647"),
    ],
)
def test_bad_settings_are_rejected_before_anything_is_decoded(
    models, language, tmp_path, monkeypatch, settings, message
):
    monkeypatch.setattr(training_sequence_distillation, "decode_all", None)
    if settings.get("drafter"):
        settings = dict(drafter=str(models / "stranger"))
    with pytest.raises(ValueError, match=message):
        distill.run(distill_config(models, language, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_a_new_drafter_is_shaped_like_its_target_for_the_rest(models, language, tmp_path):
    config = distill_config(
        models, language, tmp_path, drafter=None, drafter_shape=(8, 2, 4, 1, 1, 16)
    )
    target = dataclasses.replace(
        TINY, mlp_activations=("relu",), logits_via_embedding=True, dtype="bfloat16"
    )
    expected = dataclasses.replace(SMALL, mlp_activations=("relu",), logits_via_embedding=True)
    assert config.drafter_config(target) == expected
    given = dataclasses.replace(config, matmul_dtype="bfloat16").drafter_config(target)
    assert given == dataclasses.replace(expected, matmul_dtype="bfloat16")


def test_one_file_may_be_a_string(tmp_path):
    files = dict(source_files="src.txt", validation_files="more.txt", data_dir=str(tmp_path))
    config = distill.DistillConfig(buckets=[8, 16], **files)
    assert config.paths("source_files") == [tmp_path / "src.txt"]
    assert config.paths("validation_files") == [tmp_path / "more.txt"]
    assert config.buckets == (8, 16)


def test_configuration():
    gin.clear_config()
    gin.parse_config_file(str(CONFIGS.parent / "distill" / "ende.gin"))
    config = gin.get_configurable(distill.DistillConfig)(data_dir="data", output_dir="run")
    gin.clear_config()
    assert [str(path) for path in config.paths("source_files")] == [
        "data/ende/train.tsv.gz",
        "data/wiki_pe/train.tsv.gz",
    ]
    assert all(
        "test" not in str(path)
        for name in ("source_files", "validation_files")
        for path in config.paths(name)
    )
    model = config.drafter_config(loader.load_shape(config.target))
    training = config.train_config(model, 6144, FILES)
    assert (training.teacher, training.initialise_from) == ("ende/target", "ende/drafter")
    assert model == dataclasses.replace(
        loader.load_shape("ende/drafter"), dtype="float32", matmul_dtype="bfloat16"
    )


def test_configuration_of_the_bundled_drafter(tmp_path):
    gin.clear_config()
    gin.parse_config_file(str(CONFIGS.parent / "distill" / "ende_drafter.gin"))
    config = gin.get_configurable(distill.DistillConfig)(
        target="ende/target", data_dir=tmp_path, output_dir="run"
    )
    gin.clear_config()
    sources = [str(path.relative_to(tmp_path)) for path in config.paths("source_files")]
    assert sources == ["ende/train.tsv.gz", "wiki_pe/train.tsv.gz", "wikitext.txt.gz"]
    for path in config.paths("source_files") + config.paths("validation_files"):
        assert "test" not in path.name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    config.check()
    target, bundled = (loader.load_shape(f"ende/{name}") for name in ("target", "drafter"))
    assert dataclasses.replace(config.drafter_config(target), dtype=bundled.dtype) == bundled
    count = parameter_count(bundled)
    assert count == 2_491_392 and 8 * count <= parameter_count(target)
    assert config.train_config(config.drafter_config(target), 6144, FILES).select == "agreement"
