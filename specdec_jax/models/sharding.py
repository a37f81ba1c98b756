"""Where parameters, caches and rows lie on a mesh of devices, by T5X's rules for logical axes.

A mesh has two axes. "model" divides every layer: its devices hold some of the heads, of the
feed-forward's columns and of the vocabulary, and add up what they found. "data" divides the rows.
What is small (tokens, lengths, counts) every device has whole, so that the host can read it
wherever it runs.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "model")
# T5X's `standard_logical_axis_rules` where one axis divides activations and parameters, and, last, one of our own.
RULES = {
    "batch": "data", "vocab": "model", "embed": None, "mlp": "model", "heads": "model", "kv": None, "joined_kv":
        "model",
    "relpos_buckets": None, "abspos_buckets": None, "length": None, "fused_inputs": "model",
}  # fmt: skip
# The logical axes of parameters by the last two parts of their names; all others are on every device.
_PARAMETERS = {
    "token_embedder/embedding": ("vocab", "embed"),
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
    # GPT-2's. Cut by its outputs, one part would have the queries and another the values; cut by its inputs, the
    # parts' sums are added up, which costs a third collective in a layer.
    "qkv/kernel": ("fused_inputs", None),
}


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of `data · model` devices; the first ones, where one process has more.

    Raises:
      ValueError: another number of devices than there are.
    """
    devices, count = jax.devices(), data * model
    if min(data, model) < 1 or count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        expected = f"all of the {len(devices)}" if jax.process_count() > 1 else f"1 to {len(devices)}, which there are"
        raise ValueError(f"mesh: got {data}x{model} devices, expected {expected}")
    if count == len(devices):
        return Mesh(mesh_utils.create_device_mesh((data, model), devices), AXES)  # neighbours on a TPU's links
    return Mesh(np.array(devices[:count]).reshape(data, model), AXES)


def parse_mesh(text: str) -> tuple[int, int]:
    """`(2, 4)` of "2x4"; raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ValueError(f"mesh: got {text!r}, expected DATAxMODEL, two numbers of devices, such as 1x4")
    return int(match[1]), int(match[2])


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """How one model lies on a mesh; hashable, static under jit.

    Attributes:
      mesh: with the axes "data" and "model".
      replicate: every device holds the whole model, and only rows are divided: for drafters, which are small, and would
        spend their time in collectives.
    """

    mesh: Mesh
    replicate: bool = False

    def __post_init__(self):
        if tuple(self.mesh.axis_names) != AXES:
            raise ValueError(f"mesh: got the axes {tuple(self.mesh.axis_names)}, expected {AXES}")
        # jax.make_mesh's axes are explicit; here the compiler is told by constraints.
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, AXES))

    @property
    def rows(self) -> int:
        """Parts that the rows are divided into."""
        return self.mesh.shape["data"]

    @property
    def parts(self) -> int:
        """Parts that the model is divided into."""
        return 1 if self.replicate else self.mesh.shape["model"]

    def sharding(self, *axes: str | None) -> NamedSharding:
        """That of an array with these logical axes; of none: whole on every device."""
        names = [RULES[axis] if axis else None for axis in axes]
        return NamedSharding(self.mesh, PartitionSpec(*(self._kept(name) for name in names)))

    def _kept(self, name: str | None) -> str | None:
        return None if name == "model" and self.replicate else name

    def of_parameter(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """That of the parameter `name` (T5X's, `/`-joined); a vocabulary of no whole number of parts is not divided."""
        axes = _PARAMETERS.get("/".join(name.split("/")[-2:]), ())
        return self.sharding(
            *(None if axis == "vocab" and size % self.parts else axis for axis, size in zip(axes, shape))
        )

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x` under jit, laid out so."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

    def locally(self, function: Callable, axes: tuple, result: tuple) -> Callable:
        """`function` of what each device has of its arguments; `axes`: the logical axes of each,
        `result`: of its result."""
        spec = lambda axes: self.sharding(*axes).spec
        return jax.shard_map(function, mesh=self.mesh, in_specs=tuple(map(spec, axes)), out_specs=spec(result))

    def put(self, tree):
        """`tree` with every array that is not yet on this mesh whole on each of its devices."""
        whole = self.sharding()

        def put(leaf):
            if isinstance(leaf, jax.Array):
                if leaf.sharding.device_set == whole.device_set:
                    return leaf
                if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, whole, lambda index: host[index])

        return jax.tree.map(put, tree)

    def check(self, config: Any) -> None:
        """Raises ValueError where a network of this configuration cannot be divided so."""
        for name in ("num_heads", "mlp_dim"):
            if getattr(config, name) % self.parts:
                raise ValueError(
                    f"mesh: got {self.parts} devices on the model axis for {name} = {getattr(config, name)}, "
                    "expected a divisor of it, or a model that every device holds whole"
                )

    def check_rows(self, name: str, rows: int) -> None:
        """Raises ValueError where so many rows cannot be divided."""
        if rows % self.rows:
            raise ValueError(f"{name}: got {rows} rows, expected a multiple of the mesh's data axis, {self.rows}")


def row_parts(rules: ShardingRules | None) -> int:
    """What rows that are decoded together must be a multiple of."""
    return 1 if rules is None else rules.rows


def read(sharding: NamedSharding, shape: tuple[int, ...], load: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """An array on the mesh, of which a process reads what its own devices hold, and that once.

    Args:
      load: the part of the array in a box, which is a slice of every axis.
    """
    held = [
        [slice(*index.indices(size)) for index, size in zip(indices, shape)]
        for indices in sharding.addressable_devices_indices_map(shape).values()
    ]
    box = tuple(slice(min(i.start for i in axis), max(i.stop for i in axis)) for axis in zip(*held))
    part = load(box)

    def shard(indices):
        whole = [slice(*index.indices(size)) for index, size in zip(indices, shape)]
        return part[tuple(slice(i.start - outer.start, i.stop - outer.start) for i, outer in zip(whole, box))]

    return jax.make_array_from_callback(shape, sharding, shard)


def pinned(tree, rules: ShardingRules | None):
    """`tree` under jit with its layout fixed: caches as they say themselves (`pinned`), all else whole on every device.

    Otherwise the compiler chooses one for what a program returns, and the next call of it compiles anew for that.
    """
    if rules is None:
        return tree
    owns = lambda node: hasattr(node, "pinned")
    return jax.tree.map(lambda node: node.pinned() if owns(node) else rules.constrain(node), tree, is_leaf=owns)
