"""Makes batches of what models are trained on: pairs of texts with an encoder, plain text without
one.

A corpus makes batches (inputs, targets) of files; `losses.py` says what a network does with the
two.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from specdec_jax.files.writing import write_file
from specdec_jax.models import vocabularies
from specdec_jax.training import text_files
from specdec_jax.training.batches import BucketedBatches

# SentencePiece skips lines of more than 4,192 bytes: longer ones are cut, between words if possible.
_PART = re.compile(r".{1,1000}(?=\s|$)|.{1,1000}")


class Corpus(Protocol):
    """What training does differently for each kind of model.

    Attributes:
      files: what the files are called in messages.
    """

    files: str

    def texts(self, paths: Sequence) -> Iterator[str]:
        """Yields the texts on which a vocabulary is trained."""

    def batches(self, vocabulary, paths: Sequence, ids: int, batch_tokens: int, seed: int) -> BucketedBatches:
        """Returns batches of the files' texts.

        Args:
          vocabulary: encodes the texts.
          paths: the files.
          ids: number of ids that the model has; ids in a file must lie below it.
          batch_tokens, seed: as for `BucketedBatches`.

        Raises:
          ValueError: a file cannot be read, has nothing in it, or has an id that would count as padding.
        """

    def start_token(self, vocabulary) -> int:
        """Returns the id that a sequence begins with."""

    def summary(self, batches: BucketedBatches) -> str:
        """Returns a few words on what `batches` are made of."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sources and targets, for models with an encoder; lengths as for `BucketedBatches`."""

    buckets: tuple[int, ...]
    target_buckets: tuple[int, ...]
    files = "a TSV file"

    def texts(self, paths):
        return (text for pair in text_files.read_pairs(paths) for text in pair)

    def batches(self, vocabulary, paths, ids, batch_tokens, seed):
        end = list(vocabulary.eos_ids)
        pairs = [
            (vocabulary.encode(source) + end, vocabulary.encode(target) + end if given is None else given)
            for source, target, given in text_files.read_examples(paths)
        ]
        name, largest = ", ".join(map(str, paths)), max((max(side) for pair in pairs for side in pair), default=0)
        if largest >= ids:  # only ids from a file can be too large
            raise ValueError(f"{name}: got the id {largest}, expected at most {ids - 1}")
        _check_padding(name, any(0 in side for pair in pairs for side in pair), vocabulary)
        try:
            return BucketedBatches(pairs, self.buckets, batch_tokens, seed, self.target_buckets)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def start_token(self, vocabulary):
        return 0

    def summary(self, batches):
        return f"{batches.dropped} of {batches.pairs} pairs left out as longer than {batches.longest} pieces"


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents, one a line, for decoder-only models: one stream of ids with EOS after each
    document, cut into blocks.

    Attributes:
      sequence_length: number of pieces that a block predicts. The piece before its first one is fed
        too; before the very first that is EOS. So EOS is the start token: it says that a document
        begins.
    """

    sequence_length: int
    files = "a text file"

    def texts(self, paths):
        return (part for text in text_files.read_documents(paths) for part in _PART.findall(text))

    def batches(self, vocabulary, paths, ids, batch_tokens, seed):
        end = list(vocabulary.eos_ids[:1])
        documents = text_files.read_documents(paths)
        stream = np.concatenate([end, *(vocabulary.encode(text) + end for text in documents)], dtype=np.int32)
        _check_padding(", ".join(map(str, paths)), not stream.all(), vocabulary)
        before, after, length = stream[:-1], stream[1:], self.sequence_length
        blocks = [(before[i : i + length], after[i : i + length]) for i in range(0, len(after), length)]
        return BucketedBatches(blocks, (length,), batch_tokens, seed)

    def start_token(self, vocabulary):
        return vocabulary.eos_ids[0]

    def summary(self, batches):
        return f"{batches.pairs} blocks of {batches.longest} pieces"


def _check_padding(name: str, found: bool, vocabulary) -> None:
    if found:  # ids from a file, or a vocabulary with other special ids than T5's
        raise ValueError(f"{name}: got the piece {vocabulary.piece(0)!r} with id 0, expected none: 0 is padding")


def check_special(name: str, vocabulary, start_token: int, corpus: Corpus) -> None:
    """Raises ValueError for a model with another kind of vocabulary or start token than training
    uses."""
    given = type(vocabulary).__name__
    if not isinstance(vocabulary, vocabularies.SentencePieceVocabulary):
        raise ValueError(f"{name}: got {given!r}, expected a SentencePiece vocabulary")
    expected = corpus.start_token(vocabulary)
    if start_token != expected:
        raise ValueError(f"{name}: got {f'start token {start_token}'!r}, expected {expected}, that of training")


def trained_vocabulary(corpus: Corpus, paths: Sequence, size: int) -> bytes:
    """Returns a SentencePiece model of `size` pieces, trained on the files of a corpus.

    Raises:
      ValueError: a file cannot be read, or the texts do not allow this number of pieces.
    """
    texts = corpus.texts(paths)
    try:
        return vocabularies.SentencePieceVocabulary.train(texts, size).model
    except RuntimeError as error:  # too many pieces for the text, too few for its characters
        reason = str(error).rpartition("] ")[2]
        raise ValueError(f"vocabulary_size: got {size}, expected a number that fits: {reason}") from None


def vocabulary_at(
    path: pathlib.Path, size: int, given: Mapping[str, vocabularies.SentencePieceVocabulary], make: Callable[[], bytes]
) -> vocabularies.SentencePieceVocabulary:
    """Returns the vocabulary of a run, of `size` ids; writes it to `path` if nothing is there.

    Args:
      path: path of the SentencePiece model.
      size: number of ids, sentinels included.
      given: vocabularies of the models that a run begins with, which must have the same pieces, by
        the models' names in messages.
      make: makes a vocabulary if none is given.

    Raises:
      ValueError: there are other pieces at `path`, or another number of them.
    """
    owner = next(iter(given), None)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, given[owner].model if owner else make())
    vocabulary = vocabularies.SentencePieceVocabulary.load(path, given[owner].extra_ids if owner else 0)
    for name, pieces in given.items():
        if pieces.fingerprint() != vocabulary.fingerprint():
            raise ValueError(f"vocabulary: got {path}, expected {name}'s pieces")
    if vocabulary.size != size:
        got = f"{vocabulary.size - vocabulary.extra_ids} pieces in {path}"
        got += f" and {vocabulary.extra_ids} sentinels of {owner}" if vocabulary.extra_ids else ""
        raise ValueError(f"vocabulary: got {got!r}, expected vocabulary_size = {size}")
    return vocabulary


def recorded_vocabulary(path: pathlib.Path, size: int) -> vocabularies.SentencePieceVocabulary:
    """Returns the vocabulary of a run that has begun; ids beyond the file's pieces, up to `size`,
    are sentinels."""
    pieces = vocabularies.SentencePieceVocabulary.load(path)
    sentinels = size - pieces.size
    if sentinels < 0:
        got = f"{pieces.size} pieces in {path}"
        raise ValueError(f"vocabulary: got {got!r}, expected at most vocabulary_size = {size}")
    return vocabularies.SentencePieceVocabulary(pieces.model, sentinels) if sentinels else pieces
