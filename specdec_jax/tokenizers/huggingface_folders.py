"""Reads and writes the tokenizer of a Hugging Face folder, which several files may describe."""

import copy
import re
from typing import Any

from specdec_jax.files import places, reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.tokenizers import checks, piece_folders, vocabularies
from specdec_jax.tokenizers.folder_options import (
    describe_added,
    first_given,
    named_token,
    read_flag,
    special_token,
    token_text,
)
from specdec_jax.tokenizers.piece_tables import PieceTableVocabulary
from specdec_jax.tokenizers.vocabularies import Vocabulary

_T5 = ("T5Tokenizer", "MT5Tokenizer")  # the second was a name of the first until transformers 5
_ROBERTA = ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer")
# Classes whose vocab.json and merges.txt are read as GPT-2's are.
_GPT2 = ("GPT2Tokenizer", "CodeGenTokenizer")
# Classes that say nothing about the files.
_ANY = ("", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
# The special tokens of classes with GPT-2's files, where tokenizer_config.json does not give them.
_GPT2_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}


def open_folder(
    folder: AnyPath, stop_ids: tuple[int, ...], logits: int | None = None
) -> Vocabulary | None:
    """Returns the tokenizer of a folder, None if it has none.

    The first that is there counts: `tokenizer.json`; the files of `piece_folders.py` (Marian,
    M2M-100, mBART, NLLB, Pegasus); `vocab.json` with `merges.txt`; `spiece.model`; or bytes if the
    tokenizer's class is ByT5's.

    Args:
      folder: the folder.
      stop_ids: ids at which the model stops. Inputs still end with the tokenizer's own EOS, if it
        has one.
      logits: number of the model's logits; None: enough for T5's sentinels.

    Raises:
      ValueError: a file cannot be read, or is of a class of tokenizers that reads it in another
        way.
    """
    path = folder / "tokenizer_config.json"
    options = reading.read_optional_json(path)
    if read_flag(folder, options, name := "split_special_tokens"):
        expected = "false: a special token that a text spells out is one token here"
        raise mismatch_error(f"{path}: {name}", "true", expected)
    kind = _tokenizer_class(folder, options)
    model = reading.read_optional_json(folder / "config.json").get("model_type")
    named = kind or _CLASSES.get(str(model), "")
    if (folder / "tokenizer.json").exists():
        kind = named if model == "mbart" else kind
        token = special_token(folder, options, "eos_token")
        if token is None and kind in (*_GPT2, *_ROBERTA, *_T5):
            token = (_GPT2_TOKENS if kind in _GPT2 else _ROBERTA_TOKENS)["eos_token"]
        around, file = _special_tokens_around(folder, options, kind), folder / "tokenizer.json"
        space = read_flag(folder, options, "add_prefix_space")
        vocabulary = vocabularies.TokenizerJsonVocabulary.load(
            file,
            eos_token=token,
            stop_ids=stop_ids,
            around=around,
            added=describe_added(folder, options),
            # As in transformers, other classes leave it to the file.
            add_prefix_space=space if named in (*_GPT2, *_ROBERTA) else None,
        )
        # Neither the file nor its class names tokens.
        if vocabulary.frame is None and kind not in ("", *_T5):
            vocabulary.reframe([], [])
        if kind in piece_folders.LANGUAGES:
            ids = vocabulary.special_pieces()
            vocabulary.set_languages(piece_folders.read_languages(folder, options, kind, ids))
        return vocabulary
    if piece_folders.is_folder(folder, named):
        return piece_folders.open_folder(folder, options, named)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return _byte_level_bpe(folder, options, named, stop_ids)
    if (folder / "spiece.model").exists() or named.startswith("ByT5"):
        return _add_sentinels(folder, options, named, logits)
    return None


_USUAL = "<pad>", "</s>", "<unk>"  # of T5 and ByT5
_CLEAN_UP = "clean_up_tokenization_spaces"
# Files that are of no use without another one.
_HALVES = (
    "vocab.json",
    "merges.txt",
    "source.spm",
    "target.spm",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "vocab.txt",
)


def list_notes(folder: AnyPath, vocabulary: Vocabulary | None) -> tuple[str, ...]:
    """Returns lines about options of a folder's tokenizer that are left out, or what it lacks.

    transformers removes spaces before punctuation from decoded texts if an option says so, but not
    for merges (BPE). The text of the first tokens would then change with those that follow.
    """
    if vocabulary is None:
        there = ", ".join(name for name in _HALVES if (folder / name).exists())
        expected = "a tokenizer.json, or its tokenizer's other files: without, it takes ids alone"
        return (f"{folder}: got {there}, expected {expected}",) if there else ()
    options = reading.read_optional_json(folder / "tokenizer_config.json")
    forced = options.get(f"{_CLEAN_UP}_for_bpe_even_though_it_will_corrupt_output")
    if not read_flag(folder, options, _CLEAN_UP):
        return ()
    if getattr(vocabulary, "has_merges", False) and not forced:
        return ()
    does = "decoding here does not have, and does without"
    return (f"{folder}: tokenizer_config.json also sets what {does}: {_CLEAN_UP}=True",)


# The classes of models whose ids differ from those that the files alone give.
_CLASSES = {
    "bart": "BartTokenizer",
    "gpt2": "GPT2Tokenizer",
    "pegasus": "PegasusTokenizer",
    "mbart": "MBartTokenizer",
    "m2m_100": "M2M100Tokenizer",
}


def _tokenizer_class(folder: AnyPath, options: dict) -> str:
    """Returns the name of the tokenizer's class without "Fast", "" if no file gives it."""
    config = reading.read_optional_json(folder / "config.json")
    kind = first_given(options.get("tokenizer_class"), config.get("tokenizer_class"), "")
    if not isinstance(kind, str):
        path = folder / "tokenizer_config.json"
        raise mismatch_error(f"{path}: tokenizer_class", quote_value(kind), "a string")
    return kind.removesuffix("Fast")


def _special_tokens_around(
    folder: AnyPath, options: dict, kind: str
) -> tuple[list[str], list[str]] | None:
    """Returns the tokens that a class puts before and after a text, None if a file decides."""
    if kind in piece_folders.LANGUAGES:  # the language comes on top
        return [], [special_token(folder, options, "eos_token") or _ROBERTA_TOKENS["eos_token"]]
    if kind != _T5[0] and kind not in _ROBERTA:
        return None
    names = ("cls_token", "sep_token") if kind in _ROBERTA else ("eos_token",)
    tokens = [special_token(folder, options, name) or _ROBERTA_TOKENS[name] for name in names]
    return tokens[:-1], tokens[-1:]


def _add_sentinels(folder: AnyPath, options: dict, kind: str, logits: int | None) -> Vocabulary:
    """Returns the vocabulary of spiece.model, or of bytes, with its sentinels."""
    path, model = folder / "tokenizer_config.json", folder / "spiece.model"
    described = {token["content"]: token for token in describe_added(folder, options)}
    added = {token: described[token]["id"] for token in described}
    extra_ids = options.get("extra_ids")
    sentinels = sum(bool(re.fullmatch(r"<extra_id_\d+>", token)) for token in added) or None
    if model.exists():
        if kind not in (*_T5, *_ANY) and not kind.startswith("ByT5"):
            raise mismatch_error(
                model, f"the files of a {kind}", "a T5Tokenizer's, or a tokenizer.json"
            )
        extra_ids = first_given(extra_ids, sentinels)
        if extra_ids is None:
            extra_ids = vocabularies.count_sentinels(
                vocabularies.SentencePieceVocabulary.load(model).size, logits
            )
        count = vocabularies.check_extra_ids(extra_ids, path)
        vocabulary: Vocabulary = vocabularies.SentencePieceVocabulary.load(model, count)
    else:
        # Beside a list of sentinels, the number may be 0.
        count = first_given(extra_ids or None, sentinels, extra_ids, 125)
        count = vocabularies.check_extra_ids(count, path)
        vocabulary = vocabularies.ByteVocabulary(count, _read_strips(path, described))
    _check_added(folder, added, vocabulary)
    eos_token = vocabulary.piece(vocabulary.eos_ids[0])
    if (given := special_token(folder, options, "eos_token") or eos_token) != eos_token:
        raise mismatch_error(f"{path}: eos_token", quote_value(given), quote_value(eos_token))
    return vocabulary


def _read_strips(path: AnyPath, described: dict[str, dict]) -> bool:
    """Returns whether spaces belong to ByT5's special tokens, as in transformers by default."""
    tokens = [described.get(token, {}) for token in _USUAL]
    flags = {token.get(side, True) for token in tokens for side in ("lstrip", "rstrip")}
    if len(flags) > 1:
        expected = f"the same of all of {', '.join(_USUAL)}"
        raise mismatch_error(f"{path}: lstrip and rstrip", "true and false", expected)
    return flags.pop()


def _byte_level_bpe(
    folder: AnyPath, options: dict, kind: str, stop_ids: tuple[int, ...]
) -> vocabularies.TokenizerJsonVocabulary:
    """Returns the vocabulary of GPT-2's own files: pieces with their ids, and merges in order."""
    file, path = folder / "vocab.json", folder / "tokenizer_config.json"
    if kind not in (*_ROBERTA, *_GPT2, *_ANY):
        expected = f"those of one of {', '.join((*_GPT2, *_ROBERTA))}, or a tokenizer.json"
        raise ValueError(f"{file}: got the files of a {kind}, expected {expected}")
    defaults = _ROBERTA_TOKENS if kind in _ROBERTA else _GPT2_TOKENS
    named: dict[str, Any] = {}
    for name in _ROBERTA_TOKENS:
        if token := named_token(folder, options, name) or defaults.get(name):
            named[name] = token
    added = describe_added(folder, options | named)
    text = _make_tokenizer_json(file, read_flag(folder, options, "add_prefix_space"))
    eos_token = special_token(folder, options, "eos_token") or defaults["eos_token"]
    around = _special_tokens_around(folder, options, kind)
    # The switches `add_bos_token` and `add_eos_token` count only where there is no tokenizer.json.
    if around is None and (kind or options.get("add_bos_token") is not None):
        before, after = (
            [token_text(named[mark], path, mark)] * read_flag(folder, options, f"add_{mark}")
            for mark in ("bos_token", "eos_token")
        )
        around = before, after
    try:
        return vocabularies.TokenizerJsonVocabulary(
            text, eos_token=eos_token, stop_ids=stop_ids, around=around, added=added
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _make_tokenizer_json(vocab_file: AnyPath, add_prefix_space: bool) -> str:
    """Returns the contents of a `tokenizer.json` made of GPT-2's `vocab.json` and `merges.txt`.

    Args:
      vocab_file: path of the `vocab.json`; the `merges.txt` lies beside it.
      add_prefix_space: whether a space is put before every text.

    Raises:
      ValueError: the files cannot be read as such.
    """
    import tokenizers

    merges_file = vocab_file.with_name("merges.txt")
    pieces = reading.read_json(vocab_file, vocabularies.TOKENIZER_BYTES)
    reading.check_file(merges_file, vocabularies.TOKENIZER_BYTES)
    try:
        checks.check_ids(pieces.items())
        with places.open_copies(vocab_file, merges_file) as (vocab_copy, merges_copy):
            bpe = tokenizers.models.BPE.from_file(str(vocab_copy), str(merges_copy))
    except Exception as error:  # the library raises plain Exception
        got = f"no readable vocabulary with merges.txt ({reading.error_reason(error)})"
        raise ValueError(f"{vocab_file}: got {got}, expected GPT-2's") from None
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer.to_str()


def _check_added(folder: AnyPath, added: dict[str, int | None], vocabulary: Vocabulary) -> None:
    """Raises ValueError if the vocabulary gives an added token another id than the files do."""
    for token, i in added.items():
        if token in _USUAL:
            continue
        known = vocabulary.encode(token)
        if len(known) != 1 or (i is not None and known != [i]):
            got = f"added token {quote_value(token)}" + (f" with id {i}" if i is not None else "")
            path = folder / "tokenizer_config.json"
            raise mismatch_error(path, got, "only sentinels <extra_id_0> … or a tokenizer.json")


def make_files(vocabulary: Vocabulary | None, prompts: bool = False) -> dict[str, Any]:
    """Returns the files from which `open_folder` makes the same vocabulary.

    Special tokens are named only if the vocabulary has them: transformers would give any other an
    id of its own, past the model's embedding. Padding is EOS where there is no piece for it. Texts
    are `prompts` of a decoder-only model, or inputs of an encoder.

    Returns:
      By name, the bytes of a file or the contents of a JSON file.

    Raises:
      ValueError: Hugging Face has no files for such a vocabulary.
    """
    if vocabulary is None:
        return {}
    ids = _special_ids(vocabulary)
    options: dict[str, Any] = {name: vocabulary.piece(i) for name, i in ids.items()}
    if isinstance(vocabulary, vocabularies.TokenizerJsonVocabulary):
        options["tokenizer_class"] = "PreTrainedTokenizerFast"
        if vocabulary.languages is not None:
            options |= piece_folders.name_class(vocabulary)
        elif vocabulary.frame is None and not prompts:
            # transformers puts no EOS after an input by itself.
            vocabulary = copy.copy(vocabulary)
            vocabulary.reframe([], [vocabulary.piece(vocabulary.eos_ids[0])])
        return {"tokenizer.json": vocabulary.text.encode("utf-8"), "tokenizer_config.json": options}
    if isinstance(vocabulary, PieceTableVocabulary) and not prompts:
        return piece_folders.make_files(vocabulary)
    kinds = vocabularies.SentencePieceVocabulary | vocabularies.ByteVocabulary
    if prompts or not isinstance(vocabulary, kinds):
        # transformers' classes for these put an EOS after every text.
        expected = "a tokenizer.json" if prompts else "one that Hugging Face has files for"
        raise ValueError(f"vocabulary: got {type(vocabulary).__name__}, expected {expected}")
    options["extra_ids"] = vocabulary.extra_ids
    options["additional_special_tokens"] = [f"<extra_id_{i}>" for i in range(vocabulary.extra_ids)]
    if isinstance(vocabulary, vocabularies.ByteVocabulary):
        options["tokenizer_class"] = "ByT5Tokenizer"
        if not vocabulary.strips:
            kept = {"lstrip": False, "rstrip": False, "__type": "AddedToken"}
            options |= {name: {"content": options[name]} | kept for name in ids}
        return {"tokenizer_config.json": options}
    options["tokenizer_class"] = "T5Tokenizer"
    return {"spiece.model": vocabulary.model, "tokenizer_config.json": options}


def choose_pad_id(vocabulary: Vocabulary | None) -> int:
    """Returns the id that pads inputs in transformers: as `make_files` names it, else T5's."""
    return 0 if vocabulary is None else _special_ids(vocabulary).get("pad_token", 0)


def _special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    ids = vocabulary.special_ids()
    return {"pad_token": ids["eos_token"]} | ids if "eos_token" in ids else ids
