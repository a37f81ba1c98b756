"""Measures how near a choice is to a tie: of one token, and of the beams of a search.

A token's logits from a call over several positions are compared with those from calls over one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.analysis.step_loops import prefill_cache
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative import beam_iteration
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.beam_tree import make_root_tree


class Difference(NamedTuple):
    """How far one token's choice is from a tie.

    Attributes:
      margin: difference between the target's two largest logits.
      noise: the largest difference, along the prefix, between logits from calls over one position
        and over several.
    """

    margin: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether either token can be the argmax in exact arithmetic.

        Each of the two logits may be off by `noise`.
        """
        return self.margin < 2 * self.noise


_decode = jax.jit(Network.decode)


@isolated
def measure_difference(
    model: LanguageModel, inputs: Sequence[int], prefix: Sequence[int], width: int, batch: int = 1
) -> Difference:
    """Returns the `Difference` at the token after `prefix`.

    Args:
      model: the target.
      inputs: ids of one encoder input; ignored for a decoder-only model.
      prefix: decoder tokens, start token first; for a decoder-only model, prompt and new tokens.
      width: number of positions of the wider call (γ + 1).
      batch: number of rows; the input is repeated, since kernels differ with the number of rows.
    """
    rows = np.tile(np.asarray(inputs, np.int32), (batch, 1))
    lengths = np.full(batch, rows.shape[1], np.int32)
    padded = np.zeros(-(-len(prefix) // width) * width, np.int32)
    padded[: len(prefix)] = prefix

    def logits(step: int) -> np.ndarray:
        network, computed = model.network, []
        cache = prefill_cache(network, rows, lengths, slots=len(padded))
        for start in range(0, len(padded), step):
            tokens = np.tile(padded[start : start + step], (batch, 1))
            out, cache = _decode(network, tokens, np.full(batch, start, np.int32), cache)
            computed.append(np.asarray(out[0]))
        return np.concatenate(computed)[: len(prefix)]

    single, wide = logits(1), logits(width)
    second, first = np.partition(single[-1], -2)[-2:]
    return Difference(float(first - second), float(np.max(np.abs(single - wide))))


@isolated
def search_margin(model: LanguageModel, given: Any, how: Mapping[str, Any]) -> float:
    """Returns the least distance of two neighbours among the numbers that plain beam search sorts.

    It is taken over all steps. The numbers are the sums of the best continuations of all beams, and
    the scores of finished hypotheses. A distance within rounding means that another order of
    additions may lead to another output. `given` is one input, `how` are arguments of `generate`.
    """
    plan = plan_decoding(model, [given], **how)
    (state, _), least = plan.start(), np.inf
    while not state.done.all():
        margin, state = _margin(model.network, state)
        least = min(least, float(margin))
    return least


@jax.jit
def _margin(target: Network, state: BeamState) -> tuple[jax.Array, BeamState]:
    """Returns the margin of one step of plain search, of one row, and the state after it."""
    tree, valid = make_root_tree(state), jnp.ones((1, state.config.beams), bool)
    states, _ = target.decode_nodes(tree.tokens, tree.nodes, state.target_cache, valid)
    own, adjusted = beam_iteration.score_nodes(state, target.head(states, valid), tree)
    sums = beam_iteration.sum_to_nodes(
        tree, state.active.scores, own if adjusted is None else adjusted
    )
    best = beam_iteration.find_candidates(own, adjusted, sums, state.config).sums.reshape(-1)
    best, _ = jax.lax.top_k(best, min(state.config.candidates + 1, len(best)))
    after = beam_iteration.BeamSearch().iterate(target, None, state)
    finished = jnp.where(after.is_finished, after.finished.scores, -jnp.inf)[0]
    return jnp.minimum(_least_gap(best), _least_gap(finished)), after


def _least_gap(numbers: jax.Array) -> jax.Array:
    """Returns the least distance of two neighbours, without masked ones, which are below −10⁶."""
    ordered = jnp.sort(numbers, descending=True)
    return jnp.min(jnp.where(ordered[1:] > -1e6, -jnp.diff(ordered), jnp.inf), initial=jnp.inf)
