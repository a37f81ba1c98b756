"""Bad checkpoints are rejected in one line (got, expected) before anything compiles."""

import json
import os
import shutil
import struct
import types

import flax.serialization
import make_checkpoints as make
import numpy as np
import pytest
from golden_models import GOLDEN
from make_checkpoints import FORMATS, PARAMS, TENSORS, TINY

from specdec_jax.checkpoints import loader, memory
from specdec_jax.checkpoints import weights as checkpoints_weights
from specdec_jax.files import reading
from specdec_jax.models import parameters
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import PRESETS

SPIECE = GOLDEN / "hf_tokenizer" / "spiece.model"


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def truncate(path, size=None):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2 if size is None else size)


def edit_config(folder, **options):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def without(name):
    return {key: x for key, x in TENSORS.items() if key != name}


def reshaped(name):
    return TENSORS | {name: np.zeros((3, 5), np.float32)}


def damage_header(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10) + b"x" * 10 + content[18:])


def truncate_database(folder):
    """Cuts every data file of an OCDBT database.

    Which of them the merged database still refers to varies.
    """
    for path in folder.rglob("d/*"):
        truncate(path)


LEGACY, STATE = "checkpoint_7/checkpoint", "checkpoint_7/state"
ARRAY = "checkpoint_7/target.encoder.layers_1.mlp.wo.kernel"
WO = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
BAD = {
    # what: (format or tensors, what is done to the folder, what the line says)
    "no path": (
        "safetensors",
        lambda p: remove(p),
        "got no such path, expected a checkpoint folder",
    ),
    "a file": (
        "safetensors",
        lambda p: (remove(p), p.write_text("")),
        "got a file, expected a checkpoint folder",
    ),
    "empty folder": (
        "safetensors",
        lambda p: (remove(p), p.mkdir()),
        "got a folder of no known format, expected",
    ),
    "no config": (
        "safetensors",
        lambda p: remove(p / "config.json"),
        "got no config.json, expected",
    ),
    "broken config": (
        "safetensors",
        lambda p: truncate(p / "config.json"),
        "got no readable JSON .*, expected",
    ),
    "config is a list": (
        "safetensors",
        lambda p: (p / "config.json").write_text("[]"),
        "got list, expected an object",
    ),
    "no weights": (
        "safetensors",
        lambda p: remove(p / "model.safetensors"),
        "got no weights, expected model.safetensors",
    ),
    "pytorch": (
        "safetensors",
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "got no readable PyTorch file",
    ),
    "umt5": (
        "safetensors",
        lambda p: edit_config(p, model_type="umt5"),
        "unknown architecture: got model_type 'umt5'",
    ),
    "bert": (
        "safetensors",
        lambda p: edit_config(p, model_type="bert", architectures=["BertModel"]),
        "expected t5 with T5ForConditionalGeneration or",
    ),
    "encoder only": (
        "safetensors",
        lambda p: edit_config(p, architectures=["T5EncoderModel"]),
        "got .*T5EncoderModel",
    ),
    "no width": (
        "safetensors",
        lambda p: edit_config(p, d_model=None),
        "d_model: got None, expected an integer",
    ),
    "exact gelu": (
        "safetensors",
        lambda p: edit_config(p, feed_forward_proj="gelu"),
        "feed_forward_proj: got 'gelu'",
    ),
    "epsilon": (
        "safetensors",
        lambda p: edit_config(p, layer_norm_epsilon=1e-5),
        "layer_norm_epsilon: got 1e-05",
    ),
    "no heads": (
        "safetensors",
        lambda p: edit_config(p, num_heads=0),
        "num_heads: got 0, expected at least 1",
    ),
    "other layers": (
        "safetensors",
        lambda p: edit_config(p, num_layers=3),
        "parameter encoder/layers_2/.*: got none, expected one of shape",
    ),
    "fewer layers": (
        "safetensors",
        lambda p: edit_config(p, num_layers=1),
        "got unexpected parameter encoder.block.1.layer.*, expected only",
    ),
    "tensor missing": (
        without(WO),
        None,
        r"parameter encoder/layers_1/mlp/wo/kernel: got none, expected .*\(24, 16\)",
    ),
    "wrong shape": (
        reshaped(WO),
        None,
        r"encoder/layers_1/mlp/wo/kernel: got shape \(5, 3\), expected \(24, 16\)",
    ),
    "tensor too many": (
        TENSORS | {"adapter": np.zeros(2)},
        None,
        "got unexpected parameter adapter, expected only",
    ),
    "integers": (
        TENSORS | {WO: np.zeros((16, 24), np.int32)},
        None,
        "got dtype I32, expected one of",
    ),
    "truncated": (
        "safetensors",
        lambda p: truncate(p / "model.safetensors"),
        "got .*file not fully covered.*, expected",
    ),
    "truncated header": (
        "safetensors",
        lambda p: truncate(p / "model.safetensors", 100),
        "got a header of .*, expected",
    ),
    "empty weights": (
        "safetensors",
        lambda p: truncate(p / "model.safetensors", 0),
        "got .*header too small.*, expected",
    ),
    "damaged header": ("safetensors", damage_header, "got .*invalid JSON in header.*, expected"),
    "shard missing": (
        "shards",
        lambda p: remove(p / "model-00002-of-00003.safetensors"),
        "model-00002-of-00003.safetensors: got no such file, expected",
    ),
    "shard swapped": (
        "shards",
        lambda p: shutil.copy(
            p / "model-00001-of-00003.safetensors", p / "model-00002-of-00003.safetensors"
        ),
        "got no tensor .*, expected",
    ),
    "broken index": (
        "shards",
        lambda p: truncate(p / "model.safetensors.index.json"),
        "index.json: got no readable JSON",
    ),
    "flax truncated": (
        "flax",
        lambda p: truncate(p / "flax_model.msgpack"),
        "got no readable msgpack",
    ),
    "flax end cut": (
        "flax",
        lambda p: truncate(p / "flax_model.msgpack", (p / "flax_model.msgpack").stat().st_size - 3),
        "got no readable msgpack",
    ),
    "flax empty": (
        "flax",
        lambda p: truncate(p / "flax_model.msgpack", 0),
        "got no readable msgpack",
    ),
    "legacy truncated": ("legacy", lambda p: truncate(p / LEGACY), "got no readable msgpack"),
    "legacy empty": ("legacy", lambda p: truncate(p / LEGACY, 0), "got no readable msgpack"),
    "array missing": (
        "legacy",
        lambda p: remove(p / ARRAY),
        "parameter encoder/layers_1/mlp/wo/kernel: got .*NOT_FOUND",
    ),
    "chunk missing": (
        "legacy",
        lambda p: remove(p / ARRAY / "1.0"),
        r"mlp/wo/kernel: got .*missing, expected float32",
    ),
    "chunk truncated": (
        "legacy",
        lambda p: truncate(p / ARRAY / "1.0"),
        "mlp/wo/kernel: got .*, expected float32",
    ),
    "version": (
        "legacy",
        lambda p: (p / LEGACY).write_bytes(
            flax.serialization.msgpack_serialize({"version": 1, "optimizer": {}})
        ),
        "got checkpoint version 1, expected 3",
    ),
    "no target": (
        "legacy",
        lambda p: (p / LEGACY).write_bytes(
            flax.serialization.msgpack_serialize({"version": 3, "optimizer": {}})
        ),
        "got no 'target', expected",
    ),
    "no structure": (
        "orbax",
        lambda p: remove(p / STATE / "_METADATA"),
        "got no _METADATA, expected",
    ),
    "broken structure": (
        "orbax",
        lambda p: truncate(p / STATE / "_METADATA"),
        "_METADATA: got no readable JSON",
    ),
    "no manifest": (
        "orbax",
        lambda p: remove(p / STATE / "manifest.ocdbt"),
        "parameter .*: got .*, expected",
    ),
    "database cut": (
        "orbax",
        lambda p: truncate_database(p / STATE),
        "parameter .*: got .*, expected",
    ),
    "own version": ("own", lambda p: edit_config(p, version=2), "got version 2, expected 1"),
    "own fields": (
        "own",
        lambda p: edit_config(p, model={"layers": 3}),
        "got 'layers', expected a configuration of vocab_size",
    ),
    "own vocabulary": (
        "own",
        lambda p: edit_config(p, vocabulary={"kind": "sentencepiece", "file": "spiece.model"}),
        "got no vocabulary spiece.model, expected it there or in the folder above",
    ),
    "own params": ("own", lambda p: remove(p / "params"), "got no _METADATA, expected"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_rejected_in_one_line(case, tmp_path, monkeypatch):
    source, damage, message = BAD[case]
    path = tmp_path / "model"
    make.write_hf(path, source) if isinstance(source, dict) else FORMATS[source](path)
    if damage:
        damage(path)
    compiled = []
    monkeypatch.setattr(
        LanguageModel, "__init__", lambda self, *args, **kwargs: compiled.append(args)
    )
    with pytest.raises(ValueError, match=message) as error:
        loader.load(path, "float32")
    assert (
        "\n" not in str(error.value)
        and "got" in str(error.value)
        and "expected" in str(error.value)
    )
    assert not compiled


@pytest.mark.parametrize(
    "name, hint",
    [
        ("google/flan-t5-small", "hf download google/flan-t5-small --local-dir flan-t5-small"),
        ("folder/of/mine", "bundled name"),
    ],
)
def test_the_error_of_a_hub_name_shows_how_to_download_it(name, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="got no such path, expected a checkpoint folder or a bundled name"
    ) as error:
        loader.load(name, "float32")
    assert hint in str(error.value) and ("hf download" in str(error.value)) == (
        name == "google/flan-t5-small"
    )


def test_paths_that_the_system_does_not_take_are_errors_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="got File name too long, expected a checkpoint folder"):
        loader.load("x" * 300, "float32")
    folder = make.write_hf(tmp_path, TENSORS)
    readable = os.access
    monkeypatch.setattr(
        os, "access", lambda path, how: "safetensors" not in str(path) and readable(path, how)
    )
    with pytest.raises(ValueError, match="safetensors: got a file that may not be read, expected"):
        loader.load(folder, "float32")


def test_the_error_of_an_unknown_architecture_lists_the_known_ones(tmp_path):
    make.write_hf(tmp_path, TENSORS, model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(
        ValueError, match="config.json: unknown architecture: got model_type 'llama'"
    ) as error:
        loader.load(tmp_path, "float32")
    for known in (
        "t5",
        "mt5",
        "gpt2",
        "T5ForConditionalGeneration",
        "MT5ForConditionalGeneration",
        "GPT2LMHeadModel",
    ):
        assert f" {known}" in str(error.value)


def test_tables_that_differ_are_rejected_where_the_configuration_has_one(tmp_path):
    make.write_t5x_orbax(tmp_path / "checkpoint_7", make.stack_layers(PARAMS, tables="different"))
    with pytest.raises(
        ValueError,
        match=r"relpos_bias.*: got a relative position table of its own .*, expected one",
    ):
        loader.load(tmp_path, "float32", config=TINY)


def test_a_vocabulary_wider_than_the_logits_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "read_params", lambda *args: pytest.fail("read"))
    make.write_t5x_legacy(tmp_path / "checkpoint_7", PARAMS)
    with pytest.raises(ValueError, match="got 200 pieces, expected at most the 40 logits"):
        loader.load(tmp_path, "float32", vocabulary=SPIECE)


@pytest.mark.parametrize("ids", [dict(eos_token_id=[1, 40]), dict(decoder_start_token_id=-1)])
def test_special_ids_that_the_model_lacks_are_rejected(ids, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "read_params", lambda *args: pytest.fail("read"))
    make.write_hf(tmp_path, TENSORS, **ids)
    with pytest.raises(
        ValueError, match=r"special id: got (40|-1), expected an id of the vocabulary of 40"
    ):
        loader.load(tmp_path, "float32")


def test_what_does_not_fit_is_rejected_before_anything_is_read(tmp_path, monkeypatch):
    make.write_hf(tmp_path, TENSORS)
    monkeypatch.setattr(loader, "read_params", lambda *args: pytest.fail("read"))
    monkeypatch.setattr(memory, "available_bytes", lambda: 20_000)
    with pytest.raises(
        ValueError,
        match=r"got 0.00 GB of free memory, expected at least .* for [\d,]+ parameters in float32",
    ):
        loader.load(tmp_path, "float32")


def test_memory_estimates():
    xxl = PRESETS["t5_1_1/xxl"]
    assert parameters.parameter_count(xxl) == 11_135_332_352
    weights = 2 * parameters.parameter_count(xxl)
    assert weights < checkpoints_weights.required_bytes(xxl, "bfloat16") < 1.2 * weights
    assert memory.available_bytes() > 10**8


GB = 10**9
STAT = "anon 1\n{0}inactive_file 1000000000\n{0}active_file 500000000\n{0}inactive_anon 7\n"
GROUPS = {
    # /proc/self/cgroup -> (what lies in the cgroups' folder, what is free)
    "v2 in a container": ("0::/", {"memory.max": 8 * GB, "memory.current": 6 * GB}, 2 * GB),
    "v2 with cached pages": (
        "0::/",
        {"memory.max": 8 * GB, "memory.current": 6 * GB, "memory.stat": STAT.format("")},
        3.5 * GB,
    ),
    "v2 service": (
        "0::/a/b",
        {
            "a/memory.max": 5 * GB,
            "a/memory.current": GB,
            "a/b/memory.max": "max",
            "a/b/memory.current": GB,
        },
        4 * GB,
    ),
    "v2 no limit": ("0::/", {"memory.max": "max", "memory.current": GB}, 32 * GB),
    "v2 more than there is": ("0::/", {"memory.max": 99 * GB, "memory.current": GB}, 32 * GB),
    "v1": (
        "3:cpuset:/x\n4:cpu,memory:/host/path\n0::/",
        {
            "memory/memory.limit_in_bytes": 4 * GB,
            "memory/memory.usage_in_bytes": 2 * GB,
            "memory/memory.stat": STAT.format("total_"),
        },
        3.5 * GB,
    ),
    "v1 no limit": (
        "4:memory:/",
        {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": GB},
        32 * GB,
    ),
    "none": (None, {}, 32 * GB),
}


@pytest.mark.parametrize("case", GROUPS)
def test_memory_within_a_container(case, tmp_path, monkeypatch):
    groups, files, expected = GROUPS[case]
    for name, path in (
        ("CGROUPS", "cgroup"),
        ("CGROUPS_OF_PROCESS", "groups"),
        ("MEMORY", "meminfo"),
    ):
        monkeypatch.setattr(memory, name, tmp_path / path)
    (tmp_path / "meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable:   31250000 kB\n")
    if groups is not None:
        (tmp_path / "groups").write_text(groups + "\n")
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n" if isinstance(content, int) else content)
    assert memory.available_bytes() == expected
    (tmp_path / "meminfo").unlink()
    assert (memory.available_bytes() is None) == (case in ("v2 no limit", "none"))


def test_loading_where_the_c_library_cannot_be_opened_by_no_name(tmp_path, monkeypatch):
    """As on Windows."""
    monkeypatch.setattr(memory, "os", types.SimpleNamespace(name="nt"))
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: pytest.fail("opened"))
    with memory.return_freed_memory():
        pass


@pytest.mark.parametrize("dtype", ["float16", "int32", "nonsense"])
def test_other_dtypes_are_rejected(dtype, tmp_path):
    make.write_hf(tmp_path, TENSORS)
    with pytest.raises(ValueError, match=f"dtype: got {dtype}, expected float32 or bfloat16"):
        loader.load(tmp_path, dtype)


def test_a_state_of_many_processes_is_a_checkpoints(tmp_path):
    """Orbax makes two folders for each; but not without end, nor in circles."""
    for process in range(1200):
        (tmp_path / f"ocdbt.process_{process}" / "d").mkdir(parents=True)
    reading.check_folder(tmp_path)
    (tmp_path / "ocdbt.process_7" / "d" / "again").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="got folders nested too deeply or in a circle"):
        reading.check_folder(tmp_path)
