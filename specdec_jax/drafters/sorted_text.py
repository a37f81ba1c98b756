"""Sorts a text by what stands before each place, and finds the places after an equal ending.

It is a suffix array of the text read backwards, of which only `DEPTH` ids are compared. The places
after which the text goes on as it does after the ending of another are then neighbours, and a few
gathers find them, however long the text is.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

DEPTH = 16  # ids before a place that are compared
_FAN = 16  # parts into which a step of the search divides what is left


@flax.struct.dataclass
class SortedText:
    """Sequences of ids, one after the other, and their places in the order of what precedes them.

    Attributes:
      ids: `[H]`, each id plus 1, as any type of integers; 0 after each sequence and past the last.
      order: `[H]` int32 or fewer, the places of ids, sorted by the `DEPTH` ids before each, the
        last of them first; anything past `size`.
      size: how many places count, a scalar.
    """

    ids: jax.Array
    order: jax.Array
    size: jax.Array

    @classmethod
    def make(cls, ids: np.ndarray, order: np.ndarray, capacity: int = 1) -> "SortedText":
        """Returns them as arrays of at least `capacity` ids, of which all before are known."""
        padded = np.zeros((2, max(capacity, len(ids))), np.int32)
        padded[0, : len(ids)], padded[1, : len(order)] = ids, order
        return cls(jnp.array(padded[0]), jnp.array(padded[1]), jnp.int32(len(order)))


class Places(NamedTuple):
    """C places for each of N endings.

    Attributes:
      places: `[N, C]`, places of a text.
      match: `[N, C]`, how many ids before a place are those of the ending, in a row.
      equal: `[N, C]`, how many of the `DEPTH` ids before a place are those of the ending. Both are
        0 where there are fewer than C places.
    """

    places: Int[Array, "N C"]
    match: Int[Array, "N C"]
    equal: Int[Array, "N C"]


def sort_places(ids: np.ndarray) -> np.ndarray:
    """Returns the places of a text that hold an id, sorted as `SortedText.order` is."""
    # Ranks by the last id before a place, then by the last 2, 4 …: an ending of twice the length is
    # the one before this place and the one before an earlier place.
    rank, length = np.zeros(len(ids), np.int64), 1
    rank[1:] = ids[:-1]
    while length < DEPTH:
        earlier = np.zeros_like(rank)
        earlier[length:] = rank[:-length]
        keys = rank * (rank.max(initial=0) + 1) + earlier
        rank, length = np.unique(keys, return_inverse=True)[1], 2 * length
    places = np.argsort(rank, kind="stable")
    return places[ids[places] != 0].astype(np.int32)


def find_places(text: SortedText, endings: Int[Array, "N D"], count: int) -> Places:
    """Returns up to `count` places before which most of the last ids of each ending stand.

    They are those after the longest equal ending, evenly chosen where there are more.

    Args:
      endings: the last `DEPTH` ids of texts, each plus 1, the last first; 0 where there are fewer.
    """
    length = jnp.sum(jnp.cumprod(endings > 0, axis=1), axis=1)
    at = _count_smaller(text, endings, jnp.full_like(length, DEPTH), jnp.zeros_like(length, bool))
    # In sorted order the best matches are next to where the ending itself would be.
    beside = jnp.stack([at - 1, at], axis=1)
    there = (beside >= 0) & (beside < text.size)
    match, _ = _compare(text, text.order[jnp.clip(beside, 0, len(text.order) - 1)], endings)
    match = jnp.minimum(jnp.max(jnp.where(there, match, 0), axis=1), length)
    both = jnp.concatenate([endings, endings])
    bounds = jnp.repeat(jnp.array([False, True]), len(endings))
    first, last = jnp.split(_count_smaller(text, both, jnp.tile(match, 2), bounds), 2)
    stride = jnp.maximum((last - first) // count, 1)
    index = first[:, None] + stride[:, None] * jnp.arange(count)
    found = (index < last[:, None]) & (match > 0)[:, None]
    places = text.order[jnp.minimum(index, len(text.order) - 1)].astype(jnp.int32)
    in_a_row, equal = _compare(text, places, endings)
    return Places(places, jnp.where(found, in_a_row, 0), jnp.where(found, equal, 0))


def read_ids(text: SortedText, places: Int[Array, "..."]) -> Int[Array, "..."]:
    """Returns the ids plus 1 at places, 0 at those outside of the text."""
    inside = (places >= 0) & (places < len(text.ids))
    ids = text.ids[jnp.clip(places, 0, len(text.ids) - 1)].astype(jnp.int32)
    return jnp.where(inside, ids, 0)


def _read_endings(text: SortedText, places: Int[Array, "N C"]) -> Int[Array, "N C D"]:
    """Returns the `DEPTH` ids before each place, plus 1, the last first."""
    return read_ids(text, places[..., None] - jnp.arange(1, DEPTH + 1))


def _compare(
    text: SortedText, places: Int[Array, "N C"], endings: Int[Array, "N D"]
) -> tuple[Int[Array, "N C"], Int[Array, "N C"]]:
    """Returns how many ids before places are those of the endings: in a row, and at all."""
    same = (_read_endings(text, places) == endings[:, None]) & (endings[:, None] > 0)
    in_a_row = jnp.min(jnp.where(same, DEPTH, jnp.arange(DEPTH)), axis=2)
    return in_a_row, jnp.sum(same, axis=2, dtype=in_a_row.dtype)


def _count_smaller(
    text: SortedText,
    endings: Int[Array, "N D"],
    depth: Int[Array, " N"],
    or_equal: Bool[Array, " N"],
) -> Int[Array, " N"]:
    """Returns how many sorted places come before each ending, of which `depth` ids count.

    With `or_equal` those after an equal ending are counted too.
    """
    steps = 1
    while _FAN**steps <= len(text.order):
        steps += 1

    def narrow(step: jax.Array, low: jax.Array) -> jax.Array:
        """Narrows the number down: from `low` on, to fewer and fewer more."""
        # With many places the first ones tried lie past the greatest int32.
        ahead = jnp.array(reaches, jnp.uint32)[step] * jnp.arange(1, _FAN, dtype=jnp.uint32)
        tried = low[:, None].astype(jnp.uint32) + ahead
        tried = jnp.minimum(tried, len(text.order) + 1).astype(jnp.int32)
        places = text.order[jnp.minimum(tried, len(text.order)) - 1].astype(jnp.int32)
        here, wanted = _read_endings(text, places), endings[:, None]
        differs = (here != wanted) & (jnp.arange(DEPTH) < depth[:, None, None])
        first = jnp.min(jnp.where(differs, jnp.arange(DEPTH), DEPTH), axis=2)
        less = jnp.any((jnp.arange(DEPTH) == first[..., None]) & (here < wanted), axis=2)
        equal = first == DEPTH
        before = (less | (equal & or_equal[:, None])) & (tried <= text.size)
        return low + jnp.array(reaches)[step] * jnp.sum(before, axis=1, dtype=low.dtype)

    reaches = [_FAN ** (steps - 1 - step) for step in range(steps)]
    return jax.lax.fori_loop(0, steps, narrow, jnp.zeros_like(depth))
