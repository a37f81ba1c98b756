"""Reads and writes Hugging Face folders; what differs between families is in
`huggingface_FAMILY.py`."""

import json
import pathlib
from typing import Any

from specdec_jax.checkpoints import (
    huggingface_gpt,
    huggingface_t5,
    huggingface_weights,
    safetensors_files,
)
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Report
from specdec_jax.files import reading
from specdec_jax.files.writing import write_file
from specdec_jax.models.generation_config import GenerationConfig
from specdec_jax.tokenizers import huggingface_folders
from specdec_jax.tokenizers.huggingface_folders import first, optional

_READERS: tuple[Any, ...] = (huggingface_t5, huggingface_gpt)
_READER_OF = {
    kind: reader for reader in _READERS for kind in reader.ARCHITECTURES
}  # by config.json's model_type
WRITERS = {"t5": huggingface_t5}  # by the name of our family


def is_folder(folder: pathlib.Path) -> bool:
    """Returns whether `folder` looks like a Hugging Face model: it has a config.json, or weights
    under a name that Hugging Face uses."""
    return (folder / "config.json").exists() or bool(huggingface_weights.present(folder))


def open_folder(folder: pathlib.Path) -> Checkpoint:
    """Opens a Hugging Face folder without reading its parameters.

    Raises:
      ValueError: no weights in a readable format, an unknown architecture, or damaged files.
    """
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: got no config.json, expected one beside the weights")
    options, generation = (
        reading.read_json(folder / "config.json"),
        optional(folder / "generation_config.json"),
    )
    reader = _reader(folder, options)
    options = reader.SPECIAL_IDS | options
    tensors, notes = huggingface_weights.open_tensors(folder)
    config, leaves = reader.open_model(folder, options, tensors)
    start = _ids(folder, generation, options, reader.START) or (0,)
    if len(start) > 1:
        raise ValueError(
            f"{folder / 'config.json'}: got the start tokens {reading.shown(start)}, expected one"
        )
    eos_ids = first(_ids(folder, generation, options, "eos_token_id"), reader.NO_EOS)
    vocabulary = huggingface_folders.open_folder(folder, eos_ids or (), config.vocab_size)
    defaults, more = _decoding_defaults(folder, generation, options)
    return Checkpoint(
        config,
        leaves,
        vocabulary,
        start[0],
        eos_ids,
        generation_config=defaults,
        notes=(*notes, *more),
    )


def _decoding_defaults(
    folder: pathlib.Path, generation: dict, options: dict
) -> tuple[GenerationConfig, tuple[str, ...]]:
    """Returns how the model decodes by default, and lines about it.

    As in transformers, that is what generation_config.json says, or, only where there is none, what
    config.json says; `task_specific_params` say nothing unless a caller asks for them.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        path, generation = folder / "config.json", options
    return (found := GenerationConfig.read(generation, path)), found.lines(folder, path.name)


def _ids(
    folder: pathlib.Path, generation: dict, options: dict, name: str
) -> tuple[int, ...] | None:
    """Returns the id or ids that generation_config.json gives under `name`, or else config.json."""
    file = "config.json" if generation.get(name) is None else "generation_config.json"
    found = first(generation.get(name), options.get(name))
    ids = found if found is None or isinstance(found, list) else [found]
    if ids is not None and not all(type(i) is int for i in ids):
        raise ValueError(
            f"{folder / file}: {name}: got {reading.shown(found)}, expected an integer"
        )
    return None if ids is None else tuple(ids)


def _reader(folder: pathlib.Path, options: dict) -> Any:
    """Returns the module of the family that config.json names."""
    kind, architectures = options.get("model_type"), options.get("architectures") or []
    reader = _READER_OF.get(kind) if isinstance(kind, str) else None
    known = reader.ARCHITECTURES[kind] if reader else ()
    if (
        not known
        or not isinstance(architectures, list)
        or any(name not in known for name in architectures)
    ):
        got = f"model_type {reading.shown(kind)} with architectures {reading.shown(architectures)}"
        pairs = [
            (kind, names) for reader in _READERS for kind, names in reader.ARCHITECTURES.items()
        ]
        expected = "; ".join(f"{kind} with {' or '.join(names)}" for kind, names in pairs)
        raise ValueError(
            f"{folder / 'config.json'}: unknown architecture: got {got}, expected {expected}"
        )
    return reader


def write_folder(checkpoint: Checkpoint, dtype: str, folder: pathlib.Path, report: Report) -> None:
    """Writes config.json, generation_config.json, safetensors and the tokenizer's files into an
    empty folder.

    Raises:
      ValueError: Hugging Face's model has no name for the feed-forward block or the vocabulary.
    """
    writer = WRITERS[checkpoint.config.family]
    eos_ids = list(checkpoint.eos_ids or ())
    ids = {
        "decoder_start_token_id": checkpoint.start_token,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": huggingface_folders.pad_id_of(checkpoint.vocabulary),
    }
    files = huggingface_folders.files_of(checkpoint.vocabulary)
    files["config.json"] = writer.options_of(checkpoint.config, dtype) | ids
    files["generation_config.json"] = ids | checkpoint.generation_config.written()
    for name, content in files.items():
        content = (
            content
            if isinstance(content, bytes)
            else (json.dumps(content, indent=1) + "\n").encode()
        )
        write_file(folder / name, content)
    safetensors_files.write_folder(writer.by_their_names(checkpoint.leaves), dtype, folder, report)
