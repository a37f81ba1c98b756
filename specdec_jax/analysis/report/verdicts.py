"""Writes what a record begins with on a terminal: whether drafting pays, and what to try else."""

from collections.abc import Mapping
from typing import Any

from specdec_jax.analysis.verdicts import advise, describe_best, describe_tokens


def promise(record: Mapping[str, Any]) -> str:
    """Returns the improvement to expect of whole decodes, and what it leaves out."""
    whole = {
        (row["gamma"], name): found["with_lengths"]
        for row in record["table"]
        for name, found in row["by_position"].items()
    }
    (gamma, verifier), gain = max(whole.items(), key=lambda item: item[1])
    left_out = (
        "encoders and output lengths are counted; the loop, the host and the tokenizer are not"
    )
    pays = f"drafting should pay here: {gain:.3g} times the speed of plain decoding, with gamma {gamma}, {verifier}"
    if gain <= 1:
        pays = f"drafting should not pay here: at best {gain:.3g} times the speed of plain decoding"
    elif gain < 1.05:  # less than what is left out may cost
        pays = pays.replace("should pay here", "should hardly pay here", 1)
    return f"{pays} ({left_out}; `specdec benchmark` times whole decodes)"


def benchmark_verdict(record: Mapping[str, Any]) -> list[str]:
    """Returns lines on whether drafting pays, what to try else, and whether tokens are plain
    decoding's."""
    options, variants = (
        record["options"],
        {_variant_name(variant): variant for variant in record["speculative"]},
    )
    if not record["verdicts"]:
        alone = (
            "plain decoding alone was timed"
            if record["drafter"] is None
            else "--synthetic_alpha times whole decodes"
        )
        return [
            f"no verdict: {'of random weights only steps are timed; ' * bool(options['preset'])}{alone}"
        ]
    lines = []
    widths = {int(gamma) + 1: v for gamma, v in record["verify_cost"].items()}
    for found in record["verdicts"]:
        variant = variants.get(found["best"], record["speculative"][0])
        if not variant["stats"]["drafted"] and found["best"] in variants:
            lines.append(
                f"no verdict: {record['drafter']['name']} drafted nothing; try a model as the drafter"
            )
            continue
        c = variant["predicted"]["cost_ratio"] if variant["predicted"] else record["cost_ratio"]
        timed = {other["gamma"] for other in variants.values()}
        alpha, batch = variant["stats"]["acceptance_rate_per_position"], options["batch_size"]
        advice = advise(alpha, c, widths, timed, batch)
        lines += describe_best(found, options["repeats"], advice)
    every = [*record["speculative"], *record.get("trees", ())]
    counts = [len(variant["differences"]) if variant["compared"] else None for variant in every]
    near_ties = all(item["near_tie"] for variant in every for item in variant["differences"])
    return [*lines, describe_tokens(counts, record["sentences"], options, near_ties)]


def _variant_name(variant: Mapping[str, Any]) -> str:
    return f"gamma {variant['gamma']}" + (
        "" if variant["synthetic_alpha"] is None else f", alpha {variant['synthetic_alpha']:g}"
    )


def tune_verdict(record: Mapping[str, Any]) -> list[str]:
    """Returns lines on whether the choice pays, what to try else, and whether tokens are plain
    decoding's."""
    options, accepted, steps = record["options"], record["acceptance"], record["steps"]
    c = record["draft_seconds"] / steps["iteration, plain"]["median"]
    timed = [item for item in record["choices"] if item["improvement"] and item["gamma"]]
    advice = advise(accepted["alpha"], c or None, {}, (), options["batch_size"])
    differing = [item["differing"] for item in timed]
    return [
        *describe_best(record["verdict"], options["repeats"], advice),
        describe_tokens(differing, record["sentences"], options),
    ]


def search_verdict(record: Mapping[str, Any]) -> list[str]:
    """Returns the same of beam search, for a record of `benchmark` or `tune`, and an empty line; no
    lines without a drafter."""
    if record["verdict"] is None:
        return []
    options, near_ties = record["options"], None
    if "searches" in record:
        differing = [len(variant["differences"]) for variant in record["searches"]]
        near_ties = all(
            item["near_tie"] for variant in record["searches"] for item in variant["differences"]
        )
    else:
        differing = [item["differing"] for item in record["choices"]]
    advice = "a drafter that costs less, or fewer levels (--gamma)"
    best = describe_best(record["verdict"], options["repeats"], advice, "plain beam search")
    return [*best, describe_tokens(differing, record["sentences"], options, near_ties), ""]
