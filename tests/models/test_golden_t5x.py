"""T5X's own checkpoint, loaded without T5X, gives T5X's logits and greedy tokens."""

import numpy as np
import pytest
from golden_models import DRAFTERS, engine_tokens, greedy_tokens, unpack_t5x

from specdec_jax.checkpoints.loader import load

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder, io = unpack_t5x(tmp_path_factory.mktemp("t5x"))
    return load(folder, "float32"), folder, io


def test_logits(golden):
    model, _, io = golden
    logits = model.logits(io["encoder_input_tokens"], io["decoder_input_tokens"])
    np.testing.assert_allclose(logits, io["logits"], rtol=0, atol=1e-4)


DECODES = ("greedy_eos1", "greedy_noeos", "greedy_eos_early", "greedy_prompt3")


def request(io, decode):
    """Inputs, their lengths, steps, EOS ids and prefix of a recorded decode."""
    eos_ids = {"greedy_eos1": (1,), "greedy_eos_early": (int(io["eos_early_id"]),)}.get(decode, ())
    prefix = io["prompt_decoder_input_tokens"][:, 1:4] if decode == "greedy_prompt3" else None
    return (
        io["encoder_input_tokens"],
        (io["encoder_input_tokens"] > 0).sum(axis=1),
        16,
        eos_ids,
        prefix,
    )


@pytest.mark.parametrize("decode", DECODES)
def test_greedy_tokens(golden, decode):
    model, _, io = golden
    np.testing.assert_array_equal(greedy_tokens(model, *request(io, decode)), io[decode])


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_of_the_decode_loop(golden, decode, drafter):
    model, _, io = golden
    np.testing.assert_array_equal(
        engine_tokens(model, *request(io, decode), drafter=drafter), io[decode]
    )


def test_the_checkpoint_holds_an_optimizer_state_which_is_not_read(golden):
    model, folder, _ = golden
    assert list(folder.glob("checkpoint_7/state.param_states.*"))
    assert load(folder / "checkpoint_7", "float32").config == model.config
    assert (model.config.num_heads, model.config.head_dim, model.config.mlp_activations) == (
        2,
        16,
        ("gelu", "linear"),
    )
