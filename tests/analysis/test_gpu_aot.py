"""`scripts/gpu_aot.py`: what it counts in a text, and that it compiles where JAX's plugin for CUDA is."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from specdec_jax.analysis.compiled_text import loops

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "gpu_aot.py"
HLO = """
%draft (p: (f32[8], s32[])) -> (f32[8], s32[]) {
  %p = (f32[8], s32[]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %gemm = f32[8]{0} fusion(%x), kind=kCustom, calls=%dot, metadata={op_name="while/body/layers_0/mlp/dot_general"}
  %pair = (f32[8]{0}, f32[]) fusion(%gemm), kind=kInput, calls=%norm, metadata={op_name="while/body/reduce"}
  ROOT %out = (f32[8], s32[]) tuple(%gemm, %i)
}

%iteration (p: (f32[8], s32[])) -> (f32[8], s32[]) {
  %w = (f32[8], s32[]) while(%p), condition=%more, body=%draft, backend_config={"known_trip_count":{"n":"7"}}
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


@pytest.mark.slow
def test_the_decode_loop_compiles_without_a_gpu():
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("the plugin of jax[cuda13] is not installed")
    flags = ["--target=t5_1_1/small", "--layers=1", "--gamma=2"]
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    catch_up, draft, iteration = record["loops"]
    assert (catch_up["inner"], draft["inner"], iteration["inner"]) == (0, 0, 2)
    assert (catch_up["trip_count"], draft["trip_count"], iteration["trip_count"]) == (None, 2, None)
    assert all(loop["in_layers"] < loop["kernels"] for loop in record["loops"])
    # One more adds up the lengths of inputs, for all layers.
    assert 0 < catch_up["in_layers"] < draft["in_layers"] <= 13 and iteration["in_layers"] <= 18
    assert record["copied_in_loops"] == []  # neither caches nor weights
