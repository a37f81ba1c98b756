"""Locks files and folders, so that one process at a time works at them."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def lock_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps other processes out of an existing folder during the block.

    The lock ends with the process. Where the system has no such locks (Windows), nobody is kept
    out.

    Raises:
      ValueError: another process holds the lock.
    """
    if os.name == "nt":
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        lock_file(number, folder)
        yield
    finally:
        os.close(number)


def lock_file(number: int, path: str | os.PathLike[str]) -> None:
    """Locks the open file `number`, whose path is `path`, until it is closed.

    Raises:
      ValueError: another process holds the lock, or has just finished and removed the file.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mine = False
    except OSError:  # a file system without locks, as NFS is for folders
        return
    else:
        mine = os.path.exists(path) and os.path.samestat(os.fstat(number), os.stat(path))
    if not mine:
        raise ValueError(f"{path}: another process is writing it, expected one at a time")
