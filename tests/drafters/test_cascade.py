"""Drafters made of drafters: their output, and the distribution of their drafts."""

import jax
import numpy as np
import pytest
import tiers
import toy
from cascade_parts import (
    EOS,
    FILTERS,
    GAMMAS,
    INPUTS,
    KEY,
    LIMIT,
    LIMITS,
    MODEL,
    OTHER,
    PREFIXES,
    TARGET,
    B,
    V,
    allowed,
    drafted,
    first_draft,
    model,
    plain,
    run,
    table,
    teacher_forced,
)
from distribution_samples import (
    FALSE_ALARM,
    ROWS,
    SPREAD,
    g_test,
    joint_distribution,
    sample,
    traced_anew,
)
from distribution_samples import INPUTS as ONE_INPUT
from toy_models import HashModel, compilations

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.drafters import cascade
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")


def counted(result) -> list:
    return [(row.target_calls, row.drafted, row.accepted) for row in result.stats.per_row]


# --- Vertical ---

INNERS = {
    "other model": lambda: sd.ModelDrafter(OTHER),
    "lookup": lambda: sd.PromptLookupDrafter(1),
    "vertical": lambda: sd.VerticalCascade(sd.ModelDrafter(OTHER), table(False), 1),
}


@tiers.parametrize("name, width", [("other model", 2), ("lookup", 9), ("vertical", 2)], first=1)
def test_greedy_drafts_are_those_of_the_model(name, width):
    """Rows have their own γ, prefix and limit, and drafts an EOS, whatever proposes."""
    drafter = sd.VerticalCascade(model, INNERS[name](), width)
    result, alone = run(drafter), run(model)
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    np.testing.assert_array_equal(result.lengths, plain().lengths)
    assert counted(result) == counted(alone) and 0 < result.stats.accepted < result.stats.drafted
    if name == "other model":
        endless = run(drafter, eos_ids=())
        for eos in range(
            2, V
        ):  # on every place in what is proposed, what is accepted of it and what the model adds
            valid = np.cumsum(np.cumsum(endless.tokens == eos, axis=1), axis=1) <= 1
            np.testing.assert_array_equal(
                run(drafter, eos_ids=(eos,)).tokens, np.where(valid, endless.tokens, 0)
            )
        order = np.random.default_rng(1).permutation(B)

        def reorder(values):
            return [values[row] for row in order]

        options = dict(
            max_new_tokens=reorder(LIMITS),
            decoder_prefix=reorder(PREFIXES),
            gamma=reorder(GAMMAS),
            eos_ids=(EOS, 8),
            key=KEY,
        )
        turned = []

        def again():
            return turned.append(sd.generate(TARGET, reorder(INPUTS), drafter=drafter, **options))

        assert compilations(again) == 0
        np.testing.assert_array_equal(turned[0].tokens, result.tokens[order])
        assert counted(turned[0]) == reorder(counted(result))


@pytest.mark.slow
def test_coupled_drafts_are_those_of_the_model():
    result, alone = (
        run(drafter, SamplingConfig(temperature=[0.0, *[1.1] * (B - 1)]), verifier="gumbel")
        for drafter in (sd.VerticalCascade(model, sd.ModelDrafter(OTHER), 2), model)
    )
    np.testing.assert_array_equal(result.tokens, alone.tokens)
    assert counted(result) == counted(alone) and 0 < result.stats.accepted < result.stats.drafted


class Uncounted(sd.ModelDrafter):
    """Proposes what a model says, as if it cost nothing; or nothing at all."""

    silent = False

    def draft(self, draft_state, state, num_wanted):
        draft_state, draft = super().draft(
            draft_state, state, 0 * num_wanted if self.silent else num_wanted
        )
        return draft_state, draft._replace(calls=draft.calls * 0)


class Silent(Uncounted):
    silent = True


for kind in (Uncounted, Silent):
    jax.tree_util.register_pytree_node_class(kind)


@pytest.mark.slow
def test_calls_are_the_models(width=2):
    """If proposals are always right each call drafts one token more than is proposed."""
    for inner, per_call in ((Uncounted(MODEL), width + 1), (Silent(MODEL), 1)):
        drafter = sd.VerticalCascade(model, inner, width)
        state, request = prepare(
            TARGET, INPUTS, drafter=drafter, gamma=GAMMAS, max_new_tokens=LIMIT, eos_ids=()
        )
        counts = sd.advance(request.network, request.drafter, state, np.int32(1)).counts
        np.testing.assert_array_equal(counts.drafted, GAMMAS)
        np.testing.assert_array_equal(counts.draft_calls, -(-np.array(GAMMAS) // per_call))


@pytest.mark.slow
def test_catching_up_needs_no_call_of_its_own(width=2):
    """The cache of the target's own model lacks two tokens after each iteration.

    Rows also rest in between.
    """
    drafter = sd.VerticalCascade(sd.ModelDrafter(TARGET), Uncounted(TARGET), width)
    state, request = prepare(
        TARGET, INPUTS, drafter=drafter, gamma=4, max_new_tokens=25, eos_ids=()
    )
    calls = []
    for wanted in (4, 4, 0, 0, 0, 4, 4, 4):
        state = state.replace(gamma=np.full(B, wanted, np.int32))
        before = np.asarray(state.counts.draft_calls)
        state = sd.advance(request.network, request.drafter, state, np.int32(1))
        calls.append(np.unique(state.counts.draft_calls - before).tolist())
    # What lags (one token after a full acceptance, then one more for each iteration at rest), the
    # last token and the proposals: width + 1 of them fit into a call. The last iteration is one
    # token short of the limit.
    fed = [0 + 4, 1 + 4, 0, 0, 0, 4 + 4, 1 + 4, 1 + 1]
    assert calls == [[-(-n // (width + 1))] for n in fed]
    result = sd.finish(TARGET, state, request)
    expected = sd.generate(TARGET, INPUTS, max_new_tokens=25, eos_ids=())
    done = np.arange(25) < result.lengths[:, None]
    np.testing.assert_array_equal(result.tokens, np.where(done, expected.tokens, 0))
    assert result.stats.acceptance_rate == 1.0 and np.all(result.lengths == 25)


def drafts(drafter, draws: int, gamma: int = 3):
    """Returns joint counts of first drafts of three ids, 0 after an EOS.

    Each row has its own key, as in `joint_distribution`.
    """
    counts = np.zeros(V**3)
    for start in range(0, draws, ROWS):
        state, request = prepare(
            TARGET,
            np.tile(ONE_INPUT, (ROWS, 1)),
            input_lengths=np.full(ROWS, 3),
            drafter=drafter,
            gamma=gamma,
            sampling=SPREAD,
            max_new_tokens=9,
            eos_ids=[5],
            key=jax.random.fold_in(KEY, start),
            verifier="token",
        )
        draft = jax.device_get(drafted(request.drafter, state, np.full(ROWS, gamma, np.int32)))
        tokens = np.where(np.arange(3) < draft.num_drafted[:, None], draft.tokens, 0)
        counts += np.bincount(tokens @ np.array([V * V, V, 1]), minlength=V**3)
    return counts


SPREAD_MODEL, SPREAD_OTHER = (
    HashModel(V, 1, spread=3.0, likeness=0.3),
    HashModel(V, 2, spread=3.0, likeness=0.3),
)


def vertical():
    return sd.VerticalCascade(sd.ModelDrafter(SPREAD_MODEL), sd.ModelDrafter(SPREAD_OTHER), 2)


@pytest.mark.slow
def test_the_draft_has_the_models_distribution():
    """Three drafted ids, drawn with production keys through rejections and bonus tokens."""
    counts = drafts(vertical(), ROWS)
    assert g_test(counts, joint_distribution(SPREAD_MODEL, SPREAD)) > FALSE_ALARM
    assert g_test(counts, joint_distribution(SPREAD_OTHER, SPREAD)) < FALSE_ALARM, (
        "the test can fail"
    )


def test_the_returned_distribution_is_the_models():
    """At every position, and nothing is drafted that it excludes."""
    wanted = np.arange(B, dtype=np.int32) % 6
    draft = first_draft(sd.VerticalCascade(model, sd.RandomDrafter(V), 2), wanted)
    np.testing.assert_array_equal(draft.num_drafted, wanted)
    probs = np.exp(draft.dist.logits - draft.dist.log_normalizer[..., None])
    for row in range(1, B):
        ids = draft.tokens[row, : wanted[row]].tolist()
        expected = toy.adjusted_probs(allowed(teacher_forced(MODEL, row, ids)), **FILTERS)[
            : len(ids)
        ]
        np.testing.assert_allclose(probs[row, : len(ids)], expected, atol=1e-5)
        assert np.all(expected[np.arange(len(ids)), ids] > 0)


def with_shared_keys(monkeypatch):
    monkeypatch.setattr(cascade, "fold_part_keys", lambda state: state.keys)


def horizontal():
    return sd.HorizontalCascade(sd.ModelDrafter(SPREAD_MODEL), table(False), 1)


SPREAD_TARGET = HashModel(V, 0, spread=3.0)


@tiers.parametrize(
    "make, verifier",
    [(vertical, "token"), (vertical, "block"), (horizontal, "token")],
    ids=["vertical", "vertical by blocks", "horizontal"],
    first=1,
)
def test_distribution_through_the_engine(make, verifier):
    counts, (examined, accepted) = sample(SPREAD_TARGET, make(), SPREAD, ROWS, verifier=verifier)
    assert g_test(counts, joint_distribution(SPREAD_TARGET, SPREAD)) > FALSE_ALARM
    assert 0.1 < accepted.sum() / examined.sum() < 0.9
    assert g_test(counts, joint_distribution(SPREAD_MODEL, SPREAD)) < FALSE_ALARM, (
        "the test can fail"
    )


@pytest.mark.slow
def test_draws_that_are_shared_with_the_target_are_detected(monkeypatch):
    """Proposals and drafts accepted by one uniform are detected; PITFALLS row 6."""
    with_shared_keys(monkeypatch)
    counts, _ = sample(SPREAD_TARGET, vertical(), SPREAD, ROWS, run=traced_anew())
    assert g_test(counts, joint_distribution(SPREAD_TARGET, SPREAD)) < FALSE_ALARM
