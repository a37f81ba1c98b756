"""Compiled loops of single steps, which `timing` times.

A step is a decode call and the argmax of its logits. Its tokens are fed to the next step, so that
the compiler can remove or move nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.backends.tree_positions import WindowNodes
from specdec_jax.models.network import Network, is_decoder_only
from specdec_jax.speculative import distributions, iteration, prefill
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.state import DecodeState, Draft
from specdec_jax.speculative.trees import Tree


@functools.partial(jax.jit, static_argnames="steps")
def decode_steps(
    network: Network, tokens: jax.Array, positions: jax.Array, cache: Any, *, steps: int
) -> jax.Array:
    """Feeds tokens `[B, T]` at the same positions `steps` times, each time those of the last step.

    Returns the last ones. Positions `[B]` + T must not exceed the cache's slots.
    """

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, cache = carry
        logits, cache = network.decode(tokens, positions, cache)
        return distributions.argmax(logits).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


@functools.partial(jax.jit, static_argnames="slots")
def prefill_cache(
    network: Network, inputs: jax.Array, input_lengths: jax.Array, *, slots: int
) -> Any:
    """Returns the cache with which decoding begins.

    For a decoder-only network it holds all but the last id of the prompt. A network that attends to
    another's encoder output is given zeros.
    """
    if is_decoder_only(network):
        return prefill.fill_cache(network, inputs[:, :0], input_lengths * 0, inputs, slots)
    encoded = None
    if network.encoder_dim is not None:
        encoded = jnp.zeros((*inputs.shape, network.encoder_dim), network.config.dtype)
    return network.prefill(inputs, input_lengths, slots, encoded=encoded)


@functools.partial(jax.jit, static_argnames="steps")
def draft_steps(
    network: Network, tokens: jax.Array, positions: jax.Array, cache: Any, *, steps: int
) -> jax.Array:
    """Runs steps like a drafter: as `decode_steps`, with the head on the last token only.

    `tokens` are `[B, 1]` or `[B, 2]`: a drafter feeds two to catch up, and always two where pairs
    are free.
    """
    body = functools.partial(_draft_step, network, positions)
    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


def _draft_step(network: Network, positions: jax.Array, _: jax.Array, carry: tuple) -> tuple:
    tokens, cache = carry
    states, cache = network.decode_states(tokens, positions, cache)
    token = distributions.argmax(network.head(states[:, -1:])).astype(jnp.int32)
    return jnp.concatenate([tokens[:, 1:], token], axis=1), cache


@functools.partial(jax.jit, static_argnames=("tree", "slots", "steps"))
def node_steps(
    network: Network,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Any,
    *,
    tree: Tree,
    slots: int,
    steps: int,
) -> jax.Array:
    """Runs steps as `decode_steps` does over the N nodes `[B, N]` of `tree`.

    Node 0 is at `positions`. `cache` is from `Network.node_cache`, with `slots` slots.
    """
    branches = tree.branches(len(tokens))
    nodes = WindowNodes(positions, positions, branches.depths, branches.lines, slots)

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, cache = carry
        states, cache = network.decode_nodes(tokens, nodes, cache)
        return distributions.argmax(network.head(states)).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


@functools.partial(jax.jit, static_argnames=("gamma", "steps", "width"))
def paired_steps(
    target: Network,
    drafter: Network,
    tokens: jax.Array,
    positions: jax.Array,
    caches: tuple,
    *,
    gamma: int,
    steps: int,
    width: int,
) -> jax.Array:
    """Runs γ draft steps and a target call over γ + 1 positions in turn, `steps` times.

    Between target calls a draft step takes longer than alone, because they push its weights out of
    the processor's caches. `tokens` are `[B, G + 1]`, `caches` the target's and the drafter's, and
    `width` is the number of positions in a draft step, 1 or 2. Returns the last tokens.
    """
    draft = functools.partial(_draft_step, drafter, positions)

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, (cache, draft_cache) = carry
        drafted, draft_cache = jax.lax.fori_loop(0, gamma, draft, (tokens[:, -width:], draft_cache))
        fed = jnp.concatenate([drafted[:, -1:], tokens[:, 1:]], axis=1)
        logits, cache = target.decode(fed, positions, cache)
        return distributions.argmax(logits).astype(jnp.int32), (cache, draft_cache)

    return jax.lax.fori_loop(0, steps, body, (tokens, caches))[0]


@functools.partial(jax.jit, static_argnames="steps")
def call_steps(
    network: Network, tokens: jax.Array, positions: jax.Array, cache: Any, *, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Runs steps as `decode_steps` does, but without the argmax: the call alone.

    Each next token is made of one logit. All logits are carried along, so that the compiler cannot
    reduce the call to that one. Returns the last tokens `[B, T]` and logits `[B, T, V]`.
    """

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, cache, _ = carry
        logits, cache = network.decode(tokens, positions, cache)
        return jnp.abs(logits[..., 0] * 1e3).astype(jnp.int32) % network.vocab_size, cache, logits

    logits = jnp.zeros((*tokens.shape, network.vocab_size), jnp.float32)
    tokens, _, logits = jax.lax.fori_loop(0, steps, body, (tokens, cache, logits))
    return tokens, logits


@functools.partial(jax.jit, static_argnames="steps")
def verified_steps(
    network: Network, state: DecodeState, *, steps: int
) -> tuple[jax.Array, jax.Array, Categorical | None]:
    """Runs steps over γ + 1 positions, with the engine's verification in place of the argmax.

    The drafter's distribution is the target's distribution of the step before, one position on. The
    token after the accepted ones is among the tokens fed next, and their number enters the keys of
    the next draws, so that the compiler can move nothing out of the loop.

    Returns:
      The last tokens `[B, G + 1]`, numbers of accepted ones `[B]`, and the target's distributions
        `[B, G + 1, V]` (None for argmax).
    """
    config, positions = state.config, state.lengths - 1
    batch, width = len(positions), config.gamma + 1
    none, all_drafted = jnp.zeros(batch, jnp.int32), jnp.full(batch, config.gamma, jnp.int32)

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, num_accepted, dist, cache = carry
        logits, cache = network.decode(tokens, positions, cache)
        before = None
        if config.needs_draft_probs:
            before = Categorical(dist.logits[:, :-1], dist.log_normalizer[:, :-1])
        draft = Draft(tokens[:, 1:], all_drafted, before, none)
        later = state.replace(lengths=state.lengths + num_accepted)
        verified, dist = iteration.verify(later, draft, logits)
        at_end = jnp.arange(width) == verified.num_accepted[:, None]
        tokens = jnp.where(at_end, verified.next_token[:, None], tokens)
        return tokens, verified.num_accepted, dist, cache

    dist = None
    if not config.strict_argmax:
        dist = Categorical.from_logits(jnp.zeros((batch, width, config.vocab_size)))
    carry = (jnp.ones((batch, width), jnp.int32), none, dist, state.target_cache)
    return jax.lax.fori_loop(0, steps, body, carry)[:3]
