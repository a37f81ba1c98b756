"""Compares another implementation's outputs and times with ours."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.variants import Batch, Variant
from specdec_jax.models.language_model import LanguageModel

# Two implementations add up in different orders; a float32 argmax may differ if the two largest
# logits are as close as this.
MARGIN = 1e-3
# Our own plain decoding of a target in int8, with the same weights in its dtype, as the other
# implementation has them.
UNROUNDED = "plain, not in int8"


def others_of(variants: Mapping[str, Variant] | None) -> list[str]:
    """Returns the names of other implementations among `variants`, in which `UNROUNDED` is our own."""
    return [name for name in variants or () if name != UNROUNDED]


def compare(
    name: str,
    variants: Mapping[str, Variant],
    target: LanguageModel,
    batches: Sequence[Batch],
    differences: Callable[..., list] | None = None,
) -> dict[str, Any]:
    """Returns the record of the comparison: the variant's time, how many times as fast ours are,
    and every input with other tokens; with `UNROUNDED` among the variants also what int8
    contributes.

    `differences` makes what is kept of such inputs of theirs and our plain variant; None: as for
    argmax.
    """
    theirs = variants[name]

    def faster(ours):
        return Spread.from_samples(theirs.seconds_per_token / ours.seconds_per_token)._asdict()

    record = {
        "name": name,
        "seconds": Spread.from_samples(theirs.seconds)._asdict(),
        "tokens": theirs.tokens,
        "seconds_per_token": float(np.median(theirs.seconds_per_token)),
        "compile_seconds": theirs.compile_seconds,
        "improvement": {
            ours: faster(variant) for ours, variant in variants.items() if ours != name
        },
        "differences": (differences or _differences)(theirs, variants["plain"], target, batches),
    }
    if UNROUNDED in variants:
        rounded, wide = variants["plain"], variants[UNROUNDED]
        record["rounding"] = Spread.from_samples(
            wide.seconds_per_token / rounded.seconds_per_token
        )._asdict()
        record["rounded_differences"] = sum(
            int(np.any(ours.tokens != other.tokens, axis=1).sum())
            for ours, other in zip(rounded.results, wide.results, strict=True)
        )
    return record


def _differences(
    theirs: Variant, plain: Variant, target: LanguageModel, batches: Sequence[Batch]
) -> list[dict[str, Any]]:
    found = []
    for batch, other, ours in zip(batches, theirs.results, plain.results, strict=True):
        for row in np.flatnonzero(np.any(other.tokens != ours.tokens, axis=1)):
            position = int(np.argmax(other.tokens[row] != ours.tokens[row]))
            fed = [target.start_token, *ours.tokens[row, :position].tolist()]
            second, first = np.partition(
                np.asarray(target.logits([batch.ids[row]], [fed]))[0, -1], -2
            )[-2:]
            found.append(
                {
                    "input": batch.numbers[row],
                    "position": position,
                    "plain": int(ours.tokens[row, position]),
                    "theirs": int(other.tokens[row, position]),
                    "margin": float(first - second),
                }
            )
    return sorted(found, key=lambda item: item["input"])


def problems(record: Mapping[str, Any], dtype: str, margin: float = MARGIN) -> list[str]:
    """Returns a message if float32 tokens differ that are no near-ties."""
    wrong = [str(item["input"] + 1) for item in record["differences"] if item["margin"] > margin]
    if dtype != "float32" or not wrong:
        return []
    return [
        f"{record['name']}: got other tokens than plain decoding for sentences {', '.join(wrong)}, expected the "
        "same but for near-ties"
    ]
