"""Defines the options of measurements: those of a command that `analysis` reads."""

from typing import Any, Protocol

from specdec_jax.speculative.policies import Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import DynamicTree, Tree


class Setup(Protocol):
    """How sentences are decoded and timed.

    The options of every measuring command implement it, and go into its record whole. Members are
    properties since options are frozen, as in the protocols below.

    Attributes:
      verifier: name of the verifier.
      temperature: 0 is argmax.
      max_new_tokens, max_input_length: limits in tokens.
      batch_size: number of sentences decoded together.
      repeats: number of passes over the sentences.
      seed: seed of the sampling.
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
        """Returns the arguments of `generate` but for the drafter's.

        With `plain` they are those of plain decoding.
        """


class BeamSetup(Setup, Protocol):
    """The further options of `benchmark_beams` and `tune_beams`.

    Attributes:
      num_beams: beams of a search; None: none.
      beam_width: the numbers of nodes in a level of the tree that are timed; (): each command's
        default.
    """

    @property
    def num_beams(self) -> int | None: ...
    @property
    def beam_width(self) -> tuple[int, ...]: ...

    def search(self, **others: Any) -> dict[str, Any]:
        """Returns the arguments of `generate` for a beam search; `others` are added to them."""


class BenchmarkSetup(BeamSetup, Protocol):
    """The further options of `benchmark`.

    Attributes:
      gammas: the γ that are timed.
      gamma_policy: name of the policy of γ.
      synthetic_alpha: probabilities with which drafted tokens are accepted at random; (): the
        models decide.
      tree: the token trees that are timed, as text.
      preset: shape of a target with random weights, or None.
      samples_preset: whether the cost of sampling is measured.
    """

    @property
    def gammas(self) -> tuple[int, ...]: ...
    @property
    def gamma_policy(self) -> str: ...
    @property
    def synthetic_alpha(self) -> tuple[float, ...]: ...
    @property
    def tree(self) -> tuple[str, ...]: ...
    @property
    def preset(self) -> str | None: ...
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


class TuneSetup(BeamSetup, Protocol):
    """The further options of `tuning.tune`.

    Attributes:
      gammas: the γ to choose from.
      verifiers: the verifiers to choose from.
      tree_nodes: the sizes of trees to choose from, in positions of a target call; (): no trees.
    """

    @property
    def gammas(self) -> tuple[int, ...]: ...
    @property
    def verifiers(self) -> tuple[str, ...]: ...
    @property
    def tree_nodes(self) -> tuple[int, ...]: ...
