"""Training, distilling and counting with every kind of vocabulary that `load` takes."""

import dataclasses
import json
import pathlib
import shutil

import distill_models
import numpy as np
import pytest
import tokenizers
from golden_models import GOLDEN
from toy_training import TINY, TINY_GPT, config_of, text_config

import specdec_jax as sd
from specdec_jax.commands import distill, main
from specdec_jax.tokenizers.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
)
from specdec_jax.training import config as training_config
from specdec_jax.training import heads, run_vocabulary, train

pytestmark = pytest.mark.usefixtures("quick")
one_optimizer = distill_models.one_optimizer


def tokenizer_json(texts, special=()) -> TokenizerJsonVocabulary:
    """Returns a `tokenizer.json` of 50 tokens.

    Without `special`, id 0 is a letter and EOS the last id.
    """
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>" if special else None))
    made.pre_tokenizer, made.decoder = (
        tokenizers.pre_tokenizers.Metaspace(),
        tokenizers.decoders.Metaspace(),
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=50 - (not special), special_tokens=list(special)
    )
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens(["</s>"])
    return TokenizerJsonVocabulary(made.to_str())


@pytest.fixture(scope="module")
def vocabularies(language):
    texts = (language / "train.tsv").read_text().replace("\t", "\n").splitlines()
    result = {
        "tokenizer.json": tokenizer_json(texts, ("<pad>", "</s>", "<unk>")),
        "no padding": tokenizer_json(texts),
        "bytes": ByteVocabulary(0),
    }
    assert result["no padding"].eos_ids == (49,) and result["no padding"].piece(0).isalpha()
    return result


def saved(vocabulary, folder, **ids) -> str:
    """Writes a random target; returns its folder."""
    shape = dataclasses.replace(TINY, vocab_size=-(-vocabulary.size // 8) * 8)
    drawn = sd.LanguageModel.random(shape, vocabulary=vocabulary, eos_ids=vocabulary.eos_ids)
    sd.save(
        sd.LanguageModel(shape, drawn.params, vocabulary, eos_ids=vocabulary.eos_ids, **ids), folder
    )
    return str(folder)


def check_drafts(folder, target: str, name: str = "model") -> sd.LanguageModel:
    """Checks that a model has its target's vocabulary and special ids, and drafts for it."""
    model, target = sd.load(pathlib.Path(folder) / name, "float32"), sd.load(target, "float32")
    assert type(model.vocabulary) is type(target.vocabulary)
    assert model.vocabulary.fingerprint() == target.vocabulary.fingerprint()
    assert (model.start_token, model.eos_ids) == (target.start_token, target.eos_ids)
    sd.ModelDrafter(model).check(target)
    return model


def distilled(target: str, language, output, **settings) -> str:
    """Distils for three steps; returns the folder of the run."""
    given = dict(
        target=target,
        drafter_shape=(8, 2, 4, 1, 1, 16),
        source_files=("more.tsv",),
        validation_files=("more.tsv",),
        data_dir=str(language),
        output_dir=str(output),
        max_new_tokens=8,
        batch_size=4,
        steps=3,
        warmup_steps=0,
        decay_steps=0,
        batch_tokens=128,
        buckets=(32,),
    )
    distill.run(distill.DistillConfig(**given | settings))
    return str(output)


@pytest.mark.slow
def test_a_folder_of_the_hub_is_distilled(language, tmp_path):
    """`tokenizer.json` with `spiece.model` beside it, as every T5 on the Hub has them."""
    tokens = SentencePieceVocabulary.load(GOLDEN / "hf_tokenizer/spiece.model", 20)
    sd.convert(saved(tokens, tmp_path / "ours"), tmp_path / "target", "huggingface")
    for path in (GOLDEN / "hf_tokenizer").glob("[ts]*"):
        shutil.copy(path, tmp_path / "target")
    target = str(tmp_path / "target")
    assert isinstance(sd.load(target).vocabulary, TokenizerJsonVocabulary)
    check_drafts(distilled(target, language, tmp_path / "run"), target)


@pytest.mark.slow
def test_a_vocabulary_without_padding_is_distilled(vocabularies, language, tmp_path):
    """In it 0 is a letter; the target has a start token of its own."""
    target = saved(vocabularies["no padding"], tmp_path / "target", start_token=3)
    check_drafts(distilled(target, language, tmp_path / "run"), target)
    rows = (tmp_path / "run/outputs-train-greedy.tsv").read_text().splitlines()
    assert len(rows) == 20  # none is left out for an id 0
    stored = json.loads((tmp_path / "run/config.json").read_text())
    config = training_config.TrainConfig(**{**stored, "model": train.build_config(stored["model"])})
    assert train.Run(config, train.Checkpoints(tmp_path / "run")).objective.start_token == 3


@pytest.mark.parametrize("kind", ["tokenizer.json", "no padding", "bytes"])
def test_a_run_keeps_the_vocabulary_of_its_model(kind, vocabularies, language, tmp_path):
    vocabulary = vocabularies[kind]
    defaults = sd.ModelDefaults(forced_bos_token_id=4, bad_words_ids=((3, 4),))
    given = {"x": run_vocabulary.RunVocabulary(vocabulary, 3, (5, 7), defaults)}
    corpus = config_of(language, tmp_path).corpus
    ids = run_vocabulary.choose_vocabulary(
        "", tmp_path, vocabulary.size, given, corpus, pytest.fail
    )
    assert ids == given["x"] and not list(tmp_path.iterdir())
    ids.write(tmp_path)
    read = run_vocabulary.RunVocabulary.read(tmp_path)
    assert read.vocabulary.fingerprint() == vocabulary.fingerprint() and read[1:] == (
        3,
        (5, 7),
        defaults,
    )
    other = {"y": run_vocabulary.RunVocabulary(vocabulary, 2, (5, 7))}
    for path, size, more, message in (
        ("", 7, {}, f"vocabulary: got {vocabulary.size} tokens of x, expected vocabulary_size = 7"),
        ("", vocabulary.size, other, "y: got start token 2, expected x's, 3"),
        (
            str(tmp_path / "a.model"),
            vocabulary.size,
            {},
            "got '.*a.model' for x's vocabulary, expected (none|a name)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run_vocabulary.choose_vocabulary(
                path, tmp_path, size, given | more, corpus, pytest.fail
            )


def test_a_damaged_record_names_its_file(vocabularies, tmp_path):
    run_vocabulary.RunVocabulary(vocabularies["bytes"], 3, (5, 7)).write(tmp_path)
    path = tmp_path / "vocabulary.json"
    for change in ({"start_token": "x"}, {"start_token": 1.5}, {"eos_ids": ["x"]}, {"eos_ids": 1}):
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"eos_ids": [1], "start_token": 0} | change)
        )
        with pytest.raises(
            ValueError, match="vocabulary.json: got .*, expected the vocabulary and special ids"
        ):
            run_vocabulary.RunVocabulary.read(tmp_path)


def test_a_text_without_tokens_is_rejected_by_its_number(language, vocabularies, tmp_path):
    bare = TokenizerJsonVocabulary(vocabularies["tokenizer.json"].text, around=([], []))
    (tmp_path / "pairs.tsv").write_text("a\tb\n\tb\n")
    with pytest.raises(
        ValueError, match="pairs.tsv, example 2: got a text without tokens, expected at least one"
    ):
        config_of(language, tmp_path).corpus.batches(bare, [tmp_path / "pairs.tsv"], 50, 100, 0)


@pytest.mark.slow
def test_a_tokenizer_json_is_trained_with(vocabularies, language, tmp_path):
    """From a file, and then of the model that a run begins with."""
    path = tmp_path / "tokenizer.json"
    path.write_text(vocabularies["tokenizer.json"].text)
    few = dict(vocabulary_size=50, steps=2, warmup_steps=0, decay_steps=0, buckets=(32,))
    train.fit(config_of(language, tmp_path / "first", vocabulary=str(path), **few))
    first = str(tmp_path / "first/model")
    train.fit(config_of(language, tmp_path / "second", initialise_from=first, **few))
    for folder in (first, tmp_path / "second/model"):
        model = sd.load(folder)
        assert isinstance(model.vocabulary, TokenizerJsonVocabulary)
        assert model.vocabulary.fingerprint() == vocabularies["tokenizer.json"].fingerprint()


@pytest.mark.parametrize("start", [49, 3])
def test_a_decoder_only_model_learns_the_id_0(start, vocabularies, language, tmp_path):
    """Its documents begin with the model's start token; one that is not EOS stands before each."""
    vocabulary = vocabularies["no padding"]
    (tmp_path / "a.txt").write_text("bara ceni\n\ndite\n")
    corpus = text_config(tmp_path, tmp_path, sequence_length=40).corpus
    batch = corpus.batches(vocabulary, [tmp_path / "a.txt"], 64, 40, 0, start)[0]
    documents = [vocabulary.encode(text) + [49] for text in ("bara ceni", "dite")]
    stream = [start, *documents[0], *([start] * (start != 49)), *documents[1]]
    for row, expected in ((batch.inputs[0], stream[:-1]), (batch.targets[0], stream[1:])):
        assert [int(i) for i in row if i >= 0] == expected
    with pytest.raises(ValueError, match="a.txt: got the id 49, expected at most 48"):
        corpus.batches(vocabulary, [tmp_path / "a.txt"], 49, 40, 0, start)


@pytest.mark.slow
def test_a_decoder_only_model_is_trained_further_with_its_tokenizer(vocabularies, tmp_path):
    vocabulary, shape = vocabularies["no padding"], dataclasses.replace(TINY_GPT, vocab_size=56)
    drawn = sd.LanguageModel.random(shape, vocabulary=vocabulary)
    model = sd.LanguageModel(shape, drawn.params, vocabulary, start_token=49, eos_ids=(49,))
    sd.save(model, tmp_path / "start")
    (tmp_path / "train.txt").write_text(f"bara ceni\n{vocabulary.piece(0)}\n")
    settings = dict(
        model=shape,
        vocabulary_size=50,
        validation_files="train.txt",
        steps=2,
        warmup_steps=0,
        decay_steps=0,
    )
    train.fit(
        text_config(tmp_path, tmp_path / "run", initialise_from=str(tmp_path / "start"), **settings)
    )
    trained = sd.load(tmp_path / "run/model", "float32")
    assert (trained.start_token, trained.eos_ids, trained.vocabulary.size) == (49, (49,), 50)
    assert not np.array_equal(trained.params["decoder"]["decoder_norm"]["scale"], 1.0)


@pytest.mark.slow
def test_heads_and_tables_of_any_vocabulary(vocabularies, language, tmp_path):
    vocabulary = vocabularies["no padding"]
    target = saved(vocabulary, tmp_path / "target")
    settings = heads.HeadsTrainConfig(
        target=target,
        train_files="more.tsv",
        validation_files="more.tsv",
        output_dir=str(tmp_path / "run"),
        data_dir=str(language),
        num_heads=2,
        share_head=False,
        steps=2,
        warmup_steps=0,
        decay_steps=0,
        batch_tokens=128,
        buckets=(32,),
    )
    heads.fit(settings)
    model = sd.load(target, "float32")
    for drafter in (
        sd.HeadsDrafter.load(tmp_path / "run/heads", model),
        sd.NGramDrafter.load(counted(target, language, tmp_path), model.vocabulary),
    ):
        result = sd.generate(model, ["bara ceni"], drafter=drafter, gamma=1, max_new_tokens=4)
        assert result.texts == sd.generate(model, ["bara ceni"], max_new_tokens=4).texts


def counted(target: str, language, folder) -> str:
    path = str(folder / "table.npz")
    flags = [f"--target={target}", f"--input_file={language / 'more.tsv'}", f"--output={path}"]
    assert main.main(["count", "--compilation_cache_dir=", *flags]) == 0
    return path


def test_a_text_has_one_eos_where_a_model_stops_at_several(vocabularies, language, tmp_path):
    """The first ends a text; the others are ordinary tokens at which the model stops too."""
    several = TokenizerJsonVocabulary(vocabularies["tokenizer.json"].text, (1, 7))
    ids = run_vocabulary.RunVocabulary(several, 0, (1, 7))
    pair = train._make_batches(
        config_of(language, tmp_path, buckets=(32,)), ids, [language / "more.tsv"]
    )._pairs[0]
    assert all(side[-1] == 1 and 1 not in side[:-1] and side[-2] != 7 for side in pair)
