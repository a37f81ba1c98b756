"""Attention as one kernel for NVIDIA GPUs computes XLA's numbers, in Pallas' interpreter.

`scripts/gpu_aot.py` compiles it.
"""

import concurrent.futures
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends import kernel_selftest
from specdec_jax.backends.backend import GPUBackend
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.gpu import attention as gpu_attention
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.backends.xla import MASKED, AttentionShape

pytestmark = pytest.mark.usefixtures("quick")
V = 24
INPUTS = np.array([[3, 4, 5, 6, 7], [7, 8, 9, 0, 0], [10, 0, 0, 0, 0]], np.int32)
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Runs the kernels of a GPU in Pallas' interpreter; returns the names of those that ran."""
    found = []
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    for name in ("attend_to_cache", "attend_to_encoded"):
        kernel = functools.partial(getattr(gpu_attention, name), interpret=True)

        def noted(*arguments, interpret=None, name=name, kernel=kernel):
            found.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(gpu_attention, name, noted)

    def chosen(*arguments, cuda=None, cpu=None, tpu=None, default):
        return (cuda or cpu or default)(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    return found


def drawn(seed: int, dtype, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def by_hand(query, key, value, seen, bias=0.0):
    """Attention in float64; `seen [B, 1, T, S]`; the arrays `[B, H, T or S, K]`."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.where(seen, query @ key.swapaxes(-1, -2) + bias, MASKED)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found = weights / weights.sum(-1, keepdims=True) @ value
    return found.transpose(0, 2, 1, 3).reshape(len(query), query.shape[2], -1)


def split(x, heads: int):
    return np.asarray(x, np.float64).reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
@pytest.mark.parametrize(
    ("batch", "length", "slots", "divisor", "biased"),
    [
        (1, 2, 144, 1.0, True),
        (3, 5, 200, 4.0, False),
        pytest.param(2, 1, 65, 1.0, True, marks=SLOW),
        pytest.param(2, 33, 130, 2.0, True, marks=SLOW),
    ],
)
def test_self_attention_is_that_of_the_mathematics(dtype, batch, length, slots, divisor, biased):
    """At the first slot, the last ones, and both sides of the edge of a block.

    Stale slots are NaN; there is one bias for all rows or one for each.
    """
    heads, features = 2, 16
    qkv = drawn(0, dtype, batch, length, 3 * heads * features)
    old = [drawn(seed, dtype, batch, heads, slots, features) for seed in (1, 2)]
    starts = np.array([slots - length, 0, 128])[:batch] if batch > 1 else np.array([127])
    stale = np.arange(slots)[None, :, None] >= starts[:, None, None, None]
    key, value = (jnp.where(stale, jnp.nan, x) for x in old)
    bias = drawn(3, "float32", 1 if batch == 2 else batch, heads, length, slots) if biased else None
    caches = (key[0], value[0]) if batch == 1 else (key, value)
    found, *after = gpu_attention.attend_to_cache(qkv, *caches, bias, jnp.asarray(starts), divisor)

    query, *new = (split(part, heads) for part in np.split(np.asarray(qkv, np.float64), 3, axis=-1))
    expected = [np.array(x, np.float64) for x in old]
    for row, start in enumerate(starts):
        for buffer, part in zip(expected, new):
            buffer[row, :, start : start + length] = part[row]
    seen = np.arange(slots) <= starts[:, None, None, None] + np.arange(length)[:, None]
    right = by_hand(query / divisor, *expected, seen, 0.0 if bias is None else np.asarray(bias))
    close = dict(rtol=1e-5, atol=1e-5) if dtype == "float32" else dict(rtol=0.03, atol=0.03)
    np.testing.assert_allclose(np.asarray(found, np.float64), right, **close)
    for buffer, cache, given in zip(after, expected, caches):
        assert buffer.shape == given.shape and buffer.dtype == given.dtype
        for row, start in enumerate(
            starts
        ):  # valid slots hold what was written, all others what was there
            rows = np.asarray(buffer, np.float64).reshape(batch, *buffer.shape[-3:])[row]
            np.testing.assert_array_equal(
                rows[:, : start + length], cache[row][:, : start + length]
            )
            assert np.all(np.isnan(rows[:, start + length :]))


@pytest.mark.parametrize("length", [2, pytest.param(40, marks=SLOW)])
def test_cross_attention_reads_the_tokens_of_each_row(length):
    """Padding is NaN and reaches nothing; a row without tokens attends to all keys alike."""
    heads, keys = 2, 140
    query = drawn(0, "float32", 3, length, 2 * 16)
    key, value = (drawn(seed, "float32", 3, heads, keys, 16) for seed in (1, 2))
    lengths = np.array([140, 3, 0])
    padding = (np.arange(keys)[None, :, None] >= lengths[:, None, None, None]) & (lengths > 0)[
        :, None, None, None
    ]
    found = gpu_attention.attend_to_encoded(
        query, *(jnp.where(padding, jnp.nan, x) for x in (key, value)), jnp.asarray(lengths)
    )
    seen = np.arange(keys) < lengths[:, None, None, None]
    np.testing.assert_allclose(
        found, by_hand(split(query, heads), key, value, seen), rtol=1e-5, atol=1e-5
    )


def test_a_token_of_nan_reaches_only_those_that_see_it():
    """Only queries that attend to the token become NaN.

    The second of three new tokens is not finite. The cache holds what `GPUBackend.append` would
    store.
    """
    qkv = np.array(drawn(0, "float32", 1, 3, 3 * 16))
    qkv[0, 1, 2 * 16 + 5] = np.inf
    cache = KVCache.empty(1, 1, 32, 16, jnp.float32)
    found, key, value = gpu_attention.attend_to_cache(
        jnp.asarray(qkv), cache.key, cache.value, None, jnp.array([4])
    )
    assert np.all(np.isfinite(found[0, 0])) and np.all(np.isnan(found[0, 1:]))
    parts = (jnp.asarray(part)[:, None] for part in np.split(qkv, 3, axis=-1)[1:])
    expected = GPUBackend().append(cache, *parts, jnp.array([4]))
    np.testing.assert_array_equal(key, expected.key)
    np.testing.assert_array_equal(value, expected.value)


def on_a_gpu(model: sd.LanguageModel) -> sd.LanguageModel:
    model.network = model.network.with_backend("gpu")
    return model


def t5() -> sd.LanguageModel:
    return tiny_t5(0, V, head_dim=16)


def gpt() -> sd.LanguageModel:
    return sd.LanguageModel.random(sd.GPTConfig(V, 32, 2, 2, 32, num_positions=48))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        (t5, dict(gamma=3)),
        (gpt, dict(gamma=3)),
        pytest.param(t5, dict(sampling=sd.SamplingConfig(temperature=0.8), gamma=4), marks=SLOW),
        pytest.param(
            gpt,
            dict(verifier="gumbel", sampling=sd.SamplingConfig(temperature=1.0), gamma=2),
            marks=SLOW,
        ),
        pytest.param(t5, dict(tree=sd.Tree.uniform((2, 1))), marks=SLOW),
    ],
)
def test_tokens_are_those_of_xla(interpreted, family, options):
    """With and without a drafter; self-attention over a tree's nodes is XLA's own."""
    jax.clear_caches()  # other tests may have compiled the same programs without the kernels
    found = []
    for kernels in (False, True):
        target, draft = family(), noisy_copy(family(), 0.1)
        if kernels:
            target, draft = on_a_gpu(target), on_a_gpu(draft)
        drafter = sd.ModelDrafter(draft)
        assert not interpreted
        speculative = sd.generate(target, INPUTS, drafter=drafter, max_new_tokens=9, **options)
        plain = sd.generate(
            target, INPUTS, max_new_tokens=9, sampling=options.get("sampling", sd.SamplingConfig())
        )
        found.append((speculative, plain))
    assert set(interpreted) == (
        {"attend_to_cache"} | ({"attend_to_encoded"} if family is t5 else set())
    )
    for other, own in zip(found[1], found[0]):
        np.testing.assert_array_equal(other.tokens, own.tokens)
        np.testing.assert_allclose(other.log_probs, own.log_probs, rtol=1e-4, atol=1e-5)


def test_which_calls_are_kernels(monkeypatch):
    def takes(queries, features=64, backend=GPUBackend(), **shape):
        cache = KVCache.empty(1, 2, 16, features, jnp.bfloat16)
        heads = AttentionShape(2, features, jnp.bfloat16, **shape)
        return backend._is_one_kernel(jnp.ones((1, queries, 1)), cache, heads)

    assert takes(1) and takes(64) and takes(8, 128)
    assert not takes(65) and not takes(8, 24)  # too many queries; no power of two
    assert takes(8, num_kv_heads=2) and not takes(8, num_kv_heads=1)
    assert not takes(8, cap=50.0) and not takes(8, window=8)
    mesh = ShardingRules(sd.make_mesh(1, 1))
    assert not takes(8, backend=GPUBackend(rules=mesh))
    monkeypatch.setenv(native.SETTING, "off")
    assert not takes(8)
    monkeypatch.delenv(native.SETTING)
    monkeypatch.setattr(gpu_attention.SELF_TEST, "passed", lambda **case: False)
    assert not takes(8)


class TestTrial:
    """What a process tries once before a GPU decodes."""

    @pytest.fixture(autouse=True)
    def on_gpu(self, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        gpu_attention.SELF_TEST.forget()
        yield
        gpu_attention.SELF_TEST.forget()

    @pytest.mark.slow
    def test_good_kernels_are_used(self, capsys):
        assert gpu_attention.find_fault() is None
        assert gpu_attention.SELF_TEST.passed() and capsys.readouterr().err == ""

    @tiers.parametrize(
        "case", [("bfloat16", 64, 1), ("bfloat16", 16, 64), ("float32", 128, 20)], first=1
    )
    def test_what_is_compiled_anew_is_tried(self, case, monkeypatch):
        dtype, features, queries = case
        tried = []
        kernel = gpu_attention.attend_to_cache

        def noted(qkv, key, *rest, **how):
            return tried.append((qkv, key)) or kernel(qkv, key, *rest, **how)

        monkeypatch.setattr(gpu_attention, "attend_to_cache", noted)
        cache, takes = KVCache.empty(1, 2, 16, features, dtype), gpu_attention.supports_call
        assert takes(cache, queries) and takes(cache, max(queries - 1, 1))
        ((qkv, key),) = tried
        padded = max(16, 1 << (queries - 1).bit_length())
        assert (key.dtype, key.shape[-1]) == (dtype, features) and padded // 2 < max(
            qkv.shape[1], 9
        ) <= padded

    @pytest.mark.slow
    def test_a_case_that_fails_is_named_and_the_others_are_used(self, monkeypatch, capsys):
        kernel = gpu_attention.attend_to_cache

        def off(found):
            return found + 1 if found.dtype == jnp.float32 else found

        def wrong(*arguments, **how):
            return [off(found) for found in kernel(*arguments, **how)]

        monkeypatch.setattr(gpu_attention, "attend_to_cache", wrong)

        def fits(dtype):
            return gpu_attention.supports_call(KVCache.empty(1, 2, 16, 16, dtype), 3)

        assert fits("bfloat16") and not fits("float32")
        message = (
            "XLA's attention is (dtype float32, features 16, queries 16): a self-test gave other "
            "numbers\n"
        )
        assert capsys.readouterr().err.endswith(message)

    def test_wrong_numbers_are_reported(self, monkeypatch, capsys):
        kernel = gpu_attention.attend_to_cache

        def off(*arguments, interpret=False):
            return [found + 1 for found in kernel(*arguments)]

        monkeypatch.setattr(gpu_attention, "attend_to_cache", off)
        assert not gpu_attention.SELF_TEST.passed()
        assert "XLA's attention is: a self-test gave other numbers" in capsys.readouterr().err

    def test_a_compiler_that_fails_is_reported(self, monkeypatch, capsys):
        def fails(*arguments, interpret=False):
            raise RuntimeError("no such architecture\nand more")

        monkeypatch.setattr(gpu_attention, "attend_to_cache", fails)
        assert not gpu_attention.SELF_TEST.passed()
        assert "a self-test failed: RuntimeError: no such architecture\n" in capsys.readouterr().err

    def test_programs_traced_side_by_side_try_once(self, monkeypatch):
        tried = []
        trial = kernel_selftest.KernelSelfTest(
            "gpu", "", lambda: tried.append(1) or time.sleep(0.1)
        )
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda _: trial.passed(), range(4))) and tried == [1]

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr(gpu_attention, "triton", None)
        assert not gpu_attention.supports_call(KVCache.empty(1, 2, 16, 64, jnp.bfloat16), 1)
