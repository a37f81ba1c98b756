"""Defines the losses of training, from examples and from a teacher, and one step of training."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from specdec_jax.models.family import FamilyModule
from specdec_jax.speculative import distributions
from specdec_jax.training.batches import PADDING, Batch, BucketedBatches

# Divergences `[...]` between the teacher's distribution p and the student's distribution q, given
# log p and log q `[..., V]`; all but the total variation are in nats. The forward divergence makes
# q cover p, the reverse one keeps q where p is large.


def forward_kl(log_p: Array, log_q: Array) -> Array:
    """Returns KL(p ‖ q) = Σ_v p(v) log(p(v) / q(v))."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl(log_p: Array, log_q: Array) -> Array:
    """Returns KL(q ‖ p)."""
    return forward_kl(log_q, log_p)


def jensen_shannon(log_p: Array, log_q: Array) -> Array:
    """Returns (KL(p ‖ m) + KL(q ‖ m)) / 2 with m = (p + q) / 2."""
    log_m = jnp.logaddexp(log_p, log_q) - math.log(2)
    return (forward_kl(log_p, log_m) + forward_kl(log_q, log_m)) / 2


def total_variation(log_p: Array, log_q: Array) -> Array:
    """Returns 1 − Σ_v min(p(v), q(v)), the paper's D_LK (lemma 3.3).

    It is the probability that a token drafted from q is rejected (theorem 3.5). Its mean over the
    target's own text is 1 − α (corollary 3.6), so to minimise it is to maximise α itself.
    """
    return 1 - jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


DIVERGENCES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
}


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised; hashable, so that it is static under jit.

    Attributes:
      model: the network that is trained.
      label_smoothing: mass of the uniform distribution in the cross-entropy's target.
      teacher: the network that is distilled, of the same kind, or None.
      distill_weight: w, the share of the divergence from the teacher.
      divergence: name of the divergence in `DIVERGENCES`.
      distill_temperature: temperature of the teacher's distribution in the divergence; the
        student's stays at 1. Below 1 the teacher's argmax counts more.
      start_token: id that every sequence of a decoder with an encoder begins with.
      masks: how many tokens after a random place of each target the network predicts from masks
        (`ParallelDrafter`); 0 for a model that predicts one after another.
      mask_token: id that is fed as a mask.
    """

    model: FamilyModule
    label_smoothing: float = 0.0
    teacher: FamilyModule | None = None
    distill_weight: float = 0.0
    divergence: str = "forward_kl"
    distill_temperature: float = 1.0
    start_token: int = 0
    masks: int = 0
    mask_token: int = 0


class Metrics(NamedTuple):
    """Sums over the target tokens of a batch, each `[]` float32, in nats.

    Attributes:
      loss: what is minimised.
      nll: negative log-likelihood of the reference.
      tokens: number of target tokens, EOS included.
    """

    loss: Array
    nll: Array
    tokens: Array


class TeacherAgreement(NamedTuple):
    """How well the student would draft for its teacher: sums over target tokens, `[]` float32.

    Attributes:
      acceptance: sum of Σ_v min(p(v), q(v)) at temperature 1; its mean is α there (corollary 3.6).
      agreement: number of tokens with the same argmax; its mean is α at temperature 0.
    """

    acceptance: Array
    agreement: Array


def replace_padding(ids: Array) -> Array:
    """Returns ids that a network can be fed: 0 where there is padding, which is masked."""
    return jnp.maximum(ids, 0)


def shift_right(targets: Array, start_token: int) -> Array:
    """Returns what a decoder with an encoder is fed: for each target the token before it."""
    before = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start_token)
    return replace_padding(before)


def hide_tokens(targets: Array, masks: int, key: Array | None) -> tuple[Array, Array]:
    """Returns where the decoder is fed a mask `[B, T]`, and the targets that then count.

    The targets of each row, which a prompt may precede, are cut at a random place. The token before
    the place is fed, so the first target after it is predicted as ever; the next `masks` targets
    are predicted from masks, and no later one counts. Validation, without a key, cuts every time at
    the same places.
    """
    key = jax.random.key(0) if key is None else key
    counted = targets >= 0
    lengths = jnp.sum(counted.astype(jnp.float32), axis=1, keepdims=True)
    starts = jnp.argmax(counted, axis=1, keepdims=True).astype(jnp.int32)
    cut = starts + (lengths * jax.random.uniform(key, lengths.shape)).astype(jnp.int32)
    places = jnp.arange(targets.shape[1])
    return places > cut, jnp.where(places <= cut + masks, targets, PADDING)


def list_arguments(batch: Batch, objective: Objective) -> tuple[Array, ...]:
    """Returns what a network is fed to predict the targets of a batch.

    The inputs, True at their tokens, and for each target the token before it; of a decoder-only
    model, whose inputs are these, the inputs alone.
    """
    inputs, targets = batch
    fed = replace_padding(inputs)
    if objective.model.config.decoder_only:
        return (fed,)
    return fed, inputs >= 0, shift_right(targets, objective.start_token)


def _compute_logits(
    params: dict,
    batch: Batch,
    objective: Objective,
    teacher_params: dict | None,
    dropout_key: Array | None = None,
    hidden: Array | None = None,
) -> tuple[Array, Array | None]:
    """Returns the student's logits `[B, T, V]` after prefixes of the targets, and the teacher's.

    Where `hidden [B, T]` the student is fed a mask; the teacher always sees the prefix.
    """
    teacher, config = objective.teacher, objective.model.config
    variables, arguments = {"params": teacher_params}, list_arguments(batch, objective)
    student_options, teacher_options = {}, {}
    if not config.decoder_only:
        encoded = None
        if teacher is not None:
            encoded = teacher.apply(variables, *arguments[:2], method="encode")
            encoded = jax.lax.stop_gradient(encoded)
        student_options = {"encoded": encoded if config.encoder_dim is not None else None}
        teacher_options = {"encoded": encoded}
    student_options |= {"deterministic": dropout_key is None}
    student_options |= {"rngs": {} if dropout_key is None else {"dropout": dropout_key}}
    seen = arguments
    if hidden is not None:
        seen = (*seen[:-1], jnp.where(hidden, objective.mask_token, seen[-1]))
    logits = objective.model.apply({"params": params}, *seen, **student_options)
    if teacher is None:
        return logits, None
    return logits, jax.lax.stop_gradient(teacher.apply(variables, *arguments, **teacher_options))


def sum_metrics(
    logits: Array, teacher_logits: Array | None, targets: Array, objective: Objective
) -> Metrics:
    """Returns sums over `targets [B, T]` of `logits [B, T, V]`; without a teacher no divergence."""
    weights = (targets >= 0).astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, replace_padding(targets)[..., None], axis=-1)
    nll = log_z - chosen[..., 0]
    smooth = log_z - jnp.mean(logits, axis=-1)
    loss = (1 - objective.label_smoothing) * nll + objective.label_smoothing * smooth
    if teacher_logits is not None:
        log_p = jax.nn.log_softmax(teacher_logits / objective.distill_temperature)
        divergence = DIVERGENCES[objective.divergence](log_p, logits - log_z[..., None])
        weight = objective.distill_weight
        # At 1 the gradient is not computed through a part that counts nothing: that of one logit a
        # token would be another array of the logits' size.
        loss = divergence if weight == 1 else (1 - weight) * loss + weight * divergence
    return Metrics(jnp.sum(loss * weights), jnp.sum(nll * weights), jnp.sum(weights))


def sum_agreement(logits: Array, teacher_logits: Array, targets: Array) -> TeacherAgreement:
    """Returns sums over `targets [B, T]`, of logits `[B, T, V]`."""
    accepted = jnp.sum(jnp.minimum(jax.nn.softmax(teacher_logits), jax.nn.softmax(logits)), axis=-1)
    agreeing = distributions.argmax(teacher_logits) == distributions.argmax(logits)
    return TeacherAgreement(
        jnp.sum(accepted, where=targets >= 0),
        jnp.sum(agreeing, where=targets >= 0, dtype=jnp.float32),
    )


def loss_fn(
    params: dict,
    batch: Batch,
    objective: Objective,
    teacher_params: dict | None = None,
    dropout_key: Array | None = None,
) -> tuple[Array, Metrics]:
    """Returns the mean loss of a target token, and the sums over the tokens.

    Per token the loss is (1 − w) · cross-entropy with label smoothing + w · D(p, q). Here p is the
    teacher's distribution at `distill_temperature`, q the student's distribution after the same
    prefix of the reference, and D the divergence (token level).

    For a decoder-only model the inputs in a batch are the tokens before the targets. No gradient
    flows to `teacher_params`, those of `objective.teacher`; without a key nothing is dropped.
    """
    hidden, counted = _hide(batch, objective, dropout_key)
    logits, teacher_logits = _compute_logits(
        params, batch, objective, teacher_params, dropout_key, hidden
    )
    metrics = sum_metrics(logits, teacher_logits, counted, objective)
    return metrics.loss / jnp.maximum(metrics.tokens, 1), metrics


@flax.struct.dataclass
class TrainState:
    """State of training.

    Attributes:
      params: parameters.
      opt_state: the optimiser's state.
      step: `[]`, number of steps done.
    """

    params: dict
    opt_state: optax.OptState
    step: Array

    @classmethod
    def begin(cls, params: dict, optimizer: optax.GradientTransformation) -> "TrainState":
        """Returns the state before the first step."""
        return cls(params, optimizer.init(params), jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames=("objective", "optimizer", "loss"), donate_argnums=0)
def train_step(
    state: TrainState,
    batch: Batch,
    teacher_params: dict | None,
    seed: int,
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    loss: Callable[..., tuple[Array, Metrics]] = loss_fn,
) -> tuple[TrainState, Metrics]:
    """Takes one optimiser step; returns the new state and the metrics before it.

    `teacher_params` is None without a teacher. `loss` computes what is minimised, as `loss_fn`.
    """
    key = None
    if objective.model.config.dropout_rate > 0 or objective.masks:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
    gradient = jax.value_and_grad(loss, has_aux=True)
    (_, metrics), grads = gradient(state.params, batch, objective, teacher_params, key)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer step's power
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1), metrics


def assess(
    params: dict, batch: Batch, objective: Objective, teacher_params: dict | None = None
) -> tuple[Metrics, TeacherAgreement | None]:
    """Returns what `evaluate` sums up: metrics, and agreement with the teacher if there is one."""
    hidden, counted = _hide(batch, objective, None)
    logits, teacher_logits = _compute_logits(
        params, batch, objective, teacher_params, hidden=hidden
    )
    agreement = None
    if teacher_logits is not None:
        agreement = sum_agreement(logits, teacher_logits, counted)
    return sum_metrics(logits, teacher_logits, counted, objective), agreement


def _hide(batch: Batch, objective: Objective, key: Array | None) -> tuple[Array | None, Array]:
    """Returns what `hide_tokens` does; without masks nothing is hidden and all targets count."""
    if not objective.masks:
        return None, batch[1]
    return hide_tokens(batch[1], objective.masks, key)


@functools.cache
def _compile(assess: Callable) -> Callable:
    return jax.jit(assess, static_argnums=2)


def evaluate(
    params: dict,
    batches: BucketedBatches,
    objective: Objective,
    teacher_params: dict | None = None,
    assess: Callable = assess,
) -> Any:
    """Returns the sums of what `assess` returns over one epoch of `batches`.

    Dropout and label smoothing are off.
    """
    objective = dataclasses.replace(objective, label_smoothing=0.0)
    epoch = (batches[step] for step in range(batches.per_epoch))
    sums = [_compile(assess)(params, batch, objective, teacher_params) for batch in epoch]
    return jax.tree.map(lambda *values: np.sum(values), *jax.device_get(sums))
