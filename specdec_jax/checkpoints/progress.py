"""Shows how far a long reading, writing or making of parameters is: a bar on a terminal, elsewhere
a line now and then."""

import sys
import time
from collections.abc import Callable
from typing import Any

# Seconds before the bar is there, which disappears again, between two lines, which stay, and
# between two drawings of the bar.
_SHORT, _EVERY, _DRAWN = 3.0, 10.0, 0.1


def print_line(line: str) -> None:
    """Prints a line to standard error."""
    print(line, file=sys.stderr, flush=True)


class ParameterProgress:
    """Context manager that tells how many of a model's parameters are there, if that takes long.

    Parameters differ by a thousand times in size, so their numbers are counted, not their names.
    No thread runs beside that: what is shown changes between two parameters only, and `say`
    is called by the caller's thread.
    """

    def __init__(
        self,
        what: str,
        total: int,
        say: Callable[[str], None] = print_line,
        then: str = ", laying them out",
    ):
        """Prepares the display; nothing is shown yet.

        Args:
          what: what is done with them, e.g. "reading flan-t5-xxl".
          total: how many parameters there are.
          say: called with each line. With `print_line` a terminal shows a bar instead.
          then: what is said, behind their number, when all are there.
        """
        self._what, self._total, self._done, self._said, self._then = what, total, 0, False, then
        self._say, self._undecided = say, say is print_line
        self._bar: Any = None  # a rich.progress.Progress

    def __enter__(self) -> "ParameterProgress":
        self._begin = self._shown = time.monotonic()
        return self

    def __exit__(self, *exception) -> None:
        if self._bar is not None:
            self._bar.stop()  # takes the bar away and gives the cursor back, after an error too

    def advance(self, count: int) -> None:
        """Counts `count` more parameters as done, and shows it if it is time to."""
        self._done += count
        now = time.monotonic()
        if self._undecided and now - self._begin >= _SHORT:
            self._undecided = False
            self._begin_bar()
        finished = self._done == self._total
        if self._bar is not None and (finished or now - self._shown >= _DRAWN):
            self._shown = now
            self._bar.update(
                self._bar.task_ids[0], completed=self._done, text=self.text, refresh=True
            )
        elif self._bar is None and (now - self._shown >= _EVERY or (finished and self._said)):
            self._shown, self._said = now, True
            self._say(f"{self._what}: {self.text}")

    def _begin_bar(self) -> None:
        """Shows a bar if standard error is a terminal that can draw one."""
        import rich.progress  # takes a tenth of a second, which a short reading is spared
        import rich.table

        console = rich.console.Console(stderr=True)
        if not console.is_interactive:
            return
        # The name comes last, since the end is cut if it does not fit; the numbers must.
        rest = rich.table.Column(ratio=1, no_wrap=True)
        text = rich.progress.TextColumn(
            "{task.fields[text]}: {task.description}", markup=False, table_column=rest
        )
        columns = [rich.progress.BarColumn(20), text] if console.width >= 80 else [text]
        # What is printed meanwhile goes where it would go without the bar.
        self._bar = rich.progress.Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.add_task(self._what, total=self._total, completed=self._done, text=self.text)
        self._bar.start()

    @property
    def text(self) -> str:
        """What the line says after its colon, e.g. "3.1 of 11.3 billion parameters, 0:02:10 left"."""
        sizes = ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"))
        unit, name = next((size for size in sizes if self._total >= size[0]), sizes[-1])
        counted = f"{self._done / unit:.1f} of {self._total / unit:.1f} {name} parameters"
        if self._done == self._total:
            return counted + self._then
        seconds = (time.monotonic() - self._begin) * (self._total - self._done) / max(self._done, 1)
        left = round(seconds)
        return f"{counted}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
