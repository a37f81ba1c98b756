"""Beam search of models saved by transformers and T5X has their tokens and scores."""

import json

import numpy as np
import pytest
import tiers
from golden_models import GOLDEN, unpack_t5x

import specdec_jax as sd

pytestmark = pytest.mark.usefixtures("quick")
ARRAYS = dict(np.load(GOLDEN / "hf_beams.npz"))  # scripts/write_golden_beams.py says what they are
SEARCHES = json.loads(str(ARRAYS["searches"]))
MODELS = ("hf_t5_1_0", "hf_t5_1_1", "hf_gpt2")
# transformers' names of what is a field of SamplingConfig here.
PROCESSORS = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "min_new_tokens": "min_new_tokens",
}


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    folder = GOLDEN / request.param
    return request.param, sd.load(folder, dtype="float32"), dict(np.load(folder / "io.npz"))


DRAFTED = ("beams4", "early5", "repetition", "ngram")


@tiers.parametrize(
    "search, drafting",
    [("beams4", dict(gamma=2)), ("repetition", dict(gamma=2))]
    + [(name, {}) for name in SEARCHES]
    + [(name, dict(gamma=2)) for name in DRAFTED if name not in ("beams4", "repetition")],
    first=3,
)
def test_search_is_that_of_transformers(golden, search, drafting):
    name, model, io = golden
    tokens, scores, sound = (
        ARRAYS[f"{name}/{search}/{what}"] for what in ("tokens", "scores", "sound")
    )
    given = dict(SEARCHES[search])
    ends = (int(io["early_eos_id"]),) if given.pop("ends", None) else model.eos_ids
    sampling = sd.SamplingConfig(
        **{ours: given.pop(theirs) for theirs, ours in PROCESSORS.items() if theirs in given}
    )
    if drafting:
        drafting = dict(drafting, drafter=sd.ModelDrafter(model))
    beams = given.pop("num_beams")
    found = sd.generate(
        model,
        io["inputs"],
        input_lengths=io["input_lengths"],
        num_beams=beams,
        num_return_sequences=beams,
        beam_style="huggingface",
        eos_ids=ends,
        sampling=sampling,
        max_new_tokens=tokens.shape[2],
        **given,
        **drafting,
    )
    valid = np.arange(tokens.shape[2]) < found.lengths[:, None]
    ours = np.where(valid, found.tokens, -1).reshape(tokens.shape)
    assert sound.sum() >= len(sound) - 1
    np.testing.assert_array_equal(ours[sound], tokens[sound])
    np.testing.assert_allclose(
        found.scores.reshape(scores.shape)[sound], scores[sound], rtol=1e-4, atol=1e-4
    )
    if drafting:
        assert found.stats.tokens_per_target_call > 1


T5X = dict(
    np.load(GOLDEN / "t5x_beams.npz")
)  # scripts/write_golden_t5x_beams.py says what they are
T5X_SEARCHES = json.loads(str(T5X["searches"]))


@pytest.fixture(scope="module")
def t5x_golden(tmp_path_factory):
    folder, io = unpack_t5x(tmp_path_factory.mktemp("t5x"))
    return sd.load(folder, "float32"), io["encoder_input_tokens"]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "speculative"])
@tiers.parametrize("search", T5X_SEARCHES, first=1)
def test_search_is_that_of_t5x(search, drafts, t5x_golden):
    model, inputs = t5x_golden
    given, tokens, scores = T5X_SEARCHES[search], T5X[f"{search}/tokens"], T5X[f"{search}/scores"]
    _, beams, length = tokens.shape
    prompts = T5X["prompts"] if given.get("prompted") else np.zeros((len(inputs), length), int)
    prefixes = [row[row > 0].tolist() for row in prompts]
    found = sd.generate(
        model,
        inputs,
        input_lengths=(inputs > 0).sum(axis=1),
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=given["alpha"],
        eos_ids=() if given["eos_id"] < 0 else (given["eos_id"],),
        decoder_prefix=prefixes,
        max_new_tokens=[length - len(prefix) for prefix in prefixes],
        **dict(drafter=sd.ModelDrafter(model), gamma=2) if drafts else {},
    )
    ours = np.zeros_like(tokens)
    for row, (new, many) in enumerate(zip(found.tokens, found.lengths)):
        whole = (
            [*prefixes[row // beams], *new[:many]] if found.finish_reasons[row] != "none" else []
        )
        ours[row // beams, beams - 1 - row % beams, : len(whole)] = whole
    np.testing.assert_array_equal(ours, tokens)
    np.testing.assert_allclose(
        found.scores.reshape(scores.shape)[:, ::-1], scores, rtol=1e-5, atol=1e-4
    )
    if drafts:
        assert found.stats.tokens_per_target_call > 1
