"""The options for which a model may have defaults of its own, in its `generation_config`."""

import dataclasses
from typing import Any

import numpy as np

from specdec_jax.commands.options import DecodingOptions, option
from specdec_jax.decoding.defaults import MODELS, SamplingChanges, defaults_of, fill_limits
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative.sampling import SamplingConfig

_USUAL = {field.name: field for field in dataclasses.fields(DecodingOptions)}
_OF_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram",
    "min_new_tokens",
)
_MOST = 2**20  # a limit that no option can exceed


def _open(name: str) -> Any:
    """Returns the field `name` of `DecodingOptions` with None for what is not given."""
    field = _USUAL[name]
    return option(None, f"{field.metadata['help']} (default: the model's, else {field.default})")


@dataclasses.dataclass(frozen=True)
class DefaultedOptions(DecodingOptions):
    """Options of a command that decodes as the model's `generation_config` says where no flag is
    given."""

    generation_config: str = option(
        MODELS,
        "model: what is not given by flags is as the checkpoint's generation_config.json says, such"
        " as num_beams, no_repeat_ngram_size or max_length; none: as this page says",
    )
    temperature: float | None = _open("temperature")  # type: ignore[assignment]
    top_k: int | None = _open("top_k")  # type: ignore[assignment]
    top_p: float | None = _open("top_p")  # type: ignore[assignment]
    min_p: float | None = _open("min_p")  # type: ignore[assignment]
    repetition_penalty: float | None = _open("repetition_penalty")  # type: ignore[assignment]
    no_repeat_ngram: int | None = _open("no_repeat_ngram")  # type: ignore[assignment]
    min_new_tokens: int | None = _open("min_new_tokens")  # type: ignore[assignment]
    max_new_tokens: int | None = _open("max_new_tokens")  # type: ignore[assignment]

    def check_decoding(self) -> None:
        if self.generation_config not in (MODELS, "none"):
            raise ValueError(
                f"generation_config: got {self.generation_config!r}, expected {MODELS} or none"
            )
        super().check_decoding()

    @property
    def token_limit(self) -> int:
        return _MOST if self.max_new_tokens is None else self.max_new_tokens

    def sampling(self) -> SamplingConfig:
        usual: dict[str, Any] = {
            name: _USUAL[name].default for name in _OF_SAMPLING if getattr(self, name) is None
        }
        return DecodingOptions.sampling(dataclasses.replace(self, **usual))

    def possible_sampling(self) -> SamplingConfig:
        if self.temperature is not None or self.generation_config != MODELS:
            return self.sampling()
        return dataclasses.replace(
            self.sampling(), temperature=1.0
        )  # the model may sample by default

    def decoding(self, plain: bool = False) -> dict[str, Any]:
        given = {name: value for name in _OF_SAMPLING if (value := getattr(self, name)) is not None}
        chosen = self.sampling()
        for name in ("forbidden_tokens", "logit_bias", "forced_tokens"):
            given |= {name: getattr(chosen, name)} if getattr(self, name) else {}
        config = MODELS if self.generation_config == MODELS else None
        return super().decoding(plain) | dict(
            sampling=SamplingChanges(given), generation_config=config
        )

    def defaults(self, target: LanguageModel) -> ModelDefaults:
        """Returns what counts where no flag is given."""
        return defaults_of(target, MODELS if self.generation_config == MODELS else None)

    def limits(self, target: LanguageModel, lengths: list[int]) -> np.ndarray:
        """Returns the most new tokens after prompts of these lengths; 1: the start token alone."""
        starts, name = np.maximum(lengths, 1), "--max_new_tokens"
        return fill_limits(
            target, self.defaults(target), self.max_new_tokens, starts, "sentence", 1, name
        )

    def limit_text(self, target: LanguageModel) -> str:
        """Returns what ends outputs by length."""
        defaults = self.defaults(target)
        if (
            self.max_new_tokens is None
            and defaults.max_new_tokens is None
            and defaults.max_length is not None
        ):
            return f"max_length={defaults.max_length}, a default of the model"
        return f"--max_new_tokens={int(max(self.limits(target, [1])))}"
