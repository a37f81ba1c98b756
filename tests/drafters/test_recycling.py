"""Token recycling: beside a slow table, in the engine, distributions, what tables outlive."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from cascade_parts import INPUTS, KEY, LIMITS, PREFIXES, TARGET, B, V, plain, run
from distribution_samples import (
    FALSE_ALARM,
    ROWS,
    SPREAD,
    g_test,
    hash_pair,
    joint_distribution,
    sample,
)
from toy_models import compilations

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.drafters import recycling
from specdec_jax.drafters.named import make_named_drafter
from specdec_jax.speculative.state import Scored, ScoredNodes
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.trees import POINTS, Tree

GAMMA, CALLS, TOP_K = 4, 6, 3
TREE = Tree((0, 0, 1, 1, 2, 3), children="top")
pytestmark = pytest.mark.usefixtures("quick")


def own() -> sd.TokenRecycling:
    return sd.TokenRecycling(V)


# --- What is remembered ---


def update_slowly(table: np.ndarray, tokens, logits, valid) -> None:
    """Writes the successors after each valid token, one after the other."""
    for place in np.flatnonzero(valid):
        if not np.isnan(logits[place]).any():
            table[tokens[place]] = np.argsort(-logits[place], kind="stable")[:TOP_K]


def observe_calls(drafter, tree: bool):
    """Yields, for some calls of made-up outcomes, the table, and one by a loop in Python."""
    rng, width = np.random.default_rng(0), TREE.size if tree else GAMMA + 1
    options = dict(tree=TREE) if tree else dict(gamma=GAMMA)
    state, _ = prepare(
        TARGET, INPUTS, drafter=drafter, decoder_prefix=PREFIXES, max_new_tokens=20, **options
    )
    observe = jax.jit(lambda own, state, scored: drafter.observe(own, state, scored))
    table = state.draft_state
    expected = np.full((1 if drafter.shared else B, V, TOP_K), -1)
    assert table.shape == (expected.shape[1:] if drafter.shared else expected.shape)
    branches = TREE.branches(B)
    for _ in range(CALLS):
        tokens = rng.integers(2, 9, (B, width)).astype(np.int32)
        logits = rng.integers(0, 12, (B, width, V)).astype(np.float32)  # with equal ones
        logits[rng.random((B, width)) < 0.05] = np.nan
        drafted, done = rng.integers(0, GAMMA + 1, B), rng.random(B) < 0.3
        num_new = np.where(done, 0, 1).astype(np.int32)
        scored = Scored(tokens, None, logits, num_new)
        valid = (np.arange(width) <= drafted[:, None]) & ~done[:, None]
        if tree:
            valid = (rng.random((B, width)) < 0.7) & ~done[:, None]
            zeros = np.zeros(B, np.int32)
            draft = TreeDraft(tokens, branches, valid, None, np.zeros_like(tokens), zeros)
            argmax = np.zeros((B, width), np.int32)
            path = np.zeros((B, TREE.depth + 1), np.int32)
            nodes = ScoredNodes(draft, path, argmax, None, logits)
            rest = jnp.zeros((B, TREE.depth + 1)), None, None
            scored = Scored(jnp.zeros((B, TREE.depth + 1), jnp.int32), *rest[1:], num_new, nodes)
        table = observe(table, state.replace(last_drafted=drafted.astype(np.int32)), scored)
        for row in range(B):
            slow = expected[0 if drafter.shared else row]
            update_slowly(slow, tokens[row], logits[row], valid[row])
        yield np.asarray(table).reshape(expected.shape), expected


def check_memory(shared: bool, tree: bool):
    for table, expected in observe_calls(sd.TokenRecycling(V, TOP_K, shared), tree):
        np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_the_table_equals_one_by_a_loop(shared, tree):
    """Of equal tokens the last counts; no token that was not fed, or whose logits are NaN."""
    check_memory(shared, tree)


KEEP_LAST = recycling.keep_last


def keep_first(tokens, valid):
    return KEEP_LAST(tokens[..., ::-1], valid[..., ::-1])[..., ::-1]


def keep_unfed(tokens, valid):
    return KEEP_LAST(tokens, jnp.ones_like(valid))


MUTANTS = {"first equal id wins": keep_first, "tokens that were not fed count": keep_unfed}


@pytest.mark.parametrize(
    "name, shared, tree",
    [
        ("first equal id wins", False, True),
        pytest.param("first equal id wins", True, False, marks=pytest.mark.slow),
        pytest.param("tokens that were not fed count", False, False, marks=pytest.mark.slow),
        pytest.param("tokens that were not fed count", True, True, marks=pytest.mark.slow),
    ],
)
def test_mistakes_in_the_table_are_found(name, shared, tree, monkeypatch):
    monkeypatch.setattr(recycling, "keep_last", MUTANTS[name])
    with pytest.raises(AssertionError):
        check_memory(shared, tree)


# --- What is drafted ---


def test_successors_are_drafted():
    """A chain takes the first after each token, a tree the first few; none where there is none."""
    drafter = sd.TokenRecycling(V, 2)
    table = np.full((2, V, 2), -1, np.int32)
    table[:, 0], table[0, 5], table[0, 7], table[1, 6] = [5, 6], [7, 8], [9, -1], [5, 5]
    inputs = [[3, 4, 1]] * 2
    for options in (dict(gamma=4), dict(tree=Tree.uniform((2, 2, 2)))):
        state, request = prepare(TARGET, inputs, drafter=drafter, eos_ids=(), **options)
        if "gamma" in options:
            draft_chain = jax.jit(drafter.draft)  # one program, not one an operation
            _, draft = draft_chain(jnp.asarray(table), state, np.full(2, 4, np.int32))
            np.testing.assert_array_equal(draft.num_drafted, [3, 1])
            np.testing.assert_array_equal(draft.tokens[0, :3], [5, 7, 9])
            np.testing.assert_array_equal(draft.tokens[1, :1], [5])
            continue
        rows = np.full(2, 99, np.int32)
        _, draft = jax.jit(drafter.draft_tree)(jnp.asarray(table), state, rows, rows)
        tree = state.config.tree
        paths = [
            {
                tuple(np.asarray(draft.tokens)[row, tree.lines[n, 1 : 1 + tree.depths[n]]].tolist())
                for n in range(1, tree.size)
                if draft.valid[row, n]
            }
            for row in range(2)
        ]
        assert paths[0] == {(5,), (6,), (5, 7), (5, 8), (5, 7, 9)}
        assert paths[1] == {(5,), (6,), (6, 5)}
        assert not draft.failed.any()
        assert request.config.verifier.name == "point"


# --- In the engine ---

SHAPES = {"chain": {}, "tree": dict(tree=Tree((0, 0, 1, 0, 1, 2, 3, 6)), gamma="auto")}
MIXED = sd.SamplingConfig(temperature=[0.0, 0.9] * (B // 2), top_k=9)


@tiers.parametrize("shape", SHAPES, first=2)
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_output_is_that_of_plain_decoding(shape, shared):
    """Ragged rows at temperature 0, which compile once."""
    drafter, options = sd.TokenRecycling(V, shared=shared), SHAPES[shape]
    result = run(drafter, **options)
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    assert 0 < result.stats.accepted < result.stats.drafted
    others = dict(max_new_tokens=LIMITS[::-1], decoder_prefix=PREFIXES)
    assert compilations(lambda: run(drafter, **options | others)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("verifier", ["gumbel", "block", "token"])
def test_output_of_sampled_rows(shape, verifier):
    """Rows at temperature 0; with Gumbel coupling all rows."""
    options, named = dict(SHAPES[shape]), dict(verifier=verifier)
    if shape == "tree":
        point = "gumbel" if verifier == "gumbel" else "point"
        options, named = options | dict(tree=Tree(options["tree"].parents, verifier=point)), {}
    result = run(own(), MIXED, **options, **named)
    expected = run(None, MIXED, verifier=verifier)
    rows = slice(None) if verifier == "gumbel" else slice(None, None, 2)
    np.testing.assert_array_equal(result.tokens[rows], expected.tokens[rows])
    assert 0 < result.stats.accepted < result.stats.drafted


REFILLED = dict(max_new_tokens=12, gamma=3, eos_ids=(8,))


def decode_alone():
    return sd.generate(TARGET, INPUTS[:8], drafter=own(), **REFILLED)


def decode_refilled(drafter) -> dict:
    return dict(sd.decode_stream(TARGET, INPUTS[:8], batch_size=2, drafter=drafter, **REFILLED))


@pytest.mark.slow
def test_a_row_begins_with_an_empty_table():
    """Refilled rows draft what they draft alone."""
    expected, refilled = decode_alone(), decode_refilled(own())
    for row, stats in enumerate(expected.stats.per_row):
        (output,) = refilled[row]
        assert output.tokens == expected.tokens[row, : expected.lengths[row]].tolist()
        assert output.stats.drafted == stats.drafted and output.stats.accepted == stats.accepted


@pytest.mark.slow
def test_a_shared_table_knows_what_rows_before_learnt():
    expected, known = decode_alone(), decode_refilled(sd.TokenRecycling(V, shared=True))
    for row in range(8):
        (output,) = known[row]
        assert output.tokens == expected.tokens[row, : expected.lengths[row]].tolist()
    drafted = sum(rows[0].stats.drafted for rows in known.values())
    assert drafted > expected.stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_job_that_is_interrupted_resumes_with_the_same_output(shared):
    """No table is kept: a resumed job begins with empty ones."""
    options = dict(batch_size=2, key=KEY, verifier="gumbel", **REFILLED)
    options["sampling"] = sd.SamplingConfig(temperature=0.9)
    expected = dict(sd.decode_stream(TARGET, INPUTS, **options))
    options["drafter"] = sd.TokenRecycling(V, shared=shared)
    found: dict = {}
    for stop in (3, 5, len(INPUTS)):
        for number, rows in sd.decode_stream(TARGET, INPUTS, skip=tuple(found), **options):
            found[number] = rows
            if len(found) >= stop:
                break
    assert len(found) == len(INPUTS)
    for number, (row,) in expected.items():
        assert found[number][0].tokens == row.tokens
    assert sum(rows[0].stats.accepted for rows in found.values()) > 0


@pytest.mark.slow
def test_samples_of_one_input():
    options = dict(
        num_samples=3, verifier="gumbel", sampling=sd.SamplingConfig(temperature=0.9), key=KEY
    )
    result, expected = (
        sd.generate(TARGET, INPUTS[:4], drafter=drafter, max_new_tokens=12, gamma=g, **options)
        for drafter, g in ((own(), 3), (None, "auto"))
    )
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    assert result.stats.accepted > 0


# --- Distributions ---


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_distribution_through_the_engine(shape):
    target, _ = hash_pair()
    options = dict(verifier="token")
    if shape == "tree":
        options = dict(verifier="block", gamma="auto", tree=Tree.uniform((3, 2), verifier="point"))
    counts, (examined, accepted) = sample(target, own(), SPREAD, 2 * ROWS, **options)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.02 < accepted.sum() / examined.sum() < 0.9


def run_three_times(network, drafter, state, iterations, keeps: bool):
    """Decodes three times with the same keys; `keeps`: each begins with the last one's table."""
    tables, advance = state.draft_state, sd.advance
    for _ in range(3):
        fresh = jax.tree.map(jnp.copy, state.replace(draft_state=tables))
        after = advance(network, drafter, fresh, iterations)
        tables = after.draft_state if keeps else state.draft_state
    return after


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_a_table_must_not_outlive_a_call_with_the_same_key(keeps):
    """What it learnt of a row's draws would tell what the same draws decide the next time."""
    target, _ = hash_pair()
    counts, _ = sample(
        target,
        sd.TokenRecycling(V, 2),
        SPREAD,
        10 * ROWS,
        run=functools.partial(run_three_times, keeps=keeps),
        verifier="token",
    )
    p_value = g_test(counts, joint_distribution(target, SPREAD))
    assert p_value < FALSE_ALARM if keeps else p_value > FALSE_ALARM


# --- Refusals ---


@pytest.mark.parametrize(
    "options", [dict(verifier="block"), dict(tree=Tree.uniform((2, 1)), verifier="block")]
)
def test_a_shared_table_needs_coupling_above_temperature_0(options):
    drafter, sampling = sd.TokenRecycling(V, shared=True), sd.SamplingConfig(temperature=1.0)
    with pytest.raises(sd.UnsupportedCombination, match="expected 'gumbel' above temperature 0"):
        sd.generate(TARGET, INPUTS, drafter=drafter, sampling=sampling, **options)


def test_what_is_rejected():
    for options, message in (
        (dict(drafter=sd.TokenRecycling(V + 1)), "a table of 17 ids, expected the target's 16"),
        (dict(drafter=own(), num_beams=2), "TokenRecycling with num_beams"),
        (dict(drafter=own(), tree=sd.DynamicTree(2, 2, 4)), "expected a Tree"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.generate(TARGET, INPUTS, **options)
    for arguments, message in (
        ((0,), "vocab_size: got 0"),
        ((V, 0), "top_k: got 0"),
        ((V, 8, 1), "shared: got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.TokenRecycling(*arguments)


def test_its_name_on_the_command_line():
    drafter = make_named_drafter("recycling", TARGET, None, None)
    assert drafter == own() and drafter.name == "token recycling" and drafter.kinds == POINTS


@pytest.mark.slow
@pytest.mark.parametrize("make", [own, lambda: sd.LookaheadDecoding(3, 3, 2)])
def test_streams_give_what_generate_gives(make):
    options = dict(drafter=make(), max_new_tokens=12, decoder_prefix=[PREFIXES[3]], key=KEY)
    options |= dict(sampling=sd.SamplingConfig(temperature=0.9), eos_ids=(8,))
    whole = sd.generate(TARGET, INPUTS[3:4], **options)
    state, request = prepare(TARGET, INPUTS[3:4], **options)
    while not np.all(state.done):
        state = sd.advance(request.network, request.drafter, state, np.int32(1))
    result = sd.finish(TARGET, state, request)
    np.testing.assert_array_equal(result.tokens, whole.tokens)
    assert result.stats.accepted == whole.stats.accepted
