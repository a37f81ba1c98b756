"""The options of a beam search, and what it rejects."""

import dataclasses
from typing import Any

import numpy as np

from specdec_jax.decoding.checks import UnsupportedCombination, unsupported
from specdec_jax.decoding.strategies import STRATEGIES
from specdec_jax.models import arguments
from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.beam_search import STYLES, BeamConfig
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policy import Policy
from specdec_jax.speculative.sampling import SamplingMode

# The default exponents of the length penalty, in T5X and in transformers.
_PENALTIES = {"t5x": 0.6, "huggingface": 1.0}
# Levels of the drafted tree where `gamma` is "auto".
LEVELS = 3


@dataclasses.dataclass(frozen=True)
class BeamOptions:
    """The options of a beam search, checked.

    Attributes:
      num_beams: K ≥ 1.
      length_penalty: exponent of the length penalty, by which sums of log-probabilities are
        divided; None: 0.6 in T5X's form, 1 in Hugging Face's.
      beam_style: "t5x" or "huggingface": the library whose tokens and scores the search gives.
      early_stopping: False, True or "never", when a search ends; for "huggingface" alone (see
        `speculative.beam_search`).
      num_return_sequences: number of hypotheses returned for each input, at most K.
      beam_width: u, nodes in each level of the drafted tree, at least K; None: the drafter's
        default, mostly 2·K.

    Raises:
      ValueError: a field outside its range.
      UnsupportedCombination: `early_stopping` in T5X's form.
    """

    num_beams: int
    length_penalty: float | None = None
    beam_style: str = "t5x"
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    beam_width: int | None = None

    def __post_init__(self):
        if not isinstance(self.beam_style, str) or self.beam_style not in STYLES:
            got, styles = arguments.quote(self.beam_style), ", ".join(STYLES)
            raise ValueError(f"beam_style: got {got}, expected one of {styles}")
        t5x, keep = self.beam_style == "t5x", arguments.keep_integer
        keep(self, "num_beams", 1, 1024)
        keep(self, "num_return_sequences", 1, self.num_beams, " = num_beams")
        if self.beam_width is not None:
            keep(self, "beam_width", self.num_beams, 4096)
        if self.length_penalty is not None:
            expected = "a finite number" + " of at least 0" * t5x
            penalty = arguments.check_number("length_penalty", self.length_penalty, expected)
            if not np.isfinite(penalty) or t5x and penalty < 0:
                raise ValueError(f"length_penalty: got {self.length_penalty}, expected {expected}")
        if not isinstance(self.early_stopping, str) or self.early_stopping != "never":
            flag, expected = self.early_stopping, "False, True or 'never'"
            arguments.check_kind("early_stopping", flag, bool | np.bool_, expected)
            object.__setattr__(self, "early_stopping", bool(flag))
        if self.early_stopping and t5x:
            raise UnsupportedCombination(
                f"early_stopping: got {self.early_stopping!r} with beam_style 't5x', "
                "which has a rule of its own, expected False, or beam_style 'huggingface'"
            )

    @property
    def penalty(self) -> float:
        """The exponent of the length penalty, the default in place of None."""
        default = _PENALTIES[self.beam_style]
        return default if self.length_penalty is None else float(self.length_penalty)

    def check_ids(self, ends: int, vocab_size: int) -> None:
        """Rejects more beams than ids, and a vocabulary of `ends` alone."""
        if self.num_beams > vocab_size or ends >= vocab_size:
            raise ValueError(
                f"num_beams: got {self.num_beams} for {vocab_size} ids, "
                f"of which {ends} end a sequence, expected at "
                "most as many beams as ids, and an id that ends none"
            )

    def config(
        self, ends: int, mode: SamplingMode, vocab_size: int, gamma: int, drafter: Drafter | None
    ) -> BeamConfig:
        """Returns the static settings; arguments as in `BeamConfig`, and what drafts the levels.

        Raises UnsupportedCombination for a `beam_width` where nothing is drafted.
        """
        width = 0
        if isinstance(drafter, BeamDrafter) and gamma:
            width = drafter.beam_width(self.num_beams, self.beam_width)
        elif self.beam_width is not None:
            raise unsupported("beam_width", f"{self.beam_width} where nothing is drafted", "None")
        return BeamConfig(
            self.num_beams,
            ends,
            mode,
            vocab_size,
            self.beam_style,
            self.early_stopping,
            gamma,
            min(width, self.num_beams * (vocab_size - 1)),
            returned=self.num_return_sequences,
            strategy=STRATEGIES["beams"],
        )


def check_beam_options(num_beams: int | None = None, **others: Any) -> BeamOptions | None:
    """Checks the options of a beam search and returns them; None if `num_beams` is None.

    Others that are None are at their defaults.

    Raises:
      ValueError: an option outside its range.
      UnsupportedCombination: another option without `num_beams`.
    """
    others = {name: value for name, value in others.items() if value is not None}
    if num_beams is not None:
        return BeamOptions(num_beams, **others)
    for field in dataclasses.fields(BeamOptions)[1:]:
        if not arguments.is_default(others.get(field.name), field.default):
            got = arguments.quote(others[field.name])
            samples = field.name == "num_return_sequences"
            expected = repr(field.default) + " (of samples: num_samples)" * samples
            raise UnsupportedCombination(
                f"{field.name}: got {got} without num_beams, expected {expected}"
            )
    return None


def check_greedy(mode: SamplingMode, temperature: object, hint: str = "") -> None:
    """Rejects sampling, of which a beam search has none."""
    if not mode.greedy:
        raise UnsupportedCombination(
            f"temperature: got {arguments.quote(temperature)} with num_beams, expected 0: "
            f"beam search draws nothing{hint}"
        )


def check_drafting(drafter: Any, gamma: Any) -> None:
    """Rejects a drafter that is no `BeamDrafter`, and a `gamma` that is no number of levels."""
    if isinstance(gamma, Policy) or arguments.as_array(gamma).ndim:
        raise UnsupportedCombination(
            f"gamma: got {arguments.quote(gamma)} with num_beams, expected 'auto' or one integer, "
            "the levels of the tree"
        )
    if isinstance(drafter, Drafter) and not isinstance(drafter, BeamDrafter):
        raise UnsupportedCombination(
            f"drafter: got {type(drafter).__name__} with num_beams, "
            "expected one that drafts for beams, such as ModelDrafter, "
            "PromptLookupDrafter or NGramDrafter, or None"
        )
