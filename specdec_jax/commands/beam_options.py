"""The flags of a beam search, which several commands share."""

import dataclasses
from typing import Any

from specdec_jax.commands.options import option
from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.decoding.search_options import beam_options
from specdec_jax.speculative.beam_search import STYLES

_EARLY = {"false": False, "true": True, "never": "never", None: None}


@dataclasses.dataclass(frozen=True)
class SearchFlags:
    """Flags that say which beam search it is; see `generate`."""

    num_beams: int | None = option(
        None,
        "run beam search with so many beams instead of greedy decoding or sampling; a drafter makes"
        " it speculative, with the same outputs",
    )
    length_penalty: float | None = option(
        None,
        "with --num_beams: exponent of the length penalty, by which scores are divided (default:"
        " 0.6, or 1 with --beam_style=huggingface)",
    )
    beam_style: str = option(
        "t5x", f"with --num_beams: whose tokens and scores the search gives: {', '.join(STYLES)}"
    )
    early_stopping: str = option(
        "false",
        "with --beam_style=huggingface, when a search ends: true (num_beams hypotheses have"
        " finished), false (the best live beam would not be among them if it ended now) or never"
        " (it would not, whatever its length)",
    )

    def search(self, **others: Any) -> dict[str, Any]:
        """Returns the arguments of `generate` for a beam search, none without one.

        Args:
          others: of them, what these flags do not say.

        Raises:
          ValueError: values outside their range, or options that mean nothing without `num_beams`.
        """
        given = self.given_search(**others)
        return {} if beam_options(**given) is None else given

    def given_search(self, **others: Any) -> dict[str, Any]:
        """Returns what `search` does, before it is known whether there is a search.

        What is not given is None.
        """
        if self.early_stopping not in _EARLY:
            names = ", ".join(filter(None, _EARLY))
            raise ValueError(
                f"early_stopping: got {self.early_stopping!r}, expected one of {names}"
            )
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(SearchFlags)}
        return given | {"early_stopping": _EARLY[self.early_stopping], **others}

    def check_beside_beams(self, **usual: Any) -> None:
        """Rejects what has no meaning beside a beam search.

        Args:
          usual: what options must be left at.

        Raises:
          UnsupportedCombination: another value.
        """
        if self.num_beams is None:
            return
        for name, value in usual.items():
            if (got := getattr(self, name)) is not None and got != value:
                expected = value if isinstance(value, str | float) else "none"
                raise UnsupportedCombination(
                    f"{name}: got {got!r} with num_beams, expected {expected}"
                )


@dataclasses.dataclass(frozen=True)
class BeamFlags(SearchFlags):
    """Flags of a beam search that is decoded with; see `generate`."""

    num_return_sequences: int = option(
        1, "with --num_beams: number of outputs for each sentence, the best first"
    )
    beam_width: int | None = option(
        None,
        "with --num_beams and a drafter: nodes in each level of the drafted tree (default: twice"
        " num_beams); --gamma is the number of levels (auto: 3)",
    )

    def beams(self) -> dict[str, Any]:
        """Returns what `search` does, for these flags too."""
        return self.search(
            num_return_sequences=self.num_return_sequences, beam_width=self.beam_width
        )


def open_field(name: str) -> Any:
    """Returns the field `name` of `BeamFlags` with None for what is not given and the model may
    have a default for."""
    field = {field.name: field for field in dataclasses.fields(BeamFlags)}[name]
    return option(None, f"{field.metadata['help']} (default: the model's, else {field.default})")


def width_option(default: str) -> Any:
    """Makes the field of several widths, which are timed in turn.

    `default` is what is timed without it.
    """
    text = (
        "with --num_beams: nodes in each level of the tree; several, comma-separated, are timed in"
        " turn"
    )
    return option((), f"{text} (default: {default})")
