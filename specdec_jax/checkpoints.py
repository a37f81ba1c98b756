"""Loading, saving and converting models: Hugging Face folders, T5X checkpoints, this package's own folders, the bundled models."""

import dataclasses
import pathlib
import re
import shlex
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.formats import eight_bits, huggingface, own, t5x
from specdec_jax.formats.allocator import returning_freed_memory
from specdec_jax.formats.leaves import (
    Checkpoint,
    Leaf,
    Track,
    check,
    parameter_count,
)
from specdec_jax.models import packing
from specdec_jax.models.base import LanguageModel, ModelConfig, check_ids, t5_only
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.int8 import Int8Kernel
from specdec_jax.models.t5 import T5Config
from specdec_jax.sharding import Mesh, ShardingRules
from specdec_jax.vocabularies import SentencePieceVocabulary, TokenizerJsonVocabulary, Vocabulary
from specdec_jax.weights import kernels_of, read_params, required_bytes
from specdec_jax.writing import new_folder

CGROUPS, CGROUPS_OF_PROCESS = pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/proc/self/cgroup")
MEMORY = pathlib.Path("/proc/meminfo")
BUNDLED = pathlib.Path(__file__).parent / "bundled"
DTYPES = ("float32", "bfloat16")
FORMATS = ("specdec", "huggingface", "t5x", "t5x_legacy")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name
_VOCABULARY_FILES = ("spiece.model", "sentencepiece.model", "tokenizer.json")


def bundled() -> tuple[str, ...]:
    """Names of the models that come with the package, for `load`: "ende/target", "ende/drafter"."""
    return tuple(sorted(str(path.parent.relative_to(BUNDLED)) for path in BUNDLED.glob("*/*/config.json")))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load(
    path,
    dtype=None,
    *,
    config: T5Config | None = None,
    vocabulary: Vocabulary | str | pathlib.Path | None = None,
    mesh: Mesh | None = None,
    replicate: bool = False,
    quantize: str | None = None,
    say: Callable[[str], None] = _say,
) -> LanguageModel:
    """A model of any format this package knows, recognised by the folder's contents.

    Parameters are read one at a time, so that peak memory stays near the size of the weights in `dtype`.

    Args:
      path: a Hugging Face folder; a T5X `checkpoint_<step>` or the folder of several (the newest is taken); a folder
        that `save` wrote; or one of `bundled()`.
      dtype: of parameters and computation. "float32" multiplies at float32 precision on every device (on
        accelerators, which would round the operands, by `jax.lax.Precision.HIGHEST`); "bfloat16" multiplies bfloat16
        operands; normalisation, softmax and logits are float32 in both. None: float32 on a CPU, bfloat16 on an
        accelerator.
      config: for a T5X checkpoint, which does not hold one: None infers it from the parameters, taking a gated
        feed-forward block for gelu (give it for UL2's silu).
      vocabulary: overrides the checkpoint's; a `Vocabulary`, or the path of a SentencePiece model (with T5's 100
        sentinels where the embedding has room for them) or of a tokenizer.json. A T5X checkpoint has none, unless a
        `spiece.model`, `sentencepiece.model` or `tokenizer.json` lies beside it; without one a model takes ids only.
      mesh: devices that share the model, from `make_mesh` or with the axes "data" and "model"; every process reads what its
        own devices hold (all of a parameter where the format has no parts). None: the default device has all.
      replicate: with a mesh, every device holds the whole model, and only rows are divided: for drafters.
      quantize: weights in 8 bits, multiplied with inputs rounded to 16: a quarter of the bytes that a step on a CPU reads. They
        take float32, a CPU, no mesh, and the package's own kernel (`specdec demo` says whether it is there). None: kernels that
        are stored in 8 bits stay so where that can be had, which changes no number but by the rounding of inputs; all others
        are in `dtype`. "int8": every kernel, the head's too, is rounded while it is read, unless it is stored so: the model is then
        another one, and the law of what it decodes is that of the rounded model. "none": all are in `dtype`.
      say: where the line about the chosen dtype goes; standard error.

    Raises:
      ValueError: one line with what was got and what was expected: no such path, an unknown format or architecture,
        a truncated checkpoint, a parameter that is missing, unexpected or of the wrong shape, not enough memory; heads or a
        feed-forward width that the mesh does not divide; `quantize="int8"` where it cannot be had.
    """
    if replicate and mesh is None:
        raise ValueError("replicate: got it without a mesh, expected one")
    rules = None if mesh is None else ShardingRules(mesh, replicate)
    folder = resolve(path)
    checkpoint = _open(folder, config)
    checkpoint = _completed(checkpoint, vocabulary, folder)
    kernels = kernels_of(checkpoint, quantize, _known_dtype(dtype), rules)
    dtype = choose_dtype(dtype, path, say, kernels)
    if rules is not None:
        rules.check(checkpoint.config)
    _check_memory(checkpoint.config, dtype, folder, rules, kernels)
    network = dataclasses.replace(checkpoint.config, dtype=dtype, matmul_dtype=None)
    with returning_freed_memory():
        params = read_params(checkpoint, dtype, rules, kernels)
        return LanguageModel(
            network, params, checkpoint.vocabulary, start_token=checkpoint.start_token, eos_ids=checkpoint.eos_ids,
            name=str(path), donate_params=True, encoder_fingerprint=checkpoint.encoder_fingerprint, rules=rules,
        )  # fmt: skip


def _completed(checkpoint: Checkpoint, vocabulary, folder: pathlib.Path) -> Checkpoint:
    """The checkpoint with the vocabulary that is to be used and with special ids, all checked; nothing is read."""
    check(checkpoint, folder)
    vocabulary = _choose_vocabulary(vocabulary, checkpoint)
    start = 0 if checkpoint.start_token is None else checkpoint.start_token
    eos_ids = checkpoint.eos_ids  # () says that nothing ends a sequence
    if eos_ids is None:
        eos_ids = vocabulary.eos_ids if vocabulary else (1,)
    try:
        check_ids(checkpoint.config, vocabulary, start, eos_ids)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return dataclasses.replace(checkpoint, vocabulary=vocabulary, start_token=start, eos_ids=tuple(eos_ids))


def load_vocabulary(path, vocabulary=None) -> tuple[Vocabulary | None, int]:
    """A checkpoint's vocabulary (`vocabulary` overrides it) and its start token; no parameter is read."""
    checkpoint = _open(resolve(path), None)
    return _choose_vocabulary(vocabulary, checkpoint), checkpoint.start_token or 0


def load_shape(path) -> ModelConfig:
    """A checkpoint's configuration; no parameter is read."""
    return _open(resolve(path), None).config


def save(model: LanguageModel, path, dtype=None, format: str = "specdec") -> None:
    """Writes a model that `load` reads, in `dtype`, as for `convert`: kernels in 8 bits are widened, unless that is "int8".

    The vocabulary's file goes into the folder, unless, for "specdec", the folder above holds the same file. The folder appears
    whole or not at all; an earlier model folder of this package there is replaced.

    Args:
      format: as for `convert`.

    Raises:
      ValueError: `path` is something else than a model folder, or the format cannot hold the model.
    """
    folder = pathlib.Path(path).absolute()
    check = own.check_free if _check_format(format) == "specdec" else _check_empty
    check(folder)
    leaves = {"/".join(names): _leaf(value) for names, value in packing.stored_parameters(model.network.params)}
    checkpoint = Checkpoint(
        model.config, leaves, model.vocabulary, model.start_token, model.eos_ids, model.encoder_fingerprint
    )
    _write(checkpoint, folder, check, format, dtype)


def _leaf(value: packing.Plain) -> Leaf:
    if isinstance(value, Int8Kernel):
        return eight_bits.product(Leaf.of(value.values), Leaf.of(value.scales[None]))
    return Leaf.of(value)


class Written(NamedTuple):
    """What `convert` wrote.

    Attributes:
      folder: for T5X the `checkpoint_<step>` directory.
      dtype: of the parameters there. stored: of those in the source, several where they differ.
      parameters: how many numbers. size: bytes of all files.
    """

    folder: pathlib.Path
    dtype: str
    stored: tuple[str, ...]
    parameters: int
    size: int


def convert(
    source, output, format: str = "huggingface", dtype=None, *, config: T5Config | None = None, vocabulary=None,
    track: Track = iter,
) -> Written:  # fmt: skip
    """Writes a checkpoint in another format; parameters pass through memory one at a time.

    Vocabulary, start token and EOS ids are kept. A T5X checkpoint gets them, and the configuration, in a config.json of this
    package beside the parameters, since the format has no place for them; optimizer states are neither read nor written.

    Args:
      source: whatever `load` reads.
      output: a folder that does not exist or is empty. It appears whole or not at all. For T5X one named
        `checkpoint_<step>` is the checkpoint itself, any other gets `checkpoint_<step>` inside, with the source's step if that
        is T5X's, else 1.
      format: "huggingface" (config.json, safetensors, tokenizer), "t5x" (Orbax, what T5X writes today), "t5x_legacy", or
        "specdec", this package's own.
      dtype: "float32" or "bfloat16", or for "specdec" also "int8": kernels and embeddings in 8 bits, those that are
        stored so with the very integers, the rest in float32. Drafters and heads that were trained on a target's states do not fit the rounded
        one. None: bfloat16 if all parameters are stored so, else float32.
      config, vocabulary: as for `load`.
      track: given the parameters' names, yields them: for a progress bar.

    Raises:
      ValueError: as for `load`; `output` holds something, or the format cannot hold the model.
    """
    _check_format(format)
    if dtype is not None:
        _check_stored(dtype, format)
    target = pathlib.Path(output).absolute()
    _check_empty(target)
    folder = resolve(source)
    checkpoint = _completed(_open(folder, config), vocabulary, folder)
    found = t5x.find(folder)
    step = t5x.step_of(found) if found else None
    with returning_freed_memory():
        return _write(checkpoint, target, _check_empty, format, dtype, step, track)


def _check_format(format: str) -> str:
    if format not in FORMATS:
        raise ValueError(f"format: got {format!r}, expected one of {', '.join(FORMATS)}")
    return format


def _check_empty(folder: pathlib.Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        kind = "a folder that is not empty" if folder.is_dir() else "a file"
        raise ValueError(f"{folder}: got {kind}, expected nothing there")


def _write(
    checkpoint: Checkpoint, target: pathlib.Path, check_free: Callable[[pathlib.Path], None], format: str, dtype,
    step: int | None = None, track: Track = iter,
) -> Written:  # fmt: skip
    """Writes a checkpoint whose special ids are known, and makes sure that the format says of it what it should."""
    if format != "specdec" and (checkpoint.config.encoder_dim is not None or isinstance(checkpoint.config, GPTConfig)):
        kind = "a decoder-only model" if isinstance(checkpoint.config, GPTConfig) else "one without an encoder"
        raise ValueError(f"format: got {format!r} for {kind}, expected 'specdec'")
    stored = tuple(sorted({leaf.dtype for leaf in checkpoint.leaves.values()}))
    default = "bfloat16" if stored == ("bfloat16",) else "float32"
    dtype = default if dtype is None else _check_stored(dtype, format)
    computing = "float32" if dtype == "int8" else dtype
    checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, dtype=computing))
    inner = pathlib.PurePath()
    if format.startswith("t5x") and t5x.step_of(target) is None:
        inner = pathlib.PurePath(f"checkpoint_{step or 1}")  # T5X takes a step 0 for none
    with new_folder(target, check_free) as temporary:
        folder = temporary / inner
        folder.mkdir(exist_ok=True)
        if format == "specdec":
            own.write_folder(checkpoint, dtype, folder, track)
        elif format == "huggingface":
            huggingface.write_folder(checkpoint, dtype, folder, track)
        else:
            number = t5x.step_of(target) if inner == pathlib.PurePath() else t5x.step_of(folder)
            write = t5x.write_orbax if format == "t5x" else t5x.write_legacy
            own.write_description(checkpoint, folder, "t5x")
            write(checkpoint.leaves, dtype, folder, number, track)
        _check_written(_open(folder, None), checkpoint, format)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Written(target / inner, dtype, stored, parameter_count(checkpoint.config), size)


def _check_written(written: Checkpoint, checkpoint: Checkpoint, format: str) -> None:
    """Raises ValueError where a format has no way to say something of a model, as Hugging Face's ByT5 of no sentinels."""

    def said(checkpoint: Checkpoint) -> dict:
        config, vocabulary = checkpoint.config, checkpoint.vocabulary
        shape = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        if isinstance(config, T5Config) and config.scale_decoder_outputs is None:
            shape["scale_decoder_outputs"] = config.logits_via_embedding
        for name in ("dropout_rate", "dtype", "matmul_dtype"):  # of training, and of the parameters
            shape.pop(name, None)
        ids = dict(
            start_token=checkpoint.start_token, eos_ids=checkpoint.eos_ids, encoder=checkpoint.encoder_fingerprint
        )
        return shape | ids | dict(vocabulary=vocabulary and vocabulary.fingerprint())

    check(written, "what was written")
    ours, theirs = said(checkpoint), said(written)
    for name, value in ours.items():
        if theirs[name] != value:
            raise ValueError(f"format: got {name}={value!r}, which {format} would give back as {theirs[name]!r}")


def available_bytes(device: jax.Device | None = None) -> int | None:
    """Free memory of the device that parameters go to, within the limit of a container; None where it cannot be told."""
    device = device or jax.devices()[0]
    if device.platform != "cpu":
        statistics = device.memory_stats() or {}
        limit = statistics.get("bytes_limit")
        return None if limit is None else limit - statistics.get("bytes_in_use", 0)
    amounts = _cgroup_bytes()
    for line in _lines(MEMORY):
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) * 1024)
    return min(amounts, default=None)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _cgroup_bytes() -> list[int]:
    """What is left under each memory limit that a container or a service sets on this process (cgroups v2 and v1).

    Cached file pages count as free, as in MemAvailable: reading a checkpoint fills a container up with them.
    """
    left = []
    for line in _lines(CGROUPS_OF_PROCESS):  # "0::/path" (v2), "4:memory:/path" (v1)
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, prefix = CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, usage, prefix = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # Limits of the groups above hold too; in a container the path may be the host's, and the root is its own group.
        parts = path.strip("/").split("/")
        for folder in (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
            numbers = [int(text) for name in (limit, usage) for text in _lines(folder / name) if text.isdigit()]
            if len(numbers) == 2:  # "max" is no limit
                pages = (prefix + "active_file", prefix + "inactive_file")
                cached = sum(int(row.split()[1]) for row in _lines(folder / "memory.stat") if row.startswith(pages))
                left.append(numbers[0] - numbers[1] + cached)
    return left


def _check_memory(
    config: ModelConfig, dtype: str, path, rules: ShardingRules | None = None, kernels: str | None = None
) -> None:
    available = available_bytes() if rules is None else available_bytes(rules.mesh.local_devices[0])
    required = required_bytes(config, dtype, rules, kernels)
    if available is not None and required > available:
        raise ValueError(
            f"{path}: got {available / 1e9:.2f} GB of free memory, expected at least {required / 1e9:.2f} GB for "
            f"{parameter_count(config):,} parameters in {'8 bits and ' if kernels else ''}{dtype}"
        )


def _check_stored(dtype, format: str) -> str:
    """`dtype` of what is written in this format."""
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
    """`dtype`, or the default of the machine."""
    if dtype is not None:
        return _check_dtype(dtype)
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


_IN_8_BITS = {"stored": ", with the 8-bit weights it is stored with", "rounded": ", with weights rounded to 8 bits"}


def choose_dtype(dtype, path, say: Callable[[str], None] = _say, kernels: str | None = None) -> str:
    """`dtype`, or the default of the machine, which `say` is then told with `path` and what `kernels_of` gave."""
    chosen = _known_dtype(dtype)
    if dtype is None:
        platform = jax.default_backend()
        kind = {"cpu": "a CPU", "gpu": "a GPU", "tpu": "a TPU"}.get(platform, platform)
        say(
            f"loading {path} in {chosen}, the default on {kind}{_IN_8_BITS.get(kernels or '', '')} "
            "(dtype=, or --dtype on the command line, chooses another)"
        )
    return chosen


def resolve(path) -> pathlib.Path:
    """Returns the folder of a checkpoint that `load` is given; ValueError where there is none."""
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


def _open(folder: pathlib.Path, config: T5Config | None) -> Checkpoint:
    """Recognises the format by contents; nothing of the parameters is read."""
    step = t5x.find(folder)
    if step is not None:
        if own.is_folder(step, "t5x"):  # `save` wrote it
            described = own.open_description(step)
            checkpoint = t5x.open_step(step, config or t5_only(str(step / "config.json"), described.config))
            return dataclasses.replace(described, config=checkpoint.config, leaves=checkpoint.leaves)
        checkpoint = t5x.open_step(step, config)
        return dataclasses.replace(checkpoint, vocabulary=_beside(step, checkpoint.config))
    if config is not None:
        raise ValueError(f"{folder}: got config=, expected it for a T5X checkpoint only (a config.json says it here)")
    if own.is_folder(folder):
        return own.open_folder(folder)
    if own.is_folder(folder, "heads"):
        raise ValueError(f"{folder}: got heads, which only draft for their target, expected a model")
    if huggingface.is_folder(folder):
        return huggingface.open_folder(folder)
    expected = "a Hugging Face folder (config.json), a T5X checkpoint (checkpoint_<step>) or one that save wrote"
    raise ValueError(f"{folder}: got a folder of no known format, expected {expected}")


def _beside(step: pathlib.Path, config: ModelConfig) -> Vocabulary | None:
    places = [place / name for place in (step, step.absolute().parent) for name in _VOCABULARY_FILES]
    path = next((place for place in places if place.is_file()), None)
    return _read_vocabulary(path, config) if path else None


def _read_vocabulary(path, config: ModelConfig, stop_ids: tuple[int, ...] = ()) -> Vocabulary:
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"{path}: got no such file, expected a SentencePiece model or a tokenizer.json")
    if path.suffix == ".json":
        return TokenizerJsonVocabulary.load(path, stop_ids=stop_ids)
    pieces = SentencePieceVocabulary.load(path)
    # T5's 32,000 pieces lie below 32,128 logits, of which 100 are sentinels; mT5's file holds its sentinels itself.
    return SentencePieceVocabulary(pieces.model, 100) if config.vocab_size - pieces.size >= 100 else pieces


def _choose_vocabulary(given, checkpoint: Checkpoint) -> Vocabulary | None:
    if given is None or isinstance(given, Vocabulary):
        return given or checkpoint.vocabulary
    return _read_vocabulary(given, checkpoint.config, checkpoint.eos_ids or ())
