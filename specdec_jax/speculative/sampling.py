"""Settings of sampling as a user gives them, and their static and traced parts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from specdec_jax.models import arguments
from specdec_jax.speculative.processors import Processor


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The rule by which tokens are chosen.

    Fields marked * take one value, or one per input; the others one for all.

    The processors apply to argmax too, in this order: bias, forbidden tokens and vocabulary mask;
    repetition penalty; n-grams; forbidden sequences; `processor`; minimum length; forced tokens.
    Where they leave no id at all they are not applied.

    Attributes:
      temperature: * 0 is argmax; otherwise logits are divided by it.
      top_k: * keep the k most probable ids (and those tied with the k-th); 0 keeps all.
      top_p: * after top-k, keep the fewest most probable ids whose mass reaches p (and those tied
        with the last); 1 keeps all.
      min_p: * after top-p, keep the ids with at least this share of the greatest probability; 0
        keeps all.
      repetition_penalty: * divide the positive and multiply the negative logits of ids in the
        prefix by it; 1: none.
      no_repeat_ngram: forbid ids that would repeat an n-gram of this size in the decoder's tokens;
        0 forbids none.
      min_new_tokens: * least number of new tokens before an EOS.
      logit_bias: id -> number added to its logit.
      forbidden_tokens: ids that are never chosen.
      forbidden_sequences: sequences of ids, of which the last one is forbidden where the others are
        the last tokens of the prefix. Other sequences compile a new program.
      vocabulary_mask: `[V]` bool, True for ids that may be chosen; None allows all.
      forced_tokens: * place among the new tokens, from 0 -> the id that must stand there.
      processor: a function of (prefix tokens `[N, S]`, 0 past the prefix; lengths `[N]`; logits
        `[N, V]`) that returns the logits to use, for grammars and the like. JAX traces it, so a new
        function compiles a new program.

    Raises:
      ValueError: a field of another kind or outside its range.
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
    forced_tokens: Mapping[int, int] | Sequence[Mapping[int, int]] | None = None
    processor: Processor | None = None
    forbidden_sequences: Sequence[Sequence[int]] = ()

    def __post_init__(self):
        for name, (is_sound, expected) in _RANGES.items():
            whole = _PER_ROW[name] is np.int32
            values = arguments.check_numbers(name, getattr(self, name), expected, whole=whole)
            for value in values.ravel().tolist():
                if not is_sound(value):
                    raise ValueError(f"{name}: got {value}, expected {expected}")
        arguments.check_integer("no_repeat_ngram", self.no_repeat_ngram, 0, what=" (0: none)")
        if self.logit_bias is not None:
            arguments.check_kind("logit_bias", self.logit_bias, Mapping, "a dictionary, or None")
        for token, bias in (self.logit_bias or {}).items():
            if not arguments.is_number(bias) or not -_LARGEST <= bias <= _LARGEST:
                got = f"{arguments.quote(bias)} for id {token}"
                raise ValueError(f"logit_bias: got {got}, expected a finite number")
        object.__setattr__(self, "forced_tokens", _check_forced_tokens(self.forced_tokens))
        ids = arguments.check_list("forbidden_tokens", self.forbidden_tokens, "a list of ids")
        object.__setattr__(self, "forbidden_tokens", ids)
        name, expected = "forbidden_sequences", "a list of lists of ids"
        sequences = arguments.check_list(name, self.forbidden_sequences, expected)
        sequences = tuple(arguments.check_list(name, one, expected) for one in sequences)
        object.__setattr__(self, name, sequences)
        if not all(self.forbidden_sequences):
            raise ValueError("forbidden_sequences: got an empty sequence, expected ids in each")
        if self.processor is not None:
            arguments.check_function("processor", self.processor, "prefixes, lengths, logits")

    def list_forced_tokens(self) -> tuple[Mapping[int, int], ...]:
        """Returns the dictionaries of `forced_tokens`: one for all inputs, or one for each."""
        given = self.forced_tokens
        return given if isinstance(given, tuple) else (given or {},)

    @functools.cached_property
    def mode(self) -> "SamplingMode":
        """The static part: which processors and filters are on."""
        return SamplingMode(
            greedy=bool(np.all(np.equal(self.temperature, 0))),
            top_k=bool(np.any(np.greater(self.top_k, 0))),
            top_p=bool(np.any(np.less(self.top_p, 1))),
            min_p=bool(np.any(np.greater(self.min_p, 0))),
            repetition=bool(np.any(np.not_equal(self.repetition_penalty, 1))),
            ngram=int(self.no_repeat_ngram),
            min_length=bool(np.any(np.greater(self.min_new_tokens, 0))),
            bias=bool(self.logit_bias or self.forbidden_tokens or self.vocabulary_mask is not None),
            forced=any(self.list_forced_tokens()),
            processor=self.processor,
            sequences=tuple(tuple(map(int, sequence)) for sequence in self.forbidden_sequences),
        )

    def rows(self, batch: int, vocab_size: int) -> "SamplingRows":
        """Returns the traced part: one value per row `[batch]`, and tables over the vocabulary.

        Raises:
          ValueError: a field has neither one value nor `batch` values, or an id is outside the
          vocabulary.
        """
        values = {}
        for name, dtype in _PER_ROW.items():
            value = np.asarray(getattr(self, name), dtype)
            if value.ndim and value.shape != (batch,):
                expected = f"one or {batch} (one per input)"
                raise ValueError(f"{name}: got {value.size} values, expected {expected}")
            values[name] = np.full(batch, value)
        for token in (token for sequence in self.forbidden_sequences for token in sequence):
            _check("forbidden_sequences", token, vocab_size)
        bias = self._bias(vocab_size) if self.mode.bias else None
        forced = self._forced(batch, vocab_size) if self.mode.forced else None
        return SamplingRows(**values, bias=bias, forced=forced)

    def filters(self, batch: int) -> "SamplingRows":
        """Returns `rows` without tables over the vocabulary, for a drafter's temperature.

        Raises:
          ValueError: a field has neither one value nor `batch` values.
        """
        own = SamplingConfig(**{name: getattr(self, name) for name in FILTERS})
        try:
            return own.rows(batch, vocab_size=0)
        except ValueError as error:
            raise ValueError(f"drafter_sampling: {error}") from None

    def _bias(self, vocab_size: int) -> Float32[np.ndarray, " V"]:
        """Returns what is added to the logits: the biases, and −inf for ids that are forbidden."""
        bias = np.zeros(vocab_size, np.float32)
        for token, value in (self.logit_bias or {}).items():
            bias[_check("logit_bias", token, vocab_size)] = value
        for token in self.forbidden_tokens:
            bias[_check("forbidden_tokens", token, vocab_size)] = -np.inf
        if self.vocabulary_mask is not None:
            mask = arguments.as_array(self.vocabulary_mask)
            if mask.shape != (vocab_size,) or mask.dtype != bool:
                got = f"shape {mask.shape} and type {mask.dtype}"
                raise ValueError(f"vocabulary_mask: got {got}, expected ({vocab_size},) and bool")
            bias[~mask] = -np.inf
        if np.all(np.isneginf(bias)):
            expected = "at least one that is allowed"
            raise ValueError(f"got all {vocab_size} ids forbidden, expected {expected}")
        return bias

    def _forced(self, batch: int, vocab_size: int) -> Int32[np.ndarray, "B F"]:
        """Returns the forced id of each row's new tokens, −1 where none is.

        F is a multiple of 8, so that another number of places rarely compiles a new program.
        """
        given = self.list_forced_tokens()
        if isinstance(self.forced_tokens, tuple) and len(given) != batch:
            expected = f"one or {batch} (one per input)"
            raise ValueError(f"forced_tokens: got {len(given)} values, expected {expected}")
        last = max(place for places in given for place in places)
        forced = np.full((len(given), -(-(last + 1) // 8) * 8), -1, np.int32)
        for row, places in enumerate(given):
            for place, token in places.items():
                forced[row, place] = _check("forced_tokens", token, vocab_size)
        return np.broadcast_to(forced, (batch, forced.shape[1]))


_PER_ROW = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "min_new_tokens": np.int32,
}
# The fields that a drafter may have of its own, beside the target's processors.
FILTERS = ("temperature", "top_k", "top_p", "min_p")
_LARGEST = float(np.finfo(np.float32).max)
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= _LARGEST, "a finite number of at least 0"),
    "top_k": (lambda value: 0 <= value < 2**31, "an integer of at least 0 (0: keep all)"),
    "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
    "repetition_penalty": (lambda x: 0 < x <= _LARGEST, "a finite number above 0 (1: none)"),
    "min_new_tokens": (lambda value: 0 <= value < 2**31, "an integer of at least 0"),
}


def _check_forced_tokens(given: Any) -> Mapping[int, int] | tuple[Mapping[int, int], ...] | None:
    """Returns one dictionary, or a tuple with one for each input; raises ValueError for others."""
    alone, expected = given is None or isinstance(given, Mapping), "a dictionary, or one per input"
    each = (given or {},) if alone else arguments.check_list("forced_tokens", given, expected)
    if not each or not all(isinstance(one, Mapping) for one in each):
        raise ValueError(f"forced_tokens: got {arguments.quote(given)}, expected {expected}")
    for place in (place for one in each for place in one):
        if not arguments.is_integer(place) or not 0 <= place < 2**20:
            expected = f"an integer from 0 to {2**20 - 1}"
            raise ValueError(f"forced_tokens: got place {place}, expected {expected}")
    return given if alone else each


def _check(name: str, token: int, vocab_size: int) -> int:
    if not arguments.is_integer(token) or not 0 <= token < vocab_size:
        expected = f"one from 0 to {vocab_size - 1}"
        raise ValueError(f"{name}: got id {arguments.quote(token)}, expected {expected}")
    return token


class SamplingMode(NamedTuple):
    """The static part of a `SamplingConfig`: the processors and filters that are compiled.

    Attributes:
      native: whether the target `skips_padding`, which `prefill` fills in: then the CPU's own
        kernels add up probabilities over the vocabulary, as in `Categorical.from_logits`.
    """

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
    native: bool = False
    sequences: tuple[tuple[int, ...], ...] = ()

    def with_filters_of(self, other: "SamplingMode") -> "SamplingMode":
        """Returns the mode with the filters of another; whether all is argmax stays."""
        return self._replace(top_k=other.top_k, top_p=other.top_p, min_p=other.min_p)

    @property
    def processes(self) -> bool:
        """Whether any processor is on."""
        return self.bias or self.reads_prefix or self.min_length or self.forced

    @property
    def reads_prefix(self) -> bool:
        """Whether a processor reads the tokens of the prefix."""
        counts = self.repetition or self.ngram > 0 or bool(self.sequences)
        return counts or self.processor is not None


@flax.struct.dataclass
class SamplingRows:
    """The traced part of a `SamplingConfig`; `forced` is −1 where nothing is forced."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    min_new_tokens: Int[Array, " B"]
    bias: Float[Array, " V"] | None = None
    forced: Int[Array, "B F"] | None = None

    def with_filters_of(self, other: "SamplingRows") -> "SamplingRows":
        """Returns the rows with the temperature and the filters of others."""
        return self.replace(**{name: getattr(other, name) for name in FILTERS})

    def repeated(self, copies: int) -> "SamplingRows":
        """Returns the same with each row's values repeated for `copies` rows side by side."""
        rows = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), self.replace(bias=None))
        return rows.replace(bias=self.bias)
