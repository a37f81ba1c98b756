"""Checks the arguments of a decode inside another program's traced function.

What is traced is checked by its kind and its shape alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.checks import check_drafter_kind
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.network import is_decoder_only
from specdec_jax.models.t5 import T5Config
from specdec_jax.speculative.drafter import Drafter

_INT32 = np.iinfo(np.int32)


def check_parts(config: Any, drafter: Any) -> None:
    """Raises ValueError for what is no T5's configuration, or neither a drafter nor None."""
    arguments.check_kind("config", config, T5Config, "a T5Config, such as that of a LanguageModel")
    if drafter is not None:
        check_drafter_kind(drafter)


def check_models(drafter: Drafter | None, config: T5Config) -> None:
    """Rejects a drafter with a model that cannot read the inputs of a target of this `config`."""
    for model in drafter.models if drafter is not None else ():
        if is_decoder_only(model) or model.config.encoder_dim not in (None, config.emb_dim):
            got = (
                "a decoder-only model"
                if is_decoder_only(model)
                else f"encoder_dim {model.config.encoder_dim}"
            )
            expected = f"a T5 with an encoder, or encoder_dim {config.emb_dim}"
            raise ValueError(f"drafter: got {got}, expected {expected}")


def check_names(
    decoder_params: Mapping[str, Any] | None, names: Sequence[str], rng: jax.Array | None
) -> dict[str, Any]:
    """Returns a copy of `decoder_params`; rejects unknown names, and a key beside `rng`."""
    expected = "a dict of options by T5X's names"
    arguments.check_kind("decoder_params", decoder_params or {}, Mapping, expected)
    given = dict(decoder_params or {})
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(
            f"decoder_params: got {', '.join(unknown)}, expected only {', '.join(names)}"
        )
    if rng is not None and given.get("decode_rng") is not None:
        raise ValueError(
            "decoder_params: got decode_rng beside the argument rng, expected one of the two"
        )
    return given


def is_traced(value: Any) -> bool:
    """Returns whether `value` is one that cannot be looked at."""
    return isinstance(value, jax.core.Tracer)


def check_rows(inputs: Any, prompts: Any) -> tuple[jax.Array, jax.Array]:
    """Returns ids of inputs `[B, L']` and of prompts `[B, L]`, as int32.

    Raises:
      ValueError: other arrays; or what differs between the devices of a `shard_map` that checks it.
    """
    rows = []
    for name, value in (("inputs", inputs), ("prompts", prompts)):
        array = value if isinstance(value, jax.Array) else arguments.as_array(value)
        whole = jnp.issubdtype(array.dtype, jnp.integer)
        if array.ndim != 2 or not array.size or not whole:
            got = f"an array of {array.dtype} {list(array.shape)}"
            raise mismatch_error(name, got, "integers [rows, places], at least one of each")
        if axes := _find_varying_axes(array):
            got = f"an array that varies over {', '.join(sorted(map(str, axes)))} in a shard_map"
            raise mismatch_error(name, got, "shard_map(…, check_vma=False)")
        rows.append(jnp.asarray(array, jnp.int32))
    if len(rows[0]) != len(rows[1]):
        expected = f"{len(rows[0])}, as many as inputs"
        raise mismatch_error("prompts", f"{len(rows[1])} rows", expected)
    return rows[0], rows[1]


def _find_varying_axes(array: Any) -> frozenset:
    """Returns the axes of a `shard_map` over whose devices `array` varies, if JAX keeps account."""
    kind = jax.typeof(array)
    kind = getattr(kind, "manual_axis_type", kind)  # JAX 0.10.2 has it there
    return getattr(kind, "varying", getattr(kind, "vma", frozenset()))


def end_ids(eos_id: Any, batch: int) -> jax.Array:
    """Returns `[B, E]` int32: the ids that end a row, for all rows the same."""
    if not is_traced(eos_id) and np.size(eos_id):
        expected = "an id, or several"
        ids = arguments.check_numbers("eos_id", eos_id, expected, whole=True)
        if np.any((ids < _INT32.min) | (ids > _INT32.max)):
            raise mismatch_error("eos_id", arguments.quote(eos_id), expected)
    ids = jnp.asarray(eos_id, jnp.int32).reshape(1, -1)
    return jnp.broadcast_to(ids, (batch, ids.shape[1]))


def check_key(key: Any) -> jax.Array:
    """Returns a batch's key; raises ValueError for something else, or several keys."""
    array = key if isinstance(key, jax.Array | np.ndarray) else None
    typed = array is not None and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    if array is None or array.ndim != (0 if typed else 1):
        raise mismatch_error("rng", arguments.quote(key), "one key, such as jax.random.key(seed)")
    return jnp.asarray(array)
