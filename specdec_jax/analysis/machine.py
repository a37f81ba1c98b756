"""Describes the machine, the models and the inputs of a record."""

import dataclasses
import os
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from specdec_jax.analysis.variants import SentenceBatch, Workload
from specdec_jax.backends.cpu import native
from specdec_jax.backends.gpu import attention as gpu_attention
from specdec_jax.decoding import iteration_costs
from specdec_jax.models import fused_step_selftest
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only
from specdec_jax.models.parameters import parameter_count
from specdec_jax.speculative.drafter import Drafter

PACKAGES = ("specdec_jax", "jax", "jaxlib", "flax", "numpy")


def describe_machine() -> dict[str, Any]:
    """Returns versions and hardware, without names of people or paths."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: _find_version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": iteration_costs.read_processor_name(),
        "processor_family": _read_family(),
        "cores": iteration_costs.count_cores(),
        "device": f"{device.platform}: {device.device_kind}, {jax.device_count()}",
        "kernel": _kernels(device.platform),
    }


def _read_family() -> list[int] | None:
    """Returns family and model of an x86 processor under Linux, which its name may leave out."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.findall(r"(?m)^(?:cpu family|model)\s*: (\d+)$", text)[:2]
    return list(map(int, found)) if len(found) == 2 else None


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # scripts run from a checkout, too
        return "not installed"


def _kernels(platform: str) -> str:
    """Returns which of the package's own kernels run on this kind of device."""
    if platform == "cpu":
        return native.describe_origin() or "none"
    self_tests = {
        "gpu": (gpu_attention.SELF_TEST, fused_step_selftest.GPU_SELF_TEST),
        "tpu": (fused_step_selftest.SELF_TEST,),
    }
    if platform not in self_tests or os.environ.get(native.SETTING) == "off":
        return "none"
    faults = [one.result() for one in self_tests[platform]]
    why = "; ".join(fault for fault in faults if fault)
    if not why:
        return "Pallas"
    return f"{'none' if all(faults) else 'some'}, {why}"


def describe_hardware(machine: Mapping[str, Any]) -> str:
    """Returns the part of `describe_machine()` that a summary shows.

    A CPU is named by its processor.
    """
    kernel = f", kernel: {machine['kernel']}" if "kernel" in machine else ""
    device = "" if machine["device"].startswith("cpu") else f", {machine['device']}"
    return f"{machine['processor']}, {machine['cores']} cores{device}{kernel}"


def describe_model(model: LanguageModel) -> dict[str, Any]:
    """Returns a model's name, number of parameters, their dtype and the network's shape."""
    leaves = jax.tree.leaves(model.network.params)
    return {
        "name": model.name,
        # Not counted in the leaves: the loop's layout may hold padded copies beside them.
        "parameters": parameter_count(model.config),
        "parameter_dtype": ", ".join(sorted({str(leaf.dtype) for leaf in leaves})),
        "config": dataclasses.asdict(model.config),
    }


def describe_drafter(drafter: Drafter) -> dict[str, Any]:
    """Returns `describe_model` of a drafter's model; its name if it has none."""
    second = drafter.second_model
    return {"name": drafter.name} if second is None else describe_model(second)


def begin_record(workload: Workload) -> dict[str, Any]:
    """Returns the beginning of every record: machine, options, models and number of inputs."""
    target, drafter, batches, options = workload
    return {
        "machine": describe_machine(),
        "options": dataclasses.asdict(options),
        "target": describe_model(target),
        "drafter": None if drafter is None else describe_drafter(drafter),
        "sentences": count_inputs(target, batches),
    }


def count_inputs(target: LanguageModel, batches: Sequence[SentenceBatch]) -> int:
    """Returns how many inputs the batches have.

    An empty input counts for a decoder-only target, which begins a text.
    """
    rows = [row for batch in batches for row in zip(batch.inputs, batch.ids, strict=True)]
    return sum(
        len(ids) > 0 or (is_decoder_only(target) and given is not None) for given, ids in rows
    )
