"""The vocabulary of Marian and fairseq: SentencePiece cuts texts, and a table has the ids.

Marian, M2M-100, mBART, NLLB and Pegasus have it.
"""

import base64
import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specdec_jax.files import reading
from specdec_jax.files.reading import PathLike, mismatch_error, quote_value
from specdec_jax.tokenizers import checks
from specdec_jax.tokenizers.languages import Languages
from specdec_jax.tokenizers.special_tokens import SpecialTokens
from specdec_jax.tokenizers.vocabularies import (
    SURROGATE,
    TOKENIZER_BYTES,
    SentencePieceVocabulary,
    Vocabulary,
)

_NAMES = ("eos_token", "unk_token", "pad_token")
# What a decoded text has after an unknown token; None: the space that the next piece begins with.
_AFTER_UNKNOWN = (" ", "", None)
_CODE = re.compile(r">>.*?<<", re.DOTALL)
# A table of all pieces beside the models of both languages, which are in base64.
_MOST_BYTES = 3 * TOKENIZER_BYTES


class PieceTableVocabulary(Vocabulary):
    """A SentencePiece model cuts texts into pieces, and a table has their ids.

    Pieces that the table lacks are unknown. Inputs end with EOS. With Marian's language codes, such
    as `>>deu<<`, a code at the beginning of a text is one piece.

    Inputs and outputs may have a model each, and a table each: then an id means one piece in an
    input and another in an output. `piece`, `decode` and `size` are of outputs.
    """

    def __init__(self, text: str):
        """Reads a vocabulary.

        Args:
          text: a JSON object, whose fields are the arguments of `make`; models are in base64, and
            `languages` is as `Languages.written` has it.

        Raises:
          ValueError: a field is missing or unsound.
        """
        self.text, content = text, reading.parse_json(text)
        self._ids = _read_table("pieces", content.get("pieces"))
        own = content.get("target_pieces")
        self.shares_ids = own is None
        self._target_ids = self._ids if own is None else _read_table("target_pieces", own)
        self._pieces = {i: piece for piece, i in self._target_ids.items()}
        self.size = max(self._pieces) + 1
        tokens = {name: _read_token(name, content.get(name), self._ids) for name in _NAMES}
        self._unknown = tokens["unk_token"]
        names = tokens
        if own is not None:
            with _name_part("target_pieces"):
                names = {name: _read_token(name, tokens[name], self._target_ids) for name in tokens}
        self._names = {name: self._target_ids[token] for name, token in names.items()}
        if self._ids[tokens["eos_token"]] != self._names["eos_token"]:
            raise ValueError("got two ids of eos_token, expected one for inputs and outputs")
        self._source = _read_model("source_spm", content.get("source_spm"))
        other = content.get("target_spm")
        self._target = self._source if other is None else _read_model("target_spm", other)
        special = content.get("special", [])
        if not isinstance(special, list):
            raise ValueError(f"got special {quote_value(special)}, expected a list of pieces")
        special = [_read_token("special", token, self._ids) for token in special]
        # Only where there are two tables does transformers join pieces by the second model.
        self._joined = self._source if self.shares_ids else self._target
        self._special = SpecialTokens({one: self._ids[one] for one in (*tokens.values(), *special)})
        self._after = content.get("after_unknown")
        if self._after not in _AFTER_UNKNOWN:
            raise mismatch_error("after_unknown", quote_value(self._after), "' ', '' or null")
        self._codes = content.get("marian_codes") is True
        self.eos_ids = (self._names["eos_token"],)
        self.pad_id = self._ids[tokens["pad_token"]]
        self._breaks = {
            self._target_ids[token]
            for token in (tokens["unk_token"], *special)
            if token in self._target_ids
        }
        self._dropped = {self._names["eos_token"], self._names["pad_token"]}
        if (languages := content.get("languages")) is not None:
            self.languages = Languages.read(languages, max(self._ids.values()) + 1)
            self._set_frame()
            if self.languages.target != "input":
                self._dropped |= set(self.languages.codes.values())

    @classmethod
    def make(
        cls,
        pieces: Mapping[str, int],
        source_spm: bytes,
        *,
        target_pieces: Mapping[str, int] | None = None,
        target_spm: bytes | None = None,
        special: Iterable[str] = (),
        after_unknown: str | None = None,
        marian_codes: bool = False,
        languages: Languages | None = None,
        **names: str,
    ) -> "PieceTableVocabulary":
        """Makes a vocabulary of its parts.

        Args:
          pieces: id of each piece.
          source_spm: SentencePiece model that cuts inputs.
          target_pieces: ids of the pieces of outputs; None: `pieces`.
          target_spm: the model of outputs; None: `source_spm`.
          special: pieces that a text may spell out, beside those of `names`.
          after_unknown: what a decoded text has after an unknown token: " ", "", or None, the space
            that the next piece begins with.
          marian_codes: whether a text may begin with a code such as `>>deu<<`.
          languages: the languages, or None.
          names: `eos_token`, `unk_token`, `pad_token`.
        """
        content: dict[str, Any] = {"pieces": dict(pieces)}
        for name, model in (("source_spm", source_spm), ("target_spm", target_spm)):
            content[name] = None if model is None else base64.b64encode(model).decode()
        content |= {"target_pieces": target_pieces, "special": list(special)}
        content |= {"after_unknown": after_unknown, "marian_codes": marian_codes, **names}
        content["languages"] = None if languages is None else languages.written()
        return cls(json.dumps(content, ensure_ascii=False))

    @classmethod
    def load(cls, path: PathLike) -> "PieceTableVocabulary":
        """Reads a file; errors as for the class."""
        text = reading.read_text(path, _MOST_BYTES)
        try:
            return cls(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        return self._encode(text, self._source, self._ids)

    def encode_target(self, text: str) -> list[int]:
        return self._encode(text, self._target, self._target_ids)

    def _encode(self, text: str, model: SentencePieceVocabulary, table: dict[str, int]) -> list:
        ids: list[int] = []
        for i, part in enumerate(self._special.split(text)):
            names = [part]
            if i % 2 == 0:
                code = _CODE.match(part) if self._codes else None
                start = code.end() if code else 0
                names = [part[:start]] * bool(code) + model.cut(part[start:])
            ids += [table.get(name, table[self._unknown]) for name in names]
        return ids

    def encode_input(self, text: str) -> list[int]:
        # A code that the text begins with counts before the one that a caller gave.
        if self._codes and self.frame and _CODE.match(text):
            return [*self.encode(text), *self.frame.after]
        languages = self.languages
        if self._codes and languages and len(languages.codes) > 1:
            if not (self.frame and self.frame.before):
                got = f"none for {quote_value(text)}, which begins with no code such as >>xx<<"
                raise mismatch_error("target_language", got, languages.listed())
        return super().encode_input(text)

    def decode(self, ids: Iterable[int]) -> str:
        text, run, end = "", [], None
        for token in [*map(int, ids), end]:
            if token is not None and (token in self._dropped or token not in self._pieces):
                continue
            if token is not None and token not in self._breaks:
                run.append(self._pieces[token])
                continue
            if run:
                space = self._after is None and text and run[0].startswith("▁")
                text += " " * bool(space) + self._joined.join(run)
            if token is not None:
                text += self._pieces[token] + (self._after or "")
            run = []
        return text.replace("▁", " ").strip()

    def is_special(self, token: int) -> bool:
        return token in self._dropped | self._breaks or token not in self._pieces

    def piece(self, token: int) -> str:
        return self._pieces.get(token, f"<{token}>").replace("▁", " ")

    def special_ids(self) -> dict[str, int]:
        return dict(self._names)

    def fingerprint(self) -> str:
        return super().fingerprint() if self.shares_ids else self._both_digest

    @functools.cached_property
    def _both_digest(self) -> str:
        text = json.dumps([super().fingerprint(), sorted(self._ids.items())])
        return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def _name_part(name: str) -> Iterator[None]:
    """Puts the name of a part before the messages of errors; that of `pieces` is not needed."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name != "pieces" else str(error)) from None


def _read_table(name: str, pieces: Any) -> dict[str, int]:
    """Returns the ids of pieces; raises ValueError for anything else."""
    with _name_part(name):
        if not isinstance(pieces, dict) or not pieces:
            raise ValueError(f"got {quote_value(pieces)}, expected an object of pieces with ids")
        checks.check_ids(pieces.items())
        if lone := next(filter(SURROGATE.search, pieces), None):
            raise ValueError(f"got the piece {quote_value(lone)}, expected UTF-8 text")
    return pieces


def _read_token(name: str, token: Any, table: Mapping[str, int]) -> str:
    """Returns a token; raises ValueError if it is no piece of a table."""
    if not isinstance(token, str) or token not in table:
        got = f"{name} {quote_value(token)}"
        raise ValueError(f"got {got}, expected a piece of the vocabulary")
    return token


def _read_model(name: str, text: Any) -> SentencePieceVocabulary:
    """Returns a SentencePiece model from base64; raises ValueError for anything else."""
    with _name_part(name):
        try:
            model = base64.b64decode(str(text))
        except ValueError as error:
            raise ValueError(f"got no base64 ({error}), expected a SentencePiece model") from None
        return SentencePieceVocabulary(model, needs_eos=False)
