"""Decides which ids of a row may be shown, so that ids and text always agree."""

from collections.abc import Sequence

from specdec_jax.tokenizers.vocabularies import Vocabulary

_UNFINISHED = "\ufffd"  # what bytes that are not yet a whole character decode to


def strip_end(vocabulary: Vocabulary, ids: Sequence[int], finish_reason: str) -> Sequence[int]:
    """Returns the ids of a row that make its text, without a special token that ended it.

    An ordinary token, such as a full stop, is text where it ends a row too, as for transformers.
    """
    # Vocabularies of others may lack the method.
    special = getattr(vocabulary, "is_special", lambda token: False)
    return ids[:-1] if finish_reason == "eos" and special(int(ids[-1])) else ids


def find_stop(vocabulary: Vocabulary, ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """Returns how many of `ids` come before the first stop string in their text, None without one.

    The first stop string is the one that ends first, so that it does not matter how many ids were
    decoded past it; of two that end together, the longer one. Only whole tokens are kept: a token
    that reaches into the stop string is dropped, so that text and ids agree.
    """
    text = vocabulary.decode(ids)
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return _tokens_within(vocabulary, ids, text, min(found)[1]) if found else None


def drop_open_bytes(vocabulary: Vocabulary, ids: Sequence[int]) -> Sequence[int]:
    """Returns ids without the byte tokens at their end, whose text the next one may change."""
    is_byte = getattr(vocabulary, "is_byte", lambda token: False)  # others' may lack the method
    return ids[: next((n for n in range(len(ids), 0, -1) if not is_byte(int(ids[n - 1]))), 0)]


def count_visible(vocabulary: Vocabulary, ids: Sequence[int], stops: Sequence[str]) -> int:
    """Returns how many of `ids` can be shown now, whatever follows.

    Parts of a character, and what may begin a stop string, cannot; nor can bytes that the next one
    may change.
    """
    ids = drop_open_bytes(vocabulary, ids)
    text = vocabulary.decode(ids)
    whole = text.rstrip(_UNFINISHED)
    overlap = max((_overlap_length(whole, stop) for stop in stops), default=0)
    return _tokens_within(vocabulary, ids, text, len(whole) - overlap)


def _overlap_length(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`."""
    return next(n for n in range(min(len(stop), len(text)), -1, -1) if text.endswith(stop[:n]))


def _tokens_within(vocabulary: Vocabulary, ids: Sequence[int], text: str, end: int) -> int:
    """Returns the number of leading ids whose text is the longest within `text[:end]`.

    It is the smallest such number, since further ids that add no text may
    be the first bytes of a character that lies past `end`.
    """
    found = None
    for count in range(len(ids), -1, -1):
        part = vocabulary.decode(ids[:count])
        if found is not None and part != found:
            return count + 1
        if found is None and len(part) <= end and text.startswith(part):
            found = part
    return 0
