"""The CPU's own kernels: compiles `native.cc` at first use with the system's C++ compiler.

The library lies in the user's cache under a name made of all that it depends on, processor
included, so that one made for another machine, jaxlib or compiler is never loaded. A process of its
own tries it first (`selftest.py`), since a faulty library may end the process that loads it. The
result, a failure too, is recorded in a file beside it.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jaxlib

from specdec_jax.backends.cpu import selftest
from specdec_jax.files import user_cache
from specdec_jax.files.writing import write_file

# FFI target -> symbol of its handler in the library. Each needs a case in `selftest.check`.
TARGETS = {
    "specdec_product_f32": "SpecdecProductF32",
    "specdec_product_s8": "SpecdecProductS8",
    "specdec_product_w8a8": "SpecdecProductW8A8",
    "specdec_keys_values_f32": "SpecdecKeysValuesF32",
    "specdec_keys_values_s8": "SpecdecKeysValuesS8",
    "specdec_keys_values_w8a8": "SpecdecKeysValuesW8A8",
    "specdec_rows": "SpecdecRows",
    "specdec_columns": "SpecdecColumns",
    "specdec_norm": "SpecdecNorm",
    "specdec_log_sums": "SpecdecLogSums",
    "specdec_head_f32": "SpecdecHeadF32",
    "specdec_head_s8": "SpecdecHeadS8",
    "specdec_head_w8a8": "SpecdecHeadW8A8",
    "specdec_angles": "SpecdecAngles",
    "specdec_heads": "SpecdecHeads",
    "specdec_self_attention": "SpecdecSelfAttention",
    "specdec_node_attention": "SpecdecNodeAttention",
    "specdec_move": "SpecdecMove",
    "specdec_put": "SpecdecPut",
    "specdec_cross_attention": "SpecdecCrossAttention",
    "specdec_encoder_attention": "SpecdecEncoderAttention",
}

SETTING = "SPECDEC_KERNEL"  # environment variable: "off" or "rebuild"
_SOURCE = pathlib.Path(__file__).with_name("native.cc")
_PROBE = pathlib.Path(selftest.__file__)
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-w")
# Flags for this processor, of which the first that the compiler accepts are used: some compilers
# for ARM know only the third. For some processors GCC uses no fused multiply-adds in a loop with a
# single sum, unless told so: that sum would have other bits than several computed together.
_NATIVE = (
    ("-march=native", "--param=avoid-fma-max-bits=0"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
_COMPILE_SECONDS, _PROBE_SECONDS, _ASK_SECONDS = 400, 120, 20  # on a busy machine too
# Seconds that a failure is remembered: a full disk or memory, or a slow machine, may have been its
# cause.
_FORGOTTEN = 86_400
# Macros that a compiler defines for instructions it may use, widest first.
_VECTORS = {
    "__AMX_INT8__": "avx512, amx",
    "__AVX512F__": "avx512",
    "__AVX2__": "avx2",
    "__AVX__": "avx",
    "__SSE2__": "sse2",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_NEON": "neon",
}


def is_available() -> bool:
    """Returns whether the kernels are loaded and `TARGETS` registered; never raises.

    The first call in a process loads them; the first with this package, jaxlib, compiler and
    processor compiles them, which takes seconds. A line on standard error says so, or why there are
    no kernels.
    """
    return _has_settled().library is not None


def describe_state() -> str:
    """Returns a line for people that says which library is used, or why none is.

    Loads it as `is_available` does.
    """
    return _has_settled().line


def describe_origin() -> str | None:
    """Returns how the library in use was made, without a path; None without one.

    Example: "built with g++ 12.2 for znver4 (avx512)".
    """
    return _has_settled().origin


def library_digest() -> str | None:
    """Returns a digest of the source, compiler, processor and contents of the library in use.

    None without one.
    """
    library = _has_settled().library
    return library and pathlib.Path(library).stem


class _State(NamedTuple):
    """The library of a process: its path and how it was made, or None, and a line about it."""

    library: str | None
    origin: str | None
    line: str


class _Library(NamedTuple):
    """A library that has been tried: its path, and how it was made, in words."""

    path: str
    origin: str


class _Compiler(NamedTuple):
    """A compiler: the words of its command, its name, and the first line of its version."""

    command: tuple[str, ...]
    name: str
    version: str


class _Unusable(Exception):
    """The reason why there are no kernels."""


class _Failed(_Unusable):
    """A lasting failure of the compiler or of the library that it made; it is recorded."""


_lock = threading.RLock()


def _has_settled() -> _State:
    with _lock:
        return _settle()


@functools.cache
def _settle() -> _State:
    """Loads the library; called once in a process, since a name can be registered once."""
    try:
        found = _find()
        _register(found.path)
        return _State(found.path, found.origin, f"kernel: {found.path}, {found.origin}")
    except _Unusable as error:
        reason = str(error)
    except OSError as error:
        reason = f"cannot use the cache: {error}"
    except Exception as error:  # whatever it is, there is decoding without kernels
        reason = f"{type(error).__name__}: {error}"
    line = " ".join(f"kernel: not used: {reason}".split())
    if os.environ.get(SETTING) != "off":
        _say(f"specdec_jax: {line}")
    return _State(None, None, line)


def _register(library: str) -> None:
    try:
        selftest.register(library, TARGETS)
    except OSError as error:
        raise _Unusable(f"cannot be loaded: {error}; {SETTING}=rebuild compiles it anew") from error


def _say(line: str) -> None:
    # Standard error may be closed, or None.
    with contextlib.suppress(OSError, AttributeError, ValueError):
        print(line, file=sys.stderr, flush=True)


# Finding and making.


def _find() -> _Library:
    """Returns the library in the cache, which is made first if it is missing.

    Raises:
      _Unusable: there can be no library.
      OSError, ValueError: the cache cannot be used.
    """
    setting = os.environ.get(SETTING, "")
    if setting == "off":
        raise _Unusable(f"{SETTING}=off")
    if setting not in ("", "rebuild"):
        raise _Unusable(f"{SETTING}={setting}: expected off or rebuild")
    if os.name != "posix":
        raise _Unusable(f"not built on {platform.system()}")
    source, compiler = _SOURCE.read_bytes(), _find_compiler()
    folder, key = user_cache.private_folder("kernel"), _library_key(source, compiler)
    record = folder / f"{key}.json"
    found = None if setting else _read_recorded_library(record)
    if found is None:
        try:
            found = _build(folder, key, source, compiler)
        except _Failed as error:
            kept = None  # a library that was there, or that another process has made meanwhile
            with contextlib.suppress(_Unusable):
                kept = _read_recorded_library(record)
            if kept is not None and not setting:
                return kept
            if kept is None:
                with contextlib.suppress(OSError):
                    write_file(record, json.dumps({"failed": str(error)}))
            raise
        content = {"library": os.path.basename(found.path), "origin": found.origin}
        write_file(record, json.dumps(content))
    return found


def _library_key(source: bytes, compiler: _Compiler) -> str:
    """Returns a digest of all that a library depends on, with which its name begins."""
    calls = *compiler.command, os.path.realpath(compiler.command[0]), compiler.version
    machine = platform.system(), platform.machine(), _processor_features(), _libc_version()
    here = _PROBE.read_bytes(), jaxlib.__version__, _FLAGS, _NATIVE, TARGETS
    return _digest(repr([source, calls, machine, here]).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _processor_features() -> str:
    """Returns a text that differs between processors that get different instructions."""
    if sys.platform == "darwin":
        return _run(["sysctl", "-n", "machdep.cpu.brand_string"], _ASK_SECONDS).output
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    named = ("flags", "Features", "CPU implementer", "CPU part")
    lines = {line for line in text.splitlines() if line.partition(":")[0].strip() in named}
    return "\n".join(sorted(lines))


def _libc_version() -> str | None:
    """Returns the version of the C library, None if unknown: an older one may not load ours."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        return None


def _find_compiler() -> _Compiler:
    """Finds the compiler: CXX, or the first of `_COMPILERS` on PATH.

    Raises `_Unusable` without one.
    """
    named = os.environ.get("CXX", "").strip()
    for words in [shlex.split(named)] if named else [[name] for name in _COMPILERS]:
        path = shutil.which(words[0])
        if path is None:
            continue
        command = (os.path.abspath(path), *words[1:])
        last = next((word for word in reversed(words) if not word.startswith("-")), words[0])
        name = os.path.basename(last)
        asked = _run([*command, "--version"], _ASK_SECONDS)
        if asked.code != 0:
            raise _Unusable(f"{named or name} --version {_describe_failure(asked, _ASK_SECONDS)}")
        return _Compiler(command, name, asked.output.strip().partition("\n")[0])
    if named:
        raise _Unusable(f"no C++ compiler found: CXX={named}")
    raise _Unusable(f"no C++ compiler found ({', '.join(_COMPILERS)} on PATH, or CXX)")


def _read_recorded_library(record: pathlib.Path) -> _Library | None:
    """Returns the library of a record, None if it is missing or damaged.

    Raises `_Unusable` for a recorded failure.
    """
    try:
        content = json.loads(record.read_bytes())
        if "failed" in content:
            if time.time() - record.stat().st_mtime > _FORGOTTEN:
                return None
            again = f"(remembered for a day; {SETTING}=rebuild tries again)"
            raise _Unusable(f"{content['failed']} {again}")
        path = record.with_name(os.path.basename(content["library"]))
        whole = path.name == _library_name(record.stem, path.read_bytes())
        return _Library(str(path), str(content["origin"])) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _library_name(key: str, content: bytes) -> str:
    """Returns the name of a library, made of its contents too.

    So two processes may make it at once, and a file that was cut short is noticed.
    """
    return f"{key}-{_digest(content)}.so"


def _build(folder: pathlib.Path, key: str, source: bytes, compiler: _Compiler) -> _Library:
    """Compiles, tries and keeps the library.

    Raises:
      _Failed: it cannot be compiled, or does not work.
      OSError: it cannot be written.
    """
    with user_cache.scratch_folder(folder) as temporary:
        _say("specdec_jax: compiling its CPU kernel (once, a few seconds) ...")
        made = temporary / "kernel.so"
        native, target = _native_flags(compiler)
        flags = *_FLAGS, *native, f"-I{jax.ffi.include_dir()}"
        command = [*compiler.command, *flags, "-o", str(made), "-x", "c++", "-"]
        ended = _run(command, _COMPILE_SECONDS, source)
        if ended.code != 0 or not made.is_file():
            raise _Failed(f"{compiler.name} {_describe_failure(ended, _COMPILE_SECONDS)}")
        _try(made)
        content = made.read_bytes()
        path = folder / _library_name(key, content)
        write_file(path, content)
    number = re.search(r"\d+\.\d+", re.sub(r"\(.*?\)", "", compiler.version))
    name = f"{compiler.name} {number[0]}" if number else compiler.name
    return _Library(str(path), f"built with {name} for {target}")


def _native_flags(compiler: _Compiler) -> tuple[tuple[str, ...], str]:
    """Returns the flags for this processor, and its name for the compiler: "znver4 (avx512)"."""
    for flags in _NATIVE:
        asked = _run([*compiler.command, *flags, "-dM", "-E", "-x", "c++", "-"], _ASK_SECONDS)
        if asked.code == 0:
            break
    macros = {line.split()[1] for line in asked.output.splitlines() if line.startswith("#define ")}
    tuned = sorted(re.findall(r"\b__tune_(\w+?)__\b", " ".join(macros)))
    vectors = [name for macro, name in _VECTORS.items() if macro in macros] or ["no vectors known"]
    return flags, f"{tuned[0] if tuned and flags else platform.machine()} ({vectors[0]})"


def _try(library: pathlib.Path) -> None:
    """Runs the library's kernels in a process of its own; raises `_Failed` if they do not work."""
    if not sys.executable:
        raise _Unusable("no Python interpreter is known to try it with")
    # The process finds the same packages as this one, but sees none of its settings for Python and
    # JAX.
    settings = dict.fromkeys(name for name in os.environ if name.startswith(("JAX_", "XLA_")))
    asked = json.dumps([str(library), TARGETS, [path for path in sys.path if path]])
    command = [sys.executable, "-I", str(_PROBE), asked]
    ended = _run(command, _PROBE_SECONDS, environment={**settings, "JAX_PLATFORMS": "cpu"})
    if ended.code != 0 or ended.output.strip() != "works":
        why = _describe_failure(ended, _PROBE_SECONDS, last=True).replace(
            str(library), library.name
        )
        raise _Failed(f"the self-test {why}")


# Other processes.


class _Ended(NamedTuple):
    """The end of a process: its exit status, below 0 for a signal, None where it took too long."""

    code: int | None
    output: str
    error: str


def _run(
    command: Sequence[str],
    seconds: float,
    given: bytes = b"",
    environment: Mapping[str, str | None] | None = None,
) -> _Ended:
    """Runs a command.

    It ends with all its children when its time is over or this process is interrupted.

    Args:
      seconds: its time.
      given: its standard input.
      environment: changes of the environment variables that it sees; None removes one.
    """
    settings = {**os.environ, "LC_ALL": "C", **(environment or {})}
    env = {name: value for name, value in settings.items() if value is not None}
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=env
        )
    except OSError as error:  # 126 is also a shell's status for what cannot be started
        return _Ended(126, "", str(error))
    with child:
        try:
            output, said = child.communicate(given, timeout=seconds)
            code = child.returncode
        except BaseException as interruption:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            if not isinstance(interruption, subprocess.TimeoutExpired):
                raise
            output, said = child.communicate()
            code = None
    return _Ended(code, output.decode(errors="replace"), said.decode(errors="replace"))


def _describe_failure(ended: _Ended, seconds: float, last: bool = False) -> str:
    """Returns how a process failed, with a line of its standard error.

    That is the first with "error", or the `last` one.
    """
    if ended.code is None:
        return f"took more than {seconds} seconds"
    if ended.code < 0:
        return f"died with signal {-ended.code}"
    lines = [line.strip() for line in ended.error.splitlines() if line.strip()]
    if last:
        lines.reverse()
    said = next((line for line in lines if last or "error" in line), lines[0] if lines else "")
    return f"failed: {said[:300] or f'exit status {ended.code}'}"
