"""Verifiers of token trees: pure functions that choose the accepted path and what follows it.

p is the target's distribution, q the drafter's. Most rules are a walk from node 0: each step finds
one token of distribution p, with the children's help, and goes on to the children that have that
token; where none has it, the token follows the path. Since the token has the distribution p
whatever lies below those children, the output distribution is exactly the target's.
`TreeVerifier.verify` describes the arguments. To verify "exactly" means that the output
distribution is the target's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from specdec_jax.backends.axes import PerRow
from specdec_jax.models import arguments
from specdec_jax.speculative import distributions
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.randomness import draw
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.verifier import BaseVerifier, Settings
from specdec_jax.speculative.verifiers import TYPICAL, take_at, typical_threshold

Nodes = Bool[Array, "B N"]


class TreeVerification(NamedTuple):
    """The outcome of one iteration with a tree.

    Attributes:
      num_accepted: how many drafted tokens are accepted, at most D.
      next_token: the token after them; −1 where the target's distribution contains NaN.
      path: the numbers of the nodes that are accepted by depth, node 0 first; after `num_accepted +
        1` of them, any numbers.
    """

    num_accepted: PerRow
    next_token: PerRow
    path: Int[Array, "B D"]


class TreeRandomness(NamedTuple):
    """The randomness of one iteration with a tree of N nodes.

    Attributes:
      accept: uniforms in [0, 1), by the number of the node that is verified.
      final: random bits, by the number of the node after which a token is drawn.
      noise: standard Gumbel noise of the absolute positions, by depth; None unless the verifier is
        `coupled`.
    """

    accept: Float[Array, "B N"]
    final: UInt32[Array, "B N 2"]
    noise: Float[Array, "B D V"] | None = None


@dataclasses.dataclass(frozen=True)
class TreeVerifier(BaseVerifier):
    """A rule that decides which path of a tree is accepted.

    Attributes:
      verify: the rule above temperature 0, a pure function `(target, draft, kind, random, settings)
        -> TreeVerification`. Its arguments:

          target: p, a `Categorical` over `[B, N, V]`.
          draft: the `TreeDraft`; its distribution may be None unless the verifier
            `needs_draft_probs`.
          kind: how its children were chosen, a key of `trees.CHILDREN`.
          random: the `TreeRandomness`.
          settings: values of its `parameters`; None if it has none.
      The others are those of `BaseVerifier`. At temperature 0 a child is accepted iff it is the
      target's argmax.
    """

    verify: Callable[[Categorical, TreeDraft, str, TreeRandomness, Any], TreeVerification]

    def __post_init__(self):
        super().__post_init__()
        arguments.check_function("verify", self.verify, "target, draft, kind, random, settings")


Step = Callable[[PerRow, Nodes], tuple[PerRow, Nodes]]


def walk(draft: TreeDraft, step: Step) -> TreeVerification:
    """Walks from node 0 to children that have the token that `step` finds, until none has it.

    If children have equal tokens, the row is at all of them, and their children are siblings.

    Args:
      step: takes the number `[B]` of the node that a row is at and which nodes are its children,
        `[B, N]` bool; returns the next token `[B]` and the children that may be accepted.
    """

    def follow(carry: tuple):
        _, here, _ = carry
        at_parent = jnp.take_along_axis(here, jnp.maximum(draft.branches.parents, 0), axis=1)
        children = draft.valid & at_parent & (draft.branches.parents >= 0)
        token, possible = step(_find_first(here), children)
        there = possible & (draft.tokens == token[:, None])
        # A row that has stopped finds the same token again.
        moving = jnp.any(there, axis=1)
        return moving, jnp.where(moving[:, None], there, here), token

    batch, size = draft.tokens.shape
    root = jnp.broadcast_to(jnp.arange(size) == 0, (batch, size))
    start = jnp.ones(batch, bool), root, jnp.zeros_like(draft.tokens[:, 0])
    _, here, token = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), follow, start)
    return _find_end(draft, _find_first(here), token)


def _find_end(draft: TreeDraft, node: PerRow, token: PerRow) -> TreeVerification:
    return TreeVerification(
        take_at(draft.branches.depths, node), token, take_at(draft.branches.lines, node)
    )


def _find_first(nodes: Nodes) -> PerRow:
    """Returns the number of the first True of each row, 0 where there is none."""
    return jnp.argmax(nodes, axis=1).astype(jnp.int32)


def walk_greedy(target_tokens: Int[Array, "B N"], draft: TreeDraft) -> TreeVerification:
    """Verifies at temperature 0: a child is accepted iff it is the target's argmax.

    Args:
      target_tokens: the target's argmax after each node; −1 where its logits contain NaN.
    """
    return walk(draft, lambda node, children: (take_at(target_tokens, node), children))


def verify_points(
    target: Categorical, draft: TreeDraft, kind: str, random: TreeRandomness, settings: Any = None
) -> TreeVerification:
    """Verifies any tree that does not depend on the randomness of this step, exactly.

    Each token is drawn from p; a child is accepted iff it has that token.
    """

    def step(node: jax.Array, children: jax.Array):
        return draw(target.row(node), take_at(random.final, node)), children

    return walk(draft, step)


def verify_coupled(
    target: Categorical, draft: TreeDraft, kind: str, random: TreeRandomness, settings: Any = None
) -> TreeVerification:
    """Verifies by Gumbel coupling, as `verifiers.verify_coupled` does a chain.

    The output is that of plain sampling with the same noise, whatever the tree.
    """

    def step(node: jax.Array, children: jax.Array):
        depth = take_at(draft.branches.depths, node)
        return distributions.argmax(
            take_at(target.logits, node) + take_at(random.noise, depth)
        ), children

    return walk(draft, step)


def verify_recursively(
    target: Categorical,
    draft: TreeDraft,
    kind: str,
    random: TreeRandomness,
    settings: Any = None,
    last: bool = False,
) -> TreeVerification:
    """Verifies by recursive rejection, exactly (Miao et al. 2023, arXiv 2305.09781).

    (Without replacement: Chen et al. 2024, arXiv 2402.12374.) Children are verified one after
    another. With r = p at first and s the distribution that child x was drawn from, which lacks the
    siblings drawn before it, x is accepted iff u < r(x) / s(x); else r becomes norm(max(0, r − s)).
    Where none is accepted, the token is drawn from r. For one child this is
    `verifiers.verify_tokens`.

    Args:
      last: only the last child of each node was drawn, and the others need not be verified (Hu et
        al. 2025, arXiv 2502.18779): whichever has the token that is drawn from r is accepted.
    """

    def step(node: jax.Array, children: jax.Array):
        def examine(carry: tuple):
            left, weights, mass, chosen = carry
            child, some = _find_first(left), jnp.any(left, axis=1)
            token, r = take_at(draft.tokens, child), weights / mass
            s = _draw_distribution(draft, child, kind)
            accepted = some & (
                take_at(random.accept, child) * take_at(s, token) < take_at(r, token)
            )
            residual = jnp.maximum(r - s, 0)
            total = jnp.sum(residual, axis=1, keepdims=True)
            # r ≡ s up to rounding leaves no mass: then r itself is right.
            rejected = (some & ~accepted)[:, None] & (total > 0)
            left &= ~accepted[:, None] & (jnp.arange(left.shape[1]) != child[:, None])
            weights = jnp.where(rejected, residual, weights)
            mass = jnp.where(rejected, total, mass)
            return left, weights, mass, jnp.where(accepted, child, chosen)

        examined = children & _is_last(draft) if last else children
        weights = target.row(node)
        start = examined, weights, jnp.ones_like(weights[:, :1]), jnp.zeros_like(node)
        _, weights, _, chosen = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), examine, start)
        drawn = draw(weights, take_at(random.final, node))
        accepted = chosen > 0
        # A child that was verified and rejected is not accepted, even where no residual was left.
        possible = children & (accepted[:, None] | ~examined)
        return jnp.where(accepted, take_at(draft.tokens, chosen), drawn), possible

    return walk(draft, step)


def _is_last(draft: TreeDraft) -> Nodes:
    """Returns which nodes are the last children of their parents."""
    parents, (batch, size) = draft.branches.parents, draft.tokens.shape
    numbers = jnp.broadcast_to(jnp.arange(size), (batch, size)).astype(parents.dtype)
    last = jnp.zeros_like(parents).at[jnp.arange(batch)[:, None], parents].max(numbers)
    return numbers == jnp.take_along_axis(last, jnp.maximum(parents, 0), axis=1)


def _draw_distribution(draft: TreeDraft, child: PerRow, kind: str) -> Float[Array, "B V"]:
    """Returns the distribution that the token of `child` was drawn from.

    That is its own, which unless `kind` is "iid" lacks the siblings that were chosen from it
    before.
    """
    assert draft.dist is not None
    own = draft.dist.row(take_at(draft.origins, child))
    if kind == "iid":
        return own

    before = (draft.tokens >= 0) & (jnp.arange(draft.tokens.shape[1]) < child[:, None])
    for values in (draft.branches.parents, draft.origins):
        before &= values == take_at(values, child)[:, None]
    batch, size = own.shape
    places = jnp.arange(batch)[:, None], jnp.where(before, draft.tokens, size)
    rest = own.at[places].set(0, mode="drop")
    total = jnp.sum(rest, axis=1, keepdims=True)
    return jnp.where(jnp.any(before, axis=1, keepdims=True) & (total > 0), rest / total, rest)


_HALVINGS = 24


def verify_k_sequences(
    target: Categorical, draft: TreeDraft, kind: str, random: TreeRandomness, settings: Any = None
) -> TreeVerification:
    """Verifies by k-SEQ, for k children that are each drawn from q itself, exactly.

    (SpecTr, Sun et al. 2023, arXiv 2310.15141.) With β(ρ) = Σ min(q, p/ρ) and w = 1 − (1 − β)^k, ρ
    in [1, k] is the least found with w ≤ ρ·β. The first child with u < p(x) / (ρ·q(x)) is accepted,
    which one is with probability w; else the token is drawn from norm(p − min(q, p/ρ)·w/β). A child
    that has that token is accepted too.
    """

    dist = draft.dist
    assert dist is not None

    def step(node: jax.Array, children: jax.Array):
        p, q = target.row(node), dist.row(take_at(draft.origins, _find_first(children)))
        count = jnp.maximum(jnp.sum(children, axis=1, keepdims=True), 1).astype(p.dtype)

        def shares(rho: jax.Array):
            overlap = jnp.minimum(q, p / rho)
            beta = jnp.minimum(jnp.sum(overlap, axis=1, keepdims=True), 1)
            return overlap, beta, -jnp.expm1(count * jnp.log1p(-beta))

        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]):
            low, high = bounds
            middle = (low + high) / 2
            _, beta, some = shares(middle)
            enough = some <= middle * beta
            return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        _, rho = jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.ones_like(count), count))
        overlap, beta, some = shares(rho)
        residual = jnp.maximum(p - overlap * jnp.where(beta > 0, some / beta, 0), 0)
        some_left = jnp.sum(residual, axis=1, keepdims=True) > 0
        some_left &= jnp.any(children, axis=1, keepdims=True)
        drawn = draw(jnp.where(some_left, residual, p), take_at(random.final, node))
        tokens = jnp.maximum(draft.tokens, 0)
        p_child, q_child = (jnp.take_along_axis(dist, tokens, axis=1) for dist in (p, q))
        accepted = children & (random.accept * rho * q_child < p_child)
        return jnp.where(
            jnp.any(accepted, axis=1), take_at(tokens, _find_first(accepted)), drawn
        ), children

    return walk(draft, step)


def verify_traversal(
    target: Categorical, draft: TreeDraft, kind: str, random: TreeRandomness, settings: Any = None
) -> TreeVerification:
    """Verifies a tree from its leaves to its root, exactly (Weng et al. 2025, arXiv 2505.12398).

    On average at least as many tokens are accepted as with `verify_recursively`; for a chain this
    is `verifiers.verify_blocks`. With α = 1 and p' = p at node 0, and s as in `verify_recursively`,
    child x of a node gets α_x = min(1, α · p'(x) / s(x)) and its own p' = p. First children are
    followed down to a leaf, whose path is accepted iff u < α; the next token is then drawn from p'.
    Else the leaf is deleted, and its parent's p' becomes norm(max(0, α·p' − s)), its α becomes Z /
    (Z + 1 − α) with Z the mass before the norm. Then the next child follows, or the parent is a
    leaf.
    """
    tokens, (parents, _, depths, lines) = draft.tokens, draft.branches
    batch, size = tokens.shape
    rows, levels = jnp.arange(batch), lines.shape[2]

    def visit(carry: tuple):
        moving, node, left, alpha, scale, weights = carry
        children = left & (parents == node[:, None])
        enters = jnp.any(children, axis=1)
        moving &= enters | (node > 0) & ~(take_at(random.accept, node) < take_at(alpha, node))
        child = jnp.where(enters, _find_first(children), node)
        above = jnp.maximum(take_at(parents, child), 0)
        level, token = take_at(depths, above), take_at(tokens, child)
        here, s = take_at(weights, level), _draw_distribution(draft, child, kind)
        # `weights` are p' times α / scale.
        a, factor = take_at(alpha, above), take_at(scale, above)
        entered = jnp.minimum(1, factor * (take_at(here, token) / take_at(s, token)))

        excess = jnp.maximum(factor[:, None] * here - s, 0)
        mass = jnp.sum(excess, axis=1)
        total, some = mass + 1 - a, mass > 0
        left_alpha = jnp.where(total == 0, 1, mass / jnp.where(total == 0, 1, total))
        left_scale = jnp.where(some, 1 / total, factor * left_alpha)

        number = jnp.where(moving, jnp.where(enters, child, above), size)

        def put(values: jax.Array, new: jax.Array):
            return values.at[rows, number].set(jnp.where(enters, entered, new), mode="drop")

        dist = jnp.where(enters[:, None], target.row(child), jnp.where(some[:, None], excess, here))
        slot = jnp.where(moving, level + enters.astype(level.dtype), levels)
        return (
            moving,
            jnp.where(moving, number, node),
            left & (jnp.arange(size) != child[:, None]),
            put(alpha, left_alpha),
            put(scale, left_scale),
            weights.at[rows, slot].set(dist, mode="drop"),
        )

    zeros, active = jnp.zeros_like(tokens[:, 0]), jnp.ones(batch, bool)
    first = target.row(zeros)
    weights = jnp.zeros((batch, levels, first.shape[1]), first.dtype).at[:, 0].set(first)
    ones = jnp.ones((batch, size), first.dtype)
    # A node where p has NaN is a leaf: a token that plain decoding would fail after must not become
    # rarer by what follows it.
    sound = jnp.isfinite(target.log_normalizer)[rows[:, None], jnp.maximum(parents, 0)]
    left = draft.valid & (parents >= 0) & sound
    start = active, zeros, left, ones, ones, weights
    _, node, *_, weights = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), visit, start)
    return _find_end(
        draft, node, draw(take_at(weights, take_at(depths, node)), take_at(random.final, node))
    )


def verify_typical(
    target: Categorical, draft: TreeDraft, kind: str, random: TreeRandomness, settings: Settings
) -> TreeVerification:
    """Verifies by typical acceptance, as `verifiers.verify_typical` does a chain; lossy.

    Of the paths whose tokens all are accepted, the longest one is taken, of equals the one whose
    last node comes first.
    """
    above, lines = jnp.maximum(draft.branches.parents, 0), draft.branches.lines
    rows, tokens = jnp.arange(len(above))[:, None], jnp.maximum(draft.tokens, 0)
    prob = jnp.exp(target.logits[rows, above, tokens] - target.log_normalizer[rows, above])
    accepted = draft.valid & (prob > typical_threshold(target, settings)[rows, above])
    of_line = jax.vmap(lambda values, line: values[line])(accepted, lines)
    past = jnp.arange(lines.shape[2]) > draft.branches.depths[..., None]
    whole = jnp.all(of_line | past | (lines == 0), axis=2)
    node = jnp.argmax(jnp.where(whole, draft.branches.depths, 0), axis=1).astype(jnp.int32)
    return _find_end(draft, node, draw(target.row(node), take_at(random.final, node)))


_KNOWN = (
    TreeVerifier("point", verify_points, needs_draft_probs=False),
    TreeVerifier("gumbel", verify_coupled, needs_draft_probs=False, coupled=True),
    TreeVerifier("mixed", functools.partial(verify_recursively, last=True)),
    TreeVerifier("recursive", verify_recursively),
    TreeVerifier("kseq", verify_k_sequences),
    TreeVerifier("traversal", verify_traversal, has_rate=False),
    TreeVerifier("typical", verify_typical, **TYPICAL),
)
TREE_VERIFIERS: dict[str, TreeVerifier] = {verifier.name: verifier for verifier in _KNOWN}
