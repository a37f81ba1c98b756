"""Prompt lookup: drafts by copying what followed the same ids earlier, in input or output."""

from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.drafters.beam_chains import BeamChainDrafter
from specdec_jax.drafters.drafting import draft_without_calls, point_mass
from specdec_jax.drafters.tree_levels import Children, Level, draft_children
from specdec_jax.models import arguments
from specdec_jax.speculative import distributions
from specdec_jax.speculative.drafter import TreeDrafter
from specdec_jax.speculative.state import AnyRows, DecodeState, Draft
from specdec_jax.speculative.trees import POINTS


class Inputs(NamedTuple):
    """The input of each row, to copy from: `tokens [B, L]` int32 and `lengths [B]`."""

    tokens: jax.Array
    lengths: jax.Array


@flax.struct.dataclass
class PromptLookupDrafter(BeamChainDrafter, TreeDrafter):
    """A drafter that copies what followed the last tokens of a row where they stood before.

    It looks in the row's output (for a decoder-only target in its prompt too) and in the encoder's
    input. The longest ending of at most `max_match` ids that occurs there counts. Of several places
    it takes the latest in the output (start token and decoder prefix included), else the latest in
    the input, because what is nearest is most like what is being written. The draft, a point mass,
    reaches to the end of what is known there. If nothing is found, nothing is drafted. (Prompt
    lookup decoding, Saxena 2023; LLMA, Yang et al. 2023, arXiv 2304.04487.)

    In a tree every node's path is looked up as if it were output. The node's children are what
    follows at the best places, of equal ids only the first; where fewer are found, it has fewer.

    Attributes:
      max_match: the longest ending that is looked for, in ids.
    """

    max_match: int = flax.struct.field(pytree_node=False, default=3)
    varies: ClassVar[bool] = True
    kinds: ClassVar[Any] = POINTS

    def __post_init__(self):
        arguments.check_integer("max_match", self.max_match, 1, 64)

    @property
    def name(self) -> str:
        return "prompt lookup"

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> Inputs:
        copies = tokens.shape[0] // inputs.shape[0]
        return Inputs(jnp.repeat(inputs, copies, axis=0), jnp.repeat(input_lengths, copies))

    def draft(
        self, draft_state: Inputs, state: AnyRows, num_wanted: jax.Array
    ) -> tuple[Inputs, Draft]:
        slots, lengths = state.tokens.shape[1], state.lengths
        known, order = self._rank(draft_state, state.tokens, lengths)
        place, any_match = distributions.argmax(order), jnp.max(order, axis=1) >= 0
        end = jnp.where(place < slots, lengths, slots + draft_state.lengths)
        offsets = jnp.arange(state.config.gamma)
        places = jnp.minimum(place[:, None] + offsets, known.shape[1] - 1)
        tokens = jnp.take_along_axis(known, places, axis=1)
        num_drafted = jnp.where(any_match, jnp.minimum(num_wanted, end - place), 0)
        # Nothing comes after an EOS, which itself may be accepted.
        is_eos = jnp.any(tokens[:, :, None] == state.eos_ids[:, None, :], axis=-1)
        first_eos = jnp.min(jnp.where(is_eos, offsets, state.config.gamma), axis=1)
        num_drafted = jnp.minimum(num_drafted, first_eos + 1)
        dist = point_mass(state, tokens)
        return draft_state, draft_without_calls(state, tokens, num_drafted, dist)

    def draft_tree(
        self, draft_state: Inputs, state: DecodeState, num_wanted: jax.Array, max_depth: jax.Array
    ):
        def children_of(level: Level, carry: Any):
            copies, shape = level.tokens.shape[1], (*level.tokens.shape, -1)
            inputs = Inputs(*(jnp.repeat(x, copies, axis=0) for x in draft_state))
            known, order = self._rank(inputs, *level.rows(state))
            tokens = []
            for _ in range(max(level.counts)):
                place = distributions.argmax(order)[:, None]
                token = jnp.take_along_axis(known, place, axis=1)
                tokens.append(jnp.where(jnp.take_along_axis(order, place, axis=1) < 0, -1, token))
                order = jnp.where(known == token, -1, order)
            return Children(jnp.concatenate(tokens, axis=1).reshape(shape)), carry

        draft, _ = draft_children(state, num_wanted, max_depth, children_of)
        # To find nothing is no failure, which −1 would mean.
        return draft_state, draft._replace(tokens=jnp.maximum(draft.tokens, 0))

    def _rank(
        self, inputs: Inputs, output: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens `[B, S + L]` of output and input, and how good it is to copy each.

        The second are numbers `[B, S + L]`, greater for better places, −1 where nothing is to be
        copied. A place is as good as the ending before it is long; of equally good ones the
        output's come first, and the latest of each.
        """
        slots, columns = output.shape[1], inputs.tokens.shape[1]
        back = lengths[:, None] - jnp.arange(1, self.max_match + 1)
        ending = jnp.take_along_axis(output, jnp.maximum(back, 0), axis=1)  # last id first
        ending = jnp.where(back >= 0, ending, -1)
        in_output = 2 * match_lengths(output, lengths, ending) + 1
        in_input = 2 * match_lengths(inputs.tokens, inputs.lengths, ending)
        matches = jnp.concatenate([in_output, in_input], axis=1)
        latest = jnp.concatenate([jnp.arange(slots), jnp.arange(columns)])
        order = jnp.where(matches >= 2, max(slots, columns) * matches + latest, -1)
        return jnp.concatenate([output, inputs.tokens], axis=1), order


def match_lengths(source: jax.Array, lengths: jax.Array, ending: jax.Array) -> jax.Array:
    """Returns how many ids `[B, N]` before each place of `source [B, N]` equal `ending [B, K]`.

    `ending` has its last id first. The result is 0 at and past `lengths [B]`, where there is
    nothing to copy.
    """
    matches, total = jnp.ones(source.shape, bool), jnp.zeros(source.shape, jnp.int32)
    for back in range(1, ending.shape[1] + 1):
        # −2 is no id, and differs from the −1 that fills up a shorter ending.
        before = jnp.pad(source, ((0, 0), (back, 0)), constant_values=-2)[:, : source.shape[1]]
        matches &= before == ending[:, back - 1 : back]
        total += matches.astype(jnp.int32)
    return jnp.where(jnp.arange(source.shape[1]) < lengths[:, None], total, 0)
