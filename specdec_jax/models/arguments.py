"""Checks the kinds of arguments, the same way everywhere: integers, numbers, flags, lists,
mappings.

Integers and numbers may be Python's, numpy's or JAX's. A bool is neither, nor is a string that
reads like one; so nothing is accepted that would be rounded or understood in another way than it
was meant.
"""

import contextlib
import inspect
import operator
import os
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.files.reading import shown


def quoted(value) -> str:
    """Returns an argument as a message quotes it: on one line, shortened if it is long."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        with contextlib.suppress(
            AttributeError, TypeError
        ):  # keys and traced arrays have no values to show
            value = value.tolist()
    return " ".join(shown(value).split())


def check_function(name: str, value: Any, parameters: str) -> None:
    """Checks that `value` can be called with the positional `parameters`, names divided by ", ".

    Raises ValueError otherwise.
    """
    expected = f"a function of ({parameters})"
    if not callable(value):
        raise ValueError(f"{name}: got {quoted(value)}, expected {expected}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*parameters.split(", "))
    except TypeError:
        raise ValueError(f"{name}: got a function of {signature}, expected {expected}") from None


def is_integer(value) -> bool:
    """Returns whether `value` is one integer."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def is_number(value) -> bool:
    """Returns whether `value` is one number, an integer or not."""
    array = as_array(value)
    return not array.ndim and _holds_numbers(array, whole=False)


def check_kind(name: str, value, kinds, expected: str) -> None:
    """Raises ValueError unless `value` is an instance of one of the classes `kinds`."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name}: got {quoted(value)}, expected {expected}")


def check_path(name: str, value) -> None:
    """Raises ValueError unless `value` is a path."""
    check_kind(name, value, str | os.PathLike, "a path")


def check_model(name: str, value) -> None:
    """Raises ValueError unless `value` has the parts of a `LanguageModel`."""
    if isinstance(value, str | os.PathLike):
        path = str(value)
        raise ValueError(
            f"{name}: got {path!r}, expected a LanguageModel, such as specdec_jax.load({path!r})"
        )
    if not (hasattr(value, "network") and hasattr(value, "config")):
        raise ValueError(
            f"{name}: got {type(value).__name__}, expected a LanguageModel, as from"
            " specdec_jax.load"
        )


def check_integer(name: str, value, least: int, most: int | None = None, what: str = "") -> int:
    """Returns an integer from `least` to `most`; `what` says in a message what `most` is."""
    found = operator.index(value) if is_integer(value) else None
    if found is None or found < least or (most is not None and found > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: got {quoted(value)}, expected an integer {bound}{what}")
    return found


def check_flag(name: str, value) -> bool:
    """Returns True or False."""
    check_kind(name, value, bool | np.bool_, "True or False")
    return bool(value)


def check_numbers(name: str, value, expected: str, whole: bool = False) -> np.ndarray:
    """Returns one number, or nested lists of numbers, as an array of their own dtype.

    Args:
      name: name of the argument.
      value: the argument.
      expected: what was expected, for the message.
      whole: whether they must be integers.

    Raises:
      ValueError: something that is no number, a bool, or lists of different lengths.
    """
    array = as_array(value)
    if not _holds_numbers(array, whole) or has_bool(value):
        raise ValueError(f"{name}: got {quoted(value)}, expected {expected}")
    return array


def check_number(name: str, value, expected: str) -> float:
    """Returns one number as a float; otherwise as `check_numbers`."""
    if not is_number(value):
        raise ValueError(f"{name}: got {quoted(value)}, expected {expected}")
    return float(value)


def check_list(name: str, value, expected: str) -> tuple[Any, ...]:
    """Returns the items of a list, tuple, set or array; a string or a mapping is none of these."""
    listed = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    if not listed or not getattr(value, "ndim", 1):
        raise ValueError(f"{name}: got {quoted(value)}, expected {expected}")
    return tuple(value)


def described(tree: Any) -> str:
    """Returns a pytree as text, with dtype and shape of each array in its place: int32[2, 3]."""
    leaves, structure = jax.tree.flatten(tree)
    text = str(structure).removeprefix("PyTreeDef(").removesuffix(")")
    for leaf in leaves:
        text = text.replace("*", f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", 1)
    return text


def is_default(value, default) -> bool:
    """Returns whether an argument is None or equals its default."""
    try:
        return value is None or bool(value == default)
    except ValueError:  # an array of several numbers
        return False


def as_array(value) -> np.ndarray:
    """Returns `value` as an array, of objects where it is no array of one kind."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError):  # traced, or lists of different lengths
        return np.empty((), object)


def _holds_numbers(array: np.ndarray, whole: bool) -> bool:
    kinds = (np.integer,) if whole else (np.integer, np.floating)
    return any(jnp.issubdtype(array.dtype, kind) for kind in kinds)


def has_bool(value) -> bool:
    """Returns whether a list has a bool among its items, which numpy turns into an integer beside
    others."""
    return isinstance(value, list | tuple) and bool in map(type, value)
