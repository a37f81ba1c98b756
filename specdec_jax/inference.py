"""Many sentences: reading them, decoding them in batches of like length, giving the outputs back in order."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.progress
from rich.console import Console

from specdec_jax import checkpoints, data
from specdec_jax.drafters.exit import EarlyExitDrafter
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.drafters.lookup import AssistedNGramDrafter, NGramDrafter, PromptLookupDrafter, RandomDrafter
from specdec_jax.drafters.model import ModelDrafter, shortlist_from_counts
from specdec_jax.drafters.ngrams import NGramTable
from specdec_jax.formats import own
from specdec_jax.gamma import POLICIES, Policy
from specdec_jax.generate import Stats, stream
from specdec_jax.jobs import Output, decode_all, decode_stream, refills, rows_for
from specdec_jax.journal import Journal, digest
from specdec_jax.models.base import LanguageModel, decoder_only
from specdec_jax.progress import Progress
from specdec_jax.request import (
    MAX_GAMMA,
    UnsupportedCombination,
    check_limits,
    check_pair,
    check_policy,
    check_prompts,
    check_stop,
    fold_keys,
    plan,
    verifier_settings,
)
from specdec_jax.sampling import SamplingConfig
from specdec_jax.sharding import Mesh, ShardingRules, make_mesh, parse_mesh
from specdec_jax.verification import FORCED, LOSSY, VERIFIERS

# What `--drafter` can name.
NamedDrafter = (
    ModelDrafter | EarlyExitDrafter | HeadsDrafter | NGramDrafter | PromptLookupDrafter | AssistedNGramDrafter | RandomDrafter
)  # fmt: skip

SENTENCES = (
    "Tom is learning German.",
    "I would like a cup of coffee, please.",
    "The weather is very nice today.",
    "She asked me where I had bought the book.",
    "We have to leave the house before eight o'clock.",
    "If I had more time, I would visit my grandparents every weekend.",
    "The museum was founded in 1872 and is one of the oldest in the country.",
    "Nobody knows why he left the city without saying goodbye.",
)


def option(default, text: str):
    """A field of an options dataclass; `text` is its help on the command line."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class DecodingOptions:
    """What every decoding command takes; each field's help is in its metadata."""

    target: str | None = option(None, "the model whose outputs are wanted: a checkpoint's folder or a bundled name")
    drafter: str | None = option(
        None,
        "what drafts: a smaller model, like --target; heads: a folder of `specdec train_heads`; exit:K: the first K decoder "
        "layers of the target; lookup: copies from input and output; assisted: n-grams of input, output and what the "
        "target thought probable; a table of `specdec count` (.npz); random: random tokens; none is plain decoding",
    )
    shortlist_size: int = option(
        0,
        "a drafting model proposes from this many ids only, the most frequent ones, which makes its head smaller; 0: all",
    )
    shortlist: str | None = option(
        None, "a table of `specdec count` (.npz) that says which ids are frequent (none: the vocabulary's first are); "
        "without --shortlist_size all that it counted"
    )  # fmt: skip
    drafter_int8: bool = option(False, "a drafting model multiplies with weights of 8 bits")
    vocabulary: str | None = option(
        None, "SentencePiece model or tokenizer.json of both, for checkpoints that have none (T5X's)"
    )
    dtype: str | None = option(None, "float32 or bfloat16; none: float32 on a CPU, bfloat16 on an accelerator")
    mesh: str | None = option(
        None,
        "DATAxMODEL devices: rows are divided into DATA parts, the target's parameters and caches into MODEL; none: one device",
    )
    shard_drafter: bool = option(
        False, "with --mesh, a drafting model is divided like the target, instead of being held whole by every device"
    )
    temperature: float = option(0.0, "0 takes the most probable token; otherwise logits are divided by it")
    top_k: int = option(0, "sample among the k most probable tokens; 0: among all")
    top_p: float = option(1.0, "sample among the most probable tokens whose mass reaches p")
    min_p: float = option(0.0, "sample among the tokens with at least this share of the greatest probability")
    repetition_penalty: float = option(1.0, "above 1, tokens that were there before become less probable")
    no_repeat_ngram: int = option(0, "forbid tokens that would repeat an n-gram of this size; 0: none")
    min_new_tokens: int = option(0, "shortest output, in tokens before its end")
    forbidden_tokens: tuple[int, ...] = option((), "comma-separated ids that are never chosen")
    logit_bias: tuple[str, ...] = option((), "id:number to add to its logit; repeatable")
    forced_tokens: tuple[str, ...] = option((), "place:id, the id that must stand at a place, from 0; repeatable")
    verifier: str = option("block", f"how drafts are verified: {', '.join(VERIFIERS)}")
    lenience: float | None = option(None, "of --verifier=lenient: accept up to 1/lenience times too often; 1 is strict")
    typical_epsilon: float | None = option(None, "of --verifier=typical: accept above this probability (none: 0.09)")
    typical_delta: float | None = option(None, "of --verifier=typical: or above this times exp(-entropy) (none: 0.3)")
    gamma_policy: str = option(
        "fixed", f"how --gamma is adapted while decoding, which then is the most: fixed, {', '.join(POLICIES)}"
    )
    gamma_settings: tuple[str, ...] = option(
        (), "name:number, of --gamma_policy: "
        + "; ".join(f"{name}: {', '.join(cls.numbers())}" for name, cls in POLICIES.items()) + "; repeatable"
    )  # fmt: skip
    max_new_tokens: int = option(64, "longest output, in tokens")
    max_input_length: int = option(512, "longest input, in tokens; a longer one is an error, never cut")
    seed: int = option(0, "of the sampling; input i draws from fold_in(key(seed), i), whatever its batch")

    def sampling(self) -> SamplingConfig:
        return SamplingConfig(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, no_repeat_ngram=self.no_repeat_ngram,
            min_new_tokens=self.min_new_tokens, forbidden_tokens=self.forbidden_tokens,
            logit_bias=_pairs("logit_bias", self.logit_bias, float),
            forced_tokens=_pairs("forced_tokens", self.forced_tokens, int),
        )  # fmt: skip

    def decoding(self, plain: bool = False) -> dict[str, Any]:
        """Arguments of `generate` that every decoding command passes on, but for the drafter's.

        With `plain`, those of decoding without one: a lossy verifier has nothing to judge there.
        """
        common = dict(
            sampling=self.sampling(), max_new_tokens=self.max_new_tokens, max_input_length=self.max_input_length
        )
        if plain and self.verifier in LOSSY:
            return common
        return common | dict(
            verifier=self.verifier, lenience=self.lenience, typical_epsilon=self.typical_epsilon,
            typical_delta=self.typical_delta,
        )  # fmt: skip

    def gamma_of(self, gamma: int) -> int | Policy:
        """What `generate` takes as γ: `gamma` itself, or the policy with `gamma` as its maximum.

        Raises:
          ValueError: no such policy, or settings that are not its own.
        """
        settings = _settings("gamma_settings", self.gamma_settings)
        if self.gamma_policy == "fixed":
            if settings:
                raise UnsupportedCombination(
                    f"gamma_settings: got {', '.join(self.gamma_settings)!r} with gamma_policy='fixed', expected none"
                )
            return gamma
        if self.gamma_policy not in POLICIES:
            raise ValueError(f"gamma_policy: got {self.gamma_policy!r}, expected one of fixed, {', '.join(POLICIES)}")
        policy = POLICIES[self.gamma_policy]
        for name in settings:
            if name not in policy.numbers():
                expected = ", ".join(policy.numbers())
                raise ValueError(
                    f"gamma_settings: got {name!r} with gamma_policy={self.gamma_policy!r}, expected one of {expected}"
                )
        return policy(gamma, **settings) if gamma else 0

    def check(self) -> None:
        """Refuses what can be seen to be wrong before a model is loaded.

        Raises:
          ValueError: with what was got and what was expected.
        """
        if not self.target:
            expected = " or ".join(["a checkpoint's folder", *checkpoints.bundled()])
            raise ValueError(f"target: got nothing, expected {expected}")
        self.check_decoding()

    def check_decoding(self) -> None:
        """As `check`, for commands that may do without a checkpoint."""
        sampling = self.sampling()
        at_least(1, max_new_tokens=self.max_new_tokens, max_input_length=self.max_input_length)
        if self.verifier == FORCED:
            expected = ", ".join(VERIFIERS)
            raise ValueError(
                f"verifier: got {FORCED!r}, expected one of {expected} (--forced_alpha of `specdec benchmark` times with it)"
            )
        verifier_settings(
            self.verifier, sampling, int(self.drafts), 1, self.lenience, self.typical_epsilon, self.typical_delta
        )
        if not self.drafts and (self.gamma_policy != "fixed" or self.gamma_settings):
            raise UnsupportedCombination(
                f"gamma_policy: got {self.gamma_policy!r} for plain decoding, expected a drafter and gamma of at least 1"
            )
        check_limits(sampling, np.array([self.max_new_tokens]), 1)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: got {self.seed}, expected an integer from 0 to {2**32 - 1}")
        at_least(0, shortlist_size=self.shortlist_size)
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype: got {self.dtype!r}, expected float32 or bfloat16")
        if self.shard_drafter and not self.mesh:
            raise UnsupportedCombination("shard_drafter: got it without a mesh, expected --mesh=DATAxMODEL too")
        if self.mesh:
            ShardingRules(self.devices()).check_rows("batch_size", self.rows)

    @property
    def drafts(self) -> bool:
        """Whether anything is to be drafted: a lossy verifier makes no sense otherwise."""
        return bool(self.drafter)

    @property
    def rows(self) -> int:
        """Sentences that are decoded together."""
        return getattr(self, "batch_size", 1)

    def devices(self) -> Mesh | None:
        """Those of `mesh`."""
        return make_mesh(*parse_mesh(self.mesh)) if self.mesh else None

    def placement(self, drafts: bool) -> ShardingRules | None:
        """How the target, or what drafts, lies on the mesh."""
        return ShardingRules(self.devices(), drafts and not self.shard_drafter) if self.mesh else None

    def load(self, target: LanguageModel | None = None) -> tuple[LanguageModel, NamedDrafter | None]:
        """The target, unless it is given, and, where one is named, the drafter; refuses a drafter of another vocabulary."""
        load = functools.partial(checkpoints.load, dtype=self.dtype, vocabulary=self.vocabulary, mesh=self.devices())
        target = target or load(self.target)
        load = functools.partial(load, replicate=bool(self.mesh) and not self.shard_drafter)
        self.sampling().rows(1, target.config.vocab_size)  # refuses ids that the vocabulary lacks
        drafter = _drafter(self.drafter, target, load, self.reduced) if self.drafter else None
        if not isinstance(drafter, ModelDrafter):
            self.refuse_reduction()
        if drafter is not None:
            check_pair(target, drafter)
            check_policy(self.gamma_of(1), drafter)
        return target, drafter

    def reduced(self, model: LanguageModel) -> ModelDrafter:
        """The drafter with `model` that these options ask for."""
        if not self.shortlist:
            return ModelDrafter(model, self.shortlist_size or None, self.drafter_int8)
        table, _ = NGramTable.load(self.shortlist)
        if not table.matches(model.vocabulary):
            raise ValueError(
                f"shortlist: got a table of {table.vocab_size} ids of another vocabulary, expected the drafter's"
            )
        counts = np.asarray(table.unigram)
        size = self.shortlist_size or len({*np.flatnonzero(counts), *model.eos_ids})
        return ModelDrafter(model, shortlist_from_counts(counts, size, model.eos_ids), self.drafter_int8)

    def refuse_reduction(self) -> None:
        """Refuses what is about a drafting model, where none drafts."""
        for name in ("shortlist_size", "shortlist", "drafter_int8", "shard_drafter"):
            if getattr(self, name):
                raise UnsupportedCombination(f"{name}: got {getattr(self, name)!r}, expected a drafter that is a model")


# Drafters that need nothing but the target.
WITHOUT_FILES: dict[str, Callable[[LanguageModel], NamedDrafter]] = {
    "lookup": lambda target: PromptLookupDrafter(),
    "assisted": lambda target: AssistedNGramDrafter(),
    "random": lambda target: RandomDrafter(target.config.vocab_size),
}


def without_model(name: str) -> bool:
    """Whether `--drafter=name` is a drafter that has no weights of its own."""
    return name in WITHOUT_FILES or name.startswith("exit:") or name.endswith(".npz")


def _drafter(
    name: str, target: LanguageModel, load: Callable[[str], LanguageModel], reduced: Callable[[LanguageModel], ModelDrafter]
) -> NamedDrafter:  # fmt: skip
    """What `--drafter` names, a model's as `reduced` makes it; a folder called lookup, assisted or random can be had as ./lookup."""
    if name in WITHOUT_FILES:
        return WITHOUT_FILES[name](target)
    if name.startswith("exit:"):
        return EarlyExitDrafter(target, _exit_layer(name))
    if name.endswith(".npz"):
        return NGramDrafter.load(name, target.vocabulary)
    if own.is_folder(pathlib.Path(name), "heads"):
        return HeadsDrafter.load(name, target)
    try:
        model = load(name)
    except ValueError as error:
        if pathlib.Path(name).is_dir() or name in checkpoints.bundled():
            raise
        raise ValueError(f"drafter: {error}, lookup, assisted, exit:K, random or a table (.npz)") from None
    return reduced(model)


def _exit_layer(name: str) -> int:
    try:
        return int(name.removeprefix("exit:"))
    except ValueError:
        raise ValueError(f"drafter: got {name!r}, expected exit:K with a number of decoder layers K") from None


def _pairs(name: str, items: Sequence[str], kind: type) -> dict[int, Any] | None:
    """`{5: value}` of `("5:value",)`; None of nothing."""
    try:
        pairs = [(int(key), kind(value)) for key, value in (item.split(":") for item in items)]
    except ValueError:
        expected = "integer:integer" if kind is int else "integer:number"
        raise ValueError(f"{name}: got {', '.join(items)!r}, expected {expected}") from None
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"{name}: got {', '.join(items)!r}, expected every integer before a colon once")
    return dict(pairs) or None


def _settings(name: str, items: Sequence[str]) -> dict[str, Any]:
    """`{"a": value}` of `("a:value",)`; whole numbers are integers."""
    try:
        pairs = [(key, float(value)) for key, value in (item.split(":") for item in items)]
    except ValueError:
        raise ValueError(f"{name}: got {', '.join(items)!r}, expected name:number") from None
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"{name}: got {', '.join(items)!r}, expected every name once")
    return {key: int(value) if value.is_integer() else value for key, value in pairs}


def check_gamma(gamma: int) -> None:
    if not 0 <= gamma <= MAX_GAMMA:
        raise ValueError(f"gamma: got {gamma}, expected an integer from 0 to {MAX_GAMMA}")


def at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name}: got {value}, expected at least {minimum}")


@dataclasses.dataclass(frozen=True)
class GenerateOptions(DecodingOptions):
    """Options of `specdec generate`."""

    gamma: int = option(4, "tokens drafted per target call")
    batch_size: int | None = option(None, "sentences decoded together (none: 8, with --stream 1)")
    num_samples: int = option(1, "outputs for every sentence, one after the other")
    stop: tuple[str, ...] = option((), "a string that ends an output and is left out of it; repeatable")
    deadline: float | None = option(
        None, "seconds for each batch, after which its outputs are taken as they are; its rows are not refilled then"
    )
    input_file: str | None = option(None, "UTF-8 text, one sentence a line, gzip or not; -: standard input")
    output_file: str | None = option(
        None,
        "where outputs go instead of standard output; results are kept beside it (.partial) as they are finished, so that "
        "the same command goes on after a kill",
    )
    task: str | None = option(
        None, "a seqio task or mixture instead of sentences: every example's line is a JSON object as T5X's infer writes it, "
        "with the prediction's ids, and the task's metrics follow; its inputs are cut to --max_input_length"
    )  # fmt: skip
    split: str | None = option(None, "which examples of --task (none: test)")
    module_import: tuple[str, ...] = option((), "a module that registers --task; repeatable")
    score_targets: bool = option(False, "lines of --task have the log-likelihood of their targets too")
    tfds_data_dir: str | None = option(None, "where TensorFlow Datasets keeps the data of --task (none: where it says)")
    json: bool = option(False, "one JSON object a line: text, tokens, log-probabilities, why it ended, statistics")
    stream: bool = option(False, "print each output while it is decoded; with --json, one object for each piece")

    def check(self) -> None:
        super().check()
        check_gamma(self.gamma)
        self.gamma_of(self.gamma)
        at_least(1, batch_size=self.rows, num_samples=self.num_samples)
        check_limits(self.sampling(), np.array([self.max_new_tokens]), self.num_samples)
        check_text("stop", check_stop(self.stop, self.deadline))
        check_output(self.output_file, "output_file")
        if self.output_file and self.stream:
            raise UnsupportedCombination(
                f"stream: got it with output_file={self.output_file!r}, expected one of the two"
            )
        if self.output_file and self.input_file and same_file(self.output_file, self.input_file):
            raise ValueError(f"output_file: got {self.output_file!r}, which is the input, expected another file")
        if self.stream and self.rows * self.num_samples > 1:
            got = f"batch_size={self.rows}, num_samples={self.num_samples}"
            raise UnsupportedCombination(f"stream: got {got}, expected 1 of each: outputs would run into each other")
        self._check_task()

    def _check_task(self) -> None:
        """Refuses what has no meaning for a task, or none without one."""
        if not self.task:
            for name in ("split", "module_import", "score_targets", "tfds_data_dir"):
                if getattr(self, name):
                    raise UnsupportedCombination(f"{name}: got {getattr(self, name)!r} without a task, expected --task")
            return
        for name, usual in dict(input_file=None, json=False, stream=False, num_samples=1).items():
            if getattr(self, name) != usual:
                raise UnsupportedCombination(
                    f"{name}: got {getattr(self, name)!r} with task={self.task!r}, expected {usual or 'none'}"
                )

    @property
    def drafts(self) -> bool:
        return super().drafts and self.gamma > 0

    @property
    def rows(self) -> int:
        return self.batch_size if self.batch_size is not None else 1 if self.stream else 8


def read_sentences(arguments: Sequence[str], input_file: str | None) -> list[str]:
    """Sentences from the command line, a file, or standard input, where nothing else is named.

    Raises:
      ValueError: two sources, a missing or empty one, or one that is not UTF-8.
    """
    if arguments and input_file:
        raise ValueError(f"got sentences and --input_file={input_file}, expected one of the two")
    if arguments:
        check_text("sentence", arguments)
        return list(arguments)
    if input_file in (None, "-"):
        if sys.stdin.isatty():
            raise ValueError("got no sentences, expected them as arguments, in --input_file or on standard input")
        sentences = _standard_input()
    else:
        if not pathlib.Path(input_file).is_file():
            raise ValueError(f"input_file: got {input_file!r}, which is no file, expected a UTF-8 text file")
        sentences = list(data.read_lines(input_file))
    if not sentences:
        raise ValueError(f"got no lines from {input_file or 'standard input'}, expected at least one sentence")
    return sentences


def check_text(name: str, texts: Sequence[str]) -> None:
    """Refuses arguments whose bytes were not UTF-8: Python lets them through as lone surrogates.

    Raises:
      ValueError: which one.
    """
    for number, text in enumerate(texts, 1):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{name} {number}: got {ascii(text)}, which is not UTF-8, expected UTF-8 text") from None


def _standard_input() -> list[str]:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input: got bytes that are not UTF-8 ({error.reason}), expected UTF-8 text"
        ) from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def encode(target: LanguageModel, sentences: Sequence[str], max_input_length: int) -> list[list[int]]:
    """Ids of every sentence, EOS included; none for an empty one. For a decoder-only model prompts, which get no EOS.

    Raises:
      ValueError: the model has no vocabulary, or a sentence is longer than `max_input_length` tokens.
    """
    if target.vocabulary is None:
        raise ValueError(
            f"target: got {target.name} without a vocabulary, expected one (spiece.model or tokenizer.json)"
        )
    if decoder_only(target):
        inputs = [target.vocabulary.encode(text) for text in sentences]
    else:
        end = list(target.vocabulary.eos_ids[:1])
        inputs = [target.vocabulary.encode(text) + end if text.strip() else [] for text in sentences]
    for number, ids in enumerate(inputs, 1):
        if len(ids) > max_input_length:
            raise ValueError(
                f"sentence {number}: got {len(ids)} tokens, expected at most max_input_length = {max_input_length}"
            )
    return inputs


def stats_record(stats: Stats) -> dict:
    """A `Stats` without its rows as JSON values."""
    values = stats._replace(per_row=None)._asdict()
    del values["per_row"]
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


class _Sentences(NamedTuple):
    """What is decoded: ids of every input, what tells each apart as text, and the lines of output for it.

    A seqio task's job has the same interface.
    """

    inputs: list[list[int]]
    contents: Sequence[str]
    as_json: bool

    def lines(self, number: int, outputs: Sequence[Output]) -> list[str]:
        return [_line(output, self.as_json) for output in outputs]


def run(options: GenerateOptions, arguments: Sequence[str]) -> None:
    """`specdec generate`."""
    options.check()
    if options.task:
        _run_task(options, arguments)
        return
    sentences = read_sentences(arguments, options.input_file)
    target, drafter = options.load()
    job = _Sentences(encode(target, sentences, options.max_input_length), sentences, options.json)
    check_prompts(target, drafter if options.drafts else None, list(map(len, job.inputs)), options.max_new_tokens)
    decoding = _decoding(options, drafter)
    if options.stream:
        _print_pieces(target, job.inputs, options, decoding)
    elif options.output_file:
        _write_file(target, job, options, decoding)
    else:
        for line in _decoded(target, job, options, decoding):
            print(line)


def _run_task(options: GenerateOptions, arguments: Sequence[str]) -> None:
    """The examples of a seqio task instead of sentences, then its metrics."""
    if arguments:
        raise ValueError(f"got sentences and --task={options.task}, expected one of the two")
    try:
        from specdec_jax.interop import seqio
    except ImportError as error:
        raise ValueError(
            f"task: got {options.task!r} without seqio ({error}), expected the extra: pip install '.[seqio]'"
        ) from error
    split = options.split or "test"
    tasks = seqio.find(options.task, split, options.module_import, options.tfds_data_dir)
    target, drafter = options.load()
    job = seqio.Job(
        tasks, split, target, input_length=options.max_input_length, output_length=options.max_new_tokens,
        batch_size=options.rows, seed=options.seed, score_targets=options.score_targets,
    )  # fmt: skip
    decoding = _decoding(options, drafter)
    if options.output_file:
        _write_file(target, job, options, decoding, job.finish)
        return
    lines = []
    for line in _decoded(target, job, options, decoding):
        print(line)
        lines.append(line)
    job.finish(lines, None)


def _decoding(options: GenerateOptions, drafter: NamedDrafter | None) -> dict[str, Any]:
    """Arguments of `generate`."""
    return options.decoding() | dict(
        drafter=drafter, gamma=options.gamma_of(options.gamma), stop=options.stop, deadline=options.deadline
    )


def _decoded(target: LanguageModel, job: Any, options: GenerateOptions, decoding: dict[str, Any]) -> Iterator[str]:
    """Lines of all outputs in the order of the inputs."""
    outputs = decode_all(
        target, job.inputs, batch_size=options.rows, seed=options.seed, num_samples=options.num_samples, **decoding
    )
    total, quiet = len(job.inputs) * options.num_samples, sys.stdout.isatty()
    with Progress("sentences", total, lines=False, quiet=quiet) as progress:
        for number, output in enumerate(outputs):
            yield from job.lines(number // options.num_samples, [output])
            progress.advance()


def _line(output: Output, as_json: bool) -> str:
    if as_json:
        return _json({**output._asdict(), "stats": stats_record(output.stats)})
    return _one_line(output.text)


def _write_file(
    target: LanguageModel, job: Any, options: GenerateOptions, decoding: dict[str, Any],
    finish: Callable[[Iterable[str], str], None] | None = None,
) -> None:  # fmt: skip
    """All outputs to a file, whole or not at all; what a run that was killed had finished is not decoded again.

    `finish` is called with all lines before, so that a kill does not spare it; the file is written even if it fails.
    """
    inputs = job.inputs
    rows = rows_for(target, options.rows, len(inputs))
    how = dict(key=jax.random.key(options.seed), num_samples=options.num_samples, **decoding)
    plan(target, inputs, batch_size=rows, **how)  # what is refused leaves no journal
    settings = _deciding(options, target, decoding["drafter"], job.contents)
    with Journal(options.output_file, settings, len(inputs)) as journal:
        with Progress("sentences", len(inputs)) as progress:
            if journal.done:
                progress.message(f"{journal.path}: {len(journal.done)} of {len(inputs)} sentences are there")
                progress.skip(len(journal.done))
            refill = refills(rows, len(inputs), options.deadline)
            outputs = decode_stream(target, inputs, batch_size=rows, refill=refill, skip=journal.done, **how)
            for number, found in outputs:
                journal.add(number, job.lines(number, found))
                progress.advance()
            progress.report()
        try:
            if finish:
                finish(journal.lines(), options.output_file)
        except ValueError:  # of hours of decoding all is there
            journal.finish()
            raise
        journal.finish()


def _deciding(
    options: GenerateOptions, target: LanguageModel, drafter: NamedDrafter | None, sentences: Sequence[str]
) -> dict[str, Any]:
    """What decides the lines of an output file: settings, models and sentences, by their contents."""
    apart = (
        *("target", "drafter", "shortlist", "vocabulary", "dtype", "input_file", "output_file", "stream"),
        *("module_import", "tfds_data_dir"),
    )
    settings = {
        field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.name not in apart
    }
    vocabulary = target.vocabulary.fingerprint().encode() if target.vocabulary else b""
    return settings | {
        "dtype": target.config.dtype,
        "special ids": [target.start_token, *target.eos_ids],
        "target": digest([target.fingerprint.encode(), vocabulary]),
        "drafter": None if drafter is None else _contents(drafter),
        "sentences": digest(text.encode() for text in sentences),
    }


def _contents(drafter: NamedDrafter) -> str:
    """Tells drafters apart by what they are made of: the fingerprint of a model, the arrays of others."""
    model, listed = getattr(drafter, "model", None), getattr(drafter, "shortlist", None)
    parts = [type(drafter).__name__, "" if isinstance(drafter, ModelDrafter) else drafter.name]
    parts.append(str(getattr(drafter, "sampled", "")))
    parts.append("" if model is None else model.fingerprint)
    leaves = jax.tree.leaves(drafter if model is None else listed)
    return digest([*(part.encode() for part in parts), *(np.asarray(leaf).tobytes() for leaf in leaves)])


def _print_pieces(target: LanguageModel, inputs, options: GenerateOptions, decoding: dict[str, Any]) -> None:
    """Every sentence alone, its text printed as it is committed."""
    keys = fold_keys(jax.random.key(options.seed), np.arange(len(inputs)))
    for number, ids in enumerate(inputs):
        held = ""  # spaces at the end: with a line end after them they become one
        for piece in stream(target, [ids], key=keys[number : number + 1], **decoding):
            if options.json:
                print(_json({**piece._asdict(), "row": number}), flush=True)
                continue
            text = held + piece.text
            held = text[len(text.rstrip()) :]
            print(_one_line(text.rstrip()), end="", flush=True)
        if not options.json:
            print(_one_line(held))


def _json(record: dict[str, Any]) -> str:
    """One line; −inf, which JSON lacks, becomes null."""

    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    return json.dumps({name: finite(value) for name, value in record.items()}, ensure_ascii=False, allow_nan=False)


def _one_line(text: str) -> str:
    """`text` with spaces for line ends: one line per sentence, whatever the model wrote."""
    return re.sub(r"\s*[\r\n]+\s*", " ", text)


def track(items: Iterable[Any], total: int, what: str, quiet: bool = False) -> Iterator[Any]:
    """`items` with a progress bar on standard error where that is a terminal; `quiet` where results are printed there too.

    The bar moves between two items only: nothing runs beside what is timed.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield from items
        return
    # rich would otherwise send what is printed meanwhile to standard error.
    redirect: dict[str, Any] = dict(redirect_stdout=False, redirect_stderr=False)
    with rich.progress.Progress(console=console, transient=True, auto_refresh=False, **redirect) as bar:
        yield from bar.track(items, total=total, description=what)


def same_file(path: str, other: str) -> bool:
    """Whether both are there and the same file."""
    return all(map(os.path.exists, (path, other))) and os.path.samefile(path, other)


def check_output(path: str | None, name: str = "output") -> None:
    """Refuses a file for a result that could not be written hours later."""
    if path and (pathlib.Path(path).is_dir() or not pathlib.Path(path).absolute().parent.is_dir()):
        raise ValueError(f"{name}: got {path!r}, expected a file in a folder that exists")
