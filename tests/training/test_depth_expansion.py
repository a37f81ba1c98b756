"""Deeper networks out of trained ones."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from toy_training import TINY, TINY_GPT, config_of

from specdec_jax.checkpoints import converter, loader
from specdec_jax.models import parameters
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.tokenizers import vocabularies
from specdec_jax.training import depth_expansion, run_folder, train

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TINY, TINY_GPT], ids=["T5", "GPT"])
def test_it_begins_as_nearly_what_the_model_is(monkeypatch, shape):
    stacks = ("decoder",) if isinstance(shape, GPTConfig) else ("decoder", "encoder")
    shallow = LanguageModel.random(dataclasses.replace(shape, num_decoder_layers=2), seed=3)
    deep = dataclasses.replace(shape, **{f"num_{stack}_layers": 5 for stack in stacks})
    ids = np.random.default_rng(0).integers(2, shape.vocab_size, (4, 6))

    def logits(share: float):
        monkeypatch.setattr(depth_expansion, "_SHARE", share)
        params = shallow.params
        for stack in stacks:
            params = depth_expansion.deepen(params, stack, 5)
        assert parameters.parameter_count(deep) == optax.tree.size(params)
        buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
        assert len(set(buffers)) == len(buffers), "training writes over them"
        return LanguageModel(deep, params).logits(None if len(stacks) == 1 else ids, ids)

    wanted = shallow.logits(None if len(stacks) == 1 else ids, ids)

    def away(share):
        return float(np.sqrt(np.mean((logits(share) - wanted) ** 2)))

    assert 0 < away(0.1) < 0.3 * np.std(wanted) and away(1.0) > 3 * away(0.1)
    np.testing.assert_allclose(logits(0.0), wanted, atol=1e-5)


@pytest.mark.slow
def test_copies_follow_their_layers():
    params = LanguageModel.random(dataclasses.replace(TINY, num_decoder_layers=2)).params
    result = depth_expansion.deepen(params, "decoder", 5)["decoder"]
    for layer, source in enumerate([0, 0, 0, 1, 1]):
        own, given = result[f"layers_{layer}"], params["decoder"][f"layers_{source}"]
        share = 1.0 if layer in (0, 3) else 0.1
        for node, name in (
            ("self_attention", "out"),
            ("encoder_decoder_attention", "out"),
            ("mlp", "wo"),
        ):
            np.testing.assert_allclose(
                own[node][name]["kernel"], share * given[node][name]["kernel"], rtol=1e-6
            )
        np.testing.assert_array_equal(own["mlp"]["wi_0"]["kernel"], given["mlp"]["wi_0"]["kernel"])
    assert result["decoder_norm"] is params["decoder"]["decoder_norm"]
    for layers in (1, 0):
        with pytest.raises(ValueError, match=f"decoder: got 2 layers, expected from 1 to {layers}"):
            depth_expansion.deepen(params, "decoder", layers)


def test_layers_whose_copies_would_not_add_little_are_rejected(language, tmp_path):
    """A norm after a block would undo the tenth."""
    shape = BartConfig(40, 8, 2, 1, 1, 16, num_positions=32)
    vocabulary = vocabularies.SentencePieceVocabulary.train(
        (language / "train.tsv").read_text().split("\n"), 40
    )
    converter.save(LanguageModel.random(shape, 0, vocabulary, eos_ids=(1,)), tmp_path / "start")
    deeper = dataclasses.replace(shape, num_decoder_layers=2)
    config = config_of(
        language, tmp_path / "run", model=deeper, initialise_from=str(tmp_path / "start")
    )
    with pytest.raises(ValueError, match="initialise_from: got BartConfig.*as many layers"):
        train.Run(config, run_folder.Checkpoints(tmp_path / "run")).initial_state()
    short = config_of(language, tmp_path / "run", model=shape.replace(num_positions=16))
    with pytest.raises(ValueError, match="model: got '16 positions', .* buckets = 32"):
        train.fit(short)


@pytest.mark.slow
def test_a_run_starts_from_a_shallower_model(language, tmp_path):
    vocabulary = vocabularies.SentencePieceVocabulary.train(
        (language / "train.tsv").read_text().split("\n"), 40
    )
    converter.save(LanguageModel.random(TINY, 0, vocabulary), tmp_path / "start")
    start = loader.load(tmp_path / "start", "float32").params["decoder"]["layers_0"]["mlp"]["wo"][
        "kernel"
    ]
    shape = dataclasses.replace(TINY, num_decoder_layers=TINY.num_decoder_layers + 1)
    config = config_of(
        language,
        tmp_path / "run",
        model=shape,
        initialise_from=str(tmp_path / "start"),
        steps=2,
        warmup_steps=0,
        decay_steps=0,
        evaluate_every=2,
    )
    begun = (
        train.Run(config, run_folder.Checkpoints(tmp_path / "run"))
        .initial_state()
        .params["decoder"]
    )
    np.testing.assert_array_equal(begun["layers_0"]["mlp"]["wo"]["kernel"], start)
    copy = np.asarray(begun["layers_1"]["mlp"]["wo"]["kernel"])
    np.testing.assert_allclose(copy, 0.1 * start, rtol=1e-6)
    params = train.fit(config)
    moved = np.abs(params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"] - copy).max()
    assert moved > 1e-3 * np.abs(copy).max()
    assert (
        loader.load(tmp_path / "run" / "model").config.num_decoder_layers
        == shape.num_decoder_layers
    )
