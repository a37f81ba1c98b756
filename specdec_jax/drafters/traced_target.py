"""Drafters that are parts of a target whose parameters exist only under jit, as in T5X.

Each takes the place of a drafter of the same name until `on` makes that of the traced network.
"""

import dataclasses
import os
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specdec_jax.drafters.early_exit import EarlyExitDrafter, ExitNetwork
from specdec_jax.drafters.heads import HeadsDrafter, check_widths, read_heads
from specdec_jax.drafters.self_drafting import SelfDrafter
from specdec_jax.models import weight_layouts
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.heads import Heads, HeadsNetwork
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import Drafter, TreeDrafter


class TracedExit(EarlyExitDrafter):
    """The first `layers` decoder layers of a traced target."""

    models: ClassVar[Any] = ()

    def __init__(self, layers: int, config: ModelConfig):
        self.layers, self._of = layers, config.num_decoder_layers

    @property
    def name(self) -> str:
        return f"the first {self.layers} of {self._of} decoder layers"

    def on(self, network: Network) -> Drafter:
        exit_network = ExitNetwork(network.params, network.module, layers=self.layers)
        return EarlyExitDrafter.tree_unflatten((), (exit_network,))


class TracedSelf(SelfDrafter):
    """The weights of a traced target in int8, rounded anew in every call of the program."""

    models: ClassVar[Any] = ()
    name: ClassVar[Any] = "the target in int8"
    scorable: ClassVar[Any] = False

    def __init__(self):
        pass

    def on(self, network: Network) -> Drafter:
        return SelfDrafter.tree_unflatten((), (network.in_int8(), None))


class TracedHeads(TreeDrafter):
    """Heads on a traced target; whether they were trained on it cannot be checked."""

    needs_target_state: ClassVar[bool] = True
    reads_states: ClassVar[bool] = True
    # Capabilities are derived from these methods; only what `on` returns is called.
    draft, observe = HeadsDrafter.draft, HeadsDrafter.observe

    def __init__(self, path: str | os.PathLike[str], config: ModelConfig):
        """Reads the heads; raises ValueError if their widths are not those of `config`."""
        shape, self._fingerprint, params = read_heads(path, config)
        check_widths(config, shape)
        self._heads = Heads(dataclasses.replace(shape, dtype=config.dtype, matmul_dtype=None))
        self._params = jax.tree.map(jnp.asarray, params)

    @property
    def name(self) -> str:
        return f"{self._heads.config.num_heads} heads"

    def on(self, network: Network) -> Drafter:
        params = jax.tree.map(lambda leaf: leaf, self._params)  # a copy
        params = weight_layouts.pack(params, network.backend.packs_weights)
        head = network.head_alone() if self._heads.config.share_head else None
        return HeadsDrafter(HeadsNetwork(params, head, self._heads), self._fingerprint)
