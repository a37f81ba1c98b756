"""Drafts for a beam search without a model: one chain after each active beam."""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.beam_tree import BeamTree
from specdec_jax.speculative.state import ChainRows, StaticConfig


class BeamChainDrafter(BeamDrafter):
    """A drafter that drafts a chain after each beam of a search, with its own `draft`.

    That method gets `ChainRows` in the place of a `DecodeState`. Every level of the tree has one
    node for each beam. Since a draft serves a search only as long as each active beam is a node,
    this pays where the beams differ in their earlier tokens and then go on as what was copied.
    """

    def beam_width(self, beams: int, wanted: int | None) -> int:
        if wanted not in (None, beams):
            got, expected = f"{wanted} with {type(self).__name__}", f"{beams}: it drafts one chain"
            raise ValueError(f"beam_width: got {got}, expected {expected} for each beam")
        return beams

    def init_beams(
        self,
        inputs: jax.Array,
        input_lengths: jax.Array,
        tokens: jax.Array,
        beams: int,
        slots: int,
        positions: int,
        **encoded: jax.Array,
    ) -> Any:
        repeated = jnp.repeat(tokens, beams, axis=0)
        return self.init(inputs, input_lengths, repeated, positions, **encoded)

    def draft_beams(
        self, draft_state: Any, state: BeamState, tree: BeamTree
    ) -> tuple[Any, BeamTree]:
        config, (batch, beams) = state.config, state.active.scores.shape
        rows = ChainRows(
            tokens=state.active.tokens.reshape(batch * beams, -1),
            lengths=jnp.repeat(state.positions + 1, beams),
            starts=jnp.repeat(state.prefix_lengths, beams),
            eos_ids=jnp.repeat(state.eos_ids, beams, axis=0),
            sampling=state.sampling.repeated(beams),
            config=StaticConfig(config.gamma, config.mode, config.vocab_size),
        )
        num_wanted = jnp.full(batch * beams, config.gamma, jnp.int32)
        draft_state, draft = self.draft(draft_state, rows, num_wanted)  # type: ignore[arg-type]
        # Places past the end of a chain get the token −1, so that no beam ever equals such a node.
        there = jnp.arange(config.gamma) < draft.num_drafted[:, None]
        chains = jnp.where(there, draft.tokens, -1).reshape(batch, beams, config.gamma)
        own = jnp.broadcast_to(jnp.arange(beams, dtype=jnp.int32), (batch, beams))
        for level in range(config.gamma):
            tree = tree.grow(own + level * beams, chains[:, :, level])
        return draft_state, tree

    def move_beams(self, draft_state: Any, sources: jax.Array, starts: jax.Array) -> Any:
        return draft_state
