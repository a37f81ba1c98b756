"""Policies that adapt γ, the number of tokens to draft, to each row while it decodes.

No policy changes the output distribution. An iteration preserves the target's distribution whatever
γ is, if γ was known before the iteration's draws; these draws are independent of all earlier ones,
and so of whatever `wanted` has learned from them. An end within a draft (`limit`) depends on the
tokens drawn so far and on the distributions they came from: it is a stopping time of the draft, so
that for every verifier such a draft is like one that was to have this length anyway. It would be
biased to drop a token after a look at it: the token that ends a draft stays in it.

With a token tree γ counts nodes, and every path is a draft that may end by itself (`goes_on`):
whether a node gets children depends on the tokens up to it, and never on these children or on other
paths.

A policy is a pytree of pure functions: its numbers are traced, one or one per input, so that
changing them never recompiles; `maximum` (G) and the kind of policy are static.
"""

import copy
import dataclasses
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.models import arguments

MAX_GAMMA = 64
# A number, or an array of one number per input.
PerInput = Any


def number(default: float, least: float, most: float, below: bool = False):
    """Declares a field of a policy: one number, or one per input, from `least` to `most`.

    With `below` it must be below `most`. It is an integer where `default` is one. Other values
    compile nothing anew.
    """
    return dataclasses.field(default=default, metadata={"range": (least, most, below)})


class DraftSignals(NamedTuple):
    """The numbers that policies read of a draft's distributions.

    They are arbitrary at positions that were not drafted. The distributions q are those drawn from,
    after processors, temperature and filters. A row at temperature 0, where they would be one-hot,
    gives the numbers at temperature 1. Of a tree they are by number of the node, from node 1 on.

    Attributes:
      prob: q(x) of the drafted tokens; in a tree the product of it along a node's path.
      entropy: H(q) in nats.
      evenness: H(q) / log V; 1 for a uniform distribution.
    """

    prob: Float[Array, "B G"]
    entropy: Float[Array, "B G"]
    evenness: Float[Array, "B G"]


class NodeOutcomes(NamedTuple):
    """What an iteration showed of the N nodes of a tree.

    Attributes:
      depths: of the nodes that were drafted; 0 for the others, and for node 0.
      ranks: places of the nodes among their siblings.
      examined: whether the parent is accepted and no earlier sibling is.
      accepted: whether the node is accepted.
    """

    depths: Int[Array, "B N"]
    ranks: Int[Array, "B N"]
    examined: Bool[Array, "B N"]
    accepted: Bool[Array, "B N"]


class Outcome(NamedTuple):
    """The outcome of an iteration.

    Attributes:
      drafted, accepted: how many tokens were drafted, and how many of them were accepted. Of a
        tree: at how many depths of its path children were verified, and at how many one was
        accepted; they are equal if the path ends at a leaf.
      seen: what was read of the distributions.
      node_outcomes: of a tree, its nodes.
    """

    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    seen: DraftSignals | None
    node_outcomes: NodeOutcomes | None = None


@dataclasses.dataclass(frozen=True)
class Policy:
    """The base class of policies.

    A policy's `state` holds what it keeps for each row, `[B]` or `[B, G]` arrays. A policy is a
    frozen dataclass. Its fields that are declared by `number` are traced, and hold an array `[B]`
    where the methods that follow are called; all other fields are static and hashable.

    Attributes:
      maximum: G, the most tokens, or nodes of a tree, drafted in one iteration; static.
      needs_probs: whether the policy needs the distributions that drafts come from, which not every
        drafter has.
      counts_nodes: whether γ may be the number of a tree's nodes.
    """

    maximum: int = 8
    needs_probs: ClassVar[bool] = False
    counts_nodes: ClassVar[bool] = True

    def __post_init__(self):
        arguments.check_integer("maximum", self.maximum, 1, MAX_GAMMA)
        for name, (least, most, below) in self.numbers().items():
            whole, given = self._whole(name), getattr(self, name)
            most = min(most, self.maximum) if name == "minimum" else most
            kind, end = "an integer" if whole else "a number", "below " if below else ""
            expected = f"{kind} from {least} to {end}{most}"
            value = arguments.check_numbers(name, given, expected, whole)
            if not np.all((value >= least) & (value < most if below else value <= most)):
                raise ValueError(f"{name}: got {arguments.quoted(given)}, expected {expected}")

    @classmethod
    def numbers(cls) -> dict[str, tuple[float, float, bool]]:
        """Returns the ranges of the fields that `number` declares: least, most, whether below."""
        return {
            field.name: field.metadata["range"]
            for field in dataclasses.fields(cls)
            if "range" in field.metadata
        }

    @classmethod
    def _static(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls) if not field.metadata)

    @classmethod
    def _whole(cls, name: str) -> bool:
        return isinstance(getattr(cls, name), int)

    def rows(self, batch: int) -> Any:
        """Returns the policy with one number in each field for each of `batch` inputs.

        Raises:
          ValueError: a field has neither one value nor `batch` values, or a static one no hash.
        """
        self._register()
        values = {}
        for name in self.numbers():
            value = np.asarray(getattr(self, name), np.int32 if self._whole(name) else np.float32)
            if value.ndim and value.shape != (batch,):
                expected = f"one or {batch} (one per input)"
                raise ValueError(f"{name}: got {value.size} values, expected {expected}")
            values[name] = np.broadcast_to(value, (batch,))
        # Not by its constructor, which would check all fields again for every request.
        policy = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(policy, name, value)
        return policy

    def _register(self) -> None:
        """Makes a policy of a user's own a pytree, and checks that it can be one."""
        cls = type(self)
        if hasattr(cls, "_flax_dataclass"):  # all its fields would be traced, `maximum` too
            raise ValueError(
                f"gamma: got {cls.__name__}, a flax.struct.dataclass, "
                "expected a dataclasses.dataclass"
            )
        if jax.tree_util.all_leaves([self]):
            jax.tree_util.register_pytree_node_class(cls)
        for name in cls._static():
            try:
                hash(getattr(self, name))
            except TypeError:
                got = arguments.quoted(getattr(self, name))
                raise ValueError(
                    f"{name}: got {got}, expected a hashable value (or numbers, by `number`)"
                ) from None

    def tree_flatten(self):
        return tuple(getattr(self, name) for name in self.numbers()), tuple(
            getattr(self, name) for name in self._static()
        )

    @classmethod
    def tree_unflatten(cls, static: Any, values: Any):
        policy = object.__new__(cls)  # unchecked: inside jit the numbers are traced
        for name, value in zip((*cls._static(), *cls.numbers()), (*static, *values), strict=True):
            object.__setattr__(policy, name, value)
        return policy

    def init(self) -> Any:
        """Returns the state that rows begin with; traced. A single number stands for every row."""
        return ()

    def wanted(self, state: Any) -> Int[Array, " B"] | int:
        """Returns the most tokens to draft in the next iteration."""
        return self.maximum

    # The next three methods are called only if the policy reads distributions.

    def budget(self, state: Any, seen: DraftSignals) -> Int[Array, " B"] | int:
        """Returns the most tokens to draft, by the draft's first distribution."""
        return self.maximum

    def goes_on(self, seen: DraftSignals) -> Bool[Array, "B G"]:
        """Returns after which drafted tokens their draft, or their path of a tree, may go on."""
        return jnp.ones_like(seen.prob, bool)

    def limit(self, state: Any, step: Int[Array, ""], seen: DraftSignals) -> Int[Array, " B"]:
        """Returns how long a draft may become, now that the token at offset `step` was drawn."""
        goes_on = jax.lax.dynamic_index_in_dim(self.goes_on(seen), step, axis=1, keepdims=False)
        most = jnp.where(step == 0, self.budget(state, seen), self.maximum)
        return jnp.where(goes_on, most, step + 1)

    def update(self, state: Any, outcome: Outcome) -> Any:
        """Returns the state after an iteration."""
        return state


# These three check, while the program is traced, what a policy returns.


def init_policy(policy: Policy, batch: int) -> Any:
    """Returns the policy's first state of `batch` rows."""
    state = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (batch,)) if jnp.ndim(x) == 0 else jnp.asarray(x),
        policy.init(),
    )
    for leaf in jax.tree.leaves(state):
        if leaf.shape[0] != batch:
            _raise(policy, "init", f"shape {leaf.shape}", "one value for each row")
    return state


def next_gamma(policy: Policy | None, state: Any, most: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns how many tokens each row wants to draft: `most`, or fewer by the policy."""
    if policy is None:
        return most
    wanted = policy.wanted(state)
    got = arguments.described(wanted)
    if got not in (f"int32[{len(most)}]", "int32[]"):
        _raise(policy, "wanted", got, "an integer for each row")
    return jnp.minimum(most, wanted)


def next_state(policy: Policy, state: Any, outcome: Outcome) -> Any:
    """Returns the policy's state after an iteration."""
    after = policy.update(state, outcome)
    got, expected = arguments.described(after), arguments.described(state)
    if got != expected:
        _raise(policy, "update", got, f"what init makes, {expected}")
    return after


def _raise(policy: Policy, method: str, got: str, expected: str) -> NoReturn:
    raise ValueError(f"gamma: got {got} from {type(policy).__name__}.{method}, expected {expected}")


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

    maximum: int = 8
    minimum: PerInput = number(1, 1, MAX_GAMMA)
    smoothing: PerInput = number(0.0, 0, 1, below=True)
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

    maximum: int = 8
    scale: PerInput = number(0.2, 0, 1e6)
    threshold: PerInput = number(0.4, 0, 1)
    needs_probs: ClassVar[bool] = True

    def goes_on(self, seen: DraftSignals) -> Bool[Array, "B G"]:
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

    maximum: int = 8
    threshold: PerInput = number(0.4, 0, 1)
    needs_probs: ClassVar[bool] = True

    def goes_on(self, seen: DraftSignals) -> Bool[Array, "B G"]:
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

    maximum: int = 8
    minimum: PerInput = number(1, 1, MAX_GAMMA)
    cost_ratio: PerInput = number(0.1, 0, 1e6)
    verify_cost: PerInput = number(1.0, 1e-6, 1e6)
    acceptance: PerInput = number(0.7, 0, 1)
    weight: PerInput = number(4.0, 1e-6, 1e6)
    memory: PerInput = number(0.9, 0, 1)

    def _step(self) -> Float[Array, " B"]:
        """Returns c + δ, the time to draft and verify one more token, in units of a target step."""
        return self.cost_ratio + (self.verify_cost - 1) / self.maximum

    def init(self) -> CostAwareState:
        positions = jnp.zeros((len(self.weight), self.maximum), jnp.float32)
        gammas = jnp.arange(self.maximum + 1, dtype=jnp.float32)
        tokens = jnp.cumsum(self.acceptance[:, None] ** gammas, axis=1)
        rate = jnp.max(tokens / (1 + gammas * self._step()[:, None]), axis=1)
        return CostAwareState(positions, positions, rate * self.weight, jnp.asarray(self.weight))

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
        return CostAwareState(
            examined=memory * state.examined
            + (index < jnp.minimum(accepted + 1, drafted)).astype(jnp.float32),
            accepted=memory * state.accepted + (index < accepted).astype(jnp.float32),
            tokens=self.memory * state.tokens + outcome.accepted.astype(jnp.float32) + 1,
            time=self.memory * state.time + 1 + outcome.drafted.astype(jnp.float32) * self._step(),
        )


# Policies by their names on the command line.
POLICIES: dict[str, type[Any]] = {
    "heuristic": Heuristic,
    "entropy": Entropy,
    "entropy_bound": EntropyBound,
    "confidence": Confidence,
    "cost_aware": CostAware,
}


def call_widths(gamma: int, none: bool) -> tuple[int, ...]:
    """Returns the widths of target calls that are compiled where drafts differ in length.

    They are 1 + 2^k up to γ + 1, so that few calls are compiled and none is more than about twice
    as wide as needed. With `none`, for drafters that may propose nothing, 1 is one of them, the
    width of plain decoding.
    """
    widths = {1 + 2**power for power in range(gamma.bit_length()) if 2**power < gamma}
    return tuple(sorted(widths | {gamma + 1} | ({1} if none else set())))
