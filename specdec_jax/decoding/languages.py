"""Languages of a call: what inputs and outputs in `source_language` and `target_language` have."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.decoding.generation_config import GenerationConfig
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.tokenizers.vocabularies import Vocabulary

# One code for all inputs, or one for each.
PerInput = str | Collection[str] | None


class OutputLanguage(NamedTuple):
    """How outputs in a language begin.

    Attributes:
      start_token: the token before every output.
      first: the first token of every output after it, or before a decoder prefix; None: any.
    """

    start_token: int
    first: int | None

    def force(self, sampling: SamplingConfig) -> SamplingConfig:
        """Returns how tokens are chosen if the first one is forced.

        Raises:
          UnsupportedCombination: another first token is forced already.
        """
        return force_languages(sampling, [self])


def force_languages(
    sampling: SamplingConfig, languages: Sequence[OutputLanguage]
) -> SamplingConfig:
    """Returns how tokens are chosen if each row's first one is that of its language.

    Raises:
      UnsupportedCombination: another first token is forced already.
    """
    given = sampling.list_forced_tokens()
    given = given * len(languages) if len(given) == 1 else given
    rows = []
    for row, language in zip(given, languages):
        first = language.first
        if first is not None and row.get(0, first) != first:
            got, expected = f"the first token {row[0]}", f"{first}, the target_language's"
            raise UnsupportedCombination(f"forced_tokens: got {got}, expected {expected}")
        rows.append(row if first is None else {**row, 0: first})
    if rows == list(given):
        return sampling
    alike = all(row == rows[0] for row in rows)
    return dataclasses.replace(sampling, forced_tokens=rows[0] if alike else tuple(rows))


def list_codes(name: str, given: PerInput, batch: int) -> list[str | None]:
    """Returns the code of each input's language; None where none is given.

    Raises:
      ValueError: neither one code nor one for each input.
    """
    if given is None or isinstance(given, str):
        return [given] * batch
    if len(given) != batch:
        expected = f"one or {batch} (one per input)"
        raise ValueError(f"{name}: got {len(given)} codes, expected {expected}")
    return list(given)


def choose_vocabularies(
    target: LanguageModel, source_language: PerInput, target_language: PerInput, batch: int
) -> list[Vocabulary]:
    """Returns the target's vocabulary with what stands around each text in its languages.

    There is none for a model without a vocabulary.

    Raises:
      ValueError: a language that the model does not have, or one for a model without a vocabulary.
    """
    given = {"source_language": source_language, "target_language": target_language}
    vocabulary = target.vocabulary
    if vocabulary is None:
        for name, code in given.items():
            if code is not None:
                expected = "none: the model has no vocabulary, and so no codes of languages"
                raise mismatch_error(name, quote_value(code), expected)
        return []
    pairs = list(zip(*(list_codes(name, codes, batch) for name, codes in given.items())))
    made = {pair: vocabulary.with_languages(*pair) for pair in dict.fromkeys(pairs)}
    return [made[pair] for pair in pairs]


def choose_output_languages(
    target: LanguageModel,
    config: GenerationConfig,
    batch: int,
    defaults: ModelDefaults,
    prefixed: bool,
) -> list[OutputLanguage]:
    """Returns how the output of each input begins; arguments as for `choose_output_language`."""
    codes = list_codes("target_language", config.target_language, batch)
    made = {
        code: choose_output_language(target, config, code, defaults, prefixed)
        for code in dict.fromkeys(codes)
    }
    return [made[code] for code in codes]


def choose_output_language(
    target: LanguageModel,
    config: GenerationConfig,
    code: str | None,
    defaults: ModelDefaults = ModelDefaults(),
    prefixed: bool = False,
) -> OutputLanguage:
    """Returns how outputs in a language begin.

    Args:
      target: the model.
      config: the options of the call.
      code: the language's code; None: the one that the model's files give.
      defaults: the model's defaults, as far as they count in the call.
      prefixed: whether outputs have a decoder prefix, which may begin with a language.

    Raises:
      ValueError: the model needs a language, and nothing gives it; the message lists the codes.
    """
    languages = getattr(target.vocabulary, "languages", None)
    if languages is None or languages.target == "input":
        return OutputLanguage(target.start_token, None)
    if code is None:
        given: Any = getattr(config.sampling, "forced_tokens", None)
        if given is None:
            given = getattr(config.sampling, "fields", {}).get("forced_tokens")
        rows = given if isinstance(given, tuple | list) else [given or {}]
        own, forced = defaults.forced_bos_token_id, all(0 in row for row in rows)
        known = prefixed or own is not None or forced
        if languages.target == "start":
            known = target.start_token in languages.codes.values()
        if not known:
            raise mismatch_error("target_language", "none", languages.listed())
        # A `SamplingConfig` replaces the model's defaults, but what it does not say of a language.
        replaced = isinstance(config.sampling, SamplingConfig) and languages.target != "start"
        return OutputLanguage(target.start_token, own if replaced and not forced else None)
    token = languages.find("target_language", code)
    if languages.target == "start":
        return OutputLanguage(token, None)
    return OutputLanguage(target.start_token, token)
