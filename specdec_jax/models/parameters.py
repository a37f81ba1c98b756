"""Names and shapes of a network's parameters, and nested dicts as flat ones."""

import functools
import math

from specdec_jax.models.family import ModelConfig


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of the network, by its name (a T5's is T5X's).

    Every family writes them out, since tracing the initialisation of 24 + 24 layers takes seconds;
    a test compares the two.
    """
    return config.parameter_shapes()


def parameter_count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flatten(tree: dict, prefix: str = "") -> dict:
    """A nested dict as one dict of `/`-joined names."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def unflatten(flat: dict) -> dict:
    """The inverse of `flatten`."""
    tree: dict = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree
