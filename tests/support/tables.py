"""What the tests of lookup and of prompt_lookup share."""

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
    """Greedy rows: prefixes of 0 to 4 tokens, one new token or several."""
    return sd.generate(TARGET, INPUTS, **OPTIONS)
