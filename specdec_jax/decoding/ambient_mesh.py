"""Lays networks out for the devices for which somebody else's program is being traced.

T5X traces its programs under `with mesh:`, over all devices. It is they that the program runs on,
whatever the arrays that are traced say.
"""

import importlib
import warnings
from typing import Any

import jax
from jax.sharding import Mesh

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.models.network import Network


def ambient_mesh() -> Mesh | None:
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


def alone() -> bool:
    """Returns whether the program runs on one device, as far as that can be known."""
    mesh: Any = ambient_mesh() or jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else mesh.size == 1


def native(dtype: str) -> bool:
    """Returns whether the CPU's own kernels can be called, for which nothing can be divided."""
    return packed_weights.usable(dtype) and alone()


def laid_out(network: Network, rows: int, replicate: bool = False) -> Network:
    """Returns a network whose calls and caches are laid out for the program's devices.

    On several devices that are not known, or that do not divide the network or the rows evenly, it
    is what is right anywhere, and slower: a CPU's layout, without kernels of accelerators, which
    the compiler cannot divide.

    Args:
      network: the network, in any layout.
      rows: B, rows that are decoded together.
      replicate: whether every device holds the whole network, as for `ShardingRules`.
    """
    if network.skips_padding:
        return network
    mesh = ambient_mesh()
    if alone():
        return network.with_backend(jax.default_backend() if mesh is None else _platform(mesh))
    try:
        if mesh is None:
            raise ValueError("mesh: got several devices without one")
        rules = ShardingRules(mesh, replicate)
        rules.check(network.config)
        rules.check_rows("inputs", rows)
    except ValueError:
        return network.with_backend("cpu")
    return network.with_backend(_platform(mesh), rules)


def laid_out_drafter(drafter: Any, rows: int) -> Any:
    """Returns a drafter whose networks are laid out as by `laid_out`.

    Every device holds them whole.
    """
    return jax.tree.map(
        lambda node: laid_out(node, rows, replicate=True) if isinstance(node, Network) else node,
        drafter,
        is_leaf=lambda node: isinstance(node, Network),
    )


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
