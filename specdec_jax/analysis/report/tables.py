"""Lays out numbers, tables, notes and figures as parts of the page."""

import re
from collections.abc import Sequence
from typing import Any

from specdec_jax.analysis.report import plots
from specdec_jax.analysis.report.markup import Markup, element, join
from specdec_jax.analysis.timing import Spread


def table(caption: str, head: Sequence[str], lines: Sequence[Sequence[Any]]) -> Markup:
    """Returns a table; columns of words are aligned to the left, columns of numbers to the right."""
    words = [any(_is_text(values[column]) for values in lines) for column in range(len(head))]

    def cell(tag, value, text):
        return element(tag, value, class_="text") if text else element(tag, value)

    def line(values, tag):
        return element("tr", *(cell(tag, *pair) for pair in zip(values, words, strict=True)))

    return element(
        "table",
        element("caption", caption),
        line(head, "th"),
        *(line(values, "td") for values in lines),
    )


def _is_text(value: object) -> bool:
    """Returns whether a cell begins with a word, and not with a number or a dash."""
    return bool(re.match(r"\s*[^\W\d]", str(value)))


def note(*children: object) -> Markup:
    return element("p", *children, class_="note")


def drawing(caption: str, figure) -> Markup:
    return join(element("h3", caption), plots.svg(figure))


def decimal(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def with_bare(value: float | None, bare: float | None, digits: int) -> str:
    """Returns a cost as text, with the cost of its bare matrix products in parentheses."""
    return decimal(value, digits) + ("" if bare is None else f" ({bare:.{digits}f})")


def rate(alpha: float | None, drafted: float | None) -> str:
    """Returns α per position of the output as text, with that where something was drafted in
    parentheses if it is another."""
    return decimal(alpha, 3) + ("" if drafted in (None, alpha) else f" ({drafted:.3f})")


def spread_text(spread: Spread | None) -> str:
    return (
        "-" if spread is None else f"{spread.median:.3f} ({spread.least:.3f} to {spread.most:.3f})"
    )
