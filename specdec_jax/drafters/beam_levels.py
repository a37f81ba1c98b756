"""Drafts the tree of a speculative beam search with a model: its own beams, level by level."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.models.network import Network
from specdec_jax.models.nodes import Nodes
from specdec_jax.speculative.beam_iteration import BeamTree, scored
from specdec_jax.speculative.beams import BeamState, pick


def draft_levels(
    network: Network, widened: Callable[[jax.Array], jax.Array], cache: Any, state: BeamState, tree: BeamTree
) -> tuple[Any, BeamTree]:
    """Grows γ levels of u nodes: those whose sums of log-probabilities under `network` are greatest.

    They begin with the target's own sums of the live beams. What ends a sequence is no node: nothing follows it.

    Args:
      network: the drafting model's.
      widened: brings its logits to the target's vocabulary.
      cache: its cache, of `Network.node_cache`, laid out as the target's.
      state: of the search.
      tree: the live beams' last tokens.

    Returns:
      The cache, which holds all nodes but the last level's, and the tree. The beams that come of the last level are fed
      by the next call, together with the live beams after them.
    """
    program, beams = state.program, state.program.beams
    fed = _with_parents(state, tree)
    states, cache = network.decode_nodes(fed.tokens, fed.nodes, cache, _live(state, fed))
    states, width = states[:, beams:], beams
    laws = None
    for level in range(program.gamma):
        if level:
            fed, width = tree.last(program.width), program.width
            states, cache = network.decode_nodes(fed.tokens, fed.nodes, cache, _live(state, fed))
        logits = widened(network.head(states, jnp.broadcast_to(~state.done[:, None], states.shape[:2])))
        own, adjusted = scored(state, logits, tree.last(width))
        own = own if adjusted is None else adjusted
        sums = state.live.scores if laws is None else laws
        ends = jnp.any(jnp.arange(program.vocab_size) == state.eos_ids[..., None], axis=1)
        totals = jnp.where(ends[:, None], -jnp.inf, own + sums[..., None])
        laws, parents, tokens = _best(totals, program.width)
        tree = tree.grow(parents + tree.tokens.shape[1] - width, tokens)
    return cache, tree


def _best(totals: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `count` greatest of `totals [B, J, V]`, whose they are, and their tokens, all `[B, count]`."""
    batch, _, vocab = totals.shape
    each = min(count, vocab)
    values, tokens = jax.lax.top_k(totals, each)
    values, which = jax.lax.top_k(values.reshape(batch, -1), count)
    return values, (which // each).astype(jnp.int32), pick(tokens.reshape(batch, -1), which).astype(jnp.int32)


def _live(state: BeamState, tree: BeamTree) -> jax.Array:
    return jnp.broadcast_to(~state.done[:, None], tree.tokens.shape)


def _with_parents(state: BeamState, tree: BeamTree) -> BeamTree:
    """The live beams' last tokens, and before them the tokens that these follow, in the K slots before theirs.

    Those were nodes of the last level if all of a draft stood, and then they have never been fed; else they are fed
    again, to the same end. A slot that no live beam follows holds nothing that is ever read: it takes the first
    beam's.
    """
    beams = state.program.beams
    slots = state.starts[:, None] - beams + jnp.arange(beams, dtype=jnp.int32)
    before = jnp.maximum(state.positions - 1, 0)[:, None]
    at = jnp.broadcast_to(before, slots.shape)[..., None]
    own = jnp.take_along_axis(state.paths, at, axis=2)[..., 0]
    child = jnp.argmax(own[:, None] == slots[..., None], axis=2)
    tokens = pick(jnp.take_along_axis(state.live.tokens, at, axis=2)[..., 0], child)
    add = lambda old, new: jnp.concatenate([old, new], axis=1)
    nodes = Nodes(
        state.starts - beams, add(jnp.broadcast_to(before, slots.shape), tree.nodes.positions),
        add(pick(state.paths, child), tree.nodes.paths),
    )  # fmt: skip
    return BeamTree(add(tokens, tree.tokens), add(jnp.full_like(tokens, -1), tree.parents), nodes, None)
