"""G-tests of what decoding with trees really draws, as in `test_distribution_statistics.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from distribution_samples import (
    DRAWS,
    FALSE_ALARM,
    ROWS,
    SPREAD,
    V,
    g_test,
    hash_pair,
    joint_distribution,
    sample,
    traced_anew,
)
from toy_models import HashModel, HashNetwork

import specdec_jax as sd
from specdec_jax.drafters import tree_levels
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.speculative import randomness as speculative_randomness
from specdec_jax.speculative.trees import CHILDREN, Chains, DynamicTree, Tree

pytestmark = pytest.mark.usefixtures("quick")
# Two levels and a branch below the second child, so that three positions see all that there is.
SHAPE = (0, 0, 1, 1, 2)
TREES = {
    **{f"{kind}, {rule}": Tree(SHAPE, kind, rule) for kind in CHILDREN for rule in CHILDREN[kind]},
    "chains": Chains(3, 2),
    "dynamic": DynamicTree(2, 2, 5),
    "dynamic, top": DynamicTree(2, 3, 7, "top"),
}
random_bits = speculative_randomness.random_bits


def sampled(tree, draws, **options):
    target, draft = hash_pair()
    how = {"verifier": "block", "gamma": "auto", "tree": tree, **options}
    counts, (examined, accepted) = sample(target, ModelDrafter(draft), SPREAD, draws, **how)
    assert 0.1 < accepted.sum() / examined.sum() < 0.98, (
        "the test says little where all or nothing is accepted"
    )
    return g_test(counts, joint_distribution(target, SPREAD))


@tiers.parametrize(
    "name, draws", [("drawn, recursive", ROWS), *((name, DRAWS) for name in TREES)], first=1
)
def test_distribution_of_every_verifier(name, draws):
    assert sampled(TREES[name], draws) > FALSE_ALARM


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Gives the same logits after every text, in the place of a `Hash`."""

    probs: tuple[float, ...]
    vocab_size = V

    def logits(self, inputs, previous, current):
        return jnp.broadcast_to(jnp.log(jnp.array(self.probs)), (*inputs.shape, V))


def fixed_model(*probs: float) -> HashModel:
    model = HashModel(V)
    model.dist = Fixed(probs)
    model.network = HashNetwork(model.dist)
    return model


def test_siblings_are_verified_independently():
    """The first is accepted with probability 1/2; then the second with 1/2, or surely.

    With one uniform for both a second of the first kind would never be accepted.
    """
    target = fixed_model(0.4, *[0.8 / 30] * 7, *[1.6 / 30] * 7, 0.04)
    drafter = ModelDrafter(fixed_model(0.8, *[0.2 / 15] * 15))
    how = dict(verifier="block", gamma="auto", tree=Tree((0, 0), "drawn", "recursive"))
    counts, _ = sample(target, drafter, SPREAD, ROWS, **how)
    first = [x.reshape(V, -1).sum(axis=1) for x in (counts, joint_distribution(target, SPREAD))]
    assert g_test(*first) > FALSE_ALARM


# --- Mistakes of the engine, which enumerations of pure functions cannot see ---


def shared_noise(keys, lengths, offsets, tag):
    """The children and what corrects them are drawn with the same words."""
    return random_bits(
        keys,
        lengths,
        offsets,
        speculative_randomness.DRAFT if tag == speculative_randomness.RESIDUAL else tag,
    )


def by_depth(keys, lengths, offsets, tag):
    """All nodes after node 1 draw alike, so that siblings share their words."""
    return random_bits(keys, lengths, jnp.minimum(offsets, 1), tag)


def always_again(keys, lengths, offsets, tag):
    """The draws of a position do not depend on how often it was visited."""
    return random_bits(keys, lengths * 0 + 1, offsets, tag)


MUTANTS = {
    "children and correction share their noise": ("random_bits", shared_noise),
    "siblings share their words": ("random_bits", by_depth),
    "every iteration draws alike": ("random_bits", always_again),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_statistics_catch(name, monkeypatch):
    attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(speculative_randomness, attribute, mutant)
    assert sampled(Tree(SHAPE, "drawn", "recursive"), DRAWS, run=traced_anew()) < FALSE_ALARM


@pytest.mark.slow
def test_a_distribution_of_another_origin_is_caught(monkeypatch):
    """Each node's token is verified against the distribution that it was drawn from."""
    draft_tree = tree_levels.draft_tree

    def one_distribution(*arguments):
        draft, carry = draft_tree(*arguments)
        return draft._replace(origins=jnp.zeros_like(draft.origins)), carry

    monkeypatch.setattr(tree_levels, "draft_tree", one_distribution)
    assert sampled(Tree(SHAPE, "drawn", "recursive"), DRAWS, run=traced_anew()) < FALSE_ALARM


# --- At the size of a real vocabulary ---

TEXT, SAMPLES, AT_ONCE = "The weather will be better in the afternoon.", 4000, 500


def two_tokens(**options):
    """The first two ids of so many samples."""
    result = [
        sd.generate(
            sd.load("ende/target"),
            [TEXT],
            drafter=sd.ModelDrafter(sd.load("ende/drafter")),
            sampling=SPREAD,
            num_samples=AT_ONCE,
            max_new_tokens=3,
            key=jax.random.key(seed),
            eos_ids=(),
            **options,
        ).tokens[:, :2]
        for seed in range(SAMPLES // AT_ONCE)
    ]
    return np.concatenate(result)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [Tree(SHAPE), DynamicTree(2, 3, 7)], ids=["drawn", "dynamic"])
def test_distribution_of_the_bundled_pair(tree):
    """The first token, and the second after the most frequent first, over the whole vocabulary."""
    target = sd.load("ende/target")
    tokens, vocab = two_tokens(tree=tree), target.config.vocab_size
    first = np.bincount(tokens[:, 0], minlength=vocab)
    top = int(np.argmax(first))
    second = np.bincount(tokens[tokens[:, 0] == top, 1], minlength=vocab)
    assert second.sum() > SAMPLES / 10

    def dist(*before):
        ids = np.array([target.vocabulary.encode(TEXT) + list(target.eos_ids[:1])])
        logits = np.asarray(target.logits(ids, np.array([[target.start_token, *before]])))[
            0, -1
        ].astype(np.float64)
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    assert g_test(first, dist()) > FALSE_ALARM and g_test(second, dist(top)) > FALSE_ALARM
    forced = two_tokens(
        gamma=1, verifier="synthetic", synthetic_alpha=1.0
    )  # the drafter's own distribution
    others = np.bincount(forced[:, 0], minlength=vocab) + 1e-3
    assert g_test(first, others / others.sum()) < FALSE_ALARM
