"""Finds models with equal encoders, of which one need be run and kept in memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from specdec_jax.backends.cpu.packed_weights import PackedWeight
from specdec_jax.models import weight_layouts
from specdec_jax.models.block_options import BlockOptions
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, is_decoder_only

_BLOCK = 1 << 20  # bytes that are compared at a time on a host


def share_encoder(target: LanguageModel, model: LanguageModel) -> bool:
    """Returns whether a model's encoder is equal to the target's; if so, it takes its arrays.

    Equal encoders are made of the same blocks, have the same weights, embeddings included, and lie
    on the same devices, so that they return the same numbers. Configurations and shapes are
    compared first, then weights, the smallest first. What the model computes does not change, but
    from then on the two models hold these arrays once.

    If a mesh divides one of the two and holds the other whole on every device, the outputs differ
    by rounding, and each model keeps its arrays.
    """
    ours, theirs = target.network, model.network
    if not all(isinstance(one, Network) and _has_encoder(one) for one in (ours, theirs)):
        return False
    if not _have_the_same_devices(ours, theirs) or _describe(ours) != _describe(theirs):
        return False
    kept, given = (_take_encoder(one.params) for one in (ours, theirs))
    lie_alike = len({one.rules.parts if one.rules else 1 for one in (ours, theirs)}) == 1
    first, second = (one if lie_alike else weight_layouts.unpack(one) for one in (kept, given))
    first, second = _lay_embeddings_alike(first, second)
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    pairs = list(zip(jax.tree.leaves(first), jax.tree.leaves(second)))
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return False
    on_host = ours.rules is None and jax.default_backend() == "cpu"
    compare = _are_equal_on_host if on_host else _are_equal
    if not all(a is b or compare(a, b) for a, b in sorted(pairs, key=lambda pair: pair[0].nbytes)):
        return False
    if lie_alike:
        _replace_arrays(given, kept)
        table = given.get("token_embedder", {}).get("embedding")
        if isinstance(table, PackedWeight):
            theirs.params["decoder"]["logits_dense"]["kernel"] = table.replace(derived=True)
    return True


def _have_the_same_devices(ours: Network, theirs: Network) -> bool:
    """Returns whether two networks run by one kind of backend, and on one mesh if on any."""
    if ours.rules is None or theirs.rules is None:
        return ours.backend == theirs.backend
    return type(ours.backend) is type(theirs.backend) and ours.rules.mesh == theirs.rules.mesh


def _has_encoder(network: Network) -> bool:
    """Returns whether a network has an encoder of its own, made of blocks."""
    own = not is_decoder_only(network) and network.encoder_dim is None
    return own and network.config.uses_backend


def _describe(network: Network) -> BlockOptions:
    """Returns what an encoder is made of; what only decoders or training read is left out."""
    others: dict[str, Any] = dict(num_decoder_layers=0, tied_head=False, dropout_rate=0.0)
    return dataclasses.replace(network.config.encoder_options(), **others)


def _take_encoder(params: dict) -> dict:
    """Returns the parts of a network's parameters that its encoder reads; dicts are shared."""
    embedder = "encoder_embedder" if "encoder_embedder" in params else "token_embedder"
    return {name: params[name] for name in ("encoder", embedder)}


def _lay_embeddings_alike(*encoders: dict) -> tuple[dict, ...]:
    """Returns encoders whose embeddings are tables, if one of them is stored as a head."""
    stored = [one.get("token_embedder", {}).get("embedding") for one in encoders]
    if len(set(map(type, stored))) == 1:
        return encoders
    return tuple(
        {**one, "token_embedder": {**one["token_embedder"], "embedding": table.unpack_rows()}}
        if isinstance(table, PackedWeight)
        else one
        for one, table in zip(encoders, stored)
    )


def _are_equal_on_host(ours: jax.Array, theirs: jax.Array) -> bool:
    """Returns whether two arrays have the same bytes, which are read up to the first difference."""
    first, second = (np.asarray(one).reshape(-1).view(np.uint8) for one in (ours, theirs))
    starts = range(0, len(first), _BLOCK)
    return all(
        np.array_equal(first[start : start + _BLOCK], second[start : start + _BLOCK])
        for start in starts
    )


@jax.jit
def _all_equal(ours: Shaped[Array, "..."], theirs: Shaped[Array, "..."]) -> jax.Array:
    return jnp.all(ours == theirs)


def _are_equal(ours: jax.Array, theirs: jax.Array) -> bool:
    """Returns whether two arrays are equal, compared where they lie."""
    return bool(_all_equal(ours, theirs))


def _replace_arrays(given: dict, kept: dict) -> None:
    """Puts the arrays of `kept` into `given`, in place: networks made of it share its dicts."""
    for name, value in given.items():
        if isinstance(value, dict):
            _replace_arrays(value, kept[name])
        elif type(value) is type(kept[name]):  # else an embedding is stored as a head in one
            given[name] = kept[name]
