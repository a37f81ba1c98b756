"""The stage of encoders: whole inputs of several lengths, beside the libraries installed."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specdec_jax.analysis import timing
from specdec_jax.analysis.timing import summarize
from specdec_jax.models.families import PRESETS
from specdec_jax.models.language_model import LanguageModel
from tools.results import peers
from tools.results.stage import Row, Rows, Settings

PRESET = "t5_1_1/small"
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
QUICK_LENGTHS = (128, 512, 2048)


def measure_encoders(settings: Settings) -> Rows:
    """Measures T5 1.1 small's encoder in float32 over one input, the ways of computing in turn."""
    config = PRESETS[PRESET].replace(dtype="float32")
    model, rows = LanguageModel.random(config, eos_ids=(), name=PRESET), {}
    with tempfile.TemporaryDirectory() as folder:
        others = peers.make_encoders(config, folder)
        for length in QUICK_LENGTHS if settings.quick else LENGTHS:
            ids = np.random.default_rng(length).integers(3, config.vocab_size, length).tolist()
            ways = {"ours": make_encoder(model, length)} | others
            row = time_encoders(ways, ids, settings.choose(5, 3))
            rows[f"{length:,} tokens"] = row | {"temporary_mb": count_temporaries(model, length)}
    return {PRESET: rows}


@jax.jit
def _encode(network: Any, ids: np.ndarray, lengths: np.ndarray) -> jax.Array:
    return network.encode(ids, lengths)


def make_encoder(model: LanguageModel, length: int) -> Callable[[list[int]], Any]:
    """Returns a call of our encoder for inputs of one length."""

    def call(ids: list[int]) -> Any:
        given = np.array([ids], np.int32), np.array([length], np.int32)
        return jax.block_until_ready(_encode(model.network, *given))

    return call


def count_temporaries(model: LanguageModel, length: int) -> float:
    """Returns the megabytes of our encoder's temporary arrays, by the compiler's analysis."""
    given = np.zeros((1, length), np.int32), np.array([length], np.int32)
    analysis = _encode.lower(model.network, *given).compile().memory_analysis()
    return analysis.temp_size_in_bytes / 1e6


def time_encoders(ways: dict[str, Callable[[list[int]], Any]], ids: list[int], passes: int) -> Row:
    """Returns milliseconds of each way, and of our time over the best other's in each pass."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for encode in ways.values():  # compiles
        encode(ids)
    for turn in range(passes):
        for name in timing.rotate(ways, turn):
            start = time.perf_counter()
            ways[name](ids)
            seconds[name].append(time.perf_counter() - start)
    row: Row = {"ms": {name: 1e3 * float(np.median(times)) for name, times in seconds.items()}}
    if others := [times for name, times in seconds.items() if name != "ours"]:
        row["over_best"] = summarize(np.array(seconds["ours"]) / np.min(others, axis=0))
    return row


def format_encoders(row: Row) -> str:
    """Returns the milliseconds of each way, our memory, and our time over the best other's."""
    parts = [f"{name} {ms:.1f} ms" for name, ms in row["ms"].items()]
    if "temporary_mb" in row:
        parts[0] += f" and {row['temporary_mb']:.0f} MB"
    if "over_best" in row:
        ratio = row["over_best"]
        spread = f"({ratio['least']:.2f} to {ratio['most']:.2f})"
        parts[0] += f", {ratio['median']:.2f} {spread} of the best other"
    return "; ".join(parts)
