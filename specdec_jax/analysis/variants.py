"""Times ways of decoding (variants) in turn: the same batches of sentences through each of them,
pass after pass.

The variants are interleaved batch by batch, since the speed of a shared machine drifts.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.analysis import timing
from specdec_jax.analysis.timing import Spread
from specdec_jax.backends.sharding import row_parts
from specdec_jax.decoding import checks
from specdec_jax.decoding.inputs import bucket, encode
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.results import GenerationResult, NonFiniteLogitsError
from specdec_jax.files.progress import track
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.randomness import seeded


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sentences that are decoded together.

    Attributes:
      inputs: what `generate` is given: strings, or ids with a preset.
      ids: their ids, EOS included (except for a decoder-only target).
      numbers: positions of the inputs before they were sorted, from 0; rows that fill up the batch
        repeat the last.
      keys: one random key for each input, by its number.
    """

    inputs: list
    ids: list[list[int]]
    numbers: list[int]
    keys: jax.Array

    def through(self, decode: Callable[["Batch"], GenerationResult]) -> GenerationResult:
        """Decodes the batch; an error about an input names the number that it had before sorting."""
        try:
            return decode(self)
        except NonFiniteLogitsError as error:
            raise error.at(self.numbers[error.input]) from None

    @property
    def padded(self) -> int:
        """The padded length of the inputs."""
        return bucket(max(map(len, self.ids)))


@dataclasses.dataclass
class Variant:
    """One way of decoding and its measurements.

    Attributes:
      gamma: γ, of a tree the number of drafted nodes; 0 is plain decoding.
      decode: decodes a batch.
      synthetic_alpha: drafted tokens are accepted at random with a given probability with this
        probability; None: as the models say.
      tree: the tree as text; None: a chain.
      compile_seconds: seconds of the first call for every shape.
      seconds: wall time of each pass.
      results: one for each batch, from the last pass.
    """

    gamma: int
    decode: Callable[[Batch], GenerationResult]
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

    def total(self, name: str) -> int:
        """Returns a field of `Stats` summed over all batches."""
        return sum(getattr(result.stats, name) for result in self.results)

    def totals(self) -> dict[str, Any]:
        """Returns the counts of all batches together, as JSON values."""
        names = (
            "target_calls",
            "draft_calls",
            "drafted",
            "accepted",
            "examined_by_position",
            "accepted_by_position",
            "undrafted",
        )
        return {name: np.asarray(self.total(name)).tolist() for name in names}


def cut(inputs: list, ids: list, batch_size: int, seed: int, parts: int = 1) -> list[Batch]:
    """Returns the inputs sorted by length and cut into batches.

    A batch has no more rows than are needed, rounded up to a multiple of `parts`. The last one is
    filled up with empty inputs, so that one number of rows compiles.
    """
    size = min(batch_size, -(-len(inputs) // parts) * parts)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]) if size > 1 else 0)
    keys, batches = fold_keys(seeded(seed), np.arange(len(inputs))), []
    for first in range(0, len(order), size):
        chosen = order[first : first + size]
        missing = size - len(chosen)
        numbers = chosen + [chosen[-1]] * missing
        rows = [inputs[i] for i in chosen] + [None] * missing
        batches.append(
            Batch(rows, [ids[i] for i in chosen] + [[]] * missing, numbers, keys[np.array(numbers)])
        )
    return batches


def batches_of(target: LanguageModel, sentences: Sequence[str], options) -> list[Batch]:
    """Returns sentences in batches; `options` are those of a command with a `batch_size`."""
    ids = encode(target, sentences, options.max_input_length)
    return cut(
        list(sentences), ids, options.batch_size, options.seed, row_parts(target.network.rules)
    )


def check_prompts(target: LanguageModel, drafter, batches: Sequence[Batch], options) -> None:
    """Raises ValueError, before anything compiles, for prompts that are too long for one of the
    models."""
    lengths = [len(ids) for batch in batches for ids in batch.ids]
    checks.check_prompts(target, drafter, lengths, options.max_new_tokens)


def warm_up(
    variants: Mapping[str, Variant], steps: Mapping[str, Callable], batches: Sequence[Batch]
) -> None:
    """Compiles everything that is timed later, and records the seconds of each variant."""
    shapes = {batch.padded: batch for batch in batches}
    compiled = {
        f"{name}, inputs of {length} ids": (variant, batch)
        for name, variant in variants.items()
        for length, batch in shapes.items()
    }
    for variant, batch in track(
        compiled.values(), len(compiled), "compiling", names=list(compiled)
    ):
        start = time.perf_counter()
        batch.through(variant.decode)
        variant.compile_seconds += time.perf_counter() - start
    for step in track(steps.values(), len(steps), "compiling steps", names=list(steps)):
        jax.block_until_ready(step())


def one_pass(
    variants: Mapping[str, Variant], batches: Sequence[Batch], turn: int, what: str
) -> None:
    """Times every batch through every variant, one variant after the other."""
    for variant in variants.values():
        variant.seconds.append(0.0)
        variant.results = []
    for index, batch in enumerate(track(batches, len(batches), f"{what}, batch")):
        for name in timing.rotate(variants, turn + index):
            start = time.perf_counter()
            result = batch.through(variants[name].decode)
            variants[name].seconds[-1] += time.perf_counter() - start
            variants[name].results.append(result)


def missing_outputs(variants: Mapping[str, Variant]) -> list[str]:
    """Says which variants lack outputs that the plain one has."""
    problems, expected = [], [result.lengths > 0 for result in variants["plain"].results]
    for name, variant in variants.items():
        if len(variant.results) != len(expected):
            problems.append(
                f"{name}: got outputs for {len(variant.results)} batches, expected {len(expected)}"
            )
        missing = sum(
            int(np.sum(want & (got.lengths == 0))) for want, got in zip(expected, variant.results)
        )
        if missing:
            problems.append(
                f"{name}: got no output for {missing} inputs that plain decoding has one for"
            )
    return problems


def timed_steps(steps: Mapping[str, Callable], turn: int, what: str) -> dict[str, float]:
    """Returns the seconds of one call of every variant of single steps."""
    names = timing.rotate(steps, turn)
    return {
        name: timing.timed(steps[name])
        for name in track(names, len(steps), f"{what}, step", names=names)
    }


def time_steps(steps: Mapping[str, Callable], repeats: int) -> dict[str, Spread]:
    """Returns the seconds of one step, by variant, over `repeats` passes."""
    turns = range(repeats)
    return per_step(
        [timed_steps(steps, turn, f"timing steps, pass {turn + 1} of {repeats}") for turn in turns]
    )


def per_step(seconds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Returns the seconds of one step, by variant, over passes of `timed_steps`."""
    return {
        name: Spread.from_samples([one[name] / timing.steps_in(name) for one in seconds])
        for name in (seconds[0] if seconds else ())
    }
