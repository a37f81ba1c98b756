"""Measures how far a call over several positions is from calls over one: what a near-tie is."""

from typing import NamedTuple

import jax
import numpy as np

from specdec_jax.analysis.timing import prefill_cache
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network


class Difference(NamedTuple):
    """How far one token's choice is from a tie.

    Attributes:
      margin: between the target's two largest logits.
      noise: largest difference between logits from calls over one position and over several, along the prefix.
    """

    margin: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Either token can be the argmax in exact arithmetic: each of two logits may be off by `noise`."""
        return self.margin < 2 * self.noise


_decode = jax.jit(Network.decode)


def measure_difference(model: LanguageModel, inputs, prefix, width: int, batch: int = 1) -> Difference:
    """`Difference` at the token after `prefix`.

    Args:
      inputs: ids of one encoder input; they do not matter for a decoder-only model.
      prefix: decoder tokens, start token first; of a decoder-only model prompt and new tokens.
      width: positions of the wider call (γ + 1).
      batch: rows; the input is repeated, since kernels differ with the number of rows.
    """
    inputs = np.tile(np.asarray(inputs, np.int32), (batch, 1))
    lengths = np.full(batch, inputs.shape[1], np.int32)
    padded = np.zeros(-(-len(prefix) // width) * width, np.int32)
    padded[: len(prefix)] = prefix

    def logits(step: int) -> np.ndarray:
        network = model.network
        cache, rows = prefill_cache(network, inputs, lengths, slots=len(padded)), []
        for start in range(0, len(padded), step):
            tokens = np.tile(padded[start : start + step], (batch, 1))
            out, cache = _decode(network, tokens, np.full(batch, start, np.int32), cache)
            rows.append(np.asarray(out[0]))
        return np.concatenate(rows)[: len(prefix)]

    single, wide = logits(1), logits(width)
    second, first = np.partition(single[-1], -2)[-2:]
    return Difference(float(first - second), float(np.max(np.abs(single - wide))))
