"""Measures how far logits from a call over several positions are from those of calls over one: what
makes a near-tie."""

from typing import NamedTuple

import jax
import numpy as np

from specdec_jax.analysis.timing import prefill_cache
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network


class Difference(NamedTuple):
    """How far one token's choice is from a tie.

    Attributes:
      margin: difference between the target's two largest logits.
      noise: the largest difference, along the prefix, between logits from calls over one position
        and over several.
    """

    margin: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether either token can be the argmax in exact arithmetic: each of the two logits may be
        off by `noise`."""
        return self.margin < 2 * self.noise


_decode = jax.jit(Network.decode)


def measure_difference(model: LanguageModel, inputs, prefix, width: int, batch: int = 1) -> Difference:
    """Returns the `Difference` at the token after `prefix`.

    Args:
      model: the target.
      inputs: ids of one encoder input; ignored for a decoder-only model.
      prefix: decoder tokens, start token first; for a decoder-only model, prompt and new tokens.
      width: number of positions of the wider call (γ + 1).
      batch: number of rows; the input is repeated, since kernels differ with the number of rows.
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
