"""Attention of a few queries per row as one kernel for NVIDIA GPUs, in Pallas.

XLA makes seven kernels of a decoder's self-attention over its cache, and three of cross-attention;
in a step of a small model, each takes little more than the time to launch it. Here each of the two
is one kernel, with a program for each row and head. The program writes the row's new keys and
values to the cache and reads the slots that the row has filled, and no others.

Numbers are rounded where `xla.attend` rounds them, but for the weights, which are rounded
before they are divided by their sum. Pallas' way to Triton, by which the kernels are compiled, is
deprecated in JAX 0.11: without it XLA's attention is used, as on all other devices.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from specdec_jax.backends.axes import PerRow, States
from specdec_jax.backends.cpu import native
from specdec_jax.backends.kernel_selftest import KernelSelfTest, run_self_test
from specdec_jax.backends.kv_cache import KVCache, write_slots
from specdec_jax.backends.matmul import multiply
from specdec_jax.backends.xla import AttentionShape, attend, split_projected

try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

_MOST_SLOTS = 128  # that a program reads at once
_MOST_BYTES = 2**14  # of keys, and of values, that a program reads at once
_FEWEST, _MOST = 16, 64  # queries: fewer are padded, since a tensor core multiplies 16 at once
FEATURES = (16, 32, 64, 128)
Ref = Any  # a reference to an array in a GPU's memory
ReadBias = Callable[[jax.Array], jax.Array]  # returns the bias of slots


def supports_call(cache: KVCache, queries: int) -> bool:
    """Returns whether attention of `queries` queries a row over `cache` is one kernel."""
    features, dtype = cache.key.shape[-1], cache.key.dtype.name
    if queries > _MOST or features not in FEATURES or triton is None:
        return False
    if os.environ.get(native.SETTING) == "off":
        return False
    return SELF_TEST.passed(dtype=dtype, features=features, queries=_pad_axes(queries))


def attend_to_cache(
    qkv: Float[Array, "B T F"],
    key: jax.Array,
    value: jax.Array,
    bias: Float[Array, "#B H T S"] | None,
    positions: PerRow,
    divisor: float = 1.0,
    interpret: Any = False,
) -> tuple[States, jax.Array, jax.Array]:
    """Returns the output of causal self-attention, and the cache with the new keys and values.

    A new value that is not finite is stored as by `AcceleratorBackend.append`.

    Args:
      qkv: `[B, T, 3·H·K]`, queries, keys and values of the new tokens, one after the other.
      key, value: as in `KVCache`, with one head side by side.
      bias: position bias of the new tokens.
      positions: the slot of each row's first new token.
      divisor: number by which queries are divided.
      interpret: as for `pallas_call`: how a CPU runs the kernel, in tests.

    Returns:
      `[B, T, H·K]`, and the new `key` and `value`.
    """
    shape, (batch, length, _) = key.shape, qkv.shape
    key, value = (x.reshape(batch, *x.shape[-3:]) for x in (key, value))
    heads, features = key.shape[1], key.shape[3]
    kernel = functools.partial(_attend_to_cache_block, length=length, divisor=divisor)
    arrays = positions, qkv, key, value, *([] if bias is None else [bias])
    out = jax.ShapeDtypeStruct((batch, length, heads * features), qkv.dtype)
    caches = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)]
    found, key, value = pl.pallas_call(
        kernel,
        out_shape=(out, *caches),
        grid=(batch, heads),
        input_output_aliases={2: 1, 3: 2},
        name="self_attention",
        **_compile_options(interpret),
    )(*arrays)
    return found, key.reshape(shape), value.reshape(shape)


def attend_to_encoded(
    query: States, key: jax.Array, value: jax.Array, lengths: PerRow, interpret: Any = False
) -> States:
    """Returns the output of cross-attention, `[B, T, H·K]`.

    Args:
      query: `[B, T, H·K]`.
      key, value: as in `KVCache`, with one head side by side.
      lengths: number of keys of each row; a row without any attends to all alike, as with
        `xla.MASKED`.
      interpret: as for `attend_to_cache`.
    """
    batch, length, _ = query.shape
    key, value = (x.reshape(batch, *x.shape[-3:]) for x in (key, value))
    return pl.pallas_call(
        functools.partial(_attend_to_encoded_block, length=length),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=key.shape[:2],
        name="cross_attention",
        **_compile_options(interpret),
    )(lengths, query, key, value)


def _compile_options(interpret: Any) -> dict[str, Any]:
    if interpret:
        return dict(interpret=interpret)
    return dict(compiler_params=triton.CompilerParams(num_warps=4, num_stages=2))


def _pad_axes(queries: int) -> int:
    return max(_FEWEST, pl.next_power_of_2(queries))


class CacheBlocks:
    """Keys and values of one row and head of a cache, which a program reads block by block.

    Attributes:
      count: slots of the cache.
      size: slots of a block, a power of two.
      first: the first block, which is read when this is made: long before it is needed.
    """

    def __init__(self, program: "HeadProgram", caches: Sequence[Ref]):
        self._program, self._caches, self.count = program, caches, caches[0].shape[2]
        slots = _MOST_BYTES // (program.columns.size * caches[0].dtype.itemsize)
        self.size = min(slots, _MOST_SLOTS)
        self.first = self.read(0)

    def read(self, number: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the slots `[N]` of a block, and their keys and values `[N, K]`."""
        slots, program = number * self.size + jnp.arange(self.size), self._program
        place = program.row, program.head, self.clip(slots)[:, None], program.columns
        key, value = (buffer[place] for buffer in self._caches)
        return slots, key, value

    def clip(self, slots: jax.Array) -> jax.Array:
        """Returns the slots, those past the end as the last."""
        return jnp.minimum(slots, self.count - 1)


class HeadProgram:
    """Attention of one row and head, whose queries see keys block by block.

    What they have seen is kept in `sums`, which is not an attribute: for each query the greatest
    score, the sum of weights and the weighted sum of values.

    Attributes:
      row, head: the indices of both.
      lines: `[M]`, the numbers of the queries, padded to a power of two.
      exists: `[M]`, whether there is such a query.
      at: `[M]`, the numbers, of the last query where there is none.
      columns: `[1, K]`, the numbers of a head's features.
    """

    def __init__(self, length: int, features: int, row: jax.Array, head: jax.Array):
        self.row, self.head = row, head
        self.lines, self.columns = jnp.arange(_pad_axes(length)), jnp.arange(features)[None]
        self.exists, self.at = self.lines < length, jnp.minimum(self.lines, length - 1)

    def read(self, source: Ref, head: jax.Array) -> Float[Array, "M K"]:
        """Returns a head's features of each query's token, from `[B, T, …]`."""
        return source[self.row, self.at[:, None], head * self.columns.size + self.columns]

    def read_bias(self, bias: Ref, slots: jax.Array) -> Float[Array, "M N"]:
        """Returns the bias of slots, from `[#B, H, T, S]`."""
        row = 0 if bias.shape[0] == 1 else self.row
        return bias[row, self.head, self.at[:, None], slots[None]]

    def attend_to_cache(
        self,
        projected: Sequence[jax.Array],
        blocks: CacheBlocks,
        written: Sequence[Ref],
        start: jax.Array,
        read_bias: ReadBias | None,
        writes: jax.Array | bool = True,
    ) -> Float[Array, "M K"]:
        """Returns the output of self-attention, and writes the new keys and values.

        Args:
          projected: queries, keys and values `[M, K]` of the new tokens.
          blocks: keys and values as they were.
          written: the same memory, to which is written.
          start: the slot of the row's first new token.
          read_bias: returns the bias of slots `[N]`, `[M, N]`; None: there is none.
          writes: whether this program writes; another one does if not.
        """
        query, added, vector = projected
        # The new tokens come first: every query has seen a key before the division by a sum.
        finite = vector - vector == 0
        added, vector = jnp.where(finite, added, jnp.nan), jnp.where(finite, vector, 0)
        mask = (self.lines[None] <= self.lines[:, None]) & self.exists[None]
        own = None if read_bias is None else read_bias(blocks.clip(start + self.lines))
        sums = self._add_keys(self._make_sums(), query, added, vector, mask, own)
        own_slots = self.head, (start + self.lines)[:, None], self.columns

        @pl.when(writes)
        def write() -> None:
            for buffer, new in zip(written, (added, vector)):
                self.store(buffer, own_slots, new)

        return self._add_blocks(sums, query, blocks, start, read_bias)

    def attend_to_encoded(
        self, query: Float[Array, "M K"], blocks: CacheBlocks, count: jax.Array
    ) -> Float[Array, "M K"]:
        """Returns the output of cross-attention to the first `count` keys, to all alike if 0."""
        empty = count == 0
        limit = jnp.where(empty, blocks.count, count)
        return self._add_blocks(self._make_sums(), query, blocks, limit, alike=empty)

    def _make_sums(self) -> tuple[jax.Array, ...]:
        """Returns the sums before any key was seen."""
        count, features = len(self.lines), self.columns.size
        most, total = jnp.full(count, -jnp.inf, jnp.float32), jnp.zeros(count, jnp.float32)
        return most, total, jnp.zeros((count, features), jnp.float32)

    def _add_keys(
        self,
        sums: tuple[jax.Array, ...],
        query: Float[Array, "M K"],
        key: Float[Array, "N K"],
        value: Float[Array, "N K"],
        mask: Bool[Array, "#M N"],
        bias: Float[Array, "M N"] | None,
    ) -> tuple[jax.Array, ...]:
        """Returns `sums` with more keys and values, where `mask` is True."""
        most, total, weighted = sums
        scores = multiply(query, key, ((1,), (1,)))
        scores = scores if bias is None else scores + bias
        scores = jnp.where(mask, scores, -jnp.inf)
        new = jnp.maximum(most, jnp.max(scores, axis=1))
        weights, shrunk = jnp.exp(scores - new[:, None]), jnp.exp(most - new)
        added = multiply(weights.astype(value.dtype), value, ((1,), (0,)))
        return new, total * shrunk + jnp.sum(weights, axis=1), weighted * shrunk[:, None] + added

    def _add_blocks(
        self,
        sums: tuple[jax.Array, ...],
        query: Float[Array, "M K"],
        blocks: CacheBlocks,
        limit: jax.Array,
        read_bias: ReadBias | None = None,
        alike: jax.Array | bool = False,
    ) -> Float[Array, "M K"]:
        """Returns the output of attention over `sums` and a cache's slots below `limit`.

        All scores are 0 if `alike`.
        """

        def add_block(block: tuple[jax.Array, ...], sums: tuple[jax.Array, ...]) -> tuple:
            slots, key, value = block
            inside = slots < limit
            key, value = (jnp.where(inside[:, None], x, 0) for x in (key, value))
            key = key if alike is False else jnp.where(alike, 0, key)
            bias = None if read_bias is None else read_bias(blocks.clip(slots))
            return self._add_keys(sums, query, key, value, inside[None], bias)

        _, total, weighted = jax.lax.fori_loop(
            1,
            pl.cdiv(limit, blocks.size),
            lambda number, sums: add_block(blocks.read(number), sums),
            add_block(blocks.first, sums),
        )
        return weighted / total[:, None]

    def store(self, target: Ref, place: tuple[jax.Array, ...], new: jax.Array) -> None:
        """Stores numbers of each query that exists, at its row and `place` of `target`."""
        mask = jnp.broadcast_to(self.exists[:, None], new.shape)
        triton.store(target.at[self.row, *place], new.astype(target.dtype), mask=mask)

    def store_output(self, out: Ref, attended: Float[Array, "M K"]) -> None:
        """Stores the output of attention in `[B, T, H·K]`."""
        columns = self.head * self.columns.size + self.columns
        self.store(out, (self.lines[:, None], columns), attended)


def _attend_to_cache_block(
    positions: Ref, qkv: Ref, key: Ref, value: Ref, *rest: Ref, length: int, divisor: float
) -> None:
    """Runs one row and head of `attend_to_cache`."""
    *biases, out, new_key, new_value = rest
    heads, _, features = key.shape[1:]
    program = HeadProgram(length, features, pl.program_id(0), pl.program_id(1))
    blocks = CacheBlocks(program, (key, value))
    query, *new = (program.read(qkv, part * heads + program.head) for part in range(3))
    query = query if divisor == 1 else query / jnp.asarray(divisor, query.dtype)
    read_bias = functools.partial(program.read_bias, biases[0]) if biases else None
    written, start = (new_key, new_value), positions[program.row]
    program.store_output(
        out, program.attend_to_cache((query, *new), blocks, written, start, read_bias)
    )


def _attend_to_encoded_block(
    lengths: Ref, query: Ref, key: Ref, value: Ref, out: Ref, *, length: int
) -> None:
    """Runs one row and head of `attend_to_encoded`."""
    program = HeadProgram(length, key.shape[3], pl.program_id(0), pl.program_id(1))
    blocks = CacheBlocks(program, (key, value))
    queries, count = program.read(query, program.head), lengths[program.row]
    program.store_output(out, program.attend_to_encoded(queries, blocks, count))


def find_fault(
    dtype: str = "bfloat16", features: int = 64, queries: int = 16, interpret: Any = False
) -> str | None:
    """Tries the kernels on small arrays and returns what is wrong with them; None if nothing is.

    Args:
      dtype: dtype of queries, keys and values.
      features: number of a head's features.
      queries: number of queries to which those of a row are padded.
      interpret: as for `attend_to_cache`.
    """
    return run_self_test(lambda: _matches_xla(dtype, features, queries - 13, interpret))


def _matches_xla(dtype: str, features: int, queries: int, interpret: Any) -> bool:
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), dtype)

    positions, lengths, slots = jnp.array([0, 130]), jnp.array([40, 130]), 200
    qkv = draw(2, queries, 3 * 2 * features)
    key, value = draw(2, 2, slots, features), draw(2, 2, slots, features)
    bias = draw(2, 2, queries, slots).astype(jnp.float32)
    own = attend_to_cache(qkv, key, value, bias, positions, interpret=interpret)
    crossed = attend_to_encoded(qkv[..., : 2 * features], key, value, lengths, interpret=interpret)

    heads = AttentionShape(2, features, dtype)
    query, *new = split_projected((qkv,), 2, heads)
    after = [write_slots(old, part, positions, None) for old, part in zip((key, value), new)]
    numbers = jnp.arange(slots)
    causal = numbers <= (positions[:, None] + jnp.arange(queries))[:, None, :, None]
    tokens = (numbers < lengths[:, None])[:, None, None]
    expected = attend(query, KVCache(*after), causal, bias, heads), *after
    expected += (attend(query, KVCache(key, value), tokens, None, heads),)
    return all(
        np.allclose(np.float32(a), np.float32(b), atol=0.05)
        for a, b in zip((*own, crossed), expected)
    )


SELF_TEST = KernelSelfTest(
    "gpu",
    "attention kernels for GPUs are not used, XLA's attention is",
    lambda **case: find_fault(**case),
)
