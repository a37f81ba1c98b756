"""TSV files and length-bucketed batches."""

import gzip

import numpy as np
import pytest

from specdec_jax.training import batches as training_batches
from specdec_jax.training import text_files


def pairs_of(lengths):
    """Pairs whose first source id is their number, so that they can be told apart."""
    return [
        ([10 + i] + [3] * (source - 2) + [1], [4] * (target - 1) + [1])
        for i, (source, target) in enumerate(lengths)
    ]


LENGTHS = [(2 + i % 9, 2 + i * 5 % 9) for i in range(57)] + [(11, 3), (3, 12)]
BUCKETS = (4, 7, 10)
PADDING = training_batches.PADDING


def batches(seed=0):
    return training_batches.BucketedBatches(pairs_of(LENGTHS), BUCKETS, 30, seed)


def numbers(batch):
    return [int(row[0]) - 10 for row in batch.inputs if row[0] >= 0]


def test_an_epoch_holds_each_pair_once_and_counts_the_dropped_ones():
    every = batches()
    assert (every.pairs, every.dropped) == (59, 2)
    for epoch in range(3):
        steps = range(epoch * every.per_epoch, (epoch + 1) * every.per_epoch)
        seen = [number for step in steps for number in numbers(every[step])]
        assert sorted(seen) == list(range(57))


def test_a_batch_holds_whole_pairs_in_the_shortest_bucket_that_fits():
    every, pairs = batches(), pairs_of(LENGTHS)
    shapes = set()
    for step in range(every.per_epoch):
        batch = every[step]
        assert (
            batch.inputs.shape
            == batch.targets.shape
            == (30 // batch.inputs.shape[1], batch.inputs.shape[1])
        )
        assert batch.inputs.dtype == batch.targets.dtype == np.int32
        shapes.add(batch.inputs.shape)
        for row, number in enumerate(numbers(batch)):
            source, target = pairs[number]
            assert list(batch.inputs[row]) == source + [PADDING] * (
                batch.inputs.shape[1] - len(source)
            )
            assert list(batch.targets[row]) == target + [PADDING] * (
                batch.inputs.shape[1] - len(target)
            )
            assert batch.inputs.shape[1] == next(
                b for b in BUCKETS if b >= max(len(source), len(target))
            )
    assert shapes == {(7, 4), (4, 7), (3, 10)}


def test_each_side_is_padded_to_buckets_of_its_own():
    pairs = pairs_of([(2 + 5 * i % 19, 2 + i % 6) for i in range(60)] + [(21, 3), (3, 9), (21, 9)])
    every = training_batches.BucketedBatches(pairs, (8, 20), 40, target_buckets=(3, 5, 8))
    assert (every.pairs, every.dropped, every.longest) == (63, 3, "20 and 8")
    seen, shapes = [], set()
    for step in range(every.per_epoch):
        batch = every[step]
        length, width = batch.inputs.shape[1], batch.targets.shape[1]
        assert batch.inputs.shape[0] == batch.targets.shape[0] == 40 // length
        shapes.add((length, width))
        for row, number in enumerate(numbers(batch)):
            source, target = pairs[number]
            assert (len(source) > 8, len(target) > 3, len(target) > 5) == (
                length == 20,
                width > 3,
                width == 8,
            )
            assert (
                list(batch.inputs[row, : len(source)]) == source
                and (batch.inputs[row, len(source) :] < 0).all()
            )
            assert (
                list(batch.targets[row, : len(target)]) == target
                and (batch.targets[row, len(target) :] < 0).all()
            )
            seen.append(number)
    assert sorted(seen) == list(range(60)) and shapes == {
        (a, b) for a in (8, 20) for b in (3, 5, 8)
    }


def test_targets_may_be_longer_than_inputs():
    every = training_batches.BucketedBatches(
        pairs_of([(3, 9), (4, 12)]), (4,), 24, target_buckets=(12,)
    )
    assert [array.shape for array in (every[0].inputs, every[0].targets)] == [(2, 4), (2, 12)]


def test_a_batch_depends_on_seed_and_step_alone():
    straight, jumping = batches(), batches()
    steps = list(range(3 * straight.per_epoch))
    expected = {step: straight[step] for step in steps}
    for step in reversed(steps):
        got = jumping[step]
        assert np.array_equal(got.inputs, expected[step].inputs)
        assert np.array_equal(got.targets, expected[step].targets)


def test_seed_and_epoch_change_the_order():
    one, other = batches(), batches(seed=1)

    def order(every, epoch):
        return [numbers(every[epoch * every.per_epoch + i]) for i in range(every.per_epoch)]

    assert order(one, 0) != order(one, 1)
    assert order(one, 0) != order(other, 0)


@pytest.mark.parametrize(
    "buckets, batch_tokens, lengths, message",
    [
        ((8, 4), 30, [(3, 3)], "buckets: got .8, 4., expected ascending"),
        ((4, 4), 30, [(3, 3)], "buckets: got"),
        ((), 30, [(3, 3)], "buckets: got"),
        ((0, 4), 30, [(3, 3)], "buckets: got"),
        ((4, 8), 7, [(3, 3)], "batch_tokens: got 7, expected at least the longest bucket, 8"),
        ((4, 8), 30, [(9, 3)], "got 1 pairs, expected at least one of at most 8 tokens"),
        ((4, 8), 30, [], "got 0 pairs"),
    ],
)
def test_bad_batches(buckets, batch_tokens, lengths, message):
    with pytest.raises(ValueError, match=message):
        training_batches.BucketedBatches(pairs_of(lengths), buckets, batch_tokens)


@pytest.mark.parametrize(
    "target_buckets, batch_tokens, message",
    [
        ((8, 4), 30, "target_buckets: got .8, 4., expected ascending"),
        ((0, 4), 30, "target_buckets: got"),
        ((4, 16), 15, "batch_tokens: got 15, expected at least the longest bucket, 16"),
        ((2,), 30, "got 1 pairs, expected at least one of at most 8 and 2 tokens"),
    ],
)
def test_bad_buckets_of_targets(target_buckets, batch_tokens, message):
    with pytest.raises(ValueError, match=message):
        training_batches.BucketedBatches(
            pairs_of([(3, 3)]), (8,), batch_tokens, target_buckets=target_buckets
        )


def test_read_pairs_takes_plain_and_compressed_files(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"Hello.\tHallo.\r\nYes.\tJa.")
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress("Über\tover\n".encode()))
    expected = [("Hello.", "Hallo."), ("Yes.", "Ja."), ("Über", "over")]
    assert text_files.read_pairs([tmp_path / "a.tsv", tmp_path / "b.tsv.gz"]) == expected


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.tsv", b"a\tb\nc\n", "a.tsv, line 2: got 1 columns, expected 2"),
        ("a.tsv", b"a\tb\tc\n", "a.tsv, line 1: got 3 columns"),
        ("a.tsv", b"a\tb\n\xff\tc\n", "a.tsv, line 2: got bytes that are not UTF-8"),
        (
            "a.tsv",
            b"a\tb\n" + b"a" * 5_000_000 + b"\n",
            "a.tsv, line 2: got 5,000,001 bytes, expected fewer than 4,000,000",
        ),
        ("a.tsv.gz", b"a\tb\n", "a.tsv.gz, after line 0: got a damaged gzip file"),
        (
            "a.tsv.gz",
            gzip.compress(b"a\tb\n" * 999, mtime=0)[:-9],
            "a.tsv.gz, after line .*: got a damaged gzip file",
        ),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        text_files.read_pairs([tmp_path / name])
