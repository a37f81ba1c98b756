"""Rejects models, drafters, policies of γ, verifiers and limits that do not work together."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import check_positions, is_decoder_only
from specdec_jax.speculative import verifiers
from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.drafter import Drafter, TreeDrafter, can_draft_chains
from specdec_jax.speculative.policy import Policy
from specdec_jax.speculative.sampling import FILTERS, SamplingConfig, SamplingMode
from specdec_jax.speculative.verifier import BaseVerifier

_LISTED = 10  # the most numbers of inputs in a message


class UnsupportedCombination(ValueError):
    """Options that are valid one by one but make no sense together."""


def unsupported(name: object, got: object, expected: object) -> UnsupportedCombination:
    """Makes the error of an option beside others: its name, what was got and expected."""
    return UnsupportedCombination(f"{name}: got {got}, expected {expected}")


class SamplingChanges(NamedTuple):
    """Fields of a `SamplingConfig` that take the place of the model's, from flags of a command.

    The model keeps its other fields.
    """

    fields: Mapping[str, Any]


def check_sampling(sampling: SamplingConfig) -> None:
    """Raises ValueError unless `sampling` is a `SamplingConfig`."""
    expected = "a SamplingConfig, such as SamplingConfig(temperature=0.7)"
    arguments.check_kind("sampling", sampling, SamplingConfig, expected)


def check_drafter_sampling(
    own: SamplingConfig | None,
    target: SamplingConfig,
    drafter: Drafter | None,
    tree: Any,
    may_sample: bool = False,
) -> None:
    """Raises for a `SamplingConfig` of a drafter that means nothing beside the target's.

    With `may_sample` a call may have another temperature than `target`.

    Raises:
      ValueError: it is none.
      UnsupportedCombination: there is no drafter, or one that does not draw; the target decodes by
        argmax; a processor, since drafts pass through the target's; or argmax in a tree, whose
        children would not be drawn.
    """
    if own is None:
        return
    arguments.check_kind("drafter_sampling", own, SamplingConfig, "a SamplingConfig, or None")
    for field in dataclasses.fields(own):
        given, unset = getattr(own, field.name), field.default
        same = arguments.is_default(given, getattr(target, field.name))
        if field.name not in FILTERS and not same and not arguments.is_default(given, unset):
            got = f"{field.name} {arguments.quote(given)}"
            expected = f"{', '.join(FILTERS)} alone: processors are the target's"
            raise unsupported("drafter_sampling", got, expected)
    if drafter is None:
        raise unsupported("drafter_sampling", "one without a drafter", "None")
    if not drafter.draws:
        got = f"one with {type(drafter).__name__}, which does not draw from distributions"
        raise unsupported("drafter_sampling", got, "None")
    if target.mode.greedy and not may_sample:
        got = "one beside a target at temperature 0"
        raise unsupported("drafter_sampling", got, "None: the best draft is the drafter's argmax")
    if tree is not None and np.any(np.equal(own.temperature, 0)):
        raise unsupported("drafter_sampling", "temperature 0 with a tree", "more than 0")


def check_target(target: LanguageModel) -> None:
    """Raises ValueError for a target that is no model or reads another's encoder output."""
    arguments.check_model("target", target)
    if target.config.encoder_dim is not None:
        got = "a model that reads another's encoder output"
        raise ValueError(f"target: got {got}, expected one with an encoder")


def check_prompts(
    target: LanguageModel,
    drafter: Drafter | None,
    lengths: Sequence[int] | np.ndarray,
    limits: int | np.ndarray,
) -> None:
    """Raises ValueError if a prompt and its new tokens need more positions than a model has.

    For callers that decode in parts, which would find the longest prompt late; `plan` checks its
    own inputs.

    Args:
      target: the target.
      drafter: the drafter, whose models are checked too, or None.
      lengths: `[B]`, number of ids of each prompt, or of the start token and a decoder prefix.
      limits: the most new tokens, one number or `[B]`.
    """
    longest = int(max(np.maximum(lengths, 1) + limits))
    for model in (target, *(drafter.models if drafter is not None else ())):
        check_positions(model.config, longest, "inputs" if model is target else "drafter")


def check_drafter_kind(drafter: Any) -> None:
    """Raises ValueError for what is no drafter."""
    if not isinstance(drafter, Drafter):
        got = repr(drafter) if isinstance(drafter, str) else type(drafter).__name__
        got = f"the class {drafter.__name__}" if isinstance(drafter, type) else got
        expected = "a Drafter, such as ModelDrafter(model) or PromptLookupDrafter()"
        raise ValueError(
            f"drafter: got {got}, expected {expected} (names are for the command line)"
        )


def check_pair(target: LanguageModel, drafter: Drafter) -> None:
    """Raises ValueError for a drafter that cannot draft for `target`.

    It is of another vocabulary (PITFALLS row 28), kind, mesh or model, or it lacks a method.
    """
    check_drafter_kind(drafter)
    name = type(drafter).__name__
    if jax.tree_util.all_leaves([drafter]):
        expected = "a class decorated with flax.struct.dataclass"
        raise ValueError(f"drafter: got {name}, which is no pytree, expected {expected}")
    required: dict[type[Drafter], tuple[str, ...]] = {
        Drafter: ("draft",) if can_draft_chains(drafter) else (),
        TreeDrafter: ("draft_tree",),
        BeamDrafter: ("init_beams", "draft_beams", "move_beams"),
    }
    for base, method in ((base, method) for base, names in required.items() for method in names):
        if isinstance(drafter, base) and getattr(type(drafter), method) is getattr(base, method):
            got = f"{name}, which does not define {method}"
            raise ValueError(f"drafter: got {got}, expected that it does")
    drafter.check(target)


def check_memory(drafter: Drafter, verifier: BaseVerifier, mode: SamplingMode) -> None:
    """Raises UnsupportedCombination where outputs would depend on what a drafter `remembers`."""
    if drafter.remembers and not (verifier.coupled or (mode.greedy and verifier.exact)):
        got = f"{verifier.name!r} with a drafter that learns from outputs"
        expected = "an exact verifier" if mode.greedy else "'gumbel' above temperature 0"
        raise unsupported("verifier", got, expected)


def check_policy(gamma: Any, drafter: Drafter) -> None:
    """Raises UnsupportedCombination for a policy that needs probabilities the drafter lacks."""
    if isinstance(gamma, Policy) and gamma.needs_probs and not drafter.provides_probs:
        got = f"{type(gamma).__name__}, which needs draft probabilities"
        other = f"{type(drafter).__name__}, which provides none"
        expected = "an integer, Heuristic or CostAware"
        raise UnsupportedCombination(f"gamma: got {got}, with {other}, expected {expected}")


def verifier_settings(
    verifier: BaseVerifier, sampling: SamplingConfig, width: int, batch: int, **given: Any
) -> dict[str, np.ndarray] | None:
    """Returns the verifier's parameters, `[batch]` float32 each, None for a verifier without any.

    Args:
      verifier: the verifier.
      sampling: how the target samples; some verifiers need a temperature above 0.
      width: the most tokens that are drafted, 0 for plain decoding.
      batch: number of inputs.
      given: parameters of all verifiers by name, None if not given.

    Raises:
      UnsupportedCombination: a parameter of another verifier, a missing one, or a verifier that
        has nothing to verify.
    """
    own, parameters = dict(verifier.given), dict(verifier.parameters)
    chosen = {name: value for name, value in given.items() if value is not None}
    beside = f"with verifier={verifier.name!r}"
    for name, value in chosen.items():
        if name in own:
            got = f"{arguments.quote(value)} and {own[name]} of the verifier"
            raise UnsupportedCombination(f"{name}: got {got}, expected one of them")
        if name not in parameters:
            known = (*verifiers.VERIFIERS.values(), verifiers.SYNTHETIC)
            owners = " or ".join(repr(one.name) for one in known if name in dict(one.parameters))
            got = f"{arguments.quote(value)} {beside}"
            raise UnsupportedCombination(f"{name}: got {got}, expected {owners}")
    if not parameters:
        return None
    if not width:
        got, expected = f"{verifier.name!r} for plain decoding", "a drafter and gamma of at least 1"
        raise UnsupportedCombination(f"verifier: got {got}, expected {expected}")
    values = parameters | own | chosen
    for name in (name for name, value in values.items() if value is None):
        by = f"a number, by Verifier.with_parameters({name}=…)"
        expected = "a number in (0, 1]" if name in given else by
        raise UnsupportedCombination(f"{name}: got none {beside}, expected {expected}")
    if verifier.sampled_only and not np.all(np.greater(sampling.temperature, 0)):
        expected = "more than 0 (at 0 it would accept the argmax alone)"
        got = f"{arguments.quote(sampling.temperature)} {beside}"
        raise UnsupportedCombination(f"temperature: got {got}, expected {expected}")
    return {
        name: _make_setting(name, value, batch, fraction=name in given)
        for name, value in values.items()
    }


def _make_setting(name: str, value: Any, batch: int, fraction: bool) -> np.ndarray:
    """Returns a number, or one per input, as `[batch]` float32.

    Raises ValueError unless all are finite or, for a `fraction`, in (0, 1].
    """
    expected = "a number in (0, 1]" if fraction else "a finite number"
    array = arguments.check_numbers(name, value, expected).astype(np.float32)
    if not np.all((array > 0) & (array <= 1) if fraction else np.isfinite(array)):
        raise mismatch_error(name, arguments.quote(value), expected)
    return _spread_over_rows(name, array, batch)


def check_per_row(name: str, value: Any, batch: int, least: int, most: int) -> np.ndarray:
    """Returns one integer, or one per input, as `[batch]` int32.

    Raises ValueError for any outside `least` … `most`.
    """
    expected = f"an integer from {least} to {most}"
    array = arguments.check_numbers(name, value, expected, whole=True)
    if ((array < least) | (array > most)).any():
        raise mismatch_error(name, arguments.quote(value), expected)
    return _spread_over_rows(name, array.astype(np.int32), batch)


def _spread_over_rows(name: str, array: np.ndarray, batch: int) -> np.ndarray:
    if array.ndim and array.shape != (batch,):
        expected = f"one or {batch} (one per input)"
        raise ValueError(f"{name}: got {array.size} values, expected {expected}")
    return np.full(batch, array)


def check_limits(sampling: SamplingConfig, limits: np.ndarray, samples: int) -> None:
    """Raises UnsupportedCombination for sampling that contradicts the limits `[B]` for new tokens.

    It is also raised if several samples are wanted at temperature 0.
    """
    lasts = [max(row, default=-1) for row in sampling.list_forced_tokens()]
    ends = limits if len(lasts) == len(limits) else [min(limits)] * len(lasts)
    least = sampling.min_new_tokens
    last, end = max(zip(lasts, ends), key=lambda pair: pair[0] - pair[1])
    greedy = f"{samples} at temperature 0, expected 1, since all would be the same"
    short = f"{least}, expected at most max_new_tokens = {min(limits)}"
    late = f"place {last}, expected below max_new_tokens = {end}"
    for name, wrong, message in (
        ("num_samples", samples > 1 and sampling.mode.greedy, greedy),
        ("min_new_tokens", np.any(np.asarray(least) > limits), short),
        ("forced_tokens", last >= end, late),
    ):
        if wrong:
            raise UnsupportedCombination(f"{name}: got {message}")


def check_eos_ids(target: LanguageModel, eos_ids: Any) -> tuple[int, ...]:
    """Returns the ids that stop a row, by default the model's own.

    Raises ValueError for ids that the model lacks.
    """
    vocab_size = target.config.vocab_size
    eos_ids = target.eos_ids if eos_ids is None else eos_ids
    expected, one = f"ids from 0 to {vocab_size - 1}", arguments.is_integer(eos_ids)
    ids = (eos_ids,) if one else arguments.check_list("eos_ids", eos_ids, expected)
    if any(not arguments.is_integer(token) or not 0 <= int(token) < vocab_size for token in ids):
        raise ValueError(f"eos_ids: got {arguments.quote(ids)}, expected {expected}")
    return tuple(map(int, ids))


def check_stop(stop: Any, deadline: Any, target: LanguageModel | None = None) -> tuple[str, ...]:
    """Returns the stop strings.

    Raises ValueError for empty ones, for a deadline that is no positive time, and for stop strings
    with a target that has no vocabulary.
    """
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop: got {arguments.quote(stop)}, expected strings that are not empty")
    if deadline is not None and not (arguments.is_number(deadline) and 0 < deadline < np.inf):
        got = arguments.quote(deadline)
        raise ValueError(f"deadline: got {got}, expected seconds, more than 0 and finite")
    if stop and target is not None and target.vocabulary is None:
        raise ValueError("stop: got strings for a model without a vocabulary, expected none")
    return tuple(stop)


def check_non_finite(non_finite: Any) -> None:
    """Raises ValueError for another word than "raise" and "report"."""
    if not isinstance(non_finite, str) or non_finite not in ("raise", "report"):
        got = arguments.quote(non_finite)
        raise ValueError(f"non_finite: got {got}, expected 'raise' or 'report'")


def check_drafter_inputs(drafter: Drafter, longest: int) -> None:
    """Raises ValueError if an input has more tokens than a drafter's encoder has positions."""
    for model in drafter.models:
        config = model.config
        own_encoder = not is_decoder_only(model) and config.encoder_dim is None
        if own_encoder and config.max_positions is not None and longest > config.max_positions:
            got, most = f"an input of {longest} tokens", config.max_positions
            raise mismatch_error("drafter", got, f"at most the {most} positions of its encoder")


def cut_to_positions(target: LanguageModel, longest: int) -> int:
    """Returns the most tokens of an input: `longest`, or the positions of an encoder, if fewer."""
    positions = target.config.max_positions
    return longest if positions is None or is_decoder_only(target) else min(longest, positions)


def check_input_lengths(
    name: str,
    lengths: Sequence[int],
    most: int,
    positions: int | None,
    first: int = 0,
    option: str = "max_input_length",
) -> None:
    """Raises ValueError, which says how many inputs are too long, which, and what would do.

    Args:
      name: what an input is called.
      lengths: number of tokens of each input.
      most: the limit, `max_input_length`.
      positions: the most tokens of a sequence that the model takes; None: any number.
      first: number of the first input in messages.
      option: what sets the limit.
    """
    numbers = [number for number, length in enumerate(lengths) if length > most]
    if not numbers:
        return
    worst, which = max(lengths), list_in_words(name, numbers, len(lengths), first)
    up_to, advice = "up to " * (len(numbers) > 1), f"{option}={worst} takes all"
    if positions is not None and worst >= positions:
        advice = f"the model has {positions:,} positions"
    expected = f"at most max_input_length = {most}; {advice}"
    raise ValueError(f"{which}: got {up_to}{worst:,} tokens, expected {expected}")


def list_in_words(name: str, numbers: Sequence[int], total: int, first: int = 1) -> str:
    """Returns numbers in words, "sentence 3" or "sentences 3, 5 (2 of 12)"; long lists are cut.

    Args:
      name: what is numbered.
      numbers: the numbers, from 0.
      total: how many there are.
      first: number that stands for 0 in the text.
    """
    if len(numbers) == 1:
        return f"{name} {numbers[0] + first}"
    shown = [str(number + first) for number in sorted(numbers)[:_LISTED]]
    more = [f"{len(numbers) - _LISTED:,} more"] if len(numbers) > _LISTED else []
    return f"{name}s {', '.join([*shown, *more])} ({len(numbers):,} of {total:,})"
