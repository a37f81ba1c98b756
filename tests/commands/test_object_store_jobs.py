"""A job whose output lies in `gs://` survives signals, in processes of its own."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import command_line
import pytest
from object_store import run_store

pair, cache = command_line.pair, command_line.cache
pytestmark = pytest.mark.slow
TEXTS = ["We asked", "Tom", "She was", "We", "the book", "Tom is nice"] * 8


@pytest.fixture
def store(tmp_path):
    pytest.importorskip("gcsfs")
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/in.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    with run_store(tmp_path) as running:
        yield running


def begin(store, pair, cache, output):
    # Every line waits, so that a signal comes amid the job.
    program = (
        "import sys, time; from specdec_jax.commands import entry, resumable_output as r;"
        "add = r.Journal.add; r.Journal.add = lambda *a, **k: (time.sleep(0.05), add(*a, **k));"
        "sys.exit(entry.main())"
    )
    arguments = [
        f"--target={pair / 'target'}",
        f"--drafter={pair / 'drafter'}",
        *command_line.MODELS[2:],
        "--temperature=1",
        "--verifier=token",
        "--input_file=gs://bucket/in.txt",
        f"--output_file={output}",
    ]
    environment = (
        os.environ
        | store.environment
        | {
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(cache.parent),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
    )
    command = [sys.executable, "-c", program, "generate", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def lines_in_parts(folder: pathlib.Path) -> int:
    return sum(len(part.read_bytes().splitlines()) for part in folder.glob("*.jsonl"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_job_is_resumed_from_its_parts(store, pair, cache, tmp_path, number):
    with begin(store, pair, cache, "gs://bucket/whole.txt") as process:
        assert process.wait(120) == 0, process.stderr.read()
    whole = (tmp_path / "bucket/whole.txt").read_text()
    assert len(whole.splitlines()) == len(TEXTS)
    parts = tmp_path / "bucket/out.txt.partial"
    with begin(store, pair, cache, "gs://bucket/out.txt") as process:
        for _ in range(6000):
            if lines_in_parts(parts) > 3:
                break
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(20)
        error = process.stderr.read()
    there = lines_in_parts(parts) - 1
    assert 2 < there < len(TEXTS), error
    if number != signal.SIGKILL:
        assert error.splitlines()[-1] in ("specdec: terminated", "specdec: interrupted")
    with begin(store, pair, cache, "gs://bucket/out.txt") as process:
        assert process.wait(120) == 0
        error = process.stderr.read()
    kept = int(error.split("gs://bucket/out.txt.partial: ")[1].split(" of ")[0])
    assert kept >= there
    assert (tmp_path / "bucket/out.txt").read_text() == whole
    assert {path.name for path in (tmp_path / "bucket").iterdir() if "out" in path.name} <= {
        "out.txt",
        "out.txt.gin",
        "out.txt.partial",
    }
    assert lines_in_parts(parts) == 0
