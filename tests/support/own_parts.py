"""A drafter and a verifier from outside the package, made with public names only."""

import flax.struct
import jax.numpy as jnp

import specdec_jax as sd
from specdec_jax.drafters.drafting import draft_without_calls, point_mass
from specdec_jax.speculative.verifiers import correct, count_leading, leading_distribution


@flax.struct.dataclass
class RepeatDrafter(sd.Drafter):
    """Drafts the last token over and over."""

    def draft(self, draft_state, state, num_wanted):
        last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        tokens = jnp.broadcast_to(last, (len(last), state.config.gamma))
        return (), draft_without_calls(state, tokens, num_wanted, point_mass(state, tokens))


def verify_mirrored(target, draft, draft_tokens, num_drafted, randomness, settings):
    """Verifies by Algorithm 1 with 1 − u in place of u: as exact, with other tokens."""
    accepted = (1 - randomness.accept) * draft.prob(draft_tokens) <= leading_distribution(
        target
    ).prob(draft_tokens)
    num_accepted = count_leading(accepted, num_drafted)
    return correct(target, draft, num_accepted, num_drafted, randomness.final)


MIRRORED = sd.Verifier("mirrored", verify_mirrored)
