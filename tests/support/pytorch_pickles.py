"""Writes files as `torch.save` does, sound or hostile, opcode by opcode and without PyTorch."""

import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable

import numpy as np

_STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage"}
REBUILD = "torch._utils _rebuild_tensor_v2"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def name(value: str) -> bytes:
    module, attribute = value.split(" ")
    return f"c{module}\n{attribute}\n".encode()


def storage(key: str, count: int, kind: str = "FloatStorage", more: bytes = b"") -> bytes:
    parts = [text("storage"), name(f"torch {kind}"), text(key), text("cpu"), integer(count), more]
    return b"(" + b"".join(parts) + b"tQ"


def tensor(
    stored: bytes,
    shape: Iterable[int],
    strides: Iterable[int],
    offset: int = 0,
    call: str = REBUILD,
) -> bytes:
    sizes, steps = (b"(" + b"".join(map(integer, part)) + b"t" for part in (shape, strides))
    hooks = name("collections OrderedDict") + b")R"
    return name(call) + b"(" + stored + integer(offset) + sizes + steps + b"\x89" + hooks + b"tR"


def dump(*items: bytes, state: bytes = b"") -> bytes:
    """Returns the pickle of an ordered dict of `items`, names and values in turn."""
    return (
        b"\x80\x02"
        + name("collections OrderedDict")
        + b")R("
        + b"".join(items)
        + b"u"
        + state
        + b"."
    )


def write_zip(path: pathlib.Path, pickled: bytes, records: dict[str, bytes], **changes) -> None:
    """Writes the zip form; `changes` are records by their names, or None to leave one out."""
    files = {"data.pkl": pickled, "byteorder": b"little"}
    files |= {f"data/{key}": record for key, record in records.items()} | changes
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            if content is not None:
                archive.writestr(f"archive/{file}", content)


def write_legacy(
    path: pathlib.Path,
    pickled: bytes,
    records: dict[str, bytes],
    itemsize: int = 4,
    little_endian: object = True,
    magic: int = 0x1950A86A20F9469CFC6C,
) -> None:
    """Writes the form before PyTorch 1.6."""
    heads = (magic, 1001, {"protocol_version": 1001, "little_endian": little_endian})
    parts = [pickle.dumps(head, 2) for head in heads] + [pickled, pickle.dumps(list(records), 2)]
    for record in records.values():
        parts += [struct.pack("<q", len(record) // itemsize), record]
    path.write_bytes(b"".join(parts))


def write_state(
    path: pathlib.Path, tensors: dict[str, np.ndarray], write: Callable = write_zip
) -> None:
    """Writes a state dict of whole tensors."""
    items, records = [], {}
    for number, (key, array) in enumerate(tensors.items()):
        steps = [step // array.itemsize for step in np.ascontiguousarray(array).strides]
        kind = _STORAGES[array.dtype.name]
        items += [text(key), tensor(storage(str(number), array.size, kind), array.shape, steps)]
        records[str(number)] = np.ascontiguousarray(array).tobytes()
    write(path, dump(*items), records)
