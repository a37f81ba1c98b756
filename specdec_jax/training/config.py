"""Settings that training runs share, those of a model's training, and their checks."""

import dataclasses
import operator
import os
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np

from specdec_jax.files import places
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.models.family import ModelConfig
from specdec_jax.speculative.policy import MAX_GAMMA
from specdec_jax.training.corpus import Continuations, Corpus, Pairs, Text
from specdec_jax.training.losses import DIVERGENCES, TeacherAgreement

# For each type of a setting: whether a value is of it, the value as Python's own, and its name.
_KINDS: dict[type, tuple] = {
    int: (arguments.is_integer, operator.index, "an integer"),
    float: (arguments.is_number, float, "a number"),
    bool: (arguments.is_flag, bool, "True or False"),
    str: (lambda value: isinstance(value, str | os.PathLike), os.fspath, "a string"),
}


def _read_value(name: str, value: Any, kind: type, many: bool) -> Any:
    """Returns a setting, or one of the `many` in it, as Python's own; raises ValueError."""
    is_sound, convert, expected = _KINDS[kind]
    if not is_sound(value):
        expected = f"a list of {expected.split()[-1]}s" if many else expected
        raise mismatch_error(name, arguments.quote(value), expected)
    return convert(value)


@document_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that every training run has.

    Subclasses add those of one kind of run. The fields give the flags and help of a command, the
    names in gin, and the record in a run's folder.

    Attributes:
      validation_files: files for validation, of the kind that is trained on; repeatable
      steps: optimiser steps in all; a run may be resumed with another number
      warmup_steps: steps of linear warm-up at the start (default: a twentieth of the steps)
      decay_steps: steps of linear decay to zero at the end (default: a quarter of the steps)
      learning_rate: size of a step relative to the root mean square of the array it changes
      buckets: padded lengths, ascending; longer examples are left out
      seed: seed of the initial parameters, the order of the batches, dropout, and samples
      dtype: float32 or bfloat16 (default: float32 on a CPU, bfloat16 on an accelerator)
    """

    output_dir: str = make_option(
        "", "folder of the run, here or at a URL; a run that is there is resumed"
    )
    validation_files: tuple[str, ...] = ()
    data_dir: str = make_option("", "folder to which the names of the files are relative")
    steps: int = 2000
    warmup_steps: int | None = None
    decay_steps: int | None = None
    learning_rate: float = 0.01
    batch_tokens: int = make_option(4096, "padded tokens on the longer side of a batch")
    buckets: tuple[int, ...] = (8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
    seed: int = 0
    log_every: int = make_option(20, "steps between two records in the log")
    save_every: int = make_option(100, "steps between two checkpoints")
    evaluate_every: int = make_option(200, "steps between two validations")
    dtype: str | None = None
    source_language: str | None = make_option(
        None, "code of the sources' language, for a model with several (default: the tokenizer's)"
    )
    target_language: str | None = make_option(
        None, "code of the outputs' language, for a model with several"
    )

    def paths(self, name: str) -> list[AnyPath]:
        """Returns the paths of the files in the field `name`, within `data_dir`."""
        return [places.join(self.data_dir, file) for file in getattr(self, name)]

    def __post_init__(self) -> None:
        """Checks the types of all settings, and keeps them as Python's own, as a record needs them.

        A string in the place of a list is its one item; None and an empty string have none.
        """
        for field in dataclasses.fields(self):
            name, value, kinds = field.name, getattr(self, field.name), typing.get_args(field.type)
            if typing.get_origin(field.type) is tuple:
                value = () if value is None else value
                if isinstance(value, str | os.PathLike):
                    value = (value,) if os.fspath(value) else ()
                value = tuple(value) if isinstance(value, Iterator) else value
                items = arguments.check_list(name, value, "a list")
                value = tuple(_read_value(name, item, kinds[0], many=True) for item in items)
            elif value is None and field.default in (None, ""):
                continue
            elif isinstance(value, np.dtype) and name.endswith("dtype"):
                value = value.name
            elif kind := next((one for one in (*kinds, field.type) if one in _KINDS), None):
                value = _read_value(name, value, kind, many=False)
            object.__setattr__(self, name, value)
        for name, needed in (("buckets", True), ("target_buckets", False)):
            given = getattr(self, name, ())
            ascending = list(given) == sorted(set(given)) and all(length >= 1 for length in given)
            sound = ascending and (bool(given) or not needed)
            expect(sound, name, given, "ascending lengths from 1")
        rounded = getattr(self, "matmul_dtype", None)
        known = rounded in (None, "float32", "bfloat16")
        expect(known, "matmul_dtype", rounded, "None, float32 or bfloat16")

    def shared_settings(self) -> dict[str, Any]:
        """Returns the settings that a `TrainConfig` has too."""
        names = {field.name for field in dataclasses.fields(self)}
        shared = [field.name for field in dataclasses.fields(TrainConfig) if field.name in names]
        return {name: getattr(self, name) for name in shared}

    def expect(self, name: str, holds: bool, expected: str) -> None:
        """Raises ValueError with a field's value and what was expected, unless `holds`."""
        expect(holds, name, getattr(self, name), expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExamplesConfig(RunConfig):
    """The settings of a run that learns from files of examples, checked as far as they are shared.

    Raises:
      ValueError: a setting outside its range.
    """

    decay_share = 4  # the part of the steps in which the learning rate falls, as a divisor

    train_files: tuple[str, ...] = make_option(
        (), "TSV (source, target, perhaps the target's ids) or text, a document a line; gzip or not"
    )
    target_buckets: tuple[int, ...] = make_option(
        (), "padded lengths of the targets, if they are not as long as the sources (default: alike)"
    )
    sequence_length: int | None = make_option(
        None,
        "of a decoder-only model, and required there: tokens of the blocks into which text is cut,"
        " in the place of the buckets",
    )
    label_smoothing: float | None = make_option(
        None,
        "probability that is spread over the vocabulary (default: 0.1; 0 with distill_weight = 1,"
        " which leaves no cross-entropy)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train_files", "validation_files"):
            self.expect(name, len(getattr(self, name)) > 0, "at least one file")
        self.expect("output_dir", bool(self.output_dir), "a folder for the run")
        for name in ("steps", "log_every", "save_every", "evaluate_every"):
            self.expect(name, getattr(self, name) >= 1, "at least 1")
        self._set_schedule("warmup_steps", 20, self.decay_steps)
        self._set_schedule("decay_steps", self.decay_share, self.warmup_steps)
        for name in ("warmup_steps", "decay_steps", "seed"):
            self.expect(name, getattr(self, name) >= 0, "at least 0")
        self.expect("seed", self.seed < 2**31, f"at most {2**31 - 1}")  # an int32 under jit
        parts = (self.warmup_steps or 0) + (self.decay_steps or 0)
        expected = f"at least warmup_steps + decay_steps = {parts}"
        self.expect("steps", parts <= self.steps, expected)
        self.expect("learning_rate", 0 < self.learning_rate < float("inf"), "a positive number")
        smoothing = self.label_smoothing or 0  # it is set by now
        self.expect("label_smoothing", 0 <= smoothing < 1, "a number in [0, 1)")
        dtypes = (None, "float32", "bfloat16")
        self.expect("dtype", self.dtype in dtypes, "None, float32 or bfloat16")

    def _set_schedule(self, name: str, share: int, other: int | None) -> None:
        """Sets a part of the schedule that is not given, of what the `other` part leaves."""
        if getattr(self, name) is None:
            steps = max(0, min(self.steps // share, self.steps - (other or 0)))
            object.__setattr__(self, name, steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherConfig(RunConfig):
    """The settings of a run that learns a target's distributions, and chooses by acceptance."""

    distill_weight: float = make_option(
        0.0,
        "w in the loss of every token, (1 - w) * cross-entropy + w * divergence from the teacher;"
        " 0 without a teacher; above 0 with one, unless the model needs only its encoder's output",
    )
    divergence: str = make_option(
        "forward_kl",
        f"divergence from the target's distribution: {', '.join(DIVERGENCES)} (= 1 - alpha)",
    )
    distill_temperature: float = make_option(
        1.0,
        "temperature of the target's distribution in the divergence; below 1 its argmax counts"
        " more",
    )
    select: str = make_option(
        "loss",
        "how the best parameters are chosen: by validation loss, acceptance (alpha at temperature"
        " 1) or agreement (at 0)",
    )
    masks: int = make_option(
        0,
        "tokens after a random place of each target that are predicted from mask tokens, for a"
        " ParallelDrafter of up to masks + 1 tokens a call; 0: an ordinary model",
    )


@document_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(ExamplesConfig, TeacherConfig):
    """The settings of a run that trains a model.

    Attributes:
      model: shape of the network; its matmul_dtype and dropout_rate count in training only, and its
        dtype is set by `dtype` above
      initialise_from: model of the same shape and vocabulary, or with fewer layers, whose
        parameters a new run begins with (default: random ones)
      vocabulary: SentencePiece model or tokenizer.json, written if it does not exist (default: the
        vocabulary of the teacher, else of initialise_from, else vocabulary.model in output_dir,
        which is trained on the train files)
      vocabulary_size: ids: the vocabulary's tokens, and the sentinels of the model it comes from
      prompts: of a decoder-only model: the files are TSV (prompt, output, perhaps the output's
        ids), and it learns outputs alone, by the buckets and without sequence_length

    Raises:
      ValueError: a setting outside its range, or settings that contradict each other.
    """

    model: ModelConfig
    initialise_from: str | None = None
    vocabulary: str = ""
    vocabulary_size: int = 6144
    teacher: str | None = make_option(None, "model of the same kind to distil from")
    prompts: bool = False

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        expected = "a T5Config, a GPTConfig or another family's configuration"
        self.expect("model", isinstance(self.model, ModelConfig), expected)
        texts = self.model.decoder_only and not self.prompts
        most = 0 if texts else MAX_GAMMA - 1
        self.expect("masks", 0 <= self.masks <= most, f"a number from 0 to {most}")
        dtype = self.model.dtype
        expect(dtype == "float32", "model.dtype", dtype, "float32: TrainConfig.dtype sets it")
        soft = self.distill_weight == 1
        if self.label_smoothing is None:
            object.__setattr__(self, "label_smoothing", 0.0 if soft else 0.1)
        super().__post_init__()
        self._check_lengths()
        self._check_teacher()
        self.expect(
            "label_smoothing", not (soft and self.label_smoothing), "0 with distill_weight = 1"
        )
        self.expect("vocabulary_size", self.vocabulary_size >= 1, "at least 1")
        # Some tokenizers have more tokens than their models have logits.
        free = bool(self.teacher or self.initialise_from)
        most = self.model.vocab_size
        expected = f"at most model.vocab_size = {most}"
        self.expect("vocabulary_size", free or self.vocabulary_size <= most, expected)

    def _check_teacher(self) -> None:
        shares_encoder = self.model.encoder_dim is not None
        given = bool(self.teacher)
        self.expect(
            "teacher", given or not shares_encoder, "the model whose encoder output is read"
        )
        if shares_encoder:
            allowed, expected = 0 <= self.distill_weight <= 1, "a number in [0, 1]"
        else:
            allowed = 0 < self.distill_weight <= 1 if given else self.distill_weight == 0
            expected = "a number in (0, 1] with a teacher, 0 without"
        self.expect("distill_weight", allowed, expected)
        kinds = f"one of {', '.join(DIVERGENCES)}"
        self.expect("divergence", self.divergence in DIVERGENCES, kinds)
        positive = 0 < self.distill_temperature < float("inf")
        self.expect("distill_temperature", positive, "a positive number")
        if given:
            figures = ("loss", *TeacherAgreement._fields)
            self.expect("select", self.select in figures, f"one of {', '.join(figures)}")
            return
        for name in ("divergence", "distill_temperature", "select"):
            default = self.__dataclass_fields__[name].default
            expected = f"{default!r} without a teacher"
            self.expect(name, getattr(self, name) == default, expected)

    def _check_lengths(self) -> None:
        length, positions = self.sequence_length, self.model.max_positions
        if not self.model.decoder_only:
            self.expect("prompts", not self.prompts, "False: the model has an encoder")
            expected = "None: the model has an encoder"
            return self.expect("sequence_length", length is None, expected)
        if self.prompts:
            self.expect("target_buckets", not self.target_buckets, "none with prompts")
            return self.expect("sequence_length", length is None, "None with prompts")
        most = self.batch_tokens if positions is None else min(positions, self.batch_tokens)
        limits = f"model.num_positions = {positions} and batch_tokens = {self.batch_tokens}"
        expected = f"a number from 1 to the smaller of {limits}"
        self.expect("sequence_length", length is not None and 1 <= length <= most, expected)
        for name in ("buckets", "target_buckets"):
            unset = getattr(self, name) == self.__dataclass_fields__[name].default
            self.expect(name, unset, "none beside sequence_length")

    @property
    def corpus(self) -> Corpus:
        """How batches are made of the files: pairs, or plain text."""
        if self.prompts:
            return Continuations(self.buckets, self.target_buckets)
        if self.model.decoder_only:
            assert self.sequence_length is not None
            return Text(self.sequence_length)
        return Pairs(self.buckets, self.target_buckets)


def expect(holds: bool, name: str, got: Any, expected: str) -> None:
    """Raises ValueError with what was got and expected, unless `holds`."""
    if not holds:
        raise ValueError(f"{name}: got {got!r}, expected {expected}")
