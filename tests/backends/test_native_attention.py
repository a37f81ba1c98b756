"""The CPU's own attention against float64, and of what each bit depends."""

import functools

import jax.numpy as jnp
import kernel_inputs
import numpy as np
import pytest
import tiers
from kernel_inputs import UNIT, normal, same

from specdec_jax.backends.cpu import native, packed_weights
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
        self.bias = normal(S, H, S, seed=6) if biased else None
        self.positions, self.divisor = np.array(positions, np.int32), np.float32(np.sqrt(K))

    def run(self, rows=slice(None), queries=slice(None), positions=None, valid=None):
        qkv = self.qkv[rows, queries].reshape(-1, len(self.qkv[0, queries]), 3 * self.H * self.K)
        positions = self.positions[rows] if positions is None else positions
        bias = None if self.bias is None else jnp.asarray(self.bias)
        arrays = (jnp.array(x) for x in (qkv, self.keys[rows], self.values[rows]))
        return tuple(
            map(
                np.asarray,
                packed_weights.attend_to_cache(
                    *arrays, bias, jnp.asarray(positions), self.divisor, valid
                ),
            )
        )

    def expected(self):
        B, T, _, H, K = self.qkv.shape
        keys, values, out = self.keys.copy(), self.values.copy(), np.zeros((B, T, H, K))
        for b, h, t in np.ndindex(B, H, T):
            at = np.clip(self.positions[b], 0, keys.shape[2] - T) + t
            query, keys[b, h, at], values[b, h, at] = self.qkv[b, t, :, h]
            bias = 0 if self.bias is None else self.bias[at, h, : at + 1]
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
        np.zeros((2, len(apart), 2), np.float32),
        np.zeros((1, len(apart), 2, 1), np.float32),
    )
    bias[1, :, 0], cache[..., 0, 0] = apart, 1
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


def test_bits_of_self_attention():
    """A query's bits do not depend on the call, the batch, the cache and slots past it."""
    case = Cached(3, 5, 2, 40, 24, [0, 9, 35])
    whole, keys, values = case.run()
    for b in range(3):
        one = Cached(3, 5, 2, 40, 24, [0, 9, 35])
        for t in range(5):
            out, one.keys[[b]], one.values[[b]] = one.run([b], [t], one.positions[[b]] + t)
            same(out[0, 0], whole[b, t])
    same(one.keys[2], keys[2])
    larger = Cached(3, 5, 2, 64, 24, [0, 9, 35])
    larger.keys[:, :, :40], larger.values[:, :, :40], larger.bias[:40, :, :40] = (
        case.keys,
        case.values,
        case.bias,
    )
    for b, position in enumerate(case.positions):
        larger.keys[b, :, position + 5 :] = larger.values[b, :, position + 5 :] = np.nan
    same(larger.run()[0], whole)


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


@pytest.mark.parametrize("K", [3, 24, 72])
def test_cross_attention(K):
    B, T, H, L = 4, 3, 2, 37
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
        same(
            run(query[[b], 1:2], keys[[b], :, : n + 2], values[[b], :, : n + 2], lengths[[b]])[
                0, 0
            ],
            whole[b, 1],
        )
        keys[b, :, n:] = values[b, :, n:] = np.nan
    same(run(query, keys, values, lengths), whole)
    valid = np.arange(T) < np.array([[1], [3], [0], [2]])
    same(run(query, keys, values, lengths, valid), np.where(valid[..., None], whole, 0))
    assert np.isnan(run(query, keys, values, lengths + [1, 0, 0, 0])[0]).all()


@pytest.mark.parametrize(
    "K, L, scale", [(8, 21, 1.0), (20, 21, 1.0), (64, 21, 1.0), (20, 450, 1.0), (20, 40, 30.0)]
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
        np.testing.assert_allclose(whole, expected.reshape(whole.shape), rtol=0, atol=1e-4)
    for b, n in enumerate(lengths):
        size = min(n + 1, L)
        alone = run(qkv[[b], :size], bias[:, L - size : L + size - 1], lengths[[b]])
        same(alone[0, :n], whole[b, :n])
        qkv[b, n:] = np.nan
    same(run(qkv, bias, lengths), whole)


def test_lengths_and_positions_out_of_range_are_cut():
    qkv, keys = jnp.asarray(normal(2, 6, 48)), jnp.asarray(normal(2, 2, 6, 8))
    bias, query = jnp.asarray(normal(6, 2, 6)), qkv[..., :16]
    for far, most in (
        (np.array([99, -5]), np.array([6, 0])),
        (np.array([-(2**31), 2**31 - 1]), np.array([0, 6])),
    ):
        far, most = jnp.asarray(far, jnp.int32), jnp.asarray(most, jnp.int32)
        near = bias.reshape(2, -1)[:, :11]
        same(*(np.asarray(packed_weights.attend_to_inputs(qkv, near, n)) for n in (far, most)))
        same(
            *(
                np.asarray(packed_weights.attend_to_encoded(query, keys, keys, n))
                for n in (far, most)
            )
        )
        same(
            *(
                np.asarray(packed_weights.attend_to_cache(qkv[:, :2], keys, keys, bias, n, 1)[0])
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
