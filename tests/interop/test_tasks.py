"""Tests the tasks of `specdec_jax.interop.tasks`, rejected tasks, and seqio's vocabularies."""

import dataclasses
import importlib.util
import itertools
import json
import pathlib
import re
import subprocess
import sys
import types

import command_line
import pytest
import sentencepiece
import seqio_jobs_of
from seqio_jobs_of import (
    PAIRS,
    decoded,
    interop,
    needs_seqio,
    seqio,
    tasks,
    tf,
    write,
)
from toy_models import compilations

import specdec_jax as sd
from specdec_jax import checkpoints
from specdec_jax.commands import generate as generate_command
from specdec_jax.commands import main
from specdec_jax.interop import vocabularies
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.tokenizers.vocabularies import ByteVocabulary, SentencePieceVocabulary

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick")]
pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec

toys, generate, target = seqio_jobs_of.toys, seqio_jobs_of.generate, seqio_jobs_of.target
CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "tasks"


# The tasks of `specdec_jax.interop.tasks`.


@needs_seqio
def test_a_gin_file_for_tsv_files(generate, pair, tmp_path):
    """Task and sentences give the same texts; the metric is sacrebleu's."""
    import sacrebleu

    pairs = [pair for pair in PAIRS if pair[0]]
    data, path = write(tmp_path / "test.tsv", pairs), tmp_path / "out"
    gin = [
        f"--gin_file={CONFIGS / 'tsv.gin'}",
        f'--gin.FILE="{data}"',
        f'--gin.VOCABULARY="{pair / "target"}"',
    ]
    gin.append("--max_input_length=40")  # of sentences none is cut
    code, out, err = generate(*gin, f"--output_file={path}")
    assert (code, out) == (0, ""), err
    code, out, _ = generate("--json", "--max_input_length=40", *(source for source, _ in pairs))
    lines = decoded(path.read_text())
    assert [line["prediction_tokens"] for line in lines] == [
        line["tokens"] for line in decoded(out)
    ]
    predictions = [line["prediction"] for line in lines]
    bleu = sacrebleu.corpus_bleu(
        predictions, [[target for _, target in pairs]], tokenize="intl"
    ).score
    assert json.loads((tmp_path / "out.metrics.json").read_text())["metrics"] == {
        "tsv": {"bleu": pytest.approx(bleu)}
    }


@needs_seqio
@pytest.mark.parametrize("name", ["wmt_t2t_ende", "cnn_dailymail"])
def test_the_papers_tasks(name, pair):
    """Tasks are registered on import; texts become ids as T5's do.

    The data set, its version and its splits are known.
    """
    import tensorflow_datasets as tfds

    names = {
        "wmt_t2t_ende": ("wmt_t2t_translate/de-en:1.0.0", "en", "de"),
        "cnn_dailymail": ("cnn_dailymail:3.4.0", "article", "highlights"),
    }
    dataset, source, side = names[name]
    assert name in seqio.TaskRegistry.names()
    assert getattr(tasks, name)(vocabulary=str(pair / "target")) == name, "registered anew"
    task = seqio.TaskRegistry.get(name)
    assert task.source.tfds_dataset.name == dataset
    data, _, version = dataset.partition(":")
    builder = tfds.builder_cls(data.partition("/")[0])
    versions = {
        f"{builder.name}/{config.name}": config.version for config in builder.BUILDER_CONFIGS
    }
    assert str(versions[data] if versions else builder.VERSION) == version

    def rows(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensors({source: "Tom is", side: "the book"})

    local = task.replace(source=seqio.FunctionDataSource(rows, splits=["test"]))
    (found,) = local.get_dataset(
        {"inputs": 30, "targets": 3}, split="test", shuffle=False
    ).as_numpy_iterator()
    prefix = {"wmt_t2t_ende": "translate English to German: ", "cnn_dailymail": "summarize: "}[name]
    assert (
        found["inputs_pretokenized"].decode() == prefix + "Tom is"
        and found["targets_pretokenized"] == b"the book"
    )
    ours, _ = checkpoints.load_vocabulary(pair / "target")
    assert found["inputs"].tolist() == (ours.encode(prefix + "Tom is") + [1])[:29] + [1] * (
        len(found["inputs"]) == 30
    )
    assert len(found["targets"]) == 3 and found["targets"][-1] == 1
    getattr(tasks, name)()


@needs_seqio
def test_metrics_of_texts():
    texts = ["the book was nice . Tom asked", "She left"]
    others = ["the book was nice . Tom left", "She left"]
    assert (
        tasks.bleu(texts, texts) == {"bleu": pytest.approx(100)}
        and 0 < tasks.bleu(texts, others)["bleu"] < 100
    )
    assert tasks.exact_match(texts, others) == {"exact_match": 50.0}
    pytest.importorskip("rouge_score")
    found = tasks.rouge(texts, others)
    assert (
        found["rouge1"] == pytest.approx(100 * (5 / 6 + 1) / 2)
        and found["rougeLsum"] == found["rouge1"]
    )
    assert found["rouge2"] == pytest.approx(100 * (4 / 5 + 1) / 2)


@needs_seqio
def test_the_vocabulary_of_a_model(tmp_path):
    """With as many sentinels as the model has."""
    config = sd.T5Config(140, 16, 2, 8, 1, 1, 24)
    pieces = SentencePieceVocabulary.train(command_line.TEXT, 36)
    ours = SentencePieceVocabulary(pieces.model, 100)
    sd.save(sd.LanguageModel.random(config, vocabulary=ours), tmp_path / "hf", format="huggingface")
    found = tasks._make_vocabulary(str(tmp_path / "hf"), 0)
    assert found.vocab_size == 136 and vocabularies.find_difference(ours, found) is None
    assert (
        tasks._make_vocabulary("ende/target", 0).vocab_size
        == checkpoints.load_vocabulary("ende/target")[0].size
    )
    sd.save(
        sd.LanguageModel.random(
            dataclasses.replace(config, vocab_size=400), vocabulary=ByteVocabulary(125)
        ),
        tmp_path / "bytes",
    )
    assert isinstance(tasks._make_vocabulary(str(tmp_path / "bytes"), 0), seqio.ByteVocabulary)
    sd.save(sd.LanguageModel.random(config), tmp_path / "none")
    with pytest.raises(ValueError, match="vocabulary: got .*none' without a SentencePiece model"):
        tasks._make_vocabulary(str(tmp_path / "none"), 0)
    whole = sd.LanguageModel.random(config)
    sd.save(whole, tmp_path / "t5x", format="t5x", say=lambda line: None)
    (step,) = (tmp_path / "t5x").glob("checkpoint_*")
    (step / "config.json").unlink()  # T5X writes none
    (step / "sentencepiece.model").write_bytes(pieces.model)
    assert tasks._make_vocabulary(str(tmp_path / "t5x"), 0).vocab_size == 136


@needs_seqio
def test_sentinels_are_added_to_a_file_without(tmp_path, monkeypatch):
    """Under `~` as well; T5's file is in a store, and read when it is needed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    pieces = SentencePieceVocabulary.train(command_line.TEXT, 36)
    (tmp_path / "plain.model").write_bytes(pieces.model)
    added = seqio.SentencePieceVocabulary(str(tmp_path / "plain.model"), 100)
    (tmp_path / "with.model").write_bytes(added.sp_model)
    sizes = {
        (name, number): tasks._make_vocabulary(f"~/{name}.model", number).vocab_size
        for name, number in itertools.product(("plain", "with"), (None, 0))
    }
    assert sizes == {
        ("plain", None): 136,
        ("plain", 0): 36,
        ("with", None): 136,
        ("with", 0): 136,
    }
    assert tasks._make_vocabulary(tasks.T5_VOCABULARY, None).extra_ids == 100


# What is rejected.

BAD_TASKS = {
    "near names": (["--task=toy_txet"], "registered (the nearest: toy_text, "),
    "module": (
        ["--task=toy_text", "--module_import=no.such.module"],
        "module_import: got 'no.such.module', which fails (No module",
    ),
    "module fails": (
        ["--task=toy_text", "--module_import=toy_broken"],
        "module_import: got 'toy_broken', which fails (broken here)",
    ),
    "split": (
        ["--task=toy_text", "--split=train"],
        "split: got 'train', expected one of test, validation of task toy_text",
    ),
    "vocabulary": (
        ["--task=toy_text", "--target=STRANGER", "--drafter=", "--gamma=0"],
        "task: got 'toy_text', whose inputs have another vocabulary than the target: token",
    ),
    "a file that is not there": (
        ["--task=toy_lost"],
        "task: got 'toy_lost', whose data cannot be read (",
    ),
    "two columns": (["--task=toy_columns"], "columns.tsv, line 1: got 3 columns, expected 2"),
    "sentences": (
        ["--task=toy_text", "Tom"],
        "got sentences and --task=toy_text, expected one of the two",
    ),
}


@needs_seqio
@pytest.mark.parametrize("case", BAD_TASKS)
def test_bad_tasks_are_one_line_before_anything_compiles(
    case, generate, toys, pair, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "toy_broken.py").write_text("raise RuntimeError('broken here')")
    (tmp_path / "columns.tsv").write_text("a\tb\tc\n")
    (tmp_path / "lost.tsv").write_text("a\tb\n")
    for name in ("columns", "lost"):
        tasks.tsv({"test": str(tmp_path / f"{name}.tsv")}, str(pair / "target"), name=f"toy_{name}")
    (tmp_path / "lost.tsv").unlink()
    argv, message = BAD_TASKS[case]
    outcome: list = []
    assert compilations(lambda: outcome.extend(generate(*argv))) == 0 or case == "vocabulary"
    code, out, err = outcome
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert message in err
    for name in ("columns", "lost"):
        seqio.TaskRegistry.remove(f"toy_{name}")


@needs_seqio
def test_what_is_no_task_of_ids_is_rejected(target):
    feature = seqio.Feature(seqio.PassThroughVocabulary(64), add_eos=False)
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=["test"])

    def make(**features):
        return seqio.Task("toy_other", source, features)

    wide = seqio.Feature(seqio.PassThroughVocabulary(65), add_eos=False)
    sounds = seqio.ContinuousFeature(vocabulary=feature.vocabulary, add_eos=False, dtype=tf.float32)
    for task, message in (
        (
            make(targets=feature),
            "got 'toy_other' with targets, expected sequences of ids called inputs and targets",
        ),
        (
            make(inputs=sounds, targets=feature),
            "got 'toy_other' with inputs of rank 1 and float32, expected sequences of ids",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            interop._check(task, "test")
    with pytest.raises(
        ValueError,
        match="another vocabulary than the target: it has 65 tokens, expected at most 64",
    ):
        interop.check_vocabularies([make(inputs=wide, targets=feature)], target)
    ends = seqio.Feature(seqio.PassThroughVocabulary(64, eos_id=3), add_eos=False)
    with pytest.raises(ValueError, match="whose targets have .*: its EOS id is 3, not one of"):
        interop.check_vocabularies([make(inputs=feature, targets=ends)], target)
    with pytest.raises(ValueError, match="task: got a decoder-only target"):
        interop.check_vocabularies([], types.SimpleNamespace(config=GPTConfig(64, 8, 2, 1, 16)))
    with pytest.raises(
        ValueError, match="name: got 'toy_other', which another module has registered"
    ):
        seqio.TaskRegistry.add_provider("toy_other", make(inputs=feature, targets=feature))
        try:
            tasks.tsv({}, "ende/target", name="toy_other")
        finally:
            seqio.TaskRegistry.remove("toy_other")
    with pytest.raises(ValueError, match="files: got 'no.tsv', which is no file"):
        tasks.tsv({"test": "no.tsv"}, "ende/target")


@needs_seqio
def test_a_module_in_the_working_directory(generate, toys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = """
import seqio
seqio.MixtureRegistry.add("toy_imported", ["toy_more"], default_rate=1.0)
"""
    (tmp_path / "toy_module.py").write_text(module)
    code, out, err = generate(
        "--task=toy_imported", "--module_import=toy_module", "--split=validation[:1]"
    )
    assert code == 2 and "data cannot be read" in err and not out  # parts are TensorFlow Datasets'
    code, out, err = generate(
        "--task=toy_imported", "--module_import=toy_module", "--split=validation", "--gamma=0"
    )
    assert code == 0 and len(decoded(out)) == 2 and "toy_more (validation): words" in err


COMBINATIONS = [
    (["--split=test"], "split: got 'test' without a task"),
    (["--module_import=a"], "module_import: got ('a',) without a task"),
    (["--score_targets"], "score_targets: got True without a task"),
    (["--tfds_data_dir=a"], "tfds_data_dir: got 'a' without a task"),
    (["--task=a", "--json"], "json: got True with task='a', expected none"),
    (["--task=a", "--stream"], "stream: got True with task='a', expected none"),
    (["--task=a", "--input_file=-"], "input_file: got '-' with task='a', expected none"),
    (
        ["--task=a", "--num_samples=2", "--temperature=1"],
        "num_samples: got 2 with task='a', expected 1",
    ),
]


@pytest.mark.parametrize(
    "argv, message", COMBINATIONS, ids=[message for _, message in COMBINATIONS]
)
def test_options_that_make_no_sense_together(argv, message, capsys):
    assert main.main(["generate", "--target=ende/target", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"specdec: error: {message}") and err.count("\n") == 1


def test_without_seqio_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)
    for name in ("seqio_jobs", "tasks"):
        monkeypatch.delitem(sys.modules, f"specdec_jax.interop.{name}", raising=False)
        monkeypatch.delattr(sys.modules["specdec_jax.interop"], name, raising=False)
    assert main.main(["generate", "--target=ende/target", "--task=a"]) == 2
    err = capsys.readouterr().err
    assert (
        "task: got 'a' without seqio (" in err
        and "expected the extra: pip install '.[seqio]'" in err
    )
    assert (
        main.main(
            ["generate", "--target=ende/target", f"--gin_file={CONFIGS / 'cnn_dailymail.gin'}"]
        )
        == 2
    )
    assert "seqio: not installed (" in capsys.readouterr().err


# Vocabularies.


def theirs(model: bytes, sentinels: int = 0):
    """As much of seqio's as is compared."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    pieces += [f"▁<extra_id_{i}>" for i in reversed(range(sentinels))]
    tokenizer = types.SimpleNamespace(
        id_to_piece=pieces.__getitem__, get_piece_size=lambda: len(pieces)
    )
    return types.SimpleNamespace(tokenizer=tokenizer, vocab_size=len(pieces))


def test_vocabularies_are_compared_token_by_token():
    model = SentencePieceVocabulary.train(command_line.TEXT, 36).model
    other = SentencePieceVocabulary.train(
        command_line.TEXT[::-1] + ["eight eight eight eight"], 36
    ).model
    for mine, sentinels in itertools.product((0, 3), (0, 3, 5)):
        found = vocabularies.find_difference(
            SentencePieceVocabulary(model, mine), theirs(model, sentinels)
        )
        assert (found is None) == (0 in (mine, sentinels) or mine == sentinels), found
    assert vocabularies.find_difference(SentencePieceVocabulary(model), theirs(other)).startswith(
        "token "
    )
    fewer = SentencePieceVocabulary.train(command_line.TEXT, 35)
    assert vocabularies.find_difference(fewer, theirs(model)) is not None
    assert (
        vocabularies.find_difference(ByteVocabulary(), theirs(model)) == "it has 36 tokens, not 384"
    )
    bytes_of_seqio = type("ByteVocabulary", (), {"vocab_size": 259})()
    assert vocabularies.find_difference(ByteVocabulary(), bytes_of_seqio) is None
    assert (
        vocabularies.find_difference(ByteVocabulary(0), types.SimpleNamespace(vocab_size=259))
        is None
    )


def test_split_and_module_do_not_decide_alone(pair):
    """A journal of another split is rejected; where a module lies makes no difference."""
    target = sd.load(pair / "target", dtype="float32")

    def settings(**options):
        return generate_command._deciding_options(
            generate_command.GenerateOptions(task="a", **options), target, None, ["x"]
        )

    assert (
        settings() == settings(module_import=("b",), tfds_data_dir="c") != settings(split="train")
    )
    without = sd.LanguageModel(target.config, target.params)
    assert (
        generate_command._deciding_options(
            generate_command.GenerateOptions(task="a"), without, None, ["x"]
        )
        != settings()
    )


@needs_seqio
def test_the_oldest_protobuf_that_tensorflow_takes_is_enough():
    """SentencePiece's generated code may reject a protobuf older than its compiler."""
    (bound,) = (
        line for line in importlib.metadata.requires("tensorflow") if line.startswith("protobuf")
    )
    oldest = re.search(r">=(\d+)\.(\d+)\.(\d+)", bound).groups()
    config = (
        "from google.protobuf import descriptor_pool, symbol_database, runtime_version as runtime\n"
        "from google.protobuf.internal import builder\n"
        f"runtime.MAJOR, runtime.MINOR, runtime.PATCH = {', '.join(oldest)}\n"
        "from sentencepiece import sentencepiece_model_pb2\n"
    )
    done = subprocess.run([sys.executable, "-c", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
