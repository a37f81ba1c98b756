"""Makes batches of what models are trained on: pairs of texts, or plain text.

A corpus makes batches (inputs, targets) of files; `losses.py` says what a network does with them.
"""

import abc
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary, Vocabulary
from specdec_jax.training import text_files
from specdec_jax.training.batches import PADDING, BucketedBatches, Example

Paths = Sequence[AnyPath]
# What files are called in messages where their kind is not known yet.
ANY_FILES = "a TSV file, or a text file for a decoder-only model"

# SentencePiece skips lines of more than 4,192 bytes: longer ones are cut, between words if
# possible.
_PART = re.compile(r".{1,1000}(?=\s|$)|.{1,1000}")


class Corpus(abc.ABC):
    """What training does differently for each kind of model.

    Attributes:
      files: what the files are called in messages.
      buckets, target_buckets: lengths, as for `BucketedBatches`.
    """

    files: ClassVar[str]
    buckets: tuple[int, ...]
    target_buckets: tuple[int, ...]

    def batches(
        self,
        vocabulary: Vocabulary,
        paths: Paths,
        ids: int,
        batch_tokens: int,
        seed: int,
        start_token: int | None = None,
    ) -> BucketedBatches:
        """Returns batches of the files' texts; `batch_tokens` and `seed` as for `BucketedBatches`.

        Args:
          ids: number of ids that the model has; ids in a file must lie below it.
          start_token: id that a document begins with, where that is part of the targets; None: EOS.

        Raises:
          ValueError: a file cannot be read, has nothing in it, or has an id that the model lacks.
        """
        pairs, largest = self._read(vocabulary, paths, start_token)
        try:
            if largest >= ids:
                raise ValueError(f"got the id {largest}, expected at most {ids - 1}")
            return BucketedBatches(pairs, self.buckets, batch_tokens, seed, self.target_buckets)
        except ValueError as error:
            raise ValueError(f"{', '.join(map(str, paths))}: {error}") from None

    @abc.abstractmethod
    def _read(
        self, vocabulary: Vocabulary, paths: Paths, start_token: int | None
    ) -> tuple[list[Example], int]:
        """Returns the examples of files, and their largest id."""

    @abc.abstractmethod
    def texts(self, paths: Paths) -> Iterator[str]:
        """Yields the texts on which a vocabulary is trained."""

    @abc.abstractmethod
    def start_token(self, vocabulary: Vocabulary) -> int:
        """Returns the id that a sequence of a new model begins with."""

    @abc.abstractmethod
    def summary(self, batches: BucketedBatches) -> str:
        """Returns a few words on what `batches` are made of."""


@dataclasses.dataclass(frozen=True)
class Pairs(Corpus):
    """Sources and targets, for models with an encoder; lengths as for `BucketedBatches`."""

    files = "a TSV file"
    buckets: tuple[int, ...]
    target_buckets: tuple[int, ...]

    def _read(
        self, vocabulary: Vocabulary, paths: Paths, start_token: int | None
    ) -> tuple[list[Example], int]:
        pairs: list[Example] = []
        for number, (source, target, given) in enumerate(text_files.read_examples(paths), 1):
            output = given
            if output is None:
                output = self._encode_target(vocabulary, target, start_token)
            pairs.append((self._encode_source(vocabulary, source), output))
            if not all(pairs[-1]):  # the tokenizer may make no token of a text
                got = f"{', '.join(map(str, paths))}, example {number}: got a text without tokens"
                raise ValueError(f"{got}, expected at least one")
        return pairs, max((max(side) for pair in pairs for side in pair), default=0)

    def _encode_source(self, vocabulary: Vocabulary, text: str) -> list[int]:
        return vocabulary.encode_input(text)

    def _encode_target(
        self, vocabulary: Vocabulary, text: str, start_token: int | None
    ) -> list[int]:
        return vocabulary.encode_output(text, start_token)

    def texts(self, paths: Paths) -> Iterator[str]:
        return (text for pair in text_files.read_pairs(paths) for text in pair)

    def start_token(self, vocabulary: Vocabulary) -> int:
        return 0

    def summary(self, batches: BucketedBatches) -> str:
        left_out = f"{batches.dropped} of {batches.pairs} pairs left out"
        return f"{left_out} as longer than {batches.longest} tokens"


@dataclasses.dataclass(frozen=True)
class Continuations(Pairs):
    """Prompts and their outputs, for decoder-only models, which learn the outputs alone.

    An example is a prompt and its output as one sequence; lengths are for the whole of it.
    """

    files = "a TSV file"

    def _encode_source(self, vocabulary: Vocabulary, text: str) -> list[int]:
        return vocabulary.encode_prompt(text)

    def _encode_target(
        self, vocabulary: Vocabulary, text: str, start_token: int | None
    ) -> list[int]:
        return vocabulary.encode_continuation(text)

    def _read(
        self, vocabulary: Vocabulary, paths: Paths, start_token: int | None
    ) -> tuple[list[Example], int]:
        pairs, largest = super()._read(vocabulary, paths, start_token)
        joined: list[Example] = []
        for prompt, output in pairs:
            unlearned = [PADDING] * (len(prompt) - 1)
            joined.append(([*prompt, *output[:-1]], [*unlearned, *output]))
        return joined, largest

    def start_token(self, vocabulary: Vocabulary) -> int:
        return vocabulary.eos_ids[0]


@dataclasses.dataclass(frozen=True)
class Text(Corpus):
    """Documents, one a line, for decoder-only models.

    They make one stream of ids with EOS after each document, cut into blocks. A start token that is
    not EOS stands before each document.

    Attributes:
      sequence_length: number of tokens that a block predicts. The token before its first one is fed
        too; before the very first that is the start token, for a new model EOS, which marks the
        beginning of a document.
    """

    files = "a text file"
    sequence_length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", (self.sequence_length,))
        object.__setattr__(self, "target_buckets", ())

    def _read(
        self, vocabulary: Vocabulary, paths: Paths, start_token: int | None
    ) -> tuple[list[Example], int]:
        end, length = vocabulary.eos_ids[0], self.sequence_length
        start = end if start_token is None else start_token
        between = [end] if start == end else [end, start]
        parts = [vocabulary.encode(text) + between for text in text_files.read_documents(paths)]
        stream = np.concatenate([[start], *parts], dtype=np.int32)
        stream = stream[: len(stream) + 1 - len(between)]  # nothing follows the last EOS
        before, after = stream[:-1], stream[1:]
        starts = range(0, len(after), length)
        blocks: list[Example] = [(before[i : i + length], after[i : i + length]) for i in starts]
        return blocks, int(stream.max())

    def texts(self, paths: Paths) -> Iterator[str]:
        return (part for text in text_files.read_documents(paths) for part in _PART.findall(text))

    def start_token(self, vocabulary: Vocabulary) -> int:
        return vocabulary.eos_ids[0]

    def summary(self, batches: BucketedBatches) -> str:
        return f"{batches.pairs} blocks of {batches.longest} tokens"


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
        if not reason:
            raise mismatch_error("train_files", "no text", "at least one line of it") from None
        expected = f"a number that fits: {reason}"
        raise ValueError(f"vocabulary_size: got {size}, expected {expected}") from None
