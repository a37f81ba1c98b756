"""Digests of all weights of a model, computed with two arrays at a time on the host."""

import concurrent.futures
import functools
import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.backends.sharding import ShardingRules, constrain_sharding
from specdec_jax.models import weight_layouts

_TOGETHER = 2  # weights that are digested at a time
_BLOCK = 1 << 20  # numbers that are rounded and hashed at a time


def digest_rounded(params: dict, rules: ShardingRules | None) -> str:
    """Returns the digest of the weights rounded to bfloat16, the same for every dtype of a load.

    It depends neither on the layout of the weights nor on the mesh.

    Args:
      params: weights in the loop's layout.
      rules: how they lie on a mesh; None: on one device.
    """
    return "bfloat16:" + digest_exact(params, rules, np.dtype(jnp.bfloat16))


def digest_exact(params: dict, rules: ShardingRules | None, dtype: np.dtype | None = None) -> str:
    """Returns the digest of the weights in `dtype`; None: exactly as a model computes with them."""
    if rules is None and jax.default_backend() == "cpu":
        # Nothing is copied, and NumPy unpacks the weights: no program is made for any shape.
        weights = weight_layouts.stored_parameters(jax.tree.map(np.asarray, params))
    else:
        arrays = weight_layouts.parameters(params)
        weights = ((path, np.asarray(_replicate(array, rules))) for path, array in arrays)
    found: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(_TOGETHER) as pool:
        while some := dict(itertools.islice(weights, _TOGETHER)):
            digests = pool.map(functools.partial(_digest, dtype=dtype), some.values())
            found |= zip(map("/".join, some), digests)
            del some, digests  # before the next two are made
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _digest(weight: np.ndarray | Int8Weight, dtype: np.dtype | None) -> str:
    array = np.asarray(weight_layouts.to_matrix(weight))
    one = hashlib.sha256(f"{array.shape} {dtype or array.dtype}".encode())
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):  # so that no second array of its size is made
        block = flat[start : start + _BLOCK].astype(dtype or array.dtype, copy=False)
        one.update(block.view(np.uint8).data)
    return one.hexdigest()


@functools.partial(jax.jit, static_argnames="rules")
def _replicate(array: jax.Array, rules: ShardingRules | None) -> jax.Array:
    """Returns a copy that every device has whole, of which other processes may hold parts.

    The copy is what is read: JAX keeps what it has read of an array as long as the array lives,
    which would become a second copy of all weights.
    """
    return constrain_sharding(jnp.copy(array), rules)
