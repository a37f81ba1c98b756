"""Runs the command `specdec`: standard streams and signals first, then the package, which takes a
second to import.

SIGINT and SIGTERM end the process with one line and exit code 130 or 143. They end it at once while
the package is imported. Afterwards they do so as soon as Python can handle them, so that open files
are closed, and after some seconds in any case, even in the midst of a compilation, which Python
cannot interrupt. A second signal ends the process at once. Training ends by itself, when its step
is saved.

The module is installed as `specdec_main`, outside the package (see pyproject.toml), since importing
anything inside the package imports all of it.
"""

import io
import os
import select
import signal
import sys
import threading
from typing import NoReturn

_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

# Commands that handle signals themselves.
_TRAINING = ("train", "train_heads", "distill")

# Seconds after a signal in which the other commands must end.
_PATIENCE = 3.0

_returned = threading.Event()  # set when the command line has printed its last message


def main() -> int:
    """Runs the command line; returns the exit code."""
    _open_standard_streams()
    _handle(_exit)
    from specdec_jax.commands import main as main_command

    _handle(_interrupt)
    if os.name != "nt" and not set(_TRAINING) & set(sys.argv[1:2]):
        _watch()
    try:
        code = main_command.main()
    except (
        KeyboardInterrupt
    ) as error:  # from a signal that came while the command line was about to return
        _exit(error.args[0])
    _returned.set()
    if code > 1:
        os._exit(
            code
        )  # after an interrupted call of XLA, Python's own exit may crash or print more
    _handle(signal.SIG_DFL)
    return code


def _open_standard_streams() -> None:
    """Opens a file in place of each standard stream that is closed; otherwise the next opened file
    would get its number.

    Reading then finds no input; writing to standard output fails, as it should; what goes to
    standard error is lost.
    """
    for number, name, flags in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_RDONLY),
        (2, "stderr", os.O_WRONLY),
    ):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number, which is this stream's
            setattr(
                sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False)
            )
    if os.name != "nt":  # Windows consoles have streams of their own
        bare, unbuffered = (
            _StandardOutput(1, "w", closefd=False),
            getattr(sys.stdout, "write_through", False),
        )  # as by python -u
        sys.stdout = io.TextIOWrapper(
            bare if unbuffered else io.BufferedWriter(bare),
            sys.stdout.encoding,
            sys.stdout.errors,
            line_buffering=bool(sys.stdout.line_buffering),
            write_through=unbuffered,
        )


class _StandardOutput(io.FileIO):
    """Standard output whose errors name it, as errors of a file opened by name do."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


def _handle(handler) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's background job ignores SIGINT
            signal.signal(number, handler)


def _interrupt(number, frame) -> None:
    _handle(signal.SIG_DFL)
    raise KeyboardInterrupt(number)


def _exit(number, frame=None) -> NoReturn:
    if not _returned.is_set():
        os.write(2, f"specdec: {_SIGNALS[number]}\n".encode())
    os._exit(128 + number)


def _watch() -> None:
    """Starts a thread that ends the process if the main thread does not.

    It learns of every signal through a pipe to which the system's own handler writes.
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
