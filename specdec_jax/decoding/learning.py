"""Defines what learns from finished outputs while others are decoded."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from specdec_jax.decoding.request import Plan
from specdec_jax.decoding.results import Stats
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter


class FinishedOutput(Protocol):
    """What a learner reads of an output; `Output` and others have it.

    Attributes:
      tokens: new token ids, EOS included.
      finish_reason: why the row ended.
      stats: statistics of the row.
    """

    @property
    def tokens(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def stats(self) -> Stats: ...


class Learner(Protocol):
    """What improves a drafter while it drafts.

    The loop calls `saw` for every output after its receiver has asked for the next one, so that a
    job keeps a result before anything learns from it. It calls `learn` when the device is idle,
    between two calls of `advance`, and then drafts with `drafter`. The drafters must all have one
    structure of equal shapes, so that nothing compiles anew, and their `remembers` must be set.

    Attributes:
      drafter: the drafter as it is now: the same object until it has changed.
    """

    @property
    def drafter(self) -> Drafter: ...

    def saw(self, inputs: np.ndarray, prefix: np.ndarray, output: FinishedOutput) -> None:
        """Takes note of a finished output.

        Args:
          inputs: ids of the encoder's input; none for a decoder-only target.
          prefix: what the decoder began with: start token and decoder prefix, or the prompt.
          output: the output.
        """

    def learn(self) -> None:
        """Improves the drafter, if it is time."""


def update_drafter(target: LanguageModel, plan: Plan, learner: Learner | None) -> Plan:
    """Lets the learner learn; returns the plan with its drafter, unless nothing is drafted."""
    if learner is None or plan.drafter is None:
        return plan
    learner.learn()
    drafter = learner.drafter.pair_with(target)
    return plan if drafter is plan.drafter else dataclasses.replace(plan, drafter=drafter)


def teach(
    outputs: Iterable[tuple[int, tuple]], plan: Plan, learner: Learner
) -> Iterator[tuple[int, tuple]]:
    """Yields `outputs` as they are; the learner sees each when the next one is asked for.

    Of a beam search it sees the best hypotheses.
    """
    for number, rows in outputs:
        yield number, rows
        inputs = plan.tokens[number, : plan.lengths[number]]
        prefix = plan.prefix[number, : plan.prefix_lengths[number]]
        for output in rows[: plan.samples]:
            learner.saw(inputs, prefix, output)
