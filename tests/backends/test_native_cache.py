"""The folder that the CPU's kernels are kept in."""

import contextlib
import os
import pathlib
import re
import subprocess
import time

import libraries
import pytest
from devices import names
from libraries import REAL, WORKS, again, calls

from specdec_jax.backends.cpu import native
from specdec_jax.files import locks, user_cache

needs_compiler = pytest.mark.skipif(REAL is None or os.name != "posix", reason="no C++ compiler")

settings, libraries, compiler = libraries.settings, libraries.libraries, libraries.compiler


# The cache's folder.


def test_the_cache_is_the_user_s(tmp_path, monkeypatch):
    assert user_cache.cache_folder() == tmp_path / "cache/specdec_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_cache.cache_folder() == tmp_path / "home/.cache/specdec_jax"

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", nowhere)
    with pytest.raises(
        ValueError, match="got no home folder, expected HOME or XDG_CACHE_HOME to be set"
    ):
        user_cache.cache_folder()


@pytest.mark.slow
@needs_compiler
def test_no_write_access(tmp_path, compiler):
    """Seen before anything is compiled."""
    compiler(WORKS)
    (tmp_path / "cache").write_text("a file in the folder's place")
    assert re.fullmatch(
        rf"kernel: not used: cannot use the cache: \[Errno \d+\] .*'{tmp_path}/cache.*'", again()
    )
    assert calls(tmp_path) == 0


@needs_compiler
def test_a_full_disk(tmp_path, compiler, monkeypatch):
    import devices

    with devices.small_disk(tmp_path / "disk") as disk:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
        compiler(WORKS)
        assert again().startswith("kernel: not used: ") and "space" in native.describe_state()
        assert not list(disk.rglob("*.so"))


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may mount")
def test_a_disk_that_can_only_be_read(tmp_path, compiler, monkeypatch):
    """What is there is used; nothing is made."""
    import devices

    with devices.small_disk(tmp_path / "disk", "4m") as disk:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk / "cache"))

        def remount(how):
            return subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)

        compiler(WORKS)
        remount("ro")
        assert (
            "cannot use the cache: [Errno 30] Read-only file system: " in again()
            and calls(tmp_path) == 0
        )
        remount("rw")
        built = again()
        assert ".so, built with" in built and calls(tmp_path) == 1
        remount("ro")
        assert again() == built
        monkeypatch.setenv(native.SETTING, "rebuild")
        assert (
            "cannot use the cache: [Errno 30] Read-only file system: " in again()
            and calls(tmp_path) == 1
        )


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("part", ["cache", "cache/specdec_jax", "cache/specdec_jax/kernel"])
def test_folders_that_others_may_write_to(tmp_path, compiler, part):
    compiler(WORKS)
    folder = tmp_path / part
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    if not part.endswith("kernel"):
        expected = "got a folder that everybody may write to, expected none above the cache"
    else:
        expected = "got permissions 777, expected 700, since others could change what is in it"
    assert again() == f"kernel: not used: ValueError: {folder}: {expected}" and calls(tmp_path) == 0
    if not part.endswith("kernel"):
        folder.chmod(0o1777)  # as /tmp
        assert ".so, built with" in again()
    else:
        folder.chmod(0o750)
        assert "got permissions 750, expected 700" in again()
    assert calls(tmp_path) == (not part.endswith("kernel"))


@needs_compiler
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("part", ["cache", "cache/specdec_jax", "cache/specdec_jax/kernel"])
def test_folders_of_others(tmp_path, compiler, part):
    compiler(WORKS)
    folder = tmp_path / part
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, 12345, 12345)
    expected = f"{folder}: got a folder of user 12345, expected one of user 0"
    assert again() == f"kernel: not used: ValueError: {expected}" and calls(tmp_path) == 0
    assert names(folder) == []


def test_what_killed_processes_left_goes(tmp_path):
    folder = user_cache.private_folder("kernel")
    old, new = folder / "tmp-old", folder / "tmp-new"
    for path in (old, new):
        path.mkdir()
        (path / "kernel.so").touch()
    os.utime(old, (time.time() - 2 * user_cache._ABANDONED,) * 2)
    with user_cache.scratch_folder(folder) as temporary:
        assert temporary.parent.parent == folder and len(names(folder)) == 2 and not old.exists()
    assert names(folder) == ["tmp-new"]


@pytest.mark.skipif(os.name != "posix", reason="folders have no locks")
def test_what_is_in_use_stays(tmp_path):
    """However long a process has been at work there; it may lock the folder itself too."""
    folder = user_cache.private_folder("remote")
    with user_cache.scratch_folder(folder) as long, locks.lock_folder(long):
        for path in (long, long.parent):
            os.utime(path, (time.time() - 2 * user_cache._ABANDONED,) * 2)
        with user_cache.scratch_folder(folder):
            assert long.exists() and len(names(folder)) == 2
    assert names(folder) == []


@pytest.mark.parametrize("touched", [False, True])
def test_what_is_touched_stays_without_locks(tmp_path, monkeypatch, touched):
    """As on NFS and Windows; a training run into a store touches its folder."""
    monkeypatch.setattr(user_cache, "lock_folder", lambda path: contextlib.nullcontext())
    folder = user_cache.private_folder("runs")
    with user_cache.scratch_folder(folder) as long:
        for path in (long, long.parent):
            os.utime(path, (time.time() - 2 * user_cache._ABANDONED,) * 2)
        if touched:
            os.utime(long)
        with user_cache.scratch_folder(folder):
            assert long.exists() == touched
