"""Reads and writes a `GenerationConfig` as a JSON or gin file.

A gin file has the same bindings that T5X reads, and is parsed here without running anything.
"""

import dataclasses
import difflib
import json
import pathlib
import re
import tokenize
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

import numpy as np
from gin import config_parser

from specdec_jax.files.reading import mismatch_error, quote_value, read_json, read_text
from specdec_jax.files.writing import write_file
from specdec_jax.models import arguments
from specdec_jax.models.model_defaults import KNOWN_FIELDS, ModelDefaults
from specdec_jax.speculative.policies import POLICIES
from specdec_jax.speculative.policy import Policy
from specdec_jax.speculative.sampling import FILTERS, SamplingConfig
from specdec_jax.speculative.tree_text import read_tree, write_tree
from specdec_jax.speculative.trees import DynamicTree, Tree

_LARGEST = 2**20  # bytes of a file
_IGNORED = config_parser.ImportStatement | config_parser.BlockDeclaration  # in a gin file
_POLICY = "policy"  # the key of a policy's name
# The modules of what a gin file refers to, by the name in it.
_MODULES = {
    "generation_config": "decoding",
    "model_defaults": "models",
    "policies": "speculative",
    "sampling": "speculative",
    "tree_text": "speculative",
}
CONFIG, _SAMPLING = "generation_config.GenerationConfig", "sampling.SamplingConfig"
_TREE, _DEFAULTS = "tree_text.read_tree", "model_defaults.ModelDefaults"
# What a gin file refers to, by the option; and the names of policies.
_BLOCKS = {
    "sampling": _SAMPLING,
    "drafter_sampling": f"drafter/{_SAMPLING}",
    "tree": _TREE,
    "generation_config": _DEFAULTS,
}
_POLICY_NAMES = {f"policies.{cls.__name__}": name for name, cls in POLICIES.items()}


def write_fields(path: str | PathLike, fields: Mapping[str, Any]) -> None:
    """Writes the fields of a `GenerationConfig`, those at their defaults left out.

    Raises:
      ValueError: a value that no file can hold, such as a function; or another suffix.
    """
    arguments.check_path("path", path)
    as_json = _is_json(path)
    values = {name: to_plain(name, value) for name, value in fields.items()}
    as_gin = "from __gin__ import dynamic_registration\n\n" + to_gin(fields)
    write_file(path, json.dumps(values, indent=1) + "\n" if as_json else as_gin)


def read_fields(path: str | PathLike, known: Collection[str]) -> dict[str, Any]:
    """Returns the fields that a file of `write_fields` holds; `known` are those that there are.

    Raises:
      ValueError: a file of another form, or a field that is unknown or wrong, in one line with the
        file's name.
    """
    arguments.check_path("path", path)
    values = read_json(path, _LARGEST) if _is_json(path) else _read_gin(path)
    found = {}
    for name, value in values.items():
        if name not in known:
            hint = suggest_name(name, known)
            raise ValueError(f"{path}: got an unknown field {quote_value(name)}{hint}")
        try:
            found[name] = _read_plain(name, value)
        except (ValueError, TypeError) as error:
            text = str(error).removeprefix(f"{name}: ")
            raise ValueError(f"{path}: {name}: {text}") from None
    return found


def suggest_name(name: str, known: Collection[str]) -> str:
    """Returns the end of a message about an unknown name: the nearest of those that there are."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _is_json(path: str | PathLike) -> bool:
    """Returns whether a file has JSON, else gin; raises ValueError for another suffix."""
    suffix = pathlib.Path(path).suffix
    if suffix not in (".json", ".gin"):
        raise ValueError(f"config: got {str(path)!r}, expected a file named .json or .gin")
    return suffix == ".json"


def to_plain(name: str, value: Any) -> Any:
    """Returns a value as JSON values; raises ValueError for one that has no such form."""
    if isinstance(value, Policy) and type(value) in POLICIES.values():
        kind = _POLICY_NAMES[f"policies.{type(value).__name__}"]
        return {_POLICY: kind, **_changed_fields(value)}
    if isinstance(value, Tree | DynamicTree):
        return write_tree(value)
    if isinstance(value, SamplingConfig):
        # In gin a block with a scope would take what it lacks from the one without.
        own = FILTERS if name == "drafter_sampling" else ()
        return {key: to_plain(key, getattr(value, key)) for key in own} | _changed_fields(value)
    if isinstance(value, ModelDefaults):
        return value.written()
    if hasattr(value, "tolist"):  # first: NumPy's float64 is a float, but gin cannot read its repr
        return np.asarray(value).tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(name, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(name, one) for one in value]
    raise ValueError(f"{name}: got {quote_value(value)}, which no file can hold")


def _changed_fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are not at their defaults, as JSON values."""
    fields = [field for field in dataclasses.fields(value) if field.init]
    given = {field.name: (getattr(value, field.name), field.default) for field in fields}
    return {
        name: to_plain(name, one)
        for name, (one, unset) in given.items()
        if not arguments.is_default(one, unset)
    }


def _read_plain(name: str, value: Any) -> Any:
    """Returns the value of the option `name`, from JSON values."""
    if name == "gamma" and isinstance(value, dict):
        kind = value.get(_POLICY)
        if kind not in POLICIES:
            raise ValueError(
                f"got policy {quote_value(kind)}, expected one of {', '.join(POLICIES)}"
            )
        return _build(POLICIES[kind], {key: one for key, one in value.items() if key != _POLICY})
    if name == "tree" and isinstance(value, str):
        return read_tree(value)
    if name == "generation_config" and isinstance(value, dict):
        for key in value:  # `read` ignores others, as a folder's own file has many
            if key not in KNOWN_FIELDS:
                hint = suggest_name(key, KNOWN_FIELDS)
                raise ValueError(f"got an unknown field {quote_value(key)}{hint}")
        return ModelDefaults.read(value, name)
    if name in ("sampling", "drafter_sampling") and isinstance(value, dict):
        return _build(SamplingConfig, _restore_ids(value))
    return value


def _restore_ids(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns fields of a `SamplingConfig` with integers for ids, which JSON has as text."""

    def restore(value: Any) -> Any:
        if isinstance(value, list):
            return [restore(one) for one in value]
        by_token = isinstance(value, dict)
        return {_read_id(token): one for token, one in value.items()} if by_token else value

    names = [name for name in ("logit_bias", "forced_tokens") if name in fields]
    return fields | {name: restore(fields[name]) for name in names}


def _read_id(token: Any) -> int:
    if type(token) is int or (type(token) is str and re.fullmatch(r"-?[0-9]{1,10}", token)):
        return int(token)
    raise ValueError(f"got id {quote_value(token)}, expected an integer")


def _build(cls: Any, values: dict[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            expected = f"fields of {cls.__name__}: {', '.join(known)}"
            raise ValueError(f"got {quote_value(name)}, expected {expected}")
    return cls(**values)


def to_gin(given: Mapping[str, Any]) -> str:
    """Returns imports and gin bindings of the fields of a `GenerationConfig`.

    T5X reads them too. The file must begin with the import of gin's dynamic registration.
    """
    blocks: dict[str, dict[str, Any]] = {CONFIG: {}}
    for name, value in ((name, to_plain(name, one)) for name, one in given.items()):
        fields = {"text": value} if name == "tree" and value is not None else value
        if not isinstance(fields, dict):
            blocks[CONFIG][name] = repr(value)
            continue
        block = _BLOCKS.get(name) or f"policies.{POLICIES[fields[_POLICY]].__name__}"
        blocks[CONFIG][name] = f"@{block}()"
        blocks[block] = {
            key: repr(one) for key, one in _restore_ids(fields).items() if key != _POLICY
        }
    modules = sorted({block.rpartition("/")[2].partition(".")[0] for block in blocks})
    lines = [f"from specdec_jax.{_MODULES[module]} import {module}" for module in modules]
    for block, fields in blocks.items():
        lines += ["", *(f"{block}.{name} = {value}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"


class _References(config_parser.ParserDelegate):
    """Keeps references as their names instead of resolving them."""

    def configurable_reference(self, name: str, evaluate: bool) -> "_Reference":
        return _Reference(name)

    def macro(self, name: str) -> "_Reference":
        return _Reference(f"%{name}")


class _Reference(str):
    """The name of what a binding refers to."""


def _read_gin(path: str | PathLike) -> dict[str, Any]:
    """Returns a gin file's bindings as JSON values; other bindings than ours are rejected."""
    blocks: dict[str, dict[str, Any]] = {}
    try:
        statements = list(config_parser.ConfigParser(read_text(path, _LARGEST), _References()))
    except (SyntaxError, tokenize.TokenError, RecursionError) as error:
        what = error.args[0] if isinstance(error, tokenize.TokenError) else error
        raise ValueError(f"{path}: {' '.join(str(what).split())}") from None
    for statement in statements:
        if isinstance(statement, config_parser.BindingStatement):
            scope = f"{statement.scope}/" if statement.scope else ""
            fields = blocks.setdefault(scope + statement.selector, {})
            fields[statement.arg_name] = statement.value
        elif not isinstance(statement, _IGNORED):
            raise ValueError(f"{path}: got {type(statement).__name__}, expected bindings alone")
    for block in blocks:
        if block not in (CONFIG, *_BLOCKS.values(), *_POLICY_NAMES):
            raise ValueError(f"{path}: {block}: got bindings of it, expected those of {CONFIG}")
    found = {
        name: _resolve_references(path, name, value, blocks)
        for name, value in blocks.get(CONFIG, {}).items()
    }
    for block in blocks:
        if block not in (CONFIG, *blocks.get(CONFIG, {}).values()):
            name = next((name for name, one in _BLOCKS.items() if one == block), "gamma")
            expected = f"{CONFIG}.{name} = @{block}() too"
            raise mismatch_error(f"{path}: {block}", "bindings that count nowhere", expected)
    return found


def _resolve_references(path: Any, name: str, value: Any, blocks: dict[str, dict[str, Any]]) -> Any:
    """Returns a binding's value with the bindings that it refers to in the place of a reference."""
    if not isinstance(value, _Reference):
        _check_values(path, name, value)
        return value
    kinds = {"gamma": list(_POLICY_NAMES), "drafter_sampling": [_SAMPLING]}.get(name, [])
    kinds += [_BLOCKS[name]] if name in _BLOCKS else []
    if value not in kinds:
        expected = " or ".join(["a value", *(f"@{kind}()" for kind in kinds)])
        raise ValueError(f"{path}: {name}: got @{value}, expected {expected}")
    fields = blocks.get(value, {})
    _check_values(path, value, fields)
    if value == _TREE:
        if list(fields) != ["text"]:
            got = ", ".join(fields) or "nothing"
            raise ValueError(f"{path}: {_TREE}: got {got}, expected its text alone")
        return fields["text"]
    return ({_POLICY: _POLICY_NAMES[value]} if value in _POLICY_NAMES else {}) | fields


def _check_values(path: Any, name: str, value: Any) -> None:
    """Raises ValueError for a reference inside a value, which would be read as a text."""
    if isinstance(value, _Reference):
        raise ValueError(f"{path}: {name}: got @{value}, expected a value")
    if isinstance(value, dict | list | tuple | set):
        for one in [*value, *(value.values() if isinstance(value, dict) else [])]:
            _check_values(path, name, one)
