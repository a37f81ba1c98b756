"""Drafts by looking ahead: guesses of later tokens that each call of the target improves."""

from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specdec_jax.drafters.continuations import Inputs, find_best, repeat_inputs
from specdec_jax.drafters.tree_levels import Children, Level, draft_children
from specdec_jax.models import arguments
from specdec_jax.speculative.drafter import TreeDrafter
from specdec_jax.speculative.state import DecodeState, Scored
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.trees import MAX_NODES, POINTS, Tree


class LookaheadState(NamedTuple):
    """What `LookaheadDecoding` keeps of each row; −1 where there is nothing.

    Attributes:
      inputs: the encoder's input, from which guesses begin.
      window: the guesses: at `[b, j, w]` that of level j for the token w + 1 + j places after the
        last committed one.
      pool: a ring of n-grams.
      written: how many n-grams were put there.
    """

    inputs: Inputs
    window: Int[Array, "B J W"]
    pool: Int[Array, "B P N"]
    written: Int[Array, " B"]


@flax.struct.dataclass
class LookaheadDecoding(TreeDrafter):
    """A drafter without a model or a text: the target's own guesses of what comes later.

    Besides the tokens that it verifies, each call of the target improves a window of guesses, by
    Jacobi iterations. The window has `ngram` − 1 levels, one for each of the last calls. Level 0,
    the oldest, is a chain of `window` tokens after the last committed one. Each of its tokens is
    followed by the guesses of the later levels for the places after it. The target's most probable
    token after the newest guess completes an n-gram, which is added to a pool. These tokens also
    form the newest level of the next call. Each call verifies the window itself and the last
    `guesses` n-grams of the pool that begin with the last committed token. All this is one tree of
    fixed shape, `tree`.
    (Look-ahead decoding, Fu et al. 2024, arXiv 2402.02057.)

    Guesses depend on committed tokens and on argmaxes alone. A guess that ends the sequence, after
    which nothing can follow, is replaced in the window by a token of the input, as are those that
    are missing.

    Attributes:
      window: W, columns of the window.
      ngram: n, from 2 on.
      guesses: G, the most n-grams that are verified in one call.
      pool: P, the n-grams that are remembered for each row, the latest.
    """

    kinds: ClassVar[Any] = POINTS
    reads_nodes: ClassVar[bool] = True
    varies: ClassVar[bool] = True
    draws: ClassVar[bool] = False

    window: int = flax.struct.field(pytree_node=False, default=7)
    ngram: int = flax.struct.field(pytree_node=False, default=5)
    guesses: int = flax.struct.field(pytree_node=False, default=7)
    pool: int = flax.struct.field(pytree_node=False, default=256)

    def __post_init__(self):
        arguments.keep_integer(self, "window", 1, MAX_NODES - 1)
        arguments.keep_integer(self, "ngram", 2, MAX_NODES)
        arguments.keep_integer(self, "guesses", 1, MAX_NODES - 1)
        arguments.keep_integer(self, "pool", self.window, 2**16)
        if (self.window + self.guesses) * (self.ngram - 1) >= MAX_NODES:
            got = f"{self.window} and guesses {self.guesses} for {self.ngram}-grams"
            expected = f"(window + guesses) · (ngram − 1) below {MAX_NODES}"
            raise ValueError(f"window: got {got}, expected {expected}")

    @property
    def name(self) -> str:
        return "look-ahead decoding"

    @property
    def tree(self) -> Tree:
        """The tree; columns of the window and chains of the pool take turns.

        So where fewer nodes are wanted, some of both are left.
        """
        window, guesses = self.number_nodes()
        parents = np.zeros(1 + window.size + guesses.size, np.int64)
        parents[window[1:]], parents[guesses[1:]] = window[:-1], guesses[:-1]
        parents[window[0, 1:]] = window[0, :-1]
        return Tree(tuple(parents[1:].tolist()))

    def number_nodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the window's nodes `[n − 1, W]`, and of the guesses' `[n − 1, G]`.

        They are by level and column, and by place after the first token and chain.
        """
        order = sorted(
            [*((i, 0) for i in range(self.window)), *((i, 1) for i in range(self.guesses))]
        )
        numbers = 1 + np.arange(len(order) * (self.ngram - 1)).reshape(len(order), -1)
        is_guess = np.array([kind for _, kind in order], bool)
        return numbers[~is_guess].T, numbers[is_guess].T

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> LookaheadState:
        batch = len(tokens)
        return LookaheadState(
            repeat_inputs(inputs, input_lengths, batch),
            jnp.full((batch, self.ngram - 1, self.window), -1, jnp.int32),
            jnp.full((batch, self.pool, self.ngram), -1, jnp.int32),
            jnp.zeros(batch, jnp.int32),
        )

    def draft_tree(
        self,
        draft_state: LookaheadState,
        state: DecodeState,
        num_wanted: Int[Array, " B"],
        max_depth: Int[Array, " B"],
    ) -> tuple[LookaheadState, TreeDraft]:
        batch, tree = len(state.lengths), state.config.tree
        assert isinstance(tree, Tree) and tree.parents == self.tree.parents, "its own tree"
        last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        grams = find_grams(draft_state, last, self.guesses)[..., 1:]
        window = fill_window(draft_state, state)
        numbers = np.concatenate([[0], *(one.ravel() for one in self.number_nodes())])
        parts = last, window.reshape(batch, -1), grams.transpose(0, 2, 1).reshape(batch, -1)
        tokens = jnp.concatenate(parts, axis=1)[:, np.argsort(numbers)]

        def children_of(level: Level, carry: Any):
            assert level.numbers is not None
            return Children(tokens[:, tree.children_of(level.numbers)]), carry

        draft, _ = draft_children(state, num_wanted, max_depth, children_of)
        # A place of the pool without an n-gram is no failure, which −1 would mean.
        return draft_state, draft._replace(tokens=jnp.maximum(draft.tokens, 0))

    def observe(
        self, draft_state: LookaheadState, state: DecodeState, scored: Scored
    ) -> LookaheadState:
        """Moves the window to what follows the committed tokens, and keeps its n-grams."""
        assert scored.nodes is not None
        draft, (nodes, _) = scored.nodes.draft, self.number_nodes()
        fed = jnp.where(draft.valid, draft.tokens, -1)[:, nodes]
        new = jnp.where(draft.valid, scored.nodes.argmax, -1)[:, nodes[-1]]
        levels = jnp.concatenate([fed, new[:, None]], axis=1)
        active = scored.num_new > 0
        complete = jnp.all(levels >= 0, axis=1) & active[:, None]
        after = put_grams(draft_state, levels.transpose(0, 2, 1), complete)
        # A level moves by one token when it becomes older; more tokens move all columns.
        columns = jnp.arange(self.window) + jnp.maximum(scored.num_new - 1, 0)[:, None]
        place = jnp.minimum(columns, self.window - 1)[:, None]
        moved = jnp.take_along_axis(levels[:, 1:], place, axis=2)
        moved = jnp.where((columns < self.window)[:, None], moved, -1)
        return after._replace(window=jnp.where(active[:, None, None], moved, draft_state.window))


def fill_window(draft_state: LookaheadState, state: DecodeState) -> Int[Array, "B J W"]:
    """Returns the window with a token in every place, none of which ends a sequence."""
    inputs, window = draft_state.inputs, draft_state.window
    # A decoder-only target's input is its prompt. The last id of others is mostly an EOS.
    source, lengths = inputs.tokens, inputs.lengths - 1
    if not source.shape[1]:
        source, lengths = state.tokens, state.starts
    levels, columns = (jnp.arange(size) for size in window.shape[1:])
    place = (state.lengths - state.starts)[:, None, None] + levels[:, None] + columns
    place = (place % jnp.maximum(lengths, 1)[:, None, None]).reshape(len(source), -1)
    filler = jnp.take_along_axis(source, place, axis=1).reshape(window.shape)
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[..., None]
    filler = jnp.where(filler < state.config.vocab_size, filler, last)  # another vocabulary's
    for other in (filler, last):
        window = jnp.where((window < 0) | _is_eos(window, state), other, window)
    return window


def _is_eos(ids: Int[Array, "B J W"], state: DecodeState) -> Bool[Array, "B J W"]:
    return jnp.any(ids[..., None] == state.eos_ids[:, None, None], axis=-1)


def find_grams(
    draft_state: LookaheadState, last: Int[Array, "B 1"], count: int
) -> Int[Array, "B {count} N"]:
    """Returns the latest n-grams of the pool that begin with `last`; −1 where there are fewer."""
    pool, written = draft_state.pool, draft_state.written
    slots, size = jnp.arange(pool.shape[1]), pool.shape[1]
    age = (written[:, None] - 1 - slots) % size
    weights = jnp.where(pool[..., 0] == last, size - age, 0)
    _, places = find_best(jnp.broadcast_to(slots, weights.shape), weights, count)
    grams = jnp.take_along_axis(pool, jnp.maximum(places, 0)[..., None], axis=1)
    return jnp.where((places >= 0)[..., None], grams, -1)


def put_grams(
    draft_state: LookaheadState, grams: Int[Array, "B W N"], valid: Bool[Array, "B W"]
) -> LookaheadState:
    """Returns the state with the valid `grams` in the pool, in their order, each only once."""
    pool, written = draft_state.pool, draft_state.written
    later = jnp.triu(jnp.ones((grams.shape[1],) * 2, bool), 1)
    same = jnp.all(grams[:, :, None] == grams[:, None], axis=-1) & valid[:, None]
    valid &= ~jnp.any(same & later, axis=2)
    known = jnp.all(pool[:, :, None] == grams[:, None], axis=-1) & valid[:, None]
    pool = jnp.where(jnp.any(known, axis=2)[..., None], -1, pool)
    order = jnp.cumsum(valid.astype(jnp.int32), axis=1)
    slots = (written[:, None] + order - 1) % pool.shape[1]
    slots = jnp.where(valid, slots, pool.shape[1])
    pool = pool.at[jnp.arange(len(pool))[:, None], slots].set(grams, mode="drop")
    return draft_state._replace(pool=pool, written=written + order[:, -1])
