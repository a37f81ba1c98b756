"""Lists hostile files of each format: weights, tokenizers, tables, records, gin and text."""

import base64
import gzip
import json
import os
import pathlib
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable

import msgpack
import numpy as np
from golden_models import GOLDEN
from hostile_cases import ARRAY, DEEP, LEGACY, OTHERS, STATE, WEIGHTS, case, edited, make_sparse

# safetensors.


def entry(begin, end, shape=(1,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header(content, data=b"", length=None) -> Callable[[pathlib.Path], object]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda path: path.write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + data
    )


HEADERS = {
    "overlap": header({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
    "hole": header({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
    "negative offset": header({"a": entry(-4, 0)}),
    "end before beginning": header({"a": entry(4, 0)}, bytes(4)),
    "negative shape": header({"a": entry(0, 4, (-1,))}, bytes(4)),
    "shape past 64 bits": header({"a": entry(0, 4, (2**63, 2))}, bytes(4)),
    "twice": header(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)).encode(),) * 2), bytes(4)),
    "length of 2**62": header({"a": entry(0, 4)}, bytes(4), 2**62),
    "header of 90 MB": lambda path: (
        make_sparse(path, 95_000_000),
        open(path, "r+b").write(struct.pack("<Q", 90_000_000)),
    ),
    "more data": header({"a": entry(0, 4)}, bytes(5)),
    "less data": header({"a": entry(0, 4)}, bytes(2)),
    "deep": header(DEEP.encode()),
    "integers": header({"a": entry(0, 4, dtype="I32")}, bytes(4)),
    "unknown dtype": header({"a": entry(0, 4, dtype="x")}, bytes(4)),
    "wrong size": header({"a": entry(0, 4, (5,))}, bytes(4)),
    "list": header(b"[]"),
    "no entry": header({"a": 5}),
    "a name with a line's end": header({"a\nb": entry(0, 4)}, bytes(4)),
    "a name of 100,000 letters": header({"a" * 100_000: entry(0, 4)}, bytes(4)),
    "other tensors": header({"a": entry(0, 4)}, bytes(4)),
    # They may be one tensor, and so are compared.
    "rows of no numbers": header(
        {
            f"{stack}.embed_tokens.weight": entry(0, 0, (2**50, 0))
            for stack in ("encoder", "decoder")
        }
    ),
}
for name, damage in HEADERS.items():
    case(
        f"safetensors: {name}",
        "safetensors",
        WEIGHTS,
        damage,
        names="model" if name in ("other tensors", "integers", "rows of no numbers") else None,
    )
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00003.safetensors"
for shown, value in {
    "5": 5,
    "null": None,
    "list": [],
    "no files": {"a": 5},
    "relative": {"a": "../x.safetensors"},
    "hidden relative": {"a": f"b/../../{SHARD}"},
    "absolute": {"a": "/etc/passwd"},
    "home": {"a": "\\\\host\\x"},
    "drive": {"a": "C:x"},
    "folder": {"a": "."},
    "empty": {"a": ""},
    "NUL": {"a": "a\0"},
    "long": {"a": "a" * 9999},
    "no such": {"a": "x"},
    "line's end": {"a\nb": SHARD},
    "not in it": {"a": SHARD},
}.items():
    case(
        f"index: weight_map {shown}",
        "shards",
        INDEX,
        edited(weight_map=value),
        names={"no such": "x", "not in it": SHARD}.get(shown),
    )

# msgpack: Flax's parameters, and T5X's checkpoints, which name the places of their arrays.


def array(shape, dtype="float32", data=b"", kind=1) -> msgpack.ExtType:
    return msgpack.ExtType(kind, msgpack.packb((shape, dtype, data)))


def packed(content) -> Callable[[pathlib.Path], object]:
    return lambda path: path.write_bytes(
        content if isinstance(content, bytes) else msgpack.packb(content)
    )


MESSAGES = {
    "a map of 2**32 entries": b"\xdf\xff\xff\xff\xff",
    "a list of 2**32": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a million nothings": b"\x81\xa1a\xdd\x00\x2d\xc6\xc0" + b"\xc0" * 3_000_000,
    "bytes past the end": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "a string of 4 GB": b"\xdb\xff\xff\xff\xff",
    "nested": b"\x81\xa1a" * 100_000,
    "nested lists": b"\x91" * 100_000,
    "number for a key": {5: array((1,), data=bytes(4))},
    "list for a key": b"\x81\x91\x01\x01",
    "key with a line's end": {"a\nb": 5},
    "a key twice": b"\x82\xa1a\x01\xa1a\x01",
    "object": {"a": array((1,), "object", bytes(8))},
    "void": {"a": array((1,), "V4", bytes(4))},
    "negative shape": {"a": array((-1, -1), data=bytes(4))},
    "huge shape": {"a": array((2**62,), data=bytes(4))},
    "shape of text": {"a": array("x", data=bytes(4))},
    "dtype of numbers": {"a": array((1,), 5, bytes(4))},
    "no array": {"a": 5},
    "integers": {"a": array((1,), "int32", bytes(4))},
    "unknown extension": {"a": msgpack.ExtType(9, b"x")},
    "chunks of nothing": {"a": {"__msgpack_chunked_array__": True}},
    "chunks that do not fit": {
        "a": {
            "__msgpack_chunked_array__": True,
            "shape": {"0": 9},
            "chunks": {"0": array((1,), data=bytes(4))},
        }
    },
    "chunks of 2**60": {
        "a": {
            "__msgpack_chunked_array__": True,
            "shape": {"0": 2**60},
            "chunks": {"0": array((1,), data=bytes(4))},
        }
    },
    "not msgpack": b"\xc1",
    "more after it": b"\x80\x00",
}
for name, content in MESSAGES.items():
    named = "model" if name == "integers" else None
    case(f"flax: {name}", "flax", "flax_model.msgpack", packed(content), names=named)
    if not name.startswith("integers"):
        case(f"legacy: {name}", "legacy", LEGACY, packed(content))


def spec(**changes) -> Callable[[pathlib.Path], object]:
    store = {"driver": "file", "path": "target.encoder.layers_1.mlp.wo.kernel/"} | changes.pop(
        "kvstore", {}
    )
    return packed(
        {
            "version": 3,
            "optimizer": {"target": {"a": {"driver": "zarr", "kvstore": store} | changes}},
        }
    )


for name, damage in {
    "relative": spec(kvstore={"path": "../x"}),
    "absolute": spec(kvstore={"path": "/etc"}),
    "no path": spec(kvstore={"path": 5}),
    "other driver": spec(driver="json"),
    "driver of numbers": spec(driver=5),
    "store of text": packed(
        {"version": 3, "target": {"a": {"driver": "zarr", "kvstore": "file:///etc"}}}
    ),
    "version": packed({"version": [DEEP[:50]], "optimizer": {}}),
    "optimizer": packed({"version": 3, "optimizer": 5}),
    "target": packed({"version": 3, "optimizer": {"target": []}}),
    "a list": packed([1, 2]),
}.items():
    case(f"legacy spec: {name}", "legacy", LEGACY, damage)

# zarr and Orbax.
for name, changes in {
    "huge chunk": dict(chunks=[2**40, 16]),
    "huge shape": dict(shape=[2**40, 16]),
    "object": dict(dtype="|O"),
    "negative": dict(shape=[-1, 16]),
    "no numbers": dict(shape="x"),
    "no chunks": dict(chunks=None),
    "filters": dict(filters=[{"id": "x"}]),
    "compressor": dict(compressor={"id": "pickle"}),
    "a megabyte": dict(attributes=[[]] * 300_000),
    "structured": dict(dtype=[["a", "<f4"], ["b", "<f4"]]),
}.items():
    case(f"zarr: {name}", "legacy", f"{ARRAY}/.zarray", edited(**changes), names="model")
case(
    "zarr: bomb",
    "legacy",
    f"{ARRAY}/0.0",
    lambda p: p.write_bytes(gzip.compress(bytes(3 * 10**8), 1)),
    names="checkpoint_7",
)


def TREE(*keys):
    return {"tree_metadata": {"a": {"key_metadata": [{"key": key} for key in keys]}}}


for name, content in {
    "no tree": {},
    "list": {"tree_metadata": []},
    "numbers": TREE("target", 5),
    "lists": TREE("target", []),
    "out of it": TREE("target", "../../x"),
    "absolute": TREE("target", "/etc/passwd"),
    "no such": TREE("target", "x"),
    "line's end": TREE("target", "a\nb"),
    "nothing": TREE(),
    "keys of text": {"tree_metadata": {"a": {"key_metadata": "x"}}},
    "zarr3": TREE("target", "x") | {"use_zarr3": True},
}.items():
    case(
        f"orbax: {name}",
        "orbax",
        f"{STATE}/_METADATA",
        lambda p, text=json.dumps(content): p.write_text(text),
        names="checkpoint_7",
    )
for name in ("layers_999999999", "layers_" + "9" * 400):
    case(
        f"orbax: {name[:20]}",
        "orbax",
        f"{STATE}/_METADATA",
        lambda p, name=name: p.write_text(p.read_text().replace("layers_1", name)),
        names="checkpoint_7",
    )

# Tokenizers.


def part(name: str, value) -> Callable[[pathlib.Path], object]:
    return edited(**{name: value})


def regex(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def growing(count: int) -> dict:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
    return {"type": "Sequence", "normalizers": [step] * count}


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [],
    "special_tokens": {},
}
VOCABULARY = {"type": "WordLevel", "vocab": {}, "unk_token": "a"}
for name, damage in {
    **{
        f"regex {p[:20]}": part("pre_tokenizer", regex(p))
        for p in (
            "(a+)+$",
            "(a|a)*$",
            "(?:a*)*b",
            "a*a*a*a*b",
            r"\s+$",
            "a?" * 40 + "a" * 40,
            "(?:(?:a{1000}){1000}){1000}",
            "x" * 100_000,
            r"(\w+\s?)+:",
        )
    },
    "regex in a decoder": part(
        "decoder", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    ),
    "regex in a normalizer": part(
        "normalizer", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    ),
    "ten to the ninth": part("normalizer", growing(9)),
    "a thousand bytes for ten": part(
        "pre_tokenizer",
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
            * 40,
        },
    ),
    "steps without a type": part(
        "normalizer",
        {
            "type": "Sequence",
            "normalizers": [{k: v for k, v in growing(1)["normalizers"][0].items() if k != "type"}]
            * 9,
        },
    ),
    "table without a type": part("normalizer", {"precompiled_charsmap": "AAAA"}),
    "templates": part("post_processor", {"type": "Sequence", "processors": [TEMPLATE] * 40}),
    "charsmap of text": part("normalizer", {"type": "Precompiled", "precompiled_charsmap": "x"}),
    "charsmap of nothing": part(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "charsmap past its end": part(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9hYmM="}
    ),
    "charsmap of numbers": part("normalizer", {"type": "Precompiled", "precompiled_charsmap": 5}),
    "no vocabulary": part("model", VOCABULARY),
    "an id of 2**32 - 1": part("model", VOCABULARY | {"vocab": {"a": 2**32 - 1, "</s>": 1}}),
    "a word of any length": part(
        "model",
        {
            "type": "WordPiece",
            "unk_token": "a",
            "vocab": {"a": 0},
            "max_input_chars_per_word": 10**9,
        },
    ),
    "model of numbers": part("model", 5),
    "added tokens of numbers": part("added_tokens", 5),
    "a million lists": part("model", [[]] * 2_500_000),
    "nested normalizers": lambda p: p.write_text('{"normalizer":' * 5000 + "1" + "}" * 5000),
    "a list": lambda p: p.write_text("[]"),
    "not UTF-8": lambda p: p.write_bytes(b'{"a": "\xff"}'),
}.items():
    case(f"tokenizer.json: {name}", "json", "tokenizer.json", damage)
for name, content in {
    "text": b"not a model",
    "zeros": bytes(99),
    "fields": b"\x0a\xff\xff\xff\xff\x7f",
    "one piece": b"\x0a\x05\x0a\x01a\x18\x01",
}.items():
    case(
        f"spiece.model: {name}",
        "text",
        "spiece.model",
        lambda p, content=content: p.write_bytes(content),
    )


def table_of_characters(change) -> bytes:
    """Returns the table of characters of a sound tokenizer, with its replacements changed."""
    content = json.loads((GOLDEN / "hf_tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    table = base64.b64decode(content["normalizer"]["precompiled_charsmap"])
    start = 4 + int.from_bytes(table[:4], "little")
    return table[:start] + change(table[start:])


def field(number: int, content: bytes) -> bytes:
    """Returns a field of a protocol buffer.

    A second one that is a message is merged into the first.
    """
    length, digits = len(content), []
    while length or not digits:
        digits.append(length & 0x7F | (0x80 if length > 0x7F else 0))
        length >>= 7
    return bytes([number << 3 | 2, *digits]) + content


for name, table in {
    "longer": table_of_characters(lambda texts: texts.replace(b"\0", b"a")),
    "cut": table_of_characters(lambda texts: texts[:9]),
    "of text": b"x" * 99,
    "of nothing": bytes(8),
}.items():
    text = base64.b64encode(table).decode()
    case(
        f"tokenizer.json: table {name}",
        "json",
        "tokenizer.json",
        part("normalizer", {"type": "Precompiled", "precompiled_charsmap": text}),
    )
    for number in (3, 5):
        case(
            f"spiece.model: table {name} in {number}",
            "text",
            "spiece.model",
            lambda p, more=field(number, field(2, table)): p.write_bytes(p.read_bytes() + more),
        )

# Tables.


def table(**changes) -> Callable[[pathlib.Path], None]:
    def damage(path):
        with np.load(path) as result:
            np.savez_compressed(path, **(dict(result) | changes))

    return damage


def zipped(
    members: dict[str, bytes], compression=zipfile.ZIP_DEFLATED
) -> Callable[[pathlib.Path], None]:
    def damage(path):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    return damage


def npy(text: str, data=b"") -> bytes:
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


def bomb(path):
    """Writes ten gigabytes of zeros whose length the archive's directory does not give."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = deflate.compress(bytes(10**7)) + deflate.flush(zlib.Z_FULL_FLUSH)
    zipped({"starts.npy": b"0" * 100}, zipfile.ZIP_STORED)(path)
    content = path.read_bytes()
    data = block * 1000
    place = content.index(b"0" * 100)
    changed = content[:place] + data + content[place + 100 :]
    central, end = changed.rindex(b"PK\x01\x02"), changed.rindex(b"PK\x05\x06")
    changed = bytearray(changed)
    struct.pack_into("<HxxxxxxxxI", changed, central + 10, 8, len(data))
    struct.pack_into("<H", changed, 8, 8)
    struct.pack_into("<I", changed, 18, len(data))
    struct.pack_into("<I", changed, end + 16, central)
    path.write_bytes(changed)


SPARE = np.zeros(3, np.int32)
for name, damage in {
    "bomb": zipped(
        {
            "starts.npy": npy(
                "{'descr': '<i4', 'fortran_order': False, 'shape': (75000000,)}", bytes(3 * 10**8)
            )
        }
    ),
    "bomb in disguise": bomb,
    "pickle": zipped(
        {
            "starts.npy": npy(
                "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
                b"cos\nsystem\n(S'true'\ntR.",
            )
        }
    ),
    "huge shape": zipped(
        {"starts.npy": npy(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({2**62},)}}")}
    ),
    "negative shape": zipped(
        {"starts.npy": npy("{'descr': '<i4', 'fortran_order': False, 'shape': (-1,)}", bytes(4))}
    ),
    "code for a header": zipped({"starts.npy": npy("__import__('os').abort()")}),
    "deep header": zipped({"starts.npy": npy("(" * 3000)}),
    "bzip2": zipped({"starts.npy": bytes(10**7)}, zipfile.ZIP_BZIP2),
    "many members": zipped({f"{i}.npy": b"" for i in range(5000)}),
    "order 10**9": table(order=10**9),
    "order of numbers": table(order=SPARE),
    "order of text": table(order="x"),
    "order 1.5": table(order=1.5),
    "continuations 10**12": table(continuations=10**12),
    "vocabulary": table(vocab_size=10**9),
    "starts": table(starts=SPARE),
    "huge starts": table(starts=np.array([0, 2**31 - 1])),
    "floats": table(counts=SPARE + 0.5),
    "matrix": table(extras=SPARE[None]),
    "negative": table(next_tokens=SPARE - 1),
    "format": table(format=5),
    **{
        kind: OTHERS[kind]
        for kind in (
            "pipe",
            "folder",
            "socket",
            "empty",
            "NUL bytes",
            "half",
            "gigabyte of nothing",
        )
    },
}.items():
    case(f"table: {name}", "table", "table.npz", damage, read="table")

# Sorted text: a page with the header, then numbers, which are mapped into memory.


def sorted_text(sound: bool = True, at: int = 0, put: bytes = b"", **changes):
    """Returns damage that changes the header, and bytes that follow it.

    The checksum is then right if `sound`, so that something else must find the damage.
    """

    def damage(path):
        content = bytearray(path.read_bytes())
        header, body = json.loads(content[:4096]) | changes, content[4096:]
        body[at : at + len(put)] = put
        if sound:
            rest = {name: value for name, value in header.items() if name != "checksum"}
            first = zlib.crc32(json.dumps(rest).encode())
            header["checksum"] = f"{zlib.crc32(body, first):08x}"
        path.write_bytes(json.dumps(header).encode().ljust(4096) + body)

    return damage


for name, damage in {
    "a bit": sorted_text(sound=False, put=b"\5"),
    "a bit of what fills a page": sorted_text(sound=False, at=4000, put=b"\1"),
    "a bit of the order": sorted_text(sound=False, at=4096, put=b"\2"),
    "an id outside": sorted_text(put=b"\xff\xff"),
    "a place outside": sorted_text(at=4096, put=b"\xff\xff\xff\x7f"),
    "a place before": sorted_text(at=4096, put=b"\xff\xff\xff\xff"),
    "format": sorted_text(format="specdec_jax sorted text, version 2"),
    "a smaller vocabulary": sorted_text(vocab_size=2),
    "a vocabulary of text": sorted_text(vocab_size="8"),
    "more ids": sorted_text(ids=10**9),
    "more places": sorted_text(places=10**9),
    "negative": sorted_text(places=-1),
    "true": sorted_text(ids=True),
    "1.5 ids": sorted_text(ids=1.5),
    "no number": sorted_text(ids=float("nan")),
    "a key more": sorted_text(other=1),
    "a fingerprint of lines": sorted_text(fingerprint="a\nb"),
    "a checksum of text": sorted_text(sound=False, checksum="x" * 500),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a table": lambda path: shutil.copy(path.with_name("table.npz"), path),
    **{kind: damage for kind, damage in OTHERS.items()},
}.items():
    case(f"sorted text: {name}", "table", "texts.suffix", damage, read="sorted text")

# Records, settings in gin, and lines of text, as the command line reads them.
for name, damage in {
    **{kind: OTHERS[kind] for kind in OTHERS if kind != "half"},
    **{
        json.dumps(content)[:60]: lambda p, text=json.dumps(content): p.write_text(text)
        for content in (
            [],
            5,
            {},
            {"variants": 5},
            {"variants": [5]},
            {"options": []},
            {"options": {}, "speculative": []},
            {"fits": 1},
            {"variants": [], "machine": 5},
        )
    },
}.items():
    case(f"record: {name}", "safetensors", "record.json", damage, read="figures")
for name, content in {
    "nested": f"TrainConfig.seed = {DEEP[:5000]}",
    "brackets": "TrainConfig.seed = " + "(" * 99_999,
    "itself": "include 'a.gin'",
    "macros": "A = %B\nB = %A\nTrainConfig.seed = %A",
    "open text": "TrainConfig.seed = '''x",
    "digits": "TrainConfig.seed = " + "9" * 9999,
    "NUL": "TrainConfig.seed = 1\0",
    "not UTF-8": b"TrainConfig.seed = '\xe4'",
    "UTF-16": "a = 1".encode("utf-16"),
    "empty": "",
}.items():
    content = content if isinstance(content, bytes) else content.encode()
    case(
        f"gin: {name}",
        "safetensors",
        "a.gin",
        lambda p, content=content: p.write_bytes(content),
        read="train",
        names="TrainConfig" if name == "empty" else None,
    )
for kind in ("pipe", "folder", "socket", "circle of links"):
    case(f"gin: {kind}", "safetensors", "a.gin", OTHERS[kind], read="train")
LINE = b"one\n" + b"a " * 15_000_000 + b"\ntwo\n"
for file, content in {
    "lines.txt": LINE,
    "lines.txt.gz": gzip.compress(LINE, 1),
    "bomb.txt.gz": gzip.compress(bytes(3 * 10**8), 1),
}.items():
    case(
        f"{file}: a line of megabytes",
        "json",
        file,
        lambda p, content=content: p.write_bytes(content),
        read="generate",
        names=f"{file}, line",
    )
case(
    "a sentence of 1,100,000 letters",
    "json",
    "long.txt",
    lambda p: p.write_text("a" * 1_100_000),
    read="generate",
    names="sentence 1",
)
