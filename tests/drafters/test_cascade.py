"""Drafters made of drafters: their output, the law of their drafts, and the law that they say they have."""

import functools

import flax.struct
import jax
import numpy as np
import pytest
import scipy.stats
import toy as shared_toy
from law_samples import FALSE_ALARM, ROWS, SPREAD, g_test, joint_law, sample, traced_anew
from law_samples import INPUTS as ONE_INPUT
from toy_models import HashModel, Words, compilations, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import arms
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis.report import summaries
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.decoding.checks import check_pair
from specdec_jax.decoding.request import prepare
from specdec_jax.drafters import cascade, drafting
from specdec_jax.speculative import draws as speculative_draws
from specdec_jax.speculative.laws import PointMass
from specdec_jax.speculative.sampling import SamplingConfig

V, B, LIMIT, EOS = 16, 12, 12, 1
TARGET, MODEL, OTHER = HashModel(V, 0), HashModel(V, 1, likeness=0.7), HashModel(V, 2, likeness=0.7)
RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, V, n), EOS] for n in RNG.integers(1, 7, B)]
PREFIXES = [RNG.integers(2, V, row % 5).tolist() for row in range(B)]
GAMMAS = [1 + row % 5 for row in range(B)]
LIMITS = [1 if row % 6 == 5 else LIMIT for row in range(B)]
KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("quick")
model = sd.ModelDrafter(MODEL)


@functools.cache
def table(sampled: bool):
    """Of fewer ids than the models have; without `sampled` a point mass."""
    sequences = np.random.default_rng(2).integers(0, 13, (6, 20)).tolist()
    return sd.NGramDrafter.count(sequences, 13, 2, sampled=sampled)


def run(drafter, config=SamplingConfig(), **options):
    options = dict(max_new_tokens=LIMITS, decoder_prefix=PREFIXES, gamma=GAMMAS, eos_ids=(EOS, 8), key=KEY) | options
    return sd.generate(TARGET, INPUTS, drafter=drafter, sampling=config, **options)


@functools.cache
def plain():
    return run(None)


def counted(result) -> list:
    return [(row.target_calls, row.drafted, row.accepted) for row in result.stats.per_row]


# --- Vertical ---

INNERS = {
    "other model": lambda: sd.ModelDrafter(OTHER),
    "lookup": lambda: sd.PromptLookupDrafter(1),
    "vertical": lambda: sd.VerticalCascade(sd.ModelDrafter(OTHER), table(False), 1),
}


@pytest.mark.parametrize("name, width", [("other model", 2), ("lookup", 9), ("vertical", 2)])
def test_greedy_drafts_are_those_of_the_model(name, width):
    """Rows of their own γ, prefix and limit; EOS in drafts; whatever proposes to the model, and for how many positions."""
    drafter = sd.VerticalCascade(model, INNERS[name](), width)
    result, alone = run(drafter), run(model)
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    np.testing.assert_array_equal(result.lengths, plain().lengths)
    assert counted(result) == counted(alone) and 0 < result.stats.accepted < result.stats.drafted
    if name == "other model":
        endless = run(drafter, eos_ids=())
        for eos in range(2, V):  # on every place in what is proposed, what stands of it and what the model adds
            live = np.cumsum(np.cumsum(endless.tokens == eos, axis=1), axis=1) <= 1
            np.testing.assert_array_equal(run(drafter, eos_ids=(eos,)).tokens, np.where(live, endless.tokens, 0))
        order = np.random.default_rng(1).permutation(B)
        at = lambda values: [values[row] for row in order]
        options = dict(
            max_new_tokens=at(LIMITS), decoder_prefix=at(PREFIXES), gamma=at(GAMMAS), eos_ids=(EOS, 8), key=KEY
        )
        turned = []
        again = lambda: turned.append(sd.generate(TARGET, at(INPUTS), drafter=drafter, **options))
        assert compilations(again) == 0
        np.testing.assert_array_equal(turned[0].tokens, result.tokens[order])
        assert counted(turned[0]) == at(counted(result))


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
        draft_state, draft = super().draft(draft_state, state, num_wanted * (not self.silent))
        return draft_state, draft._replace(calls=draft.calls * 0)


class Silent(Uncounted):
    silent = True


for kind in (Uncounted, Silent):
    jax.tree_util.register_pytree_node_class(kind)


def test_calls_are_the_models(width=2):
    """Of a first draft: if proposals are always right each call drafts one more than is proposed, without any one."""
    for inner, per_call in ((Uncounted(MODEL), width + 1), (Silent(MODEL), 1)):
        drafter = sd.VerticalCascade(model, inner, width)
        state, request = prepare(TARGET, INPUTS, drafter=drafter, gamma=GAMMAS, max_new_tokens=LIMIT, eos_ids=())
        counts = sd.advance(request.network, request.drafter, state, np.int32(1)).counts
        np.testing.assert_array_equal(counts.drafted, GAMMAS)
        np.testing.assert_array_equal(counts.draft_calls, -(-np.array(GAMMAS) // per_call))


def test_catching_up_needs_no_call_of_its_own(width=2):
    """The target's own model drafts, so that its cache lacks two tokens after each iteration; rows also rest in between."""
    drafter = sd.VerticalCascade(sd.ModelDrafter(TARGET), Uncounted(TARGET), width)
    state, request = prepare(TARGET, INPUTS, drafter=drafter, gamma=4, max_new_tokens=25, eos_ids=())
    calls = []
    for wanted in (4, 4, 0, 0, 0, 4, 4, 4):
        state = state.replace(gamma=np.full(B, wanted, np.int32))
        before = np.asarray(state.counts.draft_calls)
        state = sd.advance(request.network, request.drafter, state, np.int32(1))
        calls.append(np.unique(state.counts.draft_calls - before).tolist())
    # What lags (one token after a full acceptance, then one more for each iteration at rest), the last token and the
    # proposals: width + 1 of them fit into a call. The last iteration is one token short of the limit.
    fed = [0 + 4, 1 + 4, 0, 0, 0, 4 + 4, 1 + 4, 1 + 1]
    assert calls == [[-(-n // (width + 1))] for n in fed]
    result = sd.finish(TARGET, state, request)
    expected = sd.generate(TARGET, INPUTS, max_new_tokens=25, eos_ids=())
    done = np.arange(25) < result.lengths[:, None]
    np.testing.assert_array_equal(result.tokens, np.where(done, expected.tokens, 0))
    assert result.stats.acceptance_rate == 1.0 and np.all(result.lengths == 25)


def drafts(drafter, draws: int, gamma: int = 3):
    """Joint counts of first drafts of three ids, 0 after an EOS, as `joint_law` has it; each row with its own key."""
    counts = np.zeros(V**3)
    for start in range(0, draws, ROWS):
        state, request = prepare(
            TARGET, np.tile(ONE_INPUT, (ROWS, 1)), input_lengths=np.full(ROWS, 3), drafter=drafter, gamma=gamma,
            sampling=SPREAD, max_new_tokens=9, eos_ids=[5], key=jax.random.fold_in(KEY, start), verifier="token",
        )  # fmt: skip
        draft = jax.device_get(drafted(request.drafter, state, np.full(ROWS, gamma, np.int32)))
        tokens = np.where(np.arange(3) < draft.num_drafted[:, None], draft.tokens, 0)
        counts += np.bincount(tokens @ np.array([V * V, V, 1]), minlength=V**3)
    return counts


SPREAD_MODEL, SPREAD_OTHER = HashModel(V, 1, spread=3.0, likeness=0.3), HashModel(V, 2, spread=3.0, likeness=0.3)


def vertical():
    return sd.VerticalCascade(sd.ModelDrafter(SPREAD_MODEL), sd.ModelDrafter(SPREAD_OTHER), 2)


def test_the_draft_has_the_models_law():
    """The joint law of three drafted ids, drawn with the production keys through rejections and bonus tokens."""
    counts = drafts(vertical(), ROWS)
    assert g_test(counts, joint_law(SPREAD_MODEL, SPREAD)) > FALSE_ALARM
    assert g_test(counts, joint_law(SPREAD_OTHER, SPREAD)) < FALSE_ALARM, "the test can fail"


def teacher_forced(model, row: int, ids) -> np.ndarray:
    """`[T, V]` logits of the ids that follow a row's prefix, for `T` ids."""
    prefix = PREFIXES[row]
    return model.logits([INPUTS[row]], [[0, *prefix, *ids[:-1]]], [len(INPUTS[row])])[0, len(prefix) :]


FILTERS = dict(temperature=0.9, top_k=9)


@jax.jit
def drafted(drafter, state, wanted):
    return drafter.draft(state.draft_state, state, wanted)[1]


def first_draft(drafter, wanted, config=SamplingConfig(**FILTERS, forbidden_tokens=(3,)), **options):
    state, request = prepare(
        TARGET, INPUTS, drafter=drafter, gamma=5, sampling=config, max_new_tokens=LIMIT, decoder_prefix=PREFIXES,
        key=KEY, **{"eos_ids": ()} | options,
    )  # fmt: skip
    return jax.device_get(drafted(request.drafter, state, wanted))


def allowed(logits):
    return np.where(np.arange(V) == 3, -np.inf, logits)


def test_the_returned_law_is_the_models():
    """At every position, and nothing is drafted that it excludes."""
    wanted = np.arange(B, dtype=np.int32) % 6
    draft = first_draft(sd.VerticalCascade(model, sd.RandomDrafter(V), 2), wanted)
    np.testing.assert_array_equal(draft.num_drafted, wanted)
    probs = np.exp(draft.law.logits - draft.law.log_normalizer[..., None])
    for row in range(1, B):
        ids = draft.tokens[row, : wanted[row]].tolist()
        expected = shared_toy.adjusted_probs(allowed(teacher_forced(MODEL, row, ids)), **FILTERS)[: len(ids)]
        np.testing.assert_allclose(probs[row, : len(ids)], expected, atol=1e-5)
        assert np.all(expected[np.arange(len(ids)), ids] > 0)


def with_shared_keys(monkeypatch):
    monkeypatch.setattr(cascade, "keys_apart", lambda state: state.keys)


def horizontal():
    return sd.HorizontalCascade(sd.ModelDrafter(SPREAD_MODEL), table(False), 1)


SPREAD_TARGET = HashModel(V, 0, spread=3.0)


@pytest.mark.parametrize("make, verifier", [(vertical, "block"), (horizontal, "token")], ids=["vertical", "horizontal"])
def test_law_through_the_engine(make, verifier):
    counts, (examined, accepted) = sample(SPREAD_TARGET, make(), SPREAD, ROWS, verifier=verifier)
    assert g_test(counts, joint_law(SPREAD_TARGET, SPREAD)) > FALSE_ALARM
    assert 0.1 < accepted.sum() / examined.sum() < 0.9
    assert g_test(counts, joint_law(SPREAD_MODEL, SPREAD)) < FALSE_ALARM, "the test can fail"


def test_draws_that_are_shared_with_the_target_are_found(monkeypatch):
    """The model's acceptance of proposals and the target's of drafts from one uniform; PITFALLS row 6."""
    with_shared_keys(monkeypatch)
    counts, _ = sample(SPREAD_TARGET, vertical(), SPREAD, ROWS, run=traced_anew())
    assert g_test(counts, joint_law(SPREAD_TARGET, SPREAD)) < FALSE_ALARM


# --- Horizontal ---

PAIRS = {
    "model, table": lambda: sd.HorizontalCascade(model, table(False), 2),
    "model, random": lambda: sd.HorizontalCascade(model, sd.RandomDrafter(V), 1),
    "model, model": lambda: sd.HorizontalCascade(model, sd.ModelDrafter(TARGET), 2),
    "lookup, model": lambda: sd.HorizontalCascade(sd.PromptLookupDrafter(1), model, 3),
    "lookup, table": lambda: sd.HorizontalCascade(sd.PromptLookupDrafter(2), table(False), 9),
    "vertical, table": lambda: sd.HorizontalCascade(sd.VerticalCascade(model, table(True), 1), table(False), 3),
}


@pytest.mark.parametrize("name", ["model, table", "model, model", "lookup, model"])
def test_greedy_output_is_that_of_plain_decoding(name):
    result = run(PAIRS[name]())
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    np.testing.assert_array_equal(result.lengths, plain().lengths)
    assert 0 < result.stats.accepted < result.stats.drafted
    if name == "model, table":
        assert result.stats.draft_calls < run(model).stats.draft_calls
    elif name == "model, model":  # the second is always right, also after what the first drafted
        stood = result.stats.accepted_by_position / result.stats.examined_by_position
        assert np.all(stood[:2] < 1) and np.all(stood[2:] == 1) and result.stats.examined_by_position[2] > 0


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "model, model"])
def test_every_position_has_the_law_of_its_drafter(name):
    """One-hot for what is not drawn; the kinds mixed or all point masses; the second fills in for a first that is silent."""
    wanted, drafter = np.full(B, 5, np.int32), PAIRS[name]()
    first, then = drafter.parts
    draft = first_draft(drafter, wanted)
    alone = first_draft(first, np.minimum(wanted, drafter.number))
    counts = alone.num_drafted
    if name == "lookup, table":
        assert isinstance(draft.law, PointMass)
    law = draft.law.law() if isinstance(draft.law, PointMass) else draft.law
    probs = np.exp(law.logits - law.log_normalizer[..., None])
    for row in range(B):
        np.testing.assert_array_equal(draft.tokens[row, : counts[row]], alone.tokens[row, : counts[row]])
        ids = draft.tokens[row, : draft.num_drafted[row]].tolist()
        assert len(ids) == 5
        for place, token in enumerate(ids):
            part = first if place < counts[row] else then
            part = part.parts[0] if isinstance(part, sd.VerticalCascade) else part
            if isinstance(part, sd.ModelDrafter):
                logits = teacher_forced(part.model, row, ids)[place]
                expected = shared_toy.adjusted_probs(allowed(logits), **FILTERS)
            elif isinstance(part, sd.RandomDrafter):
                expected = (np.arange(V) != 3) / (V - 1)
            else:
                expected = np.eye(V)[token]
            np.testing.assert_allclose(probs[row, place], expected, atol=1e-5)
            assert expected[token] > 0
    if name.startswith("lookup"):
        assert len(set(counts.tolist())) > 1, "or the second never fills in"


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
    """At one length and offset: the part of a draft that begins there, and an iteration that does; PITFALLS row 31."""
    state, _ = prepare(TARGET, INPUTS, drafter=model, gamma=3, sampling=SPREAD, max_new_tokens=LIMIT, key=KEY)
    offsets = np.tile(np.arange(200, dtype=np.int32), (B, 1))
    drawn = [
        np.asarray(speculative_draws.uniforms(keys, lengths, offsets, speculative_draws.DRAFT)).ravel()
        for lengths in (state.lengths, state.lengths + 1)
        for keys in (
            state.keys,
            drafting.keys_apart(state),
            drafting.keys_apart(state.replace(lengths=state.lengths + 1)),
        )
    ]
    for i, ours in enumerate(drawn):
        for theirs in drawn[:i]:
            assert scipy.stats.pearsonr(ours, theirs).pvalue > 1e-6 and not np.any(np.all(ours == theirs))


# --- What both have in common ---


@flax.struct.dataclass
class Observer(sd.Drafter):
    """Drafts nothing and counts what it is shown."""

    observes = True

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


@pytest.mark.parametrize("kind", ["horizontal", "vertical"])
def test_a_part_that_learns_is_shown_every_call(kind):
    drafter = {
        "horizontal": lambda: sd.HorizontalCascade(Observer(), model, 1),
        "vertical": lambda: sd.VerticalCascade(model, Observer(), 1),
    }[kind]()
    state, request = prepare(TARGET, INPUTS, drafter=drafter, gamma=3, max_new_tokens=LIMIT, eos_ids=())
    state = sd.advance(request.network, request.drafter, state, np.int32(99))
    np.testing.assert_array_equal(getattr(state.draft_state, "first" if kind == "horizontal" else "second"), LIMIT)


def test_an_early_exit_before_a_table():
    """The target's cache that the first part has written to reaches the target."""
    target = tiny_t5(0, V, decoder_layers=3)
    drafter = sd.HorizontalCascade(sd.EarlyExitDrafter(target, 2), table(False), 2)
    options = dict(max_new_tokens=LIMIT, eos_ids=(EOS,), decoder_prefix=PREFIXES)
    result, expected = (sd.generate(target, INPUTS, drafter=d, gamma=4, **options) for d in (drafter, None))
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    assert 0 < result.stats.accepted < result.stats.drafted
    with pytest.raises(ValueError, match="got an early exit of another model"):
        check_pair(TARGET, drafter)
    for make in (
        lambda: sd.HorizontalCascade(model, sd.EarlyExitDrafter(target, 1), 1),
        lambda: sd.VerticalCascade(model, drafter, 1),
    ):
        with pytest.raises(
            ValueError, match="(then|inner): got (EarlyExitDrafter|HorizontalCascade), expected a drafter that needs"
        ):
            make()


def test_bad_input():
    for switch in (0, 1.5, True, None):
        with pytest.raises(ValueError, match=f"switch: got {switch}, expected an integer of at least 1"):
            sd.HorizontalCascade(model, table(True), switch)
        with pytest.raises(ValueError, match=f"inner_gamma: got {switch}, expected an integer of at least 1"):
            sd.VerticalCascade(model, table(True), switch)
    with pytest.raises(ValueError, match="first: got None, expected a drafter"):
        sd.HorizontalCascade(None, model, 1)
    with pytest.raises(ValueError, match="inner: got 'lookup', expected a drafter"):
        sd.VerticalCascade(model, "lookup", 1)
    with pytest.raises(ValueError, match="model_drafter: got RandomDrafter, expected a ModelDrafter"):
        sd.VerticalCascade(sd.RandomDrafter(V), model, 1)
    words, others = HashModel(V, 0, vocabulary=Words()), sd.ModelDrafter(HashModel(V, 1, vocabulary=Words(1)))
    for drafter in (sd.HorizontalCascade(model, others, 1), sd.VerticalCascade(others, table(True), 1)):
        with pytest.raises(ValueError, match="drafter: got a vocabulary of 16 pieces that differs"):
            sd.generate(words, [[3]], drafter=drafter)


def test_benchmark_predicts_nothing_for_a_cascade(monkeypatch):
    target, small = tiny_t5(0, V), tiny_t5(1, V, decoder_layers=1)
    small.name = "small"
    drafter = sd.VerticalCascade(sd.ModelDrafter(small), sd.PromptLookupDrafter(2), 2)
    steps = dict.fromkeys(["target step", "products", "verify 3", "bare verify 3", "target encoder 8"], lambda: None)
    monkeypatch.setattr(analysis_benchmark, "_step_arms", lambda *_: steps)
    options = benchmark_command.BenchmarkOptions(
        target="target", drafter="small", gamma=(3,), max_new_tokens=8, repeats=1
    )
    record, problems = analysis_benchmark.benchmark(target, drafter, arms.cut(INPUTS[:1], INPUTS[:1], 1, 0), options)
    assert problems == [] and record["drafter"] == {"name": "small over prompt lookup (2)"}
    (arm,) = record["speculative"]
    assert record["cost_ratio"] is None and arm["predicted"] is None and arm["stats"]["draft_calls"] > 0
    text = summaries.benchmark_summary(record)
    assert "draft step     not timed" in text and "drafted for each; no prediction" in text
    combined = sd.HorizontalCascade(drafter, table(False), 2)
    assert combined.name == "small over prompt lookup (2), then 2-gram table (from 2)"
