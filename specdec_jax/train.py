"""Training of encoder–decoder pairs: loss, optimiser, resumable loop."""

import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from specdec_jax import data
from specdec_jax.models.t5 import T5, T5Config


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
      model: shape of the network; `vocab_size` must not be below the vocabulary's.
      train_files, validation_files: TSV files (source, tab, target), gzip or not.
      vocabulary: path of a SentencePiece model; trained on the train split and written there where absent.
      vocabulary_size: pieces of a vocabulary that is trained.
      output_dir: checkpoints, the log and the final model go here; an existing run in it is resumed.
      steps: optimiser steps in all.
      warmup_steps, decay_steps: linear warm-up at the start, linear decay to zero at the end; constant between.
      learning_rate: of Muon's matrices (consistent root-mean-square 0.2) and of Adam's rest.
      batch_tokens: padded target pieces of a batch.
      buckets: padded lengths; longer pairs are left out and counted.
      label_smoothing: mass spread over the vocabulary.
      save_every, evaluate_every: steps between checkpoints and validation losses.
      dtype: of the computation; None: float32 on a CPU, bfloat16 on an accelerator. Parameters stay float32.
    """

    model: T5Config
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    vocabulary: str
    output_dir: str
    vocabulary_size: int = 6144
    steps: int = 2000
    warmup_steps: int = 100
    decay_steps: int = 500
    learning_rate: float = 4e-3
    batch_tokens: int = 3072
    buckets: tuple[int, ...] = (8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
    label_smoothing: float = 0.1
    seed: int = 0
    save_every: int = 100
    evaluate_every: int = 200
    dtype: str | None = None


@flax.struct.dataclass
class TrainState:
    """Parameters, optimiser state and step count `[]`."""

    params: dict
    opt_state: optax.OptState
    step: jax.Array


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Muon on the matrices inside the layers, Adam on embeddings, head, norms and position biases."""
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, 1.0, config.warmup_steps),
            optax.constant_schedule(1.0),
            optax.linear_schedule(1.0, 0.0, config.decay_steps),
        ],
        [config.warmup_steps, config.steps - config.decay_steps],
    )
    matrices = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.contrib.MuonDimensionNumbers() if _is_matrix(path) else None, params
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            lambda step: config.learning_rate * schedule(step),
            ns_steps=3,
            preconditioning="aol",
            consistent_rms=0.2,
            adam_b2=0.98,
            adam_learning_rate=lambda step: config.learning_rate * schedule(step),
            muon_weight_dimension_numbers=matrices,
        ),
    )


def _is_matrix(path) -> bool:
    names = [key.key for key in path]
    return names[-1] == "kernel" and "logits_dense" not in names


def loss_fn(params, model: T5, batch, label_smoothing: float):
    """Summed cross-entropy with label smoothing, and (sum of negative log-likelihood, number of target pieces)."""
    inputs, targets = batch
    decoder_tokens = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    logits = model.apply({"params": params}, inputs, inputs > 0, decoder_tokens)
    weights = (targets > 0).astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nll = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    smooth = log_z - jnp.mean(logits, axis=-1)
    loss = (1 - label_smoothing) * nll + label_smoothing * smooth
    count = jnp.sum(weights)
    return jnp.sum(loss * weights) / jnp.maximum(count, 1), (jnp.sum(nll * weights), count)


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "label_smoothing"), donate_argnums=0)
def train_step(state: TrainState, batch, *, model, optimizer, label_smoothing):
    """One optimiser step; returns the new state and (summed negative log-likelihood, pieces)."""
    (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, model, batch, label_smoothing)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics


def fit(config: TrainConfig, progress: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)):
    """Trains, or goes on where an earlier run into `output_dir` was interrupted; returns the final parameters."""
    output = pathlib.Path(config.output_dir).absolute()
    output.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary(config)
    model = T5(dataclasses.replace(config.model, dtype=config.dtype or config.model.dtype))
    batches = data.BucketedBatches(
        _tokenize(vocabulary, config.train_files), config.buckets, config.batch_tokens, config.seed
    )
    validation = data.BucketedBatches(_tokenize(vocabulary, config.validation_files), config.buckets, config.batch_tokens)
    optimizer = make_optimizer(config)
    dummy = jnp.ones((1, 4), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(config.seed), dummy, dummy > 0, dummy)["params"]
    state = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    manager = ocp.CheckpointManager(output / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2))
    if manager.latest_step() is not None:
        state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
        progress(f"resumed at step {int(state.step)}")
    start, window = int(state.step), []
    progress(f"{batches.per_epoch} batches an epoch, {batches.dropped} pairs left out, {count(params)} parameters")
    clock = time.perf_counter()
    for step in range(start, config.steps):
        batch = batches[step]
        state, metrics = train_step(
            state, (batch.inputs, batch.targets), model=model, optimizer=optimizer, label_smoothing=config.label_smoothing
        )
        window.append(metrics)
        done = step + 1
        if done % 20 == 0:
            nll, pieces = np.sum(jax.device_get(window), axis=0)
            seconds, clock, window = time.perf_counter() - clock, time.perf_counter(), []
            record = {"step": done, "loss": float(nll / pieces), "pieces_per_second": float(pieces / seconds)}
            progress(json.dumps(record))
        if done % config.evaluate_every == 0 or done == config.steps:
            progress(json.dumps({"step": done, "validation_loss": evaluate(model, state.params, validation)}))
        if done % config.save_every == 0 or done == config.steps:
            manager.save(done, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    return state.params


def count(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@functools.partial(jax.jit, static_argnames="model")
def _evaluate(params, batch, *, model):
    return loss_fn(params, model, batch, 0.0)[1]


def evaluate(model: T5, params, batches: data.BucketedBatches) -> float:
    """Mean negative log-likelihood per target piece, in nats."""
    totals = [_evaluate(params, (b.inputs, b.targets), model=model) for b in map(batches.__getitem__, range(batches.per_epoch))]
    nll, pieces = np.sum(jax.device_get(totals), axis=0)
    return float(nll / pieces)


def _tokenize(vocabulary, files):
    return [
        tuple(vocabulary.encode(text) + [data.EOS_ID] for text in pair) for pair in data.read_pairs(files)
    ]


def _vocabulary(config: TrainConfig):
    path = pathlib.Path(config.vocabulary)
    if not path.exists():
        texts = (text for pair in data.read_pairs(config.train_files) for text in pair)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.SentencePieceVocabulary.train(texts, config.vocabulary_size).model)
    return data.SentencePieceVocabulary.load(path)
