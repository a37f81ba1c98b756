"""The benchmark: its arithmetic on numbers made up, its checks on a tiny random pair."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from specdec_jax import benchmark, measure, records
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.measure import Spread
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.t5 import T5Config

CONFIG = T5Config(48, 16, 2, 8, 1, 1, 24)
TIMES = {
    name: Spread(seconds, seconds, seconds)
    for name, seconds in {
        "products": 0.9, "target step": 1.0, "verify 3": 1.2, "draft step": 0.1, "target encoder 8": 2.0,
        "drafter encoder 8": 0.5,
    }.items()
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return LanguageModel.random(CONFIG, seed=0, name="target")


@pytest.fixture(scope="module")
def options() -> benchmark.BenchmarkOptions:
    return benchmark.BenchmarkOptions(
        target="target", drafter="drafter", gamma=(3,), max_new_tokens=12, repeats=2, batch_size=2
    )


@pytest.fixture(scope="module")
def batches(options) -> list[benchmark.Batch]:
    ids = [[5, 9, 1], [7, 8, 9, 1], [3, 1]]
    return benchmark._batches(ids, ids, options, [])


@pytest.fixture(scope="module")
def measured(target, options, batches):
    """Drafter = target: everything is accepted."""
    return benchmark.benchmark(target, ModelDrafter(target), batches, options)


def test_batches_are_filled_up(batches):
    assert [len(batch.ids) for batch in batches] == [2, 2]
    assert batches[1].ids == [[3, 1], []]
    assert [batch.keys.shape for batch in batches] == [(2,), (2,)]


def test_record(measured):
    record, problems = measured
    assert problems == []
    assert json.loads(json.dumps(record))["speculative"] == record["speculative"]
    (arm,) = record["speculative"]
    assert arm["stats"]["acceptance_rate"] == 1
    assert arm["stats"]["examined_by_position"] == arm["stats"]["accepted_by_position"]
    assert (
        arm["tokens"]
        == record["plain"]["tokens"]
        == arm["stats"]["target_calls"] * arm["stats"]["tokens_per_target_call"]
    )
    assert record["sentences"] == 3
    assert arm["differences"] == []
    assert record["cost_ratio"] > 0 and record["verify_cost"]["3"] > 0
    assert arm["improvement"]["least"] <= arm["improvement"]["median"] <= arm["improvement"]["most"]
    assert sum(arm["shares"].values()) == pytest.approx(1)
    assert {"jax", "flax", "cores", "processor"} <= set(record["machine"])
    assert record["target"]["parameters"] == record["drafter"]["parameters"] > 0


def test_summary_says_what_the_record_says(measured):
    record, _ = measured
    text = records.summary(record)
    assert f"{record['plain']['tokens']} tokens" in text
    assert "alpha 1.000" in text and "v(4) = " in text and "bare products" in text


def corrupt(monkeypatch, change):
    """Makes speculative results differ: `change(result)` gives the new one."""
    real = benchmark.generate

    def generate(*args, drafter=None, **kwargs):
        result = real(*args, drafter=drafter, **kwargs)
        return result if drafter is None else change(result)

    monkeypatch.setattr(benchmark, "generate", generate)


def test_wrong_tokens_are_reported(monkeypatch, target, batches, options):
    def change(result):
        tokens = result.tokens.copy()
        tokens[0, 1] = (tokens[0, 1] + 1) % CONFIG.vocab_size
        return result._replace(tokens=tokens)

    corrupt(monkeypatch, change)
    record, problems = benchmark.benchmark(
        target, ModelDrafter(target), batches, dataclasses.replace(options, repeats=1)
    )
    listed = record["speculative"][0]["differences"]
    assert [(item["input"], item["position"], item["near_tie"]) for item in listed] == [(0, 1, False), (2, 1, False)]
    assert "got other tokens than plain decoding for inputs [0, 2]" in problems[0]
    assert "not a near-tie" in records.summary(record)


def test_missing_outputs_are_reported(monkeypatch, target, batches, options):
    corrupt(monkeypatch, lambda result: result._replace(lengths=result.lengths * 0))
    _, problems = benchmark.benchmark(target, ModelDrafter(target), batches, dataclasses.replace(options, repeats=1))
    assert problems == ["gamma 3: got no output for 3 inputs that plain decoding has one for"]


def test_difference_knows_ties(target):
    how = measure.difference(target.network, [5, 9, 1], [0, 4, 4, 7, 2], width=4, batch=2)
    logits = np.asarray(target.logits([[5, 9, 1]], [[0, 4, 4, 7, 2]]))[0, -1]
    second, first = np.sort(logits)[-2:]
    assert how.margin == pytest.approx(first - second, abs=1e-5)
    assert 0 <= how.noise < 1e-4 < how.margin and not how.near_tie
    assert measure.Difference(margin=1e-6, noise=1e-6).near_tie


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_products_are_those_of_one_step(tied, packed):
    """Count the weights of one step by hand."""
    config = dataclasses.replace(CONFIG, logits_via_embedding=tied)
    kernels, axes = measure.Products.of(LanguageModel.random(config).network, packed)
    inner = config.num_heads * config.head_dim
    layer = (
        6 * config.emb_dim * inner + 3 * config.emb_dim * config.mlp_dim
    )  # q, k, v, out; cross q, out; wi_0, wi_1, wo
    head = config.vocab_size * config.emb_dim
    assert sum(kernel.size for kernel in kernels) == config.num_decoder_layers * layer + head
    assert sum(axes) == tied


def test_both_layouts_of_the_products_are_timed():
    config = dataclasses.replace(CONFIG, mlp_dim=64)  # wide enough for panels, on a CPU in float32
    arms = measure.products_arms(LanguageModel.random(config).network, batch=1)
    assert list(arms) == ["products", "products, checkpoint's layout"]
    assert float(arms["products"]()) == pytest.approx(float(arms["products, checkpoint's layout"]()), rel=1e-3)


def test_bare_products_multiply():
    kernels = [jax.numpy.ones((4, 3)), jax.numpy.ones((5, 2))]
    x = jax.numpy.arange(4.0)[None]
    assert float(measure.bare_products(kernels, x, axes=(0, 1), steps=2)) == pytest.approx(1e-9)


def test_cost_counts_encoders_calls_and_drafts():
    work = [records.Work(8, calls=3, draft_calls=7), records.Work(8, calls=1, draft_calls=3)]
    assert records.cost(work, 3, TIMES) == pytest.approx(
        {"target encoder": 4.0, "drafter encoder": 1.0, "draft steps": 1.0, "target calls": 4.8}
    )
    assert sum(records.cost([records.Work(8, calls=5)], 0, TIMES).values()) == pytest.approx(2 + 5)


def test_predictions():
    lengths = [np.array([8]), np.array([4])]
    counted = [records.Work(8, 2, 6), records.Work(8, 1, 3)]
    predicted = records.predictions(3, 1.0, TIMES, [8, 8], lengths, counted)
    assert predicted["cost_ratio"] == pytest.approx(0.1) and predicted["verify_cost"] == pytest.approx(1.2)
    assert predicted["theorem_3_8"] == pytest.approx(4 / 1.3)
    assert predicted["with_verify_cost"] == pytest.approx(4 / 1.5)
    # Plain: 2 encoders and 12 steps. Speculative: 2·(2 + 0.5) and 3 iterations of 3 drafts and a verify call.
    assert predicted["with_lengths"] == predicted["with_counts"] == pytest.approx(16 / (5 + 3 * 1.5))


def test_rotation_gives_every_arm_every_place():
    turns = [measure.rotated({"a": 0, "b": 0, "c": 0}, turn) for turn in range(3)]
    assert [sorted(place) for place in zip(*turns, strict=True)] == [["a", "b", "c"]] * 3


def test_preset_times_shapes_with_random_weights(monkeypatch):
    monkeypatch.setitem(benchmark.PRESETS, "tiny", CONFIG)
    options = benchmark.BenchmarkOptions(
        preset="tiny", drafter_preset="tiny", gamma=(3,), max_new_tokens=12, repeats=1, input_length=5, batch_size=2
    )
    options.check()
    record, problems = benchmark.benchmark(*benchmark._preset(options), options)
    assert problems == [] and record["speculative"] == []  # α of random weights would mean nothing
    assert record["plain"]["tokens"] == 24  # no EOS: full length
    assert (
        record["step_over_products"] > 0 and record["plain_over_products"] > 0 and set(record["verify_cost"]) == {"3"}
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": None}, "target: got nothing"),
        ({"gamma": ()}, "gamma: got no value"),
        ({"gamma": (3, 0)}, "gamma: got 0, expected at least 1"),
        ({"gamma": (-1,)}, "gamma: got -1"),
        ({"repeats": 0}, "repeats: got 0"),
        ({"preset": "t5_1_1/huge", "target": None}, "preset: got 't5_1_1/huge', expected one of"),
        ({"preset": "t5_1_1/small"}, "expected one or the other"),
        ({"drafter_preset": "t5_1_1/small"}, "expected --preset too"),
        ({"output": "no/such/folder/record.json"}, "output: got 'no/such/folder/record.json'"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(benchmark.BenchmarkOptions(target="target"), **settings).check()
