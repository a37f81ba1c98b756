"""Writes tests/golden/pytorch: one state dict in both forms of `torch.save`, and its numbers.

Needs torch; the package itself does not. Run from the repository root:
`python scripts/write_golden_pytorch.py [tests/golden]`. The numbers are random, from a seed.

zip.bin and legacy.bin hold the same tensors: whole ones and views of one storage, in every dtype.
expected.npz: the tensors by their names, in float32.
"""

import pathlib
import sys
from typing import Any

import numpy as np


def build_tensors() -> Any:
    """Returns a state dict with the metadata of its modules."""
    import torch

    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 3)
    base = torch.randn(6, 4)
    views = {
        "whole": base,
        "rows": base[2:4],
        "transposed": base.T,
        "steps": base[::2, ::3],
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "parameter": linear.weight,
        "ids": torch.arange(4),
        "mask": torch.tensor([True]),
    }
    kinds = {str(kind): base.to(kind) for kind in (torch.half, torch.bfloat16, torch.double)}
    state = linear.state_dict()
    state.update(views | kinds)
    return state


def main(folder: pathlib.Path) -> None:
    """Writes the three files."""
    import torch

    state, folder = build_tensors(), folder / "pytorch"
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "zip.bin")
    torch.save(state, folder / "legacy.bin", _use_new_zipfile_serialization=False)
    numbers: dict[str, Any] = {name: x.detach().float().numpy() for name, x in state.items()}
    np.savez_compressed(folder / "expected.npz", **numbers)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden"))
