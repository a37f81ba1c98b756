"""Hostile files end in one line that names the file, within seconds and in little memory.

They are read in another process: one that hangs or dies is a case that failed, and the others
follow in a new one.
"""

import json
import os
import pathlib
import select
import subprocess
import sys

import pytest
from hostile_table import CASES, SLOW_CASES

SECONDS, MEGABYTES = 5, 200
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="pipes, sockets and limits as on Linux"
)


def run(names, folder) -> dict[str, dict]:
    """Returns each case's outcome by name, up to the first that hangs or ends the process."""
    program = pathlib.Path(__file__).parents[1] / "support/hostile_files.py"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    results: dict[str, dict] = {}
    with subprocess.Popen(
        [sys.executable, program, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        bufsize=0,  # what waits in a buffer, `select` does not see
    ) as process:
        process.stdin.write("\n".join(names).encode())
        process.stdin.close()
        while select.select([process.stdout], [], [], 60)[0] and (
            line := process.stdout.readline()
        ):
            outcome = json.loads(line)
            results[outcome["case"]] = outcome
        process.kill()
    return results


def run_all(names, folder) -> dict[str, dict | None]:
    """Returns each case's outcome by name, None for one that hangs or ends the process."""
    result: dict[str, dict | None] = {}
    left = list(names)
    while left:
        result |= run(left, folder)
        left = [name for name in left if name not in result]
        if left:
            result[left.pop(0)] = None
    return result


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_all(CASES, tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def slow_outcomes(tmp_path_factory):
    return run_all(SLOW_CASES, tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", CASES)
def test_one_line_that_names_the_file(name, outcomes):
    check(CASES[name], outcomes[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_one_line_in_the_slow_cases_too(name, slow_outcomes):
    check(SLOW_CASES[name], slow_outcomes[name])


def check(case, result):
    assert result is not None, "the process hung or died"
    assert result["error"] == "ValueError", result
    assert case.names in result["text"], result["text"]
    assert (
        len(result["text"].splitlines()) == 1
        and len(result["text"]) < 2500
        and not result["stderr"]
    ), result
    assert result["seconds"] < SECONDS and result["bytes"] < MEGABYTES * 1e6


def test_there_are_enough():
    assert len(CASES) >= 500
