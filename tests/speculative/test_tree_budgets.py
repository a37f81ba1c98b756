"""Policies of γ with token trees: against slow versions and through the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from distribution_samples import (
    DRAWS,
    FALSE_ALARM,
    SPREAD,
    V,
    g_test,
    hash_pair,
    joint_distribution,
    sample,
)
from policies import DRAFT, INPUTS, OPTIONS, TARGET, plain
from toy_models import HashModel, Words, compilations, noisy_copy, tiny_t5
from tree_policies import SlowCostAware

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.speculative.policies import POLICIES
from specdec_jax.speculative.policy import NodeOutcomes, Outcome
from specdec_jax.speculative.tree_budgets import find_node_outcomes, make_budget
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.tree_verifiers import TreeVerification
from specdec_jax.speculative.trees import RANK_SHARES, Chains, DynamicTree, Tree

pytestmark = pytest.mark.usefixtures("quick")
slow = pytest.mark.slow
G = 9
CHOICES = {
    "heuristic": sd.Heuristic(G, start=2, minimum=[1, 2] * 6),
    "entropy": sd.Entropy(G, minimum=[1, 3] * 6, smoothing=0.5),
    "entropy_bound": sd.EntropyBound(G, threshold=[0.45, 0.53, 0.6] * 4),
    "confidence": sd.Confidence(G, threshold=[0.1, 0.3, 0.5] * 4),
    "cost_aware": sd.CostAware(G, cost_ratio=[0.1, 0.4] * 6, verify_cost=1.8, weight=1.0),
}
STATIC = Tree.uniform((3, 2, 2))


def test_every_policy_is_here():
    assert set(CHOICES) == set(POLICIES) - {"calibrated"}, "which is for chains"


# --- What is learned ---


def test_nodes_that_were_verified():
    """Nodes 1 to 3 are node 0's children, 4 and 5 node 2's, 6 is absent; the path is 0, 2."""
    tree = Tree((0, 0, 0, 2, 2, 1))
    valid = np.array([[True, True, True, True, True, True, False]])
    draft = TreeDraft(
        jnp.zeros((1, 7), jnp.int32),
        tree.branches(1),
        valid,
        None,
        jnp.zeros((1, 7), jnp.int32),
        np.zeros(1, np.int32),
    )
    path = np.array([[0, 2, 6]], np.int32)  # anything after the nodes that are accepted
    found = find_node_outcomes(draft, TreeVerification(*np.array([[1], [0]], np.int32), path))
    np.testing.assert_array_equal(found.depths, [[0, 1, 1, 1, 2, 2, 0]])
    np.testing.assert_array_equal(found.examined, [[0, 1, 1, 0, 1, 1, 0]])
    np.testing.assert_array_equal(found.accepted, [[0, 0, 1, 0, 0, 0, 0]])


VARIED = dict(
    minimum=[1, 1, 2, 1],
    cost_ratio=[0.1, 0.3, 0.4, 0.0],
    verify_cost=[2.0, 1.9, 2.5, 1.8],
    acceptance=[0.7, 0.5, 0.9, 0.4],
    weight=[4.0, 1.0, 0.5, 9.0],
    memory=[0.9, 1.0, 0.5, 0.8],
)


@pytest.mark.parametrize(
    "tree", [STATIC, Tree((0, 1, 0, 2, 3, 0, 0, 1, 7, 8))], ids=["uniform", "irregular"]
)
def test_cost_aware_of_a_tree_equals_the_slow_version(tree):
    """30 iterations of four rows with numbers of their own."""
    rng, rows, size = np.random.default_rng(0), 4, tree.size
    policy = make_budget(sd.CostAware(G, **VARIED), tree).rows(rows)
    slow = [
        SlowCostAware(tree.parents, G, **{key: values[row] for key, values in VARIED.items()})
        for row in range(rows)
    ]
    state, pasts, all_budgets = (
        jax.jit(lambda policy: policy.init())(policy),
        [[] for _ in range(rows)],
        [],
    )
    wanted = jax.jit(lambda policy, state: policy.wanted(state))
    step = jax.jit(lambda policy, state, outcome: policy.update(state, outcome))
    for _ in range(30):
        budgets = np.asarray(wanted(policy, state))
        assert budgets.tolist() == [one.wanted(past) for one, past in zip(slow, pasts)]
        all_budgets.append(budgets)
        valid = np.arange(size) <= budgets[:, None]
        depths = np.where(valid, tree.depths, 0)
        examined, kept, accepted = (
            np.zeros((rows, size), bool),
            np.zeros((rows, size), bool),
            np.zeros(rows, np.int32),
        )
        for row, past in enumerate(pasts):
            node, seen = 0, []
            while node is not None:
                here, node = node, None
                for child in 1 + np.flatnonzero(np.asarray(tree.parents) == here):
                    if valid[row, child] and node is None:
                        was_accepted = rng.random() < (0.8, 0.5, 0.9, 0.3)[row]
                        examined[row, child], kept[row, child] = True, was_accepted
                        seen.append((tree.ranks[child], was_accepted))
                        node = child if was_accepted else None
                accepted[row] += node is not None
            past.append((seen, accepted[row], int(valid[row, 1:].sum()), depths[row].max()))
        ranks = np.broadcast_to(tree.ranks, valid.shape)
        state = step(
            policy,
            state,
            Outcome(accepted, accepted, None, NodeOutcomes(depths, ranks, examined, kept)),
        )
    assert sum(len(set(row)) > 1 for row in np.transpose(all_budgets)) >= 2, "or nothing adapts"


def test_cost_aware_begins_with_the_best_number_of_nodes():
    """With `RANK_SHARES` it begins with the n of the greatest `Tree.expected` by time."""
    tree = Tree.uniform((3, 2, 2, 1))
    cost, verify = np.repeat([0.02, 0.1, 0.3], 3), np.tile([1.1, 2.0, 4.0], 3)
    policy = make_budget(
        sd.CostAware(30, acceptance=0.863, cost_ratio=cost, verify_cost=verify), tree
    ).rows(9)
    found = np.asarray(jax.jit(lambda policy: policy.wanted(policy.init()))(policy))
    parts = [Tree(tree.parents[:n]) for n in range(1, 31)]
    for n, c, v in zip(found, cost, verify):
        speeds = [
            part.expected(RANK_SHARES) / (1 + c * part.depth + (v - 1) / 30 * (part.size - 1))
            for part in parts
        ]
        assert speeds[n - 1] == pytest.approx(max(speeds), rel=1e-5)
    assert len(set(found.tolist())) > 3


# --- Through the engine ---


def adapted(policy, tree, **options):
    return sd.generate(
        TARGET,
        INPUTS,
        drafter=sd.ModelDrafter(DRAFT),
        gamma=policy,
        tree=tree,
        **OPTIONS,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, tree",
    [
        ("cost_aware", STATIC),
        ("confidence", DynamicTree(3, 3, 12)),
        *(
            pytest.param(name, tree, marks=slow)
            for name in CHOICES
            for tree in (
                STATIC,
                Tree.uniform((3, 2, 2), children="mixed"),
                Chains(3, 4),
                DynamicTree(3, 3, 12, "top"),
                DynamicTree(3, 3, 12),
            )
        ),
    ],
    ids=str,
)
def test_greedy_output_is_that_of_plain_decoding(name, tree):
    """Rows draft by numbers of their own, within the budget, and other numbers compile nothing."""
    policy = CHOICES[name]
    found = adapted(policy, tree)
    np.testing.assert_array_equal(found.tokens, plain().tokens)
    means = [row.drafted / row.target_calls for row in found.stats.per_row if row.drafted]
    assert max(means) - min(means) > 0.5 and max(means) <= G
    numbers = {key: np.flip(np.broadcast_to(getattr(policy, key), 12)) for key in policy.numbers()}
    assert not compilations(lambda: adapted(type(policy)(G, **numbers), tree))


@slow
@pytest.mark.parametrize("name", ["heuristic", "entropy", "entropy_bound"])
def test_a_tree_with_one_branch_is_a_chain(name):
    """The same drafts of the same lengths, and the same tokens, above temperature 0."""
    policy = type(CHOICES[name])(
        4, **{key: getattr(CHOICES[name], key) for key in CHOICES[name].numbers()}
    )
    how = dict(
        sampling=sd.SamplingConfig(temperature=[1.0, 0.0, 0.7] * 4, top_k=20), key=jax.random.key(3)
    )
    chain = adapted(policy, None, verifier="token", **how)
    tree = adapted(policy, Tree.chain(4, children="drawn", verifier="recursive"), **how)
    np.testing.assert_array_equal(tree.tokens, chain.tokens)

    def counts(result):
        return [(row.target_calls, row.drafted, row.accepted) for row in result.stats.per_row]

    assert counts(tree) == counts(chain)


@pytest.mark.parametrize("tree", [STATIC, pytest.param(DynamicTree(3, 3, 12), marks=slow)], ids=str)
@pytest.mark.parametrize(
    "temperature", [(0.0,) * 3, pytest.param((0.0, 0.7, 1.6), marks=slow)], ids=str
)
def test_what_policies_see_of_a_tree(tree, temperature):
    """Policies see Π q(x) and H(q) of the distribution drawn from, after top-k.

    Where it is one-hot, they see that at temperature 1. A path continues as long as its product is
    not below the threshold.
    """
    config, policy = (
        sd.SamplingConfig(temperature=temperature, top_k=5),
        sd.Confidence(G, threshold=[0.0, 0.2, 1.0]),
    )
    options = dict(gamma=policy, tree=tree, sampling=config, max_new_tokens=9, eos_ids=())
    state, request = prepare(TARGET, INPUTS[:3], drafter=sd.ModelDrafter(DRAFT), **options)
    room = np.full(3, 8, np.int32)
    _, draft = jax.jit(lambda d, s: d.draft_tree(s.draft_state, s, np.full(3, G, np.int32), room))(
        request.drafter, state
    )
    parents, valid, products = (
        np.asarray(draft.branches.parents),
        np.asarray(draft.valid),
        np.ones((3, tree.size)),
    )
    for row, node in np.argwhere(valid[:, 1:]):
        node, way = node + 1, []
        above = parents[row, node]
        while above > 0:
            way, above = [int(draft.tokens[row, above]), *way], parents[row, above]
        logits = DRAFT.logits([INPUTS[row]], [[0, *way]], [len(INPUTS[row])])[0][-1:]
        probs = toy.adjusted_probs(logits, temperature[row] or 1.0, 5)[0]
        above = parents[row, node]
        assert above == 0 or products[row, above] >= policy.threshold[row]
        products[row, node] = products[row, above] * probs[draft.tokens[row, node]]
        np.testing.assert_allclose(draft.seen.prob[row, node - 1], products[row, node], rtol=1e-4)
        entropy = -np.sum(probs[probs > 0] * np.log(probs[probs > 0]))
        np.testing.assert_allclose(draft.seen.entropy[row, node - 1], entropy, atol=1e-5)
    assert valid[0].sum() == G + 1 and np.max(parents[2, valid[2]]) == 0 < np.max(
        parents[1, valid[1]]
    )
    stopped = valid[:, 1:] & (products[:, 1:] < np.array(policy.threshold)[:, None])
    assert not np.any(
        stopped
        & np.any(valid[:, 1:, None] & (parents[:, 1:, None] == np.arange(1, tree.size)), axis=1)
    )


@slow
def test_a_path_that_ends_early_leaves_the_drafters_cache_whole():
    """A drafter that is the target is right at every depth, whatever was left out before."""
    target, options = noisy_copy(tiny_t5(0, 24), 2.0), dict(max_new_tokens=14, eos_ids=())
    policy = sd.Confidence(G, threshold=0.3)
    found = sd.generate(
        target, INPUTS, drafter=sd.ModelDrafter(target), tree=STATIC, gamma=policy, **options
    )
    assert found.stats.acceptance_rate == 1
    assert len({row.draft_calls / row.target_calls for row in found.stats.per_row}) > 1


@slow
def test_a_trace_shows_the_entropies_of_all_nodes():
    """Children of one node come from one distribution; those of others mostly do not."""
    target, options = (
        HashModel(V, 0, vocabulary=Words()),
        dict(gamma=sd.Confidence(G, threshold=0.1), max_new_tokens=9),
    )
    steps = sd.trace(target, "w3 w4", drafter=sd.ModelDrafter(DRAFT), tree=STATIC, **options)
    for step in steps:
        by_parent = {}
        for node, entropy in zip(step.tree.nodes[1:], step.entropies, strict=True):
            by_parent.setdefault(node.parent, set()).add(entropy)
        assert all(len(entropies) == 1 for entropies in by_parent.values())
        assert len(set.union(set(), *by_parent.values())) == len(by_parent)


SAMPLED_TREES = [
    Tree((0, 0, 1, 1, 2), "drawn", "recursive"),
    Tree((0, 0, 1, 1, 2), "drawn", "traversal"),
    Chains(3, 2),
    Tree((0, 0, 1, 1, 2), "mixed"),
    DynamicTree(2, 2, 5),
    DynamicTree(2, 3, 7, "top"),
]
SAMPLED_POLICIES = [
    sd.Confidence(4, threshold=0.12),
    sd.EntropyBound(4, scale=0.1),
    sd.Entropy(4),
    sd.CostAware(4, verify_cost=2.0),
]


@slow
@pytest.mark.parametrize(
    "policy, tree",
    [
        (policy, tree)
        for row, policy in enumerate(SAMPLED_POLICIES)
        for column, tree in enumerate(SAMPLED_TREES)
        if (row + column) % 2 == 0  # two policies for each tree
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else type(value).__name__,
)
def test_distribution_through_the_engine(policy, tree):
    target, draft = hash_pair()
    counts, _ = sample(
        target, sd.ModelDrafter(draft), SPREAD, DRAWS, verifier="block", gamma=policy, tree=tree
    )
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
