"""Loads models: Hugging Face folders, T5X checkpoints, this package's own folders, the bundled
models."""

import dataclasses
import os
import pathlib
import re
import shlex
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specdec_jax.checkpoints import huggingface, huggingface_weights, native_format, t5x
from specdec_jax.checkpoints.allocator import returning_freed_memory
from specdec_jax.checkpoints.memory import check_memory
from specdec_jax.checkpoints.stored_tensor import Checkpoint, check
from specdec_jax.checkpoints.weights import kernels_of, read_params
from specdec_jax.files.progress import Progress, print_line
from specdec_jax.models import arguments, packed_weights
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.forks import check_process
from specdec_jax.models.jax_settings import check_not_traced, isolated
from specdec_jax.models.language_model import LanguageModel, check_ids
from specdec_jax.models.parameters import parameter_count
from specdec_jax.models.sharding import ShardingRules
from specdec_jax.models.t5 import T5Config, t5_only
from specdec_jax.models.vocabularies import (
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
    sentinels_for,
)

BUNDLED = pathlib.Path(__file__).parent.parent / "bundled"
DTYPES = ("float32", "bfloat16")


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name
_VOCABULARY_FILES = ("spiece.model", "sentencepiece.model", "tokenizer.json")


def bundled() -> tuple[str, ...]:
    """Returns the names of the models that come with the package, for `load`: "ende/target",
    "ende/drafter"."""
    return tuple(
        sorted(str(path.parent.relative_to(BUNDLED)) for path in BUNDLED.glob("*/*/config.json"))
    )


@isolated
def load(
    path,
    dtype=None,
    *,
    config: T5Config | None = None,
    vocabulary: Vocabulary | str | pathlib.Path | None = None,
    mesh: Mesh | None = None,
    replicate: bool = False,
    quantize: str | None = None,
    say: Callable[[str], None] = print_line,
) -> LanguageModel:
    """Returns a model in any format that this package knows, recognised by the folder's contents.

    Parameters are read one at a time, so that peak memory stays near the weights' size in `dtype`.

    Args:
      path: a Hugging Face folder; a T5X `checkpoint_<step>`, or a folder of several, of which the
        newest is taken; a folder that `save` wrote; or one of `bundled()`.
      dtype: dtype of parameters and computation. "float32" multiplies at float32 precision on every
        device (on accelerators, which would round the operands, by `jax.lax.Precision.HIGHEST`);
        "bfloat16" multiplies bfloat16 operands; normalisation, softmax and logits are float32 in
        both. None: float32 on a CPU, else bfloat16.
      config: configuration of a T5X checkpoint, which does not hold one. None infers it from the
        parameters and takes a gated feed-forward block for gelu; UL2's silu must be given.
      vocabulary: takes the place of the checkpoint's: a `Vocabulary`, or the path of a
        tokenizer.json or of a SentencePiece model (T5's 100 sentinels are added if the embedding
        has room for them). A T5X checkpoint has none, but a `spiece.model`, `sentencepiece.model`
        or `tokenizer.json` beside it; without one only ids work.
      mesh: devices that share the model, from `make_mesh` or with the axes "data" and "model". A
        process reads only what its own devices hold, if the format allows it. None: one device.
      replicate: with a mesh, every device holds the whole model; rows are divided. For drafters.
      quantize: whether weights are multiplied in int8: on one accelerator, with inputs as they are,
        or on a CPU in float32, with inputs rounded to 16 bits and by the package's own kernels
        (`specdec demo` says whether they are there). None: weights that are stored in int8 stay so
        on such a CPU; all others are in `dtype`. "int8": kernels, the head's too, are rounded while
        they are read, unless they are stored so; the distribution is then the rounded model's.
        "w8a8", on a CPU: also rounds inputs to 8 bits: faster for many rows, a distribution further
        away. "none": all weights are in `dtype`.
      say: called with the line about the chosen dtype, and every 10 seconds of a long reading with
        how far it is. The default prints to standard error, where a terminal shows the latter as a
        bar; `lambda line: None` is silent.

    Raises:
      ValueError: one line with what was got and what was expected: no such path, an unknown format
        or architecture, a truncated checkpoint, a parameter that is missing, unexpected or of the
        wrong shape, not enough memory, heads or a feed-forward width that the mesh does not divide,
        or a `quantize` that is not possible there.
    """
    check_process()  # before tensorstore too, which ends a forked process
    check_not_traced("load")
    arguments.check_kind("mesh", mesh, Mesh | None, "a mesh, as from make_mesh")
    arguments.check_kind("say", say, Callable, "a function of one line")
    if arguments.check_flag("replicate", replicate) and mesh is None:
        raise ValueError("replicate: got True without a mesh, expected mesh= too")
    rules = None if mesh is None else ShardingRules(mesh, replicate)
    folder = resolve(path)
    checkpoint = open_complete(folder, config, vocabulary, say)
    kernels = kernels_of(checkpoint, quantize, _known_dtype(dtype), rules)
    dtype = choose_dtype(
        dtype, path, say, kernels, input_bits := packed_weights.input_bits(quantize)
    )
    if rules is not None:
        rules.check(checkpoint.config)
    check_memory(checkpoint.config, dtype, folder, rules, kernels)
    count, network = (
        parameter_count(checkpoint.config),
        checkpoint.config.replace(dtype=dtype, matmul_dtype=None),
    )
    shown = Progress(f"reading {path}", count, "parameters", say=say, last="placing them")
    with returning_freed_memory(), shown as progress:
        params = read_params(checkpoint, dtype, rules, kernels, input_bits, progress.advance)
        return LanguageModel(
            network,
            params,
            name=str(path),
            donate_params=True,
            rules=rules,
            **_beside_parameters(checkpoint),
        )


def _beside_parameters(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the arguments of `LanguageModel` that a checkpoint has under the same names."""
    names = ("vocabulary", "start_token", "eos_ids", "encoder_fingerprint", "generation_config")
    return {name: getattr(checkpoint, name) for name in names}


def open_complete(
    folder: pathlib.Path, config: T5Config | None, vocabulary, say: Callable[[str], None]
) -> Checkpoint:
    """Returns what `complete` makes of the checkpoint in a folder, and says its notes."""
    checkpoint = complete(open_checkpoint(folder, config), vocabulary, folder)
    for note in checkpoint.notes:
        say(note)
    return checkpoint


def complete(checkpoint: Checkpoint, vocabulary, folder: pathlib.Path) -> Checkpoint:
    """Returns the checkpoint with the chosen vocabulary and special ids, all checked; no parameter
    is read."""
    check(checkpoint, folder)
    vocabulary = _choose_vocabulary(vocabulary, checkpoint)
    start = 0 if checkpoint.start_token is None else checkpoint.start_token
    eos_ids = checkpoint.eos_ids  # () means that nothing ends a sequence
    if eos_ids is None:
        eos_ids = vocabulary.eos_ids if vocabulary else (1,)
    try:
        check_ids(checkpoint.config, vocabulary, start, eos_ids)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return dataclasses.replace(
        checkpoint, vocabulary=vocabulary, start_token=start, eos_ids=tuple(eos_ids)
    )


def load_vocabulary(path, vocabulary=None) -> tuple[Vocabulary | None, int]:
    """Returns a checkpoint's vocabulary, or `vocabulary` if given, and its start token; reads no
    parameter."""
    checkpoint = open_checkpoint(resolve(path), None)
    return _choose_vocabulary(vocabulary, checkpoint), checkpoint.start_token or 0


def load_shape(path) -> ModelConfig:
    """Returns a checkpoint's configuration; reads no parameter."""
    return open_checkpoint(resolve(path), None).config


def check_stored(dtype, format: str) -> str:
    """Returns the name of a dtype that parameters can be written in in this format; raises
    ValueError for others."""
    return _check_dtype(dtype, (*DTYPES, "int8") if format == "specdec" else DTYPES)


def _check_dtype(dtype, known: tuple[str, ...] = DTYPES) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in known:
        raise ValueError(f"dtype: got {name}, expected {' or '.join(known)}")
    return name


def _known_dtype(dtype) -> str:
    """Returns the name of `dtype`, or of the machine's default for None."""
    if dtype is not None:
        return _check_dtype(dtype)
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


_IN_8_BITS = {
    "stored": ", with the 8-bit weights it is stored with",
    "rounded": ", with weights rounded to 8 bits",
}


def choose_dtype(
    dtype,
    path,
    say: Callable[[str], None] = print_line,
    kernels: str | None = None,
    input_bits: int | None = 16,
) -> str:
    """Returns the name of `dtype`, or of the machine's default for None.

    A default is told to `say`, together with `path`, with how weights are held (`kernels`, from
    `kernels_of`), and whether `input_bits`, of such kernels, is 8.
    """
    chosen = _known_dtype(dtype)
    if dtype is None:
        platform = jax.default_backend()
        kind = {"cpu": "a CPU", "gpu": "a GPU", "tpu": "a TPU"}.get(platform, platform)
        held = _IN_8_BITS.get(kernels or "", "") + (
            ", inputs of products in int8 too" if input_bits == 8 else ""
        )
        say(
            f"loading {path} in {chosen}, the default on {kind}{held} "
            "(dtype=, or --dtype on the command line, chooses another)"
        )
    return chosen


def resolve(path) -> pathlib.Path:
    """Returns the folder that a path or bundled name given to `load` means; raises ValueError if
    there is none."""
    arguments.check_path("path", path)
    folder = pathlib.Path(path)
    if folder.is_dir():
        return folder
    if str(path) in bundled():
        return BUNDLED / str(path)
    names = ", ".join(bundled()) or "none are there"
    kind = "a file" if folder.exists() else "no such path"
    expected = f"a checkpoint folder or a bundled name ({names})"
    if kind != "a file" and _HUB_NAME.fullmatch(str(path)):
        local = shlex.quote(folder.name)
        expected += (
            ". If a model on the Hugging Face Hub is meant, download it into a folder and give that: "
            f"`pip install huggingface_hub; hf download {path} --local-dir {local}`, then {local}"
        )
    raise ValueError(f"{path}: got {kind}, expected {expected}")


def open_checkpoint(folder: pathlib.Path, config: T5Config | None) -> Checkpoint:
    """Opens a checkpoint in the format that its folder's contents show; reads no parameter.

    Where the folder holds several, a note says which one is read: this package's own, where
    config.json is; else transformers' choice among Hugging Face's; else T5X's.
    """
    arguments.check_kind("config", config, T5Config | None, "a T5Config")
    step = t5x.find(folder)
    mine, theirs = (
        native_format.is_folder(folder),
        huggingface_weights.present(folder, huggingface_weights.READABLE),
    )
    theirs = theirs if _is_theirs(folder) else []
    if step is not None and (config is not None or not (mine or theirs)):
        checkpoint, read = _open_step(step, config), _parts_of(step, folder)[0]
    elif config is not None:
        raise ValueError(
            f"{folder}: got config=, expected it for a T5X checkpoint only (here is a config.json)"
        )
    elif mine:
        checkpoint, read = native_format.open_folder(folder), "params"
    elif native_format.is_folder(folder, "heads"):
        raise ValueError(
            f"{folder}: got heads, which only draft for their target, expected a model"
        )
    elif huggingface.is_folder(folder):
        checkpoint, read = huggingface.open_folder(folder), next(iter(theirs), "")
    elif (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder}: got a PEFT adapter without its model, expected a whole model; merge them with peft: "
            "AutoPeftModelForSeq2SeqLM.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder)"
        )
    else:
        expected = "a Hugging Face folder (config.json), a T5X checkpoint (checkpoint_<step>) or one that save wrote"
        raise ValueError(f"{folder}: got a folder of no known format, expected {expected}")
    there = ["params"] * mine + huggingface_weights.present(folder) + _parts_of(step, folder)
    others = [name for name in there if name != read]
    if not others:
        return checkpoint
    note = f"{folder}: several checkpoints are there: reading {read}, leaving {', '.join(others)}"
    return dataclasses.replace(checkpoint, notes=(note, *checkpoint.notes))


def _is_theirs(folder: pathlib.Path) -> bool:
    """Returns whether the folder's config.json is Hugging Face's, and not one that `save` wrote for
    T5X's format."""
    kinds = ("model", "heads", "t5x")
    return (folder / "config.json").exists() and not any(
        native_format.is_folder(folder, kind) for kind in kinds
    )


def _parts_of(step: pathlib.Path | None, folder: pathlib.Path) -> list[str]:
    """Returns the names, from `folder` on, of what holds the parameters of a T5X checkpoint; the
    first one counts."""
    names = (
        [step / name for name in ("checkpoint", "state") if (step / name).exists()] if step else []
    )
    return [str(path.relative_to(folder)) for path in names]


def _open_step(step: pathlib.Path, config: T5Config | None) -> Checkpoint:
    if native_format.is_folder(step, "t5x"):  # `save` wrote it
        described = native_format.open_description(step)
        checkpoint = t5x.open_step(
            step, config or t5_only(str(step / "config.json"), described.config)
        )
        return dataclasses.replace(described, config=checkpoint.config, leaves=checkpoint.leaves)
    checkpoint = t5x.open_step(step, config)
    return dataclasses.replace(checkpoint, vocabulary=_beside(step, checkpoint.config))


def _beside(step: pathlib.Path, config: ModelConfig) -> Vocabulary | None:
    places = [
        place / name for place in (step, step.absolute().parent) for name in _VOCABULARY_FILES
    ]
    path = next((place for place in places if place.is_file()), None)
    return _read_vocabulary(path, config) if path else None


def _read_vocabulary(path, config: ModelConfig, stop_ids: tuple[int, ...] = ()) -> Vocabulary:
    arguments.check_kind("vocabulary", path, str | os.PathLike, "a Vocabulary, or a path")
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(
            f"{path}: got no such file, expected a SentencePiece model or a tokenizer.json"
        )
    if path.suffix == ".json":
        return TokenizerJsonVocabulary.load(path, stop_ids=stop_ids)
    pieces = SentencePieceVocabulary.load(path)
    # T5's 32,000 pieces lie below 32,128 logits, of which 100 are sentinels.
    return SentencePieceVocabulary(pieces.model, sentinels_for(pieces.size, config.vocab_size))


def _choose_vocabulary(given, checkpoint: Checkpoint) -> Vocabulary | None:
    if given is None or isinstance(given, Vocabulary):
        return given or checkpoint.vocabulary
    return _read_vocabulary(given, checkpoint.config, checkpoint.eos_ids or ())
