"""Counts which ids follow which contexts, and stores tables of k-grams with back-off.

A context is read from its last id to its first, as in a trie. Every context is a row. Row 0 is
the empty context; a context of j ids is the row of its last j − 1 ids with one more id before them.
Rows are numbered breadth-first, in the order of (row of the shorter context, id), so that the keys
of all rows are one sorted list of pairs of int32: no hashes, no collisions, no 64-bit integers
(which JAX lacks unless asked for them).
"""

import io
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specdec_jax.files import places
from specdec_jax.files.reading import check_file, error_reason, mismatch_error
from specdec_jax.files.writing import write_file
from specdec_jax.models import arguments

_FORMAT = "specdec_jax n-gram table, version 1"
ARRAYS = "parents", "extras", "starts", "next_tokens", "counts", "unigram"
NUMBERS = "vocab_size", "order", "start_token", "continuations"
_MAX_ORDER, _MAX_CONTINUATIONS = 16, 2**20
# The errors that reading somebody else's archive may raise. numpy parses an array's header as
# Python source.
UNREADABLE = (
    ValueError,
    EOFError,
    OSError,
    KeyError,
    RuntimeError,
    MemoryError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
# A file may unpack to `_COMPRESSION` times its size, ten times what tables do, and `_LEAST_BYTES`
# bytes more: the counts of 250,000 ids of which none occurs are all zeros.
_LEAST_BYTES, _COMPRESSION, _MOST_ARRAYS = 1 << 24, 50, 100


def check_ranges(order: Any, continuations: Any) -> None:
    """Raises ValueError for numbers that no table has."""
    arguments.check_integer("order", order, 1, _MAX_ORDER)
    arguments.check_integer("continuations", continuations, 1, _MAX_CONTINUATIONS)


def count_contexts(
    sequences: Iterable[Sequence[int]],
    vocab_size: Any,
    order: Any,
    start_token: Any,
    continuations: Any,
    first_token: Any = None,
) -> dict[str, Any]:
    """Counts `sequences`; returns the arrays and numbers of a table by name.

    Arguments as for `NGramDrafter.count`.
    """
    vocab_size = arguments.check_integer("vocab_size", vocab_size, 1, 2**31 - 1)
    check_ranges(order, continuations)
    order, continuations = int(order), int(continuations)  # of JAX's integers, no lists are made
    first_token = start_token if first_token is None else first_token
    for name, token in dict(start_token=start_token, first_token=first_token).items():
        if not arguments.is_integer(token) or not 0 <= token < vocab_size:
            expected = f"an id from 0 to {vocab_size - 1}"
            raise mismatch_error(name, arguments.quote(token), expected)
    ids, places, padded = _pad_sequences(
        sequences, vocab_size, [start_token] * (order - 2) + [first_token] * (order > 1)
    )
    rows, number = np.zeros(len(ids), np.int64), 1
    keys = [np.zeros((2, 0), np.int64)]
    kept = [_continuations(rows, ids, vocab_size, continuations)]
    for length in range(1, order):
        pairs = rows * vocab_size + padded[places - length]
        pairs, inverse = np.unique(pairs, return_inverse=True)
        keys.append(np.stack(np.divmod(pairs, vocab_size)))
        rows, number = number + inverse, number + len(pairs)
        kept.append(_continuations(rows, ids, vocab_size, continuations))
    (parents, extras), (of_row, next_tokens, counts) = (
        np.concatenate(parts, axis=1) for parts in (keys, kept)
    )
    starts = np.searchsorted(of_row, np.arange(number + 1))
    unigram = np.bincount(ids, minlength=vocab_size)
    arrays = parents, extras, starts, next_tokens, counts, unigram
    numbers = map(int, (vocab_size, order, start_token, continuations))
    return dict(zip(ARRAYS, arrays)) | dict(zip(NUMBERS, numbers))


def write_table(path: str | os.PathLike[str], **values: Any) -> None:
    """Writes one .npz file at `path` with a table and further values."""
    arguments.check_path("path", path)
    file = io.BytesIO()
    np.savez_compressed(file, format=_FORMAT, **values)
    write_file(path, file.getvalue())


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the table, and the further values, that `write_table` wrote.

    Raises:
      ValueError: no such file, or not one that `write_table` wrote completely.
    """
    arguments.check_path("path", path)
    place = places.make_path(path)
    if not place.exists():
        raise ValueError(f"{path}: got no such file, expected an n-gram table (.npz)")
    check_file(place, 2**63)
    try:
        with places.open_copies(place) as (copy,):
            values = _read_arrays(copy)
    except UNREADABLE as error:
        got = f"a file that cannot be read ({error_reason(error)})"
        raise ValueError(f"{path}: got {got}, expected an n-gram table") from None
    known = {*ARRAYS, *NUMBERS, "fingerprint"}
    if str(values.pop("format", "")) != _FORMAT or not known <= set(values):
        raise ValueError(f"{path}: got something else, expected a {_FORMAT}")
    arrays = [values.pop(name) for name in ARRAYS]
    numbers = [values.pop(name) for name in NUMBERS]
    if not all(x.shape == () and np.issubdtype(x.dtype, np.integer) for x in numbers):
        got = f"{', '.join(NUMBERS)} that are no integers"
        raise ValueError(f"{path}: got {got}, expected an n-gram table")
    sampled = values.get("sampled", np.False_)
    if sampled.shape != () or sampled.dtype != bool:
        raise ValueError(f"{path}: got a sampled that is no bool, expected an n-gram table")
    sizes = [int(number) for number in numbers]
    if not _is_sound(arrays, sizes):
        got = "arrays that contradict each other"
        raise ValueError(f"{path}: got {got}, expected an n-gram table")
    return values | dict(zip(ARRAYS, arrays)) | dict(zip(NUMBERS, sizes))


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file by name.

    Raises ValueError if they would take far more memory than a table in a file of its size.
    """
    most = _LEAST_BYTES + _COMPRESSION * os.path.getsize(path)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size = sum(entry.file_size for entry in entries)
    if size > most or len(entries) > _MOST_ARRAYS:
        raise ValueError(f"{len(entries)} arrays of {size:,} bytes where {most:,} are the most")
    usual = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
    if any(entry.compress_type not in usual for entry in entries):
        raise ValueError("a compression that numpy does not write")
    with np.load(path, allow_pickle=False) as arrays:
        values = dict(arrays)
    if not all(isinstance(value, np.ndarray) for value in values.values()):
        raise ValueError("entries that are no arrays")
    return values


def _pad_sequences(
    sequences: Iterable[Sequence[int]], vocab_size: int, before: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns all ids, their places in an array with `before` before each sequence, and that."""
    parts = arguments.check_sequences(sequences, vocab_size)
    ids = np.concatenate(parts).astype(np.int64)
    number = np.repeat(np.arange(1, len(parts) + 1), [len(part) for part in parts])
    places = np.arange(len(ids)) + len(before) * number
    pads = np.array(before, np.int64)
    padded = np.concatenate([piece for part in parts for piece in (pads, part)]).astype(np.int64)
    return ids, places, padded


def _continuations(rows: np.ndarray, ids: np.ndarray, vocab_size: int, most: int) -> np.ndarray:
    """Returns `[3, E]`: row, id and count of the `most` most frequent ids after each row.

    The most frequent come first.
    """
    pairs, counts = np.unique(rows * vocab_size + ids, return_counts=True)
    of_row, tokens = np.divmod(pairs, vocab_size)
    order = np.lexsort((tokens, -counts, of_row))  # pairs are sorted by row already, which stays so
    rank = np.arange(len(order)) - np.searchsorted(of_row, of_row)
    order = order[rank < most]
    return np.stack([of_row[order], tokens[order], counts[order]])


def _is_sound(arrays: Sequence[np.ndarray], numbers: Sequence[int]) -> bool:
    """Returns whether the arrays and numbers of a file match, which a gather would not notice."""
    if not all(array.ndim == 1 and np.issubdtype(array.dtype, np.integer) for array in arrays):
        return False
    parents, extras, starts, next_tokens, counts, unigram = arrays
    vocab_size, order, start_token, continuations = numbers
    if not len(parents) == len(extras) == len(starts) - 2 or len(unigram) != vocab_size:
        return False
    if not (len(next_tokens) == len(counts) == starts[-1] and starts[0] == 0):
        return False
    if not (1 <= order <= _MAX_ORDER and 0 <= start_token < vocab_size):
        return False
    kept, key = np.diff(starts), parents.astype(np.int64) * 2**31 + extras
    return bool(
        1 <= continuations <= _MAX_CONTINUATIONS
        and np.all((1 <= kept) & (kept <= continuations))
        and np.all((0 <= parents) & (parents < np.arange(1, len(parents) + 1)))
        and np.all(np.diff(key) > 0)
        and np.all((0 <= next_tokens) & (next_tokens < vocab_size))
        and np.all((0 <= extras) & (extras < vocab_size))
        and 1 <= counts.min() <= counts.max() < 2**31  # they become int32
        and 0 <= unigram.min() <= unigram.max() < 2**31
        and unigram.any()
        and (order == 1) == (len(parents) == 0)
    )
