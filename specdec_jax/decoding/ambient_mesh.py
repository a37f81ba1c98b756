"""Adapts networks to the devices that another framework's program is traced for.

T5X traces its programs under `with mesh:`. The program runs on that mesh's devices, whatever the
traced arrays say.
"""

import importlib
import warnings
from typing import Any

import jax
from jax.sharding import Mesh

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.models.network import Network


def find_ambient_mesh() -> Mesh | None:
    """Returns the mesh that a `with mesh:` around the traced program names, or None."""
    with warnings.catch_warnings():
        # JAX's, as long as T5X enters meshes so
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pxla = importlib.import_module("jax.interpreters.pxla")
            mesh = pxla.thread_resources.env.physical_mesh
        except (ImportError, AttributeError):
            return None
    return None if mesh.empty else mesh


def is_on_one_device() -> bool:
    """Returns whether the program runs on one device, as far as that can be known."""
    mesh: Any = find_ambient_mesh() or jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else mesh.size == 1


def can_call_cpu_kernels(dtype: str) -> bool:
    """Returns whether the CPU's own kernels can be called, for which nothing can be divided."""
    return packed_weights.can_pack(dtype) and is_on_one_device()


def adapt_to_mesh(network: Network, rows: int, replicate: bool = False) -> Network:
    """Returns a network whose calls and caches are laid out for the program's devices.

    Falls back to the portable layout, a CPU's, without kernels of accelerators (which the compiler
    cannot divide), where the devices are unknown or do not divide the network or the rows evenly.

    Args:
      network: the network, in any layout.
      rows: B, rows that are decoded together.
      replicate: whether every device holds the whole network, as for `ShardingRules`.
    """
    if network.skips_padding:
        return network
    mesh = find_ambient_mesh()
    if is_on_one_device():
        return network.with_backend(jax.default_backend() if mesh is None else _mesh_platform(mesh))
    try:
        if mesh is None:
            raise ValueError("mesh: got several devices without one")
        rules = ShardingRules(mesh, replicate)
        rules.check(network.config)
        rules.check_rows("inputs", rows)
    except ValueError:
        return network.with_backend("cpu")
    return network.with_backend(_mesh_platform(mesh), rules)


def adapt_drafter_to_mesh(drafter: Any, rows: int, target: Network) -> Any:
    """Returns a drafter with networks adapted by `adapt_to_mesh`; every device holds them whole.

    Parts of the target lie as the target does.
    """

    def adapt(leaf: Any) -> Any:
        if not isinstance(leaf, Network) or leaf.params is target.params:
            return leaf
        # Only what was made of the target, such as its weights in int8, has its rules already.
        derived = target.rules is not None and leaf.rules == target.rules
        return leaf if derived else adapt_to_mesh(leaf, rows, True)

    return jax.tree.map(adapt, drafter, is_leaf=lambda node: isinstance(node, Network))


def _mesh_platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
