"""Peaks of memory that other programs on the machine do not raise."""

from collections.abc import Callable

MOST = 1.2  # of the weights' size


def find_least(measure: Callable[[], float]) -> float:
    """Returns the least of up to five ratios, the first that is small enough at once.

    XLA's threads free memory when they get to it, which is late where others want the cores.
    """
    ratios: list[float] = []
    while len(ratios) < 5 and not (ratios and ratios[-1] <= MOST):
        ratios.append(measure())
    print(ratios)
    return min(ratios)
