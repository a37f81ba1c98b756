"""Names and shapes of a network's parameters; nested dicts of them as flat ones and back."""

import functools
import math

from flax import traverse_util

from specdec_jax.models.family import ModelConfig

# A nested dict as one of `/`-joined names, and back.
flatten = functools.partial(traverse_util.flatten_dict, sep="/")
unflatten = functools.partial(traverse_util.unflatten_dict, sep="/")


@functools.lru_cache(maxsize=32)
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of the network by its name, which for a T5 is T5X's."""
    return config.parameter_shapes()


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of the network's parameters."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())
