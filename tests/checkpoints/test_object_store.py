"""`gs://` as gcsfs and TensorStore read it, from an emulator on this machine."""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys

import make_checkpoints as make
import ml_dtypes
import peaks
import pytest

from specdec_jax.models.t5 import T5Config

pytestmark = pytest.mark.slow
PROGRAM = pathlib.Path(__file__).parents[1] / "support/object_store_run.py"


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    pytest.importorskip("gcsfs")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def run(environment, *arguments):
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, environment):
    return run(environment, "formats", tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("scheme", ["gs", "http"])
@pytest.mark.parametrize("form", make.FORMATS)
def test_every_format_is_read(outcomes, scheme, form):
    assert outcomes[f"{scheme} {form}"] == "True"


@pytest.mark.parametrize("form", make.FORMATS)
def test_requests_grow_with_the_tensors_alone(outcomes, form):
    """Some requests find the files; then each tensor costs a few."""
    files = 3 if "legacy" in form else 0  # each array's own metadata, and its chunks
    assert outcomes[f"gs {form}: requests"] <= 40 + (4 + files) * len(make.PARAMS)


def test_files_and_folders_are_written(outcomes):
    assert outcomes["written"] == "'gs://bucket/new/checkpoint_1'"
    assert outcomes["read again"] == "True" and outcomes["large"]
    assert outcomes["twice"].startswith("FileExistsError: ")


def test_failures_are_one_line(outcomes):
    failed = {name: text for name, text in outcomes.items() if name[:3] in ("403", "206", "no ")}
    assert len(failed) == 9
    for name, text in failed.items():
        assert text.startswith("ValueError: gs://") and len(text.splitlines()) == 1, (name, text)
        assert len(text) < 800
    assert "Forbidden" in failed["403 safetensors"] and "truncated?" in failed["206 safetensors"]


@contextlib.contextmanager
def served(environment, folder, wait=0.0):
    """Runs the emulator in another process, whose memory does not count; yields an environment."""
    command = [sys.executable, str(PROGRAM), "serve", str(folder), str(wait)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, **pipes) as process:
        yield environment | json.loads(process.stdout.readline())
        process.stdin.close()


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["safetensors", "pytorch", "orbax", "legacy"])
def test_peak_memory_is_at_most_a_fifth_above_the_weights(form, dtype, tmp_path, environment):
    for name, layers in (("large", 4 if dtype == "float32" else 8), ("small", 1)):
        params = make.random_params(T5Config(4000, 512, 8, 64, layers, layers, 1408))
        sizes = dict(vocab_size=4000, d_model=512, d_kv=64, num_heads=8, d_ff=1408)
        sizes |= dict(num_layers=layers, num_decoder_layers=layers)
        folder = tmp_path / "bucket" / name
        match form:
            case "safetensors":
                make.write_hf(folder, make.to_tensors(params, ml_dtypes.bfloat16), **sizes)
            case "pytorch":
                make.write_hf_pytorch(folder, make.to_tensors(params), **sizes)
            case "orbax":
                make.write_t5x_orbax(folder / "checkpoint_1", params, optimizer=False)
            case "legacy":
                make.write_t5x_legacy(folder / "checkpoint_1", params)
    with served(environment, tmp_path) as changed:
        load = functools.partial(run, changed, "load", "gs://bucket/large", "gs://bucket/small")
        assert 0.9 < peaks.find_least(lambda: load(dtype)["ratio"]) <= peaks.MOST
