"""Weights in int8: what is rejected, what they take of memory, and the command line."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import command_line
import jax
import make_checkpoints as make
import pytest
from int8_models import save_tiny
from make_checkpoints import TINY
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.checkpoints import loader
from specdec_jax.checkpoints import weights as checkpoints_weights
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.models import weight_layouts
from specdec_jax.models.families import PRESETS

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not native.is_available(), reason=native.describe_state()),
]

cache, pair, specdec = command_line.cache, command_line.pair, command_line.specdec


# What is rejected, and memory.


@pytest.mark.slow
def test_what_cannot_be_had_is_rejected_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "read_params", lambda *args: pytest.fail("read"))
    folder = save_tiny(tmp_path / "model")
    with pytest.raises(ValueError, match="quantize: got 'int4', expected one of int8, w8a8, none"):
        sd.load(folder, "float32", quantize="int4")
    for how in packed_weights.INPUT_BITS:
        got = f"quantize: got '{how}'"
        with pytest.raises(
            ValueError, match=f"{got} with a mesh, expected 8 bits only for float32 on a CPU .*mesh"
        ):
            sd.load(folder, "float32", quantize=how, mesh=sd.make_mesh(1, 1))
        with pytest.raises(
            ValueError, match=f"{got}, expected 8 bits .*here: bfloat16 on the backend cpu"
        ):
            sd.load(folder, "bfloat16", quantize=how)
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    monkeypatch.setattr(native, "describe_state", lambda: "CPU kernel: none, no compiler")
    for how in packed_weights.INPUT_BITS:
        with pytest.raises(
            ValueError, match=f"quantize: got '{how}', expected .*CPU kernel: none, no compiler"
        ):
            sd.load(folder, "float32", quantize=how)
        with pytest.raises(ValueError, match=f"quantize: got '{how}', expected .*CPU kernel: none"):
            sd.LanguageModel.random(TINY, quantize=how)
    with pytest.raises(
        ValueError,
        match="params: got weights in int8, expected 8 bits only for float32.*no compiler",
    ):
        sd.LanguageModel(TINY, weight_layouts.round_params(make.model_of().params))


@pytest.mark.slow
def test_memory_estimates():
    large, tied = PRESETS["t5_1_1/large"], PRESETS["t5_1_0/large"]
    for config in (large, tied):
        model = dataclasses.replace(
            config, num_encoder_layers=1, num_decoder_layers=1, vocab_size=2000
        )
        random = sd.LanguageModel.random(model, quantize="int8")
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(random.network.params))
        required = checkpoints_weights.required_bytes(model, "float32", None, "rounded")
        assert required == pytest.approx(weights + 2 * 4 * 2000 * 1024, rel=0.01)
        full = checkpoints_weights.required_bytes(config, "float32")
        assert checkpoints_weights.required_bytes(config, "float32", None, "stored") < 0.5 * full


MEASURE = """
import ctypes, os, sys, re
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import tensorstore  # imports are not what is measured
from specdec_jax import checkpoints
folder, small, quantize = sys.argv[1:]
load = lambda path: checkpoints.load(path, "float32", quantize=quantize or None)
load(small)  # nor is what XLA compiles
getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
def status(name):
    kilobytes = re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]
    return int(kilobytes) * 1024
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
model = load(folder)
assert model.quantized
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.network.params))
print((status("VmHWM") - before) / weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)
@pytest.mark.parametrize("quantize", ["int8", ""])
def test_peak_memory_is_near_the_size_of_8_bits(quantize, tmp_path):
    for name, layers in (("large", 16), ("small", 1)):
        shape = dataclasses.replace(
            PRESETS["t5_1_1/small"], vocab_size=1000, num_encoder_layers=layers
        )
        shape = dataclasses.replace(shape, num_decoder_layers=layers, mlp_dim=1408, num_heads=8)
        sd.save(
            make.model_of(make.random_params(shape), shape),
            tmp_path / name,
            dtype="float32" if quantize else "int8",
        )
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path / "large"),
        str(tmp_path / "small"),
        quantize,
    ]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    ratio = float(done.stdout)
    print(f"{quantize or 'stored'}: {ratio:.3f}")
    assert 0.9 < ratio <= 1.25  # in float32 the weights alone are nearly 4


# The command line.


def test_the_choice_is_printed(tmp_path):
    folder, printed = save_tiny(tmp_path / "model"), []
    for quantize in (None, "none"):
        sd.load(folder, quantize=quantize, say=printed.append)
    sd.save(tiny_t5(1), tmp_path / "float32")
    sd.load(tmp_path / "float32", quantize="int8", say=printed.append)
    sd.load(folder, quantize="w8a8", say=printed.append)
    default, end = (
        "in float32, the default on a CPU",
        " (dtype=, or --dtype on the command line, chooses another)",
    )
    assert printed == [
        f"loading {folder} {default}, with the 8-bit weights it is stored with{end}",
        f"loading {folder} {default}{end}",
        f"loading {tmp_path / 'float32'} {default}, with weights rounded to 8 bits{end}",
        f"loading {folder} {default}, with the 8-bit weights it is stored with, inputs of "
        f"products in int8 too{end}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantize, more", [("int8", ""), ("w8a8", ", inputs of products in int8 too")]
)
def test_generate_decodes_with_the_rounded_model(quantize, more, specdec, pair):
    target = sd.load(pair / "target", "float32", quantize=quantize)
    sentences = command_line.SENTENCES
    expected = [sd.generate(target, [text], max_new_tokens=6).texts[0] for text in sentences]
    how = (
        "--target=TARGET",
        "--drafter=DRAFTER",
        "--max_new_tokens=6",
        "--gamma=2",
        f"--quantize={quantize}",
        "--json",
    )
    code, out, err = specdec("generate", *how, *sentences)
    assert code == 0 and [json.loads(line)["text"] for line in out.splitlines()] == expected
    assert f"with weights rounded to 8 bits{more}" in err


def test_a_job_does_not_resume_with_other_weights(specdec, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("\n".join(command_line.SENTENCES))
    place = f"--input_file={tmp_path / 'in.txt'}", f"--output_file={tmp_path / 'out.txt'}"
    with monkeypatch.context() as patch:
        patch.setattr(
            "specdec_jax.commands.resumable_output.Journal.finish", lambda self: None
        )  # as after a kill
        assert specdec("generate", "--target=TARGET", "--max_new_tokens=3", *place)[0] == 0
    code, _, err = specdec(
        "generate", "--target=TARGET", "--max_new_tokens=3", "--quantize=int8", *place
    )
    assert code == 2 and "got results with target in int8 False, expected True" in err


def test_a_job_does_not_resume_with_inputs_of_other_bits(specdec, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("\n".join(command_line.SENTENCES))
    place = f"--input_file={tmp_path / 'in.txt'}", f"--output_file={tmp_path / 'out.txt'}"
    how = "generate", "--target=TARGET", "--max_new_tokens=3", *place
    with monkeypatch.context() as patch:
        patch.setattr(
            "specdec_jax.commands.resumable_output.Journal.finish", lambda self: None
        )  # as after a kill
        assert specdec(*how, "--quantize=w8a8")[0] == 0
    code, _, err = specdec(*how, "--quantize=int8")
    assert code == 2 and "got results with bits of the target's inputs 8, expected 16" in err
    assert specdec(*how, "--quantize=w8a8")[0] == 0


@pytest.mark.slow
def test_a_preset_in_8_bits(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", tiny_t5(0).config)
    options = benchmark_command.BenchmarkOptions(
        preset="tiny",
        drafter_preset="tiny",
        gamma=(2,),
        max_new_tokens=4,
        repeats=1,
        input_length=5,
        quantize="int8",
    )
    options.check()
    record, problems = analysis_benchmark.benchmark(benchmark_command.load(options))
    assert not problems and record["options"]["quantize"] == "int8"
    kinds = record["target"]["parameter_dtype"], record["drafter"]["parameter_dtype"]
    assert kinds == ("float32, int8", "float32")
    assert record["target"]["parameters"] == record["drafter"]["parameters"]


@pytest.mark.parametrize(
    "given, printed",
    [
        (dict(quantize="int4"), "quantize: got 'int4', expected one of int8, w8a8, none"),
        (dict(quantize="int8", mesh="1x1"), "quantize: got 'int8' with mesh='1x1'"),
        (dict(quantize="int8", dtype="bfloat16"), "quantize: got 'int8' with dtype='bfloat16'"),
        (dict(quantize="w8a8", mesh="1x1"), "quantize: got 'w8a8' with mesh='1x1'"),
        (dict(quantize="w8a8", dtype="bfloat16"), "quantize: got 'w8a8' with dtype='bfloat16'"),
    ],
)
def test_options_are_rejected_before_a_model_is_loaded(given, printed):
    for options in (dict(target="absent"), dict(preset="t5_1_1/small")):
        with pytest.raises(ValueError, match=printed):
            benchmark_command.BenchmarkOptions(**options, **given).check()
