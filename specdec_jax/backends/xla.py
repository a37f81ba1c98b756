"""Attention in plain XLA, on any device, and what it has in common with the kernels."""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specdec_jax.backends.axes import Mask, PerRow, Rotation, Seen, States, Valid
from specdec_jax.backends.kv_cache import ROWS, KVCache, gather_heads, spread_heads
from specdec_jax.backends.matmul import choose_precision
from specdec_jax.backends.tree_positions import AnyNodes

MASKED = -1e10  # T5X's additive mask; finite, so that a fully masked row gives no NaN

ACTIVATION_FUNCTIONS = {
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
}
ACTIVATIONS = tuple(ACTIVATION_FUNCTIONS)


class AttentionShape(NamedTuple):
    """The shape of an attention.

    Attributes:
      count: H, heads of queries.
      features: K, features of each head.
      dtype: dtype of the computation.
      divisor: number by which queries are divided.
      num_kv_heads: heads of keys and values, each of which as many heads of queries share, side by
        side; None: H.
      cap: c of scores c·tanh(score / c); None: as they are.
      window: number of positions that a query sees, from its own back; None: all.
      ahead: in an encoder with a window, number of positions that a query sees after its own.
    """

    count: int  # type: ignore[assignment]  # tuples have a method of this name
    features: int
    dtype: Any
    divisor: float = 1.0
    num_kv_heads: int | None = None
    cap: float | None = None
    window: int | None = None
    ahead: int = 0

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.count if self.num_kv_heads is None else self.num_kv_heads

    @property
    def sharing(self) -> int:
        """How many heads of queries share keys and values."""
        return self.count // self.kv_heads

    @property
    def suits_kernels(self) -> bool:
        """Whether the kernels compute it: each head has keys, without a cap or a window."""
        return self.sharing == 1 and self.cap is None and self.window is None


class DecoderCall(NamedTuple):
    """Where the T tokens of each row of a decoder call lie, and what they see.

    Attributes:
      positions: `[B]`, the first slot of the cache that each row writes; None for nodes.
      mask: True where a query attends to a slot; None for the CPU's kernels, which know.
      valid: False for tokens whose result does not matter; the valid ones of a row come first.
      nodes: where the tokens lie if they are nodes of trees, in place of `positions`.
      count: how many tokens are written to the cache; the others fill tiles. None: all.
      rotation: by which queries and keys are rotated (`rotary.py`); None: they are not.
      more: further keys and values to which every query attends, by the same softmax, and True at
        those that are tokens; None: none.
    """

    positions: PerRow | None
    mask: Seen = None
    valid: Valid = None
    nodes: AnyNodes | None = None
    count: int | None = None  # type: ignore[assignment]
    rotation: Rotation | None = None
    more: tuple[KVCache, Mask] | None = None


Projected = tuple[Float[Array, "..."], ...]  # queries, keys and values, or one joint array of them


def split_heads(
    x: Float[Array, "*N D"], batch: int, features: int, heads_per_tile: int | None = None
) -> Float[Array, "B H T K"]:
    """Splits the last axis into heads and puts their axis before that of positions.

    Args:
      x: the arrays of T positions of each of `batch` rows.
      batch: B.
      features: K, features of one head.
      heads_per_tile: how many heads stay side by side, as in caches on accelerators; None: one, in
        a CPU's layout.
    """
    features *= heads_per_tile or 1
    count = math.prod(x.shape[:-1]) // batch
    if heads_per_tile is not None and count > ROWS and count % ROWS == 0:
        # A TPU's compiler moves whole tiles of rows, but changes the layout of every tile for the
        # axis of all positions.
        x = x.reshape(batch, count // ROWS, ROWS, -1, features)
        return x.transpose(0, 3, 1, 2, 4).reshape(batch, -1, count, features)
    return x.reshape(batch, count, x.shape[-1] // features, features).transpose(0, 2, 1, 3)


def split_queries(
    x: Float[Array, "*N D"], batch: int, heads: AttentionShape, heads_per_tile: int | None = None
) -> Float[Array, "B H R K"]:
    """Splits queries by heads as `split_heads` does, those that share keys one after the other.

    H is then the number of heads of keys, and R that of positions times `heads.sharing`.
    """
    features, sharing, side_by_side = heads.features, heads.sharing, heads_per_tile or 1
    if sharing == 1:
        return split_heads(x, batch, features, heads_per_tile)
    count = math.prod(x.shape[:-1]) // batch
    tiles = heads.kv_heads // side_by_side
    x = x.reshape(batch, count, tiles, side_by_side, sharing, features).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, tiles, sharing * count, side_by_side * features)


def split_projected(
    qkv: Projected, batch: int, heads: AttentionShape, heads_per_tile: int | None = None
) -> list[Float[Array, "B H R K"] | Float[Array, "B H T K"]]:
    """Returns queries, keys and values by heads; arguments as for `split_queries`."""
    query, *others = jnp.split(qkv[0], 3, axis=-1) if len(qkv) == 1 else qkv
    how = batch, heads.features, heads_per_tile
    parts = [split_heads(part, *how) for part in others]
    return [split_queries(query, batch, heads, heads_per_tile), *parts]


def attend_to_sequence(
    qkv: Projected,
    mask: Bool[Array, "#B 1 #T T"],
    bias: Any,
    heads: AttentionShape,
    more: tuple[KVCache, Mask] | None = None,
) -> States:
    """Attends to the tokens of the sequences themselves, `[B, T, H·K]`, without a cache.

    `more` as in `DecoderCall`.
    """
    query, key, value = split_projected(qkv, len(qkv[0]), heads)
    query, cache = divide(query, heads.divisor), KVCache(key, value)
    return attend(query, cache, mask, bias, heads, more=more)


def attend(
    query: Float[Array, "B H R K"],
    cache: KVCache,
    mask: Bool[Array, "#B 1 #T S"],
    bias: Float[Array, "#B heads T S"] | None,
    heads: AttentionShape,
    heads_per_tile: int | None = None,
    more: tuple[KVCache, Mask] | None = None,
) -> States:
    """Returns the output of attention before the last product.

    Args:
      query: queries as from `split_queries`, as many heads side by side as in the cache.
      cache: keys, which may be anything where `mask` is False, and values, which must be finite
        everywhere.
      mask: True where a query attends to a key.
      bias: position bias, added to the scores.
      heads: the attention's shape.
      heads_per_tile: as for `split_heads`.
      more: as in `DecoderCall`; only without a bias.
    """
    side_by_side, batch, sharing = heads_per_tile or 1, query.shape[0], heads.sharing
    query = spread_heads(query, side_by_side)
    query = query if cache.key.ndim == 4 else query[0]
    einsum = functools.partial(jnp.einsum, precision=choose_precision(query.dtype))
    precise = functools.partial(einsum, preferred_element_type=jnp.float32)
    caches, mask = ([cache], mask) if more is None else _join_tokens(cache, mask, *more)
    found = [precise("...htk,...hsk->...hts", query, part.key) for part in caches]
    scores = apply_cap(found[0] if more is None else jnp.concatenate(found, axis=-1), heads.cap)
    shape, copies = scores.shape, side_by_side * sharing
    if copies > 1:
        mask = jnp.tile(mask, (1, 1, copies if mask.shape[2] > 1 else 1, 1))
        bias = None if bias is None else bias.reshape(len(bias), *shape[-3:])
    if bias is not None and len(bias) == len(mask):
        # One array for both, the same in all layers: with two, a TPU's compiler makes three kernels
        # of the scores and their weights, in the place of one. A mask is still needed: the score of
        # a stale key may be NaN.
        bias = jnp.where(mask, bias.astype(jnp.float32), MASKED)
        mask = bias != MASKED
    scores = scores if bias is None else scores + bias.astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1)
    weights = weights.astype(heads.dtype).reshape(shape)
    if heads_per_tile is None and more is None:
        output = einsum("...hts,...hsk->...thk", weights, cache.value)
    else:
        parts = [weights] if more is None else jnp.split(weights, [cache.slots], axis=-1)
        output = functools.reduce(
            operator.add,
            [precise("...hts,...hsk->...htk", part, own.value) for part, own in zip(parts, caches)],
        )
        output = jnp.swapaxes(gather_heads(output, side_by_side).astype(heads.dtype), -3, -2)
    if sharing > 1:  # [sharing · T, H / P, P · K], back in the order of the heads of queries
        count = output.size // (batch * heads.count * heads.features)
        output = output.reshape(batch, sharing, count, heads.kv_heads, heads.features)
        output = output.transpose(0, 2, 3, 1, 4)
    return output.reshape(batch, -1, heads.count * heads.features)


def _join_tokens(
    cache: KVCache, mask: Bool[Array, "#B 1 #T S"], more: KVCache, tokens: Mask
) -> tuple[list[KVCache], Bool[Array, "B 1 #T SL"]]:
    """Returns both caches, with as many axes, and a mask of the slots of both."""
    if cache.key.ndim == 3:
        more = jax.tree.map(lambda x: x[0], more)
    seen = tokens[:, None, None]
    rows = jnp.broadcast_shapes(mask.shape[:3], seen.shape[:3])
    parts = [jnp.broadcast_to(part, (*rows, part.shape[-1])) for part in (mask, seen)]
    return [cache, more], jnp.concatenate(parts, axis=-1)


def apply_cap(x: Float[Array, "..."], most: float | None) -> Float[Array, "..."]:
    """Returns `most` · tanh(x / `most`), scores or logits below `most`; None: x itself."""
    return x if most is None else most * jnp.tanh(x / most)


def divide(query: Float[Array, "..."], divisor: float) -> Float[Array, "..."]:
    """Returns queries divided by a number, in their own dtype."""
    return query if divisor == 1 else query / jnp.asarray(divisor, query.dtype)
