"""Decodes with golden models on meshes of four fake CPU devices, for tests of families.

    python golden_mesh_run.py FOLDER…

Prints one JSON object: for each folder the tokens of several meshes, or why there are none.
"""

import json
import os
import pathlib
import subprocess
import sys

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")  # those that make compilations quick
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=4",
    }

import numpy as np

import specdec_jax as sd

LENGTH = 8
MESHES = {"2x2": (2, 2), "4x1": (4, 1), "1x2": (1, 2)}


def decode(folder: pathlib.Path, rows: int, parts: int) -> list[list[int]] | str:
    """Returns the tokens of the golden rows on a mesh, drafted by early exits too."""
    try:
        target = sd.load(folder, "float32", mesh=sd.make_mesh(rows, parts), say=lambda line: None)
    except ValueError as error:
        return str(error)
    numbers = np.load(folder / "io.npz")
    inputs = [row[:n].tolist() for row, n in zip(numbers["inputs"], numbers["input_lengths"])]
    pads = [words[0] for words in target.generation_config.bad_words_ids or ()]
    sampling = sd.SamplingConfig(no_repeat_ngram=2, forbidden_tokens=pads)
    exits = target.config.num_decoder_layers > 1
    own = sd.EarlyExitDrafter(target, 1) if exits else sd.ModelDrafter(target)
    found = [
        sd.generate(
            target,
            inputs,
            drafter=drafter,
            gamma=2,
            max_new_tokens=LENGTH,
            sampling=sampling,
            generation_config=None,
        )
        for drafter in (None, own)
    ]
    assert np.array_equal(found[0].tokens, found[1].tokens)
    return [tokens[:n].tolist() for tokens, n in zip(found[0].tokens, found[0].lengths)]


def run(*folders: pathlib.Path) -> dict[str, dict[str, list[list[int]] | str]]:
    """Runs this file in a process of its own; returns what it prints."""
    script = pathlib.Path(__file__)
    paths = str(script.parents[2]), str(script.parent), os.environ.get("PYTHONPATH", "")
    process = subprocess.run(
        [sys.executable, str(script), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def expect(numbers: dict[str, np.ndarray]) -> list[list[int]]:
    """Returns the tokens that a mesh must give, from the golden numbers."""
    return [row[row >= 0][:LENGTH].tolist() for row in numbers["greedy"]]


if __name__ == "__main__":
    folders = map(pathlib.Path, sys.argv[1:])
    print(json.dumps({f.name: {k: decode(f, *m) for k, m in MESHES.items()} for f in folders}))
