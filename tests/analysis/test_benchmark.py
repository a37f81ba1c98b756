"""The benchmark: its arithmetic on numbers made up, its checks on a tiny random pair."""

import dataclasses
import json
import re

import benchmark_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_models import CONFIG
from sample_records import parse
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import matmul_roofline, near_ties, predictions, step_loops, timing, traces
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.report import rows, summaries
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.variants import Workload
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.decoding import generate as decoding_generate
from specdec_jax.decoding.trace import TraceStep
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models import families, weight_layouts
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative import distributions, iteration
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.randomness import gumbel_noise
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.state import Draft

pytestmark = pytest.mark.usefixtures("quick")

target, options = benchmark_models.target, benchmark_models.options
batches, measured = benchmark_models.batches, benchmark_models.measured
TIMES = {
    name: Spread(seconds, seconds, seconds)
    for name, seconds in {
        "products": 0.9,
        "target step": 1.0,
        "verify 3": 1.2,
        "draft step": 0.1,
        "target encoder 8": 2.0,
        "drafter encoder 8": 0.5,
        "draft 3 and verify": 1.5,
        "bare verify 3": 1.08,
        "bare draft step": 0.045,
    }.items()
}


def test_batches_are_sorted_and_filled_up(batches, options):
    assert [batch.ids for batch in batches] == [[[3, 1], [5, 9, 1]], [[7, 8, 9, 1], []]]
    assert [batch.numbers for batch in batches] == [[2, 0], [1, 1]]
    key = jax.random.key(options.seed)
    for batch in batches:  # an input's key is its own, wherever sorting puts it
        expected = [
            jax.random.key_data(jax.random.fold_in(key, number)).tolist()
            for number in batch.numbers
        ]
        assert jax.random.key_data(batch.keys).tolist() == expected


def test_record(measured):
    record, problems = measured
    assert problems == []
    assert json.loads(json.dumps(record))["speculative"] == record["speculative"]
    (row,) = rows.list_rows(parse(record))
    assert (row.target, row.gamma, row.improvement.median) == (
        "target",
        3,
        record["speculative"][0]["improvement"]["median"],
    )
    (variant,) = record["speculative"]
    assert variant["stats"]["acceptance_rate"] == 1
    assert variant["stats"]["examined_by_position"] == variant["stats"]["accepted_by_position"]
    assert (
        variant["tokens"]
        == record["plain"]["tokens"]
        == variant["stats"]["target_calls"] * variant["stats"]["tokens_per_target_call"]
    )
    assert record["sentences"] == 3
    assert variant["differences"] == []
    assert record["cost_ratio"] > 0 and record["verify_cost"]["3"] > 0
    assert (
        variant["improvement"]["least"]
        <= variant["improvement"]["median"]
        <= variant["improvement"]["most"]
    )
    shares = variant["shares"]
    assert shares is None or sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
    assert set(variant["parts"]) == {
        "target encoder",
        "drafter encoder",
        "draft steps",
        "target calls",
    }
    (verdict,) = record["verdicts"]
    assert (verdict["best"], verdict["next"], verdict["improvement"]) == (
        "gamma 3",
        None,
        variant["improvement"],
    )
    assert {"jax", "flax", "cores", "processor", "kernel"} <= set(record["machine"])
    assert record["target"]["parameters"] == record["drafter"]["parameters"] > 0


def test_summary_shows_the_record(measured):
    record, _ = measured
    text = summaries.benchmark_summary(record)
    assert (
        text.startswith("drafting ")
        and "\ntokens are equal to plain decoding's for all 3 inputs\n" in text
    )
    assert f"{record['plain']['tokens']} tokens" in text
    bare = record["bare"]
    assert bare["cost_ratio"] > 0 and set(bare["verify_cost"]) == {"3"} == set(
        record["verify_cost"]
    )
    assert "alpha 1.000" in text and "v(4) = " in text and "bare products" in text
    assert f"c = {record['cost_ratio']:.3f} ({bare['cost_ratio']:.3f} of bare products)" in text
    assert (
        f"v(4) = {record['verify_cost']['3']:.3f} ({bare['verify_cost']['3']:.3f} of bare products)"
        in text
    )


def corrupt(monkeypatch, change):
    """Makes speculative results differ: `change(result)` gives the new one."""
    real = decoding_generate.generate

    def generate(*args, drafter=None, **kwargs):
        result = real(*args, drafter=drafter, **kwargs)
        return result if drafter is None else change(result)

    monkeypatch.setattr(analysis_variants, "generate", generate)


def test_wrong_tokens_are_reported(monkeypatch, target, batches, options):
    def change(result):
        tokens = result.tokens.copy()
        tokens[0, 1] = (tokens[0, 1] + 1) % CONFIG.vocab_size
        return result._replace(tokens=tokens)

    corrupt(monkeypatch, change)
    record, problems = analysis_benchmark.benchmark(
        Workload(target, ModelDrafter(target), batches, dataclasses.replace(options, repeats=1))
    )
    listed = record["speculative"][0]["differences"]
    # The first row of each batch: by their places in the input, not among the sorted.
    assert [(item["input"], item["position"], item["near_tie"]) for item in listed] == [
        (1, 1, False),
        (2, 1, False),
    ]
    assert "got other tokens than plain decoding for sentences 2, 3" in problems[0]
    text = summaries.benchmark_summary(record)
    assert "not a near-tie" in text
    assert (
        "tokens differ from plain decoding's for 2 of 3 inputs, not all of them near-ties" in text
    )


def test_missing_outputs_are_reported(monkeypatch, target, batches, options):
    corrupt(monkeypatch, lambda result: result._replace(lengths=result.lengths * 0))
    _, problems = analysis_benchmark.benchmark(
        Workload(target, ModelDrafter(target), batches, dataclasses.replace(options, repeats=1))
    )
    assert problems == ["gamma 3: got no output for 3 inputs, expected one as in plain decoding"]


def test_difference_knows_ties(target):
    how = near_ties.measure_difference(target, [5, 9, 1], [0, 4, 4, 7, 2], width=4, batch=2)
    logits = np.asarray(target.logits([[5, 9, 1]], [[0, 4, 4, 7, 2]]))[0, -1]
    second, first = np.sort(logits)[-2:]
    assert how.margin == pytest.approx(first - second, abs=1e-5)
    assert 0 <= how.noise < 1e-4 < how.margin and not how.near_tie
    assert near_ties.Difference(margin=1e-6, noise=1e-6).near_tie


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(repetition_penalty=1.7, forbidden_tokens=(4,)),
        SamplingConfig(temperature=0.7, repetition_penalty=1.7),
        SamplingConfig(temperature=1.0, top_k=3),
    ],
)
def test_difference_is_of_what_the_choice_is_made_by(target, sampling):
    """Of each chosen token: its score over the next, by the logits of single calls."""
    given, key = [5, 9, 1], jax.random.key(3)
    keys = jax.random.split(key, 1)
    how = dict(sampling=sampling, max_new_tokens=6, eos_ids=(), key=keys, verifier="gumbel")
    new = sd.generate(target, [given], **how).tokens[0].tolist()
    for place, token in enumerate(new):
        prefix = [target.start_token, *new[:place]]
        logits = np.array(target.logits([given], [prefix]))[0, -1]
        seen = np.array(sorted(set(prefix)))
        penalty, own = sampling.repetition_penalty, logits[seen]
        logits[seen] = np.where(own > 0, own / penalty, own * penalty)
        logits[list(sampling.forbidden_tokens)] = -np.inf
        if sampling.top_k:
            logits[np.argsort(logits)[: -sampling.top_k]] = -np.inf
        if sampling.temperature:
            noise = gumbel_noise(keys, np.array([[len(prefix)]]), len(logits))
            logits = logits / sampling.temperature + np.asarray(noise)[0, 0]
        second, first = np.sort(logits)[-2:]
        found = near_ties.measure_difference(
            target, given, prefix, width=4, sampling=sampling, key=keys[0]
        )
        assert np.argmax(logits) == token
        assert found.margin == pytest.approx(first - second, abs=1e-4)
        assert 0 <= found.noise < 1e-3


def test_another_choice_in_a_wide_call_is_a_tie(monkeypatch, target):
    """At the edge of a filter the scores of both may be far apart."""
    real = distributions.standardize

    def standardize(logits, *others):  # another id is filtered out at each call
        calls.append(1)
        dist = real(logits, *others)
        best = jnp.argmax(dist.logits, axis=-1, keepdims=True)
        wrong = (jnp.arange(logits.shape[-1]) == best) & (len(calls) == 1)
        return dist._replace(logits=jnp.where(wrong, -jnp.inf, dist.logits))

    calls = []
    monkeypatch.setattr(distributions, "standardize", standardize)
    warm = SamplingConfig(temperature=1e-3)  # so that the noise decides nothing
    found = near_ties.measure_difference(
        target, [5, 9, 1], [0, 4], 4, sampling=warm, key=jax.random.key(0)
    )
    assert len(calls) == 2 and found.margin == 0 and found.near_tie


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_products_are_those_of_one_step(tied, packed):
    """Count the weights of one step by hand."""
    config = dataclasses.replace(CONFIG, logits_via_embedding=tied)
    network = LanguageModel.random(config).network
    weights, axes = matmul_roofline.Products.from_network(network, packed)
    inner = config.num_heads * config.head_dim
    layer = (
        6 * config.emb_dim * inner + 3 * config.emb_dim * config.mlp_dim
    )  # q, k, v, out; cross q, out; wi_0, wi_1, wo
    head = config.vocab_size * config.emb_dim
    assert (
        sum(np.prod(weight_layouts.weight_shape(weight)) for weight in weights)
        == config.num_decoder_layers * layer + head
    )
    assert sum(axes) == (tied and not network.backend.packs_weights)  # whose tied heads are copies


@pytest.mark.skipif(not native.is_available(), reason=native.describe_state())
def test_both_layouts_of_the_products_are_timed(monkeypatch):
    config = CONFIG
    variants = matmul_roofline.products_variants(LanguageModel.random(config).network, batch=1)
    assert list(variants) == ["products", "products, checkpoint's layout"]
    assert float(variants["products"]()) == pytest.approx(
        float(variants["products, checkpoint's layout"]()), rel=1e-3
    )
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    assert list(
        matmul_roofline.products_variants(LanguageModel.random(config).network, batch=1)
    ) == ["products"]


def test_bare_products_of_calls_and_drafts(target):
    """The products are those of γ + 1 rows per row, with the drafter's own weights."""
    variants = matmul_roofline.bare_variants(target, ModelDrafter(target), 2, (1, 3))
    assert {name: variant.args[1].shape[0] for name, variant in variants.items()} == {
        "bare verify 1": 4,
        "bare verify 3": 8,
        "bare draft step": 2,
    }
    assert all(float(variant()) > 0 for variant in variants.values())
    assert list(
        matmul_roofline.bare_variants(target, ModelDrafter(target, int8=True), 1, (2,))
    ) == ["bare verify 2"]
    assert list(matmul_roofline.bare_variants(target, None, 1, (2,))) == ["bare verify 2"]


def test_bare_products_multiply():
    weights = [jax.numpy.ones((4, 3)), jax.numpy.ones((5, 2))]
    x = jax.numpy.arange(4.0)[None]
    assert float(matmul_roofline.bare_products(weights, x, axes=(0, 1), steps=2)) == pytest.approx(
        1e-9
    )


def test_cost_counts_encoders_calls_and_drafts():
    work = [
        predictions.Work(8, calls=3, draft_calls=7),
        predictions.Work(8, calls=1, draft_calls=3),
    ]
    assert predictions.predict_cost(work, 3, TIMES) == pytest.approx(
        {"target encoder": 4.0, "drafter encoder": 1.0, "draft steps": 1.0, "target calls": 4.8}
    )
    assert sum(
        predictions.predict_cost([predictions.Work(8, calls=5)], 0, TIMES).values()
    ) == pytest.approx(2 + 5)


@pytest.mark.slow
def test_every_drafter_with_a_model_of_its_own_has_a_timed_encoder():
    """Also one without single draft steps, such as the better of two drafters."""
    target, model = tiny_t5(0, 16), tiny_t5(1, 16)
    parallel, lookup = sd.ParallelDrafter(model), sd.PromptLookupDrafter()
    shape = timing.CallShape(2, 5, 12)
    for drafter in (sd.ModelDrafter(model), parallel, sd.BestOf(lookup, parallel)):
        variants = timing.encoder_variants(target, drafter, (4, 5), shape)
        assert {f"drafter encoder {length}" for length in (4, 5)} < set(variants)
        assert jax.tree.leaves(variants["drafter encoder 4"]())
    for drafter in (None, lookup, sd.SelfDrafter(target)):
        variants = timing.encoder_variants(target, drafter, (4, 5), shape)
        assert list(variants) == ["target encoder 4", "target encoder 5"]


def test_one_call_for_all_tokens_is_no_draft_step(batches, options):
    """Of γ draft steps it would be predicted to cost γ times as much as it does."""
    target, drafter = tiny_t5(0, 16), sd.ParallelDrafter(tiny_t5(1, 16))
    names = timing.step_variants(target, drafter, [4], timing.CallShape(1, 4, 12), [2], [2])
    assert not [name for name in names if name.startswith("draft ")]
    workload = Workload(target, drafter, batches, options)
    record, _ = analysis_benchmark.benchmark(workload, {})
    assert record["cost_ratio"] is None and record["drafter"]["name"] == drafter.name
    for variant in record["speculative"]:
        assert variant["stats"]["draft_calls"] <= variant["stats"]["target_calls"]
        assert variant["predicted"] is None and variant["shares"] is None
    summaries.benchmark_summary(record)


def test_calls_without_a_draft_cost_a_step():
    """Prompt lookup often finds nothing: the call is then over one position."""
    work = [
        predictions.Work(8, calls=4, draft_calls=0, drafting=0.25),
        predictions.Work(8, calls=6, draft_calls=0),
    ]
    without = {name: spread for name, spread in TIMES.items() if "draft" not in name}
    result = predictions.predict_cost(work, 3, without)
    assert result["target calls"] == pytest.approx(3 * 1.0 + 1 * 1.2 + 6 * 1.2)
    assert (
        predictions.mean_drafting(work) == pytest.approx((1 + 6) / 10)
        and predictions.mean_drafting([]) == 1
    )
    predicted = predictions.predict_improvements(3, 0.1, without, [8], [np.array([8])], work[:1])
    assert predicted["verify_cost"] == pytest.approx(1.2)
    tokens = 1 + 0.1 + 0.1**2 + 0.1**3
    assert predicted["with_verify_cost"] == pytest.approx(tokens / (1 + 0.25 * 0.2))
    assert predicted["with_counts"] == pytest.approx((2 + 8) / (2 + 3 * 1.0 + 1.2))


def test_shares_add_up_or_are_left_out(measured):
    """Steps that add up to more than the whole have no shares: the machine's speed changed."""
    parts = {"draft steps": 1.0, "target calls": 2.0}
    assert predictions.cost_shares(parts, 4.0) == {
        "draft steps": 0.25,
        "target calls": 0.5,
        "rest": 0.25,
    }
    assert predictions.cost_shares(parts, 2.9) is None
    record = json.loads(json.dumps(measured[0]))
    variant = record["speculative"][0]
    variant |= {
        "shares": None,
        "limiting_term": None,
        "parts": {"draft steps": 3 * variant["seconds"]["median"]},
    }
    text = summaries.benchmark_summary(record)
    assert (
        "time in parts: unknown, since single steps come to 300% of the time" in text
        and "rest" not in text
    )
    variant |= {"shares": {"draft steps": 0.75, "rest": 0.25}, "limiting_term": "draft steps"}
    assert (
        "  time in draft steps 75%, rest 25%; most of it: draft steps\n"
        in summaries.benchmark_summary(record)
    )


def test_there_is_no_verdict_where_nothing_was_drafted(measured):
    record = json.loads(json.dumps(measured[0]))
    record["speculative"][0]["stats"]["drafted"] = 0
    message = "no verdict: drafter drafted nothing; try a model as the drafter\n"
    record["drafter"]["name"] = "drafter"
    assert summaries.benchmark_summary(record).startswith(message)
    record |= {"verdicts": [], "speculative": []}
    assert summaries.benchmark_summary(record).startswith(
        "no verdict: --synthetic_alpha times whole decodes\n"
    )
    record["options"]["preset"] = "tiny"
    assert summaries.benchmark_summary(record).startswith(
        "no verdict: of random weights only steps are timed; --s"
    )
    record["drafter"] = None
    assert "plain decoding alone was timed\n" in summaries.benchmark_summary(record)


@pytest.mark.parametrize("catches_up", [False, True])
def test_spans_are_the_calls_of_the_iterations(catches_up):
    times = TIMES | ({"draft pair": Spread(0.15, 0.15, 0.15)} if catches_up else {})
    steps = [
        TraceStep([5, 6, 7], None, 8, gamma=3, entropies=None),
        TraceStep([5], 6, 9, gamma=2, entropies=None),
        TraceStep([], None, 1, gamma=0, entropies=None),
    ]
    draft, call = [("draft step", pytest.approx(0.1))], [("target call", 1.2)]
    first = (
        [("draft step", pytest.approx(0.15))] if catches_up else draft
    )  # of the second draft, whose last was accepted
    expected = 3 * draft + call + first + draft + call + call
    assert traces.call_spans(steps, 3, 8, times)[2:] == expected
    assert traces.call_spans(steps, 3, 8, times)[:2] == [
        ("target encoder", 2.0),
        ("drafter encoder", 0.5),
    ]
    assert traces.call_spans(steps[2:], 0, 8, times) == [
        ("target encoder", 2.0),
        ("target call", 1.0),
    ]
    without = {name: spread for name, spread in TIMES.items() if "draft" not in name}
    assert traces.call_spans(steps[:1], 3, 8, without) == [
        ("target encoder", 2.0),
        ("target call", 1.2),
    ]


def test_a_draft_step_costs_what_it_costs_between_target_calls():
    assert predictions.draft_seconds(3, TIMES) == pytest.approx(0.1)
    cold, noise = (TIMES | {"draft 3 and verify": Spread(pair, pair, pair)} for pair in (1.8, 1.1))
    assert predictions.draft_seconds(3, cold) == pytest.approx(0.2)
    assert predictions.draft_seconds(3, noise) == 0.1, "no less than alone"


def test_predictions():
    lengths = [np.array([8]), np.array([4])]
    counted = [predictions.Work(8, 2, 6), predictions.Work(8, 1, 3)]
    predicted = predictions.predict_improvements(3, 1.0, TIMES, [8, 8], lengths, counted)
    assert predicted["cost_ratio"] == pytest.approx(0.1) and predicted[
        "verify_cost"
    ] == pytest.approx(1.2)
    assert predicted["theorem_3_8"] == pytest.approx(4 / 1.3)
    assert predicted["with_verify_cost"] == pytest.approx(4 / 1.5)
    # Plain: 2 encoders and 12 steps. Speculative: 2·(2 + 0.5) and 3 iterations of 3 drafts and a
    # verify call.
    assert (
        predicted["with_lengths"] == predicted["with_counts"] == pytest.approx(16 / (5 + 3 * 1.5))
    )


def test_rotation_gives_every_variant_every_place():
    turns = [timing.rotate({"a": 0, "b": 0, "c": 0}, turn) for turn in range(3)]
    assert [sorted(place) for place in zip(*turns, strict=True)] == [["a", "b", "c"]] * 3


def test_preset_times_shapes_with_random_weights(monkeypatch):
    monkeypatch.setitem(families.PRESETS, "tiny", CONFIG)
    options = benchmark_command.BenchmarkOptions(
        preset="tiny",
        drafter_preset="tiny",
        gamma=(3,),
        max_new_tokens=12,
        repeats=1,
        input_length=5,
        batch_size=2,
    )
    options.check()
    record, problems = analysis_benchmark.benchmark(benchmark_command.load(options))
    assert problems == [] and record["speculative"] == []  # α of random weights would mean nothing
    assert record["plain"]["tokens"] == 24  # no EOS: full length
    assert (
        record["step_over_products"] > 0
        and record["plain_over_products"] > 0
        and set(record["verify_cost"]) == {"3"}
    )


@pytest.mark.slow
def test_preset_without_a_drafter_measures_calls_and_the_cost_of_sampling(monkeypatch):
    monkeypatch.setitem(families.PRESETS, "tiny", CONFIG)
    options = benchmark_command.BenchmarkOptions(
        preset="tiny", gamma=(3,), max_new_tokens=6, repeats=2, input_length=5, temperature=0.7
    )
    options.check()
    record, problems = analysis_benchmark.benchmark(benchmark_command.load(options))
    assert problems == [] and record["drafter"] is None and set(record["verify_cost"]) == {"3"}
    assert set(record["sampling_cost"]) == {"3"}
    for added in record["sampling_cost"].values():
        assert set(added) == {"argmax", "token", "block", "gumbel"}
        assert all(
            -1 < share["least"] <= share["median"] <= share["most"] for share in added.values()
        )
    text = summaries.benchmark_summary(json.loads(json.dumps(record)))
    assert "added to a target call over 4 positions by: argmax " in text and "gumbel " in text


def test_sampling_cost_is_the_share_added_pass_by_pass():
    seconds = {
        "call 3, alone": [1.0, 2.0],
        "call 3, token": [1.1, 2.4],
        "call 33, token": [9.0, 9.0],
        "verify 3": [5.0, 5.0],
    }
    cost = predictions.sampling_cost(3, seconds)
    assert set(cost) == {"token"} and cost["token"] == pytest.approx(
        {"median": 0.15, "least": 0.1, "most": 0.2}
    )


SAMPLED = [*timing.SAMPLED, "argmax"]


def verified_state(network, verifier, gamma=2):
    config = SamplingConfig(temperature=0.0 if verifier == "argmax" else 0.7)
    name = "token" if verifier == "argmax" else verifier
    return timing.verified_state(network, timing.CallShape(2, 5, 12), gamma, config, name)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", SAMPLED)
def test_the_timed_verification_is_the_engines(target, verifier):
    """Step by step: the token after the accepted ones is fed next; keys depend on their number."""
    network, state = target.network, verified_state(target.network, verifier)
    tokens, accepted, cache = np.ones((2, 3), np.int32), np.zeros(2, np.int32), state.target_cache
    dist = Categorical.from_logits(jax.numpy.zeros((2, 3, network.vocab_size)))
    verify = jax.jit(iteration.verify)
    for _ in range(3):
        logits, cache = near_ties._decode(network, tokens, state.lengths - 1, cache)
        before = dist and Categorical(dist.logits[:, :-1], dist.log_normalizer[:, :-1])
        draft = Draft(tokens[:, 1:], np.full(2, 2, np.int32), before, np.zeros(2, np.int32))
        (accepted, following), dist = verify(
            state.replace(lengths=state.lengths + accepted), draft, logits
        )
        tokens = np.where(
            np.arange(3) == np.asarray(accepted)[:, None], np.asarray(following)[:, None], tokens
        )
    ours = step_loops.verified_steps(network, state, steps=3)
    np.testing.assert_array_equal(ours[0], tokens)
    np.testing.assert_array_equal(ours[1], accepted)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", SAMPLED)
def test_the_timed_verification_stays_in_its_loop(verifier, optimised):
    """Nothing of the vocabulary's width (97) is computed outside of the loop for its body.

    Whole numbers may be: the random generator's counters are the same in every step, here and in
    the engine's loop.
    """
    network = LanguageModel.random(dataclasses.replace(CONFIG, vocab_size=97)).network
    text = (
        step_loops.verified_steps.lower(network, verified_state(network, verifier), steps=3)
        .compile(optimised)
        .as_text()
    )
    wide = re.compile(r"^ +%\S+ = f32\[[\d,]*\b97\].*/while/body", re.MULTILINE)
    inside, outside = text.split("\nENTRY")
    assert wide.search(inside) and not wide.search(outside)


def test_a_call_alone_computes_all_logits(target):
    network = target.network
    state = verified_state(network, "argmax")
    tokens, logits = step_loops.call_steps(
        network, np.ones((2, 3), np.int32), state.lengths - 1, state.target_cache, steps=1
    )
    expected, _ = near_ties._decode(
        network, np.ones((2, 3), np.int32), state.lengths - 1, state.target_cache
    )
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    again, _ = step_loops.call_steps(
        network, np.ones((2, 3), np.int32), state.lengths - 1, state.target_cache, steps=2
    )
    assert np.any(np.asarray(tokens) != 1) and np.any(
        np.asarray(tokens) != np.asarray(again)
    )  # each step feeds the next
