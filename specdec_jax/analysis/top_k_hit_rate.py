"""Measures top-k hit rate: how often the target's next token is among the drafter's first k.

The path through a token tree passes a node with k children with this probability, so that the top-k
hit rate is to a tree what α is to a chain. Acceptance by rank, which `Tree.best` takes, is the
probability that each further child adds.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.analysis import formulas
from specdec_jax.speculative.distributions import Categorical

# Children of a node up to which the top-k hit rate is measured.
RANKS = 8
# The ways to choose k children, as in `speculative.trees.CHILDREN`, and in words.
KINDS = {"top": "k most probable ids", "mixed": "k − 1 of them and a drawn one"}
# The k for which acceptance by depth is shown.
_SHOWN = (2, 4, 8)
# Means with their standard errors, which are None with fewer than two sentences.
Rates = list[tuple[float, float | None]]
# By the way in which children are chosen, for k = 1 … RANKS, over positions.
HitRates = dict[str, Rates]


class PositionHitRates(NamedTuple):
    """Top-k hit rate at given positions by k children, by the way in which children are chosen.

    k is 1 … `RANKS`, or as many as there are ids. Children are "top", the k most probable ids, or
    above temperature 0 "mixed": the k − 1 most probable ids S and one drawn from q′, which is q
    without S, renormalised.

    Attributes:
      mean: the probability that the target's token is a child: Σ p over the children; of "mixed"
        Σ p over S and Σ min(p, q′) over the others.
      log_given: the logarithm of the same probability given that this token is y: 1 for a child
        that is not drawn, min(1, q′(y) / p(y)) for the drawn one, and 0 for other ids.
    """

    mean: dict[str, Float[Array, "B T K"]]
    log_given: dict[str, Float[Array, "B T K"]]

    def sums(self, row: int, length: int) -> dict[str, np.ndarray]:
        """Returns `mean` of a row added up over its first `length` positions, `[K]` by kind."""
        return {
            kind: np.asarray(found[row, :length], np.float64).sum(axis=0)
            for kind, found in self.mean.items()
        }


def _pick(probs: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def position_hit_rates(
    dist: Categorical, draft_dist: Categorical, tokens: Int[Array, "B T"], greedy: bool
) -> PositionHitRates:
    """Returns the top-k hit rate at each position.

    `dist` is p, as sampled, `draft_dist` q, at temperature 1 if p is at 0, and `tokens` y.
    """
    first, ids = jax.lax.top_k(draft_dist.logits, min(RANKS, draft_dist.logits.shape[-1]))
    p, q, there = dist.probs(), draft_dist.probs(), first > -jnp.inf
    chosen = jnp.where(there, jnp.take_along_axis(p, ids, axis=-1), 0)
    same = (there & (ids == tokens[..., None])).astype(chosen.dtype)
    top, given = jnp.cumsum(chosen, axis=-1), jnp.cumsum(same, axis=-1)
    if greedy:
        return PositionHitRates({"top": top}, {"top": jnp.log(given)})
    # Where two ways of computing p round differently, an id that was sampled may have p(y) = 0.
    own_p, own_q = _pick(p, tokens), _pick(q, tokens)
    likely = jnp.where(own_p > 0, own_p, jnp.where(own_q > 0, own_q, 1))
    drawn, accepted = [], []
    for rank in range(ids.shape[-1]):
        mass = jnp.sum(q, axis=-1, keepdims=True)
        rest = q / jnp.where(mass > 0, mass, 1)
        drawn.append(jnp.sum(jnp.minimum(p, rest), axis=-1))
        accepted.append(jnp.minimum(_pick(rest, tokens) / likely, 1))
        others = jnp.arange(p.shape[-1]) != ids[..., rank, None]
        p, q = (jnp.where(others, probs, 0) for probs in (p, q))
    mixed = top - chosen + jnp.stack(drawn, axis=-1)
    return PositionHitRates(
        {"top": top, "mixed": mixed},
        {"top": jnp.log(given), "mixed": jnp.log(given - same + jnp.stack(accepted, axis=-1))},
    )


def mean_hit_rate(sums: Sequence[Mapping[str, np.ndarray]], counts: Sequence[int]) -> HitRates:
    """Returns means over all positions, with standard errors clustered by sentence.

    `sums` are `PositionHitRates.sums` of each sentence, `counts` its positions.
    """
    if not sum(counts):
        return {}
    return {
        kind: [
            formulas.clustered_mean(column, counts)
            for column in np.transpose([found[kind] for found in sums])
        ]
        for kind in KINDS
        if kind in sums[0]
    }


def acceptance_by_rank(hit_rates: Rates) -> list[float]:
    """Returns acceptance by rank: how much the first, second … child adds, at least 0."""
    return np.maximum(np.diff([mean for mean, _ in hit_rates], prepend=0.0), 0.0).tolist()


def depth_curves(accepted: Mapping[str, Any]) -> dict[str, Rates]:
    """Returns a record's acceptance by depth, of chains and of trees of a few widths, by name."""
    curves = {f"chain, {name}": rates for name, rates in accepted.get("by_depth", {}).items()}
    for kind, widths in accepted.get("hit_rate_by_depth", {}).items():
        curves |= {
            f"tree, k = {k}: {KINDS[kind]}": widths[k - 1] for k in _SHOWN if k <= len(widths)
        }
    return {
        name: [
            (rate.get("accepted", rate.get("covered")), rate["standard_error"]) for rate in rates
        ]
        for name, rates in curves.items()
    }
