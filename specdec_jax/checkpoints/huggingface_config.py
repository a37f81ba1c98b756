"""Helpers that the families' readers of a Hugging Face config.json share."""

from typing import Any

from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value


def read_fields(options: dict, names: dict[str, str], defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of our configuration: as config.json gives them, else the default or None.

    Args:
      options: contents of config.json.
      names: config.json's name of each of our fields.
      defaults: values by our names.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return {ours: given.get(theirs, defaults.get(ours)) for ours, theirs in names.items()}


def resolve_aliases(options: dict, aliases: dict[str, str]) -> dict:
    """Returns config.json with the other names that transformers has for some options resolved.

    As there, such a name counts before the usual one.

    Args:
      options: contents of config.json.
      aliases: the usual name of each other name.
    """
    given = {usual: options.get(name) for name, usual in aliases.items()}
    return options | {usual: value for usual, value in given.items() if value is not None}


def choose_value(
    path: AnyPath, options: dict, name: str, default: str, known: dict[str, Any]
) -> Any:
    """Returns the meaning of an option of config.json; raises ValueError for unknown values."""
    value = options.get(name, default)
    if not isinstance(value, str) or value not in known:
        raise mismatch_error(f"{path}: {name}", quote_value(value), f"one of {', '.join(known)}")
    return known[value]


def check_fixed(path: AnyPath, options: dict, fixed: dict[str, Any]) -> None:
    """Raises ValueError if an option of config.json has another value than the one supported."""
    for name, expected in fixed.items():
        if options.get(name, expected) != expected:
            raise mismatch_error(f"{path}: {name}", quote_value(options[name]), f"{expected!r}")
