"""Beam search on toys equals a reference in lists, with and without a drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from beam_reference import Search
from toy_models import HashModel

import specdec_jax as sd
from specdec_jax.backends.tree_positions import node_paths
from specdec_jax.speculative import beam_iteration

pytestmark = pytest.mark.usefixtures("quick")
MARGIN, ROUNDING = 1e-5, 2e-7
LIMIT = 12


def distribution_of(model, inputs):
    """Log-probabilities of a row's next token, by its new tokens."""
    known = {}

    def log_probs(tokens):
        if tuple(tokens) not in known:
            fed = np.array([[model.start_token, *tokens]])
            logits = model.logits(inputs[None], fed)[0, -1]
            shifted = logits - logits.max()
            known[tuple(tokens)] = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
        return known[tuple(tokens)]

    return log_probs


def cases(seed: int, count: int):
    """Random searches: a model, inputs, limits and options."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(5, 14))
    eos_ids = tuple(
        int(i) for i in rng.choice(np.arange(1, vocab), int(rng.integers(1, 4)), replace=False)
    )
    style = ("t5x", "huggingface")[seed % 2]
    if style == "t5x":
        eos_ids = eos_ids[:1]
    beams = int(rng.integers(1, min(8, vocab) + 1))
    options = dict(
        num_beams=beams, beam_style=style, num_return_sequences=beams, max_new_tokens=None
    )
    options["length_penalty"] = float(rng.choice([0.0, 0.6, 1.0, 2.0]))
    if style == "huggingface":
        options["early_stopping"] = (False, True, "never")[int(rng.integers(3))]
    inputs = rng.integers(1, vocab, (count, 3))
    limits = rng.integers(1, LIMIT + 1, count)
    spread = float(rng.choice([1.0, 4.0]))
    target = HashModel(vocab, 0, eos_ids=eos_ids, spread=spread)
    drafter = HashModel(vocab, 7, eos_ids=eos_ids, spread=spread, likeness=0.9)
    gamma, width = int(rng.integers(1, 5)), int(rng.integers(beams, 2 * beams + 3))
    options["max_new_tokens"] = limits
    return target, drafter, inputs, options, dict(gamma=gamma, beam_width=width)


def reference(target, inputs, options):
    search = Search(
        options["num_beams"],
        target.eos_ids,
        options["length_penalty"],
        options["beam_style"],
        options.get("early_stopping", False),
    )
    return [
        search.run(distribution_of(target, row), int(limit))
        for row, limit in zip(inputs, options["max_new_tokens"])
    ]


def rows_of(result, row, beams):
    """Tokens of each hypothesis of an input, None for a place that nothing filled."""
    found = []
    for place in range(row * beams, (row + 1) * beams):
        there = result.finish_reasons[place] != "none"
        found.append(result.tokens[place, : result.lengths[place]].tolist() if there else None)
    return found


@tiers.parametrize("seed", range(8), first=3)
def test_search_of_toys(seed):
    check_search(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 134))
def test_search_of_more_toys(seed):
    """2,000 searches more."""
    check_search(seed)


@pytest.mark.parametrize("early_stopping, penalty", [("never", -1.0), (True, 1.0)])
def test_early_stopping_of_toys(early_stopping, penalty):
    """Below a penalty of 0 the length so far, not the greatest, bounds what can follow."""
    check_search(1, length_penalty=penalty, early_stopping=early_stopping)


def check_search(seed, **changes):
    target, drafter, inputs, options, drafting = cases(seed, 16)
    options |= changes
    beams = options["num_beams"]
    plain = sd.generate(target, inputs, **options)
    speculative = sd.generate(
        target, inputs, drafter=sd.ModelDrafter(drafter), **drafting, **options
    )
    np.testing.assert_allclose(
        speculative.scores, plain.scores, rtol=1e-6, atol=1e-7
    )  # sums of a logsumexp

    def steps(result):
        return [
            round(row.tokens_per_target_call * row.target_calls) for row in result.stats.per_row
        ]

    node_outcomes = 0
    for row, expected in enumerate(reference(target, inputs, options)):
        # The last bit of a logsumexp depends on how many rows it is of, and may decide where two
        # are as good.
        if expected.margin > ROUNDING:
            assert rows_of(speculative, row, beams) == rows_of(plain, row, beams)
            assert steps(speculative)[row] == steps(plain)[row]
        if expected.margin < MARGIN:
            continue
        node_outcomes += 1
        assert rows_of(plain, row, beams) == expected.tokens
        np.testing.assert_allclose(
            plain.scores[row * beams : (row + 1) * beams], expected.scores, rtol=1e-5, atol=1e-5
        )
        assert steps(plain)[row] == expected.steps
    assert node_outcomes > len(inputs) / 2
    assert speculative.stats.target_calls <= plain.stats.target_calls


MUTANTS = {
    "as many candidates as beams": dict(kept=1),
    "length off by one": dict(brevity_offset=-1),
    "best instead of worst finished": dict(worst=max),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_reference_finds(mutant):
    """A search with this mistake differs somewhere; so the comparison above would see it."""
    model = HashModel(7, 0, eos_ids=(4,))
    inputs = np.random.default_rng(3).integers(1, 7, (40, 3))
    search = Search(3, (4,), 0.6)
    wrong = dataclasses.replace(search, **MUTANTS[mutant])
    both = [
        [one.run(distribution_of(model, row), LIMIT) for one in (search, wrong)] for row in inputs
    ]
    assert any(
        (a.tokens, a.scores, a.steps) != (b.tokens, b.scores, b.steps)
        for a, b in both
        if a.margin > MARGIN
    )


@pytest.fixture
def pair():
    target = HashModel(9, 0, eos_ids=(4,))
    drafter = sd.ModelDrafter(HashModel(9, 7, eos_ids=(4,), likeness=0.9))
    inputs = np.random.default_rng(3).integers(1, 9, (40, 3))
    options = dict(num_beams=4, num_return_sequences=4, max_new_tokens=LIMIT)
    return target, inputs, options, dict(drafter=drafter, gamma=3, beam_width=6)


@pytest.fixture
def broken(monkeypatch):
    """Replaces a function of the iteration, and forgets what was compiled before and with it."""

    def replace(name, replacement):
        monkeypatch.setattr(beam_iteration, name, replacement)
        jax.clear_caches()

    yield replace
    jax.clear_caches()


def test_a_drafter_that_is_the_target_is_never_wrong():
    """K nodes a level are the K beams that go on, and no token that ends a sequence is one."""
    target = HashModel(9, 0, eos_ids=(4,))
    inputs = np.random.default_rng(3).integers(1, 9, (20, 3))
    options = dict(num_beams=3, max_new_tokens=LIMIT, gamma=2, beam_width=3)
    found = sd.generate(target, inputs, drafter=sd.ModelDrafter(target), **options)
    for row in found.stats.per_row:
        steps = round(row.tokens_per_target_call * row.target_calls)
        assert row.target_calls == -(-steps // 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", ["unscored beam", "siblings seen", "nothing moved", "moved off by one"]
)
def test_identity_finds(pair, mistake, broken):
    """With a mistake that others have made in trees the search differs."""
    target, inputs, options, drafting = pair
    plain = sd.generate(target, inputs, **options)
    walk = beam_iteration._walk
    if mistake == "unscored beam":  # a step goes on although an active beam is no node
        broken("_are_beams_scored", lambda same: jnp.any(same, axis=(1, 2)))
    elif mistake == "siblings seen":  # the node before in the call, instead of the parent
        broken(
            "node_paths", lambda paths, positions, slots: node_paths(paths, positions, slots - 1)
        )
    else:

        def wrong(state, tree, found):
            after, levels = walk(state, tree, found)
            own = jnp.arange(levels.shape[1], dtype=jnp.int32) + state.config.beams
            return after, jnp.broadcast_to(
                own, levels.shape
            ) if mistake == "nothing moved" else levels + 1

        broken("_walk", wrong)
    found = sd.generate(target, inputs, **drafting, **options)
    assert np.any(found.tokens != plain.tokens)
