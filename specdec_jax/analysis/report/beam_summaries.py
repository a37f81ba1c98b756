"""Writes records of beam search as text for reading in a terminal."""

from collections.abc import Mapping
from typing import Any

from specdec_jax.analysis.machine import hardware
from specdec_jax.analysis.report import verdicts
from specdec_jax.analysis.tuning import read_choice


def benchmark_summary(record: Mapping[str, Any]) -> str:
    """A record of `benchmark_beams` as text for reading."""
    inputs, calls = record["sentences"], record["plain"]["stats"]["target_calls"]
    lines = [
        *verdicts.search_verdict(record),
        *_head(record),
        "",
        f"{'':<20}{'ms an input':>12}{'over plain beams':>26}{'steps a call':>14}{'calls':>8}{'equal':>12}",
    ]
    variants = [("plain", record["plain"]), ("greedy", record["greedy"])]
    variants += [(str(read_choice(variant)), variant) for variant in record["searches"]]
    against = record.get("against")
    if against:
        variants.append(
            (against["name"], against | {"improvement": _inverse(against["improvement"]["plain"])})
        )
    for name, variant in variants:
        line = f"{name:<20}{1e3 * variant['seconds']['median'] / max(inputs, 1):>12.2f}"
        line += f"{_spread(variant['improvement']) if 'improvement' in variant else '':>26}"
        if "width" in variant:
            line += f"{variant['stats']['steps_per_target_call']:>14.2f}{variant['calls_over_plain']:>8.2f}"
        if "differences" in variant:
            line = f"{line:<80}{inputs - len(variant['differences']):>6} of {inputs}"
        lines.append(line.rstrip())
    seconds = sum(variant["compile_seconds"] for _, variant in variants)
    lines += [
        "",
        f"plain beam search makes {calls} calls of the target; compilation of all variants {seconds:.1f} s",
    ]
    for name, variant in variants:
        for item in variant.get("differences", ()):
            kind = "near-tie" if item["near_tie"] else "not a near-tie"
            lines.append(
                f"  {name} differs from plain: sentence {item['input'] + 1}, token {item['position']}, {kind} "
                f"(margin {item['margin']:.2e}), scores {item['scores'][0]:.6f} and {item['scores'][1]:.6f}"
            )
    return "\n".join(lines)


def tune_summary(record: Mapping[str, Any]) -> str:
    """A record of `tune_beams` as text for reading."""
    plain, gain, options = record["choices"][0], record["improvement"], record["options"]
    lines = [
        *verdicts.search_verdict(record),
        *_head(record),
        "",
        f"{'':<20}{'over plain beams':>26}",
    ]
    lines += [
        f"{read_choice(item)!s:<20}{_spread(item['improvement']):>26}" for item in record["choices"]
    ]
    chosen, passes = read_choice(record["chosen"]), plain["seconds_per_token"]
    shift = (passes["most"] - passes["least"]) / passes["median"]
    lines += [
        "",
        f"noise: plain beam search's own passes lie up to {shift:.1%} apart ({options['repeats']} passes)",
    ]
    if chosen.gamma:
        lines.append(f"chosen: {chosen}: {_spread(gain)} times plain beam search")
        if gain["least"] <= 1:
            lines.append("  within the noise: in some pass plain beam search was as fast")
    else:
        lines.append(
            f"chosen: plain beam search, which is faster than drafting with {options['drafter']}"
        )
    if record["sweep"]:
        swept = record["sweep"]
        lines += [
            "",
            f"sweep over {swept['sentences']} other inputs, improvement over plain beam search:",
        ]
        lines += [
            f"{name:<20}{_spread(spread):>26}" for name, spread in swept["improvement"].items()
        ]
        best, over = read_choice(swept["best"]), _spread(swept["chosen_over_best"])
        lines.append(f"best: {best}; time of the chosen over the best {over}")
    return "\n".join([*lines, "", f"written to {options['config']}"])


def _head(record: Mapping[str, Any]) -> list[str]:
    options, drafter = record["options"], record["drafter"]
    return [
        record["target"]["name"]
        + (f" with {drafter['name']}" if drafter else "")
        + f", {options['num_beams']} beams "
        f"in the form of {options['beam_style']}, length penalty {record['length_penalty']:g}",
        f"{record['sentences']} inputs, batch {options['batch_size']}, {options['repeats']} passes; "
        f"{hardware(record['machine'])}",
    ]


def _spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['least']:.3f} to {spread['most']:.3f})"


def _inverse(spread: Mapping[str, float]) -> dict[str, float]:
    return {
        "median": 1 / spread["median"],
        "least": 1 / spread["most"],
        "most": 1 / spread["least"],
    }
