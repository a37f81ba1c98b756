"""Shared by the tests of engine and engine_caches."""

import functools

import jax
import numpy as np
from engine_inputs import GAMMA, INPUTS, LIMIT, V
from toy_models import noisy_copy, tiny_t5

from specdec_jax.decoding.generate import generate
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.sampling import SamplingConfig

SAMPLED = SamplingConfig(temperature=1.0)
KEY = jax.random.key(0)


@functools.cache
def target() -> LanguageModel:
    return tiny_t5(0, V)


@functools.cache
def drafter(name: str):
    models = {
        "self": target,
        "noisy copy": lambda: noisy_copy(target(), 0.2),
        "unrelated": lambda: tiny_t5(1, V),
    }
    return ModelDrafter(models[name]()) if name != "none" else None


def run(inputs=INPUTS, **options):
    """Runs `generate` with this file's defaults; no id ends a row unless `eos_ids` says so."""
    options = {"max_new_tokens": LIMIT, "eos_ids": (), "gamma": GAMMA, **options}
    return generate(target(), inputs, drafter=drafter(options.pop("drafter", "none")), **options)


@functools.cache
def plain(batch: int = len(INPUTS)):
    """Returns the greedy plain outputs of every input, decoded in batches of `batch`."""
    results = [run(INPUTS[start : start + batch]) for start in range(0, len(INPUTS), batch)]
    return np.concatenate([r.tokens for r in results]), np.concatenate(
        [r.log_probs for r in results]
    )
