"""Decodes inside another program on meshes of fake CPU devices, for `test_traced_mesh.py`.

It is a process of its own, since the number of devices is fixed when JAX starts.

Prints one JSON object: for each case the mesh's axes, rules that the networks got, and the tokens.
"""

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.backend import TPUBackend
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.sharding import AXES, ShardingRules
from specdec_jax.decoding import ambient_mesh, under_jit
from specdec_jax.decoding.under_jit import Decoder
from specdec_jax.decoding.under_jit_beams import BeamDecoder
from specdec_jax.drafters.traced_target import TracedSelf
from specdec_jax.models.parameters import flatten, unflatten

V, LENGTH = 24, 12
INPUTS = np.array([[3, 4, 5, 6], [7, 8, 9, 0], [10, 0, 0, 0], [3, 5, 7, 0]], np.int32)
SAMPLED = sd.SamplingConfig(temperature=0.8)


def model(noise: float = 0.0, heads: int = 4) -> sd.LanguageModel:
    target = tiny_t5(0, V, num_heads=heads, head_dim=8)
    return noisy_copy(target, noise) if noise else target


def decoders(target: sd.LanguageModel, drafter) -> dict:
    return {
        "plain": Decoder(target.config),
        "chain": Decoder(target.config, drafter, gamma=3),
        "sampled": Decoder(target.config, drafter, gamma=3, sampling=SAMPLED),
        "tree": Decoder(target.config, drafter, gamma="auto", tree=sd.Tree.uniform((2, 1))),
        "int8": Decoder(target.config, TracedSelf(), gamma=3),
        "n-grams": Decoder(target.config, sd.PromptLookupDrafter(), gamma=3),
        "beams": BeamDecoder(target.config, drafter, gamma=2),
    }


def placed(params: dict, mesh: Mesh | None) -> dict:
    """The parameters as T5X's standard rules divide them, where the mesh can."""
    if mesh is None or tuple(mesh.axis_names) != AXES:
        return params
    rules = ShardingRules(mesh)

    def put(name, leaf):
        try:
            return jax.device_put(leaf, rules.parameter_sharding(name, leaf.shape))
        except ValueError:  # too few heads
            return jax.device_put(leaf, rules.sharding())

    return unflatten({name: put(name, leaf) for name, leaf in flatten(params).items()})


def decode(decoder, params: dict, mesh: Mesh | None) -> list:
    inputs, prompts = jnp.asarray(INPUTS), jnp.zeros((len(INPUTS), LENGTH), jnp.int32)
    if mesh is not None:
        rows = NamedSharding(mesh, PartitionSpec("data"))
        inputs, prompts = jax.device_put((inputs, prompts), rows)
    more = {"num_decodes": 2} if isinstance(decoder, BeamDecoder) else {}

    def run(params, inputs, prompts):
        return decoder.decode(params, inputs, prompts, 1, jax.random.key(3), **more)

    if mesh is None:
        return np.asarray(jax.jit(run)(params, inputs, prompts).tokens).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # T5X enters its mesh so, which JAX deprecates
        with mesh:
            return np.asarray(jax.jit(run)(params, inputs, prompts).tokens).tolist()


MESHES = ("1x4", "2x2", "4x1", "slices", "none")
KINDS = ("plain", "chain", "sampled", "tree", "int8", "n-grams", "beams")
CASES = [f"{mesh}, {kind}" for mesh in MESHES for kind in KINDS] + [
    f"1x4, six heads, {kind}" for kind in KINDS
]


def main(cases: list[str]) -> dict:
    if "native" not in cases:
        packed_weights.can_pack = lambda dtype: False
    seen: list = []
    lay_out = ambient_mesh.adapt_to_mesh

    def noted(network, rows, replicate=False):
        result = lay_out(network, rows, replicate)
        seen.append(
            [
                replicate,
                "tpu" if isinstance(result.backend, TPUBackend) else "cpu",
                None if result.rules is None else [result.rules.rows, result.rules.parts],
            ]
        )
        return result

    ambient_mesh.adapt_to_mesh = under_jit.adapt_to_mesh = noted
    ambient_mesh._mesh_platform = lambda mesh: "tpu"  # so that caches have a TPU's layout
    devices, result = np.array(jax.devices()), {}
    meshes = {
        "1x4": Mesh(devices.reshape(1, 4), AXES),
        "2x2": Mesh(devices.reshape(2, 2), AXES),
        "4x1": Mesh(devices.reshape(4, 1), AXES),
        "slices": Mesh(devices.reshape(1, 2, 2), ("replica", *AXES)),
        "none": None,
    }
    for case in cases:
        if case == "native":
            continue
        name, *heads, kind = case.split(", ")
        count = 6 if heads else 4
        target = model(heads=count)
        del seen[:]
        decoder = decoders(target, sd.ModelDrafter(model(0.1, count)))[kind]
        tokens = decode(decoder, placed(target.params, meshes[name]), meshes[name])
        result[case] = {"tokens": tokens, "networks": list(seen)}
    return result


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    print(json.dumps(main(sys.argv[1:])))
