"""Records the iterations of one input, as in the paper's Figure 1."""

from typing import NamedTuple

import numpy as np

from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.decoding.loop import advance
from specdec_jax.decoding.request import prepare
from specdec_jax.decoding.results import finish
from specdec_jax.models.language_model import LanguageModel


class TraceStep(NamedTuple):
    """One iteration of one row.

    Attributes:
      accepted: accepted ids.
      rejected: the first rejected id, None if the whole draft was accepted.
      corrected: the id that the target added, None after an accepted EOS.
      gamma: number of drafted ids.
      entropies: entropies in nats of the laws that the ids were drawn from; None unless the policy
        of γ reads them (see `gamma.DraftSignals`).
    """

    accepted: list[int]
    rejected: int | None
    corrected: int | None
    gamma: int
    entropies: list[float] | None


def trace(target: LanguageModel, text: str, **options) -> list[TraceStep]:
    """Returns the iterations of one input, as in the paper's Figure 1.

    Options are those of `generate`, except `num_samples`, `stop` and `deadline`.
    """
    for name, unset in (("num_samples", 1), ("stop", ()), ("deadline", None)):
        if options.get(name, unset) != unset:
            raise UnsupportedCombination(f"{name}: got {options[name]!r} for a trace, expected {unset!r}")
    state, request = prepare(target, [text], **options)
    steps, length = [], int(request.prefix_lengths[0])
    while not bool(state.done[0]):
        state = advance(request.network, request.drafter, state, np.int32(1))
        new = [int(token) for token in np.asarray(state.tokens)[0, length : int(state.lengths[0])]]
        length += len(new)
        draft, drafted, stood = (np.asarray(x)[0] for x in (state.last_draft, state.last_drafted, state.last_accepted))
        rejected, corrected = int(draft[stood]) if stood < drafted else None, new[stood] if len(new) > stood else None
        entropies = state.last_seen and np.asarray(state.last_seen.entropy)[0, :drafted].tolist()
        steps.append(TraceStep(new[:stood], rejected, corrected, int(drafted), entropies))
    finish(target, state, request)  # raises NotNumbers for logits that are not finite
    return steps
