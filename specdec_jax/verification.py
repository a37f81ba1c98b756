"""Verifiers: how many drafted tokens stand, and which token follows them. Pure functions.

Convention: p is the target's law (`target`), q the drafter's (`draft`); γ = G drafted positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.sampling import Law, draw


class Verification(NamedTuple):
    """Outcome of one iteration.

    Attributes:
      num_accepted: `[B]` int32, drafted tokens that stand, at most `num_drafted`.
      next_token: `[B]` int32, the token after them: the correction at a rejection, else the bonus token.
    """

    num_accepted: jax.Array
    next_token: jax.Array


def _leading(accepted: jax.Array, num_drafted: jax.Array) -> jax.Array:
    """Number of leading True of `accepted [B, G]`, at most `num_drafted [B]`."""
    inside = jnp.arange(accepted.shape[1]) < num_drafted[:, None]
    return jnp.sum(jnp.cumprod((accepted & inside).astype(jnp.int32), axis=1), axis=1)


def verify_greedy(target_tokens: jax.Array, draft_tokens: jax.Array, num_drafted: jax.Array) -> Verification:
    """T = 0: both laws are one-hot, so a drafted token stands iff it is the target's argmax (section 2.2).

    Args:
      target_tokens: `[B, G + 1]` argmax of the target at each position.
      draft_tokens: `[B, G]`.
      num_drafted: `[B]`, drafted tokens of each row (at most G).
    """
    num_accepted = _leading(target_tokens[:, :-1] == draft_tokens, num_drafted)
    return Verification(num_accepted, jnp.take_along_axis(target_tokens, num_accepted[:, None], axis=1)[:, 0])


def verify_tokens(
    target: Law,
    draft: Law,
    draft_tokens: jax.Array,
    num_drafted: jax.Array,
    accept_uniforms: jax.Array,
    final_uniforms: jax.Array,
) -> Verification:
    """Algorithm 1 of Leviathan et al. 2023 (section 2.3).

    Drafted token x_i stands while u_i < p_i(x_i) / q_i(x_i), strictly, so that a token with p = 0 never stands. At the
    first rejection the next token is drawn from norm(max(0, p − q)); if all stand, from p at the next position.

    Args:
      target: law over `[B, G + 1, V]`.
      draft: law over `[B, G, V]` from which `draft_tokens` were really drawn.
      draft_tokens: `[B, G]`.
      num_drafted: `[B]`, drafted tokens of each row (at most G).
      accept_uniforms: `[B, G]` in [0, 1).
      final_uniforms: `[B, G + 1]` in [0, 1), the n-th for the token that follows n accepted ones (residual or bonus).
    """
    gamma = draft_tokens.shape[1]
    target_probs = Law(target.logits[:, :gamma], target.log_normalizer[:, :gamma]).prob(draft_tokens)
    accepted = accept_uniforms * draft.prob(draft_tokens) < target_probs
    num_accepted = _leading(accepted, num_drafted)
    weights = target.row(num_accepted)
    if gamma:
        rejected = (num_accepted < num_drafted)[:, None]
        draft_probs = draft.row(jnp.minimum(num_accepted, gamma - 1))
        residual = jnp.maximum(weights - jnp.where(rejected, draft_probs, 0), 0)
        # p ≡ q up to rounding leaves no residual mass: then p itself is right.
        weights = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, weights)
    uniform = jnp.take_along_axis(final_uniforms, num_accepted[:, None], axis=1)[:, 0]
    return Verification(num_accepted, draw(weights, uniform))
