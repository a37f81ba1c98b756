"""Reads tensors of safetensors files by rows, and writes them one at a time.

Local files are read plainly. A memory map would be simpler, but the pages it touches count as the
process's memory, on top of the parameters.
"""

import functools
import json
import math
import pathlib
import struct
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import safetensors

from specdec_jax.checkpoints import stored_tensor
from specdec_jax.checkpoints.stored_tensor import Parameters, Report, StoredTensor
from specdec_jax.files import places, reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.files.writing import name_errors, write_file

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_CODES = {np.dtype(dtype).name: code for code, dtype in _DTYPES.items()}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # most bytes of tensors in one file, as in transformers


def open_folder(folder: AnyPath) -> Parameters:
    """Returns every tensor of `model.safetensors`, else of the shards that the index names.

    Errors as for `open_shards`.
    """
    return open_shards(folder, WHOLE, INDEX, _open_file)


def open_shards(folder: AnyPath, whole: str, index_name: str, open_file: Callable) -> Parameters:
    """Returns every tensor of the file `whole`, else of the shards that the index names.

    That order is transformers': saving a whole model into a folder of shards leaves their index.

    Raises:
      ValueError: a shard or a tensor is missing, or a file is damaged.
    """
    index = folder / index_name
    if (folder / whole).exists() or not index.exists():
        return open_file(folder / whole)
    shard_of = reading.read_json(index).get("weight_map")
    if not isinstance(shard_of, dict):
        got, expected = f"weight_map {quote_value(shard_of)}", "each tensor's file by its name"
        raise ValueError(f"{index}: got {got}, expected {expected}")
    reading.check_names(shard_of, index)
    shards: dict[str, AnyPath]
    shards = {name: reading.join_inside(folder, shard, index) for name, shard in shard_of.items()}
    opened = {shard: open_file(shard) for shard in sorted(set(shards.values()))}
    for name, shard in shards.items():
        if name not in opened[shard]:
            raise mismatch_error(shard, f"no tensor {name}", f"it as {index.name} names it")
    return {name: tensor for tensors in opened.values() for name, tensor in tensors.items()}


def _open_file(path: AnyPath) -> Parameters:
    """Returns the tensors of one file.

    The package `safetensors` checks the header: its lengths, and that the tensors fill the file.
    """
    reading.check_file(path, 2**63)
    size = path.stat().st_size
    with places.open_binary(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, reading.MOST_BYTES):
            raise mismatch_error(
                path, f"a header of {length:,} bytes", "a safetensors file (truncated?)"
            )
        header = file.read(length)
    try:
        with places.open_outline(path, length.to_bytes(8, "little") + header) as outline:
            with safetensors.safe_open(outline, "numpy"):
                # Unlike the package, `parse_json` rejects a name that is there twice.
                entries = reading.parse_json(header.decode())
    except (safetensors.SafetensorError, ValueError) as error:
        got = reading.error_reason(error).removeprefix("got ")
        raise ValueError(f"{path}: got {got}, expected a safetensors file (truncated?)") from None
    reading.check_names(entries, path)
    entries.pop("__metadata__", None)
    return {name: _open_tensor(path, name, entry, 8 + length) for name, entry in entries.items()}


def _open_tensor(path: AnyPath, name: str, entry: dict, base: int) -> StoredTensor:
    """Returns a tensor; of another dtype, as a mask of GPT-2, it cannot be read."""
    shape, code, offset = tuple(entry["shape"]), entry["dtype"], base + entry["data_offsets"][0]
    if code not in _DTYPES:
        return StoredTensor.unreadable(path, name, shape, code)
    stored, width = np.dtype(_DTYPES[code]), math.prod(shape[1:])

    def read_rows(start: int, stop: int) -> np.ndarray:
        place = offset + start * width * stored.itemsize
        numbers = places.read_array(path, stored, (stop - start) * width, place)
        return numbers.reshape(stop - start, *shape[1:])

    block = places.choose_block(path, 4 * math.prod(shape))
    read = functools.partial(stored_tensor.fill_rows, shape, read_rows, block=block)
    return StoredTensor(shape, read, stored.name, reads_ahead=places.is_remote(path))


def write_folder(tensors: Parameters, dtype: str, folder: pathlib.Path, report: Report) -> None:
    """Writes `model.safetensors`, or an index and shards of at most `SHARD_BYTES`.

    A larger tensor has a shard of its own.
    """
    sizes = {name: tensors[name].size * jnp.dtype(dtype).itemsize for name in tensors}
    shards: list[list[str]] = [[]]
    for name in tensors:
        if shards[-1] and sum(sizes[held] for held in shards[-1]) + sizes[name] > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    file_of = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else WHOLE
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            begin, end = end, end + sizes[name]
            shape = list(tensors[name].shape)
            header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
            file_of[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8 bytes
        write_file(folder / file, struct.pack("<Q", len(text)) + text)
    for name in stored_tensor.iterate_names(tensors, report):
        with name_errors(folder / file_of[name]), open(folder / file_of[name], "ab") as stream:
            array = np.ascontiguousarray(tensors[name].load(dtype))
            stream.write(array.reshape(-1).view(np.uint8).data)
    if shards[1:]:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        write_file(folder / INDEX, json.dumps(index, indent=1) + "\n")
