"""Folders of a store that are written on this machine, and copied there at chosen moments.

For what writes many files to a disk and must find them again after a kill, such as a training run.
`open_folder` begins with what was copied last; `copy_folder` copies what has changed. Where the
folder lies on this machine both do nothing.
"""

import contextlib
import itertools
import json
import os
import pathlib
import secrets
from collections.abc import Collection, Iterator
from typing import Any

from specdec_jax.files import places, reading, user_cache, writing
from specdec_jax.files.places import AnyPath, FolderCopy, RemotePath
from specdec_jax.files.reading import PathLike

RECORD = "files.json"  # in the store: the files of the last whole copy, and who writes them
_TEMPORARY = ".orbax-checkpoint-tmp"  # in names of what a checkpoint that is being written has


class Mirror:
    """A folder of a store, and the folder on this machine that is copied to it.

    Attributes:
      path: the folder on this machine.
    """

    def __init__(self, remote: RemotePath, path: pathlib.Path):
        """Copies the folder of the store to an empty one on this machine.

        Raises:
          ValueError: the store has other files there, or lacks some.
          OSError: the store cannot be written.
        """
        self.path, self._remote, self._owner = path, remote, secrets.token_hex(8)
        names = _read_names(remote)
        sizes = dict(remote.list_files()) if names else {}
        for name in names:
            if name not in sizes:
                raise ValueError(f"{remote}: got no {name}, expected all files of its {RECORD}")
        if names:
            remote.download({name: sizes[name] for name in names}, path)
        self._copied = self._read_stamps()
        self._write(self._copied)

    def copy(self) -> None:
        """Copies what has changed, and removes from the store what was removed here.

        Whenever it is interrupted, the record in the store has only files that belong together.

        Raises:
          ValueError: another process writes to the same folder.
          OSError: the store cannot be written.
        """
        os.utime(self.path)  # a folder untouched for a day counts as abandoned
        found = self._read_stamps()
        if found == self._copied:
            return
        self._check_owner()
        changed = [name for name in found if found[name] != self._copied.get(name)]
        # Checkpoints of which a file is replaced are whole again only with their last file.
        replaced = {_name_unit(name) for name in changed if "/" in name and name in self._copied}
        if replaced:
            self._write([name for name in self._copied if _name_unit(name) not in replaced])
        for _, alike in itertools.groupby(sorted(sorted(changed), key=_order), _order):
            self._remote.upload_files(self.path, alike)
        gone, self._copied = self._copied.keys() - found.keys(), found
        self._write(found)
        for name in sorted(gone):
            (self._remote / name).unlink(missing_ok=True)

    def _read_stamps(self) -> dict[str, tuple[int, int]]:
        """Returns size and time of each file here, by its path in the folder."""
        files = [path for path in self.path.rglob("*") if path.is_file()]
        stamps = {}
        for path in files:
            name, status = path.relative_to(self.path).as_posix(), path.stat()
            if _TEMPORARY not in name:
                stamps[name] = status.st_size, status.st_mtime_ns
        return stamps

    def _write(self, names: Collection[str]) -> None:
        record = {"writer": self._owner, "files": sorted(names)}
        writing.write_file(self._remote / RECORD, json.dumps(record, indent=1) + "\n")

    def _check_owner(self) -> None:
        if _read_record(self._remote.refresh())["writer"] != self._owner:
            got = "another process is writing it"
            raise ValueError(f"{self._remote}: {got}, expected one at a time")


def _read_record(folder: RemotePath) -> dict[str, Any]:
    record = reading.read_json(folder / RECORD)
    files: Any = record.get("files")
    sound = isinstance(record.get("writer"), str) and isinstance(files, list)
    if not sound or not all(isinstance(name, str) for name in files):
        got = reading.quote_value(record)
        raise ValueError(f"{folder / RECORD}: got {got}, expected a writer, and names of files")
    return record


def _read_names(folder: RemotePath) -> list[str]:
    """Returns the names of the files that the last whole copy left.

    Raises ValueError for a folder with files of something else.
    """
    if (folder / RECORD).is_file():
        return _read_record(folder)["files"]
    if folder.is_file() or (folder.is_dir() and folder.list_files()):
        expected = f"none, or what this package has written there, with its {RECORD}"
        raise ValueError(f"{folder}: got a folder with other files, expected {expected}")
    return []


def _name_unit(name: str) -> str:
    """Returns the name of what belongs together: a folder, or of checkpoints those of a step."""
    first, *rest = name.split("/")
    return f"{first}/{rest[0]}" if len(rest) > 1 and rest[0].isdecimal() else first


def _order(name: str) -> tuple[bool, bool]:
    """Returns by what files are copied in turn: what makes a folder whole comes last."""
    return "/" not in name, pathlib.PurePosixPath(name).name in writing.MARKS


_open: dict[str, Mirror] = {}  # by the URL, those of the blocks of `open_folder` that are running


@contextlib.contextmanager
def open_folder(path: PathLike) -> Iterator[pathlib.Path]:
    """Yields a folder on this machine: `path` itself, or a copy of it if it lies in a store.

    In the block `find_folder` gives the copy and `copy_folder` copies it to the store, as the
    block's end does unless there is an error.

    Raises:
      ValueError, OSError: as for `Mirror`.
    """
    place = places.make_path(path)
    if not isinstance(place, RemotePath) or str(place) in _open:
        yield find_folder(place)
        return
    with user_cache.scratch_folder(user_cache.private_folder("runs")) as folder:
        mirror = _open[str(place)] = Mirror(place, folder)
        try:
            yield folder
            mirror.copy()
        finally:
            del _open[str(place)]


def find_folder(path: PathLike) -> pathlib.Path:
    """Returns the folder on this machine for a folder that is open, or lies here."""
    place = places.make_path(path)
    return _open[str(place)].path if isinstance(place, RemotePath) else place.absolute()


def copy_folder(path: PathLike) -> None:
    """Copies a folder that is open to its store; does nothing for one on this machine."""
    place = places.make_path(path)
    if isinstance(place, RemotePath):
        _open[str(place)].copy()


def name_inside(path: PathLike, name: str) -> AnyPath:
    """Returns the path under which users find a file of a folder."""
    return places.make_path(path).absolute() / name


@contextlib.contextmanager
def read_folder(path: PathLike) -> Iterator[pathlib.Path]:
    """Yields a folder on this machine with the files of `path`, which is only read.

    Raises:
      ValueError: the store fails, or has other files there.
    """
    place = places.make_path(path)
    if not isinstance(place, RemotePath) or str(place) in _open:
        yield find_folder(place)
        return
    copy = FolderCopy(place, _read_names(place))
    yield copy.path
