"""The flags of a beam search, which several commands share."""

import dataclasses
from typing import Any

from specdec_jax.commands.options import option
from specdec_jax.decoding.beams import beam_options
from specdec_jax.speculative.beams import STYLES

_EARLY = {"false": False, "true": True, "never": "never"}


@dataclasses.dataclass(frozen=True)
class BeamFlags:
    """The flags of a beam search; `generate` takes arguments of the same names."""

    num_beams: int | None = option(
        None, "run beam search with so many beams instead of greedy decoding or sampling; a drafter makes it "
        "speculative, with the same outputs",
    )  # fmt: skip
    length_penalty: float | None = option(
        None, "with --num_beams: exponent of the length penalty, by which scores are divided (default: 0.6, or 1 with "
        "--beam_style=huggingface)",
    )  # fmt: skip
    beam_style: str = option("t5x", f"with --num_beams: whose tokens and scores the search gives: {', '.join(STYLES)}")
    early_stopping: str = option(
        "false", "with --beam_style=huggingface, when a search ends: true (num_beams hypotheses have finished), false "
        "(the best live beam would not be among them if it ended now) or never (it would not, whatever its length)",
    )  # fmt: skip
    num_return_sequences: int = option(1, "with --num_beams: number of outputs for each sentence, the best first")
    beam_width: int | None = option(
        None, "with --num_beams and a drafter: nodes in each level of the drafted tree (default: twice num_beams); "
        "--gamma is the number of levels (auto: 3)",
    )  # fmt: skip

    def beams(self) -> dict[str, Any]:
        """Returns the arguments of `generate` for a beam search; an empty dict without `num_beams`.

        Raises:
          ValueError: a value outside its range, or a flag that means nothing without `num_beams`.
        """
        if self.early_stopping not in _EARLY:
            raise ValueError(f"early_stopping: got {self.early_stopping!r}, expected one of {', '.join(_EARLY)}")
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(BeamFlags)}
        given["early_stopping"] = _EARLY[self.early_stopping]
        return {} if beam_options(**given) is None else given
