"""Defines what every format yields: parameters by T5X's names, each with a way to read it alone."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec_jax.files.places import FolderCopy
from specdec_jax.files.reading import PathLike, mismatch_error
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.models.parameters import parameter_shapes
from specdec_jax.tokenizers.vocabularies import Vocabulary

FLOATS = ("float32", "bfloat16", "float16", "float64")  # what a parameter may be stored as
# What writers call with the size of each parameter that is written.
Report = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One stored parameter.

    Attributes:
      shape: shape in this package's layout, where weights are `[in, out]`.
      read: `(dtype, transpose)` -> the stored array, or its transpose, in that dtype; reads nothing
        else.
      dtype: name of the stored dtype.
      turned: whether the parameter is the transpose of what is stored.
      read_part: `(dtype, box)` -> a part of the stored array, one slice for every axis; None if
        only the whole can be read.
      parts: the int8 values and float32 scales whose product the parameter is, if it is stored in
        int8, else None. The scales have length 1 along the axis on which all numbers share a scale.
      reads_ahead: whether several readings at a time are faster: from a store, and of TensorStore's
        chunks, which are unpacked.
      copy: the copy of a remote folder that is read, which lives as long as the tensor; or None.
    """

    shape: tuple[int, ...]
    read: Callable[[np.dtype, bool], np.ndarray]
    dtype: str
    turned: bool = False
    read_part: Callable[[np.dtype, tuple[slice, ...]], np.ndarray] | None = None
    parts: "tuple[StoredTensor, StoredTensor] | None" = None
    reads_ahead: bool = False
    copy: FolderCopy | None = None

    @property
    def size(self) -> int:
        """How many numbers the parameter has."""
        return math.prod(self.shape)

    def transposed(self) -> "StoredTensor":
        """Returns the transpose of a matrix, made while it is read."""
        parts = self.parts and (self.parts[0].transposed(), self.parts[1].transposed())
        shape = self.shape[::-1]
        return dataclasses.replace(self, shape=shape, turned=not self.turned, parts=parts)

    def load(self, dtype: npt.DTypeLike) -> np.ndarray:
        """Returns the parameter in this package's layout."""
        return self.read(np.dtype(dtype), self.turned)

    def load_part(self, dtype: npt.DTypeLike, box: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the parameter, one slice an axis; reads no more if the format can."""
        whole = all(axis.stop - axis.start == size for axis, size in zip(box, self.shape))
        if whole or self.read_part is None:
            return self.load(dtype)[box]
        part = self.read_part(np.dtype(dtype), box[::-1] if self.turned else box)
        return part.T if self.turned else part

    @classmethod
    def from_function(
        cls, shape: tuple[int, ...], make: Callable[[np.dtype], np.ndarray], dtype: str
    ) -> "StoredTensor":
        """Wraps a parameter that `make` returns in any dtype; it is stored in `dtype`."""

        def read(dtype: np.dtype, transpose: bool) -> np.ndarray:
            array = make(dtype)
            return np.ascontiguousarray(array.T if transpose else array)

        return cls(shape, read, dtype)

    @classmethod
    def from_array(cls, array: Any) -> "StoredTensor":
        """Wraps a numpy or JAX array in memory."""

        def read(dtype: np.dtype, transpose: bool) -> np.ndarray:
            stored = np.asarray(array)
            return np.ascontiguousarray(stored.T if transpose else stored).astype(dtype, copy=False)

        return cls(tuple(array.shape), read, array.dtype.name)

    @classmethod
    def unreadable(
        cls, path: PathLike, name: str, shape: tuple[int, ...], dtype: str
    ) -> "StoredTensor":
        """Wraps a stored array that is no parameter; it may be left out, and `check` rejects it."""

        def read(*_: Any) -> np.ndarray:
            raise _dtype_error(path, name, dtype)

        return cls(shape, read, dtype)


def _dtype_error(path: PathLike, name: str, dtype: str) -> ValueError:
    expected = f"expected one of {', '.join(FLOATS)}"
    return ValueError(f"{path}: parameter {name}: got dtype {dtype}, {expected}")


Parameters = dict[str, StoredTensor]  # by their names


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint of which no parameter has been read yet.

    Attributes:
      config: shape of the network; its `dtype` does not matter.
      parameters: by T5X's names, such as `decoder/layers_0/mlp/wo/kernel`.
      vocabulary: None if the checkpoint has none.
      start_token, eos_ids: None if the checkpoint does not give them.
      encoder_fingerprint: fingerprint of the model whose encoder output the network attends to, see
        `LanguageModel`.
      generation_config: how the model decodes where a call does not choose otherwise.
      notes: lines that whoever loads it should read.
    """

    config: ModelConfig
    parameters: Parameters
    vocabulary: Vocabulary | None = None
    start_token: int | None = None
    eos_ids: tuple[int, ...] | None = None
    encoder_fingerprint: str | None = None
    generation_config: ModelDefaults = ModelDefaults()
    notes: tuple[str, ...] = ()


def is_same_tensor(first: StoredTensor, second: StoredTensor) -> bool:
    """Returns whether two tensors are one, or have the same bits; a file may hold copies.

    What is no matrix or vector of floating-point numbers, or has none, is never the same: it is
    rejected by its own name.
    """
    if first is second or first.shape != second.shape:
        return first is second
    if first.dtype != second.dtype or first.dtype not in FLOATS:
        return False
    if len(first.shape) not in (1, 2) or not first.size:  # of no numbers there may be many rows
        return False
    one, two = (part.load(part.dtype).reshape(-1).view(np.uint8) for part in (first, second))
    return np.array_equal(one, two)


def iterate_names(parameters: Parameters, report: Report) -> Iterator[str]:
    """Yields the names, and reports the size of each parameter before the next name."""
    for name, tensor in parameters.items():
        yield name
        report(tensor.size)


def check(checkpoint: Checkpoint, path: PathLike) -> None:
    """Raises ValueError unless the parameters are those of the configuration, in a float dtype.

    A parameter may be missing, unexpected or of the wrong shape.
    """
    parameters, config = checkpoint.parameters, checkpoint.config
    whose = f"of a {config.family.upper()} of this configuration"
    check_shapes(parameters, parameter_shapes(config), path, whose)
    for name, tensor in parameters.items():
        if tensor.dtype not in FLOATS and tensor.parts is None:
            raise _dtype_error(path, name, tensor.dtype)


def check_shapes(
    parameters: Mapping[str, Any], expected: dict[str, tuple[int, ...]], path: PathLike, whose: str
) -> None:
    """Raises ValueError unless `parameters` have exactly the expected names and shapes.

    `whose` ends the message, e.g. "of these heads".
    """
    for name, shape in expected.items():
        if name not in parameters:
            raise mismatch_error(f"{path}: parameter {name}", "none", f"one of shape {shape}")
        if (got := tuple(parameters[name].shape)) != shape:
            raise mismatch_error(f"{path}: parameter {name}", f"shape {got}", shape)
    for name in parameters:
        if name not in expected:
            raise mismatch_error(path, f"unexpected parameter {name}", f"only those {whose}")


_BLOCK_BYTES = 1 << 22  # how much of a local file `fill_rows` reads at a time


def fill_rows(
    shape: tuple[int, ...],
    read_rows: Callable[[int, int], np.ndarray],
    dtype: npt.DTypeLike,
    transpose: bool = False,
    multiple: int = 1,
    block: int | None = None,
) -> np.ndarray:
    """Returns an array built from blocks of rows: a cast or a transpose holds no second copy of it.

    Args:
      shape: `(rows, …)` as stored.
      read_rows: `(start, stop)` -> those rows as stored.
      dtype: dtype of the result.
      transpose: whether the result is the transpose of the stored matrix.
      multiple: number of rows that are stored together; blocks are multiples of it.
      block: bytes of a block in float32; None: as suits a local file.
    """
    out = np.empty(shape[::-1] if transpose else shape, dtype)
    if not out.size:
        return out
    if not shape:
        out[()] = read_rows(0, 1).reshape(())
        return out
    rows = (block or _BLOCK_BYTES) // (4 * max(1, math.prod(shape[1:])))
    step = multiple * max(1, rows // multiple)
    by_rows = out.T if transpose else out
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        by_rows[start:stop] = read_rows(start, stop)
    return out
