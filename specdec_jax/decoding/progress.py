"""Shows how far a job is: a bar with rate and time left on a terminal, a line now and then
elsewhere."""

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import rich.progress

# Seconds between two lines of a job, and of what is compiled or timed, if there is no terminal.
_EVERY, _OFTEN = 60.0, 10.0


class Progress:
    """Context manager that shows the progress of a job on standard error.

    The rate is that of this run; what an earlier run did only counts as done.
    """

    def __init__(
        self,
        what: str,
        total: int,
        console: rich.console.Console | None = None,
        lines=True,
        quiet=False,
    ):
        """Prepares the display; the context manager shows it.

        Args:
          what: what is counted, e.g. "sentences".
          total: how many there are.
          console: where to show it; None: standard error.
          lines: print a line now and then if there is no terminal. Without this the bar disappears
            when all is done.
          quiet: show no bar, because results are printed to the terminal.
        """
        self.console = console or rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._what, self._total, self._lines, self._done, self._new = what, total, lines, 0, 0
        columns = (
            rich.progress.TextColumn(what),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[text]}"),
        )
        disable = quiet or not self.console.is_terminal
        # No thread beside what is timed, and nothing that is printed meanwhile redirected to
        # standard error.
        self._bar = rich.progress.Progress(
            *columns,
            console=self.console,
            disable=disable,
            transient=not lines,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=total, text="compiling")

    def __enter__(self) -> "Progress":
        self._begin = self._reported = self._drawn = time.monotonic()
        if self._bar.disable and self._total:
            self.message(f"compiling; {self._what} 0/{self._total}")
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def skip(self, count: int) -> None:
        """Counts `count` more as done by an earlier run."""
        self._done += count
        self._bar.update(self._task, completed=self._done, refresh=True)

    def advance(self, count: int = 1) -> None:
        """Counts `count` more as done by this run."""
        self._done, self._new = self._done + count, self._new + count
        now = time.monotonic()
        if now - self._drawn > 0.1 or self._done == self._total:
            self._drawn = now
            self._bar.update(self._task, completed=self._done, text=self.text, refresh=True)
        if self._lines and now - self._reported > _EVERY:
            self.report()

    def report(self) -> None:
        """Prints a line if there is no bar."""
        self._reported = time.monotonic()
        if not self.console.is_terminal:
            self.message(f"{self._what} {self._done}/{self._total}: {self.text}")

    def message(self, text: str) -> None:
        """Prints one line above the bar."""
        self.console.print(text, markup=False)

    @property
    def text(self) -> str:
        speed = self._new / max(time.monotonic() - self._begin, 1e-9)
        if not self._new:
            return "none yet"
        left = int((self._total - self._done) / speed)
        rate = f"{speed:,.1f} a second" if speed >= 1 else f"{1 / speed:,.1f} seconds each"
        return f"{rate}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def track(
    items: Iterable[Any],
    total: int,
    what: str,
    quiet: bool = False,
    names: Sequence[str] | None = None,
) -> Generator[Any, None, None]:
    """Yields `items` and shows on standard error how many there were, unless `quiet`: by a progress
    bar on a terminal, elsewhere by a line before the first item and before others now and then.

    Bar and lines move between two items only: nothing runs beside what is timed.

    Args:
      items: what is yielded.
      total: how many there are.
      what: what is done with them, e.g. "compiling".
      quiet: show nothing.
      names: a name for each item, which is shown before it; None: none.
    """
    if quiet:
        yield from items
        return
    console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)

    def name(number):
        return "" if names is None else f": {names[number]}"

    if not console.is_terminal:
        printed = -_OFTEN
        for number, item in enumerate(items):
            if time.monotonic() - printed >= _OFTEN:
                console.print(f"{what} {number + 1} of {total}{name(number)}", markup=False)
                printed = time.monotonic()
            yield item
        return
    # Otherwise rich would send to standard error what is printed meanwhile.
    redirect: dict[str, Any] = dict(redirect_stdout=False, redirect_stderr=False)
    columns = rich.progress.Progress.get_default_columns()[1:]
    text = rich.progress.TextColumn("{task.description}", markup=False)
    with rich.progress.Progress(
        text, *columns, console=console, transient=True, auto_refresh=False, **redirect
    ) as bar:
        task = bar.add_task(what, total=total)
        for number, item in enumerate(items):
            bar.update(task, completed=number, description=what + name(number), refresh=True)
            yield item
        bar.update(task, completed=total, description=what, refresh=True)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on standard error what takes a while: on a terminal by a moving bar with the seconds so
    far, elsewhere by a line.

    Not for what is timed: a thread moves the bar.
    """
    console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.print(what, markup=False)
        yield
        return
    columns = (  # the text last: a narrow terminal cuts what does not fit
        rich.progress.TimeElapsedColumn(),
        rich.progress.BarColumn(20),
        rich.progress.TextColumn("{task.description}", markup=False),
    )
    with rich.progress.Progress(
        *columns, console=console, transient=True, redirect_stdout=False
    ) as bar:
        bar.add_task(what, total=None)
        yield
