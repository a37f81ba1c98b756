"""Parameters, caches and rows on a mesh of devices, by T5X's rules for logical axes.

A mesh has two axes. "model" divides every layer: each of its devices holds some of the heads, of
the feed-forward's columns and of the vocabulary, and their partial results are added up. "data"
divides the rows. Small arrays (tokens, lengths, counts) are whole on every device, so that every
host can read them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "model")
# T5X's `standard_logical_axis_rules` for one axis that divides activations and parameters; the last
# one is our own.
RULES = {
    "batch": "data",
    "vocab": "model",
    "embed": None,
    "mlp": "model",
    "heads": "model",
    "kv": None,
    "joined_kv": "model",
    "relpos_buckets": None,
    "abspos_buckets": None,
    "length": None,
    "fused_inputs": "model",
}
# The logical axes of parameters by the last two parts of their names; all others are on every
# device.
_PARAMETERS = {
    "token_embedder/embedding": ("vocab", "embed"),
    "encoder_embedder/embedding": ("vocab", "embed"),
    "position_embedder/embedding": ("abspos_buckets", "embed"),
    "relpos_bias/rel_embedding": ("heads", "relpos_buckets"),
    "logits_dense/kernel": ("embed", "vocab"),
    "query/kernel": ("embed", "joined_kv"),
    "key/kernel": ("embed", "joined_kv"),
    "value/kernel": ("embed", "joined_kv"),
    "out/kernel": ("joined_kv", "embed"),
    "wi/kernel": ("embed", "mlp"),
    "wi_0/kernel": ("embed", "mlp"),
    "wi_1/kernel": ("embed", "mlp"),
    "wo/kernel": ("mlp", "embed"),
    "wi/bias": ("mlp",),
    "query/bias": ("joined_kv",),
    "key/bias": ("joined_kv",),
    "value/bias": ("joined_kv",),
    "decoder/logits_bias": ("vocab",),
    # GPT-2's joint weight. Divided by its outputs, one part would have the queries and another the
    # values; so it is divided by its inputs and the parts' products are added up, which takes a
    # third collective in each layer.
    "qkv/kernel": ("fused_inputs", None),
}
# The fields of configurations that the number of parts must divide.
_OF_STACK = "num_heads", "num_kv_heads", "mlp_dim"
_DIVIDED = *_OF_STACK, *(f"encoder_{name}" for name in _OF_STACK)


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """The way one model lies on a mesh; hashable, static under jit.

    Attributes:
      mesh: the mesh, with the axes "data" and "model".
      replicate: whether every device holds the whole model, and only rows are divided: for
        drafters, which are small and would spend their time in collectives.
    """

    mesh: Mesh
    replicate: bool = False

    def __post_init__(self):
        if tuple(self.mesh.axis_names) != AXES:
            raise ValueError(f"mesh: got the axes {tuple(self.mesh.axis_names)}, expected {AXES}")
        # The axes that jax.make_mesh makes are explicit; here the compiler learns layouts from
        # constraints.
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, AXES))

    @property
    def rows(self) -> int:
        """Number of parts into which the rows are divided."""
        return self.mesh.shape["data"]

    @property
    def parts(self) -> int:
        """Number of parts into which the model is divided."""
        return 1 if self.replicate else self.mesh.shape["model"]

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Returns the sharding of an array with these logical axes.

        Without any, the array is whole on every device.
        """
        names = (RULES[axis] if axis else None for axis in axes)
        kept = (None if name == "model" and self.replicate else name for name in names)
        return NamedSharding(self.mesh, PartitionSpec(*kept))

    def parameter_sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of the parameter `name`, which is T5X's name, `/`-joined.

        A vocabulary whose size the number of parts does not divide is whole on every device.
        """
        axes = _PARAMETERS.get("/".join(name.split("/")[-2:]), ())
        whole = [axis == "vocab" and size % self.parts for axis, size in zip(axes, shape)]
        return self.sharding(*(None if skip else axis for skip, axis in zip(whole, axes)))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Returns `x` with the sharding of these logical axes; under jit."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

    def put(self, tree: Any) -> Any:
        """Copies every array of `tree` that is not yet on this mesh whole to all its devices."""
        whole = self.sharding()

        def put(leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array):
                if leaf.sharding.device_set == whole.device_set:
                    return leaf
                if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    return jax.random.wrap_key_data(
                        put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
                    )
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, whole, lambda index: host[index])

        return jax.tree.map(put, tree)

    def check(self, config: Any) -> None:
        """Checks that a network of this configuration can be divided so.

        Raises ValueError otherwise.
        """
        for name in _DIVIDED:
            if getattr(config, name, 0) % self.parts:
                raise ValueError(
                    f"mesh: got {self.parts} devices on the model axis for {name} ="
                    f" {getattr(config, name)}, expected a divisor of it, or a model that every"
                    " device holds whole"
                )

    def check_rows(self, name: str, rows: int) -> None:
        """Checks that `rows` rows can be divided; raises ValueError otherwise.

        `name` is the argument to blame.
        """
        if rows % self.rows:
            raise ValueError(
                f"{name}: got {rows} rows, expected a multiple of the mesh's data axis, {self.rows}"
            )


def row_multiple(rules: ShardingRules | None) -> int:
    """Returns the number of which the number of rows decoded together must be a multiple."""
    return 1 if rules is None else rules.rows


def read_parts(
    sharding: NamedSharding, shape: tuple[int, ...], load: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Makes an array on the mesh, of which each process reads once what its own devices hold.

    Args:
      load: returns the part of the array in a box, which is a tuple of one slice for each axis.
    """

    def bounds(indices: tuple[slice, ...]) -> list[tuple[int, int]]:
        return [index.indices(size)[:2] for index, size in zip(indices, shape)]

    held = map(bounds, sharding.addressable_devices_indices_map(shape).values())
    box = [(min(starts), max(stops)) for starts, stops in (zip(*axis) for axis in zip(*held))]
    part = load(tuple(slice(*outer) for outer in box))

    def shard(indices: tuple[slice, ...]) -> np.ndarray:
        inner = zip(bounds(indices), box)
        return part[tuple(slice(a - first, b - first) for (a, b), (first, _) in inner)]

    return jax.make_array_from_callback(shape, sharding, shard)


def constrain_sharding(tree: Any, rules: ShardingRules | None) -> Any:
    """Returns `tree` with its layout fixed; under jit.

    Caches have a `constrain_sharding` of their own; all else is whole on every device. Otherwise
    the compiler chooses a layout for what a program returns, and the next call, which gets that
    layout, compiles a new program.
    """
    if rules is None:
        return tree

    def constrain(node: Any) -> Any:
        own = getattr(node, "constrain_sharding", None)
        return own() if own else rules.constrain(node)

    return jax.tree.map(constrain, tree, is_leaf=lambda node: hasattr(node, "constrain_sharding"))
