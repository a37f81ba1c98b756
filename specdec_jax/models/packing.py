"""The decode loop's own layout of the weights: fewer and better shaped products, the same numbers.

Checkpoints and `LanguageModel.params` keep T5X's names and two-dimensional kernels. The jitted loop takes a tree in
which the query, key and value kernels of a self-attention are one, the gated feed-forward's two input kernels are one,
and, for float32 on a CPU, the decoder's kernels are stored as panels `[F/64, D, 64]`: XLA's product of a few rows with
a `[D, F]` kernel repacks the kernel in every call (a call over 5 positions then costs about twice one over 1), its
batched product over panels does not (about 1.2 times).
"""

import jax
import jax.numpy as jnp
import numpy as np

PANEL = 64

# Fused kernel: (its name, the names it is made of, along the output axis).
_FUSED = {"self_attention": ("qkv", ("query", "key", "value")), "attention": ("qkv", ("query", "key", "value"))}
_GATED = ("wi_fused", ("wi_0", "wi_1"))


def wants_panels(backend: str, dtype) -> bool:
    """Whether the decoder's kernels are stored as panels on this backend."""
    return backend == "cpu" and np.dtype(dtype) == np.float32


def pack(params: dict, panels: bool) -> dict:
    """The loop's tree, made from `params` (T5X's tree), whose nested dicts are emptied on the way.

    Leaf by leaf, so that the two never exist side by side; jitted, so that a kernel is copied once.
    """
    return {name: _pack(name, params.pop(name), panels and name == "decoder") for name in list(params)}


def _pack(name: str, node: dict, panels: bool) -> dict:
    fused, parts = _FUSED.get(name, _GATED)
    if all(part in node for part in parts):
        kernels = [node.pop(part)["kernel"] for part in parts]
        node[fused] = {"kernel": _join(kernels)}
    for child in list(node):
        value = node.pop(child)
        if child == "kernel":
            value = _to_panels(value) if panels and value.shape[1] % PANEL == 0 else value
        elif isinstance(value, dict):
            # Cross-attention keys and values are products over the encoder's whole output, not over a few rows.
            value = _pack(
                child, value, panels and not (name == "encoder_decoder_attention" and child in ("key", "value"))
            )
        node[child] = value if isinstance(value, dict) else jnp.asarray(value)  # NumPy's would be copied every call
    return node


def unpack(packed: dict) -> dict:
    """T5X's tree again (new arrays where kernels were packed)."""
    return {name: _unpack(name, node) for name, node in packed.items()}


def _unpack(name: str, node):
    if not isinstance(node, dict):
        return node
    result = {}
    fused, parts = _FUSED.get(name, _GATED)
    for child, value in node.items():
        if child == fused:
            kernel = _from_panels(value["kernel"])
            for part, piece in zip(parts, jnp.split(kernel, len(parts), axis=1)):
                result[part] = {"kernel": piece}
        else:
            result[child] = _from_panels(value) if child == "kernel" else _unpack(child, value)
    return result


@jax.jit
def _to_panels(kernel):
    inputs, outputs = kernel.shape
    return kernel.reshape(inputs, outputs // PANEL, PANEL).transpose(1, 0, 2)


@jax.jit
def _from_panels(kernel):
    if kernel.ndim == 2:
        return kernel
    return kernel.transpose(1, 0, 2).reshape(kernel.shape[1], -1)


@jax.jit
def _join(kernels):
    return jnp.concatenate(kernels, axis=1)
