"""Measures coverage: how often the target's next token is among the drafter's first 1, 2 … choices.

A node of a token tree with k children is walked on with this probability, so that coverage is to a
tree what α is to a chain. What each further child adds is acceptance by rank, as `Tree.best` takes
it.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specdec_jax.analysis import formulas
from specdec_jax.speculative.laws import Law

# Children of a node up to which coverage is measured.
RANKS = 8
# The ways to choose k children, as in `speculative.trees.CHILDREN`, and in words.
KINDS = {"top": "k most probable ids", "mixed": "k − 1 of them and a drawn one"}
# By the way in which children are chosen, for k = 1 … RANKS: the mean over positions, and its
# standard error.
Coverage = dict[str, list[tuple[float, float | None]]]


def coverage_at(law: Law, draft_law: Law, greedy: bool) -> dict[str, Float[Array, "B T K"]]:
    """Returns at each position the probability that the target's token is among k children, k = 1 …
    `RANKS` or as many as there are ids.

    Args:
      law: p, the target's law as sampled.
      draft_law: q, the drafter's, at temperature 1 if p is at 0.
      greedy: whether tokens are chosen by argmax.

    Returns:
      "top": of the k most probable ids, Σ p over them. Unless `greedy` also "mixed": of the k − 1
      most probable ids S and one drawn from what they leave of q, q′: Σ p over S and Σ min(p, q′)
      over the others.
    """
    first, ids = jax.lax.top_k(draft_law.logits, min(RANKS, draft_law.logits.shape[-1]))
    p, q = law.probs(), draft_law.probs()
    chosen = jnp.where(first > -jnp.inf, jnp.take_along_axis(p, ids, axis=-1), 0)
    top = jnp.cumsum(chosen, axis=-1)
    if greedy:
        return {"top": top}
    drawn = []
    for rank in range(ids.shape[-1]):
        mass = jnp.sum(q, axis=-1, keepdims=True)
        drawn.append(jnp.sum(jnp.minimum(p, q / jnp.where(mass > 0, mass, 1)), axis=-1))
        others = jnp.arange(p.shape[-1]) != ids[..., rank, None]
        p, q = (jnp.where(others, probs, 0) for probs in (p, q))
    return {"top": top, "mixed": top - chosen + jnp.stack(drawn, axis=-1)}


def mean_coverage(sums: Mapping[str, Sequence[np.ndarray]], counts: Sequence[int]) -> Coverage:
    """Returns means over all positions, with standard errors clustered by sentence.

    Args:
      sums: for each kind of children and each sentence, `coverage_at` added up over its positions.
      counts: positions of each sentence.
    """
    if not sum(counts):
        return {}
    means = lambda rows: [formulas.clustered_mean(column, counts) for column in np.transpose(rows)]
    return {kind: means(sums[kind]) for kind in KINDS if kind in sums}


def by_rank(covered: Sequence[tuple[float, float | None]]) -> list[float]:
    """Returns acceptance by rank: what the first, second … child adds to coverage, not below 0."""
    return np.maximum(np.diff([mean for mean, _ in covered], prepend=0.0), 0.0).tolist()
