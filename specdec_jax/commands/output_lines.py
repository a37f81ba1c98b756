"""The lines that `specdec generate` prints or writes: texts, or JSON objects."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.decoding.continuous_batching import Output
from specdec_jax.decoding.results import Stats


def stats_record(stats: Stats) -> dict:
    """Returns a `Stats` as JSON values, without its rows."""
    values = stats._replace(per_row=None)._asdict()
    del values["per_row"]
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


class Sentences(NamedTuple):
    """What is decoded; a seqio task's job has the same interface.

    Attributes:
      inputs: ids of every input.
      contents: text that identifies each input.
      as_json: whether lines of output are JSON objects.
    """

    inputs: list[list[int]]
    contents: Sequence[str]
    as_json: bool

    def lines(self, number: int, outputs: Sequence[Output]) -> list[str]:
        if not self.as_json:
            return [join_lines(output.text or "") for output in outputs]
        return [to_json({**one._asdict(), "stats": stats_record(one.stats)}) for one in outputs]


def to_json(record: dict[str, Any]) -> str:
    """Returns a record as one line of JSON; −inf, which JSON lacks, becomes null.

    Without an error, or a score, there is no field for it.
    """
    record = {
        name: value
        for name, value in record.items()
        if value is not None or name not in ("score", "error")
    }
    if "error" in record:
        record["error"] = record["error"].reason

    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    return json.dumps(
        {name: finite(value) for name, value in record.items()}, ensure_ascii=False, allow_nan=False
    )


def join_lines(text: str) -> str:
    """Returns `text` with spaces for line ends, so that each sentence has one line."""
    return re.sub(r"\s+", lambda run: " " if {"\r", "\n"} & {*run[0]} else run[0], text)
