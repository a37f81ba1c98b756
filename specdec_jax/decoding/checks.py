"""Rejects models, drafters, policies of γ, verifiers and limits that do not work together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import check_positions
from specdec_jax.speculative import verifiers
from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.tree_drafter import TreeDrafter, drafts_chains
from specdec_jax.speculative.verifier import BaseVerifier

# What may become of a row with logits that are not finite numbers.
NON_FINITE = ("raise", "report")
_LISTED = 10  # the most numbers of inputs in a message


class UnsupportedCombination(ValueError):
    """Options that are valid one by one but make no sense together."""


def check_sampling(sampling: SamplingConfig) -> None:
    """Raises ValueError unless `sampling` is a `SamplingConfig`."""
    expected = "a SamplingConfig, such as SamplingConfig(temperature=0.7)"
    arguments.check_kind("sampling", sampling, SamplingConfig, expected)


class SamplingChanges(NamedTuple):
    """Fields of a `SamplingConfig` that take the place of the model's, from flags of a command.

    The model keeps its other fields.
    """

    fields: Mapping[str, Any]


def check_kinds(target: LanguageModel, sampling: SamplingConfig | SamplingChanges | None) -> None:
    """Raises ValueError for a target or a `sampling` of the wrong kind.

    They are a target that is no model or reads another's encoder output, and a `sampling` that is
    no `SamplingConfig`, where it is not left to the model.
    """
    arguments.check_model("target", target)
    if target.config.encoder_dim is not None:
        raise ValueError(
            "target: got a model that reads another's encoder output, expected one with an encoder"
        )
    if sampling is not None and not isinstance(sampling, SamplingChanges):
        check_sampling(sampling)


def check_prompts(
    target: LanguageModel,
    drafter: Drafter | None,
    lengths: Sequence[int] | np.ndarray,
    limits: int | np.ndarray,
) -> None:
    """Raises ValueError if a prompt and its new tokens need more positions than a model has.

    The models are the target and a drafting model.

    For callers that decode in parts, which would find the longest prompt late; `plan` checks its
    own inputs. Models with an encoder take any length.

    Args:
      target: the target.
      drafter: the drafter, or None.
      lengths: `[B]`, number of ids of each prompt.
      limits: the most new tokens, one number or `[B]`.
    """
    longest = int(max(np.maximum(lengths, 1) + limits))
    for model in (target, *(drafter.models if drafter is not None else ())):
        check_positions(model.config, longest, "inputs" if model is target else "drafter")


def check_pair(target: LanguageModel, drafter: Drafter) -> None:
    """Raises ValueError for a drafter that cannot draft for `target`.

    It is of another vocabulary (PITFALLS row 28), kind, mesh or model.
    """
    if not isinstance(drafter, Drafter):
        got = repr(drafter) if isinstance(drafter, str) else type(drafter).__name__
        if isinstance(drafter, type):
            got = f"the class {drafter.__name__}"
        raise ValueError(
            f"drafter: got {got}, expected a Drafter, such as ModelDrafter(model) or"
            " PromptLookupDrafter() (names are for the command line)"
        )
    if jax.tree_util.all_leaves([drafter]):
        name = type(drafter).__name__
        raise ValueError(
            f"drafter: got {name}, which is no pytree, expected a class decorated with"
            " flax.struct.dataclass"
        )
    required: list[tuple[type[Drafter], tuple[str, ...]]] = [
        (TreeDrafter, ("draft_tree",)),
        (BeamDrafter, ("init_beams", "draft_beams", "move_beams")),
    ]
    if drafts_chains(drafter):
        required.insert(0, (Drafter, ("init", "draft")))
    for base, name in ((base, name) for base, names in required for name in names):
        if isinstance(drafter, base) and getattr(type(drafter), name) is getattr(base, name):
            raise ValueError(
                f"drafter: got {type(drafter).__name__}, which does not define {name}, expected"
                " that it does"
            )
    drafter.check(target)


def check_policy(gamma: Any, drafter: Drafter) -> None:
    """Raises UnsupportedCombination for a policy of γ that lacks the drafter's distributions.

    It reads them, and the drafter provides none.
    """
    if (
        isinstance(gamma, Policy)
        and gamma.needs_probs
        and not (drafter is not None and drafter.provides_probs)
    ):
        raise UnsupportedCombination(
            f"gamma: got {type(gamma).__name__}, which needs draft probabilities, with "
            f"{type(drafter).__name__}, which "
            "provides none, expected an integer, Heuristic or CostAware"
        )


def verifier_settings(
    verifier: BaseVerifier, sampling: SamplingConfig, width: int, batch: int, **given
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
    own = dict(verifier.given)
    for name, value in given.items():
        if value is not None and name in own:
            raise UnsupportedCombination(
                f"{name}: got {value} and {own[name]} of the verifier, expected one of them"
            )
        if value is not None and name not in dict(verifier.parameters):
            owners = [
                one.name
                for one in (*verifiers.VERIFIERS.values(), verifiers.SYNTHETIC)
                if name in dict(one.parameters)
            ]
            raise UnsupportedCombination(
                f"{name}: got {value} with verifier={verifier.name!r}, expected"
                f" {' or '.join(map(repr, owners))}"
            )
    if not verifier.parameters:
        return None
    if not width:
        raise UnsupportedCombination(
            f"verifier: got {verifier.name!r} for plain decoding, expected a drafter and gamma of"
            " at least 1"
        )
    chosen = own | {name: value for name, value in given.items() if value is not None}
    values = {name: chosen.get(name, default) for name, default in verifier.parameters}
    for name, value in values.items():
        if value is None:
            expected = (
                "a number in (0, 1]"
                if name in given
                else f"a number, by Verifier.with_parameters({name}=…)"
            )
            raise UnsupportedCombination(
                f"{name}: got none with verifier={verifier.name!r}, expected {expected}"
            )
    if verifier.sampled_only and not np.all(np.greater(sampling.temperature, 0)):
        raise UnsupportedCombination(
            f"temperature: got {sampling.temperature} with verifier={verifier.name!r}, expected"
            " more than 0 (at 0 it would accept the argmax alone)"
        )
    return {
        name: _setting(name, value, batch, fraction=name in given) for name, value in values.items()
    }


def _setting(name: str, value: Any, batch: int, fraction: bool) -> np.ndarray:
    """Returns a number, or one per input, as `[batch]` float32.

    Raises ValueError unless all are finite or, for a `fraction`, in (0, 1].
    """
    expected = "a number in (0, 1]" if fraction else "a finite number"
    array = arguments.check_numbers(name, value, expected).astype(np.float32)
    if not np.all((array > 0) & (array <= 1) if fraction else np.isfinite(array)):
        raise ValueError(f"{name}: got {value}, expected {expected}")
    if array.ndim and array.shape != (batch,):
        raise ValueError(
            f"{name}: got {array.size} values, expected one or {batch} (one per input)"
        )
    return np.broadcast_to(array, (batch,))


def check_limits(sampling: SamplingConfig, limits: np.ndarray, samples: int) -> None:
    """Raises UnsupportedCombination for sampling that contradicts the limits `[B]` for new tokens.

    It is also raised if several samples are wanted at temperature 0.
    """
    if samples > 1 and sampling.mode.greedy:
        raise UnsupportedCombination(
            f"num_samples: got {samples} at temperature 0, expected 1, since all would be the same"
        )
    if np.any(np.asarray(sampling.min_new_tokens) > limits):
        raise UnsupportedCombination(
            f"min_new_tokens: got {sampling.min_new_tokens}, expected at most max_new_tokens ="
            f" {min(limits)}"
        )
    last = max(sampling.forced_tokens or {}, default=-1)
    if last >= max(limits):
        raise UnsupportedCombination(
            f"forced_tokens: got place {last}, expected below max_new_tokens = {max(limits)}"
        )


def check_eos_ids(target: LanguageModel, eos_ids: Any) -> tuple[int, ...]:
    """Returns the ids that stop a row, by default the model's own.

    Raises ValueError for ids that the model lacks.
    """
    vocab_size = target.config.vocab_size
    eos_ids = target.eos_ids if eos_ids is None else eos_ids
    expected = f"ids from 0 to {vocab_size - 1}"
    ids = (
        (eos_ids,)
        if arguments.is_integer(eos_ids)
        else arguments.check_list("eos_ids", eos_ids, expected)
    )
    if any(not arguments.is_integer(token) or not 0 <= int(token) < vocab_size for token in ids):
        raise ValueError(f"eos_ids: got {arguments.quoted(ids)}, expected {expected}")
    return tuple(map(int, ids))


def check_stop(stop: Any, deadline: Any, target: LanguageModel | None = None) -> tuple[str, ...]:
    """Returns the stop strings.

    Raises ValueError for empty ones, for a deadline that is no positive time, and for stop strings
    with a target that has no vocabulary.
    """
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop: got {stop!r}, expected strings that are not empty")
    if deadline is not None and not (arguments.is_number(deadline) and deadline > 0):
        raise ValueError(f"deadline: got {deadline!r}, expected seconds, more than 0")
    if stop and target is not None and target.vocabulary is None:
        raise ValueError("stop: got strings for a model without a vocabulary, expected none")
    return tuple(stop)


def check_non_finite(non_finite: Any) -> bool:
    """Returns whether rows with logits that are not finite numbers are reported.

    Raises ValueError for another word than "raise" and "report".
    """
    if not isinstance(non_finite, str) or non_finite not in NON_FINITE:
        raise ValueError(
            f"non_finite: got {non_finite!r}, expected {' or '.join(map(repr, NON_FINITE))}"
        )
    return non_finite == "report"


def check_per_row(name: str, value: Any, batch: int, least: int, most: int) -> np.ndarray:
    """Returns one integer, or one per input, as `[batch]` int32.

    Raises ValueError for any outside `least` … `most`.
    """
    expected = f"an integer from {least} to {most}"
    array = arguments.check_numbers(name, value, expected, whole=True)
    if np.any((array < least) | (array > most)):
        raise ValueError(f"{name}: got {value}, expected {expected}")
    if array.ndim and array.shape != (batch,):
        raise ValueError(
            f"{name}: got {array.size} values, expected one or {batch} (one per input)"
        )
    return np.broadcast_to(array.astype(np.int32), (batch,))


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
    if numbers:
        worst = max(lengths)
        takes_all = positions is None or worst < positions
        advice = (
            f"{option}={worst} takes all" if takes_all else f"the model has {positions:,} positions"
        )
        raise ValueError(
            f"{listed(name, numbers, len(lengths), first)}: got"
            f" {'up to ' * (len(numbers) > 1)}{worst:,} tokens, expected at most max_input_length ="
            f" {most}; {advice}"
        )


def listed(name: str, numbers: Sequence[int], total: int, first: int = 1) -> str:
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
