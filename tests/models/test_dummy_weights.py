"""Dummy weights have every parameter's spread and need no program for each layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import specdec_jax as sd
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.models import dummy_weights, language_model
from specdec_jax.models.meshes import make_mesh
from specdec_jax.models.parameters import flatten, parameter_shapes

pytestmark = pytest.mark.usefixtures("quick")

T5 = sd.T5Config(96, 64, 2, 32, 2, 2, 128, dtype="bfloat16")
GPT = sd.GPTConfig(96, 64, 2, 2, 128, num_positions=32)


@pytest.mark.parametrize("config", [T5, GPT], ids=["t5", "gpt"])
def test_numbers_have_the_shapes_and_the_spread_of_an_initialisation(config):
    found = flatten(dummy_weights.make_dummy_params(config))
    assert {name: leaf.shape for name, leaf in found.items()} == parameter_shapes(config)
    for name, leaf in found.items():
        assert leaf.dtype == config.dtype
        values = np.asarray(leaf, np.float32)
        if name.endswith("scale"):
            assert np.all(values == 1)
            continue
        expected = 1 if name.endswith("embedding") else values.shape[0] ** -0.5
        if values.size >= 2048:
            assert abs(values.mean()) < 0.1 * expected and abs(values.std() / expected - 1) < 0.05
    weights = [
        np.asarray(leaf, np.float32)
        for name, leaf in found.items()
        if name.endswith("wi/kernel") or "wi_0" in name
    ]
    first, second = weights[-2:]
    assert (
        abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
    )  # each layer has numbers of its own
    assert abs(np.corrcoef(first[:-1].ravel(), first[1:].ravel())[0, 1]) < 0.1  # and each row


def test_a_shape_is_one_program():
    dummy_weights._uniform.clear_cache()
    dummy_weights.make_dummy_params(T5)
    assert dummy_weights._uniform._cache_size() == len(set(parameter_shapes(T5).values()))


@pytest.mark.slow
def test_a_filled_model_decodes_and_lies_on_a_mesh():
    model = sd.LanguageModel.dummy(T5, eos_ids=())
    result = sd.generate(model, np.array([[3, 4, 5]], np.int32), max_new_tokens=4)
    assert result.tokens.shape == (1, 4) and model.eos_ids == ()
    placed = sd.LanguageModel.dummy(T5, rules=ShardingRules(make_mesh()))
    whole = jax.tree.leaves(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), model.params))
    parts = jax.tree.leaves(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), placed.params))
    assert all(np.array_equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert all(
        isinstance(leaf.sharding, NamedSharding) for leaf in jax.tree.leaves(placed.network.params)
    )


def test_8_bits_are_rejected_where_they_are_not_supported():
    with pytest.raises(ValueError, match="quantize"):
        sd.LanguageModel.dummy(T5, quantize="int8")  # bfloat16


@pytest.mark.parametrize("make", [sd.LanguageModel.dummy, sd.LanguageModel.random])
def test_an_unknown_option_is_rejected_before_weights_are_made(make, monkeypatch):
    monkeypatch.setattr(language_model, "make_dummy_params", None)
    monkeypatch.setattr(language_model, "random_params", None)
    with pytest.raises(TypeError, match="eos"):
        make(T5, eos=1)
