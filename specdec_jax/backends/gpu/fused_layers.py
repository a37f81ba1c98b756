"""Layers of a small T5's decoder over one or two positions as four kernels each, for NVIDIA GPUs.

XLA makes a dozen kernels of such a layer. Each takes microseconds to begin and to end, in which its
weights could have been read many times. Here a layer is four kernels, in Pallas: queries, keys and
values; the rest of self-attention; cross-attention; and the feed-forward block. A program of such a
kernel is for a head, or for some features. It computes the norm before the block anew, its part of
the block, and what its part adds to the block's last product. The next kernel adds these parts up
before it begins, so that no program waits for another. Several programs compute the attention of a
head, each of which reads some columns of the last product's weight: one alone would take longer to
read them than all take to attend.

While few programs compute, others read the weights of the next kernels, which are then in the GPU's
L2 cache. Numbers are rounded where the layers of `blocks.py` round them. The head is left to XLA.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32

from specdec_jax.backends.axes import PerRow, States
from specdec_jax.backends.cpu import native
from specdec_jax.backends.cpu.packed_weights import is_weight_object
from specdec_jax.backends.gpu.attention import FEATURES, CacheBlocks, HeadProgram, Ref, triton
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.backends.matmul import multiply
from specdec_jax.backends.xla import ACTIVATION_FUNCTIONS

# With more rows every program of attention would read its weights once more; for eight rows an H200
# takes longer than with XLA's layers.
_MOST_ROWS, _MOST_POSITIONS = 2, 2
_MOST_WEIGHTS = 512 * 64  # of a head's query, all of which a program has in shared memory at once
_LINES = 16  # rows of a product, which a tensor core multiplies at once
_COLUMNS, _HIDDEN = 64, 32  # features of a program: of queries, keys and values; hidden ones
_PART = 512  # features of a row that are read at once
_FETCHED = 4096  # numbers that a program fetches at once
_FETCHING = 96  # programs that fetch
_GROUPS = 4  # at most, of columns of a head's last product, each of which has a program
_WARPS, _PROJECTING_WARPS = 4, 8


class _Sums(NamedTuple):
    """States `[M, D]` of M = B·T tokens after a block, whose parts are not added up yet.

    Attributes:
      states: those before the block.
      parts: what each program of the block adds, before rounding.
    """

    states: Float[Array, "M D"]
    parts: Float32[Array, "parts M D"] | None = None


def supports_call(
    module: Any, params: dict, shape: tuple[int, int], cache: Any, layers: int | None
) -> bool:
    """Returns whether a call over B × T tokens runs as these kernels.

    The network is a small T5 whose weights are arrays, and there are few rows. `shape` is (B, T),
    the other arguments are those of `decode_states`.
    """
    config = module.config
    if (
        triton is None
        or os.environ.get(native.SETTING) == "off"
        or module.backend.rules is not None
    ):
        return False
    if config.family != "t5" or config.matmul_dtype or not module.backend.joins_weights:
        return False
    if shape[0] > _MOST_ROWS or shape[1] > _MOST_POSITIONS:
        return False
    weights = jax.tree.leaves(params["decoder"], is_leaf=is_weight_object)
    return (
        config.head_dim in FEATURES
        and config.emb_dim * config.head_dim <= _MOST_WEIGHTS
        and config.emb_dim % _LINES == 0
        and config.mlp_dim % _HIDDEN == 0
        and config.num_heads * config.head_dim % _COLUMNS == 0
        and jnp.dtype(config.dtype) == jnp.bfloat16
        and not any(map(is_weight_object, weights))
    )


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
      interpret: as for `pallas_call`: how a CPU runs the kernels, in tests.
    """
    decoder, count = params["decoder"], layers or module.config.num_decoder_layers
    batch, length, _ = x.shape
    call = _Call(module.config.mlp_activations, batch, length, interpret)
    lengths = jnp.sum(cache.cross_mask, axis=1, dtype=jnp.int32)
    sums, written = _Sums(x.reshape(-1, x.shape[-1])), []
    blocks = [decoder[f"layers_{i}"] for i in range(count)]
    for i, (layer, own, cross) in enumerate(zip(blocks, cache.layers, cache.cross)):
        bias = cache.position_bias[i if len(cache.position_bias) > 1 else 0]
        following = blocks[i + 1]["self_attention"]["qkv"] if i + 1 < count else {}
        with jax.named_scope(f"layers_{i}"):
            sums, new = call.attend_to_cache(sums, layer, own, bias, positions)
            written.append(new)
            sums = call.attend_to_encoded(sums, layer, cross, lengths)
            sums = call.feed_forward(sums, layer, following)
    states = call.finish(sums, decoder["decoder_norm"]["scale"])
    return states.reshape(x.shape), cache.replace(layers=(*written, *cache.layers[count:]))


class _Call(NamedTuple):
    """A decoder call over B × T tokens.

    Attributes:
      activations: as in `T5Config.mlp_activations`.
      batch, length: B and T.
      interpret: as for `decode_states`.
    """

    activations: Sequence[str]
    batch: int
    length: int
    interpret: Any

    def attend_to_cache(
        self, sums: _Sums, layer: dict, cache: KVCache, shifted: jax.Array, positions: PerRow
    ) -> tuple[_Sums, KVCache]:
        """Runs a layer's self-attention; `shifted` as for `relative_bias.slice_biases`."""
        own, encoded = layer["self_attention"], layer["encoder_decoder_attention"]
        shape = cache.key.shape
        weight, count = own["qkv"]["kernel"], len(sums.states)
        states, qkv = self._run(
            _project_block,
            (*_arrays(sums), layer["pre_self_attention_layer_norm"]["scale"], weight),
            (sums.states, jax.ShapeDtypeStruct((count, weight.shape[1]), weight.dtype)),
            programs=(1, weight.shape[1] // _COLUMNS),
            fetched=[own["out"], encoded["query"], encoded["out"]],
            warps=_PROJECTING_WARPS,
        )
        key, value = (x.reshape(self.batch, *x.shape[-3:]) for x in (cache.key, cache.value))
        heads = key.shape[1]
        parts, key, value = self._run(
            _self_attention_block,
            (positions, qkv, own["out"]["kernel"], shifted, key, value),
            (self._parts(states, heads), key, value),
            programs=(self.batch, heads * _count_groups(own["out"]["kernel"])),
            fetched=[layer["mlp"]],
            aliases={4: 1, 5: 2},
        )
        new = cache.replace(key=key.reshape(shape), value=value.reshape(shape))
        return _Sums(states, parts), new

    def attend_to_encoded(self, sums: _Sums, layer: dict, cross: KVCache, lengths: PerRow) -> _Sums:
        """Runs a layer's cross-attention to the first `lengths` positions of each row."""
        encoded = layer["encoder_decoder_attention"]
        scale = layer["pre_cross_attention_layer_norm"]["scale"]
        key, value = (x.reshape(self.batch, *x.shape[-3:]) for x in (cross.key, cross.value))
        given = lengths, encoded["query"]["kernel"], encoded["out"]["kernel"], key, value
        found = self._run(
            _cross_attention_block,
            (*_arrays(sums), scale, *given),
            (sums.states, self._parts(sums.states, key.shape[1])),
            programs=(self.batch, key.shape[1] * _count_groups(encoded["out"]["kernel"])),
        )
        return _Sums(*found)

    def feed_forward(self, sums: _Sums, layer: dict, following: dict) -> _Sums:
        """Runs a layer's feed-forward block, and fetches the weights `following`."""
        mlp, scale = layer["mlp"], layer["pre_mlp_layer_norm"]["scale"]
        weight, out = mlp["wi_fused" if "wi_fused" in mlp else "wi"]["kernel"], mlp["wo"]["kernel"]
        programs = len(out) // _HIDDEN
        found = self._run(
            functools.partial(_feed_forward_block, activations=tuple(self.activations)),
            (*_arrays(sums), scale, weight, out),
            (sums.states, self._parts(sums.states, programs)),
            programs=(1, programs),
            fetched=[following],
        )
        return _Sums(*found)

    def finish(self, sums: _Sums, scale: Float[Array, " D"]) -> Float[Array, "M D"]:
        """Returns the states after the final norm."""
        (states,) = self._run(
            _finish_block, (*_arrays(sums), scale), (sums.states,), programs=(1, 1)
        )
        return states

    def _parts(self, states: jax.Array, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *states.shape), jnp.float32)

    def _run(
        self,
        block: Callable,
        given: Sequence[jax.Array],
        outs: Sequence[Any],
        programs: tuple[int, int],
        fetched: Sequence[Any] = (),
        aliases: dict[int, int] | None = None,
        warps: int = _WARPS,
    ) -> Sequence[jax.Array]:
        """Runs a kernel of `programs` programs, and others that fetch weights.

        Args:
          block: runs a program: takes the call, the program's two numbers, and the references to
            `given` and to the results.
          given: what the block reads.
          outs: arrays like its results.
          programs: how many programs there are on each of two axes.
          fetched: weights to fetch.
          aliases: the numbers of those of `given` that are changed in place, and of the results
            that they become.
          warps: warps of a program.
        """
        weights = [leaf.reshape(-1) for leaf in jax.tree.leaves(fetched) if leaf.ndim == 2]
        computing, blocks = math.prod(programs), sum(map(len, weights)) // _FETCHED
        fetching = min(_FETCHING, blocks)
        shapes = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs]
        first, last = len(given), len(given) + len(weights)

        def run(*refs: Ref) -> None:
            number = pl.program_id(0)

            @pl.when(number < computing)
            def compute() -> None:
                place = jax.lax.div(number, programs[1]), jax.lax.rem(number, programs[1])
                block(self, place, refs[:first], refs[last:-1])

            if fetching:

                @pl.when(number >= computing)
                def fetch() -> None:
                    _fetch(refs[first:last], number - computing, fetching, refs[-1])

        options: dict[str, Any] = {"interpret": self.interpret}
        if not self.interpret:
            options = {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=2)}
        *found, _ = pl.pallas_call(
            run,
            out_shape=(*shapes, jax.ShapeDtypeStruct((1,), jnp.float32)),
            grid=(computing + fetching,),
            input_output_aliases=aliases or {},
            name=getattr(block, "func", block).__name__.strip("_"),
            **options,
        )(*given, *weights)
        return found


class _Tokens:
    """The states of some tokens, which a program reads and normalizes.

    Attributes:
      first: the number of the first.
      lines: `[N]`, 0, 1, …; N is a power of two.
      exists: `[N]`, whether there is such a token; else the last one is read.
      columns: the numbers of features that are read at once, `[1, C]` each.
      states: those features of each token, `[N, C]` in float32.
    """

    def __init__(
        self, first: Int32[Array, ""] | int, count: int, states: Ref, parts: Ref | None = None
    ):
        """Reads `count` tokens from `states`, and adds up `parts`, as in `_Sums`."""
        self.first, self.lines = first, jnp.arange(pl.next_power_of_2(count))
        self.exists, self.at = self.lines < count, first + jnp.minimum(self.lines, count - 1)
        self.columns, self.dtype, self.count = _cut(states.shape[1]), states.dtype, count
        self.states = [self._read(states, parts, columns) for columns in self.columns]

    def _read(self, states: Ref, parts: Ref | None, columns: jax.Array) -> Float32[Array, "N C"]:
        place = self.at[:, None], columns
        found = states[place].astype(jnp.float32)
        if parts is None:
            return found
        added = sum(parts[part, *place] for part in range(parts.shape[0]))
        return self._rounded(found + self._rounded(added))

    def _rounded(self, x: Float32[Array, "N C"]) -> Float32[Array, "N C"]:
        return x.astype(self.dtype).astype(jnp.float32)

    def normalize(self, scale: Ref) -> list[Float[Array, "N C"]]:
        """Returns the states after `layers.RMSNorm`."""
        squares = sum(jnp.sum(jnp.square(part), axis=1) for part in self.states)
        factor = jax.lax.rsqrt(squares / scale.shape[0] + 1e-6)[:, None]
        return [
            (
                self._rounded(part * factor) * scale[columns].astype(self.dtype).astype(jnp.float32)
            ).astype(self.dtype)
            for part, columns in zip(self.states, self.columns)
        ]

    def project(
        self, normed: Sequence[Float[Array, "N C"]], weight: Sequence[Float[Array, "C F"]]
    ) -> Float[Array, "lines F"]:
        """Returns the product of the tokens, over and over, and a weight as by `read_weight`."""
        found = sum(multiply(_repeat(part), own, ((1,), (0,))) for part, own in zip(normed, weight))
        return found.astype(self.dtype)

    def read_weight(self, weight: Ref, features: jax.Array) -> list[Float[Array, "C F"]]:
        """Returns some columns of a weight, by the features that are read at once."""
        return [weight[columns.T, features[None]] for columns in self.columns]

    def store(
        self, target: Ref, place: tuple, columns: jax.Array, new: Float[Array, "N C"]
    ) -> None:
        """Stores features of the tokens that exist."""
        mask = jnp.broadcast_to(self.exists[:, None], new.shape)
        where = target.at[*place, (self.first + self.lines)[:, None], columns]
        triton.store(where, new.astype(target.dtype), mask=mask)

    def __len__(self) -> int:
        return self.count

    def store_states(self, target: Ref) -> None:
        """Stores the states before the norm."""
        for columns, part in zip(self.columns, self.states):
            self.store(target, (), columns, part)


def _cut(width: int) -> list[jax.Array]:
    """Returns the numbers of features that are read at once: as many as a power of two."""
    size = min(_PART, width & -width)
    return [start + jnp.arange(size)[None] for start in range(0, width, size)]


def _repeat(x: Float[Array, "N C"]) -> Float[Array, "lines C"]:
    """Returns the rows over and over, as many as a tensor core multiplies."""
    count, features = x.shape
    if count >= _LINES:
        return x
    return jnp.broadcast_to(x[None], (_LINES // count, count, features)).reshape(_LINES, features)


def _count_groups(weight: Any) -> int:
    """Returns how many programs a head has, each for some columns of its last product's weight."""
    return next(count for count in (_GROUPS, 2, 1) if weight.shape[1] % (_LINES * count) == 0)


class _LastProduct:
    """What some hidden features add to a block's last product.

    The weights are read when it is made, which is long before they are needed.
    """

    def __init__(
        self, weight: Ref, features: jax.Array, group: jax.Array | int = 0, count: int = 1
    ):
        """Reads the rows `features` of the weight, of which the columns of a group of `count`."""
        width = weight.shape[1] // count
        self.columns = [group * width + columns for columns in _cut(width)]
        self.weights = [weight[features[:, None], columns] for columns in self.columns]

    def store(
        self, out: Ref, part: jax.Array, rows: tuple[jax.Array, jax.Array], hidden: jax.Array
    ) -> None:
        """Stores the product with `hidden` as a part of the states.

        `rows` are the numbers of its tokens, and whether they exist.
        """
        at, exists = rows
        for columns, weight in zip(self.columns, self.weights):
            added = multiply(hidden.astype(weight.dtype), weight, ((1,), (0,)))
            mask = jnp.broadcast_to(exists[:, None], added.shape)
            triton.store(out.at[part, at[:, None], columns], added, mask=mask)


def _arrays(sums: _Sums) -> list[jax.Array]:
    return [part for part in sums if part is not None]


Place = tuple[jax.Array, jax.Array]  # the two numbers of a program


def _project_block(call: _Call, place: Place, given: Sequence[Ref], outs: Sequence[Ref]) -> None:
    """Runs some columns of the queries, keys and values of `_Call.attend_to_cache`."""
    (*sums, scale, weight), (states, out) = given, outs
    own = place[1] * _COLUMNS + jnp.arange(_COLUMNS)
    tokens = _Tokens(0, sums[0].shape[0], *sums)
    columns = tokens.read_weight(weight, own)
    pl.when(place[1] == 0)(lambda: tokens.store_states(states))
    found, lines = tokens.project(tokens.normalize(scale), columns), jnp.arange(_LINES)
    mask = jnp.broadcast_to((lines < len(tokens))[:, None], found.shape)
    triton.store(out.at[lines[:, None], own[None]], found, mask=mask)


def _open_head(
    call: _Call, size: int, place: Place, weight: Ref
) -> tuple[HeadProgram, jax.Array, _LastProduct]:
    """Returns the attention of a head of `size` features, the group of columns, and the product."""
    count = _count_groups(weight)
    head, group = jax.lax.div(place[1], count), jax.lax.rem(place[1], count)
    program = HeadProgram(call.length, size, place[0], head)
    return program, group, _LastProduct(weight, head * size + jnp.arange(size), group, count)


def _self_attention_block(
    call: _Call, place: Place, given: Sequence[Ref], outs: Sequence[Ref]
) -> None:
    """Runs a row, a head and a group of columns of `_Call.attend_to_cache`."""
    (positions, qkv, out, shifted, key, value), (parts, *written) = given, outs
    heads, slots, size = key.shape[1:]
    program, group, last = _open_head(call, size, place, out)
    blocks, turns = CacheBlocks(program, (key, value)), shifted.shape[0]
    own, start = program.head * size + jnp.arange(size), positions[program.row]
    at = (program.row * call.length + program.at)[:, None]
    projected = [qkv[at, part * heads * size + own[None]] for part in range(3)]

    def read_bias(at: jax.Array) -> jax.Array:
        """Returns the bias of slots, as `relative_bias.slice_biases` takes it."""
        line = jax.lax.rem(program.at, turns)
        columns = slots - 1 - start - (program.at - line)[:, None] + at[None]
        return shifted[line[:, None], program.head, jnp.maximum(columns, 0)]

    writes = group == 0
    attended = program.attend_to_cache(projected, blocks, written, start, read_bias, writes)
    rows = program.row * call.length + program.lines, program.exists
    last.store(parts, program.head, rows, attended)


def _cross_attention_block(
    call: _Call, place: Place, given: Sequence[Ref], outs: Sequence[Ref]
) -> None:
    """Runs a row, a head and a group of columns of `_Call.attend_to_encoded`."""
    (*sums, scale, lengths, weight, out, key, value), (states, parts) = given, outs
    program, _, last = _open_head(call, key.shape[3], place, out)
    own, count = program.head * key.shape[3] + program.columns[0], lengths[program.row]
    blocks = CacheBlocks(program, (key, value))
    tokens = _Tokens(program.row * call.length, call.length, *sums)
    columns = tokens.read_weight(weight, own)
    pl.when(place[1] == 0)(lambda: tokens.store_states(states))
    query = tokens.project(tokens.normalize(scale), columns)
    attended = program.attend_to_encoded(query, blocks, count)
    rows = program.row * call.length + program.lines, program.exists
    last.store(parts, program.head, rows, attended)


def _feed_forward_block(
    call: _Call, place: Place, given: Sequence[Ref], outs: Sequence[Ref], activations: Sequence[str]
) -> None:
    """Runs some hidden features of `_Call.feed_forward`."""
    (*sums, scale, weight, out), (states, parts) = given, outs
    own = place[1] * _HIDDEN + jnp.arange(_HIDDEN)
    tokens = _Tokens(0, sums[0].shape[0], *sums)
    weights = [
        tokens.read_weight(weight, i * out.shape[0] + own) for i, _ in enumerate(activations)
    ]
    last = _LastProduct(out, own)
    pl.when(place[1] == 0)(lambda: tokens.store_states(states))
    normed, hidden = tokens.normalize(scale), 1.0
    for name, columns in zip(activations, weights):
        part = tokens.project(normed, columns).astype(jnp.float32)
        factor = ACTIVATION_FUNCTIONS[name](part).astype(tokens.dtype)
        hidden = factor.astype(jnp.float32) * hidden
    lines = jnp.arange(_LINES)
    last.store(parts, place[1], (lines, lines < len(tokens)), hidden)


def _finish_block(call: _Call, place: Place, given: Sequence[Ref], outs: Sequence[Ref]) -> None:
    """Runs `_Call.finish`."""
    (*sums, scale), (out,) = given, outs
    tokens = _Tokens(0, sums[0].shape[0], *sums)
    for columns, part in zip(tokens.columns, tokens.normalize(scale)):
        tokens.store(out, (), columns, part)


def _fetch(weights: Sequence[Ref], number: jax.Array, programs: int, unused: Ref) -> None:
    """Reads every so many numbers of the weights, for the L2 cache.

    What is read must seem to be used, lest the compiler leave it out.
    """
    most = jnp.zeros(_FETCHED, jnp.float32)
    for weight in weights:
        size = weight.shape[0]
        for block in range(0, pl.cdiv(size, _FETCHED), programs):
            at = (number + block) * _FETCHED + jnp.arange(_FETCHED)
            most = jnp.maximum(most, weight[jnp.minimum(at, size - 1)].astype(jnp.float32))
    greatest = jnp.max(most)

    @pl.when(greatest == jnp.inf)
    def use() -> None:
        unused[0] = greatest
