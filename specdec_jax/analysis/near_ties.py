"""Measures how near a choice is to a tie: of a token, by how far logits from a call over several
positions are from those of calls over one, and of the beams of a search."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.analysis.timing import prefill_cache
from specdec_jax.decoding.beams import plan_decoding
from specdec_jax.decoding.beams import start as start_search
from specdec_jax.models.jax_settings import isolated
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.beam_iteration import (
    candidates,
    iterate_beams,
    node_sums,
    scored,
)
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.beam_tree import live_beams


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
        """Whether either token can be the argmax in exact arithmetic: each of the two logits may be
        off by `noise`."""
        return self.margin < 2 * self.noise


_decode = jax.jit(Network.decode)


@isolated
def measure_difference(
    model: LanguageModel, inputs, prefix, width: int, batch: int = 1
) -> Difference:
    """Returns the `Difference` at the token after `prefix`.

    Args:
      model: the target.
      inputs: ids of one encoder input; ignored for a decoder-only model.
      prefix: decoder tokens, start token first; for a decoder-only model, prompt and new tokens.
      width: number of positions of the wider call (γ + 1).
      batch: number of rows; the input is repeated, since kernels differ with the number of rows.
    """
    inputs = np.tile(np.asarray(inputs, np.int32), (batch, 1))
    lengths = np.full(batch, inputs.shape[1], np.int32)
    padded = np.zeros(-(-len(prefix) // width) * width, np.int32)
    padded[: len(prefix)] = prefix

    def logits(step: int) -> np.ndarray:
        network = model.network
        cache, rows = prefill_cache(network, inputs, lengths, slots=len(padded)), []
        for start in range(0, len(padded), step):
            tokens = np.tile(padded[start : start + step], (batch, 1))
            out, cache = _decode(network, tokens, np.full(batch, start, np.int32), cache)
            rows.append(np.asarray(out[0]))
        return np.concatenate(rows)[: len(prefix)]

    single, wide = logits(1), logits(width)
    second, first = np.partition(single[-1], -2)[-2:]
    return Difference(float(first - second), float(np.max(np.abs(single - wide))))


@isolated
def search_margin(model: LanguageModel, given, how: Mapping[str, Any]) -> float:
    """Returns the least distance of two neighbours among the numbers that plain beam search orders,
    in all its steps.

    Those are the sums of the best continuations of all beams, and the scores of the hypotheses that
    have ended. Where it is no more than rounding, another order of additions may lead to another
    output.

    Args:
      given: one input, as `generate` takes it.
      how: the arguments of `generate`.
    """
    plan = plan_decoding(model, [given], **how)
    state, least = start_search(plan), np.inf
    while not state.done.all():
        margin, state = _margin(model.network, state)
        least = min(least, float(margin))
    return least


@jax.jit
def _margin(target: Network, state: BeamState) -> tuple[jax.Array, BeamState]:
    """The margin of one step of plain search, of one row, and the state after it."""
    tree, live = live_beams(state), jnp.ones((1, state.config.beams), bool)
    states, _ = target.decode_nodes(tree.tokens, tree.nodes, state.target_cache, live)
    own, adjusted = scored(state, target.head(states, live), tree)
    sums = node_sums(tree, state.live.scores, own if adjusted is None else adjusted)
    found = candidates(own, adjusted, sums, state.config).sums.reshape(-1)
    found, _ = jax.lax.top_k(found, min(state.config.candidates + 1, len(found)))
    after = iterate_beams(target, None, state)
    distances = [
        _distance(found),
        _distance(jnp.where(after.is_finished, after.finished.scores, -jnp.inf)[0]),
    ]
    return jnp.min(jnp.stack(distances)), after


def _distance(numbers: jax.Array) -> jax.Array:
    """The least of two neighbours, without what stands for nothing and is lowered far below the
    others."""
    gaps = -jnp.diff(jnp.sort(numbers, descending=True))
    return jnp.min(
        jnp.where(jnp.sort(numbers, descending=True)[1:] > -1e6, gaps, jnp.inf), initial=jnp.inf
    )
