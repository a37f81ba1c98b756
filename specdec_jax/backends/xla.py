"""What XLA's layers and the kernels have in common."""

import jax

MASKED = -1e10  # T5X's additive mask; finite, so that a fully masked row gives no NaN

ACTIVATION_FUNCTIONS = {
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}
ACTIVATIONS = tuple(ACTIVATION_FUNCTIONS)
