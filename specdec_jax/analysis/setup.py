"""What a measurement is asked for: the part of a command's options that `analysis` reads."""

from typing import Any, Protocol

from specdec_jax.speculative.gamma import Policy
from specdec_jax.speculative.sampling import SamplingConfig


class Setup(Protocol):
    """How sentences are decoded and timed; every measuring command's options are one, and go into its record whole.

    Its members are properties since options are frozen, as in the protocols below.

    Attributes:
      verifier: name of the verifier.
      temperature: 0 is argmax.
      max_new_tokens, max_input_length: in tokens.
      batch_size: sentences decoded together.
      repeats: passes over the sentences.
      seed: of the sampling.
    """

    @property
    def verifier(self) -> str: ...
    @property
    def temperature(self) -> float: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def max_input_length(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def repeats(self) -> int: ...
    @property
    def seed(self) -> int: ...

    def sampling(self) -> SamplingConfig:
        """Returns how tokens are chosen."""

    def decoding(self, plain: bool = False) -> dict[str, Any]:
        """Returns the arguments of `generate` but for the drafter's; with `plain`, those of decoding without one."""


class BenchmarkSetup(Setup, Protocol):
    """What `benchmark` reads beside.

    Attributes:
      gamma: numbers of drafted tokens that are timed.
      gamma_policy: name of the policy of γ.
      forced_alpha: acceptance by coin; (): as the models say.
      preset: shape of a target with random weights, or None.
      samples_preset: whether the cost of sampling is measured.
    """

    @property
    def gamma(self) -> tuple[int, ...]: ...
    @property
    def gamma_policy(self) -> str: ...
    @property
    def forced_alpha(self) -> tuple[float, ...]: ...
    @property
    def preset(self) -> str | None: ...
    @property
    def samples_preset(self) -> bool: ...

    def gamma_of(self, gamma: int | str) -> int | str | Policy:
        """Returns what `generate` takes as γ."""


class MeasureSetup(Setup, Protocol):
    """What `expectations.measure` reads beside.

    Attributes:
      gamma_max: the largest γ of the table.
      timed_gammas: those whose target call is timed.
      compare_alpha: whether Σ min(p, q) is compared with what token verification accepts.
      drafter, shortlist, shortlist_size, drafter_int8: what drafts, for a message.
    """

    @property
    def gamma_max(self) -> int: ...
    @property
    def compare_alpha(self) -> bool: ...
    @property
    def drafter(self) -> str | None: ...
    @property
    def shortlist(self) -> str | None: ...
    @property
    def shortlist_size(self) -> int: ...
    @property
    def drafter_int8(self) -> bool: ...
    @property
    def timed_gammas(self) -> tuple[int, ...]: ...


class TuneSetup(Setup, Protocol):
    """What `tuning.tune` reads beside.

    Attributes:
      gamma: the numbers of drafted tokens to choose from.
      verifiers: those to choose from.
    """

    @property
    def gamma(self) -> tuple[int, ...]: ...
    @property
    def verifiers(self) -> tuple[str, ...]: ...
