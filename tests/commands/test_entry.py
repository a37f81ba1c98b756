"""The command as a process: standard streams, and signals in every phase."""

import errno
import io
import os
import signal
import subprocess
import sys
import time

import pytest
from devices import SPECDEC, fill, small_disk

from specdec_jax.commands import entry, main

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="signals and closed streams are other things there"
)

# The command with a command line of the test's own instead of the package, which would take a
# second to import.
STUB = """
import atexit, hashlib, os, signal, sys, threading, time, types
from specdec_jax.commands import entry

PID, SIGINT, SIGTERM = os.getpid(), signal.SIGINT, signal.SIGTERM
entry._PATIENCE = float(sys.argv.pop(1))

def send(number, after):
    threading.Timer(after, os.kill, (PID, number)).start()

def compute(iterations=10**8):
    hashlib.pbkdf2_hmac("sha256", b"", b"", iterations)  # as a compilation, which sees no signals

class Package(types.ModuleType):
    @property
    def main(self):
        importing()
        return types.SimpleNamespace(main=main)

def importing():
    pass

def main():
    try:
        return run()
    except KeyboardInterrupt as error:
        print(f"specdec: {dict(entry._SIGNALS)[error.args[0]]}", file=sys.stderr)
        return 128 + error.args[0]

"""
END = """
sys.modules["specdec_jax"] = types.ModuleType("specdec_jax")
sys.modules["specdec_jax.commands"] = Package("specdec_jax.commands")
sys.exit(entry.main())
"""


def started(shell, *arguments):
    """A command that a shell starts, with a `trap` before it and redirections after it."""
    return ["sh", "-c", shell, sys.executable, *arguments]


def stub(body, *arguments, patience=0.3, shell='exec "$0" "$@"', **options):
    command = started(shell, "-c", STUB + body + END, str(patience), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    return done.returncode, done.stdout, done.stderr


INTERRUPTED, TERMINATED = (130, "", "specdec: interrupted\n"), (143, "", "specdec: terminated\n")
# A shell without job control starts what runs in the background, such as these tests, with SIGINT
# ignored, and whatever that starts would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
ENDS = {
    "while it imports": (
        "def importing(): os.kill(PID, SIGTERM); compute(10**4); print('on')",
        TERMINATED,
    ),
    "while it imports, of the keyboard": (
        "def importing(): os.kill(PID, SIGINT); compute(10**4); print('on')",
        INTERRUPTED,
    ),
    "while Python runs": ("def run(): os.kill(PID, SIGINT); time.sleep(9)", INTERRUPTED),
    "while it compiles": ("def run(): send(SIGTERM, 0.1); compute()", TERMINATED),
    "twice while it compiles": (
        "entry._PATIENCE = 99\ndef run(): send(SIGINT, 0.1); send(SIGTERM, 0.2); compute()",
        INTERRUPTED,
    ),
    "that someone swallows": (
        """
def run():
    send(SIGINT, 0.1)
    try:
        time.sleep(9)
    except KeyboardInterrupt:
        compute()""",
        INTERRUPTED,
    ),
    "when the interpreter would crash at its end": (
        "atexit.register(os.abort)\ndef run(): os.kill(PID, SIGTERM); time.sleep(9)",
        TERMINATED,
    ),
}


@pytest.mark.parametrize("when", ENDS)
def test_a_signal_ends_it(when):
    body, expected = ENDS[when]
    begin = time.monotonic()
    assert stub(body) == expected
    assert time.monotonic() - begin < 15


def test_a_second_signal_kills():
    code, out, err = stub(
        """
def run():
    try:
        os.kill(PID, SIGTERM)
        time.sleep(9)
    finally:
        os.kill(PID, SIGTERM)
        time.sleep(9)
""",
        patience=99,
    )
    assert (code, out, err) == (-signal.SIGTERM, "", "")


def test_training_ends_by_itself():
    """As `defer_signals` does: its own handler notes the signal and gives back the usual one."""
    body = """
def run():
    usual = signal.getsignal(SIGTERM)
    signal.signal(SIGTERM, lambda *_: signal.signal(SIGTERM, usual))
    send(SIGTERM, 0.1)
    time.sleep(1)
    print("saved", flush=True)
    return 130
"""
    assert stub(body, "train", patience=0.1) == (130, "saved\n", "")


def test_an_ignored_signal_stays_ignored():
    body = "def run(): os.kill(PID, SIGINT); compute(10**4); print('on'); return 0"
    assert stub(body, shell='trap \'\' INT; exec "$0" "$@"') == (0, "on\n", "")


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_command_is_ended(name, monkeypatch, capsys):
    class Options:
        __dataclass_fields__: dict = {}

    monkeypatch.setattr(
        main.Command,
        "load",
        lambda command: (Options, lambda *_: signal.raise_signal(signal.SIGTERM)),
    )
    usual = {number: signal.getsignal(number) for number in entry._SIGNALS}
    try:
        entry._handle(entry._interrupt)
        assert main.main([name, "--compilation_cache_dir="]) == 143
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    assert capsys.readouterr() == ("", "specdec: terminated\n")


# Standard streams.

CLOSED = """
def run():
    file = os.open(sys.argv[0] if os.path.exists(sys.argv[0]) else sys.executable, os.O_RDONLY)
    print(file > 2, file=sys.stderr)
    print(repr(sys.stdin.read()), file=sys.stderr)
    print("output")
    try:
        sys.stdout.flush()
    except OSError as error:
        print(error, file=sys.stderr)
        os._exit(2)
    return 0
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2), ()])
def test_closed_streams_are_not_taken_by_files(closed):
    redirections = "".join((" <&-", " >&-", " 2>&-")[number] for number in closed)
    code, out, err = stub(CLOSED, shell=f'exec "$0" "$@"{redirections}', stdin=subprocess.DEVNULL)
    assert code == (2 if 1 in closed else 0) and out == ("" if 1 in closed else "output\n")
    broken = "[Errno 9] Bad file descriptor: 'standard output'\n" * (1 in closed)
    assert err == ("" if 2 in closed else f"True\n''\n{broken}")


def process(*arguments, shell='exec "$0" "$@"', **options):
    command = started(shell, *SPECDEC[1:], *arguments)
    return subprocess.run(
        command, encoding="utf-8", env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=120, **options
    )


def test_closed_standard_output_is_one_line():
    done = process("--version", shell='exec "$0" "$@" >&-', stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        2,
        "specdec: error: [Errno 9] Bad file descriptor: 'standard output'\n",
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_is_no_traceback(stream):
    reader, writer = os.pipe()
    os.close(reader)
    other = "stderr" if stream == "stdout" else "stdout"
    done = process(
        "--version" if stream == "stdout" else "nonsense",
        **{stream: writer, other: subprocess.PIPE},
    )
    os.close(writer)
    assert done.returncode == (1 if stream == "stdout" else 2) and not getattr(done, other)


def test_an_error_is_reported_though_the_reader_has_gone(monkeypatch, capsys):
    """What went before it into the buffer of standard output is lost; the reason is not."""

    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe", "standard output")

        def fileno(self):
            return os.open(os.devnull, os.O_WRONLY)

    def failing(argv):
        print("something")
        raise ValueError("the real reason")

    monkeypatch.setattr(main, "_main", failing)
    monkeypatch.setattr(sys, "stdout", Gone())
    assert main.main([]) == 2 and capsys.readouterr().err == "specdec: error: the real reason\n"


@pytest.mark.parametrize("unbuffered", [True, False])
def test_output_comes_at_once_where_python_is_unbuffered(unbuffered):
    body = "def run():\n  print('first'); os.write(1, b'second\\n'); return 0"
    _, out, _ = stub(body, env=os.environ | {"PYTHONUNBUFFERED": "1" * unbuffered})
    assert out.split() == (["first", "second"] if unbuffered else ["second", "first"])


@pytest.mark.parametrize("module", ["specdec_jax", "specdec_jax.commands.main"])
def test_modules_are_the_command_too(module, tmp_path):
    """As installed: not out of a checkout that happens to be the working directory."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and done.stdout.startswith("specdec ")


def test_overview_and_unknown_commands_need_no_jax():
    """Importing JAX takes a second."""
    program = (
        "import sys; from specdec_jax.commands.main import main;"
        "codes = [main([argument]) for argument in ('--help', '--version', 'frobnicate')];"
        "assert codes == [0, 0, 2] and not {'jax', 'numpy'} & {*sys.modules}"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_standard_output_on_a_full_disk_is_one_line(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        with open(disk / "out", "w") as out:
            fill(disk)
            done = process("--version", stdout=out, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        2,
        "specdec: error: [Errno 28] No space left on device: 'standard output'\n",
    )
