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


_MOST_TOKENS, _MOST_CHARACTERS = 1000, 100_000  # of all special tokens beside sentinels
_SENTINEL = re.compile("<extra_id_[0-9]+>")


class SpecialTokens:
    """Finds the special tokens that a text spells out, in time in proportion to the text.

    It is the machine of Aho and Corasick (1975) for the tokens read backwards: at each character of
    a text that is read backwards, its state gives the longest token that begins there.
    """

    def __init__(self, ids: dict[str, int]):
        """Takes the tokens with their ids; of sentinels there may be thousands.

        Raises:
          ValueError: there are too many other tokens, or too long ones.
        """
        self.ids = {token: i for token, i in ids.items() if token}  # as in transformers
        others = [token for token in self.ids if not token.startswith("<extra_id_")]
        if len(others) > _MOST_TOKENS:
            got = f"{len(others):,} special tokens"
            raise ValueError(f"got {got}, expected at most {_MOST_TOKENS:,}")
        if (count := sum(map(len, others))) > _MOST_CHARACTERS:
            got = f"special tokens of {count:,} characters"
            raise ValueError(f"got {got}, expected at most {_MOST_CHARACTERS:,}")
        first = {"<", *(token[0] for token in others)}
        self._first = re.compile(f"[{re.escape(''.join(first))}]")
        self._add_states(others)

    def _add_states(self, tokens: list[str]) -> None:
        """Adds for each state the next one by character, the one to fall back to, and a length."""
        self._next: list[dict[str, int]] = [{}]
        self._longest = [0]
        for token in tokens:
            state = 0
            for character in reversed(token):
                state = self._next[state].setdefault(character, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self._longest.append(0)
            self._longest[state] = len(token)
        self._fallback = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:
            for character, child in self._next[state].items():
                back = self._step(self._fallback[state], character)
                self._fallback[child] = back
                self._longest[child] = self._longest[child] or self._longest[back]
                queue.append(child)

    def _list_states(self, text: str) -> list[int]:
        """Returns the states after each character of a text that is read backwards."""
        following, fallback, state, states = self._next, self._fallback, 0, []
        for character in reversed(text):  # `_step` inline: a call for each would take twice as long
            while state and character not in following[state]:
                state = fallback[state]
            state = following[state].get(character, 0)
            states.append(state)
        return states

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def split(self, text: str) -> list[str]:
        """Splits `text` around every special token.

        Even places of the result hold text, perhaps "", odd ones tokens.
        """
        if not self._first.search(text):
            return [text]
        lengths = list(map(self._longest.__getitem__, self._list_states(text)))
        lengths.reverse()  # of the token that begins at each character, or 0
        for sentinel in _SENTINEL.finditer(text):
            lengths[sentinel.start()] = len(sentinel[0])
        parts, end, taken = [], 0, 0
        for start in (place for place, length in enumerate(lengths) if length):
            if start < end:
                continue
            end = start + lengths[start]
            if text[start:end] in self.ids:
                parts += [text[taken:start], text[start:end]]
                taken = end
        return [*parts, text[taken:]]
