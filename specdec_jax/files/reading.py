"""Reads files that somebody else made, and rejects unsound ones in one line that names them."""

import collections
import hashlib
import json
import os
import pathlib
import reprlib
import stat
from collections.abc import Iterable
from typing import Any, TypeVar

from specdec_jax.files import places
from specdec_jax.files.places import AnyPath, RemotePath

PathLike = str | os.PathLike

# Largest settings file in bytes. Real ones have a few thousand; in memory an empty JSON list takes
# 24 times its bytes.
MOST_BYTES = 4 << 20
MOST_VALUES = 3_000_000  # in a larger JSON file, a tokenizer's: Gemma 2's has some 2,000,000

_LONGEST_NAME = 500
_DEEPEST_FOLDER, _MOST_FOLDERS = 4, 20_000

Folder = TypeVar("Folder", pathlib.Path, AnyPath)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_short.maxlevel = 2


def quote_value(value: Any) -> str:
    """Returns a value from a file for a message: on one line, shortened if it is long."""
    return _short.repr(value)


def mismatch_error(place: object, got: object, expected: object) -> ValueError:
    """Makes the error of a wrong input: where it is, what was got and what was expected."""
    return ValueError(f"{place}: got {got}, expected {expected}")


def error_reason(error: Exception) -> str:
    """Returns a library's error message on one line, cut to 500 characters."""
    return " ".join(str(error).split())[:500]


def check_file(path: PathLike, most: int = MOST_BYTES) -> None:
    """Raises ValueError unless `path` is a regular file of at most `most` bytes.

    Opening anything else, such as a pipe, could block for ever. Links are followed: every file in
    Hugging Face's cache is one.
    """
    try:
        status = places.make_path(path).stat()
    except FileNotFoundError:
        raise ValueError(f"{path}: got no such file, expected one") from None
    except (OSError, ValueError) as error:  # a circle of links, a name with a NUL
        if places.is_remote(path):  # its message is whole
            raise
        got = getattr(error, "strerror", error)
        raise ValueError(f"{path}: got {got}, expected a readable file") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise ValueError(f"{path}: got {kind}, expected a regular file")
    if status.st_size > most:
        raise ValueError(f"{path}: got {status.st_size:,} bytes, expected at most {most:,}")
    if not places.is_remote(path) and not os.access(path, os.R_OK):
        raise ValueError(f"{path}: got a file that may not be read, expected a readable file")


def check_folder(folder: AnyPath) -> None:
    """Raises ValueError unless a folder and its subfolders hold only regular files, of any size.

    Folders may be links too, but must not lead back to themselves. A store has neither links nor
    pipes.
    """
    if isinstance(folder, RemotePath):
        return
    for number, (parent, _, names) in enumerate(os.walk(folder, followlinks=True)):
        if len(pathlib.Path(parent).relative_to(folder).parts) > _DEEPEST_FOLDER:
            raise mismatch_error(parent, "folders nested too deeply or in a circle", "a checkpoint")
        if number > _MOST_FOLDERS:
            raise mismatch_error(folder, f"more than {_MOST_FOLDERS:,} folders", "a checkpoint")
        for name in names:
            check_file(pathlib.Path(parent, name), 2**63)


def read_bytes(path: PathLike, most: int = MOST_BYTES) -> bytes:
    """Returns the contents of a regular file of at most `most` bytes.

    Raises:
      ValueError: the file cannot be read, or is larger.
    """
    check_file(path, most)
    try:
        return places.make_path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: got {error.strerror}, expected a readable file") from None


def read_text(path: PathLike, most: int = MOST_BYTES) -> str:
    """Returns the contents of a UTF-8 file; limits and errors as for `read_bytes`."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"bytes that are not UTF-8 ({error.reason})"
        raise ValueError(f"{path}: got {got}, expected UTF-8 text") from None


def read_optional_json(path: PathLike) -> dict[str, Any]:
    """Returns the object in a JSON file, an empty one if there is no such file."""
    place = places.make_path(path)
    is_there = place.exists() if isinstance(place, RemotePath) else os.path.lexists(place)
    return read_json(place) if is_there else {}


def read_json(path: PathLike, most: int = MOST_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ValueError: the file holds no object, or more than `MOST_VALUES` values.
    """
    text = read_text(path, most)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_json(text: str) -> dict[str, Any]:
    """Returns the object in the text of a JSON file.

    Raises:
      ValueError: as for `read_json`, without the file's name, which the caller puts in front.
    """
    values = sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise ValueError(f"got JSON of some {values:,} values, expected at most {MOST_VALUES:,}")
    try:
        content = json.loads(text, object_pairs_hook=_make_object)
    except RecursionError:
        raise ValueError("got no readable JSON (nested too deeply), expected an object") from None
    except ValueError as error:
        raise ValueError(f"got no readable JSON ({error}), expected an object") from None
    if not isinstance(content, dict):
        raise ValueError(f"got {type(content).__name__}, expected an object")
    return content


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {quote_value(twice)} is there twice")
    return made


def check_names(names: Iterable[Any], path: PathLike) -> None:
    """Raises ValueError unless all names in the file at `path` are short printable strings."""
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
            expected = f"at most {_LONGEST_NAME} printable characters"
            raise ValueError(f"{path}: got the name {quote_value(name)}, expected {expected}")


def join_inside(folder: Folder, name: Any, path: PathLike) -> Folder:
    """Returns the path of the file `name` in `folder`.

    Raises:
      ValueError: `name`, which the file at `path` gives, leads out of the folder.
    """
    flavours = (pathlib.PurePosixPath, pathlib.PureWindowsPath)
    if (
        not isinstance(name, str)
        or len(name) > 255
        or not name.strip("/.")
        or "\0" in name
        or any(flavour(name).anchor or ".." in flavour(name).parts for flavour in flavours)
    ):
        raise mismatch_error(path, f"the file name {quote_value(name)}", "one inside the folder")
    return folder / name


def digest(parts: Iterable[bytes]) -> str:
    """Returns a short hash of all parts in order, to distinguish contents."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()[:16]
