"""Defines what every checkpoint format yields: parameters by T5X's names, each with its shape and a
way to read it alone."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from specdec_jax.models.family import ModelConfig
from specdec_jax.models.generation_config import GenerationConfig
from specdec_jax.models.parameters import parameter_shapes
from specdec_jax.tokenizers.vocabularies import Vocabulary

FLOATS = ("float32", "bfloat16", "float16", "float64")  # what a parameter may be stored as
# What writers call with the size of each parameter that is written.
Report = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One stored parameter.

    Attributes:
      shape: shape in this package's layout, where kernels are `[in, out]`.
      read: `(dtype, transpose)` -> the stored array, or its transpose, in that dtype; reads nothing
        else.
      dtype: name of the stored dtype.
      turned: whether the parameter is the transpose of what is stored.
      read_part: `(dtype, box)` -> a part of the stored array, one slice for every axis; None if
        only the whole can be read.
      parts: the int8 values and float32 scales whose product the parameter is, if it is stored in 8
        bits, else None. The scales have length 1 along the axis on which all numbers share a scale.
    """

    shape: tuple[int, ...]
    read: Callable[[np.dtype, bool], np.ndarray]
    dtype: str
    turned: bool = False
    read_part: Callable[[np.dtype, tuple[slice, ...]], np.ndarray] | None = None
    parts: "tuple[Leaf, Leaf] | None" = None

    @property
    def size(self) -> int:
        """How many numbers the parameter has."""
        return math.prod(self.shape)

    def transposed(self) -> "Leaf":
        """Returns the transpose of a matrix, made while it is read."""
        parts = self.parts and (self.parts[0].transposed(), self.parts[1].transposed())
        return dataclasses.replace(
            self, shape=self.shape[::-1], turned=not self.turned, parts=parts
        )

    def load(self, dtype) -> np.ndarray:
        """Returns the parameter in this package's layout."""
        return self.read(np.dtype(dtype), self.turned)

    def load_part(self, dtype, box: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the parameter, one slice for every axis; reads no more if the format
        allows it."""
        whole = all(axis.stop - axis.start == size for axis, size in zip(box, self.shape))
        if whole or self.read_part is None:
            return self.load(dtype)[box]
        return (
            self.read_part(np.dtype(dtype), box[::-1]).T
            if self.turned
            else self.read_part(np.dtype(dtype), box)
        )

    @classmethod
    def from_array(cls, array) -> "Leaf":
        """Returns a leaf for a numpy or JAX array in memory."""

        def read(dtype, transpose: bool) -> np.ndarray:
            stored = np.asarray(array)
            return np.ascontiguousarray(stored.T if transpose else stored).astype(dtype, copy=False)

        return cls(tuple(array.shape), read, array.dtype.name)


def unreadable(path, name: str, shape: tuple[int, ...], dtype: str) -> Leaf:
    """Returns the leaf of a stored array that is no parameter; it may be left out, and `check`
    rejects it."""

    def read(*_) -> np.ndarray:
        raise ValueError(
            f"{path}: parameter {name}: got dtype {dtype}, expected one of {', '.join(FLOATS)}"
        )

    return Leaf(shape, read, dtype)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint of which no parameter has been read yet.

    Attributes:
      config: shape of the network; its `dtype` does not matter.
      leaves: parameters by T5X's names, such as `decoder/layers_0/mlp/wo/kernel`.
      vocabulary: None if the checkpoint has none.
      start_token, eos_ids: None if the checkpoint does not give them.
      encoder_fingerprint: fingerprint of the model whose encoder output the network attends to, see
        `LanguageModel`.
      generation_config: how the model decodes where a call does not say otherwise.
      notes: lines that whoever loads it should read.
    """

    config: ModelConfig
    leaves: dict[str, Leaf]
    vocabulary: Vocabulary | None = None
    start_token: int | None = None
    eos_ids: tuple[int, ...] | None = None
    encoder_fingerprint: str | None = None
    generation_config: GenerationConfig = GenerationConfig()
    notes: tuple[str, ...] = ()


def reporting(leaves: dict[str, Leaf], report: Report) -> Iterator[str]:
    """Yields the parameters' names, and reports the size of each when the next one is asked for."""
    for name, leaf in leaves.items():
        yield name
        report(leaf.size)


def check(checkpoint: Checkpoint, path) -> None:
    """Raises ValueError if a parameter is missing, unexpected, of the wrong shape or no
    floating-point numbers."""
    kind = checkpoint.config.family.upper()
    check_shapes(
        checkpoint.leaves,
        parameter_shapes(checkpoint.config),
        path,
        f"of a {kind} of this configuration",
    )
    for name, leaf in checkpoint.leaves.items():
        if leaf.dtype not in FLOATS and leaf.parts is None:
            raise ValueError(
                f"{path}: parameter {name}: got dtype {leaf.dtype}, expected one of {', '.join(FLOATS)}"
            )


def check_shapes(
    leaves: dict[str, Leaf], expected: dict[str, tuple[int, ...]], path, whose: str
) -> None:
    """Raises ValueError as `check` does, for any names and shapes; `whose` ends the message, e.g.
    "of these heads"."""
    for name, shape in expected.items():
        if name not in leaves:
            raise ValueError(f"{path}: parameter {name}: got none, expected one of shape {shape}")
        if tuple(leaves[name].shape) != shape:
            raise ValueError(
                f"{path}: parameter {name}: got shape {tuple(leaves[name].shape)}, expected {shape}"
            )
    for name in leaves:
        if name not in expected:
            raise ValueError(
                f"{path}: got unexpected parameter {name}, expected only those {whose}"
            )


_BLOCK_BYTES = 1 << 22  # how much `fill_rows` reads at a time


def fill_rows(shape, dtype, read_rows, transpose: bool = False, multiple: int = 1) -> np.ndarray:
    """Returns an array built from blocks of rows, so that a cast or a transpose never holds a
    second copy of it.

    Args:
      shape: `(rows, …)` as stored.
      dtype: dtype of the result.
      read_rows: `(start, stop)` -> those rows as stored.
      transpose: whether the result is the transpose of the stored matrix.
      multiple: number of rows that are stored together; blocks are multiples of it.
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
