"""Calls a policy of γ, and checks what it returns while the program is traced."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specdec_jax.models import arguments
from specdec_jax.speculative.policies import Policy
from specdec_jax.speculative.policy_inputs import Outcome


def begin(policy: Policy, batch: int) -> Any:
    """Returns the policy's first state of `batch` rows."""

    def rows(value: Any):
        return jnp.broadcast_to(value, (batch,)) if jnp.ndim(value) == 0 else jnp.asarray(value)

    state = jax.tree.map(rows, policy.init())
    wrong = [leaf.shape for leaf in jax.tree.leaves(state) if leaf.shape[0] != batch]
    if wrong:
        raise ValueError(
            f"gamma: got shape {wrong[0]} from {_name(policy)}.init, "
            "expected one value for each row"
        )
    return state


def next_gamma(policy: Policy | None, state: Any, most: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns how many tokens each row wants to draft: `most`, or fewer by the policy."""
    if policy is None:
        return most
    wanted = policy.wanted(state)
    got = arguments.described(wanted)
    if got not in (f"int32[{len(most)}]", "int32[]"):
        raise ValueError(
            f"gamma: got {got} from {_name(policy)}.wanted, expected an integer for each row"
        )
    return jnp.minimum(most, wanted)


def next_state(policy: Policy, state: Any, outcome: Outcome) -> Any:
    """Returns the policy's state after an iteration."""
    after = policy.update(state, outcome)
    got, expected = arguments.described(after), arguments.described(state)
    if got != expected:
        raise ValueError(
            f"gamma: got {got} from {_name(policy)}.update, expected what init makes, {expected}"
        )
    return after


def _name(policy: Policy) -> str:
    return type(policy).__name__
