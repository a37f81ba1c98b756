"""Special tokens: those that a text spells out, and those that a tokenizer puts around it."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.files.reading import mismatch_error, quote_value

_FRAMES = "TemplateProcessing, RobertaProcessing, BertProcessing, ByteLevel, or a Sequence with one"
_MOST_AROUND = 1000  # ids before a text, or after it


class Frame(NamedTuple):
    """Ids that are put around every text.

    Attributes:
      before, after: ids before and after it.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def remove_start(ids: Iterable[int], frame: Frame | None) -> list[int]:
    """Returns `ids` without the tokens of a frame that they begin with.

    A model that was trained on framed outputs writes these tokens too.
    """
    rest, before = list(map(int, ids)), frame.before if frame else ()
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(rest, before))
    return rest[len(list(same)) :]


def read_frame(processor: Any, size: int) -> Frame | None:
    """Returns the frame that a tokenizer.json puts around one text, None without one.

    Args:
      processor: contents of its field `post_processor`.
      size: number of ids of the vocabulary.

    Raises:
      ValueError: it does something else, or has an id outside the vocabulary.
    """
    if processor is None:
        return None
    try:
        frame = _find_frame(processor)
    except (AttributeError, KeyError, IndexError, RecursionError, TypeError, ValueError):
        kind = quote_value(processor.get("type") if isinstance(processor, dict) else processor)
        expected = f"tokens before and after one text: {_FRAMES} of them"
        raise mismatch_error("post_processor", f"{kind} that is no frame", expected) from None
    for token in (*frame.before, *frame.after):
        if type(token) is not int or not 0 <= token < size:
            expected = f"ids of the vocabulary, below {size}"
            raise ValueError(f"post_processor: got id {quote_value(token)}, expected {expected}")
    return frame


def _find_frame(processor: dict) -> Frame:
    """Returns the frame of a processor; raises any error of wrong contents if it has none."""
    kind = processor["type"]
    if kind == "ByteLevel":  # moves offsets only
        return Frame()
    if kind in ("RobertaProcessing", "BertProcessing"):
        return Frame((processor["cls"][1],), (processor["sep"][1],))
    if kind == "Sequence":
        frames = [frame for frame in map(_find_frame, processor["processors"]) if any(frame)]
        # After one template the library reads the next as one for pairs.
        (frame,) = frames or [Frame()]
        return frame
    if kind != "TemplateProcessing":
        raise ValueError(kind)
    parts: list[list[int]] = [[]]
    for part in processor["single"]:
        if "SpecialToken" in part:
            parts[-1] += processor["special_tokens"][part["SpecialToken"]["id"]]["ids"]
            if len(parts[-1]) > _MOST_AROUND:  # a name may have any number of ids
                raise ValueError("too many ids")
        else:
            if part["Sequence"]["id"] != "A":
                raise ValueError("a second text")
            parts.append([])
    before, after = parts
    return Frame(tuple(before), tuple(after))


def make_template(
    before: Sequence[str], after: Sequence[str], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the `post_processor` that puts tokens with these ids before and after a text."""
    one, two = (
        [{"SpecialToken": {"id": token, "type_id": 0}} for token in before]
        + [{"Sequence": {"id": text, "type_id": 0}}]
        + [{"SpecialToken": {"id": token, "type_id": 0}} for token in after]
        for text in "AB"
    )
    special = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()}
    return {
        "type": "TemplateProcessing",
        "single": one,
        "pair": one + two,
        "special_tokens": special,
    }


_MOST_TOKENS = 1000  # special tokens beside sentinels; at every "<" of a text each of them is tried


class SpecialTokens:
    """Finds the special tokens that a text spells out."""

    def __init__(self, ids: dict[str, int]):
        """Takes the tokens with their ids; of sentinels there may be thousands.

        Raises:
          ValueError: there are too many other tokens.
        """
        self.ids = ids
        others = [token for token in ids if not token.startswith("<extra_id_")]
        others.sort(key=len, reverse=True)
        if len(others) > _MOST_TOKENS:
            got = f"{len(others):,} special tokens"
            raise ValueError(f"got {got}, expected at most {_MOST_TOKENS:,}")
        self._pattern = re.compile(f"({'|'.join([r'<extra_id_[0-9]+>', *map(re.escape, others)])})")

    def split(self, text: str) -> list[str]:
        """Splits `text` around every special token.

        Even places of the result hold text, perhaps "", odd ones tokens.
        """
        parts = [""]
        for part in self._pattern.split(text):
            if part in self.ids:
                parts += [part, ""]
            else:
                parts[-1] += part
        return parts
