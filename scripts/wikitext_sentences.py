"""Writes the sentences of WikiText with normal punctuation: sources for `specdec distill`.

    python scripts/wikitext_sentences.py --input_file=wikitext2/train.txt.gz \
        --output_file=wikitext.txt.gz --exclude=ende/validation.tsv.gz,ende/test.tsv.gz

WikiText has one paragraph a line, with punctuation separated from words and rare words replaced by
<unk>. The output has one sentence a line, with punctuation joined to words again. Headings,
sentences with <unk>, and those of fewer than 4 or more than 45 words are left out, and so are
sources of the excluded files, whatever their case and punctuation. The rules are simple: a sentence
is also cut after an initial or "St.", a quotation mark may go to the sentence after its own, and
names like O 'Neill stay apart. That affects some 6 % of WikiText-2's sentences. The bundled drafter
was trained on exactly these.
"""

import gzip
import pathlib
import re
from collections.abc import Iterable

from absl import app, flags

from specdec_jax.files.writing import write_file
from specdec_jax.training import text_files

_INPUT = flags.DEFINE_string(
    "input_file", None, "WikiText, one paragraph a line, gzip or not.", required=True
)
_OUTPUT = flags.DEFINE_string(
    "output_file", None, "File to write; gzip if its name ends in .gz.", required=True
)
_EXCLUDE = flags.DEFINE_list(
    "exclude", [], "TSV files whose sources (the text before the tab) must not appear."
)

_SHORTEST, _LONGEST = 4, 45  # words, punctuation among them
_BOUNDARY = re.compile(r'(?<=[.!?]) (?=[A-Z"])')
# In this order: joints inside words and numbers, closing and opening marks, endings that begin with
# an apostrophe, quotations, ranges.
_JOINED = tuple(
    (re.compile(pattern), joined)
    for pattern, joined in (
        (r" @([-,.])@ ", r"\1"),
        (r" ([,.;:!?%)\]])", r"\1"),
        (r"([(\[$£]) ", r"\1"),
        (r" '(s|re|ve|ll|d|m|t)\b", r"'\1"),
        (r" n't", "n't"),
        (r'" ([^"]*?) "', r'"\1"'),
        (r"(\w) ' ", r"\1' "),
        (r" – (?=\d)", "–"),
    )
)


def as_written(sentence: str) -> str:
    """Returns a tokenised sentence with its punctuation joined to its words."""
    for pattern, joined in _JOINED:
        sentence = pattern.sub(joined, sentence)
    return sentence


def normalize(sentence: str) -> str:
    """Returns the words of a sentence in lower case, without punctuation."""
    return re.sub(r"\W+", " ", sentence.lower()).strip()


def sentences(lines: Iterable[str], excluded: set[str]) -> list[str]:
    """Returns the sentences of WikiText's lines but for the `excluded`, which are normalized."""
    found = []
    for line in lines:
        if line.strip().startswith("="):
            continue
        for sentence in _BOUNDARY.split(line.strip()):
            if "<unk>" in sentence or not _SHORTEST <= len(sentence.split()) <= _LONGEST:
                continue
            sentence = as_written(sentence)
            if normalize(sentence) not in excluded:
                found.append(sentence)
    return found


def main(_: list[str]) -> None:
    excluded = {
        normalize(line.partition("\t")[0])
        for path in _EXCLUDE.value
        for line in text_files.read_lines(path)
    }
    found = sentences(text_files.read_lines(_INPUT.value), excluded)
    text = "".join(f"{sentence}\n" for sentence in found).encode()
    path = pathlib.Path(_OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    print(f"{len(found)} sentences")


if __name__ == "__main__":
    app.run(main)
