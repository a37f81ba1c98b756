"""The kernel of a draft step, `fused_step.py`, on a mesh of which every device holds the model
whole: each device runs it for its own rows."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from specdec_jax.backends.axes import PerRow, States
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.backends.tpu import fused_step


def fits(module: Any, params: dict, shape: tuple[int, ...], cache: Any, layers: int | None) -> bool:
    """Does what `fused_step.fits` does, also for a model that each device of a mesh holds whole."""
    if not fused_step.knows(module):
        return False
    rules, (batch, *rest) = cache.layers[0].rules, shape
    if rules is not None and rules.parts == 1 and batch % rules.rows == 0:
        shape, cache = (batch // rules.rows, *rest), _of_a_device(cache, batch // rules.rows)
    return fused_step.fits(module, params, shape, cache, layers)


def decode_states(
    module: Any,
    params: dict,
    x: States,
    positions: PerRow,
    cache: Any,
    layers: int | None = None,
) -> tuple[States, Any]:
    """Does what `fused_step.decode_states` does, where `fits`."""
    rules: ShardingRules | None = cache.layers[0].rules
    if rules is None:
        return fused_step.decode_states(module, params, x, positions, cache, layers=layers)

    def run(decoder, x, positions, cache):
        return fused_step.decode_states(
            module, {"decoder": decoder}, x, positions, cache, layers=layers
        )

    own, whole, rows = _placed(cache, None), PartitionSpec(), PartitionSpec("data")

    def by_rows(layer):
        return jax.tree.map(lambda x: rows if x.ndim == 4 else whole, layer)

    specs = jax.tree.map(
        lambda node: by_rows(node) if _is_layer(node) else whole, own, is_leaf=_is_layer
    )
    specs = specs.replace(cross_mask=rows)
    # The kernel says nothing of which devices its results differ on.
    on_each = jax.shard_map(
        run,
        mesh=rules.mesh,
        in_specs=(whole, rows, rows, specs),
        out_specs=(rows, specs),
        check_vma=False,
    )
    states, written = on_each(params["decoder"], x, positions, own)
    return states, _placed(written, rules)


def _is_layer(node: Any) -> bool:
    return isinstance(node, KVCache)


def _placed(cache: Any, rules: ShardingRules | None) -> Any:
    """Returns a decoder's cache whose layers say that they lie by `rules`."""

    def placed(node):
        return node.replace(rules=rules) if _is_layer(node) else node

    return jax.tree.map(placed, cache, is_leaf=_is_layer)


def _of_a_device(cache: Any, batch: int) -> Any:
    """Returns a cache of the shape that a device has of it, for `batch` rows."""
    return jax.tree.map(lambda x: x[:batch] if x.ndim == 4 else x, _placed(cache, None))
