"""Runs `specdec count`: counts an n-gram table of outputs in text files, or sorts the texts."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator

from specdec_jax.checkpoints import loader
from specdec_jax.decoding.checks import unsupported
from specdec_jax.drafters.named import NGRAMS, SORTED
from specdec_jax.drafters.ngram import NGramDrafter
from specdec_jax.drafters.ngram_table import check_ranges
from specdec_jax.drafters.suffix import SuffixDrafter
from specdec_jax.files.progress import track
from specdec_jax.files.writing import check_output
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.tokenizers.languages import choose_start_token
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
      suffix: write the texts themselves instead of a table, sorted for search, to draft long
        passages from (REST), with the sources if there are two columns; the file may be larger than
        the memory
      output: file to write (.npz; .suffix with --suffix), which --drafter takes
      source_language: code of the sources' language, for a vocabulary with languages (NLLB's)
      target_language: code of the outputs' language
    """

    target: str | None = None
    vocabulary: str | None = None
    input_file: tuple[str, ...] = ()
    order: int = make_option(2, "n of the n-grams: 1 counts single tokens, 2 pairs, …")
    continuations: int = 8
    sampled: bool = False
    suffix: bool = False
    output: str | None = None
    source_language: str | None = None
    target_language: str | None = None

    def check(self) -> None:
        if not self.target:
            expected = " or ".join(["a checkpoint's folder", *loader.bundled()])
            raise ValueError(f"target: got nothing, expected {expected}")
        if not self.input_file:
            raise ValueError("input_file: got nothing, expected a UTF-8 text file")
        for path in self.input_file:
            text_files.check_is_file("input_file", path)
        end = SORTED if self.suffix else NGRAMS
        if not self.output or not self.output.endswith(end):
            expected = f"the name of a file that ends in {end}"
            raise ValueError(f"output: got {self.output!r}, expected {expected}")
        check_ranges(self.order, self.continuations)
        for name in ("order", "continuations", "sampled") if self.suffix else ():
            got, default = getattr(self, name), getattr(CountOptions, name)
            if got != default:
                raise unsupported(name, f"{got} with suffix", f"{default}: texts are not counted")
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
    vocabulary = vocabulary.with_languages(options.source_language, options.target_language)
    first = choose_start_token(vocabulary.languages, options.target_language, start_token)
    pairs = [pair for path in options.input_file for pair in _read_pairs(path)]
    if not pairs:
        raise ValueError("input_file: got no text, expected at least one output")
    size = min(vocabulary.size, config.vocab_size)
    encode_output: Callable[[str], list[int]] = vocabulary.encode_continuation
    if not config.decoder_only:
        encode_output = functools.partial(vocabulary.encode_output, start_token=first)
    if options.suffix:
        before, encode = [first], vocabulary.encode_input
        if config.decoder_only:  # a prompt has no EOS
            before, encode = [], vocabulary.encode_prompt
        texts = [
            (encode(source) if source else []) + before + encode_output(output)
            for source, output in track(pairs, len(pairs), "lines")
        ]
        SuffixDrafter.save_texts(options.output, texts, size, vocabulary)
        counts = f"{len(pairs)} texts of {sum(map(len, texts))} tokens"
    else:
        sequences = [encode_output(output) for _, output in track(pairs, len(pairs), "lines")]
        drafter = NGramDrafter.count(
            sequences,
            size,
            options.order,
            start_token=start_token,
            first_token=first,
            continuations=options.continuations,
            sampled=options.sampled,
            vocabulary=vocabulary,
        )
        drafter.save(options.output)
        tokens, contexts = sum(map(len, sequences)), len(drafter.starts) - 1
        counts = f"{len(pairs)} outputs of {tokens} tokens, {contexts} contexts"
    print(f"{options.output}: {counts}", file=sys.stderr)


def _read_pairs(path: str) -> Iterator[tuple[str, str]]:
    """Yields source ("" where there is none) and output of every line, if the output has any text.

    Raises:
      ValueError: a line has more than two columns, or the file cannot be read.
    """
    for number, line in enumerate(text_files.read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) > 2:
            expected = "one (outputs) or two (source, tab, output)"
            got = f"got {len(columns)} columns"
            raise ValueError(f"{path}, line {number}: {got}, expected {expected}")
        if columns[-1].strip():
            yield columns[0] if len(columns) > 1 else "", columns[-1]
