"""`specdec measure`: α, c and v of a target and a drafter on this machine, and the improvement that they let expect."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax import acceptance, analysis, measure, passes, plots, records
from specdec_jax.acceptance import Acceptance
from specdec_jax.compatibility import UnsupportedCombination
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.measure import Spread
from specdec_jax.options import DecodingOptions, at_least, check_gamma, check_output, option
from specdec_jax.writing import write_file


@dataclasses.dataclass(frozen=True)
class MeasureOptions(DecodingOptions):
    """Options of `specdec measure`."""

    gamma_max: int = option(8, "give the improvement for every number of drafted tokens up to this one")
    widths: tuple[int, ...] = option(
        (2, 3, 5, 9),
        "widths of the target calls that are timed, in positions, up to gamma_max + 1; v is interpolated in between",
    )
    input_file: str | None = option(
        None, "UTF-8 text, one sentence a line, gzip or not (default: ende/sentences.txt, which comes with the package)"
    )
    limit: int = option(0, "take only the first lines of the input; 0: all")
    batch_size: int = option(1, "sentences decoded together")
    compare_alpha: bool = option(
        False, "also decode by token verification with gamma_max, and compare alpha by counting with alpha by the models' laws on "
        "the same positions; only for a drafting model in full precision without a shortlist"
    )  # fmt: skip
    repeats: int = option(3, "passes over the single steps; medians and spread are over them")
    output: str | None = option(None, "file that the JSON record is written to")
    json: bool = option(False, "print the JSON record instead of the summary")
    plot: str | None = option(None, "file (.png, .pdf or .svg) for a figure")

    def check(self) -> None:
        check_measured(self)
        check_gamma(self.gamma_max)
        at_least(1, gamma_max=self.gamma_max)
        for width in self.widths:
            at_least(2, widths=width)
        if self.compare_alpha and self.max_new_tokens == 1:
            raise UnsupportedCombination(
                "compare_alpha: got it with max_new_tokens=1, expected at least 2: nothing is drafted before the last token"
            )
        check_output(self.output)
        if self.plot:
            plots.check(self.plot)

    @property
    def timed_gammas(self) -> list[int]:
        """γ whose target calls are timed: those of the widths up to γ_max + 1, and γ_max itself."""
        return sorted({width - 1 for width in self.widths if width <= self.gamma_max} | {self.gamma_max})


def check_measured(options) -> None:
    """What `measure` and `tune` check alike, for options with a batch size, repeats and a limit."""
    DecodingOptions.check(options)
    if not options.drafter:
        raise ValueError("drafter: got nothing, expected what `specdec generate --help` lists for --drafter")
    if options.gamma_policy != "fixed":
        raise UnsupportedCombination(
            f"gamma_policy: got {options.gamma_policy!r}, expected fixed: gamma is what is chosen"
        )
    if options.mesh:
        raise UnsupportedCombination(f"mesh: got {options.mesh!r}, expected none: what is measured here is one device")
    at_least(1, batch_size=options.batch_size, repeats=options.repeats)
    at_least(0, limit=options.limit)


def verifiers_of(options) -> tuple[str, ...]:
    """Verifiers to compare: token and block where one of them is asked for and they differ, else what is asked for."""
    both = ("token", "block")
    return both if options.temperature > 0 and options.verifier in both else (options.verifier,)


def run(options: MeasureOptions) -> None:
    """`specdec measure`."""
    options.check()
    sentences = passes.sentences_of(options.input_file, options.limit)
    target, drafter = options.load()
    record = measured(target, drafter, passes.batches_of(target, sentences, options), options)
    text = json.dumps(record, indent=1)
    try:
        print(text if options.json else summary(record))
        if options.plot:
            plots.save(plots.improvement(record), options.plot)
    finally:  # if one fails, the record is in another
        if options.output:
            write_file(options.output, text + "\n")


def measured(target, drafter, batches: Sequence[passes.Batch], options: MeasureOptions) -> dict[str, Any]:
    """The record."""
    passes.check_prompts(target, drafter, batches, options)
    if options.compare_alpha and not acceptance.scorable(drafter):
        raise UnsupportedCombination(
            f"compare_alpha: got it with drafter={options.drafter!r}, shortlist={options.shortlist!r}, "
            f"shortlist_size={options.shortlist_size}, drafter_int8={options.drafter_int8}, expected a model that draws from its own law"
        )
    accepted = acceptance.of(target, drafter, batches, verifiers_of(options), options.gamma_max, options)
    same = acceptance.compared(target, drafter, batches, options.gamma_max, options) if options.compare_alpha else None
    times = step_times(target, drafter, batches, options)
    v = {1: 1.0} | {
        gamma + 1: times[f"verify {gamma}"].median / times["target step"].median for gamma in options.timed_gammas
    }
    c = draft_cost(options.gamma_max, times)
    return {
        **records.head(target, drafter, batches, options),
        "acceptance": accepted.record(),
        "same_positions": same and same._asdict(),
        "steps": {name: spread._asdict() for name, spread in times.items()},
        "cost_ratio_alone": (
            times["draft step"].median / times["target step"].median if "draft step" in times else None
        ),
        "cost_ratio": c,
        "verify_cost": {str(width): value for width, value in v.items()},
        **expectations(accepted, c, v, options.gamma_max),
    }


def step_times(target, drafter, batches: Sequence[passes.Batch], options: MeasureOptions) -> dict[str, Spread]:
    """Seconds of single steps, for the shapes that the batches have."""
    rows, lengths = len(batches[0].ids), sorted({batch.padded for batch in batches})
    gamma = options.gamma_max
    room = measure.total_slots(target, lengths[-1], options.max_new_tokens, gamma)
    arms = measure.step_arms(target, drafter, rows, lengths, room, options.timed_gammas, [gamma])
    if not isinstance(drafter, ModelDrafter):
        state = measure.iteration_state(target, drafter, rows, lengths[-1], gamma, **options.decoding())
        arms |= {f"call {gamma}": measure.call_arm(*state), f"iteration {gamma}": measure.iteration_arm(*state)}
    passes.warm_up({}, arms, batches)
    return passes.time_steps(arms, options.repeats)


def draft_cost(gamma: int, times: Mapping[str, Spread]) -> float:
    """c: a draft step between target calls over a target step; without a model what drafting adds to an iteration."""
    step = times["target step"].median
    if "draft step" in times:
        return records.draft_seconds(gamma, times) / step
    return max(0.0, times[f"iteration {gamma}"].median - times[f"call {gamma}"].median) / gamma / step


def expectations(accepted: Acceptance, c: float, v: Mapping[int, float], gamma_max: int) -> dict[str, Any]:
    """Expected improvement for γ = 1 … γ_max, and the best γ.

    Args:
      c: cost of a draft step.
      v: by number of positions, ascending; in between it is interpolated.
    """
    widths, values = list(v), list(v.values())
    verify_cost = np.interp(np.arange(1, gamma_max + 2), widths, values).tolist()
    alpha, table = accepted.alpha, []
    tokens = {
        name: analysis.tokens_by_survival([stands for stands, _ in rates]) for name, rates in accepted.survival.items()
    }
    for gamma in range(1, gamma_max + 1):
        width = verify_cost[gamma]
        known = alpha is not None
        table.append({
            "gamma": gamma,
            "verify_cost": width,
            "timed": gamma + 1 in v,
            "tokens": analysis.expected_tokens(alpha, gamma) if known else None,
            "theorem_3_8": analysis.improvement(alpha, gamma, c) if known else None,
            "with_verify_cost": analysis.improvement(alpha, gamma, c, width) if known else None,
            "by_position": {
                name: {"tokens": per_call[gamma], "with_verify_cost": per_call[gamma] / (gamma * c + width)}
                for name, per_call in tokens.items()
            },
        })  # fmt: skip
    powers = [alpha**gamma for gamma in range(1, gamma_max + 1)] if alpha is not None else None
    best = {
        "theorem_3_8": analysis.best_gamma(powers, c, [1.0] * (gamma_max + 1)) if powers else None,
        "with_verify_cost": analysis.best_gamma(powers, c, verify_cost) if powers else None,
        "by_position": {
            name: analysis.best_gamma([stands for stands, _ in rates], c, verify_cost)
            for name, rates in accepted.survival.items()
        },
    }
    return {"table": table, "best_gamma": best}


_HOW = {
    "scored": "target's own outputs, scored with both models",
    "counted": "by decoding and counting, since no model's law or the target's own outputs can be scored",
}


def summary(record: Mapping[str, Any]) -> str:
    """A record as text for reading."""
    accepted, host, steps = record["acceptance"], record["machine"], record["steps"]
    alone = record["cost_ratio_alone"]
    lines = [
        f"{record['target']['name']} with {record['drafter']['name']}, {record['sentences']} inputs, "
        f"batch {record['options']['batch_size']}, temperature {record['options']['temperature']:g}; "
        f"{records.hardware(host)}",
        "",
        f"alpha    {with_error(accepted['alpha'], accepted['standard_error'])} over {accepted['positions']} tokens "
        f"({_HOW[accepted['how']]})",
        *([f"         {same_positions(record['same_positions'])}"] if record["same_positions"] else []),
        f"c        {record['cost_ratio']:.3f} between target calls"
        + (f", {alone:.3f} alone" if alone is not None else ", what drafting adds to an iteration"),
        f"target   {1e3 * steps['target step']['median']:.3f} ms a step",
        "v        " + ", ".join(f"v({width}) = {value:.3f}" for width, value in record["verify_cost"].items()),
        "",
        *table_lines(record),
    ]
    best = record["best_gamma"]
    named = {"v = 1": best["theorem_3_8"], "v measured": best["with_verify_cost"]} | {
        f"by position, {name}": gamma for name, gamma in best["by_position"].items()
    }
    shown = "; ".join(f"{gamma or 'plain decoding'} ({name})" for name, gamma in named.items() if gamma is not None)
    return "\n".join([*lines, "", f"best gamma: {shown}"])


def same_positions(found: Mapping[str, Any]) -> str:
    """A `Comparison` in words."""
    difference, error = found["difference"], found["standard_error"]
    spread = f" ± {error:.4f}, {abs(difference) / error:.1f} standard errors" if error else ""
    return (
        f"token verification accepted {found['counted']:.4f} of {found['positions']} tokens, whose mean of Σ min(p, q) is "
        f"{found['overlap']:.4f}: difference {difference:+.4f}{spread}"
    )


def table_lines(record: Mapping[str, Any]) -> list[str]:
    """Expected improvement by γ: from α with v = 1 (the paper's) and with the measured v, and by position."""
    verifiers = list(record["acceptance"]["by_position"])
    head = [
        "gamma",
        "tokens",
        "v = 1",
        "v",
        "with v",
        *(f"{name}{part}" for name in verifiers for part in ("", " gain")),
    ]
    lines = ["".join(f"{name:>12}" for name in head)]
    for row in record["table"]:
        values = [row["tokens"], row["theorem_3_8"], row["verify_cost"], row["with_verify_cost"]]
        for name in verifiers:
            values += [row["by_position"][name]["tokens"], row["by_position"][name]["with_verify_cost"]]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        cells[2] += " " if row["timed"] else "~"
        lines.append("".join(f"{cell:>12}" for cell in [row["gamma"], *cells]))
    return [
        "tokens per target call and improvement expected from alpha with v = 1 and with v (~: interpolated); and from how "
        "often the first i drafted tokens stand:",
        *lines,
    ]


def with_error(value: float | None, error: float | None) -> str:
    """`0.780 ± 0.004`, as far as it is known."""
    if value is None:
        return "unknown, since nothing was drafted,"
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")
