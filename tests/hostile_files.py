"""Files that somebody made in order to harm, each from a small sound one; run as a program, it reads them one by one.

A case is what it starts from, what is done to that folder, and what the message must name.
"""

import contextlib
import functools
import gzip
import io
import json
import os
import pathlib
import resource
import shutil
import socket
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

import make_checkpoints as make
import msgpack
import numpy as np
from golden_models import GOLDEN

TOKENIZER = GOLDEN / "hf_tokenizer"
LEGACY, STATE = "checkpoint_7/checkpoint", "checkpoint_7/state"
ARRAY = "checkpoint_7/target.encoder.layers_1.mlp.wo.kernel"
WEIGHTS = "model.safetensors"
DEEP = "[" * 100_000


class Case(NamedTuple):
    base: str
    damage: Callable[[pathlib.Path], object]
    names: str
    read: str = "load"


CASES: dict[str, Case] = {}


def case(name: str, base: str, file: str, damage: Callable[[pathlib.Path], object], read: str = "load", names=None) -> None:
    """`damage` is given the path of `file`, whose name the message must have unless `names` says another."""
    assert name not in CASES, name
    CASES[name] = Case(base, lambda folder: damage(folder / file), names or pathlib.Path(file).name, read)


# What any file can be instead of itself.


def replaced(make_other) -> Callable[[pathlib.Path], None]:
    def damage(path):
        if path.exists():
            path.unlink()
        make_other(path)

    return damage


def make_socket(path):
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as other:  # a longer path is none for a socket
        other.bind(path.name)


def make_sparse(path, size=1 << 30):
    with open(path, "wb") as file:
        file.truncate(size)


OTHERS = {
    "pipe": replaced(os.mkfifo),
    "folder": replaced(pathlib.Path.mkdir),
    "socket": replaced(make_socket),
    "circle of links": replaced(lambda path: path.symlink_to(path)),
    "empty": replaced(lambda path: path.write_bytes(b"")),
    "gigabyte of nothing": replaced(make_sparse),
    "NUL bytes": replaced(lambda path: path.write_bytes(bytes(1000))),
    "UTF-16": replaced(lambda path: path.write_bytes('{"a": 1}'.encode("utf-16"))),
    "nested": replaced(lambda path: path.write_text(DEEP)),
    "nested objects": replaced(lambda path: path.write_text('{"a":' * 100_000)),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
}
FILES = {
    "config.json": ("text", ""),
    "generation_config.json": ("text", "empty links"),
    "tokenizer_config.json": ("text", ""),
    "spiece.model": ("text", "links"),
    WEIGHTS: ("text", "links"),
    "tokenizer.json": ("json", "links"),
    "model.safetensors.index.json": ("shards", "links"),
    "flax_model.msgpack": ("flax", "links"),
    f"{STATE}/_METADATA": ("orbax", "links"),
    "params/manifest.ocdbt": ("own", "links half"),
}
for file, (base, without) in FILES.items():
    for kind, damage in OTHERS.items():
        if kind.split()[-1] not in without.split():  # what is not there may be missing; what is no link's target too
            named = "params" if "ocdbt" in file and kind not in ("pipe", "folder", "socket") else None
            case(f"{pathlib.Path(file).name}: {kind}", base, file, damage, names=named)
for kind in ("pipe", "folder", "socket", "circle of links"):
    case(f"checkpoint: {kind}", "legacy", LEGACY, OTHERS[kind], names="model")
for kind in ("empty", "gigabyte of nothing", "NUL bytes", "nested", "half"):
    case(f"checkpoint: {kind}", "legacy", LEGACY, OTHERS[kind])
for kind in ("pipe", "socket", "empty", "half"):
    case(f"zarr chunk: {kind}", "legacy", f"{ARRAY}/0.0", OTHERS[kind], names="checkpoint_7")
    case(f"own config.json: {kind}", "own", "config.json", OTHERS[kind])


# Settings.


def edited(**options) -> Callable[[pathlib.Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | options))


def settings(base: str, file: str, values: dict[str, tuple], names=None, read="load", inner=None) -> None:
    for name, wrong in values.items():
        for value in wrong:
            shown = f"{name} = {json.dumps(value)[:60]}"
            change = edited(**{name: value}) if inner is None else edit_inner(inner, name, value)
            case(f"{base}: {(inner or file) + ': '}{shown}", base, file, change, read, names)


def edit_inner(inner: str, name: str, value):
    def damage(path):
        content = json.loads(path.read_text())
        content[inner][name] = value
        path.write_text(json.dumps(content))

    return damage


NUMBERS = (10**10, -1, "x", 1.5, True)
COUNTS = ("vocab_size", "d_model", "num_heads", "d_kv", "num_layers", "num_decoder_layers", "d_ff",
          "relative_attention_num_buckets", "relative_attention_max_distance")  # fmt: skip
settings("safetensors", "config.json", dict.fromkeys(COUNTS, NUMBERS))
settings("safetensors", "config.json", {
    "num_layers": (10**9, [2]), "feed_forward_proj": ([], {}, 5), "architectures": (5, "x", [[]], {"a": 1}, [DEEP[:500]]),
    "model_type": ([], None, "llama", 7), "eos_token_id": ("x", 1.5, True, [1, "x"], {"a": 1}, [[1]]),
    "decoder_start_token_id": ("x", [1, 2], True, 1.5), "layer_norm_epsilon": ("x", []), "tie_word_embeddings": ("x", 5),
})  # fmt: skip
settings("safetensors", "config.json", {"eos_token_id": (-1, 10**20), "decoder_start_token_id": (40,)}, names="model")
settings("text", "generation_config.json", {"eos_token_id": ("x", True), "decoder_start_token_id": ("x",)})
settings("text", "tokenizer_config.json", {
    "extra_ids": (10**10, -1, "x", 1.5, True), "added_tokens_decoder": (5, {"x": {"content": "a"}}, {"9": 5}, {"9": {}}),
    "extra_special_tokens": (5, [5], [{}], [[]], {"a": 1}),
})  # fmt: skip
settings("own", "config.json", dict.fromkeys(
    ("vocab_size", "emb_dim", "num_heads", "head_dim", "num_encoder_layers", "num_decoder_layers", "mlp_dim"), NUMBERS[:3]
) | {
    "mlp_activations": (5, "gelu", ["x"], [["gelu"]], ["gelu"] * 3), "dtype": (5, "x", "object"), "dropout_rate": ("x", -1, 2),
    "logits_via_embedding": (5, "x"), "encoder_dim": (-1, "x"), "max_distance": (1,), "unheard_of": (1,),
}, inner="model")  # fmt: skip
settings("own", "config.json", {
    "model": (5, [], None), "architecture": (5, "bert", []), "eos_ids": (5, None, "ab"), "version": (2, "x", [1]),
    "vocabulary": (5, [], {"kind": "x"}, {"kind": []}, {"kind": "bytes", "extra_ids": 10**10},
                   {"kind": "sentencepiece", "file": "../../spiece.model"}, {"kind": "tokenizer_json", "file": "/etc/passwd"},
                   {"kind": "sentencepiece", "file": 5}, {"kind": "sentencepiece", "file": "a\0b"}),
    "encoder_fingerprint": (5,),
})  # fmt: skip
settings("own", "config.json", {"eos_ids": (["x"], [True]), "start_token": ("x", 1.5)}, names="model")
settings("heads", "config.json", {
    "num_heads": (10**9, "x", 0), "num_blocks": (10**9, -1), "vocab_size": ("x",), "share_head": (5,), "dtype": (7,),
}, inner="heads", read="heads")  # fmt: skip
settings("heads", "config.json", {"heads": (5, {}), "target_fingerprint": (5, None)}, read="heads")
case("config.json: a key twice", "safetensors", "config.json", lambda p: p.write_text(p.read_text()[:-1] + ', "d_ff": 24}'))
case("config.json: a million lists", "safetensors", "config.json", lambda p: p.write_text('{"a": [' + "[]," * 3_000_000 + "1]}"))
case("config.json: byte-order mark", "safetensors", "config.json", lambda p: p.write_bytes(b"\xef\xbb\xbf" + p.read_bytes()))
case("config.json: a number of 10,000 digits", "safetensors", "config.json", lambda p: p.write_text('{"d_ff": ' + "9" * 10_000 + "}"))
case("no path", "safetensors", "config.json", lambda p: shutil.rmtree(p.parent), names="model")

# safetensors.


def entry(begin, end, shape=(1,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header(content, data=b"", length=None) -> Callable[[pathlib.Path], object]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda path: path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


HEADERS = {
    "overlap": header({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
    "hole": header({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
    "negative offset": header({"a": entry(-4, 0)}),
    "end before beginning": header({"a": entry(4, 0)}, bytes(4)),
    "negative shape": header({"a": entry(0, 4, (-1,))}, bytes(4)),
    "shape past 64 bits": header({"a": entry(0, 4, (2**63, 2))}, bytes(4)),
    "twice": header(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)).encode(),) * 2), bytes(4)),
    "length of 2**62": header({"a": entry(0, 4)}, bytes(4), 2**62),
    "header of 90 MB": lambda path: (make_sparse(path, 95_000_000), open(path, "r+b").write(struct.pack("<Q", 90_000_000))),
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
}
for name, damage in HEADERS.items():
    case(f"safetensors: {name}", "safetensors", WEIGHTS, damage, names="model" if name == "other tensors" else None)
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00003.safetensors"
for shown, value in {
    "5": 5, "null": None, "list": [], "no files": {"a": 5}, "relative": {"a": "../x.safetensors"},
    "hidden relative": {"a": f"b/../../{SHARD}"}, "absolute": {"a": "/etc/passwd"}, "home": {"a": "\\\\host\\x"},
    "drive": {"a": "C:x"}, "folder": {"a": "."}, "empty": {"a": ""}, "NUL": {"a": "a\0"}, "long": {"a": "a" * 9999},
    "no such": {"a": "x"}, "line's end": {"a\nb": SHARD}, "not in it": {"a": SHARD},
}.items():  # fmt: skip
    case(f"index: weight_map {shown}", "shards", INDEX, edited(weight_map=value), names={"no such": "x", "not in it": SHARD}.get(shown))

# msgpack: Flax's parameters, and T5X's checkpoints with the places of their arrays.


def array(shape, dtype="float32", data=b"", kind=1) -> msgpack.ExtType:
    return msgpack.ExtType(kind, msgpack.packb((shape, dtype, data)))


def packed(content) -> Callable[[pathlib.Path], object]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else msgpack.packb(content))


MESSAGES = {
    "a map of 2**32 entries": b"\xdf\xff\xff\xff\xff", "a list of 2**32": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a million nothings": b"\x81\xa1a\xdd\x00\x2d\xc6\xc0" + b"\xc0" * 3_000_000, "bytes past the end": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "a string of 4 GB": b"\xdb\xff\xff\xff\xff", "nested": b"\x81\xa1a" * 100_000, "nested lists": b"\x91" * 100_000,
    "number for a key": {5: array((1,), data=bytes(4))}, "list for a key": b"\x81\x91\x01\x01", "key with a line's end": {"a\nb": 5},
    "a key twice": b"\x82\xa1a\x01\xa1a\x01", "object": {"a": array((1,), "object", bytes(8))}, "void": {"a": array((1,), "V4", bytes(4))},
    "negative shape": {"a": array((-1, -1), data=bytes(4))}, "huge shape": {"a": array((2**62,), data=bytes(4))},
    "shape of text": {"a": array("x", data=bytes(4))}, "dtype of numbers": {"a": array((1,), 5, bytes(4))}, "no array": {"a": 5},
    "integers": {"a": array((1,), "int32", bytes(4))}, "unknown extension": {"a": msgpack.ExtType(9, b"x")},
    "chunks of nothing": {"a": {"__msgpack_chunked_array__": True}},
    "chunks that do not fit": {"a": {"__msgpack_chunked_array__": True, "shape": {"0": 9}, "chunks": {"0": array((1,), data=bytes(4))}}},
    "chunks of 2**60": {"a": {"__msgpack_chunked_array__": True, "shape": {"0": 2**60}, "chunks": {"0": array((1,), data=bytes(4))}}},
    "not msgpack": b"\xc1", "more after it": b"\x80\x00",
}  # fmt: skip
for name, content in MESSAGES.items():
    case(f"flax: {name}", "flax", "flax_model.msgpack", packed(content))
    if not name.startswith("integers"):
        case(f"legacy: {name}", "legacy", LEGACY, packed(content))


def spec(**changes) -> Callable[[pathlib.Path], object]:
    store = {"driver": "file", "path": "target.encoder.layers_1.mlp.wo.kernel/"} | changes.pop("kvstore", {})
    return packed({"version": 3, "optimizer": {"target": {"a": {"driver": "zarr", "kvstore": store} | changes}}})


for name, damage in {
    "relative": spec(kvstore={"path": "../x"}), "absolute": spec(kvstore={"path": "/etc"}), "no path": spec(kvstore={"path": 5}),
    "other driver": spec(driver="json"), "driver of numbers": spec(driver=5), "store of text": spec() and packed(
        {"version": 3, "target": {"a": {"driver": "zarr", "kvstore": "file:///etc"}}}),
    "version": packed({"version": [DEEP[:50]], "optimizer": {}}), "optimizer": packed({"version": 3, "optimizer": 5}),
    "target": packed({"version": 3, "optimizer": {"target": []}}), "a list": packed([1, 2]),
}.items():  # fmt: skip
    case(f"legacy spec: {name}", "legacy", LEGACY, damage)

# zarr and Orbax.
for name, changes in {
    "huge chunk": dict(chunks=[2**40, 16]), "huge shape": dict(shape=[2**40, 16]), "object": dict(dtype="|O"),
    "negative": dict(shape=[-1, 16]), "no numbers": dict(shape="x"), "no chunks": dict(chunks=None), "filters": dict(filters=[{"id": "x"}]),
    "compressor": dict(compressor={"id": "pickle"}), "a megabyte": dict(attributes=[[]] * 300_000), "structured": dict(dtype=[["a", "<f4"], ["b", "<f4"]]),
}.items():  # fmt: skip
    case(f"zarr: {name}", "legacy", f"{ARRAY}/.zarray", edited(**changes), names="model")
case("zarr: bomb", "legacy", f"{ARRAY}/0.0", lambda p: p.write_bytes(gzip.compress(bytes(10**9), 1)), names="checkpoint_7")
TREE = lambda *keys: {"tree_metadata": {"a": {"key_metadata": [{"key": key} for key in keys]}}}
for name, content in {
    "no tree": {}, "list": {"tree_metadata": []}, "numbers": TREE("target", 5), "lists": TREE("target", []), "out of it": TREE("target", "../../x"),
    "absolute": TREE("target", "/etc/passwd"), "no such": TREE("target", "x"), "line's end": TREE("target", "a\nb"), "nothing": TREE(),
    "keys of text": {"tree_metadata": {"a": {"key_metadata": "x"}}}, "zarr3": json.loads("{}") | TREE("target", "x") | {"use_zarr3": True},
}.items():  # fmt: skip
    case(f"orbax: {name}", "orbax", f"{STATE}/_METADATA", lambda p, text=json.dumps(content): p.write_text(text), names="checkpoint_7")
for name in ("layers_999999999", "layers_" + "9" * 400):
    case(f"orbax: {name[:20]}", "orbax", f"{STATE}/_METADATA", lambda p, name=name: p.write_text(p.read_text().replace("layers_1", name)), names="checkpoint_7")

# Tokenizers.


def part(name: str, value) -> Callable[[pathlib.Path], object]:
    return edited(**{name: value})


def regex(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def growing(count: int) -> dict:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
    return {"type": "Sequence", "normalizers": [step] * count}


TEMPLATE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [], "special_tokens": {}}
VOCABULARY = {"type": "WordLevel", "vocab": {}, "unk_token": "a"}
for name, damage in {
    **{f"regex {p[:20]}": part("pre_tokenizer", regex(p)) for p in (
        "(a+)+$", "(a|a)*$", "(?:a*)*b", "a*a*a*a*b", r"\s+$", "a?" * 40 + "a" * 40, "(?:(?:a{1000}){1000}){1000}", "x" * 100_000, r"(\w+\s?)+:")},
    "regex in a decoder": part("decoder", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}),
    "regex in a normalizer": part("normalizer", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}),
    "ten to the ninth": part("normalizer", growing(9)), "a thousand bytes for ten": part("pre_tokenizer", {
        "type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}] * 40}),
    "templates": part("post_processor", {"type": "Sequence", "processors": [TEMPLATE] * 40}),
    "charsmap of text": part("normalizer", {"type": "Precompiled", "precompiled_charsmap": "x"}),
    "charsmap of nothing": part("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "charsmap past its end": part("normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9hYmM="}),
    "charsmap of numbers": part("normalizer", {"type": "Precompiled", "precompiled_charsmap": 5}),
    "no vocabulary": part("model", VOCABULARY), "an id of 2**32 - 1": part("model", VOCABULARY | {"vocab": {"a": 2**32 - 1, "</s>": 1}}),
    "a word of any length": part("model", {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}),
    "model of numbers": part("model", 5), "added tokens of numbers": part("added_tokens", 5), "a million lists": part("model", [[]] * 2_500_000),
    "nested normalizers": lambda p: p.write_text('{"normalizer":' * 5000 + "1" + "}" * 5000),
    "a list": lambda p: p.write_text("[]"), "not UTF-8": lambda p: p.write_bytes(b'{"a": "\xff"}'),
}.items():  # fmt: skip
    named = "model" if name == "an id of 2**32 - 1" else None
    case(f"tokenizer.json: {name}", "json", "tokenizer.json", damage, names=named)
for name, content in {"text": b"not a model", "zeros": bytes(99), "fields": b"\x0a\xff\xff\xff\xff\x7f", "one piece": b"\x0a\x05\x0a\x01a\x18\x01"}.items():
    case(f"spiece.model: {name}", "text", "spiece.model", lambda p, content=content: p.write_bytes(content))

# Tables.


def table(**changes) -> Callable[[pathlib.Path], None]:
    def damage(path):
        with np.load(path) as found:
            np.savez_compressed(path, **(dict(found) | changes))

    return damage


def zipped(members: dict[str, bytes], compression=zipfile.ZIP_DEFLATED) -> Callable[[pathlib.Path], None]:
    def damage(path):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    return damage


def npy(text: str, data=b"") -> bytes:
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


def bomb(path):
    """Ten gigabytes of zeros, as a member whose length the archive's directory does not say."""
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
    "bomb": zipped({"starts.npy": npy("{'descr': '<i4', 'fortran_order': False, 'shape': (250000000,)}", bytes(10**9))}),
    "bomb in disguise": bomb, "pickle": table(starts=np.array([object], object)) and zipped({"starts.npy": npy(
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"cos\nsystem\n(S'true'\ntR.")}),
    "huge shape": zipped({"starts.npy": npy("{'descr': '<i4', 'fortran_order': False, 'shape': (2**62,)}".replace("2**62", str(2**62)))}),
    "negative shape": zipped({"starts.npy": npy("{'descr': '<i4', 'fortran_order': False, 'shape': (-1,)}", bytes(4))}),
    "code for a header": zipped({"starts.npy": npy("__import__('os').abort()")}), "deep header": zipped({"starts.npy": npy("(" * 3000)}),
    "bzip2": zipped({"starts.npy": bytes(10**8)}, zipfile.ZIP_BZIP2), "many members": zipped({f"{i}.npy": b"" for i in range(5000)}),
    "order 10**9": table(order=10**9), "order of numbers": table(order=SPARE), "order of text": table(order="x"), "order 1.5": table(order=1.5),
    "vocabulary": table(vocab_size=10**9), "starts": table(starts=SPARE), "huge starts": table(starts=np.array([0, 2**31 - 1])),
    "floats": table(counts=SPARE + 0.5), "matrix": table(extras=SPARE[None]), "negative": table(next_tokens=SPARE - 1), "format": table(format=5),
    **{kind: OTHERS[kind] for kind in ("pipe", "folder", "socket", "empty", "NUL bytes", "half", "gigabyte of nothing")},
}.items():  # fmt: skip
    case(f"table: {name}", "table", "table.npz", damage, read="table")

# Records, settings in gin, and lines of text, as the command line reads them.
for name, damage in {
    **{kind: OTHERS[kind] for kind in OTHERS if kind != "half"},
    **{json.dumps(content)[:60]: lambda p, text=json.dumps(content): p.write_text(text) for content in (
        [], 5, {}, {"arms": 5}, {"arms": [5]}, {"options": []}, {"options": {}, "speculative": []}, {"fits": 1}, {"arms": [], "machine": 5})},
}.items():  # fmt: skip
    case(f"record: {name}", "safetensors", "record.json", damage, read="figures")
for name, content in {
    "nested": f"TrainConfig.seed = {DEEP[:5000]}", "brackets": "TrainConfig.seed = " + "(" * 99_999, "itself": "include 'a.gin'",
    "macros": "A = %B\nB = %A\nTrainConfig.seed = %A", "open text": "TrainConfig.seed = '''x", "digits": "TrainConfig.seed = " + "9" * 9999,
    "NUL": "TrainConfig.seed = 1\0", "not UTF-8": b"TrainConfig.seed = '\xe4'", "UTF-16": "a = 1".encode("utf-16"), "empty": "",
}.items():  # fmt: skip
    content = content if isinstance(content, bytes) else content.encode()
    case(f"gin: {name}", "safetensors", "a.gin", lambda p, content=content: p.write_bytes(content), read="train",
         names="TrainConfig" if name == "empty" else None)  # fmt: skip
for kind in ("pipe", "folder", "socket", "circle of links"):
    case(f"gin: {kind}", "safetensors", "a.gin", OTHERS[kind], read="train")
LINE = b"one\n" + b"a " * 15_000_000 + b"\ntwo\n"
for file, content in {"lines.txt": LINE, "lines.txt.gz": gzip.compress(LINE, 1), "bomb.txt.gz": gzip.compress(bytes(3 * 10**8), 1)}.items():
    case(f"{file}: a line of megabytes", "json", file, lambda p, content=content: p.write_bytes(content), read="generate", names=f"{file}, line")
case("a sentence of 1,100,000 letters", "json", "long.txt", lambda p: p.write_text("a" * 1_100_000), read="generate", names="sentence 1")


# Reading them.


def write_bases(folder: pathlib.Path) -> None:
    """One small sound folder of each kind."""
    from specdec_jax.drafters.ngrams import NGramTable
    from specdec_jax.formats import own
    from specdec_jax.models.heads import HeadsConfig

    for name in ("safetensors", "shards", "flax", "legacy", "orbax", "own"):
        make.FORMATS[name](folder / name)
    wide = make.TINY.__class__(**{**make.TINY.__dict__, "vocab_size": 328})
    tensors = make.to_tensors(make.random_params(wide))
    for name, files in (("text", ("spiece.model", "tokenizer_config.json")), ("json", ("tokenizer.json",))):
        make.write_hf(folder / name, tensors, vocab_size=328)
        (folder / name / "generation_config.json").write_text("{}")
        for file in files:
            shutil.copy(TOKENIZER / file, folder / name)
    config = HeadsConfig(2, 16, 40, 1, True)
    params = {name: np.zeros(shape, np.float32) for name, shape in config.parameter_shapes.items()}
    own.write_heads(config, "x", make.unflatten(params), folder / "heads")
    (folder / "table").mkdir()
    NGramTable.count([[3, 4, 5], [3, 4]], 8, 2).save(folder / "table" / "table.npz")


@functools.cache
def target():
    return make.model_of()


def read(how: str, folder: pathlib.Path) -> None:
    """Reads what lies in the folder; the command line writes its one line to standard error and gives a code."""
    import specdec_jax as sd
    from specdec_jax import cli

    if how == "load":
        sd.load(folder, "float32")
    elif how == "heads":
        sd.HeadsDrafter.load(folder, target())
    elif how == "table":
        sd.NGramDrafter.load(folder / "table.npz")
    else:
        argv = {
            "figures": ["--records=record.json", "--output=out.html"],
            "train": ["--gin_file=a.gin"],
            "generate": ["--target=.", "--dtype=float32", *(f"--input_file={p.name}" for p in folder.glob("*.txt*"))],
        }[how]
        error = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stderr(error):
            code = cli.main([how, *argv, "--compilation_cache_dir="])
        if code == 2:
            raise ValueError(error.getvalue().removesuffix("\n"))


def high_water() -> int:
    """The most memory that the process has had since the last call, in bytes; where Linux does not tell, since its start."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
        most = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        return most
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(name: str, folder: pathlib.Path) -> dict:
    """What came of one case: the error's type and text, seconds, bytes, and what a library wrote to standard error."""
    of, path = CASES[name], folder / "model"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder / "bases" / of.base, path)
    of.damage(path)
    high_water()
    before = high_water()
    start, found = time.perf_counter(), {"error": None, "text": ""}
    with open(folder / "stderr", "w+b") as written:
        kept = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            read(of.read, path)
        except BaseException as error:
            found = {"error": type(error).__name__, "text": str(error)}
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    seconds, grown = time.perf_counter() - start, high_water() - before
    return found | {"seconds": seconds, "bytes": grown, "stderr": (folder / "stderr").read_text(errors="replace")}


def main(folder: pathlib.Path) -> None:
    """Reads the cases whose names come on standard input, a line of JSON for each."""
    names = sys.stdin.read().splitlines()
    if not (folder / "bases").exists():
        write_bases(folder / "bases")
    target()
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
    for name in names:
        print(json.dumps({"case": name, **attempt(name, folder)}), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
