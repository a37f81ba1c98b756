"""The protocol of a way to decode, `DecodingStrategy`, and what the host reads of its state.

`ChainDecoding` is in `iteration.py`, `TreeDecoding` in `tree_iteration.py`, `BeamSearch` in
`beam_iteration.py`.
"""

import functools
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from specdec_jax.models.network import Network
from specdec_jax.speculative.beam_search import BeamConfig
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.state import Counts, StaticConfig

AnyConfig: TypeAlias = StaticConfig | BeamConfig
AnyArray: TypeAlias = jax.Array | np.ndarray


class SearchOutcome(NamedTuple):
    """What only a beam search has to report; a row is a hypothesis.

    Attributes:
      scores: `[B]` float32, as in `Hypotheses`.
      exists: `[B]` bool, False for a hypothesis that the search did not come to.
      failed: `[B]` int32, as in `BeamState`, of each hypothesis' input.
      steps: `[I]` int32, number of steps for each of I inputs.
    """

    scores: AnyArray
    exists: AnyArray
    failed: AnyArray
    steps: AnyArray


class Committed(NamedTuple):
    """The outputs of B rows as far as they are decoded: what the host reads of a state.

    Fields that are not listed are those of `DecodeState`.

    Attributes:
      counts: statistics of each row, of a beam search of each input.
      search: of a beam search, whose rows are the hypotheses that are returned; else None.
    """

    tokens: AnyArray
    lengths: AnyArray
    done: AnyArray
    log_probs: AnyArray
    adjusted_log_probs: AnyArray | None
    draft_failed: AnyArray
    counts: Counts
    search: SearchOutcome | None = None


class DecodingStrategy(Protocol):
    """A way to decode. Its state is a pytree with `done [B]` and `config`, its static settings.

    Attributes:
      commits_tokens: whether tokens in the state are final. Then rows can be streamed, stopped at a
        string or a deadline, and replaced by others once they are done.
    """

    commits_tokens: bool

    def prefill(
        self, target: Network, drafter: Any, config: Any, slots: int, inputs: PrefillInputs
    ) -> Any:
        """Makes the state that the loop starts from; traced.

        `slots` is what `config.count_slots` gives.
        """

    def iterate(self, target: Network, drafter: Any, state: Any) -> Any:
        """Runs one iteration for all rows; traced. Finished rows are unchanged."""

    def read(self, state: Any) -> Committed:
        """Returns what the host reads of a state; traced."""


@functools.partial(jax.jit, static_argnames=("config", "slots"))
def prefill(
    target: Network, drafter: Drafter | None, config: AnyConfig, slots: int, inputs: PrefillInputs
) -> Any:
    """Makes the state that the loop starts from.

    Args:
      target: the target's network.
      drafter: the drafter; None is autoregressive decoding.
      config: the static settings, which hold the strategy.
      slots: what `config.count_slots` gives.
      inputs: what the rows begin with.
    """
    return config.strategy.prefill(target, drafter, config, slots, inputs)
