"""Distils drafters for BART-like targets: T5s that read the target's encoder output, and BARTs."""

import json

import numpy as np
import pytest
from golden_languages import SHAPE, make_model, read_records

import specdec_jax as sd
from specdec_jax.commands import distill
from specdec_jax.models.bart import BartConfig
from specdec_jax.training.sequence_distillation import DistillConfig

pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.slow]
LINES = [line for line in read_records()["lines"][11:] if len(line) < 60][:16]


def configure(folder, **settings):
    given = dict(
        target=str(folder / "target"),
        source_files=("lines.txt",),
        validation_files=("more.txt",),
        data_dir=str(folder),
        output_dir=str(folder / "run"),
        drafter_shape=(16, 2, 8, 0, 1, 16),
        max_new_tokens=8,
        shard_size=8,
        batch_size=4,
        steps=2,
        buckets=(64,),
        batch_tokens=128,
        dtype="float32",
    )
    return DistillConfig(**given | settings)


def prepare(name, folder, **options):
    target = make_model(name, folder / "files", **options)
    sd.save(target, folder / "target", say=lambda line: None)
    (folder / "lines.txt").write_text("\n".join(LINES[:12]))
    (folder / "more.txt").write_text("\n".join(LINES[12:]))
    return target


@pytest.mark.parametrize("name", ["m2m_100", "mbart", "marian", "pegasus", "bart"])
def test_a_t5_learns_from_any_target(name, tmp_path):
    prepare(name, tmp_path)
    case = read_records()["cases"][name]
    languages = dict(source_language=case["source"], target_language=case["target"])
    distill.run(configure(tmp_path, **languages))
    target, model = (sd.load(tmp_path / path, "float32") for path in ("target", "run/model"))
    assert model.config.family == "t5" and model.config.encoder_dim == target.config.emb_dim
    first = (tmp_path / "run" / "outputs-train-greedy.tsv").read_text().splitlines()[0]
    ids = list(map(int, first.split("\t")[2].split()))
    if name == "m2m_100":
        assert ids[0] == target.vocabulary.languages.codes["de"]
    plain = sd.generate(target, LINES[:2], max_new_tokens=8, **languages)
    for drafter in (sd.ModelDrafter(model), sd.ModelDrafter(model, shortlist=40)):
        drafted = sd.generate(
            target, LINES[:2], drafter=drafter, gamma=3, max_new_tokens=8, **languages
        )
        np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    stats = drafted.stats
    assert stats.drafted and len(LINES[0]) > 0
    assert ids == plain.tokens[0][: len(ids)].tolist()


def test_a_bart_learns_from_a_bart(tmp_path):
    target = prepare("bart", tmp_path)
    shape = SHAPE | dict(num_decoder_layers=1, emb_dim=8)
    config = BartConfig(vocab_size=target.config.vocab_size, **shape, num_positions=64)
    small = sd.LanguageModel.random(config, 3, target.vocabulary, start_token=2, eos_ids=(2,))
    sd.save(small, tmp_path / "drafter", say=lambda line: None)
    distill.run(configure(tmp_path, drafter_shape=(), drafter=str(tmp_path / "drafter")))
    model = sd.load(tmp_path / "run/model", "float32")
    assert model.config.family == "bart" and model.config.num_positions == 64
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert any("acceptance" in json.loads(line) for line in log)


def test_what_cannot_be_distilled_is_rejected(tmp_path):
    target = prepare("m2m_100", tmp_path)
    with pytest.raises(
        ValueError, match="target: got 96 positions, expected at least 128, of buck"
    ):
        distill.run(configure(tmp_path, buckets=(128,)))
    with pytest.raises(ValueError, match="target_language: got 'xx', expected one of af"):
        distill.run(configure(tmp_path, source_language="fr", target_language="xx"))
    with pytest.raises(ValueError, match="source_language: got none, expected one of af"):
        distill.run(configure(tmp_path, target_language="de"))
    config = target.config.replace(encoder_vocab_size=300)
    separate = sd.LanguageModel.random(config, 0, target.vocabulary, start_token=2, eos_ids=(2,))
    sd.save(separate, tmp_path / "target", say=lambda line: None)
    with pytest.raises(ValueError, match="with separate vocabularies, expected one vocabulary"):
        distill.run(configure(tmp_path, source_language="fr", target_language="de"))
