"""How much of its drafts a target accepts, and the calls that this lets expect for every γ.

Where a model drafts and the output law is the target's, its own outputs are scored with both models (`scored`): far less
noisy than counting accepts, and one pass gives every γ. Otherwise the engine decodes with the greatest γ (`counted`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_jax import analysis, measure
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.generate import generate
from specdec_jax.passes import Batch
from specdec_jax.progress import track
from specdec_jax.records import Work
from specdec_jax.sampling import SamplingConfig

# What `scored` knows: P(at least i drafted tokens stand) given the target's output.
SURVIVAL = {"token": analysis.token_survival, "block": analysis.block_survival}


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts of up to G tokens.

    Attributes:
      how: "scored" or "counted".
      alpha: Σ min(p, q) per position, or accepted / examined tokens; None where nothing was drafted or no verifier that was
        asked for has such a rate.
      error: its standard error, clustered by sentence; None of fewer than two.
      positions: number of tokens that it is a mean of.
      survival: by verifier, for i = 1 … G: (P(at least i drafted tokens stand), its standard error).
      lengths: of each batch, new tokens of its rows.
      work: by verifier and γ = 1 … G, of each batch.
    """

    how: str
    alpha: float | None
    error: float | None
    positions: int
    survival: dict[str, list[tuple[float, float | None]]]
    lengths: list[np.ndarray]
    work: dict[tuple[str, int], list[Work]]

    def record(self) -> dict[str, Any]:
        return {
            "how": self.how,
            "alpha": self.alpha,
            "standard_error": self.error,
            "positions": self.positions,
            "by_position": {
                name: [{"stands": mean, "standard_error": error} for mean, error in values]
                for name, values in self.survival.items()
            },
            "tokens_per_target_call": {
                name: analysis.tokens_by_survival([mean for mean, _ in values])
                for name, values in self.survival.items()
            },
        }


def of(target, drafter, batches: Sequence[Batch], verifiers: Sequence[str], gamma: int, options) -> Acceptance:
    """Acceptance by the better way of the two.

    Args:
      verifiers: names; those of one temperature that all are exact, or one alone.
      gamma: G.
      options: of a decoding command.
    """
    greedy = options.sampling().mode.greedy
    exact = [name for name in verifiers if name in SURVIVAL or greedy and name in ("gumbel", "rejection")]
    # A shortlist or 8 bits change the drafter's law: what its model would say is not what it drafts.
    scorable = isinstance(drafter, ModelDrafter) and drafter.network is drafter.model.network
    if scorable and len(exact) == len(verifiers):
        return scored(target, drafter, batches, verifiers, gamma, options)
    return counted(target, drafter, batches, verifiers, gamma, options)


def scored(target, drafter: ModelDrafter, batches, verifiers, gamma: int, options) -> Acceptance:
    """Decodes plainly and scores what comes out with both models."""
    config: SamplingConfig = options.sampling()
    sums, counts, survivals, lengths = [], [], {name: [] for name in verifiers}, []
    work: dict[tuple[str, int], list[Work]] = {(name, g): [] for name in verifiers for g in range(1, gamma + 1)}
    for batch in track(batches, len(batches), "scoring"):
        result = generate(target, batch.inputs, key=batch.keys, **options.decoding(plain=True))
        lengths.append(result.lengths)
        agreed = measure.agreement(target, drafter.model, batch.ids, result.tokens, result.lengths, config)
        expected = {key: [] for key in work}
        for row, length in enumerate(result.lengths):
            sums.append(float(agreed.overlap[row, :length].sum()))
            counts.append(int(length))
            ended = result.finish_reasons[row] == "eos"
            for name in verifiers:
                # At temperature 0 all verifiers are one.
                stands = along(agreed.log_ratio[row, :length], gamma, SURVIVAL[name if name in SURVIVAL else "token"])
                survivals[name].append(stands)
                for g in range(1, gamma + 1):
                    expected[name, g].append(analysis.calls_along(stands, g, ended))
        for key, rows in expected.items():  # a batch runs until its last row is done
            work[key].append(Work(batch.padded, *(max(values) for values in zip(*rows, strict=True))))
    alpha, error = analysis.clustered_mean(sums, counts) if sum(counts) else (None, None)
    survival = {name: _mean_survival(rows, gamma) for name, rows in survivals.items()}
    return Acceptance("scored", alpha, error, sum(counts), survival, lengths, work)


def along(log_ratios: np.ndarray, gamma: int, survival) -> np.ndarray:
    """`[n, G]`: P(at least i of the tokens drafted at t stand), for i = 1 … G and t = 0 … n − 1; 0 past the end.

    Args:
      log_ratios: `[n]`.
      survival: one of `SURVIVAL`.
    """
    padded = np.append(log_ratios.astype(np.float64), np.full(gamma, -np.inf))
    windows = np.lib.stride_tricks.sliding_window_view(padded, gamma)[: len(log_ratios)]
    return survival(windows)


def _mean_survival(rows: Sequence[np.ndarray], gamma: int) -> list[tuple[float, float | None]]:
    """Over all places that have at least i tokens after them."""
    found = []
    for i in range(1, gamma + 1):
        complete = [row[: max(0, len(row) - i + 1), i - 1] for row in rows]
        sums, counts = [row.sum() for row in complete], [len(row) for row in complete]
        found.append(analysis.clustered_mean(sums, counts) if any(counts) else (0.0, None))
    return found


def counted(target, drafter, batches, verifiers, gamma: int, options) -> Acceptance:
    """Decodes with γ = G and counts; a smaller γ is expected to accept as many of its first positions."""
    alpha: float | None = None
    error: float | None = None
    positions, lengths = 0, []
    survival: dict[str, list[tuple[float, float | None]]] = {}
    work: dict[tuple[str, int], list[Work]] = {}
    for name in verifiers:
        decoding = options.decoding() | dict(drafter=drafter, gamma=gamma, verifier=name)
        results = [
            generate(target, batch.inputs, key=batch.keys, **decoding)
            for batch in track(batches, len(batches), f"counting, {name} verification")
        ]
        rows = [row for result in results for row in result.stats.per_row]
        examined = [int(row.examined_by_position.sum()) for row in rows]
        if alpha is None and any(result.stats.acceptance_rate is not None for result in results):
            alpha, error = analysis.clustered_mean([row.accepted for row in rows], examined)
            positions = sum(examined)
        calls = [row.target_calls for row in rows]
        by_position = np.array([row.accepted_by_position for row in rows])
        survival[name] = [
            analysis.clustered_mean(by_position[:, i], calls) if any(calls) else (0.0, None) for i in range(gamma)
        ]
        per_call = analysis.tokens_by_survival([mean for mean, _ in survival[name]])
        lengths = lengths or [result.lengths for result in results]
        for g in range(1, gamma + 1):
            batch_calls = [
                max(row.target_calls for row in result.stats.per_row) * per_call[gamma] / per_call[g]
                for result in results
            ]
            work[name, g] = [Work(batch.padded, n, g * n) for batch, n in zip(batches, batch_calls, strict=True)]
    return Acceptance("counted", alpha, error, positions, survival, lengths, work)
