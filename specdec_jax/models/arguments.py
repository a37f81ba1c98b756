"""Checks the kinds of arguments, the same way everywhere: integers, numbers, flags, lists.

Integers and numbers may be Python's, numpy's or JAX's; bools and strings are neither. So nothing
is accepted that would be rounded, or understood in another way than it was meant.
"""

import contextlib
import dataclasses
import inspect
import operator
import os
import re
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.files.reading import mismatch_error, quote_value

AnyClass = TypeVar("AnyClass", bound=type)


def make_option(default: Any, text: str) -> Any:
    """Returns a field of a dataclass of options; `text` is its help on the command line."""
    return dataclasses.field(default=default, metadata={"help": text})


def read_attributes(cls: type) -> dict[str, str]:
    """Returns what the docstring of a class says of its attributes, by name."""
    listed = (inspect.getdoc(cls) or "").partition("Attributes:\n  ")[2]
    items = re.split(r"\n  (?=\S)", listed.split("\n\n")[0])
    texts = (" ".join(item.split()).partition(": ") for item in items)
    return {name: text for name, _, text in texts}


def document_fields(cls: AnyClass) -> AnyClass:
    """Gives fields of a dataclass of options their help, which its docstring has."""
    own = {field.name: field for field in dataclasses.fields(cls)}
    for name, text in read_attributes(cls).items():
        own[name].metadata = types.MappingProxyType({"help": text})
    return cls


def quote(value: Any) -> str:
    """Returns an argument as a message quotes it: on one line, shortened if it is long."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        with contextlib.suppress(AttributeError, TypeError):  # keys and traced arrays have none
            value = value.tolist()
    return " ".join(quote_value(value).split())


def check_function(name: str, value: Any, parameters: str) -> None:
    """Raises ValueError unless `value` can be called with `parameters`, names divided by ", "."""
    expected = f"a function of ({parameters})"
    if not callable(value):
        raise mismatch_error(name, quote(value), expected)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*parameters.split(", "))
    except TypeError:
        raise mismatch_error(name, f"a function of {signature}", expected) from None


def is_integer(value: Any) -> bool:
    """Returns whether `value` is one integer."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """Returns whether `value` is True or False, of Python, numpy or JAX, and not traced."""
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer):
        return not value.ndim and value.dtype == bool
    return isinstance(value, bool | np.bool_)


def is_number(value: Any) -> bool:
    """Returns whether `value` is one number, an integer or not."""
    array = as_array(value)
    return not array.ndim and _holds_numbers(array, whole=False)


def check_kind(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raises ValueError unless `value` is an instance of one of the classes `kinds`."""
    if not isinstance(value, kinds):
        raise mismatch_error(name, quote(value), expected)


def check_path(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a path."""
    check_kind(name, value, str | os.PathLike, "a path")


def check_model(name: str, value: Any) -> None:
    """Raises ValueError unless `value` has the parts of a `LanguageModel`."""
    if isinstance(value, str | os.PathLike):
        path = repr(str(value))
        raise mismatch_error(name, path, f"a LanguageModel, such as specdec_jax.load({path})")
    if not (hasattr(value, "network") and hasattr(value, "config")):
        raise mismatch_error(
            name, type(value).__name__, "a LanguageModel, as from specdec_jax.load"
        )


def check_integer(
    name: str, value: Any, least: int, most: int | None = None, what: str = ""
) -> int:
    """Returns an integer from `least` to `most`; `what` says in a message what `most` is."""
    found = operator.index(value) if is_integer(value) else None
    if found is None or found < least or (most is not None and found > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise mismatch_error(name, quote(value), f"an integer {bound}{what}")
    return found


def keep_integer(
    owner: Any, name: str, least: int, most: int | None = None, what: str = ""
) -> None:
    """Checks a field of a frozen dataclass as `check_integer` does, and keeps it as Python's.

    A 0-dimensional array of numpy's or JAX's has no hash, which a static field needs.
    """
    object.__setattr__(owner, name, check_integer(name, getattr(owner, name), least, most, what))


def keep_number(owner: Any, name: str, least: float, most: float) -> None:
    """Checks a field of a frozen dataclass as `check_range` does, and keeps it as Python's."""
    object.__setattr__(owner, name, check_range(name, getattr(owner, name), least, most))


def check_flag(name: str, value: Any) -> bool:
    """Returns True or False."""
    if not is_flag(value):
        raise mismatch_error(name, quote(value), "True or False")
    return bool(value)


def check_numbers(name: str, value: Any, expected: str, whole: bool = False) -> np.ndarray:
    """Returns one number, or nested lists of numbers, as an array of their own dtype.

    `expected` is for the message; `whole` numbers must be integers.

    Raises:
      ValueError: something that is no number, a bool, or lists of different lengths.
    """
    array = as_array(value)
    if not _holds_numbers(array, whole) or has_bool(value):
        raise mismatch_error(name, quote(value), expected)
    return array


def check_number(name: str, value: Any, expected: str) -> float:
    """Returns one number as a float; otherwise as `check_numbers`."""
    if not is_number(value):
        raise mismatch_error(name, quote(value), expected)
    return float(value)


def check_range(name: str, value: Any, least: float, most: float) -> float:
    """Returns a number from `least` to `most`."""
    if not is_number(value) or not least <= value <= most:
        raise mismatch_error(name, quote(value), f"a number from {least} to {most}")
    return float(value)


def check_sequences(sequences: Any, vocab_size: int) -> list[np.ndarray]:
    """Returns the sequences that are not empty, each as an array of ids below `vocab_size`.

    Raises:
      ValueError: no id at all, or something that is no id of the vocabulary.
    """
    check_kind("sequences", sequences, Iterable, "lists of integers")
    parts = [part for part in map(as_array, sequences) if part.size]
    if not parts:
        expected = "at least one sequence that is not empty"
        raise mismatch_error("sequences", "no id at all", expected)
    if any(part.ndim != 1 or not np.issubdtype(part.dtype, np.integer) for part in parts):
        raise mismatch_error("sequences", "something else than ids", "lists of integers")
    wrong = [part[(part < 0) | (part >= vocab_size)] for part in parts]
    if any(len(ids) for ids in wrong):
        first = np.concatenate(wrong)[0]
        raise mismatch_error("sequences", f"id {first}", f"ids from 0 to {vocab_size - 1}")
    return parts


def check_list(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """Returns the items of a list, tuple, set or array; a string or a mapping is none of these."""
    listed = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    if not listed or not getattr(value, "ndim", 1):
        raise mismatch_error(name, quote(value), expected)
    return tuple(value)


def describe(tree: Any) -> str:
    """Returns a pytree as text, with dtype and shape of each array in its place: int32[2, 3]."""
    leaves, structure = jax.tree.flatten(tree)
    text = str(structure).removeprefix("PyTreeDef(").removesuffix(")")
    for leaf in leaves:
        text = text.replace("*", f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", 1)
    return text


def is_default(value: Any, default: Any) -> bool:
    """Returns whether an argument is None or equals its default."""
    try:
        return value is None or bool(value == default)
    except (TypeError, ValueError):  # an array of several numbers, or of keys
        return False


def as_array(value: Any) -> np.ndarray:
    """Returns `value` as an array, of objects where it is no array of one kind."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError):  # traced, or lists of different lengths
        return np.empty((), object)


def _holds_numbers(array: np.ndarray, whole: bool) -> bool:
    kinds = (np.integer,) if whole else (np.integer, np.floating)
    return any(jnp.issubdtype(array.dtype, kind) for kind in kinds)


def has_bool(value: Any) -> bool:
    """Returns whether a list has a bool, which numpy turns into an integer beside others."""
    return isinstance(value, list | tuple) and bool in map(type, value)
