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
# Suffix of FFI targets by processor and flags, since a process can register a name only once.
_suffixes: dict[tuple[str, ...], str] = {}


@contextlib.contextmanager
def compiled_for(march: str, folder, *flags: str):
    """Within the block, uses kernels that were compiled for this processor, with more flags."""
    if march == "native" and not flags:
        yield
        return
    if (how := (march, *flags)) not in _suffixes:
        library, suffix = folder / "kernels.so", f"_{len(_suffixes)}"
        compiler = native._find_compiler()
        own = native._native_flags(compiler)[0] if march == "native" else [f"-march={march}"]
        options = [*native._FLAGS, *flags, *own, f"-I{jax.ffi.include_dir()}", "-o", library]
        subprocess.run([*compiler.command, *options, native._SOURCE], check=True, timeout=300)
        targets = {name + suffix: symbol for name, symbol in native.TARGETS.items()}
        cpu_selftest.register(str(library), targets)
        _suffixes[how] = suffix
    whole, suffix = jax.ffi.ffi_call, _suffixes[how]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.ffi,
            "ffi_call",
            lambda name, *rest, **more: whole(name + suffix, *rest, **more),
        )
        yield
