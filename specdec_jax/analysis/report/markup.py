"""Builds HTML of elements: the one place where text becomes HTML."""

import html
import re

# Code points that HTML cannot hold: controls, halves of surrogate pairs, and two noncharacters.
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Returns an element; children that are not `Markup` are escaped, as are the values of its
    attributes.

    An underscore at the end of an attribute's name keeps it from being a keyword (`class_`).
    """
    given = "".join(
        f' {name.rstrip("_")}="{_escaped(value)}"' for name, value in attributes.items()
    )
    return Markup(f"<{tag}{given}>{join(*children)}</{tag}>")


def join(*children: object) -> Markup:
    """Returns the children one after the other, escaped unless they are `Markup`."""
    return Markup(
        "".join(child if isinstance(child, Markup) else _escaped(child) for child in children)
    )


def printable(text: str) -> str:
    """Returns the text with a replacement character for each character that no page can hold."""
    return _NO_TEXT.sub("\ufffd", text)


def _escaped(value: object) -> str:
    return html.escape(printable(str(value)))
