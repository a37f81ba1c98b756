"""Loads models: Hugging Face folders, T5X checkpoints, our own folders, the bundled models."""

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt
from jax.sharding import Mesh

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.jax_settings import check_not_traced, isolated
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.checkpoints import huggingface, native_format, t5x
from specdec_jax.checkpoints.memory import check_memory, return_freed_memory
from specdec_jax.checkpoints.stored_tensor import Checkpoint, check
from specdec_jax.checkpoints.weights import choose_int8_weights, read_params
from specdec_jax.files import places
from specdec_jax.files.places import AnyPath
from specdec_jax.files.progress import Progress, print_line
from specdec_jax.files.reading import PathLike, mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.forks import check_process
from specdec_jax.models.language_model import LanguageModel, check_ids
from specdec_jax.models.parameters import parameter_count
from specdec_jax.models.t5 import T5Config, check_t5
from specdec_jax.tokenizers.vocabularies import (
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
    count_sentinels,
)

BUNDLED = pathlib.Path(__file__).parent.parent / "bundled"
DTYPES = ("float32", "bfloat16")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name
_VOCABULARY_FILES = ("spiece.model", "sentencepiece.model", "tokenizer.json")
_KNOWN_FORMATS = (
    "a Hugging Face folder (config.json), a T5X checkpoint (checkpoint_<step>) or one that save "
    "wrote"
)
_ADAPTER = (
    "a PEFT adapter without its model, expected a whole model; merge them with peft: "
    "AutoPeftModelForSeq2SeqLM.from_pretrained(folder).merge_and_unload()"
    ".save_pretrained(new_folder)"
)


def bundled() -> tuple[str, ...]:
    """Returns the names of the bundled models, for `load`: "ende/target", "ende/drafter"."""
    folders = (path.parent for path in BUNDLED.glob("*/*/config.json"))
    return tuple(sorted(str(folder.relative_to(BUNDLED)) for folder in folders))


@isolated
def load(
    path: PathLike,
    dtype: npt.DTypeLike | None = None,
    *,
    config: T5Config | None = None,
    vocabulary: Vocabulary | PathLike | None = None,
    mesh: Mesh | None = None,
    replicate: bool = False,
    quantize: str | None = None,
    say: Callable[[str], None] = print_line,
) -> LanguageModel:
    """Returns a model in any format that this package knows, recognised by the folder's contents.

    Parameters are read one at a time, so that peak memory stays near the weights' size in `dtype`.

    Args:
      path: a Hugging Face folder; a T5X `checkpoint_<step>`, or a folder of several, of which the
        newest is taken; a folder that `save` wrote; or one of `bundled()`. A folder may be a URL
        that fsspec opens, such as `gs://bucket/model` (see the package `checkpoints`).
      dtype: dtype of parameters and computation. "float32" multiplies at float32 precision on every
        device (on accelerators, which would round the operands, by `jax.lax.Precision.HIGHEST`);
        "bfloat16" multiplies bfloat16 operands; normalisation, softmax and logits are float32 in
        both. None: float32 on a CPU, else bfloat16.
      config: configuration of a T5X checkpoint, which does not hold one. None infers it from the
        parameters and takes a gated feed-forward block for gelu; UL2's silu must be given.
      vocabulary: takes the place of the checkpoint's: a `Vocabulary`, or the path of a
        tokenizer.json or of a SentencePiece model (T5's 100 sentinels are added if the embedding is
        large enough for them). A T5X checkpoint has none, but a `spiece.model`,
        `sentencepiece.model` or `tokenizer.json` beside it; without one only ids work.
      mesh: devices that share the model, from `make_mesh` or with the axes "data" and "model". A
        process reads only what its own devices hold, if the format allows it. None: one device.
      replicate: with a mesh, every device holds the whole model; rows are divided. For drafters.
      quantize: whether weights are multiplied in int8: on one accelerator, with inputs as they are,
        or on a CPU in float32, with inputs rounded to 16 bits and by the package's own kernels
        (`specdec demo` shows whether they are there). None: weights that are stored in int8 stay so
        on such a CPU; all others are in `dtype`. "int8": weights, the head's too, are rounded while
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
        raise mismatch_error("replicate", "True without a mesh", "mesh= too")
    rules = None if mesh is None else ShardingRules(mesh, replicate)
    folder = resolve(path)
    path = places.show_path(path)
    checkpoint = open_complete(folder, config, vocabulary, say)
    int8_weights = choose_int8_weights(checkpoint, quantize, _name_dtype(dtype), rules)
    input_bits = packed_weights.input_bits(quantize)
    dtype = choose_dtype(dtype, path, say, int8_weights, input_bits)
    if rules is not None:
        rules.check(checkpoint.config)
    check_memory(checkpoint.config, dtype, folder, rules, int8_weights)
    count = parameter_count(checkpoint.config)
    shown = Progress(f"reading {path}", count, "parameters", say=say, last="placing them")
    with return_freed_memory(), shown as progress:
        params = read_params(checkpoint, dtype, rules, int8_weights, input_bits, progress.advance)
        return LanguageModel(
            checkpoint.config.replace(dtype=dtype, matmul_dtype=None),
            params,
            vocabulary=checkpoint.vocabulary,
            start_token=checkpoint.start_token,
            eos_ids=checkpoint.eos_ids,
            encoder_fingerprint=checkpoint.encoder_fingerprint,
            generation_config=checkpoint.generation_config,
            name=str(path),
            donate_params=True,
            rules=rules,
        )


def open_complete(
    folder: AnyPath,
    config: T5Config | None = None,
    vocabulary: Vocabulary | PathLike | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Checkpoint:
    """Opens a checkpoint with the chosen vocabulary and special ids; passes its notes to `say`."""
    checkpoint = open_checkpoint(folder, config, reads_vocabulary=vocabulary is None)
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
    for note in checkpoint.notes:
        say(note)
    special: dict[str, Any] = dict(start_token=start, eos_ids=tuple(eos_ids))
    return dataclasses.replace(checkpoint, vocabulary=vocabulary, **special)


def load_vocabulary(
    path: PathLike, vocabulary: Vocabulary | PathLike | None = None
) -> tuple[Vocabulary | None, int]:
    """Returns a checkpoint's vocabulary, or the one given, and its start token."""
    checkpoint = open_checkpoint(resolve(path), None, reads_vocabulary=vocabulary is None)
    return _choose_vocabulary(vocabulary, checkpoint), checkpoint.start_token or 0


def load_shape(path: PathLike) -> ModelConfig:
    """Returns a checkpoint's configuration; reads no parameter."""
    return open_checkpoint(resolve(path), None, reads_vocabulary=False).config


def check_written_dtype(dtype: npt.DTypeLike, format: str) -> str:
    """Returns the name of a dtype that a format can hold; raises ValueError for others."""
    return _check_dtype(dtype, (*DTYPES, "int8") if format == "specdec" else DTYPES)


def _check_dtype(dtype: npt.DTypeLike, known: tuple[str, ...] = DTYPES) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in known:
        raise mismatch_error("dtype", name, " or ".join(known))
    return name


def _name_dtype(dtype: npt.DTypeLike | None) -> str:
    """Returns the name of `dtype`, or of the machine's default for None."""
    if dtype is not None:
        return _check_dtype(dtype)
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


_INT8_NOTES = {
    None: "",
    "stored": ", with the 8-bit weights it is stored with",
    "rounded": ", with weights rounded to 8 bits",
}


def choose_dtype(
    dtype: npt.DTypeLike | None,
    path: PathLike,
    say: Callable[[str], None] = print_line,
    int8_weights: str | None = None,
    input_bits: int | None = 16,
) -> str:
    """Returns the name of `dtype`, or for None of the machine's default, which a line states.

    `int8_weights` is from `choose_int8_weights`, `input_bits` that of products with such weights.
    """
    chosen = _name_dtype(dtype)
    if dtype is None:
        platform = jax.default_backend()
        kind = {"cpu": "a CPU", "gpu": "a GPU", "tpu": "a TPU"}.get(platform, platform)
        held = _INT8_NOTES[int8_weights]
        held += ", inputs of products in int8 too" if input_bits == 8 else ""
        say(
            f"loading {path} in {chosen}, the default on {kind}{held} "
            "(dtype=, or --dtype on the command line, chooses another)"
        )
    return chosen


def resolve(path: PathLike) -> AnyPath:
    """Returns the folder of a path or bundled name; raises ValueError if there is none."""
    arguments.check_path("path", path)
    path = places.show_path(path)
    folder = places.make_path(path)
    try:
        if folder.is_dir():
            return folder
    except OSError as error:  # a name that is too long, a folder that may not be searched
        if places.is_remote(path):
            raise
        raise mismatch_error(path, error.strerror, "a checkpoint folder") from None
    if str(path) in bundled():
        return BUNDLED / str(path)
    names = ", ".join(bundled()) or "none are there"
    kind = "a file" if folder.exists() else "no such path"
    expected = f"a checkpoint folder or a bundled name ({names})"
    if kind != "a file" and _HUB_NAME.fullmatch(str(path)):
        local = shlex.quote(folder.name)
        expected += (
            ". If a model on the Hugging Face Hub is meant, download it into a folder and give "
            f"that: `pip install huggingface_hub; hf download {path} --local-dir {local}`, then "
            f"{local}"
        )
    raise mismatch_error(path, kind, expected)


def open_checkpoint(
    folder: AnyPath, config: T5Config | None, reads_vocabulary: bool = True
) -> Checkpoint:
    """Opens a checkpoint in the format that its folder's contents show; reads no parameter.

    Where the folder holds several, a note names the one that is read: this package's own, where
    config.json is; else transformers' choice among Hugging Face's; else T5X's. Without
    `reads_vocabulary`, the tokenizer of a Hugging Face folder, or beside T5X's, is not read.
    """
    arguments.check_kind("config", config, T5Config | None, "a T5Config")
    step, ours = t5x.find_step(folder), native_format.is_folder(folder)
    theirs = huggingface.list_weights(folder) if _is_theirs(folder) else []
    if step is not None and (config is not None or not (ours or theirs)):
        checkpoint, read = _open_step(step, config, reads_vocabulary), _list_parts(step, folder)[0]
    elif config is not None:
        raise mismatch_error(
            folder, "config=", "it for a T5X checkpoint only (here is a config.json)"
        )
    elif ours:
        checkpoint, read = native_format.open_folder(folder), "params"
    elif kind := next((k for k in native_format.PARTS if native_format.is_folder(folder, k)), ""):
        got = f"{native_format.PARTS[kind]}, which only draft for their target"
        raise mismatch_error(folder, got, "a model")
    elif huggingface.is_folder(folder):
        checkpoint = huggingface.open_folder(folder, reads_vocabulary)
        read = next(iter(theirs), "")
    elif (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder}: got {_ADAPTER}")
    else:
        raise mismatch_error(folder, "a folder of no known format", _KNOWN_FORMATS)
    there = ["params"] * ours + huggingface.list_weights(folder) + _list_parts(step, folder)
    others = [name for name in there if name != read]
    if not others:
        return checkpoint
    note = f"{folder}: several checkpoints are there: reading {read}, leaving {', '.join(others)}"
    return dataclasses.replace(checkpoint, notes=(note, *checkpoint.notes))


def _is_theirs(folder: AnyPath) -> bool:
    """Returns whether the folder's config.json is Hugging Face's, and none that `save` wrote."""
    kinds, there = ("model", *native_format.PARTS, "t5x"), (folder / "config.json").exists()
    return there and not any(native_format.is_folder(folder, kind) for kind in kinds)


def _list_parts(step: AnyPath | None, folder: AnyPath) -> list[str]:
    """Returns the names, from `folder` on, of a T5X checkpoint's parameters; the first counts."""
    paths = [step / name for name in ("checkpoint", "state")] if step else []
    return [places.describe_below(path, folder) for path in paths if path.exists()]


def _open_step(step: AnyPath, config: T5Config | None, reads_vocabulary: bool) -> Checkpoint:
    if not native_format.is_folder(step, "t5x"):
        checkpoint = t5x.open_step(step, config)
        vocabulary = _find_vocabulary(step, checkpoint.config) if reads_vocabulary else None
        return dataclasses.replace(checkpoint, vocabulary=vocabulary)
    described = native_format.open_description(step)  # `save` wrote it
    config = config or check_t5(str(step / "config.json"), described.config)
    parameters = t5x.open_step(step, config).parameters
    return dataclasses.replace(described, config=config, parameters=parameters)


def _find_vocabulary(step: AnyPath, config: ModelConfig) -> Vocabulary | None:
    """Returns the vocabulary in the folder of a T5X checkpoint or beside it, None without one."""
    folders = (step, step.absolute().parent)
    paths = [folder / name for folder in folders for name in _VOCABULARY_FILES]
    path = next((path for path in paths if path.is_file()), None)
    return _read_vocabulary(path, config) if path else None


def _read_vocabulary(
    path: PathLike, config: ModelConfig, stop_ids: tuple[int, ...] = ()
) -> Vocabulary:
    arguments.check_kind("vocabulary", path, PathLike, "a Vocabulary, or a path")
    path = places.make_path(path)
    if not path.exists():
        raise mismatch_error(path, "no such file", "a SentencePiece model or a tokenizer.json")
    if path.suffix == ".json":
        return TokenizerJsonVocabulary.load(path, stop_ids=stop_ids)
    pieces = SentencePieceVocabulary.load(path)
    # T5's 32,000 pieces lie below 32,128 logits, of which 100 are sentinels.
    return SentencePieceVocabulary(pieces.model, count_sentinels(pieces.size, config.vocab_size))


def _choose_vocabulary(
    given: Vocabulary | PathLike | None, checkpoint: Checkpoint
) -> Vocabulary | None:
    if given is None or isinstance(given, Vocabulary):
        return given or checkpoint.vocabulary
    return _read_vocabulary(given, checkpoint.config, checkpoint.eos_ids or ())
