"""Names and shapes of a network's parameters, and conversions between nested and flat dicts of
them."""

import functools
import math

from specdec_jax.models.family import ModelConfig


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of the network by its name, which for a T5 is T5X's.

    Every family lists its shapes, since it would take seconds to trace the initialisation of 24 +
    24 layers; a test compares the two.
    """
    return config.parameter_shapes()


def parameter_count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flatten(tree: dict, prefix: str = "") -> dict:
    """Returns a nested dict as one dict with `/`-joined names, which begin with `prefix`."""
    flat = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}/")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def unflatten(flat: dict) -> dict:
    """Returns the nested dict of which `flatten` makes `flat`."""
    tree: dict = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree
