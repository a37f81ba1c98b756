"""`Backend`: how a network runs on its devices, chosen once, when the network is made.

`Backend` itself runs everything in plain XLA, which is right on any device. The others replace
parts by kernels, and have caches in the layout that those kernels and their compilers prefer. The
kernels of accelerators are imported when they are first asked for: Pallas takes a quarter of a
second, which a process on a CPU does not need.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specdec_jax.backends import kv_cache, xla
from specdec_jax.backends.axes import ByHeads, Mask, PerRow, Query, States, Valid
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.backends.xla import AttentionShape, DecoderCall, Projected

_MAX_MOVED = 64  # slots that are moved one by one on a TPU


@dataclasses.dataclass(frozen=True)
class Backend:
    """A network in plain XLA, with caches in a CPU's layout; hashable, static under jit.

    Attributes:
      joins_weights: whether weights with the same input are one matrix: queries, keys and values of
        a self-attention, and the two inputs of a gated block.
      rules: how parameters and caches lie on a mesh; None: on one device.
      packs_weights: whether weights are `PackedWeight`s, for the CPU's own kernels. These skip
        positions that are not valid.
      transposes_int8: whether the numbers of weights in int8 are transposed, `[F, D]`.
      min_query_len: the fewest positions of a single row that a decoder call feeds.
      platform: where `run_fused_step` runs, as `jax.lax.platform_dependent` names it.
    """

    joins_weights: bool = False
    rules: ShardingRules | None = None
    packs_weights: ClassVar[bool] = False
    transposes_int8: ClassVar[bool] = False
    min_query_len: ClassVar[int] = 1
    platform: ClassVar[str] = "cpu"

    # Caches.

    def heads_per_tile(self, heads: AttentionShape) -> int | None:
        """Returns how many heads lie side by side in caches; None: one, in a CPU's layout."""
        return None

    def empty_cache(self, batch: int, slots: int, heads: AttentionShape) -> KVCache:
        """Makes the cache of one self-attention: zeros, of at least `slots` slots."""
        return KVCache.empty(batch, heads.kv_heads, slots, heads.features, heads.dtype)

    def cross_cache(
        self, key: Float[Array, "B L HK"], value: Float[Array, "B L HK"], heads: AttentionShape
    ) -> KVCache:
        """Makes the cache of a cross-attention of keys and values."""
        how = len(key), heads.features, self.heads_per_tile(heads)
        return KVCache(xla.split_heads(key, *how), xla.split_heads(value, *how))

    def widen(self, cache: KVCache, slots: int) -> KVCache:
        """Returns the cache with at least S = `slots` slots."""
        return cache.widen(slots)

    def append(self, cache: KVCache, key: ByHeads, value: ByHeads, positions: PerRow) -> KVCache:
        """Overwrites slots `positions[b] … positions[b] + T − 1` of every row.

        Later values are set to 0. `positions[b] + T` must not exceed S, since XLA clamps the start
        of a slice and would overwrite valid slots instead. The decode loop chooses S accordingly.

        A value that is not finite is stored as 0, and the same feature of its key as NaN: only
        queries that attend to the token become NaN. Others of the same call multiply its value by
        0, and a drafted token may never be committed.
        """
        key, value = _move_failures(key, value)
        valid = jnp.arange(cache.slots) < positions[:, None] + key.shape[2]
        valid = valid[:, None, :, None] if cache.value.ndim == 4 else valid[:, :, None]
        value = jnp.where(valid, kv_cache.write_slots(cache.value, value, positions, self.rules), 0)
        return KVCache(kv_cache.write_slots(cache.key, key, positions, self.rules), value)

    def move_slots(self, cache: KVCache, sources: Int[Array, "B M"], starts: PerRow) -> KVCache:
        """Copies the slots `sources` of every row to the slots from `starts` on."""
        key, value = self._take(cache.key, sources), self._take(cache.value, sources)
        return self._write(cache, key, value, starts)

    def _write(self, cache: KVCache, key: ByHeads, value: ByHeads, positions: PerRow) -> KVCache:
        key = kv_cache.write_slots(cache.key, key, positions, self.rules)
        return KVCache(key, kv_cache.write_slots(cache.value, value, positions, self.rules))

    def _take(self, buffer: Float[Array, "*B H S K"], sources: Int[Array, "B M"]) -> ByHeads:
        return kv_cache.take_slots(buffer, sources)

    # Decoder calls.

    def count_padding(self, batch: int, count: int) -> int:
        """Returns how many padding tokens are added to each row of a call over `count` tokens."""
        return 0

    def attend_to_cache(
        self, qkv: Projected, cache: KVCache, call: DecoderCall, bias: Any, heads: AttentionShape
    ) -> tuple[States, KVCache]:
        """Writes new keys and values to the cache, and attends to it.

        Args:
          qkv: queries, keys and values of T tokens for each row.
          cache: keys and values of earlier tokens.
          call: where the tokens lie.
          bias: position bias, added to the scores; None: nothing.
          heads: the attention's shape.

        Returns:
          The output, and the new cache.
        """
        heads_per_tile = self.heads_per_tile(heads)
        parts = xla.split_projected(qkv, cache.batch, heads, heads_per_tile)
        query, key, value = parts[0], parts[1][:, :, : call.count], parts[2][:, :, : call.count]
        query = xla.divide(query, heads.divisor)
        starts = call.positions if call.nodes is None else call.nodes.starts
        cache = self.append(cache, key, value, starts)
        return xla.attend(query, cache, call.mask, bias, heads, heads_per_tile, call.more), cache

    def attend_to_encoded(
        self, query: Query, cross: KVCache, mask: Mask, valid: Valid, heads: AttentionShape
    ) -> States:
        """Attends to the encoder's output, whose tokens are True in `mask`; `valid` as in calls."""
        heads_per_tile = self.heads_per_tile(heads)
        if heads_per_tile is not None:
            # Else a TPU's compiler would transpose the product, and for that copy its weight at the
            # beginning of every program.
            barrier = jax.lax.optimization_barrier
            query = jax.lax.platform_dependent(query, tpu=barrier, default=lambda query: query)
        query = xla.split_queries(query, cross.batch, heads, heads_per_tile)
        query = xla.divide(query, heads.divisor)
        return xla.attend(query, cross, mask[:, None, None, :], None, heads, heads_per_tile)

    def attend_to_inputs(
        self, qkv: Projected, mask: Mask, bias: Float[Array, "H Z"] | None, heads: AttentionShape
    ) -> States:
        """Attends to all tokens of an encoder's inputs, which are True in `mask`.

        With a window, only to those inside. `bias` is that of each distance from a query to a key,
        1 − L … L − 1.
        """
        places, seen = np.arange(mask.shape[1]), mask[:, None, None, :]
        back = places[:, None] - places
        if bias is not None:
            bias = bias[None, :, len(places) - 1 - back]
        if heads.window is not None:
            seen = seen & (back < heads.window) & (back >= -heads.ahead)
        return xla.attend_to_sequence(qkv, seen, bias, heads)

    def pairs_are_free(self, cache: Any) -> bool:
        """Returns whether XLA's decoder call over two positions takes no longer than over one."""
        return False

    def supports_fused_step(
        self, network: Any, queries: int, cache: Any, layers: int | None
    ) -> bool:
        """Returns whether kernels run a whole decoder call of a network over `queries` tokens."""
        return False

    def run_fused_step(
        self, network: Any, x: States, positions: PerRow, cache: Any, layers: int | None
    ) -> tuple[States, Any]:
        """Runs those kernels over tokens with the embeddings `x`.

        The other arguments are those of `FamilyModule.decode_states`.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class CPUBackend(Backend):
    """A float32 network on one CPU, by the package's own kernels."""

    joins_weights: bool = True
    packs_weights: ClassVar[bool] = True

    def move_slots(self, cache: KVCache, sources: Int[Array, "B M"], starts: PerRow) -> KVCache:
        """Does what `Backend.move_slots` does, in place; XLA would copy the whole cache."""
        return KVCache(*packed_weights.move_slots(cache.key, cache.value, sources, starts))

    def attend_to_cache(
        self, qkv: Projected, cache: KVCache, call: DecoderCall, bias: Any, heads: AttentionShape
    ) -> tuple[States, KVCache]:
        # Positions that are not valid need not be cleared: the next product does not read them.
        where = call.positions if call.nodes is None else call.nodes
        scoring = _read_scoring(heads)
        if call.more is not None:
            encoded, mask = call.more
            scoring = scoring._replace(more=(encoded.key, encoded.value, _count_tokens(mask)))
        arrays = qkv[0], cache.key, cache.value, bias, where, scoring, call.valid
        attended, *cached = packed_weights.attend_to_cache(*arrays, clear=False)
        return attended, KVCache(*cached)

    def attend_to_encoded(
        self, query: Query, cross: KVCache, mask: Mask, valid: Valid, heads: AttentionShape
    ) -> States:
        arrays = query, cross.key, cross.value, _count_tokens(mask), valid
        return packed_weights.attend_to_encoded(*arrays, False, _read_scoring(heads))

    def attend_to_inputs(
        self, qkv: Projected, mask: Mask, bias: Float[Array, "H Z"] | None, heads: AttentionShape
    ) -> States:
        bias = jnp.zeros((heads.count, 0)) if bias is None else bias
        arrays = qkv[0], bias, _count_tokens(mask), _read_scoring(heads), heads.features
        return packed_weights.attend_to_inputs(*arrays)


class AcceleratorBackend(Backend):
    """What GPUs and TPUs have in common: caches of whole tiles, whose stale slots are not cleared.

    A product of a single row would not use an accelerator's units for matrices, and would be added
    up in the dtype of the operands. So more positions are fed for one.
    """

    def heads_per_tile(self, heads: AttentionShape) -> int:
        """Returns how many heads lie side by side in caches."""
        return 1

    def empty_cache(self, batch: int, slots: int, heads: AttentionShape) -> KVCache:
        """Makes a cache of whole tiles.

        For a single row it has more slots, by which a call of `Network.decode` may be wider than
        was asked for.
        """
        side_by_side, more = self.heads_per_tile(heads), kv_cache.ROWS - 1 if batch == 1 else 0
        shape = batch, heads.kv_heads // side_by_side, _whole_tiles(slots + more)
        return KVCache.empty(*shape, side_by_side * heads.features, heads.dtype)

    def widen(self, cache: KVCache, slots: int) -> KVCache:
        """Returns the cache with at least S = `slots` slots, in whole tiles."""
        return cache.widen(_whole_tiles(slots))

    def append(self, cache: KVCache, key: ByHeads, value: ByHeads, positions: PerRow) -> KVCache:
        """Does what `Backend.append` does, but leaves the values past the new ones."""
        key, value = _move_failures(key, value)
        if len(key) > 1 and self.rules is None:
            key, value = (
                jax.lax.platform_dependent(x, tpu=kv_cache.lay_out_by_rows, default=lambda x: x)
                for x in (key, value)
            )
        return self._write(cache, key, value, positions)

    @property
    def fused_kernels(self) -> Any:
        """The module of kernels that run a whole decoder call."""
        raise NotImplementedError

    def supports_fused_step(
        self, network: Any, queries: int, cache: Any, layers: int | None
    ) -> bool:
        shape = cache.layers[0].batch, queries
        return self.fused_kernels.supports_call(
            network.module, network.params, shape, cache, layers
        )

    def run_fused_step(
        self, network: Any, x: States, positions: PerRow, cache: Any, layers: int | None
    ) -> tuple[States, Any]:
        run = self.fused_kernels.decode_states
        return run(network.module, network.params, x, positions, cache, layers)

    def _take(self, buffer: Float[Array, "*B H S K"], sources: Int[Array, "B M"]) -> ByHeads:
        if self.rules is not None or sources.size > _MAX_MOVED:
            return kv_cache.take_slots(buffer, sources)
        return jax.lax.platform_dependent(
            buffer, sources, tpu=kv_cache.take_slots_one_by_one, default=kv_cache.take_slots
        )


@dataclasses.dataclass(frozen=True)
class GPUBackend(AcceleratorBackend):
    """A network on GPUs, whose attention is a kernel where `gpu.attention.supports_call`.

    A layer of a call over few positions of a small T5 is four kernels.
    """

    transposes_int8: ClassVar[bool] = True
    min_query_len: ClassVar[int] = 2
    platform: ClassVar[str] = "cuda"

    def _is_one_kernel(
        self, query: Float[Array, "*N D"], cache: KVCache, heads: AttentionShape
    ) -> bool:
        from specdec_jax.backends.gpu import attention as gpu_attention

        queries, suits = math.prod(query.shape[:-1]) // cache.batch, heads.suits_kernels
        return self.rules is None and suits and gpu_attention.supports_call(cache, queries)

    def attend_to_cache(
        self, qkv: Projected, cache: KVCache, call: DecoderCall, bias: Any, heads: AttentionShape
    ) -> tuple[States, KVCache]:
        from specdec_jax.backends.gpu import attention as gpu_attention

        by_layers = super().attend_to_cache
        if call.nodes is not None or len(qkv) > 1 or not self._is_one_kernel(qkv[0], cache, heads):
            return by_layers(qkv, cache, call, bias, heads)

        def by_xla(qkv, cache, bias, positions, mask):
            return by_layers((qkv,), cache, DecoderCall(positions, mask), bias, heads)

        def by_kernel(qkv, cache, bias, positions, mask):
            arrays = qkv, cache.key, cache.value, bias, positions
            attended, key, value = gpu_attention.attend_to_cache(*arrays, heads.divisor)
            return attended, KVCache(key, value)

        joint = qkv[0].reshape(cache.batch, -1, qkv[0].shape[-1])
        given = joint, cache, bias, call.positions, call.mask
        return jax.lax.platform_dependent(*given, cuda=by_kernel, default=by_xla)

    def attend_to_encoded(
        self, query: Query, cross: KVCache, mask: Mask, valid: Valid, heads: AttentionShape
    ) -> States:
        from specdec_jax.backends.gpu import attention as gpu_attention

        by_layers = super().attend_to_encoded
        if not self._is_one_kernel(query, cross, heads):
            return by_layers(query, cross, mask, valid, heads)

        def by_xla(query, cross, mask):
            return by_layers(query, cross, mask, valid, heads)

        def by_kernel(query, cross, mask):
            query = query.reshape(cross.batch, -1, query.shape[-1])
            query, lengths = xla.divide(query, heads.divisor), _count_tokens(mask)
            return gpu_attention.attend_to_encoded(query, cross.key, cross.value, lengths)

        return jax.lax.platform_dependent(query, cross, mask, cuda=by_kernel, default=by_xla)

    def pairs_are_free(self, cache: Any) -> bool:
        """Returns True: a call over one position is fed two."""
        return True

    @property
    def fused_kernels(self) -> Any:
        from specdec_jax.backends.gpu import fused_layers

        return fused_layers


@dataclasses.dataclass(frozen=True)
class TPUBackend(AcceleratorBackend):
    """A network on TPUs, whose call over few positions of a small T5 is one kernel.

    For eight rows, a tile of float32, a TPU's compiler fetches more of the weights ahead than for
    two: by its estimate a plain step of T5-XXL on a v4 takes 9.5 ms, and 10.3 over two positions.
    """

    min_query_len: ClassVar[int] = kv_cache.ROWS
    platform: ClassVar[str] = "tpu"

    def heads_per_tile(self, heads: AttentionShape) -> int:
        """Returns how many heads lie side by side: as many as fill a tile and divide its number."""
        parts = 1 if self.rules is None else self.rules.parts
        most = kv_cache.TILE[1] // heads.features
        counts = range(max(most, 1), 0, -1)
        return next(count for count in counts if heads.kv_heads % (count * parts) == 0)

    def count_padding(self, batch: int, count: int) -> int:
        """Returns how many tokens of padding are added to each row of a call over `count` tokens.

        Without whole tiles a TPU's compiler changes layouts in every layer. Several rows are padded
        only if that adds at most a seventh.
        """
        padding = -count % kv_cache.ROWS if count > kv_cache.ROWS else 0
        return padding if batch == 1 or 7 * padding <= count else 0

    def pairs_are_free(self, cache: Any) -> bool:
        """Returns whether XLA's decoder call over two positions takes no longer than over one.

        Not so for several rows: every row's positions are in tiles of their own, and XLA rearranges
        them. By its estimate a step of T5-small over 32 rows takes 0.43 ms over two positions, 0.30
        over one.
        """
        return cache.layers[0].batch == 1

    @property
    def fused_kernels(self) -> Any:
        from specdec_jax.backends.tpu import fused_mesh

        return fused_mesh


def choose_backend(
    platform: str, rules: ShardingRules | None = None, packs_weights: bool = False
) -> Backend:
    """Returns the backend of a network.

    Args:
      platform: "cpu", "tpu" or another accelerator.
      rules: how the network lies on a mesh; None: on one device. Weights with the same input are
        not joined if the mesh divides them by their outputs.
      packs_weights: whether the CPU's own kernels are used.
    """
    if packs_weights:
        return CPUBackend()
    kind = {"cpu": Backend, "tpu": TPUBackend}.get(platform, GPUBackend)
    return kind(rules is None or rules.parts == 1, rules)


def _move_failures(key: ByHeads, value: ByHeads) -> tuple[ByHeads, ByHeads]:
    """Returns finite values: where one was not, the key has NaN in its place."""
    finite = jnp.isfinite(value)
    return jnp.where(finite, key, jnp.nan), jnp.where(finite, value, 0)


def _read_scoring(heads: AttentionShape) -> packed_weights.Scoring:
    """Returns how queries attend, for the CPU's own kernels."""
    return packed_weights.Scoring(heads.divisor, heads.cap, heads.window, heads.ahead)


def _count_tokens(mask: Mask) -> PerRow:
    """Returns how many tokens each row of a mask has."""
    return jnp.sum(mask.astype(jnp.int32), axis=-1)


def _whole_tiles(slots: int) -> int:
    """Returns `slots`, rounded up to whole tiles."""
    return -(-slots // kv_cache.TILE[0]) * kv_cache.TILE[0]
