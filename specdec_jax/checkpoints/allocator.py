"""Keeps the C library from holding on to freed arrays while a model is loaded."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MAX_MMAP_THRESHOLD = 32 << 20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX


@contextlib.contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Makes glibc return freed blocks of 64 KiB and more to the system at once; does nothing
    elsewhere.

    glibc maps large blocks by themselves, but as it sees them freed it raises the size from which
    it does so, up to 32 MiB. Smaller blocks stay with the heap of the thread that asked for them.
    Loading frees an array for each one it keeps, in TensorStore's threads too; for models whose
    kernels are below that size the process would end up with twice the memory of the weights. After
    the block the thresholds are where glibc's own adjustment ends, so that the decode loop's
    buffers are kept.
    """
    mallopt = (
        getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    )  # Windows takes no None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # a kernel of T5 small in int8 has 192 KiB
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD)
