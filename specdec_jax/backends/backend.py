"""`Backend`: how a network runs on its devices, chosen once, when the network is made.

`Backend` itself runs everything in plain XLA, which is right on any device. The others replace
parts by kernels, and have caches in the layout that those kernels and their compilers prefer.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specdec_jax.backends import xla
from specdec_jax.backends.axes import Mask, PerRow, States
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.gpu import attention as gpu_attention
from specdec_jax.backends.kv_cache import ROWS, TILE, KVCache
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.backends.tpu import fused_mesh
from specdec_jax.backends.xla import AttentionShape, DecoderCall, Projected


@dataclasses.dataclass(frozen=True)
class Backend:
    """A network in plain XLA, with caches in a CPU's layout; hashable, static under jit.

    Attributes:
      joins_weights: whether weights with the same input are one matrix: queries, keys and values of
        a self-attention, and the two inputs of a gated block.
      rules: how parameters and caches lie on a mesh; None: on one device.
      packs_weights: whether weights are `PackedWeight`, for the CPU's own kernels. These skip
        positions that are not valid.
      min_query_len: the fewest positions of a single row that a decoder call feeds.
      tile_queries: as for `KVCache`.
    """

    joins_weights: bool = False
    rules: ShardingRules | None = None
    packs_weights: ClassVar[bool] = False
    min_query_len: ClassVar[int] = 1
    tile_queries: ClassVar[bool] = False

    def heads_per_tile(self, heads: AttentionShape) -> int | None:
        """Returns how many heads lie side by side in caches, as for `KVCache`."""
        return None

    def empty_cache(self, batch: int, slots: int, heads: AttentionShape) -> KVCache:
        """Makes the empty cache of one self-attention, of at least `slots` slots."""
        shape = batch, heads.count, slots, heads.features
        cache = KVCache.empty(*shape, heads.dtype, self.heads_per_tile(heads))
        return cache.replace(rules=self.rules, tile_queries=self.tile_queries)

    def cross_cache(
        self, key: Float[Array, "B L HK"], value: Float[Array, "B L HK"], heads: AttentionShape
    ) -> KVCache:
        """Makes the cache of a cross-attention of keys and values."""
        heads_per_tile = self.heads_per_tile(heads)
        key, value = (
            xla.split_heads(part, len(part), heads.features, heads_per_tile)
            for part in (key, value)
        )
        return KVCache(key, value, self.rules, heads_per_tile, self.tile_queries)

    def attend_to_cache(
        self, qkv: Projected, cache: KVCache, call: DecoderCall, bias: Any, heads: AttentionShape
    ) -> tuple[States, KVCache]:
        """Does what `xla.attend_to_cache` does."""
        return xla.attend_to_cache(qkv, cache, call, bias, heads)

    def attend_to_encoded(
        self, query: Float[Array, "*N HK"], cross: KVCache, mask: Mask, call: DecoderCall, heads
    ) -> States:
        """Does what `xla.attend_to_encoded` does."""
        return xla.attend_to_encoded(query, cross, mask, heads)

    def attend_to_inputs(
        self, qkv: Projected, mask: Mask, bias: Float[Array, "L H L"], heads: AttentionShape
    ) -> States:
        """Attends to all tokens of an encoder's inputs, which are True in `mask`."""
        bias = bias.transpose(1, 0, 2)[None]
        return xla.attend_to_sequence(qkv, mask[:, None, None, :], bias, heads)

    def pairs_are_free(self, cache: Any) -> bool:
        """Returns whether XLA's decoder call over two positions takes no longer than over one."""
        return False

    def runs_whole_step(
        self, module: Any, params: dict, queries: int, cache: Any, layers: int | None
    ) -> bool:
        """Returns whether a decoder call over so many positions is one kernel."""
        return False

    def decode_states(
        self, module: Any, params: dict, x: States, positions: PerRow, cache: Any, layers
    ) -> tuple[States, Any]:
        """Runs that kernel; arguments as for `FamilyModule.decode_states`, `x` the embeddings."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class CPUBackend(Backend):
    """A float32 network on one CPU, by the package's own kernels."""

    joins_weights: bool = True
    packs_weights: ClassVar[bool] = True

    def attend_to_cache(self, qkv, cache, call, bias, heads):
        # Positions that are not valid need not be cleared: the next product does not read them.
        how = dict(divisor=heads.divisor, valid=call.valid, clear=False)
        arrays = qkv[0], cache.key, cache.value, bias
        if call.nodes is None:
            found = packed_weights.attend_to_cache(*arrays, call.positions, **how)
        else:
            found = packed_weights.attend_to_nodes(*arrays, call.nodes, **how)
        attended, key, value = found
        return attended, cache.replace(key=key, value=value)

    def attend_to_encoded(self, query, cross, mask, call, heads):
        return packed_weights.attend_to_encoded(
            query, cross.key, cross.value, _lengths(mask), call.valid, clear=False
        )

    def attend_to_inputs(self, qkv, mask, bias, heads):
        return packed_weights.attend_to_inputs(qkv[0], bias, _lengths(mask))


@dataclasses.dataclass(frozen=True)
class GPUBackend(Backend):
    """A network on GPUs, whose attention is a kernel where `gpu.attention.fits`.

    A product of a single row would not use an accelerator's units for matrices, and would be added
    up in the dtype of the operands. So two positions are fed for one.
    """

    min_query_len: ClassVar[int] = 2

    def heads_per_tile(self, heads: AttentionShape) -> int:
        return 1

    def attend_to_cache(self, qkv, cache, call, bias, heads):
        takes = call.nodes is None and len(qkv) == 1
        if not (takes and gpu_attention.fits(cache, _count_queries(qkv[0], cache))):
            return super().attend_to_cache(qkv, cache, call, bias, heads)

        def by_xla(qkv, key, value, bias, positions, mask):
            before, same = cache.replace(key=key, value=value), DecoderCall(positions, mask)
            attended, after = xla.attend_to_cache((qkv,), before, same, bias, heads)
            return attended, after.key, after.value

        def by_kernel(qkv, key, value, bias, positions, mask):
            return gpu_attention.attend_to_cache(qkv, key, value, bias, positions, heads.divisor)

        joint = qkv[0].reshape(cache.batch, -1, qkv[0].shape[-1])
        given = joint, cache.key, cache.value, bias, call.positions, call.mask
        attended, key, value = jax.lax.platform_dependent(*given, cuda=by_kernel, default=by_xla)
        return attended, cache.replace(key=key, value=value)

    def attend_to_encoded(self, query, cross, mask, call, heads):
        if not gpu_attention.fits(cross, _count_queries(query, cross)):
            return super().attend_to_encoded(query, cross, mask, call, heads)

        def by_xla(query, key, value, mask):
            return xla.attend_to_encoded(query, cross.replace(key=key, value=value), mask, heads)

        def by_kernel(query, key, value, mask):
            query = query.reshape(cross.batch, -1, query.shape[-1])
            return gpu_attention.attend_to_encoded(query, key, value, _lengths(mask))

        given = query, cross.key, cross.value, mask
        return jax.lax.platform_dependent(*given, cuda=by_kernel, default=by_xla)

    def pairs_are_free(self, cache: Any) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class TPUBackend(Backend):
    """A network on TPUs, whose call over few positions of a small T5 is one kernel.

    For eight rows, a tile of float32, a TPU's compiler fetches more of the weights ahead than for
    two: by its estimate a plain step of T5-XXL on a v4 takes 9.5 ms, and 10.3 over two positions.
    """

    min_query_len: ClassVar[int] = ROWS
    tile_queries: ClassVar[bool] = True

    def heads_per_tile(self, heads: AttentionShape) -> int:
        parts, most = (1 if self.rules is None else self.rules.parts), TILE[1] // heads.features
        counts = range(max(most, 1), 0, -1)
        return next(count for count in counts if heads.count % (count * parts) == 0)

    def pairs_are_free(self, cache: Any) -> bool:
        """Returns whether XLA's decoder call over two positions takes no longer than over one.

        Not so for several rows: every row's positions are in tiles of their own, and XLA rearranges
        them. By its estimate a step of T5-small over 32 rows takes 0.43 ms over two positions, 0.30
        over one.
        """
        return cache.layers[0].batch == 1

    def runs_whole_step(self, module, params, queries, cache, layers):
        shape = cache.layers[0].batch, queries
        return fused_mesh.fits(module, params, shape, cache, layers)

    def decode_states(self, module, params, x, positions, cache, layers):
        return fused_mesh.decode_states(module, params, x, positions, cache, layers=layers)


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


def _count_queries(x: Float[Array, "*N D"], cache: KVCache) -> int:
    """Returns T, the tokens of each row."""
    return math.prod(x.shape[:-1]) // cache.batch


def _lengths(mask: Mask) -> PerRow:
    return jnp.sum(mask.astype(jnp.int32), axis=-1)
