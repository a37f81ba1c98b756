"""Rotary positions: queries and keys are rotated by angles that grow with their position.

Su et al., 2021 (https://arxiv.org/abs/2104.09864). The two features of a pair are K/2 apart.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specdec_jax.backends.axes import Rotation
from specdec_jax.backends.cpu import packed_weights


class Rotary(NamedTuple):
    """The angles of rotary positions.

    Attributes:
      base: θ; pair i of a head's features rotates by position · θ^(−2i/K) / `factor`.
      factor: by how much angles grow more slowly, for texts longer than those of training.
    """

    base: float = 10_000.0
    factor: float = 1.0

    def rotation(
        self, positions: Int[Array, "*N"], features: int, dtype: DTypeLike, packed: bool = False
    ) -> Rotation:
        """Returns the cosines and sines for heads of `features` features at these positions.

        `packed`: whether a CPU's own kernel computes them, of which each has the same bits in
        every call.
        """
        exponents = np.arange(0, features, 2, dtype=np.float32) / np.float32(features)
        steps = 1 / np.power(np.float32(self.base), exponents) / np.float32(self.factor)
        if packed:
            return packed_weights.compute_angles(positions, steps)
        angles = positions[..., None].astype(jnp.float32) * steps
        return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: Float[Array, "*N H K"], rotation: Rotation) -> Float[Array, "*N H K"]:
    """Returns the features of heads rotated by a `Rotation` of their positions."""
    cosines, sines = (part[..., None, :] for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )
