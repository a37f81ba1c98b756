"""The better of two drafters: exact, row by row, chosen by the past alone."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from cascade_parts import INPUTS, KEY, TARGET, B, model, plain, run, table
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
from specdec_jax.decoding.generate import prepare
from specdec_jax.drafters.cascade import join_drafts
from specdec_jax.speculative.adaptive_gamma import Auto
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.state import Draft

pytestmark = pytest.mark.usefixtures("quick")
PAIRS = {
    "lookup, model": lambda: sd.BestOf(sd.PromptLookupDrafter(1), model, costs=(0, 0.1)),
    "model, table": lambda: sd.BestOf(model, table(True)),
    "cascades": lambda: sd.BestOf(
        sd.HorizontalCascade(sd.PromptLookupDrafter(1), model, 3),
        sd.VerticalCascade(model, table(False), 2),
    ),
}


@tiers.parametrize("verifier", ["block", "gumbel", "token"], first=1)
@tiers.parametrize("name", PAIRS, first=1)
def test_output_is_that_of_plain_decoding(name, verifier):
    """Rows at temperature 0; with Gumbel coupling all rows."""
    sampling = SamplingConfig(temperature=[0.0, 0.9] * (B // 2), top_k=9)
    result, expected = (
        run(drafter, sampling, verifier=verifier) for drafter in (PAIRS[name](), None)
    )
    rows = slice(None) if verifier == "gumbel" else slice(None, None, 2)
    np.testing.assert_array_equal(result.tokens[rows], expected.tokens[rows])
    assert 0 < result.stats.accepted < result.stats.drafted


@flax.struct.dataclass
class Mute(sd.RandomDrafter):
    """Drafts nothing."""

    def draft(self, draft_state, state, num_wanted):
        return super().draft(draft_state, state, num_wanted * 0)


@pytest.mark.slow
@pytest.mark.parametrize("best", [0, 1])
def test_a_row_uses_the_better_drafter(best):
    """It tries the other now and then, and the state tells which one drafted."""
    perfect, mute = sd.ModelDrafter(TARGET), Mute(16)
    drafter = sd.BestOf(*((perfect, mute) if best == 0 else (mute, perfect)), costs=(0.1, 0.1))
    state, request = prepare(
        TARGET, INPUTS, drafter=drafter, gamma=3, max_new_tokens=120, eos_ids=(), key=KEY
    )
    chosen = []
    for _ in range(40):
        state = sd.advance(request.network, request.drafter, state, np.int32(1))
        chosen.append(np.asarray(state.draft_state.chosen))
        if np.any(state.done):
            break
    share = (np.array(chosen) == best).mean()
    assert 0.75 < share < 1 and np.all(chosen[0] == 0)


def test_a_small_difference_changes_nothing():
    """Two drafters that are equally good do not take turns."""
    drafter = sd.BestOf(sd.ModelDrafter(TARGET), sd.ModelDrafter(TARGET), margin=0.5)
    state, request = prepare(
        TARGET, INPUTS, drafter=drafter, gamma=3, max_new_tokens=40, eos_ids=(), key=KEY
    )
    state = sd.advance(request.network, request.drafter, state, np.int32(5))
    assert np.all(state.draft_state.chosen == 0)


def test_iterations_without_a_draft_tell_nothing_of_a_drafter():
    """As where `gamma="auto"` drafts nothing; what was asked for and not found counts."""
    for maximum, other, counts in ((1, sd.ModelDrafter(TARGET), False), (1, Mute(16), True)):
        drafter = sd.BestOf(other, sd.ModelDrafter(TARGET), costs=(0.1, 0.1))
        costs = (1.0, 1.2) if counts else (1.0, 100.0)  # with these a draft never pays
        state, request = prepare(
            TARGET,
            INPUTS,
            drafter=drafter,
            gamma=Auto(maximum, costs=costs, look=0.0),
            max_new_tokens=8,
            eos_ids=(),
            key=KEY,
        )
        state = sd.advance(request.network, request.drafter, state, np.int32(3))
        time = np.asarray(state.draft_state.time)
        assert np.all(time[:, 0] > 0) if counts else not time.any()


def sampled(drafter) -> float:
    target, _ = hash_pair()
    counts, (examined, _) = sample(target, drafter, SPREAD, 2 * ROWS, verifier="token")
    assert examined.sum() > ROWS
    return g_test(counts, joint_distribution(target, SPREAD))


class ChosenByDraws(sd.BestOf):
    """Lets both draft, and takes the draft that its drafter was surer of."""

    def draft(self, draft_state, state, num_wanted):
        states, drafts = zip(
            *(part.draft(own, state, num_wanted) for part, own in zip(self.parts, draft_state[:2]))
        )

        def first_prob(draft: Draft):
            return draft.dist.prob(draft.tokens)[:, 0]

        second = first_prob(drafts[1]) > first_prob(drafts[0])
        head, tail = (
            draft._replace(num_drafted=jnp.where(mine, draft.num_drafted, 0))
            for draft, mine in zip(drafts, (~second, second))
        )
        after = draft_state._replace(first=states[0], second=states[1])
        return after, join_drafts(state, head, tail)


jax.tree_util.register_pytree_node_class(ChosenByDraws)


@pytest.mark.slow
def test_distribution_through_the_engine():
    target, draft = hash_pair()
    pair = sd.ModelDrafter(draft), sd.NGramDrafter.count([[3, 4, 5, 6, 7]], 16, 1, sampled=True)
    assert sampled(sd.BestOf(*pair)) > FALSE_ALARM


@pytest.mark.slow
def test_a_choice_after_both_drew_is_detected():
    target, draft = hash_pair()
    other = sd.ModelDrafter(type(draft)(16, 5, spread=3.0, likeness=0.3))
    assert sampled(ChosenByDraws(sd.ModelDrafter(draft), other)) < FALSE_ALARM
    assert sampled(sd.BestOf(sd.ModelDrafter(draft), other)) > FALSE_ALARM


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sd.BestOf(None, model), "first: got None, expected a drafter"),
        (lambda: sd.BestOf(model, model, costs=(1,)), "costs: got .*, expected two finite numbers"),
        (lambda: sd.BestOf(model, model, margin=-1), "margin: got -1, expected a number from 0"),
        (lambda: sd.BestOf(model, model, memory=2), "memory: got 2, expected a number from 0"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_plain_rows_are_there():
    assert plain().tokens.shape[0] == B
