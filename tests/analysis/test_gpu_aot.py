"""Tests `scripts/gpu_aot.py`: counts in a text, and compilation where CUDA's plugin is."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tools.compiled_text import loops, widened

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "gpu_aot.py"
HLO = """
%draft (p: (f32[8], s32[])) -> (f32[8], s32[]) {
  %p = (f32[8], s32[]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %gemm = f32[8]{0} fusion(%x), kind=kCustom, calls=%dot, \
metadata={op_name="while/body/layers_0/mlp/dot_general"}
  %pair = (f32[8]{0}, f32[]) fusion(%gemm), kind=kInput, calls=%norm, \
metadata={op_name="while/body/reduce"}
  ROOT %out = (f32[8], s32[]) tuple(%gemm, %i)
}

%iteration (p: (f32[8], s32[])) -> (f32[8], s32[]) {
  %w = (f32[8], s32[]) while(%p), condition=%more, body=%draft, \
backend_config={"known_trip_count":{"n":"7"}}
  %copied = f32[8]{0} copy(%x)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %outside = f32[8]{0} copy(%z)
  %w = (f32[8], s32[]) while(%init), condition=%cond, body=%iteration
}
"""


def test_kernels_and_trip_counts_are_read():
    assert loops(HLO) == [
        {"kernels": 2, "in_layers": 1, "inner": 0, "trip_count": 7},
        {"kernels": 1, "in_layers": 0, "inner": 1, "trip_count": None},
    ]


WIDENED = """
%dot (k: s8[256,512], x: bf16[8,256]) -> bf16[8,512] {
  %k = s8[256,512]{1,0} parameter(0)
  %wide = bf16[256,512]{1,0} convert(%k)
  ROOT %dot.1 = bf16[8,512]{1,0} dot(%x, %wide), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s8[256,512], bf16[8,256])) -> (s8[256,512], bf16[8,256]) {
  %p = (s8[256,512], bf16[8,256]) parameter(0)
  %kernel = s8[256,512]{1,0} get-tuple-element(%p), index=0
  %laid = s8[2,128,512]{2,1,0} bitcast(%kernel)
  %gemm = bf16[8,512]{1,0} fusion(%kernel, %x), kind=kCustom, calls=%dot
  %small = f32[16]{0} convert(%eight)
  %moved = s8[2,128,512]{2,1,0} copy(%laid)
  SLOWER
  ROOT %out = (s8[256,512], bf16[8,256]) tuple(%kernel, %gemm)
}

ENTRY %main (p: s8[256,512]) -> f32[8] {
  %p = s8[256,512]{1,0} parameter(0)
  HOISTED
  %w = (s8[256,512], bf16[8,256]) while(%init), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize(
    "lines, result",
    [
        ({}, []),
        (
            {"SLOWER": "%w.1 = bf16[256,512]{1,0} fusion(%kernel), kind=kLoop, calls=%c"},
            ["bf16[256,512]"],
        ),
        (
            {"SLOWER": "%w.1 = (f32[8]{0}, f32[2,128,512]{2,1,0}) fusion(%y, %laid), calls=%c"},
            ["f32[2,128,512]"],
        ),
        ({"HOISTED": "%w.1 = bf16[256,512]{1,0} convert(%p)"}, ["bf16[256,512]"]),
    ],
)
def test_a_weight_that_is_widened_before_its_product_is_detected(lines, result):
    text = WIDENED
    for name in ("SLOWER", "HOISTED"):
        text = text.replace(f"  {name}\n", f"  {lines[name]}\n" if name in lines else "")
    assert widened(text) == result


def compiled(*flags) -> dict:
    """The record of the script for a small target of one layer."""
    if not (
        importlib.util.find_spec("jax_plugins")
        and importlib.util.find_spec("jax_plugins.xla_cuda13")
    ):
        pytest.skip("the plugin of jax[cuda13] is not installed")
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, SCRIPT, "--target=t5_1_1/small", "--layers=1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_plain_step_of_one_row_has_as_few_kernels_as_a_draft_step():
    record = compiled("--gamma=0")
    (step,) = record["loops"]
    assert record["drafter"] is None and step["inner"] == 0 and step["trip_count"] is None
    assert 0 < step["in_layers"] <= 13 and step["in_layers"] < step["kernels"]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_decode_loop_compiles_without_a_gpu(quantize, tmp_path):
    record = compiled(
        "--gamma=2",
        f"--hlo={tmp_path / 'hlo'}",
        *([] if quantize is None else [f"--quantize={quantize}"]),
    )
    catch_up, draft, iteration = record["loops"]
    assert (catch_up["inner"], draft["inner"], iteration["inner"]) == (0, 0, 2)
    assert (catch_up["trip_count"], draft["trip_count"], iteration["trip_count"]) == (None, 2, None)
    assert all(loop["in_layers"] < loop["kernels"] for loop in record["loops"])
    # One more adds up the lengths of inputs, for all layers.
    assert 0 < catch_up["in_layers"] < draft["in_layers"] <= 13 and iteration["in_layers"] <= 18
    assert record["copied_in_loops"] == []  # neither caches nor weights
    # Weights in int8, the head's too, are what the products read.
    assert record["quantize"] == quantize and record["widened"] == []
    text = (tmp_path / "hlo").read_text()
    assert ("s8[512,32128]" in text and "s8[512,1152]" in text) == (quantize is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, calls", [(("--tree=widths:2,2,1",), 4), (("--gamma=2", "--num_beams=2"), 3)]
)
def test_trees_and_beams_copy_no_caches(flags, calls):
    record = compiled(*flags)
    iteration = record["loops"][-1]
    assert record["copied_in_loops"] == [] and iteration["trip_count"] is None
    # Every level of drafts is a call, and the target's is another; without kernels for attention.
    assert (
        10 * calls < iteration["in_layers"] <= 30 * calls
        and iteration["in_layers"] < iteration["kernels"]
    )
    assert (record["tree"], record["num_beams"]) == (
        ("widths:2,2,1", None) if calls == 4 else (None, 2)
    )
