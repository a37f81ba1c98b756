"""Searches beams of one row over a known distribution, in numpy and lists.

The compiled search must give the same.

In float32, with sums in the order in which a search makes them, so that what is equal there is
equal here.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

FAR = {"t5x": np.float32(1e7), "huggingface": np.float32(1e9)}


@dataclasses.dataclass
class Found:
    """Hypotheses, the best first, and what the search went through.

    Attributes:
      tokens: new tokens of each; None for a place that nothing filled.
      scores: float32.
      steps: how many.
      margin: the least difference of two numbers whose order decided.
    """

    tokens: list[list[int] | None]
    scores: list[np.float32]
    steps: int
    margin: float


@dataclasses.dataclass(frozen=True)
class Search:
    """A search; the fields as in `BeamOptions`, and what known mistakes get wrong.

    Attributes:
      kept: candidates for each beam and id that ends, one more than the ids that end if right.
      brevity_offset: added to lengths in the penalty of a finished hypothesis.
      worst: of the finished hypotheses that the best active beam compares with: min, or max for a
        mistake.
    """

    beams: int
    eos_ids: tuple[int, ...]
    penalty: float
    style: str = "t5x"
    early_stopping: bool | str = False
    kept: int | None = None
    brevity_offset: int = 0
    worst: Callable = min

    def divisor(self, length: float) -> np.float32:
        length = np.float32(length)
        return (
            length if self.style == "huggingface" else (5 + length) / np.float32(6)
        ) ** np.float32(self.penalty)

    def run(
        self, log_probs: Callable[[list[int]], np.ndarray], limit: int, prefix: int = 0
    ) -> Found:
        """Searches.

        Args:
          log_probs: float32 `[V]` after the given new tokens.
          limit: the most new tokens.
          prefix: tokens of the decoder prefix, without the start token.
        """
        far, margins = FAR[self.style], [np.inf]
        active = [(np.float32(0), [])] + [(-far, [])] * (self.beams - 1)
        finished: list[tuple[np.float32, list[int] | None]] = [(-far, None)] * self.beams
        count = (self.kept or 1 + max(1, len(self.eos_ids))) * self.beams
        for length in range(1, limit + 1):
            rows = [np.float32(score) + log_probs(tokens) for score, tokens in active]
            flat = np.concatenate(rows)
            order = np.argsort(-flat, kind="stable")[: count + 1]
            margins += _gaps(flat[order])
            candidates = [
                (flat[i], active[i // len(rows[0])][1] + [int(i % len(rows[0]))])
                for i in order[:count]
            ]
            ends = [tokens[-1] in self.eos_ids for _, tokens in candidates]
            huggingface = self.style == "huggingface"
            ending = [end or (huggingface and length == limit) for end in ends]
            lowered = [
                (score - far if end else score, tokens)
                for (score, tokens), end in zip(candidates, ending)
            ]
            active = _best(lowered, self.beams, margins)
            full = all(tokens is not None for _, tokens in finished)
            counted = length + (0 if huggingface else prefix) + self.brevity_offset
            for place, ((score, tokens), end) in enumerate(zip(candidates, ending)):
                blocked = huggingface and (
                    place >= self.beams or (self.early_stopping is True and full)
                )
                if end and not blocked:
                    finished.append((np.float32(score / self.divisor(counted)), tokens))
            finished = _best(finished, self.beams, margins)
            if not huggingface:
                active = active[::-1]
            if length == limit or self._over(active, finished, length, limit, prefix, margins):
                break
        if all(tokens is None for _, tokens in finished):
            finished = active if self.style == "huggingface" else active[::-1]
        return Found(
            [t for _, t in finished], [s for s, _ in finished], length, float(min(margins))
        )

    def _over(self, active, finished, length, limit, prefix, margins) -> bool:
        best = max(score for score, _ in active)
        full = all(tokens is not None for _, tokens in finished)
        worst = self.worst(score for score, _ in finished)
        if self.style == "t5x":
            possible = best / self.divisor(prefix + limit + 1)
            margins.append(abs(worst - possible))
            return full and worst > possible
        longest = limit if self.early_stopping == "never" and self.penalty > 0 else length
        possible = best / self.divisor(longest)
        margins.append(abs(worst - possible))
        return full and (self.early_stopping is True or not possible > worst)


def _best(scored: list, count: int, margins: list) -> list:
    order = sorted(range(len(scored)), key=lambda i: -scored[i][0])
    margins += _gaps(np.array([scored[i][0] for i in order[: count + 1]]))
    return [scored[i] for i in order[:count]]


def _gaps(descending: np.ndarray) -> list[float]:
    """Differences of neighbours, but of those that no hypothesis depends on."""
    gaps = descending[:-1] - descending[1:]
    return [float(gap) for gap, score in zip(gaps, descending[1:]) if score > -1e6]
