"""Settings of a training run, and their checks."""

import dataclasses
import pathlib

import numpy as np

from specdec_jax.models.family import ModelConfig
from specdec_jax.training import corpus
from specdec_jax.training.losses import DIVERGENCES, TeacherAgreement


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    Attributes:
      model: shape of the network. `matmul_dtype` and `dropout_rate` count in training only; `dtype`
        is set below.
      train_files, validation_files: one or more files, gzip or not. TSV (source, tab, target; and
        after another tab perhaps the target's ids, as `specdec distill` writes them) or, for a
        decoder-only model, UTF-8 text with one document a line.
      output_dir: folder for checkpoints, the log and the final model; an existing run in it is
        resumed.
      data_dir: folder to which the names of the files are relative.
      initialise_from: path or bundled name of a model with the same shape and vocabulary, with
        whose parameters a new run begins; None: random ones. The optimiser's state is new in both
        cases. If that model has fewer layers, copies of its own that add little at first make up
        for the rest (`depth_expansion.py`).
      vocabulary: path of a SentencePiece model or a tokenizer.json; "": the vocabulary of the
        teacher, else of `initialise_from`, else `vocabulary.model` in `output_dir`. If there is no
        such file it is written: the teacher's, else that of `initialise_from`, else one trained on
        the train files.
      vocabulary_size: number of ids: the vocabulary's tokens, and the sentinels of the model it
        comes from.
      steps: optimiser steps in all; a run can be resumed with another number, and with another
        schedule.
      warmup_steps, decay_steps: linear warm-up at the start, linear decay to zero at the end;
        constant between. None: a twentieth and a quarter of `steps`.
      learning_rate: size of a step relative to the root mean square of the array that it changes.
      batch_tokens: number of padded tokens on the longer side of a batch.
      sequence_length: for a decoder-only model, and only there: number of tokens in the blocks into
        which its text is cut, at most the model's positions. It replaces `buckets` and
        `target_buckets`.
      buckets: padded lengths, ascending; longer pairs are left out and counted.
      target_buckets: padded lengths of the targets, if those are not as long as the inputs; none:
        `buckets` for both.
      label_smoothing: probability mass that is spread over the vocabulary.
      teacher: path of a model of the same kind to distil from, or None.
      distill_weight: w in (1 − w) · cross-entropy + w · D(teacher, student), per target token. 0
        without a teacher; with one above 0, unless the model needs its teacher for the encoder
        output alone.
      divergence: D: "forward_kl", "reverse_kl", "jensen_shannon" or "total_variation", which is 1 −
        α (`losses.py`).
      distill_temperature: temperature of the teacher's distribution in D; below 1 its argmax counts
        more.
      select: how the best parameters are chosen: by the lowest validation "loss", or by the highest
        "acceptance" (mean of Σ_v min(p, q), α at temperature 1) or "agreement" (of the argmax, α at
        temperature 0) with the teacher on the validation files.
      seed: decides the initial parameters, the order of the batches and dropout.
      log_every, save_every, evaluate_every: steps between records, checkpoints and validation
        losses.
      dtype: dtype of the computation; None: float32 on a CPU, bfloat16 on an accelerator.
        Parameters stay float32.
    """

    model: ModelConfig
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    output_dir: str
    data_dir: str = ""
    initialise_from: str | None = None
    vocabulary: str = ""
    vocabulary_size: int = 6144
    steps: int = 2000
    warmup_steps: int | None = None
    decay_steps: int | None = None
    learning_rate: float = 0.01
    batch_tokens: int = 4096
    sequence_length: int | None = None
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
            expect(len(getattr(self, name)) > 0, name, files, "at least one file")
        object.__setattr__(self, "buckets", tuple(self.buckets))
        object.__setattr__(self, "target_buckets", tuple(self.target_buckets))
        expect(
            isinstance(self.model, ModelConfig),
            "model",
            self.model,
            "a T5Config, a GPTConfig or another family's configuration",
        )
        expect(
            self.model.dtype == "float32",
            "model.dtype",
            self.model.dtype,
            "float32: TrainConfig.dtype sets it",
        )
        for name in ("steps", "log_every", "save_every", "evaluate_every", "vocabulary_size"):
            expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        follow_steps(self, 4)
        for name in ("warmup_steps", "decay_steps", "seed"):
            expect(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        self._check_lengths()
        parts = self.warmup_steps + self.decay_steps
        expect(
            parts <= self.steps,
            "steps",
            self.steps,
            f"at least warmup_steps + decay_steps = {parts}",
        )
        expect(
            0 < self.learning_rate < np.inf,
            "learning_rate",
            self.learning_rate,
            "a positive number",
        )
        expect(
            0 <= self.label_smoothing < 1,
            "label_smoothing",
            self.label_smoothing,
            "a number in [0, 1)",
        )
        shares = self.model.encoder_dim is not None
        expect(
            bool(self.teacher) or not shares,
            "teacher",
            None,
            "the model whose encoder output is read",
        )
        weights = "a number in [0, 1]" if shares else "a number in (0, 1] with a teacher, 0 without"
        fits = (
            0 < self.distill_weight <= 1
            or self.distill_weight == 0
            and (shares or not self.teacher)
        )
        fits = fits and (bool(self.teacher) or self.distill_weight == 0)
        expect(fits, "distill_weight", self.distill_weight, weights)
        expect(
            self.divergence in DIVERGENCES,
            "divergence",
            self.divergence,
            f"one of {', '.join(DIVERGENCES)}",
        )
        positive = 0 < self.distill_temperature < np.inf
        expect(positive, "distill_temperature", self.distill_temperature, "a positive number")
        if not self.teacher:
            for name, default in (("divergence", "forward_kl"), ("distill_temperature", 1.0)):
                expect(
                    getattr(self, name) == default,
                    name,
                    getattr(self, name),
                    f"{default!r} without a teacher",
                )
        choices = ("loss", *TeacherAgreement._fields) if self.teacher else ("loss",)
        expected = f"one of {', '.join(choices)}" if self.teacher else "'loss' without a teacher"
        expect(self.select in choices, "select", self.select, expected)
        tokens = f"at most model.vocab_size = {self.model.vocab_size}"
        fits = self.vocabulary_size <= self.model.vocab_size or bool(
            self.teacher or self.initialise_from
        )
        expect(
            fits, "vocabulary_size", self.vocabulary_size, tokens
        )  # some tokenizers have more tokens than logits
        expect(
            self.dtype in (None, "float32", "bfloat16"),
            "dtype",
            self.dtype,
            "None, float32 or bfloat16",
        )

    def _check_lengths(self) -> None:
        if not self.model.decoder_only:
            expect(
                self.sequence_length is None,
                "sequence_length",
                self.sequence_length,
                "None: the model is a T5",
            )
            return
        positions = self.model.max_positions
        most = self.batch_tokens if positions is None else min(positions, self.batch_tokens)
        limits = f"model.num_positions = {positions} and batch_tokens = {self.batch_tokens}"
        fits = self.sequence_length is not None and 1 <= self.sequence_length <= most
        expect(
            fits,
            "sequence_length",
            self.sequence_length,
            f"a number from 1 to the smaller of {limits}",
        )
        for name in ("buckets", "target_buckets"):
            default = self.__dataclass_fields__[name].default
            expect(
                getattr(self, name) == default,
                name,
                getattr(self, name),
                "none beside sequence_length",
            )

    @property
    def corpus(self) -> corpus.Corpus:
        """How batches are made of the files: pairs, or plain text."""
        if self.model.decoder_only:
            assert self.sequence_length is not None
            return corpus.Text(self.sequence_length)
        return corpus.Pairs(self.buckets, self.target_buckets)

    def paths(self, name: str) -> list[pathlib.Path]:
        """Returns the paths of `train_files` or `validation_files`, within `data_dir`."""
        return [pathlib.Path(self.data_dir, file) for file in getattr(self, name)]


def follow_steps(config, share: int) -> None:
    """Sets the warm-up of a frozen configuration to a twentieth of its steps, and the decay to one
    of `share` parts.

    What is given stays, and a part that is not gives way to it.
    """
    for name, other, parts in (
        ("warmup_steps", "decay_steps", 20),
        ("decay_steps", "warmup_steps", share),
    ):
        if getattr(config, name) is None:
            remaining = config.steps - (getattr(config, other) or 0)
            object.__setattr__(config, name, max(0, min(config.steps // parts, remaining)))


def expect(condition: bool, name: str, got, expected: str) -> None:
    """Raises ValueError with what was got and expected, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: got {got!r}, expected {expected}")
