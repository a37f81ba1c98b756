"""Decodes with Gemmas on meshes of four fake CPU devices, for `test_gemma.py`.

    python gemma_mesh_run.py FOLDER…

Prints one JSON object: for each folder the tokens of several meshes, or why there are none.
"""

import json
import os
import pathlib
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


def decode(folder: pathlib.Path, rows: int, parts: int) -> list[list[int]] | str:
    """Returns the tokens of the golden rows on a mesh, drafted by early exits too."""
    try:
        target = sd.load(folder, "float32", mesh=sd.make_mesh(rows, parts), say=lambda line: None)
    except ValueError as error:
        return str(error)
    numbers = np.load(folder / "io.npz")
    inputs = [row[:n].tolist() for row, n in zip(numbers["inputs"], numbers["input_lengths"])]
    sampling = sd.SamplingConfig(no_repeat_ngram=2)
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
        for drafter in (None, sd.EarlyExitDrafter(target, 1))
    ]
    assert np.array_equal(found[0].tokens, found[1].tokens)
    return [tokens[:n].tolist() for tokens, n in zip(found[0].tokens, found[0].lengths)]


if __name__ == "__main__":
    meshes = {"2x2": (2, 2), "4x1": (4, 1), "1x2": (1, 2)}
    folders = map(pathlib.Path, sys.argv[1:])
    print(json.dumps({f.name: {k: decode(f, *m) for k, m in meshes.items()} for f in folders}))
