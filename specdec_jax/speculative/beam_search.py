"""One step of beam search, in T5X's form and in Hugging Face's, and the state that it works on.

The search is that of Wu et al. 2016 (arXiv 1609.08144, section 7) as `t5x/decoding.py` and
`_beam_search` of transformers implement it. There are K active beams and E ids that end a sequence.
A step takes the (1 + E)·K best continuations of all active beams, by the sum of their
log-probabilities. The K best of these that do not end are the next active beams. Those that end
compete for the K places of finished hypotheses, by that sum divided by a length penalty, which
differs:

- "t5x" divides by ((5 + length) / 6)^penalty, with the length counted from the start of the
  decoder, a prefix included. A row is done when its worst finished hypothesis beats every score
  that its best active beam could still reach.
- "huggingface" divides by length^penalty, with the length in new tokens. Only the K best
  continuations may finish. `early_stopping` says when a row is done: True as soon as there are K
  hypotheses; False when the best active beam would not be among them if it ended here; "never" when
  it would not, whatever its length.
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.speculative.sampling import SamplingMode, SamplingRows
from specdec_jax.speculative.state import Counts
from specdec_jax.speculative.verifiers import pick

STYLES = ("t5x", "huggingface")
# The amount by which the score of a hypothesis that does not count is lowered, as the originals do
# it.
_FAR = {"t5x": 1e7, "huggingface": 1e9}


class BeamConfig(NamedTuple):
    """The static settings of a search: another value of any of them compiles another program.

    Attributes:
      beams: K.
      ends: E, how many ids end a sequence.
      mode: which processors are on; nothing is drawn.
      vocab_size: V.
      style: one of `STYLES`.
      early_stopping: False, True or "never"; only "huggingface" reads it.
      gamma: γ, levels of the tree that is drafted; 0 is plain search.
      width: u, nodes of each level.
      max_new: an upper bound of the new tokens of a row.
      returned: number of hypotheses that are returned for each row.
      strategy: as in `StaticConfig`.
    """

    beams: int
    ends: int
    mode: SamplingMode
    vocab_size: int
    style: str = "t5x"
    early_stopping: bool | str = False
    gamma: int = 0
    width: int = 0
    max_new: int = 0
    returned: int = 1
    strategy: Any = None

    def count_slots(self, prefix: int, new: int) -> int:
        """Returns the number of slots; `max_new`, the padded number, takes the place of `new`."""
        return prefix + self.max_new

    @property
    def candidates(self) -> int:
        """(1 + E)·K, continuations that a step takes: at least K of them do not end."""
        return (1 + self.ends) * self.beams

    @property
    def nodes(self) -> int:
        """K + γ·u, nodes in a call of the target: active beams' last tokens and drafted ones."""
        return self.beams + self.gamma * self.width


class Hypotheses(NamedTuple):
    """K sequences of each row, with their log-probabilities and scores.

    Attributes:
      tokens: `[B, K, P]` int32, by position: start token and decoder prefix, or prompt; new tokens;
        then anything.
      log_probs: `[B, K, P]` float32, log-probabilities of the new tokens under the target's own
        distribution.
      adjusted_log_probs: the same after processors, of which `scores` are sums; None without
        processors.
      lengths: `[B, K]` int32, number of new tokens.
      scores: `[B, K]` float32: of an active beam its sum of log-probabilities, of a finished
        hypothesis its sum divided by the length penalty.
    """

    tokens: jax.Array
    log_probs: jax.Array
    adjusted_log_probs: jax.Array | None
    lengths: jax.Array
    scores: jax.Array

    def pick(self, which: jax.Array) -> "Hypotheses":
        """Returns the hypotheses with the numbers `which [B, J]`."""
        return jax.tree.map(lambda x: pick(x, which), self)

    def beside(self, others: "Hypotheses") -> "Hypotheses":
        """Returns these hypotheses of each row, followed by `others` of the same row."""
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), self, others)


@flax.struct.dataclass
class BeamState:
    """The state of a search, with B rows, one for each input.

    Attributes:
      active: the K beams that are continued: "t5x" keeps the best last, "huggingface" first.
      finished: the K best hypotheses that have ended, in the same order.
      is_finished: `[B, K]` bool, False for a place of `finished` that nothing fills yet.
      prefix_lengths: `[B]` int32, number of tokens in the start token and decoder prefix, or in the
        prompt.
      steps: `[B]` int32, number of new tokens of every active beam.
      limits: `[B]` int32, the most new tokens.
      done: `[B]` bool, whether the row's search has ended.
      failed: `[B]` int32, the number of the first new token, from 1, whose distribution contained
        NaN; 0: none.
      eos_ids: `[B, E]` int32.
      penalty: `[B]` float32, the exponent of the length penalty.
      sampling: traced parameters of processors.
      paths: `[B, K, P]` int32, by position: the slots of the cache with the ancestors of each
        active beam's last token.
      starts: `[B]` int32, the first free slot. The last tokens of the active beams, which have yet
        to be fed, go there.
      target_cache: the target's cache, made by `Network.node_cache`.
      draft_state: the drafter's own state, None without a drafter.
      counts: statistics, with levels of the tree in the place of drafted tokens.
      config: the static settings.
    """

    active: Hypotheses
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
    config: BeamConfig = flax.struct.field(pytree_node=False)

    @property
    def positions(self) -> jax.Array:
        """`[B]`, the position of the active beams' last tokens."""
        return self.prefix_lengths + self.steps - 1


class Candidates(NamedTuple):
    """The M best continuations of each of N sequences by one token; all arrays are `[B, N, M]`.

    Attributes:
      sums: sums of log-probabilities of the sequences, the new token included.
      tokens: the new tokens.
      log_probs: log-probabilities of the new tokens under the target's own distribution.
      adjusted_log_probs: the same after processors; None without processors.
    """

    sums: jax.Array
    tokens: jax.Array
    log_probs: jax.Array
    adjusted_log_probs: jax.Array | None

    def pick(self, which: jax.Array) -> "Candidates":
        """Returns the continuations of the sequences with the numbers `which [B, J]`."""
        return jax.tree.map(lambda x: pick(x, which), self)


def make_first_hypotheses(
    tokens: jax.Array, positions: int, config: BeamConfig
) -> tuple[Hypotheses, Hypotheses]:
    """Makes the active beams and finished hypotheses of rows that begin with `tokens [B, P']`.

    One active beam counts; the scores of all others are lowered so far that they never win.

    Args:
      positions: P, room for the tokens of a sequence.
    """
    batch, far = len(tokens), -_FAR[config.style]
    blank = jnp.zeros((batch, config.beams, positions), jnp.int32)
    numbers, lengths = jnp.zeros(blank.shape, jnp.float32), jnp.zeros(blank.shape[:2], jnp.int32)
    best = config.beams - 1 if config.style == "t5x" else 0
    scores = jnp.where(jnp.arange(config.beams) == best, 0.0, far)
    adjusted = numbers if config.mode.processes else None
    whole = blank.at[:, :, : tokens.shape[1]].set(tokens[:, None])
    active = Hypotheses(whole, numbers, adjusted, lengths, jnp.broadcast_to(scores, lengths.shape))
    return active, Hypotheses(whole, numbers, adjusted, lengths, jnp.full(lengths.shape, far))


def step(
    state: BeamState, found: Candidates, active: jax.Array
) -> tuple[BeamState, jax.Array, jax.Array]:
    """Takes one step in the rows where `active [B]` is True; the others stay as they are.

    Args:
      state: the search; its caches and paths are left to the caller.
      found: the best continuations of every active beam, `[B, K, M]`.

    Returns:
      The state; the number of the beam that each new active beam continues, `[B, K]`; and its new
      token, `[B, K]`.
    """
    config, beams = state.config, state.active
    batch, _, kept = found.sums.shape
    far = _FAR[config.style]

    def flat(x: jax.Array):
        return x.reshape(batch, -1)

    sums, which = jax.lax.top_k(flat(found.sums), min(config.candidates, config.beams * kept))
    parents, chosen = which // kept, jax.tree.map(lambda x: pick(flat(x), which), found)
    ends = jnp.any(chosen.tokens[..., None] == state.eos_ids[:, None], axis=-1)
    steps = state.steps + 1
    if config.style == "huggingface":
        finishing = ends | (steps >= state.limits)[:, None]
    else:
        finishing = ends
    continued = _extend(beams.pick(parents), chosen, sums, state.prefix_lengths + state.steps)

    lowered = jnp.where(finishing, sums - far, sums)
    order = _find_best(lowered, config)
    new_beams = continued.pick(order)._replace(scores=pick(lowered, order))
    finished, is_finished = _finish(state, continued, finishing)

    after = state.replace(active=new_beams, finished=finished, is_finished=is_finished, steps=steps)
    failed = jnp.any(jnp.isnan(sums), axis=1)
    after = after.replace(
        done=_is_done(after) | failed,
        failed=jnp.where(failed & (state.failed == 0), steps, state.failed),
    )

    def keep(new: jax.Array, old: jax.Array):
        return jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    names = ("active", "finished", "is_finished", "steps", "done", "failed")
    kept_rows = {
        name: jax.tree.map(keep, getattr(after, name), getattr(state, name)) for name in names
    }
    return state.replace(**kept_rows), pick(parents, order), pick(chosen.tokens, order)


def _extend(
    parents: Hypotheses, chosen: Candidates, sums: jax.Array, positions: jax.Array
) -> Hypotheses:
    """Returns `parents` with their tokens of `chosen` at `positions [B]`, and with `sums`."""
    here = (jnp.arange(parents.tokens.shape[-1]) == positions[:, None])[:, None]

    def put(old: jax.Array, new: jax.Array):
        return None if old is None else jnp.where(here, new[..., None], old)

    return Hypotheses(
        put(parents.tokens, chosen.tokens),
        put(parents.log_probs, chosen.log_probs),
        put(parents.adjusted_log_probs, chosen.adjusted_log_probs),
        parents.lengths + 1,
        sums,
    )


def _find_best(scores: jax.Array, config: BeamConfig) -> jax.Array:
    """Returns the places `[B, K]` of the K greatest of `scores [B, J]`.

    For "t5x" the greatest is the last, else the first.
    """
    _, order = jax.lax.top_k(scores, config.beams)
    return order[:, ::-1] if config.style == "t5x" else order


def _finish(
    state: BeamState, continued: Hypotheses, finishing: jax.Array
) -> tuple[Hypotheses, jax.Array]:
    """Picks the K best of the finished hypotheses so far and of the new ones.

    Args:
      continued: the C continuations of this step.
      finishing: `[B, C]` bool, which of them end here.

    Returns:
      The hypotheses, and `[B, K]` bool: False for a place that nothing fills.
    """
    config, far = state.config, _FAR[state.config.style]
    lengths = state.steps + 1
    if config.style == "huggingface":
        finishing = finishing & (jnp.arange(finishing.shape[1]) < config.beams)
    else:
        lengths = lengths + state.prefix_lengths - 1
    scores = continued.scores / _length_penalty(lengths, state)[:, None]
    if config.early_stopping is True:
        scores = jnp.where(jnp.all(state.is_finished, axis=1, keepdims=True), scores - far, scores)
    scores = jnp.where(finishing, scores, scores - far)
    merged = state.finished.beside(continued._replace(scores=scores))
    best = _find_best(merged.scores, config)
    return merged.pick(best), pick(jnp.concatenate([state.is_finished, finishing], axis=1), best)


def _length_penalty(lengths: jax.Array, state: BeamState) -> jax.Array:
    """Returns the length penalty at `lengths`, by which a sum of log-probabilities is divided."""
    lengths = lengths.astype(jnp.float32)
    return (lengths if state.config.style == "huggingface" else (5 + lengths) / 6) ** state.penalty


def _is_done(state: BeamState) -> jax.Array:
    """Returns `[B]`: which rows cannot find a better hypothesis, or have reached their limit."""
    config = state.config
    worst = jnp.where(
        state.is_finished,
        jnp.min(state.finished.scores, axis=1, keepdims=True),
        -_FAR[config.style],
    )
    at_end = state.steps >= state.limits
    if config.style == "t5x":
        # This length is one more than the greatest that `_finish` uses: here T5X counts the start
        # token.
        longest = _length_penalty(state.prefix_lengths + state.limits, state)
        return at_end | jnp.all(worst > (state.active.scores[:, -1] / longest)[:, None], axis=1)
    longest = state.steps
    if config.early_stopping == "never":
        longest = jnp.where(state.penalty > 0, state.limits, state.steps)
    possible = state.active.scores[:, 0] / _length_penalty(longest, state)
    hopeless = ~jnp.any(possible[:, None] > worst, axis=1)
    full = jnp.all(state.is_finished, axis=1) & (config.early_stopping is True)
    return at_end | hopeless | full


def sort_hypotheses(state: BeamState) -> tuple[Hypotheses, jax.Array]:
    """Returns the K hypotheses, the best first, and `[B, K]`: False for a place that nothing fills.

    Where nothing has finished, the active beams are the result, as in T5X; in Hugging Face's form
    something has finished whenever a search ends.
    """
    none = ~jnp.any(state.is_finished, axis=1)

    def choose(active: jax.Array, finished: jax.Array):
        return jnp.where(none.reshape(-1, *[1] * (active.ndim - 1)), active, finished)

    found = jax.tree.map(choose, state.active, state.finished)
    there = state.is_finished | none[:, None]
    if state.config.style == "t5x":
        found, there = jax.tree.map(lambda x: x[:, ::-1], (found, there))
    return found, there
