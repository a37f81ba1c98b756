"""Makes irregular files and full disks in a temporary folder, and runs `specdec` as a process.

A test skips if the system does not permit this.
"""

import contextlib
import os
import pathlib
import stat
import subprocess
import sys
import threading

import pytest

# What the console script does, wherever it is installed.
SPECDEC = [
    sys.executable,
    "-c",
    "import sys; from specdec_jax.commands.entry import main; sys.exit(main())",
]


def null_device(path: pathlib.Path) -> pathlib.Path:
    """Makes a device that takes everything, like /dev/null."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        path.write_bytes(b"")
    except (OSError, AttributeError) as error:
        pytest.skip(f"no device can be made here: {error}")
    return path


class Pipe:
    """A named pipe with a reader; `read()` returns everything that was written."""

    def __init__(self, path: pathlib.Path):
        if not hasattr(os, "mkfifo"):
            pytest.skip("the system has no named pipes")
        os.mkfifo(path)
        self._content: list[bytes] = []
        self._thread = threading.Thread(
            target=lambda: self._content.append(path.read_bytes()), daemon=True
        )
        self._thread.start()

    def read(self) -> bytes:
        self._thread.join(30)
        assert self._content, "nobody has written to the pipe"
        return self._content[0]


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: str = "64k"):
    """Mounts a disk of this size at a new folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path):
    """Mounts a small disk for a test."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def names(folder: pathlib.Path) -> list[str]:
    """Returns the names of a folder's entries, sorted."""
    return sorted(path.name for path in folder.iterdir())


def fill(disk: pathlib.Path, leave: int = 0) -> pathlib.Path:
    """Fills a disk up to `leave` bytes; returns the file that fills it."""
    filler = disk / "filler"
    space = os.statvfs(disk)
    filler.write_bytes(bytes(max(0, space.f_bavail * space.f_frsize - leave)))
    return filler
