"""Tries the kernels of a draft step, `fused_step.py` and `fused_layers.py`, on a small T5."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.backend import Backend, GPUBackend, TPUBackend
from specdec_jax.backends.gpu import fused_layers
from specdec_jax.backends.kernel_selftest import KernelSelfTest, run_self_test
from specdec_jax.backends.tpu import fused_step
from specdec_jax.models import weight_layouts
from specdec_jax.models.t5 import T5Config

CONFIG = T5Config(64, 128, 2, 64, 1, 2, 128, dtype="bfloat16")
_TOKENS = np.array([[3, 4], [5, 6]], np.int32)
_TPU, _GPU = TPUBackend(joins_weights=True), GPUBackend(joins_weights=True)


def find_fault(backend: Backend = _TPU, interpret: Any = False) -> str | None:
    """Tries the kernels of a backend over two positions of two rows, at other slots in each.

    Returns what is wrong with them, None if nothing is. `interpret` as for
    `fused_step.decode_states`.
    """
    return run_self_test(lambda: _matches_xla(backend, interpret))


def _matches_xla(backend: Backend, interpret: Any) -> bool:
    module = CONFIG.module(backend)
    kernels = fused_layers if isinstance(backend, GPUBackend) else fused_step

    @jax.jit
    def both():
        plain = CONFIG.module()
        params = plain.init(jax.random.key(0), *plain.dummy_inputs())["params"]
        params = jax.tree.map(lambda leaf: leaf.astype(CONFIG.dtype), params)
        params = weight_layouts.pack(params, use_packed=False, fused=True)

        def apply(*arguments, **how):
            return module.apply({"params": params}, *arguments, **how)

        inputs = jnp.asarray(_TOKENS)
        cache = apply(inputs, inputs > 0, 32, method="prefill")
        _, cache = apply(inputs, jnp.array([0, 15]), cache, None, None, method="decode_states")
        positions = jnp.array([2, 17])
        expected = apply(inputs, positions, cache, None, None, method="decode_states")
        embedded = apply(inputs, method="embed")
        return kernels.decode_states(
            module, params, embedded, positions, cache, interpret=interpret
        ), expected

    def alike(a, b):
        return bool(np.allclose(np.float32(a), np.float32(b), rtol=0.05, atol=0.1))

    return jax.tree.all(jax.tree.map(alike, *both()))


SELF_TEST = KernelSelfTest(
    "tpu", "the kernel of a draft step on TPUs is not used, XLA's layers are", lambda: find_fault()
)
GPU_SELF_TEST = KernelSelfTest(
    "gpu",
    "the kernels of a draft step on GPUs are not used, XLA's layers are",
    lambda: find_fault(_GPU),
)
