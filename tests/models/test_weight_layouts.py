"""The loop's tree of weights: the same numbers, whether the CPU's own kernels are there or not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import noisy_copy, tiny_t5
from twins import t5gemma

from specdec_jax.analysis import near_ties
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.cpu.packed_weights import PackedWeight
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.decoding.generate import generate
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models import weight_layouts
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.layers import apply_weight

RNG = np.random.default_rng(0)
INPUTS = RNG.integers(2, 64, (5, 6))
pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not native.is_available(), reason=native.describe_state()),
]


def model(seed=0, **shape):
    return tiny_t5(seed, 64, emb_dim=64, head_dim=32, mlp_dim=192, **shape)


def tiny_gpt(**shape):
    return LanguageModel.random(GPTConfig(64, 48, 2, 2, 100, num_positions=64, **shape))


MODELS = [model, lambda: model(logits_via_embedding=True), tiny_gpt]


def without_kernels(make, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "can_pack", lambda dtype: False)
        return make()


@pytest.mark.parametrize("outputs", [1, 16, 64, 192, 65])
def test_products_are_those_of_the_weight(outputs):
    weight = RNG.normal(size=(64, outputs)).astype("f")
    packed = weight_layouts.pack({"decoder": {"out": {"kernel": weight}}}, use_packed=True)
    stored = packed["decoder"]["out"]["kernel"]
    assert isinstance(stored, PackedWeight) and weight_layouts.weight_shape(stored) == weight.shape
    np.testing.assert_array_equal(weight_layouts.unpack(packed)["decoder"]["out"]["kernel"], weight)
    for shape in ((1, 64), (5, 64), (2, 3, 64)):
        x = jnp.asarray(RNG.normal(size=shape), "f")
        np.testing.assert_allclose(apply_weight(x, stored, np.float32), x @ weight, atol=1e-4)


@pytest.mark.parametrize("outputs", [1, 16, 65])
@pytest.mark.parametrize("rows", [np.asarray, jnp.asarray])
def test_a_weight_given_by_its_columns_is_packed_as_by_its_rows(rows, outputs):
    weight = RNG.normal(size=(64, outputs)).astype("f")
    by_rows, by_columns = PackedWeight.pack(weight), PackedWeight.pack_rows(rows(weight.T))
    np.testing.assert_array_equal(by_columns.values, by_rows.values)
    assert jax.tree.structure(by_columns) == jax.tree.structure(by_rows)
    np.testing.assert_array_equal(by_columns.unpack_rows(), weight.T)


def test_an_embedding_that_is_the_head_is_in_memory_once():
    """The values are one array; the parameters have the embedding, and no head."""
    made = model(logits_via_embedding=True)
    params = made.network.params
    table, head = params["token_embedder"]["embedding"], params["decoder"]["logits_dense"]["kernel"]
    assert table.values is head.values and table.lines == 64
    flat = dict(weight_layouts.parameters(params))
    assert flat["token_embedder", "embedding"].shape == (64, 64)
    assert ("decoder", "logits_dense", "kernel") not in flat


def test_weights_in_8_bits_are_stored_as_they_are():
    weight = Int8Weight.quantize(RNG.normal(size=(64, 65)).astype("f"))
    packed = weight_layouts.pack({"decoder": {"out": {"kernel": weight}}}, use_packed=True)
    stored, x = packed["decoder"]["out"]["kernel"], jnp.asarray(RNG.normal(size=(3, 64)), "f")
    assert stored.values.dtype == np.int8
    np.testing.assert_array_equal(stored.matrix(), weight.matrix())
    # Inputs are rounded to 16 bits.
    np.testing.assert_allclose(apply_weight(x, stored, np.float32), x @ weight.matrix(), atol=2e-3)
    joint = weight_layouts.pack(
        {"mlp": {name: {"kernel": weight} for name in ("wi_0", "wi_1")}}, use_packed=True
    )
    assert weight_layouts.weight_shape(joint["mlp"]["wi_fused"]["kernel"]) == (64, 130)


@pytest.mark.slow
def test_every_weight_of_a_float32_model_is_in_panels():
    for made, name in (
        (model(), "self_attention"),
        (model(logits_via_embedding=True), "self_attention"),
        (tiny_gpt(), "causal_attention"),
    ):
        network = made.network
        weights = jax.tree.leaves(network.params, is_leaf=weight_layouts.is_weight_object)
        weights = [leaf for leaf in weights if weight_layouts.is_weight_object(leaf)]
        assert network.backend.packs_weights and len(weights) >= 6
        assert all(leaf.ndim != 2 for leaf in jax.tree.leaves(weights) if leaf.dtype == np.float32)
        assert set(network.params["decoder"]["layers_0"][name]) == {"qkv", "out"}


@pytest.mark.parametrize("dtype, backend", [("bfloat16", "cpu"), ("float32", "tpu")])
def test_other_dtypes_and_backends_keep_their_weights(dtype, backend, monkeypatch):
    assert packed_weights.can_pack("float32")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert not packed_weights.can_pack(dtype)


def test_norms_of_a_cross_attentions_keys_come_after_their_joint_product(monkeypatch):
    config = dataclasses.replace(t5gemma(48, 64), qk_norm=True)

    def make():
        return LanguageModel.random(config, seed=1)

    found, expected = make(), without_kernels(make, monkeypatch)
    assert "kv" in found.network.params["decoder"]["layers_0"]["encoder_decoder_attention"]
    found, expected = (one.logits(INPUTS, INPUTS[:, ::-1]) for one in (found, expected))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_output_does_not_depend_on_the_layout(make, monkeypatch):
    """One row and several, with and without a drafter; layouts differ by rounding."""
    target, other = make(), without_kernels(make, monkeypatch)
    assert target.network.backend.packs_weights and not other.network.backend.packs_weights
    for inputs in (INPUTS, INPUTS[:1]):
        options = dict(max_new_tokens=10, eos_ids=())
        expected = generate(other, inputs, **options)
        for drafter in (None, ModelDrafter(noisy_copy(target, 0.3))):
            found = generate(target, inputs, drafter=drafter, gamma=3, **options)
            np.testing.assert_array_equal(found.tokens, expected.tokens)
            np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
    tokens = RNG.integers(2, 64, (5, 7))
    np.testing.assert_allclose(
        target.logits(INPUTS, tokens), other.logits(INPUTS, tokens), atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_calls_over_several_positions_compute_the_same_bits(make):
    """Of the logits, whatever the number of positions in a call, and of rows."""
    target = make()
    assert (
        near_ties.measure_difference(target, INPUTS[0], [0, *INPUTS[1], *INPUTS[2]], width=4).noise
        == 0
    )
    assert (
        near_ties.measure_difference(
            target, INPUTS[0], [0, *INPUTS[1], *INPUTS[2]], width=9, batch=3
        ).noise
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_params_are_the_checkpoints(make, monkeypatch):
    target, other = make(), without_kernels(make, monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, target.params, other.params)
    assert target.fingerprint == other.fingerprint and target.contents == other.contents


@pytest.mark.slow
def test_heads_for_some_ids_do_not_depend_on_the_layout(monkeypatch):
    for make in (model, lambda: model(logits_via_embedding=True)):
        target, other, ids = make(), without_kernels(make, monkeypatch), np.arange(0, 64, 2)
        heads = [
            found.network.shortlisted(ids).params["decoder"]["logits_dense"]["kernel"]
            for found in (target, other)
        ]
        np.testing.assert_array_equal(*map(weight_layouts.to_matrix, heads))


@pytest.mark.slow
def test_8_bits_are_the_same_in_both_layouts(monkeypatch):
    target, other = model(), without_kernels(model, monkeypatch)
    weights = [
        list(
            map(
                weight_layouts.to_matrix,
                weight_layouts.step_weights(found.network.in_int8().params),
            )
        )
        for found in (target, other)
    ]
    jax.tree.map(np.testing.assert_array_equal, *weights)
