"""Reads tensors of PyTorch's files (`torch.save`) by rows, without PyTorch.

A file is a zip archive with the pickle `NAME/data.pkl` and a record `NAME/data/KEY` for each
storage; before PyTorch 1.6 it was five pickles, then the storages one after another. Pickles are
read by `pickled_tensors`, which runs none of what they name.
"""

import functools
import io
import math
import struct
import zipfile
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import safetensors_files
from specdec_jax.checkpoints.pickled_tensors import BoundedReader, Storage, Tensor, read_pickle
from specdec_jax.checkpoints.stored_tensor import FLOATS, Parameters, StoredTensor, fill_rows
from specdec_jax.files import places, reading
from specdec_jax.files.places import AnyPath, RemotePath
from specdec_jax.files.reading import mismatch_error, quote_value

WHOLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# The first two pickles of a legacy file, see `torch/serialization.py`.
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_ZIP, _LOCAL_HEADER = b"PK\x03\x04", 30


class _Contents(NamedTuple):
    """What a file holds, and the place of each storage in bytes."""

    tree: Any
    places: dict[str, int]


def open_folder(folder: AnyPath) -> Parameters:
    """Returns every tensor of `pytorch_model.bin`, else of the shards that the index names.

    Errors as for `open_file` and `safetensors_files.open_shards`.
    """
    return safetensors_files.open_shards(folder, WHOLE, INDEX, _open_file)


def _open_file(path: AnyPath) -> Parameters:
    """Returns every tensor of a file by its name; none is read yet.

    Raises:
      ValueError: the file is truncated, or holds anything but a flat dict of tensors.
    """
    reading.check_file(path, 2**63)
    try:
        with places.open_binary(path) as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
            file.seek(0)
            contents = (_read_zip if is_zip else _read_legacy)(file, path.stat().st_size)
    except (
        *(ValueError, OSError, MemoryError, struct.error),
        *(zipfile.BadZipFile, NotImplementedError),
    ) as error:
        got = f"no readable PyTorch file ({reading.error_reason(error)})"
        raise mismatch_error(path, got, "a dict of tensors that torch.save wrote") from None
    tree = contents.tree
    if not isinstance(tree, dict):
        raise mismatch_error(path, quote_value(tree), "a dict of tensors")
    reading.check_names(tree, path)
    for name, tensor in tree.items():
        if not isinstance(tensor, Tensor):
            raise mismatch_error(f"{path}: {name}", quote_value(tensor), "a tensor")
        # A view with strides of 0 can be of any size.
        most, stored = path.stat().st_size, _open_dtype(tensor.storage.dtype)
        if math.prod(tensor.shape) * stored.itemsize > most:
            got = f"a view of shape {quote_value(tensor.shape)}"
            raise mismatch_error(f"{path}: {name}", got, f"no more than the file's {most:,} bytes")
    return {
        name: _open_tensor(path, name, tensor, contents.places[tensor.storage.key])
        for name, tensor in tree.items()
    }


def _read_zip(file: BinaryIO, size: int) -> _Contents:
    """Reads an archive's pickle, and finds its records."""
    bounded = BoundedReader(file)
    with zipfile.ZipFile(bounded) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise ValueError("two records of one name")
        names = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError(f"{len(names)} records data.pkl")
        root = names[0].removesuffix("data.pkl")
        if f"{root}byteorder" in entries:
            file.seek(_find_record(bounded, entries, f"{root}byteorder", size))
            if (order := bounded.read(entries[f"{root}byteorder"].file_size)) != b"little":
                raise ValueError(f"the byte order {quote_value(order)}")
        file.seek(_find_record(bounded, entries, names[0], size))
        pickled = bounded.read(entries[names[0]].file_size)
        tree, storages = read_pickle(BoundedReader(io.BytesIO(pickled)))
        places = {}
        for key, storage in storages.items():
            name = f"{root}data/{key}"
            places[key] = _find_record(bounded, entries, name, size)
            _check_length(storage, entries[name].file_size)
    return _Contents(tree, places)


def _find_record(
    file: BoundedReader, entries: dict[str, zipfile.ZipInfo], name: str, size: int
) -> int:
    """Returns the offset of a record's bytes, which must lie uncompressed in the file."""
    if (entry := entries.get(name)) is None:
        raise ValueError(f"no record {quote_value(name)}")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise ValueError(f"the compressed record {quote_value(name)}")
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or not header.startswith(_ZIP):
        raise ValueError(f"no header of the record {quote_value(name)}")
    start = file.tell() + sum(struct.unpack("<HH", header[-4:]))  # a name, and padding
    if start + entry.file_size > size:
        raise ValueError(f"the end of the file within the record {quote_value(name)}")
    return start


def _read_legacy(file: BinaryIO, size: int) -> _Contents:
    """Reads a legacy file's pickles, and finds its storages, each behind its length."""
    bounded = BoundedReader(file)
    magic, _ = read_pickle(bounded)
    version, _ = read_pickle(bounded) if magic == _MAGIC else (None, {})
    if version != _VERSION:
        raise ValueError(f"not torch.save's first values: {quote_value((magic, version))}")
    machine, _ = read_pickle(bounded)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise ValueError("bytes that are not in little-endian order")
    tree, storages = read_pickle(bounded)
    keys, _ = read_pickle(bounded)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"the names of storages {quote_value(keys)}")
    if len(keys) != len(storages) or set(keys) != set(storages):
        raise ValueError("other storages than those of the tensors")
    places = {}
    for key in keys:
        count, width = int.from_bytes(bounded.read(8), "little"), _open_dtype(storages[key].dtype)
        _check_length(storages[key], count * width.itemsize)
        places[key] = file.tell()
        end = places[key] + count * width.itemsize
        if end > size:
            raise ValueError(f"the end of the file within the storage {quote_value(key)}")
        file.seek(end)
    return _Contents(tree, places)


def _check_length(storage: Storage, length: int) -> None:
    """Raises ValueError unless a storage has as many bytes as its tensors were told."""
    if (expected := storage.size * _open_dtype(storage.dtype).itemsize) != length:
        place = f"the storage {quote_value(storage.key)}"
        raise ValueError(f"{length:,} bytes in {place}, where its tensors need {expected:,}")


def _open_dtype(name: str) -> np.dtype:
    return np.dtype(jnp.bfloat16 if name == "bfloat16" else name)


def _open_tensor(path: AnyPath, name: str, tensor: Tensor, base: int) -> StoredTensor:
    """Returns a tensor whose storage begins at the byte `base` of the file."""
    shape, strides, stored = tensor.shape, tensor.strides, _open_dtype(tensor.storage.dtype)
    if stored.name not in FLOATS:
        return StoredTensor.unreadable(path, name, shape, stored.name)
    place, width = base + tensor.offset * stored.itemsize, math.prod(shape[1:])
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    is_dense = all(step == row for step, row, size in zip(strides, rows, shape) if size != 1)
    steps = [step * stored.itemsize for step in strides]

    def read_rows(start: int, stop: int) -> np.ndarray:
        count = (stop - start) * width
        if is_dense or not count:
            begin = place + start * width * stored.itemsize
            return places.read_array(path, stored, count, begin).reshape(-1, *shape[1:])
        # A view with gaps, or with axes in another order. The map ends with the block, and with it
        # the memory of the pages that were touched.
        span = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
        if isinstance(path, RemotePath):
            whole = places.read_array(path, stored, span, place)
        else:
            whole = np.memmap(path, stored, "r", place, (span,))
        return np.array(np.lib.stride_tricks.as_strided(whole, shape, steps)[start:stop])

    block = places.choose_block(path, 4 * math.prod(shape))
    if not is_dense and isinstance(path, RemotePath):  # one reading of the whole
        block = 4 * max(1, math.prod(shape))
    read = functools.partial(fill_rows, shape, read_rows, block=block)
    return StoredTensor(shape, read, stored.name, reads_ahead=places.is_remote(path))
