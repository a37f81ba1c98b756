"""Checks the fields of configurations by one table of their types and ranges."""

import copyreg
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from specdec_jax.backends.xla import ACTIVATIONS
from specdec_jax.files.reading import PathLike, mismatch_error, quote_value

Shape = TypeVar("Shape")

# Least and greatest values: wide enough for every model that exists, and narrow enough that shapes
# can be computed.
_COUNTS = {
    "vocab_size": (1, 10_000_000),
    "emb_dim": (1, 1_000_000),
    "encoder_dim": (1, 1_000_000),
    "target_dim": (1, 1_000_000),
    "mlp_dim": (1, 1_000_000),
    "num_heads": (1, 1000),
    "num_kv_heads": (1, 1000),
    "encoder_emb_dim": (1, 1_000_000),
    "encoder_mlp_dim": (1, 1_000_000),
    "encoder_num_heads": (1, 1000),
    "encoder_num_kv_heads": (1, 1000),
    "head_dim": (1, 100_000),
    "num_encoder_layers": (0, 1000),
    "num_decoder_layers": (1, 1000),
    "num_buckets": (4, 100_000),
    "max_distance": (3, 1_000_000_000),
    "num_positions": (1, 100_000_000),
    "num_blocks": (0, 100),
    "pad_id": (0, 10_000_000),
    "apart_id": (0, 10_000_000),
    "image_id": (0, 10_000_000),
    "encoder_vocab_size": (1, 10_000_000),
}
_POSITIVE = (
    *("attention_cap", "logits_cap", "query_scalar"),
    *("rotary_base", "local_rotary_base", "rotary_factor"),
)
_WINDOWS = ("windows", "encoder_windows")  # of layers in turn
_LARGEST = 1_000_000_000
_FLAGS = (
    "logits_via_embedding",
    "scale_decoder_outputs",
    "relative_bias_per_layer",
    "share_head",
    "separate_embeddings",
    "qk_norm",
    "merged_attention",
    "embedding_norm",
    "scale_embedding",
    "logits_bias",
)
_CHOICES = {
    "mlp_activation": ACTIVATIONS,
    "norm_place": ("pre", "post"),
    "dtype": ("float32", "bfloat16"),
    "matmul_dtype": ("float32", "bfloat16"),
}


class FieldError(ValueError):
    """The error of a field outside its range.

    Attributes:
      field: the field's name.
      problem: what was got and what was expected.
    """

    def __init__(self, config: Any, field: str, problem: str):
        super().__init__(f"{type(config).__name__}.{field}: {problem}")
        self.field, self.problem = field, problem

    def __reduce__(self) -> tuple:
        # Without the configuration. From another process the error would otherwise not be read.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)


def check_fields(config: Any) -> None:
    """Checks every field of a configuration by the table; None is allowed where it is the default.

    Integers of numpy are kept as Python's.

    Raises:
      FieldError: the first field that is not allowed.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None and field.default is None:
            continue
        if expected := _find_expected(field.name, value):
            raise FieldError(config, field.name, f"got {quote_value(value)}, expected {expected}")
        if isinstance(value, np.integer):  # which JSON cannot hold
            object.__setattr__(config, field.name, int(value))


def _find_expected(name: str, value: Any) -> str | None:
    """Returns what is expected of the field `name`; None if `value` is allowed."""
    number = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    if name in _COUNTS:
        least, most = _COUNTS[name]
        if not number or isinstance(value, float):
            return "an integer"
        if value < least:
            return f"at least {least}"
        return f"at most {most:,}" if value > most else None
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name == "dropout_rate":
        return None if number and 0 <= value < 1 else "a number in [0, 1)"
    if name in _POSITIVE:
        return None if number and 0 < value <= _LARGEST else f"a number in (0, {_LARGEST:,}]"
    if name in _WINDOWS:
        listed = isinstance(value, list | tuple) and 0 < len(value) <= 1000
        sound = listed and all(type(one) is int and 0 <= one <= _LARGEST for one in value)
        return None if sound else f"1 to 1,000 integers from 0 (none) to {_LARGEST:,}"
    if name == "mlp_activations":
        listed = isinstance(value, list | tuple) and len(value) in (1, 2)
        known = listed and all(isinstance(one, str) and one in ACTIVATIONS for one in value)
        return None if known else f"one name or two (gated) from {ACTIVATIONS}"
    known = isinstance(value, str) and value in _CHOICES[name]
    return None if known else f"one of {', '.join(_CHOICES[name])}"


def build(
    shape: type[Shape], values: Any, path: PathLike, names: Mapping[str, str] | None = None
) -> Shape:
    """Makes a configuration of the class `shape` from values that were read from a file.

    Args:
      shape: a dataclass.
      values: values by the fields' names.
      path: the file, for messages.
      names: the fields' names in the file, where they differ; for messages.

    Raises:
      ValueError: a field is unknown, missing or outside its range.
    """
    known = {field.name: field for field in dataclasses.fields(shape)}  # type: ignore[arg-type]
    unknown = [name for name in values if name not in known] if type(values) is dict else [values]
    if unknown:
        raise mismatch_error(
            path, quote_value(unknown[0]), f"a configuration of {', '.join(known)}"
        )
    names = {name: name for name in known} | dict(names or {})
    for name, field in known.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise mismatch_error(f"{path}: {names[name]}", "none", "one")
    try:
        return shape(**values)
    except FieldError as error:
        raise ValueError(
            f"{path}: {names.get(error.field, error.field)}: {error.problem}"
        ) from None
