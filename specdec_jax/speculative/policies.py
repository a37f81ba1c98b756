"""The package's policies of γ; `adaptive_gamma.py` has that of `gamma="auto"`."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.speculative.policy import (
    MAX_GAMMA,
    DraftSignals,
    Outcome,
    PerInput,
    Policy,
    number_field,
)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Heuristic(Policy):
    """A policy that adds 2 to γ after a draft accepted as a whole, and subtracts 1 after others.

    Assisted generation in Hugging Face transformers does the same (Gante 2023).

    Attributes:
      maximum: G.
      minimum: the least γ.
      start: γ of the first iteration, clipped to [minimum, maximum].
      up, down: what is added and subtracted.
    """

    minimum: PerInput = number_field(1, 1, MAX_GAMMA)
    start: PerInput = number_field(4, 1, MAX_GAMMA)
    up: PerInput = number_field(2, 0, MAX_GAMMA)
    down: PerInput = number_field(1, 0, MAX_GAMMA)

    def init(self) -> Int[Array, " B"]:
        return jnp.clip(self.start, self.minimum, self.maximum)

    def wanted(self, state: Int[Array, " B"]) -> Int[Array, " B"]:
        return state

    def update(self, state: Int[Array, " B"], outcome: Outcome) -> Int[Array, " B"]:
        full = outcome.accepted == outcome.drafted
        changed = jnp.clip(state + jnp.where(full, self.up, -self.down), self.minimum, self.maximum)
        # A drafter that proposed nothing teaches nothing.
        return jnp.where(outcome.drafted > 0, changed, state)


class _Average(NamedTuple):
    """An exponential moving average, `total / weight`, whose first values are not biased to 0."""

    total: Float[Array, " B"]
    weight: Float[Array, " B"]

    def with_value(self, value: Float[Array, " B"], smoothing: Float[Array, " B"]) -> "_Average":
        new = 1 - smoothing
        return _Average(smoothing * self.total + new * value, smoothing * self.weight + new)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Entropy(Policy):
    """A policy that drafts more where the drafter's first distribution is surer (EGAG).

    γ = γ_max − (γ_max − γ_min) · h, rounded. h is the entropy of the draft's first distribution,
    over that of a uniform distribution and smoothed over iterations by an exponential moving
    average: h ← β · h + (1 − β) · H(q) / log V. It is known before anything is drawn.

    Attributes:
      maximum: γ_max, where h = 0.
      minimum: γ_min, where h = 1.
      smoothing: β; 0 uses the current distribution alone.
    """

    minimum: PerInput = number_field(1, 1, MAX_GAMMA)
    smoothing: PerInput = number_field(0.0, 0, 1, below=True)
    needs_probs: ClassVar[bool] = True

    def init(self) -> _Average:
        zero = jnp.zeros_like(self.smoothing)
        return _Average(zero, zero)

    def budget(self, state: _Average, seen: DraftSignals) -> Int[Array, " B"]:
        average = state.with_value(seen.evenness[:, 0], self.smoothing)
        even = jnp.clip(average.total / average.weight, 0, 1)
        span = jnp.asarray(self.maximum - self.minimum, jnp.float32)
        return jnp.round(self.maximum - span * even).astype(jnp.int32)

    def update(self, state: _Average, outcome: Outcome) -> _Average:
        assert outcome.seen is not None  # the policy reads distributions
        after = state.with_value(outcome.seen.evenness[:, 0], self.smoothing)
        return jax.tree.map(lambda new, old: jnp.where(outcome.drafted > 0, new, old), after, state)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class EntropyBound(Policy):
    """A policy that ends a draft after a token whose distribution has 1 − √(κ · H(q)) < λ.

    The left side estimates a lower bound of the probability that the token is accepted (AdaEDL,
    Agrawal et al. 2024, arXiv 2410.18351).

    Attributes:
      maximum: G.
      scale: κ; the paper uses 0.2.
      threshold: λ; 0.4 with κ = 0.2 ends a draft above an entropy of 1.8 nats.
    """

    scale: PerInput = number_field(0.2, 0, 1e6)
    threshold: PerInput = number_field(0.4, 0, 1)
    needs_probs: ClassVar[bool] = True

    def goes_on(self, state: Any, seen: DraftSignals) -> Bool[Array, "B G"]:
        bound = 1 - jnp.sqrt(self.scale[:, None] * jnp.maximum(seen.entropy, 0))
        return ~(bound < self.threshold[:, None])


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Confidence(Policy):
    """A policy that ends a draft after a token with q(x) < θ.

    In a tree it ends a path after a node with Π q(x) < θ along the path. Otherwise it is that of
    Mamou et al. 2024 (arXiv 2405.04304, section 2), and of Hugging Face transformers.

    Attributes:
      maximum: G.
      threshold: θ.
    """

    threshold: PerInput = number_field(0.4, 0, 1)
    needs_probs: ClassVar[bool] = True

    def goes_on(self, state: Any, seen: DraftSignals) -> Bool[Array, "B G"]:
        return ~(seen.prob < self.threshold[:, None])


class CostAwareState(NamedTuple):
    """The sums that `CostAware` keeps; every iteration multiplies the old ones by `memory`.

    Attributes:
      examined, accepted: how often the token at each position of a draft was examined, and how
        often it was accepted.
      tokens: tokens committed.
      time: time that they took, in units of a target step.
    """

    examined: Float[Array, "B G"]
    accepted: Float[Array, "B G"]
    tokens: Float[Array, " B"]
    time: Float[Array, " B"]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class CostAware(Policy):
    """A policy that drafts the i-th token while it is expected to yield more than its time.

    That is while Π_{j≤i} ĉ_j ≥ R · (c + δ). In terms of renewal reward theory, iterations are
    cycles, and R, the tokens per time, is greatest where the two sides are equal.

    ĉ_j is a moving average of the acceptance at position j, in which the average over all positions
    counts as `weight` observations; it begins at `acceptance`. R is a moving average of the tokens
    per target step's time; it begins at the greatest value that `acceptance` promises for a fixed
    γ. δ = (v − 1) / G is what one more position adds to a target call.

    `tree_budgets.TreeCostAware` is the same for the nodes of a tree.

    Attributes:
      maximum: G.
      minimum: the least γ; above 0, so that acceptance is always learned.
      cost_ratio: c, the time of a draft step over that of a target step.
      verify_cost: v, the time of a target call over G + 1 positions over that of one position.
      acceptance: acceptance rate that is assumed at first.
      weight: how many observations that assumption counts for.
      memory: factor by which the observations of an iteration are multiplied at each later one.
    """

    minimum: PerInput = number_field(1, 1, MAX_GAMMA)
    cost_ratio: PerInput = number_field(0.1, 0, 1e6)
    verify_cost: PerInput = number_field(1.0, 1e-6, 1e6)
    acceptance: PerInput = number_field(0.7, 0, 1)
    weight: PerInput = number_field(4.0, 1e-6, 1e6)
    memory: PerInput = number_field(0.9, 0, 1)

    def _step(self) -> Float[Array, " B"]:
        """Returns c + δ, the time to draft and verify one more token, in units of a target step."""
        return self.cost_ratio + (self.verify_cost - 1) / self.maximum

    def init(self) -> CostAwareState:
        return self._begin(self.maximum)

    def _begin(self, groups: int) -> CostAwareState:
        """Returns the first state, in which acceptance is counted for each of some groups."""
        zeros = jnp.zeros((len(self.weight), groups), jnp.float32)
        gammas = jnp.arange(self.maximum + 1, dtype=jnp.float32)
        tokens = jnp.cumsum(self.acceptance[:, None] ** gammas, axis=1)
        rate = jnp.max(tokens / (1 + gammas * self._step()[:, None]), axis=1)
        return CostAwareState(zeros, zeros, rate * self.weight, jnp.asarray(self.weight))

    def wanted(self, state: CostAwareState) -> Int[Array, " B"]:
        weight = self.weight[:, None]

        accepted, examined = (
            jnp.sum(counts, axis=1, keepdims=True) for counts in (state.accepted, state.examined)
        )
        overall = (accepted + weight * self.acceptance[:, None]) / (examined + weight)
        shares = (state.accepted + weight * overall) / (state.examined + weight)
        reach = jnp.cumprod(shares, axis=1)
        worth = reach >= (state.tokens / state.time * self._step())[:, None]
        # Each rate is at most 1, so `reach` never rises, and the positions that are worth it come
        # first.
        return jnp.clip(jnp.sum(worth.astype(jnp.int32), axis=1), self.minimum, self.maximum)

    def update(self, state: CostAwareState, outcome: Outcome) -> CostAwareState:
        index, memory = jnp.arange(self.maximum), self.memory[:, None]
        accepted, drafted = outcome.accepted[:, None], outcome.drafted[:, None]
        examined = index < jnp.minimum(accepted + 1, drafted)
        return CostAwareState(
            examined=memory * state.examined + self._group(examined, outcome),
            accepted=memory * state.accepted + self._group(index < accepted, outcome),
            tokens=self.memory * state.tokens + outcome.accepted.astype(jnp.float32) + 1,
            time=self.memory * state.time + 1 + outcome.drafted.astype(jnp.float32) * self._step(),
        )

    def _group(self, which: Bool[Array, "B G"], outcome: Outcome) -> Float[Array, "B N"]:
        """Returns how many of the positions `which` are in each group."""
        return which.astype(jnp.float32)


# The least q(x) of each bucket of `Calibrated` but the first.
BUCKETS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Calibrated(CostAware):
    """A policy that drafts on while the draft so far is likely enough to be accepted as a whole.

    Unlike `CostAware` it looks at the draft: a token with confidence q(x) is expected to be
    accepted as often as earlier tokens of the row with a like confidence were. A draft goes on
    after its i-th token while Π_{j≤i} â(q(x_j)) ≥ R · (c + δ).

    â(q) is a moving average of the acceptance in the bucket of q, one of 8, in which the middle of
    the bucket counts as `weight` observations: a drafter is first taken at its word. R, c and δ are
    those of `CostAware`. Only tokens that the target examined count. An estimate looks back only:
    what is drawn now changes none before the next iteration.

    In transformers the threshold of `Confidence` adapts instead; Draft & Verify (Zhang et al. 2023,
    arXiv 2309.08168) moves it towards a given acceptance rate.

    Attributes:
      maximum: G.
      minimum, cost_ratio, verify_cost, acceptance, weight, memory: as for `CostAware`.
    """

    needs_probs: ClassVar[bool] = True
    counts_nodes: ClassVar[bool] = False  # along a path of a tree confidence is a product

    def init(self) -> CostAwareState:
        return self._begin(len(BUCKETS) + 1)

    def wanted(self, state: CostAwareState) -> int:
        return self.maximum

    def goes_on(self, state: CostAwareState, seen: DraftSignals) -> Bool[Array, "B G"]:
        weight, ends = self.weight[:, None], np.array([0, *BUCKETS, 1], np.float32)
        middles = (ends[:-1] + ends[1:]) / 2
        rates = (state.accepted + weight * middles) / (state.examined + weight)
        reach = jnp.cumprod(jnp.sum(_find_buckets(seen) * rates[:, None], axis=2), axis=1)
        worth = reach >= (state.tokens / state.time * self._step())[:, None]
        return worth | (jnp.arange(1, self.maximum + 1) < self.minimum[:, None])

    def _group(self, which: Bool[Array, "B G"], outcome: Outcome) -> Float[Array, "B N"]:
        assert outcome.seen is not None  # the policy reads distributions
        return jnp.sum(jnp.where(which[..., None], _find_buckets(outcome.seen), 0), axis=1)


def _find_buckets(seen: DraftSignals) -> Float[Array, "B G 8"]:
    """Returns 1 in the bucket that each confidence is in, and 0 in the others."""
    buckets = jnp.sum(seen.prob[..., None] >= jnp.array(BUCKETS, jnp.float32), axis=2)
    return jax.nn.one_hot(buckets, len(BUCKETS) + 1, dtype=jnp.float32)


# Policies by their names on the command line.
POLICIES: dict[str, type[Any]] = {
    "heuristic": Heuristic,
    "entropy": Entropy,
    "entropy_bound": EntropyBound,
    "confidence": Confidence,
    "cost_aware": CostAware,
    "calibrated": Calibrated,
}


def call_widths(gamma: int, none: bool) -> tuple[int, ...]:
    """Returns the widths of target calls that are compiled where drafts differ in length.

    They are 1 + 2^k up to γ + 1, so that few calls are compiled and none is more than about twice
    as wide as needed. With `none`, for drafters that may propose nothing, 1 is one of them, the
    width of plain decoding.
    """
    widths = {1 + 2**power for power in range(gamma.bit_length()) if 2**power < gamma}
    return tuple(sorted(widths | {gamma + 1} | ({1} if none else set())))
