"""What tells models apart: digests of all their weights, of which one array at a time is on the host."""

import functools
import hashlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import layouts
from specdec_jax.models.sharding import ShardingRules, pinned

# Of a digest that does not depend on the dtype in which a model computes; digests of corners alone have no prefix.
ROUNDED = "bfloat16:"
_BLOCK = 1 << 20  # numbers that are rounded and hashed at a time


def rounded(params: dict, rules: ShardingRules | None) -> str:
    """The digest of the weights rounded to bfloat16: the same for a checkpoint whatever dtype it is loaded in.

    Args:
      params: in the loop's layout, which does not matter.
      rules: how they lie on a mesh, which does not matter either; None: on one device.
    """
    return ROUNDED + _digest(params, rules, np.dtype(jnp.bfloat16))


def exact(params: dict, rules: ShardingRules | None) -> str:
    """The digest of the very numbers that a model computes with; arguments as for `rounded`."""
    return _digest(params, rules, None)


def _digest(params: dict, rules: ShardingRules | None, dtype: np.dtype | None) -> str:
    found = {}
    for path, array in layouts.parameters(params):
        host = _on_host(array, rules)
        one = hashlib.sha256(f"{host.shape} {dtype or host.dtype}".encode())
        for block in _blocks(host):
            one.update(block.astype(dtype or host.dtype, copy=False).view(np.uint8).data)
        found["/".join(path)] = one.hexdigest()
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers of `array` in order, so many at a time that nothing as large as it is made."""
    flat = array.reshape(-1)
    return (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))


def _on_host(array: jax.Array, rules: ShardingRules | None) -> np.ndarray:
    """`array`, of which other processes may hold parts.

    JAX keeps what it copied to the host as long as the array lives: in the end a second copy of all weights.
    """
    shared = rules is None and jax.default_backend() == "cpu"
    return np.asarray(array if shared else _copied(array, rules))


@functools.partial(jax.jit, static_argnames="rules")
def _copied(array: jax.Array, rules: ShardingRules | None) -> jax.Array:
    """A copy that every device has whole."""
    return pinned(jnp.copy(array), rules)


def of_corners(params: dict, rules: ShardingRules | None, last_layer: str) -> str:
    """What folders hold that were written before all weights counted: a digest of the corners of the arrays of the last
    decoder layer and the head. Two models may share it; arguments as for `rounded`."""
    names = (last_layer, "decoder_norm", "logits_dense")
    decoder = {name: params["decoder"][name] for name in names if name in params["decoder"]}
    corners = _corners({"token_embedder": params["token_embedder"], "decoder": decoder}, rules)
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(corners):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} ".encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


@functools.partial(jax.jit, static_argnames="rules")
def _corners(packed, rules):
    """The first 8 of every axis of every array, in bfloat16."""
    corner = lambda leaf: leaf[tuple(slice(8) for _ in leaf.shape)].astype(jnp.bfloat16)
    return pinned(jax.tree.map(corner, layouts.unpack(packed)), rules)
