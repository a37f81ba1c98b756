"""Text in and out: vocabularies, TSV files, length-bucketed batches."""

import dataclasses
import gzip
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from specdec_jax.vocabularies import (
    EOS_ID,
    LONGEST_TEXT,
    PAD_ID,
    UNK_ID,
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
)

__all__ = [
    "EOS_ID", "PAD_ID", "UNK_ID", "Batch", "BucketedBatches", "ByteVocabulary", "SentencePieceVocabulary",
    "TokenizerJsonVocabulary", "Vocabulary", "check_buckets", "lines_of", "read_documents", "read_examples", "read_lines", "read_pairs",
]  # fmt: skip
_LONGEST_LINE = 4 * LONGEST_TEXT  # bytes: of a longer one the text cannot be encoded
_COUNTED = 1 << 25  # bytes of a longer line that are read for the message


def read_lines(path) -> Iterator[str]:
    """Lines of a UTF-8 text file, gzip or not, without their ends.

    Raises:
      ValueError: the file is not UTF-8, has a line that is too long to be encoded, or is a damaged gzip file.
    """
    path = pathlib.Path(path)
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        yield from lines_of(file, path)


def lines_of(file: BinaryIO, name) -> Iterator[str]:
    """As `read_lines`, of an open file that messages call `name`."""
    number = 0
    try:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            if len(line) == _LONGEST_LINE:
                line += file.readline(_COUNTED)
                more = "more than " if len(line) >= _COUNTED else ""
                got = f"got {more}{len(line):,} bytes, expected fewer than {_LONGEST_LINE:,}"
                raise ValueError(f"{name}, line {number}: {got}: one text a line")
            yield line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        reason = f"got bytes that are not UTF-8 ({error.reason}), expected UTF-8 text"
        raise ValueError(f"{name}, line {number}: {reason}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}, after line {number}: got a damaged gzip file ({error})") from None


def read_pairs(paths: Sequence) -> list[tuple[str, str]]:
    """(source, target) pairs of TSV files with two columns.

    Raises:
      ValueError: a line has another number of columns, or a file cannot be read.
    """
    pairs = []
    for path in paths:
        for number, line in enumerate(read_lines(path), 1):
            columns = line.split("\t")
            if len(columns) != 2:
                raise ValueError(f"{path}, line {number}: got {len(columns)} columns, expected 2 (source, tab, target)")
            pairs.append((columns[0], columns[1]))
    return pairs


def read_examples(paths: Sequence) -> list[tuple[str, str, list[int] | None]]:
    """(source, target, ids) of TSV files with two columns, where the ids are None, or three.

    A third column has the ids of the target, with spaces between them: what a model wrote need not be what its vocabulary
    makes of the text, and need not have come to an end.

    Raises:
      ValueError: a line has another number of columns or no ids in the third, or a file cannot be read.
    """
    examples: list[tuple[str, str, list[int] | None]] = []
    for path in paths:
        for number, line in enumerate(read_lines(path), 1):
            source, *rest = line.split("\t")
            if len(rest) not in (1, 2):
                expected = "2 (source, tab, target) or 3 (and the target's ids)"
                raise ValueError(f"{path}, line {number}: got {len(rest) + 1} columns, expected {expected}")
            ids = rest[1].split() if rest[1:] else None
            if ids is not None and not (ids and all(token.isdecimal() for token in ids)):
                raise ValueError(f"{path}, line {number}: got {rest[1]!r} in column 3, expected the target's ids")
            examples.append((source, rest[0], None if ids is None else [int(token) for token in ids]))
    return examples


def read_documents(paths: Sequence) -> list[str]:
    """Documents of text files, one a line, without the spaces around them; empty lines are left out.

    Raises:
      ValueError: a file has no text, or cannot be read.
    """
    documents = []
    for path in paths:
        found = [line.strip() for line in read_lines(path) if line.strip()]
        if not found:
            raise ValueError(f"{path}: got no text, expected at least one line that is not empty")
        documents += found
    return documents


def check_buckets(buckets: Sequence[int], batch_tokens: int, target_buckets: Sequence[int] = ()) -> None:
    """Raises ValueError where `BucketedBatches` cannot be made of them."""
    for name, lengths in dict(buckets=tuple(buckets), target_buckets=tuple(target_buckets or (1,))).items():
        if not lengths or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"{name}: got {lengths}, expected ascending lengths from 1")
        if batch_tokens < lengths[-1]:
            raise ValueError(f"batch_tokens: got {batch_tokens}, expected at least the longest bucket, {lengths[-1]}")


@dataclasses.dataclass(frozen=True)
class Batch:
    """One padded batch: `inputs [B, L]`, `targets [B, T]` (EOS included), int32, 0 is padding."""

    inputs: np.ndarray
    targets: np.ndarray


class BucketedBatches:
    """Endless, resumable batches of tokenised pairs, bucketed by length so that few shapes compile.

    Batch `step` depends on (seed, step) alone: a resumed run sees what an uninterrupted one would have seen. Every pair
    that is not left out comes once in `per_epoch` batches.
    """

    def __init__(
        self,
        pairs: Sequence,
        buckets: Sequence[int],
        batch_tokens: int,
        seed: int = 0,
        target_buckets: Sequence[int] = (),
    ):
        """Puts every pair into the shortest bucket that holds both sides, or each side into the shortest of its own.

        Args:
          pairs: (input ids, target ids), both with EOS.
          buckets: ascending lengths; longer pairs are left out (`dropped` counts them).
          batch_tokens: padded pieces of the longer side of a batch.
          seed: of the order of the pairs and of the batches, anew in every epoch.
          target_buckets: ascending lengths for the targets, where those are much shorter or longer than the inputs (each
            with each of `buckets` is a shape that compiles); none: both sides are padded alike.
        """
        self._pairs, self._seed = pairs, seed
        check_buckets(buckets, batch_tokens, target_buckets)
        longest = np.array([(len(source), len(target)) for source, target in pairs], int).reshape(-1, 2)
        if target_buckets:
            self._shapes = [(length, own) for length in buckets for own in target_buckets]
            places = [np.searchsorted(np.array(own), longest[:, i]) for i, own in enumerate((buckets, target_buckets))]
            dropped = (places[0] == len(buckets)) | (places[1] == len(target_buckets))
            self._bucket_of = np.where(dropped, len(self._shapes), places[0] * len(target_buckets) + places[1])
        else:
            self._shapes = [(length, length) for length in buckets]
            self._bucket_of = np.searchsorted(np.array(buckets), longest.max(axis=1))
        self._rows = [batch_tokens // max(shape) for shape in self._shapes]
        self.pairs = len(pairs)
        counts = np.bincount(self._bucket_of, minlength=len(self._shapes) + 1)
        self.dropped = int(counts[-1])
        self.per_epoch = int(sum(-(-count // rows) for count, rows in zip(counts, self._rows)))
        self.longest = " and ".join(str(lengths[-1]) for lengths in (buckets, target_buckets) if lengths)
        if not self.per_epoch:
            raise ValueError(f"got {len(pairs)} pairs, expected at least one of at most {self.longest} pieces")
        self._epoch: int | None = None
        self._plan: list[tuple[int, np.ndarray]] = []

    def _plan_epoch(self, epoch: int):
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._pairs))
        plan = []
        for bucket, rows in enumerate(self._rows):
            members = order[self._bucket_of[order] == bucket]
            plan += [(bucket, members[i : i + rows]) for i in range(0, len(members), rows)]
        self._epoch, self._plan = epoch, [plan[i] for i in rng.permutation(len(plan))]

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._plan_epoch(epoch)
        bucket, members = self._plan[index]
        batch = Batch(*(np.zeros((self._rows[bucket], length), np.int32) for length in self._shapes[bucket]))
        for row, member in enumerate(members):
            source, target = self._pairs[member]
            batch.inputs[row, : len(source)] = source
            batch.targets[row, : len(target)] = target
        return batch
