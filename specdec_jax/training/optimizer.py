"""The optimiser of training and its schedule."""

import functools

import jax
import jax.numpy as jnp
import optax


def learning_rate(config, step):
    """Returns the learning rate of the update after `step` updates: linear warm-up, constant,
    linear decay.

    `config` has `learning_rate`, `steps`, `warmup_steps` and `decay_steps`, as in `TrainConfig`.
    """
    warmup = step / config.warmup_steps if config.warmup_steps else 1.0
    decay = (config.steps - step) / config.decay_steps if config.decay_steps else 1.0
    return config.learning_rate * jnp.clip(jnp.minimum(warmup, decay), 0.0, 1.0)


def make_optimizer(config) -> optax.GradientTransformation:
    """Returns Muon for the matrices inside the layers, and Adam for embeddings, head, norms and
    position biases.

    In both, the step is multiplied by the root mean square of the array that it changes, as in
    Adafactor. T5 needs this: its queries start 1/√K smaller than the other weights, and steps of
    one size would soon saturate the attention, whose scores T5 does not scale down.
    """

    def matrices(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: optax.contrib.MuonDimensionNumbers() if _is_matrix(path) else None,
            params,
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            1.0,
            ns_steps=3,
            preconditioning="aol",
            consistent_rms=1.0,
            adam_b2=0.98,
            muon_weight_dimension_numbers=matrices,
        ),
        optax.scale_by_param_block_rms(),
        optax.scale_by_schedule(functools.partial(learning_rate, config)),
    )


def _is_matrix(path) -> bool:
    names = [key.key for key in path]
    return names[-1] == "kernel" and "logits_dense" not in names
