"""Finds files wherever they are: on this machine, or in a store that fsspec opens by a URL.

A path with a scheme, such as `gs://bucket/model`, `s3://…`, `memory://…` or `hf://…`, becomes a
`RemotePath`; every other one a `pathlib.Path`. Both have the same methods, so that readers need not
know which they have. The packages behind a scheme are imported when the first such path is used.
"""

import contextlib
import errno
import functools
import io
import os
import pathlib
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from specdec_jax.files import user_cache

if TYPE_CHECKING:  # an overview of commands needs no NumPy
    import numpy as np
    import numpy.typing as npt

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_EXTRA = "expected the extra: pip install '.[remote]'"
# The bytes that one request asks for; the requests of a block run at the same time.
_REQUEST_BYTES = 4 << 20
# Of the blocks of an array: at most this, and an eighth of the array.
_BLOCK_BYTES, _LEAST_BYTES = 32 << 20, 4 << 20
_BUFFER_BYTES = 1 << 20  # of files that are read from the start to the end
_UPLOADS = 8  # files that are copied to a store at a time: each may take 50 MB of memory
_MOST_FILES = 200_000  # in a folder that is copied
_WITHOUT_FOLDERS = ("gs", "gcs", "s3", "s3a", "az", "abfs", "memory")


class Status(NamedTuple):
    """What is known of a file or a folder in a store; names as in `os.stat_result`."""

    st_size: int
    st_mode: int


class _Store(NamedTuple):
    """What the paths below one root share.

    Attributes:
      system: fsspec's file system.
      root: the path from which the others were made.
      listings: what lies in each folder below the root, by the folder's key and the name.
    """

    system: Any
    root: str
    listings: dict[str, dict[str, dict]]


@functools.total_ordering
class RemotePath:
    """A file or a folder in a store, with the methods of `pathlib.Path` that readers use.

    Each folder is listed once for all paths that were made of one, so that looking for a file costs
    no request. What is written in the meantime is seen by a new `make_path`.
    """

    def __init__(self, store: _Store, url: str, key: str):
        """Makes a path; use `make_path`.

        Args:
          store: the file system, and what is known of it.
          url: the whole path, without a slash at its end.
          key: the path as the file system calls it.
        """
        self._store, self._url, self._key = store, url, key

    @property
    def scheme(self) -> str:
        """The scheme in small letters, e.g. "gs"."""
        return self._url.partition("://")[0].lower()

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return pathlib.PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        start = self._url.index("://") + 3
        if "/" not in self._url[start:]:
            return self
        return self._move(self._url.rpartition("/")[0], self._key.rpartition("/")[0])

    def __str__(self) -> str:
        return self._url

    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __lt__(self, other: "RemotePath") -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str | pathlib.PurePath) -> "RemotePath":
        path = self
        for part in pathlib.PurePosixPath(name).parts:
            path = path._move(f"{path._url}/{part}", f"{path._key.rstrip('/')}/{part}")
        return path

    def with_name(self, name: str) -> "RemotePath":
        """Returns the path of another file in the same folder."""
        return self.parent / name

    def relative_to(self, folder: "RemotePath") -> pathlib.PurePosixPath:
        """Returns the rest of the path from one of its folders on."""
        return pathlib.PurePosixPath(self._url).relative_to(folder._url)

    def absolute(self) -> "RemotePath":
        """Returns the path: a URL is absolute."""
        return self

    def refresh(self) -> "RemotePath":
        """Returns the same path, of which nothing is known yet."""
        self._store.system.invalidate_cache()
        return RemotePath(_Store(self._store.system, self._url, {}), self._url, self._key)

    def _move(self, url: str, key: str) -> "RemotePath":
        return RemotePath(self._store, url, key)

    # Reading. Errors of a store are ValueErrors of one line, as of all unsound inputs.

    def exists(self) -> bool:
        """Returns whether there is a file or a folder."""
        return self._find() is not None or (not self._is_below() and bool(self._list()))

    def is_file(self) -> bool:
        """Returns whether there is a file."""
        return (found := self._find()) is not None and found["type"] != "directory"

    def is_dir(self) -> bool:
        """Returns whether there is a folder."""
        found = self._find()
        if self._is_below() or found and found["type"] == "directory":
            return found is not None and found["type"] == "directory"
        return bool(self._list())  # a store without folders may know none

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yields what lies in the folder."""
        return (self / name for name in self._list())

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yields the files of the folder and its subfolders whose name fits a pattern."""
        for name, _ in self.list_files():
            if pathlib.PurePosixPath(name).match(pattern):
                yield self / name

    def list_files(self) -> list[tuple[str, int | None]]:
        """Returns path and size of all files in the folder and its subfolders.

        A size is None where the listing does not give it, as over `http://`.

        Raises:
          ValueError: there are too many, or a path leads out of the folder.
        """
        with _name_errors(self._url, ValueError, "a folder"):
            found = self._store.system.find(self._key, detail=True)
        files = [
            (key.removeprefix(self._key).lstrip("/"), entry.get("size"))
            for key, entry in found.items()
        ]
        if len(files) > _MOST_FILES:
            got = f"{len(files):,} files"
            raise ValueError(f"{self}: got {got}, expected at most {_MOST_FILES:,}")
        for name, _ in files:
            if not name.isprintable() or ".." in name.split("/") or "\\" in name:
                raise ValueError(f"{self}: got the file {name[:100]!r}, expected one inside")
        return files

    def stat(self) -> Status:
        """Returns the size, and whether it is a file or a folder.

        Raises:
          FileNotFoundError: there is neither.
        """
        found = self._find()
        if found is None or found["type"] == "directory":
            if not self.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._url)
            return Status(0, stat.S_IFDIR)
        if found.get("size") is None:
            with _name_errors(self._url):
                found = self._store.system.info(self._key)
        if not isinstance(found.get("size"), int):
            raise ValueError(f"{self}: got a file of unknown size, expected one that can be read")
        return Status(found["size"], stat.S_IFREG)

    def open(self) -> io.BufferedReader:
        """Opens the file to read bytes."""
        return io.BufferedReader(_Reader(self), _BUFFER_BYTES)

    def read_bytes(self) -> bytes:
        """Returns the contents of the file."""
        return bytes(self.read_range(0, self.stat().st_size))

    def read_range(self, start: int, count: int) -> bytearray:
        """Returns `count` bytes from `start` on; a large range by several requests at a time.

        Raises:
          ValueError: the store fails, or has fewer bytes.
        """
        begins = range(start, start + count, _REQUEST_BYTES)
        ends = [min(begin + _REQUEST_BYTES, start + count) for begin in begins]
        with _name_errors(self._url):
            parts = self._store.system.cat_ranges([self._key] * len(ends), list(begins), ends)
            for part in parts:
                if isinstance(part, Exception):
                    raise part
        data = bytearray(count)
        for begin, end, part in zip(begins, ends, parts, strict=True):
            if len(part) != end - begin:
                got = f"{len(part):,} bytes of {end - begin:,} at {begin:,}"
                raise ValueError(f"{self}: got {got}, expected all and no more (truncated?)")
            data[begin - start : end - start] = part
        return data

    def download(self, sizes: dict[str, int | None], folder: pathlib.Path) -> None:
        """Copies files of this folder, or the file itself, to a folder on this machine.

        Args:
          sizes: size of each file, as far as it is known, by its path from here on, "" for the
            file itself.
          folder: where the copies get the same paths, and the file its own name.
        """
        remote = {name: self / name for name in sizes}
        copies = {name: folder / (name or self.name) for name in sizes}
        for copy in copies.values():
            copy.parent.mkdir(parents=True, exist_ok=True)
        with _name_errors(self._url):
            keys = [path._key for path in remote.values()]
            self._store.system.get(keys, list(map(str, copies.values())))
        for name, copy in copies.items():
            got, expected = copy.stat().st_size if copy.is_file() else 0, sizes[name]
            if expected is not None and got != expected:
                what = f"got {got:,} bytes, expected {expected:,} (truncated?)"
                raise ValueError(f"{remote[name]}: {what}")

    # Writing. Errors are OSErrors of one line, as those of a disk.

    def upload(self, path: pathlib.Path) -> None:
        """Copies the file at `path` on this machine here: it appears whole or not at all."""
        with _name_errors(self._url, OSError, "a place that can be written"):
            self._make_parents()
            self._store.system.put_file(str(path), self._key)

    def upload_files(self, folder: pathlib.Path, names: Iterable[str]) -> None:
        """Copies files of a folder on this machine to the same places in this folder.

        Several are copied at a time if the store can do so. Each appears whole or not at all.
        """
        files = {self / name: folder / name for name in names}
        system = self._store.system
        if len(files) < 2 or not system.async_impl:
            for remote, path in files.items():
                remote.upload(path)
            return
        with _name_errors(self._url, OSError, "a place that can be written"):
            for remote in files:
                remote._make_parents()
            keys = [remote._key for remote in files]
            system.put(list(map(str, files.values())), keys, batch_size=_UPLOADS)

    def create(self, content: bytes) -> None:
        """Writes a new file.

        Raises:
          FileExistsError: there is one, in stores that can tell.
          OSError: the store fails.
        """
        system = self._store.system
        with _name_errors(self._url, OSError, "a place that can be written"):
            self._make_parents()
            try:
                system.pipe_file(self._key, content, mode="create")
            except (TypeError, NotImplementedError):  # an older file system has no modes
                system.pipe_file(self._key, content)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the file."""
        try:
            with _name_errors(self._url, OSError, "a file that can be removed"):
                self._store.system.rm_file(self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def _make_parents(self) -> None:
        """Makes the folder, unless the store has none: there it could make a bucket."""
        if self.scheme not in _WITHOUT_FOLDERS:
            self._store.system.makedirs(self._key.rpartition("/")[0], exist_ok=True)

    def _is_below(self) -> bool:
        """Returns whether the path lies below its root, whose folders are listed."""
        return self._url.startswith(self._store.root + "/")

    def _find(self) -> dict | None:
        """Returns what the store knows of the file or folder, None if it knows nothing."""
        if self._is_below():
            return self.parent._list().get(self.name)
        try:
            with _name_errors(self._url):
                return self._store.system.info(self._key)
        except FileNotFoundError:
            return None

    def _list(self) -> dict[str, dict]:
        """Returns what lies in the folder, by its name; nothing if there is no folder."""
        listings = self._store.listings
        if self._key not in listings:
            entries: list[dict] = []
            with contextlib.suppress(FileNotFoundError), _name_errors(self._url):
                entries = self._store.system.ls(self._key, detail=True)
            paths = {entry["name"].rstrip("/"): entry for entry in entries}
            paths.pop(self._key.rstrip("/"), None)  # a file lists itself
            listings[self._key] = {path.rpartition("/")[2]: paths[path] for path in paths}
        return listings[self._key]


AnyPath = pathlib.Path | RemotePath


class _Reader(io.RawIOBase):
    """Reads a remote file by ranges."""

    def __init__(self, path: RemotePath):
        self._path, self._size, self._place = path, path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(self._path))
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._place))
        if count:
            view[:count] = self._path.read_range(self._place, count)
        self._place += count
        return count


def is_remote(path: Any) -> bool:
    """Returns whether a path leads into a store: whether it has a scheme other than "file"."""
    if isinstance(path, RemotePath):
        return True
    match = _SCHEME.match(str(path)) if isinstance(path, str | os.PathLike) else None
    return match is not None and match[1].lower() not in ("file", "local")


def show_path(path: str | os.PathLike) -> str | os.PathLike:
    """Returns a path that is its own text: of other kinds, such as `os.DirEntry`, the string."""
    return path if isinstance(path, str | pathlib.PurePath | RemotePath) else os.fspath(path)


def make_path(path: str | os.PathLike) -> AnyPath:
    """Returns a path on this machine, or in a store if it has a scheme.

    Raises:
      ValueError: nothing here opens the scheme, or a package for it is missing.
    """
    if isinstance(path, pathlib.Path | RemotePath):
        return path
    text = os.fspath(path)
    if not is_remote(text):
        return pathlib.Path(re.sub(r"(?i)^(file|local)://", "", text))
    scheme, _, place = text.partition("://")
    if not (place := place.rstrip("/")):
        raise ValueError(f"{path}: got a scheme alone, expected a path behind it")
    try:
        import fsspec
    except ImportError:
        raise ValueError(f"{path}: got a URL without the package fsspec, {_EXTRA}") from None
    try:
        system, key = fsspec.core.url_to_fs(url := f"{scheme}://{place}")
        system.invalidate_cache()
    except ImportError as error:
        raise ValueError(f"{path}: got a URL ({_explain(error)}), {_EXTRA}") from None
    except Exception as error:
        known = scheme.lower() in fsspec.available_protocols()
        got = _explain(error) if known else f"the scheme {scheme!r}"
        expected = "a URL that fsspec opens, such as gs://, s3:// or memory://"
        raise ValueError(f"{path}: got {got}, expected {expected}") from None
    return RemotePath(_Store(system, url, {}), url, key)


def describe_below(path: AnyPath, folder: AnyPath) -> str:
    """Returns a path from one of its folders on."""
    return str(pathlib.PurePosixPath(path).relative_to(pathlib.PurePosixPath(folder)))


def join(folder: str, name: str) -> AnyPath:
    """Returns the path of a file in a folder, unless its name is a whole path."""
    return make_path(name if is_remote(name) else os.path.join(folder, name))


def _explain(error: Exception) -> str:
    """Returns an error of a store on one line: its class, and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def _name_errors(
    path: str, kind: type[Exception] = ValueError, expected: str = "a readable file"
) -> Iterator[None]:
    """Raises an error of one line that names the path, for any error of a store.

    What is missing stays a FileNotFoundError, and what exists already a FileExistsError.
    """
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
    except ImportError as error:
        raise ValueError(f"{path}: got {_explain(error)}, {_EXTRA}") from None
    except Exception as error:
        raise kind(f"{path}: got {_explain(error)}, expected {expected}") from error


def open_binary(path: str | os.PathLike) -> io.BufferedReader:
    """Opens a file to read bytes."""
    place = make_path(path)
    return place.open() if isinstance(place, RemotePath) else open(place, "rb")


def open_text(path: str | os.PathLike) -> TextIO:
    """Opens a file to read UTF-8 text."""
    return io.TextIOWrapper(open_binary(path), encoding="utf-8")


def is_remote_file(path: Any) -> bool:
    """Returns whether a path leads to a file in a store."""
    return is_remote(path) and make_path(path).is_file()


def read_array(path: AnyPath, dtype: "npt.DTypeLike", count: int, offset: int) -> "np.ndarray":
    """Returns `count` numbers from the byte `offset` of a file on."""
    import numpy as np

    if isinstance(path, pathlib.Path):
        return np.fromfile(path, dtype, count, offset=offset)
    return np.frombuffer(path.read_range(offset, count * np.dtype(dtype).itemsize), dtype)


def choose_block(path: AnyPath, size: int) -> int | None:
    """Returns how many bytes of an array of `size` to read at a time, None for a local file."""
    if isinstance(path, pathlib.Path):
        return None
    return max(_LEAST_BYTES, min(_BLOCK_BYTES, size // 8))


def is_same(path: str | os.PathLike, other: str | os.PathLike) -> bool:
    """Returns whether both paths are the same file, or would be if it were there."""
    places = make_path(path), make_path(other)
    if any(isinstance(place, RemotePath) for place in places):
        return places[0] == places[1]
    if all(map(os.path.exists, places)):
        return os.path.samefile(*places)
    return os.path.realpath(places[0]) == os.path.realpath(places[1])


@contextlib.contextmanager
def open_copies(*paths: AnyPath) -> Iterator[list[pathlib.Path]]:
    """Yields paths on this machine for libraries that read no others.

    They are the paths themselves, or temporary copies in one folder, which the block's end removes.
    """
    with contextlib.ExitStack() as stack:
        copies = []
        for path in paths:
            if isinstance(path, RemotePath):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                path.download({"": path.stat().st_size}, pathlib.Path(folder))
                path = pathlib.Path(folder, path.name)
            copies.append(path)
        yield copies


@contextlib.contextmanager
def open_outline(path: AnyPath, head: bytes) -> Iterator[pathlib.Path]:
    """Yields a path on this machine for a library that reads the first bytes, and the size.

    It is the path itself, or that of a file with these bytes and zeros that take no place.
    """
    if isinstance(path, pathlib.Path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        outline = pathlib.Path(folder, path.name)
        outline.write_bytes(head)
        os.truncate(outline, path.stat().st_size)
        yield outline


class FolderCopy:
    """A copy of a remote folder in the user's cache, which is removed with this object.

    Attributes:
      path: the folder on this machine.
    """

    def __init__(self, folder: RemotePath, below: Iterable[str] = ("",)):
        """Copies a folder.

        Args:
          folder: the folder.
          below: files and subfolders that are copied; "": all.

        Raises:
          ValueError: the store fails, or this machine's disk has no place.
        """
        names = {name.strip("/") for name in below}
        sizes = {
            name: size
            for name, size in folder.list_files()
            if "" in names or names & {name, *map(str, pathlib.PurePosixPath(name).parents)}
        }
        with contextlib.ExitStack() as stack:
            cache = user_cache.private_folder("remote")
            self.path = stack.enter_context(user_cache.scratch_folder(cache))
            size, free = sum(size or 0 for size in sizes.values()), shutil.disk_usage(cache).free
            if size > free:
                got = f"{size / 1e9:.2f} GB to copy into {cache}"
                raise ValueError(f"{folder}: got {got}, expected at most its {free / 1e9:.2f} GB")
            folder.download(sizes, self.path)
            weakref.finalize(self, stack.pop_all().close)
