"""Synthetic acceptance accepts drafts with a given probability, to time random weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import specdec_jax as sd
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import variants
from specdec_jax.analysis.report import summaries
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import main
from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.random_tokens import RandomDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.verifier import Randomness
from specdec_jax.speculative.verifiers import verify_synthetically

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def pair() -> tuple[LanguageModel, ModelDrafter]:
    """Random weights, no EOS: every output has full length."""
    models = [
        LanguageModel.random(T5Config(48, width, 2, 8, 1, 1, 24), seed=width, eos_ids=())
        for width in (16, 8)
    ]
    return models[0], ModelDrafter(models[1])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["model", "random"])
def test_acceptance_is_what_was_asked(pair, temperature, drafter):
    """One program for every α, and for a batch of different ones."""
    target, model = pair
    drafter = model if drafter == "model" else RandomDrafter(48)
    asked = np.array([0.25, 0.6, 0.9, 1.0] * 8)
    result = sd.generate(
        target,
        np.full((32, 3), 7, np.int32),
        drafter=drafter,
        gamma=3,
        sampling=sd.SamplingConfig(temperature),
        verifier="synthetic",
        synthetic_alpha=asked,
        max_new_tokens=120,
        key=jax.random.key(3),
    )
    assert (result.lengths == 120).all()
    for alpha in set(asked):
        rows = [
            row for row, value in zip(result.stats.per_row, asked, strict=True) if value == alpha
        ]
        accepted, examined = (
            sum(row.accepted for row in rows),
            sum(row.examined_by_position.sum() for row in rows),
        )
        error = np.sqrt(alpha * (1 - alpha) / examined)
        assert abs(accepted / examined - alpha) <= 4.5 * error, (alpha, examined)


def test_at_temperature_0_what_follows_the_draft_is_the_argmax(pair):
    """α so small that nothing is accepted: plain decoding's tokens."""
    target, drafter = pair
    inputs = [[5, 9, 1], [3, 1]]
    plain = sd.generate(target, inputs, max_new_tokens=12)
    forced = sd.generate(
        target,
        inputs,
        drafter=drafter,
        gamma=3,
        verifier="synthetic",
        synthetic_alpha=1e-9,
        max_new_tokens=12,
    )
    assert np.array_equal(plain.tokens, forced.tokens) and forced.stats.accepted == 0


def test_decisions_by_hand():
    """Tokens are accepted while u < α; the next comes from max(0, p − q), or from p."""
    p = np.array([[[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [0.0, 1.0, 0.0]]] * 3, np.float32)
    q = np.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]] * 3, np.float32)
    accept = np.array([[0.59, 0.59], [0.59, 0.6], [0.6, 0.0]], np.float32)
    settings = {"synthetic_alpha": np.full(3, 0.6, np.float32)}
    draws = Randomness(accept, toy.random_bits(np.full((3, 3), 0.5)))
    verify = jax.jit(
        lambda p, q, *rest: verify_synthetically(
            Categorical.from_logits(jnp.log(p)), Categorical.from_logits(jnp.log(q)), *rest
        )
    )
    verified = verify(
        p, q, np.array([[0, 1]] * 3, np.int32), np.full(3, 2, np.int32), draws, settings
    )
    assert verified.num_accepted.tolist() == [2, 1, 0]
    assert verified.next_token.tolist() == [1, 2, 1]


@pytest.mark.parametrize("alpha", [0.0, -0.5, 1.5, float("nan")])
def test_bad_alpha(pair, alpha):
    with pytest.raises(ValueError, match=r"synthetic_alpha: got .*, expected a number in \(0, 1\]"):
        sd.generate(pair[0], [[5, 1]], drafter=pair[1], verifier="synthetic", synthetic_alpha=alpha)


def test_what_makes_no_sense(pair):
    target, drafter = pair
    for options, message in [
        (
            dict(drafter=drafter, verifier="synthetic"),
            "synthetic_alpha: got none with verifier='synthetic'",
        ),
        (
            dict(drafter=drafter, verifier="token", synthetic_alpha=0.5),
            "synthetic_alpha: got 0.5 with verifier='token'",
        ),
        (
            dict(verifier="synthetic", synthetic_alpha=0.5),
            "verifier: got 'synthetic' for plain decoding",
        ),
    ]:
        with pytest.raises(UnsupportedCombination, match=message):
            sd.generate(target, [[5, 1]], **options)


@pytest.mark.slow
def test_benchmark_has_an_variant_for_every_alpha(pair):
    target, drafter = pair
    options = benchmark_command.BenchmarkOptions(
        preset="t5_1_1/small",
        drafter_preset="t5_1_1/small",
        gamma=(2,),
        synthetic_alpha=(0.3, 0.9),
        max_new_tokens=40,
        repeats=1,
    )
    ids = [[5, 9, 1]] * 12
    record, problems = analysis_benchmark.benchmark(
        Workload(target, drafter, variants.cut_batches(ids, ids, 4, 0), options)
    )
    low, high = record["speculative"]
    assert not problems and (low["synthetic_alpha"], high["synthetic_alpha"]) == (0.3, 0.9)
    assert (
        0.1 < low["stats"]["acceptance_rate"] < 0.5 and 0.8 < high["stats"]["acceptance_rate"] < 1
    )
    assert (
        low["predicted"] and high["predicted"] and low["differences"] == high["differences"] == []
    )
    text = summaries.benchmark_summary(json.loads(json.dumps(record)))
    assert (
        "gamma 2, acceptance forced to 0.3: outputs mean nothing" in text
        and "forced to 0.9" in text
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--synthetic_alpha=0"], "synthetic_alpha: got 0.0, expected a number in (0, 1]"),
        (["--synthetic_alpha=0.5,2", "--drafter=lookup"], "synthetic_alpha: got 2.0"),
        (
            ["--synthetic_alpha=0.5"],
            "synthetic_alpha: got a value for plain decoding, expected a drafter",
        ),
        (
            ["--synthetic_alpha=0.5", "--drafter=lookup", "--verifier=token"],
            "synthetic_alpha: got a value with verifier='token'",
        ),
        (
            ["--synthetic_alpha=0.5", "--drafter=random", "--gamma_policy=heuristic"],
            "gamma_policy='heuristic'",
        ),
        (
            ["--drafter=lookup", "--drafter_preset=t5_1_1/small"],
            "got --drafter=lookup with --drafter_preset",
        ),
        (
            ["--drafter=lookup"],
            "drafter: got 'lookup' with --preset, expected --synthetic_alpha too",
        ),
        (
            ["--drafter=lookup", "--verifier=synthetic"],
            "verifier: got 'synthetic', expected one of token, block",
        ),
        (["--drafter=ende/drafter"], "got --preset=t5_1_1/small with --drafter"),
    ],
)
def test_command_rejects(capsys, flags, message):
    assert main.main(["benchmark", "--preset=t5_1_1/small", *flags]) == 2
    assert message in capsys.readouterr().err
