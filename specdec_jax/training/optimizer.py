"""The optimiser of training and its schedule."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specdec_jax.training.config import RunConfig


def learning_rate(config: RunConfig, step: jax.typing.ArrayLike) -> jax.Array:
    """Returns the rate after `step` updates: linear warm-up, constant, linear decay."""
    warmup = step / config.warmup_steps if config.warmup_steps else 1.0
    decay = (config.steps - step) / config.decay_steps if config.decay_steps else 1.0
    return config.learning_rate * jnp.clip(jnp.minimum(warmup, decay), 0.0, 1.0)


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the layers, Adam for all other parameters.

    In both, the step is multiplied by the root mean square of the array that it changes, as in
    Adafactor. T5 needs this: its queries start 1/√K smaller than the other weights, and steps of
    one size would soon saturate the attention, whose scores T5 does not scale down.
    """
    muon = optax.contrib.muon(
        1.0,
        ns_steps=3,
        preconditioning="aol",
        consistent_rms=1.0,
        adam_b2=0.98,
        muon_weight_dimension_numbers=_choose_matrices,
    )
    schedule = optax.scale_by_schedule(functools.partial(learning_rate, config))
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, muon, optax.scale_by_param_block_rms(), schedule)


def make_online_optimizer(rate: float) -> optax.GradientTransformation:
    """Returns Adam with a constant rate, for a trained drafter that goes on learning.

    As in `make_optimizer`, the step is multiplied by the root mean square of each array: without
    it a rate that moves the matrices at all destroys the scales of the norms.
    """
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.scale_by_param_block_rms(),
        optax.scale(-rate),
    )


def _choose_matrices(params: dict) -> dict:
    """Returns a tree with Muon's dimensions for each matrix inside a layer, else None."""

    def choose(path: tuple[Any, ...], leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = [key.key for key in path]
        is_matrix = names[-1] == "kernel" and "logits_dense" not in names
        return optax.contrib.MuonDimensionNumbers() if is_matrix else None

    return jax.tree_util.tree_map_with_path(choose, params)
