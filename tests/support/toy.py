"""Enumerates speculative decoding over known distributions, in float64 with numpy alone.

A *distribution* is a function from a prefix (tuple of ids, without the start token) to the
probabilities `[V]` of the next id. `enumerate_iteration` returns one iteration as a distribution
over committed tokens: it visits every draft, every acceptance outcome and every final token with
its probability; nothing is sampled. `Verifier` decides what is accepted; `Rule` holds what the
known mistakes get wrong.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import numpy as np

Prefix = tuple[int, ...]
DistributionOf = Callable[[Prefix], np.ndarray]


def adjusted_probs(
    logits, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """Returns probabilities `[..., V]` by sorting: temperature, then top-k, then top-p.

    Ties with the last id kept stay.
    """
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(logits.shape[-1])[np.argmax(logits, axis=-1)]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    descending = -np.sort(-scaled, axis=-1)
    if top_k:
        scaled = np.where(
            scaled >= descending[..., [min(top_k, logits.shape[-1]) - 1]], scaled, -np.inf
        )
        descending = -np.sort(-scaled, axis=-1)
    if top_p < 1:
        mass = np.cumsum(np.exp(descending), axis=-1)
        last = np.sum(mass < top_p * mass[..., -1:], axis=-1, keepdims=True)
        scaled = np.where(scaled >= np.take_along_axis(descending, last, axis=-1), scaled, -np.inf)
    weights = np.exp(scaled)
    return weights / weights.sum(axis=-1, keepdims=True)


def table_distribution(vocab: int, seed: int, zeros: float = 0.0) -> DistributionOf:
    """Returns a distribution that depends on the whole prefix.

    After each prefix about a share `zeros` of the ids has probability 0.
    """
    table: dict[Prefix, np.ndarray] = {}

    def dist(prefix: Prefix) -> np.ndarray:
        if prefix not in table:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            weights = rng.exponential(size=vocab) * (rng.random(vocab) >= zeros)
            weights[rng.integers(vocab)] += 0.1
            table[prefix] = weights / weights.sum()
        return table[prefix]

    return dist


def processed(dist: DistributionOf, **adjustments) -> DistributionOf:
    """Returns `dist` after temperature, top-k or top-p."""
    with np.errstate(divide="ignore"):
        return lambda prefix: adjusted_probs(np.log(dist(prefix)), **adjustments)


def one_hot(dist: DistributionOf) -> DistributionOf:
    """Returns a distribution with all mass on the most probable id."""
    return lambda prefix: np.eye(len(dist(prefix)))[np.argmax(dist(prefix))]


def residual(p: np.ndarray, q: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Returns norm(max(0, scale · p − q)), or p if nothing is left."""
    weights = np.maximum(scale * p - q, 0)
    return weights / weights.sum() if weights.sum() > 0 else p


def ratio(p: np.ndarray, q: np.ndarray, x: int) -> float:
    """Returns min(1, p(x)/q(x)), the probability that a uniform in [0, 1) lies below p(x)/q(x)."""
    return min(1.0, p[x] / q[x]) if q[x] > 0 else float(p[x] > 0)


@dataclasses.dataclass(frozen=True)
class Verifier:
    """Decides how many drafted ids are accepted and what follows.

    It is given n + 1 distributions p, n distributions q and n drafted ids x.

    Attributes:
      accept_probs: from (p, q, x), n numbers h: position i is accepted if and only if its uniform
        is below h_i.
      following: from (p, q, x, τ), the distribution of the next token for τ < n; after n accepted
        ids it is p.
      largest: whether τ is the largest position that is accepted, whatever stands before it; else
        it is the number of leading ones.
    """

    accept_probs: Callable
    following: Callable
    largest: bool = False

    def outcomes(self, p, q, x) -> list[tuple[float, np.ndarray]]:
        """Returns the probability and the next token's distribution for τ = 0 … n.

        The probability is over the uniforms.
        """
        heights = self.accept_probs(p, q, x)
        rejected_ = [1 - h for h in heights]
        results = []
        for tau in range(len(x) + 1):
            if self.largest:
                prob = float(np.prod(rejected_[tau:])) * (heights[tau - 1] if tau else 1.0)
            else:
                prob = float(np.prod(heights[:tau])) * (rejected_[tau] if tau < len(x) else 1.0)
            results.append((prob, self._dist(p, q, x, tau)))
        return results

    def decide(self, p, q, x, uniforms, final_uniforms) -> tuple[int, int]:
        """Returns (τ, next id) for given uniforms.

        `final_uniforms` has one number for each place of the next id.
        """
        accepted = [u < h for u, h in zip(uniforms, self.accept_probs(p, q, x))]
        if self.largest:
            tau = max((i for i, yes in enumerate(accepted, 1) if yes), default=0)
        else:
            tau = accepted.index(False) if False in accepted else len(x)
        return tau, invert(self._dist(p, q, x, tau), final_uniforms[tau])

    def _dist(self, p, q, x, tau):
        return self.following(p, q, x, tau) if tau < len(x) else p[tau]


def invert(weights: np.ndarray, uniform: float) -> int:
    """Returns the id at `uniform` of the cumulated weights.

    With more than 128 ids the block of 128 is chosen first, and then, with the same uniform, the id
    inside it.
    """
    if len(weights) > 128:
        blocks = [weights[start : start + 128] for start in range(0, len(weights), 128)]
        block = invert(np.array([block.sum() for block in blocks]), uniform)
        return 128 * block + invert(blocks[block], uniform)
    goal, total = uniform * weights.sum(), 0.0
    for y in np.flatnonzero(weights):
        total += weights[y]
        if total > goal:
            return int(y)
    return int(np.flatnonzero(weights)[-1])


def random_bits(uniform) -> np.ndarray:
    """Returns the uint32 bits `[..., 2]` with which `draw` takes the id of `invert`."""
    word = np.floor(np.asarray(uniform, np.float64) * 2**32).astype(np.uint32)
    return np.stack([word, word], axis=-1)


def block_weights(p, q, x) -> list[float]:
    """Returns π_0 … π_n of block verification."""
    weights = [1.0]
    for i, token in enumerate(x):
        rate = p[i][token] / q[i][token] if q[i][token] > 0 else float(p[i][token] > 0)
        weights.append(min(1.0, weights[-1] * rate))
    return weights


def block_accept_probs(p, q, x) -> list[float]:
    """Returns h_1 … h_n of block verification: h_i = S_i / (S_i + 1 − π_i), h_n = π_n."""
    weights, heights = block_weights(p, q, x), []
    for i in range(1, len(x)):
        excess = np.maximum(weights[i] * p[i] - q[i], 0).sum()
        total = excess + 1 - weights[i]
        heights.append(float(excess / total) if total > 0 else 1.0)
    return heights + weights[-1:] if len(x) else []


def rejection_accept_probs(p, q, x) -> list[float]:
    """Returns p(x) / (M q(x)) with M = max p/q over the ids with p > 0; 0 where M is infinite."""
    heights = []
    for here, there, token in zip(p, q, x):
        inverse = min(there[y] / here[y] for y in np.flatnonzero(here))
        heights.append(min(1.0, here[token] * inverse / there[token]) if there[token] > 0 else 0.0)
    return heights


def typical_threshold(p: np.ndarray, epsilon: float, delta: float) -> float:
    """Returns min(ε, δ · exp(−H(p)))."""
    valid = p[p > 0]
    return min(epsilon, delta * float(np.exp(np.sum(valid * np.log(valid)))))


TOKEN = Verifier(
    accept_probs=lambda p, q, x: [ratio(*dists) for dists in zip(p, q, x)],
    following=lambda p, q, x, tau: residual(p[tau], q[tau]),
)
BLOCK = Verifier(
    accept_probs=block_accept_probs,
    following=lambda p, q, x, tau: residual(p[tau], q[tau], block_weights(p, q, x)[tau]),
    largest=True,
)
REJECTION = Verifier(accept_probs=rejection_accept_probs, following=lambda p, q, x, tau: p[tau])


def lenient(lenience: float) -> Verifier:
    """Returns a verifier with min(1, p / (l q)), otherwise like `TOKEN`."""
    return dataclasses.replace(
        TOKEN, accept_probs=lambda p, q, x: [ratio(a, lenience * b, y) for a, b, y in zip(p, q, x)]
    )


def typical(epsilon: float, delta: float) -> Verifier:
    """Returns a verifier under which x is accepted iff p(x) > min(ε, δ · exp(−H(p)))."""

    def accept_probs(p, q, x):
        return [float(a[y] > typical_threshold(a, epsilon, delta)) for a, y in zip(p, x)]

    return Verifier(accept_probs=accept_probs, following=lambda p, q, x, tau: p[tau])


def coupled(p, x, noise) -> tuple[int, int]:
    """Returns (τ, next id) of Gumbel coupling with noise g `[n + 1, V]`.

    A drafted id is accepted if it is argmax(log p + g).
    """
    with np.errstate(divide="ignore"):
        own = [int(np.argmax(np.log(here) + g)) for here, g in zip(p, noise)]
    tau = next((i for i, token in enumerate(x) if token != own[i]), len(x))
    return tau, own[tau]


def coupled_share(p: np.ndarray, q: np.ndarray) -> float:
    """Returns the probability that argmax(log p + g) = argmax(log q + g).

    It is Σ_j 1 / Σ_i max(p_i/p_j, q_i/q_j).
    """
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1 / np.maximum(p / p[j], q / q[j]).sum() for j in both))


def lenient_argmax(p, x, lenience: float) -> tuple[int, int]:
    """Returns (τ, next id) at T = 0: a drafted id is accepted if p(x) ≥ l · max p.

    For l = 1 it has to be the first of the maxima.
    """
    best = [int(np.argmax(here)) for here in p]
    near = [lenience < 1 and here[token] >= lenience * here.max() for here, token in zip(p, x)]
    tau = next((i for i, token in enumerate(x) if token != best[i] and not near[i]), len(x))
    return tau, best[tau]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Rules of one iteration, by default token verification (Leviathan et al. 2023, Algorithm 1).

    Each field is a place where implementations have been wrong.

    Attributes:
      verifier: another verifier; `accept`, `residual` and the fields after `last` then do not
        count.
      drawn: from the drafter's distribution, the distribution that draft tokens are drawn from.
      node_outcomes: from the drafter's distribution, the distribution that enters the ratio and the
        residual.
      accept: from (p, q, x), the probability that a drafted id is accepted.
      residual: from (p, q), the distribution of the correction.
      keep: from (q, x), whether a drawn id stays in the draft; the first that does not ends the
        draft.
      last: from (q, x), whether the draft ends after a drawn id.
      same_uniform: one acceptance uniform for all positions of an iteration.
      late: number of positions by which a rejection takes effect too late.
      next_iteration: commit the whole draft, and draw the correction at the start of the next
        iteration.
      bonus_shift: number of positions by which the bonus token's distribution is taken too early.
    """

    verifier: Verifier | None = None
    drawn: Callable = lambda q: q
    node_outcomes: Callable = lambda q: q
    accept: Callable = ratio
    residual: Callable = residual
    keep: Callable = lambda q, x: True
    last: Callable = lambda q, x: False
    same_uniform: bool = False
    late: int = 0
    next_iteration: bool = False
    bonus_shift: int = 0


def drafts(prefix: Prefix, draft: DistributionOf, gamma: int, eos: set[int], rule: Rule):
    """Yields (drafted ids, probability) for all drafts after `prefix`.

    A draft ends after γ ids or an EOS, which stays in it.
    """
    if gamma == 0:
        yield (), 1.0
        return
    q = draft(prefix)
    drawn = rule.drawn(q)
    for x in np.flatnonzero(drawn):
        x = int(x)
        if not rule.keep(q, x):
            yield (), drawn[x]
        elif x in eos or rule.last(q, x):
            yield (x,), drawn[x]
        else:
            for rest, prob in drafts((*prefix, x), draft, gamma - 1, eos, rule):
                yield (x, *rest), drawn[x] * prob


def compute_distributions(
    prefix: Prefix,
    drafted: Prefix,
    target: DistributionOf,
    draft: DistributionOf,
    rule: Rule = Rule(),
) -> tuple[list, list]:
    """Returns the target's n + 1 distributions after `prefix` and the drafter's n."""
    befores = [(*prefix, *drafted[:i]) for i in range(len(drafted) + 1)]
    return [target(before) for before in befores], [
        rule.node_outcomes(draft(before)) for before in befores[:-1]
    ]


def expected_accepted(
    target: DistributionOf,
    draft: DistributionOf,
    gamma: int,
    verifier: Verifier,
    eos: set[int] = frozenset(),
) -> float:
    """Returns E[τ] of the first iteration."""
    total = 0.0
    for drafted, prob in drafts((), draft, gamma, eos, Rule()):
        shares = verifier.outcomes(*compute_distributions((), drafted, target, draft), drafted)
        total += prob * sum(tau * share for tau, (share, _) in enumerate(shares))
    return total


def enumerate_iteration(
    prefix: Prefix,
    pending,
    target: DistributionOf,
    draft: DistributionOf,
    gamma: int,
    eos: set[int],
    rule: Rule,
) -> dict:
    """Returns one iteration: the probability of each (new prefix, pending correction).

    `pending` is a distribution as a tuple, or None.
    """
    outcomes: dict = defaultdict(float)

    def commit(committed: Prefix, prob: float, pending=None):
        for length, x in enumerate(committed, 1):
            if x in eos:
                committed, pending = committed[:length], None
                break
        outcomes[(*prefix, *committed), pending] += prob

    if pending is not None:
        for y in np.flatnonzero(pending):
            outcomes[(*prefix, int(y)), None] += pending[y]
        return outcomes
    for drafted, prob in drafts(prefix, draft, gamma, eos, rule):
        if rule.verifier:
            p, q = compute_distributions(prefix, drafted, target, draft, rule)
            for tau, (share, following) in enumerate(rule.verifier.outcomes(p, q, drafted)):
                for y in np.flatnonzero(following) if share else ():
                    commit((*drafted[:tau], int(y)), prob * share * following[y])
            continue
        accepted = 1.0  # probability that everything before position i is accepted
        for i, x in enumerate(drafted):
            before = (*prefix, *drafted[:i])
            p, q = target(before), rule.node_outcomes(draft(before))
            accept = rule.accept(p, q, x)
            still = min(accepted, accept) if rule.same_uniform else accepted * accept
            correction = rule.residual(p, q)
            if rule.next_iteration:
                commit(drafted, prob * (accepted - still), tuple(correction))
            else:
                for y in np.flatnonzero(correction):
                    commit(
                        (*drafted[: i + rule.late], int(y)),
                        prob * (accepted - still) * correction[y],
                    )
            accepted = still
        p = target((*prefix, *drafted[: len(drafted) - rule.bonus_shift]))
        for y in np.flatnonzero(p):
            commit((*drafted, int(y)), prob * accepted * p[y])
    return outcomes


def complete(
    start: dict[Prefix, float], target: DistributionOf, limit: int, eos: set[int]
) -> dict[Prefix, float]:
    """Returns the distribution of whole sequences if `target` continues every prefix of `start`.

    A sequence ends with an EOS or after `limit` ids.
    """
    finished: dict[Prefix, float] = defaultdict(float)
    open_ = dict(start)
    while open_:
        following: dict[Prefix, float] = defaultdict(float)
        for prefix, prob in open_.items():
            if len(prefix) >= limit or (prefix and prefix[-1] in eos):
                finished[prefix] += prob
                continue
            for y, p in enumerate(target(prefix)):
                if p:
                    following[*prefix, y] += prob * p
        open_ = following
    return finished


def speculative_distribution(
    target: DistributionOf,
    draft: DistributionOf,
    gamma: int,
    limit: int,
    eos: set[int],
    rule: Rule = Rule(),
    iterations: int = 2,
) -> dict[Prefix, float]:
    """Returns the distribution of whole sequences after some iterations of speculative decoding.

    `target` continues the rest.

    For any number of iterations it is the target's distribution if and only if each iteration
    preserves that distribution.
    """
    states: dict = {((), None): 1.0}
    for _ in range(iterations):
        following: dict = defaultdict(float)
        for (prefix, pending), prob in states.items():
            wanted = min(gamma, limit - len(prefix) - 1)
            if wanted < 0 or (prefix and prefix[-1] in eos):
                following[prefix, None] += prob
                continue
            for outcome, p in enumerate_iteration(
                prefix, pending, target, draft, wanted, eos, rule
            ).items():
                following[outcome] += prob * p
        states = following
    prefixes: dict[Prefix, float] = defaultdict(float)
    for (prefix, _), prob in states.items():
        prefixes[prefix] += prob
    return complete(prefixes, target, limit, eos)


def total_variation(a: dict, b: dict) -> float:
    """Returns ½ Σ |a − b|."""
    return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in {*a, *b}) / 2


def conditionals(sequences: dict[Prefix, float]):
    """Returns (prefix, probabilities of the next id) for every prefix with mass."""
    masses: dict[Prefix, float] = defaultdict(float)
    for sequence, prob in sequences.items():
        for length in range(len(sequence) + 1):
            masses[sequence[:length]] += prob
    following: dict[Prefix, dict[int, float]] = defaultdict(dict)
    for prefix, mass in masses.items():
        if prefix and masses[prefix[:-1]] > 0:
            following[prefix[:-1]][prefix[-1]] = mass / masses[prefix[:-1]]
    return following.items()
