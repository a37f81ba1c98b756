"""Helpers that the families' readers of a Hugging Face config.json share."""

import pathlib
from typing import Any

from specdec_jax.files import reading
from specdec_jax.tokenizers.huggingface_folders import first


def read_fields(options: dict, names: dict[str, str], defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of our configuration's fields: from config.json, else the default, else
    None.

    Args:
      options: contents of config.json.
      names: config.json's name of each of our fields.
      defaults: values by our names.
    """
    return {ours: first(options.get(theirs), defaults.get(ours)) for ours, theirs in names.items()}


def choose(
    path: pathlib.Path, options: dict, name: str, default: str, known: dict[str, Any]
) -> Any:
    """Returns `known[value]` for the value of `name` in config.json, or for the default; raises
    ValueError for an unknown value."""
    value = options.get(name, default)
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"{path}: {name}: got {reading.shown(value)}, expected one of {', '.join(known)}"
        )
    return known[value]


def check_fixed(path: pathlib.Path, options: dict, fixed: dict[str, Any]) -> None:
    """Raises ValueError if config.json sets an option to another value than the only one supported
    here."""
    for name, expected in fixed.items():
        if options.get(name, expected) != expected:
            raise ValueError(
                f"{path}: {name}: got {reading.shown(options[name])}, expected {expected!r}"
            )
