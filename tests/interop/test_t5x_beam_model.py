"""Inside T5X with `beam_search`, our model predicts and scores what T5X's does."""

import dataclasses
import functools
import importlib.util
import warnings

import gin
import jax
import numpy as np
import pytest
from golden_models import unpack_t5x

import specdec_jax as sd

if importlib.util.find_spec("t5x") is None:
    pytest.skip("t5x is not installed", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TensorFlow's
    from t5x import decoding, models
    from t5x_calls import Ids, predict, speculative, standard_promotion

    from specdec_jax.interop import t5x as interop

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick")]
promotion = standard_promotion


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """What T5X computed, its model, and another that drafts."""
    folder, io = unpack_t5x(tmp_path_factory.mktemp("t5x"))
    target = sd.load(folder, "float32")
    small = dataclasses.replace(target.config, num_encoder_layers=1, num_decoder_layers=1)
    return io, target, sd.LanguageModel.random(small, seed=3)


def prompts(io) -> np.ndarray:
    """Of every length: all places, one token, none, all places but one."""
    result = np.array(io["prompt_decoder_input_tokens"])
    result[0, 1:], result[1, 2:], result[2], result[3, 1:-1] = (
        np.arange(20, 35),
        0,
        0,
        np.arange(40, 54),
    )
    return result


CASES = {  # T5X's name of each option; "early" is an id that comes up
    "one beam": dict(num_decodes=1, eos_id="early"),
    "two": dict(num_decodes=2, eos_id="early", prompted=True),
    "four": dict(num_decodes=4, eos_id=1, alpha=1.0),
    "cut": dict(num_decodes=4, eos_id="early", prompted=True, max_decode_len=9, alpha=0.0),
    "few steps": dict(num_decodes=4, eos_id="early", prompted=True, max_decode_step=5),
    "eight": dict(num_decodes=8, eos_id="early", prompted=True),
    "no end": dict(num_decodes=8, eos_id=-1),
}


@pytest.mark.parametrize(
    "case, drafting",
    [(case, "itself") for case in CASES]
    + [
        pytest.param(case, who, marks=pytest.mark.slow)
        for case in CASES
        for who in ("nothing", "another")
    ],
)
def test_predictions_and_scores_are_t5xs(case, drafting, golden):
    io, target, another = golden
    given = dict(CASES[case])
    beams, prompted = given.pop("num_decodes"), given.pop("prompted", False)
    given["eos_id"] = int(io["eos_early_id"]) if given["eos_id"] == "early" else given["eos_id"]
    drafter = {"nothing": None, "itself": target, "another": another}[drafting]
    ours = speculative(
        target,
        decode_fn=decoding.beam_search,
        drafter=drafter and sd.ModelDrafter(drafter),
        counts=True,
    )
    theirs = models.EncoderDecoderModel(interop.make_transformer(target.config), Ids, Ids, None)
    options = dict(num_decodes=beams, prompt_with_targets=prompted, return_all_decodes=True)

    def decode(model):
        return predict(
            model,
            target.params,
            io["encoder_input_tokens"],
            prompts(io),
            decoder_params=dict(given),
            **options,
        )

    (expected, scores), (tokens, aux) = decode(theirs), decode(ours)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(aux["scores"], scores["scores"], rtol=1e-5, atol=1e-4)
    assert aux["scores"].shape == (4, beams) and aux["target_calls"].shape == (4,)
    if drafting == "itself":
        assert aux["accepted"].sum() > aux["drafted"].sum() / 2
    assert (aux["drafted"].sum() > 0) == (drafter is not None)


def test_the_best_alone_and_defaults(golden):
    """Settings of model, function and call rank as T5X ranks them; a key means nothing."""
    io, target, _ = golden
    function = functools.partial(
        decoding.beam_search, alpha=1.5, decode_rng=jax.random.PRNGKey(1), num_decodes=3
    )
    defaults = models.DecoderParams(num_decodes=2)
    module = interop.make_transformer(target.config)
    options = dict(decode_fn=function, default_decoder_params=defaults)
    theirs = models.EncoderDecoderModel(module, Ids, Ids, None, **options)

    def decode(model):
        return predict(model, target.params, io["encoder_input_tokens"], rng=jax.random.PRNGKey(2))

    (expected, scores), (tokens, aux) = decode(theirs), decode(speculative(target, **options))
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(aux["scores"], scores["scores"], rtol=1e-5, atol=1e-4)
    assert tokens.shape == (4, 16) and aux.keys() == {"scores"}


def test_what_gin_binds_is_known():
    config = """
from __gin__ import dynamic_registration
from t5x import decoding
from t5x import models

decoding.beam_search.alpha = 1.5
decoding.beam_search.num_decodes = 3
decoding.beam_search.eos_id = 9
models.EncoderDecoderModel.decode_fn = @decoding.beam_search
models.BaseTransformerModel.decode_fn = @narrow/decoding.beam_search
"""
    try:
        gin.parse_config(config)
        actual = gin.get_bindings("t5x.models.EncoderDecoderModel")["decode_fn"]
        scoped = gin.get_bindings("t5x.models.BaseTransformerModel")["decode_fn"]
        assert actual is not decoding.beam_search
        expected = {"alpha": 1.5, "max_decode_step": -1, "min_log_prob": -1e7}
        assert interop.read_decode_fn(actual) == (decoding.beam_search, expected)
        assert interop.read_decode_fn(functools.partial(actual, alpha=2.0))[1] == expected | {
            "alpha": 2.0
        }
        assert interop.read_decode_fn(decoding.beam_search)[1] == expected | {"alpha": 0.6}
        with pytest.raises(ValueError, match="decode_fn: got .*beam_search.*, outside of scopes"):
            interop.read_decode_fn(scoped)
    finally:
        gin.clear_config()


BAD = {
    "temperature": (
        dict(decoder_params={"temperature": 0.5}),
        "decoder_params: got temperature, expected only alpha",
    ),
    "threshold": (
        dict(decoder_params={"min_log_prob": -5.0}),
        "min_log_prob: got -5.0, expected none",
    ),
    "alpha": (
        dict(decoder_params={"alpha": -1.0}),
        "alpha: got -1.0, expected a finite number of at least 0",
    ),
    "length": (
        dict(decoder_params={"max_decode_len": 17}),
        "max_decode_len: got 17, expected an integer from 1 to 16",
    ),
    "ends": (dict(decoder_params={"eos_id": (1, 2)}), "eos_id: got 2 ids, expected one"),
    "no beams": (dict(num_decodes=0), "num_beams: got 0, expected an integer from 1"),
    "two keys": (
        dict(decoder_params={"decode_rng": jax.random.PRNGKey(1)}, rng=jax.random.PRNGKey(0)),
        "got decode_rng beside the argument rng",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_t5xs_search_does_not_take_is_rejected(case, golden):
    io, target, _ = golden
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        predict(
            speculative(target, decode_fn=decoding.beam_search),
            target.params,
            io["encoder_input_tokens"],
            **options,
        )


MODELS = {
    "verifier": (
        dict(verifier="token"),
        "verifier: got 'token' for beam search, expected 'block'",
    ),
    "lenience": (dict(lenience=0.5), "lenience: got 0.5 for beam search, expected None"),
    "scores": (
        dict(rescale_log_probs=False),
        "rescale_log_probs: got False for decode_fn, expected True",
    ),
    "policy": (
        dict(gamma=sd.Heuristic(3)),
        "gamma: got Heuristic.*, expected 'auto' or one integer",
    ),
    "gamma": (dict(gamma=-1), "gamma: got -1, expected an integer from 0"),
    "drafter": (
        dict(drafter=sd.RandomDrafter(128)),
        "drafter: got RandomDrafter .*, expected one that drafts for beams",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_search_are_rejected(case, golden):
    options, message = MODELS[case]
    with pytest.raises(ValueError, match=message):
        speculative(golden[1], decode_fn=decoding.beam_search, **options)
