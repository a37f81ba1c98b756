"""Files and folders that appear whole or not at all, in place of nothing that this package did not write.

Everything that the package writes goes through this module, but for files that grow: a job's journal, a training's log.
"""

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO


def write_file(path, content: str | bytes) -> None:
    """Writes one file, text as UTF-8; see `new_file`."""
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path) -> Iterator[BinaryIO]:
    """Opens a file that takes the name `path` at the end of the block, once it is on the disk.

    After an error nothing is new. The file gets the permissions of the one that it replaces. Where `path` is a symbolic
    link, the file that it leads to is replaced; of several hard links the others keep the old contents. A path for
    which `passes_through` holds is written to directly.

    Raises:
      OSError: with a file's name, whatever failed.
    """
    with naming(path):
        if passes_through(path):
            number = _descriptor(path)
            with open(path if number is None else os.dup(number), "wb") as file:
                yield file
            return
        place = os.path.realpath(path)
        before = _replaced(place)
        part = os.path.join(os.path.dirname(place), f".specdec-{secrets.token_hex(8)}.part")
        try:
            with open(part, "xb") as file:
                if before is not None:
                    _make_like(part, before)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, place)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise


@contextlib.contextmanager
def new_folder(folder, check: Callable[[pathlib.Path], None]) -> Iterator[pathlib.Path]:
    """Makes a folder to write into, which takes the name `folder` when the block ends; after an error nothing is new.

    Where `folder` is a symbolic link, what it leads to is replaced. Until then the folder is `.NAME.specdec-new`
    beside that, which a process that is killed leaves behind for the next one to take over.

    Args:
      check: raises ValueError where what is at `folder` must stay; called before the block and after it.

    Raises:
      ValueError: also where another process is writing the folder, and for a mount point, which cannot be replaced.
    """
    place = pathlib.Path(os.path.realpath(folder))
    new, old = (place.with_name(f".{place.name}.specdec-{which}") for which in ("new", "old"))
    check(place)
    if os.path.ismount(place):
        raise ValueError(f"{folder}: got a mount point, expected a folder in it")
    for path in (new, old):
        if path.is_symlink():
            raise ValueError(f"{path}: got a symbolic link, expected nothing there")
    new.mkdir(parents=True, exist_ok=True)
    with alone(new):
        try:
            _clear(new, old, place)
            yield new
            check(place)
            _exchange(new, place, old)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def passes_through(path) -> bool:
    """Whether `path` leads to what takes bytes and passes them on: a device, a pipe, a socket, or a file that this
    process has open (/dev/stdout, /dev/fd/3)."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def alone(folder) -> Iterator[None]:
    """Keeps other processes out of a folder that exists: raises ValueError where one of them has it.

    They are kept out by a lock that ends with the process; where the system has none (Windows), they are not.
    """
    if os.name == "nt":
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        lock(number, folder)
        yield
    finally:
        os.close(number)


def lock(number: int, path) -> None:
    """Locks the open file `number`, which is that at `path`, until it is closed.

    Raises:
      ValueError: another process has it, or has just finished and removed it.
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


@contextlib.contextmanager
def naming(path) -> Iterator[None]:
    """Puts the name `path` into an error of the system that names no file, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _descriptor(path) -> int | None:
    """Number of the open file of this process that `path` is another name of, by whatever symbolic links."""
    path = os.fspath(path)
    for _ in range(40):  # Linux follows as many
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder or os.curdir)
        if name.isdecimal() and re.fullmatch(rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd", folder):
            return int(name)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None


def _replaced(place: str) -> os.stat_result | None:
    """What is to be known of the file at `place`, None without one; raises OSError where it must not be written."""
    try:
        number = os.open(place, os.O_WRONLY)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(number)
    finally:
        os.close(number)


def _make_like(path: str, before: os.stat_result) -> None:
    """Gives a file the owner, as far as that is permitted, and the permissions that another one had."""
    if hasattr(os, "chown"):
        with contextlib.suppress(PermissionError):
            os.chown(path, before.st_uid, before.st_gid)
    os.chmod(path, stat.S_IMODE(before.st_mode))


def _clear(new: pathlib.Path, old: pathlib.Path, place: pathlib.Path) -> None:
    """Removes what a process that was killed has left."""
    if old.exists() and not place.exists():  # killed between its two renamings
        os.rename(old, place)
    shutil.rmtree(old, ignore_errors=True)
    for path in new.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _exchange(new: pathlib.Path, place: pathlib.Path, old: pathlib.Path) -> None:
    """Renames `new` to `place`, out of which goes what is there, if anything."""
    if not place.exists():
        os.rename(new, place)
        return
    shutil.copymode(place, new)
    os.rename(place, old)
    try:
        os.rename(new, place)
    except BaseException:
        os.rename(old, place)
        raise
    shutil.rmtree(old)


def check_output(path: str | None, name: str = "output") -> None:
    """Refuses a file for a result that could not be written hours later."""
    if not path or passes_through(path):
        return
    place = pathlib.Path(os.path.realpath(path))
    if path.endswith("/") or place.is_dir() or not place.parent.is_dir():
        raise ValueError(f"{name}: got {path!r}, expected a file in a folder that exists")
    for needed in (place.parent, place):
        if needed.exists() and not os.access(needed, os.W_OK):
            raise ValueError(f"{name}: got {path!r}, expected a file that may be written: {needed} may not")
