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
from jaxtyping import Array, Bool, Float, Float32, Int, Int8, Int32, Shaped

from specdec_jax.files.reading import shown
from specdec_jax.models import native
from specdec_jax.models.axes import Live
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
      scale, bias: of a norm, where it has them.
      activations: names of one or two.
    """

    kind: str
    scale: Float[Array, " D"] | None = None
    bias: Float[Array, " D"] | None = None
    activations: tuple[str, ...] = ()

    def attributes(self) -> dict[str, np.int64]:
        """Returns the numbers by which `native.cc` knows the kind and the activations."""
        first, second = (*map(_ACTIVATIONS.index, self.activations), 0, 0)[:2]
        return dict(before=np.int64(_KINDS.index(self.kind)), first=np.int64(first), second=np.int64(second))


@flax.struct.dataclass
class Panels:
    """A kernel `[D, F]` in panels.

    Attributes:
      values: of ceil(F / 16) panels; in 8 bits the last axis is two neighbouring lines; 0 past the last column and line.
      scales: by which the columns of int8 values are multiplied; None for float32.
      lines: D.
      columns: F.
      derived: it is a copy of another parameter, and no parameter itself.
    """

    values: Float[Array, "panels D 16"] | Int8[Array, "panels pairs 16 2"]
    scales: Float32[Array, " F"] | None
    lines: int = flax.struct.field(pytree_node=False)
    columns: int = flax.struct.field(pytree_node=False)
    derived: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def of(cls, kernel: Float[Array, "D F"] | Int8Kernel, derived: bool = False) -> "Panels":
        """Stores a kernel, float32 or in 8 bits."""
        if isinstance(kernel, Int8Kernel):
            lines, columns = kernel.values.shape
            return cls(_cut_pairs(kernel.values), kernel.scales, lines, columns, derived)
        lines, columns = kernel.shape
        return cls(_cut(jnp.asarray(kernel)), None, lines, columns, derived)

    def kernel(self) -> Float32[Array, "D F"] | Int8Kernel:
        """Returns what `of` was given."""
        values = _joined(self.values, self.lines, self.columns)
        return values if self.scales is None else Int8Kernel(values, self.scales)

    def matrix(self) -> Float32[Array, "D F"]:
        """Returns the kernel."""
        kernel = self.kernel()
        return kernel.matrix() if isinstance(kernel, Int8Kernel) else kernel

    def product(
        self, x: Float[Array, "*N D"], output_dtype, live: Bool[Array, "*N"] | None = None,
        before: Before = Before("nothing"), bias: Float[Array, " F"] | None = None,
        residual: Float[Array, "*N F"] | None = None, clear: bool = True,
    ) -> Float[Array, "*N {self.columns}"]:  # fmt: skip
        """Returns `before` of `x` times the kernel, plus `bias` and `residual` where they are given.

        That is 0 for rows that are False in `live`, which are not computed. With `clear` false those
        are not written either: they may hold anything, NaN too.
        """
        result = jax.ShapeDtypeStruct((*x.shape[:-1], self.columns), jnp.float32)
        call = jax.ffi.ffi_call(f"specdec_product_{self._kind}", result, vmap_method="sequential")
        more = [_or_none(array) for array in (before.scale, before.bias, bias, residual)]
        arguments = x.astype(jnp.float32), self.values, _or_none(self.scales), _flags(live), *more
        return call(*arguments, **before.attributes(), clear=clear).astype(output_dtype)

    def peak(
        self, x: Float[Array, "*N D"], live: Bool[Array, "*N"] | None = None, normalize=True
    ) -> tuple[Int32[Array, "*N"], Float32[Array, "*N"]]:
        """Returns of `product` the first greatest column of each row, −1 where a column is not a number, and its
        log-probability (NaN there); nothing is stored. Without `normalize` that is of no meaning."""
        results = [jax.ShapeDtypeStruct(x.shape[:-1], dtype) for dtype in (jnp.int32, jnp.float32)]
        call = jax.ffi.ffi_call(f"specdec_head_{self._kind}", results, vmap_method="sequential")
        arguments = x.astype(jnp.float32), self.values, _or_none(self.scales), _flags(live)
        return tuple(call(*arguments, columns=np.int64(self.columns), summed=bool(normalize)))

    @property
    def _kind(self) -> str:
        return "f32" if self.scales is None else "s8"


@jax.jit
def _cut(kernel: Shaped[Array, "D F"]) -> Shaped[Array, "panels D 16"]:
    padded = jnp.pad(kernel, ((0, 0), (0, -kernel.shape[1] % _COLUMNS)))
    return padded.reshape(len(kernel), -1, _COLUMNS).transpose(1, 0, 2)


@jax.jit
def _cut_pairs(kernel: Int8[Array, "D F"]) -> Int8[Array, "panels pairs 16 2"]:
    padded = _cut(jnp.pad(kernel, ((0, len(kernel) % 2), (0, 0))))
    return padded.reshape(len(padded), -1, 2, _COLUMNS).swapaxes(2, 3)


@functools.partial(jax.jit, static_argnames=("lines", "columns"))
def _joined(
    values: Float[Array, "panels D 16"] | Int8[Array, "panels pairs 16 2"], lines: int, columns: int
) -> Shaped[Array, "{lines} {columns}"]:
    if values.ndim == 4:  # in pairs
        values = values.swapaxes(2, 3).reshape(len(values), -1, _COLUMNS)
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)[:lines, :columns]


def _or_none(array: Float[Array, "*N"] | None) -> Float32[Array, "..."]:
    return jnp.zeros(0) if array is None else array.astype(jnp.float32)


def _flags(live: Bool[Array, "..."] | None) -> Bool[Array, "..."]:
    return jnp.zeros(0, bool) if live is None else live


def rows(
    table: Float32[Array, "lines D"], numbers: Int[Array, "*N"], live: Bool[Array, "*N"] | None = None
) -> Float32[Array, "*N D"]:
    """Returns the rows of `table` with the given numbers; those past an end take the row there, and
    what is False in `live` is 0."""
    result = jax.ShapeDtypeStruct((*numbers.shape, table.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call("specdec_rows", result, vmap_method="sequential")
    return call(table, numbers.astype(jnp.int32), _flags(live))


def attend_to_cache(
    qkv: Float32[Array, "B T QKV"], keys: Float32[Array, "*B H S K"], values: Float32[Array, "*B H S K"],
    bias: Float32[Array, "S H S"] | None, positions: Int32[Array, " B"], divisor: float, live: Live = None,
    clear: bool = True,
) -> tuple[Float32[Array, "B T H*K"], Float32[Array, "*B H S K"], Float32[Array, "*B H S K"]]:  # fmt: skip
    """Writes new keys and values to the caches, in place, and attends to all slots up to each query's own.

    Args:
      qkv: queries, keys and values, 3·H·K, as their joint kernel gives them.
      keys, values: as in `KVCache`.
      bias: by query position, added to the scores; None: nothing.
      positions: the first slot that is written in each row.
      divisor: of the scores, before the bias.
      live: False for positions that are not computed and write nothing; those that are come first. None: all.
      clear: as for `Panels.product`.

    Returns:
      Outputs, keys, values.
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
    qkv: Float32[Array, "B T QKV"], keys: Float32[Array, "*B H S K"], values: Float32[Array, "*B H S K"],
    bias: Float32[Array, "H P"] | None, nodes: Nodes, divisor: float, live: Live = None, clear: bool = True,
) -> tuple[Float32[Array, "B T H*K"], Float32[Array, "*B H S K"], Float32[Array, "*B H S K"]]:  # fmt: skip
    """As `attend_to_cache`, for nodes of trees; `bias` is that of the last of P positions, or None."""
    batch, queries, width = qkv.shape
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values))
    output = jax.ShapeDtypeStruct((batch, queries, width // 3), jnp.float32)
    call = jax.ffi.ffi_call(
        "specdec_node_attention", (output, *shapes), vmap_method="sequential", input_output_aliases={1: 1, 2: 2}
    )
    bias = jnp.zeros((0, 0)) if bias is None else bias
    arguments = qkv, keys, values, bias, nodes.starts, nodes.positions, nodes.paths, _flags(live)
    return tuple(call(*arguments, divisor=np.float32(divisor), clear=clear))


def attend_to_encoded(
    query: Float32[Array, "B T HK"], keys: Float32[Array, "B H L K"], values: Float32[Array, "B H L K"],
    lengths: Int32[Array, " B"], live: Live = None, clear: bool = True,
) -> Float32[Array, "B T H*K"]:  # fmt: skip
    """Returns the attention of queries over the first `lengths` keys and values; zeros for a row of length 0, and for
    positions that are False in `live`; `clear` as for `Panels.product`."""
    result = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    return jax.ffi.ffi_call("specdec_cross_attention", result, vmap_method="sequential")(
        query, keys, values, lengths, _flags(live), clear=clear
    )


def attend_to_inputs(
    qkv: Float32[Array, "B L QKV"], bias: Float32[Array, "L H L"], lengths: Int32[Array, " B"]
) -> Float32[Array, "B L QKV//3"]:
    """Returns an encoder's attention of the first `lengths` positions of each row over each other; 0 past them.

    Args:
      qkv: queries, keys and values, 3·H·K. bias: by query position.
    """
    result = jax.ShapeDtypeStruct((*qkv.shape[:2], qkv.shape[2] // 3), jnp.float32)
    return jax.ffi.ffi_call("specdec_encoder_attention", result, vmap_method="sequential")(qkv, bias, lengths)
