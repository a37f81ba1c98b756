"""Opens the weights of a Hugging Face folder, whichever file holds them, by PyTorch's names."""

import pathlib

from specdec_jax.checkpoints import flax_msgpack, safetensors_files
from specdec_jax.checkpoints.stored_tensor import Leaf

FLAX, PYTORCH = "flax_model.msgpack", ("pytorch_model.bin", "pytorch_model.bin.index.json")
# What is read, in transformers' order; it no longer reads Flax's file, and PyTorch's are not read
# here.
READABLE = (safetensors_files.WHOLE, safetensors_files.INDEX, FLAX)
# Parts of tensors' names that wrappers of a module add: data parallelism, torch.compile, FSDP, and
# checkpointing of activations. No model has a module of such a name.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def present(folder: pathlib.Path, names: tuple[str, ...] = (*READABLE, *PYTORCH)) -> list[str]:
    """Returns the files of weights that `folder` has; the first one counts."""
    return [name for name in names if (folder / name).exists()]


def open_tensors(folder: pathlib.Path) -> tuple[dict[str, Leaf], tuple[str, ...]]:
    """Returns every tensor by PyTorch's name, and lines about what was left out of the names.

    Raises:
      ValueError: no weights in a readable format, damaged files, or two tensors of one name.
    """
    name = next(iter(present(folder)), None)
    if name in PYTORCH:
        raise ValueError(
            f"{folder}: got pytorch_model.bin only, expected model.safetensors; convert with transformers: "
            "AutoModelForSeq2SeqLM (GPT-2: AutoModelForCausalLM).from_pretrained(folder).save_pretrained(new_folder)"
        )
    if name is None:
        raise ValueError(
            f"{folder}: got no weights, expected model.safetensors, its shards, or flax_model.msgpack"
        )
    if name == FLAX:
        return _unwrapped(folder, _from_flax(flax_msgpack.open_file(folder / FLAX)))
    return _unwrapped(folder, safetensors_files.open_folder(folder))


def _from_flax(leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """Returns Flax's leaves with PyTorch's names and `[out, in]` kernels, so that one mapping
    serves both."""
    tensors = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        leaf = leaf.transposed() if last == "kernel" else leaf
        tensors[".".join([*parents, "bias" if last == "bias" else "weight"])] = leaf
    return tensors


def _unwrapped(
    folder: pathlib.Path, tensors: dict[str, Leaf]
) -> tuple[dict[str, Leaf], tuple[str, ...]]:
    """Returns the tensors without the wrappers' parts in their names, and a line if there were any."""
    found: dict[str, Leaf] = {}
    wrappers: dict[str, None] = {}
    for name, leaf in tensors.items():
        parts = name.split(".")
        short = ".".join(part for part in parts if part not in _WRAPPERS)
        if short in found:
            raise ValueError(
                f"{folder}: got two tensors that are {short} without a wrapper's prefix, expected one"
            )
        found[short] = leaf
        wrappers |= dict.fromkeys(part for part in parts if part in _WRAPPERS)
    if not wrappers:
        return found, ()
    shown = " and ".join(f"{part}." for part in wrappers)
    return found, (
        f"{folder}: left {shown} out of the tensors' names, which a wrapper of the saved module added",
    )
