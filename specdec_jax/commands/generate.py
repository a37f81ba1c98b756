"""Runs `specdec generate`: decodes many sentences, or the examples of a task.

Outputs come in order.
"""

import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from specdec_jax.checkpoints import native_format
from specdec_jax.commands.beam_options import BeamFlags, open_field
from specdec_jax.commands.endings import Endings
from specdec_jax.commands.model_defaults import DefaultedOptions
from specdec_jax.commands.options import AUTO_HELP, at_least, check_gamma, option, same_file
from specdec_jax.commands.output_lines import Sentences, one_line, to_json
from specdec_jax.commands.resumable_output import Journal
from specdec_jax.commands.sentences import read_sentences
from specdec_jax.decoding import autotune
from specdec_jax.decoding.checks import (
    UnsupportedCombination,
    check_limits,
    check_non_finite,
    check_prompts,
    check_stop,
    listed,
)
from specdec_jax.decoding.continuous_batching import decode_all, decode_stream, refills, rows_for
from specdec_jax.decoding.defaults import MODELS, fill_search
from specdec_jax.decoding.inputs import encode
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.decoding.request import Plan
from specdec_jax.decoding.results import NonFiniteLogitsError
from specdec_jax.decoding.search_options import beam_options
from specdec_jax.decoding.stream import Piece, stream
from specdec_jax.decoding.trees import check_beside_tree
from specdec_jax.files.progress import Progress
from specdec_jax.files.reading import digest
from specdec_jax.files.writing import check_output, new_file, passes_through
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import decoder_only
from specdec_jax.speculative.adaptive_gamma import Auto
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import MAX_GAMMA
from specdec_jax.speculative.randomness import seeded
from specdec_jax.speculative.tree_text import EXPECTED, read_tree
from specdec_jax.speculative.trees import DynamicTree, Tree
from specdec_jax.tokenizers.vocabularies import check_texts


@dataclasses.dataclass(frozen=True)
class GenerateOptions(BeamFlags, DefaultedOptions):
    """Options of `specdec generate`."""

    beam_style: str | None = open_field("beam_style")  # type: ignore[assignment]
    early_stopping: str | None = open_field("early_stopping")  # type: ignore[assignment]
    num_return_sequences: int | None = open_field(  # type: ignore[assignment]
        "num_return_sequences"
    )

    config: str | None = option(
        None,
        "file of options, .json or .gin, that sd.GenerationConfig.save wrote; flags that are given"
        " count before it",
    )
    gamma: int | str = option("auto", AUTO_HELP)
    tree: str | None = option(
        None, f"token tree that a drafting model drafts instead of a chain: {EXPECTED}"
    )
    batch_size: int | None = option(
        None, "sentences decoded together (default: 8, with --stream 1)"
    )
    num_samples: int = option(1, "outputs for every sentence, one after the other")
    stop: tuple[str, ...] = option(
        (), "a string that ends an output and is left out of it; repeatable"
    )
    deadline: float | None = option(
        None,
        "seconds after which the outputs of a batch are taken as they are; with it finished rows"
        " are not refilled",
    )
    input_file: str | None = option(
        None,
        "UTF-8 text, one sentence a line, gzip or not; -: standard input; ende/sentences.txt:"
        " English sentences that come with the package",
    )
    output_file: str | None = option(
        None,
        "file for the outputs instead of standard output; what is finished is kept beside it"
        " (.partial), so that the same command resumes after a kill",
    )
    task: str | None = option(
        None,
        "seqio task or mixture to decode instead of sentences; prints a JSON object for every"
        " example, as T5X's infer does, with the prediction's ids, then the task's metrics; inputs"
        " are cut to --max_input_length",
    )
    split: str | None = option(None, "split of --task (default: test)")
    module_import: tuple[str, ...] = option((), "Python module that registers --task; repeatable")
    score_targets: bool = option(
        False, "with --task: add the log-likelihood of the targets to the lines"
    )
    tfds_data_dir: str | None = option(
        None, "folder in which TensorFlow Datasets keeps the data of --task (default: its own)"
    )
    json: bool = option(
        False,
        "print one JSON object a line: text, tokens, log-probabilities, why it ended, statistics",
    )
    non_finite: str = option(
        "report",
        "what becomes of a sentence with logits that are not finite numbers: report (an empty line,"
        " with --json a null text and the reason; the rest goes on and the exit code is 1) or raise"
        " (the command ends)",
    )
    stream: bool = option(
        False, "print each output while it is decoded; with --json, one object for each piece"
    )

    def check(self) -> None:
        if self.config:  # the command line's own has become other options by now
            raise ValueError(f"config: got {self.config!r} in gin, expected it as --config")
        super().check()
        self.beams()
        self.check_beside_beams(
            num_samples=1,
            stop=(),
            deadline=None,
            stream=False,
            temperature=0.0,
            verifier="block",
            gamma_policy="fixed",
            tree=None,
        )
        tree = self.shape().get("tree")
        check_gamma(self.gamma, MAX_GAMMA if tree is None else tree.size - 1)
        check_beside_tree(tree, self.verifier)
        self.gamma_of(self.gamma, tree)
        at_least(1, batch_size=self.rows, num_samples=self.num_samples)
        if (
            self.temperature is not None or self.generation_config == "none"
        ):  # else the model may say how
            check_limits(self.sampling(), np.array([self.token_limit]), self.num_samples)
        check_texts("stop", check_stop(self.stop, self.deadline))
        check_non_finite(self.non_finite)
        check_output(self.output_file, "output_file")
        if self.output_file and self.stream:
            raise UnsupportedCombination(
                f"stream: got True with output_file={self.output_file!r}, expected one of the two"
            )
        if self.output_file and self.input_file and same_file(self.output_file, self.input_file):
            raise ValueError(
                f"output_file: got {self.output_file!r}, which is the input, expected another file"
            )
        if self.stream and self.rows * self.num_samples > 1:
            got = f"batch_size={self.rows}, num_samples={self.num_samples}"
            raise UnsupportedCombination(
                f"stream: got {got}, expected 1 of each: outputs would run into each other"
            )
        self._check_task()

    def shape(self) -> dict[str, Tree | DynamicTree]:
        """Returns the argument of `generate` for a tree, none without one."""
        return {} if self.tree is None else {"tree": read_tree(self.tree)}

    @property
    def outputs(self) -> int:
        """Number of outputs for every sentence."""
        return self.num_samples if self.num_beams is None else self.num_return_sequences or 1

    def search(self, **others: Any) -> dict[str, Any]:
        if self.num_beams is not None or self.stream or self.generation_config != MODELS:
            return super().search(**others)
        # The model may say how many beams there are: `filled` checks the others.
        return {
            name: value for name, value in self.given_search(**others).items() if value is not None
        }

    def filled(self, target: LanguageModel) -> "GenerateOptions":
        """Returns the options with the model's defaults of how many outputs there are, and how long
        they can be."""
        given = self.given_search(
            num_return_sequences=self.num_return_sequences, beam_width=self.beam_width
        )
        search = fill_search(self.defaults(target), given)
        beam_options(**search)
        outputs, limit = search.get("num_return_sequences", 1), int(max(self.limits(target, [1])))
        return dataclasses.replace(
            self,
            num_beams=search.get("num_beams"),
            num_return_sequences=outputs,
            max_new_tokens=limit,
        )

    def _check_task(self) -> None:
        """Raises ValueError for options that mean nothing with a task, or nothing without one."""
        if not self.task:
            for name in ("split", "module_import", "score_targets", "tfds_data_dir"):
                if getattr(self, name):
                    raise UnsupportedCombination(
                        f"{name}: got {getattr(self, name)!r} without a task, expected --task"
                    )
            return
        alone = dict(input_file=None, json=False, stream=False, num_samples=1)
        for name, usual in alone.items():
            if getattr(self, name) != usual:
                raise UnsupportedCombination(
                    f"{name}: got {getattr(self, name)!r} with task={self.task!r}, expected"
                    f" {usual or 'none'}"
                )

    @property
    def drafts(self) -> bool:
        return super().drafts and self.gamma != 0

    @property
    def resumes(self) -> bool:
        """Whether results are kept beside the output file, for a run after a kill."""
        return bool(self.output_file and not passes_through(self.output_file))

    @property
    def rows(self) -> int:
        return self.batch_size if self.batch_size is not None else 1 if self.stream else 8


def run(
    options: GenerateOptions, arguments: Sequence[str], begun: Callable[[], object] = lambda: None
) -> str | None:
    """Runs `specdec generate`; returns what is wrong with the outputs, if anything is.

    `begun` is called when the settings are found to be right and a file begins that a kill leaves
    behind.
    """
    options.check()
    if options.task:
        return _run_task(options, arguments, begun)
    sentences = read_sentences(arguments, options.input_file)
    target, drafter = options.load()
    plan = Sentences(encode(target, sentences, options.max_input_length), sentences, options.json)
    lengths = [len(ids) if decoder_only(target) else 1 for ids in plan.inputs]
    check_prompts(
        target, drafter if options.drafts else None, lengths, options.limits(target, lengths)
    )
    endings = Endings(options.limit_text(target), _say)
    decoding, options = _decoding(options, drafter), options.filled(target)
    if options.resumes:
        return _write_file(target, plan, options, decoding, endings, begun)
    if options.stream:
        _print_pieces(target, plan.inputs, options, decoding, endings)
    else:
        for _ in _passed_on(
            _decoded(target, plan, options, decoding, endings), options.output_file
        ):
            pass
    return endings.tell(len(plan.inputs))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _run_task(
    options: GenerateOptions, arguments: Sequence[str], begun: Callable[[], object]
) -> str | None:
    """Decodes the examples of a seqio task instead of sentences, then computes its metrics."""
    assert options.task
    if arguments:
        raise ValueError(f"got sentences and --task={options.task}, expected one of the two")
    try:
        from specdec_jax.interop import seqio_jobs
    except ImportError as error:
        raise ValueError(
            f"task: got {options.task!r} without seqio ({error}), expected the extra: pip install"
            " '.[seqio]'"
        ) from error
    split = options.split or "test"
    tasks = seqio_jobs.find(options.task, split, options.module_import, options.tfds_data_dir)
    target, drafter = options.load()
    endings = Endings(options.limit_text(target), _say)
    decoding, options = _decoding(options, drafter), options.filled(target)
    plan = seqio_jobs.Job(
        tasks,
        split,
        target,
        input_length=options.max_input_length,
        output_length=options.token_limit,
        batch_size=options.rows,
        seed=options.seed,
        score_targets=options.score_targets,
    )
    if options.resumes:
        return _write_file(target, plan, options, decoding, endings, begun, plan.finish)
    plan.finish(
        list(_passed_on(_decoded(target, plan, options, decoding, endings), options.output_file)),
        None,
    )
    return endings.tell(len(plan.inputs))


def _decoding(options: GenerateOptions, drafter: Drafter | None) -> dict[str, Any]:
    """Returns the arguments of `generate`."""
    shape = options.shape()
    return options.decoding() | dict(
        drafter=drafter,
        gamma=options.gamma_of(options.gamma, shape.get("tree")),
        stop=options.stop,
        deadline=options.deadline,
        **options.beams(),
        **shape,
    )


def _decoded(
    target: LanguageModel,
    plan: Any,
    options: GenerateOptions,
    decoding: dict[str, Any],
    endings: Endings,
) -> Iterator[str]:
    """Yields the lines of all outputs in the order of the inputs, and counts how they ended."""
    outputs = decode_all(
        target,
        plan.inputs,
        batch_size=options.rows,
        seed=options.seed,
        num_samples=options.num_samples,
        non_finite=options.non_finite,
        **decoding,
    )
    by_input = zip(*[outputs] * options.outputs)
    quiet = sys.stdout.isatty()  # which shows the outputs
    with Progress("decoding", len(plan.inputs), "sentences", quiet=quiet) as progress:
        endings.say = progress.message  # above the bar
        for number, rows_of_one in enumerate(by_input):
            endings.add(number, rows_of_one)
            yield from plan.lines(number, rows_of_one)
            progress.advance()


def _passed_on(lines: Iterable[str], output_file: str | None) -> Iterator[str]:
    """Yields every line after writing it to standard output, or to a device or pipe."""
    if not output_file:
        for line in lines:
            print(line, flush=True)
            yield line
        return
    print(
        f"{output_file}: not a regular file: outputs are written in order, and a run that is killed"
        " begins anew",
        file=sys.stderr,
    )
    with new_file(output_file) as file:
        for line in lines:
            file.write(line.encode() + b"\n")
            file.flush()
            yield line


def _write_file(
    target: LanguageModel,
    plan: Any,
    options: GenerateOptions,
    decoding: dict[str, Any],
    endings: Endings,
    begun: Callable[[], object],
    finish: Callable[[Iterable[str], str], None] | None = None,
) -> str | None:
    """Writes all outputs to a file, whole or not at all.

    What a killed run had finished is not decoded again. Returns what is wrong with the outputs, if
    anything is.

    `finish` is called with all lines before the file is written, so that it is called even if a
    kill comes in between; the file is written even if `finish` fails.
    """
    assert options.output_file
    inputs = plan.inputs
    rows = rows_for(target, options.rows, len(inputs))
    how = dict(key=seeded(options.seed), num_samples=options.num_samples, **decoding)
    checked = plan_decoding(
        target, inputs, batch_size=rows, **how
    )  # rejects bad arguments before there is a journal
    settings = _deciding(options, target, decoding["drafter"], plan.contents)
    automatic = how["gamma"] == "auto" and not options.tree
    found = {"costs": _costs(autotune.autotune(checked))} if automatic else {}
    with Journal(options.output_file, settings, len(inputs), found) as journal:
        begun()
        # The costs that the job began with, so that every input gets what it would have got then.
        if found:
            how |= _by_costs(journal.found["costs"], options)
        with Progress("decoding", len(inputs), "sentences") as progress:
            if journal.done:
                progress.message(
                    f"{journal.path}: {len(journal.done)} of {len(inputs)} sentences are there"
                )
                progress.skip(len(journal.done))
            endings.say = progress.message  # above the bar
            for number, note in journal.notes.items():
                endings.restore(number, note, options.outputs)
            if endings.failed and options.non_finite == "raise":
                got = f"{listed('sentence', endings.failed, len(inputs))} without output"
                raise ValueError(f"{journal.path}: got {got}, expected --non_finite=report")
            refill = refills(rows, len(inputs), options.deadline)
            outputs = decode_stream(
                target,
                inputs,
                batch_size=rows,
                refill=refill,
                skip=journal.done,
                non_finite=options.non_finite,
                **how,
            )
            for number, rows_of_one in outputs:
                journal.add(
                    number, plan.lines(number, rows_of_one), endings.add(number, rows_of_one)
                )
                progress.advance()
        try:
            if finish:
                finish(journal.lines(), options.output_file)
        except ValueError:  # everything is decoded, which may have taken hours
            journal.finish()
            raise
        journal.finish()
    return endings.tell(len(inputs))


def _costs(plan: Plan) -> dict[str, Any]:
    """Returns what `gamma="auto"` has become, as JSON values: a number, or costs and acceptance."""
    if plan.policy is None:
        return {"gamma": plan.config.gamma}
    policy: Any = plan.policy
    begun = {name: float(getattr(policy, name)[0]) for name in ("acceptance", "weight", "look")}
    return {"costs": policy.costs[0].tolist(), **begun}


def _by_costs(record: Any, options: GenerateOptions) -> dict[str, Any]:
    """Returns the arguments of `generate` for what `_costs` returned.

    Raises ValueError for anything else.
    """
    match record:
        case {"gamma": 0}:
            how = dict(lenience=None, typical_epsilon=None, typical_delta=None, verifier="block")
            plain = options.decoding(plain=True)
            return (
                how
                | {name: plain[name] for name in how if name in plain}
                | dict(drafter=None, gamma=0)
            )
        case {"gamma": int(gamma)}:
            return {"gamma": gamma}
        case {"costs": list(costs), "acceptance": float(), "weight": float(), "look": float()} if (
            len(record) == 4
        ):
            return {"gamma": Auto(**{**record, "costs": tuple(costs)})}
    raise ValueError(
        f"{options.output_file}.partial: got {str(record)[:80]!r}, expected costs of iterations"
    )


def _deciding(
    options: GenerateOptions,
    target: LanguageModel,
    drafter: Drafter | None,
    sentences: Sequence[str],
) -> dict[str, Any]:
    """Returns what decides the lines of an output file: settings, and fingerprints of models and
    sentences."""
    apart = (
        *(
            "target",
            "drafter",
            "shortlist",
            "vocabulary",
            "dtype",
            "quantize",
            "input_file",
            "output_file",
            "stream",
        ),
        *("module_import", "tfds_data_dir", "non_finite"),
    )
    settings = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name not in apart
    }
    return settings | {
        "versions": {
            name: importlib.metadata.version(name) for name in ("specdec_jax", "jax", "jaxlib")
        },
        "dtype": target.config.dtype,
        "target in int8": target.quantized,
        "decoding defaults": repr(options.defaults(target)),
        "bits of the target's inputs": target.input_bits,
        "split": (options.split or "test") if options.task else None,
        "special ids": [target.start_token, *target.eos_ids],
        "target": digest(
            [target.contents.encode(), native_format.vocabulary_contents(target.vocabulary)]
        ),
        "drafter": None if drafter is None else drafter.contents,
        "sentences": digest(text.encode() for text in sentences),
    }


def _pieces(
    target: LanguageModel, ids, number: int, keys, non_finite: str, decoding: dict
) -> Iterator[Piece]:
    """Decodes one input as it is committed; an error names its number in the job."""
    try:
        yield from stream(target, [ids], key=keys, non_finite=non_finite, **decoding)
    except NonFiniteLogitsError as error:
        raise error.at(number) from None


def _print_pieces(
    target: LanguageModel,
    inputs,
    options: GenerateOptions,
    decoding: dict[str, Any],
    endings: Endings,
) -> None:
    """Decodes every sentence alone and prints its text as it is committed."""
    keys = fold_keys(seeded(options.seed), np.arange(len(inputs)))
    for number, ids in enumerate(inputs):
        held = ""  # spaces at the end: with a line end after them they become one
        for piece in _pieces(
            target, ids, number, keys[number : number + 1], options.non_finite, decoding
        ):
            if piece.finish_reason:
                endings.add(number, [piece])
            if options.json:
                print(to_json({**piece._asdict(), "row": number}), flush=True)
                continue
            text = held + piece.text
            held = text[len(text.rstrip()) :]
            print(one_line(text.rstrip()), end="", flush=True)
        if not options.json:
            print(one_line(held))
