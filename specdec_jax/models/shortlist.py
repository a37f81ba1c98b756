"""A part of the vocabulary that a network has a head for (FR-Spec, Zhao et al. 2025, arXiv 2502.14856)."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import sampling

_MULTIPLE = 64  # what the length of a list is rounded up to


@flax.struct.dataclass
class Shortlist:
    """Ids, and where each id of the vocabulary stands among them.

    Attributes:
      ids: `[F]` int32, ascending; at the end copies of the last, so that lists of about the same length share a program.
      places: `[V]` int32 place in `ids`, F for ids that are not there.
    """

    ids: jax.Array
    places: jax.Array

    @classmethod
    def of(cls, ids: np.ndarray, vocab_size: int) -> "Shortlist":
        """For ascending `ids`, none of them twice."""
        filled = np.pad(ids, (0, -len(ids) % _MULTIPLE), mode="edge")
        places = np.full(vocab_size, len(filled))
        places[ids] = np.arange(len(ids))
        return cls(jax.device_put(filled.astype(np.int32)), jax.device_put(places.astype(np.int32)))

    def argmax(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        """Returns the id below `vocab_size` of the greatest of `logits [..., F]`, −1 where one is not a number.

        Nothing as wide as the vocabulary is made.
        """
        if vocab_size < len(self.places):
            logits = jnp.where(self.ids < vocab_size, logits, -jnp.inf)
        place = sampling.argmax(logits)
        return jnp.where(place < 0, -1, self.ids[place])

    def widen(self, logits: jax.Array) -> jax.Array:
        """Logits `[..., V]` of `logits [..., F]`: −inf, probability 0, for ids that are not on the list."""
        return jnp.take(logits, self.places, axis=-1, mode="fill", fill_value=-jnp.inf)
