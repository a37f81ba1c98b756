"""Shows the iterations of one input as text (the paper's Figure 1) and as time (its Figure 5)."""

from collections.abc import Sequence
from typing import Any

from specdec_jax.analysis import predictions
from specdec_jax.analysis.timing import Times
from specdec_jax.analysis.variants import SentenceBatch, Workload
from specdec_jax.decoding.trace import TraceStep, trace
from specdec_jax.models.language_model import LanguageModel

# The names of the kinds of text in a line, as pairs of a kind and text in its style.
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


def trace_lines(steps: Sequence[TraceStep], target: LanguageModel) -> list[list[tuple[str, str]]]:
    """Returns one line per target call, as (kind, text) pairs.

    They are: the text committed before, the accepted and the rejected drafted tokens, and the
    target's own token, which is a correction after a rejection and a bonus otherwise.
    """
    found, committed = [], ""
    for step in steps:
        accepted = "".join(token_text(token, target) for token in step.accepted)
        rejected = "" if step.rejected is None else token_text(step.rejected, target)
        own = "" if step.corrected is None else token_text(step.corrected, target)
        parts = [
            ("committed", committed),
            ("accepted", accepted),
            ("rejected", rejected),
            (own_token_kind(step), own),
        ]
        found.append([(kind, text) for kind, text in parts if text])
        committed += accepted + own
    return found


def own_token_kind(step: TraceStep) -> str:
    """Returns the kind of the target's own token: a correction after a rejection, else a bonus."""
    return "bonus" if step.rejected is None else "corrected"


def token_text(token: int, target: LanguageModel) -> str:
    """Returns a token as text."""
    return " [END]" if token in target.eos_ids else target.vocabulary.piece(token)


def call_spans(
    steps: Sequence[TraceStep], gamma: int, padded: int, times: Times, varies: bool = False
) -> list[tuple[str, float]]:
    """Returns (kind of call, seconds) of every call that the iterations made.

    Seconds are medians of single steps. If a model drafts, the first step after a full acceptance
    is a call over two positions. With γ = 0 decoding is plain. `padded` is the padded length of the
    input, and `times` has the names of `timing.step_variants`. If the drafter `varies`, a call
    without a draft is over one position.
    """
    plain = times["target step"].median
    call = times[f"verify {gamma}"].median if gamma else plain
    drafts = gamma > 0 and "draft step" in times
    draft = pair = 0.0
    if drafts:
        draft, single = predictions.draft_seconds(gamma, times), times["draft step"]
        pair = draft * times.get("draft pair", single).median / single.median
    encoders = ("target encoder", "drafter encoder") if gamma else ("target encoder",)
    found = [
        (name, times[f"{name} {padded}"].median) for name in encoders if f"{name} {padded}" in times
    ]
    whole = False
    for step in steps:
        if drafts and step.gamma:
            seconds = [pair if whole else draft] + [draft] * (step.gamma - 1)
            found += [("draft step", one) for one in seconds]
        found.append(("target call", plain if varies and not step.gamma else call))
        whole = 0 < step.gamma == len(step.accepted)
    return found


def find_text(batches: Sequence[SentenceBatch]) -> SentenceBatch | None:
    """Returns the first batch whose first input has any text, None if there is none."""
    firsts = ((batch.inputs[0], batch) for batch in batches)
    return next((batch for text, batch in firsts if isinstance(text, str) and text.strip()), None)


def make_example(
    workload: Workload, gammas: Sequence[int], batch: SentenceBatch, times: Times
) -> dict[str, Any]:
    """Returns the first input of `batch`, decoded plainly and with every γ of `gammas`."""
    target, drafter, _, options = workload
    variants = []
    for gamma in (0, *gammas):
        how = options.decoding(plain=not gamma) | {"drafter": drafter if gamma else None}
        steps = trace(target, batch.inputs[0], gamma=gamma, key=batch.keys, **how)
        shown = trace_lines(steps, target) if gamma else []
        varies = drafter is not None and drafter.varies
        seconds = call_spans(steps, gamma, batch.padded, times, varies)
        variants.append({"gamma": gamma, "lines": shown, "spans": seconds})
    return {"input": batch.inputs[0], "variants": variants}
