"""A smaller model of the same vocabulary as drafter (Leviathan et al. 2023, section 2.3)."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.drafters.drawing import draft_tokens, draw_adjusted, empty_law, match_width
from specdec_jax.models.base import LanguageModel
from specdec_jax.speculative import DecodeState, Draft


@flax.struct.dataclass
class ModelDraftState:
    """A model drafter's state between iterations.

    Attributes:
      cache: the drafter's own decoder cache.
      cached: `[B]` int32, leading slots that hold keys and values of committed or, as far as they stand, drafted tokens.
    """

    cache: Any
    cached: jax.Array


@jax.tree_util.register_pytree_node_class
class ModelDrafter:
    """Drafts γ tokens one after another with `model`, under the same processors as the target.

    Attributes:
      model: the drafter's model; must share the target's vocabulary (its logits may be narrower or wider).
    """

    def __init__(self, model: LanguageModel):
        self.model = model
        self.network = model.network

    def tree_flatten(self):
        return (self.network,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        drafter = object.__new__(cls)  # inside jit only the network is there
        (drafter.network,) = children
        return drafter

    @property
    def name(self) -> str:
        return self.model.name

    def init(self, inputs, input_lengths, tokens, slots: int) -> ModelDraftState:
        batch, prefix = tokens.shape
        cache = self.network.prefill(inputs, input_lengths, slots, batch // inputs.shape[0])
        if prefix > 1:
            _, cache = self.network.decode(tokens[:, :-1], jnp.zeros(batch, jnp.int32), cache)
        # A row whose prefix is shorter has junk past its own last token; `draft` takes the smaller of the two.
        return ModelDraftState(cache, jnp.full(batch, prefix - 1, jnp.int32))

    def rewind(self, draft_state: ModelDraftState, lengths: jax.Array) -> ModelDraftState:
        return ModelDraftState(draft_state.cache, jnp.minimum(draft_state.cached, lengths - 1))

    def draft(self, draft_state: ModelDraftState, state: DecodeState, num_wanted) -> tuple[ModelDraftState, Draft]:
        """Drafts with a loop of single steps, preceded by one for each token that the slowest row must catch up.

        After a full acceptance the last drafted token was drawn but never fed. Starting the loop a position early
        costs a step in those iterations only; the other rows feed the same token to the same slot again.
        """
        last, vocab_size = state.lengths - 1, state.program.vocab_size
        lag = jnp.where(num_wanted > 0, last - jnp.minimum(draft_state.cached, last), 0)

        def choose(step, tokens, carry):
            cache, law = carry
            position = jnp.maximum(last + step, 0)
            fed = jnp.take_along_axis(tokens, position[:, None], axis=1)
            logits, cache = self.network.decode(fed, position, cache)
            drawn, law = draw_adjusted(state, match_width(logits, vocab_size), tokens, step, law)
            return drawn, (cache, law)

        carry = draft_state.cache, empty_law(state)
        tokens, num_drafted, (cache, law) = draft_tokens(state, num_wanted, choose, carry, jnp.max(lag))
        draft = Draft(
            tokens=tokens,
            num_drafted=num_drafted,
            law=law,
            calls=jnp.where(num_wanted > 0, num_drafted + lag, 0),
        )
        # A row that only watched has cached nothing new; its prefix's padding is no longer hidden by `last`.
        cached = jnp.where(num_wanted > 0, last + num_drafted, jnp.minimum(draft_state.cached, last))
        return ModelDraftState(cache, cached), draft
