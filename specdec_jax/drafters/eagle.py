"""A drafting model that reads the target's last states (EAGLE for models with an encoder).

Li et al. 2024 (arXiv 2401.15077). The pair of a token and the target's state before it takes the
place of the token as the model's input.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.backends.tree_positions import WindowNodes
from specdec_jax.checkpoints import converter, loader, native_format, stored_tensor
from specdec_jax.drafters.drafting import (
    NetworkDrafter,
    Recorded,
    Step,
    draft_tokens,
    match_width,
)
from specdec_jax.drafters.model import choose_next
from specdec_jax.drafters.tree_levels import Level, draft_from_states
from specdec_jax.files import places
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments, heads, parameters
from specdec_jax.models.eagle import EagleConfig, EagleNetwork, StateProjections
from specdec_jax.models.family import check_uses_backend
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import check_model
from specdec_jax.speculative.prefill import fill_cache
from specdec_jax.speculative.state import DecodeState, Draft, Scored
from specdec_jax.speculative.verifiers import pick


class EagleState(NamedTuple):
    """An EAGLE drafter's state between iterations.

    Attributes:
      cache: the drafting model's cache, which has all committed tokens.
      own: `[B, 1, d]`, the model's last state at each row's last committed token.
    """

    cache: Any
    own: jax.Array


@jax.tree_util.register_pytree_node_class
class EagleDrafter(NetworkDrafter):
    """A drafting model that is fed each token x_t with the target's state s_{t−1} before it.

    Its input at position t is emb(x_t) + W s_{t−1}: s_{t−1} is the last state of the target, from
    which x_t was predicted, and 0 for the first token. The target has no state before a token that
    was drafted: U h_{t−1} takes its place, h being the model's own last state. After a call of the
    target the committed pairs are fed, at most γ + 1 in one call, and overwrite what was drafted;
    a draft of γ tokens then takes γ − 1 single steps. With W = U = 0 the drafts are those of
    `ModelDrafter(model)`.

    Attributes:
      model: the drafting model.
      network: its network and the projections W and U.
      fingerprint: fingerprint of the target whose states it reads.
    """

    provides_probs = True
    needs_target_state = True
    reads_states = True
    reads_encoder: ClassVar[Any] = property(lambda self: self.network.model.encoder_dim is not None)

    @isolated
    def __init__(self, model: LanguageModel, target: LanguageModel, params: dict):
        """Joins a drafting model and the projections of states.

        Args:
          model: the drafting model; must share the target's vocabulary.
          target: the target; no other can be drafted for.
          params: the projections, as from `models.eagle.init_projections`.

        Raises:
          ValueError: a model of another kind, or projections of another shape.
        """
        arguments.check_model("model", model)
        arguments.check_model("target", target)
        arguments.check_kind("params", params, Mapping, "nested dictionaries of arrays")
        check_uses_backend(model.config, "a drafter that reads the target's states")
        config = EagleConfig(target.config.emb_dim, model.config.emb_dim, model.config.dtype)
        got = {name: np.shape(leaf) for name, leaf in parameters.flatten(params).items()}
        if got != config.parameter_shapes:
            raise ValueError(f"params: got {got}, expected {config.parameter_shapes}")
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, config.dtype), params)
        self.model, self.fingerprint = model, target.fingerprint
        self.network = EagleNetwork(
            heads.pack(params, config.dtype), model.network, StateProjections(config)
        )

    @classmethod
    @isolated
    def load(
        cls, path: str | os.PathLike[str], target: LanguageModel, model: LanguageModel | None = None
    ) -> "EagleDrafter":
        """Returns the drafter that `save` wrote, for `target`.

        Args:
          path: the folder.
          target: the target.
          model: the drafting model in the folder, loaded already; None: load it.

        Raises:
          ValueError: no folder of such a drafter, a damaged one, or one for another target.
        """
        arguments.check_path("path", path)
        arguments.check_model("target", target)
        folder = places.make_path(path)
        config, fingerprint, stored = native_format.open_part(folder, "eagle", EagleConfig)
        stored_tensor.check_shapes(stored, config.parameter_shapes, path, "of these projections")
        if config.target_dim != target.config.emb_dim:
            got = f"one that reads states of {config.target_dim} numbers"
            raise mismatch_error(path, got, f"the target's emb_dim, {target.config.emb_dim}")
        model = loader.load(folder / "model", target.config.dtype) if model is None else model
        params = {name: leaf.load(jnp.dtype("float32")) for name, leaf in stored.items()}
        drafter = cls(model, target, parameters.unflatten(params))
        drafter.fingerprint = fingerprint
        try:
            drafter.check(target)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return drafter

    @isolated
    def save(self, path: str | os.PathLike[str], dtype: Any = None) -> None:
        """Writes a folder that `load` reads; `dtype` is that of the model, as for `sd.save`."""
        config = self.network.module.config
        params = jax.tree.map(np.asarray, heads.unpack(self.network.params))
        folder = places.make_path(path).absolute()
        with native_format.write_part(folder, "eagle", config, self.fingerprint, params) as inside:
            converter.save(self.model, inside / "model", dtype)

    @property
    def name(self) -> str:
        return f"{self.model.name} with the target's states"

    @property
    def encoders(self) -> tuple[Network, ...]:
        return (self.network.model,)

    def steps(self) -> dict[str, Network]:
        return {"draft step": self.network.model}

    def identity(self) -> tuple[list[Any], Any]:
        return [self.model.contents, self.fingerprint], heads.unpack(self.network.params)

    def check(self, target: LanguageModel) -> None:
        check_model(target, self.model)
        if self.fingerprint != target.fingerprint:
            raise ValueError(
                "drafter: got one that reads the states of a target with other weights, expected"
                " one that was trained on this target"
            )

    # Traced.

    def init(
        self,
        inputs: jax.Array,
        input_lengths: jax.Array,
        tokens: jax.Array,
        slots: int,
        **encoded: jax.Array,
    ) -> EagleState:
        network = self.network.model
        cache = fill_cache(network, inputs, input_lengths, tokens[:, :1], slots, **encoded)
        config = self.network.module.config
        return EagleState(cache, jnp.zeros((len(tokens), 1, config.emb_dim), config.dtype))

    def init_tree(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int, **encoded
    ) -> EagleState:
        made = self.init(inputs, input_lengths, tokens, tokens.shape[1], **encoded)
        return made._replace(cache=self.network.model.node_cache(made.cache, slots, slots))

    def read_prefix(
        self, draft_state: EagleState, state: DecodeState, states: jax.Array | None
    ) -> EagleState:
        config = self.network.module.config
        before = jnp.zeros((len(state.lengths), 1, config.target_dim), config.dtype)
        if states is not None:
            before = jnp.concatenate([before, states.astype(config.dtype)], axis=1)
        return self._read_pairs(draft_state, state, before, state.lengths)

    def observe(self, draft_state: EagleState, state: DecodeState, scored: Scored) -> EagleState:
        """Feeds the tokens that were committed, each with the state that it was predicted from."""
        assert scored.states is not None
        return self._read_pairs(draft_state, state, scored.states, scored.num_new)

    def _read_pairs(
        self, draft_state: EagleState, state: DecodeState, before: jax.Array, num_new: jax.Array
    ) -> EagleState:
        """Feeds each row's last `num_new` tokens with the target's states `before [B, T, D]` them.

        Where that is 0, the row stays as it is.
        """
        starts, offsets = state.lengths - num_new, jnp.arange(before.shape[1], dtype=jnp.int32)
        slots = state.tokens.shape[1]
        places = jnp.minimum(starts[:, None] + offsets, slots - 1)
        fed = jnp.take_along_axis(state.tokens, places, axis=1)
        valid = offsets < num_new[:, None]
        before = jnp.where(valid[..., None], before, 0)
        if state.config.tree is None:
            new, cache = self.network.decode(fed, before, starts, draft_state.cache, valid)
        else:
            depths = jnp.broadcast_to(offsets, fed.shape)
            lines = jnp.broadcast_to(offsets, (*fed.shape, len(offsets)))
            nodes = WindowNodes(starts, starts, depths, lines, slots)
            new, cache = self.network.decode_nodes(fed, before, nodes, draft_state.cache, valid)
        last = jnp.maximum(num_new - 1, 0)[:, None, None]
        own = jnp.take_along_axis(new, last, axis=1).astype(draft_state.own.dtype)
        return EagleState(cache, jnp.where((num_new > 0)[:, None, None], own, draft_state.own))

    def draft(
        self, draft_state: EagleState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[EagleState, Draft]:
        """Drafts the first token from the state after the committed tokens, the others by steps."""
        choose_token = functools.partial(choose_next, self.network.model, None, state)

        def choose_first(step: Step, tokens: jax.Array, carry: tuple):
            cache, own, recorded = carry
            valid = (step < num_wanted)[:, None]
            token, recorded = choose_token(step, tokens, own, valid, recorded)
            return token, (cache, own, recorded)

        def choose(step: Step, tokens: jax.Array, carry: tuple):
            cache, own, recorded = carry
            position, valid = state.lengths - 1 + step, (step < num_wanted)[:, None]
            fed = jnp.take_along_axis(tokens, position[:, None], axis=1)
            new, cache = self.network.decode(fed, own, position, cache, valid, own=True)
            return choose_first(step, tokens, (cache, new.astype(own.dtype), recorded))

        tokens, num_drafted, (cache, _, recorded) = draft_tokens(
            state,
            num_wanted,
            choose,
            (*draft_state, Recorded.empty(state)),
            signals_of=lambda carry: carry[2].signals,
            choose_first=choose_first,
        )
        draft = Draft(tokens, num_drafted, recorded.dist, num_drafted, recorded.signals)
        return EagleState(cache, draft_state.own), draft

    def draft_tree(
        self,
        draft_state: EagleState,
        state: DecodeState,
        num_wanted: jax.Array,
        max_depth: jax.Array,
    ):
        origins, slots = state.lengths - 1, state.tokens.shape[1]

        def states_of(level: Level, carry: tuple):
            cache, own = (
                carry  # `own` has the states of all nodes in the order in which they are fed
            )
            if not level.depth:
                return own, carry
            lines = jnp.asarray(level.lines, jnp.int32)
            lines = jnp.broadcast_to(lines, (*level.tokens.shape, lines.shape[-1]))
            before = pick(own, lines[..., level.depth - 1])
            nodes = WindowNodes(origins + level.first, origins, level.depths, lines, slots)
            new, cache = self.network.decode_nodes(
                level.tokens, before, nodes, cache, level.valid, own=True
            )
            return new, (cache, jnp.concatenate([own, new.astype(own.dtype)], axis=1))

        widened = functools.partial(match_width, vocab_size=state.config.vocab_size)
        draft, (cache, _) = draft_from_states(
            self.network.model, widened, states_of, tuple(draft_state), state, num_wanted, max_depth
        )
        return EagleState(cache, draft_state.own), draft
