"""The CPU's own attention against float64, and of what each bit depends."""

import functools

import jax
import jax.numpy as jnp
import kernel_inputs
import numpy as np
import pytest
import tiers
from kernel_inputs import UNIT, normal, same
from kernel_widths import compiled_for

from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.cpu.packed_weights import Scoring
from specdec_jax.backends.tree_positions import Nodes

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not native.is_available(), reason=native.describe_state()),
]

width = kernel_inputs.width


# Attention.


def attended(query, keys, values, bias=0.0):
    """One query `[K]` over keys and values `[S, K]` in float64."""
    scores = keys.astype(np.float64) @ query + bias
    weights = np.exp(scores - scores.max(initial=-np.inf))
    return weights @ values / weights.sum() if len(keys) else np.zeros(len(query))


class Cached:
    """Inputs of self-attention: T new positions of B rows, caches of S slots."""

    def __init__(self, B, T, H, S, K, positions, biased=True, scale=1.0):
        self.qkv, self.H, self.K = normal(B, T, 3, H, K), H, K
        self.qkv[:, :, 0] *= scale
        self.keys, self.values = normal(B, H, S, K, seed=4), normal(B, H, S, K, seed=5)
        self.bias = normal(H, S, seed=6) if biased else None
        self.positions, self.divisor = np.array(positions, np.int32), np.float32(np.sqrt(K))

    def run(self, rows=slice(None), queries=slice(None), where=None, valid=None):
        qkv = self.qkv[rows, queries].reshape(-1, len(self.qkv[0, queries]), 3 * self.H * self.K)
        where = jnp.asarray(self.positions[rows]) if where is None else where
        bias = None if self.bias is None else jnp.asarray(self.bias)
        arrays = (jnp.array(x) for x in (qkv, self.keys[rows], self.values[rows]))
        return tuple(
            map(
                np.asarray,
                packed_weights.attend_to_cache(*arrays, bias, where, self.divisor, valid),
            )
        )

    def expected(self):
        B, T, _, H, K = self.qkv.shape
        keys, values, out = self.keys.copy(), self.values.copy(), np.zeros((B, T, H, K))
        for b, h, t in np.ndindex(B, H, T):
            at = np.clip(self.positions[b], 0, keys.shape[2] - T) + t
            query, keys[b, h, at], values[b, h, at] = self.qkv[b, t, :, h]
            bias = 0 if self.bias is None else self.bias[h, -1 - at :]
            query = query.astype(np.float64) / self.divisor
            out[b, t, h] = attended(query, keys[b, h, : at + 1], values[b, h, : at + 1], bias)
        return out.reshape(B, T, H * K), keys, values


def close(got, expected):
    assert np.abs(got - expected).max(initial=0) <= 4e-6


@pytest.mark.parametrize("biased", [True, False])
@tiers.parametrize("K", [3, 8, 20, 24, 64, 72], first=4)
def test_self_attention(K, biased):
    """At the first slot, the last ones, and past them, where XLA's updates go, too.

    Scores are sharp.
    """
    for positions, scale in (([0, 5, 34], 1.0), ([31, 99, -4], 30.0)):
        case = Cached(3, 3, 2, 37, K, positions, biased, scale)
        (out, *caches), (expected, *written) = case.run(), case.expected()
        (close if scale == 1 else functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=0))(
            out, expected
        )
        for got, cache in zip(caches, written):
            same(got, cache)


def test_small_weights_are_as_exact_as_large_ones():
    """Two slots, x apart in score, have the weights 1 / (1 + e^-x) and 1 / (1 + e^x).

    They are exact to a few units in the last place.
    """
    apart = np.linspace(-86.9, 0, 4001, dtype=np.float32)
    bias, cache = (
        np.zeros((len(apart), 2), np.float32),
        np.zeros((1, len(apart), 2, 1), np.float32),
    )
    bias[:, 0], cache[..., 0, 0] = apart, 1
    arrays = (
        jnp.zeros((1, 1, 3 * len(apart))),
        *[jnp.asarray(cache)] * 2,
        jnp.asarray(bias),
        jnp.ones(1, jnp.int32),
    )
    out, _, _ = packed_weights.attend_to_cache(*arrays, 1.0)
    exact = 1 / (1 + np.exp(-apart.astype(np.float64)))
    np.testing.assert_allclose(np.asarray(out).ravel(), exact, rtol=6 * UNIT)
    out, _, _ = packed_weights.attend_to_cache(*arrays[:3], jnp.asarray(bias * 2), arrays[4], 1.0)
    assert (np.asarray(out).ravel()[apart < -43.5] == 0).all()


@pytest.mark.parametrize("T, K", [(5, 24), (12, 64)])  # fewer and more than are computed together
def test_bits_of_self_attention(T, K):
    """A query's bits do not depend on the call, the batch, the cache and slots past it."""
    given = 3, T, 2, 40, K, [0, 9, 40 - T]
    case = Cached(*given)
    whole, keys, values = case.run()
    for b in range(3):
        one = Cached(*given)
        for t in range(T):
            out, one.keys[[b]], one.values[[b]] = one.run(
                [b], [t], jnp.asarray(one.positions[[b]] + t)
            )
            same(out[0, 0], whole[b, t])
    same(one.keys[2], keys[2])
    larger = Cached(3, T, 2, 64, K, given[-1])
    larger.keys[:, :, :40], larger.values[:, :, :40], larger.bias[:, 24:] = (
        case.keys,
        case.values,
        case.bias,
    )
    for b, position in enumerate(case.positions):
        larger.keys[b, :, position + T :] = larger.values[b, :, position + T :] = np.nan
    same(larger.run()[0], whole)


@pytest.mark.slow
def test_bits_where_compilers_avoid_fused_operations(width, tmp_path):
    """GCC does for some processors, where a loop adds up one sum and not several."""
    if width != "native":
        pytest.skip("one kernel is enough")
    with compiled_for("native", tmp_path, "--param=avoid-fma-max-bits=512"):
        test_bits_of_self_attention(12, 64)


def test_self_attention_of_valid_positions():
    case = Cached(2, 4, 2, 20, 8, [3, 11])
    valid, whole = np.arange(4) < np.array([[3], [0]]), case.run()
    case.qkv[~valid] = np.nan
    out, keys, values = case.run(valid=jnp.asarray(valid))
    same(out, np.where(valid[..., None], whole[0], 0))
    for got, written, before in ((keys, whole[1], case.keys), (values, whole[2], case.values)):
        same(got[0, :, :6], written[0, :, :6])
        same(got[0, :, 6:], before[0, :, 6:])
        same(got[1], before[1])


def test_a_slot_that_is_not_a_number():
    case = Cached(2, 3, 2, 20, 24, [4, 10])
    whole = case.run()[0].reshape(2, 3, 2, 24)
    case.keys[0, 1, 2, 7] = np.nan
    case.values[1, 0, 5, 3] = np.nan
    got, expected = case.run()[0].reshape(2, 3, 2, 24), whole.copy()
    expected[0, :, 1], expected[1, :, 0, 3] = np.nan, np.nan
    same(got, expected)
    case = Cached(1, 3, 1, 20, 24, [4])
    whole, case.qkv[0, 1, 0, 0, 5] = case.run()[0], np.nan
    got = case.run()[0]
    same(got, np.where(np.arange(3)[None, :, None] == 1, np.nan, whole))


@pytest.mark.parametrize("T, K", [(3, 3), (3, 24), (3, 72), (4, 64), (12, 64)])
def test_cross_attention(T, K):
    B, H, L = 4, 2, 37
    query, keys, values = (
        normal(B, T, H * K, seed=7),
        normal(B, H, L, K, seed=8),
        normal(B, H, L, K, seed=9),
    )
    query /= np.float32(np.sqrt(K))
    lengths = np.array([0, 1, 19, L], np.int32)

    def run(*arrays):
        return np.asarray(packed_weights.attend_to_encoded(*map(jnp.asarray, arrays)))

    whole = run(query, keys, values, lengths)
    expected = [
        [
            attended(query[b, t, h * K : (h + 1) * K], keys[b, h, :n], values[b, h, :n])
            for h in range(H)
        ]
        for b, n in enumerate(lengths)
        for t in range(T)
    ]
    close(whole, np.reshape(expected, whole.shape))
    for b, n in enumerate(lengths):  # alone, one query at a time, in another padding
        for t in range(T):
            part = keys[[b], :, : n + 2], values[[b], :, : n + 2], lengths[[b]]
            same(run(query[[b], t : t + 1], *part)[0, 0], whole[b, t])
        keys[b, :, n:] = values[b, :, n:] = np.nan
    same(run(query, keys, values, lengths), whole)
    prefixes = np.arange(T) < np.array([[1], [T], [0], [2]])
    for valid in (prefixes, normal(B, T, seed=10) > 0):
        same(run(query, keys, values, lengths, valid), np.where(valid[..., None], whole, 0))
    assert np.isnan(run(query, keys, values, lengths + [1, 0, 0, 0])[0]).all()


@pytest.mark.parametrize(
    "K, L, scale", [(8, 21, 1.0), (20, 21, 1.0), (64, 21, 1.0), (20, 450, 1.0), (20, 40, 100.0)]
)
def test_encoder_attention(K, L, scale):
    """The longest takes more than one part of the queries and of the keys.

    The scores of the last are sharp.
    """
    B, H = 4, 2
    qkv, bias, lengths = (
        normal(B, L, 3, H, K, seed=10),
        normal(H, 2 * L - 1, seed=11),
        np.array([0, 1, 13, L], np.int32),
    )
    qkv[:, :, 0] *= scale / np.float32(np.sqrt(K))

    def run(qkv, bias, lengths):
        return np.asarray(
            packed_weights.attend_to_inputs(
                jnp.asarray(qkv.reshape(*qkv.shape[:2], -1)),
                jnp.asarray(bias),
                jnp.asarray(lengths),
            )
        )

    whole, expected = run(qkv, bias, lengths), np.zeros((B, L, H, K))
    for b, t, h in np.ndindex(B, L, H):
        if t < (n := lengths[b]):
            expected[b, t, h] = attended(
                *(qkv[b, t, 0, h], qkv[b, :n, 1, h], qkv[b, :n, 2, h]),
                bias[h, L - 1 - t : L - 1 - t + n],
            )
    if scale == 1:
        close(whole, expected.reshape(whole.shape))
    else:
        np.testing.assert_allclose(whole, expected.reshape(whole.shape), rtol=0, atol=5e-4)
    for b, n in enumerate(lengths):
        size = min(n + 1, L)
        alone = run(qkv[[b], :size], bias[:, L - size : L + size - 1], lengths[[b]])
        same(alone[0, :n], whole[b, :n])
        qkv[b, n:] = np.nan
    same(run(qkv, bias, lengths), whole)


def test_lengths_and_positions_out_of_range_are_cut():
    qkv, keys = jnp.asarray(normal(2, 6, 48)), jnp.asarray(normal(2, 2, 6, 8))
    cached = qkv[:, :2], keys, keys
    bias, query = jnp.asarray(normal(2, 11)), qkv[..., :16]
    for far, most in (
        (np.array([99, -5]), np.array([6, 0])),
        (np.array([-(2**31), 2**31 - 1]), np.array([0, 6])),
    ):
        far, most = jnp.asarray(far, jnp.int32), jnp.asarray(most, jnp.int32)
        same(*(np.asarray(packed_weights.attend_to_inputs(qkv, bias, n)) for n in (far, most)))
        same(
            *(
                np.asarray(packed_weights.attend_to_encoded(query, keys, keys, n))
                for n in (far, most)
            )
        )
        same(
            *(
                np.asarray(packed_weights.attend_to_cache(*cached, bias[:, :6], n, 1)[0])
                for n in (far, most)
            )
        )


def test_no_rows():
    none = jnp.zeros(0, jnp.int32)
    out, keys, _ = packed_weights.attend_to_cache(
        jnp.zeros((0, 2, 48)), *[jnp.zeros((0, 2, 6, 8))] * 2, None, none, 1
    )
    assert out.shape == (0, 2, 16) and keys.shape == (0, 2, 6, 8)
    assert packed_weights.attend_to_encoded(
        jnp.zeros((0, 2, 16)), *[jnp.zeros((0, 2, 6, 8))] * 2, none
    ).shape == (
        0,
        2,
        16,
    )
    assert packed_weights.attend_to_inputs(
        jnp.zeros((0, 6, 48)), jnp.zeros((2, 11)), none
    ).shape == (0, 6, 16)


# Heads that share keys, caps, windows, further keys: as in Gemma.

OWN = dict(cap=np.float32(1.5), window=4)


def capped(x):
    return OWN["cap"] * np.tanh(x / np.float64(OWN["cap"]))


def attended_capped(query, keys, values):
    """As `attended`, of capped scores."""
    weights = np.exp(capped(keys.astype(np.float64) @ query))
    return weights @ values / weights.sum()


class Shared:
    """Inputs of attention in which four heads of queries share two of keys and values."""

    B, T, H, G, S, K, L = 2, 3, 4, 2, 40, 20, 7

    def __init__(self):
        self.qkv = normal(self.B, self.T, self.H + 2 * self.G, self.K)
        shape = self.B, self.G, self.S, self.K
        self.keys, self.values = normal(*shape, seed=4), normal(*shape, seed=5)
        self.more = [normal(self.B, self.G, self.L, self.K, seed=seed) for seed in (6, 7)]
        self.lengths = np.array([self.L, 2], np.int32)
        self.divisor = np.float32(3)

    def run(self, where, rows=slice(None), queries=slice(None), more=True):
        qkv = self.qkv[rows][:, queries].reshape(len(self.qkv[rows]), -1, 8 * self.K)
        arrays = [jnp.array(x) for x in (qkv, self.keys[rows], self.values[rows])]
        given = [jnp.asarray(x[rows]) for x in (*self.more, self.lengths)]
        scoring = Scoring(self.divisor, **OWN, more=tuple(given) if more else None)
        found = packed_weights.attend_to_cache(*arrays, None, where, scoring)
        return tuple(map(np.asarray, found))

    def expected(self, written, seen, more=True):
        """`written [B, T]`: the slots of the queries; `seen[b][t]`: those to which one attends."""
        keys, values = self.keys.copy(), self.values.copy()
        out = np.zeros((self.B, self.T, self.H, self.K))
        for b in range(self.B):
            new = self.qkv[b].swapaxes(0, 1)
            keys[b, :, written[b]] = new[4:6].swapaxes(0, 1)
            values[b, :, written[b]] = new[6:].swapaxes(0, 1)
        for b, t, h in np.ndindex(self.B, self.T, self.H):
            g, n = h // 2, self.lengths[b] if more else 0
            query = self.qkv[b, t, h].astype(np.float64) / self.divisor
            found = [
                np.concatenate([own[b, g, seen[b][t]], other[b, g, :n]])
                for own, other in zip((keys, values), self.more)
            ]
            out[b, t, h] = attended_capped(query, *found)
        return out.reshape(self.B, self.T, -1), keys, values


@pytest.mark.parametrize("more", [False, True])
def test_shared_heads_and_windows_over_a_cache(more):
    """A query's bits depend neither on the call and other rows, nor on slots it does not see."""
    case, positions = Shared(), np.array([0, 11], np.int32)
    written = positions[:, None] + np.arange(case.T)
    (out, *caches), seen = case.run(jnp.asarray(positions), more=more), written[..., None]
    seen = [[np.arange(max(at - 3, 0), at + 1) for at in row] for row in written]
    expected = case.expected(written, seen, more)
    close(out, expected[0])
    for got, wanted in zip(caches, expected[1:]):
        same(got, wanted)
    for b in range(case.B):
        one = Shared()
        one.keys[b, :, : max(positions[b] - 3, 0)] = np.nan
        one.more[0][b, :, case.lengths[b] :] = one.more[1][b, :, case.lengths[b] :] = np.nan
        for t in range(case.T):
            where = jnp.asarray(positions[[b]] + t)
            found, one.keys[[b]], one.values[[b]] = one.run(where, [b], [t], more)
            same(found[0, 0], out[b, t])


@pytest.mark.parametrize("more", [False, True])
def test_shared_heads_and_windows_of_nodes(more):
    case, rng = Shared(), np.random.default_rng(0)
    starts, positions = np.array([20, 31], np.int32), np.array([[2, 8, 9], [0, 5, 5]], np.int32)
    paths = np.stack([[rng.permutation(12) for _ in range(3)] for _ in range(2)]).astype(np.int32)
    written = (starts[:, None] + np.arange(3)).astype(np.int32)
    np.put_along_axis(paths, positions[..., None], written[..., None], axis=2)
    nodes = Nodes(*(jnp.asarray(x) for x in (starts, positions, paths)))
    out, *caches = case.run(nodes, more=more)
    seen = [[paths[b, t, : positions[b, t] + 1][-4:] for t in range(3)] for b in range(2)]
    expected = case.expected(written, seen, more)
    close(out, expected[0])
    for got, wanted in zip(caches, expected[1:]):
        same(got, wanted)
    first = Nodes(nodes.starts, nodes.positions[:, :1], nodes.paths[:, :1])
    same(case.run(first, queries=slice(0, 1), more=more)[0][:, 0], out[:, 0])


def test_shared_heads_over_an_encoders_output():
    case = Shared()
    query = case.qkv[:, :, :4].reshape(2, 3, -1)
    given = [jnp.asarray(x) for x in (query, *case.more, case.lengths)]
    scoring = Scoring(case.divisor, OWN["cap"])
    found = np.asarray(packed_weights.attend_to_encoded(*given, scoring=scoring))
    for b, t, h in np.ndindex(2, 3, 4):
        keys, values = (part[b, h // 2, : case.lengths[b]] for part in case.more)
        one = query[b, t].reshape(4, -1)[h].astype(np.float64) / case.divisor
        close(found[b, t].reshape(4, -1)[h], attended_capped(one, keys, values))


WINDOWS = [(21, 4, 2), (21, 1, 0), (300, 90, 40), (700, 20, 5)]


@tiers.parametrize("L, window, ahead", WINDOWS, first=2)
def test_shared_heads_and_windows_of_an_encoder(L, window, ahead):
    H, G, K, lengths = 4, 2, 20, np.array([L, 13, 1], np.int32)
    qkv, scoring = normal(3, L, H + 2 * G, K), Scoring(np.float32(3), OWN["cap"], window, ahead)

    def run(qkv, lengths):
        given = jnp.asarray(qkv.reshape(*qkv.shape[:2], -1)), jnp.zeros((H, 0))
        return np.asarray(packed_weights.attend_to_inputs(*given, jnp.asarray(lengths), scoring, K))

    whole, expected = run(qkv, lengths), np.zeros((3, L, H, K))
    for b, t, h in np.ndindex(3, L, H):
        if t < lengths[b]:
            seen = slice(max(t - window + 1, 0), min(t + ahead + 1, lengths[b]))
            keys, values = (qkv[b, seen, start + h // 2] for start in (H, H + G))
            expected[b, t, h] = attended_capped(qkv[b, t, h].astype(np.float64) / 3, keys, values)
    close(whole, expected.reshape(whole.shape))
    for b, n in enumerate(lengths):
        same(run(qkv[[b], : n + 1], lengths[[b]])[0, :n], whole[b, :n])


@pytest.mark.parametrize("K", [8, 20, 64])
def test_heads_side_by_side(K):
    """Normalised and rotated beside float64; a row's bits are its own."""
    N, H, G = 5, 3, 1
    parts = normal(2, N, H * K), normal(2, N, G * K, seed=1), normal(2, N, G * K, seed=2)
    scales, steps = normal(2, K, seed=3), 1 / 10_000 ** (np.arange(K // 2, dtype=np.float32) / K)
    positions = np.array([0, 3, 900, 7, 41], np.int32)
    norms = [packed_weights.Before("rms", jnp.asarray(scale)) for scale in scales]

    @jax.jit
    def run(parts, positions, valid=None):
        rotation = packed_weights.compute_angles(positions, steps.astype(np.float32))
        return packed_weights.join_heads(*parts, K, norms, rotation, valid)

    found = np.asarray(run(parts, positions))
    for at, (part, scale) in enumerate(zip(parts[:2], scales)):
        heads = part.reshape(2, N, -1, K).astype(np.float64)
        heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * scale
        angles = (positions[:, None].astype(np.float32) * steps.astype(np.float32)).astype(float)
        turned = (heads[..., : K // 2] + 1j * heads[..., K // 2 :]) * np.exp(1j * angles)[:, None]
        expected = np.concatenate([turned.real, turned.imag], axis=-1).reshape(part.shape)
        start = at * H * K
        close(found[..., start : start + part.shape[-1]], expected)
    same(found[..., -G * K :], parts[2])
    for n in range(N):
        alone = run([part[:1, n : n + 1] for part in parts], positions[n : n + 1])
        same(np.asarray(alone)[0, 0], found[0, n])
    plain = packed_weights.join_heads(*parts, K)
    same(np.asarray(plain), np.concatenate(parts, axis=-1))


# Nodes of trees.


class Tree:
    """Holds inputs of attention over nodes: T nodes of B rows on paths of up to P positions.

    Paths are scattered over S slots.
    """

    def __init__(self, B, T, H, S, P, K, biased=True):
        rng = np.random.default_rng([B, T, S, P])
        self.qkv, self.H, self.K = normal(B, T, 3, H, K), H, K
        self.keys, self.values = normal(B, H, S, K, seed=4), normal(B, H, S, K, seed=5)
        self.bias = normal(H, P, seed=6) if biased else None
        self.starts = rng.integers(P, S - T + 1, B).astype(np.int32)
        self.positions = rng.integers(0, P, (B, T)).astype(np.int32)
        self.paths = np.stack([[rng.permutation(P) for _ in range(T)] for _ in range(B)]).astype(
            np.int32
        )
        own = self.starts[:, None] + np.arange(T)
        np.put_along_axis(
            self.paths, self.positions[..., None], own[..., None].astype(np.int32), axis=2
        )
        self.divisor = np.float32(np.sqrt(K))

    def run(self, queries=slice(None), valid=None, keys=None):
        qkv = self.qkv[:, queries].reshape(len(self.qkv), -1, 3 * self.H * self.K)
        nodes = Nodes(
            *(
                jnp.asarray(x)
                for x in (self.starts, self.positions[:, queries], self.paths[:, queries])
            )
        )
        bias = None if self.bias is None else jnp.asarray(self.bias)
        arrays = (jnp.array(x) for x in (qkv, self.keys if keys is None else keys, self.values))
        return tuple(
            map(
                np.asarray,
                packed_weights.attend_to_cache(*arrays, bias, nodes, self.divisor, valid),
            )
        )

    def expected(self):
        B, T, _, H, K = self.qkv.shape
        keys, values, out = self.keys.copy(), self.values.copy(), np.zeros((B, T, H, K))
        for b, h, t in np.ndindex(B, H, T):
            keys[b, h, self.starts[b] + t], values[b, h, self.starts[b] + t] = self.qkv[b, t, 1:, h]
        for b, h, t in np.ndindex(B, H, T):
            last = self.positions[b, t]
            seen = self.paths[b, t, : last + 1]
            bias = 0 if self.bias is None else self.bias[h, self.paths.shape[2] - 1 - last :]
            query = self.qkv[b, t, 0, h].astype(np.float64) / self.divisor
            out[b, t, h] = attended(query, keys[b, h, seen], values[b, h, seen], bias)
        return out.reshape(B, T, H * K), keys, values


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("K", [3, 20, 64])
def test_attention_of_nodes(K, biased):
    case = Tree(3, 5, 2, 37, 11, K, biased)
    (out, *caches), (expected, *written) = case.run(), case.expected()
    close(out, expected)
    for got, wanted in zip(caches, written):
        np.testing.assert_array_equal(got, wanted)


def test_a_chain_of_nodes_has_the_bits_of_the_next_tokens():
    """Their bias is that of the last of P = 40 positions in both."""
    case = Cached(3, 5, 2, 40, 24, [0, 9, 35])
    positions = case.positions[:, None] + np.arange(5, dtype=np.int32)
    paths = np.broadcast_to(np.arange(40, dtype=np.int32), (3, 5, 40))
    nodes = Nodes(*map(jnp.asarray, (case.positions, positions, paths)))
    for got, expected in zip(case.run(where=nodes), case.run()):
        same(got, expected)


def test_a_node_sees_nothing_but_its_path():
    """A node's bits are those of a call without the others, whatever other slots hold."""
    case = Tree(2, 4, 2, 40, 9, 16)
    whole, _, _ = case.run()
    first, _, _ = case.run(slice(0, 1))
    same(first[:, 0], whole[:, 0])
    elsewhere = case.keys.copy()
    for b in range(2):
        unseen = np.setdiff1d(np.arange(40), case.paths[b, 0, : case.positions[b, 0] + 1])
        elsewhere[b, :, unseen] = np.nan
    same(case.run(slice(0, 1), keys=elsewhere)[0][:, 0], first[:, 0])


def test_nodes_that_are_not_valid_write_nothing():
    case = Tree(2, 3, 2, 30, 7, 16)
    valid = np.array([[True, True, False], [False, False, False]])
    out, keys, _ = case.run(valid=jnp.asarray(valid))
    same(out[~valid], np.zeros_like(out[~valid]))
    same(keys[1], case.keys[1])
    same(keys[0, :, case.starts[0] + 2], case.keys[0, :, case.starts[0] + 2])
