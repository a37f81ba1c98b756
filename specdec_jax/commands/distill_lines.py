"""Makes the lines that `specdec distill` prints: what it needs, and at the end the outcome."""

import json
import math
import shlex
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.files import mirrors
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import parameter_count
from specdec_jax.training import train
from specdec_jax.training.config import TrainConfig
from specdec_jax.training.run_folder import Checkpoints
from specdec_jax.training.sequence_distillation import DistillConfig, Job

VALIDATION = "validation.txt"  # in the run's folder: the sources on which to benchmark
_FIGURES = ("acceptance", "agreement")
# Shares of the speed of one large matrix product that training and decoding came to on two CPU
# cores.
_TRAINING, _DECODING = 0.5, 0.2


# The start.


def describe_needs(
    config: DistillConfig, training: TrainConfig, target: ModelConfig, jobs: Sequence[Job]
) -> list[str]:
    """Returns lines on what the rest of a run takes: outputs, steps, disk, and about how long.

    `training` are the settings of the run's second stage, `jobs` the files of outputs.
    """
    missing = [job for job in jobs if not job.path.exists()]
    outputs = sum(len(job.texts) * job.per_source for job in missing)
    saved = (mirrors.find_folder(training.output_dir) / "checkpoints").glob("*")
    done = max((int(path.name) for path in saved if path.name.isdecimal()), default=0)
    steps = training.steps - done
    sizes = parameter_count(target), parameter_count(training.model)
    decoding, learning = _count_operations(training, missing, jobs, steps, *sizes)
    speed = _measure_product_speed(train.set_dtype(training, training.model).dtype)
    seconds = decoding / speed / _DECODING, learning / speed / _TRAINING
    megabytes = train.count_saved_bytes(training) / 1e6
    parts = f"outputs {_format_duration(seconds[0])}, training {_format_duration(seconds[1])}"
    return [
        (
            f"needs {outputs:,} outputs of the target, {sizes[0]:,} parameters, each of at most"
            f" {config.max_new_tokens} tokens; then {steps:,} steps of {training.batch_tokens:,}"
            f" tokens for a drafter of {sizes[1]:,} parameters;"
            f" {megabytes:,.0f} MB in {config.output_dir}"
        ),
        (
            f"takes about {_format_duration(sum(seconds))} here ({parts}),"
            " by the speed of a matrix product; compiling comes on top"
        ),
    ]


def _count_operations(
    training: TrainConfig,
    missing: Sequence[Job],
    jobs: Sequence[Job],
    steps: int,
    target: int,
    drafter: int,
) -> tuple[float, float]:
    """Returns the operations of products in both stages, two for each parameter and token.

    An output counts as as long as its source. A step differentiates the drafter, which takes three
    times its pass, and passes the target; a validation passes both.
    """
    tokens = [sum(map(len, job.sources)) * job.per_source for job in missing]
    validation = [job for job in jobs if "validation" in job.path.name]
    validated = sum(sum(map(len, job.sources)) * job.per_source for job in validation)
    validations = math.ceil(steps / training.evaluate_every) * validated
    trained = (3 * drafter + target) * steps * training.batch_tokens
    return 2 * target * sum(tokens), 2 * (trained + (drafter + target) * validations)


def _measure_product_speed(dtype: str) -> float:
    """Returns the operations a second of one large matrix product, the best of three."""
    size = 1024 if jax.default_backend() == "cpu" else 4096
    matrix, product, seconds = jnp.ones((size, size), dtype), jax.jit(jnp.dot), []
    for _ in range(4):  # the first compiles
        begin = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds[1:])


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# The end.


def describe_outcome(config: DistillConfig) -> list[str]:
    """Returns the last lines of a finished run.

    They name the step that was kept, compare it with the first, and give the next command.
    """
    output = mirrors.find_folder(config.output_dir)
    log = (output / "log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, log) if "validation_loss" in record]
    validations = {record["step"]: record for record in records}
    best = Checkpoints(output, select=config.select).best
    kept = best.best_step()
    after = None if kept is None else best.metrics(kept)
    model, sources = (
        mirrors.name_inside(config.output_dir, name) for name in ("model", VALIDATION)
    )
    drafter = f"{'parallel:' * bool(config.masks)}{model}"
    command = ["specdec", "benchmark", f"--target={config.target}", f"--drafter={drafter}"]
    command += [] if config.greedy else ["--temperature=1"]
    languages = {name: getattr(config, name) for name in ("source_language", "target_language")}
    command += [f"--{name}={code}" for name, code in languages.items() if code]
    command += [f"--input_file={sources}", "--limit=100"]
    return [*_compare(validations, kept, after, config.select), f"next: {shlex.join(command)}"]


def _compare(
    validations: dict[int, dict[str, Any]], kept: int | None, after: Any, select: str
) -> list[str]:
    """Returns lines on the step that was kept, if one was, which has the figures `after`.

    A kill may have taken it from the log.
    """
    before = validations.get(0)
    if kept is None:
        return ["kept: the newest parameters, since no validation loss was finite"]
    best = f"kept: step {kept} of {max([kept, *validations])}, the best by {select}"
    if before is None:
        shown = ", ".join(f"{name} {after[name]:.4f}" for name in _FIGURES)
        return [f"{best}: {shown} on the target's outputs for other sources"]
    shown = ", ".join(f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in _FIGURES)
    if kept == 0:
        return [f"kept: the drafter as it was: by {select} no step was better ({shown})"]
    lines = [f"{best}: {shown} (before -> after)"]
    for name in _FIGURES:
        if after[name] < before[name]:
            other = f"; --select={name} keeps the step that is best by it" if select != name else ""
            fall = before[name] - after[name]
            lines.append(f"worse than it began: {name} fell by {fall:.4f}{other}")
    return lines
