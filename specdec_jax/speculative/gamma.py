"""How many tokens to draft: policies that adapt γ to each row while it decodes. Pure functions of per-row arrays.

No policy changes the output law. An iteration preserves the target's law whatever γ is, if γ was
known before its draws; these are independent of all earlier ones, and so of whatever `wanted` has
learned from them. A stop within a draft (`limit`) depends on the tokens drawn so far and on the
laws they came from: it is a stopping time of the draft, and a draft that ends after a token that
was drawn is one that might have had that length anyway, for every verifier. What would be biased is
to drop a token after a look at it: the one that ends a draft stays in it.

A policy is a pytree: its numbers are traced, one or one per input, so that changing them never
recompiles; `maximum` (G) and
the kind of policy are static.
"""

import copy
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

MAX_GAMMA = 64
# One number, or one per input.
PerInput = Any


class DraftSignals(NamedTuple):
    """The laws that a draft came from, as policies read them; junk at positions that were not drafted.

    They are the laws drawn from, after processors, temperature and filters; where the temperature
    is 0, which makes them one-hot, the same at temperature 1.

    Attributes:
      prob: q(x) of the drafted tokens.
      entropy: H(q) in nats.
      evenness: H(q) / log V: 1 is uniform.
    """

    prob: Float[Array, "B G"]
    entropy: Float[Array, "B G"]
    evenness: Float[Array, "B G"]


class Outcome(NamedTuple):
    """One iteration: how many tokens were drafted and how many stood; what was seen."""

    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    seen: DraftSignals | None


def number(default: float, least: float, most: float, below: bool = False):
    """A field of a policy: one number or one per input, from `least` to `most` (with `below`: less than that)."""
    return dataclasses.field(default=default, metadata={"range": (least, most, below)})


class Policy:
    """What all policies have. `state` is what a policy keeps for each row, `[B]` or `[B, G]` arrays.

    Attributes:
      maximum: G, the most tokens drafted in one iteration; what is compiled.
      reads_law: whether it needs the laws that drafts come from, which not every drafter has.
    """

    maximum: int
    reads_law: ClassVar[bool] = False

    def __post_init__(self):
        if isinstance(self.maximum, bool) or not isinstance(self.maximum, int | np.integer):
            raise ValueError(f"maximum: got {self.maximum!r}, expected an integer from 1 to {MAX_GAMMA}")
        if not 1 <= self.maximum <= MAX_GAMMA:
            raise ValueError(f"maximum: got {self.maximum}, expected an integer from 1 to {MAX_GAMMA}")
        for name, (least, most, below) in self.numbers().items():
            whole, value = self._whole(name), np.asarray(getattr(self, name))
            most = min(most, self.maximum) if name == "minimum" else most
            number = np.issubdtype(value.dtype, np.integer) or not whole and np.issubdtype(value.dtype, np.floating)
            inside = number and np.all((value >= least) & (value < most if below else value <= most))
            if not inside:
                kind = "an integer" if whole else "a number"
                bound = f"to below {most}" if below else f"to {most}"
                raise ValueError(f"{name}: got {getattr(self, name)}, expected {kind} from {least} {bound}")

    @classmethod
    def numbers(cls) -> dict[str, tuple[float, float, bool]]:
        """Names of what may be chosen beside `maximum`, with their ranges."""
        return {field.name: field.metadata["range"] for field in dataclasses.fields(cls) if field.metadata}  # type: ignore[arg-type]

    @classmethod
    def _whole(cls, name: str) -> bool:
        return isinstance(getattr(cls, name), int)

    def rows(self, batch: int) -> Any:
        """The policy with one number for each of `batch` inputs.

        Raises:
          ValueError: another number of values than inputs.
        """
        values = {}
        for name in self.numbers():
            value = np.asarray(getattr(self, name), np.int32 if self._whole(name) else np.float32)
            if value.ndim and value.shape != (batch,):
                raise ValueError(f"{name}: got {value.size} values, expected one or {batch} (one per input)")
            values[name] = np.broadcast_to(value, (batch,))
        policy = copy.copy(self)  # not by its constructor, which would check all again, for every request
        for name, value in values.items():
            object.__setattr__(policy, name, value)
        return policy

    def tree_flatten(self):
        return tuple(getattr(self, name) for name in self.numbers()), self.maximum

    @classmethod
    def tree_unflatten(cls, maximum, values):
        policy = object.__new__(cls)  # unchecked: inside jit the numbers are traced
        for name, value in (("maximum", maximum), *zip(cls.numbers(), values, strict=True)):
            object.__setattr__(policy, name, value)
        return policy

    def init(self) -> Any:
        """The state that rows begin with; traced."""
        return ()

    def wanted(self, state: Any) -> Int[Array, " B"] | int:
        """The most to draft in the next iteration."""
        return self.maximum

    def limit(self, state: Any, step: Int[Array, ""], seen: DraftSignals) -> Int[Array, " B"] | int:
        """How long the draft may become, now that the token at `step` was drawn; only if
        the policy reads laws."""
        return self.maximum

    def update(self, state: Any, outcome: Outcome) -> Any:
        """The state after an iteration."""
        return state


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Heuristic(Policy):
    """+2 after an iteration in which all that was drafted stood, −1 after one with a rejection (Gante 2023, assisted
    generation in Hugging Face transformers).

    Attributes:
      maximum: G. minimum: the least γ.
      start: γ of the first iteration, brought between the two.
      up, down: what is added and taken away.
    """

    maximum: int = 8
    minimum: PerInput = number(1, 1, MAX_GAMMA)
    start: PerInput = number(4, 1, MAX_GAMMA)
    up: PerInput = number(2, 0, MAX_GAMMA)
    down: PerInput = number(1, 0, MAX_GAMMA)

    def init(self) -> Int[Array, " B"]:
        return jnp.clip(self.start, self.minimum, self.maximum)

    def wanted(self, state: Int[Array, " B"]) -> Int[Array, " B"]:
        return state

    def update(self, state: Int[Array, " B"], outcome: Outcome) -> Int[Array, " B"]:
        full = outcome.accepted == outcome.drafted
        changed = jnp.clip(state + jnp.where(full, self.up, -self.down), self.minimum, self.maximum)
        return jnp.where(outcome.drafted > 0, changed, state)  # a drafter may have found nothing to propose


class _Average(NamedTuple):
    """An exponential moving average `total / weight` that does not begin at 0."""

    total: Float[Array, " B"]
    weight: Float[Array, " B"]

    def with_value(self, value: Float[Array, " B"], smoothing: Float[Array, " B"]) -> "_Average":
        new = 1 - smoothing
        return _Average(smoothing * self.total + new * value, smoothing * self.weight + new)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Entropy(Policy):
    """γ from how sure the drafter is where a draft begins: γ_max − (γ_max − γ_min) · h, rounded (EGAG).

    h is the entropy of the draft's first law over that of a uniform one, H(q) / log V, smoothed over iterations by an
    exponential moving average: h ← β · h + (1 − β) · H(q) / log V. It is known before anything is drawn.

    Attributes:
      maximum: γ_max, where h = 0. minimum: γ_min, where h = 1.
      smoothing: β; 0 looks at the current law alone.
    """

    maximum: int = 8
    minimum: PerInput = number(1, 1, MAX_GAMMA)
    smoothing: PerInput = number(0.0, 0, 1, below=True)
    reads_law: ClassVar[bool] = True

    def init(self) -> _Average:
        zero = jnp.zeros_like(self.smoothing)
        return _Average(zero, zero)

    def limit(self, state: _Average, step: Int[Array, ""], seen: DraftSignals) -> Int[Array, " B"]:
        average = state.with_value(seen.evenness[:, 0], self.smoothing)
        even = jnp.clip(average.total / average.weight, 0, 1)
        room = jnp.asarray(self.maximum - self.minimum, jnp.float32)
        gamma = jnp.round(self.maximum - room * even).astype(jnp.int32)
        return jnp.where(step == 0, gamma, self.maximum)

    def update(self, state: _Average, outcome: Outcome) -> _Average:
        assert outcome.seen is not None  # the policy reads laws
        after = state.with_value(outcome.seen.evenness[:, 0], self.smoothing)
        return jax.tree.map(lambda new, old: jnp.where(outcome.drafted > 0, new, old), after, state)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class EntropyBound(Policy):
    """Stops after a token whose law has 1 − √(κ · H(q)) < λ, an estimate of the least probability that the token stands
    (AdaEDL, Agrawal et al. 2024, arXiv 2410.18351).

    Attributes:
      maximum: G.
      scale: κ; the paper takes 0.2.
      threshold: λ; 0.4 with κ = 0.2 stops above 1.8 nats.
    """

    maximum: int = 8
    scale: PerInput = number(0.2, 0, 1e6)
    threshold: PerInput = number(0.4, 0, 1)
    reads_law: ClassVar[bool] = True

    def limit(self, state: Any, step: Int[Array, ""], seen: DraftSignals) -> Int[Array, " B"]:
        entropy = jnp.maximum(jax.lax.dynamic_index_in_dim(seen.entropy, step, axis=1, keepdims=False), 0)
        return jnp.where(1 - jnp.sqrt(self.scale * entropy) < self.threshold, step + 1, self.maximum)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Confidence(Policy):
    """Stops after a token with q(x) < θ (Mamou et al. 2024, arXiv 2405.04304, section 2, and
    Hugging Face transformers).

    Attributes:
      maximum: G.
      threshold: θ.
    """

    maximum: int = 8
    threshold: PerInput = number(0.4, 0, 1)
    reads_law: ClassVar[bool] = True

    def limit(self, state: Any, step: Int[Array, ""], seen: DraftSignals) -> Int[Array, " B"]:
        prob = jax.lax.dynamic_index_in_dim(seen.prob, step, axis=1, keepdims=False)
        return jnp.where(prob < self.threshold, step + 1, self.maximum)


class RenewalState(NamedTuple):
    """Sums that are multiplied by `memory` every iteration.

    Attributes:
      examined, stood: how often a position was examined, and how often it stood.
      tokens, time: tokens committed, and the time it took in target steps.
    """

    examined: Float[Array, "B G"]
    stood: Float[Array, "B G"]
    tokens: Float[Array, " B"]
    time: Float[Array, " B"]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Renewal(Policy):
    """Drafts the i-th token while Π_{j≤i} ĉ_j ≥ R · (c + δ): the tokens it is expected to yield
    against what its time is worth (renewal reward: iterations are cycles, and R, tokens per time,
    is greatest where the two are equal).

    ĉ_j is a moving average of acceptance at position j, that of all positions weighing in as
    `weight` observations, R one of the tokens per target step's time, and δ = (v − 1) / G what one
    more position adds to a target call. ĉ begins at `acceptance`, R at the greatest improvement
    that it promises for a fixed γ.

    Attributes:
      maximum: G. minimum: the least γ, from which acceptance is learned.
      cost_ratio: c, the time of a draft step over that of a target step.
      verify_cost: v, the time of a target call over G + 1 positions over that of one position.
      acceptance: α expected before anything was seen.
      weight: how many observations it counts for.
      memory: factor by which older iterations count less.
    """

    maximum: int = 8
    minimum: PerInput = number(1, 1, MAX_GAMMA)
    cost_ratio: PerInput = number(0.1, 0, 1e6)
    verify_cost: PerInput = number(1.0, 1e-6, 1e6)
    acceptance: PerInput = number(0.7, 0, 1)
    weight: PerInput = number(4.0, 1e-6, 1e6)
    memory: PerInput = number(0.9, 0, 1)

    def _step(self) -> Float[Array, " B"]:
        """c + δ: what drafting and verifying one more token costs, in target steps."""
        return self.cost_ratio + (self.verify_cost - 1) / self.maximum

    def init(self) -> RenewalState:
        positions = jnp.zeros((len(self.weight), self.maximum), jnp.float32)
        gammas = jnp.arange(self.maximum + 1, dtype=jnp.float32)
        tokens = jnp.cumsum(self.acceptance[:, None] ** gammas, axis=1)
        rate = jnp.max(tokens / (1 + gammas * self._step()[:, None]), axis=1)
        return RenewalState(positions, positions, rate * self.weight, jnp.asarray(self.weight))

    def wanted(self, state: RenewalState) -> Int[Array, " B"]:
        weight = self.weight[:, None]
        share = lambda stood, examined, prior: (stood + weight * prior) / (examined + weight)
        total = lambda counts: jnp.sum(counts, axis=1, keepdims=True)
        overall = share(total(state.stood), total(state.examined), self.acceptance[:, None])
        reach = jnp.cumprod(share(state.stood, state.examined, overall), axis=1)
        worth = reach >= (state.tokens / state.time * self._step())[:, None]
        # Each rate is at most 1, so that those that are worth it come first.
        return jnp.clip(jnp.sum(worth.astype(jnp.int32), axis=1), self.minimum, self.maximum)

    def update(self, state: RenewalState, outcome: Outcome) -> RenewalState:
        index, memory = jnp.arange(self.maximum), self.memory[:, None]
        accepted, drafted = outcome.accepted[:, None], outcome.drafted[:, None]
        return RenewalState(
            examined=memory * state.examined + (index < jnp.minimum(accepted + 1, drafted)).astype(jnp.float32),
            stood=memory * state.stood + (index < accepted).astype(jnp.float32),
            tokens=self.memory * state.tokens + outcome.accepted.astype(jnp.float32) + 1,
            time=self.memory * state.time + 1 + outcome.drafted.astype(jnp.float32) * self._step(),
        )


# By the names of the command line.
POLICIES: dict[str, type[Any]] = {
    "heuristic": Heuristic,
    "entropy": Entropy,
    "entropy_bound": EntropyBound,
    "confidence": Confidence,
    "renewal": Renewal,
}


def call_widths(gamma: int, none: bool) -> tuple[int, ...]:
    """Positions of the target calls that are compiled where drafts differ in length: 1 + 2^k up to γ + 1.

    A call is then at most about twice as wide as it need be, and few are compiled. With `none`, for drafters that may
    propose nothing at all, the call of plain decoding is one of them.
    """
    widths = {1 + 2**power for power in range(gamma.bit_length()) if 2**power < gamma}
    return tuple(sorted(widths | {gamma + 1} | ({1} if none else set())))
