"""Laws that are known exactly, and speculative decoding enumerated over them; numpy in float64, nothing of the package.

A *law* is a function from a prefix (tuple of ids, without the start token) to the probabilities `[V]` of the next id.
A *kernel* is one iteration as a distribution over what it commits: every draft, every acceptance outcome and every final
token is visited with its probability, nothing is sampled. `Rule` holds what the known mistakes get wrong.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import numpy as np

Prefix = tuple[int, ...]
LawOf = Callable[[Prefix], np.ndarray]


def adjusted_probs(logits, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Probabilities `[..., V]` by sorting: temperature, then top-k, then top-p; ties with the last one kept stay."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(logits.shape[-1])[np.argmax(logits, axis=-1)]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    descending = -np.sort(-scaled, axis=-1)
    if top_k:
        scaled = np.where(scaled >= descending[..., [min(top_k, logits.shape[-1]) - 1]], scaled, -np.inf)
        descending = -np.sort(-scaled, axis=-1)
    if top_p < 1:
        mass = np.cumsum(np.exp(descending), axis=-1)
        last = np.sum(mass < top_p * mass[..., -1:], axis=-1, keepdims=True)
        scaled = np.where(scaled >= np.take_along_axis(descending, last, axis=-1), scaled, -np.inf)
    weights = np.exp(scaled)
    return weights / weights.sum(axis=-1, keepdims=True)


def table_law(vocab: int, seed: int, zeros: float = 0.0) -> LawOf:
    """A law that depends on the whole prefix; about a share `zeros` of the ids has probability 0 after each."""
    table: dict[Prefix, np.ndarray] = {}

    def law(prefix: Prefix) -> np.ndarray:
        if prefix not in table:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            weights = rng.exponential(size=vocab) * (rng.random(vocab) >= zeros)
            weights[rng.integers(vocab)] += 0.1
            table[prefix] = weights / weights.sum()
        return table[prefix]

    return law


def processed(law: LawOf, **adjustments) -> LawOf:
    """`law` after temperature, top-k or top-p."""
    with np.errstate(divide="ignore"):
        return lambda prefix: adjusted_probs(np.log(law(prefix)), **adjustments)


def one_hot(law: LawOf) -> LawOf:
    """All mass on the most probable id."""
    return lambda prefix: np.eye(len(law(prefix)))[np.argmax(law(prefix))]


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm(max(0, p − q)), or p where nothing is left."""
    weights = np.maximum(p - q, 0)
    return weights / weights.sum() if weights.sum() > 0 else p


def ratio(p: np.ndarray, q: np.ndarray, x: int) -> float:
    """min(1, p(x)/q(x)): the probability that a uniform in [0, 1) lies below p(x)/q(x)."""
    return min(1.0, p[x] / q[x]) if q[x] > 0 else float(p[x] > 0)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Token verification (Leviathan et al. 2023, algorithm 1) by default; each field is a place to be wrong.

    Attributes:
      drawn: the law that draft tokens are drawn from, given the drafter's law.
      judged: the law that enters the ratio and the residual, given the drafter's law.
      accept: probability that a drafted id stands, of (p, q, x).
      residual: law of the correction, of (p, q).
      keep: whether a drawn id stays in the draft, of (q, x); the first that does not ends the draft.
      last: whether the draft ends after a drawn id, of (q, x).
      same_uniform: one acceptance uniform for all positions of an iteration.
      late: how many positions late a rejection takes effect.
      next_iteration: commit the whole draft, and draw the correction at the start of the next iteration.
      bonus_shift: how many positions before the right one the bonus token's law is taken.
    """

    drawn: Callable = lambda q: q
    judged: Callable = lambda q: q
    accept: Callable = ratio
    residual: Callable = residual
    keep: Callable = lambda q, x: True
    last: Callable = lambda q, x: False
    same_uniform: bool = False
    late: int = 0
    next_iteration: bool = False
    bonus_shift: int = 0


def drafts(prefix: Prefix, draft: LawOf, gamma: int, eos: set[int], rule: Rule):
    """All (drafted ids, probability) after `prefix`; a draft ends after γ ids or an EOS, which stays in it."""
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


def kernel(prefix: Prefix, pending, target: LawOf, draft: LawOf, gamma: int, eos: set[int], rule: Rule) -> dict:
    """One iteration: probability of each (new prefix, pending correction); `pending` is a law as a tuple, or None."""
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
        stands = 1.0  # probability that everything before position i stands
        for i, x in enumerate(drafted):
            before = (*prefix, *drafted[:i])
            p, q = target(before), rule.judged(draft(before))
            accept = rule.accept(p, q, x)
            still = min(stands, accept) if rule.same_uniform else stands * accept
            correction = rule.residual(p, q)
            if rule.next_iteration:
                commit(drafted, prob * (stands - still), tuple(correction))
            else:
                for y in np.flatnonzero(correction):
                    commit((*drafted[: i + rule.late], int(y)), prob * (stands - still) * correction[y])
            stands = still
        p = target((*prefix, *drafted[: len(drafted) - rule.bonus_shift]))
        for y in np.flatnonzero(p):
            commit((*drafted, int(y)), prob * stands * p[y])
    return outcomes


def complete(start: dict[Prefix, float], target: LawOf, limit: int, eos: set[int]) -> dict[Prefix, float]:
    """Law of whole sequences (up to an EOS or `limit` ids) when every prefix of `start` is continued by `target`."""
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


def speculative_law(
    target: LawOf, draft: LawOf, gamma: int, limit: int, eos: set[int], rule: Rule = Rule(), iterations: int = 2
) -> dict[Prefix, float]:
    """Law of whole sequences after some iterations of speculative decoding, the rest continued by `target`.

    Whatever the number of iterations, it is the target's law if and only if each iteration preserves it.
    """
    states: dict = {((), None): 1.0}
    for _ in range(iterations):
        following: dict = defaultdict(float)
        for (prefix, pending), prob in states.items():
            wanted = min(gamma, limit - len(prefix) - 1)
            if wanted < 0 or (prefix and prefix[-1] in eos):
                following[prefix, None] += prob
                continue
            for outcome, p in kernel(prefix, pending, target, draft, wanted, eos, rule).items():
                following[outcome] += prob * p
        states = following
    prefixes: dict[Prefix, float] = defaultdict(float)
    for (prefix, _), prob in states.items():
        prefixes[prefix] += prob
    return complete(prefixes, target, limit, eos)


def total_variation(a: dict, b: dict) -> float:
    """½ Σ |a − b|."""
    return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in {*a, *b}) / 2


def decide(p, q, drafted, uniforms, final_uniforms) -> tuple[int, int]:
    """Algorithm 1 with given uniforms: (number accepted, next id); n ids drafted, `p [≥ n + 1, V]`, `q [≥ n, V]`.

    `final_uniforms` holds n + 1 or more numbers: the one used is the one at the position of the next id.
    """
    accepted = 0
    for i, x in enumerate(drafted):
        if not uniforms[i] * q[i][x] < p[i][x]:
            break
        accepted += 1
    weights = p[accepted]
    if accepted < len(drafted):
        weights = residual(p[accepted], q[accepted])
    goal, total = final_uniforms[accepted] * weights.sum(), 0.0
    for y in np.flatnonzero(weights):
        total += weights[y]
        if total > goal:
            return accepted, int(y)
    return accepted, int(np.flatnonzero(weights)[-1])
