"""The interface of drafters for beam searches."""

from typing import Any

from jaxtyping import Array, Float, Int

from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.beam_tree import BeamTree
from specdec_jax.speculative.drafter import Drafter


class BeamDrafter(Drafter):
    """A drafter that can draft for a beam search; a subclass defines the first three methods.

    These three are traced.
    """

    def init_beams(
        self,
        inputs: Int[Array, "B L"],
        input_lengths: Int[Array, " B"],
        tokens: Int[Array, "B P"],
        beams: int,
        slots: int,
        positions: int,
        **encoded: Float[Array, "B L D"],
    ) -> Any:
        """Returns the drafter's state before the first iteration of a beam search.

        Args:
          inputs, input_lengths: as for `init`.
          tokens: what the decoder begins with, one row for each input.
          beams: K, beams of each row.
          slots, positions: as for `Network.node_cache`.
          encoded: the target's encoder output, for a drafter that `reads_encoder`.
        """
        raise NotImplementedError

    def draft_beams(
        self, draft_state: Any, state: BeamState, tree: BeamTree
    ) -> tuple[Any, BeamTree]:
        """Adds γ levels of u nodes to the tree of the active beams; `state.config` has γ and u."""
        raise NotImplementedError

    def move_beams(
        self, draft_state: Any, sources: Int[Array, "B M"], starts: Int[Array, " B"]
    ) -> Any:
        """Returns the state after the nodes in the slots `sources` were copied to `starts` on."""
        raise NotImplementedError

    def beam_width(self, beams: int, wanted: int | None) -> int:
        """Returns u, the nodes of each level of the tree: `wanted`, by default 2 · `beams`."""
        return 2 * beams if wanted is None else wanted
