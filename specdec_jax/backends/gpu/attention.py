"""Attention of a few queries per row as one kernel for NVIDIA GPUs, in Pallas.

XLA makes seven kernels of a decoder's self-attention over its cache, and three of cross-attention;
in a step of a small model, each takes little more than the time to launch it. Here each of the two
is one kernel, with a program for each row and head. The program writes the row's new keys and
values to the cache and reads the slots that the row has filled, and no others.

Numbers are rounded where `layers.Attention` rounds them, but for the weights, which are rounded
before they are divided by their sum. Pallas' way to Triton, by which the kernels are compiled, is
deprecated in JAX 0.11: without it XLA's attention is used, as on all other devices.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from specdec_jax.backends.axes import PerRow, States
from specdec_jax.backends.cpu import native
from specdec_jax.backends.kernel_selftest import KernelSelfTest, run_self_test
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.backends.matmul import precision_of

try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

_BLOCK = 64  # slots that a program reads at once
_FEWEST, _MOST = 16, 64  # queries: fewer are padded, since a tensor core multiplies 16 at once
_FEATURES = (16, 32, 64, 128)


def fits(cache: KVCache, queries: int) -> bool:
    """Returns whether attention of `queries` queries a row over `cache` is one kernel on a GPU."""
    if (
        cache.heads_per_tile != 1
        or cache.tile_queries
        or cache.rules is not None
        or os.environ.get(native.SETTING) == "off"
    ):
        return False
    features, dtype = cache.key.shape[-1], cache.key.dtype.name
    if queries > _MOST or features not in _FEATURES or triton is None:
        return False
    return SELF_TEST.passed(dtype=dtype, features=features, queries=_padded(queries))


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

    A new value that is not finite is stored as `KVCache.append` stores it on an accelerator.

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
    kernel = functools.partial(_self_attention, length=length, divisor=divisor)
    arrays = positions, qkv, key, value, *([] if bias is None else [bias])

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    out = jax.ShapeDtypeStruct((batch, length, heads * features), qkv.dtype)
    found, key, value = _call(
        kernel,
        (batch, heads),
        arrays,
        (out, like(key), like(value)),
        {2: 1, 3: 2},
        interpret,
        "self_attention",
    )
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
    kernel = functools.partial(_cross_attention, length=length)
    out = (jax.ShapeDtypeStruct(query.shape, query.dtype),)
    return _call(
        kernel, key.shape[:2], (lengths, query, key, value), out, {}, interpret, "cross_attention"
    )[0]


def _call(
    kernel: Callable, grid, arrays, out, aliases: dict[int, int], interpret, name: str
) -> tuple:
    parameters = (
        {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=2)}
    )
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        input_output_aliases=aliases,
        interpret=interpret,
        name=name,
        **parameters,
    )(*arrays)


def _padded(queries: int) -> int:
    return max(_FEWEST, pl.next_power_of_2(queries))


class _Queries:
    """The queries of one row and head, padded to a power of two, which see keys block by block.

    What they have seen is kept in `sums`, which is not an attribute: for each query the greatest
    score, the sum of weights and the weighted sum of values.

    Attributes:
      lines: `[M]`, the numbers of the queries.
      at: `[M]`, the same, of the last query where there is none.
    """

    def __init__(self, length: int, features: int, read: Callable, divisor: float = 1.0):
        """`read` takes indices of lines and features and returns the queries there."""
        padded = _padded(length)
        self.lines, self.columns = jnp.arange(padded), jnp.arange(features)
        self.at = jnp.minimum(self.lines, length - 1)
        query = read(self.at[:, None], self.columns[None])
        self.query = query if divisor == 1 else query / jnp.asarray(divisor, query.dtype)

    def begun(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the sums before any key was seen."""
        count = len(self.lines)
        return (
            jnp.full(count, -jnp.inf, jnp.float32),
            jnp.zeros(count, jnp.float32),
            jnp.zeros((count, len(self.columns)), jnp.float32),
        )

    def seen(
        self, sums: tuple, key, value, mask, bias=None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns `sums` with more keys and values, `[N, K]`, where `mask` is True."""
        most, total, weighted = sums
        scores = _product(self.query, key, 1)
        scores = scores if bias is None else scores + bias
        scores = jnp.where(mask, scores, -jnp.inf)
        new = jnp.maximum(most, jnp.max(scores, axis=1))
        weights, shrunk = jnp.exp(scores - new[:, None]), jnp.exp(most - new)
        added = _product(weights.astype(value.dtype), value, 0)
        return new, total * shrunk + jnp.sum(weights, axis=1), weighted * shrunk[:, None] + added

    def write(self, out, row, head, sums: tuple, length: int) -> None:
        """Stores the output of attention over all keys that were `seen`."""
        _, total, weighted = sums
        found = (weighted / total[:, None]).astype(out.dtype)
        columns = head * len(self.columns) + self.columns
        _store(
            out, (row, self.lines[:, None], columns[None]), found, (self.lines < length)[:, None]
        )


def _self_attention(positions, qkv, key, value, *rest, length: int, divisor: float) -> None:
    """Runs one row and head of `attend_to_cache`."""
    *bias, out, new_key, new_value = rest
    row, head = pl.program_id(0), pl.program_id(1)
    heads, slots, features = key.shape[1:]

    def part(number):
        return lambda lines, columns: qkv[row, lines, (number * heads + head) * features + columns]

    queries = _Queries(length, features, part(0), divisor)
    lines, at, columns = queries.lines, queries.at, queries.columns[None]

    def biased(slots):
        return bias[0][0 if bias[0].shape[0] == 1 else row, head, at[:, None], slots[None]]

    # The new tokens come first, so that every query has seen a key before the division by a sum.
    start, added, vector = (
        positions[row],
        part(1)(at[:, None], columns),
        part(2)(at[:, None], columns),
    )
    finite = vector - vector == 0
    added, vector = jnp.where(finite, added, jnp.nan), jnp.where(finite, vector, 0)
    mask = (lines[None] <= lines[:, None]) & (lines < length)[None]
    places = jnp.minimum(start + lines, slots - 1)
    sums = queries.seen(queries.begun(), added, vector, mask, biased(places) if bias else None)
    for buffer, new in ((new_key, added), (new_value, vector)):
        _store(
            buffer,
            (row, head, (start + lines)[:, None], columns),
            new.astype(buffer.dtype),
            (lines < length)[:, None],
        )

    def earlier(block, sums):
        return _seen_block(
            queries, sums, key, value, (row, head), block, start, biased if bias else None
        )

    sums = jax.lax.fori_loop(0, pl.cdiv(start, _BLOCK), earlier, sums)
    queries.write(out, row, head, sums, length)


def _cross_attention(lengths, query, key, value, out, *, length: int) -> None:
    """Runs one row and head of `attend_to_encoded`."""
    row, head = pl.program_id(0), pl.program_id(1)
    slots, features = key.shape[2:]
    queries = _Queries(
        length, features, lambda lines, columns: query[row, lines, head * features + columns]
    )
    count = lengths[row]
    empty, limit = count == 0, jnp.where(count == 0, slots, count)

    def block(number, sums):
        # Where there is no key at all, equal scores: see `lengths` above.
        return _seen_block(queries, sums, key, value, (row, head), number, limit, None, empty)

    queries.write(
        out, row, head, jax.lax.fori_loop(0, pl.cdiv(limit, _BLOCK), block, queries.begun()), length
    )


def _seen_block(
    queries: _Queries, sums, key, value, place, block, limit, bias, alike=None
) -> tuple:
    """Returns `sums` with the keys of a block of slots, those below `limit`.

    Args:
      place: row and head.
      bias: returns the bias of slots, `[M, N]`; None: there is none.
      alike: whether all scores are 0; None: they are not.
    """
    slots = block * _BLOCK + jnp.arange(_BLOCK)
    inside, at = slots < limit, jnp.minimum(slots, key.shape[2] - 1)

    def take(buffer):
        return jnp.where(inside[:, None], buffer[*place, at[:, None], queries.columns[None]], 0)

    keys = take(key) if alike is None else jnp.where(alike, 0, take(key))
    return queries.seen(sums, keys, take(value), inside[None], None if bias is None else bias(at))


def _product(a, b, contracted: int):
    """Returns `a [M, N]` times `b`, whose axis `contracted` has N numbers, in float32."""
    how = ((1,), (contracted,)), ((), ())
    return jax.lax.dot_general(a, b, how, precision_of(a.dtype), preferred_element_type=jnp.float32)


def _store(ref, index, new, mask) -> None:
    triton.store(ref.at[index], new, mask=jnp.broadcast_to(mask, new.shape))


def why_not(
    dtype: str = "bfloat16", features: int = 64, queries: int = 16, interpret: Any = False
) -> str | None:
    """Tries the kernels on small arrays and returns what is wrong with them; None if nothing is.

    Args:
      dtype: dtype of queries, keys and values.
      features: number of a head's features.
      queries: number of queries to which those of a row are padded.
      interpret: as for `attend_to_cache`.
    """
    return run_self_test(lambda: _numbers_are_right(dtype, features, queries - 13, interpret))


def _numbers_are_right(dtype: str, features: int, queries: int, interpret: Any) -> bool:
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.standard_normal(shape), dtype)

    positions, lengths, slots = jnp.array([0, 70]), jnp.array([40, 130]), 144
    qkv = draw(2, queries, 3 * 2 * features)
    key, value = draw(2, 2, slots, features), draw(2, 2, slots, features)
    bias = draw(2, 2, queries, slots).astype(jnp.float32)
    own = attend_to_cache(qkv, key, value, bias, positions, interpret=interpret)
    crossed = attend_to_encoded(qkv[..., : 2 * features], key, value, lengths, interpret=interpret)

    def apart(part):
        return part.reshape(2, queries, 2, features).transpose(0, 2, 1, 3)

    query, new_key, new_value = map(apart, jnp.split(qkv, 3, axis=-1))
    cache, numbers = (
        KVCache(key, value, heads_per_tile=1).append(new_key, new_value, positions),
        jnp.arange(slots),
    )
    causal = numbers <= (positions[:, None] + jnp.arange(queries))[:, None, :, None]
    tokens = numbers < lengths[:, None, None, None]
    right = _by_xla(query, cache.key, cache.value, causal, bias), cache.key, cache.value
    expected = *right, _by_xla(query, key, value, tokens, 0)
    return all(
        np.allclose(np.float32(a), np.float32(b), atol=0.05)
        for a, b in zip((*own, crossed), expected)
    )


def _by_xla(query, key, value, mask, bias) -> jax.Array:
    """Returns the output of attention `[B, T, H·K]` of `[B, H, T, K]` queries."""
    scores = jnp.einsum("bhtk,bhsk->bhts", query, key, preferred_element_type=jnp.float32) + bias
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(value.dtype)
    found = jnp.einsum("bhts,bhsk->bthk", weights, value)
    return found.reshape(*found.shape[:2], -1)


SELF_TEST = KernelSelfTest(
    "gpu",
    "attention kernels for GPUs are not used, XLA's attention is",
    lambda **case: why_not(**case),
)
