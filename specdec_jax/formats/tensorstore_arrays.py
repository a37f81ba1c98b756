"""Arrays that TensorStore opens: zarr directories (legacy T5X) and OCDBT databases (Orbax)."""

import json
import pathlib

import numpy as np

from specdec_jax.formats.leaves import Leaf, fill_rows

_FLOATS = ("float32", "bfloat16", "float16", "float64")


def open_array(spec: dict, name: str, path) -> Leaf:
    """The array of a TensorStore spec; opening reads its metadata only.

    Raises:
      ValueError: there is none, or it holds no floating-point numbers; `read` raises it for a missing or damaged chunk.
    """
    import tensorstore

    # Without this a chunk that is not there reads as zeros.
    spec = spec | {"open": True, "fill_missing_data_reads": False}
    try:
        store = tensorstore.open(spec, read=True).result()
    except ValueError as error:
        raise ValueError(f"{path}: parameter {name}: got {_reason(error)}, expected an array there") from None
    shape, stored = tuple(store.shape), store.dtype.name
    if stored not in _FLOATS:
        raise ValueError(f"{path}: parameter {name}: got dtype {stored}, expected one of {', '.join(_FLOATS)}")

    def read(dtype, transpose: bool) -> np.ndarray:
        source = tensorstore.cast(store, dtype.name)  # so that no copy in the stored dtype is made
        try:
            # A chunk is decoded whole whatever part of it is asked for, so blocks are runs of whole chunks.
            rows = store.chunk_layout.read_chunk.shape[0] if shape else 1
            if rows >= (shape or (1,))[0] and not transpose:
                return np.asarray(source.read().result())
            read_rows = lambda start, stop: np.asarray(source[start:stop].read().result())
            return fill_rows(shape, dtype, read_rows, transpose, multiple=rows)
        except ValueError as error:
            raise ValueError(
                f"{path}: parameter {name}: got {_reason(error)}, expected {stored} of shape {shape}"
            ) from None

    return Leaf(shape, read)


def _reason(error: ValueError) -> str:
    return str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0].strip()


def ocdbt_structure(folder: pathlib.Path) -> tuple[list[tuple[str, ...]], str]:
    """Paths of all leaves of an Orbax folder, and TensorStore's driver for them."""
    try:
        metadata = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))
        entries = metadata["tree_metadata"].values()
        paths = [tuple(key["key"] for key in entry["key_metadata"]) for entry in entries]
        return paths, "zarr3" if metadata.get("use_zarr3") else "zarr"
    except FileNotFoundError:
        raise ValueError(f"{folder}: got no _METADATA, expected the one of an Orbax checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder / '_METADATA'}: got no readable tree_metadata, expected Orbax's") from None


def open_ocdbt(folder: pathlib.Path, prefix: tuple[str, ...] = ()) -> dict[str, Leaf]:
    """The arrays under `prefix` in an Orbax folder, by their `/`-joined names without it."""
    paths, driver = ocdbt_structure(folder)
    # No file:// URL: in one '#', '?' and '%' of the path would have to be quoted.
    base, leaves = {"driver": "file", "path": f"{folder.absolute()}/"}, {}
    for path in paths:
        if path[: len(prefix)] != prefix:
            continue
        name = "/".join(path[len(prefix) :])
        kvstore = {"driver": "ocdbt", "base": base, "path": ".".join(path) + "/"}
        leaves[name] = open_array({"driver": driver, "kvstore": kvstore}, name, folder)
    return leaves
