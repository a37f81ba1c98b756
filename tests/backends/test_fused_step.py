"""The decoder's step as one kernel for TPUs computes the layers' numbers, run on a CPU.

`test_accelerators.py` compiles it for a TPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from jax.experimental.pallas import tpu as pltpu
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.backend import TPUBackend
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.tpu import fused_step
from specdec_jax.models import fused_step_selftest, weight_layouts
from specdec_jax.models.network import Network, random_params
from specdec_jax.models.t5 import PRESETS

pytestmark = pytest.mark.usefixtures("quick")
V, SLOTS = 24, 34
INPUTS = np.array([[3, 4, 5, 6, 7], [7, 8, 9, 0, 0], [10, 0, 0, 0, 0]], np.int32)
LENGTHS = np.array([5, 3, 1])
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_on_a_tpu(monkeypatch):
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)


def run_as_kernel(monkeypatch, interpret) -> list[tuple[int, ...]]:
    """Runs calls as the kernel where a TPU would; returns their shapes (B, T, D)."""
    found, step = [], functools.partial(fused_step.decode_states, interpret=interpret)

    def noted(module, params, x, *arguments, **named):
        found.append(x.shape)
        return step(module, params, x, *arguments, **named)

    def chosen(*arguments, tpu=None, cpu=None, default):
        return (tpu or cpu or default)(*arguments)

    monkeypatch.setattr(fused_step, "decode_states", noted)
    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    return found


def t5(**shape) -> sd.LanguageModel:
    """Returns a tiny T5 with the caches of a TPU."""
    return laid_out(
        tiny_t5(0, V, **{**dict(emb_dim=128, num_heads=4, head_dim=64, mlp_dim=128), **shape})
    )


def laid_out(model: sd.LanguageModel) -> sd.LanguageModel:
    model.network = model.network.with_backend("tpu")
    return model


def make_rejected_cache(network, rows: int):
    """Returns a cache of 20 tokens, rejected from position 14, 15 or 16 on, and those positions.

    Keys of rejected tokens are NaN.
    """
    cache = network.prefill(jnp.asarray(INPUTS[:rows]), jnp.asarray(LENGTHS[:rows]), SLOTS)
    fed = jnp.asarray(np.random.default_rng(1).integers(3, V, (rows, 20)))
    _, cache = network.decode_states(fed, jnp.zeros(rows, int), cache)
    stale = jnp.arange(cache.layers[0].slots)[:, None] >= 17
    layers = [layer.replace(key=jnp.where(stale, jnp.nan, layer.key)) for layer in cache.layers]
    return cache.replace(layers=tuple(layers)), jnp.asarray([15, 16, 14][:rows])


T5_1_0 = dict(mlp_activations=("relu",), logits_via_embedding=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "length", "shape"),
    [
        (3, 1, dict(dtype="float32", mlp_dim=256)),
        pytest.param(
            1, 2, dict(dtype="bfloat16", relative_bias_per_layer=True, mlp_dim=256), marks=SLOW
        ),
        pytest.param(3, 2, dict(dtype="float32", **T5_1_0), marks=SLOW),
        pytest.param(3, 2, dict(dtype="bfloat16", num_heads=6), marks=SLOW),
        pytest.param(1, 1, dict(dtype="bfloat16", **T5_1_0), marks=SLOW),
    ],
)
def test_numbers_are_those_of_the_layers(monkeypatch, rows, length, shape):
    """Rows at their own positions, around the edge of a tile, of inputs with padding.

    Stale keys are NaN, and so is everything that the first of several rows feeds. A wide
    feed-forward block is computed in two parts.

    Pallas' interpreter of TPUs makes a copy only when it is awaited, and begins with NaN in all
    memory: a buffer that is read too early, or refilled while it is in use, gives other numbers.
    """
    calls = run_as_kernel(monkeypatch, pltpu.InterpretParams())
    if shape.get("mlp_dim"):
        monkeypatch.setattr(fused_step, "_PIECES", (2,))
    network = t5(**shape).network
    embedding = network.params["token_embedder"]["embedding"]
    network.params["token_embedder"]["embedding"] = embedding.at[2].set(jnp.inf)
    tokens = jnp.asarray(np.random.default_rng(2).integers(3, V, (rows, length)))
    tokens = tokens.at[0].set(2) if rows > 1 else tokens

    @jax.jit
    def both(network, tokens):
        cache, positions = make_rejected_cache(network, rows)
        del calls[:]
        found = network.decode(tokens, positions, cache)
        assert calls == [(rows, length, 128)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.SETTING, "off")
            expected = network.decode(tokens, positions, cache)
        assert len(calls) == 1
        return found, expected, cache, positions

    (found, written), expected, cache, positions = both(network, tokens)
    assert np.all(np.isnan(np.asarray(found)), axis=(1, 2)).tolist() == [True, False, False][-rows:]
    close = (
        dict(rtol=1e-5, atol=1e-5) if shape["dtype"] == "float32" else dict(rtol=0.03, atol=0.06)
    )

    def as_float(x):
        return np.asarray(x, np.float32)

    def compare(a, b):
        return np.testing.assert_allclose(as_float(a), as_float(b), **close)

    # XLA's layers are fed more positions of a single row, whose slots are stale afterwards.
    seen = slice(None, int(positions[0]) + length if rows == 1 else None)

    def known(layer):
        return layer.replace(key=layer.key[..., seen, :], value=layer.value[..., seen, :])

    def alike(cache):
        return cache.replace(layers=tuple(map(known, cache.layers)))

    jax.tree.map(compare, (found, alike(written)), (expected[0], alike(expected[1])))
    keys = [as_float(x.layers[1].key) for x in (cache, written)]
    old, new = (x.reshape(rows, -1, *x.shape[-2:])[-1, :, :17] for x in keys)  # of the last row
    changed, start = np.flatnonzero(np.any(old != new, axis=(0, 2))), int(positions[-1])
    assert changed.tolist() == list(range(start, min(start + length, 17)))


@pytest.mark.slow
def test_numbers_at_the_first_and_the_last_slots(monkeypatch):
    """There the bias's row is shifted as far as it can be."""
    calls = run_as_kernel(monkeypatch, True)
    network = t5(dtype="float32", relative_bias_per_layer=True).network

    @jax.jit
    def both(network):
        cache = network.prefill(jnp.asarray(INPUTS[:2]), jnp.asarray(LENGTHS[:2]), SLOTS)
        call = jnp.array([[3, 4], [5, 6]]), jnp.array([0, cache.layers[0].slots - 2]), cache
        found = network.decode(*call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.SETTING, "off")
            return found, network.decode(*call)

    found, expected = both(network)
    assert len(calls) == 1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


@pytest.mark.slow
def test_tokens_are_those_of_the_layers(monkeypatch):
    """Of a greedy decode: the kernel drafts, over two positions in every step."""
    calls = run_as_kernel(monkeypatch, True)
    target = t5(decoder_layers=1)
    drafter, found = sd.ModelDrafter(laid_out(noisy_copy(target, 0.05))), []
    for gamma, setting in ((3, ""), (2, "off")):  # with one γ the first program would be used again
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.SETTING, setting)
            found.append(
                sd.generate(target, INPUTS[:2], drafter=drafter, gamma=gamma, max_new_tokens=9)
            )
        assert bool(calls) == (not setting)
        if calls:
            assert (2, 2, 128) in calls and (2, 1, 128) not in calls
        del calls[:]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)


def test_calls_that_the_kernel_takes():
    def takes(rows=1, length=1, layers=None, **shape) -> bool:
        found: list[bool] = []

        def ask(inputs, lengths):
            network = t5(**shape).network  # shapes only
            cache = network.prefill(inputs, lengths, SLOTS)
            found.append(
                fused_step.supports_call(
                    network.module, network.params, (rows, length), cache, layers
                )
            )

        jax.eval_shape(ask, INPUTS[:rows], LENGTHS[:rows])
        return found[0]

    assert takes() and takes(length=2) and takes(layers=1) and takes(dtype="bfloat16")
    assert not takes(length=3)
    assert not takes(emb_dim=96) and not takes(head_dim=24)
    assert not takes(mlp_dim=128 * 512)


@tiers.parametrize(
    ("preset", "rows", "most"),
    [
        ("t5_1_1/small", 8, 688),
        ("t5_1_1/base", 4, 240),
        pytest.param("t5_1_1/small", 1, 4096, marks=SLOW),
    ],
    first=1,
)
def test_as_many_slots_as_the_page_says_fit(preset, rows, most):
    config = PRESETS[preset].replace(dtype="bfloat16")
    module, found = config.module(TPUBackend(True)), {}

    def begin(slots):
        params = random_params(jax.random.key(0), module=config.module(), dtype=config.dtype)
        network = Network(weight_layouts.pack(params, use_packed=False, fused=True), module)
        cache = network.prefill(jnp.ones((rows, 128), jnp.int32), jnp.full(rows, 128), slots)
        found[slots] = fused_step.supports_call(module, network.params, (rows, 2), cache, None)

    for slots in (most, most + 16):
        jax.eval_shape(functools.partial(begin, slots))
    assert found[most] and (rows == 1 or not found[most + 16])


class TestTrial:
    """What a process tries once before a TPU decodes."""

    @pytest.fixture(autouse=True)
    def on_tpu(self, monkeypatch):
        interpreted = functools.partial(fused_step.decode_states, interpret=pltpu.InterpretParams())

        def step(*arguments, interpret):
            return interpreted(*arguments)

        monkeypatch.setattr(fused_step, "decode_states", step)
        fused_step_selftest.SELF_TEST.forget()
        yield step
        fused_step_selftest.SELF_TEST.forget()

    @pytest.mark.slow
    def test_a_good_kernel_is_used(self, capsys):
        assert fused_step_selftest.SELF_TEST.result() is None and capsys.readouterr().err == ""

    @pytest.mark.slow
    def test_wrong_numbers_are_reported_and_xla_decodes(self, monkeypatch, capsys, on_tpu):
        def wrong(*arguments, interpret):
            states, cache = on_tpu(*arguments, interpret=interpret)
            return states, cache.replace(layers=cache.layers[::-1])

        monkeypatch.setattr(fused_step, "decode_states", wrong)
        assert fused_step_selftest.SELF_TEST.result() == "a self-test gave other numbers"
        assert (
            "on TPUs is not used, XLA's layers are: a self-test gave other numbers"
            in capsys.readouterr().err
        )
        monkeypatch.setattr(fused_step_selftest.SELF_TEST, "passed", lambda: False)
        monkeypatch.setattr(fused_step, "decode_states", None)  # which no call reaches
        network = t5().network
        cache, positions = make_rejected_cache(network, 2)
        jax.eval_shape(network.decode_states, jnp.ones((2, 2), int), positions, cache)

    def test_elsewhere_programs_are_compiled_ahead_of_time(self, monkeypatch):
        monkeypatch.setattr(fused_step_selftest, "find_fault", lambda: "never asked")
        assert fused_step_selftest.SELF_TEST.passed()
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        assert not fused_step_selftest.SELF_TEST.passed()
