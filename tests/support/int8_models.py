"""Shared by the tests of quantize, quantize_command and weight_only."""

import gpt_models
import make_checkpoints as make
import numpy as np
from make_checkpoints import TINY_1_0
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.models import weight_layouts
from specdec_jax.models.gpt import GPTConfig

RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, 24, n), 1] for n in (1, 5, 3, 6)]
HEAD = "decoder/logits_dense/kernel"
EMBEDDING = "token_embedder/embedding"


def save_tiny(folder, **shape):
    sd.save(tiny_t5(1, **shape), folder, dtype="int8")
    return folder


def stored_in(model) -> dict:
    """What a model holds by its parameters' names: arrays and `Int8Weight`s."""
    return {
        "/".join(path): value
        for path, value in weight_layouts.stored_parameters(model.network.params)
    }


def assert_weight(result, values, scales):
    assert isinstance(result, Int8Weight) and result.values.dtype == np.int8
    np.testing.assert_array_equal(result.values, values)
    np.testing.assert_array_equal(result.scales, scales)


def tied_gpt(folder):
    sd.save(
        sd.LanguageModel.random(GPTConfig(24, 16, 2, 2, 32, num_positions=16), 1, eos_ids=()),
        folder,
    )
    return folder


TIED = {
    "T5 1.0": lambda path: make.write_hf(
        path,
        make.to_tensors(make.random_params(TINY_1_0)),
        num_decoder_layers=2,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
    ),
    "GPT": tied_gpt,
    "GPT-2, Hugging Face": lambda path: gpt_models.write_hf(path, gpt_models.tensors()),
}
