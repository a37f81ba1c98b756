"""Fills parameters with dummy weights, for timing.

There are no random bits, and one small program for every shape, where an initialisation of T5-XXL
compiles for minutes and takes longer on a CPU.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import parameter_shapes, unflatten


def make_dummy_params(
    config: ModelConfig,
    rules: ShardingRules | None = None,
    stored: Callable[[jax.Array], Any] = lambda weight: weight,
    report: Callable[[int], None] = lambda count: None,
) -> dict:
    """Makes the parameters of a network on the devices, one by one, in its dtype.

    Norms have scale 1. All other numbers are uniform, with the variance of T5's initialisation for
    embeddings (1) and 1 / D for weights `[D, F]`, so that activations stay of ordinary size.

    Args:
      config: the network's shape.
      rules: how the parameters lie on a mesh; None: on one device.
      stored: makes of each weight matrix what is kept of it.
      report: called with the size of each parameter.
    """
    found = {}
    for number, (name, shape) in enumerate(parameter_shapes(config).items()):
        sharding = None if rules is None else rules.parameter_sharding(name, shape)
        if name.endswith("scale"):
            spread, least = 0.0, 1.0
        else:
            spread = math.sqrt(12.0 / (1 if name.endswith("embedding") else shape[0]))
            least = -spread / 2
        array = _uniform(
            np.uint32(number), np.float32(least), np.float32(spread), shape, config.dtype, sharding
        )
        found[name] = stored(array) if name.endswith("/kernel") else array
        report(math.prod(shape))
    return unflatten(found)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _uniform(
    seed: np.uint32,
    least: np.float32,
    spread: np.float32,
    shape: tuple[int, ...],
    dtype: str,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """Returns numbers from `least` to `least` + `spread`, each from a hash of its place."""
    place = jnp.full(shape, seed * np.uint32(7919))
    for axis, size in enumerate(shape):
        place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = place * np.uint32(2654435761)
    bits = (bits ^ (bits >> 15)) * np.uint32(2246822519)
    bits = (bits ^ (bits >> 13)) >> 8
    values = (least + spread * (bits.astype(jnp.float32) * np.float32(2.0**-24))).astype(dtype)
    return values if sharding is None else jax.lax.with_sharding_constraint(values, sharding)
