"""Times ways of decoding (variants) on the same batches of sentences, pass after pass.

The variants are interleaved, `IN_A_ROW` batches at a time, since the speed of a shared machine
drifts. The first batch of each block finds the caches full of another variant's weights.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.analysis import timing
from specdec_jax.analysis.timing import Spread
from specdec_jax.backends.sharding import row_multiple
from specdec_jax.decoding import checks
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.generation_config import GenerationConfig, split_options
from specdec_jax.decoding.inputs import encode
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.languages import OutputLanguage, choose_output_language, list_codes
from specdec_jax.decoding.results import GenerationResult, NonFiniteLogitsError
from specdec_jax.files.progress import track
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.randomness import make_key

IN_A_ROW = 8


@dataclasses.dataclass(frozen=True)
class SentenceBatch:
    """Sentences that are decoded together.

    Attributes:
      inputs: the inputs of `generate`: strings, or ids with a preset.
      ids: their ids, EOS included (except for a decoder-only target).
      numbers: positions of the inputs before they were sorted, from 0; rows that fill up the batch
        repeat the last.
      keys: one random key for each input, by its number.
    """

    inputs: list
    ids: list[list[int]]
    numbers: list[int]
    keys: jax.Array

    def decode_with(
        self, decode: Callable[["SentenceBatch"], GenerationResult]
    ) -> GenerationResult:
        """Decodes the batch; an error about an input has the number that it had before sorting."""
        try:
            return decode(self)
        except NonFiniteLogitsError as error:
            raise error.at(self.numbers[error.input]) from None

    @property
    def padded(self) -> int:
        """The padded length of the inputs."""
        return bucket_length(max(map(len, self.ids)))


class Workload(NamedTuple):
    """What is measured: a pair of models, and the sentences that they decode.

    Attributes:
      target: the target.
      drafter: a `Drafter`; None where only plain decoding is measured.
      batches: sentences.
      options: the options of the command, which go into a record whole; its class documents them.
        `sampling()` and `decoding()` of them say how tokens are chosen, and give the arguments of
        `generate` but for the drafter's.
    """

    target: LanguageModel
    drafter: Any
    batches: Sequence[SentenceBatch]
    options: Any

    @property
    def rows(self) -> int:
        """Number of sentences that are decoded together."""
        return len(self.batches[0].ids)

    @property
    def padded(self) -> list[int]:
        """The padded input length of each batch."""
        return [batch.padded for batch in self.batches]

    @property
    def lengths(self) -> list[int]:
        """The padded input lengths that there are, ascending."""
        return sorted(set(self.padded))

    @property
    def language(self) -> OutputLanguage:
        """How outputs begin."""
        config = _read_config(self.options)
        (code,) = list_codes("target_language", config.target_language, 1)
        return choose_output_language(self.target, config, code)

    def check_prompts(self) -> None:
        """Raises ValueError for prompts too long for a model, before anything compiles."""
        prompted = is_decoder_only(self.target)
        lengths = [len(ids) if prompted else 1 for batch in self.batches for ids in batch.ids]
        checks.check_prompts(self.target, self.drafter, lengths, self.options.max_new_tokens)


def _read_config(options: Any) -> GenerationConfig:
    """Returns the configuration that the options of a command give to `generate`."""
    given = options.decoding()
    return split_options(given.pop("config", None), given)[0]


@dataclasses.dataclass
class Variant:
    """One way of decoding and its measurements.

    Attributes:
      gamma: γ, of a tree the number of drafted nodes; 0 is plain decoding.
      decode: decodes a batch.
      synthetic_alpha: probability with which drafted tokens are accepted at random; None: the
        models decide.
      tree: the tree as text; None: a chain.
      compile_seconds: seconds of the first call for every shape.
      seconds: wall time of each pass.
      results: one for each batch, from the last pass.
    """

    gamma: int
    decode: Callable[[SentenceBatch], GenerationResult]
    synthetic_alpha: float | None = None
    tree: str | None = None
    compile_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    results: list[GenerationResult] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of new tokens, EOS included; counted in the same way for all variants."""
        return int(sum(result.lengths.sum() for result in self.results))

    @property
    def seconds_per_token(self) -> np.ndarray:
        """Seconds per token of each pass."""
        return np.array(self.seconds) / max(self.tokens, 1)

    @property
    def has_rate(self) -> bool:
        """Whether its tokens have an acceptance rate: those verified as a whole have none."""
        return any(result.stats.acceptance_rate is not None for result in self.results)

    def record(self) -> dict[str, Any]:
        """Returns the seconds and tokens as records have them."""
        seconds, compiling = timing.summarize(self.seconds), self.compile_seconds
        return {"seconds": seconds, "tokens": self.tokens, "compile_seconds": compiling}

    def total(self, name: str) -> int:
        """Returns a field of `Stats` summed over all batches."""
        return sum(getattr(result.stats, name) for result in self.results)

    def totals(self) -> dict[str, Any]:
        """Returns the counts of all batches together, as JSON values."""
        calls, tokens = ("target_calls", "draft_calls"), ("drafted", "accepted", "undrafted")
        names = *calls, *tokens, "examined_by_position", "accepted_by_position"
        return {name: np.asarray(self.total(name)).tolist() for name in names}


def cut_batches(
    inputs: list, ids: list, batch_size: int, seed: int, parts: int = 1
) -> list[SentenceBatch]:
    """Returns the inputs sorted by length and cut into batches.

    A batch has no more rows than are needed, rounded up to a multiple of `parts`. The last one is
    filled up with empty inputs, so that one number of rows compiles.
    """
    size = min(batch_size, -(-len(inputs) // parts) * parts)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]) if size > 1 else 0)
    keys, batches = fold_keys(make_key(seed), np.arange(len(inputs))), []
    for first in range(0, len(order), size):
        chosen = order[first : first + size]
        missing = size - len(chosen)
        numbers = chosen + [chosen[-1]] * missing
        rows = [inputs[i] for i in chosen] + [None] * missing
        row_ids = [ids[i] for i in chosen] + [[]] * missing
        batches.append(SentenceBatch(rows, row_ids, numbers, keys[np.array(numbers)]))
    return batches


def make_decoder(
    target: LanguageModel, arguments: Mapping[str, Any]
) -> Callable[[SentenceBatch], GenerationResult]:
    """Returns a function that decodes a batch by `generate` with these arguments."""
    return lambda batch: generate(target, batch.inputs, key=batch.keys, **arguments)


def make_batches(
    target: LanguageModel, sentences: Sequence[str], options: Any
) -> list[SentenceBatch]:
    """Returns sentences in batches."""
    config = _read_config(options)
    languages = config.source_language, config.target_language
    ids = encode(target, sentences, options.max_input_length, *languages)
    parts = row_multiple(target.network.rules)
    return cut_batches(list(sentences), ids, options.batch_size, options.seed, parts)


def warm_up(
    variants: Mapping[str, Variant], steps: Mapping[str, Callable], batches: Sequence[SentenceBatch]
) -> None:
    """Compiles everything that is timed later, and records the seconds of each variant."""
    shapes = {batch.padded: batch for batch in batches}
    pairs = {
        f"{name}, inputs of {length} ids": (variant, batch)
        for name, variant in variants.items()
        for length, batch in shapes.items()
    }
    for variant, batch in track(pairs.values(), len(pairs), "compiling", names=list(pairs)):
        start = time.perf_counter()
        batch.decode_with(variant.decode)
        variant.compile_seconds += time.perf_counter() - start
    for step in track(steps.values(), len(steps), "compiling steps", names=list(steps)):
        jax.block_until_ready(step())


def time_passes(
    variants: Mapping[str, Variant], batches: Sequence[SentenceBatch], repeats: int, what: str
) -> None:
    """Times `repeats` passes of every batch through every variant."""
    for repeat in range(repeats):
        time_pass(variants, batches, repeat, f"{what}, pass {repeat + 1} of {repeats}")


def time_pass(
    variants: Mapping[str, Variant], batches: Sequence[SentenceBatch], turn: int, what: str
) -> None:
    """Times every batch through every variant, `IN_A_ROW` batches by each of them in turn."""
    for variant in variants.values():
        variant.seconds.append(0.0)
        variant.results = []
    blocks = (batches[first : first + IN_A_ROW] for first in range(0, len(batches), IN_A_ROW))
    calls = [
        (variants[name], batch)
        for index, block in enumerate(blocks)
        for name in timing.rotate(variants, turn + index)
        for batch in block
    ]
    for variant, batch in track(calls, len(calls), f"{what}, call"):
        start = time.perf_counter()
        result = batch.decode_with(variant.decode)
        variant.seconds[-1] += time.perf_counter() - start
        variant.results.append(result)


def missing_outputs(variants: Mapping[str, Variant]) -> list[str]:
    """Returns messages about variants that lack outputs which the plain one has."""
    problems, expected = [], [result.lengths > 0 for result in variants["plain"].results]
    for name, variant in variants.items():
        got, most = len(variant.results), len(expected)
        if got != most:
            problems.append(f"{name}: got outputs for {got} batches, expected {most}")
        pairs = zip(expected, variant.results)
        if missing := sum(int(np.sum(want & (got.lengths == 0))) for want, got in pairs):
            how = "expected one as in plain decoding"
            problems.append(f"{name}: got no output for {missing} inputs, {how}")
    return problems


def list_differences(
    variant: Variant,
    plain: Variant,
    batches: Sequence[SentenceBatch],
    measure: Callable[[SentenceBatch, GenerationResult, GenerationResult, int, int], dict],
) -> list[dict[str, Any]]:
    """Returns a record of every input with other tokens than plain decoding, in their order.

    `measure` returns the further fields, "margin" among them, of (batch, the variant's result,
    plain decoding's, row, first position with another token).
    """
    found = []
    for batch, other, expected in zip(batches, variant.results, plain.results, strict=True):
        differs = other.tokens != expected.tokens
        for row in map(int, np.flatnonzero(differs.any(axis=1))):
            position = int(np.argmax(differs[row]))
            found.append(
                {
                    "input": batch.numbers[row],
                    "position": position,
                    "plain": int(expected.tokens[row, position]),
                    "other": int(other.tokens[row, position]),
                    **measure(batch, other, expected, row, position),
                }
            )
    return sorted(found, key=lambda item: item["input"])


def describe_differing(name: str, numbers: Sequence[int]) -> list[str]:
    """Returns a message about the inputs of these numbers, whose tokens differ; [] for none."""
    if not numbers:
        return []
    sentences = ", ".join(str(number + 1) for number in numbers)
    return [
        f"{name}: got other tokens than plain decoding for sentences {sentences}, expected the "
        "same but for near-ties"
    ]


def count_differing(ours: Variant, theirs: Variant) -> int:
    """Returns how many rows have different tokens."""
    pairs = zip(ours.results, theirs.results, strict=True)
    return sum(int(np.any(one.tokens != other.tokens, axis=1).sum()) for one, other in pairs)


def timed_steps(steps: Mapping[str, Callable], turn: int, what: str) -> dict[str, float]:
    """Returns the seconds of one call of every variant of single steps."""
    names = timing.rotate(steps, turn)
    return {
        name: float(np.median(timing.time_passes(steps[name])))
        for name in track(names, len(steps), f"{what}, step", names=names)
    }


def time_steps(steps: Mapping[str, Callable], repeats: int) -> dict[str, Spread]:
    """Returns the seconds of one step, by variant, over `repeats` passes."""
    turns = range(repeats)
    return seconds_per_step(
        [timed_steps(steps, turn, f"timing steps, pass {turn + 1} of {repeats}") for turn in turns]
    )


def seconds_per_step(seconds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Returns the seconds of one step, by variant, over passes of `timed_steps`."""
    return {
        name: Spread.from_samples([one[name] / timing.count_steps(name) for one in seconds])
        for name in (seconds[0] if seconds else ())
    }
