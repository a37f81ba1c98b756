"""Reads records of every kind and lays them out in rows: one for each way of decoding that was
timed."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec_jax.analysis.machine import PACKAGES, hardware
from specdec_jax.analysis.report import record_checks, record_types
from specdec_jax.analysis.timing import Spread
from specdec_jax.files import reading
from specdec_jax.speculative.verifiers import SYNTHETIC

_MOST_BYTES = 1 << 24


class Row(NamedTuple):
    """One way of decoding in one record; None stands for what the record does not say.

    `alpha` is that per position of the output; a record that has none has that where something was
    drafted, which is the same for a drafter that always drafts.
    """

    target: str
    drafter: str
    sentences: str
    temperature: float
    verifier: str
    gamma: int | None
    alpha: float | None
    cost_ratio: float | None
    verify_cost: float | None
    tokens_per_call: float | None
    predicted: float | None
    improvement: Spread | None
    differ: int | None
    bare_cost_ratio: float | None = None  # c and v of bare matrix products
    bare_verify_cost: float | None = None
    drafted_alpha: float | None = None  # α where something was drafted


def read_records(path: str) -> list[dict[str, Any]]:
    """Returns the record in a file, or all records of a suite's file, one a line; their kind is
    recognised by their keys.

    Raises:
      ValueError: the file holds no records.
    """
    text = reading.read_text(path, _MOST_BYTES)
    # A suite's file begins with a whole record, the others are written over many lines.
    lines = text.splitlines() if text.partition("\n")[0].endswith("}") else [text]
    try:
        found = [reading.parse_json(line) for line in lines]
        if found and isinstance(found[0], dict) and "accelerator_report" in found[0]:
            found = [{**found[0], "figures": found[1:]}]
        for record in found:
            record_checks.check(record)
    except ValueError as error:
        kinds = (
            "`specdec benchmark`, `specdec measure`, `specdec demo`, or a script: compare_drafters, tpu_aot, "
            "accelerator_report"
        )
        raise ValueError(f"{path}: {reading.reason(error)}, in a record of {kinds}") from None
    return found


def rows(record: Mapping[str, Any]) -> list[Row]:
    """Returns a row for each way of decoding that a record has measured; none for an estimate, a
    demo, nor for an accelerator's figures, which `accelerators.py` lays out."""
    kind = record_types.kind_of(record)
    if kind in (record_types.Estimate, record_types.Shown, record_types.Accelerator):
        return []
    if kind is record_types.Compared:
        return [_compared(record, variant) for variant in record["variants"]]
    options = record["options"]
    preset = options.get("preset")
    count = record["sentences"]
    files = f"{count} " + (
        f"row{'s' * (count != 1)} of random ids" if preset else _short(options["input_file"])
    )
    named = record["target"]["name"], (record["drafter"] or {"name": "none"})["name"], files
    if kind is record_types.Benchmark:
        bare = record.get("bare") or {"cost_ratio": None, "verify_cost": {}}
        return [
            Row(
                *named,
                options["temperature"],
                _verifier(variant, options),
                variant["gamma"],
                _alpha(variant["stats"]),
                record["cost_ratio"],
                record["verify_cost"].get(str(variant["gamma"])),
                variant["stats"]["tokens_per_target_call"],
                (variant["predicted"] or {}).get(variant.get("prediction", "with_lengths")),
                spread_of(variant["improvement"]),
                len(variant["differences"]),
                bare["cost_ratio"],
                bare["verify_cost"].get(str(variant["gamma"])),
                variant["stats"]["acceptance_rate"],
            )
            for variant in record["speculative"]
        ] + [
            Row(
                *named,
                options["temperature"],
                f"tree {variant['tree']}, {variant['verifier']}",
                None,
                None,
                record["cost_ratio"],
                variant["verify_cost"],
                variant["stats"]["tokens_per_target_call"],
                None,
                spread_of(variant["improvement"]),
                len(variant["differences"]),
            )
            for variant in record.get("trees", ())
        ]
    if kind is record_types.Searched:
        return [
            Row(
                *named,
                options["temperature"],
                f"{options['num_beams']} beams, u = {variant['width']}",
                variant["gamma"],
                None,
                None,
                None,
                variant["stats"]["steps_per_target_call"],
                None,
                spread_of(variant["improvement"]),
                len(variant["differences"]),
            )
            for variant in record["searches"]
        ]
    accepted, table = record["acceptance"], record["table"]
    return [
        Row(
            *named,
            options["temperature"],
            _named(options),
            row["gamma"],
            accepted["alpha"],
            record["cost_ratio"],
            row["verify_cost"],
            row["tokens"],
            row["with_verify_cost"],
            None,
            None,
            drafted_alpha=accepted.get("alpha_where_drafted"),
        )
        for row in table
    ]


def spread_of(found: Mapping[str, float]) -> Spread:
    """Returns the `Spread` that a record has written as an object."""
    return Spread(found["median"], found["least"], found["most"])


def _alpha(stats: Mapping[str, Any]) -> float | None:
    return stats.get("acceptance_rate_per_position", stats["acceptance_rate"])


def _verifier(variant: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return (
        _named(options)
        if variant["synthetic_alpha"] is None
        else f"{SYNTHETIC.name}, α = {variant['synthetic_alpha']:g}"
    )


def _named(options: Mapping[str, Any]) -> str:
    lenience = options.get("lenience")
    return options["verifier"] + (f", l = {lenience:g}" if lenience is not None else "")


def _compared(record: Mapping[str, Any], variant: Mapping[str, Any]) -> Row:
    files = f"{record['sentences']} {_short(record['input_file'])}"
    return Row(
        record["target"],
        variant["variant"],
        files,
        record["temperature"],
        record["verifier"],
        None,
        variant["alpha"],
        variant["cost_ratio"],
        variant["verify_cost"],
        variant["tokens_per_call"],
        None,
        spread_of(variant["improvement"]),
        variant["differ"],
        drafted_alpha=variant.get("alpha_where_drafted"),
    )


def _short(path: str | None) -> str:
    """Returns the file and its folder, and no more of the path on the machine that measured."""
    return "of " + "/".join(pathlib.Path(path).parts[-2:]) if path else "built-in sentences"


def estimated(record: Mapping[str, Any]) -> bool:
    """Returns whether a record is a compiler's estimate (scripts/tpu_aot.py)."""
    return record_types.kind_of(record) is record_types.Estimate


def measured_at(record: Mapping[str, Any]) -> str:
    """Returns the machine and the versions of a record."""
    machine = record["machine"]
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("python", *PACKAGES) if name in machine
    )
    return f"{hardware(machine)}; {versions}"


def memory_estimate(record: Mapping[str, Any]) -> str:
    """Returns a sentence with the compiler's estimate of a pair's memory."""
    pair = record["target"] + (f" with {record['drafter']}" if record["drafter"] else "")
    pair += f", {record['num_beams']} beams" if record.get("num_beams") else ""
    copied, time = record["copied_in_loops"], record.get("iteration_ms")
    return (
        f"{pair}, γ = {record['gamma']}, batch {record['batch_size']}, {record['dtype']}"
        f"{', target in int8' if record.get('quantize') else ''}, compiled ahead of time for "
        f"{placed(record)} by jax {record['jax']}: weights {record['weights_gb']:.1f} GB, needed "
        f"{record['needed_gb']:.1f} of "
        f"{record['memory_gb']:.0f} GB on a device: {'fits' if record['fits'] else 'does not fit'}. "
        f"Arrays over a megabyte that loop bodies copy: {'unknown' if copied is None else len(copied)}."
        + (f" An iteration: {time:.2f} ms, floor {record['floor_ms']:.2f}." if time else "")
    )


def placed(record: Mapping[str, Any]) -> str:
    """Returns the devices that an estimate is for."""
    return f"{record['mesh'] or 'one device'} of a TPU {record['topology']}"


def time_estimates(record: Mapping[str, Any]) -> list[tuple]:
    """Returns a line for every row of table 2, none if the record has no times.

    A line has the paper's numbers, then c, v and improvement by the compiler's estimates, in both
    ways of scripts/tpu_aot.py.
    """

    def cells(found):
        return (f"{found['c']:.3f}", f"{found['v']:.2f}", f"{found['improvement']:.2f}")

    return [
        (
            f"{row['task']}, {row['drafter']}",
            row["temperature"],
            row["gamma"],
            f"{row['alpha_paper']:.2f}",
            f"{row['c_paper']:.2f}",
            *cells(row["as compiled"]),
            *cells(row["as for two positions"]),
            f"{row['expected_paper']:.1f}",
            f"{row['measured_paper']:.1f}",
        )
        for row in record.get("times", {"rows": ()})["rows"]
    ]
