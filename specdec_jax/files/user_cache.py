"""Finds the user's cache folder and makes folders in it that nobody else can write to."""

import contextlib
import os
import pathlib
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator

from specdec_jax.files.locks import lock_folder

_ABANDONED = 86_400  # seconds after which an unlocked temporary folder is nobody's
_INSIDE = "inside"  # name of what is yielded in one


def cache_folder() -> pathlib.Path:
    """Returns the cache folder: `$XDG_CACHE_HOME/specdec_jax`, or `~/.cache/specdec_jax`.

    Raises:
      ValueError: the user has no home folder.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise ValueError("got no home folder, expected HOME or XDG_CACHE_HOME to be set") from error
    return pathlib.Path(base) / "specdec_jax"


def private_folder(name: str) -> pathlib.Path:
    """Returns the folder `name` in the cache, made if missing; only this user may read or write it.

    Raises:
      ValueError: another user could change what lies in it.
      OSError: it cannot be made.
    """
    place = pathlib.Path(os.path.realpath(cache_folder() / name))
    _check(place)
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        _check(place)  # another user may have made it in the meantime
    return place


@contextlib.contextmanager
def scratch_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a temporary folder in `folder` and removes it at the end of the block.

    Also removes temporary folders that killed processes left there more than a day ago. What is
    yielded lies inside another folder, which is locked: the caller may lock its own.
    """
    for left in folder.glob("tmp-*"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: a process works there
            # Where there are no locks, the time counts at which the user touched what it was given.
            touched = max(path.stat().st_mtime for path in (left, *left.glob(_INSIDE)))
            if time.time() - touched > _ABANDONED:
                with lock_folder(left):
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=folder, ignore_cleanup_errors=True) as path:
        with lock_folder(path):
            (inside := pathlib.Path(path, _INSIDE)).mkdir()
            yield inside


def _check(place: pathlib.Path) -> None:
    """Raises ValueError if another user may write to `place`, or put something else in its place.

    A folder above it that everybody may write to is accepted only if its sticky bit, as on /tmp,
    keeps others from renaming or removing what is in it. The folders above the cache itself belong
    to the system, whoever owns them.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return
    me, base = os.geteuid(), pathlib.Path(os.path.realpath(cache_folder().parent))
    for path in (place, *place.parents):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
        if path.is_relative_to(base) and owner not in ({me} if path == place else {me, 0}):
            raise ValueError(f"{path}: got a folder of user {owner}, expected one of user {me}")
        if path == place and mode & 0o077 and stat.S_ISDIR(status.st_mode):
            expected = "700, since others could change what is in it"
            raise ValueError(f"{path}: got permissions {mode:o}, expected {expected}")
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            got = "a folder that everybody may write to"
            raise ValueError(f"{path}: got {got}, expected none above the cache")
