"""Drafts what may follow a text: one base class for drafters that look it up.

How continuations are found differs: in the row's own text, in counts, in what the target returned.
How they become a chain, a tree, the chains of a beam search or a distribution is written here.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.drafters.beam_chains import BeamChainDrafter
from specdec_jax.drafters.drafting import (
    Step,
    draft_from_logits,
    draft_tokens,
    draft_without_calls,
    match_width,
    point_mass,
)
from specdec_jax.drafters.tree_levels import Children, Level, draft_children, draft_tree
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative import distributions
from specdec_jax.speculative.drafter import TreeDrafter
from specdec_jax.speculative.state import AnyRows, DecodeState, Draft
from specdec_jax.speculative.trees import CHILDREN, POINTS
from specdec_jax.tokenizers.vocabularies import Vocabulary


class Texts(NamedTuple):
    """N texts to be continued.

    Attributes:
      tokens: the tokens, start token or prompt first; anything past `lengths`.
      lengths: how many tokens each text has.
      starts: where its new tokens begin, after start token and decoder prefix, or the prompt.
    """

    tokens: Int[Array, "N S"]
    lengths: Int[Array, " N"]
    starts: Int[Array, " N"]


class Found(NamedTuple):
    """K continuations of each of N texts, the best first, no two with the same first id.

    Attributes:
      ids: the ids that follow, −1 where there are no more (or no continuation at all).
      match: how many ids before the continuation are those at the end of the text. `[N, 1]` if it
        is the same for all.
    """

    ids: Int[Array, "N K G"]
    match: Int[Array, "N K"]


class Inputs(NamedTuple):
    """The encoder's input of each row."""

    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]


class TableDrafter(TreeDrafter):
    """The base class of drafters that look up what may follow a text; a subclass defines `find`.

    Drafts are point masses: the best continuation, and in a tree the best ones of each node's path.
    If nothing is found, nothing is drafted. A subclass may make the attributes its fields.

    Attributes:
      passages: whether `find` returns as many ids as are asked for, so that one search makes a
        whole chain. Otherwise it returns one id, and every drafted id takes a search of its own.
      min_match: the least `Found.match` with which a continuation is drafted.
      sampled: whether ids are drawn, under the same processors, temperature and filters as the
        target, from the distribution of which `logits` returns the logarithm.
    """

    passages: ClassVar[bool] = False
    min_match: int = 0
    sampled: bool = False

    varies: ClassVar[Any] = True
    provides_probs: ClassVar[Any] = property(lambda self: self.sampled)
    draws: ClassVar[Any] = property(lambda self: self.sampled)
    kinds: ClassVar[Any] = property(lambda self: CHILDREN if self.sampled else POINTS)

    def find(self, memory: Any, texts: Texts, count: int, length: int) -> Found:
        """Returns the `count` best continuations of each text, of up to `length` ids.

        Args:
          memory: the drafter's state, in which each array has one row for each text.
        """
        raise NotImplementedError

    def logits(self, memory: Any, texts: Texts) -> Float[Array, "N W"]:
        """Returns log-probabilities of what follows, up to a constant; only if `sampled`."""
        raise NotImplementedError

    def repeat_memory(self, memory: Any, copies: int) -> Any:
        """Returns `memory` for `copies` texts of each row, which lie side by side."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, copies, axis=0), memory)

    def draft(
        self, draft_state: Any, state: AnyRows, num_wanted: Int[Array, " B"]
    ) -> tuple[Any, Draft]:
        def logits_of(step: Step, tokens: jax.Array, carry: Any):
            texts = Texts(tokens, state.lengths + step, state.starts)
            logits = self.logits(draft_state, texts)[:, None]
            return match_width(logits, state.config.vocab_size), carry

        if self.sampled:
            draft, _ = draft_from_logits(state, num_wanted, logits_of)
            return draft_state, draft._replace(calls=jnp.zeros_like(state.lengths))
        return draft_state, self.draft_best(draft_state, state, num_wanted)[0]

    def draft_best(
        self, memory: Any, state: AnyRows, num_wanted: Int[Array, " B"]
    ) -> tuple[Draft, Int[Array, "B G"]]:
        """Drafts the best continuation; returns also `Found.match` before each of its tokens."""

        def choose(step: Step, tokens: jax.Array, match: jax.Array):
            texts = Texts(tokens, state.lengths + step, state.starts)
            ids, here = self._find_matching(memory, texts, 1, 1)
            match = jax.lax.dynamic_update_slice_in_dim(match, here[:, :1], step, axis=1)
            return ids[:, 0, 0], match

        gamma = state.config.gamma
        if self.passages:
            texts = Texts(state.tokens, state.lengths, state.starts)
            ids, first = self._find_matching(memory, texts, 1, gamma)
            tokens, match = ids[:, 0], first[:, :1] + jnp.arange(gamma)
        else:
            match = jnp.zeros((len(state.lengths), gamma), jnp.int32)
            tokens, num_wanted, match = draft_tokens(state, num_wanted, choose, match)
        num_drafted = jnp.minimum(num_wanted, _count_drafted(state, tokens))
        tokens = jnp.maximum(tokens, 0)
        dist = point_mass(state, tokens)
        return draft_without_calls(state, tokens, num_drafted, dist), match

    def draft_tree(
        self,
        draft_state: Any,
        state: DecodeState,
        num_wanted: Int[Array, " B"],
        max_depth: Int[Array, " B"],
    ):
        def read(level: Level) -> tuple[Any, Texts]:
            copies = level.tokens.shape[1]
            starts = jnp.repeat(state.starts, copies)
            return self.repeat_memory(draft_state, copies), Texts(*level.rows(state), starts)

        def logits_of(level: Level, carry: Any):
            logits = match_width(self.logits(*read(level)), state.config.vocab_size)
            return logits.reshape(*level.tokens.shape, -1), carry

        def children_of(level: Level, carry: Any):
            tokens, _ = self._find_matching(*read(level), max(level.counts), 1)
            return Children(tokens.reshape(*level.tokens.shape, -1)), carry

        if self.sampled:
            return draft_state, draft_tree(state, num_wanted, max_depth, logits_of, ())[0]
        draft, _ = draft_children(state, num_wanted, max_depth, children_of)
        # To find nothing is no failure, which −1 would mean.
        return draft_state, draft._replace(tokens=jnp.maximum(draft.tokens, 0))

    def _find_matching(self, memory: Any, texts: Texts, count: int, length: int) -> Found:
        """Returns what `find` returns, with −1 in the place of continuations that match less."""
        found = self.find(memory, texts, count, length)
        ids = jnp.where((found.match >= self.min_match)[..., None], found.ids, -1)
        return Found(ids, found.match)


class ContinuationDrafter(BeamChainDrafter, TableDrafter):
    """A `TableDrafter` that also drafts for beam searches, where nothing is observed."""


class StoredDrafter(ContinuationDrafter):
    """A `ContinuationDrafter` whose table may come from a file, made with a vocabulary.

    Attributes:
      what: what such a file holds, for messages.
      vocab_size: number of ids of its vocabulary; None if it comes from no file.
      fingerprint: fingerprint of its vocabulary, "" if that is not known.
    """

    what: ClassVar[str]
    vocab_size: int | None
    fingerprint: str

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        self.check_vocabulary("drafter", target.vocabulary)
        self.check_ids(target.config.vocab_size, target.start_token)

    def check_vocabulary(self, name: str, vocabulary: Vocabulary | None) -> None:
        """Raises ValueError, about `name`, for a vocabulary that is known to be another."""
        if vocabulary is not None and self.fingerprint not in ("", vocabulary.fingerprint()):
            got = f"{self.what} of {self.vocab_size} ids of another vocabulary"
            raise mismatch_error(name, got, f"that of the model ({vocabulary.size} pieces)")

    def check_ids(self, width: int, start_token: int) -> None:
        """Raises ValueError for a target with fewer ids than the file has."""
        if self.vocab_size is not None and self.vocab_size > width:
            got = f"{self.what} of {self.vocab_size} ids"
            raise mismatch_error("drafter", got, f"at most the target's {width}")


def _count_drafted(state: AnyRows, tokens: Int[Array, "B G"]) -> Int[Array, " B"]:
    """Returns how many tokens stand before the first −1, and not after an EOS."""
    is_eos = jnp.any(tokens[:, :, None] == state.eos_ids[:, None, :], axis=-1)
    ends = jnp.where(tokens < 0, 0, jnp.where(is_eos, 1, tokens.shape[1]))
    return jnp.min(jnp.arange(tokens.shape[1]) + ends, axis=1)


def check_copying(target: LanguageModel, name: str) -> None:
    """Raises ValueError if the ids of the target's inputs are those of another vocabulary.

    `name` is that of a drafter which copies them into outputs.
    """
    if not target.config.shares_vocabulary:
        expected = "one that does not copy: ids of inputs are other tokens than those of outputs"
        raise mismatch_error("drafter", name, expected)


def repeat_inputs(inputs: jax.Array, input_lengths: jax.Array, batch: int) -> Inputs:
    """Returns the input of each of `batch` rows; those of one input lie side by side."""
    copies = batch // inputs.shape[0]
    return Inputs(jnp.repeat(inputs, copies, axis=0), jnp.repeat(input_lengths, copies))


def last_ids(tokens: jax.Array, lengths: jax.Array, size: int, missing: int = -1) -> jax.Array:
    """Returns the last `size` ids `[N, size]` of the first `lengths` of `tokens`, last first.

    They are `missing` where there are fewer.
    """
    places = lengths[:, None] - jnp.arange(1, size + 1)
    ids = jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=1)
    return jnp.where(places >= 0, ids, missing)


def compare_endings(
    source: jax.Array, lengths: jax.Array, ending: jax.Array, max_match: int
) -> tuple[jax.Array, jax.Array]:
    """Returns how well the ids before each place of `source [N, M]` fit `ending [N, K]`.

    Args:
      ending: last id first, −1 where it is shorter.
      max_match: the most ids in a row that are counted, at most K.

    Returns:
      How many in a row are equal, counted from the place backwards, and how many of the K are equal
      at all, both `[N, M]`; 0 at and past `lengths [N]`, where there is nothing to copy.
    """
    matches, in_a_row = jnp.ones(source.shape, bool), jnp.zeros(source.shape, jnp.int32)
    equal = in_a_row
    for back in range(1, ending.shape[1] + 1):
        # −2 is no id, and differs from the −1 that fills up a shorter ending.
        before = jnp.pad(source, ((0, 0), (back, 0)), constant_values=-2)[:, : source.shape[1]]
        same = before == ending[:, back - 1 : back]
        equal += same.astype(jnp.int32)
        matches &= same
        if back <= max_match:
            in_a_row += matches.astype(jnp.int32)
    there = jnp.arange(source.shape[1]) < lengths[:, None]
    return jnp.where(there, in_a_row, 0), jnp.where(there, equal, 0)


def find_best(ids: jax.Array, weights: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the heaviest candidates of different ids, the heaviest first.

    Args:
      ids: `[N, C]`, the candidates.
      weights: `[N, C]`; a candidate of weight 0 or less counts for nothing. Of equally heavy ones
        the smallest id is taken.

    Returns:
      Their ids, and their places among the C, both `[N, count]`; −1 where there is none left.
    """
    best_ids, places, last = [], [], jnp.iinfo(jnp.int32).max
    for _ in range(count):
        # Plain reductions: on a CPU an argmin takes many times as long.
        best = jnp.max(weights, axis=1, keepdims=True)
        heaviest = jnp.where((weights == best) & (best > 0), ids, last)
        smallest = jnp.min(heaviest, axis=1, keepdims=True)
        place = jnp.min(jnp.where(heaviest == smallest, jnp.arange(ids.shape[1]), last), axis=1)
        best_ids.append(jnp.where(best > 0, smallest, -1)[:, 0])
        places.append(jnp.where(best[:, 0] > 0, place, -1))
        weights = jnp.where(ids == smallest, 0, weights)
    return jnp.stack(best_ids, axis=1), jnp.stack(places, axis=1)


def find_top_k(logits: Float[Array, "*N V"], top_k: int) -> Int[Array, "*N K"]:
    """Returns the ids of the greatest logits, descending and of equals the first; −1 after NaN.

    They are −1 too where there are fewer ids.
    """
    found, ids = [], jnp.arange(logits.shape[-1])
    for _ in range(top_k):  # a sort of the vocabulary would cost far more
        best = distributions.argmax(logits)
        some = jnp.take_along_axis(logits, jnp.maximum(best, 0)[..., None], axis=-1) > -jnp.inf
        found.append(jnp.where(some[..., 0], best, -1))
        logits = jnp.where(ids == best[..., None], -jnp.inf, logits)
    return jnp.stack(found, axis=-1)


def sum_weights(ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the weights `[N, C]` of candidates, each with those of all candidates of its id."""
    # Every candidate against every other: a scatter over the vocabulary is a loop on a CPU.
    equal = ids[:, :, None] == ids[:, None, :]
    return jnp.sum(jnp.where(equal, weights[:, :, None], 0), axis=1)


def follow_passages(
    ids: Int[Array, "N C G"], weights: Float[Array, "N C"], count: int, least_share: float
) -> Int[Array, "N K G"]:
    """Returns what most of the passages that follow a text have in common, by weight.

    A continuation begins with one of the `count` heaviest first ids, and goes on with the heaviest
    next id of the passages that agree with it so far.

    Args:
      ids: the passages, −1 where one has ended.
      weights: what each passage counts for; 0 for one that is not there.
      count: K, the most continuations.
      least_share: it ends when the passages that agree with it have less of the total weight.
    """
    weights = jnp.where(ids[:, :, 0] < 0, 0, weights)
    first, _ = find_best(ids[:, :, 0], sum_weights(ids[:, :, 0], weights), count)
    least = least_share * jnp.repeat(jnp.sum(weights, axis=1, keepdims=True), count, axis=0)
    passages, alive = jnp.repeat(ids, count, axis=0), jnp.repeat(weights, count, axis=0)
    alive = jnp.where(passages[:, :, 0] == first.reshape(-1, 1), alive, 0)

    def follow(alive: jax.Array, here: jax.Array) -> tuple[jax.Array, jax.Array]:
        alive = jnp.where(here < 0, 0, alive)
        chosen, _ = find_best(here, sum_weights(here, alive), 1)
        alive = jnp.where(here == chosen, alive, 0)
        enough = jnp.sum(alive, axis=1, keepdims=True) >= least
        return jnp.where(enough, alive, 0), jnp.where(enough, chosen, -1)[:, 0]

    _, found = jax.lax.scan(follow, alive, jnp.moveaxis(passages, 2, 0))
    return jnp.moveaxis(found, 0, 1).reshape(*first.shape, -1)
