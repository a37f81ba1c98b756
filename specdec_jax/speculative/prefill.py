"""Makes the state that the decode loop starts from: encodes the input, feeds the prefix."""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policy import Policy, init_policy
from specdec_jax.speculative.sampling import SamplingRows
from specdec_jax.speculative.state import Counts, DecodeState, StaticConfig, make_empty_signals
from specdec_jax.speculative.verifiers import Settings


@flax.struct.dataclass
class PrefillInputs:
    """What B rows of I inputs begin with; I divides B, and the rows of an input lie side by side.

    Attributes:
      inputs: `[I, L]` int32, ids of the inputs, each encoded once; L = 0 for a decoder-only target.
      input_lengths: `[I]` int32, how many of them count.
      tokens: `[B, P]` int32, start token and decoder prefix, or the prompt, padded.
      prefix_lengths: `[B]` int32, how many of `tokens` count, at least 1.
      sampling: traced parameters of sampling.
      limits: `[B]` int32, the number of tokens, prefix included, at which a row ends.
      eos_ids: `[B, E]` int32, ids that end a row.
      done: `[B]` bool, rows with nothing to decode.
      settings: as in `DecodeState`; of a beam search its `length_penalty`.
      keys, gamma, policy, draft_sampling: as in `DecodeState`; a beam search reads none of them.
    """

    inputs: Int[Array, "I L"]
    input_lengths: Int[Array, " I"]
    tokens: Int[Array, "B P"]
    prefix_lengths: Int[Array, " B"]
    sampling: SamplingRows
    limits: Int[Array, " B"]
    eos_ids: Int[Array, "B E"]
    done: Bool[Array, " B"]
    keys: Key[Array, " B"] | None = None
    settings: Settings | None = None
    gamma: Int[Array, " B"] | None = None
    policy: Policy | None = None
    draft_sampling: SamplingRows | None = None


def prefill(
    target: Network,
    drafter: Drafter | None,
    config: StaticConfig,
    slots: int,
    inputs: PrefillInputs,
) -> DecodeState:
    """Runs both encoders once, feeds the decoder prefix and makes the loop's first state.

    Args:
      target: the target's network.
      drafter: the drafter; None is autoregressive decoding.
      config: the loop's static settings.
      slots: S, slots of tokens and of the caches.
      inputs: B rows of I inputs.
    """
    batch, prefix = inputs.tokens.shape
    config = config._replace(mode=config.mode._replace(native=target.skips_padding))
    read = inputs.inputs, inputs.input_lengths, inputs.tokens, slots
    shared = encode_for(target, drafter, inputs)
    cache, states = read_prefix(target, *read, **shared)
    if config.tree is None:
        draft_state = drafter and drafter.init(*read, **shared)
    else:
        cache = target.node_cache(cache, slots, slots)
        draft_state = drafter and drafter.init_tree(*read, **shared)
    zeros, no_log_probs = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, slots), jnp.float32)
    state = DecodeState(
        tokens=jnp.zeros((batch, slots), jnp.int32).at[:, :prefix].set(inputs.tokens),
        lengths=inputs.prefix_lengths,
        done=inputs.done,
        starts=inputs.prefix_lengths,
        log_probs=no_log_probs,
        adjusted_log_probs=None if config.strict_argmax else no_log_probs,
        keys=inputs.keys,
        sampling=inputs.sampling,
        settings=inputs.settings,
        limits=inputs.limits,
        eos_ids=inputs.eos_ids,
        gamma=inputs.gamma,
        policy=inputs.policy,
        policy_state=inputs.policy and init_policy(inputs.policy, batch),
        target_cache=cache,
        draft_state=draft_state,
        counts=Counts.zero(batch, config.gamma),
        last_draft=jnp.zeros((batch, config.gamma), jnp.int32),
        last_drafted=zeros,
        last_accepted=zeros,
        last_seen=make_empty_signals(inputs.policy, batch),
        draft_failed=zeros,
        config=config,
        draft_sampling=inputs.draft_sampling,
    )
    if drafter is not None:
        draft_state = drafter.read_prefix(draft_state, state, states)
        state = state.replace(draft_state=draft_state)
    return constrain_sharding(state, target.rules)


def encode_for(
    target: Network, drafter: Drafter | None, inputs: PrefillInputs
) -> dict[str, Float[Array, "I L D"]]:
    """Returns `encoded=` for a drafter that reads the target's encoder output, else nothing."""
    if drafter is None or not drafter.reads_encoder:
        return {}
    return {"encoded": target.encode(inputs.inputs, inputs.input_lengths)}


def fill_cache(
    network: Network,
    inputs: Int[Array, "I L"],
    input_lengths: Int[Array, " I"],
    tokens: Int[Array, "B P"],
    slots: int,
    **encoded: Float[Array, "I L D"] | None,
) -> Any:
    """Returns the cache of `network` for B rows that have been fed all but the last of `tokens`.

    The arguments are those of `prefill`; `encoded`, which may be left out, is passed on to
    `Network.prefill`.
    """
    return read_prefix(network, inputs, input_lengths, tokens, slots, **encoded)[0]


def read_prefix(
    network: Network,
    inputs: Int[Array, "I L"],
    input_lengths: Int[Array, " I"],
    tokens: Int[Array, "B P"],
    slots: int,
    **encoded: Float[Array, "I L E"] | None,
) -> tuple[Any, Float[Array, "B T D"] | None]:
    """Does what `fill_cache` does, and returns the T = P − 1 states too; None if there are none."""
    copies = len(tokens) // len(inputs)
    if copies > 1 and not inputs.shape[1]:
        # A prompt is read once, like an encoder's input, for all of its rows.
        cache, states = read_prefix(network, inputs, input_lengths, tokens[::copies], slots)
        states = None if states is None else jnp.repeat(states, copies, axis=0)
        return cache.repeated(copies), states
    cache = network.prefill(inputs, input_lengths, slots, copies, **encoded)
    if tokens.shape[1] == 1:
        return cache, None
    starts = jnp.zeros(len(tokens), jnp.int32)
    states, cache = network.decode_states(tokens[:, :-1], starts, cache)
    return cache, states
