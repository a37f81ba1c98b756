"""Defines the options of measurements: those of a command that `analysis` reads."""

from typing import Any, Protocol

from specdec_jax.speculative.policy import Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import DynamicTree, Tree


class Setup(Protocol):
    """How sentences are decoded and timed.

    The options of the measuring commands derive from the classes here, and go into records whole.

    Attributes:
      verifier: name of the verifier.
      temperature: 0 is argmax.
      max_new_tokens, max_input_length: limits in tokens.
      batch_size: number of sentences decoded together.
      repeats: number of passes over the sentences.
      seed: seed of the sampling.
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
    """The further options of `benchmark_beams` and `tune_beams`.

    Attributes:
      num_beams: beams of a search; None: none.
      beam_width: the numbers of nodes in a level of the tree that are timed; (): each command's
        default.
      gammas: the γ that are timed, or numbers of levels.
    """

    num_beams: int | None
    beam_width: tuple[int, ...]

    @property
    def gammas(self) -> tuple[int, ...]: ...

    def search(self, **others: Any) -> dict[str, Any]:
        """Returns the arguments of `generate` for a beam search; `others` are added to them."""


class BenchmarkSetup(BeamSetup, Protocol):
    """The further options of `benchmark`.

    Attributes:
      gamma_policy: name of the policy of γ.
      synthetic_alpha: probabilities with which drafted tokens are accepted at random; (): the
        models decide.
      tree: the token trees that are timed, as text.
      preset: shape of a target with random weights, or None.
      samples_preset: whether the cost of sampling is measured.
    """

    gamma_policy: str
    synthetic_alpha: tuple[float, ...]
    tree: tuple[str, ...]
    preset: str | None

    @property
    def samples_preset(self) -> bool: ...

    def gamma_of(
        self, gamma: int | str, tree: Tree | DynamicTree | None = None
    ) -> int | str | Policy:
        """Returns the γ of `generate`: a number, "auto" or a policy."""


class MeasureSetup(Setup, Protocol):
    """The further options of `expectations.measure`.

    Attributes:
      gamma_max: the greatest γ of the table.
      timed_gammas: the γ whose target call is timed.
      compare_alpha: whether Σ min(p, q) is compared with the share that token verification accepts.
      drafter, shortlist, shortlist_size, drafter_int8: the drafter, for a message.
    """

    gamma_max: int
    compare_alpha: bool
    drafter: str | None
    shortlist: str | None
    shortlist_size: int
    drafter_int8: bool

    @property
    def timed_gammas(self) -> tuple[int, ...]: ...


class TuneSetup(BeamSetup, Protocol):
    """The further options of `tuning.tune`.

    Attributes:
      verifiers: the verifiers to choose from.
      tree_nodes: the sizes of trees to choose from, in positions of a target call; (): no trees.
    """

    tree_nodes: tuple[int, ...]

    @property
    def verifiers(self) -> tuple[str, ...]: ...
