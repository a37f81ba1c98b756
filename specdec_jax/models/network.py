"""`Network`, a model as jitted functions take it, which hides linen from the rest of the package."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, Shaped

from specdec_jax.backends.axes import (
    Encoded,
    Inputs,
    Logits,
    PerRow,
    States,
    TokenAndLogprob,
    Tokens,
    Valid,
)
from specdec_jax.backends.cpu.packed_weights import input_bits
from specdec_jax.backends.kv_cache import ROWS, TILE, KVCache
from specdec_jax.backends.sharding import ShardingRules, constrain_sharding, read
from specdec_jax.backends.tpu import fused_mesh
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.models import fused_step_selftest, weight_layouts
from specdec_jax.models.family import FamilyModule, ModelConfig
from specdec_jax.models.parameters import parameter_count


@flax.struct.dataclass
class Network:
    """A model as the jitted loop takes it: the parameters are traced, the module is static.

    Attributes:
      params: nested dict of arrays in the loop's layout (`weight_layouts.py`).
      module: the linen module, hashable.
      rules: how parameters and caches lie on a mesh; None: on one device.
      platform: "cpu", "tpu" or another, for which calls and caches are laid out.
    """

    params: dict
    module: FamilyModule = flax.struct.field(pytree_node=False)
    rules: ShardingRules | None = flax.struct.field(pytree_node=False, default=None)
    platform: str = flax.struct.field(pytree_node=False, default="cpu")

    def __repr__(self) -> str:
        return f"{type(self.config).__name__} of {parameter_count(self.config):,} parameters"

    @property
    def heads_per_tile(self) -> int | None:
        """How many heads lie side by side in caches, as for `KVCache`."""
        return heads_per_tile_of(self.platform, self.module, self.rules)

    @property
    def min_query_len(self) -> int:
        """The fewest positions of a single row that `decode` feeds at once.

        A product of a single row would not use an accelerator's units for matrices, and would be
        added up in the dtype of the operands. For eight rows, a tile of float32, a TPU's compiler
        fetches more of the weights ahead than for two: by its estimate a plain step of T5-XXL on a
        v4 takes 9.5 ms, and 10.3 over two positions.
        """
        return 1 if self.heads_per_tile is None else ROWS if self.platform == "tpu" else 2

    @property
    def config(self) -> ModelConfig:
        """The network's shape."""
        return self.module.config

    @property
    def vocab_size(self) -> int:
        """Width V of the logits."""
        return self.config.vocab_size

    @property
    def skips_padding(self) -> bool:
        """Whether positions that are not `valid` cost nothing, so that calls need not be made
        narrower."""
        return self.module.native

    def pairs_are_free(self, cache: Any) -> bool:
        """Returns whether a call over two positions takes no longer than one over a single
        position: on an accelerator, which reads the same weights for both.

        Not so for several rows on a TPU, unless the call is one kernel: every row's positions are
        in tiles of their own, and XLA rearranges them. By its estimate a step of T5-small over 32
        rows takes 0.43 ms over two positions, 0.30 over one.
        """
        if self.heads_per_tile is None:
            return False
        rows = cache.layers[0].batch
        return self.platform != "tpu" or rows == 1 or self._is_one_kernel((rows, 2), cache)

    def _is_one_kernel(self, shape: tuple[int, ...], cache: Any, layers: int | None = None) -> bool:
        """Returns whether a call with tokens of this shape is the kernel of `fused_step.py` on a
        TPU."""
        return (
            fused_mesh.fits(self.module, self.params, shape, cache, layers)
            and fused_step_selftest.SELF_TEST.passed()
        )

    @property
    def encoder_dim(self) -> int | None:
        """Width of another model's encoder output, to which a network without an encoder attends;
        else None."""
        return self.config.encoder_dim

    def encode(self, inputs: Inputs, input_lengths: PerRow) -> Encoded:
        """Runs the encoder; arguments as for `prefill`."""
        inputs, input_lengths = self._by_rows(inputs), self._by_rows(input_lengths)
        mask = jnp.arange(inputs.shape[1]) < input_lengths[:, None]
        return self._by_rows(
            self.module.apply({"params": self.params}, inputs, mask, method="encode")
        )

    def _by_rows(self, x: Shaped[Array, "*N"]) -> Shaped[Array, "*N"]:
        """Returns `x` with its rows divided over the mesh's data axis."""
        return x if self.rules is None else self.rules.constrain(x, "batch")

    def prefill(
        self,
        inputs: Inputs,
        input_lengths: PerRow,
        slots: int,
        copies: int = 1,
        encoded: Encoded | None = None,
    ) -> Any:
        """Runs the encoder once and makes the decoder's cache, `copies` rows side by side for each
        input.

        Args:
          inputs: ids, which do not matter past a row's length. L = 0 for a decoder-only network,
            whose prompt is fed to the decoder (`prefill.fill_cache`).
          slots: S, slots of the self-attention caches.
          encoded: the encoder's output, of another model where there is an `encoder_dim`; None: run
            the encoder.
        """
        if not decoder_only(self):
            encoded = self._by_rows(
                self.encode(inputs, input_lengths) if encoded is None else encoded
            )
        mask, apply = jnp.arange(inputs.shape[1]) < input_lengths[:, None], self.module.apply
        more = (
            {} if self.heads_per_tile is None else {"heads_per_tile": self.heads_per_tile}
        )  # a family need not have this argument
        cache = apply(
            {"params": self.params}, inputs, mask, slots, copies, encoded, **more, method="prefill"
        )
        return self._placed(cache)

    def _placed(self, cache):
        """Returns a new cache with its layout on the mesh set and fixed."""

        def is_layer(node):
            return isinstance(node, KVCache)

        cache = jax.tree.map(
            lambda layer: (
                layer.replace(rules=self.rules, tile_queries=self.platform == "tpu")
                if is_layer(layer)
                else layer
            ),
            cache,
            is_leaf=is_layer,
        )
        return constrain_sharding(cache, self.rules)

    def decode(
        self, tokens: Tokens, positions: PerRow, cache: Any, valid: Valid = None
    ) -> tuple[Logits, Any]:
        """Feeds `tokens` at positions `positions[b] … positions[b] + T − 1`, overwriting those
        slots.

        Args:
          valid: False for positions whose result does not matter, such as those of a row that is
            done; the live ones of a row come first. With the CPU's own kernels the others take no
            time, write nothing, and give 0; elsewhere they are computed like the rest. None: all
            are live.

        Returns:
          Logits of the next token at each position, and the new cache.
        """
        states, cache = self.decode_states(tokens, positions, cache, valid=valid)
        return self.head(states, valid), cache

    def decode_states(
        self,
        tokens: Tokens,
        positions: PerRow,
        cache: Any,
        layers: int | None = None,
        valid: Valid = None,
    ) -> tuple[States, Any]:
        """Does what `decode` does, but for the head: returns states after the first `layers` layers
        (None: all) and the final norm, and the new cache."""
        count, alone = tokens.shape[1], len(tokens) == 1
        if (
            alone
            and count < self.min_query_len
            and not self._is_one_kernel(tokens.shape, cache, layers)
        ):
            more = ((0, 0), (0, self.min_query_len - count))

            def wider(x):
                return x if x is None else jnp.pad(x, more, mode="edge")

            states, cache = self.decode_states(
                wider(tokens), positions, cache, layers, wider(valid)
            )
            return states[:, :count], cache
        tokens, positions = self._by_rows(tokens), self._by_rows(positions)
        apply = functools.partial(self.module.apply, {"params": self.params})

        def run(*call):
            return apply(*call, layers, valid, method="decode_states")

        if self._is_one_kernel(tokens.shape, cache, layers):

            def embed(tokens):
                return apply(tokens, method=lambda module, tokens: module.token_embedder(tokens))

            fused = functools.partial(
                fused_mesh.decode_states, self.module, self.params, layers=layers
            )

            def on_tpu(tokens, positions, cache):
                return fused(embed(tokens), positions, cache)

            states, cache = jax.lax.platform_dependent(
                tokens, positions, cache, tpu=on_tpu, default=run
            )
        else:
            states, cache = run(tokens, positions, cache)
        return self._by_rows(states), constrain_sharding(cache, self.rules)

    def node_cache(self, cache: Any, slots: int, positions: int) -> Any:
        """Makes a cache for calls over nodes of trees out of one for sequences.

        Args:
          cache: a cache by `prefill`, in whose slots 0, 1, … lie the tokens fed since, at positions
            0, 1, ….
          slots: S, slots of the new cache.
          positions: P, positions of the longest sequence.
        """
        return constrain_sharding(
            self.module.apply(
                {"params": self.params}, cache, slots, positions, method="node_cache"
            ),
            self.rules,
        )

    def decode_nodes(
        self,
        tokens: Tokens,
        nodes: AnyNodes,
        cache: Any,
        valid: Valid = None,
        layers: int | None = None,
    ) -> tuple[States, Any]:
        """Feeds `tokens` as nodes of trees; the cache is from `node_cache`, `valid` as for
        `decode`, and `layers` as for `decode_states`.

        Returns:
          States, which `head` takes, and the new cache.
        """
        tokens, apply = self._by_rows(tokens), self.module.apply
        states, cache = apply(
            {"params": self.params},
            tokens,
            None,
            cache,
            layers,
            valid,
            nodes,
            method="decode_states",
        )
        return self._by_rows(states), constrain_sharding(cache, self.rules)

    def move_nodes(self, cache: Any, sources: Int[Array, "B M"], starts: PerRow) -> Any:
        """Copies the slots `sources` of every row of the cache to the M slots from `starts` on."""
        return constrain_sharding(cache.move_nodes(sources, starts, self.module.native), self.rules)

    def head(self, states: States, valid: Valid = None) -> Logits:
        """Returns the logits of the states that `decode_states` or `decode_nodes` returned."""
        return self._by_rows(
            self.module.apply({"params": self.params}, states, valid, method="head")
        )

    def greedy_token_and_logprob(
        self, states: States, valid: Valid = None, normalize: bool = True
    ) -> TokenAndLogprob:
        """Returns each position's argmax token and its log-probability without storing logits; only
        if it `skips_padding`.

        Returns:
          Tokens, the first where logits are equal, −1 where a logit is NaN; and their
          log-probabilities, NaN there and where a logit is infinite. Without `normalize` the
          log-probabilities are meaningless.
        """
        return self.module.apply(
            {"params": self.params}, states, valid, normalize, method="greedy_token_and_logprob"
        )

    def shortlisted(self, ids: Int[Array, " F"]) -> "Network":
        """Returns the network with a head for `ids` only, so that logits are `[B, T, F]`; other
        arrays are shared."""
        config, native = self.config, self.module.native
        params = weight_layouts.with_head(
            self.params, config.logits_via_embedding, native, np.asarray(ids)
        )
        return self.replace(
            params=params, module=config.with_own_head().module(fuses(self.rules), native)
        )

    def in_int8(self) -> "Network":
        """Returns the network with the kernels of decoder steps, the head's too, in int8; other
        arrays are shared."""
        tied = self.config.logits_via_embedding
        network = self.shortlisted(np.arange(self.vocab_size)) if tied else self
        return network.replace(params=weight_layouts.in_int8(network.params, input_bits("int8")))

    def head_alone(self) -> "Network":
        """Returns the part of the network that `head` needs; the arrays are shared."""
        decoder = {
            name: node for name, node in self.params["decoder"].items() if name == "logits_dense"
        }
        return self.replace(
            params={"token_embedder": self.params["token_embedder"], "decoder": decoder}
        )

    def teacher_forced(
        self,
        inputs: Inputs,
        input_lengths: PerRow,
        decoder_tokens: Tokens,
        encoded: Encoded | None = None,
    ) -> Logits:
        """Returns the logits of whole sequences, computed without a cache; other arguments as for
        `prefill`."""
        mask = jnp.arange(inputs.shape[1]) < input_lengths[:, None]
        logits = self.module.apply(
            {"params": self.params}, inputs, mask, decoder_tokens, encoded=encoded
        )
        return constrain_sharding(logits, self.rules)


def heads_per_tile_of(
    platform: str, module: FamilyModule, rules: ShardingRules | None
) -> int | None:
    """Returns `KVCache.heads_per_tile` for a network's caches on a platform: "cpu", "tpu" or
    another."""
    if platform == "cpu" or not module.joins_heads:
        return None
    heads, parts = module.config.num_heads, 1 if rules is None else rules.parts
    most = max(TILE[1] // module.config.head_dim, 1) if platform == "tpu" else 1
    return next(count for count in range(most, 0, -1) if heads % (count * parts) == 0)


def fuses(rules: ShardingRules | None) -> bool:
    """Returns whether kernels with the same input are joined: not if a mesh divides kernels by
    their outputs."""
    return rules is None or rules.parts == 1


def lay_out(params: dict, rules: ShardingRules, prefix: str = "") -> None:
    """Moves the arrays of a nested dict to their places on the mesh, one after the other, in place.

    Args:
      prefix: of the names in `params`, with a "/" at its end.
    """
    for name, value in params.items():
        if isinstance(value, dict):
            lay_out(value, rules, f"{prefix}{name}/")
            continue
        sharding = rules.of_parameter(prefix + name, value.shape)
        if isinstance(value, jax.Array) and value.sharding.device_set == sharding.device_set:
            params[name] = jax.device_put(value, sharding)
        else:
            params[name] = read(sharding, value.shape, lambda box: np.asarray(value)[box])


def decoder_only(model) -> bool:
    """Returns whether a model has no encoder: its inputs are then prompts, which its outputs
    continue."""
    return model.config.decoder_only


def join(
    inputs: Int[np.ndarray, "B L"],
    input_lengths: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B T"],
) -> tuple[Int[np.ndarray, "B L+T"], Int[np.ndarray, "B T"]]:
    """Returns sequences of each row's input, cut at its length, followed by `tokens`; and the
    places of `tokens`."""
    places = input_lengths[:, None] + np.arange(tokens.shape[1])
    sequences = np.pad(inputs, ((0, 0), (0, tokens.shape[1])))
    np.put_along_axis(sequences, places, tokens, axis=1)
    return sequences, places


def check_positions(config: ModelConfig, length: int, whose: str = "tokens") -> None:
    """Checks that a model has `length` positions; raises ValueError otherwise. `whose` begins the
    message."""
    if config.max_positions is not None and length > config.max_positions:
        raise ValueError(
            f"{whose}: got sequences of up to {length} tokens, new ones included, expected at most "
            f"num_positions = {config.max_positions}"
        )


def padded_lengths(tokens: Int[np.ndarray, "B L"]) -> Int[np.ndarray, " B"]:
    """Returns one past the place of the last id other than 0 in each row."""
    length = tokens.shape[1]
    if not length:
        return np.zeros(len(tokens), np.int32)
    return np.where(tokens.any(axis=1), length - np.argmax(tokens[:, ::-1] != 0, axis=1), 0).astype(
        np.int32
    )


@jax.jit
def teacher_forced_logits(
    network: Network,
    inputs: Inputs,
    input_lengths: PerRow,
    decoder_tokens: Tokens,
    encoder: Network | None,
) -> Logits:
    encoded = encoder and encoder.encode(inputs, input_lengths)
    return network.teacher_forced(inputs, input_lengths, decoder_tokens, encoded)


@jax.jit
def continuation_logits(network: Network, sequences: Inputs, places: Tokens) -> Logits:
    """Returns the logits at `places` of `sequences`, for a decoder-only network."""
    return constrain_sharding(
        network.module.apply({"params": network.params}, sequences, places), network.rules
    )


def initial_params(module: FamilyModule, key: Key[Array, ""]) -> dict:
    """Makes random parameters in float32."""
    return module.init(key, *module.dummy_inputs())["params"]


@functools.partial(jax.jit, static_argnames=("module", "dtype", "rules"))
def random_params(
    key: Key[Array, ""], *, module: FamilyModule, dtype, rules: ShardingRules | None = None
) -> dict:
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), initial_params(module, key))
    if rules is None:
        return params

    def place(name, leaf):
        return jax.lax.with_sharding_constraint(leaf, rules.of_parameter(name, leaf.shape))

    return jax.tree.map_with_path(
        lambda path, leaf: place("/".join(key.key for key in path), leaf), params
    )
