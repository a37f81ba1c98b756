"""Distils drafters for decoder-only targets, which continue prompts."""

import json

import numpy as np
import pytest
from gemma_tokenizer import write_tokenizer
from toy_training import TINY, TINY_GPT

import specdec_jax as sd
from specdec_jax.commands import distill
from specdec_jax.models.config_validation import FieldError
from specdec_jax.models.gemma import GemmaConfig
from specdec_jax.tokenizers import huggingface_folders, vocabularies
from specdec_jax.training import corpus, losses
from specdec_jax.training.batches import PADDING
from specdec_jax.training.config import TrainConfig
from specdec_jax.training.sequence_distillation import DistillConfig

pytestmark = pytest.mark.usefixtures("quick")
GEMMA = GemmaConfig(40, 32, 4, 2, 8, 2, 48, windows=(3, 0), query_scalar=8, logits_cap=30.0)
TARGETS = {"gpt": TINY_GPT, "gemma": GEMMA}
SHAPE = (16, 2, 8, 0, 1, 24)


@pytest.fixture(scope="module")
def vocabulary(language):
    texts = (language / "train.tsv").read_text().split("\n")
    return vocabularies.SentencePieceVocabulary.train(texts, 40)


@pytest.fixture
def folder(language, vocabulary, tmp_path):
    for name in ("train", "validation"):
        lines = (language / f"{name}.tsv").read_text().splitlines()[:12]
        (tmp_path / f"{name}.txt").write_text("\n".join(line.split("\t")[0] for line in lines))
    for name, config in TARGETS.items():
        ids = dict(start_token=1, eos_ids=(1,), vocabulary=vocabulary)
        target = sd.LanguageModel.random(config, 0, **ids)
        sd.save(target, tmp_path / name, say=lambda line: None)
    return tmp_path


def configure(folder, target="gpt", **settings):
    given = dict(
        target=str(folder / target),
        source_files=("train.txt",),
        validation_files=("validation.txt",),
        data_dir=str(folder),
        output_dir=str(folder / "run"),
        drafter_shape=SHAPE,
        max_new_tokens=8,
        batch_size=4,
        shard_size=8,
        distill_weight=1.0,
        select="agreement",
        steps=40,
        learning_rate=3e-2,
        buckets=(16, 32),
        batch_tokens=128,
        evaluate_every=20,
        dtype="float32",
    )
    return DistillConfig(**given | settings)


def read_log(folder):
    records = map(json.loads, (folder / "run" / "log.jsonl").read_text().splitlines())
    return [record for record in records if "validation_loss" in record]


def compare(folder, target, drafter, **options):
    """Compares drafted tokens with plain decoding's; returns the statistics."""
    prompts = (folder / "validation.txt").read_text().splitlines()
    given = dict(max_new_tokens=8) | options
    plain = sd.generate(target, prompts, **given)
    drafted = sd.generate(target, prompts, drafter=drafter, gamma=3, **given)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    return drafted.stats


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_new_model_of_the_targets_family_learns_its_outputs(name, folder):
    settings = dict(samples=1, evaluate_every=4)  # early, too: later losses differ by little
    distill.run(configure(folder, name, **settings))
    target, model = (sd.load(folder / path, "float32") for path in (name, "run/model"))
    assert type(model.config) is type(target.config)
    assert (model.config.emb_dim, model.config.num_decoder_layers) == (16, 1)
    first = (folder / "run" / "outputs-train-greedy.tsv").read_text().splitlines()[0]
    prompt, _, ids = first.split("\t")
    plain = sd.generate(target, [prompt], max_new_tokens=8)
    assert list(map(int, ids.split())) == plain.tokens[0][: plain.lengths[0]].tolist()
    log = read_log(folder)
    assert log[-1]["validation_loss"] < log[0]["validation_loss"]
    stats = compare(folder, target, sd.ModelDrafter(model))
    assert stats.accepted > 0
    # The same command has nothing left to do.
    before = (folder / "run" / "log.jsonl").read_bytes()
    distill.run(configure(folder, name, **settings))
    assert (folder / "run" / "log.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_given_drafter_learns_and_may_draft_all_at_once(folder, vocabulary):
    config = TINY_GPT.replace(emb_dim=16, mlp_dim=24)
    small = sd.LanguageModel.random(config, 3, vocabulary, start_token=1, eos_ids=(1,))
    sd.save(small, folder / "drafter", say=lambda line: None)
    given = dict(drafter_shape=(), drafter=str(folder / "drafter"), masks=2)
    distill.run(configure(folder, **given))
    log = read_log(folder)
    assert log[-1]["validation_loss"] < log[0]["validation_loss"]
    target, model = (sd.load(folder / path, "float32") for path in ("gpt", "run/model"))
    compare(folder, target, sd.ParallelDrafter(model))


def test_outputs_alone_are_learned(vocabulary, tmp_path):
    (tmp_path / "a.tsv").write_text("bara\tceni\t9 8 1\nbara ceni\tmu\t7\n")
    made = corpus.Continuations((16,), ())
    batch = made.batches(vocabulary, [tmp_path / "a.tsv"], 40, 32, 0)[0]
    rows = sorted(zip(batch.inputs.tolist(), batch.targets.tolist()), key=lambda row: max(row[1]))
    for (inputs, targets), text, output in zip(rows, ("bara ceni", "bara"), ([7], [9, 8, 1])):
        prompt = vocabulary.encode(text)
        length = len(prompt) + len(output) - 1
        assert inputs[:length] == [*prompt, *output][:-1]
        assert targets[:length] == [PADDING] * (len(prompt) - 1) + output
        assert set(inputs[length:]) | set(targets[length:]) == {PADDING}


def test_no_mark_of_a_beginning_stands_between_prompt_and_output(tmp_path):
    """A Gemma's prompt begins with <bos> (2), and what follows it does not."""
    write_tokenizer(tmp_path)
    gemma = huggingface_folders.open_folder(tmp_path, (1,))
    (tmp_path / "pairs.tsv").write_text("the river\tthen over\n")
    made = corpus.Continuations((32,), ()).batches(gemma, [tmp_path / "pairs.tsv"], 512, 64, 0)
    prompt, output = gemma.encode("the river"), gemma.encode("then over")
    fed = made[0].inputs[0]
    assert fed[fed > 0].tolist() == [2, *prompt, *output]
    assert made[0].targets[0, len(prompt) : len(prompt) + len(output) + 1].tolist() == [*output, 1]


def test_masks_stand_in_outputs_alone():
    targets = np.full((64, 12), PADDING, np.int32)
    targets[:, 4:10] = 7
    hidden, counted = map(np.asarray, losses.hide_tokens(targets, 2, None))
    assert not hidden[:, :5].any()
    cuts = 11 - hidden.sum(axis=1)  # the last place that is not hidden
    assert set(cuts) == {4, 5, 6, 7, 8, 9}
    places = np.arange(12)
    expected = (places >= 4) & (places < 10) & (places <= cuts[:, None] + 2)
    np.testing.assert_array_equal(counted >= 0, expected)


def test_a_new_drafter_has_the_shape_that_is_given():
    def resize(target, shape):
        return DistillConfig(drafter_shape=shape).drafter_config(target)

    assert resize(TINY_GPT, SHAPE) == TINY_GPT.replace(
        emb_dim=16, num_heads=2, num_decoder_layers=1, mlp_dim=24
    )
    assert resize(GEMMA.replace(dtype="bfloat16"), (24, 2, 16, 0, 3, 32)) == GEMMA.replace(
        emb_dim=24,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        query_scalar=16,
        num_decoder_layers=3,
        mlp_dim=32,
    )
    with pytest.raises(FieldError, match="head_dim: got 4, expected emb_dim / num_heads = 8"):
        resize(TINY_GPT, (16, 2, 4, 0, 1, 24))
    with pytest.raises(ValueError, match="num_encoder_layers: got 1, expected 0, as in the dec"):
        resize(GEMMA, (16, 2, 8, 1, 1, 24))


@pytest.mark.slow
def test_what_does_not_fit_is_rejected(folder, monkeypatch):
    monkeypatch.setattr(distill, "write_outputs", None)
    with pytest.raises(ValueError, match="target: got 40 positions, expected at least 64, of buc"):
        distill.run(configure(folder, buckets=(64,)))
    with pytest.raises(
        ValueError, match="max_new_tokens: got 8, expected fewer than the longest o"
    ):
        distill.run(configure(folder, buckets=(8,)))
    settings = dict(train_files="a", validation_files="a", output_dir="b", vocabulary_size=40)
    for wrong, message in (
        (dict(model=TINY, prompts=True), "prompts: got True, expected False: the model has an enc"),
        (dict(model=TINY_GPT, masks=2, sequence_length=8), "masks: got 2, expected a number from"),
        (dict(model=TINY_GPT, prompts=True, sequence_length=8), "sequence_length: got 8, expected"),
        (dict(model=TINY_GPT, prompts=True, target_buckets=(8,)), "target_buckets: got .*none wit"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(**settings | wrong)
