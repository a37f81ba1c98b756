"""Counts which ids follow which contexts, and stores and looks up tables of k-grams with back-off.

A context is looked up from its last id to its first, as in a trie. Every context is a row. Row 0 is
the empty context; a context of j ids is the row of its last j − 1 ids with one more id before them.
Rows are numbered breadth-first, in the order of (row of the shorter context, id), so that the keys
of all rows are one sorted list of pairs of int32: no hashes, no collisions, no 64-bit integers
(which JAX lacks unless asked for them).
"""

import io
import os
import pathlib
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.files.reading import check_file, error_reason
from specdec_jax.files.writing import write_file
from specdec_jax.models import arguments
from specdec_jax.tokenizers.vocabularies import Vocabulary

_FORMAT = "specdec_jax n-gram table, version 1"
_ARRAYS = ("parents", "extras", "starts", "next_tokens", "counts", "unigram")
_NUMBERS = ("vocab_size", "order", "start_token", "continuations")
_MAX_ORDER = 16
# The errors that reading somebody else's archive may raise. numpy parses an array's header as
# Python source.
_UNREADABLE = (
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


@flax.struct.dataclass
class NGramTable:
    """Counts of what follows each of N contexts of up to n − 1 ids, E continuations in all.

    Attributes:
      parents, extras: `[N − 1]` int32, in lexicographic order: row i + 1 is row `parents[i]` with
        the id `extras[i]` before it.
      starts: `[N + 1]` int32; the continuations of row r lie at `starts[r]` … `starts[r + 1] − 1`.
      next_tokens, counts: `[E]` int32, the most frequent continuation first; of equally frequent
        ones the smallest id first.
      unigram: `[V]` int32, how often each id occurs.
      vocab_size: V.
      order: n.
      start_token: the id that stands for what lies before a sequence.
      continuations: M, the most that are kept for a context.
      fingerprint: fingerprint of the vocabulary, "" if it is not known.
    """

    parents: jax.Array
    extras: jax.Array
    starts: jax.Array
    next_tokens: jax.Array
    counts: jax.Array
    unigram: jax.Array
    vocab_size: int = flax.struct.field(pytree_node=False)
    order: int = flax.struct.field(pytree_node=False)
    start_token: int = flax.struct.field(pytree_node=False)
    continuations: int = flax.struct.field(pytree_node=False)
    fingerprint: str = flax.struct.field(pytree_node=False, default="")

    def __repr__(self) -> str:
        counted = f"{self.vocab_size:,} ids, {len(self.counts):,} continuations"
        return f"NGramTable({self.order}-grams of {counted})"

    @classmethod
    def count(
        cls,
        sequences: Iterable[Sequence[int]],
        vocab_size: int,
        order: int,
        *,
        start_token: Any = 0,
        continuations: Any = 8,
        fingerprint: str = "",
    ) -> "NGramTable":
        """Counts `sequences` in numpy; arguments as for `NGramDrafter.count`."""
        arguments.check_integer("vocab_size", vocab_size, 1, 2**31 - 1)
        arguments.check_integer("order", order, 1, _MAX_ORDER)
        arguments.check_integer("continuations", continuations, 1, 2**20)
        if not arguments.is_integer(start_token) or not 0 <= start_token < vocab_size:
            got = arguments.quote(start_token)
            raise ValueError(f"start_token: got {got}, expected an id from 0 to {vocab_size - 1}")
        ids, places, padded = _pad_sequences(sequences, vocab_size, order - 1, start_token)
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
        arrays = _put_on_device(parents, extras, starts, next_tokens, counts, unigram)
        numbers = map(int, (vocab_size, order, start_token, continuations))
        return cls(**arrays, **dict(zip(_NUMBERS, numbers)), fingerprint=fingerprint)

    def save(self, path: str | os.PathLike[str], **values) -> None:
        """Writes one .npz file at `path`, with further `values` if there are any."""
        names = (*_ARRAYS, *_NUMBERS, "fingerprint")
        fields: dict[str, Any] = {name: np.asarray(getattr(self, name)) for name in names}
        file = io.BytesIO()
        np.savez_compressed(file, format=_FORMAT, **fields, **values)
        write_file(path, file.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> tuple["NGramTable", dict[str, np.ndarray]]:
        """Returns the table that `save` wrote, and the further values.

        Raises:
          ValueError: no such file, or not one that `save` wrote completely.
        """
        arguments.check_path("path", path)
        if not pathlib.Path(path).exists():
            raise ValueError(f"{path}: got no such file, expected an n-gram table (.npz)")
        check_file(path, 2**63)
        try:
            values = _read_arrays(path)
        except _UNREADABLE as error:
            got = f"a file that cannot be read ({error_reason(error)})"
            raise ValueError(f"{path}: got {got}, expected an n-gram table") from None
        known = {*_ARRAYS, *_NUMBERS, "fingerprint"}
        if str(values.pop("format", "")) != _FORMAT or not known <= set(values):
            raise ValueError(f"{path}: got something else, expected a {_FORMAT}")
        arrays = [values.pop(name) for name in _ARRAYS]
        numbers = [values.pop(name) for name in _NUMBERS]
        if not all(x.shape == () and np.issubdtype(x.dtype, np.integer) for x in numbers):
            got = f"{', '.join(_NUMBERS)} that are no integers"
            raise ValueError(f"{path}: got {got}, expected an n-gram table")
        sizes = [int(number) for number in numbers]
        if not _is_sound(arrays, sizes):
            got = "arrays that contradict each other"
            raise ValueError(f"{path}: got {got}, expected an n-gram table")
        fields = _put_on_device(*arrays) | dict(zip(_NUMBERS, sizes))
        return cls(**fields, fingerprint=str(values.pop("fingerprint"))), values

    def matches(self, vocabulary: Vocabulary | None) -> bool:
        """Returns whether `vocabulary` or the table's own is unknown, or both are the same."""
        return vocabulary is None or self.fingerprint in ("", vocabulary.fingerprint())

    def find_rows(self, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row `[N]` of the longest known context at the end of each text.

        Of `tokens [N, S]` the first `lengths [N]` count. Returns also the contexts' lengths.
        """
        rows, match = jnp.zeros_like(lengths), jnp.zeros_like(lengths)
        for length in range(1, self.order):
            place = lengths - length
            before = jnp.take_along_axis(tokens, jnp.maximum(place, 0)[:, None], axis=1)[:, 0]
            longer, known = self._find(rows, jnp.where(place >= 0, before, self.start_token))
            # All endings of a known context are known: after a miss no longer one is.
            known &= match == length - 1
            rows, match = jnp.where(known, longer, rows), jnp.where(known, length, match)
        return rows, match

    def _find(self, parents: jax.Array, extras: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row `[B]` of the context `parents [B]` with the ids `extras [B]` before it.

        Returns also whether there is one. It is searched by bisection.
        """
        size = len(self.parents)

        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]):
            low, high = bounds
            middle = (low + high) // 2
            here, there = self.parents[middle], self.extras[middle]
            smaller = (low < high) & ((here < parents) | (here == parents) & (there < extras))
            return jnp.where(smaller, middle + 1, low), jnp.where(smaller, high, middle)

        bounds = jnp.zeros_like(parents), jnp.full_like(parents, size)
        index = jnp.minimum(jax.lax.fori_loop(0, size.bit_length(), halve, bounds)[0], size - 1)
        return index + 1, (self.parents[index] == parents) & (self.extras[index] == extras)

    def ranked(self, rows: jax.Array, count: int) -> jax.Array:
        """Returns the `count` most frequent ids `[B, count]` after the contexts `rows [B]`.

        They are −1 where fewer are kept.
        """
        places = self.starts[rows][:, None] + jnp.arange(count)
        inside = places < self.starts[rows + 1][:, None]
        tokens = self.next_tokens[jnp.minimum(places, len(self.next_tokens) - 1)]
        return jnp.where(inside, tokens, -1)

    def logits(self, rows: jax.Array) -> jax.Array:
        """Returns log counts `[B, V]` of the kept continuations of the contexts `rows [B]`.

        For the empty context they are those of all ids.
        """
        tokens = self.ranked(rows, self.continuations)
        places = self.starts[rows][:, None] + jnp.arange(self.continuations)
        places = jnp.minimum(places, len(self.counts) - 1)
        # The few continuations kept are scattered; unused places get an id past the vocabulary and
        # are dropped.
        tokens = jnp.where(tokens < 0, self.vocab_size, tokens)
        nothing = jnp.full((len(rows), self.vocab_size), -jnp.inf, jnp.float32)
        values = jnp.log(self.counts[places].astype(jnp.float32))
        some = nothing.at[jnp.arange(len(rows))[:, None], tokens].set(values, mode="drop")
        return jnp.where((rows == 0)[:, None], jnp.log(self.unigram.astype(jnp.float32)), some)


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
    sequences: Iterable[Sequence[int]], vocab_size: int, before: int, start_token: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns all ids, their places after `before` start tokens per sequence, and that array."""
    arguments.check_kind("sequences", sequences, Iterable, "lists of integers")
    parts = [arguments.as_array(sequence) for sequence in sequences]
    parts = [part for part in parts if part.size]
    if not parts:
        raise ValueError(
            "sequences: got no id at all, expected at least one sequence that is not empty"
        )
    if any(part.ndim != 1 or not np.issubdtype(part.dtype, np.integer) for part in parts):
        raise ValueError("sequences: got something else than ids, expected lists of integers")
    ids = np.concatenate(parts).astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"sequences: got id {wrong}, expected ids from 0 to {vocab_size - 1}")
    number = np.repeat(np.arange(1, len(parts) + 1), [len(part) for part in parts])
    places = np.arange(len(ids)) + before * number
    padded = np.full(len(ids) + before * len(parts), start_token, np.int64)
    padded[places] = ids
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


def _put_on_device(*arrays: np.ndarray) -> dict[str, jax.Array]:
    """Returns the array fields of a table on the device; `arrays` are in the order of `_ARRAYS`."""
    return {
        name: jax.device_put(array.astype(np.int32))
        for name, array in zip(_ARRAYS, arrays, strict=True)
    }


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
    if not (1 <= order <= _MAX_ORDER and 0 <= start_token < vocab_size and continuations >= 1):
        return False
    kept, key = np.diff(starts), parents.astype(np.int64) * 2**31 + extras
    return bool(
        np.all((1 <= kept) & (kept <= continuations))
        and np.all((0 <= parents) & (parents < np.arange(1, len(parents) + 1)))
        and np.all(np.diff(key) > 0)
        and np.all((0 <= next_tokens) & (next_tokens < vocab_size))
        and np.all((0 <= extras) & (extras < vocab_size))
        and counts.min() >= 1
        and unigram.min() >= 0
        and (order == 1) == (len(parents) == 0)
    )
