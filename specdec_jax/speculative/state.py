"""The state of the decode loop, and what drafters and verifiers hand to each other."""

from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.distributions import Categorical, PointMass
from specdec_jax.speculative.policy import DraftSignals, NodeOutcomes, Policy
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.sampling import SamplingMode, SamplingRows
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.tree_verifiers import TreeVerifier
from specdec_jax.speculative.trees import DynamicTree, Tree
from specdec_jax.speculative.verifier import Settings, Verifier
from specdec_jax.speculative.verifiers import VERIFIERS


def count_slots(longest: int, gamma: int) -> int:
    """Returns the number of token and cache slots for rows of at most `longest` tokens.

    The start token is one of them. A whole draft and its bonus token fit past any limit; otherwise
    a clamped slice would overwrite slots that are in use.
    """
    return bucket_length(longest - 1) + 1 + gamma + 1


class StaticConfig(NamedTuple):
    """The static settings of a decode loop: another value of any of them compiles another program.

    Attributes:
      gamma: G, the most tokens drafted in one iteration; 0 is plain decoding.
      mode: which sampling adjustments are on.
      vocab_size: V, width of the target's logits; a drafter's distributions are padded or cut to
        it.
      verifier: decides which drafted tokens are accepted; a `TreeVerifier` if there is a tree.
      widths: the numbers of positions for which a target call is compiled, ascending, the last one
        G + 1; () means G + 1 alone.
      tree: the tree that is drafted, of which G is the depth; None: a chain.
      lag: the most committed tokens that a drafter of trees may not have been fed: the last one,
        and the one before it if it was a leaf. In a merged tree it is all that an iteration
        commits.
      strategy: the `DecodingStrategy` of the loop; None where no loop runs.
      draft_mode: `mode` with the filters of the drafter; None: the target's.
    """

    gamma: int
    mode: SamplingMode
    vocab_size: int
    verifier: Verifier | TreeVerifier = VERIFIERS["block"]
    widths: tuple[int, ...] = ()
    tree: Tree | DynamicTree | None = None
    lag: int = 2
    strategy: Any = None
    draft_mode: SamplingMode | None = None

    def count_slots(self, prefix: int, new: int) -> int:
        """Returns the number of slots for rows of at most `prefix` and `new` tokens."""
        return count_slots(prefix + new, self.reach)

    @property
    def returned(self) -> int:
        """Number of outputs of each row."""
        return 1

    @property
    def reach(self) -> int:
        """The most slots past a row's last committed token that a call writes."""
        return self.gamma if self.tree is None else self.tree.window - 1

    @property
    def children(self) -> str:
        """How the children of a tree's nodes are chosen."""
        assert self.tree is not None
        return self.tree.kind

    @property
    def strict_argmax(self) -> bool:
        """Whether every token is the target's argmax, so that no distribution is ever built."""
        return self.mode.greedy and not self.verifier.softens

    @property
    def commits_argmax(self) -> bool:
        """Whether every token is the argmax of the target's own, unprocessed logits."""
        return self.mode.greedy and not self.mode.processes and self.verifier.takes_argmax

    @property
    def needs_draft_probs(self) -> bool:
        """Whether the verifier looks at the distribution that the draft was drawn from."""
        return not self.mode.greedy and self.verifier.needs_draft_probs


@flax.struct.dataclass
class Counts:
    """Statistics of each row, summed over its iterations.

    Attributes:
      target_calls: target calls in which the row took part.
      draft_calls: calls of the drafter's model in which the row took part, those to catch up
        included.
      drafted: tokens drafted.
      accepted: drafted tokens that were accepted and were committed.
      examined_by_position: how often the i-th drafted token was examined. An iteration examines the
        tokens up to and including its first rejection, and none after an EOS.
      accepted_by_position: how often the i-th drafted token was accepted.
      undrafted: how often all drafted tokens, or none at all, were accepted, and the next one was
        wanted but not drafted; 0 for trees and beams.
    """

    target_calls: Int[Array, " B"]
    draft_calls: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    examined_by_position: Int[Array, "B G"]
    accepted_by_position: Int[Array, "B G"]
    undrafted: Int[Array, " B"]

    @classmethod
    def zero(cls, batch: int, gamma: int) -> "Counts":
        one, many = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, gamma), jnp.int32)
        return cls(one, one, one, one, many, many, one)


@flax.struct.dataclass
class DecodeState:
    """The state of the decode loop, with B rows and S slots of tokens.

    S is G + 1 more than any row's limit.

    Attributes:
      tokens: start token and decoder prefix, or the prompt, then committed tokens; anything after a
        row's length.
      lengths: number of committed tokens, start token and prefix included.
      done: whether the row is complete.
      starts: number of tokens that are not new: start token and prefix, or the prompt.
      log_probs: log-probabilities of the committed tokens under the target's own distribution
        (temperature 1, no processor or filter), float32, each in its token's slot.
      adjusted_log_probs: the same under the distribution after processors, temperature and filters;
        None where every token is the argmax, whose log-probability is 0 under that distribution.
      keys: one per row.
      sampling: traced parameters of sampling.
      draft_sampling: those whose temperature and filters drafts are drawn with; None: `sampling`.
      settings: parameters of the verifier; None if it has none.
      limits: the length at which a row stops.
      eos_ids: ids that stop a row, padded with −1.
      gamma: tokens to draft per iteration, at most G.
      policy: chooses how many tokens, up to `gamma`, each row drafts; None: always `gamma`.
      policy_state: what the policy keeps from iteration to iteration.
      target_cache: the target's cache; its live part ends one slot before a row's last token.
      draft_state: the drafter's own state, None without a drafter.
      counts: statistics.
      last_draft: tokens drafted in the last iteration.
      last_drafted, last_accepted: how many were drafted and how many were accepted in the last
        iteration.
      last_seen: what the policy reads of the last draft's distributions; None if it reads none.
      draft_failed: the first slot at which the drafter's distribution contained NaN, or its token
        was no id of the target's; 0: none yet.
      config: the static settings.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    done: Bool[Array, " B"]
    starts: Int[Array, " B"]
    log_probs: Float[Array, "B S"]
    adjusted_log_probs: Float[Array, "B S"] | None
    keys: Key[Array, " B"]
    sampling: SamplingRows
    settings: Settings | None
    limits: Int[Array, " B"]
    eos_ids: Int[Array, "B E"]
    gamma: Int[Array, " B"]
    policy: Policy | None
    policy_state: Any
    target_cache: Any
    draft_state: Any
    counts: Counts
    last_draft: Int[Array, "B G"]
    last_drafted: Int[Array, " B"]
    last_accepted: Int[Array, " B"]
    last_seen: DraftSignals | None
    draft_failed: Int[Array, " B"]
    config: StaticConfig = flax.struct.field(pytree_node=False)
    draft_sampling: SamplingRows | None = None

    def for_drafter(self) -> "DecodeState":
        """Returns the state as its drafter sees it, with the drafter's temperature and filters.

        Drafts are drawn from the distribution that these give, and `Draft.dist` is that one; so
        the output distribution stays the target's.
        """
        if self.draft_sampling is None or self.config.draft_mode is None:
            return self
        mode = self.config.draft_mode._replace(native=self.config.mode.native)
        return self.replace(
            sampling=self.sampling.with_filters_of(self.draft_sampling),
            config=self.config._replace(mode=mode),
        )


class ChainRows(NamedTuple):
    """What drafting a chain reads of a `DecodeState`, for rows without draws and policy.

    The fields are those of `DecodeState`; a beam search has such a row for each active beam.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    starts: Int[Array, " B"]
    eos_ids: Int[Array, "B E"]
    sampling: SamplingRows
    config: StaticConfig
    policy: None = None
    policy_state: None = None


# What a drafter that also serves beam searches drafts a chain after.
AnyRows = DecodeState | ChainRows


class Draft(NamedTuple):
    """The tokens that a drafter proposes, and how it came to them.

    Attributes:
      tokens: the proposed tokens, below V; −1 where the distribution to draw from contains NaN. A
        draft ends before either, and the row is reported.
      num_drafted: how many of `tokens` count; at most the number asked for.
      dist: the distribution over `[B, G, V]` that the tokens were really drawn from; a `PointMass`
        if they were not drawn; None where `StaticConfig.needs_draft_probs` is False.
      calls: calls of the drafter's model in which the row took part.
      seen: what a policy of γ reads of the distributions, if there is one that does.
      target_cache: the target's cache, if the drafter has written to it. It may write only to slots
        that the target's call overwrites.
      node_outcomes: of the path of a tree that is accepted, what became of the tree's nodes.
    """

    tokens: Int[Array, "B G"]
    num_drafted: Int[Array, " B"]
    dist: Categorical | PointMass | None
    calls: Int[Array, " B"]
    seen: DraftSignals | None = None
    target_cache: Any = None
    node_outcomes: NodeOutcomes | None = None

    def limited(self, num_wanted: Int[Array, " B"]) -> "Draft":
        """Returns the draft with at most `num_wanted` tokens, and at least none."""
        return self._replace(num_drafted=jnp.clip(self.num_drafted, 0, num_wanted))

    def first(self, gamma: int) -> "Draft":
        """Returns the draft cut to its first `gamma` positions; no row may have drafted more."""
        tokens, dist = self.tokens[:, :gamma], self.dist
        if isinstance(dist, PointMass):
            dist = dist.replace(tokens=dist.tokens[:, :gamma])
        elif dist is not None:
            dist = Categorical(dist.logits[:, :gamma], dist.log_normalizer[:, :gamma])
        return self._replace(tokens=tokens, dist=dist)


class ScoredNodes(NamedTuple):
    """One call of the target over all N nodes of a tree, rejected ones too.

    Attributes:
      draft: the tree. Where its `valid` is False the target was fed nothing.
      path: numbers of the accepted nodes by depth, node 0 first; anything past the last of them.
      argmax: the most probable id after each node, before any processor; −1 where a logit is NaN.
      states, logits: as in `Scored`, at all nodes.
    """

    draft: TreeDraft
    path: Int[Array, "B T"]
    argmax: Int[Array, "B N"]
    states: Float[Array, "B N D"] | None
    logits: Float[Array, "B N V"] | None


class Scored(NamedTuple):
    """One call of the target, as a drafter may learn from it: T = G + 1 positions.

    Those of a tree are the positions of the accepted path.

    Attributes:
      tokens: the tokens fed: the last committed one and the draft.
      states: the target's last hidden states, which its head takes; None unless the drafter
        `reads_states`.
      logits: float32, before any processor; None unless the drafter `reads_logits`.
      num_new: number of tokens committed. The tokens fed at the first `num_new` positions are in
        the output, the others were rejected. 0 for a row that is done.
      nodes: of a tree, all nodes; None unless the drafter `reads_nodes`.
    """

    tokens: Int[Array, "B T"]
    states: Float[Array, "B T D"] | None
    logits: Float[Array, "B T V"] | None
    num_new: Int[Array, " B"]
    nodes: ScoredNodes | None = None


def make_empty_signals(policy: Policy | None, batch: int) -> DraftSignals | None:
    """Makes zeros in the place of what `policy` reads of a draft; None if it reads nothing."""
    if policy is None or not policy.needs_probs:
        return None
    return DraftSignals(*[jnp.zeros((batch, policy.maximum), jnp.float32)] * 3)


def make_prefixes(
    state: AnyRows,
    tokens: Int[Array, "B S"] | None = None,
    ahead: Int[Array, ""] | int = 0,
) -> Context:
    """Returns the prefixes that end `ahead` tokens past the committed ones.

    Args:
      tokens: committed tokens and, after them, drafted ones; None: `state.tokens`.
      ahead: how many drafted tokens the first prefix includes.
    """
    return Context(
        state.tokens if tokens is None else tokens,
        state.lengths + ahead,
        state.starts,
        state.eos_ids,
    )
