"""Reads and writes the tokenizers of Marian, M2M-100, mBART, NLLB and Pegasus."""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from specdec_jax.files import reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.tokenizers import languages
from specdec_jax.tokenizers.folder_options import describe_added, read_flag, special_token
from specdec_jax.tokenizers.languages import Languages
from specdec_jax.tokenizers.piece_tables import PieceTableVocabulary
from specdec_jax.tokenizers.vocabularies import (
    TOKENIZER_BYTES,
    SentencePieceVocabulary,
    Vocabulary,
)

_FAIRSEQ, _PEGASUS = "sentencepiece.bpe.model", "spiece.model"
_EOS, _UNK, _PAD = "</s>", "<unk>", "<pad>"
_USUAL = {"eos_token": _EOS, "unk_token": _UNK, "pad_token": _PAD}
_OFFSET = 103  # of Pegasus: ids before those of the model's pieces
_PEGASUS_SPECIAL = ["<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, _OFFSET))]
_M2M = "M2M100Tokenizer"
_M2M_SETS = {"m2m100": languages.M2M_100, "wmt21": languages.WMT21}  # by `language_codes`


class _Kind(NamedTuple):
    """Where a class of tokenizers has its languages.

    Attributes:
      source, target: as in `Languages`.
      pattern: the form of a language's token, in which the last group is the code.
      codes: the codes of the class, in the order of their ids.
    """

    source: str
    target: str
    pattern: str
    codes: Sequence[str]


LANGUAGES = {
    "NllbTokenizer": _Kind("before", "first", r"([a-z]{3}_[A-Z][a-z]{3})", languages.NLLB),
    "MBartTokenizer": _Kind("after", "start", r"([a-z]{2}_[A-Z]{2})", languages.MBART),
    "MBart50Tokenizer": _Kind(
        "before", "first", r"([a-z]{2}_[A-Z]{2})", languages.MBART + languages.MBART_50
    ),
    _M2M: _Kind("before", "first", r"__([a-z_]+)__", languages.M2M_100),
}


def read_languages(folder: AnyPath, options: dict, kind: str, ids: Mapping[str, int]) -> Languages:
    """Returns the languages of a folder's tokenizer of one of the classes in `LANGUAGES`.

    Args:
      folder: the folder.
      options: contents of its tokenizer_config.json.
      kind: name of the class.
      ids: the ids of special tokens.

    Raises:
      ValueError: none of the tokens is a language, or `src_lang` is not among them.
    """
    path, known = folder / "tokenizer_config.json", LANGUAGES[kind]
    found = {re.fullmatch(known.pattern, token): i for token, i in ids.items()}
    codes = {match[1]: i for match, i in found.items() if match}
    if not codes:
        got = f"the class {kind} without a token for a language"
        raise mismatch_error(path, got, f"tokens such as {known.codes[0]}")
    source = known.source
    if kind == "NllbTokenizer" and read_flag(folder, options, "legacy_behaviour"):
        source = "after"
    made = Languages(codes, source, known.target, options.get("src_lang") or None)
    if made.default is not None:
        made.find(f"{path}: src_lang", made.default)
    return made


def is_folder(folder: AnyPath, kind: str) -> bool:
    """Returns whether a folder has the files of a tokenizer that this module reads.

    `kind` is the name of the tokenizer's class.
    """
    if (folder / "source.spm").exists() and (folder / "vocab.json").exists():
        return True
    if kind in LANGUAGES:
        return (folder / _FAIRSEQ).exists()
    return kind == "PegasusTokenizer" and (folder / _PEGASUS).exists()


def open_folder(folder: AnyPath, options: dict, kind: str) -> PieceTableVocabulary:
    """Returns the vocabulary of a folder for which `is_folder` is true.

    Args:
      folder: the folder.
      options: contents of its tokenizer_config.json.
      kind: name of the tokenizer's class.

    Raises:
      ValueError: a file cannot be read, or does not fit the others.
    """
    if (folder / "source.spm").exists():
        return _open_marian(folder, options)
    if kind == "PegasusTokenizer":
        return _open_pegasus(folder, options)
    if kind == _M2M and (folder / "vocab.json").exists():
        return _open_m2m(folder, options)
    # Models of NLLB have the class of M2M-100's.
    return _open_fairseq(folder, options, "NllbTokenizer" if kind == _M2M else kind)


def _read_names(folder: AnyPath, options: dict) -> dict[str, str]:
    """Returns the tokens that end, pad or stand for what is unknown."""
    return {name: special_token(folder, options, name) or _USUAL[name] for name in _USUAL}


def _check_names(folder: AnyPath, options: dict, kind: str, table: Mapping[str, int]) -> None:
    """Raises ValueError if a token that has a place among a class's first ids is not its usual one.

    In transformers, that token has the id of the usual one.
    """
    starts = ["bos_token"] if kind in ("MBartTokenizer", "NllbTokenizer") else []
    for name in (*starts, "mask_token", *_USUAL):
        token = special_token(folder, options, name)
        if token is not None and token not in table:
            place = f"{folder / 'tokenizer_config.json'}: {name}"
            raise mismatch_error(place, quote_value(token), "a piece of the vocabulary")


_Made = TypeVar("_Made", PieceTableVocabulary, SentencePieceVocabulary)


_FILES = {"source_spm": "source.spm", "target_spm": "target.spm"}
_FILES["target_pieces"] = "target_vocab.json"


def _make(
    file: AnyPath,
    make: Callable[..., _Made],
    *parts: Any,
    model: str = _FILES["source_spm"],
    **options: Any,
) -> _Made:
    """Returns what `make` makes; an error names the file, or that of the part that is unsound.

    `model` is the name of the file of the SentencePiece model.
    """
    try:
        return make(*parts, **options)
    except ValueError as error:
        part, _, rest = str(error).partition(": ")
        if part in _FILES:
            name = model if part == "source_spm" else _FILES[part]
            raise ValueError(f"{file.parent / name}: {rest}") from None
        raise ValueError(f"{file}: {error}") from None


def _read_bytes(path: AnyPath) -> bytes:
    return reading.read_bytes(path, TOKENIZER_BYTES)


def _read_pieces(path: AnyPath) -> dict[str, Any]:
    return reading.read_json(path, TOKENIZER_BYTES)


def _open_marian(folder: AnyPath, options: dict) -> PieceTableVocabulary:
    """Returns the vocabulary of Marian's files, or both vocabularies where they are separate."""
    file, target = folder / "vocab.json", folder / "target.spm"
    given: dict[str, Any] = _read_names(folder, options)
    pieces = _read_pieces(file)
    added = _list_added(folder, options, pieces)
    tokens = [token["content"] for token in describe_added(folder, options)]
    given["special"] = [token for token in tokens if token not in given.values()]
    if target.exists():
        given["target_spm"] = _read_bytes(target)
    if read_flag(folder, options, "separate_vocabs"):
        given["target_pieces"] = _read_pieces(folder / "target_vocab.json") | added
    ids = {piece[2:-2]: i for piece, i in pieces.items() if re.fullmatch(">>.+<<", piece)}
    if ids:
        given["languages"] = Languages(ids, "none", "input")
    model = _read_bytes(folder / "source.spm")
    make = PieceTableVocabulary.make
    table = pieces | added
    return _make(file, make, table, model, after_unknown=" ", marian_codes=True, **given)


def _open_m2m(folder: AnyPath, options: dict) -> PieceTableVocabulary:
    """Returns M2M-100's vocabulary: a table, and languages after it."""
    file, pieces = folder / "vocab.json", _read_pieces(folder / "vocab.json")
    name = options.get("language_codes", "m2m100")
    if not isinstance(name, str) or name not in _M2M_SETS:
        path = folder / "tokenizer_config.json"
        expected = f"one of {', '.join(_M2M_SETS)}"
        raise mismatch_error(f"{path}: language_codes", quote_value(name), expected)
    table = _number_m2m(pieces, name)
    return _finish(folder, options, _M2M, file, table, after_unknown="")


def _number_m2m(pieces: dict[str, int], name: str) -> dict[str, int]:
    """Returns the ids of M2M-100's tokens, from its vocab.json and the name of its languages."""
    codes = _M2M_SETS[name]
    return pieces | {f"__{code}__": i for i, code in enumerate(codes, len(pieces))}


def _open_fairseq(folder: AnyPath, options: dict, kind: str) -> PieceTableVocabulary:
    """Returns the vocabulary of mBART or NLLB: the model's pieces, one id further, and languages.

    fairseq has a token for padding, which the model lacks, and another order of the first ones.
    """
    file = folder / _FAIRSEQ
    pieces = _list_pieces(file)
    if pieces[:3] != ["<unk>", "<s>", "</s>"]:
        got = f"a model whose first pieces are {quote_value(pieces[:3])}"
        raise mismatch_error(file, got, "<unk>, <s> and </s>")
    table = _number_fairseq(pieces, kind)
    _check_names(folder, options, kind, table)
    return _finish(folder, options, kind, file, table)


def _number_fairseq(pieces: list[str], kind: str) -> dict[str, int]:
    """Returns the ids of mBART's or NLLB's tokens, from its model's pieces."""
    table = {"<s>": 0, _PAD: 1, _EOS: 2, _UNK: 3}
    table |= {piece: i for i, piece in enumerate(pieces[3:], 4)}
    codes = LANGUAGES[kind].codes
    table |= {code: i for i, code in enumerate(codes, len(pieces) + 1)}
    return table | {"<mask>": len(pieces) + 1 + len(codes)}


def _list_pieces(file: AnyPath) -> list[str]:
    """Returns the pieces of a SentencePiece model."""
    return _make(file, SentencePieceVocabulary, _read_bytes(file), needs_eos=False).list_pieces()


def _finish(
    folder: AnyPath,
    options: dict,
    kind: str,
    file: AnyPath,
    table: dict[str, int],
    **given: Any,
) -> PieceTableVocabulary:
    """Returns the vocabulary of a class with languages, from its table of pieces."""
    added = _list_added(folder, options, table, kind != _M2M)
    codes = {piece: i for piece, i in table.items() if re.fullmatch(LANGUAGES[kind].pattern, piece)}
    codes |= added
    special = [*codes, *(token for token in ("<s>", "<mask>") if token in table)]
    given |= _read_names(folder, options)
    given |= {"special": special, "languages": read_languages(folder, options, kind, codes)}
    model = _read_bytes(folder / _FAIRSEQ)
    make = PieceTableVocabulary.make
    return _make(file, make, table | added, model, model=_FAIRSEQ, **given)


def name_class(vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns what a tokenizer_config.json says of a vocabulary's languages.

    Raises:
      ValueError: no class has such languages.
    """
    languages = vocabulary.languages
    assert languages is not None
    token = vocabulary.piece(next(iter(languages.codes.values())))
    for kind, known in LANGUAGES.items():
        if languages.target == known.target and re.fullmatch(known.pattern, token):
            options: dict[str, Any] = {"tokenizer_class": kind}
            if languages.default is not None:
                options["src_lang"] = languages.default
            if languages.source != known.source:
                options["legacy_behaviour"] = True
            return options
    expected = f"those of one of {', '.join(LANGUAGES)}"
    raise mismatch_error("vocabulary", f"languages such as {quote_value(token)}", expected)


def make_files(vocabulary: PieceTableVocabulary) -> dict[str, Any]:
    """Returns the files from which `open_folder` makes the same vocabulary.

    Returns:
      By name, the bytes of a file or the contents of a JSON file.

    Raises:
      ValueError: no class has such languages.
    """
    content = json.loads(vocabulary.text)
    table, source = content["pieces"], base64.b64decode(content["source_spm"])
    options: dict[str, Any] = {name: content[name] for name in _USUAL}
    if content["marian_codes"]:
        options["tokenizer_class"] = "MarianTokenizer"
        other = content["target_spm"]
        target = source if other is None else base64.b64decode(other)
        files = {"vocab.json": table, "source.spm": source, "target.spm": target}
        if content["target_pieces"] is not None:
            options["separate_vocabs"] = True
            files["target_vocab.json"] = content["target_pieces"]
        options["added_tokens_decoder"] = _write_added(table, content["special"])
        return files | {"tokenizer_config.json": options}
    file = _PEGASUS if vocabulary.languages is None else _FAIRSEQ
    files, pieces = {file: source}, SentencePieceVocabulary(source, needs_eos=False).list_pieces()
    if vocabulary.languages is None:
        options["tokenizer_class"] = "PegasusTokenizer"
        own = _number_pegasus(pieces)
    elif (named := name_class(vocabulary))["tokenizer_class"] == _M2M:
        first = min(vocabulary.languages.codes.values())
        files["vocab.json"] = {piece: i for piece, i in table.items() if i < first}
        code = next(code for code, i in vocabulary.languages.codes.items() if i == first)
        name = next(name for name, codes in _M2M_SETS.items() if codes[0] == code)
        options |= named | {"language_codes": name}
        own = _number_m2m(files["vocab.json"], name)
    else:
        options |= named
        own = _number_fairseq(pieces, named["tokenizer_class"])
    added = _write_added(table, [token for token in table if token not in own])
    return files | {"tokenizer_config.json": options | {"added_tokens_decoder": added}}


def _write_added(table: dict[str, int], tokens: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the contents of `added_tokens_decoder` for tokens of a table."""
    usual = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
    return {str(table[token]): {"content": token} | usual for token in tokens}


def _open_pegasus(folder: AnyPath, options: dict) -> PieceTableVocabulary:
    """Returns Pegasus' vocabulary: tokens of its training, and then the model's pieces."""
    file, path = folder / _PEGASUS, folder / "tokenizer_config.json"
    if options.get("offset", _OFFSET) != _OFFSET:
        raise mismatch_error(f"{path}: offset", quote_value(options["offset"]), f"{_OFFSET}")
    table = _number_pegasus(_list_pieces(file))
    _check_names(folder, options, "PegasusTokenizer", table)
    added = _list_added(folder, options, table)
    given: dict[str, Any] = _read_names(folder, options)
    given["special"] = [*_PEGASUS_SPECIAL, *added]
    make = PieceTableVocabulary.make
    return _make(file, make, table | added, _read_bytes(file), model=_PEGASUS, **given)


def _number_pegasus(pieces: list[str]) -> dict[str, int]:
    """Returns the ids of Pegasus' tokens, from its model's pieces."""
    table = {token: i for i, token in enumerate([_PAD, _EOS, *_PEGASUS_SPECIAL])}
    return table | {piece: i for i, piece in enumerate(pieces, _OFFSET) if piece not in table}


def _list_added(
    folder: AnyPath, options: dict, table: dict[str, int], numbers: bool = True
) -> dict[str, int]:
    """Returns added tokens that a table lacks.

    `numbers`: whether tokens without ids get the next ones. In transformers, those of M2M-100 get
    the ids of languages.

    Raises:
      ValueError: a token has another id in the table, or none although `numbers` is false.
    """
    added: dict[str, int] = {}
    last = max((i for i in table.values() if type(i) is int), default=-1)
    for token in describe_added(folder, options):
        content, i = token["content"], token["id"]
        if i is not None and table.get(content, i) != i:
            got = f"added token {quote_value(content)} with id {i}"
            raise mismatch_error(folder / "tokenizer_config.json", got, f"{table[content]}")
        if i is None and content not in table and not numbers:
            got = f"added token {quote_value(content)} without an id"
            expected = "added_tokens_decoder with its id"
            raise mismatch_error(folder / "tokenizer_config.json", got, expected)
        if content not in table:
            added[content] = last + 1 if i is None else i
            last = max(last, added[content])
    return added
