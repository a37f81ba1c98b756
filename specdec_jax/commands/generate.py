"""Runs `specdec generate`: decodes many sentences, or the examples of a task.

Outputs come in order.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from specdec_jax.checkpoints import native_format
from specdec_jax.commands.endings import Endings
from specdec_jax.commands.generation_flags import GenerationFlags, check_one_value
from specdec_jax.commands.options import ModelOptions, check_at_least
from specdec_jax.commands.output_lines import Sentences, join_lines, to_json
from specdec_jax.commands.resumable_output import Journal
from specdec_jax.commands.sentences import check_input_file, read_sentences
from specdec_jax.decoding import autotune, checks, continuous_batching
from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.decoding.config_files import to_plain
from specdec_jax.decoding.continuous_batching import decode_all, decode_stream
from specdec_jax.decoding.defaults import fill_limits, fill_search, read_defaults
from specdec_jax.decoding.generation_config import BEAM_FIELDS, GenerationConfig
from specdec_jax.decoding.inputs import encode
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.decoding.request import Plan
from specdec_jax.decoding.results import NonFiniteLogitsError
from specdec_jax.decoding.search_options import check_beam_options, check_drafting, check_greedy
from specdec_jax.decoding.stream import Piece, stream
from specdec_jax.decoding.trees import check_beside_tree
from specdec_jax.drafters import named
from specdec_jax.drafters.suffix import SuffixDrafter
from specdec_jax.drafters.suffix_history import SuffixHistory
from specdec_jax.files.progress import Progress, print_line
from specdec_jax.files.reading import digest, mismatch_error
from specdec_jax.files.writing import check_output, is_pass_through, open_new_file
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only
from specdec_jax.speculative.adaptive_gamma import Auto
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import POLICIES
from specdec_jax.speculative.policy import Policy
from specdec_jax.speculative.randomness import make_key
from specdec_jax.speculative.verifiers import LOSSY
from specdec_jax.tokenizers.vocabularies import check_texts

if TYPE_CHECKING:  # optax takes its time
    from specdec_jax.training.online import OnlineDistillation

_SAVE_SECONDS = 30.0  # between two times that what was learnt is saved
_DATA = ("module_import", "tfds_data_dir", "seqio_additional_cache_dirs")  # where a task's are
# Options that do not decide the lines of an output file: the models' and the sentences' contents
# do, and those of the configuration are compared as its fields.
_NOT_DECIDING = {
    *("target", "drafter", "shortlist", "vocabulary", "dtype", "quantize", "stream", "config"),
    *("input_file", "output_file", "use_cached", *_DATA),
    *("gamma_policy", "gamma_settings"),
    *(field.name for field in dataclasses.fields(GenerationFlags)),
}


@document_fields
@dataclasses.dataclass(frozen=True)
class GenerateOptions(GenerationFlags, ModelOptions):
    """Options of `specdec generate`; those of a `GenerationConfig` are None where not given.

    Attributes:
      config: file of options, .json or .gin, that sd.GenerationConfig.save wrote; flags override
        it
      batch_size: sentences decoded together (default: 8, with --stream 1)
      non_finite: what happens to a sentence with NaN or infinite logits: report (an empty line, or
        with --json a null text and the reason; the others are decoded and the exit code is 1) or
        raise (the command ends)
      input_file: UTF-8 text, one sentence a line, gzip or not, here or at a URL; -: standard input;
        ende/sentences.txt: English sentences that come with the package
      output_file: file for the outputs instead of standard output, here or at a URL; what is
        finished is kept beside it (.partial), so that the same command resumes after a kill
      shard: I/N, such as 0/4: decode only part I, counted from 0, of N equal parts of --input_file
        or --task; the parts together, in order, are the output of a run without --shard
      learn: train the drafter, a model, on finished outputs while others are decoded, as long as it
        pays, in at most 10 percent of the time; above temperature 0 with --verifier=gumbel; with
        --output_file the trained weights are kept beside it (.learned) until the end
      task: seqio task or mixture to decode instead of sentences; prints a JSON object for every
        example, as T5X's infer does, with the prediction's ids, then the task's metrics; inputs are
        cut to --max_input_length
      module_import: Python module that registers --task; repeatable
      score_targets: with --task: add the log-likelihood of the targets to the lines
      tfds_data_dir: folder in which TensorFlow Datasets keeps the data of --task (default: its own)
      use_cached: read the data of --task as seqio_cache_tasks has preprocessed them
      seqio_additional_cache_dirs: folders of such data, here or at URLs, with commas between them
      json: print one JSON object a line: text, tokens, log-probabilities, why it ended, statistics
      stream: print each output while it is decoded; with --json, one object for each piece
    """

    config: GenerationConfig | str | None = None
    batch_size: int | None = None
    non_finite: str = "report"
    input_file: str | None = None
    output_file: str | None = None
    shard: str | None = None
    learn: bool = False
    task: str | None = None
    split: str | None = make_option(None, "split of --task (default: test)")
    module_import: tuple[str, ...] = ()
    score_targets: bool = False
    tfds_data_dir: str | None = None
    use_cached: bool = False
    seqio_additional_cache_dirs: tuple[str, ...] = ()
    json: bool = False
    stream: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.config, str):
            config = GenerationConfig.load(os.path.expanduser(self.config))
            object.__setattr__(self, "config", config)

    def configuration(self) -> GenerationConfig:
        """Returns the options of decoding: flags and gin, then the file's, then the defaults."""
        given = self.config if isinstance(self.config, GenerationConfig) else GenerationConfig()
        return self.change(given)

    def check(self) -> None:
        if isinstance(self.config, GenerationConfig):
            check_one_value(self.config)
        if self.tree and self.num_beams is not None:
            raise UnsupportedCombination(f"tree: got {self.tree!r} with num_beams, expected none")
        super().check()
        config = self.configuration()
        if not self.drafter and not isinstance(config.gamma, str) and config.gamma != 0:
            got = f"gamma: got {config.gamma!r} for plain decoding"
            raise UnsupportedCombination(f"{got}, expected a drafter, or a gamma of 0")
        self._check_beams(config)
        self._check_learn()
        check_beside_tree(config.tree, config.verifier)
        check_at_least(1, batch_size=self.rows)
        check_input_file(self.input_file)
        check_texts("stop", checks.check_stop(config.stop, config.deadline))
        check_output(self.output_file, "output_file", self.input_file)
        if self.output_file and self.output_file.endswith(".gz"):
            expected = "a name without .gz, since outputs are not compressed"
            raise mismatch_error("output_file", repr(self.output_file), expected)
        if self.output_file and self.stream:
            got = f"stream: got True with output_file={self.output_file!r}"
            raise UnsupportedCombination(f"{got}, expected one of the two")
        if self.stream and self.rows * config.num_samples > 1:
            got = f"batch_size={self.rows}, num_samples={config.num_samples}"
            raise checks.unsupported("stream", got, "1 of each: outputs would run into each other")
        self._check_task(config)
        self._parse_shard()

    def _parse_shard(self) -> tuple[int, int]:
        """Returns the number of the part to decode, and that of all parts."""
        if self.shard is None:
            return 0, 1
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.shard)
        part, parts = map(int, match.groups()) if match else (0, 0)
        if part >= parts:
            expected = "I/N: a part I, counted from 0, of N parts"
            raise ValueError(f"shard: got {self.shard!r}, expected {expected}")
        if not self.task and self.input_file in (None, "-"):
            raise checks.unsupported("shard", repr(self.shard), "--input_file or --task too")
        return part, parts

    def choose_numbers(self, inputs: int) -> range:
        """Returns the numbers of the inputs that are decoded, of so many.

        Raises:
          ValueError: there are fewer inputs than parts.
        """
        part, parts = self._parse_shard()
        if parts > max(inputs, 1):
            got = f"{self.shard!r} of {inputs} sentences"
            raise ValueError(f"shard: got {got}, expected at most as many parts")
        return range(inputs * part // parts, inputs * (part + 1) // parts)

    def _check_beams(self, config: GenerationConfig) -> None:
        """Rejects options of a beam search without one, and those that mean nothing with one."""
        if config.num_beams is None and not self.stream and config.generation_config is not None:
            return  # the model may have a number of beams
        check_beam_options(**{name: getattr(config, name) for name in BEAM_FIELDS})
        if config.num_beams is None:
            return
        if config.beam_width is not None and not self.drafter:
            got = f"{config.beam_width} for plain beam search"
            raise checks.unsupported("beam_width", got, "a drafter")
        if self.stream:
            raise UnsupportedCombination("stream: got True with num_beams, expected none")
        check_greedy(self.sampling().mode, self.sampling().temperature)
        check_drafting(None, config.gamma)

    def _check_learn(self) -> None:
        """Rejects `learn` where no drafter can be trained, before a model is loaded."""
        if not self.learn:
            return
        for name, what in (("stream", "no stream"), ("mesh", "one device")):
            if given := getattr(self, name):
                raise checks.unsupported("learn", f"True with {name}={given!r}", what)
        if not self.drafts or named.needs_no_model(self.drafter or ""):
            got = f"True with drafter={self.drafter!r}, gamma={self.policy!r}"
            raise checks.unsupported(
                "learn", got, "a drafter that is a model, and gamma of at least 1"
            )

    def _check_task(self, config: GenerationConfig) -> None:
        """Rejects options that mean nothing with a task, or nothing without one."""
        where, expected = f"with task={self.task!r}", "none"
        names: tuple[str, ...] = ("input_file", "json", "stream")
        if not self.task:
            where, expected = "without a task", "--task"
            names = (*_DATA, "split", "score_targets", "use_cached")
        elif config.num_samples > 1:
            raise checks.unsupported("num_samples", f"{config.num_samples} {where}", "1")
        for name in names:
            if value := getattr(self, name):
                raise UnsupportedCombination(f"{name}: got {value!r} {where}, expected {expected}")
        if (given := self.seqio_additional_cache_dirs) and not self.use_cached:
            got = f"seqio_additional_cache_dirs: got {given!r} without use_cached"
            raise UnsupportedCombination(f"{got}, expected --use_cached")

    @property
    def resumes(self) -> bool:
        """Whether results are kept beside the output file, for a run after a kill."""
        return bool(self.output_file and not is_pass_through(self.output_file))

    @property
    def remembers(self) -> bool:
        """Whether a drafter that can may read the outputs of earlier inputs."""
        return bool(self.drafts and not self.stream)

    @property
    def rows(self) -> int:
        return self.batch_size if self.batch_size is not None else 1 if self.stream else 8


class _Job(NamedTuple):
    """What is decoded, and how.

    Attributes:
      options, config: of the command, and its options of decoding.
      target, drafter: the models.
      outputs: number of outputs for every input.
      source: `Sentences`, or the examples of a task.
      endings: counts how outputs end.
      learner: what improves the drafter while it drafts, or None.
    """

    options: GenerateOptions
    config: GenerationConfig
    target: LanguageModel
    drafter: Drafter | None
    outputs: int
    source: Any
    endings: Endings
    learner: "OnlineDistillation | SuffixHistory | None" = None

    @property
    def numbers(self) -> range:
        """Numbers of the inputs that are decoded."""
        return self.options.choose_numbers(len(self.source.inputs))


def run(
    options: GenerateOptions,
    arguments: Sequence[str],
    on_start: Callable[[], object] = lambda: None,
) -> str | None:
    """Runs `specdec generate`; returns what is wrong with the outputs, if anything is.

    `on_start` is called when the settings are right and a file begins that a kill leaves behind.
    """
    options.check()
    if options.task and arguments:
        raise ValueError(f"got sentences and --task={options.task}, expected one of the two")
    config = options.configuration()
    read_examples = _find_examples(options, config) if options.task else None
    sentences = [] if options.task else read_sentences(arguments, options.input_file)
    if sentences:
        options.choose_numbers(len(sentences))  # which it checks before models are loaded
    target, drafter = options.load(share=not options.learn)  # it would learn another encoder
    most = max(_limit_new_tokens(config, target))
    limit = f"--max_new_tokens={most}"
    defaults = read_defaults(target, config.generation_config)
    if config.max_new_tokens is None and defaults.max_new_tokens is None and defaults.max_length:
        limit = f"max_length={defaults.max_length}, a default of the model"
    endings = Endings(limit, lambda text: print(text, file=sys.stderr))
    search = fill_search(defaults, {name: getattr(config, name) for name in BEAM_FIELDS})
    beams = check_beam_options(**search)
    outputs = config.num_samples if beams is None else beams.num_return_sequences
    source: Any
    if read_examples is not None:
        source = read_examples(target, output_length=most)
    else:
        languages = config.source_language, config.target_language
        ids = encode(target, sentences, config.max_input_length, *languages)
        source = Sentences(ids, sentences, options.json)
        lengths = [len(row) if is_decoder_only(target) else 1 for row in ids]
        drafts = drafter if options.drafts else None
        checks.check_prompts(
            target, drafts, lengths, np.array(_limit_new_tokens(config, target, lengths))
        )
    numbers = options.choose_numbers(len(source.inputs))
    learner: Any = None
    if type(drafter) is SuffixDrafter and drafter.text is None and options.remembers:
        learner = SuffixHistory(target, drafter)
        drafter = learner.drafter
    elif options.learn:
        from specdec_jax.training.online import OnlineDistillation

        model: Any = drafter  # anything else is rejected
        expected = config.num_samples * len(numbers)  # of a search the best hypotheses
        learner = OnlineDistillation(target, model, expected=expected)
        drafter = learner.drafter
    job = _Job(options, config, target, drafter, outputs, source, endings, learner)
    if options.resumes:
        _write_file(job, on_start)
    elif options.stream:
        _print_pieces(job)
    else:
        lines = _pass_on(_decode(job), options.output_file)
        _finish_task(job, lines, None)
        for _ in lines:
            pass
    if learner is not None:
        what = "--learn" if options.learn else f"--drafter={options.drafter}"
        print_line(f"{what}: {learner.summary()}")
    return endings.report(len(numbers))


def _finish_task(job: _Job, lines: Iterator[str], output_file: str | None) -> None:
    """Computes a task's metrics, which need all parts of its examples."""
    if job.options.task and job.options.shard:
        what = "no metrics of a part; they need the lines of all"
        print_line(f"--shard={job.options.shard}: {what}")
    elif job.options.task:
        job.source.finish(lines, output_file)


def _limit_new_tokens(
    config: GenerationConfig, target: LanguageModel, lengths: Sequence[int] = (1,)
) -> list[int]:
    """Returns the most new tokens after prompts of these lengths; 1: the start token alone."""
    starts, defaults = np.maximum(lengths, 1), read_defaults(target, config.generation_config)
    name = "--max_new_tokens"
    most = fill_limits(target, defaults, config.max_new_tokens, starts, "sentence", 1, name)
    return most.tolist()


def _find_examples(options: GenerateOptions, config: GenerationConfig) -> Callable[..., Any]:
    """Returns what reads the examples of the task for a target: `seqio_jobs.Examples`."""
    try:
        from specdec_jax.interop import seqio_jobs
    except ImportError as error:
        got = f"task: got {options.task!r} without seqio ({error})"
        raise ValueError(f"{got}, expected the extra: pip install '.[seqio]'") from error
    assert options.task
    where = options.tfds_data_dir, options.use_cached, options.seqio_additional_cache_dirs
    name, split = options.task, options.split or "test"
    return functools.partial(
        seqio_jobs.Examples,
        seqio_jobs.find_tasks(name, split, options.module_import, *where),
        input_length=config.max_input_length,
        batch_size=options.rows,
        seed=options.seed,
        score_targets=options.score_targets,
    )


def _decode(job: _Job) -> Iterator[str]:
    """Yields the lines of all outputs in the order of the inputs, and counts how they ended."""
    numbers, options = job.numbers, job.options
    outputs = decode_all(
        job.target,
        job.source.inputs[numbers.start : numbers.stop],
        first=numbers.start,
        batch_size=options.rows,
        seed=options.seed,
        config=job.config,
        learner=job.learner,
        **({} if job.learner else {"drafter": job.drafter}),
    )
    by_input = zip(*[outputs] * job.outputs)
    quiet = sys.stdout.isatty()  # which shows the outputs
    with Progress("decoding", len(numbers), "sentences", quiet=quiet) as progress:
        job.endings.say = progress.message  # above the bar
        for number, rows_of_one in zip(numbers, by_input, strict=True):
            job.endings.add(number, rows_of_one)
            yield from job.source.lines(number, rows_of_one)
            progress.advance()


def _pass_on(lines: Iterable[str], output_file: str | None) -> Iterator[str]:
    """Yields every line after writing it to standard output, or to a device or pipe."""
    if not output_file:
        for line in lines:
            print(line, flush=True)
            yield line
        return
    what = "outputs are written in order, and a run that is killed begins anew"
    print(f"{output_file}: not a regular file: {what}", file=sys.stderr)
    with open_new_file(output_file) as file:
        for line in lines:
            file.write(line.encode() + b"\n")
            file.flush()
            yield line


def _write_file(job: _Job, on_start: Callable[[], object]) -> None:
    """Writes all outputs to a file, whole or not at all.

    What a killed run had finished is not decoded again. A task's metrics are computed before the
    file is written, so that a kill in between leaves the journal; if they fail the file is written
    all the same.
    """
    options, config, target, drafter, _, source, endings, learner = job
    inputs, key = source.inputs, make_key(options.seed)
    assert options.output_file
    rows = continuous_batching.choose_batch_size(target, options.rows, len(inputs))
    # Rejects bad arguments before there is a journal.
    plan = plan_decoding(target, inputs, config=config, drafter=drafter, key=key, batch_size=rows)
    # Where outputs do not depend on γ, it is chosen by what was decoded before.
    fixed = plan.auto_rows is not None and (learner is not None or not plan.may_learn)
    chosen = autotune.autotune(plan, first=True, once=True) if fixed else plan
    measured = {"costs": _costs_record(chosen)} if fixed else {}
    settings = _deciding_options(options, target, drafter, source.contents)
    numbers, start = job.numbers, job.numbers.start
    with Journal(options.output_file, settings, len(numbers), measured, start) as journal:
        _check_learned(learner, journal)
        on_start()
        if measured:
            # The costs that the job began with: every input gets what it would have got then.
            config, drafter = _use_costs(journal, config, drafter)
        with Progress("decoding", len(numbers), "sentences") as progress:
            endings.say = progress.message  # above the bar
            _restore(job, journal, progress)
            refills = continuous_batching.may_refill(rows, len(inputs), config.deadline)
            outputs = decode_stream(
                target,
                inputs,
                config=config,
                **({"learner": learner} if learner and drafter else {"drafter": drafter}),
                key=key,
                batch_size=rows,
                refill=None if refills else False,
                skip=journal.done.union(range(start), range(numbers.stop, len(inputs))),
            )
            left = config.num_samples * (len(numbers) - len(journal.done))
            with _keep_learned(learner, journal, left) as save:
                for number, rows_of_one in outputs:
                    lines = source.lines(number, rows_of_one)
                    journal.add(number, lines, endings.add(number, rows_of_one))
                    save()
                    progress.advance()
        if learner is not None:
            _learned_path(journal).unlink(missing_ok=True)
        try:
            _finish_task(job, journal.lines(), options.output_file)
        except ValueError:  # everything is decoded, which may have taken hours
            journal.finish()
            raise
        journal.finish()


def _learned_path(journal: Journal) -> pathlib.Path:
    """Returns the path of what a learner keeps beside the journal."""
    return journal.path.with_suffix(".learned")


def _check_learned(learner: "OnlineDistillation | SuffixHistory | None", journal: Journal) -> None:
    """Raises ValueError for a file in the place of a learner's that no learner like it saved.

    A new job would remove it, and it may be anything. A job that resumes restores it.
    """
    path = _learned_path(journal)
    if learner is not None and not journal.done and os.path.lexists(path):
        try:
            copy.copy(learner).restore(path)
        except ValueError:
            journal.discard()  # it holds nothing yet
            raise


@contextlib.contextmanager
def _keep_learned(
    learner: "OnlineDistillation | SuffixHistory | None", journal: Journal, left: int
) -> Iterator[Callable[[], None]]:
    """Restores what a learner kept, with `left` outputs to come; yields what saves it now and then.

    It is called when a result is in the journal, and the learner sees a result only later: what is
    saved never knows a row that a resumed job decodes again.
    """
    if learner is None:
        yield lambda: None
        return
    path = _learned_path(journal)
    if journal.done and path.exists():
        learner.restore(path)
    else:
        path.unlink(missing_ok=True)  # another job's, which this one does not resume
    if hasattr(learner, "expected"):  # what trains a model
        learner.expected = learner.outputs + left
    try:
        yield lambda: learner.save(path, every=_SAVE_SECONDS)
    except BaseException:
        # Arrays may be gone in the middle of an update, and disks be full: the error that ended
        # the job is the one to show.
        with contextlib.suppress(RuntimeError, OSError):
            learner.save(path)
        raise


def _restore(job: _Job, journal: Journal, progress: Progress) -> None:
    """Counts what a killed run had finished.

    Raises:
      ValueError: an input has no output, and the options do not allow it.
    """
    total = len(job.numbers)
    if journal.done:
        progress.message(f"{journal.name}: {len(journal.done)} of {total} sentences are there")
        progress.skip(len(journal.done))
    for number, note in journal.notes.items():
        job.endings.restore(number, note, job.outputs)
    if job.endings.failed and job.config.non_finite == "raise":
        got = f"{checks.list_in_words('sentence', job.endings.failed, total)} without output"
        raise ValueError(f"{journal.name}: got {got}, expected --non_finite=report")


def _costs_record(plan: Plan) -> dict[str, Any]:
    """Returns what `gamma="auto"` has become, as JSON values: a number, or costs and acceptance."""
    if plan.policy is None:
        return {"gamma": plan.config.gamma}
    policy: Any = plan.policy
    return {"costs": policy.costs[0].tolist(), "acceptance": float(policy.acceptance[0])}


def _use_costs(
    journal: Journal, config: GenerationConfig, drafter: Drafter | None
) -> tuple[GenerationConfig, Drafter | None]:
    """Returns configuration and drafter with γ by the costs that the journal holds.

    Raises:
      ValueError: the journal has anything else.
    """
    match record := journal.measured["costs"]:
        case {"gamma": 0}:
            unset = dict.fromkeys(("lenience", "typical_epsilon", "typical_delta"))
            changes: Any = {**unset, "verifier": "block"} if config.verifier in LOSSY else {}
            return dataclasses.replace(config, gamma=0, drafter_sampling=None, **changes), None
        case {"gamma": int(gamma)}:
            return dataclasses.replace(config, gamma=gamma), drafter
        case {"costs": list(costs), "acceptance": float(acceptance)} if len(record) == 2:
            policy = Auto(costs=tuple(costs), acceptance=acceptance)
            return dataclasses.replace(config, gamma=policy), drafter
    raise mismatch_error(journal.name, repr(str(record)[:80]), "costs of iterations")


def _deciding_options(
    options: GenerateOptions,
    target: LanguageModel,
    drafter: Drafter | None,
    contents: Sequence[str],
) -> dict[str, Any]:
    """Returns what decides the lines of an output file, as JSON values.

    It is the configuration, other options, and fingerprints of models and sentences.
    """
    names = {field.name for field in dataclasses.fields(options)} - _NOT_DECIDING
    config = options.configuration()
    changes: Any = config.sampling
    chosen = config.changed_fields() | {"sampling": changes and changes.fields}
    chosen.pop("non_finite", None)
    return {
        **{name: getattr(options, name) for name in sorted(names)},
        **{name: _describe_option(name, value) for name, value in chosen.items()},
        "versions": {
            name: importlib.metadata.version(name) for name in ("specdec_jax", "jax", "jaxlib")
        },
        "dtype": target.config.dtype,
        "target in int8": target.quantized,
        "decoding defaults": repr(read_defaults(target, config.generation_config)),
        "bits of the target's inputs": target.input_bits,
        "split": (options.split or "test") if options.task else None,
        "special ids": [target.start_token, *target.eos_ids],
        "target": digest(
            [target.contents.encode(), native_format.vocabulary_contents(target.vocabulary)]
        ),
        "drafter": None if drafter is None else drafter.contents,
        "sentences": digest(text.encode() for text in contents),
    }


def _describe_option(name: str, value: Any) -> Any:
    """Returns an option as JSON values; one that no file can hold, as a policy of one's own."""
    kept = isinstance(value, Policy) and type(value) not in POLICIES.values()
    return repr(value) if kept else to_plain(name, value)


def _read_pieces(job: _Job, number: int, key: jax.Array) -> Iterator[Piece]:
    """Decodes one input as it is committed; an error names its number in the job."""
    ids = [job.source.inputs[number]]
    try:
        yield from stream(job.target, ids, config=job.config, drafter=job.drafter, key=key)
    except NonFiniteLogitsError as error:
        raise error.at(number) from None


def _print_pieces(job: _Job) -> None:
    """Decodes every sentence alone and prints its text as it is committed."""
    inputs = job.source.inputs
    continuous_batching.check_longest(job.target, inputs, job.config, job.drafter, 1)
    keys = fold_keys(make_key(job.options.seed), np.arange(len(inputs)))
    for number in job.numbers:
        held = ""  # spaces at the end: with a line end after them they become one
        for piece in _read_pieces(job, number, keys[number : number + 1]):
            if piece.finish_reason:
                job.endings.add(number, [piece])
            if job.options.json:
                print(to_json({**piece._asdict(), "row": number}), flush=True)
                continue
            text = held + piece.text
            held = text[len(text.rstrip()) :]
            print(join_lines(text.rstrip()), end="", flush=True)
        if not job.options.json:
            print(join_lines(held))
