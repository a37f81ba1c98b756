"""Decides whether drafting pays beyond the spread of the passes, and what else to try."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.analysis import formulas
from specdec_jax.analysis.timing import summarize
from specdec_jax.speculative.verifiers import LOSSY


def find_best(seconds: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """Returns the fastest way of drafting and how far it is ahead; None if nothing drafts.

    Ways are compared pass by pass, since the speed of a shared machine drifts.

    `seconds` are by name those of each pass for the same work; "plain" is plain decoding.

    Returns:
      best: its name, with the greatest median improvement.
      improvement: the time of plain decoding over its own.
      next: the name of the next best way of drafting; None if there is none.
      over_next: the time of the next best over its own, or None.
    """
    arrays = {name: np.asarray(values) for name, values in seconds.items()}
    base = arrays.pop("plain")
    ranked = sorted(arrays, key=lambda name: -float(np.median(base / arrays[name])))
    if not ranked:
        return None
    best, following = ranked[0], ranked[1] if len(ranked) > 1 else None
    return {
        "best": best,
        "improvement": summarize(base / arrays[best]),
        "next": following,
        "over_next": summarize(arrays[following] / arrays[best]) if following else None,
    }


def describe_best(
    verdict: Mapping[str, Any], passes: int, advice: str, plain: str = "plain decoding"
) -> list[str]:
    """Returns the result of `find_best` in words, the verdict first.

    One pass shows no spread. `advice` is an alternative to try if drafting does not pay; `plain` is
    the name of the baseline.
    """
    gain = verdict["improvement"]
    shown = f"{_spread(gain, passes)} the speed of {plain}, with {verdict['best']}"
    if passes == 1:
        pays = "seems to pay" if gain["median"] > 1 else "does not seem to pay"
        lines = [f"drafting {pays} here: {shown}; one pass shows no spread, --repeats=3 does"]
        lines[0] += "" if gain["median"] > 1 else f"; try {advice}"
    elif gain["least"] > 1:
        lines = [f"drafting pays here: {shown}"]
    elif gain["most"] < 1:
        lines = [f"drafting does not pay here: {shown}; try {advice}"]
    else:
        within = f"within the spread of {passes} passes"
        lines = [f"drafting may or may not pay here: {shown}, {within}; try {advice}"]
    if verdict["next"] is not None:
        ahead = verdict["over_next"]
        where = "beyond" if ahead["least"] > 1 else "within"
        names = f"{verdict['best']} over {verdict['next']}, the next best"
        line = f"{names}: {_spread(ahead, passes)} as fast"
        lines.append(line + (f", {where} the spread" if passes > 1 else ""))
    return lines


def _spread(gain: Mapping[str, float], passes: int) -> str:
    """Returns `1.9 times (1.6 to 2.3)`, of one pass without the spread."""
    spread = f" ({gain['least']:.3g} to {gain['most']:.3g})" if passes > 1 else ""
    return f"{gain['median']:.3g} times{spread}"


def advise(
    alpha: float | None,
    cost_ratio: float | None,
    verify_cost: Mapping[int, float],
    timed: Collection[int],
    batch_size: int,
) -> str:
    """Returns an alternative to try if drafting with one drafter does not pay.

    α (per position of the output) and c may be unknown. `verify_cost` is v by number of positions,
    and `timed` are the γ that were timed.
    """
    if alpha is None or cost_ratio is None:
        return "another drafter"
    widths = dict(sorted({1: 1.0, **verify_cost}.items()))
    v = np.interp(np.arange(max(widths) + 1), list(widths), list(widths.values()))
    gains = {
        gamma: formulas.improvement(alpha, gamma, cost_ratio, float(v[gamma + 1]))
        for gamma in range(1, max(widths))
    }
    best = max(gains, key=lambda gamma: gains[gamma], default=0)
    known = max((gains[gamma] for gamma in timed if gamma in gains), default=0.0)
    # Differences of less than 3 % are below the precision of the formulas.
    if best and gains[best] > max(1.0, 1.03 * known):
        return f"--gamma={best}, for which the formulas predict {gains[best]:.3g} times"
    if cost_ratio >= alpha:
        return (
            f"a cheaper drafter: a draft step takes {cost_ratio:.2f} of a target step, which pays "
            f"only where alpha is greater, and it is {alpha:.2f}"
        )
    if batch_size > 1 and v[-1] > 1.5:
        call = f"a target call over {max(widths)} positions takes {v[-1]:.2f} steps"
        return f"a smaller --batch_size: {call}"
    return (
        f"a drafter whose tokens are accepted more often than alpha = {alpha:.2f}, such as one of "
        "`specdec distill`"
    )


def describe_tokens(
    differing: Sequence[int | None],
    inputs: int,
    options: Mapping[str, Any],
    near_ties: bool | None = None,
    plain: str = "plain decoding",
) -> str:
    """Describes whether the tokens are those of the baseline, whose name is `plain`.

    For each way of drafting, `differing` of the inputs have other tokens; it is None where samples,
    which differ, were not compared. `near_ties` says whether all differences are, if it is known.
    """
    most = max((count for count in differing if count is not None), default=None)
    others = "; of other ways of drafting, which sample anew or are lossy, they were not compared"
    others *= None in differing
    if most == 0:
        return f"tokens are equal to {plain}'s for all {inputs} inputs{others}"
    if most is not None:
        kind = {True: ", all near-ties", False: ", not all of them near-ties", None: ""}[near_ties]
        return f"tokens differ from {plain}'s for {most} of {inputs} inputs{kind}{others}"
    if options.get("synthetic_alpha"):
        return "acceptance is synthetic: outputs mean nothing"
    if options["verifier"] in LOSSY:
        return f"{options['verifier']} verification is lossy: tokens need not be the target's"
    return "tokens are samples of the target's own distribution, which are not compared one by one"
