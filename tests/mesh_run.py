"""Decodes on meshes of fake CPU devices, for `test_mesh.py`: a process's number of devices is fixed when JAX starts.

    python mesh_run.py FOLDER meshes                 # four devices: several meshes
    python mesh_run.py FOLDER process NUMBER PORT    # one of two processes with a device each

Prints one JSON object.
"""

import json
import os
import pathlib
import sys

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    if sys.argv[2] == "process":
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
import numpy as np
from toy_models import compilations

import specdec_jax as sd
from specdec_jax.formats.leaves import flatten
from specdec_jax.generate import advance
from specdec_jax.inference import GenerateOptions
from specdec_jax.sharding import ShardingRules

INPUTS = np.random.default_rng(0).integers(2, 64, (4, 6)).tolist()
TEMPERATURES, LIMITS, KEYS = [0.0, 0.0, 1.0, 1.0], [8, 5, 8, 6], range(4)


def load(folder: pathlib.Path, mesh, shard_drafter: bool = False):
    """Target and drafter; the latter whole on every device, unless it is to be divided."""
    drafter = sd.load(folder / "drafter", "float32", mesh=mesh, replicate=mesh is not None and not shard_drafter)
    return sd.load(folder / "target", "float32", mesh=mesh), sd.ModelDrafter(drafter)


def options(rows) -> dict:
    """Half of the rows argmax, half drawn; each has a limit and a key of its own."""
    return dict(
        sampling=sd.SamplingConfig(temperature=[TEMPERATURES[row] for row in rows]), eos_ids=(), gamma=2,
        max_new_tokens=[LIMITS[row] for row in rows], key=jax.vmap(jax.random.key)(np.array([KEYS[row] for row in rows])),
    )  # fmt: skip


def decode(target, drafter) -> dict:
    result = sd.generate(target, INPUTS, drafter=drafter, **options(range(4)))
    return {"tokens": result.tokens.tolist(), "accepted": result.stats.accepted, "drafted": result.stats.drafted}


def streamed(target, drafter) -> list:
    """Six inputs through four rows that are refilled."""
    rows = [0, 1, 2, 3, 1, 2]
    outputs = sd.decode_stream(target, [INPUTS[row] for row in rows], batch_size=4, drafter=drafter, **options(rows))
    found = dict(outputs)
    return [found[place][0].tokens for place in range(len(rows))]


def refused(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def meshes(folder: pathlib.Path) -> dict:
    found: dict = {}
    alone = load(folder, None)
    found["none"], found["none, plain"] = decode(*alone), decode(alone[0], None)
    stored = flatten(alone[0].params)
    for name, shape, shard in (("1x1", (1, 1), True), ("2x2", (2, 2), False), ("1x4", (1, 4), True)):
        target, drafter = load(folder, sd.make_mesh(*shape), shard)
        restored = flatten(target.params)
        found[name] = decode(target, drafter)
        found[name]["same weights"] = all(np.array_equal(restored[leaf], stored[leaf]) for leaf in stored)
        found[name]["fingerprint"] = target.fingerprint == alone[0].fingerprint
        found[name]["parts"] = {leaf: restored[leaf].addressable_shards[0].data.shape for leaf in stored}
        found[name]["drafter parts"] = {
            leaf: array.addressable_shards[0].data.shape for leaf, array in flatten(drafter.model.params).items()
        }
    # What is left is of the 2x2 mesh.
    target, drafter = load(folder, sd.make_mesh(2, 2))
    found["2x2, plain"], found["2x2, streamed"] = decode(target, None), streamed(target, drafter)
    found["compiled again"] = compilations(lambda: decode(target, drafter))
    state, request = sd.prepare(target, INPUTS, drafter=drafter, **options(range(4)))
    state = advance(request.network, request.drafter, state, np.int32(2**31 - 1))
    key = state.target_cache.layers[0].key
    found["cache"] = [key.shape, key.addressable_shards[0].data.shape]
    found["on every device"] = all(
        x.is_fully_replicated for x in (state.tokens, state.done, state.log_probs, state.counts.drafted)
    )
    draft_key = state.draft_state.cache.layers[0].key
    found["drafter's cache"] = [draft_key.shape, draft_key.addressable_shards[0].data.shape]
    found["refused"] = [
        refused(lambda: sd.make_mesh(2, 4)),
        refused(lambda: sd.load(folder / "target", "float32", mesh=sd.make_mesh(1, 3))),
        refused(lambda: sd.generate(target, INPUTS[:3])),
        refused(lambda: next(sd.decode_stream(target, INPUTS, batch_size=3))),
        refused(lambda: sd.generate(target, INPUTS, drafter=alone[1])),
        refused(GenerateOptions(target=str(folder / "target"), mesh="2x2", batch_size=5).check),
        refused(GenerateOptions(target=str(folder / "target"), mesh="1x3").load),
        refused(GenerateOptions(target=str(folder / "target"), mesh="2x2", drafter="lookup", shard_drafter=True).load),
    ]
    return found


def process(folder: pathlib.Path, number: str, port: str) -> dict:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))
    reads = []
    leaf_read = sd.checkpoints.Leaf.load_part
    sd.checkpoints.Leaf.load_part = lambda leaf, dtype, box: reads.append(leaf_read(leaf, dtype, box)) or reads[-1]
    target, drafter = load(folder, sd.make_mesh(1, 2))
    kernel = target.network.params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    return decode(target, drafter) | {
        "processes": jax.process_count(), "largest read": max(part.size for part in reads[len(reads) // 2 :]),
        "kernel": [kernel.shape, [shard.data.shape for shard in kernel.addressable_shards]],
        "refused": refused(lambda: sd.generate(target, INPUTS, deadline=1.0)),
    }  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    where, what = pathlib.Path(sys.argv[1]), {"meshes": meshes, "process": process}[sys.argv[2]]
    print(json.dumps(what(where, *sys.argv[3:])))
