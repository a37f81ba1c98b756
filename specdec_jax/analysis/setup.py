"""Defines the options of measurements: those of a command that `analysis` reads."""

from typing import Any, Protocol

from specdec_jax.speculative.policy import Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import DynamicTree, Tree


class Setup(Protocol):
    """How sentences are decoded and timed.

    The options of the measuring commands derive from the classes here, and go into records whole.
    The help of the flags says what each means.
    """

    verifier: str
    temperature: float
    max_new_tokens: int
    max_input_length: int
    batch_size: int
    repeats: int
    seed: int

    def sampling(self) -> SamplingConfig:
        """Returns how tokens are chosen."""

    def decoding(self, plain: bool = False) -> dict[str, Any]:
        """Returns the arguments of `generate` but for the drafter's; `plain`: all of them."""


class BeamSetup(Setup, Protocol):
    """The further options of `benchmark_beams` and `tune_beams`."""

    num_beams: int | None
    beam_width: tuple[int, ...]

    @property
    def gammas(self) -> tuple[int, ...]:
        """The γ that are timed, or numbers of levels."""

    def search(self, **others: Any) -> dict[str, Any]:
        """Returns the arguments of `generate` for a beam search; `others` are added to them."""


class BenchmarkSetup(BeamSetup, Protocol):
    """The further options of `benchmark`."""

    gamma_policy: str
    synthetic_alpha: tuple[float, ...]
    tree: tuple[str, ...]
    preset: str | None

    @property
    def samples_preset(self) -> bool:
        """Whether the cost of sampling is measured."""

    def gamma_of(
        self, gamma: int | str, tree: Tree | DynamicTree | None = None
    ) -> int | str | Policy:
        """Returns the γ of `generate`: a number, "auto" or a policy."""


class MeasureSetup(Setup, Protocol):
    """The further options of `expectations.measure`; those of the drafter are for a message."""

    gamma_max: int
    compare_alpha: bool
    drafter: str | None
    shortlist: str | None
    shortlist_size: int
    drafter_int8: bool

    @property
    def timed_gammas(self) -> tuple[int, ...]:
        """The γ whose target call is timed."""


class TuneSetup(BeamSetup, Protocol):
    """The further options of `tuning.tune`."""

    tree_nodes: tuple[int, ...]

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The verifiers to choose from."""
