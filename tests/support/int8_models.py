"""Shared by the tests of quantize and quantize_command."""

from toy_models import tiny_t5

import specdec_jax as sd


def save_tiny(folder, **shape):
    sd.save(tiny_t5(1, **shape), folder, dtype="int8")
    return folder
