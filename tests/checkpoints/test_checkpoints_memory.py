"""Loading takes little memory beside the weights, whatever the format and the dtype."""

import dataclasses
import pathlib
import subprocess
import sys

import make_checkpoints as make
import ml_dtypes
import peaks
import pytest

from specdec_jax.models.t5 import T5Config

# As in the T5 1.1 sizes from large on, embedding and head are a small part.
LAYERS = {"float32": 4, "bfloat16": 8}  # 130 and 120 MB of weights


def shape(layers: int) -> tuple[T5Config, dict]:
    """The same shape for us and in Hugging Face's words."""
    ours = T5Config(4000, 512, 8, 64, layers, layers, 1408)
    theirs = dict(vocab_size=4000, d_model=512, d_kv=64, num_heads=8, d_ff=1408)
    return ours, theirs | dict(num_layers=layers, num_decoder_layers=layers)


MEASURE = """
import ctypes, os, sys, re
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
import orbax.checkpoint, tensorstore  # imports are not what is measured
from specdec_jax import checkpoints
from specdec_jax.checkpoints import loader
folder, small, dtype = sys.argv[1:]
# Nor is what XLA compiles to bring the weights into the loop's layout, and what tracing takes.
checkpoints.load(small, dtype)
loader.load_shape(folder).parameter_shapes
getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
def status(name):
    kilobytes = re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]
    return int(kilobytes) * 1024
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = status("VmRSS")
model = jax.block_until_ready(checkpoints.load(folder, dtype).network)
leaves = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(model.params)}  # one may occur twice
weights = sum(leaves.values())
print((status("VmHWM") - before) / weights)
"""

FORMATS = {
    "safetensors, float32": lambda path, p, shape: make.write_hf(path, make.to_tensors(p), **shape),
    "safetensors, bfloat16": lambda path, p, shape: make.write_hf(
        path, make.to_tensors(p, ml_dtypes.bfloat16), **shape
    ),
    "pytorch": lambda path, p, shape: make.write_hf_pytorch(
        path, make.to_tensors(p, ml_dtypes.bfloat16), **shape
    ),
    "flax": lambda path, p, shape: make.write_hf_flax(path, p, **shape),
    "t5x legacy": lambda path, p, shape: make.write_t5x_legacy(path / "checkpoint_1", p),
    "t5x orbax": lambda path, p, shape: make.write_t5x_orbax(
        path / "checkpoint_1", p, optimizer=False
    ),
    "t5x orbax, scanned": lambda path, p, shape: make.write_t5x_orbax(
        path / "checkpoint_1", make.stack_layers(p), False
    ),
}

needs_peaks = pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)
CASES = [
    pytest.param(
        form,
        dtype,
        marks=() if (form, dtype) == ("safetensors, bfloat16", "float32") else pytest.mark.slow,
    )
    for form in FORMATS
    for dtype in LAYERS
]


@pytest.mark.slow
@needs_peaks
@pytest.mark.parametrize("form, dtype", CASES)
def test_peak_memory_is_at_most_a_fifth_above_the_weights(form, dtype, tmp_path):
    for name, layers in (("large", LAYERS[dtype]), ("small", 1)):
        ours, theirs = shape(layers)
        FORMATS[form](tmp_path / name, make.random_params(ours), theirs)
    assert 0.9 < peaks.find_least(lambda: measure_ratio(tmp_path, dtype)) <= peaks.MOST


@pytest.mark.slow
@needs_peaks
@pytest.mark.parametrize("tied", [True, False])
def test_a_large_head_is_packed_without_another_copy(tied, tmp_path):
    """As BART's or mT5's; if it is tied, the embedding and the head are one array."""
    for name, layers in (("large", 4), ("small", 1)):
        ours, theirs = shape(layers)
        ours = dataclasses.replace(ours, vocab_size=32000, logits_via_embedding=tied)
        theirs |= dict(vocab_size=32000, tie_word_embeddings=tied)
        make.write_hf(tmp_path / name, make.to_tensors(make.random_params(ours)), **theirs)
    assert 0.9 < peaks.find_least(lambda: measure_ratio(tmp_path, "float32")) <= peaks.MOST


def measure_ratio(folder: pathlib.Path, dtype: str) -> float:
    """Loads "large" of a folder in a process of its own; returns its peak over the weights."""
    command = [sys.executable, "-c", MEASURE, str(folder / "large"), str(folder / "small"), dtype]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return float(done.stdout)
