"""Every drafter of trees equals autoregressive decoding and its own chains.

Children of merged trees are verified by their own drafter's distribution.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
import toy
from cascade_parts import EOS, INPUTS, KEY, LIMIT, LIMITS, MODEL, OTHER, PREFIXES, TARGET, V, table
from distribution_samples import SPREAD, g_test, hash_pair, joint_distribution, sample, traced_anew
from eagle_models import random_eagle
from random_heads_of import random_heads
from suffix_texts import random_texts
from toy_models import HashModel, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.drafters import merged
from specdec_jax.speculative.drafter import TreeDrafter
from specdec_jax.speculative.trees import Chains, DynamicTree, Tree

pytestmark = pytest.mark.usefixtures("quick")
# Every third row is at temperature 0.
MIXED = sd.SamplingConfig(
    temperature=[0.0, 1.0, 0.7] * 4, top_k=[0, 0, 6] * 4, top_p=[1.0, 0.9, 1.0] * 4
)
SAMPLED = sd.SamplingConfig(temperature=0.9, top_k=9)


@functools.cache
def t5():
    return noisy_copy(tiny_t5(0, V, decoder_layers=3), 2.0)


def early_exit():
    return sd.EarlyExitDrafter(t5(), 2)


DRAFTERS = {
    "model": (TARGET, lambda: sd.ModelDrafter(MODEL)),
    "early exit": (None, early_exit),
    "itself in int8": (None, lambda: sd.SelfDrafter(t5())),
    "heads": (None, lambda: random_heads(t5(), share_head=True)),
    "in parallel": (TARGET, lambda: sd.ParallelDrafter(MODEL)),
    "eagle": (None, lambda: random_eagle(t5(), noisy_copy(t5(), 0.1, 1))),
    "bigrams": (TARGET, lambda: table(False)),
    "bigrams, drawn": (TARGET, lambda: table(True)),
    "lookup": (TARGET, lambda: sd.PromptLookupDrafter(1)),
    "copy": (TARGET, lambda: sd.PromptLookupDrafter(min_match=0)),
    "suffix": (TARGET, lambda: random_texts(V)),
    "assisted": (TARGET, lambda: sd.AssistedNGramDrafter(3)),
    "recycling": (TARGET, lambda: sd.TokenRecycling(V)),
    "two models": (
        TARGET,
        lambda: sd.MergedDrafter(sd.ModelDrafter(MODEL), sd.ModelDrafter(OTHER)),
    ),
    "early exit and bigrams": (None, lambda: sd.MergedDrafter(table(True), early_exit())),
    "a copy and a model": (
        TARGET,
        lambda: sd.MergedDrafter(sd.PromptLookupDrafter(2), sd.ModelDrafter(MODEL)),
    ),
}


def run(name, sampling=MIXED, speculative=True, **options):
    target, make = DRAFTERS[name]
    options = (
        dict(max_new_tokens=LIMITS, decoder_prefix=PREFIXES, eos_ids=(EOS, 8), key=KEY) | options
    )
    return sd.generate(
        target or t5(),
        INPUTS,
        drafter=make() if speculative else None,
        sampling=sampling,
        **options,
    )


@functools.cache
def plain(of_t5: bool, verifier: str):
    return run("early exit" if of_t5 else "model", speculative=False, verifier=verifier)


def assert_same(found, expected, rows=slice(None)):
    np.testing.assert_array_equal(found.tokens[rows], expected.tokens[rows])
    np.testing.assert_array_equal(found.lengths[rows], expected.lengths[rows])
    np.testing.assert_allclose(found.log_probs[rows], expected.log_probs[rows], atol=1e-4)


def test_the_table_has_every_drafter_of_trees():
    ends = "Drafter", "Cascade", "Recycling"  # look-ahead decoding has a tree of its own
    exported = {name for name in sd.__all__ if name.endswith(ends)}
    assert {type(make()).__name__ for _, make in DRAFTERS.values()} == {
        name for name in exported if issubclass(getattr(sd, name), TreeDrafter)
    }


# --- Identities ---


QUICK = ("lookup",)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS],
)
def test_coupled_trees_equal_plain_sampling(name):
    """In all rows, with ragged prefixes and limits, EOS ids in branches, and parts of the tree."""
    of_t5, tree = DRAFTERS[name][0] is None, Tree((0, 0, 1, 0, 1, 2, 3, 6), verifier="gumbel")
    for gamma in ("auto", [1, 2, 3, 4, 5, 6, 7, 8] + [8] * 4):
        found = run(name, tree=tree, gamma=gamma)
        assert_same(found, plain(of_t5, "gumbel"))
        assert 0 < found.stats.accepted < found.stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two models", "a copy and a model"])
def test_rows_at_temperature_0_are_plain_ones(name):
    """With the children and the verifier that the drafter chooses."""
    found = run(name, tree=Tree.uniform((2, 2, 1)), gamma="auto")
    assert_same(found, plain(DRAFTERS[name][0] is None, "block"), slice(0, None, 3))
    assert 0 < found.stats.accepted < found.stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kinds, verifier",
    [
        ("early exit", ("drawn", "recursive"), "token"),
        ("heads", ("drawn", "typical"), "typical"),
        ("bigrams, drawn", ("iid", "traversal"), "block"),
    ],
)
def test_one_branch_draws_what_a_chain_draws(name, kinds, verifier):
    found = run(name, SAMPLED, tree=Tree.chain(4, children=kinds[0], verifier=kinds[1]))
    chain = run(name, SAMPLED, gamma=4, verifier=verifier)
    assert_same(found, chain)
    for count in ("target_calls", "draft_calls", "drafted", "accepted"):
        assert getattr(found.stats, count) == getattr(chain.stats, count)


@pytest.mark.slow
def test_early_exits_write_nothing_that_is_read_later():
    """Early exits may expand more nodes than the target is fed, at the very end of the cache.

    A mistake would end in another token. The slots past the committed tokens may hold anything
    before a call.
    """
    exit_, options = early_exit(), dict(max_new_tokens=8, eos_ids=(), key=KEY)
    expected = sd.generate(t5(), INPUTS, **options)
    for tree in (DynamicTree(2, 12, 3), Tree.uniform((3, 2, 2), children="top")):
        state, request = prepare(t5(), INPUTS, drafter=exit_, tree=tree, **options)
        while not np.all(state.done):
            dead = (
                np.arange(state.target_cache.layers[0].slots)
                >= np.asarray(state.lengths)[:, None] - 1
            )

            def junk(x, number):
                return jnp.where(dead[:, None, :, None], number, x)

            layers = [
                one.replace(key=junk(one.key, jnp.nan), value=junk(one.value, 1e30))
                for one in state.target_cache.layers
            ]
            cache = state.target_cache.replace(layers=tuple(layers))
            state = advance(
                request.network, request.drafter, state.replace(target_cache=cache), np.int32(1)
            )
        np.testing.assert_array_equal(state.tokens[:, 1:9], expected.tokens)
        assert np.sum(state.counts.accepted) > 0


# --- What is proposed ---


@jax.jit
def drafted(drafter, state, wanted, budget):
    return drafter.draft_tree(state.draft_state, state, wanted, budget)[1]


def first_tree(target, drafter, inputs, prefixes, tree, sampling=SAMPLED, iterations=0, **options):
    """Returns the tree drafted after some iterations, the state before, and tokens by node."""
    prefix = {} if prefixes is None else dict(decoder_prefix=prefixes)
    state, request = prepare(
        target,
        inputs,
        drafter=drafter,
        tree=tree,
        sampling=sampling,
        max_new_tokens=LIMIT,
        key=KEY,
        **{"eos_ids": (), **prefix, **options},
    )
    if iterations:
        state = advance(request.network, request.drafter, state, np.int32(iterations))
    rows = np.full(len(inputs), 99, np.int32)
    draft = jax.device_get(drafted(request.drafter, state, rows, rows))
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)

    def get_path(row, node):
        return draft.tokens[row, tree.lines[node, 1 : 1 + tree.depths[node]]].tolist()

    texts = [
        [[*tokens[row, : lengths[row]].tolist(), *get_path(row, n)] for n in range(tree.size)]
        for row in range(len(inputs))
    ]
    return draft, state, texts


def test_a_copy_is_looked_up_after_every_node():
    """Best places first, the output's before the input's, equal ids once."""
    tree = Tree((0, 0, 0, 1, 1, 2, 4), children="top")
    draft, *_ = first_tree(
        TARGET,
        sd.PromptLookupDrafter(2),
        [[5, 9, 1], [3, 1]],
        [[5, 6, 7, 5, 6, 8, 5], [4]],
        tree,
        sd.SamplingConfig(),
    )
    # After 5: 6 (twice in the output), then 9 (in the input). After "5 6": 8, then 7, then (from "5
    # 6 7") 5.
    np.testing.assert_array_equal(draft.valid[0], [1, 1, 1, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(draft.tokens[0][draft.valid[0]], [5, 6, 9, 8, 7, 1, 5])
    assert not draft.valid[1, 1:].any() and not draft.failed.any(), "to find nothing is no failure"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_table_is_looked_up_after_every_node(sampled):
    """The children are what most often followed the path; fewer where fewer followed."""
    sequences = [[2, 3, 4], [2, 3, 4], [2, 3, 5], [2, 6, 4], [3, 7], [3, 7], [3, 7]]
    drafter = sd.NGramDrafter.count(sequences, V, 3, sampled=sampled)
    tree = Tree((0, 0, 0, 1, 1, 2, 2), children="top")
    draft, *_ = first_tree(
        TARGET, drafter, [[5, 1]], [[2]], tree, sd.SamplingConfig(temperature=0.5)
    )
    np.testing.assert_array_equal(draft.valid[0], [1, 1, 1, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(draft.tokens[0][draft.valid[0]], [2, 3, 6, 4, 5, 4])


@pytest.mark.slow
def test_each_depth_has_its_head():
    drafter = random_heads(t5(), num_heads=2)
    tree = Tree.uniform((3, 2, 1), children="top")
    draft, state, _ = first_tree(t5(), drafter, INPUTS, PREFIXES, tree, iterations=2)
    going = ~np.asarray(state.done)
    logits = np.asarray(drafter.network.logits(state.draft_state.states))
    best = np.argsort(-logits, axis=2, kind="stable")
    assert going.any()
    for node in range(1, tree.size):
        depth, rank = tree.depths[node], tree.ranks[node]
        np.testing.assert_array_equal(draft.valid[:, node], going & (depth <= 2))
        if depth <= 2:
            np.testing.assert_array_equal(draft.tokens[going, node], best[going, depth - 1, rank])
    first, *_ = first_tree(t5(), drafter, INPUTS, PREFIXES, tree)
    assert not first.valid[:, 1:].any(), "there is no state yet"


# --- Merged trees ---


def shares(model, row: int, tokens) -> np.ndarray:
    """Returns the model's distribution `[V]` after `tokens`, teacher-forced, under `SAMPLED`."""
    logits = np.asarray(model.logits([INPUTS[row]], [tokens], [len(INPUTS[row])]))[0, -1]
    return toy.adjusted_probs(logits, SAMPLED.temperature, SAMPLED.top_k, 1.0)


@tiers.parametrize(
    "kind, iterations", [("drawn", 0), ("drawn", 3), ("iid", 0), ("iid", 3)], first=1
)
def test_children_have_the_distribution_of_their_own_drafter(kind, iterations):
    """Also after paths by the other drafter, which its own cache lacks.

    The second model is never right.
    """
    wrong = noisy_copy(t5(), 3.0, 3)
    models = noisy_copy(t5(), 0.05, 1), wrong
    both = sd.MergedDrafter(*map(sd.ModelDrafter, models))
    tree = Tree((0, 0, 1, 2, 0, 3, 4), children=kind)
    draft, state, texts = first_tree(t5(), both, INPUTS, PREFIXES, tree, iterations=iterations)
    assert iterations == 0 or np.max(state.last_accepted) > 1
    for row in np.flatnonzero(~np.asarray(state.done))[:4]:
        for node in range(1, tree.size):
            assert draft.valid[row, node]
            owner = tree.ranks[tree.lines[node, 1]] % 2
            expected = shares(models[owner], row, texts[row][tree.parents[node - 1]])
            origin = draft.origins[row, node]
            dist = np.exp(draft.dist.logits[row, origin] - draft.dist.log_normalizer[row, origin])
            np.testing.assert_allclose(dist, expected, atol=2e-4)
            assert expected[draft.tokens[row, node]] > 0


def test_two_equal_drafters_draw_apart():
    target, drafter = hash_pair()
    both = sd.MergedDrafter(*[sd.ModelDrafter(drafter)] * 2)
    draft, _, _ = first_tree(target, both, INPUTS, PREFIXES, Tree((0, 0), children="iid"))
    assert np.any(draft.valid[:, 1] & (draft.tokens[:, 1] != draft.tokens[:, 2]))


@pytest.mark.parametrize("nested", ["first", "second"])
def test_three_equal_drafters_draw_apart(nested):
    target, drafter = hash_pair()
    one = sd.ModelDrafter(drafter)
    two = sd.MergedDrafter(one, one)
    parts = (two, one) if nested == "first" else (one, two)
    tree = Tree((0, 0, 0, 0), children="iid")
    draft, _, _ = first_tree(target, sd.MergedDrafter(*parts), INPUTS, PREFIXES, tree)
    for a, b in itertools.combinations((1, 2, 3, 4), 2):
        assert np.any(draft.valid[:, 1] & (draft.tokens[:, a] != draft.tokens[:, b]))


@pytest.mark.slow
def test_distribution_of_a_merged_tree_in_another():
    target, drafter = hash_pair()
    one = sd.ModelDrafter(drafter)
    three = sd.MergedDrafter(sd.MergedDrafter(one, one), one)
    options = dict(tree=Tree((0, 0, 0, 0), "iid", "recursive"), gamma="auto", verifier="block")
    counts, _ = sample(target, three, SPREAD, 40_000, **options)
    assert g_test(counts, joint_distribution(target, SPREAD)) > 1e-9


def merged_distribution(verifier: str, run=advance) -> float:
    """Returns the p-value of 40,000 outputs of three tokens, under the target's distribution."""
    target, drafter = hash_pair()
    other = HashModel(V, 2, spread=3.0, likeness=0.3)
    both = sd.MergedDrafter(sd.ModelDrafter(drafter), sd.ModelDrafter(other))
    tree = Tree((0, 0, 1, 2, 0), "drawn", verifier)
    options = dict(tree=tree, gamma="auto", verifier="block")
    counts, _ = sample(target, both, SPREAD, 40_000, run=run, **options)
    return g_test(counts, joint_distribution(target, SPREAD))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["recursive", "traversal"])
def test_distribution_of_merged_trees(verifier):
    assert merged_distribution(verifier) > 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["one q for both drafters", "both draw with the same words"])
def test_wrong_merges_are_detected(mutant, monkeypatch):
    if mutant.startswith("one"):
        whole = merged._merge_trees

        def by_the_first(tree, drafts, cache):
            draft = whole(tree, drafts, cache)
            first = [tree.fed[0] if parent == 0 else 1 for parent in (0, *tree.parents)]
            return draft._replace(origins=jnp.zeros_like(draft.origins) + jnp.asarray(first))

        monkeypatch.setattr(merged, "_merge_trees", by_the_first)
    else:
        monkeypatch.setattr(merged, "fold_part_keys", lambda state: state.keys)
    assert merged_distribution("recursive", traced_anew()) < 1e-9


# --- Refusals ---


def test_what_makes_no_sense_is_rejected():
    tree, model, lookup = Tree.uniform((2, 1)), sd.ModelDrafter(MODEL), sd.PromptLookupDrafter()
    two = sd.MergedDrafter(model, table(True))
    for drafter, options, message in (
        (
            lookup,
            dict(tree=Tree.uniform((2, 1), children="drawn")),
            "children: got 'drawn' with PromptLookupDrafter",
        ),
        (
            lookup,
            dict(tree=Chains(2, 2)),
            "children: got 'iid' with PromptLookupDrafter, expected 'top'",
        ),
        (
            table(False),
            dict(tree=Tree.uniform((2, 1), verifier="recursive")),
            "verifier: got 'recursive' with NGram",
        ),
        (
            table(False),
            dict(tree=DynamicTree(2, 2, 4)),
            "with NGramDrafter, expected a Tree, whose shape is fixed",
        ),
        (two, dict(tree=Chains(2, 2, verifier="kseq")), "verifier: got 'kseq' with MergedDrafter"),
        (
            two,
            dict(tree=Tree.uniform((2, 1), children="mixed")),
            "children: got 'mixed' with MergedDrafter",
        ),
        (two, dict(tree=Tree.chain(3)), "for 2 drafters: got .* at least 2 children of node 0"),
        (
            sd.MergedDrafter(model, two),
            dict(tree=Tree((0, 0, 0))),
            "for 3 drafters: got .* at least 4 children of node 0",
        ),
        (two, dict(gamma=3), "tree: got None with MergedDrafter"),
        (
            sd.MergedDrafter(model, lookup),
            dict(tree=Tree.uniform((2,), children="drawn")),
            "expected 'top'",
        ),
        (sd.RandomDrafter(V), dict(tree=tree), "which drafts chains"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.generate(TARGET, INPUTS, drafter=drafter, **options)
    for make, message in (
        (
            lambda: sd.MergedDrafter(model, sd.RandomDrafter(V)),
            "second: got RandomDrafter.*expected a drafter that drafts",
        ),
        (lambda: sd.MergedDrafter(None, model), "first: got None"),
        (lambda: sd.HorizontalCascade(two, model, 2), "expected a drafter of chains"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.slow
def test_merged_drafters_differ_by_their_parts():
    one, other = sd.ModelDrafter(t5()), sd.ModelDrafter(noisy_copy(t5(), 0.1))
    assert sd.MergedDrafter(one, other).contents != sd.MergedDrafter(other, one).contents
    assert sd.MergedDrafter(one, other).models == (one.model, other.model)
