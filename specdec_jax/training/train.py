"""Trains a model, resumes after a kill, and writes the result."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.checkpoints import converter, loader, native_format
from specdec_jax.files import mirrors, places, reading
from specdec_jax.files.locks import lock_folder
from specdec_jax.files.places import AnyPath
from specdec_jax.files.progress import print_line
from specdec_jax.files.reading import digest, mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.families import build_config
from specdec_jax.models.family import ModelConfig, check_uses_backend
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import initial_params
from specdec_jax.tokenizers.languages import choose_start_token
from specdec_jax.training import corpus, losses, run_folder
from specdec_jax.training.batches import BucketedBatches
from specdec_jax.training.config import ExamplesConfig, TrainConfig, expect
from specdec_jax.training.depth_expansion import deepen
from specdec_jax.training.losses import Metrics, Objective, TeacherAgreement, TrainState, train_step
from specdec_jax.training.optimizer import make_optimizer
from specdec_jax.training.run_folder import Checkpoints, Reporter
from specdec_jax.training.run_vocabulary import RunVocabulary, choose_vocabulary

# Files in a run's folder with the fingerprint of the teacher: if its encoder output is read, or if
# it is not.
_ENCODER, _TEACHER = "encoder_fingerprint", "teacher_fingerprint"
# Settings that change the loss and no other figure on the files; label smoothing and the weights of
# depths change none.
_OF_THE_LOSS = ("distill_weight", "divergence", "distill_temperature", "backbone_weight")


# The run.


@isolated
def fit(config: TrainConfig, on_start: Callable[[], object] = lambda: None) -> dict:
    """Trains a model and writes it to `output_dir/model`; resumes an earlier run in `output_dir`.

    `output_dir` also holds the two newest checkpoints (`checkpoints`), the parameters that did best
    on the validation files (`best`, chosen by `select`), which become the model, and `log.jsonl`.
    SIGINT and SIGTERM end the step in progress and save it.

    Args:
      config: the settings.
      on_start: called before the first step, when nothing can reject the run any more.

    Returns:
      The parameters of the last step.

    Raises:
      ValueError: bad settings or files, before anything compiles; or a loss that is no longer
        finite.
      KeyboardInterrupt: after a signal, when the run is saved.
    """
    arguments.check_kind("config", config, TrainConfig, "a TrainConfig")
    check_files(config, config.corpus.files)
    check_lengths(config, "model", config.model)
    print_line("reading the files of examples")
    make_run = functools.partial(Run, config)
    return run_to_end(config, Run.fixed, make_run, on_start, config.select).params


def run_to_end(
    settings: ExamplesConfig,
    fixed: Callable[[dict], dict],
    make_run: Callable[[Checkpoints], "Run"],
    on_start: Callable[[], object],
    select: str = "loss",
) -> TrainState:
    """Takes the remaining steps of the run in `settings.output_dir`, and writes its result.

    Returns the state of the last step. `fixed` picks the settings that must not differ in a run
    that is resumed, and `make_run` makes the run from its checkpoints; `on_start` is as for `fit`.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(mirrors.open_folder(settings.output_dir))
        output.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock_folder(output))
        saved = Checkpoints(output, resume=True, select=select)
        for line in run_folder.list_changed_settings(settings, output, saved.step, fixed):
            print_line(line)
        run = make_run(saved)
        config = run.config
        print_line("compiling the initial state")
        state = run.initial_state()
        changed = run.record()
        run_folder.record_settings(settings, output)
        on_start()
        for line in changed:
            print_line(line)
        start = int(state.step)
        print_line(
            f"{'resumed at' if start else 'begins at'} step {start} of {config.steps};"
            f" {run.batches.per_epoch} batches an epoch, {config.corpus.summary(run.batches)};"
            f" {optax.tree.size(state.params):,} parameters, {run.objective.model.config.dtype}"
        )
        if start < config.steps:
            with Reporter(output / "log.jsonl", start, config.steps) as reporter:
                state = _take_steps(run, state, reporter)
        run.export()
    return state


@isolated
def export(
    output_dir: reading.PathLike,
    path: reading.PathLike,
    which: str = "best",
    dtype: str | None = "bfloat16",
) -> None:
    """Writes the model of the run in `output_dir` to the folder `path`, replacing a model there.

    Args:
      output_dir: folder of the run; it may have been moved or copied.
      path: folder of the model.
      which: "best" takes the parameters that did best on the validation files (the newest if there
        are none), "newest" those of the newest checkpoint.
      dtype: dtype in which the parameters are stored; None keeps float32.

    Raises:
      ValueError: there is no run of a model, or it has saved nothing.
    """
    expect(which in ("best", "newest"), "which", which, "'best' or 'newest'")
    with mirrors.read_folder(output_dir) as output:
        _export(output_dir, output, places.make_path(path), which, dtype)


def _export(
    output_dir: reading.PathLike, output: pathlib.Path, path: AnyPath, which: str, dtype: str | None
) -> None:
    """Does what `export` does, for the run whose files lie in the folder `output`."""
    if not (output / "config.json").is_file():
        raise ValueError(
            f"{output_dir}: got a folder without config.json, expected the folder of a training run"
        )
    stored = reading.read_json(output / "config.json")
    if "model" not in stored:
        got = "a run of heads or of an EAGLE drafter, which writes its result itself"
        raise mismatch_error(output_dir, got, "one that trains a model")
    shape = build_config(stored["model"])
    config = TrainConfig(**{**stored, "model": shape, "output_dir": str(output)})
    saved = Checkpoints(output, select=config.select)
    if saved.step is None and (which == "newest" or saved.best.best_step() is None):
        raise mismatch_error(output_dir, "no checkpoint", "a training run that has saved one")
    state = _make_abstract_state(config)
    params = saved.restore_best(state) if which == "best" else saved.restore(state).params
    network = config.model.replace(matmul_dtype=None, dropout_rate=0.0)
    ids, fingerprint = RunVocabulary.read(output), output / _ENCODER
    model = LanguageModel(
        network,
        params,
        ids.vocabulary,
        start_token=ids.start_token,
        eos_ids=ids.eos_ids,
        name=path.name,
        encoder_fingerprint=fingerprint.read_text() if fingerprint.is_file() else None,
        generation_config=ids.generation_config,
    )
    converter.save(model, path, dtype=dtype)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str)


class Run:
    """What a run needs besides its state: networks, vocabulary, batches.

    Attributes:
      loss: computes what is minimised.
      assess: computes what is reported on validation files.
    """

    loss: Any = staticmethod(losses.loss_fn)
    assess: Any = staticmethod(losses.assess)

    def __init__(self, config: TrainConfig, saved: Checkpoints):
        self.config, self.saved = config, saved
        teacher = _load_teacher(config)
        ids = _choose_vocabulary(config, teacher)
        self._initial = _load_initial_params(config) if saved.step is None else None
        network = set_dtype(config, config.model)
        self.objective = Objective(
            network.module(),
            config.label_smoothing or 0.0,
            start_token=choose_start(config, ids),
            masks=config.masks,
            mask_token=ids.start_token,  # as of `ParallelDrafter`, whatever the language is
        )
        self.teacher_params = None
        if teacher is not None:
            name = _TEACHER if config.model.encoder_dim is None else _ENCODER
            run_folder.record_target(
                mirrors.find_folder(config.output_dir) / name, "teacher", teacher, saved.step
            )
            shape = teacher.config.replace(matmul_dtype=config.model.matmul_dtype)
            self.objective = dataclasses.replace(
                self.objective,
                teacher=set_dtype(config, shape).module(),
                distill_weight=config.distill_weight,
                divergence=config.divergence,
                distill_temperature=config.distill_temperature,
            )
            self.teacher_params = teacher.params
        self.optimizer = make_optimizer(config)
        self.read(ids)

    @staticmethod
    def fixed(settings: dict) -> dict:
        """Returns the settings that must not differ in a run that is resumed."""
        model = _drop_rounding(build_config(settings["model"]))
        return {"model": model, "initialise_from": settings["initialise_from"]}

    def read(self, ids: RunVocabulary) -> None:
        """Reads the training and validation files."""
        config, self.ids = self.config, ids
        self.batches = _make_batches(config, ids, config.paths("train_files"))
        validation = [
            _make_batches(config, ids, [path]) for path in config.paths("validation_files")
        ]
        self.validation = dict(zip(config.validation_files, validation))

    def record(self) -> list[str]:
        """Records the vocabulary and what the run reads.

        Returns lines for the user about what was different for the steps before.
        """
        config, output = self.config, mirrors.find_folder(self.config.output_dir)
        names = config.train_files + config.validation_files
        paths = config.paths("train_files") + config.paths("validation_files")
        vocabulary = digest([native_format.vocabulary_contents(self.ids.vocabulary)])
        changed = run_folder.record_contents(
            output, self.saved.step, vocabulary, dict(zip(names, paths))
        )
        self.ids.write(output)
        digests = reading.read_json(output / "contents.json")["files"]
        own = sorted(digests[name] for name in config.validation_files)
        files, figure = digest(value.encode() for value in own), self._describe_figure()
        self.saved.measured = dict(validation_files=files, figure=digest([figure.encode()]))
        return changed

    def _describe_figure(self) -> str:
        """Returns the settings that decide what is measured on the validation files, as JSON."""
        skipped = {"label_smoothing", "depth_weight", *_OF_THE_LOSS * (self.saved.select != "loss")}
        settings = {name: value for name, value in vars(self.objective).items() if _is_plain(value)}
        names = "buckets", "target_buckets", "sequence_length", "source_language", "target_language"
        settings |= {name: getattr(self.config, name, None) for name in names}
        return json.dumps({k: v for k, v in settings.items() if k not in skipped}, sort_keys=True)

    def begin(self) -> TrainState:
        """Returns the state before the first step."""
        if self._initial is not None:
            params, self._initial = self._initial, None
            return TrainState.begin(params, self.optimizer)
        return jax.jit(self.init)(jax.random.key(self.config.seed))

    def init(self, key: jax.Array) -> TrainState:
        """Returns a state like the run's, with random parameters."""
        return _init(self.config, key)

    def initial_state(self) -> TrainState:
        """Returns the newest saved state, else the one before the first step."""
        if self.saved.step is None:
            return self.begin()
        return self.saved.restore(make_abstract_state(self.init))

    def step(self, state: TrainState, step: int) -> tuple[TrainState, Metrics]:
        """Takes the step with number `step`."""
        return train_step(
            state,
            self.batches[step],
            self.teacher_params,
            self.config.seed,
            objective=self.objective,
            optimizer=self.optimizer,
            loss=self.loss,
        )

    def validate(self, state: TrainState, step: int, reporter: Reporter) -> None:
        """Reports means over the tokens, by file and in total; keeps the best parameters."""
        sums = {
            name: losses.evaluate(
                state.params, batches, self.objective, self.teacher_params, self.assess
            )
            for name, batches in self.validation.items()
        }
        of_all = jax.tree.map(lambda *values: sum(values), *sums.values())

        def find(figure: Callable[[Any], float]) -> tuple[float, dict[str, float]]:
            return figure(of_all), {name: figure(one) for name, one in sums.items()}

        loss, by_file = find(self.mean_loss)
        agrees = isinstance(of_all[1], TeacherAgreement)

        def share(one: Any, field: str) -> float:
            return float(getattr(one[1], field) / one[0].tokens)

        fields = TeacherAgreement._fields if agrees else ()
        more = {field: find(functools.partial(share, field=field)) for field in fields}
        totals = {field: total for field, (total, _) in more.items()}
        best = self.saved.keep_best(step, state.params, loss, **totals)
        reporter.validation(step, loss, by_file, best, **more)

    def mean_loss(self, sums: Any) -> float:
        """Returns the mean loss over the tokens, from sums of what `assess` returns."""
        return float(sums[0].loss / sums[0].tokens)

    def save(self, state: TrainState, step: int) -> None:
        """Saves the state; raises ValueError if parameters are not finite."""
        if not _are_all_finite(state.params):
            raise mismatch_error(
                f"step {step}", "parameters that are not finite", "finite ones: lower learning_rate"
            )
        self.saved.keep_newest(step, state)

    def export(self) -> None:
        """Writes the model, and prints which parameters it has."""
        path, kept = self.config.output_dir, self.saved.best.best_step()
        export(path, mirrors.find_folder(path) / "model")
        which = "the newest parameters"
        if kept is not None:
            which = f"those of step {kept}, the best by {self.config.select}"
        print_line(f"wrote {mirrors.name_inside(path, 'model')}: {which}")


@jax.jit
def _are_all_finite(params: dict) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]))


def _take_steps(run: Run, state: TrainState, reporter: Reporter) -> TrainState:
    config, window = run.config, []
    with run_folder.defer_signals() as signals:
        if config.initialise_from is not None and run.saved.best.latest_step() is None:
            run.validate(state, 0, reporter)  # the best is then no worse than the beginning
        clock = time.perf_counter()
        for done in range(int(state.step) + 1, config.steps + 1):
            state, metrics = run.step(state, done - 1)
            if window:  # the host is at most one step ahead, so that a signal is soon obeyed
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
                mirrors.copy_folder(config.output_dir)
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
    tokens = max(float(sums.tokens), 1.0)  # of heads there may be none
    loss, nll = float(sums.loss) / tokens, float(sums.nll) / tokens
    reporter.training(step, loss, speed, nll=nll)


def _init(config: TrainConfig, key: jax.Array) -> TrainState:
    params = initial_params(set_dtype(config, config.model).module(), key)
    return TrainState.begin(params, make_optimizer(config))


def _make_abstract_state(config: TrainConfig) -> TrainState:
    return make_abstract_state(functools.partial(_init, config))


def make_abstract_state(init: Callable[[jax.Array], TrainState]) -> TrainState:
    """Returns shapes and dtypes of what `init` makes from a key, placed on the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def count_saved_bytes(config: TrainConfig) -> int:
    """Returns the bytes of a run's files: the two newest states, the best parameters, the model."""
    state = _make_abstract_state(config)
    return 2 * _count_bytes(state) + _count_bytes(state.params) * 3 // 2


def _count_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def set_dtype(config: TrainConfig, shape: ModelConfig) -> ModelConfig:
    """Returns `shape` with the dtype of the computation.

    A `matmul_dtype` that is the same is left out: it would round nothing.
    """
    dtype = config.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    rounded = None if shape.matmul_dtype == dtype else shape.matmul_dtype
    return shape.replace(dtype=dtype, matmul_dtype=rounded)


# Files.


def check_files(config: ExamplesConfig, kind: str) -> None:
    """Raises ValueError for files of examples that are missing, or an `output_dir` that is a file.

    `kind` is what the files should be, for the message.
    """
    for name in ("train_files", "validation_files"):
        for path in config.paths(name):
            expect(path.is_file(), name, str(path), kind)
    output = places.make_path(config.output_dir)
    config.expect("output_dir", output.is_dir() or not output.exists(), "a folder, or none yet")


def _drop_rounding(model: ModelConfig) -> ModelConfig:
    """Returns the part of a configuration that decides the parameters and what they compute."""
    return model.replace(dropout_rate=0.0, dtype="float32", matmul_dtype=None)


def _load_teacher(config: TrainConfig) -> LanguageModel | None:
    if config.teacher is None:
        return None
    model = config.model
    teacher = loader.load(config.teacher, set_dtype(config, model).dtype)
    shape = teacher.config
    kinds = "a model with an encoder", "a decoder-only model"
    kind, expected = (kinds[one.decoder_only] for one in (shape, model))
    if kind != expected:
        raise mismatch_error("teacher", kind, f"{expected}, like the model")
    check_lengths(config, "teacher", shape)
    same_width = shape.vocab_size == model.vocab_size
    expected = f"model.vocab_size = {model.vocab_size}"
    expect(same_width, "teacher", f"{shape.vocab_size} logits", expected)
    expected = "a model with an encoder of its own"
    expect(shape.encoder_dim is None, "teacher", config.teacher, expected)
    same_width = model.encoder_dim in (None, shape.encoded_dim)
    expected = f"model.encoder_dim = {model.encoder_dim}"
    expect(same_width, "teacher", f"an encoder of width {shape.encoded_dim}", expected)
    return teacher


def _load_initial_params(config: TrainConfig) -> dict | None:
    if config.initialise_from is None:
        return None
    model = loader.load(config.initialise_from, "float32")
    more = {}
    for stack in ("encoder", "decoder"):
        name = f"num_{stack}_layers"
        layers, wanted = (getattr(shape, name, 0) for shape in (model.config, config.model))
        if 0 < layers < wanted:
            more[stack] = wanted
    counts = {f"num_{stack}_layers": wanted for stack, wanted in more.items()}
    deeper = _drop_rounding(model.config.replace(**counts))
    expected = f"the shape {config.model}, or it with fewer layers"
    expect(deeper == _drop_rounding(config.model), "initialise_from", model.config, expected)
    options = model.config.block_options()
    can_grow = options.norm_place == "pre" and len(options.layer_kinds) == 1
    expected = "as many layers, since these are not alike, or are normalised after they are added"
    expect(can_grow or not more, "initialise_from", model.config, expected)
    params = model.params
    for stack, wanted in more.items():
        params = deepen(params, stack, wanted)
    return params


def _choose_vocabulary(config: TrainConfig, teacher: LanguageModel | None) -> RunVocabulary:
    given, path, size = {}, config.initialise_from, config.vocabulary_size
    if teacher is not None:
        given["the teacher"] = RunVocabulary.from_model(teacher, "teacher")
    if path is not None:
        given[path] = RunVocabulary.from_checkpoint(path, "initialise_from")
    files = config.paths("train_files")
    make = functools.partial(corpus.train_vocabulary, config.corpus, files, size)
    output = mirrors.find_folder(config.output_dir)
    return choose_vocabulary(config.vocabulary, output, size, given, config.corpus, make)


def check_lengths(config: TrainConfig, name: str, shape: ModelConfig) -> None:
    """Raises ValueError, which begins with `name`, for examples longer than a model's positions."""
    lengths = {"sequence_length": config.sequence_length}
    if not shape.decoder_only or getattr(config, "prompts", False):  # heads learn of texts alone
        lengths = {"buckets": config.buckets[-1]}
        lengths |= {"target_buckets": config.target_buckets[-1]} if config.target_buckets else {}
    for option, length in lengths.items():
        positions = shape.max_positions
        enough = positions is None or length is None or positions >= length
        expect(enough, name, f"{positions} positions", f"at least {option} = {length}")


def check_target(shape: ModelConfig) -> ModelConfig:
    """Returns the shape of a target whose states a run reads; raises ValueError for another."""
    check_uses_backend(shape, "training on its states")
    if shape.encoder_dim is not None:
        got = "a model that reads another's encoder output"
        raise mismatch_error("target", got, "one with an encoder")
    if not shape.shares_vocabulary:
        expected = "one vocabulary for inputs and outputs"
        raise mismatch_error("target", "a model with separate vocabularies", expected)
    return shape


def choose_start(config: TrainConfig, ids: RunVocabulary) -> int:
    """Returns what decoders are fed first."""
    languages = ids.vocabulary.languages
    return choose_start_token(languages, config.target_language, ids.start_token)


def _make_batches(
    config: TrainConfig, ids: RunVocabulary, paths: Sequence[AnyPath]
) -> BucketedBatches:
    limits = config.model.vocab_size, config.batch_tokens, config.seed, ids.start_token
    languages = config.source_language, config.target_language
    return config.corpus.batches(ids.vocabulary.with_languages(*languages), paths, *limits)
