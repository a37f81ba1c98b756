"""The vocabulary and special ids of a training run: a model's, a file's, or of its own texts."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specdec_jax.checkpoints import loader, native_format
from specdec_jax.files import places, reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.writing import write_file
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.tokenizers.vocabularies import (
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
)
from specdec_jax.training.corpus import Corpus

TRAINED, _RECORD = "vocabulary.model", "vocabulary.json"  # files in a run's folder


class RunVocabulary(NamedTuple):
    """What makes ids of a run's texts, and the special ids of its model.

    Attributes:
      vocabulary: maps text to ids.
      start_token: id that every sequence of the decoder begins with.
      eos_ids: ids that end a sequence of the model.
      generation_config: how the model decodes where a call does not choose otherwise.
    """

    vocabulary: Vocabulary
    start_token: int
    eos_ids: tuple[int, ...]
    generation_config: ModelDefaults = ModelDefaults()

    def write(self, folder: pathlib.Path) -> None:
        """Writes a record, and the vocabulary's file, from which `read` makes the same."""
        entry, contents = native_format.describe_vocabulary(self.vocabulary)
        assert entry is not None
        if entry["kind"] == "sentencepiece":
            entry |= {"file": TRAINED}
        if contents:
            write_file(folder / entry["file"], contents)
        ids: dict[str, Any] = {"start_token": self.start_token, "eos_ids": list(self.eos_ids)}
        if defaults := self.generation_config.written():
            ids["generation_config"] = defaults
        write_file(folder / _RECORD, json.dumps({"vocabulary": entry} | ids, indent=1) + "\n")

    @classmethod
    def read(cls, folder: pathlib.Path) -> "RunVocabulary":
        """Returns what `write` wrote; raises ValueError for anything else."""
        record = reading.read_json(folder / _RECORD)
        try:
            entry, start, ends = (record[name] for name in ("vocabulary", "start_token", "eos_ids"))
            if not all(type(i) is int for i in (start, *ends)):
                raise TypeError("ids")
            defaults = ModelDefaults.read(record.get("generation_config", {}), folder / _RECORD)
            vocabulary = native_format.open_vocabulary(folder, entry)
            return cls(vocabulary, start, tuple(ends), defaults)
        except (KeyError, TypeError, AttributeError) as error:
            got = f"{folder / _RECORD}: got {reading.quote_value(record)}"
            expected = "the vocabulary and special ids of a training run"
            raise ValueError(f"{got}, expected {expected}") from error

    @classmethod
    def from_checkpoint(cls, path: str, name: str) -> "RunVocabulary":
        """Returns the vocabulary and special ids of a checkpoint, whose parameters are not read.

        `name` is what it is called in messages. Raises ValueError if there is no such checkpoint,
        or it has no vocabulary.
        """
        folder = loader.resolve(path)
        return cls._from_parts(loader.open_complete(folder), path, name)

    @classmethod
    def from_model(cls, model: LanguageModel, name: str) -> "RunVocabulary":
        """Returns the vocabulary and special ids of a model; raises ValueError if it has none."""
        return cls._from_parts(model, model.name, name)

    @classmethod
    def _from_parts(cls, model: Any, path: str, name: str) -> "RunVocabulary":
        if model.vocabulary is None:
            expected = "one with a vocabulary (spiece.model or tokenizer.json)"
            raise ValueError(f"{name}: got {path} without a vocabulary, expected {expected}")
        defaults = model.generation_config or ModelDefaults()
        return cls(model.vocabulary, model.start_token, tuple(model.eos_ids), defaults)


def check_same(name: str, got: RunVocabulary, other: str, expected: RunVocabulary) -> None:
    """Raises ValueError unless both models read and write the same ids."""
    if got.vocabulary.fingerprint() != expected.vocabulary.fingerprint():
        raise ValueError(f"{name}: got another vocabulary, expected {other}'s tokens")
    if got.start_token != expected.start_token:
        wanted = f"{other}'s, {expected.start_token}"
        raise ValueError(f"{name}: got start token {got.start_token}, expected {wanted}")


def choose_vocabulary(
    path: str,
    output: pathlib.Path,
    size: int,
    given: Mapping[str, RunVocabulary],
    corpus: Corpus,
    make: Callable[[], bytes],
) -> RunVocabulary:
    """Returns the vocabulary of the models that a run begins with, else of a file, else a new one.

    Args:
      path: file of a SentencePiece model or a tokenizer.json; written if there is none; "": in
        `output`.
      output: the run's folder.
      size: number of ids, sentinels included.
      given: what the models have that a run begins with, by the models' names in messages. All must
        have the same tokens, and the file too.
      corpus: knows what a sequence begins with if no model does.
      make: trains a SentencePiece model if there is neither a model nor a file.

    Raises:
      ValueError: there are other tokens at `path`, or another number of them.
    """
    owner = next(iter(given), None)
    for name, special in given.items():
        check_same(name, special, str(owner), next(iter(given.values())))
    file = places.make_path(path) if path else output / TRAINED
    kept = None if owner is None else given[owner].vocabulary
    if file.exists() and (path or kept is None or isinstance(kept, SentencePieceVocabulary)):
        loaded = _load(file, kept)
        if kept is not None and kept.fingerprint() != loaded.fingerprint():
            raise ValueError(f"vocabulary: got {file}, expected {owner}'s tokens")
    elif kept is None or isinstance(kept, SentencePieceVocabulary) or path:
        if isinstance(file, pathlib.Path):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, make() if kept is None else _file_contents(kept, file, str(owner)))
    vocabulary = _load(file, None) if kept is None else kept
    if vocabulary.size != size:
        extra = getattr(vocabulary, "extra_ids", 0)
        got = f"{vocabulary.size - extra} tokens of {owner or file}"
        got += f" and {extra} sentinels" if extra else ""
        raise ValueError(f"vocabulary: got {got}, expected vocabulary_size = {size}")
    if owner is not None:
        return given[owner]
    return RunVocabulary(vocabulary, corpus.start_token(vocabulary), vocabulary.eos_ids)


def _load(file: AnyPath, kept: Vocabulary | None) -> Vocabulary:
    if file.suffix == ".json":
        return TokenizerJsonVocabulary.load(file)
    extra_ids = kept.extra_ids if isinstance(kept, SentencePieceVocabulary) else 0
    return SentencePieceVocabulary.load(file, extra_ids)


def _file_contents(vocabulary: Vocabulary, file: AnyPath, owner: str) -> bytes:
    """Returns what to write to a file of the vocabulary's kind."""
    entry, contents = native_format.describe_vocabulary(vocabulary)
    assert entry is not None
    if not contents or (file.suffix == ".json") != (entry["kind"] == "tokenizer_json"):
        expected = "none: bytes need no file" if not contents else f"a name like {entry['file']}"
        got = f"{str(file)!r} for {owner}'s vocabulary"
        raise ValueError(f"vocabulary: got {got}, expected {expected}")
    return contents
