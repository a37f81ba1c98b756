"""The ways to decode (chains, trees, beam search) behind one protocol, `DecodingStrategy`."""

import functools
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding import inputs as decoding_inputs
from specdec_jax.models.network import Network
from specdec_jax.speculative import prefill as speculative_prefill
from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.beam_iteration import iterate_beams
from specdec_jax.speculative.beam_prefill import prefill_beams
from specdec_jax.speculative.beam_search import BeamConfig, BeamState, sort_hypotheses
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.iteration import iterate
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.state import Counts, DecodeState, StaticConfig
from specdec_jax.speculative.tree_iteration import Watched, watch_tree

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

    def count_slots(self, config: Any, prefix: int, new: int) -> int:
        """Returns `slots` of `prefill` for rows of at most `prefix` and `new` tokens."""

    def prefill(
        self, target: Network, drafter: Any, config: Any, slots: int, inputs: PrefillInputs
    ) -> Any:
        """Makes the state that the loop starts from; traced."""

    def iterate(self, target: Network, drafter: Any, state: Any) -> Any:
        """Runs one iteration for all rows; traced. Finished rows are unchanged."""

    def read(self, state: Any) -> Committed:
        """Returns what the host reads of a state; traced."""


class ChainDecoding:
    """Decodes with chains of drafted tokens, or without a drafter."""

    commits_tokens = True

    def count_slots(self, config: StaticConfig, prefix: int, new: int) -> int:
        return decoding_inputs.count_slots(prefix + new, config.reach)

    def prefill(
        self,
        target: Network,
        drafter: Drafter | None,
        config: StaticConfig,
        slots: int,
        inputs: PrefillInputs,
    ) -> DecodeState:
        return speculative_prefill.prefill(target, drafter, config, slots, inputs)

    def iterate(self, target: Network, drafter: Any, state: DecodeState) -> DecodeState:
        return iterate(target, drafter, state)

    def read(self, state: DecodeState) -> Committed:
        names = [name for name in Committed._fields if name != "search"]
        return Committed(*(getattr(state, name) for name in names))


class TreeDecoding(ChainDecoding):
    """Decodes with trees of drafted tokens."""

    def iterate(self, target: Network, drafter: Any, state: DecodeState) -> DecodeState:
        return self.watch(target, drafter, state)[0]

    def watch(
        self, target: Network, drafter: Any, state: DecodeState
    ) -> tuple[DecodeState, Watched]:
        """Does what `iterate` does, and returns the tree that was drafted too."""
        return watch_tree(target, drafter, state)


class BeamSearch:
    """Searches for the best sequences; the length penalty is a setting of each row."""

    commits_tokens = False

    def count_slots(self, config: BeamConfig, prefix: int, new: int) -> int:
        """Counts `config.max_new`, the padded number, in the place of `new`."""
        return prefix + config.max_new

    def prefill(
        self,
        target: Network,
        drafter: BeamDrafter | None,
        config: BeamConfig,
        slots: int,
        inputs: PrefillInputs,
    ) -> BeamState:
        return prefill_beams(target, drafter, config, slots, inputs)

    def iterate(self, target: Network, drafter: BeamDrafter | None, state: BeamState) -> BeamState:
        return iterate_beams(target, drafter, state)

    def read(self, state: BeamState) -> Committed:
        """Returns the best hypotheses, those of an input side by side."""
        returned = state.config.returned
        best, exists = jax.tree.map(
            lambda x: x[:, :returned].reshape(-1, *x.shape[2:]), sort_hypotheses(state)
        )
        prefix_lengths, done, failed = (
            jnp.repeat(x, returned) for x in (state.prefix_lengths, state.done, state.failed)
        )
        adjusted = best.adjusted_log_probs
        return Committed(
            tokens=best.tokens,
            lengths=prefix_lengths + jnp.where(exists, best.lengths, 0),
            done=done,
            log_probs=best.log_probs,
            adjusted_log_probs=best.log_probs if adjusted is None else adjusted,
            draft_failed=jnp.zeros_like(failed),
            counts=state.counts,
            search=SearchOutcome(best.scores, exists, failed, state.steps),
        )


STRATEGIES: dict[str, DecodingStrategy] = {
    "chain": ChainDecoding(),
    "tree": TreeDecoding(),
    "beams": BeamSearch(),
}


def strategy_of(config: AnyConfig) -> DecodingStrategy:
    """Returns the strategy of a loop with these static settings."""
    return STRATEGIES[config.strategy]


@functools.partial(jax.jit, static_argnames=("config", "slots"))
def prefill(
    target: Network, drafter: Drafter | None, config: AnyConfig, slots: int, inputs: PrefillInputs
) -> Any:
    """Makes the state that the loop starts from.

    Args:
      target: the target's network.
      drafter: the drafter; None is autoregressive decoding.
      config: the static settings, by which the strategy is chosen.
      slots: as `DecodingStrategy.count_slots` has it.
      inputs: what the rows begin with.
    """
    return strategy_of(config).prefill(target, drafter, config, slots, inputs)
