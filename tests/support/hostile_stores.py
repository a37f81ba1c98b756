"""Hostile files that lie in a store: those of the other modules, read from `memory://`."""

import hostile_cases
import hostile_formats  # noqa: F401  adds its cases
import hostile_languages
import hostile_pytorch  # noqa: F401

# What no store has, or what is too large for one in memory.
_WITHOUT = ("pipe", "folder", "socket", "link", "gigabyte", "again and again", "no path")
_READERS = ("load", "heads", "table", "sorted text", "tokenizer")
_EVERY = 13  # one in so many is in the first tier


def in_a_store(cases: dict[str, hostile_cases.Case]) -> dict[str, hostile_cases.Case]:
    """Returns the same cases, read from a store."""
    return {
        f"in a store: {name}": case._replace(read=f"remote {case.read}")
        for name, case in cases.items()
        if case.read in _READERS and not any(word in name for word in _WITHOUT)
    }


STORES = in_a_store(hostile_cases.CASES)
QUICK = dict(list(STORES.items())[::_EVERY])
STORES |= in_a_store(hostile_languages.ALL)
