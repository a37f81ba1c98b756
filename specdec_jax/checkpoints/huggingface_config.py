"""What the families' readers of a Hugging Face config.json share."""

import pathlib
from typing import Any

from specdec_jax.checkpoints.huggingface_tokenizers import first
from specdec_jax.files import reading


def read_fields(options: dict, names: dict[str, str], defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of our fields: what config.json says, else the default, else None.

    `names`: what config.json calls each.
    """
    return {ours: first(options.get(theirs), defaults.get(ours)) for ours, theirs in names.items()}


def choose(path: pathlib.Path, options: dict, name: str, default: str, known: dict[str, Any]) -> Any:
    """Returns what `known` makes of a value, or of the default; raises ValueError for one that is not in it."""
    value = options.get(name, default)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{path}: {name}: got {reading.shown(value)}, expected one of {', '.join(known)}")
    return known[value]


def check_fixed(path: pathlib.Path, options: dict, fixed: dict[str, Any]) -> None:
    """Raises ValueError where config.json says another value than the one that there is here."""
    for name, expected in fixed.items():
        if options.get(name, expected) != expected:
            raise ValueError(f"{path}: {name}: got {reading.shown(options[name])}, expected {expected!r}")
