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


@pytest.fixture(params=[False, True], ids=["AVX2", "AVX-512"])
def avx512(request, monkeypatch):
    monkeypatch.setattr(packing, "has_avx512", lambda: request.param)
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
    packed = packing.pack({"decoder": {"out": {"kernel": kernel}}}, 64)
    narrow = packing.narrowed(packed, 16)["decoder"]["out"]["kernel"]
    assert packed["decoder"]["out"]["kernel"].ndim == (2 if outputs == 65 else 3)
    assert isinstance(narrow, tuple) == (outputs == 192)
    for form in (packed["decoder"]["out"]["kernel"], narrow):
        np.testing.assert_allclose(apply_kernel(x, form, np.float32), x @ kernel, atol=1e-4)


def test_a_kernel_of_few_panels_makes_no_empty_pieces():
    kernel = np.ones((packing._LEAST_TO_SPLIT // 64, 64), np.float32)
    narrow = packing.narrowed(packing.pack({"decoder": {"out": {"kernel": kernel}}}, 64), 16)
    assert [piece.shape for piece in narrow["decoder"]["out"]["kernel"]] == 4 * [(1, len(kernel), 16)]


def test_one_layout_per_kind_of_processor(avx512):
    target = model()
    assert target.network_for(1) is target.network
    assert (target.network_for(2) is target.network) == avx512
    assert target.network_for(2) is target.network_for(9), "made once"
    shapes = {leaf.shape[2] for leaf in jax.tree.leaves(target.network_for(2).params) if leaf.ndim == 3}
    assert shapes == {64 if avx512 else 16}


def test_encoder_and_embeddings_are_shared(avx512):
    target = model()
    for name in ("encoder", "token_embedder"):
        ours, theirs = (jax.tree.leaves(network.params[name]) for network in (target.network, target.network_for(2)))
        assert all(a is b for a, b in zip(ours, theirs, strict=True))


def test_other_dtypes_and_backends_keep_their_kernels():
    assert packing.panel_width("cpu", "bfloat16", 5) is None
    assert packing.panel_width("tpu", "float32", 5) is None


def test_output_does_not_depend_on_the_layout(avx512):
    """Speculative and plain decoding, one row and several; and the difference of the layouts' logits is rounding."""
    target = model()
    drafter = ModelDrafter(noisy_copy(target, 0.3))
    plain = [generate(target, row[None], max_new_tokens=10, eos_ids=()).tokens[0] for row in INPUTS]
    for inputs, expected in ((INPUTS, plain), (INPUTS[:1], plain[:1])):
        found = generate(target, inputs, drafter=drafter, gamma=3, max_new_tokens=10, eos_ids=())
        np.testing.assert_array_equal(found.tokens, expected)
    assert 0 <= measure.difference(target, INPUTS[0], [0, *plain[0]], width=4).noise < 1e-4


def test_params_are_the_checkpoints(avx512):
    target = model()
    before = target.params
    target.network_for(4)
    jax.tree.map(np.testing.assert_array_equal, before, target.params)
