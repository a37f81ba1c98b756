"""Drafts random tokens: the worst drafter there is, to test with and to compare with."""

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.drafters.drafting import (
    Step,
    draft_tokens,
    draft_without_calls,
    draw,
    empty_distribution,
    match_width,
)
from specdec_jax.models import arguments
from specdec_jax.speculative import distributions
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState, Draft, make_prefixes


@flax.struct.dataclass
class RandomDrafter(Drafter):
    """A drafter of uniformly random tokens, to compare others with.

    It draws from a uniform distribution at every temperature, 0 included; ids that processors
    forbid are not drafted. (Leviathan et al. 2023, section 3.6.)

    Attributes:
      vocab_size: ids are drawn from 0 … vocab_size − 1; those that the target lacks are left out.
    """

    draws: ClassVar[bool] = False

    vocab_size: int = flax.struct.field(pytree_node=False)

    def __post_init__(self):
        arguments.keep_integer(self, "vocab_size", 1, 2**31 - 1)

    @property
    def name(self) -> str:
        return "random tokens"

    def draft(
        self, draft_state: tuple, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[tuple, Draft]:
        config = state.config
        logits = jnp.zeros((len(state.lengths), 1, self.vocab_size))
        uniform = match_width(logits, config.vocab_size)

        def choose(step: Step, tokens: jax.Array, dist: Categorical | None):
            # No temperature and no filters: a uniform distribution stays as it is under them,
            # except under argmax.
            prefixes = make_prefixes(state, tokens, step)
            logits = distributions.process(uniform, prefixes, state.sampling, config.mode)
            return draw(state, Categorical.from_logits(logits), step, dist)

        empty = empty_distribution(state)
        tokens, num_drafted, dist = draft_tokens(state, num_wanted, choose, empty)
        return (), draft_without_calls(state, tokens, num_drafted, dist)
