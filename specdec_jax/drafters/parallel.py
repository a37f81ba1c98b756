"""A model that drafts all γ tokens in one call (PARD, An et al. 2025, arXiv 2504.18583).

The idea is older: Spec-Drafter (Xia et al. 2022, arXiv 2203.16487) drafts a block with mask tokens,
PaSS (Monea et al. 2023, arXiv 2311.13581) with look-ahead tokens of the target itself.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.drafters.drafting import NetworkDrafter, draft_at_once, match_width
from specdec_jax.drafters.model import ModelDrafter, ModelDraftState
from specdec_jax.drafters.tree_levels import draft_tree_at_once
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.state import DecodeState, Draft


@jax.tree_util.register_pytree_node_class
class ParallelDrafter(NetworkDrafter):
    """A model that drafts γ tokens in one call: after the text it is fed γ − 1 mask tokens.

    The distributions of the γ tokens depend on the committed text alone, not on one another. The
    masks' keys and values are never kept: the next call writes over them. `TrainConfig.masks`
    trains such a model.

    Attributes:
      model: the drafting model; it must share the target's vocabulary.
      mask_token: the id that stands for a token that is not known yet; by default the model's start
        token, which a text has nowhere else.
    """

    static = ("mask_token",)
    provides_probs = drafts_at_once = True
    reads_encoder: ClassVar[Any] = property(lambda self: self.network.encoder_dim is not None)

    @isolated
    def __init__(self, model: LanguageModel, mask_token: int | None = None):
        """Makes the drafter.

        Raises:
          ValueError: something else than a model, or a mask token that it lacks.
        """
        arguments.check_model("model", model)
        self.model, self.network = model, model.network
        if mask_token is None:
            mask_token = model.start_token
        most = model.config.vocab_size - 1
        self.mask_token = arguments.check_integer("mask_token", mask_token, 0, most)

    @property
    def name(self) -> str:
        return f"{self.model.name}, in parallel"

    @property
    def encoders(self) -> tuple[Network, ...]:
        return (self.network,)

    def identity(self) -> tuple[list[Any], Any]:
        return [self.model.contents, self.mask_token], None

    init, rewind, pair_with = ModelDrafter.init, ModelDrafter.rewind, ModelDrafter.pair_with

    def draft(
        self, draft_state: ModelDraftState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[ModelDraftState, Draft]:
        logits, draft_state, calls = self._call(draft_state, state, num_wanted)
        draft = draft_at_once(state, num_wanted, logits)
        return draft_state, draft._replace(calls=calls)

    def draft_tree(
        self,
        draft_state: ModelDraftState,
        state: DecodeState,
        num_wanted: jax.Array,
        max_depth: jax.Array,
    ):
        depth = jnp.where(num_wanted > 0, max_depth, 0)
        logits, draft_state, calls = self._call(draft_state, state, depth)
        draft = draft_tree_at_once(state, num_wanted, max_depth, logits)
        return draft_state, draft._replace(calls=calls)

    def _call(
        self, draft_state: ModelDraftState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[jax.Array, ModelDraftState, jax.Array]:
        """Feeds the committed tokens that the cache lacks, then masks for all tokens but the next.

        Returns:
          Logits `[B, G, V]` of the G tokens after the committed ones, the new state, and the number
          of calls `[B]`.
        """
        gamma, slots = state.config.gamma, state.tokens.shape[1]
        last = state.lengths - 1
        active = num_wanted > 0

        def feed(cached: jax.Array, cache: Any, width: int, count: jax.Array):
            """Feeds tokens and masks from position `cached` on, `count` past the last token."""
            start = jnp.clip(cached, 0, slots - width)  # what is fed again gives the same keys
            places = start[:, None] + jnp.arange(width)
            fed = jnp.take_along_axis(state.tokens, places, axis=1)
            fed = jnp.where(places > last[:, None], self.mask_token, fed)
            valid = (places < (last + count)[:, None]) & active[:, None]
            states, cache = self.network.decode_states(fed, start, cache, valid=valid)
            return start, states, cache

        # After a whole draft γ + 1 tokens are new to the cache. Only a row that did not draft for a
        # while lacks more.
        def lacks_more(cached: jax.Array) -> jax.Array:
            return active & (last - cached > gamma)

        def catch_up(loop: tuple) -> tuple:
            cached, cache, calls = loop
            width = min(gamma + 1, slots)
            start, _, cache = feed(cached, cache, width, jnp.ones_like(last))
            now = jnp.where(active, jnp.minimum(start + width, last), cached)
            return now, cache, calls + lacks_more(cached).astype(jnp.int32)

        cached = jnp.minimum(draft_state.cached, last)
        loop = cached, draft_state.cache, jnp.zeros_like(last)
        loop = jax.lax.while_loop(lambda loop: jnp.any(lacks_more(loop[0])), catch_up, loop)
        cached, cache, calls = loop
        width = min(2 * gamma, slots)
        start, states, cache = feed(cached, cache, width, num_wanted)
        places = (last - start)[:, None] + jnp.arange(gamma)
        places = jnp.minimum(places, width - 1)[..., None]
        states = jnp.take_along_axis(states, places, axis=1)
        valid = jnp.arange(gamma) < num_wanted[:, None]
        logits = match_width(self.network.head(states, valid), state.config.vocab_size)
        cached = jnp.where(active, last + 1, cached)
        return logits, ModelDraftState(cache, cached), calls + active.astype(jnp.int32)
