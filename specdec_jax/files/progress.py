"""Shows how far a long task is: a bar on a terminal, elsewhere a line every 10 seconds."""

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

# Seconds before the display appears, between two lines, and between two drawings of the bar.
_DELAY, _EVERY, _DRAWN = 3.0, 10.0, 0.1


def print_line(line: str) -> None:
    """Prints a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Returns seconds as hours, minutes and seconds, e.g. "0:02:10"."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Progress:
    """Context manager that shows on standard error how far a task is.

    Nothing appears in the first 3 seconds, so that a short task shows nothing. After them the
    display appears, even if the first item takes longer. From then on it changes only in calls of
    `advance`: nothing runs beside what is timed.

    Attributes:
      done: number of items that are done, by earlier runs too.
      detail: text shown after the count, e.g. the name of the current item.
    """

    _terminal = threading.Lock()  # held by the one bar of the process

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str = "",
        *,
        say: Callable[[str], None] = print_line,
        last: str = "",
        quiet: bool = False,
    ):
        """Prepares the display; the context manager shows it.

        Args:
          what: what is done, e.g. "reading flan-t5-xxl".
          total: number of items; None: unknown, and the bar moves until the task ends.
          unit: what is counted, e.g. "parameters".
          say: called with each line. With `print_line` a terminal shows a bar instead.
          last: shown behind the count when all items are done, e.g. "placing them".
          quiet: show neither bar nor lines; `message` still prints.
        """
        self._what, self._total, self._unit, self._last = what, total, unit, last
        self._say, self._quiet, self.detail = say, quiet, ""
        self.done = self._new = 0  # `_new` counts this run's items
        self._bar: Any = None  # a rich.progress.Progress
        self._shown = self._ended = False
        self._lock = threading.RLock()
        self._timer = threading.Timer(_DELAY, self._show, [True])
        self._timer.daemon = True

    def __enter__(self) -> "Progress":
        self._begin = time.monotonic()
        self._due = self._begin + _DELAY
        if self._say is print_line and not self._quiet:  # a caller's `say` runs in its own thread
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._bar is not None:
                self._bar.stop()  # removes the bar and shows the cursor, after an error too
                self._terminal.release()

    def skip(self, count: int) -> None:
        """Counts `count` more items as done by an earlier run."""
        self.done += count

    def advance(self, count: int = 1) -> None:
        """Counts `count` more items as done, and updates the display if it is time."""
        self.done, self._new = self.done + count, self._new + count
        if time.monotonic() >= self._due or (self._shown and self.done == self._total):
            self._show()

    def message(self, text: str) -> None:
        """Prints one line, above the bar if there is one."""
        with self._lock:
            if self._bar is None:
                self._say(text)
            else:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, only_first: bool = False) -> None:
        with self._lock:
            if self._quiet or self._ended or (only_first and self._shown):
                return
            if not self._shown and self._say is print_line:
                self._begin_bar()
            self._shown = True
            self._due = time.monotonic() + (_EVERY if self._bar is None else _DRAWN)
            if self._bar is None:
                if not self._quiet:
                    self._say(self._what + (f": {self.text}" if self.text else ""))
            else:
                self._bar.update(
                    self._bar.task_ids[0], completed=self.done, text=self.text, refresh=True
                )

    def _begin_bar(self) -> None:
        """Shows a bar if standard error is a terminal that can draw one."""
        import rich.progress  # takes a tenth of a second, which a short task is spared
        import rich.table

        console = rich.console.Console(stderr=True)
        if not console.is_interactive:
            return
        if not self._terminal.acquire(blocking=False):  # another task has a bar, around this one
            self._quiet = True
            return
        # The name comes last: a narrow terminal cuts the end, and the numbers matter more.
        rest = rich.table.Column(ratio=1, no_wrap=True)
        text = "{task.fields[text]}: {task.description}" if self.text else "{task.description}"
        columns: list[rich.progress.ProgressColumn] = [
            rich.progress.TextColumn(text, markup=False, table_column=rest)
        ]
        if console.width >= 80:
            columns.insert(0, rich.progress.BarColumn(20))
        if self._total is None:
            columns.insert(0, rich.progress.TimeElapsedColumn())
        self._bar = rich.progress.Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=self._total is None,
            expand=True,
            redirect_stdout=False,  # what is printed meanwhile goes where it would without the bar
            redirect_stderr=False,
        )
        self._bar.add_task(self._what, total=self._total, completed=self.done, text=self.text)
        self._bar.start()

    @property
    def text(self) -> str:
        """Count, detail, rate and time left, e.g. "3 of 9 steps, 2.0 a second, 0:00:03 left"."""
        if self._total is None:
            return self.detail
        unit = f" {self._unit}" if self._unit else ""
        size, name = next(
            ((size, name) for size, name in _SIZES if self._total >= size), (None, "")
        )
        if size is None:
            counted = f"{self.done:,} of {self._total:,}{unit}"
        else:
            counted = f"{self.done / size:.1f} of {self._total / size:.1f} {name}{unit}"
        parts = [counted, *([self.detail] if self.detail else [])]
        if self.done == self._total:
            return ", ".join([*parts, *([self._last] if self._last else [])])
        if self._new:
            seconds = max(time.monotonic() - self._begin, 1e-9) / self._new  # of one item
            if size is None:
                slow = f"{seconds:,.1f} seconds each"
                parts.append(slow if seconds > 1 else f"{1 / seconds:,.1f} a second")
            parts.append(f"{format_duration(seconds * (self._total - self.done))} left")
        return ", ".join(parts)


_SIZES = ((1e9, "billion"), (1e6, "million"))


def track(
    items: Iterable[Any],
    total: int,
    what: str,
    quiet: bool = False,
    names: Sequence[str] | None = None,
) -> Generator[Any, None, None]:
    """Yields `items` and shows on standard error how many are done.

    Args:
      items: what is yielded.
      total: how many there are.
      what: what is done with them, e.g. "compiling".
      quiet: show nothing.
      names: a name for each item, shown while it is the current one.
    """
    with Progress(what, total, quiet=quiet) as progress:
        for number, item in enumerate(items):
            progress.detail = names[number] if names else ""
            progress.advance(number > 0)  # the item before
            yield item
        progress.detail = ""
        progress.advance(total > 0)


def show_waiting(what: str) -> Progress:
    """Returns a context manager that shows what takes long: a moving bar, elsewhere one line.

    Not for what is timed: a thread moves the bar.
    """
    return Progress(what, None)
