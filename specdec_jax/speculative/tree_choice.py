"""Chooses the shape of a tree from acceptance by rank and from what calls of the models cost.

Acceptance by rank is the share of nodes at which the target's token is the drafter's first, second
… choice. As in Sequoia (Chen et al. 2024, arXiv 2402.12374), a node's share depends on its rank and
at most its depth. So a node is accepted with the probability that is the product of the shares on
the way to it, its *value*, and the values of all nodes, 1 for node 0, add up to the tokens that one
call of the target commits.

No value exceeds that of the parent or of the sibling before. So the n nodes of the greatest values
are a tree, and no tree of n nodes has more: taking nodes in this order gives what Sequoia's dynamic
programme gives, for every n at once, and an order of priority too.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.models import arguments

Node = tuple[int, ...]  # the ranks on the way to it, from 0; () is node 0
# One share per rank; or such a list for each depth, the last of which serves all greater depths.
Shares = Sequence[float] | Sequence[Sequence[float]]


def check_acceptance(acceptance_by_rank: Shares) -> np.ndarray:
    """Returns acceptance by rank as `[depths, ranks]`, one row where it is the same at all depths.

    Raises:
      ValueError: no such list, or shares that are not from 0 to 1 and at most 1 in all.
    """
    expected = "a list of numbers, or one such list of the same length for each depth"
    given = arguments.check_numbers("acceptance_by_rank", acceptance_by_rank, expected)
    shares = np.atleast_2d(given.astype(float))
    if given.ndim and shares.ndim == 2 and shares.size:
        if np.all(shares >= 0) and np.all(shares.sum(axis=1) <= 1 + 1e-6):
            return shares
        expected = "shares, at most 1 in all"
    raise ValueError(f"acceptance_by_rank: got {acceptance_by_rank!r}, expected {expected}")


def node_value(node: Node, shares: np.ndarray) -> float:
    """Returns the probability that the tokens on the way to `node`, its own included, are accepted.

    Args:
      shares: `[depths, ranks]`; a rank past the last has share 0.
    """
    rows = shares[np.minimum(np.arange(len(node)), len(shares) - 1)]
    ranked = zip(rows, node, strict=True)
    return math.prod(float(row[rank]) if rank < len(row) else 0.0 for row, rank in ranked)


def choose_most_valuable(shares: np.ndarray, size: int, depth: int) -> list[tuple[Node, float]]:
    """Returns up to `size` nodes of positive value, the most valuable first, with their values.

    None is deeper than `depth`; parents and earlier siblings come first.

    Args:
      shares: `[depths, ranks]`, descending from rank to rank.
    """
    waiting: list[tuple[float, Node]] = [(-1.0, ())]
    chosen: list[tuple[Node, float]] = []
    while waiting and len(chosen) < size:
        negative, node = heapq.heappop(waiting)
        chosen.append((node, -negative))
        first_child, next_sibling = (*node, 0), (*node[:-1], node[-1] + 1) if node else None
        for other in (first_child, next_sibling):
            if other is not None and len(other) <= depth and node_value(other, shares) > 0:
                heapq.heappush(waiting, (-node_value(other, shares), other))
    return chosen


def choose_fastest(
    acceptance_by_rank: Shares,
    nodes: int,
    depth: int,
    verify_costs: Mapping[Any, float] | None,
    cost_ratio: float,
) -> list[Node] | None:
    """Returns the nodes of the tree that `Tree.best` describes, in order of priority.

    Node 0 is among them. None: no tree is faster than plain decoding.
    """
    # By chance a rare rank may have the greater share; then the two are taken to be the other way.
    shares = -np.sort(-check_acceptance(acceptance_by_rank), axis=1)
    calls, best, chosen = _call_costs(verify_costs, nodes), 1.0, None
    expected = "a number of at least 0"
    if not 0 <= arguments.check_number("cost_ratio", cost_ratio, expected) < math.inf:
        raise ValueError(f"cost_ratio: got {cost_ratio}, expected {expected}")
    for levels in range(1, depth + 1):
        tree, values = zip(*choose_most_valuable(shares, nodes, levels))
        speeds = np.cumsum(values) / (calls[: len(tree)] + cost_ratio * levels)
        last = int(np.argmax(speeds))
        if speeds[last] > best:
            best, chosen = speeds[last], list(tree[: last + 1])
        if max(map(len, tree)) < levels:
            break
    return chosen


def _call_costs(verify_costs: Mapping[Any, float] | None, nodes: int) -> np.ndarray:
    """Returns `[nodes]`: the cost of a target call over 1 … `nodes` positions."""
    if verify_costs is None:
        return np.ones(nodes)
    expected = "positive numbers by the number of positions, 1 for one position"
    arguments.check_kind("verify_costs", verify_costs, Mapping, expected)
    try:  # a number of positions may be a string, as in a JSON file
        costs = {int(width): float(cost) for width, cost in verify_costs.items()}
        widths, values = np.array(sorted(({1: 1.0} | costs).items())).T
    except (TypeError, ValueError):
        widths = values = np.zeros(1)
    if widths[0] != 1 or values[0] != 1 or not np.all((values > 0) & (values < np.inf)):
        raise ValueError(f"verify_costs: got {dict(verify_costs)}, expected {expected}")
    if widths[-1] < nodes:
        got = f"costs of up to {int(widths[-1])} positions"
        raise ValueError(f"verify_costs: got {got}, expected up to nodes = {nodes}")
    return np.interp(np.arange(1, nodes + 1), widths, values)
