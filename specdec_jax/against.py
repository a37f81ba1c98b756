"""Another implementation as one more way of decoding in the benchmark: `specdec benchmark --against=t5x`."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.compatibility import UnsupportedCombination
from specdec_jax.generate import GenerationResult
from specdec_jax.measure import Spread
from specdec_jax.models.base import LanguageModel
from specdec_jax.passes import Arm, Batch
from specdec_jax.sampling import SamplingConfig

AGAINST = ("t5x",)
# Two implementations add up in other orders; a float32 argmax may differ where the two largest logits are as close as this.
MARGIN = 1e-3


def check(name: str | None, sampling: SamplingConfig) -> None:
    """Refuses what cannot be compared, before a model is loaded."""
    if name is None:
        return
    if name not in AGAINST:
        raise ValueError(f"against: got {name!r}, expected {' or '.join(AGAINST)}")
    if not sampling.mode.greedy or sampling.mode.processes:
        raise UnsupportedCombination(f"against: got {name!r} with sampling or processors, expected argmax alone")
    if importlib.util.find_spec("t5x") is None:
        raise ValueError(f"against: got {name!r}, which is not installed, expected it with its dependencies")


def arm(target: LanguageModel, max_new_tokens: int) -> Arm:
    """T5X's own `EncoderDecoderModel.predict_batch`, argmax, on the same weights and padded inputs, from text to text."""
    from specdec_jax.interop import t5x

    predict = t5x.greedy(target)

    def decode(batch: Batch) -> GenerationResult:
        rows, vocabulary = list(batch.inputs), target.vocabulary
        if rows and isinstance(rows[0], str):
            rows = [
                vocabulary.encode(text) + list(vocabulary.eos_ids[:1]) if text and text.strip() else [] for text in rows
            ]
        rows = [row or [] for row in rows]
        filled = [len(row) > 0 for row in rows]
        inputs = np.zeros((len(rows), batch.padded), np.int32)
        for number, row in enumerate(rows):
            row = row or rows[0]  # a filler's tokens would have nothing to attend to
            inputs[number, : len(row)] = row
        tokens = predict(inputs, max_new_tokens) * np.array(filled, np.int32)[:, None]
        ends = np.isin(tokens, target.eos_ids)
        lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, tokens.shape[1]) * filled
        texts = [vocabulary.decode(row[:end]) for row, end in zip(tokens, lengths)] if vocabulary else None
        nothing = np.zeros(tokens.shape, np.float32)
        return GenerationResult(texts, tokens, lengths.astype(np.int32), nothing, None, nothing, [])

    return Arm(0, decode)


def record(name: str, arms: Mapping[str, Arm], target: LanguageModel, batches: Sequence[Batch]) -> dict[str, Any]:
    """What is kept of the comparison: the arm's time, how many times as fast ours are, and every input with other tokens."""
    theirs = arms[name]
    faster = lambda ours: Spread.of(theirs.seconds_per_token / ours.seconds_per_token)._asdict()
    return {
        "name": name,
        "seconds": Spread.of(theirs.seconds)._asdict(),
        "tokens": theirs.tokens,
        "seconds_per_token": float(np.median(theirs.seconds_per_token)),
        "compile_seconds": theirs.compile_seconds,
        "improvement": {ours: faster(arm) for ours, arm in arms.items() if ours != name},
        "differences": _differences(theirs, arms["plain"], target, batches),
    }


def _differences(theirs: Arm, plain: Arm, target: LanguageModel, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    found = []
    for batch, other, ours in zip(batches, theirs.results, plain.results, strict=True):
        for row in np.flatnonzero(np.any(other.tokens != ours.tokens, axis=1)):
            position = int(np.argmax(other.tokens[row] != ours.tokens[row]))
            fed = [target.start_token, *ours.tokens[row, :position].tolist()]
            second, first = np.partition(np.asarray(target.logits([batch.ids[row]], [fed]))[0, -1], -2)[-2:]
            found.append({
                "input": batch.numbers[row], "position": position, "plain": int(ours.tokens[row, position]),
                "theirs": int(other.tokens[row, position]), "margin": float(first - second),
            })  # fmt: skip
    return sorted(found, key=lambda item: item["input"])


def problems(record: Mapping[str, Any], dtype: str) -> list[str]:
    """Says where float32 tokens differ that are no near-ties."""
    wrong = [item["input"] for item in record["differences"] if item["margin"] > MARGIN]
    if dtype != "float32" or not wrong:
        return []
    return [
        f"{record['name']}: got other tokens than plain decoding for inputs {wrong}, expected the same but for near-ties"
    ]
