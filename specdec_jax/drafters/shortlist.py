"""Cuts a drafter's head to a part of the vocabulary (FR-Spec, arXiv 2502.14856)."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import arguments
from specdec_jax.speculative import distributions

_MULTIPLE = 64  # the length of a shortlist is rounded up to a multiple of this


@flax.struct.dataclass
class Shortlist:
    """Ids, and the place of each id of the vocabulary among them.

    Attributes:
      ids: `[F]` int32, ascending, with copies of the last id at the end, so that lists of about the
        same length share a compiled program.
      places: `[V]` int32, the place of an id in `ids`, F for ids that are not there.
    """

    ids: jax.Array
    places: jax.Array

    @classmethod
    def select(cls, ids: np.ndarray, vocab_size: int) -> "Shortlist":
        """Returns the shortlist of ascending `ids`, none of them twice."""
        filled = np.pad(ids, (0, -len(ids) % _MULTIPLE), mode="edge")
        places = np.full(vocab_size, len(filled))
        places[ids] = np.arange(len(ids))
        return cls(jax.device_put(filled.astype(np.int32)), jax.device_put(places.astype(np.int32)))

    def argmax(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        """Returns the id below `vocab_size` of the greatest of `logits [..., F]`, −1 for NaN.

        Nothing as wide as the vocabulary is made.
        """
        if vocab_size < len(self.places):
            logits = jnp.where(self.ids < vocab_size, logits, -jnp.inf)
        place = distributions.argmax(logits)
        return jnp.where(place < 0, -1, self.ids[place])

    def widen(self, logits: jax.Array) -> jax.Array:
        """Returns `logits [..., F]` as `[..., V]`, −inf for ids that are not on the list."""
        return jnp.take(logits, self.places, axis=-1, mode="fill", fill_value=-jnp.inf)


def check_shortlist(shortlist: Any, vocab_size: int, eos_ids: Sequence[int]) -> np.ndarray:
    """Returns the ids `[F]` of a shortlist, ascending; raises ValueError for an unusable one."""
    if arguments.is_integer(shortlist):
        return shortlist_from_counts(-np.arange(vocab_size), int(shortlist), eos_ids)
    ids = arguments.as_array(shortlist)
    whole = np.issubdtype(ids.dtype, np.integer) and not arguments.has_bool(shortlist)
    if not whole or ids.ndim != 1 or not ids.size:
        got, expected = repr(shortlist), "a number of ids, or ids (at least one)"
    elif ids.min() < 0 or ids.max() >= vocab_size:
        got = f"id {ids[(ids < 0) | (ids >= vocab_size)][0]}"
        expected = f"ids of the drafter's model, 0 to {vocab_size - 1}"
    elif np.any(np.diff(ids) <= 0):
        wrong = int(np.argmax(np.diff(ids) <= 0))
        got, expected = f"id {ids[wrong + 1]} after {ids[wrong]}", "ascending ids, each once"
    elif missing := set(eos_ids) - set(ids.tolist()):
        got = f"ids without {min(missing)}, which ends a sequence"
        expected = "it among them"
    else:
        return ids
    raise ValueError(f"shortlist: got {got}, expected {expected}")


def shortlist_from_counts(counts: Any, size: int, eos_ids: Sequence[int] = ()) -> np.ndarray:
    """Returns the `size` most frequent ids, ascending; of equally frequent ones the smallest.

    Args:
      counts: `[V]`, how often each id occurs in outputs like those to come, e.g.
        `NGramDrafter.unigram` or `np.bincount(ids, minlength=V)`.
      size: F, from 1 to V, `eos_ids` included.
      eos_ids: ids that are taken whatever their counts.
    """
    counts = arguments.check_numbers("counts", counts, "one number for each id")
    if counts.ndim != 1 or not counts.size:
        expected = "one number for each id"
        raise ValueError(f"counts: got an array of shape {counts.shape}, expected {expected}")
    expected = f"ids from 0 to {len(counts) - 1}"
    eos_ids = arguments.check_list("eos_ids", eos_ids, expected)
    if not all(arguments.is_integer(token) and 0 <= token < len(counts) for token in eos_ids):
        raise ValueError(f"eos_ids: got {arguments.quote(eos_ids)}, expected {expected}")
    least = max(1, len(set(eos_ids)))
    if not arguments.is_integer(size) or not least <= size <= len(counts):
        expected = f"an integer from {least} to {len(counts)}"
        raise ValueError(f"shortlist: got a size of {size!r}, expected {expected}")
    first = np.isin(np.arange(len(counts)), list(eos_ids))
    # In floats: −n of an unsigned integer is a large number.
    return np.sort(np.lexsort((-counts.astype(np.float64), ~first))[:size])
