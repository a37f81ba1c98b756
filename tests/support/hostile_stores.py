"""Hostile files that lie in a store: those of the other modules, read from `memory://`."""

import hostile_cases
import hostile_formats  # noqa: F401  adds its cases
import hostile_pytorch  # noqa: F401

# What no store has, or what is too large for one in memory.
_WITHOUT = ("pipe", "folder", "socket", "link", "gigabyte", "again and again", "no path")
_READERS = ("load", "heads", "table", "sorted text")
_EVERY = 13  # one in so many is in the first tier

STORES = {
    f"in a store: {name}": case._replace(read=f"remote {case.read}")
    for name, case in hostile_cases.CASES.items()
    if case.read in _READERS and not any(word in name for word in _WITHOUT)
}
QUICK = dict(list(STORES.items())[::_EVERY])
