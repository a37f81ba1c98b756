"""Fills in what a call of `generate` leaves open, from the model's `generation_config`.

An argument of the call counts before the model's default, and the model's before the package's.
`sampling` is one argument: a `SamplingConfig` takes the place of all the model's settings of it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_jax.decoding.checks import SamplingChanges, UnsupportedCombination, check_per_row
from specdec_jax.decoding.generation_config import BEAM_FIELDS, MODELS, GenerationConfig
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative.sampling import SamplingConfig

MAX_NEW_TOKENS = 64
_NONE = ModelDefaults()
_ARGMAX = SamplingConfig()  # made once: each call would make its checks again
# Arguments of `generate` that belong to a beam search, and are fields of a `ModelDefaults` too.
_OF_SEARCH = ("length_penalty", "early_stopping", "num_return_sequences")


def read_defaults(target: LanguageModel, given: Any) -> ModelDefaults:
    """Returns the defaults of a call, for its argument `generation_config`.

    Raises:
      ValueError: anything but a `ModelDefaults`, "model" (the model's own), or None (none).
    """
    if isinstance(given, str) and given == MODELS:
        given = getattr(target, "generation_config", _NONE)  # what is no model is rejected later
    if given is None:
        return _NONE
    if not isinstance(given, ModelDefaults):
        expected = "a ModelDefaults, 'model' (the model's own), or None (none)"
        raise ValueError(f"generation_config: got {arguments.quote(given)}, expected {expected}")
    return given


def fill_search(defaults: ModelDefaults, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a beam search, with defaults in the place of None.

    The search has transformers' form where the defaults say anything of one, else T5X's.
    """
    found = {name: value for name, value in options.items() if value is not None}
    if found.get("num_beams", defaults.num_beams) is None:
        return found
    own = {name: getattr(defaults, name) for name in ("num_beams", *_OF_SEARCH)}
    own = {name: value for name, value in own.items() if value is not None}
    if own:
        found = {"beam_style": "huggingface"} | found
    style = found.get("beam_style")
    if not isinstance(style, str) or style != "huggingface":  # T5X's length penalty is another one
        own = {name: value for name, value in own.items() if name == "num_beams"}
    if "num_beams" in found:  # the number of outputs belongs to the model's own number of beams
        own.pop("num_return_sequences", None)
    return own | found


def expect_no_search(
    target: LanguageModel, config: GenerationConfig, defaults: ModelDefaults
) -> None:
    """Rejects a beam search, given or a default, where tokens are read while they are decoded."""
    callers = "stream(), trace() and prepare()"
    for name in BEAM_FIELDS:
        if (value := getattr(config, name)) is not None:
            got = arguments.quote(value)
            why = f"{callers} do not support beam search"
            raise UnsupportedCombination(f"{name}: got {got}, expected None: {why}")
    if defaults.num_beams is not None:
        got = f"{defaults.num_beams}, a default of {target.name or 'the model'}"
        expected = "generation_config=None, or one without num_beams"
        raise UnsupportedCombination(
            f"num_beams: got {got}, which {callers} do not support, expected {expected}"
        )


def fill_limits(
    target: LanguageModel,
    defaults: ModelDefaults,
    given: Any,
    starts: np.ndarray,
    name: str = "input",
    first: int = 0,
    option: str = "max_new_tokens",
) -> np.ndarray:
    """Returns the most new tokens of each row, `[N]`.

    Args:
      target: the model; for messages.
      defaults: the defaults of the call.
      given: the argument `max_new_tokens`, or None.
      starts: `[N]`, tokens before the new ones: start token and decoder prefix, or prompt.
      name, first, option: for messages: what a row is called, the number of the first, and the name
        of `given`.

    Raises:
      ValueError: a limit out of range, or a default `max_length` that leaves no new token.
    """
    limit = MAX_NEW_TOKENS if defaults.max_new_tokens is None else defaults.max_new_tokens
    value = limit if given is None else given
    if given is None and defaults.max_new_tokens is None and defaults.max_length is not None:
        value = defaults.max_length - np.asarray(starts)
        if np.any(value < 1):
            row, model = int(np.argmin(value)), target.name or "the model"
            most = f"max_length = {defaults.max_length}, the default of {model}"
            raise ValueError(
                f"{name} {row + first}: got {starts[row]} tokens before the first new one, expected"
                f" fewer than {most}, or {option}"
            )
    return check_per_row("max_new_tokens", value, len(starts), 1, 2**20)


def fill_sampling(
    target: LanguageModel,
    defaults: ModelDefaults,
    given: SamplingConfig | SamplingChanges | None,
    starts: np.ndarray,
    limits: np.ndarray,
    eos_ids: tuple[int, ...],
) -> SamplingConfig:
    """Returns how the tokens of N rows are chosen.

    Args:
      target: the model, whose vocabulary counts.
      defaults: the defaults of the call.
      given: the argument `sampling`.
      starts, limits: `[N]`, tokens before the new ones, and the most new ones.
      eos_ids: ids that end a row, which `bad_words_ids` do not forbid.

    Raises:
      ValueError: a setting out of range.
    """
    if isinstance(given, SamplingConfig):
        return given
    changes = {} if given is None else dict(given.fields)
    if defaults == _NONE:
        return SamplingConfig(**changes) if changes else _ARGMAX
    words = [
        word for word in defaults.bad_words_ids or () if len(word) > 1 or word[0] not in eos_ids
    ]
    vocab_size = target.config.vocab_size
    forbidden = {token for token in defaults.suppress_tokens or () if token < vocab_size}
    found: dict[str, Any] = {
        "repetition_penalty": defaults.repetition_penalty,
        "no_repeat_ngram": defaults.no_repeat_ngram_size,
        "min_new_tokens": _find_min_new_tokens(defaults, starts, limits),
        "forbidden_tokens": sorted(forbidden | {word[0] for word in words if len(word) == 1}),
        "forbidden_sequences": tuple(word for word in words if len(word) > 1),
    }
    if defaults.do_sample and changes.get("temperature") != 0:
        found |= {"temperature": 1.0 if defaults.temperature is None else defaults.temperature}
        found |= {"top_k": 50 if defaults.top_k is None else defaults.top_k}
        found |= {"top_p": defaults.top_p, "min_p": defaults.min_p}
    if "forced_tokens" not in changes:
        found["forced_tokens"] = _find_forced_tokens(defaults, starts, limits)
    chosen = {name: value for name, value in found.items() if value is not None}
    return SamplingConfig(**chosen | changes)


def _find_min_new_tokens(
    defaults: ModelDefaults, starts: np.ndarray, limits: np.ndarray
) -> np.ndarray | None:
    """Returns the least number of new tokens before an EOS, `[N]`, or None."""
    if defaults.min_new_tokens is not None:
        return np.minimum(defaults.min_new_tokens, limits)
    if defaults.min_length is not None:
        return np.clip(defaults.min_length - np.asarray(starts), 0, limits)
    return None


def _find_forced_tokens(
    defaults: ModelDefaults, starts: np.ndarray, limits: np.ndarray
) -> dict[int, int] | tuple[dict[int, int], ...] | None:
    """Returns the forced tokens by their places: of all rows, or of each if they differ."""
    first, end, rows = defaults.forced_bos_token_id, defaults.forced_eos_token_id, []
    for start, limit in zip(np.asarray(starts).tolist(), np.asarray(limits).tolist(), strict=True):
        row = {0: first} if first is not None and start == 1 else {}
        rows.append(row | ({} if end is None else {limit - 1: end}))
    return tuple(rows) if any(row != rows[0] for row in rows) else rows[0] or None
