"""Writes files and folders that appear whole or not at all.

Nothing is replaced that this package did not write. What goes to a store (`places`) is written on
this machine first and copied at the end. Everything that the package writes goes through
this module, except files that grow: the output of a command that resumes, the log of a training
run.
"""

import contextlib
import itertools
import os
import pathlib
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from specdec_jax.files import places, user_cache
from specdec_jax.files.locks import lock_folder
from specdec_jax.files.places import AnyPath, RemotePath
from specdec_jax.files.reading import PathLike, mismatch_error

# Bytes of a file's name on every system, and the longest ending of a file beside an output.
_LONGEST_NAME, _LONGEST_ENDING = 255, ".metrics.json"


def write_file(path: PathLike, content: str | bytes) -> None:
    """Writes one file, text as UTF-8; see `open_new_file`."""
    with open_new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_new_file(path: PathLike) -> Iterator[BinaryIO]:
    """Opens a file that takes the name `path` at the end of the block, once it is on the disk.

    After an error the old file, if any, is unchanged. The new one gets the permissions of the file
    that it replaces. If `path` is a symbolic link, the file that it leads to is replaced; of
    several hard links the others keep the old contents. A path for which `is_pass_through` holds is
    written to directly.

    Raises:
      OSError: something failed; the error names the file.
    """
    path = places.make_path(path)
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder, "new")
            with name_errors(copy), open(copy, "xb") as file:
                yield file
            path.upload(copy)
        return
    with name_errors(path):
        if is_pass_through(path):
            number = _find_descriptor(path)
            with open(path if number is None else os.dup(number), "wb") as file:
                yield file
            return
        place = os.path.realpath(path)
        before = _read_status(place)
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
def open_new_folder(folder: PathLike, check: Callable[[AnyPath], None]) -> Iterator[pathlib.Path]:
    """Makes a folder that takes the name `folder` when the block ends.

    After an error nothing has changed. If `folder` is a symbolic link, what it leads to is
    replaced. Until the block ends the new folder is called `.NAME.specdec-new` and lies beside the
    old one. A process that is killed leaves it behind; the next one empties it and takes it over.

    A store cannot rename: the new files are copied one after the other, and those by which a folder
    is recognised last, once the old folder's are removed.

    Args:
      folder: path of the folder.
      check: raises ValueError if what is at `folder` must stay; called before the block and after
        it.

    Raises:
      ValueError: also if another process is writing the folder, or for a mount point, which cannot
        be replaced.
    """
    remote = places.make_path(folder)
    if isinstance(remote, RemotePath):
        check(remote)
        with user_cache.scratch_folder(user_cache.private_folder("remote")) as new:
            yield new
            remote = remote.refresh()  # its listings are of before
            check(remote)
            _replace_remote(new, remote)
        return
    place = pathlib.Path(os.path.realpath(remote))
    new, old = (place.with_name(f".{place.name}.specdec-{which}") for which in ("new", "old"))
    check(place)
    if os.path.ismount(place):
        raise ValueError(f"{folder}: got a mount point, expected a folder in it")
    for path in (new, old):
        if path.is_symlink():
            raise ValueError(f"{path}: got a symbolic link, expected nothing there")
    new.mkdir(parents=True, exist_ok=True)
    with lock_folder(new):
        try:
            _clear(new, old, place)
            yield new
            check(place)
            _exchange(new, place, old)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


MARKS = ("config.json", "_METADATA", "checkpoint")  # what tells readers that a folder is whole


def _replace_remote(new: pathlib.Path, remote: RemotePath) -> None:
    """Copies the files of `new` to a folder of a store, and removes the others there."""
    before = remote.list_files() if remote.exists() else []
    for name, _ in sorted(before, key=lambda file: pathlib.PurePath(file[0]).name not in MARKS):
        (remote / name).unlink()
    files = sorted(path.relative_to(new) for path in new.rglob("*") if path.is_file())

    def order(path: pathlib.Path) -> tuple[bool, bool]:
        return path.name in MARKS, len(path.parts) == 1

    for _, alike in itertools.groupby(sorted(files, key=order), order):
        remote.upload_files(new, map(pathlib.Path.as_posix, alike))


def is_pass_through(path: PathLike) -> bool:
    """Returns whether `path` leads to something that passes bytes on.

    That is a device, a pipe, a socket, or a file that this process has open (/dev/stdout,
    /dev/fd/3).
    """
    if places.is_remote(path):
        return False
    path = places.make_path(path)
    if _find_descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def name_errors(path: PathLike) -> Iterator[None]:
    """Adds the name `path` to a system error that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _find_descriptor(path: PathLike) -> int | None:
    """Returns the number of this process's open file that `path` leads to, None for other paths."""
    path = os.fspath(path)
    for _ in range(40):  # Linux follows as many
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder or os.curdir)
        if name.isdecimal() and re.fullmatch(
            rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd", folder
        ):
            return int(name)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None


def _read_status(place: str) -> os.stat_result | None:
    """Returns the status of the file at `place`, None if there is none.

    Raises:
      OSError: the file must not be written.
    """
    try:
        number = os.open(place, os.O_WRONLY)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(number)
    finally:
        os.close(number)


def _make_like(path: str, before: os.stat_result) -> None:
    """Gives a file the permissions of another, and its owner as far as that is permitted."""
    if hasattr(os, "chown"):
        with contextlib.suppress(PermissionError):
            os.chown(path, before.st_uid, before.st_gid)
    os.chmod(path, stat.S_IMODE(before.st_mode))


def _clear(new: pathlib.Path, old: pathlib.Path, place: pathlib.Path) -> None:
    """Puts an old folder back and removes everything else that a killed process left behind."""
    if old.exists() and not place.exists():  # killed between the two renames of `_exchange`
        os.rename(old, place)
    shutil.rmtree(old, ignore_errors=True)
    for path in new.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _exchange(new: pathlib.Path, place: pathlib.Path, old: pathlib.Path) -> None:
    """Renames `new` to `place`; what is there is first moved to `old`, and removed at the end."""
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


def check_output(path: str | None, name: str = "output", source: str | None = None) -> None:
    """Raises ValueError for a path that cannot be written, before hours of work are lost.

    It is also raised for the path of the input, `source`.
    """
    if not path:
        return
    check_name(path, name)
    if is_pass_through(path):
        return
    if source and places.is_same(path, source):
        raise mismatch_error(name, f"{path!r}, which is the input", "another file")
    remote = places.make_path(path)
    if isinstance(remote, RemotePath):
        if path.endswith("/") or remote.parent == remote or remote.is_dir():
            raise ValueError(f"{name}: got {path!r}, expected a file in a bucket or folder")
        _check_remote(remote, name)
        return
    place = pathlib.Path(os.path.realpath(remote))
    if path.endswith("/") or place.is_dir() or not place.parent.is_dir():
        raise ValueError(f"{name}: got {path!r}, expected a file in a folder that exists")
    for needed in (place.parent, place):
        if needed.exists() and not os.access(needed, os.W_OK):
            raise mismatch_error(name, repr(path), f"a file that may be written: {needed} may not")


def check_name(path: str, name: str) -> None:
    """Raises ValueError for a name that no file can have, or none of those beside it."""
    if "\0" in path:
        raise mismatch_error(name, repr(path), "a name without NUL")
    if places.is_remote(path):
        return
    most, place = _LONGEST_NAME - len(_LONGEST_ENDING), os.path.realpath(places.make_path(path))
    if (size := len(os.fsencode(os.path.basename(place)))) > most:
        raise mismatch_error(name, f"a name of {size} bytes", f"at most {most}")


def _check_remote(path: RemotePath, name: str) -> None:
    """Raises ValueError if a file cannot be written to a store, by writing one beside it.

    Only a store knows who may write what. But nothing can ever be added to a commit of the Hub.
    """
    if path.scheme == "hf" and re.search(r"@[0-9a-f]{40}(/|$)", str(path)):
        raise mismatch_error(name, f"{str(path)!r}, which names a commit", "a branch")
    tried = path.with_name(f".specdec-{secrets.token_hex(8)}.check")
    try:
        tried.create(b"\n")
    except OSError as error:
        raise ValueError(f"{name}: {error}") from error
    with contextlib.suppress(OSError):  # some may write and not remove
        tried.unlink()
