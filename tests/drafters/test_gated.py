"""The gate: counts beside a loop in Python, exactness, what it leaves out."""

import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from cascade_parts import INPUTS, KEY, PREFIXES, TARGET, B, V, model, plain, run, table
from distribution_samples import (
    FALSE_ALARM,
    ROWS,
    SPREAD,
    g_test,
    hash_pair,
    joint_distribution,
    sample,
)

import specdec_jax as sd
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.drafters.gated import _FIRST, _WEIGHT, GateState

GAMMA = 5
MIXED = sd.SamplingConfig(temperature=[0.0, 0.9] * (B // 2), top_k=9)
pytestmark = pytest.mark.usefixtures("quick")
DRAFTERS = {
    "lookup": lambda **gate: sd.GatedDrafter(sd.PromptLookupDrafter(1), **gate),
    "copy": lambda **gate: sd.GatedDrafter(sd.PromptLookupDrafter(min_match=0), **gate),
    "recycling": lambda **gate: sd.GatedDrafter(sd.TokenRecycling(V), **gate),
    "bigrams": lambda **gate: sd.GatedDrafter(table(False), **gate),
}


@jax.jit
def draft_once(drafter, state):
    """What is drafted, and what the drafter inside would draft with the matches before it."""
    wanted = jnp.full(len(state.lengths), GAMMA, jnp.int32)
    whole = drafter.drafter.draft_best(state.draft_state.inner, state, wanted)
    return drafter.draft(state.draft_state, state, wanted)[1], whole


def follow(drafter, iterations: int) -> dict[str, int]:
    """Compares drafts and counts of some iterations with a loop in Python."""
    sampling = sd.SamplingConfig(temperature=[0.0, 0.4] * (B // 2))
    options = dict(gamma=GAMMA, max_new_tokens=40, eos_ids=(), sampling=sampling, key=KEY)
    state, request = prepare(TARGET, INPUTS, drafter=drafter, decoder_prefix=PREFIXES, **options)
    counts = np.zeros((B, len(_FIRST), 2))
    seen = dict(drafted=0, left_out=0, examined=0)
    for _ in range(iterations):
        draft, (whole, match) = jax.device_get(draft_once(request.drafter, state))
        start, done = np.asarray(state.lengths), np.asarray(state.done)
        state = advance(request.network, request.drafter, state, np.int32(1))
        tokens, ends = np.asarray(state.tokens), np.asarray(state.lengths)
        counts *= drafter.memory
        for row in np.flatnonzero(~done):
            groups = np.minimum(match[row], len(_FIRST) - 1)
            found, reach, worth = whole.num_drafted[row], 1.0, 0
            for group in groups[:found]:
                examined, accepted = counts[row, group] / drafter.memory
                reach *= (accepted + _WEIGHT * _FIRST[group]) / (examined + _WEIGHT)
                worth += reach >= drafter.least
            assert draft.num_drafted[row] == worth
            seen["drafted"] += worth
            seen["left_out"] += found - worth
            for place in range(min(found, ends[row] - start[row])):
                right = whole.tokens[row, place] == tokens[row, start[row] + place]
                counts[row, groups[place]] += 1, right
                seen["examined"] += 1
                if not right:
                    break
        states = state.draft_state
        np.testing.assert_allclose(states.examined, counts[..., 0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(states.accepted, counts[..., 1], rtol=1e-4, atol=1e-6)
    return seen


@tiers.parametrize("name", DRAFTERS, first=1)
def test_drafts_and_counts_equal_slow_ones(name):
    """What is left out counts too."""
    seen = follow(DRAFTERS[name](least=0.31), 8)
    assert min(seen.values()) > 10 or name == "bigrams"


@pytest.mark.parametrize(
    "start, ids, examined, accepted", [(1, [6, 5, 6], 2, 1), (1, [6, 6], 2, 2), (2, [6, 6], 0, 0)]
)
def test_what_is_committed_beyond_a_draft(start, ids, examined, accepted):
    """Inside a cascade more is: nothing is learnt after a mistake, nor of a draft that begins late.

    Three tokens are committed, the second to the fourth, all 6.
    """
    found = jnp.asarray([ids + [-1] * (16 - len(ids))])
    none, zeros = jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, len(_FIRST)))
    own = GateState(none, zeros, zeros, found, jnp.maximum(found, 0), jnp.array([start]))
    state = types.SimpleNamespace(tokens=jnp.full((1, 8), 6), lengths=jnp.array([4]))
    after = DRAFTERS["lookup"]().observe(own, state, types.SimpleNamespace(num_new=jnp.array([3])))
    assert (int(after.examined.sum()), int(after.accepted.sum())) == (examined, accepted)


@pytest.mark.slow
def test_a_closed_gate_learns():
    seen = follow(DRAFTERS["copy"](least=1.0), 4)
    assert seen["drafted"] == 0 and seen["examined"] > 20


@flax.struct.dataclass
class OfDrafted(sd.GatedDrafter):
    """Learns from what it drafted alone."""

    def draft(self, draft_state, state, num_wanted):
        after, draft = super().draft(draft_state, state, num_wanted)
        there = jnp.arange(after.ids.shape[1]) < draft.num_drafted[:, None]
        return after._replace(ids=jnp.where(there, after.ids, -1)), draft


@flax.struct.dataclass
class PastAMistake(sd.GatedDrafter):
    """Counts tokens after the first wrong one, as if they had been examined."""

    def observe(self, draft_state, state, scored):
        after = super().observe(draft_state, state, scored)
        known = (draft_state.ids >= 0).astype(jnp.float32)
        return after._replace(examined=after.examined + jnp.sum(known, axis=1)[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [OfDrafted, PastAMistake])
def test_mistakes_are_found(mutant):
    with pytest.raises(AssertionError):
        follow(mutant(sd.PromptLookupDrafter(1), least=0.4), 6)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["block", "gumbel", "token"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_that_of_plain_decoding(name, verifier):
    """Rows at temperature 0; with Gumbel coupling all rows."""
    result, expected = (
        run(drafter, MIXED, verifier=verifier) for drafter in (DRAFTERS[name](), None)
    )
    rows = slice(None) if verifier == "gumbel" else slice(None, None, 2)
    np.testing.assert_array_equal(result.tokens[rows], expected.tokens[rows])
    assert 0 < result.stats.accepted < result.stats.drafted


@pytest.mark.slow
def test_fewer_wrong_tokens_are_drafted():
    options = dict(max_new_tokens=40, eos_ids=(), gamma=4)
    found, expected = (
        run(drafter, **options)
        for drafter in (DRAFTERS["copy"](least=0.3), sd.PromptLookupDrafter(min_match=0))
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    gated, ungated = found.stats, expected.stats
    assert gated.acceptance_rate > ungated.acceptance_rate and gated.drafted < ungated.drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda gated: sd.HorizontalCascade(gated, model, 3),
        lambda gated: sd.VerticalCascade(model, gated, 2),
        lambda gated: sd.BestOf(gated, model),
    ],
)
def test_inside_other_drafters(make):
    result = run(make(DRAFTERS["lookup"](least=0.7)), gamma=4)
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    assert result.stats.accepted > 0


@pytest.mark.slow
def test_distribution_through_the_engine():
    target, _ = hash_pair()
    drafter = sd.GatedDrafter(sd.PromptLookupDrafter(min_match=0), least=0.3)
    counts, (examined, accepted) = sample(target, drafter, SPREAD, 2 * ROWS, verifier="token")
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.02 < accepted.sum() / examined.sum() < 0.9


def test_the_inner_drafter_is_told_of_a_traced_target():
    class Told(sd.PromptLookupDrafter):
        def on(self, network):
            return sd.PromptLookupDrafter(network.vocab_size)

    gated = sd.GatedDrafter(Told(), least=0.3)
    assert gated.on(TARGET.network) == sd.GatedDrafter(sd.PromptLookupDrafter(V), least=0.3)
    gated = sd.GatedDrafter(sd.PromptLookupDrafter())
    assert gated.on(TARGET.network) is gated


def test_what_the_inner_drafter_needs_is_given():
    class Reads(sd.PromptLookupDrafter):
        reads_encoder = needs_target_state = True

    gated = sd.GatedDrafter(Reads())
    assert gated.reads_encoder and gated.needs_target_state
    plain = sd.GatedDrafter(sd.PromptLookupDrafter())
    assert not plain.reads_encoder and not plain.needs_target_state


def test_what_is_rejected():
    for arguments, message in (
        ((model,), "drafter: got ModelDrafter.*looks up what follows"),
        ((table(True),), "and does not draw"),
        ((sd.PromptLookupDrafter(), 1.5), "least: got 1.5"),
        ((sd.PromptLookupDrafter(), 0.1, -1), "memory: got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.GatedDrafter(*arguments)
    drafter = sd.GatedDrafter(sd.PromptLookupDrafter())
    assert drafter.name == "gated prompt lookup"
    with pytest.raises(ValueError, match="which drafts chains"):
        sd.generate(TARGET, INPUTS, drafter=drafter, tree=sd.Tree.uniform((2, 1)))
    shared = sd.GatedDrafter(sd.TokenRecycling(V, shared=True))
    with pytest.raises(ValueError, match="expected 'gumbel' above temperature 0"):
        sd.generate(TARGET, INPUTS, drafter=shared, sampling=sd.SamplingConfig(temperature=1.0))
