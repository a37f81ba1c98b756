"""One iteration with a tree: draft → score all nodes in one call → walk → commit.

The target is fed the N nodes of the tree: the last committed token and the drafted ones. Node n is
written to slot `lengths[b] − 1 + n` of the cache, has the position of its depth, and sees the
committed tokens and its own ancestors alone. A verifier of trees then finds the path of nodes that
are accepted. What is committed is that path and one more token, as if the path had been the draft;
its keys and values are copied to the slots that follow the committed ones. For a tree with one
branch the tokens, keys of draws and caches are those of `ChainDecoding.iterate`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.backends.axes import PerRow, Tokens
from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.backends.tree_positions import WindowNodes
from specdec_jax.models.network import Network
from specdec_jax.speculative import distributions, randomness
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.drafter import TreeDrafter, check_tree_draft
from specdec_jax.speculative.iteration import (
    ChainDecoding,
    commit,
    find_most_probable,
    note_failures,
)
from specdec_jax.speculative.policy import choose_gamma
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.state import (
    DecodeState,
    Draft,
    Scored,
    ScoredNodes,
    make_prefixes,
)
from specdec_jax.speculative.tree_budgets import find_node_outcomes
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.tree_verifiers import (
    Nodes,
    TreeRandomness,
    TreeVerification,
    TreeVerifier,
    walk_greedy,
)
from specdec_jax.speculative.verifier import Verification, check_verification
from specdec_jax.speculative.verifiers import pick


class Watched(NamedTuple):
    """What one iteration with a tree saw, for a trace.

    Attributes:
      draft: the tree.
      states: the target's last hidden states at its nodes.
      verified: the accepted path, and the token after it.
    """

    draft: TreeDraft
    states: Float[Array, "B N D"]
    verified: TreeVerification


class TreeDecoding(ChainDecoding):
    """Decodes with trees of drafted tokens."""

    def iterate(self, target: Network, drafter: Any, state: DecodeState) -> DecodeState:
        return self.watch(target, drafter, state)[0]

    def watch(
        self, target: Network, drafter: TreeDrafter, state: DecodeState
    ) -> tuple[DecodeState, Watched]:
        """Does what `iterate` does, and returns the tree that was drafted too."""
        config, origins = state.config, state.lengths - 1
        wanted = choose_gamma(state.policy, state.policy_state, state.gamma)
        # At most limit − length − 1 tokens may be accepted: the target adds one more, and no row
        # passes its limit.
        max_depth = jnp.where(state.done, 0, state.limits - state.lengths - 1)
        wanted = jnp.where(max_depth > 0, wanted, 0)
        returned = drafter.draft_tree(state.draft_state, state.for_drafter(), wanted, max_depth)
        draft_state, draft = check_tree_draft(drafter, returned, state)
        # A drafter of a user's own may not have kept to either.
        there = draft.branches.depths <= max_depth[:, None]
        there &= jnp.arange(there.shape[1]) <= wanted[:, None]
        draft = draft._replace(valid=draft.valid & there)
        draft, failed = _cut_failures(draft, config.vocab_size)
        tokens = jnp.maximum(draft.tokens, 0)
        nodes = WindowNodes(
            origins, origins, draft.branches.depths, draft.branches.lines, state.tokens.shape[1]
        )
        cache = state.target_cache if draft.target_cache is None else draft.target_cache
        states, cache = target.decode_nodes(tokens, nodes, cache, draft.valid)
        logits, adjusted = None, None
        if config.commits_argmax and not drafter.reads_logits:
            argmax, log_probs = find_most_probable(target, states, draft.valid)
            verified = walk_greedy(argmax, draft)

            def log_prob(new: jax.Array):
                return pick(log_probs, verified.path)
        else:
            logits = target.head(states, draft.valid)
            verified, dist = verify_tree(state, draft, logits)
            argmax = distributions.argmax(logits)
            log_prob = distributions.log_prob_under(  # type: ignore[assignment]
                pick(logits, verified.path), target.skips_padding
            )
            adjusted = dist and Categorical(*(pick(part, verified.path) for part in dist))
        path = verified.path
        chain = Draft(
            pick(tokens, path)[:, 1:],
            _count_examined(draft, verified),
            None,
            draft.calls,
            draft.seen,
            node_outcomes=find_node_outcomes(draft, verified),
        )
        after = commit(
            state.replace(target_cache=None, draft_state=None),
            chain,
            Verification(verified.num_accepted, verified.next_token),
            log_prob,
            adjusted,
            draft.num_drafted,
        )
        after = note_failures(after, _find_failures(state, draft, verified, failed))
        # The path's keys and values go to the slots that follow node 0's. Mostly they lie there
        # already, but to decide that would copy the caches: a few rows cost less to move.
        cache = target.move_nodes(cache, origins[:, None] + path[:, 1:], origins + 1)
        draft_state = drafter.keep_path(draft_state, state, draft, path)
        read_states = states if drafter.reads_states else None
        read_logits = logits if drafter.reads_logits else None
        every = ScoredNodes(draft, path, argmax, read_states, read_logits)
        scored = _score_path(every, after.lengths - state.lengths)
        if not drafter.reads_nodes:
            scored = scored._replace(nodes=None)
        draft_state = drafter.observe(draft_state, after, scored)
        after = after.replace(target_cache=cache, draft_state=draft_state, last_draft=chain.tokens)
        return constrain_sharding(after, target.rules), Watched(draft, states, verified)


def _score_path(nodes: ScoredNodes, num_new: PerRow) -> Scored:
    """Returns what the target returned along the accepted path, with the nodes beside it."""

    def take(values: jax.Array | None):
        return None if values is None else pick(values, nodes.path)

    tokens = pick(jnp.maximum(nodes.draft.tokens, 0), nodes.path)
    return Scored(tokens, take(nodes.states), take(nodes.logits), num_new, nodes)


def _cut_failures(draft: TreeDraft, vocab_size: int) -> tuple[TreeDraft, Nodes]:
    """Removes nodes whose token is no id of the target's, and what lies below them.

    Returns:
      The draft, and which nodes the drafter failed at: these, and those whose distribution
      contained NaN.
    """
    _, _, depths, lines = draft.branches
    wrong = draft.valid & (draft.tokens >= vocab_size)
    above = jnp.take_along_axis(wrong, lines.reshape(len(lines), -1), axis=1).reshape(lines.shape)
    above &= jnp.arange(lines.shape[2]) <= depths[..., None]
    failed, valid = draft.failed | wrong, draft.valid & ~jnp.any(above, axis=2)
    return draft._replace(tokens=jnp.where(wrong, -1, draft.tokens), valid=valid), failed


def _find_failures(
    state: DecodeState, draft: TreeDraft, verified: TreeVerification, failed: Nodes
) -> PerRow:
    """Returns the slot of each row's first node after the accepted path that the drafter failed at.

    Where there is none it is past the buffer.
    """
    slots = state.lengths[:, None] + draft.branches.depths - 1
    path = jnp.where(
        jnp.arange(verified.path.shape[1]) <= verified.num_accepted[:, None], verified.path, -2
    )
    follows = jnp.any(draft.branches.parents[..., None] == path[:, None], axis=-1)
    return jnp.min(jnp.where(failed & follows, slots, state.tokens.shape[1]), axis=1)


def _count_examined(draft: TreeDraft, verified: TreeVerification) -> PerRow:
    """Returns at how many depths children were verified: at each node of the path that has any."""
    end = jnp.take_along_axis(verified.path, verified.num_accepted[:, None], axis=1)
    more = jnp.any((draft.branches.parents == end) & draft.valid, axis=1)
    return verified.num_accepted + more.astype(jnp.int32)


def verify_tree(
    state: DecodeState, draft: TreeDraft, logits: Float[Array, "B N V"]
) -> tuple[TreeVerification, Categorical | None]:
    """Finds the path of nodes that are accepted, and the token that follows it.

    Args:
      logits: the target's, at the N nodes.

    Returns:
      The outcome, and the target's distribution after processors, temperature and filters at the
      nodes; None for the distribution where every token is its argmax.
    """
    config, keys, lengths, branches = state.config, state.keys, state.lengths, draft.branches
    rule = config.verifier
    assert config.tree is not None and isinstance(rule, TreeVerifier), "a program of trees"
    if config.mode.greedy:
        return walk_greedy(
            distributions.argmax(apply_to_draft(distributions.process, state, draft, logits)), draft
        ), None
    dist = apply_to_draft(distributions.standardize, state, draft, logits)
    greedy = walk_greedy(distributions.argmax(dist.logits), draft)
    numbers = jnp.broadcast_to(jnp.arange(config.tree.size), draft.tokens.shape)
    accept = randomness.uniforms(keys, lengths, numbers - 1, randomness.ACCEPT)
    inner = jnp.any(
        (branches.parents[:, None] == numbers[..., None]) & draft.valid[:, None], axis=2
    )
    residual = randomness.random_bits(keys, lengths, numbers, randomness.RESIDUAL)
    bonus = randomness.random_bits(keys, lengths, numbers, randomness.BONUS)
    final = jnp.where(inner[..., None], residual, bonus)
    noise = None
    if rule.coupled:
        depths = jnp.arange(config.gamma + 1)
        noise = randomness.gumbel_noise(keys, lengths[:, None] + depths, config.vocab_size)
    found = rule.verify(
        dist, draft, config.tree.kind, TreeRandomness(accept, final, noise), state.settings
    )
    found = check_verification(rule, found, len(lengths), TreeVerification)
    argmax = state.sampling.temperature == 0

    def choose(a: jax.Array, b: jax.Array):
        return jnp.where(argmax.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, greedy, found), dist


def node_sequences(
    state: DecodeState, tokens: Tokens, lines: Int[Array, "B J D"], depths: Int[Array, "B J"]
) -> Int[Array, "B J S"]:
    """Returns the tokens up to each of J nodes by position.

    Args:
      tokens: the token of every node.
      lines: the nodes' ancestors by depth, as in `Branches`.
      depths: the nodes' depths.
    """
    batch, count, deepest = lines.shape
    own = jnp.take_along_axis(tokens, lines.reshape(batch, -1), axis=1).reshape(lines.shape)
    after = jnp.arange(state.tokens.shape[1]) - (state.lengths[:, None] - 1)
    place = jnp.broadcast_to(
        jnp.clip(after, 0, deepest - 1)[:, None], (batch, count, after.shape[1])
    )
    drafted = (after > 0)[:, None] & (after[:, None] <= depths[..., None])
    return jnp.where(drafted, jnp.take_along_axis(own, place, axis=2), state.tokens[:, None])


def apply_to_draft(
    function: Callable, state: DecodeState, draft: TreeDraft, logits: Float[Array, "B N V"]
) -> Any:
    """Applies `function` to logits of all nodes of a draft, as `apply_to_nodes` does."""
    _, _, depths, lines = draft.branches
    return apply_to_nodes(
        function,
        state,
        logits,
        depths,
        node_sequences(state, jnp.maximum(draft.tokens, 0), lines, depths),
    )


def apply_to_nodes(
    function: Callable,
    state: DecodeState,
    logits: Float[Array, "B J V"],
    depths: Int[Array, "B J"],
    prefixes: Int[Array, "B J S"],
) -> Any:
    """Applies `distributions.process` or `standardize` to nodes, each with its own prefix.

    Args:
      function: takes logits `[N, T, V]`, a context, traced parameters and the mode.
      logits: logits of the token after each node.
      depths: the nodes' depths.
      prefixes: as from `sequences`.
    """
    mode = state.config.mode
    if not mode.processes:
        return function(logits, make_prefixes(state), state.sampling, mode)
    batch, count, vocab = logits.shape

    def flat(x: jax.Array):
        return x.reshape(batch * count, *x.shape[2:])

    def repeat(x: jax.Array):
        return jnp.repeat(x, count, axis=0)

    lengths = state.lengths[:, None] + depths
    own = Context(flat(prefixes), flat(lengths), repeat(state.starts), repeat(state.eos_ids))
    found = function(
        logits.reshape(batch * count, 1, vocab), own, state.sampling.repeated(count), mode
    )
    return jax.tree.map(lambda x: x.reshape(batch, count, *x.shape[2:]), found)
