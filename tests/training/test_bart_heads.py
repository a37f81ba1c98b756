"""Heads, EAGLE drafters and learning while decoding, for BART-like targets."""

import numpy as np
import pytest
from golden_languages import make_model, read_records

import specdec_jax as sd
from specdec_jax.models.bart import BartConfig
from specdec_jax.training import eagle, heads, train
from specdec_jax.training.run_vocabulary import RunVocabulary

pytestmark = pytest.mark.usefixtures("quick")
LINES = [line for line in read_records()["lines"][11:] if len(line) < 60][:16]
RUN = dict(
    steps=4,
    warmup_steps=0,
    decay_steps=0,
    learning_rate=1e-2,
    batch_tokens=256,
    buckets=(64,),
    log_every=2,
    save_every=4,
    evaluate_every=4,
    dtype="float32",
)


def prepare(name, folder):
    """Saves a target and its own outputs; returns its languages and the settings of a run."""
    made = make_model(name, folder / "files")
    # Embeddings this small would give every token the same probability.
    params, ids = made.params, dict(start_token=made.start_token, eos_ids=made.eos_ids)
    params["token_embedder"]["embedding"] *= 20
    target = sd.LanguageModel(made.config, params, made.vocabulary, **ids)
    sd.save(target, folder / "target", say=lambda line: None)
    target = sd.load(folder / "target", "float32")
    case = read_records()["cases"][name]
    languages = dict(source_language=case["source"], target_language=case["target"])
    found = sd.generate(target, LINES, max_new_tokens=8, **languages)
    rows = zip(LINES, found.texts, found.tokens, found.lengths, strict=True)
    lines = [
        f"{line}\t{text or 'a'}\t{' '.join(map(str, ids[:n]))}\n" for line, text, ids, n in rows
    ]
    (folder / "train.tsv").write_text("".join(lines[:12]), encoding="utf-8")
    (folder / "more.tsv").write_text("".join(lines[12:]), encoding="utf-8")
    settings = dict(
        target=str(folder / "target"),
        train_files="train.tsv",
        validation_files="more.tsv",
        data_dir=str(folder),
        output_dir=str(folder / "run"),
    )
    return target, languages, RUN | settings | languages


def assert_same_tokens(target, drafter, languages):
    given = dict(max_new_tokens=8, **languages)
    plain = sd.generate(target, LINES[:4], **given)
    for how in (dict(gamma=2), dict(tree=sd.Tree.uniform((2, 2)))):
        drafted = sd.generate(target, LINES[:4], drafter=drafter, **how, **given)
        np.testing.assert_array_equal(plain.tokens, drafted.tokens)
        assert drafted.stats.drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, share", [("bart", True), ("m2m_100", False), ("marian", True), ("mbart", True)]
)
def test_heads_learn_from_any_target(name, share, tmp_path):
    target, languages, settings = prepare(name, tmp_path)
    heads.fit(heads.HeadsTrainConfig(**settings, num_heads=2, share_head=share))
    drafter = sd.HeadsDrafter.load(tmp_path / "run" / "heads", target)
    assert_same_tokens(target, drafter, languages)


@pytest.mark.slow
@pytest.mark.parametrize("name, own_encoder", [("bart", True), ("m2m_100", False)])
def test_a_drafter_learns_to_read_the_states_of_any_target(name, own_encoder, tmp_path):
    """A T5 that reads the target's encoder output, and a BART."""
    target, languages, settings = prepare(name, tmp_path)
    shape = dict(vocab_size=target.config.vocab_size, emb_dim=8, num_heads=2, mlp_dim=16)
    if own_encoder:
        layers = dict(num_encoder_layers=1, num_decoder_layers=1)
        config = BartConfig(**shape, **layers, num_positions=96)
    else:
        layers = dict(num_encoder_layers=0, num_decoder_layers=1, encoder_dim=16, head_dim=4)
        config = sd.T5Config(**shape, **layers)
    ids = dict(start_token=target.start_token, eos_ids=target.eos_ids)
    known = None if own_encoder else target.fingerprint
    random = sd.LanguageModel.random(config, 3, target.vocabulary, **ids)
    drafter = sd.LanguageModel(
        config, random.params, target.vocabulary, **ids, encoder_fingerprint=known
    )
    sd.save(drafter, tmp_path / "drafter", say=lambda line: None)
    path = str(tmp_path / "drafter")
    eagle.fit(eagle.EagleTrainConfig(**settings, drafter=path, depth=2, model_learning_rate=1e-2))
    assert_same_tokens(target, sd.EagleDrafter.load(tmp_path / "run/eagle", target), languages)


@pytest.mark.slow
@pytest.mark.parametrize("own_encoder", [True, False])
def test_a_drafter_learns_while_a_bart_decodes(own_encoder):
    """Rows are padded to more than the drafter has positions."""
    shape = dict(emb_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, mlp_dim=32)
    target = sd.LanguageModel.random(BartConfig(24, **shape, num_positions=28), 0, eos_ids=(2,))
    if own_encoder:
        model = sd.LanguageModel.random(target.config, 1, eos_ids=(2,))
    else:
        own = sd.T5Config(24, 16, 2, 8, 0, 1, 32, encoder_dim=16)
        model = sd.LanguageModel.random(own, 1, eos_ids=(2,))
    inputs = [[3 + i % 20, 4 + i % 19, 2] for i in range(48)]
    learner = sd.OnlineDistillation(target, sd.ModelDrafter(model), share_of_time=1.0)
    given = dict(batch_size=4, gamma=2, max_new_tokens=8)
    plain = dict(sd.decode_stream(target, inputs, batch_size=4, max_new_tokens=8))
    found = dict(sd.decode_stream(target, inputs, learner=learner, **given))
    assert {n: rows[0].tokens for n, rows in found.items()} == {
        n: rows[0].tokens for n, rows in plain.items()
    }
    assert learner.updates > 1 and not learner.ended
    assert all(0 <= one.right <= one.tokens for one in learner.agreements)


def test_a_texts_language_comes_before_it_where_a_file_has_no_ids(tmp_path):
    target = make_model("m2m_100", tmp_path / "files")
    (tmp_path / "pairs.tsv").write_text("Tom is here.\tTom ist hier.\n")
    files = dict(train_files="pairs.tsv", validation_files="pairs.tsv", data_dir=str(tmp_path))
    files |= dict(source_language="fr", target_language="de", output_dir="run", target="target")
    config = heads.HeadsTrainConfig(**RUN, **files).model_config(target.config)
    ids = RunVocabulary.from_model(target, "target")
    batch = train._make_batches(config, ids, config.paths("train_files"))[0]
    codes = target.vocabulary.languages.codes
    assert (batch.inputs[0, 0], batch.targets[0, 0]) == (codes["fr"], codes["de"])


def test_a_target_that_cannot_be_learnt_from_is_rejected():
    shape = dict(emb_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, mlp_dim=32)
    for config, expected in (
        (
            BartConfig(24, **shape, encoder_vocab_size=30),
            "target: got a model with separate vocabularies, expected one vocabulary for inputs",
        ),
        (
            sd.T5Config(24, 16, 2, 8, 0, 1, 32, encoder_dim=16),
            "target: got a model that reads another's encoder output, expected one with an enco",
        ),
    ):
        with pytest.raises(ValueError, match=expected):
            train.check_target(config)
    files = dict(train_files="a.tsv", validation_files="b.tsv", output_dir="run", target="target")
    short = BartConfig(24, **shape, num_positions=16)
    config = heads.HeadsTrainConfig(**files, buckets=(32,)).model_config(short)
    with pytest.raises(ValueError, match="target: got '16 positions', expected at least buckets"):
        train.check_lengths(config, "target", short)
