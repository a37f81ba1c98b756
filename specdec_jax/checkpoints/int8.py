"""Stores matrices in int8, half of bfloat16's size: rounded values and their scales.

A weight has one scale for each output, an embedding one for each row. Such matrices can be read as
floating-point numbers, so that a model stored in this way is used like any other, with slightly
different weights. The CPU's own kernels multiply them as they are stored.
"""

import dataclasses

import numpy as np

from specdec_jax.checkpoints.stored_tensor import FLOATS, Parameters, StoredTensor
from specdec_jax.files.reading import PathLike, mismatch_error

_MOST = 127
_VALUES, _SCALES = "values", "scales"
_AXES = {"kernel": 0, "embedding": 1}  # the axis on which all numbers share a scale


def quantize(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays that are stored for a parameter, by name; only matrices are rounded.

    Column f of a weight is about `values[:, f] · scales[f]`, row v of an embedding about `values[v]
    · scales[v]`. Rounding is symmetric: the greatest magnitude becomes 127.

    Raises:
      ValueError: a number in a matrix is not finite.
    """
    axis = _AXES.get(name.rpartition("/")[2])
    if array.ndim != 2 or axis is None:
        return {name: array}
    _check_finite(name, array)
    scales = np.max(np.abs(array), axis=axis, keepdims=True).astype(np.float32) / _MOST
    values = np.rint(np.clip(array / np.where(scales > 0, scales, 1), -_MOST, _MOST))
    return {f"{name}/{_VALUES}": values.astype(np.int8), f"{name}/{_SCALES}": scales}


def _check_finite(name: str, array: np.ndarray) -> None:
    if not np.all(np.isfinite(array)):
        got, expected = "numbers that are not finite", "finite ones to store in int8"
        raise mismatch_error(f"parameter {name}", got, expected)


def is_quantized(name: str, tensor: StoredTensor) -> bool:
    """Returns whether a matrix is stored as `quantize` stores it."""
    axis = _AXES.get(name.rpartition("/")[2])
    return tensor.parts is not None and axis is not None and tensor.parts[1].shape[axis] == 1


def load_quantized(name: str, tensor: StoredTensor) -> dict[str, np.ndarray]:
    """Returns the same arrays as `quantize`; a matrix that is stored so keeps its integers."""
    if not is_quantized(name, tensor):
        return quantize(name, tensor.load(np.float32))
    assert tensor.parts
    values, scales = tensor.parts[0].load(np.int8), tensor.parts[1].load(np.float32)
    _check_finite(name, scales)
    return {f"{name}/{_VALUES}": values, f"{name}/{_SCALES}": scales}


def allowed_dtypes(name: str) -> tuple[str, ...]:
    """Returns the dtypes that the array stored under this name may have."""
    return ("int8",) if name.endswith(f"/{_VALUES}") else FLOATS


def join_parts(stored: Parameters, path: PathLike) -> Parameters:
    """Returns the parameters that the stored arrays make up.

    Raises:
      ValueError: values without scales, scales without values, or shapes that do not fit each
        other.
    """
    parameters = {}
    for name, tensor in stored.items():
        parameter, _, part = name.rpartition("/")
        if part not in (_VALUES, _SCALES):
            parameters[name] = tensor
            continue
        other = stored.get(f"{parameter}/{_SCALES if part == _VALUES else _VALUES}")
        if other is None:
            raise mismatch_error(
                f"{path}: parameter {parameter}", f"8-bit {part} alone", "values and scales"
            )
        if part == _SCALES:
            continue
        shape = tensor.shape
        if len(shape) != 2 or other.shape not in ((1, *shape[1:]), (*shape[:1], 1)):
            got = f"scales of shape {other.shape} for values of shape {shape}"
            expected = "one for each row or column"
            raise ValueError(f"{path}: parameter {parameter}: got {got}, expected {expected}")
        parameters[parameter] = multiply_parts(tensor, other)
    return parameters


def multiply_parts(values: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Returns the parameter that is stored as these values and scales."""

    def read_part(dtype: np.dtype, box: tuple[slice, ...]) -> np.ndarray:
        scales_box = tuple(
            slice(0, 1) if size == 1 else one for size, one in zip(scales.shape, box)
        )
        numbers = values.load_part(np.int8, box), scales.load_part(np.float32, scales_box)
        return np.multiply(*numbers, dtype=np.float32).astype(dtype, copy=False)

    whole = tuple(slice(0, size) for size in values.shape)
    made = StoredTensor.from_function(values.shape, lambda dtype: read_part(dtype, whole), "int8")
    more: dict = dict(read_part=read_part, parts=(values, scales))
    return dataclasses.replace(made, reads_ahead=values.reads_ahead, **more)
