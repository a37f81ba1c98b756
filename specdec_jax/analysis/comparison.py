"""Compares another implementation's outputs and times with ours."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.timing import summarize
from specdec_jax.analysis.variants import SentenceBatch, Variant
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.models.language_model import LanguageModel

# Two implementations add up in different orders; a float32 argmax may differ if the two largest
# logits are as close as this.
MARGIN = 1e-3
# Our own plain decoding with weights that are not rounded to int8, like the other
# implementation's.
UNROUNDED = "plain, not in int8"


def list_other_implementations(variants: Mapping[str, Variant] | None) -> list[str]:
    """Returns the names of other implementations among `variants`; `UNROUNDED` is our own."""
    return [name for name in variants or () if name != UNROUNDED]


def compare(
    name: str,
    variants: Mapping[str, Variant],
    target: LanguageModel,
    batches: Sequence[SentenceBatch],
    differences: Callable[..., list] | None = None,
) -> dict[str, Any]:
    """Returns the record of the comparison.

    It has the other implementation's time, how many times as fast ours are, and every input with
    different tokens. With `UNROUNDED` among the variants it also has the effect of int8. By default
    `differences` is `_find_differences`, which is for argmax.
    """
    theirs = variants[name]
    record = {
        "name": name,
        **theirs.record(),
        "seconds_per_token": float(np.median(theirs.seconds_per_token)),
        "improvement": {
            one: summarize(theirs.seconds_per_token / ours.seconds_per_token)
            for one, ours in variants.items()
            if one != name
        },
        "differences": (differences or _find_differences)(
            theirs, variants["plain"], target, batches
        ),
    }
    if UNROUNDED in variants:
        rounded, wide = variants["plain"], variants[UNROUNDED]
        record["rounding"] = summarize(wide.seconds_per_token / rounded.seconds_per_token)
        record["rounded_differences"] = analysis_variants.count_differing(rounded, wide)
    return record


def _find_differences(
    theirs: Variant, plain: Variant, target: LanguageModel, batches: Sequence[SentenceBatch]
) -> list[dict[str, Any]]:
    """Returns the inputs with different tokens, with the margin of the first difference."""

    def measure(
        batch: SentenceBatch, _: object, expected: GenerationResult, row: int, position: int
    ) -> dict[str, Any]:
        fed = [target.start_token, *expected.tokens[row, :position].tolist()]
        logits = np.asarray(target.logits([batch.ids[row]], [fed]))[0, -1]
        second, first = np.partition(logits, -2)[-2:]
        return {"margin": float(first - second)}

    return analysis_variants.list_differences(theirs, plain, batches, measure)


def find_problems(record: Mapping[str, Any], dtype: str, margin: float = MARGIN) -> list[str]:
    """Returns a message if float32 tokens differ that are no near-ties."""
    wrong = [item["input"] for item in record["differences"] if item["margin"] > margin]
    return analysis_variants.describe_differing(record["name"], wrong) if dtype == "float32" else []
