"""Tests `tools/rounding.py` and `scripts/compare_rounded.py` beside numpy."""

import json

import jax
import numpy as np
import pytest
import tiers
from absl import app
from absl.flags import FLAGS
from int8_models import stored_in
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import native
from tools import rounding

pytestmark = pytest.mark.usefixtures("quick")
V = 24
INPUTS, OUTPUTS = [[3, 4, 5], [6]], [[7, 8, 9, 10], [11, 12]]
needs_kernels = pytest.mark.skipif(not native.is_available(), reason=native.describe_state())


def gpt() -> sd.LanguageModel:
    return sd.LanguageModel.random(sd.GPTConfig(V, 16, 2, 2, 32, num_positions=16), eos_ids=())


def by_numpy(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def scored(model, row: int, width: int | None = None) -> np.ndarray:
    """The logits before each output of a row by itself."""
    prompt, outputs = INPUTS[row], OUTPUTS[row]
    if model.config.decoder_only:
        result = model.logits(None, [[*prompt, *outputs[:-1]]])[0, len(prompt) - 1 :]
    else:
        result = model.logits([prompt], [[model.start_token, *outputs[:-1]]])[0]
    return np.asarray(result, np.float64)[:, :width]


@pytest.mark.slow
@pytest.mark.parametrize("family", [gpt, lambda: tiny_t5(0, V)])
def test_figures_are_those_of_numpy(family):
    """Also with a drafter that has more ids than the target."""
    full = family()
    other = noisy_copy(full, 0.2)
    drafter = gpt() if full.config.decoder_only else tiny_t5(3, V + 2)
    divergence = rounding.Divergence(full, other, drafter)
    divergence.add(INPUTS[:1], OUTPUTS[:1])  # in two calls, as of two batches
    divergence.add(INPUTS[1:], OUTPUTS[1:])
    result = divergence.record()
    together = rounding.Divergence(full, other, drafter)
    together.add(INPUTS, OUTPUTS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), together.record(), result
    )

    logits = [
        np.concatenate([scored(model, row, V) for row in (0, 1)])
        for model in (full, other, drafter)
    ]
    p, q, draft = map(by_numpy, logits)
    kl = (p * np.log(p / q)).sum(-1)
    centred = [one - one.mean(-1, keepdims=True) for one in logits]
    best = [one.argmax(-1) for one in logits]
    assert result["tokens"] == 6
    np.testing.assert_allclose(result["kl"]["mean"], kl.mean(), rtol=1e-3)
    np.testing.assert_allclose(result["kl"]["most"], kl.max(), rtol=1e-3)
    error = np.sqrt(((centred[1] - centred[0]) ** 2).mean() / (centred[0] ** 2).mean())
    np.testing.assert_allclose(result["logits_error"], error, rtol=1e-3)
    assert result["argmax_changes"] == np.mean(best[0] != best[1])
    alpha = {
        "full": np.minimum(p, draft).sum(-1).mean(),
        "rounded": np.minimum(q, draft).sum(-1).mean(),
    }
    np.testing.assert_allclose([*result["alpha"].values()], [*alpha.values()], rtol=1e-3)
    assert result["alpha_argmax"] == {
        "full": np.mean(best[0] == best[2]),
        "rounded": np.mean(best[1] == best[2]),
    }
    assert error > 0.01 and abs(alpha["full"] - alpha["rounded"]) > 1e-4


@tiers.parametrize("tied", [False, True], first=1)
def test_weights_are_moved_by_up_to_half_a_step(tied):
    """Of rounded weights; the embedding is one where it is the head, with columns as its rows."""
    model = tiny_t5(0, V, logits_via_embedding=tied)
    before, after = (
        dict(jax.tree.leaves_with_path(one.params)) for one in (model, rounding.moved(model))
    )
    for path, leaf in before.items():
        change = np.abs(np.asarray(after[path]) - np.asarray(leaf))
        if path[-1].key == "kernel" or (tied and path[-1].key == "embedding"):
            steps = change / (
                np.abs(leaf).max(0 if path[-1].key == "kernel" else 1, keepdims=True) / 127
            )
            assert steps.max() <= 0.501 and 0.2 < steps.mean() < 0.3
        else:
            assert change.max() == 0


@needs_kernels
def test_a_rounded_model_is_what_load_makes_of_it(tmp_path):
    model = tiny_t5(0, V)
    sd.save(model, tmp_path / "model")
    loaded = sd.load(tmp_path / "model", quantize="int8")
    actual, expected = stored_in(rounding.rounded(model, "int8")), stored_in(loaded)
    assert actual.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture
def run(load_script, capsys):
    script = load_script("compare_rounded")

    def call(*flags) -> dict:
        FLAGS.unparse_flags()
        FLAGS(["compare_rounded", *flags])
        script.main([])
        return json.loads(capsys.readouterr().out)

    return call


@pytest.mark.slow
@needs_kernels
def test_the_script(run, tmp_path):
    """Weights that are stored in int8 change nothing, moved ones a little."""
    vocabulary = sd.load("ende/drafter").vocabulary
    shape = dict(
        emb_dim=32, num_heads=2, head_dim=16, num_encoder_layers=1, mlp_dim=64, num_decoder_layers=1
    )

    def make(seed):
        return sd.LanguageModel.random(sd.T5Config(6144, **shape), seed, vocabulary)

    sd.save(make(0), tmp_path / "target", dtype="int8")
    sd.save(make(1), tmp_path / "drafter")
    text = tmp_path / "text.tsv"
    text.write_text("A house.\tEin Haus.\nA dog.\tEin Hund.\nCats\tKatzen\n", encoding="utf-8")
    flags = [
        f"--target={tmp_path}/target",
        f"--drafter={tmp_path}/drafter",
        f"--input_file={text}",
        "--limit=2",
    ]
    output = tmp_path / "record.json"
    flags += ["--max_new_tokens=5", "--dtype=float32"]
    same, moved = run(*flags, f"--output={output}"), run(*flags, "--move_weights")
    assert json.loads(output.read_text()) == same
    assert (
        same["inputs"] == 2 and same["outputs_that_differ"] == 0 and same["full"] == same["rounded"]
    )
    assert {"bleu", "chrf"} < set(same["full"]) and same["drafter"] == f"{tmp_path}/drafter"
    assert same["logits_error"] < 1e-3 < 2e-3 < moved["logits_error"] < 0.1
    assert (
        abs(same["alpha"]["full"] - same["alpha"]["rounded"]) < 1e-5
        and 0 < same["alpha"]["full"] < 1
    )


def test_a_missing_file_is_rejected(run):
    with pytest.raises(app.UsageError, match="input_file: got no/such/file"):
        run("--target=x", "--input_file=no/such/file")


@pytest.mark.parametrize(
    ("output", "message"),
    [("nowhere/x.json", "expected a file in a folder that exists"), ("text", "which is the input")],
)
def test_an_output_that_cannot_be_written_is_rejected(run, tmp_path, output, message):
    (tmp_path / "text").write_text("A house.\n", encoding="utf-8")
    with pytest.raises(app.UsageError, match=f"output: got .*{message}"):
        run("--target=x", f"--input_file={tmp_path / 'text'}", f"--output={tmp_path / output}")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "got no lines"), ("A house.\tEin Haus.\n\n", "got 1 references for 2 lines")],
)
def test_incomplete_files_are_rejected_before_a_model_is_loaded(run, tmp_path, text, message):
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(app.UsageError, match=message):
        run("--target=no/such/model", f"--input_file={path}")


def test_references_need_sacrebleu(run, tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_text("A house.\tEin Haus.\n", encoding="utf-8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(app.UsageError, match="references without sacrebleu"):
        run("--target=no/such/model", f"--input_file={path}")


@pytest.mark.slow
def test_only_float32_is_moved():
    with pytest.raises(ValueError, match="dtype: got bfloat16, expected float32"):
        rounding.moved(tiny_t5(0, V, dtype="bfloat16"))
