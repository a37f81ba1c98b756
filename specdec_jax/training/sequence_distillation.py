"""Writes a target's outputs for many sources, from which a drafter learns.

The files survive a kill.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from specdec_jax.checkpoints import loader
from specdec_jax.decoding.checks import SamplingChanges
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.files import mirrors
from specdec_jax.files.progress import Progress
from specdec_jax.files.reading import mismatch_error
from specdec_jax.files.writing import write_file
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.models.family import ModelConfig, check_uses_backend
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.models.t5 import reshape_as_t5
from specdec_jax.tokenizers.vocabularies import Vocabulary
from specdec_jax.training.batches import check_buckets
from specdec_jax.training.config import TeacherConfig, TrainConfig, expect
from specdec_jax.training.run_folder import defer_signals
from specdec_jax.training.text_files import check_is_file

_SHAPE = ("emb_dim", "num_heads", "head_dim", "num_encoder_layers", "num_decoder_layers", "mlp_dim")


@document_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(TeacherConfig):
    """The settings of `specdec distill`.

    Attributes:
      target: model to learn from: a checkpoint's folder or a bundled name
      drafter: model to start from, with the target's vocabulary (--drafter_shape makes a new one
        instead)
      greedy: train and validate on the target's argmax output for every source
      samples: train and validate on this many samples of the target for every source
      max_new_tokens: maximum length of an output, in tokens; a longer one is cut. With a
        decoder-only target a prompt and its output must fit into the longest bucket together
      shard_size: sources whose outputs are written together; a kill loses at most as many
      distill_weight: w in the loss of every token, (1 - w) * cross-entropy + w * divergence
      matmul_dtype: dtype to which operands of products are rounded (default: they are not)
    """

    target: str | None = None
    drafter: str | None = None
    drafter_shape: tuple[int, ...] = make_option(
        (),
        f"shape of a new drafter: {', '.join(_SHAPE)}, comma-separated; the rest is as in the"
        " target; with 0 encoder layers it attends to the target's encoder output (0 for a"
        " decoder-only target)",
    )
    source_files: tuple[str, ...] = make_option(
        (),
        "UTF-8 text, gzip or not, one source a line (what follows a tab is ignored), for a"
        " decoder-only target a prompt; repeatable",
    )
    max_sources: int = make_option(0, "sources to take from each file, evenly spread; 0: all")
    greedy: bool = True
    samples: int = 0
    temperature: float = make_option(1.0, "temperature of the samples")
    max_new_tokens: int = 64
    batch_size: int = make_option(64, "sources decoded together")
    shard_size: int = 2048
    distill_weight: float = 1.0
    matmul_dtype: str | None = None

    def check(self) -> None:
        """Raises ValueError for settings that can be seen to be wrong before a model is loaded."""
        files = "at least one UTF-8 text file"
        for name, expected in (
            ("target", " or ".join(["a checkpoint's folder", *loader.bundled()])),
            ("output_dir", "a folder for the run"),
            ("source_files", files),
            ("validation_files", files),
        ):
            if not getattr(self, name):
                raise ValueError(f"{name}: got nothing, expected {expected}")
        for name in ("source_files", "validation_files"):
            for path in self.paths(name):
                check_is_file(name, path)
        if bool(self.drafter) == bool(self.drafter_shape):
            got = "both" if self.drafter else "nothing"
            raise ValueError(f"drafter, drafter_shape: got {got}, expected one of them")
        known = len(self.drafter_shape) in (0, len(_SHAPE))
        self.expect("drafter_shape", known, ", ".join(_SHAPE))
        for name in ("max_new_tokens", "batch_size", "shard_size"):
            self.expect(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_sources", "samples"):
            self.expect(name, getattr(self, name) >= 0, "at least 0")
        if not self.greedy and not self.samples:
            expected = "at least 1: there is nothing to learn from"
            raise ValueError(f"samples: got 0 without greedy outputs, expected {expected}")
        positive = 0 < self.temperature < float("inf")
        self.expect("temperature", positive, "a positive number (greedy is 0)")
        default = DistillConfig.temperature
        unused = not self.samples and self.temperature != default
        self.expect("temperature", not unused, f"{default} without samples")
        check_buckets(self.buckets, self.batch_tokens)
        longest = self.buckets[-1]
        expected = f"at most the longest bucket, {longest}"
        self.expect("max_new_tokens", self.max_new_tokens <= longest, expected)

    def drafter_config(self, target: ModelConfig) -> ModelConfig:
        """Returns the drafter's configuration.

        A new drafter is a T5, whatever the target is, and of a decoder-only target's own family.

        Raises ValueError for a drafter that is decoder-only where the target is not, or the other
        way round.
        """
        rounding: dict[str, Any] = dict(dtype="float32", matmul_dtype=self.matmul_dtype)
        if self.drafter:
            own = loader.load_shape(self.drafter)
            kinds = "a model with an encoder", "a decoder-only model"
            got, expected = (kinds[one.decoder_only] for one in (own, target))
            if got != expected:
                raise mismatch_error("drafter", got, f"{expected}, like the target")
            return own.replace(**rounding)
        shape: dict[str, Any] = dict(zip(_SHAPE, self.drafter_shape))
        if target.decoder_only:
            layers = shape.pop("num_encoder_layers")
            expected = "0, as in the decoder-only target"
            expect(not layers, "num_encoder_layers", layers, expected)
            check_uses_backend(target, "a new drafter")
            return target.resize(**shape).replace(**rounding)
        if not shape["num_encoder_layers"]:
            shape["encoder_dim"] = target.encoded_dim
        return reshape_as_t5(target, **shape, **rounding)

    def limit_source_tokens(self, target: ModelConfig) -> int:
        """Returns the most tokens of a source; a prompt and its output share a bucket."""
        return self.buckets[-1] - (self.max_new_tokens if target.decoder_only else 0)

    def train_config(
        self, model: ModelConfig, vocabulary_size: int, files: list[str]
    ) -> TrainConfig:
        """Returns the settings of the second stage, which learns from files of outputs."""
        own: dict[str, Any] = dict(
            train_files=[name for name in files if name.startswith("outputs-train")],
            validation_files=[name for name in files if name.startswith("outputs-validation")],
            data_dir=self.output_dir,
            initialise_from=self.drafter,
            vocabulary_size=vocabulary_size,
            teacher=self.target,
            label_smoothing=0.0,
            prompts=model.decoder_only,
        )
        return TrainConfig(model=model, **self.shared_settings() | own)


class Job(NamedTuple):
    """One file of outputs: one kind of output for the sources of one part.

    Attributes:
      path: the file; each line has source, output and the output's ids.
      sources: ids of each source, EOS included unless it is a prompt.
      texts: the sources as text.
      first: number of the first source among all, for its key.
      samples: number of outputs of each source; 0: its argmax output.
    """

    path: pathlib.Path
    sources: list[list[int]]
    texts: list[str]
    first: int
    samples: int

    @property
    def per_source(self) -> int:
        """Number of outputs of each source."""
        return self.samples or 1

    def shard(self, start: int) -> pathlib.Path:
        """Returns the path of the outputs for sources from `start` on, kept until all are there."""
        return self.path.with_suffix(f".{start:09}.tsv")


def plan_jobs(
    config: DistillConfig, vocabulary: Vocabulary, target: ModelConfig, parts: dict[str, list[str]]
) -> list[Job]:
    """Returns the files of outputs to write, one for each part and kind of output.

    Sources that are too long, or have tokens that the target lacks, are left out.

    Raises:
      ValueError: no source of a part is left.
    """
    output, first, jobs = mirrors.find_folder(config.output_dir), 0, []
    kinds = {"greedy": 0} if config.greedy else {}
    kinds |= {"sampled": config.samples} if config.samples else {}
    longest, ids = config.limit_source_tokens(target), target.vocab_size
    if longest < 1:
        expected = f"fewer than the longest of buckets, {config.buckets[-1]}: it has the prompt too"
        raise mismatch_error("max_new_tokens", config.max_new_tokens, expected)
    encode = vocabulary.encode_prompt if target.decoder_only else vocabulary.encode_input
    for part, texts in parts.items():
        encoded = ((encode(text), text) for text in texts if text.strip())
        pairs = [(row, text) for row, text in encoded if 0 < len(row) <= longest and max(row) < ids]
        if not pairs:
            got = f"no source of at most {longest} tokens"
            raise ValueError(f"{part}: got {got}, expected at least one")
        rows, kept = map(list, zip(*pairs))
        for kind, samples in kinds.items():
            jobs.append(Job(output / f"outputs-{part}-{kind}.tsv", rows, kept, first, samples))
        first += len(pairs)
    return jobs


def write_outputs(config: DistillConfig, target: LanguageModel, jobs: list[Job]) -> None:
    """Writes every file of outputs that is not there yet."""
    total = sum(len(job.texts) * job.per_source for job in jobs)
    with defer_signals() as signals, Progress("generating targets", total, "targets") as progress:
        for job in jobs:
            starts = range(0, len(job.texts), config.shard_size)
            for start in starts:
                shard = job.shard(start)
                if job.path.exists() or shard.exists():
                    progress.skip(min(config.shard_size, len(job.texts) - start) * job.per_source)
                else:
                    lines = []
                    for line in _yield_lines(config, target, job, start, progress.message):
                        lines.append(line)
                        progress.advance()
                        _stop_if_asked(signals, progress)
                    write_file(shard, "".join(lines))
                    mirrors.copy_folder(config.output_dir)
                    _stop_if_asked(signals, progress)
            if not job.path.exists():
                write_file(job.path, b"".join(job.shard(start).read_bytes() for start in starts))
            for start in starts:
                job.shard(start).unlink(missing_ok=True)
            mirrors.copy_folder(config.output_dir)


def _stop_if_asked(signals: list[int], progress: Progress) -> None:
    if signals:
        kept = "files of outputs are kept; the same command resumes from there"
        progress.message(f"interrupted: {kept}")
        raise KeyboardInterrupt(signals[0])


def _yield_lines(
    config: DistillConfig, target: LanguageModel, job: Job, start: int, say: Callable[[str], None]
) -> Iterator[str]:
    """Yields a line for each output of one shard, "" for one whose logits were not finite.

    `say` prints how many those were.

    Raises:
      NonFiniteLogitsError: there is no output at all.
    """
    chosen = slice(start, start + config.shard_size)
    known = target.generation_config or ModelDefaults()
    # What no output of the target has, or what all begin with, but neither beams nor penalties.
    names = ("forced_bos_token_id", "bad_words_ids", "suppress_tokens")
    kept = ModelDefaults(**{name: getattr(known, name) for name in names})
    outputs = decode_all(
        target,
        job.sources[chosen],
        batch_size=config.batch_size,
        seed=config.seed,
        first=job.first + start,
        num_samples=job.per_source,
        sampling=SamplingChanges({"temperature": config.temperature if job.samples else 0.0}),
        max_new_tokens=config.max_new_tokens,
        max_input_length=config.buckets[-1],
        non_finite="report",
        generation_config=kept,
        target_language=config.target_language,
    )
    texts = [text for text in job.texts[chosen] for _ in range(job.per_source)]
    lost = []
    for text, output in zip(texts, outputs, strict=True):
        if output.error is not None:
            lost.append(output.error)
            yield ""
            continue
        assert output.text is not None, "the sources were text"
        columns = (text, " ".join(output.text.split()), " ".join(map(str, output.tokens)))
        yield "\t".join(columns) + "\n"
    if len(lost) == len(texts):
        # One bad source may be alone in the last shard, while a damaged target shows in the first.
        earlier = [job.shard(place) for place in range(0, start, config.shard_size)]
        if not any(path.stat().st_size for path in earlier):
            raise lost[0]
    if lost:
        say(f"{len(lost):,} of {len(texts):,} outputs are left out: {lost[0].reason}")
