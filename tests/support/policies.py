"""A target, drafts and the enumeration that tests of policies of γ share."""

import functools

import numpy as np
import toy
from distribution_samples import V
from toy_models import HashModel

import specdec_jax as sd

G, B, LIMIT, EOS = 4, 12, 14, 1
# A drafter whose confidence varies: the q of its most probable token is from 0.4 to 0.9.
TARGET, DRAFT = HashModel(V, 0), HashModel(V, 1, likeness=0.5, spread=16)
RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, V, n), EOS] for n in RNG.integers(1, 7, B)]
PREFIXES = [RNG.integers(2, V, row % 3).tolist() for row in range(B)]
LIMITS = [1 if row % 6 == 5 else LIMIT for row in range(B)]
OPTIONS = dict(max_new_tokens=LIMITS, decoder_prefix=PREFIXES, eos_ids=[EOS])


# --- The distribution, by enumeration ---


def enumerated(
    target, draft, limit: int, verifier, start, gamma_of, update, last=lambda q, x: False
):
    """Returns the distribution of `limit` ids after three iterations of a policy.

    γ follows from the policy's state and the draft's first distribution; each iteration then
    updates the state.
    """
    rule, states = toy.Rule(verifier=verifier, last=last), {((), start): 1.0}
    for _ in range(3):
        following: dict = {}
        for (prefix, state), prob in states.items():
            wanted = min(gamma_of(state, draft(prefix)), limit - len(prefix) - 1)
            if wanted < 0:
                following[prefix, state] = following.get((prefix, state), 0) + prob
                continue
            for (new, _), p in toy.enumerate_iteration(
                prefix, None, target, draft, wanted, set(), rule
            ).items():
                after = new, update(state, wanted, len(new) - len(prefix) - 1)
                following[after] = following.get(after, 0) + prob * p
        states = following
    prefixes: dict = {}
    for (prefix, _), prob in states.items():
        prefixes[prefix] = prefixes.get(prefix, 0) + prob
    return toy.complete(prefixes, target, limit, set())


# --- Through the engine ---


@functools.cache
def plain():
    return sd.generate(TARGET, INPUTS, **OPTIONS)
