"""Shows the iterations of one input as text (the paper's Figure 1) and as time (its Figure 5)."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.analysis import predictions
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.variants import Batch
from specdec_jax.decoding.trace import TraceStep, trace
from specdec_jax.models.language_model import LanguageModel

# The names of the kinds of text in a line, each in the style of its kind.
LEGEND = (
    ("committed", "drafted tokens: "),
    ("accepted", "accepted"),
    ("committed", ", "),
    ("rejected", "rejected"),
    ("committed", "; the target's own: "),
    ("corrected", "correction"),
    ("committed", " after a rejection, "),
    ("bonus", "bonus"),
    ("committed", " where all are accepted"),
)


def lines(steps: Sequence[TraceStep], target: LanguageModel) -> list[list[tuple[str, str]]]:
    """Returns one line per target call, as (kind, text) pairs.

    They are: what was committed before, the accepted and the rejected drafted tokens, and the
    target's own token, which is a correction after a rejection and a bonus otherwise.
    """
    found, committed = [], ""
    for step in steps:
        accepted = "".join(surface(token, target) for token in step.accepted)
        rejected = "" if step.rejected is None else surface(step.rejected, target)
        own = "" if step.corrected is None else surface(step.corrected, target)
        parts = [
            ("committed", committed),
            ("accepted", accepted),
            ("rejected", rejected),
            (own_kind(step), own),
        ]
        found.append([(kind, text) for kind, text in parts if text])
        committed += accepted + own
    return found


def own_kind(step: TraceStep) -> str:
    """Returns the kind of the target's own token: a correction after a rejection, else a bonus."""
    return "bonus" if step.rejected is None else "corrected"


def surface(token: int, target: LanguageModel) -> str:
    """Returns a token as text."""
    return " [END]" if token in target.eos_ids else target.vocabulary.piece(token)


def spans(
    steps: Sequence[TraceStep], gamma: int, padded: int, times: Mapping[str, Spread]
) -> list[tuple[str, float]]:
    """Returns (kind of call, seconds) of every call that the iterations made, by the medians of
    single steps; γ = 0 is plain decoding.

    If a model drafts, the first step after a full acceptance is a call over two positions.

    Args:
      steps: the iterations.
      gamma: γ.
      padded: padded length of the input.
      times: seconds by the names of `timing.step_variants`.
    """
    call = times[f"verify {gamma}" if gamma else "target step"].median
    drafts = gamma > 0 and "draft step" in times
    draft = predictions.draft_seconds(gamma, times) if drafts else 0.0
    pair = (
        draft * times.get("draft pair", times["draft step"]).median / times["draft step"].median
        if drafts
        else 0.0
    )
    encoders = ("target encoder", "drafter encoder") if gamma else ("target encoder",)
    found = [
        (name, times[f"{name} {padded}"].median) for name in encoders if f"{name} {padded}" in times
    ]
    whole = False
    for step in steps:
        if drafts and step.gamma:
            found += [("draft step", pair if whole else draft)] + [("draft step", draft)] * (
                step.gamma - 1
            )
        found.append(("target call", call))
        whole = 0 < step.gamma == len(step.accepted)
    return found


def first_text(batches: Sequence[Batch]) -> Batch | None:
    """Returns the first batch whose first input has any text, None if there is none."""
    return next(
        (
            batch
            for batch in batches
            if isinstance(batch.inputs[0], str) and batch.inputs[0].strip()
        ),
        None,
    )


def example(
    target: LanguageModel,
    drafter,
    gammas: Sequence[int],
    batch: Batch,
    times: Mapping[str, Spread],
    options,
) -> dict[str, Any]:
    """Returns the first input of `batch`, decoded plainly and with every γ of `gammas`."""
    variants = []
    for gamma in (0, *gammas):
        steps = trace(
            target,
            batch.inputs[0],
            drafter=drafter if gamma else None,
            gamma=gamma,
            key=batch.keys,
            **options.decoding(plain=not gamma),
        )
        variants.append(
            {
                "gamma": gamma,
                "lines": lines(steps, target) if gamma else [],
                "spans": spans(steps, gamma, batch.padded, times),
            }
        )
    return {"input": batch.inputs[0], "variants": variants}
