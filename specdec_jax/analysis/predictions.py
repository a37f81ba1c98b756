"""Predicts improvements from measured steps, and splits the time into parts."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specdec_jax.analysis import formulas
from specdec_jax.analysis.timing import Times, summarize
from specdec_jax.analysis.top_k_hit_rate import KINDS, HitRates, acceptance_by_rank
from specdec_jax.decoding.results import Stats
from specdec_jax.speculative.trees import LOSSY_TREES, DynamicTree, Tree


@dataclasses.dataclass(frozen=True)
class Work:
    """The calls that one batch needs.

    Attributes:
      padded: length to which its inputs are padded.
      calls: number of target calls.
      draft_calls: number of draft steps, where a call over two positions counts as one; None
        without a drafter, whose encoder then does not run.
      drafting: the share of the calls in which something was drafted; the others are over one
        position.
    """

    padded: int
    calls: float
    draft_calls: float | None = None
    drafting: float = 1.0


def predict_cost(work: Sequence[Work], gamma: int, times: Times) -> dict[str, float]:
    """Returns the seconds of `work` by part, from the measured single steps.

    The loop around them is not counted. Without a draft step, drafting is taken to need no time.
    """
    single = times["target step"].median
    added = times[f"verify {gamma}"].median - single if gamma else 0.0
    parts = {"target encoder": 0.0, "drafter encoder": 0.0, "draft steps": 0.0, "target calls": 0.0}
    for item in work:
        parts["target encoder"] += times[f"target encoder {item.padded}"].median
        parts["target calls"] += item.calls * (single + item.drafting * added)
        if gamma and (name := f"drafter encoder {item.padded}") in times:
            parts["drafter encoder"] += times[name].median
        if item.draft_calls is not None and "draft step" in times:
            parts["draft steps"] += item.draft_calls * draft_seconds(gamma, times)
    return parts


def draft_seconds(gamma: int, times: Times) -> float:
    """Returns the seconds of a draft step between target calls.

    It is the time that γ of them add to a call over γ + 1 positions, divided by γ, but at least a
    draft step alone.
    """
    added = times[f"draft {gamma} and verify"].median - times[f"verify {gamma}"].median
    return max(added / gamma, times["draft step"].median)


def cost_ratio(gamma: int, times: Times) -> float:
    """Returns c: the time of a draft step between target calls, in target steps.

    For a drafter without draft steps of its own it is the time that drafting adds to an iteration,
    per token; 0 if no iteration was timed.
    """
    step = times["target step"].median
    if "draft step" in times:
        return draft_seconds(gamma, times) / step
    if f"iteration {gamma}" not in times:
        return 0.0
    added = times[f"iteration {gamma}"].median - times[f"call {gamma}"].median
    return max(0.0, added) / gamma / step


def encoder_seconds(padded: Sequence[int], times: Times, drafts: bool) -> float:
    """Returns the seconds of the encoders for all batches; the drafter's only with `drafts`."""
    models = ("target", "drafter") if drafts else ("target",)
    names = [f"{model} encoder {size}" for model in models for size in padded]
    return sum(times[name].median for name in names if name in times)


def bound_by_oracle(gamma: int, alpha: float, times: Times) -> dict[str, float | None]:
    """Returns the bounds of every policy of γ with this α (per position of the output) and c.

    They hold if target calls cost the same at any width. Where drafting costs more than it saves,
    the best policy never drafts. A value is None if there is no bound.
    """
    bounds = {
        "tokens_per_target_call": formulas.oracle_tokens(alpha),
        "improvement": max(1.0, formulas.oracle_improvement(alpha, cost_ratio(gamma, times))),
    }
    return {name: value if np.isfinite(value) else None for name, value in bounds.items()}


def expected_work(
    padded: Sequence[int],
    lengths: Sequence[np.ndarray],
    gamma: int,
    alpha: float,
    drafting: float = 1.0,
) -> list[Work]:
    """Returns the expected work, given α and the output lengths alone.

    A batch runs until its last row is done. `padded` has each batch's padded input length,
    `lengths` the new tokens of its rows; α is per position of the output.
    """
    work = []
    for size, rows in zip(padded, lengths, strict=True):
        calls = max(formulas.expected_calls(alpha, gamma, int(length)) for length in rows)
        work.append(Work(size, calls, gamma * calls if gamma else None, drafting))
    return work


def predict_improvements(
    gamma: int,
    alpha: float,
    times: Times,
    padded: Sequence[int],
    lengths: Sequence[np.ndarray],
    counted: Sequence[Work],
) -> dict[str, float]:
    """Returns the expected improvement by four formulas, from coarse to fine.

    None counts the loop itself, nor the second position of a drafter's first call after a full
    acceptance.

    Arguments are those of `expected_work`; `counted` is the work that was done.

    Returns:
      cost_ratio, verify_cost: the measured c, of draft steps between target calls, and v for γ + 1
        positions.
      theorem_3_8: E[tokens] / (γc + 1).
      with_verify_cost: E[tokens] / (γc + v), with v = 1 for the calls in which nothing is drafted.
      with_lengths: the same with encoders and the real output lengths.
      with_counts: the same with the calls that were made instead of those expected from α.
    """
    step = times["target step"].median
    c = cost_ratio(gamma, times)
    v = times[f"verify {gamma}"].median / step
    plain = sum(predict_cost(expected_work(padded, lengths, 0, 0.0), 0, times).values())
    drafting = mean_drafting(counted)
    expected = expected_work(padded, lengths, gamma, alpha, drafting)
    return {
        "cost_ratio": c,
        "verify_cost": v,
        "theorem_3_8": formulas.improvement(alpha, gamma, c),
        "with_verify_cost": formulas.improvement(alpha, gamma, c, 1 + drafting * (v - 1)),
        "with_lengths": plain / sum(predict_cost(expected, gamma, times).values()),
        "with_counts": plain / sum(predict_cost(counted, gamma, times).values()),
    }


def counted_work(padded: int, stats: Stats) -> Work:
    """Returns the work of one batch: the calls of the rows that took the most.

    `stats` must have those of every row.
    """
    assert stats.per_row is not None, "or no row was decoded"
    # Other drafters have no calls without a draft, except at an output's limit.
    drafting = stats.examined_by_position[:1].sum() / stats.target_calls if stats.undrafted else 1.0
    calls = max(row.target_calls for row in stats.per_row)
    return Work(padded, calls, max(row.draft_calls for row in stats.per_row), float(drafting))


def mean_drafting(work: Sequence[Work]) -> float:
    """Returns the share of all calls in which something was drafted; 1 without calls."""
    calls = sum(item.calls for item in work)
    return sum(item.calls * item.drafting for item in work) / calls if calls else 1.0


# Why nothing is predicted for a tree, or the source of every node's predicted acceptance.
TREE_PREDICTIONS = {kind: f"top-k hit rate by {words}" for kind, words in KINDS.items()} | {
    "dynamic": "the drafter's distribution shapes the tree",
    "lossy": "the verifier is lossy",
    "unscored": "the drafter's distribution is not scored",
}


def tree_tokens(tree: Tree | DynamicTree, hit_rate: HitRates) -> dict[str, float | str | None]:
    """Returns the expected tokens per target call of a tree: `Tree.expected` by acceptance by rank.

    It assumes that every node is accepted independently of the others, and that outputs have no
    end. Above temperature 0 drawn children of every kind count as one drawn and the others fixed.
    The hit rate, of the same run, is empty where the drafter's distribution is not scored.

    Returns:
      predicted: the number; None where nothing is predicted.
      prediction: a key of `TREE_PREDICTIONS`.
    """
    if isinstance(tree, DynamicTree):
        return {"predicted": None, "prediction": "dynamic"}
    if tree.verify in LOSSY_TREES or not hit_rate:
        why = "lossy" if tree.verify in LOSSY_TREES else "unscored"
        return {"predicted": None, "prediction": why}
    kind = "mixed" if "mixed" in hit_rate and tree.kind != "top" else "top"
    return {"predicted": tree.expected(acceptance_by_rank(hit_rate[kind])), "prediction": kind}


def sampling_cost(
    gamma: int, seconds: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, float]]:
    """Returns the cost of choosing tokens, as a share of a target call over γ + 1 positions.

    `seconds` are those of each pass by variant ("call γ, alone", "call γ, token" and so on), which
    are compared pass by pass.
    """
    start = f"call {gamma}, "
    alone = np.array(seconds[start + "alone"])
    return {
        name.removeprefix(start): summarize(np.array(times) / alone - 1)
        for name, times in seconds.items()
        if name.startswith(start) and name != start + "alone"
    }


def cost_shares(parts: Mapping[str, float], measured: float) -> dict[str, float] | None:
    """Returns each part's share of the measured seconds.

    "rest" is the loop, the host and everything else that single steps do not include. None if the
    parts add up to more than was measured: single steps and whole decodes were then timed at
    different speeds, and no share would mean anything.
    """
    rest = 1 - sum(parts.values()) / measured
    found = {name: part / measured for name, part in parts.items()}
    return found | {"rest": rest} if rest >= 0 else None
