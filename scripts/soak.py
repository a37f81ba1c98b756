"""Runs many requests: nothing may recompile after warm-up, memory and acceptance stay steady.

    python scripts/soak.py --target=ende/target --drafter=ende/drafter --requests=10000

Input lengths, batch sizes, seeds, limits and every traced option change from request to request;
inputs are random ids. Prints one line for each tenth of the requests: acceptance rate, resident
memory, requests per second. Exit code 1 if a program was compiled after the warm-up, if memory grew
by more than `--max_growth_mb` after the first tenth, or if the acceptance rate of a tenth differs
from the overall rate by more than `--max_drift`.
"""

import itertools
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from specdec_jax.checkpoints import loader
from specdec_jax.decoding.generate import generate, warm_up
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.files.progress import track
from specdec_jax.speculative.sampling import SamplingConfig

_TARGET = flags.DEFINE_string("target", "ende/target", "Folder or bundled name of the target.")
_DRAFTER = flags.DEFINE_string("drafter", "ende/drafter", "Folder or bundled name of the drafter.")
_REQUESTS = flags.DEFINE_integer("requests", 10_000, "Requests (batches) in all.", lower_bound=10)
_BATCH = flags.DEFINE_list(
    "batch_size", ["1", "2", "4"], "Batch sizes; requests take them in turn."
)
_INPUT = flags.DEFINE_integer("max_input_length", 24, "Longest input, in tokens.")
_NEW = flags.DEFINE_integer(
    "max_new_tokens", 16, "Longest output, in tokens; rows ask for 1 to this many."
)
_GAMMA = flags.DEFINE_integer("gamma", 4, "Greatest γ; rows ask for 1 to this.")
_GROWTH = flags.DEFINE_float(
    "max_growth_mb", 64.0, "The most MB by which resident memory may grow after the first tenth."
)
_DRIFT = flags.DEFINE_float(
    "max_drift",
    0.03,
    "The most by which a tenth's acceptance rate may differ from the overall rate.",
)

# Each combination of these compiles once. Everything else is traced, and random for every request.
_KINDS = ("argmax", "sampled", "filtered", "processed")
_VERIFIERS = ("token", "block")


def options(rng: np.random.Generator, kind: str, batch: int, vocab: int) -> dict:
    """Returns the traced options of one request."""
    sampling: dict = {}
    if kind != "argmax":
        sampling["temperature"] = rng.uniform(0.5, 1.2, batch).tolist()
    if kind == "filtered":
        sampling["top_k"] = rng.integers(5, 50, batch).tolist()
        sampling["top_p"] = rng.uniform(0.7, 0.99, batch).tolist()
        sampling["min_p"] = rng.uniform(0.001, 0.05, batch).tolist()
    if kind == "processed":
        sampling["repetition_penalty"] = rng.uniform(1.05, 1.3, batch).tolist()
        sampling["min_new_tokens"] = 1
        sampling["logit_bias"] = {int(token): 1.0 for token in rng.integers(2, vocab, 3)}
    return {
        "sampling": SamplingConfig(**sampling),
        "gamma": [_GAMMA.value, *rng.integers(1, _GAMMA.value + 1, batch - 1).tolist()],
        "max_new_tokens": [_NEW.value, *rng.integers(1, _NEW.value + 1, batch - 1).tolist()],
        "key": jax.random.key(int(rng.integers(2**31))),
    }


def resident_mb() -> float:
    """Returns the resident memory of this process, in units of 2^20 bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    target = loader.load(_TARGET.value)
    vocab, rng = target.config.vocab_size, np.random.default_rng(0)
    common = {
        "drafter": ModelDrafter(loader.load(_DRAFTER.value)),
        "max_input_length": _INPUT.value,
    }
    programs = list(itertools.product(_KINDS, _VERIFIERS, map(int, _BATCH.value)))
    for kind, verifier, batch in track(programs, len(programs), "warm-up"):
        static = common | options(rng, kind, batch, vocab) | {"verifier": verifier}
        warm_up(target, batch_sizes=[batch], **static)

    compiled: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    tenths = []
    for tenth in range(10):
        examined = accepted = 0
        size, start = _REQUESTS.value // 10, time.perf_counter()
        for number in track(range(size), size, f"tenth {tenth + 1}"):
            kind, verifier, batch = programs[number % len(programs)]
            inputs = [
                rng.integers(2, vocab, rng.integers(1, _INPUT.value)).tolist() + [1]
                for _ in range(batch)
            ]
            how = common | options(rng, kind, batch, vocab) | {"verifier": verifier}
            result = generate(target, inputs, **how)
            examined += int(result.stats.examined_by_position.sum())
            accepted += result.stats.accepted
        line = {
            "requests": size * (tenth + 1),
            "acceptance_rate": round(accepted / examined, 4),
            "resident_mb": round(resident_mb(), 1),
            "compilations": len(compiled),
            "requests_per_second": round(size / (time.perf_counter() - start), 1),
        }
        print(json.dumps(line), flush=True)
        tenths.append(line)
    mean = np.mean([line["acceptance_rate"] for line in tenths])
    problems = []
    if compiled:
        problems.append(f"{len(compiled)} programs compiled after the warm-up, expected none")
    growth = tenths[-1]["resident_mb"] - tenths[0]["resident_mb"]
    if growth > _GROWTH.value:
        problems.append(f"memory grew by {growth:.1f} MB, expected at most {_GROWTH.value}")
    drift = max(abs(line["acceptance_rate"] - mean) for line in tenths)
    if drift > _DRIFT.value:
        problems.append(
            f"acceptance rate differs from the overall rate by {drift:.4f}, "
            f"expected at most {_DRIFT.value}"
        )
    for problem in problems:
        print(f"soak: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    app.run(main)
