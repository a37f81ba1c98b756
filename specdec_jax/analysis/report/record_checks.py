"""Checks records against the types of what the report reads of them."""

import functools
import re
import types
import typing
from typing import Annotated, Any, Literal, NotRequired

from specdec_jax.analysis.report.record_types import (
    MOST_CHARACTERS,
    MOST_ITEMS,
    DrawnTree,
    Measured,
    ShownTree,
    SpreadRecord,
    kind_of,
)
from specdec_jax.analysis.tree_drawing import Drawn


def check(record: Any) -> None:
    """Raises ValueError for a record that the tables and figures could not show.

    The message says which part of the record is wrong, what was got, and what was expected.
    """
    if not isinstance(record, dict):
        raise ValueError(f"got {_shown(record)}, expected an object")
    kind = kind_of(record)
    _check(record, kind, "")
    if kind is Measured:
        by_position, table = record["acceptance"]["by_position"], record["table"]
        for name, values in by_position.items():
            if len(values) != len(table) or any(name not in row["by_position"] for row in table):
                raise ValueError(
                    f"acceptance.by_position: got {_shown(name)}, expected it in every row of the table"
                )


def _check(value: Any, kind: Any, name: str) -> None:
    """Raises ValueError for a value that is not of a kind; `name` is its path in the record."""
    least, most = 0, MOST_ITEMS
    if typing.get_origin(kind) is Annotated:
        kind, least, most = typing.get_args(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:  # T | None
        if value is not None:
            _check(value, parts[0], name)
        return
    expect = functools.partial(_expect, name, value)
    if typing.is_typeddict(kind):
        expect(isinstance(value, dict), "an object")
        hints = typing.get_type_hints(kind, include_extras=True)
        for key, part in hints.items():
            part = typing.get_args(part)[0] if typing.get_origin(part) is NotRequired else part
            if key in kind.__required_keys__ and key not in value:
                raise ValueError(f"{name}{key}: got nothing, expected a value")
            if key in value:
                _check(value[key], part, f"{name}{key}.")
        if kind is SpreadRecord:
            expect(
                value["least"] <= value["median"] <= value["most"],
                "a median between least and most",
            )
        if kind in (DrawnTree, ShownTree):
            try:
                Drawn.read(value)
            except ValueError as error:
                raise ValueError(f"{name}{error}") from None
    elif origin is Literal:
        expect(isinstance(value, str) and value in parts, f"one of {', '.join(parts)}")
    elif origin is list:
        expect(isinstance(value, list) and len(value) <= most, f"a list of at most {most}")
        for number, item in enumerate(value):
            _check(item, parts[0], f"{name}{number}.")
    elif origin is tuple:
        expect(isinstance(value, list) and len(value) == len(parts), f"a list of {len(parts)}")
        for number, (item, part) in enumerate(zip(value, parts)):
            _check(item, part, f"{name}{number}.")
    elif origin is dict:
        expect(isinstance(value, dict) and len(value) <= most, f"an object of at most {most}")
        for key, item in value.items():
            if parts[0] is int:
                _expect(
                    f"{name} key", key, re.fullmatch("[0-9]{1,6}", key) is not None, "an integer"
                )
            else:
                _check(key, parts[0], f"{name} key")
            _check(item, parts[1], f"{name}{_shown(key)}.")
    elif kind is str:
        expect(
            isinstance(value, str) and len(value) <= MOST_CHARACTERS,
            f"text of at most {MOST_CHARACTERS} characters",
        )
    elif kind in (int, float):
        whole = isinstance(value, int if kind is int else int | float) and not isinstance(
            value, bool
        )
        what = "an integer" if kind is int else "a number"
        expect(
            whole and least <= value <= most, f"{what} from {least:g} to {most:g}"
        )  # NaN is in no range
    else:
        expect(isinstance(value, kind), {bool: "true or false", list: "a list"}[kind])


def _expect(name: str, value: Any, fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"{name.rstrip('.') or 'record'}: got {_shown(value)}, expected {what}")


def _shown(value: Any) -> str:
    """Returns a value as a message quotes it."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
