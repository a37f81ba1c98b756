"""Checks that a model fits into memory, and returns freed memory while one is loaded."""

import contextlib
import ctypes
import os
import pathlib
from collections.abc import Iterator

import jax

from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.checkpoints.weights import required_bytes
from specdec_jax.files.reading import PathLike
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import parameter_count

CGROUPS, CGROUPS_OF_PROCESS = pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/proc/self/cgroup")
MEMORY = pathlib.Path("/proc/meminfo")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MAX_MMAP_THRESHOLD = 32 << 20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX


def available_bytes(device: jax.Device | None = None) -> int | None:
    """Returns the free bytes of the device that parameters go to, None if it does not say.

    On a CPU they are the system's, within the limits of a container.
    """
    device = device or jax.devices()[0]
    if device.platform != "cpu":
        statistics = device.memory_stats() or {}
        limit = statistics.get("bytes_limit")
        return None if limit is None else limit - statistics.get("bytes_in_use", 0)
    amounts = _cgroup_bytes()
    for line in _read_lines(MEMORY):
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) * 1024)
    return min(amounts, default=None)


def _read_lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _cgroup_bytes() -> list[int]:
    """Returns the bytes left under each memory limit of a container or a service (cgroups v1, v2).

    Cached file pages count as free, as in MemAvailable: reading a checkpoint fills a container with
    them.
    """
    left = []
    for line in _read_lines(CGROUPS_OF_PROCESS):  # "0::/path" (v2), "4:memory:/path" (v1)
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, prefix, names = CGROUPS, "", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, prefix = CGROUPS / "memory", "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Limits of the groups above hold too; in a container the path may be the host's, and the
        # root is its own group.
        parts = path.strip("/").split("/")
        for folder in (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
            texts = [text for name in names for text in _read_lines(folder / name)]
            numbers = [int(text) for text in texts if text.isdigit()]
            if len(numbers) == 2:  # "max" is no limit
                pages = (prefix + "active_file", prefix + "inactive_file")
                rows = [row for row in _read_lines(folder / "memory.stat") if row.startswith(pages)]
                left.append(numbers[0] - numbers[1] + sum(int(row.split()[1]) for row in rows))
    return left


def check_memory(
    config: ModelConfig,
    dtype: str,
    path: PathLike,
    rules: ShardingRules | None = None,
    int8_weights: str | None = None,
) -> None:
    """Raises ValueError if a model needs more memory than is free.

    Arguments as for `required_bytes`; `path` is the model's, for the message.
    """
    available = available_bytes() if rules is None else available_bytes(rules.mesh.local_devices[0])
    required = required_bytes(config, dtype, rules, int8_weights)
    if available is not None and required > available:
        dtypes = f"int8 and {dtype}" if int8_weights else dtype
        raise ValueError(
            f"{path}: got {available / 1e9:.2f} GB of free memory, expected at least "
            f"{required / 1e9:.2f} GB for {parameter_count(config):,} parameters in {dtypes}"
        )


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
    """Makes glibc return freed blocks of 64 KiB and more to the system during the block.

    glibc maps large blocks by themselves, but as it sees them freed it raises the size from which
    it does so, up to 32 MiB. Smaller blocks stay with the heap of the thread that asked for them.
    Loading frees an array for each one it keeps, in TensorStore's threads too; for models whose
    weights are below that size the process would end up with twice the memory of the weights. After
    the block the thresholds are where glibc's own adjustment ends, so that the decode loop's
    buffers are kept. With another C library nothing is done.
    """
    # Windows takes no None.
    library = ctypes.CDLL(None) if os.name == "posix" else None
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # a weight of T5 small in int8 has 192 KiB
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD)
