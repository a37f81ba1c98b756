"""Records the iterations of one input, as in the paper's Figure 1, and the drafted trees."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding import autotune
from specdec_jax.decoding.generate import prepare
from specdec_jax.decoding.generation_config import (
    ConfigOrPath,
    check_unset,
    split_options,
    takes_options,
)
from specdec_jax.decoding.loop import advance
from specdec_jax.decoding.results import finish
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative import distributions
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.tree_drafter import TreeDrafter
from specdec_jax.speculative.tree_iteration import along, at_draft, watch_tree


class TreeNode(NamedTuple):
    """A node of a tree that was drafted.

    Attributes:
      token: its id; of node 0 the last committed one.
      parent: the place of its parent in `TreeStep.nodes`; −1 for node 0.
      p: the target's probability of the token after the nodes before it, in the distribution that
        tokens are chosen from; at temperature 0 that distribution is taken as at temperature 1. 1
        for node 0.
      q: the same of the drafter; None where it provides no probabilities.
    """

    token: int
    parent: int
    p: float
    q: float | None

    @property
    def ratio(self) -> float | None:
        """p / q, infinite where q is 0; None without q."""
        if self.q is None:
            return None
        return self.p / self.q if self.q else float("inf")


class TreeStep(NamedTuple):
    """The tree of one iteration of one row.

    Attributes:
      nodes: the nodes that are there, parents before their children, siblings in the order in which
        they were chosen.
      path: the places in `nodes` of those that are accepted, node 0 first.
    """

    nodes: list[TreeNode]
    path: list[int]

    def line(self, node: int) -> list[int]:
        """Returns the nodes that `node` sees: its ancestors from node 0 on, then itself."""
        parent = self.nodes[node].parent
        return [*(self.line(parent) if parent >= 0 else ()), node]

    def children(self, node: int) -> list[int]:
        """Returns the children of `node` by rank."""
        return [number for number, other in enumerate(self.nodes) if other.parent == node]


class TraceStep(NamedTuple):
    """One iteration of one row.

    Attributes:
      accepted: accepted ids.
      rejected: the first rejected id, None if the whole draft was accepted. Of a tree: the first
        child of the last node that is accepted, None if it has none.
      corrected: the id that the target added, None after an accepted EOS.
      gamma: number of drafted ids.
      entropies: entropies in nats of the distributions that the ids were drawn from, of a tree
        those of nodes 1, 2 …; None unless the policy of γ reads them (see `outcomes.DraftSignals`).
      tree: the tree that was drafted, None for a chain.
    """

    accepted: list[int]
    rejected: int | None
    corrected: int | None
    gamma: int
    entropies: list[float] | None
    tree: TreeStep | None = None


@takes_options
@isolated
def trace(
    target: LanguageModel, text: Any, *, config: ConfigOrPath = None, **options: Any
) -> list[TraceStep]:
    """Returns the iterations of one input, as in the paper's Figure 1.

    Options are those of `generate`, except `num_samples`, `stop` and `deadline`.
    """
    config, data = split_options(config, options)
    check_unset(config, "for a trace", "num_samples", "stop", "deadline")
    if text is None:
        raise ValueError("text: got None, expected a string, or a list of ids")
    state, request = prepare(target, [text], config=config, **data._asdict())
    steps, length, tree = [], int(request.prefix_lengths[0]), None
    while not bool(state.done[0]):
        if state.config.tree is None:
            state = advance(request.network, request.drafter, state, np.int32(1))
        else:
            state, seen = _advance_tree(request.network, request.drafter, state)
            tree = _read_tree(*(np.asarray(values)[0] for values in seen))
        new = [int(token) for token in np.asarray(state.tokens)[0, length : int(state.lengths[0])]]
        length += len(new)
        draft, drafted, accepted = (
            np.asarray(x)[0] for x in (state.last_draft, state.last_drafted, state.last_accepted)
        )
        if tree is None:
            rejected, there = (
                int(draft[accepted]) if accepted < drafted else None,
                np.arange(drafted),
            )
        else:
            _, _, valid, *_ = seen
            there = np.flatnonzero(np.asarray(valid)[0, 1:])
            rejected = next(
                (tree.nodes[child].token for child in tree.children(tree.path[-1])), None
            )
        corrected = new[accepted] if len(new) > accepted else None
        entropies = state.last_seen and np.asarray(state.last_seen.entropy)[0, there].tolist()
        steps.append(TraceStep(new[:accepted], rejected, corrected, int(drafted), entropies, tree))
    result = finish(target, state, request)  # raises NonFiniteLogitsError
    autotune.record(request, result)
    return steps


@functools.partial(jax.jit, donate_argnames="state")
def _advance_tree(
    target: Network, drafter: TreeDrafter, state: DecodeState
) -> tuple[DecodeState, tuple[jax.Array, ...]]:
    """Runs one iteration; returns also what `_read_tree` takes, with a row for each of `state`."""
    after, (draft, states, found) = watch_tree(target, drafter, state)
    logits = target.head(states, draft.valid)
    dist = at_draft(functools.partial(distributions.standardize, soften=True), state, draft, logits)
    parents = draft.branches.parents
    above = jnp.maximum(parents, 0)
    log_p = Categorical(along(dist.logits, above), along(dist.log_normalizer, above)).log_prob(
        jnp.maximum(draft.tokens, 0)
    )
    log_q = jnp.full(log_p.shape, jnp.nan) if draft.log_q is None else draft.log_q
    return after, (
        draft.tokens,
        parents,
        draft.valid,
        found.path,
        found.num_accepted,
        jnp.exp(log_p),
        jnp.exp(log_q),
    )


def _read_tree(
    tokens: np.ndarray,
    parents: np.ndarray,
    valid: np.ndarray,
    path: np.ndarray,
    accepted: np.ndarray,
    p: np.ndarray,
    q: np.ndarray,
) -> TreeStep:
    """Returns the tree of one row.

    Arguments by number of the node, −1 being no parent, and NaN no distribution.
    """
    there = np.flatnonzero(valid)
    places = {int(number): place for place, number in enumerate(there)} | {-1: -1}
    nodes = [
        TreeNode(
            int(tokens[node]),
            places[int(parents[node])],
            float(p[node]) if node else 1.0,
            None if np.isnan(q[node]) else float(q[node]),
        )
        for node in there
    ]
    return TreeStep(nodes, [places[int(node)] for node in path[: accepted + 1]])
