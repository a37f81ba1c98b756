"""The rows of one decode state: inputs are prefilled ahead, and take the places of done rows.

Rows that are done are overwritten in place, or wait until all others are done and a whole batch
takes their places. Inputs are prefilled together in one of two numbers, so that few shapes compile.
`continuous_batching.py` decodes with them.
"""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.cpu.packed_weights import can_pack, put_rows
from specdec_jax.backends.sharding import ShardingRules, constrain_sharding, row_multiple
from specdec_jax.decoding.request import Plan
from specdec_jax.decoding.results import read_arrays, read_state
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.strategy import Committed, prefill

# A quarter of a state's inputs, but at least 4, is prefilled together and ahead: one alone would
# cost twice as much.
_AHEAD, _LEAST_AHEAD = 4, 4
# A whole batch is prefilled ahead unless it takes more than half a gigabyte.
_MOST_AHEAD = 1 << 29
# The host looks when a quarter of the rows is done: each look costs, and so does each row that
# waits.
_PARTS = 4
# A queue for continuous batching has at least 4 times the inputs of a state, since its last rows
# decode alone.
LEAST = 4
# Continuous batching takes an eighth more iterations than rows that are always busy. With the CPU's
# own kernels it pays where a batch takes 24 more than that: it saves what iterations have in
# common, above all reading weights, and costs prefills of fewer inputs, and copies. Estimated from
# steps and jobs of the bundled target on two cores of an Intel Xeon.
_CONTINUOUS, _WORTH = 1.125, 24


class Prefilled(NamedTuple):
    """Rows that were prefilled together, of which some wait for a place.

    Attributes:
      state: the state of all of them.
      waiting: for each that waits its row of `state` and its row of the request.
      total: how many waited at first.
    """

    state: DecodeState
    waiting: collections.deque[tuple[int, int]]
    total: int


class Rows:
    """The rows of one state for inputs of one padded length.

    Attributes:
      plan: the checked arguments; a drafter that learns may be replaced.
      waits: whether rows that are done wait until all are.
      state: the state; None before the first rows have their places.
      owners: the request's row in each row of the state, or −1.
      starts: number of tokens in each row's start token and prefix.
    """

    def __init__(
        self,
        plan: Plan,
        size: int,
        width: int,
        numbers: list[int],
        waits: bool,
        caches: tuple[Any, ...] = (),
    ) -> None:
        """Prepares to decode `numbers`, padded to `width`, `size` together.

        `caches`: what `take_caches` returned of a state that is no longer needed.
        """
        self.plan, self.waits, self._size, self._width = plan, waits, size, width
        total, multiple = size * plan.samples, row_multiple(plan.network.rules)
        self._part = max(1, total // _PARTS)
        self._ahead = min(size, -(-max(_LEAST_AHEAD, size // _AHEAD) // multiple) * multiple)
        self._layers = _find_unfed(plan, size, width) if total > 1 else ()
        self._caches = caches if _shapes(caches) == _shapes(self._layers) else ()
        self._shared: tuple[bool, ...] | None = None
        self._queue = collections.deque(numbers)
        self._ready: collections.deque[Prefilled] = collections.deque()
        self._batch_bytes = 0
        self._calls: list[int] = []  # of each row of a batch whose rows wait
        self._prefixes = np.repeat(plan.prefix_lengths, plan.samples)
        self.state: DecodeState | None = None
        self.owners, self.starts = np.full(total, -1), np.ones(total, np.int32)

    @property
    def left(self) -> bool:
        """Whether inputs have no places yet."""
        return bool(self._queue or self._ready)

    @property
    def busy(self) -> bool:
        """Whether rows are decoded."""
        return bool(np.any(self.owners >= 0))

    @property
    def most(self) -> np.int32:
        """The number of done rows at which the loop is to end.

        `generate` looks for stop strings every few iterations of a row. For the same statistics,
        rows must begin at such a moment.
        """
        early = self.left and not (self.plan.stop or self.waits)
        return np.int32(self._part if early else len(self.owners))

    def prefill_ahead(self) -> None:
        """Prefills the next inputs if few are ready, but no whole batch of much memory."""
        if self.waits and self._batch_bytes > _MOST_AHEAD:
            return
        if self._queue and sum(len(one.waiting) for one in self._ready) < self._part:
            self._prefill_next()

    def fill(self) -> DecodeState:
        """Gives the next inputs their places; returns the state, which the loop may overwrite."""
        free = np.all if self.waits else np.any
        while self.left and free(self.owners < 0):
            if not self._ready:
                if self.waits:  # nothing of the state is needed but the memory of its caches
                    self._caches, self.state = self.take_caches(), None
                self._prefill_next()
            fresh, waiting, first = self._ready[0]
            whole = len(fresh.done) == len(self.owners) and len(waiting) == first and not self.busy
            if whole and (len(self.owners) == 1 or self._may_replace_all()):
                self._replace_all(fresh, waiting)
            else:
                self._place(fresh, waiting)
            if not waiting:
                self._ready.popleft()
        assert self.state is not None
        return self.state

    def take_done(self, state: DecodeState) -> tuple[np.ndarray, Committed] | None:
        """Frees the rows of the new state that are done.

        Returns which rows of the request they are, and what they have committed; None if none is.
        """
        self.state = state
        over = np.flatnonzero(read_arrays(state.done) & (self.owners >= 0))
        if not len(over):
            return None
        found = self.owners[over], read_state(state, over)
        self.owners[over] = -1
        if self.waits:
            self._calls += filter(None, found[1].counts.target_calls.tolist())
            if self._calls and not self.busy:
                lost = max(self._calls) - _CONTINUOUS * float(np.mean(self._calls))
                self.waits = lost < _WORTH or len(self._queue) < LEAST * self._size
                self._calls.clear()
        return found

    def take_caches(self) -> tuple[Any, ...]:
        """Returns the target's caches of self-attention for another state; () if there are none."""
        return self.state.target_cache.layers if self._layers and self.state else self._caches

    def _prefill_next(self) -> None:
        count, samples = self._size if self.waits else self._ahead, self.plan.samples
        chosen = [self._queue.popleft() if self._queue else -1 for _ in range(count)]
        rows = (np.array(chosen)[:, None] * samples + np.arange(samples)).reshape(-1)
        waiting = collections.deque(pair for pair in enumerate(rows.tolist()) if pair[1] >= 0)
        fresh = _start_rows(self.plan, chosen, self._width, bool(self._layers))
        self._ready.append(Prefilled(fresh, waiting, len(waiting)))
        self._batch_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(fresh))

    def _may_replace_all(self) -> bool:
        """Returns whether a whole state may go: not on a mesh, nor a shared table that learns."""
        drafter = self.plan.drafter
        forgets = self.state is None or drafter is None or not drafter.remembers
        return forgets and self.plan.network.rules is None

    def _replace_all(self, fresh: DecodeState, waiting: collections.deque) -> None:
        """Makes `fresh` the state. Caches of self-attention stay: new memory takes long to get."""
        sources, rows = np.array(waiting).T
        waiting.clear()
        self.owners[sources], self.starts[sources] = rows, self._prefixes[rows]
        if self._layers:
            fresh = _replace_layers(fresh, self._find_caches())
        self.state = fresh

    def _find_caches(self) -> tuple[Any, ...]:
        """Returns the caches that a fresh state lacks: those of the state before, or new ones."""
        caches, self._caches = self.take_caches() or _empty_layers(self._layers), ()
        return caches

    def _place(self, fresh: DecodeState, waiting: collections.deque) -> None:
        """Copies rows of `fresh` to places that are free."""
        rules, total = self.plan.network.rules, len(self.owners)
        if self._shared is None:
            self._shared = _find_shared(self.plan, self._width, bool(self._layers))
        if self.state is None:
            layers = self._find_caches() if self._layers else ()
            self.state = _make_done_rows(fresh, layers, total, self._shared, rules)
        free = np.flatnonzero(self.owners < 0)[: len(waiting)]
        sources, rows = np.array([waiting.popleft() for _ in free]).T
        self.owners[free], self.starts[free] = rows, self._prefixes[rows]
        moves = np.zeros((2, len(fresh.done)), np.int32)  # always of one shape, which compiles
        moves[:, : len(free)] = sources, free
        count = np.int32(len(free))
        self.state = _place_rows(self.state, fresh, *moves, count, self._shared, rules)


def _find_unfed(plan: Plan, size: int, width: int) -> tuple[Any, ...]:
    """Returns the shapes of the target's caches that `_start_rows` can leave out; () if none.

    They are those of self-attention where the target has been fed nothing by then, and its cache
    can be `with_layers` of another. To make empty ones for every input, and to copy them, would
    take a sixth of a job's time.
    """
    whole = plan.arguments([-1] * size, width)
    if whole[-1].tokens.shape[1] > 1:
        return ()
    cache = prefill.eval_shape(*whole).target_cache
    return cache.layers if hasattr(cache, "with_layers") else ()


def _shapes(layers: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(layers)]


def _find_shared(plan: Plan, width: int, unfed: bool) -> tuple[bool, ...]:
    """Returns which leaves of `_start_rows` all rows share: tables over positions or ids."""
    start = _prefill_unfed if unfed else prefill
    counts = [count * row_multiple(plan.network.rules) for count in (2, 3)]
    two, three = (
        jax.tree.leaves(start.eval_shape(*plan.arguments([-1] * count, width))) for count in counts
    )
    return tuple(a.shape == b.shape for a, b in zip(two, three, strict=True))


def _start_rows(plan: Plan, numbers: list[int], width: int, unfed: bool) -> DecodeState:
    """Prefills inputs; `unfed`: without the target's caches of self-attention."""
    return (_prefill_unfed if unfed else prefill)(*plan.arguments(numbers, width))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _prefill_unfed(*arguments: Any) -> DecodeState:
    return _replace_layers(arguments[2].strategy.prefill(*arguments), ())


def _replace_layers(state: DecodeState, layers: tuple[Any, ...]) -> DecodeState:
    return dataclasses.replace(state, target_cache=state.target_cache.with_layers(layers))


def _empty_layers(shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes caches of self-attention."""
    return jax.tree.map(lambda layer: jnp.zeros(layer.shape, layer.dtype), shapes)


@functools.partial(jax.jit, static_argnames=("total", "shared", "rules"), donate_argnames="layers")
def _make_done_rows(
    fresh: DecodeState,
    layers: tuple[Any, ...],
    total: int,
    shared: tuple[bool, ...],
    rules: ShardingRules | None,
) -> DecodeState:
    """Returns a state of `total` rows that are done, in all else like the rows of `fresh`.

    `layers`: what `fresh` lacks.
    """
    leaves, structure = jax.tree.flatten(fresh)
    copied = np.arange(total) % len(fresh.done)
    state = structure.unflatten(
        leaf if same else leaf[copied] for leaf, same in zip(leaves, shared)
    )
    state = dataclasses.replace(state, done=jnp.ones(total, bool))
    return constrain_sharding(_replace_layers(state, layers) if layers else state, rules)


@functools.partial(jax.jit, static_argnames=("shared", "rules"), donate_argnames="state")
def _place_rows(
    state: DecodeState,
    fresh: DecodeState,
    sources: np.ndarray,
    targets: np.ndarray,
    count: np.int32,
    shared: tuple[bool, ...],
    rules: ShardingRules | None,
) -> DecodeState:
    """Returns `state` with the first `count` of the rows `sources` of `fresh` put at `targets`.

    They are written in place, one row after the other: XLA's scatter on a CPU copies number by
    number. Caches that `fresh` lacks keep what they have of earlier rows, which no reader sees: it
    lies past the new row's length.
    """
    new, structure = jax.tree.flatten(fresh)
    unfed = structure != jax.tree.structure(state)
    layers = state.target_cache.layers if unfed else ()
    old = jax.tree.leaves(_replace_layers(state, ()) if unfed else state)
    own = [index for index, same in enumerate(shared) if not same]
    wide = [index for index in own if rules is None and _is_cache(old[index])]
    for index in wide:
        old[index] = put_rows(old[index], new[index], sources, targets, count)
    own = [index for index in own if index not in wide]

    def put(number: jax.Array, rows: list[jax.Array]) -> list[jax.Array]:
        take = functools.partial(
            jax.lax.dynamic_index_in_dim, index=sources[number], keepdims=False
        )
        return [
            jax.lax.dynamic_update_index_in_dim(row, take(new[index]), targets[number], 0)
            for row, index in zip(rows, own)
        ]

    placed = jax.lax.fori_loop(0, count, put, [old[index] for index in own])
    for index, rows in zip(own, placed):
        old[index] = rows
    whole = structure.unflatten(old)
    return constrain_sharding(_replace_layers(whole, layers) if unfed else whole, rules)


def _is_cache(rows: jax.Array) -> bool:
    """Returns whether the CPU's own kernels copy rows of an array: those of caches are large."""
    return rows.ndim > 2 and rows.dtype == np.float32 and can_pack(rows.dtype)
