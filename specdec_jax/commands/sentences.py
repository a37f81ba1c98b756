"""Reads sentences from arguments, a file or standard input."""

import sys
from collections.abc import Sequence

from specdec_jax.checkpoints import loader
from specdec_jax.files import places
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only
from specdec_jax.tokenizers.vocabularies import check_texts
from specdec_jax.training import text_files

BUILT_IN = "ende/sentences.txt"  # of one padded length, so that few shapes compile


def read_built_in_sentences() -> list[str]:
    """Returns the English sentences that come with the package."""
    return list(text_files.read_lines(loader.BUNDLED / BUILT_IN))


def read_sentences(arguments: Sequence[str], input_file: str | None) -> list[str]:
    """Returns the sentences of a command.

    They are its arguments, or the lines of a file (`BUILT_IN` names the package's own), or, if
    neither is given, the lines of standard input.

    Raises:
      ValueError: two sources, a missing or empty one, or one that is not UTF-8.
    """
    if arguments and input_file:
        raise ValueError(f"got sentences and --input_file={input_file}, expected one of the two")
    if arguments:
        check_texts("sentence", arguments)
        return list(arguments)
    if input_file in (None, "-"):
        if sys.stdin.isatty():
            raise ValueError(
                "got no sentences, expected them as arguments, in --input_file or on standard input"
            )
        sentences = list(text_files.read_open_file(sys.stdin.buffer, "standard input"))
    elif input_file == BUILT_IN and not places.make_path(input_file).exists():
        sentences = read_built_in_sentences()
    else:
        text_files.check_is_file("input_file", input_file)
        sentences = list(text_files.read_lines(input_file))
    if not sentences:
        raise ValueError(
            f"got no lines from {input_file or 'standard input'}, expected at least one sentence"
        )
    return sentences


def check_input_file(path: str | None) -> None:
    """Raises ValueError for an empty name, which would count as none."""
    if path == "":
        raise mismatch_error("input_file", "an empty name", "a file, or not to be given")


def check_any_text(target: LanguageModel, sentences: Sequence[str]) -> None:
    """Raises ValueError where no sentence has any text: an encoder's empty input is not decoded."""
    if not is_decoder_only(target) and not any(text.strip() for text in sentences):
        raise mismatch_error("input_file", "no sentence with any text", "at least one")


def load_sentences(input_file: str | None, limit: int) -> list[str]:
    """Returns the first `limit` lines (0: all) of a file, or of the built-in sentences."""
    return (read_sentences([], input_file) if input_file else read_built_in_sentences())[
        : limit or None
    ]
