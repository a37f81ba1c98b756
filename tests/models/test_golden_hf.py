"""Models saved by transformers give its logits and its greedy tokens."""

import numpy as np
import pytest
from golden_models import DRAFTERS, engine_tokens, golden_hf_models, greedy_tokens

from specdec_jax.checkpoints.loader import load
from specdec_jax.models.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("quick")
MODELS = {name: (folder, io) for name, folder, io in golden_hf_models()}


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    folder, io = MODELS[request.param]
    return load(folder, "float32"), io


def test_logits_of_a_padded_batch(golden):
    model, io = golden
    logits = model.logits(io["inputs"], io["decoder_tokens"], io["input_lengths"])
    np.testing.assert_allclose(logits, io["logits"], rtol=0, atol=1e-4)


def test_greedy_tokens_of_a_padded_batch(golden):
    model, io = golden
    assert io["greedy_margin"].min() > 0.01  # far above what logits may differ by
    tokens = greedy_tokens(model, io["inputs"], io["input_lengths"], 16, model.eos_ids)
    np.testing.assert_array_equal(tokens, io["greedy"])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_of_the_decode_loop(golden, drafter):
    model, io = golden
    early = (int(io["early_eos_id"]),)
    for eos_ids, expected in ((None, io["greedy"]), (early, io["greedy_early"])):
        tokens = engine_tokens(
            model, io["inputs"], io["input_lengths"], 16, eos_ids, drafter=drafter
        )
        np.testing.assert_array_equal(tokens, expected)


def test_greedy_tokens_with_another_eos(golden):
    model, io = golden
    tokens = greedy_tokens(model, io["inputs"], io["input_lengths"], 16, (int(io["early_eos_id"]),))
    assert (tokens == 0).any()
    np.testing.assert_array_equal(tokens, io["greedy_early"])


def test_greedy_tokens_of_a_row_alone_without_padding():
    folder, io = MODELS["hf_t5_1_0"]
    model = load(folder, "float32")
    row, length = 1, io["input_lengths"][1]  # the shortest; the batch above pads it
    tokens = greedy_tokens(model, io["inputs"][row : row + 1, :length], [length], 16, model.eos_ids)
    np.testing.assert_array_equal(tokens, io["greedy_alone"][row : row + 1])
    np.testing.assert_array_equal(io["greedy_alone"], io["greedy"])


def test_special_ids_come_from_the_generation_config():
    models = {name: load(folder, "float32") for name, (folder, _) in MODELS.items()}
    assert {name: (model.start_token, model.eos_ids) for name, model in models.items()} == {
        "hf_t5_1_0": (0, (1,)),
        "hf_t5_1_1": (0, (1, 95)),
        "hf_mt5": (2, (1,)),
        "hf_umt5": (0, (1,)),
    }


def test_they_cover_tied_scaled_separate_and_sharded():
    configs = {name: load(folder, "float32").config for name, (folder, _) in MODELS.items()}
    assert {
        name: (c.logits_via_embedding, c.scale_decoder_outputs) for name, c in configs.items()
    } == {
        "hf_t5_1_0": (True, True),
        "hf_t5_1_1": (False, False),
        "hf_mt5": (False, False),
        "hf_umt5": (False, False),
    }
    assert configs["hf_t5_1_1"].num_decoder_layers == 3 != configs["hf_t5_1_1"].num_encoder_layers
    assert len(list(MODELS["hf_t5_1_1"][0].glob("model-*.safetensors"))) > 2


def test_every_layer_of_umt5_has_a_table_that_counts():
    model = load(MODELS["hf_umt5"][0], "float32")
    io, config = MODELS["hf_umt5"][1], model.config
    assert config.relative_bias_per_layer and (
        config.num_encoder_layers,
        config.num_decoder_layers,
    ) == (2, 3)
    expected = model.logits(io["inputs"], io["decoder_tokens"], io["input_lengths"])
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        for layer in range(layers):
            params = model.params
            table = params[stack][f"layers_{layer}"]["relpos_bias"]["rel_embedding"]
            assert table.shape == (config.num_heads, config.num_buckets)
            params[stack][f"layers_{layer}"]["relpos_bias"]["rel_embedding"] = 0 * table
            changed = LanguageModel(config, params).logits(
                io["inputs"], io["decoder_tokens"], io["input_lengths"]
            )
            assert (
                np.abs(changed - expected).max() > 1e-2
            )  # far above what the golden logits may differ by
