"""`Nodes`: positions and slots of the tokens of a call that are nodes of a tree, not the next
tokens of a sequence.

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
        ahead = self.positions[..., None] - jnp.arange(self.paths.shape[2], dtype=jnp.int32)
        here = self.paths[..., None] == jnp.arange(slots, dtype=jnp.int32)
        return jnp.max(jnp.where(here & (ahead >= 0)[..., None], ahead[..., None], -1), axis=2)


def node_paths(paths: jax.Array, positions: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the paths of nodes, made from the paths of their parents.

    Args:
      paths: `[B, T, P]` int32, the parents' paths.
      positions: `[B, T]`, the nodes' positions.
      slots: `[B, T]`, the nodes' slots.
    """
    own = jnp.arange(paths.shape[-1], dtype=jnp.int32) == positions[..., None]
    return jnp.where(own, slots[..., None], paths)
