"""Policies of γ: what does not compile anew, what is rejected, and the command line."""

import json
import math
import re

import command_line
import numpy as np
import pytest
from distribution_samples import V
from policies import DRAFT, TARGET, G
from toy_models import HashModel, compilations

import specdec_jax as sd
from specdec_jax.analysis.report import summaries
from specdec_jax.commands import benchmark
from specdec_jax.commands.generate import GenerateOptions
from specdec_jax.decoding.generate import advance

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")


# --- What does not compile, and what is rejected ---


def test_numbers_never_recompile():
    """Nor do one number for all rows and one for each."""
    target, drafter = HashModel(V, 0), sd.ModelDrafter(DRAFT)

    def run(gamma):
        return sd.generate(
            target, [[3, 4], [7]], drafter=drafter, gamma=gamma, max_new_tokens=9, eos_ids=()
        )

    run(sd.Heuristic(G))
    caches = advance._cache_size()
    changed = [
        sd.Heuristic(G, minimum=2, start=3, up=[1, 4], down=2),
        sd.Heuristic(np.int64(G), up=0),
    ]
    assert (
        compilations(lambda: [run(gamma) for gamma in changed]) == 0
        and advance._cache_size() == caches
    )
    assert compilations(lambda: run(sd.Heuristic(G + 1))) > 0, "the counter counts"


WRONG = [
    (lambda: sd.Heuristic(0), "maximum: got 0, expected an integer from 1 to 64"),
    (lambda: sd.Confidence(65), "maximum: got 65"),
    (lambda: sd.Entropy(2.0), "maximum: got 2.0"),
    (lambda: sd.CostAware(True), "maximum: got True"),
    (lambda: sd.Heuristic(4, minimum=5), "minimum: got 5, expected an integer from 1 to 4"),
    (lambda: sd.Heuristic(4, up=1.5), "up: got 1.5, expected an integer from 0 to 64"),
    (lambda: sd.Heuristic(4, start=[3, 0]), r"start: got \[3, 0\], expected an integer from 1"),
    (lambda: sd.Entropy(4, smoothing=1), "smoothing: got 1, expected a number from 0 to below 1"),
    (lambda: sd.EntropyBound(4, scale=-0.1), "scale: got -0.1, expected a number from 0"),
    (
        lambda: sd.EntropyBound(4, threshold=math.nan),
        "threshold: got nan, expected a number from 0 to 1",
    ),
    (
        lambda: sd.Confidence(4, threshold="high"),
        "threshold: got 'high', expected a number from 0 to 1",
    ),
    (lambda: sd.CostAware(4, cost_ratio=-1), "cost_ratio: got -1, expected a number from 0"),
    (lambda: sd.CostAware(4, weight=0), "weight: got 0, expected a number from 1e-06"),
    (
        lambda: rejected_by_generate(gamma=sd.Confidence(4, threshold=[0.1] * 3)),
        "threshold: got 3 values, expected one or 2",
    ),
    (
        lambda: rejected_by_generate(gamma=sd.Entropy(4), drafter=sd.PromptLookupDrafter()),
        "gamma: got Entropy, which needs draft probabilities, with PromptLookupDrafter, which "
        "provides none",
    ),
    (
        lambda: rejected_by_generate(
            gamma=sd.Confidence(4), drafter=sd.NGramDrafter.count([[3, 4]], V, 2)
        ),
        "with NGramDrafter",
    ),
    (
        lambda: rejected_by_generate(gamma=sd.EntropyBound(4), drafter=sd.RandomDrafter(V)),
        "with RandomDrafter",
    ),
]


def rejected_by_generate(drafter=sd.ModelDrafter(DRAFT), **options):
    sd.generate(TARGET, [[3], [4]], drafter=drafter, **options)


@pytest.mark.parametrize("call, message", WRONG, ids=[message for _, message in WRONG])
def test_what_makes_no_sense_is_rejected_before_anything_compiles(call, message):
    def attempt():
        with pytest.raises(ValueError, match=message):
            call()

    assert compilations(attempt) == 0


# --- On the command line ---

FLAGS = dict(target="t", drafter="d", gamma=6)
NAMED = [
    (dict(gamma_policy="fixed"), 6),
    (dict(gamma_policy="heuristic"), sd.Heuristic(6)),
    (
        dict(gamma_policy="confidence", gamma_settings=("threshold:0.25",)),
        sd.Confidence(6, threshold=0.25),
    ),
    (
        dict(gamma_policy="cost_aware", gamma_settings=("cost_ratio:0.3", "minimum:2")),
        sd.CostAware(6, 2, 0.3),
    ),
]


@pytest.mark.parametrize("flags, policy", NAMED, ids=[flags["gamma_policy"] for flags, _ in NAMED])
def test_flags_name_a_policy(flags, policy):
    options = GenerateOptions(**FLAGS, **flags)
    options.check()
    assert options.configuration().gamma == policy


MISNAMED = [
    (
        dict(gamma_policy="best"),
        "gamma_policy: got 'best', expected one of fixed, heuristic, entropy, entropy_bound",
    ),
    (
        dict(gamma_settings=("threshold:1",)),
        "gamma_settings: got 'threshold' with gamma_policy='fixed', expected none",
    ),
    (
        dict(gamma_policy="entropy", gamma_settings=("up:1",)),
        "got 'up' with gamma_policy='entropy', expected one of minimum",
    ),
    (
        dict(gamma_policy="entropy", gamma_settings=("smoothing",)),
        "gamma_settings: got 'smoothing', expected name:number",
    ),
    (dict(gamma_policy="heuristic", gamma_settings=("up:1", "up:2")), "expected every name once"),
    (
        dict(gamma_policy="heuristic", gamma_settings=("up:1.5",)),
        "up: got 1.5, expected an integer",
    ),
    (
        dict(gamma_policy="heuristic", gamma=0),
        "gamma_policy: got 'heuristic' for plain decoding, expected a drafter",
    ),
    (
        dict(gamma_policy="heuristic", drafter=None),
        "gamma_policy: got 'heuristic' for plain decoding",
    ),
    (
        dict(gamma_policy="heuristic", gamma_settings=("minimum:7",)),
        "minimum: got 7, expected an integer from 1 to 6",
    ),
]


@pytest.mark.parametrize("flags, message", MISNAMED, ids=[message for _, message in MISNAMED])
def test_flags_that_make_no_sense(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GenerateOptions(**FLAGS | flags).check()


@pytest.mark.slow
def test_generate_with_a_policy(specdec, pair):
    flags = ["--gamma_policy=confidence", "--gamma_settings=threshold:1", "--json", "We asked"]
    code, out, err = specdec("generate", *command_line.MODELS, *flags)
    assert (code, err) == (0, "")
    target, drafter = (sd.load(pair / name, dtype="float32") for name in ("target", "drafter"))
    policy = sd.Confidence(2, threshold=1)
    result = sd.generate(
        target, ["We asked"], drafter=sd.ModelDrafter(drafter), gamma=policy, max_new_tokens=6
    )
    record = json.loads(out)
    assert record["text"] == result.texts[0] and record["stats"]["drafted"] == result.stats.drafted
    fixed = json.loads(specdec("generate", *command_line.MODELS, "--json", "We asked")[1])
    assert (
        record["stats"]["drafted"] < fixed["stats"]["drafted"] and record["text"] == fixed["text"]
    )


def test_a_policy_with_a_minimum(specdec):
    flags = ["--gamma_policy=heuristic", "--gamma_settings=minimum:2", "We asked"]
    fixed = specdec("generate", *command_line.MODELS, "We asked")
    assert specdec("generate", *command_line.MODELS, *flags) == fixed


@pytest.mark.slow
def test_benchmark_with_a_policy(specdec):
    flags = [
        "--gamma_policy=heuristic",
        "--gamma_settings=start:1",
        "--limit=1",
        "--repeats=1",
        "--json",
    ]
    code, out, err = specdec("benchmark", *command_line.MODELS, *flags)
    assert (code, err) == (0, "")
    record = json.loads(out)
    (variant,) = record["speculative"]
    alpha = variant["stats"]["acceptance_rate"]
    assert (
        0 < variant["mean_gamma"] < variant["gamma"] == 2
        and variant["predicted"] is variant["shares"] is None
    )
    assert variant["oracle"]["tokens_per_target_call"] == pytest.approx(1 / (1 - alpha))
    assert "drafted for each; no prediction" in summaries.benchmark_summary(
        record
    ) and "an oracle of gamma" in summaries.benchmark_summary(record)
    assert benchmark.BenchmarkOptions(**record["options"]).gamma_policy == "heuristic"
