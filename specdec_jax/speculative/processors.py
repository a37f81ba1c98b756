"""Processors: functions of a row's prefix that change logits before temperature and filters.

The logits of both models pass through the same processors. Nothing is remembered from step to step:
every position is computed from its own prefix, so that a rejected token leaves no trace in what is
penalised (PITFALLS row 22).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# (prefix tokens, 0 at and past the length; lengths; logits) -> logits
Processor = Callable[
    [Int[Array, "N S"], Int[Array, " N"], Float[Array, "N V"]], Float[Array, "N V"]
]


class Context(NamedTuple):
    """The prefixes that T positions of logits follow.

    The prefix of position t is the first `lengths[b] + t` tokens.

    Attributes:
      tokens: start token and decoder prefix, or prompt; then committed and drafted tokens.
      lengths: number of tokens before the first of the T positions.
      starts: number of tokens that are not new: start token and decoder prefix, or prompt.
      eos_ids: EOS ids, padded with −1.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    starts: Int[Array, " B"]
    eos_ids: Int[Array, "B E"]

    def prefix_lengths(self, positions: int) -> Int[Array, "B {positions}"]:
        """Returns the prefix lengths of T = `positions` positions."""
        return self.lengths[:, None] + jnp.arange(positions)


def penalize_repetition(
    logits: Float[Array, "B T V"], context: Context, penalty: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """Divides positive and multiplies negative logits of ids in the prefix by `penalty`.

    This is the penalty of CTRL (arXiv 1909.05858, section 4.1). As in Hugging Face transformers,
    the prefix includes the start token, or the prompt. A penalty of 1 changes nothing.
    """
    valid = _find_valid(context, logits.shape[1])
    ids = jnp.broadcast_to(context.tokens[:, None], valid.shape)
    seen = jnp.take_along_axis(logits, ids, axis=-1)
    penalty, largest = penalty[:, None, None], jnp.finfo(logits.dtype).max
    penalized = jnp.clip(jnp.where(seen > 0, seen / penalty, seen * penalty), -largest, largest)
    return _put(logits, ids, valid, jnp.where(seen > -jnp.inf, penalized, seen))


def forbid_repeated_ngrams(
    logits: Float[Array, "B T V"], context: Context, size: int
) -> Float[Array, "B T V"]:
    """Sets the logits of ids that would repeat an n-gram of the prefix to −inf.

    Args:
      size: n; the start token belongs to the prefix.
    """
    tokens, lengths = context.tokens, context.prefix_lengths(logits.shape[1])
    windows = tokens.shape[1] - size + 1
    if windows <= 0:
        return logits
    same = jnp.arange(windows) + size - 1 < lengths[..., None]  # the n-gram lies inside the prefix
    for offset in range(size - 1):
        latest = jnp.take_along_axis(tokens, jnp.maximum(lengths - size + 1 + offset, 0), axis=1)
        same &= tokens[:, None, offset : offset + windows] == latest[..., None]
    completing = jnp.broadcast_to(tokens[:, None, size - 1 :], same.shape)
    return _put(logits, completing, same, -jnp.inf)


def forbid_sequences(
    logits: Float[Array, "B T V"], context: Context, sequences: tuple[tuple[int, ...], ...]
) -> Float[Array, "B T V"]:
    """Sets the logits of ids that would complete one of `sequences` to −inf.

    The start token, or the prompt, belongs to the prefix.
    """
    lengths = context.prefix_lengths(logits.shape[1])
    for size in sorted({len(sequence) for sequence in sequences}):
        group = np.array([sequence for sequence in sequences if len(sequence) == size], np.int32)
        there = jnp.broadcast_to(lengths[..., None] >= size - 1, (*lengths.shape, len(group)))
        for offset in range(size - 1):
            places = jnp.maximum(lengths - size + 1 + offset, 0)
            latest = jnp.take_along_axis(context.tokens, places, axis=1)
            there &= latest[..., None] == group[:, offset]
        logits = _put(logits, jnp.broadcast_to(group[:, -1], there.shape), there, -jnp.inf)
    return logits


def forbid_early_end(
    logits: Float[Array, "B T V"], context: Context, min_new_tokens: Int[Array, " B"]
) -> Float[Array, "B T V"]:
    """Sets the logits of the EOS ids to −inf until a row has `min_new_tokens` new tokens."""
    ids = jnp.arange(logits.shape[-1])
    is_eos = jnp.any(ids == context.eos_ids[:, :, None], axis=1)
    early = _count_new_tokens(context, logits.shape[1]) < min_new_tokens[:, None]
    return jnp.where(early[..., None] & is_eos[:, None], -jnp.inf, logits)


def force(
    logits: Float[Array, "B T V"], context: Context, forced: Int[Array, "B F"]
) -> Float[Array, "B T V"]:
    """Leaves only the id `forced[b, i]` for a row's i-th new token, from 0; −1 forces nothing."""
    new, places = _count_new_tokens(context, logits.shape[1]), forced.shape[1]
    chosen = jnp.take_along_axis(forced, jnp.minimum(new, places - 1), axis=1)
    ids = jnp.where(new < places, chosen, -1)[..., None]
    only = jnp.where(jnp.arange(logits.shape[-1]) == ids, 0.0, -jnp.inf)
    return jnp.where(ids >= 0, only, logits)


def apply_own(
    logits: Float[Array, "B T V"], context: Context, processor: Processor
) -> Float[Array, "B T V"]:
    """Applies a user's function, which gets every prefix with zeros after it.

    The function may return +inf for ids: then only these may be chosen, all with the same
    probability.

    Raises:
      ValueError: the function returns something else than logits of this shape.
    """
    batch, positions, vocab = logits.shape
    prefixes = jnp.where(_find_valid(context, positions), context.tokens[:, None], 0)
    lengths = context.prefix_lengths(positions)
    flat = logits.reshape(-1, vocab)
    rows = processor(prefixes.reshape(batch * positions, -1), lengths.reshape(-1), flat)
    if not isinstance(rows, jax.Array | np.ndarray) or not jnp.issubdtype(rows.dtype, np.floating):
        got = getattr(rows, "dtype", type(rows).__name__)
        expected = "logits, an array of floats"
        raise ValueError(f"processor: got {got} from the function, expected {expected}")
    if rows.shape != flat.shape:
        raise ValueError(f"processor: got logits of shape {rows.shape}, expected {flat.shape}")
    # NaN must stay, to be noticed.
    chosen = (rows == jnp.inf) & ~jnp.any(jnp.isnan(rows), axis=-1, keepdims=True)
    only = jnp.where(chosen, 0.0, -jnp.inf)
    rows = jnp.where(jnp.any(chosen, axis=-1, keepdims=True), only, rows)
    return rows.astype(logits.dtype).reshape(logits.shape)


def _count_new_tokens(context: Context, positions: int) -> Int[Array, "B {positions}"]:
    """Returns how many new tokens each prefix holds."""
    return context.prefix_lengths(positions) - context.starts[:, None]


def _find_valid(context: Context, positions: int) -> Bool[Array, "B {positions} S"]:
    """Returns which slots belong to the prefix of each position."""
    return jnp.arange(context.tokens.shape[1]) < context.prefix_lengths(positions)[..., None]


def _put(
    logits: Float[Array, "B T V"],
    ids: Int[Array, "B T N"],
    where: Bool[Array, "B T N"],
    values: Float[Array, "B T N"] | float,
) -> Float[Array, "B T V"]:
    """Returns `logits` with `values` at `ids` where `where`; equal ids have equal values."""
    row, position = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[:, None]
    ids = jnp.where(where, ids, logits.shape[-1])
    return logits.at[row, position, ids].set(values, mode="drop")
