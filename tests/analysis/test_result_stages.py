"""Tests the stages of `scripts/results.py` on toy models: known outputs, rows, cells."""

import gzip
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from toy_models import tiny_t5

from specdec_jax.analysis.variants import Variant
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.generate import generate
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.sampling import SamplingConfig
from tools.accelerator_figures import ReportSetup
from tools.results import (
    cases,
    copying,
    elsewhere,
    encoders,
    large,
    limits,
    loading,
    rounding_stages,
    rules,
    shapes,
    starting,
    templates,
    whole_files,
)
from tools.results.cases import AUTO, Case, add_over_fixed, format_speed, load_target, time_cases
from tools.results.shortfalls import list_shortfalls
from tools.results.stage import Settings, Skipped
from tools.results.stages import STAGES
from tools.results.texts import read_sentences, read_texts, require_pairs

pytestmark = pytest.mark.usefixtures("quick")
GAIN = {"median": 2.5, "least": 2.0, "most": 3.0}


@pytest.mark.slow
def test_an_output_is_forced_and_a_copying_drafter_sees_it():
    model = tiny_t5(0)
    inputs = [[5, 9, 7, 11, 8, 6, 1], [7, 5, 6, 9, 12, 10, 1]]
    outputs = [[5, 9, 7, 13, 8, 6, 1], [7, 5, 6, 9, 12, 10, 1]]
    each = copying.force_outputs(outputs)
    for number, output in enumerate(outputs):
        how = dict(max_new_tokens=8, generation_config=None, **each(number))
        assert generate(model, [inputs[number]], gamma=0, **how).tokens[0, :7].tolist() == output
    cases = copying.make_cases(outputs, {"lookup": (PromptLookupDrafter, 4)})
    rows = time_cases(cases, inputs, 1, lambda form: model, new_tokens=8)
    assert rows["plain"]["alpha"] is None and rows["plain"]["tokens_per_call"] == 1
    assert rows["lookup"]["differing"] == 0 and rows["lookup"]["tokens_per_call"] > 1.5
    assert "2 sentences" in format_speed(rows["plain"])


def test_a_draft_that_is_verified_as_a_whole_has_no_alpha():
    model, drafter = tiny_t5(0), ModelDrafter(tiny_t5(1))
    sampling = SamplingConfig(temperature=1.0)
    ways = {"plain": Case("none", None, {"sampling": sampling})} | {
        name: cases.drafts(2, drafter=lambda: drafter, sampling=sampling, verifier=name)
        for name in ("token", "block")
    }
    rows = time_cases(ways, [[5, 9, 7, 1]], 1, lambda form: model, new_tokens=8)
    assert [rows[name]["alpha"] is None for name in ways] == [True, False, True]
    row = rows["block"] | {"tokens_per_call": 1.5}
    assert "α" not in format_speed(row) and ", 1.50 tokens a call, " in format_speed(row)
    assert cases.format_brief(row).endswith("; 1.50")
    options = {"sampling": sampling, "generation_config": None, "max_new_tokens": 8, "gamma": 2}
    for verifier, rated in ("token", True), ("block", False):
        how = options | {"drafter": drafter, "verifier": verifier}
        outputs = list(decode_all(model, [[5, 9, 7, 1]], batch_size=1, seed=0, **how))
        found = templates.describe_job(outputs, outputs, np.ones(1), np.ones(1))
        assert (found["alpha"] is not None) == rated


def test_another_library_takes_its_turn_and_counts_nothing():
    model = tiny_t5(0)
    plain = dict(gamma=0, max_new_tokens=8, generation_config=None)

    def decode(batch):
        return generate(model, batch.inputs, **plain)._replace(stats=None)

    others = {"another": Variant(0, decode)}
    rows = time_cases({"plain": Case("none")}, [[5, 9, 1]], 1, lambda form: model, 8, others)
    assert rows["another"]["alpha"] is None and rows["another"]["differing"] == 0
    assert rows["another"]["tokens_per_call"] == 1 and rows["another"]["improvement"]["median"] > 0


@pytest.mark.seqio
def test_t5x_takes_its_turn():
    pytest.importorskip("t5x", reason="T5X is not installed", exc_type=ImportError)
    model = tiny_t5(0)
    others = shapes.make_t5x("T5X", model)
    rows = time_cases(
        {"plain": Case("none")}, [[5, 9, 7, 1]], 1, lambda form: model, shapes.NEW_TOKENS, others
    )
    assert rows["T5X"]["differing"] == 0


@pytest.mark.slow
def test_models_of_8_bits_are_decoded_in_turn(monkeypatch):
    config = tiny_t5(0).config
    monkeypatch.setattr(large, "make_shape", lambda preset: config)
    monkeypatch.setattr(large, "GAMMAS", (2,))
    monkeypatch.setattr(large, "make_random", lambda preset: tiny_t5(1))
    monkeypatch.setattr(large.peers, "make_decoder", lambda *of: {"another": len})
    found = large.measure_size("toy", Settings(None, quick=True))
    assert found["toy steps"]["`w8a8`, call over 3 positions"]["over_plain"] > 0
    rows = found["toy rows"]
    assert list(rows)[:2] == ["plain, int8", "γ = 2, int8, accepted with α = 0.75"]
    assert rows["γ = 2, `w8a8`, accepted with α = 0.75"]["tokens_per_call"] > 1.5
    assert rows["another"]["tokens_per_call"] == 1


@pytest.mark.parametrize("percent", copying.CHANGED)
def test_a_share_of_words_is_changed(percent):
    words = [str(number) for number in range(40)]
    changed = copying.change_words(words, percent, 3)
    differing = sum(a != b for a, b in zip(words, changed, strict=True))
    assert differing == max(1, round(40 * percent / 100)) and set(changed) <= set(words)
    assert changed == copying.change_words(words, percent, 3)


def test_texts_are_those_that_are_there(tmp_path):
    (tmp_path / "ende").mkdir()
    with gzip.open(tmp_path / "ende/test.tsv.gz", "wt", encoding="utf-8") as file:
        file.write(
            "= A title =\tx\nOne two three four.\tEins\nToo short\ty\nFive six seven\tSechs\n"
        )
    settings = Settings(str(tmp_path), True)
    assert require_pairs(settings, "ende", 9, words=3) == [
        ("One two three", "Eins"),
        ("Five six seven", "Sechs"),
    ]
    assert read_texts(settings, ("ende", "wiki_pe"), 1) == {"ende": ["One two three four."]}
    assert list(read_texts(Settings(None, True), ("ende",), 2)) == ["sentences"]
    with gzip.open(tmp_path / "ende/test.tsv.gz", "at", encoding="utf-8") as file:
        file.write("The cat sat on the mat. " * 9)
    (cut,) = read_sentences(settings, ("ende",), 9)["ende"]
    assert bucket_length(len(load_target("none").vocabulary.encode(cut)) + 1) == 24
    settings = settings._replace(quick=False)
    assert read_sentences(settings, ("ende",), 1) == {"ende": ["One two three four."]}
    sources = read_texts(settings, ("ende",), 9)["ende"]
    (alike,) = read_sentences(settings, ("ende",), 9, alike=True).values()
    assert alike == sources[:2] and len(sources) == 3  # the long one has another padded length
    with pytest.raises(Skipped, match="wiki_pe/test"):
        require_pairs(settings, "wiki_pe", 9)


def test_cells():
    step, whole = {"ms": 31.25, "over_plain": 1.25}, {"improvement": GAIN, "tokens_per_call": 3.5}
    assert shapes.format_shape(step) == "31.2 ms, 1.25 plain iterations"
    text = "2.50 (2.00 to 3.00), 3.50 tokens a call, 20.0 ms a token"
    assert shapes.format_shape(whole | {"ms_per_token": 20.0}) == text
    row = {"ms": {"ours": 12.34, "a peer": 20.0}, "over_best": {**GAIN, "median": 0.62}}
    text = "ours 12.3 ms, 0.62 (2.00 to 3.00) of the best other; a peer 20.0 ms"
    assert encoders.format_encoders(row) == text
    alone = {"ms": {"ours": 12.34}, "temporary_mb": 50.6}
    assert encoders.format_encoders(alone) == "ours 12.3 ms and 51 MB"
    share = {"ms": 22.3, "rate": 124.4, "calculates": True, "share": GAIN}
    text = "22.30 ms, 124 thousand million operations a second, 2.50 of {} (2.00 to 3.00)"
    assert limits.format_limit(share) == text.format("NumPy's")
    assert limits.format_limit(share | {"of": "the products'"}) == text.format("the products'")
    counts = {"differing": 0, "outputs": 1200, "scores_that_differ": 3, "scores": 4000}
    text = "0 of 1,200 outputs, 3 of 4,000 log-probabilities"
    assert whole_files.format_bits(counts) == text
    found = {"logits_error": 0.0125, "tokens": 7, "kl": {}}
    row = rounding_stages.make_row("error of the logits", found)
    assert row["found"] == {"logits_error": 0.0125}
    assert rounding_stages.format_rounded(row) in ("1.2%", "1.3%")
    memory = {"needed_gb": 5.81, "memory_gb": 32, "fits": True, "iteration_ms": 2.0}
    text = elsewhere.format_tpu(memory | {"floor_ms": 2.7, "collectives": {"all-reduce": 73}})
    assert text == "5.8 of 32 GB, fits; 2.0 ms an iteration, its bytes 2.7; 73 collectives"
    assert elsewhere.format_tpu({"failed": "does not fit"}) == "does not fit"
    pair = memory | {"floor_ms": 1.8, "c": 0.125, "v": 1.02}
    rows = elsewhere.compare_with_plain({"plain": memory, "drafted": pair | {"iteration_ms": 3.0}})
    text = "5.8 of 32 GB, fits; 3.0 ms an iteration, its bytes 1.8; c 0.12, v 1.02; pays from 1.50"
    assert elsewhere.format_tpu(rows["drafted"]) == f"{text} tokens a call"
    row = {"dtype": "float32", "gb": 1.942, "local": {"seconds": 2.0, "peak": 1.056}}
    text = "1.94 GB in float32: peak 1.06 times that, 2.0 s"
    assert loading.format_loading(row) == text
    row["store"] = {"seconds": 9.0, "peak": 1.2}
    text += "; from the store 1.20, 9.0 s, 4.5 times as long"
    assert loading.format_loading(row) == text


def test_the_best_fixed_gamma_of_a_pass_is_told_by_the_other_passes():
    rows = {name: {} for name in ("plain", "γ = 2", "γ = 4", AUTO)}
    seconds = {"plain": [9, 9, 9], "γ = 2": [2, 2, 2], "γ = 4": [1, 3, 3], AUTO: [2, 2.5, 2]}
    add_over_fixed(rows, seconds)
    # γ = 4 was faster once, by luck: it is not what the other passes call the best.
    assert rows[AUTO]["over_fixed"] == {"median": 1.0, "least": 0.8, "most": 1.0}
    assert not any("over_fixed" in rows[name] for name in rows if name != AUTO)


def test_a_run_takes_an_hour_and_a_quick_one_minutes():
    assert sum(stage.minutes[1] or 0 for stage in STAGES.values()) <= 10
    assert sum(stage.minutes[0] for stage in STAGES.values() if not stage.once) <= 60
    assert all(stage.once for stage in STAGES.values() if not stage.timed)


def test_processes_are_timed_beside_the_first():
    commands = {
        name: [sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"]
        for name, seconds in (("short", 0), ("long", 0.5))
    }
    rows = starting.time_commands(commands, 2)
    assert rows["long"]["seconds"]["least"] > 0.5 and rows["short"]["beyond"]["most"] == 0
    assert 0.3 < rows["long"]["beyond"]["median"] < rows["long"]["seconds"]["most"]
    assert starting.format_start({"seconds": GAIN, "beyond": dict.fromkeys(GAIN, 0.0)}) == (
        "2.50 s (2.00 to 3.00)"
    )
    assert starting.format_start({"seconds": GAIN, "beyond": GAIN}).endswith(
        ", 2.50 beyond the first"
    )
    with pytest.raises(subprocess.CalledProcessError):
        starting.time_commands({"fails": [sys.executable, "-c", "raise SystemExit(1)"]}, 1)


def test_operations_of_a_file_are_those_of_each_input_and_each_new_token():
    config = tiny_t5(0).config
    one = limits.count_file(config, 1000, [[5, 6, 1]], [[7, 8, 9, 1]])
    assert one == limits.count_encoder(config, 3) + keys_and_values(config, 3) + 4 * 2000
    assert limits.count_file(config, 1000, [[5, 6, 1]] * 2, [[7, 1], [8, 1]]) == 2 * one - 4 * 2000


def keys_and_values(config, length):
    weights = 2 * config.emb_dim * config.num_heads * config.head_dim
    return config.num_decoder_layers * 2 * length * weights


@pytest.mark.slow
def test_automatic_gamma_takes_its_turn_where_rows_are_together(monkeypatch):
    target, drafter = tiny_t5(0), ModelDrafter(tiny_t5(1))
    monkeypatch.setattr(whole_files, "load_target", lambda form: target)
    monkeypatch.setattr(whole_files, "make_bundled", lambda: drafter)
    monkeypatch.setattr(whole_files, "encode", lambda *_: [[5, 9, 7, 1], [6, 4, 1]] * 20)
    found = whole_files.measure_auto(Settings(None, quick=True))
    assert list(found) == [f"sentences {f} {n}" for f in ("float32", "int8") for n in (8, 32)]
    for rows in found.values():
        assert list(rows) == ["plain", "γ = 2", "γ = 4", '`gamma="auto"`']
        assert {row["differing"] for row in rows.values()} == {0}


@pytest.mark.slow
def test_loads_are_measured_from_here_and_from_a_store():
    """A tiny shape's peak is not its weights', so only what is there is looked at."""
    fields = dict(num_encoder_layers=1, num_decoder_layers=1, vocab_size=64, emb_dim=16, mlp_dim=16)
    source = loading.T5._replace(fields=fields)
    rows = loading.measure_source(source, {"a": None, "b": "pytorch", "c": "t5x"})
    for row in rows.values():
        assert row["dtype"] == "float32" and row["local"]["seconds"] > 0
        assert ("store" in row) == (importlib.util.find_spec("gcsfs") is not None)
    assert len(rows) == 3 and len({row["gb"] for row in rows.values()}) == 1
    row = {"gb": 1.9, "local": {"peak": 1.3}, "store": {"peak": 1.1}}
    record = {"loading": {"rows": {"formats": {"a": row}}}}
    assert list_shortfalls(record) == {
        "loading: peak memory over the weights, of the worst format (asked: at most 1.2)": "1.30"
    }


@pytest.mark.slow
def test_the_report_of_an_accelerator_becomes_rows(load_script, monkeypatch):
    """In this process: another one would find the accelerator taken."""
    script = load_script("accelerator_report")
    monkeypatch.setitem(sys.modules, "accelerator_report", script)
    setup = ReportSetup(targets=("t5_1_1/xxl",), batches=(1, 8))
    about = {"milliseconds": {"median": 2.0, "least": 1.0, "most": 3.0}}

    def measure(stage, figures, threads, before):
        for one in figures:
            gain = {"improvement": 2.5} if "alpha" in one.name and "copy" in before else {}
            gain |= {"improvement": 0.5} if "T5X" in one.name else {}
            yield {"figure": one.name, **about, **gain}

    monkeypatch.setattr(script, "measure", measure)
    rows = elsewhere.measure_report(setup, beside=False)
    assert elsewhere.format_figure(rows["brief"]["α = 0.75, 1 row"]) == "2 ms, 2.50 times plain"
    assert rows["t5_1_1/xxl"]["plain, 1 row"] == {"milliseconds": 2.0}
    peers = elsewhere.measure_report(setup, beside=True)["t5_1_1/xxl"]
    assert elsewhere.format_figure(peers["T5X, plain"]) == "2 ms, 0.50 times plain"
    both = ["call over 1", "plain, 1 row", "α = 0.75, 1 row", "α = 0.9, 1 row"]
    assert [name for name in peers if name in rows["t5_1_1/xxl"]] == both
    assert {"self:int8, draft step", "transformers compiled, plain"} < peers.keys()
    for measure in (elsewhere.measure_accelerator, elsewhere.measure_accelerator_peers):
        with pytest.raises(Skipped, match="no accelerator"):
            measure(Settings(None, True))


def test_predictions_beside_a_measurement_have_a_cell():
    row = dict(improvement=GAIN, alpha=0.8, cost_ratio=0.05, verify_cost=1.1, theorem=2.7)
    row |= dict(with_v=2.5, with_lengths=2.4, oracle=4.0, operations=1.6)
    assert rules.format_expected(row) == (
        "2.50 (2.00 to 3.00); 2.70 by theorem 3.8 (α 0.80, c 0.05), 2.50 with v 1.10, "
        "2.40 with encoders and lengths; oracle 4.00; operations 1.60"
    )
    assert rules.format_expected({"hits": [0.5, 0.75]}) == "0.500, 0.750"


@pytest.mark.slow
def test_rules_and_predictions_are_measured_on_the_bundled_pair(monkeypatch):
    text = ["We asked for help.", "She was at home."]
    monkeypatch.setattr(rules, "read_sentences", lambda *_, **__: {"ende": text})
    monkeypatch.setattr(rules, "read_references", lambda *_: [[5, 9, 7, 1], [5, 9, 1]] * 4)
    monkeypatch.setattr(rules, "GAMMAS", (1, 2))
    found = rules.measure_verifiers(Settings(None, False))
    assert [name.split()[1] for name in found] == ["verifiers", "trees", "shortlists"]
    assert set(rules.VERIFIERS) < set(found["ende verifiers"])
    assert all(row["tokens_per_call"] >= 1 for table in found.values() for row in table.values())
    assert found["ende shortlists"]["all ids, γ = 4"]["differing"] == 0
    predicted = rules.measure_expected(Settings(None, False))
    for temperature in (0, 1):
        rows = predicted[f"ende T={temperature}"]
        assert list(rows) == ["γ = 1", "γ = 2"] and rows["γ = 2"]["theorem"] > 0.5
        hits = predicted[f"ende T={temperature} hits"]
        assert ("k − 1 of them and a drawn one" in hits) == (temperature == 1)
        assert np.all(np.diff(hits["the k most probable ids"]["hits"]) >= 0)
