"""Decodes on meshes of fake CPU devices, for `test_mesh.py`.

It is a process of its own, since the number of devices is fixed when JAX starts.

    python mesh_run.py FOLDER 2x2|meshes|more|encoders  # four devices: one mesh, or several
    python mesh_run.py FOLDER process NUMBER PORT       # one of two processes with a device each

Prints one JSON object.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import sys

import jax
import numpy as np
from toy_models import compilations, make_student, noisy_copy

import specdec_jax as sd
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.checkpoints.stored_tensor import StoredTensor
from specdec_jax.commands import main
from specdec_jax.commands.generate import GenerateOptions
from specdec_jax.decoding.generate import advance
from specdec_jax.models.parameters import flatten

if __name__ == "__main__":
    devices = 1 if sys.argv[2] == "process" else 4
    flags = os.environ.get("XLA_FLAGS", "")  # those that make compilations quick
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
    }

INPUTS = np.random.default_rng(0).integers(2, 64, (4, 6)).tolist()
MIXED, ARGMAX, LIMITS = (0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), (8, 5, 8, 6)


def load(folder: pathlib.Path, mesh, shard_drafter: bool = False):
    """Loads target and drafter; the drafter is whole on every device, or divided if asked."""
    drafter = sd.load(
        folder / "drafter", "float32", mesh=mesh, replicate=mesh is not None and not shard_drafter
    )
    return sd.load(folder / "target", "float32", mesh=mesh), sd.ModelDrafter(drafter)


def options(rows, temperatures=MIXED) -> dict:
    """Returns options: argmax for half of the rows, a limit and a key for each."""
    return dict(
        sampling=sd.SamplingConfig(temperature=[temperatures[row] for row in rows]),
        eos_ids=(),
        gamma=2,
        max_new_tokens=[LIMITS[row] for row in rows],
        key=jax.vmap(jax.random.key)(np.array(rows)),
    )


def decode(target, drafter, temperatures=MIXED) -> dict:
    result = sd.generate(target, INPUTS, drafter=drafter, **options(range(4), temperatures))
    return {
        "tokens": result.tokens.tolist(),
        "accepted": result.stats.accepted,
        "drafted": result.stats.drafted,
    }


def refilled(target, drafter, **more) -> list:
    """Returns the tokens of six inputs that go through four rows, which are refilled."""
    rows = [0, 1, 2, 3, 1, 2]
    outputs = sd.decode_stream(
        target,
        [INPUTS[row] for row in rows],
        batch_size=4,
        drafter=drafter,
        **options(rows),
        **more,
    )
    result = dict(outputs)
    return [result[place][0].tokens for place in range(len(rows))]


def remembered(target, drafter) -> dict:
    """Returns the tokens of the refilled rows with drafters that learn while they decode."""
    history = sd.SuffixHistory(target, capacity=512)
    cascade = sd.HorizontalCascade(sd.SuffixDrafter(min_match=2), drafter, 2)
    found = {
        "history": refilled(target, None, learner=history, verifier="gumbel"),
        "its texts": refilled(target, history.drafter, verifier="gumbel"),
        "before a model": refilled(
            target,
            None,
            learner=sd.SuffixHistory(target, cascade, capacity=512),
            verifier="gumbel",
        ),
    }
    for shared in (False, True):
        tables = sd.TokenRecycling(target.config.vocab_size, shared=shared)
        found[f"recycling, shared {shared}"] = refilled(target, tables, verifier="gumbel")
    return found


def rejected(call) -> str:
    """Returns the message with which a call is rejected, or "nothing"."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def described(target, drafter, stored: dict) -> dict:
    """Returns each device's part of both models, and whether its parameters are the stored ones."""
    restored = flatten(target.params)

    def part(params):
        return {name: array.addressable_shards[0].data.shape for name, array in params.items()}

    return {
        "same weights": all(np.array_equal(restored[name], stored[name]) for name in stored),
        "parts": part(restored),
        "drafter parts": part(flatten(drafter.model.params)),
    }


def printed(command: str, *arguments: str) -> str:
    """Returns what a command prints with the bundled pair."""
    out = io.StringIO()
    flags = [
        "--target=ende/target",
        "--drafter=ende/drafter",
        "--dtype=float32",
        "--max_new_tokens=16",
    ]
    with contextlib.redirect_stdout(out):
        assert main.main([command, *flags, "--compilation_cache_dir=", *arguments]) == 0
    return out.getvalue()


def identity(model: sd.LanguageModel) -> list[str]:
    return [model.fingerprint, model.contents]


def tables() -> dict:
    """Decodes with a position table per layer, on one device and on two times two.

    Returns tokens and a device's part of a table.
    """
    config = sd.T5Config(64, 16, 4, 4, 1, 2, 24, relative_bias_per_layer=True)
    models = [
        sd.LanguageModel.random(config, rules=rules)
        for rules in (None, ShardingRules(sd.make_mesh(2, 2)))
    ]
    tokens = [
        sd.generate(model, INPUTS, drafter=sd.ModelDrafter(model), **options(range(4))).tokens
        for model in models
    ]
    table = flatten(models[1].params)["decoder/layers_1/relpos_bias/rel_embedding"]
    return {
        "tokens": [result.tolist() for result in tokens],
        "part": table.addressable_shards[0].data.shape,
    }


def two_by_two(folder: pathlib.Path) -> dict:
    """Returns tokens on two times two devices, where arrays lie, and what is rejected."""
    alone = load(folder, None)
    target, drafter = load(folder, sd.make_mesh(2, 2))
    found: dict = {"2x2": decode(target, drafter)}
    found["compiled again"] = compilations(lambda: decode(target, drafter))
    found["of 2x2"] = described(target, drafter, flatten(alone[0].params))
    found["identity"] = [identity(alone[0]), identity(target)]
    state, request = sd.prepare(target, INPUTS, drafter=drafter, **options(range(4)))
    state = advance(request.network, request.drafter, state, np.int32(2**31 - 1))
    found["on every device"] = all(
        array.is_fully_replicated
        for array in (state.tokens, state.done, state.log_probs, state.counts.drafted)
    )
    for name, cache in (
        ("cache", state.target_cache),
        ("drafter's cache", state.draft_state.cache),
    ):
        key = cache.layers[0].key
        found[name] = [key.shape, key.addressable_shards[0].data.shape]
    command = functools.partial(GenerateOptions, target=str(folder / "target"))
    found["rejected"] = [
        rejected(lambda: sd.make_mesh(2, 4)),
        rejected(lambda: sd.load(folder / "target", "float32", mesh=sd.make_mesh(1, 3))),
        rejected(lambda: sd.generate(target, INPUTS[:3])),
        rejected(lambda: next(sd.decode_stream(target, INPUTS, batch_size=3))),
        rejected(lambda: sd.generate(target, INPUTS, drafter=alone[1])),
        rejected(command(mesh="2x2", batch_size=5).check),
        rejected(command(mesh="1x3").load),
        rejected(command(mesh="2x2", drafter="lookup", shard_drafter=True).load),
    ]
    return found


def meshes(folder: pathlib.Path) -> dict:
    """Returns tokens on one device, and on two other meshes for argmax rows; and all parts."""
    alone = load(folder, None)
    first, four = load(folder, sd.make_mesh(1, 1)), load(folder, sd.make_mesh(1, 4), True)
    found = {
        "none": decode(*alone),
        "1x4, argmax": decode(*four, ARGMAX),
        "1x1, plain, argmax": decode(first[0], None, ARGMAX),
        "identity": [identity(model) for model in (alone[0], first[0], four[0])],
        "tables": tables(),
    }
    for name, models in (("1x1", first), ("1x4", four)):
        found["of " + name] = described(*models, flatten(alone[0].params))
    return found


def more(folder: pathlib.Path) -> dict:
    """Returns results of the remaining meshes, of refilled rows, and of a decoder-only model."""
    alone = load(folder, None)
    result = {"none": decode(*alone), "none, plain": decode(alone[0], None)}
    for shape in ((1, 1), (2, 2), (1, 4)):
        name, models = "x".join(map(str, shape)), load(folder, sd.make_mesh(*shape))
        if shape != (2, 2):
            result[name] = decode(*models)
        else:
            result[name + ", refilled"] = refilled(*models)
            result[name + ", remembered"] = remembered(*models)
            result["none, coupled"] = refilled(alone[0], None, verifier="gumbel")
        result[name + ", plain"] = decode(models[0], None)
    # The bundled drafter reads the target's encoder output; five sentences are no whole number of
    # batches.
    sentences = [
        "Tom is here.",
        "I am tired.",
        "Where is the key?",
        "We met her in the park.",
        "Thank you.",
    ]
    result["command"] = [
        printed("generate", *flags, *sentences) for flags in ([], ["--mesh=2x2", "--batch_size=4"])
    ]
    timing = ["--gamma=2", "--limit=2", "--repeats=1", "--json", "--mesh=1x2"]
    result["benchmark"] = json.loads(printed("benchmark", *timing))
    config = sd.GPTConfig(65, 16, 4, 1, 32)  # 65: a vocabulary that no mesh divides
    tokens = np.array(INPUTS)
    gpts = [
        sd.LanguageModel.random(config, rules=rules)
        for rules in (None, ShardingRules(sd.make_mesh(2, 2)))
    ]
    one, divided = (np.asarray(model.logits(None, tokens)) for model in gpts)
    result["gpt"] = float(np.max(np.abs(one - divided)))
    result["gpt tokens"] = [
        sd.generate(model, tokens, max_new_tokens=5, eos_ids=()).tokens.tolist() for model in gpts
    ]
    return result


def encoders(folder: pathlib.Path) -> dict:
    """Returns what drafters with the target's encoder draft, and whether they share it on meshes.

    Every device holds the drafter whole.
    """
    target = sd.load(folder / "target", "float32")
    found = {"none": decode(target, sd.ModelDrafter(make_student(target)))}
    for data, parts in ((2, 1), (2, 2)):
        mesh = sd.make_mesh(data, parts)
        target = sd.load(folder / "target", "float32", mesh=mesh)
        student = make_student(target, rules=ShardingRules(mesh, replicate=True))
        drafter, name = sd.ModelDrafter(student), f"{data}x{parts}"
        found[name] = decode(target, drafter)
        ours, theirs = (
            {id(leaf) for leaf in jax.tree.leaves(model.network.params["encoder"])}
            for model in (target, student)
        )
        found["of " + name] = [drafter.pair_with(target).reads_encoder, ours == theirs]
        changed = make_student(noisy_copy(target, 0.1), rules=student.network.rules)
        changed = sd.ModelDrafter(changed)
        found["of " + name] += [changed.pair_with(target).reads_encoder]
    return found


def process(folder: pathlib.Path, number: str, port: str) -> dict:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))
    reads = []
    leaf_read = StoredTensor.load_part
    StoredTensor.load_part = lambda leaf, dtype, box: (
        reads.append(leaf_read(leaf, dtype, box)) or reads[-1]
    )
    target, drafter = load(folder, sd.make_mesh(1, 2))
    weight = target.network.params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    return decode(target, drafter) | {
        "processes": jax.process_count(),
        "largest read": max(part.size for part in reads[len(reads) // 2 :]),
        "kernel": [weight.shape, [shard.data.shape for shard in weight.addressable_shards]],
        "rejected": rejected(lambda: sd.generate(target, INPUTS, deadline=1.0)),
        "identity": identity(target),
    }


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    where = pathlib.Path(sys.argv[1])
    runs = {"2x2": two_by_two, "meshes": meshes, "more": more, "encoders": encoders}
    runs["process"] = process
    print(json.dumps(runs[sys.argv[2]](where, *sys.argv[3:])))
