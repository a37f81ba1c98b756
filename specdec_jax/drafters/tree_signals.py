"""What a policy of γ reads of the drafter's distributions while a tree is drafted.

Signals are columns by node, in the order in which nodes are drafted, node 0 first; None if the
policy reads none. `places` are numbers of columns, `[J]` or `[B, J]`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.speculative import distributions
from specdec_jax.speculative.policy_inputs import DraftSignals
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.tree_iteration import at_nodes

Signals = DraftSignals | None


def of_root(state: DecodeState) -> Signals:
    """Returns the column of node 0, after which every draft goes on."""
    if state.policy is None or not state.policy.needs_probs:
        return None
    zeros = jnp.zeros((len(state.lengths), 1))
    return DraftSignals(zeros + 1, zeros, zeros)


def goes_on(
    state: DecodeState, told: Signals, places: np.ndarray | jax.Array
) -> Bool[Array, "B J"] | bool:
    """Returns which nodes may have children."""
    if told is None or state.policy is None:
        return True
    return state.policy.goes_on(DraftSignals(*(_at(values, places) for values in told)))


def of_children(
    state: DecodeState,
    logits: Float[Array, "B J V"],
    depths: Int[Array, "B J"],
    texts: Int[Array, "B J S"],
    chosen: Int[Array, "B J K"],
) -> Signals:
    """Returns the signals `[B, J · K]` of the children `chosen` of J nodes.

    They are computed as if node 0 were their parent; the other arguments are those of `at_nodes`.
    """
    if state.policy is None or not state.policy.needs_probs:
        return None
    dist = at_nodes(
        functools.partial(distributions.standardize, soften=True), state, logits, depths, texts
    )
    log_probs = (
        jnp.take_along_axis(dist.logits, jnp.maximum(chosen, 0), axis=2)
        - dist.log_normalizer[..., None]
    )
    entropy = dist.entropy()

    def each(x: jax.Array):
        return jnp.repeat(x, chosen.shape[2], axis=1)

    evenness = entropy / max(math.log(logits.shape[2]), 1e-9)
    return DraftSignals(jnp.exp(log_probs).reshape(len(chosen), -1), each(entropy), each(evenness))


def extended(
    told: Signals,
    seen: Signals,
    parents: np.ndarray | jax.Array,
    places: slice | np.ndarray = slice(None),
) -> Signals:
    """Returns the columns `told` and those of new nodes.

    Args:
      seen: as from `of_children`.
      parents: the places of the new nodes' parents in `told`.
      places: static, those of the new nodes in `seen`.
    """
    if told is None or seen is None:
        return None
    new = DraftSignals(*(values[:, places] for values in seen))
    new = new._replace(prob=new.prob * _at(told.prob, parents))
    return DraftSignals(*(jnp.concatenate(both, axis=1) for both in zip(told, new)))


def budget(
    state: DecodeState, told: Signals, depth: int, num_wanted: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Returns how many nodes are wanted, now that the children of the nodes at `depth` are told."""
    if told is None or state.policy is None or depth:
        return num_wanted
    first = DraftSignals(*(values[:, 1:] for values in told))
    return jnp.minimum(num_wanted, state.policy.budget(state.policy_state, first))


def by_number(state: DecodeState, told: Signals, order: np.ndarray | jax.Array) -> Signals:
    """Returns the signals `[B, G]` of nodes 1 … G; `order` is where nodes 0, 1 … are."""
    if told is None or state.policy is None:
        return None
    return DraftSignals(*(_at(values, order)[:, 1 : state.policy.maximum + 1] for values in told))


def _at(values: jax.Array, places: np.ndarray | jax.Array) -> jax.Array:
    return values[:, places] if places.ndim == 1 else jnp.take_along_axis(values, places, axis=1)
