"""Drafts the tree of a speculative beam search with a model: its own beams, level by level."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.backends.tree_positions import Nodes
from specdec_jax.models.network import Network
from specdec_jax.speculative.beam_iteration import score_nodes
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.beam_tree import BeamTree
from specdec_jax.speculative.verifiers import pick


def draft_levels(
    network: Network,
    widened: Callable[[jax.Array], jax.Array],
    cache: Any,
    state: BeamState,
    tree: BeamTree,
) -> tuple[Any, BeamTree]:
    """Adds γ levels of the u nodes with the greatest sums of log-probabilities to the tree.

    The sums begin with the target's own sums of the active beams; the drafted tokens add their
    log-probabilities under `network`. A token that ends a sequence is never a node, since nothing
    follows it.

    Args:
      network: the drafting model's network.
      widened: a function that brings its logits to the width of the target's vocabulary.
      cache: its cache, from `Network.node_cache`, with the same slots as the target's.
      state: the search.
      tree: the active beams' last tokens.

    Returns:
      The cache, which has all nodes but those of the last level, and the tree. If the search takes
      nodes of the last level, the next call feeds them, before the active beams that follow them.
    """
    config, sums, width = state.config, state.active.scores, state.config.beams
    fed, valid = _prepend_parents(state, tree), ~state.done[:, None]
    ends = jnp.any(jnp.arange(config.vocab_size) == state.eos_ids[..., None], axis=1)
    for level in range(config.gamma):
        if level:
            fed, width = tree.last(config.width), config.width
        every = jnp.broadcast_to(valid, fed.tokens.shape)
        states, cache = network.decode_nodes(fed.tokens, fed.nodes, cache, every)
        states = states[:, -width:]
        logits = widened(network.head(states, jnp.broadcast_to(valid, states.shape[:2])))
        own, adjusted = score_nodes(state, logits, tree.last(width))
        totals = (own if adjusted is None else adjusted) + sums[..., None]
        sums, parents, tokens = _find_best(jnp.where(ends[:, None], -jnp.inf, totals), config.width)
        tree = tree.grow(parents + tree.tokens.shape[1] - width, tokens)
    return cache, tree


def _find_best(totals: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the `count` greatest of `totals [B, J, V]`, and their places on the axes J and V.

    All three are `[B, count]`.
    """
    batch, _, vocab = totals.shape
    each = min(count, vocab)
    values, tokens = jax.lax.top_k(totals, each)
    values, which = jax.lax.top_k(values.reshape(batch, -1), count)
    tokens = pick(tokens.reshape(batch, -1), which)
    return values, (which // each).astype(jnp.int32), tokens.astype(jnp.int32)


def _prepend_parents(state: BeamState, tree: BeamTree) -> BeamTree:
    """Returns the active beams' last tokens and, before them, the tokens in the K slots before.

    If all of a draft was accepted, those K tokens were nodes of its last level, which have never
    been fed; else they are fed again, which writes the same keys and values. A slot of which no
    active beam is a continuation is never read again; any token may be written there, and the one
    before the first beam's last is.
    """
    beams = state.config.beams
    slots = state.starts[:, None] - beams + jnp.arange(beams, dtype=jnp.int32)
    before = jnp.maximum(state.positions - 1, 0)[:, None]
    at = jnp.broadcast_to(before, slots.shape)[..., None]
    own = jnp.take_along_axis(state.paths, at, axis=2)[..., 0]
    child = jnp.argmax(own[:, None] == slots[..., None], axis=2)
    tokens = pick(jnp.take_along_axis(state.active.tokens, at, axis=2)[..., 0], child)

    positions = jnp.broadcast_to(before, slots.shape)
    first = tokens, jnp.full_like(tokens, -1), positions, pick(state.paths, child)
    then = tree.tokens, tree.parents, tree.nodes.positions, tree.nodes.paths
    tokens, parents, positions, paths = (jnp.concatenate(both, axis=1) for both in zip(first, then))
    return BeamTree(tokens, parents, Nodes(state.starts - beams, positions, paths), None)
