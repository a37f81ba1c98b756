"""The table of model families: maps the name of a family in a checkpoint to the class of its
configuration.

A new family needs a row here, and a file for each foreign format from which it is read
(`checkpoints/huggingface_NAME.py`).
"""

import dataclasses

from specdec_jax.files.reading import shown
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.t5 import T5Config

# Classes of configurations by their `family`, the name that stored models have.
FAMILIES: dict[str, type[ModelConfig]] = {"t5": T5Config, "gpt": GPTConfig}

PRESETS: dict[str, ModelConfig] = {
    name: config for shape in FAMILIES.values() for name, config in shape.presets().items()
}


def family_of(name) -> type[ModelConfig]:
    """Returns the class of the configurations of the family `name`.

    Raises:
      ValueError: there is no such family.
    """
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"architecture: got {shown(name)}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def describe(config: ModelConfig) -> dict:
    """Returns a configuration as a dict, from which `build_config` makes it again.

    Raises:
      ValueError: the configuration's class is not in the table.
    """
    if FAMILIES.get(config.family) is not type(config):
        raise ValueError(
            f"architecture: got a {type(config).__name__}, expected one of the table of families"
        )
    return {"architecture": config.family, **dataclasses.asdict(config)}


def build_config(record: dict) -> ModelConfig:
    """Returns the configuration that `describe` recorded.

    Older records, without a name of the family, are read too.
    """
    fields = dict(record)
    before = "gpt" if "num_positions" in fields else "t5"  # T5s have no num_positions
    return family_of(fields.pop("architecture", before))(**fields)
