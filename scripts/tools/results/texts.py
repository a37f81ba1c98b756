"""Reads the texts that `results.py` decodes."""

import collections
import gzip
import itertools
import pathlib
from collections.abc import Iterator, Sequence

from specdec_jax.commands.sentences import read_built_in_sentences
from specdec_jax.models.padding import bucket_length
from tools.results.cases import load_target
from tools.results.stage import Settings, Skipped

TEXTS = ("ende", "wiki_pe", "wikitext2", "scitldr", "dialogsum")
BUILT_IN = "sentences"  # the text of the package, where none of those is there
# The padded length of a quick run's sentences, and how many it looks at.
_PADDED, _SCANNED = 24, 600


def find_text(settings: Settings, name: str, split: str = "test") -> pathlib.Path | None:
    """Returns the file of a text, None if it is not there."""
    for end in (".tsv.gz", ".txt.gz"):
        path = pathlib.Path(settings.data or "") / name / f"{split}{end}"
        if settings.data and path.is_file():
            return path
    return None


def read_texts(settings: Settings, names: Sequence[str], count: int) -> dict[str, list[str]]:
    """Returns the first `count` sources of each text that is there, else the package's.

    A quick run cuts them after fewer words.
    """
    words = settings.choose(60, 20)
    found = {
        name: [source for source, _ in read_pairs(path, count, words)]
        for name in names
        if (path := find_text(settings, name))
    }
    return found or {BUILT_IN: read_built_in_sentences()[:count]}


def read_sentences(
    settings: Settings, names: Sequence[str], count: int, alike: bool = False
) -> dict[str, list[str]]:
    """Returns what `read_texts` does, for ways of decoding that take one sentence at a time.

    Each padded length is compiled for every way. So a quick run cuts all to one, and leaves out
    shorter ones; where they are to be `alike`, those of a text have its most frequent one.
    """
    if not settings.data or not (settings.quick or alike):
        return read_texts(settings, names, count)
    texts = read_texts(settings, names, _SCANNED)
    return {
        name: (
            list(itertools.islice(filter(None, map(_cut_to_length, text)), count))
            if settings.quick
            else _choose_alike(text)[:count]
        )
        for name, text in texts.items()
    }


def _count_padded(source: str) -> int:
    """Returns the padded length of a source's ids."""
    vocabulary = load_target("none").vocabulary
    assert vocabulary is not None
    return bucket_length(len(vocabulary.encode_input(source)))


def _cut_to_length(source: str) -> str | None:
    """Returns the first words of a source, of the padded length of a quick run; None: too few."""
    words = source.split()
    while (length := _count_padded(" ".join(words))) > _PADDED:
        words.pop()
    return " ".join(words) if length == _PADDED else None


def _choose_alike(sources: Sequence[str]) -> list[str]:
    """Returns the sources of the most frequent padded length."""
    lengths = [_count_padded(source) for source in sources]
    ((most, _),) = collections.Counter(lengths).most_common(1)
    return [source for source, length in zip(sources, lengths) if length == most]


def require_pairs(
    settings: Settings, name: str, count: int, split: str = "test", words: int = 60
) -> list[tuple[str, str]]:
    """Returns the first pairs of a text; raises Skipped without it."""
    path = find_text(settings, name, split)
    if path is None:
        raise Skipped(f"needs {name}/{split} in --data")
    return read_pairs(path, count, words)


def read_pairs(path: pathlib.Path, count: int, words: int = 60) -> list[tuple[str, str]]:
    """Returns the first sources of at least 3 words, cut after `words`, with their references."""
    return list(itertools.islice(_iterate_pairs(path, words), count))


def _iterate_pairs(path: pathlib.Path, words: int) -> Iterator[tuple[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            source, _, reference = line.strip().partition("\t")
            source = " ".join(source.split()[:words])
            if len(source.split()) >= 3 and not source.startswith("="):
                yield source, reference
