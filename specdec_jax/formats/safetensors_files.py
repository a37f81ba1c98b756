"""Tensors of safetensors files, read by rows with plain file reads, written one at a time.

A memory map would be simpler, but the pages it touches count as the process's memory beside the parameters.
"""

import json
import math
import pathlib
import struct

import jax.numpy as jnp
import numpy as np

from specdec_jax.formats.leaves import Leaf, Track, fill_rows
from specdec_jax.writing import naming, write_file

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_CODES = {np.dtype(dtype).name: code for code, dtype in _DTYPES.items()}
SHARD_BYTES = 5 * 10**9  # of tensors in one file, as transformers cuts them


def open_folder(folder: pathlib.Path) -> dict[str, Leaf]:
    """Every tensor of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Raises:
      ValueError: a shard or a tensor is missing, or a file is truncated.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return _open_file(folder / "model.safetensors")
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError):
        raise ValueError(f"{index}: got no readable weight_map, expected a safetensors index") from None
    tensors = {}
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).exists():
            raise ValueError(f"{folder}: got no shard {shard}, expected it as {index.name} names it")
        tensors |= _open_file(folder / shard)
    for name, shard in shard_of.items():
        if name not in tensors:
            raise ValueError(f"{folder / shard}: got no tensor {name}, expected it as {index.name} names it")
    return tensors


def _open_file(path: pathlib.Path) -> dict[str, Leaf]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(
                f"{path}: got a file of {size} bytes, expected a safetensors header of {length} (truncated?)"
            )
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            leaves = {name: _leaf(path, name, entry, 8 + length) for name, entry in entries.items()}
            end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError):
            raise ValueError(f"{path}: got no readable header, expected a safetensors file") from None
    if size != end:
        raise ValueError(f"{path}: got {size} bytes, expected {end} by its header (truncated or damaged)")
    return leaves


def _leaf(path: pathlib.Path, name: str, entry: dict, base: int) -> Leaf:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: tensor {name}: got dtype {entry['dtype']}, expected one of {', '.join(_DTYPES)}")
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{path}: tensor {name}: got {end - begin} bytes, expected {dtype} of shape {shape}")
    width = math.prod(shape[1:])

    def read_rows(start: int, stop: int) -> np.ndarray:
        offset = base + begin + start * width * dtype.itemsize
        rows = np.fromfile(path, dtype, (stop - start) * width, offset=offset)
        return rows.reshape(stop - start, *shape[1:])

    read = lambda dtype, transpose: fill_rows(shape, dtype, read_rows, transpose)
    return Leaf(shape, read, dtype.name)


def write_folder(tensors: dict[str, Leaf], dtype: str, folder: pathlib.Path, track: Track = iter) -> None:
    """Writes `model.safetensors`, or shards of at most `SHARD_BYTES` and their index; tensors larger than that stand alone."""
    size = lambda name: math.prod(tensors[name].shape) * jnp.dtype(dtype).itemsize
    shards: list[list[str]] = [[]]
    for name in tensors:
        if shards[-1] and sum(map(size, shards[-1])) + size(name) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    one, count = len(shards) == 1, len(shards)
    files = ["model.safetensors" if one else f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    file_of = {}
    for file, names in zip(files, shards):
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            begin, end = end, end + size(name)
            entry = {"dtype": _CODES[dtype], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
            header |= {name: entry}
            file_of[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8 bytes
        write_file(folder / file, struct.pack("<Q", len(text)) + text)
    for name in track(list(tensors)):
        with naming(folder / file_of[name]), open(folder / file_of[name], "ab") as stream:
            stream.write(np.ascontiguousarray(tensors[name].load(dtype)).reshape(-1).view(np.uint8).data)
    if not one:
        index = {"metadata": {"total_size": sum(map(size, tensors))}, "weight_map": file_of}
        write_file(folder / "model.safetensors.index.json", json.dumps(index, indent=1) + "\n")
