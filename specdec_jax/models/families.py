"""The table of model families, by the name of a family in a checkpoint.

A new family needs a row here, and a file for each foreign format from which it is read
(`checkpoints/huggingface_NAME.py`).
"""

import dataclasses
from typing import Any

from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.gemma import GemmaConfig, T5GemmaConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.t5 import T5Config

# Classes of configurations by their `family`, the name that stored models have.
_CLASSES = T5Config, GPTConfig, BartConfig, GemmaConfig, T5GemmaConfig
FAMILIES: dict[str, type[ModelConfig]] = {shape.family: shape for shape in _CLASSES}

PRESETS: dict[str, ModelConfig] = {
    name: config for shape in FAMILIES.values() for name, config in shape.presets().items()
}


def find_family(name: Any) -> type[ModelConfig]:
    """Returns the class of a family's configurations; raises ValueError for an unknown name."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise mismatch_error("architecture", quote_value(name), f"one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def describe(config: ModelConfig) -> dict[str, Any]:
    """Returns a configuration as a dict, from which `build_config` makes it again.

    Raises:
      ValueError: the configuration's class is not in the table.
    """
    if FAMILIES.get(config.family) is not type(config):
        got = f"a {type(config).__name__}"
        raise mismatch_error("architecture", got, "one of the table of families")
    return {"architecture": config.family, **dataclasses.asdict(config)}


def build_config(record: dict[str, Any]) -> ModelConfig:
    """Returns the configuration that `describe` recorded."""
    fields = dict(record)
    return find_family(fields.pop("architecture", None))(**fields)
