"""Runs `specdec count`: counts an n-gram table of the outputs in text files."""

import dataclasses
import sys
from collections.abc import Iterator

from specdec_jax.checkpoints import loader
from specdec_jax.commands.options import check_at_least
from specdec_jax.drafters.ngram import NGramDrafter
from specdec_jax.files.progress import track
from specdec_jax.files.writing import check_output
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.training import text_files


@document_fields
@dataclasses.dataclass(frozen=True)
class CountOptions:
    """Options of `specdec count`.

    Attributes:
      target: model that the table is to draft for; its vocabulary splits the text
      vocabulary: SentencePiece model or tokenizer.json, for checkpoints that have none (T5X's)
      input_file: UTF-8 text, gzip or not: one output a line, or source, tab, output; repeatable
      continuations: how many of the most frequent next tokens are kept for each context
      sampled: draft tokens drawn from the frequencies instead of the most frequent token
      output: file (.npz) that the table is written to, for --drafter
    """

    target: str | None = None
    vocabulary: str | None = None
    input_file: tuple[str, ...] = ()
    order: int = make_option(2, "n of the n-grams: 1 counts single tokens, 2 pairs, …")
    continuations: int = 8
    sampled: bool = False
    output: str | None = None

    def check(self) -> None:
        if not self.target:
            expected = " or ".join(["a checkpoint's folder", *loader.bundled()])
            raise ValueError(f"target: got nothing, expected {expected}")
        if not self.input_file:
            raise ValueError("input_file: got nothing, expected a UTF-8 text file")
        for path in self.input_file:
            text_files.check_is_file("input_file", path)
        if not self.output or not self.output.endswith(".npz"):
            expected = "the name of a file that ends in .npz"
            raise ValueError(f"output: got {self.output!r}, expected {expected}")
        check_at_least(1, order=self.order, continuations=self.continuations)
        check_output(self.output)


def run(options: CountOptions) -> None:
    """Runs `specdec count`."""
    options.check()
    assert options.target and options.output  # by its check
    vocabulary, start_token = loader.load_vocabulary(options.target, options.vocabulary)
    config = loader.load_shape(options.target)
    if vocabulary is None:
        expected = "one (spiece.model or tokenizer.json)"
        raise ValueError(f"target: got {options.target} without a vocabulary, expected {expected}")
    lines = [line for path in options.input_file for line in _read_outputs(path)]
    end, prompted = list(vocabulary.eos_ids[:1]), config.decoder_only
    sequences = [  # what stands before a prompt is not drafted: the start token is in its place
        vocabulary.encode(line) + end if prompted else vocabulary.encode_output(line)
        for line in track(lines, len(lines), "lines")
    ]
    size = min(vocabulary.size, config.vocab_size)
    drafter = NGramDrafter.count(
        sequences,
        size,
        options.order,
        start_token=start_token,
        continuations=options.continuations,
        sampled=options.sampled,
        vocabulary=vocabulary,
    )
    drafter.save(options.output)
    tokens, contexts = sum(map(len, sequences)), len(drafter.starts) - 1
    counts = f"{len(lines)} outputs of {tokens} tokens, {contexts} contexts"
    print(f"{options.output}: {counts}", file=sys.stderr)


def _read_outputs(path: str) -> Iterator[str]:
    """Yields the last of one or two columns of every line, if it has any text.

    Raises:
      ValueError: a line has more columns, or the file cannot be read.
    """
    for number, line in enumerate(text_files.read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) > 2:
            expected = "one (outputs) or two (source, tab, output)"
            got = f"got {len(columns)} columns"
            raise ValueError(f"{path}, line {number}: {got}, expected {expected}")
        if columns[-1].strip():
            yield columns[-1]
