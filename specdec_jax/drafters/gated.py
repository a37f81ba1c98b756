"""Lets a drafter that looks up what follows draft only where its own drafts were accepted."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specdec_jax.drafters.continuations import TableDrafter
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState, Draft, Scored

# The share of tokens that are taken to be accepted after a match of so many ids before the first
# observations, each of which counts for one while this counts for `_WEIGHT`.
_FIRST = (0.2, 0.45, 0.65, 0.75, 0.8, 0.85, 0.9, 0.9)
_WEIGHT = 2.0
# The first tokens of a continuation, which are compared with what is committed.
_COMPARED = 16


class GateState(NamedTuple):
    """The state of a `GatedDrafter`.

    Attributes:
      inner: the state of its drafter.
      examined, accepted: `[B, 8]`, how many tokens of continuations were followed by a committed
        token, and how many of them were equal to it, by the match before them; older ones count
        less.
      ids, match: the last continuation that was found, −1 past its end, and the match before each
        of its tokens, at most 7.
      start: where it begins.
    """

    inner: Any
    examined: Float[Array, "B M"]
    accepted: Float[Array, "B M"]
    ids: Int[Array, "B C"]
    match: Int[Array, "B C"]
    start: Int[Array, " B"]


@flax.struct.dataclass
class GatedDrafter(Drafter):
    """A drafter that drafts a continuation as far as it is likely enough to be accepted.

    In every iteration the inner drafter looks for a continuation, even if none is drafted. The
    committed tokens then tell how much of the continuation was right. So each row learns, without
    drafting, how often tokens are accepted after matches of each length (a match grows by one with
    each token of the continuation). A token is drafted if the product of these shares, from the
    first token of the draft up to it, is at least `least`. (Full information as in HedgeSpec, Liu
    et al. 2025, arXiv 2510.20064.)

    Drafts are point masses, whose length depends on earlier iterations alone.

    Attributes:
      drafter: a drafter that looks up what follows and does not draw, such as a
        `PromptLookupDrafter`, an `NGramDrafter` or `TokenRecycling`.
      least: a token is drafted if it and those before it are expected to be accepted with at least
        this probability. A good value is the time that one more position adds to a target call
        (in calls) times the tokens per call; before a model in a cascade, the model's acceptance
        rate.
      memory: factor by which the observations of an iteration are multiplied at each later one.
    """

    varies: ClassVar[Any] = True
    draws: ClassVar[bool] = False
    reads_encoder: ClassVar[Any] = property(lambda self: self.drafter.reads_encoder)
    needs_target_state: ClassVar[Any] = property(lambda self: self.drafter.needs_target_state)
    reads_states: ClassVar[Any] = property(lambda self: self.drafter.reads_states)
    reads_logits: ClassVar[Any] = property(lambda self: self.drafter.reads_logits)
    remembers: ClassVar[Any] = property(lambda self: self.drafter.remembers)

    drafter: TableDrafter
    least: float = flax.struct.field(pytree_node=False, default=0.1)
    memory: float = flax.struct.field(pytree_node=False, default=0.95)

    def __post_init__(self):
        if isinstance(self.drafter, Drafter):  # else a pytree is being rebuilt
            self._check_inner()
        for name in ("least", "memory"):
            arguments.keep_number(self, name, 0, 1)

    __repr__ = Drafter.__repr__

    @property
    def name(self) -> str:
        return f"gated {self.drafter.name}"

    def _check_inner(self) -> None:
        if not isinstance(self.drafter, TableDrafter) or self.drafter.sampled:
            got = arguments.quote(self.drafter)
            expected = "a drafter that looks up what follows and does not draw"
            raise mismatch_error("drafter", got, expected)

    def check(self, target: LanguageModel) -> None:
        self._check_inner()
        self.drafter.check(target)

    def on(self, network: Network) -> "GatedDrafter":
        inner = self.drafter.on(network)
        assert isinstance(inner, TableDrafter)
        return self if inner is self.drafter else dataclasses.replace(self, drafter=inner)

    def identity(self) -> tuple[list[Any], Any]:
        return [self.drafter.contents, self.least, self.memory], None

    def init(self, *given: Any, **encoded: jax.Array) -> GateState:
        batch = len(given[2])
        zeros = jnp.zeros((batch, len(_FIRST)), jnp.float32)
        none = jnp.full((batch, _COMPARED), -1, jnp.int32)
        start = jnp.zeros(batch, jnp.int32)
        return GateState(self.drafter.init(*given, **encoded), zeros, zeros, none, none, start)

    def read_prefix(self, draft_state: GateState, state: DecodeState, states: Any) -> GateState:
        return draft_state._replace(
            inner=self.drafter.read_prefix(draft_state.inner, state, states)
        )

    def draft(
        self, draft_state: GateState, state: DecodeState, num_wanted: Int[Array, " B"]
    ) -> tuple[GateState, Draft]:
        gamma = state.config.gamma
        found, match = self.drafter.draft_best(
            draft_state.inner, state, jnp.full_like(num_wanted, gamma)
        )
        match = jnp.minimum(match, len(_FIRST) - 1)
        first = _WEIGHT * jnp.array(_FIRST)
        rates = (draft_state.accepted + first) / (draft_state.examined + _WEIGHT)
        reach = jnp.cumprod(jnp.take_along_axis(rates, jnp.maximum(match, 0), axis=1), axis=1)
        worth = jnp.sum((reach >= self.least).astype(jnp.int32), axis=1)
        num_drafted = jnp.minimum(jnp.minimum(found.num_drafted, num_wanted), worth)
        there = jnp.arange(gamma) < found.num_drafted[:, None]
        ids, match = (_pad(jnp.where(there, values, -1)) for values in (found.tokens, match))
        after = draft_state._replace(ids=ids, match=match, start=state.lengths)
        return after, found._replace(num_drafted=num_drafted)

    def observe(self, draft_state: GateState, state: DecodeState, scored: Scored) -> GateState:
        """Compares the continuation with what was committed."""
        inner = self.drafter.observe(draft_state.inner, state, scored)
        start, ids = draft_state.start, draft_state.ids
        # Inside another drafter it may have begun past the committed tokens.
        num_new = jnp.where(start == state.lengths - scored.num_new, scored.num_new, 0)
        places = start[:, None] + jnp.arange(_COMPARED)
        committed = jnp.take_along_axis(
            state.tokens, jnp.minimum(places, state.tokens.shape[1] - 1), axis=1
        )
        known = (ids >= 0) & (jnp.arange(_COMPARED) < num_new[:, None])
        right = jnp.cumprod((known & (ids == committed)).astype(jnp.int32), axis=1)
        before = jnp.pad(right, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        group = jax.nn.one_hot(draft_state.match, len(_FIRST), dtype=jnp.float32)

        def count(which: jax.Array) -> jax.Array:
            return jnp.sum(which.astype(jnp.float32)[..., None] * group, axis=1)

        return draft_state._replace(
            inner=inner,
            examined=self.memory * draft_state.examined + count(known & (before > 0)),
            accepted=self.memory * draft_state.accepted + count(right),
        )


def _pad(values: Int[Array, "B G"]) -> Int[Array, "B C"]:
    """Returns the first `_COMPARED` columns, −1 where there are fewer."""
    values = values[:, :_COMPARED]
    missing = _COMPARED - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, missing)), constant_values=-1)
