"""Names the TPUs that programs are compiled for ahead of time, and lays out estimates for them."""

import json
from typing import Any, NamedTuple


class Chip(NamedTuple):
    """One JAX device of a TPU: topology, memory in GB, bandwidth in GB/s, and clock in GHz.

    The clock is the published peak of bfloat16 over the operations of the matrix units per cycle:
    2^17 (v5e), 2^18 (v4, v5p), 2^19 (v6e, and each of tpu7x's two devices).
    """

    topology: str
    memory: float
    bandwidth: float
    clock: float


# Memory, bandwidth and peak: Google Cloud's page on each, docs.cloud.google.com/tpu/docs/v4 and so
# on, as of 2026-11-23. A tpu7x chip is two devices; the numbers are those of one.
CHIPS = {
    "v4": Chip("v4:2x2x1", 32, 1228, 1.05),
    "v5e": Chip("v5e:2x2", 16, 819, 1.5),
    "v5p": Chip("v5p:2x2x1", 95, 2765, 1.75),
    "v6e": Chip("v6e:2x2", 32, 1638, 1.75),
    "tpu7x": Chip("tpu7x:2x2x1", 96, 3690, 2.2),
}


def chip_line(chip: str, code: int, text: str) -> str:
    """Returns a chip's line of the table.

    Args:
      chip: name of the chip.
      code: exit code of the process that compiled for it.
      text: its output, a record of `scripts/tpu_aot.py` or nothing.
    """
    found: dict[str, Any] = json.loads(text) if text.strip() else {"failed": f"exit code {code}"}
    if "failed" in found:
        kind = "does not fit" if "RESOURCE_EXHAUSTED" in found["failed"] else "failed"
        return f"{chip:<6} {kind}: {found['failed'][:200]}"
    estimate, floor = found["iteration_ms"], found["floor_ms"]
    shown = ("-", "-") if estimate is None else (f"{estimate:.2f} ms", f"{estimate / floor:.2f}")
    memory = f"{found['needed_gb']:>9.1f} of {found['memory_gb']:<4g}"
    fits = "yes" if found["fits"] else "no"
    return f"{chip:<6} {memory} {fits:<4} {shown[0]:>10} {f'{floor:.2f} ms':>10} {shown[1]:>8}"
