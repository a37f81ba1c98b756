"""Enumerates decoding with token trees over known distributions, in float64 with numpy alone.

One iteration is written as a *program* that asks a `chance` for every random choice: which tokens
the children get, which are accepted, what follows. `outcomes` runs it once for each way in which
these choices can fall, with the probability of that way; `Given` lets given uniforms make them.
Every choice has a key, which names its uniform; by default no two choices share one.

A tree is given by the parents of nodes 1, 2 …; a distribution is a function from a prefix, as in
`toy`. `Plan` holds what known mistakes get wrong.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import toy

DUST = 1e-15  # what rounding leaves of a probability of 0


class Trail:
    """Takes one choice of many: the `taken`-th of those possible, then always the first."""

    def __init__(self, taken: list[int]):
        self.taken, self.prob = taken, 1.0
        self.options: list[int] = []
        self.spans: dict = {}  # what is known of the uniform of each key

    def choose(self, weights, key) -> int:
        """Returns the index at which a uniform falls into `weights`, which sum to 1."""
        low, high = self.spans.get(key, (0.0, 1.0))
        possible, start = [], 0.0
        for index, weight in enumerate(weights):
            span = max(low, start), min(high, start + weight)
            if span[1] - span[0] > DUST:
                possible.append((index, span))
            start += weight
        place = len(self.options)
        if place == len(self.taken):
            self.taken.append(0)
        self.options.append(len(possible))
        index, span = possible[self.taken[place]]
        self.prob *= (span[1] - span[0]) / (high - low)
        self.spans[key] = span
        return index

    def flip(self, prob: float, key) -> bool:
        """Returns whether a uniform lies below `prob`."""
        return self.choose((prob, 1 - prob), key) == 0


def outcomes(config: Callable):
    """Yields (what `config(chance)` returns, probability) for every outcome of its choices."""
    taken: list[int] = []
    while True:
        trail = Trail(taken)
        yield config(trail), trail.prob
        while taken and taken[-1] + 1 == trail.options[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        taken[-1] += 1


class Given:
    """Choices made by uniforms that are given by key."""

    def __init__(self, uniforms: Callable):
        self.uniforms = uniforms

    def choose(self, weights, key) -> int:
        return toy.invert(np.asarray(weights), self.uniforms(key))

    def flip(self, prob: float, key) -> bool:
        return self.uniforms(key) < prob


@dataclasses.dataclass(frozen=True)
class Plan:
    """How trees are drafted and verified.

    Attributes:
      parents: the parents of nodes 1, 2 …
      kind: how children are chosen, by the package's names.
      verify: from (tree, chance), the tokens to commit, the last of which is no drafted one.
      origins: the drafter of each of nodes 1, 2 …; (): all by the first.
      budget: the number of drafted nodes that are there; None: all.
      node_outcomes: from (tree, node), the distribution that the verifier believes its token was
        drawn from.
      select: from (tree, node, its children), the children that the verifier sees, in its order.
      share: from a key, the key of the uniform that is really used.
      past_eos: whether an EOS has children, and what follows it is committed.
    """

    parents: tuple[int, ...]
    kind: str
    verify: Callable
    origins: tuple[int, ...] = ()
    budget: int | None = None
    node_outcomes: Callable = lambda tree, node: tree.sources[node]
    select: Callable = lambda tree, node, children: children
    share: Callable = lambda key: key
    past_eos: bool = False


class Tree:
    """The tree of one iteration; the children of a node are chosen when they are first asked for.

    Attributes:
      tokens: by node.
      sources: the distribution that each node's token was drawn from; None where it was not drawn.
    """

    def __init__(
        self, plan: Plan, chance, prefix, target, drafters, room: int, eos=frozenset(), noise=None
    ):
        self.plan, self.chance, self.prefix, self.target, self.drafters = (
            plan,
            chance,
            prefix,
            target,
            drafters,
        )
        self.room, self.eos, self.noise = room, eos, noise
        self.tokens: dict[int, int] = {}
        self.sources: dict[int, list | None] = {}
        self.found: dict[int, list[int]] = {}

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the drafted tokens up to `node`, its own included."""
        return (*self.path(self.plan.parents[node - 1]), self.tokens[node]) if node else ()

    def p(self, node: int) -> list[float]:
        """Returns the target's distribution of the token after `node`."""
        return list(self.target((*self.prefix, *self.path(node))))

    def q(self, node: int) -> list[float]:
        """Returns the distribution after the parent of `node` of the drafter that drafts it."""
        origin = self.plan.origins[node - 1] if self.plan.origins else 0
        return list(self.drafters[origin]((*self.prefix, *self.path(self.plan.parents[node - 1]))))

    def flip(self, prob: float, node: int) -> bool:
        return self.chance.flip(
            min(1.0, prob), self.plan.share(("accept", node, len(self.path(node))))
        )

    def following(self, dist, node: int) -> int:
        return self.chance.choose(dist, self.plan.share(("final", node, len(self.path(node)))))

    def children(self, node: int) -> list[int]:
        """Returns the children of `node` that the verifier sees."""
        return self.plan.select(self, node, self.chosen(node))

    def chosen(self, node: int) -> list[int]:
        """Returns the children of `node` that are there, by number."""
        if node not in self.found:
            plan, way = self.plan, self.path(node)
            ended = way and way[-1] in self.eos and not plan.past_eos
            numbers = [
                n for n, parent in enumerate(plan.parents, 1) if parent == node and not ended
            ]
            origins = [plan.origins[n - 1] if plan.origins else 0 for n in numbers]
            for origin in set(origins) if len(way) < self.room else ():
                self._choose([n for n, its in zip(numbers, origins) if its == origin], len(way))
            most = len(plan.parents) if plan.budget is None else plan.budget
            self.found[node] = [n for n in numbers if n <= most and n in self.tokens]
        return self.found[node]

    def _choose(self, numbers: list[int], depth: int) -> None:
        q, kind = self.q(numbers[0]), self.plan.kind
        score = (
            [math.log(x) + self.noise[depth][i] if x else -math.inf for i, x in enumerate(q)]
            if kind == "gumbel"
            else q
        )
        ranked = sorted((x for x in range(len(q)) if q[x]), key=lambda x: (-score[x], x))
        drawn = {"top": 0, "gumbel": 0, "mixed": 1}.get(kind, len(numbers))
        for number, token in zip(numbers[: len(numbers) - drawn], ranked):
            self.tokens[number], self.sources[number] = token, None
        left = [
            0.0 if kind == "mixed" and x in ranked[: len(numbers) - 1] else q[x]
            for x in range(len(q))
        ]
        for number in numbers[len(numbers) - drawn :]:
            if sum(left) == 0:
                break
            dist = norm(left)
            token = self.chance.choose(dist, self.plan.share(("draft", number, depth + 1)))
            self.tokens[number], self.sources[number] = token, dist
            if kind == "drawn":
                left[token] = 0.0


def norm(weights) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def less(r, s, scale: float = 1.0) -> tuple[list[float], float]:
    """Returns norm(max(0, scale · r − s)) and the mass before; r itself without mass."""
    excess = [max(0.0, scale * a - b) for a, b in zip(r, s)]
    mass = sum(excess)
    return (norm(excess), mass) if mass > DUST else (list(r), 0.0)


# --- Verifiers ---


def walk(token_of: Callable) -> Callable:
    """Returns a verifier that goes to all children with the token `token_of(…)`."""

    def verify(tree: Tree, chance) -> tuple[int, ...]:
        here, committed = [0], ()
        while here:
            children = sorted(child for node in here for child in tree.chosen(node))
            children = tree.plan.select(tree, here[0], children)
            token = token_of(tree, here[0], children)
            committed = (*committed, token)
            here = [child for child in children if tree.tokens[child] == token]
        return committed

    return verify


def point(tree, node, children):
    return tree.following(tree.p(node), node)


def gumbel(tree, node, children):
    scores = [
        math.log(x) + g if x else -math.inf
        for x, g in zip(tree.p(node), tree.noise[len(tree.path(node))])
    ]
    return int(np.argmax(scores))


def greedy(tree, node, children):
    return int(np.argmax(tree.p(node)))


def recursive(tree, node, children):
    """Returns recursive rejection; it leaves undrawn children alone, so that it is "mixed" too."""
    r = tree.p(node)
    for child in children:
        if tree.sources[child] is None:
            continue
        s, x = tree.plan.node_outcomes(tree, child), tree.tokens[child]
        if tree.flip(r[x] / s[x], child):
            return x
        r, _ = less(r, s)
    return tree.following(r, node)


def k_sequences(tree, node, children, count: Callable = len):
    """k-SEQ, with k = `count(children)`."""
    p, k = tree.p(node), count(children)
    if not children:
        return tree.following(p, node)
    q = tree.plan.node_outcomes(tree, children[0])
    rho, overlap, beta, some = k_sequence_shares(tuple(p), tuple(q), k)
    for child in children:
        x = tree.tokens[child]
        if tree.flip(p[x] / (rho * q[x]), child):
            return x
    return tree.following(less(p, [a * some / beta if beta else 0.0 for a in overlap])[0], node)


@functools.cache
def k_sequence_shares(p: tuple[float, ...], q: tuple[float, ...], k: int):
    """Returns ρ, min(q, p/ρ), its sum β, and 1 − (1 − β)^k."""

    def shares(rho):
        overlap = [min(b, a / rho) for a, b in zip(p, q)]
        beta = min(1.0, sum(overlap))
        return overlap, beta, 1 - (1 - beta) ** k

    low, high = 1.0, float(k)
    for _ in range(60):
        middle = (low + high) / 2
        _, beta, some = shares(middle)
        low, high = (low, middle) if some <= middle * beta else (middle, high)
    return high, *shares(high)


def traversal(tree, chance, updates: bool = True, scaled: bool = True):
    """Returns traversal verification.

    `updates`: a deleted child changes α. `scaled`: α is in what it leaves.
    """

    def visit(node: int, alpha: float):
        p = tree.p(node)
        for child in tree.children(node):
            s, x = tree.plan.node_outcomes(tree, child), tree.tokens[child]
            below = visit(child, min(1.0, alpha * p[x] / s[x]))
            if below is not None:
                return (x, *below)
            p, mass = less(p, s, alpha if scaled else 1.0)
            if updates:
                alpha = mass / (mass + 1 - alpha) if mass + 1 - alpha > DUST else 1.0
        return (tree.following(p, node),) if not node or tree.flip(alpha, node) else None

    return visit(0, 1.0)


def typical(epsilon: float, delta: float) -> Callable:
    """Returns the verifier that commits the longest path above `toy.typical`'s threshold."""

    def verify(tree: Tree, chance):
        accepted = [0]
        for node in accepted:  # which grows
            dist = np.array(tree.p(node))
            threshold = toy.typical_threshold(dist, epsilon, delta)
            accepted += [
                child for child in tree.children(node) if dist[tree.tokens[child]] > threshold
            ]
        last = min(accepted, key=lambda node: (-len(tree.path(node)), node))
        return (*tree.path(last), tree.following(tree.p(last), last))

    return verify


VERIFIERS = {
    "point": walk(point),
    "gumbel": walk(gumbel),
    "mixed": walk(recursive),
    "recursive": walk(recursive),
    "kseq": walk(k_sequences),
    "traversal": traversal,
}


# --- Distributions of whole sequences ---


def kernel(prefix, target, drafters, plan: Plan, room: int, eos=frozenset(), noise=None) -> dict:
    """Returns one iteration: the probability of each new prefix."""
    result: dict = defaultdict(float)

    def config(chance):
        tree = Tree(plan, chance, prefix, target, drafters, room, eos, noise)
        committed = plan.verify(tree, chance)
        ends = [
            place for place, token in enumerate(committed, 1) if token in eos and not plan.past_eos
        ]
        return committed[: ends[0]] if ends else committed

    for committed, prob in outcomes(config):
        result[(*prefix, *committed)] += prob
    return result


def speculative_distribution(
    target, drafters, plan: Plan, limit: int, eos=frozenset(), iterations: int = 2, noise=None
) -> dict:
    """Returns the distribution of whole sequences after some iterations, continued by `target`.

    `noise` is `[limit, V]`, of absolute positions.
    """
    states = {(): 1.0}
    for _ in range(iterations):
        following: dict = defaultdict(float)
        for prefix, prob in states.items():
            room = limit - len(prefix) - 1
            if room < 0 or set(prefix) & set(eos):
                following[prefix] += prob
                continue
            here = None if noise is None else noise[len(prefix) :]
            for after, share in kernel(prefix, target, drafters, plan, room, eos, here).items():
                following[after] += prob * share
        states = following
    return toy.complete(states, target, limit, eos)


def accepted(target, drafters, plan: Plan, room: int) -> float:
    """Returns E[τ], the drafted tokens that are accepted in the first iteration."""
    return sum(
        prob * (len(after) - 1) for after, prob in kernel((), target, drafters, plan, room).items()
    )


def acceptance(kind: str, verifier: str, p, q, count: int) -> float:
    """Returns the probability that one of `count` children of a node is accepted.

    p and q are the distributions after the node.
    """
    if kind == "top":
        return sum(p[x] for x in sorted(range(len(q)), key=lambda x: -q[x])[:count] if q[x])
    if kind == "mixed":  # y has the distribution p, and is in S with its probability there
        fixed = sorted(range(len(q)), key=lambda x: -q[x])[: count - 1]
        rest = [0.0 if x in fixed else b for x, b in enumerate(q)]
        overlap = map(min, p, norm(rest)) if sum(rest) else ()
        return sum(p[x] for x in fixed if q[x]) + sum(overlap)
    if verifier == "kseq":
        rho, overlap, beta, some = k_sequence_shares(tuple(p), tuple(q), count)
        if beta == 0 or some == 1:
            return some
        # The token that follows may be that of a child that fell; such a child has the distribution
        # `fallen`.
        fallen = [(b - a) / (1 - beta) for a, b in zip(overlap, q)]
        following, _ = less(p, [a * some / beta for a in overlap])
        return some + (1 - some) * sum(
            y * (1 - (1 - x) ** count) for x, y in zip(fallen, following)
        )
    if count == 0 or sum(q) < DUST:
        return 0.0
    overlap, (r, _) = [min(a, b) for a, b in zip(p, q)], less(p, q)
    if kind == "iid":
        return sum(overlap) + (1 - sum(overlap)) * acceptance(kind, verifier, r, q, count - 1)

    def without(x):
        return [0.0 if y == x else b for y, b in enumerate(q)]

    def left(x):
        return norm(without(x)) if sum(without(x)) else without(x)

    rejected_ = [(x, b - a) for x, (a, b) in enumerate(zip(overlap, q)) if b - a > DUST]
    return sum(overlap) + sum(
        share * acceptance(kind, verifier, r, left(x), count - 1) for x, share in rejected_
    )


def coupled_acceptance(p, q, count: int, noise: np.ndarray) -> float:
    """Returns the share of `noise [samples, V]` whose target token is among the `count` best.

    They are the drafter's best.
    """
    with np.errstate(divide="ignore"):
        own = np.argmax(np.log(p) + noise, axis=1)
        best = np.argsort(-(np.log(q) + noise), axis=1)[:, :count]
    return float(np.mean(np.any((best == own[:, None]) & (q[best] > 0), axis=1)))
