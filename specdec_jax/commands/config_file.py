"""Reads the flags of `specdec generate` from a file of a `GenerationConfig`."""

import dataclasses
from typing import Any, NoReturn

from specdec_jax.decoding.generation_config import GenerationConfig
from specdec_jax.models import arguments
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative.policies import POLICIES, Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.tree_text import text_of

# Options of `generate` whose values are not those of the flag of the same name, or have none.
_OTHERS = ("gamma", "tree", "sampling", "eos_ids", "synthetic_alpha", "early_stopping")
_SINGLE = str | int | float | None
# Fields of a `SamplingConfig` without a flag.
_UNREACHABLE = ("vocabulary_mask", "processor", "forbidden_sequences")
_OF_TOKENS = ("forbidden_tokens", "logit_bias", "forced_tokens")


def read_flags(path: str) -> dict[str, Any]:
    """Returns the flags that mean what a file of options says, by their names.

    Raises:
      ValueError: the file is wrong, or has an option for which there is no flag; the message names
        the file and the option.
    """
    config = GenerationConfig.load(path)
    given = config.changed_fields()
    found = {name: value for name, value in given.items() if name not in _OTHERS}
    try:
        for name in ("eos_ids", "synthetic_alpha"):
            if name in given:
                _reject(name, given[name])
        if isinstance(given.get("generation_config"), ModelDefaults):
            _reject("generation_config", given["generation_config"])
        if "generation_config" in given:
            found["generation_config"] = "none"
        if "stop" in given:
            found["stop"] = (config.stop,) if isinstance(config.stop, str) else tuple(config.stop)
        if "gamma" in given:
            found |= _gamma_flags(config.gamma)
        if config.tree is not None:
            found["tree"] = text_of(config.tree)
        if config.early_stopping is not None:
            found["early_stopping"] = str(config.early_stopping).lower()
        for name, value in found.items():
            if name not in ("stop", "gamma_settings") and not isinstance(value, _SINGLE):
                _reject(name, value)
        return found | _sampling_flags(config.sampling)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _reject(name: str, value: Any) -> NoReturn:
    got = arguments.quoted(value)
    raise ValueError(f"{name}: got {got}, expected a value that a flag can have")


def _gamma_flags(gamma: Any) -> dict[str, Any]:
    if not isinstance(gamma, Policy):
        return {"gamma": gamma}
    name = next((name for name, cls in POLICIES.items() if type(gamma) is cls), None)
    if name is None:
        _reject("gamma", gamma)
    settings = {one: getattr(gamma, one) for one in gamma.numbers()}
    flags = tuple(f"{one}:{value}" for one, value in settings.items())
    single = all(isinstance(value, _SINGLE) for value in settings.values())
    if not (single and type(gamma)(gamma.maximum, **settings) == gamma):  # other fields are set too
        _reject("gamma", gamma)
    return {"gamma": int(gamma.maximum), "gamma_policy": name, "gamma_settings": flags}


def _sampling_flags(sampling: SamplingConfig | None) -> dict[str, Any]:
    """Returns the flags of sampling; all of them, since they take the place of the model's."""
    if sampling is None:
        return {}
    values = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    unset = SamplingConfig()
    for name in _UNREACHABLE:
        if not arguments.is_default(values[name], getattr(unset, name)):
            _reject(f"sampling.{name}", values[name])
        del values[name]
    for name, value in values.items():
        if name not in _OF_TOKENS and not isinstance(value, _SINGLE):
            _reject(f"sampling.{name}", value)
    for name in _OF_TOKENS[1:]:
        values[name] = tuple(f"{key}:{value}" for key, value in (values[name] or {}).items())
    return values | {"forbidden_tokens": tuple(values["forbidden_tokens"] or ())}
