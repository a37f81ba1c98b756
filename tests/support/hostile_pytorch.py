"""Lists hostile files of PyTorch's: pickles that run something, views out of bounds, archives."""

import json
import pathlib
import struct
import zipfile
from collections.abc import Callable

import pytorch_pickles as torch_file
from hostile_cases import OTHERS, case, make_sparse
from pytorch_pickles import dump, integer, name, storage, tensor, text

WEIGHTS = "pytorch_model.bin"
SOUND = tensor(storage("0", 8), (2, 4), (4, 1))
RECORDS = {"0": bytes(32)}


def pickled(*items: bytes, write: Callable = torch_file.write_zip, **changes):
    """Returns damage: a file with the pickle of a dict of `items`."""
    return lambda path: write(path, dump(*items), RECORDS, **changes)


def raw(content: bytes, records=RECORDS, write: Callable = torch_file.write_zip):
    return lambda path: write(path, content, records)


def call(function: str, *arguments: bytes) -> bytes:
    return name(function) + b"(" + b"".join(arguments) + b"tR"


def protocol(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


NESTED = b")" + b"q\x00h\x00\x86" * 60  # a tuple of itself twice, 60 times
PAIRS = b"](" + b"".join(b"](" + text(f"k{i}") + b"Ne" for i in range(2000)) + b"eq\x00"
PICKLES = {
    "a list given to many calls": protocol(
        PAIRS, *[name("collections OrderedDict") + b"h\x00\x85R"] * 200
    ),
    "os.system": dump(text("a"), call("os system", text("touch x"))),
    "builtins.eval": dump(text("a"), call("builtins eval", text("1"))),
    "torch.load": dump(text("a"), call("torch load", text("x"))),
    "a tensor by another function": dump(
        text("a"), tensor(storage("0", 8), (8,), (1,), call="torch._utils _rebuild_tensor_v3")
    ),
    "a class of one's own": dump(text("a"), name("mine Config") + b")\x81"),
    "INST": protocol(b"(", text("touch x"), b"ios\nsystem\n"),
    "OBJ": protocol(b"(", name("collections OrderedDict"), b"o"),
    "NEWOBJ": protocol(name("collections OrderedDict"), b")\x81"),
    "STACK_GLOBAL": protocol(text("os"), text("system"), b"\x93"),
    "EXT1": protocol(b"\x82\x01"),
    "PERSID": protocol(b"Pa\n"),
    "a frame of 2**62": protocol(b"\x95" + struct.pack("<Q", 2**62)),
    "text of 4 GB": protocol(b"X\xff\xff\xff\xff"),
    "an integer of 2 GB": protocol(b"\x8b\xff\xff\xff\x7f"),
    "a million lists": protocol(b"]" * 1_000_000),
    "nested tuples": protocol(b")" + b"\x85" * 400_000),
    "a nested key": protocol(b"}" + NESTED + b"Ns"),
    "a nested value": dump(text("a"), NESTED),
    "a number for a key": dump(integer(5), SOUND),
    "a number for a tensor": dump(text("a"), integer(5)),
    "a dict in the dict": dump(text("a"), b"}"),
    "a name with a line's end": dump(text("a\nb"), SOUND),
    "a list": protocol(b"]"),
    "a call of text": protocol(text("x"), b")R"),
    "a call of a storage": protocol(name("torch FloatStorage"), b")R"),
    "too many arguments": dump(text("a"), call("torch._utils _rebuild_tensor_v2", b"N")),
    "state of a tensor": dump(text("a"), SOUND + b"}b"),
    "nothing": b"",
    "no end": dump(text("a"), SOUND)[:-1],
    "an empty stack": protocol(b"0"),
    "no mark": protocol(b"t"),
    "no memo": protocol(b"h\x05"),
    "append to a dict": protocol(b"}Na"),
    "unknown opcode": protocol(b"\xff"),
}
for shown, content in PICKLES.items():
    case(f"pytorch: {shown}", "pytorch", WEIGHTS, raw(content))
for shown in ("os.system", "text of 4 GB", "no end", "a list"):
    damage = raw(PICKLES[shown], {}, torch_file.write_legacy)
    case(f"pytorch legacy: {shown}", "pytorch", WEIGHTS, damage)

TENSORS = {
    "past the end": tensor(storage("0", 8), (2, 5), (5, 1)),
    "offset past the end": tensor(storage("0", 8), (2, 4), (4, 1), offset=1),
    "strides past the end": tensor(storage("0", 8), (2, 4), (5, 1)),
    "negative offset": tensor(storage("0", 8), (2, 4), (4, 1), offset=-4),
    "negative stride": tensor(storage("0", 8), (2, 4), (-4, 1)),
    "negative shape": tensor(storage("0", 8), (-2, 4), (4, 1)),
    "a shape of 2**62": tensor(storage("0", 8), (2**62,), (1,)),
    "a shape past 64 bits": tensor(storage("0", 8), (2**70,), (0,)),
    "a stride past 64 bits": tensor(storage("0", 8), (2,), (2**70,)),
    "more strides than axes": tensor(storage("0", 8), (8,), (1, 1)),
    "nine axes": tensor(storage("0", 8), (1,) * 9, (1,) * 9),
    "zeros by stride 0": tensor(storage("0", 8), (2**40, 4), (0, 1)),
    "more numbers than the record": tensor(storage("0", 9), (9,), (1,)),
    "fewer numbers than the record": tensor(storage("0", 7), (7,), (1,)),
    "a storage of 2**61": tensor(storage("0", 2**61), (8,), (1,)),
    "a negative storage": tensor(storage("0", -8), (0,), (1,)),
    "an unknown dtype": tensor(storage("0", 8, "ComplexFloatStorage"), (8,), (1,)),
    "a quantized dtype": tensor(storage("0", 8, "QInt8Storage"), (8,), (1,)),
    "integers": tensor(storage("0", 4, "LongStorage"), (4,), (1,)),
    "no such record": tensor(storage("5", 8), (8,), (1,)),
    "a record above": tensor(storage("../data.pkl", 8), (8,), (1,)),
    "a view of a storage": tensor(storage("0", 8, more=b"K\x01"), (8,), (1,)),
    "no storage": tensor(b"N", (8,), (1,)),
}
for shown, damaged in TENSORS.items():
    named = "model" if shown in ("zeros by stride 0", "integers") else None
    case(f"pytorch: {shown}", "pytorch", WEIGHTS, pickled(text("a"), damaged), names=named)
NONE = tensor(storage("0", 8), (2**50, 0), (1, 1))
case(
    "pytorch: rows of no numbers",
    "pytorch",
    WEIGHTS,
    pickled(text("encoder.embed_tokens.weight"), NONE, text("decoder.embed_tokens.weight"), NONE),
    names="model",
)
case(
    "pytorch: one key, two storages",
    "pytorch",
    WEIGHTS,
    pickled(text("a"), SOUND, text("b"), tensor(storage("0", 4), (4,), (1,))),
)


def archive(write: Callable[[zipfile.ZipFile], object]) -> Callable[[pathlib.Path], None]:
    def damage(path):
        with zipfile.ZipFile(path, "w") as made:
            write(made)

    return damage


def patched(old: bytes, new: bytes) -> Callable[[pathlib.Path], object]:
    """Returns damage to the bytes of a sound file."""
    return lambda path: (
        pickled(text("a"), SOUND)(path),
        path.write_bytes(path.read_bytes().replace(old, new)),
    )


ENTRY = b"archive/data/0"
ARCHIVES = {
    "big-endian": pickled(text("a"), SOUND, byteorder=b"big"),
    "no pickle": archive(lambda made: made.writestr("archive/version", "3")),
    "two pickles": archive(lambda made: [made.writestr(f"{x}/data.pkl", b"") for x in "ab"]),
    "compressed": archive(
        lambda made: made.writestr(
            "a/data.pkl", dump(text("a"), SOUND), compress_type=zipfile.ZIP_DEFLATED
        )
    ),
    "90,000 entries": archive(lambda made: [made.writestr(str(i), b"") for i in range(90_000)]),
    "a record of another place": patched(b"PK\x01\x02", b"PK\x01\x03"),
    "no local headers": patched(b"PK\x03\x04", b"PK\x03\x05"),
    "other names": patched(ENTRY, b"archive/data/1"),
    "cut": lambda path: (
        pickled(text("a"), SOUND)(path),
        path.write_bytes(path.read_bytes()[:-40]),
    ),
    "a gigabyte after the header": lambda path: (
        make_sparse(path),
        open(path, "r+b").write(b"PK\x03\x04"),
    ),
    "TorchScript": archive(lambda made: made.writestr("a/code/x.py", "import os")),
}


def write_long_texts(path):
    """Writes a gigabyte of long strings, most of which take no place on the disk."""
    make_sparse(path)
    with open(path, "r+b") as file:
        file.write(b"\x80\x02")
        for _ in range(250):
            file.write(b"X" + struct.pack("<I", 4 << 20))
            file.seek(4 << 20, 1)


LEGACY = {
    "big-endian": pickled(text("a"), SOUND, write=torch_file.write_legacy, little_endian=False),
    "another magic number": pickled(text("a"), SOUND, write=torch_file.write_legacy, magic=5),
    "another length": pickled(text("a"), SOUND, write=torch_file.write_legacy, itemsize=8),
    "a storage that no tensor has": raw(
        dump(text("a"), SOUND), RECORDS | {"1": bytes(4)}, torch_file.write_legacy
    ),
    "a gigabyte of text": lambda path: (
        make_sparse(path),
        open(path, "r+b").write(b"\x80\x02" + b"X\xff\xff\xff\x3f"),
    ),
    "text of 4 MB, again and again": write_long_texts,
    "cut": lambda path: (
        pickled(text("a"), SOUND, write=torch_file.write_legacy)(path),
        path.write_bytes(path.read_bytes()[:-1]),
    ),
}
for form, damages in (("", ARCHIVES), (" legacy", LEGACY)):
    for shown, damage in damages.items():
        case(f"pytorch{form} file: {shown}", "pytorch", WEIGHTS, damage)
for kind, damage in OTHERS.items():
    if kind != "circle of links":  # what is no file may be missing
        case(f"{WEIGHTS}: {kind}", "pytorch", WEIGHTS, damage)
INDEX = "pytorch_model.bin.index.json"
for shown, file in {"relative": "../x.bin", "absolute": "/etc/passwd"}.items():
    case(
        f"pytorch index: {shown}",
        "pytorch",
        INDEX,
        lambda path, file=file: (
            path.with_name(WEIGHTS).unlink(),
            path.write_text(json.dumps({"weight_map": {"a": file}})),
        ),
    )
