"""Flax's msgpack files, one array at a time: the headers are walked first, then each array is read from its own place.

The usual reader holds the whole file, and every array once more. Layout: nested maps from strings to arrays; an array
is an extension of code 1 whose data is the msgpack of (shape, name of the dtype, bytes); above 1 GiB it is a map of such
arrays, flat (`flax.serialization`).
"""

import math
import pathlib
import struct
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.formats.leaves import Leaf, fill_rows, flatten

_CHUNKED = "__msgpack_chunked_array__"


class _Array(NamedTuple):
    """Where an array lies: shape, dtype, and (offset in the file, elements) of its parts in order."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[int, int], ...]


def open_file(path: pathlib.Path) -> dict[str, Leaf]:
    """Every array of the file by its `/`-joined name.

    Raises:
      ValueError: the file is truncated, or holds something else than nested maps of arrays.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            tree = _value(file)
            if file.tell() != size:
                raise ValueError(f"{size} bytes where the headers say {file.tell()}")
        return {name: _leaf(path, array) for name, array in flatten(tree).items()}
    except (ValueError, TypeError, AttributeError, KeyError, struct.error, IndexError, RecursionError) as error:
        raise ValueError(f"{path}: got no readable msgpack ({error}), expected Flax parameters (truncated?)") from None


def _number(file: BinaryIO, form: str) -> int:
    return struct.unpack(f">{form}", file.read(struct.calcsize(f">{form}")))[0]


_INTEGERS = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
_STRINGS = {0xD9: "B", 0xDA: "H", 0xDB: "I"}
_BYTES = {0xC4: "B", 0xC5: "H", 0xC6: "I"}
_EXTENSIONS = {0xC7: "B", 0xC8: "H", 0xC9: "I"}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_LISTS = {0xDC: "H", 0xDD: "I"}
_MAPS = {0xDE: "H", 0xDF: "I"}


def _value(file: BinaryIO) -> Any:
    """The value at the file's place; bytes as (offset, length), never read."""
    code = _number(file, "B")
    if code < 0x80:
        return code
    if code <= 0x8F or code in _MAPS:
        return _map(file, code & 0xF if code <= 0x8F else _number(file, _MAPS[code]))
    if code <= 0x9F or code in _LISTS:
        return [_value(file) for _ in range(code & 0xF if code <= 0x9F else _number(file, _LISTS[code]))]
    if code <= 0xBF or code in _STRINGS:
        return file.read(code & 0x1F if code <= 0xBF else _number(file, _STRINGS[code])).decode()
    if code in (0xC2, 0xC3):
        return code == 0xC3
    if code in _INTEGERS:
        return _number(file, _INTEGERS[code])
    if code in _BYTES:
        length = _number(file, _BYTES[code])
        return file.seek(length, 1) - length, length
    if code in _EXTENSIONS or code in _FIXED_EXTENSIONS:
        length = _FIXED_EXTENSIONS.get(code) or _number(file, _EXTENSIONS[code])
        return _extension(file, file.tell() + 1 + length)
    raise ValueError(f"unexpected type 0x{code:02x}")


def _map(file: BinaryIO, count: int):
    tree = dict((_value(file), _value(file)) for _ in range(count))
    if _CHUNKED not in tree:
        return tree
    shape = tuple(tree["shape"][str(i)] for i in range(len(tree["shape"])))
    chunks = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
    return _Array(shape, chunks[0].dtype, tuple(part for chunk in chunks for part in chunk.parts))


def _extension(file: BinaryIO, end: int) -> _Array:
    kind = _number(file, "b")
    if kind not in (1, 3):  # array, scalar
        raise ValueError(f"unexpected extension {kind}")
    shape, dtype_name, (offset, length) = _value(file)
    dtype = np.dtype(jnp.bfloat16 if dtype_name == "bfloat16" else dtype_name)
    if file.tell() != end or length != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{length} bytes for {dtype} of shape {tuple(shape)}")
    return _Array(tuple(shape), dtype, ((offset, math.prod(shape)),))


def _leaf(path: pathlib.Path, array: _Array) -> Leaf:
    width = math.prod(array.shape[1:])

    def read_rows(start: int, stop: int) -> np.ndarray:
        pieces, position, (start, stop) = [], 0, (start * width, stop * width)
        for offset, count in array.parts:
            begin, end = max(start - position, 0), min(stop - position, count)
            if begin < end:
                pieces.append(np.fromfile(path, array.dtype, end - begin, offset=offset + begin * array.dtype.itemsize))
            position += count
        return np.concatenate(pieces).reshape(-1, *array.shape[1:])

    read = lambda dtype, transpose: fill_rows(array.shape, dtype, read_rows, transpose)
    return Leaf(array.shape, read, array.dtype.name)
