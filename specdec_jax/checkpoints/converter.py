"""Writes models: `save` and `convert`, in this package's format, Hugging Face's and T5X's."""

import dataclasses
import pathlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy.typing as npt

from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.checkpoints import huggingface, int8, loader, native_format, t5x
from specdec_jax.checkpoints.memory import return_freed_memory
from specdec_jax.checkpoints.stored_tensor import Checkpoint, StoredTensor, check
from specdec_jax.files import places
from specdec_jax.files.places import AnyPath
from specdec_jax.files.progress import Progress, print_line
from specdec_jax.files.reading import PathLike, mismatch_error
from specdec_jax.files.writing import open_new_folder
from specdec_jax.models import arguments, weight_layouts
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.models.parameters import parameter_count
from specdec_jax.models.t5 import T5Config, check_t5
from specdec_jax.tokenizers.vocabularies import Vocabulary

FORMATS = ("specdec", "huggingface", "t5x", "t5x_legacy")
# The model families that each format of others has names for.
_HOLDS: dict[str, Collection[str]] = {
    "huggingface": huggingface.WRITERS,
    "t5x": (T5Config.family,),
    "t5x_legacy": (T5Config.family,),
}


@isolated
def save(
    model: LanguageModel,
    path: PathLike,
    dtype: npt.DTypeLike | None = None,
    format: str = "specdec",
    say: Callable[[str], None] = print_line,
) -> None:
    """Writes a model to a folder that `load` reads.

    The folder appears whole or not at all, and replaces an earlier model folder of this package.
    For "specdec" the vocabulary's file is left out if the folder above holds the same.

    Args:
      model: the model; its weights in int8 are widened unless `dtype` is "int8".
      path: the folder.
      dtype, format, say: as for `convert`.

    Raises:
      ValueError: `path` is something other than a model folder, or the format cannot hold the
        model.
    """
    arguments.check_path("path", path)
    arguments.check_model("model", model)
    folder = places.make_path(path).absolute()
    check = native_format.check_free if _check_format(format) == "specdec" else _check_empty
    check(folder)
    stored = weight_layouts.stored_parameters(model.network.params)
    checkpoint = Checkpoint(
        model.config,
        {"/".join(names): _wrap_parameter(value) for names, value in stored},
        model.vocabulary,
        model.start_token,
        model.eos_ids,
        model.encoder_fingerprint,
        model.generation_config or ModelDefaults(),
    )
    _write(checkpoint, folder, check, format, dtype, say)


def _wrap_parameter(value: weight_layouts.Plain) -> StoredTensor:
    if not isinstance(value, Int8Weight):
        return StoredTensor.from_array(value)
    return int8.multiply_parts(*map(StoredTensor.from_array, (value.values, value.scales[None])))


class Written(NamedTuple):
    """What `convert` wrote.

    Attributes:
      folder: where; for T5X the `checkpoint_<step>` directory.
      dtype: dtype of the parameters that were written.
      stored: dtypes of the parameters in the source.
      parameters: number of parameters.
      size: bytes of all files.
    """

    folder: AnyPath
    dtype: str
    stored: tuple[str, ...]
    parameters: int
    size: int


@isolated
def convert(
    source: PathLike,
    output: PathLike,
    format: str = "huggingface",
    dtype: npt.DTypeLike | None = None,
    *,
    config: T5Config | None = None,
    vocabulary: Vocabulary | PathLike | None = None,
    say: Callable[[str], None] = print_line,
) -> Written:
    """Writes a checkpoint in another format; parameters pass through memory one at a time.

    Vocabulary, start token and EOS ids are kept. A T5X checkpoint gets them, and the configuration,
    in a config.json of this package beside the parameters, since the format has no place for them;
    optimizer states are neither read nor written.

    Args:
      source: whatever `load` reads.
      output: a folder that does not exist or is empty. It appears whole or not at all. For T5X, a
        folder named `checkpoint_<step>` is the checkpoint itself; any other gets a folder
        `checkpoint_<step>` inside, with the step of a T5X source, else 1.
      format: "huggingface" (config.json, safetensors, tokenizer), "t5x" (Orbax, what T5X writes
        today), "t5x_legacy", or "specdec", this package's own.
      dtype: "float32" or "bfloat16"; for "specdec" also "int8", which writes weights and embeddings
        in int8 and the rest in float32. Matrices that are stored in int8 already keep their
        integers. Drafters and heads that were trained on a target's states do not fit the rounded
        target. None: bfloat16 if all parameters are stored so, else float32.
      config, vocabulary: as for `load`.
      say: called every 10 seconds of a long writing with how far it is. The default prints to
        standard error, where a terminal shows a bar instead; `lambda line: None` is silent.

    Raises:
      ValueError: as for `load`; or `output` is not empty, or the format cannot hold the model.
    """
    _check_format(format)
    if dtype is not None:
        loader.check_written_dtype(dtype, format)
    arguments.check_path("output", output)
    target = places.make_path(output).absolute()
    _check_empty(target)
    folder = loader.resolve(source)
    checkpoint = loader.open_complete(folder, config, vocabulary, say)
    step_folder = t5x.find_step(folder)
    step = t5x.parse_step(step_folder) if step_folder else None
    with return_freed_memory():
        return _write(checkpoint, target, _check_empty, format, dtype, say, step)


def _check_format(format: str) -> str:
    if format not in FORMATS:
        raise mismatch_error("format", f"{format!r}", f"one of {', '.join(FORMATS)}")
    return format


def _check_empty(folder: AnyPath) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        kind = "a folder that is not empty" if folder.is_dir() else "a file"
        raise ValueError(f"{folder}: got {kind}, expected nothing there")


def _write(
    checkpoint: Checkpoint,
    target: AnyPath,
    check_free: Callable[[AnyPath], None],
    format: str,
    dtype: npt.DTypeLike | None,
    say: Callable[[str], None],
    step: int | None = None,
) -> Written:
    """Writes a checkpoint whose special ids are known, and checks that nothing is lost."""
    _check_format_holds(format, checkpoint.config)
    stored = tuple(sorted({tensor.dtype for tensor in checkpoint.parameters.values()}))
    default = "bfloat16" if stored == ("bfloat16",) else "float32"
    dtype = default if dtype is None else loader.check_written_dtype(dtype, format)
    computing = "float32" if dtype == "int8" else dtype
    config = checkpoint.config.replace(dtype=computing)
    checkpoint, count = dataclasses.replace(checkpoint, config=config), parameter_count(config)
    inner, number = pathlib.PurePath(), t5x.parse_step(target)
    if format.startswith("t5x") and not check_t5("format", config).relative_bias_per_layer:
        if reason := t5x.explain_unsupported(config):
            say(f"{target}: T5X's network t5x.examples.t5 cannot compute this model: {reason}")
    if format.startswith("t5x") and number is None:
        number = step or 1  # T5X takes step 0 to mean that there is no step
        inner = pathlib.PurePath(f"checkpoint_{number}")
    bar = Progress(f"writing {target}", count, "parameters", say=say)
    with bar as progress, open_new_folder(target, check_free) as temporary:
        folder = temporary / inner
        folder.mkdir(exist_ok=True)
        if format == "specdec":
            native_format.write_folder(checkpoint, dtype, folder, progress.advance)
        elif format == "huggingface":
            huggingface.write_folder(checkpoint, dtype, folder, progress.advance)
        else:
            assert number is not None
            write = t5x.write_orbax if format == "t5x" else t5x.write_legacy
            native_format.write_description(checkpoint, folder, "t5x")
            parameters = t5x.stack_layers(checkpoint.parameters, check_t5("format", config))
            write(parameters, dtype, folder, number, progress.advance)
        _check_written(loader.open_checkpoint(folder, None), checkpoint, format)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Written(target / inner, dtype, stored, count, size)


def _check_format_holds(format: str, config: ModelConfig) -> None:
    """Raises ValueError if a format has no names for the parameters of a model."""
    if format == "specdec":
        return
    kind, expected = None, "'specdec'"
    if config.encoder_dim is not None:
        kind = "a model without an encoder of its own"
    elif config.family not in _HOLDS[format]:
        kind = "a decoder-only model" if config.decoder_only else f"a {type(config).__name__}"
    elif format.startswith("t5x") and check_t5("format", config).separate_embeddings:
        kind = "a model whose encoder has an embedding of its own"
        expected += " or 'huggingface': T5X's networks share one"
    if kind:
        raise mismatch_error("format", f"{format!r} for {kind}", expected)


def _check_written(written: Checkpoint, checkpoint: Checkpoint, format: str) -> None:
    """Raises ValueError if a format cannot express something about a model.

    A vocabulary of the caller's own, for instance, may encode other than its class.
    """
    check(written, "what was written")
    expressed = _list_properties(written)
    for name, value in _list_properties(checkpoint).items():
        if (back := expressed.get(name)) != value:
            got = f"{name}={value!r}, which {format} would give back as {back!r}"
            raise mismatch_error("format", got, "a format that keeps it")


def _list_properties(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns everything about a model that is to survive a format, but for its parameters."""
    config, vocabulary = checkpoint.config.explicit(), checkpoint.vocabulary
    # Left out are settings of training, and of how parameters are held.
    left_out = ("dropout_rate", "dtype", "matmul_dtype")
    names = [field.name for field in dataclasses.fields(config) if field.name not in left_out]
    properties = {name: getattr(config, name) for name in names} | {
        "start_token": checkpoint.start_token,
        "eos_ids": checkpoint.eos_ids,
        "encoder": checkpoint.encoder_fingerprint,
        "generation_config": checkpoint.generation_config,
    }
    if vocabulary is None:
        return properties | {"vocabulary": None}
    properties |= {"languages": vocabulary.languages, "vocabulary": vocabulary.fingerprint()}
    if vocabulary.languages is not None:
        return properties | {"around_a_text": vocabulary.frame}
    encode = vocabulary.encode_prompt if config.decoder_only else vocabulary.encode_input
    return properties | {"around_a_text": encode("")}
