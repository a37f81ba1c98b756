"""Lists hostile files: a sound folder, the damage done to it, and what the message must name.

The cases here replace whole files by something else or change settings; those of
`hostile_formats.py` and `hostile_pytorch.py` damage each format; `hostile_table.py` has all.
"""

import contextlib
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Callable
from typing import NamedTuple

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


def case(
    name: str,
    base: str,
    file: str,
    damage: Callable[[pathlib.Path], object],
    read: str = "load",
    names=None,
) -> None:
    """Adds a case; `damage` gets the path of `file`.

    The message must name the file, unless `names` gives something else.
    """
    assert name not in CASES, name
    CASES[name] = Case(
        base, lambda folder: damage(folder / file), names or pathlib.Path(file).name, read
    )


# What can lie in the place of any file.


def replaced(make_other) -> Callable[[pathlib.Path], None]:
    def damage(path):
        if path.exists():
            path.unlink()
        make_other(path)

    return damage


def make_socket(path):
    with (
        contextlib.chdir(path.parent),
        socket.socket(socket.AF_UNIX) as other,
    ):  # a socket's path must be short
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
        if (
            kind.split()[-1] not in without.split()
        ):  # what is not there may be missing; what is no link's target too
            named = (
                "params" if "ocdbt" in file and kind not in ("pipe", "folder", "socket") else None
            )
            case(f"{pathlib.Path(file).name}: {kind}", base, file, damage, names=named)
for kind in ("pipe", "folder", "socket", "circle of links"):
    case(f"checkpoint: {kind}", "legacy", LEGACY, OTHERS[kind], names="model")
for kind in ("empty", "gigabyte of nothing", "NUL bytes", "nested", "half"):
    case(f"checkpoint: {kind}", "legacy", LEGACY, OTHERS[kind])
for kind in ("folder", "gigabyte of nothing", "circle of links", "nested"):
    case(f".zarray: {kind}", "legacy", f"{ARRAY}/.zarray", OTHERS[kind], names="checkpoint_7")
for place, base in ((f"{ARRAY}/x", "legacy"), ("params/d/x", "own"), (f"{STATE}/x", "orbax")):
    case(
        f"a link to the folder that it is in: {base}",
        base,
        place,
        lambda path: path.symlink_to(path.parent),
    )
    case(f"a pipe among the data: {base}", base, place, os.mkfifo)
for kind in ("pipe", "socket", "empty", "half"):
    case(f"zarr chunk: {kind}", "legacy", f"{ARRAY}/0.0", OTHERS[kind], names="checkpoint_7")
    case(f"own config.json: {kind}", "own", "config.json", OTHERS[kind])


def beside_merges(damage):
    """Returns damage to GPT-2's vocab.json, which is read only with a merges.txt beside it."""
    return lambda path: (
        path.with_name("merges.txt").write_text("#version: 0.2\na b\n"),
        path.write_text("{}"),
        damage(path),
    )


for kind in (
    list(OTHERS)[:3] + list(OTHERS)[4:-1]
):  # without merges' vocab.json, or half of it, another is read
    case(f"vocab.json: {kind}", "text", "vocab.json", beside_merges(OTHERS[kind]))
for text in (
    '{"a": -1}',
    '{"a": "x"}',
    '{"a": 99999999999}',
    "[]",
    '{"a": 0, "b": 1, "ab": 4000000000}',
    '{"a": 0}',
):
    damage = beside_merges(lambda path, text=text: path.write_text(text))
    case(f"vocab.json: {text}", "text", "vocab.json", damage)


# Settings.


def edited(**options) -> Callable[[pathlib.Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | options))


def settings(
    base: str, file: str, values: dict[str, tuple], names=None, read="load", inner=None
) -> None:
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
COUNTS = (
    "vocab_size",
    "d_model",
    "num_heads",
    "d_kv",
    "num_layers",
    "num_decoder_layers",
    "d_ff",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
)
settings("safetensors", "config.json", dict.fromkeys(COUNTS, NUMBERS))
settings(
    "safetensors",
    "config.json",
    {
        "num_layers": (10**9, [2]),
        "feed_forward_proj": ([], {}, 5),
        "architectures": (5, "x", [[]], {"a": 1}, [DEEP[:500]]),
        "model_type": ([], None, "llama", 7),
        "eos_token_id": ("x", 1.5, True, [1, "x"], {"a": 1}, [[1]]),
        "decoder_start_token_id": ("x", [1, 2], True, 1.5),
        "layer_norm_epsilon": ("x", []),
        "tie_word_embeddings": ("x", 5),
    },
)
settings(
    "safetensors",
    "config.json",
    {"eos_token_id": (10**20,), "decoder_start_token_id": (40,)},
    names="model",
)
for name in ("n_embd", "n_head", "n_layer", "n_inner", "n_positions", "vocab_size"):
    for value in NUMBERS:
        changes = {
            "model_type": "gpt2",
            "architectures": [],
            "layer_norm_epsilon": 1e-5,
            name: value,
        }
        case(f"gpt2: {name} = {value}", "safetensors", "config.json", edited(**changes))
for name, value in {
    "activation_function": [],
    "scale_attn_weights": 5,
    "tie_word_embeddings": "x",
}.items():
    case(
        f"gpt2: {name} = {value}",
        "safetensors",
        "config.json",
        edited(model_type="gpt2", architectures=[], layer_norm_epsilon=1e-5, **{name: value}),
    )
BART_FIELDS = (
    "d_model",
    "encoder_attention_heads",
    "decoder_ffn_dim",
    "encoder_layers",
    "max_position_embeddings",
    "vocab_size",
    "pad_token_id",
    "scale_embedding",
    "activation_function",
    "share_encoder_decoder_embeddings",
)
for kind in ("marian", "bart", "mbart", "pegasus", "m2m_100"):
    # One reader reads them all, so the others than Marian are given few values.
    values = (*NUMBERS[:4], [], {}) if kind == "marian" else (-1, [])
    for name in BART_FIELDS:
        for value in values:
            changes = {"model_type": kind, "architectures": [], name: value}
            case(f"{kind}: {name} = {value}", "safetensors", "config.json", edited(**changes))
for name in (
    "hidden_size",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "query_pre_attn_scalar",
    "sliding_window",
    "layer_types",
    "attn_logit_softcapping",
    "hidden_activation",
    "rope_parameters",
    "rope_theta",
):
    for value in (*NUMBERS[:4], [], {}, [[]], {"rope_type": []}):
        numbers = "query_pre_attn_scalar", "rope_theta", "attn_logit_softcapping"
        is_empty = name == "rope_parameters" and value in ({}, [])
        if not is_empty and (name not in numbers or value != 1.5):  # which are sound
            changes = {"model_type": "gemma2", "architectures": [], name: value}
            case(f"gemma2: {name} = {value}", "safetensors", "config.json", edited(**changes))
GEMMA_3_VALUES = {
    "hidden_size": (10**10, -1, []),
    "num_hidden_layers": (10**10, -1, {}),
    "sliding_window": (-1, "x"),
    "sliding_window_pattern": (0, 10**10, []),
    "layer_types": (5, [[]]),
    "rope_parameters": (5, {"full_attention": 5}, {"sliding_attention": {"rope_type": []}}),
    "rope_scaling": (5, {"rope_type": "yarn"}),
    "rope_local_base_freq": (-1, "x"),
    "image_token_id": (-1, "x", [], 1.5),
}
for name, values in GEMMA_3_VALUES.items():
    for value in values:
        changes = {"model_type": "gemma3_text", "architectures": [], name: value}
        case(f"gemma3_text: {name} = {value}", "safetensors", "config.json", edited(**changes))
for value in (5, [], {"hidden_size": -1}, {"layer_types": [[]]}, {"rope_scaling": 5}):
    changes = {"model_type": "gemma3", "architectures": [], "text_config": value}
    case(f"gemma3: text_config = {value}", "safetensors", "config.json", edited(**changes))
for kind, values in {
    "t5gemma": (5, [], {"head_dim": []}, {"hidden_size": -1}, {"layer_types": [[]]}),
    "t5gemma2": (5, [], {"text_config": 5}, {"text_config": {"hidden_size": -1}}),
}.items():
    for value in values:
        changes = {"model_type": kind, "architectures": [], "encoder": value}
        case(f"{kind}: encoder = {value}", "safetensors", "config.json", edited(**changes))
settings(
    "text",
    "generation_config.json",
    {"eos_token_id": ("x", True), "decoder_start_token_id": ("x",)},
)
settings(
    "text",
    "tokenizer_config.json",
    {
        "extra_ids": (10**10, -1, "x", 1.5, True),
        "added_tokens_decoder": (5, {"x": {"content": "a"}}, {"9": 5}, {"9": {}}),
        "extra_special_tokens": (5, [5], [{}], [[]], {"a": 1}),
    },
)
settings(
    "own",
    "config.json",
    dict.fromkeys(
        (
            "vocab_size",
            "emb_dim",
            "num_heads",
            "head_dim",
            "num_encoder_layers",
            "num_decoder_layers",
            "mlp_dim",
        ),
        NUMBERS[:3],
    )
    | {
        "mlp_activations": (5, "gelu", ["x"], [["gelu"]], ["gelu"] * 3),
        "dtype": (5, "x", "object"),
        "dropout_rate": ("x", -1, 2),
        "logits_via_embedding": (5, "x"),
        "encoder_dim": (-1, "x"),
        "max_distance": (1,),
        "unheard_of": (1,),
    },
    inner="model",
)
settings(
    "own",
    "config.json",
    {
        "model": (5, [], None),
        "architecture": (5, "bert", []),
        "eos_ids": (5, "ab"),
        "version": (2, "x", [1]),
        "vocabulary": (
            5,
            [],
            {"kind": "x"},
            {"kind": []},
            {"kind": "bytes", "extra_ids": 10**10},
            {"kind": "sentencepiece", "file": "../../spiece.model"},
            {"kind": "tokenizer_json", "file": "/etc/passwd"},
            {"kind": "sentencepiece", "file": 5},
            {"kind": "sentencepiece", "file": "a\0b"},
        ),
        "encoder_fingerprint": (5,),
    },
)
settings(
    "own", "config.json", {"eos_ids": (["x"], [True]), "start_token": ("x", 1.5)}, names="model"
)
GPT = {"vocab_size": 9, "emb_dim": 4, "num_heads": 1, "num_decoder_layers": 1, "mlp_dim": 4}
DECLARED = {
    "format": "specdec_jax",
    "version": 1,
    "kind": "t5x",
    "architecture": "gpt",
    "model": GPT,
    "eos_ids": [1],
    "vocabulary": None,
}
case(
    "T5X: declared as a GPT",
    "legacy",
    "checkpoint_7/config.json",
    lambda path: path.write_text(json.dumps(DECLARED)),
)
settings(
    "heads",
    "config.json",
    {
        "num_heads": (10**9, "x", 0),
        "num_blocks": (10**9, -1),
        "vocab_size": ("x",),
        "share_head": (5,),
        "dtype": (7,),
    },
    inner="heads",
    read="heads",
)
settings("heads", "config.json", {"heads": (5, {}), "target_fingerprint": (5, None)}, read="heads")
case(
    "config.json: a key twice",
    "safetensors",
    "config.json",
    lambda p: p.write_text(p.read_text()[:-1] + ', "d_ff": 24}'),
)
case(
    "config.json: a million lists",
    "safetensors",
    "config.json",
    lambda p: p.write_text('{"a": [' + "[]," * 3_000_000 + "1]}"),
)
case(
    "config.json: byte-order mark",
    "safetensors",
    "config.json",
    lambda p: p.write_bytes(b"\xef\xbb\xbf" + p.read_bytes()),
)
case(
    "config.json: a number of 10,000 digits",
    "safetensors",
    "config.json",
    lambda p: p.write_text('{"d_ff": ' + "9" * 10_000 + "}"),
)
case("no path", "safetensors", "config.json", lambda p: shutil.rmtree(p.parent), names="model")
