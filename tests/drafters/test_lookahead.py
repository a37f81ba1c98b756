"""Look-ahead decoding: beside a slow window and pool, in the engine, distributions."""

import collections
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from cascade_parts import EOS, INPUTS, KEY, LIMIT, LIMITS, PREFIXES, TARGET, B
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
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.drafters import lookahead
from specdec_jax.drafters.named import make_named_drafter

SMALL = dict(window=3, ngram=3, guesses=2, pool=8)
ENDS = (EOS, 8)
MIXED = sd.SamplingConfig(temperature=[0.0, 0.9] * (B // 2), top_k=9)
pytestmark = pytest.mark.usefixtures("quick")


def make(**options) -> sd.LookaheadDecoding:
    return sd.LookaheadDecoding(**SMALL | options)


def run(drafter, sampling=None, **options):
    options = dict(max_new_tokens=LIMITS, decoder_prefix=PREFIXES, eos_ids=ENDS, key=KEY) | options
    sampling = sampling or sd.SamplingConfig()
    return sd.generate(TARGET, INPUTS, drafter=drafter, sampling=sampling, **options)


# --- What is drafted ---


class SlowRow:
    """The window and the pool of one row, in Python: guesses by level and absolute position."""

    def __init__(self):
        self.guesses, self.pool = {}, []

    def learn(self, levels, first: int) -> None:
        """Takes the tokens `levels[level][column]`, −1 where there is none, and the new level."""
        self.guesses = {
            (level - 1, first + column + level): token
            for level, tokens in enumerate(levels)
            for column, token in enumerate(tokens)
            if level and token >= 0
        }
        for gram in zip(*levels):
            if min(gram) >= 0:
                self.pool = [None if old == gram else old for old in self.pool] + [gram]

    def find(self, last: int, count: int, size: int) -> list[tuple[int, ...]]:
        found = [gram for gram in self.pool[-size:][::-1] if gram and gram[0] == last]
        return [gram[1:] for gram in found[:count]]


@jax.jit
def drafted(drafter, state, rows):
    return drafter.draft_tree(state.draft_state, state, rows, rows)[1]


def follow(drafter, iterations: int = 7) -> collections.Counter:
    """Compares every draft of some iterations with the slow rows; counts what was seen."""
    size, width = drafter.ngram - 1, drafter.window
    nodes, guesses = drafter.number_nodes()
    state, request = prepare(
        TARGET,
        INPUTS,
        drafter=drafter,
        max_new_tokens=40,
        decoder_prefix=PREFIXES,
        eos_ids=ENDS,
        sampling=sd.SamplingConfig(temperature=[0.0, 0.4] * (B // 2)),
        key=KEY,
    )
    tree, slow, seen = drafter.tree, [SlowRow() for _ in range(B)], collections.Counter()
    for _ in range(iterations):
        rows = np.full(B, 99, np.int32)
        draft = jax.device_get(drafted(request.drafter, state, rows))
        tokens, before = np.asarray(state.tokens), np.asarray(state.lengths)
        done = np.asarray(state.done)
        assert not draft.failed.any()
        state = advance(request.network, request.drafter, state, np.int32(1))
        for row in np.flatnonzero(~done):
            first, valid = before[row], draft.valid[row]
            ids = np.where(valid, draft.tokens[row], -1)
            chains, columns = ids[guesses.T].tolist(), ids[nodes.T]
            grams = slow[row].find(tokens[row, first - 1], drafter.guesses, drafter.pool)
            seen["grams"] += len(grams)
            grams += [(-1,) * size] * (drafter.guesses - len(grams))
            for gram, chain in zip(grams, chains):
                end = next((i + 1 for i, token in enumerate(gram) if token in ENDS), size)
                assert tuple(chain[:end]) == gram[:end] and set(chain[end:]) <= {-1}
            assert not set(columns.ravel().tolist()) & {-1, *ENDS}, "the window is always there"
            for (level, place), token in slow[row].guesses.items():
                if 0 <= (column := place - first - level) < width and token not in ENDS:
                    assert columns[column, level] == token
                    seen["guesses"] += 1
            levels = [*columns.T.tolist(), []]
            for column in range(width):
                node = nodes[-1, column]
                path = ids[tree.lines[node, 1 : 1 + tree.depths[node]]].tolist()
                text = [*tokens[row, :first].tolist(), *path]
                logits = TARGET.logits([INPUTS[row]], [text], [len(INPUTS[row])])[0, -1]
                levels[-1].append(int(np.argmax(logits)))
            slow[row].learn(levels, first)
            seen["accepted"] += int(state.lengths[row]) - int(first) - 1
    return seen


@tiers.parametrize(
    "options", [{}, dict(window=1, ngram=2), dict(window=5, ngram=4, guesses=3, pool=64)], first=1
)
def test_drafts_equal_slow_ones(options):
    """Guesses stay at their places while tokens are committed, and fill a pool that wraps."""
    seen = follow(make(**options))
    assert seen["guesses"] > 30 and (seen["grams"] > 5 or options)


@flax.struct.dataclass
class Unmoved(sd.LookaheadDecoding):
    """Moves its window by one token, however many were committed."""

    def observe(self, draft_state, state, scored):
        num_new = jnp.minimum(scored.num_new, 1)
        return super().observe(draft_state, state, scored._replace(num_new=num_new))


@flax.struct.dataclass
class OneLevelLate(sd.LookaheadDecoding):
    """Takes the guess after the token before the newest."""

    def observe(self, draft_state, state, scored):
        argmax = jnp.roll(scored.nodes.argmax, 1, axis=1)
        nodes = scored.nodes._replace(argmax=argmax)
        return super().observe(draft_state, state, scored._replace(nodes=nodes))


@flax.struct.dataclass
class OfTheFirstCall(sd.LookaheadDecoding):
    """Keeps the window of the first call that made one."""

    def observe(self, draft_state, state, scored):
        after = super().observe(draft_state, state, scored)
        known = jnp.any(draft_state.window >= 0, axis=(1, 2))[:, None, None]
        return after._replace(window=jnp.where(known, draft_state.window, after.window))


@tiers.parametrize("mutant", [Unmoved, OneLevelLate, OfTheFirstCall], first=0)
def test_mistakes_are_found(mutant):
    with pytest.raises(AssertionError):
        follow(mutant(**SMALL | dict(guesses=4, pool=64)), 12)


def test_the_tree():
    """As many positions as look-ahead decoding's own mask has, without node 0."""
    drafter = sd.LookaheadDecoding()
    tree, size = drafter.tree, drafter.ngram - 1
    assert tree.size - 1 == 56 == (drafter.window + drafter.guesses) * size
    window, guesses = drafter.number_nodes()
    for chain in guesses.T:
        assert tree.depths[chain[-1]] == size
        np.testing.assert_array_equal(tree.lines[chain[-1], 1 : 1 + size], chain)
    for level, nodes in enumerate(window):
        np.testing.assert_array_equal(tree.depths[nodes], 1 + level + np.arange(drafter.window))
        for column, node in enumerate(nodes):
            line = [*window[0, : column + 1], *window[1 : level + 1, column]]
            np.testing.assert_array_equal(tree.lines[node, 1 : column + level + 2], line)
    first = set(range(1, 1 + 2 * size))  # of two parts one is of the window, one of the pool
    assert first == {*window[:, 0].tolist(), *guesses[:, 0].tolist()}


# --- In the engine ---


def test_output_is_that_of_plain_decoding():
    """Ragged rows at temperature 0, which compile once."""
    result, expected = run(make()), run(None)
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    assert 0 < result.stats.accepted < result.stats.drafted
    assert compilations(lambda: run(make(), max_new_tokens=LIMITS[::-1])) == 0


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["point", "gumbel"])
def test_output_of_sampled_rows(verifier):
    """Rows at temperature 0; with Gumbel coupling all rows."""
    drafter = make()
    tree = dataclasses.replace(drafter.tree, verifier=verifier)
    for gamma in ("auto", 5):
        result = run(drafter, MIXED, tree=tree, gamma=gamma)
        expected = run(None, MIXED, verifier="gumbel" if verifier == "gumbel" else "block")
        rows = slice(None) if verifier == "gumbel" else slice(None, None, 2)
        np.testing.assert_array_equal(result.tokens[rows], expected.tokens[rows])
        assert 0 < result.stats.accepted < result.stats.drafted


@pytest.mark.slow
def test_ids_of_another_vocabulary_do_not_fill_the_window():
    state, _ = prepare(TARGET, INPUTS, drafter=make(), max_new_tokens=4)
    draft_state = state.draft_state
    foreign = draft_state.inputs._replace(tokens=draft_state.inputs.tokens + 900)
    window = lookahead.fill_window(draft_state._replace(inputs=foreign), state)
    assert np.all(window < TARGET.config.vocab_size)


def test_refilled_rows_begin_anew():
    inputs, options = INPUTS[:8], dict(max_new_tokens=LIMIT, eos_ids=(8,))
    expected = sd.generate(TARGET, inputs, drafter=make(), **options)
    refilled = dict(sd.decode_stream(TARGET, inputs, batch_size=2, drafter=make(), **options))
    for row, stats in enumerate(expected.stats.per_row):
        (output,) = refilled[row]
        assert output.tokens == expected.tokens[row, : expected.lengths[row]].tolist()
        assert output.stats.drafted == stats.drafted and output.stats.accepted == stats.accepted


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["point", "gumbel"])
def test_distribution_through_the_engine(verifier):
    target, _ = hash_pair()
    tree = dataclasses.replace(make().tree, verifier=verifier)
    options = dict(verifier="block", gamma="auto", tree=tree)
    counts, (examined, accepted) = sample(target, make(), SPREAD, 2 * ROWS, **options)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.02 < accepted.sum() / examined.sum() < 0.9


# --- Refusals ---


def test_what_is_rejected():
    drafter = make()
    for options, message in (
        (dict(tree=sd.Tree.uniform((2, 1))), "with LookaheadDecoding, expected None"),
        (dict(tree=sd.DynamicTree(2, 2, 4)), "with LookaheadDecoding, expected None"),
        (dict(num_beams=2), "LookaheadDecoding with num_beams"),
        (dict(verifier="token"), "a tree has a verifier of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.generate(TARGET, INPUTS, drafter=drafter, **options)
    for arguments, message in (
        (dict(ngram=1), "ngram: got 1"),
        (dict(window=0), "window: got 0"),
        (dict(window=70, pool=99, ngram=5), "below 257"),
        (dict(pool=2), "pool: got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)
    with pytest.raises(ValueError, match="second: got LookaheadDecoding.*that drafts any tree"):
        sd.MergedDrafter(sd.PromptLookupDrafter(), drafter)


def test_its_name_on_the_command_line():
    drafter = make_named_drafter("lookahead", TARGET, None, None)
    assert drafter == sd.LookaheadDecoding() and drafter.name == "look-ahead decoding"
