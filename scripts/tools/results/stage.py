"""What a stage of `results.py` is, and the settings of a run."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

# A row of a table, and the rows of a stage by table and case.
Row = dict[str, Any]
Rows = dict[str, dict[str, Row]]


class Skipped(Exception):
    """Why a stage cannot be measured here."""


class Settings(NamedTuple):
    """What a run of the script asks for.

    Attributes:
      data: folder of the texts, or None.
      quick: whether to take fewer sentences and passes.
    """

    data: str | None
    quick: bool

    def choose(self, full: int, quick: int) -> int:
        """Returns a number of sentences or passes."""
        return quick if self.quick else full

    @property
    def temperatures(self) -> tuple[int, ...]:
        """Those of stages that sample too: a quick run does not."""
        return (0,) if self.quick else (0, 1)


class Stage(NamedTuple):
    """A question and its answer.

    Attributes:
      title: what a row is.
      minutes: on two cores, in full and quickly; None: not part of a quick run.
      measure: returns the rows.
      format: returns a row as the cell of a table.
      brief: the same for tables with a column for each text.
      timed: whether the figures depend on what else the machine does.
      once: whether one machine is enough: a run leaves the stage out if any record has it.
      accelerator: whether it is measured on accelerators, not on processors.
      by_sentence: whether ways of decoding take turns with sentences, not with whole files.
      unrated: pattern of `TEXT, CASE` of the rows without an acceptance rate, because their drafts
        are verified as a whole: older records have a number there.
    """

    title: str
    minutes: tuple[float, float | None]
    measure: Callable[[Settings], Rows]
    format: Callable[[Row], str]
    brief: Callable[[Row], str] = str
    timed: bool = True
    once: bool = False
    accelerator: bool = False
    by_sentence: bool = False
    unrated: str = "(?!)"

    def drop_alpha(self, text: str, case: str, row: Row) -> Row:
        """Returns a recorded row, without α if it has none."""
        return row | {"alpha": None} if re.match(self.unrated, f"{text}, {case}") else row
