"""Reads texts, pairs and documents from files, gzip or not."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from specdec_jax.files import places
from specdec_jax.files.reading import PathLike, mismatch_error
from specdec_jax.tokenizers.vocabularies import LONGEST_TEXT

_LONGEST_LINE = 4 * LONGEST_TEXT  # bytes; a longer line is too long a text to be encoded
_COUNTED = 1 << 25  # how many bytes of a longer line are read, for the message


def check_is_file(name: str, path: PathLike, expected: str = "a UTF-8 text file") -> None:
    """Raises ValueError, with the option's name, if there is no file at `path`."""
    if not places.make_path(path).is_file():
        raise mismatch_error(name, f"{str(path)!r}, which is no file", expected)


def read_lines(path: PathLike) -> Iterator[str]:
    """Yields the lines of a UTF-8 text file, gzip or not, without line ends or byte order mark.

    Raises:
      ValueError: the file is not UTF-8, has a line that is too long to be encoded, or is a damaged
        gzip file.
    """
    path = places.make_path(path)
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(places.open_binary(path))
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.open(file))
        yield from read_open_file(file, path)


def read_open_file(
    file: BinaryIO | gzip.GzipFile | io.BufferedReader, name: PathLike
) -> Iterator[str]:
    """Yields lines as `read_lines` does, from an open file that messages call `name`."""
    number = 0
    try:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            if len(line) == _LONGEST_LINE:
                line += file.readline(_COUNTED)
                more = "more than " if len(line) >= _COUNTED else ""
                got = f"got {more}{len(line):,} bytes, expected fewer than {_LONGEST_LINE:,}"
                raise ValueError(f"{name}, line {number}: {got} (one text a line)")
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        reason = f"got bytes that are not UTF-8 ({error.reason}), expected UTF-8 text"
        raise ValueError(f"{name}, line {number}: {reason}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        got = f"got a damaged gzip file ({error})"
        raise ValueError(f"{name}, after line {number}: {got}") from None


def read_pairs(paths: Sequence[PathLike]) -> list[tuple[str, str]]:
    """Returns the (source, target) pairs of TSV files with two columns.

    Raises:
      ValueError: a line has another number of columns, or a file cannot be read.
    """
    return [(row[0], row[1]) for _, _, row in _read_rows(paths, (2,), "2 (source, tab, target)")]


def read_examples(paths: Sequence[PathLike]) -> list[tuple[str, str, list[int] | None]]:
    """Returns (source, target, ids) of TSV files with two or three columns.

    With two, the ids are None. A third column has the target's ids, separated by spaces: what a
    model wrote need not be what its vocabulary makes of the text, and need not end with EOS.

    Raises:
      ValueError: a line has another number of columns or no ids in the third, or a file cannot be
        read.
    """
    examples: list[tuple[str, str, list[int] | None]] = []
    expected = "2 (source, tab, target) or 3 (and the target's ids)"
    for path, number, (source, target, *rest) in _read_rows(paths, (2, 3), expected):
        ids = rest[0].split() if rest else None
        if ids is not None and not (ids and all(token.isdecimal() for token in ids)):
            got = f"got {rest[0]!r} in column 3, expected the target's ids"
            raise ValueError(f"{path}, line {number}: {got}")
        examples.append((source, target, None if ids is None else [int(token) for token in ids]))
    return examples


def _read_rows(
    paths: Sequence[PathLike], counts: tuple[int, ...], expected: str
) -> Iterator[tuple[PathLike, int, list[str]]]:
    """Yields (path, number of the line, columns) for each line of TSV files."""
    for path in paths:
        for number, line in enumerate(read_lines(path), 1):
            columns = line.split("\t")
            if len(columns) not in counts:
                raise mismatch_error(f"{path}, line {number}", f"{len(columns)} columns", expected)
            yield path, number, columns


def read_documents(paths: Sequence[PathLike]) -> list[str]:
    """Returns the documents of text files, one a line, without the spaces around them.

    Empty lines are left out.

    Raises:
      ValueError: a file has no text, or cannot be read.
    """
    documents = []
    for path in paths:
        texts = [line.strip() for line in read_lines(path) if line.strip()]
        if not texts:
            raise ValueError(f"{path}: got no text, expected at least one line that is not empty")
        documents += texts
    return documents
