"""Positions and slots of the tokens of a call that are nodes of a tree, not the next tokens of a
sequence: `Nodes` for any tree, `WindowNodes` for one that continues a single sequence.

All nodes of a tree share one row of the key/value cache. A node is written to a slot of its own,
which does not tell its position; that is given separately, and so are the slots of its ancestors.
Branches never see each other, and a sequence whose tokens lie scattered over the cache costs no
more than one whose tokens lie side by side.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Nodes:
    """T nodes of each of B trees.

    Attributes:
      starts: `[B]` int32, the slot of the first node; node t is written to slot `starts[b] + t`.
      positions: `[B, T]` int32, the position of each node in its sequence, from 0.
      paths: `[B, T, P]` int32, by position: the slots of a node's ancestors, then its own slot,
        then anything.
    """

    starts: jax.Array
    positions: jax.Array
    paths: jax.Array

    def distances(self, slots: int) -> jax.Array:
        """Returns `[B, T, S]` int32: how many positions the token in each of S = `slots` slots
        stands before each node; 0 for the node itself, −1 where the token is not an ancestor."""

        def found(positions, paths):
            ahead = positions[..., None] - jnp.arange(paths.shape[2], dtype=jnp.int32)
            here = paths[..., None] == jnp.arange(slots, dtype=jnp.int32)
            return jnp.max(jnp.where(here & (ahead >= 0)[..., None], ahead[..., None], -1), axis=2)

        def found_in_eights(positions, paths):
            # A TPU takes seven times as long for 28 nodes as for 32.
            nodes = positions.shape[1]
            padding = (0, -nodes % 8 if nodes > 8 else 0)
            positions, paths = (
                jnp.pad(positions, ((0, 0), padding)),
                jnp.pad(paths, ((0, 0), padding, (0, 0))),
            )
            return found(positions, paths)[:, :nodes]

        return jax.lax.platform_dependent(
            self.positions, self.paths, cpu=found, default=found_in_eights
        )


def node_paths(paths: jax.Array, positions: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the paths of nodes, made from the paths of their parents.

    Args:
      paths: `[B, T, P]` int32, the parents' paths.
      positions: `[B, T]`, the nodes' positions.
      slots: `[B, T]`, the nodes' slots.
    """
    own = jnp.arange(paths.shape[-1], dtype=jnp.int32) == positions[..., None]
    return jnp.where(own, slots[..., None], paths)


@flax.struct.dataclass
class WindowNodes:
    """T nodes of trees that begin where a sequence ends: has what `Nodes` has, made from less.

    The tokens before the tree lie in the slots of their own positions. The tree lies in a window of
    slots that begins with node 0, whose slot is its position too.

    Attributes:
      starts: `[B]` int32, the slot of the first of the T nodes, as for `Nodes`.
      origins: `[B]` int32, slot and position of node 0.
      depths: `[B, T]` int32, how many tokens each node is accepted after node 0.
      lines: `[B, T, D + 1]` int32, by depth: the places in the window of a node's ancestors, then
        its own, then anything.
      span: P, an upper bound of the positions.
    """

    starts: jax.Array
    origins: jax.Array
    depths: jax.Array
    lines: jax.Array
    span: int = flax.struct.field(pytree_node=False)

    @property
    def positions(self) -> jax.Array:
        """`[B, T]`, as for `Nodes`."""
        return self.origins[:, None] + self.depths

    @property
    def paths(self) -> jax.Array:
        """`[B, T, P]`, as for `Nodes`."""
        here = jnp.arange(self.span, dtype=jnp.int32)
        after = here - self.origins[:, None]
        deepest = self.lines.shape[2] - 1
        depth = jnp.broadcast_to(
            jnp.clip(after, 0, deepest)[:, None], (*self.depths.shape, self.span)
        )
        inside = self.origins[:, None, None] + jnp.take_along_axis(self.lines, depth, axis=2)
        return jnp.where((after >= 0)[:, None], inside, here)

    def distances(self, slots: int) -> jax.Array:
        """Does what `Nodes.distances` does, without an array over both positions and slots."""
        place = jnp.arange(slots, dtype=jnp.int32) - self.origins[:, None]
        ahead = self.depths[..., None] - jnp.arange(self.lines.shape[2], dtype=jnp.int32)
        here = self.lines[:, :, :, None] == place[:, None, None]
        inside = jnp.max(jnp.where(here & (ahead >= 0)[..., None], ahead[..., None], -1), axis=2)
        return jnp.where((place < 0)[:, None], self.depths[..., None] - place[:, None], inside)


AnyNodes = Nodes | WindowNodes
