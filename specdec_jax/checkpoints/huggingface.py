"""Reads and writes Hugging Face folders; each family has a module `huggingface_FAMILY.py`."""

import itertools
import json
import pathlib
from typing import Any

from specdec_jax.checkpoints import (
    flax_msgpack,
    huggingface_bart,
    huggingface_gemma,
    huggingface_gpt,
    huggingface_t5,
    pytorch_files,
    safetensors_files,
)
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Parameters, Report
from specdec_jax.files import reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.files.writing import write_file
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.tokenizers import huggingface_folders
from specdec_jax.tokenizers.vocabularies import Vocabulary

_READERS: tuple[Any, ...] = (
    huggingface_t5,
    huggingface_gpt,
    huggingface_bart,
    huggingface_gemma,
)
# By config.json's model_type.
_READER_OF = {kind: reader for reader in _READERS for kind in reader.ARCHITECTURES}
# By the name of our family.
WRITERS: dict[str, Any] = {
    "t5": huggingface_t5,
    "gpt": huggingface_gpt,
    "bart": huggingface_bart,
    "gemma": huggingface_gemma,
    "t5gemma": huggingface_gemma,
}

_PARTS = "decoder", "text_config"  # of config.json, that describe what is decoded
_SPECIAL_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
FLAX = "flax_model.msgpack"
_PYTORCH = (pytorch_files.WHOLE, pytorch_files.INDEX)
# The files of weights in transformers' order; it no longer reads Flax's file.
_WEIGHTS = (safetensors_files.WHOLE, safetensors_files.INDEX, *_PYTORCH, FLAX)
# Parts of tensors' names that wrappers of a module add: data parallelism, torch.compile, FSDP, and
# checkpointing of activations. No model has a module of such a name.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_folder(folder: AnyPath) -> bool:
    """Returns whether `folder` has a config.json, or weights under a name of Hugging Face's."""
    return (folder / "config.json").exists() or bool(list_weights(folder))


def list_weights(folder: AnyPath) -> list[str]:
    """Returns the files of weights that `folder` has; the first one counts."""
    return [name for name in _WEIGHTS if (folder / name).exists()]


def open_folder(folder: AnyPath, reads_vocabulary: bool = True) -> Checkpoint:
    """Opens a Hugging Face folder without reading its parameters.

    Args:
      folder: the folder.
      reads_vocabulary: whether its tokenizer is read too.

    Raises:
      ValueError: no weights in a readable format, an unknown architecture, or damaged files.
    """
    path, generation_path = folder / "config.json", folder / "generation_config.json"
    if not path.exists():
        raise mismatch_error(folder, "no config.json", "one beside the weights")
    options, generation = reading.read_json(path), reading.read_optional_json(generation_path)
    reader = _choose_reader(path, options)
    usual = reader.SPECIAL_IDS.get(options["model_type"], {})
    options = usual | (given := _nested_ids(path, options))
    files = (generation_path, generation), (path, options)  # the first that gives a value decides
    tensors, notes = _open_tensors(folder)
    config, parameters = reader.open_model(folder, options, tensors)
    # What no file gives and the model lacks ends nothing.
    for name in ("eos_token_id", "bos_token_id") if config.decoder_only else ("eos_token_id",):
        if name not in given and usual.get(name, 0) >= config.vocab_size:
            options.pop(name)
    # As in transformers: an mBART's files need not give a start token, which is the language.
    start = _read_ids(files, *reader.START, "bos_token_id") or reader.NO_START
    if len(start) != 1:
        raise mismatch_error(path, f"the start tokens {quote_value(start)}", "one")
    if (check_start := getattr(reader, "check_start", None)) is not None:
        check_start(path, options, start[0], config)
    eos_ids = _read_ids(files, "eos_token_id")
    # As in transformers, an id below 0 ends nothing.
    eos_ids = reader.NO_EOS if eos_ids is None else tuple(i for i in eos_ids if i >= 0)
    vocabulary = None
    if reads_vocabulary:
        vocabulary = huggingface_folders.open_folder(folder, eos_ids or (), config.vocab_size)
    _set_pad_id(vocabulary, options.get("pad_token_id"), config, eos_ids or ())
    # As in transformers, config.json sets how a model decodes only without the other file, and
    # its `task_specific_params` count only where a caller asks for them.
    source, content = files[0 if generation_path.exists() else 1]
    if content is options and options.get("force_bos_token_to_be_generated"):  # BART's old name
        content = options | {"forced_bos_token_id": options.get("bos_token_id")}
    defaults = ModelDefaults.read(content, source)
    own = getattr(reader, "list_notes", lambda folder, tensors: ())
    notes = (*notes, *own(folder, tensors), *defaults.lines(folder, source.name))
    if reads_vocabulary:
        notes += huggingface_folders.list_notes(folder, vocabulary)
    return Checkpoint(config, parameters, vocabulary, start[0], eos_ids, None, defaults, notes)


def _set_pad_id(
    vocabulary: Vocabulary | None, pad_id: Any, config: ModelConfig, eos_ids: tuple[int, ...]
) -> None:
    """Sets the id that pads inputs, if config.json gives it and the tokenizer's files do not."""
    if vocabulary is None or vocabulary.pad_id is not None or config.decoder_only:
        return
    if type(pad_id) is int and 0 <= pad_id < vocabulary.size and pad_id not in eos_ids:
        vocabulary.set_pad_id(pad_id)


def _choose_reader(path: AnyPath, options: dict) -> Any:
    """Returns the module of the family that config.json names."""
    kind, architectures = options.get("model_type"), options.get("architectures") or []
    reader = _READER_OF.get(kind) if isinstance(kind, str) else None
    known = reader.ARCHITECTURES[kind] if reader else ()
    listed = architectures if isinstance(architectures, list) else [None]
    if not known or any(name not in known for name in listed):
        got = f"model_type {quote_value(kind)} with architectures {quote_value(architectures)}"
        pairs = [pair for reader in _READERS for pair in reader.ARCHITECTURES.items()]
        expected = "; ".join(f"{kind} with {' or '.join(names)}" for kind, names in pairs)
        raise mismatch_error(f"{path}: unknown architecture", got, expected)
    return reader


def _open_tensors(folder: AnyPath) -> tuple[Parameters, tuple[str, ...]]:
    """Returns every tensor by PyTorch's name, and lines about what was left out of the names.

    Raises:
      ValueError: no weights in a readable format, damaged files, or two tensors of one name.
    """
    name = next(iter(list_weights(folder)), None)
    if name is None:
        expected = f"{', '.join(_WEIGHTS[:-1])} or {FLAX}"
        raise mismatch_error(folder, "no weights", expected)
    if name in _PYTORCH:
        return _unwrap_names(folder, pytorch_files.open_folder(folder))
    if name == FLAX:
        return _unwrap_names(folder, _rename_flax(flax_msgpack.open_file(folder / FLAX)))
    return _unwrap_names(folder, safetensors_files.open_folder(folder))


def _rename_flax(parameters: Parameters) -> Parameters:
    """Returns Flax's parameters as PyTorch's tensors: their names, and weights `[out, in]`."""
    tensors = {}
    for name, tensor in parameters.items():
        *parents, last = name.split("/")
        tensor = tensor.transposed() if last == "kernel" else tensor
        last = "weight" if last in ("kernel", "embedding", "scale") else last
        tensors[".".join([*parents, last])] = tensor
    return tensors


def _unwrap_names(folder: AnyPath, tensors: Parameters) -> tuple[Parameters, tuple[str, ...]]:
    """Returns the tensors without wrappers' parts in their names, and a line if there were any."""
    unwrapped: Parameters = {}
    wrappers: dict[str, None] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        short = ".".join(part for part in parts if part not in _WRAPPERS)
        if short in unwrapped:
            got = f"two tensors that are {short} without a wrapper's prefix"
            raise ValueError(f"{folder}: got {got}, expected one")
        unwrapped[short] = tensor
        wrappers |= dict.fromkeys(part for part in parts if part in _WRAPPERS)
    if not wrappers:
        return unwrapped, ()
    left = f"left {' and '.join(f'{part}.' for part in wrappers)} out of the tensors' names"
    return unwrapped, (f"{folder}: {left}, which a wrapper of the saved module added",)


def _nested_ids(path: AnyPath, options: dict) -> dict:
    """Returns config.json with the special ids of the part that describes what is decoded."""
    for part in _PARTS:
        nested = options.get(part, {})
        if not isinstance(nested, dict):
            raise mismatch_error(f"{path}: {part}", quote_value(nested), "an object")
        options = {name: nested[name] for name in _SPECIAL_IDS if name in nested} | options
    return options


def _read_ids(files: tuple[tuple[AnyPath, dict], ...], *names: str) -> tuple[int, ...] | None:
    """Returns the id or ids that the first of the files gives under the first of the names."""
    for name, (path, content) in itertools.product(names, files):
        if (given := content.get(name)) is not None:
            ids = given if isinstance(given, list) else [given]
            if not all(type(i) is int for i in ids):
                raise mismatch_error(f"{path}: {name}", quote_value(given), "an integer")
            return tuple(ids)
    return None


def write_folder(checkpoint: Checkpoint, dtype: str, folder: pathlib.Path, report: Report) -> None:
    """Writes a Hugging Face model into an empty folder.

    Its files are config.json, generation_config.json, safetensors and those of the tokenizer.

    Raises:
      ValueError: Hugging Face has no such model, or no files for the vocabulary.
    """
    writer = WRITERS[checkpoint.config.family]
    # transformers takes no empty list, and an id below 0 for one that ends nothing.
    eos_ids = list(checkpoint.eos_ids or (-1,))
    ids = {
        "decoder_start_token_id": checkpoint.start_token,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": huggingface_folders.choose_pad_id(checkpoint.vocabulary),
    }
    ids |= {name: checkpoint.start_token for name in writer.START}
    prompts = checkpoint.config.decoder_only
    files = huggingface_folders.make_files(checkpoint.vocabulary, prompts)
    options = writer.make_options(checkpoint.config, dtype)
    ids["pad_token_id"] = options.get("pad_token_id", ids["pad_token_id"])
    tensors = writer.rename_parameters(checkpoint.parameters, checkpoint.config)
    files["config.json"] = options = options | ids
    for part in _PARTS:
        if part in options:
            options[part] = options[part] | ids
    files["generation_config.json"] = ids | checkpoint.generation_config.written()
    for name, content in files.items():
        is_text = not isinstance(content, bytes)
        write_file(folder / name, json.dumps(content, indent=1) + "\n" if is_text else content)
    safetensors_files.write_folder(tensors, dtype, folder, report)
