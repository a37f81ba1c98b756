"""`FullDrafter`, which times a drafter as if it always drafted as much as was asked for."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState, Draft, Scored


@jax.tree_util.register_pytree_node_class
class FullDrafter(Drafter):
    """A drafter whose drafts are always as long as was asked for, whatever their tokens.

    Only for timing, where a drafter that finds nothing to propose would not be timed at all.

    Attributes:
      drafter: the drafter that does the work.
    """

    def __init__(self, drafter: Drafter):
        self.drafter = drafter

    observes: ClassVar[Any] = property(lambda self: self.drafter.observes)

    @property
    def name(self) -> str:
        return self.drafter.name

    def check(self, target: LanguageModel) -> None:
        self.drafter.check(target)

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> Any:
        return self.drafter.init(inputs, input_lengths, tokens, slots)

    def draft(
        self, draft_state: Any, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[Any, Draft]:
        draft_state, draft = self.drafter.draft(draft_state, state, num_wanted)
        return draft_state, draft._replace(
            num_drafted=num_wanted, tokens=jnp.maximum(draft.tokens, 0)
        )

    def observe(self, draft_state: Any, state: DecodeState, scored: Scored) -> Any:
        return self.drafter.observe(draft_state, state, scored)

    def tree_flatten(self):
        return (self.drafter,), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any):
        return cls(*parts)
