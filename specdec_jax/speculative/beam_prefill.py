"""Makes the state that a beam search starts from: encodes the input, feeds the prefix."""

import jax.numpy as jnp

from specdec_jax.models.network import Network
from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.beam_search import BeamConfig, BeamState, make_first_hypotheses
from specdec_jax.speculative.prefill import PrefillInputs, encode_for, fill_cache
from specdec_jax.speculative.state import Counts


def prefill_beams(
    target: Network,
    drafter: BeamDrafter | None,
    config: BeamConfig,
    slots: int,
    inputs: PrefillInputs,
) -> BeamState:
    """Runs both encoders once, feeds the decoder prefix and makes the first state of a search.

    Args:
      target: the target's network.
      drafter: the drafter; None is plain beam search.
      config: the static settings of the search.
      slots: the most tokens of a row, its start token and decoder prefix, or prompt, included.
      inputs: one row for each input.
    """
    batch, prefix = inputs.tokens.shape
    config = config._replace(mode=config.mode._replace(native=target.skips_padding))
    positions, beams = slots + config.gamma, config.beams
    # The first term is for the prefix but for its last token, which the active beams feed. K more
    # slots stay empty: a drafter feeds the tokens before the active beams' last ones into the K
    # slots before theirs.
    cache_slots = prefix - 1 + beams * (1 + config.max_new)
    cache_slots += config.gamma * max(config.width, beams)
    read = inputs.inputs, inputs.input_lengths, inputs.tokens
    shared = encode_for(target, drafter, inputs)
    cache = fill_cache(target, *read, prefix, **shared)
    cache, draft_state = target.node_cache(cache, cache_slots, positions), None
    if drafter is not None:
        draft_state = drafter.init_beams(*read, beams, cache_slots, positions, **shared)
    active, finished = make_first_hypotheses(inputs.tokens, positions, config)
    zeros = jnp.zeros(batch, jnp.int32)
    assert inputs.settings is not None, "the length penalty"
    return BeamState(
        active=active,
        finished=finished,
        is_finished=jnp.zeros((batch, beams), bool),
        prefix_lengths=inputs.prefix_lengths,
        steps=zeros,
        limits=inputs.limits - inputs.prefix_lengths,
        done=inputs.done,
        failed=zeros,
        eos_ids=inputs.eos_ids[:, : config.ends],
        penalty=inputs.settings["length_penalty"],
        sampling=inputs.sampling,
        paths=jnp.broadcast_to(jnp.arange(positions, dtype=jnp.int32), active.tokens.shape),
        starts=inputs.prefix_lengths - 1 + beams,
        target_cache=cache,
        draft_state=draft_state,
        counts=Counts.zero(batch, config.gamma),
        config=config,
    )
