"""Drafted trees for the compiled verifiers, beside the reference's trees with the same uniforms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import toy
import tree_reference as ref
from enumerations import DRAFTS, TARGETS, as_distribution

from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.tree_growth import choose_children
from specdec_jax.speculative.tree_verifiers import TreeRandomness
from specdec_jax.speculative.trees import Tree

V = 4
SECOND = np.array([[2, 6, 4, 4], [7, 3, 1, 5], [1, 0, 8, 7], [3, 9, 0, 4]]) / 16


def distribution_of(table):
    """A distribution that depends on the prefix, with the rows of `table`."""
    return lambda prefix: table[(len(prefix) + sum(prefix)) % len(table)]


@dataclasses.dataclass
class Case:
    """Holds one row: distributions by prefix, uniforms, noise by depth, cut branches."""

    target: object
    drafters: list
    uniforms: dict
    noise: np.ndarray
    budget: int
    room: int

    def decide(self, plan: ref.Plan, eos: int) -> tuple[int, ...]:
        """Returns what the reference commits."""
        chance = ref.Given(lambda key: self.uniforms[key[0]][key[1]])
        plan = dataclasses.replace(plan, budget=self.budget)
        tree = ref.Tree(plan, chance, (), self.target, self.drafters, self.room, {eos}, self.noise)
        return plan.verify(tree, chance)


def cases(tree: Tree, size: int, seed: int = 0) -> list[Case]:
    """Returns rows for each pair of distributions, with uniforms of the grid, and two drafters."""
    rng, result = np.random.default_rng(seed), []

    # What is left of a distribution is cut at any fractions, thirteenths among them.
    def grid(*shape):
        return (rng.integers(13, size=shape) + 0.3183) / 13

    zeros = {
        "draft": 0.1,
        "accept": 0.2,
        "final": 0,
    }  # after k-SEQ some weights are dust, which a 0 would draw
    for name in DRAFTS:
        for _ in range(size):
            drafters = [distribution_of(DRAFTS[name]), distribution_of(SECOND)]
            uniforms = {
                key: np.where(rng.random(tree.size) < share, 0, grid(tree.size))
                for key, share in zeros.items()
            }
            noise = rng.gumbel(size=(tree.depth + 1, V)).astype(np.float32)
            cuts = (
                rng.integers(tree.size // 2, tree.size),
                rng.integers(tree.depth // 2, tree.depth + 1),
            )
            result.append(
                Case(distribution_of(TARGETS), drafters, uniforms, noise, *map(int, cuts))
            )
    return result


choose = jax.jit(choose_children, static_argnums=(0, 2))


def drafted(
    kind: str, tree: Tree, rows: list[Case], eos: int, dtype, origins=()
) -> tuple[TreeDraft, Categorical]:
    """Returns the draft that the package's children make, and the target's distributions.

    The draft is made level by level. Both distributions are NaN after nodes that are not there.
    """
    size, batch = tree.size, len(rows)
    tokens, ways = np.full((batch, size), -1, np.int32), [{0: ()} for _ in rows]
    valid, own = np.zeros((batch, size), bool), np.zeros((batch, size), np.int32)
    valid[:, 0] = True
    dists: list[np.ndarray] = []
    for depth in range(tree.depth):
        noise = np.stack([row.noise[depth] for row in rows])
        for origin in sorted({*origins, 0}):
            its = {
                node: [
                    n
                    for n, parent in enumerate(tree.parents, 1)
                    if parent == node and (not origins or origins[n - 1] == origin)
                ]
                for node in tree.inner(depth)
            }
            its = {int(node): children for node, children in its.items() if children}
            if not its:
                continue
            q = np.stack(
                [
                    [row.drafters[origin](way.get(node, ())) for node in its]
                    for row, way in zip(rows, ways)
                ]
            )
            counts = tuple(map(len, its.values()))
            uniforms = np.zeros((batch, len(its), max(counts)))
            for b, row in enumerate(rows):
                for j, children in enumerate(its.values()):
                    uniforms[b, j, : len(children)] = row.uniforms["draft"][children]
            shared = np.broadcast_to(noise[:, None], q.shape).astype(dtype)
            result = np.asarray(
                choose(kind, as_distribution(q, dtype), counts, toy.random_bits(uniforms), shared)
            )
            for j, (node, children) in enumerate(its.items()):
                own[:, children] = len(dists)
                dists.append(np.where(valid[:, [node]], q[:, j], np.nan))
                tokens[:, children] = result[:, j, : len(children)]
                for b, row in enumerate(rows):
                    for child in children:
                        ways[b][child] = (*ways[b].get(node, ()), int(tokens[b, child]))
                        valid[b, child] = (
                            valid[b, node]
                            and tokens[b, child] >= 0
                            and depth < row.room
                            and child <= row.budget
                            and not (node and tokens[b, node] == eos)
                        )
    p = np.stack([[row.target(way[node]) for node in range(size)] for row, way in zip(rows, ways)])
    p[~valid] = np.nan
    branches = tree.branches(batch)
    past = jnp.arange(tree.depth + 1) > branches.depths[..., None]
    branches = branches._replace(
        lines=jnp.where(past, size - 1, branches.lines)
    )  # anything may be there
    draft = TreeDraft(
        jnp.asarray(tokens),
        branches,
        jnp.asarray(valid),
        as_distribution(np.stack(dists, axis=1), dtype),
        jnp.asarray(own),
        jnp.zeros(batch, jnp.int32),
    )
    return draft, as_distribution(p, dtype)


def randomness(rows: list[Case], dtype) -> TreeRandomness:
    uniforms = {key: np.stack([row.uniforms[key] for row in rows]) for key in ("accept", "final")}
    noise = jnp.asarray(np.stack([row.noise for row in rows]), dtype)
    return TreeRandomness(
        jnp.asarray(uniforms["accept"], dtype),
        jnp.asarray(toy.random_bits(uniforms["final"])),
        noise,
    )


def committed(draft: TreeDraft, result) -> list[tuple[int, ...]]:
    """Returns the tokens that each row commits."""
    tokens, (counts, following, path) = np.asarray(draft.tokens), map(np.asarray, result)
    return [
        (*map(int, row[nodes[1 : count + 1]]), int(token))
        for row, count, token, nodes in zip(tokens, counts, following, path)
    ]
