"""Every way of looking up what follows, as chains, trees and beams: the output is the target's.

So it is for a drafter that finds what is not there and lies about what matches.
"""

import functools

import flax.struct
import jax.numpy as jnp
import numpy as np
import pytest
from cascade_parts import EOS, INPUTS, KEY, LIMITS, PREFIXES, TARGET, V, table
from suffix_texts import random_texts

import specdec_jax as sd
from specdec_jax.drafters.continuations import ContinuationDrafter, Found, find_best

pytestmark = pytest.mark.usefixtures("quick")


@flax.struct.dataclass
class Liar(ContinuationDrafter):
    """Finds ids that depend on the text alone, often ends early, and makes up how many match."""

    passages: bool = flax.struct.field(pytree_node=False, default=True)
    min_match: int = 2

    def find(self, memory, texts, count, length):
        number = jnp.sum(texts.tokens, axis=1) + 7 * texts.lengths
        ranks, steps = jnp.arange(count)[:, None], jnp.arange(length if self.passages else 1)
        ids = (number[:, None, None] + 5 * ranks + 3 * steps) % (V + 1) - 1
        match = (number[:, None] + jnp.arange(count)) % 7 - 2
        return Found(jnp.minimum(ids, V - 1), match)


DRAFTERS = {
    "bigrams": lambda: table(False),
    "bigrams, drawn": lambda: table(True),
    "latest": lambda: sd.PromptLookupDrafter(1, prefer="latest"),
    "nearest": lambda: sd.PromptLookupDrafter(2),
    "copy": lambda: sd.PromptLookupDrafter(min_match=0),
    "assisted": lambda: sd.AssistedNGramDrafter(3, memory=5),
    "suffix": lambda: random_texts(V),
    "suffix, own texts": sd.SuffixDrafter,
    "liar": Liar,
    "liar, one id at a time": lambda: Liar(passages=False),
}
PARENTS = 0, 0, 1, 0, 1, 2, 3, 6
MIXED, ALL = range(0, 12, 3), range(12)  # rows whose tokens do not depend on draws, or on drafts
# What is drafted, how it is verified, the temperatures, and the rows that are plain decoding's.
WAYS = {
    "chain, argmax": (dict(gamma=4), 0.0, ALL),
    "chain, block": (dict(gamma=4), [0.0, 1.0, 0.8] * 4, MIXED),
    "chain, token": (dict(gamma=4, verifier="token"), [0.0, 1.0, 0.8] * 4, MIXED),
    "chain, gumbel": (dict(gamma=4, verifier="gumbel"), 0.9, ALL),
    "tree, argmax": (dict(tree=sd.Tree(PARENTS, "top")), 0.0, ALL),
    "tree, point": (dict(tree=sd.Tree(PARENTS, "top", "point")), [0.0, 1.0, 0.8] * 4, MIXED),
    "tree, gumbel": (dict(tree=sd.Tree(PARENTS, verifier="gumbel")), 0.9, ALL),
    "beams": (dict(num_beams=3, gamma=3, eos_ids=(EOS,)), 0.0, ALL),
}


def run(drafter, way: str) -> sd.GenerationResult:
    options, temperature, _ = WAYS[way]
    if drafter is None:  # then nothing is verified, but Gumbel noise may be what chooses tokens
        rule = "gumbel" if "gumbel" in way else "block"
        beams = {"num_beams": 3, "eos_ids": (EOS,)}
        options = beams if way == "beams" else {"verifier": rule}
    elif getattr(options.get("tree"), "verifier", None) == "point" and drafter.sampled:
        options = {"tree": sd.Tree(PARENTS)}
    return sd.generate(
        TARGET,
        INPUTS,
        drafter=drafter,
        sampling=sd.SamplingConfig(temperature=temperature),
        max_new_tokens=LIMITS,
        decoder_prefix=PREFIXES,
        key=KEY,
        **{"eos_ids": (EOS, 8), **options},
    )


plain = functools.cache(functools.partial(run, None))
FIRST = ("copy", "tree, gumbel"), ("liar", "chain, gumbel")


@pytest.mark.parametrize(
    "name, way",
    [
        pytest.param(name, way, marks=() if (name, way) in FIRST else pytest.mark.slow)
        for name in DRAFTERS
        for way in WAYS
    ],
)
def test_the_output_is_the_targets(name, way):
    found, expected, rows = run(DRAFTERS[name](), way), plain(way), list(WAYS[way][2])
    np.testing.assert_array_equal(found.tokens[rows], expected.tokens[rows])
    np.testing.assert_array_equal(found.lengths[rows], expected.lengths[rows])
    assert found.stats.drafted > 0


def test_a_continuation_that_matches_less_than_is_asked_for_is_not_drafted():
    """Of ids 3, 4, 5 as continuations with matches 3, 1, 2, those with at least 2 are drafted."""

    class Fixed(ContinuationDrafter):
        min_match = 2

        def find(self, memory, texts, count, length):
            ids = jnp.array([[[3, 7], [4, 7], [5, -1]]])[:, :count, :length]
            return Found(ids, jnp.array([[3, 1, 2]])[:, :count])

    kept = Fixed()._find_matching((), None, 3, 2).ids
    np.testing.assert_array_equal(kept, [[[3, 7], [-1, -1], [5, -1]]])


def test_the_heaviest_candidates_of_different_ids():
    ids = jnp.array([[5, 3, 5, 9, 2], [4, 4, 4, 4, 4]])
    weights = jnp.array([[1, 2, 4, 2, 0], [0, 0, 3, 0, 0]])
    best, places = find_best(ids, weights, 4)  # of equally heavy ones the smallest id first
    np.testing.assert_array_equal(best, [[5, 3, 9, -1], [4, -1, -1, -1]])
    np.testing.assert_array_equal(places, [[2, 1, 3, -1], [2, -1, -1, -1]])
