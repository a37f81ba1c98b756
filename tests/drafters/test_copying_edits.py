"""Copies of an input with some words changed: tokens per call, by rule, without a trained model.

The target echoes the edited text, and the drafter reads the text as it was before.
"""

import functools

import flax.struct
import jax
import numpy as np
import pytest
from toy_models import EchoModel, Words

import specdec_jax as sd
from specdec_jax.drafters.continuations import Inputs

V, ROWS, WORDS, GAMMA = 400, 12, 50, 16
# The first tier has the same rules beside a slow search.
pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.slow]


class ManyWords(Words):
    size = V


@flax.struct.dataclass
class Original(sd.PromptLookupDrafter):
    """Copies from `originals`, not from the input that the target echoes."""

    originals: jax.Array | None = None
    lengths: jax.Array | None = None

    def init(self, inputs, input_lengths, tokens, slots):
        return Inputs(self.originals, self.lengths)


@flax.struct.dataclass
class CountedFromTheStartToken(Original):
    """A mutant: the expected place is counted from slot 0, not from where new tokens begin."""

    def find(self, memory, texts, count, length):
        texts = texts._replace(starts=texts.starts * 0)
        return super().find(memory, texts, count, length)


@functools.cache
def make_texts(share: float) -> tuple[list[list[int]], list[list[int]]]:
    """Returns texts, and the same with `share` of the words replaced, left out or added to.

    Words have one to three ids and the frequencies of a language (the n-th word 1 / n).
    """
    rng = np.random.default_rng(0)
    words = [rng.integers(2, V, rng.integers(1, 4)).tolist() for _ in range(500)]
    frequency = 1 / np.arange(1, 501)

    def pick() -> list[int]:
        return words[rng.choice(500, p=frequency / frequency.sum())]

    def edit(word: list[int]) -> list[int]:
        if rng.random() >= share:
            return word
        return [pick(), [], word + pick()][rng.integers(3)]

    texts = [[pick() for _ in range(WORDS)] for _ in range(ROWS)]
    edited = [[edit(word) for word in text] for text in texts]
    return tuple([sum(text, []) + [1] for text in part] for part in (texts, edited))


def count_tokens_per_call(share: float, kind=None, gamma=GAMMA, **options) -> float:
    originals, edited = make_texts(share)
    lengths = np.array([len(text) for text in originals], np.int32)
    padded = np.array([text + [0] * (max(lengths) - len(text)) for text in originals], np.int32)
    drafter = (kind or Original)(originals=padded, lengths=lengths, **options)
    result = sd.generate(
        EchoModel(ManyWords()), edited, drafter=drafter, gamma=gamma, max_new_tokens=200
    )
    assert [row[:n].tolist() for row, n in zip(result.tokens, result.lengths)] == edited
    calls = sum(row.target_calls for row in result.stats.per_row)
    return float(result.lengths.sum()) / calls


@pytest.mark.parametrize("share", [0.03, 0.08, 0.15])
def test_copies_from_the_expected_place_are_accepted_more_often(share):
    latest = count_tokens_per_call(share, prefer="latest")
    nearest = count_tokens_per_call(share)
    everywhere = count_tokens_per_call(share, min_match=0)
    assert nearest > 1.05 * latest and everywhere > 1.15 * latest and everywhere > nearest


def test_the_expected_place_is_counted_from_where_new_tokens_begin():
    right = count_tokens_per_call(0.08, min_match=0)
    assert right > 1.02 * count_tokens_per_call(0.08, CountedFromTheStartToken, min_match=0)
