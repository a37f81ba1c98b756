"""Reads and writes this package's own folders.

A folder has a config.json, a vocabulary's file here or in the folder above, and Orbax arrays in
params/. It holds a model, or what was trained on a target's states and has no vocabulary: heads, or
an EAGLE drafter, whose model has a folder in it. Beside a T5X checkpoint a config.json without
params/ holds what that format has no place for.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from specdec_jax.checkpoints import int8, tensorstore_arrays
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Parameters, Report, iterate_names
from specdec_jax.files import reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.files.writing import open_new_folder, write_file
from specdec_jax.models.config_validation import Shape, build
from specdec_jax.models.families import describe, find_family
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.models.parameters import flatten
from specdec_jax.tokenizers import vocabularies
from specdec_jax.tokenizers.languages import Languages
from specdec_jax.tokenizers.piece_tables import PieceTableVocabulary
from specdec_jax.tokenizers.vocabularies import Vocabulary

FORMAT, VERSION = "specdec_jax", 1
_TARGET = "target_fingerprint"  # a field of a config.json of what is trained on its states
# What is trained on a target's states and drafts for no other, by the kind of its folder.
PARTS = {"heads": "heads", "eagle": "parts of an EAGLE drafter"}


def is_folder(folder: AnyPath, kind: str = "model") -> bool:
    """Returns whether `folder` is of this package and this kind.

    Kinds are "model", those of `PARTS`, and "t5x", a T5X checkpoint with our config.json.
    """
    try:
        content = reading.read_json(folder / "config.json")
    except ValueError:
        return False
    return content.get("format") == FORMAT and content.get("kind", "model") == kind


def open_folder(folder: AnyPath) -> Checkpoint:
    """Opens a folder that `write_folder` wrote, without reading its parameters."""
    stored = tensorstore_arrays.open_ocdbt(folder / "params", allowed_dtypes=int8.allowed_dtypes)
    return dataclasses.replace(open_description(folder), parameters=int8.join_parts(stored, folder))


def open_description(folder: AnyPath) -> Checkpoint:
    """Returns what `write_description` wrote, as a checkpoint without parameters."""
    path, content = folder / "config.json", _read_record(folder)
    try:
        shape = find_family(content.get("architecture"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    config = build(shape, content.get("model"), path)
    kinds = {
        "eos_ids": (list, "a list of ids"),
        "vocabulary": (dict, "an object"),
        "encoder_fingerprint": (str, "a string"),
        "generation_config": (dict, "an object"),
    }
    given = {name: content.get(name) for name in kinds}
    for name, (kind, expected) in kinds.items():
        if given[name] is not None and not isinstance(given[name], kind):
            raise mismatch_error(f"{path}: {name}", quote_value(given[name]), expected)
    eos_ids, entry, encoder, options = given.values()
    defaults = ModelDefaults.read(options or {}, path)
    return Checkpoint(
        config,
        {},
        None if entry is None else open_vocabulary(folder, entry),
        content.get("start_token"),
        None if eos_ids is None else tuple(eos_ids),
        encoder,
        defaults,
        defaults.lines(folder, path.name),
    )


def open_part(folder: AnyPath, kind: str, shape: type[Shape]) -> tuple[Shape, str, Parameters]:
    """Opens a folder that `write_part` wrote, without reading its parameters.

    Args:
      folder: the folder.
      kind: as for `write_part`.
      shape: the class of the configuration.

    Returns:
      The configuration, the fingerprint of the target, and the parameters.
    """
    if not is_folder(folder, kind):
        name = PARTS[kind]
        raise mismatch_error(folder, f"no {name}", f"a folder with {name} of this package")
    path, content = folder / "config.json", _read_record(folder)
    config, fingerprint = build(shape, content.get(kind), path), content.get(_TARGET)
    if not isinstance(fingerprint, str):
        raise mismatch_error(f"{path}: {_TARGET}", quote_value(fingerprint), "a string")
    return config, fingerprint, tensorstore_arrays.open_ocdbt(folder / "params")


def _read_record(folder: AnyPath) -> dict:
    path = folder / "config.json"
    content = reading.read_json(path)
    if (version := content.get("version")) != VERSION:
        raise mismatch_error(path, f"version {quote_value(version)}", VERSION)
    return content


def open_vocabulary(folder: AnyPath, entry: dict) -> Vocabulary:
    """Returns the vocabulary of an entry in config.json, from `folder` or the one above."""
    kind, extra_ids, file = entry.get("kind"), entry.get("extra_ids", 0), folder / "config.json"
    if kind == "bytes":
        count = vocabularies.check_extra_ids(extra_ids, file)
        return vocabularies.ByteVocabulary(count, entry.get("strips") is not False)
    if kind not in ("sentencepiece", "tokenizer_json", "piece_table"):
        raise mismatch_error(
            f"{file}: vocabulary", f"kind {quote_value(kind)}", "one of this package"
        )
    # A target and a drafter may share the file in the folder above theirs.
    folders, name = (folder, folder.absolute().parent), entry.get("file")
    places = [reading.join_inside(place, name, file) for place in folders]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise mismatch_error(
            folder, f"no vocabulary {places[0].name}", "it there or in the folder above"
        )
    if kind == "piece_table":
        return PieceTableVocabulary.load(path)
    vocabulary: Vocabulary
    if kind == "sentencepiece":
        count = vocabularies.check_extra_ids(extra_ids, file)
        vocabulary = vocabularies.SentencePieceVocabulary.load(path, count)
    else:
        vocabulary = vocabularies.TokenizerJsonVocabulary.load(path, entry.get("eos_ids", ()))
    if (pad_id := entry.get("pad_id")) is not None:
        if type(pad_id) is not int or not 0 <= pad_id < vocabulary.size:
            expected = f"an id below {vocabulary.size}"
            raise mismatch_error(f"{file}: vocabulary: pad_id", quote_value(pad_id), expected)
        vocabulary.set_pad_id(pad_id)
    languages = entry.get("languages")
    if languages is not None and isinstance(vocabulary, vocabularies.TokenizerJsonVocabulary):
        try:
            vocabulary.set_languages(Languages.read(languages, vocabulary.size))
        except ValueError as error:
            raise ValueError(f"{file}: vocabulary: {error}") from None
    return vocabulary


def vocabulary_contents(vocabulary: Vocabulary | None) -> bytes:
    """Returns bytes that decide how text becomes ids and ids become text; pieces alone do not."""
    entry, contents = describe_vocabulary(vocabulary)
    return json.dumps(entry).encode() + contents


def describe_vocabulary(vocabulary: Vocabulary | None) -> tuple[dict | None, bytes]:
    """Returns a vocabulary's entry in config.json and the contents of its file, b"" without one."""
    if vocabulary is None:
        return None, b""
    given = getattr(vocabulary, "given_pad_id", None)
    own = {} if given is None else {"pad_id": given}
    if isinstance(vocabulary, vocabularies.SentencePieceVocabulary):
        entry = {"kind": "sentencepiece", "file": "spiece.model", "extra_ids": vocabulary.extra_ids}
        return entry | own, vocabulary.model
    if isinstance(vocabulary, vocabularies.TokenizerJsonVocabulary):
        entry = {"kind": "tokenizer_json", "file": "tokenizer.json"}
        entry |= {"eos_ids": list(vocabulary.eos_ids)} | own
        if vocabulary.languages is not None:
            entry["languages"] = vocabulary.languages.written()
        return entry, vocabulary.text.encode("utf-8")
    if isinstance(vocabulary, PieceTableVocabulary):
        return {"kind": "piece_table", "file": "pieces.json"}, vocabulary.text.encode("utf-8")
    if isinstance(vocabulary, vocabularies.ByteVocabulary):
        own = {} if vocabulary.strips else {"strips": False}
        return {"kind": "bytes", "extra_ids": vocabulary.extra_ids} | own, b""
    raise mismatch_error("vocabulary", type(vocabulary).__name__, "one that this package can store")


def write_folder(checkpoint: Checkpoint, dtype: str, folder: pathlib.Path, report: Report) -> None:
    """Writes config.json, the vocabulary and the parameters into an empty folder.

    "int8" rounds matrices only (see `int8.py`).
    """
    write_description(checkpoint, folder)
    _write_params(_load_arrays(checkpoint.parameters, dtype, report), folder)


def _load_arrays(
    parameters: Parameters, dtype: str, report: Report
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays that are stored for the parameters, one at a time, by name."""
    for name in iterate_names(parameters, report):
        if dtype == "int8":
            yield from int8.load_quantized(name, parameters[name]).items()
        else:
            yield name, parameters[name].load(dtype)


def write_description(checkpoint: Checkpoint, folder: pathlib.Path, kind: str = "model") -> None:
    """Writes config.json with everything but the parameters, and the vocabulary's file.

    The file is left out if the folder above holds the same.
    """
    assert checkpoint.eos_ids is not None
    entry, contents = describe_vocabulary(checkpoint.vocabulary)
    described = describe(checkpoint.config)
    record = {
        **_make_header(kind),
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
    if entry and contents:
        above = folder.parent / entry["file"]
        if not (above.is_file() and above.read_bytes() == contents):
            write_file(folder / entry["file"], contents)


@contextlib.contextmanager
def write_part(
    folder: AnyPath, kind: str, config: Any, fingerprint: str, params: dict
) -> Iterator[pathlib.Path]:
    """Writes what was trained on the states of the target with this fingerprint.

    It replaces only a folder of its kind. The block may write more into the folder that it gets,
    which takes the name `folder` when the block ends.

    Args:
      folder: the folder.
      kind: a name of `PARTS`.
      config: the configuration, a dataclass.
      fingerprint: the target's fingerprint.
      params: parameters as a nested dict.
    """
    with open_new_folder(folder, functools.partial(check_free, kind=kind)) as temporary:
        described = {kind: dataclasses.asdict(config), _TARGET: fingerprint}
        _write_record(_make_header(kind) | described, temporary)
        arrays = ((name, np.asarray(array)) for name, array in flatten(params).items())
        _write_params(arrays, temporary)
        yield temporary


def check_free(folder: AnyPath, kind: str = "model") -> None:
    """Raises ValueError if something other than a folder of this kind is at `folder`."""
    if folder.exists() and not is_folder(folder, kind):
        got = f"something that is no {kind} folder of this package"
        raise ValueError(f"{folder}: got {got}, expected nothing there")


def _make_header(kind: str) -> dict:
    return {"format": FORMAT, "version": VERSION} | ({} if kind == "model" else {"kind": kind})


def _write_record(record: dict, folder: pathlib.Path) -> None:
    write_file(folder / "config.json", json.dumps(record, indent=1) + "\n")


def _write_params(arrays: Iterable[tuple[str, np.ndarray]], folder: pathlib.Path) -> None:
    (folder / "params").mkdir()
    paths = ((tuple(name.split("/")), array) for name, array in arrays)
    tensorstore_arrays.write_ocdbt(paths, folder / "params")
