"""The decode loop's own tree of weights: fewer products, and on a CPU better shaped ones; the same numbers.

Checkpoints and `LanguageModel.params` keep T5X's names and two-dimensional kernels. The jitted loop takes a tree in
which the query, key and value kernels of a self-attention are one, the gated feed-forward's two input kernels are one,
and, where the CPU's own product is there (`panels.py`), every kernel is stored in panels.
"""

from collections.abc import Callable, Iterator

import flax.traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.models.int8 import Int8Kernel
from specdec_jax.models.panels import Panels

# Fused kernel: (its name, the names it is made of, along the output axis).
_FUSED = {"self_attention": ("qkv", ("query", "key", "value")), "attention": ("qkv", ("query", "key", "value"))}
_GATED = ("wi_fused", ("wi_0", "wi_1"))
Kernel = Float[Array, "..."] | Panels | Int8Kernel
Plain = Float[Array, "..."] | Int8Kernel  # a kernel as a checkpoint has it


def pack(params: dict, panels: bool, fused: bool = True) -> dict:
    """Returns the loop's tree, made from `params` (T5X's tree), whose nested dicts are emptied on the way.

    Leaf by leaf, so that the two never exist side by side; jitted, so that a kernel is copied once.

    Args:
      params: kernels are arrays `[D, F]`, or `Int8Kernel`s.
      panels: kernels are stored in panels.
      fused: False joins no kernels: one that is divided by its outputs among devices must not be a
        joint one of queries, keys and values.
    """
    return {name: _pack(name, params.pop(name), panels, fused) for name in list(params)}


def _pack(name: str, node: dict, panels: bool, fused: bool) -> dict:
    joint, parts = _FUSED.get(name, _GATED)
    if fused and all(part in node for part in parts):
        kernels = [node.pop(part)["kernel"] for part in parts]
        node[joint] = {"kernel": jax.tree.map(lambda *parts: _join(parts), *kernels)}
    for child in list(node):
        value = node.pop(child)
        if child == "kernel":
            node[child] = lay(value, panels)
        elif isinstance(value, dict):
            node[child] = _pack(child, value, panels, fused)
        else:
            node[child] = jnp.asarray(value)
    return node


def lay(kernel, panels: bool) -> Kernel:
    """Returns a kernel `[D, F]`, an array or an `Int8Kernel`, as the loop takes it."""
    if panels:
        return Panels.of(kernel)
    # NumPy's would be copied every call.
    return kernel if isinstance(kernel, Int8Kernel) else jnp.asarray(kernel)


def is_kernel(node) -> bool:
    """Returns whether it is a kernel that is stored in some way of its own."""
    return isinstance(node, Panels | Int8Kernel)


def matrix(kernel: Kernel) -> Float[Array, "..."]:
    """Returns a kernel `[D, F]` as an array, however it is stored."""
    return kernel.matrix() if is_kernel(kernel) else kernel


def shape_of(kernel: Kernel) -> tuple[int, int]:
    """Returns (D, F) of a kernel, however it is stored."""
    if isinstance(kernel, Panels):
        return kernel.lines, kernel.columns
    return kernel.values.shape if isinstance(kernel, Int8Kernel) else kernel.shape


def _map_step_kernels(function: Callable[[Kernel], Kernel], packed: dict) -> dict:
    """`packed` with `function` of every kernel that a decoder step multiplies with; all other arrays are shared.

    Cross-attention's keys and values are no such kernels: they are made once, of the encoder's whole output.
    """

    def mapped(path, leaf):
        names = [key.key for key in path]
        once = "encoder_decoder_attention" in names and names[-2] in ("key", "value")
        return function(leaf) if names[-1] == "kernel" and not once else leaf

    decoder = jax.tree_util.tree_map_with_path(mapped, packed["decoder"], is_leaf=is_kernel)
    return {**packed, "decoder": decoder}


def step_kernels(packed: dict) -> list[Kernel]:
    """Returns the kernels that a decoder step multiplies with."""
    found: list[Kernel] = []

    def note(kernel: Kernel) -> Kernel:
        found.append(kernel)
        return kernel

    _map_step_kernels(note, packed)
    return found


def unpack(packed: dict) -> dict:
    """Returns T5X's tree again (new arrays where kernels were packed)."""
    return flax.traverse_util.unflatten_dict(dict(parameters(packed)))


def parameters(packed: dict) -> Iterator[tuple[tuple[str, ...], Float[Array, "..."]]]:
    """Yields the arrays of T5X's tree with their paths, one after the other: no two that were
    packed need be there at a time."""
    for path, value in stored_parameters(packed):
        yield path, matrix(value)


def stored_parameters(packed: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Plain]]:
    """As `parameters`, but for kernels in 8 bits, which are `Int8Kernel`s.

    Args:
      path: of `packed` in the tree.
    """
    fused, parts = _FUSED.get(path[-1], _GATED) if path else _GATED
    for name, value in packed.items():
        if name == fused:
            for part, piece in zip(parts, _divide(_plain(value["kernel"]), len(parts))):
                yield (*path, part, "kernel"), piece
        elif name == "kernel":
            if not getattr(value, "derived", False):
                yield (*path, name), _plain(value)
        elif isinstance(value, dict):
            yield from stored_parameters(value, (*path, name))
        else:
            yield (*path, name), value


def _plain(kernel: Kernel) -> Plain:
    return kernel.kernel() if isinstance(kernel, Panels) else kernel


def _divide(kernel: Plain, count: int) -> list[Plain]:
    """The opposite of joining kernels along the output axis."""
    arrays, tree = jax.tree.flatten(kernel)
    return [tree.unflatten(parts) for parts in zip(*(jnp.split(array, count, axis=-1) for array in arrays))]


def with_head(packed: dict, tied: bool, panels: bool, ids: Int[Array, " F"] | None = None) -> dict:
    """Returns `packed` with a head of its own, which is no parameter; all other arrays are shared.

    Args:
      tied: the head of `packed` is its embedding, unless there is one, made of it, already.
      panels: as in `pack`.
      ids: of the columns; None: all.
    """
    kernel: Plain
    if tied and "logits_dense" not in packed["decoder"]:
        embedding = packed["token_embedder"]["embedding"]
        kernel = (embedding if ids is None else embedding[ids]).T
    else:
        kernel = _plain(packed["decoder"]["logits_dense"]["kernel"])
        kernel = kernel if ids is None else jax.tree.map(lambda array: array[..., ids], kernel)
    kernel = Panels.of(kernel, derived=True) if panels else kernel
    return {**packed, "decoder": {**packed["decoder"], "logits_dense": {"kernel": kernel}}}


def in_int8(packed: dict) -> dict:
    """Returns `packed` with every kernel that a decoder step multiplies with in 8 bits; all other arrays are shared."""
    return _map_step_kernels(_in_int8, packed)


def _in_int8(kernel: Kernel) -> Kernel:
    if isinstance(kernel, Panels):
        return kernel if kernel.scales is not None else Panels.of(Int8Kernel.of(kernel.matrix()), kernel.derived)
    return kernel if isinstance(kernel, Int8Kernel) else Int8Kernel.of(kernel)


def round_params(params: dict) -> dict:
    """Returns T5X's tree with all kernels in 8 bits; the nested dicts of `params` are emptied on the way."""
    found = {}
    for name in list(params):
        value = params.pop(name)
        found[name] = (
            round_params(value) if isinstance(value, dict) else Int8Kernel.of(value) if name == "kernel" else value
        )
    return found


def quantized(params: dict) -> bool:
    """Returns whether a tree has kernels in 8 bits."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Int8Kernel))
    return any(isinstance(leaf, Int8Kernel) for leaf in leaves)


@jax.jit
def _join(kernels):
    return jnp.concatenate(kernels, axis=-1)
