"""Reads single options of the files that describe a Hugging Face folder's tokenizer."""

import re
from typing import Any

from specdec_jax.files import reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value


def first_given(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def read_flag(folder: AnyPath, options: dict, name: str) -> bool:
    """Returns an option that is true or false; false without one."""
    value = first_given(options.get(name), False)
    if not isinstance(value, bool):
        path = folder / "tokenizer_config.json"
        raise mismatch_error(f"{path}: {name}", quote_value(value), "true or false")
    return value


def special_token(folder: AnyPath, options: dict, name: str) -> str | None:
    """Returns the text of a special token, None if no file gives it."""
    token = named_token(folder, options, name)
    return token_text(token, folder / "tokenizer_config.json", name) if token else None


def named_token(folder: AnyPath, options: dict, name: str, old: dict | None = None) -> Any:
    """Returns a token as the folder's files give it, checked; None if none does.

    `old`: contents of special_tokens_map.json; None: they are read.
    """
    old = _read_old(folder, options, _MAP) if old is None else old
    if token := old.get(name):
        token_text(token, folder / _MAP, name)
    return token or options.get(name)


_MAP, _ADDED, _DECODER = "special_tokens_map.json", "added_tokens.json", "added_tokens_decoder"


def _read_old(folder: AnyPath, options: dict, file: str) -> dict:
    """Returns the contents of a file that counts before tokenizer_config.json.

    As in transformers, if that has `added_tokens_decoder`, the file does not count at all.
    """
    return {} if _DECODER in options else reading.read_optional_json(folder / file)


def token_text(token: Any, path: AnyPath, name: str) -> str:
    """Returns the text of a token, which a file gives either alone or inside an object."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        expected = "a string or an object with `content`"
        raise ValueError(f"{path}: {name}: got {quote_value(token)}, expected {expected}")
    return check_utf8(content, path)


def check_utf8(token: str, path: AnyPath) -> str:
    """Returns a token; raises ValueError if it has half a surrogate pair, as JSON may give it."""
    if not token.isascii() and any("\ud800" <= character <= "\udfff" for character in token):
        raise mismatch_error(path, f"the token {quote_value(token)}", "UTF-8 text")
    return token


def list_special(folder: AnyPath, options: dict) -> dict[str, Any]:
    """Returns the special tokens that the folder lists without names or ids, by their texts."""
    # transformers 5 calls them extra_special_tokens.
    path, key = folder / "tokenizer_config.json", "additional_special_tokens"
    listed = options.get("extra_special_tokens") or options.get(key)
    listed = listed or _read_old(folder, options, _MAP).get(key) or []
    listed = list(listed.values()) if isinstance(listed, dict) else listed
    if type(listed) is not list:
        raise mismatch_error(f"{path}: {key}", quote_value(listed), "a list of tokens")
    return {text: token for token in listed if (text := token_text(token, path, key))}


def added_tokens(folder: AnyPath, options: dict) -> dict[str, int | None]:
    """Returns the tokens that the folder adds to its vocabulary, with ids where files give them."""
    path, others = folder / "tokenizer_config.json", folder / _ADDED
    added: dict[str, int | None] = dict.fromkeys(list_special(folder, options))
    entries = options.get(_DECODER) or {}
    numbers = entries if isinstance(entries, dict) else ["no object"]
    if not all(re.fullmatch(r"\d{1,9}", i) for i in numbers):
        raise mismatch_error(
            f"{path}: {_DECODER}", quote_value(entries), "an object of tokens by id"
        )
    added |= {token_text(entry, path, _DECODER): int(i) for i, entry in entries.items()}
    numbered = _read_old(folder, options, _ADDED)
    for token, i in numbered.items():
        check_utf8(token, others)
        if type(i) is not int:
            raise mismatch_error(f"{others}: {quote_value(token)}", quote_value(i), "an id")
    return {token: i for token, i in (added | numbered).items() if token}  # as in transformers


_NAMES = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
_FLAGS = "lstrip", "rstrip", "single_word", "normalized", "special"  # of an added token


def describe_added(folder: AnyPath, options: dict) -> list[dict[str, Any]]:
    """Returns the tokens that the folder adds or names, in the order in which transformers does.

    Those with ids come first, then those with a name, such as `eos_token`, then others.

    Returns:
      Arguments of `tokenizers.AddedToken`, with the `id` or None, and whether the token `replaces`
      one with the same text, as those of `added_tokens_decoder`.
    """
    path = folder / "tokenizer_config.json"
    ids, listed = added_tokens(folder, options), list_special(folder, options)
    old = _read_old(folder, options, _MAP)
    names = *old, *options
    own = [name for name in names if name.endswith("_token")]  # of a model, such as `image_token`
    named = {}
    for name in dict.fromkeys([*_NAMES, *own]):
        token = named_token(folder, options, name, old)
        if isinstance(token, str | dict) and token and (text := token_text(token, path, name)):
            named[text] = token
    decoder = {token_text(it, path, _DECODER): it for it in (options.get(_DECODER) or {}).values()}
    numbers = {token: i for token, i in ids.items() if i is not None}
    entries, described = listed | named | decoder, []
    order = dict.fromkeys([*sorted(numbers, key=numbers.__getitem__), *named, *listed])
    for token in order:
        entry = entries.get(token)
        given = entry if isinstance(entry, dict) else {}
        flags = {name: bool(given[name]) for name in _FLAGS if name in given}
        if token in named or (token in listed and token not in decoder):
            flags["special"] = True
        described.append(
            {"id": ids.get(token), "content": token, "replaces": token in decoder} | flags
        )
    return described
