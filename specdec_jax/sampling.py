"""Sampling laws: which distribution a row's next token is drawn from, and how it is drawn.

Every way of sampling is "draw from an adjusted distribution" (Leviathan et al. 2023, section 2.2). The adjustments are
applied in T5X's order: temperature, then top-k, then top-p, all in float32 and to both models alike.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How to choose tokens. Each field is one value, or one per input.

    Attributes:
      temperature: 0 is argmax; otherwise logits are divided by it.
      top_k: keep the k most probable ids (and those tied with the k-th); 0 keeps all.
      top_p: keep the fewest most probable ids whose mass reaches p, after top-k (and those tied with the last); 1 keeps all.

    Raises:
      ValueError: temperature negative or not a number, top_k negative, top_p outside (0, 1].
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0

    def __post_init__(self):
        for value in np.ravel(self.temperature):
            if not 0 <= value <= np.finfo(np.float32).max:
                raise ValueError(f"temperature: got {value}, expected a finite number of at least 0")
        for value in np.ravel(self.top_k):
            if not (0 <= value < 2**31 and value == int(value)):
                raise ValueError(f"top_k: got {value}, expected an integer of at least 0 (0: keep all)")
        for value in np.ravel(self.top_p):
            if not 0 < value <= 1:
                raise ValueError(f"top_p: got {value}, expected a number in (0, 1]")

    @property
    def mode(self) -> "SamplingMode":
        """Which adjustments are on: the static part."""
        return SamplingMode(
            greedy=bool(np.all(np.equal(self.temperature, 0))),
            top_k=bool(np.any(np.greater(self.top_k, 0))),
            top_p=bool(np.any(np.less(self.top_p, 1))),
        )

    def rows(self, batch: int) -> "SamplingRows":
        """The traced part, one value per row `[batch]`."""
        values = {}
        for name, dtype in (("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32)):
            value = np.asarray(getattr(self, name), dtype)
            if value.ndim and value.shape != (batch,):
                raise ValueError(f"{name}: got {value.shape[0]} values, expected one or {batch} (one per input)")
            values[name] = np.broadcast_to(value, (batch,))
        return SamplingRows(**values)


class SamplingMode(NamedTuple):
    """Static part of a `SamplingConfig`: what the compiled loop contains."""

    greedy: bool = True
    top_k: bool = False
    top_p: bool = False


@flax.struct.dataclass
class SamplingRows:
    """Traced part of a `SamplingConfig`: temperature `[B]` float32, top_k `[B]` int32, top_p `[B]` float32."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


class Law(NamedTuple):
    """A distribution over the vocabulary at each position, not yet normalised.

    Probabilities are asked for where they are needed (a gathered token, the one row of a rejection), so that a whole
    `[B, T, V]` array of them is never built.

    Attributes:
      logits: `[..., V]` float32 after every adjustment; −inf where the probability is 0.
      log_normalizer: `[...]`, log Σ exp(logits).
    """

    logits: jax.Array
    log_normalizer: jax.Array

    @classmethod
    def of(cls, logits: jax.Array) -> "Law":
        return cls(logits, jax.nn.logsumexp(logits, axis=-1))

    def prob(self, tokens: jax.Array) -> jax.Array:
        """Probability `[...]` of one token per position."""
        return jnp.exp(jnp.take_along_axis(self.logits, tokens[..., None], axis=-1)[..., 0] - self.log_normalizer)

    def probs(self) -> jax.Array:
        """All probabilities `[..., V]`."""
        return jnp.exp(self.logits - self.log_normalizer[..., None])

    def row(self, position: jax.Array) -> jax.Array:
        """Probabilities `[B, V]` at `position [B]` of a law over `[B, T, V]`."""
        logits = jnp.take_along_axis(self.logits, position[:, None, None], axis=1)[:, 0]
        log_normalizer = jnp.take_along_axis(self.log_normalizer, position[:, None], axis=1)
        return jnp.exp(logits - log_normalizer)


def standardize(logits: jax.Array, rows: SamplingRows, mode: SamplingMode) -> Law:
    """The law that a row samples from.

    Args:
      logits: `[B, T, V]`.
      rows: the rows' temperature, top_k and top_p.
      mode: which of them are on.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    temperature = rows.temperature[:, None, None]
    # The maximum is taken out first: divided by a tiny temperature it would overflow.
    adjusted = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)
    if mode.top_k:
        adjusted = _keep_top_k(adjusted, rows.top_k)
    if mode.top_p:
        adjusted = _keep_top_p(adjusted, rows.top_p)
    one_hot = jnp.arange(logits.shape[-1]) == argmax(logits)[..., None]
    return Law.of(jnp.where(temperature > 0, adjusted, jnp.where(one_hot, 0.0, -jnp.inf)))


def argmax(logits: jax.Array) -> jax.Array:
    """First index of the maximum over the last axis, int32; two passes are some six times faster than `jnp.argmax`."""
    size = logits.shape[-1]
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.minimum(jnp.min(jnp.where(logits == best, index, size), axis=-1), size - 1)


def _keep_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """−inf below the k-th largest logit of each position; `top_k [B]`, 0 keeps all."""
    k = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None, None]
    ordered = _ordered_bits(logits)
    threshold = _largest_threshold(lambda t: jnp.sum(ordered >= t, axis=-1, keepdims=True) >= k, ordered)
    return jnp.where(ordered >= threshold, logits, -jnp.inf)


def _keep_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """−inf outside the nucleus: the fewest most probable ids whose mass reaches `top_p [B]`."""
    probs = jax.nn.softmax(logits, axis=-1)
    ordered = _ordered_bits(logits)
    mass = lambda t: jnp.sum(jnp.where(ordered >= t, probs, 0), axis=-1, keepdims=True)
    # Rounding may leave the whole mass below p = 1; then everything is kept.
    threshold = _largest_threshold(lambda t: mass(t) >= top_p[:, None, None], ordered)
    keep = (ordered >= threshold) | (top_p[:, None, None] >= 1)
    return jnp.where(keep, logits, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Signed integers in the same order as the floats `x`."""
    integer = jnp.int32 if x.dtype == jnp.float32 else jnp.int64
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, jnp.iinfo(integer).min - bits, bits)


def _largest_threshold(enough, ordered: jax.Array) -> jax.Array:
    """The largest integer t for which `enough(t)` still holds (it holds for all smaller t); bisection, no sort.

    A sort of the vocabulary costs milliseconds on a CPU and is the dearest operation of the loop on a TPU.
    """
    low = jnp.min(ordered, axis=-1, keepdims=True)
    high = jnp.max(ordered, axis=-1, keepdims=True)

    def halve(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        good = enough(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    return jax.lax.fori_loop(0, 8 * ordered.dtype.itemsize, halve, (low, high))[0]


_BLOCK = 128


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws one id per row by inverting the distribution function.

    Args:
      weights: `[B, V]`, not negative, not necessarily normalised.
      uniform: `[B]` in [0, 1).

    Returns:
      `[B]` int32. An id of weight 0 is never drawn (unless all are 0).
    """
    batch, size = weights.shape
    blocks = -(-size // _BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - size))).reshape(batch, blocks, _BLOCK)
    # Two levels, so that only the sums of the blocks and one block are scanned.
    block, rest = _invert(jnp.sum(weights, axis=-1), uniform, None)
    inside, _ = _invert(jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0], None, rest)
    return jnp.minimum(block * _BLOCK + inside, size - 1)


def _invert(weights, uniform, goal):
    """First index of positive weight whose cumulative weight exceeds `goal` (default uniform · total), and the rest."""
    size, cumulative = weights.shape[-1], jnp.cumsum(weights, axis=-1)
    if goal is None:
        goal = uniform * cumulative[:, -1]
    # XLA sums long axes in pieces, so that rounding can make the sums rise, or fall, at an id of weight 0.
    ids, positive = jnp.arange(size, dtype=jnp.int32), weights > 0
    index = jnp.min(jnp.where(positive & (cumulative > goal[:, None]), ids, size), axis=-1)
    # Rounding may put the goal at or past the end, or leave a remainder that no longer lies inside its block.
    index = jnp.minimum(index, jnp.max(jnp.where(positive, ids, 0), axis=-1))
    before = jnp.where(index > 0, jnp.take_along_axis(cumulative, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0], 0)
    return index, jnp.maximum(goal - before, 0)


# Tags that keep the uses of one row's randomness apart (ALGORITHMS: never shared between uses).
DRAFT, ACCEPT, RESIDUAL, BONUS = range(4)


def uniforms(keys: jax.Array, lengths: jax.Array, offsets: jax.Array, tag: int) -> jax.Array:
    """Uniforms in [0, 1), `[B, N]`, float32.

    Each is a function of the request's key, the row's committed length at the start of the iteration, the offset in
    the draft and the use; never of the row's place in the batch.

    Args:
      keys: `[B]` typed keys, one per request.
      lengths: `[B]` committed lengths at the start of the iteration.
      offsets: `[B, N]` int32 offsets in the draft.
      tag: one of DRAFT, ACCEPT, RESIDUAL, BONUS.
    """

    def one(key, offset):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, offset), tag))

    folded = jax.vmap(jax.random.fold_in)(keys, lengths)
    return jax.vmap(jax.vmap(one, (None, 0)))(folded, offsets)
