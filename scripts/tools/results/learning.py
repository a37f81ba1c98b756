"""The stage about a drafter that learns from a job's finished outputs while it drafts others."""

import time
from collections.abc import Sequence
from typing import Any

from specdec_jax.decoding.continuous_batching import decode_stream
from specdec_jax.decoding.inputs import encode
from specdec_jax.decoding.results import Stats
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.training.online import OnlineDistillation
from tools.results.cases import load_target, make_bundled
from tools.results.stage import Row, Rows, Settings, Skipped
from tools.results.texts import require_pairs
from tools.results.whole_files import HOW

_INPUTS, _PARTS, _GAMMA = 2000, 20, 4


def measure_learning(settings: Settings) -> Rows:
    """Measures a job with and without learning, on texts unlike those of the drafter's training."""
    if settings.quick:
        raise Skipped("measured by a run in full only: a job has to take minutes")
    target = load_target("none")
    lines = [source for source, _ in require_pairs(settings, "dialogsum", _INPUTS, "train")]
    return {"dialogsum": time_learning(target, make_bundled(), encode(target, lines, 512))}


def time_learning(
    target: LanguageModel, drafter: ModelDrafter, inputs: Sequence[list[int]]
) -> dict[str, Row]:
    """Returns the rows of one job: plain, drafted for by one drafter, and by one that learns.

    The job is decoded in parts, each in every way before the next one.
    """
    how: dict[str, Any] = HOW | dict(batch_size=1)
    learner = OnlineDistillation(target, drafter, expected=len(inputs))
    ways: dict[str, Any] = {
        "plain": dict(gamma=0),
        "a drafter": dict(gamma=_GAMMA, drafter=drafter),
        "a drafter that learns": dict(gamma=_GAMMA, learner=learner),
    }
    size = len(inputs) // _PARTS
    for name in ("plain", "a drafter"):  # compiles
        list(decode_stream(target, inputs, skip=range(8, len(inputs)), **how, **ways[name]))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    alphas: dict[str, list[float]] = {name: [] for name in ways}
    for first in range(0, size * _PARTS, size):
        for name, options in ways.items():
            start = time.perf_counter()
            part = decode_stream(target, inputs[first : first + size], **how, **options)
            stats = [one.stats for _, (one,) in part]
            learner.pause()  # the other ways' time is not of its job
            seconds[name].append(time.perf_counter() - start)
            alphas[name].append(find_alpha(stats))
    total = {name: sum(parts) for name, parts in seconds.items()}
    late = {name: sum(parts[_PARTS // 2 :]) for name, parts in seconds.items()}
    rows: dict[str, Row] = {}
    for name in ways:
        row: Row = {"seconds": total[name], "inputs": size * _PARTS}
        if name != "plain":
            row["alphas"] = [alphas[name][0], alphas[name][-1]]
            row["second_half"] = late["plain"] / late[name]
        rows[name] = row | {"over_plain": total["plain"] / total[name]}
    rows[name] |= {"learning": learner.seconds, "compiling": learner.compile_seconds}
    rows[name] |= {"updates": learner.updates, "ended": learner.ended}
    return rows


def find_alpha(stats: Sequence[Stats]) -> float:
    """Returns the acceptance rate of outputs."""
    examined = sum(int(one.examined_by_position.sum()) for one in stats)
    return sum(one.accepted for one in stats) / max(examined, 1)


def format_learning(row: Row) -> str:
    """Returns the improvement, α at the beginning and the end, and the time that learning took."""
    text = f"{row['over_plain']:.2f}"
    if "second_half" in row:
        text += f", {row['second_half']:.2f} in the second half"
    text += f"; {row['seconds']:.0f} s for {row['inputs']:,} inputs"
    if "alphas" in row:
        first, last = row["alphas"]
        text += f"; α {first:.3f} in the first twentieth, {last:.3f} in the last"
    if "updates" in row:
        text += f"; {row['updates']} updates in {row['learning']:.0f} s"
        text += f", and {row['compiling']:.0f} s to compile them"
    return text
