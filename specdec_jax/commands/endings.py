"""Counts how the outputs of a job ended, and tells it on standard error."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.decoding.checks import listed
from specdec_jax.decoding.continuous_batching import Output
from specdec_jax.decoding.stream import Piece

# So many messages about single inputs are printed; the line at the end has all numbers that matter.
_SAID = 5


class Endings:
    """How the outputs of a job ended.

    Counted are those that ended at `max_new_tokens`, and those with logits that are not finite
    numbers.

    Inputs are numbered from 0, and from 1 in messages, like the lines of a file.

    Attributes:
      say: prints a line.
      failed: numbers of the inputs with an output less.
    """

    def __init__(self, limit: str, say: Callable[[str], None]):
        """Begins to count; `limit` says what outputs are cut by."""
        self.say, self._limit, self._outputs, self._cut, self._said = say, limit, 0, 0, 0
        self.failed: list[int] = []
        self._without_draft: list[int] = []

    def add(self, number: int, outputs: Sequence[Output | Piece]) -> dict[str, Any]:
        """Counts the outputs of one input, and tells what was wrong with it.

        Returns what `restore` takes.
        """
        note: dict[str, Any] = {"cut": sum(output.finish_reason == "length" for output in outputs)}
        errors = [output.error for output in outputs if output.error]
        if errors:
            note["lost"] = any(not error.by_drafter for error in errors)
            self._said += 1
            if self._said <= _SAID:
                what = "no output" if note["lost"] else "nothing was drafted from there on"
                self.say(f"sentence {number + 1}: {what}: {errors[0].reason}")
        self.restore(number, note, len(outputs))
        return {name: value for name, value in note.items() if value or name == "lost"}

    def restore(self, number: int, note: Mapping[str, Any], outputs: int) -> None:
        """Counts an input of an earlier run by what `add` returned; `outputs`: how many it has."""
        self._outputs += outputs
        self._cut += note.get("cut", 0)
        if "lost" in note:
            (self.failed if note["lost"] else self._without_draft).append(number)

    def tell(self, inputs: int) -> str | None:
        """Tells how many outputs were cut; returns what is wrong with the job, if anything is.

        `inputs` is the number of inputs.
        """
        if self._cut:
            plural = "s" * (self._outputs != 1)
            self.say(
                f"{self._cut} of {self._outputs} output{plural} ended by length: {self._limit}"
            )
        if self._without_draft:
            self.say(
                f"{listed('sentence', self._without_draft, inputs)}: the drafter gave logits that"
                " are not finite numbers; the outputs are the target's"
            )
        if not self.failed:
            return None
        return (
            f"{listed('sentence', self.failed, inputs)}: no output: got logits that are not finite"
            " numbers"
        )
