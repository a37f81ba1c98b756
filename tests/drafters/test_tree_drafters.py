"""Every drafter that drafts trees: identities with plain decoding and with its own chains, what it proposes, and whose
laws the children of merged trees are judged by."""

import functools

import jax
import numpy as np
import pytest
from cascade_parts import EOS, INPUTS, KEY, LIMITS, MODEL, OTHER, PREFIXES, TARGET, V, table
from random_heads_of import random_heads
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.request import prepare
from specdec_jax.speculative.trees import CHILDREN, Chains, DynamicTree, Tree

pytestmark = pytest.mark.usefixtures("quick")
# Every third row is at temperature 0.
MIXED = sd.SamplingConfig(temperature=[0.0, 1.0, 0.7] * 4, top_k=[0, 0, 6] * 4, top_p=[1.0, 0.9, 1.0] * 4)
SAMPLED = sd.SamplingConfig(temperature=0.9, top_k=9)


@functools.cache
def t5():
    return noisy_copy(tiny_t5(0, V, decoder_layers=3), 2.0)


def early_exit():
    return sd.EarlyExitDrafter(t5(), 2)


DRAFTERS = {
    "model": (TARGET, lambda: sd.ModelDrafter(MODEL)),
    "early exit": (None, early_exit),
    "heads": (None, lambda: random_heads(t5(), share_head=True)),
    "bigrams": (TARGET, lambda: table(False)),
    "bigrams, drawn": (TARGET, lambda: table(True)),
    "lookup": (TARGET, lambda: sd.PromptLookupDrafter(1)),
    "two models": (TARGET, lambda: sd.MergedDrafter(sd.ModelDrafter(MODEL), sd.ModelDrafter(OTHER))),
    "early exit and bigrams": (None, lambda: sd.MergedDrafter(table(True), early_exit())),
    "a copy and a model": (TARGET, lambda: sd.MergedDrafter(sd.PromptLookupDrafter(2), sd.ModelDrafter(MODEL))),
}


def run(name, sampling=MIXED, speculative=True, **options):
    target, make = DRAFTERS[name]
    options = dict(max_new_tokens=LIMITS, decoder_prefix=PREFIXES, eos_ids=(EOS, 8), key=KEY) | options
    return sd.generate(target or t5(), INPUTS, drafter=make() if speculative else None, sampling=sampling, **options)


@functools.cache
def plain(of_t5: bool, verifier: str):
    return run("early exit" if of_t5 else "model", speculative=False, verifier=verifier)


def assert_same(found, expected, rows=slice(None)):
    np.testing.assert_array_equal(found.tokens[rows], expected.tokens[rows])
    np.testing.assert_array_equal(found.lengths[rows], expected.lengths[rows])
    np.testing.assert_allclose(found.log_probs[rows], expected.log_probs[rows], atol=1e-4)


# --- Identities ---


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_trees_equal_plain_sampling(name):
    """In all rows, with ragged prefixes and limits, with EOS ids inside branches, and with parts of the tree alone."""
    of_t5, children = DRAFTERS[name][0] is None, "auto"
    tree = Tree((0, 0, 1, 0, 1, 2, 3, 6), children, "gumbel")
    for gamma in ("auto", [1, 2, 3, 4, 5, 6, 7, 8] + [8] * 4):
        found = run(name, tree=tree, gamma=gamma)
        assert_same(found, plain(of_t5, "gumbel"))
        assert 0 < found.stats.accepted < found.stats.drafted
