"""Text in and out: vocabularies, TSV files, length-bucketed batches."""

import dataclasses
import gzip
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from specdec_jax.vocabularies import (
    EOS_ID,
    PAD_ID,
    UNK_ID,
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
)

__all__ = [
    "EOS_ID", "PAD_ID", "UNK_ID", "Batch", "BucketedBatches", "ByteVocabulary", "SentencePieceVocabulary",
    "TokenizerJsonVocabulary", "Vocabulary", "read_lines", "read_pairs",
]  # fmt: skip

def read_lines(path) -> Iterator[str]:
    """Lines of a UTF-8 text file, gzip or not, without their ends."""
    path = pathlib.Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: got bytes that are not UTF-8 ({error.reason}), expected UTF-8 text") from None


def read_pairs(paths: Sequence) -> list[tuple[str, str]]:
    """(source, target) pairs of TSV files with two columns."""
    pairs = []
    for path in paths:
        for number, line in enumerate(read_lines(path), 1):
            columns = line.split("\t")
            if len(columns) != 2:
                raise ValueError(f"{path}, line {number}: got {len(columns)} columns, expected 2 (source, tab, target)")
            pairs.append((columns[0], columns[1]))
    return pairs


@dataclasses.dataclass(frozen=True)
class Batch:
    """One padded batch: `inputs [B, L]`, `targets [B, T]` (EOS included), int32, 0 is padding."""

    inputs: np.ndarray
    targets: np.ndarray


class BucketedBatches:
    """Endless, resumable batches of tokenised pairs, bucketed by length so that few shapes compile.

    Batch `step` depends on (seed, step) alone: a resumed run sees what an uninterrupted one would have seen.
    """

    def __init__(self, pairs, buckets: Sequence[int], batch_tokens: int, seed: int = 0):
        """Args: pairs: list of (input ids, target ids), both with EOS. buckets: ascending lengths; longer pairs are
        left out (`dropped` counts them). batch_tokens: padded pieces of one side of a batch."""
        self._pairs, self._buckets, self._seed = pairs, tuple(buckets), seed
        self._rows = [max(1, batch_tokens // length) for length in buckets]
        longest = np.array([max(len(source), len(target)) for source, target in pairs])
        self._bucket_of = np.searchsorted(np.array(buckets), longest)
        self.dropped = int(np.sum(self._bucket_of == len(buckets)))
        counts = np.bincount(self._bucket_of, minlength=len(buckets))[: len(buckets)]
        self.per_epoch = int(sum(-(-count // rows) for count, rows in zip(counts, self._rows)))
        if not self.per_epoch:
            raise ValueError(f"got {len(pairs)} training pairs, none of at most {buckets[-1]} pieces")
        self._epoch, self._plan = None, []

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
        shape = (self._rows[bucket], self._buckets[bucket])
        batch = Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32))
        for row, member in enumerate(members):
            source, target = self._pairs[member]
            batch.inputs[row, : len(source)] = source
            batch.targets[row, : len(target)] = target
        return batch
