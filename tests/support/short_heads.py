"""Shared by the tests of shortlist and shortlist_command."""

import functools

import numpy as np
from toy_models import HashModel

import specdec_jax as sd

V, B, GAMMA, LIMIT, EOS = 16, 10, 4, 12, 1
TARGET, DRAFT = HashModel(V, 0), HashModel(V, 1, likeness=0.6)
RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, V, n), EOS] for n in RNG.integers(1, 7, B)]
GAMMAS = [1 + row % GAMMA for row in range(B)]
PREFIXES = [RNG.integers(2, V, row % 5).tolist() for row in range(B)]
LIMITS = [1 if row % 6 == 5 else LIMIT for row in range(B)]


def decode(drafter, order=range(B), target=TARGET, **options):
    def reorder(values):
        return [values[row] for row in order]

    options = (
        dict(
            gamma=reorder(GAMMAS),
            max_new_tokens=reorder(LIMITS),
            decoder_prefix=reorder(PREFIXES),
            eos_ids=[EOS],
            drafter=drafter,
        )
        | options
    )
    return sd.generate(target, reorder(INPUTS), **options)


@functools.cache
def plain():
    return decode(None)


# --- Networks ---

WIDE = 200
