"""The CPU's own kernels: keys and values by heads, and rows in the place of others."""

import jax
import jax.numpy as jnp
import kernel_inputs
import numpy as np
import pytest
import tiers
from kernel_inputs import normal, same

from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.cpu.packed_weights import PackedWeight
from specdec_jax.backends.int8 import Int8Weight

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not native.is_available(), reason=native.describe_state()),
]

width = kernel_inputs.width


def weight(kind, D, F):
    if kind == "float32":
        return PackedWeight.pack(jnp.asarray(normal(D, F, seed=1)))
    rounded = Int8Weight.quantize(normal(D, F, seed=1), packed_weights.INPUT_BITS[kind])
    return PackedWeight.pack(rounded)


@tiers.parametrize("kind", ["float32", "int8", "w8a8"], first=3)
@tiers.parametrize("heads, K", [(2, 64), (1, 16), (3, 8), (5, 3), (1, 1)], first=3)
@tiers.parametrize("B, L", [(1, 1), (1, 12), (3, 7), (2, 40), (5, 0)], first=4)
@tiers.parametrize("D", [192, 33], first=2)
def test_keys_and_values_are_those_of_a_product(kind, heads, K, B, L, D):
    """Bit for bit, whatever the features of a head; of positions that do not count they are 0."""
    half = heads * K
    stored, x, bias = weight(kind, D, 2 * half), normal(B, L, D), jnp.asarray(normal(2 * half))
    for valid in (None, np.arange(L) < np.arange(B)[:, None] * 3 + 2):
        for added in (None, bias):
            given = None if valid is None else jnp.asarray(valid)
            whole = stored.product(jnp.asarray(x), jnp.float32, given, bias=added)
            expected = np.asarray(whole).reshape(B, L, 2, heads, K).transpose(2, 0, 3, 1, 4)
            poisoned = x if valid is None else np.where(valid[..., None], x, np.float32(np.nan))
            got = stored.keys_and_values(jnp.asarray(poisoned), K, given, added)
            for one, other in zip(got, expected, strict=True):
                assert one.shape == (B, heads, L, K)
                same(one, other)


@tiers.parametrize("shape", [(), (3,), (2, 5, 7), (10, 32, 64)], first=4)
def test_rows_in_the_place_of_others(shape):
    rng = np.random.default_rng(0)
    old, new = normal(9, *shape), normal(4, *shape, seed=1)
    sources, targets = rng.integers(0, 4, 6), rng.permutation(9)[:6]
    put = jax.jit(packed_weights.put_rows)
    moves = jnp.asarray(sources, jnp.int32), jnp.asarray(targets, jnp.int32)
    for count in (0, 1, 4, 6):
        expected = old.copy()
        expected[targets[:count]] = new[sources[:count]]
        same(put(jnp.asarray(old), jnp.asarray(new), *moves, jnp.int32(count)), expected)


def test_rows_are_put_in_place():
    """The loop's caches are written where they lie: a copy would take longer than the rows."""
    old, new = jnp.asarray(normal(8, 4, 16, 8)), jnp.asarray(normal(2, 4, 16, 8, seed=1))
    put = jax.jit(packed_weights.put_rows, donate_argnums=0)
    place, ones = old.unsafe_buffer_pointer(), jnp.ones(1, jnp.int32)
    assert put(old, new, ones, ones, jnp.int32(1)).unsafe_buffer_pointer() == place
