"""Weight matrices as the CPU's own kernels (`native.cc`) read them, and calls of these kernels.

XLA's product of a few rows strides through a `[D, F]` weight, so that a call over five positions
takes up to twice as long as one over a single position. Stored in panels of 16 columns, the weight
is read once, from end to end, whatever the number of rows. The bits of a row do not depend on the
other rows, so that plain and speculative decoding see the same numbers.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int8, Int32, Shaped

from specdec_jax.backends.axes import PerRow, Rotation, Valid
from specdec_jax.backends.cpu import native
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.backends.tree_positions import AnyNodes
from specdec_jax.files.reading import mismatch_error, quote_value

# Bits of a product's inputs by the ways of quantising weights to 8 bits; see `checkpoints.load`.
INPUT_BITS = {"int8": 16, "w8a8": 8}
QUANTIZE = (*INPUT_BITS, "none")
_COLUMNS, _GROUP = 16, 4  # columns of a panel, and neighbouring lines of int8 values
# Arrays of up to so many numbers are rearranged by NumPy. XLA is faster, but takes some ten
# milliseconds to make a program for a shape, or to read it from the folder of compiled programs.
_SMALL = 1 << 22


def can_pack(dtype: DTypeLike) -> bool:
    """Returns whether weights are packed: for float32, on a CPU that has the kernels."""
    return (
        jax.default_backend() == "cpu" and np.dtype(dtype) == np.float32 and native.is_available()
    )


def has_accelerator() -> bool:
    """Returns whether XLA multiplies int8 weights by unrounded inputs: on all but CPUs."""
    return jax.default_backend() != "cpu"


def input_bits(quantize: str | None) -> int | None:
    """Returns the `input_bits` of this device's `Int8Weight`s."""
    return None if has_accelerator() else INPUT_BITS.get(quantize or "", 16)


def describe_support(dtype: DTypeLike, quantize: str | None = None) -> str:
    """Returns, for messages, where weights can be multiplied in int8, and what there is.

    `quantize` is the way to quantise them; None: any.
    """
    backend, dtype = jax.default_backend(), np.dtype(dtype).name
    there = f"{dtype} on the backend {backend}"
    there = native.describe_state() if (backend, dtype) == ("cpu", "float32") else there
    places = "for float32 on a CPU with the package's own kernel"
    places += "" if quantize == "w8a8" else " or on an accelerator"
    return f"8 bits only {places}, without a mesh or matmul_dtype (here: {there})"


def check_quantize_name(quantize: str | None) -> None:
    """Checks that `quantize` is None or one of `QUANTIZE`; raises ValueError otherwise."""
    if quantize is not None and quantize not in QUANTIZE:
        raise mismatch_error("quantize", quote_value(quantize), f"one of {', '.join(QUANTIZE)}")


def check_quantize(quantize: str | None, dtype: DTypeLike, mesh: bool) -> None:
    """Checks that a model can be quantised so, given its dtype, its mesh and the device.

    Raises ValueError otherwise.
    """
    check_quantize_name(quantize)
    possible = can_pack(dtype) or (quantize == "int8" and has_accelerator())
    if quantize in INPUT_BITS and (mesh or not possible):
        got = f"{quantize!r}{' with a mesh' if mesh else ''}"
        raise ValueError(f"quantize: got {got}, expected {describe_support(dtype, quantize)}")


# In the order in which `native.cc` numbers them.
_KINDS = ("nothing", "rms", "layer", "activation", "gate")
_ACTIVATIONS = ("linear", "relu", "gelu", "silu", "gelu_exact")


class Before(NamedTuple):
    """The function that is applied to a row of D numbers before a product.

    Attributes:
      kind: "nothing"; "rms" or "layer", norms as in `layers.py`; "activation"; or "gate", the
        activation of the row's first half times that of its second, D / 2 numbers.
      scale, bias: the norm's, where it has them.
      activations: names of the activation or the two of a gate.
    """

    kind: str
    scale: Float[Array, " D"] | None = None
    bias: Float[Array, " D"] | None = None
    activations: tuple[str, ...] = ()

    def attributes(self) -> dict[str, np.int64]:
        """Returns the numbers by which `native.cc` knows the kind and the activations."""
        first, second = (*map(_ACTIVATIONS.index, self.activations), 0, 0)[:2]
        numbers = dict(before=_KINDS.index(self.kind), first=first, second=second)
        return {name: np.int64(number) for name, number in numbers.items()}


Panels = Float[Array | np.ndarray, "panels D 16"] | Int8[Array | np.ndarray, "panels groups 16 4"]


@flax.struct.dataclass
class PackedWeight:
    """A packed weight matrix `[D, F]`.

    Attributes:
      values: ceil(F / 16) panels, 0 past the last line and column. In 8 bits the last axis has four
        neighbouring lines.
      scales: factors of the columns of int8 values; None for float32.
      lines: D.
      columns: F.
      derived: whether it is made of another parameter, and is no parameter itself.
      input_bits: bits to which the inputs of products with int8 values are rounded, 16 or 8; None
        for float32.
    """

    values: Panels
    scales: Float32[Array, " F"] | None
    lines: int = flax.struct.field(pytree_node=False)
    columns: int = flax.struct.field(pytree_node=False)
    derived: bool = flax.struct.field(pytree_node=False, default=False)
    input_bits: int | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def pack(
        cls, weight: Float[Array, "D F"] | Int8Weight, derived: bool = False
    ) -> "PackedWeight":
        """Packs a weight."""
        if isinstance(weight, Int8Weight):
            assert weight.input_bits, "the CPU's own kernels round inputs"
            cut = _cut_groups_on_host if is_small_on_host(weight.values) else _cut_groups
            lines, columns = weight.values.shape
            values = cut(weight.values)
            return cls(values, weight.scales, lines, columns, derived, weight.input_bits)
        lines, columns = weight.shape
        return cls(_cut(jnp.asarray(weight)), None, lines, columns, derived)

    @classmethod
    def pack_rows(
        cls, rows: Float[Array | np.ndarray, "F D"], derived: bool = False
    ) -> "PackedWeight":
        """Packs a weight whose columns are these rows, as those of an embedding.

        Unlike its transpose for `pack`, this takes no memory beside the result.
        """
        columns, lines = rows.shape
        cut = _cut_rows_on_host if isinstance(rows, np.ndarray) else _cut_rows
        return cls(cut(rows), None, lines, columns, derived)

    def unpack(self) -> Float[Array | np.ndarray, "D F"] | Int8Weight:
        """Returns what `pack` was given, a NumPy array if the values are one."""
        on_host = isinstance(self.values, np.ndarray)
        join = _join_axes.__wrapped__ if on_host else _join_axes
        values = join(self.values, self.lines, self.columns)
        if self.scales is None:
            return values
        return Int8Weight(values, self.scales, self.input_bits)

    def unpack_rows(self) -> Float[Array | np.ndarray, "F D"]:
        """Returns what `pack_rows` was given, a NumPy array if the values are one; float32 only."""
        assert self.scales is None
        on_host = isinstance(self.values, np.ndarray)
        return (_join_rows.__wrapped__ if on_host else _join_rows)(self.values, self.columns)

    def take_columns(
        self, numbers: Int[Array, "*N"], valid: Valid = None
    ) -> Float32[Array, "*N {self.lines}"]:
        """Does what `take_rows` does, for the rows that `pack_rows` was given; float32 only."""
        call = _get_kernel("columns", (*numbers.shape, self.lines))
        columns = np.int64(self.columns)
        return call(self.values, numbers.astype(jnp.int32), _flags(valid), columns=columns)

    def matrix(self) -> Float[Array | np.ndarray, "D F"]:
        """Returns the weight as float32."""
        weight = self.unpack()
        return weight.matrix() if isinstance(weight, Int8Weight) else weight

    def product(
        self,
        x: Float[Array, "*N D"],
        output_dtype: DTypeLike,
        valid: Valid = None,
        before: Before = Before("nothing"),
        bias: Float[Array, " F"] | None = None,
        residual: Float[Array, "*N F"] | None = None,
        clear: bool = True,
        cap: float | None = None,
    ) -> Float[Array, "*N {self.columns}"]:
        """Returns `before(x)` times the weight, plus `bias` and `residual` where they are given.

        With a `cap` c the product y and its bias become c·tanh(y / c). Rows that are False in
        `valid` are not computed. With `clear` they are 0; without, they are not written and may
        hold anything, NaN too.
        """
        more = [_replace_none(array) for array in (before.scale, before.bias, bias, residual)]
        arguments = (
            x.astype(jnp.float32),
            self.values,
            _replace_none(self.scales),
            _flags(valid),
            *more,
        )
        call = _get_kernel(f"product_{self._kind}", (*x.shape[:-1], self.columns))
        options = dict(clear=clear, cap=_number(cap))
        return call(*arguments, **before.attributes(), **options).astype(output_dtype)

    def keys_and_values(
        self,
        x: Float[Array, "B L D"],
        features: int,
        valid: Valid = None,
        bias: Float[Array, " F"] | None = None,
    ) -> tuple[Float32[Array, "B G L K"], Float32[Array, "B G L K"]]:
        """Returns keys and values of x by heads of K = `features`, as a `KVCache` has them.

        The first half of the weight's columns gives the keys. Rows that are False in `valid` are 0.
        """
        batch, length, _ = x.shape
        heads = self.columns // (2 * features)
        shape = batch, heads, length, features
        call = _get_kernel(f"keys_values_{self._kind}", shape, shape)
        scales = _replace_none(self.scales)
        given = x.astype(jnp.float32), self.values, scales, _flags(valid), _replace_none(bias)
        return tuple(call(*given))

    def greedy_token_and_logprob(
        self,
        x: Float[Array, "*N D"],
        valid: Valid = None,
        normalize: bool = True,
        bias: Float[Array, " F"] | None = None,
        cap: float | None = None,
    ) -> tuple[Int32[Array, "*N"], Float32[Array, "*N"]]:
        """Returns the argmax of each row of `product` and its log-probability.

        `bias` and `cap` as for `product`, which is not stored. The argmax is the first of equal
        columns, or −1 where a column is NaN; the log-probability there is NaN, and without
        `normalize` it is meaningless.
        """
        results = [jax.ShapeDtypeStruct(x.shape[:-1], dtype) for dtype in (jnp.int32, jnp.float32)]
        more = _replace_none(self.scales), _flags(valid), _replace_none(bias)
        arguments = x.astype(jnp.float32), self.values, *more
        call = jax.ffi.ffi_call(f"specdec_head_{self._kind}", results, vmap_method="sequential")
        options = dict(columns=np.int64(self.columns), summed=bool(normalize), cap=_number(cap))
        return tuple(call(*arguments, **options))

    @property
    def _kind(self) -> str:
        return {None: "f32", 16: "s8", 8: "w8a8"}[self.input_bits]


def is_weight_object(node: Any) -> bool:
    """Returns whether `node` is a weight that is not stored as an array."""
    return isinstance(node, PackedWeight | Int8Weight)


@jax.jit
def _cut(weight: Shaped[Array, "D F"]) -> Shaped[Array, "panels D 16"]:
    padded = jnp.pad(weight, ((0, 0), (0, -weight.shape[1] % _COLUMNS)))
    return padded.reshape(len(weight), -1, _COLUMNS).transpose(1, 0, 2)


@jax.jit
def _cut_rows(rows: Shaped[Array, "F D"]) -> Shaped[Array, "panels D 16"]:
    padded = jnp.pad(rows, ((0, -len(rows) % _COLUMNS), (0, 0)))
    return padded.reshape(-1, _COLUMNS, rows.shape[1]).swapaxes(1, 2)


@jax.jit
def _cut_groups(weight: Int8[Array, "D F"]) -> Int8[Array, "panels groups 16 4"]:
    padded = _cut(jnp.pad(weight, ((0, -len(weight) % _GROUP), (0, 0))))
    return padded.reshape(len(padded), -1, _GROUP, _COLUMNS).swapaxes(2, 3)


def _cut_rows_on_host(rows: Float32[np.ndarray, "F D"]) -> Float32[Array, "panels D 16"]:
    """Does what `_cut_rows` does, in NumPy."""
    columns, lines = rows.shape
    whole, rest = divmod(columns, _COLUMNS)
    values = _make_aligned((whole + bool(rest), lines, _COLUMNS))
    values[:whole] = rows[: columns - rest].reshape(whole, _COLUMNS, lines).swapaxes(1, 2)
    values[whole:, :, :rest] = rows[columns - rest :].T
    values[whole:, :, rest:] = 0
    return jax.device_put(values)


def _make_aligned(shape: tuple[int, ...]) -> Float32[np.ndarray, "..."]:
    """Returns an array, not filled, that JAX takes as it is: others it copies."""
    size, apart = math.prod(shape), 64 // np.dtype(np.float32).itemsize
    memory = np.empty(size + apart, np.float32)
    begin = -memory.ctypes.data // memory.itemsize % apart
    return memory[begin : begin + size].reshape(shape)


def is_small_on_host(*arrays: jax.Array | np.ndarray) -> bool:
    """Returns whether arrays lie in a CPU's memory, their numbers known, and are soon rearranged.

    If so, `np.asarray` copies nothing.
    """
    return jax.default_backend() == "cpu" and all(
        array.size <= _SMALL
        and not isinstance(array, jax.core.Tracer)
        and (isinstance(array, np.ndarray) or _is_on_no_mesh(array))
        for array in arrays
    )


def _is_on_no_mesh(array: jax.Array) -> bool:
    """Returns whether an array is on one device, and on no mesh, where results are to stay."""
    return isinstance(array.sharding, jax.sharding.SingleDeviceSharding)


def _cut_groups_on_host(weight: Int8[Array, "D F"]) -> Int8[Array, "panels groups 16 4"]:
    """Does what `_cut_groups` does, in NumPy."""
    weight = np.asarray(weight)
    padding = -weight.shape[0] % _GROUP, -weight.shape[1] % _COLUMNS
    padded = np.pad(weight, [(0, more) for more in padding]) if any(padding) else weight
    columns = padded.reshape(len(padded), -1, _COLUMNS).swapaxes(0, 1)
    return jax.device_put(np.stack([columns[:, i::_GROUP] for i in range(_GROUP)], axis=-1))


@functools.partial(jax.jit, static_argnames=("lines", "columns"))
def _join_axes(
    values: Panels, lines: int, columns: int
) -> Shaped[Array | np.ndarray, "{lines} {columns}"]:
    if values.ndim == 4:  # in groups
        values = values.swapaxes(2, 3).reshape(len(values), -1, _COLUMNS)
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)[:lines, :columns]


@functools.partial(jax.jit, static_argnames="columns")
def _join_rows(
    values: Float[Array | np.ndarray, "panels D 16"], columns: int
) -> Float[Array | np.ndarray, "{columns} D"]:
    return values.swapaxes(1, 2).reshape(-1, values.shape[1])[:columns]


def _replace_none(array: Float[Array, "*N"] | None, axes: int = 1) -> Float32[Array, "..."]:
    """Returns the array, or an empty one with so many axes."""
    return jnp.zeros([0] * axes) if array is None else array.astype(jnp.float32)


def _number(cap: float | None) -> np.float32:
    """Returns a cap as `native.cc` takes it, 0 for None."""
    return np.float32(cap or 0)


def _flags(valid: Bool[Array, "..."] | None) -> Bool[Array, "..."]:
    return jnp.zeros(0, bool) if valid is None else valid


def _get_kernel(
    name: str, *shapes: tuple[int, ...], aliases: dict[int, int] | None = None
) -> Callable:
    """Returns the function that calls a kernel, with float32 results of these shapes.

    `aliases` are the arguments that it overwrites with results.
    """
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.ffi.ffi_call(
        f"specdec_{name}",
        results[0] if len(results) == 1 else results,
        vmap_method="sequential",
        input_output_aliases=aliases,
    )


def take_rows(
    table: Float32[Array, "lines D"], numbers: Int[Array, "*N"], valid: Valid = None
) -> Float32[Array, "*N D"]:
    """Returns the rows of `table` with the given numbers, which are clipped to the table.

    0 where `valid` is False.
    """
    call = _get_kernel("rows", (*numbers.shape, table.shape[1]))
    return call(table, numbers.astype(jnp.int32), _flags(valid))


def normalize(
    x: Float32[Array, "*N D"], norm: Before, valid: Bool[Array, "*N"] | None = None
) -> Float32[Array, "*N D"]:
    """Returns what `norm` makes of each row, 0 where `valid` is False."""
    arguments = x, _replace_none(norm.scale), _replace_none(norm.bias), _flags(valid)
    return _get_kernel("norm", x.shape)(*arguments, before=norm.attributes()["before"])


def log_sum_exp(x: Float32[Array, "*N V"]) -> tuple[Float32[Array, "*N"], Float32[Array, "*N"]]:
    """Returns the greatest number of each row, and log Σ exp(x − greatest).

    Both are added up as by `PackedWeight.greedy_token_and_logprob`. The second is 0 where all
    numbers are −∞, and NaN where one is NaN or +∞.
    """
    return tuple(_get_kernel("log_sums", *[x.shape[:-1]] * 2)(x))


def compute_angles(positions: Int32[Array, "*N"], steps: Float32[np.ndarray, " halfK"]) -> Rotation:
    """Returns cosines and sines of position · step."""
    shape = *positions.shape, len(steps)
    return tuple(_get_kernel("angles", shape, shape)(positions.astype(jnp.int32), steps))


def join_heads(
    query: Float32[Array, "*N HK"],
    key: Float32[Array, "*N GK"],
    value: Float32[Array, "*N GK"],
    features: int,
    norms: Sequence[Before] | None = None,
    rotation: Rotation | None = None,
    valid: Valid = None,
) -> Float32[Array, "*N QKV"]:
    """Returns queries, keys and values side by side, for the attention kernels.

    Args:
      query, key, value: heads of queries, and those of keys and of values.
      features: K, features of each head.
      norms: RMS norms of each head of queries, and of each of keys; None: none.
      rotation: by which both are then rotated, with a line for each row, or lines that the rows
        take in turn; None: they are not.
      valid: rows that are False in it may be anything.
    """
    scales = [_replace_none(norm.scale) for norm in norms or [Before("nothing")] * 2]
    none = jnp.zeros((0, features // 2))
    angles = (none, none) if rotation is None else rotation
    shape = *query.shape[:-1], query.shape[-1] + 2 * key.shape[-1]
    call = _get_kernel("heads", shape)
    return call(query, key, value, *scales, *angles, _flags(valid), features=np.int64(features))


class Scoring(NamedTuple):
    """How queries attend.

    Attributes:
      divisor: number by which products of queries and keys are divided, before a bias is added.
      cap, window, ahead: as in `AttentionShape`.
      more: further keys and values to which every query of a cache attends, and how many each row
        has of them; only without a bias.
    """

    divisor: float = 1.0
    cap: float | None = None
    window: int | None = None
    ahead: int = 0
    more: tuple[Float32[Array, "B H L K"], Float32[Array, "B H L K"], PerRow] | None = None

    def scores(self) -> dict[str, np.float32]:
        """Returns the numbers that all attention kernels take."""
        return dict(divisor=np.float32(self.divisor), cap=_number(self.cap))


def _read_scoring(given: float | Scoring) -> Scoring:
    """Returns the scoring that is meant, where a number is a divisor."""
    return given if isinstance(given, Scoring) else Scoring(given)


_Cache = Float32[Array, "*B H S K"]


def attend_to_cache(
    qkv: Float32[Array, "B T QKV"],
    keys: _Cache,
    values: _Cache,
    bias: Float32[Array, "H P"] | None,
    where: Int32[Array, " B"] | AnyNodes,
    scoring: float | Scoring,
    valid: Valid = None,
    clear: bool = True,
) -> tuple[Float32[Array, "B T HK"], _Cache, _Cache]:
    """Writes new keys and values to the caches, in place, and attends to them.

    Each query attends to all slots up to its own; a node of a tree to its ancestors and itself.

    Args:
      qkv: queries, keys and values side by side, as their joint weight gives them or `join_heads`:
        as many heads of queries as a multiple of those of the caches.
      keys, values: as in `KVCache`.
      bias: added to the scores: that of the last of P positions, from which each query's is taken
        by distance; P = S but for nodes; None: nothing.
      where: the first slot that is written in each row, or the nodes.
      scoring: how they attend; a number: its divisor.
      valid: False for positions that are not computed and write nothing; the valid ones of a row
        come first. None: all are valid.
      clear: as for `PackedWeight.product`.

    Returns:
      Outputs, keys, values.
    """
    how = _read_scoring(scoring)
    if isinstance(where, AnyNodes):
        name, places = "node_attention", [where.starts, where.positions, where.paths]
    else:
        name, places = "self_attention", [where]
    width = qkv.shape[2] - 2 * keys.shape[-3] * keys.shape[-1]
    shapes = (*qkv.shape[:2], width), keys.shape, values.shape
    none = jnp.zeros([0] * 4), jnp.zeros([0] * 4), jnp.zeros(0, jnp.int32)
    arrays = qkv, keys, values, _replace_none(bias, 2), *places, _flags(valid), *(how.more or none)
    call = _get_kernel(name, *shapes, aliases={1: 1, 2: 2})
    return tuple(call(*arrays, **how.scores(), window=np.int64(how.window or 0), clear=clear))


def move_slots(
    keys: _Cache, values: _Cache, sources: Int32[Array, "B M"], starts: Int32[Array, " B"]
) -> tuple[_Cache, _Cache]:
    """Does what `Backend.move_slots` does, in place."""
    call = _get_kernel("move", keys.shape, values.shape, aliases={0: 0, 1: 1})
    return tuple(call(keys, values, sources, starts))


def put_rows(
    old: Float32[Array, "N ..."],
    new: Float32[Array, "M ..."],
    sources: Int32[Array, " R"],
    targets: Int32[Array, " R"],
    count: Int32[Array, ""],
) -> Float32[Array, "N ..."]:
    """Returns `old` with the first `count` of the rows `sources` of `new` at `targets`, in place.

    The targets differ. All cores copy; XLA's loop of slices takes several times as long for rows of
    a cache.
    """
    call = _get_kernel("put", old.shape, aliases={0: 0})
    return call(old, new, sources, targets, count)


def attend_to_encoded(
    query: Float32[Array, "B T HK"],
    keys: Float32[Array, "B G L K"],
    values: Float32[Array, "B G L K"],
    lengths: Int32[Array, " B"],
    valid: Valid = None,
    clear: bool = True,
    scoring: float | Scoring = 1.0,
) -> Float32[Array, "B T HK"]:
    """Returns the attention of queries over the first `lengths` keys and values of each row.

    H is a multiple of G. It is 0 for a row of length 0, and for positions that are False in
    `valid`; `scoring` as for `attend_to_cache`, `clear` as for `PackedWeight.product`.
    """
    call = _get_kernel("cross_attention", query.shape)
    options = _read_scoring(scoring).scores() | dict(clear=clear)
    return call(query, keys, values, lengths, _flags(valid), **options)


def attend_to_inputs(
    qkv: Float32[Array, "B L QKV"],
    bias: Float32[Array, "H 2*L-1"] | Float32[Array, "H 0"],
    lengths: Int32[Array, " B"],
    scoring: float | Scoring = 1.0,
    features: int | None = None,
) -> Float32[Array, "B L HK"]:
    """Returns an encoder's attention of the first `lengths` positions of each row over each other.

    0 past them.

    Args:
      qkv: queries, keys and values side by side.
      bias: added to the scores, by distance from query to key, from 1 − L on; without any:
        nothing.
      lengths: number of positions of each row that count.
      scoring: as for `attend_to_cache`.
      features: K, features of each head; None: keys and values have H heads too.
    """
    how = _read_scoring(scoring)
    width = qkv.shape[2] // 3 if features is None else features * len(bias)
    call = _get_kernel("encoder_attention", (*qkv.shape[:2], width))
    sizes = dict(window=np.int64(how.window or 0), ahead=np.int64(how.ahead))
    return call(qkv, bias, lengths, **how.scores(), **sizes)
