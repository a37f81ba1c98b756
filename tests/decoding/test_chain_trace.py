"""The trace of a chain: p, q and p / q of each drafted token."""

import jax
import numpy as np
import pytest
import toy
from cascade_parts import INPUTS, MODEL, OTHER, TARGET, V, model, table
from toy_models import HashModel, Words

import specdec_jax as sd

pytestmark = pytest.mark.usefixtures("quick")
INPUT, LIMIT, KEY = INPUTS[1], 10, jax.random.key(3)
FILTERS = dict(temperature=0.8, top_k=7)
DRAFTERS = {
    "model": lambda: model,
    "lookup": lambda: sd.PromptLookupDrafter(1),
    "sampled table": lambda: table(True),
    "table": lambda: table(False),
    "random": lambda: sd.RandomDrafter(V),
    "horizontal": lambda: sd.HorizontalCascade(model, table(False), 2),
    "vertical": lambda: sd.VerticalCascade(model, sd.ModelDrafter(OTHER), 2),
}


def probs_of(traced, prefix, ids, **filters) -> np.ndarray:
    """Returns the probabilities `[T, V]` that a model gives to what follows, teacher-forced."""
    logits = traced.logits([INPUT], [[0, *prefix, *ids[:-1]]], [len(INPUT)])[0, len(prefix) :]
    return toy.adjusted_probs(logits, **filters)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["sampled", "greedy"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_p_and_q_are_those_of_the_models(name, config):
    """At temperature 0 as at 1; a drafter without distributions has no q."""
    sampling = sd.SamplingConfig(**FILTERS) if config == "sampled" else sd.SamplingConfig()
    filters = FILTERS if config == "sampled" else {"temperature": 1.0}
    drafter = DRAFTERS[name]()
    options = dict(drafter=drafter, gamma=3, sampling=sampling, max_new_tokens=LIMIT, key=KEY)
    steps, prefix = sd.trace(TARGET, INPUT, eos_ids=(), **options), []
    result = sd.generate(TARGET, [INPUT], eos_ids=(), **options)
    examined = 0
    for step in steps:
        (root, *nodes), path = step.chain
        assert step.tree is None and len(nodes) == step.gamma
        assert [node.parent for node in step.chain.nodes] == [*range(-1, len(nodes))]
        assert path == [*range(len(step.accepted) + 1)] and (root.p, root.q) == (1.0, None)
        assert root.token == (prefix[-1] if prefix else 0)
        ids = [node.token for node in nodes]
        assert ids[: len(step.accepted)] == step.accepted
        if ids:
            p = probs_of(TARGET, prefix, ids, **filters)
            found = [node.p for node in nodes]
            np.testing.assert_allclose(found, p[np.arange(len(ids)), ids], rtol=1e-4, atol=1e-7)
        for place, node in enumerate(nodes):
            examined += 1
            if name in ("model", "vertical") or name == "horizontal" and place < 2:
                q = probs_of(MODEL, prefix, ids, **filters)[place, node.token]
                np.testing.assert_allclose(node.q, q, rtol=1e-4)
                assert node.ratio == pytest.approx(node.p / node.q)
            elif name == "horizontal":
                assert node.q == 1
            elif name != "sampled table":
                assert node.q is None and node.ratio is None
        prefix += [*step.accepted, *([] if step.corrected is None else [step.corrected])]
    assert examined and prefix == result.tokens[0, : len(prefix)].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("gamma", ["auto", 0, sd.Heuristic(4), sd.Confidence(4, threshold=0.3)])
def test_every_policy_has_a_trace(gamma):
    target = HashModel(V, 0, vocabulary=Words())
    steps = sd.trace(target, "w3 w4", drafter=model, gamma=gamma, max_new_tokens=LIMIT)
    for step in steps:
        assert (step.chain is None) == (gamma == 0)
        assert gamma == 0 or len(step.chain.nodes) == step.gamma + 1
        assert (step.entropies is None) == (not isinstance(gamma, sd.Confidence))


@pytest.mark.slow
def test_a_chain_is_the_tree_with_one_branch():
    """With the same draws both have the same tokens and probabilities."""
    options = dict(drafter=model, max_new_tokens=LIMIT, sampling=sd.SamplingConfig(**FILTERS))
    branch = sd.Tree.chain(3, children="drawn", verifier="recursive")
    chain = sd.trace(TARGET, INPUT, gamma=3, verifier="token", key=KEY, **options)
    drawn = sd.trace(TARGET, INPUT, tree=branch, key=KEY, **options)
    for one, other in zip(chain, drawn, strict=True):
        assert one._replace(chain=None) == other._replace(tree=None)
        for node, same in zip(one.chain.nodes, other.tree.nodes, strict=True):
            assert node[:2] == same[:2]
            np.testing.assert_allclose(node.p, same.p, rtol=1e-4)
            assert node.q is None or node.q == pytest.approx(same.q, rel=1e-4)
