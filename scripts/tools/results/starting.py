"""A stage about starting: seconds of commands from the shell to their end."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

from specdec_jax.analysis import timing
from tools.results.stage import Row, Rows, Settings

JAX, PACKAGE = "`import jax`", "`import specdec_jax`"
SENTENCE = "`specdec generate` of one sentence"
_PAIR = "--target=ende/target", "--drafter=ende/drafter"
_COMMANDS: dict[str, list[str]] = {
    JAX: ["-c", "import jax"],
    PACKAGE: ["-c", "import specdec_jax"],
    SENTENCE: ["-m", "specdec_jax", "generate", *_PAIR, "Good morning."],
}


def measure_start(settings: Settings) -> Rows:
    """Measures processes that find their programs compiled by an earlier one."""
    commands = {name: [sys.executable, *more] for name, more in _COMMANDS.items()}
    return {"processes": time_commands(commands, settings.choose(9, 5))}


def time_commands(commands: Mapping[str, Sequence[str]], passes: int) -> dict[str, Row]:
    """Returns the seconds of commands, in turn, and those beyond the first's."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(-1, passes):  # the first fills caches
        for name in timing.rotate(commands, turn):
            start = time.perf_counter()
            subprocess.run(commands[name], check=True, capture_output=True)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    first = np.array(next(iter(seconds.values())))
    return {
        name: {
            "seconds": timing.summarize(np.array(times)),
            "beyond": timing.summarize(np.array(times) - first),
        }
        for name, times in seconds.items()
    }


def format_start(row: Row) -> str:
    """Returns the seconds and their spread, and those beyond the first row's."""
    seconds, beyond = row["seconds"], row["beyond"]
    text = f"{seconds['median']:.2f} s ({seconds['least']:.2f} to {seconds['most']:.2f})"
    return text + f", {beyond['median']:.2f} beyond the first" * (beyond["most"] > 0)
