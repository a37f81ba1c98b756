"""A layer of a draft step as four kernels for GPUs computes the layers' numbers, run on a CPU.

`test_gpu_aot.py` compiles them for a GPU where CUDA's plugin is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.gpu import attention as gpu_attention
from specdec_jax.backends.gpu import fused_layers
from specdec_jax.models import fused_step_selftest

pytestmark = pytest.mark.usefixtures("quick")
V, SLOTS = 24, 164
INPUTS = np.array([[3, 4, 5, 6, 7], [7, 8, 0, 0, 0]], np.int32)
LENGTHS = np.array([5, 2])
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[tuple[int, ...]]:
    """Runs calls as the kernels, interpreted, where a GPU would; returns their shapes (B, T, D)."""
    found, step = [], functools.partial(fused_layers.decode_states, interpret=True)

    def noted(module, params, x, *arguments, interpret=None):
        found.append(x.shape)
        return step(module, params, x, *arguments)

    def chosen(*arguments, cuda=None, default, **others):
        return (default if cuda is None else cuda)(*arguments)

    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    monkeypatch.setattr(fused_layers, "decode_states", noted)
    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    for name in ("attend_to_cache", "attend_to_encoded"):
        kernel = functools.partial(getattr(gpu_attention, name), interpret=True)
        monkeypatch.setattr(gpu_attention, name, kernel)
    return found


def t5(**shape) -> sd.LanguageModel:
    """Returns a tiny T5 with the caches of a GPU."""
    given = dict(dtype="bfloat16", emb_dim=96, num_heads=4, head_dim=16, mlp_dim=64) | shape
    return on_a_gpu(tiny_t5(0, V, **given))


def on_a_gpu(model: sd.LanguageModel) -> sd.LanguageModel:
    model.network = model.network.with_backend("gpu")
    return model


def make_rejected_cache(network, rows: int):
    """Returns a cache of 144 tokens, rejected from position 134 or 127 on, and those positions.

    Keys of later slots are NaN.
    """
    cache = network.prefill(jnp.asarray(INPUTS[:rows]), jnp.asarray(LENGTHS[:rows]), SLOTS)
    fed = jnp.asarray(np.random.default_rng(1).integers(3, V, (rows, 144)))
    _, cache = network.decode_states(fed, jnp.zeros(rows, int), cache)
    stale = jnp.arange(cache.layers[0].slots)[:, None] >= 136
    layers = [layer.replace(key=jnp.where(stale, jnp.nan, layer.key)) for layer in cache.layers]
    return cache.replace(layers=tuple(layers)), jnp.asarray([134, 127][:rows])


def as_float(x) -> np.ndarray:
    return np.asarray(x, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "length", "shape"),
    [
        (2, 2, dict()),
        pytest.param(
            1, 2, dict(relative_bias_per_layer=True, mlp_activations=("relu",)), marks=SLOW
        ),
        pytest.param(1, 1, dict(emb_dim=128), marks=SLOW),
        pytest.param(2, 1, dict(emb_dim=512, num_heads=2, head_dim=64, mlp_dim=128), marks=SLOW),
    ],
)
def test_numbers_are_those_of_the_layers(calls, rows, length, shape):
    """Rows at their own positions, on both sides of the edge of a block, of inputs with padding.

    Keys of slots that nothing was written to are NaN, and so is what the first of two rows feeds.
    """
    network = t5(**shape).network
    embedding = network.params["token_embedder"]["embedding"]
    network.params["token_embedder"]["embedding"] = embedding.at[2].set(jnp.inf)
    tokens = jnp.asarray(np.random.default_rng(2).integers(3, V, (rows, length)))
    tokens = tokens.at[0].set(2) if rows > 1 else tokens

    @jax.jit
    def both(network, tokens):
        cache, positions = make_rejected_cache(network, rows)
        found = network.decode(tokens, positions, cache)
        assert calls == [(rows, length, network.config.emb_dim)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.SETTING, "off")
            expected = network.decode(tokens, positions, cache)
        assert len(calls) == 1
        return found, expected, cache, positions

    (found, written), (expected, layers), cache, positions = both(network, tokens)
    lost = np.all(np.isnan(as_float(found)), axis=(1, 2)).tolist()
    assert lost == [True, False] if rows > 1 else lost == [False]
    np.testing.assert_allclose(as_float(found), as_float(expected), rtol=0.03, atol=0.06)
    for row, start in enumerate(np.asarray(positions)):
        # XLA's layers are fed more positions of a single row, whose slots are stale afterwards.
        new = slice(start, start + length)
        for own, theirs, old in zip(*(one.layers for one in (written, layers, cache))):
            for name in ("key", "value"):
                a, b, c = (as_float(getattr(x, name)) for x in (own, theirs, old))
                a, b, c = (x.reshape(rows, -1, *x.shape[-2:])[row] for x in (a, b, c))
                np.testing.assert_allclose(a[:, new], b[:, new], rtol=0.03, atol=0.06)
                a[:, new] = c[:, new]
                np.testing.assert_array_equal(a, c)


@pytest.mark.slow
def test_numbers_at_the_first_and_the_last_slots(calls):
    """There the bias's row is shifted as far as it can be."""
    network = t5(relative_bias_per_layer=True, decoder_layers=1).network

    @jax.jit
    def both(network):
        cache = network.prefill(jnp.asarray(INPUTS), jnp.asarray(LENGTHS), SLOTS)
        call = jnp.array([[3, 4], [5, 6]]), jnp.array([0, cache.layers[0].slots - 2]), cache
        found = network.decode(*call)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.SETTING, "off")
            return found, network.decode(*call)[0]

    found, expected = both(network)
    assert len(calls) == 1
    np.testing.assert_allclose(as_float(found), as_float(expected), rtol=0.03, atol=0.06)


@pytest.mark.slow
def test_the_kernels_draft_and_the_tokens_stay_those_of_plain_decoding(calls):
    """The target's own calls over one or two positions run as them, too."""
    target = t5(dtype="bfloat16", decoder_layers=1)
    drafter = sd.ModelDrafter(on_a_gpu(noisy_copy(target, 0.05)))
    found = sd.generate(target, INPUTS, drafter=drafter, gamma=3, max_new_tokens=9)
    assert calls and {shape[1] for shape in calls} == {2}
    plain = sd.generate(target, INPUTS, max_new_tokens=9)
    np.testing.assert_array_equal(found.tokens, plain.tokens)


@pytest.mark.parametrize(
    ("rows", "length", "shape"),
    [
        (1, 2, dict()),
        (2, 1, dict(emb_dim=512, head_dim=64)),
        (3, 1, None),
        (1, 3, None),
        (1, 2, dict(dtype="float32", rejected=True)),
        (1, 2, dict(emb_dim=768, head_dim=64, rejected=True)),
        (1, 2, dict(head_dim=24, rejected=True)),
        (1, 2, dict(mlp_dim=48, rejected=True)),
    ],
)
def test_calls_that_run_as_the_kernels(rows, length, shape):
    expected = shape is not None and not shape.pop("rejected", False)

    def ask(inputs, lengths):
        network = t5(**(shape or {}), decoder_layers=1).network  # shapes only
        cache = network.prefill(inputs, lengths, SLOTS)
        found = network.backend.supports_fused_step(network, length, cache, None)
        assert found == expected, (rows, length, shape)

    jax.eval_shape(ask, jnp.ones((rows, 5), jnp.int32), jnp.full(rows, 5))


def test_meshes_and_the_setting_leave_the_layers_to_xla(monkeypatch):
    def ask(inputs, lengths):
        network = t5(decoder_layers=1).network
        call = network, 2, network.prefill(inputs, lengths, SLOTS), None
        assert network.backend.supports_fused_step(*call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused_layers, "triton", None)
            assert not network.backend.supports_fused_step(*call)
        monkeypatch.setenv(native.SETTING, "off")
        assert not network.backend.supports_fused_step(*call)

    jax.eval_shape(ask, INPUTS, LENGTHS)


class TestSelfTest:
    """What a process tries once before a GPU drafts."""

    @pytest.mark.slow
    def test_good_kernels_are_used(self, capsys):
        assert fused_step_selftest.GPU_SELF_TEST.result() is None
        assert capsys.readouterr().err == ""

    @pytest.mark.slow
    def test_wrong_numbers_are_reported(self, monkeypatch, capsys):
        kernels = fused_layers.decode_states

        def wrong(*arguments, interpret=None):
            states, cache = kernels(*arguments)
            return states + 1, cache

        monkeypatch.setattr(fused_layers, "decode_states", wrong)
        fused_step_selftest.GPU_SELF_TEST.forget()
        assert fused_step_selftest.GPU_SELF_TEST.result() == "a self-test gave other numbers"
        assert "XLA's layers are: a self-test gave other" in capsys.readouterr().err
        fused_step_selftest.GPU_SELF_TEST.forget()
