"""Drafts for a beam search without a model: one chain after each live beam."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specdec_jax.speculative.beam_iteration import BeamTree
from specdec_jax.speculative.beams import BeamState
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import Counts, DecodeState, StaticConfig


class ChainDrafter(Drafter):
    """A drafter that reads a row's tokens alone; for a beam search it drafts after each beam as
    after a row.

    Every level of the tree then has one node for each beam. Since a draft serves a search only as
    long as each live beam is a node, this pays where the beams differ in their earlier tokens and
    then go on as what was copied.
    """

    drafts_beams: ClassVar[bool] = True

    def beam_width(self, beams: int, wanted: int | None) -> int:
        if wanted not in (None, beams):
            name = type(self).__name__
            raise ValueError(
                f"beam_width: got {wanted} with {name}, expected {beams}: it drafts one chain for each beam"
            )
        return beams

    def begin_beams(
        self, inputs, input_lengths, tokens, beams: int, slots: int, positions: int, **shared
    ) -> Any:
        return self.init(
            inputs, input_lengths, jnp.repeat(tokens, beams, axis=0), positions, **shared
        )

    def draft_beams(
        self, draft_state: Any, state: BeamState, tree: BeamTree
    ) -> tuple[Any, BeamTree]:
        config, (batch, beams) = state.config, state.live.scores.shape

        def flat(x):
            return x.reshape(batch * beams, *x.shape[2:])

        def rows(x):
            return jnp.repeat(x, beams, axis=0)

        zeros, none = (
            jnp.zeros(batch * beams, jnp.int32),
            jnp.zeros((batch * beams, config.gamma), jnp.int32),
        )
        as_rows = DecodeState(
            tokens=flat(state.live.tokens),
            lengths=rows(state.positions + 1),
            done=rows(state.done),
            starts=rows(state.prefix_lengths),
            log_probs=flat(state.live.log_probs),
            adjusted_log_probs=None,
            keys=None,
            sampling=state.sampling.repeated(beams),
            settings=None,
            limits=rows(state.prefix_lengths + state.limits),
            eos_ids=rows(state.eos_ids),
            gamma=zeros + config.gamma,
            policy=None,
            policy_state=None,
            target_cache=None,
            draft_state=None,
            counts=Counts.zero(batch * beams, config.gamma),
            last_draft=none,
            last_drafted=zeros,
            last_accepted=zeros,
            last_seen=None,
            draft_failed=zeros,
            config=StaticConfig(config.gamma, config.mode, config.vocab_size),
        )
        draft_state, draft = self.draft(draft_state, as_rows, as_rows.gamma)
        # Places past the end of a chain get the token −1, so that no beam ever equals such a node.
        there = jnp.arange(config.gamma) < draft.num_drafted[:, None]
        chains = jnp.where(there, draft.tokens, -1).reshape(batch, beams, config.gamma)
        own = jnp.broadcast_to(jnp.arange(beams, dtype=jnp.int32), (batch, beams))
        for level in range(config.gamma):
            tree = tree.grow(own + level * beams, chains[:, :, level])
        return draft_state, tree

    def move_beams(self, draft_state: Any, sources: jax.Array, starts: jax.Array) -> Any:
        return draft_state
