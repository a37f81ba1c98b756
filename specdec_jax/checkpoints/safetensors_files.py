"""Reads tensors of safetensors files by rows, with plain file reads, and writes them one at a time.

A memory map would be simpler, but the pages it touches count as the process's memory, on top of the
parameters.
"""

import json
import math
import pathlib
import struct

import jax.numpy as jnp
import numpy as np
import safetensors

from specdec_jax.checkpoints.stored_tensor import Leaf, Report, fill_rows, reporting, unreadable
from specdec_jax.files import reading
from specdec_jax.files.writing import naming, write_file

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_CODES = {np.dtype(dtype).name: code for code, dtype in _DTYPES.items()}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # most bytes of tensors in one file, as in transformers


def open_folder(folder: pathlib.Path) -> dict[str, Leaf]:
    """Returns every tensor of `model.safetensors`, else of the shards that
    `model.safetensors.index.json` names.

    That order is transformers': saving a whole model into a folder of shards leaves their index.

    Raises:
      ValueError: a shard or a tensor is missing, or a file is damaged.
    """
    index = folder / INDEX
    if (folder / WHOLE).exists() or not index.exists():
        return _open_file(folder / WHOLE)
    shard_of = reading.read_json(index).get("weight_map")
    if not isinstance(shard_of, dict):
        raise ValueError(
            f"{index}: got weight_map {reading.shown(shard_of)}, expected each tensor's file by its name"
        )
    reading.check_names(shard_of, index)
    shards = {name: reading.inside(folder, shard, index) for name, shard in shard_of.items()}
    tensors: dict[pathlib.Path, dict[str, Leaf]] = {}
    for shard in sorted(set(shards.values())):
        tensors[shard] = _open_file(shard)
    for name, shard in shards.items():
        if name not in tensors[shard]:
            raise ValueError(f"{shard}: got no tensor {name}, expected it as {index.name} names it")
    return {name: leaf for leaves in tensors.values() for name, leaf in leaves.items()}


def _open_file(path: pathlib.Path) -> dict[str, Leaf]:
    """Returns the tensors of one file.

    The package `safetensors` checks the header: its lengths, and that the tensors fill the file.
    """
    reading.check_file(path, 2**63)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size, reading.MOST_BYTES):
            raise ValueError(
                f"{path}: got a header of {length:,} bytes, expected a safetensors file (truncated?)"
            )
        header = file.read(length)
    try:
        with safetensors.safe_open(path, "numpy"):
            # Unlike the package, `parse_json` rejects a name that is there twice.
            entries = reading.parse_json(header.decode())
    except (safetensors.SafetensorError, ValueError) as error:
        got = reading.reason(error).removeprefix("got ")
        raise ValueError(f"{path}: got {got}, expected a safetensors file (truncated?)") from None
    reading.check_names(entries, path)
    return {
        name: _leaf(path, name, entry, 8 + length)
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _leaf(path: pathlib.Path, name: str, entry: dict, base: int) -> Leaf:
    """Returns a tensor; one of another dtype can be left out, as masks of GPT-2 are, but not be
    read."""
    shape, code, offset = tuple(entry["shape"]), entry["dtype"], base + entry["data_offsets"][0]
    if code not in _DTYPES:
        return unreadable(path, name, shape, code)
    dtype, width = np.dtype(_DTYPES[code]), math.prod(shape[1:])

    def read_rows(start: int, stop: int) -> np.ndarray:
        place = offset + start * width * dtype.itemsize
        return np.fromfile(path, dtype, (stop - start) * width, offset=place).reshape(
            stop - start, *shape[1:]
        )

    def read(dtype, transpose):
        return fill_rows(shape, dtype, read_rows, transpose)

    return Leaf(shape, read, dtype.name)


def write_folder(
    tensors: dict[str, Leaf], dtype: str, folder: pathlib.Path, report: Report
) -> None:
    """Writes `model.safetensors`, or an index and shards of at most `SHARD_BYTES`; a larger tensor
    has a shard of its own."""

    def size(name):
        return math.prod(tensors[name].shape) * jnp.dtype(dtype).itemsize

    shards: list[list[str]] = [[]]
    for name in tensors:
        if shards[-1] and sum(map(size, shards[-1])) + size(name) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    one, count = len(shards) == 1, len(shards)
    files = [
        WHOLE if one else f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    file_of = {}
    for file, names in zip(files, shards):
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            begin, end = end, end + size(name)
            entry = {
                "dtype": _CODES[dtype],
                "shape": list(tensors[name].shape),
                "data_offsets": [begin, end],
            }
            header |= {name: entry}
            file_of[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8 bytes
        write_file(folder / file, struct.pack("<Q", len(text)) + text)
    for name in reporting(tensors, report):
        with naming(folder / file_of[name]), open(folder / file_of[name], "ab") as stream:
            stream.write(
                np.ascontiguousarray(tensors[name].load(dtype)).reshape(-1).view(np.uint8).data
            )
    if not one:
        index = {"metadata": {"total_size": sum(map(size, tensors))}, "weight_map": file_of}
        write_file(folder / INDEX, json.dumps(index, indent=1) + "\n")
