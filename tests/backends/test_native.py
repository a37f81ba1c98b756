"""Tests the CPU's kernels as a library: no fault in it ends the process.

Compilers are scripts that answer as the real one and copy a library that was made once.
"""

import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import tomllib

import libraries
import numpy as np
import pytest
import tiers
from devices import names
from libraries import REAL, WORKS, again, calls

from specdec_jax.analysis import machine as analysis_machine
from specdec_jax.backends.cpu import native
from specdec_jax.backends.cpu import selftest as cpu_selftest

needs_compiler = pytest.mark.skipif(REAL is None or os.name != "posix", reason="no C++ compiler")

settings, libraries, compiler = libraries.settings, libraries.libraries, libraries.compiler
TRY = (
    "from specdec_jax.backends.cpu import native; "
    "print(native.is_available(), native.is_available()); print(native.describe_state())"
)


def kernels(tmp_path) -> list[str]:
    return names(tmp_path / "cache/specdec_jax/kernel")


# What works.


@pytest.mark.slow
@needs_compiler
def test_two_processes_at_once(tmp_path, compiler, libraries):
    """In processes of their own: both compile, slowly, and both use the result."""
    compiler(f"sleep 1; {WORKS}")

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", TRY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    both = [start() for _ in range(2)]
    ended = [process.communicate(timeout=100) for process in both]
    for out, err in ended:
        assert re.fullmatch(
            r"True True\nkernel: \S+\.so, built with fake 1\.2 for znver9 \(avx2\)\n", out
        ), err
        assert err == "specdec_jax: compiling its CPU kernel (once, a few seconds) ...\n"
    assert ended[0][0] == ended[1][0] and calls(tmp_path) == 2
    library, record = sorted(kernels(tmp_path), key=len, reverse=True)
    folder = tmp_path / "cache/specdec_jax/kernel"
    assert (
        library.startswith(pathlib.Path(record).stem)
        and stat.S_IMODE(folder.stat().st_mode) == 0o700
    )
    assert (folder / library).read_bytes() == (libraries / "works.so").read_bytes()


@needs_compiler
def test_compiled_once(tmp_path, compiler, capsys, settings):
    compiler(WORKS)
    assert (
        native.is_available()
        and native.is_available()
        and native.describe_origin() == "built with fake 1.2 for znver9 (avx2)"
    )
    first = native.describe_state()
    assert (
        again() == first and calls(tmp_path) == 1 and len(set(settings)) == 1 and len(settings) == 2
    )
    assert capsys.readouterr().err.count("\n") == 1 and settings[0] in first
    done = subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({settings[0]!r})"])
    assert done.returncode == 0


@pytest.mark.slow
@needs_compiler
def test_threads_share_one(tmp_path, compiler, settings):
    compiler(f"sleep 0.3; {WORKS}")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(native.is_available())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4 and calls(tmp_path) == 1 and len(settings) == 1


@pytest.mark.slow
@needs_compiler
def test_records_name_the_kernel_and_no_path(tmp_path, compiler, monkeypatch):
    compiler(WORKS)
    machine = analysis_machine.describe_machine()
    assert machine["kernel"] == "built with fake 1.2 for znver9 (avx2)" and str(
        tmp_path
    ) not in repr(machine)
    assert analysis_machine.describe_hardware(machine).endswith(
        ", kernel: built with fake 1.2 for znver9 (avx2)"
    )
    monkeypatch.setenv(native.SETTING, "off")
    again()
    assert analysis_machine.describe_machine()["kernel"] == "none"
    del machine["kernel"]  # an older record
    assert analysis_machine.describe_hardware(machine).endswith(" cores")
    assert analysis_machine.describe_hardware(machine | {"device": "gpu: A, 2"}).endswith(
        " cores, gpu: A, 2"
    )


def test_the_source_is_installed():
    described = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    if not described.is_file():
        pytest.skip("no checkout here")
    build = tomllib.loads(described.read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    source = native._SOURCE.relative_to(native._SOURCE.parents[3])
    assert source.parts[0] in wheel["packages"]
    assert not [pattern for pattern in wheel["exclude"] if source.match(pattern)]


@pytest.mark.slow
@needs_compiler
def test_rebuild_and_off(tmp_path, compiler, monkeypatch, capsys):
    compiler(WORKS)
    monkeypatch.setenv(native.SETTING, "off")
    assert again() == "kernel: not used: SPECDEC_KERNEL=off" and not native.is_available()
    assert (
        calls(tmp_path) == 0 and not (tmp_path / "cache").exists() and capsys.readouterr().err == ""
    )
    monkeypatch.setenv(native.SETTING, "of")
    assert again() == "kernel: not used: SPECDEC_KERNEL=of: expected off or rebuild"
    assert (
        capsys.readouterr().err == f"specdec_jax: {native.describe_state()}\n"
        and calls(tmp_path) == 0
    )
    for setting, expected in (("", 1), ("rebuild", 2), ("", 2)):
        monkeypatch.setenv(native.SETTING, setting)
        assert (
            again().endswith(".so, built with fake 1.2 for znver9 (avx2)")
            and calls(tmp_path) == expected
        )


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("damage", ["cut short", "foreign", "gone", "no record", "record"])
def test_damaged_files(tmp_path, compiler, libraries, damage):
    compiler(WORKS)
    before = again()
    record, library = (next((tmp_path / "cache").rglob(pattern)) for pattern in ("*.json", "*.so"))
    if damage == "cut short":
        library.write_bytes(library.read_bytes()[:5000])
    elif damage == "foreign":
        shutil.copy(libraries / "crashes.so", library)
    elif damage == "gone":
        library.unlink()
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text('{"library": 5')
    assert again() == before and calls(tmp_path) == 2
    assert library.read_bytes() == (libraries / "works.so").read_bytes()


@pytest.mark.slow
@needs_compiler
def test_a_library_of_another_kind_is_left_alone(tmp_path, compiler, monkeypatch):
    """One more for each thing that its name is made of; the first is found again."""
    script = compiler(WORKS)
    first, before = again(), set(kernels(tmp_path))
    source = tmp_path / "native.cc"
    source.write_bytes(native._SOURCE.read_bytes() + b"\n")
    other = tmp_path / "other"
    shutil.copy(script, other)
    changes = {
        "source": lambda patch: patch.setattr(native, "_SOURCE", source),
        "jaxlib": lambda patch: patch.setattr(native.jaxlib, "__version__", "0.0.1"),
        "compiler's version": lambda patch: compiler(WORKS, version="fake 1.2.4"),
        "compiler's place": lambda patch: patch.setenv("CXX", str(other)),
        "compiler's flags": lambda patch: patch.setenv("CXX", f"{script} -g"),
        "flags": lambda patch: patch.setattr(native, "_FLAGS", (*native._FLAGS, "-g")),
        "processor": lambda patch: patch.setattr(
            native, "_processor_features", lambda: "flags: none"
        ),
        "targets": lambda patch: patch.setattr(
            native, "TARGETS", dict(reversed(native.TARGETS.items()))
        ),
    }
    for number, (what, change) in enumerate(changes.items(), 2):
        with monkeypatch.context() as patch:
            change(patch)
            assert ".so, built with" in again() and calls(tmp_path) == number, what
        compiler(WORKS)
    assert again() == first and calls(tmp_path) == number and before < set(kernels(tmp_path))
    assert len(kernels(tmp_path)) == 2 * number


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="the system has no /proc/cpuinfo")
def test_features_are_the_processor_s():
    words = set(native._processor_features().split())
    assert words & {"sse2", "asimd", "neon"} and not {"MHz", "bogomips"} & words


@needs_compiler
def test_compilers_that_know_no_native(tmp_path, compiler):
    """As some for ARM, of which some know another word for it."""
    script = compiler("")
    reject = 'case " $* " in *" -march=native "*) exit 1;; esac\n'
    script.write_text(script.read_text().replace("output=\n", reject + "output=\n", 1))
    assert native._native_flags(native._find_compiler())[0] == ("-mcpu=native",)
    script.write_text(script.read_text().replace(" -march=native ", ' -m"*"=native '))
    assert native._native_flags(native._find_compiler()) == (
        (),
        f"{native.platform.machine()} (avx2)",
    )


# What does not.


@needs_compiler
@tiers.parametrize(
    ("what", "reason"),
    [
        (
            'echo "a note" >&2; echo "x.cc:5: error: no such thing" >&2; exit 1',
            "fake failed: x.cc:5: error: no such thing",
        ),
        ("exit 3", "fake failed: exit status 3"),
        ("kill -9 $$", "fake died with signal 9"),
        ("exit 0", "fake failed: exit status 0"),
        ('cp "$libraries/crashes.so" "$output"', "the self-test died with signal 6"),
        ('echo none > "$output"', r"the self-test failed: OSError: kernel\.so: .*"),
        ('cp "$libraries/wrong.so" "$output"', "the self-test failed: .*"),
    ],
    first=2,
)
def test_failures_are_reported_and_remembered(
    tmp_path, compiler, capsys, monkeypatch, settings, what, reason
):
    compiler(what)
    assert not native.is_available() and native.describe_origin() is None and settings == []
    assert re.fullmatch(f"kernel: not used: {reason}", native.describe_state())
    assert capsys.readouterr().err.splitlines()[1:] == [f"specdec_jax: {native.describe_state()}"]
    state = native.describe_state()
    assert (
        again() == f"{state} (remembered for a day; SPECDEC_KERNEL=rebuild tries again)"
        and calls(tmp_path) == 1
    )
    assert names(tmp_path) == ["cache", "calls", "fake"] and [
        name[-5:] for name in kernels(tmp_path)
    ] == [".json"]
    monkeypatch.setenv(native.SETTING, "rebuild")
    assert again() == state and calls(tmp_path) == 2
    monkeypatch.delenv(native.SETTING)
    record = next((tmp_path / "cache").rglob("*.json"))
    os.utime(record, (time.time() - 2 * native._FORGOTTEN,) * 2)
    assert again() == state and calls(tmp_path) == 3


@needs_compiler
def test_a_failure_leaves_the_library_that_another_process_made(
    tmp_path, compiler, monkeypatch, settings
):
    compiler(WORKS)
    assert native.is_available() and calls(tmp_path) == 1
    record = next((tmp_path / "cache").rglob("*.json"))
    kept, state = record.read_text(), native.describe_state()
    find, compiled = native._find, []

    def read(path, ask=native._read_recorded_library):
        """Finds nothing before the compilation."""
        compiled.append(path)
        return None if len(compiled) == 1 else ask(path)

    def fail(*_):
        raise native._Failed("no memory")

    monkeypatch.setattr(native, "_build", fail)
    with monkeypatch.context() as patch:
        patch.setattr(native, "_read_recorded_library", read)
        assert find().path in state and len(compiled) == 2
    monkeypatch.setenv(native.SETTING, "rebuild")
    with pytest.raises(native._Failed, match="no memory"):
        find()
    assert record.read_text() == kept
    record.unlink()
    with pytest.raises(native._Failed, match="no memory"):
        find()
    assert "no memory" in record.read_text()


@pytest.mark.slow
@needs_compiler
def test_numbers_that_are_off(libraries):
    """A library whose handlers are exchanged loads, and does not give the products."""
    swapped = dict(zip(native.TARGETS, reversed(native.TARGETS.values()), strict=True))
    asked = native.json.dumps([str(libraries / "works.so"), swapped, sys.path])
    ended = native._run(
        [sys.executable, "-I", cpu_selftest.__file__, asked],
        60,
        environment={"JAX_PLATFORMS": "cpu"},
    )
    assert ended.code == 1 and ended.output == "" and ended.error.count("\n") == 1, ended.error
    code = (
        "import numpy as np; from specdec_jax.backends.cpu import selftest; "
        "selftest.register(*{}); selftest._TOLERANCE = 1e-12; selftest.check()"
    )
    arguments = (str(libraries / "works.so"), native.TARGETS)
    ended = native._run([sys.executable, "-c", code.format(arguments)], 60)
    assert ended.code == 1 and "got outputs that are off by" in ended.error


def test_a_nan_in_a_later_result_is_an_error_of_the_library():
    sound, bad = np.ones(3), np.array([1, np.nan, 1])
    assert cpu_selftest._measure_error([sound, sound + 0.5], [sound, sound]) == 0.5
    for got in ([sound, bad], [bad, sound]):
        assert np.isnan(cpu_selftest._measure_error(got, [sound, sound]))


@pytest.mark.slow
@needs_compiler
def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path, compiler, monkeypatch):
    compiler(f"(sleep 3; echo late > {tmp_path}/late) & wait")
    monkeypatch.setattr(native, "_COMPILE_SECONDS", 0.3)
    start = time.monotonic()
    assert (
        again() == "kernel: not used: fake took more than 0.3 seconds"
        and time.monotonic() - start < 2.5
    )
    time.sleep(3.2 - (time.monotonic() - start))
    assert not (tmp_path / "late").exists()


def test_an_interruption_ends_what_was_started(monkeypatch):
    def interrupt(*arguments, **named):
        raise KeyboardInterrupt

    started = []
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    whole = subprocess.Popen.__init__
    monkeypatch.setattr(
        subprocess.Popen,
        "__init__",
        lambda self, *a, **k: (whole(self, *a, **k), started.append(self))[0],
    )
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        native._run(["sleep", "30"], 60)
    assert started[0].wait() == -9 and time.monotonic() - start < 10


def test_no_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert again() == "kernel: not used: no C++ compiler found (g++, clang++, c++ on PATH, or CXX)"
    assert capsys.readouterr().err == f"specdec_jax: {native.describe_state()}\n"
    monkeypatch.setenv("CXX", "some-compiler -x")
    assert again() == "kernel: not used: no C++ compiler found: CXX=some-compiler -x"
    script = tmp_path / "some-compiler"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    assert again().startswith("kernel: not used: some-compiler -x --version failed: [Errno 2] ")
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_every_failure_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(native, "_library_key", lambda *arguments: {}["no\nsuch"])
    assert (
        not native.is_available()
        and native.describe_state() == r"kernel: not used: KeyError: 'no\nsuch'"
    )
    monkeypatch.setattr(sys, "stderr", None)
    assert not native.is_available() and again().startswith("kernel: not used: KeyError")


@pytest.mark.slow
@needs_compiler
def test_a_library_that_does_not_load_here(compiler, monkeypatch):
    def reject(library, targets):
        raise OSError("version not found")

    compiler(WORKS)
    monkeypatch.setattr(native.selftest, "register", reject)
    reason = "cannot be loaded: version not found; SPECDEC_KERNEL=rebuild compiles it anew"
    assert again() == f"kernel: not used: {reason}"
