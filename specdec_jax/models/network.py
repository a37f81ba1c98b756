"""`Network`, a model as jitted functions take it, which hides linen from the other packages."""

import dataclasses
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
    Layers,
    Logits,
    Mask,
    PerRow,
    States,
    TokenAndLogprob,
    Tokens,
    Valid,
)
from specdec_jax.backends.backend import Backend, choose_backend
from specdec_jax.backends.cpu.packed_weights import input_bits
from specdec_jax.backends.sharding import ShardingRules, constrain_sharding, read_parts
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import weight_layouts
from specdec_jax.models.family import FamilyModule, ModelConfig, check_uses_backend
from specdec_jax.models.parameters import flatten, parameter_count, unflatten

# The nodes of parameters that only an encoder reads.
ENCODER_PARTS = "encoder", "encoder_embedder"


def _make_mask(inputs: Inputs, input_lengths: PerRow) -> Mask:
    """Returns True at the ids of each row that count."""
    return jnp.arange(inputs.shape[1]) < input_lengths[:, None]


@flax.struct.dataclass
class Network:
    """A model as the jitted loop takes it: the parameters are traced, the module is static.

    Attributes:
      params: nested dict of arrays in the loop's layout (`weight_layouts.py`).
      module: the linen module, hashable, which has the `Backend`.
      shares_encoder: whether another network's encoder, which is equal, reads the inputs in the
        place of its own.
    """

    params: dict
    module: FamilyModule = flax.struct.field(pytree_node=False)
    shares_encoder: bool = flax.struct.field(pytree_node=False, default=False)

    def __repr__(self) -> str:
        return f"{type(self.config).__name__} of {parameter_count(self.config):,} parameters"

    @property
    def backend(self) -> Backend:
        """How the network runs on its devices."""
        return self.module.backend

    @property
    def rules(self) -> ShardingRules | None:
        """How parameters and caches lie on a mesh; None: on one device."""
        return self.backend.rules

    def with_backend(self, platform: str, rules: ShardingRules | None = None) -> "Network":
        """Returns the network for other devices, with the same arrays; not with packed weights."""
        backend = choose_backend(platform, rules)
        backend = dataclasses.replace(backend, joins_weights=self.backend.joins_weights)
        return self.replace(module=self.config.module(backend))

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
        """Whether positions that are not `valid` cost nothing, so that no call is made narrower."""
        return self.backend.packs_weights

    def pairs_are_free(self, cache: Any) -> bool:
        """Returns whether a call over two positions takes no longer than one over a single one.

        So it is on an accelerator, which reads the same weights for both.
        """
        return self.backend.pairs_are_free(cache) or self._runs_fused_step(2, cache)

    def _runs_fused_step(self, queries: int, cache: Any, layers: Layers = None) -> bool:
        """Returns whether a call over so many positions is one kernel of the backend."""
        if isinstance(layers, tuple):
            return False
        if not self.backend.supports_fused_step(self, queries, cache, layers):
            return False
        from specdec_jax.models import fused_step_selftest  # imports the accelerators' kernels

        self_test = {
            "tpu": fused_step_selftest.SELF_TEST,
            "cuda": fused_step_selftest.GPU_SELF_TEST,
        }
        return self_test[self.backend.platform].passed()

    @property
    def encoder_dim(self) -> int | None:
        """Width of another model's encoder output, to which the network attends; else None."""
        return self.config.encoded_dim if self.shares_encoder else self.config.encoder_dim

    def without_encoder(self) -> "Network":
        """Returns the network without its encoder, for the output of an equal one.

        Other arrays are shared.
        """
        params = {name: node for name, node in self.params.items() if name not in ENCODER_PARTS}
        return self.replace(params=params, shares_encoder=True)

    def encode(self, inputs: Inputs, input_lengths: PerRow) -> Encoded:
        """Runs the encoder; arguments as for `prefill`."""
        inputs, input_lengths = self._by_rows(inputs), self._by_rows(input_lengths)
        mask = _make_mask(inputs, input_lengths)
        return self._by_rows(self._apply("encode", inputs, mask))

    def _apply(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self.module.apply({"params": self.params}, *arguments, **options, method=method)

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
        """Runs the encoder once and makes the decoder's cache.

        `input_lengths` are the numbers of ids of each row, past which ids do not matter; other
        arguments are as for `FamilyModule.prefill`.
        """
        if not is_decoder_only(self):
            encoded = self.encode(inputs, input_lengths) if encoded is None else encoded
            encoded = self._by_rows(encoded)
        mask = _make_mask(inputs, input_lengths)
        cache = self._apply("prefill", inputs, mask, slots, copies=copies, encoded=encoded)
        return constrain_sharding(cache, self.rules)

    def decode(
        self, tokens: Tokens, positions: PerRow, cache: Any, valid: Valid = None
    ) -> tuple[Logits, Any]:
        """Feeds `tokens` at positions `positions[b] … positions[b] + T − 1`, whose slots they take.

        Args:
          tokens: T tokens of each row.
          positions: the first position of each row.
          cache: from `prefill` or an earlier call.
          valid: False for positions whose result does not matter, such as those of a row that is
            done; the valid ones of a row come first. With the CPU's own kernels the others take no
            time, write nothing, and give 0; elsewhere they are computed like the rest. None: all
            are valid.

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
        layers: Layers = None,
        valid: Valid = None,
        added: States | None = None,
    ) -> tuple[States, Any]:
        """Does what `decode` does, without the head.

        Args:
          tokens, positions, cache, valid: as for `decode`.
          layers: which layers run: the first so many, those of a tuple of numbers, or all (None).
          added: what is added to the tokens' embeddings.

        Returns:
          States after these layers and the final norm; the new cache.
        """
        fused = self._runs_fused_step(tokens.shape[1], cache, layers)
        count, least = tokens.shape[1], self.backend.min_query_len
        if len(tokens) == 1 and count < least and not fused:

            def widen(x: jax.Array) -> jax.Array:
                more = (0, 0), (0, least - count), *[(0, 0)] * (x.ndim - 2)
                return jnp.pad(x, more, mode="edge")

            tokens, valid, added = jax.tree.map(widen, (tokens, valid, added))
            states, cache = self.decode_states(tokens, positions, cache, layers, valid, added)
            return states[:, :count], cache
        call = self._by_rows(tokens), self._by_rows(positions), cache

        def run_layers(tokens: Tokens, positions: PerRow, cache: Any) -> tuple[States, Any]:
            return self._run_layers(tokens, positions, cache, layers, valid, None, added)

        def run_kernel(tokens: Tokens, positions: PerRow, cache: Any) -> tuple[States, Any]:
            assert not isinstance(layers, tuple)
            x = self._apply("embed", tokens)
            x = x if added is None else x + added
            return self.backend.run_fused_step(self, x, positions, cache, layers)

        if fused:
            kernel = {self.backend.platform: run_kernel}
            states, cache = jax.lax.platform_dependent(*call, **kernel, default=run_layers)
        else:
            states, cache = run_layers(*call)
        return self._by_rows(states), constrain_sharding(cache, self.rules)

    def _run_layers(
        self,
        tokens: Tokens,
        positions: PerRow | None,
        cache: Any,
        layers: Layers,
        valid: Valid,
        nodes: AnyNodes | None,
        added: States | None,
    ) -> tuple[States, Any]:
        """Runs the module's `decode_states`, with `added` as for the method of the network."""
        if added is None:
            more = () if nodes is None else (nodes,)
            return self._apply("decode_states", tokens, positions, cache, layers, valid, *more)
        check_uses_backend(self.config, "a drafter that reads the target's states")
        x = self._apply("embed", tokens, valid) + added
        return self._apply("decode_embedded", x, positions, cache, layers, valid, nodes)

    def node_cache(self, cache: Any, slots: int, positions: int) -> Any:
        """Makes a cache for calls over nodes of trees out of one for sequences.

        Args:
          cache: a cache by `prefill`, in whose slots 0, 1, … lie the tokens fed since, at positions
            0, 1, ….
          slots: S, slots of the new cache.
          positions: P, positions of the longest sequence.
        """
        return constrain_sharding(self._apply("node_cache", cache, slots, positions), self.rules)

    def decode_nodes(
        self,
        tokens: Tokens,
        nodes: AnyNodes,
        cache: Any,
        valid: Valid = None,
        layers: Layers = None,
        added: States | None = None,
    ) -> tuple[States, Any]:
        """Feeds `tokens` as nodes of trees.

        The cache is from `node_cache`, `valid` as for `decode`, `layers` and `added` as for
        `decode_states`.

        Returns:
          States, which `head` takes, and the new cache.
        """
        tokens = self._by_rows(tokens)
        states, cache = self._run_layers(tokens, None, cache, layers, valid, nodes, added)
        return self._by_rows(states), constrain_sharding(cache, self.rules)

    def move_nodes(self, cache: Any, sources: Int[Array, "B M"], starts: PerRow) -> Any:
        """Copies the slots `sources` of every row of the cache to the M slots from `starts` on."""
        return constrain_sharding(cache.move_nodes(sources, starts, self.backend), self.rules)

    def head(self, states: States, valid: Valid = None) -> Logits:
        """Returns the logits of the states that `decode_states` or `decode_nodes` returned."""
        return self._by_rows(self._apply("head", states, valid))

    def greedy_token_and_logprob(
        self, states: States, valid: Valid = None, normalize: bool = True
    ) -> TokenAndLogprob:
        """Returns each position's argmax token and its log-probability without storing logits.

        Only if it `skips_padding`.

        Returns:
          Tokens, the first where logits are equal, −1 where a logit is NaN; and their
          log-probabilities, NaN there and where a logit is infinite. Without `normalize` the
          log-probabilities are meaningless.
        """
        return self._apply("greedy_token_and_logprob", states, valid, normalize)

    def shortlisted(self, ids: Int[Array, " F"]) -> "Network":
        """Returns the network with a head for `ids` only, so that logits are `[B, T, F]`.

        Other arrays are shared.
        """
        check_uses_backend(self.config, "a shortlist")
        config, packed = self.config, self.backend.packs_weights
        tied = config.logits_via_embedding
        params = weight_layouts.add_head(self.params, tied, packed, np.asarray(ids))
        return self.replace(params=params, module=config.with_own_head().module(self.backend))

    def in_int8(self) -> "Network":
        """Returns the network with the weights of decoder steps, the head's too, in int8.

        Other arrays are shared.
        """
        check_uses_backend(self.config, "a drafter in int8")
        tied = self.config.logits_via_embedding
        network = self.shortlisted(np.arange(self.vocab_size)) if tied else self
        how = input_bits("int8"), self.backend.transposes_int8
        return network.replace(params=weight_layouts.round_to_int8(network.params, *how))

    def head_alone(self) -> "Network":
        """Returns the part of the network that `head` needs; the arrays are shared."""
        check_uses_backend(self.config, "drafting heads that share its head")
        embedder, decoder = self.params["token_embedder"], self.params["decoder"]
        head = {name: node for name, node in decoder.items() if name.startswith("logits_")}
        return self.replace(params={"token_embedder": embedder, "decoder": head})

    def teacher_forced(
        self,
        inputs: Inputs,
        input_lengths: PerRow,
        decoder_tokens: Tokens,
        encoded: Encoded | None = None,
    ) -> Logits:
        """Returns the logits of whole sequences, computed without a cache.

        Other arguments as for `prefill`.
        """
        mask = _make_mask(inputs, input_lengths)
        logits = self._apply("__call__", inputs, mask, decoder_tokens, encoded=encoded)
        return constrain_sharding(logits, self.rules)


def lay_out(params: dict, rules: ShardingRules, prefix: str = "") -> None:
    """Moves the arrays of a nested dict to their places on the mesh, one by one, in place.

    `prefix` is that of the names in `params`, with a "/" at its end.
    """
    for name, value in params.items():
        if isinstance(value, dict):
            lay_out(value, rules, f"{prefix}{name}/")
            continue
        sharding = rules.parameter_sharding(prefix + name, value.shape)
        if isinstance(value, jax.Array) and value.sharding.device_set == sharding.device_set:
            params[name] = jax.device_put(value, sharding)
        else:
            params[name] = read_parts(sharding, value.shape, lambda box: np.asarray(value)[box])


def is_decoder_only(model: Any) -> bool:
    """Returns whether a model has no encoder: its inputs are prompts, which outputs continue."""
    return model.config.decoder_only


def join(
    inputs: Int[np.ndarray, "B L"],
    input_lengths: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B T"],
) -> tuple[Int[np.ndarray, "B L+T"], Int[np.ndarray, "B T"]]:
    """Returns each row's input, cut at its length, followed by `tokens`; and their places."""
    places = input_lengths[:, None] + np.arange(tokens.shape[1])
    sequences = np.pad(inputs, ((0, 0), (0, tokens.shape[1])))
    np.put_along_axis(sequences, places, tokens, axis=1)
    return sequences, places


def check_positions(config: ModelConfig, length: int, whose: str = "tokens") -> None:
    """Raises ValueError, which begins with `whose`, unless a model has `length` positions."""
    if config.max_positions is not None and length > config.max_positions:
        got = f"sequences of up to {length} tokens, new ones included"
        raise mismatch_error(whose, got, f"at most num_positions = {config.max_positions}")


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
    logits = network._apply("__call__", sequences, places)
    return constrain_sharding(logits, network.rules)


def initial_params(module: FamilyModule, key: Key[Array, ""]) -> dict:
    """Makes random parameters in float32."""
    return module.init(key, *module.dummy_inputs())["params"]


@functools.partial(jax.jit, static_argnames=("module", "dtype", "rules"))
def random_params(
    key: Key[Array, ""], *, module: FamilyModule, dtype: str, rules: ShardingRules | None = None
) -> dict:
    """Makes random parameters in a dtype, on one device or divided over a mesh."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), initial_params(module, key))
    if rules is None:
        return params

    constrained = {
        name: jax.lax.with_sharding_constraint(leaf, rules.parameter_sharding(name, leaf.shape))
        for name, leaf in flatten(params).items()
    }
    return unflatten(constrained)
