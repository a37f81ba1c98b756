"""A pseudo terminal that keeps what is written to it."""

import contextlib
import os
import sys
import threading


class Terminal:
    """A terminal, and what it got."""

    def __init__(self):
        self._ours, theirs = os.openpty()
        self.stream = open(theirs, "w", encoding="utf-8", buffering=1)
        self._got = b""
        self._reader = threading.Thread(
            target=self._read, daemon=True
        )  # a full terminal would stop who writes
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux raises it when the other side is closed
            while got := os.read(self._ours, 65536):
                self._got += got

    def close(self) -> str:
        """Returns all that was written."""
        self.stream.close()
        self._reader.join(10)
        os.close(self._ours)
        return self._got.decode("utf-8")


@contextlib.contextmanager
def as_stderr(monkeypatch, kind: str = "xterm", columns: int = 100):
    """Makes a terminal standard error; yields a list that gets its output at the end."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", str(columns))  # else rich asks the terminal of the tests' process
    terminal, got = Terminal(), []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.stream)
        try:
            yield got
        finally:
            got.append(terminal.close())
