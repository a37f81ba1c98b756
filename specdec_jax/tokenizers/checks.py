"""Checks of a tokenizer's file, which may ask much of the library that reads it.

The library, `tokenizers` for a tokenizer.json and `sentencepiece` for a SentencePiece model, cannot
be interrupted while it works on a text. Regular expressions backtrack: on thirty characters a
nested quantifier can take longer than anyone waits. So only expressions are accepted that take time
in proportion to the text. Steps that make a text longer multiply their growth, and a damaged table
of characters makes the library print a stack trace: both are checked too.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from specdec_jax.files.reading import quote_value

# Regular expressions of published tokenizers that are accepted beyond what `_plain` accepts:
# GPT-2's in two spellings, GPT-4's in two (Llama 3 has the first), Qwen 2's and BLOOM's.
PUBLISHED = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    *(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for digits in (r"\p{N}{1,3}", r"\p{N}")
    ),
}
# The parts of an expression that `_plain` knows: a character or a class of characters, and its
# quantifier.
_CHARACTER = re.compile(
    r"\\[pP]\{\^?\w{1,30}\}|\\[bsSdDwWnrt]|\\[^\w\s]|[^\\\[\](){}*+?|^$]"
    r"|\[\[:\^?\w{1,10}:\]\]|\[\^?(?:\\.|[^\[\]\\&^])(?:\\.|[^\[\]\\&])*\]"
)
_QUANTIFIER = re.compile(r"[?*+]|\{\d{1,2}(?:,\d{0,2})?\}")
_LONGEST_PATTERN = 200
_LONGEST_WORD = 1000
_LONGEST_REPLACEMENT = 1000  # bytes in the place of a character; published tables have at most 33
_MOST_IDS = 10_000_000  # the greatest vocab_size of a model
# Numbers of fields: two of a SentencePiece model, and one of each of these two.
_NORMALIZER, _DENORMALIZER, _TABLE = 3, 5, 2
# The factor by which all steps together may lengthen a text: T5's table of characters allows 33,
# its marks of spaces 3, and every replacement of a letter by a longer one 2 or 3. `check_length`
# checks each text besides.
_MOST_GROWTH = 10**7
_MOST_GROWTH_DECODING = 1000
_MOST_CHARACTERS = 10**8
# The greatest growth that Unicode allows for each of these normalisations.
_COMPOSED = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 3, "Lowercase": 2}


def check_content(content: dict[str, Any]) -> int:
    """Checks that the contents of a tokenizer.json cannot keep the library busy for ever.

    Returns:
      The greatest factor by which its steps may lengthen a text.

    Raises:
      ValueError: they might.
    """
    model, added = content.get("model"), content.get("added_tokens")
    if isinstance(model, dict):
        length, pieces = model.get("max_input_chars_per_word"), model.get("vocab")
        # WordPiece tries all parts of a word.
        if isinstance(length, int) and length > _LONGEST_WORD:
            got = f"max_input_chars_per_word {quote_value(length)}"
            raise ValueError(f"got {got}, expected at most {_LONGEST_WORD}")
        check_ids(pieces.items() if isinstance(pieces, dict) else ())
    tokens = [token for token in added if isinstance(token, dict)] if type(added) is list else []
    check_ids((token.get("content"), token.get("id")) for token in tokens)
    _total_growth([content.get("decoder")], _MOST_GROWTH_DECODING)
    steps = ("normalizer", "pre_tokenizer", "post_processor")
    return _total_growth([content.get(name) for name in steps], _MOST_GROWTH)


def check_length(text: str, growth: int) -> None:
    """Raises ValueError for a text that is too long if it becomes `growth` times as long."""
    if len(text) * growth > _MOST_CHARACTERS:
        raise ValueError(
            f"got a text of {len(text):,} characters, which this tokenizer may make {growth:,} "
            f"times as long, expected at most {_MOST_CHARACTERS // growth:,}"
        )


def _total_growth(nodes: list, most: int) -> int:
    """Returns the factor by which steps, nested in any way, may lengthen a text.

    Raises:
      ValueError: it is above `most`.
    """
    growth = 1
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            growth *= _growth(node)
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
        if growth > most:
            got = f"steps that make a text more than {most:,} times as long"
            raise ValueError(f"got {got}, expected fewer")
    return growth


def check_ids(pieces: Iterable[tuple[Any, Any]]) -> None:
    """Checks the ids of a vocabulary's pieces: a list of all ids must fit into memory.

    Raises:
      ValueError: an id that is too large, below 0 or no integer.
    """
    for piece, i in pieces:
        if type(i) is not int or not 0 <= i < _MOST_IDS:
            got = f"{quote_value(piece)} with id {quote_value(i)}"
            raise ValueError(f"got {got}, expected ids from 0 to {_MOST_IDS - 1:,}")


def _growth(step: dict) -> int:
    """Returns the factor by which a step may lengthen a text.

    Raises:
      ValueError: the step may take too much time.
    """
    pattern = step.get("Regex")
    if isinstance(pattern, str) and pattern not in PUBLISHED:
        if len(pattern) > _LONGEST_PATTERN or not _is_linear(pattern):
            got = f"the regular expression {quote_value(pattern)}, which might take for ever"
            raise ValueError(
                f"got {got}; expected one of a well-known tokenizer, or alternatives in which "
                "nothing follows a repetition"
            )
    # Steps are recognised by their fields, since the library accepts steps without a type.
    if "precompiled_charsmap" in step or step.get("type") == "Precompiled":
        return _longest_replacement(_decode_base64(step.get("precompiled_charsmap")))
    if "pattern" in step and isinstance(step.get("content"), str):
        searched = step["pattern"].get("String") if isinstance(step["pattern"], dict) else None
        shortest = len(searched.encode("utf-8", "replace")) if isinstance(searched, str) else 1
        return max(1, -(-len(step["content"].encode("utf-8", "replace")) // max(1, shortest)))
    if isinstance(kind := step.get("type"), str) and kind in _COMPOSED:
        return _COMPOSED[kind]
    if isinstance(step.get("single"), list):
        return max(1, sum(isinstance(part, dict) and "Sequence" in part for part in step["single"]))
    # A byte becomes a character, or a text gets a space.
    return 2 if step.get("type") == "ByteLevel" or "add_prefix_space" in step else 1


def _is_linear(pattern: str) -> bool:
    """Returns whether an expression surely takes time in proportion to the text.

    It does if each of its alternatives is a sequence of characters and classes of which at most one
    is optional and only the last may repeat: then nothing follows a repetition that could fail and
    make the matcher backtrack. A group around the whole expression is allowed.
    """
    if pattern.startswith("(") and pattern.endswith(")"):
        pattern = pattern[1:-1].removeprefix("?:")
    place, begins, optional, repeated = 0, True, False, False
    while place < len(pattern):
        if pattern[place] == "|":
            place, begins, optional, repeated = place + 1, True, False, False
            continue
        if begins and pattern[place] == "^":
            place, begins = place + 1, False
            continue
        character = _CHARACTER.match(pattern, place)
        if not character or repeated:
            return False
        quantifier = _QUANTIFIER.match(pattern, character.end())
        place, begins = (quantifier or character).end(), False
        if quantifier and quantifier[0] == "?":
            if optional:
                return False
            optional = True
        else:
            repeated = bool(quantifier)
    return True


def _decode_base64(text: Any) -> bytes:
    """Returns the bytes that a text stands for, none for anything else."""
    try:
        return base64.b64decode(text or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        return b""


def check_model(model: bytes) -> None:
    """Checks the tables of characters in the contents of a SentencePiece model.

    Raises:
      ValueError: a table is damaged, or replaces a character by too many bytes.
    """
    for part, specification in _fields(model):
        if part in (_NORMALIZER, _DENORMALIZER):
            for field, table in _fields(specification):
                if field == _TABLE and table:
                    _longest_replacement(table)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields number and contents of each message, string and bytes field of a protocol buffer."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = 0
        for shift in range(0, 70, 7):
            byte = message[place] if place < len(message) else 0
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        return value

    while place < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 2:
            length = varint()
            yield number, message[place : place + length]
            place += length
        elif kind == 0:
            varint()
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            raise ValueError("got no protocol buffer, expected a SentencePiece model")


def _longest_replacement(table: bytes) -> int:
    """Returns the most bytes by which SentencePiece's table replaces a character.

    The table consists of the size of a double array in bytes; the double array, a trie in which the
    child of a node for a byte lies at the node's offset XOR that byte; and the replacements, each
    with a NUL at its end.

    Raises:
      ValueError: the table is damaged, or a replacement is too long.
    """
    size = int.from_bytes(table[:4], "little")
    whole = size % 4 == 0 and 4 + size <= len(table)
    units = np.frombuffer(table[4 : 4 + size] if whole else b"", "<u4")
    texts = table[4 + size :]
    places = np.arange(len(units), dtype=np.int64)
    children = places ^ (units.astype(np.int64) >> 10 << ((units & 0x200) >> 6).astype(np.int64))
    inner, leading = units < 0x80000000, (units & 0x100 > 0) & (units < 0x80000000)
    sound = len(units) > 0 and bool(inner[0] and np.all((children | 0xFF)[inner] < len(units)))
    if sound:  # a node that leads to a replacement has a child with the replacement's place
        starts = units[children[leading]] & 0x7FFFFFFF
        heads = np.frombuffer(texts, np.uint8)
        sound = bool(np.all(starts < len(heads))) and bool(np.all(heads[starts] & 0xC0 != 0x80))
    try:
        texts.decode("utf-8")
    except UnicodeDecodeError:
        sound = False
    if not sound:
        got = f"a precompiled_charsmap of {len(table):,} bytes that is none"
        raise ValueError(f"got {got}, expected SentencePiece's")
    longest = max(1, max(map(len, texts.split(b"\0"))))
    if longest > _LONGEST_REPLACEMENT:
        got = f"a character that becomes {longest:,} bytes"
        raise ValueError(f"got {got}, expected at most {_LONGEST_REPLACEMENT:,}")
    return longest
