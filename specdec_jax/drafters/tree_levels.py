"""Drafts trees of fixed shape, level by level: the laws after all nodes of a level that have
children come from one call, and their children are chosen from them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.models.network import Network
from specdec_jax.models.nodes import WindowNodes
from specdec_jax.speculative import draws, laws
from specdec_jax.speculative.laws import Law
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.tree_children import choose_children
from specdec_jax.speculative.tree_iteration import at_nodes, sequences
from specdec_jax.speculative.trees import Tree, TreeDraft


class Level(NamedTuple):
    """The J nodes of one depth that have children, as a drafter's model is fed them.

    Attributes:
      depth: their depth; 0 is node 0 alone.
      numbers: `[J]`, their numbers in the tree; static.
      first: the place of the first of them in the order in which nodes are fed; static.
      lines: `[J, D + 1]`, by depth: the places of their ancestors in that order; static.
      tokens: their tokens.
      live: False for nodes that are not there.
    """

    depth: int
    numbers: np.ndarray
    first: int
    lines: np.ndarray
    tokens: Int[Array, "B J"]
    live: Bool[Array, "B J"]


# (level, carry) -> (logits `[B, J, V]` of the token after each of its nodes, carry)
LogitsOf = Callable[[Level, Any], tuple[Float[Array, "B J V"], Any]]


def draft_tree(
    state: DecodeState, num_wanted: Int[Array, " B"], room: Int[Array, " B"], logits_of: LogitsOf, carry: Any,
) -> tuple[TreeDraft, Any]:  # fmt: skip
    """Drafts the tree `state.program.tree`; arguments as for `Drafter.draft_tree`.

    Args:
      logits_of: gives the drafter's logits, as wide as the target's vocabulary, level by level.
      carry: what `logits_of` keeps from level to level.

    Returns:
      The draft, whose `calls` are 0, and the last carry.
    """
    program, tree, batch = state.program, state.program.tree, len(state.lengths)
    assert tree is not None, "a program of trees"
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    # Columns are added level by level, and put in the order of the nodes' numbers at the end.
    tokens, live = [last], [~state.done[:, None]]
    order, found, first = [np.zeros(1, np.int64)], [], 0
    column = np.zeros(tree.size, np.int64)
    words = _words(state, tree)
    for depth in range(tree.depth):
        inner, children = tree.inner(depth), tree.level(depth + 1)
        so_far = jnp.concatenate(tokens, axis=1)
        places = column[inner]
        there = jnp.concatenate(live, axis=1)[:, places]
        level = Level(depth, inner, first, tree.fed[tree.lines[inner]], so_far[:, places], there)
        logits, carry = logits_of(level, carry)
        first += len(inner)
        lines = jnp.broadcast_to(jnp.asarray(column[tree.lines[inner]], jnp.int32), (batch, len(inner), tree.depth + 1))
        depths = jnp.full((batch, len(inner)), depth, jnp.int32)
        law, chosen = _choose(state, tree, level, logits, depths, sequences(state, so_far, lines, depths), words)
        if program.asks_draft_law:
            found.append(law)
        parents = np.searchsorted(inner, np.asarray(tree.parents)[children - 1])
        new = chosen[:, parents, tree.ranks[children]]
        ended = jnp.any(level.tokens[..., None] == state.eos_ids[:, None], axis=2) & (depth > 0)
        open_ = (there & ~ended)[:, parents] & (children <= num_wanted[:, None]) & (depth < room)[:, None]
        tokens.append(jnp.where(open_, new, 0))
        live.append(open_ & (new >= 0))
        column[children] = so_far.shape[1] + np.arange(len(children))
        order.append(children)
    back = np.argsort(np.concatenate(order))
    put = lambda columns: jnp.concatenate(columns, axis=1)[:, back]
    law = None if not found else Law(*(jnp.concatenate(parts, axis=1) for parts in zip(*found)))
    origins = np.array((0, *tree.fed[list(tree.parents)]), np.int32)
    rows = lambda values: jnp.broadcast_to(jnp.asarray(values, jnp.int32), (batch, tree.size))
    return TreeDraft(
        tokens=put(tokens), branches=tree.branches(batch), live=put(live), law=law, origins=rows(origins),
        calls=jnp.zeros(batch, jnp.int32), slots=rows(np.maximum(tree.fed, 0)),
    ), carry  # fmt: skip


def _words(state: DecodeState, tree: Tree) -> jax.Array | None:
    """Returns the random words `[B, N − 1, 2]` by which drafted nodes are drawn, if any are."""
    if state.program.mode.greedy or tree.kind in ("top", "gumbel"):
        return None
    offsets = jnp.broadcast_to(jnp.arange(tree.size - 1), (len(state.lengths), tree.size - 1))
    return draws.words(state.keys, state.lengths, offsets, draws.DRAFT)


def _choose(
    state: DecodeState, tree: Tree, level: Level, logits, depths, prefixes, words
) -> tuple[Law | None, Int[Array, "B J K"]]:
    """Chooses the children of the J nodes of `level`; returns the laws they were chosen from, and
    their tokens by rank, −1 where a node has none."""
    program, parents = state.program, np.asarray(tree.parents)
    counts = [int(np.sum(parents == number)) for number in level.numbers]
    if program.mode.greedy:
        processed = at_nodes(laws.process, state, logits, depths, prefixes)
        return None, choose_children("top", Law.of(processed), counts)
    law, noise, own = at_nodes(laws.standardize, state, logits, depths, prefixes), None, None
    if tree.kind == "gumbel":
        noise = draws.gumbel_noise(state.keys, (state.lengths + level.depth)[:, None], program.vocab_size)
        noise = jnp.broadcast_to(noise, logits.shape)
    if words is not None:
        own = words[:, _children(tree, level.numbers, max(counts))]
    soften = functools.partial(laws.standardize, soften=True)
    ranked = at_nodes(soften, state, logits, depths, prefixes)
    chosen = choose_children("top", ranked, counts)
    if tree.kind != "top":  # children of rows at temperature 0 are not drawn
        drawn = choose_children(tree.kind, law, counts, own, noise)
        chosen = jnp.where((state.sampling.temperature == 0)[:, None, None], chosen, drawn)
    return law, chosen


def _children(tree: Tree, numbers: np.ndarray, most: int) -> np.ndarray:
    """Returns `[J, most]`: numbers of the children of each of J nodes, less 1; 0 where there are
    fewer."""
    places = np.zeros((len(numbers), most), np.int32)
    for row, number in enumerate(numbers):
        children = np.flatnonzero(np.asarray(tree.parents) == number)
        places[row, : len(children)] = children
    return places


def draft_with_model(
    network: Network, widened: Callable, cache: Any, state: DecodeState, num_wanted, room
) -> tuple[Any, TreeDraft]:
    """Drafts a tree with a model and its own cache.

    The first call feeds the last two committed tokens: the one before the last may have been a leaf
    of the tree before, which was never fed. Node n is fed to the slot of the last committed token
    and as many slots further as nodes were fed before it.

    Args:
      network: the drafting model's network.
      widened: a function that brings its logits to the width of the target's vocabulary.
      cache: its cache, from `Network.node_cache`.
      The others are those of `Drafter.draft_tree`.

    Returns:
      The cache, and the draft.
    """
    origins, span, columns = state.lengths - 1, state.tokens.shape[1], state.program.gamma + 1

    def logits_of(level: Level, cache):
        if level.depth:
            starts = origins + level.first
            states, cache = network.decode_nodes(level.tokens, _fed(level, starts, origins, span), cache, level.live)
            return widened(network.head(states, level.live)), cache
        first = jnp.maximum(origins - 1, 0)  # at position 0 the second token is fed needlessly
        fed = jnp.take_along_axis(state.tokens, first[:, None] + jnp.arange(2), axis=1)
        depths = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), fed.shape)
        lines = np.zeros((2, columns), np.int32)
        lines[1, 1] = 1
        nodes = WindowNodes(first, first, depths, jnp.broadcast_to(lines, (*fed.shape, columns)), span)
        live = jnp.broadcast_to(level.live, fed.shape)
        states, cache = network.decode_nodes(fed, nodes, cache, live)
        states = jnp.take_along_axis(states, (origins - first)[:, None, None], axis=1)
        return widened(network.head(states, level.live)), cache

    draft, cache = draft_tree(state, num_wanted, room, logits_of, cache)
    deepest = jnp.max(jnp.where(draft.live, draft.branches.depths, 0), axis=1)
    return cache, draft._replace(calls=deepest)


def _fed(level: Level, starts, origins, span: int) -> WindowNodes:
    shape = level.tokens.shape
    depths = jnp.full(shape, level.depth, jnp.int32)
    lines = jnp.broadcast_to(jnp.asarray(level.lines, jnp.int32), (*shape, level.lines.shape[1]))
    return WindowNodes(starts, origins, depths, lines, span)
