"""Writes what a target answers to many sources, in files that survive a kill: what a drafter learns from."""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import rich.console

from specdec_jax.decoding.jobs import decode_all
from specdec_jax.decoding.progress import Progress
from specdec_jax.files.writing import write_file
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.training.run_folder import deferred_signals


class OutputSettings(Protocol):
    """What decides the outputs: `DistillConfig`, which says what each field is and is frozen, hence the properties."""

    @property
    def output_dir(self) -> str | None: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def samples(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def buckets(self) -> tuple[int, ...]: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def shard_size(self) -> int: ...
    @property
    def seed(self) -> int: ...


class Job(NamedTuple):
    """A file of outputs: one kind for the sources of one part.

    Attributes:
      path: where they go; each line has source, output and the output's ids.
      sources: ids of each, EOS included.
      texts: the same as text.
      first: number of the first source among all, for its key.
      samples: outputs of each source; 0: its argmax output.
    """

    path: pathlib.Path
    sources: list[list[int]]
    texts: list[str]
    first: int
    samples: int

    @property
    def per_source(self) -> int:
        return self.samples or 1

    def shard(self, start: int) -> pathlib.Path:
        """The file of the outputs for the sources from `start` on, until all are there."""
        return self.path.with_suffix(f".{start:09}.tsv")


def plan_jobs(config: OutputSettings, vocabulary, parts: dict[str, list[str]]) -> list[Job]:
    """Lists the files of outputs: a kind for the sources of a part, without those that are too long or read as padding.

    Raises:
      ValueError: a part of which no source is left.
    """
    assert config.output_dir
    output, end, first, jobs = pathlib.Path(config.output_dir), list(vocabulary.eos_ids[:1]), 0, []
    kinds = {"greedy": 0} if config.greedy else {}
    kinds |= {"sampled": config.samples} if config.samples else {}
    for part, texts in parts.items():
        sources = [(vocabulary.encode(text) + end, text) for text in texts if text.strip()]
        sources = [(ids, text) for ids, text in sources if len(ids) <= config.buckets[-1] and 0 not in ids]
        if not sources:
            raise ValueError(f"{part}: got no source of at most {config.buckets[-1]} pieces, expected at least one")
        ids, kept = map(list, zip(*sources))
        jobs += [Job(output / f"outputs-{part}-{kind}.tsv", ids, kept, first, n) for kind, n in kinds.items()]
        first += len(sources)
    return jobs


def write_outputs(
    config: OutputSettings, target: LanguageModel, jobs: list[Job], console: rich.console.Console
) -> None:
    """Writes every file of outputs that is not there yet."""
    total = sum(len(job.texts) * job.per_source for job in jobs)
    with deferred_signals() as signals, Progress("outputs", total, console, lines=False) as progress:
        for job in jobs:
            starts = range(0, len(job.texts), config.shard_size)
            for start in starts:
                shard = job.shard(start)
                if job.path.exists() or shard.exists():
                    progress.skip(min(config.shard_size, len(job.texts) - start) * job.per_source)
                else:
                    lines = []
                    for line in _lines(config, target, job, start):
                        lines.append(line)
                        progress.advance()
                        _stop_if_asked(signals, progress)
                    write_file(shard, "".join(lines))
                    progress.report()
                    _stop_if_asked(signals, progress)
            if not job.path.exists():
                write_file(job.path, b"".join(job.shard(start).read_bytes() for start in starts))
            for start in starts:
                job.shard(start).unlink(missing_ok=True)


def _stop_if_asked(signals: list[int], progress: Progress) -> None:
    if signals:
        progress.message("interrupted: files of outputs are kept; the same command goes on from there")
        raise KeyboardInterrupt(signals[0])


def _lines(config: OutputSettings, target: LanguageModel, job: Job, start: int) -> Iterator[str]:
    """A line for each output of one shard; "" for one with the id of padding, which would count as such."""
    chosen = slice(start, start + config.shard_size)
    outputs = decode_all(
        target, job.sources[chosen], batch_size=config.batch_size, seed=config.seed, first=job.first + start,
        num_samples=job.per_source, sampling=SamplingConfig(temperature=config.temperature if job.samples else 0.0),
        max_new_tokens=config.max_new_tokens, max_input_length=config.buckets[-1],
    )  # fmt: skip
    texts = (text for text in job.texts[chosen] for _ in range(job.per_source))
    for text, output in zip(texts, outputs, strict=True):
        assert output.text is not None, "the sources were text"
        columns = (text, " ".join(output.text.split()), " ".join(map(str, output.tokens)))
        yield "" if 0 in output.tokens else "\t".join(columns) + "\n"
