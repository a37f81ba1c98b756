"""Where the tokens of a call lie that are nodes of a tree instead of one row's next tokens: `Nodes`.

A tree's nodes share one row of the key/value cache. A node is written to a slot of its own, which says nothing about its
place in the sequence: that is given beside it, and so is the path that leads to it, slot by slot. Branches never see each
other, and a sequence whose tokens lie scattered over the cache costs no more than one whose tokens lie side by side.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Nodes:
    """T nodes of each of B trees.

    Attributes:
      starts: `[B]` int32, the slot of the first node; node t is written to slot `starts[b] + t`.
      positions: `[B, T]` int32, the place of each node in its sequence, from 0.
      paths: `[B, T, P]` int32, the slots of the node's ancestors in the order of their positions, its own slot at
        its own position; what follows does not matter.
    """

    starts: jax.Array
    positions: jax.Array
    paths: jax.Array

    def distances(self, slots: int) -> jax.Array:
        """Returns `[B, T, S]` int32: how many positions before a node the token in each of S = `slots` slots stands;
        −1 where that token is none of its ancestors."""
        ahead = self.positions[..., None] - jnp.arange(self.paths.shape[2], dtype=jnp.int32)
        here = self.paths[..., None] == jnp.arange(slots, dtype=jnp.int32)
        return jnp.max(jnp.where(here & (ahead >= 0)[..., None], ahead[..., None], -1), axis=2)


def node_paths(paths: jax.Array, positions: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes the slot of each node to its path.

    Args:
      paths: `[B, T, P]` int32, those of the nodes' parents.
      positions: `[B, T]`, of the nodes.
      slots: `[B, T]`, of the nodes.
    """
    own = jnp.arange(paths.shape[-1], dtype=jnp.int32) == positions[..., None]
    return jnp.where(own, slots[..., None], paths)
