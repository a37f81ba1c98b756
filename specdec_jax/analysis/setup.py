"""What a measurement is asked for: the part of a command's options that `analysis` reads."""

from typing import Any, Protocol

from specdec_jax.speculative.gamma import Policy
from specdec_jax.speculative.sampling import SamplingConfig


class Setup(Protocol):
    """How sentences are decoded and timed; every measuring command's options are one, and go into its record whole.

    Attributes:
      verifier: name of the verifier.
      temperature: 0 is argmax.
      max_new_tokens, max_input_length: in tokens.
      batch_size: sentences decoded together.
      repeats: passes over the sentences.
      seed: of the sampling.
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
        """Returns the arguments of `generate` but for the drafter's; with `plain`, those of decoding without one."""


class BeamSetup(Setup, Protocol):
    """What `benchmark_beams` and `tune_beams` read beside."""

    def search(self, **others: Any) -> dict[str, Any]:
        """Returns the arguments of `generate` for a beam search; `others` are added to them."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of nodes in a level of the tree that are timed."""


class BenchmarkSetup(BeamSetup, Protocol):
    """What `benchmark` reads beside.

    Attributes:
      gamma: numbers of drafted tokens that are timed.
      gamma_policy: name of the policy of γ.
      forced_alpha: acceptance by coin; (): as the models say.
      preset: shape of a target with random weights, or None.
      samples_preset: whether the cost of sampling is measured.
    """

    gamma: tuple[int, ...]
    gamma_policy: str
    forced_alpha: tuple[float, ...]
    preset: str | None

    @property
    def samples_preset(self) -> bool:
        """Whether the cost of sampling is measured."""

    def gamma_of(self, gamma: int | str) -> int | str | Policy:
        """Returns what `generate` takes as γ."""


class MeasureSetup(Setup, Protocol):
    """What `expectations.measure` reads beside.

    Attributes:
      gamma_max: the largest γ of the table.
      timed_gammas: those whose target call is timed.
      compare_alpha: whether Σ min(p, q) is compared with what token verification accepts.
    """

    gamma_max: int
    compare_alpha: bool

    @property
    def timed_gammas(self) -> tuple[int, ...]:
        """Numbers of drafted tokens whose target call is timed."""


class TuneSetup(BeamSetup, Protocol):
    """What `tuning.tune` reads beside."""

    @property
    def gammas(self) -> tuple[int, ...]:
        """The numbers of drafted tokens to choose from; of levels of a tree with beams."""

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The verifiers to choose from."""
