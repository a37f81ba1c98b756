"""Makes deeper networks of trained ones, to train further, with copies of layers that at first add
next to nothing."""

from typing import Any

import jax
import jax.numpy as jnp

# The nodes whose product a layer adds to its input.
_OUTPUTS = ("out", "wo")
_SHARE = 0.1  # part of a layer's output that its copies add


def deepen(params: dict, stack: str, layers: int) -> dict:
    """Returns nested `params` with `layers` layers in the stack "encoder" or "decoder", e.g. 2
    layers as 5: 0 0' 0'' 1 1'.

    Every layer is followed by copies of itself that add a tenth of what it adds, so that the
    network begins close to what it was. (Copies that add nothing, as in Wu et al. 2024, "LLaMA
    Pro", arXiv 2401.02415, would hardly be moved by steps relative to an array's size.)

    Raises:
      ValueError: the stack has more layers, or none.
    """
    found = {name: node for name, node in params[stack].items() if name.startswith("layers_")}
    if not 0 < len(found) <= layers:
        raise ValueError(f"{stack}: got {len(found)} layers, expected from 1 to {layers}")
    sources = [layer * len(found) // layers for layer in range(layers)]
    new = {name: node for name, node in params[stack].items() if name not in found}
    for layer, source in enumerate(sources):
        node = found[f"layers_{source}"]
        is_copy = layer > 0 and sources[layer - 1] == source
        new[f"layers_{layer}"] = jax.tree_util.tree_map_with_path(_quiet, node) if is_copy else node
    return {**params, stack: new}


def _quiet(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    """Returns a parameter of a copy; always a new array, since training writes over its arrays."""
    return leaf * _SHARE if any(key.key in _OUTPUTS for key in path) else jnp.copy(leaf)
