"""Flags for the fields of a `GenerationConfig` and of its `sampling`.

Their names, types, defaults and help are those of the fields.
"""

import dataclasses
import functools
import operator
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.decoding.checks import SamplingChanges, UnsupportedCombination, unsupported
from specdec_jax.decoding.generation_config import FIELDS, MODELS, GenerationConfig
from specdec_jax.decoding.request import FIXED
from specdec_jax.decoding.search_options import check_beam_options
from specdec_jax.models import arguments
from specdec_jax.models.arguments import make_option
from specdec_jax.speculative.policies import POLICIES
from specdec_jax.speculative.policy import MAX_GAMMA, Policy
from specdec_jax.speculative.sampling import FILTERS, SamplingConfig
from specdec_jax.speculative.tree_text import EXPECTED, read_tree
from specdec_jax.speculative.trees import DynamicTree, Tree

_SAMPLING = {field.name: field for field in dataclasses.fields(SamplingConfig)}
# Fields without a flag: no text gives their value; `sampling` has a flag for each of its fields.
_NO_FLAG = (
    *("sampling", "eos_ids", "synthetic_alpha"),
    *("vocabulary_mask", "processor", "forbidden_sequences"),
)
# How flags write what is no number or word, after the help.
_FORMS = {
    "drafter_sampling": ", as temperature:1.5,top_k:40",
    "tree": f": {EXPECTED}",
    "stop": "; repeatable",
    "forbidden_tokens": "; comma-separated",
    "logit_bias": ", as ID:NUMBER; repeatable",
    "forced_tokens": ", as PLACE:ID; repeatable",
}
# The values of words.
_WORDS: dict[str, dict[str, Any]] = {
    "early_stopping": {"false": False, "true": True, "never": "never"},
    "generation_config": {MODELS: MODELS, "none": None},
}
# Fields whose lists are one value for all inputs.
_LISTS = ("eos_ids", "stop", "vocabulary_mask", "forbidden_tokens", "forbidden_sequences")
POLICY_HELP = (
    "how the number of drafted tokens, or of a tree's nodes, adapts while decoding, with"
    f" --gamma as its maximum (if that is auto: 4, of a tree all nodes, up to {MAX_GAMMA}):"
    f" fixed, {', '.join(POLICIES)}"
)
SETTINGS_HELP = "NAME:NUMBER, a setting of --gamma_policy; repeatable; " + "; ".join(
    f"{name} has {', '.join(cls.numbers())}" for name, cls in POLICIES.items()
)


_OWN: Any = object()  # the default of a field


def make_flag(name: str, default: Any = _OWN, unset: str = "") -> Any:
    """Returns the option of a field of `GenerationConfig` or `SamplingConfig`, with its help.

    Args:
      name: name of the field.
      default: the flag's default; by default the field's.
      unset: what a default None stands for; by default what the field's metadata say.
    """
    field = (FIELDS | _SAMPLING)[name]
    text = _documentation()[name] + _FORMS.get(name, "")
    default = field.default if default is _OWN else default
    if typing.get_origin(_flag_type(field.type)) is tuple:
        return make_option(default or (), text)
    unset = unset or field.metadata.get("unset", "")
    return make_option(default, f"{text} (default: {unset})" if default is None and unset else text)


@functools.cache
def _documentation() -> Mapping[str, str]:
    """Returns what each field means; for a `SamplingConfig` its docstring has it."""
    listed = arguments.read_attributes(SamplingConfig).items()
    texts = {name: text.lstrip("* ").rstrip(".") for name, text in listed}
    return texts | {name: field.metadata["doc"] for name, field in FIELDS.items()}


def _flag_type(kind: Any) -> Any:
    """Returns the type of a flag that gives one value to a field of this type."""
    parts = {part: typing.get_origin(part) for part in (*typing.get_args(kind), kind)}
    if Sequence[str] in parts or Mapping in parts.values():
        return tuple[str, ...]
    if kind == Sequence[int]:
        return tuple[int, ...]
    single = [one for one in (int, float, str) if one in parts] or [str]
    return functools.reduce(operator.or_, single)


def is_given(value: Any) -> bool:
    """Returns whether an option has another value than None and ()."""
    return value is not None and not (isinstance(value, tuple) and not value)


def read_sampling(flags: Any) -> dict[str, Any]:
    """Returns the fields of a `SamplingConfig` that `flags` give.

    Raises:
      ValueError: text of another form.
    """
    given = {name: getattr(flags, name) for name in _SAMPLING if name not in _NO_FLAG}
    given = {name: value for name, value in given.items() if is_given(value)}
    kinds: dict[str, type] = {"logit_bias": float, "forced_tokens": int}
    return given | {
        name: _read_pairs(name, given[name], int, kind)
        for name, kind in kinds.items()
        if name in given
    }


def _read_pairs(name: str, items: Sequence[str], key: type, kind: type) -> dict[Any, Any]:
    """Returns `{5: value}` for `("5:value",)`."""
    words, got = {int: "integer", float: "number", str: "name"}, f"got {', '.join(items)!r}"
    try:
        pairs = [(key(left), kind(right)) for left, right in (item.split(":") for item in items)]
    except ValueError:
        raise ValueError(f"{name}: {got}, expected {words[key]}:{words[kind]}") from None
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"{name}: {got}, expected every {words[key]} once")
    return dict(pairs)


def _read_filters(name: str, text: str) -> SamplingConfig:
    """Returns a drafter's `SamplingConfig`, from `temperature:0.7,top_k:20`.

    Raises:
      ValueError: text of another form, or a value outside its range.
    """
    values = _read_pairs(name, text.split(","), str, float)
    for unknown in values.keys() - set(FILTERS):
        raise ValueError(f"{name}: got {unknown!r}, expected {', '.join(FILTERS)}")
    whole = {key: int(value) for key, value in values.items() if key == "top_k"}
    return SamplingConfig(**{**values, **whole})


def read_gamma(
    gamma: int | str,
    policy: str = "fixed",
    settings: Sequence[str] = (),
    tree: Tree | DynamicTree | None = None,
) -> int | str | Policy:
    """Returns γ of `generate`: `gamma` itself, or the policy with `gamma` as its maximum.

    With a policy "auto" is 4, or all nodes of the tree; `settings` are NAME:NUMBER.

    Raises:
      ValueError: no such policy, or settings that it does not have.
    """
    numbers = _read_pairs("gamma_settings", settings, str, float)
    if policy != "fixed" and policy not in POLICIES:
        expected = f"one of fixed, {', '.join(POLICIES)}"
        raise ValueError(f"gamma_policy: got {policy!r}, expected {expected}")
    known = {} if policy == "fixed" else POLICIES[policy].numbers()
    for name in numbers.keys() - known.keys():
        expected = f"one of {', '.join(known)}" if known else "none"
        raise unsupported("gamma_settings", f"{name!r} with gamma_policy={policy!r}", expected)
    if policy == "fixed":
        return gamma
    if gamma == "auto":
        gamma = FIXED if tree is None else min(tree.size - 1, MAX_GAMMA)
    values = {name: int(one) if one.is_integer() else one for name, one in numbers.items()}
    return POLICIES[policy](gamma, **values) if gamma else 0


def check_gamma(gamma: int | str, most: int = MAX_GAMMA) -> None:
    """Raises ValueError for a γ that is out of range."""
    if gamma != "auto" and (isinstance(gamma, str) or not 0 <= gamma <= most):
        raise ValueError(f"gamma: got {gamma}, expected an integer from 0 to {most}, or auto")


def _read_value(name: str, value: Any) -> Any:
    if name == "tree":
        return read_tree(value)
    if name == "drafter_sampling":
        return _read_filters(name, value)
    words = _WORDS.get(name)
    if words is None:
        return value
    if value.lower() not in words:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(words)}")
    return words[value.lower()]


def read_options(flags: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns the options of `generate` with these names that `flags` give.

    Raises:
      ValueError: text of another form.
    """
    given = {name: value for name in names if is_given(value := getattr(flags, name))}
    return {name: _read_value(name, value) for name, value in given.items()}


def _make_fields() -> list[tuple[str, Any, Any]]:
    """Returns name, type and field of each flag, with None, or (), for what is not given."""
    flags = []
    for name in (name for name in FIELDS | _SAMPLING if name not in _NO_FLAG):
        default, kind = make_flag(name).default, _flag_type((FIELDS | _SAMPLING)[name].type)
        model = "the model's, else " if name in _SAMPLING else ""
        unset = f"{model}{default}" if is_given(default) else ""
        several = typing.get_origin(kind) is tuple
        flags.append((name, kind if several else kind | None, make_flag(name, None, unset)))
    return flags


_Unset: Any = dataclasses.make_dataclass("_Unset", _make_fields(), frozen=True)


@dataclasses.dataclass(frozen=True)
class GenerationFlags(_Unset):
    """A flag for each option of `generate`; None, or (), where it is not given."""

    def change(self, config: GenerationConfig) -> GenerationConfig:
        """Returns the configuration with the flags that are given in the place of its options.

        Options of sampling, given by either, take the place of the model's one by one. Of biased,
        forbidden and forced tokens the model's stay where neither gives any.

        Raises:
          ValueError: a flag of another form, or as for `GenerationConfig`.
        """
        changes = read_options(self, [name for name in FIELDS if name not in (*_NO_FLAG, "gamma")])
        before = _field_values(config.sampling)
        sampling = {name: value for name, value in before.items() if is_given(value)}
        if sampling := sampling | read_sampling(self):
            changes["sampling"] = SamplingChanges(sampling)
        changes["gamma"] = self._gamma(config.gamma, changes.get("tree", config.tree))
        return dataclasses.replace(config, **changes)

    def _gamma(self, given: Any, tree: Tree | DynamicTree | None) -> Any:
        """Returns γ; a policy, `given`, keeps what no flag changes."""
        before = given if isinstance(given, Policy) else None
        changed = self.gamma is not None or self.gamma_policy or self.gamma_settings
        if before and type(before) not in POLICIES.values() and not changed:
            return before  # one that no flag names
        own = next((name for name, cls in POLICIES.items() if type(before) is cls), "fixed")
        name, gamma = self.gamma_policy or own, self.gamma
        if gamma is None:
            gamma = given if before is None else before.maximum
        if isinstance(gamma, int | str) and (before is None or self.gamma is not None):
            check_gamma(gamma, MAX_GAMMA if tree is None else tree.size - 1)
        made = read_gamma(gamma, name, self.gamma_settings, tree)
        if name != own or self.gamma_settings or not (before and isinstance(made, Policy)):
            return made
        return dataclasses.replace(before, maximum=made.maximum)


def _field_values(fields: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass by name, none for anything else."""
    known = dataclasses.fields(fields) if dataclasses.is_dataclass(fields) else ()
    return {field.name: getattr(fields, field.name) for field in known}


def unset_flags(config: GenerationConfig) -> dict[str, Any]:
    """Returns flags, not given, of the options that a configuration has off their defaults."""
    names = {*config.changed_fields(), *_field_values(config.sampling)} - {*_NO_FLAG, "non_finite"}
    unset = {field.name: field.default for field in dataclasses.fields(GenerationFlags)}
    policy = {"gamma_policy": None, "gamma_settings": ()} if "gamma" in names else {}
    return {name: unset[name] for name in names} | policy


def check_one_value(config: GenerationConfig) -> None:
    """Raises ValueError for a configuration with an option that has one value per input."""
    parts: dict[str, Any] = {"": config, "sampling.": config.sampling, "gamma.": config.gamma}
    for prefix, part in parts.items():
        names = part.numbers() if isinstance(part, Policy) else _field_values(part)
        for name in names:
            value = getattr(part, name)
            if name not in _LISTS and isinstance(value, list | tuple | np.ndarray):
                got = f"{prefix}{name}: got {arguments.quote(value)}"
                raise ValueError(f"{got}, expected one value for all inputs")


def check_beside_beams(flags: Any, **usual: Any) -> None:
    """Raises UnsupportedCombination for options off their `usual` values beside a beam search."""
    for name, value in usual.items() if flags.num_beams is not None else ():
        if is_given(got := getattr(flags, name)) and got != value:
            expected = value if isinstance(value, str | float) else "none"
            raise UnsupportedCombination(f"{name}: got {got!r} with num_beams, expected {expected}")


@dataclasses.dataclass(frozen=True)
class SearchFlags:
    """Flags that say which beam search it is, for commands that time it."""

    num_beams: int | None = make_flag("num_beams", None, "none")
    length_penalty: float | None = make_flag(
        "length_penalty", None, "0.6, or 1 with --beam_style=huggingface"
    )
    beam_style: str = make_flag("beam_style", "t5x")
    early_stopping: str = make_flag("early_stopping", "false")

    def search(self, **others: Any) -> dict[str, Any]:
        """Returns the arguments of `generate` for a beam search, none without one.

        `others` are those of them that these flags do not give.

        Raises:
          ValueError: values outside their range, or options that mean nothing without `num_beams`.
        """
        names = [field.name for field in dataclasses.fields(SearchFlags)]
        given = read_options(self, names)
        return {} if check_beam_options(**given, **others) is None else given | others


def width_option(default: str) -> Any:
    """Returns the field of several widths, timed in turn; `default` is timed without it."""
    text = f"{FIELDS['beam_width'].metadata['doc']}; several, comma-separated, are timed in turn"
    return make_option((), f"{text} (default: {default})")
