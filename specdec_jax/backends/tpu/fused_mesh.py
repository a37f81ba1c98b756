"""The kernel of a draft step, `fused_step.py`, on one TPU or on a mesh.

On a mesh every device holds the model whole, and runs the kernel for its own rows.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from specdec_jax.backends.axes import PerRow, States
from specdec_jax.backends.tpu import fused_step


def supports_call(
    module: Any, params: dict, shape: tuple[int, int], cache: Any, layers: int | None
) -> bool:
    """Does what `fused_step.supports_call` does, also for a mesh."""
    if not fused_step.supports_module(module):
        return False
    rules, (batch, queries) = module.backend.rules, shape
    if rules is not None:
        if rules.parts > 1 or batch % rules.rows:
            return False
        batch //= rules.rows
        cache = jax.tree.map(lambda x: x[:batch] if x.ndim == 4 else x, cache)  # a device's part
    return fused_step.supports_call(module, params, (batch, queries), cache, layers)


def decode_states(
    module: Any, params: dict, x: States, positions: PerRow, cache: Any, layers: int | None = None
) -> tuple[States, Any]:
    """Does what `fused_step.decode_states` does, where `supports_call`."""

    def run(decoder, x, positions, cache):
        params = {"decoder": decoder}
        return fused_step.decode_states(module, params, x, positions, cache, layers=layers)

    given, rules = (params["decoder"], x, positions, cache), module.backend.rules
    if rules is None:
        return run(*given)
    whole, rows = PartitionSpec(), PartitionSpec("data")
    specs = jax.tree.map(lambda x: rows if x.ndim == 4 else whole, cache).replace(cross_mask=rows)
    # The kernel does not say on which devices its results differ: no check of that.
    return jax.shard_map(
        run,
        mesh=rules.mesh,
        in_specs=(whole, rows, rows, specs),
        out_specs=(rows, specs),
        check_vma=False,
    )(*given)
