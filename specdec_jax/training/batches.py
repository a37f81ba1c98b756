"""Cuts examples into batches of similar lengths, in an order that a seed decides."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PADDING = -1  # no id: in many vocabularies 0 is an ordinary token


# An example: ids of the inputs and of the targets, both with EOS.
Example = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]


def check_buckets(
    buckets: Sequence[int], batch_tokens: int, target_buckets: Sequence[int] = ()
) -> None:
    """Raises ValueError if `BucketedBatches` cannot be made with these lengths."""
    for name, lengths in (("buckets", buckets), ("target_buckets", target_buckets or (1,))):
        if not lengths or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"{name}: got {tuple(lengths)}, expected ascending lengths from 1")
        if batch_tokens < lengths[-1]:
            expected = f"at least the longest bucket, {lengths[-1]}"
            raise ValueError(f"batch_tokens: got {batch_tokens}, expected {expected}")


class Batch(NamedTuple):
    """One padded batch.

    Attributes:
      inputs: `[B, L]` int32, then `PADDING`.
      targets: `[B, T]` int32, EOS included, then `PADDING`.
    """

    inputs: np.ndarray
    targets: np.ndarray


class BucketedBatches:
    """Endless, resumable batches of tokenised pairs, by length so that few shapes compile.

    Batch `step` depends on (seed, step) only, so a resumed run sees what an uninterrupted one would
    have seen. Each epoch of `per_epoch` batches has every pair once, but for those left out.
    """

    def __init__(
        self,
        pairs: Sequence[Example],
        buckets: Sequence[int],
        batch_tokens: int,
        seed: int = 0,
        target_buckets: Sequence[int] = (),
    ):
        """Puts every pair into the shortest bucket that holds both sides.

        Args:
          pairs: the examples.
          buckets: ascending lengths; longer pairs are left out (`dropped` counts them).
          batch_tokens: number of padded tokens on the longer side of a batch.
          seed: decides the order of pairs and batches, which is new in every epoch.
          target_buckets: ascending lengths for the targets, if those are much shorter or longer
            than the inputs; each side is then put into its own shortest bucket. Each combination
            is a shape that compiles. None given: both sides are padded alike.
        """
        check_buckets(buckets, batch_tokens, target_buckets)
        self._pairs, self._seed = pairs, seed
        lengths = np.array([(len(source), len(target)) for source, target in pairs], int)
        lengths = lengths.reshape(-1, 2)
        if target_buckets:
            self._shapes = [(source, target) for source in buckets for target in target_buckets]
            places = np.searchsorted(buckets, lengths[:, 0])
            own = np.searchsorted(target_buckets, lengths[:, 1])
            dropped = (places == len(buckets)) | (own == len(target_buckets))
            combined = places * len(target_buckets) + own
            self._bucket_of = np.where(dropped, len(self._shapes), combined)
        else:
            self._shapes = [(length, length) for length in buckets]
            self._bucket_of = np.searchsorted(buckets, lengths.max(axis=1))
        self._rows = [batch_tokens // max(shape) for shape in self._shapes]
        self.pairs = len(pairs)
        counts = np.bincount(self._bucket_of, minlength=len(self._shapes) + 1)
        self.dropped = int(counts[-1])
        self.per_epoch = int(sum(-(-count // rows) for count, rows in zip(counts, self._rows)))
        longest = [str(lengths[-1]) for lengths in (buckets, target_buckets) if lengths]
        self.longest = " and ".join(longest)
        if not self.per_epoch:
            expected = f"at least one of at most {self.longest} tokens"
            raise ValueError(f"got {len(pairs)} pairs, expected {expected}")
        self._epoch: int | None = None
        self._plan: list[tuple[int, np.ndarray]] = []

    def _plan_epoch(self, epoch: int) -> None:
        """Decides the batches of an epoch: shape and pairs of each."""
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
        shapes = [(self._rows[bucket], length) for length in self._shapes[bucket]]
        batch = Batch(*(np.full(shape, PADDING, np.int32) for shape in shapes))
        for row, member in enumerate(members):
            source, target = self._pairs[member]
            batch.inputs[row, : len(source)] = source
            batch.targets[row, : len(target)] = target
        return batch
