"""Digests of all weights of a model, computed with one array at a time on the host."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.sharding import ShardingRules, constrain_sharding
from specdec_jax.models import weight_layouts

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
    if shared := rules is None and jax.default_backend() == "cpu":
        # Nothing is copied, and NumPy unpacks the weights: no program is made for any shape.
        params = jax.tree.map(np.asarray, params)
    found = {}
    for path, array in weight_layouts.parameters(params):
        host = np.asarray(array if shared else _replicate(array, rules))
        one = hashlib.sha256(f"{host.shape} {dtype or host.dtype}".encode())
        flat = host.reshape(-1)
        for start in range(0, flat.size, _BLOCK):  # so that no second array of its size is made
            block = flat[start : start + _BLOCK].astype(dtype or host.dtype, copy=False)
            one.update(block.view(np.uint8).data)
        found["/".join(path)] = one.hexdigest()
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


@functools.partial(jax.jit, static_argnames="rules")
def _replicate(array: jax.Array, rules: ShardingRules | None) -> jax.Array:
    """Returns a copy that every device has whole, of which other processes may hold parts.

    The copy is what is read: JAX keeps what it has read of an array as long as the array lives,
    which would become a second copy of all weights.
    """
    return constrain_sharding(jnp.copy(array), rules)
