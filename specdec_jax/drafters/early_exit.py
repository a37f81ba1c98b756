"""Some decoder layers of the target as drafter, mostly the first, on the target's own cache."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.axes import Layers
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.drafters.drafting import NetworkDrafter, Step, draft_from_logits, match_width
from specdec_jax.drafters.tree_levels import draft_with_model
from specdec_jax.models import arguments, weight_layouts
from specdec_jax.models.family import check_uses_backend
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.layers import apply_weight
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState, Draft


@flax.struct.dataclass
class ExitNetwork(Network):
    """A network that runs only some of its decoder layers.

    Attributes:
      layers: k, the number of decoder layers that run, the first ones, or the numbers of those that
        do; the caches of the others stay as they are.
      head_weight: `[D, W]`, a head of its own on the normalised states; None: the network's head.
    """

    layers: int | tuple[int, ...] = flax.struct.field(pytree_node=False, default=1)
    head_weight: weight_layouts.Weight | None = None

    def decode_states(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Any,
        layers: Layers = None,
        valid: jax.Array | None = None,
        added: jax.Array | None = None,
    ):
        layers = self._choose_layers(layers)
        return super().decode_states(tokens, positions, cache, layers, valid, added)

    def decode_nodes(
        self,
        tokens: jax.Array,
        nodes: AnyNodes,
        cache: Any,
        valid: jax.Array | None = None,
        layers: Layers = None,
        added: jax.Array | None = None,
    ):
        layers = self._choose_layers(layers)
        return super().decode_nodes(tokens, nodes, cache, valid, layers, added)

    def _choose_layers(self, layers: Layers) -> Layers:
        """Returns those of `layers` that the network runs at all."""
        if layers is None:
            return self.layers
        if isinstance(layers, int) and isinstance(self.layers, int):
            return min(layers, self.layers)
        own, asked = (
            tuple(range(one)) if isinstance(one, int) else one for one in (self.layers, layers)
        )
        return tuple(layer for layer in own if layer in asked)

    def head(self, states: jax.Array, valid: jax.Array | None = None):
        if self.head_weight is None:
            return super().head(states, valid)
        return apply_weight(states, self.head_weight, jnp.float32, valid)


def _check_layers(layers: Any, count: int) -> int | tuple[int, ...]:
    """Returns how many of the first of `count` layers run, or the numbers of those that do."""
    if arguments.is_integer(layers) and 1 <= layers < count:
        return int(layers)
    if not arguments.is_integer(layers) and isinstance(layers, Sequence):
        numbers = [layer for layer in layers if arguments.is_integer(layer)]
        rising = all(a < b for a, b in zip([-1, *numbers], [*numbers, count]))
        if rising and 1 <= len(numbers) == len(layers) < count:
            return tuple(map(int, numbers))
    expected = f"an integer from 1 to {count - 1}, or ascending numbers of layers, not all"
    if count == 1:
        expected = "a target with more than one decoder layer"
    raise ValueError(f"layers: got {layers!r}, expected {expected}")


def check_own(model: LanguageModel, target: LanguageModel, what: str) -> None:
    """Raises ValueError if `model`, of which `what` is a part that drafts, is not the target."""
    if model is not target:
        raise ValueError(
            f"drafter: got {what} of another model ({model.name}), "
            f"expected that of the target itself ({target.name})"
        )


@jax.tree_util.register_pytree_node_class
class EarlyExitDrafter(NetworkDrafter):
    """A drafter made of the target's first k decoder layers, or others, last norm and head.

    It has no second model, and no cache of its own. (With layers left out in the middle this is
    Draft & Verify, Zhang et al. 2023, arXiv 2309.08168.)

    The layers below the exit compute for a token what they compute in the target's own call. So the
    drafter reads the target's cache, which lacks exactly the last committed token, and feeds that
    first: there is never anything to catch up with. The slots that it writes are overwritten by the
    target's call; in a tree, those that are not are past the committed tokens and never read.

    Attributes:
      model: the target; no other can be drafted for.
      layers: k, from 1 to one less than the target has, or the numbers of the layers that run.
    """

    provides_probs = True
    needs_target_state = True

    @isolated
    def __init__(self, model: LanguageModel, layers: int | Sequence[int], head: Any = None):
        """Takes some layers of a target.

        Args:
          model: the target.
          layers: k, from 1 to one less than the target has: the first k layers run. Or the numbers
            of those that run, from 0, ascending and not all; each reads what the target's own
            calls wrote to its cache.
          head: `[D, W]`, the weight of a head of its own; None: the target's head.

        Raises:
          ValueError: a number of layers out of range, or a head of another shape.
        """
        arguments.check_model("model", model)
        config = model.config
        check_uses_backend(config, "an early exit")
        own = _check_layers(layers, config.num_decoder_layers)
        if head is not None and (np.ndim(head) != 2 or np.shape(head)[0] != config.emb_dim):
            raise ValueError(
                f"head: got shape {np.shape(head)}, expected ({config.emb_dim}, number of ids)"
            )
        self.model, self.layers = model, own
        network = model.network
        if head is not None:
            packs = network.backend.packs_weights
            head = weight_layouts.lay_weight(jnp.asarray(head, config.dtype), packs)
        self.network = ExitNetwork(network.params, network.module, layers=own, head_weight=head)

    @property
    def name(self) -> str:
        count = self.model.config.num_decoder_layers
        if isinstance(self.layers, tuple):
            return f"the decoder layers {', '.join(map(str, self.layers))} of {count}"
        return f"the first {self.layers} of {count} decoder layers"

    def steps(self) -> dict[str, Network]:
        return {"draft step": self.network}

    def identity(self) -> tuple[list[Any], Any]:
        weight = self.network.head_weight
        weight = None if weight is None else weight_layouts.to_matrix(weight)
        return [self.model.contents, self.layers], weight

    def on(self, network: Network) -> Drafter:
        """Returns the same layers of the traced `network`, whose cache they read.

        Raises:
          ValueError: it has too few layers.
        """
        _check_layers(self.layers, network.config.num_decoder_layers)
        head = self.network.head_weight
        if head is not None:
            packs = network.backend.packs_weights
            head = weight_layouts.lay_weight(weight_layouts.to_matrix(head), packs)
        own = ExitNetwork(network.params, network.module, layers=self.layers, head_weight=head)
        return type(self).tree_unflatten((), (own,))

    def check(self, target: LanguageModel) -> None:
        check_own(self.model, target, "an early exit")

    def draft(
        self, draft_state: tuple, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[tuple, Draft]:
        def logits_of(step: Step, tokens: jax.Array, cache: Any):
            position = state.lengths - 1 + step
            fed = jnp.take_along_axis(tokens, position[:, None], axis=1)
            logits, cache = self.network.decode(fed, position, cache, (step < num_wanted)[:, None])
            return match_width(logits, state.config.vocab_size), cache

        draft, cache = draft_from_logits(state, num_wanted, logits_of, state.target_cache)
        # The written cache is handed on, though the target overwrites it: to keep the old one means
        # to copy it.
        return (), draft._replace(target_cache=cache)

    def draft_tree(
        self, draft_state: Any, state: DecodeState, num_wanted: jax.Array, max_depth: jax.Array
    ):
        widened = functools.partial(match_width, vocab_size=state.config.vocab_size)
        cache, draft = draft_with_model(
            self.network, widened, state.target_cache, state, num_wanted, max_depth, lag=1
        )
        return (), draft._replace(target_cache=cache)
