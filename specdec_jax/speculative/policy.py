"""The interface of policies, which adapt γ, the number of tokens to draft, to each row.

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

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specdec_jax.models import arguments

MAX_GAMMA = 64
# A number, or an array of one number per input.
PerInput = Any


def number_field(default: float, least: float, most: float, below: bool = False):
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
    frozen dataclass. Its fields that are declared by `number_field` are traced, and hold an array
    `[B]` in the methods below; all other fields are static and hashable.

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
        arguments.keep_integer(self, "maximum", 1, MAX_GAMMA)
        for name, (least, most, below) in self.numbers().items():
            whole, given = self._whole(name), getattr(self, name)
            most = min(most, self.maximum) if name == "minimum" else most
            kind, end = "an integer" if whole else "a number", "below " if below else ""
            expected = f"{kind} from {least} to {end}{most}"
            value = arguments.check_numbers(name, given, expected, whole)
            if not np.all((value >= least) & (value < most if below else value <= most)):
                raise ValueError(f"{name}: got {arguments.quote(given)}, expected {expected}")

    @classmethod
    @functools.cache
    def numbers(cls) -> dict[str, tuple[float, float, bool]]:
        """Returns the ranges of the fields by `number_field`: least, most, whether below."""
        fields = {field.name: field.metadata for field in dataclasses.fields(cls)}
        return {name: data["range"] for name, data in fields.items() if "range" in data}

    @classmethod
    @functools.cache
    def _names(cls, traced: bool) -> tuple[str, ...]:
        return tuple(x.name for x in dataclasses.fields(cls) if bool(x.metadata) == traced)

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
            values[name] = np.full(batch, value)
        return self.with_numbers(**values)

    def with_numbers(self, **numbers: Any) -> Any:
        """Returns the policy with other traced values; checks nothing, which would take its time.

        Args:
          numbers: values by the names of fields.
        """
        policy = object.__new__(type(self))
        for name in self._names(traced=True) + self._names(traced=False):
            value = numbers[name] if name in numbers else getattr(self, name)
            object.__setattr__(policy, name, value)
        return policy

    def _register(self) -> None:
        """Makes a policy of a user's own a pytree, and checks that it can be one."""
        cls = type(self)
        if hasattr(cls, "_flax_dataclass"):  # all its fields would be traced, `maximum` too
            got = f"{cls.__name__}, a flax.struct.dataclass"
            raise ValueError(f"gamma: got {got}, expected a dataclasses.dataclass")
        if jax.tree_util.all_leaves([self]):
            jax.tree_util.register_pytree_node_class(cls)
        expected = "a hashable value (or numbers, by `number_field`)"
        for name in cls._names(traced=False):
            try:
                hash(getattr(self, name))
            except TypeError:
                got = arguments.quote(getattr(self, name))
                raise ValueError(f"{name}: got {got}, expected {expected}") from None

    def tree_flatten(self):
        names = self._names(traced=True), self._names(traced=False)
        return tuple(tuple(getattr(self, name) for name in group) for group in names)

    @classmethod
    def tree_unflatten(cls, static: Any, values: Any):
        policy = object.__new__(cls)  # unchecked: inside jit the numbers are traced
        names = cls._names(traced=False) + cls._names(traced=True)
        for name, value in zip(names, (*static, *values), strict=True):
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

    def goes_on(self, state: Any, seen: DraftSignals) -> Bool[Array, "B G"]:
        """Returns after which drafted tokens their draft, or their path of a tree, may go on."""
        return jnp.ones_like(seen.prob, bool)

    def limit(self, state: Any, step: Int[Array, ""], seen: DraftSignals) -> Int[Array, " B"]:
        """Returns how long a draft may become, now that the token at offset `step` was drawn."""
        goes_on = self.goes_on(state, seen)
        goes_on = jax.lax.dynamic_index_in_dim(goes_on, step, axis=1, keepdims=False)
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


def choose_gamma(policy: Policy | None, state: Any, most: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns how many tokens each row wants to draft: `most`, or fewer by the policy."""
    if policy is None:
        return most
    wanted = policy.wanted(state)
    got = arguments.describe(wanted)
    if got not in (f"int32[{len(most)}]", "int32[]"):
        _raise(policy, "wanted", got, "an integer for each row")
    return jnp.clip(wanted, 0, most)  # a draft of fewer than no tokens would not be verified right


def limit_rows(
    policy: Policy, state: Any, steps: Int[Array, " B"], seen: DraftSignals
) -> Int[Array, " B"]:
    """Returns `Policy.limit` for rows that are each at a step of their own."""

    alone = jax.tree.map(lambda x: x[:, None], (policy, state, seen))
    limits = jax.vmap(lambda step, row: row[0].limit(row[1], step, row[2]))(steps, alone)
    return limits[:, 0]


def update_policy(policy: Policy, state: Any, outcome: Outcome) -> Any:
    """Returns the policy's state after an iteration."""
    after = policy.update(state, outcome)
    got, expected = arguments.describe(after), arguments.describe(state)
    if got != expected:
        _raise(policy, "update", got, f"what init makes, {expected}")
    return after


def _raise(policy: Policy, method: str, got: str, expected: str) -> NoReturn:
    raise ValueError(f"gamma: got {got} from {type(policy).__name__}.{method}, expected {expected}")
