"""What training minimises (cross-entropy with label smoothing, token-level distillation), and one step of it."""

import dataclasses
import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax import data
from specdec_jax.models.t5 import T5


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised; hashable, so static under jit.

    Attributes:
      model: the network that is trained.
      label_smoothing: mass of the uniform law in the cross-entropy's target.
      teacher: the network that is distilled, or None.
      distill_weight: w, share of KL(teacher ‖ student).
    """

    model: T5
    label_smoothing: float = 0.0
    teacher: T5 | None = None
    distill_weight: float = 0.0


class Metrics(NamedTuple):
    """Sums over the target pieces of a batch, each `[]` float32, in nats.

    Attributes:
      loss: of what is minimised.
      nll: negative log-likelihood of the reference.
      pieces: number of target pieces, EOS included.
    """

    loss: jax.Array
    nll: jax.Array
    pieces: jax.Array


def loss_fn(params, batch, objective: Objective, teacher_params=None, dropout_key=None) -> tuple[jax.Array, Metrics]:
    """Mean loss of a target piece, and the sums.

    Per piece: (1 − w) · cross-entropy with label smoothing + w · Σ_v p(v) log(p(v) / q(v)), with p the law of the
    teacher and q that of the student on the same prefix of the reference (forward KL, token level).

    Args:
      batch: (inputs `[B, L]`, targets `[B, T]`), int32, 0 is padding.
      teacher_params: of `objective.teacher`; no gradient flows to them.
      dropout_key: None switches dropout off.
    """
    inputs, targets = batch
    arguments = (inputs, inputs > 0, jnp.pad(targets[:, :-1], ((0, 0), (1, 0))))
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    logits = objective.model.apply({"params": params}, *arguments, deterministic=dropout_key is None, rngs=rngs)
    weights = (targets > 0).astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nll = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    smooth = log_z - jnp.mean(logits, axis=-1)
    loss = (1 - objective.label_smoothing) * nll + objective.label_smoothing * smooth
    if objective.teacher is not None:
        teacher_logits = jax.lax.stop_gradient(objective.teacher.apply({"params": teacher_params}, *arguments))
        log_p = jax.nn.log_softmax(teacher_logits)
        divergence = jnp.sum(jnp.exp(log_p) * (log_p - (logits - log_z[..., None])), axis=-1)
        loss = (1 - objective.distill_weight) * loss + objective.distill_weight * divergence
    metrics = Metrics(jnp.sum(loss * weights), jnp.sum(nll * weights), jnp.sum(weights))
    return metrics.loss / jnp.maximum(metrics.pieces, 1), metrics


@flax.struct.dataclass
class TrainState:
    """Parameters, optimiser state and step count `[]`."""

    params: dict
    opt_state: optax.OptState
    step: jax.Array


@functools.partial(jax.jit, static_argnames=("objective", "optimizer", "loss"), donate_argnums=0)
def train_step(state: TrainState, batch, teacher_params, seed, *, objective, optimizer, loss=loss_fn):
    """One optimiser step; returns the new state and `Metrics`. `teacher_params` is None without a teacher.

    `loss` says what is minimised, given `objective`, which for `loss_fn` is an `Objective`.
    """
    key = None
    if objective.model.config.dropout_rate > 0:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
    gradient = jax.value_and_grad(loss, has_aux=True)
    (_, metrics), grads = gradient(state.params, batch, objective, teacher_params, key)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics


@functools.partial(jax.jit, static_argnames=("objective", "loss"))
def _evaluate(params, batch, teacher_params, *, objective, loss):
    return loss(params, batch, objective, teacher_params)[1]


def evaluate(params, batches: data.BucketedBatches, objective, teacher_params=None, loss=loss_fn) -> Metrics:
    """Sums over one epoch of `batches`, without dropout and label smoothing; arguments as of `train_step`."""
    objective = dataclasses.replace(objective, label_smoothing=0.0)
    epoch = (batches[step] for step in range(batches.per_epoch))
    sums = [_evaluate(params, (b.inputs, b.targets), teacher_params, objective=objective, loss=loss) for b in epoch]
    return Metrics(*np.sum(jax.device_get(sums), axis=0))
