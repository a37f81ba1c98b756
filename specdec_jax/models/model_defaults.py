"""`ModelDefaults`: how a model decodes where a call sets nothing, by transformers' names."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from specdec_jax.files.reading import mismatch_error, quote_value

_Check = tuple[Callable[[Any], bool], str]


def _is_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # an int may be larger


def _is_early_stopping(value: Any) -> bool:
    return type(value) is bool or (type(value) is str and value == "never")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_integer, value))


def _is_sequences(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_ids(item) and len(item) for item in value)


_INTEGER: _Check = (_is_integer, "an integer of at least 0, below 2^31")
_NUMBER: _Check = (_is_number, "a finite number")
# Each field, the value that says the same as none, and what may be accepted there.
_FIELDS: dict[str, tuple[Any, _Check]] = {
    "max_length": (None, _INTEGER),
    "max_new_tokens": (None, _INTEGER),
    "min_length": (0, _INTEGER),
    "min_new_tokens": (0, _INTEGER),
    "do_sample": (False, (lambda value: type(value) is bool, "true or false")),
    "temperature": (1.0, _NUMBER),
    "top_k": (50, _INTEGER),
    "top_p": (1.0, _NUMBER),
    "min_p": (0.0, _NUMBER),
    "repetition_penalty": (1.0, _NUMBER),
    "no_repeat_ngram_size": (0, _INTEGER),
    "suppress_tokens": ((), (_is_ids, "a list of ids")),
    "bad_words_ids": ((), (_is_sequences, "a list of lists of ids")),
    "forced_bos_token_id": (None, _INTEGER),
    "forced_eos_token_id": (None, _INTEGER),
    "num_beams": (1, _INTEGER),
    "length_penalty": (1.0, _NUMBER),
    "early_stopping": (
        False,
        (_is_early_stopping, "true, false or 'never'"),
    ),
    "num_return_sequences": (1, _INTEGER),
}
# What else is asked of a number that counts.
_RANGES: dict[str, _Check] = {
    "temperature": (lambda value: value >= 0, "a finite number of at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
    "repetition_penalty": (lambda value: value > 0, "a finite number above 0 (1: none)"),
    "num_beams": (lambda value: value >= 1, "an integer of at least 1"),
    "num_return_sequences": (lambda value: value >= 1, "an integer of at least 1"),
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Fields that change transformers' outputs and do not exist here, with the value that changes
# nothing.
_OTHERS: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "guidance_scale": 1,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "watermarking_config": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
}
KNOWN_FIELDS = (*_FIELDS, *_OTHERS)  # what `ModelDefaults.read` looks at


@dataclasses.dataclass(frozen=True)
class ModelDefaults:
    """How a model decodes where a call does not say otherwise; None says nothing.

    The fields have transformers' names and meanings; None stands for transformers' default. Lengths
    count the start token and a decoder prefix, or the prompt, except those of new tokens. If a file
    has the value of transformers' default, the field is None.

    Attributes:
      max_length, max_new_tokens: the most tokens of a row; the second one counts if both are there.
      min_length, min_new_tokens: least number of tokens before an EOS; as above.
      do_sample: whether tokens are sampled, and not each the most probable one.
      temperature, top_k, top_p, min_p: of sampling; None: 1, 50, 1 and 0.
      repetition_penalty, no_repeat_ngram_size: as in `SamplingConfig`.
      suppress_tokens: ids that are never chosen.
      bad_words_ids: sequences of ids that never occur.
      forced_bos_token_id, forced_eos_token_id: the first new token, where nothing but the start
        token is before it, and the last one that is allowed.
      num_beams, length_penalty, early_stopping, num_return_sequences: of a beam search in
        transformers' form.
      left_out: fields of the file that are not applied here, and their values.
    """

    max_length: int | None = None
    max_new_tokens: int | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    suppress_tokens: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    num_return_sequences: int | None = None
    left_out: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), hash=False)

    def __post_init__(self):
        for name in ("suppress_tokens", "bad_words_ids"):  # lists too, as in files; hashable
            if isinstance(value := getattr(self, name), list | tuple):
                rows = [tuple(item) if isinstance(item, list) else item for item in value]
                object.__setattr__(self, name, tuple(rows))
        checks = [*((name, check) for name, (_, check) in _FIELDS.items()), *_RANGES.items()]
        for name, (fits, expected) in checks:
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise mismatch_error(name, quote_value(value), expected)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.fields().items())
        return f"ModelDefaults({fields})"

    def fields(self) -> dict[str, Any]:
        """Returns the fields that say something, but for `left_out`."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}

    def replace(self, **changes: Any) -> "ModelDefaults":
        """Returns a copy with other values."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def read(cls, options: Mapping[str, Any], path: Any) -> "ModelDefaults":
        """Returns what `options`, the contents of the file `path`, say about decoding.

        Raises:
          ValueError: a value of the wrong kind, or one that counts and is out of range.
        """
        given = {name: options.get(name) for name in _FIELDS}
        left = {name: options.get(name) for name in _OTHERS}
        left = {name: it for name, it in left.items() if it not in (None, _OTHERS[name], [])}
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            if isinstance(forced := given[name], list):  # of several, it takes one
                given[name] = forced[0] if len(forced) == 1 else None
                left |= {name: forced} if len(forced) > 1 else {}
        for name in ("max_length", "max_new_tokens"):  # a whole number counts in transformers
            if isinstance(length := given[name], float) and length.is_integer():
                given[name] = int(length)
        if isinstance(ids := given["suppress_tokens"], list):  # no token has an id below 0
            given["suppress_tokens"] = [i for i in ids if type(i) is not int or i >= 0]
        for name, (usual, (fits, expected)) in _FIELDS.items():
            value = given[name]
            if value is not None and not fits(value):
                raise mismatch_error(f"{path}: {name}", quote_value(value), expected)
            if value == usual or value == []:
                given[name] = None
        if given["do_sample"]:  # there are no beams that sample, and no default number of samples
            for name in ("num_beams", "num_return_sequences"):
                left |= {} if given[name] is None else {name: given[name]}
                given[name] = None
        else:
            given |= dict.fromkeys(_SAMPLING)
        if given["num_beams"] is None:
            given["num_return_sequences"] = None
        try:
            return cls(**given, left_out=tuple(left.items()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def lines(self, name: Any, file: str) -> tuple[str, ...]:
        """Returns lines for when a model is loaded: fields that count, and fields that do not."""
        used, left = (
            ", ".join(f"{field}={quote_value(value)}" for field, value in fields)
            for fields in (self.fields().items(), self.left_out)
        )
        lines = (
            f"{name}: {file} sets the defaults of decoding: {used} (generation_config=None, or "
            "--generation_config=none, decodes without them)",
            f"{name}: {file} also sets what decoding here does not have, and does without: {left}",
        )
        return lines[:1] * bool(used) + lines[1:] * bool(left)

    def written(self) -> dict[str, Any]:
        """Returns what `read` reads again, as JSON values."""
        fields = {name: _write_json(value) for name, value in self.fields().items()}
        return fields | dict(self.left_out)


def _write_json(value: Any) -> Any:
    return [_write_json(item) for item in value] if isinstance(value, tuple) else value
