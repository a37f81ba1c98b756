"""Reads and writes arrays with TensorStore: zarr (legacy T5X) and OCDBT databases (Orbax)."""

import concurrent.futures
import json
import math
import pathlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from specdec_jax.checkpoints.stored_tensor import FLOATS, Parameters, StoredTensor, fill_rows
from specdec_jax.files import reading
from specdec_jax.files.places import AnyPath, FolderCopy
from specdec_jax.files.reading import PathLike, mismatch_error
from specdec_jax.files.writing import write_file

# An array's file of metadata, by TensorStore's driver.
_METADATA = {"zarr": ".zarray", "zarr3": "zarr.json"}
_METADATA_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 26  # size of a chunk that T5X aims at
# Limit of Orbax's list of all arrays, optimizer states included, and of the database's list of its
# nodes.
_STRUCTURE_BYTES = 1 << 24
# Arrays that are opened at a time, and bytes of a database's nodes that are kept then.
_OPENED, _NODES_BYTES = 16, 1 << 26
_COMMIT_BYTES = 1 << 28  # arrays of this size are held, and written to a database together


def open_base(folder: AnyPath, below: Collection[str] = ("",)) -> tuple[dict, FolderCopy | None]:
    """Returns TensorStore's spec of a folder, whose path ends with a slash, and the copy behind it.

    TensorStore itself reads this machine and `gs://`, and only what is asked for. From any other
    store the files and folders `below` are copied first.
    """
    if isinstance(folder, pathlib.Path):
        # A file:// URL would need '#', '?' and '%' of the path to be quoted.
        return {"driver": "file", "path": f"{folder.resolve()}/"}, None
    if folder.scheme in ("gs", "gcs"):
        bucket, _, path = str(folder).partition("://")[2].partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}, None
    copy = FolderCopy(folder, below)
    return open_base(copy.path)[0], copy


def open_array(
    spec: dict,
    name: str,
    path: PathLike,
    dtypes: tuple[str, ...] = FLOATS,
    copy: FolderCopy | None = None,
    context: Any = None,
) -> StoredTensor:
    """Opens the array of a TensorStore spec; reads only its metadata.

    The tensor keeps `copy`, which has the array's files, if any. `context` is TensorStore's, None:
    one of its own.

    Raises:
      ValueError: there is no such array, its dtype is none of `dtypes`, or its chunks, which are
        read whole, are larger than itself. Reading the array raises it for a missing or damaged
        chunk.
    """
    import tensorstore

    whose = f"{path}: parameter {name}"
    # Without this a missing chunk reads as zeros.
    spec = spec | {"open": True, "fill_missing_data_reads": False}
    try:
        files = tensorstore.KvStore.open(spec["kvstore"], context=context).result()
        metadata = files.read(_METADATA[spec["driver"]]).result().value
        if len(metadata) > _METADATA_BYTES:
            raise ValueError(f"metadata of {len(metadata):,} bytes")
        store = tensorstore.open(spec, read=True, context=context).result()
    except ValueError as error:
        raise mismatch_error(whose, _shorten_message(error), "an array there") from None
    shape, stored = tuple(store.shape), store.dtype.name
    if stored not in dtypes:
        raise mismatch_error(whose, f"dtype {stored}", f"one of {', '.join(dtypes)}")
    chunk: Any = store.chunk_layout.read_chunk.shape  # whole, of a store that is open
    if any(part > max(size, 1) for part, size in zip(chunk, shape)):
        raise mismatch_error(whose, f"chunks of shape {tuple(chunk)}", f"at most {shape}")

    def read_part(dtype: np.dtype, box: tuple[slice, ...]) -> np.ndarray:
        try:  # a cast while reading makes no copy in the stored dtype
            return np.asarray(tensorstore.cast(store, dtype.name)[box].read().result())
        except ValueError as error:
            raise mismatch_error(
                whose, _shorten_message(error), f"{stored} of shape {shape}"
            ) from None

    def read(dtype: np.dtype, transpose: bool) -> np.ndarray:
        # A chunk is decoded whole whatever part of it is read, so blocks are runs of whole chunks.
        rows = chunk[0] if shape else 1
        if rows >= (shape or (1,))[0] and not transpose:
            return read_part(dtype, tuple(map(slice, shape)))

        def read_rows(start: int, stop: int) -> np.ndarray:
            return read_part(dtype, (slice(start, stop),))

        return fill_rows(shape, read_rows, dtype, transpose, multiple=rows)

    return StoredTensor(shape, read, stored, read_part=read_part, reads_ahead=True, copy=copy)


def _open_arrays(
    specs: dict[str, dict],
    path: AnyPath,
    copy: FolderCopy | None,
    allowed_dtypes: Callable[[str], tuple[str, ...]] | None = None,
) -> Parameters:
    """Opens the arrays of several specs by their names, many at a time."""
    import tensorstore

    if not specs:
        return {}
    context = tensorstore.Context({"cache_pool#nodes": {"total_bytes_limit": _NODES_BYTES}})

    def open_one(name: str) -> StoredTensor:
        dtypes = allowed_dtypes(name) if allowed_dtypes else FLOATS
        return open_array(specs[name], name, path, dtypes, copy, context)

    with concurrent.futures.ThreadPoolExecutor(_OPENED) as pool:
        return dict(zip(specs, pool.map(open_one, specs)))


def open_zarr(folder: AnyPath, folders: dict[str, str]) -> Parameters:
    """Opens arrays by their names; `folders` has each one's own folder, from `folder` on."""
    base, copy = open_base(folder, folders.values()) if folders else ({}, None)
    specs = {
        name: {"driver": "zarr", "kvstore": base | {"path": f"{base['path']}{array}/"}}
        for name, array in folders.items()
    }
    return _open_arrays(specs, folder, copy)


def _shorten_message(error: ValueError) -> str:
    """Returns TensorStore's message without the spec and the places in its source."""
    text = reading.error_reason(error).split(" [tensorstore_spec=")[0]
    return text.split(" [source locations=")[0].strip()


def read_structure(folder: AnyPath) -> tuple[list[tuple[str, ...]], str]:
    """Returns the paths of all leaves of an Orbax folder, and TensorStore's driver for them."""
    path = folder / "_METADATA"
    if not path.exists():
        raise mismatch_error(folder, "no _METADATA", "the one of an Orbax checkpoint")
    metadata = reading.read_json(path, _STRUCTURE_BYTES)
    try:
        entries = metadata["tree_metadata"].values()
        paths = [tuple(key["key"] for key in entry["key_metadata"]) for entry in entries]
    except (KeyError, TypeError, AttributeError):
        raise mismatch_error(path, "no readable tree_metadata", "Orbax's") from None
    reading.check_names((key for keys in paths for key in keys), path)
    return paths, "zarr3" if metadata.get("use_zarr3") else "zarr"


def open_ocdbt(
    folder: AnyPath,
    prefix: tuple[str, ...] = (),
    allowed_dtypes: Callable[[str], tuple[str, ...]] | None = None,
) -> Parameters:
    """Opens the arrays under `prefix` in an Orbax folder, by their `/`-joined names below it.

    `allowed_dtypes` gives the dtypes that the array of each name may have; None: `FLOATS`.
    """
    paths, driver = read_structure(folder)
    reading.check_folder(folder)
    for manifest in folder.rglob("manifest.*"):  # which is read whole, unlike the data
        reading.check_file(manifest, _STRUCTURE_BYTES)
    (base, copy), specs = open_base(folder), {}
    for path in paths:
        if path[: len(prefix)] != prefix:
            continue
        name = "/".join(path[len(prefix) :])
        kvstore = {"driver": "ocdbt", "base": base, "path": ".".join(path) + "/"}
        kvstore["cache_pool"] = "cache_pool#nodes"  # of `_open_arrays`
        specs[name] = {"driver": driver, "kvstore": kvstore}
    return _open_arrays(specs, folder, copy, allowed_dtypes)


def _make_spec(array: np.ndarray, compressor: str) -> dict:
    """Returns TensorStore's spec of an array in zarr, in chunks that are runs of whole rows."""
    width = math.prod(array.shape[1:]) * array.dtype.itemsize
    rows = [min(max(1, _CHUNK_BYTES // max(width, 1)), array.shape[0])] if array.ndim else []
    metadata = {
        "shape": list(array.shape),
        "chunks": rows + list(array.shape[1:]),
        "compressor": {"id": compressor, "level": 1},
    }
    return {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata}


# Otherwise a chunk of zeros is not written, and looks like a lost one.
_WRITE_ALL = {"store_data_equal_to_fill_value": True, "create": True}


def write_zarr(array: np.ndarray, folder: pathlib.Path, name: str) -> dict:
    """Writes an array as the zarr directory `name` in `folder`.

    Returns:
      Its spec with a path relative to `folder`, as T5X keeps it.
    """
    import tensorstore

    spec = _make_spec(array, "gzip")
    kvstore = {"driver": "file", "path": f"{folder.resolve() / name}/"}
    tensorstore.open(spec | {"kvstore": kvstore} | _WRITE_ALL).result().write(array).result()
    return spec | {"kvstore": {"driver": "file", "path": f"{name}/"}}


def write_ocdbt(arrays: Iterable[tuple[tuple[str, ...], np.ndarray]], folder: pathlib.Path) -> None:
    """Writes arrays by their paths in a tree to a folder that Orbax reads.

    At most a quarter of a gigabyte of them is held at a time.
    """
    import tensorstore

    # Every commit writes the database's index anew, so the small ones are written together.
    context, transaction, held, tree = tensorstore.Context(), tensorstore.Transaction(), 0, {}
    base = {"driver": "file", "path": f"{folder.resolve()}/"}
    for path, array in arrays:
        kvstore = {"driver": "ocdbt", "base": base, "path": ".".join(path) + "/"}
        spec = _make_spec(array, "zstd") | {"kvstore": kvstore} | _WRITE_ALL
        store = tensorstore.open(spec, context=context, transaction=transaction).result()
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
