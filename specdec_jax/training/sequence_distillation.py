"""Writes a target's outputs for many sources, from which a drafter learns, to files that survive a
kill."""

import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.files.progress import Progress
from specdec_jax.files.writing import write_file
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.training.run_folder import deferred_signals


class OutputSettings(Protocol):
    """What decides the outputs: `DistillConfig`, which says what each field is and is frozen, hence
    the properties."""

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
    """One file of outputs: one kind of output for the sources of one part.

    Attributes:
      path: the file; each line has source, output and the output's ids.
      sources: ids of each source, EOS included.
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
        """Returns the path of the file with the outputs for the sources from `start` on, which is
        kept until all are there."""
        return self.path.with_suffix(f".{start:09}.tsv")


def plan_jobs(
    config: OutputSettings, vocabulary, ids: int, parts: dict[str, list[str]]
) -> list[Job]:
    """Returns the files of outputs to write, one for each part and kind of output.

    Sources that are too long, or have tokens beyond the `ids` that the target knows, are left out.

    Raises:
      ValueError: no source of a part is left.
    """
    assert config.output_dir
    output, first, jobs = pathlib.Path(config.output_dir), 0, []
    kinds = {"greedy": 0} if config.greedy else {}
    kinds |= {"sampled": config.samples} if config.samples else {}
    for part, texts in parts.items():
        sources = [(vocabulary.encode_input(text), text) for text in texts if text.strip()]
        sources = [
            (row, text)
            for row, text in sources
            if 0 < len(row) <= config.buckets[-1] and max(row) < ids
        ]
        if not sources:
            raise ValueError(
                f"{part}: got no source of at most {config.buckets[-1]} tokens, expected at"
                " least one"
            )
        rows, kept = map(list, zip(*sources))
        jobs += [
            Job(output / f"outputs-{part}-{kind}.tsv", rows, kept, first, n)
            for kind, n in kinds.items()
        ]
        first += len(sources)
    return jobs


def write_outputs(config: OutputSettings, target: LanguageModel, jobs: list[Job]) -> None:
    """Writes every file of outputs that is not there yet."""
    total = sum(len(job.texts) * job.per_source for job in jobs)
    with (
        deferred_signals() as signals,
        Progress("generating targets", total, "targets") as progress,
    ):
        for job in jobs:
            starts = range(0, len(job.texts), config.shard_size)
            for start in starts:
                shard = job.shard(start)
                if job.path.exists() or shard.exists():
                    progress.skip(min(config.shard_size, len(job.texts) - start) * job.per_source)
                else:
                    lines = []
                    for line in _lines(config, target, job, start, progress.message):
                        lines.append(line)
                        progress.advance()
                        _stop_if_asked(signals, progress)
                    write_file(shard, "".join(lines))
                    _stop_if_asked(signals, progress)
            if not job.path.exists():
                write_file(job.path, b"".join(job.shard(start).read_bytes() for start in starts))
            for start in starts:
                job.shard(start).unlink(missing_ok=True)


def _stop_if_asked(signals: list[int], progress: Progress) -> None:
    if signals:
        progress.message(
            "interrupted: files of outputs are kept; the same command resumes from there"
        )
        raise KeyboardInterrupt(signals[0])


def _lines(
    config: OutputSettings, target: LanguageModel, job: Job, start: int, say: Callable[[str], None]
) -> Iterator[str]:
    """Yields a line for each output of one shard.

    "" for none, where logits were not finite numbers, which is said.

    Raises:
      NonFiniteLogitsError: there is no output at all.
    """
    chosen = slice(start, start + config.shard_size)
    outputs = decode_all(
        target,
        job.sources[chosen],
        batch_size=config.batch_size,
        seed=config.seed,
        first=job.first + start,
        num_samples=job.per_source,
        sampling=SamplingConfig(temperature=config.temperature if job.samples else 0.0),
        max_new_tokens=config.max_new_tokens,
        max_input_length=config.buckets[-1],
        non_finite="report",
        generation_config=None,
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
        raise lost[0]
    if lost:
        say(f"{len(lost):,} of {len(texts):,} outputs are left out: {lost[0].reason}")
