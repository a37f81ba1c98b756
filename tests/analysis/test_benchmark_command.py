"""Tests `specdec benchmark`: progress, rejected options, and what survives a failure."""

import copy
import dataclasses
import functools
import io
import json
import re
import sys

import benchmark_models
import pytest
import rich.console
from benchmark_models import CONFIG
from sample_records import BENCHMARK

from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.report import summaries
from specdec_jax.analysis.variants import Workload
from specdec_jax.checkpoints import loader
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.decoding import generate as decoding_generate
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.files import progress
from specdec_jax.models import families
from specdec_jax.models.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("quick")

target, options = benchmark_models.target, benchmark_models.options
batches, measured = benchmark_models.batches, benchmark_models.measured


# What is shown and rejected.


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16")])
def test_dtype_of_a_preset_is_that_of_a_checkpoint(monkeypatch, capsys, platform, dtype):
    monkeypatch.setitem(families.PRESETS, "tiny", CONFIG)
    monkeypatch.setattr(loader.jax, "default_backend", lambda: platform)
    target = benchmark_command.load(benchmark_command.BenchmarkOptions(preset="tiny")).target
    assert target.config.dtype == dtype and dtype in capsys.readouterr().err


@pytest.mark.slow
def test_progress_of_every_part_is_shown(monkeypatch, target, batches, options):
    """On a terminal, also where standard output is one."""
    screen = io.StringIO()

    make = rich.console.Console

    def console(**_):
        return make(file=screen, force_terminal=True, width=100)

    monkeypatch.setattr(rich.console, "Console", console)
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    analysis_benchmark.benchmark(
        Workload(target, ModelDrafter(target), batches, dataclasses.replace(options, repeats=1))
    )
    bars = re.split(r"[\r\n]", re.sub(r"\x1b\[[\d?;]*\w", "", screen.getvalue()))
    for what in (
        "compiling",
        "compiling steps",
        "timing steps, pass 1 of 1, step",
        "timing, pass 1 of 1, call",
    ):
        assert any(re.search(rf"\b(\d+) of \1\b.*: {what}", bar) for bar in bars), what
    before = screen.getvalue()
    assert (
        list(progress.track([1, 2], 2, "sentences", quiet=True)) == [1, 2]
        and screen.getvalue() == before
    )


@pytest.mark.slow
def test_lossy_verifier_in_the_speculative_variant(batches, target):
    """With lenience near 0 whatever is drafted is accepted; plain decoding knows nothing of it."""
    drafter = ModelDrafter(LanguageModel.random(CONFIG, seed=1))
    options = benchmark_command.BenchmarkOptions(
        target="target", drafter="drafter", gamma=(3,), max_new_tokens=12, repeats=1
    )
    rates = []
    for how in ({}, {"verifier": "lenient", "lenience": 1e-30}):
        record, problems = analysis_benchmark.benchmark(
            Workload(target, drafter, batches, dataclasses.replace(options, **how))
        )
        rates.append(record["speculative"][0]["stats"]["acceptance_rate"])
        assert problems == [] and record["speculative"][0]["differences"] == []
    assert rates[0] < rates[1] == 1


@pytest.mark.slow
def test_block_verification_has_no_rate_to_predict_from(target, batches, options, measured):
    """Block verification verifies a draft as a whole: neither engine nor sum gives a rate."""
    block = dataclasses.replace(options, verifier="block", temperature=1.0).decoding()
    result = decoding_generate.generate(
        target,
        batches[0].inputs,
        drafter=ModelDrafter(target),
        gamma=3,
        key=batches[0].keys,
        **block,
    )
    stats = analysis_benchmark._total_stats(analysis_variants.Variant(3, None, results=[result]))
    assert (
        stats["acceptance_rate"] is None
        and stats["drafted"] > 0
        and stats["tokens_per_target_call"] > 1
    )
    record = copy.deepcopy(measured[0])
    record["speculative"][0] |= {"stats": stats, "predicted": None}
    assert stats["accepted_per_target_call"] == stats["accepted"] / stats["target_calls"]
    accepted_text = ", ".join(
        f"{count / stats['target_calls']:.2f}" for count in stats["accepted_by_position"]
    )
    line = (
        f"{stats['accepted_per_target_call']:.2f} drafted tokens are accepted per call, by "
        f"position {accepted_text}"
    )
    assert f"tokens per target call; {line}" in summaries.benchmark_summary(record)


@pytest.mark.parametrize("fails", ["print", "write"])
def test_a_record_survives_whatever_fails(monkeypatch, capsys, tmp_path, fails):
    output = tmp_path / "record.json"
    monkeypatch.setattr(benchmark_command, "benchmark", lambda *_: (BENCHMARK, []))
    monkeypatch.setattr(
        benchmark_command, "load", lambda options: Workload(None, None, [], options)
    )
    options = benchmark_command.BenchmarkOptions(
        target="target", output=str(output), json=fails == "write"
    )
    if fails == "write":
        monkeypatch.setattr(
            benchmark_command, "write_record", lambda *_, **__: (_ for _ in ()).throw(OSError)
        )
    # The sample has no verdicts, which a summary needs.
    with pytest.raises(OSError if fails == "write" else KeyError):
        benchmark_command.run(options)
    written = capsys.readouterr().out if fails == "write" else output.read_text()
    assert json.loads(written) == BENCHMARK


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "."}, "output: got '.', expected a file"),
        ({"input_length": 5}, "got --input_length=5 alone"),
        (
            {"preset": "t5_1_1/small", "target": None, "input_length": 513},
            "input_length: got 513, expected at most",
        ),
        (
            {"preset": "t5_1_1/small", "target": None, "vocabulary": "spiece.model"},
            "with --vocabulary",
        ),
        ({"preset": "t5_1_1/small", "target": None, "limit": 3}, "with --limit"),
        (
            {"preset": "t5_1_1/small", "target": None, "verifier": "lenient", "lenience": 0.5},
            "for plain decoding",
        ),
        ({"verifier": "typical", "temperature": 1.0}, "for plain decoding"),
        ({"target": None}, "target: got nothing"),
        ({"gamma": (3, 0)}, "gamma: got 0, expected at least 1"),
        ({"gamma": (-1,)}, "gamma: got -1"),
        ({"repeats": 0}, "repeats: got 0"),
        ({"preset": "t5_1_1/huge", "target": None}, "preset: got 't5_1_1/huge', expected one of"),
        ({"preset": "t5_1_1/small"}, "expected one or the other"),
        ({"drafter_preset": "t5_1_1/small"}, "expected --preset too"),
        ({"output": "no/such/folder/record.json"}, "output: got 'no/such/folder/record.json'"),
    ],
)
def test_rejects(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(benchmark_command.BenchmarkOptions(target="target"), **settings).check()


def test_a_presets_stacks_have_positions_of_their_own():
    """448 ids of an input and 128 new tokens fit an encoder and a decoder of 512 positions."""
    shape = dict(preset="marian/opus", target=None, input_length=448)
    make = functools.partial(benchmark_command.BenchmarkOptions, **shape)
    make(max_new_tokens=128).check()
    with pytest.raises(ValueError, match="preset: got .* up to 513 .* at most num_positions = 512"):
        make(max_new_tokens=512).check()
