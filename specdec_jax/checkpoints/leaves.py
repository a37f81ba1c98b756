"""What every checkpoint format gives: parameters by T5X's names, each with its shape and a way to read it alone."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import parameter_shapes
from specdec_jax.models.vocabularies import Vocabulary

FLOATS = ("float32", "bfloat16", "float16", "float64")  # what a parameter may be stored as
# What a writer goes through the names of the parameters with: a progress bar, or nothing.
Track = Callable[[Sequence[str]], Iterable[str]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One stored parameter.

    Attributes:
      shape: in this package's layout, kernels `[in, out]`.
      read: `(dtype, transpose)` -> what is stored, or its transpose, as an array of that dtype; reads nothing else.
      dtype: name of the stored dtype.
      turned: the parameter is the transpose of what is stored.
      read_part: `(dtype, box)` -> that part of what is stored, a slice of every axis; None where only all can be read.
      parts: int8 values and float32 scales whose product it is, where that is what is stored; the
        scales have length 1 along the axis of which all numbers share one.
    """

    shape: tuple[int, ...]
    read: Callable[[np.dtype, bool], np.ndarray]
    dtype: str
    turned: bool = False
    read_part: Callable[[np.dtype, tuple[slice, ...]], np.ndarray] | None = None
    parts: "tuple[Leaf, Leaf] | None" = None

    def transposed(self) -> "Leaf":
        """The transpose of a matrix, made while it is read."""
        parts = self.parts and (self.parts[0].transposed(), self.parts[1].transposed())
        return dataclasses.replace(self, shape=self.shape[::-1], turned=not self.turned, parts=parts)

    def load(self, dtype) -> np.ndarray:
        """The parameter, in this package's layout."""
        return self.read(np.dtype(dtype), self.turned)

    def load_part(self, dtype, box: tuple[slice, ...]) -> np.ndarray:
        """A part of the parameter, a slice of every axis; no more is read, where the format allows it."""
        whole = all(axis.stop - axis.start == size for axis, size in zip(box, self.shape))
        if whole or self.read_part is None:
            return self.load(dtype)[box]
        return self.read_part(np.dtype(dtype), box[::-1]).T if self.turned else self.read_part(np.dtype(dtype), box)

    @classmethod
    def of(cls, array) -> "Leaf":
        """An array that is there already, of numpy or JAX."""

        def read(dtype, transpose: bool) -> np.ndarray:
            stored = np.asarray(array)
            return np.ascontiguousarray(stored.T if transpose else stored).astype(dtype, copy=False)

        return cls(tuple(array.shape), read, array.dtype.name)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint of which no parameter has been read yet.

    Attributes:
      config: shape of the network; its `dtype` does not matter.
      leaves: parameters by their name, T5X's, `decoder/layers_0/mlp/wo/kernel`.
      vocabulary: None where the checkpoint has none.
      start_token, eos_ids: None where the checkpoint does not say.
      encoder_fingerprint: of the model whose encoder output the network attends to, see `LanguageModel`.
    """

    config: ModelConfig
    leaves: dict[str, Leaf]
    vocabulary: Vocabulary | None = None
    start_token: int | None = None
    eos_ids: tuple[int, ...] | None = None
    encoder_fingerprint: str | None = None


def check(checkpoint: Checkpoint, path) -> None:
    """Raises ValueError where a parameter is missing, unexpected or of the wrong shape."""
    kind = checkpoint.config.family.upper()
    check_shapes(checkpoint.leaves, parameter_shapes(checkpoint.config), path, f"of a {kind} of this configuration")


def check_shapes(leaves: dict[str, Leaf], expected: dict[str, tuple[int, ...]], path, whose: str) -> None:
    """As `check`, for any set of names and shapes; `whose` says in the message what they are those of."""
    for name, shape in expected.items():
        if name not in leaves:
            raise ValueError(f"{path}: parameter {name}: got none, expected one of shape {shape}")
        if tuple(leaves[name].shape) != shape:
            raise ValueError(f"{path}: parameter {name}: got shape {tuple(leaves[name].shape)}, expected {shape}")
    for name in leaves:
        if name not in expected:
            raise ValueError(f"{path}: got unexpected parameter {name}, expected only those {whose}")


_BLOCK_BYTES = 1 << 22


def fill_rows(shape, dtype, read_rows, transpose: bool = False, multiple: int = 1) -> np.ndarray:
    """An array built from blocks of rows, so that a cast or a transpose never holds a second copy of it.

    Args:
      shape: `(rows, …)` as stored.
      dtype: of the result.
      read_rows: `(start, stop)` -> those rows as stored.
      transpose: the result is the transpose of the stored matrix.
      multiple: rows that are stored together; blocks are multiples of it.
    """
    out = np.empty(shape[::-1] if transpose else shape, dtype)
    if not shape:
        out[()] = read_rows(0, 1).reshape(())
        return out
    rows = _BLOCK_BYTES // (4 * max(1, math.prod(shape[1:])))
    step = multiple * max(1, rows // multiple)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        block = read_rows(start, stop)
        if transpose:
            out[:, start:stop] = block.T
        else:
            out[start:stop] = block
    return out
