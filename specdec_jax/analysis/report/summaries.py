"""Writes records as text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.analysis import machine
from specdec_jax.analysis.machine import hardware
from specdec_jax.analysis.predictions import TREE_PREDICTIONS
from specdec_jax.analysis.report import verdicts
from specdec_jax.analysis.top_k_hit_rate import KINDS, depth_curves
from specdec_jax.analysis.tuning import Choice, read_choice

_HOW = {
    "scored": "target's own outputs, scored with both models",
    "counted": "by decoding and counting, since no model's distribution or the target's own outputs can be scored",
}


def measure_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec measure` as text."""
    accepted, host, steps = record["acceptance"], record["machine"], record["steps"]
    alone = record["cost_ratio_alone"]
    lines = [
        verdicts.promise(record),
        "",
        f"{record['target']['name']} with {record['drafter']['name']}, {record['sentences']} inputs, "
        f"batch {record['options']['batch_size']}, temperature {record['options']['temperature']:g}; "
        f"{machine.hardware(host)}",
        "",
        f"alpha    {with_error(accepted['alpha'], accepted['standard_error'])} over {accepted['positions']} positions "
        f"of the output ({_HOW[accepted['how']]})",
        *where_drafted(accepted),
        *(
            [f"         {same_positions(record['same_positions'])}"]
            if record["same_positions"]
            else []
        ),
        *hit_rate_lines(accepted["hit_rate"]),
        *depth_lines(accepted),
        f"c        {record['cost_ratio']:.3f} between target calls"
        + (f", {alone:.3f} alone" if alone is not None else ", what drafting adds to an iteration"),
        f"target   {1e3 * steps['target step']['median']:.3f} ms a step",
        "v        "
        + ", ".join(f"v({width}) = {value:.3f}" for width, value in record["verify_cost"].items()),
        "",
        *table_lines(record),
    ]
    best = record["best_gamma"]
    named = {"v = 1": best["theorem_3_8"], "v measured": best["with_verify_cost"]}
    named |= {f"by position, {name}": gamma for name, gamma in best["by_position"].items()}
    named |= {f"whole decodes, {name}": gamma for name, gamma in best["with_lengths"].items()}
    shown = "; ".join(
        f"{gamma or 'plain decoding'} ({name})"
        for name, gamma in named.items()
        if gamma is not None
    )
    return "\n".join([*lines, "", f"best gamma: {shown}"])


def where_drafted(accepted: Mapping[str, Any]) -> list[str]:
    """Returns a line with α where something was drafted, for a drafter that drafts now and then."""
    if accepted["alpha_where_drafted"] in (None, accepted["alpha"]):
        return []
    return [
        f"         {accepted['alpha_where_drafted']:.3f} where something was drafted, in {accepted['drafting']:.0%} of "
        "the calls"
    ]


def hit_rate_lines(hit_rate: Mapping[str, Any]) -> list[str]:
    """Returns lines with the top-k hit rate of 1, 2 … children, by how they are chosen."""
    if not hit_rate:
        return []

    def cells(values):
        return " ".join(f"{value['covered']:.3f}" for value in values)

    return [
        "top-k hit rate by 1, 2 … children of a node, the share of tokens that are among them:",
        *(f"         {cells(values)} ({KINDS[kind]})" for kind, values in hit_rate.items()),
    ]


def depth_lines(accepted: Mapping[str, Any]) -> list[str]:
    """Returns lines with the acceptance by depth of chains and of trees."""
    found = depth_curves(accepted)
    if not found:
        return []
    return [
        "acceptance by depth 1, 2 …, the share of tokens that are accepted where those above them do:",
        *(
            f"         {' '.join(f'{mean:.3f}' for mean, _ in values)} ({name})"
            for name, values in found.items()
        ),
    ]


def same_positions(found: Mapping[str, Any]) -> str:
    """Returns a `Comparison` in words."""
    difference, error = found["difference"], found["standard_error"]
    spread = f" ± {error:.4f}, {abs(difference) / error:.1f} standard errors" if error else ""
    return (
        f"token verification accepted {found['counted']:.4f} of {found['positions']} tokens, whose mean of Σ min(p, "
        f"q) is {found['overlap']:.4f}: difference {difference:+.4f}{spread}"
    )


def table_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns lines with the expected improvement by γ: from α with v = 1 (the paper's) and with
    the measured v, and by position."""
    verifiers = list(record["acceptance"]["by_position"])
    head = [
        "gamma",
        "tokens",
        "v = 1",
        "v",
        "with v",
        *(f"{name}{part}" for name in verifiers for part in ("", " gain", " whole")),
    ]
    lines = ["".join(f"{name:>12}" for name in head)]
    for row in record["table"]:
        values = [row["tokens"], row["theorem_3_8"], row["verify_cost"], row["with_verify_cost"]]
        for name in verifiers:
            values += [
                row["by_position"][name][part]
                for part in ("tokens", "with_verify_cost", "with_lengths")
            ]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        cells[2] += " " if row["timed"] else "~"
        lines.append("".join(f"{cell:>12}" for cell in [row["gamma"], *cells]))
    return [
        "tokens per target call and improvement expected from alpha with v = 1 and with v (~: interpolated); and "
        "from how often the first i drafted tokens are accepted, also of whole decodes, with encoders and lengths:",
        *lines,
    ]


def with_error(value: float | None, error: float | None) -> str:
    """Returns `0.780 ± 0.004`, as far as it is known."""
    if value is None:
        return "unknown, since nothing was drafted,"
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")


_PREDICTIONS = {"with_lengths": "encoders and lengths", "with_counts": "calls as counted"}


def benchmark_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec benchmark` as text."""
    host, plain, steps = record["machine"], record["plain"], record["steps"]
    lines = [
        *verdicts.benchmark_verdict(record),
        "",
        f"{record['target']['name']} ({record['target']['parameters']:,} parameters, "
        f"{record['target']['parameter_dtype']})"
        + (f" with {_drafter(record['drafter'])}" if record["drafter"] else ""),
        f"{record['sentences']} inputs, batch {record['options']['batch_size']}, {record['options']['repeats']} "
        f"passes; {hardware(host)}, jax {host['jax']}",
        "",
        f"plain          {_seconds(plain['seconds'])}, {plain['tokens']} tokens, "
        f"{1e3 * plain['seconds_per_token']:.2f} ms each; compilation {plain['compile_seconds']:.1f} s",
        f"target step    {_seconds(steps['target step'])}; "
        + ", ".join(
            f"bare {name} {_seconds(steps[name])}" for name in steps if name.startswith("products")
        ),
        f"  step over products (the faster) {record['step_over_products']:.3f}, "
        f"plain decoding over products {record['plain_over_products']:.3f} (encoder apart)",
    ]
    if "draft step" in steps:
        bare = record["bare"]["cost_ratio"]
        of_products = "" if bare is None else f" ({bare:.3f} of bare products)"
        lines.append(
            f"draft step     {_seconds(steps['draft step'])} alone; c = {record['cost_ratio']:.3f}{of_products}"
        )
        if "draft pair" in steps:
            pair = steps["draft pair"]["median"] / steps["draft step"]["median"]
            lines.append(
                f"  {pair:.2f} times that over two positions, the first call after a full acceptance"
            )
        lines += reductions(steps)
    elif any(variant["stats"]["draft_calls"] for variant in record["speculative"]):
        lines.append("draft step     not timed alone (`specdec measure` times whole iterations)")
    elif record["drafter"]:
        lines.append("draft step     none, since no model drafts; c is counted as 0")
    for gamma, v in record["verify_cost"].items():
        lines.append(
            f"v({int(gamma) + 1}) = {v:.3f} ({record['bare']['verify_cost'][gamma]:.3f} of bare products)"
        )
    for gamma, added in record.get("sampling_cost", {}).items():
        lines.append(
            f"added to a target call over {int(gamma) + 1} positions by: "
            + ", ".join(f"{name} {share['median']:.1%}" for name, share in added.items())
        )
    for variant in record["speculative"]:
        lines += ["", *_variant_lines(variant)]
    for variant in record.get("trees", ()):
        lines += ["", *_tree_lines(variant)]
    if record.get("trees"):
        beside, gain = record["tree_over_chain"], record["tree_over_chain"]["improvement"]
        lines += [
            "",
            f"fastest tree over fastest chain (tree {beside['tree']}, gamma {beside['gamma']}): {gain['median']:.3f} "
            f"times as fast ({gain['least']:.3f} to {gain['most']:.3f})",
        ]
    if record.get("against"):
        lines += ["", *_against_lines(record["against"])]
    return "\n".join(lines)


def _against_lines(against: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{against['name']:<14} {_seconds(against['seconds'])}, {against['tokens']} tokens, "
        f"{1e3 * against['seconds_per_token']:.2f} ms each; compilation {against['compile_seconds']:.1f} s"
    ]
    for ours, times in against["improvement"].items():
        lines.append(
            f"  {ours}: {times['median']:.2f} times as fast ({times['least']:.2f} to {times['most']:.2f})"
        )
    if rounding := against.get("rounding"):
        lines.append(
            f"  of this int8 contributes {rounding['median']:.2f} times ({rounding['least']:.2f} to "
            f"{rounding['most']:.2f}): plain decoding over the same in {against['name']}'s numbers; it changes the "
            f"tokens of {against['rounded_differences']} inputs"
        )
    return [*lines, f"  {len(against['differences'])} inputs with other tokens than plain decoding"]


def reductions(steps: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns lines on how much of a draft step's time is left with a shortlist, 8 bits, or both."""
    return [
        f"  {name.removeprefix('draft step, ')} {_seconds(spread)}, of which it takes "
        f"{steps['draft step']['median'] / spread['median']:.3f}"
        for name, spread in steps.items()
        if name.startswith("draft step, ")
    ]


def _drafter(record: Mapping[str, Any]) -> str:
    return (
        f"{record['name']} ({record['parameters']:,})" if "parameters" in record else record["name"]
    )


def _variant_lines(variant: Mapping[str, Any]) -> list[str]:
    gain, predicted = variant["improvement"], variant["predicted"]
    forced = (
        ""
        if variant["synthetic_alpha"] is None
        else f", acceptance forced to {variant['synthetic_alpha']:g}: outputs mean nothing"
    )
    lines = [
        f"gamma {variant['gamma']}{forced}        {_seconds(variant['seconds'])}, {variant['tokens']} tokens; "
        f"compilation {variant['compile_seconds']:.1f} s",
        f"  improvement  {gain['median']:.3f} ({gain['least']:.3f} to {gain['most']:.3f})",
    ]
    alpha, calls = variant["stats"]["acceptance_rate"], variant["stats"]["tokens_per_target_call"]
    rate = alpha_text(variant["stats"])
    if alpha is None:
        lines.append(
            f"  {calls or 0:.2f} tokens per target call; {_without_alpha(variant['stats'])}; no prediction"
        )
    elif predicted is None:
        drafted = f"{variant['mean_gamma']:.2f} drafted for each"
        lines.append(f"  {rate}, {calls:.2f} tokens per target call, {drafted}; no prediction")
    else:
        lines += [
            f"  {rate}, {calls:.2f} tokens per target call; c = {predicted['cost_ratio']:.3f} between target calls",
            f"  predicted    {predicted['theorem_3_8']:.3f} (v = 1), {predicted['with_verify_cost']:.3f} (v measured), "
            f"{predicted['with_lengths']:.3f} (encoders and lengths too), {predicted['with_counts']:.3f} (calls as "
            "counted)",
            f"  measured over predicted ({_PREDICTIONS[variant['prediction']]}) "
            f"{variant['measured_over_predicted']:.3f}",
            _shares_line(variant),
        ]
    if alpha is not None:
        lines.append(_depth_line(variant["stats"]))
    if variant["oracle"]:
        calls, factor = (
            "no bound" if value is None else f"{value:.3f}" for value in variant["oracle"].values()
        )
        lines.append(
            f"  an oracle of gamma: tokens per target call {calls}, improvement {factor} (v = 1)"
        )
    return lines + _difference_lines(variant["differences"])


def alpha_text(stats: Mapping[str, Any]) -> str:
    """Returns `alpha 0.812`, both rates where a drafter drafts now and then."""
    alpha, everywhere = stats["acceptance_rate"], stats["acceptance_rate_per_position"]
    if alpha is None or not stats["undrafted"]:
        return "alpha unknown" if alpha is None else f"alpha {alpha:.3f}"
    return f"alpha {everywhere:.3f} per position of the output, {alpha:.3f} where something was drafted"


def _shares_line(variant: Mapping[str, Any]) -> str:
    """Returns where the time went, as far as the parts add up to it."""
    if variant["shares"] is None:
        over = sum(variant["parts"].values()) / variant["seconds"]["median"]
        return (
            f"  time in parts: unknown, since single steps come to {over:.0%} of the time: the machine's speed was "
            "another while they were timed"
        )
    shown = ", ".join(f"{name} {share:.0%}" for name, share in variant["shares"].items())
    return f"  time in {shown}; most of it: {variant['limiting_term']}"


def _tree_lines(variant: Mapping[str, Any]) -> list[str]:
    gain, stats = variant["improvement"], variant["stats"]
    return [
        f"tree {variant['tree']} ({variant['nodes']} positions, depth {variant['depth']}, {variant['children']} "
        "children, "
        f"{variant['verifier']})        {_seconds(variant['seconds'])}, {variant['tokens']} tokens; compilation "
        f"{variant['compile_seconds']:.1f} s",
        f"  improvement  {gain['median']:.3f} ({gain['least']:.3f} to {gain['most']:.3f})",
        f"  {stats['tokens_per_target_call']:.2f} tokens per target call, {stats['target_calls']} calls; v of its "
        f"nodes {variant['verify_cost']:.3f}",
        f"  {tree_prediction(variant)}",
        _depth_line(stats),
        *_difference_lines(variant["differences"]),
    ]


def tree_prediction(variant: Mapping[str, Any]) -> str:
    """Returns in words how many tokens per target call a tree was expected to commit."""
    why = TREE_PREDICTIONS[variant["prediction"]]
    if variant["predicted"] is None:
        return f"no prediction: {why}"
    measured = variant["stats"]["tokens_per_target_call"]
    return (
        f"predicted    {variant['predicted']:.2f} tokens per target call ({why}; as if every node was accepted "
        "independently of "
        f"the others and no output ended); measured over predicted {measured / variant['predicted']:.3f}"
    )


def _difference_lines(differences: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"  differs from plain: sentence {item['input'] + 1}, token {item['position']}, "
        f"{'near-tie' if item['near_tie'] else 'not a near-tie'} "
        f"(margin {item['margin']:.2e}, noise {item['noise']:.2e})"
        for item in differences
    ]


def _depth_line(stats: Mapping[str, Any]) -> str:
    given = _accepted_text(stats, stats["examined_by_position"])
    return (
        f"  a drafted token is accepted, by depth: {_accepted_text(stats)} of the calls; "
        f"where those above it are accepted: {given}"
    )


def _accepted_text(stats: Mapping[str, Any], examined: Sequence[int] | None = None) -> str:
    """Returns in what share of the calls the draft is accepted up to each position, or of the
    tokens that were examined there."""
    counts = stats["accepted_by_position"]
    return ", ".join(
        f"{count / of:.2f}" if of else "-"
        for count, of in zip(counts, examined or [stats["target_calls"]] * len(counts), strict=True)
    )


def _without_alpha(stats: Mapping[str, Any]) -> str:
    """Returns what is known of acceptance if there is no rate."""
    if not stats["drafted"]:
        return "nothing was drafted"
    return (
        f"{stats['accepted_per_target_call']:.2f} drafted tokens are accepted per call, by position "
        f"{_accepted_text(stats)} "
        "(block verification verifies a draft as a whole: no alpha)"
    )


def _seconds(spread: Mapping[str, float]) -> str:
    scale, unit = (1, "s") if spread["median"] >= 1 else (1e3, "ms")
    return f"{scale * spread['median']:.3f} {unit} ({scale * spread['least']:.3f} to {scale * spread['most']:.3f})"


def tune_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec tune` as text."""
    accepted, host, options = record["acceptance"], record["machine"], record["options"]
    head = f"{'':<20}{'expected':>12}{'measured':>12}   (improvement over plain decoding)"
    lines = [
        *verdicts.tune_verdict(record),
        "",
        f"{record['target']['name']} with {record['drafter']['name']}, {record['sentences']} inputs, "
        f"batch {options['batch_size']}, temperature {options['temperature']:g}; {machine.hardware(host)}",
        f"alpha {with_error(accepted['alpha'], accepted['standard_error'])} per position of the output "
        f"({accepted['how']})",
        *where_drafted(accepted),
        "",
        head,
    ]
    for item in record["choices"]:
        name, gain = read_choice(item), item["improvement"]
        lines.append(
            f"{name!s:<20}{item['expected_improvement']:>12.3f}"
            + (
                f"{gain['median']:>12.3f}   ({gain['least']:.3f} to {gain['most']:.3f})"
                if gain
                else ""
            )
        )
    chosen, gain = Choice(**record["chosen"]), record["improvement"]
    lines += [
        "",
        *(f"{read_choice(item)}: {item['tree']}" for item in record["choices"] if item["tree"]),
    ]
    if chosen.gamma:
        lines.append(
            f"chosen: {chosen}: {gain['median']:.3f} times plain decoding ({gain['least']:.3f} to {gain['most']:.3f})"
        )
    else:
        lines.append(
            f"chosen: plain decoding, which is faster than drafting with {options['drafter']}"
        )
    if record["sweep"]:
        swept = record["sweep"]
        lines += [
            "",
            f"sweep over {swept['sentences']} other inputs, improvement over plain decoding:",
        ]
        lines += [
            f"{name:<20}{spread['median']:>12.3f}   ({spread['least']:.3f} to {spread['most']:.3f})"
            for name, spread in swept["improvement"].items()
        ]
        over = swept["chosen_over_best"]
        lines.append(
            f"best: {Choice(**swept['best'])}; time of the chosen over the best {over['median']:.3f} "
            f"({over['least']:.3f} to {over['most']:.3f})"
        )
    return "\n".join([*lines, "", f"written to {options['config']}"])
