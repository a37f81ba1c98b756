"""Positions and slots of tokens that are nodes of a tree, not the next tokens of a sequence.

`Nodes` are those of any tree, `WindowNodes` those of one that continues a single sequence. All
nodes of a tree share one row of the key/value cache. A node is written to a slot of its own, which
does not give its position; that is given separately, and so are the slots of its ancestors.
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
      positions: `[B, T]` int32, the position of each node in its sequence, from 0; in plain XLA
        `[1, T]` where all trees are alike, and `paths` too.
      paths: `[B, T, P]` int32, by position: the slots of a node's ancestors, then its own slot,
        then anything.
    """

    starts: jax.Array
    positions: jax.Array
    paths: jax.Array

    def distances(self, slots: int) -> jax.Array:
        """Returns `[B, T, S]` int32: how many positions each slot's token lies before each node.

        The distance is in positions: 0 for the node itself, −1 where a token is not an ancestor.
        """

        def measure(positions: jax.Array, paths: jax.Array) -> jax.Array:
            ahead = positions[..., None] - jnp.arange(paths.shape[2], dtype=jnp.int32)
            here = paths[..., None] == jnp.arange(slots, dtype=jnp.int32)
            return jnp.max(jnp.where(here & (ahead >= 0)[..., None], ahead[..., None], -1), axis=2)

        def measure_eights(positions: jax.Array, paths: jax.Array) -> jax.Array:
            # A TPU takes seven times as long for 28 nodes as for 32.
            nodes = positions.shape[1]
            widths = (0, 0), (0, -nodes % 8 if nodes > 8 else 0), (0, 0)
            positions, paths = jnp.pad(positions, widths[:2]), jnp.pad(paths, widths)
            return measure(positions, paths)[:, :nodes]

        given = self.positions, self.paths
        return jax.lax.platform_dependent(*given, cpu=measure, default=measure_eights)


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
      depths: `[B, T]` int32, how many tokens each node lies after node 0.
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
        depth = jnp.clip(after, 0, self.lines.shape[2] - 1)
        depth = jnp.broadcast_to(depth[:, None], (*self.depths.shape, self.span))
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
