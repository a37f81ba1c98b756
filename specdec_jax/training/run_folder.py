"""What a training run keeps and shows: settings, checkpoints, a log, a bar or lines; and signals
that wait for a good moment."""

import contextlib
import dataclasses
import errno
import functools
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

import jax
import orbax.checkpoint as ocp
import rich.progress

from specdec_jax.files import reading
from specdec_jax.files.writing import naming, write_file
from specdec_jax.models.families import build_config, describe
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.training.losses import TrainState

# Bytes of a checkpoint beside its arrays, at most.
_OVERHEAD = 2**20


class Checkpoints:
    """The two newest states, and the parameters that did best on the validation files.

    Saving is synchronous: the next step donates the buffers that would still be written.
    """

    def __init__(self, output: pathlib.Path, resume: bool = False, select: str = "loss"):
        """Args: output: the run's folder. resume: also remove what a kill left half written. select: what the best is
        judged by: the lowest "loss", the highest "acceptance" or "agreement"."""
        options = functools.partial(
            ocp.CheckpointManagerOptions, enable_async_checkpointing=False, cleanup_tmp_directories=resume
        )
        # Lower is better. What was kept before it was judged by the same is worse than anything.
        name, sign = ("validation_loss", 1) if select == "loss" else (select, -1)
        self._score = lambda metrics: sign * metrics[name] if name in metrics else math.inf
        for folder in ("checkpoints", "best"):
            (output / folder).mkdir(parents=True, exist_ok=True)
        self.newest = ocp.CheckpointManager(output / "checkpoints", options=options(max_to_keep=2))
        self.best = ocp.CheckpointManager(
            output / "best", options=options(max_to_keep=1, best_fn=self._score, best_mode="min")
        )
        if resume and self.newest.latest_step() is None:
            # Of a run that was killed before it saved a state: perhaps of other files.
            for step in self.best.all_steps():
                self.best.delete(step)

    def restore(self, state: TrainState) -> TrainState:
        """The newest state; `state` gives shapes and dtypes."""
        step = self.newest.latest_step()
        try:
            return self.newest.restore(step, args=ocp.args.StandardRestore(state))
        except (ValueError, KeyError, TypeError) as error:
            folder = self.newest.directory / str(step)
            raise ValueError(
                f"{folder}: got a checkpoint of another model, expected that of the settings: {error}"
            ) from error

    def keep_best(self, step: int, params: dict, loss: float, **more: float) -> bool:
        """Keeps `params` if they are the best, judged by the validation loss or one of the figures in `more`; returns
        whether they are. Those whose loss is not finite never are."""
        if not math.isfinite(loss):
            return False
        best, metrics = self.best.best_step(), {"validation_loss": loss, **more}
        if best is not None and self._score(self.best.metrics(best)) <= self._score(metrics):
            return False
        if step in self.best.all_steps():  # taken before the run was resumed, under other settings
            self.best.delete(step)
        # `force`: after a resumption the step may lie before the best of the time before it.
        _save(self.best, step, params, metrics=metrics, force=True)
        return True

    def keep_newest(self, step: int, state: TrainState) -> None:
        """Saves the state of a step."""
        _save(self.newest, step, state)


def _save(manager: ocp.CheckpointManager, step: int, tree, **how) -> None:
    """Saves a checkpoint.

    Raises:
      OSError: with the folder's name. A disk without room is found before Orbax begins: in the midst of it, its
        threads and TensorStore's would each print a traceback.
    """
    folder = pathlib.Path(manager.directory)
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) + _OVERHEAD
    free = shutil.disk_usage(folder).free
    if free < needed:
        said = f"{os.strerror(errno.ENOSPC)} ({free / 1e6:,.1f} MB free, {needed / 1e6:,.1f} MB needed)"
        raise OSError(errno.ENOSPC, said, str(folder))
    with naming(folder):
        manager.save(step, args=ocp.args.StandardSave(tree), **how)


def changed_settings(config, output: pathlib.Path, step: int | None, fixed: Callable[[dict], dict]) -> list[str]:
    """Returns what differs from the run that is resumed at `step`. Raises ValueError if it cannot be.

    `fixed` picks what must not differ out of the settings.
    """
    if step is not None and step > config.steps:
        raise ValueError(f"steps: got {config.steps}, expected at least the {step} steps that are saved in it")
    path, settings = output / "config.json", _settings(config)
    if step is not None and path.exists():
        # What a setting did before it was one, its default says.
        before: dict = {field.name: field.default for field in dataclasses.fields(config)} | reading.read_json(path)
        if "model" in settings:  # likewise
            before["model"] = _plain(describe(build_config(before["model"])))
        for name, value in fixed(settings).items():
            if fixed(before)[name] != value:
                expected = f"that of the run in {config.output_dir}: {before[name]}"
                raise ValueError(f"{name}: got {settings[name]!r}, expected {expected}")
        changed = [name for name in settings if name != "output_dir" and before[name] != settings[name]]
        return [f"changed since step {step}: {name} {before[name]} -> {settings[name]}" for name in changed]
    return []


def record_settings(config, output: pathlib.Path) -> None:
    """Writes `config.json`, from which a run is resumed and exported."""
    write_file(output / "config.json", json.dumps(_settings(config), indent=1))


def _settings(config) -> dict:
    """Returns the settings of a run as its config.json has them."""
    settings = dataclasses.asdict(config)
    return _plain(settings | {"model": describe(config.model)} if "model" in settings else settings)


def _plain(settings: dict) -> dict:
    return json.loads(json.dumps(settings))


def record_contents(
    output: pathlib.Path, step: int | None, vocabulary: str, files: Mapping[str, pathlib.Path]
) -> list[str]:
    """Writes `contents.json`, digests of what a run reads; returns which files were others for the steps up to `step`.

    Args:
      vocabulary: its digest. files: by their names in the settings.

    Raises:
      ValueError: the run began with a vocabulary that makes other ids of the same text.
    """
    path, digests = output / "contents.json", {}
    for name, file in files.items():
        with open(file, "rb") as opened:
            digests[name] = hashlib.file_digest(opened, "sha256").hexdigest()
    before = reading.read_json(path) if step is not None and path.exists() else {}
    if before.get("vocabulary", vocabulary) != vocabulary:
        raise ValueError(f"vocabulary: got another, expected the one with which the run in {output} began")
    known = before.get("files", {})
    if not isinstance(known, dict):
        raise ValueError(f"{path}: files: got {reading.shown(known)}, expected digests by name")
    write_file(path, json.dumps({"vocabulary": vocabulary, "files": digests}, indent=1))
    changed = [name for name, digest in digests.items() if known.get(name, digest) != digest]
    return [f"changed since step {step}: contents of {name}" for name in changed]


def record_target(path: pathlib.Path, name: str, target: LanguageModel, step: int | None) -> None:
    """Writes the fingerprint of the model that a run, which is at `step`, depends on; refuses another than before."""
    if step is not None and path.is_file() and not target.has(path.read_text()):
        raise ValueError(f"{name}: got {target.name}, expected the one on which the run in {path.parent} began")
    write_file(path, target.fingerprint)


class Reporter:
    """Context manager around a loop of steps: progress on `console`, records appended to a log of JSON lines."""

    def __init__(self, console: rich.console.Console, log: pathlib.Path, start: int, steps: int):
        """Args: log: its records of steps after `start`, left by a run that was killed, are removed."""
        self._console, self._start, self._steps = console, start, steps
        trim_log(log, start)
        self._log = open(log, "a", encoding="utf-8")
        columns = (
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[text]}"),
            rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._bar = rich.progress.Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=steps, completed=start, text="compiling")

    def __enter__(self) -> "Reporter":
        self._begin = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()
        with naming(self._log.name):
            self._log.close()

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        self._bar.update(self._task, completed=step)

    def training(self, step: int, loss: float, pieces_per_second: float, **more: float) -> None:
        """Mean loss and speed since the last call; `more` goes to the log only."""
        self._write(step, loss=loss, pieces_per_second=pieces_per_second, **more)
        text = f"loss {loss:.3f}, {pieces_per_second:,.0f} pieces/s"
        self._bar.update(self._task, text=text)
        if not self._console.is_terminal:
            seconds = (self._steps - step) * (time.monotonic() - self._begin) / (step - self._start)
            left = f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
            self.message(f"step {step}/{self._steps}: {text}, {left} left")

    def validation(
        self, step: int, loss: float, by_file: dict[str, float], best: bool, **more: tuple[float, dict[str, float]]
    ) -> None:
        """Validation loss over all files and of each, and `more` figures likewise; `best`: the best so far."""
        totals = {name: total for name, (total, _) in more.items()}
        by_files = {f"{name}_by_file": values for name, (_, values) in more.items()}
        self._write(step, validation_loss=loss, validation_losses=by_file, **totals, **by_files)
        parts = []
        for name, (total, values) in {"validation loss": (loss, by_file), **more}.items():
            each = ", ".join(f"{file} {value:.4f}" for file, value in values.items()) if len(values) > 1 else ""
            parts.append(f"{name} {total:.4f}{each and f' ({each})'}")
        self.message(f"step {step}/{self._steps}: {', '.join(parts)}{' (best)' * best}")

    def message(self, text: str) -> None:
        """One line, above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def _write(self, step: int, **values) -> None:
        with naming(self._log.name):
            self._log.write(json.dumps({"step": step, **values, "time": round(time.time(), 1)}) + "\n")
            self._log.flush()


def trim_log(path: pathlib.Path, last: int) -> None:
    """Keeps the records of steps up to `last` of a log of JSON lines; a line that a kill cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # A line that a kill cut short, or that is none of ours, is none to keep.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
    write_file(path, "".join(kept))


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Turns the first SIGINT or SIGTERM into an item of the list; a second one acts as usual.

    Outside the main thread Python handles no signals, and the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore():
        for number, handler in usual.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def note(number, frame):
        received.append(number)
        restore()

    for number in usual:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
