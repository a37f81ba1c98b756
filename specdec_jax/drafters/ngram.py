"""Drafts by a table of counted n-grams."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.drafters.continuations import ContinuationDrafter, Found, Texts
from specdec_jax.drafters.ngram_table import NGramTable
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.tokenizers.vocabularies import Vocabulary


@flax.struct.dataclass
class NGramDrafter(ContinuationDrafter):
    """A drafter that proposes what followed the last n − 1 tokens in texts counted before.

    n = 1 is a unigram model, n = 2 a bigram model. The longest context that was seen counts; if
    none was, the frequencies of single ids. In counting and in drafting, contexts that reach beyond
    the beginning are filled up with the start token. In a tree each node's own path is looked up.

    Attributes:
      table: the counts.
      sampled: False drafts the most frequent id, a point mass; in a tree the most frequent ids.
        True draws from the relative frequencies (after a context, those of the continuations that
        are kept), under the same processors, temperature and filters as the target.
    """

    table: NGramTable
    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    varies: ClassVar[Any] = False

    @classmethod
    @isolated
    def count(
        cls,
        sequences: Iterable[Sequence[int]],
        vocab_size: int,
        order: int,
        *,
        start_token: int = 0,
        continuations: int = 8,
        sampled: bool = False,
        vocabulary: Vocabulary | None = None,
    ) -> "NGramDrafter":
        """Returns a drafter that has counted `sequences` of ids.

        Args:
          sequences: ids of outputs, each with its EOS; an empty one counts for nothing.
          vocab_size: V; all ids lie below it.
          order: n ≥ 1, one more than the length of the longest context.
          start_token: the target's start token.
          continuations: M ≥ 1, how many ids are kept for a context, the most frequent ones.
          sampled: see the attribute.
          vocabulary: the ids' vocabulary; if given, the drafter is rejected for a target with
            another.

        Raises:
          ValueError: nothing to count, ids outside the vocabulary, or a number out of its range.
        """
        arguments.check_flag("sampled", sampled)
        table = NGramTable.count(
            sequences,
            vocab_size,
            order,
            start_token=start_token,
            continuations=continuations,
            fingerprint=vocabulary.fingerprint() if vocabulary is not None else "",
        )
        return cls(table, bool(sampled))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file (.npz) that `load` reads."""
        self.table.save(path, sampled=np.bool_(self.sampled))

    @classmethod
    @isolated
    def load(
        cls,
        path: str | os.PathLike[str],
        vocabulary: Vocabulary | None = None,
        sampled: bool | None = None,
    ) -> "NGramDrafter":
        """Returns the drafter that `save` wrote; `sampled`, if given, replaces the file's.

        Raises:
          ValueError: no such file, a truncated one, or one that was counted with another
            vocabulary.
        """
        table, values = NGramTable.load(path)
        _check_vocabulary(str(path), table, vocabulary)
        return cls(table, bool(values.get("sampled", False)) if sampled is None else sampled)

    __repr__ = Drafter.__repr__  # not the dataclass's, with all arrays

    @property
    def name(self) -> str:
        return f"{self.table.order}-gram table"

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        expected = "an NGramTable (NGramDrafter.load and count make one)"
        arguments.check_kind("table", self.table, NGramTable, expected)
        _check_vocabulary("drafter", self.table, target.vocabulary)
        self.check_ids(target.config.vocab_size, target.start_token)

    def check_ids(self, width: int, start_token: int) -> None:
        """Raises ValueError for a target with fewer ids than the table, or another start token."""
        table = self.table
        if table.vocab_size > width:
            expected = f"at most the target's {width}"
            raise ValueError(f"drafter: got a table of {table.vocab_size} ids, expected {expected}")
        if table.start_token != start_token:
            got, expected = f"start token {table.start_token}", f"the target's {start_token}"
            raise ValueError(f"drafter: got {got}, expected {expected}")

    def find(self, memory: Any, texts: Texts, count: int, length: int) -> Found:
        rows, match = self.table.find_rows(texts.tokens, texts.lengths)
        return Found(self.table.ranked(rows, count)[..., None], match[:, None])

    def logits(self, memory: Any, texts: Texts) -> jax.Array:
        return self.table.logits(self.table.find_rows(texts.tokens, texts.lengths)[0])


def _check_vocabulary(name: str, table: NGramTable, vocabulary: Vocabulary | None) -> None:
    if vocabulary is not None and not table.matches(vocabulary):
        got = f"a table of {table.vocab_size} ids of another vocabulary"
        expected = f"that of the target ({vocabulary.size} pieces)"
        raise ValueError(f"{name}: got {got}, expected {expected}")
