"""Drafts trees level by level, with one call for all nodes of a level that have children."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.backends.axes import TokenAndLogprob
from specdec_jax.backends.tree_positions import WindowNodes
from specdec_jax.models.network import Network
from specdec_jax.speculative import distributions, randomness, tree_growth
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.policy import DraftSignals
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.tree_growth import choose_children
from specdec_jax.speculative.tree_iteration import apply_to_nodes, node_sequences
from specdec_jax.speculative.trees import DynamicTree, Tree
from specdec_jax.speculative.verifiers import pick


class Level(NamedTuple):
    """The J nodes of one depth that have children, as a drafter's model is fed them.

    Attributes:
      depth: their depth; 0 is node 0 alone.
      numbers: `[J]`, their numbers in a tree of fixed shape; static. None for other trees.
      first: the place of the first of them in the order in which nodes are fed; static.
      lines: `[J, D + 1]`, or `[B, J, D + 1]`, by depth: the places of their ancestors, then their
        own, in that order.
      tokens: their tokens.
      valid: False for nodes that are not there.
      counts: how many children each has; static.
      texts: the tokens up to each of them by position: committed ones, then those on its path.
    """

    depth: int
    numbers: np.ndarray | None
    first: int
    lines: Any
    tokens: Int[Array, "B J"]
    valid: Bool[Array, "B J"]
    counts: list[int]
    texts: Int[Array, "B J S"]

    @property
    def depths(self) -> Int[Array, "B J"]:
        """The depth of each of them."""
        return jnp.full(self.tokens.shape, self.depth, jnp.int32)

    def rows(self, state: DecodeState) -> tuple[Int[Array, "N S"], Int[Array, " N"]]:
        """Returns `texts` as N = B · J rows, and how many tokens of each count."""
        lengths = jnp.repeat(state.lengths, self.tokens.shape[1]) + self.depth
        return self.texts.reshape(len(lengths), -1), lengths


# (level, carry) -> (logits `[B, J, V]` of the token after each of its nodes, carry)
LogitsOf = Callable[[Level, Any], tuple[Float[Array, "B J V"], Any]]
# (level, carry) -> (argmax token after each of its nodes, −1 where a logit is NaN, and its
# log-probability; carry)
GreedyTokensOf = Callable[[Level, Any], tuple[TokenAndLogprob, Any]]
# What a policy of γ reads, in columns by node; None if it reads nothing.
Signals = DraftSignals | None


class Children(NamedTuple):
    """The children of the J nodes of a level, at most K of each.

    Attributes:
      tokens: by rank; −1 where there is none. A first child of −1 is taken for a distribution that
        contained NaN.
      dist: the distributions that they were chosen from; None where no verifier will ask.
      log_q: log-probabilities of `tokens`; None where the drafter provides no probabilities.
      signals: `[B, J · K]`, what a policy of γ reads of them.
    """

    tokens: Int[Array, "B J K"]
    dist: Categorical | None = None
    log_q: Float[Array, "B J K"] | None = None
    signals: Signals = None


# (level, carry) -> (the children of its nodes; carry)
ChildrenOf = Callable[[Level, Any], tuple[Children, Any]]


def draft_tree(
    state: DecodeState,
    num_wanted: Int[Array, " B"],
    max_depth: Int[Array, " B"],
    logits_of: LogitsOf,
    carry: Any,
    greedy_tokens_of: GreedyTokensOf | None = None,
) -> tuple[TreeDraft, Any]:
    """Drafts the tree `state.config.tree` from a drafter's logits.

    Args:
      state, num_wanted, max_depth: as for `TreeDrafter.draft_tree`.
      logits_of: gives the drafter's logits, as wide as the target's vocabulary, level by level.
      carry: what `logits_of` keeps from level to level.
      greedy_tokens_of: does so for the greatest logits alone, where that takes less time.

    Returns:
      The draft, whose `calls` are 0, and the last carry.
    """
    tree, mode = state.config.tree, state.config.mode
    if isinstance(tree, DynamicTree):
        return _grow(state, num_wanted, max_depth, logits_of, carry)
    assert tree is not None, "a program of trees"
    bits = _random_bits(state, tree)
    bare = mode.greedy and not mode.processes and not _reads_signals(state)

    def children_of(level: Level, carry: Any):
        if greedy_tokens_of is not None and bare and max(level.counts) == 1:
            (tokens, log_probs), carry = greedy_tokens_of(level, carry)
            return Children(tokens[..., None], log_q=log_probs[..., None]), carry
        logits, carry = logits_of(level, carry)
        assert level.numbers is not None
        own = None if bits is None else bits[:, tree.children_of(level.numbers) - 1]
        dist, _, chosen = _choose(state, level, logits, own)
        signals = _read_signals(state, level, logits, chosen)
        return Children(chosen, dist, _log_probs(dist, chosen), signals), carry

    return draft_children(state, num_wanted, max_depth, children_of, carry)


def draft_tree_at_once(
    state: DecodeState,
    num_wanted: Int[Array, " B"],
    max_depth: Int[Array, " B"],
    logits: Float[Array, "B T V"],
) -> TreeDraft:
    """Drafts a tree of depth T at most, with the same logits after all nodes of one depth."""
    batch, most, vocab_size = logits.shape

    def logits_of(level: Level, carry: Any):
        here = logits[:, None, min(level.depth, most - 1)]
        return jnp.broadcast_to(here, (batch, level.tokens.shape[1], vocab_size)), carry

    return draft_tree(state, num_wanted, jnp.minimum(max_depth, most), logits_of, ())[0]


def draft_children(
    state: DecodeState,
    num_wanted: jax.Array,
    max_depth: jax.Array,
    children_of: ChildrenOf,
    carry: Any = (),
) -> tuple[TreeDraft, Any]:
    """Does what `draft_tree` does for a fixed tree and a drafter that chooses children itself."""
    config, tree, batch = state.config, state.config.tree, len(state.lengths)
    if not isinstance(tree, Tree):  # `kinds` of a drafter that chooses children must be fewer
        raise ValueError(f"tree: got {tree}, expected a Tree, whose shape is fixed")
    join = functools.partial(jnp.concatenate, axis=1)
    # Columns are added level by level, and put in the order of the nodes' numbers at the end.
    tokens = [jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)]
    valid, order, dists, log_q = [~state.done[:, None]], [np.zeros(1, np.int64)], [], []
    log_q.append(jnp.zeros((batch, 1)))
    column, signals, first = np.zeros(tree.size, np.int64), _root_signals(state), 0
    for depth in range(tree.depth):
        inner, children = tree.inner(depth), tree.level(depth + 1)
        so_far, places, shape = join(tokens), column[inner], (batch, len(inner))
        there = join(valid)[:, places] & _find_expandable(state, signals, places)
        lines = jnp.asarray(column[tree.lines[inner]], jnp.int32)
        lines = jnp.broadcast_to(lines, (*shape, tree.depth + 1))
        texts = node_sequences(state, so_far, lines, jnp.full(shape, depth, jnp.int32))
        counts = np.sum(tree.children_of(inner) > 0, axis=1).tolist()
        fed = tree.fed[tree.lines[inner]]
        level = Level(depth, inner, first, fed, so_far[:, places], there, counts, texts)
        chosen, carry = children_of(level, carry)
        first += len(inner)
        if config.needs_draft_probs:
            dists.append(chosen.dist)
        parents = np.searchsorted(inner, np.asarray(tree.parents)[children - 1])
        place = slice(None), parents, tree.ranks[children]
        new = chosen.tokens[place]
        own = parents * chosen.tokens.shape[2] + tree.ranks[children]
        signals = _add_signals(signals, chosen.signals, places[parents], own)
        num_wanted = _limit_nodes(state, signals, depth, num_wanted)
        open_ = (there & ~_find_ended(state, level))[:, parents]
        open_ &= (children <= num_wanted[:, None]) & (depth < max_depth)[:, None]
        tokens.append(jnp.where(open_, new, 0))
        if chosen.log_q is not None:
            log_q.append(chosen.log_q[place])
        valid.append(open_ & (new >= 0))
        column[children] = so_far.shape[1] + np.arange(len(children))
        order.append(children)
    back = np.argsort(np.concatenate(order))
    origins = np.array((0, *tree.fed[list(tree.parents)]), np.int32)
    origins, slots = (jnp.broadcast_to(x, (batch, tree.size)) for x in (origins, tree.fed))
    return TreeDraft(
        tokens=join(tokens)[:, back],
        branches=tree.branches(batch),
        valid=join(valid)[:, back],
        dist=Categorical(*map(join, zip(*dists))) if dists else None,
        origins=origins,
        calls=jnp.zeros(batch, jnp.int32),
        slots=jnp.maximum(slots, 0),
        log_q=join(log_q)[:, back] if len(log_q) > tree.depth else None,
        seen=_order_signals(state, signals, back),
    ), carry


def _log_probs(dist: Categorical, tokens: Int[Array, "B J K"]) -> Float[Array, "B J K"]:
    """Returns the log-probabilities of K tokens at each of J nodes; −1 counts as 0."""
    logits = jnp.take_along_axis(dist.logits, jnp.maximum(tokens, 0), axis=2)
    return logits - dist.log_normalizer[..., None]


def _random_bits(state: DecodeState, tree: Tree) -> jax.Array | None:
    """Returns the random bits `[B, N − 1, 2]` by which drafted nodes are drawn, if any are."""
    if state.config.mode.greedy or tree.kind in ("top", "gumbel"):
        return None
    offsets = jnp.broadcast_to(jnp.arange(tree.size - 1), (len(state.lengths), tree.size - 1))
    return randomness.random_bits(state.keys, state.lengths, offsets, randomness.DRAFT)


def _find_ended(state: DecodeState, level: Level) -> Bool[Array, "B J"]:
    """Returns which nodes end a row, so that nothing follows them; a committed EOS does not."""
    return jnp.any(level.tokens[..., None] == state.eos_ids[:, None], axis=2) & (level.depth > 0)


def _choose(
    state: DecodeState, level: Level, logits: jax.Array, random_bits: jax.Array | None
) -> tuple[Categorical, Categorical, Int[Array, "B J K"]]:
    """Chooses the children of the nodes of `level`.

    Returns:
      The distributions that the children were drawn from, those of temperature 1 if none was drawn;
      the distributions by which they are ranked; and their tokens by rank, −1 where a node has
      none.
    """
    config, counts, noise = state.config, level.counts, None
    adjusted = state, logits, level.depths, level.texts
    if config.mode.greedy:
        ranked = Categorical.from_logits(apply_to_nodes(distributions.process, *adjusted))
        return ranked, ranked, choose_children("top", ranked, counts)
    dist, kind = apply_to_nodes(distributions.standardize, *adjusted), config.children
    argmax = (state.sampling.temperature == 0)[:, None, None]
    # The greatest of a vocabulary take long to find, and mostly no row is at temperature 0, whose
    # children are not drawn.
    some = jnp.any(argmax)
    ranked = jax.lax.cond(some, lambda: apply_to_nodes(_SOFT, *adjusted), lambda: dist)
    if kind == "top":
        return dist, ranked, choose_children("top", ranked, counts)
    if kind == "gumbel":
        positions = (state.lengths + level.depth)[:, None]
        noise = randomness.gumbel_noise(state.keys, positions, config.vocab_size)
        noise = jnp.broadcast_to(noise, logits.shape)
    drawn = choose_children(kind, dist, counts, random_bits, noise)
    fixed = jax.lax.cond(some, lambda: choose_children("top", ranked, counts), lambda: drawn)
    if kind == "gumbel":
        ranked = Categorical.from_logits(jnp.where(argmax, ranked.logits, dist.logits + noise))
    return dist, ranked, jnp.where(argmax, fixed, drawn)


_SOFT = functools.partial(distributions.standardize, soften=True)


def _grow(
    state: DecodeState, num_wanted: jax.Array, max_depth: jax.Array, logits_of: LogitsOf, carry: Any
) -> tuple[TreeDraft, Any]:
    """Does what `draft_tree` does, for a tree whose shape the drafter's distribution decides.

    Nodes are drafted level by level, numbered as in `tree_growth`, which chooses those that are
    kept. Gumbel children are scored by the distribution q times their noise.
    """
    tree, batch = state.config.tree, len(state.tokens)
    assert isinstance(tree, DynamicTree)
    zeros, width = jnp.zeros((batch, 1), jnp.int32), tree.width
    # By number: token, whether the node is there, score, parent, the numbers of its line, and its
    # place among the nodes that were fed.
    tokens = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    valid, scores, parents, places = ~state.done[:, None], jnp.zeros((batch, 1)), zeros - 1, zeros
    lines = jnp.zeros((batch, 1, tree.depth + 1), jnp.int32)
    log_q, above, first, signals = scores, scores, 0, _root_signals(state)
    for depth in range(tree.depth):
        expanded = tree_growth.choose_to_expand(tree, above).astype(jnp.int32)
        inner, count = first + expanded, expanded.shape[1]
        fed = 1 + (depth - 1) * width if depth else 0
        places = _put(places, inner, fed + jnp.arange(count, dtype=jnp.int32))
        line, depths = _pick(lines, inner), jnp.full(inner.shape, depth, jnp.int32)
        there = _pick(valid, inner) & _find_expandable(state, signals, inner)
        texts = node_sequences(state, jnp.maximum(tokens, 0), line, depths)
        on_line = _pick(places, line.reshape(batch, -1)).reshape(line.shape)
        counts = [width] * count
        level = Level(depth, None, fed, on_line, _pick(tokens, inner), there, counts, texts)
        logits, carry = logits_of(level, carry)
        dist, ranked, chosen = _choose(state, level, logits, None)
        open_ = (there & ~_find_ended(state, level) & (depth < max_depth)[:, None])[..., None]
        gained = _log_probs(ranked, chosen)
        # A first child whose distribution contains NaN stays beside its parent, to be noticed.
        gained = jnp.where(chosen >= 0, gained, jnp.where(jnp.arange(width) == 0, 0, -jnp.inf))
        above = tree_growth.expand(above, expanded, jnp.where(open_, gained, -jnp.inf))
        first = tokens.shape[1]
        new = first + jnp.arange(count * width, dtype=jnp.int32)

        def add(old: jax.Array, values: jax.Array):
            return jnp.concatenate([old, values.reshape(batch, -1, *old.shape[2:])], axis=1)

        each = functools.partial(jnp.repeat, repeats=width, axis=1)
        read = _read_signals(state, level, logits, chosen)
        signals = _add_signals(signals, read, each(inner))
        num_wanted = _limit_nodes(state, signals, depth, num_wanted)
        is_own = jnp.arange(tree.depth + 1) == depth + 1
        lines = add(lines, jnp.where(is_own, new[:, None], each(line)))
        valid, tokens = add(valid, open_ & (chosen >= 0)), add(tokens, jnp.where(open_, chosen, 0))
        scores, log_q = add(scores, above), add(log_q, _log_probs(dist, chosen))
        parents, places = add(parents, each(inner)), add(places, jnp.zeros_like(chosen))
    kept, branches = tree_growth.rerank(tree, scores, parents)
    return TreeDraft(
        tokens=_pick(tokens, kept),
        branches=branches,
        valid=_pick(valid, kept) & (jnp.arange(tree.size) <= num_wanted[:, None]),
        dist=None,
        origins=jnp.zeros_like(kept),
        calls=jnp.zeros(batch, jnp.int32),
        slots=_pick(places, kept),
        log_q=_pick(log_q, kept),
        seen=_order_signals(state, signals, kept),
    ), carry


def _pick(values: jax.Array, which: np.ndarray | jax.Array) -> jax.Array:
    """Returns the entries `which`, `[J]` or `[B, J]`, of `values [B, C, …]`."""
    return values[:, which] if which.ndim == 1 else pick(values, jnp.asarray(which))


def _put(values: jax.Array, which: jax.Array, new: jax.Array) -> jax.Array:
    """Returns `values [B, C]` with `new [J]` at the entries `which [B, J]`."""
    here = jnp.arange(values.shape[1])[:, None] == which[:, None]
    return jnp.where(jnp.any(here, axis=2), jnp.max(jnp.where(here, new, 0), axis=2), values)


def _reads_signals(state: DecodeState) -> bool:
    return state.policy is not None and state.policy.needs_probs


def _root_signals(state: DecodeState) -> Signals:
    """Returns the column of node 0, after which every draft goes on."""
    zeros = jnp.zeros((len(state.lengths), 1))
    return DraftSignals(zeros + 1, zeros, zeros) if _reads_signals(state) else None


def _find_expandable(
    state: DecodeState, signals: Signals, places: np.ndarray | jax.Array
) -> Bool[Array, "B J"] | bool:
    """Returns which of the nodes in the columns `places` may have children."""
    if signals is None or state.policy is None:
        return True
    here = DraftSignals(*(_pick(values, places) for values in signals))
    return state.policy.goes_on(state.policy_state, here)


def _read_signals(
    state: DecodeState, level: Level, logits: Float[Array, "B J V"], chosen: Int[Array, "B J K"]
) -> Signals:
    """Returns the signals `[B, J · K]` of the children `chosen`, as if they followed node 0."""
    if not _reads_signals(state):
        return None
    dist = apply_to_nodes(_SOFT, state, logits, level.depths, level.texts)
    entropy, each = dist.entropy(), functools.partial(jnp.repeat, repeats=chosen.shape[2], axis=1)
    evenness = entropy / max(math.log(logits.shape[2]), 1e-9)
    prob = jnp.exp(_log_probs(dist, chosen)).reshape(len(chosen), -1)
    return DraftSignals(prob, each(entropy), each(evenness))


def _add_signals(
    signals: Signals,
    new: Signals,
    parents: np.ndarray | jax.Array,
    places: slice | np.ndarray = slice(None),
) -> Signals:
    """Returns the columns `signals` and, after them, `places` of `new`, from `_read_signals`.

    `parents` are the columns of the new nodes' parents.
    """
    if signals is None or new is None:
        return None
    added = DraftSignals(*(values[:, places] for values in new))
    added = added._replace(prob=added.prob * _pick(signals.prob, parents))
    return DraftSignals(*(jnp.concatenate(both, axis=1) for both in zip(signals, added)))


def _limit_nodes(
    state: DecodeState, signals: Signals, depth: int, num_wanted: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Returns how many nodes are wanted, now that the children of the nodes at `depth` are read."""
    if signals is None or state.policy is None or depth:
        return num_wanted
    first = DraftSignals(*(values[:, 1:] for values in signals))
    return jnp.clip(state.policy.budget(state.policy_state, first), 0, num_wanted)


def _order_signals(state: DecodeState, signals: Signals, order: np.ndarray | jax.Array) -> Signals:
    """Returns the signals `[B, G]` of nodes 1 … G; `order` has the column of each node."""
    if signals is None or state.policy is None:
        return None
    most = state.policy.maximum + 1
    return DraftSignals(*(_pick(values, order)[:, 1:most] for values in signals))


def draft_with_model(
    network: Network,
    widened: Callable,
    cache: Any,
    state: DecodeState,
    num_wanted: jax.Array,
    max_depth: jax.Array,
    lag: int,
    whole: bool = True,
) -> tuple[Any, TreeDraft]:
    """Drafts a tree with a model.

    The first call feeds the last `lag` committed tokens. Node n is fed to the slot of the last
    committed token and as many slots further as nodes were fed before it.

    Args:
      network: the drafting model's network.
      widened: a function that brings its logits to the width of the target's vocabulary.
      cache: its cache, from `Network.node_cache`.
      lag: the most committed tokens that the cache may lack.
      whole: whether the network's logits are of its ids in their order, not of a shortlist.
      The others are those of `TreeDrafter.draft_tree`.

    Returns:
      The cache, and the draft.
    """
    origins, columns = state.lengths - 1, max(state.config.gamma + 1, lag)
    span = state.tokens.shape[1]

    def states_of(level: Level, cache: Any):
        if level.depth:
            lines = jnp.asarray(level.lines, jnp.int32)
            lines = jnp.broadcast_to(lines, (*level.tokens.shape, lines.shape[-1]))
            nodes = WindowNodes(origins + level.first, origins, level.depths, lines, span)
            return network.decode_nodes(level.tokens, nodes, cache, level.valid)
        first = jnp.maximum(origins - (lag - 1), 0)  # near position 0 some are fed needlessly
        fed = jnp.take_along_axis(state.tokens, first[:, None] + jnp.arange(lag), axis=1)
        depths = jnp.broadcast_to(jnp.arange(lag, dtype=jnp.int32), fed.shape)
        lines = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), (*fed.shape, columns))
        nodes = WindowNodes(first, first, depths, lines, span)
        valid = jnp.broadcast_to(level.valid, fed.shape)
        states, cache = network.decode_nodes(fed, nodes, cache, valid)
        return jnp.take_along_axis(states, (origins - first)[:, None, None], axis=1), cache

    draft, cache = draft_from_states(
        network, widened, states_of, cache, state, num_wanted, max_depth, whole
    )
    return cache, draft


def draft_from_states(
    network: Network,
    widened: Callable,
    states_of: Callable[[Level, Any], tuple[Any, Any]],
    carry: Any,
    state: DecodeState,
    num_wanted: jax.Array,
    max_depth: jax.Array,
    whole: bool = True,
) -> tuple[TreeDraft, Any]:
    """Drafts a tree from a drafting model's states.

    Args:
      states_of: (level, carry) -> (states `[B, J, D]` at its nodes, carry).
      carry: what `states_of` keeps from level to level.
      The others are those of `draft_with_model`.

    Returns:
      The draft, with a call for each of its levels, and the last carry.
    """

    def logits_of(level: Level, carry: Any):
        states, carry = states_of(level, carry)
        return widened(network.head(states, level.valid)), carry

    def greedy_tokens_of(level: Level, carry: Any):
        states, carry = states_of(level, carry)
        return network.greedy_token_and_logprob(states, level.valid), carry

    greedy_only = network.skips_padding and whole and network.vocab_size <= state.config.vocab_size
    greedy = greedy_tokens_of if greedy_only else None
    draft, carry = draft_tree(state, num_wanted, max_depth, logits_of, carry, greedy)
    deepest = jnp.max(jnp.where(draft.valid, draft.branches.depths, 0), axis=1)
    return draft._replace(calls=deepest), carry
