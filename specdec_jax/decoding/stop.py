"""Stop strings and streamed text: what of a row's ids may be shown, so that ids and text always say the same."""

from collections.abc import Sequence

from specdec_jax.models.vocabularies import Vocabulary

_UNFINISHED = "\ufffd"  # what bytes that are not yet a whole character decode to


def cut(vocabulary: Vocabulary, ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """How many of `ids` come before the first stop string in their text; None where there is none.

    First is the one that ends first, so that it does not matter how many ids were decoded past it; of two that end
    together, the longer one. Whole tokens only: of a token that reaches into the stop string nothing is kept, so that
    text and ids agree.
    """
    text = vocabulary.decode(ids)
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return _tokens_within(vocabulary, ids, text, min(found)[1]) if found else None


def shown(vocabulary: Vocabulary, ids: Sequence[int], stops: Sequence[str]) -> int:
    """How many of `ids` can be shown now whatever follows: no part of a character, nothing that
    may begin a stop string."""
    text = vocabulary.decode(ids)
    whole = text.rstrip(_UNFINISHED)
    begun = max((_overlap(whole, stop) for stop in stops), default=0)
    return _tokens_within(vocabulary, ids, text, len(whole) - begun)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next(n for n in range(min(len(stop), len(text)), -1, -1) if text.endswith(stop[:n]))


def _tokens_within(vocabulary: Vocabulary, ids: Sequence[int], text: str, end: int) -> int:
    """The fewest leading ids that give the longest beginning of `text[:end]` that whole tokens give.

    The fewest, since ids past it that add no text may be the first bytes of a character that lies past `end`.
    """
    found = None
    for count in range(len(ids), -1, -1):
        part = vocabulary.decode(ids[:count])
        if found is not None and part != found:
            return count + 1
        if found is None and len(part) <= end and text.startswith(part):
            found = part
    return 0
