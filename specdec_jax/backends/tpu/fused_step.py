"""A call of a small T5's decoder over one or two positions as one kernel for TPUs, in Pallas.

XLA makes dozens of kernels of every layer, and in each the multiplying waits for the weights. Here
all layers are one kernel, in which weights and caches stream from HBM to VMEM while others are
multiplied. VMEM holds what one layer reads, in parts (`_layer_arrays`), or a half or a quarter of a
feed-forward block that is too large. As soon as a part has been used, the copy of what follows
begins in its place, the next layer's or the next piece, so that copies hardly ever pause.

Numbers are rounded where the layers of `blocks.py` round them. The head is left to XLA: it is a
single product.
"""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from specdec_jax.backends.axes import PerRow, States
from specdec_jax.backends.cpu import native
from specdec_jax.backends.cpu.packed_weights import is_weight_object
from specdec_jax.backends.kv_cache import TILE, KVCache
from specdec_jax.backends.matmul import multiply
from specdec_jax.backends.xla import ACTIVATION_FUNCTIONS, MASKED

try:
    from jax.experimental.pallas import tpu as pltpu
except ImportError:
    pltpu = None

_NORMS = ("self_attention", "cross_attention", "mlp")
MOST_ROWS, _MOST_POSITIONS = 8, 2
_PIECES = (1, 2, 4)  # of a feed-forward block
_VMEM = 16 * 2**20  # bytes of VMEM that a v4's core has
_MOST_BUFFERS = 14 * 2**20  # of them for `_Call.scratch`; the compiler needs the others

Ref = Any  # a reference to an array in some memory, or a tree of them
Rows = Float32[Array, "M F"]  # one row for each token of a call, M = B · T


class _Call(NamedTuple):
    """What a call reads from HBM, and what it is compiled for.

    Attributes:
      parts: by layer and part, the weights, and the keys and values of cross-attention.
      caches: keys and values of each layer's self-attention.
      biases: as `DecoderCache.position_bias`.
      config: the network's shape.
      batch, positions: B and T.
      pieces: in how many pieces, by hidden features, the feed-forward block is copied and computed.
    """

    parts: list[dict[str, list]]
    caches: list[list]
    biases: list
    config: Any
    batch: int
    positions: int
    pieces: int = 1

    @classmethod
    def select(
        cls, module: Any, params: dict, shape: tuple[int, ...], cache: Any, layers: int | None
    ) -> "_Call":
        """Selects what the first `layers` layers (None: all) read, in as few pieces as VMEM allows.

        `shape` is (B, T).
        """
        count, decoder = layers or module.config.num_decoder_layers, params["decoder"]
        parts = [_layer_arrays(decoder[f"layers_{i}"], cache.cross[i]) for i in range(count)]
        caches = [_merge_rows_and_heads(layer) for layer in cache.layers[:count]]
        call = cls(parts, caches, list(cache.position_bias), module.config, *shape)
        *fewer, most = (call._replace(pieces=count) for count in _PIECES)
        return next((call for call in fewer if call.fits_memory()), most)

    @property
    def rows(self) -> int:
        """M, the number of tokens."""
        return self.batch * self.positions

    @property
    def slots(self) -> int:
        """S, the slots of a cache."""
        return self.caches[0][0].shape[1]

    @property
    def window(self) -> int:
        """Number of a cache's slots, in whole tiles, among which a row's new ones are."""
        return min(self.slots, TILE[0] * self.positions)

    @property
    def width(self) -> int:
        """Number of hidden features in a piece of the feed-forward block."""
        return self.config.mlp_dim // self.pieces

    def scratch(self) -> dict[str, Any]:
        """Returns the buffers in VMEM, and the semaphores on which copies to them are awaited."""
        keys, heads = self.caches[0][0], self.config.num_heads
        width, count = self.config.emb_dim, len(self.config.mlp_activations)

        def make_buffer(*shape: int, dtype: DTypeLike = keys.dtype) -> Any:
            return pltpu.VMEM(shape, dtype)

        sources = {"cache": self.caches[0]} | self.parts[0]
        parts = jax.tree.map(lambda leaf: make_buffer(*leaf.shape), sources)
        parts["wi"] = [make_buffer(count, width, self.width)]
        parts["wo"] = [make_buffer(self.width, width)]
        precise = functools.partial(make_buffer, dtype=jnp.float32)
        return dict(
            parts=parts,
            windows=[make_buffer(len(keys), self.window, keys.shape[2])] * 2,
            shifted=[precise(self.positions, *bias.shape[1:]) for bias in self.biases],
            biases=precise(len(self.biases), self.rows, heads, self.slots),
            attended=precise(self.rows, heads * self.config.head_dim),
            arrived=dict.fromkeys(parts, pltpu.SemaphoreType.DMA),
            written=pltpu.SemaphoreType.DMA,
        )

    def fits_memory(self) -> bool:
        """Returns whether the kernel takes these dtypes and shapes, and VMEM holds its buffers."""
        leaves, dtype = jax.tree.leaves((self.parts, self.caches)), jnp.dtype(self.config.dtype)
        whole = all(leaf.dtype == dtype and leaf.shape[-1] % TILE[1] == 0 for leaf in leaves)
        whole = whole and self.config.mlp_dim % (self.pieces * TILE[1]) == 0
        buffers = [leaf for leaf in jax.tree.leaves(self.scratch()) if hasattr(leaf, "shape")]
        return whole and sum(_buffer_bytes(buffer) for buffer in buffers) <= _MOST_BUFFERS


def _buffer_bytes(buffer: Any) -> int:
    """Returns the bytes of a buffer, whose tiles are whole."""
    lines, columns = (-(-size // tile) * tile for size, tile in zip(buffer.shape[-2:], TILE))
    return math.prod(buffer.shape[:-2]) * lines * columns * jnp.dtype(buffer.dtype).itemsize


def _layer_arrays(layer: dict, cross: KVCache) -> dict[str, list]:
    """Returns a layer's arrays in the order of their use; those of one part are fetched at once."""
    own, encoded, mlp = layer["self_attention"], layer["encoder_decoder_attention"], layer["mlp"]
    return {
        "self": [own["qkv"]["kernel"], own["out"]["kernel"]],
        "cross": [
            encoded["query"]["kernel"],
            encoded["out"]["kernel"],
            *_merge_rows_and_heads(cross),
        ],
        "wi": [mlp["wi_fused" if "wi_fused" in mlp else "wi"]["kernel"]],
        "wo": [mlp["wo"]["kernel"]],
    }


def _stack_norms(decoder: dict, layers: int) -> Float32[Array, "N D"]:
    """Returns the scales of the layers' norms, one after the other, and that of the final norm."""
    norms = [
        decoder[f"layers_{i}"][f"pre_{name}_layer_norm"] for i in range(layers) for name in _NORMS
    ]
    scales = jnp.concatenate([norm["scale"] for norm in (*norms, decoder["decoder_norm"])])
    return scales.astype(jnp.float32).reshape(len(norms) + 1, -1)


def _merge_rows_and_heads(cache: KVCache) -> list[Float[Array, "BH S K"]]:
    """Returns keys and values, with the axes of rows and heads as one."""
    return [x.reshape(-1, *x.shape[-2:]) for x in (cache.key, cache.value)]


def supports_module(module: Any) -> bool:
    """Returns whether there is a kernel for such a module."""
    return (
        pltpu is not None
        and os.environ.get(native.SETTING) != "off"
        and module.config.family == "t5"
        and not module.config.matmul_dtype
        and module.backend.joins_weights
    )


def supports_call(
    module: Any, params: dict, shape: tuple[int, int], cache: Any, layers: int | None
) -> bool:
    """Returns whether a call over B × T tokens runs as this kernel on one TPU.

    The network is a T5 whose layers fit VMEM, and there are few rows. `shape` is (B, T), the other
    arguments are those of `decode_states`.
    """
    if not supports_module(module) or shape[0] > MOST_ROWS or shape[1] > _MOST_POSITIONS:
        return False
    weights = jax.tree.leaves(params["decoder"], is_leaf=is_weight_object)
    in_int8 = any(map(is_weight_object, weights))
    return not in_int8 and _Call.select(module, params, shape, cache, layers).fits_memory()


def decode_states(
    module: Any,
    params: dict,
    x: States,
    positions: PerRow,
    cache: Any,
    layers: int | None = None,
    interpret: Any = False,
) -> tuple[States, Any]:
    """Does what `FamilyModule.decode_states` does, where `supports_call`.

    Args:
      module, params: the network's.
      x: embeddings of the tokens.
      cache: the decoder's cache.
      layers: number of decoder layers to run; None: all.
      interpret: as for `pallas_call`: how a CPU runs the kernel, in tests.
    """
    call = _Call.select(module, params, x.shape[:2], cache, layers)
    spaces = pltpu.SMEM, pltpu.VMEM, pl.ANY
    scalars, vmem, hbm = (pl.BlockSpec(memory_space=space) for space in spaces)
    lengths = jnp.sum(cache.cross_mask, axis=1, dtype=jnp.int32)
    x, shape = x.reshape(call.rows, -1), x.shape
    small = positions, lengths, x, _stack_norms(params["decoder"], len(call.parts))
    large = call.biases, call.parts, call.caches
    first, leaves = len(small) + len(jax.tree.leaves(large[:-1])), jax.tree.leaves(large[1:])
    out = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, call.caches))
    states, written = pl.pallas_call(
        lambda *refs: _Kernel(call, refs).run(),
        out_shape=out,
        in_specs=(scalars, scalars, vmem, vmem, *jax.tree.map(lambda _: hbm, large)),
        out_specs=(vmem, jax.tree.map(lambda _: hbm, call.caches)),
        scratch_shapes=[call.scratch()],
        input_output_aliases={first + i: 1 + i for i in range(2 * len(call.caches))},
        # With checks of the copies' bounds, the program of a layer would be half as long again.
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM, disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=2 * call.rows * sum(leaf.size for leaf in leaves),
            transcendentals=0,
            bytes_accessed=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        ),
        interpret=interpret,
        name="fused_step",
    )(*small, *large)
    new = [
        old.replace(key=key.reshape(old.key.shape), value=value.reshape(old.value.shape))
        for old, (key, value) in zip(cache.layers, written)
    ]
    return states.reshape(shape), cache.replace(layers=(*new, *cache.layers[len(new) :]))


class _Kernel:
    """The kernel, whose arrays are references to SMEM, VMEM and HBM.

    All numbers that it computes with are float32, since a v4 adds no others.
    """

    def __init__(self, call: _Call, refs: Sequence[Ref]):
        """`refs` are the arguments of `pallas_call`, its results, and `_Call.scratch`."""
        self.call, self.dtype = call, jnp.dtype(call.config.dtype)
        self.positions, self.lengths, self.x, self.norms, self.biases, *refs = refs
        parts, caches, self.states, self.written, self.scratch = refs
        self.sources = [{"cache": cache} | part for part, cache in zip(parts, caches)]

    def run(self) -> None:
        """Runs all layers and the final norm."""
        for copy in self._bias_copies():
            copy.start()
        for name in self.sources[0]:
            for copy in self._fetches(0, name):
                copy.start()
        self._wait_for(self._bias_copies())
        self._slice_biases()
        x = jax.lax.fori_loop(0, len(self.sources), self._layer, self.x[...].astype(jnp.float32))
        self._wait_for(self._writes(0))
        self.states[...] = self._normed(x, 3 * len(self.sources)).astype(self.dtype)

    def _layer(self, i: Int32[Array, ""], x: Rows) -> Rows:
        """Runs a layer; each block ends by fetching what the same block of the next layer reads."""
        qkv, out = self._arrived("self")
        query, key, value = jnp.split(self._product(self._normed(x, 3 * i), qkv), 3, axis=1)
        keys, values = self._arrived("cache")
        pl.when(i > 0)(lambda: self._wait_for(self._writes(0)))
        self._append(key, value, keys, values)
        self._start(i, self._writes)
        ends = [self.positions[row] + t + 1 for row, t in self._tokens()]
        bias = self.scratch["biases"].at[0 if len(self.biases) == 1 else i]
        x = self._rounded(x + self._product(self._attend(query, keys, values, ends, bias), out))
        self._fetch(i + 1, "self", "cache")

        weight, out, keys, values = self._arrived("cross")
        query = self._product(self._normed(x, 3 * i + 1), weight)
        ends = [self.lengths[row] for row, _ in self._tokens()]
        x = self._rounded(x + self._product(self._attend(query, keys, values, ends), out))
        self._fetch(i + 1, "cross")

        x, before = self._normed(x, 3 * i + 2), x
        added = sum(self._feed_forward(i, x, piece) for piece in range(self.call.pieces))
        return self._rounded(before + self._rounded(added))

    def _feed_forward(self, i: Int32[Array, ""], x: Rows, piece: int) -> Rows:
        """Returns what a piece of the feed-forward block of layer `i` adds."""
        following = (i, piece + 1) if piece + 1 < self.call.pieces else (i + 1, 0)
        (weights,) = self._arrived("wi")
        names = self.call.config.mlp_activations
        factors = [
            self._rounded(ACTIVATION_FUNCTIONS[name](self._product(x, weights.at[k])))
            for k, name in enumerate(names)
        ]
        self._fetch(following[0], "wi", piece=following[1])
        (weight,) = self._arrived("wo")
        hidden = math.prod(factors[1:], start=factors[0]).astype(self.dtype)
        found = multiply(hidden, weight[...], ((1,), (0,)))
        self._fetch(following[0], "wo", piece=following[1])
        return found

    # Copies. Each is described anew where it is awaited: what counts there is its size.

    def _fetches(self, layer: int, name: str, piece: int = 0) -> Iterator[Any]:
        """Yields the copies of a part of a layer to VMEM.

        `piece` is that of the feed-forward block.
        """
        call, sources, buffers = self.call, self.sources[layer][name], self.scratch["parts"][name]
        if name in ("wi", "wo"):
            count = len(call.config.mlp_activations) if name == "wi" else 1
            starts = [k * call.config.mlp_dim + piece * call.width for k in range(count)]
            features = [pl.ds(start, call.width) for start in starts]
            if name == "wi":
                sources = [sources[0].at[:, own] for own in features]
                buffers = [buffers[0].at[k] for k in range(count)]
            else:
                sources = [sources[0].at[features[0]]]
        for source, buffer in zip(sources, buffers):
            yield pltpu.make_async_copy(source, buffer, self.scratch["arrived"][name])

    def _fetch(self, layer: Int32[Array, ""], *names: str, piece: int = 0) -> None:
        """Starts to copy parts of a layer to VMEM, if there is such a layer."""
        self._start(
            layer, lambda i: (copy for name in names for copy in self._fetches(i, name, piece))
        )

    def _arrived(self, name: str) -> list:
        """Waits for a part of the layer and returns its buffers."""
        self._wait_for(self._fetches(0, name))
        return self.scratch["parts"][name]

    def _writes(self, layer: int) -> Iterator[Any]:
        """Yields the copies of each row's window to the caches of a layer."""
        for cache, window in zip(self.written[layer], self.scratch["windows"]):
            heads = len(cache) // self.call.batch
            for row in range(self.call.batch):
                own, slots = pl.ds(row * heads, heads), pl.ds(self._window(row), self.call.window)
                source, place = window.at[own], cache.at[own, slots]
                yield pltpu.make_async_copy(source, place, self.scratch["written"])

    def _bias_copies(self) -> Iterator[Any]:
        """Yields the copies of the shifted rows of the position biases."""
        for bias, buffer in zip(self.biases, self.scratch["shifted"]):
            source = bias.at[pl.ds(0, self.call.positions)]
            yield pltpu.make_async_copy(source, buffer, self.scratch["written"])

    def _start(self, layer: Int32[Array, ""], copies: Callable[[int], Iterator[Any]]) -> None:
        """Starts the copies of the layer with a number that is known only when the kernel runs."""
        for i in range(len(self.sources)):

            @pl.when(layer == i)
            def start(i: int = i) -> None:
                for copy in copies(i):
                    copy.start()

    def _wait_for(self, copies: Iterable[Any]) -> None:
        for copy in copies:
            copy.wait()

    # Caches and attention.

    def _slice_biases(self) -> None:
        """Does what `slice_biases` does, for the tokens of the call."""
        for i, shifted in enumerate(self.scratch["shifted"]):
            for token, (row, t) in enumerate(self._tokens()):
                left, width = self.call.slots - 1 - self._first(row), shifted.shape[2]
                turned = pltpu.roll(shifted[t], jax.lax.rem(width - left, width), axis=1)
                self.scratch["biases"][i, token] = turned[:, : self.call.slots]

    def _tokens(self) -> list[tuple[int, int]]:
        """Returns the row of each token of the call, and its place among the row's."""
        return [(row, t) for row in range(self.call.batch) for t in range(self.call.positions)]

    def _first(self, row: int) -> Int32[Array, ""]:
        """Returns the slot of a row's first token."""
        return jnp.clip(self.positions[row], 0, self.call.slots - self.call.positions)

    def _window(self, row: int) -> Int32[Array, ""]:
        """Returns the first slot of the tiles to which a row's tokens are written."""
        tile = jax.lax.div(self._first(row), TILE[0]) * TILE[0]
        return pl.multiple_of(jnp.minimum(tile, self.call.slots - self.call.window), TILE[0])

    def _append(self, key: Rows, value: Rows, keys: Ref, values: Ref) -> None:
        """Does what `TPUBackend.append` does, in the buffers and the windows that are written."""
        finite = jnp.isfinite(value)
        key, value = jnp.where(finite, key, jnp.nan), jnp.where(finite, value, 0)
        heads, features, size = len(keys) // self.call.batch, keys.shape[2], self.call.window
        for row in range(self.call.batch):
            start = self._window(row)
            slots = start + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
            for new, buffer, written in zip((key, value), (keys, values), self.scratch["windows"]):
                for head in range(heads):
                    at = row * heads + head
                    window = buffer[at, pl.ds(start, size)].astype(jnp.float32)
                    for t in range(self.call.positions):
                        token = row * self.call.positions + t
                        own = new[token : token + 1, head * features : (head + 1) * features]
                        window = jnp.where(slots == self._first(row) + t, own, window)
                    buffer[at, pl.ds(start, size)] = written[at] = window.astype(self.dtype)

    def _attend(
        self, query: Rows, keys: Ref, values: Ref, ends: list, bias: Ref | None = None
    ) -> Rows:
        """Returns the output of attention before its last product.

        Each token has a row for each head, with 0 at the features of other heads. `ends` are the
        first slots that tokens do not see; `bias`, by token, head and slot, is added to the scores.
        """
        call, heads, features = self.call, len(keys) // self.call.batch, keys.shape[2]
        shape = call.config.num_heads, query.shape[1]
        line, column = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
        own = jax.lax.div(column, call.config.head_dim) == line
        slots = jax.lax.broadcasted_iota(jnp.int32, (1, keys.shape[1]), 1)
        cuts = [slice(head * features, (head + 1) * features) for head in range(heads)]
        for token, (row, _) in enumerate(self._tokens()):
            apart = jnp.where(own, query[token : token + 1], 0).astype(self.dtype)
            scores = sum(
                multiply(apart[:, cut], keys[row * heads + i], ((1,), (1,)))
                for i, cut in enumerate(cuts)
            )
            scores = scores if bias is None else scores + bias[token]
            weights = jnp.where(slots < ends[token], scores, MASKED)
            weights = jnp.exp(weights - jnp.max(weights, axis=1, keepdims=True))
            weights = (weights / jnp.sum(weights, axis=1, keepdims=True)).astype(self.dtype)
            for i, cut in enumerate(cuts):
                found = multiply(weights, values[row * heads + i], ((1,), (0,)))
                found = jnp.sum(jnp.where(own[:, cut], found, 0), axis=0, keepdims=True)
                self.scratch["attended"][pl.ds(token, 1), cut] = found
        return self._rounded(self.scratch["attended"][...])

    # Numbers.

    def _normed(self, x: Rows, norm: Int32[Array, ""] | int) -> Rows:
        """Returns `x` after the norm with this number."""
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True) + 1e-6)
        return self._rounded(self._rounded(x) * self.norms[pl.ds(norm, 1)])

    def _product(self, x: Float32[Array, "M D"], weight: Ref) -> Rows:
        return self._rounded(multiply(x.astype(self.dtype), weight[...], ((1,), (0,))))

    def _rounded(self, x: Rows) -> Rows:
        return x.astype(self.dtype).astype(jnp.float32)
