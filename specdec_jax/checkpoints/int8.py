"""Stores matrices in int8, half of bfloat16's size: rounded values, and one scale for each output
of a kernel or row of an embedding.

They can be read as floating-point numbers, so that a model stored in this way is used like any
other, with slightly different weights. With the CPU's own kernels they are multiplied as they are
stored.
"""

import functools

import numpy as np

from specdec_jax.checkpoints.stored_tensor import FLOATS, Leaf

_MOST = 127
_VALUES, _SCALES = "values", "scales"


def divided(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays that are stored for a parameter, by name: kernels and embeddings in 8
    bits, anything else as it is.

    Column f of a kernel is about `values[:, f] · scales[f]`, row v of an embedding about `values[v]
    · scales[v]`. Rounding is symmetric: the greatest magnitude becomes 127.

    Raises:
      ValueError: a number in a matrix is not finite.
    """
    kind = name.rpartition("/")[2]
    if array.ndim != 2 or kind not in ("kernel", "embedding"):
        return {name: array}
    _check_finite(name, array)
    scales = (
        np.max(np.abs(array), axis=0 if kind == "kernel" else 1, keepdims=True).astype(np.float32)
        / _MOST
    )
    values = np.rint(np.clip(array / np.where(scales > 0, scales, 1), -_MOST, _MOST)).astype(
        np.int8
    )
    return {f"{name}/{_VALUES}": values, f"{name}/{_SCALES}": scales}


def _check_finite(name: str, array: np.ndarray) -> None:
    if not np.all(np.isfinite(array)):
        raise ValueError(
            f"parameter {name}: got numbers that are not finite, expected finite ones to store in int8"
        )


def fits(name: str, leaf: Leaf) -> bool:
    """Returns whether a matrix is stored as `divided` stores it."""
    axis = {"kernel": 0, "embedding": 1}.get(name.rpartition("/")[2])
    return leaf.parts is not None and axis is not None and leaf.parts[1].shape[axis] == 1


def written(name: str, leaf: Leaf) -> dict[str, np.ndarray]:
    """Returns the same arrays as `divided`; a matrix that is stored so already keeps its values and
    scales."""
    if not fits(name, leaf):
        return divided(name, leaf.load(np.float32))
    assert leaf.parts
    values, scales = leaf.parts[0].load(np.int8), leaf.parts[1].load(np.float32)
    _check_finite(name, scales)
    return {f"{name}/{_VALUES}": values, f"{name}/{_SCALES}": scales}


def dtypes_of(name: str) -> tuple[str, ...]:
    """Returns the dtypes that the array stored under this name may have."""
    return ("int8",) if name.endswith(f"/{_VALUES}") else FLOATS


def join(leaves: dict[str, Leaf], path) -> dict[str, Leaf]:
    """Returns the parameters that the stored arrays `leaves` stand for.

    Raises:
      ValueError: values without scales, scales without values, or shapes that do not fit each
        other.
    """
    found = {}
    for name, leaf in leaves.items():
        parameter, _, part = name.rpartition("/")
        if part not in (_VALUES, _SCALES):
            found[name] = leaf
            continue
        other = leaves.get(f"{parameter}/{_SCALES if part == _VALUES else _VALUES}")
        if other is None:
            raise ValueError(
                f"{path}: parameter {parameter}: got 8-bit {part} alone, expected values and scales"
            )
        if part == _VALUES:
            fits = other.shape in ((1, *leaf.shape[1:]), (*leaf.shape[:1], 1))
            if len(leaf.shape) != 2 or not fits:
                raise ValueError(
                    f"{path}: parameter {parameter}: got scales of shape {other.shape} for values of shape "
                    f"{leaf.shape}, expected one for each row or column"
                )
            found[parameter] = product(leaf, other)
    return found


def product(values: Leaf, scales: Leaf) -> Leaf:
    """Returns the parameter that is stored as these values and scales."""
    read, read_part = (
        functools.partial(_read, values, scales),
        functools.partial(_read_part, values, scales),
    )
    return Leaf(values.shape, read, "int8", read_part=read_part, parts=(values, scales))


def _read(values: Leaf, scales: Leaf, dtype: np.dtype, transpose: bool) -> np.ndarray:
    matrix = np.multiply(values.load(np.int8), scales.load(np.float32), dtype=np.float32).astype(
        dtype, copy=False
    )
    return np.ascontiguousarray(matrix.T) if transpose else matrix


def _read_part(values: Leaf, scales: Leaf, dtype: np.dtype, box: tuple[slice, ...]) -> np.ndarray:
    of_scales = tuple(slice(0, 1) if size == 1 else axis for size, axis in zip(scales.shape, box))
    numbers = values.load_part(np.int8, box), scales.load_part(np.float32, of_scales)
    return np.multiply(*numbers, dtype=np.float32).astype(dtype, copy=False)
