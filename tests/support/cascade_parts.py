"""Shared by the tests of cascade and horizontal_cascade."""

import functools

import jax
import numpy as np
from toy_models import HashModel

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.speculative.sampling import SamplingConfig

V, B, LIMIT, EOS = 16, 12, 12, 1
TARGET, MODEL, OTHER = HashModel(V, 0), HashModel(V, 1, likeness=0.7), HashModel(V, 2, likeness=0.7)
RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, V, n), EOS] for n in RNG.integers(1, 7, B)]
PREFIXES = [RNG.integers(2, V, row % 5).tolist() for row in range(B)]
GAMMAS = [1 + row % 5 for row in range(B)]
LIMITS = [1 if row % 6 == 5 else LIMIT for row in range(B)]
KEY = jax.random.key(0)
model = sd.ModelDrafter(MODEL)


@functools.cache
def table(sampled: bool):
    """Returns a table drafter with fewer ids than the models have.

    Without `sampled` it drafts point masses.
    """
    sequences = np.random.default_rng(2).integers(0, 13, (6, 20)).tolist()
    return sd.NGramDrafter.count(sequences, 13, 2, sampled=sampled)


def run(drafter, config=SamplingConfig(), **options):
    options = (
        dict(
            max_new_tokens=LIMITS, decoder_prefix=PREFIXES, gamma=GAMMAS, eos_ids=(EOS, 8), key=KEY
        )
        | options
    )
    return sd.generate(TARGET, INPUTS, drafter=drafter, sampling=config, **options)


@functools.cache
def plain():
    return run(None)


def teacher_forced(model, row: int, ids) -> np.ndarray:
    """Returns logits `[T, V]` for the T ids that follow a row's prefix."""
    prefix = PREFIXES[row]
    return model.logits([INPUTS[row]], [[0, *prefix, *ids[:-1]]], [len(INPUTS[row])])[
        0, len(prefix) :
    ]


FILTERS = dict(temperature=0.9, top_k=9)


@jax.jit
def drafted(drafter, state, wanted):
    return drafter.draft(state.draft_state, state, wanted)[1]


def first_draft(
    drafter, wanted, config=SamplingConfig(**FILTERS, forbidden_tokens=(3,)), **options
):
    state, request = prepare(
        TARGET,
        INPUTS,
        drafter=drafter,
        gamma=5,
        sampling=config,
        max_new_tokens=LIMIT,
        key=KEY,
        **{"eos_ids": (), "decoder_prefix": PREFIXES} | options,
    )
    return jax.device_get(drafted(request.drafter, state, wanted))


def allowed(logits):
    return np.where(np.arange(V) == 3, -np.inf, logits)
