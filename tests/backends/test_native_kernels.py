"""The CPU's own kernels: products against float64, and of what each bit depends.

They run as compiled for this processor and for a narrower one; others by name in SPECDEC_TEST_MARCH
(`kernel_widths.py`).
"""

import functools

import jax
import jax.numpy as jnp
import kernel_inputs
import numpy as np
import pytest
import tiers
from kernel_inputs import UNIT, normal, same

from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.cpu.packed_weights import PackedWeight
from specdec_jax.backends.int8 import Int8Weight

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not native.is_available(), reason=native.describe_state()),
]

width = kernel_inputs.width
KINDS = ["float32", "int8", "w8a8"]
MOST = {
    "int8": 32639,
    "w8a8": 127,
}  # to which the greatest of the inputs that are rounded together becomes
ROWS = [*range(1, 65), 96, 97, 200]
SHAPES = [
    (576, 33),  # whole tiles of inputs
    (1, 1),
    (7, 33),
    (17, 16),
    (33, 257),
    (257, 7),
    (600, 100),
    (1024, 50),
    (1025, 20),
]  # lines and columns
CHUNK = 512  # inputs that are rounded together, for weights in int8


def weight(kind, K, F):
    """A weight packed, with its values and scales in float64."""
    if kind == "float32":
        values = normal(K, F, seed=1)
        return PackedWeight.pack(jnp.asarray(values)), values.astype(np.float64), np.ones(F)
    rng = np.random.default_rng(2)
    values, scales = (
        rng.integers(-127, 128, (K, F), dtype=np.int8),
        rng.random(F, dtype=np.float32) + 0.5,
    )
    stored = Int8Weight(jnp.asarray(values), jnp.asarray(scales), packed_weights.INPUT_BITS[kind])
    return PackedWeight.pack(stored), values.astype(np.float64), scales


def times(stored, x, valid=None):
    return np.asarray(stored.product(jnp.asarray(x), jnp.float32, valid))


# Norms and sums over a row.


@tiers.parametrize("kind", ["rms", "layer"], first=3)
@tiers.parametrize("D", [1, 7, 640, 4096], first=3)
def test_norms(kind, D):
    """Against float64, and: a row's bits are those it has alone, also before a product."""
    x, scale, bias = (
        normal(200, D),
        normal(D, seed=1),
        normal(D, seed=2) if kind == "layer" else None,
    )
    norm = packed_weights.Before(
        kind, jnp.asarray(scale), None if bias is None else jnp.asarray(bias)
    )
    run = jax.jit(lambda x, valid=None: packed_weights.normalize(x, norm, valid))
    whole, valid = np.asarray(run(x)), np.arange(200) % 3 > 0
    wide = x.astype(np.float64)
    wide -= 0 if bias is None else wide.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt((wide**2).mean(axis=1, keepdims=True) + (1e-6 if bias is None else 1e-5))
    expected = wide * factor * scale + (0 if bias is None else bias)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
    for count in (1, 2, 7, 64):
        same(np.asarray(run(x[:count])), whole[:count])
    same(
        np.asarray(run(x.reshape(8, 25, D), valid.reshape(8, 25))).reshape(200, D),
        np.where(valid[:, None], whole, 0),
    )
    once = PackedWeight.pack(jnp.eye(D, 16, dtype=jnp.float32))
    same(
        np.asarray(once.product(jnp.asarray(x), jnp.float32, before=norm))[:, : min(D, 16)],
        whole[:, :16],
    )


@pytest.mark.parametrize("V", [1, 16, 33, 384, 5000])
def test_log_sums(V):
    """Log sums beside float64, and bit for bit those of `greedy_token_and_logprob`."""
    x = 3 * normal(64, V)
    run = jax.jit(
        lambda x: packed_weights.log_sum_exp(x)
    )  # a function of its own, traced for this build
    greatest, sums = (np.asarray(part) for part in run(x))
    same(greatest, x.max(axis=1))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(
        sums, np.log(np.exp(wide - greatest[:, None]).sum(axis=1)), atol=3e-7
    )
    for count in (0, 1, 2, 7):
        same(np.asarray(run(x[:count])[1]), sums[:count])
    same(np.asarray(run(x.reshape(4, 16, V))[1]).reshape(-1), sums)
    once = PackedWeight.pack(jnp.eye(64, V, dtype=jnp.float32))
    logits = np.zeros((64, V), np.float32)
    logits[:, : min(64, V)] = 5 * normal(64, 64)[:, :V]
    _, found = once.greedy_token_and_logprob(5 * normal(64, 64), normalize=True)
    same(np.asarray(found), 0 - np.asarray(run(logits)[1]))


def test_log_sums_of_rows_that_are_no_distribution():
    inf, nan = np.inf, np.nan
    x = np.array([[nan, 1], [inf, 1], [-inf, 1], [-inf, -inf]], np.float32)
    greatest, sums = (np.asarray(part) for part in packed_weights.log_sum_exp(x))
    same(greatest, np.float32([1, inf, 1, -inf]))
    same(sums, np.float32([nan, nan, 0, 0]))


# Products.


@pytest.mark.parametrize("kind", KINDS)
@tiers.parametrize("K, F", SHAPES, first=4)
def test_products(K, F, kind):
    """Products beside float64; a row's bits are those it has alone."""
    stored, values, scales = weight(kind, K, F)
    x, order = normal(max(ROWS), K), np.random.default_rng(3).permutation(max(ROWS))
    some = [*range(0, max(ROWS), 17)]

    @jax.jit
    def run(stored, x):
        def product(rows):
            return stored.product(rows, jnp.float32)

        return (
            [product(x[:M]) for M in ROWS],
            [product(x[i : i + 1]) for i in some],
            product(x[order]),
        )

    widths, alone, shuffled = jax.tree.map(np.asarray, run(stored, jnp.asarray(x)))
    whole = widths[-1]
    bound = (K + 2) * UNIT * (np.abs(x.astype(np.float64)) @ np.abs(values)) * scales
    for first in range(0, K if kind in MOST else 0, CHUNK):
        part = slice(first, first + CHUNK)
        bound += (
            0.5001
            / MOST[kind]
            * np.abs(x[:, part]).max(axis=1)[:, None]
            * np.abs(values[part]).sum(axis=0)
            * scales
        )
    assert (np.abs(whole - (x.astype(np.float64) @ values) * scales) <= bound).all()
    for M, got in zip(ROWS, widths):
        same(got, whole[:M])
    for i, got in zip(some, alone):
        same(got[0], whole[i])
    same(shuffled, whole[order])


@pytest.mark.parametrize("kind", KINDS)
def test_dimensions_before_the_last_and_none(kind):
    stored, _, _ = weight(kind, 33, 40)
    x = normal(2, 3, 33)
    same(times(stored, x), times(stored, x.reshape(6, 33)).reshape(2, 3, 40))
    same(times(stored, x[0, 0]), times(stored, x)[0, 0])
    assert times(stored, x[:, :0]).shape == (2, 0, 40)
    empty = stored.replace(values=stored.values[:, :0], lines=0)
    same(times(empty, x[..., :0]), np.zeros((2, 3, 40), np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [5, 40, 200])
def test_rows_that_do_not_count(M, kind):
    stored, _, _ = weight(kind, 300, 50)
    x = normal(M, 300)
    whole = times(stored, x)
    for valid in (np.arange(M) % 3 > 0, np.zeros(M, bool), np.ones(M, bool), np.arange(M) == M - 1):
        poisoned = np.where(valid[:, None], x, np.float32(np.nan))
        same(times(stored, poisoned, jnp.asarray(valid)), np.where(valid[:, None], whole, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_not_numbers_and_infinities_reach_their_own_outputs(kind):
    K, F, M = 300, 41, 20
    stored, values, scales = weight(kind, K, F)
    x = normal(M, K)
    whole, poisoned = times(stored, x), x.copy()
    poisoned[3, K - 1], poisoned[7, 5], poisoned[8, 0] = np.nan, np.inf, -np.inf
    got = times(stored, poisoned)
    with np.errstate(invalid="ignore"):
        expected = (poisoned.astype(np.float64) @ values) * scales
    others = ~np.isin(np.arange(M), [3, 7, 8])
    if kind != "float32":  # an infinite input has no scale
        expected[~others] = np.nan
    same(got[~others], expected[~others])  # NaN and infinities only
    assert not np.isfinite(got[~others]).any()
    same(got[others], whole[others])
    # Past the last column nothing matters.
    if kind == "float32":
        cells = stored.values
        same(times(stored.replace(values=cells.at[-1, :, F % 16 :].set(jnp.nan)), x), whole)
        for column, value in ((F - 1, np.nan), (17, np.inf)):
            got = times(stored.replace(values=cells.at[column // 16, 9, column % 16].set(value)), x)
            same(np.delete(got, column, 1), np.delete(whole, column, 1))
            same(got[:, column], x[:, 9] * np.float32(value))
    else:
        same(times(stored.replace(values=stored.values.at[-1, :, F % 16 :].set(99)), x), whole)


@pytest.mark.parametrize("kind", MOST)
def test_sums_of_8_bits_are_exact(kind):
    """Sums of inputs in 16 or 8 bits are exact.

    The greatest ones are among them: 512 of one sign with weights of one sign.
    """
    rng, most = np.random.default_rng(4), MOST[kind]
    for K, make, weights in (
        (701, lambda shape: rng.integers(-most, most + 1, shape), None),
        (1024, lambda shape: np.full(shape, most), -128),
        (1023, lambda shape: np.full(shape, -most), -128),
        (1022, lambda shape: np.full(shape, most), 127),
        (5, lambda shape: np.full(shape, -most), 127),
    ):
        x = make((3, K))
        values = rng.integers(-128, 128, (K, 20)) if weights is None else np.full((K, 20), weights)
        x[:, ::CHUNK] = most
        stored = PackedWeight.pack(
            Int8Weight(jnp.asarray(values, jnp.int8), jnp.ones(20), packed_weights.INPUT_BITS[kind])
        )
        parts = [x[:, k : k + CHUNK] @ values[k : k + CHUNK] for k in range(0, K, CHUNK)]
        expected = np.zeros((3, 20), np.float32)
        for part in parts:
            expected += part.astype(np.float32)
        same(times(stored, x.astype(np.float32)), expected)


@pytest.mark.parametrize("kind", MOST)
def test_rows_of_tiny_inputs_and_zeros_in_8_bits(kind):
    stored, values, scales = weight(kind, 40, 20)
    x = normal(3, 40) * np.array([[0], [1e-25], [1e-33]], np.float32)
    got = times(stored, x)
    expected, tolerance = x[1].astype(np.float64) @ values * scales, 8 / MOST[kind]
    np.testing.assert_allclose(got[1], expected, atol=tolerance * np.abs(got[1]).max())
    same(got[::2], np.zeros((2, 20), np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_cleared_changes_nothing_that_counts(kind):
    """Through a block of kernels, rows that do not count hold anything until the last clears."""
    stored, *_ = weight(kind, 48, 48)
    x, valid = jnp.asarray(normal(2, 5, 48)), jnp.asarray(np.arange(5) < np.array([[3], [0]]))
    caches = [jnp.asarray(normal(2, 2, 9, 8, seed=s)) for s in (1, 2)]

    def block(clear):
        qkv = stored.product(x, jnp.float32, valid, clear=clear)
        out, *written = packed_weights.attend_to_cache(
            qkv, *caches, None, jnp.array([1, 2], jnp.int32), 3, valid, clear=clear
        )
        out = packed_weights.attend_to_encoded(
            out, *caches, jnp.array([9, 4], jnp.int32), valid, clear=clear
        )
        wide = stored.replace(values=stored.values[:, : 16 if kind == "float32" else 4], lines=16)
        return wide.product(out, jnp.float32, valid), *written

    for got, expected in zip(block(False), block(True)):
        same(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("rows", [11, 16, 40])
@pytest.mark.parametrize("packed", [False, True], ids=["table", "packed"])
def test_rows_of_a_table(packed, rows):
    """Also of one that is stored as a head: the columns of that."""
    table, last = normal(rows, 21), rows - 1
    numbers = np.array([[0, last, 3], [-7, rows, 2**31 - 1]], np.int32)
    take = functools.partial(packed_weights.take_rows, jnp.asarray(table))
    if packed:
        take = PackedWeight.pack_rows(jnp.asarray(table)).take_columns
    expected = table[np.clip(numbers, 0, last)]
    same(np.asarray(take(jnp.asarray(numbers))), expected)
    valid = np.array([[True, False, True], [False, True, False]])
    some = take(jnp.asarray(numbers), jnp.asarray(valid))
    same(np.asarray(some), np.where(valid[..., None], expected, 0))
    assert take(jnp.zeros((2, 0), jnp.int32)).shape == (2, 0, 21)


def activation(name, x):
    return {
        "linear": lambda x: x,
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1 + np.exp(-x)),
    }[name](x)


BEFORE = {
    "rms": ("rms",),
    "layer": ("layer",),
    **{name: ("activation", name) for name in ("relu", "gelu", "silu", "linear")},
    **{f"{name} gate": ("gate", name, "linear") for name in ("gelu", "silu", "relu")},
    "silu gate of relu": ("gate", "silu", "relu"),
}


def prepared(before, x):
    """In float64."""
    x = x.astype(np.float64)
    if before.kind == "gate":
        first, second = np.split(x, 2, axis=-1)
        return activation(before.activations[0], first) * activation(before.activations[1], second)
    if before.kind == "activation":
        return activation(before.activations[0], x)
    centred = x - x.mean(axis=-1, keepdims=True) if before.kind == "layer" else x
    epsilon = 1e-5 if before.kind == "layer" else 1e-6
    normed = (
        centred
        / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
        * np.asarray(before.scale)
    )
    return normed + (0 if before.bias is None else np.asarray(before.bias))


@tiers.parametrize("K", [64, 5, 300], first=1)
@pytest.mark.parametrize("how", BEFORE)
def test_what_comes_before_and_after_a_product(how, K):
    """Steps around a product beside float64; a row's bits are its own."""
    name, *activations = BEFORE[how]
    norm = normal(2, K, seed=20) if name in ("rms", "layer") else (None, None)
    scale, bias = (None if part is None else jnp.asarray(part) for part in norm)
    before = packed_weights.Before(
        name, scale, bias if name == "layer" else None, tuple(activations)
    )
    M, F = 40, 35
    x = normal(M, 2 * K if name == "gate" else K, seed=21) * 4
    x[1] *= 30  # activations of large numbers
    stored, values, _ = weight("float32", K, F)
    added, residual = normal(F, seed=22), normal(M, F, seed=23)

    def run(x, residual=residual, valid=None, stored=stored):
        arrays = [
            None if array is None else jnp.asarray(array) for array in (valid, added, residual)
        ]
        return np.asarray(
            stored.product(jnp.asarray(x), jnp.float32, arrays[0], before, *arrays[1:])
        )

    whole, exact = run(x), prepared(before, x)
    bound = (
        1e-6
        * (np.abs(exact) @ np.abs(values) + np.abs(exact).max(axis=1, keepdims=True))
        * (8 + K / 8)
        + 1e-5
    )
    assert (np.abs(whole - (exact @ values + added + residual)) <= bound).all()
    for i in (0, 1, M - 1):
        same(run(x[[i]], residual[[i]])[0], whole[i])
    valid = np.arange(M) % 3 > 0
    same(run(np.where(valid[:, None], x, np.nan), valid=valid), np.where(valid[:, None], whole, 0))
    poisoned = np.where(np.arange(M)[:, None] == 2, np.float32(np.nan), x)
    same(run(poisoned), np.where(np.arange(M)[:, None] == 2, np.nan, whole))
    # The same in int8, whose product rounds what was prepared.
    for kind in MOST:
        rounded, _, scales = weight(kind, K, F)
        in_8 = run(x, stored=rounded)
        exact_8 = exact @ np.asarray(rounded.matrix(), np.float64) + added + residual
        # Each input is off by half a step.
        off = 0.51 * np.abs(exact).max(axis=1, keepdims=True) / MOST[kind] + 1e-5 * np.abs(exact)
        assert (
            np.abs(in_8 - exact_8) <= off @ np.abs(np.asarray(rounded.matrix(), np.float64)) + 1e-4
        ).all()
        same(run(x[[3]], residual[[3]], stored=rounded)[0], in_8[3])
        same(
            run(np.where(valid[:, None], x, np.nan), valid=valid, stored=rounded),
            np.where(valid[:, None], in_8, 0),
        )


@pytest.mark.parametrize("kind", KINDS)
@tiers.parametrize("K, F", [(100, 257), (33, 1), (64, 16), (640, 1000)], first=1)
def test_greedy_tokens(K, F, kind):
    """The first of the greatest columns and its log-probability; a row's bits are its own."""
    stored, _, _ = weight(kind, K, F)
    stored = stored.replace(scales=stored.scales / 100) if kind in MOST else stored
    x = normal(200, K, seed=30)
    logits = times(stored, x).astype(np.float64)
    expected = logits.max(axis=1) - np.log(
        np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    )
    expected -= logits.max(axis=1)

    def run(x, valid=None):
        return tuple(map(np.asarray, stored.greedy_token_and_logprob(jnp.asarray(x), valid)))

    tokens, log_probs = run(x)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_allclose(log_probs, expected, atol=1e-6, rtol=1e-5)
    for M in (1, 2, 5, 9, 40):
        for got, whole in zip(run(x[:M]), (tokens, log_probs)):
            same(got.astype(np.float32), whole[:M].astype(np.float32))
    valid = np.arange(200) % 4 == 1
    some = run(np.where(valid[:, None], x, np.nan), jnp.asarray(valid))
    np.testing.assert_array_equal(some[0], np.where(valid, tokens, 0))
    same(some[1], np.where(valid, log_probs, np.float32(0)))
    np.testing.assert_array_equal(
        stored.greedy_token_and_logprob(jnp.asarray(x), None, normalize=False)[0], tokens
    )
    wrong = np.arange(200) % 31 == 7
    none = run(np.where(wrong[:, None], np.nan, x))
    np.testing.assert_array_equal(none[0], np.where(wrong, -1, tokens))
    same(none[1], np.where(wrong, np.float32(np.nan), log_probs))
    assert run(x[:0])[0].shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_caps(kind):
    """The cap of a product and that of a head are the same numbers."""
    stored, values, scales = weight(kind, 64, 50)
    x, added, cap = jnp.asarray(normal(9, 64)), normal(50, seed=31), np.float32(5)
    rows, bias = normal(9, 50, seed=32), jnp.asarray(added)
    plain = np.asarray(stored.product(x, jnp.float32, bias=bias))
    found = np.asarray(stored.product(x, jnp.float32, bias=bias, cap=cap))
    np.testing.assert_allclose(found, cap * np.tanh(plain.astype(np.float64) / cap), rtol=4e-7)
    with_rows = stored.product(x, jnp.float32, bias=bias, cap=cap, residual=jnp.asarray(rows))
    same(np.asarray(with_rows), found + rows)
    tokens, log_probs = stored.greedy_token_and_logprob(x, bias=bias, cap=cap)
    np.testing.assert_array_equal(tokens, found.argmax(axis=1))
    most, sums = packed_weights.log_sum_exp(jnp.asarray(found))
    same(np.asarray(log_probs), np.max(found, axis=1) - np.asarray(most) - np.asarray(sums))
    infinite = stored.product(x.at[0].set(np.inf), jnp.float32, bias=bias, cap=cap)
    assert not (np.abs(np.asarray(infinite)) > cap).any()


def test_greedy_tokens_of_equal_columns_and_of_what_is_not_finite():
    columns, x = np.zeros((4, 100), np.float32), np.eye(4, dtype=np.float32)
    columns[0, [40, 41, 90]] = 3
    columns[2, [17, 60]] = np.inf, 5
    columns[3, 99] = -np.inf
    stored = PackedWeight.pack(jnp.asarray(columns))
    x[1] = 0
    tokens, log_probs = map(np.asarray, stored.greedy_token_and_logprob(jnp.asarray(x[:2]), None))
    np.testing.assert_array_equal(tokens, [-1, -1])  # 0 times an infinite weight
    assert np.isnan(log_probs).all()
    finite = PackedWeight.pack(jnp.asarray(np.where(np.isinf(columns), 0, columns)))
    tokens, log_probs = map(np.asarray, finite.greedy_token_and_logprob(jnp.asarray(x), None))
    np.testing.assert_array_equal(tokens, [40, 0, 60, 0])
    np.testing.assert_allclose(
        log_probs,
        [-np.log(3 + 97 * np.exp(-3)), -np.log(100), -np.log(1 + 99 * np.exp(-5)), -np.log(100)],
        rtol=1e-6,
    )
    lone = PackedWeight.pack(
        jnp.asarray(np.r_[[np.where(np.arange(40) == 20, np.inf, 1.0)]], jnp.float32)
    )
    tokens, log_probs = map(
        np.asarray, lone.greedy_token_and_logprob(jnp.array([[1.0], [-1.0], [np.nan]]), None)
    )
    np.testing.assert_array_equal(tokens, [20, 0, -1])
    same(log_probs[[0, 2]], np.full(2, np.nan, np.float32))
    np.testing.assert_allclose(log_probs[1], -np.log(39), rtol=1e-6)


@pytest.mark.slow
def test_denormals_count_as_zero_on_every_thread():
    """Also on the thread that calls, which handles them as before afterwards."""
    cells = PackedWeight.pack(jnp.full((640, 2048), 1e-20))
    run = jax.jit(lambda cells, x: cells.product(x, jnp.float32))
    for _ in range(50):
        assert (np.asarray(run(cells, jnp.full((5, 640), 1e-20))) == 0).all()
    assert (
        times(PackedWeight.pack(jnp.full((640, 2048), 1e9)), np.full((2, 640), 1e-40, np.float32))
        == 0
    ).all()
    assert (np.full(8, 1e-40, np.float32) * np.float32(2) > 0).all()
    qkv, tiny = jnp.full((1, 1, 48), 1e-25), jnp.full((1, 1, 4, 16), 1e-25)
    out, _, _ = packed_weights.attend_to_cache(
        qkv, tiny, tiny, None, jnp.zeros(1, jnp.int32), 1e-30
    )
    np.testing.assert_array_equal(np.asarray(out), np.float32(1e-25))
