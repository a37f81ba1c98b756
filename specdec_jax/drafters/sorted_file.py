"""Reads and writes files of sorted text, which are mapped into memory instead of being read.

A file is a header of one page, JSON and spaces; the ids, each plus 1, filled up to whole pages; and
the order of the places (`SortedText`), all little-endian. The checksum is over all but itself.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.drafters.sorted_text import SortedText, sort_places
from specdec_jax.files.places import make_path, open_copies
from specdec_jax.files.reading import check_file, mismatch_error, parse_json
from specdec_jax.files.writing import open_new_file
from specdec_jax.models import arguments

_FORMAT = "specdec_jax sorted text, version 1"
_WHAT = "a file of sorted text (specdec count --suffix)"
_PAGE, _CHUNK = 4096, 1 << 20  # bytes of a page, numbers that are checked at a time
_PLACE = np.dtype("<i4")
_KEYS = {"format", "ids", "places", "vocab_size", "fingerprint", "checksum"}


class TextInfo(NamedTuple):
    """What a file says of its ids.

    Attributes:
      vocab_size: V; all ids lie below it.
      fingerprint: fingerprint of their vocabulary, "" if it is not known.
      checksum: the file's checksum.
      remembers: whether they are outputs of a job (`SuffixHistory.save`).
    """

    vocab_size: int
    fingerprint: str
    checksum: str
    remembers: bool


def join_sequences(sequences: Iterable[Sequence[int]], vocab_size: Any) -> np.ndarray:
    """Returns the ids of all sequences, each plus 1, with a 0 after each sequence.

    Raises:
      ValueError: no id at all, or one outside the vocabulary.
    """
    arguments.check_integer("vocab_size", vocab_size, 1, 2**31 - 2)
    parts = arguments.check_sequences(sequences, vocab_size)
    ids = np.concatenate([np.append(part.astype(np.int64) + 1, 0) for part in parts])
    if len(ids) >= 2**31:
        raise mismatch_error("sequences", f"{len(ids):,} ids", "fewer than 2,147,483,648")
    return ids.astype(_id_type(vocab_size))


def write_sorted(
    path: str | os.PathLike[str],
    ids: np.ndarray,
    vocab_size: int,
    fingerprint: str,
    remembers: bool = False,
) -> None:
    """Sorts the text `ids` that `join_sequences` made, and writes it as one file."""
    ids, order = ids.astype(_id_type(vocab_size)), sort_places(ids).astype(_PLACE)
    parts: list[Any] = [ids.data.cast("B"), bytes(-ids.nbytes % _PAGE), order.data.cast("B")]
    header = {
        "format": _FORMAT,
        "ids": len(ids),
        "places": len(order),
        "vocab_size": int(vocab_size),
        "fingerprint": fingerprint,
    }
    if remembers:
        header["remembers"] = True
    checksum = zlib.crc32(_encode(header))
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    header["checksum"] = f"{checksum:08x}"
    with open_new_file(path) as file:
        file.write(_encode(header).ljust(_PAGE))
        for part in parts:
            file.write(part)


def map_text(path: str | os.PathLike[str]) -> tuple[SortedText, TextInfo]:
    """Returns the text in a file that `write_sorted` wrote, and what the file says of it.

    On a CPU its arrays are the file itself, mapped into memory. The whole file is read once, in
    small parts, to compare the checksum.

    Raises:
      ValueError: no such file, or not one that `write_sorted` wrote completely.
    """
    arguments.check_path("path", path)
    place = make_path(path)
    if not place.exists():
        raise mismatch_error(path, "no such file", _WHAT)
    check_file(place, 2**63)
    with open_copies(place) as (copy,):
        info, (length, places) = _check(copy, path)
        dtype = _id_type(info.vocab_size)
        arrays = (
            np.memmap(copy, dtype, "c", _PAGE, (length,)),
            np.memmap(copy, _PLACE, "c", _order_start(length, dtype), (places,)),
        )
    on_cpu = jax.default_backend() == "cpu"
    ids, order = map(jnp.from_dlpack if on_cpu else jnp.asarray, arrays)
    return SortedText(ids, order, jnp.int32(places)), info


def _check(copy: pathlib.Path, path: str | os.PathLike[str]) -> tuple[TextInfo, tuple[int, int]]:
    """Checks a whole file, that messages call `path`.

    Returns what it says, and how many ids and places it has.
    """
    size = copy.stat().st_size
    try:
        with open(copy, "rb") as file:
            head = _read_header(file.read(_PAGE))
            length, places, vocab_size = (head[name] for name in ("ids", "places", "vocab_size"))
            dtype = _id_type(vocab_size)
            start = _order_start(length, dtype)
            if size != start + places * _PLACE.itemsize:
                raise ValueError(f"{size:,} bytes where its header says others")
            expected = head.pop("checksum")
            checksum = zlib.crc32(_encode(head))
            for part in _read_parts(file, dtype, length):
                checksum = zlib.crc32(part.data, checksum)
                if part.min() < 0 or part.max() > vocab_size:
                    raise ValueError("an id outside its vocabulary")
            checksum = zlib.crc32(file.read(start - file.tell()), checksum)
            for part in _read_parts(file, _PLACE, places):
                checksum = zlib.crc32(part.data, checksum)
                if part.min() < 0 or part.max() >= length:
                    raise ValueError("a place outside its text")
            if f"{checksum:08x}" != expected:
                raise ValueError(f"the checksum {checksum:08x} instead of {expected}")
    except (ValueError, OSError) as error:
        raise mismatch_error(path, f"a damaged file ({error})", _WHAT) from None
    info = TextInfo(vocab_size, head["fingerprint"], expected, "remembers" in head)
    return info, (length, places)


def _read_header(page: bytes) -> dict[str, Any]:
    """Returns the header; raises ValueError for anything else."""
    try:
        head = parse_json(page.decode("ascii"))
    except (ValueError, UnicodeDecodeError):
        raise ValueError("no header") from None
    numbers: list[Any] = [head.get(name) for name in ("ids", "places", "vocab_size")]
    texts = [head.get(name) for name in ("fingerprint", "checksum")]
    sound = (
        set(head) in (_KEYS, _KEYS | {"remembers"})
        and head["format"] == _FORMAT
        and all(type(number) is int and 1 <= number < 2**31 - 1 for number in numbers)
        and all(isinstance(text, str) and text.isprintable() for text in texts)
        and len(head["checksum"]) == 8
        and numbers[1] <= numbers[0]
    )
    if not sound:
        raise ValueError("a header of another kind")
    return head


def _read_parts(file: Any, dtype: np.dtype, count: int) -> Iterator[np.ndarray]:
    """Yields the next `count` numbers of a file, in parts."""
    while count:
        part = np.fromfile(file, dtype, min(count, _CHUNK))
        if not len(part):
            raise ValueError("fewer numbers than its header says")
        yield part
        count -= len(part)


def _id_type(vocab_size: int) -> np.dtype:
    """Returns the type of ids plus 1: REST's 16 bits are not enough for every vocabulary."""
    return np.dtype("<u2" if vocab_size < 2**16 else "<i4")


def _order_start(length: int, dtype: np.dtype) -> int:
    """Returns the place in a file at which the order begins."""
    return _PAGE + -(-length * dtype.itemsize // _PAGE) * _PAGE


def _encode(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode("ascii")
