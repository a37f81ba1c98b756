"""Drafts several tokens in one call, with heads on the target's own last state.

This is blockwise parallel decoding (Stern et al. 2018) with Medusa's heads (Cai et al. 2024, arXiv
2401.10774), which draft a single sequence or, as Medusa does, a tree.
"""

import dataclasses
import os
import pathlib
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.checkpoints import native_format, stored_tensor
from specdec_jax.drafters.drafting import draft_tokens, draw_adjusted, empty_distribution
from specdec_jax.drafters.tree_levels import Level, draft_tree
from specdec_jax.models import arguments, heads, parameters
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.heads import Heads, HeadsConfig, HeadsNetwork
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState, Draft, Scored
from specdec_jax.speculative.tree_drafter import TreeDrafter


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

    Head i predicts the i-th token after it.

    A head does not see the tokens in between, so its distribution is the same whatever the heads
    before it drew. The distribution passes through the target's processors, temperature and filters
    before the token is drawn. One call of the heads serves a whole draft of at most N tokens. The
    first iteration of a request drafts nothing, since there is no state before the first call of
    the target. In a tree all nodes of depth i have the distribution of head i; nodes deeper than N
    are not drafted.

    Attributes:
      network: the heads, and the target's own head if they share it.
      fingerprint: fingerprint of the target whose states the heads take.
    """

    needs_target_state: ClassVar[bool] = True
    observes: ClassVar[bool] = True
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
        return cls(
            HeadsNetwork(heads.pack(params, config.dtype), head, Heads(config)), target.fingerprint
        )

    @classmethod
    @isolated
    def load(cls, path: str | os.PathLike[str], target: LanguageModel) -> "HeadsDrafter":
        """Returns the heads that `save` wrote, on `target`.

        Raises:
          ValueError: no folder of heads, a damaged one, or heads of another target.
        """
        arguments.check_path("path", path)
        arguments.check_model("target", target)
        config, fingerprint, stored = native_format.open_heads(pathlib.Path(path))
        stored_tensor.check_shapes(stored, config.parameter_shapes, path, "of these heads")
        try:
            _check(target, config, fingerprint)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        params = {name: leaf.load(jnp.dtype(target.config.dtype)) for name, leaf in stored.items()}
        return cls.for_target(target, config, parameters.unflatten(params))

    @isolated
    def save(self, path: str | os.PathLike[str], dtype: Any = None) -> None:
        """Writes a folder that `load` reads, in `dtype`, by default the parameters' own."""
        params = jax.tree.map(
            lambda leaf: np.asarray(leaf) if dtype is None else np.asarray(leaf).astype(dtype),
            self.params,
        )
        native_format.write_heads(
            self.config, self.fingerprint, params, pathlib.Path(path).absolute()
        )

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
        batch = tokens.shape[0]
        return HeadsState(
            jnp.zeros((batch, self.config.emb_dim), self.config.dtype), jnp.zeros(batch, bool)
        )

    def draft(
        self, draft_state: HeadsState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[HeadsState, Draft]:
        num_wanted = jnp.where(draft_state.known, jnp.minimum(num_wanted, self.config.num_heads), 0)
        logits = self.network.logits(draft_state.states)

        def choose(step: jax.Array | int, tokens: jax.Array, dist: Categorical | None):
            return draw_adjusted(
                state, jax.lax.dynamic_slice_in_dim(logits, step, 1, axis=1), tokens, step, dist
            )

        tokens, num_drafted, dist = draft_tokens(
            state, num_wanted, choose, empty_distribution(state)
        )
        return draft_state, Draft(tokens, num_drafted, dist, (num_wanted > 0).astype(jnp.int32))

    def draft_tree(
        self,
        draft_state: HeadsState,
        state: DecodeState,
        num_wanted: jax.Array,
        max_depth: jax.Array,
    ):
        logits = self.network.logits(draft_state.states)
        batch, heads, vocab_size = logits.shape
        max_depth = jnp.where(draft_state.known, jnp.minimum(max_depth, heads), 0)

        def logits_of(level: Level, carry: Any):
            here = logits[:, None, min(level.depth, heads - 1)]
            return jnp.broadcast_to(here, (batch, level.tokens.shape[1], vocab_size)), carry

        draft, _ = draft_tree(state, num_wanted, max_depth, logits_of, ())
        return draft_state, draft._replace(
            calls=jnp.any(draft.valid[:, 1:], axis=1).astype(jnp.int32)
        )

    def observe(self, draft_state: HeadsState, state: DecodeState, scored: Scored) -> HeadsState:
        """Keeps the state that gave the last committed token; rows that are done keep theirs."""
        last = jnp.maximum(scored.num_new - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(scored.states, last, axis=1)[:, 0].astype(
            draft_state.states.dtype
        )
        moved = scored.num_new > 0
        return HeadsState(
            jnp.where(moved[:, None], newest, draft_state.states), draft_state.known | moved
        )


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
