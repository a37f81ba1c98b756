"""One iteration of speculative beam search: draft a tree, score it in one call, take steps.

The output is that of plain beam search, since every step is one of plain beam search, with the
target's log-probabilities:

1. The drafter proposes γ levels of u nodes after the last tokens of the K active beams. The K + γ·u
   nodes are one tree.
2. The target scores all nodes in one call, in which each node sees its own ancestors alone.
3. Steps of plain beam search follow as long as every active beam is a node that was scored. There
   is at least one, since the last tokens of the active beams are among the nodes.
4. The keys and values of the beams that the steps went through stay in the caches; those of other
   nodes are overwritten.

A call writes its nodes from slot `starts[b]` on, first those of the active beams. The K beams that
step i leads to are then copied to the slots from `starts[b] + i·K` on, with i counted from 1. So
the cache is the one that plain search leaves, whose only nodes are its active beams.
"""

import jax
import jax.numpy as jnp

from specdec_jax.backends.sharding import constrain_sharding
from specdec_jax.backends.tree_positions import node_paths
from specdec_jax.models.network import Network
from specdec_jax.speculative import distributions
from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.beam_prefill import prefill_beams
from specdec_jax.speculative.beam_search import (
    BeamConfig,
    BeamState,
    Candidates,
    sort_hypotheses,
    step,
)
from specdec_jax.speculative.beam_tree import BeamTree, make_root_tree
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.strategy import Committed, SearchOutcome
from specdec_jax.speculative.verifiers import pick


class BeamSearch:
    """Searches for the best sequences; the length penalty is a setting of each row."""

    commits_tokens = False
    prefill = staticmethod(prefill_beams)

    def iterate(self, target: Network, drafter: BeamDrafter | None, state: BeamState) -> BeamState:
        """Runs one iteration for all rows; finished rows are unchanged where it is read later."""
        config, tree, draft_state = state.config, make_root_tree(state), state.draft_state
        if config.gamma:
            assert drafter is not None
            draft_state, tree = drafter.draft_beams(draft_state, state, tree)
        valid = jnp.broadcast_to(~state.done[:, None], tree.tokens.shape)
        states, cache = target.decode_nodes(tree.tokens, tree.nodes, state.target_cache, valid)
        logits = target.head(states, valid)
        own, adjusted = score_nodes(state, logits, tree)
        sums = sum_to_nodes(tree, state.active.scores, own if adjusted is None else adjusted)
        found = find_candidates(own, adjusted, sums, config)

        after, levels = _walk(state.replace(target_cache=None, draft_state=None), tree, found)
        taken = after.steps - state.steps
        if config.gamma:  # the beams of every step move to the slots of plain search
            assert drafter is not None
            sources, starts = state.starts[:, None] + levels, state.starts + config.beams
            cache, draft_state = (
                target.move_nodes(cache, sources, starts),
                drafter.move_beams(draft_state, sources, starts),
            )
        return constrain_sharding(
            after.replace(
                starts=state.starts + taken * config.beams,
                target_cache=cache,
                draft_state=draft_state,
                counts=_update_counts(state, taken),
            ),
            target.rules,
        )

    def read(self, state: BeamState) -> Committed:
        """Returns the best hypotheses, those of an input side by side."""
        returned = state.config.returned
        best, exists = jax.tree.map(
            lambda x: x[:, :returned].reshape(-1, *x.shape[2:]), sort_hypotheses(state)
        )
        prefix_lengths, done, failed = (
            jnp.repeat(x, returned) for x in (state.prefix_lengths, state.done, state.failed)
        )
        adjusted = best.adjusted_log_probs
        return Committed(
            tokens=best.tokens,
            lengths=prefix_lengths + jnp.where(exists, best.lengths, 0),
            done=done,
            log_probs=best.log_probs,
            adjusted_log_probs=best.log_probs if adjusted is None else adjusted,
            draft_failed=jnp.zeros_like(failed),
            counts=state.counts,
            search=SearchOutcome(best.scores, exists, failed, state.steps),
        )


def score_nodes(
    state: BeamState, logits: jax.Array, tree: BeamTree
) -> tuple[jax.Array, jax.Array | None]:
    """Returns log-probabilities `[B, N, V]` of the nodes' next tokens, and those after processors.

    The latter are None without processors.

    In Hugging Face's form, processors change log-probabilities, which are not normalised again. In
    T5X's form, which has no processors of its own, they change logits, as in the rest of this
    package.
    """
    config, own = state.config, distributions.log_softmax(logits, state.config.mode.native)
    if not config.mode.processes:
        return own, None
    batch, count, vocab = logits.shape

    def rows(x: jax.Array):
        return jnp.repeat(x, count, axis=0)

    def flat(x: jax.Array):
        return x.reshape(batch * count, *x.shape[2:])

    tokens = jnp.zeros((batch, count, 1), jnp.int32) if tree.sequences is None else tree.sequences
    context = Context(
        flat(tokens),
        flat(tree.nodes.positions) + 1,
        rows(state.prefix_lengths),
        rows(state.eos_ids),
    )
    huggingface = config.style == "huggingface"
    given = own if huggingface else logits
    processed = distributions.process(
        given.reshape(batch * count, 1, vocab), context, state.sampling.repeated(count), config.mode
    )
    processed = processed.reshape(batch, count, vocab)
    return own, processed if huggingface else distributions.log_softmax(
        processed, config.mode.native
    )


def sum_to_nodes(tree: BeamTree, scores: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Returns the sum of log-probabilities `[B, N]` of the sequence up to each node.

    They are added in the order in which the steps of plain search add them, so that the sums round
    alike.

    Args:
      tree: the nodes.
      scores: `[B, K]`, the sums of the active beams.
      log_probs: `[B, N, V]`, log-probabilities of the nodes' next tokens.
    """
    beams, count = scores.shape[1], tree.tokens.shape[1]
    sums = jnp.pad(scores, ((0, 0), (0, count - beams)))
    if count == beams:
        return sums
    parents = jnp.maximum(tree.parents, 0)
    flat = parents * log_probs.shape[2] + jnp.maximum(tree.tokens, 0)
    own = jnp.take_along_axis(log_probs.reshape(len(scores), -1), flat, axis=1)

    # Round i gives level i its sums, from those of its parents on the level before: so there is one
    # round per level.
    def grow(_: jax.Array, sums: jax.Array):
        return jnp.where(tree.parents < 0, sums, pick(sums, parents) + own)

    depth = jnp.max(tree.nodes.positions - tree.nodes.positions[:, :1])
    return jax.lax.fori_loop(0, depth, grow, sums)


def find_candidates(
    own: jax.Array, adjusted: jax.Array | None, sums: jax.Array, config: BeamConfig
) -> Candidates:
    """Returns the (1 + E)·K best continuations of each node, as many as a step takes of all beams.

    Args:
      own: `[B, N, V]`, log-probabilities under the target's own distribution.
      adjusted: `[B, N, V]`, the same after processors; None without processors.
      sums: `[B, N]`, sums of log-probabilities up to each node.
    """
    log_probs = own if adjusted is None else adjusted
    kept = min(config.candidates, config.vocab_size)
    totals, tokens = jax.lax.top_k(log_probs + sums[..., None], kept)

    def take(values: jax.Array):
        return None if values is None else jnp.take_along_axis(values, tokens, axis=2)

    return Candidates(totals, tokens.astype(jnp.int32), take(own), take(adjusted))


def _walk(state: BeamState, tree: BeamTree, found: Candidates) -> tuple[BeamState, jax.Array]:
    """Takes steps as long as every active beam is a node that was scored.

    Returns:
      The state; and, for each of γ steps, the numbers of the nodes that its K beams are, together
      `[B, γ·K]`. They are arbitrary for steps that a row did not take, and for beams that are no
      nodes.
    """
    config, batch, starts = state.config, len(state.steps), state.starts
    beams = config.beams
    levels = jnp.zeros((batch, config.gamma + 1, beams), jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(beams, dtype=jnp.int32), (batch, beams))

    def body(carry: tuple):
        level, state, ids, active, levels = carry
        positions = jnp.broadcast_to(state.positions[:, None], ids.shape)
        after, parents, tokens = step(state, found.pick(ids), active)
        slots = starts[:, None] + level * beams + parents
        paths = node_paths(pick(state.paths, parents), positions, slots)
        after = after.replace(paths=jnp.where(active[:, None, None], paths, state.paths))
        same = tree.parents[:, None] == pick(ids, parents)[..., None]
        same &= tree.tokens[:, None] == tokens[..., None]
        ids, active = jnp.argmax(same, axis=2).astype(jnp.int32), active & ~after.done
        active &= _are_beams_scored(same)
        levels = jax.lax.dynamic_update_slice_in_dim(levels, ids[:, None], level, axis=1)
        return level + 1, after, ids, active, levels

    carry = jnp.int32(0), state, ids, ~state.done, levels
    if not config.gamma:
        return body(carry)[1], levels

    def more(carry: tuple):
        return jnp.any(carry[3])

    _, state, _, _, levels = jax.lax.while_loop(more, body, carry)
    return state, levels[:, : config.gamma].reshape(batch, -1)


def _are_beams_scored(same: jax.Array) -> jax.Array:
    """Returns `[B]`: whether all active beams are nodes; `same [B, K, N]`: node n is beam k."""
    return jnp.all(jnp.any(same, axis=2), axis=1)


def _update_counts(state: BeamState, taken: jax.Array):
    """Returns the statistics after the iteration.

    A level of the tree counts as examined if the step that leads to it was taken, and as accepted
    if the step after it was taken too.
    """
    counts, gamma = state.counts, state.config.gamma
    active, level = (~state.done).astype(jnp.int32), jnp.arange(gamma)
    accepted = (level < (taken - 1)[:, None]).astype(jnp.int32)
    examined = (level < taken[:, None]).astype(jnp.int32) * active[:, None]
    return counts.replace(
        target_calls=counts.target_calls + active,
        draft_calls=counts.draft_calls + gamma * active,
        drafted=counts.drafted + gamma * active,
        accepted=counts.accepted + jnp.sum(accepted, axis=1),
        examined_by_position=counts.examined_by_position + examined,
        accepted_by_position=counts.accepted_by_position + accepted,
    )
