"""Makes meshes of devices, over which models and rows are divided."""

import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from specdec_jax.backends.sharding import AXES
from specdec_jax.models import arguments


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """Makes a mesh of `data · model` devices.

    If there is one process and it has more, of the first ones.

    Raises:
      ValueError: fewer devices than that, or with several processes another number.
    """
    for name, value in (("data", data), ("model", model)):
        arguments.check_integer(name, value, 1)
    devices, count = jax.devices(), data * model
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        expected = (
            f"all of the {len(devices)}"
            if jax.process_count() > 1
            else f"1 to {len(devices)}, which there are"
        )
        raise ValueError(f"mesh: got {data}x{model} devices, expected {expected}")
    if count == len(devices):
        return Mesh(
            mesh_utils.create_device_mesh((data, model), devices), AXES
        )  # neighbours on a TPU's links
    return Mesh(np.array(devices[:count]).reshape(data, model), AXES)


def parse_mesh(text: str) -> tuple[int, int]:
    """Returns (2, 4) for "2x4"; raises ValueError for a text of another form."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ValueError(
            f"mesh: got {text!r}, expected DATAxMODEL, two numbers of devices, such as 1x4"
        )
    return int(match[1]), int(match[2])
