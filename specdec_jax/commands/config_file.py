"""Reads the flags of `specdec generate` from a file of a `GenerationConfig`."""

import dataclasses
from typing import Any

from specdec_jax.decoding.generation_config import FIELDS, GenerationConfig
from specdec_jax.models import arguments
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative.policies import POLICIES, Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.tree_text import text_of

# Options of `generate` whose values are not those of the flag of the same name, or have none.
_OTHERS = ("gamma", "tree", "sampling", "eos_ids", "synthetic_alpha", "early_stopping")
# Fields of a `SamplingConfig` without a flag.
_UNREACHABLE = ("vocabulary_mask", "processor", "forbidden_sequences")


def read_flags(path: str) -> dict[str, Any]:
    """Returns the flags that mean what a file of options says, by their names.

    Raises:
      ValueError: the file is wrong, or has an option for which there is no flag; the message names
        the file and the option.
    """
    config = GenerationConfig.load(path)
    values = {name: getattr(config, name) for name in FIELDS}
    given = {
        name: value
        for name, value in values.items()
        if (value is None) != (FIELDS[name].default is None)
        or not arguments.is_default(value, FIELDS[name].default)
    }
    found = {name: value for name, value in given.items() if name not in _OTHERS}
    try:
        for name in ("eos_ids", "synthetic_alpha"):
            _reject(name, given.get(name))
        for name in ("verifier", "max_new_tokens"):
            if not isinstance(given.get(name), int | str | None):
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
        return found | _sampling_flags(config.sampling)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _reject(name: str, value: Any) -> None:
    if value is not None:
        raise ValueError(f"{name}: got {arguments.quoted(value)}, for which there is no flag")


def _gamma_flags(gamma: Any) -> dict[str, Any]:
    if not isinstance(gamma, Policy):
        if not isinstance(gamma, int | str):
            _reject("gamma", gamma)
        return {"gamma": gamma}
    name = next((name for name, cls in POLICIES.items() if type(gamma) is cls), None)
    if name is None:
        _reject("gamma", gamma)
    settings = tuple(f"{one}:{getattr(gamma, one)}" for one in gamma.numbers())
    return {"gamma": int(gamma.maximum), "gamma_policy": name, "gamma_settings": settings}


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
        if isinstance(value, list | tuple) and name != "forbidden_tokens":
            _reject(f"sampling.{name}", value)
    for name in ("logit_bias", "forced_tokens"):
        values[name] = tuple(f"{key}:{value}" for key, value in (values[name] or {}).items())
    return values | {"forbidden_tokens": tuple(values["forbidden_tokens"] or ())}
