"""Makes deeper networks of trained ones, with copies of layers that at first add little."""

from typing import Any

import jax
import jax.numpy as jnp

# The nodes whose product a layer adds to its input.
_OUTPUTS = ("out", "wo")
_SHARE = 0.1  # part of a layer's output that its copies add


def deepen(params: dict, stack: str, layers: int) -> dict:
    """Returns nested `params` with `layers` layers in the stack "encoder" or "decoder".

    Two layers become five as 0 0' 0'' 1 1'. Every layer is followed by copies of itself that add a
    tenth of what it adds, so that the network begins close to what it was. (Copies that add
    nothing, as in Wu et al. 2024, "LLaMA Pro", arXiv 2401.02415, would hardly be moved by steps
    relative to an array's size.)

    Raises:
      ValueError: the stack has more layers, or none.
    """
    count = sum(name.startswith("layers_") for name in params[stack])
    if not 0 < count <= layers:
        raise ValueError(f"{stack}: got {count} layers, expected from 1 to {layers}")
    sources = [layer * count // layers for layer in range(layers)]
    new = dict(params[stack])
    for layer, source in enumerate(sources):
        node = params[stack][f"layers_{source}"]
        is_copy = layer > 0 and sources[layer - 1] == source
        new[f"layers_{layer}"] = (
            jax.tree_util.tree_map_with_path(_silence, node) if is_copy else node
        )
    return {**params, stack: new}


def _silence(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    """Returns a parameter of a copy; always a new array, since training writes over its arrays."""
    return leaf * _SHARE if any(key.key in _OUTPUTS for key in path) else jnp.copy(leaf)
