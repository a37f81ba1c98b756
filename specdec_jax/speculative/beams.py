"""One step of beam search, in T5X's form and in Hugging Face's, and the state that it works on.

Wu et al. 2016 (arXiv 1609.08144, section 7), as `t5x/decoding.py` and transformers' `_beam_search` have it. With K beams
and E ids that end a sequence a step takes the (1 + E)·K best continuations of all live beams, by the sum of their
log-probabilities; the K best of them that do not end stay alive, and those that end compete for K places of finished
hypotheses by that sum over a penalty for length:

- "t5x": ((5 + length) / 6)^penalty, the length counted from the start of the decoder, a prefix included. A row ends
  when its worst finished hypothesis beats what its best live beam could still come to.
- "huggingface": length^penalty, of new tokens alone. Only the first K continuations may finish. `early_stopping` says when
  a row ends: True as soon as there are K hypotheses; False when the best live beam, were it to end here, would not make
  it; "never" when it cannot, whatever its length.
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.speculative.sampling import SamplingMode, SamplingRows
from specdec_jax.speculative.state import Counts

STYLES = ("t5x", "huggingface")
# What a hypothesis that does not count is lowered by.
_FAR = {"t5x": 1e7, "huggingface": 1e9}


class BeamConfig(NamedTuple):
    """The static part of a search: what is compiled.

    Attributes:
      beams: K.
      ends: E, how many ids end a sequence.
      mode: which processors are on; nothing is drawn.
      vocab_size: V.
      style: one of `STYLES`.
      early_stopping: of "huggingface": False, True or "never".
      gamma: levels of the tree that is drafted; 0 is plain search.
      width: u, nodes of each level.
    """

    beams: int
    ends: int
    mode: SamplingMode
    vocab_size: int
    style: str = "t5x"
    early_stopping: bool | str = False
    gamma: int = 0
    width: int = 0

    @property
    def candidates(self) -> int:
        """Continuations that a step looks at: enough for K live beams, whatever ends."""
        return (1 + self.ends) * self.beams

    @property
    def nodes(self) -> int:
        """Positions of a call of the target: the live beams' last tokens, and the tree."""
        return self.beams + self.gamma * self.width


class Hypotheses(NamedTuple):
    """Sequences of a row, K of them.

    Attributes:
      tokens: `[B, K, P]` int32 by position: start token and decoder prefix, or prompt; new tokens; then anything.
      log_probs: `[B, K, P]` float32 of the new tokens, under the target's own law.
      adjusted_log_probs: the same after processors, of which `scores` are made; None without processors.
      lengths: `[B, K]` int32 new tokens.
      scores: `[B, K]` float32: sums of log-probabilities of live ones, sums over the penalty of finished ones.
    """

    tokens: jax.Array
    log_probs: jax.Array
    adjusted_log_probs: jax.Array | None
    lengths: jax.Array
    scores: jax.Array

    def pick(self, which: jax.Array) -> "Hypotheses":
        """Returns those with the numbers `which [B, J]`."""
        return jax.tree.map(lambda x: pick(x, which), self)

    def beside(self, others: "Hypotheses") -> "Hypotheses":
        """Returns these, and then the others of the same row."""
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), self, others)


@flax.struct.dataclass
class BeamState:
    """What lives through a search; B rows, one for each input.

    Attributes:
      live: the K beams that are continued: "t5x" keeps the best last, "huggingface" first.
      finished: the K best that have ended, in the same order.
      is_finished: `[B, K]` bool, False for a place of `finished` that nothing fills yet.
      prefix_lengths: `[B]` int32 start token and decoder prefix, or prompt.
      steps: `[B]` int32 new tokens of every live beam.
      limits: `[B]` int32, the most new tokens.
      done: `[B]` bool.
      failed: `[B]` int32, the first new token, from 1, whose law was not one of numbers; 0: none.
      eos_ids: `[B, E]` int32.
      penalty: scalar float32, exponent of the length.
      sampling: parameters of processors.
      paths: `[B, K, P]` int32, the slots of the cache in which the ancestors of every live beam's last token lie.
      starts: `[B]` int32, the first slot that is free; the last tokens of live beams go there, which have yet to be fed.
      target_cache: of `Network.node_cache`.
      draft_state: the drafter's, None without one.
      counts: as in `state.Counts`, with levels of the tree in place of drafted tokens.
      program: the static part.
    """

    live: Hypotheses
    finished: Hypotheses
    is_finished: jax.Array
    prefix_lengths: jax.Array
    steps: jax.Array
    limits: jax.Array
    done: jax.Array
    failed: jax.Array
    eos_ids: jax.Array
    penalty: jax.Array
    sampling: SamplingRows
    paths: jax.Array
    starts: jax.Array
    target_cache: Any
    draft_state: Any
    counts: Counts
    program: BeamConfig = flax.struct.field(pytree_node=False)

    @property
    def positions(self) -> jax.Array:
        """`[B]`: the position of the live beams' last tokens."""
        return self.prefix_lengths + self.steps - 1

    def sampling_of(self, copies: int) -> SamplingRows:
        """Returns `sampling` for `copies` rows side by side of each."""
        tables = dict(bias=self.sampling.bias, forced=self.sampling.forced)
        per_row = self.sampling.replace(bias=None, forced=None)
        return jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), per_row).replace(**tables)


class Candidates(NamedTuple):
    """The best continuations of each of N sequences, M of each; all `[B, N, M]`.

    Attributes:
      sums: the sequence's sum of log-probabilities with that of the new token.
      tokens: the new tokens.
      log_probs: theirs, under the target's own law.
      adjusted_log_probs: theirs after processors; None without.
    """

    sums: jax.Array
    tokens: jax.Array
    log_probs: jax.Array
    adjusted_log_probs: jax.Array | None

    def pick(self, which: jax.Array) -> "Candidates":
        """Returns those of the sequences `which [B, J]`."""
        return jax.tree.map(lambda x: pick(x, which), self)


def pick(values: jax.Array, which: jax.Array) -> jax.Array:
    """Returns `values[b, which[b, j]]`, `[B, J, …]`."""
    return jnp.take_along_axis(values, which.reshape(*which.shape, *[1] * (values.ndim - 2)), axis=1)


def first_hypotheses(tokens: jax.Array, positions: int, program: BeamConfig) -> tuple[Hypotheses, Hypotheses]:
    """Makes the live and the finished hypotheses of rows that begin with `tokens [B, P']`: one live beam, none finished."""
    batch, far = len(tokens), -_FAR[program.style]
    room = jnp.zeros((batch, program.beams, positions), jnp.int32)
    numbers, lengths = jnp.zeros(room.shape, jnp.float32), jnp.zeros(room.shape[:2], jnp.int32)
    best = program.beams - 1 if program.style == "t5x" else 0
    scores = jnp.where(jnp.arange(program.beams) == best, 0.0, far)
    adjusted = numbers if program.mode.processes else None
    whole = room.at[:, :, : tokens.shape[1]].set(tokens[:, None])
    live = Hypotheses(whole, numbers, adjusted, lengths, jnp.broadcast_to(scores, lengths.shape))
    return live, Hypotheses(whole, numbers, adjusted, lengths, jnp.full(lengths.shape, far))


def step(state: BeamState, found: Candidates, active: jax.Array) -> tuple[BeamState, jax.Array, jax.Array]:
    """Takes one step in the rows that are `active [B]`; the others stay as they are.

    Args:
      state: of which the caches and paths stay as they are.
      found: the best continuations of every live beam, `[B, K, M]`.

    Returns:
      The state, and of every new live beam the beam that it continues and its new token, both `[B, K]`.
    """
    program, live = state.program, state.live
    batch, _, kept = found.sums.shape
    far = _FAR[program.style]
    flat = lambda x: x.reshape(batch, -1)
    sums, which = jax.lax.top_k(flat(found.sums), min(program.candidates, program.beams * kept))
    parents, chosen = which // kept, jax.tree.map(lambda x: pick(flat(x), which), found)
    ends = jnp.any(chosen.tokens[..., None] == state.eos_ids[:, None], axis=-1)
    steps = state.steps + 1
    if program.style == "huggingface":
        finishing = ends | (steps >= state.limits)[:, None]
    else:
        finishing = ends
    continued = _extended(live.pick(parents), chosen, sums, state.prefix_lengths + state.steps)

    lowered = jnp.where(finishing, sums - far, sums)
    order = _best(lowered, program)
    new_live = continued.pick(order)._replace(scores=pick(lowered, order))
    finished, is_finished = _finish(state, continued, finishing)

    after = state.replace(live=new_live, finished=finished, is_finished=is_finished, steps=steps)
    failed = jnp.any(jnp.isnan(sums), axis=1)
    after = after.replace(
        done=_is_done(after) | failed, failed=jnp.where(failed & (state.failed == 0), steps, state.failed)
    )
    keep = lambda new, old: jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    names = ("live", "finished", "is_finished", "steps", "done", "failed")
    kept_rows = {name: jax.tree.map(keep, getattr(after, name), getattr(state, name)) for name in names}
    return state.replace(**kept_rows), pick(parents, order), pick(chosen.tokens, order)


def _extended(parents: Hypotheses, chosen: Candidates, sums: jax.Array, positions: jax.Array) -> Hypotheses:
    """The hypotheses `parents` with one token more at `positions [B]`."""
    here = (jnp.arange(parents.tokens.shape[-1]) == positions[:, None])[:, None]
    put = lambda old, new: None if old is None else jnp.where(here, new[..., None], old)
    return Hypotheses(
        put(parents.tokens, chosen.tokens), put(parents.log_probs, chosen.log_probs),
        put(parents.adjusted_log_probs, chosen.adjusted_log_probs), parents.lengths + 1, sums,
    )  # fmt: skip


def _best(scores: jax.Array, program: BeamConfig) -> jax.Array:
    """The places `[B, K]` of the K greatest of `scores [B, J]`, in the order of the style."""
    _, order = jax.lax.top_k(scores, program.beams)
    return order[:, ::-1] if program.style == "t5x" else order


def _finish(state: BeamState, continued: Hypotheses, finishing: jax.Array) -> tuple[Hypotheses, jax.Array]:
    """The K best finished hypotheses, and which of them are any, when `continued [B, C]` competes with those before."""
    program, far = state.program, _FAR[state.program.style]
    lengths = state.steps + 1
    if program.style == "huggingface":
        finishing = finishing & (jnp.arange(finishing.shape[1]) < program.beams)
    else:
        lengths = lengths + state.prefix_lengths - 1
    scores = continued.scores / _penalized(lengths, state)[:, None]
    if program.early_stopping is True:
        scores = jnp.where(jnp.all(state.is_finished, axis=1, keepdims=True), scores - far, scores)
    scores = jnp.where(finishing, scores, scores - far)
    merged = state.finished.beside(continued._replace(scores=scores))
    best = _best(merged.scores, program)
    return merged.pick(best), pick(jnp.concatenate([state.is_finished, finishing], axis=1), best)


def _penalized(lengths: jax.Array, state: BeamState) -> jax.Array:
    """What a sum of log-probabilities is divided by at `lengths`."""
    lengths = lengths.astype(jnp.float32)
    return (lengths if state.program.style == "huggingface" else (5 + lengths) / 6) ** state.penalty


def _is_done(state: BeamState) -> jax.Array:
    """Which rows cannot get any better, or are as long as they may be: `[B]`."""
    program = state.program
    worst = jnp.where(state.is_finished, jnp.min(state.finished.scores, axis=1, keepdims=True), -_FAR[program.style])
    at_end = state.steps >= state.limits
    if program.style == "t5x":
        # One more than the greatest length, as T5X counts the start token here.
        longest = _penalized(state.prefix_lengths + state.limits, state)
        return at_end | jnp.all(worst > (state.live.scores[:, -1] / longest)[:, None], axis=1)
    longest = state.steps
    if program.early_stopping == "never":
        longest = jnp.where(state.penalty > 0, state.limits, state.steps)
    possible = state.live.scores[:, 0] / _penalized(longest, state)
    hopeless = ~jnp.any(possible[:, None] > worst, axis=1)
    full = jnp.all(state.is_finished, axis=1) & (program.early_stopping is True)
    return at_end | hopeless | full


def best_first(state: BeamState) -> tuple[Hypotheses, jax.Array]:
    """The K hypotheses that a search comes to, the best first, and which of them are any, `[B, K]`.

    Where nothing has finished those are the live ones: "t5x" says so, and "huggingface" has finished all by then.
    """
    none = ~jnp.any(state.is_finished, axis=1)
    choose = lambda live, finished: jnp.where(none.reshape(-1, *[1] * (live.ndim - 1)), live, finished)
    found = jax.tree.map(choose, state.live, state.finished)
    there = state.is_finished | none[:, None]
    if state.program.style == "t5x":
        found, there = jax.tree.map(lambda x: x[:, ::-1], (found, there))
    return found, there
