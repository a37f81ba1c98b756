"""T5Gemmas as targets and drafters of `specdec distill`, and Gemmas that learn from text.

Heads, and drafters that read states, of both.
"""

import json

import numpy as np
import pytest
from gemma_tokenizer import END, make_lines, write_tokenizer
from toy_training import text_config, write_text

import specdec_jax as sd
from specdec_jax.commands import distill
from specdec_jax.models.gemma import GemmaConfig, T5GemmaConfig
from specdec_jax.models.t5 import check_t5
from specdec_jax.tokenizers import huggingface_folders
from specdec_jax.training import train
from specdec_jax.training.sequence_distillation import DistillConfig

pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.slow]
LINES = [line for line in make_lines(60) if line.strip() and line.isprintable()][:16]
SHAPE = dict(emb_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, num_decoder_layers=2, mlp_dim=24)
SHAPE |= dict(windows=(3, 0))
ENCODER = dict(num_encoder_layers=2, encoder_emb_dim=24, encoder_mlp_dim=16)
ENCODER |= dict(encoder_num_heads=2, encoder_num_kv_heads=1, encoder_windows=(4, 0))
KINDS = {
    "t5gemma": dict(attention_cap=5.0, logits_cap=8.0),
    "t5gemma2": dict(merged_attention=True, qk_norm=True, encoder_emb_dim=16),
}


def make_model(kind, folder, seed=0, **shape):
    """Writes a random model with Gemma's tokenizer in miniature, and returns it."""
    folder.mkdir()
    write_tokenizer(folder)
    vocabulary = huggingface_folders.open_folder(folder, (1, END))
    config = T5GemmaConfig(vocabulary.size, **SHAPE | ENCODER | KINDS[kind] | shape)
    ids = dict(start_token=2, eos_ids=(1, END))
    model = sd.LanguageModel.random(config, seed, vocabulary, **ids)
    sd.save(model, folder / "model", say=lambda line: None)
    return model


def run_distill(folder, **settings):
    (folder / "lines.txt").write_text("\n".join(LINES[:12]), encoding="utf-8")
    (folder / "more.txt").write_text("\n".join(LINES[12:]), encoding="utf-8")
    given = dict(
        target=str(folder / "target" / "model"),
        source_files=("lines.txt",),
        validation_files=("more.txt",),
        data_dir=str(folder),
        output_dir=str(folder / "run"),
        max_new_tokens=8,
        batch_size=4,
        steps=2,
        buckets=(128,),
        batch_tokens=256,
        dtype="float32",
    )
    distill.run(DistillConfig(**given | settings))
    log = (folder / "run" / "log.jsonl").read_text().splitlines()
    assert any("acceptance" in json.loads(line) for line in log)
    return sd.load(folder / "run" / "model", "float32", say=lambda line: None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_t5_without_an_encoder_learns_from_a_t5gemma(kind, tmp_path):
    target = make_model(kind, tmp_path / "target")
    model = run_distill(tmp_path, drafter_shape=(16, 2, 8, 0, 1, 16))
    assert model.config.family == "t5"
    assert model.config.encoder_dim == target.config.encoder_emb_dim
    plain = sd.generate(target, LINES[:3], max_new_tokens=8)
    drafted = sd.generate(
        target, LINES[:3], drafter=sd.ModelDrafter(model), gamma=3, max_new_tokens=8
    )
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert drafted.stats.drafted


@pytest.mark.parametrize("kind", KINDS)
def test_a_t5gemma_learns_from_a_t5gemma(kind, tmp_path):
    make_model(kind, tmp_path / "target")
    before = make_model(kind, tmp_path / "drafter", 1, num_decoder_layers=1)
    model = run_distill(tmp_path, drafter=str(tmp_path / "drafter" / "model"))
    assert model.config == before.config
    moved = [not np.array_equal(*pair) for pair in zip(*map(list_leaves, (model, before)))]
    assert all(moved)


def list_leaves(model):
    return [np.asarray(leaf) for leaf in sd.models.parameters.flatten(model.params).values()]


def test_a_gemma_learns_text_and_teaches_a_smaller_one(tmp_path):
    write_text(tmp_path)
    shape = dict(emb_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, windows=(6, 0))
    caps = dict(attention_cap=20.0, logits_cap=20.0, qk_norm=True)
    large = GemmaConfig(40, num_decoder_layers=2, **shape, **caps)
    train.fit(text_config(tmp_path, tmp_path / "large", model=large))
    small = GemmaConfig(40, num_decoder_layers=1, **shape)
    teacher = str(tmp_path / "large" / "model")
    settings = dict(model=small, teacher=teacher, distill_weight=0.5)
    train.fit(text_config(tmp_path, tmp_path / "small", **settings))
    for name in ("large", "small"):
        log = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses = [found["loss"] for line in log if "loss" in (found := json.loads(line))]
        assert losses[-1] < 0.6 * losses[0]
    target, model = (sd.load(tmp_path / name / "model", "float32") for name in ("large", "small"))
    plain = sd.generate(target, ["ba ce"], max_new_tokens=8)
    drafted = sd.generate(
        target, ["ba ce"], drafter=sd.ModelDrafter(model), gamma=3, max_new_tokens=8
    )
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert drafted.stats.accepted


def test_t5x_is_for_t5s(tmp_path):
    target = make_model("t5gemma", tmp_path / "target")
    with pytest.raises(ValueError, match="target: got a T5GemmaConfig, expected a T5"):
        check_t5("target", target.config)
