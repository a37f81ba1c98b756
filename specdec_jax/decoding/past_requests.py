"""Remembers what earlier requests have shown of a drafter, for `gamma="auto"`.

How many drafted tokens are accepted depends on the weights, so it is remembered, in this process,
for the arrays of one target and drafter. The rows of a batch wait for the slowest one, of which
rates say little; so batches of several rows are timed with drafts and without.
"""

import itertools
import math
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np

# How many tokens of earlier requests are remembered; and one in how many requests that would begin
# without drafts looks whether drafts would pay by now.
_REMEMBERED, EXPLORE_EVERY = 60, 16
# The least gain by what earlier requests have shown. What iterations cost was measured at another
# moment, and is off by some percent on a machine that others share.
GAIN = 0.04
# Times of each kind that are needed before they decide, and the most that count. The first of a
# kind, which has a compilation in it, never counts.
_FEW, _TIMES, _BELIEF = 2, 5, 2
# The slower way is tried in at most one of `EXPLORE_EVERY` choices, and costs at most this share of
# time; after how many choices without enough times acceptance rates decide.
_SHARE, _GIVE_UP = 0.01, 12


class Learned(NamedTuple):
    """What was learned in this process about drafts.

    Attributes:
      examined: number of drafted tokens that were examined; only the latest count.
      accepted: how many of those were accepted.
      requests: for how many requests γ was chosen by it so far.
      tokens: how many tokens the requests with these drafts committed.
      ended: how many of them ended a row by themselves: an EOS or a stop string.
    """

    examined: float = 0.0
    accepted: float = 0.0
    requests: int = 0
    tokens: float = 0.0
    ended: float = 0.0

    @property
    def tries_drafts(self) -> bool:
        """Whether the next request drafts to find out whether drafts would pay by now."""
        return self.requests % EXPLORE_EVERY == 0

    @property
    def explores(self) -> bool:
        """Whether the next request is to find out whether drafts pay."""
        return self.tries_drafts or not self.examined and self.requests < 2

    @property
    def ending(self) -> float:
        """The part of tokens that end a row by themselves; stop strings may leave none of a row."""
        return min(1.0, self.ended / max(self.tokens, 1))

    def expected_length(self, limit: int) -> float:
        """Returns the number of tokens to expect in an output of up to `limit`."""
        return (1 - (1 - self.ending) ** limit) / self.ending if self.ended else limit


class Times(NamedTuple):
    """How long the latest batches of several rows took, in order.

    Attributes:
      drafting, plain: seconds with drafts, and without, over the number of iterations that plain
        decoding would take. The first of each is left out of all judgement: a program was compiled.
      choices: how often γ was chosen by them so far.
      expected: the speed with drafts over that without by acceptance rates, which counts as much as
        `_BELIEF` batches: those differ widely, since each ends with its slowest row. None: nothing.
    """

    drafting: tuple[float, ...] = ()
    plain: tuple[float, ...] = ()
    choices: int = 0
    expected: float | None = None

    @property
    def needs_more(self) -> bool:
        """Whether more are needed of one kind."""
        return min(len(self.drafting), len(self.plain)) <= _FEW

    @property
    def decides(self) -> bool:
        """Whether a choice is made by them: not once many choices have brought too few."""
        return not self.needs_more or self.choices < _GIVE_UP

    def _compare(self) -> tuple[float, bool]:
        """Returns the speed with drafts over that without, and whether the slower way is due."""
        gain = float(np.median(self.plain[1:]) / np.median(self.drafting[1:]))
        if self.expected is not None:
            count = min(len(self.plain), len(self.drafting)) - 1
            gain = (self.expected**_BELIEF * gain**count) ** (1 / (_BELIEF + count))
        lost = max(gain, 1 / gain) - 1
        return gain, self.choices % max(EXPLORE_EVERY, math.ceil(lost / _SHARE)) == 0

    @property
    def drafts(self) -> bool:
        """Whether the next batches draft: if that was faster, or to find out."""
        if self.needs_more:
            return len(self.drafting) <= _FEW
        gain, other = self._compare()
        return (gain > 1 + GAIN) != other

    @property
    def explores(self) -> bool:
        """Whether the next batches are to find out."""
        return self.needs_more or self._compare()[1]

    def add(self, seconds: float, drafts: bool) -> "Times":
        """Returns the times with those of another batch."""
        known = self.drafting if drafts else self.plain
        latest = (*known[:1], *known[1:][1 - _TIMES :], seconds)
        return self._replace(drafting=latest) if drafts else self._replace(plain=latest)


# What was learned, by `Plan.learned_key`, and times, by `Plan.times_key`; the number of each set of
# arrays, by the arrays' `id`s, and by that of the network or drafter.
_learned: dict[str, Learned] = {}
_times: dict[tuple, Times] = {}
_numbered: dict[tuple[int, ...], tuple[list[weakref.ref], int]] = {}
_nodes: dict[int, tuple[weakref.ref, int]] = {}
_NUMBERS = itertools.count()


def count_request(key: str) -> Learned:
    """Returns what was learned; counts a request for which γ is chosen by it."""
    learned = _learned.get(key, Learned())
    _learned[key] = learned._replace(requests=learned.requests + 1)
    return learned


def count_choice(place: tuple) -> Times:
    """Returns the times of batches; counts a choice of γ by them."""
    times = _times.get(place, Times())
    _times[place] = times._replace(choices=times.choices + 1)
    return times


def add_time(place: tuple, seconds: float, drafts: bool) -> None:
    """Adds how long a batch took; `place` is a `Plan.times_key`."""
    _times[place] = _times.get(place, Times()).add(seconds, drafts)


def learn(key: str, seen: Learned) -> None:
    """Adds what a request has shown of its drafts and of how its rows ended.

    Only for argmax, where the output does not depend on how much is drafted.

    Args:
      key: a `Plan.learned_key`.
      seen: of this request alone.
    """
    before = _learned.get(key, Learned())
    total = before.examined + seen.examined
    kept = min(1.0, _REMEMBERED / max(total, 1))
    _learned[key] = Learned(
        examined=kept * total,
        accepted=kept * (before.accepted + seen.accepted),
        requests=before.requests,
        tokens=kept * (before.tokens + seen.tokens),
        ended=kept * (before.ended + seen.ended),
    )


def identify(node: Any) -> int:
    """Returns a number for the arrays of a network or drafter, the same as long as these live."""
    own = id(node)
    if own in _nodes and _nodes[own][0]() is node:  # looking at all arrays takes longer
        return _nodes[own][1]
    arrays = [leaf for leaf in jax.tree.leaves(node) if isinstance(leaf, (np.ndarray, jax.Array))]
    place = tuple(map(id, arrays))
    refs, number = _numbered.get(place, ([], -1))
    if number < 0 or any(ref() is not array for ref, array in zip(refs, arrays, strict=True)):
        number = next(_NUMBERS)
        refs = [weakref.ref(array, lambda _: _numbered.pop(place, None)) for array in arrays]
        _numbered[place] = refs, number
    if hasattr(node, "__weakref__"):
        _nodes[own] = weakref.ref(node, lambda _: _nodes.pop(own, None)), number
    return number
