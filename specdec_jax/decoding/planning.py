"""Chooses how a call of `generate` is decoded, and checks its arguments."""

import dataclasses
from typing import Any

import numpy as np

from specdec_jax.decoding.checks import UnsupportedCombination, check_eos_ids, check_target
from specdec_jax.decoding.defaults import fill_search, read_defaults
from specdec_jax.decoding.generation_config import (
    BEAM_FIELDS,
    CallData,
    ConfigOrPath,
    GenerationConfig,
    split_options,
)
from specdec_jax.decoding.request import Plan
from specdec_jax.decoding.request import plan as plan_request
from specdec_jax.decoding.search_options import (
    LEVELS,
    BeamOptions,
    check_beam_options,
    check_drafting,
    check_greedy,
)
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.sampling import SamplingConfig


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
    defaults = read_defaults(target, config.generation_config)
    given = {name: value for name in BEAM_FIELDS if (value := getattr(config, name)) is not None}
    beams = check_beam_options(**fill_search(defaults, given))
    others = config
    if given or beams is not None:
        unset: dict[str, Any] = dict.fromkeys(BEAM_FIELDS)
        defaults = defaults.replace(num_beams=None)
        others = dataclasses.replace(config, generation_config=defaults, **unset)
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
    check_target(target)
    config.check_beside_beams()
    if isinstance(config.sampling, SamplingConfig):  # else it is known later
        check_greedy(config.sampling.mode, config.sampling.temperature)
    check_drafting(data.drafter, config.gamma)
    vocab = target.config.vocab_size
    ends = max(1, len(check_eos_ids(target, config.eos_ids)))
    beams.check_ids(ends, vocab)
    if isinstance(config.gamma, str):
        levels = LEVELS if data.drafter is not None else 0
        config = dataclasses.replace(config, gamma=levels)
    plan = plan_request(target, inputs, config=config, batch_size=batch_size, **data._asdict())
    mode, temperature = plan.config.mode, round(float(max(plan.rows.temperature)), 6)
    hint = f" (the model {target.name} samples by default: generation_config=None decodes without)"
    check_greedy(mode, temperature, hint if config.sampling is None else "")
    static = beams.config(ends, mode, vocab, plan.config.gamma, plan.drafter)
    static = static._replace(max_new=bucket_length(int(max(plan.limits))))
    return dataclasses.replace(
        plan,
        config=static,
        slots=static.count_slots(plan.prefix.shape[1], static.max_new),
        settings={"length_penalty": np.full(len(plan.limits), beams.penalty, np.float32)},
    )
