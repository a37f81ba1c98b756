"""A trace of trees has nodes, the accepted path, and both models' probabilities."""

import functools

import jax
import numpy as np
import pytest
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.trace import TreeNode, trace
from specdec_jax.speculative.trees import Chains, DynamicTree, Tree

pytestmark = pytest.mark.usefixtures("quick")
V, LIMIT, ROW = 24, 9, [3, 4, 5, 4, 1]
TARGET = noisy_copy(tiny_t5(0, V), 2.0)  # else it repeats itself
DRAFT = noisy_copy(TARGET, 0.15, 1)
TREES = {
    "drawn": Tree.uniform((3, 2, 1)),
    "recursive": Tree((0, 0, 1, 1, 2, 3), "drawn", "recursive"),
    "top": Tree((0, 1, 2, 2, 2, 4), "top"),
    "chains": Chains(3, 2),
    "dynamic": DynamicTree(3, 3, 9),
}
SAMPLING = {
    "argmax": dict(),
    "sampled": dict(temperature=1.0),
    "filtered": dict(temperature=0.7, top_k=9, forbidden_tokens=(7,)),
}


@functools.cache
def dist(model: str, tokens: tuple[int, ...], sampling: str):
    """Returns the distribution of the token after `tokens`, teacher-forced, in float64.

    At temperature 0 it is that at 1.
    """
    options, padded = SAMPLING[sampling], np.array([[*tokens, *[0] * (16 - len(tokens))]], np.int32)
    one = {"target": TARGET, "drafter": DRAFT}[model]
    logits = np.asarray(one.logits(np.array([ROW], np.int32), padded, [len(ROW)]), np.float64)[
        0, len(tokens) - 1
    ]
    logits[list(options.get("forbidden_tokens", ()))] = -np.inf
    logits /= options.get("temperature", 1.0)
    logits[logits < np.sort(logits)[-options.get("top_k", V)]] = -np.inf
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("drawn", "argmax"),
        pytest.param("recursive", "filtered", marks=pytest.mark.slow),
        pytest.param("dynamic", "sampled", marks=pytest.mark.slow),
        pytest.param("top", "filtered", marks=pytest.mark.slow),
        pytest.param("chains", "sampled", marks=pytest.mark.slow),
    ],
)
def test_trees_are_traced_as_they_were(name, sampling):
    """p, q and p/q of each node are those after the tokens on its path.

    The path is what was committed.
    """
    options = dict(
        drafter=sd.ModelDrafter(DRAFT),
        tree=TREES[name],
        sampling=sd.SamplingConfig(**SAMPLING[sampling]),
        key=jax.random.key(3),
        max_new_tokens=LIMIT,
    )
    text, drafted, accepted = [TARGET.start_token], 0, 0
    for step in trace(TARGET, ROW, **options):
        nodes, path = step.tree
        assert nodes[0] == TreeNode(text[-1], -1, 1.0, nodes[0].q) and len(nodes) == step.gamma + 1
        for number, node in enumerate(nodes[1:], 1):
            assert 0 <= node.parent < number
            before = (*text, *(nodes[above].token for above in step.tree.line(node.parent)[1:]))
            p, q = (dist(model, before, sampling)[node.token] for model in ("target", "drafter"))
            np.testing.assert_allclose(
                [node.p, node.q, node.ratio], [p, q, p / q], rtol=1e-3, atol=1e-6
            )
        assert (
            path == step.tree.line(path[-1])
            and [nodes[number].token for number in path[1:]] == step.accepted
        )
        after = [nodes[child].token for child in step.tree.children(path[-1])]
        assert step.rejected == (after[0] if after else None)
        text += [*step.accepted, *([] if step.corrected is None else [step.corrected])]
        drafted, accepted = drafted + step.gamma, accepted + len(step.accepted)
    result = sd.generate(TARGET, [ROW], **options)
    assert text[1:] == result.tokens[0, : result.lengths[0]].tolist()
    assert (drafted, accepted) == (result.stats.drafted, result.stats.accepted) and accepted > 0


def test_a_drafter_without_a_distribution_has_no_q():
    row = [*range(2, V), 1]  # whatever comes last has stood there before
    steps = trace(
        TARGET,
        row,
        drafter=sd.PromptLookupDrafter(),
        tree=Tree.uniform((2, 2)),
        max_new_tokens=LIMIT,
    )
    nodes = [node for step in steps for node in step.tree.nodes[1:]]
    assert nodes and all(
        node.q is None and node.ratio is None and 0 < node.p <= 1 for node in nodes
    )


def test_a_chain_has_no_tree():
    assert all(
        step.tree is None for step in trace(TARGET, ROW, drafter=sd.ModelDrafter(DRAFT), gamma=2)
    )


def test_a_ratio_without_drafter_is_infinite():
    assert TreeNode(3, 0, 0.5, 0.0).ratio == float("inf") and TreeNode(3, 0, 0.5, 0.25).ratio == 2
