"""Policies of γ for token trees in pure Python, and decoding with them by enumeration."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import toy
import tree_reference as ref

from specdec_jax.speculative.trees import RANK_SHARES


@dataclasses.dataclass(frozen=True)
class Slow:
    """A policy.

    Attributes:
      start: its state at first.
      budget: from (state, the drafter's distribution after node 0), the most nodes to draft.
      select: as in `ref.Plan`: leaves out what is not drafted.
      update: from (state, tree, committed tokens, budget), the state after an iteration.
    """

    start: Any = None
    budget: Callable = lambda state, q: 99
    select: Callable = lambda tree, node, children: children
    update: Callable = lambda state, tree, committed, budget: state


def dist(
    target, draft, plan: ref.Plan, limit: int, policy: Slow, eos=frozenset(), iterations: int = 2
) -> dict:
    """Returns the distribution of whole sequences after some iterations, continued by `target`."""
    states: dict = {((), policy.start): 1.0}
    for _ in range(iterations):
        following: dict = defaultdict(float)
        for (prefix, state), prob in states.items():
            room = limit - len(prefix) - 1
            if room < 0 or set(prefix) & set(eos):
                following[prefix, state] += prob
                continue
            budget = min(policy.budget(state, draft(prefix)), len(plan.parents))
            here = dataclasses.replace(plan, budget=budget, select=policy.select)
            config = functools.partial(
                _iteration, here, policy, state, prefix, target, draft, room, eos
            )
            for (committed, after), share in ref.outcomes(config):
                following[(*prefix, *committed), after] += prob * share
        states = following
    prefixes: dict = defaultdict(float)
    for (prefix, _), prob in states.items():
        prefixes[prefix] += prob
    return toy.complete(prefixes, target, limit, eos)


def _iteration(plan, policy, state, prefix, target, draft, room, eos, chance):
    tree = ref.Tree(plan, chance, prefix, target, [draft], room, eos)
    committed = plan.verify(tree, chance)
    after = policy.update(state, tree, committed, plan.budget)
    ends = [place for place, token in enumerate(committed, 1) if token in eos]
    return (committed[: ends[0]] if ends else committed), after


def path(tree: ref.Tree, committed) -> list[int]:
    """Returns the nodes that are accepted, node 0 first."""
    nodes = [0]
    for token in committed[:-1]:
        nodes.append(
            next(child for child in tree.children(nodes[-1]) if tree.tokens[child] == token)
        )
    return nodes


def ways(parents) -> dict[int, tuple[int, ...]]:
    """Returns the ranks on the way to each node."""
    result: dict[int, tuple[int, ...]] = {0: ()}
    for node, parent in enumerate(parents, 1):
        result[node] = (*result[parent], sum(other == parent for other in parents[: node - 1]))
    return result


# --- Policies that look back only ---


def heuristic(maximum: int) -> Slow:
    def update(state, tree, committed, budget):
        whole = not tree.children(path(tree, committed)[-1])
        return min(maximum, state + 2) if whole else max(1, state - 1)

    return Slow(2, lambda state, q: state, update=update)


def entropy(maximum: int) -> Slow:
    return Slow(
        budget=lambda state, q: round(maximum - (maximum - 1) * toy_entropy(q) / math.log(len(q)))
    )


def entropy_bound(scale: float, threshold: float) -> Slow:
    def unsure(tree, node):
        return 1 - math.sqrt(scale * toy_entropy(tree.q(node))) < threshold

    return Slow(select=lambda tree, node, children: [] if node and unsure(tree, node) else children)


def confidence(threshold: float) -> Slow:
    return Slow(
        select=lambda tree, node, children: (
            [] if confidence_of(tree, node) < threshold else children
        )
    )


def cost_aware(parents, maximum: int, **numbers) -> Slow:
    slow = SlowCostAware(parents, maximum, **numbers)

    def update(state, tree, committed, budget):
        nodes, examined = path(tree, committed), []
        for node, following in zip(nodes, (*nodes[1:], None)):
            for child in tree.children(node):
                examined.append((slow.ways[child][-1], child == following))
                if child == following:
                    break
        deepest = max(len(slow.ways[node]) for node in range(budget + 1))
        return (*state, (tuple(examined), len(committed) - 1, budget, deepest))

    return Slow((), lambda state, q: slow.wanted(state), update=update)


def confidence_of(tree: ref.Tree, node: int) -> float:
    product = 1.0
    while node:
        product *= tree.q(node)[tree.tokens[node]]
        node = tree.plan.parents[node - 1]
    return product


def toy_entropy(q) -> float:
    return -sum(x * math.log(x) for x in q if x > 0)


class SlowCostAware:
    """Decides what `TreeCostAware` decides, for one row of a past.

    An iteration is (rank of each examined child and whether it was accepted; tokens accepted; nodes
    drafted; the deepest of them).
    """

    def __init__(
        self,
        parents,
        maximum,
        cost_ratio=0.1,
        verify_cost=1.0,
        acceptance=0.7,
        weight=4.0,
        memory=0.9,
        minimum=1,
    ):
        self.ways, self.maximum, self.minimum = ways(parents), maximum, minimum
        self.cost, self.node = cost_ratio, (verify_cost - 1) / maximum
        self.acceptance, self.weight, self.memory = acceptance, weight, memory

    def prior_rate(self, rank):
        shares = RANK_SHARES[0].tolist()
        rank = min(rank, len(shares) - 1)
        return shares[rank] / (1 - sum(shares[:rank])) if rank else self.acceptance

    def tokens(self, nodes, rate):
        """What the first `nodes` nodes are expected to add, `rate` being that of a rank."""

        def share(rank):
            return rate(rank) * math.prod(1 - rate(other) for other in range(rank))

        return sum(math.prod(map(share, self.ways[node])) for node in range(1, nodes + 1))

    def time(self, nodes):
        return (
            self.cost * max(len(self.ways[node]) for node in range(nodes + 1)) + self.node * nodes
        )

    def wanted(self, past) -> int:
        every = range(self.maximum + 1)
        tokens = self.weight * max(
            (1 + self.tokens(n, self.prior_rate)) / (1 + self.time(n)) for n in every
        )
        time, seen, kept = self.weight, defaultdict(float), defaultdict(float)
        for examined, accepted, nodes, deepest in past:
            tokens, time = tokens * self.memory + accepted + 1, time * self.memory + 1
            time += self.cost * deepest + self.node * nodes
            for counts in (seen, kept):
                for rank in counts:
                    counts[rank] *= self.memory
            for rank, was_accepted in examined:
                seen[rank] += 1
                kept[rank] += was_accepted

        def rate(rank):
            return (kept[rank] + self.weight * self.prior_rate(rank)) / (seen[rank] + self.weight)

        worth = [self.tokens(n, rate) - tokens / time * self.time(n) for n in every]
        return max(self.minimum, worth.index(max(worth)))
