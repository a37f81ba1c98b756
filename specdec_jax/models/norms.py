"""The two normalisations: T5's and GPT's.

With `packed` the CPU's own kernels compute them (`packed_weights.py`), `valid` as for
`layers.apply_weight`: XLA adds up a row in one order in small calls and in another from some
thousand numbers on, and what comes after the last norm would see the width of the call.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specdec_jax.backends.cpu.packed_weights import Before, normalize


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32, without mean or bias; ε = 1e-6."""

    dtype: Any = jnp.float32
    packed: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "*N D"], valid: Bool[Array, "*N"] | None = None
    ) -> Float[Array, "*N D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if self.packed:
            return normalize(x, self.before(), valid)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x.astype(self.dtype) * scale.astype(self.dtype)

    def before(self) -> Before:
        """Returns this norm as what comes before a product with a packed weight."""
        return Before("rms", self.get_variable("params", "scale"))


class LayerNorm(nn.Module):
    """Normalisation by mean and variance in float32, with scale and bias; ε = 1e-5, as in GPT-2."""

    dtype: Any = jnp.float32
    packed: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "*N D"], valid: Bool[Array, "*N"] | None = None
    ) -> Float[Array, "*N D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        if self.packed:
            return normalize(x, self.before(), valid)
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)
        return x.astype(self.dtype) * scale.astype(self.dtype) + bias.astype(self.dtype)

    def before(self) -> Before:
        """Returns this norm as what comes before a product with a packed weight."""
        return Before(
            "layer", self.get_variable("params", "scale"), self.get_variable("params", "bias")
        )


NORMS = {"rms": RMSNorm, "layer": LayerNorm}
