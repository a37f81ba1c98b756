"""Checks shapes and dtypes of arrays in calls, for `--jaxtyping-packages`, and nothing else.

Toys may take the place of networks and models.
"""

import dataclasses
import functools
import typing

import beartype
import flax.linen
import jax
import numpy as np
from beartype.door import is_bearable
from jaxtyping import AnnotationError, jaxtyped


def arrays(function):
    """Checks the arrays that are given to a function and that it returns, those in records too.

    A record is not checked when it is made: JAX makes them of shapes, of places on a mesh and of
    None as well.
    """
    if function.__name__ in ("__init__", "__post_init__") or function.__qualname__.startswith(
        "isolated."
    ):
        return function  # `isolated` passes on anything, to a function that is checked by itself
    # jaxtyping asks twice: before the call, and after it with what is returned as the last
    # argument.
    after = function.__annotations__.get("return", typing.Any) is not typing.Any
    function.__annotations__ = kinds = _of_arrays(function.__annotations__)
    checked = beartype.beartype(function) if kinds else function
    taken = _as_jax if kinds and "ndarray" not in str(kinds) else lambda value: value

    @functools.wraps(function)
    def check(*arguments, **named):
        values = (*arguments, *named.values())
        for value in values[-1:] if after else values:
            _check_record(value)
        return checked(
            *map(taken, arguments), **{name: taken(value) for name, value in named.items()}
        )

    return check


def _as_jax(value):
    """NumPy's arrays are as good as JAX's for what JAX computes."""
    return (
        jax.device_put(value) if isinstance(value, np.ndarray) else value
    )  # unlike jnp.asarray it compiles nothing


def _of_arrays(annotations: dict) -> dict:
    return {name: kind for name, kind in annotations.items() if "jaxtyping." in str(kind)}


def _check_record(value) -> None:
    """Checks the arrays of a NamedTuple or a dataclass: an axis has one size in all of its fields.

    Raises:
      AnnotationError: which jaxtyping passes on, while of others it would only say which function
        was called.
    """
    kinds = _fields(type(value))
    if kinds:
        with jaxtyped("context"):
            for name, kind in kinds.items():
                field = getattr(value, name)
                if kind is None:
                    _check_record(field)
                elif not is_bearable(_as_jax(field), kind):
                    dtype = getattr(field, "dtype", type(field).__name__)
                    got = f"{dtype}{getattr(field, 'shape', '')}, expected {kind}"
                    raise AnnotationError(f"{type(value).__name__}.{name}: got {got}")


_PLAIN = (bool, int, float, str, type(None))


@functools.cache
def _fields(record: type) -> dict:
    """The annotation of each field that is of arrays; None for others, which may be records.

    Left out is what holds no array: plain values, and modules, whose parameters come with a call.
    """
    ours = record.__module__.startswith(("specdec_jax.models.", "specdec_jax.speculative."))
    if not ours or issubclass(record, flax.linen.Module):
        return {}
    if not (hasattr(record, "_fields") or dataclasses.is_dataclass(record)):
        return {}
    names = getattr(record, "_fields", None) or [field.name for field in dataclasses.fields(record)]
    kinds = typing.get_type_hints(record)
    result = _of_arrays(kinds)
    return {name: result.get(name) for name in names if not _is_plain(kinds.get(name))}


def _is_plain(kind) -> bool:
    return all(part in _PLAIN for part in typing.get_args(kind) or (kind,))
