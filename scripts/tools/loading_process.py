"""What the stage `loading` does in processes of its own: writes, converts and loads checkpoints.

    python -m tools.loading_process write PRESET FIELDS FOLDER
    python -m tools.loading_process convert FOLDER FORMAT NEW
    python -m tools.loading_process load FOLDER DTYPE

Memory that one of them takes is then on no other's account. The last line that each prints is JSON.
"""

import importlib
import json
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import checkpoints
from specdec_jax.backends.backend import choose_backend
from specdec_jax.checkpoints import converter
from specdec_jax.models.families import PRESETS
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.parameters import parameter_count

_STATUS = pathlib.Path("/proc/self/status")
CLEAR = pathlib.Path("/proc/self/clear_refs")  # to which one writes to begin a new peak
# The tests', where a writer of PyTorch's files and an emulated store are.
SUPPORT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "support"


def write(preset: str, fields: str, folder: str) -> dict[str, Any]:
    """Writes a published shape with dummy weights, changed by `fields` in JSON, in its dtype."""
    config = PRESETS[preset].replace(**json.loads(fields))
    model = LanguageModel.dummy(config, eos_ids=(1,), name=preset)
    converter.save(model, folder, config.dtype, say=_say_nothing)
    return {}


def convert(folder: str, form: str, new: str) -> dict[str, Any]:
    """Writes a checkpoint in another format, or a folder of Hugging Face's with PyTorch's file."""
    if form != "pytorch":
        converter.convert(folder, new, form, say=_say_nothing)
        return {}
    written = pathlib.Path(new)
    written.mkdir()
    for path in pathlib.Path(folder).glob("*.json"):
        shutil.copy(path, written)
    sys.path.append(str(SUPPORT))
    pytorch_pickles = importlib.import_module("pytorch_pickles")  # writes without PyTorch
    tensors = _map_tensors(pathlib.Path(folder) / "model.safetensors")
    pytorch_pickles.write_state(written / "pytorch_model.bin", tensors)
    return {}


def load(folder: str, dtype: str) -> dict[str, Any]:
    """Loads a checkpoint; returns seconds, and what the process took beyond its imports.

    The size is that of the parameters in `dtype`.
    """
    import orbax.checkpoint  # noqa: F401  imports are not what is measured
    import tensorstore  # noqa: F401

    choose_backend(jax.default_backend())  # nor is the start of the backend and its kernels
    CLEAR.write_text("5")
    before, start = _read_status("VmRSS"), time.perf_counter()
    model = checkpoints.load(folder, dtype, say=_say_nothing)
    jax.block_until_ready(model.network.params)
    seconds = time.perf_counter() - start
    size = parameter_count(model.config) * jnp.dtype(dtype).itemsize
    return {"seconds": seconds, "peak": _read_status("VmHWM") - before, "size": size}


def _read_status(name: str) -> int:
    """Returns a number of bytes of /proc/self/status."""
    found = re.search(name + r":\s+(\d+)", _STATUS.read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) << 10


def _map_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file in float32, mapped into memory."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: np.memmap(
            path,
            np.float32,
            mode="r",
            offset=8 + length + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
        )
        for name, entry in header.items()
    }


def _say_nothing(line: str) -> None:
    pass


_COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "write": write,
    "convert": convert,
    "load": load,
}
if __name__ == "__main__":
    command, *given = sys.argv[1:]
    print(json.dumps(_COMMANDS[command](*given)))
