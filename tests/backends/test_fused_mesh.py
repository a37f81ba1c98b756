"""A draft step's kernel on a mesh computes the numbers of XLA's layers, on fake CPU devices.

Each device holds the drafter whole.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.backends.backend import TPUBackend
from specdec_jax.backends.sharding import AXES, ShardingRules
from specdec_jax.backends.tpu import fused_mesh

pytestmark = pytest.mark.usefixtures("quick")

SUPPORT = pathlib.Path(__file__).parents[1] / "support"


def run(*cases: str) -> dict:
    """Returns what the kernel computes on meshes with some numbers of rows, in another process."""
    path = os.pathsep.join(
        [str(SUPPORT.parents[1]), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": path,
    }
    done = subprocess.run(
        [sys.executable, SUPPORT / "fused_mesh_run.py", *cases],
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "rows_by_case",
    [
        pytest.param({"2x2, 4": 2}, marks=pytest.mark.slow),
        pytest.param({"1x4, 1": 1, "1x4, 3": 3, "4x1, 4": 1, "2x2, 2": 1}, marks=pytest.mark.slow),
    ],
    ids=["one mesh", "others"],
)
def test_every_device_runs_the_kernel_for_its_own_rows(rows_by_case):
    runs = run(*rows_by_case)
    for case, rows in rows_by_case.items():
        assert [rows, 2, 128] in runs[case]["calls"]
        assert runs[case]["difference"] < 2e-5, case


@pytest.mark.parametrize(
    ("rows", "replicate", "taken"),
    [(2, True, True), (3, True, False), (16, True, True), (18, True, False), (2, False, False)],
)
def test_which_models_it_takes(rows, replicate, taken):
    """With rows that can be divided, at most eight on a device, of a model that is not divided."""
    rules = ShardingRules(Mesh(np.array(jax.devices()[:1] * 4).reshape(2, 2), AXES), replicate)
    found = []

    def ask():
        network = tiny_t5(
            0, 24, dtype="bfloat16", emb_dim=128, num_heads=4, head_dim=64, mlp_dim=128
        ).network
        network = network.replace(module=network.config.module(TPUBackend(True)))
        cache = network.prefill(jnp.ones((rows, 4), int), jnp.full(rows, 4), 34)
        meshed = network.config.module(TPUBackend(True, rules))
        found.append(fused_mesh.supports_call(meshed, network.params, (rows, 1), cache, None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec_jax.backends.cpu.packed_weights.can_pack", lambda dtype: False)
        jax.eval_shape(ask)
    assert found == [taken]


@pytest.mark.slow
def test_a_gpt_is_not_taken():
    model = sd.LanguageModel.random(sd.GPTConfig(24, 16, 2, 2, 32, num_positions=16), eos_ids=())
    rules = ShardingRules(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES), True)
    cache = model.network.prefill(jnp.ones((1, 0), int), jnp.zeros(1, int), 16)
    module = model.config.module(TPUBackend(True, rules))
    assert not fused_mesh.supports_call(module, model.network.params, (1, 1), cache, None)
