"""A run's lines inside T5X, and misplaced gin files, without T5X.

`test_t5x_infer.py` runs T5X's program.
"""

import gin
import numpy as np
import pytest

import specdec_jax as sd
from specdec_jax.decoding.under_jit import Decoded
from specdec_jax.interop import t5x_run

HEAD = "from __gin__ import dynamic_registration\nimport gin_models\n"
MODEL = (
    HEAD + "MODEL = @gin_models.EncoderDecoderModel()\ngin_models.EncoderDecoderModel.module = 3\n"
)
OURS = HEAD + (
    "DRAFTER = %gin.REQUIRED\nMODEL = @gin_models.SpeculativeEncoderDecoderModel()\n"
    "gin_models.SpeculativeEncoderDecoderModel:\n  drafter = %DRAFTER\n  module = 3\n"
)
RUN = HEAD + "gin_models.infer.model = %MODEL\n"
BEAMS = HEAD + "gin_models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4\n"


@pytest.fixture(autouse=True)
def clean():
    gin.clear_config()  # another test of the process may have locked it
    yield
    gin.clear_config()
    for found in (t5x_run._ignored, t5x_run._calls, t5x_run._losses):
        found.clear()
    t5x_run.say.cache_clear()


def parse(folder, *texts):
    """Reads gin files in this order, as T5X does, and a drafter from the command line."""
    paths = [folder / f"{number}.gin" for number in range(len(texts))]
    for path, text in zip(paths, texts):
        path.write_text(text)
    given = any(text == OURS for text in texts)
    gin.parse_config_files_and_bindings(
        [str(path) for path in paths], ["DRAFTER='lookup'"] if given else []
    )


@pytest.mark.parametrize("texts", [(MODEL, OURS, RUN), (MODEL, RUN, OURS), (RUN, MODEL, OURS)])
def test_after_the_models_file_it_is_used(texts, tmp_path):
    parse(tmp_path, *texts)
    assert gin.query_parameter("%MODEL").configurable.selector.endswith(t5x_run.CLASS)


@pytest.mark.parametrize("texts", [(OURS, MODEL, RUN), (OURS, RUN, MODEL), (RUN, OURS, MODEL)])
def test_before_the_models_file_it_is_rejected(texts, tmp_path):
    """`MODEL` would be T5X's own, which decodes without a word and without a drafter."""
    with pytest.raises(
        ValueError,
        match="got values for drafter, module, but no MODEL that is one.*after the model's",
    ):
        parse(tmp_path, *texts)


def test_without_it_nothing_is_checked(tmp_path):
    parse(tmp_path, MODEL, RUN, BEAMS)
    assert not t5x_run._ignored


@pytest.mark.parametrize(
    "bound",
    [
        "predict_batch_with_aux.num_decodes = 4",
        "predict_batch_with_aux.prompt_with_targets = True",
        "predict_batch_with_aux.decoder_params = {'alpha': 1.0}",
        "feature_converter_cls = 3",
    ],
)
def test_what_has_no_effect_is_named(bound, tmp_path):
    parse(tmp_path, MODEL, RUN, f"{HEAD}gin_models.EncoderDecoderModel.{bound}\n", OURS)
    line = t5x_run.describe(sd.PromptLookupDrafter(), 4, "block", None, {}, sd.SamplingConfig())
    name = bound.split(" ")[0].split(".")[-1]
    assert f"of no effect here: models.EncoderDecoderModel.{name}, " in line


CONFIG = HEAD + "gin_models.GenerationConfig:\n  verifier = 'token'\n  gamma = 2\n"
ITS = f"{HEAD}gin_models.SpeculativeEncoderDecoderModel."


def describe() -> str:
    return t5x_run.describe(sd.PromptLookupDrafter(), 4, "block", None, {}, sd.SamplingConfig())


def test_options_of_a_file_that_nothing_names_are_named(tmp_path):
    """The file alone binds them: without CONFIG the model is another."""
    parse(tmp_path, MODEL, RUN, OURS, CONFIG)
    expected = "of no effect here: GenerationConfig.gamma, GenerationConfig.verifier (bind CONFIG"
    assert expected in describe()
    gin.clear_config()
    parse(tmp_path, MODEL, RUN, OURS, CONFIG, f"{ITS}config = @gin_models.GenerationConfig()\n")
    assert "of no effect" not in describe()


def test_what_is_bound_to_calls_is_named(tmp_path):
    """It may say how is decoded, as a temperature does."""
    parse(tmp_path, MODEL, RUN, OURS)
    assert "calls have" not in describe()
    gin.clear_config()
    calls = f"{ITS}predict_batch_with_aux.decoder_params = {{'temperature': 0.5}}\n"
    parse(tmp_path, MODEL, RUN, OURS, calls)
    expected = "calls have decoder_params={'temperature': 0.5}, which comes first"
    assert describe().endswith(expected)


LOSS = HEAD + "Z_LOSS = 0.1\ngin_models.EncoderDecoderModel.z_loss = %Z_LOSS\n"


def test_a_loss_that_only_t5xs_class_has_is_rejected_in_training(tmp_path):
    """The models' own files bind it to that class alone."""
    parse(tmp_path, MODEL, LOSS, RUN, OURS)
    with pytest.raises(ValueError, match="z_loss: got 0.0 for Specu.* and 0.1 for .*, expected o"):
        t5x_run.check_losses({"z_loss": 0.0})
    t5x_run.check_losses({"z_loss": 0.1})
    gin.clear_config()
    parse(tmp_path, MODEL, LOSS, RUN, OURS, f"{ITS}z_loss = 0.0\n")
    t5x_run.check_losses({"z_loss": 0.0})


def test_the_line_at_the_start():
    how = dict(sampling=sd.SamplingConfig(), decode_fn=None, bound={})
    line = t5x_run.describe(sd.RandomDrafter(24), 4, "block", **how)
    for part in (
        "drafter ",
        "gamma 4",
        "verifier block",
        "the argmax, where T5X's default is a beam search",
    ):
        assert part in line
    assert t5x_run.describe(None, 4, "block", **how).startswith(
        "nothing drafts; decodes the argmax"
    )
    line = t5x_run.describe(None, 3, "block", "beam_search", {"alpha": 0.6}, sd.SamplingConfig())
    assert line == "nothing drafts; decodes as T5X's beam_search(alpha=0.6)"
    for given in (0.7, [0.7]):
        line = t5x_run.describe(None, 4, "token", None, {}, sd.SamplingConfig(given))
        assert line.startswith("nothing drafts; samples at temperature 0.7, where")


def test_the_line_at_the_end(capsys, monkeypatch):
    import jax

    monkeypatch.setattr(t5x_run.atexit, "register", lambda function: None)
    totals = t5x_run.Totals()
    monkeypatch.setitem(t5x_run.TOTALS, "tokens", totals)
    counts = np.array([5, 7], np.int32), np.array([12, 8], np.int32), np.array([9, 6], np.int32)
    run = jax.jit(lambda counts: t5x_run.count(Decoded(None, None, *counts), "tokens"))
    run(counts), run(counts)
    totals.finish()
    assert capsys.readouterr().err == (
        "specdec_jax: 2 batches, rows that fill them up included: 24 target calls; 40 drafted "
        "tokens, 30 accepted (75.0% of them, 1.25 a call)\n"
    )
