"""Divides the parameters of a test between the two tiers: what `pytest` runs, and `-m slow`."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def parametrize(
    names: str | Sequence[str], values: Iterable, *, first: int, **options: Any
) -> pytest.MarkDecorator:
    """Returns `pytest.mark.parametrize` whose values are slow but for the `first` ones."""
    several = len(names.split(",") if isinstance(names, str) else names) > 1

    def mark_slow(value: Any) -> Any:
        if isinstance(value, type(pytest.param())):
            return value._replace(marks=(*value.marks, pytest.mark.slow))
        return pytest.param(*(value if several else (value,)), marks=pytest.mark.slow)

    values = list(values)
    values = [*values[:first], *map(mark_slow, values[first:])]
    return pytest.mark.parametrize(names, values, **options)
