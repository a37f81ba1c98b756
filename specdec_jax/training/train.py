"""Trains a model, resumes after a kill, and writes the result."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.checkpoints import converter, loader, native_format
from specdec_jax.files import reading
from specdec_jax.files.progress import print_line
from specdec_jax.files.reading import digest
from specdec_jax.files.writing import lock_folder
from specdec_jax.models.families import build_config
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import initial_params
from specdec_jax.training import corpus, losses, run_vocabulary
from specdec_jax.training.batches import BucketedBatches
from specdec_jax.training.config import TrainConfig, expect
from specdec_jax.training.depth_expansion import deepen
from specdec_jax.training.losses import (
    Metrics,
    Objective,
    TeacherAgreement,
    TrainState,
    evaluate,
    loss_fn,
    train_step,
)
from specdec_jax.training.optimizer import make_optimizer
from specdec_jax.training.run_folder import (
    Checkpoints,
    Reporter,
    changed_settings,
    deferred_signals,
    record_contents,
    record_settings,
    record_target,
)
from specdec_jax.training.run_vocabulary import RunVocabulary

# Files in a run's folder with the fingerprint of the teacher: if its encoder output is read, or if
# it is not.
_ENCODER, _TEACHER = "encoder_fingerprint", "teacher_fingerprint"


# The run.


@isolated
def fit(config: TrainConfig, begun: Callable[[], object] = lambda: None) -> dict:
    """Trains a model and writes it to `output_dir/model`; resumes an earlier run in `output_dir`.

    `output_dir` also holds the two newest checkpoints (`checkpoints`), the parameters that did best
    on the validation files (`best`, verified by `select`), which become the model, and `log.jsonl`.
    SIGINT and SIGTERM end the step in progress and save it.

    Args:
      config: the settings.
      begun: called before the first step, when nothing can reject the run any more.

    Returns:
      The parameters of the last step.

    Raises:
      ValueError: bad settings or files, before anything compiles; or a loss that is no longer
        finite.
      KeyboardInterrupt: after a signal, when the run is saved.
    """
    check_files(config)
    output = pathlib.Path(config.output_dir).absolute()
    output.mkdir(parents=True, exist_ok=True)
    print_line("reading the files of examples")
    with lock_folder(output):
        saved = Checkpoints(output, resume=True, select=config.select)
        for line in changed_settings(config, output, saved.newest.latest_step(), _fixed):
            print_line(line)
        run = Run(config, saved)

        def record() -> None:
            run.ids.write(output)
            begun()

        state = go_on(run, config, record)
        export(output, output / "model")
    kept = saved.best.best_step()
    which = (
        "the newest parameters"
        if kept is None
        else f"those of step {kept}, the best by {config.select}"
    )
    print_line(f"wrote {output / 'model'}: {which}")
    return state.params


def go_on(run: "Run", settings, begun: Callable[[], object]) -> TrainState:
    """Records `settings`, now that nothing can reject the run, calls `begun`, and takes the
    remaining steps.

    Returns:
      The state of the last step.
    """
    config = run.config
    print_line("compiling the initial state")
    state = run.initial_state()
    changed = run.record()
    record_settings(settings, pathlib.Path(config.output_dir).absolute())
    begun()
    start = int(state.step)
    for line in changed:
        print_line(line)
    print_line(
        f"{'resumed at' if start else 'begins at'} step {start} of {config.steps};"
        f" {run.batches.per_epoch} batches an epoch, {config.corpus.summary(run.batches)};"
        f" {parameter_count(state.params):,} parameters, {run.objective.model.config.dtype}"
    )
    if start < config.steps:
        with Reporter(
            pathlib.Path(config.output_dir, "log.jsonl"), start, config.steps
        ) as reporter:
            state = _loop(run, state, reporter)
    return state


@isolated
def export(output_dir, path, which: str = "best", dtype: str | None = "bfloat16") -> None:
    """Writes the model of the run in `output_dir` to the folder `path`, replacing a model there.

    Args:
      output_dir: folder of the run; it may have been moved or copied.
      path: folder of the model.
      which: "best" takes the parameters that did best on the validation files (the newest if there
        are none), "newest" those of the newest checkpoint.
      dtype: dtype in which the parameters are stored; None keeps float32.
    """
    expect(which in ("best", "newest"), "which", which, "'best' or 'newest'")
    output, path = pathlib.Path(output_dir).absolute(), pathlib.Path(path)
    if not (output / "config.json").is_file():
        raise ValueError(
            f"{output_dir}: got a folder without config.json, expected the folder of a training run"
        )
    stored = reading.read_json(output / "config.json")
    config = TrainConfig(**{**stored, "model": _recorded_shape(stored), "output_dir": str(output)})
    saved = Checkpoints(output, select=config.select)
    state = _abstract_state(config)
    if which == "best" and saved.best.latest_step() is not None:
        params = saved.best.restore(
            saved.best.best_step(), args=ocp.args.StandardRestore(state.params)
        )
    elif saved.newest.latest_step() is not None:
        params = saved.restore(state).params
    else:
        raise ValueError(
            f"{output_dir}: got no checkpoint, expected a training run that has saved one"
        )
    network = config.model.replace(matmul_dtype=None, dropout_rate=0.0)
    ids, fingerprint = run_vocabulary.of_run(config, output), output / _ENCODER
    model = LanguageModel(
        network,
        params,
        ids.vocabulary,
        start_token=ids.start_token,
        eos_ids=ids.eos_ids,
        name=path.name,
        encoder_fingerprint=fingerprint.read_text() if fingerprint.is_file() else None,
    )
    converter.save(model, path, dtype=dtype)


def parameter_count(params) -> int:
    """Returns the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class Run:
    """What a run needs besides its state: networks, vocabulary, batches.

    Attributes:
      loss: computes what is minimised.
      assess: computes what is reported on validation files.
    """

    loss: Any = staticmethod(loss_fn)
    assess: Any = staticmethod(losses.assess)

    def __init__(self, config: TrainConfig, saved: Checkpoints):
        self.config, self.saved = config, saved
        teacher = _teacher(config)
        ids = _vocabulary(config, teacher)
        self._initial = _initial_params(config) if saved.newest.latest_step() is None else None
        network = computing(config, config.model)
        self.objective = Objective(
            network.module(), config.label_smoothing, start_token=ids.start_token
        )
        self.teacher_params = None
        if teacher is not None:
            name = _TEACHER if config.model.encoder_dim is None else _ENCODER
            record_target(
                pathlib.Path(config.output_dir, name),
                "teacher",
                teacher,
                saved.newest.latest_step(),
            )
            shape = teacher.config.replace(matmul_dtype=config.model.matmul_dtype)
            self.objective = dataclasses.replace(
                self.objective,
                teacher=computing(config, shape).module(),
                distill_weight=config.distill_weight,
                divergence=config.divergence,
                distill_temperature=config.distill_temperature,
            )
            self.teacher_params = teacher.params
        self.optimizer = make_optimizer(config)
        self.read(ids)

    def read(self, ids: RunVocabulary) -> None:
        """Reads the training and validation files."""
        config, batches = self.config, lambda path: _batches(self.config, ids, [path])
        self.batches = _batches(config, ids, config.paths("train_files"))
        self.validation = dict(
            zip(config.validation_files, map(batches, config.paths("validation_files")))
        )
        self.ids = ids

    def record(self) -> list[str]:
        """Records what the run reads.

        Returns lines for the user about what was different for the steps before.
        """
        config, names = self.config, ("train_files", "validation_files")
        files = {
            file: path
            for name in names
            for file, path in zip(getattr(config, name), config.paths(name))
        }
        output, step = pathlib.Path(config.output_dir), self.saved.newest.latest_step()
        return record_contents(
            output, step, digest([native_format.vocabulary_contents(self.ids.vocabulary)]), files
        )

    def initial_state(self) -> TrainState:
        """Returns the state to begin with: the saved one, else given or random parameters."""
        if self._initial is not None:
            params, self._initial = self._initial, None
            return _state_of(self.config, params)
        if self.saved.newest.latest_step() is None:
            return jax.jit(functools.partial(_init, self.config))(jax.random.key(self.config.seed))
        return self.saved.restore(_abstract_state(self.config))

    def step(self, state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        """Takes the step with number `step`."""
        batch = self.batches[step]
        return train_step(
            state,
            (batch.inputs, batch.targets),
            self.teacher_params,
            self.config.seed,
            objective=self.objective,
            optimizer=self.optimizer,
            loss=self.loss,
        )

    def validate(self, state: TrainState, step: int, reporter: Reporter) -> None:
        """Reports means over the tokens, by file and in total, and keeps the parameters if they are
        the best."""
        sums = {
            name: evaluate(state.params, batches, self.objective, self.teacher_params, self.assess)
            for name, batches in self.validation.items()
        }
        tokens = {name: metrics.tokens for name, (metrics, _) in sums.items()}

        def mean(of: dict[str, np.ndarray]) -> tuple[float, dict[str, float]]:
            each = {name: float(value / tokens[name]) for name, value in of.items()}
            return float(sum(of.values()) / sum(tokens.values())), each

        loss, by_file = mean({name: metrics.loss for name, (metrics, _) in sums.items()})
        fields = (
            TeacherAgreement._fields
            if all(likeness is not None for _, likeness in sums.values())
            else ()
        )
        more = {
            field: mean({name: getattr(likeness, field) for name, (_, likeness) in sums.items()})
            for field in fields
        }
        best = self.saved.keep_best(
            step, state.params, loss, **{field: value for field, (value, _) in more.items()}
        )
        reporter.validation(step, loss, by_file, best, **more)

    def save(self, state: TrainState, step: int) -> None:
        """Saves the state; raises ValueError if parameters are not finite."""
        if not _finite(state.params):
            raise ValueError(
                f"step {step}: got parameters that are not finite, expected finite ones: lower"
                " learning_rate"
            )
        self.saved.keep_newest(step, state)


@jax.jit
def _finite(params):
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]))


def _loop(run: Run, state: TrainState, reporter: Reporter) -> TrainState:
    config, window = run.config, []
    with deferred_signals() as signals:
        if config.initialise_from is not None and run.saved.best.latest_step() is None:
            run.validate(state, 0, reporter)  # the best is then no worse than the beginning
        clock = time.perf_counter()
        for done in range(int(state.step) + 1, config.steps + 1):
            state, metrics = run.step(state, done - 1)
            if (
                window
            ):  # the host is at most one step ahead: progress is true, and a signal is soon obeyed
                jax.block_until_ready(window[-1])
            window.append(metrics)
            reporter.advance(done)
            if signals or done == config.steps or done % config.log_every == 0:
                _report(window, done, clock, reporter)
                window, clock = [], time.perf_counter()
            if done == config.steps or done % config.evaluate_every == 0:
                pause = time.perf_counter()
                run.validate(state, done, reporter)
                clock += time.perf_counter() - pause
            # Read once, after all that takes time: a signal that comes during the validation saves
            # this step too.
            saved = bool(signals) or done == config.steps or done % config.save_every == 0
            if saved:
                run.save(state, done)
            if saved and signals:
                reporter.message(
                    f"interrupted: step {done} is saved; the same command resumes from there"
                )
                raise KeyboardInterrupt(signals[0])
    return state


def _report(window: list[Metrics], step: int, clock: float, reporter: Reporter) -> None:
    """Reports the mean metrics of the steps in `window`, the first of which began at `clock`."""
    sums = Metrics(*np.sum(jax.device_get(window), axis=0))
    if not np.isfinite(sums.loss):
        raise ValueError(
            f"step {step}: got a loss of {sums.loss}, expected a finite one: lower learning_rate"
        )
    speed = float(sums.tokens) / (time.perf_counter() - clock)
    reporter.training(
        step, float(sums.loss / sums.tokens), speed, nll=float(sums.nll / sums.tokens)
    )


def _init(config: TrainConfig, key) -> TrainState:
    return _state_of(config, initial_params(computing(config, config.model).module(), key))


def _state_of(config: TrainConfig, params: dict) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(params, make_optimizer(config).init(params), jnp.zeros((), jnp.int32))


def _abstract_state(config: TrainConfig) -> TrainState:
    return abstract_state(functools.partial(_init, config))


def abstract_state(init) -> TrainState:
    """Returns shapes and dtypes of the state that `init` makes from a key, placed on the first
    device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(init, jax.random.key(0)))


def saved_bytes(config: TrainConfig) -> int:
    """Returns the bytes of a run's files: the two newest states, the best parameters, the model."""

    def size(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    state = _abstract_state(config)
    return 2 * size(state) + size(state.params) * 3 // 2


def computing(config: TrainConfig, shape: ModelConfig) -> ModelConfig:
    """Returns `shape` with the dtype of the computation, and without a `matmul_dtype` that is the
    same, which would round nothing."""
    dtype = config.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    rounded = None if shape.matmul_dtype == dtype else shape.matmul_dtype
    return shape.replace(dtype=dtype, matmul_dtype=rounded)


# Files.


def check_files(config: TrainConfig) -> None:
    """Raises ValueError for missing training or validation files, and for an `output_dir` that is
    no folder."""
    for name in ("train_files", "validation_files"):
        for path in config.paths(name):
            expect(path.is_file(), name, str(path), config.corpus.files)
    output = pathlib.Path(config.output_dir)
    expect(
        output.is_dir() or not output.exists(),
        "output_dir",
        config.output_dir,
        "a folder, or none yet",
    )


def _fixed(settings: dict) -> dict:
    return {
        "model": _shape(_recorded_shape(settings)),
        "initialise_from": settings["initialise_from"],
    }


def _recorded_shape(settings: dict) -> ModelConfig:
    """Returns the network's configuration in a run's `config.json`."""
    return build_config(settings["model"])


def _shape(model: ModelConfig) -> ModelConfig:
    """Returns the part of a configuration that decides the parameters and what is computed with
    them."""
    return model.replace(dropout_rate=0.0, dtype="float32", matmul_dtype=None)


def _teacher(config: TrainConfig) -> LanguageModel | None:
    if config.teacher is None:
        return None
    teacher = loader.load(config.teacher, computing(config, config.model).dtype)
    kinds = [type(shape).__name__ for shape in (teacher.config, config.model)]
    expect(kinds[0] == kinds[1], "teacher", kinds[0], f"{kinds[1]}, like the model")
    positions, expected = teacher.config.max_positions, config.sequence_length
    if positions is not None and expected is not None:
        expect(
            positions >= expected,
            "teacher",
            f"{positions} positions",
            f"at least sequence_length = {expected}",
        )
    width, expected = teacher.config.vocab_size, config.model.vocab_size
    expect(width == expected, "teacher", f"{width} logits", f"model.vocab_size = {expected}")
    expect(
        teacher.config.encoder_dim is None,
        "teacher",
        config.teacher,
        "a model with an encoder of its own",
    )
    width, expected = teacher.config.emb_dim, config.model.encoder_dim or teacher.config.emb_dim
    expect(
        width == expected,
        "teacher",
        f"an encoder of width {width}",
        f"model.encoder_dim = {expected}",
    )
    return teacher


def _initial_params(config: TrainConfig) -> dict | None:
    if config.initialise_from is None:
        return None
    model = loader.load(config.initialise_from, "float32")
    more = {}
    for stack in ("encoder", "decoder"):
        layers, wanted = (
            getattr(shape, f"num_{stack}_layers", 0) for shape in (model.config, config.model)
        )
        if 0 < layers < wanted:
            more[stack] = wanted
    counts: dict[str, Any] = {f"num_{stack}_layers": wanted for stack, wanted in more.items()}
    fits = _shape(dataclasses.replace(model.config, **counts)) == _shape(config.model)
    expect(
        fits, "initialise_from", model.config, f"the shape {config.model}, or it with fewer layers"
    )
    params = model.params
    for stack, wanted in more.items():
        params = deepen(params, stack, wanted)
    return params


def _vocabulary(config: TrainConfig, teacher: LanguageModel | None) -> RunVocabulary:
    given = {}
    if teacher is not None:
        given["the teacher"] = run_vocabulary.of_model(teacher, "teacher")
    if config.initialise_from is not None:
        given[config.initialise_from] = run_vocabulary.of_checkpoint(
            config.initialise_from, "initialise_from"
        )

    def make():
        return corpus.trained_vocabulary(
            config.corpus, config.paths("train_files"), config.vocabulary_size
        )

    output = pathlib.Path(config.output_dir)
    return run_vocabulary.choose(
        config.vocabulary, output, config.vocabulary_size, given, config.corpus, make
    )


def _batches(config: TrainConfig, ids: RunVocabulary, paths) -> BucketedBatches:
    width, start = config.model.vocab_size, ids.start_token
    return config.corpus.batches(
        ids.vocabulary, paths, width, config.batch_tokens, config.seed, start
    )
