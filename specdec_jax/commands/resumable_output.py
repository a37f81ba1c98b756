"""Keeps results as they are finished, and puts them together in order at the end."""

import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec_jax.commands.remote_parts import RemoteParts
from specdec_jax.files import places
from specdec_jax.files.locks import lock_file
from specdec_jax.files.places import AnyPath, RemotePath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.files.writing import is_pass_through, name_errors, open_new_file

# Seconds between two calls of fsync; what is written goes to the operating system at once.
_SYNC = 1.0


class Journal:
    """Results in `<output>.partial`, as they are finished, until `finish` writes the output file.

    The first line holds the settings; every other line the number of an input, its lines of output
    and a note on them if there is one, as JSON. If the process is killed, nothing is lost but a
    line that was being written. The output file appears whole or not at all. If it is a symbolic
    link, the journal lies beside the file that it leads to. For an output file in a store,
    `<output>.partial` is a folder with copies of the journal's parts (`RemoteParts`).

    Attributes:
      path: path of the journal on this machine.
      name: what messages call it.
      done: numbers of the inputs whose results are there.
      measured: what the process that began the journal had measured.
      notes: of each input that is there, by its number, the note that `add` got.
    """

    def __init__(
        self,
        output: str | os.PathLike,
        settings: Mapping[str, Any],
        total: int,
        measured: Mapping[str, Any] | None = None,
        first: int = 0,
    ):
        """Begins a journal, or resumes an existing one.

        Args:
          output: path of the output file.
          settings: what decides the results, as JSON values.
          total: number of inputs.
          measured: what this process has measured, on which the results depend too; an existing
            journal's is used in its place.
          first: number of the first input.

        Raises:
          ValueError: the journal has other settings, is damaged, or is being written by another
            process.
          OSError: a system error, with the journal's name.
        """
        self._numbers, self._output = range(first, first + total), _follow_link(output)
        self._parts: RemoteParts | None = None
        if isinstance(self._output, RemotePath):
            self._parts = RemoteParts(self._output)
            self.path, self.name = self._parts.path, self._parts.name
        else:
            self.path = self._output.with_name(self._output.name + ".partial")
            self.name = str(self.path)
        if is_pass_through(self.path):
            raise mismatch_error(self.path, "no regular file", "a journal or nothing there")
        self.notes: dict[int, dict[str, Any]] = {}
        self._places: dict[int, int] = {}  # where in the file the line of each input begins
        self._synced = 0.0
        # Without a buffer, so that closing the file does not try again what could not be written.
        self._file = open(self.path, "ab", buffering=0)
        try:
            lock_file(self._file.fileno(), self.path)
            if self._parts:
                self._parts.restore(self._file)
            self.measured = json.loads(json.dumps(dict(measured or {})))
            self._read(json.loads(json.dumps({**settings, "inputs": total})))
            if self._parts:
                self._parts.begin()
        except BaseException:
            self._file.close()
            raise

    @property
    def done(self) -> frozenset[int]:
        """Numbers of the inputs whose results are there."""
        return frozenset(self._places)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if self._parts:
            self._parts.end(failed=exception[0] is not None)

    def add(self, number: int, lines: Sequence[str], note: Mapping[str, Any] | None = None) -> None:
        """Keeps the lines of one input, and a note on it, as JSON values.

        No line contains a line end.

        Raises:
          OSError: a system error, or the store's.
        """
        if self._parts:
            self._parts.check()
        self.notes[number] = dict(note or {})
        self._places[number] = self._append([number, list(lines), *([note] if note else [])])

    def lines(self) -> Iterator[str]:
        """Yields the lines of all inputs, in order; each input must be there."""
        with open(self.path, "rb") as file:
            for number in self._numbers:
                file.seek(self._places[number])
                yield from json.loads(file.readline())[1]

    def finish(self) -> None:
        """Writes the output file, all inputs in order, and removes the journal."""
        if len(self._places) < len(self._numbers):
            got = f"{len(self._places)} results"
            raise mismatch_error(self.name, got, len(self._numbers))
        if self._parts:
            self._parts.end()
        with open_new_file(self._output) as file:
            for line in self.lines():
                file.write(line.encode() + b"\n")
        self.discard()

    def discard(self) -> None:
        """Removes the journal."""
        if self._parts:
            self._parts.end()
            self._parts.remove()
        self.path.unlink()

    def _append(self, record: Any) -> int:
        """Writes a line; returns its place in the file."""
        rest = _make_line(record)
        with name_errors(self.path):
            place = self._file.seek(0, os.SEEK_END)
            while rest:  # when the disk becomes full, only a part is written
                rest = rest[self._file.write(rest) :]
            if time.monotonic() - self._synced > _SYNC:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        return place

    def _read(self, settings: dict[str, Any]) -> None:
        """Reads an existing journal; a last line that a kill cut short is removed."""
        end = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n") and (number or self._begins(line, settings)):
                    break
                record = self._record(number, line)
                if number:
                    self._places[record[0]], self.notes[record[0]] = end, dict(*record[2:])
                else:
                    self._compare(record, settings)
                end += len(line)
        self._file.truncate(end)
        if not end:
            try:
                self._append({**settings, **self.measured})
            except OSError:
                self.path.unlink()  # it holds nothing yet
                raise

    def _record(self, number: int, line: bytes) -> Any:
        """Returns what line `number` holds: the settings if it is 0, else an input's results."""
        try:
            record = json.loads(line)
            if number:
                place, lines, *notes = record
                if (
                    type(place) is not int
                    or place not in self._numbers
                    or not all(isinstance(text, str) for text in lines)
                    or not (len(notes) < 2 and all(isinstance(note, dict) for note in notes))
                ):
                    raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise ValueError(
                f"{self.name}, line {number + 1}: got {line[:40]!r}, expected a result; remove the"
                " file to begin anew"
            ) from None
        return record

    def _begins(self, line: bytes, settings: dict[str, Any]) -> bool:
        """Returns whether a first line that was cut short may be of these settings.

        What was measured may differ.
        """
        own = _make_line(settings)[:-2]  # without the bracket and the end of the line
        return own.startswith(line) or line.startswith(own)

    def _compare(self, before: Any, settings: dict[str, Any]) -> None:
        before = before if isinstance(before, dict) else {}
        missing = self.measured.keys() - before.keys()
        self.measured = {name: before.pop(name) for name in self.measured.keys() - missing}
        settings = settings | dict.fromkeys(missing, "what was measured")
        for name in {**settings, **before}:
            if before.get(name) != settings.get(name):
                shown = name if name.isprintable() else quote_value(name)
                raise ValueError(
                    f"{self.name}: got results with {shown} {before.get(name)!r}, expected"
                    f" {settings.get(name)!r}; remove the file to begin anew"
                )


def _follow_link(output: str | os.PathLike) -> AnyPath:
    """Returns the path of the output file, which a symbolic link may lead to."""
    place = places.make_path(output)
    return pathlib.Path(os.path.realpath(place)) if os.path.islink(place) else place


def _make_line(record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
