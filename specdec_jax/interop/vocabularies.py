"""Compares a model's vocabulary with one of seqio's: the same pieces must have the same ids."""

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

    SentencePiece and `tokenizer.json` are compared piece by piece, bytes with bytes; of
    vocabularies of other kinds only the sizes can be compared. One may have more pieces than the
    other if those are T5's sentinels.
    """
    pieces: Any = getattr(theirs, "tokenizer", None)
    if isinstance(ours, SentencePieceVocabulary | TokenizerJsonVocabulary) and hasattr(
        pieces, "id_to_piece"
    ):
        table = [
            _piece(pieces.id_to_piece(i).replace("▁", " ")) for i in range(pieces.get_piece_size())
        ]
        mine = [_piece(ours.piece(i)) for i in range(ours.size)]
        for number, (their, my) in enumerate(zip(table, mine)):
            if their != my:
                return f"piece {number} is {their!r}, not {my!r}"
        rest = max(table, mine, key=len)[min(len(table), len(mine)) :]
        same = all(_SENTINEL.fullmatch(f" {piece}") for piece in rest)
    elif isinstance(ours, ByteVocabulary) and type(theirs).__name__ == "ByteVocabulary":
        same = True
    else:
        same = theirs.vocab_size == ours.size
    return None if same else f"it has {theirs.vocab_size} pieces, not {ours.size}"


def _piece(piece: str) -> str:
    return piece.lstrip() if _SENTINEL.fullmatch(piece) else piece
