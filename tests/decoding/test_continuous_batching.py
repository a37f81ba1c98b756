"""Continuous batching: refilled rows give what `generate` gives, and none of them waits."""

import functools

import jax
import numpy as np
import pytest
import tiers
from toy_models import HashModel, Words, compilations, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import native
from specdec_jax.decoding import batch_rows, continuous_batching, inputs
from specdec_jax.decoding.continuous_batching import decode_all, may_wait
from specdec_jax.decoding.results import read_state

pytestmark = pytest.mark.usefixtures("quick")

V, N, LIMIT = 12, 19, 9
TARGET = HashModel(V, 0, vocabulary=Words())
DRAFT = sd.ModelDrafter(HashModel(V, 1, likeness=0.5, vocabulary=Words()))
RNG = np.random.default_rng(0)
INPUTS = [RNG.integers(2, V, length).tolist() for length in [0, *RNG.integers(1, 9, N - 1)]]
LONGER = [ids * (1 + number % 3) for number, ids in enumerate(INPUTS)]  # of three padded lengths
LIMITS = RNG.integers(1, LIMIT, N).tolist()
WARM = sd.SamplingConfig(temperature=1.0)

slow = pytest.mark.slow
CASES = {
    "argmax, own limits, several widths": dict(
        inputs=LONGER, drafter=DRAFT, gamma=3, max_new_tokens=LIMITS
    ),
    "block, adaptive γ, own filters and prefixes": dict(
        drafter=DRAFT,
        gamma=sd.CostAware(4, acceptance=[0.3 + n % 2 / 2 for n in range(N)]),
        sampling=sd.SamplingConfig(
            temperature=[n % 3 / 2 for n in range(N)], forbidden_tokens=(4,)
        ),
        decoder_prefix=[[3] * (n % 3) for n in range(N)],
    ),
    "token, copies, samples, stop strings, prefixes with them": dict(
        drafter=sd.PromptLookupDrafter(),
        gamma=2,
        sampling=WARM,
        verifier="token",
        num_samples=2,
        stop=["w5", "w7 w2"],
        decoder_prefix=[[5, 3][: n % 3] for n in range(N)],
        eos_ids=(1,),
        max_new_tokens=30,  # past the first look at texts
    ),
    "gumbel, own γ": dict(
        drafter=DRAFT, gamma=[n % 4 for n in range(N)], sampling=WARM, verifier="gumbel"
    ),
    "lenient, a drafter that learns": dict(
        drafter=sd.AssistedNGramDrafter(),
        gamma=2,
        sampling=WARM,
        verifier="lenient",
        lenience=[0.2 + n % 2 / 2 for n in range(N)],
    ),
    "plain": dict(sampling=WARM),
    "a tree, own budgets, samples, stop strings, prefixes": dict(
        drafter=DRAFT,
        tree=sd.Tree.uniform((2, 2)),
        gamma=[1 + n % 6 for n in range(N)],
        sampling=WARM,
        num_samples=2,
        stop=["w5", "w7 w2"],
        decoder_prefix=[[5, 3][: n % 3] for n in range(N)],
        max_new_tokens=30,
    ),
    "a tree by the drafter's distribution, own temperatures": dict(
        drafter=DRAFT,
        tree=sd.DynamicTree(2, 3, 8),
        sampling=sd.SamplingConfig(
            temperature=[n % 3 / 2 for n in range(N)], repetition_penalty=1.2
        ),
    ),
}
QUICK = [*list(CASES)[:3], list(CASES)[-2]]
FIRST, _, STOPS, _ = QUICK


def options_of(name: str) -> dict:
    return (
        dict(inputs=INPUTS, max_new_tokens=LIMIT, key=jax.random.key(3), eos_ids=(1, 8))
        | CASES[name]
    )


def assert_same(found, expected):
    """Everything equal; log-probabilities up to the rounding of another number of rows."""
    for one, other in zip(found, expected, strict=True):
        assert one._replace(log_probs=[], adjusted_log_probs=[], stats=None) == other._replace(
            log_probs=[], adjusted_log_probs=[], stats=None
        )
        for name in ("log_probs", "adjusted_log_probs"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-5)
        for a, b in zip(one.stats, other.stats, strict=True):
            np.testing.assert_array_equal(a, b)


@functools.cache
def expected(name: str) -> list[continuous_batching.Output]:
    """What `generate` gives for all inputs at once."""
    return continuous_batching._collect_outputs(sd.generate(TARGET, **options_of(name)))


def stream(name: str, **changes) -> list[continuous_batching.Output]:
    found = dict(sd.decode_stream(TARGET, **options_of(name) | changes))
    assert sorted(found) == list(range(N))
    return [output for number in range(N) for output in found[number]]


@pytest.mark.parametrize(
    "name",
    [name if name in (FIRST, STOPS) else pytest.param(name, marks=slow) for name in CASES],
)
def test_refilled_rows_give_what_generate_gives(name):
    assert_same(stream(name, batch_size=3), expected(name))
    reasons = {output.finish_reason for output in expected(name)}
    assert {"eos", "empty"} < reasons and ("stop" in reasons) == ("stop" in options_of(name))


@pytest.mark.parametrize("size", [8, pytest.param(1, marks=slow), pytest.param(40, marks=slow)])
def test_the_number_of_rows_changes_nothing(size):
    assert_same(stream(FIRST, batch_size=size), expected(FIRST))


@tiers.parametrize("name", [FIRST, STOPS], first=1)
def test_batches_give_the_same(name):
    assert_same(stream(name, batch_size=4, refill=False), expected(name))


def test_what_is_skipped_is_missing_and_nothing_else_changes():
    for size, refill in ((3, True), (4, False)):
        skip = {0, 3, 4, 11, 18}
        found = dict(
            sd.decode_stream(TARGET, batch_size=size, refill=refill, skip=skip, **options_of(FIRST))
        )
        assert set(found) == set(range(N)) - skip
        assert_same(
            [output for number in sorted(found) for output in found[number]],
            [output for number, output in enumerate(expected(FIRST)) if number not in skip],
        )


def test_nothing_compiles_after_the_first_time():
    stream(FIRST, batch_size=3)
    again = dict(inputs=[[2 + (i + 1) % 9 for i in ids] for ids in LONGER], key=jax.random.key(8))
    assert compilations(lambda: stream(FIRST, batch_size=3, **again)) == 0


def test_no_row_waits_for_the_slowest(monkeypatch):
    """As many iterations as all rows' calls divide into, but for the last rows.

    Batches need more.
    """
    iterations = {}
    advance = sd.advance

    def counting(network, drafter, state, *limits):
        before = np.array(state.counts.target_calls)
        after = advance(network, drafter, state, *limits)
        made = int(np.max(np.array(after.counts.target_calls) - before))
        iterations["refilled"] = iterations.get("refilled", 0) + made
        return after

    monkeypatch.setattr(continuous_batching, "advance", counting)
    options = options_of("plain") | dict(
        max_new_tokens=[30 if n % 4 == 0 else 2 for n in range(N)], eos_ids=()
    )
    refilled = dict(sd.decode_stream(TARGET, batch_size=4, **options))
    calls = np.array([refilled[number][0].stats.target_calls for number in range(N)])
    assert sorted(set(calls)) == [0, 2, 30]
    order = np.argsort([len(ids) for ids in INPUTS], kind="stable")
    batches = sum(calls[order[i : i + 4]].max() for i in range(0, N, 4))
    assert calls.sum() / 4 <= iterations["refilled"] <= calls.sum() / 4 + 30 < batches


@pytest.mark.parametrize(
    "name, longest, refills, ahead",
    [
        ("plain", 40, True, True),
        ("plain", 40, True, False),
        ("plain", 12, False, False),
        *(pytest.param(name, 60, True, True, marks=slow) for name in CASES),
        *(
            pytest.param(name, 60, False, False, marks=slow)
            for name in list(CASES)
            if name != "plain"
        ),
    ],
)
def test_rows_wait_where_that_is_cheap_until_they_wait_long(
    monkeypatch, name, longest, refills, ahead
):
    """The longest inputs are decoded first, whole batches of them, and outputs do not change."""
    monkeypatch.setattr(continuous_batching, "may_wait", lambda plan: True)
    sizes, start = [], batch_rows._start_rows

    def started(plan, numbers, *more):
        sizes.append(len(numbers))
        return start(plan, numbers, *more)

    monkeypatch.setattr(batch_rows, "_start_rows", started)
    monkeypatch.setattr(batch_rows, "_LEAST_AHEAD", 2)
    monkeypatch.setattr(batch_rows, "LEAST", 1)
    if not ahead:  # as if a batch took much memory
        monkeypatch.setattr(batch_rows, "_MOST_AHEAD", 0)
    if name != "plain":
        monkeypatch.setattr(batch_rows, "_WORTH", 1 if refills else 1000)
    limits = [longest if number % 4 == 0 else 2 for number in range(N)]
    options = options_of(name) | dict(max_new_tokens=limits, eos_ids=())

    def decode(**more) -> dict[int, list[list[int]]]:
        outputs = sd.decode_stream(TARGET, batch_size=4, **options | more)
        return {number: [row.tokens for row in rows] for number, rows in outputs}

    found = decode()
    few = (
        [4, 4] + [2] * 6 if ahead else [4] + [2] * 8
    )  # the next batch is prefilled behind the first
    assert sizes == (few if refills else [4] * 5) or name != "plain"
    # Of several padded lengths, whose queues are short, no rows are refilled.
    assert sizes[0] == 4 and (2 in sizes) == (refills and "widths" not in name)
    expected = decode(refill=True)
    assert found == expected and len(found) == N
    rest = decode(skip={*range(0, N, 2)})
    assert rest == {number: expected[number] for number in range(1, N, 2)}


def test_rows_wait_with_the_kernels_of_a_cpu_alone():
    plan = continuous_batching.plan_decoding(tiny_t5(0), [[3, 1]])
    assert may_wait(plan) == plan.network.skips_padding == native.is_available()


def test_a_job_with_a_deadline_is_decoded_in_batches(monkeypatch):
    monkeypatch.setattr(continuous_batching, "_decode_queues", None)
    found = stream("plain", batch_size=4, deadline=1e6)
    assert_same(found, stream("plain", batch_size=4, refill=False))


def test_samples_do_not_depend_on_what_is_prefilled_together(monkeypatch):
    """Every input draws from the key of its number, in whatever part of the job it comes."""

    def decode():
        job = dict(inputs=INPUTS[1:7], batch_size=1, seed=3, sampling=WARM, max_new_tokens=LIMIT)
        return [output.tokens for output in decode_all(TARGET, eos_ids=(1, 8), **job)]

    together = decode()
    monkeypatch.setattr(continuous_batching, "_WINDOW", 2)
    assert decode() == together


@pytest.mark.parametrize(
    ["given", "expected"],
    [
        (dict(key=jax.random.key(1)), "none, but seed"),
        (dict(decoder_prefix=[[3]] * N), "none, but inputs"),
        (dict(input_lengths=[1] * N), "none, but inputs"),
    ],
)
def test_outputs_in_order_take_no_data_of_single_inputs(given, expected):
    with pytest.raises(sd.UnsupportedCombination, match=f"^{[*given][0]}: got .*{expected}"):
        next(decode_all(TARGET, INPUTS, batch_size=1, seed=0, **given))


def test_queues_hold_every_input_once():
    rng = np.random.default_rng(1)
    for size in (1, 3, 8):
        for count in (1, 7, 60, 400):
            lengths = rng.geometric(0.08, count).tolist()
            found = continuous_batching.make_queues(lengths, size)
            assert sorted(place for _, places in found for place in places) == list(range(count))
            assert [width for width, _ in found] == sorted(
                {width for width, _ in found}, reverse=True
            )
            for width, places in found:
                assert (
                    max(lengths[place] for place in places)
                    <= width
                    == inputs.bucket_length(max(lengths[p] for p in places))
                )
            assert all(len(places) >= 4 * size for _, places in found[:-1])
            assert len(found) == 1 or len(found[-1][1]) >= size
            whole = continuous_batching.make_batches(lengths, size)
            assert sorted(place for _, places in whole for place in places) == [
                *range(len(lengths))
            ]
            assert sum(-(-len(places) // size) for _, places in whole) == -(-len(lengths) // size)
            assert (
                all(
                    width == inputs.bucket_length(max(lengths[place] for place in places))
                    for width, places in whole
                )
                and [width for width, _ in whole] == sorted({width for width, _ in whole})[::-1]
            )
    # One short input alone would leave all rows but one idle.
    found = continuous_batching.make_queues([100] * 12 + [1], 3)
    assert found == [(inputs.bucket_length(100), [*range(13)])]


BAD = [
    (dict(batch_size=0), "batch_size: got 0, expected an integer of at least 1"),
    (dict(batch_size=1.5), "batch_size: got 1.5"),
    (dict(deadline=2.0, refill=True), "deadline: got 2.0 with refill=True, expected refill=False"),
    (dict(num_beams=2, refill=True, sampling=None), "num_beams: got beams with refill=True, exp"),
    (dict(inputs=[]), "inputs: got 0 inputs, expected at least 1"),
    (dict(inputs=[[3]] * 18 + [[4] * 9], max_input_length=8), "input 18: got 9 tokens"),
    (dict(max_new_tokens=[3, 4]), "max_new_tokens: got 2 values, expected one or 19"),
    (dict(sampling=sd.SamplingConfig(top_k=[3, 4])), "top_k: got 2 values, expected one or 19"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_rejected_at_the_call(change, message):
    def call():
        with pytest.raises(ValueError, match=message):
            sd.decode_stream(TARGET, **options_of("plain") | change)

    assert compilations(call) == 0


@pytest.mark.parametrize("rows", (None, [2]))
def test_what_was_read_outlives_the_state(rows):
    state, _ = sd.prepare(TARGET, INPUTS[1:4], max_new_tokens=5)
    kept = read_state(state, rows)
    before = jax.tree.map(np.copy, kept)
    sd.advance(TARGET.network, None, state, np.int32(3))
    jax.tree.map(np.testing.assert_array_equal, kept, before)


def test_what_is_wrong_with_a_late_input_is_told_before_the_first_output():
    """Here a prompt leaves fewer tokens than `min_new_tokens`, behind the first 64 batches."""
    fields = dict(emb_dim=8, num_heads=2, num_decoder_layers=1, mlp_dim=8, num_positions=32)
    target = sd.LanguageModel.random(sd.GPTConfig(vocab_size=V, **fields), 0)
    inputs = [[2, 3]] * 70 + [[2] * 9]
    config = sd.GenerationConfig(
        sampling=sd.SamplingConfig(min_new_tokens=4),
        generation_config=sd.ModelDefaults(max_length=12),
    )
    with pytest.raises(sd.UnsupportedCombination, match="min_new_tokens: got 4, expected at most"):
        next(decode_all(target, inputs, config=config, batch_size=1, seed=0))
    assert next(decode_all(target, inputs[:-1], config=config, batch_size=1, seed=0)).tokens


def test_seed_zero_is_a_seed_like_others():
    """And not taken for none."""

    def draw(seed):
        outputs = decode_all(
            TARGET, INPUTS[1:5], sampling=WARM, max_new_tokens=8, batch_size=2, seed=seed
        )
        return [output.tokens for output in outputs]

    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), np.arange(4))
    result = sd.generate(TARGET, INPUTS[1:5], sampling=WARM, max_new_tokens=8, key=keys)
    rows = [row[:length].tolist() for row, length in zip(result.tokens, result.lengths)]
    assert draw(0) == rows != draw(1)


def test_the_number_of_a_late_input_is_that_of_the_job():
    target = tiny_t5(0)
    inputs = [[2, 3]] * 70 + [[2] * 9]
    with pytest.raises(ValueError, match="input 70: got 9 tokens"):
        next(decode_all(target, inputs, max_input_length=8, batch_size=1, seed=0))
