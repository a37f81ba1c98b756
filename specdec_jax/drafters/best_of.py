"""Two drafters of which each row uses the one that serves it better at the time."""

import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.drafters.cascade import (
    DrafterPair,
    any_part_property,
    check_behind,
    check_drafters,
    draft_part,
    join_drafts,
)
from specdec_jax.models import arguments
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState, Draft, Scored

# What a drafter without observations is taken to yield, in tokens per target step's time, and for
# how many target steps that counts. It is much, so that a drafter is tried, and again after a
# while; and it counts for little, so that one try is enough to see that it does not help.
_HOPED, _WEIGHT = 4.0, 0.25


class BestOfState(NamedTuple):
    """The state of a `BestOf`.

    Attributes:
      first, second: the states of the two drafters.
      tokens, time: `[B, 2]`, tokens that were committed after drafts of each, and the time that
        they took in target steps; older ones count less.
      chosen: `[B]`, 0 or 1, the drafter that drafted last.
      asked: `[B]`, whether a draft was wanted of it in the last iteration.
    """

    first: Any
    second: Any
    tokens: jax.Array
    time: jax.Array
    chosen: jax.Array
    asked: jax.Array


@jax.tree_util.register_pytree_node_class
class BestOf(DrafterPair):
    """A drafter that lets one of two draft, row by row and iteration by iteration.

    A row uses the drafter with more tokens per unit of time in its own past iterations. The other
    one takes over if it has at least `1 + margin` times as many. A model that no row uses is not
    called (but an `EagleDrafter` still reads what is committed). Later it must catch up, two tokens
    a call, so a change of drafters costs time. Old observations of an unused drafter lose weight,
    and it is tried again. The choice depends on earlier iterations alone and is made before either
    drafter draws, so the output distribution stays the target's. (A choice by the drafted tokens
    would change it.)

    Leviathan, Kalman and Matias (2023), section 6, propose such a change of drafters.
    """

    provides_probs: ClassVar[Any] = any_part_property("provides_probs")
    varies: ClassVar[Any] = any_part_property("varies")

    def __init__(
        self,
        first: Drafter,
        second: Drafter,
        costs: tuple[float, float] = (0.1, 0.1),
        margin: float = 0.1,
        memory: float = 0.95,
    ):
        """Joins two drafters.

        Args:
          first: the drafter that each row begins with.
          second: the other; not one that needs the target's states or cache, such as an
            `EagleDrafter`, an `EarlyExitDrafter` or a `HeadsDrafter`.
          costs: the time of a drafted token by either, over that of a target step.
          margin: by how much, as a share, the other must be better before it takes over.
          memory: factor by which the observations of an iteration are multiplied at each later one.

        Raises:
          ValueError: an argument of another kind or outside its range.
        """
        check_drafters(first=first, second=second)
        check_behind("second", second)
        self.parts = first, second
        expected = "two finite numbers of at least 0"
        values = arguments.check_numbers("costs", costs, expected)
        if values.shape != (2,) or not all(0 <= value < math.inf for value in values.tolist()):
            raise ValueError(f"costs: got {arguments.quote(costs)}, expected {expected}")
        margin = arguments.check_range("margin", margin, 0, 1)
        memory = arguments.check_range("memory", memory, 0, 1)
        self.settings = (*map(float, values), margin, memory)

    @property
    def name(self) -> str:
        first, second = self.parts
        return f"the better of {first.name} and {second.name}"

    def begin(self, method: str, *given: Any, **encoded: jax.Array) -> Any:
        first, second = super().begin(method, *given, **encoded)
        batch = len(given[2])
        zeros = jnp.zeros((batch, 2), jnp.float32)
        none = jnp.zeros(batch, jnp.int32)
        return BestOfState(first, second, zeros, zeros, none, none > 0)

    def draft(
        self, draft_state: BestOfState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[BestOfState, Draft]:
        margin = self.settings[2]
        rates = (draft_state.tokens + _HOPED * _WEIGHT) / (draft_state.time + _WEIGHT)
        own, other = (
            jnp.take_along_axis(rates, one[:, None], axis=1)[:, 0]
            for one in (draft_state.chosen, 1 - draft_state.chosen)
        )
        changes = other > (1 + margin) * own
        chosen = jnp.where(changes, 1 - draft_state.chosen, draft_state.chosen)
        (first, head), (second, tail) = (
            draft_part(part, own_state, state, jnp.where(chosen == number, num_wanted, 0))
            for number, (part, own_state) in enumerate(zip(self.parts, draft_state[:2]))
        )
        asked = num_wanted > 0
        after = draft_state._replace(first=first, second=second, chosen=chosen, asked=asked)
        return after, join_drafts(state, head, tail)

    def observe(self, draft_state: Any, state: DecodeState, scored: Scored) -> Any:
        *costs, _, memory = self.settings
        draft_state = super().observe(draft_state, state, scored)
        counts = (draft_state.asked & (scored.num_new > 0))[:, None]
        drew = counts & (draft_state.chosen[:, None] == jnp.arange(2))
        memory = jnp.where(draft_state.asked[:, None], memory, 1)
        new = scored.num_new[:, None].astype(jnp.float32)
        drafted = state.last_drafted[:, None].astype(jnp.float32)
        spent = 1 + drafted * jnp.asarray(costs, jnp.float32)
        return draft_state._replace(
            tokens=memory * draft_state.tokens + jnp.where(drew, new, 0),
            time=memory * draft_state.time + jnp.where(drew, spent, 0),
        )
