"""Makes batches of what models are trained on: pairs of texts, or plain text.

A corpus makes batches (inputs, targets) of files; `losses.py` says what a network does with them.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary, Vocabulary
from specdec_jax.training import text_files
from specdec_jax.training.batches import BucketedBatches

Paths = Sequence[pathlib.Path]

# SentencePiece skips lines of more than 4,192 bytes: longer ones are cut, between words if
# possible.
_PART = re.compile(r".{1,1000}(?=\s|$)|.{1,1000}")


class Corpus(Protocol):
    """What training does differently for each kind of model.

    Attributes:
      files: what the files are called in messages.
    """

    files: str

    def texts(self, paths: Paths) -> Iterator[str]:
        """Yields the texts on which a vocabulary is trained."""

    def batches(
        self,
        vocabulary: Vocabulary,
        paths: Paths,
        ids: int,
        batch_tokens: int,
        seed: int,
        start_token: int | None = None,
    ) -> BucketedBatches:
        """Returns batches of the files' texts.

        Args:
          vocabulary: encodes the texts.
          paths: the files.
          ids: number of ids that the model has; ids in a file must lie below it.
          batch_tokens, seed: as for `BucketedBatches`.
          start_token: id that a document begins with, where that is part of the targets; None: EOS.

        Raises:
          ValueError: a file cannot be read, has nothing in it, or has an id that the model lacks.
        """

    def start_token(self, vocabulary: Vocabulary) -> int:
        """Returns the id that a sequence of a new model begins with."""

    def summary(self, batches: BucketedBatches) -> str:
        """Returns a few words on what `batches` are made of."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sources and targets, for models with an encoder; lengths as for `BucketedBatches`."""

    buckets: tuple[int, ...]
    target_buckets: tuple[int, ...]
    files = "a TSV file"

    def texts(self, paths: Paths) -> Iterator[str]:
        return (text for pair in text_files.read_pairs(paths) for text in pair)

    def batches(
        self,
        vocabulary: Vocabulary,
        paths: Paths,
        ids: int,
        batch_tokens: int,
        seed: int,
        start_token: int | None = None,
    ) -> BucketedBatches:
        names, pairs = ", ".join(map(str, paths)), []
        for number, (source, target, given) in enumerate(text_files.read_examples(paths), 1):
            output = vocabulary.encode_output(target) if given is None else given
            pairs.append((vocabulary.encode_input(source), output))
            if not all(pairs[-1]):  # the tokenizer may make no token of a text
                got = "a text without tokens"
                raise ValueError(f"{names}, example {number}: got {got}, expected at least one")
        _check_ids(paths, max((max(side) for pair in pairs for side in pair), default=0), ids)
        try:
            return BucketedBatches(pairs, self.buckets, batch_tokens, seed, self.target_buckets)
        except ValueError as error:
            raise ValueError(f"{names}: {error}") from None

    def start_token(self, vocabulary: Vocabulary) -> int:
        return 0

    def summary(self, batches: BucketedBatches) -> str:
        left_out = f"{batches.dropped} of {batches.pairs} pairs left out"
        return f"{left_out} as longer than {batches.longest} tokens"


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents, one a line, for decoder-only models.

    They make one stream of ids with EOS after each document, cut into blocks. A start token that is
    not EOS stands before each document.

    Attributes:
      sequence_length: number of tokens that a block predicts. The token before its first one is fed
        too; before the very first that is the start token, for a new model EOS, which marks the
        beginning of a document.
    """

    sequence_length: int
    files = "a text file"

    def texts(self, paths: Paths) -> Iterator[str]:
        return (part for text in text_files.read_documents(paths) for part in _PART.findall(text))

    def batches(
        self,
        vocabulary: Vocabulary,
        paths: Paths,
        ids: int,
        batch_tokens: int,
        seed: int,
        start_token: int | None = None,
    ) -> BucketedBatches:
        end = vocabulary.eos_ids[0]
        start = end if start_token is None else start_token
        between = [end] if start == end else [end, start]
        parts = [vocabulary.encode(text) + between for text in text_files.read_documents(paths)]
        stream = np.concatenate([[start], *parts], dtype=np.int32)
        stream = stream[: len(stream) + 1 - len(between)]  # nothing follows the last EOS
        _check_ids(paths, int(stream.max()), ids)
        before, after, length = stream[:-1], stream[1:], self.sequence_length
        starts = range(0, len(after), length)
        blocks = [(before[i : i + length], after[i : i + length]) for i in starts]
        return BucketedBatches(blocks, (length,), batch_tokens, seed)

    def start_token(self, vocabulary: Vocabulary) -> int:
        return vocabulary.eos_ids[0]

    def summary(self, batches: BucketedBatches) -> str:
        return f"{batches.pairs} blocks of {batches.longest} tokens"


def _check_ids(paths: Paths, largest: int, ids: int) -> None:
    # From a file with ids, or of a vocabulary with more tokens than the model has logits.
    if largest >= ids:
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: got the id {largest}, expected at most {ids - 1}")


def train_vocabulary(corpus: Corpus, paths: Paths, size: int) -> bytes:
    """Returns a SentencePiece model of `size` tokens, trained on the files of a corpus.

    Raises:
      ValueError: a file cannot be read, or the texts do not allow this number of tokens.
    """
    texts = corpus.texts(paths)
    try:
        return SentencePieceVocabulary.train(texts, size).model
    except RuntimeError as error:  # too many tokens for the text, too few for its characters
        reason = str(error).rpartition("] ")[2]
        expected = f"a number that fits: {reason}"
        raise ValueError(f"vocabulary_size: got {size}, expected {expected}") from None
