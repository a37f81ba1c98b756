"""The BART-like models and numbers that `scripts/write_golden_bart.py` wrote."""

import functools

import numpy as np
from golden_models import GOLDEN

import specdec_jax as sd
from specdec_jax.models import parameters

NAMES = ("marian", "bart", "mbart", "pegasus", "m2m_100", "marian_separate")
VARIANTS = ("bart_untied", "mbart_25", "pegasus_table")  # of some of these kinds


@functools.cache
def load(name):
    return sd.load(GOLDEN / "hf_bart" / name, "float32", say=lambda line: None)


@functools.cache
def golden(name):
    return dict(np.load(GOLDEN / "hf_bart" / name / "io.npz"))


@functools.cache
def draft(name):
    """A smaller model of the same kind, which agrees with the target now and then."""
    target = load(name)
    config = target.config.replace(num_decoder_layers=1, num_encoder_layers=1)
    shapes, params = parameters.parameter_shapes(config), parameters.flatten(target.params)
    tree = parameters.unflatten({key: params[key] for key in shapes})
    ids = dict(start_token=target.start_token, eos_ids=target.eos_ids)
    return sd.ModelDrafter(sd.LanguageModel(config, tree, **ids))


def decode(name, **options):
    """Returns new tokens, −1 after the EOS."""
    numbers = golden(name)
    rows = [row[:n].tolist() for row, n in zip(numbers["inputs"], numbers["input_lengths"])]
    result = sd.generate(load(name), rows, **options)
    made = np.full_like(numbers["greedy"], -1)
    for row, tokens, count in zip(made, result.tokens, result.lengths):
        row[:count] = tokens[:count]
    return made


def plain_options(name):
    forbidden = load(name).generation_config.bad_words_ids or ()
    pads = tuple(token for (token,) in forbidden)
    sampling = sd.SamplingConfig(forbidden_tokens=pads, no_repeat_ngram=2)
    return dict(generation_config=None, sampling=sampling, max_new_tokens=14)
