"""Shared by the tests of gpt and gpt_commands."""

import dataclasses
import functools

import numpy as np
from gpt_models import FOLDER

import specdec_jax as sd
from specdec_jax.checkpoints import loader

IO = dict(np.load(FOLDER / "io.npz"))
PROMPTS = [row[:length].tolist() for row, length in zip(IO["inputs"], IO["input_lengths"])]
TINY = sd.GPTConfig(24, 16, 2, 2, 32, num_positions=40)


@functools.cache
def golden():
    return loader.load(FOLDER, "float32")


@functools.cache
def tiny(seed=0, **shape):
    return sd.LanguageModel.random(dataclasses.replace(TINY, **shape), seed, eos_ids=(23,))


def decode(model, prompts, drafter=None, **options):
    """Decodes prompts; lists are filled up to four rows, so that few shapes compile."""
    if isinstance(prompts, list):
        prompts = prompts + [None] * (4 - len(prompts))
    return sd.generate(
        model,
        prompts,
        drafter=drafter,
        **{"gamma": 3, "max_new_tokens": 12, "eos_ids": ()} | options,
    )


def decode_golden(prompts, drafter=None, **options):
    """Decodes prompts with the golden model, in the shapes of the golden batch."""
    return decode(golden(), [*prompts, PROMPTS[0]], drafter, **{"max_new_tokens": 16} | options)
