"""Stop strings and streamed text: what of a row's ids may be shown, so that ids and text always say the same."""

from collections.abc import Sequence

from specdec_jax.vocabularies import Vocabulary

_UNFINISHED = "\ufffd"  # what bytes that are not yet a whole character decode to


def cut(vocabulary: Vocabulary, ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """How many of `ids` come before the first stop string in their text; None where there is none.

    Whole tokens only: of a token that reaches into the stop string nothing is kept, so that text and ids agree.
    """
    text = vocabulary.decode(ids)
    found = [text.find(stop) for stop in stops if stop in text]
    return _tokens_within(vocabulary, ids, text, min(found)) if found else None


def shown(vocabulary: Vocabulary, ids: Sequence[int], stops: Sequence[str]) -> int:
    """How many of `ids` can be shown now whatever follows: no part of a character, nothing that may begin a stop string."""
    text = vocabulary.decode(ids)
    whole = text.rstrip(_UNFINISHED)
    begun = max((_overlap(whole, stop) for stop in stops), default=0)
    return _tokens_within(vocabulary, ids, text, len(whole) - begun)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next(n for n in range(min(len(stop), len(text)), -1, -1) if text.endswith(stop[:n]))


def _tokens_within(vocabulary: Vocabulary, ids: Sequence[int], text: str, end: int) -> int:
    """The most leading ids whose text is a beginning of `text[:end]`."""
    for count in range(len(ids), 0, -1):
        part = vocabulary.decode(ids[:count])
        if len(part) <= end and text.startswith(part):
            return count
    return 0
