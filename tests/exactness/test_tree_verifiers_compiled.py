"""Compiled tree verifiers take the enumerated decisions, and a chain's for one branch."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
import toy
import tree_reference as ref
from enumerations import DELTA, EPSILON, as_distribution, float64
from tree_inputs import cases, committed, drafted, randomness

from specdec_jax.speculative import distributions
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.tree_growth import choose_children
from specdec_jax.speculative.tree_verifiers import TREE_VERIFIERS, TreeRandomness, walk_greedy
from specdec_jax.speculative.trees import CHILDREN, LOSSY_TREES, Tree
from specdec_jax.speculative.verifier import Randomness
from specdec_jax.speculative.verifiers import VERIFIERS

pytestmark = pytest.mark.usefixtures("quick")

EOS = 3
# Rows of one batch may have different trees, of as many nodes and as deep.
TREES = [Tree((0, 0, 1, 0, 1, 2, 1, 3, 3, 6)), Tree((0, 1, 2, 0, 1, 2, 4, 4, 0, 5))]
REFERENCES = ref.VERIFIERS | {"typical": ref.typical(EPSILON, DELTA)}
WITH_UNIFORMS = ("mixed", "recursive", "kseq", "traversal")


def verify(name, kind, draft, target, draws):
    asked = {"typical_epsilon": EPSILON, "typical_delta": DELTA}
    asked = {
        key: jnp.full(len(draft.tokens), value, target.logits.dtype) for key, value in asked.items()
    }
    verify = jax.jit(TREE_VERIFIERS[name].verify, static_argnums=2)
    return jax.device_get(verify(target, draft, kind, draws, asked))


def stacked(*parts):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


@tiers.parametrize("dtype", ["float32", "float64"], first=1)
@pytest.mark.parametrize("kind", CHILDREN)
def test_jax_takes_the_enumerated_decisions(kind, dtype):
    """A grid of uniforms, 0 included; EOS, budget and limit cut branches; ≤ would fail."""
    batches = [cases(tree, 100, seed) for seed, tree in enumerate(TREES)]
    rows = [(tree, row) for tree, batch in zip(TREES, batches) for row in batch]
    with float64(dtype == "float64"):
        draft, target = stacked(
            *(drafted(kind, tree, batch, EOS, dtype) for tree, batch in zip(TREES, batches))
        )
        draws = randomness([row for _, row in rows], dtype)
        for name in (*CHILDREN[kind], *LOSSY_TREES):
            actual = verify(name, kind, draft, target, draws)
            plans = {tree: ref.Plan(tree.parents, kind, REFERENCES[name]) for tree in TREES}
            expected = [row.decide(plans[tree], EOS) for tree, row in rows]
            assert committed(draft, actual) == expected
            assert {len(tokens) for tokens in expected} >= {1, 2, 3}, (
                "nearly every number of accepted tokens occurs"
            )
            if name in WITH_UNIFORMS:
                below = copy.deepcopy(rows)
                for _, row in below:
                    row.uniforms["accept"][row.uniforms["accept"] == 0] = -1e-9
                assert expected != [row.decide(plans[tree], EOS) for tree, row in below]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, name",
    [("drawn", "recursive"), ("drawn", "traversal"), ("iid", "recursive"), ("top", "point")],
)
def test_jax_verifies_children_of_two_drafters_by_their_own_distributions(kind, name):
    tree, origins = Tree((0, 0, 0, 0, 1, 1, 2, 3, 5)), (0, 1, 0, 1, 0, 1, 1, 0, 0)
    rows = cases(tree, 100)
    draft, target = drafted(kind, tree, rows, EOS, "float32", origins)
    result = verify(name, kind, draft, target, randomness(rows, "float32"))
    plan = ref.Plan(tree.parents, kind, REFERENCES[name], origins)
    assert committed(draft, result) == [row.decide(plan, EOS) for row in rows]


@pytest.mark.parametrize("kind", ["top", "iid"])
def test_jax_walks_at_temperature_0(kind):
    rows = cases(TREES[0], 50)
    draft, target = drafted(kind, TREES[0], rows, EOS, "float32")
    result = jax.jit(walk_greedy)(distributions.argmax(target.logits), draft)
    plan = ref.Plan(TREES[0].parents, kind, ref.walk(ref.greedy))
    assert committed(draft, result) == [row.decide(plan, EOS) for row in rows]


# --- A tree with one branch ---

GAMMA, BATCH, SIZE = 3, 600, 9


def chain(kind):
    """Returns random distributions and drafts of every length, as chain and as tree.

    The distributions have ties and zeros, and some are equal.
    """
    rng = np.random.default_rng(0)
    weights = rng.choice([0.0, 1.0, 1.0, 2.5, 1e-6], size=(2, BATCH, GAMMA + 1, SIZE)) * rng.random(
        SIZE
    )
    weights[..., 3] += 1e-3
    p, q = weights / weights.sum(axis=-1, keepdims=True)
    q = np.where(rng.random((BATCH, 1, 1)) < 0.3, p, q)[:, :GAMMA]
    target, dist = as_distribution(p, "float32"), as_distribution(q, "float32")
    # Where the distributions are equal, rounding may leave p a little below q everywhere, and then
    # no residual.
    target = target._replace(log_normalizer=target.log_normalizer + np.float32(3e-7))
    noise = jnp.asarray(rng.gumbel(size=p.shape), jnp.float32)
    random_bits = rng.integers(0, 2**32, (BATCH, GAMMA, 1, 2), np.uint32)
    tokens = jax.jit(choose_children, static_argnums=(0, 2))(
        kind, dist, (1,) * GAMMA, random_bits, noise[:, :-1]
    )[..., 0]
    wanted = rng.integers(GAMMA + 1, size=BATCH).astype(np.int32)
    accept = rng.choice([0, 0.3, 0.6, 1 - 2**-24], (BATCH, GAMMA))
    draws = Randomness(
        jnp.asarray(accept, jnp.float32),
        rng.integers(0, 2**32, (BATCH, GAMMA + 1, 2), np.uint32),
        noise,
    )
    tree = Tree.chain(GAMMA, children=kind)
    draft = TreeDraft(
        jnp.pad(tokens, ((0, 0), (1, 0))),
        tree.branches(BATCH),
        jnp.arange(GAMMA + 1) <= wanted[:, None],
        dist,
        jnp.broadcast_to(jnp.maximum(jnp.arange(GAMMA + 1) - 1, 0), (BATCH, GAMMA + 1)),
        jnp.asarray(wanted),
    )
    return target, dist, tokens, wanted, draws, draft


@tiers.parametrize(
    "kind, name, same",
    [
        ("mixed", "mixed", "token"),
        ("drawn", "traversal", "block"),
        ("drawn", "recursive", "token"),
        ("iid", "recursive", "token"),
        ("iid", "traversal", "block"),
        ("gumbel", "gumbel", "gumbel"),
        ("drawn", "typical", "typical"),
    ],
    first=2,
)
def test_one_branch_is_verified_as_the_chain(kind, name, same):
    """Also where the target's distribution is NaN at one of the positions."""
    target, dist, tokens, wanted, draws, draft = chain(kind)
    failed = np.arange(GAMMA + 1) == np.arange(BATCH)[:, None] % (3 * GAMMA)
    target = Categorical(
        jnp.where(failed[..., None], jnp.nan, target.logits),
        jnp.where(failed, jnp.nan, target.log_normalizer),
    )
    actual = verify(
        name,
        kind,
        draft,
        target,
        TreeRandomness(jnp.pad(draws.accept, ((0, 0), (1, 0))), *draws[1:]),
    )
    asked = {"typical_epsilon": EPSILON, "typical_delta": DELTA}
    asked = {key: jnp.full(BATCH, value, jnp.float32) for key, value in asked.items()}
    expected = jax.jit(VERIFIERS[same].verify)(target, dist, tokens, wanted, draws, asked)
    np.testing.assert_array_equal(actual.num_accepted, expected.num_accepted)
    np.testing.assert_array_equal(actual.next_token, expected.next_token)
    accepted_text = np.arange(GAMMA + 1) <= actual.num_accepted[:, None]
    np.testing.assert_array_equal(
        actual.path[accepted_text],
        np.broadcast_to(np.arange(GAMMA + 1), accepted_text.shape)[accepted_text],
    )
    assert len(np.unique(actual.num_accepted)) == GAMMA + 1


# --- NaN, and ids that are not there ---


@tiers.parametrize("name", TREE_VERIFIERS, first=2)
def test_a_distribution_that_is_not_a_number_leaves_no_token(name):
    """NaN at node 0 leaves no token; NaN after a node that is not reached changes nothing."""
    kind = next(kind for kind, names in CHILDREN.items() if name in (*names, *LOSSY_TREES))
    rows = cases(TREES[0], 20)
    draft, target = drafted(kind, TREES[0], rows, EOS, "float32")
    draws = randomness(rows, "float32")
    before = verify(name, kind, draft, target, draws)

    def put(reached):
        return Categorical.from_logits(jnp.where(reached[..., None], jnp.nan, target.logits))

    nodes = np.arange(TREES[0].size)
    nothing = verify(name, kind, draft, put(jnp.broadcast_to(nodes == 0, draft.valid.shape)), draws)
    np.testing.assert_array_equal(nothing.num_accepted, 0)
    np.testing.assert_array_equal(nothing.next_token, -1)
    if name not in ("kseq", "traversal", "typical"):  # which look at other nodes too
        reached = np.stack(
            [np.isin(nodes, path[: n + 1]) for path, n in zip(before.path, before.num_accepted)]
        )
        after = verify(name, kind, draft, put(~reached), draws)
        for a, b in zip(committed(draft, before), committed(draft, after)):
            assert a == b


def test_children_where_ids_are_few():
    """A child is −1 without an id of positive probability, past the count, and under NaN."""
    q = np.array([[[0, 0.75, 0.25], [0.2, 0.3, 0.5], [np.nan, 0.5, 0.5]]])
    random_bits = toy.random_bits(np.full((1, 3, 5), 0.9))
    noise = np.array([[[0.0, 0, 5], [5, 0, 0], [0, 0, 0]]], np.float32)
    result = {
        kind: choose_children(kind, as_distribution(q, "float32"), (5, 2, 1), random_bits, noise)[
            0
        ].tolist()
        for kind in CHILDREN
    }
    nothing = [-1] * 5
    assert result == {
        "top": [[1, 2, -1, -1, -1], [2, 1, -1, -1, -1], nothing],
        "gumbel": [[2, 1, -1, -1, -1], [0, 2, -1, -1, -1], nothing],
        "mixed": [[1, 2, -1, -1, -1], [2, 1, -1, -1, -1], nothing],
        "drawn": [[2, 1, -1, -1, -1], [2, 1, -1, -1, -1], nothing],
        "iid": [[2, 2, 2, 2, 2], [2, 2, -1, -1, -1], nothing],
    }


@tiers.parametrize("kind", ["top", "gumbel", "mixed"], first=15)
def test_children_are_selected_without_a_sort(kind, optimised):
    """On a CPU a sort of the vocabulary takes more than a hundred times as long."""

    def shape(*sizes, dtype=np.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    dist = Categorical(shape(2, 3, 1000), shape(2, 3))
    lowered = jax.jit(choose_children, static_argnums=(0, 2)).lower(
        kind, dist, (4, 4, 2), shape(2, 3, 4, 2, dtype=np.uint32), shape(2, 3, 1000)
    )
    assert "sort(" not in lowered.compile(optimised).as_text()
