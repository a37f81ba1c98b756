"""Says what a run of `specdec distill` needs before it begins, and what came of it at its end."""

import json
import math
import pathlib
import shlex
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import parameter_count
from specdec_jax.training import train
from specdec_jax.training.config import TrainConfig
from specdec_jax.training.run_folder import Checkpoints
from specdec_jax.training.sequence_distillation import Job

VALIDATION = "validation.txt"  # in the run's folder: the sources on which to benchmark
_FIGURES = ("acceptance", "agreement")
# Shares of the speed of one large matrix product that training and decoding came to on two CPU
# cores.
_TRAINING, _DECODING = 0.5, 0.2


class Settings(Protocol):
    """The part of `DistillConfig` that is read here; frozen, hence the properties."""

    @property
    def target(self) -> str | None: ...
    @property
    def output_dir(self) -> str | None: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def select(self) -> str: ...


# The start.


def needs(
    config: Settings, training: TrainConfig, target: ModelConfig, jobs: Sequence[Job]
) -> list[str]:
    """Returns lines on what the rest of a run takes: outputs, steps, disk, and about how long.

    Args:
      config: the settings of the run.
      training: those of its second stage.
      target: the target's configuration.
      jobs: the files of outputs.
    """
    missing = [plan for plan in jobs if not plan.path.exists()]
    outputs = sum(len(plan.texts) * plan.per_source for plan in missing)
    steps = training.steps - _steps_done(pathlib.Path(training.output_dir))
    sizes = parameter_count(target), parameter_count(training.model)
    decoding, learning = _operations(training, missing, jobs, steps, *sizes)
    speed = _product_speed(train.computing(training, training.model).dtype)
    seconds = decoding / speed / _DECODING, learning / speed / _TRAINING
    return [
        (
            f"needs {outputs:,} outputs of the target, {sizes[0]:,} parameters, each of at most"
            f" {config.max_new_tokens} tokens; then {steps:,} steps of {training.batch_tokens:,}"
            f" tokens for a drafter of {sizes[1]:,} parameters;"
            f" {train.saved_bytes(training) / 1e6:,.0f} MB in {config.output_dir}"
        ),
        (
            f"takes about {_duration(sum(seconds))} here (outputs {_duration(seconds[0])}, training"
            f" {_duration(seconds[1])}), by the speed of a matrix product; compiling comes on top"
        ),
    ]


def _steps_done(output: pathlib.Path) -> int:
    folders = output.joinpath("checkpoints").glob("*")
    return max((int(path.name) for path in folders if path.name.isdecimal()), default=0)


def _operations(
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
    tokens = sum(sum(map(len, plan.sources)) * plan.per_source for plan in missing)
    validated = sum(
        sum(map(len, plan.sources)) * plan.per_source
        for plan in jobs
        if "validation" in plan.path.name
    )
    validations = math.ceil(steps / training.evaluate_every) * validated
    return 2 * target * tokens, 2 * (
        (3 * drafter + target) * steps * training.batch_tokens + (drafter + target) * validations
    )


def _product_speed(dtype: str) -> float:
    """Returns the operations a second of one large matrix product, the best of three."""
    size = 1024 if jax.default_backend() == "cpu" else 4096
    matrix, product, seconds = jnp.ones((size, size), dtype), jax.jit(jnp.dot), []
    for _ in range(4):  # the first compiles
        begin = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds[1:])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# The end.


def outcome(config: Settings) -> list[str]:
    """Returns the last lines of a finished run.

    They name the step that was kept, compare it with the first, and give the next command.
    """
    output = pathlib.Path(str(config.output_dir))
    records = [
        json.loads(line) for line in (output / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    validations = {record["step"]: record for record in records if "validation_loss" in record}
    kept = Checkpoints(output.absolute(), select=config.select).best.best_step()
    lines = _comparison(validations, kept, config.select)
    how = [] if config.greedy else ["--temperature=1"]
    command = [
        "specdec",
        "benchmark",
        f"--target={config.target}",
        f"--drafter={output / 'model'}",
        *how,
    ]
    return [
        *lines,
        f"next: {shlex.join([*command, f'--input_file={output / VALIDATION}', '--limit=100'])}",
    ]


def _comparison(validations: dict[int, dict[str, Any]], kept: int | None, select: str) -> list[str]:
    before, after = validations.get(0), validations.get(-1 if kept is None else kept)
    if after is None:
        return ["kept: the newest parameters, since no validation loss was finite"]
    last = max(validations)
    if before is None:
        shown = ", ".join(f"{name} {after[name]:.4f}" for name in _FIGURES)
        return [
            f"kept: step {kept} of {last}, the best by {select}: {shown} on the target's outputs"
            " for other sources"
        ]
    shown = ", ".join(f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in _FIGURES)
    if kept == 0:
        return [f"kept: the drafter as it was: by {select} no step was better ({shown})"]
    lines = [f"kept: step {kept} of {last}, the best by {select}: {shown} (before -> after)"]
    for name in _FIGURES:
        if after[name] < before[name]:
            other = f"; --select={name} keeps the step that is best by it" if select != name else ""
            lines.append(
                f"worse than it began: {name} fell by {before[name] - after[name]:.4f}{other}"
            )
    return lines
