"""Records the iterations of one input, as in the paper's Figure 1, and the drafted trees."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding import autotune
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.decoding.generation_config import (
    ConfigOrPath,
    check_unset,
    document_options,
    split_options,
)
from specdec_jax.decoding.results import finish
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative import distributions
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.drafter import Drafter, TreeDrafter, check_draft
from specdec_jax.speculative.iteration import write
from specdec_jax.speculative.policy import Policy
from specdec_jax.speculative.state import DecodeState, Draft, Scored, make_prefixes
from specdec_jax.speculative.tree_iteration import TreeDecoding, apply_to_draft
from specdec_jax.speculative.verifiers import pick


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
    """The tree of one iteration of one row, or its chain as a tree with one branch.

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
        those of nodes 1, 2 …; None unless the policy of γ reads them (see `policy.DraftSignals`).
      tree: the tree that was drafted, None for a chain.
      chain: the chain that was drafted, as a tree with one branch, with p, q and p/q of each token;
        None for a tree, and in plain decoding.
    """

    accepted: list[int]
    rejected: int | None
    corrected: int | None
    gamma: int
    entropies: list[float] | None
    tree: TreeStep | None = None
    chain: TreeStep | None = None


@document_options
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
    strategy, steps, tree, chain = state.config.strategy, [], None, None
    length, drafter = int(request.prefix_lengths[0]), request.drafter
    watched = drafter is not None and not isinstance(strategy, TreeDecoding)
    if watched:
        p, q = (np.zeros((1, state.config.gamma), np.float32) for _ in range(2))
        drafter = _WatchedDrafter(drafter)
        state = state.replace(draft_state=_WatchedState(state.draft_state, p, q))
    while not bool(state.done[0]):
        if isinstance(strategy, TreeDecoding):
            state, seen = _advance_tree(request.network, request.drafter, state)
            seen = jax.tree.map(lambda values: np.asarray(values)[0], seen)
            tree, drawn = _read_tree(seen), np.flatnonzero(seen.valid[1:])
        else:
            last = int(state.tokens[0, length - 1])
            state = advance(request.network, drafter, state, np.int32(1))
        new = [int(token) for token in np.asarray(state.tokens)[0, length : int(state.lengths[0])]]
        length += len(new)
        draft, drafted, accepted = (
            np.asarray(x)[0] for x in (state.last_draft, state.last_drafted, state.last_accepted)
        )
        if tree is None:
            drawn = np.arange(drafted)
            rejected = int(draft[accepted]) if accepted < drafted else None
            if watched:
                tokens = [last, *draft[:drafted].tolist()]
                chain = _read_chain(tokens, int(accepted), state.draft_state)
        else:
            children = tree.children(tree.path[-1])
            rejected = tree.nodes[children[0]].token if children else None
        corrected = new[accepted] if len(new) > accepted else None
        entropies = state.last_seen and np.asarray(state.last_seen.entropy)[0, drawn].tolist()
        seen = new[:accepted], rejected, corrected, int(drafted), entropies
        steps.append(TraceStep(*seen, tree, chain))
    result = finish(target, state, request)  # raises NonFiniteLogitsError
    autotune.record(request, result)
    return steps


class _WatchedState(NamedTuple):
    """The state of a `_WatchedDrafter`.

    Attributes:
      own: the drafter's.
      p, q: as in `TreeNode`, of the tokens of the last draft; NaN for a probability that there is
        not.
    """

    own: Any
    p: Float[Array, "B G"]
    q: Float[Array, "B G"]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Endless(Policy):
    """A policy that reads distributions, so that drafters tell them, and ends no draft."""

    needs_probs: ClassVar[bool] = True


@flax.struct.dataclass
class _WatchedDrafter(Drafter):
    """A drafter of chains that remembers p and q of each drafted token.

    Attributes:
      drafter: the drafter that does the work.
    """

    drafter: Drafter

    reads_states: ClassVar[Any] = property(lambda self: self.drafter.reads_states)
    reads_logits: ClassVar[bool] = True

    def draft(
        self, draft_state: _WatchedState, state: DecodeState, num_wanted: Int[Array, " B"]
    ) -> tuple[_WatchedState, Draft]:
        told, read = self.drafter.provides_probs, state.policy
        unread = read is None or not read.needs_probs
        before = dataclasses.replace(state, draft_state=draft_state.own)
        if told and unread:
            state = dataclasses.replace(state, policy=_Endless(state.config.gamma))
        returned = self.drafter.draft(draft_state.own, state, num_wanted)
        own, draft = check_draft(self.drafter, returned, before)
        q = jnp.full_like(draft_state.q, jnp.nan)
        if told and draft.seen is not None:
            q = draft.seen.prob[:, : q.shape[1]]
        if unread:
            draft = draft._replace(seen=None)
        return draft_state._replace(own=own, q=q), draft

    def observe(
        self, draft_state: _WatchedState, state: DecodeState, scored: Scored
    ) -> _WatchedState:
        assert scored.logits is not None, "the drafter reads logits"
        lengths, drafted = state.lengths - scored.num_new, scored.tokens[:, 1:]
        count = jnp.full_like(lengths, drafted.shape[1])
        before = dataclasses.replace(
            state, tokens=write(state.tokens, drafted, lengths, count), lengths=lengths
        )
        adjusted = make_prefixes(before), state.sampling, state.config.mode
        dist = distributions.standardize(scored.logits, *adjusted, soften=True)
        p = dist.prob(jnp.pad(drafted, ((0, 0), (0, 1))))[:, :-1]
        if not self.drafter.reads_logits:
            scored = scored._replace(logits=None)
        return draft_state._replace(own=self.drafter.observe(draft_state.own, state, scored), p=p)


def _read_chain(tokens: Sequence[int], accepted: int, watched: _WatchedState) -> TreeStep:
    """Returns the last committed token and the drafted ones as a tree with one branch."""
    p, q = (np.asarray(values)[0] for values in (watched.p, watched.q))
    nodes = [TreeNode(tokens[0], -1, 1.0, None)]
    for place, token in enumerate(tokens[1:]):
        told = None if np.isnan(q[place]) else float(q[place])
        nodes.append(TreeNode(token, place, float(p[place]), told))
    return TreeStep(nodes, list(range(accepted + 1)))


class _SeenTree(NamedTuple):
    """A tree that was drafted, by number of the node, as arrays with a row for each of the state.

    Attributes:
      tokens, parents, valid, path, accepted: as in `TreeDraft` and `TreeVerification`.
      p, q: as in `TreeNode`; NaN for a probability that there is not.
    """

    tokens: Any
    parents: Any
    valid: Any
    path: Any
    accepted: Any
    p: Any
    q: Any


@functools.partial(jax.jit, donate_argnames="state")
def _advance_tree(
    target: Network, drafter: TreeDrafter, state: DecodeState
) -> tuple[DecodeState, _SeenTree]:
    """Runs one iteration; returns the tree that it drafted too."""
    strategy = state.config.strategy
    assert isinstance(strategy, TreeDecoding)
    after, (draft, states, verified) = strategy.watch(target, drafter, state)
    logits = target.head(states, draft.valid)
    dist = apply_to_draft(
        functools.partial(distributions.standardize, soften=True), state, draft, logits
    )
    parents, path, accepted = draft.branches.parents, verified.path, verified.num_accepted
    above = jnp.maximum(parents, 0)
    dist = Categorical(pick(dist.logits, above), pick(dist.log_normalizer, above))
    p = jnp.exp(dist.log_prob(jnp.maximum(draft.tokens, 0)))
    q = jnp.full(p.shape, jnp.nan) if draft.log_q is None else jnp.exp(draft.log_q)
    return after, _SeenTree(draft.tokens, parents, draft.valid, path, accepted, p, q)


def _read_tree(seen: _SeenTree) -> TreeStep:
    """Returns the tree of one row."""
    valid = np.flatnonzero(seen.valid)
    places = {int(number): place for place, number in enumerate(valid)} | {-1: -1}
    nodes = [
        TreeNode(
            int(seen.tokens[node]),
            places[int(seen.parents[node])],
            float(seen.p[node]) if node else 1.0,
            None if np.isnan(seen.q[node]) else float(seen.q[node]),
        )
        for node in valid
    ]
    return TreeStep(nodes, [places[int(node)] for node in seen.path[: seen.accepted + 1]])
