"""Inputs for the engine's tests, and a look into compiled loops."""

import re

import numpy as np

V, LIMIT, GAMMA = 24, 12, 3
INPUTS = [
    [5, 9, 1],
    [7, 1],
    [20, 3, 3, 8, 11, 2, 9, 1],
    [1],
    [4, 0, 1],
    [13, 22, 6, 17, 1],
    [2, 2, 2, 2, 2, 2, 1],
    [9, 5, 1],
]


def cut(tokens, eos_ids):
    """Returns `tokens` up to and including the first EOS of each row, then 0, and the lengths."""
    is_eos = np.isin(tokens, eos_ids)
    lengths = np.where(is_eos.any(axis=1), is_eos.argmax(axis=1) + 1, tokens.shape[1])
    return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0), lengths


def loop_bodies(hlo: str) -> str:
    """Returns the text of all computations that the body of a while loop reaches."""
    computations = dict(
        re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S)
    )
    called = re.compile(r"(?:body|condition|calls|to_apply|branch_computations)=\{?%?([\w.\-]+)")
    open_, reached = re.findall(r"body=%?([\w.\-]+)", hlo), set()
    assert open_, "no loop found: the text is not what this test reads"
    while open_:
        name = open_.pop()
        if name not in reached:
            reached.add(name)
            open_ += called.findall(computations[name])
    return "\n".join(computations[name] for name in reached)
