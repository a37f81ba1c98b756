"""Sentences from arguments, a file or standard input, as ids."""

import pathlib
import sys
from collections.abc import Sequence

from specdec_jax import checkpoints, data
from specdec_jax.models.base import LanguageModel, decoder_only
from specdec_jax.vocabularies import check_lengths

BUILT_IN = "ende/sentences.txt"  # of one padded length, so that few shapes compile


def built_in() -> list[str]:
    """Returns the English sentences that come with the package."""
    return list(data.read_lines(checkpoints.BUNDLED / BUILT_IN))


def read_sentences(arguments: Sequence[str], input_file: str | None) -> list[str]:
    """Sentences from the command line, a file (`BUILT_IN` names the one of the package), or standard input, where
    nothing else is named.

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
        sentences = list(data.lines_of(sys.stdin.buffer, "standard input"))
    elif input_file == BUILT_IN and not pathlib.Path(input_file).exists():
        sentences = built_in()
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


def encode(target: LanguageModel, sentences: Sequence[str], max_input_length: int) -> list[list[int]]:
    """Ids of every sentence, EOS included; none for an empty one. For a decoder-only model prompts, which get no EOS.

    Raises:
      ValueError: the model has no vocabulary, or a sentence is longer than `max_input_length` tokens, or too long to be
        encoded at all.
    """
    if target.vocabulary is None:
        raise ValueError(
            f"target: got {target.name} without a vocabulary, expected one (spiece.model or tokenizer.json)"
        )
    check_lengths("sentence", sentences)
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
