"""Writes records as text for a terminal: whether drafting pays, then what was measured."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec_jax.analysis.machine import hardware
from specdec_jax.analysis.predictions import TREE_PREDICTIONS
from specdec_jax.analysis.top_k_hit_rate import KINDS, depth_curves
from specdec_jax.analysis.tuning import Choice, read_choice
from specdec_jax.analysis.verdicts import advise, describe_best, describe_tokens

# Texts of single numbers.


def _spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['least']:.3f} to {spread['most']:.3f})"


def _times_as_fast(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} times as fast ({spread['least']:.2f} to {spread['most']:.2f})"


def _seconds(spread: Mapping[str, float]) -> str:
    scale, unit = (1, "s") if spread["median"] >= 1 else (1e3, "ms")
    median, least, most = (scale * spread[name] for name in ("median", "least", "most"))
    return f"{median:.3f} {unit} ({least:.3f} to {most:.3f})"


def _alpha_with_error(accepted: Mapping[str, Any]) -> str:
    """Returns `0.780 ± 0.004`, as far as it is known."""
    alpha, error = accepted["alpha"], accepted["standard_error"]
    if alpha is None:
        return "unknown, since nothing was drafted,"
    return f"{alpha:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _times_line(variant: Mapping[str, Any], name: str) -> str:
    return (
        f"{name:<14} {_seconds(variant['seconds'])}, {variant['tokens']} tokens, "
        f"{1e3 * variant['seconds_per_token']:.2f} ms each; "
        f"compilation {variant['compile_seconds']:.1f} s"
    )


def _inputs_line(record: Mapping[str, Any]) -> str:
    options = record["options"]
    return (
        f"{record['sentences']} inputs, batch {options['batch_size']}, {options['repeats']} "
        f"passes; {hardware(record['machine'])}"
    )


# `specdec measure`.

_HOW = {
    "scored": "target's own outputs, scored with both models",
    "counted": (
        "by decoding and counting, since no model's distribution or the target's own outputs can "
        "be scored"
    ),
}


def measure_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec measure` as text."""
    accepted, steps, alone = record["acceptance"], record["steps"], record["cost_ratio_alone"]
    same = record["same_positions"]
    costs = ", ".join(f"v({width}) = {value:.3f}" for width, value in record["verify_cost"].items())
    how = f", {alone:.3f} alone" if alone is not None else ", what drafting adds to an iteration"
    lines = [
        describe_promise(record),
        "",
        _head_line(record),
        "",
        f"alpha    {_alpha_with_error(accepted)} over {accepted['positions']} positions of the "
        f"output ({_HOW[accepted['how']]})",
        *_where_drafted_lines(accepted),
        *([f"         {describe_same_positions(same)}"] if same else []),
        *_hit_rate_lines(accepted["hit_rate"]),
        *depth_lines(accepted),
        f"c        {record['cost_ratio']:.3f} between target calls{how}",
        f"target   {1e3 * steps['target step']['median']:.3f} ms a step",
        f"v        {costs}",
        "",
        *_table_lines(record),
    ]
    best = record["best_gamma"]
    named = {"v = 1": best["theorem_3_8"], "v measured": best["with_verify_cost"]}
    named |= {f"by position, {name}": gamma for name, gamma in best["by_position"].items()}
    named |= {f"whole decodes, {name}": gamma for name, gamma in best["with_lengths"].items()}
    known = [(name, gamma) for name, gamma in named.items() if gamma is not None]
    shown = "; ".join(f"{gamma or 'plain decoding'} ({name})" for name, gamma in known)
    return "\n".join([*lines, "", f"best gamma: {shown}"])


def describe_promise(record: Mapping[str, Any]) -> str:
    """Returns the improvement to expect of whole decodes, and what it leaves out."""
    gains = {
        (row["gamma"], name): expected["with_lengths"]
        for row in record["table"]
        for name, expected in row["by_position"].items()
    }
    (gamma, verifier), gain = max(gains.items(), key=lambda item: item[1])
    pays = f"{gain:.3g} times the speed of plain decoding"
    if gain <= 1:
        pays = f"drafting should not pay here: at best {pays}"
    else:
        # Less than 1.05 may be lost in what is left out.
        hardly = " hardly" if gain < 1.05 else ""
        pays = f"drafting should{hardly} pay here: {pays}, with gamma {gamma}, {verifier}"
    return (
        f"{pays} (encoders and output lengths are counted; the loop, the host and the tokenizer "
        "are not; `specdec benchmark` times whole decodes)"
    )


def _head_line(record: Mapping[str, Any]) -> str:
    return (
        f"{record['target']['name']} with {record['drafter']['name']}, "
        f"{record['sentences']} inputs, batch {record['options']['batch_size']}, "
        f"temperature {record['options']['temperature']:g}; {hardware(record['machine'])}"
    )


def _where_drafted_lines(accepted: Mapping[str, Any]) -> list[str]:
    """Returns a line with α where something was drafted, if that is another α."""
    alpha = accepted["alpha_where_drafted"]
    if alpha in (None, accepted["alpha"]):
        return []
    share = accepted["drafting"]
    return [f"         {alpha:.3f} where something was drafted, in {share:.0%} of the calls"]


def _hit_rate_lines(hit_rate: Mapping[str, Any]) -> list[str]:
    """Returns lines with the top-k hit rate of 1, 2 … children, by how they are chosen."""
    if not hit_rate:
        return []
    head = "top-k hit rate by 1, 2 … children of a node, the share of tokens that are among them:"
    rows = [
        (" ".join(f"{value['covered']:.3f}" for value in values), KINDS[kind])
        for kind, values in hit_rate.items()
    ]
    return [head, *(f"         {cells} ({name})" for cells, name in rows)]


def depth_lines(accepted: Mapping[str, Any]) -> list[str]:
    """Returns lines with the acceptance by depth of chains and of trees."""
    curves = depth_curves(accepted)
    if not curves:
        return []
    head = (
        "acceptance by depth 1, 2 …, the share of tokens that are accepted where those above them "
        "do:"
    )
    rows = [(" ".join(f"{mean:.3f}" for mean, _ in rates), name) for name, rates in curves.items()]
    return [head, *(f"         {cells} ({name})" for cells, name in rows)]


def describe_same_positions(found: Mapping[str, Any]) -> str:
    """Returns in words how α by counting compares with α by scoring, at the same positions."""
    difference, error = found["difference"], found["standard_error"]
    spread = f" ± {error:.4f}, {abs(difference) / error:.1f} standard errors" if error else ""
    return (
        f"token verification accepted {found['counted']:.4f} of {found['positions']} tokens, "
        f"whose mean of Σ min(p, q) is {found['overlap']:.4f}: difference {difference:+.4f}{spread}"
    )


def _table_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns lines with the expected improvement by γ: from α, with v, and by position."""
    verifiers = list(record["acceptance"]["by_position"])
    by_verifier = [f"{name}{part}" for name in verifiers for part in ("", " gain", " whole")]
    rows = [["gamma", "tokens", "v = 1", "v", "with v", *by_verifier]]
    for row in record["table"]:
        values = [row["tokens"], row["theorem_3_8"], row["verify_cost"], row["with_verify_cost"]]
        for name in verifiers:
            expected = row["by_position"][name]
            values += [expected[key] for key in ("tokens", "with_verify_cost", "with_lengths")]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        cells[2] += " " if row["timed"] else "~"
        rows.append([row["gamma"], *cells])
    return [
        "tokens per target call and improvement expected from alpha with v = 1 and with v "
        "(~: interpolated); and from how often the first i drafted tokens are accepted, also of "
        "whole decodes, with encoders and lengths:",
        *("".join(f"{cell:>12}" for cell in row) for row in rows),
    ]


# `specdec benchmark`.

_PREDICTIONS = {"with_lengths": "encoders and lengths", "with_counts": "calls as counted"}


def benchmark_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec benchmark` as text."""
    if "searches" in record:
        return _summarize_beam_benchmark(record)
    steps, target, drafter = record["steps"], record["target"], record["drafter"]
    pair = f"{target['name']} ({target['parameters']:,} parameters, {target['parameter_dtype']})"
    if drafter:
        pair += f" with {drafter['name']}"
        pair += f" ({drafter['parameters']:,})" if "parameters" in drafter else ""
    names = [name for name in steps if name.startswith("products")]
    products = ", ".join(f"bare {name} {_seconds(steps[name])}" for name in names)
    lines = [
        *_benchmark_verdict_lines(record),
        "",
        pair,
        f"{_inputs_line(record)}, jax {record['machine']['jax']}",
        "",
        _times_line(record["plain"], "plain"),
        f"target step    {_seconds(steps['target step'])}; {products}",
        f"  step over products (the faster) {record['step_over_products']:.3f}, "
        f"plain decoding over products {record['plain_over_products']:.3f} (encoder apart)",
        *_draft_step_lines(record),
    ]
    for gamma, v in record["verify_cost"].items():
        bare = record["bare"]["verify_cost"][gamma]
        lines.append(f"v({int(gamma) + 1}) = {v:.3f} ({bare:.3f} of bare products)")
    for gamma, added in record.get("sampling_cost", {}).items():
        shares = ", ".join(f"{name} {share['median']:.1%}" for name, share in added.items())
        lines.append(f"added to a target call over {int(gamma) + 1} positions by: {shares}")
    for variant in record["speculative"]:
        lines += ["", *_variant_lines(variant)]
    for variant in record.get("trees", ()):
        lines += ["", *_tree_lines(variant)]
    if record.get("trees"):
        beside = record["tree_over_chain"]
        gain = beside["improvement"]
        lines += [
            "",
            f"fastest tree over fastest chain (tree {beside['tree']}, gamma {beside['gamma']}): "
            f"{gain['median']:.3f} times as fast ({gain['least']:.3f} to {gain['most']:.3f})",
        ]
    if record.get("against"):
        lines += ["", *against_lines(record["against"])]
    return "\n".join(lines)


def _benchmark_verdict_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns whether drafting pays, what to try instead, and how outputs differ."""
    options, chains = record["options"], record["speculative"]
    variants = {_name_variant(variant): variant for variant in chains}
    if not record["verdicts"]:
        alone = (
            "plain decoding alone was timed"
            if record["drafter"] is None
            else "--synthetic_alpha times whole decodes"
        )
        steps = "of random weights only steps are timed; " if options["preset"] else ""
        return [f"no verdict: {steps}{alone}"]
    lines = []
    costs = {int(gamma) + 1: v for gamma, v in record["verify_cost"].items()}
    for verdict in record["verdicts"]:
        variant = variants.get(verdict["best"], chains[0])
        if not variant["stats"]["drafted"] and verdict["best"] in variants:
            drafter = record["drafter"]["name"]
            lines.append(f"no verdict: {drafter} drafted nothing; try a model as the drafter")
            continue
        c = variant["predicted"]["cost_ratio"] if variant["predicted"] else record["cost_ratio"]
        timed = {other["gamma"] for other in variants.values()}
        alpha, batch = variant["stats"]["acceptance_rate_per_position"], options["batch_size"]
        advice = advise(alpha, c, costs, timed, batch)
        lines += describe_best(verdict, options["repeats"], advice)
    every = [*chains, *record.get("trees", ())]
    counts = [len(variant["differences"]) if variant["compared"] else None for variant in every]
    tokens = describe_tokens(counts, record["sentences"], options, _all_near_ties(every))
    return [*lines, tokens]


def _all_near_ties(variants: Sequence[Mapping[str, Any]]) -> bool:
    return all(item["near_tie"] for variant in variants for item in variant["differences"])


def _name_variant(variant: Mapping[str, Any]) -> str:
    alpha = variant["synthetic_alpha"]
    return f"gamma {variant['gamma']}" + ("" if alpha is None else f", alpha {alpha:g}")


def _draft_step_lines(record: Mapping[str, Any]) -> Iterator[str]:
    steps = record["steps"]
    if "draft step" in steps:
        bare = record["bare"]["cost_ratio"]
        of_products = "" if bare is None else f" ({bare:.3f} of bare products)"
        alone, c = _seconds(steps["draft step"]), record["cost_ratio"]
        yield f"draft step     {alone} alone; c = {c:.3f}{of_products}"
        if "draft pair" in steps:
            pair = steps["draft pair"]["median"] / steps["draft step"]["median"]
            yield (
                f"  {pair:.2f} times that over two positions, the first call after a full "
                "acceptance"
            )
        yield from reduction_lines(steps)
    elif any(variant["stats"]["draft_calls"] for variant in record["speculative"]):
        yield "draft step     not timed alone (`specdec measure` times whole iterations)"
    elif record["drafter"]:
        yield "draft step     none, since no model drafts; c is counted as 0"


def reduction_lines(steps: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns lines on how much of a draft step's time is left with a shortlist, int8, or both."""
    prefix, whole = "draft step, ", steps["draft step"]["median"]
    return [
        f"  {name.removeprefix(prefix)} {_seconds(spread)}, of which it takes "
        f"{whole / spread['median']:.3f}"
        for name, spread in steps.items()
        if name.startswith(prefix)
    ]


def against_lines(against: Mapping[str, Any]) -> list[str]:
    """Returns lines on another implementation's times beside ours."""
    lines = [_times_line(against, against["name"])]
    lines += [f"  {ours}: {_times_as_fast(gain)}" for ours, gain in against["improvement"].items()]
    if rounding := against.get("rounding"):
        contributes = _times_as_fast(rounding).replace("times as fast", "times")
        lines.append(
            f"  of this int8 contributes {contributes}: plain decoding over the same in "
            f"{against['name']}'s numbers; it changes the tokens of "
            f"{against['rounded_differences']} inputs"
        )
    return [*lines, f"  {len(against['differences'])} inputs with other tokens than plain decoding"]


def _variant_lines(variant: Mapping[str, Any]) -> Iterator[str]:
    forced, stats, predicted = variant["synthetic_alpha"], variant["stats"], variant["predicted"]
    forced = "" if forced is None else f", acceptance forced to {forced:g}: outputs mean nothing"
    yield (
        f"gamma {variant['gamma']}{forced}        {_seconds(variant['seconds'])}, "
        f"{variant['tokens']} tokens; compilation {variant['compile_seconds']:.1f} s"
    )
    yield f"  improvement  {_spread(variant['improvement'])}"
    calls = f"{stats['tokens_per_target_call'] or 0:.2f} tokens per target call"
    if stats["acceptance_rate"] is None:
        yield f"  {calls}; {_without_alpha(stats)}; no prediction"
    elif predicted is None:
        drafted = f"{variant['mean_gamma']:.2f} drafted for each"
        yield f"  {_alpha_text(stats)}, {calls}, {drafted}; no prediction"
    else:
        c = f"c = {predicted['cost_ratio']:.3f} between target calls"
        yield f"  {_alpha_text(stats)}, {calls}; {c}"
        yield (
            f"  predicted    {predicted['theorem_3_8']:.3f} (v = 1), "
            f"{predicted['with_verify_cost']:.3f} (v measured), "
            f"{predicted['with_lengths']:.3f} (encoders and lengths too), "
            f"{predicted['with_counts']:.3f} (calls as counted)"
        )
        yield (
            f"  measured over predicted ({_PREDICTIONS[variant['prediction']]}) "
            f"{variant['measured_over_predicted']:.3f}"
        )
        yield _shares_line(variant)
    if stats["acceptance_rate"] is not None:
        yield _depth_line(stats)
    if variant["oracle"]:
        bounds = variant["oracle"].values()
        tokens, gain = ("no bound" if value is None else f"{value:.3f}" for value in bounds)
        yield f"  an oracle of gamma: tokens per target call {tokens}, improvement {gain} (v = 1)"
    yield from _difference_lines(variant["differences"])


def _alpha_text(stats: Mapping[str, Any]) -> str:
    """Returns `alpha 0.812`, both rates where a drafter drafts now and then."""
    alpha, everywhere = stats["acceptance_rate"], stats["acceptance_rate_per_position"]
    if alpha is None or not stats["undrafted"]:
        return "alpha unknown" if alpha is None else f"alpha {alpha:.3f}"
    return (
        f"alpha {everywhere:.3f} per position of the output, "
        f"{alpha:.3f} where something was drafted"
    )


def _shares_line(variant: Mapping[str, Any]) -> str:
    """Returns where the time went, as far as the parts add up to it."""
    if variant["shares"] is None:
        over = sum(variant["parts"].values()) / variant["seconds"]["median"]
        return (
            f"  time in parts: unknown, since single steps come to {over:.0%} of the time: the "
            "machine's speed was another while they were timed"
        )
    shown = ", ".join(f"{name} {share:.0%}" for name, share in variant["shares"].items())
    return f"  time in {shown}; most of it: {variant['limiting_term']}"


def _tree_lines(variant: Mapping[str, Any]) -> list[str]:
    stats = variant["stats"]
    return [
        f"tree {variant['tree']} ({variant['nodes']} positions, depth {variant['depth']}, "
        f"{variant['children']} children, {variant['verifier']})        "
        f"{_seconds(variant['seconds'])}, {variant['tokens']} tokens; "
        f"compilation {variant['compile_seconds']:.1f} s",
        f"  improvement  {_spread(variant['improvement'])}",
        f"  {stats['tokens_per_target_call']:.2f} tokens per target call, "
        f"{stats['target_calls']} calls; v of its nodes {variant['verify_cost']:.3f}",
        f"  {_describe_tree_prediction(variant)}",
        _depth_line(stats),
        *_difference_lines(variant["differences"]),
    ]


def _describe_tree_prediction(variant: Mapping[str, Any]) -> str:
    """Returns in words how many tokens per target call a tree was expected to commit."""
    why, predicted = TREE_PREDICTIONS[variant["prediction"]], variant["predicted"]
    if predicted is None:
        return f"no prediction: {why}"
    measured = variant["stats"]["tokens_per_target_call"]
    return (
        f"predicted    {predicted:.2f} tokens per target call ({why}; as if every node was "
        "accepted independently of the others and no output ended); measured over predicted "
        f"{measured / predicted:.3f}"
    )


def _difference_lines(differences: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"  differs from plain: {_describe_difference(item)}, noise {item['noise']:.2e})"
        for item in differences
    ]


def _describe_difference(item: Mapping[str, Any]) -> str:
    kind = "near-tie" if item["near_tie"] else "not a near-tie"
    place = f"sentence {item['input'] + 1}, token {item['position']}"
    return f"{place}, {kind} (margin {item['margin']:.2e}"


def _depth_line(stats: Mapping[str, Any]) -> str:
    return (
        f"  a drafted token is accepted, by depth: {_accepted_text(stats)} of the calls; where "
        f"those above it are accepted: {_accepted_text(stats, stats['examined_by_position'])}"
    )


def _accepted_text(stats: Mapping[str, Any], examined: Sequence[int] | None = None) -> str:
    """Returns the share of the calls that accept each position, or of `examined` tokens."""
    counts = stats["accepted_by_position"]
    wholes = examined or [stats["target_calls"]] * len(counts)
    pairs = zip(counts, wholes, strict=True)
    return ", ".join(f"{count / whole:.2f}" if whole else "-" for count, whole in pairs)


def _without_alpha(stats: Mapping[str, Any]) -> str:
    """Returns what is known of acceptance if there is no rate."""
    if not stats["drafted"]:
        return "nothing was drafted"
    return (
        f"{stats['accepted_per_target_call']:.2f} drafted tokens are accepted per call, by "
        f"position {_accepted_text(stats)} (block verification verifies a draft as a whole: no "
        "alpha)"
    )


def _summarize_beam_benchmark(record: Mapping[str, Any]) -> str:
    inputs, plain = record["sentences"], record["plain"]
    variants = [("plain", plain), ("greedy", record["greedy"])]
    variants += [(str(read_choice(variant)), variant) for variant in record["searches"]]
    if against := record.get("against"):
        gain = against["improvement"]["plain"]
        inverse = {"median": gain["median"], "least": gain["most"], "most": gain["least"]}
        inverse = {name: 1 / value for name, value in inverse.items()}
        variants.append((against["name"], against | {"improvement": inverse}))
    lines = [
        *_beam_head_lines(record),
        f"{'':<20}{'ms an input':>12}{'over plain beams':>26}{'steps a call':>14}{'calls':>8}"
        f"{'equal':>12}",
    ]
    for name, variant in variants:
        gain = _spread(variant["improvement"]) if "improvement" in variant else ""
        milliseconds = 1e3 * variant["seconds"]["median"] / max(inputs, 1)
        line = f"{name:<20}{milliseconds:>12.2f}{gain:>26}"
        if "width" in variant:
            steps = variant["stats"]["steps_per_target_call"]
            line += f"{steps:>14.2f}{variant['calls_over_plain']:>8.2f}"
        if "differences" in variant:
            line = f"{line:<80}{inputs - len(variant['differences']):>6} of {inputs}"
        lines.append(line.rstrip())
    seconds = sum(variant["compile_seconds"] for _, variant in variants)
    lines += [
        "",
        f"plain beam search makes {plain['stats']['target_calls']} calls of the target; "
        f"compilation of all variants {seconds:.1f} s",
    ]
    lines += [
        f"  {name} differs from plain: {_describe_difference(item)}), scores "
        f"{item['scores'][0]:.6f} and {item['scores'][1]:.6f}"
        for name, variant in variants
        for item in variant.get("differences", ())
    ]
    return "\n".join(lines)


def _beam_head_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns the verdict on beam search, if there is one, models and options."""
    options, drafter, lines = record["options"], record["drafter"], []
    if record["verdict"] is not None:
        searches, near_ties = record.get("searches"), None
        differing = [item["differing"] for item in record.get("choices", ())]
        if searches is not None:
            differing = [len(variant["differences"]) for variant in searches]
            near_ties = _all_near_ties(searches)
        advice = "a drafter that costs less, or fewer levels (--gamma)"
        lines = describe_best(record["verdict"], options["repeats"], advice, "plain beam search")
        tokens = describe_tokens(differing, record["sentences"], options, near_ties)
        lines = [*lines, tokens, ""]
    pair = record["target"]["name"] + (f" with {drafter['name']}" if drafter else "")
    return [
        *lines,
        f"{pair}, {options['num_beams']} beams in the form of {options['beam_style']}, "
        f"length penalty {record['length_penalty']:g}",
        _inputs_line(record),
        "",
    ]


# `specdec tune`.


def tune_summary(record: Mapping[str, Any]) -> str:
    """Returns a record of `specdec tune` as text."""
    if "acceptance" not in record:
        return _summarize_beam_tuning(record)
    accepted, options, choices = record["acceptance"], record["options"], record["choices"]
    lines = [
        *_tuning_verdict_lines(record),
        "",
        _head_line(record),
        f"alpha {_alpha_with_error(accepted)} per position of the output ({accepted['how']})",
        *_where_drafted_lines(accepted),
        "",
        f"{'':<20}{'expected':>12}{'measured':>12}   (improvement over plain decoding)",
    ]
    for item in choices:
        gain = _wide_spread(item["improvement"]) if item["improvement"] else ""
        lines.append(f"{read_choice(item)!s:<20}{item['expected_improvement']:>12.3f}{gain}")
    lines += ["", *(f"{read_choice(item)}: {item['tree']}" for item in choices if item["tree"])]
    chosen, gain = Choice(**record["chosen"]), record["improvement"]
    lines.append(
        f"chosen: {chosen}: {gain['median']:.3f} times plain decoding "
        f"({gain['least']:.3f} to {gain['most']:.3f})"
        if chosen.gamma
        else f"chosen: plain decoding, which is faster than drafting with {options['drafter']}"
    )
    if swept := record["sweep"]:
        lines += [
            "",
            f"sweep over {swept['sentences']} other inputs, improvement over plain decoding:",
            *(f"{name:<20}{_wide_spread(gain)}" for name, gain in swept["improvement"].items()),
            f"best: {Choice(**swept['best'])}; time of the chosen over the best "
            f"{_spread(swept['chosen_over_best'])}",
        ]
    return "\n".join([*lines, "", f"written to {options['config']}"])


def _wide_spread(spread: Mapping[str, float]) -> str:
    median, _, rest = _spread(spread).partition(" ")
    return f"{median:>12}   {rest}"


def _tuning_verdict_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns whether the choice pays, what to try instead, and how outputs differ."""
    options, steps = record["options"], record["steps"]
    c = record["draft_seconds"] / steps["iteration, plain"]["median"]
    timed = [item for item in record["choices"] if item["improvement"] and item["gamma"]]
    advice = advise(record["acceptance"]["alpha"], c or None, {}, (), options["batch_size"])
    differing = [item["differing"] for item in timed]
    best = describe_best(record["verdict"], options["repeats"], advice)
    return [*best, describe_tokens(differing, record["sentences"], options)]


def _summarize_beam_tuning(record: Mapping[str, Any]) -> str:
    choices, gain, options = record["choices"], record["improvement"], record["options"]
    passes = choices[0]["seconds_per_token"]
    shift = (passes["most"] - passes["least"]) / passes["median"]
    chosen = read_choice(record["chosen"])
    lines = [
        *_beam_head_lines(record),
        f"{'':<20}{'over plain beams':>26}",
        *(f"{read_choice(item)!s:<20}{_spread(item['improvement']):>26}" for item in choices),
        "",
        f"noise: plain beam search's own passes lie up to {shift:.1%} apart "
        f"({options['repeats']} passes)",
        f"chosen: {chosen}: {_spread(gain)} times plain beam search"
        if chosen.gamma
        else f"chosen: plain beam search, which is faster than drafting with {options['drafter']}",
    ]
    if chosen.gamma and gain["least"] <= 1:
        lines.append("  within the noise: in some pass plain beam search was as fast")
    if swept := record["sweep"]:
        lines += [
            "",
            f"sweep over {swept['sentences']} other inputs, improvement over plain beam search:",
            *(f"{name:<20}{_spread(gain):>26}" for name, gain in swept["improvement"].items()),
            f"best: {read_choice(swept['best'])}; time of the chosen over the best "
            f"{_spread(swept['chosen_over_best'])}",
        ]
    return "\n".join([*lines, "", f"written to {options['config']}"])
