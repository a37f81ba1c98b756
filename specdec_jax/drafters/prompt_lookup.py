"""Drafts by copying: what followed the same ids earlier, in input or output."""

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.drafters.continuations import (
    ContinuationDrafter,
    Found,
    Inputs,
    Texts,
    check_copying,
    compare_endings,
    find_best,
    last_ids,
    repeat_inputs,
)
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel

# The last ids that are compared with what stands before a place, in a row or not.
_COMPARED = 4


@flax.struct.dataclass
class PromptLookupDrafter(ContinuationDrafter):
    """A drafter that copies what followed the last tokens of a row where they stood before.

    It looks in the row's output (for a decoder-only target in its prompt too) and in the encoder's
    input. The longest ending of at most `max_match` ids that occurs there counts. Of several places
    it takes the one before which most of the last four ids are equal, then one in the input: the
    nearest to the expected place, which is as far into the input as the row is into its new tokens.
    So an output that edits its input is copied from where it corresponds to the input, also when a
    phrase occurs twice. Last come places in the output, the latest first. (Prompt lookup decoding,
    Saxena 2023; LLMA, Yang et al. 2023, arXiv 2304.04487; input-guided and aggressive decoding, Ge
    et al. 2022, arXiv 2205.10350, Sun et al. 2021, arXiv 2106.04970.)

    The draft, a point mass, reaches to the end of what is known there. If nothing is found, nothing
    is drafted, unless `min_match` is 0.

    In a tree every node's path is looked up as if it were output. The node's children are what
    follows at the best places, of equal ids only the first; where fewer are found, it has fewer.

    Attributes:
      max_match: the longest ending that is looked for, in ids.
      min_match: the shortest ending after which ids are copied. With 0 something is always copied:
        from where most of the last four ids are equal, which is right after a changed word, else
        from the expected place, which is right at the first token.
      prefer: "nearest", the order above, or "latest": of places after equally long endings the
        latest in the output (start token and decoder prefix included), else in the input.
    """

    max_match: int = flax.struct.field(pytree_node=False, default=3)
    min_match: int = flax.struct.field(pytree_node=False, default=1)
    prefer: str = flax.struct.field(pytree_node=False, default="nearest")
    passages: ClassVar[bool] = True

    def __post_init__(self):
        arguments.keep_integer(self, "max_match", 1, 64)
        if not isinstance(self.prefer, str) or self.prefer not in ("nearest", "latest"):
            got = arguments.quote(self.prefer)
            raise ValueError(f"prefer: got {got}, expected 'nearest' or 'latest'")
        least = 0 if self.prefer == "nearest" else 1
        arguments.keep_integer(self, "min_match", least, self.max_match)

    @property
    def name(self) -> str:
        return "prompt lookup" if self.min_match else "copy of the input"

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        check_copying(target, type(self).__name__)

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> Inputs:
        return repeat_inputs(inputs, input_lengths, len(tokens))

    def find(self, memory: Inputs, texts: Texts, count: int, length: int) -> Found:
        output, slots, columns = texts.tokens, texts.tokens.shape[1], memory.tokens.shape[1]
        slot, column = jnp.arange(slots), jnp.arange(columns)
        nearest = self.prefer == "nearest"
        compared = max(self.max_match, _COMPARED) if nearest else self.max_match
        ending = last_ids(output, texts.lengths, compared)
        own, own_equal = compare_endings(output, texts.lengths, ending, self.max_match)
        match, equal = compare_endings(*memory, ending, self.max_match)
        # Greater weights for better places. What is added last is less than `span`.
        span = slots + columns + 1
        if nearest:
            expected = (texts.lengths - texts.starts)[:, None]
            close = jnp.maximum(span - 1 - jnp.abs(column - expected), 1)
            weights = span * (2 * ((compared + 1) * match + equal) + 1) + close
            eligible = column < memory.lengths[:, None]
            own_weights = span * 2 * ((compared + 1) * own + own_equal) + slot + 1
            own_eligible = own_equal > 0
        else:
            weights, eligible = span * 2 * match + column + 1, match > 0
            own_weights, own_eligible = span * (2 * own + 1) + slot + 1, own > 0
        weights = jnp.where(eligible, weights, 0)
        own_weights = jnp.where(own_eligible, own_weights, 0)
        known, weights, match = (
            jnp.concatenate(both, axis=1)
            for both in ((output, memory.tokens), (own_weights, weights), (own, match))
        )
        _, best = find_best(known, weights, count)
        first = jnp.maximum(best, 0)
        end = jnp.where(first < slots, texts.lengths[:, None], slots + memory.lengths[:, None])
        places = first[..., None] + jnp.arange(length)
        there = (best >= 0)[..., None] & (places < end[..., None])
        places = jnp.minimum(places, slots + columns - 1).reshape(len(known), -1)
        ids = jnp.take_along_axis(known, places, axis=1).reshape(there.shape)
        return Found(jnp.where(there, ids, -1), jnp.take_along_axis(match, first, axis=1))
