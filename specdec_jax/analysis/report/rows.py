"""Lays out records in rows: one for each way of decoding that was timed."""

import pathlib
from typing import NamedTuple

from specdec_jax.analysis.report import records
from specdec_jax.analysis.timing import Spread
from specdec_jax.speculative.verifiers import SYNTHETIC


class Row(NamedTuple):
    """One way of decoding in one record; None stands for what the record does not have.

    `alpha` is per position of the output if the record has it so, else where something was drafted.
    Both are the same for a drafter that always drafts.
    """

    target: str
    drafter: str
    sentences: str
    temperature: float
    verifier: str
    gamma: int | None = None
    alpha: float | None = None
    cost_ratio: float | None = None
    verify_cost: float | None = None
    tokens_per_call: float | None = None
    predicted: float | None = None
    improvement: Spread | None = None
    differ: int | None = None
    bare_cost_ratio: float | None = None  # c and v of bare matrix products
    bare_verify_cost: float | None = None
    drafted_alpha: float | None = None  # α where something was drafted

    @property
    def about(self) -> str:
        """What was decoded."""
        return f"{self.target}, {self.sentences}, temperature {self.temperature:g}"

    @property
    def reached(self) -> Spread | None:
        """The measured improvement divided by the predicted one."""
        if self.improvement is None or not self.predicted:
            return None
        return Spread(*(value / self.predicted for value in self.improvement))


def list_rows(record: records.Record) -> list[Row]:
    """Returns a row for each way of decoding that a record has measured.

    Estimates, demos and an accelerator's figures have none.
    """
    if isinstance(record, records.BenchmarkRecord):
        return _benchmark_rows(record)
    if isinstance(record, records.BeamRecord):
        return _beam_rows(record)
    if isinstance(record, records.MeasureRecord):
        return _measure_rows(record)
    return _comparison_rows(record) if isinstance(record, records.ComparisonRecord) else []


def _benchmark_rows(record: records.BenchmarkRecord) -> list[Row]:
    named, bare = _name(record), record.bare
    found = []
    for variant in record.speculative:
        gamma, stats = str(variant.gamma), variant.stats
        alpha = stats.acceptance_rate_per_position
        found.append(
            Row(
                *named,
                _name_verifier(record.options, variant.synthetic_alpha),
                gamma=variant.gamma,
                alpha=stats.acceptance_rate if alpha is None else alpha,
                # Between target calls, as in the prediction beside it.
                cost_ratio=(variant.predicted or {}).get("cost_ratio", record.cost_ratio),
                verify_cost=record.verify_cost.get(gamma),
                tokens_per_call=stats.tokens_per_target_call,
                predicted=(variant.predicted or {}).get(variant.prediction),
                improvement=variant.improvement.spread(),
                differ=len(variant.differences) if variant.compared else None,
                bare_cost_ratio=bare.cost_ratio if bare else None,
                bare_verify_cost=bare.verify_cost.get(gamma) if bare else None,
                drafted_alpha=stats.acceptance_rate,
            )
        )
    for tree in record.trees:
        found.append(
            Row(
                *named,
                f"tree {tree.tree}, {tree.verifier}",
                cost_ratio=record.cost_ratio,
                verify_cost=tree.verify_cost,
                tokens_per_call=tree.stats.tokens_per_target_call,
                improvement=tree.improvement.spread(),
                differ=len(tree.differences) if tree.compared else None,
            )
        )
    return found


def _beam_rows(record: records.BeamRecord) -> list[Row]:
    return [
        Row(
            *_name(record),
            f"{record.options.num_beams} beams, u = {variant.width}",
            gamma=variant.gamma,
            tokens_per_call=variant.stats.steps_per_target_call,
            improvement=variant.improvement.spread(),
            differ=len(variant.differences),
        )
        for variant in record.searches
    ]


def _measure_rows(record: records.MeasureRecord) -> list[Row]:
    return [
        Row(
            *_name(record),
            _name_verifier(record.options),
            gamma=row.gamma,
            alpha=record.acceptance.alpha,
            cost_ratio=record.cost_ratio,
            verify_cost=row.verify_cost,
            tokens_per_call=row.tokens,
            predicted=row.with_verify_cost,
            drafted_alpha=record.acceptance.alpha_where_drafted,
        )
        for row in record.table
    ]


def _comparison_rows(record: records.ComparisonRecord) -> list[Row]:
    return [
        Row(
            record.target,
            variant.variant,
            f"{record.sentences} {_shorten(record.input_file)}",
            record.temperature,
            record.verifier,
            alpha=variant.alpha,
            cost_ratio=variant.cost_ratio,
            verify_cost=variant.verify_cost,
            tokens_per_call=variant.tokens_per_call,
            improvement=variant.improvement.spread(),
            differ=variant.differ,
            drafted_alpha=variant.alpha_where_drafted,
        )
        for variant in record.variants
    ]


def _name(
    record: records.BenchmarkRecord | records.BeamRecord | records.MeasureRecord,
) -> tuple[str, str, str, float]:
    """Returns target, drafter, inputs and temperature of a record."""
    options, count = record.options, record.sentences
    inputs = f"row{'s' * (count != 1)} of random ids" if options.preset else None
    drafter = record.drafter.name if record.drafter else "none"
    inputs = f"{count} {inputs or _shorten(options.input_file)}"
    return record.target.name, drafter, inputs, options.temperature


def _name_verifier(options: records.SharedOptions, synthetic_alpha: float | None = None) -> str:
    if synthetic_alpha is not None:
        return f"{SYNTHETIC.name}, α = {synthetic_alpha:g}"
    return options.verifier + ("" if options.lenience is None else f", l = {options.lenience:g}")


def _shorten(path: str | None) -> str:
    """Returns the file and its folder, and no more of the path on the machine that measured."""
    return "of " + "/".join(pathlib.Path(path).parts[-2:]) if path else "built-in sentences"
