"""Measures top-k hit rate: how often the target's next token is among the drafter's first 1, 2 …
choices.

A node of a token tree with k children is walked on with this probability, so that the top-k hit
rate is to a tree what α is to a chain. What each further child adds is acceptance by rank, as
`Tree.best` takes it.
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
# The k for which acceptance by depth is shown; the record has all.
_SHOWN = (2, 4, 8)
# Means with their standard errors, which are None with fewer than two sentences.
Rates = list[tuple[float, float | None]]
# By the way in which children are chosen, for k = 1 … RANKS, over positions.
HitRates = dict[str, Rates]


class Covered(NamedTuple):
    """Top-k hit rate at given positions by k children, k = 1 … `RANKS` or as many as there are ids,
    by the way in which children are chosen.

    "top": the k most probable ids. "mixed", which is not there at temperature 0: the k − 1 most
    probable ids S and one drawn from what they leave of q, q′.

    Attributes:
      mean: the probability that the target's token is a child: Σ p over the children; of "mixed"
        Σ p over S and Σ min(p, q′) over the others.
      log_given: the logarithm of the same given that this token is y: of the probability 1 for a
        child that is not drawn, min(1, q′(y) / p(y)) for the drawn one, and 0 for other ids.
    """

    mean: dict[str, Float[Array, "B T K"]]
    log_given: dict[str, Float[Array, "B T K"]]

    def sums(self, row: int, length: int) -> dict[str, np.ndarray]:
        """Returns `mean` of a row added up over its first `length` positions, `[K]` by kind."""
        positions = {
            kind: np.asarray(found[row, :length], np.float64) for kind, found in self.mean.items()
        }
        return {kind: found.sum(axis=0) for kind, found in positions.items()}


def hit_rate_at(
    dist: Categorical, draft_distribution: Categorical, tokens: Int[Array, "B T"], greedy: bool
) -> Covered:
    """Returns the top-k hit rate at each position.

    Args:
      dist: p, the target's distribution as sampled.
      draft_distribution: q, the drafter's, at temperature 1 if p is at 0.
      tokens: y.
      greedy: whether tokens are chosen by argmax.
    """
    first, ids = jax.lax.top_k(
        draft_distribution.logits, min(RANKS, draft_distribution.logits.shape[-1])
    )
    p, q, there = dist.probs(), draft_distribution.probs(), first > -jnp.inf

    def own(probs):
        return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]

    chosen = jnp.where(there, jnp.take_along_axis(p, ids, axis=-1), 0)
    same = (there & (ids == tokens[..., None])).astype(chosen.dtype)
    top, given = jnp.cumsum(chosen, axis=-1), jnp.cumsum(same, axis=-1)
    if greedy:
        return Covered({"top": top}, {"top": jnp.log(given)})
    # Where two ways of computing p round differently, an id that was sampled may have p(y) = 0.
    likely = jnp.where(own(p) > 0, own(p), jnp.where(own(q) > 0, own(q), 1))
    drawn, accepted = [], []
    for rank in range(ids.shape[-1]):
        mass = jnp.sum(q, axis=-1, keepdims=True)
        rest = q / jnp.where(mass > 0, mass, 1)
        drawn.append(jnp.sum(jnp.minimum(p, rest), axis=-1))
        accepted.append(jnp.minimum(own(rest) / likely, 1))
        others = jnp.arange(p.shape[-1]) != ids[..., rank, None]
        p, q = (jnp.where(others, probs, 0) for probs in (p, q))
    mixed = top - chosen + jnp.stack(drawn, axis=-1)
    return Covered(
        {"top": top, "mixed": mixed},
        {"top": jnp.log(given), "mixed": jnp.log(given - same + jnp.stack(accepted, axis=-1))},
    )


def mean_hit_rate(sums: Sequence[Mapping[str, np.ndarray]], counts: Sequence[int]) -> HitRates:
    """Returns means over all positions, with standard errors clustered by sentence.

    Args:
      sums: `Covered.sums` of each sentence.
      counts: positions of each sentence.
    """
    if not sum(counts):
        return {}

    def means(rows):
        return [formulas.clustered_mean(column, counts) for column in np.transpose(rows)]

    return {kind: means([found[kind] for found in sums]) for kind in KINDS if kind in sums[0]}


def by_rank(covered: Sequence[tuple[float, float | None]]) -> list[float]:
    """Returns acceptance by rank: what the first, second … child adds to top-k hit rate, not below
    0."""
    return np.maximum(np.diff([mean for mean, _ in covered], prepend=0.0), 0.0).tolist()


def depth_curves(accepted: Mapping[str, Any]) -> dict[str, Rates]:
    """Returns the acceptance by depth of a record's chains, and of its trees of a few widths, by
    their names in words."""

    def rates(name, values):
        return [(value[name], value["standard_error"]) for value in values]

    found = {
        f"chain, {name}": rates("accepted", values)
        for name, values in accepted.get("by_depth", {}).items()
    }
    for kind, widths in accepted.get("hit_rate_by_depth", {}).items():
        shown = [(k, widths[k - 1]) for k in _SHOWN if k <= len(widths)]
        found |= {f"tree, k = {k}: {KINDS[kind]}": rates("covered", values) for k, values in shown}
    return found
