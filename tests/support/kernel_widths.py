"""Compiles the CPU's kernels as other processors would have them, for tests that run on each."""

import contextlib
import os
import platform
import subprocess

import jax
import pytest

from specdec_jax.backends.cpu import native
from specdec_jax.backends.cpu import selftest as cpu_selftest

# Kernels for this processor's own vectors, and for vectors of 4 numbers. SPECDEC_TEST_MARCH adds
# others that this processor can run, by name: "haswell sandybridge".
NARROW = ["x86-64"] if platform.machine() == "x86_64" else []
WIDTHS = ["native", *NARROW, *os.environ.get("SPECDEC_TEST_MARCH", "").split()]
_suffixes: dict[
    str, str
] = {}  # suffix of FFI targets by processor, since a process can register a name only once


@contextlib.contextmanager
def compiled_for(march: str, folder):
    """Within the block, uses kernels that were compiled for this processor."""
    if march == "native":
        yield
        return
    if march not in _suffixes:
        library, source = folder / f"{march}.so", native._SOURCE
        flags = [*native._FLAGS, f"-march={march}", f"-I{jax.ffi.include_dir()}", "-o", library]
        subprocess.run([*native._find_compiler().command, *flags, source], check=True, timeout=120)
        cpu_selftest.register(
            str(library), {f"{name}_{march}": symbol for name, symbol in native.TARGETS.items()}
        )
        _suffixes[march] = f"_{march}"
    whole = jax.ffi.ffi_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.ffi,
            "ffi_call",
            lambda name, *rest, **more: whole(name + _suffixes[march], *rest, **more),
        )
        yield
