"""What lives through the decode loop, and what drafters and verifiers hand to each other."""

from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specdec_jax.speculative.gamma import DraftSignals, Policy
from specdec_jax.speculative.laws import Law, PointMass
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.sampling import SamplingMode, SamplingRows
from specdec_jax.speculative.verifier import Settings, Verifier
from specdec_jax.speculative.verifiers import VERIFIERS


class StaticConfig(NamedTuple):
    """The static part of a decode: what is compiled.

    Attributes:
      gamma: G, the most tokens drafted in one iteration; 0 is plain decoding.
      mode: which sampling adjustments are on.
      vocab_size: V, width of the target's logits; a drafter's laws are brought to it.
      verifier: decides which drafted tokens stand.
      widths: positions of the target calls that are compiled, ascending, the last one G + 1; () is G + 1 alone.
    """

    gamma: int
    mode: SamplingMode
    vocab_size: int
    verifier: Verifier = VERIFIERS["block"]
    widths: tuple[int, ...] = ()

    @property
    def strict_argmax(self) -> bool:
        """Whether every token is the target's argmax: then no law over the vocabulary is ever built."""
        return self.mode.greedy and not self.verifier.softens

    @property
    def commits_argmax(self) -> bool:
        """Whether every token is the argmax of the target's own logits, so that of these only the greatest matters."""
        return self.strict_argmax and not self.mode.processes and self.verifier.judge_greedy is None

    @property
    def asks_draft_law(self) -> bool:
        """Whether the verifier looks at the law that the draft was drawn from."""
        return not self.mode.greedy and self.verifier.reads_draft_law


@flax.struct.dataclass
class Counts:
    """What happened, per row.

    Attributes:
      target_calls: target calls in which the row took part.
      draft_calls: drafter calls in which the row took part, catching up included.
      drafted: tokens drafted.
      accepted: drafted tokens that stood and were committed.
      examined_by_position: how often the i-th drafted token was examined: up to and with the first rejection, nothing
        after an EOS.
      accepted_by_position: how often it stood.
    """

    target_calls: Int[Array, " B"]
    draft_calls: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    examined_by_position: Int[Array, "B G"]
    accepted_by_position: Int[Array, "B G"]

    @classmethod
    def zero(cls, batch: int, gamma: int) -> "Counts":
        one, many = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, gamma), jnp.int32)
        return cls(one, one, one, one, many, many)


@flax.struct.dataclass
class DecodeState:
    """What lives through the loop. B rows; S slots of tokens, G + 1 more than any row's limit.

    Attributes:
      tokens: start token and decoder prefix, or the prompt, then committed tokens; anything after a row's length.
      lengths: committed tokens, start token and prefix included.
      done: the row is complete.
      starts: start token and prefix, or prompt: how many of the tokens are not new.
      log_probs: float32 under the target's own law (temperature 1, no filter), at the committed slots.
      adjusted_log_probs: the same under the law after processors and filters; None where it is 0 throughout (argmax).
      keys: one per request.
      sampling: sampling parameters.
      settings: of a lossy verifier, else None.
      limits: the length at which a row stops.
      eos_ids: ids that stop a row, padded with −1.
      gamma: tokens to draft per iteration, at most G.
      policy: drafts fewer now and then, by numbers of its own for each row; None drafts γ.
      policy_state: what it keeps.
      target_cache: the target's cache; its live part ends one slot before a row's last token.
      draft_state: the drafter's own state, None without a drafter.
      counts: statistics.
      last_draft: tokens drafted in the last iteration.
      last_drafted, last_accepted: how many were drafted and how many stood in the last iteration.
      last_seen: the laws of the last draft as the policy reads them; None if it reads none.
      draft_failed: the first slot for which the drafter's law was not one of numbers; 0: none yet.
      program: the static part.
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
    program: StaticConfig = flax.struct.field(pytree_node=False)


class Draft(NamedTuple):
    """What a drafter proposes.

    Attributes:
      tokens: −1 where the law to draw from is not one of numbers (NaN): there the draft ends.
      num_drafted: how many of them count; at most the number asked for.
      law: the law over `[B, G, V]` that they were really drawn from, a `PointMass` if they were not drawn; None where
        `StaticConfig.asks_draft_law` is False.
      calls: of the drafter's model that the row took part in.
      seen: of the laws, where the policy of γ reads them.
      target_cache: the target's cache, if the drafter has written to it: to slots that the target's call overwrites.
    """

    tokens: Int[Array, "B G"]
    num_drafted: Int[Array, " B"]
    law: Law | PointMass | None
    calls: Int[Array, " B"]
    seen: DraftSignals | None = None
    target_cache: Any = None

    def first(self, gamma: int) -> "Draft":
        """Returns the draft cut to its first `gamma` positions; no row may have drafted more."""
        tokens, law = self.tokens[:, :gamma], self.law
        if isinstance(law, PointMass):
            law = law._replace(tokens=law.tokens[:, :gamma])
        elif law is not None:
            law = Law(law.logits[:, :gamma], law.log_normalizer[:, :gamma])
        return self._replace(tokens=tokens, law=law)


class Scored(NamedTuple):
    """What the target made of the last committed token and the draft, T = G + 1: what a drafter may learn from.

    Attributes:
      tokens: those fed.
      states: the target's last ones, which its head takes.
      logits: float32, before any processor.
      num_new: tokens committed; the tokens fed at the first `num_new` positions are in the output, what
        follows was refused. 0 for a row that is done.
    """

    tokens: Int[Array, "B T"]
    states: Float[Array, "B T D"]
    logits: Float[Array, "B T V"]
    num_new: Int[Array, " B"]


def empty_signals(policy: Policy | None, batch: int) -> DraftSignals | None:
    """Room for what `policy` reads of a draft's laws; None if it reads none."""
    if policy is None or not policy.reads_law:
        return None
    return DraftSignals(*[jnp.zeros((batch, policy.maximum), jnp.float32)] * 3)


def context(state: DecodeState, tokens: Int[Array, "B S"] | None = None, ahead: Int[Array, ""] | int = 0) -> Context:
    """The prefixes after `ahead` of the tokens that follow the committed ones in `tokens`."""
    return Context(state.tokens if tokens is None else tokens, state.lengths + ahead, state.starts, state.eos_ids)
