"""Copies a journal to a store while it grows, in parts: a store's files cannot grow."""

import contextlib
import re
import secrets
import threading
import time
from typing import BinaryIO

from specdec_jax.files import user_cache
from specdec_jax.files.places import RemotePath

_PART = re.compile(r"([0-9a-f]{16})-(\d{6})\.jsonl")
# Seconds between two parts: at first the least, then a hundredth of the run so far, up to the most.
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 30.0
_ABANDONED = 30 * 86_400  # seconds after which nobody resumes a journal


class RemoteParts:
    """The parts of a journal in `<output>.partial/`, which together are the journal.

    The journal itself is a file in the user's cache folder. A kill loses nothing that is in it; the
    loss of the whole machine loses what is in no part yet. Parts hold whole lines.

    Attributes:
      name: URL of the folder of parts.
      path: path of the journal on this machine.
    """

    def __init__(self, output: RemotePath):
        """Finds the parts of an earlier run.

        Raises:
          ValueError: something else is there, or a part is missing.
        """
        self._folder = output.with_name(f"{output.name}.partial")
        self.name = str(self._folder)
        found = sorted(path.name for path in self._folder.iterdir())
        parsed = [match.groups() for match in map(_PART.fullmatch, found) if match]
        run = parsed[0][0] if parsed else secrets.token_hex(8)
        self._prefix, self._count, self._sent = f"{run}-", len(found), 0
        if found != [self._name_part(number) for number in range(self._count)]:
            got = f"{self._count} files that are not all parts of one run"
            raise ValueError(f"{self.name}: got {got}; remove the folder to begin anew")
        folder = user_cache.private_folder("journals")
        for left in folder.glob("*.*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED:
                    left.unlink()
        self.path = folder / f"{run}.partial"
        self._start, self._wake, self._ends = time.monotonic(), threading.Event(), False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def _name_part(self, number: int) -> str:
        return f"{self._prefix}{number:06d}.jsonl"

    def restore(self, file: BinaryIO) -> None:
        """Makes the journal, an open and locked file, begin with what the parts hold.

        What the journal has after that is kept: this machine's last run was killed before it could
        be copied.

        Raises:
          ValueError: a part is damaged.
        """
        parts = [self._folder / self._name_part(number) for number in range(self._count)]
        contents = [part.read_bytes() for part in parts]
        for part, content in zip(parts, contents):
            if not content.endswith(b"\n"):
                got = "a part that does not end with a line"
                raise ValueError(f"{part}: got {got}; remove the folder to begin anew")
        with open(self.path, "rb") as journal:
            same = all(journal.read(len(content)) == content for content in contents)
        if not same:
            file.truncate(0)
            for content in contents:
                while content:  # when the disk becomes full, only a part is written
                    content = content[file.write(content) :]
        self._sent = sum(map(len, contents))

    def begin(self) -> None:
        """Copies what there is, and then what is added, in a thread of its own."""
        self.copy()
        self._thread = threading.Thread(target=self._copy_often, daemon=True)
        self._thread.start()

    def copy(self) -> None:
        """Writes the whole lines that are in no part yet as a new part.

        Raises:
          ValueError: another process has written that part.
          OSError: the store fails.
        """
        with open(self.path, "rb") as journal:
            journal.seek(self._sent)
            content = journal.read()
        content = content[: content.rfind(b"\n") + 1]
        if not content:
            return
        try:
            (self._folder / self._name_part(self._count)).create(content)
        except FileExistsError:
            got = "another process is writing it"
            raise ValueError(f"{self.name}: {got}, expected one at a time") from None
        self._count, self._sent = self._count + 1, self._sent + len(content)

    def check(self) -> None:
        """Raises the error with which copying has ended, if it has."""
        if self._error is not None:
            raise self._error

    def end(self, failed: bool = False) -> None:
        """Ends the thread and copies the rest; after another error, `failed`, as far as it goes."""
        if self._thread is None:
            return
        self._ends = True
        self._wake.set()
        self._thread.join()
        self._thread = None
        with contextlib.suppress(*([Exception] if failed else [])):
            self.check()
            self.copy()

    def remove(self) -> None:
        """Removes the parts; the last one first, so that a kill leaves a beginning."""
        for number in reversed(range(self._count)):
            (self._folder / self._name_part(number)).unlink(missing_ok=True)

    def _copy_often(self) -> None:
        while not self._ends and self._error is None:
            seconds = (time.monotonic() - self._start) / 100
            self._wake.wait(min(_MOST_SECONDS, max(_LEAST_SECONDS, seconds)))
            if not self._ends:
                try:
                    self.copy()
                except Exception as error:
                    self._error = error
