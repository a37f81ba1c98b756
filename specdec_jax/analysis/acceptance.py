"""Measures how many drafted tokens a target accepts, and the calls to expect for every γ.

If a model drafts and the output distribution is exactly the target's, the target's own outputs are
scored with both models (`score`): that is far less noisy than counting accepted tokens, and one
pass serves every γ. Otherwise the engine decodes with the greatest γ (`count`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.analysis import formulas
from specdec_jax.analysis.agreement import Agreement, agreement
from specdec_jax.analysis.predictions import Work, counted_work, mean_drafting
from specdec_jax.analysis.top_k_hit_rate import HitRates, Rates, acceptance_by_rank, mean_hit_rate
from specdec_jax.analysis.variants import SentenceBatch, Workload, make_decoder
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.decoding.results import GenerationResult, NonFiniteLogitsError, finish
from specdec_jax.files.progress import track
from specdec_jax.speculative.sampling import SamplingConfig

# Computes P(at least i drafted tokens are accepted), given the target's output.
Survival = Callable[[np.ndarray], np.ndarray]
# The verifiers that `score` knows.
SURVIVAL: dict[str, Survival] = dict(token=formulas.token_survival, block=formulas.block_survival)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts of up to G tokens.

    Attributes:
      how: "scored" or "counted".
      alpha: mean over the positions of the output of Σ min(p, q), or accepted / (examined and
        undrafted) tokens; None if nothing was drafted, or if no verifier has such a rate.
      error: standard error of alpha, clustered by sentence; None with fewer than two sentences.
      positions: number of positions that alpha is a mean of.
      survival: by verifier, for i = 1 … G: (P(at least i drafted tokens are accepted), its standard
        error).
      lengths: for each batch, the new tokens of its rows.
      work: by verifier and γ = 1 … G, for each batch.
      hit_rate: how often the target's token is among the drafter's first choices; empty if
        acceptance was counted.
      by_depth: by verifier, for depths d = 1 … as deep as any token was examined: (P(the token of
        depth d is accepted where the d − 1 above it are), its standard error).
      hit_rate_by_depth: by kind of children, for k children of every node: the same as `by_depth`
        of such a tree.
      alpha_where_drafted: accepted / examined tokens; None if acceptance was scored.
      drafting: the share of the target's calls in which something was drafted.
    """

    how: str
    alpha: float | None
    error: float | None
    positions: int
    survival: dict[str, Rates]
    lengths: list[np.ndarray]
    work: dict[tuple[str, int], list[Work]]
    hit_rate: HitRates = dataclasses.field(default_factory=dict)
    by_depth: dict[str, Rates] = dataclasses.field(default_factory=dict)
    hit_rate_by_depth: dict[str, list[Rates]] = dataclasses.field(default_factory=dict)
    alpha_where_drafted: float | None = None
    drafting: float = 1.0

    def record(self) -> dict[str, Any]:
        """Returns the acceptance as a record has it."""
        return {
            "how": self.how,
            "alpha": self.alpha,
            "alpha_where_drafted": self.alpha_where_drafted,
            "drafting": self.drafting,
            "standard_error": self.error,
            "positions": self.positions,
            "by_position": _records("accepted", self.survival),
            "by_depth": _records("accepted", self.by_depth),
            "tokens_per_target_call": self.tokens_per_call(),
            "hit_rate": _records("covered", self.hit_rate),
            "hit_rate_by_depth": {
                kind: list(_records("covered", dict(enumerate(widths))).values())
                for kind, widths in self.hit_rate_by_depth.items()
            },
            "by_rank": {kind: acceptance_by_rank(rates) for kind, rates in self.hit_rate.items()},
        }

    def tokens_per_call(self) -> dict[str, list[float]]:
        """Returns the tokens per target call by verifier, for γ = 0 … G."""
        return {
            name: formulas.tokens_by_survival([kept for kept, _ in rates])
            for name, rates in self.survival.items()
        }


def _records(name: str, rates: Mapping[Any, Rates]) -> dict[Any, list[dict[str, Any]]]:
    return {
        key: [{name: mean, "standard_error": error} for mean, error in values]
        for key, values in rates.items()
    }


@isolated
def measure_acceptance(workload: Workload, verifiers: Sequence[str], gamma: int) -> Acceptance:
    """Returns the acceptance, by scoring if that is possible, else by counting.

    `verifiers` are names: several exact ones, or one alone. `gamma` is G.
    """
    return (score if is_scored(workload, verifiers) else count)(workload, verifiers, gamma)


def is_scored(workload: Workload, verifiers: Sequence[str]) -> bool:
    """Returns whether the acceptance can be computed by scoring outputs with both models."""
    greedy = workload.options.sampling().mode.greedy
    known = {*SURVIVAL, "gumbel", "rejection"} if greedy else set(SURVIVAL)
    return workload.drafter.scorable and known >= set(verifiers)


def score(workload: Workload, verifiers: Sequence[str], gamma: int) -> Acceptance:
    """Decodes plainly and scores the outputs with both models."""
    target, _, batches, options = workload
    config, plain = _force_language(workload), make_decoder(target, options.decoding(plain=True))
    sums, counts, lengths = [], [], []
    survivals: dict[str, list[np.ndarray]] = {name: [] for name in verifiers}
    hit_sums: list[dict[str, np.ndarray]] = []
    trees: dict[str, list[list[np.ndarray]]] = {}
    work: dict[tuple[str, int], list[Work]] = {
        (name, g): [] for name in verifiers for g in range(1, gamma + 1)
    }
    for batch in track(batches, len(batches), "scoring"):
        result = batch.decode_with(plain)
        lengths.append(result.lengths)
        agreed = _score_batch(workload, batch, result, config)
        expected = {key: [] for key in work}
        for row, length in enumerate(result.lengths):
            sums.append(float(agreed.overlap[row, :length].sum()))
            counts.append(int(length))
            hit_sums.append(agreed.hit_rates.sums(row, length))
            for kind, given in agreed.hit_rates.log_given.items():
                columns = given[row, :length].T
                trees.setdefault(kind, []).append(
                    [windowed_survival(column, gamma, SURVIVAL["token"]) for column in columns]
                )
            ended = result.finish_reasons[row] == "eos"
            for name in verifiers:
                # At temperature 0 all verifiers accept the same tokens.
                survival = SURVIVAL.get(name, SURVIVAL["token"])
                kept = windowed_survival(agreed.log_ratio[row, :length], gamma, survival)
                survivals[name].append(kept)
                for g in range(1, gamma + 1):
                    expected[name, g].append(formulas.output_calls(kept, g, ended))
        for key, rows in expected.items():  # a batch runs until its last row is done
            calls, draft_calls = map(max, zip(*rows, strict=True))
            work[key].append(Work(batch.padded, calls, draft_calls))
    alpha, error = formulas.clustered_mean(sums, counts) if sum(counts) else (None, None)
    return Acceptance(
        "scored",
        alpha,
        error,
        sum(counts),
        {name: _mean_survival(rows, gamma) for name, rows in survivals.items()},
        lengths,
        work,
        mean_hit_rate(hit_sums, counts),
        {name: _compute_rates_by_depth(rows, gamma) for name, rows in survivals.items()},
        {
            kind: [_compute_rates_by_depth(rows, gamma) for rows in zip(*columns, strict=True)]
            for kind, columns in trees.items()
        },
    )


def _force_language(workload: Workload) -> SamplingConfig:
    """Returns how tokens are chosen, with the token of a language where outputs begin with one."""
    return workload.language.force(workload.options.sampling())


def _score_batch(
    workload: Workload, batch: SentenceBatch, result: GenerationResult, config: SamplingConfig
) -> Agreement:
    """Returns the `agreement` along a batch's outputs.

    Raises:
      NonFiniteLogitsError: the drafter is damaged.
    """
    model, start = workload.drafter.model, workload.language.start_token
    outputs = result.tokens, result.lengths
    agreed = agreement(workload.target, model, batch.ids, *outputs, config, start)
    for row, length in enumerate(result.lengths):
        sound = np.isfinite(agreed.overlap[row, :length])
        if not sound.all():
            raise NonFiniteLogitsError(
                f"the drafter {workload.drafter.name}", batch.numbers[row], int(np.argmin(sound))
            )
    return agreed


def measure_hit_rate(workload: Workload, results: Sequence[GenerationResult]) -> HitRates:
    """Returns the top-k hit rate along outputs of the target, one result for each batch."""
    sums, counts, config = [], [], _force_language(workload)
    for batch, result in zip(workload.batches, results, strict=True):
        agreed = _score_batch(workload, batch, result, config)
        sums += [agreed.hit_rates.sums(row, length) for row, length in enumerate(result.lengths)]
        counts += result.lengths.tolist()
    return mean_hit_rate(sums, counts)


def windowed_survival(log_ratios: np.ndarray, gamma: int, survival: Survival) -> np.ndarray:
    """Returns P(at least i of the tokens drafted at t are accepted), `[n, G]`.

    It is for t = 0 … n − 1 and i = 1 … G, and 0 past the end. `log_ratios` are log q(y) − log p(y)
    of the n tokens of an output, `survival` is a function of `SURVIVAL`.
    """
    padded = np.append(log_ratios.astype(np.float64), np.full(gamma, -np.inf))
    windows = np.lib.stride_tricks.sliding_window_view(padded, gamma)[: len(log_ratios)]
    return survival(windows)


def _mean_survival(rows: Sequence[np.ndarray], gamma: int) -> Rates:
    """Returns means and standard errors for i = 1 … G.

    They are over all positions that have at least i tokens after them.
    """
    means: Rates = []
    for i in range(gamma):
        complete = [row[: max(0, len(row) - i), i] for row in rows]
        sums, counts = [row.sum() for row in complete], [len(row) for row in complete]
        means.append(formulas.clustered_mean(sums, counts) if any(counts) else (0.0, None))
    return means


def _compute_rates_by_depth(rows: Sequence[np.ndarray], gamma: int) -> Rates:
    """Returns Σ P(at least d are accepted) / Σ P(at least d − 1 are accepted) for d = 1 … G.

    The sums are over the positions of `_mean_survival`. Depths that are never reached are left out.
    """
    means: Rates = []
    for depth in range(gamma):
        complete = [
            np.pad(row, ((0, 0), (1, 0)), constant_values=1)[: max(0, len(row) - depth)]
            for row in rows
        ]
        above, kept = ([row[:, place].sum() for row in complete] for place in (depth, depth + 1))
        if not any(above):
            break
        means.append(formulas.clustered_mean(kept, above))
    return means


def count(workload: Workload, verifiers: Sequence[str], gamma: int) -> Acceptance:
    """Decodes with γ = G and counts accepted tokens.

    A smaller γ is expected to accept as many at its positions as G does at its first ones.
    """
    target, drafter, batches, options = workload
    alpha = error = where_drafted = None
    positions, drafting, lengths = 0, 1.0, []
    survival: dict[str, Rates] = {}
    by_depth: dict[str, Rates] = {}
    work: dict[tuple[str, int], list[Work]] = {}
    for name in verifiers:
        how = options.decoding() | dict(drafter=drafter, gamma=gamma, verifier=name)
        decode, what = make_decoder(target, how), f"counting, {name} verification"
        results = [batch.decode_with(decode) for batch in track(batches, len(batches), what)]
        rows = [row for result in results for row in result.stats.per_row]
        kept, calls = [row.accepted for row in rows], [row.target_calls for row in rows]
        accepted = np.array([row.accepted_by_position for row in rows]).T
        examined = np.array([row.examined_by_position for row in rows]).T
        if alpha is None and any(result.stats.acceptance_rate is not None for result in results):
            wanted = examined.sum(axis=0) + [row.undrafted for row in rows]
            alpha, error = formulas.clustered_mean(kept, wanted)
            where_drafted, positions = sum(kept) / int(examined.sum()), int(wanted.sum())
        survival[name] = [
            formulas.clustered_mean(column, calls) if any(calls) else (0.0, None)
            for column in accepted
        ]
        by_depth[name] = [
            formulas.clustered_mean(column, reached)
            for column, reached in zip(accepted, examined, strict=True)
            if any(reached)
        ]
        per_call = formulas.tokens_by_survival([mean for mean, _ in survival[name]])
        lengths = lengths or [result.lengths for result in results]
        made = [
            counted_work(batch.padded, result.stats)
            for batch, result in zip(batches, results, strict=True)
        ]
        drafting = mean_drafting(made)
        for g in range(1, gamma + 1):
            calls = [one.calls * per_call[gamma] / per_call[g] for one in made]
            work[name, g] = [
                dataclasses.replace(one, calls=n, draft_calls=g * n)
                for one, n in zip(made, calls, strict=True)
            ]
    measured = "counted", alpha, error, positions, survival, lengths, work
    return Acceptance(
        *measured, by_depth=by_depth, alpha_where_drafted=where_drafted, drafting=drafting
    )


class Comparison(NamedTuple):
    """α measured in two ways on the same positions, those that token verification examined.

    Attributes:
      positions: number of these positions.
      counted: share of them whose drafted token was accepted.
      overlap: mean over them of Σ min(p, q), which is the probability of that (theorem 3.5).
      difference: counted − overlap; 0 on average.
      standard_error: standard error of the difference, clustered by sentence; None with fewer than
        two sentences.
    """

    positions: int
    counted: float
    overlap: float
    difference: float
    standard_error: float | None


def compare(workload: Workload, gamma: int) -> Comparison | None:
    """Decodes by token verification, and scores the positions that were examined.

    The drafter must be `scorable`. Returns None if nothing was drafted.
    """
    target, drafter, batches, options = workload
    config, counts, kept, overlaps = _force_language(workload), [], [], []
    token = dict(verifier="token", lenience=None, typical_epsilon=None, typical_delta=None)
    decoding = options.decoding() | dict(drafter=drafter, gamma=gamma) | token
    for batch in track(batches, len(batches), "comparing"):
        state, request = prepare(target, batch.inputs, key=batch.keys, **decoding)
        places: list[list[int]] = [[] for _ in batch.ids]
        lengths, seen = np.array(state.lengths), np.zeros(len(batch.ids), np.int64)
        while not np.all(state.done):
            state = advance(request.network, request.drafter, state, np.int32(1))
            examined = np.array(state.counts.examined_by_position).sum(axis=1)
            for row, own in enumerate(places):
                first = int(lengths[row] - request.prefix_lengths[row])
                own += range(first, first + int(examined[row] - seen[row]))
            lengths, seen = np.array(state.lengths), examined
        accepted = np.array(state.counts.accepted)
        result = finish(target, state, request)
        agreed = _score_batch(workload, batch, result, config)
        for row, own in enumerate(places):
            counts.append(len(own))
            kept.append(int(accepted[row]))
            overlaps.append(float(agreed.overlap[row, own].sum()))
    if not sum(counts):
        return None
    differences = np.array(kept) - np.array(overlaps)
    difference, error = formulas.clustered_mean(differences, counts)
    return Comparison(
        sum(counts), sum(kept) / sum(counts), sum(overlaps) / sum(counts), difference, error
    )
