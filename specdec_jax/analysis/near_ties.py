"""Measures how near a choice is to a tie: of one token, and of the beams of a search.

A token's scores from a call over several positions are compared with those from calls over one.
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
from specdec_jax.speculative import beam_iteration, distributions
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.beam_tree import make_root_tree
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.randomness import gumbel_noise
from specdec_jax.speculative.sampling import SamplingConfig, SamplingMode, SamplingRows


class Difference(NamedTuple):
    """How far one token's choice is from a tie.

    Its scores are the target's logits, after processors, temperature and filters, plus the noise
    of a Gumbel-coupled draw.

    Attributes:
      margin: difference between the two largest scores; 0 if another token has the largest one
        where the call is over several positions, as at the edge of a filter.
      noise: the largest difference, along the prefix, between scores from calls over one position
        and over several.
    """

    margin: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether either token can be the argmax in exact arithmetic.

        Each of the two scores may be off by `noise`.
        """
        return self.margin <= 2 * self.noise


_decode = jax.jit(Network.decode)


@isolated
def measure_difference(
    model: LanguageModel,
    inputs: Sequence[int],
    prefix: Sequence[int],
    width: int,
    batch: int = 1,
    sampling: SamplingConfig = SamplingConfig(),
    key: jax.Array | None = None,
    start: int = 1,
) -> Difference:
    """Returns the `Difference` at the token after `prefix`.

    Args:
      model: the target.
      inputs: ids of one encoder input; ignored for a decoder-only model.
      prefix: decoder tokens, start token first; for a decoder-only model, prompt and new tokens.
      width: number of positions of the wider call (γ + 1).
      batch: number of rows; the input is repeated, since kernels differ with the number of rows.
      sampling: how tokens are chosen.
      key: the row's key, needed above temperature 0.
      start: number of tokens of `prefix` that are not new.
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

    one, eos_ids = np.ones(1, np.int32), np.array([model.eos_ids or (-1,)], np.int32)
    context = Context(padded[None, : len(prefix)], one, one * start, eos_ids)
    rows_of_one, mode = sampling.rows(1, model.config.vocab_size), sampling.mode
    single, wide = (
        np.asarray(_score(values, context, rows_of_one, mode)) for values in map(logits, (1, width))
    )
    both = np.isfinite(single) & np.isfinite(wide)  # others are masked
    noise = np.max(np.abs(single[both] - wide[both]), initial=0)
    last = np.stack([single[-1], wide[-1]])
    if key is not None and not mode.greedy:
        places = np.array([[len(prefix)]], np.int32)
        last += np.asarray(gumbel_noise(key[None], places, last.shape[1]))[0]
    second, first = np.partition(last[0], -2)[-2:]
    same = np.argmax(last[0]) == np.argmax(last[1])
    return Difference(float(first - second) if same else 0.0, float(noise))


def _score(
    logits: np.ndarray, context: Context, rows: SamplingRows, mode: SamplingMode
) -> jax.Array:
    """Returns logits `[T, V]` of a row as its tokens are chosen, but without noise."""
    one = jnp.asarray(logits)[None]
    if mode.greedy:
        return distributions.process(one, context, rows, mode)[0]
    return distributions.standardize(one, context, rows, mode).logits[0]


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
