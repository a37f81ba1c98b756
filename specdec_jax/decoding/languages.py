"""Languages of a call: what inputs and outputs in `source_language` and `target_language` have."""

import dataclasses
from typing import Any, NamedTuple

from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.decoding.generation_config import GenerationConfig
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.tokenizers.vocabularies import Vocabulary


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
        if self.first is None:
            return sampling
        forced = dict(sampling.forced_tokens or {})
        if forced.get(0, self.first) != self.first:
            got, expected = f"the first token {forced[0]}", f"{self.first}, the target_language's"
            raise UnsupportedCombination(f"forced_tokens: got {got}, expected {expected}")
        return dataclasses.replace(sampling, forced_tokens=forced | {0: self.first})


def choose_vocabulary(
    target: LanguageModel, source_language: str | None, target_language: str | None
) -> Vocabulary | None:
    """Returns the target's vocabulary with what stands around texts in these languages.

    Raises:
      ValueError: a language that the model does not have, or one for a model without a vocabulary.
    """
    if target.vocabulary is not None:
        return target.vocabulary.with_languages(source_language, target_language)
    given = {"source_language": source_language, "target_language": target_language}
    for name, code in given.items():
        if code is not None:
            expected = "none: the model has no vocabulary, and so no codes of languages"
            raise mismatch_error(name, quote_value(code), expected)
    return None


def choose_output_language(
    target: LanguageModel,
    config: GenerationConfig,
    defaults: ModelDefaults = ModelDefaults(),
    prefixed: bool = False,
) -> OutputLanguage:
    """Returns how the outputs of a call begin.

    Args:
      target: the model.
      config: the options of the call.
      defaults: the model's defaults, as far as they count in the call.
      prefixed: whether outputs have a decoder prefix, which may begin with a language.

    Raises:
      ValueError: the model needs a language, and nothing gives it; the message lists the codes.
    """
    code, languages = config.target_language, getattr(target.vocabulary, "languages", None)
    if languages is None or languages.target == "input":
        return OutputLanguage(target.start_token, None)
    if code is None:
        given: Any = getattr(config.sampling, "forced_tokens", None)
        if given is None:
            given = getattr(config.sampling, "fields", {}).get("forced_tokens")
        known = prefixed or defaults.forced_bos_token_id is not None or 0 in (given or {})
        if languages.target == "start":
            known = target.start_token in languages.codes.values()
        if not known:
            raise mismatch_error("target_language", "none", languages.listed())
        return OutputLanguage(target.start_token, None)
    token = languages.find("target_language", code)
    if languages.target == "start":
        return OutputLanguage(token, None)
    return OutputLanguage(target.start_token, token)
