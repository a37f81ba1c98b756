"""Tests `specdec benchmark --num_beams` on a tiny random pair."""

import dataclasses
import json
import pathlib

import benchmark_models
import jax
import numpy as np
import pytest
from benchmark_models import CONFIG
from sample_records import parse

import specdec_jax as sd
from specdec_jax.analysis import beams as analysis_beams
from specdec_jax.analysis import comparison, near_ties
from specdec_jax.analysis.report import (
    page,
    plots,
    records,
    rows,
    summaries,
)
from specdec_jax.analysis.variants import Variant, Workload
from specdec_jax.commands import benchmark as benchmark_command

pytestmark = pytest.mark.usefixtures("quick")

target, batches = benchmark_models.target, benchmark_models.batches


@pytest.fixture(scope="module")
def options() -> benchmark_command.BenchmarkOptions:
    return benchmark_command.BenchmarkOptions(
        target="target",
        drafter="drafter",
        gamma=(2,),
        num_beams=2,
        beam_width=(2, 40),
        max_new_tokens=8,
        repeats=2,
        batch_size=2,
    )


def another(target, batches, change=lambda result: result) -> Variant:
    """Another implementation, which gives what ours gives but for `change`."""
    return Variant(
        0, lambda batch: change(sd.generate(target, batch.inputs, num_beams=2, max_new_tokens=8))
    )


@pytest.fixture(scope="module")
def measured(target, options, batches):
    """Drafter = target; what "t5x" decodes is ours."""
    others = {"t5x": another(target, batches)}
    record, problems = analysis_beams.benchmark_beams(
        Workload(target, sd.ModelDrafter(target), batches, options), others
    )
    return json.loads(json.dumps(record)), problems


@pytest.mark.slow
def test_record(measured, target, batches):
    record, problems = measured
    assert problems == []
    assert isinstance(parse(record), records.BeamRecord) and record["length_penalty"] == 0.6
    narrow, wide = record["searches"]
    assert [(variant["gamma"], variant["width"]) for variant in (narrow, wide)] == [(2, 2), (2, 40)]
    results = [
        sd.generate(target, batch.inputs, num_beams=2, max_new_tokens=8) for batch in batches
    ]
    steps = sum(result.stats.target_calls for result in results)
    plain = record["plain"]["stats"]
    assert plain["target_calls"] == plain["steps"] == steps and plain["steps_per_target_call"] == 1
    assert record["plain"]["tokens"] == sum(result.lengths.sum() for result in results)
    for variant in (narrow, wide):
        stats = variant["stats"]
        assert stats["steps"] == steps and variant["differences"] == []
        assert (
            stats["steps_per_target_call"]
            == steps / stats["target_calls"]
            == pytest.approx(1 / variant["calls_over_plain"])
        )
        assert (
            variant["improvement"]["least"]
            <= variant["improvement"]["median"]
            <= variant["improvement"]["most"]
        )
    # The target's own tree has every active beam, even as narrow as there are beams: but for the
    # last, three steps a call.
    assert narrow["calls_over_plain"] < 0.5 and wide["calls_over_plain"] < 0.5
    assert record["greedy"]["improvement"]["median"] > 0 and record["sentences"] == 3
    assert record["against"]["improvement"].keys() == {
        "plain",
        "gamma 2, width 2",
        "gamma 2, width 40",
    }


def test_levels_are_by_default_those_of_generate(target, batches):
    result = sd.generate(
        target, batches[0].inputs, drafter=sd.ModelDrafter(target), num_beams=2, max_new_tokens=8
    )
    searched = benchmark_command.BenchmarkOptions(num_beams=2)
    decoded = benchmark_command.BenchmarkOptions()
    assert searched.gammas == result.stats.examined_by_position.shape == (
        3,
    ) and decoded.gammas == (4,)


def test_summary_shows_the_record(measured):
    record, _ = measured
    text = summaries.benchmark_summary(record)
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert (
        "2 beams in the form of t5x, length penalty 0.6" in text
        and "3 inputs, batch 2, 2 passes" in text
    )
    assert f"{1e3 * record['plain']['seconds']['median'] / 3:.2f}" in lines["plain"]
    wide = record["searches"][1]
    for number in (wide["improvement"]["most"], wide["improvement"]["least"]):
        assert f"{number:.3f}" in lines["gamma 2, width 40"]
    assert (
        f"{wide['stats']['steps_per_target_call']:.2f}    {wide['calls_over_plain']:.2f}"
        in lines["gamma 2, width 40"]
    )
    assert lines["gamma 2, width 40"].endswith("3 of 3") and lines["t5x"].endswith("3 of 3")
    assert f"{1 / record['against']['improvement']['plain']['median']:.3f} (" in lines["t5x"]
    assert "\ntokens are equal to plain beam search's for all 3 inputs\n" in text
    assert f"makes {record['plain']['stats']['target_calls']} calls of the target" in text


def test_figures_draw_the_record(measured):
    record, _ = measured
    row = rows.list_rows(parse(record))[1]
    assert (row.gamma, row.verifier, row.alpha, row.differ) == (2, "2 beams, u = 40", None, 0)
    assert row.tokens_per_call == record["searches"][1]["stats"]["steps_per_target_call"]
    text = page.report([(pathlib.Path("beams.json"), parse(record))])
    assert "Improvement over plain beam search" in text and text.count("2 beams, u = 40") >= 3
    assert "Time of t5x&#39;s own decoding over ours" in text
    axes = plots.draw_wall_time(record).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "T5X",
        "plain beam search",
        "greedy",
        "γ = 2, u = 2",
        "γ = 2, u = 40",
    ]
    widths = [
        1e3 * record[name]["seconds"]["median"] / 3 for name in ("against", "plain", "greedy")
    ]
    assert [bar.get_width() for bar in axes.patches][:3] == pytest.approx(widths)
    broken = record | {"searches": [{**record["searches"][0], "width": "wide"}]}
    with pytest.raises(ValueError, match=r"searches.0.width: got 'wide', expected a valid integer"):
        parse(broken)


def test_wrong_tokens_are_reported(target, batches, options):
    def change(result):
        tokens = result.tokens.copy()
        tokens[0, 1] = (tokens[0, 1] + 1) % CONFIG.vocab_size
        return result._replace(tokens=tokens)

    once = dataclasses.replace(options, repeats=1, drafter=None, beam_width=())
    others = {"t5x": another(target, batches, change)}
    record, problems = analysis_beams.benchmark_beams(Workload(target, None, batches, once), others)
    assert record["searches"] == [] and record["drafter"] is None
    actual = record["against"]["differences"]
    assert [(item["input"], item["position"], item["near_tie"]) for item in actual] == [
        (1, 1, False),
        (2, 1, False),
    ]
    assert problems == [
        "t5x: got other tokens than plain decoding for sentences 2, 3, expected the same but for "
        "near-ties"
    ]
    text = summaries.benchmark_summary(record)
    assert (
        "t5x differs from plain: sentence 2, token 1, not a near-tie (margin " in text
        and "1 of 3" in text
    )
    near = record["against"] | {"differences": [item | {"margin": 1e-6} for item in actual]}
    assert comparison.find_problems(near, "float32", analysis_beams.MARGIN) == []


def test_margin_of_a_search(target):
    """Of one step of one beam: the two numbers next to each other among the best three."""
    how = dict(num_beams=1, max_new_tokens=1)
    logits = np.asarray(jax.nn.log_softmax(target.logits([[5, 9, 1]], [[0]])[0, 0]))
    expected = np.min(-np.diff(np.sort(logits)[::-1][:3]))
    assert near_ties.search_margin(target, [5, 9, 1], how) == pytest.approx(expected, abs=1e-5)
    longer = near_ties.search_margin(target, [5, 9, 1], dict(num_beams=2, max_new_tokens=8))
    assert (
        0 < longer < near_ties.search_margin(target, [5, 9, 1], dict(num_beams=2, max_new_tokens=1))
    )


def test_margin_of_a_tie(target):
    """Of a model to which all tokens are the same."""
    flat = sd.LanguageModel(CONFIG, jax.tree.map(np.zeros_like, target.params))
    assert near_ties.search_margin(flat, [5, 9, 1], dict(num_beams=2, max_new_tokens=3)) == 0


def test_prints_and_writes(monkeypatch, capsys, tmp_path, target, batches, options):
    file = tmp_path / "record.json"
    asked = dataclasses.replace(options, repeats=1, beam_width=(2,), output=str(file))
    monkeypatch.setattr(
        benchmark_command,
        "load",
        lambda options: Workload(target, sd.ModelDrafter(target), batches, options),
    )
    benchmark_command.run(asked)
    record = json.loads(file.read_text())
    assert records.read_records(str(file)) == [parse(record)]
    assert capsys.readouterr().out == summaries.benchmark_summary(record) + "\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 0}, "num_beams: got 0, expected an integer from 1"),
        ({"num_beams": None}, r"beam_width: got 2 without num_beams"),
        (
            {"num_beams": None, "beam_width": (), "length_penalty": 1.0},
            "length_penalty: got 1.0 without num_beams",
        ),
        ({"beam_width": (4, 1)}, "beam_width: got 1, expected an integer from 2"),
        ({"drafter": None}, r"beam_width: got \(2, 40\) for plain beam search, expected a drafter"),
        ({"temperature": 0.5}, "temperature: got 0.5 with num_beams, expected 0.0"),
        ({"verifier": "token"}, "verifier: got 'token' with num_beams, expected block"),
        (
            {"gamma_policy": "heuristic"},
            "gamma_policy: got 'heuristic' with num_beams, expected fixed",
        ),
        ({"synthetic_alpha": (0.5,)}, "synthetic_alpha: got .* with num_beams, expected none"),
        ({"beam_style": "t6x"}, "beam_style: got 't6x', expected one of t5x, huggingface"),
        ({"early_stopping": "true"}, "early_stopping: got True with beam_style 't5x'"),
        ({"early_stopping": "maybe"}, "early_stopping: got 'maybe', expected one of"),
        (
            {"against": "t5x", "beam_style": "huggingface"},
            "against: got 't5x' with beam_style='huggingface'",
        ),
        (
            {
                "preset": "t5_1_1/small",
                "target": None,
                "drafter": None,
                "drafter_preset": "t5_1_1/small",
                "beam_width": (),
            },
            "num_beams: got 2 with --preset and a drafter",
        ),
    ],
)
def test_rejects(options, settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(options, **settings).check()


def test_a_drafter_that_drafts_no_trees_is_rejected_before_anything_is_timed(
    monkeypatch, target, batches, options
):
    monkeypatch.setattr(
        analysis_beams.analysis_variants, "warm_up", lambda *_: pytest.fail("timed")
    )
    for drafter, message in (
        (sd.RandomDrafter(CONFIG.vocab_size), "drafter: got RandomDrafter with num_beams"),
        (sd.PromptLookupDrafter(), "beam_width: got 40 with PromptLookupDrafter, expected 2"),
    ):
        with pytest.raises(ValueError, match=message):
            analysis_beams.benchmark_beams(Workload(target, drafter, batches, options))


def test_widths_that_are_not_given_are_the_drafters(target, batches, options):
    def widths(drafter, *wanted):
        return [
            tree.width
            for tree in analysis_beams.beam_choices(
                Workload(target, drafter, batches, options), (3,), wanted
            )
        ]

    assert widths(sd.ModelDrafter(target), None) == [0, 4] and widths(
        sd.PromptLookupDrafter(), None
    ) == [0, 2]
    assert widths(sd.ModelDrafter(target), 2, None) == [0, 2, 4]
    assert widths(sd.PromptLookupDrafter(), 2, None) == [0, 2] and widths(None, None) == [0]


def test_the_suite_of_the_paper_has_no_beams(options, tmp_path):
    from specdec_jax.commands import suite

    asked = dataclasses.replace(options, suite="paper", output=str(tmp_path / "paper.jsonl"))
    with pytest.raises(ValueError, match="num_beams: got 2 with suite='paper'"):
        suite.list_rows(asked)
