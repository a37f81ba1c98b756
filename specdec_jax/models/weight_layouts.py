"""The decode loop's own layout of the weights, which makes products fewer and, on a CPU, faster.

Checkpoints and `LanguageModel.params` keep T5X's names and two-dimensional kernels. The jitted loop
takes another tree with the same numbers: the query, key and value kernels of a self-attention are
joined into one, the two input kernels of a gated feed-forward block are joined into one, and, where
the CPU's own kernels are used (`packed_weights.py`), every kernel is stored packed.
"""

from collections.abc import Callable, Iterator

import flax.traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.backends.cpu.packed_weights import PackedWeights, is_kernel
from specdec_jax.backends.int8 import Int8Kernel

# By the name of the node: the name of the joint kernel, and the names of the kernels joined, along
# the output axis.
_FUSED = {
    "self_attention": ("qkv", ("query", "key", "value")),
    "attention": ("qkv", ("query", "key", "value")),
}
_GATED = ("wi_fused", ("wi_0", "wi_1"))
Kernel = Float[Array, "..."] | PackedWeights | Int8Kernel
Plain = Float[Array, "..."] | Int8Kernel  # a kernel as a checkpoint has it


def pack(params: dict, use_packed: bool, fused: bool = True) -> dict:
    """Converts T5X's tree to the loop's, leaf by leaf, so that the two trees never exist side by
    side.

    What converts a leaf is jitted, so that a kernel is copied only once.

    Args:
      params: T5X's tree, whose kernels are arrays `[D, F]` or `Int8Kernel`s. Its nested dicts are
        emptied on the way.
      use_packed: whether kernels are stored packed.
      fused: whether kernels with the same input are joined. On a mesh that divides kernels by their
        outputs they must not be: one device would get the queries and another the values.
    """
    return {name: _pack(name, params.pop(name), use_packed, fused) for name in list(params)}


def _pack(name: str, node: dict, use_packed: bool, fused: bool) -> dict:
    joint, parts = _FUSED.get(name, _GATED)
    if fused and all(part in node for part in parts):
        kernels = [node.pop(part)["kernel"] for part in parts]
        node[joint] = {"kernel": jax.tree.map(lambda *parts: _join(parts), *kernels)}
    for child in list(node):
        value = node.pop(child)
        if child == "kernel":
            node[child] = lay(value, use_packed)
        elif isinstance(value, dict):
            node[child] = _pack(child, value, use_packed, fused)
        else:
            node[child] = jnp.asarray(value)
    return node


def lay(kernel, use_packed: bool) -> Kernel:
    """Returns a kernel `[D, F]`, an array or an `Int8Kernel`, as the loop takes it."""
    if use_packed:
        return PackedWeights.pack(kernel)
    # A NumPy array would be copied to the device at every call.
    return kernel if isinstance(kernel, Int8Kernel) else jnp.asarray(kernel)


def matrix(kernel: Kernel) -> Float[Array, "..."]:
    """Returns a kernel `[D, F]` as an array, however it is stored."""
    return kernel.matrix() if is_kernel(kernel) else kernel


def shape_of(kernel: Kernel) -> tuple[int, int]:
    """Returns (D, F) of a kernel, however it is stored."""
    if isinstance(kernel, PackedWeights):
        return kernel.lines, kernel.columns
    return kernel.values.shape if isinstance(kernel, Int8Kernel) else kernel.shape


def _map_step_kernels(function: Callable[[Kernel], Kernel], packed: dict) -> dict:
    """Returns `packed` with `function` applied to every kernel of a decoder step.

    All other arrays are shared.

    The key and value kernels of cross-attention are left out: they multiply the encoder's output
    once, before any step.
    """

    def mapped(path, leaf):
        names = [key.key for key in path]
        once = "encoder_decoder_attention" in names and names[-2] in ("key", "value")
        return function(leaf) if names[-1] == "kernel" and not once else leaf

    decoder = jax.tree_util.tree_map_with_path(mapped, packed["decoder"], is_leaf=is_kernel)
    return {**packed, "decoder": decoder}


def step_kernels(packed: dict) -> list[Kernel]:
    """Returns all kernels by which a decoder step multiplies."""
    found: list[Kernel] = []

    def note(kernel: Kernel) -> Kernel:
        found.append(kernel)
        return kernel

    _map_step_kernels(note, packed)
    return found


def unpack(packed: dict) -> dict:
    """Returns T5X's tree again, with new arrays for kernels that were packed."""
    return flax.traverse_util.unflatten_dict(dict(parameters(packed)))


def parameters(packed: dict) -> Iterator[tuple[tuple[str, ...], Float[Array, "..."]]]:
    """Yields the arrays of T5X's tree with their paths.

    Each kernel is unpacked only when its turn comes.
    """
    for path, value in stored_parameters(packed):
        yield path, matrix(value)


def stored_parameters(
    packed: dict, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Plain]]:
    """Yields what `parameters` yields, but kernels in int8 as `Int8Kernel`s.

    Args:
      path: the path of `packed` in the whole tree.
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
    return kernel.kernel() if isinstance(kernel, PackedWeights) else kernel


def _divide(kernel: Plain, count: int) -> list[Plain]:
    """Splits a kernel along the output axis into `count` kernels: the inverse of `_join`."""
    arrays, tree = jax.tree.flatten(kernel)
    return [
        tree.unflatten(parts)
        for parts in zip(*(jnp.split(array, count, axis=-1) for array in arrays))
    ]


def with_head(
    packed: dict, tied: bool, use_packed: bool, ids: Int[Array, " F"] | None = None
) -> dict:
    """Returns `packed` with a kernel for its head, which is a copy and no parameter.

    All other arrays are shared.

    Args:
      tied: whether the model's head is its embedding; a kernel that was already made of it is used
        if there is one.
      use_packed: as for `pack`.
      ids: the ids for which the head has columns; None: all.
    """
    kernel: Plain
    if tied and "logits_dense" not in packed["decoder"]:
        embedding = packed["token_embedder"]["embedding"]
        kernel = (embedding if ids is None else embedding[ids]).T
    else:
        kernel = _plain(packed["decoder"]["logits_dense"]["kernel"])
        kernel = kernel if ids is None else jax.tree.map(lambda array: array[..., ids], kernel)
    if use_packed:
        kernel = PackedWeights.pack(kernel, derived=True)
    elif isinstance(kernel, Int8Kernel):
        kernel = kernel.replace(derived=True)
    return {**packed, "decoder": {**packed["decoder"], "logits_dense": {"kernel": kernel}}}


def in_int8(packed: dict, input_bits: int | None = 16) -> dict:
    """Returns `packed` with every kernel of a decoder step in int8.

    All other arrays, and kernels that are in int8 already, are shared. `input_bits`: of an
    `Int8Kernel`.
    """

    def rounded(kernel: Kernel) -> Kernel:
        if isinstance(kernel, Int8Kernel) or (
            isinstance(kernel, PackedWeights) and kernel.scales is not None
        ):
            return kernel
        found = Int8Kernel.quantize(matrix(kernel), input_bits)
        return (
            PackedWeights.pack(found, kernel.derived)
            if isinstance(kernel, PackedWeights)
            else found
        )

    return _map_step_kernels(rounded, packed)


def round_params(params: dict, input_bits: int | None = 16, tied: bool = False) -> dict:
    """Returns T5X's tree `params` with all kernels in int8, those that are so already as they are.

    Its nested dicts are emptied on the way.

    Args:
      input_bits: of an `Int8Kernel`.
      tied: whether the head is the embedding, of which a kernel is then made too.
    """
    if tied:
        params["decoder"]["logits_dense"] = {"kernel": params["token_embedder"]["embedding"].T}
    return _round_params(params, input_bits)


def _round_params(params: dict, input_bits: int | None) -> dict:
    found = {}
    for name in list(params):
        value = params.pop(name)
        if isinstance(value, dict):
            value = _round_params(value, input_bits)
        rounds = name == "kernel" and not isinstance(value, Int8Kernel)
        found[name] = Int8Kernel.quantize(value, input_bits) if rounds else value
    return found


def rounding_of(params: dict) -> tuple[bool, int | None]:
    """Returns whether kernels of T5X's tree are in int8, and their `input_bits`."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Int8Kernel))
    found = {leaf.input_bits for leaf in leaves if isinstance(leaf, Int8Kernel)}
    return bool(found), next(iter(found), None)


@jax.jit
def _join(kernels):
    return jnp.concatenate(kernels, axis=-1)
