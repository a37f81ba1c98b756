"""Policies of γ leave the distribution of token trees; policies that peek are detected."""

import pytest
import toy
import tree_reference as ref
from enumerations import dists
from tree_policies import (
    Slow,
    confidence,
    confidence_of,
    cost_aware,
    dist,
    entropy,
    entropy_bound,
    heuristic,
)
from tree_reference import Plan

from specdec_jax.speculative.policies import POLICIES
from specdec_jax.speculative.trees import CHILDREN

PAIRS = [
    (kind, name)
    for kind in CHILDREN
    if kind != "gumbel"
    for name in CHILDREN[kind]
    if name != "gumbel"
]
QUICK = {("drawn", "traversal"), ("mixed", "mixed")}
# Parents of nodes 1, 2 … of two levels, and of three.
WIDE, DEEP = (0, 0, 1, 1, 2, 2), (0, 1, 0, 2, 3)
CHOICES = {
    "heuristic": lambda parents: heuristic(len(parents)),
    "entropy": lambda parents: entropy(len(parents)),
    "entropy_bound": lambda parents: entropy_bound(0.5, 0.35),
    "confidence": lambda parents: confidence(0.3),
    "cost_aware": lambda parents: cost_aware(
        parents, len(parents), cost_ratio=0.2, verify_cost=2.5, weight=0.5
    ),
}


def test_every_policy_is_here():
    assert set(CHOICES) == set(POLICIES) - {"calibrated"}, "which is for chains"


def distance(kind, verifier, parents, policy, vocab, limit, iterations, zeros=0.0, eos=frozenset()):
    target, draft = dists(vocab, zeros)
    plan = Plan(parents, kind, ref.VERIFIERS[verifier])
    result = dist(target, draft, plan, limit, policy, eos, iterations)
    assert abs(sum(result.values()) - 1) < 1e-9
    return toy.total_variation(result, toy.complete({(): 1.0}, target, limit, eos))


@pytest.mark.parametrize("parents, vocab, limit, iterations", [(WIDE, 3, 4, 2), (DEEP, 2, 6, 3)])
@pytest.mark.parametrize(
    "kind, verifier",
    [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS],
)
@pytest.mark.parametrize("name", CHOICES)
def test_distribution_is_the_targets(name, kind, verifier, parents, vocab, limit, iterations):
    policy = CHOICES[name](parents)
    for zeros, eos in ((0.0, set()), (0.5, {0})):
        assert (
            distance(kind, verifier, parents, policy, vocab, limit, iterations, zeros, eos) < 1e-12
        )


@pytest.mark.parametrize("name", CHOICES)
def test_budgets_differ(name):
    """Or nothing was enumerated: prefixes differ in how many nodes are there."""
    policy, sizes = CHOICES[name](WIDE), set()

    def counted(tree, node, children):
        result = policy.select(tree, node, children)
        sizes.add((node > 0, len(result), tree.plan.budget))
        return result

    counting = Slow(policy.start, policy.budget, counted, policy.update)
    distance("drawn", "recursive", WIDE, counting, 3, 4, 2)
    budgets, below = {budget for _, _, budget in sizes}, {count for deep, count, _ in sizes if deep}
    assert len(budgets) > 1 or below >= {0, 2}


# --- Policies that peek ---


def after_a_look(tree, node, children):
    """Leaves out the children that are not probable enough, and not only what follows them."""
    return [child for child in children if confidence_of(tree, child) >= 0.3]


def by_siblings(tree, node, children):
    """Drafts no further sibling after one that is probable enough."""
    for place, child in enumerate(children, 1):
        if confidence_of(tree, child) >= 0.3:
            return children[:place]
    return children


def by_the_target(tree, node, children):
    """Drafts what the target would accept."""
    return [
        child
        for child in children
        if tree.p(node)[tree.tokens[child]] >= tree.q(child)[tree.tokens[child]]
    ]


def by_what_follows(tree, node, children):
    """Ends a path before a node by what was drawn after it."""
    return children if any(tree.tokens[child] == 0 for child in children) else []


@pytest.mark.parametrize(
    "kind, verifier, select",
    [
        ("drawn", "recursive", after_a_look),
        ("drawn", "traversal", after_a_look),
        ("mixed", "mixed", after_a_look),
        pytest.param("iid", "kseq", after_a_look, marks=pytest.mark.slow),
        ("iid", "kseq", by_siblings),
        ("drawn", "recursive", by_the_target),
        ("iid", "traversal", by_the_target),
        ("drawn", "traversal", by_what_follows),
    ],
)
def test_enumeration_catches(kind, verifier, select):
    assert distance(kind, verifier, WIDE, Slow(select=select), 3, 4, 2) > 0.01
