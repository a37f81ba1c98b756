"""Shared by the tests of lookup and prompt_lookup."""

import functools

import numpy as np
from toy_models import HashModel

import specdec_jax as sd

V, B, GAMMA, LIMIT, EOS = 16, 12, 4, 12, 1
TARGET = HashModel(V, 0)
RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, V, n), EOS] for n in RNG.integers(1, 7, B)]
PREFIXES = [RNG.integers(2, V, row % 5).tolist() for row in range(B)]
LIMITS = [1 if row % 6 == 5 else LIMIT for row in range(B)]
OPTIONS = dict(max_new_tokens=LIMITS, decoder_prefix=PREFIXES, eos_ids=[EOS])


@functools.cache
def plain():
    """Returns greedy rows with prefixes of 0 to 4 tokens, and one or more new tokens."""
    return sd.generate(TARGET, INPUTS, **OPTIONS)
