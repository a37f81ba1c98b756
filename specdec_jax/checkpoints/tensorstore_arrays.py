"""Reads and writes arrays with TensorStore: zarr directories (legacy T5X) and OCDBT databases
(Orbax)."""

import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from specdec_jax.checkpoints.stored_tensor import FLOATS, Leaf, fill_rows
from specdec_jax.files import reading
from specdec_jax.files.writing import write_file

_METADATA = {
    "zarr": ".zarray",
    "zarr3": "zarr.json",
}  # an array's file of metadata, by TensorStore's driver
_METADATA_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 26  # size of a chunk that T5X aims at
# Limit of Orbax's list of all arrays, optimizer states included, and of the database's list of its
# nodes.
_STRUCTURE_BYTES = 1 << 24
_COMMIT_BYTES = (
    1 << 28
)  # arrays of this size are held until they are written to a database together


def open_array(spec: dict, name: str, path, dtypes: tuple[str, ...] = FLOATS) -> Leaf:
    """Returns the array of a TensorStore spec as a leaf; reads only its metadata.

    Raises:
      ValueError: there is no such array, its dtype is none of `dtypes`, or its chunks, which are
        read whole, are larger than itself. Reading the leaf raises it for a missing or damaged
        chunk.
    """
    import tensorstore

    # Without this a chunk that is not there reads as zeros.
    spec = spec | {"open": True, "fill_missing_data_reads": False}
    try:
        metadata = (
            tensorstore.KvStore.open(spec["kvstore"])
            .result()
            .read(_METADATA[spec["driver"]])
            .result()
            .value
        )
        if len(metadata) > _METADATA_BYTES:
            raise ValueError(f"metadata of {len(metadata):,} bytes")
        store = tensorstore.open(spec, read=True).result()
    except ValueError as error:
        raise ValueError(
            f"{path}: parameter {name}: got {_reason(error)}, expected an array there"
        ) from None
    shape, stored = tuple(store.shape), store.dtype.name
    if stored not in dtypes:
        raise ValueError(
            f"{path}: parameter {name}: got dtype {stored}, expected one of {', '.join(dtypes)}"
        )
    chunk: Any = store.chunk_layout.read_chunk.shape  # whole, of a store that is open
    if any(part > max(size, 1) for part, size in zip(chunk, shape)):
        raise ValueError(
            f"{path}: parameter {name}: got chunks of shape {tuple(chunk)}, expected at most {shape}"
        )

    def read(dtype, transpose: bool) -> np.ndarray:
        source = tensorstore.cast(store, dtype.name)  # so that no copy in the stored dtype is made
        with _told(name, path, stored, shape):
            # A chunk is decoded whole whatever part of it is asked for, so blocks are runs of whole
            # chunks.
            rows = chunk[0] if shape else 1
            if rows >= (shape or (1,))[0] and not transpose:
                return np.asarray(source.read().result())

            def read_rows(start, stop):
                return np.asarray(source[start:stop].read().result())

            return fill_rows(shape, dtype, read_rows, transpose, multiple=rows)

    def read_part(dtype, box: tuple[slice, ...]) -> np.ndarray:
        with _told(name, path, stored, shape):
            return np.asarray(tensorstore.cast(store, dtype.name)[box].read().result())

    return Leaf(shape, read, stored, read_part=read_part)


@contextlib.contextmanager
def _told(name: str, path, stored: str, shape: tuple[int, ...]):
    """Turns an error about a missing or damaged chunk into one that names the parameter."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{path}: parameter {name}: got {_reason(error)}, expected {stored} of shape {shape}"
        ) from None


def _reason(error: ValueError) -> str:
    return (
        reading.reason(error)
        .split(" [tensorstore_spec=")[0]
        .split(" [source locations=")[0]
        .strip()
    )


def ocdbt_structure(folder: pathlib.Path) -> tuple[list[tuple[str, ...]], str]:
    """Returns the paths of all leaves of an Orbax folder, and TensorStore's driver for them."""
    path = folder / "_METADATA"
    if not path.exists():
        raise ValueError(f"{folder}: got no _METADATA, expected the one of an Orbax checkpoint")
    metadata = reading.read_json(path, _STRUCTURE_BYTES)
    try:
        paths = [
            tuple(key["key"] for key in entry["key_metadata"])
            for entry in metadata["tree_metadata"].values()
        ]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: got no readable tree_metadata, expected Orbax's") from None
    reading.check_names((key for keys in paths for key in keys), path)
    return paths, "zarr3" if metadata.get("use_zarr3") else "zarr"


def open_ocdbt(
    folder: pathlib.Path,
    prefix: tuple[str, ...] = (),
    dtypes_of: Callable[[str], tuple[str, ...]] = lambda name: FLOATS,
) -> dict[str, Leaf]:
    """Returns the arrays under `prefix` in an Orbax folder, by their `/`-joined names below it.

    `dtypes_of` gives the dtypes that the array of each name may have.
    """
    paths, driver = ocdbt_structure(folder)
    reading.check_folder(folder)
    for manifest in folder.rglob("manifest.*"):  # which is read whole, unlike the data
        reading.check_file(manifest, _STRUCTURE_BYTES)
    # A file:// URL would need '#', '?' and '%' of the path to be quoted.
    base, leaves = {"driver": "file", "path": f"{folder.resolve()}/"}, {}
    for path in paths:
        if path[: len(prefix)] != prefix:
            continue
        name = "/".join(path[len(prefix) :])
        kvstore = {"driver": "ocdbt", "base": base, "path": ".".join(path) + "/"}
        leaves[name] = open_array(
            {"driver": driver, "kvstore": kvstore}, name, folder, dtypes_of(name)
        )
    return leaves


def _layout(array: np.ndarray, compressor: dict) -> dict:
    """Returns zarr's metadata for chunks that are runs of whole rows."""
    width = math.prod(array.shape[1:]) * array.dtype.itemsize
    rows = [min(max(1, _CHUNK_BYTES // max(width, 1)), array.shape[0])] if array.ndim else []
    return {
        "shape": list(array.shape),
        "chunks": rows + list(array.shape[1:]),
        "compressor": compressor,
    }


# Otherwise a chunk of zeros is not written, and could not be told from a lost one.
_WRITE_ALL = {"store_data_equal_to_fill_value": True, "create": True}


def write_zarr(array: np.ndarray, folder: pathlib.Path, name: str) -> dict:
    """Writes an array as the zarr directory `name` in `folder`; returns its spec with a path
    relative to `folder`, as T5X keeps it."""
    import tensorstore

    spec = {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "metadata": _layout(array, {"id": "gzip", "level": 1}),
    }
    kvstore = {"driver": "file", "path": f"{folder.resolve() / name}/"}
    tensorstore.open(spec | {"kvstore": kvstore} | _WRITE_ALL).result().write(array).result()
    return spec | {"kvstore": {"driver": "file", "path": f"{name}/"}}


def write_ocdbt(arrays: Iterable[tuple[tuple[str, ...], np.ndarray]], folder: pathlib.Path) -> None:
    """Writes arrays by their paths in a tree to a folder that Orbax reads; holds at most a quarter
    of a gigabyte of them at a time."""
    import tensorstore

    # Every commit writes the database's index anew, so the small ones are written together.
    context, transaction, held, tree = tensorstore.Context(), tensorstore.Transaction(), 0, {}
    for path, array in arrays:
        base = {"driver": "file", "path": f"{folder.resolve()}/"}
        spec = {
            "driver": "zarr",
            "dtype": array.dtype.name,
            "metadata": _layout(array, {"id": "zstd", "level": 1}),
            "kvstore": {"driver": "ocdbt", "base": base, "path": ".".join(path) + "/"},
        }
        store = tensorstore.open(
            spec | _WRITE_ALL, context=context, transaction=transaction
        ).result()
        store.write(array).copy.result()
        tree[str(path)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in path],  # 2: of a dict
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        held += array.nbytes
        if held >= _COMMIT_BYTES:
            transaction.commit_sync()
            transaction, held = tensorstore.Transaction(), 0
    transaction.commit_sync()
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    write_file(folder / "_METADATA", json.dumps(metadata) + "\n")
