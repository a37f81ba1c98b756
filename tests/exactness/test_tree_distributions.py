"""Token trees have the target's distribution, by enumeration; known mistakes are detected."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import tiers
import toy
import tree_reference as ref
from enumerations import ADJUSTMENTS, DELTA, EPSILON, dists
from tree_reference import Plan

from specdec_jax.speculative.tree_verifiers import TREE_VERIFIERS
from specdec_jax.speculative.trees import CHILDREN, LOSSY_TREES

PAIRS = [
    (kind, verifier)
    for kind, verifiers in CHILDREN.items()
    for verifier in verifiers
    if verifier != "gumbel"
]
every_pair = pytest.mark.parametrize(
    "kind, verifier", [pair for pair in PAIRS if pair[0] != "gumbel"]
)
# Parents of nodes 1, 2 …
SHAPES = {
    "2": (0, 0),
    "2, 1": (0, 0, 1, 2),
    "2, 2": (0, 0, 1, 1, 2, 2),
    "3, 1": (0, 0, 0, 1, 2, 3),
    "1, 2": (0, 1, 1),
    "irregular": (0, 1, 0, 0, 3, 1, 2),
}
# V, shape, length limit: two iterations, of which the second starts from every prefix that the
# first can commit.
SIZES = [
    (2, "2, 2", 5),
    (2, "irregular", 5),
    (3, "2", 4),
    (3, "2, 1", 5),
    (3, "2, 2", 4),
    (3, "3, 1", 4),
    (3, "1, 2", 4),
]


def away(target):
    """Returns a distribution with none of the target's ids.

    Where the target has all ids, it has the least probable one alone.
    """

    def dist(prefix):
        p = np.asarray(target(prefix))
        others = p == 0 if np.any(p == 0) else np.arange(len(p)) == np.argmin(p)
        return others / others.sum()

    return dist


def distance(target, drafters, plan, limit, eos=frozenset(), **more):
    result = ref.speculative_distribution(target, drafters, plan, limit, eos, **more)
    assert abs(sum(result.values()) - 1) < 1e-9, (
        "a mutant is still a distribution; otherwise the enumeration is what fails"
    )
    return toy.total_variation(result, toy.complete({(): 1.0}, target, limit, eos))


def test_every_verifier_is_here():
    assert {*ref.VERIFIERS, *LOSSY_TREES} == set(TREE_VERIFIERS)
    assert {verifier for verifiers in CHILDREN.values() for verifier in verifiers} == set(
        ref.VERIFIERS
    )
    assert {name for name, verifier in TREE_VERIFIERS.items() if not verifier.exact} == set(
        LOSSY_TREES
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocab, shape, limit", SIZES)
@every_pair
def test_distribution_of_two_iterations_is_the_targets(kind, verifier, vocab, shape, limit):
    """Zeros and disjoint supports occur; EOS, limit and budget cut branches."""
    size = len(SHAPES[shape])
    for zeros, (eos, budget) in itertools.product(
        (0.0, 0.5), [(set(), size), ({0}, size), ({0, 1}, size - 1)]
    ):
        target, draft = dists(vocab, zeros)
        plan = Plan(SHAPES[shape], kind, ref.VERIFIERS[verifier], budget=budget)
        others = (target, toy.one_hot(draft), away(target)) if (vocab, shape) == (3, "2, 1") else ()
        for drafter in (draft, *others):
            assert distance(target, [drafter], plan, limit, eos) < 1e-12


@pytest.mark.parametrize("adjustments", ADJUSTMENTS, ids=str)
@every_pair
def test_distribution_under_every_processor(kind, verifier, adjustments):
    target, draft = (toy.processed(dist, **adjustments) for dist in dists(4))
    plan = Plan(SHAPES["2, 1"], kind, ref.VERIFIERS[verifier])
    assert distance(target, [draft], plan, 4, {3}) < 1e-12


@pytest.mark.parametrize("kind", CHILDREN)
def test_argmax_of_every_tree(kind):
    """At temperature 0 the output is the target's argmax, whatever children a tree has."""
    target, draft = dists(3)
    noise = np.random.default_rng(0).gumbel(size=(4, 3))
    plan = Plan(SHAPES["2, 2"], kind, ref.walk(ref.greedy))
    assert distance(toy.one_hot(target), [draft], plan, 4, {0}, noise=noise) < 1e-12


@pytest.mark.parametrize("kind", CHILDREN)
def test_gumbel_coupling_gives_the_plain_sample(kind):
    """For each noise, whatever the tree: plain sampling with the noise of the position."""
    for seed, zeros in itertools.product(range(8), (0.0, 0.5)):
        target, draft = dists(3, zeros)
        noise = np.random.default_rng(seed).gumbel(size=(4, 3))

        def plain(prefix):
            with np.errstate(divide="ignore"):
                return np.eye(3)[np.argmax(np.log(target(prefix)) + noise[len(prefix)])]

        plan = Plan(SHAPES["2, 2"], kind, ref.VERIFIERS["gumbel"])
        result = ref.speculative_distribution(
            target, [draft], plan, 4, {0}, iterations=4, noise=noise
        )
        assert toy.total_variation(result, toy.complete({(): 1.0}, plain, 4, {0})) < 1e-12


def test_children_by_noise_may_be_verified_as_point_masses():
    """A position's noise is met again in later iterations; no verifier's draw depends on it."""
    target, draft = dists(3)
    for seed in range(4):
        noise = np.random.default_rng(seed).gumbel(size=(5, 3))
        plan = Plan(SHAPES["2, 2"], "gumbel", ref.VERIFIERS["point"])
        assert distance(target, [draft], plan, 5, {0}, noise=noise) < 1e-12


@tiers.parametrize(
    "kind, verifier",
    [pair for pair in PAIRS if pair[0] in ("top", "drawn", "iid") and pair[1] != "kseq"],
    first=4,
)
def test_distribution_with_children_of_two_drafters(kind, verifier):
    """Siblings may have different distributions and equal tokens; each is verified by its own."""
    target, draft = dists(3)
    for other in (
        toy.table_distribution(3, 13),
        toy.table_distribution(3, 14, 0.5),
        target,
        toy.one_hot(draft),
    ):
        for origins in ((0, 1, 0, 1), (1, 0, 0, 0), (0, 1, 1, 0)):
            plan = Plan(SHAPES["2, 1"], kind, ref.VERIFIERS[verifier], origins)
            assert distance(target, [draft, other], plan, 4, {0}) < 1e-12
        plan = Plan((0, 0, 0, 1, 1), kind, ref.VERIFIERS[verifier], (0, 1, 0, 1, 0))
        assert distance(target, [draft, other], plan, 4, {0}) < 1e-12


def pruned_by_data(tree, node, children):
    return [child for child in children if tree.q(child)[tree.tokens[child]] >= 0.2]


def reversed_by_data(tree, node, children):
    return sorted(children, key=lambda child: (tree.q(child)[tree.tokens[child]], child))


@pytest.mark.parametrize("kind", ["top", "gumbel"])
@pytest.mark.parametrize("select", [pruned_by_data, reversed_by_data])
def test_children_that_were_not_drawn_may_be_pruned_and_reordered(kind, select):
    target, draft = dists(3)
    noise = np.random.default_rng(1).gumbel(size=(4, 3))
    plan = Plan(SHAPES["2, 2"], kind, ref.VERIFIERS["point"], select=select)
    assert distance(target, [draft], plan, 4, {0}, noise=noise) < 1e-12


# --- Mutants ---


def not_renormalised(tree, node):
    return [b if s else 0.0 for b, s in zip(tree.q(node), tree.sources[node])]


def by_the_first_drafter(tree, node):
    return list(tree.drafters[0]((*tree.prefix, *tree.path(tree.plan.parents[node - 1]))))


def sorted_by_distribution(tree, node, children):
    return sorted(children, key=lambda child: -tree.q(child)[tree.tokens[child]])


def pruned_by_distribution(tree, node, children):
    return [child for child in children if tree.q(child)[tree.tokens[child]] >= 0.3]


def reranked(tree, node, children):
    """Returns the three nodes with the greatest product of q on their way, as EAGLE-2 does."""
    values, numbers = {0: 1.0}, [0]
    for number in numbers:  # which grows
        for child in tree.chosen(number):
            values[child] = values[number] * tree.q(child)[tree.tokens[child]]
            numbers.append(child)
    kept = sorted(numbers[1:], key=lambda number: -values[number])[:3]
    return [child for child in children if child in kept]


def without_duplicates(tree, node, children):
    return list({tree.tokens[child]: child for child in reversed(children)}.values())[::-1]


def best_chain(tree, chance):
    """Algorithm 1 for each chain by itself; the one of which most is accepted is committed."""
    results = []
    for node in tree.children(0):
        here, accepted = 0, []
        while node:
            p, s, x = tree.p(here), tree.sources[node], tree.tokens[node]
            if not tree.flip(p[x] / s[x], node):
                results.append((*accepted, chance.choose(ref.less(p, s)[0], ("correction", node))))
                break
            here, accepted = node, [*accepted, x]
            node = next(iter(tree.children(node)), 0)
        else:
            results.append((*accepted, tree.following(tree.p(here), here)))
    return max(results, key=len, default=None) or (tree.following(tree.p(0), 0),)


def by_depth(key):
    return (key[0], key[2]) if key[0] == "accept" else key


def noise_of_the_draft(key):
    return ("draft", key[1] + 1, key[2] + 1) if key[0] == "final" else key


TWO_TWO, CHAINS = SHAPES["2, 2"], SHAPES["2, 1"]
RECURSIVE, TRAVERSAL, KSEQ, MIXED = (
    ref.VERIFIERS[name] for name in ("recursive", "traversal", "kseq", "mixed")
)
constant = functools.partial(ref.k_sequences, count=lambda children: 2)
# name: (the right plan, what is wrong)
MUTANTS = {
    "recursive, s not renormalised": (
        Plan(TWO_TWO, "drawn", RECURSIVE),
        dict(node_outcomes=not_renormalised),
    ),
    "drawn children sorted by q": (
        Plan(TWO_TWO, "drawn", RECURSIVE),
        dict(select=sorted_by_distribution),
    ),
    "drawn children sorted by q, traversal": (
        Plan(TWO_TWO, "drawn", TRAVERSAL),
        dict(select=sorted_by_distribution),
    ),
    "drawn children pruned by q": (
        Plan(TWO_TWO, "drawn", RECURSIVE),
        dict(select=pruned_by_distribution),
    ),
    "a drawn last child pruned by q": (
        Plan(TWO_TWO, "mixed", MIXED),
        dict(select=pruned_by_distribution),
    ),
    "i.i.d. children pruned by q": (Plan(CHAINS, "iid", KSEQ), dict(select=pruned_by_distribution)),
    "sampled children reranked": (Plan(TWO_TWO, "drawn", RECURSIVE), dict(select=reranked)),
    "sampled children reranked, traversal": (
        Plan(TWO_TWO, "drawn", TRAVERSAL),
        dict(select=reranked),
    ),
    "k-SEQ, duplicates skipped": (Plan(CHAINS, "iid", KSEQ), dict(select=without_duplicates)),
    "k-SEQ, k constant": (Plan(CHAINS, "iid", KSEQ), dict(verify=ref.walk(constant))),
    "i.i.d. recursion, duplicates skipped": (
        Plan(CHAINS, "iid", RECURSIVE),
        dict(select=without_duplicates),
    ),
    "best of two chains by algorithm 1": (Plan(CHAINS, "iid", RECURSIVE), dict(verify=best_chain)),
    "traversal, α not updated": (
        Plan(TWO_TWO, "drawn", TRAVERSAL),
        dict(verify=functools.partial(TRAVERSAL, updates=False)),
    ),
    "traversal, q not renormalised": (
        Plan(TWO_TWO, "drawn", TRAVERSAL),
        dict(node_outcomes=not_renormalised),
    ),
    "traversal, what is left without α": (
        Plan(TWO_TWO, "drawn", TRAVERSAL),
        dict(verify=functools.partial(TRAVERSAL, scaled=False)),
    ),
    "siblings share a uniform": (Plan(TWO_TWO, "drawn", RECURSIVE), dict(share=by_depth)),
    "i.i.d. siblings share a uniform": (Plan(CHAINS, "iid", KSEQ), dict(share=by_depth)),
    "nodes of a depth share a uniform, traversal": (
        Plan(TWO_TWO, "drawn", TRAVERSAL),
        dict(share=by_depth),
    ),
    "draft and residual share randomness": (
        Plan((0, 1), "drawn", RECURSIVE),
        dict(share=noise_of_the_draft),
    ),
    "one q for two drafters": (
        Plan((0, 0, 1, 2), "drawn", RECURSIVE, origins=(0, 1, 1, 0)),
        dict(node_outcomes=by_the_first_drafter),
    ),
    "one q for two drafters, traversal": (
        Plan((0, 0, 1, 2), "drawn", TRAVERSAL, origins=(0, 1, 1, 0)),
        dict(node_outcomes=by_the_first_drafter),
    ),
    "children of an EOS": (Plan(TWO_TWO, "mixed", MIXED), dict(past_eos=True)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_enumeration_catches(name):
    plan, wrong = MUTANTS[name]
    target, *drafters = (toy.table_distribution(3, seed) for seed in (3, 4, 14))
    assert distance(target, drafters, plan, 4, {0}) < 1e-12
    assert distance(target, drafters, dataclasses.replace(plan, **wrong), 4, {0}) > 0.01


# --- Tokens accepted ---


@pytest.mark.parametrize("vocab, shape", [(2, "2, 1"), (3, "2, 2"), (3, "irregular")])
def test_which_verifier_accepts_more(vocab, shape):
    """Traversal accepts no less than recursion; drawn children no fewer than point masses."""
    gains = []
    for seed, zeros in itertools.product(range(6), (0.0, 0.5)):
        target = toy.table_distribution(vocab, 100 + seed, zeros)
        draft = toy.table_distribution(vocab, 200 + seed, zeros)
        traversal, recursive, point = (
            ref.accepted(target, [draft], Plan(SHAPES[shape], "drawn", ref.VERIFIERS[name]), 9)
            for name in ("traversal", "recursive", "point")
        )
        assert traversal >= recursive - 1e-12 and recursive >= point - 1e-12
        gains.append((traversal - recursive, recursive - point))
    assert np.all(np.max(gains, axis=0) > 0.02)


@pytest.mark.parametrize(
    "kind, verifier", [pair for pair in PAIRS if pair[1] != "point"] + [("top", "point")]
)
def test_acceptance_at_one_node(kind, verifier):
    """The closed forms, against enumeration."""
    for vocab, count, zeros, seed in itertools.product((2, 3, 5), (1, 2, 3), (0.0, 0.5), range(3)):
        target, draft = (
            toy.table_distribution(vocab, 100 + seed, zeros),
            toy.table_distribution(vocab, 200 + seed, zeros),
        )
        actual = ref.accepted(target, [draft], Plan((0,) * count, kind, ref.VERIFIERS[verifier]), 9)
        expected = ref.acceptance(kind, verifier, target(()), draft(()), count)
        assert actual == pytest.approx(expected, abs=1e-9)


def test_acceptance_by_shared_noise():
    """With one child the closed form; with more children more; with all of them everything."""
    target, draft = dists(4)
    p, q = target(()), draft(())
    noise = np.random.default_rng(0).gumbel(size=(20_000, 4))
    shares = [ref.coupled_acceptance(p, q, count, noise) for count in (1, 2, 3, 4)]
    assert shares[0] == pytest.approx(toy.coupled_share(p, q), abs=0.02)
    assert np.all(np.diff(shares) > 0.005) and shares[3] == 1


def test_typical_acceptance_favours_no_improbable_token():
    """A token at or below the threshold has at most p(x) after any prefix."""
    for kind, zeros in itertools.product(("top", "drawn", "iid"), (0.0, 0.5)):
        target, draft = dists(3, zeros)
        plan = Plan(SHAPES["2, 2"], kind, ref.typical(EPSILON, DELTA))
        for prefix, following in toy.conditionals(
            ref.speculative_distribution(target, [draft], plan, 4, {0})
        ):
            p = target(prefix)
            threshold = toy.typical_threshold(p, EPSILON, DELTA)
            assert all(prob <= p[x] + 1e-12 or p[x] > threshold for x, prob in following.items())
