"""Writes models: `save` and `convert`, in this package's format, Hugging Face's and T5X's."""

import dataclasses
import pathlib
from collections.abc import Callable, Collection
from typing import NamedTuple

from specdec_jax.checkpoints import huggingface, int8, native_format, t5x
from specdec_jax.checkpoints.allocator import returning_freed_memory
from specdec_jax.checkpoints.loader import check_stored, open_checkpoint, open_complete, resolve
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Leaf, check
from specdec_jax.files.progress import Progress, print_line
from specdec_jax.files.writing import new_folder
from specdec_jax.models import arguments, weight_layouts
from specdec_jax.models.generation_config import GenerationConfig
from specdec_jax.models.int8 import Int8Kernel
from specdec_jax.models.jax_settings import isolated
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.parameters import parameter_count
from specdec_jax.models.t5 import T5Config, t5_only

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
    path,
    dtype=None,
    format: str = "specdec",
    say: Callable[[str], None] = print_line,
) -> None:
    """Writes a model to a folder that `load` reads.

    The vocabulary's file goes into the folder, except that for "specdec" it is left out if the
    folder above holds the same file. The folder appears whole or not at all; an earlier model
    folder of this package there is replaced.

    Args:
      model: the model; its kernels in int8 are widened unless `dtype` is "int8".
      path: the folder.
      dtype, format, say: as for `convert`.

    Raises:
      ValueError: `path` is something other than a model folder, or the format cannot hold the
        model.
    """
    arguments.check_path("path", path)
    arguments.check_model("model", model)
    folder = pathlib.Path(path).absolute()
    check = native_format.check_free if _check_format(format) == "specdec" else _check_empty
    check(folder)
    leaves = {
        "/".join(names): _leaf(value)
        for names, value in weight_layouts.stored_parameters(model.network.params)
    }
    checkpoint = Checkpoint(
        model.config,
        leaves,
        model.vocabulary,
        model.start_token,
        model.eos_ids,
        model.encoder_fingerprint,
        model.generation_config or GenerationConfig(),
    )
    _write(checkpoint, folder, check, format, dtype, say)


def _leaf(value: weight_layouts.Plain) -> Leaf:
    if isinstance(value, Int8Kernel):
        return int8.product(Leaf.from_array(value.values), Leaf.from_array(value.scales[None]))
    return Leaf.from_array(value)


class Written(NamedTuple):
    """What `convert` wrote.

    Attributes:
      folder: where; for T5X the `checkpoint_<step>` directory.
      dtype: dtype of the parameters that were written.
      stored: dtypes of the parameters in the source.
      parameters: number of parameters.
      size: bytes of all files.
    """

    folder: pathlib.Path
    dtype: str
    stored: tuple[str, ...]
    parameters: int
    size: int


@isolated
def convert(
    source,
    output,
    format: str = "huggingface",
    dtype=None,
    *,
    config: T5Config | None = None,
    vocabulary=None,
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
      dtype: "float32" or "bfloat16"; for "specdec" also "int8", which writes kernels and embeddings
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
        check_stored(dtype, format)
    arguments.check_path("output", output)
    target = pathlib.Path(output).absolute()
    _check_empty(target)
    folder = resolve(source)
    checkpoint = open_complete(folder, config, vocabulary, say)
    found = t5x.find(folder)
    step = t5x.step_of(found) if found else None
    with returning_freed_memory():
        return _write(checkpoint, target, _check_empty, format, dtype, say, step)


def _check_format(format: str) -> str:
    if format not in FORMATS:
        raise ValueError(f"format: got {format!r}, expected one of {', '.join(FORMATS)}")
    return format


def _check_empty(folder: pathlib.Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        kind = "a folder that is not empty" if folder.is_dir() else "a file"
        raise ValueError(f"{folder}: got {kind}, expected nothing there")


def _write(
    checkpoint: Checkpoint,
    target: pathlib.Path,
    check_free: Callable[[pathlib.Path], None],
    format: str,
    dtype,
    say: Callable[[str], None],
    step: int | None = None,
) -> Written:
    """Writes a checkpoint whose special ids are known, reads it back and checks that nothing was
    lost."""
    config = checkpoint.config
    if format != "specdec" and (
        config.encoder_dim is not None or config.family not in _HOLDS[format]
    ):
        kind = (
            "a decoder-only model"
            if config.decoder_only
            else "a model without an encoder of its own"
        )
        kind = (
            kind
            if config.decoder_only or config.encoder_dim is not None
            else f"a {type(config).__name__}"
        )
        raise ValueError(f"format: got {format!r} for {kind}, expected 'specdec'")
    if format.startswith("t5x") and t5_only("format", config).separate_embeddings:
        raise ValueError(
            f"format: got {format!r} for a model whose encoder has an embedding of its own, expected 'specdec' or "
            "'huggingface': T5X's networks share one"
        )
    stored = tuple(sorted({leaf.dtype for leaf in checkpoint.leaves.values()}))
    default = "bfloat16" if stored == ("bfloat16",) else "float32"
    dtype = default if dtype is None else check_stored(dtype, format)
    computing = "float32" if dtype == "int8" else dtype
    checkpoint = dataclasses.replace(checkpoint, config=checkpoint.config.replace(dtype=computing))
    inner = pathlib.PurePath()
    if format.startswith("t5x") and t5x.step_of(target) is None:
        inner = pathlib.PurePath(
            f"checkpoint_{step or 1}"
        )  # T5X takes step 0 to mean that there is no step
    shown = Progress(f"writing {target}", parameter_count(checkpoint.config), "parameters", say=say)
    with shown as progress, new_folder(target, check_free) as temporary:
        folder = temporary / inner
        folder.mkdir(exist_ok=True)
        if format == "specdec":
            native_format.write_folder(checkpoint, dtype, folder, progress.advance)
        elif format == "huggingface":
            huggingface.write_folder(checkpoint, dtype, folder, progress.advance)
        else:
            number = t5x.step_of(target) if inner == pathlib.PurePath() else t5x.step_of(folder)
            assert number is not None
            write = t5x.write_orbax if format == "t5x" else t5x.write_legacy
            native_format.write_description(checkpoint, folder, "t5x")
            leaves = t5x.leaves_by_their_names(
                checkpoint.leaves, t5_only("format", checkpoint.config)
            )
            write(leaves, dtype, folder, number, progress.advance)
        _check_written(open_checkpoint(folder, None), checkpoint, format)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Written(target / inner, dtype, stored, parameter_count(checkpoint.config), size)


def _check_written(written: Checkpoint, checkpoint: Checkpoint, format: str) -> None:
    """Raises ValueError if a format cannot express something about a model; Hugging Face's ByT5,
    for instance, cannot say that there are no sentinels."""

    def said(checkpoint: Checkpoint) -> dict:
        config, vocabulary = checkpoint.config.explicit(), checkpoint.vocabulary
        shape = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        for name in (
            "dropout_rate",
            "dtype",
            "matmul_dtype",
        ):  # settings of training, and of how parameters are held
            shape.pop(name, None)
        ids = dict(
            start_token=checkpoint.start_token,
            eos_ids=checkpoint.eos_ids,
            encoder=checkpoint.encoder_fingerprint,
            generation_config=checkpoint.generation_config,
        )
        if vocabulary is None:
            return shape | ids | dict(vocabulary=None)
        around = (
            vocabulary.encode_prompt("") if config.decoder_only else vocabulary.encode_input("")
        )
        return shape | ids | dict(around_a_text=around, vocabulary=vocabulary.fingerprint())

    check(written, "what was written")
    ours, theirs = said(checkpoint), said(written)
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"format: got {name}={value!r}, which {format} would give back as {theirs.get(name)!r}"
            )
