"""Runs `specdec distill`: a drafter learns from its target.

It learns from the target's outputs (sequence level) and distributions (token level). Both happen in
one folder, and both resume after a kill: first the target's outputs are written, in files for a
fixed number of sources each, then `train.fit` learns from them.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from specdec_jax.checkpoints import loader, native_format
from specdec_jax.commands import distill_lines
from specdec_jax.commands.generation_flags import option
from specdec_jax.commands.options import at_least
from specdec_jax.files import reading
from specdec_jax.files.progress import print_line
from specdec_jax.files.reading import digest
from specdec_jax.files.writing import lock_folder, write_file
from specdec_jax.models.t5 import T5Config, t5_only
from specdec_jax.tokenizers.vocabularies import Vocabulary
from specdec_jax.training import batches, text_files, train
from specdec_jax.training.config import TrainConfig
from specdec_jax.training.losses import DIVERGENCES
from specdec_jax.training.run_vocabulary import check_same, of_checkpoint
from specdec_jax.training.sequence_distillation import plan_jobs, write_outputs

_SHAPE = ("emb_dim", "num_heads", "head_dim", "num_encoder_layers", "num_decoder_layers", "mlp_dim")
_RECORD = "distill.json"
# The settings that decide the outputs, besides the sources.
_DECIDING = (
    "target",
    "max_sources",
    "greedy",
    "samples",
    "temperature",
    "max_new_tokens",
    "batch_size",
    "shard_size",
    "seed",
    "dtype",
)
_CONTENTS = ("vocabulary's contents", "target's contents")


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Settings of `specdec distill`; each field's help is in its metadata."""

    target: str | None = option(
        None, "model to learn from: a checkpoint's folder or a bundled name"
    )
    drafter: str | None = option(
        None,
        "model to start from, with the target's vocabulary (--drafter_shape makes a new one"
        " instead)",
    )
    drafter_shape: tuple[int, ...] = option(
        (),
        f"shape of a new drafter: {', '.join(_SHAPE)}, comma-separated; the rest is as in the"
        " target; with 0 encoder layers it attends to the target's encoder output",
    )
    source_files: tuple[str, ...] = option(
        (), "UTF-8 text, gzip or not, one source a line (what follows a tab is ignored); repeatable"
    )
    validation_files: tuple[str, ...] = option(
        (), "sources for validation, given like --source_files; repeatable"
    )
    data_dir: str = option("", "folder to which the names of the files are relative")
    output_dir: str | None = option(None, "folder of the run; a run that is there is resumed")
    max_sources: int = option(0, "sources to take from each file, evenly spread; 0: all")
    greedy: bool = option(True, "train and validate on the target's argmax output for every source")
    samples: int = option(
        0, "train and validate on this many samples of the target for every source"
    )
    temperature: float = option(1.0, "temperature of the samples")
    max_new_tokens: int = option(64, "maximum length of an output, in tokens; a longer one is cut")
    batch_size: int = option(64, "sources decoded together")
    shard_size: int = option(
        2048, "sources whose outputs are written together; a kill loses at most as many"
    )
    distill_weight: float = option(
        1.0, "w in the loss of every token, (1 - w) * cross-entropy + w * divergence"
    )
    divergence: str = option(
        "forward_kl",
        f"divergence from the target's distribution: {', '.join(DIVERGENCES)} (= 1 - alpha)",
    )
    distill_temperature: float = option(
        1.0,
        "temperature of the target's distribution in the divergence; below 1 its argmax counts"
        " more",
    )
    select: str = option(
        "loss",
        "how the best parameters are chosen: by validation loss, acceptance (alpha at temperature"
        " 1) or agreement (at 0)",
    )
    steps: int = option(2000, "optimiser steps in all")
    warmup_steps: int | None = option(
        None, "steps of linear warm-up at the start (default: a twentieth of --steps)"
    )
    decay_steps: int | None = option(
        None, "steps of linear decay to zero at the end (default: a quarter of --steps)"
    )
    learning_rate: float = option(
        0.01, "size of a step relative to the root mean square of the array it changes"
    )
    batch_tokens: int = option(4096, "padded tokens on the longer side of a batch")
    buckets: tuple[int, ...] = option(
        (8, 10, 12, 14, 16, 20, 24, 32, 48, 64),
        "padded lengths, ascending; longer sources are left out",
    )
    seed: int = option(
        0, "seed of the samples, the drafter's initial parameters and the order of the batches"
    )
    log_every: int = option(20, "steps between two records in the log")
    save_every: int = option(100, "steps between two checkpoints")
    evaluate_every: int = option(200, "steps between two validations")
    dtype: str | None = option(
        None, "float32 or bfloat16 (default: float32 on a CPU, bfloat16 on an accelerator)"
    )
    matmul_dtype: str | None = option(
        None, "dtype to which operands of products are rounded (default: they are not)"
    )

    def check(self) -> None:
        """Raises ValueError for settings that can be seen to be wrong before a model is loaded."""
        for name, expected in (
            ("target", " or ".join(["a checkpoint's folder", *loader.bundled()])),
            ("output_dir", "a folder for the run"),
            ("source_files", "at least one UTF-8 text file"),
            ("validation_files", "at least one UTF-8 text file"),
        ):
            if not getattr(self, name):
                raise ValueError(f"{name}: got nothing, expected {expected}")
        for name in ("source_files", "validation_files"):
            for path in self.paths(name):
                if not path.is_file():
                    raise ValueError(
                        f"{name}: got {str(path)!r}, which is no file, expected a UTF-8 text file"
                    )
        if bool(self.drafter) == bool(self.drafter_shape):
            got = "both" if self.drafter else "nothing"
            raise ValueError(f"drafter, drafter_shape: got {got}, expected one of them")
        if self.drafter_shape and len(self.drafter_shape) != len(_SHAPE):
            raise ValueError(
                f"drafter_shape: got {self.drafter_shape}, expected {', '.join(_SHAPE)}"
            )
        at_least(
            1,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            shard_size=self.shard_size,
        )
        at_least(0, max_sources=self.max_sources, samples=self.samples)
        if not self.greedy and not self.samples:
            raise ValueError(
                "samples: got 0 without greedy outputs, expected at least 1: there is nothing to"
                " learn from"
            )
        if self.samples and not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature: got {self.temperature}, expected a positive number (greedy is 0)"
            )
        batches.check_buckets(self.buckets, self.batch_tokens)
        if self.max_new_tokens > self.buckets[-1]:
            expected = f"at most the longest bucket, {self.buckets[-1]}"
            raise ValueError(f"max_new_tokens: got {self.max_new_tokens}, expected {expected}")

    def paths(self, name: str) -> list[pathlib.Path]:
        """Returns the paths of `source_files` or `validation_files`, within `data_dir`."""
        return [pathlib.Path(self.data_dir, file) for file in getattr(self, name)]

    def shape(self, target: T5Config) -> T5Config:
        """Returns the drafter's configuration."""
        network = t5_only("drafter", loader.load_shape(self.drafter)) if self.drafter else target
        shape: dict[str, Any] = dict(zip(_SHAPE, self.drafter_shape))
        if shape and not shape["num_encoder_layers"]:
            shape["encoder_dim"] = target.emb_dim
        return dataclasses.replace(
            network, **shape, dtype="float32", matmul_dtype=self.matmul_dtype
        )

    def training(
        self,
        model: T5Config,
        vocabulary_size: int,
        train_files: Any,
        validation_files: Any,
    ) -> TrainConfig:
        """Returns the settings of the second stage."""
        same = (
            "output_dir",
            "steps",
            "warmup_steps",
            "decay_steps",
            "learning_rate",
            "batch_tokens",
            "buckets",
            "distill_weight",
            "divergence",
            "distill_temperature",
            "select",
            "seed",
            "log_every",
            "save_every",
            "evaluate_every",
            "dtype",
        )
        return TrainConfig(
            model=model,
            train_files=train_files,
            validation_files=validation_files,
            data_dir=str(self.output_dir),
            initialise_from=self.drafter,
            vocabulary_size=vocabulary_size,
            teacher=self.target,
            label_smoothing=0.0,
            **{name: getattr(self, name) for name in same},
        )


def run(config: DistillConfig, begun: Callable[[], object] = lambda: None) -> dict:
    """Runs `specdec distill`.

    The target's outputs are written, then the drafter is trained on them and written to
    `output_dir/model`.

    Args:
      config: the settings.
      begun: called when nothing can reject the run any more, before an output is written and before
        the first step.

    Returns:
      The parameters of the last step.

    Raises:
      ValueError: bad settings or files, before anything compiles; or settings that contradict
        existing outputs.
      KeyboardInterrupt: after a signal; a run with the same settings resumes from there.
    """
    config.check()
    assert config.target and config.output_dir
    target = t5_only("target", loader.load_shape(config.target))
    model = config.shape(target)
    if target.encoder_dim is not None or model.encoder_dim not in (None, target.emb_dim):
        got = (
            "no encoder"
            if target.encoder_dim is not None
            else f"an encoder of width {target.emb_dim}"
        )
        expected = f"one of width {model.encoder_dim}" if model.encoder_dim else "one of its own"
        raise ValueError(f"target: got {config.target} with {got}, expected {expected}")
    vocabulary = _vocabulary(config, target.vocab_size)
    parts = {"train": _sources(config, config.paths("source_files"))}
    for number, path in enumerate(config.paths("validation_files"), 1):
        parts[f"validation-{number}"] = _sources(config, [path])
    jobs = plan_jobs(config, vocabulary, target.vocab_size, parts)
    training = config.training(
        model,
        vocabulary.size,
        [plan.path.name for plan in jobs if plan.path.name.startswith("outputs-train")],
        [plan.path.name for plan in jobs if plan.path.name.startswith("outputs-validation")],
    )
    read, kinds = sum(map(len, parts.values())), len(jobs) // len(parts)
    used = sum(len(plan.texts) for plan in jobs) // kinds
    print_line(
        f"{used} sources, {read - used} left out: empty, longer than {config.buckets[-1]} tokens or"
        " with one that the target lacks"
    )
    for line in distill_lines.needs(config, training, target, jobs):
        print_line(line)
    output = pathlib.Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    contents = {"vocabulary's contents": digest([native_format.vocabulary_contents(vocabulary)])}
    with lock_folder(output):
        _record(output / _RECORD, config, parts, contents)
        target_model = loader.load(config.target, config.dtype)
        contents |= {"target's contents": digest([target_model.contents.encode()])}
        _record(output / _RECORD, config, parts, contents)
        if not all(plan.path.exists() for plan in jobs):
            begun()
            write_outputs(config, target_model, jobs)
    params = train.fit(training, begun)
    held_out = [
        text for part, texts in parts.items() if part != "train" for text in texts if text.strip()
    ]
    write_file(output / distill_lines.VALIDATION, "".join(f"{text}\n" for text in held_out))
    for line in distill_lines.outcome(config):
        print_line(line)
    return params


def _vocabulary(config: DistillConfig, width: int) -> Vocabulary:
    """Returns the target's vocabulary.

    Raises ValueError for what `train.fit` would reject hours later.
    """
    assert config.target
    ids = of_checkpoint(config.target, "target")
    if config.drafter:
        check_same("drafter", of_checkpoint(config.drafter, "drafter"), "the target", ids)
        if (got := loader.load_shape(config.drafter).vocab_size) != width:
            raise ValueError(
                f"drafter: got {got} logits, expected {width}, as many as the target's"
            )
    return ids.vocabulary


def _sources(config: DistillConfig, paths: Iterable[pathlib.Path]) -> list[str]:
    sources = []
    for path in paths:
        lines = [line.partition("\t")[0] for line in text_files.read_lines(path)]
        count = min(config.max_sources or len(lines), len(lines))
        sources += [lines[i * len(lines) // count] for i in range(count)]
    return sources


def _record(
    path: pathlib.Path, config: DistillConfig, parts: dict[str, list[str]], contents: dict[str, str]
) -> None:
    """Writes the settings that decide the outputs to `path`.

    In a run that is resumed, they are compared with those of the earlier run.

    `contents` are fingerprints of models and vocabulary, as far as they are known. If an earlier
    run did not record one, it is not compared.
    """
    settings: dict[str, Any] = {name: getattr(config, name) for name in _DECIDING}
    settings["longest bucket"] = config.buckets[-1]
    for part, texts in parts.items():
        found = hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
        settings[f"{part} sources"] = f"{len(texts)} lines, {found[:16]}"
    before = contents | (reading.read_json(path) if path.exists() else settings)
    settings |= {name: before[name] for name in _CONTENTS if name in before} | contents
    for name in before | settings:
        got, expected = settings.get(name), before.get(name)
        if got != expected:
            raise ValueError(
                f"{name}: got {got}, expected {expected}, as for the outputs in {path.parent}"
            )
    write_file(path, json.dumps(settings, indent=1) + "\n")
