"""Runs the command `specdec` as a process: standard streams and signals before heavy imports.

Importing this module takes milliseconds. JAX and the command line, which take a second or more, are
imported once signals are handled. What imports make lives as long as the process, so the garbage
collector neither runs meanwhile nor reads it later.

SIGINT and SIGTERM end the process with one line and exit code 130 or 143: at once during imports,
afterwards as soon as Python can handle them, so that open files are closed. If Python cannot,
because XLA is compiling, the process ends after some seconds. A second signal ends it at once.
Commands that train save their state first and end themselves.
"""

import gc
import io
import os
import select
import signal
import sys
import threading
from typing import Any, NoReturn

_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

# Commands that handle signals themselves.
_TRAINING_COMMANDS = ("train", "train_heads", "train_eagle", "distill")

# Seconds after a signal in which the other commands must end.
_PATIENCE = 3.0

_returned = threading.Event()  # set after the command line's last message


def main() -> int:
    """Runs the command line; returns the exit code."""
    _open_standard_streams()
    _handle(_exit)
    gc.disable()
    from specdec_jax.commands import main as main_command

    _handle(_interrupt)
    if os.name != "nt" and "".join(sys.argv[1:2]) not in _TRAINING_COMMANDS:
        _watch()
    try:
        code = main_command.main()
    except KeyboardInterrupt as error:  # a signal arrived just before the command line returned
        _exit(error.args[0])
    _returned.set()
    if code > 1:
        os._exit(code)  # after an interrupted XLA call, Python's own exit may crash or print more
    _handle(signal.SIG_DFL)
    return code


def _open_standard_streams() -> None:
    """Opens the null device in place of each standard stream that is closed.

    Otherwise the next opened file would get the stream's number. Reading then returns no input,
    writing to standard output fails, as it should, and standard error is lost.
    """
    flags_of = {"stdin": os.O_RDONLY, "stdout": os.O_RDONLY, "stderr": os.O_WRONLY}
    for number, (name, flags) in enumerate(flags_of.items()):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number, which is this stream's
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    if os.name != "nt":  # Windows consoles have streams of their own
        bare = _StandardOutput(1, "w", closefd=False)
        unbuffered = getattr(sys.stdout, "write_through", False)  # as by python -u
        sys.stdout = io.TextIOWrapper(
            bare if unbuffered else io.BufferedWriter(bare),
            sys.stdout.encoding,
            sys.stdout.errors,
            line_buffering=bool(sys.stdout.line_buffering),
            write_through=unbuffered,
        )


class _StandardOutput(io.FileIO):
    """Standard output whose errors name it, as errors of a file opened by name do."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


def _handle(handler: Any) -> None:
    """Sets the handler of both signals, except of one that the process ignores."""
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's background job ignores SIGINT
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    """Raises KeyboardInterrupt with the signal; the next signal ends the process at once."""
    _handle(signal.SIG_DFL)
    raise KeyboardInterrupt(number)


def _exit(number: int, frame: Any = None) -> NoReturn:
    """Ends the process without Python's exit, and with one line unless the command has ended."""
    if not _returned.is_set():
        os.write(2, f"specdec: {_SIGNALS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def _watch() -> None:
    """Starts a thread that ends the process after a signal if the main thread does not.

    Python's C-level handler writes every signal to a pipe, from which the thread reads.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch():
        while (number := os.read(reader, 1)[0]) not in _SIGNALS:
            pass
        select.select([reader], [], [], _PATIENCE)  # until a second signal
        _exit(number)

    threading.Thread(target=watch, daemon=True).start()
