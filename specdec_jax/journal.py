"""A long job's output file: results are kept as they are finished, and put together in order at the end."""

import hashlib
import json
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# Seconds between two calls that bring what was written to the disk; to the system it goes at once.
_SYNC = 1.0


class Journal:
    """Results in `<output>.partial`, in the order in which they were finished, until `finish` writes the output file.

    The first line holds the settings; each other one the number of an input and its lines of output, as JSON. A process that is
    killed loses nothing that was added, but for a line that was being written. The output file appears whole or not at all.

    Attributes:
      path: of the journal.
      done: numbers of the inputs whose results are there.
    """

    def __init__(self, output, settings: Mapping[str, Any], total: int):
        """Begins a journal, or goes on with the one that is there.

        Args:
          output: the file to be written.
          settings: what decides the results, JSON values.
          total: number of inputs.

        Raises:
          ValueError: a journal of other settings, a damaged one, or one that another process is writing.
        """
        self._output, self._total = pathlib.Path(output), total
        self.path = self._output.with_name(self._output.name + ".partial")
        self._places: dict[int, int] = {}  # where in the file the line of each input begins
        self._file = open(self.path, "a+b")
        try:
            self._lock()
            self._read(json.loads(json.dumps({**settings, "inputs": total})))
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    @property
    def done(self) -> frozenset[int]:
        return frozenset(self._places)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def add(self, number: int, lines: Sequence[str]) -> None:
        """Keeps the lines of one input, none of which contains a line end."""
        self._places[number] = self._append([number, list(lines)])

    def lines(self) -> Iterator[str]:
        """The lines of all inputs, in order; each input must be there."""
        for number in range(self._total):
            self._file.seek(self._places[number])
            yield from json.loads(self._file.readline())[1]

    def finish(self) -> None:
        """Writes the output file, all inputs in order, and removes the journal."""
        missing = self._total - len(self._places)
        if missing:
            raise ValueError(f"{self.path}: got {len(self._places)} results, expected {self._total}")
        part = self._output.with_name(self._output.name + ".part")
        with open(part, "wb") as file:
            for line in self.lines():
                file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._output)
        self.path.unlink()

    def _append(self, record: Any) -> int:
        """Writes a line; returns where it begins."""
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
        return place

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path}: another process is writing it, expected one at a time") from None

    def _read(self, settings: dict[str, Any]) -> None:
        """Takes over what is there; a last line that a kill cut short goes."""
        self._synced, end = 0.0, 0
        self._file.seek(0)
        for number, line in enumerate(iter(self._file.readline, b"")):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if number:
                    place, lines = record
                    if not 0 <= place < self._total or not all(isinstance(text, str) for text in lines):
                        raise ValueError
                    self._places[place] = end
            except (ValueError, TypeError):
                raise ValueError(
                    f"{self.path}, line {number + 1}: got {line[:40]!r}, expected a result; remove the file to begin anew"
                ) from None
            if not number:
                self._compare(record, settings)
            end += len(line)
        self._file.truncate(end)
        if not end:
            self._append(settings)

    def _compare(self, before: Any, settings: dict[str, Any]) -> None:
        before = before if isinstance(before, dict) else {}
        for name in {**settings, **before}:
            if before.get(name) != settings.get(name):
                raise ValueError(
                    f"{self.path}: got results with {name} {before.get(name)!r}, expected {settings.get(name)!r}; remove the "
                    "file to begin anew"
                )


def digest(parts: Iterable[bytes]) -> str:
    """What tells contents apart: a short hash of all parts in order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()[:16]
