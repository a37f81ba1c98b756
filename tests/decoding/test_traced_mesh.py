"""Decoding inside a program for several devices, as T5X's is, on fake CPU devices."""

import json
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traced_mesh_run as run
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.backends.backend import Backend, TPUBackend
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.sharding import AXES, ShardingRules
from specdec_jax.decoding import ambient_mesh
from specdec_jax.decoding.under_jit import Decoder
from specdec_jax.models.parameters import flatten, unflatten
from tools.compiled_text import collectives, loop_copies

pytestmark = pytest.mark.slow
SUPPORT = pathlib.Path(run.__file__).parent
CASES = [f"{mesh}, {kind}" for mesh in ("2x2", "slices") for kind in ("chain", "tree", "beams")]
CASES += ["1x4, sampled", "1x4, int8", "1x4, six heads, chain", "none, chain"]
MORE = [case for case in run.CASES if case not in CASES]


def ran(cases: list[str], *more: str) -> dict:
    path = os.pathsep.join(
        [str(SUPPORT.parents[1]), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": path,
    }
    command = [sys.executable, SUPPORT / "traced_mesh_run.py", *more, *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def few() -> dict:
    return ran(CASES)


@pytest.fixture(scope="module")
def all_others() -> dict:
    return ran(MORE)


@pytest.fixture(scope="module")
def with_the_cpus_kernels() -> dict:
    return ran(list(run.CASES), "native")


def expected(kind: str, heads: int):
    """What one device decodes; sampled tokens too do not depend on the layout."""
    target = run.model(heads=heads)
    decoder = run.decoders(target, sd.ModelDrafter(run.model(0.1, heads)))[kind]
    return run.decode(decoder, target.params, None)


def check(found: dict, case: str) -> None:
    mesh, *heads, kind = case.split(", ")
    assert found[case]["tokens"] == expected(kind, 6 if heads else 4)
    assert len(np.unique(found[case]["tokens"])) >= 4  # not one token again and again


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_device(few, case):
    check(few, case)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("case", MORE)
def test_other_tokens_are_those_of_one_device(all_others, case):
    check(all_others, case)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("case", run.CASES)
def test_tokens_with_the_cpus_kernels_are_those_of_one_device(with_the_cpus_kernels, case):
    check(with_the_cpus_kernels, case)


def test_networks_are_laid_out_for_the_programs_devices(few):
    """The target is divided, its copy in int8 like it, another drafter whole on each device.

    On unknown devices, or those that do not divide the heads, neither has an accelerator's layout.
    """
    networks = {case: found["networks"] for case, found in few.items()}
    assert networks["2x2, chain"] == [[False, "tpu", [2, 2]], [True, "tpu", [2, 1]]]
    assert networks["1x4, sampled"] == [[False, "tpu", [1, 4]], [True, "tpu", [1, 1]]]
    assert networks["1x4, int8"] == [[False, "tpu", [1, 4]]]
    assert networks["1x4, six heads, chain"] == [[False, "cpu", None], [True, "tpu", [1, 1]]]
    assert (
        networks["slices, chain"]
        == networks["none, chain"]
        == [[False, "cpu", None], [True, "cpu", None]]
    )


def test_one_device_has_its_own_layout():
    network = run.model().network
    network = network.replace(module=network.config.module(TPUBackend()))
    found = ambient_mesh.adapt_to_mesh(network, 4)
    assert found.backend == Backend() and ambient_mesh.is_on_one_device()


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("mesh", [(1, 1), (1, 4), (4, 1)])
def test_a_tpus_compiler_takes_the_program(mesh, monkeypatch):
    """The drafter's step is one kernel on every device, and no cache is copied in a loop.

    No compiler could divide that kernel.
    """
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra tpu-aot")
    from jax.experimental import topologies

    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu ends the process at flags of a CPU's compiler
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore"
    )
    devices = Mesh(np.array(topology.devices[: mesh[0] * mesh[1]]).reshape(mesh), AXES)
    rules, rows = ShardingRules(devices), NamedSharding(devices, PartitionSpec("data"))
    shape = dict(num_heads=8, head_dim=64, emb_dim=512, mlp_dim=1024, dtype="bfloat16")
    target, drafter = tiny_t5(0, 256, **shape), tiny_t5(1, 256, **shape, decoder_layers=1)

    def make_shape(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = {
        name: make_shape(leaf, rules.parameter_sharding(name, leaf.shape))
        for name, leaf in flatten(target.params).items()
    }
    decoder = Decoder(target.config, sd.ModelDrafter(drafter), gamma=7)
    ids = make_shape(jnp.zeros((4, 128), jnp.int32), rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with devices:
            call = jax.jit(
                lambda params, inputs, prompts: decoder.decode(
                    params, inputs, prompts, 1, prompted=False
                )
            )
            text = call.lower(unflatten(params), ids, ids).compile().as_text()
    assert "tpu_custom_call" in text and loop_copies(text) == []
    assert bool(collectives(text)) == (mesh != (1, 1))
