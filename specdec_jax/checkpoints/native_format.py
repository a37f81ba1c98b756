"""Reads and writes this package's own folders: config.json, a vocabulary file here or in the folder
above, and Orbax arrays in params/.

They hold a model, or heads, which have no vocabulary. Beside a T5X checkpoint a config.json without
params/ holds what that format has no place for.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable

import numpy as np

from specdec_jax.checkpoints import int8, tensorstore_arrays
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Leaf, Report, reporting
from specdec_jax.files import reading
from specdec_jax.files.writing import new_folder, write_file
from specdec_jax.models.config_validation import build
from specdec_jax.models.families import describe, family_of
from specdec_jax.models.generation_config import GenerationConfig
from specdec_jax.models.heads import HeadsConfig
from specdec_jax.models.parameters import flatten
from specdec_jax.tokenizers.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
    check_extra_ids,
)

FORMAT, VERSION = "specdec_jax", 1


def is_folder(folder: pathlib.Path, kind: str = "model") -> bool:
    """Returns whether `folder` is of this package and this kind: "model", "heads", or "t5x" for a
    T5X checkpoint with our config.json."""
    try:
        content = reading.read_json(folder / "config.json")
    except ValueError:
        return False
    return content.get("format") == FORMAT and content.get("kind", "model") == kind


def open_folder(folder: pathlib.Path) -> Checkpoint:
    """Opens a folder that `write_folder` wrote, without reading its parameters."""
    stored = tensorstore_arrays.open_ocdbt(folder / "params", dtypes_of=int8.dtypes_of)
    return dataclasses.replace(open_description(folder), leaves=int8.join(stored, folder))


def open_description(folder: pathlib.Path) -> Checkpoint:
    """Returns what `write_description` wrote, as a checkpoint without leaves."""
    path, content = folder / "config.json", _read_record(folder)
    try:
        shape = family_of(
            content.get("architecture", "t5")
        )  # the first models were all T5s and do not say so
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    config = build(shape, content.get("model"), path)
    eos_ids, entry, encoder = (
        content.get(name) for name in ("eos_ids", "vocabulary", "encoder_fingerprint")
    )
    for name, value, kind, expected in (
        ("eos_ids", [] if eos_ids is None else eos_ids, list, "a list of ids"),
        ("vocabulary", {} if entry is None else entry, dict, "an object"),
        ("encoder_fingerprint", "" if encoder is None else encoder, str, "a string"),
        ("generation_config", content.get("generation_config") or {}, dict, "an object"),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{path}: {name}: got {reading.shown(value)}, expected {expected}")
    vocabulary = None if entry is None else open_vocabulary(folder, entry)
    defaults = GenerationConfig.read(content.get("generation_config") or {}, path)
    return Checkpoint(
        config,
        {},
        vocabulary,
        content.get("start_token"),
        None if eos_ids is None else tuple(eos_ids),
        encoder,
        defaults,
        defaults.lines(folder, path.name),
    )


def open_heads(folder: pathlib.Path) -> tuple[HeadsConfig, str, dict[str, Leaf]]:
    """Returns the shape of the heads that `write_heads` wrote, the fingerprint of their target, and
    their parameters, not yet read."""
    if not is_folder(folder, "heads"):
        raise ValueError(f"{folder}: got no heads, expected a folder with heads of this package")
    path, content = folder / "config.json", _read_record(folder)
    config, fingerprint = (
        build(HeadsConfig, content.get("heads"), path),
        content.get("target_fingerprint"),
    )
    if not isinstance(fingerprint, str):
        raise ValueError(
            f"{path}: target_fingerprint: got {reading.shown(fingerprint)}, expected a string"
        )
    return config, fingerprint, tensorstore_arrays.open_ocdbt(folder / "params")


def _read_record(folder: pathlib.Path) -> dict:
    path = folder / "config.json"
    content = reading.read_json(path)
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path}: got version {reading.shown(content.get('version'))}, expected {VERSION}"
        )
    return content


def open_vocabulary(folder: pathlib.Path, entry: dict) -> Vocabulary:
    """Returns the vocabulary of an entry in config.json, from `folder` or the one above."""
    kind, extra_ids, file = entry.get("kind"), entry.get("extra_ids", 0), folder / "config.json"
    if kind == "bytes":
        return ByteVocabulary(check_extra_ids(extra_ids, file))
    if kind not in ("sentencepiece", "tokenizer_json"):
        raise ValueError(
            f"{file}: vocabulary: got kind {reading.shown(kind)}, expected one of this package"
        )
    # A target and a drafter may share the file in the folder above theirs.
    places = [
        reading.inside(place, entry.get("file"), file)
        for place in (folder, folder.absolute().parent)
    ]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ValueError(
            f"{folder}: got no vocabulary {places[0].name}, expected it there or in the folder above"
        )
    if kind == "sentencepiece":
        return SentencePieceVocabulary.load(path, check_extra_ids(extra_ids, file))
    return TokenizerJsonVocabulary.load(path, entry.get("eos_ids", ()))


def vocabulary_contents(vocabulary: Vocabulary | None) -> bytes:
    """Returns bytes that hold everything that decides how text becomes ids and ids become text; the
    pieces alone do not."""
    entry, contents = describe_vocabulary(vocabulary)
    return json.dumps(entry).encode() + contents


def describe_vocabulary(vocabulary: Vocabulary | None) -> tuple[dict | None, bytes]:
    """Returns a vocabulary's entry in config.json, and the contents of its file (b"": it has none)."""
    if vocabulary is None:
        return None, b""
    if isinstance(vocabulary, SentencePieceVocabulary):
        entry = {"kind": "sentencepiece", "file": "spiece.model", "extra_ids": vocabulary.extra_ids}
        return entry, vocabulary.model
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        entry = {
            "kind": "tokenizer_json",
            "file": "tokenizer.json",
            "eos_ids": list(vocabulary.eos_ids),
        }
        return entry, vocabulary.text.encode("utf-8")
    if isinstance(vocabulary, ByteVocabulary):
        return {"kind": "bytes", "extra_ids": vocabulary.extra_ids}, b""
    raise ValueError(
        f"vocabulary: got {type(vocabulary).__name__}, expected one that this package can store"
    )


def write_folder(checkpoint: Checkpoint, dtype: str, folder: pathlib.Path, report: Report) -> None:
    """Writes config.json, the vocabulary and the parameters into an empty folder; "int8" rounds
    matrices only (see `int8.py`)."""
    write_description(checkpoint, folder)
    leaves = checkpoint.leaves

    def stored(name):
        return (
            int8.written(name, leaves[name])
            if dtype == "int8"
            else {name: leaves[name].load(dtype)}
        )

    _write_params(
        (item for name in reporting(leaves, report) for item in stored(name).items()), folder
    )


def write_description(checkpoint: Checkpoint, folder: pathlib.Path, kind: str = "model") -> None:
    """Writes config.json with everything but the parameters, and the vocabulary's file unless the
    folder above holds the same."""
    assert checkpoint.eos_ids is not None
    entry, contents = describe_vocabulary(checkpoint.vocabulary)
    described = describe(checkpoint.config)
    record = {
        **_head(kind),
        "architecture": described.pop("architecture"),
        "model": described,
        "start_token": checkpoint.start_token,
        "eos_ids": list(checkpoint.eos_ids),
        "vocabulary": entry,
    }
    if defaults := checkpoint.generation_config.written():
        record["generation_config"] = defaults
    if checkpoint.encoder_fingerprint is not None:
        record["encoder_fingerprint"] = checkpoint.encoder_fingerprint
    _write_record(record, folder)
    if entry and contents and not _same(folder.parent / entry["file"], contents):
        write_file(folder / entry["file"], contents)


def write_heads(config: HeadsConfig, fingerprint: str, params: dict, folder: pathlib.Path) -> None:
    """Writes the heads of the target with this fingerprint; replaces earlier heads there and
    rejects anything else."""
    with new_folder(folder, lambda place: check_free(place, "heads")) as temporary:
        heads = {"heads": dataclasses.asdict(config), "target_fingerprint": fingerprint}
        _write_record(_head("heads") | heads, temporary)
        _write_params(
            ((name, np.asarray(array)) for name, array in flatten(params).items()), temporary
        )


def check_free(folder: pathlib.Path, kind: str = "model") -> None:
    """Raises ValueError if something other than a folder of this kind is at `folder`."""
    if folder.exists() and not is_folder(folder, kind):
        raise ValueError(
            f"{folder}: got something that is no {kind} folder of this package, expected nothing there"
        )


def _head(kind: str) -> dict:
    return {"format": FORMAT, "version": VERSION} | ({} if kind == "model" else {"kind": kind})


def _write_record(record: dict, folder: pathlib.Path) -> None:
    write_file(folder / "config.json", json.dumps(record, indent=1) + "\n")


def _same(path: pathlib.Path, contents: bytes) -> bool:
    return path.is_file() and path.read_bytes() == contents


def _write_params(arrays: Iterable[tuple[str, np.ndarray]], folder: pathlib.Path) -> None:
    (folder / "params").mkdir()
    tensorstore_arrays.write_ocdbt(
        ((tuple(name.split("/")), array) for name, array in arrays), folder / "params"
    )
