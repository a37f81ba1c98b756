"""`s3://` as s3fs reads and writes it, from moto's server on this machine."""

import json
import os
import pathlib
import subprocess
import sys

import make_checkpoints as make
import pytest

pytestmark = pytest.mark.slow
PROGRAM = pathlib.Path(__file__).parents[1] / "support/s3_run.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("files"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("form", make.FORMATS)
def test_every_format_is_read(outcomes, form):
    assert outcomes[form] == "True"


def test_files_and_folders_are_written(outcomes):
    assert outcomes["written"] == "'s3://bucket/new/checkpoint_1'"
    assert outcomes["read again"] == "True" and outcomes["large"] and outcomes["small"] == "text"
    assert outcomes["twice"].startswith("FileExistsError: ") and not outcomes["removed"]


def test_a_runs_folder_is_copied_and_read_again(outcomes):
    assert outcomes["run"] == ["checkpoints/a/weights", "checkpoints/b/weights"]


def test_a_missing_bucket_is_one_line(outcomes):
    assert outcomes["no bucket"].startswith("ValueError: s3://nothing")
    assert len(outcomes["no bucket"].splitlines()) == 1
