"""Drafts by a table of counted n-grams."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.drafters.continuations import Found, StoredDrafter, Texts
from specdec_jax.drafters.ngram_table import (
    ARRAYS,
    NUMBERS,
    count_contexts,
    read_table,
    write_table,
)
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.tokenizers.vocabularies import Vocabulary


@flax.struct.dataclass
class NGramDrafter(StoredDrafter):
    """A drafter that proposes what followed the last n − 1 tokens in texts counted before.

    n = 1 is a unigram model, n = 2 a bigram model. The longest context that was seen counts; if
    none was, the frequencies of single ids. In counting and in drafting, contexts that reach beyond
    the beginning are filled up with the start token. In a tree each node's own path is looked up.

    Attributes:
      parents, extras: `[N − 1]` int32, in lexicographic order: row i + 1 is row `parents[i]` with
        the id `extras[i]` before it.
      starts: `[N + 1]` int32; the continuations of row r lie at `starts[r]` … `starts[r + 1] − 1`.
      next_tokens, counts: `[E]` int32, the most frequent continuation first; of equally frequent
        ones the smallest id first.
      unigram: `[V]` int32, how often each id occurs.
      vocab_size: V.
      order: n.
      start_token: the id that stands for what lies before a sequence.
      continuations: M, the most that are kept for a context.
      fingerprint: fingerprint of the vocabulary, "" if it is not known.
      sampled: False drafts the most frequent id, a point mass; in a tree the most frequent ids.
        True draws from the relative frequencies (after a context, those of the continuations that
        are kept), under the same processors, temperature and filters as the target.
    """

    parents: jax.Array
    extras: jax.Array
    starts: jax.Array
    next_tokens: jax.Array
    counts: jax.Array
    unigram: jax.Array
    vocab_size: int = flax.struct.field(pytree_node=False)
    order: int = flax.struct.field(pytree_node=False)
    start_token: int = flax.struct.field(pytree_node=False)
    continuations: int = flax.struct.field(pytree_node=False)
    fingerprint: str = flax.struct.field(pytree_node=False, default="")
    sampled: bool = flax.struct.field(pytree_node=False, default=False)
    varies: ClassVar[Any] = False
    what: ClassVar[str] = "a table"

    @classmethod
    @isolated
    def count(
        cls,
        sequences: Iterable[Sequence[int]],
        vocab_size: int,
        order: int,
        *,
        start_token: int = 0,
        first_token: int | None = None,
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
          first_token: the token before every output, if it is another, as an mBART's language is.
          continuations: M ≥ 1, how many ids are kept for a context, the most frequent ones.
          sampled: see the attribute.
          vocabulary: the ids' vocabulary; if given, the drafter is rejected for a target with
            another.

        Raises:
          ValueError: nothing to count, ids outside the vocabulary, or a number out of its range.
        """
        arguments.check_flag("sampled", sampled)
        fingerprint = vocabulary.fingerprint() if vocabulary is not None else ""
        counted = count_contexts(
            sequences, vocab_size, order, start_token, continuations, first_token
        )
        return cls._put_on_device(counted, fingerprint, bool(sampled))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file (.npz) that `load` reads."""
        names = *ARRAYS, *NUMBERS, "fingerprint", "sampled"
        write_table(path, **{name: np.asarray(getattr(self, name)) for name in names})

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
        if sampled is not None:
            sampled = arguments.check_flag("sampled", sampled)
        values = read_table(path)
        sampled = bool(values.get("sampled", False)) if sampled is None else sampled
        drafter = cls._put_on_device(values, str(values["fingerprint"]), sampled)
        drafter.check_vocabulary(str(path), vocabulary)
        return drafter

    @classmethod
    def _put_on_device(cls, table: dict[str, Any], fingerprint: str, sampled: bool):
        arrays = {name: jax.device_put(table[name].astype(np.int32)) for name in ARRAYS}
        numbers = {name: table[name] for name in NUMBERS}
        return cls(**arrays, **numbers, fingerprint=fingerprint, sampled=sampled)

    __repr__ = Drafter.__repr__  # not the dataclass's, with all arrays

    @property
    def name(self) -> str:
        return f"{self.order}-gram table"

    def check_ids(self, width: int, start_token: int) -> None:
        super().check_ids(width, start_token)
        if self.start_token != start_token:
            raise mismatch_error(
                "drafter", f"start token {self.start_token}", f"the target's {start_token}"
            )

    def find(self, memory: Any, texts: Texts, count: int, length: int) -> Found:
        rows, match = self.find_rows(texts.tokens, texts.lengths)
        return Found(self.ranked(rows, count)[..., None], match[:, None])

    def logits(self, memory: Any, texts: Texts) -> jax.Array:
        """Returns log counts `[N, V]` of the kept continuations of the longest known contexts.

        For the empty context they are those of all ids.
        """
        rows, _ = self.find_rows(texts.tokens, texts.lengths)
        tokens = self.ranked(rows, self.continuations)
        places = self.starts[rows][:, None] + jnp.arange(self.continuations)
        places = jnp.minimum(places, len(self.counts) - 1)
        # The few continuations kept are scattered; unused places get an id past the vocabulary and
        # are dropped.
        tokens = jnp.where(tokens < 0, self.vocab_size, tokens)
        nothing = jnp.full((len(rows), self.vocab_size), -jnp.inf, jnp.float32)
        values = jnp.log(self.counts[places].astype(jnp.float32))
        some = nothing.at[jnp.arange(len(rows))[:, None], tokens].set(values, mode="drop")
        return jnp.where((rows == 0)[:, None], jnp.log(self.unigram.astype(jnp.float32)), some)

    def find_rows(self, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row `[N]` of the longest known context at the end of each text.

        Of `tokens [N, S]` the first `lengths [N]` count. Returns also the contexts' lengths.
        """
        rows, match = jnp.zeros_like(lengths), jnp.zeros_like(lengths)
        for length in range(1, self.order):
            place = lengths - length
            before = jnp.take_along_axis(tokens, jnp.maximum(place, 0)[:, None], axis=1)[:, 0]
            longer, known = self._find(rows, jnp.where(place >= 0, before, self.start_token))
            # All endings of a known context are known: after a miss no longer one is.
            known &= match == length - 1
            rows, match = jnp.where(known, longer, rows), jnp.where(known, length, match)
        return rows, match

    def _find(self, parents: jax.Array, extras: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row `[N]` of the context `parents [N]` with the ids `extras [N]` before it.

        Returns also whether there is one. It is searched by bisection.
        """
        size = len(self.parents)

        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]):
            low, high = bounds
            middle = (low + high) // 2
            here, there = self.parents[middle], self.extras[middle]
            smaller = (low < high) & ((here < parents) | (here == parents) & (there < extras))
            return jnp.where(smaller, middle + 1, low), jnp.where(smaller, high, middle)

        bounds = jnp.zeros_like(parents), jnp.full_like(parents, size)
        index = jnp.minimum(jax.lax.fori_loop(0, size.bit_length(), halve, bounds)[0], size - 1)
        return index + 1, (self.parents[index] == parents) & (self.extras[index] == extras)

    def ranked(self, rows: jax.Array, count: int) -> jax.Array:
        """Returns the `count` most frequent ids `[N, count]` after the contexts `rows [N]`.

        They are −1 where fewer are kept.
        """
        places = self.starts[rows][:, None] + jnp.arange(count)
        inside = places < self.starts[rows + 1][:, None]
        tokens = self.next_tokens[jnp.minimum(places, len(self.next_tokens) - 1)]
        return jnp.where(inside, tokens, -1)
