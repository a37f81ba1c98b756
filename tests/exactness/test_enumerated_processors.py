"""Enumerates two iterations of every verifier under every processor.

Drafts are sampled or point masses.
"""

import functools

import numpy as np
import pytest
import toy
import toy_processors
from enumerations import DELTA, ENUMERATED, EPSILON, LENIENCE
from toy import Rule

EOS = {1}
# V, γ, length limit.
SIZES = [(2, 3, 6), (3, 2, 5), (3, 3, 6), (4, 3, 5)]


def even_only(prefix, logits):
    """A grammar: an id is followed by one of the other parity, as far as there is one."""
    result = logits.copy()
    result[
        [token for token in range(len(result)) if len(prefix) > 1 and (token - prefix[-1]) % 2 == 0]
    ] = -np.inf
    return result


PROCESSORS = {
    "temperature": dict(temperature=0.5),
    "top-k": dict(top_k=2),
    "top-p": dict(top_p=0.7),
    "min-p": dict(min_p=0.4),
    "repetition": dict(repetition_penalty=2.5),
    "n-grams": dict(no_repeat_ngram=2),
    "minimum length": dict(min_new_tokens=2),
    "bias": dict(logit_bias={0: 1.5}),
    "forbidden": dict(forbidden_tokens=(0,)),
    "mask": dict(vocabulary_mask=[False, True, True, True]),
    "synthetic": dict(forced_tokens={1: 0}),
    "own": dict(processor=even_only),
    "all": dict(
        temperature=1.3,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.5,
        no_repeat_ngram=3,
        min_new_tokens=1,
        logit_bias={0: 0.5},
        forced_tokens={3: 0},
        processor=even_only,
    ),
}


def under(options: dict, dist):
    """`dist` after processors and filters, as a function of the prefix."""

    def adjusted(prefix):
        probs = dist(prefix)
        size = (
            {"vocabulary_mask": options["vocabulary_mask"][: len(probs)]}
            if "vocabulary_mask" in options
            else {}
        )
        return toy_processors.dist(
            np.log(probs), [0, *prefix], new=len(prefix), eos_ids=EOS, **{**options, **size}
        )

    return functools.cache(adjusted)


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("verifier", ENUMERATED)
def test_distribution_under_every_processor(verifier, processor):
    """Exact verifiers: total variation < 1e-12; lossy ones keep their bounds.

    Lenient: no token above p/l. Typical: none at or below its threshold above p.
    """
    changed = False
    for vocab, gamma, limit in SIZES:
        raw = [toy.table_distribution(vocab, seed) for seed in (21, 22)]
        target, draft = (under(PROCESSORS[processor], dist) for dist in raw)
        expected = toy.complete({(): 1.0}, target, limit, EOS)
        changed |= toy.total_variation(expected, toy.complete({(): 1.0}, raw[0], limit, EOS)) > 0.01
        for drafter in (draft, toy.one_hot(draft)):
            actual = toy.speculative_distribution(
                target, drafter, gamma, limit, EOS, Rule(verifier=ENUMERATED[verifier])
            )
            if verifier not in ("lenient", "typical"):
                assert toy.total_variation(actual, expected) < 1e-12
                continue
            assert sum(actual.values()) == pytest.approx(1)
            for prefix, following in toy.conditionals(actual):
                p = target(prefix)
                if verifier == "lenient":
                    bound = {x: p[x] / LENIENCE for x in following}
                else:
                    threshold = toy.typical_threshold(p, EPSILON, DELTA)
                    bound = {x: 1.0 if p[x] > threshold else p[x] for x in following}
                assert all(prob <= bound[x] + 1e-12 for x, prob in following.items())
    assert changed, "a processor without effect proves nothing"


@pytest.mark.parametrize("verifier", ["token", "block", "rejection"])
def test_a_drafter_without_the_processors_is_verified_by_its_own_distribution(verifier):
    """The output does not depend on which processors the drafter applies.

    Its distribution only has to be the one that it drew from.
    """
    raw = [toy.table_distribution(3, seed) for seed in (21, 22)]
    target, draft = under(PROCESSORS["all"], raw[0]), raw[1]
    result = toy.speculative_distribution(
        target, draft, 3, 4, EOS, Rule(verifier=ENUMERATED[verifier])
    )
    assert toy.total_variation(result, toy.complete({(): 1.0}, target, 4, EOS)) < 1e-12
