"""Counts how the outputs of a command ended, and reports it on standard error."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.decoding.checks import list_in_words
from specdec_jax.decoding.continuous_batching import Output
from specdec_jax.decoding.stream import Piece

# Messages about single inputs beyond these are not printed; the line at the end has all numbers.
_MOST_MESSAGES = 5


class Endings:
    """Counts outputs that ended at a limit, or had logits that are not finite numbers.

    Inputs are numbered from 0, and from 1 in messages, like the lines of a file.

    Attributes:
      say: prints a line.
      failed: numbers of the inputs with an output less.
    """

    def __init__(self, limit: str, say: Callable[[str], None]):
        """Begins to count; `limit` is the text of what outputs are cut by."""
        self.say, self._limit, self._outputs, self._cut, self._messages = say, limit, 0, 0, 0
        self._late = 0
        self.failed: list[int] = []
        self._without_draft: list[int] = []

    def add(self, number: int, outputs: Sequence[Output | Piece]) -> dict[str, Any]:
        """Counts the outputs of one input, and prints what was wrong with it.

        Returns what `restore` takes.
        """
        reasons = [output.finish_reason for output in outputs]
        note: dict[str, Any] = {"cut": reasons.count("length"), "late": reasons.count("deadline")}
        errors = [output.error for output in outputs if output.error]
        if errors:
            note["lost"] = any(not error.by_drafter for error in errors)
            self._messages += 1
            if self._messages <= _MOST_MESSAGES:
                what = "no output" if note["lost"] else "nothing was drafted from there on"
                self.say(f"sentence {number + 1}: {what}: {errors[0].reason}")
        self.restore(number, note, len(outputs))
        return {name: value for name, value in note.items() if value or name == "lost"}

    def restore(self, number: int, note: Mapping[str, Any], outputs: int) -> None:
        """Counts an input of an earlier run by what `add` returned; `outputs`: how many it has."""
        self._outputs += outputs
        self._cut += note.get("cut", 0)
        self._late += note.get("late", 0)
        if "lost" in note:
            (self.failed if note["lost"] else self._without_draft).append(number)

    def report(self, inputs: int) -> str | None:
        """Prints how many of the outputs were cut; returns which of the `inputs` have none."""
        of_all = f"of {self._outputs} output{'s' * (self._outputs != 1)}"
        if self._cut:
            self.say(f"{self._cut} {of_all} ended by length: {self._limit}")
        if self._late:
            self.say(f"{self._late} {of_all} ended by --deadline, before they were whole")
        if self._without_draft:
            which = list_in_words("sentence", self._without_draft, inputs)
            reason = "the drafter gave logits that are not finite numbers"
            self.say(f"{which}: {reason}; the outputs are the target's")
        if not self.failed:
            return None
        which = list_in_words("sentence", self.failed, inputs)
        return f"{which}: no output: got logits that are not finite numbers"
