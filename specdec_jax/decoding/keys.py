"""Derives the random keys of rows from the keys of inputs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import arguments
from specdec_jax.speculative.randomness import make_key, to_threefry


@jax.jit
def fold_keys(key: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the keys of the inputs at `places [N]`, folded from one threefry key."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, places)


@jax.jit
def take_keys(keys: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the keys of `rows`."""
    return keys[rows]


@jax.jit
def _sample_keys(keys: jax.Array, samples: jax.Array) -> jax.Array:
    # A number that no committed length reaches keeps these keys apart from all other uses of a
    # request's key.
    def fold(key: jax.Array, sample: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, 2**31 - 1), sample)

    return jax.vmap(jax.vmap(fold, (None, 0)), (0, None))(keys, samples)


def row_keys(key: jax.Array | None, batch: int, samples: int) -> jax.Array:
    """Returns a key for every row, from a key that `check_keys` lets pass.

    An input's first sample has the input's own key, the others have keys folded from it.
    """
    keys = _default_keys(batch) if key is None else to_threefry(key)
    if not keys.ndim:
        keys = fold_keys(keys, np.arange(batch))
    if samples == 1:
        return keys
    others = _sample_keys(keys, np.arange(1, samples))
    return jnp.concatenate([keys[:, None], others], axis=1).reshape(-1)


@functools.lru_cache(maxsize=16)
def _default_keys(batch: int) -> jax.Array:
    return fold_keys(make_key(0), np.arange(batch))


def check_keys(key: Any, batch: int) -> None:
    """Raises ValueError unless `key` is None, one key, or `batch` keys; compiles nothing."""
    if key is None:
        return
    if not isinstance(key, jax.Array):
        expected = "jax.random.key(seed), or one such key per input"
        raise ValueError(f"key: got {arguments.quote(key)}, expected {expected}")
    # Of typed keys it is known without half a millisecond of tracing.
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    shape = key.shape if typed else jax.eval_shape(to_threefry, key).shape
    if shape not in ((), (batch,)):
        raise ValueError(f"key: got {shape[0]} keys, expected one or {batch} (one per input)")
