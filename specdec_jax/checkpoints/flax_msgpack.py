"""Reads Flax's msgpack files one array at a time: first all headers, then each array's bytes.

`flax.serialization.msgpack_restore` and the package `msgpack` read every array whole and do not
give its place in the file, so this module walks the headers itself.

A file holds nested maps from strings to arrays. An array is an extension of code 1 whose data is
the msgpack of (shape, dtype name, bytes); an array above 1 GiB is a map of such arrays, each flat
(see `flax.serialization`).
"""

import functools
import math
import struct
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints.stored_tensor import FLOATS, Parameters, StoredTensor, fill_rows
from specdec_jax.files import places
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import check_file, mismatch_error, quote_value
from specdec_jax.models.parameters import flatten

_CHUNKED = "__msgpack_chunked_array__"
# Limits of what a file may hold: values, levels of nesting, bytes of a string.
_VALUES = 1_000_000  # T5X's checkpoint of 24 + 24 layers has some 20,000
_DEPTH = 100
_STRING = 4096
# The dtypes that an array may have: those of parameters, and of what a training state holds too.
_INTS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_DTYPES = {name: jnp.dtype(name) for name in (*FLOATS, "bool", *_INTS)}


class Array(NamedTuple):
    """Where an array lies in a file.

    Attributes:
      shape: shape of the array.
      dtype: dtype of the array.
      parts: (offset in the file in bytes, number of elements) of each part, in order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[int, int], ...]


def open_file(path: AnyPath) -> Parameters:
    """Returns every array of the file by its `/`-joined name; none is read yet.

    Raises:
      ValueError: the file is truncated, or holds anything but nested maps of arrays.
    """
    tree = read_tree(path)
    if not isinstance(tree, dict):
        raise mismatch_error(path, quote_value(tree), "Flax parameters")
    return {name: open_array(path, name, array) for name, array in flatten(tree).items()}


def read_tree(path: AnyPath) -> Any:
    """Returns the contents of the file, with an `Array` in place of each array: no array is read.

    Raises:
      ValueError: the file is truncated, or holds something that Flax does not write.
    """
    check_file(path, 2**63)
    try:
        with places.open_binary(path) as file:
            walk = _Walk(file, path.stat().st_size)
            tree = walk.value(0)
            if file.tell() != walk.size:
                raise ValueError(f"{walk.size} bytes where the headers say {file.tell()}")
    except ValueError as error:
        raise mismatch_error(
            path, f"no readable msgpack ({error})", "Flax's (truncated?)"
        ) from None
    return tree


# By the codes of msgpack, the forms of numbers, or of lengths, as `struct` names them.
_NUMBERS = dict(zip(range(0xCA, 0xD4), "fdBHIQbhiq"))
_STRINGS = {0xD9: "B", 0xDA: "H", 0xDB: "I"}
_BYTES = {0xC4: "B", 0xC5: "H", 0xC6: "I"}
_EXTENSIONS = {0xC7: "B", 0xC8: "H", 0xC9: "I"}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_LISTS = {0xDC: "H", 0xDD: "I"}
_MAPS = {0xDE: "H", 0xDF: "I"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class _Walk:
    """Reads a file once from start to end; every method raises ValueError for unsound contents."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self.size, self._left = file, size, _VALUES

    def _read(self, length: int) -> bytes:
        read = self._file.read(length)
        if len(read) < length:
            raise ValueError("the file ends in the middle of a value")
        return read

    def _number(self, form: str) -> Any:
        return struct.unpack(f">{form}", self._read(struct.calcsize(f">{form}")))[0]

    def value(self, depth: int) -> Any:
        """Returns the next value; byte strings as (offset, length), never read."""
        self._left -= 1
        if self._left < 0 or depth > _DEPTH:
            raise ValueError(f"more than {_VALUES:,} values, or {_DEPTH} in each other")
        code = self._number("B")
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code <= 0x8F or code in _MAPS:
            return self._map(code & 0xF if code <= 0x8F else self._number(_MAPS[code]), depth)
        if code <= 0x9F or code in _LISTS:
            count = code & 0xF if code <= 0x9F else self._number(_LISTS[code])
            return [self.value(depth + 1) for _ in range(count)]
        if code <= 0xBF or code in _STRINGS:
            return self._string(code & 0x1F if code <= 0xBF else self._number(_STRINGS[code]))
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        if code in _BYTES:
            return self._skip(self._number(_BYTES[code]))
        if code in _EXTENSIONS or code in _FIXED_EXTENSIONS:
            length = _FIXED_EXTENSIONS.get(code) or self._number(_EXTENSIONS[code])
            return self._extension(self._file.tell() + 1 + length, depth)
        raise ValueError(f"unexpected type 0x{code:02x}")

    def _string(self, length: int) -> str:
        if length > _STRING:
            raise ValueError(f"a string of {length:,} bytes")
        return self._read(length).decode("utf-8")

    def _skip(self, length: int) -> tuple[int, int]:
        offset = self._file.tell()
        if length > self.size - offset:
            raise ValueError(f"{length:,} bytes where the file has {self.size - offset:,}")
        self._file.seek(length, 1)
        return offset, length

    def _map(self, count: int, depth: int) -> dict | Array:
        tree: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str) or not key.isprintable() or key in tree:
                raise ValueError(
                    f"the key {quote_value(key)}, expected printable strings, each once"
                )
            tree[key] = self.value(depth + 1)
        return _join_chunks(tree) if _CHUNKED in tree else tree

    def _extension(self, end: int, depth: int) -> Array:
        kind = self._number("b")
        entry = self.value(depth + 1) if kind in (1, 3) else None  # array, scalar
        entry = entry if isinstance(entry, list) and len(entry) == 3 else [None] * 3
        shape, name, place = entry
        if not _is_shape(shape) or not isinstance(place, tuple):
            raise ValueError(f"an extension of kind {kind} that is no array")
        count, dtype, (offset, length) = math.prod(shape), _DTYPES.get(str(name)), place
        if dtype is None or self._file.tell() != end or length != count * dtype.itemsize:
            raise ValueError(
                f"{length:,} bytes for {quote_value(name)} of shape {quote_value(tuple(shape))}"
            )
        return Array(tuple(shape), dtype, ((offset, count),))


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _read_list(tree: Any) -> list:
    """Returns the list that Flax writes as a map from "0", "1", …; empty for other values."""
    keys = [str(i) for i in range(len(tree))] if isinstance(tree, dict) else []
    return [tree[key] for key in keys] if tree and set(keys) == set(tree) else []


def _join_chunks(tree: dict[str, Any]) -> Array:
    """Returns the array that a map of its parts stands for."""
    shape, chunks = _read_list(tree.get("shape")), _read_list(tree.get("chunks"))
    dtypes = {chunk.dtype if isinstance(chunk, Array) else None for chunk in chunks}
    if len(dtypes) != 1 or None in dtypes:
        raise ValueError("an array in parts that are not arrays")
    parts = tuple(part for chunk in chunks for part in chunk.parts)
    if not _is_shape(shape) or math.prod(shape) != sum(count for _, count in parts):
        raise ValueError(f"parts that do not make an array of shape {quote_value(shape)}")
    return Array(tuple(shape), chunks[0].dtype, parts)


def open_array(path: AnyPath, name: str, array: Any) -> StoredTensor:
    """Returns the parameter `name`, given what `read_tree` returned for it."""
    if not isinstance(array, Array):
        expected = f"an array of {' or '.join(FLOATS)}"
        raise ValueError(f"{path}: parameter {name}: got {quote_value(array)}, expected {expected}")
    if array.dtype.name not in FLOATS:
        return StoredTensor.unreadable(path, name, array.shape, array.dtype.name)
    width, itemsize = math.prod(array.shape[1:]), array.dtype.itemsize

    def read_rows(start: int, stop: int) -> np.ndarray:
        blocks, position, (start, stop) = [], 0, (start * width, stop * width)
        for offset, count in array.parts:
            begin, end = max(start - position, 0), min(stop - position, count)
            if begin < end:
                place = offset + begin * itemsize
                blocks.append(places.read_array(path, array.dtype, end - begin, place))
            position += count
        return np.concatenate(blocks).reshape(-1, *array.shape[1:])

    block = places.choose_block(path, 4 * math.prod(array.shape))
    read = functools.partial(fill_rows, array.shape, read_rows, block=block)
    remote = places.is_remote(path)
    return StoredTensor(array.shape, read, array.dtype.name, reads_ahead=remote)
