"""Horizontal cascades: their drafts, their distribution, and what both kinds of cascade share."""

import flax.struct
import jax
import numpy as np
import pytest
import scipy.stats
import tiers
import toy
from cascade_parts import (
    EOS,
    FILTERS,
    INPUTS,
    KEY,
    LIMIT,
    PREFIXES,
    TARGET,
    B,
    V,
    allowed,
    first_draft,
    model,
    plain,
    run,
    table,
    teacher_forced,
)
from distribution_samples import SPREAD
from toy_models import HashModel, Words, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import variants
from specdec_jax.analysis.report import summaries
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.decoding.checks import check_pair
from specdec_jax.decoding.generate import prepare
from specdec_jax.drafters import drafting
from specdec_jax.speculative import randomness as speculative_randomness
from specdec_jax.speculative.distributions import PointMass

pytestmark = pytest.mark.usefixtures("quick")


# --- Horizontal ---

PAIRS = {
    "model, table": lambda: sd.HorizontalCascade(model, table(False), 2),
    "model, random": lambda: sd.HorizontalCascade(model, sd.RandomDrafter(V), 1),
    "model, model": lambda: sd.HorizontalCascade(model, sd.ModelDrafter(TARGET), 2),
    "lookup, model": lambda: sd.HorizontalCascade(sd.PromptLookupDrafter(1), model, 3),
    "lookup, table": lambda: sd.HorizontalCascade(sd.PromptLookupDrafter(2), table(False), 9),
    "vertical, table": lambda: sd.HorizontalCascade(
        sd.VerticalCascade(model, table(True), 1), table(False), 3
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model, table", "model, model", "lookup, model"])
def test_greedy_output_is_that_of_plain_decoding(name):
    result = run(PAIRS[name]())
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    np.testing.assert_array_equal(result.lengths, plain().lengths)
    assert 0 < result.stats.accepted < result.stats.drafted
    if name == "model, table":
        assert result.stats.draft_calls < run(model).stats.draft_calls
    elif name == "model, model":  # the second is always right, also after what the first drafted
        accepted = result.stats.accepted_by_position / result.stats.examined_by_position
        assert (
            np.all(accepted[:2] < 1)
            and np.all(accepted[2:] == 1)
            and result.stats.examined_by_position[2] > 0
        )


@tiers.parametrize("name", [name for name in PAIRS if name != "model, model"], first=1)
def test_every_position_has_the_distribution_of_its_drafter(name):
    """Undrawn tokens are one-hot; the second drafter fills in where the first is silent."""
    wanted, drafter = np.full(B, 5, np.int32), PAIRS[name]()
    first, then = drafter.parts
    draft = first_draft(drafter, wanted)
    alone = first_draft(first, np.minimum(wanted, drafter.settings[0]))
    counts = alone.num_drafted
    if name == "lookup, table":
        assert isinstance(draft.dist, PointMass)
    dist = draft.dist.dist() if isinstance(draft.dist, PointMass) else draft.dist
    probs = np.exp(dist.logits - dist.log_normalizer[..., None])
    for row in range(B):
        np.testing.assert_array_equal(
            draft.tokens[row, : counts[row]], alone.tokens[row, : counts[row]]
        )
        ids = draft.tokens[row, : draft.num_drafted[row]].tolist()
        assert len(ids) == min(5, counts[row] + 4), "`then` drafts at most 4"
        for place, token in enumerate(ids):
            part = first if place < counts[row] else then
            part = part.parts[0] if isinstance(part, sd.VerticalCascade) else part
            if isinstance(part, sd.ModelDrafter):
                logits = teacher_forced(part.model, row, ids)[place]
                expected = toy.adjusted_probs(allowed(logits), **FILTERS)
            elif isinstance(part, sd.RandomDrafter):
                expected = (np.arange(V) != 3) / (V - 1)
            else:
                expected = np.eye(V)[token]
            np.testing.assert_allclose(probs[row, place], expected, atol=1e-5)
            assert expected[token] > 0
    if name.startswith("lookup"):
        assert len(set(counts.tolist())) > 1, "or the second never fills in"


@pytest.mark.slow
@pytest.mark.parametrize("then_gamma", [2, 1, None])
def test_the_second_drafts_no_more_than_its_limit(then_gamma):
    """So γ may suit a drafter that copies; what is drafted stays the same as far as it goes."""
    first, wanted = sd.PromptLookupDrafter(1), np.arange(B, dtype=np.int32) % 6
    drafter = sd.HorizontalCascade(first, model, 3, then_gamma)
    assert drafter.varies == (then_gamma is not None) or first.varies
    draft, counts = first_draft(drafter, wanted), first_draft(first, np.minimum(wanted, 3))
    most = np.minimum(wanted, counts.num_drafted + (then_gamma or 5))
    np.testing.assert_array_equal(draft.num_drafted, most)
    whole = first_draft(sd.HorizontalCascade(first, model, 3, 5), wanted).tokens
    drafted = np.arange(5) < most[:, None]
    np.testing.assert_array_equal(np.where(drafted, draft.tokens, 0), np.where(drafted, whole, 0))
    if then_gamma == 2:
        result = run(drafter)
        np.testing.assert_array_equal(result.tokens, plain().tokens)
        assert 0 < result.stats.accepted < result.stats.drafted


def test_nothing_is_drafted_after_an_eos():
    everything = first_draft(PAIRS["model, table"](), np.full(B, 5, np.int32))
    for eos in range(V):
        draft = first_draft(PAIRS["model, table"](), np.full(B, 5, np.int32), eos_ids=(eos,))
        for row, ids in enumerate(draft.tokens):
            is_eos = ids[: draft.num_drafted[row]] == eos
            assert not is_eos[:-1].any() and (draft.num_drafted[row] == 5 or is_eos[-1])
            expected = everything.tokens[row, : draft.num_drafted[row]]
            np.testing.assert_array_equal(ids[: draft.num_drafted[row]], expected)


def test_later_parts_draw_with_keys_of_their_own():
    """A later part of a draft and an iteration that begins there draw apart; PITFALLS row 31."""
    state, _ = prepare(
        TARGET, INPUTS, drafter=model, gamma=3, sampling=SPREAD, max_new_tokens=LIMIT, key=KEY
    )
    offsets = np.tile(np.arange(200, dtype=np.int32), (B, 1))
    drawn = [
        np.asarray(
            speculative_randomness.uniforms(keys, lengths, offsets, speculative_randomness.DRAFT)
        ).ravel()
        for lengths in (state.lengths, state.lengths + 1)
        for keys in (
            state.keys,
            drafting.fold_part_keys(state),
            drafting.fold_part_keys(state.replace(lengths=state.lengths + 1)),
        )
    ]
    for i, ours in enumerate(drawn):
        for theirs in drawn[:i]:
            assert scipy.stats.pearsonr(ours, theirs).pvalue > 1e-6
            assert np.mean(ours == theirs) < 0.01


def test_a_later_part_is_not_what_an_iteration_that_begins_there_draws():
    """Else two tokens that need not be equal would be, in the draft and in the next iteration."""
    other, wanted = sd.ModelDrafter(TARGET), np.full(B, 2, np.int32)
    draft = first_draft(sd.HorizontalCascade(model, other, 1), wanted)
    prefixes = [[*ids, int(new)] for ids, new in zip(PREFIXES, draft.tokens[:, 0])]
    later = first_draft(other, wanted, decoder_prefix=prefixes)
    assert np.mean(draft.tokens[:, 1] == later.tokens[:, 0]) < 0.6


# --- What both have in common ---


@flax.struct.dataclass
class Observer(sd.Drafter):
    """Drafts nothing and counts what it is shown."""

    def init(self, inputs, input_lengths, tokens, slots):
        return jax.numpy.zeros(tokens.shape[0], jax.numpy.int32)

    def draft(self, draft_state, state, num_wanted):
        return draft_state, sd.PromptLookupDrafter(1).draft(
            sd.PromptLookupDrafter(1).init(state.tokens[:, :1], state.lengths * 0, state.tokens, 0),
            state,
            num_wanted * 0,
        )[1]

    def observe(self, draft_state, state, scored):
        return draft_state + scored.num_new


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["horizontal", "vertical"])
def test_a_part_that_learns_is_shown_every_call(kind):
    drafter = {
        "horizontal": lambda: sd.HorizontalCascade(Observer(), model, 1),
        "vertical": lambda: sd.VerticalCascade(model, Observer(), 1),
    }[kind]()
    state, request = prepare(
        TARGET, INPUTS, drafter=drafter, gamma=3, max_new_tokens=LIMIT, eos_ids=()
    )
    state = sd.advance(request.network, request.drafter, state, np.int32(99))
    np.testing.assert_array_equal(
        getattr(state.draft_state, "first" if kind == "horizontal" else "second"), LIMIT
    )


@pytest.mark.slow
def test_an_early_exit_before_a_table():
    """The target's cache that the first part has written to reaches the target."""
    target = tiny_t5(0, V, decoder_layers=3)
    drafter = sd.HorizontalCascade(sd.EarlyExitDrafter(target, 2), table(False), 2)
    options = dict(max_new_tokens=LIMIT, eos_ids=(EOS,), decoder_prefix=PREFIXES)
    result, expected = (
        sd.generate(target, INPUTS, drafter=d, gamma=4, **options) for d in (drafter, None)
    )
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    assert 0 < result.stats.accepted < result.stats.drafted
    with pytest.raises(ValueError, match="got an early exit of another model"):
        check_pair(TARGET, drafter)
    for make in (
        lambda: sd.HorizontalCascade(model, sd.EarlyExitDrafter(target, 1), 1),
        lambda: sd.VerticalCascade(model, drafter, 1),
    ):
        with pytest.raises(
            ValueError,
            match="(then|inner): got (EarlyExitDrafter|HorizontalCascade), expected a drafter "
            "that needs",
        ):
            make()


def test_bad_input():
    for switch in (0, 1.5, True, None):
        with pytest.raises(
            ValueError, match=f"switch: got {switch}, expected an integer of at least 1"
        ):
            sd.HorizontalCascade(model, table(True), switch)
        if switch is not None:
            with pytest.raises(
                ValueError, match=f"then_gamma: got {switch}, expected an integer of at least 1"
            ):
                sd.HorizontalCascade(model, table(True), 1, switch)
        with pytest.raises(
            ValueError, match=f"inner_gamma: got {switch}, expected an integer of at least 1"
        ):
            sd.VerticalCascade(model, table(True), switch)
    with pytest.raises(ValueError, match="first: got None, expected a drafter"):
        sd.HorizontalCascade(None, model, 1)
    with pytest.raises(ValueError, match="inner: got 'lookup', expected a drafter"):
        sd.VerticalCascade(model, "lookup", 1)
    with pytest.raises(
        ValueError, match="model_drafter: got RandomDrafter, expected a ModelDrafter"
    ):
        sd.VerticalCascade(sd.RandomDrafter(V), model, 1)
    random_bits, others = (
        HashModel(V, 0, vocabulary=Words()),
        sd.ModelDrafter(HashModel(V, 1, vocabulary=Words(1))),
    )
    for drafter in (
        sd.HorizontalCascade(model, others, 1),
        sd.VerticalCascade(others, table(True), 1),
    ):
        with pytest.raises(ValueError, match="drafter: got a vocabulary of 16 pieces that differs"):
            sd.generate(random_bits, [[3]], drafter=drafter)


@pytest.mark.slow
def test_benchmark_predicts_nothing_for_a_cascade(monkeypatch):
    target, small = tiny_t5(0, V), tiny_t5(1, V, decoder_layers=1)
    small.name = "small"
    drafter = sd.VerticalCascade(sd.ModelDrafter(small), sd.PromptLookupDrafter(2), 2)
    steps = dict.fromkeys(
        ["target step", "products", "verify 3", "bare verify 3", "target encoder 8"], lambda: None
    )
    monkeypatch.setattr(analysis_benchmark, "_step_variants", lambda *_: steps)
    options = benchmark_command.BenchmarkOptions(
        target="target", drafter="small", gamma=(3,), max_new_tokens=8, repeats=1
    )
    record, problems = analysis_benchmark.benchmark(
        Workload(target, drafter, variants.cut_batches(INPUTS[:1], INPUTS[:1], 1, 0), options)
    )
    assert problems == [] and record["drafter"] == {"name": "small over prompt lookup (2)"}
    (variant,) = record["speculative"]
    assert (
        record["cost_ratio"] is None
        and variant["predicted"] is None
        and variant["stats"]["draft_calls"] > 0
    )
    text = summaries.benchmark_summary(record)
    assert "draft step     not timed" in text and "drafted for each; no prediction" in text
    combined = sd.HorizontalCascade(drafter, table(False), 2)
    assert combined.name == "small over prompt lookup (2), then 2-gram table (from 2)"
