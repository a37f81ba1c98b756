"""Drafters without an encoder, which attend to the output of the target's."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiers
from toy_models import compilations, noisy_copy, tiny_t5
from toy_training import TINY, config_of

import specdec_jax as sd
from specdec_jax.analysis import acceptance
from specdec_jax.checkpoints import converter, loader
from specdec_jax.commands import distill
from specdec_jax.decoding.under_jit import Decoder
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.parameters import flatten, parameter_count
from specdec_jax.models.t5 import T5Config
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.training import run_folder, train

pytestmark = pytest.mark.usefixtures("quick")
V, B, GAMMA, EOS = 24, 4, 3, 1
RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, V, n), EOS] for n in (1, 5, 3, 6)]
TARGET = tiny_t5(0, V)


@functools.cache
def decoder_of(noise: float) -> LanguageModel:
    """The target's decoder alone, or one like it."""
    model = noisy_copy(TARGET, noise) if noise else TARGET
    params = {name: node for name, node in model.params.items() if name != "encoder"}
    config = T5Config(
        **{**vars(TARGET.config), "num_encoder_layers": 0, "encoder_dim": TARGET.config.emb_dim}
    )
    return LanguageModel(config, params)


def decode(drafter, **options):
    options = dict(gamma=GAMMA, max_new_tokens=12, eos_ids=[EOS], key=jax.random.key(3)) | options
    return sd.generate(TARGET, INPUTS, drafter=drafter, **options)


def test_the_targets_own_decoder_is_always_right():
    drafter = sd.ModelDrafter(decoder_of(0.0))
    for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0)):
        result = decode(
            drafter, sampling=sampling, verifier="token", decoder_prefix=[[3, 4], [], [5], [2]]
        )
        assert result.stats.acceptance_rate == 1.0
    several = decode(
        drafter, num_samples=2, sampling=SamplingConfig(temperature=0.8), verifier="token"
    )
    assert several.stats.acceptance_rate == 1.0 and several.tokens.shape[0] == 2 * B


@tiers.parametrize("reduced", [{}, {"shortlist": [1, 2, 5, 7, 9, 11, 20]}, {"int8": True}], first=1)
def test_greedy_output_is_that_of_plain_decoding(reduced):
    drafter, plain = sd.ModelDrafter(decoder_of(0.3), **reduced), decode(None)
    result = decode(drafter)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert 0 < result.stats.accepted < result.stats.drafted
    alone = sd.generate(
        TARGET, INPUTS[2:3], drafter=drafter, gamma=GAMMA, max_new_tokens=12, eos_ids=[EOS]
    )
    np.testing.assert_array_equal(alone.tokens[0], plain.tokens[2])
    assert compilations(lambda: decode(drafter)) == 0


@pytest.mark.slow
def test_in_a_cascade():
    for cascade in (
        sd.VerticalCascade(sd.ModelDrafter(decoder_of(0.3)), sd.PromptLookupDrafter(), 2),
        sd.HorizontalCascade(sd.ModelDrafter(decoder_of(0.3)), sd.ModelDrafter(tiny_t5(5, V)), 2),
    ):
        np.testing.assert_array_equal(decode(cascade).tokens, decode(None).tokens)


@pytest.mark.slow
def test_scores_with_the_targets_encoder():
    model, fed = decoder_of(0.0), np.array([[0, 3, 4, 5]])
    inputs = np.array(INPUTS[1:2])
    np.testing.assert_allclose(
        model.logits(inputs, fed, encoder=TARGET), TARGET.logits(inputs, fed), atol=1e-5
    )
    with pytest.raises(ValueError, match="encoder: got none, expected a model of width 16"):
        model.logits(inputs, fed)
    with pytest.raises(ValueError, match="encoder: got one of width 16, expected none"):
        TARGET.logits(inputs, fed, encoder=TARGET)
    with pytest.raises(
        ValueError, match="encoder: got one of width 8, expected a model of width 16"
    ):
        model.logits(inputs, fed, encoder=tiny_t5(0, V, emb_dim=8))
    tokens = decode(None)
    agreed = acceptance.agreement(
        TARGET, model, INPUTS, tokens.tokens, tokens.lengths, SamplingConfig()
    )
    valid = np.arange(agreed.overlap.shape[1]) < tokens.lengths[:, None]
    assert np.all(agreed.overlap[valid] == 1)


def test_what_does_not_fit_is_rejected():
    model = decoder_of(0.0)
    with pytest.raises(ValueError, match="target: got a model that reads another's encoder output"):
        sd.generate(model, INPUTS)
    other = tiny_t5(0, V, emb_dim=8)
    with pytest.raises(
        ValueError, match="reads encoder outputs of width 16, expected the target's width, 8"
    ):
        sd.generate(other, INPUTS, drafter=sd.ModelDrafter(model))
    for shape in (
        dict(num_encoder_layers=1, encoder_dim=16),
        dict(num_encoder_layers=0, encoder_dim=0),
    ):
        with pytest.raises(ValueError, match="T5Config"):
            tiny_t5(0, V, **shape)
    with pytest.raises(ValueError, match="num_encoder_layers: got 0, expected at least 1"):
        tiny_t5(0, V, num_encoder_layers=0)


def test_is_stored_and_loaded(tmp_path):
    model = decoder_of(0.0)
    assert parameter_count(model.config) == sum(leaf.size for leaf in jax.tree.leaves(model.params))
    converter.save(model, tmp_path / "decoder")
    loaded = loader.load(tmp_path / "decoder", "float32")
    assert loaded.config == model.config
    for name, leaf in flatten(loaded.params).items():
        np.testing.assert_array_equal(leaf, flatten(model.params)[name])


@pytest.fixture(scope="module")
def teacher(language, tmp_path_factory):
    config = config_of(language, tmp_path_factory.mktemp("teacher"))
    train.fit(config)
    return f"{config.output_dir}/model"


@pytest.mark.slow
def test_learns_from_the_model_whose_encoder_it_reads(language, teacher, tmp_path):
    shape = T5Config(
        **{**vars(TINY), "num_encoder_layers": 0, "encoder_dim": TINY.emb_dim, "emb_dim": 8}
    )
    config = config_of(
        language, tmp_path, model=shape, teacher=teacher, distill_weight=1.0, select="agreement"
    )
    before = (
        train.Run(config, run_folder.Checkpoints(tmp_path / "none", select="agreement"))
        .initial_state()
        .params
    )
    params = train.fit(config)

    def weight(params):
        return params["decoder"]["layers_0"]["encoder_decoder_attention"]["key"]["kernel"]

    assert weight(params).shape[0] == TINY.emb_dim and np.any(weight(params) != weight(before))
    drafter = sd.ModelDrafter(sd.load(tmp_path / "model", "float32"))
    result = sd.generate(
        sd.load(teacher, "float32"), ["bara ceni"], drafter=drafter, gamma=2, max_new_tokens=8
    )
    plain = sd.generate(sd.load(teacher, "float32"), ["bara ceni"], max_new_tokens=8)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    stranger = LanguageModel.random(sd.load(teacher, "float32").config, 5, drafter.model.vocabulary)
    with pytest.raises(ValueError, match="trained on another target's encoder output"):
        sd.generate(stranger, ["bara ceni"], drafter=drafter)
    with pytest.raises(
        ValueError, match="teacher: got .*, expected the model with which the run in"
    ):
        converter.save(stranger, tmp_path / "stranger")
        train.fit(dataclasses.replace(config, teacher=str(tmp_path / "stranger"), steps=13))


def test_training_without_a_teacher_is_rejected(language, tmp_path):
    shape = T5Config(**{**vars(TINY), "num_encoder_layers": 0, "encoder_dim": 16})
    with pytest.raises(ValueError, match="teacher: got None, expected the model whose encoder"):
        config_of(language, tmp_path, model=shape)


def test_is_no_teacher_and_no_other_format(language, tmp_path):
    model = decoder_of(0.0)
    with pytest.raises(
        ValueError,
        match="format: got 'huggingface' for a model without an encoder of its own, expected "
        "'specdec'",
    ):
        converter.save(model, tmp_path / "hf", format="huggingface")
    with pytest.raises(
        ValueError,
        match="drafter: got encoder_dim 16, expected a T5 with an encoder, or encoder_dim 8",
    ):
        Decoder(tiny_t5(0, V, emb_dim=8).config, sd.ModelDrafter(model))


def test_distillation_rejects_another_width_before_it_decodes(monkeypatch):
    shapes = {"small": tiny_t5(0, V, emb_dim=8).config, "drafter": decoder_of(0.0).config}
    monkeypatch.setattr(loader, "load_shape", shapes.__getitem__)
    files = dict(source_files=(__file__,), validation_files=(__file__,), output_dir="nowhere")
    for target, drafter in (("small", "drafter"), ("drafter", "small")):
        with pytest.raises(ValueError, match=f"target: got {target} with"):
            distill.run(distill.DistillConfig(target=target, drafter=drafter, **files))
