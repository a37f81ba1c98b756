"""The decode loop's own layout of the weights: fewer and better shaped products, the same numbers.

Checkpoints and `LanguageModel.params` keep T5X's names and two-dimensional kernels. The jitted loop takes a tree in
which the query, key and value kernels of a self-attention are one, the gated feed-forward's two input kernels are one,
and, for float32 on a CPU, the decoder's kernels are stored as panels `[F/P, D, P]`: XLA's product of a few rows with a
`[D, F]` kernel strides through it (a call over 5 positions then costs two or three times one over 1), its batched
product over panels as wide as its own inner block reads them from end to end. Which is fastest depends on the
processor and on the number of rows (`layout_for`).
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models.int8 import Int8Kernel

# Columns of a panel: what XLA's float32 kernels hold in registers for several rows, with and without AVX-512.
_WIDE, _HALF, _NARROW = 64, 32, 16
# XLA runs a batched product on one core, and independent products on several only where more than 8 are ready at once.
_PIECES, _LEAST_TO_SPLIT = 16, 2**19


class Layout(NamedTuple):
    """How the decoder's kernels are stored.

    Attributes:
      panel: P, columns of a panel; None: kernels stay `[D, F]`.
      pieces: arrays that a large kernel is split into.
    """

    panel: int | None = None
    pieces: int = 1


# Fused kernel: (its name, the names it is made of, along the output axis).
_FUSED = {"self_attention": ("qkv", ("query", "key", "value")), "attention": ("qkv", ("query", "key", "value"))}
_GATED = ("wi_fused", ("wi_0", "wi_1"))


@functools.cache
def processor() -> str:
    """The kind of this processor as NumPy sees it: "sapphire_rapids" (and later Intel), "avx512" or "other"."""
    extensions = np.show_config(mode="dicts")["SIMD Extensions"]
    names = [*extensions.get("baseline", ()), *extensions.get("found", ())]
    if "AVX512_SPR" in names:
        return "sapphire_rapids"
    # NumPy's names for AVX-512 depend on its version.
    return "avx512" if any(name == "X86_V4" or name.startswith("AVX512") for name in names) else "other"


# Measured with two cores each: (for one row, for several).
_LAYOUTS = {
    "sapphire_rapids": (Layout(), Layout(_WIDE, _PIECES)),
    "avx512": (Layout(_HALF, _PIECES), Layout(_WIDE, _PIECES)),  # Zen 4
    "other": (Layout(_WIDE), Layout(_NARROW, _PIECES)),  # Zen 3
}
# Of models at least this wide, where it is another.
_BROAD, _BROAD_LAYOUTS = 1024, {"avx512": (Layout(_HALF, _PIECES), Layout(_HALF, _PIECES))}


def layout_for(backend: str, dtype, width: int, rows: int = 1) -> Layout:
    """The fastest layout of the decoder's kernels for products of `rows` rows, in a model of width D = `width`."""
    if backend != "cpu" or np.dtype(dtype) != np.float32:
        return Layout()
    layouts = _LAYOUTS if width < _BROAD else {**_LAYOUTS, **_BROAD_LAYOUTS}
    return layouts[processor()][rows > 1]


def pack(params: dict, layout: Layout, fused: bool = True) -> dict:
    """The loop's tree in `layout`, made from `params` (T5X's tree), whose nested dicts are emptied on the way.

    Leaf by leaf, so that the two never exist side by side; jitted, so that a kernel is copied once. `fused` False joins no
    kernels: one that is divided by its outputs among devices must not be a joint one of queries, keys and values.
    """
    return {
        name: _pack(name, params.pop(name), layout if name == "decoder" else Layout(), fused) for name in list(params)
    }


def _pack(name: str, node: dict, layout: Layout, fused: bool) -> dict:
    joint, parts = _FUSED.get(name, _GATED)
    if fused and all(part in node for part in parts):
        kernels = [node.pop(part)["kernel"] for part in parts]
        node[joint] = {"kernel": _join(kernels)}
    for child in list(node):
        value = node.pop(child)
        if child == "kernel":
            node[child] = _lay(jnp.asarray(value), layout)  # NumPy's would be copied every call
        elif isinstance(value, dict):
            node[child] = _pack(child, value, Layout() if _made_once(name, child) else layout, fused)
        else:
            node[child] = jnp.asarray(value)
    return node


def _made_once(parent: str, name: str) -> bool:
    """Cross-attention keys and values are products over the encoder's whole output, not over a few rows."""
    return parent == "encoder_decoder_attention" and name in ("key", "value")


def _map_decoder_kernels(function, packed: dict) -> dict:
    """`packed` with `function` of every kernel that a decoder step multiplies with; all other arrays are shared."""

    def mapped(path, leaf):
        names = [key.key for key in path]
        return function(leaf) if names[-1] == "kernel" and not _made_once(*names[-3:-1]) else leaf

    decoder = jax.tree_util.tree_map_with_path(mapped, {"": packed["decoder"]}, is_leaf=in_pieces)[""]
    return {**packed, "decoder": decoder}


def in_pieces(node) -> bool:
    """Whether it is a kernel in a tuple of pieces."""
    return isinstance(node, tuple)


def unpack(packed: dict) -> dict:
    """T5X's tree again (new arrays where kernels were packed)."""
    return flax.traverse_util.unflatten_dict(dict(parameters(packed)))


def parameters(packed: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """The arrays of T5X's tree with their paths, one after the other: no two that were packed need be there at a time.

    Args:
      path: of `packed` in the tree.
    """
    fused, parts = _FUSED.get(path[-1], _GATED) if path else _GATED
    for name, value in packed.items():
        if name == fused:
            for part, piece in zip(parts, jnp.split(_from_panels(value["kernel"]), len(parts), axis=1)):
                yield (*path, part, "kernel"), piece
        elif name == "kernel":
            yield (*path, name), _from_panels(value)
        elif isinstance(value, dict):
            yield from parameters(value, (*path, name))
        else:
            yield (*path, name), value


def relaid(packed: dict, layout: Layout) -> dict:
    """`packed` in another layout; all but the decoder's kernels is shared."""
    return _map_decoder_kernels(lambda kernel: _lay(_from_panels(kernel), layout), packed)


def _lay(kernel: jax.Array, layout: Layout):
    """A kernel `[D, F]` in panels, a large one in a tuple of pieces of about as many panels each; as it is where its columns
    make no whole number of panels."""
    if not layout.panel or kernel.shape[1] % layout.panel:
        return kernel
    pieces = min(layout.pieces, kernel.shape[1] // layout.panel) if kernel.size >= _LEAST_TO_SPLIT else 1
    made = _split_panels(kernel, layout.panel, pieces)
    return made if pieces > 1 else made[0]


def padded(ids: np.ndarray) -> np.ndarray:
    """`ids [F]` with copies of the last up to a multiple of the widest panel."""
    return np.pad(ids, (0, -len(ids) % _WIDE), mode="edge")


def with_head(packed: dict, ids: np.ndarray, tied: bool, layout: Layout) -> dict:
    """`packed` with a head of its own for `ids [F]`; all other arrays are shared.

    Args:
      tied: the head of `packed` is its embedding.
      layout: as in `pack`.
    """
    if tied:
        kernel = packed["token_embedder"]["embedding"][ids].T
    else:
        kernel = _from_panels(packed["decoder"]["logits_dense"]["kernel"])[:, ids]
    return {**packed, "decoder": {**packed["decoder"], "logits_dense": {"kernel": _lay(kernel, layout)}}}


def in_int8(packed: dict) -> dict:
    """`packed` with every kernel that a decoder step multiplies with as an `Int8Kernel`; all other arrays are shared."""
    return _map_decoder_kernels(lambda kernel: Int8Kernel.of(_from_panels(kernel)), packed)


@functools.partial(jax.jit, static_argnames=("panel", "pieces"))
def _split_panels(kernel, panel, pieces):
    inputs, outputs = kernel.shape
    return tuple(jnp.array_split(kernel.reshape(inputs, outputs // panel, panel).transpose(1, 0, 2), pieces))


@jax.jit
def _from_panels(kernel):
    if in_pieces(kernel):
        kernel = jnp.concatenate(kernel)
    return kernel if kernel.ndim == 2 else kernel.transpose(1, 0, 2).reshape(kernel.shape[1], -1)


@jax.jit
def _join(kernels):
    return jnp.concatenate(kernels, axis=1)
