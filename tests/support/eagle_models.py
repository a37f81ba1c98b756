"""Shared by the tests of EAGLE drafters and of their training."""

import functools

import jax
import numpy as np
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.models.eagle import EagleConfig, init_projections

V = 24


@functools.cache
def target():
    return noisy_copy(tiny_t5(0, V, emb_dim=24), 2.0)


@functools.cache
def model():
    return noisy_copy(target(), 0.1, 1)


@functools.cache
def reader():
    """Returns a drafting model that attends to the target's encoder output, and is never right."""
    return tiny_t5(3, V, num_encoder_layers=0, encoder_dim=24)


def eagle(scale: float, own=model) -> sd.EagleDrafter:
    """Returns a drafter for `target` with random projections of this scale."""
    return random_eagle(target(), own(), scale)


def random_eagle(target, model, scale: float = 0.3) -> sd.EagleDrafter:
    config = EagleConfig(target.config.emb_dim, model.config.emb_dim)
    rng, zeros = np.random.default_rng(0), init_projections(config)
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape, scale=scale), zeros)
    return sd.EagleDrafter(model, target, params)
