"""Shapes of trees: what they say of themselves, what they reject, and which one is the fastest."""

import itertools
import math

import numpy as np
import pytest

import specdec_jax as sd
from specdec_jax.speculative.trees import CHILDREN

SHARES = [0.6, 0.2, 0.1]


def shapes(size: int):
    """Every tree of `size` nodes, some of them with several numberings."""
    return (
        sd.Tree(parents) for parents in itertools.product(*(range(node) for node in range(1, size)))
    )


def enumerated(tree: sd.Tree, shares) -> float:
    """Returns the mean of the committed tokens over every outcome.

    At each node one of its ranks, or none, has the target's token.
    """
    children = {
        (parent, rank): node
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks[1:]), 1)
    }

    def share_of(depth):
        return shares[min(depth, len(shares) - 1)] if np.ndim(shares) == 2 else shares

    def committed(node: int, depth: int) -> float:
        total = 1.0
        for rank, share in enumerate(share_of(depth)):
            if (node, rank) in children:
                total += share * committed(children[node, rank], depth + 1)
        return total

    return committed(0, 0)


@pytest.mark.parametrize(
    "shares", [SHARES, [[0.5, 0.3], [0.9, 0.05], [0.2, 0.1]]], ids=["everywhere", "by depth"]
)
def test_expected_tokens(shares):
    for tree in shapes(5):
        assert tree.expected(shares) == pytest.approx(enumerated(tree, shares), abs=1e-12)


def test_expected_tokens_are_those_of_simulated_walks():
    tree, rng = sd.Tree.uniform((2, 1, 2)), np.random.default_rng(0)
    ranks = rng.choice(
        4, p=[0.6, 0.2, 0.1, 0.1], size=(40_000, tree.size)
    )  # the target's token at every node
    children = {
        (parent, rank): node
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks[1:]), 1)
    }
    committed = []
    for drawn in ranks:
        node, count = 0, 1
        while (node := children.get((node, drawn[node]))) is not None:
            count += 1
        committed.append(count)
    error = np.std(committed) / len(committed) ** 0.5
    assert tree.expected(SHARES) == pytest.approx(np.mean(committed), abs=4 * error)


def test_expected_tokens_of_a_chain_are_the_paper_s():
    assert sd.Tree.chain(4).expected([0.8]) == pytest.approx((1 - 0.8**5) / 0.2)


@pytest.mark.parametrize("size", [2, 3, 5, 6])
@pytest.mark.parametrize(
    "shares", [SHARES, [[0.5, 0.3], [0.9, 0.05], [0.2, 0.1]], [[0.4, 0.4], [0.4, 0.4]]]
)
def test_no_tree_of_the_size_has_more_tokens(size, shares):
    """With a free drafter the best tree up to a size has the most tokens."""
    for depth in range(1, size):
        found = sd.Tree.best(shares, size, depth)
        assert found.size <= size and found.depth <= depth
        most = max(tree.expected(shares) for tree in shapes(size) if tree.depth <= depth)
        assert found.expected(shares) == pytest.approx(most, abs=1e-12)


@pytest.mark.parametrize("cost_ratio", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("costs", [{6: 1.1}, {2: 1.05, 6: 2.0}, {1: 1.0, 2: 1.6, 6: 1.7}])
def test_no_tree_is_faster(costs, cost_ratio):
    def time(tree):
        return np.interp(
            tree.size, [1, *(n for n in costs if n > 1)], [1, *(costs[n] for n in costs if n > 1)]
        )

    def speed(tree):
        return tree.expected(SHARES) / (time(tree) + cost_ratio * tree.depth)

    fastest = max((tree for size in range(2, 7) for tree in shapes(size)), key=speed)
    found = sd.Tree.best(SHARES, 6, 5, costs, cost_ratio)
    if speed(fastest) <= 1:
        assert found is None
    else:
        assert speed(found) == pytest.approx(speed(fastest), abs=1e-12)


def test_more_nodes_levels_or_acceptance_never_hurt():
    tokens = np.array(
        [
            [sd.Tree.best(SHARES, size, depth).expected(SHARES) for depth in (1, 2, 4)]
            for size in (2, 4, 16, 64)
        ]
    )
    assert np.all(np.diff(tokens, axis=0) >= 0) and np.all(np.diff(tokens, axis=1) >= 0)
    assert np.all(np.diff(tokens[2:], axis=1) > 0)  # there is room for the levels
    better = sd.Tree.best([0.7, 0.2, 0.1], 16, 4)
    assert better.expected([0.7, 0.2, 0.1]) > tokens[2, 2]


def test_the_best_shape_may_be_a_chain_or_none():
    dear = {width: float(width) for width in range(1, 10)}
    assert sd.Tree.best(SHARES, 9, 8, dear) is None
    assert sd.Tree.best(SHARES, 9, 8, None, cost_ratio=2.0) is None
    assert sd.Tree.best([0.0, 0.0], 9, 8) is None
    assert sd.Tree.best([0.95, 0.01], 9, 8, {9: 1.4}, 0.02).is_chain
    assert sd.Tree.best([0.5, 0.4], 9, 8, {9: 1.0}, 0.02).width == 2


def test_trees_like_the_bundled_pair_s():
    """Where 64 positions cost hardly more than one, a tree gains some 15 % over the best chain."""
    shares, costs = [0.863, 0.067, 0.022, 0.008, 0.003], {64: 1.08}

    def speed(tree):
        return tree.expected(shares) / (
            np.interp(tree.size, [1, 64], [1, 1.08]) + 0.02 * tree.depth
        )

    tree, chain = (
        sd.Tree.best(shares, 64, 32, costs, 0.02),
        sd.Tree.best(shares[:1], 64, 32, costs, 0.02),
    )
    assert chain.is_chain and not tree.is_chain
    assert 1.1 < speed(tree) / speed(chain) < 1.2


def test_nodes_come_in_order_of_their_value():
    """So that a budget of nodes leaves out those that are accepted most seldom."""
    tree = sd.Tree.best(SHARES, 40, 6)
    first = [sd.Tree(tree.parents[:kept]).expected(SHARES) for kept in range(1, 40)]
    gains = np.diff([1.0, *first])
    assert np.all(np.diff(gains) <= 1e-15) and gains[-1] > 0


def test_shares_out_of_order_change_places():
    assert sd.Tree.best([0.1, 0.6, 0.2], 12, 4) == sd.Tree.best([0.6, 0.2, 0.1], 12, 4)


def test_a_record_s_costs_have_their_widths_as_text():
    assert sd.Tree.best(SHARES, 8, 4, {"1": 1.0, "8": 1.3}) == sd.Tree.best(SHARES, 8, 4, {8: 1.3})


def test_kinds_reach_the_best_tree():
    tree = sd.Tree.best(SHARES, 8, 4, children="drawn", verifier="recursive")
    assert (tree.kind, tree.verify) == ("drawn", "recursive")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(acceptance_by_rank=[]), r"acceptance_by_rank: got \[\], expected a list of numbers"),
        (
            dict(acceptance_by_rank=[[0.5], [0.5, 0.1]]),
            "acceptance_by_rank: got .*of the same length for each depth",
        ),
        (dict(acceptance_by_rank="good"), "acceptance_by_rank: got 'good'"),
        (dict(acceptance_by_rank=[0.9, 0.2]), "acceptance_by_rank: .*at most 1 in all"),
        (dict(acceptance_by_rank=[0.9, -0.1]), "acceptance_by_rank: .*expected shares"),
        (dict(acceptance_by_rank=[math.nan]), "acceptance_by_rank: .*expected shares"),
        (dict(nodes=1), "nodes: got 1, expected an integer from 2 to 257"),
        (dict(nodes=258), "nodes: got 258"),
        (dict(nodes=8.0), "nodes: got 8.0, expected an integer"),
        (dict(depth=0), "depth: got 0, expected an integer from 1"),
        (dict(depth=True), "depth: got True"),
        (dict(cost_ratio=-0.1), "cost_ratio: got -0.1, expected a number of at least 0"),
        (dict(cost_ratio=math.nan), "cost_ratio: got nan"),
        (
            dict(verify_costs={4: 1.2}),
            "verify_costs: got costs of up to 4 positions, expected up to nodes = 8",
        ),
        (
            dict(verify_costs={1: 2.0, 8: 3.0}),
            "verify_costs: got .* expected positive numbers .* 1 for one position",
        ),
        (dict(verify_costs={0: 1.0, 8: 3.0}), "verify_costs: got"),
        (dict(verify_costs={8: math.nan}), "verify_costs: got"),
        (dict(children="eagle"), "children: got 'eagle', expected 'auto', 'drawn'"),
    ],
)
def test_rejected_arguments_of_best(arguments, message):
    with pytest.raises(ValueError, match=message):
        sd.Tree.best(**dict(acceptance_by_rank=SHARES, nodes=8, depth=4) | arguments)


def test_a_tree_of_given_widths():
    tree = sd.Tree.uniform((2, 2))
    assert (tree.size, tree.depth, tree.width, tree.is_chain) == (7, 2, 2, False)
    values = [sd.Tree(tree.parents[:kept]).expected([0.863, 0.067]) for kept in range(1, 7)]
    assert np.all(np.diff(np.diff(values)) <= 1e-15)  # numbered by priority
    for node in range(1, tree.size):
        line = tree.lines[node, : tree.depths[node] + 1]
        assert line[0] == 0 and line[-1] == node and line[-2] == tree.parents[node - 1]
    assert all(np.all(tree.depths[tree.level(depth)] == depth) for depth in range(3))
    assert [len(tree.level(depth)) for depth in range(3)] == [1, 2, 4]
    assert [len(tree.inner(depth)) for depth in range(3)] == [1, 2, 0]
    for parent in {*tree.parents}:
        children = [node for node in range(1, tree.size) if tree.parents[node - 1] == parent]
        assert list(tree.ranks[children]) == [0, 1]


def test_a_chain():
    tree = sd.Tree.chain(3)
    assert tree.parents == (0, 1, 2) and tree.is_chain and tree.depth == 3 and tree.width == 1
    assert tree == sd.Tree.uniform((1, 1, 1)) and hash(tree) == hash(sd.Tree((0, 1, 2)))


def test_branches_are_the_tree_s_for_every_row():
    tree = sd.Tree.uniform((2, 1))
    found = tree.branches(3)
    assert all(leaf.shape[0] == 3 and np.all(leaf == leaf[:1]) for leaf in found)
    assert list(found.parents[0]) == [-1, *tree.parents]
    assert np.array_equal(found.lines[0], tree.lines)


def test_chains():
    tree = sd.Chains(3, 2)
    assert tree.parents == (0, 1, 0, 3, 0, 5) and (tree.size, tree.depth, tree.width) == (7, 2, 3)
    assert (tree.kind, tree.verify) == ("iid", "kseq") and isinstance(tree, sd.Tree)
    assert sd.Chains(1, 3).is_chain and sd.Chains(2, 1).parents == (0, 0)
    assert (
        tree == sd.Chains(3, 2) and hash(tree) == hash(sd.Chains(3, 2)) and tree != sd.Chains(2, 3)
    )
    assert sd.Chains(2, 2, verifier="recursive").verify == "recursive"


def test_a_dynamic_tree():
    tree = sd.DynamicTree(depth=3, width=4, nodes=20)
    assert (tree.size, tree.depth, tree.width, tree.is_chain) == (20, 3, 4, False)
    assert (tree.kind, tree.verify) == ("gumbel", "gumbel") and tree.drafted == 4 + 2 * 16
    assert sd.DynamicTree(3, 4, 20, "top").verify == "point"
    assert sd.DynamicTree(1, 4, 5).drafted == 4
    assert hash(tree) == hash(sd.DynamicTree(3, 4, 20))


@pytest.mark.parametrize("kind", CHILDREN)
def test_the_default_verifier_is_the_first_of_its_kind(kind):
    assert sd.Tree((0, 0), kind).verify == CHILDREN[kind][0]
    assert sd.Tree((0, 0), kind, "typical").verify == "typical"
    assert sd.Tree((0, 0)).kind == "drawn"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sd.Tree(()), "parents: got 0 nodes, expected 1 to 256"),
        (lambda: sd.Tree((0,) * 257), "parents: got 257 nodes"),
        (lambda: sd.Tree((0, 2)), "parents: got 2 for node 2, expected a number from 0 to 1"),
        (lambda: sd.Tree((0, -1)), "parents: got -1 for node 2"),
        (
            lambda: sd.Tree((0,), "random"),
            "children: got 'random', expected 'auto', 'drawn', 'top', 'gumbel', 'mixed', 'iid'$",
        ),
        (
            lambda: sd.Tree((0,), "mixed", "kseq"),
            "verifier: got 'kseq', expected 'auto', 'mixed', .* for children 'mixed'$",
        ),
        (
            lambda: sd.Tree((0,), verifier="kseq"),
            "output distribution is exactly the target's for children 'drawn'$",
        ),
        (
            lambda: sd.Tree((0,), "top", "never"),
            "verifier: got 'never', expected 'auto', 'point', 'gumbel', 'typical'$",
        ),
        (lambda: sd.Tree.uniform(()), r"widths: got \(\), expected integers of at least 1"),
        (lambda: sd.Tree.uniform((2, 0)), r"widths: got \(2, 0\)"),
        (
            lambda: sd.Tree.uniform((16, 16)),
            r"widths: got \(16, 16\), expected at most 256 nodes in all",
        ),
        (lambda: sd.Chains(0, 3), "count: got 0, expected an integer from 1 to 256"),
        (lambda: sd.Chains(4, 65), "length: got 65, expected an integer from 1 to 64"),
        (lambda: sd.Chains(2, 2.5), "length: got 2.5"),
        (
            lambda: sd.Chains(2, 2, "top"),
            "children: got 'top', expected 'auto', 'iid', since chains are .* independently",
        ),
        (lambda: sd.Chains(2, 2, "iid", "mixed"), "verifier: got 'mixed'"),
        (lambda: sd.DynamicTree(0, 4, 5), "depth: got 0, expected an integer from 1 to 256"),
        (lambda: sd.DynamicTree(3, 1, 4), "width: got 1, expected an integer from 2"),
        (lambda: sd.DynamicTree(3, 4, 3), "nodes: got 3, expected an integer from 4 to 37"),
        (lambda: sd.DynamicTree(3, 4, 38), "nodes: got 38, expected an integer from 4 to 37"),
        (lambda: sd.DynamicTree(6, 10, 300), "nodes: got 300, expected an integer from 7 to 257"),
        (
            lambda: sd.DynamicTree(3, 4, 20, "mixed"),
            "children: got 'mixed', expected 'auto', 'gumbel', 'top': .* drawn",
        ),
        (lambda: sd.DynamicTree(3, 4, 20, "drawn", "traversal"), "children: got 'drawn'"),
        (
            lambda: sd.DynamicTree(3, 4, 20, verifier="mixed"),
            "verifier: got 'mixed', expected 'auto', 'gumbel', 'point'",
        ),
    ],
)
def test_rejected_shapes(make, message):
    with pytest.raises(ValueError, match=message):
        make()
