"""What a training run keeps and shows: settings, checkpoints, log, progress, and late signals."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from specdec_jax.files import places, reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.progress import Progress
from specdec_jax.files.reading import mismatch_error
from specdec_jax.files.writing import name_errors, write_file
from specdec_jax.models.families import describe
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.training.config import RunConfig, TrainConfig
from specdec_jax.training.losses import TrainState

# The most bytes that a checkpoint has beside its arrays.
_OVERHEAD = 2**20


class Checkpoints:
    """The two newest states, and the parameters that did best on the validation files.

    Saving is synchronous, because the next step donates the buffers that would still be written.

    Attributes:
      measured: hashes of what decides the figures on the validation files, by name: parameters are
        only compared with those for which all of them were the same.
    """

    measured: Mapping[str, str] = {}

    def __init__(self, output: pathlib.Path, resume: bool = False, select: str = "loss"):
        """Opens the checkpoints in a run's folder.

        With `resume`, what a killed process left half written is removed. `select` is what the best
        is chosen by: the lowest "loss", or the highest "acceptance" or "agreement".
        """
        self.select = select
        shared = dict(enable_async_checkpointing=False, cleanup_tmp_directories=resume)
        newest = ocp.CheckpointManagerOptions(max_to_keep=2, **shared)
        score = dict(best_fn=self._score, best_mode="min")
        best = ocp.CheckpointManagerOptions(max_to_keep=1, **score, **shared)
        for folder in ("checkpoints", "best"):
            (output / folder).mkdir(parents=True, exist_ok=True)
        self.newest = ocp.CheckpointManager(output / "checkpoints", options=newest)
        self.best = ocp.CheckpointManager(output / "best", options=best)
        if resume and self.step is None:
            # They are from a run that was killed before it saved a state, perhaps with other
            # training files.
            for step in self.best.all_steps():
                self.best.delete(step)

    @property
    def step(self) -> int | None:
        """The step of the newest state; None before one is saved."""
        return self.newest.latest_step()

    def _score(self, metrics: Mapping[str, Any]) -> float:
        """Returns the figure to choose by, lower is better.

        It is inf where another one was chosen by, or one that means something else.
        """
        if any(metrics.get(name, value) != value for name, value in self.measured.items()):
            return math.inf
        loss = self.select == "loss"
        name, sign = ("validation_loss", 1) if loss else (self.select, -1)
        return sign * metrics[name] if name in metrics else math.inf

    def restore(self, state: TrainState) -> TrainState:
        """Returns the newest saved state; `state` gives shapes and dtypes."""
        try:
            return self.newest.restore(self.step, args=ocp.args.StandardRestore(state))
        except (ValueError, KeyError, TypeError) as error:
            folder = self.newest.directory / str(self.step)
            raise mismatch_error(
                folder, "a checkpoint of another model", f"that of the settings: {error}"
            ) from error

    def restore_best(self, state: TrainState) -> dict:
        """Returns the best parameters, the newest if none are kept; `state` gives shapes."""
        step = self.best.best_step()
        if step is None:
            return self.restore(state).params
        return self.best.restore(step, args=ocp.args.StandardRestore(state.params))

    def keep_best(self, step: int, params: dict, loss: float, **more: float) -> bool:
        """Keeps `params` if they are the best so far by the loss, or a figure in `more`.

        Parameters whose loss is not finite are never kept. Returns whether these were.
        """
        if not math.isfinite(loss):
            return False
        metrics = {"validation_loss": loss, **more, **self.measured}
        best = self.best.best_step()
        if best is not None and self._score(self.best.metrics(best)) <= self._score(metrics):
            return False
        if step in self.best.all_steps():  # taken before the run was resumed, under other settings
            self.best.delete(step)
        # `force`: in a resumed run the step may be smaller than that of the best parameters so far.
        _save(self.best, step, params, metrics=metrics, force=True)
        return True

    def keep_newest(self, step: int, state: TrainState) -> None:
        """Saves the state of a step."""
        _save(self.newest, step, state)


def _save(manager: ocp.CheckpointManager, step: int, tree: PyTree, **options: Any) -> None:
    """Saves a checkpoint.

    Raises:
      OSError: with the folder's name. A full disk is noticed before Orbax begins, since later its
        threads and TensorStore's would each print a traceback.
    """
    folder = pathlib.Path(manager.directory)
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) + _OVERHEAD
    free = shutil.disk_usage(folder).free
    if free < needed:
        sizes = f"({free / 1e6:,.1f} MB free, {needed / 1e6:,.1f} MB needed)"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} {sizes}", str(folder))
    with name_errors(folder):
        manager.save(step, args=ocp.args.StandardSave(tree), **options)


def list_changed_settings(
    config: RunConfig, output: pathlib.Path, step: int | None, fixed: Callable[[dict], dict]
) -> list[str]:
    """Returns a line for each setting that differs from the run that is resumed at `step`.

    `fixed` picks from all settings those that must not differ.

    Raises:
      ValueError: one of those differs, or `steps` is below `step`.
    """
    path, settings = output / "config.json", _describe_settings(config)
    if step is None:
        return []
    if step > config.steps:
        expected = f"at least the {step} steps that the run has saved"
        raise ValueError(f"steps: got {config.steps}, expected {expected}")
    before = settings | (reading.read_json(path) if path.exists() else {})
    for name, value in fixed(settings).items():
        if fixed(before)[name] != value:
            expected = f"that of the run in {config.output_dir}: {before[name]}"
            raise ValueError(f"{name}: got {settings[name]!r}, expected {expected}")
    changed = [name for name in settings if before[name] != settings[name]]
    return [
        f"changed since step {step}: {name} {before[name]} -> {settings[name]}"
        for name in changed
        if name != "output_dir"
    ]


def record_settings(config: RunConfig, output: pathlib.Path) -> None:
    """Writes `config.json`, with which a run is resumed and exported."""
    write_file(output / "config.json", json.dumps(_describe_settings(config), indent=1))


def _describe_settings(config: RunConfig) -> dict:
    """Returns the settings of a run as its config.json holds them."""
    settings = dataclasses.asdict(config)
    if isinstance(config, TrainConfig):
        settings["model"] = describe(config.model)
    return json.loads(json.dumps(settings))


def record_contents(
    output: pathlib.Path, step: int | None, vocabulary: str, files: Mapping[str, AnyPath]
) -> list[str]:
    """Writes `contents.json`, hashes of what a run reads.

    Returns a line for each file with other contents before `step`, at which the run is resumed.
    `vocabulary` is its hash; `files` are paths by their names in the settings.

    Raises:
      ValueError: the run began with a vocabulary that gives other ids for the same text.
    """
    path, digests = output / "contents.json", {}
    for name, file in files.items():
        with places.open_binary(file) as opened:
            digests[name] = hashlib.file_digest(opened, "sha256").hexdigest()
    before = reading.read_json(path) if step is not None and path.exists() else {}
    if before.get("vocabulary", vocabulary) != vocabulary:
        expected = f"the vocabulary with which the run in {output} began"
        raise ValueError(f"vocabulary: got another one, expected {expected}")
    known = before.get("files", {})
    if not isinstance(known, dict):
        raise mismatch_error(f"{path}: files", reading.quote_value(known), "digests by name")
    write_file(path, json.dumps({"vocabulary": vocabulary, "files": digests}, indent=1))
    changed = [name for name, digest in digests.items() if known.get(name, digest) != digest]
    return [f"changed since step {step}: contents of {name}" for name in changed]


def record_target(path: pathlib.Path, name: str, target: LanguageModel, step: int | None) -> None:
    """Writes the fingerprint of a model that a run depends on.

    Raises ValueError if the run, now at `step`, began with another.
    """
    if step is not None and path.is_file() and path.read_text() != target.fingerprint:
        expected = f"the model with which the run in {path.parent} began"
        raise ValueError(f"{name}: got {target.name}, expected {expected}")
    write_file(path, target.fingerprint)


class Reporter:
    """Context manager around a loop of steps that shows progress and appends to `log.jsonl`."""

    def __init__(self, log: pathlib.Path, start: int, steps: int):
        """Opens the log and removes records of steps after `start`, left by a killed run."""
        self._steps = steps
        trim_log(log, start)
        self._log = open(log, "a", encoding="utf-8")
        self._progress = Progress("training", steps, "steps")
        self._progress.skip(start)
        self._progress.detail = "compiling"

    def __enter__(self) -> "Reporter":
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.__exit__(*exception)
        with name_errors(self._log.name):
            self._log.close()

    def advance(self, step: int) -> None:
        """Shows that `step` steps are done."""
        self._progress.advance(step - self._progress.done)

    def training(self, step: int, loss: float, tokens_per_second: float, **more: float) -> None:
        """Reports the mean loss and the speed since the last call; `more` goes to the log only."""
        self._write(step, loss=loss, tokens_per_second=tokens_per_second, **more)
        self._progress.detail = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"

    def validation(
        self,
        step: int,
        loss: float,
        by_file: dict[str, float],
        best: bool,
        **more: tuple[float, dict[str, float]],
    ) -> None:
        """Reports the validation loss over all files and by file, and the figures in `more` alike.

        `best`: whether the parameters are the best so far.
        """
        totals = {name: total for name, (total, _) in more.items()}
        by_files = {f"{name}_by_file": values for name, (_, values) in more.items()}
        self._write(step, validation_loss=loss, validation_losses=by_file, **totals, **by_files)
        parts = []
        for name, (total, values) in {"validation loss": (loss, by_file), **more}.items():
            each = ", ".join(f"{file} {value:.4f}" for file, value in values.items())
            parts.append(f"{name} {total:.4f}" + (f" ({each})" if len(values) > 1 else ""))
        self.message(f"step {step}/{self._steps}: {', '.join(parts)}{' (best)' * best}")

    def message(self, text: str) -> None:
        """Prints one line."""
        self._progress.message(text)

    def _write(self, step: int, **values: Any) -> None:
        record = {"step": step, **values, "time": round(time.time(), 1)}
        with name_errors(self._log.name):
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()


def trim_log(path: pathlib.Path, last: int) -> None:
    """Removes the records of steps after `last`, and damaged lines, from a log of JSON lines."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # A line that a kill cut short, or that another program wrote, is not kept.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
    write_file(path, "".join(kept))


@contextlib.contextmanager
def defer_signals() -> Iterator[list[int]]:
    """Turns the first SIGINT or SIGTERM into an item of the list; a second one acts as usual.

    Outside the main thread Python handles no signals, and the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def receive(number: int, frame: object) -> None:
        received.append(number)
        restore()

    for number in usual:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()
