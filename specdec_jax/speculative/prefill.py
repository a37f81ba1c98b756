"""Makes the state that the decode loop starts from: encodes the input, feeds the prefix."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import Policy
from specdec_jax.speculative.policy_calls import begin
from specdec_jax.speculative.sampling import SamplingRows
from specdec_jax.speculative.state import Counts, DecodeState, StaticConfig, empty_signals
from specdec_jax.speculative.verifiers import Settings


def prefill(
    target: Network,
    drafter: Drafter | None,
    config: StaticConfig,
    slots: int,
    inputs: Int[Array, "I L"],
    input_lengths: Int[Array, " I"],
    tokens: Int[Array, "B P"],
    prefix_lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    rows: SamplingRows,
    settings: Settings | None,
    limits: Int[Array, " B"],
    eos_ids: Int[Array, "B E"],
    gamma: Int[Array, " B"],
    done: Bool[Array, " B"],
    policy: Policy | None = None,
) -> DecodeState:
    """Runs both encoders once, feeds the decoder prefix and makes the loop's first state.

    Args:
      slots: S, slots of tokens and of the caches.
      inputs: ids of the inputs; L = 0 for a decoder-only target. I divides B: every input is
        encoded once for its B/I rows, which lie side by side.
      tokens: start token and decoder prefix, or the prompt, padded.
      prefix_lengths: how many of `tokens` count in each row, at least 1.
      rows: traced parameters of sampling.
      keys, settings, limits, eos_ids, gamma, done, policy: as in `DecodeState`.
    """
    (batch, prefix), config = (
        tokens.shape,
        config._replace(mode=config.mode.of(target.skips_padding)),
    )
    shared = {}
    if drafter is not None and drafter.reads_encoder:
        shared = {"encoded": target.encode(inputs, input_lengths)}
    cache = fill_cache(target, inputs, input_lengths, tokens, slots, **shared)
    if config.tree is None:
        draft_state = drafter and drafter.init(inputs, input_lengths, tokens, slots, **shared)
    else:
        cache = target.node_cache(cache, slots, slots)
        draft_state = drafter and drafter.init_tree(inputs, input_lengths, tokens, slots, **shared)
    zeros, no_log_probs = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, slots), jnp.float32)
    state = DecodeState(
        tokens=jnp.zeros((batch, slots), jnp.int32).at[:, :prefix].set(tokens),
        lengths=prefix_lengths,
        done=done,
        starts=prefix_lengths,
        log_probs=no_log_probs,
        adjusted_log_probs=None if config.strict_argmax else no_log_probs,
        keys=keys,
        sampling=rows,
        settings=settings,
        limits=limits,
        eos_ids=eos_ids,
        gamma=gamma,
        policy=policy,
        policy_state=policy and begin(policy, batch),
        target_cache=cache,
        draft_state=draft_state,
        counts=Counts.zero(batch, config.gamma),
        last_draft=jnp.zeros((batch, config.gamma), jnp.int32),
        last_drafted=zeros,
        last_accepted=zeros,
        last_seen=empty_signals(policy, batch),
        draft_failed=zeros,
        config=config,
    )
    return constrain_sharding(state, target.rules)


def fill_cache(
    network: Network,
    inputs: Int[Array, "I L"],
    input_lengths: Int[Array, " I"],
    tokens: Int[Array, "B P"],
    slots: int,
    **encoded: Float[Array, "I L D"],
) -> Any:
    """Returns the cache of `network` for B rows that have been fed all but the last of `tokens`.

    The arguments are those of `prefill`; `encoded`, which may be left out, is passed on to
    `Network.prefill`.
    """
    copies = len(tokens) // len(inputs)
    if (
        copies > 1 and not inputs.shape[1]
    ):  # a prompt is read once, like an encoder's input, for all of its rows
        return fill_cache(network, inputs, input_lengths, tokens[::copies], slots).repeated(copies)
    cache = network.prefill(inputs, input_lengths, slots, copies, **encoded)
    if tokens.shape[1] > 1:
        _, cache = network.decode(tokens[:, :-1], jnp.zeros(len(tokens), jnp.int32), cache)
    return cache
