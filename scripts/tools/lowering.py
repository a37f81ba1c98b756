"""Lowers the programs of decoding from shapes alone, for devices that need not be there.

They are prefill and loop of a pair, and single calls of a network.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specdec_jax.backends.backend import choose_backend
from specdec_jax.backends.sharding import AXES, ShardingRules
from specdec_jax.backends.tree_positions import WindowNodes
from specdec_jax.decoding.generate import advance
from specdec_jax.decoding.search_options import BeamOptions
from specdec_jax.decoding.strategies import choose_strategy
from specdec_jax.drafters.eagle import EagleDrafter
from specdec_jax.drafters.lookahead import LookaheadDecoding
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.recycling import TokenRecycling
from specdec_jax.drafters.sorted_text import SortedText
from specdec_jax.drafters.suffix import SuffixDrafter
from specdec_jax.models import weight_layouts
from specdec_jax.models.eagle import EagleConfig, EagleNetwork, StateProjections, init_projections
from specdec_jax.models.families import PRESETS
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.meshes import parse_mesh
from specdec_jax.models.network import Network, random_params
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative import distributions
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.state import StaticConfig, count_slots
from specdec_jax.speculative.strategy import AnyConfig, prefill
from specdec_jax.speculative.tree_verifiers import TREE_VERIFIERS
from specdec_jax.speculative.trees import DynamicTree, Tree

# Before the preset of a T5 that drafts and reads the target's states and encoder output.
EAGLE = "eagle:"
_EARLIER_IDS = 2**17  # of texts that a suffix drafter searches, as in a `SuffixHistory`


def _make_recycling(vocab_size: int) -> TokenRecycling:
    return TokenRecycling(vocab_size)


def _make_lookahead(vocab_size: int) -> LookaheadDecoding:
    return LookaheadDecoding()


def _make_suffix(vocab_size: int) -> SuffixDrafter:
    nothing = np.zeros(0, np.int32)
    return SuffixDrafter(SortedText.make(nothing, nothing, _EARLIER_IDS), remembers=True)


# Drafters without a model, which are made for a number of ids.
WITHOUT_MODEL: dict[str, Callable[[int], Drafter]] = {
    "recycling": _make_recycling,
    "lookahead": _make_lookahead,
    "suffix": _make_suffix,
}


@functools.partial(jax.jit, donate_argnums=3)
def call(
    network: Network, tokens: jax.Array, positions: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """Runs one call and takes the argmax of its logits."""
    logits, cache = network.decode(tokens, positions, cache)
    return distributions.argmax(logits), cache


@functools.partial(jax.jit, donate_argnums=3, static_argnames="tree")
def call_nodes(
    network: Network, tokens: jax.Array, positions: jax.Array, cache: Any, *, tree: Tree
) -> tuple[jax.Array, Any]:
    """Runs one call over the nodes of a tree and takes the argmax of its logits."""
    branches = tree.branches(len(tokens))
    nodes = WindowNodes(
        positions, positions, branches.depths, branches.lines, cache.layers[0].slots
    )
    states, cache = network.decode_nodes(tokens, nodes, cache)
    return distributions.argmax(network.head(states)), cache


def size(tree: Any) -> int:
    """Returns the bytes of all leaves of a tree of placed shapes, on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def _with_sharding(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array of token ids or positions."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A target in bfloat16, a drafter, a way of decoding, and the devices to compile for.

    Attributes:
      devices: the devices, of which a mesh takes the first.
      target: the name of its shape, a key of `PRESETS`.
      drafter: the same for a drafting model; after `EAGLE` that of one which reads the target's
        states; or a key of `WITHOUT_MODEL`.
      gamma: tokens drafted in an iteration, with a tree its depth; 0 is plain decoding.
      tree: the tree that is drafted; None for a chain.
      beams: beams of a beam search; None without.
      beam_width: nodes of each drafted level of a beam search; None for twice the beams.
      batch: number of rows.
      int8: whether the target's weights are in int8.
      input_length: number of encoder positions.
      new_tokens: the most new tokens.
      temperature: 0 is argmax.
      mesh: devices by `DATAxMODEL`; None for one device.
      platform: that of the devices, "tpu" or "cuda".
      layers: decoder layers of each model that are compiled, with one of the encoder; None for all.
      drafter_layers: decoder layers of the drafting model; None for all of its shape.
    """

    devices: tuple
    target: str
    drafter: str
    gamma: int
    tree: Tree | DynamicTree | None = None
    beams: int | None = None
    beam_width: int | None = None
    batch: int = 1
    int8: bool = False
    input_length: int = 128
    new_tokens: int = 128
    temperature: float = 0.0
    mesh: str | None = None
    platform: str = "tpu"
    layers: int | None = None
    drafter_layers: int | None = None

    @functools.cache
    def rules(self, drafts: bool = False) -> ShardingRules | None:
        """Returns how the target, or a drafter, lies on the mesh; None without one.

        Raises:
          ValueError: a mesh of more devices than there are.
        """
        if not self.mesh:
            return None
        data, model = parse_mesh(self.mesh)
        if data * model > len(self.devices):
            raise ValueError(f"mesh: got {self.mesh}, expected at most {len(self.devices)} devices")
        first = np.array(self.devices[: data * model]).reshape(data, model)
        return ShardingRules(Mesh(first, AXES), replicate=drafts)

    def place(self, tree: Any, shardings: Any = None) -> Any:
        """Returns the shapes of `tree` on the devices.

        They are sharded by `shardings`, else as they are already, else replicated.
        """
        if shardings is not None:
            return jax.tree.map(_with_sharding, tree, shardings)
        rules = self.rules()
        single = jax.sharding.SingleDeviceSharding(self.devices[0])
        whole = single if rules is None else rules.sharding()
        return jax.tree.map(
            lambda leaf: _with_sharding(leaf, getattr(leaf, "sharding", None) or whole), tree
        )

    def config(self, preset: str, drafts: bool = False) -> ModelConfig:
        """Returns the shape of a network, in bfloat16.

        A drafting model after `EAGLE` has the target's vocabulary, and attends to the output of the
        target's encoder, which need not be as wide as the decoder.
        """
        few: dict[str, Any] = {}
        if self.layers:
            few = {"num_encoder_layers": 1, "num_decoder_layers": self.layers}
        if drafts and self.drafter_layers:
            few["num_decoder_layers"] = self.drafter_layers
        if preset.startswith(EAGLE):
            target = PRESETS[self.target]
            few |= {"num_encoder_layers": 0, "encoder_dim": target.encoded_dim}
            few["vocab_size"] = target.vocab_size
        return PRESETS[preset.removeprefix(EAGLE)].replace(dtype="bfloat16", **few)

    @functools.cache
    def network(self, preset: str, drafts: bool = False) -> Network:
        """Returns the placed shapes of a network in the loop's layout for an accelerator."""
        rules, config = self.rules(drafts), self.config(preset, drafts)
        backend, int8 = choose_backend(self.platform, rules), self.int8 and not drafts

        def build():
            params = random_params(jax.random.key(0), module=config.module(), dtype=config.dtype)
            if int8:
                params = weight_layouts.round_params(params, None, config.logits_via_embedding)
            return weight_layouts.pack(
                params, False, backend.joins_weights, backend.transposes_int8
            )

        def shard(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if rules is None:
                return leaf
            name = "/".join(key.key for key in path)
            return _with_sharding(leaf, rules.parameter_sharding(name, leaf.shape))

        params = jax.tree.map_with_path(shard, jax.eval_shape(build))
        config = config.with_own_head() if int8 else config
        return self.place(Network(params, config.module(backend)))

    def make_drafter(self) -> Drafter | None:
        """Returns the drafter, of placed shapes only; None for plain decoding."""
        if not self.gamma:
            return None
        if self.drafter in WITHOUT_MODEL:
            make, vocab_size = WITHOUT_MODEL[self.drafter], self.network(self.target).vocab_size
            return self.place(jax.eval_shape(lambda: make(vocab_size)))
        network = self.network(self.drafter, True)
        if not self.drafter.startswith(EAGLE):
            return ModelDrafter.tree_unflatten((), (network, None))
        widths = PRESETS[self.target].emb_dim, network.module.config.emb_dim
        shape = EagleConfig(*widths, "bfloat16")

        def build():
            params = jax.tree.map(jnp.bfloat16, init_projections(shape))
            return weight_layouts.pack(params, use_packed=False)

        params = self.place(jax.eval_shape(build))
        joined = EagleNetwork(params, network, StateProjections(shape))
        return EagleDrafter.tree_unflatten((), (joined,))

    def _cache(self, start: Callable, network: Network) -> Any:
        """Returns the placed shapes of the result of `start(network, inputs, lengths)`."""
        inputs = _integers(self.batch, bucket_length(self.input_length))
        lowered = jax.jit(start).lower(*self.place((network, inputs, _integers(self.batch))))
        return self.place(
            lowered.out_info, None if self.rules() is None else lowered.compile().output_shardings
        )

    @functools.cache
    def cache(self, preset: str, drafts: bool = False) -> Any:
        """Returns the placed shapes of the cache with which the decoder begins."""
        start = functools.partial(Network.prefill, slots=count_slots(self.new_tokens + 1, 7))
        return self._cache(start, self.network(preset, drafts))

    def drafts_by_pairs(self) -> bool:
        """Returns whether every draft step is over two positions."""
        found: list[bool] = []
        jax.eval_shape(
            lambda network, cache: found.append(network.pairs_are_free(cache)),
            self.network(self.drafter, True),
            self.cache(self.drafter, True),
        )
        return found[0]

    def lowered_call(self, preset: str, width: int, drafts: bool = False) -> jax.stages.Lowered:
        """Lowers a call over `width` positions."""
        tokens, row = self.place((_integers(self.batch, width), _integers(self.batch)))
        return call.lower(self.network(preset, drafts), tokens, row, self.cache(preset, drafts))

    def lowered_tree_call(self, tree: Tree) -> jax.stages.Lowered:
        """Lowers a call of the target over the nodes of a tree."""
        network, size = self.network(self.target), count_slots(self.new_tokens + 1, tree.size - 1)

        def start(network: Network, inputs: jax.Array, row: jax.Array) -> Any:
            return network.node_cache(network.prefill(inputs, row, size), size, size)

        tokens, row = self.place((_integers(self.batch, tree.size), _integers(self.batch)))
        return call_nodes.lower(network, tokens, row, self._cache(start, network), tree=tree)

    def lowered_start(self) -> jax.stages.Lowered:
        """Lowers the program that makes the state which the loop starts from."""
        target, drafter = self.network(self.target), self.make_drafter()
        batch, vocab, config = (
            self.batch,
            target.vocab_size,
            SamplingConfig(temperature=self.temperature),
        )

        def prefill_inputs() -> PrefillInputs:
            row = jnp.zeros(batch, jnp.int32)
            return PrefillInputs(
                inputs=jnp.zeros((batch, bucket_length(self.input_length)), jnp.int32),
                input_lengths=row,
                tokens=row[:, None],
                prefix_lengths=row,
                sampling=config.rows(batch, vocab),
                limits=row,
                eos_ids=jnp.zeros((batch, 4), jnp.int32),
                done=row > 0,
                keys=jax.random.split(jax.random.key(0), batch),
                settings={"length_penalty": jnp.zeros(batch)} if self.beams else None,
                gamma=row,
            )

        placed = self.place(jax.eval_shape(prefill_inputs))
        program: AnyConfig = StaticConfig(
            self.gamma, config.mode, vocab, tree=self.tree, strategy=choose_strategy(self.tree)
        )
        if self.beams:
            options = BeamOptions(self.beams, beam_width=self.beam_width)
            searched = options.config(1, config.mode, vocab, self.gamma, drafter)
            program = searched._replace(max_new=bucket_length(self.new_tokens))
        elif self.tree is not None and isinstance(program, StaticConfig):
            program = program._replace(verifier=TREE_VERIFIERS[self.tree.verify])
        num_slots = program.count_slots(1, self.new_tokens)
        return prefill.lower(target, drafter, program, num_slots, placed)

    def lowered_loop(self, state: Any) -> jax.stages.Lowered:
        """Lowers the loop that starts from a state of placed shapes."""
        target, drafter = self.network(self.target), self.make_drafter()
        return advance.lower(target, drafter, state, self.place(_integers()))
