"""The loop's layout of the weights: the same numbers whatever the width of the panels and the number of pieces."""

import jax
import numpy as np
import pytest
from toy_models import noisy_copy, tiny_t5

from specdec_jax import measure
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.generate import generate
from specdec_jax.models import packing
from specdec_jax.models.layers import apply_kernel

INPUTS = np.random.default_rng(0).integers(2, 64, (5, 6))
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(params=["sapphire_rapids", "avx512", "other"])
def processor(request, monkeypatch):
    monkeypatch.setattr(packing, "processor", lambda: request.param)
    monkeypatch.setattr(packing, "_LEAST_TO_SPLIT", 64 * 64)
    return request.param


def model(seed=0):
    return tiny_t5(seed, 64, emb_dim=64, head_dim=32, mlp_dim=192)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("outputs", [64, 192, 65])
def test_products_are_those_of_the_kernel(rows, outputs, monkeypatch):
    monkeypatch.setattr(packing, "_LEAST_TO_SPLIT", 64 * 192)
    random = np.random.default_rng(0)
    kernel, x = random.normal(size=(64, outputs)).astype("f"), random.normal(size=(rows, 64)).astype("f")
    layouts = (packing.Layout(), packing.Layout(64), packing.Layout(16, 16), packing.Layout(64, 3))
    for before in layouts:
        packed = packing.pack({"decoder": {"out": {"kernel": kernel}}}, before)
        first = packed["decoder"]["out"]["kernel"]
        np.testing.assert_array_equal(packing.unpack(packed)["decoder"]["out"]["kernel"], kernel)
        assert {leaf.ndim for leaf in jax.tree.leaves(first)} == {3 if before.panel and outputs != 65 else 2}
        for layout in layouts:
            second = packing.relaid(packed, layout)["decoder"]["out"]["kernel"]
            assert isinstance(second, tuple) == (outputs == 192 and layout.pieces > 1)
            for form in (first, second):
                np.testing.assert_allclose(apply_kernel(x, form, np.float32), x @ kernel, atol=1e-4)


def test_a_kernel_of_few_panels_makes_no_empty_pieces():
    kernel = np.ones((packing._LEAST_TO_SPLIT // 64, 64), np.float32)
    packed = packing.pack({"decoder": {"out": {"kernel": kernel}}}, packing.Layout(64))
    narrow = packing.relaid(packed, packing.Layout(16, 16))
    assert [piece.shape for piece in narrow["decoder"]["out"]["kernel"]] == 4 * [(1, len(kernel), 16)]


def test_one_layout_per_kind_of_processor(processor):
    target = model()
    assert target.network_for(1) is target.network
    assert target.network_for(2) is not target.network
    assert target.network_for(2) is target.network_for(9), "made once"
    widths = lambda network: {leaf.shape[2] for leaf in jax.tree.leaves(network.params) if leaf.ndim == 3}
    assert widths(target.network) == {"sapphire_rapids": set(), "avx512": {32}, "other": {64}}[processor]
    assert widths(target.network_for(2)) == {16 if processor == "other" else 64}


def test_broad_models_on_zen_4_are_held_once(processor):
    single, several = (packing.layout_for("cpu", "float32", 1024, rows) for rows in (1, 5))
    assert (single == several) == (processor == "avx512")


def test_keys_and_values_of_the_encoder_output_are_shared(processor):
    target = model()
    first, second = (
        network.params["decoder"]["layers_0"]["encoder_decoder_attention"]
        for network in (target.network, target.network_for(2))
    )
    for name in ("key", "value"):
        assert first[name]["kernel"] is second[name]["kernel"] and first[name]["kernel"].ndim == 2


def test_encoder_and_embeddings_are_shared(processor):
    target = model()
    for name in ("encoder", "token_embedder"):
        ours, theirs = (jax.tree.leaves(network.params[name]) for network in (target.network, target.network_for(2)))
        assert all(a is b for a, b in zip(ours, theirs, strict=True))


def test_other_dtypes_and_backends_keep_their_kernels():
    assert packing.layout_for("cpu", "bfloat16", 64, 5) == packing.Layout()
    assert packing.layout_for("tpu", "float32", 64, 5) == packing.Layout()


def test_output_does_not_depend_on_the_layout(processor):
    """Speculative and plain decoding, one row and several; and the difference of the layouts' logits is rounding."""
    target = model()
    drafter = ModelDrafter(noisy_copy(target, 0.3))
    plain = [generate(target, row[None], max_new_tokens=10, eos_ids=()).tokens[0] for row in INPUTS]
    for inputs, expected in ((INPUTS, plain), (INPUTS[:1], plain[:1])):
        found = generate(target, inputs, drafter=drafter, gamma=3, max_new_tokens=10, eos_ids=())
        np.testing.assert_array_equal(found.tokens, expected)
    assert 0 <= measure.difference(target, INPUTS[0], [0, *plain[0]], width=4).noise < 1e-4


def test_params_are_the_checkpoints(processor):
    target = model()
    before = target.params
    target.network_for(4)
    jax.tree.map(np.testing.assert_array_equal, before, target.params)


def test_what_is_made_of_kernels_does_not_depend_on_the_layout(processor, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(packing, "layout_for", lambda *_: packing.Layout())
        plain = model()
        assert not any(leaf.ndim == 3 for leaf in jax.tree.leaves(plain.network.params))
    target, ids = model(), np.arange(0, 64, 2)
    assert target.fingerprint == plain.fingerprint
    for made in (
        lambda network: network.in_int8().params,
        lambda network: packing.unpack(network.shortlisted(ids).params),
    ):
        jax.tree.map(np.testing.assert_array_equal, made(target.network), made(plain.network))
