"""What drafters made of two drafters share."""

from typing import Any, ClassVar, NamedTuple

import jax

from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState, Scored


class PairState(NamedTuple):
    """The states of the two drafters of a `DrafterPair`."""

    first: Any
    second: Any


class DrafterPair(Drafter):
    """Two drafters as one."""

    parts: tuple[Any, Any]
    number: int = 0  # a static setting

    def tree_flatten(self):
        return self.parts, self.number

    @classmethod
    def tree_unflatten(cls, number: int, parts: Any):
        pair = object.__new__(cls)
        pair.parts, pair.number = tuple(parts), number
        return pair

    # What the base class has as class attributes depends on the parts here.
    reads_encoder: ClassVar[Any] = property(
        lambda self: any(part.reads_encoder for part in self.parts)
    )
    observes: ClassVar[Any] = property(lambda self: any(part.observes for part in self.parts))
    needs_target_state: ClassVar[Any] = property(
        lambda self: any(part.needs_target_state for part in self.parts)
    )

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return tuple(model for part in self.parts for model in part.models)

    def identity(self) -> tuple[list[Any], Any]:
        return [self.number, *(part.contents for part in self.parts)], None

    def check(self, target: LanguageModel) -> None:
        for part in self.parts:
            part.check(target)

    def init(
        self,
        inputs: jax.Array,
        input_lengths: jax.Array,
        tokens: jax.Array,
        slots: int,
        encoded: jax.Array | None = None,
    ) -> PairState:
        return self.begin("init", inputs, input_lengths, tokens, slots, encoded=encoded)

    def begin(self, method: str, *given, encoded: jax.Array | None = None) -> PairState:
        """Returns the states of both drafters, made by their method `init` or `init_tree`."""

        def shared(part: Drafter):
            return {"encoded": encoded} if part.reads_encoder else {}

        return PairState(*(getattr(part, method)(*given, **shared(part)) for part in self.parts))

    def rewind(self, draft_state: PairState, lengths: jax.Array) -> PairState:
        """Forgets what either drafter has cached past `lengths`.

        A drafter whose part begins past the committed tokens cannot see that they were rejected: it
        is told what was drafted before its part as if it were committed, and would take what its
        last draft put there for cached.
        """

        def rewound(part: Drafter, own: Any):
            return part.rewind(own, lengths)

        return PairState(*map(rewound, self.parts, draft_state))

    def observe(self, draft_state: PairState, state: DecodeState, scored: Scored) -> PairState:
        """Passes what the target made of the draft on to those drafters that learn from it."""

        def seen(part: Drafter, own: Any):
            return part.observe(own, state, scored)

        return PairState(*map(seen, self.parts, draft_state))
