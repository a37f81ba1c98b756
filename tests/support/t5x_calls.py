"""Calls T5X's models and this package's in the place of them; imports T5X."""

import functools

import jax
import numpy as np
import pytest

from specdec_jax.interop import t5x as interop
from specdec_jax.models.t5 import T5Config

STEPS = 16


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    """Lets T5X combine numbers of several dtypes, as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Ids:
    """As much of a seqio vocabulary as decoding asks for."""

    eos_id, vocab_size = 1, 128


def speculative(target, **options) -> interop.SpeculativeEncoderDecoderModel:
    return interop.SpeculativeEncoderDecoderModel(
        interop.make_transformer(target.config), Ids, Ids, None, **options
    )


def predict(model, params, inputs, prompts=None, rng=None, **options):
    """`predict_batch_with_aux` as T5X calls it: traced."""
    batch = dict(
        encoder_input_tokens=inputs,
        decoder_input_tokens=np.zeros((len(inputs), STEPS), np.int32)
        if prompts is None
        else prompts,
    )
    call = functools.partial(model.predict_batch_with_aux, **options)
    return jax.tree.map(
        np.asarray, jax.jit(lambda params, batch, rng: call(params, batch, rng))(params, batch, rng)
    )


def tiny_module():
    """T5X's module of the golden checkpoint; for gin files."""
    return interop.make_transformer(
        T5Config(
            vocab_size=128,
            emb_dim=32,
            num_heads=2,
            head_dim=16,
            num_encoder_layers=2,
            num_decoder_layers=2,
            mlp_dim=64,
            dtype="float32",
        )
    )


def configured(model=None):
    """The model that gin binds."""
    return model
