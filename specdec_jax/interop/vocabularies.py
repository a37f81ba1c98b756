"""Compares a model's vocabulary with one of seqio's: the same tokens must have the same ids."""

import re
from typing import Any

from specdec_jax.tokenizers.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
)

_SENTINEL = re.compile(r" <extra_id_\d+>")  # seqio's begin with a space


def find_difference(ours: Vocabulary, theirs: Any) -> str | None:
    """Returns how a model's vocabulary differs from a `seqio.Vocabulary`, or None.

    SentencePiece and `tokenizer.json` are compared token by token, bytes with bytes; of
    vocabularies of other kinds only the sizes can be compared. One may have more tokens than the
    other if those are T5's sentinels.
    """
    tokenizer: Any = getattr(theirs, "tokenizer", None)
    if isinstance(ours, SentencePieceVocabulary | TokenizerJsonVocabulary) and hasattr(
        tokenizer, "id_to_piece"
    ):
        table = [
            _trim(tokenizer.id_to_piece(i).replace("▁", " "))
            for i in range(tokenizer.get_piece_size())
        ]
        mine = [_trim(ours.piece(i)) for i in range(ours.size)]
        for number, (their, my) in enumerate(zip(table, mine)):
            if their != my:
                return f"token {number} is {their!r}, not {my!r}"
        rest = max(table, mine, key=len)[min(len(table), len(mine)) :]
        same = all(_SENTINEL.fullmatch(f" {piece}") for piece in rest)
    elif isinstance(ours, ByteVocabulary) and type(theirs).__name__ == "ByteVocabulary":
        same = True
    else:
        same = theirs.vocab_size == ours.size
    return None if same else f"it has {theirs.vocab_size} tokens, not {ours.size}"


def _trim(token: str) -> str:
    return token.lstrip() if _SENTINEL.fullmatch(token) else token
