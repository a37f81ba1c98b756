"""Decodes with beam search: what `generate` does with `num_beams`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specdec_jax.decoding.checks import UnsupportedCombination, check_eos_ids, check_kinds
from specdec_jax.decoding.defaults import defaults_of, fill_search, without_search
from specdec_jax.decoding.generation_config import (
    BEAM_FIELDS,
    CallData,
    ConfigOrPath,
    GenerationConfig,
    split_options,
)
from specdec_jax.decoding.inputs import bucket
from specdec_jax.decoding.request import Plan
from specdec_jax.decoding.request import plan as plan_request
from specdec_jax.decoding.results import (
    Committed,
    GenerationResult,
    NonFiniteLogitsError,
    collect,
    stats_of,
    target_of,
)
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.beam_iteration import search
from specdec_jax.speculative.beam_search import (
    STYLES,
    BeamConfig,
    BeamState,
    best_first,
    first_hypotheses,
)
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import Policy
from specdec_jax.speculative.prefill import PrefillInputs, encode_for, fill_cache
from specdec_jax.speculative.sampling import SamplingConfig, SamplingMode
from specdec_jax.speculative.state import Counts

# The default exponents of the length penalty, in T5X and in transformers.
_PENALTIES = {"t5x": 0.6, "huggingface": 1.0}
# Levels of the drafted tree where `gamma` is "auto".
LEVELS = 3


@dataclasses.dataclass(frozen=True)
class BeamOptions:
    """The options of a beam search, checked.

    Attributes:
      num_beams: K ≥ 1.
      length_penalty: exponent of the length penalty, by which sums of log-probabilities are
        divided; None: 0.6 in T5X's form, 1 in Hugging Face's.
      beam_style: "t5x" or "huggingface": the library whose tokens and scores the search gives.
      early_stopping: False, True or "never", when a search ends; for "huggingface" alone (see
        `speculative.beams`).
      num_return_sequences: number of hypotheses returned for each input, at most K.
      beam_width: u, nodes in each level of the drafted tree, at least K; None: the drafter's
        default, mostly 2·K.

    Raises:
      ValueError: a field outside its range.
      UnsupportedCombination: `early_stopping` in T5X's form.
    """

    num_beams: int
    length_penalty: float | None = None
    beam_style: str = "t5x"
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    beam_width: int | None = None

    def __post_init__(self):
        if not isinstance(self.beam_style, str) or self.beam_style not in STYLES:
            raise ValueError(
                f"beam_style: got {self.beam_style!r}, expected one of {', '.join(STYLES)}"
            )
        whole = arguments.check_integer
        whole("num_beams", self.num_beams, 1, 1024)
        whole("num_return_sequences", self.num_return_sequences, 1, self.num_beams, " = num_beams")
        if self.beam_width is not None:
            whole("beam_width", self.beam_width, self.num_beams, 4096)
        if self.length_penalty is not None:
            least = 0 if self.beam_style == "t5x" else -np.inf
            expected = (
                "a finite number of at least 0" if self.beam_style == "t5x" else "a finite number"
            )
            if (
                not least
                <= arguments.check_number("length_penalty", self.length_penalty, expected)
                < np.inf
            ):
                raise ValueError(f"length_penalty: got {self.length_penalty}, expected {expected}")
        if self.early_stopping != "never":
            arguments.check_kind(
                "early_stopping", self.early_stopping, bool | np.bool_, "False, True or 'never'"
            )
            object.__setattr__(self, "early_stopping", bool(self.early_stopping))
        if self.early_stopping and self.beam_style == "t5x":
            raise UnsupportedCombination(
                f"early_stopping: got {self.early_stopping!r} with beam_style 't5x', "
                "which has a rule of its own, "
                "expected False"
            )

    @property
    def penalty(self) -> float:
        """The exponent of the length penalty, the default in place of None."""
        return (
            _PENALTIES[self.beam_style]
            if self.length_penalty is None
            else float(self.length_penalty)
        )

    def check_ids(self, ends: int, vocab_size: int) -> None:
        """Rejects more beams than ids, and a vocabulary of `ends` alone."""
        if self.num_beams > vocab_size or ends >= vocab_size:
            raise ValueError(
                f"num_beams: got {self.num_beams} for {vocab_size} ids, "
                f"of which {ends} end a sequence, expected at "
                "most as many beams as ids, and an id that ends none"
            )

    def config(
        self, ends: int, mode: SamplingMode, vocab_size: int, gamma: int, drafter: Drafter | None
    ) -> BeamConfig:
        """Returns the static settings.

        Arguments as in `BeamConfig`, and the drafter of its levels, if any.
        """
        width = 0
        if drafter is not None:
            width = min(
                drafter.beam_width(self.num_beams, self.beam_width),
                self.num_beams * (vocab_size - 1),
            )
        return BeamConfig(
            self.num_beams,
            ends,
            mode,
            vocab_size,
            self.beam_style,
            self.early_stopping,
            gamma,
            width,
        )


def beam_options(num_beams: int | None = None, **others) -> BeamOptions | None:
    """Checks the options of a beam search and returns them; None if `num_beams` is None.

    Others that are None are at their defaults.

    Raises:
      ValueError: an option outside its range.
      UnsupportedCombination: another option without `num_beams`.
    """
    others = {name: value for name, value in others.items() if value is not None}
    if num_beams is not None:
        return BeamOptions(num_beams, **others)
    for field in dataclasses.fields(BeamOptions)[1:]:
        if not arguments.is_default(others.get(field.name), field.default):
            raise UnsupportedCombination(
                f"{field.name}: got {others[field.name]!r} without num_beams, "
                f"expected {field.default!r}"
            )
    return None


class Search(NamedTuple):
    """The part of a plan that only a beam search has: the static settings and the options."""

    config: BeamConfig
    options: BeamOptions


def plan_decoding(
    target: LanguageModel,
    inputs: Any,
    *,
    config: ConfigOrPath = None,
    batch_size: int | None = None,
    **options: Any,
) -> Plan:
    """Checks the arguments of `generate`, beam searches included, and returns them as a plan.

    The parameters are those of `request.plan`.
    """
    config, data = split_options(config, options)
    defaults = defaults_of(target, config.generation_config)
    given = {name: getattr(config, name) for name in BEAM_FIELDS}
    beams = beam_options(**fill_search(defaults, given))
    others = dataclasses.replace(config.without_beams(), generation_config=without_search(defaults))
    if beams is None:
        return plan_request(target, inputs, config=others, batch_size=batch_size, **data._asdict())
    try:
        return _plan_search(target, inputs, beams, others, data, batch_size)
    except UnsupportedCombination as error:
        if config.num_beams is not None:
            raise
        hint = (
            f"num_beams = {beams.num_beams} is a default of {target.name or 'the model'};"
            " generation_config=None"
        )
        raise UnsupportedCombination(f"{error} ({hint} decodes without)") from None


def _plan_search(
    target: LanguageModel,
    inputs: Any,
    beams: BeamOptions,
    config: GenerationConfig,
    data: CallData,
    batch_size: int | None,
) -> Plan:
    """Checks the arguments of `generate` for a beam search and returns them as a plan.

    Raises:
      ValueError: more beams than ids, or no id that does not end a sequence; else as `plan`.
      UnsupportedCombination: an argument that means nothing with a beam search, or a drafter that
        cannot draft for one.
    """
    check_kinds(target, config.sampling)
    config.check_beside_beams()
    if isinstance(config.sampling, SamplingConfig):  # else it is known later
        _expect_greedy(config.sampling.mode, config.sampling.temperature)
    check_tree(data.drafter, config.gamma)
    vocab = target.config.vocab_size
    ends = max(1, len(check_eos_ids(target, config.eos_ids)))
    beams.check_ids(ends, vocab)
    if isinstance(config.gamma, str):
        levels = LEVELS if data.drafter is not None else 0
        config = dataclasses.replace(config, gamma=levels)
    plan = plan_request(target, inputs, config=config, batch_size=batch_size, **data._asdict())
    hint = f" (the model {target.name} samples by default: generation_config=None decodes without)"
    _expect_greedy(
        plan.config.mode,
        round(float(max(plan.rows.temperature)), 6),
        hint if config.sampling is None else "",
    )
    static = beams.config(ends, plan.config.mode, vocab, plan.config.gamma, plan.drafter)
    return dataclasses.replace(
        plan, samples=beams.num_return_sequences, search=Search(static, beams)
    )


def _expect_greedy(mode: SamplingMode, temperature: object, hint: str = "") -> None:
    if not mode.greedy:
        raise UnsupportedCombination(
            f"temperature: got {temperature} with num_beams, expected 0: "
            f"beam search draws nothing{hint}"
        )


def check_tree(drafter, gamma) -> None:
    """Rejects a drafter that drafts no trees, and a `gamma` that is no number of levels."""
    if isinstance(gamma, Policy) or arguments.as_array(gamma).ndim:
        raise UnsupportedCombination(
            f"gamma: got {gamma!r} with num_beams, expected 'auto' or one integer, "
            "the levels of the tree"
        )
    if isinstance(drafter, Drafter) and not isinstance(drafter, BeamDrafter):
        raise UnsupportedCombination(
            f"drafter: got {type(drafter).__name__} with num_beams, "
            "expected one that drafts for beams: ModelDrafter, "
            "PromptLookupDrafter, NGramDrafter, or None"
        )


def run_search(target: LanguageModel, plan: Plan, places=None) -> GenerationResult:
    """Runs the search of a plan and returns its result, for the inputs at `places`, given as for
    `Plan.start`."""
    returned = plan.search.options.num_return_sequences
    found = _search(*_arguments(plan, places), returned)
    return _result(target, plan, jax.device_get(found), places)


def start(plan: Plan, places=None) -> BeamState:
    """Makes the state that the search of `run_search` begins with, for callers that look at its
    iterations."""
    return begin(*_arguments(plan, places))


def _arguments(plan: Plan, places) -> tuple:
    """Returns the arguments of `begin` for the inputs at `places`."""
    config, beams = plan.search
    network, drafter, _, _, inputs = dataclasses.replace(plan, samples=1).arguments(places)
    batch, prefix = inputs.tokens.shape
    most = bucket(int(max(plan.limits)))
    eos_ids = np.broadcast_to(np.array(plan.eos_ids or (-1,), np.int32), (batch, config.ends))
    inputs = inputs.replace(eos_ids=eos_ids, keys=None, settings=None, gamma=None, policy=None)
    return network, drafter, config, most, prefix + most, inputs, np.float32(beams.penalty)


@functools.partial(jax.jit, static_argnames=("config", "returned", "most", "longest"))
def _search(
    target: Network,
    drafter: Drafter | None,
    config: BeamConfig,
    most: int,
    longest: int,
    inputs: PrefillInputs,
    penalty: ArrayLike,
    returned: int,
) -> dict:
    """Runs prefill and search in one program and returns what the host reads of the last state.

    Args:
      returned: number of hypotheses to return for each input; all other arguments are those of
        `begin`.
    """
    state = begin(target, drafter, config, most, longest, inputs, penalty)
    state = search(target, drafter, state)  # type: ignore[arg-type]
    best, there = best_first(state)

    def first(x):
        return x[:, :returned]

    return dict(
        best=jax.tree.map(first, best),
        there=first(there),
        steps=state.steps,
        done=state.done,
        failed=state.failed,
        counts=state.counts,
    )


@functools.partial(jax.jit, static_argnames=("config", "most", "longest"))
def begin(
    target: Network,
    drafter: Drafter | None,
    config: BeamConfig,
    most: int,
    longest: int,
    inputs: PrefillInputs,
    penalty: ArrayLike,
) -> BeamState:
    """Runs both encoders once, feeds the prefix and makes the state that a search starts from.

    Args:
      target: the target's network.
      drafter: the drafter; None is plain beam search.
      config: the search's static settings.
      most: an upper bound of the new tokens of a row.
      longest: an upper bound of all tokens of a row, with its start token and decoder prefix, or
        prompt.
      inputs: one row for each input.
      penalty: as in `BeamState`.
    """
    batch, prefix = inputs.tokens.shape
    config = config._replace(mode=config.mode.of(target.skips_padding))
    positions = longest + config.gamma
    # The first term leaves room for the prefix but for its last token, which the live beams feed. K
    # more slots stay empty: a drafter feeds the tokens before the live beams' last ones into the K
    # slots before theirs.
    slots = prefix - 1 + config.beams * (1 + most) + config.gamma * max(config.width, config.beams)
    read = inputs.inputs, inputs.input_lengths, inputs.tokens
    shared = encode_for(target, drafter, inputs)
    cache = fill_cache(target, *read, prefix, **shared)
    cache, draft_state = target.node_cache(cache, slots, positions), None
    if drafter is not None:
        draft_state = drafter.init_beams(*read, config.beams, slots, positions, **shared)
    live, finished = first_hypotheses(inputs.tokens, positions, config)
    zeros = jnp.zeros(batch, jnp.int32)
    return BeamState(
        live=live,
        finished=finished,
        is_finished=jnp.zeros((batch, config.beams), bool),
        prefix_lengths=inputs.prefix_lengths,
        steps=zeros,
        limits=inputs.limits - inputs.prefix_lengths,
        done=inputs.done,
        failed=zeros,
        eos_ids=inputs.eos_ids,
        penalty=penalty,
        sampling=inputs.sampling,
        paths=jnp.broadcast_to(jnp.arange(positions, dtype=jnp.int32), live.tokens.shape),
        starts=inputs.prefix_lengths - 1 + config.beams,
        target_cache=cache,
        draft_state=draft_state,
        counts=Counts.zero(batch, config.gamma),
        config=config,
    )


def _result(target: LanguageModel, plan: Plan, found: dict, places) -> GenerationResult:
    """Trims and detokenises the hypotheses of a search.

    An input whose logits were not finite numbers has none.
    """
    request, best, there = plan.request(places), found["best"], found["there"].reshape(-1)
    source = target_of(target, plan.config)
    errors = [
        NonFiniteLogitsError(source, int(number), int(failed) - 1) if failed else None
        for number, failed in zip(request.inputs, np.repeat(found["failed"], plan.samples))
    ]

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    lengths = np.where(there & ~request.empty, flat(best.lengths), 0)
    log_probs, adjusted = flat(best.log_probs), best.adjusted_log_probs
    none = np.zeros(len(lengths), np.int32)
    committed = Committed(
        tokens=flat(best.tokens),
        lengths=request.prefix_lengths + lengths,
        done=np.repeat(found["done"], plan.samples),
        log_probs=log_probs,
        adjusted_log_probs=log_probs if adjusted is None else flat(adjusted),
        draft_failed=none,
        counts=jax.tree.map(lambda x: np.repeat(x, plan.samples, axis=0), found["counts"]),
        config=plan.config,
    )
    result = collect(target, committed, request, errors)
    reasons = [
        reason if here or error else "none"
        for reason, here, error in zip(result.finish_reasons, there, errors)
    ]
    stats = stats_of(found["counts"], found["steps"], token_by_token=True)
    return result._replace(
        stats=stats,
        scores=np.where(request.empty, 0, flat(best.scores)).astype(np.float32),
        finish_reasons=reasons,
    )
