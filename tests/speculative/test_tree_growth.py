"""Trees shaped by the drafter's distribution, beside ones grown in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax as sd
from specdec_jax.speculative import tree_growth

pytestmark = pytest.mark.usefixtures("quick")
ROWS = 5


def log_probs_of(tree: sd.DynamicTree, ties: bool, dead: float):
    """Returns log q of the children of each node that may be expanded, by row and level.

    Its shape is `[B, W, W]`, first `[B, 1, W]`.
    """
    rng = np.random.default_rng(tree.nodes)
    found = []
    for level in range(tree.depth):
        shape = (ROWS, tree.width if level else 1, tree.width)
        values = (
            -rng.integers(0, 4, shape)
            if ties
            else np.log(rng.dirichlet(np.ones(tree.width + 2), shape[:2]))
        )
        values = values[..., : tree.width].astype(np.float32)
        found.append(np.where(rng.uniform(size=shape) < dead, -np.inf, values))
    return found


def grown_slowly(tree: sd.DynamicTree, row: int, log_probs):
    """Scores, parents, ranks of one row's drafted nodes, and the numbers of those that are kept."""
    scores, parents, ranks, level = [np.float32(0)], [-1], [0], [0]
    for values in log_probs:
        chosen = sorted(level, key=lambda node: (-scores[node], node))[: tree.width]
        level = []
        for place, node in enumerate(chosen):
            for rank in range(tree.width):
                level.append(len(scores))
                scores.append(np.float32(scores[node] + values[row, place, rank]))
                parents.append(node)
                ranks.append(rank)
    kept = sorted(range(1, len(scores)), key=lambda node: (-scores[node], node))[: tree.nodes - 1]
    return scores, parents, ranks, [0, *kept]


@functools.partial(jax.jit, static_argnums=0)
def grown(tree: sd.DynamicTree, log_probs):
    """Grows trees as an engine does: all scores and parents, then the nodes that are kept."""
    level, first = jnp.zeros((ROWS, 1)), 0
    scores, parents = [level], [jnp.full((ROWS, 1), -1, jnp.int32)]
    for values in log_probs:
        places = tree_growth.choose_to_expand(tree, level)
        parents.append(jnp.repeat(first + places, tree.width, axis=1))
        first += level.shape[1]
        level = tree_growth.expand(level, places, values)
        scores.append(level)
    scores, parents = (jnp.concatenate(parts, axis=1) for parts in (scores, parents))
    return scores, parents, *tree_growth.rerank(tree, scores, parents)


@pytest.mark.parametrize("ties", [False, True], ids=["all differ", "ties"])
@pytest.mark.parametrize("dead", [0.0, 0.4])
@pytest.mark.parametrize("shape", [(1, 3, 3), (2, 2, 7), (3, 3, 4), (3, 3, 12), (4, 2, 15)])
def test_growth(shape, dead, ties):
    tree = sd.DynamicTree(*shape)
    log_probs = log_probs_of(tree, ties, dead)
    scores, parents, kept, branches = map(jax.device_get, grown(tree, log_probs))
    assert scores.shape == (ROWS, tree.drafted + 1) and kept.shape == (ROWS, tree.size)
    for row in range(ROWS):
        slow_scores, slow_parents, ranks, slow_kept = grown_slowly(tree, row, log_probs)
        np.testing.assert_array_equal(scores[row], slow_scores)
        np.testing.assert_array_equal(parents[row], slow_parents)
        assert kept[row].tolist() == slow_kept
        assert {slow_parents[node] for node in slow_kept[1:]} <= {*slow_kept}, (
            "or it would be no tree"
        )
        places = [slow_kept.index(slow_parents[node]) for node in slow_kept[1:]]
        same = sd.Tree(places)  # which checks that parents come first
        assert branches.parents[row].tolist() == [-1, *places]
        np.testing.assert_array_equal(branches.depths[row], same.depths)
        np.testing.assert_array_equal(branches.lines[row, :, : same.depth + 1], same.lines)
        assert (
            not branches.lines[row, :, same.depth + 1 :].any()
            and branches.lines.shape[2] == tree.depth + 1
        )
        assert branches.ranks[row].tolist() == [ranks[node] for node in slow_kept]


def test_a_likely_line_gets_the_nodes():
    """The first token is sure, the others are not: all nodes but one child of node 0 follow it."""
    tree = sd.DynamicTree(3, 2, 6)
    sure, even = jnp.log(jnp.asarray([0.99, 0.01])), jnp.log(jnp.asarray([0.5, 0.5]))

    def level_of(parents, first):
        return jnp.broadcast_to(jnp.stack([first, even][:parents]), (ROWS, parents, 2))

    _, _, _, branches = grown(tree, [level_of(1, sure), level_of(2, even), level_of(2, even)])
    assert np.asarray(branches.parents)[0].tolist() == [-1, 0, 1, 1, 2, 2]


def test_rounding_above_one_makes_no_child_score_more_than_its_parent():
    scores = tree_growth.expand(
        jnp.asarray([[-1.0]]), jnp.zeros((1, 1), jnp.int32), jnp.asarray([[[1e-6, -1e-6]]])
    )
    assert scores[0, 0] == -1.0 and scores[0, 1] < -1.0


def test_what_is_not_a_number_is_not_there():
    tree = sd.DynamicTree(2, 2, 5)
    values = [
        jnp.broadcast_to(jnp.asarray([jnp.nan, -1.0]), (ROWS, parents, 2)) for parents in (1, 2)
    ]
    scores, _, kept, _ = grown(tree, values)
    assert scores[0].tolist() == [0, -jnp.inf, -1, -jnp.inf, -2, -jnp.inf, -jnp.inf]
    assert kept[0].tolist() == [0, 2, 4, 1, 3]
