"""Training of encoder–decoder pairs: losses, distillation, optimiser, a loop that survives being killed, export."""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import rich.console

from specdec_jax import checkpoints, data
from specdec_jax.losses import (
    DIVERGENCES,
    Likeness,
    Metrics,
    Objective,
    TrainState,
    assess,
    evaluate,
    loss_fn,
    train_step,
)
from specdec_jax.models.base import LanguageModel, t5_only
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.runs import Checkpoints, Reporter, deferred_signals, write_atomically

_ENCODER = "encoder_fingerprint"  # file in the folder of a run: of the model whose encoder output is read


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Attributes:
      model: shape of the network; `matmul_dtype` and `dropout_rate` count in training only, `dtype` is set below.
      train_files, validation_files: TSV files (source, tab, target; or, with a tab and the target's ids after that, as
        `specdec distill` writes them), gzip or not; any number of each.
      output_dir: checkpoints, the log and the final model go here; an existing run in it is resumed.
      data_dir: folder to which the names of those files are relative.
      initialise_from: path of a model of the same shape and vocabulary, or a bundled name, whose parameters a new run starts
        from; None: random ones. The optimiser's state is new either way.
      vocabulary: path of a SentencePiece model; where absent it is written: the teacher's, that of `initialise_from`, or
        one trained on the train files. "": `vocabulary.model` in `output_dir`.
      vocabulary_size: ids of the vocabulary: its pieces and, with a model that has them, that model's sentinels.
      steps: optimiser steps in all; a run can be resumed with another number, and with another schedule.
      warmup_steps, decay_steps: linear warm-up at the start, linear decay to zero at the end; constant between.
      learning_rate: size of a step relative to the root mean square of the array that it changes.
      batch_tokens: padded pieces of the longer side of a batch.
      buckets: padded lengths, ascending; longer pairs are left out and counted.
      target_buckets: padded lengths of the targets, where those are not as long as the inputs; none: `buckets` for both.
      label_smoothing: mass spread over the vocabulary.
      teacher: path of a model to distil from, or None.
      distill_weight: w in (1 − w) · cross-entropy + w · D(teacher, student), per target piece; above 0 iff there is a
        teacher.
      divergence: D: "forward_kl", "reverse_kl", "jensen_shannon" or "total_variation", which is 1 − α (`losses.py`).
      distill_temperature: of the teacher's law in D; below 1 its argmax counts more.
      select: what the best parameters have: the lowest validation "loss", or on the validation files the highest
        "acceptance" (mean of Σ_v min(p, q), α at temperature 1) or "agreement" (of the argmax, α at temperature 0) with the
        teacher.
      seed: of the initial parameters, the order of the batches and dropout.
      log_every, save_every, evaluate_every: steps between records, checkpoints and validation losses.
      dtype: of the computation; None: float32 on a CPU, bfloat16 on an accelerator. Parameters stay float32.
    """

    model: T5Config
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    output_dir: str
    data_dir: str = ""
    initialise_from: str | None = None
    vocabulary: str = ""
    vocabulary_size: int = 6144
    steps: int = 2000
    warmup_steps: int = 100
    decay_steps: int = 500
    learning_rate: float = 0.01
    batch_tokens: int = 4096
    buckets: tuple[int, ...] = (8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
    target_buckets: tuple[int, ...] = ()
    label_smoothing: float = 0.1
    teacher: str | None = None
    distill_weight: float = 0.0
    divergence: str = "forward_kl"
    distill_temperature: float = 1.0
    select: str = "loss"
    seed: int = 0
    log_every: int = 20
    save_every: int = 100
    evaluate_every: int = 200
    dtype: str | None = None

    def __post_init__(self):
        for name in ("train_files", "validation_files"):
            files = getattr(self, name)
            object.__setattr__(self, name, (files,) if isinstance(files, str) else tuple(files))
            _expect(len(getattr(self, name)) > 0, name, files, "at least one file")
        object.__setattr__(self, "buckets", tuple(self.buckets))
        object.__setattr__(self, "target_buckets", tuple(self.target_buckets))
        _expect(isinstance(self.model, T5Config), "model", self.model, "a T5Config")
        _expect(self.model.dtype == "float32", "model.dtype", self.model.dtype, "float32: TrainConfig.dtype sets it")
        for name in ("steps", "log_every", "save_every", "evaluate_every", "vocabulary_size"):
            _expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("warmup_steps", "decay_steps", "seed"):
            _expect(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        parts = self.warmup_steps + self.decay_steps
        _expect(parts <= self.steps, "steps", self.steps, f"at least warmup_steps + decay_steps = {parts}")
        _expect(0 < self.learning_rate < np.inf, "learning_rate", self.learning_rate, "a positive number")
        _expect(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "a number in [0, 1)")
        shares = self.model.encoder_dim is not None
        _expect(bool(self.teacher) or not shares, "teacher", None, "the model whose encoder model.encoder_dim is of")
        weights = "a number in [0, 1]" if shares else "a number in (0, 1] with a teacher, 0 without"
        fits = 0 < self.distill_weight <= 1 or self.distill_weight == 0 and (shares or not self.teacher)
        fits = fits and (bool(self.teacher) or self.distill_weight == 0)
        _expect(fits, "distill_weight", self.distill_weight, weights)
        _expect(self.divergence in DIVERGENCES, "divergence", self.divergence, f"one of {', '.join(DIVERGENCES)}")
        positive = 0 < self.distill_temperature < np.inf
        _expect(positive, "distill_temperature", self.distill_temperature, "a positive number")
        if not self.teacher:
            for name, default in (("divergence", "forward_kl"), ("distill_temperature", 1.0)):
                _expect(getattr(self, name) == default, name, getattr(self, name), f"{default!r} without a teacher")
        choices = ("loss", *Likeness._fields) if self.teacher else ("loss",)
        expected = f"one of {', '.join(choices)}" if self.teacher else "'loss' without a teacher"
        _expect(self.select in choices, "select", self.select, expected)
        pieces = f"at most model.vocab_size = {self.model.vocab_size}"
        _expect(self.vocabulary_size <= self.model.vocab_size, "vocabulary_size", self.vocabulary_size, pieces)
        _expect(self.dtype in (None, "float32", "bfloat16"), "dtype", self.dtype, "None, float32 or bfloat16")

    def paths(self, name: str) -> list[pathlib.Path]:
        """`train_files` or `validation_files` with their folder."""
        return [pathlib.Path(self.data_dir, file) for file in getattr(self, name)]


def _expect(condition: bool, name: str, got, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name}: got {got!r}, expected {expected}")


# The optimiser.


def learning_rate(config: TrainConfig, step):
    """Learning rate of the update after `step` updates: linear warm-up, constant, linear decay."""
    warmup = step / config.warmup_steps if config.warmup_steps else 1.0
    decay = (config.steps - step) / config.decay_steps if config.decay_steps else 1.0
    return config.learning_rate * jnp.clip(jnp.minimum(warmup, decay), 0.0, 1.0)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Muon on the matrices inside the layers, Adam on embeddings, head, norms and position biases, both times the
    root mean square of the array they change.

    The scaling by the array, as in Adafactor, is what makes this work for T5: its queries start 1/√K smaller than the
    other kernels, and steps of one size would soon saturate the attention, whose scores T5 does not scale down.
    """
    matrices = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.contrib.MuonDimensionNumbers() if _is_matrix(path) else None, params
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


# The run.


def fit(config: TrainConfig) -> dict:
    """Trains, or goes on where an earlier run into `output_dir` stopped, and writes the model `output_dir/model`.

    `output_dir` holds the two newest checkpoints (`checkpoints`), the parameters that did best on the validation files
    (`best`, judged by `select`), which become the model, and `log.jsonl`. SIGINT and SIGTERM end the step in progress and save it.

    Returns: the parameters of the last step.
    Raises:
      ValueError: bad settings or files, before anything compiles; a loss that is no longer finite.
      KeyboardInterrupt: after a signal, when the run is saved.
    """
    check_files(config)
    output = pathlib.Path(config.output_dir).absolute()
    console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
    saved = Checkpoints(output, resume=True, select=config.select)
    for line in record_settings(config, output, saved.newest.latest_step(), _fixed):
        console.print(line, markup=False)
    state = go_on(Run(config, saved), console)
    export(output, output / "model")
    console.print(f"wrote {output / 'model'}", markup=False)
    return state.params


def go_on(run: "Run", console: rich.console.Console) -> TrainState:
    """Takes the steps of a run that are left; the state of its last step."""
    config, state = run.config, run.initial_state()
    start = int(state.step)
    console.print(
        f"{'resumed at' if start else 'begins at'} step {start} of {config.steps}; {run.batches.per_epoch} batches an "
        f"epoch, {run.batches.dropped} of {run.batches.pairs} pairs left out as longer than {run.batches.longest} pieces; "
        f"{parameter_count(state.params):,} parameters, {run.objective.model.config.dtype}",
        markup=False,
    )
    if start < config.steps:
        with Reporter(console, pathlib.Path(config.output_dir, "log.jsonl"), start, config.steps) as reporter:
            state = _loop(run, state, reporter)
    return state


def export(output_dir, path, which: str = "best", dtype: str | None = "bfloat16") -> None:
    """Writes the model of the run in `output_dir` to the folder `path`, replacing a model there.

    Args:
      output_dir: also of a run that was moved or copied: what the run recorded as its own folder does not count.
      which: "best" takes the parameters that did best on the validation files (the newest where none were taken),
        "newest" those of the newest checkpoint.
      dtype: in which the parameters are stored; None keeps float32.
    """
    _expect(which in ("best", "newest"), "which", which, "'best' or 'newest'")
    output, path = pathlib.Path(output_dir).absolute(), pathlib.Path(path)
    if not (output / "config.json").is_file():
        raise ValueError(f"{output_dir}: got a folder without config.json, expected one of a training run")
    stored = json.loads((output / "config.json").read_text())
    config = TrainConfig(**{**stored, "model": T5Config(**stored["model"]), "output_dir": str(output)})
    saved = Checkpoints(output, select=config.select)
    state = _abstract_state(config)
    if which == "best" and saved.best.latest_step() is not None:
        params = saved.best.restore(saved.best.best_step(), args=ocp.args.StandardRestore(state.params))
    elif saved.newest.latest_step() is not None:
        params = saved.restore(state).params
    else:
        raise ValueError(f"{output_dir}: got no checkpoint, expected a training run that has saved one")
    network = dataclasses.replace(config.model, matmul_dtype=None, dropout_rate=0.0)
    vocabulary, fingerprint = _recorded_vocabulary(config), output / _ENCODER
    model = LanguageModel(
        network, params, vocabulary, eos_ids=vocabulary.eos_ids, name=path.name,
        encoder_fingerprint=fingerprint.read_text() if fingerprint.is_file() else None,
    )  # fmt: skip
    checkpoints.save(model, path, dtype=dtype)


def parameter_count(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class Run:
    """What a run needs beside its state: networks, vocabulary, batches; `loss` is what it minimises, `assess` what it reports."""

    loss: Any = staticmethod(loss_fn)
    assess: Any = staticmethod(assess)

    def __init__(self, config: TrainConfig, saved: Checkpoints):
        self.config, self.saved = config, saved
        teacher = _teacher(config)
        vocabulary = _vocabulary(config, teacher)
        self._initial = _initial_params(config) if saved.newest.latest_step() is None else None
        network = computing(config, config.model)
        self.objective = Objective(T5(network), config.label_smoothing)
        self.teacher_params = None
        if teacher is not None and config.model.encoder_dim is not None:
            record_target(pathlib.Path(config.output_dir, _ENCODER), "teacher", teacher, saved.newest.latest_step())
        if teacher is not None:
            shape = dataclasses.replace(t5_only("teacher", teacher.config), matmul_dtype=config.model.matmul_dtype)
            self.objective = dataclasses.replace(
                self.objective, teacher=T5(computing(config, shape)), distill_weight=config.distill_weight,
                divergence=config.divergence, distill_temperature=config.distill_temperature,
            )  # fmt: skip
            self.teacher_params = teacher.params
        self.optimizer = make_optimizer(config)
        self.read(vocabulary)

    def read(self, vocabulary) -> None:
        config, batches = self.config, lambda path: _batches(self.config, vocabulary, [path])
        self.batches = _batches(config, vocabulary, config.paths("train_files"))
        self.validation = dict(zip(config.validation_files, map(batches, config.paths("validation_files"))))

    def initial_state(self) -> TrainState:
        if self._initial is not None:
            params, self._initial = self._initial, None
            return _state_of(self.config, params)
        if self.saved.newest.latest_step() is None:
            return jax.jit(functools.partial(_init, self.config))(jax.random.key(self.config.seed))
        return self.saved.restore(_abstract_state(self.config))

    def step(self, state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        batch = self.batches[step]
        return train_step(
            state, (batch.inputs, batch.targets), self.teacher_params, self.config.seed,
            objective=self.objective, optimizer=self.optimizer, loss=self.loss,
        )  # fmt: skip

    def validate(self, state: TrainState, step: int, reporter: Reporter) -> None:
        """Reports means over the pieces, by file and over all, and keeps the parameters if they are the best."""
        sums = {
            name: evaluate(state.params, batches, self.objective, self.teacher_params, self.assess)
            for name, batches in self.validation.items()
        }
        pieces = {name: metrics.pieces for name, (metrics, _) in sums.items()}

        def mean(of: dict[str, np.ndarray]) -> tuple[float, dict[str, float]]:
            each = {name: float(value / pieces[name]) for name, value in of.items()}
            return float(sum(of.values()) / sum(pieces.values())), each

        loss, by_file = mean({name: metrics.loss for name, (metrics, _) in sums.items()})
        fields = Likeness._fields if all(likeness is not None for _, likeness in sums.values()) else ()
        more = {
            field: mean({name: getattr(likeness, field) for name, (_, likeness) in sums.items()}) for field in fields
        }
        best = self.saved.keep_best(step, state.params, loss, **{field: value for field, (value, _) in more.items()})
        reporter.validation(step, loss, by_file, best, **more)

    def save(self, state: TrainState, step: int) -> None:
        if not _finite(state.params):
            raise ValueError(
                f"step {step}: got parameters that are not finite, expected finite ones: lower learning_rate"
            )
        self.saved.newest.save(step, args=ocp.args.StandardSave(state))


@jax.jit
def _finite(params):
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]))


def _loop(run: Run, state: TrainState, reporter: Reporter) -> TrainState:
    config, window = run.config, []
    with deferred_signals() as signals:
        if config.initialise_from is not None and run.saved.best.latest_step() is None:
            run.validate(state, 0, reporter)  # the best is then no worse than where the run began
        clock = time.perf_counter()
        for done in range(int(state.step) + 1, config.steps + 1):
            state, metrics = run.step(state, done - 1)
            if window:  # the host is at most one step ahead: progress is true, and a signal is soon obeyed
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
            # Read once, after all that takes time: a signal that comes during the validation saves this step too.
            saved = bool(signals) or done == config.steps or done % config.save_every == 0
            if saved:
                run.save(state, done)
            if saved and signals:
                reporter.message(f"interrupted: step {done} is saved; the same command goes on from there")
                raise KeyboardInterrupt
    return state


def _report(window: list[Metrics], step: int, clock: float, reporter: Reporter) -> None:
    """Reports the mean of `window`, which began at `clock`."""
    sums = Metrics(*np.sum(jax.device_get(window), axis=0))
    if not np.isfinite(sums.loss):
        raise ValueError(f"step {step}: got a loss of {sums.loss}, expected a finite one: lower learning_rate")
    speed = float(sums.pieces) / (time.perf_counter() - clock)
    reporter.training(step, float(sums.loss / sums.pieces), speed, nll=float(sums.nll / sums.pieces))


def _init(config: TrainConfig, key) -> TrainState:
    dummy = jnp.ones((1, 2), jnp.int32)
    network = T5(computing(config, config.model))
    variables = network.init(key, dummy, dummy > 0, dummy, encoded=network.dummy_encoded())
    return _state_of(config, variables["params"])


def _state_of(config: TrainConfig, params: dict) -> TrainState:
    """The state before the first step."""
    return TrainState(params, make_optimizer(config).init(params), jnp.zeros((), jnp.int32))


def _abstract_state(config: TrainConfig) -> TrainState:
    return abstract_state(functools.partial(_init, config))


def abstract_state(init) -> TrainState:
    """Shapes and dtypes of the state that `init` makes of a key, placed on the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(place, jax.eval_shape(init, jax.random.key(0)))


def computing(config: TrainConfig, shape: T5Config) -> T5Config:
    """`shape` with the dtype of the computation; rounding operands to that same dtype would be no rounding."""
    dtype = config.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    rounded = None if shape.matmul_dtype == dtype else shape.matmul_dtype
    return dataclasses.replace(shape, dtype=dtype, matmul_dtype=rounded)


# Files.


def check_files(config: TrainConfig) -> None:
    for name in ("train_files", "validation_files"):
        for path in config.paths(name):
            _expect(path.is_file(), name, str(path), "a TSV file")
    output = pathlib.Path(config.output_dir)
    _expect(output.is_dir() or not output.exists(), "output_dir", config.output_dir, "a folder, or none yet")


def _fixed(settings: dict) -> dict:
    return {"model": _shape(T5Config(**settings["model"])), "initialise_from": settings["initialise_from"]}


def record_settings(config, output: pathlib.Path, step: int | None, fixed: Callable[[dict], dict]) -> list[str]:
    """Writes `config.json`; returns what differs from the run that is resumed. Raises ValueError if it cannot be.

    `fixed` picks what must not differ out of the settings.
    """
    _expect(
        step is None or step <= config.steps, "steps", config.steps, f"at least the {step} steps that are saved in it"
    )
    path, settings = output / "config.json", json.loads(json.dumps(dataclasses.asdict(config)))
    lines = []
    if step is not None and path.exists():
        # What a setting did before it was one, its default says.
        before = {field.name: field.default for field in dataclasses.fields(config)} | json.loads(path.read_text())
        for name, value in fixed(settings).items():
            expected = f"that of the run in {config.output_dir}: {before[name]}"
            _expect(fixed(before)[name] == value, name, settings[name], expected)
        changed = [name for name in settings if name != "output_dir" and before[name] != settings[name]]
        lines = [f"changed since step {step}: {name} {before[name]} -> {settings[name]}" for name in changed]
    write_atomically(path, json.dumps(settings, indent=1).encode())
    return lines


def _shape(model: T5Config) -> T5Config:
    """What decides a network's parameters and what it computes with them."""
    return dataclasses.replace(model, dropout_rate=0.0, dtype="float32", matmul_dtype=None)


def record_target(path: pathlib.Path, name: str, target: LanguageModel, step: int | None) -> None:
    """Writes the fingerprint of the model that a run, which is at `step`, depends on; refuses another than before."""
    if step is not None and path.is_file() and path.read_text() != target.fingerprint:
        raise ValueError(f"{name}: got {target.name}, expected the one on which the run in {path.parent} began")
    write_atomically(path, target.fingerprint.encode())


def _teacher(config: TrainConfig) -> LanguageModel | None:
    if config.teacher is None:
        return None
    teacher = checkpoints.load(config.teacher, computing(config, config.model).dtype)
    width, expected = teacher.config.vocab_size, config.model.vocab_size
    _expect(width == expected, "teacher", f"{width} logits", f"model.vocab_size = {expected}")
    _expect(teacher.config.encoder_dim is None, "teacher", config.teacher, "a model with an encoder of its own")
    width, expected = teacher.config.emb_dim, config.model.encoder_dim or teacher.config.emb_dim
    _expect(width == expected, "teacher", f"an encoder of width {width}", f"model.encoder_dim = {expected}")
    check_special("teacher", teacher.vocabulary, teacher.start_token)
    return teacher


def _initial_params(config: TrainConfig) -> dict | None:
    if config.initialise_from is None:
        return None
    model = checkpoints.load(config.initialise_from, "float32")
    given = t5_only("initialise_from", model.config)
    _expect(_shape(given) == _shape(config.model), "initialise_from", given, f"the shape {config.model}")
    return model.params


def check_special(name: str, vocabulary, start_token: int) -> None:
    """Refuses a model whose vocabulary or start token training does not know."""
    _expect(start_token == 0, name, f"start token {start_token}", "0, that of training")
    given = type(vocabulary).__name__
    _expect(isinstance(vocabulary, data.SentencePieceVocabulary), name, given, "a SentencePiece vocabulary")


def _vocabulary_path(config: TrainConfig) -> pathlib.Path:
    return pathlib.Path(config.vocabulary or pathlib.Path(config.output_dir, "vocabulary.model"))


def _vocabulary(config: TrainConfig, teacher: LanguageModel | None) -> data.SentencePieceVocabulary:
    path, given = _vocabulary_path(config), {}
    if teacher is not None:
        given["the teacher"] = teacher.vocabulary
    if config.initialise_from is not None:
        pieces, start_token = checkpoints.load_vocabulary(config.initialise_from)
        check_special("initialise_from", pieces, start_token)
        given[config.initialise_from] = pieces
    owner = next(iter(given), None)
    if not path.exists():
        write_atomically(path, given[owner].model if owner else _train_vocabulary(config))
    vocabulary = data.SentencePieceVocabulary.load(path, given[owner].extra_ids if owner else 0)
    for name, pieces in given.items():
        if pieces.fingerprint() != vocabulary.fingerprint():
            raise ValueError(f"vocabulary: got {path}, expected {name}'s pieces")
    got = f"{vocabulary.size - vocabulary.extra_ids} pieces in {path}"
    got += f" and {vocabulary.extra_ids} sentinels of {owner}" if vocabulary.extra_ids else ""
    _expect(vocabulary.size == config.vocabulary_size, "vocabulary", got, f"vocabulary_size = {config.vocabulary_size}")
    return vocabulary


def _recorded_vocabulary(config: TrainConfig) -> data.SentencePieceVocabulary:
    """The vocabulary of a run that began: what `vocabulary_size` counts beside the file's pieces are sentinels."""
    pieces = data.SentencePieceVocabulary.load(_vocabulary_path(config))
    sentinels = config.vocabulary_size - pieces.size
    expected = f"at most vocabulary_size = {config.vocabulary_size}"
    _expect(sentinels >= 0, "vocabulary", f"{pieces.size} pieces in {_vocabulary_path(config)}", expected)
    return data.SentencePieceVocabulary(pieces.model, sentinels) if sentinels else pieces


def _train_vocabulary(config: TrainConfig) -> bytes:
    texts = (text for pair in data.read_pairs(config.paths("train_files")) for text in pair)
    try:
        return data.SentencePieceVocabulary.train(texts, config.vocabulary_size).model
    except RuntimeError as error:  # too many pieces for the text, too few for its characters
        reason = str(error).rpartition("] ")[2]
        raise ValueError(
            f"vocabulary_size: got {config.vocabulary_size}, expected a number that fits: {reason}"
        ) from None


def _batches(config: TrainConfig, vocabulary, paths) -> data.BucketedBatches:
    end = list(vocabulary.eos_ids)
    pairs = [
        (vocabulary.encode(source) + end, vocabulary.encode(target) + end if ids is None else ids)
        for source, target, ids in data.read_examples(paths)
    ]
    name, largest = ", ".join(map(str, paths)), max((max(ids) for pair in pairs for ids in pair), default=0)
    if largest >= config.model.vocab_size:  # only ids that a file gives can be so
        raise ValueError(f"{name}: got the id {largest}, expected at most {config.model.vocab_size - 1}")
    if any(0 in ids for pair in pairs for ids in pair):  # ids that a file gives, or other special ids than T5's
        raise ValueError(f"{name}: got the piece {vocabulary.piece(0)!r} with id 0, expected none: 0 is padding")
    try:
        return data.BucketedBatches(pairs, config.buckets, config.batch_tokens, config.seed, config.target_buckets)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
