"""Sorted texts in memory, for tests of drafters that read them."""

from collections.abc import Sequence

import numpy as np

import specdec_jax as sd
from specdec_jax.drafters.sorted_file import join_sequences
from specdec_jax.drafters.sorted_text import SortedText, sort_places


def sort_texts(sequences: Sequence[Sequence[int]], vocab: int, capacity: int = 1) -> SortedText:
    """Returns sequences of ids as the text of a `SuffixDrafter`."""
    ids = join_sequences(sequences, vocab)
    return SortedText.make(ids, sort_places(ids), capacity)


def random_texts(vocab: int, **settings) -> sd.SuffixDrafter:
    """Returns a drafter with random texts of few ids, so that most contexts are there."""
    sequences = np.random.default_rng(2).integers(0, vocab - 3, (30, 20)).tolist()
    return sd.SuffixDrafter(sort_texts(sequences, vocab), **settings)
