"""Drafts several tokens in one call, with heads on the target's own last state.

This is blockwise parallel decoding (Stern et al. 2018) with Medusa's heads (Cai et al. 2024, arXiv
2401.10774), which draft a single sequence or, as Medusa does, a tree.
"""

import dataclasses
import os
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.checkpoints import native_format, stored_tensor
from specdec_jax.drafters.drafting import draft_at_once
from specdec_jax.drafters.tree_levels import draft_tree_at_once
from specdec_jax.files import places
from specdec_jax.models import arguments, heads, parameters
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.heads import Heads, HeadsConfig, HeadsNetwork
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter, TreeDrafter
from specdec_jax.speculative.state import DecodeState, Draft, Scored


@flax.struct.dataclass
class HeadsState:
    """What the heads read.

    Attributes:
      states: `[B, D]`, the target's last state at the token before each row's last committed one.
      known: `[B]` bool, False until the target has been called for the row.
    """

    states: jax.Array
    known: jax.Array


@flax.struct.dataclass
class HeadsDrafter(TreeDrafter):
    """A drafter with N heads on the state of the target that predicted the last committed token.

    Head i predicts the i-th token after it. A head does not see the tokens in between, so its
    distribution is the same whatever the heads before it drew. The distribution passes through the
    target's processors, temperature and filters before the token is drawn. One call of the heads
    serves a whole draft of at most N tokens. The first iteration of a request drafts nothing, since
    there is no state before the first call of the target. In a tree all nodes of depth i have the
    distribution of head i; nodes deeper than N are not drafted.

    Attributes:
      network: the heads, and the target's own head if they share it.
      fingerprint: fingerprint of the target whose states the heads take.
    """

    needs_target_state: ClassVar[bool] = True
    reads_states: ClassVar[bool] = True

    network: HeadsNetwork
    fingerprint: str = flax.struct.field(pytree_node=False)

    @classmethod
    @isolated
    def for_target(cls, target: LanguageModel, config: HeadsConfig, params: dict) -> "HeadsDrafter":
        """Returns heads with the parameters `params` on `target`, computing in its dtype.

        Raises:
          ValueError: their widths are not the target's.
        """
        check_widths(target.config, config)
        config = dataclasses.replace(config, dtype=target.config.dtype, matmul_dtype=None)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, config.dtype), params)
        head = target.network.head_alone() if config.share_head else None
        network = HeadsNetwork(heads.pack(params, config.dtype), head, Heads(config))
        return cls(network, target.fingerprint)

    @classmethod
    @isolated
    def load(cls, path: str | os.PathLike[str], target: LanguageModel) -> "HeadsDrafter":
        """Returns the heads that `save` wrote, on `target`.

        Raises:
          ValueError: no folder of heads, a damaged one, or heads of another target.
        """
        arguments.check_path("path", path)
        arguments.check_model("target", target)
        config, fingerprint, params = read_heads(path, target.config)
        try:
            _check(target, config, fingerprint)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.for_target(target, config, params)

    @isolated
    def save(self, path: str | os.PathLike[str], dtype: Any = None) -> None:
        """Writes a folder that `load` reads, in `dtype`, by default the parameters' own."""
        params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), self.params)
        folder = places.make_path(path).absolute()
        with native_format.write_part(folder, "heads", self.config, self.fingerprint, params):
            pass

    def check(self, target: LanguageModel) -> None:
        """Raises ValueError unless `target` is the model whose states the heads take."""
        _check(target, self.config, self.fingerprint)

    @property
    def config(self) -> HeadsConfig:
        return self.network.config

    @property
    def params(self) -> dict:
        """Parameters as a nested dict of arrays, made on demand from the decode loop's layout."""
        return heads.unpack(self.network.params)

    __repr__ = Drafter.__repr__  # not the dataclass's, with all arrays

    @property
    def name(self) -> str:
        return f"{self.config.num_heads} heads"

    def identity(self) -> tuple[list[Any], Any]:
        return [self.fingerprint, self.config], self.params

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> HeadsState:
        states = jnp.zeros((len(tokens), self.config.emb_dim), self.config.dtype)
        return HeadsState(states, jnp.zeros(len(tokens), bool))

    def draft(
        self, draft_state: HeadsState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[HeadsState, Draft]:
        num_wanted = jnp.where(draft_state.known, jnp.minimum(num_wanted, self.config.num_heads), 0)
        draft = draft_at_once(state, num_wanted, self.network.logits(draft_state.states))
        return draft_state, draft._replace(calls=(num_wanted > 0).astype(jnp.int32))

    def draft_tree(
        self,
        draft_state: HeadsState,
        state: DecodeState,
        num_wanted: jax.Array,
        max_depth: jax.Array,
    ):
        logits = self.network.logits(draft_state.states)
        max_depth = jnp.where(draft_state.known, max_depth, 0)
        draft = draft_tree_at_once(state, num_wanted, max_depth, logits)
        called = jnp.any(draft.valid[:, 1:], axis=1)
        return draft_state, draft._replace(calls=called.astype(jnp.int32))

    def observe(self, draft_state: HeadsState, state: DecodeState, scored: Scored) -> HeadsState:
        """Keeps the state that gave the last committed token; rows that are done keep theirs."""
        assert scored.states is not None
        last, moved = jnp.maximum(scored.num_new - 1, 0)[:, None, None], scored.num_new > 0
        newest = jnp.take_along_axis(scored.states, last, axis=1)[:, 0]
        newest = newest.astype(draft_state.states.dtype)
        states = jnp.where(moved[:, None], newest, draft_state.states)
        return HeadsState(states, draft_state.known | moved)


def read_heads(
    path: str | os.PathLike[str], target: ModelConfig
) -> tuple[HeadsConfig, str, dict[str, Any]]:
    """Reads a folder of heads; returns their shape, their target's fingerprint and parameters."""
    folder = places.make_path(path)
    config, fingerprint, stored = native_format.open_part(folder, "heads", HeadsConfig)
    stored_tensor.check_shapes(stored, config.parameter_shapes, path, "of these heads")
    params = {name: leaf.load(jnp.dtype(target.dtype)) for name, leaf in stored.items()}
    return config, fingerprint, parameters.unflatten(params)


def _check(target: LanguageModel, config: HeadsConfig, fingerprint: str) -> None:
    check_widths(target.config, config)
    if fingerprint != target.fingerprint:
        raise ValueError(
            "heads: got heads of a target with other weights, expected heads trained on this one"
        )


def check_widths(target: ModelConfig, config: HeadsConfig) -> None:
    """Raises ValueError for heads with other widths than the target's."""
    for name in ("emb_dim", "vocab_size"):
        got, expected = getattr(config, name), getattr(target, name)
        if got != expected:
            raise ValueError(f"heads: got {name} {got}, expected the target's {expected}")
