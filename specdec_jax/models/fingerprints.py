"""Digests that tell models apart by all of their weights, computed with one array at a time on the
host."""

import functools
import hashlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.sharding import ShardingRules, constrain_sharding
from specdec_jax.models import weight_layouts

# The prefix of digests by `rounded`; those by `of_corners` have none.
ROUNDED = "bfloat16:"
_BLOCK = 1 << 20  # numbers that are rounded and hashed at a time


def rounded(params: dict, rules: ShardingRules | None) -> str:
    """Returns the digest of the weights rounded to bfloat16, the same in whatever dtype a
    checkpoint is loaded.

    It depends neither on the layout of the weights nor on the mesh.

    Args:
      params: weights in the loop's layout.
      rules: how they lie on a mesh; None: on one device.
    """
    return ROUNDED + _digest(params, rules, np.dtype(jnp.bfloat16))


def exact(params: dict, rules: ShardingRules | None) -> str:
    """Returns the digest of the exact weights that a model computes with.

    The arguments are those of `rounded`.
    """
    return _digest(params, rules, None)


def _digest(params: dict, rules: ShardingRules | None, dtype: np.dtype | None) -> str:
    found = {}
    for path, array in weight_layouts.parameters(params):
        host = _on_host(array, rules)
        one = hashlib.sha256(f"{host.shape} {dtype or host.dtype}".encode())
        for block in _blocks(host):
            one.update(block.astype(dtype or host.dtype, copy=False).view(np.uint8).data)
        found["/".join(path)] = one.hexdigest()
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the numbers of `array` in order, in blocks, so that no second array of its size is
    made."""
    flat = array.reshape(-1)
    return (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))


def _on_host(array: jax.Array, rules: ShardingRules | None) -> np.ndarray:
    """Returns `array`, of which other processes may hold parts, on the host.

    It is a copy on the device that is read: JAX keeps what it has read of an array as long as the
    array lives, which would become a second copy of all weights. On a CPU the host shares the
    device's memory, and nothing is copied.
    """
    shared = rules is None and jax.default_backend() == "cpu"
    return np.asarray(array if shared else _copied(array, rules))


@functools.partial(jax.jit, static_argnames="rules")
def _copied(array: jax.Array, rules: ShardingRules | None) -> jax.Array:
    """Returns a copy that every device has whole."""
    return constrain_sharding(jnp.copy(array), rules)


def of_corners(params: dict, rules: ShardingRules | None, last_layer: str) -> str:
    """Returns the digest that earlier versions stored, before all weights counted.

    Two models may share it.

    It is made of the corners of the arrays of the embedding, the last decoder layer, the last norm
    and the head.

    Args:
      params, rules: as for `rounded`.
      last_layer: name of the last decoder layer.
    """
    names = (last_layer, "decoder_norm", "logits_dense")
    decoder = {name: params["decoder"][name] for name in names if name in params["decoder"]}
    corners = _corners({"token_embedder": params["token_embedder"], "decoder": decoder}, rules)
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(corners):
        digest.update(
            f"{jax.tree_util.keystr(path)} {leaf.shape} ".encode() + np.asarray(leaf).tobytes()
        )
    return digest.hexdigest()


@functools.partial(jax.jit, static_argnames="rules")
def _corners(packed, rules):
    """Returns the first 8 places along every axis of every array, in bfloat16."""

    def corner(leaf):
        return leaf[tuple(slice(8) for _ in leaf.shape)].astype(jnp.bfloat16)

    return constrain_sharding(jax.tree.map(corner, weight_layouts.unpack(packed)), rules)
