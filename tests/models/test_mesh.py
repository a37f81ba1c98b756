"""Models on a mesh of devices have the same tokens, and are restored in parts."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from make_checkpoints import TINY, random_params, to_tensors, write_hf
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends import sharding
from specdec_jax.backends.sharding import AXES, RULES, ShardingRules
from specdec_jax.checkpoints import loader, weights
from specdec_jax.commands import main
from specdec_jax.models import parameters
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.gpt import GPTConfig

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
WIDTH, INNER, HIDDEN, V, H = 16, 16, 32, 64, 4


def start(*arguments) -> subprocess.Popen:
    path = os.pathsep.join(
        [str(SUPPORT.parents[1]), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "mesh_run.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def result(process: subprocess.Popen) -> dict:
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()  # one that waits for a lost mate, say
    assert process.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of four heads, and one like it that drafts."""
    place = tmp_path_factory.mktemp("mesh")
    target = noisy_copy(
        tiny_t5(0, V, 1, num_heads=H, head_dim=INNER // H), 2.0
    )  # else it repeats itself
    sd.save(target, place / "target")
    sd.save(noisy_copy(target, 0.1, 1), place / "drafter")
    return place


@pytest.fixture(scope="module")
def runs(folder):
    """Two times two devices."""
    return result(start(folder, "2x2"))


@pytest.fixture(scope="module")
def others(folder):
    """One device, other meshes, and tables for every layer."""
    return result(start(folder, "meshes"))


@pytest.mark.slow
def test_tokens_are_those_of_one_device(runs, others):
    """Rows of argmax and drawn ones, with a drafter."""
    alone = others["none"]
    assert runs["2x2"] == alone
    assert 0 < alone["accepted"] < alone["drafted"], "some drafts must be accepted, and some not"


@pytest.mark.slow
def test_tokens_of_programs_without_a_distribution(others):
    """Rows of argmax alone, with a drafter and without."""
    for name in ("1x4, argmax", "1x1, plain, argmax"):
        assert others[name]["tokens"][:2] == others["none"]["tokens"][:2]
    assert others["1x4, argmax"]["tokens"] == others["1x1, plain, argmax"]["tokens"]


@pytest.mark.slow
def test_the_rest_of_the_table(folder):
    """Drawn rows on every mesh, autoregressive decoding, refilled rows, GPT, the command line.

    Also drafters that learn while they decode: a history, token recycling.
    """
    found = result(start(folder, "more"))
    for mesh in ("1x1", "1x4"):
        assert found[mesh] == found["none"]
    for mesh in ("1x1", "2x2", "1x4"):
        assert found[mesh + ", plain"] == found["none, plain"]
    rows = [row[:limit] for row, limit in zip(found["none"]["tokens"], (8, 5, 8, 6), strict=True)]
    assert found["2x2, refilled"] == [rows[row] for row in (0, 1, 2, 3, 1, 2)]
    assert len(found["2x2, remembered"]) == 5
    for name, tokens in found["2x2, remembered"].items():
        assert tokens == found["none, coupled"], name
    assert found["command"][0] == found["command"][1] and len(found["command"][0].splitlines()) == 5
    assert (
        found["benchmark"]["options"]["mesh"] == "1x2"
        and found["benchmark"]["speculative"][0]["tokens"] > 4
    )
    assert found["gpt"] < 1e-5 and found["gpt tokens"][0] == found["gpt tokens"][1]


@pytest.mark.slow
def test_encoders_that_lie_in_different_ways_are_shared(folder):
    """Each model keeps its arrays where the mesh divides the target's."""
    found = result(start(folder, "encoders"))
    assert found["of 2x1"] == [True, True, False] and found["of 2x2"] == [True, False, False]
    assert found["2x1"] == found["2x2"] == found["none"]
    assert 0 < found["none"]["accepted"] < found["none"]["drafted"]


@pytest.mark.slow
def test_a_table_for_every_layer_is_divided(others):
    alone, divided = others["tables"]["tokens"]
    assert alone == divided and others["tables"]["part"] == [2, 32]


@pytest.mark.slow
def test_nothing_compiles_twice(runs):
    assert runs["compiled again"] == 0


def assert_parts(found: dict, parts: int) -> None:
    """Asserts that a model is the stored one, in so many parts."""
    assert found["same weights"]
    shapes = {
        "token_embedder/embedding": [V // parts, WIDTH],
        "encoder/layers_0/attention/value/kernel": [WIDTH, INNER // parts],
        "decoder/layers_0/self_attention/query/kernel": [WIDTH, INNER // parts],
        "decoder/layers_0/encoder_decoder_attention/out/kernel": [INNER // parts, WIDTH],
        "decoder/layers_0/mlp/wi_1/kernel": [WIDTH, HIDDEN // parts],
        "decoder/layers_0/mlp/wo/kernel": [HIDDEN // parts, WIDTH],
        "decoder/logits_dense/kernel": [WIDTH, V // parts],
        "decoder/relpos_bias/rel_embedding": [H // parts, 32],
        "decoder/decoder_norm/scale": [WIDTH],
    }
    assert {name: found["parts"][name] for name in shapes} == shapes


WO = "decoder/layers_0/mlp/wo/kernel"


def test_parameters_are_restored_into_parts(runs):
    assert_parts(runs["of 2x2"], 2)
    assert runs["identity"][0] == runs["identity"][1]
    assert runs["of 2x2"]["drafter parts"][WO] == [HIDDEN, WIDTH], "whole on every device"


@pytest.mark.slow
def test_parameters_are_restored_into_other_parts(others):
    assert_parts(others["of 1x1"], 1)
    assert_parts(others["of 1x4"], 4)
    assert all(found == others["identity"][0] for found in others["identity"])
    assert others["of 1x4"]["drafter parts"][WO] == [HIDDEN // 4, WIDTH], "divided, as asked for"


def test_caches_are_divided_and_rows_are_on_every_device(runs):
    (rows, heads, slots, features), part = runs["cache"]
    assert (rows, heads) == (4, H) and part == [rows // 2, heads // 2, slots, features]
    whole, part = runs["drafter's cache"]
    assert part == [whole[0] // 2, *whole[1:]]
    assert runs["on every device"]


def test_what_does_not_fit_is_rejected(runs):
    expected = [
        "mesh: got 2x4 devices, expected 1 to 4, which there are",
        "mesh: got 3 devices on the model axis for num_heads = 4, expected a divisor of it",
        "inputs: got 3 rows, expected a multiple of the mesh's data axis, 2",
        "batch_size: got 3 rows, expected a multiple",
        "drafter: got a model on the mesh none, expected the target's, 2x2",
        "batch_size: got 5 rows, expected a multiple",
        "mesh: got 3 devices on the model axis for num_heads = 4",
        "shard_drafter: got True, expected a drafter that is a model",
    ]
    assert len(runs["rejected"]) == len(expected)
    for got, message in zip(runs["rejected"], expected, strict=True):
        assert got.startswith(message) and "\n" not in got


@pytest.mark.slow
def test_two_processes(folder, runs, others):
    """Two processes read one part each, and both have the outputs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [start(folder, "process", number, port) for number in (0, 1)]
    try:
        results = [result(process) for process in both]
    finally:
        for process in both:
            process.kill()
    for found in results:
        assert found["tokens"] == others["none"]["tokens"] and found["processes"] == 2
        assert found["kernel"] == [[HIDDEN, WIDTH], [[HIDDEN // 2, WIDTH]]]
        assert found["largest read"] == V * WIDTH // 2
        assert found["identity"] == runs["identity"][0]
        assert found["rejected"].startswith("deadline: got one for several processes")


# --- In this process, with one device ---


def rules(parts: int, replicate: bool = False) -> ShardingRules:
    """Of a mesh that one device stands in for; nothing can be put on it."""
    return ShardingRules(
        Mesh(np.array(jax.devices()[:1] * 2 * parts).reshape(2, parts), AXES), replicate
    )


def test_parameters_follow_the_rules_of_their_logical_axes():
    def get_spec(name, *shape):
        return tuple(rules(4).parameter_sharding(name, shape).spec)

    assert get_spec("decoder/layers_0/self_attention/query/kernel", 16, 16) == (None, "model")
    assert get_spec("decoder/layers_0/self_attention/out/kernel", 16, 16) == ("model", None)
    assert get_spec("decoder/layers_0/causal_attention/qkv/kernel", 16, 48) == ("model", None), (
        "by inputs: it is a joint one"
    )
    assert (
        get_spec("decoder/layers_0/mlp/wi/bias", 32) == ("model",)
        and get_spec("decoder/layers_0/mlp/wo/bias", 16) == ()
    )
    assert get_spec("decoder/logits_bias", 64) == ("model",)
    assert get_spec("decoder/logits_bias", 65) == (None,), "like the vocabulary"
    assert get_spec("decoder/position_embedder/embedding", 64, 16) == (None, None)
    assert get_spec("token_embedder/embedding", 64, 16) == ("model", None)
    assert get_spec("token_embedder/embedding", 50257, 16) == (None, None), (
        "whole where it is no whole number of parts"
    )
    assert set(rules(4, replicate=True).parameter_sharding("mlp/wo/kernel", (32, 16)).spec) == {
        None
    }
    names = [
        name
        for name in parameters.parameter_shapes(
            GPTConfig(64, 16, 4, 1, 32, logits_via_embedding=False)
        )
    ]
    names += parameters.parameter_shapes(TINY)
    shape = dict(emb_dim=16, num_heads=4, num_encoder_layers=1, num_decoder_layers=1, mlp_dim=32)
    config = BartConfig(64, **shape, encoder_vocab_size=48, logits_via_embedding=False)
    names += parameters.parameter_shapes(config)
    unknown = {
        name.split("/")[-1]
        for name in names
        if not sharding._PARAMETERS.get("/".join(name.split("/")[-2:]))
    }
    assert unknown == {"scale", "bias"}


def test_the_rules_are_t5x_s():
    partitioning = pytest.importorskip("t5x.partitioning", reason="T5X is not installed")
    theirs = dict(partitioning.standard_logical_axis_rules())
    assert {name: theirs[name] for name in theirs if name in RULES} == {
        name: RULES[name] for name in RULES if name in theirs
    }


def test_a_mesh_of_jax_and_one_with_other_axes():
    assert ShardingRules(jax.make_mesh((1, 1), AXES)).parts == 1
    with pytest.raises(ValueError, match=r"mesh: got the axes \('x', 'model'\), expected"):
        ShardingRules(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "model")))
    with pytest.raises(ValueError, match="replicate: got True without a mesh"):
        sd.load("ende/target", replicate=True)


@pytest.mark.parametrize("turned", [False, True])
def test_parts_of_stored_parameters(tmp_path, turned):
    """What TensorStore reads in parts, safetensors whole, is the same part."""
    params = random_params(TINY)
    sd.save(sd.LanguageModel(TINY, parameters.unflatten(dict(params))), tmp_path / "own")
    write_hf(tmp_path / "hf", to_tensors(params))
    name, box = "decoder/layers_0/mlp/wo/kernel", (slice(6, 12), slice(0, 16))
    for folder in ("own", "hf"):
        leaf = loader.open_checkpoint(tmp_path / folder, None).parameters[name]
        assert (leaf.read_part is None) == (folder == "hf")
        leaf, expected, part = (
            (leaf.transposed(), params[name].T, box[::-1]) if turned else (leaf, params[name], box)
        )
        np.testing.assert_array_equal(leaf.load_part("float32", part), expected[part])


def test_memory_is_asked_for_by_device(monkeypatch):
    whole = weights.required_bytes(TINY, "float32")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    part = weights.required_bytes(TINY, "float32", rules(2))
    assert whole / 2 < part < whole * 0.75


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mesh=4"], "mesh: got '4', expected DATAxMODEL, two numbers of devices, such as 1x4"),
        (["--mesh=0x2"], "mesh: got '0x2', expected DATAxMODEL"),
        (["--mesh=1x64"], "mesh: got 1x64 devices, expected 1 to"),
        (
            ["--shard_drafter"],
            "shard_drafter: got True without a mesh, expected --mesh=DATAxMODEL too",
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "benchmark"])
def test_the_command_line_rejects(command, flags, message, capsys):
    assert main.main([command, "--target=ende/target", *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["measure", "tune"])
def test_what_measures_one_device_takes_no_mesh(command, capsys):
    assert main.main([command, "--target=ende/target", "--drafter=ende/drafter", "--mesh=1x1"]) == 2
    assert "mesh: got '1x1', expected none (one device is measured)" in capsys.readouterr().err
