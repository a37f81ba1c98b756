"""The tree of nodes that one call of the target scores in a beam search."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.backends.tree_positions import Nodes, node_paths
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.verifiers import pick


class BeamTree(NamedTuple):
    """The nodes of a search: the active beams' last tokens and, level by level, drafted tokens.

    Attributes:
      tokens: `[B, N]` int32, the token of each node.
      parents: `[B, N]` int32, each node's parent by number; −1 for the active beams' last tokens.
      nodes: positions, slots and paths of the nodes.
      sequences: `[B, N, P]` int32, the tokens up to each node by position; None if no processor
        reads them.
    """

    tokens: jax.Array
    parents: jax.Array
    nodes: Nodes
    sequences: jax.Array | None

    def last(self, count: int) -> "BeamTree":
        """Returns the last `count` nodes alone, in the slots that they have in the whole tree."""

        def tail(x: jax.Array):
            return x[:, -count:]

        starts = self.nodes.starts + self.tokens.shape[1] - count
        nodes = Nodes(starts, tail(self.nodes.positions), tail(self.nodes.paths))
        sequences = None if self.sequences is None else tail(self.sequences)
        return BeamTree(tail(self.tokens), tail(self.parents), nodes, sequences)

    def grow(self, parents: jax.Array, tokens: jax.Array) -> "BeamTree":
        """Returns the tree with one more level: `tokens [B, u]` after nodes `parents [B, u]`."""
        first, width = self.tokens.shape[1], tokens.shape[1]
        positions = pick(self.nodes.positions, parents) + 1
        slots = self.nodes.starts[:, None] + first + jnp.arange(width, dtype=jnp.int32)
        paths = node_paths(pick(self.nodes.paths, parents), positions, slots)

        def add(old: jax.Array, new: jax.Array):
            return jnp.concatenate([old, new], axis=1)

        sequences = self.sequences
        if sequences is not None:
            sequences = add(sequences, node_paths(pick(sequences, parents), positions, tokens))
        nodes = Nodes(
            self.nodes.starts, add(self.nodes.positions, positions), add(self.nodes.paths, paths)
        )
        return BeamTree(add(self.tokens, tokens), add(self.parents, parents), nodes, sequences)


def make_root_tree(state: BeamState) -> BeamTree:
    """Makes the tree that has only the active beams' last tokens."""
    beams, batch = state.config.beams, len(state.steps)
    positions = jnp.broadcast_to(state.positions[:, None], (batch, beams))
    tokens = jnp.take_along_axis(state.active.tokens, positions[..., None], axis=2)[..., 0]
    slots = state.starts[:, None] + jnp.arange(beams, dtype=jnp.int32)
    nodes = Nodes(state.starts, positions, node_paths(state.paths, positions, slots))
    sequences = state.active.tokens if state.config.mode.reads_prefix else None
    return BeamTree(tokens, jnp.full_like(tokens, -1), nodes, sequences)
