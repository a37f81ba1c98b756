"""Tests acceptance by depth, of chains and of trees, by walking drafts along outputs."""

import itertools

import numpy as np
import pytest
import tiers
from toy_models import HashModel

from specdec_jax.analysis import acceptance, variants
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands import measure
from specdec_jax.decoding.generate import generate
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")

V = 12
TARGET, DRAFT = HashModel(V, 0, spread=6.0), HashModel(V, 1, likeness=0.7, spread=6.0)
INPUTS = [[2 + number, 3] for number in range(8)]
BATCHES = variants.cut_batches(INPUTS, INPUTS, 4, 0)


def score(*verifiers, **settings) -> acceptance.Acceptance:
    options = measure.MeasureOptions(
        target="target", drafter="drafter", **{"max_new_tokens": 12, **settings}
    )
    return acceptance.score(Workload(TARGET, ModelDrafter(DRAFT), BATCHES, options), verifiers, 3)


@tiers.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}], ids=str, first=1)
def test_hit_rate_is_the_mean_of_hit_rate_given_the_token(filters):
    """Over every id y that the target may choose: Σ p(y) P(y is a child)."""
    config = SamplingConfig(temperature=1.0, **filters)

    def scored(model):
        return acceptance.agreement(
            model, DRAFT, [[3, 4]] * V, np.arange(V)[:, None], np.ones(V, int), config
        )

    covered = scored(TARGET).hit_rates
    ratios = scored(TARGET).log_ratio[:, 0]  # log q − log p, from which the one drawn child follows
    np.testing.assert_allclose(
        covered.log_given["mixed"][:, 0, 0], np.minimum(ratios, 0), atol=1e-4
    )
    p = toy_distribution(config)
    for kind, mean in covered.mean.items():
        given = np.exp(covered.log_given[kind][:, 0])
        np.testing.assert_allclose(p @ given, mean[0, 0], atol=1e-5)
        assert np.all(given <= 1) and (kind == "mixed" or set(given.ravel().tolist()) == {0, 1})


def toy_distribution(config: SamplingConfig) -> np.ndarray:
    """The target's distribution of the first token after the input [3, 4], filtered."""
    logits = TARGET.logits([[3, 4]], [[TARGET.start_token]], [2])[0, 0]
    probs = np.exp(logits - logits.max(), dtype=np.float64)
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    kept = np.arange(V) < config.top_k if config.top_k else before < config.top_p * probs.sum()
    probs[order[~kept]] = 0
    return probs / probs.sum()


def test_with_argmax_by_drafts_made_one_by_one():
    """A draft of the k most probable ids from every position, walked along the target's output."""
    actual, counted = score("block"), np.zeros((2, 2, 3))
    for batch in BATCHES:
        result = generate(TARGET, batch.ids, max_new_tokens=12)
        for ids, tokens, length in zip(batch.ids, result.tokens, result.lengths):
            fed = [TARGET.start_token, *tokens[: length - 1].tolist()]
            order = np.argsort(-DRAFT.logits([ids], [fed], [len(ids)])[0], axis=1)
            ranks = [row.tolist().index(y) for row, y in zip(order, tokens)]
            for start, depth, k in itertools.product(range(length), range(3), (1, 2)):
                if start + depth < length and all(
                    rank < k for rank in ranks[start : start + depth]
                ):
                    counted[k - 1, :, depth] += 1, ranks[start + depth] < k
    for k, (reached, accepted) in enumerate(counted):
        rates = [mean for mean, _ in actual.hit_rate_by_depth["top"][k]]
        assert rates == pytest.approx((accepted / reached).tolist()) and len(set(rates)) == 3
        assert rates[0] == pytest.approx(actual.hit_rate["top"][k][0], abs=1e-6)
    assert actual.by_depth["block"] == actual.hit_rate_by_depth["top"][0]


def test_above_temperature_0():
    """A chain that is verified token by token is the tree whose nodes have one drawn child."""
    result = score("token", "block", temperature=1.0)
    one, *wider = result.hit_rate_by_depth["mixed"]
    np.testing.assert_allclose(result.by_depth["token"], one, rtol=1e-5)
    means = np.array([[mean for mean, _ in rates] for rates in (one, *wider)])
    assert means.shape == (8, 3) and np.all(np.diff(means[:, 0]) >= -1e-6), (
        "a wider node covers more"
    )
    assert result.by_depth["block"][0] == result.survival["block"][0]
    assert result.by_depth["block"] != result.by_depth["token"]


@pytest.mark.slow
def test_depths_that_no_output_has_are_left_out():
    result = score("block", max_new_tokens=2)
    assert len(result.by_depth["block"]) == 2 and len(result.survival["block"]) == 3
    assert {len(rates) for rates in result.hit_rate_by_depth["top"]} == {2}
