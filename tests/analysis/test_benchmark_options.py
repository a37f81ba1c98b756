"""The benchmark beside other implementations, and its plot."""

import dataclasses

import benchmark_models
import numpy as np
import pytest
from benchmark_models import CONFIG
from sample_records import read_macros
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import comparison
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.report import plots
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.decoding.results import GenerationResult

pytestmark = pytest.mark.usefixtures("quick")

target, options = benchmark_models.target, benchmark_models.options


# Against other implementations; what they compute is in test_t5x.py.


def fake_variant(steps):
    """Decodes to rows that are given."""
    tokens = np.array(steps, np.int32)
    result = GenerationResult(
        None, tokens, np.full(len(tokens), tokens.shape[1]), None, None, None, []
    )
    return analysis_variants.Variant(0, lambda batch: result, seconds=[2.0, 4.0], results=[result])


def test_record_against_another(target):
    batch = analysis_variants.cut_batches([[5, 9, 1]], [[5, 9, 1]], 1, 0)
    best = int(np.argmax(target.logits([[5, 9, 1]], [[0]])[0, 0]))
    plain = fake_variant([[best, 4]])
    plain.seconds = [1.0, 1.0]
    record = comparison.compare(
        "t5x", {"plain": plain, "t5x": fake_variant([[best, 4]])}, target, batch
    )
    assert (
        record["improvement"] == {"plain": {"median": 3.0, "least": 2.0, "most": 4.0}}
        and not record["differences"]
    )
    assert comparison.find_problems(record, "float32") == []
    other = (best + 1) % CONFIG.vocab_size
    record = comparison.compare(
        "t5x", {"plain": plain, "t5x": fake_variant([[other, 4]])}, target, batch
    )
    (difference,) = record["differences"]
    assert (
        difference["input"],
        difference["position"],
        difference["plain"],
        difference["other"],
    ) == (
        0,
        0,
        best,
        other,
    )
    logits = np.sort(np.asarray(target.logits([[5, 9, 1]], [[0]])[0, 0]))
    assert difference["margin"] == pytest.approx(logits[-1] - logits[-2], abs=1e-5)
    assert (
        "got other tokens than plain decoding for sentences 1,"
        in comparison.find_problems(record, "float32")[0]
    )
    assert comparison.find_problems(record, "bfloat16") == []


def test_what_int8_contributes_is_told_apart(target):
    """Beside another implementation comes our own autoregressive decoding in its dtype."""
    batch = analysis_variants.cut_batches([[5, 9, 1]], [[5, 9, 1]], 1, 0)
    best = int(np.argmax(target.logits([[5, 9, 1]], [[0]])[0, 0]))
    variants = {
        name: fake_variant([[best, token]])
        for name, token in (("plain", 4), ("t5x", 4), (comparison.UNROUNDED, 5))
    }
    variants["plain"].seconds, variants[comparison.UNROUNDED].seconds = [1.0, 1.0], [2.0, 3.0]
    assert comparison.list_other_implementations(
        {name: variants[name] for name in ("t5x", comparison.UNROUNDED)}
    ) == ["t5x"]
    record = comparison.compare("t5x", variants, target, batch)
    assert (
        record["rounding"] == {"median": 2.5, "least": 2.0, "most": 3.0}
        and record["rounded_differences"] == 1
    )
    assert record["improvement"].keys() == {"plain", comparison.UNROUNDED}
    text = read_macros().other(record)
    assert (
        "of this int8 contributes 2.50 times (2.00 to 3.00)" in text
        and "changes the tokens of 1 inputs" in text
    )
    assert "rounding" not in comparison.compare(
        "t5x", {"plain": variants["plain"], "t5x": variants["t5x"]}, target, batch
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not packed_weights.can_pack("float32"), reason="no weights in int8 without a C++ compiler"
)
def test_a_target_in_int8_is_timed_without_it_too(tmp_path):
    sd.save(tiny_t5(1), tmp_path / "stored", dtype="int8")
    rounded, wide = (
        sd.load(tmp_path / "stored", "float32", quantize=how) for how in (None, "none")
    )
    options = benchmark_command.BenchmarkOptions(target="x", max_new_tokens=6, against="t5x")
    assert rounded.quantized and benchmark_command.unrounded_variant(options, wide) == {}
    (variant,) = benchmark_command.unrounded_variant(options, rounded).values()
    (batch,) = analysis_variants.cut_batches([[5, 9, 1]], [[5, 9, 1]], 1, 0)
    expected = sd.generate(wide, batch.inputs, max_new_tokens=6)
    actual = variant.decode(batch)
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    np.testing.assert_allclose(actual.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(against="onnx"), "against: got 'onnx', expected t5x"),
        (
            dict(against="t5x", temperature=0.5),
            "against: got 't5x' with sampling or processors, expected argmax",
        ),
        (
            dict(against="t5x", min_new_tokens=2),
            "against: got 't5x' with sampling or processors, expected argmax",
        ),
        (dict(against="t5x"), r"against: got 't5x'.*, expected the extra: pip install '.\[t5x\]'"),
    ],
)
def test_what_cannot_be_compared_is_rejected(change, message, options, monkeypatch):
    monkeypatch.setattr(benchmark_command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(options, **change).check()


def test_plot_of_wall_time():
    """The plot has a bar per way of decoding, in ms per token, the other implementation first."""

    def variant(median, tokens, **more):
        return {
            "seconds": {"median": median, "least": 0.9 * median, "most": 1.2 * median},
            "tokens": tokens,
            **more,
        }

    record = {
        "plain": variant(2.0, 100),
        "against": variant(3.0, 100, name="t5x"),
        "machine": {"cores": 2},
        "sentences": 7,
        "speculative": [
            variant(1.0, 100, gamma=4, synthetic_alpha=None),
            variant(0.5, 50, gamma=6, synthetic_alpha=0.75),
        ],
        "target": {"name": "big", "parameter_dtype": "float32, int8"},
        "options": {"batch_size": 1},
    }
    axes = plots.draw_wall_time(record).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "T5X",
        "plain",
        "speculative, γ = 4",
        "speculative, γ = 6, α forced to 0.75",
    ]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([30, 20, 10, 10])
    assert (
        axes.texts[2].get_text() == "10.00 ms, 3.00×"
        and "big, float32, 7 inputs" in axes.get_title()
    )
    assert len(plots.draw_wall_time(record | {"against": None}).axes[0].patches) == 3
