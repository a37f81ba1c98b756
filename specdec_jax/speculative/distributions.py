"""Turns logits into the distribution that a row's next token is drawn from (by `randomness.py`)."""

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.speculative import processors
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.sampling import SamplingMode, SamplingRows


class Categorical(NamedTuple):
    """A distribution over the vocabulary at each position, stored as unnormalised logits.

    Probabilities are computed where they are needed (one token per position, one position of a
    row), so that no `[B, T, V]` array of them need be built.

    Attributes:
      logits: float32 after every adjustment; −inf where the probability is 0.
      log_normalizer: log Σ exp(logits).
    """

    logits: Float[Array, "*N V"]
    log_normalizer: Float[Array, "*N"]

    @classmethod
    def from_logits(cls, logits: Float[Array, "*N V"], native: bool = False) -> "Categorical":
        """Makes the distribution of these logits.

        With `native`, for float32 on one CPU, the package's own kernel adds up each row in one
        order, whereas XLA's order depends on how many rows there are.
        """
        if native:
            return cls(logits, sum(packed_weights.log_sum_exp(logits)))
        return cls(logits, jax.nn.logsumexp(logits, axis=-1))

    def log_prob(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N"]:
        """Returns the log-probability of one token per position."""
        logits = jnp.take_along_axis(self.logits, tokens[..., None], axis=-1)[..., 0]
        return logits - self.log_normalizer

    def prob(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N"]:
        """Returns the probability of one token per position."""
        return jnp.exp(self.log_prob(tokens))

    def probs(self) -> Float[Array, "*N V"]:
        """Returns all probabilities."""
        return jnp.exp(self.logits - self.log_normalizer[..., None])

    def entropy(self) -> Float[Array, "*N"]:
        """Returns the entropy −Σ p log p, in nats."""
        finite = jnp.where(self.logits > -jnp.inf, self.logits, 0)
        return self.log_normalizer - jnp.sum(self.probs() * finite, axis=-1)

    def row(self, position: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Returns each row's probabilities at `position`, of a distribution over `[B, T, V]`."""
        logits = jnp.take_along_axis(self.logits, position[:, None, None], axis=1)[:, 0]
        log_normalizer = jnp.take_along_axis(self.log_normalizer, position[:, None], axis=1)
        return jnp.exp(logits - log_normalizer)


def log_softmax(logits: Float[Array, "*N V"], native: bool) -> Float[Array, "*N V"]:
    """Returns the logarithms of all probabilities; `native` as for `Categorical.from_logits`."""
    if not native:
        return jax.nn.log_softmax(logits, axis=-1)
    greatest, log_sums = packed_weights.log_sum_exp(logits)
    return logits - greatest[..., None] - log_sums[..., None]


def log_prob_under(
    logits: Float[Array, "*N V"], native: bool
) -> Callable[[Int[Array, "*N"]], Float[Array, "*N"]]:
    """Returns the function that gives the log-probability of one token per position.

    `native` is as for `Categorical.from_logits`; the bits are then those of
    `Network.greedy_token_and_logprob`.
    """
    if not native:
        return Categorical.from_logits(logits).log_prob
    greatest, log_sums = packed_weights.log_sum_exp(logits)
    return lambda tokens: (
        jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - greatest - log_sums
    )


@flax.struct.dataclass
class PointMass:
    """The distribution of a drafter that does not sample: probability 1 at its token.

    Verifiers can use it as a `Categorical`.

    Attributes:
      tokens: the token with probability 1 at each position.
      vocab_size: V.
    """

    tokens: Int[Array, "B G"]
    vocab_size: int = flax.struct.field(pytree_node=False)

    def prob(self, tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
        """Returns the probability of one token per position."""
        return (tokens == self.tokens).astype(jnp.float32)

    def row(self, position: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Returns each row's probabilities at `position`."""
        token = jnp.take_along_axis(self.tokens, position[:, None], axis=1)
        return (jnp.arange(self.vocab_size) == token).astype(jnp.float32)

    def dist(self) -> Categorical:
        """Returns the same distribution as a `Categorical` over `[B, G, V]`."""
        one_hot = jnp.arange(self.vocab_size) == self.tokens[..., None]
        return Categorical(jnp.where(one_hot, 0.0, -jnp.inf), jnp.zeros(self.tokens.shape))


def process(
    logits: Float[Array, "B T V"], context: Context, rows: SamplingRows, mode: SamplingMode
) -> Float[Array, "B T V"]:
    """Applies the processors that are on; returns float32 logits, or `logits` itself if none is on.

    Where processors leave no id at all, the logits are returned without them.

    Args:
      logits: logits of the token after each prefix of `context`.
      context: the prefixes, which only some of the processors read.
      rows: the processors' traced parameters.
      mode: which processors are on.
    """
    if not mode.processes:
        return logits
    original = processed = logits.astype(np.promote_types(logits.dtype, np.float32))
    if mode.bias:
        processed = processed + rows.bias
    if mode.repetition:
        processed = processors.penalize_repetition(processed, context, rows.repetition_penalty)
    if mode.ngram:
        processed = processors.forbid_repeated_ngrams(processed, context, mode.ngram)
    if mode.sequences:
        processed = processors.forbid_sequences(processed, context, mode.sequences)
    if mode.processor is not None:
        processed = processors.apply_own(processed, context, mode.processor)
    if mode.min_length:
        processed = processors.forbid_early_end(processed, context, rows.min_new_tokens)
    if mode.forced:
        processed = processors.force(processed, context, rows.forced)
    # NaN must be noticed later, but a CPU's maximum may pass over it: so each number is compared,
    # and not the greatest, and one NaN stands for a whole position.
    if mode.processor is not None:
        unsound = jnp.any(jnp.isnan(processed), axis=-1, keepdims=True)
        processed = jnp.where(unsound, jnp.nan, processed)
    return jnp.where(jnp.all(processed == -jnp.inf, axis=-1, keepdims=True), original, processed)


def standardize(
    logits: Float[Array, "B T V"],
    context: Context,
    rows: SamplingRows,
    mode: SamplingMode,
    soften: bool = False,
) -> Categorical:
    """Returns the distribution that a row samples from, after processors, temperature and filters.

    The arguments are those of `process`; with `soften`, temperature 0 counts as 1.
    """
    logits = process(logits, context, rows, mode)
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    temperature = rows.temperature[:, None, None]
    # The maximum is subtracted before the division, which by a tiny temperature would overflow.
    divisor = jnp.where(temperature > 0, jnp.clip(temperature, *_DIVISORS), 1)
    greatest = jnp.max(logits, axis=-1, keepdims=True)
    adjusted = (logits - greatest) / divisor
    if mode.top_k:
        adjusted = _keep_top_k(adjusted, rows.top_k)
    if mode.top_p:
        adjusted = _keep_top_p(adjusted, rows.top_p)
    if mode.min_p:
        keep = adjusted >= jnp.log(rows.min_p)[:, None, None]  # the greatest is 0
        adjusted = jnp.where(keep, adjusted, -jnp.inf)
    if not soften:
        one_hot = jnp.arange(logits.shape[-1]) == argmax(logits)[..., None]
        one_hot = jnp.where(one_hot, 0.0, -jnp.inf)
        adjusted = jnp.where(temperature > 0, adjusted, one_hot)
    # What follows would draw the first id of a position that has lost its NaN.
    adjusted = jnp.where(jnp.isfinite(greatest), adjusted, jnp.nan)
    return Categorical.from_logits(adjusted, mode.native)


# XLA divides by multiplying with the reciprocal. Past these bounds that is 0 or infinite, which
# makes NaN of the logit −∞ or of the greatest, 0; distributions differ by it only if logits do by
# 1e30, or by less than 1e-36.
_DIVISORS = 2.0**-125, 2.0**125


def argmax(logits: Num[Array, "*N V"]) -> Int[Array, "*N"]:
    """Returns the first index of the maximum over the last axis; −1 where all logits are NaN.

    Where some are NaN it is −1 or the index of another's maximum. The two passes here are together
    some six times as fast as `jnp.argmax`.
    """
    size = logits.shape[-1]
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    first = jnp.min(jnp.where(logits == best, index, size), axis=-1)
    return jnp.where(first < size, first, -1)


_FEW = 64


def _keep_top_k(logits: Float[Array, "B T V"], top_k: Int[Array, " B"]) -> Float[Array, "B T V"]:
    """Sets logits below the k-th largest of each position to −inf; k = 0 keeps all."""
    few = min(_FEW, logits.shape[-1])

    def by_selection(logits: jax.Array):
        largest = jax.lax.top_k(logits, few)[0]
        threshold = jnp.take_along_axis(largest, jnp.maximum(top_k - 1, 0)[:, None, None], axis=-1)
        threshold = jnp.where(top_k[:, None, None] > 0, threshold, -jnp.inf)
        return jnp.where(logits >= threshold, logits, -jnp.inf)

    def by_bisection(logits: jax.Array):
        k = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None, None]
        ordered = _ordered_bits(logits)
        threshold = _largest_threshold(
            lambda t: jnp.sum(ordered >= t, axis=-1, keepdims=True) >= k, ordered
        )
        return jnp.where(ordered >= threshold, logits, -jnp.inf)

    def by_either(logits: jax.Array):
        return jax.lax.cond(jnp.all(top_k <= few), by_selection, by_bisection, logits)

    # On a CPU the selection of a few logits takes a third of bisection's time; the TPU's compiler
    # turns it into a whole sort. k is traced, so which of the two it allows is known only at run
    # time.
    return jax.lax.platform_dependent(logits, cpu=by_either, default=by_bisection)


def _keep_top_p(logits: Float[Array, "B T V"], top_p: Float[Array, " B"]) -> Float[Array, "B T V"]:
    """Sets logits to −inf but for the fewest most probable ids whose mass reaches `top_p`."""
    probs = jax.nn.softmax(logits, axis=-1)
    ordered = _ordered_bits(logits)

    def mass(t: jax.Array):
        return jnp.sum(jnp.where(ordered >= t, probs, 0), axis=-1, keepdims=True)

    # Rounding may leave the whole mass below p = 1; then everything is kept.
    threshold = _largest_threshold(lambda t: mass(t) >= top_p[:, None, None], ordered)
    keep = (ordered >= threshold) | (top_p[:, None, None] >= 1)
    return jnp.where(keep, logits, -jnp.inf)


def _ordered_bits(x: Float[Array, "*N"]) -> Int[Array, "*N"]:
    """Returns signed integers that are ordered as the floats `x` are."""
    integer = jnp.int32 if x.dtype == jnp.float32 else jnp.int64
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, jnp.iinfo(integer).min - bits, bits)


def _largest_threshold(
    enough: Callable[[jax.Array], jax.Array], ordered: Int[Array, "*N V"]
) -> Int[Array, "*N 1"]:
    """Returns the largest integer t for which `enough(t)` holds, found by bisection.

    A sort of the vocabulary would take milliseconds on a CPU, and more than any other operation of
    the loop on a TPU.

    Args:
      enough: a function that is True up to some t and False above it.
      ordered: the integers between whose least and greatest t is looked for.
    """
    low = jnp.min(ordered, axis=-1, keepdims=True)
    high = jnp.max(ordered, axis=-1, keepdims=True)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        good = enough(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    return jax.lax.fori_loop(0, 8 * ordered.dtype.itemsize, halve, (low, high))[0]
