"""This package's own folders: config.json, a vocabulary file here or in the folder above, Orbax arrays in params/.

Models, and heads, which have no vocabulary.
"""

import dataclasses
import json
import os
import pathlib
import shutil

import jax
import numpy as np

from specdec_jax.formats import tensorstore_arrays
from specdec_jax.formats.leaves import Checkpoint, Leaf
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.heads import HeadsConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.vocabularies import ByteVocabulary, SentencePieceVocabulary, TokenizerJsonVocabulary, Vocabulary

FORMAT, VERSION = "specdec_jax", 1
_CONFIGS = {"t5": T5Config, "gpt": GPTConfig}


def is_folder(folder: pathlib.Path, kind: str = "model") -> bool:
    """Whether `folder` holds a model, or the heads of one (`kind` "heads")."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return content.get("format") == FORMAT and content.get("kind", "model") == kind
    except (OSError, ValueError, AttributeError):
        return False


def open_folder(folder: pathlib.Path) -> Checkpoint:
    """Opens a folder that `write_folder` wrote, without reading its parameters."""
    path, content = folder / "config.json", _read_record(folder)
    try:
        shape = _CONFIGS[content.get("architecture", "t5")]  # the first models were all T5s, and do not say so
        config, eos_ids = shape(**content["model"]), tuple(content["eos_ids"])
        start, vocabulary = content["start_token"], content["vocabulary"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: got no readable model configuration ({error}), expected this package's") from None
    leaves = tensorstore_arrays.open_ocdbt(folder / "params")
    return Checkpoint(config, leaves, vocabulary and _open_vocabulary(folder, vocabulary), start, eos_ids)


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


def write_folder(checkpoint: Checkpoint, params: dict, folder: pathlib.Path) -> None:
    """Writes a model folder under a temporary name, then renames it.

    Args:
      checkpoint: configuration, special ids and vocabulary; its leaves do not matter.
      params: nested dict of arrays, in the dtype in which they are to be stored.
      folder: an earlier model folder there is replaced; anything else there is refused.
    """
    _check_free(folder, "model")
    entry, contents = _describe_vocabulary(checkpoint.vocabulary)
    model = dataclasses.asdict(checkpoint.config)
    architecture = next(name for name, shape in _CONFIGS.items() if isinstance(checkpoint.config, shape))
    record = {
        "format": FORMAT, "version": VERSION, "architecture": architecture, "model": model, "start_token": checkpoint.start_token,
        "eos_ids": list(checkpoint.eos_ids), "vocabulary": entry,
    }  # fmt: skip
    beside = contents and not _same(folder.parent / entry["file"], contents)
    _write(record, {entry["file"]: contents} if beside else {}, params, folder)


def write_heads(config: HeadsConfig, fingerprint: str, params: dict, folder: pathlib.Path) -> None:
    """As `write_folder`, for heads on the target with this fingerprint."""
    _check_free(folder, "heads")
    record = {"format": FORMAT, "version": VERSION, "kind": "heads", "heads": dataclasses.asdict(config)}
    _write(record | {"target_fingerprint": fingerprint}, {}, params, folder)


def _check_free(folder: pathlib.Path, kind: str) -> None:
    if folder.exists() and not is_folder(folder, kind):
        raise ValueError(f"{folder}: got something that is no {kind} folder of this package, expected nothing there")


def _write(record: dict, files: dict[str, bytes], params: dict, folder: pathlib.Path) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        (temporary / "config.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for name, contents in files.items():
            (temporary / name).write_bytes(contents)
        _write_params(params, temporary / "params")
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
            os.rename(folder, old)
            os.rename(temporary, folder)
            shutil.rmtree(old)
        else:
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _same(path: pathlib.Path, contents: bytes) -> bool:
    return path.is_file() and path.read_bytes() == contents


def _write_params(params: dict, path: pathlib.Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), jax.tree.map(np.asarray, params))
    # Orbax's marker of a finished save names the temporary folder, a path of this machine; the renaming says as much.
    (path / "commit_success.txt").unlink(missing_ok=True)
