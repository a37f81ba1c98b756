"""Sampling laws: which distribution a row's next token is drawn from (`draws.py` draws from it).

Every way of sampling is "draw from an adjusted distribution" (Leviathan et al. 2023, section 2.2). First come the
processors, pure functions of the prefix (`processors.py`); then, in T5X's order, temperature, top-k and top-p, then
min-p; all in float32 and for both models alike.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import processors
from specdec_jax.processors import Context, Processor


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How to choose tokens. Fields marked * are one value, or one per input; the others hold for the batch.

    The processors apply to argmax too, in this order: bias, forbidden tokens and vocabulary mask; repetition penalty;
    n-grams; the own processor; minimum length; forced tokens. Where they leave no id at all they are not applied.

    Attributes:
      temperature: * 0 is argmax; otherwise logits are divided by it.
      top_k: * keep the k most probable ids (and those tied with the k-th); 0 keeps all.
      top_p: * keep the fewest most probable ids whose mass reaches p, after top-k (and those tied with the last); 1 keeps
        all.
      min_p: * keep the ids with at least this share of the greatest probability, after top-p; 0 keeps all.
      repetition_penalty: * divides the positive and multiplies the negative logits of ids in the prefix; 1 is none.
      no_repeat_ngram: forbid ids that would repeat an n-gram of this size in the decoder's tokens; 0 is none.
      min_new_tokens: * new tokens before the first EOS.
      logit_bias: id -> number added to its logit.
      forbidden_tokens: ids that are never chosen.
      vocabulary_mask: `[V]` bool, True for ids that may be chosen; None allows all.
      forced_tokens: place among the new tokens, from 0 -> the id that must stand there.
      processor: a function of (prefix tokens `[N, S]`, 0 past the prefix; lengths `[N]`; logits `[N, V]`) that returns
        the logits to use, for grammars and the like; traced by JAX, so a new function compiles anew.

    Raises:
      ValueError: a field outside its range.
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0
    repetition_penalty: float | Sequence[float] = 1.0
    no_repeat_ngram: int = 0
    min_new_tokens: int | Sequence[int] = 0
    logit_bias: Mapping[int, float] | None = None
    forbidden_tokens: Sequence[int] = ()
    vocabulary_mask: Sequence[bool] | np.ndarray | None = None
    forced_tokens: Mapping[int, int] | None = None
    processor: Processor | None = None

    def __post_init__(self):
        largest = np.finfo(np.float32).max
        integer = lambda value: 0 <= value < 2**31 and value == int(value)
        ranges = {
            "temperature": (lambda value: 0 <= value <= largest, "a finite number of at least 0"),
            "top_k": (integer, "an integer of at least 0 (0: keep all)"),
            "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
            "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
            "repetition_penalty": (lambda value: 0 < value <= largest, "a finite number above 0 (1: none)"),
            "no_repeat_ngram": (integer, "an integer of at least 0 (0: none)"),
            "min_new_tokens": (integer, "an integer of at least 0"),
        }
        for name, (fits, expected) in ranges.items():
            for value in np.ravel(getattr(self, name)):
                if not _fits(fits, value):
                    raise ValueError(f"{name}: got {value}, expected {expected}")
        for token, bias in (self.logit_bias or {}).items():
            if not _fits(lambda value: -largest <= value <= largest, bias):
                raise ValueError(f"logit_bias: got {bias} for id {token}, expected a finite number")
        for place in self.forced_tokens or {}:
            if not isinstance(place, int | np.integer) or not 0 <= place < 2**20:
                raise ValueError(f"forced_tokens: got place {place}, expected an integer from 0 to {2**20 - 1}")
        if self.processor is not None and not callable(self.processor):
            raise ValueError(f"processor: got {self.processor!r}, expected a function")

    @functools.cached_property
    def mode(self) -> "SamplingMode":
        """Which adjustments are on: the static part."""
        return SamplingMode(
            greedy=bool(np.all(np.equal(self.temperature, 0))),
            top_k=bool(np.any(np.greater(self.top_k, 0))),
            top_p=bool(np.any(np.less(self.top_p, 1))),
            min_p=bool(np.any(np.greater(self.min_p, 0))),
            repetition=bool(np.any(np.not_equal(self.repetition_penalty, 1))),
            ngram=int(self.no_repeat_ngram),
            min_length=bool(np.any(np.greater(self.min_new_tokens, 0))),
            bias=bool(self.logit_bias or len(self.forbidden_tokens) or self.vocabulary_mask is not None),
            forced=bool(self.forced_tokens),
            processor=self.processor,
        )

    def rows(self, batch: int, vocab_size: int) -> "SamplingRows":
        """The traced part: one value per row `[batch]`, and tables over the vocabulary.

        Raises:
          ValueError: another number of values than rows, or ids outside the vocabulary.
        """
        values = {}
        for name, dtype in _PER_ROW.items():
            value = np.asarray(getattr(self, name), dtype)
            if value.ndim and value.shape != (batch,):
                raise ValueError(f"{name}: got {value.size} values, expected one or {batch} (one per input)")
            values[name] = np.broadcast_to(value, (batch,))
        mode = self.mode
        bias = self._bias(vocab_size) if mode.bias else None
        return SamplingRows(**values, bias=bias, forced=self._forced(vocab_size) if mode.forced else None)

    def _bias(self, vocab_size: int) -> np.ndarray:
        """`[V]` float32 to add: the biases, −inf at what is forbidden."""
        bias = np.zeros(vocab_size, np.float32)
        for token, value in (self.logit_bias or {}).items():
            bias[_checked("logit_bias", token, vocab_size)] = value
        for token in self.forbidden_tokens:
            bias[_checked("forbidden_tokens", token, vocab_size)] = -np.inf
        if self.vocabulary_mask is not None:
            mask = np.asarray(self.vocabulary_mask)
            if mask.shape != (vocab_size,) or mask.dtype != bool:
                raise ValueError(
                    f"vocabulary_mask: got shape {mask.shape} and type {mask.dtype}, expected ({vocab_size},) and bool"
                )
            bias[~mask] = -np.inf
        if np.all(np.isneginf(bias)):
            raise ValueError(f"got all {vocab_size} ids forbidden, expected at least one that is allowed")
        return bias

    def _forced(self, vocab_size: int) -> np.ndarray:
        """`[F]` int32, −1 where nothing is forced; a multiple of 8, so that another number rarely compiles anew."""
        places = self.forced_tokens or {}
        forced = np.full(-(-(max(places) + 1) // 8) * 8, -1, np.int32)
        for place, token in places.items():
            forced[place] = _checked("forced_tokens", token, vocab_size)
        return forced


_PER_ROW = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32,
    "repetition_penalty": np.float32, "min_new_tokens": np.int32,
}  # fmt: skip


def _fits(test, value) -> bool:
    try:
        return bool(test(value))
    except (TypeError, ValueError):  # no number at all
        return False


def _checked(name: str, token: int, vocab_size: int) -> int:
    if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
        raise ValueError(f"{name}: got id {token!r}, expected one from 0 to {vocab_size - 1}")
    return token


class SamplingMode(NamedTuple):
    """Static part of a `SamplingConfig`: what the compiled loop contains."""

    greedy: bool = True
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    repetition: bool = False
    ngram: int = 0
    min_length: bool = False
    bias: bool = False
    forced: bool = False
    processor: Processor | None = None

    @property
    def processes(self) -> bool:
        """Whether any processor is on."""
        return self.bias or self.reads_prefix or self.min_length or self.forced

    @property
    def reads_prefix(self) -> bool:
        """Whether a law depends on the tokens before it beyond what the model makes of them."""
        return self.repetition or self.ngram > 0 or self.processor is not None


@flax.struct.dataclass
class SamplingRows:
    """Traced part of a `SamplingConfig`.

    Attributes:
      temperature, top_p, min_p, repetition_penalty: `[B]` float32.
      top_k, min_new_tokens: `[B]` int32.
      bias: `[V]` float32, or None.
      forced: `[F]` int32, −1 where nothing is forced, or None.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    min_new_tokens: jax.Array
    bias: jax.Array | None = None
    forced: jax.Array | None = None


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

    def log_prob(self, tokens: jax.Array) -> jax.Array:
        """Log-probability `[...]` of one token per position."""
        return jnp.take_along_axis(self.logits, tokens[..., None], axis=-1)[..., 0] - self.log_normalizer

    def prob(self, tokens: jax.Array) -> jax.Array:
        """Probability `[...]` of one token per position."""
        return jnp.exp(self.log_prob(tokens))

    def probs(self) -> jax.Array:
        """All probabilities `[..., V]`."""
        return jnp.exp(self.logits - self.log_normalizer[..., None])

    def entropy(self) -> jax.Array:
        """−Σ p log p `[...]`, in nats."""
        finite = jnp.where(self.logits > -jnp.inf, self.logits, 0)
        return self.log_normalizer - jnp.sum(self.probs() * finite, axis=-1)

    def row(self, position: jax.Array) -> jax.Array:
        """Probabilities `[B, V]` at `position [B]` of a law over `[B, T, V]`."""
        logits = jnp.take_along_axis(self.logits, position[:, None, None], axis=1)[:, 0]
        log_normalizer = jnp.take_along_axis(self.log_normalizer, position[:, None], axis=1)
        return jnp.exp(logits - log_normalizer)


class PointMass(NamedTuple):
    """The law of a drafter that does not sample: probability 1 at its token; has what verifiers ask of a `Law`.

    Attributes:
      tokens: `[B, G]` int32.
      vocab_size: V.
    """

    tokens: jax.Array
    vocab_size: int

    def prob(self, tokens: jax.Array) -> jax.Array:
        """Probability `[B, G]` of one token per position."""
        return (tokens == self.tokens).astype(jnp.float32)

    def row(self, position: jax.Array) -> jax.Array:
        """Probabilities `[B, V]` at `position [B]`."""
        token = jnp.take_along_axis(self.tokens, position[:, None], axis=1)
        return (jnp.arange(self.vocab_size) == token).astype(jnp.float32)

    def law(self) -> Law:
        """The same as a `Law` over `[B, G, V]`."""
        one_hot = jnp.arange(self.vocab_size) == self.tokens[..., None]
        return Law(jnp.where(one_hot, 0.0, -jnp.inf), jnp.zeros(self.tokens.shape))


def process(logits: jax.Array, context: Context | None, rows: SamplingRows, mode: SamplingMode) -> jax.Array:
    """Logits `[B, T, V]` after the processors: float32 where one is on, else untouched.

    Args:
      logits: `[B, T, V]`, of the tokens after each prefix of `context`.
      context: the prefixes; needed by some of the processors only.
      rows: the traced parameters.
      mode: which processors are on.
    """
    if not mode.processes:
        return logits
    original = processed = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if mode.bias:
        processed = processed + rows.bias
    if mode.repetition:
        processed = processors.penalize_repetition(processed, context, rows.repetition_penalty)
    if mode.ngram:
        processed = processors.forbid_repeated_ngrams(processed, context, mode.ngram)
    if mode.processor is not None:
        processed = processors.apply_own(processed, context, mode.processor)
    if mode.min_length:
        processed = processors.forbid_early_end(processed, context, rows.min_new_tokens)
    if mode.forced:
        processed = processors.force(processed, context, rows.forced)
    # Not the other way round: NaN must pass, so that it is noticed.
    return jnp.where(jnp.max(processed, axis=-1, keepdims=True) == -jnp.inf, original, processed)


def standardize(
    logits: jax.Array, context: Context | None, rows: SamplingRows, mode: SamplingMode, soften: bool = False
) -> Law:
    """The law that a row samples from; args as for `process`. With `soften` temperature 0 counts as 1."""
    logits = process(logits, context, rows, mode)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    temperature = rows.temperature[:, None, None]
    # The maximum is taken out first: divided by a tiny temperature it would overflow.
    adjusted = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)
    if mode.top_k:
        adjusted = _keep_top_k(adjusted, rows.top_k)
    if mode.top_p:
        adjusted = _keep_top_p(adjusted, rows.top_p)
    if mode.min_p:
        adjusted = jnp.where(adjusted >= jnp.log(rows.min_p)[:, None, None], adjusted, -jnp.inf)  # the greatest is 0
    if soften:
        return Law.of(adjusted)
    one_hot = jnp.arange(logits.shape[-1]) == argmax(logits)[..., None]
    return Law.of(jnp.where(temperature > 0, adjusted, jnp.where(one_hot, 0.0, -jnp.inf)))


def argmax(logits: jax.Array) -> jax.Array:
    """Returns the first index of the maximum over the last axis, int32; −1 where a logit is not a number.

    Two passes are some six times faster than `jnp.argmax`.
    """
    size = logits.shape[-1]
    best = jnp.max(logits, axis=-1, keepdims=True)  # NaN if any logit is
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    first = jnp.min(jnp.where(logits == best, index, size), axis=-1)
    return jnp.where(first < size, first, -1)


_FEW = 64


def _keep_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """−inf below the k-th largest logit of each position; `top_k [B]`, 0 keeps all."""
    few = min(_FEW, logits.shape[-1])

    def by_selection(logits):
        largest = jax.lax.top_k(logits, few)[0]
        threshold = jnp.take_along_axis(largest, jnp.maximum(top_k - 1, 0)[:, None, None], axis=-1)
        return jnp.where(logits >= jnp.where(top_k[:, None, None] > 0, threshold, -jnp.inf), logits, -jnp.inf)

    def by_bisection(logits):
        k = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None, None]
        ordered = _ordered_bits(logits)
        threshold = _largest_threshold(lambda t: jnp.sum(ordered >= t, axis=-1, keepdims=True) >= k, ordered)
        return jnp.where(ordered >= threshold, logits, -jnp.inf)

    def by_either(logits):
        return jax.lax.cond(jnp.all(top_k <= few), by_selection, by_bisection, logits)

    # On a CPU selecting a few takes a third of bisection's time; a TPU's compiler makes a whole sort of it. k is traced.
    return jax.lax.platform_dependent(logits, cpu=by_either, default=by_bisection)


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
