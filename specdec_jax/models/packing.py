"""The decode loop's own layout of the weights: fewer and better shaped products, the same numbers.

Checkpoints and `LanguageModel.params` keep T5X's names and two-dimensional kernels. The jitted loop takes a tree in
which the query, key and value kernels of a self-attention are one, the gated feed-forward's two input kernels are one,
and, for float32 on a CPU, the decoder's kernels are stored as panels `[F/P, D, P]`: XLA's product of a few rows with a
`[D, F]` kernel strides through it (a call over 5 positions then costs two or three times one over 1), its batched
product over panels as wide as its own inner block reads them from end to end.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models.int8 import Int8Kernel

# Columns of a panel: what XLA's float32 kernels hold in registers for several rows, with and without AVX-512. A single
# row is as fast or faster with the wide panels everywhere.
_WIDE, _NARROW = 64, 16
# XLA runs a batched product on one core, and independent products on several only where more than 8 are ready at once.
_PIECES, _LEAST_TO_SPLIT = 16, 2**19

# Fused kernel: (its name, the names it is made of, along the output axis).
_FUSED = {"self_attention": ("qkv", ("query", "key", "value")), "attention": ("qkv", ("query", "key", "value"))}
_GATED = ("wi_fused", ("wi_0", "wi_1"))


@functools.cache
def has_avx512() -> bool:
    """Whether this processor has AVX-512, as NumPy sees it (whose names for it depend on its version)."""
    extensions = np.show_config(mode="dicts")["SIMD Extensions"]
    names = [*extensions.get("baseline", ()), *extensions.get("found", ())]
    return any(name == "X86_V4" or name.startswith("AVX512") for name in names)


def panel_width(backend: str, dtype, rows: int = 1) -> int | None:
    """P of the decoder's kernels for products of `rows` rows; None where kernels stay `[D, F]`."""
    if backend != "cpu" or np.dtype(dtype) != np.float32:
        return None
    return _WIDE if rows == 1 or has_avx512() else _NARROW


def pack(params: dict, panel: int | None) -> dict:
    """The loop's tree with panels of width `panel`, made from `params` (T5X's tree), whose nested dicts are emptied on the way.

    Leaf by leaf, so that the two never exist side by side; jitted, so that a kernel is copied once.
    """
    return {name: _pack(name, params.pop(name), panel if name == "decoder" else None) for name in list(params)}


def _pack(name: str, node: dict, panel: int | None) -> dict:
    fused, parts = _FUSED.get(name, _GATED)
    if all(part in node for part in parts):
        kernels = [node.pop(part)["kernel"] for part in parts]
        node[fused] = {"kernel": _join(kernels)}
    for child in list(node):
        value = node.pop(child)
        if child == "kernel":
            value = _to_panels(value, panel) if panel and value.shape[1] % panel == 0 else value
        elif isinstance(value, dict):
            # Cross-attention keys and values are products over the encoder's whole output, not over a few rows.
            once = name == "encoder_decoder_attention" and child in ("key", "value")
            value = _pack(child, value, None if once else panel)
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


def narrowed(packed: dict, panel: int) -> dict:
    """`packed` with panels of width `panel`, a divisor of theirs, large kernels in a tuple of pieces of about as many
    panels each; all other arrays are shared."""

    def narrow(leaf):
        if leaf.ndim != 3:
            return leaf
        panels = leaf.shape[0] * leaf.shape[2] // panel
        pieces = _split_panels(leaf, panel, min(_PIECES, panels) if leaf.size >= _LEAST_TO_SPLIT else 1)
        return pieces if len(pieces) > 1 else pieces[0]

    return jax.tree.map(narrow, packed)


def padded(ids: np.ndarray) -> np.ndarray:
    """`ids [F]` with copies of the last up to a multiple of the widest panel."""
    return np.pad(ids, (0, -len(ids) % _WIDE), mode="edge")


def with_head(packed: dict, ids: np.ndarray, tied: bool, panel: int | None) -> dict:
    """`packed` with a head of its own for `ids [F]`; all other arrays are shared.

    Args:
      tied: the head of `packed` is its embedding.
      panel: as in `pack`.
    """
    if tied:
        kernel = packed["token_embedder"]["embedding"][ids].T
    else:
        kernel = _from_panels(packed["decoder"]["logits_dense"]["kernel"])[:, ids]
    if panel and len(ids) % panel == 0:
        kernel = _to_panels(kernel, panel)
    return {**packed, "decoder": {**packed["decoder"], "logits_dense": {"kernel": kernel}}}


def in_int8(packed: dict) -> dict:
    """`packed` with every kernel that a decoder step multiplies with as an `Int8Kernel`; all other arrays are shared."""

    def rounded(path, leaf):
        names = [key.key for key in path]
        once = "encoder_decoder_attention" in names and names[-2] in ("key", "value")
        return Int8Kernel.of(_from_panels(leaf)) if names[-1] == "kernel" and not once else leaf

    return {**packed, "decoder": jax.tree_util.tree_map_with_path(rounded, packed["decoder"])}


@functools.partial(jax.jit, static_argnames="panel")
def _to_panels(kernel, panel):
    inputs, outputs = kernel.shape
    return kernel.reshape(inputs, outputs // panel, panel).transpose(1, 0, 2)


@functools.partial(jax.jit, static_argnames=("panel", "pieces"))
def _split_panels(kernel, panel, pieces):
    panels, inputs, width = kernel.shape
    kernel = kernel.reshape(panels, inputs, width // panel, panel).transpose(0, 2, 1, 3).reshape(-1, inputs, panel)
    return tuple(jnp.array_split(kernel, pieces))


@jax.jit
def _from_panels(kernel):
    if kernel.ndim == 2:
        return kernel
    return kernel.transpose(1, 0, 2).reshape(kernel.shape[1], -1)


@jax.jit
def _join(kernels):
    return jnp.concatenate(kernels, axis=1)
