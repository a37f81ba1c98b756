"""Reads and writes the tokenizer of a Hugging Face folder, which several files may describe."""

import os
import pathlib
import re
from typing import Any

from specdec_jax.files import reading
from specdec_jax.models.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
    byte_level_bpe,
    check_extra_ids,
)


def first(*values) -> Any:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def optional(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file, an empty one if there is no such file."""
    return reading.read_json(path) if os.path.lexists(path) else {}


def open_folder(folder: pathlib.Path, stop_ids: tuple[int, ...]) -> Vocabulary | None:
    """Returns the tokenizer of a folder, None if it has none.

    The first that is there counts: `tokenizer.json`, `vocab.json` with `merges.txt`,
    `spiece.model`, or bytes if the folder says that it is a ByT5.

    Args:
      folder: the folder.
      stop_ids: ids at which the model stops. Inputs still end with the tokenizer's own EOS, if it
        has one.
    """
    path = folder / "tokenizer_config.json"
    options = optional(path)
    if (folder / "tokenizer.json").exists():
        token = _special_token(folder, options, "eos_token") or "</s>"
        return TokenizerJsonVocabulary.load(folder / "tokenizer.json", eos_token=token, stop_ids=stop_ids)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return _byte_level_bpe(folder, options, stop_ids)
    kind = options.get("tokenizer_class")
    is_bytes = isinstance(kind, str) and kind.startswith("ByT5")
    if not is_bytes and not (folder / "spiece.model").exists():
        return None
    added = _added_tokens(folder, options)
    sentinels = len(_sentinels(added)) or None
    if (folder / "spiece.model").exists():
        extra_ids = check_extra_ids(first(options.get("extra_ids"), sentinels, 100), path)
        vocabulary: Vocabulary = SentencePieceVocabulary.load(folder / "spiece.model", extra_ids)
    else:
        vocabulary = ByteVocabulary(check_extra_ids(first(options.get("extra_ids") or None, sentinels, 125), path))
    _check_added(folder, added, vocabulary)
    return vocabulary


def _special_token(folder: pathlib.Path, options: dict, name: str) -> str | None:
    token = options.get(name) or optional(folder / "special_tokens_map.json").get(name)
    return _content(token, folder / "tokenizer_config.json", name) if token else None


def _content(token, path: pathlib.Path, name: str) -> str:
    """Returns the text of a token, which a file gives either alone or inside an object."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(f"{path}: {name}: got {reading.shown(token)}, expected a string or an object with `content`")
    return content


def _byte_level_bpe(folder: pathlib.Path, options: dict, stop_ids: tuple[int, ...]) -> TokenizerJsonVocabulary:
    """Returns the vocabulary of GPT-2's own files: pieces with their ids, and merges in order."""
    names = ("bos_token", "eos_token", "unk_token")
    special = {_special_token(folder, options, name) or "<|endoftext|>": None for name in names}
    added = special | _added_tokens(folder, options)
    text = byte_level_bpe(
        folder / "vocab.json", folder / "merges.txt", sorted(added, key=lambda token: added[token] or -1),
        bool(options.get("add_prefix_space", False)),
    )  # fmt: skip
    token = _special_token(folder, options, "eos_token") or "<|endoftext|>"
    try:
        vocabulary = TokenizerJsonVocabulary(text, eos_token=token, stop_ids=stop_ids)
    except ValueError as error:
        raise ValueError(f"{folder / 'vocab.json'}: {error}") from None
    _check_added(folder, added, vocabulary)
    return vocabulary


def _added_tokens(folder: pathlib.Path, options: dict) -> dict[str, int | None]:
    """Returns the tokens that the folder adds to its vocabulary, with their ids where the files
    give them."""
    path, others, key = folder / "tokenizer_config.json", folder / "added_tokens.json", "additional_special_tokens"
    # transformers 5 calls them extra_special_tokens.
    listed = options.get("extra_special_tokens") or options.get(key)
    listed = listed or optional(folder / "special_tokens_map.json").get(key) or []
    listed = list(listed.values()) if isinstance(listed, dict) else listed
    entries = options.get("added_tokens_decoder") or {}
    if (
        not isinstance(listed, list)
        or not isinstance(entries, dict)
        or not all(re.fullmatch(r"\d{1,9}", i) for i in entries)
    ):
        got = reading.shown(entries if isinstance(listed, list) else listed)
        raise ValueError(f"{path}: got added tokens {got}, expected a list of tokens, and an object of tokens by id")
    added: dict[str, int | None] = {_content(token, path, key): None for token in listed}
    added |= {_content(entry, path, "added_tokens_decoder"): int(i) for i, entry in entries.items()}
    numbered = optional(others)
    for token, i in numbered.items():
        if type(i) is not int:
            raise ValueError(f"{others}: {reading.shown(token)}: got {reading.shown(i)}, expected an id")
    return added | numbered


def _sentinels(added: dict) -> list[str]:
    return [token for token in added if re.fullmatch(r"<extra_id_\d+>", token)]


def _check_added(folder: pathlib.Path, added: dict[str, int | None], vocabulary: Vocabulary) -> None:
    """Raises ValueError if the vocabulary would give an added token another id than the files do."""
    for token, i in added.items():
        if token in ("<pad>", "</s>", "<unk>"):
            continue
        known = vocabulary.encode(token)
        if len(known) != 1 or (i is not None and known != [i]):
            got = f"added token {reading.shown(token)}" + (f" with id {i}" if i is not None else "")
            path = folder / "tokenizer_config.json"
            raise ValueError(f"{path}: got {got}, expected only sentinels <extra_id_0> … or a tokenizer.json")


def files_of(vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Returns the files from which `open_folder` makes the same vocabulary: by name, bytes or the
    contents of a JSON file."""
    if vocabulary is None:
        return {}
    options: dict[str, Any] = {
        "eos_token": vocabulary.piece(vocabulary.eos_ids[0]),
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        options["tokenizer_class"] = "PreTrainedTokenizerFast"
        return {"tokenizer.json": vocabulary.text.encode("utf-8"), "tokenizer_config.json": options}
    if not isinstance(vocabulary, SentencePieceVocabulary | ByteVocabulary):
        raise ValueError(f"vocabulary: got {type(vocabulary).__name__}, expected one that Hugging Face has files for")
    options["extra_ids"] = vocabulary.extra_ids
    options["additional_special_tokens"] = [f"<extra_id_{i}>" for i in range(vocabulary.extra_ids)]
    if isinstance(vocabulary, ByteVocabulary):
        return {"tokenizer_config.json": options | {"tokenizer_class": "ByT5Tokenizer"}}
    options["tokenizer_class"] = "T5Tokenizer"
    return {"spiece.model": vocabulary.model, "tokenizer_config.json": options}
