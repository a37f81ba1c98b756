"""Runs the kernel of a draft step on meshes of fake CPU devices, for `test_fused_mesh.py`.

It is a process of its own, since the number of devices is fixed when JAX starts.

    python fused_mesh_run.py "2x2, 4" "1x4, 1"    # meshes and numbers of rows

Prints one JSON object: for each mesh and number of rows the shapes that reached the kernel on a
device, and how far numbers are from those of XLA's layers.
"""

import functools
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.backends.tpu import fused_step
from specdec_jax.models.language_model import LanguageModel

INPUTS = np.array([[3, 4, 5, 6], [7, 8, 9, 0], [10, 0, 0, 0], [3, 5, 7, 0]], np.int32)


def difference(mesh: tuple[int, int], rows: int, calls: list) -> float:
    """Returns the greatest difference of states and caches after a call over two positions."""
    shape = dict(emb_dim=128, num_heads=4, head_dim=64, mlp_dim=128)
    alone = tiny_t5(0, 24, **shape)
    rules = ShardingRules(sd.make_mesh(*mesh), replicate=True)
    model = LanguageModel(alone.config, alone.params, rules=rules)
    network = model.network.with_backend("tpu", rules)
    lengths = rules.put(jnp.asarray((INPUTS > 0).sum(1)[:rows]))
    cache = jax.jit(lambda network, *given: network.prefill(*given, 34))(
        network, rules.put(INPUTS[:rows]), lengths
    )

    @jax.jit
    def both(network, cache):
        fed = jnp.arange(rows * 20).reshape(rows, 20) % 20 + 3
        _, cache = network.decode_states(fed, jnp.zeros(rows, int), cache)
        tokens, positions = fed[:, :2], jnp.array([15, 16, 14, 3])[:rows]
        actual = network.decode_states(tokens, positions, cache)
        os.environ["SPECDEC_KERNEL"] = "off"
        return actual, network.decode_states(tokens, positions, cache)

    os.environ["SPECDEC_KERNEL"] = ""
    del calls[:]
    actual, expected = both(network, cache)
    if rows == 1:  # XLA's layers are fed more positions, whose slots are stale afterwards
        actual, expected = jax.tree.map(
            lambda x: x[..., :17, :] if x.ndim == 3 and x.shape[-2] > 17 else x, (actual, expected)
        )
    gaps = jax.tree.map(
        lambda a, b: float(np.abs(np.float32(a) - np.float32(b)).max()), actual, expected
    )
    assert not np.any(np.isnan(jax.tree.leaves(gaps)))
    return max(jax.tree.leaves(gaps))


def main(cases: list[str]) -> dict:
    packed_weights.can_pack = lambda dtype: False
    calls: list = []
    step = functools.partial(fused_step.decode_states, interpret=True)

    def noted(module, params, x, *rest, **named):
        calls.append(x.shape)
        return step(module, params, x, *rest, **named)

    fused_step.decode_states = noted
    jax.lax.platform_dependent = lambda *given, tpu=None, cpu=None, default: (
        tpu or cpu or default
    )(*given)
    results = {}
    for case in cases:
        mesh, rows = case.split(", ")
        data, model = map(int, mesh.split("x"))
        gap = difference((data, model), int(rows), calls)
        results[case] = {"difference": gap, "calls": list(calls)}
    return results


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    print(json.dumps(main(sys.argv[1:])))
