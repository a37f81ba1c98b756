"""Shared by the tests of native and native_cache."""

import functools
import shutil
import subprocess

import pytest

from specdec_jax.backends.cpu import native

REAL = next((path for path in map(shutil.which, ("g++", "clang++", "c++")) if path), None)


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """Gives a test its own cache, no settings, and a process that has not chosen a kernel.

    Nothing is loaded, since a name can be registered only once.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SETTING, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    loaded = []
    monkeypatch.setattr(
        native.selftest, "register", lambda library, targets: loaded.append(library)
    )
    monkeypatch.setattr(native, "_settle", functools.cache(native._settle.__wrapped__))
    return loaded


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Makes a folder of libraries: "works.so", "crashes.so" and "wrong.so".

    The first is a copy of the one that all tests run with.
    """
    folder = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(native.SETTING, raising=False)
        result = native._find()
    shutil.copy(result.path, folder / "works.so")
    compile_ = [REAL, "-shared", "-fPIC", "-w", "-x", "c++", "-", "-o"]
    crash = b"#include <cstdlib>\n__attribute__((constructor)) static void die() { abort(); }\n"
    subprocess.run([*compile_, folder / "crashes.so"], input=crash, check=True)
    # A product that writes nothing, so that its output is whatever was in memory.
    handlers = "".join(
        f'extern "C" void* {symbol}(void*) {{ return 0; }}\n' for symbol in native.TARGETS.values()
    )
    subprocess.run([*compile_, folder / "wrong.so"], input=handlers.encode(), check=True)
    return folder


@pytest.fixture
def compiler(tmp_path, monkeypatch, libraries):
    """Returns a function that makes CXX a compiler that runs `what` instead of compiling.

    Each call is noted in "calls".
    """

    def make(what: str, version: str = "fake 1.2.3 (x 4.5)"):
        script = tmp_path / "fake"
        script.write_text(f"""#!/bin/sh
output=
while [ $# -gt 0 ]; do case "$1" in
  --version) echo "{version}"; exit 0;;
  -E) echo "#define __AVX2__ 1"; echo "#define __tune_znver9__ 1"; exit 0;;
  -o) output="$2"; shift;;
esac; shift; done
echo once >> {tmp_path}/calls
libraries={libraries}
{what}
""")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return make


WORKS = 'cp "$libraries/works.so" "$output"'


def calls(tmp_path) -> int:
    return len((tmp_path / "calls").read_text().split()) if (tmp_path / "calls").exists() else 0


def again() -> str:
    """Returns the state that a new process would choose."""
    native._settle.cache_clear()
    return native.describe_state()
