"""The policy of `gamma="auto"`: weighs measured costs against each row's acceptance.

It may draft nothing. A row's γ depends on its own past and on numbers that were fixed before it
began, never on other rows: so its draws do not depend on which rows it is decoded with.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.speculative.policies import call_widths
from specdec_jax.speculative.policy import Outcome, PerInput, Policy, number_field

# G of `gamma="auto"`.
MAXIMUM = 8
# Tokens that a row which has stopped drafting drafts now and then, to find out whether drafting
# would pay by now.
PROBE = 2
# The share of time that such tries may take before the first that fails; each one that fails halves
# it.
_SHARE = 0.01


class AutoState(NamedTuple):
    """The state that `Auto` keeps of each row.

    Attributes:
      examined, accepted: how many drafted tokens were examined, and how many of them were accepted;
        older ones count less.
      idle: iterations since the row last drafted.
      wait: how many iterations a row that has stopped drafting waits before it tries again.
    """

    examined: Float[Array, " B"]
    accepted: Float[Array, " B"]
    idle: Float[Array, " B"]
    wait: Float[Array, " B"]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Auto(Policy):
    """A policy that drafts the γ with the most expected tokens per time, which may be 0.

    That is (1 + β + … + β^γ) / cost(γ), where β = α̂ · (1 − `ending`): what was drafted after a
    row's last token is in vain. α̂ is the row's acceptance rate so far, in which the assumed rate
    `acceptance` counts for `weight` tokens. A row that drafts nothing learns nothing; it tries
    `PROBE` tokens at its beginning, and then so seldom that all tries together take less than 1 %
    of its time: each one that fails doubles the number of iterations until the next.

    The defaults come from simulations of rows of 64 tokens with α from 0 to 0.9, with target calls
    that take up to 1.4 times as long at 5 positions as at one and 1.7 times at 9, and with draft
    steps of up to 0.2 of a target step. There a row took at most 1.03 times as long as plain
    decoding, and 1.05 times as long as the best fixed γ.

    Attributes:
      maximum: G.
      costs: G + 1 numbers: the time of an iteration that drafts 0, 1, … G tokens, in any unit.
      acceptance: acceptance rate that is assumed at first.
      weight: how many tokens that assumption counts for.
      memory: factor by which the observations of an iteration are multiplied at each later one that
        drafts.
      ending: the probability that a token ends its row by itself, as an EOS does.
      look: the part of the first wait that has passed when a row begins; with 1 the row may try at
        once.
    """

    maximum: int = MAXIMUM
    costs: Any = dataclasses.field(
        default=(1.0, *(1 + 0.1 * gamma for gamma in range(1, MAXIMUM + 1))),
        metadata={"traced": True},
    )
    acceptance: PerInput = number_field(0.68, 0, 1)
    weight: PerInput = number_field(1.7, 1e-6, 1e6)
    memory: PerInput = number_field(0.99, 0, 1)
    ending: PerInput = number_field(0.0, 0, 1)
    look: PerInput = number_field(1.0, 0, 1)
    counts_nodes: ClassVar[bool] = False  # the costs are those of iterations with a chain

    def __post_init__(self):
        super().__post_init__()
        try:
            costs = np.asarray(self.costs, np.float32)
        except (ValueError, TypeError):
            costs = np.empty(0)
        if costs.shape != (self.maximum + 1,) or not np.all((costs > 0) & (costs <= 1e6)):
            expected = f"{self.maximum + 1} numbers above 0, up to 1e6"
            raise ValueError(f"costs: got {self.costs!r}, expected {expected}")

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of positions for which target calls are compiled.

        They are those of other policies but for 2, to save one compilation.
        """
        widths = call_widths(self.maximum, none=True)
        return tuple(width for width in widths if width != 2 or self.maximum == 1)

    def rows(self, batch: int) -> "Auto":
        costs = np.full((batch, self.maximum + 1), self.costs, np.float32)
        return super().rows(batch).with_numbers(costs=costs)

    def _first_wait(self) -> Float[Array, " B"]:
        added = self.costs[:, min(PROBE, self.maximum)] / self.costs[:, 0] - 1
        return jnp.maximum(added / _SHARE, 2 * PROBE)

    def init(self) -> AutoState:
        zeros, wait = jnp.zeros(len(self.weight), jnp.float32), self._first_wait()
        return AutoState(zeros, zeros, self.look * wait, wait)

    def _best(self, state: AutoState) -> Int[Array, " B"]:
        """Returns the γ with the most expected tokens per time."""
        rate = (state.accepted + self.weight * self.acceptance) / (state.examined + self.weight)
        going_on = rate * (1 - self.ending)
        gammas = jnp.arange(self.maximum + 1, dtype=jnp.float32)
        tokens = jnp.cumsum(going_on[:, None] ** gammas, axis=1)
        return jnp.argmax(tokens / self.costs, axis=1).astype(jnp.int32)

    def wanted(self, state: AutoState) -> Int[Array, " B"]:
        best = self._best(state)
        return jnp.where((best == 0) & (state.idle >= state.wait), min(PROBE, self.maximum), best)

    def update(self, state: AutoState, outcome: Outcome) -> AutoState:
        drew, accepted = outcome.drafted > 0, outcome.accepted
        examined = jnp.minimum(accepted + 1, outcome.drafted)

        def add(old: jax.Array, new: jax.Array):
            return jnp.where(drew, self.memory * old + new.astype(jnp.float32), old)

        again = jnp.where(accepted > 0, self._first_wait(), 2 * state.wait)
        return AutoState(
            examined=add(state.examined, examined),
            accepted=add(state.accepted, accepted),
            idle=jnp.where(drew, 0, state.idle + 1),
            wait=jnp.where(drew & (self._best(state) == 0), again, state.wait),
        )
