"""The decode loop's own layout of the weights, which makes products fewer and, on a CPU, faster.

Checkpoints and `LanguageModel.params` keep T5X's names and two-dimensional weights. The jitted loop
takes another tree with the same numbers: the query, key and value weights of a self-attention are
joined into one, the two input weights of a gated feed-forward block are joined into one, and, where
the CPU's own kernels are used (`packed_weights.py`), the key and value weights of a cross-attention
are, too, and every weight matrix is stored packed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.backends.cpu.packed_weights import (
    PackedWeight,
    is_small_on_host,
    is_weight_object,
)
from specdec_jax.backends.int8 import Int8Weight

# By the name of the node: the name of the joint weight, and the names of the weights joined, along
# the output axis.
_FUSED = {
    "self_attention": ("qkv", ("query", "key", "value")),
    "attention": ("qkv", ("query", "key", "value")),
    "encoder_decoder_attention": ("kv", ("key", "value")),  # by the CPU's own kernels alone
}
_GATED = ("wi_fused", ("wi_0", "wi_1"))
Weight = Float[Any, "..."] | PackedWeight | Int8Weight
Plain = Float[Any, "..."] | Int8Weight  # a weight matrix as a checkpoint has it


def pack(params: dict, use_packed: bool, fused: bool = True, transposes_int8: bool = False) -> dict:
    """Converts T5X's tree to the loop's, leaf by leaf; the two never exist side by side.

    What converts a large leaf is jitted, so that a weight matrix is copied only once.

    Args:
      params: T5X's tree, whose weights are arrays `[D, F]` or `Int8Weight`s. Its nested dicts are
        emptied on the way.
      use_packed: whether weights are stored packed.
      fused: whether weights with the same input are joined, but for those of a cross-attention,
        which are with `use_packed`. On a mesh that divides weights by their outputs they must not
        be: one device would get the queries and another the values.
      transposes_int8: whether the numbers of `Int8Weight`s are transposed.
    """
    how = use_packed, fused, transposes_int8
    return {name: _pack(name, params.pop(name), *how) for name in list(params)}


def _pack(name: str, node: dict, use_packed: bool, fused: bool, transposes_int8: bool) -> dict:
    joint, parts = _FUSED.get(name, _GATED)
    fuses = use_packed if joint == "kv" else fused
    if fuses and all(part in node for part in parts):
        joined = [node.pop(part) for part in parts]  # weights, and biases if there are any
        node[joint] = {
            leaf: jax.tree.map(lambda *parts: _join(parts), *(part.pop(leaf) for part in joined))
            for leaf in list(joined[0])
        }
    for child in list(node):
        value = node.pop(child)
        if child == "kernel":
            node[child] = lay_weight(value, use_packed, transposes_int8)
        elif isinstance(value, dict):
            node[child] = _pack(child, value, use_packed, fused, transposes_int8)
        else:
            node[child] = value if is_weight_object(value) else jnp.asarray(value)
    return node


def lay_weight(weight: Weight, use_packed: bool, transposes_int8: bool = False) -> Weight:
    """Returns a weight matrix `[D, F]` as the loop takes it, or one that is packed already."""
    if isinstance(weight, PackedWeight):
        return weight
    if use_packed:
        return PackedWeight.pack(weight)
    if isinstance(weight, Int8Weight):
        return weight.transpose_values() if transposes_int8 else weight
    # A NumPy array would be copied to the device at every call.
    return jnp.asarray(weight)


def to_matrix(weight: Weight) -> Float[Array | np.ndarray, "..."]:
    """Returns a weight matrix `[D, F]` as an array, however it is stored."""
    return weight.matrix() if is_weight_object(weight) else weight


def weight_shape(weight: Weight) -> tuple[int, int]:
    """Returns (D, F) of a weight, however it is stored."""
    if isinstance(weight, PackedWeight):
        return weight.lines, weight.columns
    if isinstance(weight, Int8Weight):
        return weight.values.shape[::-1] if weight.transposed else weight.values.shape
    return weight.shape


def _map_step_weights(function: Callable[[Weight], Weight], packed: dict) -> dict:
    """Returns `packed` with `function` applied to every weight matrix of a decoder step.

    All other arrays are shared.

    The key and value weights of cross-attention are left out: they multiply the encoder's output
    once, before any step.
    """

    def mapped(path, leaf):
        names = [key.key for key in path]
        once = "encoder_decoder_attention" in names and names[-2] in ("key", "value", "kv")
        return function(leaf) if names[-1] == "kernel" and not once else leaf

    decoder = jax.tree_util.tree_map_with_path(mapped, packed["decoder"], is_leaf=is_weight_object)
    return {**packed, "decoder": decoder}


def step_weights(packed: dict) -> list[Weight]:
    """Returns all weights by which a decoder step multiplies."""
    found: list[Weight] = []

    def note(weight: Weight) -> Weight:
        found.append(weight)
        return weight

    _map_step_weights(note, packed)
    return found


def unpack(packed: dict) -> dict:
    """Returns T5X's tree again, with new arrays for weights that were packed."""
    return flax.traverse_util.unflatten_dict(dict(parameters(packed)))


def parameters(packed: dict) -> Iterator[tuple[tuple[str, ...], Float[Array | np.ndarray, "..."]]]:
    """Yields the arrays of T5X's tree with their paths.

    Each weight matrix is unpacked only when its turn comes.
    """
    for path, value in stored_parameters(packed):
        yield path, to_matrix(value)


def stored_parameters(
    packed: dict, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Plain]]:
    """Yields what `parameters` yields, but weights in int8 as `Int8Weight`s.

    Args:
      path: the path of `packed` in the whole tree.
    """
    fused, parts = _FUSED.get(path[-1], _GATED) if path else _GATED
    for name, value in packed.items():
        if name == fused:
            for leaf, whole in value.items():
                for part, piece in zip(parts, _divide(_plain(whole), len(parts))):
                    yield (*path, part, leaf), piece
        elif name == "kernel":
            if not getattr(value, "derived", False):
                yield (*path, name), _plain(value)
        elif isinstance(value, dict):
            yield from stored_parameters(value, (*path, name))
        elif isinstance(value, PackedWeight):  # an embedding that is the head too
            yield (*path, name), value.unpack_rows()
        else:
            yield (*path, name), value


def _plain(weight: Weight) -> Plain:
    return weight.unpack() if is_weight_object(weight) else weight


def _divide(weight: Plain, count: int) -> list[Plain]:
    """Splits a weight matrix along the output axis into `count` weights: the inverse of `_join`."""
    arrays, tree = jax.tree.flatten(weight)
    split = [
        (np if isinstance(array, np.ndarray) else jnp).split(array, count, axis=-1)
        for array in arrays
    ]
    return [tree.unflatten(parts) for parts in zip(*split)]


def add_head(
    packed: dict, tied: bool, use_packed: bool, ids: Int[Array, " F"] | None = None
) -> dict:
    """Returns `packed` with a weight matrix for its head, which is no parameter.

    A packed one that is the whole embedding takes that one's place, too; others are copies. All
    other arrays are shared.

    Args:
      tied: whether the model's head is its embedding; a weight that was already made of it is used
        if there is one.
      use_packed: as for `pack`.
      ids: the ids for which the head has columns; None: all.
    """
    weight: Weight
    if tied and "logits_dense" not in packed["decoder"]:
        embedder = packed["token_embedder"]
        weight = embedder["embedding"]
        if not use_packed:
            weight = (weight if ids is None else weight[ids]).T
        elif ids is not None:
            weight = PackedWeight.pack_rows(weight[ids], derived=True)
        else:
            if not isinstance(weight, PackedWeight):
                weight = PackedWeight.pack_rows(weight)
            packed = {**packed, "token_embedder": {**embedder, "embedding": weight}}
            weight = weight.replace(derived=True)
    else:
        whole = packed["decoder"]["logits_dense"]["kernel"]
        transposes_int8, weight = getattr(whole, "transposed", False), _plain(whole)
        weight = weight if ids is None else jax.tree.map(lambda array: array[..., ids], weight)
        if use_packed:
            weight = PackedWeight.pack(weight, derived=True)
        elif isinstance(weight, Int8Weight):
            weight = lay_weight(weight.replace(derived=True), False, transposes_int8)
    decoder = {**packed["decoder"], "logits_dense": {"kernel": weight}}
    if ids is not None and "logits_bias" in decoder:
        decoder["logits_bias"] = decoder["logits_bias"][ids]
    return {**packed, "decoder": decoder}


def round_to_int8(packed: dict, input_bits: int | None = 16, transposes_int8: bool = False) -> dict:
    """Returns `packed` with every weight matrix of a decoder step in int8.

    All other arrays, and weights that are in int8 already, are shared. `input_bits`: of an
    `Int8Weight`; `transposes_int8` as for `pack`.
    """

    def rounded(weight: Weight) -> Weight:
        is_packed = isinstance(weight, PackedWeight)
        if isinstance(weight, Int8Weight) or (is_packed and weight.scales is not None):
            return weight
        made = Int8Weight.quantize(to_matrix(weight), input_bits)
        if is_packed:
            return PackedWeight.pack(made, weight.derived)
        return lay_weight(made, False, transposes_int8)

    return _map_step_weights(rounded, packed)


def round_params(params: dict, input_bits: int | None = 16, tied: bool = False) -> dict:
    """Returns T5X's tree `params` with all weights in int8, those that are so already as they are.

    Its nested dicts are emptied on the way.

    Args:
      input_bits: of an `Int8Weight`.
      tied: whether the head is the embedding, of which a weight matrix is then made too.
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
        rounds = name == "kernel" and not isinstance(value, Int8Weight)
        found[name] = Int8Weight.quantize(value, input_bits) if rounds else value
    return found


def describe_rounding(params: dict) -> tuple[bool, int | None]:
    """Returns whether weights of T5X's tree are in int8, and their `input_bits`."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Int8Weight))
    found = {leaf.input_bits for leaf in leaves if isinstance(leaf, Int8Weight)}
    return bool(found), next(iter(found), None)


def _join(weights: Sequence[jax.Array]) -> jax.Array:
    if is_small_on_host(*weights):
        return jax.device_put(np.concatenate([np.asarray(weight) for weight in weights], axis=-1))
    return _concatenate(weights)


@jax.jit
def _concatenate(weights: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(weights, axis=-1)
