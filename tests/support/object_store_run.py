"""Reads and writes an emulated `gs://` in a process of its own, and prints what happened as JSON.

The libraries look for the emulator in the environment when they are imported.
"""

import ctypes
import json
import os
import pathlib
import re
import sys

import make_checkpoints as make
import numpy as np
from object_store import run_store


def attempt(action) -> str:
    """Returns what an action gives, or the class and text of its error."""
    try:
        return repr(action())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_formats(folder: pathlib.Path) -> dict:
    """Loads every format by `gs://` and by `http://`, and writes one; counts requests and bytes."""
    for form in make.FORMATS:
        make.FORMATS[form](folder / "bucket" / form)
    with run_store(folder) as store:
        os.environ.update(store.environment)
        import specdec_jax as sd
        from specdec_jax.checkpoints import loader
        from specdec_jax.files.places import make_path

        def read(url):
            opened = loader.open_checkpoint(loader.resolve(url), None)
            got = {name: tensor.load(np.float32) for name, tensor in opened.parameters.items()}
            return got.keys() == make.PARAMS.keys() and all(
                (got[name] == make.PARAMS[name]).all() for name in got
            )

        results = {}
        for form in make.FORMATS:
            for root in ("gs://bucket", f"{store.url}/plain/bucket"):
                before = len(store.requests)
                kind = root.partition(":")[0]
                results[f"{kind} {form}"] = attempt(lambda: read(f"{root}/{form}"))
                results[f"{kind} {form}: requests"] = len(store.requests) - before
        results["written"] = attempt(
            lambda: str(sd.convert("gs://bucket/own", "gs://bucket/new", "t5x").folder)
        )
        results["read again"] = attempt(lambda: read("gs://bucket/new"))
        (folder / "large").write_bytes(bytes(range(256)) * (6 << 12))
        place = make_path("gs://bucket/large")
        place.upload(folder / "large")
        results["large"] = place.read_bytes() == (folder / "large").read_bytes()
        make_path("gs://bucket/new/x").create(b"1")
        results["twice"] = attempt(lambda: make_path("gs://bucket/new/x").create(b"2"))
        results["no bucket"] = attempt(lambda: read("gs://nothing/there"))
        for status in (403, 206):
            for form in ("safetensors", "orbax", "legacy", "pytorch"):
                store.left, store.status = {"orbax": 8, "legacy": 140}.get(form, 30), status
                results[f"{status} {form}"] = attempt(lambda: read(f"gs://bucket/{form}"))
        return results


def status_bytes(name: str) -> int:
    """Returns a number of bytes of /proc/self/status."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(name + r":\s+(\d+)", text)[1]) << 10


def load_measured(folder: str, small: str, dtype: str) -> dict:
    """Loads a small model, then one whose peak of memory counts; returns both sizes."""
    import time

    import jax
    import orbax.checkpoint  # noqa: F401  imports are not what is measured
    import tensorstore  # noqa: F401

    from specdec_jax import checkpoints

    checkpoints.load(small, dtype)
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, start = status_bytes("VmRSS"), time.perf_counter()
    model = jax.block_until_ready(checkpoints.load(folder, dtype).network)
    seconds = time.perf_counter() - start
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    peak = status_bytes("VmHWM") - before
    return {"peak": peak, "weights": weights, "ratio": peak / weights, "seconds": seconds}


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    if how == "formats":
        print(json.dumps(check_formats(pathlib.Path(arguments[0]))))
    elif how == "load":
        print(json.dumps(load_measured(*arguments)))
    else:
        with run_store(pathlib.Path(arguments[0])) as store:
            store.wait = float(arguments[1])
            print(json.dumps(store.environment), flush=True)
            sys.stdin.read()
