"""Vocabularies: SentencePiece, bytes (ByT5) and Hugging Face's `tokenizer.json`."""

import abc
import copy
import functools
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from specdec_jax.files import reading
from specdec_jax.files.reading import PathLike, mismatch_error, quote_value
from specdec_jax.tokenizers import checks, special_tokens
from specdec_jax.tokenizers.languages import Languages
from specdec_jax.tokenizers.special_tokens import Frame, SpecialTokens

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2  # T5's ids
_MOST_SENTINELS = 10_000
TOKENIZER_BYTES = 48 << 20  # the most bytes of a vocabulary's file; Gemma 3's has some 33 MB
# The most characters of a text, some 300 pages: if it grows to thirty times as many, its ids take
# half a gigabyte.
LONGEST_TEXT = 1_000_000
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which is no text


def check_texts(name: str, texts: Iterable[str | None], first: int = 1) -> None:
    """Checks that every text can be encoded; None stands for no text.

    Raises:
      ValueError: a text is too long, or has half a surrogate pair (as JSON's escapes and arguments
      that are not UTF-8 give it); the message has `name` and the text's number, counted from
      `first`.
    """
    for number, text in enumerate(texts, first):
        if text is None:
            continue
        if len(text) > LONGEST_TEXT:
            got = f"a text of {len(text):,} characters"
            raise ValueError(f"{name} {number}: got {got}, expected at most {LONGEST_TEXT:,}")
        if lone := SURROGATE.search(text):
            reason = f"character {lone.start()} is half of a surrogate pair"
            got = f"{quote_value(text)}, which is not UTF-8 ({reason})"
            raise ValueError(f"{name} {number}: got {got}, expected UTF-8 text")


def count_sentinels(pieces: int, logits: int | None) -> int:
    """Returns how many sentinels follow a SentencePiece model's pieces if no file gives the number.

    They are T5's 100, or none if the model has too few logits for them, as mT5, whose pieces
    include its sentinels.
    """
    return 100 if logits is None or logits - pieces >= 100 else 0


def check_extra_ids(extra_ids: Any, path: PathLike) -> int:
    """Returns the number of sentinels that a file gives, checked; raises ValueError for others."""
    if type(extra_ids) is not int or not 0 <= extra_ids <= _MOST_SENTINELS:
        expected = f"an integer from 0 to {_MOST_SENTINELS:,}"
        raise ValueError(f"{path}: extra_ids: got {quote_value(extra_ids)}, expected {expected}")
    return extra_ids


class Vocabulary(abc.ABC):
    """The base class of vocabularies, which map text to ids and back.

    Attributes:
      size: number of ids; the network's logits may be wider (padding).
      eos_ids: ids that end a text.
      frame: the ids that the tokenizer's files put before and after a text; None if the files do
        not say: then the first EOS id is put after an encoder's input, as for every T5.
      pad_id: id that pads inputs; None if there is none.
      given_pad_id: the same where the model's configuration gives it and the vocabulary's file does
        not (MADLAD-400); else None.
      languages: the languages of a multilingual model; None: it has none.
      shares_ids: whether an id is the same piece in an input as in an output.
    """

    size: int
    eos_ids: tuple[int, ...] = (EOS_ID,)
    frame: Frame | None = None
    pad_id: int | None = PAD_ID
    given_pad_id: int | None = None
    languages: Languages | None = None
    shares_ids: bool = True
    _dropped: AbstractSet[int] = frozenset()  # ids without text
    _lacks_source = False  # whether inputs need a language that nobody has given
    _output_start: tuple[int, ...] | None = None  # None: what the frame puts before a text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size:,} ids)"

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` alone: neither a frame nor an EOS."""

    def encode_input(self, text: str) -> list[int]:
        """Returns the ids of an encoder's input: `text` in its frame.

        Raises:
          ValueError: inputs need a language, which neither the files nor `with_languages` give.
        """
        if self._lacks_source and self.languages:
            raise mismatch_error("source_language", "none", self.languages.listed())
        before, after = self.frame or ((), self.eos_ids[:1])
        return [*before, *self.encode(text), *after]

    def set_pad_id(self, pad_id: int) -> None:
        """Sets the id that pads inputs, of a vocabulary whose file has none; it has no text."""
        self.pad_id = self.given_pad_id = pad_id
        self._dropped = {*self._dropped, pad_id}

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a decoder-only model's prompt: `text` in the frame that files give."""
        before, after = self.frame or ((), ())
        return [*before, *self.encode(text), *after]

    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of a text of the output, which may have a tokenizer of its own."""
        return self.encode(text)

    def encode_output(self, text: str, start_token: int | None = None) -> list[int]:
        """Returns the ids of an output: `text` with what stands before it, and EOS.

        Where this is the `start_token`, with which the decoder begins, it is not repeated.
        """
        start = self._output_start
        if start is None:
            before = tuple((self.frame or Frame()).before)
            start = () if before == (start_token,) else before
        return [*start, *self.encode_target(text), *self.eos_ids[:1]]

    def encode_continuation(self, text: str) -> list[int]:
        """Returns the ids of what follows a prompt: `text` and EOS."""
        return [*self.encode(text), *self.eos_ids[:1]]

    def with_languages(
        self, source_language: str | None = None, target_language: str | None = None
    ) -> "Vocabulary":
        """Returns the vocabulary whose inputs and outputs are in these languages.

        Only what stands around a text differs. None leaves a language as the files give it.

        Raises:
          ValueError: an unknown code, or a vocabulary without languages.
        """
        given = {"source_language": source_language, "target_language": target_language}
        if self.languages is None:
            for name, code in given.items():
                if code is not None:
                    expected = "none: the model's tokenizer has no languages"
                    raise mismatch_error(name, quote_value(code), expected)
            return self
        made = copy.copy(self)
        made._set_frame(*given.values())
        return made

    def _set_frame(self, source: str | None = None, target: str | None = None) -> None:
        """Sets what stands around texts in these languages."""
        assert self.languages is not None
        self.frame = self.languages.make_frame(source, target, self.eos_ids[0])
        self._lacks_source = self.languages.needs_source(source)
        self._output_start = self.languages.start_output(target)

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`.

        Padding, the first EOS id and ids past the vocabulary are dropped; other EOS ids and
        sentinels are kept.
        """

    @abc.abstractmethod
    def piece(self, token: int) -> str:
        """Returns the surface form of one id, with a leading space where it begins a word."""

    def special_ids(self) -> dict[str, int]:
        """Returns the ids of `eos_token`, `pad_token` and `unk_token`, as far as there are any."""
        return {"eos_token": self.eos_ids[0]}

    def is_special(self, token: int) -> bool:
        """Returns whether a token is no text: padding, EOS, unknown, control or sentinel."""
        return token == self.pad_id or token in self.eos_ids[:1]

    def is_byte(self, token: int) -> bool:
        """Returns whether a token is a byte whose text depends on the bytes after it.

        Not of a character alone: some tokenizers take a whole run of bytes for no text if one of
        them is none.
        """
        return False

    def fingerprint(self) -> str:
        """Returns a digest, equal for two vocabularies iff they map every id to the same piece.

        By it a drafter with another vocabulary than the target's is rejected.
        """
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        """The fingerprint, cached: every call of `generate` compares two, and mT5's takes long."""
        pieces = json.dumps([self.piece(i) for i in range(self.size)])
        return hashlib.sha256(pieces.encode()).hexdigest()


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model, with T5's `extra_ids` sentinels.

    Sentinels are numbered from the top: `<extra_id_0>` is the last id. Padding and EOS have the ids
    that the model gives them.

    Text around a sentinel is encoded as if it stood alone, so that the piece after a sentinel
    begins a word, as in Hugging Face's T5 tokenisers. seqio agrees where a sentinel begins a word
    and is followed by a space.
    """

    def __init__(self, model: bytes, extra_ids: int = 0, needs_eos: bool = True):
        """Reads a SentencePiece model.

        Args:
          model: contents of its file.
          extra_ids: number of sentinels, whose ids follow those of its pieces.
          needs_eos: whether a model without an end-of-sequence piece is rejected.

        Raises:
          ValueError: `model` is no SentencePiece model, has no end-of-sequence piece, or would make
          a text much longer.
        """
        import sentencepiece

        checks.check_model(model)
        self.model = model
        self.extra_ids = extra_ids
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            # Of an empty model, the library prints a line.
            self._pieces = self._processor.get_piece_size() if model else 0
            if self._pieces:  # raises if a piece is not UTF-8
                self._processor.id_to_piece(list(range(self._pieces)))
        except (RuntimeError, UnicodeDecodeError):
            self._pieces = 0
        if not self._pieces:
            got = f"{len(model)} bytes that are no SentencePiece model"
            raise ValueError(f"got {got}, expected one")
        eos = self._processor.eos_id()
        if eos < 0 and needs_eos:
            got = "a SentencePiece model without an end-of-sequence piece"
            raise ValueError(f"got {got}, expected one")
        self.eos_ids = (eos,)
        pad = self._processor.pad_id()
        self.pad_id = pad if pad >= 0 else None
        self._dropped = {eos, pad}
        self.size = self._pieces + extra_ids
        control = np.flatnonzero(self._processor.is_control(list(range(self._pieces)))).tolist()
        special = {self._processor.id_to_piece(i): i for i in (*control, self._processor.unk_id())}
        special.pop("", None)
        sentinels = {f"<extra_id_{i}>": self.size - 1 - i for i in range(extra_ids)}
        self._special = SpecialTokens(special | sentinels)

    @classmethod
    def load(cls, path: PathLike, extra_ids: int = 0) -> "SentencePieceVocabulary":
        """Reads the model in a file; arguments and errors as for the class."""
        model = reading.read_bytes(path, TOKENIZER_BYTES)
        try:
            return cls(model, extra_ids)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def train(
        cls, texts: Iterable[str], size: int, seed_size: int = 1_000_000
    ) -> "SentencePieceVocabulary":
        """Trains a unigram vocabulary of `size` pieces on `texts`, with T5's first three ids."""
        import sentencepiece

        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=out,
            vocab_size=size,
            model_type="unigram",
            character_coverage=0.9999,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            byte_fallback=False,
            seed_sentencepiece_size=seed_size,
            minloglevel=2,
        )
        return cls(out.getvalue())

    def encode(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(self._special.split(text)):
            ids += [self._special.ids[part]] if i % 2 else self._processor.encode(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text, run = "", []
        for token in [*map(int, ids), None]:
            if token in self._dropped or (token is not None and not 0 <= token < self.size):
                continue
            if token is not None and token < self._pieces:
                run.append(token)
                continue
            if run:
                # The processor strips a first piece's space, which after a sentinel is text.
                space = " " if text and self.piece(run[0]).startswith(" ") else ""
                text, run = text + space + self._processor.decode(run), []
            if token is not None:
                text += (" " if text else "") + self.piece(token)
        return text

    def cut(self, text: str) -> list[str]:
        """Returns the pieces of a text."""
        return self._processor.encode(text, out_type=str)

    def join(self, pieces: list[str]) -> str:
        """Returns the text of pieces, which the model need not have."""
        return self._processor.decode_pieces(pieces)

    def is_special(self, token: int) -> bool:
        if not 0 <= token < self._pieces:
            return True
        return self._processor.is_control(token) or self._processor.is_unknown(token)

    def list_pieces(self) -> list[str]:
        """Returns the pieces of the model by id, with its own sign for a space."""
        return self._processor.id_to_piece(list(range(self._pieces)))

    def piece(self, token: int) -> str:
        if not 0 <= token < self.size:
            return f"<{token}>"
        if token >= self._pieces:
            return f"<extra_id_{self.size - 1 - token}>"
        return self._processor.id_to_piece(token).replace("▁", " ")

    def special_ids(self) -> dict[str, int]:
        model = self._processor
        pad_id = -1 if self.pad_id is None else self.pad_id
        ids = {"eos_token": self.eos_ids[0], "pad_token": pad_id}
        ids["unk_token"] = model.unk_id()
        return {name: i for name, i in ids.items() if i >= 0}


class ByteVocabulary(Vocabulary):
    """ByT5's vocabulary: UTF-8 bytes + 3, then sentinels.

    `<extra_id_0>` is the first of the sentinels, as in Hugging Face.
    """

    OFFSET = 3  # padding, EOS, unknown

    def __init__(self, extra_ids: int = 125, strips: bool = True):
        """Makes a vocabulary with so many sentinels.

        `strips`: whether the spaces around the first three tokens, if a text spells them out,
        belong to them.
        """
        self.extra_ids, self.strips = extra_ids, strips
        self._first_sentinel = self.OFFSET + 256
        self.size = self._first_sentinel + extra_ids
        sentinels = {f"<extra_id_{i}>": self._first_sentinel + i for i in range(extra_ids)}
        self._special = SpecialTokens({self.piece(i): i for i in range(self.OFFSET)} | sentinels)

    def encode(self, text: str) -> list[int]:
        parts = self._special.split(text)
        for i in range(1, len(parts), 2):
            if self.strips and self._special.ids[parts[i]] < self.OFFSET:
                parts[i - 1], parts[i + 1] = parts[i - 1].rstrip(), parts[i + 1].lstrip()
        ids: list[int] = []
        for i, part in enumerate(parts):
            encoded = [byte + self.OFFSET for byte in part.encode("utf-8")]
            ids += [self._special.ids[part]] if i % 2 else encoded
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        out = b""
        for token in map(int, ids):
            if self.OFFSET <= token < self._first_sentinel:
                out += bytes([token - self.OFFSET])
            elif self._first_sentinel <= token < self.size:
                out += self.piece(token).encode()
        return out.decode("utf-8", errors="ignore")

    def is_special(self, token: int) -> bool:
        return not self.OFFSET <= token < self._first_sentinel

    def piece(self, token: int) -> str:
        if token < self.OFFSET:
            return ("<pad>", "</s>", "<unk>")[token]
        if token < self._first_sentinel:
            byte = token - self.OFFSET
            return chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>"
        return f"<extra_id_{token - self._first_sentinel}>" if token < self.size else f"<{token}>"

    def special_ids(self) -> dict[str, int]:
        return {"eos_token": EOS_ID, "pad_token": PAD_ID, "unk_token": UNK_ID}


class TokenizerJsonVocabulary(Vocabulary):
    """The vocabulary of a Hugging Face `tokenizer.json`, read by the `tokenizers` library."""

    def __init__(
        self,
        text: str,
        eos_ids: tuple[int, ...] | None = None,
        *,
        eos_token: str | None = None,
        stop_ids: tuple[int, ...] = (),
        around: tuple[Sequence[str], Sequence[str]] | None = None,
        added: Sequence[dict[str, Any]] = (),
        add_prefix_space: bool | None = None,
    ):
        """Reads a tokenizer, and looks for the EOS id unless `eos_ids` are given.

        Args:
          text: contents of a `tokenizer.json`.
          eos_ids: the attribute; None: the id that the frame puts after a text, if it is one, else
            the id of `eos_token`, else that of `</s>`, if there is any, and then `stop_ids`. Beside
            these, a `</s>` that is neither one of them nor special is the tag of HTML.
          eos_token: surface form of EOS, as the tokenizer's other files give it; None: they do not.
          stop_ids: ids at which the model stops, which the tokenizer need not have.
          around: tokens before and after a text, as the tokenizer's other files give them; None:
            the file's own.
          added: tokens that the tokenizer's other files add, as `describe_added` returns them.
          add_prefix_space: whether a byte-level tokenizer puts a space before a text, as its class
            and other files say; None: as the file says.

        Raises:
          ValueError: `text` is no tokenizer, what it puts around a text is no frame, an added token
            has another id than the next, or no end-of-sequence token is found.
        """
        import tokenizers

        content = reading.parse_json(text)
        self._growth = checks.check_content(content)
        step = content.get("pre_tokenizer")
        if isinstance(step, dict) and step.get("type") == "ByteLevel":
            if add_prefix_space not in (None, step.get("add_prefix_space")):
                step["add_prefix_space"] = add_prefix_space
                text = json.dumps(content, ensure_ascii=False)
        self.text = text
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            got = f"no readable tokenizer.json ({reading.error_reason(error)})"
            raise ValueError(f"got {got}, expected one") from None
        # A saved tokenizer may carry the truncation and padding of the program that saved it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_tokens(content, added)
        self._tokenizer.post_processor = None  # it is read, not run: for some contents it panics
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._check_encodes()
        try:
            self.frame = special_tokens.read_frame(content.get("post_processor"), self.size)
        except ValueError:
            if around is None:
                raise
        if around is not None:
            self.reframe(*around)
        if eos_ids is None:
            after = self.frame.after if self.frame else ()
            named = None if eos_token is None else self._tokenizer.token_to_id(eos_token)
            usual = self._tokenizer.token_to_id("</s>")
            if stop_ids and usual not in (*stop_ids, *self.special_pieces().values()):
                usual = None
            ends = (*after[: len(after) == 1], named, usual)
            end = next((i for i in ends if i is not None), None)
            eos_ids = tuple(dict.fromkeys(stop_ids if end is None else (end, *stop_ids)))
        if not isinstance(eos_ids, list | tuple) or not all(isinstance(i, int) for i in eos_ids):
            raise mismatch_error("eos_ids", quote_value(eos_ids), "ids")
        if not eos_ids:
            got = f"a tokenizer.json without {quote_value(eos_token or '</s>')}"
            raise ValueError(f"got {got}, expected it or eos_ids")
        self.eos_ids = tuple(eos_ids)
        self.pad_id = self._tokenizer.token_to_id("<pad>")
        # Further EOS ids may be ordinary tokens, such as a full stop.
        self._dropped = {i for i in (self.eos_ids[0], self.pad_id) if i is not None}
        self._special_ids = set(self.special_pieces().values())
        model = content.get("model")
        self.has_merges = isinstance(model, dict) and "merges" in model
        runs = "ByteFallback" in json.dumps(content.get("decoder"))
        pieces = [f"<0x{byte:02X}>" for byte in range(256 if runs else 0)]
        self._bytes = frozenset(map(self._tokenizer.token_to_id, pieces))

    def _add_tokens(self, content: dict, added: Sequence[dict[str, Any]]) -> None:
        """Adds tokens as transformers does, behind all ids, and writes them into `text`."""
        import tokenizers

        known = _read_added(self._tokenizer)
        texts = {token["content"] for token in known}
        left = [token for token in added if token["replaces"] or token["content"] not in texts]
        new = [it for it in left if self._tokenizer.token_to_id(it["content"]) is None]
        arguments = [{n: it[n] for n in it if n not in ("id", "replaces")} for it in left]
        self._tokenizer.add_tokens([tokenizers.AddedToken(**given) for given in arguments])
        for token in new:
            text, i = token["content"], token["id"]
            if i not in (None, found := self._tokenizer.token_to_id(text)):
                got = f"the added token {quote_value(text)} with id {i}"
                raise ValueError(f"got {got}, expected {found}, the next id")
        if (tokens := _read_added(self._tokenizer)) != known:
            self.text = json.dumps(content | {"added_tokens": tokens}, ensure_ascii=False)

    def special_pieces(self) -> dict[str, int]:
        """Returns the ids of the special tokens that the file adds, by their text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def set_languages(self, languages: Languages) -> None:
        """Sets the languages, and the frame of the default one; decoded text omits their tokens."""
        self.languages = languages
        self._set_frame()
        self._dropped |= set(languages.codes.values())

    @classmethod
    def load(
        cls, path: PathLike, eos_ids: tuple[int, ...] | None = None, **options: Any
    ) -> "TokenizerJsonVocabulary":
        """Reads a file; arguments and errors as for the class."""
        text = reading.read_text(path, TOKENIZER_BYTES)
        try:
            return cls(text, eos_ids, **options)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _check_encodes(self) -> None:
        try:
            self._tokenizer.encode("a")
        except Exception as error:  # as above
            got = f"a tokenizer.json that cannot encode ({reading.error_reason(error)})"
            raise ValueError(f"got {got}, expected one that can") from None

    def reframe(self, before: Sequence[str], after: Sequence[str]) -> None:
        """Puts other tokens around a text than the file's, and writes them into `text`."""
        ids: dict[str, int] = {}
        for token in (*before, *after):
            if (i := self._tokenizer.token_to_id(token)) is None:
                got = f"{quote_value(token)} around a text"
                raise ValueError(f"got {got}, expected a token of the vocabulary")
            ids[token] = i
        frame = Frame(tuple(ids[token] for token in before), tuple(ids[token] for token in after))
        if frame != self.frame:
            content = json.loads(self.text) | {
                "post_processor": special_tokens.make_template(before, after, ids)
            }
            self.frame, self.text = frame, json.dumps(content, ensure_ascii=False)

    def encode(self, text: str) -> list[int]:
        checks.check_length(text, self._growth)
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        rest = special_tokens.remove_start(ids, self.frame)
        kept = [i for i in rest if 0 <= i < self.size and i not in self._dropped]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids or token in self._dropped

    def is_byte(self, token: int) -> bool:
        return token in self._bytes

    def piece(self, token: int) -> str:
        piece = self._tokenizer.id_to_token(token) if token >= 0 else None
        return f"<{token}>" if piece is None else piece.replace("▁", " ")

    def special_ids(self) -> dict[str, int]:
        # Only added tokens: by another's name transformers would make one of it.
        decoder = self._tokenizer.get_added_tokens_decoder()
        added = {token.content: i for i, token in decoder.items()}
        eos = self._tokenizer.id_to_token(self.eos_ids[0])
        pad = "<pad>" if self.given_pad_id is None else decoder.get(self.given_pad_id)
        names = {"eos_token": eos, "pad_token": str(pad), "unk_token": "<unk>"}
        return {name: added[token] for name, token in names.items() if token in added}


def _read_added(tokenizer: Any) -> list[dict[str, Any]]:
    """Returns the added tokens of a tokenizer, as a tokenizer.json has them."""
    decoder = tokenizer.get_added_tokens_decoder()
    return [{"id": i} | token.__getstate__() for i, token in sorted(decoder.items())]
