"""This package's own folders: config.json, a vocabulary file here or in the folder above, Orbax arrays in params/.

Models, and heads, which have no vocabulary. A config.json without params/ says of a T5X checkpoint what that does not hold.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable

import numpy as np

from specdec_jax.formats import eight_bits, tensorstore_arrays
from specdec_jax.formats.leaves import Checkpoint, Leaf, Track, flatten
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.heads import HeadsConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.vocabularies import ByteVocabulary, SentencePieceVocabulary, TokenizerJsonVocabulary, Vocabulary
from specdec_jax.writing import new_folder, write_file

FORMAT, VERSION = "specdec_jax", 1
_CONFIGS = {"t5": T5Config, "gpt": GPTConfig}


def is_folder(folder: pathlib.Path, kind: str = "model") -> bool:
    """Whether `folder` holds a model, the heads of one (`kind` "heads"), or what is to be known of a T5X checkpoint ("t5x")."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return content.get("format") == FORMAT and content.get("kind", "model") == kind
    except (OSError, ValueError, AttributeError):
        return False


def open_folder(folder: pathlib.Path) -> Checkpoint:
    """Opens a folder that `write_folder` wrote, without reading its parameters."""
    stored = tensorstore_arrays.open_ocdbt(folder / "params", dtypes_of=eight_bits.dtypes_of)
    return dataclasses.replace(open_description(folder), leaves=eight_bits.joined(stored, folder))


def open_description(folder: pathlib.Path) -> Checkpoint:
    """All that `write_description` wrote; no leaves."""
    path, content = folder / "config.json", _read_record(folder)
    try:
        shape = _CONFIGS[content.get("architecture", "t5")]  # the first models were all T5s, and do not say so
        config, eos_ids = shape(**content["model"]), tuple(content["eos_ids"])
        start, vocabulary = content["start_token"], content["vocabulary"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: got no readable model configuration ({error}), expected this package's") from None
    vocabulary = vocabulary and _open_vocabulary(folder, vocabulary)
    return Checkpoint(config, {}, vocabulary, start, eos_ids, content.get("encoder_fingerprint"))


def open_heads(folder: pathlib.Path) -> tuple[HeadsConfig, str, dict[str, Leaf]]:
    """The shape of the heads that `write_heads` wrote, the fingerprint of their target, and their parameters, not yet read."""
    if not is_folder(folder, "heads"):
        raise ValueError(f"{folder}: got no heads, expected a folder with heads of this package")
    path, content = folder / "config.json", _read_record(folder)
    try:
        config, fingerprint = HeadsConfig(**content["heads"]), content["target_fingerprint"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: got no readable configuration of heads ({error}), expected this package's") from None
    return config, fingerprint, tensorstore_arrays.open_ocdbt(folder / "params")


def _read_record(folder: pathlib.Path) -> dict:
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("version") != VERSION:
        raise ValueError(f"{path}: got version {content.get('version')!r}, expected {VERSION}")
    return content


def _open_vocabulary(folder: pathlib.Path, entry: dict) -> Vocabulary:
    kind, extra_ids = entry.get("kind"), entry.get("extra_ids", 0)
    if kind == "bytes":
        return ByteVocabulary(extra_ids)
    name = entry.get("file", "")
    places = [place / name for place in (folder, folder.absolute().parent)]  # a pair of models shares the parent's
    path = next((place for place in places if place.is_file()), None)
    if path is None or kind not in ("sentencepiece", "tokenizer_json"):
        raise ValueError(f"{folder}: got no vocabulary {kind} {name!r}, expected it there or in the folder above")
    if kind == "tokenizer_json":
        return TokenizerJsonVocabulary.load(path, tuple(entry["eos_ids"]))
    return SentencePieceVocabulary.load(path, extra_ids)


def vocabulary_contents(vocabulary: Vocabulary | None) -> bytes:
    """All that decides how text becomes ids and ids become text, of which the pieces are but a part."""
    entry, contents = _describe_vocabulary(vocabulary)
    return json.dumps(entry).encode() + contents


def _describe_vocabulary(vocabulary: Vocabulary | None) -> tuple[dict | None, bytes]:
    """The entry of config.json and the contents of the vocabulary's file."""
    if vocabulary is None:
        return None, b""
    if isinstance(vocabulary, SentencePieceVocabulary):
        entry = {"kind": "sentencepiece", "file": "spiece.model", "extra_ids": vocabulary.extra_ids}
        return entry, vocabulary.model
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        entry = {"kind": "tokenizer_json", "file": "tokenizer.json", "eos_ids": list(vocabulary.eos_ids)}
        return entry, vocabulary.text.encode("utf-8")
    if isinstance(vocabulary, ByteVocabulary):
        return {"kind": "bytes", "extra_ids": vocabulary.extra_ids}, b""
    raise ValueError(f"vocabulary: got {type(vocabulary).__name__}, expected one that this package can store")


def write_folder(checkpoint: Checkpoint, dtype: str, folder: pathlib.Path, track: Track = iter) -> None:
    """Writes config.json, the vocabulary and the parameters into an empty folder; "int8" is of matrices (`eight_bits.py`)."""
    write_description(checkpoint, folder)
    names = track(list(checkpoint.leaves))
    load = lambda name: checkpoint.leaves[name].load("float32" if dtype == "int8" else dtype)
    stored = lambda name: eight_bits.divided(name, load(name)) if dtype == "int8" else {name: load(name)}
    _write_params((item for name in names for item in stored(name).items()), folder)


def write_description(checkpoint: Checkpoint, folder: pathlib.Path, kind: str = "model") -> None:
    """Writes config.json with everything but the parameters, and the vocabulary's file unless the folder above holds the same."""
    entry, contents = _describe_vocabulary(checkpoint.vocabulary)
    architecture = next(name for name, shape in _CONFIGS.items() if isinstance(checkpoint.config, shape))
    record = {
        **_head(kind), "architecture": architecture, "model": dataclasses.asdict(checkpoint.config),
        "start_token": checkpoint.start_token,
        "eos_ids": list(checkpoint.eos_ids), "vocabulary": entry,
    }  # fmt: skip
    if checkpoint.encoder_fingerprint is not None:
        record["encoder_fingerprint"] = checkpoint.encoder_fingerprint
    _write_record(record, folder)
    if contents and not _same(folder.parent / entry["file"], contents):
        write_file(folder / entry["file"], contents)


def write_heads(config: HeadsConfig, fingerprint: str, params: dict, folder: pathlib.Path) -> None:
    """Writes heads on the target with this fingerprint; earlier ones there are replaced, anything else is refused."""
    with new_folder(folder, lambda place: check_free(place, "heads")) as temporary:
        heads = {"heads": dataclasses.asdict(config), "target_fingerprint": fingerprint}
        _write_record(_head("heads") | heads, temporary)
        _write_params(((name, np.asarray(array)) for name, array in flatten(params).items()), temporary)


def check_free(folder: pathlib.Path, kind: str = "model") -> None:
    """Raises ValueError where `folder` is something else than a folder of this kind."""
    if folder.exists() and not is_folder(folder, kind):
        raise ValueError(f"{folder}: got something that is no {kind} folder of this package, expected nothing there")


def _head(kind: str) -> dict:
    return {"format": FORMAT, "version": VERSION} | ({} if kind == "model" else {"kind": kind})


def _write_record(record: dict, folder: pathlib.Path) -> None:
    write_file(folder / "config.json", json.dumps(record, indent=1) + "\n")


def _same(path: pathlib.Path, contents: bytes) -> bool:
    return path.is_file() and path.read_bytes() == contents


def _write_params(arrays: Iterable[tuple[str, np.ndarray]], folder: pathlib.Path) -> None:
    (folder / "params").mkdir()
    tensorstore_arrays.write_ocdbt(((tuple(name.split("/")), array) for name, array in arrays), folder / "params")
