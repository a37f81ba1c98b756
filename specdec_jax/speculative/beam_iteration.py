"""One iteration of speculative beam search: draft a tree → score its nodes in one call → step through what is scored.

Its output is that of plain beam search, since every step is plain beam search's own, with the target's numbers:

1. The drafter proposes γ levels of u nodes after the K live beams, with which they are K + u·γ nodes of one tree.
2. The target scores all of them in one call, each seeing its own ancestors alone.
3. Step by step the beams continue, as long as every live beam is a node that was scored: at least once, since the
   last tokens of the live beams are among the nodes.
4. What the steps went through stays in the caches, beam by beam; the nodes that no beam became are overwritten.

Slots: a call writes its nodes from slot `starts[b]` on, first those of the live beams. The K beams of the i-th step
after them are moved to slot `starts[b] + i·K` and what follows, so that plain search, which has no nodes but its live
beams, leaves the same cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.models.network import Network
from specdec_jax.models.nodes import Nodes, node_paths
from specdec_jax.models.sharding import pinned
from specdec_jax.speculative import laws
from specdec_jax.speculative.beams import BeamConfig, BeamState, Candidates, pick, step
from specdec_jax.speculative.processors import Context


class BeamTree(NamedTuple):
    """Nodes of a search: the live beams' last tokens, and level by level what was drafted after them.

    Attributes:
      tokens: `[B, N]` int32.
      parents: `[B, N]` int32, the number of the node before each; −1 for the live beams' own.
      nodes: where they lie.
      sequences: `[B, N, P]` int32 tokens by position, where a processor reads them; None: none does.
    """

    tokens: jax.Array
    parents: jax.Array
    nodes: Nodes
    sequences: jax.Array | None

    def last(self, count: int) -> "BeamTree":
        """Returns the last `count` nodes, with slots of their own."""
        tail = lambda x: x[:, -count:]
        starts = self.nodes.starts + self.tokens.shape[1] - count
        nodes = Nodes(starts, tail(self.nodes.positions), tail(self.nodes.paths))
        sequences = None if self.sequences is None else tail(self.sequences)
        return BeamTree(tail(self.tokens), tail(self.parents), nodes, sequences)

    def grow(self, parents: jax.Array, tokens: jax.Array) -> "BeamTree":
        """Returns the tree with a level more: `tokens [B, u]` after the nodes `parents [B, u]`."""
        first, width = self.tokens.shape[1], tokens.shape[1]
        positions = pick(self.nodes.positions, parents) + 1
        slots = self.nodes.starts[:, None] + first + jnp.arange(width, dtype=jnp.int32)
        paths = node_paths(pick(self.nodes.paths, parents), positions, slots)
        add = lambda old, new: jnp.concatenate([old, new], axis=1)
        sequences = self.sequences
        if sequences is not None:
            sequences = add(sequences, node_paths(pick(sequences, parents), positions, tokens))
        nodes = Nodes(self.nodes.starts, add(self.nodes.positions, positions), add(self.nodes.paths, paths))
        return BeamTree(add(self.tokens, tokens), add(self.parents, parents), nodes, sequences)


def live_beams(state: BeamState) -> BeamTree:
    """Makes the tree of the live beams' last tokens alone."""
    beams, batch = state.program.beams, len(state.steps)
    positions = jnp.broadcast_to(state.positions[:, None], (batch, beams))
    tokens = jnp.take_along_axis(state.live.tokens, positions[..., None], axis=2)[..., 0]
    slots = state.starts[:, None] + jnp.arange(beams, dtype=jnp.int32)
    nodes = Nodes(state.starts, positions, node_paths(state.paths, positions, slots))
    sequences = state.live.tokens if state.program.mode.reads_prefix else None
    return BeamTree(tokens, jnp.full_like(tokens, -1), nodes, sequences)


def search(target: Network, drafter, state: BeamState) -> BeamState:
    """Runs iterations until every row is done."""
    more = lambda state: ~jnp.all(state.done)
    return pinned(jax.lax.while_loop(more, lambda state: iterate_beams(target, drafter, state), state), target.rules)


def iterate_beams(target: Network, drafter, state: BeamState) -> BeamState:
    """One iteration for all rows; a row that is done changes in nothing that counts."""
    program, tree, draft_state = state.program, live_beams(state), state.draft_state
    if program.gamma:
        draft_state, tree = drafter.draft_beams(draft_state, state, tree)
    live = jnp.broadcast_to(~state.done[:, None], tree.tokens.shape)
    states, cache = target.decode_nodes(tree.tokens, tree.nodes, state.target_cache, live)
    logits = target.head(states, live)
    own, adjusted = scored(state, logits, tree)
    sums = node_sums(tree, state.live.scores, own if adjusted is None else adjusted)
    found = candidates(own, adjusted, sums, program)

    after, levels = _walk(state.replace(target_cache=None, draft_state=None), tree, found)
    taken = after.steps - state.steps
    if program.gamma:  # level i's beams: from where they were scored to where plain search has them
        sources, starts = state.starts[:, None] + levels, state.starts + program.beams
        cache, draft_state = cache.move_nodes(sources, starts), drafter.move_beams(draft_state, sources, starts)
    return pinned(
        after.replace(
            starts=state.starts + taken * program.beams, target_cache=cache, draft_state=draft_state,
            counts=_counted(state, taken),
        ),
        target.rules,
    )  # fmt: skip


def scored(state: BeamState, logits: jax.Array, tree: BeamTree) -> tuple[jax.Array, jax.Array | None]:
    """Returns log-probabilities `[B, N, V]` of the nodes' next tokens, and those after processors, if there are any.

    Hugging Face's processors change log-probabilities and leave them as they then are; in T5X's form, which has none,
    they change logits, as everywhere else here.
    """
    program, own = state.program, jax.nn.log_softmax(logits, axis=-1)
    if not program.mode.processes:
        return own, None
    batch, count, vocab = logits.shape
    rows = lambda x: jnp.repeat(x, count, axis=0)
    flat = lambda x: x.reshape(batch * count, *x.shape[2:])
    tokens = jnp.zeros((batch, count, 1), jnp.int32) if tree.sequences is None else tree.sequences
    context = Context(flat(tokens), flat(tree.nodes.positions) + 1, rows(state.prefix_lengths), rows(state.eos_ids))
    huggingface = program.style == "huggingface"
    given = own if huggingface else logits
    processed = laws.process(given.reshape(batch * count, 1, vocab), context, state.sampling_of(count), program.mode)
    processed = processed.reshape(batch, count, vocab)
    return own, processed if huggingface else jax.nn.log_softmax(processed, axis=-1)


def node_sums(tree: BeamTree, scores: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Returns the sum of log-probabilities `[B, N]` of each node's sequence, in the order in which steps add them up.

    Args:
      tree: the nodes.
      scores: `[B, K]`, the sums of the live beams.
      log_probs: `[B, N, V]`, of the nodes' next tokens.
    """
    beams, count = scores.shape[1], tree.tokens.shape[1]
    sums = jnp.pad(scores, ((0, 0), (0, count - beams)))
    if count == beams:
        return sums
    parents = jnp.maximum(tree.parents, 0)
    flat = parents * log_probs.shape[2] + jnp.maximum(tree.tokens, 0)
    own = jnp.take_along_axis(log_probs.reshape(len(scores), -1), flat, axis=1)
    # A level's parents come before it: as many rounds as there are levels.
    grow = lambda _, sums: jnp.where(tree.parents < 0, sums, pick(sums, parents) + own)
    depth = jnp.max(tree.nodes.positions - tree.nodes.positions[:, :1])
    return jax.lax.fori_loop(0, depth, grow, sums)


def candidates(own: jax.Array, adjusted: jax.Array | None, sums: jax.Array, program: BeamConfig) -> Candidates:
    """Returns the continuations of each node that a step may take: no more of one beam than of all together."""
    log_probs = own if adjusted is None else adjusted
    kept = min(program.candidates, program.vocab_size)
    totals, tokens = jax.lax.top_k(log_probs + sums[..., None], kept)
    take = lambda values: None if values is None else jnp.take_along_axis(values, tokens, axis=2)
    return Candidates(totals, tokens.astype(jnp.int32), take(own), take(adjusted))


def _walk(state: BeamState, tree: BeamTree, found: Candidates) -> tuple[BeamState, jax.Array]:
    """Steps while every live beam is a scored node.

    Returns:
      The state, and for each level of the tree the nodes that its live beams were, `[B, γ·K]`; where a row did not
      come so far, anything.
    """
    program, batch, starts = state.program, len(state.steps), state.starts
    beams = program.beams
    levels = jnp.zeros((batch, program.gamma + 1, beams), jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(beams, dtype=jnp.int32), (batch, beams))

    def body(carry):
        level, state, ids, active, levels = carry
        positions = jnp.broadcast_to(state.positions[:, None], ids.shape)
        after, parents, tokens = step(state, found.pick(ids), active)
        slots = starts[:, None] + level * beams + parents
        paths = node_paths(pick(state.paths, parents), positions, slots)
        after = after.replace(paths=jnp.where(active[:, None, None], paths, state.paths))
        same = tree.parents[:, None] == pick(ids, parents)[..., None]
        same &= tree.tokens[:, None] == tokens[..., None]
        ids, active = jnp.argmax(same, axis=2).astype(jnp.int32), active & ~after.done
        active &= _all_scored(same)
        levels = jax.lax.dynamic_update_slice_in_dim(levels, ids[:, None], level, axis=1)
        return level + 1, after, ids, active, levels

    carry = jnp.int32(0), state, ids, ~state.done, levels
    if not program.gamma:
        return body(carry)[1], levels
    more = lambda carry: jnp.any(carry[3])
    _, state, _, _, levels = jax.lax.while_loop(more, body, carry)
    return state, levels[:, : program.gamma].reshape(batch, -1)


def _all_scored(same: jax.Array) -> jax.Array:
    """`[B]`: whether each of the live beams is one of the nodes; `same [B, K, N]`."""
    return jnp.all(jnp.any(same, axis=2), axis=1)


def _counted(state: BeamState, taken: jax.Array):
    """Counts of the iteration: a level is examined if the step before it was taken, and stood if its own was."""
    counts, gamma, integer = state.counts, state.program.gamma, lambda mask: mask.astype(jnp.int32)
    active = integer(~state.done)
    level = jnp.arange(gamma)
    stood = integer(level < (taken - 1)[:, None])
    examined = integer(level < taken[:, None]) * active[:, None]
    return counts.replace(
        target_calls=counts.target_calls + active,
        draft_calls=counts.draft_calls + gamma * active,
        drafted=counts.drafted + gamma * active,
        accepted=counts.accepted + jnp.sum(stood, axis=1),
        examined_by_position=counts.examined_by_position + examined,
        accepted_by_position=counts.accepted_by_position + stood,
    )
