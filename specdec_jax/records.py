"""From measurements to a record: predictions, where the time goes, the machine, a summary for reading."""

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from specdec_jax import analysis, costs
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.formats.leaves import parameter_count
from specdec_jax.measure import Spread
from specdec_jax.models import native
from specdec_jax.models.base import LanguageModel, decoder_only

PACKAGES = ("specdec_jax", "jax", "jaxlib", "flax", "numpy")


def machine() -> dict[str, Any]:
    """Versions and hardware; names nobody and no path."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": costs.processor(),
        "cores": costs.cores(),
        "device": f"{device.platform}: {device.device_kind}, {jax.device_count()}",
        **({"kernel": native.origin() or "none"} if device.platform == "cpu" else {}),
    }


def hardware(machine: Mapping[str, Any]) -> str:
    """What of `machine()` a summary says; older records say nothing of kernels."""
    kernel = f", kernel: {machine['kernel']}" if "kernel" in machine else ""
    return f"{machine['processor']}, {machine['cores']} cores, {machine['device']}{kernel}"


def model(model: LanguageModel) -> dict[str, Any]:
    """Name, number of parameters, their dtype and the network's shape."""
    leaves = jax.tree.leaves(model.network.params)
    return {
        "name": model.name,
        "parameters": parameter_count(model.config),  # of which the loop's layout may have copies, padded
        "parameter_dtype": ", ".join(sorted({str(leaf.dtype) for leaf in leaves})),
        "config": dataclasses.asdict(model.config),
    }


def drafter(drafter) -> dict[str, Any]:
    """As `model`; of a drafter without one its name."""
    return model(drafter.model) if isinstance(drafter, ModelDrafter) else {"name": drafter.name}


def head(target, drafting, batches, options) -> dict[str, Any]:
    """What every record begins with: machine, options, models, and how many inputs the batches have."""
    return {
        "machine": machine(),
        "options": dataclasses.asdict(options),
        "target": model(target),
        "drafter": None if drafting is None else drafter(drafting),
        "sentences": decoded(target, batches),
    }


def decoded(target: LanguageModel, batches) -> int:
    """How many inputs the batches have; an empty one counts where the target is decoder-only, which goes on from it."""
    rows = [row for batch in batches for row in zip(batch.inputs, batch.ids, strict=True)]
    return sum(len(ids) > 0 or (decoder_only(target) and given is not None) for given, ids in rows)


@dataclasses.dataclass(frozen=True)
class Work:
    """What one batch asked of the models.

    Attributes:
      padded: length that its inputs are padded to.
      calls: target calls.
      draft_calls: draft steps, a call over two positions being one; None without a drafter, whose encoder then does not run.
    """

    padded: int
    calls: float
    draft_calls: float | None = None


def cost(work: Sequence[Work], gamma: int, times: Mapping[str, Spread]) -> dict[str, float]:
    """Seconds that the measured single steps give for `work`, by part; nothing for the loop around them.

    Drafting counts for nothing where no draft step was measured: the drafter has no model.
    """
    target_call = times[f"verify {gamma}" if gamma else "target step"].median
    parts = {"target encoder": 0.0, "drafter encoder": 0.0, "draft steps": 0.0, "target calls": 0.0}
    for item in work:
        parts["target encoder"] += times[f"target encoder {item.padded}"].median
        parts["target calls"] += item.calls * target_call
        if item.draft_calls is not None and "draft step" in times:
            encoder = times.get(f"drafter encoder {item.padded}")  # early exit has none of its own
            parts["drafter encoder"] += encoder.median if encoder else 0.0
            parts["draft steps"] += item.draft_calls * draft_seconds(gamma, times)
    return parts


def draft_seconds(gamma: int, times: Mapping[str, Spread]) -> float:
    """Seconds of a draft step between target calls: what γ of them add to a call over γ + 1 positions, no less than alone."""
    added = times[f"draft {gamma} and verify"].median - times[f"verify {gamma}"].median
    return max(added / gamma, times["draft step"].median)


def cost_ratio(gamma: int, times: Mapping[str, Spread]) -> float:
    """c of draft steps between target calls; 0 where no model drafts."""
    return draft_seconds(gamma, times) / times["target step"].median if "draft step" in times else 0.0


def oracle(gamma: int, alpha: float, times: Mapping[str, Spread]) -> dict[str, float | None]:
    """What no policy of γ exceeds with this α (of the tokens that were examined) and c, target calls costing the same.

    None where there is no bound.
    """
    bounds = {
        "tokens_per_target_call": analysis.oracle_tokens(alpha),
        "improvement": analysis.oracle_improvement(alpha, cost_ratio(gamma, times)),
    }
    return {name: value if np.isfinite(value) else None for name, value in bounds.items()}


def expected_work(padded: Sequence[int], lengths: Sequence[np.ndarray], gamma: int, alpha: float) -> list[Work]:
    """Work by α and the output lengths alone: a batch runs until its last row is done.

    Args:
      padded: of each batch.
      lengths: of each batch, new tokens of its rows.
    """
    work = []
    for size, rows in zip(padded, lengths, strict=True):
        calls = max(analysis.expected_calls(alpha, gamma, int(length)) for length in rows)
        work.append(Work(size, calls, gamma * calls if gamma else None))
    return work


def predictions(
    gamma: int, alpha: float, times: Mapping[str, Spread], padded, lengths, counted: Sequence[Work]
) -> dict[str, float]:
    """Expected improvement, from the paper's formula to one that counts everything but the loop itself and the second
    position of a drafter's first call after a full acceptance.

    Returns:
      cost_ratio, verify_cost: the measured c, of draft steps between target calls, and v(γ + 1).
      theorem_3_8: E[tokens] / (γc + 1). with_verify_cost: E[tokens] / (γc + v).
      with_lengths: as that, with the encoders and the real output lengths.
      with_counts: as that, with the calls that were really made instead of those that α lets expect.
    """
    step = times["target step"].median
    c = cost_ratio(gamma, times)
    v = times[f"verify {gamma}"].median / step
    plain = sum(cost(expected_work(padded, lengths, 0, 0.0), 0, times).values())
    total = lambda work: sum(cost(work, gamma, times).values())
    return {
        "cost_ratio": c,
        "verify_cost": v,
        "theorem_3_8": analysis.improvement(alpha, gamma, c),
        "with_verify_cost": analysis.improvement(alpha, gamma, c, v),
        "with_lengths": plain / total(expected_work(padded, lengths, gamma, alpha)),
        "with_counts": plain / total(counted),
    }


def sampling_cost(gamma: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """What choosing tokens adds to a target call over γ + 1 positions, as a share of the call, by verifier.

    Args:
      gamma: γ.
      seconds: of each pass, by arm: "call γ, alone", "call γ, token" and so on; compared pass by pass.
    """
    start = f"call {gamma}, "
    alone = np.array(seconds[start + "alone"])
    added = {
        name.removeprefix(start): np.array(times) / alone - 1
        for name, times in seconds.items()
        if name.startswith(start)
    }
    return {name: Spread.of(share)._asdict() for name, share in added.items() if name != "alone"}


def shares(parts: Mapping[str, float], measured: float) -> dict[str, float]:
    """Each part's share of the measured seconds; "rest" is the loop, the host and what the single steps do not show."""
    return {**{name: part / measured for name, part in parts.items()}, "rest": 1 - sum(parts.values()) / measured}


_PREDICTIONS = {"with_lengths": "encoders and lengths", "with_counts": "calls as counted"}


def summary(record: Mapping[str, Any]) -> str:
    """A record as text for reading."""
    host, plain, steps = record["machine"], record["plain"], record["steps"]
    lines = [
        f"{record['target']['name']} ({record['target']['parameters']:,} parameters, {record['target']['parameter_dtype']})"
        + (f" with {_drafter(record['drafter'])}" if record["drafter"] else ""),
        f"{record['sentences']} inputs, batch {record['options']['batch_size']}, {record['options']['repeats']} passes; "
        f"{hardware(host)}, jax {host['jax']}",
        "",
        f"plain          {_seconds(plain['seconds'])}, {plain['tokens']} tokens, "
        f"{1e3 * plain['seconds_per_token']:.2f} ms each; compilation {plain['compile_seconds']:.1f} s",
        f"target step    {_seconds(steps['target step'])}; "
        + ", ".join(f"bare {name} {_seconds(steps[name])}" for name in steps if name.startswith("products")),
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
            lines.append(f"  {pair:.2f} times that over two positions, the first call after a full acceptance")
        lines += reductions(steps)
    elif any(arm["stats"]["draft_calls"] for arm in record["speculative"]):
        lines.append("draft step     not timed alone (`specdec measure` times whole iterations)")
    elif record["drafter"]:
        lines.append("draft step     none, since no model drafts; c is counted as 0")
    for gamma, v in record["verify_cost"].items():
        lines.append(f"v({int(gamma) + 1}) = {v:.3f} ({record['bare']['verify_cost'][gamma]:.3f} of bare products)")
    for gamma, added in record.get("sampling_cost", {}).items():
        lines.append(
            f"added to a target call over {int(gamma) + 1} positions by: "
            + ", ".join(f"{name} {share['median']:.1%}" for name, share in added.items())
        )
    for arm in record["speculative"]:
        lines += ["", *_arm_lines(arm)]
    if record.get("against"):
        lines += ["", *_against_lines(record["against"])]
    return "\n".join(lines)


def _against_lines(against: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{against['name']:<14} {_seconds(against['seconds'])}, {against['tokens']} tokens, "
        f"{1e3 * against['seconds_per_token']:.2f} ms each; compilation {against['compile_seconds']:.1f} s"
    ]
    for ours, times in against["improvement"].items():
        lines.append(f"  {ours}: {times['median']:.2f} times as fast ({times['least']:.2f} to {times['most']:.2f})")
    return [*lines, f"  {len(against['differences'])} inputs with other tokens than plain decoding"]


def reductions(steps: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What a cheaper draft step takes of those that lack the shortlist, the 8 bits, or both."""
    return [
        f"  {name.removeprefix('draft step, ')} {_seconds(spread)}, of which it takes "
        f"{steps['draft step']['median'] / spread['median']:.3f}"
        for name, spread in steps.items()
        if name.startswith("draft step, ")
    ]


def _drafter(record: Mapping[str, Any]) -> str:
    return f"{record['name']} ({record['parameters']:,})" if "parameters" in record else record["name"]


def _arm_lines(arm: Mapping[str, Any]) -> list[str]:
    gain, predicted = arm["improvement"], arm["predicted"]
    forced = (
        "" if arm["forced_alpha"] is None else f", acceptance forced to {arm['forced_alpha']:g}: outputs mean nothing"
    )
    lines = [
        f"gamma {arm['gamma']}{forced}        {_seconds(arm['seconds'])}, {arm['tokens']} tokens; "
        f"compilation {arm['compile_seconds']:.1f} s",
        f"  improvement  {gain['median']:.3f} ({gain['least']:.3f} to {gain['most']:.3f})",
    ]
    alpha, calls = arm["stats"]["acceptance_rate"], arm["stats"]["tokens_per_target_call"]
    if alpha is None:
        lines.append(f"  {calls or 0:.2f} tokens per target call; {_without_alpha(arm['stats'])}; no prediction")
    elif predicted is None:
        drafted = f"{arm['mean_gamma']:.2f} drafted for each"
        lines.append(f"  alpha {alpha:.3f}, {calls:.2f} tokens per target call, {drafted}; no prediction")
    else:
        lines += [
            f"  alpha {alpha:.3f}, {calls:.2f} tokens per target call; c = {predicted['cost_ratio']:.3f} between target calls",
            f"  predicted    {predicted['theorem_3_8']:.3f} (v = 1), {predicted['with_verify_cost']:.3f} (v measured), "
            f"{predicted['with_lengths']:.3f} (encoders and lengths too), {predicted['with_counts']:.3f} (calls as counted)",
            f"  measured over predicted ({_PREDICTIONS[arm['prediction']]}) {arm['measured_over_predicted']:.3f}; "
            f"most of the time: {arm['limiting_term']}",
            "  time in " + ", ".join(f"{name} {share:.0%}" for name, share in arm["shares"].items()),
        ]
    if arm["oracle"]:
        calls, factor = ("no bound" if value is None else f"{value:.3f}" for value in arm["oracle"].values())
        lines.append(f"  an oracle of gamma: tokens per target call {calls}, improvement {factor} (v = 1)")
    for item in arm["differences"]:
        kind = "near-tie" if item["near_tie"] else "not a near-tie"
        lines.append(
            f"  differs from plain: input {item['input']}, token {item['position']}, {kind} "
            f"(margin {item['margin']:.2e}, noise {item['noise']:.2e})"
        )
    return lines


def _without_alpha(stats: Mapping[str, Any]) -> str:
    """Says what is known of acceptance where there is no rate."""
    if not stats["drafted"]:
        return "nothing was drafted"
    standing = ", ".join(f"{count / stats['target_calls']:.2f}" for count in stats["accepted_by_position"])
    return (
        f"{stats['accepted_per_target_call']:.2f} drafted tokens stand per call, by position {standing} "
        "(block verification judges a draft as a whole: no alpha)"
    )


def _seconds(spread: Mapping[str, float]) -> str:
    scale, unit = (1, "s") if spread["median"] >= 1 else (1e3, "ms")
    return f"{scale * spread['median']:.3f} {unit} ({scale * spread['least']:.3f} to {scale * spread['most']:.3f})"
