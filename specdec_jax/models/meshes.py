"""Makes meshes of devices, over which models and rows are divided."""

import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from specdec_jax.backends.sharding import AXES
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """Makes a mesh of `data · model` devices; a single process with more uses its first ones.

    Raises:
      ValueError: there are fewer devices, or with several processes not exactly as many.
    """
    for name, value in (("data", data), ("model", model)):
        arguments.check_integer(name, value, 1)
    devices, count, several = jax.devices(), data * model, jax.process_count() > 1
    if count > len(devices) or (several and count != len(devices)):
        there = len(devices)
        expected = f"all of the {there}" if several else f"1 to {there}, which there are"
        raise mismatch_error("mesh", f"{data}x{model} devices", expected)
    if count == len(devices):  # neighbours on a TPU's links
        return Mesh(mesh_utils.create_device_mesh((data, model), devices), AXES)
    return Mesh(np.array(devices[:count]).reshape(data, model), AXES)


def parse_mesh(text: str) -> tuple[int, int]:
    """Returns (2, 4) for "2x4"; raises ValueError for a text of another form."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise mismatch_error("mesh", repr(text), "DATAxMODEL, two numbers of devices, such as 1x4")
    return int(match[1]), int(match[2])
