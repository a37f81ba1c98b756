"""Drafts by a table of counted n-grams."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.drafters.beam_chains import BeamChainDrafter
from specdec_jax.drafters.drafting import (
    draft_tokens,
    draft_without_calls,
    draw_adjusted,
    empty_distribution,
    match_width,
    point_mass,
    record_signals,
)
from specdec_jax.drafters.ngram_table import NGramTable
from specdec_jax.drafters.tree_levels import Children, Level, draft_children, draft_tree
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import AnyRows, DecodeState, Draft, empty_signals
from specdec_jax.speculative.tree_drafter import TreeDrafter
from specdec_jax.speculative.trees import CHILDREN, POINTS
from specdec_jax.tokenizers.vocabularies import Vocabulary


@flax.struct.dataclass
class NGramDrafter(BeamChainDrafter, TreeDrafter):
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

    provides_probs: ClassVar[Any] = property(lambda self: self.sampled)
    kinds: ClassVar[Any] = property(lambda self: CHILDREN if self.sampled else POINTS)
    dynamic: ClassVar[Any] = property(lambda self: self.sampled)

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
        if vocabulary is not None and not table.matches(vocabulary):
            raise ValueError(
                f"{path}: got a table of {table.vocab_size} ids of another vocabulary, "
                "expected that of the "
                f"target ({vocabulary.size} pieces)"
            )
        return cls(table, bool(values.get("sampled", False)) if sampled is None else sampled)

    __repr__ = Drafter.__repr__  # not the dataclass's, with all arrays

    @property
    def name(self) -> str:
        return f"{self.table.order}-gram table"

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        arguments.check_kind(
            "table", self.table, NGramTable, "an NGramTable (NGramDrafter.load and count make one)"
        )
        ours, width, table = target.vocabulary, target.config.vocab_size, self.table
        if not table.matches(ours):
            raise ValueError(
                f"drafter: got a table of {table.vocab_size} ids of another vocabulary, "
                "expected that of the target "
                f"({ours.size} pieces)"
            )
        self.check_ids(width, target.start_token)

    def check_ids(self, width: int, start_token: int) -> None:
        """Raises ValueError for a target with fewer ids than the table, or another start token."""
        table = self.table
        if table.vocab_size > width:
            raise ValueError(
                f"drafter: got a table of {table.vocab_size} ids, "
                f"expected at most the target's {width}"
            )
        if table.start_token != start_token:
            raise ValueError(
                f"drafter: got start token {table.start_token}, expected the target's {start_token}"
            )

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> tuple:
        return ()

    def draft(
        self, draft_state: tuple, state: AnyRows, num_wanted: jax.Array
    ) -> tuple[tuple, Draft]:
        vocab_size = state.config.vocab_size

        def choose(step: jax.Array | int, tokens: jax.Array, carry: Any):
            rows = self.table.rows(tokens, state.lengths + step)
            if not self.sampled:
                return self.table.most_frequent(rows), carry
            dist, seen = carry
            logits = match_width(self.table.logits(rows)[:, None], vocab_size)
            drawn, dist = draw_adjusted(state, logits, tokens, step, dist)
            return drawn, (dist, record_signals(state, logits, tokens, step, drawn, seen))

        if not self.sampled:
            tokens, num_drafted, _ = draft_tokens(state, num_wanted, choose, None)
            return (), draft_without_calls(state, tokens, num_drafted, point_mass(state, tokens))
        carry = empty_distribution(state), empty_signals(state.policy, len(state.lengths))
        tokens, num_drafted, (dist, seen) = draft_tokens(
            state, num_wanted, choose, carry, seen=lambda carry: carry[1]
        )
        return (), draft_without_calls(state, tokens, num_drafted, dist)._replace(seen=seen)

    def draft_tree(
        self, draft_state: tuple, state: DecodeState, num_wanted: jax.Array, max_depth: jax.Array
    ):
        def after(level: Level):
            return self.table.rows(*level.rows(state))

        def logits_of(level: Level, carry: Any):
            logits = match_width(self.table.logits(after(level)), state.config.vocab_size)
            return logits.reshape(*level.tokens.shape, -1), carry

        def children_of(level: Level, carry: Any):
            tokens = self.table.ranked(after(level), max(level.counts))
            return Children(tokens.reshape(*level.tokens.shape, -1)), carry

        if self.sampled:
            return (), draft_tree(state, num_wanted, max_depth, logits_of, ())[0]
        return (), draft_children(state, num_wanted, max_depth, children_of)[0]
