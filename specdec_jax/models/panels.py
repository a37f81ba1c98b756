"""Kernels as the CPU's own product (`native.cc`) reads them, and its attention: what a CPU's decode loop is made of.

XLA's product of a few rows strides through a `[D, F]` kernel, so that a call over five positions costs up to twice one
over a single position; stored in panels of 16 columns the kernel is read once, from end to end, whatever the number of
rows. The bits of a row do not depend on the other rows, so that plain and speculative decoding see the same numbers.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.files.reading import shown
from specdec_jax.models import native
from specdec_jax.models.int8 import Int8Kernel
from specdec_jax.models.nodes import Nodes

QUANTIZE = ("int8", "none")  # see `checkpoints.load`
_COLUMNS = 16  # of a panel


def usable(dtype) -> bool:
    """Returns whether kernels are stored so: float32 on a CPU for which `native.cc` could be compiled."""
    return jax.default_backend() == "cpu" and np.dtype(dtype) == np.float32 and native.available()


def needed(dtype) -> str:
    """Returns a line that says what `usable` asks for and what there is."""
    backend, dtype = jax.default_backend(), np.dtype(dtype).name
    there = native.state() if (backend, dtype) == ("cpu", "float32") else f"{dtype} on the backend {backend}"
    wanted = "8 bits only for float32 on a CPU with the package's own kernel, without a mesh or matmul_dtype"
    return f"{wanted} (here: {there})"


def check_quantize_name(quantize: str | None) -> None:
    """Raises ValueError where `quantize` is no way to load a model."""
    if quantize is not None and quantize not in QUANTIZE:
        raise ValueError(f"quantize: got {shown(quantize)}, expected one of {', '.join(QUANTIZE)}")


def check_quantize(quantize: str | None, dtype, mesh: bool) -> None:
    """Raises ValueError where `quantize` is no way to load a model, or one that its dtype, mesh
    or device do not have."""
    check_quantize_name(quantize)
    if quantize == "int8" and (mesh or not usable(dtype)):
        raise ValueError(f"quantize: got 'int8'{' with a mesh' if mesh else ''}, expected {needed(dtype)}")


# As in `native.cc`.
_KINDS = ("nothing", "rms", "layer", "activation", "gate")
_ACTIVATIONS = ("linear", "relu", "gelu", "silu")


class Before(NamedTuple):
    """What is made of a row of D numbers before it is multiplied.

    Attributes:
      kind: "nothing"; "rms" or "layer", norms as in `layers.py`; "activation"; "gate", the activations of its halves
        multiplied, D / 2 numbers.
      scale, bias: `[D]` of a norm, where it has them.
      activations: names of one or two.
    """

    kind: str
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    activations: tuple[str, ...] = ()

    def attributes(self) -> dict[str, np.int64]:
        """Returns the numbers by which `native.cc` knows the kind and the activations."""
        first, second = (*map(_ACTIVATIONS.index, self.activations), 0, 0)[:2]
        return dict(before=np.int64(_KINDS.index(self.kind)), first=np.int64(first), second=np.int64(second))


@flax.struct.dataclass
class Panels:
    """A kernel `[D, F]` in panels.

    Attributes:
      values: `[ceil(F / 16), D, 16]` float32, or `[ceil(F / 16), ceil(D / 2), 16, 2]` int8, whose last axis is two
        neighbouring lines; 0 past the last column and line.
      scales: `[F]` float32, by which the columns of int8 values are multiplied; None for float32.
      lines: D.
      columns: F.
      derived: it is a copy of another parameter, and no parameter itself.
    """

    values: jax.Array
    scales: jax.Array | None
    lines: int = flax.struct.field(pytree_node=False)
    columns: int = flax.struct.field(pytree_node=False)
    derived: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def of(cls, kernel: "jax.Array | Int8Kernel", derived: bool = False) -> "Panels":
        """Stores a kernel `[D, F]`, float32 or in 8 bits."""
        if isinstance(kernel, Int8Kernel):
            return cls(_cut_pairs(kernel.values), kernel.scales, *kernel.values.shape, derived)
        return cls(_cut(jnp.asarray(kernel)), None, *kernel.shape, derived)

    def kernel(self) -> "jax.Array | Int8Kernel":
        """Returns what `of` was given."""
        values = _joined(self.values, self.lines, self.columns)
        return values if self.scales is None else Int8Kernel(values, self.scales)

    def matrix(self) -> jax.Array:
        """Returns the kernel `[D, F]`, float32."""
        kernel = self.kernel()
        return kernel.matrix() if isinstance(kernel, Int8Kernel) else kernel

    def product(
        self, x: jax.Array, output_dtype, live: jax.Array | None = None, before: Before = Before("nothing"),
        bias: jax.Array | None = None, residual: jax.Array | None = None, clear: bool = True,
    ) -> jax.Array:  # fmt: skip
        """Returns `before` of `x [..., D]` times the kernel, plus `bias [F]` and
        `residual [..., F]` where they are given.

        That is `[..., F]`; 0 for rows that are False in `live [...]`, which are not computed. With
        `clear` false those are not written either: they may hold anything, NaN too.
        """
        result = jax.ShapeDtypeStruct((*x.shape[:-1], self.columns), jnp.float32)
        call = jax.ffi.ffi_call(f"specdec_product_{self._kind}", result, vmap_method="sequential")
        more = [_or_none(array) for array in (before.scale, before.bias, bias, residual)]
        arguments = x.astype(jnp.float32), self.values, _or_none(self.scales), _flags(live), *more
        return call(*arguments, **before.attributes(), clear=clear).astype(output_dtype)

    def peak(self, x: jax.Array, live: jax.Array | None = None, normalize=True) -> tuple[jax.Array, jax.Array]:
        """Returns of `product` the first greatest column of each row, −1 where a column is not a number, and its
        log-probability (NaN there), both `[...]`; nothing is stored. Without `normalize` that is of no meaning."""
        results = [jax.ShapeDtypeStruct(x.shape[:-1], dtype) for dtype in (jnp.int32, jnp.float32)]
        call = jax.ffi.ffi_call(f"specdec_head_{self._kind}", results, vmap_method="sequential")
        arguments = x.astype(jnp.float32), self.values, _or_none(self.scales), _flags(live)
        return tuple(call(*arguments, columns=np.int64(self.columns), summed=bool(normalize)))

    @property
    def _kind(self) -> str:
        return "f32" if self.scales is None else "s8"


@jax.jit
def _cut(kernel: jax.Array) -> jax.Array:
    padded = jnp.pad(kernel, ((0, 0), (0, -kernel.shape[1] % _COLUMNS)))
    return padded.reshape(len(kernel), -1, _COLUMNS).transpose(1, 0, 2)


@jax.jit
def _cut_pairs(kernel: jax.Array) -> jax.Array:
    padded = _cut(jnp.pad(kernel, ((0, len(kernel) % 2), (0, 0))))
    return padded.reshape(len(padded), -1, 2, _COLUMNS).swapaxes(2, 3)


@functools.partial(jax.jit, static_argnames=("lines", "columns"))
def _joined(values: jax.Array, lines: int, columns: int) -> jax.Array:
    if values.ndim == 4:  # in pairs
        values = values.swapaxes(2, 3).reshape(len(values), -1, _COLUMNS)
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)[:lines, :columns]


def _or_none(array: jax.Array | None) -> jax.Array:
    return jnp.zeros(0) if array is None else array.astype(jnp.float32)


def _flags(live: jax.Array | None) -> jax.Array:
    return jnp.zeros(0, bool) if live is None else live


def rows(table: jax.Array, numbers: jax.Array, live: jax.Array | None = None) -> jax.Array:
    """Returns the rows `[..., D]` of `table [N, D]` with the given numbers; those past an end take the
    row there, and what is False in `live [...]` is 0."""
    result = jax.ShapeDtypeStruct((*numbers.shape, table.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call("specdec_rows", result, vmap_method="sequential")
    return call(table, numbers.astype(jnp.int32), _flags(live))


def attend_to_cache(
    qkv, keys, values, bias, positions, divisor: float, live=None, clear: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes new keys and values to the caches, in place, and attends to all slots up to each query's own.

    Args:
      qkv: `[B, T, 3·H·K]` queries, keys and values, as their joint kernel gives them.
      keys: `[B, H, S, K]` cache, or `[H, S, K]` of a single row.
      values: the same.
      bias: `[S, H, S]` by query position, added to the scores; None: nothing.
      positions: `[B]` int32, the first slot that is written in each row.
      divisor: of the scores, before the bias.
      live: `[B, T]`, False for positions that are not computed and write nothing; those that are come first. None: all.
      clear: as for `Panels.product`.

    Returns:
      Outputs `[B, T, H·K]`, keys, values.
    """
    batch, queries, width = qkv.shape
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values))
    output = jax.ShapeDtypeStruct((batch, queries, width // 3), jnp.float32)
    call = jax.ffi.ffi_call(
        "specdec_self_attention", (output, *shapes), vmap_method="sequential", input_output_aliases={1: 1, 2: 2}
    )
    bias = jnp.zeros((0, 0, 0)) if bias is None else bias
    return tuple(call(qkv, keys, values, bias, positions, _flags(live), divisor=np.float32(divisor), clear=clear))


def attend_to_nodes(
    qkv, keys, values, bias, nodes: Nodes, divisor: float, live=None, clear: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `attend_to_cache`, for nodes of trees; `bias [H, P]` is that of the last of P positions, or None."""
    batch, queries, width = qkv.shape
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values))
    output = jax.ShapeDtypeStruct((batch, queries, width // 3), jnp.float32)
    call = jax.ffi.ffi_call(
        "specdec_node_attention", (output, *shapes), vmap_method="sequential", input_output_aliases={1: 1, 2: 2}
    )
    bias = jnp.zeros((0, 0)) if bias is None else bias
    arguments = qkv, keys, values, bias, nodes.starts, nodes.positions, nodes.paths, _flags(live)
    return tuple(call(*arguments, divisor=np.float32(divisor), clear=clear))


def attend_to_encoded(query, keys, values, lengths, live=None, clear: bool = True) -> jax.Array:
    """Returns the attention `[B, T, H·K]` of queries `[B, T, H·K]` over the first `lengths [B]` keys and values
    `[B, H, L, K]`; zeros for a row of length 0, and for positions that are False in `live [B, T]`; `clear` as for
    `Panels.product`."""
    result = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    return jax.ffi.ffi_call("specdec_cross_attention", result, vmap_method="sequential")(
        query, keys, values, lengths, _flags(live), clear=clear
    )


def attend_to_inputs(qkv, bias, lengths) -> jax.Array:
    """Returns an encoder's attention `[B, L, H·K]` of the first `lengths [B]` positions of each row
    over each other; 0 past them.

    Args:
      qkv: `[B, L, 3·H·K]` queries, keys and values. bias: `[L, H, L]` by query position.
    """
    result = jax.ShapeDtypeStruct((*qkv.shape[:2], qkv.shape[2] // 3), jnp.float32)
    return jax.ffi.ffi_call("specdec_encoder_attention", result, vmap_method="sequential")(qkv, bias, lengths)
