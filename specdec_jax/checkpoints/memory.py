"""Rejects to load a model that does not fit into memory, as the system or a container limits it."""

import pathlib

import jax

from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.checkpoints.weights import required_bytes
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import parameter_count

CGROUPS, CGROUPS_OF_PROCESS = pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/proc/self/cgroup")
MEMORY = pathlib.Path("/proc/meminfo")


def available_bytes(device: jax.Device | None = None) -> int | None:
    """Returns the free memory in bytes of the device that parameters go to, within a container's
    limit; None if it cannot be found out."""
    device = device or jax.devices()[0]
    if device.platform != "cpu":
        statistics = device.memory_stats() or {}
        limit = statistics.get("bytes_limit")
        return None if limit is None else limit - statistics.get("bytes_in_use", 0)
    amounts = _cgroup_bytes()
    for line in _lines(MEMORY):
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) * 1024)
    return min(amounts, default=None)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _cgroup_bytes() -> list[int]:
    """Returns the bytes left under each memory limit that a container or a service sets (cgroups v1
    and v2).

    Cached file pages count as free, as in MemAvailable: reading a checkpoint fills a container with
    them.
    """
    left = []
    for line in _lines(CGROUPS_OF_PROCESS):  # "0::/path" (v2), "4:memory:/path" (v1)
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, prefix = CGROUPS, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit, usage, prefix = (
                CGROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )
        else:
            continue
        # Limits of the groups above hold too; in a container the path may be the host's, and the
        # root is its own group.
        parts = path.strip("/").split("/")
        for folder in (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
            numbers = [
                int(text)
                for name in (limit, usage)
                for text in _lines(folder / name)
                if text.isdigit()
            ]
            if len(numbers) == 2:  # "max" is no limit
                pages = (prefix + "active_file", prefix + "inactive_file")
                cached = sum(
                    int(row.split()[1])
                    for row in _lines(folder / "memory.stat")
                    if row.startswith(pages)
                )
                left.append(numbers[0] - numbers[1] + cached)
    return left


def check_memory(
    config: ModelConfig,
    dtype: str,
    path,
    rules: ShardingRules | None = None,
    kernels: str | None = None,
) -> None:
    """Raises ValueError if a model needs more memory than is free; arguments as for
    `required_bytes`."""
    available = available_bytes() if rules is None else available_bytes(rules.mesh.local_devices[0])
    required = required_bytes(config, dtype, rules, kernels)
    if available is not None and required > available:
        raise ValueError(
            f"{path}: got {available / 1e9:.2f} GB of free memory, expected at least {required / 1e9:.2f} GB for "
            f"{parameter_count(config):,} parameters in {'8 bits and ' if kernels else ''}{dtype}"
        )
